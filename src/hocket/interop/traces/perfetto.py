"""Perfetto traces that hocket wrote, read back.

Only what hocket writes is understood: tracks, interned names and categories, slices with stage
and microbatch. Source: protos/perfetto/trace/perfetto_trace.proto; field numbers as in the writer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from hocket.errors import TextError
from hocket.interop.traces.lanes import Event
from hocket.interop.traces.pictures import Drawn, by_name

_PACKET = 1
_TIMESTAMP, _EVENT, _INTERNED, _DESCRIPTOR = 8, 11, 12, 60
_CATEGORY_IID, _ANNOTATION, _TYPE, _NAME_IID, _TRACK = 3, 4, 9, 10, 11
_BEGIN, _END = 1, 2
_CATEGORIES, _NAMES, _ANNOTATION_NAMES = 1, 2, 3
_IID, _TEXT = 1, 2
_ANNOTATION_NAME, _UINT, _ELEMENT = 1, 3, 12
_UUID, _NAME, _PARENT = 1, 2, 5

_Fields = dict[int, list[Any]]


class _Track(NamedTuple):
    name: str
    parent: int | None


def is_pftrace(data: bytes) -> bool:
    """True for the beginning of a Perfetto trace: a packet, not the `{` of JSON."""
    return data[:1] == b"\x0a"


def read_pftrace(data: bytes, source: str = "<trace>") -> dict[str, Drawn]:
    """Every timeline of a trace that hocket wrote, by name.

    Raises: TextError where it is none, or holds what no ranks can have run.
    """
    try:
        events, tracks = _events(data)
        timelines: dict[int, list[Event]] = {}
        for event in events:
            timelines.setdefault(int(event.pid), []).append(event)
        named = [
            ("-".join(tracks[pid].name.split()), [*_names(tracks, own), *own])
            for pid, own in timelines.items()
        ]
    except (IndexError, KeyError, ValueError) as error:
        what = "it is cut off" if isinstance(error, IndexError) else error
        if isinstance(error, KeyError):
            what = f"it refers to number {error}, which it does not define"
        raise TextError(source, [(1, f"not a trace that hocket wrote: {what}")]) from None
    return by_name(named, source)


def _names(tracks: dict[int, _Track], events: list[Event]) -> Iterator[Event]:
    """The names of these events' tracks as events."""
    for tid in {int(e.tid) for e in events}:
        yield Event(ph="M", name="thread_name", tid=tid, args={"name": _thread(tracks, tid)})


def _thread(tracks: dict[int, _Track], uuid: int) -> str:
    """`rank 0`, or `rank 0 send` for a track below one."""
    track = tracks[uuid]
    above = tracks.get(track.parent) if track.parent is not None else None
    if above is not None and above.name.startswith("rank "):
        return f"{above.name} {track.name}"
    return track.name


def _events(data: bytes) -> tuple[list[Event], dict[int, _Track]]:
    """Begins and ends of slices, and the tracks by number."""
    names: dict[int, dict[int, str]] = {_CATEGORIES: {}, _NAMES: {}, _ANNOTATION_NAMES: {}}
    tracks: dict[int, _Track] = {}
    out: list[Event] = []
    for number, packet in _walk(data):
        if number != _PACKET:
            continue
        fields = _fields(packet)
        for raw in fields.get(_INTERNED, ()):
            for kind, entry in _walk(raw):
                if kind in names:
                    one = _fields(entry)
                    names[kind][_number(one, _IID)] = _bytes(one, _TEXT).decode()
        for raw in fields.get(_DESCRIPTOR, ()):
            one = _fields(raw)
            parent = _number(one, _PARENT) if _PARENT in one else None
            name = _bytes(one, _NAME).decode() if _NAME in one else ""
            tracks[_number(one, _UUID)] = _Track(name, parent)
        for raw in fields.get(_EVENT, ()):
            event = _fields(raw)
            kind = _number(event, _TYPE) if _TYPE in event else 0
            if kind in (_BEGIN, _END):
                out.append(_slice(event, kind, _number(fields, _TIMESTAMP), names, tracks))
    return out, tracks


def _slice(
    event: _Fields, kind: int, ns: int, names: dict[int, dict[int, str]], tracks: dict[int, _Track]
) -> Event:
    track = _number(event, _TRACK)
    args: dict[str, Any] = {}
    for raw in event.get(_ANNOTATION, ()):
        one = _fields(raw)
        values = one.get(_UINT) or [_number(_fields(x), _UINT) for x in one.get(_ELEMENT, ())]
        name = names[_ANNOTATION_NAMES][_number(one, _ANNOTATION_NAME)]
        args[name] = values[0] if len(values) == 1 else values
    texts = names[_NAMES], names[_CATEGORIES]
    name, category = (
        table.get(_number(event, key), "") if key in event else ""
        for table, key in zip(texts, (_NAME_IID, _CATEGORY_IID), strict=True)
    )
    return Event(
        ph="B" if kind == _BEGIN else "E", name=name, cat=category, ts=ns / 1000,
        pid=_timeline(tracks, track), tid=track, args=args,
    )  # fmt: skip


_DEEPEST = 8  # tracks may stand in each other; hocket's are three deep


def _timeline(tracks: dict[int, _Track], uuid: int) -> int:
    """The track that a rank's track stands in: the timeline."""
    first = uuid
    for _ in range(_DEEPEST):
        parent = tracks[uuid].parent
        if parent is None:
            return uuid
        if tracks[uuid].name.startswith("rank "):
            return parent
        uuid = parent
    raise ValueError(f"track {first} stands in itself, or {_DEEPEST} tracks deep")


# --- protobuf -------------------------------------------------------------------------------------


def _walk(data: Any) -> Iterator[tuple[int, Any]]:
    """Every field of a message: its number, and its integer or bytes.

    Raises: IndexError where it is cut off, ValueError where it is no message.
    """
    if not isinstance(data, bytes):
        raise ValueError("there is a number in place of a message")
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == 2:
            length, at = _varint(data, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"a field has the unknown wire type {wire}")
        if at + length > len(data):
            raise IndexError
        yield key >> 3, data[at : at + length]
        at += length


def _fields(data: Any) -> _Fields:
    """The fields of a message by number."""
    out: _Fields = {}
    for number, value in _walk(data):
        out.setdefault(number, []).append(value)
    return out


def _number(fields: _Fields, field: int) -> int:
    """The first integer of a field. Raises: ValueError."""
    value = fields[field][0] if field in fields else None
    if not isinstance(value, int):
        raise ValueError(f"field {field} holds no number")
    return value


def _bytes(fields: _Fields, field: int) -> bytes:
    """The first bytes of a field. Raises: ValueError."""
    value = fields[field][0] if field in fields else None
    if not isinstance(value, bytes):
        raise ValueError(f"field {field} holds no text")
    return value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise ValueError("an integer is longer than ten bytes")
