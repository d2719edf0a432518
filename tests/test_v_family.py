"""The memory-controlled V family and the automatic zero-bubble schedule."""

import json
import time
import tracemalloc
from fractions import Fraction

import pytest

from common import COSTS, DATA
from hocket import Costs, build, check, simulate
from hocket.errors import UsageError
from hocket.planner import Request, plan
from hocket.schedules import controllable, zero_bubble_auto
from hocket.search.v_reorder import blocks_holding

PROVEN = [
    r for r in json.loads((DATA / "optima.json").read_text())
    if r["v"] == 2 and r["split_backward"]
]  # fmt: skip
SKEW = COSTS["skew"]
UNIT = {"F": 1, "I": 1, "W": 1}


def _peak(s, costs=SKEW):
    return max(r.peak_in_flight for r in simulate(s, costs).ranks)


SIZES = [(1, 3), (2, 2), (2, 7), (3, 2), (3, 9), (4, 1), (4, 11), (5, 5), (6, 13), (7, 3), (8, 16),
         (9, 20), (12, 40)]  # fmt: skip


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_peaks_are_a_half_a_third_and_two_thirds_of_1f1b(p, m):
    for name, limit in (
        ("v-half", 2 * (p // 2 + 1)),
        ("v-min", 2 * ((p + 4) // 3)),
        ("v-1f1b", 2 * ((2 * p + 3) // 3)),
    ):
        s = build(name, p=p, m=m)
        assert check(s).ok
        assert _peak(s) <= limit
        assert m < p or p < 3 or _peak(s) == limit


@pytest.mark.parametrize("p", range(3, 13))
def test_v_half_bubble_is_6_per_two_ranks_less_1(p):
    for m in (2 * p, 3 * p + 1):
        assert simulate(build("v-half", p=p, m=m)).makespan == 6 * m + 6 * ((p - 1) // 2) - 1


@pytest.mark.parametrize("p", range(3, 14))
def test_v_min_bubble_is_that_of_its_memory_also_where_published_code_has_4_more(p):
    bubble = 12 * (p // 3) - (7 if p % 3 == 0 else 1)
    if p % 3 == 2:
        assert bubble == 12 * (p // 3) + 3 - 4
    for m in (p, 2 * p, 3 * p + 1):
        assert simulate(build("v-min", p=p, m=m)).makespan == 6 * m + bubble


def test_v_min_p8_m16_has_a_bubble_of_23():
    assert simulate(build("v-min", p=8, m=16)).makespan == 6 * 16 + 23


@pytest.mark.parametrize(("p", "bubble"), [(4, 15), (8, 33)])
def test_v_1f1b_reaches_the_published_bubble(p, bubble):
    s = build("v-1f1b", p=p, m=2 * p)
    assert simulate(s, Costs(F=1, B=2)).makespan == 12 * p + bubble


def _published_span(p, limit):
    """Bubble within a rank's span of the adaptive search, F = I = W (arXiv 2405.15362, A)."""
    return {2 * p - 1: 3, 2 * p: 0}.get(limit, 6 * p - 1 - 3 * limit)


def _least(p, limit):
    """No bubble of a makespan is smaller: 2p - limit before the last rank's first backward,
    which comes 3p - 1 after the start; then 3p - 2 limit after its last forward."""
    return 3 * p - 1 - limit + max(0, 3 * p - 2 * limit)


def _every_limit(p, m):
    for limit in range(2 * ((p + 4) // 3), 2 * p + 1):
        s = build("v-auto", p=p, m=m, limit=limit)
        assert check(s).ok
        t = simulate(s)
        assert max(r.peak_in_flight for r in t.ranks) <= limit
        assert t.makespan - 6 * m == _least(p, limit), (p, m, limit)
        assert t.span - 6 * m <= _published_span(p, limit), (p, m, limit)


@pytest.mark.parametrize(("p", "m"), [(3, 7), (4, 8), (4, 16), (5, 12)])
def test_v_auto_has_the_least_bubble_of_every_limit_and_the_published_span(p, m):
    _every_limit(p, m)


@pytest.mark.slow
@pytest.mark.parametrize(("p", "m"), [(6, 24), (7, 14), (8, 16), (8, 32), (12, 24)])
def test_v_auto_has_the_least_bubble_of_every_limit_for_more_ranks(p, m):
    _every_limit(p, m)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [13, 21, 25])
def test_v_auto_p16_m64_has_the_least_bubble_where_a_search_missed_it(limit):
    t = simulate(build("v-auto", p=16, m=64, limit=limit))
    assert t.makespan - 6 * 64 == _least(16, limit)
    assert t.span - 6 * 64 <= _published_span(16, limit)


# arXiv 2401.10241, table of ZB-V: stage costs in microseconds, the first row of each model, and
# what the published code of each schedule comes to: makespan, span
PAPER = {
    (16, 48): ((14407, 14380, 9676, 1610), {
        "v-half": (4528726, 4528726), "v-min": (5511082, 5511082), "zb-v": (4026056, 3975626),
        "v-1f1b": (5410729, 5410729)}),
    (24, 72): ((6763, 6969, 5251, 755), {
        "v-half": (3343009, 3343009), "v-min": (3995233, 3995233), "zb-v": (2979154, 2915260),
        "v-1f1b": (3853638, 3853638)}),
    (32, 96): ((9458, 9748, 7288, 879), {
        "v-half": (6210928, 6210928), "v-min": (7382650, 7382650), "zb-v": (5523523, 5401104),
        "v-1f1b": (7176870, 7176870)}),
}  # fmt: skip


def _paper(p, m):
    (forward, inputs, weights, latency), published = PAPER[p, m]
    return Costs(F=forward, I=inputs, W=weights, latency=latency), published


@pytest.mark.parametrize(
    "size", [*list(PAPER)[:2], pytest.param(list(PAPER)[2], marks=pytest.mark.slow)]
)
def test_the_named_ones_are_as_good_as_published_code_on_the_models_of_the_paper(size):
    costs, published = _paper(*size)
    for name, (makespan, span) in published.items():
        t = simulate(build(name, p=size[0], m=size[1]), costs)
        assert t.makespan <= makespan and t.span <= span, name


def _planned(p, m, costs, limits, shape="v", **settings):
    v = 2 if shape == "v" else 1
    limit = tuple(Fraction(x, v) for x in limits)
    asked = Request(p=p, m=m, costs=costs, shapes=(shape,), v=(v,), split=True, in_flight=limit,
                    threads=1, **settings)  # fmt: skip
    made = plan(asked).schedule
    peaks = [r.peak_in_flight for r in simulate(made, costs).ranks]
    assert all(a <= b for a, b in zip(peaks, limits, strict=True))
    return simulate(made, costs)


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "makespan"), [(8, 17714), (10, 15872), (12, 15081), (16, 13890)])
def test_a_plan_of_a_v_beats_the_authors_search_at_real_costs(limit, makespan):
    costs = Costs(F=149, I=147, W=100, latency=5)
    assert _planned(8, 16, costs, [limit] * 8, rounds=2).makespan <= makespan


@pytest.mark.parametrize("record", PROVEN, ids=lambda r: f"p{r['p']}-m{r['m']}")
def test_a_plan_of_a_v_is_within_a_hair_of_every_proven_optimum_and_never_below(record):
    c = record["costs"]
    costs = Costs(F=c["F"][0], I=c["I"][0], W=c["W"][0], latency=c["comm"])
    got = _planned(record["p"], record["m"], costs, record["in_flight_cap"], rounds=4)
    best = record["optimal_makespan"]
    assert best <= got.makespan <= Fraction(102, 100) * best


@pytest.mark.parametrize(("limit", "makespan"), [(4, 313), (8, 272)])
def test_a_plan_of_a_line_is_as_good_as_the_papers_search_on_skewed_costs(limit, makespan):
    assert _planned(4, 8, SKEW, [limit] * 4, "linear", rounds=4).makespan <= makespan


def test_smallest_limits_run_one_microbatch_after_the_other():
    for p in (1, 3, 8):
        assert check(build("v-auto", p=p, m=3, limit=2)).ok
        assert check(build("zb-auto", p=p, m=3, limit=1)).ok


def test_limits_that_cannot_work_name_the_smallest_that_does():
    with pytest.raises(UsageError, match=r"v-auto needs limit >= 2; .* limit=2"):
        build("v-auto", p=4, m=8, limit=1)
    with pytest.raises(UsageError, match=r"zb-auto needs limit >= 1; .* limit=1"):
        build("zb-auto", p=4, m=8, limit=0)


def test_the_same_question_has_the_same_answer():
    for name in ("v-auto", "zb-auto"):
        once = build(name, p=4, m=6, limit=5)
        for module in (controllable, zero_bubble_auto):
            module._searched.cache_clear()
        assert build(name, p=4, m=6, limit=5) == once


def test_zb_auto_at_unit_costs_has_no_bubble_with_twice_the_memory():
    once, twice = build("zb-auto", p=8, m=16), build("zb-auto", p=8, m=16, limit=16)
    assert simulate(once).makespan == 48 + 7
    assert simulate(twice).span == 48
    assert _peak(once) <= 8 and _peak(twice) <= 16


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["v-auto", "v-half"])
def test_64_ranks_take_seconds_of_processor_time(name):
    before = time.process_time()
    s = build(name, p=64, m=128)
    assert time.process_time() - before < 15
    assert len(s.codes) == 64 * 128 * 6


def test_blocks_for_many_ranks_are_tried_in_bounded_memory():
    tracemalloc.start()
    try:
        assert blocks_holding(48, 96)
        assert tracemalloc.get_traced_memory()[1] < 300e6
    finally:
        tracemalloc.stop()
