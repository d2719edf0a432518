"""Spans with times, simulated or measured, and everything one can ask of them.

Imports ir, deps, graph, costs, errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hocket.costs import Bytes, Number, Ticks, per_stage
from hocket.deps import EFFECTS, EVALUATION
from hocket.graph import Graph
from hocket.ir import Array, Kind, Queue, Schedule, Slot, kinds_of, stages_of

CAUSES = ("dependency", "transfer", "end")
PHASES = ("warm-up", "steady", "cool-down")


class Gap(NamedTuple):
    """A stretch in which a queue does nothing, and why.

    cause: "dependency" (what it waits for has not ended), "transfer" (it has; the message is
    under way), "end" (nothing left to do until the last rank ends). phase: "warm-up" up to the
    queue's first backward, "cool-down" after its last forward, else "steady".
    """

    queue: Queue
    start: Number
    end: Number
    cause: str
    phase: str
    before: Slot | None
    waits_for: Slot | None
    waits_on: Queue | None

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.queue} has nothing left to do"
        if self.waits_for is None:
            return f"{self.before} on {self.queue} waits"
        verb = "is under way from" if self.cause == "transfer" else "runs on"
        return (
            f"{self.before} on {self.queue} waits for {self.waits_for}, "
            f"which {verb} {self.waits_on}"
        )


class Step(NamedTuple):
    """One slot of the critical path; `after` says what held it: "start", "queue" or "message"."""

    queue: Queue
    slot: Slot
    start: Number
    end: Number
    after: str


class RankSummary(NamedTuple):
    """What one rank did. Times in the timeline's unit; `waits` by cause, `bubble` by phase."""

    rank: int
    start: Number
    end: Number
    busy: Number
    transfer: Number
    idle: Number
    peak_in_flight: int
    peak_bytes: float
    waits: dict[str, Number]
    bubble: dict[str, Number]


@dataclass(frozen=True, eq=False)
class Timeline:
    """The times of every action of a schedule.

    `start`, `end`: work of each action, `[action]`; the actions of a simulated slot share their
    times. `before`, `after`: time each slot occupies its queue with transfers around its work,
    `[slot]`. `delays`: from each edge's source to its target, `[edge]` of `graph`. All in ticks;
    `ticks.value` turns them into `unit`.
    """

    schedule: Schedule
    graph: Graph
    start: Array
    end: Array
    before: Array
    after: Array
    delays: Array
    ticks: Ticks
    unit: str = ""
    bytes: Bytes = field(default_factory=Bytes)
    measured: bool = False

    # --- the whole ----------------------------------------------------------------------

    @property
    def makespan(self) -> Number:
        """First start to last end."""
        return self.ticks.value(self._last - self._first)

    @property
    def span(self) -> Number:
        """The longest any one rank takes from its first start to its last end.

        Source: the metric of the zero-bubble papers; it is the step time only where the next
        step starts skewed, with the optimiser step validated afterwards (arXiv 2401.10241, 4).
        """
        return max(self.ticks.value(e - s) for s, e in self._rank_extent)

    @property
    def bubble_ratio(self) -> float:
        """1 - busy / (queues x makespan); waiting and transfers are not busy."""
        whole = float(self.makespan) * len(self._worked)
        return 1 - sum(float(r.busy) for r in self.ranks) / whole if whole else 0.0

    @cached_property
    def ranks(self) -> tuple[RankSummary, ...]:
        """One summary a rank."""
        causes, phases = self._idle
        flight, memory = self.peaks("in_flight"), self.peak_bytes
        value, worked = self.ticks.value, set(self._worked)
        out = []
        for rank, queues in enumerate(self._queues_of_rank):
            mine = [q for q in queues if q in worked]
            start, end = self._rank_extent[rank]
            busy, transfer = value(self._busy[mine].sum()), value(self._transfer[mine].sum())
            out.append(
                RankSummary(
                    rank=rank,
                    start=value(start - self._first),
                    end=value(end - self._first),
                    busy=busy,
                    transfer=transfer,
                    idle=self.makespan * len(mine) - busy - transfer,
                    peak_in_flight=int(flight[rank]),
                    peak_bytes=memory[rank],
                    waits={c: value(causes[mine, i].sum()) for i, c in enumerate(CAUSES)},
                    bubble={c: value(phases[mine, i].sum()) for i, c in enumerate(PHASES)},
                )
            )
        return tuple(out)

    @cached_property
    def _queues_of_rank(self) -> list[list[int]]:
        queues: list[list[int]] = [[] for _ in range(self.schedule.p)]
        for q, queue in enumerate(self.schedule.queues):
            queues[queue.rank].append(q)
        return queues

    # --- arrays of slots ----------------------------------------------------------------

    @cached_property
    def _kinds(self) -> Array:
        return kinds_of(self.schedule.codes)

    @cached_property
    def computes(self) -> Array:
        """Which slots hold work, not only messages, `[slot]`."""
        s = self.schedule
        work = np.zeros(s.n_slots, dtype=bool)
        work[s.slot_of_action[self._kinds < Kind.SEND_F]] = True
        return work

    @cached_property
    def slot_start(self) -> Array:
        """Start of the work of each slot, ticks, `[slot]`."""
        return self._by_slot(self.start, np.minimum)

    @cached_property
    def slot_end(self) -> Array:
        """End of the work of each slot, ticks, `[slot]`."""
        return self._by_slot(self.end, np.maximum)

    def _by_slot(self, times: Array, ufunc: np.ufunc) -> Array:
        s = self.schedule
        if (s.widths == 1).all():
            return times
        return ufunc.reduceat(times, s.slots[:-1])

    @cached_property
    def _worked(self) -> list[int]:
        """Queues that do any work; a queue of messages only is not one to keep busy."""
        queues = self.schedule.queue_of_slot[self.computes]
        return np.unique(queues).tolist()

    @cached_property
    def _busy(self) -> Array:
        work = np.where(self.computes, self.slot_end - self.slot_start, 0)
        return self._per_queue(work)

    @cached_property
    def _transfer(self) -> Array:
        return self._per_queue(self.before + self.after)

    def _per_queue(self, values: Array) -> Array:
        total = np.zeros(len(self.schedule.queues), dtype=values.dtype)
        np.add.at(total, self.schedule.queue_of_slot, values)
        return total

    @cached_property
    def _first(self) -> Number:
        return min(s for s, _ in self._rank_extent)

    @cached_property
    def _last(self) -> Number:
        return max(e for _, e in self._rank_extent)

    @cached_property
    def _rank_extent(self) -> list[tuple[Number, Number]]:
        """First occupied and last occupied tick of each rank."""
        s = self.schedule
        rank = s.rank_of_queue[s.queue_of_slot[self.computes]]
        start = (self.slot_start - self.before)[self.computes]
        end = (self.slot_end + self.after)[self.computes]
        by_rank = [np.flatnonzero(rank == r) for r in range(s.p)] if s.p <= 64 else None
        if by_rank is None:
            order = np.argsort(rank, kind="stable")
            by_rank = np.split(order, np.searchsorted(rank[order], np.arange(1, s.p)))
        zero = start.dtype.type(0)
        return [(start[i].min(), end[i].max()) if len(i) else (zero, zero) for i in by_rank]

    # --- memory -------------------------------------------------------------------------

    def levels(self, quantity: str) -> list[tuple[Array, Array]]:
        """Level of a quantity over time, one (ticks, values) pair a rank.

        `quantity` is a key of deps.EFFECTS ("in_flight", "activation", "held", "gradient") or
        "bytes", their sum; static memory is not in it. Each value holds from its tick on.
        """
        takes, frees = self._changes(quantity)
        s = self.schedule
        out = []
        for rank in range(s.p):
            mine = self._queues_of_rank[rank]
            times, deltas, takes_now = [], [], []
            for q in mine:
                part = slice(int(s.starts[q]), int(s.starts[q + 1]))
                keep = self.computes[part]
                times.append(_zip(self.slot_start[part][keep], self.slot_end[part][keep]))
                deltas.append(_zip(takes[part][keep], -frees[part][keep]))
                takes_now.append(np.arange(2 * int(keep.sum())) % 2 == 0)
            time, delta = np.concatenate(times), np.concatenate(deltas)
            if len(mine) > 1:  # a queue's own order settles ties; between queues, free first
                order = np.lexsort((np.concatenate(takes_now), time))
                time, delta = time[order], delta[order]
            out.append((time, np.cumsum(delta)))
        return out

    def _changes(self, quantity: str) -> tuple[Array, Array]:
        """What each slot takes and frees of a quantity, `[slot]` both."""
        s = self.schedule
        n = s.placement.n_stages
        sizes = {"in_flight": (1,) * n} if quantity == "in_flight" else self._sizes(n)
        wanted = set(sizes) if quantity == "bytes" else {quantity}
        table = np.zeros((2, len(Kind), n))
        for kind, effect in (EVALUATION if s.is_forward_only else EFFECTS).items():
            for row, changes in enumerate((effect.takes, effect.frees)):
                for name, factor in changes.items():
                    if name in wanted:
                        table[row, kind] += factor * np.array(sizes[name], dtype=float)
        stages = stages_of(s.codes)
        takes, frees = np.zeros(s.n_slots), np.zeros(s.n_slots)
        if (s.widths == 1).all():
            return table[0, self._kinds, stages], table[1, self._kinds, stages]
        np.add.at(takes, s.slot_of_action, table[0, self._kinds, stages])
        np.add.at(frees, s.slot_of_action, table[1, self._kinds, stages])
        return takes, frees

    def _sizes(self, n: int) -> dict[str, tuple[Number, ...]]:
        b = self.bytes
        held = b.activation if b.held is None else b.held
        return {
            "activation": per_stage("bytes.activation", b.activation, n),
            "held": per_stage("bytes.held_between_I_and_W", held, n),
            "gradient": per_stage("bytes.gradient", b.gradient, n),
        }

    def peaks(self, quantity: str) -> list[float]:
        """Highest level of a quantity on each rank."""
        return [float(v.max()) if len(v) else 0.0 for _, v in self.levels(quantity)]

    @cached_property
    def static_bytes(self) -> list[float]:
        """Static memory of each rank: every stage it holds, once."""
        placement = self.schedule.placement
        sizes = per_stage("bytes.static", self.bytes.static, placement.n_stages)
        return [float(sum(sizes[s] for s in held)) for held in placement.stages_of_rank]

    @cached_property
    def peak_bytes(self) -> list[float]:
        """Static memory and the highest level of everything else, of each rank."""
        if self.bytes == Bytes():
            return [0.0] * self.schedule.p
        return [a + b for a, b in zip(self.static_bytes, self.peaks("bytes"), strict=True)]

    # --- why ----------------------------------------------------------------------------

    @cached_property
    def _idle(self) -> tuple[Array, Array]:
        """Idle ticks of each queue by cause and by phase, `[queue, 3]` both."""
        s, slots = self.schedule, self._working_slots
        queue = s.queue_of_slot[slots]
        causes = np.zeros((len(s.queues), len(CAUSES)), dtype=self.start.dtype)
        phases = np.zeros((len(s.queues), len(PHASES)), dtype=self.start.dtype)
        free, begin = self._free_before, (self.slot_start - self.before)[slots]
        ended = np.clip(self._needed_until(slots, begin), free, np.maximum(begin, free))
        np.add.at(causes[:, 0], queue, ended - free)
        np.add.at(causes[:, 1], queue, np.maximum(begin - ended, 0))
        np.add.at(phases, (queue, self._phase), np.maximum(begin - free, 0))
        last = np.full(len(s.queues), self._first, dtype=self.start.dtype)
        np.maximum.at(last, queue, (self.slot_end + self.after)[slots])
        causes[:, 2] = self._last - last
        phases[:, 2] += self._last - last
        return causes, phases

    @cached_property
    def _working_slots(self) -> Array:
        return np.flatnonzero(self.computes)

    @cached_property
    def _free_before(self) -> Array:
        """When the queue of each working slot fell free before it."""
        slots = self._working_slots
        queue = self.schedule.queue_of_slot[slots]
        free = np.full(len(slots), self._first, dtype=self.start.dtype)
        same = queue[1:] == queue[:-1]
        free[1:][same] = (self.slot_end + self.after)[slots[:-1]][same]
        return free

    @cached_property
    def _phase(self) -> Array:
        """Phase of each working slot: 0 up to the queue's first backward, 2 after its last F."""
        s, slots = self.schedule, self._working_slots
        flags = np.zeros((2, s.n_slots), dtype=np.int64)
        flags[0, s.slot_of_action[np.isin(self._kinds, (Kind.B, Kind.I))]] = 1
        flags[1, s.slot_of_action[self._kinds == Kind.F]] = 1
        backward, forward = flags[:, slots]
        queue = s.queue_of_slot[slots]
        first = np.searchsorted(queue, queue)  # the first working slot of the same queue
        backwards_before = np.cumsum(backward) - backward
        forwards_before = np.cumsum(forward) - forward
        forwards = np.bincount(queue, forward, minlength=len(s.queues))[queue]
        warm_up = backwards_before == backwards_before[first]
        cool_down = forwards_before - forwards_before[first] >= forwards
        return np.where(warm_up, 0, np.where(cool_down, 2, 1))

    def _needed_until(self, slots: Array, begin: Array) -> Array:
        """When what each slot waited for longest had ended; `begin` where it waited for none."""
        nodes = self.graph.node_of_action[self.schedule.slots[slots]]
        end = self._occupied[1]
        if self.schedule.has_communication:
            found = [self._binding(int(node)) for node in nodes]
            return np.array(
                [b if f is None else end[f[0]] for b, f in zip(begin, found, strict=True)],
                dtype=begin.dtype,
            )
        out = begin.copy()
        edge = self._binding_edge[nodes]
        held = edge < len(self.graph.needs)
        out[held] = end[self.graph.needs[edge[held]]]
        return out

    @cached_property
    def _binding_edge(self) -> Array:
        """The edge that held each node longest, `[node]`; the number of edges where none did."""
        g, n_edges = self.graph, len(self.graph.needs)
        out = np.full(g.n_nodes, n_edges, dtype=np.int64)
        filled = np.flatnonzero(np.diff(g.need_starts))
        if len(filled):
            ready = self._occupied[1][g.needs] + self.delays
            starts = g.need_starts[filled]
            counts = np.diff(np.append(starts, n_edges))
            latest = np.repeat(np.maximum.reduceat(ready, starts), counts)
            order = np.where(ready == latest, np.arange(n_edges), n_edges)
            out[filled] = np.minimum.reduceat(order, starts)
        return out

    @cached_property
    def _occupied(self) -> tuple[Array, Array]:
        """First and last occupied tick of each node of the graph."""
        nodes = self.graph.first_action
        slots = self.schedule.slot_of_action[nodes]
        compute = self._kinds[nodes] < Kind.SEND_F
        start = np.where(compute, self.slot_start[slots], self.start[nodes]) - self.before[slots]
        end = np.where(compute, self.slot_end[slots], self.end[nodes]) + self.after[slots]
        return start, end

    def _slot_of_node(self, node: int) -> int:
        return int(self.schedule.slot_of_action[self.graph.first_action[node]])

    def _queue_of_node(self, node: int) -> Queue:
        slot = self._slot_of_node(node)
        return self.schedule.queues[self.schedule.queue_of_slot[slot]]

    def _binding(self, node: int) -> tuple[int, int] | None:
        """The (node, edge) that held this node longest; a RECV is seen through to its SEND."""
        _, end = self._occupied
        candidates = [(int(self.graph.needs[e]), e) for e in self.graph.edges_of(node)]
        ready = [end[source] + self.delays[e] for source, e in candidates]
        if node > 0 and node not in self._heads and self._receives(node - 1):  # it held the queue
            candidates.append((node - 1, -1))
            ready.append(end[node - 1])
        if not candidates:
            return None
        source, edge = candidates[max(range(len(ready)), key=ready.__getitem__)]
        if self._receives(source):
            return self._binding(source) or (source, edge)
        return source, edge

    @cached_property
    def _heads(self) -> set[int]:
        """The first node of each chain."""
        return set(self.graph.chains[:-1].tolist())

    def _receives(self, node: int) -> bool:
        kind = self._kinds[self.graph.first_action[node]]
        return kind in (Kind.RECV_F, Kind.RECV_B)

    def gaps(self, queue: Queue) -> Iterator[Gap]:
        """Every idle stretch of a queue between the step's first start and last end."""
        s = self.schedule
        mine = np.flatnonzero(s.queue_of_slot[self._working_slots] == s.queues.index(queue))
        slots = self._working_slots[mine]
        begin, free = (self.slot_start - self.before)[slots], self._free_before[mine]
        for i in np.flatnonzero(begin > free).tolist():
            phase = PHASES[self._phase[mine[i]]]
            yield from self._gap(queue, int(slots[i]), free[i], begin[i], phase)
        last = (self.slot_end + self.after)[slots[-1]] if len(slots) else self._first
        if self._last > last:
            at = (self.ticks.value(last - self._first), self.ticks.value(self._last - self._first))
            yield Gap(queue, *at, "end", "cool-down", None, None, None)

    def _gap(
        self, queue: Queue, slot: int, free: Number, start: Number, phase: str
    ) -> Iterator[Gap]:
        node = int(self.graph.node_of_action[self.schedule.slots[slot]])
        binding = self._binding(node)
        before = self.schedule.slot(slot)

        def gap(a: Number, b: Number, cause: str) -> Gap:
            source = None if binding is None else self._slot_of_node(binding[0])
            return Gap(
                queue, self.ticks.value(a - self._first), self.ticks.value(b - self._first),
                cause, phase, before,
                None if source is None else self.schedule.slot(source),
                None if binding is None else self._queue_of_node(binding[0]),
            )  # fmt: skip

        ended = start if binding is None else self._occupied[1][binding[0]]
        ended = min(max(ended, free), start)
        if ended > free:
            yield gap(free, ended, "dependency")
        if start > ended:
            yield gap(ended, start, "transfer")

    def critical_path(self) -> list[Step]:
        """The chain of slots that makes the makespan, from its first to its last."""
        start, end = self._occupied
        compute = self._kinds[self.graph.first_action] < Kind.SEND_F
        node = int(np.argmax(np.where(compute, end, end.min())))
        steps: list[Step] = []
        while True:
            binding = self._binding(node)
            ready = None if binding is None else end[binding[0]] + self.delays[binding[1]]
            previous = None if node in self._heads else node - 1
            by_queue = previous is not None and (ready is None or end[previous] >= ready)
            after = "queue" if by_queue else "start" if binding is None else "message"
            slot = self._slot_of_node(node)
            at = (
                self.ticks.value(start[node] - self._first),
                self.ticks.value(end[node] - self._first),
            )
            steps.append(Step(self._queue_of_node(node), self.schedule.slot(slot), *at, after))
            if by_queue:
                node = node - 1
            elif binding is not None:
                node = binding[0]
            else:
                return steps[::-1]


def _zip(a: Array, b: Array) -> Array:
    return np.stack([a, b], axis=1).ravel()
