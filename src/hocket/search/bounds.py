"""What no order can beat: lower bounds of the makespan, with their argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hocket.costs import Costs, CostTable, Number, Ticks, fused_rule, quotient
from hocket.deps import BACKWARDS, WORK
from hocket.graph import edges
from hocket.ir import Array, Kind, Placement, Schedule, kinds_of, mbs_of, stages_of
from hocket.pattern import lay
from hocket.search.policy import all_actions


class Bound(NamedTuple):
    """A time no order goes below, and why."""

    value: Number
    argument: str


def lower_bounds(schedule: Schedule, costs: Costs) -> tuple[Bound, ...]:
    """Lower bounds of the makespan of any order of this schedule's slots.

    The busiest queue: its work, after the shortest way to its first action and before the
    shortest way from its last. The longest chain: one microbatch there and back alone. Where
    ranks share cores: the work of all. A fused slot counts as it is: the bounds hold for orders
    that fuse the same.
    """
    table = CostTable(costs, schedule)
    slots = table.occupied()
    head, tail, chain = _chains(schedule, costs)
    busy = np.zeros(len(schedule.queues), dtype=slots.dtype)
    np.add.at(busy, schedule.queue_of_slot, slots)
    at = {queue: i for i, queue in enumerate(schedule.queues)}
    queues = schedule.placement.queues
    whole = [
        a + table.ticks.value(busy[at[q]]) + b for q, a, b in zip(queues, head, tail, strict=True)
    ]
    runs = np.diff(schedule.starts) > 0  # a queue that runs nothing bounds nothing
    idle = [not runs[at[q]] for q in queues]
    longest = max(range(len(queues)), key=lambda i: (not idle[i], float(whole[i])))
    work = Bound(
        _plain(whole[longest]),
        f"rank {queues[longest]} works that long, with the shortest way in and out",
    )
    one = "one sequence" if schedule.placement.slices > 1 else "one microbatch"
    alone = Bound(_plain(chain), f"{one} alone takes that long there and back")
    computes = np.array([not queue.stream for queue in schedule.queues])
    if costs.cores is None or not costs.shares_cores(computes.sum()):
        return work, alone
    return work, alone, shared_bound(table.ticks.value(busy[computes].sum()), costs.cores)


def work_bound(schedule: Schedule, costs: Costs) -> Bound:
    """The work of the busiest queue: a bound of the makespan, the span and the period."""
    table = CostTable(costs, schedule)
    busy = np.zeros(len(schedule.queues), dtype=table.table.dtype)
    np.add.at(busy, schedule.queue_of_slot, table.occupied())
    most = int(np.argmax(busy))
    return Bound(
        _plain(table.ticks.value(busy[most])), f"rank {schedule.queues[most]} works that long"
    )


def shared_bound(work: Number, cores: int) -> Bound:
    """What ranks that share cores need at least, for that much work together."""
    what = f"the work of all ranks on {cores} core{'s' * (cores > 1)}"
    return Bound(_plain(quotient(work, cores)), what)


def _plain(x: Number) -> Number:
    return int(x) if x == int(x) and not isinstance(x, float) else x


def _chains(schedule: Schedule, costs: Costs) -> tuple[list[Number], list[Number], Number]:
    """Shortest time before each queue's first and after its last action, and the longest chain."""
    one, time, ticks, delays_of = _one_microbatch_a_path(schedule, costs)
    sources, targets = edges(one)
    rank = one.rank_of_queue[one.queue_of_slot]
    delays = delays_of(sources, rank[sources] != rank[targets])
    start = _longest(len(time), sources, targets, delays, time)
    rest = _longest(len(time), targets, sources, delays, time)
    if not schedule.is_single and fused_rule(costs.FB)[0] in ("number", "scale"):
        # parts of fused slots may be shorter than alone
        start, rest = np.zeros_like(start), np.zeros_like(rest)
    own, n = one.queue_of_slot, range(len(one.queues))
    heads = [ticks.value(start[own == q].min(initial=_top(start))) for q in n]
    tails = [ticks.value(rest[own == q].min(initial=_top(rest))) for q in n]
    return heads, tails, ticks.value((start + time + rest).max())


def _top(values: Array) -> Number:
    return values.max()


def _one_microbatch_a_path(
    schedule: Schedule, costs: Costs
) -> tuple[Schedule, Array, Ticks, Callable[[Array, Array], Array]]:
    """One sequence on every path with the kinds that each stage runs there, and its times.

    It is one microbatch, or all slices of one. A stage that runs some backwards full and some
    split counts as the shorter.
    """
    paths, n = schedule.placement.paths, schedule.placement.n_stages
    kinds, stages = kinds_of(schedule.codes), stages_of(schedule.codes)
    path = np.array(schedule.placement.path_of)[mbs_of(schedule.codes)]
    runs = np.zeros((len(Kind), n, len(paths)), dtype=bool)
    runs[kinds, stages, path] = True
    slices = schedule.placement.slices
    path_of = tuple(path for path in range(len(paths)) for _ in range(slices))
    whole = all_actions(schedule.name, Placement(paths, path_of, slices), WORK)
    own = kinds_of(whole.codes), stages_of(whole.codes), mbs_of(whole.codes) // slices
    lines = []
    for q in range(len(whole.queues)):
        mine = slice(int(whole.starts[q]), int(whole.starts[q + 1]))
        lines.append(lay(whole.codes[mine][runs[own][mine]]))
    one = Schedule.from_lines(schedule.name, whole.placement, lines)
    table = CostTable(costs, one)
    time = table.occupied()
    either = np.all(runs[[*BACKWARDS]], axis=0)
    path = mbs_of(one.codes) // slices
    shortest = np.full((*either.shape[:1], len(path_of)), time.max(initial=0))
    backward = np.isin(kinds_of(one.codes), BACKWARDS) & either[stages_of(one.codes), path]
    spot = (stages_of(one.codes)[backward], mbs_of(one.codes)[backward])
    np.minimum.at(shortest, spot, time[backward])
    time[backward] = shortest[spot]
    return one, time, table.ticks, table.delays


def _longest(n: int, sources: Array, targets: Array, delays: Array, time: Array) -> Array:
    """Longest path to the start of each node (to its end's rest, with the edges turned)."""
    reach = np.zeros(n, dtype=time.dtype)
    for _ in range(n + 1):
        new = reach.copy()
        np.maximum.at(new, targets, reach[sources] + time[sources] + delays)
        if np.array_equal(new, reach):
            break
        reach = new
    return reach
