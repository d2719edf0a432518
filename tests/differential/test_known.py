"""Faults that the oracles found, each with the right value and named for its symptom."""

from itertools import pairwise

import pytest
from against import command, costs_of, times_of, toml
from oracle_text import read
from oracle_verdicts import verdict

import hocket

JOINED = """# hocket 1
name joined
path 0: 0 1
0: 0F0 0SEND_F0 0F1 {rank0} 0B0 0RECV_B1 0B1
1: 1RECV_F0 1F0 1B0 {rank1} 1F1 1B1 1SEND_B1
"""


def test_a_send_that_blocks_is_never_received_behind_itself():
    text = "# hocket 1\nname self\npath 0: 0 0\n0: 0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0\n"
    assert verdict(read(text), "rendezvous") == "blocked"
    assert not hocket.check(hocket.loads(text), transport="rendezvous").ok


def test_a_receive_posted_on_another_queue_of_the_rank_begins_where_it_is_posted():
    text = "# hocket 1\nname within\npath 0: 0 0/x\n0: 0F0 0SEND_F0 0B0\n0/x: 1RECV_F0 1F0 1B0\n"
    times = times_of(hocket.simulate(hocket.loads(text), hocket.Costs(F=5)))
    assert times["1RECV_F0"] == (0, 5)


def test_a_message_within_a_rank_has_a_critical_path_with_p2p_overhead():
    text = "# hocket 1\nname self\npath 0: 0 0\n0: 0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0\n"
    timeline = hocket.simulate(hocket.loads(text), hocket.Costs(p2p_overhead=(0, 7)))
    assert timeline.makespan == 13
    assert len(timeline.critical_path()) == 6


def test_a_critical_path_has_no_hole_where_a_receive_takes_time_on_another_stream():
    text = "# hocket 1\nname net\npath 0: 0 0\n0: 0F0 0SEND_F0 1F0 1B0 0B0\n0/net: 1RECV_F0\n"
    timeline = hocket.simulate(hocket.loads(text), hocket.Costs(p2p_overhead=(1, 0)))
    assert timeline.makespan == 7
    steps = timeline.critical_path()
    assert all(a.end == b.start for a, b in pairwise(steps) if b.after == "queue")


def test_a_send_joined_with_a_receive_does_not_wait_for_the_overhead_of_the_receive():
    text = JOINED.format(rank0="0SEND_F1+0RECV_B0", rank1="1SEND_B0+1RECV_F1")
    times = times_of(hocket.simulate(hocket.loads(text), hocket.Costs(p2p_overhead=(100, 1000))))
    assert times["0SEND_F1"][0] == times["0F1"][1]


def test_a_receive_written_before_the_send_of_its_slot_does_not_hold_it_up():
    text = JOINED.format(rank0="0RECV_B0+0SEND_F1", rank1="1RECV_F1+1SEND_B0")
    assert hocket.check(hocket.loads(text), transport="rendezvous").ok
    assert hocket.simulate(hocket.loads(text), blocking=True).makespan == 9


def test_an_overhead_that_is_paid_for_a_slot_of_messages_is_not_work():
    text = JOINED.format(rank0="0RECV_B0+0SEND_F1", rank1="1RECV_F1+1SEND_B0")
    timeline = hocket.simulate(hocket.loads(text), hocket.Costs(p2p_overhead=(100, 1000)))
    assert [rank.busy for rank in timeline.ranks] == [6, 6]
    assert [rank.transfer for rank in timeline.ranks] == [2200, 2200]


def test_work_waits_for_its_own_receive_and_not_for_the_others_of_that_slot():
    text = """# hocket 1
name batch
path 0: 0 1
0: 0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0RECV_B1 0B1
1: 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1
1/net: 1RECV_F0+1RECV_F1
"""
    assert verdict(read(text), "rendezvous") == "runs"
    assert hocket.check(hocket.loads(text), transport="rendezvous").ok
    blocked = text.replace("1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1", "1F1 1B1 1F0 1B0 1SEND_B0 1SEND_B1")
    assert verdict(read(blocked), "rendezvous") == "blocked"
    problems = hocket.check(hocket.loads(blocked), transport="rendezvous").problems
    assert "1F1 waits for 1RECV_F1 on rank 1 (its input)" in str(problems[0])


def test_a_forward_that_takes_no_time_is_in_flight_on_a_rank_with_a_stream_of_messages():
    text = "# hocket 1\nname none\npath 0: 0 1\n0: 0F0 0SEND_F0\n1: 1F0\n1/net: 1RECV_F0\n"
    timeline = hocket.simulate(hocket.loads(text), hocket.Costs(F=0))
    assert [rank.peak_in_flight for rank in timeline.ranks] == [1, 1]


def test_a_slot_of_messages_starts_when_everything_its_parts_need_from_outside_is_there():
    text = """# hocket 1
name streams
path 0: 0 1 0
0: 0F0 0SEND_F0 2F0
0/net: 2RECV_F0
1: 1F0
1/net: 1RECV_F0+1SEND_F0
"""
    assert verdict(read(text), "tagged") == "stuck"
    assert not hocket.check(hocket.loads(text)).ok


def test_a_receive_waits_for_the_work_behind_the_send_on_another_stream():
    text = """# hocket 1
name streams
path 0: 0 1
0: 0F1 0SEND_F1 0F0 0RECV_B0 0B0 0RECV_B1 0B1
0/net: 0SEND_F0
1: 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1
"""
    assert verdict(read(text), "rendezvous") == "blocked"
    assert not hocket.check(hocket.loads(text), transport="rendezvous").ok


BOUNDS = [
    pytest.param(
        "slices 2\npath 0: 0 1\n0: 0F0 0F1 0B1 0B0\n1: 1F0 1F1 1B1 1B0", {"slice": [0.5, 0.5]}, 4.5,
        id="slices",
    ),
    pytest.param(
        "path 0: 0 | 0\npath 1: 1 |\n0: 0F0 0I0 0W0\n1:", {}, 3,
        id="a rank that runs nothing",
    ),
    pytest.param(
        "path 0: 0 1 1 0\n"
        "0: 0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0\n"
        "1: 1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0",
        {"p2p_overhead": {"recv": 0, "send": 7}}, 40,
        id="messages and p2p overhead",
    ),
    pytest.param(
        "path 0: 0 0\n0: 0F0+1F0 1B0+0B0", {"p2p_overhead": {"recv": 7, "send": 0}}, 20,
        id="p2p overhead of a slot along a chain",
    ),
    pytest.param(
        "path 0: 0\n0: 0F0+0B0", {"FB": "max", "F": 3, "B": 2}, 3,
        id="a slot along a chain",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "costs", "makespan"), BOUNDS)
def test_no_bound_is_above_the_makespan(lines, costs, makespan, tmp_path):
    (tmp_path / "one.sched").write_text(f"# hocket 1\nname one\n{lines}\n")
    (tmp_path / "one.toml").write_text(toml(costs))
    result = command("simulate", tmp_path / "one.sched", "--costs", tmp_path / "one.toml")
    assert result["makespan"] == makespan
    assert result["lower_bound"] <= makespan


def test_a_plan_is_not_called_optimal_where_a_mix_of_whole_and_split_backwards_is_faster():
    costs = costs_of({"F": 10, "I": 12, "W": 12, "B": 20})
    request = hocket.Request(
        p=2, m=2, costs=costs, shapes=("linear",), v=(1,), rounds=2, time_limit=1, named=False
    )
    plan = hocket.plan(request)
    assert not plan.proven or plan.value == 78
    assert max(plan.bound.value, plan.floor.value) <= 78
