"""Orders with a forward and a backward in one slot, where costs make that cheaper than apart."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise, product
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from hocket.costs import Costs, CostTable, fused_rule
from hocket.deps import BACKWARDS, WORK
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
from hocket.loops import compile_others
from hocket.search import kernel, pairs
from hocket.search.bounds import Bound
from hocket.search.problem import SPLIT, Problem, problem
from hocket.search.problem_bounds import lags

_INF = 1e300
_POOL = 6  # orders that a search keeps
_HEATS = ((0.3, 0.03), (0.12, 0.02), (0.05, 0.01))  # of chains, in units of the mean action


@cache
def loops() -> Any:
    """The functions of `pairs` by name, compiled where numba is installed; `.compiled` says so."""
    plain = {k: f for k, f in vars(pairs).items() if isinstance(f, FunctionType)}
    modules = [kernel.__name__, pairs.__name__]
    made = compile_others(list(plain.values()), {"__name__": pairs.__name__, "np": np}, modules)
    return SimpleNamespace(**{k: (made or plain)[k] for k in plain}, compiled=made is not None)


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


class Paired(NamedTuple):
    """An order of `pairs`, and its cost in ticks."""

    cost: float
    size: Array
    order: Array
    opens: Array


class Rule(NamedTuple):
    """How the list scheduler chooses.

    warm: forwards of each type that may be ahead of their backwards; lean: how much later a type
    counts as ready than it is, in units of the mean action; patient: backwards wait for forwards;
    joint: an I in a slot with a forward may take its W with it.
    """

    warm: Array
    lean: Array
    patient: bool
    joint: bool

    def changed(self, rng: np.random.Generator) -> Rule:
        """The rule with some of its numbers moved."""
        warm, lean = self.warm.copy(), self.lean.copy()
        some = rng.random(len(warm)) < rng.choice([0.1, 0.3, 1.0])
        if rng.random() < 0.6:
            step = rng.integers(-2, 3, size=len(warm)) if rng.random() < 0.5 else rng.normal()
            warm = np.where(some, warm + step, warm)
        else:
            lean = np.where(some, lean + rng.normal(size=len(lean)) * rng.choice([0.1, 1.0]), lean)
        flip = rng.random(2) < 0.1
        return Rule(warm, lean, self.patient != flip[0], self.joint != flip[1])


@dataclass(frozen=True, eq=False)
class Pairing:
    """A problem with slots of two: its types are those of F, B, I and W, see `pairs`.

    split: backwards may be I and W, and then some may be whole; else all are whole.
    """

    asked: Problem
    split: bool
    objective: str

    @classmethod
    def of(cls, asked: Problem, objective: str) -> Pairing:
        """The same placement, costs and limits with slots of two."""
        room = [math.inf] * asked.placement.p if asked.limited_by == "bytes" else None
        wide = problem(asked.placement, asked.costs, WORK, room=room)
        return cls(replace(wide, cap=asked.cap), asked.kinds == SPLIT, objective)

    @property
    def span(self) -> bool:
        """True where queues are timed from their own first start."""
        return self.objective != "makespan"

    @cached_property
    def unit(self) -> float:
        """Mean duration of an action, in ticks."""
        return max(float(self.asked.dur.mean()), 1e-12)

    # --- tables of `pairs` ----------------------------------------------------------------

    @cached_property
    def _by_place(self) -> Array:
        """The type of each `[path, kind, stage]`."""
        a = self.asked
        table = np.full((len(a.placement.paths), len(WORK), a.placement.n_stages), -1)
        table[a.path, a.kind, a.stage] = np.arange(a.n_types)
        return table

    def _same(self, kind: Kind, of: Sequence[Kind]) -> Array:
        """The type of this kind at the place of each type of some kinds; -1 for the others."""
        a = self.asked
        return np.where(np.isin(a.kind, of), self._by_place[a.path, kind, a.stage], -1)

    @cached_property
    def side(self) -> Array:
        """0 for forwards, 1 for backwards, 2 for W, `[type]`."""
        kind = self.asked.kind
        return np.where(kind == Kind.F, 0, np.where(np.isin(kind, BACKWARDS), 1, 2))

    @cached_property
    def group(self) -> Array:
        """The type that a type is counted with: B with I, `[type]`."""
        own = np.arange(self.asked.n_types)
        return np.where(self.asked.kind == Kind.B, self._same(Kind.I, WORK), own)

    @cached_property
    def weight_of(self) -> Array:
        """The W of each I, `[type]`."""
        return self._same(Kind.W, (Kind.I,))

    @cached_property
    def cell(self) -> Array:
        """Where the ends of a type begin, `[type]`."""
        cell = np.where(self.asked.kind == Kind.W, -1, self.asked.base)[self.group]
        return cell.astype(np.int64)

    @cached_property
    def needs(self) -> Array:
        """How many ends a type waits for; a W, which follows its I, for none."""
        return np.where(self.asked.kind == Kind.W, 0, self.asked.needs)

    @cached_property
    def _need(self) -> Array:
        """Where the ends that a type waits for begin, `[type, need]`."""
        return np.maximum(self.cell, 0)[self.asked.need]

    @cached_property
    def pair(self) -> Array:
        """Ticks of a slot of two types, `[forward, backward]`, infinite where there is none."""
        a = self.asked
        out = np.full((a.n_types, a.n_types), np.inf)
        places, lines = [], []
        for q in range(len(a.queues) - 1):
            mine = a.queue_of == q
            forwards, backs = (np.flatnonzero(mine & (self.side == x)) for x in (0, 1))
            both = np.array([*product(forwards, backs)]).reshape(-1, 2)
            codes = encode(a.kind[both], a.stage[both], a.path[both]).reshape(-1)
            lines.append(Line(codes, np.full(len(both), 2)))
            places.append(both)
        one = Placement(a.placement.paths, tuple(range(len(a.placement.paths))))
        table = CostTable(a.costs, Schedule.from_lines("pairs", one, lines))
        f, b = np.concatenate(places).T
        out[f, b] = table.occupied() * (a.ticks.scale / table.ticks.scale)
        return out

    @cached_property
    def top(self) -> Array:
        """Where each queue begins in an order; there is room for all of its I and W."""
        a = self.asked
        split = a.counts * (a.kind != Kind.B)
        room = np.bincount(a.queue_of, weights=split, minlength=len(a.queues) - 1)
        return np.concatenate([[0], np.cumsum(room + 2)]).astype(np.int64)

    @cached_property
    def _types(self) -> tuple[Array, Array]:
        """The types that the list scheduler gives each queue, and how many."""
        a = self.asked
        left_out = (Kind.B,) if self.split else (Kind.I, Kind.W)
        mine = [
            np.flatnonzero((a.queue_of == q) & ~np.isin(a.kind, left_out))
            for q in range(len(a.queues) - 1)
        ]
        table = np.zeros((len(mine), max(map(len, mine))), dtype=np.int64)
        for q, types in enumerate(mine):
            table[q, : len(types)] = types
        return table, np.array([len(x) for x in mine], dtype=np.int64)

    # --- orders -----------------------------------------------------------------------------

    def _empty(self) -> tuple[Array, Array, Array]:
        n = int(self.top[-1])
        size = np.zeros(len(self.top) - 1, dtype=np.int64)
        return size, np.zeros(n, dtype=np.int64), np.ones(n, dtype=bool)

    def anneal(
        self, start: Paired, *, moves: int = 0, heat: tuple[float, float] = (1.0, 1.0),
        goal: float = -1.0, seed: int = 1,
    ) -> Paired:  # fmt: skip
        """The best order found from this one; infinite cost where it cannot run or fit."""
        a = self.asked
        best = self._empty()
        cost = loops().anneal(
            self.top, start.size.copy(), start.order.copy(), start.opens.copy(), self.side,
            self.group, self._same(Kind.B, (Kind.I,)), self.weight_of, a.dur, self.pair, self.cell,
            self.needs, self._need, a.delay, a.take, a.free, a.cap, int(a.counts.sum()),
            self.span, self.split, moves, heat[0] * self.unit, heat[1] * self.unit, goal, seed,
            *best,
        )  # fmt: skip
        return Paired(_INF, *best) if cost < 0 else Paired(float(cost), *best)

    def listed(self, rule: Rule) -> Paired:
        """What the list scheduler gives under a rule; infinite cost where it stops."""
        a, out = self.asked, self._empty()
        ended = loops().dispatch(
            self.top, *self._types, self.side, self.group, self._same(Kind.F, WORK),
            self._same(Kind.B, (Kind.I,)), self.weight_of, a.counts, a.dur, self.pair,
            self.cell, self.needs, self._need, a.delay, a.take, a.free, a.cap, int(a.counts.sum()),
            np.maximum(1, np.round(rule.warm)), self._kept, rule.lean * self.unit, rule.patient,
            rule.joint, *out,
        )  # fmt: skip
        return self.anneal(Paired(0.0, *out)) if ended else Paired(_INF, *out)

    @property
    def rules(self) -> list[Rule]:
        """Rules to begin with: shares of the slots of two in a round trip, and a few more."""
        a, zero = self.asked, np.zeros(self.asked.n_types)
        first = self._same(Kind.I if self.split else Kind.B, WORK)
        forward = self._same(Kind.F, WORK)
        trip = a.head[first] + a.dur[first] - a.head[forward]
        slots = trip / np.maximum(self.pair[forward, first], 1e-12)
        return [
            Rule(share * slots + more, zero, patient, joint)
            for share, more, patient, joint in product(
                (0.5, 1.0, 1.5, 2.0), (-1.0, 0.0, 1.0), (True, False), (False, True)
            )
        ]

    @cached_property
    def _kept(self) -> Array:
        """Memory that a forward leaves to those of its queue that come later on their way."""
        a, out = self.asked, np.zeros(self.asked.n_types)
        for t in np.flatnonzero(a.kind == Kind.F):
            later = (a.kind == Kind.F) & (a.queue_of == a.queue_of[t]) & (a.head > a.head[t])
            out[t] = a.take[later].sum()
        return out

    def of_schedule(self, schedule: Schedule) -> Paired:
        """The order of a schedule; infinite cost where it has another placement or other slots."""
        out = self._empty()
        types = self._types_of(schedule)
        if types is None:
            return Paired(_INF, *out)
        size, order, opens = out
        begins = np.zeros(len(types), dtype=bool)
        begins[schedule.slots[:-1]] = True
        actions = schedule.slots[schedule.starts]
        for q, (a, b) in enumerate(pairwise(actions)):
            size[q], at = b - a, int(self.top[q])
            order[at : at + b - a], opens[at : at + b - a] = types[a:b], begins[a:b]
        return self.anneal(Paired(0.0, *out))

    def _types_of(self, schedule: Schedule) -> Array | None:
        """The type of each action, forwards first in their slots; None where some have none."""
        a = self.asked
        mine, theirs = a.placement, schedule.placement
        if (mine.paths, mine.slices) != (theirs.paths, theirs.slices):
            return None
        if sorted(mine.path_of) != sorted(theirs.path_of) or schedule.queues != mine.queues:
            return None
        if schedule.has_communication or (schedule.has_split_backward and not self.split):
            return None
        paths = theirs.path_by_mb[mbs_of(schedule.codes)]
        types = self._by_place[paths, kinds_of(schedule.codes), stages_of(schedule.codes)]
        sides, slot = self.side[types], schedule.slot_of_action
        order = np.lexsort((sides, slot))
        first = schedule.slots[:-1][schedule.widths > 1]
        good = schedule.widths.max() <= 2 and (sides[order][first] == 0).all()
        good = good and (sides[order][first + 1] == 1).all()
        return types[order] if good else None

    def schedule(self, found: Paired, name: str) -> Schedule:
        """The schedule of an order."""
        a, lines = self.asked, []
        done = np.zeros(a.n_types, dtype=np.int64)
        split: dict[int, list[int]] = {}
        for q in range(len(self.top) - 1):
            part = slice(int(self.top[q]), int(self.top[q] + found.size[q]))
            codes = []
            for t in found.order[part].tolist():
                if self.side[t] == 2:
                    mb = split[t].pop(0)
                else:
                    mb = int(a.mbs_of_path[a.path[t]][done[self.group[t]]])
                    done[self.group[t]] += 1
                    if a.kind[t] == Kind.I:
                        split.setdefault(int(self.weight_of[t]), []).append(mb)
                codes.append(encode(int(a.kind[t]), int(a.stage[t]), mb))
            begins = np.flatnonzero(found.opens[part])
            widths = np.diff(np.append(begins, len(codes)))
            lines.append(Line(np.array(codes, dtype=np.int64), widths))
        return Schedule.from_lines(name, a.placement, lines)

    # --- what none can beat -------------------------------------------------------------------

    @cached_property
    def bound(self) -> Bound:
        """What no order with slots of two beats; memory is not looked at.

        A queue's first slot holds no backward and its last no forward, so one of each has a slot
        of its own.
        """
        a, found = self.asked, []
        ways = replace(a, dur=self._shortest())
        chain = ways.head + ways.dur + ways.tail
        if not self.span:
            found.append(
                (float(chain.max()), "one microbatch alone takes that long there and back")
            )
        lag = lags(ways) if self.span else np.zeros((0, 0))
        for q, queue in enumerate(a.placement.queues):
            mine = np.flatnonzero(a.queue_of == q)
            forwards, backs = mine[a.kind[mine] == Kind.F], mine[a.kind[mine] == Kind.I]
            if self.span:
                head = tail = 0.0
                first = float(lag[np.ix_(forwards, backs)].max(axis=0).min())
            else:
                head, first = float(ways.head[mine].min()), float(ways.head[backs].min())
                tail = float(ways.tail[backs].min())
            for weights, out in ((True, 0.0), (False, tail)):
                all_, back = self._least_work(forwards, weights=weights)
                text = f"rank {queue}: its work, with as many slots of two as there can be"
                found.append((head + all_ + out, text))
                text = f"rank {queue}: the wait for its first gradient, and its backwards"
                found.append((first + back + out, text))
        ticks, text = max(found, key=lambda x: x[0])
        return Bound(a.ticks.value(math.ceil(ticks - 1e-6) if a.ticks.exact else ticks), text)

    def _forms(self, forwards: Array) -> list[tuple[Array, Array]]:
        """What the backwards of these forwards may be: their types, and ticks of what follows."""
        a = self.asked
        whole, first, later = (
            self._by_place[a.path[forwards], kind, a.stage[forwards]]
            for kind in (Kind.B, Kind.I, Kind.W)
        )
        forms = [(whole, np.zeros(len(forwards)))]
        return [*forms, (first, a.dur[later])] if self.split else forms

    def _shortest(self) -> Array:
        """The shortest slot of each F, and at the place of each I of each backward; else 0."""
        a, dur = self.asked, np.zeros(self.asked.n_types)
        slot = np.minimum(a.dur, np.minimum(self.pair.min(axis=0), self.pair.min(axis=1)))
        forwards = np.flatnonzero(a.kind == Kind.F)
        dur[forwards] = slot[forwards]
        first = self._by_place[a.path[forwards], Kind.I, a.stage[forwards]]
        dur[first] = np.min([slot[t] for t, _ in self._forms(forwards)], axis=0)
        return dur

    def _least_work(self, forwards: Array, *, weights: bool) -> tuple[float, float]:
        """The least work of a queue, and of its slots with a backward; `weights`: with its W."""
        a, count = self.asked, self.asked.counts[forwards].astype(float)
        forms = self._forms(forwards)
        alone = np.min([a.dur[t] + weights * w for t, w in forms], axis=0)
        both = np.min([self.pair[np.ix_(forwards, t)] + weights * w for t, w in forms], axis=0)
        saved = np.maximum(0.0, a.dur[forwards][:, None] + alone[None, :] - both)
        most = min(
            float(best @ count - best.min()) for best in (saved.max(axis=1), saved.max(axis=0))
        )
        back = np.minimum(alone, both.min(axis=0))
        return float(count @ (a.dur[forwards] + alone)) - most, float(count @ back)


# --- the search -----------------------------------------------------------------------------------


class Fusing:
    """Rounds of annealing on one pairing; the same for the same seed on any number of threads."""

    def __init__(self, pairing: Pairing, starts: Sequence[Schedule], *, seed: int = 0) -> None:
        self.pairing, self.seed, self._turn = pairing, seed, 0
        self._rules = _ranked([(r, pairing.listed(r)) for r in pairing.rules])
        found = [pairing.of_schedule(s) for s in starts]
        self._pool = _kept([*found, *(one for _, one in self._rules)])
        ticks = pairing.asked.ticks
        self._goal = float(pairing.bound.value) * (ticks.scale if ticks.exact else 1)

    @property
    def best(self) -> Paired | None:
        """The best order so far; None where nothing fits."""
        return self._pool[0] if self._pool else None

    @property
    def done(self) -> bool:
        """True where nothing better can be found."""
        return not self._pool or self._pool[0].cost <= self._goal * (1 + 1e-12)

    def round(self, workers: Executor) -> None:
        """One chain from each order kept, at a temperature that changes from round to round."""
        n = int(self.pairing.asked.counts.sum())
        fast = loops().compiled
        if self._turn < 6:
            self._tune(max(5, min(1000, (10**9 if fast else 10**7) // n**2)))
        moves = max(200, min(30_000, (12_000_000 if fast else 60_000) // n))
        moves *= min(4, 1 + self._turn // 2)
        jobs = [
            workers.submit(
                self.pairing.anneal, start, moves=moves, goal=self._goal,
                heat=_HEATS[(j + self._turn) % len(_HEATS)],
                seed=self.seed * 7919 + self._turn * 101 + j + 1,
            )
            for j, start in enumerate(self._pool)
        ]  # fmt: skip
        self._pool = _kept([*self._pool, *(job.result() for job in jobs)])
        self._turn += 1

    def _tune(self, trials: int) -> None:
        """Tries changes of the best rules of the list scheduler."""
        rng = np.random.default_rng([self.seed, self._turn])
        for _ in range(trials if self._rules else 0):
            rule = self._rules[int(rng.integers(len(self._rules)))][0].changed(rng)
            found = self.pairing.listed(rule)
            if found.cost < self._rules[-1][1].cost or len(self._rules) < _POOL:
                self._rules = _ranked([*self._rules, (rule, found)])
        self._pool = _kept([*self._pool, *(one for _, one in self._rules)])


def _ranked(found: Sequence[tuple[Rule, Paired]]) -> list[tuple[Rule, Paired]]:
    """The best rules and what they give, one of each cost."""
    by_cost = {pair[1].cost: pair for pair in reversed(found) if pair[1].cost < _INF}
    return [by_cost[cost] for cost in sorted(by_cost)][:_POOL]


def _kept(found: Sequence[Paired]) -> list[Paired]:
    """The best orders, one of each cost."""
    by_cost: dict[float, Paired] = {}
    for one in found:
        by_cost.setdefault(one.cost, one)
    return [by_cost[cost] for cost in sorted(by_cost) if cost < _INF][:_POOL]


def race(fields: Sequence[Fusing], workers: Executor, *, rounds: int, deadline: float) -> None:
    """Rounds for those that can still win until the deadline; the slower half leaves each lap.

    deadline: of time.monotonic(), looked at between rounds.
    """
    fitting = [f for f in fields if f.best is not None]
    left = fitting
    for lap in range(rounds):
        best = min(map(_value, fitting), default=0.0)
        left = [f for f in left if not f.done and float(f.pairing.bound.value) < best]
        left.sort(key=_value)
        if lap > 1 and len(left) > 1:
            left = left[: (len(left) + 1) // 2]
        for one in left:
            if time.monotonic() > deadline:
                return
            one.round(workers)


def _value(one: Fusing) -> float:
    assert one.best is not None
    return float(one.pairing.asked.ticks.value(one.best.cost))
