"""Torch's CSV files: what is written, what is read, and every fault of one."""

import re
from itertools import pairwise
from types import SimpleNamespace

import pytest

from common import written
from hocket import build, check, simulate
from hocket.costs import Costs
from hocket.errors import RunError, ScheduleError, TextError, UsageError
from hocket.interop.torch.check import check_torch, deferred_receives
from hocket.interop.torch.csv import import_csv, torch_order, unrolled
from hocket.interop.torch.text import read_rows
from hocket.ir import Kind
from hocket.lower import strip_communication

GPIPE = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
MESSAGES = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\n"
    "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD\n"
)


def texts(text, **options):
    return [p.text for p in check_torch(read_rows(text, "own.csv"), **options).problems]


# --- out ----------------------------------------------------------------------------------------


def test_gpipe_p2_m2_is_written_line_by_line():
    assert torch_order(build("gpipe", p=2, m=2)).text == GPIPE


def test_dualpipev_is_written_in_single_actions_unless_blocks_are_asked_for():
    s = build("dualpipev", p=2, m=4)
    assert "OVERLAP" not in torch_order(s).text
    text = torch_order(s, overlap=True).text
    assert "(0F3;3B1)OVERLAP_F_B" in text
    assert import_csv(text, name="dualpipev").schedule == s


def test_microbatches_are_numbered_as_the_last_stage_takes_them_and_the_numbers_are_told():
    s = written("own", ["0 1"], "0: 0F0 0F1 0F2 0B2 0B0 0B1", "1: 1F2 1F0 1F1 1B2 1B0 1B1")
    order = torch_order(s)
    assert order.text == "0F1,0F2,0F0,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n"
    assert order.microbatches == (1, 2, 0)
    assert any("0 is 1, 1 is 2, 2 is 0" in note for note in order.notes)


def test_copies_of_a_stage_are_refused_with_the_reason():
    with pytest.raises(ScheduleError) as caught:
        torch_order(build("dualpipe", p=4, m=8))
    assert str(caught.value) == (
        "dualpipe runs stage 0 on ranks 0 and 3; torch.distributed.pipelining knows one rank for "
        "each stage and does not sum the gradients of copies; choose a schedule with one path, "
        "such as zb-v or dualpipev, or run this one with hocket.runtime.Pipeline"
    )


def test_slices_and_streams_are_refused():
    with pytest.raises(ScheduleError, match=r"seq1f1b cuts sequences into 2 slices"):
        torch_order(build("seq1f1b", p=2, m=2))
    with pytest.raises(ScheduleError, match=r"has the queue 0/comm beside the rank's own"):
        torch_order(build("moe-pair", p=1, m=2))


def test_late_receives_stand_at_their_consumers_and_keep_every_channel_in_order():
    for name, v in (("zb-v", None), ("dualpipev", None), ("interleaved-zb", 2)):
        for p, m in ((2, 4), (3, 6), (4, 8)):
            order = torch_order(build(name, p=p, m=m, v=v), "messages", receives="late")
            assert not [note for note in order.notes if "NCCL" in note]
            back = import_csv(order.text).schedule
            check(back, "ordered").raise_if_bad()
            check(back, "rendezvous").raise_if_bad()


def test_unshard_stands_before_every_use_and_reshard_behind_the_last():
    order = torch_order(build("interleaved", p=2, m=4, v=4), "messages", unshard=True)
    assert check_torch(read_rows(order.text)).ok
    assert order.text.count("0UNSHARD") == order.text.count("0RESHARD") >= 1


def test_a_word_for_torchtitan_says_under_which_name_the_stages_are_placed():
    for name, p, v, word in (
        ("1f1b", 4, None, "under the name 1F1B"),
        ("interleaved", 4, 2, "under the name Interleaved1F1B"),
        ("zb-v", 4, None, "under the name ZBVZeroBubble"),
        ("hanayo", 2, 4, "torchtitan cannot place stages like this"),
    ):
        notes = torch_order(build(name, p=p, m=8, v=v)).notes
        assert any(word in note for note in notes), name


# --- in -----------------------------------------------------------------------------------------


def test_messages_come_back_and_the_rest_is_left_out_and_named():
    found = import_csv(MESSAGES, name="gpipe")
    assert strip_communication(found.schedule) == build("gpipe", p=2, m=2)
    assert found.notes == ("left out: 2 REDUCE_GRAD (torch adds them by itself)",)


def test_types_of_a_newer_torch_are_tolerated_and_named():
    found = import_csv(MESSAGES.replace("0F1,", "0WAIT_SEND_F0,0F1,"), name="gpipe")
    assert strip_communication(found.schedule) == build("gpipe", p=2, m=2)
    assert "left out, not known to hocket: 1 WAIT_SEND_F" in found.notes


def test_empty_cells_are_bubbles():
    found = import_csv("0F0,0F1,,0B0,0B1\n,1F0,1F1,1B0,1B1\n", name="gpipe")
    assert found.schedule == build("gpipe", p=2, m=2)
    assert found.notes == ("left out: 2 empty cells (an order has no time)",)


def test_words_that_torch_takes_for_others_are_told_with_their_place():
    with pytest.raises(TextError) as caught:
        read_rows("1F0x,1F\n0f0,(0F0;3B1)F\n", "own.csv")
    expected = "expected an action such as 2F0, 3SEND_F1, 0UNSHARD or (0F7;7B3)OVERLAP_F_B"
    assert str(caught.value).splitlines() == [
        f"own.csv:1: cell 0: {expected}, found '1F0x'; torch reads it as 1F0 without a word",
        f"own.csv:1: cell 1: '1F' names no microbatch; {expected}",
        f"own.csv:2: cell 0: {expected}, found '0f0'",
        f"own.csv:2: cell 1: {expected}, found '(0F0;3B1)F'; torch takes it, and fails when it "
        "runs '(0F0;3B1)F'",
    ]


# --- faults, as a user meets them ---------------------------------------------------------------


def test_good_files_have_no_fault():
    assert check_torch(read_rows(GPIPE), p=2, m=2).ok
    assert check_torch(read_rows(MESSAGES), p=2, m=2).ok


SILENT = {
    "the last stage takes microbatch 1 before 0": (
        "0F0,0F1,0B1,0B0\n1F1,1F0,1B1,1B0\n",
        "rank 1 cell 1: 1F0 comes after 1F1; torch keeps losses and outputs in the order in "
        "which they are made and looks them up by microbatch: silently wrong gradients",
    ),
    "two sends of a pair are swapped": (
        MESSAGES.replace("0SEND_F0,0F1,0SEND_F1", "0F1,0SEND_F1,0SEND_F0"),
        "rank 1 cell 0: message 0 from rank 0 to rank 1 is 0SEND_F1 (rank 0 cell 2), but 1RECV_F0",
    ),
    "REDUCE_GRAD is missing": (
        MESSAGES.replace(",1REDUCE_GRAD", ""),
        "rank 1: 1REDUCE_GRAD is missing; without it the gradients of stage 1 are not divided",
    ),
    "REDUCE_GRAD is placed before the last backward": (
        MESSAGES.replace("0B1,0REDUCE_GRAD", "0REDUCE_GRAD,0B1"),
        "rank 0 cell 7: 0REDUCE_GRAD is placed before 0B1 (cell 8)",
    ),
    "REDUCE_GRAD appears twice": (
        MESSAGES.replace("0REDUCE_GRAD", "0REDUCE_GRAD,0REDUCE_GRAD"),
        "rank 0 cell 9: 0REDUCE_GRAD appears twice: the gradients would be divided twice",
    ),
    "a typo that torch reads as a full backward": (
        GPIPE.replace("1B1", "1BW1"),
        "rank 1 cell 3: torch reads 1BW1 as 1B",
    ),
}

LOUD = {
    "a SEND is missing": (
        MESSAGES.replace(",0SEND_F1", ""),
        "rank 1 cell 2: 1RECV_F1 has no partner; 0SEND_F1 is missing",
    ),
    "a RECV is missing": (
        MESSAGES.replace("1RECV_F1,", ""),
        "rank 0 cell 3: 0SEND_F1 has no partner; 1RECV_F1 is missing",
    ),
    "a SEND is placed before its forward": (
        MESSAGES.replace("0F0,0SEND_F0", "0SEND_F0,0F0"),
        "rank 0 cell 0: 0SEND_F0 is placed before 0F0 (cell 1), the output it sends",
    ),
    "F0 appears twice": (
        GPIPE.replace("0F0", "0F0,0F0"),
        "0F0 appears 2 times: rank 0 cell 0, rank",
    ),
    "B0 appears twice": (
        GPIPE.replace("1B0", "1B0,1B0"),
        "1B0 appears 2 times: rank 1 cell 2, rank",
    ),
    "a backward before its forward": (
        GPIPE.replace("1F1,1B0,1B1", "1B1,1B0,1F1"),
        "rank 1 cell 1: 1B1 is placed before 1F1 (cell 3), the activations of its forward",
    ),
    "W before I": (
        GPIPE.replace("0B0", "0W0,0I0"),
        "rank 0 cell 2: 0W0 is placed before 0I0 (cell 3), its input gradient",
    ),
    "I without W": (
        GPIPE.replace("0B0", "0I0"),
        "rank 0: 0W0 is missing: the weight gradients of stage 0 for microbatch 0 would be lost",
    ),
    "a microbatch is missing": (
        GPIPE.replace("0F1,", ""),
        "rank 0: 0F1 is missing: stage 0 never runs microbatch 1",
    ),
    "a cycle of waits": (
        "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",
        "deadlock: circular wait:",
    ),
    "a stage on two ranks": (
        GPIPE.replace("1F1,1B0", "1F1,0B0"),
        "rank 1 cell 2: 0B0: stage 0 is on rank 0 too; torch knows one rank for each stage",
    ),
    "a stage is never used": (
        GPIPE.replace("1F", "2F").replace("1B", "2B"),
        "stage 1 is never used; the stages are 0 to 2",
    ),
    "a blank line": (GPIPE + "\n", "line 3 is blank; torch counts it as a rank"),
    "an empty cell among messages": (
        MESSAGES.replace("0F1,", ",0F1,"),
        "rank 0 has 1 empty cells; torch refuses them in a file with messages: leave them out",
    ),
    "UNSHARD without messages": (
        GPIPE.replace("0F0", "0UNSHARD,0F0"),
        "rank 0 cell 0: 0UNSHARD is in a file without messages; torch refuses that",
    ),
    "UNSHARD twice": (
        MESSAGES.replace("0F0,", "0UNSHARD,0F0,0UNSHARD,"),
        "rank 0 cell 2: 0UNSHARD appears twice without a RESHARD; FSDP refuses",
    ),
    "a message within a rank": (
        "0F0,0SEND_F0,1RECV_F0,1F0,1B0,1SEND_B0,0RECV_B0,0B0,0REDUCE_GRAD,1REDUCE_GRAD\n",
        "rank 0 cell 1: 0SEND_F0: stage 1 is on rank 0 too; torch hands its value over without",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SILENT)
def test_what_torch_trains_wrong_without_a_word_is_told(what):
    text, sentence = SILENT[what]
    assert any(found.startswith(sentence) for found in texts(text)), texts(text)


@pytest.mark.parametrize("what", LOUD)
def test_what_torch_fails_or_hangs_on_is_told_with_its_place(what):
    text, sentence = LOUD[what]
    assert any(found.startswith(sentence) for found in texts(text)), texts(text)


def test_the_runs_own_numbers_are_compared():
    assert "the file has 2 ranks, but the run has 3" in texts(GPIPE, p=3)
    assert "the file has 2 microbatches, but the run has 4" in texts(GPIPE, m=4)
    assert "rank 0 cell 1: 0F1: there is no microbatch 1 (they are 0 to 0)" in texts(GPIPE, m=1)


def test_the_lock_step_runtime_needs_padding_by_columns():
    assert any("pad with empty cells" in text for text in texts(GPIPE, runtime="multi"))
    padded = "0F0,0F1,,,0B0,0B1\n,1F0,1F1,1B0,1B1,\n"
    assert texts(padded, runtime="multi") == []


def test_padding_puts_nothing_in_the_column_of_what_it_needs():
    padded = torch_order(build("gpipe", p=2, m=2), "padded")
    assert padded.text == "0F0,0F1,,0B0,0B1\n,1F0,1F1,1B0,1B1\n".replace("0F1,,0B0", "0F1,,,0B0")
    with pytest.raises(ScheduleError, match="zb-v has neighbouring stages on one rank"):
        torch_order(build("zb-v", p=2, m=4), "padded")


def test_blocks_rows_and_eval_are_told_as_notes():
    order = torch_order(build("dualpipev", p=2, m=4), overlap=True)
    notes = check_torch(read_rows(order.text)).notes
    assert notes[0].startswith("6 OVERLAP_F_B: torch runs their parts one after the other")
    assert "give every rank its stages in rising order: rank 0: 0 3, rank 1: 1 2" in notes
    assert "stages 1 and 2 are on one rank: torch's eval() fails with that" in notes


# --- cases --------------------------------------------------------------------------------------


def test_deferred_receives_cross_for_v_schedules_and_not_for_loops():
    crossed = {"zb-v": (2, 3, 4), "dualpipev": (3, 4), "interleaved-zb": (2,)}
    for name in ("zb-v", "dualpipev", "interleaved-zb", "interleaved", "looped-bfs"):
        v = 2 if "zb-v" != name != "dualpipev" else None
        for p in (2, 3, 4):
            found = deferred_receives(build(name, p=p, m=2 * p, v=v))
            assert found.ok == (p not in crossed.get(name, ())), (name, p)
            assert check_torch(read_rows(found.safe.text)).ok


def test_a07_messages_of_one_pair_that_are_taken_in_another_order_are_told():
    s = build("interleaved", p=2, m=4, v=2)
    rows = [row.split(",") for row in torch_order(s, "messages").text.splitlines()]
    silent = 0
    for rank, row in enumerate(rows):
        receives = [i for i, word in enumerate(row) if "RECV" in word]
        for i, j in pairwise(receives):
            swapped = [list(r) for r in rows]
            swapped[rank][i], swapped[rank][j] = row[j], row[i]
            found = texts("\n".join(map(",".join, swapped)) + "\n")
            assert found, (row[i], row[j])
            silent += any("without tags the two are swapped silently" in text for text in found)
    assert silent >= 4


@pytest.mark.parametrize(("p", "c", "early", "late"), [(2, 0, 20.0, 13.5), (4, 0, 47.5, 28.5)])
def test_a13_late_receives_lose_nothing_where_a_receive_holds_its_rank(p, c, early, late):
    s = build("interleaved", p=p, m=2 * p, v=2)
    costs = Costs(F=0.5, I=0.5, W=0.5, B=1.0, latency=float(c))
    times = {}
    for receives in ("early", "late"):
        order = import_csv(torch_order(s, "messages", receives=receives).text).schedule
        check(order, "ordered").raise_if_bad()
        times[receives] = float(simulate(order, costs, blocking=True).makespan)
        assert float(simulate(order, costs).makespan) == late
    assert times["late"] < times["early"] <= early


def _stages(indices, n, rank=0, p=2, **more):
    return [
        SimpleNamespace(stage_index=i, num_stages=n, group_rank=rank, group_size=p, **more)
        for i in indices
    ]


def test_a04_stages_placed_in_a_loop_for_a_v_are_refused_before_any_message():
    from hocket.interop.torch.runtime import torch_schedule

    with pytest.raises(RunError) as caught:
        torch_schedule(build("zb-v", p=4, m=8), _stages([0, 4], 8, p=4))
    assert str(caught.value) == (
        "rank 0 was given the stages [0, 4], but zb-v places [0, 7] there; the first wrong one is "
        "stage 4. All of them: rank 0: 0 7, rank 1: 1 6, rank 2: 2 5, rank 3: 3 4"
    )


def test_a32_an_edge_that_skips_a_stage_is_refused_by_its_name():
    from hocket.interop.torch.runtime import torch_schedule

    first, second = (
        SimpleNamespace(name="a", op="call_module"),
        SimpleNamespace(name="b", op="call_module"),
    )
    traced = {
        "node": SimpleNamespace(all_input_nodes=[first, second]),
        "submod_to_stage_index": {"a": 0, "b": 1, "c": 2},
    }
    with pytest.raises(RunError, match=re.escape("the edge 0->2 skips a stage")):
        torch_schedule(build("1f1b", p=3, m=3), _stages([2], 3, rank=2, p=3, **traced))


def test_torch_schedule_refuses_defer_pp_recv_and_another_number_of_microbatches():
    from hocket.interop.torch.runtime import torch_schedule

    s = build("zb-v", p=2, m=4)
    with pytest.raises(UsageError, match='give receives="late"'):
        torch_schedule(s, _stages([0, 3], 4), defer_pp_recv=True)
    with pytest.raises(UsageError, match="zb-v has 4 microbatches, but n_microbatches is 8"):
        torch_schedule(s, _stages([0, 3], 4), n_microbatches=8)


def test_unrolled_keeps_the_actions():
    s = build("dualpipev", p=2, m=4)
    flat = unrolled(s)
    assert flat.is_single
    assert sorted(flat.codes.tolist()) == sorted(s.codes.tolist())
    assert Kind.B in flat.kinds
