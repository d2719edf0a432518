"""Every fault of a schedule is found, all at once."""

import pytest

from common import written
from hocket import Costs, build, check, simulate
from hocket.errors import ScheduleError, UsageError
from hocket.lower import insert_communication
from hocket.lower.receives import place_receives
from hocket.simulator.samples import simulate_samples


def _texts(s, transport="tagged"):
    return [p.text for p in check(s, transport).problems]


def test_misplaced_doubled_and_missing_actions_are_told_together():
    s = written("bad", ["0 1"], "0: 0F0 0F0 1F0 0B0", "1: 1B0")
    assert _texts(s) == [
        "rank 0 slot 2: 1F0 belongs on rank 1 (path 0 places stage 1 there)",
        "0F0 appears 2 times: rank 0 slot 0, rank 0 slot 1; each action runs once",
    ]
    assert _texts(written("bad", ["0 1"], "0: 0F0 0F1 0B0", "1: 1F0 1B0 1B1")) == [
        "rank 1: 1F1 is missing: stage 1 never runs microbatch 1",
        "rank 0: 0B1 is missing: stage 0 has no backward for microbatch 1",
    ]


def test_stages_and_microbatches_that_do_not_exist():
    s = written("bad", ["0 1 | 0"], "0: 0F0 0B0 7F0 0F3", "1: 1F0 1B0")
    assert _texts(s) == [
        "rank 0 slot 2: 7F0: path 0 has no stage 7 (its stages are 0 to 1)",
        "rank 0 slot 3: 0F3: there is no microbatch 3 (they are 0 to 0)",
    ]


def test_a_full_backward_beside_its_parts():
    s = written("bad", ["0"], "0: 0F0 0B0 0I0 0W0")
    assert _texts(s) == ["rank 0: 0B0 is beside 0I0: use a full backward, or I and W"]
    s = written("bad", ["0"], "0: 0F0 0B0 0W0")
    assert _texts(s) == ["rank 0: 0B0 is beside 0W0: use a full backward, or I and W"]


def test_w_without_its_i():
    s = written("bad", ["0"], "0: 0F0 0W0")
    assert _texts(s) == ["rank 0: 0I0 is missing, but 0W0 needs it"]


def test_a_cycle_is_printed_action_by_action_and_the_rank_that_hangs_behind_it():
    s = written(
        "ring", ["0 1 2"],
        "0: 0F0 0B0 0F1 0B1", "1: 1F1 1F0 1B0 1B1", "2: 2F0 2B0 2F1 2B1",
    )  # fmt: skip
    text, behind = _texts(s)
    assert behind == "hangs behind it: rank 2 slot 0: 2F0 waits for 1F0 on rank 1 (its input)"
    assert text == (
        "deadlock: circular wait:\n"
        "  rank 0 slot 1: 0B0 waits for 1B0 on rank 1 (the gradient of its output), "
        "which is queued behind 1F1\n"
        "  rank 1 slot 0: 1F1 waits for 0F1 on rank 0 (its input), which is queued behind 0B0"
    )


def test_two_cycles_that_do_not_touch_are_both_reported():
    s = written(
        "two", ["0 1 | 0-1", "2 3 | 2-3"],
        "0: 0F0 0B0 0F1 0B1", "1: 1F1 1F0 1B0 1B1", "2: 0F2 0B2 0F3 0B3", "3: 1F3 1F2 1B2 1B3",
    )  # fmt: skip
    texts = _texts(s)
    assert [text.count("circular wait") for text in texts] == [1, 1]
    assert "0B0" in texts[0] and "0B2" in texts[1]


def test_all_swaps_of_a_channel_are_counted():
    s = written(
        "swapped", ["0 1"],
        "0: 0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3",
        "1: 1RECV_F3 1RECV_F2 1RECV_F1 1RECV_F0 1F0 1F1 1F2 1F3",
    )  # fmt: skip
    (text,) = [p.text for p in check(s, transport="ordered").problems]
    assert text.endswith("(4 messages of this channel are out of order)")


def test_fused_pairs_that_need_each_other_are_a_cycle():
    s = written(
        "pairs", ["0 1 | 0-1"],
        "0: 0F0 0F1+0B0 0B1", "1: 1F0 1F1+1B0 1B1",
    )  # fmt: skip
    (text,) = _texts(s)
    assert "deadlock" in text
    assert "0F1+0B0" not in text  # the actions are named, not the slot


def test_a_message_without_its_other_side():
    s = written("half", ["0 1"], "0: 0F0 0SEND_F0 0RECV_B0 0B0", "1: 1F0 1B0 1SEND_B0")
    assert _texts(s) == [
        "rank 0 slot 1: 0SEND_F0 has no partner; 1RECV_F0 is missing",
        "rank 1 slot 0: 1F0 needs 0F0 of rank 0, but no SEND and RECV carry it",
    ]


def test_unknown_transport():
    with pytest.raises(UsageError) as e:
        check(written("x", ["0"], "0: 0F0 0B0"), "pigeon")
    assert str(e.value) == (
        "there is no transport 'pigeon'; choose from tagged, ordered, rendezvous"
    )


def test_thousands_of_faults_are_counted_not_listed():
    lines = " ".join(f"0F{i}" for i in range(3000))
    report = check(written("many", ["0"], f"0: {lines} 0B0"))
    assert len(report.problems) == 21
    assert report.problems[-1].text == "... and 2979 more such B"
    with pytest.raises(ScheduleError) as e:
        report.raise_if_bad()
    assert len(e.value.problems) == 21


def test_empty_slots_are_harmless():
    from hocket import Action, Kind, Schedule, simulate
    from hocket.ir import linear

    s = Schedule.from_order(
        "gaps", linear(1, 1), [[[], [Action(Kind.F, 0, 0)], [], [Action(Kind.B, 0, 0)], []]]
    )
    assert check(s).ok
    assert simulate(s).makespan == 3


def test_a_slot_of_work_and_messages_is_refused():
    s = written("mixed", ["0 1"], "0: 0F0+0SEND_F0 0RECV_B0 0B0", "1: 1RECV_F0 1F0 1B0 1SEND_B0")
    assert _texts(s) == ["rank 0 slot 0: 0F0+0SEND_F0 holds work and messages; give them apart"]


LAID_WRONG = [
    ("0: 0F0 0B0 0B0", "1: 1F0 1B0"),
    ("0: 0F0 0I0", "1: 1F0 1I0"),
    ("0: 0F0 0SEND_F0 0RECV_B0 0B0", "1: 1F0 1B0"),
    ("0: 0F0 0SEND_F0 0SEND_F0 0RECV_B0 0B0", "1: 1RECV_F0 1F0 1B0 1SEND_B0"),
    ("0: 0F0 0SEND_F0 0RECV_B0 0B0 1RECV_F0", "1: 1F0 1B0 1SEND_B0"),
    ("0: 0F0+0SEND_F0 0RECV_B0 0B0", "1: 1RECV_F0 1F0 1B0 1SEND_B0"),
]


@pytest.mark.parametrize("lines", LAID_WRONG)
def test_what_check_refuses_is_never_simulated(lines):
    from hocket import simulate

    s = written("wrong", ["0 1"], *lines)
    problems = check(s).problems
    assert problems
    with pytest.raises(ScheduleError) as e:
        simulate(s)
    assert e.value.problems == problems


def test_work_before_its_receive_is_reported_as_that_not_as_a_cycle():
    s = written("x", ["0 1"], "0: 0F0 0SEND_F0 0RECV_B0 0B0", "1: 1F0 1RECV_F0 1B0 1SEND_B0")
    assert _texts(s) == ["rank 1 slot 0: 1F0 is placed before 1RECV_F0 (slot 1), its input"]


def test_each_wait_of_a_blocked_message_names_its_own_other_side():
    s = written(
        "crossed", ["0 1"],
        "0: 0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1",
        "1: 1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    )  # fmt: skip
    assert _texts(s, "rendezvous")[1].split("\n")[1:3] == [
        "  rank 0 slot 2: 0SEND_F1 waits for 1RECV_F1 on rank 1 (the other side of the message), "
        "which is queued behind 1RECV_F0",
        "  rank 1 slot 0: 1RECV_F0 waits for 0SEND_F0 on rank 0 (the other side of the message), "
        "which is queued behind 0SEND_F1",
    ]


def test_a_cycle_through_a_slot_closes_on_paper():
    (text,) = _texts(written("x", ["0 1"], "0: 0F0+0B0", "1: 1F0 1B0"))
    assert text == (
        "deadlock: circular wait:\n"
        "  rank 0 slot 0: 0B0 waits for 1B0 on rank 1 (the gradient of its output), "
        "which is queued behind 1F0\n"
        "  rank 1 slot 0: 1F0 waits for 0F0 on rank 0 (its input), which runs together with 0B0"
    )


@pytest.mark.parametrize("more", [{}, {"cores": 2}])
def test_receives_that_block_too_early_are_told_and_not_a_traceback(more):
    s = place_receives(insert_communication(build("1f1b", p=4, m=8)))
    assert check(s).ok
    for call in (
        lambda: simulate(s, Costs(p2p_overhead=(1, 0), **more)),
        lambda: simulate(s, Costs(**more), blocking=True),
        lambda: simulate_samples(s, [Costs(p2p_overhead=(1, 0))]),
    ):
        with pytest.raises(ScheduleError) as told:
            call()
        text = str(told.value)
        assert text.startswith("deadlock when a RECV holds its queue")
        assert "0RECV_B0 waits for 1SEND_B0 on rank 1" in text
