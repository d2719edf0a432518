"""Unequal microbatches and ranks: `microbatch` and `speed` in the costs."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import combinations, permutations

import pytest

from hocket import Costs, Request, build, compiled, plan, simulate
from hocket.costs import costs_from, costs_toml
from hocket.costs.partition import partition
from hocket.costs.table import CostTable
from hocket.engine import along, walk
from hocket.errors import CostError, PlanError
from hocket.graph import graph
from hocket.search.bounds import lower_bounds

HALVES = Costs(F=1, I=1, W=1, microbatch=(1, 4, 1, 1), speed=(1, Fraction(1, 2)))


@pytest.mark.parametrize(
    ("p", "factors", "best", "ascending", "worst"),
    [
        (3, (1, 1, 1, 1, 1, 4), 48, 51, 51),
        (3, (1, 1, 1, 1, 3, 3), 44, 48, 60),
    ],
)
def test_1f1b_of_unequal_microbatches_takes_the_published_times(p, factors, best, ascending, worst):
    s = build("1f1b", p=p, m=6)
    times, bounds = {}, set()
    for order in set(permutations(factors)):
        costs = Costs(F=1, I=1, W=1, microbatch=order)
        times[order] = simulate(s, costs).makespan
        bounds.add(max(b.value for b in lower_bounds(s, costs)))
    assert (min(times.values()), max(times.values())) == (best, worst)
    assert times[tuple(sorted(factors))] == ascending
    assert max(bounds) <= best


@pytest.mark.skipif(not compiled.is_compiled(), reason="numba is not installed")
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "interleaved", "chimera"])
def test_the_compiled_pass_equals_the_graph_with_factors(name):
    s = build(name, p=4, m=8)
    factors = tuple(Fraction(k + 3, 4) for k in range(8))
    table = CostTable(Costs(latency=1, microbatch=factors, speed=(1, 2, 3, Fraction(1, 3))), s)
    slow = along(graph(s), table.occupied(), table.wires)
    with compiled.forced(True):
        fast = walk(s, table.table, table.occupied(), table.wires)
    assert slow is not None and fast is not None
    assert all(map(_equal, slow[:2], fast[:2]))
    assert table.ticks.exact
    assert float(table.ticks.value(slow.end.max())) == pytest.approx(
        simulate(s, replace(table.costs, microbatch=tuple(map(float, factors)))).makespan
    )


def _equal(a, b):
    return (a == b).all()


def test_factors_of_one_change_nothing_and_a_slow_rank_is_as_slow_as_its_speed():
    s, plain = build("zb-v", p=4, m=8), Costs(F=2, I=3, W=1, latency=1)
    t = simulate(s, replace(plain, microbatch=(1,) * 8, speed=(1,) * 4))
    assert (t.start == simulate(s, plain).start).all()
    half = replace(plain, latency=0, speed=(Fraction(1, 2),) * 4)
    assert simulate(s, half).makespan == 2 * simulate(s, replace(plain, latency=0)).makespan


def test_costs_files_hold_microbatch_and_speed():
    data = {"microbatch": [1, 2.5], "speed": [1, 0.5], "per": "stage"}
    costs = costs_from(data)
    assert (costs.microbatch, costs.speed) == ((1, 2.5), (1, 0.5))
    assert "microbatch = [1, 2.5]\nspeed = [1, 0.5]" in costs_toml(costs)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"microbatch": (1, 2)}, "microbatch has 2 values, but the schedule has 4 microbatches"),
        ({"speed": (1, 2, 3)}, "speed has 3 values, but the schedule has 2 ranks; give one"),
        ({"speed": (1, 0)}, "speed is 0; it must be above 0"),
        ({"microbatch": 3}, "microbatch is 3; it must be a list with one factor per microbatch"),
        ({"speed": (1, 2), "FB": 3}, "FB is one number, which microbatch and speed do not change"),
    ],
)
def test_costs_that_do_not_fit_are_refused_in_one_sentence(more, message):
    with pytest.raises(CostError) as refused:
        simulate(build("1f1b", p=2, m=4), Costs(**more))
    assert str(refused.value).startswith(message)


def test_a_plan_is_optimal_with_speed_and_refuses_microbatch():
    found = plan(Request(p=2, m=4, v=(1,), time_limit=1, costs=replace(HALVES, microbatch=None)))
    exact = simulate(found.schedule, found.costs).makespan
    assert found.makespan == exact >= found.bound.value
    with pytest.raises((CostError, PlanError), match="takes all microbatches to be alike"):
        plan(Request(p=2, m=4, v=(1,), time_limit=1, costs=HALVES))


def test_layers_are_cut_for_ranks_of_unequal_speed_as_well_as_by_brute_force():
    loads, speed = (3, 1, 4, 1, 5, 9, 2, 6), (1, 3, Fraction(1, 2))

    def largest(ends):
        cuts = zip((0, *ends), (*ends, len(loads)), strict=True)
        return max(Fraction(sum(loads[a:b])) / x for (a, b), x in zip(cuts, speed, strict=True))

    best = min(map(largest, combinations(range(1, len(loads)), 2)))
    a, b, _ = partition(loads, 3, speed=speed)
    assert largest((a, a + b)) == best
    with pytest.raises(PlanError, match="one stage per rank only"):
        partition(loads, 4, [(0, 3), (1, 2)], speed=(1, 2))
