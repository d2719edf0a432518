"""The exact solver: OR-tools CP-SAT proves an order optimal or tightens the bound (extra `solve`).

Times become whole numbers so that every order that can run still can (`_Grid`): what is proven of
the model holds for the problem. The solver is imported when
it is used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from fractions import Fraction
from graphlib import TopologicalSorter
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from hocket.deps import ENDS, STARTS
from hocket.errors import PlanError
from hocket.ir import Array
from hocket.search.problem import Problem
from hocket.search.problem_bounds import lags
from hocket.search.search import Arena, Found

_ALONE = (
    "alone cannot be faster with its memory limit and the shortest ways between its actions, "
    "found by the exact solver"
)
_NOISE = 2e-13  # more than sums of floats are off by, relative
_MEET = 1e-12  # relative; as `Search.done`
_FINE = 1e8  # most steps in the longest time, where it is no multiple of a larger one
_COARSE = 1e4  # the same for a span of all queues: cycles of waits are closed step by step
_WHOLE = 2.0**53  # below it floats hold whole numbers


class Solved(NamedTuple):
    """The best order known, the proven lower bound in ticks, and whether they meet.

    With floats they meet where they differ by no more than sums of floats do.
    """

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


class _Grid(NamedTuple):
    """The whole numbers that stand for times in a model, which is never stricter than the problem.

    A time x becomes the whole units in x * (1 + noise). A sum rounded down is not below the sum of
    its parts rounded down, so what real starts keep, these keep, and they cost no more. Where all
    times are whole multiples of the unit (`exact`), nothing is lost and there is no noise.
    """

    unit: float
    exact: bool

    @property
    def _noise(self) -> float:
        return 0.0 if self.exact else _NOISE

    def down(self, times: Array) -> Array:
        """Times in ticks as whole units, rounded down."""
        return np.floor(times * ((1 + self._noise) / self.unit)).astype(np.int64)

    def top(self, cost: float) -> int:
        """A cost that an order has, in units: no better one is above it."""
        return math.ceil(cost * (1 + self._noise) / self.unit)

    def low(self, bound: float) -> int:
        """A lower bound of all costs, in units: a lower bound of the model."""
        if self.exact:
            return math.ceil(bound / self.unit * (1 - _NOISE))
        return math.floor(bound / self.unit)

    def back(self, units: float) -> float:
        """A lower bound of the model as one of the problem, in ticks."""
        return units * self.unit / (1 + 2 * self._noise)


def _grid(problem: Problem, top: float, steps: float) -> _Grid:
    """The grid for orders that cost at most `top`; steps: the most in the longest time."""
    full = problem.full if problem.mixes else ()
    times = [float(x) for x in (*problem.dur, *problem.delay.ravel(), *full) if x]
    if problem.ticks.exact and top < _WHOLE:
        return _Grid(float(math.gcd(*map(int, times))) if times else 1.0, True)
    longest = max(times, default=1.0)
    return _Grid(max(_common(times), longest / steps), False)


def _common(values: Iterable[float]) -> float:
    """The largest number that all values above 0 are whole multiples of, to 14 digits."""
    found = [Fraction(f"{x:.14g}") for x in values if x]
    scale = math.lcm(*(x.denominator for x in found))
    return float(Fraction(math.gcd(*(int(x * scale) for x in found)), scale))


@dataclass(eq=False)
class _Model:
    """One model of a problem: start times within windows, one action at a time in each queue.

    Where backwards may be full (`Problem.mixes`), each I may take as long as one, and its W no time
    at its end; windows and ways are then those of `Problem.relaxed`.
    """

    problem: Problem
    objective: str
    start: Found
    bound: float

    def __post_init__(self) -> None:
        from ortools.sat.python import cp_model

        self.model: Any = cp_model.CpModel()
        p = self.problem
        self.grid = _grid(p, self.start.cost, _FINE if self.objective == "makespan" else _COARSE)
        least, halves = p.relaxed, zip(p.first_half, p.second_half, strict=True)
        self.weight_of = {int(i): int(w) for i, w in halves} if p.mixes else {}
        self.dur, self.delay = self.grid.down(p.dur), self.grid.down(p.delay)
        self.least = self.grid.down(least.dur)
        self.head, self.tail = self.grid.down(least.head), self.grid.down(least.tail)
        self.top, self.low = self.grid.top(self.start.cost), self.grid.low(self.bound)
        self._actions()
        self._order()
        self._memory()
        self._goal()

    def _actions(self) -> None:
        """Start variables: windows from ways in and out, and from the microbatches around."""
        p, model, head, tail = self.problem, self.model, self.head, self.tail
        # Of a span: queues of one path overlap, so those joined by paths fit into their sum.
        last = self.top * (1 if self.objective == "makespan" else len(p.queues) - 1)
        self.starts: list[list[Any]] = []
        self.ends: list[list[Any]] = []
        begin = self.grid.down(Arena(p, self.objective).begin(self.start.order))
        for t in range(p.n_types):
            times = np.sort(begin[self.start.order % p.n_types == t])
            row = []
            for k in range(int(p.counts[t])):
                before, left = (k, int(p.counts[t]) - k) if self._in_turn(t) else (0, 0)
                low = int(head[t] + before * self.least[t])
                high = int(last - tail[t] - left * self.least[t])
                x = model.new_int_var(low, max(low, high), "")
                model.add_hint(x, int(times[k]))
                row.append(x)
            self.starts.append(row)
            self.ends.append([x + int(self.dur[t]) for x in row])
        self.intervals = [
            [model.new_fixed_size_interval_var(x, int(self.dur[t]), "") for x in row]
            for t, row in enumerate(self.starts)
        ]
        self._full_backwards(last)
        model.add_min_equality(0, [self.starts[t][0] for t in np.flatnonzero(p.needs == 0)])

    def _in_turn(self, t: int) -> bool:
        """True where a type runs its microbatches in order: all but a W that a B may overtake."""
        return t not in self.weight_of.values()

    def _full_backwards(self, last: int) -> None:
        """Lets every I and its W be a full backward."""
        model, full = self.model, self.grid.down(self.problem.full)
        self.is_full: dict[int, list[Any]] = {}
        for (i, w), whole in zip(self.weight_of.items(), full.tolist(), strict=False):
            self.is_full[i] = [model.new_bool_var("") for _ in self.starts[i]]
            for k, chosen in enumerate(self.is_full[i]):
                sizes = {
                    i: int(self.dur[i]) + (whole - int(self.dur[i])) * chosen,
                    w: int(self.dur[w]) * (1 - chosen),
                }
                for t, size in sizes.items():
                    start = self.starts[t][k]
                    end = self.ends[t][k] = model.new_int_var(0, 2 * last, "")
                    self.intervals[t][k] = model.new_interval_var(start, size, end, "")
                model.add(self.starts[w][k] == self.ends[i][k]).only_enforce_if(chosen)

    def _order(self) -> None:
        p, model = self.problem, self.model
        for t, row in enumerate(self.starts):
            if self._in_turn(t):
                for a, b in zip(self.ends[t], row[1:], strict=False):
                    model.add(b >= a)
            for e in range(int(p.needs[t])):
                for a, b in zip(self.ends[int(p.need[t, e])], row, strict=True):
                    model.add(b >= a + int(self.delay[t, e]))
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
            _limit(model, p, q, self.starts, self.ends)
            if not self.weight_of:
                self._implied(mine, cap)

    def _implied(self, mine: list[int], cap: float) -> None:
        """Of one stage a queue, or of each stage alone: forward k waits for the end of k - cap."""
        p = self.problem
        for f in mine:
            if p.kind[f] not in STARTS or p.take[f] <= 0:
                continue
            same = (p.path == p.path[f]) & (p.stage == p.stage[f])
            ends = [t for t in np.flatnonzero(same).tolist() if p.kind[t] in ENDS]
            if not ends or p.free[ends[0]] < p.take[f]:
                continue
            fits = math.floor(cap / p.take[f] + 1e-9)
            for k in range(fits, int(p.counts[f])):
                self.model.add(self.starts[f][k] >= self.ends[ends[0]][k - fits])

    def _goal(self) -> None:
        p, model = self.problem, self.model
        self.goal = model.new_int_var(self.low, max(self.low, self.top), "")
        model.add_hint(self.goal, self.top)
        late = 0 if self.grid.exact else 1  # two times rounded down may be a unit further apart
        for q in range(len(p.queues) - 1):
            mine = np.flatnonzero(p.queue_of == q).tolist()
            lasts = {t: range(-1 if self._in_turn(t) else -len(self.ends[t]), 0) for t in mine}
            ends = [(t, k, self.ends[t][k]) for t in mine for k in lasts[t]]
            if self.objective == "makespan":
                for t, k, end in ends:
                    model.add(end <= self.goal)
                    if self._in_turn(t):
                        way = int(self.least[t] + self.tail[t])
                        model.add(self.starts[t][k] + way <= self.goal)
                continue
            for t in mine:
                firsts = self.starts[t][:1] if self._in_turn(t) else self.starts[t]
                for (_, _, end), start in product(ends, firsts):
                    model.add(end - start - late <= self.goal)
        model.minimize(self.goal)

    def solved(self, seconds: float, threads: int, seed: int) -> Solved:
        solver, low = _run(self.model, seconds, threads, seed)
        bound, found = max(self.bound, self.grid.back(low)), self.start
        if solver is not None:
            order = self._read(solver)
            cost = Arena(self.problem, self.objective).cost(order)  # in the problem's own times
            if cost < found.cost:
                found = Found(cost, order)
        bound = _reached(bound, found.cost)
        return Solved(found, bound, bound == found.cost)

    def _read(self, solver: Any) -> Array:
        """The order of the solution; of what starts together, what ends first and is needed."""
        p, out = self.problem, []
        needs = {t: p.need[t, : p.needs[t]].tolist() for t in range(p.n_types)}
        depth = {t: i for i, t in enumerate(TopologicalSorter(needs).static_order())}
        full = {
            t: [bool(solver.value(x)) for x in self.is_full.get(i, ())]
            for i, w in self.weight_of.items() for t in (i, w)
        }  # fmt: skip
        for q in range(len(p.queues) - 1):
            line = [
                (solver.value(x), solver.value(self.ends[t][k]), p.head[t], depth[t], t, k)
                for t in np.flatnonzero(p.queue_of == q).tolist()
                for k, x in enumerate(self.starts[t])
            ]
            for *_, t, k in sorted(line):
                if not (t in full and full[t][k]):
                    out.append(t)
                elif t in self.weight_of:
                    out += [t, self.weight_of[t] + p.n_types]
        return np.array(out, dtype=np.int64)


def _reached(bound: float, cost: float) -> float:
    """The bound, or the cost of a known order where that meets it."""
    return cost if cost <= bound * (1 + _MEET) else bound


def _run(model: Any, seconds: float, threads: int, seed: int = 0) -> tuple[Any, float]:
    """The solver where it has a solution, else None; and its lower bound, 0 where it failed.

    Ctrl-C ends it and is raised.
    """
    from ortools.sat.python import cp_model

    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.1, seconds)
    solver.parameters.num_workers = threads
    solver.parameters.random_seed = seed
    solver.parameters.catch_sigint_signal = False  # else Ctrl-C looks like the end of its time
    with ThreadPoolExecutor(1) as other:  # this thread stays free to hear of Ctrl-C
        job = other.submit(solver.solve, model)
        try:
            wait([job])
        except KeyboardInterrupt:
            while not job.done():
                solver.stop_search()
                wait([job], timeout=0.05)
            raise
    failed = job.exception()
    if isinstance(failed, RuntimeError | ValueError | ArithmeticError | MemoryError):
        return None, 0.0
    status = job.result()
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    if not found and status != cp_model.UNKNOWN:
        return None, 0.0
    return solver if found else None, max(0.0, float(solver.best_objective_bound))


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
    problem, n = problem.relaxed, len(problem.queues) - 1
    ways, best = lags(problem), (0.0, "no work")
    for i, queue in enumerate(reversed(range(n))):
        began = time.monotonic()
        low = _alone(problem, objective, queue, ways, top, max(0.2, seconds / (n - i)), threads)
        low = _reached(low, top)
        seconds -= time.monotonic() - began
        if low > best[0]:
            name = problem.placement.queues[queue]
            best = low, f"rank {name} {_ALONE}"
        if best[0] >= top:
            break
    return best


def _alone(
    problem: Problem, objective: str, queue: int, ways: Array, top: float, seconds: float,
    threads: int,
) -> float:  # fmt: skip
    """The least cost of one queue alone, or what is proven of it in this time."""
    from ortools.sat.python import cp_model

    mine = np.flatnonzero(problem.queue_of == queue).tolist()
    if not mine:
        return 0.0
    model: Any = cp_model.CpModel()
    grid = _grid(problem, top, _FINE)
    dur, last = grid.down(problem.dur), grid.top(top)
    ends = objective == "makespan"
    head, tail = (grid.down(x) * ends for x in (problem.head, problem.tail))
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
            way = int(grid.down(ways[a, b]))
            for x, y in zip(starts[a], starts[b], strict=True):
                model.add(y >= x + way)
    _limit(model, problem, queue, starts, {t: [x + int(dur[t]) for x in starts[t]] for t in mine})
    goal = model.new_int_var(0, last, "")
    for t in mine:  # a span counts from 0 too: only this queue is here
        model.add(starts[t][-1] + int(dur[t]) + int(tail[t]) <= goal)
    model.minimize(goal)
    return grid.back(_run(model, seconds, threads)[1])


def _limit(model: Any, problem: Problem, queue: int, starts: Any, ends: Any) -> None:
    """Adds the memory limit of a queue: what is taken and freed over time; starts and ends by type.

    In whole units, taken rounded down and freed up. The limit is raised by all that the other way
    of rounding gave, for sizes that are multiples of the unit but for their last digit.
    """
    cap = float(problem.cap[queue])
    mine = np.flatnonzero(problem.queue_of == queue)
    take, free, counts = problem.take[mine], problem.free[mine], problem.counts[mine]
    most = float((np.maximum(take, 0) + np.maximum(-free, 0)) @ counts)
    if most <= cap:
        return
    unit = max(_common(np.abs([*take, *free])), most / 2**40)
    taken, freed = np.floor(take / unit + 1e-6), np.ceil(free / unit - 1e-6)
    stricter = np.maximum(taken * unit - take, 0) + np.maximum(free - freed * unit, 0)
    room = math.floor((cap + float(stricter @ counts)) / unit * (1 + _NOISE))
    times, changes = [], []
    for t, a, b in zip(mine.tolist(), taken.astype(int), freed.astype(int), strict=True):
        for x, y in zip(starts[t], ends[t], strict=True):
            moved = [(x, int(a)), (y, -int(b))]
            times += [when for when, change in moved if change]
            changes += [change for _, change in moved if change]
    model.add_reservoir_constraint(times, changes, sum(c for c in changes if c < 0), room)


__all__ = ["Solved", "available", "relaxed", "solve"]
