"""What papers say of makespans under latency and of memory, where no entry says it."""

from fractions import Fraction

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hocket import Costs, build, check, simulate
from hocket.schedules import closed_form, entries, settings_of

quick = settings(max_examples=25, deadline=None, derandomize=True)
time, some = st.integers(1, 30), st.integers(0, 40)


def _peaks(schedule):
    return [r.peak_in_flight for r in simulate(schedule).ranks]


@quick
@given(st.integers(1, 8), st.integers(0, 20), time, time, some)
def test_1f1b_pays_two_messages_a_round_but_one_in_p_at_any_latency(p, extra, f, b, c):
    m = p + extra
    t = simulate(build("1f1b", p=p, m=m), Costs(F=f, B=b, latency=c))
    assert t.makespan == (m + p - 1) * (f + b) + 2 * c * (m + p - 3 - (m - 2) // p)


@quick
@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 4), time, time, st.data())
def test_interleaving_pays_every_message_of_two_trips_or_with_double_groups_of_two_ways(
    p, v, k, f, b, data
):
    c = data.draw(st.integers(0, min(f, b)))
    ideal = (2 * k * p * v + p - 1) * (f + b)
    for group, messages in ((p, p * v - 1), (2 * p, p - 1)):
        s = build("interleaved", p=p, m=2 * k * p, v=v, group=group)
        t = simulate(s, Costs(F=f, B=b, latency=c))
        assert v == 1 or t.makespan == ideal + 2 * messages * c


@quick
@given(st.integers(1, 7), st.integers(1, 12), time, time, st.data())
def test_zero_bubble_schedules_pay_four_or_two_messages_a_rank(p, extra, f, i, data):
    w = data.draw(st.integers(0, min(f, i)))
    c = data.draw(st.integers(0, w // 2))
    m, ideal = p + extra, f + i + w
    t = simulate(build("zb-h1", p=p, m=m), Costs(F=f, I=i, W=w, latency=c))
    assert t.makespan == m * ideal + (p - 1) * (f + i - w + 4 * c)
    c, m = data.draw(st.integers(0, min(f, i))), 2 * p - 1 + extra
    t = simulate(build("zb-h2", p=p, m=m), Costs(F=f, I=i, W=w, latency=c))
    assert t.span == m * ideal + (p - 1) * (f + i + 2 * c - 2 * w)


@quick
@given(st.integers(2, 8), st.integers(1, 24), st.integers(1, 4), st.data())
def test_stages_in_flight_are_those_that_the_papers_give(p, m, v, data):
    group = data.draw(st.integers(p, p + 4))
    if group <= m and m % group == 0:
        expected = [min(m * v, (v - 1) * group + 2 * (p - 1 - r) + 1) for r in range(p)]
        assert _peaks(build("interleaved", p=p, m=m, v=v, group=group)) == expected
    if m % p == 0:
        expected = [min(m * v, (v - 1) * p + 2 * (p - 1 - r) + 2) for r in range(p)]
        assert _peaks(build("interleaved-overlap", p=p, m=m, v=v)) == expected
        assert max(_peaks(build("interleaved-zb", p=p, m=m, v=v))) == p * v
    assert _peaks(build("looped-bfs", p=p, m=m, v=v)) == [m * v] * p
    assert _peaks(build("1f1b-overlap", p=p, m=m)) == [min(m, 2 * (p - r)) for r in range(p)]
    expected = [min(m * v, p - r - 1 + v) for r in range(p)]
    assert _peaks(build("seq1f1b", p=p, m=m, slices=v)) == expected
    slices = data.draw(st.sampled_from([n for n in range(1, p + 1) if p % n == 0]))
    s = build("seq1f1b-interleaved", p=p, m=m * p, v=v, slices=slices)
    n = m * p * v * slices
    expected = [min(n, (v - 1) * p + 2 * (p - 1 - r) + slices) for r in range(p)]
    assert _peaks(s) == expected
    if m >= 2 * p:
        assert _peaks(build("zb-v", p=p, m=m)) == [2 * p] * p


@quick
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), time, time, st.data())
def test_interleaved_slices_take_their_formula_and_without_slices_are_interleaving(
    p, k, v, f, b, data
):
    slices = data.draw(st.sampled_from([n for n in range(1, p + 1) if p % n == 0]))
    m = k * p // slices
    s = build("seq1f1b-interleaved", p=p, m=m, v=v, slices=slices)
    assert simulate(s, Costs(F=f, B=b)).makespan == (m * slices * v + p - 1) * (f + b)
    assert check(s, "rendezvous").problems == ()
    if slices == 1:
        assert s.renamed("interleaved") == build("interleaved", p=p, m=m, v=v, group=p)


OPTIONS = {
    "group": st.integers(1, 12),
    "slices": st.integers(1, 4),
    "pipes": st.sampled_from([2, 4]),
    "concat": st.sampled_from(["direct", "doubling", "halving"]),
}


@settings(
    max_examples=60, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)  # fmt: skip
@given(st.sampled_from([e for e in entries() if e.formula and e.options]), st.data())
def test_registered_formulas_hold_with_any_options(entry, data):
    p, m, v = (data.draw(st.integers(1, n)) for n in (8, 24, 4))
    options = {k: data.draw(OPTIONS[k]) for k in entry.options if k in OPTIONS}
    v = v if entry.takes_v else None
    chosen = settings_of(entry, p, m, v, options)
    assume(not entry.broken(chosen))
    costs = Costs(*(data.draw(time) for _ in "FIW"), latency=data.draw(st.integers(0, 3)))
    expected = closed_form(entry, chosen, costs)
    assume(expected is not None)
    t = simulate(build(entry.name, p=p, m=m, v=v, **options), costs)
    assert getattr(t, entry.formula.metric) == expected


@pytest.mark.parametrize(
    ("group", "makespan", "peaks"), [(4, 54, [8, 7, 6, 5]), (2, 56, [6, 5, 4, 3])]
)
def test_group_interleaved_takes_the_time_and_memory_of_the_authors_order(group, makespan, peaks):
    s = build("group-interleaved", p=4, m=8, v=2, group=group)
    assert (simulate(s).makespan, _peaks(s)) == (makespan, peaks)


@pytest.mark.parametrize(("m", "v", "makespan"), [(4, 2, 36), (4, 4, 60)])
def test_hanayo_reaches_the_optimum_of_its_placement_for_m_equal_p(m, v, makespan):
    assert simulate(build("hanayo", p=4, m=m, v=v), Costs(F=1, B=2)).makespan == makespan


@quick
@given(st.integers(2, 8), time, time, st.integers(0, 30))
def test_zb_v_and_v_half_have_a_bubble_that_does_not_grow_with_m(p, f, i, w):
    def bubble(name, m):
        return simulate(build(name, p=p, m=m), Costs(F=f, I=i, W=w)).makespan - 2 * m * (f + i + w)

    assert bubble("zb-v", 3 * p) == bubble("zb-v", 5 * p)
    if p > 2 and w + 2 * i >= 2 * f and w + 2 * f >= 2 * i:
        assert bubble("v-half", 4 * p) == bubble("v-half", 6 * p)


@pytest.mark.parametrize(
    ("name", "p", "m", "copies"),
    [("1f1b", 4, 8, 1), ("zb-v", 4, 8, 1), ("dualpipe", 4, 8, 2), ("dualpipev", 4, 8, 1),
     ("chimera", 4, 8, 2), ("bitpipe", 4, 8, 2), ("gems", 4, 8, 2), ("gems", 3, 8, Fraction(5, 3))],
)  # fmt: skip
def test_weights_are_held_as_often_as_the_papers_say(name, p, m, copies):
    assert build(name, p=p, m=m).placement.weight_copies == pytest.approx(float(copies))
