"""Orders from list scheduling under many policies, and better ones by moves within queues."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from hocket.compiled import choose
from hocket.deps import BACKWARDS, ENDS, FULL, STARTS
from hocket.ir import Array, Kind
from hocket.search import listing
from hocket.search.annealing import MOVES
from hocket.search.compiled import kernels
from hocket.search.kernel import State, Tables
from hocket.search.listing import Desk, Rules
from hocket.search.problem import Problem, rows
from hocket.search.unroll import shortened, shorter, unrolled

EVEN, KEEN = 0.5, 0.8  # shares of moves on the critical path: KEEN crosses plateaus of equal costs
_COOL = 1500  # actions from which on chains stay near their start
_BOTH = 400  # actions from which on long chains take turns with populations
_LISTED = 100_000_000  # actions times queues that list scheduling goes over before a search
_LISTING = 50  # times as long as a plain loop takes with an action, the list scheduler does
_LARGE = 2000  # actions from which on policies do more than moves


class Found(NamedTuple):
    """An order and its cost in ticks, infinite where it cannot run or does not fit."""

    cost: float
    order: Array


class Policy(NamedTuple):
    """A list scheduling rule: penalties, in units of the mean action, and a soft limit.

    forward, weight: how much later than a backward a forward and a W may be preferred; deep:
    preference for deeper stages; urgent: how much sooner W is taken when memory is full; eager:
    forwards that a stage may be ahead, as a factor of those that fill its round trip (None: any);
    wait: how long one waits for another to share its slot with (None: no slot is shared).
    """

    forward: float = 0.0
    weight: float = 0.0
    deep: float = 0.0
    urgent: float = 0.0
    eager: float | None = None
    wait: float | None = None


POLICIES = tuple(
    Policy(forward, weight, deep, urgent, eager)
    for eager in (None, 0.5, 0.75, 0.97, 1.0, 1.03)
    for forward, weight in ((0.01, 0.02), (0.01, 0.3), (-0.01, 0.02), (0.3, 0.6), (0.01, 1.0))
    for deep in (0.001, -0.001)
    for urgent in ((0.0, 1.0) if weight > 0.1 else (0.0,))
)
# Of problems with slots of a forward and a backward, half of the policies share slots.
SHARING = tuple(p._replace(wait=wait) for wait, p in product((None, 0.0, 0.6, 1.5), POLICIES[::2]))


def changed(policy: Policy, rng: np.random.Generator) -> Policy:
    """The policy with one or two of its numbers moved."""
    values = policy._asdict()
    for _ in range(int(rng.integers(1, 3))):
        name = Policy._fields[int(rng.integers(len(Policy._fields)))]
        step = float(rng.normal() * rng.choice([0.02, 0.2, 1.0]))
        if name == "eager":
            step *= 0.1
            values[name] = 1.0 + step if values[name] is None else max(0.01, values[name] + step)
        elif name == "wait":
            values[name] = None if values[name] is None else max(0.0, values[name] + step)
        else:
            values[name] += step
    return Policy(**values)


@dataclass(frozen=True, eq=False)
class Arena:
    """One problem made ready for the kernel; moves leave what starts in `quiet` (ticks) alone."""

    problem: Problem
    objective: str = "makespan"
    quiet: tuple[float, float] = (math.inf, -1.0)

    @property
    def span(self) -> bool:
        """True when queues are timed from their own first start."""
        return self.objective != "makespan"

    @property
    def is_free(self) -> bool:
        """True when moves may change everything."""
        return self.quiet[1] < self.quiet[0]

    @cached_property
    def is_joint(self) -> bool:
        """True where slots may hold several actions."""
        return self.problem.fused or self.problem.mixes

    @cached_property
    def unit(self) -> float:
        """Mean duration of an action, in ticks."""
        return float(self.problem.dur.mean())

    def cost(self, order: Array) -> float:
        """Makespan or span of an order in ticks; infinite where it cannot run or does not fit."""
        return float(kernels().prepare(self.tables, self._state(order), self.span))

    def anneal(
        self, order: Array, *, moves: int, hot: float, cold: float, goal: float, seed: int,
        focus: float = EVEN,
    ) -> Found:  # fmt: skip
        """The best order found from this one; temperatures in units of the mean action.

        focus: the share of moves that begin on a critical path.
        """
        tables, state, loops = self.tables, self._state(order), kernels()
        cost = float(loops.prepare(tables, state, self.span))
        if not moves or cost == math.inf:
            return Found(cost, order)
        state.begin[:] = state.start[tables.base[state.seq] + state.occ]
        state.sequence[:] = np.argsort(state.begin, kind="stable")
        loops.warm(tables, state, self.span)
        best, opens, unit = state.seq.copy(), state.opens.copy(), max(self.unit, 1e-12)
        cost = loops.anneal(
            tables, state, cost, self.span, hot * unit, cold * unit, moves, focus, goal,
            loops.chance(np.zeros(1, dtype=np.int64), seed), np.array(self.quiet), self._odds,
            best, opens,
        )  # fmt: skip
        return Found(float(cost), best + self.problem.n_types * ~opens)

    def begin(self, order: Array) -> Array:
        """Start of each position of an order that can run, in ticks."""
        state = self._state(order)
        kernels().prepare(self.tables, state, self.span)
        return state.start[self.problem.base[state.seq] + state.occ]

    # --- arrays of the kernel -------------------------------------------------------------

    @cached_property
    def _odds(self) -> Array:
        """The chance of each move and of those before it in the table."""
        return np.cumsum([move.joint if self.is_joint else move.alone for move in MOVES])

    @cached_property
    def tables(self) -> Tables:
        """The problem as the kernel reads it."""
        p = self.problem
        near = [(a, b, d) for a, b, d in p.arcs if p.queue_of[a] == p.queue_of[b]]
        far = [(a, b, d) for a, b, d in p.arcs if p.queue_of[a] != p.queue_of[b]]
        pair, trio = p.joint
        needs, need, delay = rows([(b, a, d) for a, b, d in far], p.n_types)
        own_needs, own_need, _ = rows([(b, a, d) for a, b, d in near], p.n_types)
        return Tables(
            p.queues, p.queue_of, p.base, p.dur, needs, need, delay, *rows(far, p.n_types),
            own_needs, own_need, p.take, p.free, p.cap, p.side, pair, trio,
        )  # fmt: skip

    def _state(self, order: Array) -> State:
        """Room to work in, with an order to begin with."""
        p = self.problem
        n, queues = p.n, len(p.queues) - 1

        def whole(*shape: int) -> Array:
            return np.zeros(shape, dtype=np.int64)

        def flags(*shape: int) -> Array:
            return np.zeros(shape, dtype=np.bool_)

        return State(
            seq=whole(n), opens=flags(n), occ=whole(n), level=np.zeros(n), begin=np.zeros(n),
            rank=whole(n), place=whole(n), long=np.zeros(n), start=np.zeros(n), end=np.zeros(n),
            after=np.full(n, -np.inf), sequence=whole(n), dirty=flags(n), done=flags(n),
            first=np.zeros(queues), touched=whole(2 * n + 3), was=np.zeros((2 * n + 3, 2)),
            cursor=whole(queues),
            clock=np.zeros(queues), more=flags(queues), sizes=whole(3), counts=whole(p.n_types),
            fresh=order % p.n_types, fresh_opens=order < p.n_types, bounds=whole(2),
            kept=whole(4, n), kept_opens=flags(4, n), marks=whole(4, 2), path=whole(n),
        )  # fmt: skip

    @cached_property
    def _rules(self) -> Rules:
        """What the list scheduler needs beside `tables`."""
        p = self.problem
        first, closes = np.isin(p.kind, STARTS), np.isin(p.kind, ENDS)
        back = {
            (int(p.path[t]), int(p.stage[t])): t for t in range(p.n_types) if p.kind[t] in BACKWARDS
        }
        partner = np.array([back[int(a), int(s)] for a, s in zip(p.path, p.stage, strict=True)])
        types = np.searchsorted(p.queue_of, np.arange(len(p.queues)))
        more = np.where(first, 0.0, np.maximum(p.take, p.take - p.free))
        head_room = np.array([more[a:b].max(initial=0.0) for a, b in pairwise(types)])
        needs = rows(
            [(b, a, d if p.queue_of[a] != p.queue_of[b] else 0) for a, b, d in p.arcs], p.n_types
        )
        return Rules(p.path, p.counts, first, closes, partner, *needs, types, head_room)

    # --- list scheduling ------------------------------------------------------------------

    @cached_property
    def _round_trip(self) -> Array:
        """Actions like its own between each forward and its backward, `[type]`; 0 for others."""
        p = self.problem
        partner = self._rules.partner
        way = p.head[partner] - p.head
        return np.where((p.kind == Kind.F) & (p.dur > 0), way / np.maximum(p.dur, 1e-12), 0.0)

    def ranked(self, *keys: Array) -> Array | None:
        """The order where of all that can start soonest the action with the least keys goes first.

        keys: `[node]`, the first one decides before the second.
        """
        penalties = np.empty(self.problem.n)
        penalties[np.lexsort(keys[::-1])] = np.arange(self.problem.n) / (2 * self.problem.n)
        return self._dispatched(penalties, self._boundless, Policy(), times=1)

    def listed(self, policy: Policy) -> Array | None:
        """The order of the list scheduler under a policy; None where it stops."""
        p = self.problem
        depth = p.stage / max(1, int(p.stage.max()))
        bias = np.where(p.kind == Kind.F, policy.forward, 0.0)
        bias = bias + np.where(p.kind == Kind.W, policy.weight, 0.0) - policy.deep * depth
        ahead = self._boundless
        if policy.eager is not None:
            ahead = np.maximum(1, np.floor(policy.eager * self._round_trip + 1)).astype(np.int64)
        return self._dispatched((bias * self.unit)[p.type_of], ahead, policy)

    @property
    def _boundless(self) -> Array:
        """No limit of how many forwards may be ahead of their backwards, `[type]`."""
        return np.full(self.problem.n_types, 1 << 40, dtype=np.int64)

    def _dispatched(
        self, penalties: Array, ahead: Array, policy: Policy, *, times: int = len(POLICIES)
    ) -> Array | None:
        """The order of the list scheduler with these penalties (ticks, `[node]`) and limits.

        times: how often it will be called for this problem or those beside it.
        """
        order = np.zeros(self.problem.n, dtype=np.int64)
        wait = -1.0 if policy.wait is None else policy.wait * self.unit
        queues = len(self.problem.queues) - 1
        desk = Desk(
            np.zeros(self.problem.n_types, dtype=np.int64), np.zeros(self.problem.n),
            np.zeros(queues), np.zeros(queues), self.problem.queues[:-1].copy(),
            np.zeros(queues, dtype=np.int64), np.zeros(queues), np.ones(queues, dtype=bool),
        )  # fmt: skip
        dispatch = choose(listing.dispatch, self.problem.n * _LISTING * times) or listing.dispatch
        ended = dispatch(
            self.tables, self._rules, desk, penalties, ahead, policy.urgent * self.unit, wait, order
        )
        return order if ended else None

    def random_start(self, rng: np.random.Generator, known: Sequence[Found]) -> Array:
        """An order of a list scheduler with random penalties; a known one if it stops."""
        p = self.problem
        forward = p.kind == Kind.F
        for _ in range(8):
            policy = self._policies[int(rng.integers(len(self._policies)))]
            bias = np.where(forward, policy.forward, 0.0)
            bias = bias + np.where(p.kind == Kind.W, policy.weight, 0.0)
            bias = bias + rng.normal(size=p.n_types) * rng.choice([0.01, 0.03, 0.1])
            ahead = self._boundless
            if rng.random() < 0.5:
                ahead = np.where(forward, rng.integers(1, self._most_ahead, size=p.n_types), ahead)
            order = self._dispatched((bias * self.unit)[p.type_of], ahead, policy)
            if order is not None and self.cost(order) < math.inf:
                return order
        return known[int(rng.integers(len(known)))].order

    @cached_property
    def _most_ahead(self) -> int:
        """One more than the forwards of a stage that any limit lets be ahead of its backwards."""
        p = self.problem
        tightest, most = float(p.cap.min()), int(p.counts.max())
        if np.isfinite(tightest) and p.take.max() > 0:
            most = min(most, int(tightest / p.take.max()))
        return most + 2

    def spliced(self, first: Array, second: Array, share: float) -> Array:
        """What the first order starts within this share of its time, then the rest as the second.

        Every need is kept; memory may not be.
        """
        p = self.problem
        begin = self.begin(first)
        early = begin < share * begin.max()
        done = np.bincount(first[early] % p.n_types, minlength=p.n_types)
        late = self._occurrence(second) >= done[second % p.n_types]
        # what shared the slot of one that is left out opens it
        opened = (second >= p.n_types) & ~np.roll(late, 1)
        second = np.where(opened, second % p.n_types, second)
        out = np.empty_like(first)
        for a, b in zip(p.queues[:-1], p.queues[1:], strict=True):
            out[a:b] = np.concatenate([first[a:b][early[a:b]], second[a:b][late[a:b]]])
        return out

    def _occurrence(self, order: Array) -> Array:
        """How often each position's type comes before it, `[position]`."""
        types = order % self.problem.n_types
        by_type = np.argsort(types, kind="stable")
        out = np.empty_like(types)
        out[by_type] = np.arange(len(types)) - self.problem.base[types[by_type]]
        return out

    def serial(self) -> Array:
        """One microbatch after the other: it fits wherever anything does."""
        p, order = self.problem, []
        mbs = [p.mbs_of_path[path] for path in p.path.tolist()]
        for q in range(len(p.queues) - 1):
            mine = np.flatnonzero(p.queue_of == q).tolist()
            actions = [(mbs[t][k], p.depth[t], t) for t in mine for k in range(p.counts[t])]
            order += [t for _, _, t in sorted(actions)]
        return np.array(order, dtype=np.int64)

    def starts(self, given: Sequence[Array] = ()) -> list[Found]:
        """Orders to search from, best first, no cost twice: those given, listed, serial."""
        orders = [*given, self.serial()]
        if self.problem.mixes:
            orders += self._full(given)
        found = [Found(self.cost(order), order) for order in orders]
        found += [f for _, f in self.policies]
        return _kept([f for f in found if f.cost < math.inf])

    def _full(self, given: Sequence[Array]) -> list[Array]:
        """Orders with full backwards: listed ones of these alone, and an I next to its W as one."""
        p = self.problem
        whole = Arena(p.with_kinds(FULL), self.objective)
        listed = [whole.problem.schedule(f.order, "full") for _, f in whole.policies[:3]]
        out = [order for s in listed if (order := p.order_of(s)) is not None]
        return out + [self.merged(x) for x in (*given, *(f.order for _, f in self.policies[:3]))]

    def merged(self, order: Array) -> Array:
        """The order with every I and W of one stage that stand alone side by side as one slot."""
        p, out = self.problem, order.copy()
        second = np.full(2 * p.n_types, -1)
        second[p.first_half] = p.second_half
        follows = np.flatnonzero(second[order[:-1]] == order[1:]) + 1
        opens_next = np.append(order, 0)[follows + 1] < p.n_types
        out[follows[opens_next]] += p.n_types
        return out

    @cached_property
    def _policies(self) -> tuple[Policy, ...]:
        """Rules to try: all, or of very many actions an even selection."""
        pool, p = SHARING if self.problem.fused else POLICIES, self.problem
        most = max(4, _LISTED // (p.n * len(p.queues)))
        return pool[:: math.ceil(len(pool) / most)]

    @cached_property
    def policies(self) -> list[tuple[Policy, Found]]:
        """Every policy that ends, with its order, best first."""
        tried = [(policy, self.tried(policy)) for policy in self._policies]
        return sorted((x for x in tried if x[1].cost < math.inf), key=lambda x: x[1].cost)

    def tried(self, policy: Policy) -> Found:
        """What a policy gives; infinite where it stops."""
        order = self.listed(policy)
        return Found(math.inf, np.empty(0)) if order is None else Found(self.cost(order), order)

    def tune(
        self, known: Sequence[tuple[Policy, Found]], *, trials: int, seed: int
    ) -> list[tuple[Policy, Found]]:
        """The best five policies after changing good ones at random."""
        rng, pool = np.random.default_rng(seed), [*known[:5]]
        for _ in range(trials if pool else 0):
            policy = changed(pool[int(rng.integers(len(pool)))][0], rng)
            found = self.tried(policy)
            if found.cost <= pool[-1][1].cost or len(pool) < 5:
                pool = sorted([*pool, (policy, found)], key=lambda x: x[1].cost)[:5]
        return pool


class Chain(NamedTuple):
    """One annealing: where it begins, temperatures in units of the mean action, moves, focus."""

    order: Array
    hot: float
    cold: float
    moves: int
    seed: int
    focus: float = EVEN


# Temperatures of a round's chains: from gentle repair of a good start to a wide search.
HEATS = ((0.15, 0.03), (0.3, 0.04), (0.06, 0.02))
WIDE = (0.3, 0.03)
COOL = ((0.06, 0.02), (0.05, 0.005), (0.15, 0.03), (0.02, 0.002))  # for many actions


_BROOD = 8  # chains of a generation
_YOUNG = 24  # chains from new orders before a population is bred
_PATIENCE = 5  # generations without a better order before a new population
_PER_ACTION = 150  # moves
YOUNG = (0.2, 0.04)
MILD = (0.12, 0.03)


class Island(NamedTuple):
    """A population of orders, best first: how many were made, generations without a better one."""

    number: int = 0
    members: tuple[Found, ...] = ()
    born: int = 0
    idle: int = 0

    def grown(self, found: Sequence[Found]) -> Island:
        """The population with a generation more, the best of old and new."""
        by_cost: dict[float, list[Found]] = {}
        for f in (*self.members, *found):
            alike = by_cost.setdefault(f.cost, [])
            new = not any(np.array_equal(f.order, g.order) for g in alike)
            if f.cost < math.inf and new and len(alike) < 3:
                alike.append(f)
        best = [f for cost in sorted(by_cost) for f in by_cost[cost]][:_BROOD]
        better = best and (not self.members or best[0].cost < self.members[0].cost)
        born = self.born + len(found)
        idle = 0 if better or born <= _YOUNG else self.idle + 1
        return Island(self.number, tuple(best), born, idle)


def _child(arena: Arena, members: Sequence[Found], rng: np.random.Generator) -> Array:
    """Two of a population spliced where that fits; else a new order."""
    for _ in range(4 if len(members) > 1 else 0):
        i, j = rng.choice(len(members), size=2, replace=False)
        child = arena.spliced(members[i].order, members[j].order, float(rng.uniform(0.1, 0.9)))
        if arena.cost(child) < math.inf:
            return child
    return arena.random_start(rng, members)


class Search:
    """Rounds of annealing on one problem; the same for the same seed on any number of threads."""

    def __init__(self, arena: Arena, starts: Sequence[Found], *, goal: float, seed: int) -> None:
        self.arena, self.goal, self.seed = arena, goal, seed
        self._pool = _kept(starts)
        self._turn = 0
        self._moves = first_moves(arena.problem.n)
        self._policies = arena.policies
        self._island = Island()

    @property
    def best(self) -> Found:
        """The best order so far."""
        return self._pool[0]

    @property
    def done(self) -> bool:
        """True when nothing better exists."""
        return self.best.cost <= self.goal * (1 + 1e-12)

    def add(self, found: Found) -> None:
        """Adds an order found elsewhere."""
        self._pool = _kept([found, *self._pool])

    def round(self, workers: Executor) -> bool:
        """Runs some chains; True when a better order was found.

        With few actions a population is bred; with more, chains grow too while nothing is found;
        with many they do alone, and policies are changed; with many microbatches mostly on fewer.
        """
        before, found = self.best.cost, []
        n = self.arena.problem.n
        small = self._small
        if small is not None:
            for _ in range(1 if self._turn < 4 else 2):
                small.round(workers)
            found += self._unrolled(small)
        breeds = n < _COOL and self.arena.is_free
        if breeds and (n < _BOTH or self._turn % 3 == 2):
            found += self._bred(workers)
        elif breeds or small is None or self._turn % 4 == 3:
            found += self._annealed(workers)
        if self._turn < 3 or n > _LARGE:
            self._policies = self.arena.tune(
                self._policies, trials=_trials(n), seed=self.seed * 31 + self._turn
            )
            found += [f for _, f in self._policies]
        self._pool = _kept([*self._pool, *found])
        self._turn += 1
        better = self.best.cost < before
        if not better:
            self._moves = min(2 * self._moves, (64 if n < _COOL else 8) * first_moves(n))
        return better

    def _bred(self, workers: Executor) -> list[Found]:
        """One generation: annealed from new orders first, then from pairs of the best of them.

        A population that no longer improves makes room for one from new orders; every fifth is
        made of the best of those before.
        """
        rng = np.random.default_rng([self.seed, self._turn])
        island, arena = self._island, self.arena
        young = island.born < _YOUNG
        starts = [
            arena.random_start(rng, self._pool) if young else _child(arena, island.members, rng)
            for _ in range(_BROOD)
        ]
        if island.number == 0 and not island.born:
            starts[: len(self._pool)] = [f.order for f in self._pool[:_BROOD]]
        hot, cold = YOUNG if young else MILD
        n = arena.problem.n
        moves = min(_PER_ACTION * n, first_moves(n) // 2) * min(4, 2 ** (island.number // 8))
        seeds = rng.integers(1, 1 << 31, size=_BROOD).tolist()
        found = self._run(
            [Chain(x, hot, cold, moves, seed) for x, seed in zip(starts, seeds, strict=True)],
            workers,
        )
        self._island = island.grown(found)
        if self._island.idle >= _PATIENCE:
            number = island.number + 1
            last = number % 5 == 4
            self._island = Island(number, tuple(self._pool) if last else (), _YOUNG if last else 0)
        return found

    def _annealed(self, workers: Executor) -> list[Found]:
        heats = HEATS if self.arena.problem.n < _COOL else COOL
        return self._run(_chains(self._pool, self.seed, self._turn, self._moves, heats), workers)

    def _run(self, chains: Sequence[Chain], workers: Executor) -> list[Found]:
        """What the chains find, in their order."""
        jobs = [workers.submit(self.arena.anneal, **c._asdict(), goal=self.goal) for c in chains]
        return [job.result() for job in jobs]

    @cached_property
    def _small(self) -> Search | None:
        """A search with fewer microbatches, whose steady state can be repeated."""
        asked = self.arena.problem
        m = asked.placement.m
        p = len(asked.queues) - 1
        few = 2 * p + max(2, p // 2)
        if asked.n < _LARGE or m < few + max(2, p // 2):
            return None
        small = shorter(asked, few)
        if small is None:
            return None
        arena = Arena(small, self.arena.objective)
        given = []
        for found in self._pool[:2]:
            begin = self.arena.begin(found.order)
            given += shortened(asked, found.order, begin, small)
        starts = arena.starts(given)
        if starts:  # the steady state stays even, to be repeated
            middle, period = starts[0].cost / 2, float((small.work / small.counts.max()).max())
            arena = Arena(small, arena.objective, (middle - 2 * period, middle + 2 * period))
        return Search(arena, starts, goal=-1.0, seed=self.seed) if starts else None

    def _unrolled(self, small: Search) -> list[Found]:
        """The best orders of the smaller search made longer."""
        arena, out = small.arena, []
        for found in small._pool[:2]:
            begin = arena.begin(found.order)
            for order in unrolled(arena.problem, found.order, begin, self.arena.problem):
                out.append(Found(self.arena.cost(order), order))
        return [f for f in out if f.cost < math.inf]


def _trials(n: int) -> int:
    """Policies that a round tries."""
    return max(5, min(200, (3_000_000 if kernels().compiled else 30_000) // n))


def first_moves(n: int) -> int:
    """Moves of a first round's chain: about a quarter of a second on one core."""
    return (
        max(2000, min(200_000, 100_000_000 // n)) if kernels().compiled else max(50, 200_000 // n)
    )


def _chains(
    pool: Sequence[Found], seed: int, turn: int, moves: int, heats: Sequence[tuple[float, float]]
) -> list[Chain]:
    """A long one from the worst of the pool; the best two, and one that walks down the pool."""
    picks = (0, min(1, len(pool) - 1), turn % len(pool))
    seeds = [seed * 7919 + turn * 101 + j + 1 for j in range(4)]
    focus = (KEEN, EVEN) if heats is HEATS else (EVEN, EVEN)
    wide = [Chain(pool[-1].order, *WIDE, 4 * moves, seeds[3], focus[turn % 2])]
    return (wide if heats is HEATS else []) + [
        Chain(
            pool[i].order, *heats[(j + turn) % len(heats)], moves, seeds[j],
            focus[(j + turn + 1) % 2],
        )
        for j, i in enumerate(picks)
    ]  # fmt: skip


def _kept(pool: Sequence[Found], most: int = 8) -> list[Found]:
    """The best of the pool, one of each cost, and the worst one that was there from the start."""
    by_cost: dict[float, Found] = {}
    for found in pool:
        by_cost.setdefault(found.cost, found)
    kept = [by_cost[c] for c in sorted(by_cost)]
    return [*kept[: most - 1], *kept[-1:]] if len(kept) > most else kept
