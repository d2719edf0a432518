"""Every registered schedule over random sizes and costs."""

from fractions import Fraction
from itertools import pairwise

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hocket import Costs, build, check, dumps, loads, simulate
from hocket.errors import UsageError
from hocket.lower import insert_communication, strip_communication
from hocket.schedules import closed_form, entries, settings_of
from hocket.search.bounds import lower_bounds
from hocket.text import as_json, from_json

NAMES = [e.name for e in entries()]
quick = settings(
    max_examples=60, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip


@st.composite
def schedules(draw, names=tuple(NAMES)):
    name = draw(st.sampled_from(names))
    p, m, v = draw(st.integers(1, 8)), draw(st.integers(1, 20)), draw(st.integers(1, 3))
    entry = next(e for e in entries() if e.name == name)
    try:
        return build(name, p=p, m=m, v=v if entry.takes_v else None)
    except UsageError:
        assume(False)


times = st.integers(0, 40) | st.fractions(0, 10, max_denominator=12)


@st.composite
def costs(draw, n_stages):
    def per_stage():
        return tuple(draw(st.lists(times, min_size=n_stages, max_size=n_stages)))

    fb = draw(st.sampled_from(["sum", "max"]))
    lane = draw(st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3)))
    return Costs(F=per_stage(), I=per_stage(), W=per_stage(), FB=fb,
                 latency=draw(times), p2p_overhead=lane)  # fmt: skip


@quick
@given(schedules())
def test_every_schedule_checks_clean_on_every_transport(s):
    for transport in ("tagged", "ordered", "rendezvous"):
        assert check(s, transport).problems == ()


@quick
@given(schedules())
def test_text_and_json_read_back_to_the_same_schedule(s):
    assert loads(dumps(s)) == s
    assert from_json(as_json(s)) == s


@quick
@given(st.data())
def test_makespan_is_never_below_either_lower_bound(data):
    s = data.draw(schedules())
    c = data.draw(costs(s.placement.n_stages))
    makespan = simulate(s, c).makespan
    for bound in lower_bounds(s, c):
        assert makespan >= bound.value, bound.argument


@quick
@given(st.data())
def test_time_on_every_queue_is_busy_transfer_or_explained_idle(data):
    s = data.draw(schedules())
    c = data.draw(costs(s.placement.n_stages))
    t = simulate(s, c)
    for r in t.ranks:
        queues = sum(q.rank == r.rank for q in s.queues)
        assert r.busy + r.transfer + r.idle == queues * t.makespan
        assert sum(r.waits.values()) == r.idle == sum(r.bubble.values())
    for queue in s.queues:
        for gap in t.gaps(queue):
            assert gap.end > gap.start
            assert gap.cause == "end" or gap.waits_for is not None


@quick
@given(st.data())
def test_critical_path_is_a_chain_from_zero_to_the_makespan(data):
    s = data.draw(schedules())
    c = data.draw(costs(s.placement.n_stages))
    t = simulate(s, c)
    path = t.critical_path()
    assert (path[0].start, path[0].after) == (0, "start")
    assert path[-1].end == t.makespan
    for a, b in pairwise(path):
        gap = b.start - a.end
        assert gap in {0, c.latency}
        assert gap == 0 or b.after == "message"


@quick
@given(st.data())
def test_fractions_and_integers_are_exact_multiples_of_each_other(data):
    s = data.draw(schedules())
    c = data.draw(costs(s.placement.n_stages))
    t = simulate(s, c).makespan
    third = Fraction(1, 3)
    scaled = Costs(
        F=tuple(x * third for x in c.F), I=tuple(x * third for x in c.I),
        W=tuple(x * third for x in c.W), FB=c.FB, latency=c.latency * third,
        p2p_overhead=c.p2p_overhead and tuple(x * third for x in c.p2p_overhead),
    )  # fmt: skip
    assert simulate(s, scaled).makespan == t * third


@quick
@given(st.data())
def test_inserted_communication_changes_no_time_and_strips_away(data):
    s = data.draw(schedules())
    c = data.draw(costs(s.placement.n_stages))
    c = Costs(F=c.F, I=c.I, W=c.W, FB=c.FB, latency=c.latency)
    lowered = insert_communication(s)
    assert strip_communication(lowered) == s
    assert simulate(lowered, c).makespan == simulate(s, c).makespan
    assert [r.peak_in_flight for r in simulate(lowered, c).ranks] == [
        r.peak_in_flight for r in simulate(s, c).ranks
    ]


# --- published formulas, in the ranges where they hold ------------------------------------------

sizes = st.tuples(st.integers(1, 8), st.integers(1, 24))
cost = st.integers(1, 30)


@quick
@given(sizes, cost, cost, st.integers(0, 20))
def test_gpipe_and_eager_1f1b_take_m_plus_p_minus_1_rounds_and_one_latency_each_way(pm, f, b, c):
    p, m = pm
    for name in ("gpipe", "eager-1f1b"):
        t = simulate(build(name, p=p, m=m), Costs(F=f, B=b, latency=c))
        expected = (m + p - 1) * (f + b) + 2 * (p - 1) * c
        if name == "gpipe" or c <= min(f, b):
            assert t.makespan == expected


@quick
@given(sizes, cost, cost)
def test_1f1b_peaks_and_makespan(pm, f, b):
    p, m = pm
    t = simulate(build("1f1b", p=p, m=m), Costs(F=f, B=b))
    assert t.makespan == (m + p - 1) * (f + b)
    assert [r.peak_in_flight for r in t.ranks] == [min(m, p - r) for r in range(p)]
    e = simulate(build("eager-1f1b", p=p, m=m), Costs(F=f, B=b))
    assert [r.peak_in_flight for r in e.ranks] == [min(m, 2 * (p - r) - 1) for r in range(p)]


@quick
@given(st.integers(2, 8), st.integers(0, 12), st.integers(1, 4), cost, cost)
def test_interleaved_makespan_and_peak(p, extra, v, f, b):
    m = p + extra
    t = simulate(build("interleaved", p=p, m=m, v=v), Costs(F=f, B=b))
    assert t.makespan == (m * v + p - 1) * (f + b)
    if m % p == 0:
        assert [r.peak_in_flight for r in t.ranks] == [
            min(m * v, (v - 1) * p + 2 * (p - 1 - r) + 1) for r in range(p)
        ]


@quick
@given(st.integers(1, 8), st.integers(0, 12), cost, cost, st.data())
def test_zb_h1_closed_form_where_w_is_at_most_f_and_i(p, extra, f, i, data):
    m, w = p + extra, data.draw(st.integers(0, min(f, i)))
    t = simulate(build("zb-h1", p=p, m=m), Costs(F=f, I=i, W=w))
    assert t.makespan == m * (f + i + w) + (p - 1) * (f + i - w)
    assert [r.peak_in_flight for r in t.ranks] == [min(m, p)] * p


@quick
@given(st.integers(1, 7), st.integers(0, 8), cost, cost, st.integers(0, 5), st.data())
def test_zb_h2_span_where_w_is_at_most_f_and_i(p, extra, f, i, c, data):
    m, w = 2 * p - 1 + extra, data.draw(st.integers(0, min(f, i)))
    t = simulate(build("zb-h2", p=p, m=m), Costs(F=f, I=i, W=w))
    # the slowest rank is the first or the last, whichever idles more
    assert t.span >= m * (f + i + w)
    assert max(r.peak_in_flight for r in t.ranks) == 2 * p - 1


@quick
@given(st.integers(1, 4), st.integers(0, 6), cost, cost, cost, st.data())
def test_dualpipe_law_of_the_busiest_rank(half, extra, f, i, w, data):
    p, m, k = 2 * half, 4 * half + 2 * extra, half - 1
    b = i + w
    fb = data.draw(st.integers(max(f, b), f + b))
    t = simulate(build("dualpipe", p=p, m=m), Costs(F=f, I=i, W=w, FB=fb))
    bubble = max(k * f, k * i - f) + k * (fb - w - min(i, w))
    assert t.makespan == (p + 1) * (f + b) + (m - p - 1) * fb + bubble
    assert {r.peak_in_flight for r in t.ranks} == {p + 1}


@quick
@given(st.integers(1, 5), st.integers(0, 6), cost, cost, cost, st.data())
def test_dualpipev_law(p, extra, f, i, w, data):
    m, k, b = 2 * p + extra, p - 1, i + w
    fb = data.draw(st.integers(max(f, b), f + b))
    t = simulate(build("dualpipev", p=p, m=m), Costs(F=f, I=i, W=w, FB=fb))
    bubble = max(k * f, k * i - f) + k * (fb - w - min(i, w))
    assert t.makespan == (2 * p + 1) * (f + b) + (2 * m - 2 * p - 1) * fb + bubble
    assert {r.peak_in_flight for r in t.ranks} == {2 * p + 1}


@quick
@given(st.sampled_from([2, 4, 6, 8]), st.integers(1, 30), st.integers(1, 6))
def test_chimera_holds_at_most_its_limit_and_mirrors_its_paths(p, m, pairs):
    pipes = min(2 * pairs, p)
    assume(p % pipes == 0 and m >= pipes)
    s = build("chimera", p=p, m=m, pipes=pipes)
    limit = p + (p // (4 * pipes) if m > 2 * p else 0)
    assert max(r.peak_in_flight for r in simulate(s).ranks) <= limit
    assert s.placement.weight_copies == pipes


@quick
@given(st.data())
def test_every_published_formula_holds_wherever_it_says_it_applies(data):
    entry = data.draw(st.sampled_from([e for e in entries() if e.formula]))
    p, m, v = (
        data.draw(st.integers(1, 8)),
        data.draw(st.integers(1, 24)),
        data.draw(st.integers(1, 4)),
    )
    settings_ = settings_of(entry, p, m, v if entry.takes_v else None, {})
    assume(not entry.broken(settings_))
    f, i, w = data.draw(cost), data.draw(cost), data.draw(st.integers(0, 30))
    fb = data.draw(st.sampled_from(["sum", "max"]) | st.integers(1, 60))
    costs = Costs(F=f, I=i, W=w, FB=fb, latency=data.draw(st.integers(0, 4)))
    value = closed_form(entry, settings_, costs)
    assume(value is not None)
    t = simulate(build(entry.name, p=p, m=m, v=v if entry.takes_v else None), costs)
    assert getattr(t, entry.formula.metric) == value
