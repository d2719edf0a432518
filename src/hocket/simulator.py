"""From a schedule and costs to a timeline: the longest path.

Imports graph, costs, timeline, checker.
"""

from __future__ import annotations

import numpy as np

from hocket.checker import check, is_complete
from hocket.costs import Costs, CostTable
from hocket.graph import Graph, graph, replay
from hocket.ir import Kind, Schedule, kinds_of
from hocket.timeline import Timeline

UNIT = Costs()


def simulate(schedule: Schedule, costs: Costs = UNIT, *, blocking: bool = False) -> Timeline:
    """The timeline of a schedule under these costs; every slot starts as early as it can.

    blocking: a RECV in the order holds its queue until the message is there (always so when the
    costs have a lane).

    Raises: ScheduleError where the schedule cannot run, CostError where the costs do not fit.
    """
    if costs.share != 1 and len(schedule.queues) > schedule.p:
        from hocket.contention import simulate_shared

        return simulate_shared(schedule, costs)
    g = graph(schedule, blocking=blocking or costs.lane is not None)
    if g.stuck or g.n_open or not is_complete(schedule):
        check(schedule).raise_if_bad()
    table = CostTable(costs, schedule)
    before, after = table.lanes()
    delays = table.delays(g.source, g.crosses)
    start, end = _times(g, table, delays, before, after)
    if schedule.has_communication and not blocking and costs.lane is None:
        _wait_from_post(schedule, g, start, end)
    return Timeline(
        schedule=schedule, graph=g, start=start, end=end, before=before, after=after,
        delays=delays, ticks=table.ticks, unit=costs.unit, bytes=costs.bytes,
    )  # fmt: skip


def _times(
    g: Graph, table: CostTable, delays: np.ndarray, before: np.ndarray, after: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of the work of each action, in ticks."""
    schedule, lanes = g.schedule, table.costs.lane is not None
    durations = table.work()
    if lanes:
        durations = before + durations + after
    if schedule.has_communication:  # a slot may be several nodes
        durations = durations[schedule.slot_of_action[g.first_action]]
    start, end, _ = replay(g, durations, delays)
    if not schedule.is_single or schedule.has_communication:
        start, end = start[g.node_of_action], end[g.node_of_action]
    if lanes:
        start += before[schedule.slot_of_action]
        end -= after[schedule.slot_of_action]
    return start, end


def _wait_from_post(schedule: Schedule, g: Graph, start: np.ndarray, end: np.ndarray) -> None:
    """Lets a posted RECV begin where it is posted, so that its span is the wait."""
    kinds = kinds_of(schedule.codes)
    for action in np.flatnonzero((kinds == Kind.RECV_F) | (kinds == Kind.RECV_B)).tolist():
        node = int(g.node_of_action[action])
        posts = [e for e in g.edges_of(node) if not g.crosses[e]]
        start[action] = max((end[g.source[e]] for e in posts), default=0)
