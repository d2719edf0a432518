"""Costs read back from recorded times: of actions, of what lies between them, of messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np

from hocket.costs import Bytes, Costs
from hocket.costs.scaling import read_times
from hocket.deps import IS_WORK, MESSAGE, NEEDS, WORK
from hocket.ir import (
    Array,
    Kind,
    Schedule,
    action_of,
    encode,
    kinds_of,
    mbs_of,
    stages_of,
)
from hocket.timeline import Timeline

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


class Spread(NamedTuple):
    """Of repeated times: mean, median, between which the middle half lies, how many."""

    mean: float
    median: float
    low: float
    high: float
    count: int


Typical = Literal["mean", "median", "low"]


@dataclass(frozen=True)
class Readings:
    """What timelines of one schedule say, in one unit.

    actions: by kind, stage and slice (0 where sequences are whole). between: from one action of a
    rank to the next when nothing is waited for. latency: what a message takes once the waiting
    rank is free. cores: of the machine, where the ranks shared them, and comm_cpu: what each
    message took of them beside; the times are as if each rank had a core to itself.
    """

    actions: dict[tuple[Kind, int, int], Spread]
    between: Spread
    latency: Spread
    n_stages: int
    slices: int
    unit: str
    cores: int | None = None
    comm_cpu: float = 0.0

    def costs(
        self,
        time: Typical = "mean",
        gap: Typical = "mean",
        *,
        sizes: Bytes | None = None,
        bandwidth: float | None = None,
        message: float = 0.0,
    ) -> Costs:
        """Costs that predict such a timeline: typical actions, typical gaps as receive overhead.

        time, gap: what is typical of actions, and of what lies between them ("low", the lower
        quartile, where long ones are those of a busy machine). A kind that the order does not
        have comes from those it has: a full backward is I and W, and these are half of it each.
        With slices the times are those of the mean slice, and each slice has one factor for all.
        bandwidth: of the links, in bytes a time unit. message: bytes of the mean one that passed
        between ranks; what that is of their time is taken off the latency, which is 0 at least.
        """
        times = read_times({kind: self._by_stage(kind, time) for kind in WORK})
        lane = getattr(self.between, gap)
        size = message / bandwidth if bandwidth else 0.0
        latency = max(0.0, getattr(self.latency, gap) - lane - size)
        return Costs(
            **times, latency=latency, bandwidth=bandwidth, p2p_overhead=(lane, 0.0),
            bytes=sizes or Bytes(), unit=self.unit,
            slice=self._factors(time), cores=self.cores, comm_cpu=self.comm_cpu,
        )  # fmt: skip

    def _by_stage(self, kind: Kind, time: Typical) -> list[Any]:
        rows: list[list[float]] = [[] for _ in range(self.n_stages)]
        for (found, stage, _), spread in self.actions.items():
            if found == kind:
                rows[stage].append(getattr(spread, time))
        return [fmean(row) if row else None for row in rows]

    def _factors(self, time: Typical) -> tuple[float, ...] | None:
        """The time of each slice over that of the mean one, all kinds and stages together."""
        if self.slices == 1:
            return None
        totals = [0.0] * self.slices
        for (_, _, part), spread in self.actions.items():
            totals[part] += getattr(spread, time)
        return tuple(total / fmean(totals) if any(totals) else 1.0 for total in totals)

    def named(self) -> Iterator[tuple[str, Spread]]:
        """Every time that was read, with what it is."""
        for (kind, stage, part), spread in sorted(self.actions.items()):
            which = f", slice {part}" if self.slices > 1 else ""
            yield f"{kind.name} of stage {stage}{which}", spread
        yield "between actions", self.between
        yield "message", self.latency

    def rows(self) -> list[str]:
        """One line a time: mean, median, middle half, how many."""
        return [
            f"{name}: mean {x.mean:.6g}, median {x.median:.6g}, middle half "
            f"{x.low:.6g} to {x.high:.6g}, {x.count} times"
            for name, x in self.named()
            if x.count
        ]


def readings(
    timelines: Sequence[Timeline], unit: str | None = None, *, waited: bool = False,
    cores: int | None = None, comm_cpu: float = 0.0,
) -> Readings:  # fmt: skip
    """The times of all actions of these timelines of one schedule, put together.

    unit: of the result (left out: theirs). waited: a RECV ends where its consumer begins, as our
    own ranks record it, and not where the message came. What passes between two actions is then
    what does after a message that was surely there; where nothing does, it is unknown. cores:
    of the one machine, where more ranks than that computed on it; left out: each had its own.
    comm_cpu: how long each message kept one of these busy, in the result's unit.
    """
    actions: dict[tuple[Kind, int, int], list[float]] = {}
    gaps = _Gaps([], [], [])
    first = timelines[0]
    slices = first.schedule.placement.slices
    factor = 1.0 if unit is None else SECONDS.get(first.unit, SECONDS[unit]) / SECONDS[unit]
    for timeline in timelines:
        start, end = (x * (factor / timeline.ticks.scale) for x in (timeline.start, timeline.end))
        codes = timeline.schedule.codes
        single = timeline.schedule.widths[timeline.schedule.slot_of_action] == 1
        kinds, stages, parts = kinds_of(codes), stages_of(codes), mbs_of(codes) % slices
        alone = _alone(timeline.schedule, start, end, cores, comm_cpu)
        took = np.zeros(len(codes))
        for r, own in enumerate(_of_ranks(timeline.schedule)):
            took[own] = alone(r, start[own], end[own])
        for kind in WORK:
            own = (kinds == kind) & single
            for stage, part in np.unique(np.stack([stages, parts])[:, own], axis=1).T.tolist():
                chosen = own & (stages == stage) & (parts == part)
                actions.setdefault((kind, stage, part), []).extend(took[chosen].tolist())
        _add_gaps(timeline.schedule, start, end, gaps, alone)
    latency = spread_of(gaps.latency)
    between = gaps.between
    if waited:
        between = [gap for gap in between if gap > 0]
        between += [gap for slack, gap in gaps.unsure if slack >= latency.high]
    return Readings(
        {key: spread_of(times) for key, times in actions.items()},
        spread_of(between), latency, first.schedule.placement.n_stages, slices,
        unit or first.unit, cores, comm_cpu if cores else 0.0,
    )  # fmt: skip


Alone = Callable[[int, Any, Any], Any]  # rank, times from, times to


def _alone(
    s: Schedule, start: Array, end: Array, cores: int | None, comm_cpu: float = 0.0
) -> Alone:
    """How long a rank would have taken between two times with a core to itself.

    While n ranks compute, or would if they had one of the cores, or messages are copied, each is
    at cores/n of its speed.
    """
    if cores is None:
        return lambda rank, begin, until: until - begin
    kinds = kinds_of(s.codes)
    computes = IS_WORK[kinds]
    sent = start[np.isin(kinds, [send for send, _, _ in MESSAGE.values()])]
    at = np.unique(np.concatenate([start[computes], end[computes], sent, sent + comm_cpu]))

    def running(begin: Array, until: Array) -> Array:
        """How many of these run in each stretch of time."""
        change = np.bincount(np.searchsorted(at, begin), minlength=len(at))
        return (change - np.bincount(np.searchsorted(at, until), minlength=len(at))).cumsum()

    busy = np.array(
        [running(start[own & computes], end[own & computes]) > 0 for own in _of_ranks(s)]
    )
    others = busy.sum(axis=0) - busy + running(sent, sent + comm_cpu)
    speed = np.minimum(1.0, cores / (1 + others))[:, :-1]
    clock = np.zeros(busy.shape)
    np.cumsum(speed * np.diff(at), axis=1, out=clock[:, 1:])
    return lambda rank, begin, until: (
        np.interp(until, at, clock[rank]) - np.interp(begin, at, clock[rank])
    )


def _of_ranks(s: Schedule) -> Array:
    """Which actions are whose, `[rank, action]`."""
    rank = s.rank_of_queue[s.queue_of_slot[s.slot_of_action]]
    return rank == np.arange(s.p)[:, None]


def together(whole: Readings, split: Readings) -> Readings:
    """One order run with full backwards and run with split ones, as one: all four kinds.

    What a forward takes longer where its backward is split (of the medians) is counted to I.
    """
    actions = dict(whole.actions)
    for (kind, stage, part), spread in split.actions.items():
        if kind == Kind.I:
            forward = Kind.F, stage, part
            more = max(0.0, split.actions[forward].median - whole.actions[forward].median)
            spread = Spread(*(x + more for x in spread[:4]), spread.count)
        if kind in (Kind.I, Kind.W):
            actions[kind, stage, part] = spread
    return replace(whole, actions=actions)


def fused_of(schedule: Schedule, timelines: Sequence[Timeline], cores: int | None = None) -> Spread:
    """Of slots with a forward and a backward: from first start to last end, over their work alone.

    timelines: of the schedule's actions, each in a slot of its own. cores: as for `readings`.
    """
    ratios = []
    for timeline in timelines:
        codes = timeline.schedule.codes
        at = {code: i for i, code in enumerate(codes.tolist())}
        start, end = (x / timeline.ticks.scale for x in (timeline.start, timeline.end))
        alone = _alone(timeline.schedule, start, end, cores)
        for slot in np.flatnonzero(schedule.widths > 1).tolist():
            whole = schedule.codes[schedule.slots[slot] : schedule.slots[slot + 1]]
            parts = [at[code] for code in whole[IS_WORK[kinds_of(whole)]].tolist()]
            if len(parts) < 2:
                continue
            rank = int(schedule.rank_of_queue[schedule.queue_of_slot[slot]])
            work = float(np.sum(alone(rank, start[parts], end[parts])))
            if work:
                ratios.append(float(alone(rank, start[parts].min(), end[parts].max())) / work)
    return spread_of(ratios)


class Link(NamedTuple):
    """Two ranks, between which a message of n bytes takes latency + n / bandwidth ms.

    bandwidth: bytes a ms; None where larger messages took no longer.
    """

    ranks: tuple[int, int]
    latency: float
    bandwidth: float | None


def link_of(ranks: tuple[int, int], times: Mapping[int, float]) -> Link:
    """The link whose messages take these ms, by bytes: the line with the least relative errors."""
    sizes, took = np.array([*times], dtype=float), np.array([*times.values()])
    slope, start = np.polyfit(sizes, took, 1, w=1 / took)
    return Link(ranks, max(0.0, float(start)), 1 / float(slope) if slope > 0 else None)


def bandwidth_of(links: Sequence[Link]) -> float | None:
    """Bytes a ms of the mean link: what a byte takes on all of them one after the other."""
    times = [1 / link.bandwidth for link in links if link.bandwidth]
    return 1 / fmean(times) if times else None


class _Gaps(NamedTuple):
    """What lies before actions of work: what passes between two of a rank, or a message's way.

    unsure: where a message is seen to be there only when it is waited for, how long it was under
    way before its rank was free, and the gap then.
    """

    between: list[float]
    latency: list[float]
    unsure: list[tuple[float, float]]


def _add_gaps(s: Schedule, start: Array, end: Array, gaps: _Gaps, alone: Alone) -> None:
    """Sorts the gaps before the actions of a timeline."""
    at = {code: i for i, code in enumerate(s.codes.tolist())}
    queue = s.queue_of_slot[s.slot_of_action]
    compute = np.flatnonzero(IS_WORK[kinds_of(s.codes)])
    for q, (rank, _) in enumerate(s.queues):
        own = compute[queue[compute] == q]
        own = own[np.lexsort((own, start[own]))].tolist()
        for before, a in pairwise(own):
            free, gap = end[before], float(alone(rank, end[before], start[a]))
            if s.slot_of_action[before] == s.slot_of_action[a]:
                continue
            source, arrived = _arrival(s, at, queue, int(a), end)
            if arrived <= free:
                gaps.between.append(gap)
            elif source >= free:
                gaps.latency.append(float(alone(rank, source, start[a])))
            else:
                gaps.unsure.append((float(alone(rank, source, free)), gap))


def _arrival(
    schedule: Schedule, at: Mapping[int, int], queue: Array, action: int, end: Array
) -> tuple[float, float]:
    """When what an action needs of another queue was made, and when it was there."""
    made = there = -np.inf
    one = action_of(schedule.codes[action])
    for need in NEEDS[one.kind]:
        for kind, shift in need.sources:
            found = at.get(encode(int(kind), one.stage + shift, one.mb + need.step))
            if found is None or (not kind.is_communication and queue[found] == queue[action]):
                continue
            there = max(there, end[found])
            if not kind.is_communication:
                made = max(made, end[found])
    return made, there


def spread_of(times: Sequence[float]) -> Spread:
    """The spread of repeated times; all zero where there are none."""
    if not times:
        return Spread(0.0, 0.0, 0.0, 0.0, 0)
    low, middle, high = np.quantile(times, (0.25, 0.5, 0.75)).tolist()
    return Spread(float(np.mean(times)), middle, low, high, len(times))
