"""Orders with slots of two: they run, keep their limits, are never worse, and meet known optima."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket import Bytes, Costs, build, check, simulate
from hocket.ir import Kind, Schedule, kinds_of, linear, looped, mirrored, vshape
from hocket.planner import Request, plan
from hocket.search.compiled import kernels
from hocket.search.problem import FULL, SPLIT, problem, saves
from hocket.search.problem_bounds import best_bound
from hocket.search.search import Arena, Search

quick = pytest.mark.skipif(not kernels().compiled, reason="searches need numba to be fast")

SHAPES = {
    "linear": linear, "v": vshape, "looped": lambda p, m: looped(p, m, 2),
    "mirrored": lambda p, m: mirrored(2, [mb % 2 for mb in range(m)]),
}  # fmt: skip
RULES = ("max", {"scale": 0.7}, {"scale": 0.3}, 5)


def fusing(asked, objective="makespan", *, rounds, starts=()):
    arena = Arena(asked, objective)
    found = arena.starts([asked.order_of(s) for s in starts])
    if not found:
        return None
    bound = float(best_bound(asked, objective).value) * asked.ticks.scale
    search = Search(arena, found, goal=bound, seed=0)
    with ThreadPoolExecutor(1) as workers:
        for _ in range(rounds):
            if not search.done:
                search.round(workers)
    return search


@quick
@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(sorted(SHAPES)), st.integers(2, 3), st.integers(2, 5), st.booleans(),
    st.sampled_from(RULES), st.tuples(*[st.integers(1, 4)] * 4), st.integers(0, 2),
    st.integers(2, 6), st.booleans(), st.sampled_from(["makespan", "span"]),
)  # fmt: skip
def test_slots_of_two_run_keep_limits_and_are_never_worse_than_what_they_began_with(
    shape, p, m, split, fb, times, latency, cap, bytes_, objective
):
    f, i, w, b = times
    costs = Costs(F=f, I=i, W=w, B=b, FB=fb, latency=latency,
                  bytes=Bytes(activation=3, held=1, gradient=2))  # fmt: skip
    placement = SHAPES[shape](p, m)
    p = placement.p
    limit = {"room": [3 * cap + 2.0] * p} if bytes_ else {"in_flight": [cap] * p}
    alone = problem(placement, costs, SPLIT if split else FULL, **limit)
    asked = replace(alone, fused=True)
    starts = [alone.schedule(x.order, "x") for x in Arena(alone, objective).starts()[:2]]
    found = fusing(asked, objective, rounds=1, starts=starts)
    if not starts:
        return
    made = asked.schedule(found.best.order, "fused")
    check(made).raise_if_bad()
    timeline = simulate(made, costs)
    value = getattr(timeline, objective)
    assert asked.ticks.value(found.best.cost) == pytest.approx(float(value))
    assert all(value <= getattr(simulate(x, costs), objective) for x in starts)
    assert float(value) >= float(best_bound(asked, objective).value) - 1e-9
    held = "bytes" if bytes_ else "in_flight"
    assert max(timeline.peaks(held)) <= (3 * cap + 2 if bytes_ else cap)
    kinds = kinds_of(made.codes)[made.slots[:-1]][made.widths == 2]
    assert made.widths.max() <= 2 and (kinds == Kind.F).all()
    if not split:
        assert not made.has_split_backward
    again = fusing(asked, objective, rounds=1, starts=starts)
    assert asked.schedule(again.best.order, "fused") == made


# --- against all orders there are -----------------------------------------------------------------


def lines(m, stage):
    """Every order of one stage's F and B, each kind in order, with every choice of slots of two."""
    out = []
    for where in combinations(range(2 * m), m):
        kinds = [Kind.F if k in where else Kind.B for k in range(2 * m)]
        counts = {Kind.F: 0, Kind.B: 0}
        actions = []
        for kind in kinds:
            actions.append((kind, stage, counts[kind]))
            counts[kind] += 1
        out += slotted(actions)
    return out


def slotted(actions):
    """Every way to put neighbours of different kinds and microbatches into one slot."""
    if not actions:
        return [[]]
    out = [[[actions[0]], *rest] for rest in slotted(actions[1:])]
    kinds, _, mbs = zip(*actions[:2], strict=True)
    if len(actions) > 1 and kinds[0] != kinds[1] and mbs[0] != mbs[1]:
        out += [[actions[:2], *rest] for rest in slotted(actions[2:])]
    return out


@cache
def known_optimum(m, costs, cap):
    best = None
    for one in lines(m, 0):
        for other in lines(m, 1):
            made = Schedule.from_order("x", linear(2, m), [one, other])
            if check(made).ok:
                t = simulate(made, costs)
                if max(t.peaks("in_flight")) <= cap and (best is None or t.makespan < best):
                    best = t.makespan
    return best


@quick
@pytest.mark.parametrize(
    ("m", "cap", "costs", "optimum"),
    [
        (2, 2, Costs(F=2, I=2, W=1, FB="max"), 13),
        (2, 1, Costs(F=2, I=2, W=1, FB="max"), 20),
        (3, 2, Costs(F=2, I=2, W=1, FB="max", latency=1), 24),
        (3, 3, Costs(F=2, I=2, W=1, FB={"scale": 0.6}), 16),
    ],
)
def test_two_ranks_reach_the_best_of_all_orders(m, cap, costs, optimum):
    assert known_optimum(m, costs, cap) == pytest.approx(optimum)
    asked = problem(linear(2, m), costs, FULL, in_flight=[cap] * 2, fused=True)
    found = fusing(asked, rounds=3)
    assert float(asked.ticks.value(found.best.cost)) == pytest.approx(optimum)
    assert float(best_bound(asked, "makespan").value) <= optimum


# --- the planner ----------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize("fb", ["max", {"scale": 0.7}])
@pytest.mark.parametrize(
    ("name", "shape", "v", "cap"),
    [("1f1b-overlap", "linear", 1, 8), ("dualpipev", "v", 2, 5), ("dualpipe", "mirrored", 1, 5)],
)
def test_a_plan_with_cheaper_slots_of_two_is_below_the_registered_orders(name, shape, v, cap, fb):
    costs = Costs(F=10, I=12, W=7, FB=fb, per="rank")
    known = simulate(build(name, p=4, m=8), costs)
    assert max(known.in_flight) <= cap
    found = plan(Request(p=4, m=8, costs=costs, shapes=(shape,), v=(v,), copies=2, in_flight=cap,
                         rounds=2))  # fmt: skip
    assert found.value < known.makespan
    assert found.schedule.widths.max() == 2
    assert found.value == simulate(found.schedule, found.costs).makespan
    assert float(found.bound.value) <= float(found.value)


def test_a_bound_for_orders_without_slots_of_two_proves_nothing_where_these_are_cheaper():
    costs = Costs(F=4, I=3, W=3, FB="max")
    found = plan(Request(p=2, m=4, costs=costs, shapes=("linear",), v=(1,), named=False,
                         split=False, search=False))  # fmt: skip
    assert found.floor.value <= found.bound.value <= found.value
    assert found.value < 2 * 10 + 4 * 10  # nothing without them is below (m + p - 1)(F + B) = 50


@pytest.mark.parametrize(
    ("fb", "lane", "expected"),
    [("sum", None, False), ("max", None, True), ("max", (1, 1), True), ("sum", (1, 1), False),
     ({"scale": 1}, None, False), ({"scale": 0.9}, None, True), (3, None, False),
     (2, None, True)],
)  # fmt: skip
def test_only_fb_makes_slots_of_two_cheaper(fb, lane, expected):
    assert saves(Costs(FB=fb, p2p_overhead=lane)) is expected
