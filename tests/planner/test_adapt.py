"""The partition of layers and recomputation of a plan, against all others; what it claims."""

import re
import time
from itertools import combinations, product

import pytest

from hocket import Bytes, Costs, check, loads, simulate
from hocket.costs.scaling import join, split
from hocket.errors import HocketError, PlanError
from hocket.lower import recompute
from hocket.planner import Request, plan
from hocket.planner.curve import curve
from hocket.planner.recompute import FULL, NONE, Level, recomputed
from hocket.planner.report import as_json, as_text
from hocket.search.compiled import kernels

pytestmark = pytest.mark.skipif(not kernels().compiled, reason="searches need numba to be fast")

SELECTIVE = Level("selective", 0.1, 0.4)
HEAVY_ENDS = Costs(
    F=(1,) * 12, bytes=Bytes(static=(20, 20, *(1,) * 8, 20, 20), activation=0), per="layer"
)
TENS = Costs(F=10, I=10, W=10, bytes=Bytes(activation=100, message=10), per="rank")


def asked(p, m, shape="linear", **more):
    v = 1 if shape == "linear" else 2
    return Request(
        p=p,
        m=m,
        **{"shapes": (shape,), "v": (v,), "named": False, "rounds": 2, "time_limit": 600} | more,
    )


def best_of(requests):
    """The least value of those that something fits."""
    values = []
    for request in requests:
        try:
            values.append(plan(request).value)
        except HocketError:
            continue
    return min(values)


def test_a_cut_that_fits_is_found_where_the_most_even_one_does_not():
    found = plan(asked(4, 4, costs=HEAVY_ENDS, memory=30))
    assert found.layers == (1, 5, 5, 1) and found.value == 66
    assert max(r.peak_bytes for r in simulate(found.schedule, found.costs).ranks) <= 30


@pytest.mark.parametrize(
    ("times", "static", "activation", "memory"),
    [
        ((2, 5, 1, 2, 0, 1), (10, 10, 1, 2, 1, 2), 2, 35),
        ((1, 0, 2, 2, 2, 2), (2, 10, 1, 2, 10, 1), 1, 22),
        ((2, 1, 1, 1, 2, 1, 2, 5), 1, (5, 5, 1, 1, 2, 2, 5, 2), 20),
    ],
)
def test_no_cut_is_faster_than_the_one_that_is_planned(times, static, activation, memory):
    sizes = Bytes(static=static, activation=activation)
    layers = Costs(F=times, I=times, W=times, bytes=sizes, per="layer")
    settings = {"memory": memory, "split": True, "rounds": 1, "time_limit": 600}
    found = plan(asked(3, 3, costs=layers, **settings))
    n = len(times)
    cuts = [(a, b - a, n - b) for a, b in combinations(range(1, n), 2)]
    assert found.value <= best_of(asked(3, 3, costs=join(layers, cut), **settings) for cut in cuts)


@pytest.mark.parametrize("shape", ["linear", "v"])
def test_no_levels_of_single_stages_are_faster_than_those_that_are_planned(shape):
    stages = 3 if shape == "linear" else 4
    p, v, choices = (3, 1, (FULL, SELECTIVE)) if shape == "linear" else (2, 2, (SELECTIVE,))
    settings = {"memory": 210, "split": True, "time_limit": 600}
    found = plan(asked(p, 4, shape, costs=TENS, recompute=choices, **settings))
    every = product((NONE, *choices), repeat=stages)
    best = best_of(
        asked(p, 4, shape, costs=recomputed(split(TENS, v), levels), rounds=1, **settings)
        for levels in every
    )
    assert found.value <= best


def test_stages_recompute_by_themselves_and_318_is_reached_where_320_was_called_optimal():
    found = plan(asked(4, 8, costs=TENS, memory=210, recompute=(FULL, SELECTIVE), rounds=4))
    assert found.value <= 318


def test_r_ahead_of_its_gradient_is_printed_beside_and_is_never_worse():
    found = plan(asked(4, 8, costs=TENS, memory=210, recompute=(FULL,), rounds=1, search=False))
    assert FULL.name in found.recompute
    ahead = found.ahead
    assert ahead is not None and ahead.value < found.value
    timeline = simulate(ahead.schedule, ahead.costs)
    assert timeline.makespan == ahead.value and max(timeline.peak_bytes) <= 210
    assert f"with R ahead of the gradient in stages {ahead.stages[0]}: makespan" in as_text(found)
    assert loads(as_json(found)["ahead"]["sched"]).order == ahead.schedule.order
    full = [s for s, level in enumerate(found.recompute) if level == FULL.name]
    glued = simulate(recompute(found.schedule, full), ahead.costs)
    assert glued.makespan == found.value and max(glued.peak_bytes) <= 210
    assert plan(asked(4, 8, costs=TENS, recompute=(FULL,), search=False)).ahead is None


def test_what_was_chosen_is_not_called_proven_though_its_own_bound_is_met():
    found = plan(asked(4, 4, costs=HEAVY_ENDS, memory=30))
    assert found.gap == 0 and not found.proven and not as_json(found)["proven"]
    text = as_text(found)
    assert "no order of this placement with this partition of layers is below 66 " in text
    assert "this is the best of these; other choices were tried, not ruled out" in text
    assert "optimal" not in text
    drawn = curve(asked(4, 4, costs=HEAVY_ENDS), "memory", (30, 60))
    assert "optimal" not in str(drawn) and "bound met" in str(drawn)


def test_without_a_limit_nothing_is_recomputed_and_the_bound_is_one_of_all():
    found = plan(asked(4, 8, costs=TENS, recompute=(FULL,), split=True))
    assert found.proven and found.recompute == () and "this is optimal" in as_text(found)


def test_cuts_of_many_layers_for_many_actions_leave_the_time_limit_in_sight():
    layers = Costs(F=(0.2, *(1,) * 30, 2), I=1, W=1, latency=0.1, per="layer")
    began = time.process_time()
    found = plan(Request(p=8, m=64, costs=layers, time_limit=4, named=False))
    assert check(found.schedule).ok
    assert time.process_time() - began < 40  # about 5 on a free machine; it was 147


def test_an_interrupt_while_cuts_are_tried_gives_the_best_so_far(monkeypatch):
    from hocket.planner import partition_search as adapt

    tried = []
    score = adapt._Climb._score

    def stopping(self, setting):
        tried.append(setting)
        if len(tried) == 4:
            raise KeyboardInterrupt
        return score(self, setting)

    monkeypatch.setattr(adapt._Climb, "_score", stopping)
    found = plan(asked(4, 4, costs=HEAVY_ENDS, memory=30, time_limit=60))
    assert found.interrupted and not found.proven and check(found.schedule).ok
    assert sum(found.layers) == 12
    assert found.value == simulate(found.schedule, found.costs).makespan


# --- nothing fits ---------------------------------------------------------------------------------


def nothing(request):
    with pytest.raises(PlanError) as caught:
        plan(request)
    return str(caught.value).splitlines()


def test_static_memory_that_is_too_much_alone_is_told_with_the_limit():
    costs = Costs(bytes=Bytes(static=1000, activation=100, message=3), per="rank")
    lines = nothing(asked(4, 8, costs=costs, memory=900, split=False))
    assert lines[1] == (
        "  nearest: linear p=4, full backward: rank 0 needs 1.1 kB, 1 kB static and 100 B for "
        "one microbatch; the limit is 900 B"
    )
    assert lines[2] == (
        "  worth trying: -p 8: linear p=8, full backward: rank 0 needs 550 B, 500 B static and "
        "50 B for one microbatch; the limit is 900 B"
    )


def test_buffers_of_each_microbatch_that_are_too_much_are_told_as_static():
    costs = Costs(bytes=Bytes(activation=0, message=16), per="rank")
    lines = nothing(asked(4, 8, costs=costs, memory=20, buffers="each", split=True))
    assert "rank 1 needs 256 B, 256 B static and 0 B for one microbatch" in lines[1]
    assert any(
        re.match("  worth trying: --buffers in-flight: .*needs 32 B, 16 B static", x) for x in lines
    )


def test_recomputation_that_would_make_it_fit_is_named():
    costs = Costs(bytes=Bytes(activation=100, message=1), per="rank")
    lines = nothing(asked(4, 8, "v", costs=costs, memory=60, split=False))
    assert any(
        x == "  worth trying: --recompute full: v p=4, full backward: rank 0 needs 51 B, "
        "0 B static and 51 B for one microbatch; the limit is 60 B"
        for x in lines
    )
