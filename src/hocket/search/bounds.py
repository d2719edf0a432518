"""What no order can beat: lower bounds of the makespan, with their argument."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hocket.costs import Costs, CostTable, Number, quotient
from hocket.deps import BACKWARDS, IS_WORK, WORK
from hocket.graph import edges
from hocket.ir import Array, Kind, Placement, Schedule, kinds_of, mbs_of, stages_of
from hocket.pattern import lay
from hocket.search.problem import all_actions, longest


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
    head, tail, chain = _chains(schedule, table)
    busy = np.zeros(len(schedule.queues), dtype=slots.dtype)
    np.add.at(busy, schedule.queue_of_slot, slots)
    works = busy.copy()  # messages may belong to work of another queue: no way in and out for them
    if schedule.has_communication:
        np.subtract.at(works, schedule.queue_of_slot, np.where(_holds_work(schedule), 0, slots))
    at = {queue: i for i, queue in enumerate(schedule.queues)}
    queues, value = schedule.placement.queues, table.ticks.value
    whole = [
        max(a + value(works[at[q]]) + b, value(busy[at[q]]))
        for q, a, b in zip(queues, head, tail, strict=True)
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


def _holds_work(schedule: Schedule) -> Array:
    return IS_WORK[kinds_of(schedule.codes[schedule.slots[:-1]])]


def _chains(schedule: Schedule, table: CostTable) -> tuple[list[Number], list[Number], Number]:
    """Shortest time before each queue's first and after its last action, and the longest chain."""
    one, time = _one_microbatch_a_path(schedule, table)
    sources, targets = edges(one)
    rank = one.rank_of_queue[one.queue_of_slot]
    delays = np.where(rank[sources] != rank[targets], table.ways(one.codes[sources]), 0)
    start, rest = np.zeros_like(time), np.zeros_like(time)
    if not _joins_a_chain(schedule):
        start = longest(sources, targets, delays, time)
        rest = longest(targets, sources, delays, time)
    own, n, value = one.queue_of_slot, range(len(one.queues)), table.ticks.value
    heads = [value(start[own == q].min(initial=start.max())) for q in n]
    tails = [value(rest[own == q].min(initial=rest.max())) for q in n]
    return heads, tails, value((start + time + rest).max())


def _joins_a_chain(schedule: Schedule) -> bool:
    """Whether some slot holds two computations of one sequence: its time is no sum along them."""
    if schedule.is_single:
        return False
    work = IS_WORK[kinds_of(schedule.codes)]
    sequence = mbs_of(schedule.codes[work]) // schedule.placement.slices
    pairs = schedule.slot_of_action[work].astype(np.int64) * schedule.m + sequence
    return len(np.unique(pairs)) < len(pairs)


def _one_microbatch_a_path(schedule: Schedule, table: CostTable) -> tuple[Schedule, Array]:
    """One sequence on every path with the kinds that each stage runs there, and its times.

    It is one microbatch, or all slices of one. Each action takes as long as the shortest slot that
    holds such a one. A stage that runs some backwards full and some split counts as the shorter.
    """
    paths, slices = schedule.placement.paths, schedule.placement.slices
    mbs = mbs_of(schedule.codes)
    path = np.array(schedule.placement.path_of)[mbs]
    cells = kinds_of(schedule.codes), stages_of(schedule.codes), path * slices + mbs % slices
    path_of = tuple(path for path in range(len(paths)) for _ in range(slices))
    shape = len(Kind), schedule.placement.n_stages, len(path_of)
    runs, slots = np.zeros(shape, dtype=bool), table.occupied()
    runs[cells] = True
    least = np.full(shape, slots.max(), dtype=slots.dtype)
    np.minimum.at(least, cells, slots[schedule.slot_of_action])
    shortest = least[[*BACKWARDS]].min(axis=0)
    for kind in BACKWARDS:
        least[kind] = np.where(runs[[*BACKWARDS]].all(axis=0), shortest, least[kind])
    whole = all_actions(schedule.name, Placement(paths, path_of, slices), WORK)
    lines = []
    for first, last in pairwise(whole.starts.tolist()):
        codes = whole.codes[first:last]
        lines.append(lay(codes[runs[kinds_of(codes), stages_of(codes), mbs_of(codes)]]))
    one = Schedule.from_lines(schedule.name, whole.placement, lines)
    return one, least[kinds_of(one.codes), stages_of(one.codes), mbs_of(one.codes)]
