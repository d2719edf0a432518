"""Foreign files that are damaged or impossible: a sentence with the place, never a result."""

import gzip
import json

import pytest

from hocket import Costs, build, limits, simulate, write_trace
from hocket.cli import main
from hocket.errors import HocketError, ScheduleError, TextError, UsageError
from hocket.files import read, read_text, unpacked
from hocket.interop.torch.csv import import_csv
from hocket.interop.traces.kineto import rank_trace, recording
from hocket.interop.traces.load import load_foreign
from hocket.interop.traces.perfetto import read_pftrace
from hocket.interop.traces.pictures import read_drawn
from hocket.text import loads


def chrome(*events):
    return json.dumps({"traceEvents": [{"pid": 0, "tid": 0, **e} for e in events]}).encode()


def begin(name, ts, **more):
    return {"ph": "B", "name": name, "ts": ts, **more}


def end(name, ts, **more):
    return {"ph": "E", "name": name, "ts": ts, **more}


def whole(name, start, stop, **more):
    return {"ph": "X", "name": name, "ts": start, "dur": stop - start, **more}


def work(kind, mb):
    return f"{kind}_d0_mb{mb}_s0_compute"


def refused(data, read=read_drawn):
    with pytest.raises(TextError) as caught:
        read(data, "t")
    return [text for _, text in caught.value.faults]


# --- slices that cross, overlap, repeat or do not end -----------------------------------------


def crossing(later=0):
    """A lane of begins and ends; the first backward begins before the second forward ends."""
    f0, f1, b0, b1 = work("F", 0), work("F", 1), work("B", 0), work("B", 1)
    return [
        begin(f0, 0), end(f0, 20), begin(f1, 20), begin(b0, 30 + later), end(f1, 40),
        end(b0, 70 + later), begin(b1, 70 + later), end(b1, 110 + later),
    ]  # fmt: skip


def test_crossing_begins_and_ends_are_paired_by_name_and_refused_with_both_times():
    assert refused(chrome(*crossing())) == [
        "rank 0: 0F1 (20 to 40 us) and 0B0 (30 to 70 us) overlap; a rank runs one at a time"
    ]


def test_a_slice_of_something_else_that_crosses_changes_no_time():
    other = [begin("iteration", 5), end("iteration", 95)]
    (found,) = read_drawn(chrome(*crossing(10), *other)).values()
    assert (found.costs.F, found.costs.full_backward) == ((20,), (40,))
    assert float(found.timeline.makespan) == 120


def test_ends_belong_to_the_begin_with_their_args():
    names = {"ph": "M", "name": "thread_name", "args": {"name": "rank 0"}}
    slices = []
    for kind, mb, start, stop in (
        ("F", 0, 0, 20),
        ("F", 1, 20, 40),
        ("B", 0, 40, 80),
        ("B", 1, 80, 120),
    ):
        args = {"stage": 0, "microbatch": mb}
        slices += [begin("work", start, cat=kind, args=args), end("work", stop, args=args)]
    (found,) = read_drawn(chrome(names, *slices)).values()
    assert (found.costs.F, found.costs.full_backward) == ((20,), (40,))


def test_overlapping_whole_slices_are_refused():
    slices = [whole(work("F", 0), 0, 50), whole(work("B", 0), 45, 85)]
    assert refused(chrome(*slices)) == [
        "rank 0: 0F0 (0 to 50 us) and 0B0 (45 to 85 us) overlap; a rank runs one at a time"
    ]


def test_a_slice_given_twice_is_refused_with_both_times():
    slices = [whole(work("F", 0), 0, 10), whole(work("F", 0), 20, 30), whole(work("B", 0), 40, 50)]
    assert refused(chrome(*slices)) == [
        "lane 0: 'F_d0_mb0_s0_compute' stands twice, at 0 us and at 20 us"
    ]


def test_an_action_on_two_lanes_is_refused():
    names = [
        {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": f"rank {tid}"}}
        for tid in (0, 1)
    ]
    args = {"stage": 0, "microbatch": 0}
    slices = [whole("w", 10 * tid, 10 * tid + 5, cat="F", tid=tid, args=args) for tid in (0, 1)]
    assert refused(chrome(*names, *slices))[0].startswith(
        "0F0 stands twice: on rank 0 at 0 us and on rank 1 at 10 us"
    )


def test_a_begin_without_end_and_an_end_without_begin_are_refused():
    events = [
        begin(work("F", 0), 0),
        end(work("F", 0), 5),
        end(work("F", 1), 7),
        begin(work("B", 0), 9),
    ]
    assert refused(chrome(*events)) == [
        "lane 0: an end of 'F_d0_mb1_s0_compute' at 7 us has no begin",
        "lane 0: 'B_d0_mb0_s0_compute' begins at 9 us and does not end",
    ]


def test_a_slice_that_ends_before_it_begins_is_refused():
    assert refused(chrome(whole(work("F", 0), 9, 3))) == [
        "lane 0: 'F_d0_mb0_s0_compute' at 9 us ends before it begins"
    ]


def test_of_many_faults_ten_are_shown_and_the_rest_counted():
    faults = refused(chrome(*(begin(work("F", mb), mb) for mb in range(50))))
    assert len(faults) == 11
    assert faults[-1] == "and 40 more of these faults"


def profiled(*ranges, rank=0, **more):
    events = [
        {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 7, "ts": start,
         "dur": stop - start}
        for name, start, stop in ranges
    ]  # fmt: skip
    data = {"schemaVersion": 1, "distributedInfo": {"rank": rank}, "traceEvents": events, **more}
    return json.dumps(data).encode()


def test_crossing_ranges_of_the_profiler_are_refused():
    assert refused(profiled(("PP:0F0", 0, 30), ("PP:0B0", 20, 60)), rank_trace) == [
        "thread 7: PP:0F0 (0 to 30 us) and PP:0B0 (20 to 60 us) overlap; a rank runs one at a time"
    ]


def test_a_range_of_the_profiler_that_stands_twice_is_refused():
    ranges = [("PP:0F0", 0, 10), ("PP:0F0", 10, 20), ("PP:0B0", 20, 30)]
    with pytest.raises(
        TextError, match="PP:0F0 runs for the time 2 before PP:0B0 runs for the time 1"
    ):
        recording([rank_trace(profiled(*ranges))])


def test_neighbouring_ranges_may_touch_by_what_the_profiler_rounds():
    ranges = [("PP:0F0", 0, 10.0005), ("PP:0B0", 10, 30)]
    assert recording([rank_trace(profiled(*ranges))]).timelines[0].makespan == 30


# --- numbers that would size something --------------------------------------------------------


@pytest.mark.parametrize("number", ["99999999999", "9" * 5000])
def test_a_microbatch_of_a_csv_that_memory_does_not_hold_is_a_fault_at_once(number):
    with pytest.raises(TextError, match="is above the largest, 16777215"):
        import_csv(f"0F{number},0B{number}\n")


def test_a_csv_with_two_actions_of_the_last_microbatch_is_refused_at_once():
    with pytest.raises(ScheduleError, match="need 16777216 forwards, but there are only 1 actions"):
        import_csv("0F16777215,0B16777215\n")


def test_a_range_of_a_microbatch_that_memory_does_not_hold_is_a_fault_at_once():
    (fault,) = refused(profiled(("PP:0F99999999", 0, 10)), rank_trace)
    assert fault.startswith("thread 7: the range 'PP:0F99999999' at 0 us: the microbatch of")


def test_a_file_whose_stages_have_a_gap_names_it_in_one_sentence():
    with pytest.raises(ScheduleError, match=r"stages 1 to 4, 6 to 1000000 are never used"):
        import_csv("0F0,5F0,1000001F0\n")


def test_a_schedule_with_two_actions_of_a_late_microbatch_is_refused_at_once():
    text = "# hocket 1\nname a\npath 0: 0\n0: 0F16777215 0B16777215\n"
    with pytest.raises(TextError, match="need 16777216 forwards, but there are only 2 actions"):
        loads(text)


# --- Perfetto ---------------------------------------------------------------------------------


def varint(number):
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def message(*fields):
    """Protobuf of (number, integer or bytes)."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def packets(*contents):
    return message(*((1, message(*fields)) for fields in contents))


def test_a_perfetto_track_that_is_its_own_parent_is_refused():
    track = (60, message((1, 7), (2, b"worker"), (5, 7)))
    slice_ = (11, message((9, 1), (11, 7)))
    (fault,) = refused(packets([track], [(8, 0), slice_]), read_pftrace)
    assert fault.endswith("track 7 stands in itself, or 8 tracks deep")


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a\x02\x58\x01",  # a slice that is a number
        packets([(60, message((1, 7), (2, 5)))]),  # a name that is a number
        packets([(60, message((2, b"a")))]),  # a track without its number
        packets([(60, message((1, b"seven")))]),
        packets([(12, message((2, message((1, 1), (2, b"\xff\xfe")))))]),  # not UTF-8
        packets([(8, 0), (11, message((9, 1), (11, 99)))]),  # no such track
        b"\x0a\x7f\x08",  # cut off
        b"\x0a" + b"\xff" * 40,
        b"\x0b",
    ],
)  # fmt: skip
def test_damaged_perfetto_bytes_are_a_sentence(data):
    (fault,) = refused(data, read_pftrace)
    assert fault.startswith("not a trace that hocket wrote: ")


def test_a_perfetto_trace_cut_anywhere_is_a_sentence_or_a_shorter_trace(tmp_path):
    path = tmp_path / "a.pftrace"
    write_trace(simulate(build("1f1b", p=2, m=2), Costs(unit="us")), path)
    data = path.read_bytes()
    for size in range(1, len(data), 7):
        try:
            read_pftrace(data[:size])
        except HocketError:
            continue


# --- other damaged bytes ----------------------------------------------------------------------


def packed():
    return gzip.compress(chrome(whole(work("F", 0), 0, 10), whole(work("B", 0), 10, 30)), mtime=0)


@pytest.mark.parametrize("at", range(10, 60, 7))
def test_damaged_gzip_data_is_a_sentence(at, tmp_path):
    data = bytearray(packed())
    data[at] ^= 0x55
    path = tmp_path / "a.json.gz"
    path.write_bytes(bytes(data))
    with pytest.raises(HocketError):
        load_foreign([path])


def test_gzip_data_that_is_cut_off_is_a_sentence(tmp_path):
    with pytest.raises(UsageError, match=r"a.json.gz: cannot be unpacked"):
        unpacked(packed()[:30], "a.json.gz")


RANK = {"ph": "M", "name": "thread_name", "args": {"name": "rank 0"}}


@pytest.mark.parametrize(
    ("args", "cat"),
    [
        ({"stage": 0}, "F"),
        ({"stage": None, "microbatch": 0}, "F"),
        ({"stage": "s", "microbatch": 0}, "F"),
        ({"stage": [0], "microbatch": 0}, "F"),
        ({"stage": 0, "microbatch": 0}, "F+B"),
        ({"stage": 0.5, "microbatch": 0}, "F"),
        ({"stage": True, "microbatch": 0}, "F"),
        ({"stage": -1, "microbatch": 0}, "F"),
        ({"stage": 0, "microbatch": 1 << 24}, "F"),
    ],
)
def test_a_slice_whose_stage_and_microbatch_do_not_fit_is_named_with_its_time(args, cat):
    (fault,) = refused(chrome(RANK, whole("x", 3, 4, cat=cat, args=args)))
    assert fault.startswith("lane 0: 'x' at 3 us needs a stage (0 to 1048575) and a microbatch")


def test_lanes_without_numbers_are_ranks_by_name():
    slices = [whole(work("F", 0), 0, 10, tid="a"), whole(work("B", 0), 10, 30, tid="a")]
    (found,) = read_drawn(chrome(*slices)).values()
    assert found.costs.F == (10,)


@pytest.mark.parametrize("ts", ["1e308", "-1e308", "1e17", "1e400", "9" * 5000])
def test_a_time_that_no_clock_shows_is_a_sentence(ts):
    text = chrome(whole(work("F", 0), 7, 9)).replace(b'"ts": 7', f'"ts": {ts}'.encode())
    assert b"9999" in text or b"e" in text
    refused(text)
    refused(profiled(("PP:0F0", 7, 9)).replace(b'"ts": 7', f'"ts": {ts}'.encode()), rank_trace)


def test_json_nested_too_deep_is_a_sentence():
    refused(b'{"traceEvents": [{"ph": "X", "args": ' + b"[" * 100_000)
    refused(b'{"schemaVersion": 1, "traceEvents": ' + b"[" * 100_000, rank_trace)


def test_a_correlation_that_is_no_integer_is_a_sentence():
    data = json.loads(profiled(("PP:0F0", 0, 10)))
    data["traceEvents"].append(
        {
            "ph": "X",
            "cat": "kernel",
            "name": "gemm",
            "ts": 1,
            "dur": 1,
            "args": {"correlation": 1.5},
        }
    )
    (fault,) = refused(json.dumps(data).encode(), rank_trace)
    assert fault.startswith("not the args of 'gemm' at 1")


def test_a_run_that_takes_no_time_is_refused():
    assert refused(chrome(whole(work("F", 0), 5, 5))) == ["all its slices together take no time"]
    with pytest.raises(UsageError, match="takes no time"):
        recording([rank_trace(profiled(("PP:0F0", 5, 5)))])


# --- sizes of files ---------------------------------------------------------------------------


@pytest.fixture
def gigabyte(tmp_path):
    """A file of 1 GB that takes no room on the disk."""
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(2**30)
    return path


@pytest.mark.parametrize("ending", ["json", "csv", "pftrace"])
def test_a_file_of_a_gigabyte_is_refused_with_its_size_before_it_is_read(gigabyte, ending, capsys):
    path = gigabyte.rename(gigabyte.with_suffix(f".{ending}"))
    assert main(["import", str(path)]) == 2
    most = limits.TEXT if ending == "csv" else limits.FILE
    sentence = f"{path}: bytes: 1,073,741,824 are more than hocket takes ({most:,})"
    assert sentence in capsys.readouterr().err


def test_a_schedule_of_a_gigabyte_is_refused_with_its_size(gigabyte):
    path = gigabyte.rename(gigabyte.with_suffix(".sched"))
    with pytest.raises(UsageError, match=r"1,073,741,824 are more than hocket takes \(67,108,"):
        read_text(path)


def test_a_file_that_does_not_end_is_refused():
    with pytest.raises(UsageError, match="/dev/zero: is no file, and has more than 10,"):
        read("/dev/zero", 10 * 2**20)


def test_what_a_small_file_unpacks_to_is_bounded():
    bomb = gzip.compress(bytes(20 * 2**20))
    assert len(bomb) < 2**16
    with pytest.raises(UsageError, match=r"to more bytes than hocket takes \(10,485,760\)"):
        unpacked(bomb, "bomb.gz", 10 * 2**20)


# --- ranges with names of other tools ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tool"),
    [("forward_step", "Megatron-LM"), ("PipelineEngine._exec_forward_pass", "DeepSpeed")],
)
def test_ranges_of_other_tools_are_named_with_what_would_be_read(name, tool):
    (fault,) = refused(profiled((name, 0, 10)), rank_trace)
    assert f"Its ranges of {tool} are named '{name}'; hocket reads PP:, stage, kind" in fault
    assert 'record_function(f"PP:{stage}F{microbatch}")' in fault
