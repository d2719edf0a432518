"""What a better order of a recorded run would gain."""

import pytest

from hocket import Costs, build, check, simulate, write_trace
from hocket.errors import UsageError
from hocket.planner.from_run import what_if


def test_1f1b_in_the_memory_it_has_gains_what_zero_bubble_gains(tmp_path):
    s, trace = build("1f1b", p=4, m=8), tmp_path / "run.json"
    write_trace(simulate(s, Costs(F=1, I=1, W=1, unit="us")), trace)
    found = what_if([trace], time_limit=600, rounds=3)
    assert found.now.makespan == 33
    assert found.plan.makespan <= 27
    assert found.gain >= 6 / 33 - 1e-9
    check(found.plan.schedule).raise_if_bad()
    assert found.plan.schedule.placement.paths == s.placement.paths
    peaks = [r.peak_in_flight for r in simulate(found.plan.schedule).ranks]
    assert max(peaks) <= 4
    assert "it would save 18" in str(found)
    assert found.as_json()["gain"] == found.gain
    assert found.notes == ("the run has full backwards; I and W are taken as halves of them",)


def test_whole_backwards_stay_whole_where_that_is_asked(tmp_path):
    trace = tmp_path / "run.pftrace"
    write_trace(simulate(build("gpipe", p=2, m=4), Costs(F=2, I=2, W=2, unit="us")), trace)
    found = what_if([trace], split=False, time_limit=600, rounds=3)
    assert not found.plan.schedule.has_split_backward
    assert found.plan.makespan <= found.now.makespan


def test_an_order_without_times_is_refused(tmp_path):
    file = tmp_path / "own.csv"
    file.write_text("0F0,0B0\n")
    with pytest.raises(UsageError, match="holds an order but no times; give traces of a run"):
        what_if([file])
