"""Orders made from rules: the greedy list scheduler, and many orders timed together.

The list scheduler: a queue that falls free starts the best action that is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from hocket.costs import Costs, CostTable
from hocket.deps import changes
from hocket.graph import edges
from hocket.ir import Array, Kind, Placement, Schedule, encode, kinds_of, mbs_of
from hocket.pattern import lay


def all_actions(name: str, placement: Placement, kinds: tuple[Kind, ...]) -> Schedule:
    """A schedule that holds the given kinds of every stage and microbatch, in no useful order."""
    lengths = placement.lengths
    mbs = np.repeat(np.arange(placement.m), lengths)
    stages = np.concatenate([np.arange(n) for n in lengths])
    queue = placement.rank_table(placement.queues)[np.array(placement.path_of)[mbs], stages]
    lines = []
    for q in range(len(placement.queues)):
        mine = queue == q
        codes = [encode(int(kind), stages[mine], mbs[mine]) for kind in kinds]
        lines.append(lay(np.concatenate(codes)))
    return Schedule.from_lines(name, placement, lines)


def list_schedule(work: Schedule, costs: Costs, *, prefer: Array, limit: int) -> Schedule:
    """The actions of `work`, reordered greedily under an in-flight limit for every queue.

    prefer: rank of each action of `work`, lowest first, `[action]`. limit: forwards in flight
    per queue; one place is kept for each path that crosses the queue, so that no path can stop
    another for ever; it must be at least the number of paths.
    """
    return _Greedy(work, CostTable(costs, work), prefer, limit).run()


class _Greedy:
    """State of one run of the list scheduler. Times are ticks."""

    def __init__(self, work: Schedule, table: CostTable, prefer: Array, limit: int) -> None:
        self.work, self.limit = work, limit
        n = len(work.codes)
        self.prefer = prefer.tolist()
        self.duration = table.work().tolist()
        self.queue = work.queue_of_slot.tolist()
        paths = np.array(work.placement.path_of)[mbs_of(work.codes)]
        self.path = paths.tolist()
        self.n_paths = len(work.placement.paths)
        kinds = kinds_of(work.codes)
        self.takes, self.frees = changes({"in_flight": 1})[:, kinds].astype(int).tolist()
        self._successors(table, n)
        self.ready = [[[] for _ in range(self.n_paths + 1)] for _ in work.queues]
        self.flight = [[0] * self.n_paths for _ in work.queues]
        self.to_take = np.zeros((len(work.queues), self.n_paths), dtype=int)
        np.add.at(self.to_take, (work.queue_of_slot, paths), self.takes)
        self.to_take = self.to_take.tolist()
        self.free_at = [0] * len(work.queues)
        self.arrivals: list[tuple[int, int]] = []
        self.lines: list[list[int]] = [[] for _ in work.queues]

    def _successors(self, table: CostTable, n: int) -> None:
        """What each action lets start, and how many things each still waits for."""
        sources, targets = edges(self.work)
        rank = self.work.rank_of_queue[self.work.queue_of_slot]
        delays = table.delays(sources, rank[sources] != rank[targets])
        self.waits = np.bincount(targets, minlength=n).tolist()
        self.after: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        for source, target, delay in zip(
            sources.tolist(), targets.tolist(), delays.tolist(), strict=True
        ):
            self.after[source].append((target, delay))
        self.earliest = [0] * n

    def run(self) -> Schedule:
        for action, waits in enumerate(self.waits):
            if waits == 0:
                heappush(self.arrivals, (0, action))
        clock: list[tuple[int, int]] = [(0, q) for q in range(len(self.lines))]
        while clock or self.arrivals:
            now = min(h[0][0] for h in (clock, self.arrivals) if h)
            awake = set()
            while self.arrivals and self.arrivals[0][0] == now:
                action = heappop(self.arrivals)[1]
                q = self.queue[action]
                lane = self.path[action] if self.takes[action] else self.n_paths
                heappush(self.ready[q][lane], (self.prefer[action], action))
                awake.add(q)
            while clock and clock[0][0] == now:
                awake.add(heappop(clock)[1])
            for q in sorted(awake):
                if self.free_at[q] <= now and self._start(q, now):
                    heappush(clock, (self.free_at[q], q))
        return self._schedule()

    def _start(self, q: int, now: int) -> bool:
        """Starts the best action that may start on a free queue; False when there is none."""
        lanes = [
            (heap[0], lane)
            for lane, heap in enumerate(self.ready[q])
            if heap and (lane == self.n_paths or self._has_room(q, lane))
        ]
        if not lanes:
            return False
        (_, action), lane = min(lanes)
        heappop(self.ready[q][lane])
        path = self.path[action]
        self.flight[q][path] += self.takes[action] - self.frees[action]
        self.to_take[q][path] -= self.takes[action]
        end = self.free_at[q] = now + self.duration[action]
        self.lines[q].append(action)
        for target, delay in self.after[action]:
            self.earliest[target] = max(self.earliest[target], end + delay)
            self.waits[target] -= 1
            if self.waits[target] == 0:
                heappush(self.arrivals, (self.earliest[target], target))
        return True

    def _has_room(self, q: int, path: int) -> bool:
        flight, to_take = self.flight[q], self.to_take[q]
        kept = sum(
            1 for k in range(self.n_paths) if k != path and flight[k] == 0 and to_take[k] > 0
        )
        return sum(flight) + 1 + kept <= self.limit

    def _schedule(self) -> Schedule:
        codes = self.work.codes
        lines = [lay(codes[np.array(line, dtype=np.int64)]) for line in self.lines]
        return Schedule.from_lines(self.work.name, self.work.placement, lines)


def ranked(*keys: Array) -> Array:
    """Place of each action when sorted by the first key, then the second, ...; for `prefer`."""
    places = np.empty(len(keys[0]), dtype=np.int64)
    places[np.lexsort(keys[::-1])] = np.arange(len(places))
    return places


class Outcome(NamedTuple):
    """What many orders come to: makespan and span in ticks `[order]`, where each can run.

    `lines[order, queue]` holds the positions in `work` of the actions as run, W included, then
    `Trials.stop` to the end of the row.
    """

    makespan: Array
    span: Array
    runs: Array
    lines: Array


class Trials:
    """Many orders of the same work, timed together under an in-flight limit for every queue.

    An order says in which sequence each queue runs its forwards and backwards. Weight gradients
    (where backwards are split) go where they fit: into a wait that is long enough, before a
    forward that the limit would stop, and after everything else. In flight counts as in
    `deps.EFFECTS`: stage by stage, from the start of F to the end of W (or B). With `held` below 1
    only that share of a stage counts from the end of I on.
    """

    def __init__(
        self, work: Schedule, costs: Costs, limit: Sequence[float], *, held: float = 1
    ) -> None:
        self.work = work
        self.room = np.asarray(limit, dtype=np.float64) - 1 + 1e-9  # a forward may find this much
        table = CostTable(costs, work)
        before, after = table.overheads()
        self.ticks, self.n = table.ticks, len(work.codes)
        # two positions beyond the actions: one that ended at 0, one that ends an order
        self.start, self.stop = self.n, self.n + 1
        self.duration = self._padded(before + table.work() + after)
        self.far = np.inf if self.duration.dtype == np.float64 else np.int64(2**62)
        kinds = kinds_of(work.codes)
        takes, frees = changes({"activation": 1, "held": held})[:, kinds]
        self.takes = self._padded(takes) > 0
        self.change = self._padded(takes - frees)
        self._needs(table, kinds)

    def _padded(self, values: Array) -> Array:
        return np.append(values, np.zeros(2, dtype=values.dtype))

    def _needs(self, table: CostTable, kinds: Array) -> None:
        """What each action waits for, one row for each need, and the W that follows an I."""
        sources, targets = edges(self.work)
        rank = self.work.rank_of_queue[self.work.queue_of_slot]
        delays = table.delays(sources, rank[sources] != rank[targets])
        by_target = np.argsort(targets, kind="stable")
        sources, targets, delays = sources[by_target], targets[by_target], delays[by_target]
        row = np.arange(len(targets)) - np.searchsorted(targets, targets)
        self.sources = np.full((row.max(initial=0) + 1, self.n + 2), self.start)
        self.sources[row, targets] = sources
        self.delays = np.zeros(self.sources.shape, dtype=self.duration.dtype)
        self.delays[row, targets] = delays
        self.weight = np.full(self.n + 2, self.stop)
        last = kinds[targets] == Kind.W
        self.weight[sources[last]] = targets[last]

    def run(self, orders: Array, fit: Array | None = None) -> Outcome:
        """The outcome of every order.

        orders: positions in `work` of forwards and backwards, `[order, queue, place]`. fit: the
        share of a W that a wait must hold for it to go there, `[order]`, below 0 to put W before
        every forward too; without it the orders hold all W themselves, as an outcome's `lines` do.
        """
        return _Runs(self, orders, fit).outcome()


class _Runs:
    """State of many runs, one row for each queue of each order."""

    def __init__(self, trials: Trials, orders: Array, fit: Array | None) -> None:
        t, (self.n_orders, self.n_queues, width) = trials, orders.shape
        rows = self.n_orders * self.n_queues
        self.t = t
        self.order = np.full((rows, width + 1), t.stop)
        self.order[:, :width] = orders.reshape(rows, width)
        self.order = self.order.ravel()
        self.at = np.arange(rows) * (width + 1)
        self.end = np.full((self.n_orders, t.n + 2), t.far, dtype=t.duration.dtype)
        self.end[:, t.start :] = 0
        self.end = self.end.ravel()
        self.base = np.repeat(np.arange(self.n_orders) * (t.n + 2), self.n_queues)
        self.clock = np.zeros(rows, dtype=t.duration.dtype)
        self.begun = np.full(rows, t.far, dtype=t.duration.dtype)
        self.flight = np.zeros(rows)
        self.room = np.tile(t.room, self.n_orders)
        self.weight = t.weight if fit is not None else np.full_like(t.weight, t.stop)
        self.fit = np.repeat(np.zeros(self.n_orders) if fit is None else fit, self.n_queues)
        self.pending = np.full(rows * (width + 1), t.stop)  # W whose I has run, oldest first
        self.head = self.at.copy()
        self.tail = self.at.copy()
        self.lines = np.full((rows, int(np.bincount(t.work.queue_of_slot).max())), t.stop)
        self.n_run = np.zeros(rows, dtype=np.int64)

    def outcome(self) -> Outcome:
        while self._round():
            pass
        shape = (self.n_orders, self.n_queues)
        done = (self.order[self.at] == self.t.stop) & (self.tail == self.head)
        clock = self.clock.reshape(shape)
        return Outcome(
            makespan=clock.max(axis=1),
            span=(clock - self.begun.reshape(shape)).max(axis=1),
            runs=done.reshape(shape).all(axis=1),
            lines=self.lines.reshape(*shape, self.lines.shape[1]),
        )

    def _round(self) -> bool:
        """Lets every queue that knows its next action run it; False when none can."""
        t, item = self.t, self.order[self.at]
        ready = self.end[self.base + t.sources[0][item]] + t.delays[0][item]
        for sources, delays in zip(t.sources[1:], t.delays[1:], strict=True):
            ready = np.maximum(ready, self.end[self.base + sources[item]] + delays[item])
        known, full = ready < t.far, t.takes[item] & (self.flight > self.room)
        weight, stop = self.pending[self.head], item == t.stop
        waits = known & (ready > self.clock)
        fits = waits & (self.clock + self.fit * t.duration[weight] <= ready)
        fits |= t.takes[item] & (self.fit < 0)
        fill = (self.tail > self.head) & (full | stop | fits)
        own = known & ~full & ~stop & ~fill
        rows = np.flatnonzero(fill | own)
        if len(rows):
            taken = own[rows]
            self._advance(rows, np.where(taken, item[rows], weight[rows]), taken, ready[rows])
        return len(rows) > 0

    def _advance(self, rows: Array, item: Array, own: Array, ready: Array) -> None:
        """Runs one action on each of these rows; `own` ones stand in the order, others are W."""
        t, clock = self.t, self.clock[rows]
        start = np.where(own, np.maximum(ready, clock), clock)
        end = start + t.duration[item]
        self.clock[rows] = self.end[self.base[rows] + item] = end
        self.begun[rows] = np.minimum(self.begun[rows], start)
        self.flight[rows] += t.change[item]
        self.at[rows] += own
        self.head[rows] += ~own
        weight = self.weight[item]
        split = weight != t.stop
        queued = rows[split]
        self.pending[self.tail[queued]] = weight[split]
        self.tail[queued] += 1
        self.lines[rows, self.n_run[rows]] = item
        self.n_run[rows] += 1
