"""From a schedule and costs to a timeline: the longest path."""

from __future__ import annotations

import numpy as np

from hocket.checker import check, is_complete, raise_fault
from hocket.costs import Costs, CostTable
from hocket.engine import Times, along, walk
from hocket.graph import graph
from hocket.ir import Array, Schedule
from hocket.lower.communication import has_wide_messages, part_messages
from hocket.timeline import Timeline

UNIT = Costs()


def simulate(schedule: Schedule, costs: Costs = UNIT, *, blocking: bool = False) -> Timeline:
    """The timeline of a schedule under these costs; every slot starts as early as it can.

    blocking: a RECV in the order holds its queue until the message is there (always so when the
    costs have a p2p_overhead). A slot of messages is then its sends and, behind them, its receives;
    the schedule of the timeline has these as two slots.

    Raises: ScheduleError where the schedule cannot run, CostError where the costs do not fit.
    """
    blocking = blocking or costs.p2p_overhead is not None
    if not is_complete(schedule):
        check(schedule).raise_if_bad()
    if blocking and has_wide_messages(schedule):
        if graph(schedule, blocking=True).stuck:
            raise_fault(schedule, blocking=True)
        schedule = part_messages(schedule)
    if costs.is_contended(schedule):
        from hocket.simulator.contention import simulate_shared

        timeline = simulate_shared(schedule, costs, blocking=blocking)
    else:
        timeline = _simulate(schedule, costs, blocking)
    if schedule.has_communication and not blocking:
        _wait_from_post(schedule, timeline.start, timeline.end)
    return timeline


def _simulate(schedule: Schedule, costs: Costs, blocking: bool) -> Timeline:
    """The timeline where nothing slows."""
    table = CostTable(costs, schedule)
    times = _times(table, blocking)
    if times is None:
        raise_fault(schedule, blocking=blocking)
    start, end, held = times
    if table.around is not None:
        before, after = table.around
        start += before[schedule.slot_of_action]
        end -= after[schedule.slot_of_action]
    return Timeline(
        schedule=schedule, start=start, end=end, around=table.around, wires=table.wires,
        blocking=blocking, held=held, ticks=table.ticks, unit=costs.unit, bytes=table.costs.bytes,
    )  # fmt: skip


def _times(table: CostTable, blocking: bool) -> Times | None:
    """When actions occupy their queue: by one pass, and where that is too simple, by the graph."""
    s, work = table.schedule, None if table.adds_up else table.occupied()
    times = walk(s, table.table, work, table.wires)
    if times is not None:
        return times
    g = graph(s, blocking=blocking)
    return along(g, g.by_node(table.occupied()), table.wires)


def _wait_from_post(schedule: Schedule, start: Array, end: Array) -> None:
    """Lets a posted RECV begin where it is posted, so that its span is the wait."""
    g = graph(schedule)
    posts = g.nodes.posts
    start[g.first_action[g.n_nodes - len(posts) :]] = np.where(posts >= 0, end[posts], 0)
