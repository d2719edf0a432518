"""The .sched form: what reads back, and what every fault says."""

import time

import numpy as np
import pytest

from common import written
from hocket import build, dumps, loads
from hocket.errors import TextError
from hocket.ir import Line, Placement, Queue, Schedule, linear
from hocket.text import as_json, from_json, head, load

GOOD = "# hocket 1\nname x\npath 0: 0 1\n0: 0F0 0B0\n1: 1F0+1B0\n"


def _faults(text):
    with pytest.raises(TextError) as e:
        loads(text, source="a.sched")
    return str(e.value).split("\n")


def test_comments_blank_lines_and_fused_slots_are_read():
    s = loads("# hocket 1\n\nname x  # the name\npath 0: 0 1\n0: 0F0 0B0 # done\n1: 1F0+1B0\n")
    assert s == loads(GOOD)
    assert [str(x) for x in s.line(Queue(1))] == ["1F0+1B0"]


def test_two_paths_keep_their_microbatches():
    s = written("x", ["0 1 | 0,2", "1 0 | 1"], "0: 0F0 1F1 0F2 1B1 0B0 0B2",
                "1: 0F1 1F0 1B0 1F2 1B2 0B1")  # fmt: skip
    assert s.placement.path_of == (0, 1, 0)
    assert "path 0: 0 1 | 0,2\npath 1: 1 0 | 1\n" in dumps(s)
    assert loads(dumps(s)) == s


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "a.sched:1: expected the first line to be '# hocket 1', found ''"),
        (GOOD.replace("# hocket 1", "# hocket 2"),
         "a.sched:1: expected the first line to be '# hocket 1', found '# hocket 2'"),
        (GOOD.replace("name x\n", ""), "a.sched:4: there is no line 'name ...'"),
        (GOOD.replace("name x", "name x y"), "a.sched:2: expected one word after 'name', found 2"),
        (GOOD.replace("path 0: 0 1\n", ""), "a.sched:4: there is no line 'path 0: ...'"),
        (GOOD.replace("0F0 0B0", "0F0 0X0"),
         "a.sched:4: expected an action such as 2F0 (stage, one of F B I W R D U A SEND_F RECV_F "
         "SEND_B RECV_B, microbatch), found '0X0'"),
        (GOOD + "0: 0F1\n", "a.sched:6: queue 0 stands twice; the first is on line 4"),
        (GOOD + "hello\n",
         "a.sched:6: expected 'name', 'slices', 'path k:' or 'queue:', found 'hello'"),
        (GOOD + "x1: 0F0\n", "a.sched:6: expected a queue such as 0 or 0/comm, found 'x1'"),
        (GOOD.replace("1: 1F0+1B0\n", ""),
         "a.sched:4: there is no line for queue 1; expected '1: ...'"),
        (GOOD.replace("path 0: 0 1", "path 0: 0 2"),
         "a.sched:3: rank 1 has no stage; ranks are numbered from 0 without gaps"),
        (GOOD.replace("path 0: 0 1", "path 0: 0 1\npath 1: 1 0"),
         "a.sched:3: path 0 does not say which microbatches take it: '... | 0-3'"),
        (GOOD.replace("path 0: 0 1", "path 0: 0 1 | 3-1"),
         "a.sched:3: expected microbatches such as 3 or 0-3 in rising order, found '3-1'"),
        (GOOD.replace("path 0: 0 1", "path 0: 0 1 | 0\npath 1: 1 0 | 0"),
         "a.sched:4: microbatch 0 is on path 0 and on path 1"),
        (GOOD.replace("0F0 0B0", "9999999F0 0B0"),
         "a.sched:4: stage 9999999 in '9999999F0' is above the largest, 1048575"),
    ],
)  # fmt: skip
def test_every_fault_is_told_with_line_and_what_was_expected(text, fault):
    assert fault in _faults(text)


def test_all_faults_are_told_at_once_in_line_order():
    faults = _faults("# hocket 1\nname\npath 0: 0 1\n0: 0F0 0Q0\n1: zz\n")
    assert [f.split(":")[1] for f in faults] == ["2", "4", "5"]


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "x.sched"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TextError, match="this is not UTF-8 text"):
        load(path)


def _small(*lines):
    return "\n".join(["# hocket 1", "name a", *lines]) + "\n"


@pytest.mark.parametrize(
    ("lines", "faults"),
    [
        (["path 0: 9999999999", "0: 0F0"],
         ["3: rank 9999999999 in '9999999999' is above the largest, 1048575"]),
        (["path 0: 0", "0: 0F0", "9999999999:"],
         ["5: rank 9999999999 in '9999999999' is above the largest, 1048575"]),
        (["path 0: 1000000", "0: 0F0"],
         ["3: rank 0 has no stage; ranks are numbered from 0 without gaps",]),
        (["path 0: 0 | 0-9999999999", "0: 0F0"],
         ["3: microbatch 9999999999 is above the largest, 16777215"]),
        (["path 0: 0 | 9999999999-5", "0: 0F0"],
         ["3: microbatch 9999999999 is above the largest, 16777215"]),
        (["path 0: 0 | 16777215", "0: 0F0"],
         ["4: microbatch 0 is on no path; they are numbered from 0"]),
        (["path 0: 0", "0: 0B2147483647"],
         ["4: microbatch 2147483647 is above the largest, 16777215"]),
        (["path 0: 0", "0: 0B9999999999"],
         ["4: microbatch 9999999999 in '0B9999999999' is above the largest, 2147483647"]),
        (["path 0: 0", "0: 0B99999999999999999999999999"],
         ["4: microbatch 99999999999999999999999999 in '0B99999999999999999999999999' is above "
          "the largest, 2147483647"]),
        (["path 0: 0", "0: 0F9999999999999"],
         ["4: microbatch 9999999999999 in '0F9999999999999' is above the largest, 2147483647"]),
        (["slices 99999999999", "path 0: 0", "0: 0F0"],
         ["3: expected a number of slices after 'slices', found 'slices 99999999999'"]),
        (["path 99999999999: 0", "0: 0F0"],
         ["3: expected 'path k: queues', found 'path 99999999999:'"]),
    ],
)  # fmt: skip
def test_a_number_that_memory_does_not_hold_is_a_fault_at_once(lines, faults):
    start = time.process_time()
    assert _faults(_small(*lines)) == [f"a.sched:{fault}" for fault in faults]
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "text", ["{0}F0", "0F{0}", "0: {0}F0", "path {0}: 0", "path 0: {0}", "path 0: 0 | 0-{0}",
             "path 0: 0 | {0}", "{0}: 0F0", "slices {0}"],
)  # fmt: skip
def test_a_number_of_thousands_of_digits_is_a_fault(text):
    assert _faults(_small("path 0: 0", "0: 0F0", text.format("9" * 5000)))


def test_zeros_before_a_number_do_not_count():
    zeros = "0" * 5000
    assert loads(_small(f"path 0: {zeros}", f"0: {zeros}F{zeros}")) == loads(
        _small("path 0: 0", "0: 0F0")
    )


@pytest.mark.parametrize("line", [":", ":::", ": 0F0", " : path 0: 0"])
def test_a_line_that_starts_with_a_colon_is_a_fault(line):
    assert _faults(GOOD + line + "\n") == [
        "a.sched:6: expected a queue such as 0 or 0/comm, found ''"
    ]


def test_a_line_for_a_rank_on_no_path_is_a_fault():
    assert _faults(_small("path 0: 0", "0: 0F0", "7: 0F0", "9/comm:")) == [
        "a.sched:5: queue 7 is on no path; the paths take ranks 0 to 0",
        "a.sched:6: queue 9/comm is on no path; the paths take ranks 0 to 0",
    ]


def test_a_second_stream_of_a_known_rank_is_read():
    s = loads(_small("path 0: 0 1", "0: 0F0", "0/comm: 0SEND_F0", "1: 1RECV_F0 1F0"))
    assert s.queues == (Queue(0), Queue(0, "comm"), Queue(1))
    assert loads(dumps(s)) == s


@pytest.mark.parametrize(
    ("old", "new"),
    [("0F0", "\u0660F0"), ("0F0", "0F\u0660"), ("path 0", "path \u0660"), ("0: 0 1", "0: \u0660 1"),
     ("0: 0 1", "0: 0 1 | \u0660"), ("1: 1", "\u0661: 1"), ("path", "slices \u0661\npath"),
     ("path", "slices \u00b2\npath"), ("0: 0 1", "0: 0/é 1")],
)  # fmt: skip
def test_digits_and_letters_of_other_scripts_are_faults(old, new):
    assert len(_faults(GOOD.replace(old, new))) == 1


@pytest.mark.parametrize("mark", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\r"])
def test_only_newlines_count_as_lines(mark):
    assert _faults(GOOD.replace("0F0 0B0", f"0F0{mark}0Q0"))[0].startswith("a.sched:4: ")
    assert _faults(GOOD.replace("name x", f"name x{mark}y"))[0].startswith("a.sched:2: ")


def test_a_byte_order_mark_and_windows_newlines_are_read(tmp_path):
    path = tmp_path / "x.sched"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load(path) == loads(GOOD) == loads("\ufeff" + GOOD)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("name x y", "2: expected one word after 'name', found 2"),
        ("name", "2: expected one word after 'name', found 0"),
        ("name a\x00", "2: expected a name of printable characters, found 'a\\x00'"),
        ("path 0 0 1", "3: expected 'path k: queues', found 'path 0 0 1'"),
        ("path x: 0 1", "3: expected 'path k: queues', found 'path x:'"),
        ("path 0: 0 y", "3: expected a queue such as 0 or 0/comm, found 'y'"),
        ("path 0:", "3: path 0 has no stages; name a queue for each stage"),
        ("path 0: 0 1 | 1-0",
         "3: expected microbatches such as 3 or 0-3 in rising order, found '1-0'"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_told_once_and_is_not_missing_too(line, fault):
    word = line.split()[0]
    old = "name x" if word == "name" else "path 0: 0 1"
    assert _faults(GOOD.replace(old, line)) == [f"a.sched:{fault}"]


def test_the_head_is_what_stands_before_the_queues():
    s = build("dualpipe", p=2, m=4)
    assert dumps(s).startswith(head(s) + "0: ") and head(s).endswith("path 1: 1 0 | 2-3\n")


def test_microbatches_that_overlap_are_told_once_a_range():
    faults = _faults(_small("path 0: 0 | 0-9999999,3", "path 1: 0 | 5-16777215", "0: 0F0"))
    assert faults == [
        "a.sched:3: microbatch 3 stands twice on path 0",
        "a.sched:4: microbatch 5 is on path 0 and on path 1",
    ]


def test_a_path_that_nobody_takes_is_read_back():
    s = loads(_small("path 0: 0 | 0", "path 1: 0 |", "0: 0F0"))
    assert s.placement.paths == ((Queue(0),),) * 2 and s.placement.path_of == (0,)
    assert loads(dumps(s)) == s == from_json(as_json(s))


@pytest.mark.parametrize("m", [1, 2, 5])
def test_microbatches_without_actions_are_read_back(m):
    full = build("1f1b", p=2, m=2)
    s = Schedule.from_lines("x", linear(2, m), [Line(full.codes[i::2], np.ones(4, int))
                                                for i in range(2)])  # fmt: skip
    assert loads(dumps(s)) == s
    empty = Schedule.from_lines("x", Placement(((Queue(0),),), (0,) * m), {})
    assert loads(dumps(empty)) == empty == from_json(as_json(empty))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"name": "a\n0: 0F0"}, "'a\\n0: 0F0' cannot be read"),
        ({"name": 5}, "5 cannot be read"),
        ({"slices": "1"}, "'1' cannot be read"),
        ({"path_of": [0, 1]}, "microbatch 1 is on path 1"),
        ({"path_of": [0, 0.0]}, "microbatch 1 is on path 0.0"),
        ({"paths": [["0 | 0-9"]]}, "'0 | 0-9' cannot be read"),
        ({"order": {"0": ["0F0 0B0"]}}, "'0F0 0B0' cannot be read"),
        ({"order": {"0": [0]}}, "0 cannot be read"),
        ({"order": ["0"]}, "'list' object has no attribute 'values'"),
    ],
)
def test_json_of_other_words_is_a_fault_and_is_not_read_as_more(change, what):
    data = as_json(loads(_small("path 0: 0", "0: 0F0 0B0"))) | change
    with pytest.raises(TextError) as e:
        from_json(data)
    assert str(e.value) == f"<json>:1: expected name, paths, path_of and order: {what}"
