"""Spans with times, simulated or measured, and everything one can ask of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hocket import loops
from hocket.costs import Bytes, Number, Ticks, per_stage, quotient
from hocket.deps import IS_RECEIVE, IS_WORK, SIDES, changes
from hocket.graph import Graph
from hocket.ir import Array, Queue, Schedule, Slot, kinds_of, stages_of

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
            return f"{self.before} on {self.queue} has what it needs, but has not started"
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
    """What one rank did. Times in the timeline's unit; `waits` by cause, `bubble` by phase.

    peak_in_flight: pairs of a stage and a microbatch; `Timeline.in_flight` counts shares of ranks.
    """

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


class _Totals(NamedTuple):
    """Of each queue: first and last occupied tick, work, transfers; and the peak of a quantity."""

    first: Array
    last: Array
    busy: Array
    transfer: Array
    peak: Array


class _Gaps(NamedTuple):
    """Idle ticks by queue, `[queue, 3]`; by slot when its queue fell free, and its phase."""

    causes: Array
    phases: Array
    free: Array
    phase: Array


@dataclass(frozen=True, eq=False)
class Timeline:
    """The times of every action of a schedule.

    `start`, `end`: work of each action, `[action]`; the actions of a simulated slot share their
    times. `linked`: the graph, and the time from each edge's source to its target, `[edge]`, or
    what gives both when they are first needed. `around`: time each slot occupies its queue with
    transfers before and after its work, `[slot]` both; left out where there are none. `until`:
    when what held each slot had ended, `[slot]`; left out where the graph must tell, empty where
    messages take no time. All in ticks; `ticks.value` turns them into `unit`.
    """

    schedule: Schedule
    linked: tuple[Graph, Array] | Callable[[], tuple[Graph, Array]]
    start: Array
    end: Array
    ticks: Ticks
    unit: str = ""
    bytes: Bytes = field(default_factory=Bytes)
    measured: bool = False
    around: tuple[Array, Array] | None = None
    until: Array | None = None

    @cached_property
    def before(self) -> Array:
        """Time each slot occupies its queue before its work, `[slot]`."""
        return self._nothing if self.around is None else self.around[0]

    @cached_property
    def after(self) -> Array:
        """Time each slot occupies its queue after its work, `[slot]`."""
        return self._nothing if self.around is None else self.around[1]

    @cached_property
    def _nothing(self) -> Array:
        return np.zeros(self.schedule.n_slots, dtype=self.start.dtype)

    @cached_property
    def _linked(self) -> tuple[Graph, Array]:
        return self.linked if isinstance(self.linked, tuple) else self.linked()

    @property
    def graph(self) -> Graph:
        """What each node waits for."""
        return self._linked[0]

    @property
    def delays(self) -> Array:
        """Time from each edge's source to its target, ticks, `[edge]` of `graph`."""
        return self._linked[1]

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
        first, last = self._rank_extent
        return self.ticks.value((last - first).max())

    @property
    def bubble_ratio(self) -> float:
        """1 - busy / (queues x makespan); waiting and transfers are not busy."""
        whole = float(self.makespan) * len(self._worked)
        return 1 - sum(float(r.busy) for r in self.ranks) / whole if whole else 0.0

    @cached_property
    def in_flight(self) -> list[Number]:
        """Peak of microbatches in flight of each rank, counted in its full share of the model.

        One of the v stages of a share counts 1/v, one of the slices of a sequence its part of it.
        """
        return [quotient(r.peak_in_flight, self.parts) for r in self.ranks]

    @property
    def parts(self) -> int | Fraction:
        """Pairs of a stage and a slice that make one microbatch of a rank's full share."""
        return self.schedule.placement.stages_per_rank * self.schedule.placement.slices

    @cached_property
    def ranks(self) -> tuple[RankSummary, ...]:
        """One summary a rank."""
        totals, values = self._summed, self.ticks.values
        busy, transfer = self._by_rank(totals.busy), self._by_rank(totals.transfer)
        starts, ends = self._rank_extent
        n_queues = self._by_rank(np.ones(len(totals.busy), dtype=np.int64))
        idle = n_queues * (self._last - self._first) - busy - transfer
        causes, phases = (zip(*map(values, self._by_rank(x).T), strict=True) for x in self._idle)
        rows = zip(
            values(starts - self._first), values(ends - self._first), values(busy),
            values(transfer), values(idle), map(int, self.peaks("in_flight")), self.peak_bytes,
            (dict(zip(CAUSES, x, strict=True)) for x in causes),
            (dict(zip(PHASES, x, strict=True)) for x in phases),
            strict=True,
        )  # fmt: skip
        return tuple(RankSummary(rank, *row) for rank, row in enumerate(rows))

    def _by_rank(self, values: Array) -> Array:
        """Sums over the queues of each rank that do any work."""
        s = self.schedule
        out = np.zeros((s.p, *values.shape[1:]), dtype=values.dtype)
        np.add.at(out, s.rank_of_queue[self._worked], values[self._worked])
        return out

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
        if not s.has_communication:
            return np.ones(s.n_slots, dtype=bool)
        work = np.zeros(s.n_slots, dtype=bool)
        work[s.slot_of_action[IS_WORK[self._kinds]]] = True
        return work

    @cached_property
    def _occupying(self) -> Array:
        """Which slots occupy their queue: work, and messages that have a lane, `[slot]`."""
        if not self._has_lanes:
            return self.computes
        return self.computes | (self.before > 0) | (self.after > 0)

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
        if s.is_single:
            return times
        if not self.measured and not s.has_communication:
            return times[s.slots[:-1]]  # the parts of a slot share its times
        return ufunc.reduceat(times, s.slots[:-1])

    @cached_property
    def _worked(self) -> Array:
        """Queues that do any work; a queue of messages only is not one to keep busy."""
        s = self.schedule
        if not s.has_communication:
            return np.flatnonzero(np.diff(s.starts))
        return np.flatnonzero(np.bincount(s.queue_of_slot[self.computes]))

    @cached_property
    def _has_lanes(self) -> bool:
        return self.around is not None

    @cached_property
    def _begin(self) -> Array:
        """First occupied tick of each slot."""
        return self.slot_start - self.before if self._has_lanes else self.slot_start

    @cached_property
    def _finish(self) -> Array:
        """Last occupied tick of each slot."""
        return self.slot_end + self.after if self._has_lanes else self.slot_end

    def _totals(self, quantity: str) -> _Totals:
        """The totals of each queue, and the peak of a quantity."""
        s, n = self.schedule, len(self.schedule.queues)
        takes, frees = self._table_of_changes(quantity)
        if quantity == "in_flight":  # counted, and whole numbers add up faster
            takes, frees = takes.astype(np.int64), frees.astype(np.int64)
        sums = [np.zeros(n, dtype=self.start.dtype) for _ in range(4)]
        totals = _Totals(*sums, np.zeros(n, dtype=takes.dtype))
        loops.run(
            loops.totals, len(s.codes),
            (
                s.codes, s.slots, s.starts, self._occupying, self.slot_start, self.slot_end,
                *(self.around or (self.start[:0],) * 2),
                takes.ravel(), frees.ravel(), s.placement.n_stages,
            ),
            totals,
        )  # fmt: skip
        return totals

    @cached_property
    def _summed(self) -> _Totals:
        return self._totals("in_flight")

    @property
    def _busy(self) -> Array:
        return self._summed.busy

    @property
    def _transfer(self) -> Array:
        return self._summed.transfer

    @cached_property
    def _first(self) -> Any:
        return self._rank_extent[0].min()

    @cached_property
    def _last(self) -> Any:
        return self._rank_extent[1].max()

    @cached_property
    def _rank_extent(self) -> tuple[Array, Array]:
        """First occupied and last occupied tick of each rank, `[rank]` both."""
        totals, s = self._summed, self.schedule
        worked, rank = self._worked, self.schedule.rank_of_queue[self._worked]
        first = np.full(s.p, totals.first[worked].max(initial=0), dtype=self.start.dtype)
        last = np.full(s.p, totals.last[worked].min(initial=0), dtype=self.start.dtype)
        np.minimum.at(first, rank, totals.first[worked])
        np.maximum.at(last, rank, totals.last[worked])
        idle = np.bincount(rank, minlength=s.p) == 0
        first[idle] = last[idle] = 0
        return first, last

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
        table, stages = self._table_of_changes(quantity), stages_of(s.codes)
        takes, frees = np.zeros(s.n_slots), np.zeros(s.n_slots)
        if s.is_single:
            return table[0, self._kinds, stages], table[1, self._kinds, stages]
        np.add.at(takes, s.slot_of_action, table[0, self._kinds, stages])
        np.add.at(frees, s.slot_of_action, table[1, self._kinds, stages])
        return takes, frees

    def _table_of_changes(self, quantity: str) -> Array:
        """What an action takes at its start and frees at its end, `[2, kind, stage]`."""
        s = self.schedule
        n = s.placement.n_stages
        sizes = {"in_flight": 1} if quantity == "in_flight" else self._sizes(n)
        wanted = {k: np.array(x, float) for k, x in sizes.items() if quantity in (k, "bytes")}
        return changes(wanted, (n,), forward_only=s.is_forward_only)

    def _sizes(self, n: int) -> dict[str, tuple[Number, ...]]:
        b = self.bytes
        held = b.activation if b.held is None else b.held
        return {
            "activation": per_stage("bytes.activation", b.activation, n),
            "held": per_stage("bytes.held_between_I_and_W", held, n),
            "gradient": per_stage("bytes.gradient", b.gradient, n),
        }

    def peaks(self, quantity: str) -> list[float]:
        """Highest level of a quantity on each rank, 0 where nothing is ever held."""
        if len(self.schedule.queues) == self.schedule.p:
            totals = self._summed if quantity == "in_flight" else self._totals(quantity)
            return totals.peak.tolist()
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
        if not self.bytes:
            return [0.0] * self.schedule.p
        return [a + b for a, b in zip(self.static_bytes, self.peaks("bytes"), strict=True)]

    # --- why ----------------------------------------------------------------------------

    @cached_property
    def _idle(self) -> tuple[Array, Array]:
        """Idle ticks of each queue by cause and by phase, `[queue, 3]` both."""
        totals, n = self._summed, len(self.schedule.queues)
        causes, phases = self._gaps(0, n, told=False)[:2]
        last = np.full(n, self._first)
        last[self._worked] = totals.last[self._worked]
        causes[:, 2] = self._last - last
        phases[:, 2] += self._last - last
        return causes, phases

    def _gaps(self, first: int, last: int, *, told: bool) -> _Gaps:
        """The idle time of queues first to last; if told, of each of their slots too."""
        s = self.schedule
        starts = s.starts[first : last + 1]
        n_slots = int(starts[-1] - starts[0]) if told else 0
        causes, phases = (
            np.zeros((last - first) * 3, dtype=self.start.dtype) for _ in (CAUSES, PHASES)
        )
        free, phase_of = np.zeros(n_slots, self.start.dtype), np.zeros(n_slots, np.int64)
        loops.run(
            loops.idleness, len(s.codes),
            (
                s.codes, s.slots, starts, self._occupying, self._begin, self._finish, self._until,
                *SIDES, self._first.item(),
            ),
            (causes, phases, free, phase_of),
        )  # fmt: skip
        return _Gaps(causes.reshape(-1, 3), phases.reshape(-1, 3), free, phase_of)

    @cached_property
    def _until(self) -> Array:
        """When what held each slot had ended; as it begins, where nothing did."""
        if self.until is not None:
            return self.until
        s, (g, delays), until = self.schedule, self._linked, self._begin.copy()
        loops.run(
            loops.held_until, len(s.codes),
            (
                s.slots, self._occupying, g.nodes.of_action, g.need_starts, g.needs, delays,
                self._occupied[1], self._receiving, g.heads,
            ),
            (until,),
        )  # fmt: skip
        return until

    @cached_property
    def _occupied(self) -> tuple[Array, Array]:
        """First and last occupied tick of each node of the graph."""
        if not self.schedule.has_communication:
            return self._begin, self._finish
        nodes = self.graph.first_action
        slots = self.schedule.slot_of_action[nodes]
        compute = IS_WORK[self._kinds[nodes]]
        start = np.where(compute, self.slot_start[slots], self.start[nodes]) - self.before[slots]
        end = np.where(compute, self.slot_end[slots], self.end[nodes]) + self.after[slots]
        return start, end

    @cached_property
    def _receiving(self) -> Array:
        """Which nodes are a RECV, `[node]`; empty where no messages stand in the order."""
        if not self.schedule.has_communication:
            return np.zeros(0, dtype=bool)
        kinds = self._kinds[self.graph.first_action]
        return IS_RECEIVE[kinds]

    def _slot_of_node(self, node: int) -> int:
        return int(self.schedule.slot_of_action[self.graph.first_action[node]])

    def _queue_of_node(self, node: int) -> Queue:
        slot = self._slot_of_node(node)
        return self.schedule.queues[self.schedule.queue_of_slot[slot]]

    def _binding(self, node: int) -> tuple[int, int] | None:
        """The (node, edge) that held this node longest; a RECV is seen through to its SEND."""
        g = self.graph
        source, edge = loops.binding(
            node, g.need_starts, g.needs, self.delays, self._occupied[1], self._receiving, g.heads
        )
        return None if source < 0 else (int(source), int(edge))

    def gaps(self, queue: Queue) -> Iterator[Gap]:
        """Every idle stretch of a queue between the step's first start and last end."""
        s, q = self.schedule, self.schedule.queues.index(queue)
        base = int(s.starts[q])
        found = self._gaps(q, q + 1, told=True)
        begin = self._begin[base : s.starts[q + 1]]
        idle = self._occupying[base : s.starts[q + 1]] & (begin > found.free)
        for i in np.flatnonzero(idle).tolist():
            phase = PHASES[found.phase[i]]
            yield from self._gap(queue, base + i, found.free[i], begin[i], phase)
        last = self._summed.last[q] if q in self._worked else self._first
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
        compute = IS_WORK[self._kinds[self.graph.first_action]]
        node = int(np.argmax(np.where(compute, end, end.min())))
        steps: list[Step] = []
        while True:
            binding = self._binding(node)
            ready = None if binding is None else end[binding[0]] + self.delays[binding[1]]
            previous = None if self.graph.heads[node] else node - 1
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
