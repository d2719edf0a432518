"""Writes a picture as Perfetto's own format, TrackEvent protobuf messages.

The bytes are put together here: no protobuf library is needed.

Every packet is a row of segments: stretches of bytes that stand ready in a pool, such as a
slice's name or its time. Columns say which; `_copy` lays them down one after the other.

Source: protos/perfetto/trace/perfetto_trace.proto of Perfetto; the field numbers stand below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from hocket import compiled
from hocket.deps import ROWS, Kind
from hocket.ir import Array
from hocket.trace.picture import Picture, Track
from hocket.trace.slices import Part, Verb

# TracePacket
_TIMESTAMP, _SEQUENCE, _EVENT, _INTERNED, _FLAGS, _DESCRIPTOR = 8, 10, 11, 12, 13, 60
# TrackEvent
_CATEGORY_IID, _ANNOTATION, _TYPE, _NAME_IID, _TRACK = 3, 4, 9, 10, 11
_COUNTER_INT, _COUNTER_DOUBLE, _FLOW, _LAST_FLOW, _COLOUR_IID = 30, 44, 47, 48, 54
_BEGIN, _END, _COUNTER = 1, 2, 4
# InternedData, and of its entries number and text
_CATEGORIES, _NAMES, _ANNOTATION_NAMES, _COLOURS = 1, 2, 3, 43
_IID, _TEXT = 1, 2
# DebugAnnotation
_ANNOTATION_NAME, _UINT, _ELEMENT = 1, 3, 12
# TrackDescriptor, CounterDescriptor
_UUID, _NAME, _PARENT, _COUNTER_OF, _CHILD_ORDERING, _SIBLING_PLACE = 1, 2, 5, 8, 11, 12
_UNIT, _UNIT_NAME = 3, 6
_AS_PLACED, _BYTES = 3, 3

_STAGE, _MICROBATCH = 1, 2  # the interned names of the annotations
_ALL_CLEARED, _NEEDS_INTERNED = 1, 2  # sequence flags of the first packet and the others

BATCH = 1 << 14  # slices encoded at once: bounds the memory, and what it works on stays in cache

# The colour of a slice is Perfetto's hash of a text: blue for F, green for B, teal for I, amber
# for W, violet for a fused slot, red for a SEND, pink for a RECV, pale pink for a wait.
_FUSED_COLOUR = "F+B#2653"
_KIND_COLOURS = {kind: row.look.hue for kind, row in ROWS.items()}
_SEND_COLOUR, _RECEIVE_COLOUR = _KIND_COLOURS[Kind.SEND_F], _KIND_COLOURS[Kind.RECV_F]
_WAIT_COLOUR = "WAIT#561"
_VERB_COLOURS = {
    Verb.SEND: _SEND_COLOUR,
    Verb.RECEIVE: _RECEIVE_COLOUR,
    Verb.WAIT: _WAIT_COLOUR,
}


def encode(picture: Picture) -> Iterator[bytes]:
    """The file, in pieces."""
    words = _Words(picture)
    yield words.head
    for segments in _segments(picture, words):
        yield _copy(*segments).tobytes()


def size(picture: Picture) -> int:
    """How many bytes `encode` gives: exact, and found without making them."""
    words = _Words(picture)
    return len(words.head) + sum(int(x.length.sum()) for x in _segments(picture, words))


# --- messages -------------------------------------------------------------------------------


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, *content: bytes) -> bytes:
    body = b"".join(content)
    return _varint(field << 3 | 2) + _varint(len(body)) + body


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())


def _interned(field: int, texts: Iterable[str]) -> bytes:
    """Texts that packets refer to by their number, from 1 on."""
    entries = enumerate(texts, start=1)
    return b"".join(_message(field, _number(_IID, i), _text(_TEXT, x)) for i, x in entries)


def _annotation(name: int, values: tuple[int, ...]) -> bytes:
    """A number in the slice's details; of a fused slot, a list with one a part."""
    numbers = [_number(_UINT, x) for x in values]
    if len(numbers) > 1:
        numbers = [_message(_ELEMENT, x) for x in numbers]
    return _message(_ANNOTATION, _number(_ANNOTATION_NAME, name), *numbers)


def _descriptor(number: int, track: Track) -> bytes:
    """The packet that announces a track."""
    fields = [_number(_UUID, number + 1), _text(_NAME, track.name)]
    if track.parent is not None:
        fields.append(_number(_PARENT, track.parent + 1))
    if track.measures is not None:
        unit = (
            _number(_UNIT, _BYTES)
            if track.measures == "bytes"
            else _text(_UNIT_NAME, track.measures)
        )
        fields.append(_message(_COUNTER_OF, unit))
    fields += [_number(_CHILD_ORDERING, _AS_PLACED), _number(_SIBLING_PLACE, track.place)]
    return _message(
        1, _number(_SEQUENCE, 1), _number(_FLAGS, _NEEDS_INTERNED), _message(_DESCRIPTOR, *fields)
    )


# --- segments -------------------------------------------------------------------------------


class _Column(NamedTuple):
    """One segment of each row: where it stands in the pool, and how long it is."""

    source: Array
    length: Array


class _Segments(NamedTuple):
    """Stretches of a pool, in the order in which they go to the file."""

    pool: Array
    source: Array
    length: Array


def _copy(pool: Array, source: Array, length: Array) -> Array:
    """The bytes `pool[source[i]:source[i] + length[i]]` of every i, one after the other.

    Most of the time goes here.
    """
    fast = compiled.choose(copy_segments, len(source))
    if fast is not None:
        out = np.empty(length.sum(), dtype=np.uint8)
        fast(pool, source, length, out)
        return out
    end = np.cumsum(length)
    at = np.arange(end[-1], dtype=np.int32)
    at += np.repeat((source - end + length).astype(np.int32), length)
    return pool[at]


class _Pool:
    """Bytes that segments are taken from."""

    def __init__(self, *parts: Array) -> None:
        self._parts = list(parts)
        self._size = sum(len(x) for x in parts)

    def add(self, part: Array) -> int:
        """Adds bytes; returns where they begin."""
        self._parts.append(part)
        self._size += len(part)
        return self._size - len(part)

    def strings(self, strings: Iterable[bytes]) -> _Column:
        """Adds byte strings; row i is string i."""
        strings = list(strings)
        length = np.array([len(x) for x in strings], dtype=np.int64)
        start = self.add(np.frombuffer(b"".join(strings), dtype=np.uint8))
        return _Column(start + np.cumsum(length) - length, length)

    def sized(self, prefix: bytes, length: Array) -> _Column:
        """Adds what opens a message: the prefix, then its length, one a row."""
        opens = self.strings(prefix + _varint(n) for n in range(int(length.max(initial=0)) + 1))
        return _take(opens, length)

    def varints(self, field: int, values: Array) -> _Column:
        """Adds a number field, one a row; values from 0 on."""
        tag = np.frombuffer(_varint(field << 3), dtype=np.uint8)
        rows = np.empty((len(values), len(tag) + 9), dtype=np.uint8)
        length = np.empty(len(values), dtype=np.int64)
        fast = compiled.choose(write_varints, len(values))
        if fast is not None:
            fast(tag, values, rows.shape[1], rows.ravel(), length)
            return self._rows(rows, length)
        groups = values[:, None] >> np.arange(0, 63, 7)
        rows[:, : len(tag)] = tag
        rows[:, len(tag) :] = (groups & 127) | ((groups > 127) << 7)
        length = len(tag) + np.maximum((groups > 0).sum(axis=1), 1)
        return self._rows(rows, length)

    def fixed(self, field: int, values: Array) -> _Column:
        """Adds a field of 8 bytes, one a row."""
        tag = np.frombuffer(_varint(field << 3 | 1), dtype=np.uint8)
        data = values.astype(values.dtype.newbyteorder("<")).view(np.uint8).reshape(-1, 8)
        rows = np.concatenate([np.broadcast_to(tag, (len(values), len(tag))), data], axis=1)
        return self._rows(rows, np.full(len(values), rows.shape[1]))

    def _rows(self, rows: Array, length: Array) -> _Column:
        start = self.add(rows.ravel())
        return _Column(start + np.arange(len(rows)) * rows.shape[1], length)

    def joined(self) -> Array:
        """All that was added, in one."""
        return np.concatenate(self._parts)

    def segments(self, columns: list[_Column]) -> _Segments:
        """The rows one after the other, of each row its columns."""
        return _Segments(
            self.joined(),
            np.stack([x.source for x in columns], axis=1).ravel(),
            np.stack([x.length for x in columns], axis=1).ravel(),
        )


def _take(table: _Column, rows: Array) -> _Column:
    return _Column(table.source[rows], table.length[rows])


class _Words:
    """What stands ready before any event: the head of the file, and segments by label and track.

    A begin is made of `category` and `name` by label with `stage` by place between them, `track`
    by track, flows, `colour` by label; an end is `end` by track; a counter `level` by track.
    """

    def __init__(self, picture: Picture) -> None:
        n_tracks = len(picture.tracks)
        texts = [" + ".join(map(_say, label)) for label in picture.labels]
        categories, category = _numbered("+".join(map(_sort, label)) for label in picture.labels)
        colours, colour = _numbered(map(_colour, picture.labels))
        mbs = [tuple(part.mb for part in label) for label in picture.labels]
        pool = _Pool()
        self.category = pool.strings(
            _number(_CATEGORY_IID, i) + _annotation(_MICROBATCH, mb)
            for i, mb in zip(category, mbs, strict=True)
        )
        self.stage = pool.strings(_annotation(_STAGE, place) for place in picture.places)
        self.name = pool.strings(
            _number(_TYPE, _BEGIN) + _number(_NAME_IID, i + 1) for i in range(len(texts))
        )
        self.track = pool.strings(_number(_TRACK, i + 1) for i in range(n_tracks))
        self.colour = pool.strings(_number(_COLOUR_IID, i) for i in colour)
        self.end = pool.strings(
            _number(_SEQUENCE, 1)
            + _message(_EVENT, _number(_TYPE, _END), _number(_TRACK, i + 1))
            + _number(_FLAGS, _NEEDS_INTERNED)
            for i in range(n_tracks)
        )
        self.level = pool.strings(
            _number(_TYPE, _COUNTER) + _number(_TRACK, i + 1) for i in range(n_tracks)
        )
        self.flags = pool.strings([_number(_FLAGS, _NEEDS_INTERNED)])
        self.pool = pool.joined()
        texts_of_all = (
            (_CATEGORIES, categories),
            (_NAMES, texts),
            (_ANNOTATION_NAMES, ("stage", "microbatch")),
            (_COLOURS, colours),
        )
        interned = _message(_INTERNED, *(_interned(field, x) for field, x in texts_of_all))
        first = _number(_SEQUENCE, 1) + interned + _number(_FLAGS, _ALL_CLEARED)
        announced = (_descriptor(i, track) for i, track in enumerate(picture.tracks))
        self.head = _message(1, first) + b"".join(announced)


def _numbered(texts: Iterable[str]) -> tuple[list[str], list[int]]:
    """The different texts, and the number of each, from 1 on."""
    numbers: dict[str, int] = {}
    which = [numbers.setdefault(text, len(numbers) + 1) for text in texts]
    return list(numbers), which


def _say(part: Part) -> str:
    own = f"{part.kind.name} {part.mb}"
    return own if part.verb == Verb.RUN else f"{part.verb.name.lower()} {own}"


def _sort(part: Part) -> str:
    return part.kind.name if part.verb == Verb.RUN else part.verb.name.lower()


def _colour(label: tuple[Part, ...]) -> str:
    verb = label[0].verb
    if verb != Verb.RUN:
        return _VERB_COLOURS[verb]
    return _KIND_COLOURS[label[0].kind] if len(label) == 1 else _FUSED_COLOUR


# --- events ---------------------------------------------------------------------------------


def _segments(picture: Picture, words: _Words) -> Iterator[_Segments]:
    """All events, some thousands at once."""
    flows = _Flows(picture)
    for first in range(0, len(picture.slices.track), BATCH):
        yield _slices(picture, words, flows, slice(first, first + BATCH))
    for first in range(0, len(picture.counters.track), BATCH):
        yield _levels(picture, words, slice(first, first + BATCH))


class _Flows:
    """The flow fields of every slice: those of slice i are `starts[i]` to `starts[i + 1]`."""

    def __init__(self, picture: Picture) -> None:
        n, (source, target) = len(picture.slices.track), picture.flows
        ends = np.concatenate([source, target])
        # A field that ends a flow is lost where it comes first; one that steps it never is.
        last = np.concatenate([np.zeros(len(source), dtype=bool), picture.forward])
        number = np.tile(np.arange(1, len(source) + 1), 2)
        order = np.lexsort((last, ends))
        self.last, self.number = last[order], number[order]
        self.starts = np.zeros(n + 1, dtype=np.int64)
        np.cumsum(np.bincount(ends, minlength=n), out=self.starts[1:])

    def add(self, pool: _Pool, part: slice) -> _Column:
        """Adds the fields of these slices to the pool: one segment a slice, of all its fields."""
        starts = self.starts[part.start : part.stop + 1]
        mine = slice(starts[0], starts[-1])
        tag = np.where(self.last[mine], _LAST_FLOW, _FLOW) << 3 | 1
        rows = np.empty((len(tag), 10), dtype=np.uint8)
        rows[:, 0], rows[:, 1] = tag & 127 | 128, tag >> 7
        rows[:, 2:] = self.number[mine].astype("<i8").view(np.uint8).reshape(-1, 8)
        return _Column(
            pool.add(rows.ravel()) + (starts[:-1] - starts[0]) * 10, np.diff(starts) * 10
        )


def _slices(picture: Picture, words: _Words, flows: _Flows, part: slice) -> _Segments:
    """A begin and an end for each slice."""
    track, start, end, label, place = (column[part] for column in picture.slices)
    pool = _Pool(words.pool)
    event = [
        _take(words.category, label), _take(words.stage, place), _take(words.name, label),
        _take(words.track, track), flows.add(pool, part), _take(words.colour, label),
    ]  # fmt: skip
    begins = _framed(pool, words, start, event)
    last = [pool.varints(_TIMESTAMP, end), _take(words.end, track)]
    return pool.segments([*begins, pool.sized(_PACKET, _total(last)), *last])


def _levels(picture: Picture, words: _Words, part: slice) -> _Segments:
    """A counter event for each level; whole numbers where all of them are."""
    track, time, value = (column[part] for column in picture.counters)
    pool = _Pool(words.pool)
    whole = picture.counters.value
    if (whole == np.floor(whole)).all() and (whole >= 0).all():
        number = pool.varints(_COUNTER_INT, value.astype(np.int64))
    else:
        number = pool.fixed(_COUNTER_DOUBLE, value)
    return pool.segments(_framed(pool, words, time, [_take(words.level, track), number]))


_PACKET = _varint(1 << 3 | 2)
_OPENS_EVENT = _number(_SEQUENCE, 1) + _varint(_EVENT << 3 | 2)


def _framed(pool: _Pool, words: _Words, time: Array, event: list[_Column]) -> list[_Column]:
    """The whole packets around the fields of an event."""
    content = [
        pool.varints(_TIMESTAMP, time),
        pool.sized(_OPENS_EVENT, _total(event)),
        *event,
        _take(words.flags, np.zeros(len(time), dtype=np.int64)),
    ]
    return [pool.sized(_PACKET, _total(content)), *content]


def _total(columns: list[_Column]) -> Array:
    total = columns[0].length
    for column in columns[1:]:
        total = total + column.length
    return total


# --- loops, plain or compiled ------------------------------------------------------------------


def copy_segments(pool, source, length, out):
    """Copies `pool[source[i]:source[i] + length[i]]` of every i to `out`, one after the other."""
    at = 0
    for i in range(len(source)):
        first = source[i]
        for k in range(length[i]):
            out[at + k] = pool[first + k]
        at += length[i]


def write_varints(tag, values, width, rows, length):
    """Writes a tag and a number of 7 bits a byte to the front of each row of `width` bytes."""
    for i in range(len(values)):
        at = i * width
        for k in range(len(tag)):
            rows[at + k] = tag[k]
        n, value = len(tag), values[i]
        while value > 127:
            rows[at + n] = (value & 127) | 128
            value >>= 7
            n += 1
        rows[at + n] = value
        length[i] = n + 1
