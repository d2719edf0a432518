"""Plans against proven optima and published times; every answer fits and can run."""

import json
from dataclasses import replace
from math import isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket import Bytes, Costs, build, check, dumps, loads, simulate
from hocket.costs.scaling import join
from hocket.errors import PlanError, UsageError
from hocket.ir import linear, vshape
from hocket.planner import Request, plan
from hocket.planner.report import as_json, as_text
from hocket.planner.sensitivity import sensitivity
from hocket.search.compiled import kernels
from hocket.search.problem import FULL, SPLIT, problem
from hocket.search.problem_bounds import best_bound
from hocket.search.search import Arena, Search

pytestmark = pytest.mark.skipif(not kernels().compiled, reason="searches need numba to be fast")
LANES = Costs(F=(80, 92, 76, 84), I=(80, 92, 76, 84), W=(40, 46, 38, 42), p2p_overhead=(10, 10))
SKEW = Costs(F=20, I=24, W=14, latency=3, per="rank")


def asked(shape, **more):
    settings = {"p": 4, "m": 8, "shapes": (shape,), "named": False, "rounds": 2, "time_limit": 600}
    settings["v"] = (2,) if shape == "v" else (1,)
    return Request(**(settings | more))


@pytest.mark.parametrize(
    ("limit", "split", "makespan"),
    [((4, 3, 2, 1), False, 2820), (None, False, 2740), (4, True, 2488), (None, True, 2320)],
)
def test_blocking_lanes_reach_the_proven_optimum(limit, split, makespan):
    found = plan(asked("linear", costs=LANES, in_flight=limit, split=split))
    assert found.value == makespan
    assert check(found.schedule).ok


def test_two_directions_reach_2240_and_27():
    request = asked("mirrored", costs=LANES, copies=2, split=False, in_flight=5)
    assert plan(request).value == 2240
    request = asked("mirrored", costs=Costs(F=1, I=1, W=1), copies=2, split=False)
    assert plan(request).value == 27


@pytest.mark.parametrize(("cap", "makespan"), [(2, 59), (3, 53), (3.5, 52), (4, 51)])
def test_v_placement_at_unit_costs_reaches_the_proven_optimum(cap, makespan):
    found = plan(asked("v", costs=Costs(F=2, I=2, W=2, per="rank"), in_flight=cap, split=True))
    assert found.value == makespan
    assert max(r.peak_in_flight for r in simulate(found.schedule).ranks) <= 2 * cap


def test_v_placement_with_skewed_costs_goes_below_the_published_807():
    found = plan(asked("v", costs=SKEW, in_flight=2, split=True, rounds=3))
    assert found.value <= 734


@pytest.mark.parametrize(("cap", "span"), [(8, 1310405), (16, 1152599)])
def test_the_zero_bubble_papers_first_row_is_reached_and_proven(cap, span):
    costs = Costs(F=18522, I=18086, W=9337, latency=601,
                  bytes=Bytes(activation=201216, held=201216 - 127488))  # fmt: skip
    found = plan(asked("linear", p=8, m=24, costs=costs, memory=cap * 201216, split=True,
                       objective="span"))  # fmt: skip
    assert found.value == span and found.gap == 0


def test_limits_of_single_ranks_are_held_without_a_deadlock():
    for limits, known in (((4, 3, 2, 1), 33), ((3, 3, 2, 1), 48), ((3, 2, 2, 1), 51),
                          ((2, 3, 2, 1), 69), ((1, 1, 1, 1), 96)):  # fmt: skip
        found = plan(asked("linear", in_flight=limits, split=False, rounds=1))
        assert found.value <= known
        t = simulate(found.schedule)
        held = [r.peak_in_flight for r in t.ranks]
        assert all(a <= b for a, b in zip(held, limits, strict=True))


def test_layers_are_cut_for_the_schedule():
    layers = (1, *(5,) * 14, 10)
    request = Request(p=4, m=16, costs=Costs(F=layers, I=layers, W=layers, per="layer"),
                      shapes=("linear",), v=(1,), split=False, named=False, rounds=1)  # fmt: skip
    found = plan(request)
    assert found.layers == (5, 4, 4, 3)
    assert found.value == 1143  # 235.8 of 1f1b is 1179


def test_recomputation_is_chosen_where_memory_asks_for_it():
    from hocket.planner.recompute import FULL

    costs = Costs(bytes=Bytes(activation=10, message=1))
    ask = asked("linear", costs=costs, memory=25, recompute=(FULL,), split=False, rounds=1)
    found, without = plan(ask), plan(asked("linear", costs=costs, memory=25, split=False, rounds=1))
    assert "full" in found.recompute and found.value < without.value
    assert max(r.peak_bytes for r in simulate(found.schedule, found.costs).ranks) <= 25


def test_every_registered_schedule_is_told_why_it_loses():
    found = plan(Request(p=4, m=8, v=(1, 2), in_flight=4, time_limit=2, search=False))
    why = {e.name.partition(":")[0]: e.why for e in found.entrants}
    assert why["gpipe"] == "holds 8 in flight on rank 3; the limit is 4"
    assert why["chimera"] == "needs 2 copies of the weights; allowed: 1"
    assert found.value == 25.5 and found.proven
    text = as_text(found)
    assert "this is optimal" in text and "33.3% slower" not in text.splitlines()[0]
    told = json.loads(json.dumps(as_json(found)))
    assert told["proven"] and loads(told["sched"]) == found.schedule


def test_nothing_fits_names_the_nearest_setting_and_what_it_needs():
    with pytest.raises(PlanError) as caught:
        plan(asked("linear", in_flight=0.5))
    assert str(caught.value).splitlines()[1] == (
        "  nearest: linear p=4, split backward: one microbatch alone needs 1 in flight on rank 0; "
        "there is room for 0.5"
    )


def test_the_answer_depends_on_the_seed_not_on_the_threads():
    orders = [
        dumps(
            plan(
                asked("v", costs=SKEW, in_flight=2.5, split=True, rounds=1, seed=7, threads=n)
            ).schedule
        )
        for n in (1, 2)
    ]
    assert orders[0] == orders[1]


def test_an_interrupt_gives_the_best_so_far():
    def stop(now):
        if now.what != "candidates":
            raise KeyboardInterrupt

    found = plan(asked("v", costs=SKEW, in_flight=2.5, time_limit=60), progress=stop)
    assert check(found.schedule).ok and found.seconds < 30


def test_a_wrong_objective_is_refused():
    with pytest.raises(UsageError) as caught:
        Request(p=4, m=8, objective="speed")
    assert str(caught.value) == ("objective is 'speed'; it must be one of makespan, span, period")


def test_the_period_of_zb_v_at_unit_costs_is_its_work():
    from hocket.planner.measures import period

    assert period(build("zb-v", p=4, m=8), Costs()) == 48


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([linear, vshape]), st.integers(2, 3), st.integers(2, 5), st.booleans(),
    st.integers(1, 4), st.integers(1, 4), st.integers(0, 4), st.integers(0, 3),
    st.integers(2, 6), st.sampled_from(["makespan", "span"]),
)  # fmt: skip
def test_no_order_goes_below_the_bound_and_times_are_those_of_simulate(
    shape, p, m, split, f, i, w, latency, cap, objective
):
    costs = Costs(F=f, I=i, W=w, latency=latency)
    a = problem(shape(p, m), costs, SPLIT if split else FULL, in_flight=[cap] * p)
    arena = Arena(a, objective)
    bound = best_bound(a, objective).value
    for found in arena.starts():
        better = arena.anneal(found.order, moves=2000, hot=0.3, cold=0.03, goal=-1, seed=3)
        assert better.cost <= found.cost
        schedule = a.schedule(better.order, "x")
        check(schedule).raise_if_bad()
        t = simulate(schedule, costs)
        assert a.ticks.value(better.cost) == (t.makespan if objective == "makespan" else t.span)
        assert a.ticks.value(better.cost) >= bound
        assert max(r.peak_in_flight for r in t.ranks) <= cap


def test_a_long_order_takes_its_steady_state_from_a_short_one():
    a = problem(vshape(4, 64), Costs(F=149, I=147, W=100, latency=5), SPLIT, in_flight=[8] * 4)
    few = problem(vshape(4, 12), Costs(F=149, I=147, W=100, latency=5), SPLIT, in_flight=[8] * 4)
    from hocket.search.unroll import shortened, unrolled

    long = a.order_of(build("zb-v", p=4, m=64))
    arena, small = Arena(a), Arena(few)
    short = [o for o in shortened(a, long, arena.begin(long), few) if isfinite(small.cost(o))]
    assert short
    again = [
        o for o in unrolled(few, short[0], small.begin(short[0]), a) if arena.cost(o) < float("inf")
    ]
    assert min(arena.cost(o) for o in again) <= arena.cost(long)


def test_the_exact_solver_proves_what_the_search_found():
    pytest.importorskip("ortools")
    found = plan(asked("v", p=3, m=6, costs=SKEW, in_flight=2.5, split=True, solver=True,
                       rounds=2))  # fmt: skip
    assert found.value == 422 and found.proven
    assert found.bound.argument.endswith("by the exact solver")  # of all, or of one rank alone


def test_search_improves_on_its_starts():
    a = problem(vshape(4, 8), Costs(F=149, I=147, W=100, latency=5), SPLIT, in_flight=[5] * 4)
    from concurrent.futures import ThreadPoolExecutor

    search = Search(Arena(a), Arena(a).starts(), goal=-1, seed=1)
    before = search.best.cost
    with ThreadPoolExecutor(2) as workers:
        search.round(workers)
    assert search.best.cost < before


# --- ranks that share cores -----------------------------------------------------------------------

CROWD = Costs(F=(29, 29, 29, 31), I=(37,) * 4, W=(25,) * 4, B=(58, 58, 56, 58), cores=2, latency=1)


def test_a_plan_for_shared_cores_is_timed_with_them_and_loses_to_none_of_the_named():
    found = plan(Request(p=4, m=8, costs=CROWD, in_flight=4, rounds=1, time_limit=600, margin=0))
    assert found.value == simulate(found.schedule, found.costs).makespan
    assert found.costs.cores == 2
    named = simulate(build("1f1b", p=4, m=8), CROWD).makespan
    assert found.value <= named
    assert all(found.value <= e.value for e in found.entrants if e.value is not None)
    assert float(found.bound.value) <= float(found.value)
    assert "on 2 cores" in found.bound.argument


def test_where_splitting_costs_more_than_idle_cores_lose_the_plan_keeps_backwards_whole():
    dear = replace(CROWD, W=(40,) * 4)
    alone = plan(Request(p=4, m=8, costs=replace(dear, cores=None), in_flight=4, rounds=1))
    shared = plan(Request(p=4, m=8, costs=dear, in_flight=4, rounds=1))
    assert not shared.schedule.has_split_backward
    assert alone.value < shared.value


def test_within_a_margin_the_simplest_order_is_the_plan():
    request = Request(p=4, m=8, costs=CROWD, in_flight=4, rounds=1, time_limit=600)
    best, simple = plan(replace(request, margin=0)), plan(replace(request, margin=0.06))
    assert best.value < simple.value <= best.value * 1.06
    assert simple.schedule.placement.n_stages == 4 and not simple.schedule.has_split_backward
    assert simple.value <= simulate(build("1f1b", p=4, m=8), CROWD).makespan
    assert not simple.proven
    faster = [e.why for e in simple.entrants if e.value is not None and e.value < simple.value]
    assert faster and all("faster, but within the margin" in why for why in faster)


# --- what other settings give ---------------------------------------------------------------------


def test_faster_links_never_give_a_slower_plan():
    costs = Costs(F=101, I=97, W=53, latency=30, p2p_overhead=(3, 2), per="rank")
    found = plan(asked("v", costs=costs, in_flight=3, split=True, rounds=6))
    rows = {c.what: c for c in sensitivity(found, seconds=0.1).changes}
    assert rows["links are 10 % faster"].value <= found.value
    assert rows["one more in flight per rank"].value <= found.value
    more = rows["one more microbatch"]
    assert more.per_microbatch == float(more.value) / 9


def test_a_layer_moved_is_told_with_the_order_kept():
    layers = Costs(F=(3, 2, 2, 2, 2, 5), latency=1, per="layer")
    found = plan(Request(p=2, m=4, costs=layers, shapes=("linear",), v=(1,), rounds=1))
    rows = {c.what: c.value for c in sensitivity(found, seconds=0.1).changes}
    assert found.layers == (4, 2) or found.layers == (3, 3)
    a, b = found.layers
    moved = {
        "a layer of stage 0 in stage 1": join(layers, (a - 1, b + 1)),
        "a layer of stage 1 in stage 0": join(layers, (a + 1, b - 1)),
    }
    for what, costs in moved.items():
        assert rows[what] == simulate(found.schedule, costs).makespan
    assert rows["links are 10 % faster"] <= found.value
    assert "one more microbatch" in rows


def test_a_gigabyte_is_only_added_to_limits_in_bytes():
    small = Costs(bytes=Bytes(activation=1), per="rank")
    found = plan(Request(p=2, m=4, costs=small, memory=8, rounds=1, search=False))
    assert "1 GB more per rank" not in {c.what for c in sensitivity(found, seconds=0.1).changes}
    large = Costs(bytes=Bytes(activation=1e9), per="rank")
    found = plan(Request(p=2, m=4, costs=large, memory=8e9, rounds=1, search=False))
    assert "1 GB more per rank" in {c.what for c in sensitivity(found, seconds=0.1).changes}


def test_two_directions_fit_where_only_one_microbatch_may_be_in_flight():
    request = asked("mirrored", p=2, m=2, copies=2, split=False, in_flight=1)
    assert plan(request).value == 11


def test_only_one_row_is_the_plan_where_others_are_as_good():
    found = plan(Request(p=2, m=3, in_flight=2, rounds=2))
    words = [e.why.partition(";")[0] for e in found.entrants if e.value == found.value]
    assert sorted(words)[-1] == "the plan" and words.count("the plan") == 1
    assert len({name for name, _, _ in found.finalists}) == len(found.finalists)


def test_sums_of_floats_in_another_order_are_still_optimal():
    found = plan(asked("linear", costs=Costs(F=0.1, I=0.1, W=0.1), p=3, m=9, split=True))
    assert found.value != found.bound.value or found.gap == 0
    assert found.gap == 0 and found.proven
    assert "this is optimal" in as_text(found)
