"""The partition of layers into stages: the largest load of a rank as small as it can be."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from hocket.costs.model import Number, quotient
from hocket.errors import PlanError, UsageError

_WORK = 100_000  # boundaries tried for placements with several stages per rank: about 0.2 s
_SLACK = 1e-9


class Room(NamedTuple):
    """Memory that a cut must fit: the limit of each rank, and what a stage of some layers needs.

    need(stage, a, b): bytes of a stage of layers a to b - 1: static ones, those of one microbatch
    from its forward to its backward, and those more while the backward runs.
    """

    limits: Sequence[float]
    need: Callable[[int, int, int], tuple[float, float, float]]

    def over(self, rank: int, stages: Sequence[tuple[int, int, int]]) -> float:
        """Bytes above the limit of a rank with these (stage, a, b) in order; 0 where they fit."""
        fixed = kept = most = 0.0
        for x in stages:
            static, activation, more = self.need(*x)
            fixed += static
            kept += activation
            most = max(most, kept + more)
        return max(0.0, fixed + most - self.limits[rank] * (1 + _SLACK))


def partition(
    loads: Sequence[Number],
    parts: int,
    owners: Sequence[Sequence[int]] | None = None,
    *,
    room: Room | None = None,
    speed: Sequence[Number] | None = None,
) -> tuple[int, ...]:
    """Number of consecutive layers in each of `parts` stages.

    The largest load is the smallest possible, then the sum of squares; no stage is empty.
    owners: for each rank the stages it holds (left out: one each); the loads are then those of
    ranks. With one stage per rank this is exact; with several, the largest load is exact where so
    many boundaries can be tried (up to about 30 layers), and the sum of squares is not.
    room: only cuts that fit in it; where none was found, one with little above it.
    speed: of each rank, with one stage per rank; its load is divided by it.

    Raises: PlanError with fewer layers than stages or a speed that cannot be taken, UsageError
    for loads that are no times.
    """
    wrong = next((x for x in loads if not 0 <= x < math.inf), None)
    if wrong is not None:
        raise UsageError(f"the load of a layer is {wrong}; it must be 0 or more, and finite")
    if len(loads) < parts:
        raise PlanError(
            f"{len(loads)} layers do not make {parts} stages: each needs at least one layer; "
            f"use at most {len(loads)} stages"
        )
    owners = owners or [(s,) for s in range(parts)]
    if speed is not None and len(speed) != len(owners):
        raise PlanError(f"speed has {len(speed)} values, but there are {len(owners)} ranks")
    if all(len(held) == 1 for held in owners):
        ranks_of_stages = sorted(range(parts), key=lambda rank: owners[rank][0])
        return _by_stage(loads, ranks_of_stages, room, speed)
    if speed is not None:
        raise PlanError(
            "layers are partitioned for ranks of unequal speed with one stage per rank only; "
            "give the costs of stages, or leave speed out"
        )
    ranks = _Ranks(loads, parts, owners, room)
    return ranks.moved(ranks.searched(ranks.moved(_by_stage(loads, range(parts), None))))


def _by_stage(
    loads: Sequence[Number], ranks: Sequence[int], room: Room | None,
    speed: Sequence[Number] | None = None,
) -> tuple[int, ...]:  # fmt: skip
    """Exact for one stage per rank: the least largest load, then the least sum of squares.

    ranks: of each stage. Where nothing fits the room, the least largest excess.
    """
    sums = [0, *accumulate(loads)]
    n, parts = len(loads), len(ranks)

    @cache
    def over(s: int, a: int, b: int) -> Number:
        return 0 if room is None else room.over(ranks[s], [(s, a, b)])

    excess = _least_largest(n, parts, over) if room is not None else 0
    allowed = excess + _SLACK * abs(float(excess))

    def load(s: int, a: int, b: int) -> Number:
        if over(s, a, b) > allowed:
            return float("inf")
        return sums[b] - sums[a] if speed is None else quotient(sums[b] - sums[a], speed[ranks[s]])

    worst = _least_largest(n, parts, load)
    limit = worst + (1e-12 * abs(float(worst)) if isinstance(worst, float) else 0)
    best: list[tuple[Number, tuple[int, ...]] | None] = [(0, ())] + [None] * n
    for s in range(parts):
        now: list[tuple[Number, tuple[int, ...]] | None] = [None] * (n + 1)
        for i in range(1, n + 1):
            for j in range(i):
                before = best[j]
                if before is None:
                    continue
                here, size = now[i], load(s, j, i)
                cost = before[0] + size**2
                if size <= limit and (here is None or cost < here[0]):
                    now[i] = (cost, (*before[1], i - j))
        best = now
    found = best[n]
    assert found is not None, "the limit was reached by a cut"
    return found[1]


def _least_largest(n: int, parts: int, value: Callable[[int, int, int], Number]) -> Number:
    """The least that the largest value(stage, a, b) can be over all cuts of n layers."""
    infinite = float("inf")
    worst: list[Number] = [0] + [infinite] * n
    for s in range(parts):
        worst = [
            min((max(worst[j], value(s, j, i)) for j in range(i) if worst[j] < infinite),
                default=infinite)
            for i in range(n + 1)
        ]  # fmt: skip
    return worst[n]


class _Step(NamedTuple):
    """A boundary to be put: between those two, at least so many layers from each.

    closes: the ranks for which a stage has both ends then, with all such stages; done: the ranks
    that have all their stages then; open: the boundaries that the other ranks depend on.
    """

    at: int
    below: int
    above: int
    closes: tuple[tuple[int, tuple[int, ...]], ...]
    done: tuple[int, ...]
    open: tuple[int, ...]


@dataclass(eq=False)
class _Ranks:
    """Cuts for ranks of several stages: by moves of layers, and by search rank after rank.

    The search puts boundaries so that ranks are complete early: what a complete rank has less
    than the largest load the others have more. What could not be completed is not tried again.
    """

    loads: Sequence[Number]
    parts: int
    owners: Sequence[Sequence[int]]
    room: Room | None
    work: int = 0
    failed: set[tuple[int, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.sums = [0.0, *accumulate(map(float, self.loads))]
        copies = min(sum(s in own for own in self.owners) for s in range(self.parts))
        self.whole = copies * self.sums[-1]
        self.steps = tuple(self._steps())

    def _steps(self) -> Iterator[_Step]:
        known = {0, self.parts}
        ends = [{end for s in own for end in (s, s + 1)} for own in self.owners]
        for mine in ends:
            for at in sorted(mine - known):
                below, above = max(x for x in known if x < at), min(x for x in known if x > at)
                before = [r for r, needed in enumerate(ends) if needed <= known]
                known.add(at)
                closed = [tuple(s for s in own if {s, s + 1} <= known) for own in self.owners]
                touched = [r for r, needed in enumerate(ends) if at in needed and closed[r]]
                done = [r for r, x in enumerate(ends) if x <= known and r not in before]
                left = {end for x in ends if not x <= known for end in x}
                yield _Step(
                    at, below, above, tuple((r, closed[r]) for r in touched), tuple(done),
                    tuple(sorted(left & known)),
                )  # fmt: skip

    def score(self, sizes: Sequence[int]) -> tuple[float, float, float]:
        """Bytes above the limits, the largest load of a rank, and the sum of squares."""
        ends = [0, *accumulate(sizes)]
        loads = [self._load(ends, own) for own in self.owners]
        return self._over(ends, range(len(self.owners))), max(loads), sum(x * x for x in loads)

    def _over(self, ends: Sequence[int], ranks: Sequence[int]) -> float:
        if self.room is None:
            return 0.0
        stages = [[(s, ends[s], ends[s + 1]) for s in self.owners[r]] for r in ranks]
        return sum(self.room.over(r, own) for r, own in zip(ranks, stages, strict=True))

    def moved(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Layers moved over one or several boundaries while that makes the score less."""
        best, improved = self.score(sizes), True
        while improved:
            improved = False
            for cut in shifted(sizes):
                new = self.score(cut)
                if new < best:
                    best, sizes, improved = new, cut, True
                    break
        return sizes

    def searched(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """A cut with a lower largest load, the lowest if there is work enough for that."""
        over, largest, _ = self.score(sizes)
        limit = float("inf") if over else largest
        ends = [0, *[-1] * (self.parts - 1), len(self.loads)]
        while limit > self.whole / len(self.owners) and self._put(0, ends, limit * (1 - 1e-12)):
            sizes = tuple(b - a for a, b in pairwise(ends))
            limit = self.score(sizes)[1]
        return sizes

    def _put(self, k: int, ends: list[int], limit: float, ranks: int = 0, used: float = 0) -> bool:
        """Puts the boundaries from step k on into `ends`, if so that no load is above the limit.

        ranks: how many are complete, used: their loads.
        """
        if k == len(self.steps):
            return True
        step, sums = self.steps[k], self.sums
        low, high = ends[step.below] + step.at - step.below, ends[step.above] - step.above + step.at
        if step.below == step.at - 1:
            high = min(high, bisect_right(sums, sums[ends[step.below]] + limit) - 1)
        for ends[step.at] in range(low, high + 1):
            self.work += 1
            if self.work > _WORK:
                return False
            loads = {r: self._load(ends, closed) for r, closed in step.closes}
            if any(x > limit for x in loads.values()):
                continue
            if step.done:
                n, mine = ranks + len(step.done), used + sum(loads[r] for r in step.done)
                key = (k, *(ends[at] for at in step.open))
                others = (len(self.owners) - n) * limit + _SLACK * self.whole
                if self.whole - mine > others or key in self.failed:
                    continue
                if self._over(ends, step.done):
                    continue
                if self._put(k + 1, ends, limit, n, mine):
                    return True
                if self.work <= _WORK:
                    self.failed.add(key)
            elif self._put(k + 1, ends, limit, ranks, used):
                return True
        return False

    def _load(self, ends: Sequence[int], stages: Sequence[int]) -> float:
        return sum(self.sums[ends[s + 1]] - self.sums[ends[s]] for s in stages)


def shifted(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Cuts in which one layer less is in one stage and one more in another."""
    out = []
    for a in range(len(sizes)):
        for b in range(len(sizes)):
            if a != b and sizes[a] > 1:
                cut = list(sizes)
                cut[a], cut[b] = cut[a] - 1, cut[b] + 1
                out.append(tuple(cut))
    return out
