"""The exact solver and its bounds: never above the best order there is, whatever the costs."""

import os
import random
import signal
import threading
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket import Bytes, Costs
from hocket.ir import linear, mirrored, vshape
from hocket.planner import Request, plan
from hocket.search.exact import relaxed, solve
from hocket.search.problem import FULL, SPLIT, problem
from hocket.search.problem_bounds import best_bound
from hocket.search.search import Arena, Found

pytest.importorskip("ortools")
HALVES = Bytes(activation=2, held=1)  # I frees half


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from([linear, vshape]), st.integers(2, 3), st.integers(2, 3), st.booleans(),
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.sampled_from([0, 1, 2.5]),
    st.integers(2, 5), st.sampled_from(["makespan", "span"]),
)  # fmt: skip
def test_a_rank_alone_is_never_slower_than_an_order_of_all(
    shape, p, m, split, f, i, w, latency, cap, objective
):
    costs = Costs(F=f, I=i, W=w, latency=latency)
    asked = problem(shape(p, m), costs, SPLIT if split else FULL, in_flight=[cap] * p)
    arena = Arena(asked, objective)
    best = min(
        arena.anneal(x.order, moves=1000, hot=0.3, cold=0.03, goal=-1, seed=1).cost
        for x in arena.starts()[:3]
    )
    serial = arena.cost(arena.serial())
    low, _ = relaxed(asked, objective, top=serial, seconds=2, threads=1)
    assert 0 < low <= best + 1e-6 * best


def test_the_middle_rank_of_a_v_proves_the_whole_optimal():
    asked = problem(vshape(4, 8), Costs(bytes=HALVES), SPLIT, room=[8] * 4)
    assert best_bound(asked, "makespan").value == 55
    low, why = relaxed(asked, "makespan", top=59, seconds=20, threads=1)
    assert low == 59
    assert why == (
        "rank 3 alone cannot be faster with its memory limit and the shortest ways between its "
        "actions, found by the exact solver"
    )


def test_a_plan_with_the_solver_is_proven_by_that_bound():
    asked = Request(p=4, m=8, costs=Costs(bytes=HALVES, per="rank"), memory=4,
                    shapes=("v",), v=(2,), split=True, named=False, threads=1,
                    solver=True)  # fmt: skip
    found = plan(asked)
    assert found.value == found.bound.value == 29.5 and found.proven
    assert found.bound.argument.startswith("rank 3 alone cannot be faster")


# --- floats: no bound above the best of all orders, no exception ---------------------------------

CRASH = Costs(
    F=(1.7323252171152717, 0.9796760041895085), I=(0.6603166018723396, 1.271537376582874),
    W=(0.920163369818581, 0.30055459942696106), latency=1.0,
)  # fmt: skip


def every_order(asked):
    """All orders of a small problem in which each queue keeps its own needs."""

    def lines(queue):
        types = np.flatnonzero(asked.queue_of == queue).tolist()
        n = int(asked.counts[types].sum())
        grown = [()]
        for _ in range(n):
            grown = [(*line, t) for line in grown for t in types if may_follow(line, t)]
        return grown

    def may_follow(line, t):
        needs = asked.need[t, : asked.needs[t]][asked.own[t, : asked.needs[t]]]
        k = line.count(t)
        return k < asked.counts[t] and all(line.count(u) > k for u in needs)

    queues = [lines(q) for q in range(len(asked.queues) - 1)]
    for parts in product(*queues):
        yield np.array([t for part in parts for t in part])


def floats(seed):
    """A tiny problem with times and limits that are no multiples of anything, and its objective."""
    rng = random.Random(seed)
    unit, digits = rng.choice([1e-6, 1e-4, 1.0, 1e6]), rng.choice([4, 17, 17])

    def some(low, high, n):
        return tuple(float(f"{rng.uniform(low, high) * unit:.{digits}g}") for _ in range(n))

    shape, m, split = rng.choice([
        (linear, 2, True), (linear, 3, True), (linear, 3, False), (vshape, 2, False),
        (mirrored, [0, 1, 0], False),
    ])  # fmt: skip
    placement = shape(2, m)
    n = placement.n_stages
    took = tuple(rng.uniform(1, 3) * rng.choice([1e-3, 1.0, 1e9]) for _ in range(n))
    held = tuple(x * rng.uniform(0.3, 1.1) for x in took)
    costs = Costs(
        F=some(0.2, 3, n), I=some(0.2, 3, n), W=some(0, 3, n), latency=some(0, 2, 1)[0],
        bytes=Bytes(activation=took, held=held),
    )  # fmt: skip
    most = [sum(max(took[s], held[s]) for s in (q, n - 1 - q)) for q in range(2)]
    limit = rng.choice([
        {}, {"in_flight": [rng.choice([1, 2, 2.5]) * n / 2] * 2},
        {"room": [x * rng.uniform(1, 3) for x in most]},
    ])  # fmt: skip
    asked = problem(placement, costs, SPLIT if split else FULL, **limit)
    return asked, rng.choice(["makespan", "span"])


@pytest.mark.parametrize("seed", range(40))
def test_no_bound_of_float_costs_is_above_the_best_of_all_orders(seed):
    asked, objective = floats(seed)
    arena = Arena(asked, objective)
    found = [Found(arena.cost(order), order) for order in every_order(asked)]
    costs = [f.cost for f in found if f.cost < float("inf")]
    best, start = min(costs), found[[f.cost for f in found].index(max(costs))]
    known = float(best_bound(asked, objective).value)
    low, _ = relaxed(asked, objective, top=start.cost, seconds=1, threads=1)
    assert 0 < low <= best * (1 + 1e-12)
    for bound in (0.0, known, low):
        solved = solve(asked, objective, start, bound=bound, seconds=2, threads=1)
        assert bound * (1 - 1e-12) <= solved.bound <= best * (1 + 1e-12)
        assert best <= solved.found.cost <= start.cost
        assert solved.found.cost == arena.cost(solved.found.order)
        assert solved.proven == (solved.bound == solved.found.cost)
        if objective == "makespan":
            assert solved.found.cost <= best * (1 + 1e-6)


def test_the_solver_ends_without_an_error_where_floats_are_no_multiples_of_a_step():
    asked = Request(p=2, m=3, costs=CRASH, in_flight=1, shapes=("linear",), v=(1,), split=True,
                    named=False, search=False, threads=1, solver=True)  # fmt: skip
    found = plan(asked)
    assert found.value * (1 - 1e-6) < found.bound.value <= found.value


def test_float_costs_with_few_digits_are_proven():
    costs = Costs(F=(4.9051, 4.1536, 3.83018), I=(6.8897, 7.45066, 6.7653),
                  W=(4.9265, 4.30571, 5.12484), latency=0.032)  # fmt: skip
    asked = Request(p=3, m=4, costs=costs, in_flight=2, shapes=("linear",), v=(1,), split=True,
                    named=False, search=False, threads=1, solver=True)  # fmt: skip
    found = plan(asked)
    assert found.value == found.bound.value and found.proven


def test_a_bound_that_is_not_a_whole_step_is_not_rounded_up():
    asked = problem(linear(2, 3), CRASH, SPLIT, in_flight=[1] * 2)
    arena = Arena(asked)
    start, best = arena.starts()[0], min(map(arena.cost, every_order(asked)))
    solved = solve(asked, "makespan", start, bound=best, seconds=5, threads=1)
    assert solved.bound == solved.found.cost == best and solved.proven


# --- a solver that gives nothing -----------------------------------------------------------------


def failing(monkeypatch, outcome):
    """Every run of the solver ends with this status or error."""
    from ortools.sat.python import cp_model

    def ended(self, model):
        if isinstance(outcome, BaseException):
            raise outcome
        return getattr(cp_model, outcome)

    monkeypatch.setattr(cp_model.CpSolver, "solve", ended)


@pytest.mark.parametrize("outcome", ["INFEASIBLE", "MODEL_INVALID", RuntimeError("no more")])
def test_a_solver_that_fails_leaves_the_order_and_its_bound(monkeypatch, outcome):
    asked = problem(linear(2, 3), CRASH, SPLIT, in_flight=[1] * 2)
    start = Arena(asked).starts()[0]
    failing(monkeypatch, outcome)
    solved = solve(asked, "makespan", start, bound=1.5, seconds=1, threads=1)
    assert solved == (start, 1.5, False)
    assert relaxed(asked, "makespan", top=start.cost, seconds=1, threads=1) == (0.0, "no work")


def test_an_order_of_the_solver_that_breaks_the_limit_is_not_taken(monkeypatch):
    asked = problem(linear(2, 3), Costs(F=1.5), SPLIT, in_flight=[1] * 2)
    arena = Arena(asked)
    start = arena.starts()[0]
    full = np.concatenate([np.repeat(np.flatnonzero(asked.queue_of == q), 3) for q in range(2)])
    assert arena.cost(full) == float("inf")
    monkeypatch.setattr("hocket.search.exact._Model._read", lambda self, solver: full)
    assert solve(asked, "makespan", start, bound=0, seconds=5, threads=1).found == start


def test_ctrl_c_while_the_solver_runs_leaves_the_plan_that_is_known():
    costs = Costs(F=(5.1, 4.2, 3.3, 7.6), I=(6.8, 7.4, 6.7, 5.9), W=(4.9, 4.3, 5.1, 4.6))
    asked = Request(p=4, m=12, costs=costs, in_flight=3, shapes=("v",), v=(2,), split=True,
                    objective="span", named=False, search=False, threads=1, solver=True,
                    time_limit=1, solver_time=600)  # fmt: skip
    stop = threading.Timer(3, os.kill, (os.getpid(), signal.SIGINT))
    stop.start()
    found = plan(asked)
    stop.cancel()
    assert found.interrupted and found.seconds < 300
    assert found.bound.value <= found.value
