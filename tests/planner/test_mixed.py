"""Plans that mix full and split backwards: against all orders there are of small instances."""

import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product

import pytest

from hocket import Bytes, Costs, check, dumps, loads, simulate
from hocket.ir import Kind, linear
from hocket.lower import merge_backward
from hocket.planner import Request, plan
from hocket.planner.report import as_text
from hocket.search.compiled import kernels
from hocket.search.problem import FULL, SPLIT, problem
from hocket.search.problem_bounds import best_bound
from hocket.search.search import Arena, Search

quick = pytest.mark.skipif(not kernels().compiled, reason="searches need numba to be fast")
CASE = Costs(F=10, I=12, W=12, B=20)  # a full backward is shorter than its halves


@cache
def lines(stage, m):
    """Every order of one stage in which each backward is full or split, kinds in turn."""
    out = []
    for full in product((True, False), repeat=m):
        grown = [((), 0, 0, frozenset())]
        for _ in range(2 * m + sum(not x for x in full)):
            grown = [x for line in grown for x in _longer(stage, m, full, *line)]
        out += [line for line, *_ in grown]
    return out


def _longer(stage, m, full, line, f, b, owed):
    if f < m:
        yield (*line, (Kind.F, stage, f)), f + 1, b, owed
    if b < f and full[b]:
        yield (*line, (Kind.B, stage, b)), f, b + 1, owed
    if b < f and not full[b]:
        yield (*line, (Kind.I, stage, b)), f, b + 1, owed | {b}
    for mb in owed:
        yield (*line, (Kind.W, stage, mb)), f, b, owed - {mb}


def clocked(one, other, times, latency):
    """Makespan and span of two lines, timed by hand; None where they wait for ever."""
    end, clock, first, at = {}, [0, 0], [None, None], [0, 0]
    both, moved = (one, other), True
    while moved:
        moved = False
        for q, line in enumerate(both):
            while at[q] < len(line):
                kind, stage, mb = line[at[q]]
                start = clock[q]
                if (kind == Kind.F) == (stage == 1) and kind != Kind.W:
                    key = ("F" if kind == Kind.F else "grad", 1 - stage, mb)
                    if key not in end:
                        break
                    start = max(start, end[key] + latency)
                first[q] = start if first[q] is None else first[q]
                clock[q] = start + times[kind][stage]
                if kind != Kind.W:
                    end["F" if kind == Kind.F else "grad", stage, mb] = clock[q]
                at[q] += 1
                moved = True
    if at != [len(x) for x in both]:
        return None
    return max(clock), max(c - f for c, f in zip(clock, first, strict=True))


def held(line, sizes):
    """The most bytes that a line holds: the activations, or what is held between I and W."""
    activation, between, gradient = sizes
    now = most = 0
    for kind, *_ in line:
        now += activation * (kind == Kind.F) + gradient * (kind in (Kind.B, Kind.I))
        most = max(most, now)
        if kind in (Kind.B, Kind.I):
            now -= activation + gradient - between * (kind == Kind.I)
        now -= between * (kind == Kind.W)
    return most


def some(seed):
    """Costs, a limit and the optimum of two ranks for makespan and span, all orders tried."""
    rnd = random.Random(seed)
    m = 2 if seed % 3 else 3
    times = {kind: tuple(rnd.randint(1, 12) for _ in range(2)) for kind in (Kind.F, Kind.I, Kind.W)}
    times[Kind.B] = tuple(
        max(1, i + w - rnd.randint(-1, 6))
        for i, w in zip(times[Kind.I], times[Kind.W], strict=True)
    )
    sizes, latency = (4, rnd.choice([1, 4, 6]), rnd.choice([0, 1])), rnd.choice([0, 0, 3])
    room = rnd.choice([None, 8, 10, 13])
    fitting = [
        [x for x in lines(stage, m) if room is None or held(x, sizes) <= room] for stage in (0, 1)
    ]
    if m == 3:  # not all pairs: too many; a sample that any optimum may be in
        fitting = [rnd.sample(x, min(len(x), 250)) for x in fitting]
    found = [clocked(a, b, times, latency) for a in fitting[0] for b in fitting[1]]
    best = [min(x) for x in zip(*(x for x in found if x), strict=True)]
    costs = Costs(
        F=times[Kind.F], I=times[Kind.I], W=times[Kind.W], B=times[Kind.B], latency=latency,
        bytes=Bytes(activation=sizes[0], held=sizes[1], gradient=sizes[2]),
    )  # fmt: skip
    return m, costs, room, best


@pytest.mark.parametrize("seed", range(24))
def test_no_order_that_mixes_backwards_is_below_the_bound(seed):
    m, costs, room, best = some(seed)
    asked = problem(linear(2, m), costs, SPLIT, room=None if room is None else [room] * 2)
    for objective, value in zip(("makespan", "span"), best, strict=True):
        assert best_bound(asked, objective).value <= value


@quick
@pytest.mark.parametrize("seed", [x for x in range(24) if x % 3])
def test_two_ranks_reach_the_best_of_all_mixed_orders(seed):
    m, costs, room, best = some(seed)
    asked = problem(linear(2, m), costs, SPLIT, room=None if room is None else [room] * 2)
    for objective, value in zip(("makespan", "span"), best, strict=True):
        arena = Arena(asked, objective)
        search = Search(arena, arena.starts(), goal=value, seed=1)
        with ThreadPoolExecutor(1) as workers:
            for _ in range(3):
                if not search.done:
                    search.round(workers)
        made = asked.schedule(search.best.order, "mixed")
        assert check(made).ok
        assert getattr(simulate(made, costs), objective) == search.best.cost == value
        assert asked.order_of(made) is not None


@quick
@pytest.mark.parametrize("seed", [x for x in range(24) if x % 3])
def test_the_exact_solver_proves_the_best_of_all_mixed_orders(seed):
    pytest.importorskip("ortools")
    from hocket.search.exact import relaxed, solve

    m, costs, room, best = some(seed)
    asked = problem(linear(2, m), costs, SPLIT, room=None if room is None else [room] * 2)
    for objective, value in zip(("makespan", "span"), best, strict=True):
        start = Arena(asked, objective).starts()[-1]
        low, _ = relaxed(asked, objective, top=start.cost, seconds=2, threads=1)
        assert low <= value
        solved = solve(asked, objective, start, bound=low, seconds=10, threads=1)
        assert solved.proven and solved.found.cost == solved.bound == value
        made = asked.schedule(solved.found.order, "mixed")
        assert getattr(simulate(made, costs), objective) == value


# --- the planner ----------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize("split", [None, True])
def test_a_full_backward_on_one_rank_and_a_split_one_on_the_other_make_78(split):
    found = plan(Request(p=2, m=2, costs=CASE, shapes=("linear",), v=(1,), named=False, rounds=3,
                         split=split))  # fmt: skip
    assert found.value == 78
    assert found.schedule.has_split_backward and "0B0" in dumps(found.schedule)
    assert found.bound.value == 78
    assert "optimal" in as_text(found).splitlines()[3]


@quick
def test_the_solver_proves_78():
    pytest.importorskip("ortools")
    found = plan(Request(p=2, m=2, costs=CASE, shapes=("linear",), v=(1,), named=False, rounds=3,
                         solver=True))  # fmt: skip
    assert found.value == found.bound.value == 78 and found.proven


@quick
def test_full_backwards_alone_are_bounded_as_such_and_said_so():
    found = plan(Request(p=2, m=2, costs=CASE, shapes=("linear",), v=(1,), named=False, rounds=2,
                         split=False))  # fmt: skip
    assert found.value == found.bound.value == 90
    line = as_text(found).splitlines()[3]
    assert line.startswith("no order of this placement with full backwards is below 90")
    assert line.endswith("this is optimal")


def test_a_bound_of_full_backwards_is_none_of_all_orders():
    found = plan(Request(p=2, m=2, costs=CASE, shapes=("linear",), v=(1,), named=False,
                         search=False))  # fmt: skip
    assert found.bound.value <= found.floor.value <= 78


# --- merging --------------------------------------------------------------------------------------


def test_an_input_gradient_and_its_weight_gradient_side_by_side_are_merged():
    s = loads(
        "# hocket 1\nname x\npath 0: 0 1\n0: 0F0 0F1 0I0 0W0 0I1 0W1\n1: 1F0 1I0 1F1 1I1 1W0 1W1\n"
    )
    merged, count = merge_backward(s)
    assert count == 2
    assert check(merged).ok
    assert dumps(merged).splitlines()[-2:] == ["0: 0F0 0F1 0B0 0B1", "1: 1F0 1I0 1F1 1I1 1W0 1W1"]
    assert simulate(merged, CASE).makespan == 78
    assert merge_backward(merged) == (merged, 0)


def test_full_backwards_are_read_into_the_problem_of_split_ones_and_back():
    asked, whole = (problem(linear(2, 2), CASE, kinds) for kinds in (SPLIT, FULL))
    order = asked.order_of(whole.schedule(Arena(whole).serial(), "x"))
    made = asked.schedule(order, "x")
    assert not made.has_split_backward
    assert asked.order_of(made).tolist() == order.tolist()
    assert asked.peaks(order) == [1, 1]
