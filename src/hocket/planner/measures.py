"""What a plan is measured by: the value of its objective, and whether it keeps the limits."""

from __future__ import annotations

import numpy as np

from hocket.costs import Costs, Number
from hocket.ir import Line, Placement, Schedule, encode, kinds_of, mbs_of, stages_of
from hocket.planner.request import Request, limits
from hocket.simulator import simulate
from hocket.tables import format_bytes
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


def over(request: Request, timeline: Timeline) -> str:
    """Why a schedule does not fit the limits; empty where it does."""
    p = timeline.schedule.p
    flights, memory = limits(request.in_flight, p, "in_flight"), limits(request.memory, p, "memory")
    out = []
    for r, (held, peak) in enumerate(zip(timeline.in_flight, timeline.peak_bytes, strict=True)):
        if flights is not None and held > float(flights[r]) + 1e-9:
            excess = float(held) / float(flights[r])
            out.append((excess, f"holds {float(held):g} in flight on rank {r}; the limit is "
                        f"{float(flights[r]):g}"))  # fmt: skip
        if memory is not None and peak > float(memory[r]) * (1 + 1e-9):
            needed, limit = (format_bytes(float(x), timeline.bytes.unit) for x in (peak, memory[r]))
            out.append(
                (peak / float(memory[r]), f"needs {needed} on rank {r}; the limit is {limit}")
            )
    return max(out)[1] if out else ""


__all__ = ["measure", "over", "period", "repeated"]
