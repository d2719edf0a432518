"""From a schedule and costs to a timeline: the longest path."""

from __future__ import annotations

from functools import partial

import numpy as np

from hocket.checker import check, is_complete, raise_fault
from hocket.costs import Costs, CostTable
from hocket.deps import IS_RECEIVE
from hocket.graph import Graph, Walk, graph, replay, sources_by_stage, walk
from hocket.ir import Array, Schedule, kinds_of
from hocket.timeline import Timeline

UNIT = Costs()


def simulate(schedule: Schedule, costs: Costs = UNIT, *, blocking: bool = False) -> Timeline:
    """The timeline of a schedule under these costs; every slot starts as early as it can.

    blocking: a RECV in the order holds its queue until the message is there (always so when the
    costs have a p2p_overhead).

    Raises: ScheduleError where the schedule cannot run, CostError where the costs do not fit.
    """
    blocking = blocking or costs.p2p_overhead is not None
    if costs.is_contended(schedule):
        from hocket.simulator.contention import simulate_shared

        timeline = simulate_shared(schedule, costs, blocking=blocking)
        if schedule.has_communication and not blocking:
            _wait_from_post(schedule, graph(schedule), timeline.start, timeline.end)
        return timeline
    if not is_complete(schedule):
        check(schedule).raise_if_bad()
    table = CostTable(costs, schedule)
    found = _walked(table) or _replayed(table, blocking)
    if found is None:
        raise_fault(schedule, blocking=blocking)
    start, end, until = found
    if table.around is not None:
        before, after = table.around
        start += before[schedule.slot_of_action]
        end -= after[schedule.slot_of_action]
    if schedule.has_communication and not blocking:
        _wait_from_post(schedule, graph(schedule), start, end)
    return Timeline(
        schedule=schedule, linked=partial(_linked, table, blocking), start=start, end=end,
        around=table.around, until=until, ticks=table.ticks, unit=costs.unit,
        bytes=table.costs.bytes,
    )  # fmt: skip


def _walked(table: CostTable) -> Walk | None:
    """The times from one pass; None where that does not tell them."""
    work = None if table.adds_up else table.occupied()
    delays = None
    if table.has_delays:
        delays = table.delays_of_needs(*sources_by_stage(table.schedule))
    return walk(table.schedule, table.table, work, delays)


def _replayed(table: CostTable, blocking: bool) -> Walk | None:
    """The times along the graph; None where some slot can never start."""
    (g, delays), schedule = _linked(table, blocking), table.schedule
    if g.stuck or g.n_open:
        return None
    durations = table.occupied()[schedule.slot_of_action[g.first_action]]
    start, end, _ = replay(g, durations, delays)
    return Walk(start[g.node_of_action], end[g.node_of_action], None)


def _linked(table: CostTable, blocking: bool) -> tuple[Graph, Array]:
    """The graph, and the delay of each of its edges."""
    g = graph(table.schedule, blocking=blocking)
    return g, table.delays(g.source, g.crosses)


def _wait_from_post(schedule: Schedule, g: Graph, start: Array, end: Array) -> None:
    """Lets a posted RECV begin where it is posted, so that its span is the wait."""
    kinds = kinds_of(schedule.codes)
    for action in np.flatnonzero(IS_RECEIVE[kinds]).tolist():
        node = int(g.node_of_action[action])
        posts = [e for e in g.edges_of(node) if not g.crosses[e]]
        start[action] = max((end[g.source[e]] for e in posts), default=0)
