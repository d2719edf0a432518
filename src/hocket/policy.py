"""The greedy list scheduler: a queue that falls free starts the best action that is ready.

Imports ir, deps, graph, costs.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from hocket.costs import Costs, CostTable
from hocket.deps import EFFECTS
from hocket.graph import edges
from hocket.ir import Array, Kind, Line, Placement, Schedule, encode, kinds_of, lay, mbs_of


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
        self.takes = [EFFECTS[Kind(k)].takes.get("in_flight", 0) for k in kinds.tolist()]
        self.frees = [EFFECTS[Kind(k)].frees.get("in_flight", 0) for k in kinds.tolist()]
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
        lines: list[Line] = [lay(codes[np.array(line, dtype=np.int64)]) for line in self.lines]
        return Schedule.from_lines(self.work.name, self.work.placement, lines)


def ranked(*keys: Array) -> Array:
    """Place of each action when sorted by the first key, then the second, ...; for `prefer`."""
    places = np.empty(len(keys[0]), dtype=np.int64)
    places[np.lexsort(keys[::-1])] = np.arange(len(places))
    return places
