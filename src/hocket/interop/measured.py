"""Recorded times as one timeline on one clock, and the costs read back from it.

Imports costs, deps, graph, ir, timeline; no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hocket.costs import Costs, Number, PerStage, Ticks
from hocket.deps import NEEDS
from hocket.graph import Index, graph, message_pairs
from hocket.ir import (
    COMPUTE,
    Array,
    Kind,
    Schedule,
    action_of,
    encode,
    kinds_of,
    stages_of,
)
from hocket.timeline import Timeline


def timeline_of(
    schedule: Schedule,
    start: Array,
    end: Array,
    *,
    around: tuple[Array, Array] | None = None,
    unit: str = "us",
) -> Timeline:
    """The measured timeline of a schedule whose every action has times, `[action]`.

    around: how long each slot occupies its queue before and after its work, `[slot]` both.
    """
    g = graph(schedule)
    kinds = kinds_of(schedule.codes)
    delays = np.zeros(len(g.source))
    message = g.crosses & (kinds[g.source] >= Kind.SEND_F)
    delays[message] = end[g.target[message]] - end[g.source[message]]
    before, after = around or (np.zeros(schedule.n_slots), np.zeros(schedule.n_slots))
    return Timeline(
        schedule=schedule, graph=g, start=start, end=end, before=before, after=after,
        delays=delays, ticks=Ticks(1, exact=False), unit=unit, measured=True,
    )  # fmt: skip


# --- one clock --------------------------------------------------------------------------------


class Messages(NamedTuple):
    """Who sent when, by the sender's clock, and who had it when, by the receiver's."""

    senders: Array
    receivers: Array
    sent: Array
    received: Array


class Clocks(NamedTuple):
    """What to add to each rank's clock, and by how much that may be wrong; in the clocks' unit.

    `uncertainty[r]` is None where nothing bounds it: messages go one way only.
    """

    offsets: Array
    uncertainty: list[float | None]


def messages_of(schedule: Schedule, start: Array, end: Array) -> Messages:
    """The messages of an order with SEND and RECV: each SEND's start, its RECV's end."""
    sends, receives = _pairs(schedule)
    rank = schedule.rank_of_queue[schedule.queue_of_slot[schedule.slot_of_action]]
    return Messages(rank[sends], rank[receives], start[sends], end[receives])


def until_received(schedule: Schedule, start: Array, end: Array) -> Array:
    """The ends, those of SENDs no later than when the message was there.

    What a sender does for a message after that, such as tidying up, is no part of its way.
    """
    sends, receives = _pairs(schedule)
    end = end.copy()
    end[sends] = np.maximum(start[sends], np.minimum(end[sends], end[receives]))
    return end


def _pairs(schedule: Schedule) -> tuple[Array, Array]:
    """The positions of every SEND whose RECV stands in the order, and of the RECV."""
    index = Index(schedule)
    sends, receives = message_pairs(index)
    known = receives < index.n
    return sends[known], receives[known]


def clocks_of(p: int, messages: Messages, *, shared: bool = False) -> Clocks:
    """The clocks of p ranks, from messages that went both ways between them.

    Between two ranks the shortest apparent latencies a and b of the two directions give the
    offset (a - b) / 2, wrong by (a + b) / 2 at most; over the ranks the surest pairs are taken.
    No message then arrives before it was sent. shared: the ranks read one clock; it is kept
    unless a message contradicts that.
    """
    lag: dict[tuple[int, int], float] = {}
    for s, r, gap in zip(
        messages.senders.tolist(), messages.receivers.tolist(),
        (messages.received - messages.sent).tolist(), strict=True,
    ):  # fmt: skip
        lag[s, r] = min(lag.get((s, r), gap), gap)
    if shared and all(gap >= 0 for gap in lag.values()):
        return Clocks(np.zeros(p), [0.0] * p)
    offsets, uncertainty = np.zeros(p), [None] * p
    uncertainty[0] = 0.0
    joined = {0}
    while len(joined) < p:
        pairs = [
            ((lag[a, b] + lag[b, a]) / 2, a, b)
            for a, b in lag
            if a in joined and b not in joined and (b, a) in lag
        ]
        if not pairs:
            break
        width, a, b = min(pairs)
        offsets[b] = offsets[a] - (lag[a, b] - lag[b, a]) / 2
        uncertainty[b] = (uncertainty[a] or 0.0) + abs(width)
        joined.add(b)
    return Clocks(_no_time_travel(offsets, lag), uncertainty)


def _no_time_travel(offsets: Array, lag: dict[tuple[int, int], float]) -> Array:
    """Offsets, moved as little as needed so that no message arrives before it was sent."""
    offsets = offsets.copy()
    for _ in range(len(offsets)):
        moved = False
        for (s, r), gap in lag.items():
            least = offsets[s] - gap
            if offsets[r] < least - 1e-9 * max(1.0, abs(least)):
                offsets[r], moved = least, True
        if not moved:
            break
    return offsets


# --- costs read back ----------------------------------------------------------------------------


class Spread(NamedTuple):
    """Of repeated times: mean, median, between which the middle half lies, how many."""

    mean: float
    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Readings:
    """What timelines of one schedule say, in their unit.

    actions: by kind and stage. between: from one action of a rank to the next when nothing is
    waited for. latency: what a message takes once the waiting rank is free.
    """

    actions: dict[tuple[Kind, int], Spread]
    between: Spread
    latency: Spread
    n_stages: int
    unit: str

    def costs(self) -> Costs:
        """Costs that predict such a timeline: mean actions, typical gaps as receive lane.

        A kind that the order does not have comes from those it has: I and W as halves of B.
        """
        f, i, w, b = (
            [self.actions.get((kind, s)) for s in range(self.n_stages)]
            for kind in (Kind.F, Kind.I, Kind.W, Kind.B)
        )
        input_part, weight_part, whole = [], [], []
        for s in range(self.n_stages):
            has_i, has_w, has_b = i[s], w[s], b[s]
            total = has_b.mean if has_b else _mean(has_i) + _mean(has_w)
            whole.append(total)
            input_part.append(has_i.mean if has_i else total / 2)
            weight_part.append(has_w.mean if has_w else total - input_part[-1])
        lane = self.between.mean
        return Costs(
            F=tuple(_mean(x) for x in f), I=tuple(input_part), W=tuple(weight_part),
            B=tuple(whole), latency=max(0.0, self.latency.mean - lane), lane=(lane, 0.0),
            unit=self.unit,
        )  # fmt: skip

    def rows(self) -> list[str]:
        """One line a time: mean, median, middle half, how many."""
        named = [(f"{k.name} of stage {s}", x) for (k, s), x in sorted(self.actions.items())]
        named += [("between actions", self.between), ("message", self.latency)]
        return [
            f"{name}: mean {_number(x.mean)}, median {_number(x.median)}, middle half "
            f"{_number(x.low)} to {_number(x.high)}, {x.count} times"
            for name, x in named
            if x.count
        ]


def _mean(spread: Spread | None) -> float:
    return 0.0 if spread is None else spread.mean


def _number(value: Number) -> str:
    return str(value) if isinstance(value, int) else repr(float(f"{float(value):.6g}"))


def costs_toml(costs: Costs, comments: Sequence[str] = ()) -> str:
    """Costs as the text of a `costs.toml`, the comments above."""
    lines = [f"# {line}".rstrip() for line in comments]
    lines.append(f'unit = "{costs.unit}"')
    for name in ("F", "I", "W", "B"):
        value: PerStage = costs.whole if name == "B" else getattr(costs, name)
        text = f"[{', '.join(map(_number, value))}]" if isinstance(value, tuple) else _number(value)
        lines.append(f"{name} = {text}")
    if isinstance(costs.FB, Mapping):
        lines.append(f"FB = {{ scale = {_number(costs.FB['scale'])} }}")
    else:
        lines.append(
            f'FB = "{costs.FB}"' if isinstance(costs.FB, str) else f"FB = {_number(costs.FB)}"
        )
    lines.append(f"latency = {_number(costs.latency)}")
    if costs.lane is not None:
        receive, send = map(_number, costs.lane)
        lines.append(f"lane = {{ recv = {receive}, send = {send} }}")
    return "\n".join(lines) + "\n"


def readings(timelines: Sequence[Timeline]) -> Readings:
    """The times of all actions of these timelines of one schedule, put together."""
    actions: dict[tuple[Kind, int], list[float]] = {}
    between: list[float] = []
    latency: list[float] = []
    for timeline in timelines:
        codes = timeline.schedule.codes
        single = timeline.schedule.widths[timeline.schedule.slot_of_action] == 1
        kinds, stages = kinds_of(codes), stages_of(codes)
        for kind in COMPUTE:
            own = (kinds == kind) & single
            for stage in np.unique(stages[own]).tolist():
                chosen = own & (stages == stage)
                times = (timeline.end - timeline.start)[chosen] / timeline.ticks.scale
                actions.setdefault((kind, stage), []).extend(times.astype(float).tolist())
        _add_gaps(timeline, between, latency)
    first = timelines[0]
    return Readings(
        {key: spread_of(times) for key, times in actions.items()},
        spread_of(between), spread_of(latency), first.schedule.placement.n_stages, first.unit,
    )  # fmt: skip


def _add_gaps(timeline: Timeline, between: list[float], latency: list[float]) -> None:
    """Sorts what lies before each action of work: what passes between two, or a message's way."""
    s, scale = timeline.schedule, timeline.ticks.scale
    start, end = (x.astype(float) / scale for x in (timeline.start, timeline.end))
    at = {code: i for i, code in enumerate(s.codes.tolist())}
    queue = s.queue_of_slot[s.slot_of_action]
    compute = np.flatnonzero(kinds_of(s.codes) < Kind.SEND_F)
    for q in range(len(s.queues)):
        own = compute[queue[compute] == q]
        own = own[np.lexsort((own, start[own]))].tolist()
        for before, a in pairwise(own):
            if s.slot_of_action[before] == s.slot_of_action[a]:
                continue
            free = end[before]
            source, arrived = _arrival(s, at, queue, int(a), end)
            if arrived <= free:
                between.append(float(start[a] - free))
            elif source >= free:
                latency.append(float(start[a] - source))


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
