"""Spans with times, simulated or measured, and everything one can ask of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hocket import compiled
from hocket.compiled import ROOM
from hocket.costs import Bytes, Number, Ticks, per_stage, quotient
from hocket.deps import ALTERED, ANY_QUEUE, COPIES, IS_MESSAGE, IS_WORK, SIDES, Kind, changes
from hocket.engine import delays_of
from hocket.graph import Graph, graph
from hocket.ir import Array, Queue, Schedule, Slot, kinds_of, mbs_of, stages_of

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
    times. `around`: time each slot occupies its queue with transfers before and after its work,
    `[slot]` both; left out where there are none. `wires`: time that each result takes to the next
    rank, `[kind, stage]`; left out where none takes any, and where it was measured. `blocking`: a
    RECV holds its queue until its message is there. `held`: when what held each slot had ended,
    `[slot]`, where that is known; empty where messages take no time. All in ticks; `ticks.value`
    turns them into `unit`.
    """

    schedule: Schedule
    start: Array
    end: Array
    ticks: Ticks
    unit: str = ""
    bytes: Bytes = field(default_factory=Bytes)
    measured: bool = False
    around: tuple[Array, Array] | None = None
    wires: Array | None = None
    blocking: bool = False
    held: Array | None = None

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

    @property
    def graph(self) -> Graph:
        """What each node waits for."""
        return graph(self.schedule, blocking=self.blocking)

    @cached_property
    def delays(self) -> Array:
        """Time from each edge's source to its target, ticks, `[edge]` of `graph`.

        Of measured messages it is the recorded time between the ends of SEND and RECV.
        """
        return self._delays(self.end[self.graph.target], self.end[self.graph.source])

    @cached_property
    def _arrivals(self) -> Array:
        """The same, up to when a message can have been there: what holds a node up, `[edge]`."""
        g, end = self.graph, self._occupied[1]
        return self._delays(end[g.node_of_action[g.target]], end[g.needs])

    def _delays(self, arrived: Array, sent: Array) -> Array:
        g = self.graph
        delays = delays_of(g, self.wires)
        if self.measured and self.schedule.has_communication:
            at = g.crosses & IS_MESSAGE[self._kinds[g.source]]
            delays = np.where(at, arrived - sent, delays)
        return delays

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
        return self._any_of(IS_WORK) if s.has_communication else np.ones(s.n_slots, dtype=bool)

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
        """Queues that compute; one of messages or copies only is not one to keep busy."""
        s = self.schedule
        if not s.has_communication and s.kinds.isdisjoint(COPIES):
            return np.flatnonzero(np.diff(s.starts))
        return np.flatnonzero(np.bincount(s.queue_of_slot[self._any_of(~ANY_QUEUE)]))

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
        out = _Totals(*sums, np.zeros(n, dtype=takes.dtype))
        fast = compiled.choose(totals, len(s.codes))
        if fast is None:
            return self._added_up(out, takes, frees)
        fast(
            self._rows, s.slots, s.starts, self._occupying, self.slot_start, self.slot_end,
            *(self.around or (self.start[:0],) * 2),
            takes.ravel(), frees.ravel(), s.placement.n_stages, *out,
        )  # fmt: skip
        return out

    def _added_up(self, out: _Totals, takes: Array, frees: Array) -> _Totals:
        """What `totals` writes, by whole arrays."""
        s = self.schedule
        slots = np.flatnonzero(self._occupying)
        queues, at = np.unique(s.queue_of_slot[slots], return_index=True)
        if len(at):
            out.first[queues] = np.minimum.reduceat(self._begin[slots], at)
            out.last[queues] = np.maximum.reduceat(self._finish[slots], at)
        np.add.at(out.busy, s.queue_of_slot[slots], (self.slot_end - self.slot_start)[slots])
        if self.around is not None:
            np.add.at(out.transfer, s.queue_of_slot, self.before + self.after)
        takes, frees = self._by_part(takes), self._by_part(frees)
        for q in queues.tolist():
            part = slots[slice(*np.searchsorted(slots, s.starts[q : q + 2]))]
            level = np.cumsum(_zip(takes[part], -frees[part]))
            out.peak[q] = level[::2].max(initial=0)
        return out

    @cached_property
    def _summed(self) -> _Totals:
        return self._totals("in_flight")

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

        `quantity` is one of deps.Effect ("in_flight", "activation", "held", "gradient", "input") or
        "bytes", their sum; static memory is not in it. Each value holds from its tick on.
        """
        takes, frees = map(self._by_part, self._table_of_changes(quantity))
        s = self.schedule
        out = []
        for rank in range(s.p):
            mine = self._queues_of_rank[rank]
            times, deltas, later = [], [], []
            for q in mine:
                part = slice(int(s.starts[q]), int(s.starts[q + 1]))
                keep = self.computes[part]
                start, end = self.slot_start[part][keep], self.slot_end[part][keep]
                times.append(_zip(start, end))
                deltas.append(_zip(takes[part][keep], -frees[part][keep]))
                later.append(_zip(np.ones_like(start, dtype=bool), start == end))
            time, delta = np.concatenate(times), np.concatenate(deltas)
            if len(mine) > 1:  # a queue's own order settles ties; between queues, free first
                order = np.lexsort((np.concatenate(later), time))
                time, delta = time[order], delta[order]
            out.append((time, np.cumsum(delta)))
        return out

    def _by_part(self, table: Array) -> Array:
        """Sums over the actions of each slot, of `[kind, stage]`, `[slot]`."""
        s = self.schedule
        of_action = table[kinds_of(self._rows), stages_of(s.codes)]
        if s.is_single:
            return of_action
        out = np.zeros(s.n_slots, dtype=table.dtype)
        np.add.at(out, s.slot_of_action, of_action)
        return out

    @cached_property
    def _rows(self) -> Array:
        """The codes, with the row of `deps.changes` in the place of the kind, `[action]`."""
        s = self.schedule
        rows = s.codes
        for i, kind in enumerate(ALTERED, start=1):
            if kind in s.kinds:
                pairs = stages_of(s.codes), mbs_of(s.codes)
                there = np.zeros((s.placement.n_stages, s.m), dtype=bool)
                there[tuple(x[self._kinds == kind] for x in pairs)] = True
                rows = np.where(there[pairs], s.codes + i * len(Kind), rows)
        return rows

    def _table_of_changes(self, quantity: str) -> Array:
        """What an action takes at its start and frees at its end, `[2, row, stage]`."""
        s = self.schedule
        n = s.placement.n_stages
        sizes = {"in_flight": 1} if quantity == "in_flight" else self._sizes(n)
        wanted = {k: np.array(x, float) for k, x in sizes.items() if quantity in (k, "bytes")}
        return changes(wanted, (n,), forward_only=s.is_forward_only)

    def _sizes(self, n: int) -> dict[str, tuple[Number, ...]]:
        b = self.bytes
        held = b.activation if b.held is None else b.held
        activation = per_stage("bytes.activation", b.activation, n)
        message = per_stage("bytes.message", b.message, n)
        return {
            "activation": activation,
            "input": tuple(map(min, activation, (message[0], *message))),
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
        out = _Gaps(
            causes, phases, np.zeros(n_slots, self.start.dtype), np.zeros(n_slots, np.int64)
        )
        fast = compiled.choose(idleness, len(s.codes))
        if fast is None:
            self._split_up(out, first, last)
        else:
            fast(
                s.codes, s.slots, starts, self._occupying, self._begin, self._finish, self._until,
                *SIDES, self._first.item(), *out,
            )  # fmt: skip
        return out._replace(causes=causes.reshape(-1, 3), phases=phases.reshape(-1, 3))

    def _split_up(self, out: _Gaps, first: int, last: int) -> None:
        """What `idleness` writes, by whole arrays."""
        s, base = self.schedule, int(self.schedule.starts[first])
        part = slice(base, int(s.starts[last]))
        slots = base + np.flatnonzero(self._occupying[part])
        queue, begin, finish = s.queue_of_slot[slots] - first, self._begin[slots], self._finish
        free = np.concatenate([[self._first], finish[slots[:-1]]])[: len(slots)]
        free[np.append(True, queue[1:] != queue[:-1])[: len(slots)]] = self._first
        late = begin > free
        ended = begin
        if len(self._until):
            ended = np.minimum(begin, np.maximum(self._until[slots], free))
        opening = np.full(last - first, s.n_slots)
        closing = s.starts[first:last] - 1
        forward, backward = (self._any_of(side)[slots] for side in SIDES)
        np.minimum.at(opening, queue[backward], slots[backward])
        np.maximum.at(closing, queue[forward], slots[forward])
        phase = np.where(slots <= opening[queue], 0, np.where(slots > closing[queue], 2, 1))
        np.add.at(out.causes, 3 * queue[late], (ended - free)[late])
        np.add.at(out.causes, 3 * queue[late] + 1, (begin - ended)[late])
        np.add.at(out.phases, (3 * queue + phase)[late], (begin - free)[late])
        if len(out.phase):
            out.free[slots - base], out.phase[slots - base] = free, phase

    def _any_of(self, kinds: Array) -> Array:
        """Which slots hold an action of these kinds, `[slot]`; kinds: `[kind]` bool."""
        which, s = kinds[self._kinds], self.schedule
        return which if s.is_single else np.logical_or.reduceat(which, s.slots[:-1])

    @cached_property
    def _until(self) -> Array:
        """When what held each slot had ended; as it begins, where nothing did."""
        if self.held is not None:
            return self.held
        s, g, until = self.schedule, self.graph, self._begin.copy()
        compiled.run(
            held_until, len(s.codes),
            (
                s.slots, self._occupying, g.nodes.of_action, g.need_starts, g.needs, self._arrivals,
                self._occupied[1], g.receives, g.heads,
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
        return start, self._arrived(start, end) if self.measured else end

    def _arrived(self, start: Array, end: Array) -> Array:
        """Measured ends of the nodes, those of RECVs when their message can have been there.

        A RECV is recorded until its rank had waited for it, however long its message was there by
        then. A message held its rank up only where it came after the rank was free: in the least
        time that any message took, or where the rank then waited for longer than that.
        """
        g = self.graph
        target, source = g.node_of_action[g.target], g.needs
        sent = g.receives[target] & g.crosses
        if not sent.any():
            return end
        way, free = np.full(len(end), -np.inf), np.full(len(end), -np.inf)
        way[target[sent]] = start[source[sent]]
        used = g.receives[source] & ~g.heads[target]
        free[source[used]] = end[target[used] - 1]
        least = (end - way)[target[sent]].min()
        early = (way + least <= free) & (end - free <= least)
        return np.where(early, np.minimum(way + least, free), end)

    def _slot_of_node(self, node: int) -> int:
        return int(self.schedule.slot_of_action[self.graph.first_action[node]])

    def _queue_of_node(self, node: int) -> Queue:
        slot = self._slot_of_node(node)
        return self.schedule.queues[self.schedule.queue_of_slot[slot]]

    @cached_property
    def _passing(self) -> Array:
        """Which nodes are a RECV that takes no time, `[node]`; empty as `graph.receives`."""
        receives = self.graph.receives
        if not len(receives) or not self._has_lanes:
            return receives
        return receives & (self.graph.by_node(self.before) == 0)

    def _binding(self, node: int, passing: Array | None = None) -> tuple[int, int] | None:
        """The (node, edge) that held this node longest; a RECV is seen through to its SEND.

        passing: which RECVs are; left out, all.

        None where nothing outside of its queue did.
        """
        g = self.graph
        source, edge = binding(
            node, g.need_starts, g.needs, self._arrivals, self._occupied[1],
            g.receives if passing is None else passing, g.heads,
        )  # fmt: skip
        return None if edge < 0 else (int(source), int(edge))

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
        """The chain of slots that makes the makespan, from its first to its last.

        In a recorded order that cannot run it begins where it would come back to a slot.
        """
        start, end = self._occupied
        compute = IS_WORK[self._kinds[self.graph.first_action]]
        node = int(np.argmax(np.where(compute, end, end.min())))
        steps, seen = list[Step](), set[int]()
        while True:
            seen.add(node)
            binding = self._binding(node, self._passing)
            ready = None if binding is None else end[binding[0]] + self._arrivals[binding[1]]
            previous = None if self.graph.heads[node] else node - 1
            by_queue = previous is not None and (ready is None or end[previous] >= ready)
            after = "queue" if by_queue else "start" if binding is None else "message"
            behind = previous if by_queue else None if binding is None else binding[0]
            if behind in seen:
                behind, after = None, "start"
            slot = self._slot_of_node(node)
            at = (
                self.ticks.value(start[node] - self._first),
                self.ticks.value(end[node] - self._first),
            )
            steps.append(Step(self._queue_of_node(node), self.schedule.slot(slot), *at, after))
            if behind is None:
                return steps[::-1]
            node = behind


def _zip(a: Array, b: Array) -> Array:
    out = np.empty(2 * len(a), dtype=np.result_type(a, b))
    out[::2], out[1::2] = a, b
    return out


# --- loops, plain or compiled ------------------------------------------------------------------


def totals(codes, slots, starts, occupies, slot_start, slot_end, before, after, takes, frees,
           n_stages, first, last, busy, transfer, peak):  # fmt: skip
    """Of each queue: first and last occupied tick, work, transfers, and the peak of a quantity.

    Action a takes `takes[kind, stage]` when its slot starts and gives back `frees` when it ends.
    """
    lanes, wide = len(before) > 0, len(slots) <= len(codes)
    for q in range(len(starts) - 1):
        new, level, top = True, 0 * takes[0], peak[q]
        low, high, work, moved = first[q], last[q], busy[q], transfer[q]
        for j in range(starts[q], starts[q + 1]):
            i = j & ROOM
            begin, finish = slot_start[i], slot_end[i]
            if lanes:
                moved += before[i] + after[i]
            if not occupies[i]:
                continue
            work += finish - begin
            if lanes:
                begin -= before[i]
                finish += after[i]
            if new or begin < low:
                low = begin
            if new or finish > high:
                high = finish
            new = False
            at = kinds_of(codes[i]) * n_stages + stages_of(codes[i])
            taken, freed = takes[at & ROOM], frees[at & ROOM]
            if wide:
                taken, freed = 0 * taken, 0 * freed
                for a in range(slots[i], slots[i + 1]):
                    at = kinds_of(codes[a]) * n_stages + stages_of(codes[a])
                    taken += takes[at]
                    freed += frees[at]
            level += taken
            top = max(top, level)
            level -= freed
        first[q], last[q], busy[q], transfer[q], peak[q] = low, high, work, moved, top


def binding(node, need_starts, needs, delays, end, receives, heads):
    """The (node, edge) that held a node longest; a RECV is seen through to its SEND.

    A RECV that another action of its queue held is not. Edge -1: the RECV before it in its queue
    held it. Node -1: nothing held it.
    """
    found, found_edge = -1, -1
    while True:
        best, best_edge = -1, -1
        latest = end[node] * 0
        for e in range(need_starts[node], need_starts[node + 1]):
            ready = end[needs[e]] + delays[e]
            if best < 0 or ready > latest:
                best, best_edge, latest = needs[e], e, ready
        if len(receives):
            if not heads[node] and (best < 0 or end[node - 1] > latest):
                if receives[node - 1]:
                    best, best_edge = node - 1, -1
                elif found_edge >= 0:
                    return found, found_edge
            if best >= 0:
                found, found_edge = best, best_edge
                if receives[best]:
                    node = best
                    continue
        else:
            found, found_edge = best, best_edge
        return found, found_edge


def held_until(slots, occupies, node_of, need_starts, needs, delays, end, receives, heads, until):
    """Writes when what held a slot had ended to `until`, where something did."""
    for i in range(len(until)):
        if occupies[i]:
            node = node_of[slots[i]] if len(node_of) else i
            held, _ = binding(node, need_starts, needs, delays, end, receives, heads)
            if held >= 0:
                until[i] = end[held]


def idleness(
    codes, slots, starts, occupies, begin, finish, until, forward, backward, zero, causes, phases,
    free_at, phase_of,
):  # fmt: skip
    """Idle ticks before each queue's slots by cause and phase, `[queue, 3]`.

    until: when what held each slot had ended; empty where it then starts. With `free_at` and
    `phase_of` also of each slot: when its queue fell free, and the phase.
    """
    told, base = len(phase_of) > 0, starts[0]
    for q in range(len(starts) - 1):
        last_forward = starts[q + 1] - 1
        while last_forward >= starts[q]:
            some = False
            for a in range(slots[last_forward], slots[last_forward + 1]):
                some = some or forward[kinds_of(codes[a])]
            if some:
                break
            last_forward -= 1
        free, phase, backwards = zero, 0, False
        for j in range(starts[q], starts[q + 1]):
            i = j & ROOM
            if not occupies[i]:
                continue
            phase = 0 if not backwards else 2 if i > last_forward else 1
            if not backwards:
                for a in range(slots[i], slots[i + 1]):
                    backwards = backwards or backward[kinds_of(codes[a])]
            if begin[i] > free:
                ended = begin[i]
                if len(until) and until[i] < ended:
                    ended = max(until[i], free)
                causes[3 * q] += ended - free
                causes[3 * q + 1] += begin[i] - ended
                phases[3 * q + phase] += begin[i] - free
            if told:
                free_at[i - base], phase_of[i - base] = free, phase
            free = finish[i]
