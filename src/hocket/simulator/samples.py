"""Many simulations at once: one order under many costs, or many orders on all cores.

An order that can run is replayed along one topological order, samples side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from hocket import compiled
from hocket.checker import check, is_complete, raise_fault
from hocket.costs import Costs, CostTable, Number
from hocket.deps import IS_WORK
from hocket.errors import CostError
from hocket.graph import Graph, graph
from hocket.ir import Array, Schedule, kinds_of
from hocket.lower.communication import has_wide_messages, part_messages
from hocket.simulator import UNIT, simulate

SIDE_BY_SIDE = 32  # samples replayed at once: a few cache lines a node


class Samples(NamedTuple):
    """What each sample came to: `makespan` `[sample]`, `ends` of the ranks `[sample, rank]`.

    Integers where all costs are whole numbers, else floats; in the unit of the costs.
    """

    makespan: Array
    ends: Array


class Outcome(NamedTuple):
    """The metrics of one simulation, without its arrays. `peaks` by rank."""

    makespan: Number
    span: Number
    bubble_ratio: float
    peaks_in_flight: tuple[int, ...]
    peaks_bytes: tuple[float, ...]


def simulate_samples(
    schedule: Schedule, costs: Sequence[Costs] | Array, *, base: Costs = UNIT
) -> Samples:
    """The makespan of one order under many costs: what `simulate` gives for each, in one go.

    costs: one `Costs` a sample, or durations `[sample, action]` (a fused slot takes its longest
    part); then `base` gives latency, bandwidth and lanes.

    Raises: ScheduleError where the schedule cannot run, CostError where the costs do not fit.
    """
    if isinstance(costs, np.ndarray):
        g = _runnable(schedule, base)
        return _replayed(g, len(costs), base, lambda part: _given(g, costs[part]))
    if not costs:
        raise CostError("no costs are given")
    if any((c.p2p_overhead is None) != (costs[0].p2p_overhead is None) for c in costs):
        raise CostError("some costs have a p2p_overhead and some do not; replay them apart")
    g = _runnable(schedule, costs[0], parted=True)
    tables = [CostTable(c, g.schedule) for c in costs]
    whole = all(t.ticks.scale == 1 for t in tables)

    def side_by_side(make: Callable[[CostTable], Array], part: slice) -> Array:
        rows = [make(t) if whole else make(t) / t.ticks.scale for t in tables[part]]
        return np.stack(rows, axis=1)

    return _blocks(
        g, len(tables),
        lambda part: side_by_side(lambda t: g.by_node(t.occupied()), part),
        lambda part: side_by_side(lambda t: t.delays(g.source, g.crosses), part),
    )  # fmt: skip


def simulate_jitter(
    schedule: Schedule, costs: Costs = UNIT, *, samples: int = 1000, spread: float = 0.05,
    seed: int = 0,
) -> Samples:  # fmt: skip
    """The makespans when every action takes longer or shorter at random.

    Each slot's time is multiplied by a normal variate of mean 1 and standard deviation `spread`
    (never below 0), drawn anew in every sample.
    """
    g = _runnable(schedule, costs, parted=True)
    rng = np.random.Generator(np.random.SFC64(seed))
    table = CostTable(costs, g.schedule)
    work = g.by_node(table.occupied()).astype(np.float64)[:, None] / table.ticks.scale

    def durations(part: slice) -> Array:
        factor = rng.standard_normal((g.n_nodes, part.stop - part.start), dtype=np.float32)
        factor *= spread
        factor += 1
        np.maximum(factor, 0, out=factor)
        return work * factor

    return _replayed(g, samples, costs, durations)


def replay(g: Graph, durations: Array, delays: Array) -> Samples:
    """The makespan of each sample, from the time that every node and every edge takes in it.

    durations: `[node, sample]`, delays: `[edge, sample]`, of the graph of a schedule that can run.
    """
    return _blocks(
        g, durations.shape[1], lambda part: durations[:, part], lambda part: delays[:, part]
    )


def simulate_many(
    schedules: Iterable[Schedule], costs: Costs = UNIT, *, processes: int = 1
) -> list[Outcome]:
    """The metrics of many orders; with several processes, on as many cores."""
    if processes == 1:
        return [_outcome(s, costs) for s in schedules]
    from concurrent.futures import ProcessPoolExecutor
    from functools import partial
    from multiprocessing import get_context

    schedules = list(schedules)
    share = max(1, len(schedules) // (4 * processes))
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(partial(_outcome, costs=costs), schedules, chunksize=share))


def _outcome(schedule: Schedule, costs: Costs) -> Outcome:
    t = simulate(schedule, costs)
    return Outcome(
        t.makespan, t.span, t.bubble_ratio,
        tuple(map(int, t.peaks("in_flight"))), tuple(t.peak_bytes),
    )  # fmt: skip


def _runnable(schedule: Schedule, costs: Costs, *, parted: bool = False) -> Graph:
    """The graph; with `parted` that of slots of messages as they run where these block."""
    costs.raise_if_contended(schedule)
    blocking = costs.p2p_overhead is not None
    g = graph(schedule, blocking=blocking)
    if not is_complete(schedule):
        check(schedule).raise_if_bad()
    if g.stuck or g.n_open:
        raise_fault(schedule, blocking=blocking)
    if parted and blocking and has_wide_messages(schedule):
        return graph(part_messages(schedule), blocking=True)
    return g


def _given(g: Graph, durations: Array) -> Array:
    """Durations `[sample, action]` as `[node, sample]`."""
    if durations.shape[1] != len(g.schedule.codes):
        raise CostError(
            f"durations are given for {durations.shape[1]} actions, but the schedule has "
            f"{len(g.schedule.codes)}"
        )
    if not len(g.nodes.of_action):
        return np.array(durations.T, order="C")
    out = np.zeros((g.n_nodes, len(durations)), dtype=durations.dtype)
    np.maximum.at(out, g.node_of_action, durations.T)
    return out


def _replayed(g: Graph, n: int, costs: Costs, durations: Callable[[slice], Array]) -> Samples:
    """Samples that share the delays of one set of costs."""
    table = CostTable(costs, g.schedule)
    ticks = table.delays(g.source, g.crosses)
    if table.ticks.scale != 1:
        ticks = ticks / table.ticks.scale
    row = ticks[:, None] if ticks.any() else np.zeros((1, 1), dtype=ticks.dtype)
    return _blocks(g, n, durations, lambda part: np.repeat(row, part.stop - part.start, axis=1))


def _blocks(
    g: Graph, n: int, durations: Callable[[slice], Array], delays: Callable[[slice], Array]
) -> Samples:
    """Replays some samples at a time, and keeps only the ends of the ranks."""
    last, rank = _last_nodes(g)
    dtype, rows = np.dtype(np.int64), []
    for at in range(0, n, SIDE_BY_SIDE):
        part = slice(at, min(at + SIDE_BY_SIDE, n))
        end, delay = durations(part), delays(part)
        dtype = np.result_type(end, delay)
        end, delay = np.ascontiguousarray(end, dtype), np.ascontiguousarray(delay, dtype)
        room = np.zeros(end.shape[1], dtype=dtype)
        order = (g.sequence, g.heads, g.need_starts, g.needs, delay)
        compiled.run(replay_samples, end.size, order, (room, end))
        of_ranks = np.zeros((g.schedule.p, end.shape[1]), dtype=dtype)
        np.maximum.at(of_ranks, rank, end[last])
        rows.append(of_ranks.T)
    ends = np.concatenate(rows) if rows else np.zeros((0, g.schedule.p), dtype=dtype)
    return Samples(ends.max(axis=1), ends)


def _last_nodes(g: Graph) -> tuple[Array, Array]:
    """The last node that occupies each queue, and the rank of each queue that does work.

    Messages occupy a queue where they block it, with a p2p_overhead.
    """
    s = g.schedule
    if not s.has_communication:
        queues = np.flatnonzero(np.diff(s.starts))
        return s.starts[queues + 1] - 1, s.rank_of_queue[queues]
    if len(g.chains) - 1 == len(s.queues):  # nothing is posted: messages block
        queues = np.flatnonzero(np.diff(g.chains))
        return g.chains[queues + 1] - 1, s.rank_of_queue[queues]
    nodes = np.flatnonzero(IS_WORK[kinds_of(s.codes[g.first_action])])
    queue = s.queue_of_slot[s.slot_of_action[g.first_action[nodes]]]
    last = np.full(len(s.queues), -1, dtype=np.int64)
    np.maximum.at(last, queue, nodes)
    queues = np.flatnonzero(last >= 0)
    return last[queues], s.rank_of_queue[queues]


# --- loops, plain or compiled ------------------------------------------------------------------


def replay_samples(sequence, heads, need_starts, needs, delays, time, end):
    """Ends of every node in all samples at once, `[node, sample]`.

    `end` holds the durations before and the ends after; `delays` is `[edge, sample]`, or one row
    for all edges; `time` is room for one number a sample.
    """
    shared = len(delays) == 1
    n = len(time)
    for i in sequence:
        mine = end[i]
        if heads[i]:
            for k in range(n):
                time[k] = 0
        else:
            before = end[i - 1]
            for k in range(n):
                time[k] = before[k]
        for e in range(need_starts[i], need_starts[i + 1]):
            theirs = end[needs[e]]
            delay = delays[0] if shared else delays[e]
            for k in range(n):
                ready = theirs[k] + delay[k]
                time[k] = ready if ready > time[k] else time[k]
        for k in range(n):
            mine[k] += time[k]
