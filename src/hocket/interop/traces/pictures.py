"""Traces that are pictures of schedules, hocket's own and others: back to schedule and costs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import msgspec
import numpy as np

from hocket.costs import Costs, Number, per_stage
from hocket.costs.scaling import read_times
from hocket.deps import BACKWARDS, FORWARDS, ROWS, USERS, WORK
from hocket.errors import TextError
from hocket.graph import graph
from hocket.interop.placing import placement_of
from hocket.interop.traces.lanes import Event, Slice, closed, decoded, overlapping, refuse
from hocket.ir import MAX_MICROBATCHES, MAX_RANK, MAX_STAGE, Action, Kind, Queue, Schedule
from hocket.measured import timeline_of
from hocket.text import as_name, number_up_to
from hocket.timeline import Timeline


class _Stored(msgspec.Struct, gc=False):
    """An event as it stands in a file; its args are read where they are needed."""

    ph: str
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: msgspec.Raw = msgspec.Raw()


class _File(msgspec.Struct):
    traceEvents: list[_Stored]


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

    Raises: TextError where it holds no schedule, or one that no ranks can have run.
    """
    stored = decoded(data, _File, source, "a trace in Chrome's JSON").traceEvents
    by_pid: dict[int | str, list[Event]] = {}
    names = {}
    for one in stored:
        if one.ph in ("X", "B", "E", "M"):
            event = _with_args(one, source)
            by_pid.setdefault(event.pid, []).append(event)
            if event.name == "process_name":
                names[event.pid] = str(event.args.get("name"))
    return by_name(((names.get(pid, ""), own) for pid, own in by_pid.items()), source)


def _with_args(one: _Stored, source: str) -> Event:
    raw = bytes(one.args)
    args = {}
    if one.ph == "M" or b'"stage"' in raw:
        args = decoded(raw or b"{}", dict[str, Any], source, f"an event with args ({one.name!r})")
    return Event(one.ph, one.name, one.cat, one.ts, one.dur, one.pid, one.tid, args)


def by_name(timelines: Iterable[tuple[str, Sequence[Event]]], source: str) -> dict[str, Drawn]:
    """The timelines among these, each a title and its events, by name.

    Raises: TextError where there is none, or one that no ranks can have run.
    """
    out = {}
    for title, events in timelines:
        faults: list[str] = []
        blocks = list(_phased(events, faults)) or list(own_blocks(events, faults))
        refuse(source, faults)
        if blocks:
            name = as_name(title)
            while name in out:
                name += "-again"
            out[name] = drawn(blocks, name, source)
    if not out:
        raise TextError(source, [(1, "there is no slice of a forward or a backward in it")])
    return out


def drawn(blocks: Sequence[Block], name: str, source: str = "<trace>") -> Drawn:
    """Schedule, costs and times of what was drawn.

    Raises: TextError where blocks of a queue overlap or an action stands twice, ScheduleError
    where some stage is never used.
    """
    refuse(source, [*_repeated(blocks), *overlapping(map(_extent, blocks), _ROUNDING)])
    lines: dict[Queue, list[Block]] = {}
    for block in sorted(blocks, key=lambda b: (b.start, b.end)):
        lines.setdefault(block.queue, []).append(block)
    order = {queue: [b.actions for b in line] for queue, line in lines.items()}
    schedule = Schedule.from_order(name, placement_of(order), order)
    ordered = [block for queue in schedule.queues for block in lines.get(queue, ())]
    zero = min(b.start - b.before for b in ordered)
    if zero == max(b.end + b.after for b in ordered):
        refuse(source, ["all its slices together take no time"])
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


_ROUNDING = 2  # ns: what two rounded times may differ by


def _extent(block: Block) -> Slice:
    text = "+".join(map(str, block.actions))
    return Slice(f"rank {block.queue}", text, block.start - block.before, block.end + block.after)


def _repeated(blocks: Sequence[Block]) -> Iterator[str]:
    """A sentence for each action that stands more than once."""
    first: dict[Action, Block] = {}
    for block in blocks:
        for action in block.actions:
            other = first.setdefault(action, block)
            if other is not block:
                yield (
                    f"{action} stands twice: on rank {other.queue} at {other.start / 1000:.12g} us "
                    f"and on rank {block.queue} at {block.start / 1000:.12g} us; give the trace "
                    "of one step"
                )


# --- hocket's own -------------------------------------------------------------------------------

_THREAD = re.compile(r"rank (\d+)(?: ([A-Za-z][\w-]*))?(?: \d+)?", re.ASCII)
_LINES = ("send", "receive")
_Key = tuple[tuple[int, int], ...]  # (stage, microbatch) of each part of a slice


def own_blocks(events: Sequence[Event], faults: list[str]) -> Iterator[Block]:
    """The slots of a trace that hocket wrote; what is wrong with it is added to the faults."""
    queues = _queues(events)
    slices, wrong = closed(events, lambda e: e.tid in queues and "stage" in e.args)
    faults += wrong
    known: list[tuple[Event, _Key, int, int]] = []
    around: dict[tuple[Queue, _Key, str, str], int] = {}
    for e, begin, end in slices:
        key = _key(e)
        if key is None:
            faults.append(
                f"lane {e.tid}: {e.name!r} at {e.ts:.12g} us needs a stage (0 to {MAX_STAGE}) and "
                f"a microbatch (0 to {MAX_MICROBATCHES - 1}) for each part of {e.cat!r}"
            )
        elif set(e.cat.split("+")) <= set(_LINES):
            side = e.cat.split("+")[0]
            around[queues[e.tid], key, e.name.replace(f"{side} ", ""), side] = end - begin
        else:
            known.append((e, key, begin, end))
    for e, key, begin, end in known:
        kinds, queue = e.cat.split("+"), queues[e.tid]
        if all(k in Kind.__members__ and Kind[k] in WORK for k in kinds):
            actions = tuple(
                Action(Kind[k], stage, mb) for k, (stage, mb) in zip(kinds, key, strict=True)
            )
            yield Block(
                queue, actions, begin, end,
                around.get((queue, key, e.name, "receive"), 0),
                around.get((queue, key, e.name, "send"), 0),
            )  # fmt: skip


def _queues(events: Sequence[Event]) -> dict[int | str, Queue]:
    """The queue of each lane that is named like one."""
    out: dict[int | str, Queue] = {}
    for e in events:
        match = _THREAD.fullmatch(str(e.args.get("name"))) if e.name == "thread_name" else None
        rank = number_up_to(match[1], MAX_RANK) if match else None
        if match and rank is not None:
            stream = match[2] or ""
            out[e.tid] = Queue(rank, "" if stream in _LINES else stream)
    return out


def _key(event: Event) -> _Key | None:
    """(stage, microbatch) of each part of a slice; None where they are not what they must be."""
    stages: Any = event.args.get("stage")
    mbs: Any = event.args.get("microbatch")
    if not isinstance(stages, list):
        stages, mbs = [stages], [mbs]
    if not isinstance(mbs, list) or not len(stages) == len(mbs) == len(event.cat.split("+")):
        return None
    for values, most in ((stages, MAX_STAGE), (mbs, MAX_MICROBATCHES - 1)):
        if not all(type(x) is int and 0 <= x <= most for x in values):
            return None
    return tuple(zip(stages, mbs, strict=True))


# --- slots drawn as receive, work, send --------------------------------------------------------

_ONE = re.compile(r"([FBW])_d(\d+)_mb(\d+)_s(\d+)_(recv|compute|send)", re.ASCII)
_PAIR = re.compile(
    r"FB_Fd(\d+)_mb(\d+)_s(\d+)_Bd(\d+)_mb(\d+)_s(\d+)_(recv|compute|send)", re.ASCII
)
_Part = tuple[str, int, int, int]  # kind, direction, microbatch, stage
_Phases = dict[tuple[int | str, tuple[_Part, ...]], dict[str, tuple[int, int]]]


def _phased(events: Sequence[Event], faults: list[str]) -> Iterator[Block]:
    """The slots of a trace whose slices are named like `F_d0_mb0_s0_compute`.

    Microbatches are numbered anew for each direction; here those of a direction follow those of
    the one before. A backward is an I where a W of its own stands apart.
    """
    phases = _phases(events, faults)
    lanes = sorted({tid for tid, _ in phases}, key=_natural)
    ranks = {tid: Queue(rank) for rank, tid in enumerate(lanes)}
    numbers = _numbers(phases)
    split = {(d, mb, s) for _, parts in phases for k, d, mb, s in parts if k == "W"}
    for (tid, parts), found in phases.items():
        actions = tuple(
            Action(Kind.I if kind == "B" and (d, mb, s) in split else Kind[kind], s, numbers[d, mb])
            for kind, d, mb, s in parts
        )
        recv, work, send = (found.get(phase) for phase in ("recv", "compute", "send"))
        if work is None and recv and send:  # drawn as phases of its own
            work = recv[1], send[0]
        if work is None or work[0] > work[1]:
            text = "+".join(map(str, actions))
            faults.append(f"lane {tid}: {text} has no slice of its computation")
            continue
        yield Block(
            ranks[tid], actions, *work,
            recv[1] - recv[0] if recv else 0, send[1] - send[0] if send else 0,
        )  # fmt: skip


def _phases(events: Sequence[Event], faults: list[str]) -> _Phases:
    """By lane and action, when its phases began and ended."""
    slices, wrong = closed(events, lambda e: _parsed(e.name) is not None)
    out: _Phases = {}
    for e, begin, end in slices:
        parts, phase = _parsed(e.name) or ((), "")
        if not parts:
            faults.append(f"lane {e.tid}: {e.name!r} has a number above the largest, {MAX_STAGE}")
            continue
        known = out.setdefault((e.tid, parts), {})
        if phase in known:
            faults.append(
                f"lane {e.tid}: {e.name!r} stands twice, at {known[phase][0] / 1000:.12g} us and "
                f"at {begin / 1000:.12g} us"
            )
        known[phase] = begin, end
    faults += wrong
    return out


def _parsed(name: str) -> tuple[tuple[_Part, ...], str] | None:
    """What a slice's name says, no parts where a number is too large; None for other names."""
    one, pair = _ONE.fullmatch(name), _PAIR.fullmatch(name)
    if one is None and pair is None:
        return None
    digits = one.groups()[1:4] if one else pair.groups()[:6] if pair else ()
    numbers = [n for text in digits if (n := number_up_to(text, MAX_STAGE)) is not None]
    phase = name.rpartition("_")[2]
    if len(numbers) < len(digits):
        return (), phase
    kinds, threes = one[1] if one else "FB", zip(*[iter(numbers)] * 3, strict=True)
    return tuple((kind, d, mb, s) for kind, (d, mb, s) in zip(kinds, threes, strict=True)), phase


def _natural(lane: int | str) -> tuple[bool, int, str]:
    """Sorts lanes by number where they have one."""
    number = lane if isinstance(lane, int) else number_up_to(lane, MAX_STAGE)
    return number is None, number or 0, str(lane)


def _numbers(phases: _Phases) -> dict[tuple[int, int], int]:
    """The microbatch of each (direction, microbatch)."""
    seen = sorted({(d, mb) for _, parts in phases for _, d, mb, _ in parts})
    return {key: number for number, key in enumerate(seen)}


# --- costs --------------------------------------------------------------------------------------


def _costs(timeline: Timeline, blocks: Sequence[Block]) -> Costs:
    """The costs under which the order takes these times; means where equal work differs."""
    n = timeline.schedule.placement.n_stages
    known = _known(blocks)
    receive, send = max(x.before for x in blocks), max(x.after for x in blocks)
    costs = Costs(
        **read_times({kind: [known.get((kind, s)) for s in range(n)] for kind in WORK}),
        p2p_overhead=(_exact(Fraction(receive)), _exact(Fraction(send)))
        if receive or send else None, latency=_latency(timeline), unit="us",
    )  # fmt: skip
    return _with_fused(costs, blocks, n)


def _known(blocks: Sequence[Block]) -> dict[tuple[Kind, int], Number]:
    """The mean time of each kind and stage, `{(kind, stage): us}`.

    Of those that never stand alone it is what is left of a block for one of them, which takes the
    sum of its parts; a recomputation beside it then counts as its forward does.
    """
    alone: dict[tuple[Kind, int], list[Fraction]] = {}
    left: dict[tuple[Kind, int], list[Fraction]] = {}
    for b in blocks:
        if len(b.actions) == 1:
            alone.setdefault(b.actions[0][:2], []).append(Fraction(b.end - b.start))
    known = {key: sum(x, Fraction()) / len(x) for key, x in alone.items()}
    for b in blocks:
        parts = [a[:2] for a in b.actions]
        forwards = {key: known.get((Kind.F, key[1])) for key in parts if key[0] in USERS}
        there = {key: x for key, x in forwards.items() if x is not None} | known
        unknown = [key for key in parts if key not in there]
        if len(unknown) == 1 and not _is_fused(b):
            others = sum((there[key] for key in parts if key in there), Fraction())
            left.setdefault(unknown[0], []).append(max(Fraction(0), b.end - b.start - others))
    known |= {key: sum(x, Fraction()) / len(x) for key, x in left.items()}
    return {key: _exact(x) for key, x in known.items()}


def _is_fused(block: Block) -> bool:
    """Whether a forward and a backward run together: for these there is `FB`."""
    kinds = {a.kind for a in block.actions}
    return not (kinds.isdisjoint(FORWARDS) or kinds.isdisjoint(BACKWARDS))


def _exact(ns: Fraction) -> Number:
    """ns as us: an int where it is whole."""
    us = ns / 1000
    return int(us) if us.denominator == 1 else us


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


def _with_fused(costs: Costs, blocks: Sequence[Block], n_stages: int) -> Costs:
    """The costs with the rule that gives the times of the slots of a forward and a backward."""
    fused = [(b.actions, _exact(Fraction(b.end - b.start))) for b in blocks if _is_fused(b)]
    if not fused:
        return costs
    single = [
        [per_stage("a time", costs.time(str(ROWS[a.kind].cost)), n_stages)[a.stage] for a in parts]
        for parts, _ in fused
    ]
    if all(x == sum(parts) for (_, x), parts in zip(fused, single, strict=True)):
        return costs
    if all(x == max(parts) for (_, x), parts in zip(fused, single, strict=True)):
        return replace(costs, FB="max")
    values = {x for _, x in fused}
    if len(values) == 1:
        return replace(costs, FB=values.pop())
    whole = sum(float(x) for parts in single for x in parts)
    total = sum(float(x) for _, x in fused)
    return replace(costs, FB={"scale": total / whole} if whole else total / len(fused))
