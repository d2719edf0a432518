"""Traces that are pictures of schedules, hocket's own and others: back to schedule and costs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import msgspec
import numpy as np

from hocket.costs import Costs, Number, quotient
from hocket.deps import WORK
from hocket.errors import TextError
from hocket.graph import graph
from hocket.interop.placing import placement_of
from hocket.ir import Action, Kind, Queue, Schedule
from hocket.measured import timeline_of
from hocket.text import as_name
from hocket.timeline import Timeline


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


class _File(msgspec.Struct):
    traceEvents: list[Event]


class Block(NamedTuple):
    """One slot as it was drawn: ns; `before` and `after` are transfers around its work."""

    queue: Queue
    actions: tuple[Action, ...]
    start: int
    end: int
    before: int = 0
    after: int = 0


@dataclass(frozen=True)
class Drawn:
    """One timeline of a trace: its order, the costs that give these times, the times."""

    schedule: Schedule
    costs: Costs
    timeline: Timeline


def read_drawn(data: bytes, source: str = "<trace>") -> dict[str, Drawn]:
    """Every timeline of a Chrome JSON file by name.

    Raises: TextError where it holds no schedule.
    """
    try:
        events = msgspec.json.decode(data, type=_File).traceEvents
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TextError(source, [(1, f"not a trace in Chrome's JSON: {error}")]) from None
    names = {e.pid: str(e.args.get("name")) for e in events if e.name == "process_name"}
    found = {}
    for pid in dict.fromkeys(e.pid for e in events):
        own = [e for e in events if e.pid == pid]
        blocks = list(_phased(own)) or list(own_blocks(own))
        if blocks:
            name = as_name(names.get(pid, ""))
            found[name] = drawn(blocks, name)
    if not found:
        raise TextError(source, [(1, "there is no slice of a forward or a backward in it")])
    return found


def drawn(blocks: Sequence[Block], name: str) -> Drawn:
    """Schedule, costs and times of what was drawn.

    Raises: ScheduleError where some stage stands nowhere.
    """
    lines: dict[Queue, list[Block]] = {}
    for block in sorted(blocks, key=lambda b: (b.start, b.end)):
        lines.setdefault(block.queue, []).append(block)
    order = {queue: [b.actions for b in line] for queue, line in lines.items()}
    schedule = Schedule.from_order(name, placement_of(order), order)
    ordered = [block for queue in schedule.queues for block in lines.get(queue, ())]
    zero = min(b.start - b.before for b in ordered)
    start, end, before, after = (
        np.array(x, dtype=float) / 1e3
        for x in (
            [b.start - zero for b in ordered], [b.end - zero for b in ordered],
            [b.before for b in ordered], [b.after for b in ordered],
        )
    )  # fmt: skip
    slot = schedule.slot_of_action
    timeline = timeline_of(schedule, start[slot], end[slot], around=(before, after))
    return Drawn(schedule, _costs(timeline, ordered), timeline)


# --- hocket's own -------------------------------------------------------------------------------

_THREAD = re.compile(r"rank (\d+)(?: ([A-Za-z][\w-]*))?(?: \d+)?")


def own_blocks(events: Sequence[Event]) -> Iterator[Block]:
    """The slots of a trace that hocket wrote."""
    queues: dict[int | str, Queue] = {}
    for e in events:
        match = _THREAD.fullmatch(str(e.args.get("name"))) if e.name == "thread_name" else None
        if match:
            stream = match[2] or ""
            queues[e.tid] = Queue(int(match[1]), "" if stream in _LINES else stream)
    around: dict[tuple[Queue, Any, str, str], int] = {}
    slices = [
        (e, begin, end)
        for e, begin, end in _slices(events)
        if e.tid in queues and "stage" in e.args
    ]
    for e, begin, end in slices:
        if set(e.cat.split("+")) <= {"send", "receive"}:
            side = e.cat.split("+")[0]
            around[queues[e.tid], _key(e), e.name.replace(f"{side} ", ""), side] = end - begin
    for e, begin, end in slices:
        kinds = e.cat.split("+")
        if all(k in Kind.__members__ and Kind[k] in WORK for k in kinds):
            queue, key = queues[e.tid], _key(e)
            actions = tuple(
                Action(Kind[k], int(stage), int(mb))
                for k, (stage, mb) in zip(kinds, key, strict=True)
            )
            yield Block(
                queue, actions, begin, end,
                around.get((queue, key, e.name, "receive"), 0),
                around.get((queue, key, e.name, "send"), 0),
            )  # fmt: skip


_LINES = ("send", "receive")


def _key(event: Event) -> tuple[tuple[int, int], ...]:
    """(stage, microbatch) of each part of a slice."""
    stage, mb = event.args["stage"], event.args["microbatch"]
    if isinstance(stage, list):
        return tuple(zip(stage, mb, strict=True))
    return ((stage, mb),)


def _slices(events: Sequence[Event]) -> Iterator[tuple[Event, int, int]]:
    """Every slice with begin and end in ns: whole ones, and begins with their ends."""
    open_: dict[int | str, list[Event]] = {}
    for e in events:
        if e.ph == "X":
            yield e, round(e.ts * 1000), round((e.ts + e.dur) * 1000)
        elif e.ph == "B":
            open_.setdefault(e.tid, []).append(e)
        elif e.ph == "E" and open_.get(e.tid):
            begin = open_[e.tid].pop()
            yield begin, round(begin.ts * 1000), round(e.ts * 1000)


# --- slots drawn as receive, work, send --------------------------------------------------------

_ONE = re.compile(r"([FBW])_d(\d+)_mb(\d+)_s(\d+)_(recv|compute|send)")
_PAIR = re.compile(r"FB_Fd(\d+)_mb(\d+)_s(\d+)_Bd(\d+)_mb(\d+)_s(\d+)_(recv|compute|send)")
_Part = tuple[str, int, int, int]  # kind, direction, microbatch, stage


def _phased(events: Sequence[Event]) -> Iterator[Block]:
    """The slots of a trace whose slices are named like `F_d0_mb0_s0_compute`.

    Microbatches are numbered anew for each direction; here those of a direction follow those of
    the one before. A backward is an I where a W of its own stands apart.
    """
    phases: dict[tuple[int | str, tuple[_Part, ...]], dict[str, tuple[int, int]]] = {}
    for e, begin, end in _slices(events):
        one, pair = _ONE.fullmatch(e.name), _PAIR.fullmatch(e.name)
        if one:
            parts: tuple[_Part, ...] = ((one[1], int(one[2]), int(one[3]), int(one[4])),)
            phase = one[5]
        elif pair:
            d, mb, s, d2, mb2, s2 = map(int, pair.groups()[:6])
            parts, phase = (("F", d, mb, s), ("B", d2, mb2, s2)), pair[7]
        else:
            continue
        phases.setdefault((e.tid, parts), {})[phase] = begin, end
    if not phases:
        return
    lanes = sorted({tid for tid, _ in phases}, key=str)
    ranks = {tid: Queue(rank) for rank, tid in enumerate(sorted(lanes, key=lambda t: int(t)))}
    numbers = _numbers(phases)
    split = {(d, mb, s) for _, parts in phases for k, d, mb, s in parts if k == "W"}
    for (tid, parts), found in phases.items():
        actions = tuple(
            Action(Kind.I if kind == "B" and (d, mb, s) in split else Kind[kind], s, numbers[d, mb])
            for kind, d, mb, s in parts
        )
        recv, send = found.get("recv"), found.get("send")
        if "compute" in found:
            begin, end = found["compute"]
        elif recv and send:  # drawn as phases of its own
            begin, end = recv[1], send[0]
        else:
            continue
        yield Block(
            ranks[tid], actions, begin, end,
            recv[1] - recv[0] if recv else 0, send[1] - send[0] if send else 0,
        )  # fmt: skip


def _numbers(phases: Mapping[tuple[int | str, tuple[_Part, ...]], Any]) -> dict:
    """The microbatch of each (direction, microbatch)."""
    seen = sorted({(d, mb) for _, parts in phases for _, d, mb, _ in parts})
    return {key: number for number, key in enumerate(seen)}


# --- costs --------------------------------------------------------------------------------------


def _costs(timeline: Timeline, blocks: Sequence[Block]) -> Costs:
    """The costs under which the order takes these times; means where equal work differs."""
    n = timeline.schedule.placement.n_stages
    times: dict[tuple[Kind, int], list[int]] = {}
    for b in blocks:
        if len(b.actions) == 1:
            action = b.actions[0]
            times.setdefault((action.kind, action.stage), []).append(b.end - b.start)
    known = {key: _exact(Fraction(sum(x), len(x))) for key, x in times.items()}

    def of(kind: Kind, stage: int) -> Number | None:
        return known.get((kind, stage))

    f, i, w, b = ([of(kind, s) for s in range(n)] for kind in (Kind.F, Kind.I, Kind.W, Kind.B))
    for s, whole in enumerate(b):
        if i[s] is None and whole is not None:
            i[s] = w[s] = quotient(whole, 2)
        if whole is None:
            b[s] = (i[s] or 0) + (w[s] or 0)
    receive, send = max(x.before for x in blocks), max(x.after for x in blocks)
    costs = Costs(
        F=_filled(f), I=_filled(i), W=_filled(w), B=_filled(b),
        p2p_overhead=(_exact(Fraction(receive)), _exact(Fraction(send)))
        if receive or send else None, latency=_latency(timeline), unit="us",
    )  # fmt: skip
    return _with_fused(costs, blocks)


def _exact(ns: Fraction) -> Number:
    """ns as us: an int where it is whole."""
    us = ns / 1000
    return int(us) if us.denominator == 1 else us


def _filled(values: Sequence[Number | None]) -> tuple[Number, ...]:
    return tuple(0 if x is None else x for x in values)


def _latency(timeline: Timeline) -> Number:
    """The least time between a result and its use on another rank."""
    g, slot = graph(timeline.schedule), timeline.schedule.slot_of_action
    source, target = g.source[g.crosses], g.target[g.crosses]
    if not len(source):
        return 0
    gaps = (timeline.start[target] - timeline.before[slot[target]]) - (
        timeline.end[source] + timeline.after[slot[source]]
    )
    return _exact(Fraction(max(0, round(float(gaps.min()) * 1000))))


def _with_fused(costs: Costs, blocks: Sequence[Block]) -> Costs:
    """The costs with the rule that gives the times of the slots of a forward and a backward."""
    fused = [(b.actions, _exact(Fraction(b.end - b.start))) for b in blocks if len(b.actions) > 1]
    if not fused:
        return costs
    tables: dict[Kind, Any] = {
        Kind.F: costs.F,
        Kind.I: costs.I,
        Kind.W: costs.W,
        Kind.B: costs.full_backward,
    }
    single = [[tables[a.kind][a.stage] for a in actions] for actions, _ in fused]
    if all(x == sum(parts) for (_, x), parts in zip(fused, single, strict=True)):
        return costs
    if all(x == max(parts) for (_, x), parts in zip(fused, single, strict=True)):
        return replace(costs, FB="max")
    values = {x for _, x in fused}
    if len(values) == 1:
        return replace(costs, FB=values.pop())
    whole = sum(float(x) for parts in single for x in parts)
    return replace(costs, FB={"scale": sum(float(x) for x in (v for _, v in fused)) / whole})
