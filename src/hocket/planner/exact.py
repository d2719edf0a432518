"""The exact solver: OR-tools CP-SAT proves an order optimal or tightens the bound (extra `solve`).

Imports deps, problem, bound, search. The solver is imported when it is used.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from hocket.deps import ENDS, STARTS
from hocket.errors import PlanError
from hocket.ir import Array
from hocket.planner.bound import lags
from hocket.planner.problem import Problem
from hocket.planner.search import Arena, Found

_ALONE = (
    "alone cannot be faster with its memory limit and the shortest ways between its actions, "
    "found by the exact solver"
)


class Solved(NamedTuple):
    """The best order known, the proven lower bound in ticks, and whether they meet."""

    found: Found
    bound: float
    proven: bool


def available() -> bool:
    """True when OR-tools is installed."""
    from importlib.util import find_spec

    return find_spec("ortools") is not None


def solve(
    problem: Problem, objective: str, start: Found, *, bound: float, seconds: float, threads: int,
    seed: int = 0,
) -> Solved:  # fmt: skip
    """Looks for an order better than `start`, and proves how good the best one is.

    bound: a lower bound known already, in ticks. Microbatches of a path are alike, so each type
    runs them in order; every action has a window from the shortest ways to and from it.

    Raises: PlanError where OR-tools is not installed.
    """
    if not available():
        raise PlanError("the exact solver needs OR-tools: pip install 'hocket[solve]'")
    return _Model(problem, objective, start, bound).solved(seconds, threads, seed)


@dataclass(eq=False)
class _Model:
    """One model of a problem: start times within windows, one action at a time in each queue."""

    problem: Problem
    objective: str
    start: Found
    bound: float

    def __post_init__(self) -> None:
        from ortools.sat.python import cp_model

        self.cp: Any = cp_model
        self.model: Any = cp_model.CpModel()
        p = self.problem
        self.unit = _common(p)
        self.dur = np.round(p.dur / self.unit).astype(int)
        self.delay = np.round(p.delay / self.unit).astype(int)
        self.top = round(self.start.cost / self.unit)
        self.low = math.ceil(self.bound / self.unit - 1e-6)
        self._actions()
        self._order()
        self._memory()
        self._goal()

    def _actions(self) -> None:
        """Start variables: windows from ways in and out, and from the microbatches around."""
        p, model = self.problem, self.model
        head = np.round(p.head / self.unit).astype(int)
        tail = np.round(p.tail / self.unit).astype(int)
        span = self.objective != "makespan"
        last = self.top if not span else int(head.max() + tail.max() + 2 * self.top)
        self.starts: list[list[Any]] = []
        self.intervals: list[list[Any]] = []
        begin = np.round(Arena(p, self.objective).begin(self.start.order) / self.unit).astype(int)
        for t in range(p.n_types):
            times = np.sort(begin[self.start.order == t])
            row = []
            for k in range(int(p.counts[t])):
                left = int(p.counts[t]) - 1 - k
                low = int(head[t] + k * self.dur[t])
                high = int(last - tail[t] - (left + 1) * self.dur[t])
                x = model.new_int_var(low, max(low, high), "")
                model.add_hint(x, int(times[k]))
                row.append(x)
            self.starts.append(row)
            self.intervals.append(
                [model.new_fixed_size_interval_var(x, int(self.dur[t]), "") for x in row]
            )

    def _order(self) -> None:
        p, model = self.problem, self.model
        for t, row in enumerate(self.starts):
            for a, b in pairwise(row):
                model.add(b >= a + int(self.dur[t]))
            for e in range(int(p.needs[t])):
                u = int(p.need[t, e])
                wait = int(self.dur[u] + self.delay[t, e])
                for a, b in zip(self.starts[u], row, strict=True):
                    model.add(b >= a + wait)
        for q in range(len(p.queues) - 1):
            mine = np.flatnonzero(p.queue_of == q).tolist()
            model.add_no_overlap([i for t in mine for i in self.intervals[t]])

    def _memory(self) -> None:
        """Limits of memory: precedences where a queue has one stage, levels over time elsewhere."""
        p, model = self.problem, self.model
        for q in range(len(p.queues) - 1):
            cap = float(p.cap[q])
            mine = np.flatnonzero(p.queue_of == q).tolist()
            if not math.isfinite(cap) or not mine:
                continue
            _limit(model, p, q, self.starts, self.dur)
            self._implied(mine, cap)

    def _implied(self, mine: list[int], cap: float) -> None:
        """Of one stage a queue, or of each stage alone: forward k waits for the end of k - cap."""
        p = self.problem
        for f in mine:
            if p.kind[f] not in STARTS or p.take[f] <= 0:
                continue
            same = (p.path == p.path[f]) & (p.stage == p.stage[f])
            ends = [t for t in np.flatnonzero(same).tolist() if p.kind[t] in ENDS]
            if not ends or p.free[ends[0]] < p.take[f] - 1e-9:
                continue
            fits = math.floor(cap / p.take[f] + 1e-9)
            for k in range(fits, int(p.counts[f])):
                end = self.starts[ends[0]][k - fits] + int(self.dur[ends[0]])
                self.model.add(self.starts[f][k] >= end)

    def _goal(self) -> None:
        p, model = self.problem, self.model
        self.goal = model.new_int_var(self.low, max(self.low, self.top), "")
        model.add_hint(self.goal, self.top)
        for q in range(len(p.queues) - 1):
            mine = np.flatnonzero(p.queue_of == q).tolist()
            ends = [self.starts[t][-1] + int(self.dur[t]) for t in mine]
            if self.objective == "makespan":
                for end, t in zip(ends, mine, strict=True):
                    way_out = round(p.tail[t] / self.unit)
                    model.add(end + way_out <= self.goal)
                continue
            for t in mine:
                for end in ends:
                    model.add(end - self.starts[t][0] <= self.goal)
        model.minimize(self.goal)

    def solved(self, seconds: float, threads: int, seed: int) -> Solved:
        solver: Any = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.1, seconds)
        solver.parameters.num_workers = threads
        solver.parameters.random_seed = seed
        status = solver.solve(self.model)
        bound = max(self.bound, solver.best_objective_bound * self.unit)
        found = self.start
        if status in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            order = self._read(solver)
            cost = Arena(self.problem, self.objective).cost(order)
            if cost < found.cost:
                found = Found(cost, order)
        if status == self.cp.INFEASIBLE:
            raise AssertionError("the model has no solution though one is known")
        proven = found.cost <= bound + 1e-6 * max(1.0, abs(bound))
        return Solved(found, min(bound, found.cost), proven)

    def _read(self, solver: Any) -> Array:
        """The order of the solution."""
        p, out = self.problem, []
        for q in range(len(p.queues) - 1):
            mine = np.flatnonzero(p.queue_of == q).tolist()
            rank = {t: i for i, t in enumerate(sorted(mine, key=lambda t: p.head[t]))}
            line = [(solver.value(x), rank[t], t) for t in mine for x in self.starts[t]]
            out += [t for _, _, t in sorted(line)]
        return np.array(out, dtype=np.int64)


def relaxed(
    problem: Problem, objective: str, *, top: float, seconds: float, threads: int
) -> tuple[float, str]:
    """A lower bound in ticks, and its argument: each queue alone, solved exactly.

    A queue keeps its work, its order of microbatches, its memory limit, and the shortest ways to,
    between and from its actions; all other queues are as if they were free. top: the cost of an
    order that is known; seconds: for all queues together.

    Raises: PlanError where OR-tools is not installed.
    """
    if not available():
        raise PlanError("the exact solver needs OR-tools: pip install 'hocket[solve]'")
    n = len(problem.queues) - 1
    ways, best = lags(problem), (0.0, "no work")
    for i, queue in enumerate(reversed(range(n))):
        began = time.monotonic()
        low = _alone(problem, objective, queue, ways, top, max(0.2, seconds / (n - i)), threads)
        seconds -= time.monotonic() - began
        if low > best[0]:
            name = problem.placement.queues[queue]
            best = low, f"rank {name} {_ALONE}"
        if best[0] >= top - 1e-6:
            break
    return min(best[0], top), best[1]


def _alone(
    problem: Problem, objective: str, queue: int, ways: Array, top: float, seconds: float,
    threads: int,
) -> float:  # fmt: skip
    """The least cost of one queue alone, or what is proven of it in this time."""
    from ortools.sat.python import cp_model

    mine = np.flatnonzero(problem.queue_of == queue).tolist()
    if not mine:
        return 0.0
    cp: Any = cp_model
    model: Any = cp.CpModel()
    unit = _common(problem)
    dur, last = np.floor(problem.dur / unit + 1e-9).astype(int), math.ceil(top / unit)
    ends = objective == "makespan"
    head, tail = (
        np.floor(x / unit + 1e-9).astype(int) * ends for x in (problem.head, problem.tail)
    )
    starts: dict[int, list[Any]] = {}
    for t in mine:
        n, d = int(problem.counts[t]), int(dur[t])
        windows = [(int(head[t]) + k * d, last - int(tail[t]) - (n - k) * d) for k in range(n)]
        starts[t] = [model.new_int_var(a, max(a, b), "") for a, b in windows]
        for a, b in pairwise(starts[t]):
            model.add(b >= a + d)
    model.add_no_overlap(
        [model.new_fixed_size_interval_var(x, int(dur[t]), "") for t in mine for x in starts[t]]
    )
    for a, b in product(mine, mine):
        if a != b and math.isfinite(ways[a, b]) and problem.path[a] == problem.path[b]:
            wait = math.floor(ways[a, b] / unit + 1e-9)
            for x, y in zip(starts[a], starts[b], strict=True):
                model.add(y >= x + wait)
    _limit(model, problem, queue, starts, dur)
    goal = model.new_int_var(0, last, "")
    for t in mine:
        end = starts[t][-1] + int(dur[t])
        if ends:
            model.add(end + int(tail[t]) <= goal)
        else:
            for first in mine:
                model.add(end - starts[first][0] <= goal)
    model.minimize(goal)
    solver: Any = cp.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = threads
    status = solver.solve(model)
    if status == cp.INFEASIBLE:  # by rounding only: an order with this cost is known
        return 0.0
    return max(0.0, float(solver.best_objective_bound)) * unit


def _limit(model: Any, problem: Problem, queue: int, starts: Any, dur: Array) -> None:
    """Adds the memory limit of a queue: what is taken and freed over time; starts by type."""
    cap = float(problem.cap[queue])
    mine = np.flatnonzero(problem.queue_of == queue).tolist()
    if not math.isfinite(cap) or not mine:
        return
    scale = _scale(problem, mine, cap)
    times, changes = [], []
    for t in mine:
        for x in starts[t]:
            if problem.take[t]:
                times.append(x)
                changes.append(math.floor(problem.take[t] * scale + 1e-6))
            if problem.free[t]:
                times.append(x + int(dur[t]))
                changes.append(-math.ceil(problem.free[t] * scale - 1e-6))
    model.add_reservoir_constraint(times, changes, -(10**9), math.floor(cap * scale + 1e-6))


def _common(problem: Problem) -> float:
    """The largest tick that all times are whole multiples of; 1 where times are floats."""
    if not problem.ticks.exact:
        return float(max(problem.dur.max(), 1e-12)) / 10_000
    times = [int(x) for x in (*problem.dur, *problem.delay.ravel()) if x]
    return float(math.gcd(*times)) if times else 1.0


def _scale(problem: Problem, mine: list[int], cap: float) -> float:
    """A factor that makes the memory of a queue whole numbers: exact for small ones."""
    sizes = [x for t in mine for x in (problem.take[t], problem.free[t]) if x]
    for scale in (1, 2, 4, 8, 12, 60, 1000):
        if all(abs(x * scale - round(x * scale)) < 1e-6 for x in sizes):
            return scale
    return 1e6 / max(cap, *sizes)


__all__ = ["Solved", "available", "relaxed", "solve"]
