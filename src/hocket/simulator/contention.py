"""The timeline where computation slows: a rank's other streams are busy, or ranks share cores.

Event driven: durations depend on what overlaps.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from hocket.checker import check, is_complete, raise_fault
from hocket.costs import Costs, CostTable, Number, Ticks
from hocket.errors import CostError
from hocket.graph import Graph, graph
from hocket.ir import Array, Schedule
from hocket.timeline import Timeline


def simulate_shared(
    schedule: Schedule, costs: Costs, *, blocking: bool = False, fragment: bool = False
) -> Timeline:
    """The timeline in which a compute queue slows while other queues are busy.

    Work takes `costs.slowdown` times as long while another queue of the rank is busy, and n/cores
    times while n > `costs.cores` compute queues and messages (see `comm_cpu`) are; every slot
    starts as early as it can. Exact for whole numbers and fractions; where nothing slows it equals
    `simulate`. fragment: the order is a piece of a schedule; what it needs and does not hold has
    ended before it starts.

    Raises: ScheduleError where the schedule cannot run, CostError where the costs do not fit.
    """
    if costs.p2p_overhead is not None and costs.slowdown != 1:
        raise CostError(
            "slowdown and p2p_overhead together: blocking transfers have no queue of their own; "
            "leave one out"
        )
    if not fragment and not is_complete(schedule):
        check(schedule).raise_if_bad()
    g, table = graph(schedule, blocking=blocking), CostTable(costs, schedule)
    before, after = table.overheads()
    slot = schedule.slot_of_action[g.first_action]
    durations = (before + table.work() + after)[slot]
    delays = table.delays(g.source, g.crosses)
    times = _Events(g, durations.tolist(), delays.tolist(), costs, table.ticks).run()
    if times is None:
        raise_fault(schedule, blocking=blocking)
    around = _stretched(g, slot, durations, times, (before, after))
    wires = [] if table.wires is None else table.wires.ravel().tolist()
    ticks, (start, end, before, after, wire) = _in_ticks(table.ticks, (*times, *around, wires))
    node, own = g.node_of_action, schedule.slot_of_action
    return Timeline(
        schedule=schedule, start=start[node] + before[own], end=end[node] - after[own],
        around=(before, after), blocking=blocking, ticks=ticks, unit=costs.unit,
        bytes=table.costs.bytes,
        wires=None if table.wires is None else wire.reshape(table.wires.shape),
    )  # fmt: skip


def _stretched(
    g: Graph, slot: Array, durations: Array, times: tuple[list[Any], list[Any]],
    around: tuple[Array, Array],
) -> tuple[list[Any], list[Any]]:  # fmt: skip
    """The transfers around each slot, as much longer as the whole slot took."""
    out: tuple[list[Any], list[Any]] = ([0] * g.schedule.n_slots, [0] * g.schedule.n_slots)
    if not any(side.any() for side in around):
        return out
    rows = zip(slot.tolist(), durations.tolist(), *times, strict=True)
    for s, duration, start, end in rows:
        for side, lane in zip(out, around, strict=True):
            side[s] = _ratio(lane[s].item() * (end - start), duration) if duration else 0
    return out


def _in_ticks(ticks: Ticks, columns: tuple[list[Any], ...]) -> tuple[Ticks, tuple[Array, ...]]:
    """Times as arrays of the coarsest ticks that hold them exactly; floats where none do."""
    if ticks.exact:
        scale = math.lcm(*(x.denominator for column in columns for x in column))
        largest = max((abs(x) for column in columns for x in column), default=0)
        if ticks.scale * scale * max(largest, 1) < 2**62:
            made = Ticks(ticks.scale * scale, exact=True)
            return made, tuple(np.array([int(x * scale) for x in c], np.int64) for c in columns)
    return Ticks(1, exact=False), tuple(
        np.array([float(x) / ticks.scale for x in column], dtype=np.float64) for column in columns
    )


class _Events:
    """State of one run: what each chain of nodes does now, and how much of it is left."""

    def __init__(
        self, g: Graph, durations: list[Any], delays: list[Any], costs: Costs, ticks: Ticks
    ) -> None:
        s = g.schedule
        self.g, self.durations, self.delays = g, durations, delays
        self.slowdown = costs.slowdown if ticks.exact else float(costs.slowdown)
        self.cores, self.exact = costs.cores, ticks.exact
        sources = np.unique(g.source[g.crosses]) if costs.cores else np.empty(0, dtype=np.int64)
        sent = np.bincount(g.node_of_action[sources], minlength=g.n_nodes)
        self.comm_cpu = [n * costs.comm_cpu * ticks.scale for n in sent.tolist()]
        self.copies: dict[int, Any] = {}  # CPU time left for the messages of each node
        self.chains = g.chains.tolist()
        self.cursor = self.chains[:-1]
        first = g.first_action[np.minimum(self.cursor, max(g.n_nodes - 1, 0))]
        queues = [s.queues[q] for q in s.queue_of_slot[s.slot_of_action[first]].tolist()]
        self.rank = [q.rank for q in queues]
        self.computes = [q.stream == "" for q in queues]
        self.needs, self.starts = g.needs.tolist(), g.need_starts.tolist()
        self.start: list[Any] = [0] * g.n_nodes
        self.end: list[Any] = [None] * g.n_nodes
        self.left: dict[int, Any] = {}  # work left of the running node of each busy chain

    def run(self) -> tuple[list[Any], list[Any]] | None:
        """Start and end of each node; None where some can never start."""
        now: Any = 0
        while True:
            wakes = self._start(now)
            if not self.left and not wakes:
                break
            crowd = self._crowd()
            slow = self._slow(crowd)
            copied = {node: now + left * crowd for node, left in self.copies.items()}
            ends = {c: now + left * slow[c] for c, left in self.left.items()}
            then = min([*ends.values(), *copied.values(), *wakes])
            for node, end in copied.items():
                self.copies[node] -= _ratio(then - now, crowd)
                if end == then:
                    del self.copies[node]
            for c, end in ends.items():
                if end == then:
                    del self.left[c]
                    self._finish(c, then)
                else:
                    self.left[c] -= _ratio(then - now, slow[c])
            now = then
        return None if None in self.end else (self.start, self.end)

    def _slow(self, crowd: Any) -> dict[int, Any]:
        """How many times as long what runs now takes meanwhile."""
        busy = {self.rank[c] for c in self.left if not self.computes[c]}
        return {
            c: crowd * (self.slowdown if self.rank[c] in busy else 1) if self.computes[c] else 1
            for c in self.left
        }

    def _crowd(self) -> Any:
        """How many times as long it takes what shares the cores now."""
        n = sum(map(self.computes.__getitem__, self.left)) + len(self.copies)
        if self.cores is None or n <= self.cores:
            return 1
        return Fraction(n, self.cores) if self.exact else n / self.cores

    def _start(self, now: Any) -> list[Any]:
        """Starts all that can start now; returns when messages for idle chains arrive later."""
        moving, wakes = True, []
        while moving:
            moving, wakes = False, []
            for c, (node, last) in enumerate(zip(self.cursor, self.chains[1:], strict=True)):
                if node == last or c in self.left:
                    continue
                ready = self._ready(node)
                if ready is None:
                    continue
                if ready > now:
                    wakes.append(ready)
                    continue
                self.start[node] = now
                self.left[c] = self.durations[node]
                if self.durations[node] == 0:
                    del self.left[c]
                    self._finish(c, now)
                    moving = True
        return wakes

    def _finish(self, chain: int, now: Any) -> None:
        node = self.cursor[chain]
        self.end[node] = now
        self.cursor[chain] += 1
        if self.comm_cpu[node]:
            self.copies[node] = self.comm_cpu[node]

    def _ready(self, node: int) -> Any:
        """When all that a node needs is there; None while something has not ended."""
        ready: Any = 0
        for e in range(self.starts[node], self.starts[node + 1]):
            end = self.end[self.needs[e]]
            if end is None:
                return None
            ready = max(ready, end + self.delays[e])
        return ready


def _ratio(a: Number, b: Number) -> Number:
    """a / b, exact where both are."""
    return a / b if isinstance(a, float) or isinstance(b, float) else Fraction(a) / Fraction(b)
