"""The .sched form: what reads back, and what every fault says."""

import pytest

from common import written
from hocket import dumps, loads
from hocket.errors import TextError
from hocket.ir import Queue

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
         "a.sched:4: expected an action such as 2F0 (stage, one of F B I W SEND_F RECV_F SEND_B "
         "RECV_B, microbatch), found '0X0'"),
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
    assert [f.split(":")[1] for f in faults] == ["2", "4", "5", "5"]


def test_a_file_that_is_not_text_is_refused(tmp_path):
    from hocket.text import load

    path = tmp_path / "x.sched"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TextError, match="this is not UTF-8 text"):
        load(path)
