"""Chains of the search: what they tell of an order is what the order takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hocket import Costs, simulate
from hocket.checker import check
from hocket.ir import linear, vshape
from hocket.planner.measures import measure
from hocket.search import annealing, kernel, listing, search
from hocket.search.compiled import kernels
from hocket.search.problem import SPLIT, Problem, problem
from hocket.search.search import Arena

pytestmark = pytest.mark.skipif(not kernels().compiled, reason="searches need numba to be fast")

COSTS = {
    "units": Costs(F=1, I=1, W=1),
    "whole": Costs(F=7, I=9, W=4, latency=2),
    "floats": Costs(F=0.3, I=0.37, W=0.11, latency=0.013),
    "instant": Costs(F=(0, 1, 0, 1), I=(1, 0, 0, 0), W=0),
}


def asked(costs: Costs) -> Problem:
    v = 1 if isinstance(costs.F, tuple) else 2
    placement = linear(4, 6) if v == 1 else vshape(4, 6)
    return problem(placement, costs, SPLIT, in_flight=[3 * v] * 4)


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("name", COSTS)
def test_the_cost_a_chain_tells_is_that_of_its_order(name: str, objective: str) -> None:
    costs = COSTS[name]
    arena = Arena(asked(costs), objective)
    for seed in range(8):
        for focus in (0.5, 0.8):
            found = arena.anneal(
                arena.serial(), moves=3000, hot=0.5, cold=0.05, goal=-1.0, seed=seed, focus=focus
            )
            made = arena.problem.schedule(found.order, "made")
            check(made).raise_if_bad()
            told = found.cost / arena.problem.ticks.scale
            real = measure(simulate(made, costs), costs, objective)
            assert told == pytest.approx(float(real), rel=1e-12)


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_a_chain_is_the_same_compiled_or_not(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(asked(COSTS["whole"]), objective)
    arena.problem.__dict__["mixes"] = True  # all moves
    order = arena.serial()
    made = arena.anneal(order, moves=1500, hot=0.3, cold=0.03, goal=-1.0, seed=5)
    plain = {name: f for module in (kernel, annealing, listing) for name, f in vars(module).items()}
    monkeypatch.setattr(search, "kernels", lambda: SimpleNamespace(**plain))
    again = arena.anneal(order, moves=1500, hot=0.3, cold=0.03, goal=-1.0, seed=5)
    assert made.cost == again.cost
    assert made.order.tolist() == again.order.tolist()
