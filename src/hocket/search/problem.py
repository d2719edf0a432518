"""What the search works on: types of actions as flat arrays, with memory limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hocket.costs import Bytes, Costs, CostTable, Number, Ticks, per_stage
from hocket.deps import EFFECTS, FULL, SPLIT
from hocket.graph import edges
from hocket.ir import (
    Array,
    Kind,
    Placement,
    Queue,
    Schedule,
    action_of,
    encode,
    kinds_of,
    mbs_of,
    stages_of,
)
from hocket.pattern import lay
from hocket.search.policy import all_actions

_SLACK = 1e-9


@dataclass(frozen=True, eq=False)
class Problem:
    """Types (path, kind, stage) of one placement under costs and limits.

    `queues[q]:queues[q + 1]` are the positions of queue q in an order; an order is an array of
    types. `need[type, i]` is needed `delay[type, i]` ticks before; `own` says that it stands in
    the same queue. `take` and `free` are memory, `cap` its limit in each queue; `limited_by` says
    in what: "bytes" or "in_flight". Times in ticks.
    """

    placement: Placement
    costs: Costs
    kinds: tuple[Kind, ...]
    ticks: Ticks
    kind: Array
    stage: Array
    path: Array
    queue_of: Array
    counts: Array
    base: Array
    queues: Array
    dur: Array
    needs: Array
    need: Array
    delay: Array
    own: Array
    take: Array
    free: Array
    cap: Array
    limited_by: str

    @property
    def n_types(self) -> int:
        """Number of types."""
        return len(self.kind)

    @property
    def n(self) -> int:
        """Number of actions."""
        return int(self.queues[-1])

    @cached_property
    def arcs(self) -> list[tuple[int, int, float]]:
        """Every (needed type, type, delay)."""
        return [
            (int(self.need[t, e]), t, float(self.delay[t, e]))
            for t in range(self.n_types)
            for e in range(int(self.needs[t]))
        ]

    @cached_property
    def head(self) -> Array:
        """The shortest time before a type's first action, `[type]`."""
        return self._longest(self.arcs, self.dur)

    @cached_property
    def tail(self) -> Array:
        """The shortest time from the end of a type's last action to the end, `[type]`."""
        return self._longest([(b, a, d) for a, b, d in self.arcs], self.dur)

    @cached_property
    def depth(self) -> Array:
        """The most actions of one microbatch that come one after the other before it, `[type]`."""
        return self._longest([(a, b, 0.0) for a, b, _ in self.arcs], np.ones(self.n_types))

    def _longest(self, arcs: list[tuple[int, int, float]], dur: Array) -> Array:
        reach = np.zeros(self.n_types)
        for _ in range(self.n_types + 1):
            changed = False
            for a, b, delay in arcs:
                at = reach[a] + dur[a] + delay
                if at > reach[b]:
                    reach[b], changed = at, True
            if not changed:
                break
        return reach

    @cached_property
    def work(self) -> Array:
        """Work of each queue in ticks, `[queue]`."""
        return np.bincount(
            self.queue_of, weights=self.dur * self.counts, minlength=len(self.queues) - 1
        )

    @cached_property
    def mbs_of_path(self) -> list[Array]:
        """The microbatches of each path, in order."""
        path_of = np.array(self.placement.path_of)
        return [np.flatnonzero(path_of == k) for k in range(len(self.placement.paths))]

    def schedule(self, order: Array, name: str) -> Schedule:
        """The schedule of an order."""
        seen = np.zeros(self.n_types, dtype=np.int64)
        codes = np.empty(len(order), dtype=np.int64)
        for i, t in enumerate(order.tolist()):
            mb = self.mbs_of_path[self.path[t]][seen[t]]
            codes[i] = encode(int(self.kind[t]), int(self.stage[t]), int(mb))
            seen[t] += 1
        parts = [lay(codes[a:b]) for a, b in zip(self.queues[:-1], self.queues[1:], strict=True)]
        return Schedule.from_lines(name, self.placement, parts)

    def order_of(self, schedule: Schedule) -> Array | None:
        """The types of a schedule's actions in its order; None where it has other ones."""
        if not schedule.is_single or schedule.queues != self.placement.queues:
            return None
        if schedule.placement.paths != self.placement.paths or len(schedule.codes) != self.n:
            return None
        kinds, stages = kinds_of(schedule.codes), stages_of(schedule.codes)
        paths = np.array(schedule.placement.path_of)[mbs_of(schedule.codes)]
        table = np.full((len(self.placement.paths), len(Kind), self.placement.n_stages), -1)
        table[self.path, self.kind, self.stage] = np.arange(self.n_types)
        order = table[paths, kinds, stages]
        if (order < 0).any():
            return None
        if not np.array_equal(np.bincount(order, minlength=self.n_types), self.counts):
            return None
        return order.astype(np.int64)

    def peaks(self, order: Array) -> list[float]:
        """Highest memory of each queue in this order."""
        out = []
        for a, b in zip(self.queues[:-1], self.queues[1:], strict=True):
            mine = order[a:b]
            before = np.cumsum(self.take[mine] - self.free[mine]) + self.free[mine]
            out.append(float(before.max(initial=0.0)))
        return out


def sizes_of(b: Bytes, n_stages: int) -> dict[str, Sequence[Number]]:
    """The bytes of each quantity of `deps.EFFECTS`, by stage."""
    held = b.activation if b.held is None else b.held
    return {
        "activation": per_stage("bytes.activation", b.activation, n_stages),
        "held": per_stage("bytes.held_between_I_and_W", held, n_stages),
        "gradient": per_stage("bytes.gradient", b.gradient, n_stages),
    }


def problem(
    placement: Placement,
    costs: Costs,
    kinds: tuple[Kind, ...],
    *,
    in_flight: Sequence[Number] | None = None,
    room: Sequence[float] | None = None,
) -> Problem:
    """The problem of ordering these kinds of actions.

    in_flight: limit of (stage, microbatch) pairs of each rank; room: limit of bytes beside the
    static ones. With neither, memory is not limited; not both.
    """
    one = all_actions("one", Placement(placement.paths, tuple(range(len(placement.paths)))), kinds)
    table = CostTable(costs, one)
    before, after = table.lanes()
    dur = (before + table.work() + after).astype(float)
    kind, stage, path = kinds_of(one.codes), stages_of(one.codes), mbs_of(one.codes)
    counts = np.bincount(np.array(placement.path_of), minlength=len(placement.paths))[path]
    queue_of = one.queue_of_slot.astype(np.int64)
    per_queue = np.bincount(queue_of, weights=counts, minlength=len(one.queues))
    needs, need, delay = _needs(one, table)
    take, free, cap = _memory(one, kind, stage, in_flight, room, costs)
    return Problem(
        placement=placement, costs=costs, kinds=kinds, ticks=table.ticks,
        kind=kind.astype(np.int64), stage=stage.astype(np.int64), path=path.astype(np.int64),
        queue_of=queue_of, counts=counts.astype(np.int64),
        base=np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64),
        queues=np.concatenate([[0], np.cumsum(per_queue)]).astype(np.int64),
        dur=dur, needs=needs, need=need, delay=delay, own=queue_of[need] == queue_of[:, None],
        take=take, free=free, cap=cap, limited_by="in_flight" if room is None else "bytes",
    )  # fmt: skip


def _needs(one: Schedule, table: CostTable) -> tuple[Array, Array, Array]:
    """How many needs each type has, which types they are, and how long after their ends."""
    sources, targets = edges(one)
    rank = one.rank_of_queue[one.queue_of_slot]
    delays = table.delays(sources, rank[sources] != rank[targets])
    n = len(one.codes)
    needs = np.bincount(targets, minlength=n).astype(np.int64)
    need = np.zeros((n, max(1, int(needs.max()))), dtype=np.int64)
    delay = np.zeros(need.shape)
    filled = np.zeros(n, dtype=np.int64)
    for source, target, wait in zip(sources.tolist(), targets.tolist(), delays, strict=True):
        need[target, filled[target]] = source
        delay[target, filled[target]] = float(wait)
        filled[target] += 1
    return needs, need, delay


def _memory(
    one: Schedule,
    kind: Array,
    stage: Array,
    in_flight: Sequence[Number] | None,
    room: Sequence[float] | None,
    costs: Costs,
) -> tuple[Array, Array, Array]:
    n = one.placement.n_stages
    sizes: dict[str, Sequence[Number]] = {"in_flight": (1,) * n}
    limit = in_flight
    if room is not None:
        sizes, limit = sizes_of(costs.bytes, n), room
    pairs = [
        EFFECTS[Kind(k)].of({name: by_stage[s] for name, by_stage in sizes.items()})
        for k, s in zip(kind.tolist(), stage.tolist(), strict=True)
    ]
    take, free = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    cap = np.full(len(one.queues), np.inf)
    if limit is not None:
        by_rank = [float(x) for x in limit]
        cap = np.array([by_rank[q.rank] * (1 + _SLACK) + _SLACK for q in one.queues])
    return take, free, cap


__all__ = ["FULL", "SPLIT", "Problem", "Queue", "action_of", "problem", "sizes_of"]
