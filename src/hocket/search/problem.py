"""What the search works on: types of actions as flat arrays, with memory limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hocket.costs import Bytes, Costs, CostTable, Number, Ticks, fused_rule, per_stage
from hocket.deps import EFFECTS, FULL, SIDES, SPLIT
from hocket.errors import CostError
from hocket.graph import edges
from hocket.ir import (
    Array,
    Kind,
    Line,
    Placement,
    Schedule,
    encode,
    kinds_of,
    mbs_of,
    stages_of,
)
from hocket.pattern import lay

_SLACK = 1e-9


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


@dataclass(frozen=True, eq=False)
class Problem:
    """Types (path, kind, stage) of one placement under costs and limits.

    `queues[q]:queues[q + 1]` are the positions of queue q in an order. An order is an array of
    types; one that shares the slot of the type before it counts `n_types` more. An I and its W in
    one slot are a full backward. `need[type, i]` is needed `delay[type, i]` ticks before; `own`
    says that it stands in the same queue. `take` and `free` are memory, `limit` what each queue
    may hold, `cap` the same with room for rounding; `limited_by` says in what: "bytes" or
    "in_flight". `fused`: a forward may share a slot with a backward. Times in ticks.
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
    limit: Array
    limited_by: str
    fused: bool = False

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
        return longest(*self._arrays, self.dur)

    @cached_property
    def tail(self) -> Array:
        """The shortest time from the end of a type's last action to the end, `[type]`."""
        sources, targets, delays = self._arrays
        return longest(targets, sources, delays, self.dur)

    @cached_property
    def depth(self) -> Array:
        """The most actions of one microbatch that come one after the other before it, `[type]`."""
        sources, targets, _ = self._arrays
        return longest(sources, targets, np.zeros(len(sources)), np.ones(self.n_types))

    @property
    def _arrays(self) -> tuple[Array, Array, Array]:
        """The arcs as arrays."""
        sources, targets, delays = np.array(self.arcs).reshape(-1, 3).T
        return sources.astype(np.int64), targets.astype(np.int64), delays

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

    @cached_property
    def type_of(self) -> Array:
        """The type of each node, `[node]`: the microbatches of each type in order."""
        return np.repeat(np.arange(self.n_types), self.counts)

    @cached_property
    def mb_of(self) -> Array:
        """The microbatch of each node, `[node]`."""
        return np.concatenate([self.mbs_of_path[path] for path in self.path.tolist()])

    @property
    def cap(self) -> Array:
        """What each queue may hold, with room for the rounding of sums."""
        return self.limit * (1 + _SLACK) + _SLACK

    @cached_property
    def by_place(self) -> Array:
        """The type of each `[path, kind, stage]`; -1 where there is none."""
        table = np.full((len(self.placement.paths), len(Kind), self.placement.n_stages), -1)
        table[self.path, self.kind, self.stage] = np.arange(self.n_types)
        return table

    @cached_property
    def side(self) -> Array:
        """0 for forwards, 1 for backwards, 2 for W, `[type]`: how they stand in a slot."""
        forward, backward = SIDES
        return np.where(forward[self.kind], 0, np.where(backward[self.kind], 1, 2))

    @cached_property
    def first_half(self) -> Array:
        """The I types; none where backwards are full."""
        return np.flatnonzero(self.kind == Kind.I)

    @cached_property
    def second_half(self) -> Array:
        """The W of each of `first_half`."""
        return self.by_place[self.path, Kind.W, self.stage][self.first_half]

    def with_kinds(self, kinds: tuple[Kind, ...]) -> Problem:
        """The problem of ordering other kinds with the same costs and limits."""
        limit = [float(x) for x in self.limit]
        limits = {"room" if self.limited_by == "bytes" else "in_flight": limit}
        return problem(self.placement, self.costs, kinds, fused=self.fused, **limits)

    # --- slots of several -----------------------------------------------------------------

    @cached_property
    def full(self) -> Array:
        """Ticks of a full backward in place of each I and its W, `[first_half]`."""
        halves = self.first_half
        if not len(halves):
            return np.zeros(0)
        return self._slot_times([((Kind.B,), int(t), int(t)) for t in halves.tolist()])

    @cached_property
    def mixes(self) -> bool:
        """True where a full backward may be better than an I and a W.

        It is shorter, or shares a slot with a forward, or what is held between I and W is more
        than the activations.
        """
        i, w = self.first_half, self.second_half
        if not len(i):
            return False
        apart = self.dur[i] + self.dur[w]
        larger = np.isfinite(self.limit[self.queue_of[i]]) & (self.take[i] > self.free[i])
        return bool(self.fused or (self.full < apart * (1 - 1e-12)).any() or larger.any())

    @cached_property
    def relaxed(self) -> Problem:
        """A problem of I and W alone that no order of this one beats.

        A full backward is at least as long as the shorter I here and the shorter W after it, and
        holds at least as much.
        """
        if not self.mixes:
            return self
        i, w = self.first_half, self.second_half
        dur, free = self.dur.copy(), self.free.copy()
        dur[i] = np.minimum(self.dur[i], self.full)
        dur[w] = np.minimum(self.dur[i] + self.dur[w], self.full) - dur[i]
        free[i] = np.maximum(self.free[i], self.take[i])
        free[w] = self.free[i] + self.free[w] - free[i]
        return replace(self, dur=dur, free=free, fused=False)

    @cached_property
    def joint(self) -> tuple[Array, Array]:
        """Ticks of a fused slot by its two types, and of a forward, an I (by these two) and its W.

        Both `[type, type]`, in the order of `side`; infinite where there is no such slot.
        """
        pair, trio = (np.full((self.n_types, self.n_types), np.inf) for _ in range(2))
        if self.mixes:
            pair[self.first_half, self.second_half] = self.full
        if not self.fused:
            return pair, trio
        both = [
            (f, b)
            for f in np.flatnonzero(self.side == 0).tolist()
            for b in np.flatnonzero((self.side == 1) & (self.queue_of == self.queue_of[f])).tolist()
        ]
        rows, columns = np.array(both).T
        kind = Kind.I if len(self.first_half) else Kind.B
        pair[rows, columns] = self._slot_times([((Kind.F, kind), f, b) for f, b in both])
        if len(self.first_half):
            trio[rows, columns] = self._slot_times([((Kind.F, Kind.B), f, b) for f, b in both])
        return pair, trio

    def _slot_times(self, slots: Sequence[tuple[tuple[Kind, ...], int, int]]) -> Array:
        """Ticks of slots of these kinds, for the places of two types: (kinds, first, last)."""
        lines: list[list[int]] = [[] for _ in self.placement.queues]
        widths: list[list[int]] = [[] for _ in self.placement.queues]
        for kinds, *types in slots:
            q = int(self.queue_of[types[0]])
            widths[q].append(len(kinds))
            for kind, t in zip(kinds, types[-len(kinds) :], strict=True):
                lines[q].append(encode(int(kind), int(self.stage[t]), int(self.path[t])))
        one = Placement(self.placement.paths, tuple(range(len(self.placement.paths))))
        parts = [
            Line(np.array(codes, dtype=np.int64), np.array(width, dtype=np.int64))
            for codes, width in zip(lines, widths, strict=True)
        ]
        table = CostTable(self.costs, Schedule.from_lines("slots", one, parts))
        times = table.occupied() * (self.ticks.scale / table.ticks.scale)
        by_queue = np.argsort([self.queue_of[first] for _, first, _ in slots], kind="stable")
        out = np.empty(len(slots))
        out[by_queue] = times
        return out

    # --- orders and schedules -------------------------------------------------------------

    def schedule(self, order: Array, name: str) -> Schedule:
        """The schedule of an order; a W alone is of the oldest I of its stage that is alone."""
        done = np.zeros(self.n_types, dtype=np.int64)
        split: dict[int, list[int]] = {}
        whole_of = dict(zip(self.first_half.tolist(), self.second_half.tolist(), strict=True))
        lines = []
        for a, b in zip(self.queues[:-1], self.queues[1:], strict=True):
            codes: list[int] = []
            opens = order[a:b] < self.n_types
            types = (order[a:b] % max(1, self.n_types)).tolist()
            full = [
                whole_of.get(t) == types[i + 1] and not opens[i + 1]
                for i, t in enumerate(types[:-1])
            ] + [False]
            kept = np.ones(len(types), dtype=bool)
            for i, t in enumerate(types):
                if i and full[i - 1]:
                    kept[i] = False
                    continue
                if self.side[t] == 2:
                    mb = split[t].pop(0)
                else:
                    mb = int(self.mbs_of_path[self.path[t]][done[t]])
                    done[t] += 1
                    if t in whole_of and not full[i]:
                        split.setdefault(whole_of[t], []).append(mb)
                kind = int(Kind.B if full[i] else self.kind[t])
                codes.append(encode(kind, int(self.stage[t]), mb))
            begins = np.flatnonzero(opens[kept])
            widths = np.diff(np.append(begins, len(codes)))
            lines.append(Line(np.array(codes, dtype=np.int64), widths))
        return Schedule.from_lines(name, self.placement, lines)

    def order_of(self, schedule: Schedule) -> Array | None:
        """The order of a schedule; None where it has other actions or places."""
        s = schedule
        if s.has_communication or s.queues != self.placement.queues:
            return None
        theirs, mine = s.placement, self.placement
        if (theirs.paths, theirs.slices) != (mine.paths, mine.slices):
            return None
        is_full = (kinds_of(s.codes) == Kind.B) & bool(len(self.first_half))
        action = np.repeat(np.arange(len(s.codes)), 1 + is_full)
        kinds = kinds_of(s.codes)[action]
        again = np.diff(action, prepend=-1) == 0
        kinds = np.where(is_full[action], np.where(again, Kind.W, Kind.I), kinds)
        paths = np.array(theirs.path_of)[mbs_of(s.codes)[action]]
        types = self.by_place[paths, kinds, stages_of(s.codes)[action]]
        if (types < 0).any() or not np.array_equal(
            np.bincount(types, minlength=self.n_types), self.counts
        ):
            return None
        slot = s.slot_of_action[action]
        sorted_ = np.lexsort((self.side[types], slot))
        types, slot = types[sorted_], slot[sorted_]
        return (types + self.n_types * (np.diff(slot, prepend=-1) == 0)).astype(np.int64)

    def peaks(self, order: Array) -> list[float]:
        """Highest memory of each queue in this order; a slot takes all before it frees."""
        types, opens, out = order % self.n_types, order < self.n_types, []
        for a, b in zip(self.queues[:-1], self.queues[1:], strict=True):
            slot = np.cumsum(opens[a:b]) - 1
            take = np.bincount(slot, weights=self.take[types[a:b]])
            free = np.bincount(slot, weights=self.free[types[a:b]])
            before = np.cumsum(take - free) + free
            out.append(float(before.max(initial=0.0)))
        return out


def saves(costs: Costs) -> bool:
    """True where FB itself may make a slot of a forward and a backward cheaper than the two apart.

    With a p2p_overhead such a slot is cheaper too, but only in a simulation: a run pays for both.
    """
    rule, x = fused_rule(costs.FB)
    whole = (
        costs.full_backward if isinstance(costs.full_backward, tuple) else (costs.full_backward,)
    )
    forward = costs.F if isinstance(costs.F, tuple) else (costs.F,)
    cheaper = {"sum": False, "max": True, "scale": x < 1, "number": x < max(forward) + max(whole)}
    return cheaper[rule]


def fuses(costs: Costs, ranks: int) -> bool:
    """True where a search makes slots of a forward and a backward.

    Not where ranks share cores, and not for a p2p_overhead, which a run pays twice.
    """
    return saves(costs) and costs.p2p_overhead is None and not costs.shares_cores(ranks)


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
    fused: bool = False,
) -> Problem:
    """The problem of ordering these kinds of actions.

    in_flight: limit of (stage, microbatch) pairs of each rank; room: limit of bytes beside the
    static ones. With neither, memory is not limited; not both. fused: forwards may share slots
    with backwards.
    """
    if costs.microbatch is not None:
        raise CostError(
            "a search takes all microbatches to be alike; leave microbatch out of the costs here, "
            "or compare schedules with it"
        )
    one = all_actions("one", Placement(placement.paths, tuple(range(len(placement.paths)))), kinds)
    table = CostTable(costs, one)
    before, after = table.overheads()
    dur = (before + table.work() + after).astype(float)
    kind, stage, path = kinds_of(one.codes), stages_of(one.codes), mbs_of(one.codes)
    counts = np.bincount(np.array(placement.path_of), minlength=len(placement.paths))[path]
    queue_of = one.queue_of_slot.astype(np.int64)
    per_queue = np.bincount(queue_of, weights=counts, minlength=len(one.queues))
    sources, targets = edges(one)
    rank = one.rank_of_queue[one.queue_of_slot]
    delays = table.delays(sources, rank[sources] != rank[targets])
    arcs = zip(targets.tolist(), sources.tolist(), map(float, delays), strict=True)
    needs, need, delay = rows(list(arcs), len(one.codes))
    take, free, limit = _memory(one, kind, stage, in_flight, room, costs)
    return Problem(
        placement=placement, costs=costs, kinds=kinds, ticks=table.ticks,
        kind=kind.astype(np.int64), stage=stage.astype(np.int64), path=path.astype(np.int64),
        queue_of=queue_of, counts=counts.astype(np.int64),
        base=np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64),
        queues=np.concatenate([[0], np.cumsum(per_queue)]).astype(np.int64),
        dur=dur, needs=needs, need=need, delay=delay, own=queue_of[need] == queue_of[:, None],
        take=take, free=free, limit=limit,
        limited_by="in_flight" if room is None else "bytes", fused=fused,
    )  # fmt: skip


def rows(arcs: Sequence[tuple[int, int, float]], n_types: int) -> tuple[Array, Array, Array]:
    """Of each type how many arcs begin there, where they end, and how long they are."""
    sizes = np.bincount([a for a, _, _ in arcs], minlength=n_types).astype(np.int64)
    ends = np.zeros((n_types, max(1, int(sizes.max(initial=0)))), dtype=np.int64)
    lengths, filled = np.zeros(ends.shape), np.zeros(n_types, dtype=np.int64)
    for a, b, length in arcs:
        ends[a, filled[a]], lengths[a, filled[a]] = b, length
        filled[a] += 1
    return sizes, ends, lengths


def longest(sources: Array, targets: Array, delays: Array, time: Array) -> Array:
    """The longest way to the start of each node; with the edges turned, from its end."""
    reach = np.zeros_like(time)
    for _ in range(len(time) + 1):
        new = reach.copy()
        np.maximum.at(new, targets, reach[sources] + time[sources] + delays)
        if np.array_equal(new, reach):
            break
        reach = new
    return reach


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
    most = np.full(len(one.queues), np.inf)
    if limit is not None:
        by_rank = [float(x) for x in limit]
        most = np.array([by_rank[q.rank] for q in one.queues])
    return take, free, most


__all__ = ["FULL", "SPLIT", "Problem", "fuses", "problem", "saves", "sizes_of"]
