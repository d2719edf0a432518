"""What a plan is measured by: the value of its objective, and whether it keeps the limits."""

from __future__ import annotations

import numpy as np

from hocket.costs import Costs, Number
from hocket.ir import Line, Placement, Schedule, encode, kinds_of, mbs_of, stages_of
from hocket.planner.request import Request, limits
from hocket.simulator import simulate
from hocket.timeline import Timeline


def measure(timeline: Timeline, costs: Costs, objective: str) -> Number:
    """The value of an objective."""
    if objective == "makespan":
        return timeline.makespan
    if objective == "span":
        return timeline.span
    return period(timeline.schedule, costs)


def period(schedule: Schedule, costs: Costs, repeats: int = 4) -> Number:
    """Time from one step to the next when the order repeats without a barrier."""
    ends = [simulate(repeated(schedule, n), costs).makespan for n in (repeats - 1, repeats)]
    return ends[1] - ends[0]


def repeated(schedule: Schedule, times: int) -> Schedule:
    """The order several times over, each with microbatches of its own."""
    lines = []
    placement = schedule.placement
    for q in range(len(schedule.queues)):
        a, b = int(schedule.starts[q]), int(schedule.starts[q + 1])
        codes = schedule.codes[schedule.slots[a] : schedule.slots[b]]
        widths = schedule.widths[a:b]
        kinds, stages, mbs = kinds_of(codes), stages_of(codes), mbs_of(codes)
        parts = [encode(kinds, stages, mbs + i * placement.m) for i in range(times)]
        lines.append(Line(np.concatenate(parts), np.tile(widths, times)))
    longer = Placement(placement.paths, placement.path_of * times, placement.slices)
    queues = dict(zip(schedule.queues, lines, strict=True))
    return Schedule.from_lines(schedule.name, longer, queues)


def over(request: Request, timeline: Timeline, v: int) -> str:
    """Why a schedule does not fit the limits; empty where it does."""
    p = timeline.schedule.p
    slices = timeline.schedule.placement.slices
    pairs, given = limits(request.in_flight, p, "in_flight"), limits(request.memory, p, "memory")
    out = []
    for rank in timeline.ranks:
        if pairs is not None and rank.peak_in_flight > float(pairs[rank.rank]) * v * slices + 1e-9:
            held = rank.peak_in_flight / v / slices
            excess = held / float(pairs[rank.rank])
            out.append((excess, f"holds {held:g} in flight on rank {rank.rank}; the limit is "
                        f"{float(pairs[rank.rank]):g}"))  # fmt: skip
        if given is not None and rank.peak_bytes > float(given[rank.rank]) * (1 + 1e-9):
            excess = rank.peak_bytes / float(given[rank.rank])
            out.append((excess, f"needs {rank.peak_bytes:g} bytes on rank {rank.rank}; the limit "
                        f"is {float(given[rank.rank]):g}"))  # fmt: skip
    return max(out)[1] if out else ""


__all__ = ["measure", "over", "period", "repeated"]
