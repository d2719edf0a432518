"""The partition of layers and the recomputation of each stage, chosen by a short search."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import numpy as np

from hocket.costs.partition import shifted
from hocket.ir import Array
from hocket.planner.recompute import NONE, Level
from hocket.planner.variants import Pricing, Variant, asked
from hocket.search.compiled import kernels
from hocket.search.problem import SPLIT, Problem
from hocket.search.search import POLICIES, Arena, Found, Policy

_POLICIES = 8  # of list scheduling that are tried with each setting: the best of the first one
_MOVES = 1_500_000  # of the search with each setting, times actions: about 20 ms
_MOST_MOVES = 16_000


class Setting(NamedTuple):
    """Layers of each stage, and what each recomputes; empty where a request has no such choice."""

    cut: tuple[int, ...]
    levels: tuple[Level, ...]


class _Score(NamedTuple):
    """Bytes above the limits with one microbatch; the time; the squares of the ranks' work."""

    over: float
    time: float
    squares: float


def least(problem: Problem) -> Array:
    """The memory that each queue needs at least: one microbatch after the other."""
    return np.array(problem.peaks(Arena(problem).serial()))


def adapt(variant: Variant, pricing: Pricing, *, seconds: float) -> None:
    """Sets the best cut and levels found for a variant in `pricing`.

    seconds: for what comes after the first try. After an interrupt too, the best so far is set.
    """
    climb = _Climb(variant, pricing)
    try:
        climb.run(seconds)
    finally:
        climb.put(climb.best)


@dataclass(eq=False)
class _Climb:
    """Settings tried one after the other: neighbours of the best one."""

    variant: Variant
    pricing: Pricing
    policies: Sequence[Policy] = POLICIES
    order: Array | None = None
    tried: set[Setting] = field(default_factory=set)

    def __post_init__(self) -> None:
        placement, kinds = self.variant.placement, self.variant.problem.kinds
        request = self.pricing.request
        self.key = placement.paths, kinds == SPLIT
        # Without a limit in bytes there is nothing to gain.
        self.levels = (NONE, *request.recompute) if request.memory and request.recompute else ()
        self.best = Setting(
            self.pricing.sizes(placement, kinds == SPLIT),
            self.pricing.levels.get(self.key, (NONE,) * placement.n_stages if self.levels else ()),
        )

    def put(self, setting: Setting) -> None:
        """Puts a setting into the tables."""
        if setting.cut:
            self.pricing.cuts[self.key] = setting.cut
        if setting.levels:
            self.pricing.levels[self.key] = setting.levels

    def run(self, seconds: float) -> None:
        """Climbs from the present setting, and from each level of recomputation everywhere."""
        given, n = self.best, len(self.best.levels)
        best = self._score(given)
        until = time.monotonic() + seconds
        for start in [given, *(given._replace(levels=(x,) * n) for x in self.levels)]:
            score, top = self._climbed(start, until)
            if score < best:
                best, self.best = score, top

    def _climbed(self, start: Setting, until: float) -> tuple[_Score, Setting]:
        """The first better neighbour, again and again until there is none, or no time."""
        score, improved = self._score(start), True
        self.tried.add(start)
        while improved:
            improved = False
            for setting in self._near(start):
                if time.monotonic() > until:
                    break
                if setting in self.tried:
                    continue
                self.tried.add(setting)
                new = self._score(setting)
                if new < score:
                    score, start, improved = new, setting, True
                    break
        return score, start

    def _near(self, setting: Setting) -> Iterator[Setting]:
        """One stage, or all of a rank, at another level; one layer in another stage."""
        cut, now = setting
        stages = [(s,) for s in range(len(now))]
        ranks = [own for own in self.variant.placement.stages_of_rank if len(own) > 1]
        for held, level in product([*stages, *ranks], self.levels):
            levels = tuple(level if s in held else x for s, x in enumerate(now))
            yield setting._replace(levels=levels)
        for other in shifted(cut):
            yield setting._replace(cut=other)

    def _score(self, setting: Setting) -> _Score:
        self.put(setting)
        v = self.variant
        problem = asked(self.pricing, v.placement, v.problem.kinds, v.v)
        if np.isfinite(problem.cap).all():
            over = np.maximum(0.0, least(problem) - problem.cap).sum()
            if over:
                return _Score(float(over), float("inf"), 0.0)
        scale = problem.ticks.scale
        return _Score(0.0, self._time(problem) / scale, float(((problem.work / scale) ** 2).sum()))

    def _time(self, problem: Problem) -> float:
        """What list scheduling, the order of the best setting and a few moves reach, in ticks."""
        arena = Arena(problem, self.pricing.request.objective)
        known = [] if self.order is None else [self.order]
        found = [Found(arena.cost(order), order) for order in (*known, arena.serial())]
        listed = [(policy, arena.tried(policy)) for policy in self.policies]
        listed.sort(key=lambda x: x[1].cost)
        if len(listed) > _POLICIES:
            self.policies = [policy for policy, _ in listed[:_POLICIES]]
        best = min([*found, *(f for _, f in listed)], key=lambda f: f.cost)
        if kernels().compiled:
            moves = min(_MOST_MOVES, _MOVES // problem.n)
            best = arena.anneal(best.order, moves=moves, hot=0.15, cold=0.03, goal=-1.0, seed=1)
        if self.order is None:
            self.order = best.order
        return best.cost
