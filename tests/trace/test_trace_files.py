"""The bytes of traces: Perfetto's messages by its own classes, JSON by a JSON reader."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
from trace_cases import EACH_US, LANES, cases, dualpipe_like, one_f_one_b, overlapping

from hocket.costs import Bytes
from hocket.errors import UsageError
from hocket.formats import trace_size, write_trace
from hocket.ir import Kind, Schedule, looped
from hocket.lower import insert_communication
from hocket.pattern import join, run
from hocket.simulator import simulate
from hocket.trace import chrome, draw, perfetto
from hocket.trace.picture import overlaps

pb2 = pytest.importorskip(
    "perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="needs the package perfetto"
)
CASES = {
    **cases(),
    "overlapping": overlapping(),
    "bytes of halves": replace(
        simulate(one_f_one_b(2, 2)), bytes=Bytes(static=0.25, activation=0.5)
    ),
}


def parsed(data):
    trace = pb2.Trace()
    trace.ParseFromString(data)
    return trace


def encoded(picture):
    return b"".join(perfetto.encode(picture))


def slices_of(trace):
    """The slices that a trace's messages say: (track, name, start, end, stage, microbatch)."""
    names, notes = {}, {}
    open_, out = {}, []
    for packet in trace.packet:
        names.update({x.iid: x.name for x in packet.interned_data.event_names})
        notes.update({x.iid: x.name for x in packet.interned_data.debug_annotation_names})
        event = packet.track_event
        if event.type == event.TYPE_SLICE_BEGIN:
            values = {
                notes[a.name_iid]: tuple(x.uint_value for x in a.array_values) or (a.uint_value,)
                for a in event.debug_annotations
            }
            assert event.track_uuid not in open_
            open_[event.track_uuid] = (names[event.name_iid], packet.timestamp, values)
        elif event.type == event.TYPE_SLICE_END:
            name, start, values = open_.pop(event.track_uuid)
            where = event.track_uuid - 1
            out.append((where, name, start, packet.timestamp, values["stage"],
                        values["microbatch"]))  # fmt: skip
    assert open_ == {}
    return out


def said(part):
    own = f"{part.kind.name} {part.mb}"
    return f"{part.verb.name.lower()} {own}" if part.verb else own


@pytest.mark.parametrize("name", CASES)
def test_perfetto_bytes_are_what_its_own_classes_write(name):
    picture = draw({name: CASES[name]}, name)
    data = encoded(picture)
    trace = parsed(data)
    assert trace.SerializeToString() == data
    assert perfetto.size(picture) == len(data)
    s = picture.slices
    wanted = [
        (track, " + ".join(map(said, picture.labels[label])), start, end, picture.places[place],
         tuple(part.mb for part in picture.labels[label]))
        for track, start, end, label, place in zip(*(x.tolist() for x in s), strict=True)
    ]  # fmt: skip
    assert slices_of(trace) == wanted


@pytest.mark.parametrize("name", CASES)
def test_perfetto_messages_hold_all_tracks_levels_and_flows(name):
    picture = draw({name: CASES[name]}, name)
    trace = parsed(encoded(picture))
    tracks = [p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")]
    assert [
        (t.name, t.parent_uuid - 1 if t.parent_uuid else None, t.sibling_order_rank) for t in tracks
    ] == [t[:3] for t in picture.tracks]
    assert {t.child_ordering for t in tracks} == {pb2.TrackDescriptor.EXPLICIT}
    assert [t.HasField("counter") for t in tracks] == [
        t.measures is not None for t in picture.tracks
    ]
    levels = [
        (e.track_uuid - 1, p.timestamp, e.counter_value or e.double_counter_value)
        for p in trace.packet
        if (e := p.track_event).type == e.TYPE_COUNTER
    ]
    assert levels == list(zip(*(x.tolist() for x in picture.counters), strict=True))
    flows = [i for p in trace.packet for i in p.track_event.flow_ids]
    ends = [i for p in trace.packet for i in p.track_event.terminating_flow_ids]
    assert sorted(flows + ends) == sorted(2 * list(range(1, len(picture.flows.source) + 1)))


def test_the_first_packet_alone_resets_what_is_interned():
    trace = parsed(encoded(draw({"it": CASES["dual"]}, "it")))
    flags = [p.sequence_flags for p in trace.packet]
    assert flags[0] == 1 and set(flags[1:]) == {2}
    assert {p.trusted_packet_sequence_id for p in trace.packet} == {1}
    colours = {x.iid: x.str.decode() for x in trace.packet[0].interned_data.correlation_id_str}
    names = {x.iid: x.name for x in trace.packet[0].interned_data.event_names}
    seen = {
        "".join(c for c in names[e.name_iid] if not c.isdigit()): colours[e.correlation_id_str_iid]
        for p in trace.packet
        if (e := p.track_event).type == e.TYPE_SLICE_BEGIN
    }
    assert seen == {"F ": "F#4382", "B ": "B#202", "F  + B ": "F+B#2653"}


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**35, 2**56 - 1, 2**61])
def test_numbers_of_every_size(value):
    pool = perfetto._Pool()
    column = pool.varints(8, np.array([value]))
    data = perfetto._copy(*pool.segments([column])).tobytes()
    assert data == perfetto._number(8, value)
    assert pb2.TracePacket.FromString(data).timestamp == value


@pytest.mark.parametrize("name", CASES)
def test_json_holds_the_same_in_the_layout_that_perfetto_reads(name):
    picture = draw({name: CASES[name]}, name)
    text = b"".join(chrome.encode(picture))
    assert chrome.size(picture) == len(text)
    events = json.loads(text)["traceEvents"]
    assert len(text.splitlines()) == len(events) + 2
    assert {e["pid"] for e in events} == {1}
    assert all(e["tid"] != e["pid"] for e in events if "tid" in e)
    for e in events:
        if e["ph"] == "C":
            assert all(type(x) in {int, float} for x in e["args"].values())
    ns = [(e["tid"] - 1000, round(e["ts"] * 1000), round(e["dur"] * 1000))
          for e in events if e["ph"] == "X"]  # fmt: skip
    begins = [(e["tid"] - 1000, round(e["ts"] * 1000)) for e in events if e["ph"] == "B"]
    finishes = [round(e["ts"] * 1000) for e in events if e["ph"] == "E"]
    assert not ns or not begins
    ns += [(*b, end - b[1]) for b, end in zip(begins, finishes, strict=True)]
    s = picture.slices
    assert ns == list(zip(s.track.tolist(), s.start.tolist(), (s.end - s.start).tolist(),
                          strict=True))  # fmt: skip
    for phase in "sf":
        ends = [e["id"] for e in events if e["ph"] == phase]
        assert sorted(ends) == list(range(1, len(picture.flows.source) + 1))


def test_json_of_a_fused_slot_and_a_message():
    timeline = simulate(insert_communication(dualpipe_like()), EACH_US)
    events = json.loads(b"".join(chrome.encode(draw({"it": timeline}, "it"))))["traceEvents"]
    fused = next(e for e in events if e.get("cat") == "F+B" and e["tid"] == 1001)
    assert fused["name"] == "Fwd 1 + Bwd 2"
    assert fused["args"] == {"microbatch": [1, 2], "stage": [0, 1]}
    assert {e["name"] for e in events if e.get("cat") == "SEND_F"} >= {"SEND_F 0"}
    assert {e["name"] for e in events if e.get("cat") == "wait"} >= {"wait RECV_F 1"}


def test_json_counters_sort_by_rank_letter_by_letter():
    events = json.loads(b"".join(chrome.encode(draw({"it": CASES["1f1b, 12 ranks"]}, "it"))))
    names = list(dict.fromkeys(e["name"] for e in events["traceEvents"] if e["ph"] == "C"))
    assert names == sorted(names) == [f"rank {i:02}" for i in range(12)]


def test_json_keeps_names_with_quotes():
    events = json.loads(b"".join(chrome.encode(draw({'a "b" \\ é': CASES["v"]}, "it"))))
    assert events["traceEvents"][0]["args"]["name"] == 'a "b" \\ é'


# --- files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["t.pftrace", "t.perfetto-trace", "t", "t.json", "t.pftrace.gz", "t.json.gz"]
)
def test_the_ending_says_the_format(tmp_path, name):
    timeline = CASES["dual"]
    written = write_trace(timeline, tmp_path / name)
    assert written.path == tmp_path / name
    data = written.path.read_bytes()
    if name.endswith(".gz"):
        data = gzip.decompress(data)
    assert len(data) == written.size.bytes
    assert written.size == trace_size(timeline, name)
    if ".json" in name:
        assert json.loads(data)["displayTimeUnit"] == "ns"
    else:
        assert len(slices_of(parsed(data))) == written.size.slices
    again = tmp_path / "again" / name
    again.parent.mkdir()
    write_trace(timeline, str(again))
    assert again.read_bytes() == written.path.read_bytes()


def test_names_of_one_timeline_and_of_several(tmp_path):
    def roots(timeline, **options):
        write_trace(timeline, tmp_path / "t.pftrace", **options)
        tracks = [p.track_descriptor for p in parsed((tmp_path / "t.pftrace").read_bytes()).packet]
        return [t.name for t in tracks if t.uuid and not t.name.startswith(("rank", "in "))]

    one, other = CASES["1f1b"], CASES["1f1b of one rank"]
    assert roots(one) == ["1f1b"]
    assert roots(one, name="mine") == ["mine"]
    assert roots({"predicted": one, "measured": other}) == [
        "predicted | measured", "predicted", "measured",
    ]  # fmt: skip
    assert roots({"a": one, "b": other}, name="both") == ["both", "a", "b"]
    assert roots({"a": one, "b": other}, ranks=[3]) == ["a"]


def test_json_has_a_process_for_each_of_several_timelines(tmp_path):
    path = write_trace({"a": CASES["dual"], "b": CASES["v"]}, tmp_path / "t.json").path
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        1: "a", 2: "b",
    }  # fmt: skip
    threads = [e["tid"] for e in events if e["name"] == "thread_name"]
    assert len(threads) == len(set(threads))
    assert {e["pid"] for e in events} == {1, 2}


def test_a_missing_folder_is_told(tmp_path):
    path = tmp_path / "no" / "t.pftrace"
    with pytest.raises(UsageError) as error:
        write_trace(CASES["v"], path)
    assert str(error.value) == (
        f"{path}: the folder {path.parent} does not exist; make it, or choose another path"
    )


def test_a_path_that_is_a_folder_is_told(tmp_path):
    with pytest.raises(UsageError) as error:
        write_trace(CASES["v"], tmp_path)
    assert str(error.value) == f"{tmp_path}: cannot be written: Is a directory"


def test_an_unknown_rank_is_told_before_anything_is_written(tmp_path):
    with pytest.raises(UsageError, match=r"^rank 7 cannot be shown: the ranks are 0 to 1$"):
        write_trace(CASES["v"], tmp_path / "t.pftrace", ranks=[7])
    assert list(tmp_path.iterdir()) == []


def test_a_begin_with_thousands_of_flows_keeps_its_lengths_right():
    picture = draw({"it": CASES["dual with lanes"]}, "it")
    n = 3_000
    flows = picture.flows._replace(source=np.zeros(n, int), target=np.arange(n) % 20 + 1)
    data = encoded(replace(picture, flows=flows))
    trace = parsed(data)
    assert trace.SerializeToString() == data
    assert max(len(p.track_event.flow_ids) for p in trace.packet) == n


# --- size -----------------------------------------------------------------------------------


def interleaved(p, m, v):
    n = p * v
    lines = [
        join(*(run(kind, s, range(m)) for kind, order in ((Kind.F, 1), (Kind.B, -1))
               for s in list(range(r, n, p))[::order]))
        for r in range(p)
    ]  # fmt: skip
    return Schedule.from_lines("interleaved", looped(p, m, v), lines)


def test_interleaved_p64_v2_m512_is_counted_before_it_is_written():
    timeline = simulate(interleaved(64, 512, 2))
    size = trace_size(timeline)
    assert (size.slices, size.flows) == (131_072, 130_048)
    assert size.events - size.counters == 391_168
    assert size.bytes == sum(map(len, perfetto.encode(draw({"interleaved": timeline}, "x"))))
    assert size.warning is None
    part = trace_size(timeline, ranks=range(8))
    assert (part.slices, part.flows) == (131_072 // 8, 2 * 2 * 7 * 512)


def test_json_size_is_predicted_within_3_percent(tmp_path):
    timeline = simulate(interleaved(16, 128, 2), LANES)
    predicted, written = trace_size(timeline, "t.json"), write_trace(timeline, tmp_path / "t.json")
    assert predicted[:3] == written.size[:3]
    assert abs(predicted.bytes / written.size.bytes - 1) < 0.03
    assert predicted.bytes > 5_000_000


def test_a_trace_too_large_for_the_page_says_what_to_do():
    size = trace_size(CASES["v"])._replace(slices=4_000_000, flows=0, counters=0, bytes=312_000_000)
    assert size.warning == (
        "the trace has 4,000,000 events and 312 MB before compression, and ui.perfetto.dev takes "
        "about 200 MB; show fewer ranks, or open it with Perfetto's trace_processor"
    )


def test_pieces_of_a_large_trace_join_without_a_seam(monkeypatch):
    timeline = CASES["1f1b, 12 ranks"]
    picture = draw({"it": timeline}, "it")
    whole = encoded(picture), b"".join(chrome.encode(picture))
    for rows in (1, 7, 64):
        monkeypatch.setattr(perfetto, "BATCH", rows)
        monkeypatch.setattr(chrome, "BATCH", rows)
        assert (encoded(picture), b"".join(chrome.encode(picture))) == whole
    assert overlaps(picture.slices) == []
