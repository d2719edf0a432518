"""Schedules and placements as values: nothing can change one, and each can be written and read."""

import copy
import pickle
import re

import numpy as np
import pytest

from hocket import build, dumps, loads
from hocket.errors import ScheduleError
from hocket.ir import Action, Kind, Line, Placement, Queue, Schedule, linear
from hocket.pattern import alternate, cut, fuse, join, keep, lay, run

ONE = Placement(((Queue(0),),), (0,))


def _refusal(make, *args, **kwargs):
    with pytest.raises(ScheduleError) as e:
        make(*args, **kwargs)
    return str(e.value)


def _written(kind, stage, mb):
    return Schedule.from_order("x", ONE, [[[(kind, stage, mb)]]])


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_writing_to_what_a_schedule_keeps_is_refused(name):
    s = build(name, p=4, m=8)
    kept = [s.codes, s.slots, s.starts, s.widths, s.slot_of_action, s.queue_of_slot]
    for array in [*kept, s.rank_of_queue, s.placement.lengths]:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 99
    for other in (pickle.loads(pickle.dumps(s)), copy.deepcopy(s)):
        assert other == s
        assert not other.placement.lengths.flags.writeable and not other.codes.flags.writeable


def test_a_schedule_keeps_no_view_of_the_arrays_it_was_given():
    s = loads("# hocket 1\nname x\npath 0: 0\n0: 0F0\n")
    big, slots, starts = np.array([0, 7]), np.array([0, 1]), np.array([0, 1])
    locked = big[:1]
    locked.flags.writeable = False
    for codes in (big[:1], locked):
        made = Schedule("x", s.placement, s.queues, codes, slots, starts)
        big[0] = slots[0] = 5
        assert made == s
        big[0] = slots[0] = 0
    assert big.flags.writeable and slots.flags.writeable and starts.flags.writeable


def test_a_renamed_schedule_shares_its_arrays():
    s = build("1f1b", p=2, m=4)
    assert s.renamed("y").codes is s.codes and s.renamed("y").slots is s.slots


@pytest.mark.parametrize(
    ("kind", "stage", "mb"),
    [(0, 1 << 20, 0), (0, -1, 0), (0, 0, -1), (len(Kind), 0, 0), (-1, 0, 0), (0, 0, 1 << 31),
     (0, 0, 10**30), (0, 1.5, 0), ("F", 0, 0), (0, None, 0)],
)  # fmt: skip
def test_an_action_outside_the_range_does_not_wrap_into_another(kind, stage, mb):
    assert _refusal(_written, kind, stage, mb) == (
        f"x: slot 0 of queue 0 is [({kind!r}, {stage!r}, {mb!r})]; a slot is a sequence of "
        "actions, their stages 0 to 1048575, their microbatches 0 to 2147483647"
    )


def test_a_slot_that_is_no_sequence_of_actions_is_refused():
    assert "x: slot 0 of queue 0 is Action(" in _refusal(
        Schedule.from_order, "x", ONE, [[Action(Kind.F, 0, 0)]]
    )
    assert "x: slot 0 of queue 0 is 3; a slot is" in _refusal(
        Schedule.from_order, "x", ONE, {Queue(0): [3]}
    )


def test_the_largest_action_has_a_code_of_its_own():
    s = _written(Kind.RECV_B, (1 << 20) - 1, (1 << 31) - 1)
    assert str(s.slot(0)) == "1048575RECV_B2147483647"


@pytest.mark.parametrize("code", [-1, len(Kind), len(Kind) + 1, 1 << 57, -(1 << 60)])
def test_a_code_of_no_action_is_refused(code):
    assert _refusal(Schedule.from_lines, "x", ONE, [lay(np.array([0, code]))]) == (
        f"the code {code} at position 1 is of no action; stages are 0 to 1048575, microbatches "
        "0 to 2147483647"
    )


def test_a_run_of_a_stage_that_has_no_code_is_refused():
    assert _refusal(run, Kind.F, 1 << 20, range(2)) == (
        "there is no stage 1048576; stages are 0 to 1048575"
    )


def test_slots_that_take_more_actions_than_there_are_are_refused():
    line = Line(np.array([0, 1]), np.array([2, 2]))
    assert _refusal(Schedule.from_lines, "x", ONE, [line]) == (
        "x: the slots of queue 0 take 4 actions, but its line has 2"
    )


@pytest.mark.parametrize(
    ("codes", "slots", "starts", "sentence"),
    [
        ([0], [0, 2], [0, 1], "slots must start at 0 and end at 1"),
        ([0], [0, 0, 1], [0, 2], "slots must be increasing: each slot has at least one action"),
        ([0], [0, 1], [0, 2], "starts must start at 0 and end at 1"),
        ([0], [0, 1], [0, 0, 1],
         "starts must be non-decreasing, with len(queues) + 1 entries"),
        ([0.5], [0, 1], [0, 1], "codes is not a row of integers, but float64 (1,)"),
        ([[0]], [0, 1], [0, 1], "codes is not a row of integers, but int64 (1, 1)"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_together_are_refused(codes, slots, starts, sentence):
    arrays = map(np.array, (codes, slots, starts))
    assert _refusal(Schedule, "x", ONE, (Queue(0),), *arrays) == sentence


@pytest.mark.parametrize(
    "name", ["a#b", "a b", "", "a\nb", "a\u2028b", "a\x00b", "\ud800", 5, None]
)
def test_a_name_that_cannot_be_read_back_is_refused(name):
    assert _refusal(build("1f1b", p=1, m=1).renamed, name) == (
        f"a schedule cannot be named {name!r}; a name is one word of printable characters "
        "without '#'"
    )


@pytest.mark.parametrize("name", ["a", "ä", "a:b", "path", "name", "</script><b>&", "1|2", "-"])
def test_a_name_that_is_one_word_is_read_back(name):
    s = build("1f1b", p=2, m=2).renamed(name)
    assert loads(dumps(s)) == s


@pytest.mark.parametrize(
    ("queue", "why"),
    [
        (Queue(0, "a b"), "a stream is named by a letter, then letters, digits, _ and -"),
        (Queue(0, "a/b"), "a stream is named by a letter, then letters, digits, _ and -"),
        (Queue(0, "1"), "a stream is named by a letter, then letters, digits, _ and -"),
        (Queue(0, "é"), "a stream is named by a letter, then letters, digits, _ and -"),
        (Queue(0, None), "a stream is named by a letter, then letters, digits, _ and -"),
        (Queue(-1), "ranks are 0 to 1048575"),
        (Queue(1 << 20), "ranks are 0 to 1048575"),
        (Queue("0"), "it must be a queue such as Queue(0)"),
        (Queue(0.0), "it must be a queue such as Queue(0)"),
        (Queue(True), "it must be a queue such as Queue(0)"),
        (0, "it must be a queue such as Queue(0)"),
        ("0", "it must be a queue such as Queue(0)"),
    ],
)
def test_a_queue_that_cannot_be_read_back_is_refused(queue, why):
    assert _refusal(Placement, ((queue,),), (0,)) == f"stage 0 of path 0 is {queue!r}; {why}"
    line = {queue: lay(np.array([0]))}
    assert _refusal(Schedule.from_lines, "x", ONE, line) == (
        f"the queue of a line is {queue!r}; {why}"
    )


def test_lists_and_numpy_integers_make_the_same_placement_as_tuples():
    want = Placement(((Queue(0), Queue(1, "comm")),), (0, 0), 2)
    given = Placement([[Queue(np.int64(0)), (1, "comm")]], np.array([0, 0]), np.int64(2))
    assert given == want and hash(given) == hash(want)
    assert {type(k) for k in given.path_of} == {int} and type(given.paths[0][0].rank) is int


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((((0, 1),), (0,)), "stage 0 of path 0 is 0; it must be a queue such as Queue(0)"),
        (((Queue(0),), (0,)),
         "path 0 is Queue(rank=0, stream=''); it must be a sequence of queues"),
        ((5, (0,)), "paths is 5; it must be a sequence of paths"),
        ((ONE.paths, 1), "path_of is 1; it must be a sequence of numbers of paths"),
        ((ONE.paths, "0"), "path_of is '0'; it must be a sequence of numbers of paths"),
        ((ONE.paths, (0, 0.0)), "the path of microbatch 1 is 0.0; it must be a whole number"),
        ((ONE.paths, (False,)), "the path of microbatch 0 is False; it must be a whole number"),
        ((ONE.paths, (0, 0), 2.0), "slices is 2.0; it must be a whole number"),
        ((ONE.paths, (0, 0), None), "slices is None; it must be a whole number"),
        ((ONE.paths, (0,), 0), "1 microbatches do not make whole sequences of 0 slices"),
        ((ONE.paths, (0, 1)), "microbatch 1 is on path 1, but the paths are 0 to 0"),
        ((((Queue(0),), (Queue(0),)), (0, 0, 0, 1), 2),
         "the slices of sequence 1 are on several paths; a stage hands keys and values to itself "
         "only, so give them one path"),
        ((ONE.paths, ()), "a schedule needs at least one microbatch"),
        ((((),), (0,)), "a placement needs at least one path with at least one stage"),
        ((((Queue(0), Queue(999_999)),), (0,)),
         "rank 1 has no stage; ranks are numbered from 0 without gaps"),
    ],
)  # fmt: skip
def test_a_placement_of_other_types_is_refused_in_one_sentence(args, sentence):
    assert _refusal(Placement, *args) == sentence


def test_more_microbatches_than_memory_holds_are_refused():
    assert _refusal(linear, 1, (1 << 24) + 1) == (
        "there are 16777217 microbatches; the most there may be is 16777216"
    )


def test_a_line_of_all_ranks_is_the_line_of_each():
    def order(r):
        w = np.minimum(5 - r, 6)
        f, b, late = (run(kind, r, range(6)) for kind in (Kind.F, Kind.I, Kind.W))
        pairs = alternate(cut(f, w), cut(b, 0, 6 - w))
        odd = keep(pairs, lambda codes: codes >> 24 & 1 == 1)  # of microbatches 1, 3 and 5
        return join(
            cut(f, 0, w), fuse(f, b), pairs, cut(pairs, 1, 2 * r), alternate(odd, odd), late
        )

    whole = Schedule.from_lines("x", linear(6, 6), order(np.arange(6)))
    assert whole == Schedule.from_lines("x", linear(6, 6), [order(r) for r in range(6)])
    assert str(whole.slot(int(whole.starts[5]))) == "5F0+5I0"
    assert [*map(str, whole.line(4))][8:12] == ["4I0", "4F2", "4I1", "4F3"]


def test_lines_of_different_lengths_do_not_alternate_and_say_so():
    f, b = run(Kind.F, 0, range(3)), run(Kind.B, 0, range(2))
    for together in (alternate, fuse):
        assert _refusal(together, f, b) == (
            "lines of 3, 2 slots; they must be equally long to go together"
        )


def test_a_line_for_a_rank_without_stages_is_refused():
    lines = {Queue(0): lay(np.array([0])), Queue(7): lay(np.array([0]))}
    assert _refusal(Schedule.from_lines, "x", ONE, lines) == (
        "queue 7 is on no path: rank 7 has no stage, the ranks are 0 to 0"
    )


def test_a_second_stream_of_a_known_rank_is_kept():
    lines = {Queue(0): lay(np.array([0])), Queue(0, "comm"): lay(np.array([4]))}
    s = Schedule.from_lines("x", ONE, lines)
    assert s.queues == (Queue(0), Queue(0, "comm")) and loads(dumps(s)) == s


def test_queues_out_of_order_would_not_be_read_back_and_are_refused():
    s = build("1f1b", p=2, m=1)
    assert _refusal(Schedule, "x", s.placement, s.queues[::-1], s.codes, s.slots, s.starts) == (
        "queues must be unique and sorted by (rank, stream)"
    )
    assert _refusal(Schedule, "x", s.placement, s.queues[:1], s.codes, s.slots, s.starts) == (
        "queue 1 is on a path, but not among the queues"
    )


def test_numbers_of_thousands_of_digits_get_a_sentence():
    huge = 10**5000
    for args in ((((Queue(huge),),), (0,)), (ONE.paths, (huge,)), (ONE.paths, (0,), huge)):
        assert re.search("of thousands of digits", _refusal(Placement, *args))
