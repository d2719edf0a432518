"""Traces of torch.profiler as measured timelines: clocks, steps, GPUs, costs read back."""

import gzip
import json
import re

import numpy as np
import pytest

from hocket import build, simulate
from hocket.costs import Costs, costs_toml, load_costs
from hocket.errors import ScheduleError, TextError, UsageError
from hocket.interop.traces.clocks import ONE, Line, lines_of
from hocket.interop.traces.kineto import (
    kernel_spans,
    rank_trace,
    recording,
)
from hocket.interop.traces.load import load_foreign
from hocket.ir import Kind
from hocket.lower import insert_communication, strip_communication
from hocket.measured.clocks import Messages
from hocket.measured.readings import readings
from hocket.text import loads

BASE = 1_790_857_026_000_000_000


def files(timeline, *, ahead=(), hosts=None, steps=1, base=True):
    """What torch.profiler would have written of a simulated timeline with messages, by rank.

    ahead: by how many us each rank's clock is ahead.
    """
    s = timeline.schedule
    ranks = s.rank_of_queue[s.queue_of_slot[s.slot_of_action]].tolist()
    span = float(timeline.makespan) + 50
    out = []
    for rank in range(s.p):
        shift = ahead[rank] if ahead else 0
        events = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]
        for step in range(steps):
            for a, code in enumerate(s.codes.tolist()):
                if ranks[a] == rank:
                    events += _events(timeline, a, code, shift + step * span)
        out.append({
            "schemaVersion": 1, "distributedInfo": {"rank": rank},
            "host_name": hosts[rank] if hosts else "one",
            **({"baseTimeNanoseconds": BASE} if base else {}), "traceEvents": events,
        })  # fmt: skip
    return out


def _events(timeline, a, code, shift):
    action = str(timeline.schedule.slot(int(timeline.schedule.slot_of_action[a])))
    start, end = float(timeline.start[a]), float(timeline.end[a])
    if "RECV" in action:  # posted, then waited for in a range of its own
        post = _range(f"PP:{action} post", start + shift, start + shift)
        return [post, _range(f"PP:{action} wait", start + shift, end + shift)]
    op = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 7, "dur": 1}
    return [_range(f"PP:{action}", start + shift, end + shift), {**op, "ts": start + shift}]


def _range(name, start, end):
    return {
        "ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 7,
        "ts": start, "dur": end - start,
    }  # fmt: skip


def traces(written):
    return [rank_trace(json.dumps(x).encode(), f"rank{i}.json") for i, x in enumerate(written)]


@pytest.fixture(scope="module")
def predicted():
    costs = Costs(F=(10, 12), I=(11, 9), W=(8, 7), latency=3, unit="us")
    return simulate(insert_communication(build("zb-h1", p=2, m=4)), costs)


# --- clocks ----------------------------------------------------------------------------------


def test_a25_apparent_latencies_of_6_and_minus_4_are_an_offset_of_5_and_a_latency_of_1():
    messages = Messages(
        np.array([0, 1]), np.array([1, 0]), np.array([0.0, 100.0]), np.array([6.0, 96.0])
    )
    assert lines_of(2, [messages]) == [[ONE, Line(-5.0, 0.0, 1.0)]]
    sent, received = messages.sent - (0, 5), messages.received - (5, 0)
    assert (received - sent).tolist() == [1.0, 1.0]


def test_messages_one_way_only_bound_nothing_but_never_travel_back_in_time():
    messages = Messages(np.array([0]), np.array([1]), np.array([10.0]), np.array([4.0]))
    assert lines_of(2, [messages]) == [[ONE, Line(6.0, 0.0, None)]]


@pytest.mark.parametrize("p", [2, 4])
def test_clocks_of_other_hosts_are_aligned_by_messages(p):
    truth = simulate(insert_communication(build("1f1b", p=p, m=8)), Costs(latency=2, unit="us"))
    ahead = [0, 5_000, -70_000, 123_456][:p]
    run = recording(traces(files(truth, ahead=ahead, hosts=[f"h{r}" for r in range(p)])))
    seen = run.timelines[0]
    assert float(seen.makespan) == pytest.approx(float(truth.makespan), rel=0.05)
    found = {str(a): t for a, t in zip(map(str, _actions(seen)), seen.start, strict=True)}
    want = {str(a): t for a, t in zip(map(str, _actions(truth)), truth.start, strict=True)}
    assert max(abs(found[a] - float(want[a])) for a in want) <= 2.0 * p
    assert (seen.delays[seen.graph.crosses] >= -1e-6).all()
    assert run.notes[1].startswith("clocks aligned by messages: host h1 -")


def _actions(timeline):
    s = timeline.schedule
    return [s.slot(int(i)) for i in s.slot_of_action]


def test_ranks_of_one_host_keep_their_clock(predicted):
    run = recording(traces(files(predicted)))
    assert "the ranks read one clock" in run.notes


# --- what comes out --------------------------------------------------------------------------


def test_a_written_trace_comes_back_as_the_same_order_times_and_costs(predicted):
    run = recording(traces(files(predicted, steps=3)), "zb-h1")
    assert len(run.timelines) == 3
    for seen in run.timelines:
        assert strip_communication(seen.schedule) == build("zb-h1", p=2, m=4)
        assert float(seen.makespan) == pytest.approx(float(predicted.makespan))
        assert seen.measured
        assert seen.unit == "us"
        assert [r.busy for r in seen.ranks] == pytest.approx(
            [float(r.busy) for r in predicted.ranks]
        )
    costs = run.readings.costs()
    assert pytest.approx((10, 12)) == costs.F
    assert pytest.approx((11, 9)) == costs.I
    assert pytest.approx((8, 7)) == costs.W
    again = simulate(build("zb-h1", p=2, m=4), costs)
    assert float(again.makespan) == pytest.approx(float(predicted.makespan), rel=0.02)


def test_costs_are_written_with_their_spread_and_read_again(predicted, tmp_path):
    seen = readings([recording(traces(files(predicted, steps=2))).timelines[0]])
    file = tmp_path / "costs.toml"
    file.write_text(costs_toml(seen.costs(), seen.rows()))
    assert "# F of stage 0: mean 10, median 10, middle half 10 to 10, 4 times" in (file.read_text())
    assert pytest.approx((10, 12)) == load_costs(file).F


def test_blocks_of_a_forward_and_a_backward_are_one_slot():
    slots = ["PP:0F0", "PP:0F1", "PP:(0F2;0B0)OVERLAP_F_B", "PP:0B1", "PP:0B2"]
    events = [_range(name, 10.0 * i, 10.0 * i + 9) for i, name in enumerate(slots)]
    run = recording(traces([{"schemaVersion": 1, "traceEvents": events}]))
    s = run.timelines[0].schedule
    assert [str(x) for x in s.line(0)] == ["0F0", "0F1", "0F2+0B0", "0B1", "0B2"]


def test_without_traced_operations_work_begins_when_the_message_was_sent():
    one = [_range("PP:0F0", 0, 10), _range("PP:0SEND_F0", 10, 11), _range("PP:0RECV_B0", 11, 12)]
    one += [_range("PP:0B0", 12, 60)]
    two = [_range("PP:1RECV_F0", 0, 1), _range("PP:1F0", 1, 20), _range("PP:1B0", 20, 40)]
    two += [_range("PP:1SEND_B0", 40, 41)]
    written = [
        {"schemaVersion": 1, "distributedInfo": {"rank": r}, "host_name": "h", "traceEvents": e}
        for r, e in enumerate((one, two))
    ]
    seen = recording(traces(written)).timelines[0]
    start = {str(a): float(t) for a, t in zip(_actions(seen), seen.start, strict=True)}
    assert (start["1F0"], start["0B0"]) == (10, 40)


# --- GPUs ------------------------------------------------------------------------------------


def test_kernels_belong_to_the_range_in_which_they_were_launched():
    ranges = [(0.0, 5.0), (6.0, 9.0)]
    kernels = [(1.0, 20.0, 30.0), (4.0, 30.0, 45.0), (5.5, 46.0, 47.0), (6.0, 50.0, 60.0)]
    assert kernel_spans(ranges, kernels) == {0: (20.0, 45.0), 1: (50.0, 60.0)}


def test_times_of_the_gpu_are_taken_by_correlation_where_it_was_traced():
    events = []
    for i, name in enumerate(("PP:0F0", "PP:0B0")):
        events.append(_range(name, 10 * i, 10 * i + 5))
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 9}
        events.append({**launch, "ts": 10 * i + 1, "dur": 1, "args": {"correlation": i + 1}})
        kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7}
        events.append({
            **kernel, "ts": 100 + 50 * i, "dur": 40,
            "args": {"stream": 7, "correlation": i + 1, "grid": [1, 2, 3]},
        })  # fmt: skip
    run = recording(traces([{"schemaVersion": 1, "traceEvents": events}]))
    seen = run.timelines[0]
    assert float(seen.makespan) == 90
    assert "times of computation are those of the GPU" in run.notes
    assert float(readings([seen]).costs().F[0]) == 40


def test_device_ranges_of_the_profiler_are_taken_first():
    events = [_range("PP:0F0", 0, 5), _range("PP:0B0", 5, 9)]
    events += [
        {**_range(name, start, end), "cat": "gpu_user_annotation"}
        for name, start, end in (("PP:0F0", 100, 130), ("PP:0B0", 130, 190))
    ]
    seen = recording(traces([{"schemaVersion": 1, "traceEvents": events}])).timelines[0]
    assert float(seen.makespan) == 90


# --- faults ----------------------------------------------------------------------------------


def test_traces_without_labels_say_how_to_get_them():
    with pytest.raises(TextError, match=r"no ranges PP:2F0; torch's Schedule1F1B writes none"):
        rank_trace(b'{"schemaVersion": 1, "traceEvents": []}')
    events = [_range("Forward 0", 0, 1)]
    with pytest.raises(TextError, match="ScheduleGPipe does not say which action"):
        rank_trace(json.dumps({"traceEvents": events}).encode())
    with pytest.raises(TextError, match=r"own.json:1: not a trace of torch.profiler"):
        rank_trace(b"{", "own.json")


def test_traces_that_do_not_fit_together_are_refused(predicted):
    both = traces(files(predicted))
    with pytest.raises(UsageError, match=r"rank0.json and rank0.json are both of rank 0"):
        recording([both[0], both[0]])
    other = files(predicted)
    other[1] = {**files(predicted)[0], "distributedInfo": {"rank": 1}}
    with pytest.raises(UsageError, match="they are of two replicas of the pipeline"):
        recording(traces(other))


def test_traces_of_some_ranks_only_are_refused(predicted, tmp_path):
    first = traces(files(predicted))[0]
    with pytest.raises(UsageError, match=r"rank0.json: 0SEND_F0 is a message with stage 1, which"):
        recording([first])
    with pytest.raises(UsageError, match=r"gone.json: cannot be read: No such file or directory$"):
        load_foreign([tmp_path / "gone.json"])


def test_a_step_that_was_cut_off_is_left_out(predicted):
    written = files(predicted, steps=2)
    cut = [e for e in written[0]["traceEvents"] if e["ph"] == "X"][-3:]
    written[0]["traceEvents"] = [e for e in written[0]["traceEvents"] if e not in cut]
    assert len(recording(traces(written)).timelines) == 1


def test_files_are_read_from_disk_compressed_or_not(predicted, tmp_path):
    paths = []
    for rank, written in enumerate(files(predicted)):
        path = tmp_path / f"trace_rank{rank}.json.gz"
        path.write_bytes(gzip.compress(json.dumps(written).encode()))
        paths.append(path)
    found = load_foreign(paths, name="own")
    assert found.schedule.name == "own"
    assert found.timeline is not None
    assert found.schedule.p == 2
    assert found.schedule.has_communication is False
    assert found.costs.unit == "us"
    assert Kind.I in found.schedule.kinds
    with pytest.raises(UsageError, match="there is no step 4; the traces have 0 to 0"):
        load_foreign(paths, step=4)


# --- clocks that drift, or that nothing bounds ------------------------------------------------


def test_a_clock_that_runs_400_ppm_fast_over_100_seconds_is_a_line():
    truth = simulate(insert_communication(build("1f1b", p=2, m=8)), Costs(latency=2, unit="us"))
    written = files(truth, steps=20, hosts=["a", "b"])
    per_step = len(written[1]["traceEvents"]) // 20
    for rank, one in enumerate(written):
        for i, event in enumerate(e for e in one["traceEvents"] if e["ph"] == "X"):
            ts = event["ts"] + 5e6 * (i // per_step)  # a step every 5 s
            stop = ts + event["dur"]
            if rank:
                ts, stop = 5000 + ts * 1.0004, 5000 + stop * 1.0004
            event["ts"], event["dur"] = ts, stop - ts
    run = recording(traces(written))
    for seen in run.timelines:
        assert float(seen.makespan) == pytest.approx(float(truth.makespan), abs=3)
        assert (seen.delays[seen.graph.crosses] >= -1e-3).all()
    note = run.notes[1]
    offset, rate = map(float, re.search(r"host b (\S+) us (\S+) ppm", note).groups())
    assert offset == pytest.approx(-5000, abs=5)
    assert rate == pytest.approx(-400, abs=0.3)
    assert float(re.search(r"within (\S+) us", note)[1]) < 5


def test_a_clock_that_jumps_has_a_line_of_its_own_before_and_after():
    truth = simulate(insert_communication(build("1f1b", p=2, m=8)), Costs(latency=2, unit="us"))
    written = files(truth, steps=4, hosts=["a", "b"])
    own = [e for e in written[1]["traceEvents"] if e["ph"] == "X"]
    for event in own[len(own) // 2 :]:
        event["ts"] += 700_000
    run = recording(traces(written))
    assert "no line fits the whole recording: 2 parts of it have their own" in run.notes[1]
    for seen in run.timelines:
        assert float(seen.makespan) == pytest.approx(float(truth.makespan), abs=3)


def test_forward_only_traces_of_two_hosts_claim_nothing_of_their_clocks():
    s = insert_communication(gpipe_forward(2, 4))
    truth = simulate(s, Costs(latency=2, unit="us"))
    run = recording(traces(files(truth, ahead=[0, 5000], hosts=["a", "b"])))
    assert "the ranks read one clock" not in run.notes
    assert run.notes[1].startswith("nothing bounds the clock of host b: no messages go both ways")


def gpipe_forward(p, m):
    lines = [f"{r}: " + " ".join(f"{r}F{mb}" for mb in range(m)) for r in range(p)]
    path = " ".join(map(str, range(p)))
    return loads("\n".join(["# hocket 1", "name forward", f"path 0: {path}", *lines, ""]))


def test_ranks_of_one_host_share_its_line():
    truth = simulate(insert_communication(build("1f1b", p=4, m=8)), Costs(latency=2, unit="us"))
    run = recording(traces(files(truth, ahead=[0, 0, 900, 900], hosts=["a", "a", "b", "b"])))
    assert run.notes[1].startswith("clocks aligned by messages: host b -900.0 us (within ")


def test_a_step_without_one_of_its_forwards_is_refused_and_does_not_hang(predicted):
    written = files(predicted)
    for events in (x["traceEvents"] for x in written):
        events[:] = [x for x in events if x["name"] != "PP:0F0"]
    with pytest.raises(ScheduleError, match="0F0 is missing: stage 0 never runs microbatch 0"):
        recording(traces(written))
