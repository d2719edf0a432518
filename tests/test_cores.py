"""Ranks that share the cores of one machine: `cores` in the costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket import Costs, build, simulate
from hocket.costs import costs_from, costs_toml
from hocket.errors import CostError
from hocket.explanation import explain
from hocket.lower import insert_communication
from hocket.measured.readings import readings
from hocket.search.bounds import lower_bounds
from hocket.simulator.contention import simulate_shared
from hocket.simulator.samples import simulate_jitter, simulate_samples
from hocket.train.report import one_by_one

NAMES = ("gpipe", "1f1b", "zb-h1", "zb-v", "interleaved", "dualpipev")
quick = settings(max_examples=40, deadline=None, derandomize=True)
times = st.integers(0, 9) | st.fractions(0, 3, max_denominator=4)


def schedules(data):
    p, name = data.draw(st.integers(1, 4)), data.draw(st.sampled_from(NAMES))
    return build(name, p=p, m=2 * p * data.draw(st.integers(1, 2)))


def priced(data, s, **more):
    row = st.tuples(*[times] * s.placement.n_stages)
    return Costs(F=data.draw(row), I=data.draw(row), W=data.draw(row), **more)


@quick
@given(st.data())
def test_with_a_core_for_every_rank_the_events_give_the_longest_path(data):
    s = schedules(data)
    lane = data.draw(st.none() | st.tuples(times, times))
    plain = priced(data, s, latency=data.draw(times), p2p_overhead=lane)
    a = simulate(s, plain)
    b = simulate_shared(s, replace(plain, cores=s.p), blocking=lane is not None)
    assert a.makespan == b.makespan
    assert [r.busy for r in a.ranks] == [r.busy for r in b.ranks]
    for x, y in ((a.start, b.start), (a.end, b.end)):
        assert a.ticks.values(x) == b.ticks.values(y)


@quick
@given(st.data())
def test_fewer_cores_never_shorten_and_at_most_stretch_by_ranks_over_cores(data):
    s, cores = schedules(data), data.draw(st.integers(1, 3))
    plain = priced(data, s, latency=data.draw(times))
    shared = replace(plain, cores=cores)
    a, b = simulate(s, plain).makespan, simulate(s, shared).makespan
    assert a <= b <= max(1, s.p / cores) * a
    assert all(bound.value <= b for bound in lower_bounds(s, shared))


def test_one_core_that_never_waits_takes_the_work_of_all():
    for name in ("1f1b", "zb-h1"):
        t = simulate(build(name, p=4, m=8), Costs(F=2, I=3, W=1, cores=1))
        assert t.makespan == 4 * 8 * 6


def test_two_ranks_on_one_core_by_hand():
    """0F0 alone to 2; then 0F1 and 1F0 at half speed to 6; ..., all work one after the other."""
    t = simulate(build("gpipe", p=2, m=2), Costs(F=2, I=2, W=0, cores=1))
    assert t.makespan == 16
    assert t.ticks.values(t.start)[:2] == [0, 2]
    assert t.ticks.values(t.end)[:2] == [2, 6]
    assert max(lower_bounds(t.schedule, Costs(F=2, I=2, W=0, cores=1)))[0] == 16


@quick
@given(st.data())
def test_costs_of_ranks_that_shared_cores_come_back_as_if_each_had_its_own(data):
    s, cores = build(data.draw(st.sampled_from(("1f1b", "zb-h1", "zb-v"))), p=4, m=8), 2
    row = st.tuples(*[st.integers(5, 9)] * s.placement.n_stages)
    costs = Costs(
        F=data.draw(row), I=data.draw(row), W=data.draw(row), latency=0.5, unit="ms", cores=cores
    )  # fmt: skip
    seen = replace(simulate(one_by_one(s), costs), measured=True)
    back = readings([seen], cores=cores).costs()
    for kind in ("F", "I", "W") if s.has_split_backward else ("F", "full_backward"):
        assert getattr(back, kind) == pytest.approx(getattr(costs, kind))
    assert back.cores == cores
    assert simulate(one_by_one(s), back).makespan >= seen.makespan - 8
    stretched = readings([seen]).costs()
    assert sum(stretched.F) > sum(back.F)


def test_transfers_that_occupy_a_queue_stretch_with_its_work():
    """0F1 and 1F0 run side by side from 6 to 18: 2 of transfer, 8 of work, 2 of transfer."""
    t = simulate(build("gpipe", p=2, m=2), Costs(F=4, I=4, W=0, p2p_overhead=(1, 1), cores=1))
    assert t.ticks.values(t.start)[:2] == [1, 8]
    assert t.ticks.values(t.end)[:2] == [5, 16]
    assert [r.busy / r.transfer for r in t.ranks] == [2, 2]


def test_messages_in_the_order_change_nothing():
    s, costs = build("zb-h1", p=4, m=8), Costs(F=3, I=4, W=2, latency=1, cores=2)
    assert simulate(insert_communication(s), costs).makespan == simulate(s, costs).makespan


def test_replays_of_one_order_say_that_they_cannot_share():
    s, costs = build("1f1b", p=4, m=8), Costs(cores=2)
    for call in (
        lambda: simulate_samples(s, [costs]),
        lambda: simulate_jitter(s, costs),
    ):
        with pytest.raises(CostError, match="times depend on what overlaps"):
            call()


@pytest.mark.parametrize("wrong", [0, 1.5, -1, "2", True])
def test_cores_that_are_no_number_of_cores(wrong):
    with pytest.raises(CostError, match=r"^cores is "):
        Costs(cores=wrong)


def test_cores_are_written_and_read_back():
    costs = Costs(F=2, cores=3)
    assert "cores = 3\n" in costs_toml(costs)
    assert costs_from({"F": 2, "cores": 3, "per": "stage"}) == costs


def test_explain_tells_what_a_core_for_every_rank_would_gain():
    s = build("1f1b", p=4, m=8)
    t = simulate(s, Costs(cores=2))
    gains = {g.change: g.gain for g in explain(t, Costs(cores=2)).gains}
    assert gains["a core for every rank"] == t.makespan - 33


def test_each_message_keeps_a_shared_core_busy_beside_the_ranks():
    """One core: 2 of F, then the message's 1 and 1F0's 2 at half speed each, from 2 to 5; ..."""
    s = build("gpipe", p=2, m=1)
    costs = Costs(F=2, I=2, W=0, comm_cpu=1)
    assert simulate(s, costs).makespan == 8  # with a core each it costs nothing
    t = simulate(s, replace(costs, cores=1))
    assert t.ticks.values(t.end)[2] == 5  # 1F0
    assert t.makespan == 8 + 2  # both messages


@quick
@given(st.data())
def test_messages_on_shared_cores_only_take_time_and_may_stand_in_the_order(data):
    s = schedules(data)
    shared = priced(data, s, cores=data.draw(st.integers(1, 3)), comm_cpu=data.draw(times))
    t = simulate(s, shared)
    assert all(bound.value <= t.makespan for bound in lower_bounds(s, shared))
    assert t.makespan >= simulate(s, replace(shared, comm_cpu=0)).makespan
    assert simulate(insert_communication(s), shared).makespan == t.makespan
