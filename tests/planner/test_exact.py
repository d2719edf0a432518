"""The bound of each rank alone: never above an order, often what the whole takes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket import Bytes, Costs
from hocket.ir import linear, vshape
from hocket.planner import Request, plan
from hocket.planner.bound import best_bound
from hocket.planner.exact import relaxed
from hocket.planner.problem import SPLIT, WHOLE, problem
from hocket.planner.search import Arena

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
    asked = problem(shape(p, m), costs, SPLIT if split else WHOLE, in_flight=[cap] * p)
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
    asked = Request(p=4, m=8, costs=Costs(bytes=HALVES), memory=4, shapes=("v",), v=(2,),
                    split=True, named=False, threads=1, solver=True)  # fmt: skip
    found = plan(asked)
    assert found.value == found.bound.value == 29.5 and found.proven
    assert found.bound.argument.startswith("rank 3 alone cannot be faster")
