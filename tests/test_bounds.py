"""Lower bounds are below what orders reach: slices, ranks without work, floats."""

import pytest

from hocket import Costs, build, loads, simulate
from hocket.ir import linear
from hocket.planner import Request, plan
from hocket.search.bounds import lower_bounds, work_bound
from hocket.search.problem import FULL, problem
from hocket.search.problem_bounds import best_bound


@pytest.mark.parametrize("name", ["seq1f1b", "seq1f1b-interleaved", "terapipe"])
@pytest.mark.parametrize("factors", [(0.5, 0.5), (1, 3), (0.25, 0.5), (2, 1)])
def test_slices_of_a_sequence_count_with_their_factors(name, factors):
    for p, m in ((2, 2), (4, 4), (4, 8)):
        s = build(name, p=p, m=m, slices=2)
        costs = Costs(F=3, I=2, W=2, latency=1, slice=factors)
        t = simulate(s, costs)
        assert all(b.value <= t.makespan for b in lower_bounds(s, costs))
        assert work_bound(s, costs).value <= t.span


def test_half_slices_of_one_sequence_take_seven_and_a_half():
    costs = Costs(slice=(0.5, 0.5))
    s = build("seq1f1b", p=4, m=1, slices=2)
    assert simulate(s, costs).makespan == 7.5
    assert max(b.value for b in lower_bounds(s, costs)) == 7.5


def test_a_plan_in_slices_is_not_below_its_bound():
    found = plan(Request(p=4, m=1, slices=2, shapes=("linear",), v=(1,), search=False))
    assert found.bound.value <= found.value
    assert found.scope == ("of these slots" if found.schedule.placement.slices > 1 else found.scope)


def test_a_rank_that_runs_nothing_bounds_nothing():
    s = loads("# hocket 1\nname x\npath 0: 0 | 0\npath 1: 1 |\n0: 0F0 0I0 0W0\n1:\n")
    assert simulate(s).makespan == 3
    assert [b.value for b in lower_bounds(s, Costs())] == [3, 3]


def test_a_limit_of_one_in_flight_is_proven_for_float_costs():
    costs = Costs(F=1.0, B=2.0, I=1.0, W=1.0)
    asked = problem(linear(3, 4), costs, FULL, in_flight=[1] * 3)
    assert best_bound(asked, "makespan").value == pytest.approx(36, rel=1e-12)
    found = plan(Request(p=3, m=4, costs=costs, in_flight=1, split=False, shapes=("linear",),
                         v=(1,), named=False, search=False))  # fmt: skip
    assert found.value == 36 and found.gap == 0 and found.proven
