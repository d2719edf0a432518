"""An order under change: each change simulates again only what it can have moved.

For searches that try many orders that differ in little.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from hocket import loops
from hocket.costs import Costs, CostTable, Number
from hocket.deps import changes
from hocket.errors import ScheduleError
from hocket.graph import Graph, all_edges, graph, longest_path
from hocket.ir import Array, Line, Queue, Schedule, kinds_of

UNIT = Costs()
_HAIR = 1e-9


class Incremental:
    """A schedule whose order can be changed, with times that are always those of `simulate`.

    Slots are known by where they stand: queue and place in it, both from 0. A change that would
    make slots wait for each other, or hold more than `limit` forwards in flight on its queue (one
    limit for all, or one for each), is refused and leaves all as it was. held: the share of a
    forward that an I leaves to its W. Messages in the order are not supported: they follow from it.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs = UNIT,
        *,
        limit: float | Sequence[float] | None = None,
        held: float = 1,
    ) -> None:
        if schedule.has_communication:
            raise ScheduleError(f"{schedule.name} has SEND and RECV actions; strip them first")
        costs.raise_if_contended(schedule)
        g = graph(schedule)
        if g.stuck or g.n_open:
            raise ScheduleError(f"{schedule.name} cannot run; `check` says why")
        several = isinstance(limit, Sequence)
        self._schedule = schedule
        self._limit = limit if several or limit is None else [limit] * len(schedule.queues)
        table = CostTable(costs, schedule)
        self._ticks = table.ticks
        self._starts = schedule.starts.tolist()
        arrays = _state(g, table)
        self._dtypes = {name: x.dtype for name, x in arrays.items()}
        self._state: dict[str, Any] = {name: x.tolist() for name, x in arrays.items()}
        takes, frees = _in_flight(schedule, held)
        self._changes: tuple[Any, Any] = takes.tolist(), frees.tolist()
        self._loops: dict[str, Any] = {f.__name__: f for f in loops.LOOPS}
        self._is_compiled = False
        self._work = len(schedule.codes)
        self._done: list[tuple[int, int, int]] = []

    # --- what it is now -------------------------------------------------------------------

    @property
    def makespan(self) -> Number:
        """First start to last end, in the unit of the costs."""
        return self._ticks.value(self.ticks)

    @property
    def ticks(self) -> Any:
        """The makespan in ticks: cheaper, and in the same order."""
        order, end, starts = self._state["order"], self._state["end"], self._starts
        lasts = (starts[q + 1] for q in range(len(starts) - 1) if starts[q + 1] > starts[q])
        return max(end[order[last - 1]] for last in lasts)

    @property
    def span_ticks(self) -> Any:
        """The longest that one queue takes from its first start to its last end, in ticks."""
        order, start, end = (self._state[k] for k in ("order", "start", "end"))
        parts = ((a, b) for a, b in pairwise(self._starts) if b > a)
        return max(end[order[b - 1]] - start[order[a]] for a, b in parts)

    def times(self, queue: int) -> list[tuple[Number, Number]]:
        """Start and end of each slot of a queue, transfers included, in its order."""
        state, value = self._state, self._ticks.value
        part = range(self._starts[queue], self._starts[queue + 1])
        nodes = [state["order"][at] for at in part]
        return [(value(state["start"][i]), value(state["end"][i])) for i in nodes]

    @property
    def looked_at(self) -> int:
        """How many slots the last change looked at."""
        return self._work

    def peak(self, queue: int) -> float:
        """The most forwards in flight at once on a queue."""
        first, last = self._starts[queue], self._starts[queue + 1]
        return self._loops["peak_of"](self._state["order"], first, last, *self._changes)

    def schedule(self, name: str | None = None) -> Schedule:
        """The schedule as it stands."""
        s, order = self._schedule, np.asarray(self._state["order"])
        lines = {}
        for q, queue in enumerate(s.queues):
            slots = order[self._starts[q] : self._starts[q + 1]]
            codes = [s.codes[s.slots[i] : s.slots[i + 1]] for i in slots.tolist()]
            joined = np.concatenate(codes) if codes else s.codes[:0]
            lines[queue] = Line(joined, s.widths[slots])
        return Schedule.from_lines(name or s.name, s.placement, lines)

    # --- changing it ----------------------------------------------------------------------

    def move(self, queue: int | Queue, at: int, to: int) -> bool:
        """Takes the slot at a place and puts it at another; False where that cannot be."""
        return at == to or self._change(queue, min(at, to), max(at, to), 1 if to > at else -1)

    def swap(self, queue: int | Queue, at: int, to: int) -> bool:
        """Exchanges the slots at two places; False where that cannot be."""
        return at == to or self._change(queue, min(at, to), max(at, to), 0)

    def undo(self) -> None:
        """Takes back the last change that was made; nothing where there is none."""
        if self._done:
            low, high, way = self._done.pop()
            self._run(low, high, -way)

    def _change(self, queue: int | Queue, low: int, high: int, way: int) -> bool:
        q = self._schedule.queues.index(queue) if isinstance(queue, Queue) else queue
        first = self._starts[q]
        if low < 0 or first + high >= self._starts[q + 1]:
            raise IndexError(f"queue {q} has slots 0 to {self._starts[q + 1] - first - 1}")
        low, high = low + first, high + first
        if not self._run(low, high, way):
            return False
        if self._limit is not None and self.peak(q) > self._limit[q] + _HAIR:
            self._run(low, high, -way)
            return False
        self._done.append((low, high, way))
        return True

    def _run(self, low: int, high: int, way: int) -> bool:
        if not self._is_compiled:
            found = loops.compiled(self._work)
            if found is not None:
                self._compile(found)
        seen = self._loops["change"](low, high, way, *self._state.values())
        self._work = max(seen, 1)
        return seen >= 0

    def _compile(self, found: dict[str, Any]) -> None:
        """From lists and plain loops to arrays and compiled ones."""
        self._loops, self._is_compiled = found, True
        dtypes = self._dtypes
        self._state = {k: np.array(x, dtype=dtypes[k]) for k, x in self._state.items()}
        takes, frees = self._changes
        self._changes = np.array(takes), np.array(frees)


def _state(g: Graph, table: CostTable) -> dict[str, Array]:
    """What `loops.change` works on, in the order of its parameters. Nodes are slots."""
    s, n = g.schedule, g.n_nodes
    sources, targets, need_starts = all_edges(s)
    needs, waits = s.slot_of_action[sources], s.slot_of_action[targets]
    rank = s.rank_of_queue[s.queue_of_slot]
    durations = table.occupied()
    start, end, _ = longest_path(g, durations, table.delays(g.source, g.crosses))
    topological = np.empty(n, dtype=np.int64)
    topological[g.sequence] = np.arange(n)
    sequence = np.lexsort((topological, start)).astype(np.int32)
    place = np.arange(n, dtype=np.int32)
    by_source = np.argsort(needs, kind="stable")
    after_starts = np.zeros(n + 1, dtype=np.int32)
    np.cumsum(np.bincount(needs, minlength=n), out=after_starts[1:])
    ranks = np.empty(n, dtype=np.int32)
    ranks[sequence] = place
    return {
        "order": place, "place": place.copy(), "opens": g.heads, "need_starts": need_starts,
        "needs": needs, "delays": table.delays(sources, rank[needs] != rank[waits]),
        "after_starts": after_starts, "after": waits[by_source], "durations": durations,
        "sequence": sequence, "rank": ranks, "state": np.zeros(n, dtype=np.int8),
        "stack": np.zeros(n + 1, dtype=np.int32), "room": np.zeros(n, dtype=np.int32),
        "dirty": np.zeros(n, dtype=bool), "start": start, "end": end,
    }  # fmt: skip


def _in_flight(schedule: Schedule, held: float) -> tuple[Array, Array]:
    """Microbatches that each slot takes when it starts, and gives back when it ends."""
    table = changes({"activation": 1, "held": held}, forward_only=schedule.is_forward_only)
    by_action = table[:, kinds_of(schedule.codes)]
    out = np.zeros((2, schedule.n_slots))
    for row, values in zip(out, by_action, strict=True):
        np.add.at(row, schedule.slot_of_action, values)
    return out[0], out[1]
