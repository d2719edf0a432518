"""Slices of lanes: begins matched with their ends, and what no rank can have run found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from hocket.errors import TextError

LONGEST = 4e15  # us: what a clock may show, 126 years; in ns it still is an int64
_SHOWN = 10
_DEEPEST = 200  # slices that may be open on a lane at once


class Event(msgspec.Struct, gc=False):
    """What is needed of an event of Chrome's JSON; times in us."""

    ph: str
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: dict[str, Any] = {}


class Slice(NamedTuple):
    """A stretch of time on a lane, ns; `text` says what it is, for people."""

    lane: Any
    text: str
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.text} ({self.start / 1000:.12g} to {self.end / 1000:.12g} us)"


def decoded(data: bytes, form: Any, source: str, what: str) -> Any:
    """The JSON as a value of this type. Raises: TextError, "not <what>: ..."."""
    try:
        return msgspec.json.decode(data, type=form)
    except (msgspec.MsgspecError, ValueError) as error:  # not UTF-8, thousands of digits
        reason = str(error)
    except RecursionError:
        reason = "it is nested too deep"
    raise TextError(source, [(1, f"not {what}: {reason}")])


def refuse(source: str, faults: Iterable[str]) -> None:
    """Raises TextError with the first faults, where there are any, and how many more there are."""
    rest = iter(faults)
    shown = list(islice(rest, _SHOWN))
    more = sum(1 for _ in rest)
    if more:
        shown.append(f"and {more} more of these faults")
    if shown:
        raise TextError(source, [(1, text) for text in shown])


def nanoseconds(us: float) -> int:
    """A time in ns. Raises: ValueError where no clock shows it."""
    if not -LONGEST <= us <= LONGEST:
        raise ValueError(f"the time {us:g} us is beyond what a clock shows")
    return round(us * 1000)


def closed(
    events: Sequence[Event], counts: Callable[[Event], bool]
) -> tuple[list[tuple[Event, int, int]], list[str]]:
    """Every slice that counts, with begin and end in ns, and what is wrong with others.

    A slice is whole (X), or a begin (B) with its end (E). An end belongs to the last begin that
    is open on its lane and has its name and args, where it has these, whatever else crosses it.
    """
    slices: list[tuple[Event, int, int]] = []
    faults: list[str] = []
    marks: dict[int | str, list[Event]] = {}
    for e in events:
        try:
            if e.ph in ("B", "E"):
                nanoseconds(e.ts)
                marks.setdefault(e.tid, []).append(e)
            elif e.ph == "X" and counts(e):
                start, end = nanoseconds(e.ts), nanoseconds(e.ts + e.dur)
                if start <= end:
                    slices.append((e, start, end))
                else:
                    at = f"{e.name!r} at {e.ts:.12g} us"
                    faults.append(f"lane {e.tid}: {at} ends before it begins")
        except ValueError as error:
            faults.append(f"lane {e.tid}: {e.name!r}: {error}")
    for lane in marks.values():
        names = {e.name for e in lane if e.ph == "B" and counts(e)}
        if names:
            _pair(sorted(lane, key=lambda e: e.ts), counts, {"", *names}, slices, faults)
    return slices, faults


def _pair(
    lane: Sequence[Event], counts: Callable[[Event], bool], names: set[str],
    slices: list[tuple[Event, int, int]], faults: list[str],
) -> None:  # fmt: skip
    """Adds the slices of one lane's begins and ends, by time; names: whose ends are missed."""
    open_: list[Event] = []
    for e in lane:
        if e.ph == "B":
            open_.append(e)
            if len(open_) > _DEEPEST:
                faults.append(f"lane {e.tid}: {_DEEPEST} slices are open at {e.ts:.12g} us")
                return
            continue
        at = next((i for i in reversed(range(len(open_))) if _ends(e, open_[i])), None)
        if at is not None:
            begin = open_.pop(at)
            if counts(begin):
                slices.append((begin, nanoseconds(begin.ts), nanoseconds(e.ts)))
        elif e.name in names or counts(e):
            faults.append(f"lane {e.tid}: an end of {e.name!r} at {e.ts:.12g} us has no begin")
    faults += (
        f"lane {e.tid}: {e.name!r} begins at {e.ts:.12g} us and does not end"
        for e in open_
        if counts(e)
    )


def _ends(end: Event, begin: Event) -> bool:
    return (not end.name or end.name == begin.name) and end.args.items() <= begin.args.items()


def overlapping(slices: Iterable[Slice], tolerance: int) -> list[str]:
    """A sentence for each slice that begins before the one before it on its lane has ended.

    tolerance: ns that clocks' rounding may make of it.
    """
    faults: list[str] = []
    last: dict[Any, Slice] = {}
    for one in sorted(slices, key=lambda x: (x.start, x.end)):
        before = last.setdefault(one.lane, one)
        if before is not one and one.start < before.end - tolerance:
            faults.append(f"{one.lane}: {before} and {one} overlap; a rank runs one at a time")
        if one.end > before.end:
            last[one.lane] = one
    return faults
