"""Layers to stages, against brute force; recomputation and buffers, against worked cases."""

import math
from dataclasses import replace
from itertools import accumulate, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket import Bytes, Costs, build, simulate
from hocket.costs import per_stage
from hocket.costs.partition import Room, partition
from hocket.costs.scaling import join, layer_loads
from hocket.errors import PlanError, UsageError
from hocket.ir import linear, looped, vshape
from hocket.planner.recompute import (
    FULL,
    NONE,
    Level,
    level,
    needs,
    recomputed,
    with_receive_buffers,
)
from hocket.search.problem import SPLIT, problem
from hocket.search.search import Arena

LAYERS = (0.2, *(1.0,) * 14, 2.0)


def rank_loads(loads, sizes, owners):
    ends = [0, *accumulate(sizes)]
    return [sum(sum(loads[ends[s] : ends[s + 1]]) for s in held) for held in owners]


def _cuts(n, parts):
    for ends in combinations(range(1, n), parts - 1):
        yield [b - a for a, b in zip((0, *ends), (*ends, n), strict=True)]


def _score(loads, sizes, owners):
    ranks = rank_loads(loads, sizes, owners)
    return max(ranks), sum(x * x for x in ranks)


def test_five_equal_layers_on_four_stages_leave_none_empty():
    sizes = partition([1] * 5, 4)
    assert sorted(sizes) == [1, 1, 1, 2]


def test_embedding_and_head_get_fewer_blocks_beside_them():
    assert partition(LAYERS, 4) == (5, 4, 4, 3)


def test_1f1b_on_the_balanced_cut_takes_235_8_on_equal_counts_273_6():
    layers = Costs(F=LAYERS, I=LAYERS, W=LAYERS)
    layers = Costs(F=LAYERS, B=tuple(2 * x for x in LAYERS), I=LAYERS, W=LAYERS)
    order = build("1f1b", p=4, m=16)
    balanced = partition(layer_loads(layers), 4)
    assert simulate(order, join(layers, balanced)).makespan == pytest.approx(235.8)
    assert simulate(order, join(layers, (4, 4, 4, 4))).makespan == pytest.approx(273.6)


@pytest.mark.parametrize(("m", "makespan"), [(4, 33), (8, 57), (16, 105), (32, 201)])
def test_1f1b_with_a_last_stage_twice_as_heavy_takes_6m_plus_9(m, makespan):
    costs = Costs(F=(1, 1, 1, 2), B=(2, 2, 2, 4))
    assert simulate(build("1f1b", p=4, m=m), costs).makespan == makespan


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=4, max_size=9), st.integers(2, 4))
def test_partition_is_as_good_as_the_best_of_all_cuts(loads, parts):
    sizes = partition(loads, parts)
    owners = [(s,) for s in range(parts)]
    assert sum(sizes) == len(loads) and min(sizes) >= 1
    best = min(_score(loads, cut, owners) for cut in _cuts(len(loads), parts))
    assert _score(loads, sizes, owners) == best


def test_the_cut_for_a_v_evens_out_ranks_not_stages():
    loads = [4, 1, 1, 1, 1, 4, 2, 2]
    owners = vshape(2, 1).stages_of_rank
    sizes = partition(loads, 4, owners)
    assert max(rank_loads(loads, sizes, owners)) == 8


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1])
def test_loads_that_are_no_times_are_refused(wrong):
    with pytest.raises(UsageError) as caught:
        partition([wrong, 1], 2)
    assert str(caught.value) == f"the load of a layer is {wrong}; it must be 0 or more, and finite"


def test_more_stages_than_layers_is_refused():
    with pytest.raises(PlanError) as caught:
        partition([1, 1, 1], 4)
    assert str(caught.value) == (
        "3 layers do not make 4 stages: each needs at least one layer; use at most 3 stages"
    )


OWNERS = {
    "linear": [(0,), (1,), (2,)],
    "looped": [(0, 3), (1, 4), (2, 5)],
    "v": [(0, 5), (1, 4), (2, 3)],
    "wave": [(0, 3, 4, 7), (1, 2, 5, 6)],
    "mirrored": [(0, 3), (1, 2), (1, 2), (0, 3)],
}


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(OWNERS)),
    st.lists(st.one_of(st.integers(0, 9), st.sampled_from([0.2, 2.5])), min_size=8, max_size=12),
)
def test_no_cut_has_a_lower_largest_load_of_a_rank_where_ranks_hold_several_stages(shape, loads):
    owners = OWNERS[shape]
    parts = 1 + max(max(held) for held in owners)
    sizes = partition(loads, parts, owners)
    assert sum(sizes) == len(loads) and len(sizes) == parts and min(sizes) >= 1
    best = min(_score(loads, cut, owners)[0] for cut in _cuts(len(loads), parts))
    assert _score(loads, sizes, owners)[0] == pytest.approx(best)


def test_the_rounding_of_sums_does_not_hide_the_best_cut():
    loads = [1, 0.2, 1, 0.2, 7, 0, 0, 0, 1, 1]
    sizes = partition(loads, 8, OWNERS["wave"])
    assert max(rank_loads(loads, sizes, OWNERS["wave"])) == pytest.approx(8.2)


def test_34_layers_on_a_v_of_8_ranks_have_a_largest_load_of_103_where_moves_of_layers_end_at_118():
    loads = [9, 14, 49, 5, 17, 8, 32, 49, 50, 25, 13, 31, 25, 6, 29, 14, 33, 1, 3, 40, 23, 43, 46,
             10, 27, 14, 2, 44, 20, 22, 30, 41, 3, 17]  # fmt: skip
    owners = vshape(8, 1).stages_of_rank
    sizes = partition(loads, 16, owners)
    assert max(rank_loads(loads, sizes, owners)) == 103


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["linear", "looped", "v"]),
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1, 2, 5, 20])), min_size=6, max_size=9),
    st.integers(0, 3),
)
def test_a_cut_that_fits_is_found_where_there_is_one_and_is_the_most_even_of_those(
    shape, layers, more
):
    loads, sizes = zip(*layers, strict=True)
    owners = OWNERS[shape]
    parts = sum(map(len, owners))

    def largest(cut):
        return max(rank_loads(sizes, cut, owners))

    limit = min(map(largest, _cuts(len(loads), parts))) + more
    room = Room([limit] * 3, lambda s, a, b: (sum(sizes[a:b]), 0, 0))
    cut = partition(loads, parts, owners, room=room)
    assert largest(cut) <= limit
    fitting = [c for c in _cuts(len(loads), parts) if largest(c) <= limit]
    best = min(max(rank_loads(loads, c, owners)) for c in fitting)
    assert max(rank_loads(loads, cut, owners)) == best


def test_where_no_cut_fits_the_one_with_the_least_above_the_limit_is_taken():
    sizes = [9, 9, 1, 1, 1, 30]
    room = Room([5, 5, 5], lambda s, a, b: (sum(sizes[a:b]), 0, 0))
    assert partition([1] * 6, 3, room=room)[-1] == 1


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([linear(3, 4), vshape(2, 4), looped(2, 4, 2)]),
    st.sampled_from(["none", "in flight", "each"]),
    st.sampled_from([None, 1, 9]),
    st.booleans(),
    st.data(),
)
def test_the_bytes_a_cut_is_said_to_need_are_those_that_one_microbatch_takes(
    placement, buffers, held, recompute, data
):
    n, parts = 7, placement.n_stages
    rows = st.lists(st.integers(0, 9), min_size=n, max_size=n).map(tuple)
    layers = Costs(F=(1,) * n, bytes=Bytes(
        static=data.draw(rows), activation=data.draw(rows), gradient=data.draw(rows), held=held,
        message=data.draw(rows),
    ))  # fmt: skip
    if parts > placement.p:  # what of an earlier stage waits for its W is not counted
        layers = replace(layers, bytes=replace(layers.bytes, held=0))
    cut = data.draw(st.sampled_from([tuple(c) for c in _cuts(n, parts)]))
    levels = (FULL,) if recompute else ()
    need = needs(layers, placement, levels=levels, buffers=buffers)
    ends = [0, *accumulate(cut)]
    costs = join(layers, cut)
    if buffers != "none":
        costs = with_receive_buffers(costs, placement, each=buffers == "each")
    if recompute:
        costs = recomputed(costs, [FULL] * parts)
    one = problem(placement, costs, SPLIT, room=[0] * placement.p)
    static = per_stage("static", costs.bytes.static, parts)
    taken = one.peaks(Arena(one).serial())
    for rank, stages in enumerate(placement.stages_of_rank):
        mine = [(s, ends[s], ends[s + 1]) for s in stages]
        room = Room([0] * placement.p, need)
        assert room.over(rank, mine) == taken[rank] + sum(static[s] for s in stages)


# --- recomputation ------------------------------------------------------------------------------

UNIT = Costs(bytes=Bytes(activation=10, message=1))


def test_full_recomputation_makes_1f1b_44_and_zb_h1_38():
    costs = recomputed(UNIT, [FULL] * 4)
    assert simulate(build("1f1b", p=4, m=8), costs).makespan == 44
    assert simulate(build("zb-h1", p=4, m=8), costs).makespan == 38


def test_a_delayed_w_holds_the_full_activation_that_recomputation_saved():
    costs = recomputed(UNIT, [FULL] * 4)
    held = [r.peak_bytes for r in simulate(build("zb-h1", p=4, m=8), costs).ranks]
    assert held == [13, 22, 31, 40]  # one to four W wait with 10 each
    whole = [r.peak_bytes for r in simulate(build("1f1b", p=4, m=8), costs).ranks]
    assert whole == [13, 12, 11, 10]  # inputs, and one recomputed activation


def test_stages_can_recompute_different_amounts():
    costs = recomputed(UNIT, [NONE, FULL, Level("selective", 0.5, 0.3), NONE])
    assert costs.I == (1, 2, 1.5, 1)
    assert costs.bytes.activation == (10, 1, 3.0, 10)
    assert costs.bytes.gradient == (0, 9, 7.0, 0)


def test_levels_are_read_from_words():
    assert level("full") == FULL
    assert level("selective=0.1/0.4") == Level("selective", 0.1, 0.4)


@pytest.mark.parametrize(
    "word",
    ["some", "selective", "selective=0.1", "selective=-1/0.4", "selective=0.1/7", "s=0.1/-0.1",
     "s=nan/0.4", "s=0.1/nan", "s=inf/0.4"],
)  # fmt: skip
def test_recomputation_that_would_take_less_than_no_time_or_hold_more_than_all_is_refused(word):
    with pytest.raises(UsageError) as caught:
        level(word)
    assert str(caught.value) == (
        "recompute: expected full or selective=TIME/KEEP such as selective=0.1/0.4, TIME 0 or more "
        f"and KEEP from 0 to 1, found {word!r}"
    )
