"""The race of a plan's searched variants: rounds of search, and the exact solver after them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hocket.costs import Costs, Number
from hocket.ir import Array, Schedule
from hocket.planner.measures import measure
from hocket.planner.request import Request
from hocket.planner.variants import Variant
from hocket.search.problem_bounds import Bound, best_bound, crowded_bound, is_crowded
from hocket.search.search import Arena, Found, Search
from hocket.simulator import simulate

_RELAXED = 20.0  # seconds for the bound of ranks alone
_TIMED = 8  # orders of list scheduling that are timed again where ranks share cores
_SOLVABLE = 800  # actions up to which the exact solver is worth starting


class Progress(NamedTuple):
    """What a search has reached: seconds, the best value, the variant it looks at."""

    seconds: float
    value: Number
    what: str


class Finalist(NamedTuple):
    """An order that may be the answer: its value, costs and name, and where it comes from."""

    value: Number
    schedule: Schedule
    costs: Costs
    name: str
    by: str


@dataclass(eq=False)
class Contest:
    """A variant in the race: its bound, its search, and its best order: how good, found by whom.

    The search knows nothing of shared cores; where ranks share them, what it finds is timed again.
    """

    variant: Variant
    objective: str
    bound: Bound
    search: Search
    order: Array = field(default_factory=lambda: np.empty(0))
    value: Number = math.inf
    by: str = ""

    @classmethod
    def begun(
        cls, variant: Variant, arena: Arena, request: Request, starts: list[Found]
    ) -> Contest:
        """A variant that fits, with its arena and what it starts from, best first."""
        asked, objective = variant.problem, request.objective
        bound = best_bound(asked, objective)
        goal = float(bound.value) * (asked.ticks.scale if asked.ticks.exact else 1)
        search = Search(arena, starts, goal=goal, seed=request.seed)
        contest = cls(variant, objective, bound, search)
        contest.raise_bound(crowded_bound(asked, objective))
        for found in starts[: _TIMED if is_crowded(asked) else 1]:
            contest.offer(found, "list scheduling")
        return contest

    @property
    def name(self) -> str:
        """The variant, and how its best order was found."""
        return f"{self.by}: {self.variant.name}"

    def schedule(self) -> Schedule:
        """The best order."""
        return self.variant.problem.schedule(self.order, "planned")

    def offer(self, found: Found, by: str) -> None:
        """Takes over an order where it is better."""
        value = self._value(found)
        if float(value) < float(self.value):
            self.order, self.value, self.by = found.order, value, by

    def raise_bound(self, bound: Bound | None) -> None:
        """Takes over a bound where it is higher."""
        if bound is not None and float(bound.value) > float(self.bound.value):
            self.bound = bound

    def _value(self, found: Found) -> Number:
        asked, costs = self.variant.problem, self.variant.costs
        if not is_crowded(asked):
            return asked.ticks.value(found.cost)
        return measure(
            simulate(asked.schedule(found.order, "planned"), costs), costs, self.objective
        )


@dataclass(eq=False)
class Race:
    """The variants of one request, and the best of the registered schedules that they must beat."""

    request: Request
    watcher: Callable[[Progress], None] | None
    contests: list[Contest] = field(default_factory=list)
    finalists: list[Finalist] = field(default_factory=list)
    history: list[tuple[float, Number]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the plan began."""
        return time.monotonic() - self.began

    @property
    def best(self) -> Number:
        """The best value so far."""
        values = [c.value for c in self.contests] + [f.value for f in self.finalists]
        return min(values, key=float)

    def note(self, what: str) -> None:
        """Writes down the best value, and tells it to who watches."""
        best = self.best
        if not self.history or best < self.history[-1][1]:
            self.history.append((self.seconds, best))
        if self.watcher is not None:
            self.watcher(Progress(self.seconds, best, what))

    def run(self) -> None:
        """Rounds for those that can still win; the slower half leaves after each lap."""
        workers = ThreadPoolExecutor(self._threads)
        try:
            self._laps(workers)
        finally:
            workers.shutdown(wait=True, cancel_futures=True)

    @property
    def _threads(self) -> int:
        return self.request.threads or os.cpu_count() or 1

    def _laps(self, workers: Executor) -> None:
        left = sorted(self.contests, key=lambda c: float(c.value))
        for lap in range(self.request.rounds):
            best = float(self.best)
            left = [c for c in left if not c.search.done and float(c.bound.value) < best]
            if not left:
                return
            for contest in left:
                if self._is_over and (lap or contest is not left[0]):
                    return
                if contest.search.round(workers):
                    contest.offer(contest.search.best, "search")
                self.note(contest.variant.name)
            left.sort(key=lambda c: float(c.value))
            if lap % 2 and len(left) > 1:
                left = left[: (len(left) + 1) // 2]

    @property
    def _is_over(self) -> bool:
        """True after the time limit, or when nothing better came for as long as one waits."""
        request, waited = self.request, self.seconds - self.history[-1][0]
        bored = request.patience is not None and waited > request.patience
        return bored or self.seconds > request.time_limit

    # --- the exact solver -----------------------------------------------------------------

    def solve(self) -> None:
        """Lets the exact solver prove or improve the variants that are small and may still win.

        It knows no slots of a forward and a backward.
        """
        for contest in sorted(self.contests, key=lambda c: float(c.value)):
            asked, search = contest.variant.problem, contest.search
            beaten = float(contest.bound.value) >= float(self.best)
            if asked.fused or search.done or beaten:
                continue
            if self._solver_time <= 0:
                break
            self._relax(contest, min(self._solver_time / 2, _RELAXED))
            if asked.n <= _SOLVABLE and not search.done and self._solver_time > 0:
                self._prove(contest)

    @property
    def _solver_time(self) -> float:
        """Seconds that are left."""
        late = max(0.0, self.seconds - self.request.time_limit)
        return self.request.solver_time - late

    def _prove(self, contest: Contest) -> None:
        from hocket.search.exact import solve

        asked, search = contest.variant.problem, contest.search
        solved = solve(
            asked, self.request.objective, search.best, bound=search.goal,
            seconds=self._solver_time, threads=self._threads, seed=self.request.seed,
        )  # fmt: skip
        search.add(solved.found)
        contest.offer(solved.found, "exact solver")
        if solved.bound > search.goal:
            ticks = solved.bound + 1e-6 if asked.ticks.exact else solved.bound
            contest.raise_bound(Bound(asked.ticks.value(ticks), "proven by the exact solver"))
            search.goal = solved.bound

    def _relax(self, contest: Contest, seconds: float) -> None:
        """Raises the bound to what each rank alone needs, if that is more."""
        from hocket.search.exact import relaxed

        search, asked = contest.search, contest.variant.problem
        low, why = relaxed(
            asked, self.request.objective, top=search.best.cost, seconds=seconds,
            threads=self._threads,
        )  # fmt: skip
        if low > search.goal:
            ticks = math.floor(low + 1e-6) if asked.ticks.exact else low
            contest.raise_bound(Bound(asked.ticks.value(ticks), why))
            search.goal = low
