"""What a timeline tells: reasons of gaps, critical path, memory levels."""

from dataclasses import replace

import numpy as np

from common import written
from hocket import Bytes, Costs, build, simulate
from hocket.ir import Queue


def test_a_gap_is_split_into_waiting_for_the_action_and_for_its_message():
    t = simulate(build("1f1b", p=2, m=1), Costs(F=4, B=6, latency=3))
    gaps = [(g.start, g.end, g.cause, g.phase, str(g)) for g in t.gaps(Queue(1))]
    assert gaps == [
        (0, 4, "dependency", "warm-up", "1F0 on 1 waits for 0F0, which runs on 0"),
        (4, 7, "transfer", "warm-up", "1F0 on 1 waits for 0F0, which is under way from 0"),
        (17, 26, "end", "cool-down", "1 has nothing left to do"),
    ]
    assert t.ranks[1].waits == {"dependency": 4, "transfer": 3, "end": 9}


def test_a_gap_behind_a_blocking_receive_names_the_send():
    s = written("x", ["0 1"], "0: 0F0 0SEND_F0 0RECV_B0 0B0", "1: 1RECV_F0 1F0 1B0 1SEND_B0")
    t = simulate(s, Costs(F=4, B=6, latency=3), blocking=True)
    assert [str(g) for g in t.gaps(Queue(1))][:2] == [
        "1F0 on 1 waits for 0SEND_F0, which runs on 0",
        "1F0 on 1 waits for 0SEND_F0, which is under way from 0",
    ]


def test_a_measured_gap_in_which_nothing_was_missing_says_so():
    t = simulate(build("gpipe", p=1, m=2))
    late = np.array([0, 2, 2, 2])
    run = replace(t, start=t.start + late, end=t.end + late)
    assert [str(g) for g in run.gaps(Queue(0))] == [
        "0F1 on 0 has what it needs, but has not started"
    ]


def test_phases_of_a_1f1b_rank():
    bubble = simulate(build("1f1b", p=4, m=8), Costs(F=1, B=2)).ranks[2].bubble
    assert bubble == {"warm-up": 4, "steady": 0, "cool-down": 5}


def test_critical_path_of_1f1b_goes_down_once_and_stays():
    path = simulate(build("1f1b", p=3, m=2), Costs(F=1, B=2)).critical_path()
    assert [str(x.slot) for x in path] == ["0F0", "1F0", "2F0", "2B0", "2F1", "2B1", "1B1", "0B1"]
    assert [x.after for x in path].count("message") == 4


def test_levels_rise_at_the_start_of_f_and_fall_at_the_end_of_b():
    t = simulate(build("1f1b", p=2, m=2), Costs(F=1, B=2, bytes=Bytes(activation=5, gradient=2)))
    ticks, values = t.levels("in_flight")[0]
    assert list(zip(ticks.tolist(), values.tolist(), strict=True)) == [
        (0, 1), (1, 1), (1, 2), (2, 2), (4, 2), (6, 1), (7, 1), (9, 0),
    ]  # fmt: skip
    assert t.levels("bytes")[0][1].max() == 12 == t.ranks[0].peak_bytes


def test_a_mirrored_rank_holds_the_static_memory_of_both_its_stages():
    t = simulate(build("dualpipe", p=2, m=4), Costs(bytes=Bytes(static=(100, 10))))
    assert t.static_bytes == [110, 110]


def test_split_backward_frees_at_i_what_is_not_held():
    costs = Costs(bytes=Bytes(activation=10, held=4))
    t = simulate(written("x", ["0"], "0: 0F0 0F1 0I0 0I1 0W0 0W1"), costs)
    assert t.levels("bytes")[0][1].tolist() == [10, 10, 20, 20, 20, 14, 14, 8, 8, 4, 4, 0]


def test_two_streams_of_a_rank_count_as_two_queues_to_keep_busy():
    s = written("x", ["0 0/comm"], "0: 0F0 0B0", "0/comm: 1F0 1B0")
    t = simulate(s)
    assert (t.makespan, t.ranks[0].busy, t.ranks[0].idle) == (6, 6, 6)
    assert t.bubble_ratio == 0.5


def test_span_is_the_longest_rank_and_makespan_the_whole():
    t = simulate(build("zb-h2", p=4, m=8))
    assert (t.makespan, t.span) == (27, 24)


def test_a_posted_receive_begins_when_the_work_before_it_ends():
    s = written("x", ["0 1"], "0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
                "1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1")  # fmt: skip
    t = simulate(s, Costs(F=10, B=20, latency=1))
    span = {str(x): (t.start[i], t.end[i]) for i, x in enumerate(s.line(Queue(0)))}
    assert span["0RECV_B0"] == (20, 42)


def test_lanes_of_written_messages_are_transfers_not_idle_time():
    from hocket.lower import insert_communication

    t = simulate(insert_communication(build("1f1b", p=2, m=2)), Costs(p2p_overhead=(1, 2)))
    for r in t.ranks:
        assert r.busy + r.transfer + r.idle == t.makespan
        assert sum(r.waits.values()) == r.idle == sum(r.bubble.values())
    for queue in t.schedule.queues:
        assert sum(g.end - g.start for g in t.gaps(queue)) == t.ranks[queue.rank].idle


def test_a_lower_bound_takes_each_stage_with_the_kinds_it_runs():
    from hocket.search.bounds import lower_bounds

    s, costs = build("moe-pair", p=3, m=1), Costs(F=1, I=2, W=1, B=1)
    makespan = simulate(s, costs).makespan
    assert all(bound.value <= makespan for bound in lower_bounds(s, costs))
