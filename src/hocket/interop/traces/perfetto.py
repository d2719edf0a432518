"""Perfetto traces that hocket wrote, read back.

Only what hocket writes is understood: tracks, interned names and categories, slices with stage
and microbatch. Source: protos/perfetto/trace/perfetto_trace.proto; field numbers as in the writer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from hocket.errors import TextError
from hocket.interop.traces.pictures import Drawn, Event, drawn, own_blocks

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

    Raises: TextError where it is none.
    """
    try:
        events, tracks = _events(data)
    except (IndexError, UnicodeDecodeError, KeyError) as error:
        raise TextError(source, [(1, f"not a trace that hocket wrote: {error!r}")]) from None
    found = {}
    for pid in dict.fromkeys(e.pid for e in events):
        own = [e for e in events if e.pid == pid]
        threads = {e.tid for e in own}
        names = [
            Event(ph="M", name="thread_name", tid=tid, args={"name": _thread(tracks, int(tid))})
            for tid in threads
        ]
        blocks = list(own_blocks([*names, *own]))
        if blocks:
            name = "-".join(tracks[int(pid)].name.split()) or "imported"
            found[name] = drawn(blocks, name)
    if not found:
        raise TextError(source, [(1, "there is no slice of a forward or a backward in it")])
    return found


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
                    names[kind][one[_IID][0]] = one[_TEXT][0].decode()
        for raw in fields.get(_DESCRIPTOR, ()):
            one = _fields(raw)
            parent = one.get(_PARENT, [None])[0]
            tracks[one[_UUID][0]] = _Track(one.get(_NAME, [b""])[0].decode(), parent)
        for raw in fields.get(_EVENT, ()):
            event = _fields(raw)
            kind = event.get(_TYPE, [0])[0]
            if kind in (_BEGIN, _END):
                out.append(_slice(event, kind, fields[_TIMESTAMP][0], names, tracks))
    return out, tracks


def _slice(
    event: _Fields, kind: int, ns: int, names: dict[int, dict[int, str]], tracks: dict[int, _Track]
) -> Event:
    track = event[_TRACK][0]
    args: dict[str, Any] = {}
    for raw in event.get(_ANNOTATION, ()):
        one = _fields(raw)
        values = one.get(_UINT) or [_fields(x)[_UINT][0] for x in one.get(_ELEMENT, ())]
        name = names[_ANNOTATION_NAMES][one[_ANNOTATION_NAME][0]]
        args[name] = values[0] if len(values) == 1 else values
    texts = names[_NAMES], names[_CATEGORIES]
    name, category = (
        table.get(event.get(key, [0])[0], "")
        for table, key in zip(texts, (_NAME_IID, _CATEGORY_IID), strict=True)
    )
    return Event(
        ph="B" if kind == _BEGIN else "E", name=name, cat=category, ts=ns / 1000,
        pid=_timeline(tracks, track), tid=track, args=args,
    )  # fmt: skip


def _timeline(tracks: dict[int, _Track], uuid: int) -> int:
    """The track that a rank's track stands in: the timeline."""
    while not tracks[uuid].name.startswith("rank "):
        parent = tracks[uuid].parent
        if parent is None:
            return uuid
        uuid = parent
    parent = tracks[uuid].parent
    return uuid if parent is None else parent


# --- protobuf -------------------------------------------------------------------------------------


def _walk(data: bytes) -> Iterator[tuple[int, Any]]:
    """Every field of a message: its number, and its integer or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
        elif wire == 2:
            length, at = _varint(data, at)
            value, at = data[at : at + length], at + length
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
            value, at = data[at : at + length], at + length
        else:
            raise KeyError(f"wire type {wire}")
        yield key >> 3, value


def _fields(data: bytes) -> _Fields:
    """The fields of a message by number."""
    out: _Fields = {}
    for number, value in _walk(data):
        out.setdefault(number, []).append(value)
    return out


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
