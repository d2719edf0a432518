"""Traces in Perfetto's real engine: they load without complaint and say what the timeline says."""

import re
from collections import Counter
from fractions import Fraction

import pytest
from trace_cases import cases, disordered, overlapping

from hocket.costs import Bytes
from hocket.formats import write_trace
from hocket.ir import Kind
from hocket.timeline import Timeline
from hocket.trace.slices import UNITS

CASES = {**cases(), "overlapping": overlapping(), "disordered": disordered(0)}
FORMATS = ("pftrace", "json")
JSON_NAMES = {"F": "Fwd", "B": "Bwd", "I": "Igrad", "W": "Wgrad",
              "R": "Recompute", "D": "Offload", "U": "Reload"}  # fmt: skip


def ns(timeline: Timeline, time) -> int:
    """A time of the timeline as the trace has it."""
    return int(Fraction(time) * UNITS[timeline.unit] + Fraction(1, 2))


def load(engine, tmp_path, timeline, ending, **options):
    path = write_trace(timeline, tmp_path / f"t.{ending}", **options).path
    engine.load(path.read_bytes())


def healthy(engine):
    bad = engine.rows(
        "select name, severity, value from stats where value > 0 and severity != 'info'"
    )
    assert bad == []
    assert engine.rows("select count(*) from slice where depth > 0 or dur < 0") == [(0,)]
    crossed = engine.rows(
        "select a.name, b.name from slice a join slice b using (track_id)"
        " where a.id < b.id and a.ts < b.ts + b.dur and b.ts < a.ts + a.dur"
    )
    assert crossed == []


def tracks_of(engine, ending):
    """Track id -> name, the rank's before it."""
    if "json" in ending:
        sql = "select tt.id, t.name from thread_track tt join thread t using (utid)"
        return dict(engine.rows(sql))
    rows = engine.rows("select id, name, parent_id from track")
    names = {i: name for i, name, _ in rows}
    return {
        i: f"{names[p]} {name}" if p is not None and names[p].startswith("rank ") else name
        for i, name, p in rows
    }


def by_rank(engine, ending):
    """Rank -> line of it ("" for its work) -> [(ts, dur)]."""
    names = tracks_of(engine, ending)
    out = {}
    for track, ts, dur in engine.rows("select track_id, ts, dur from slice order by ts"):
        _, rank, *line = names[track].split(" ", 2)
        out.setdefault(int(rank), {}).setdefault("".join(line), []).append((ts, dur))
    return out


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_a_trace_loads_and_says_what_the_timeline_says(engine, tmp_path, name, ending):
    timeline = CASES[name]
    load(engine, tmp_path, timeline, ending)
    healthy(engine)
    assert engine.rows("select count(*) from flow") == [(int(timeline.graph.crosses.sum()),)]
    if name not in {"overlapping", "disordered"}:  # they are no runs, only times
        same_times(timeline, by_rank(engine, ending))
        same_peaks(timeline, engine)
        if name != "nothing takes time":  # which end of a flow is first cannot be told
            same_flows(timeline, ending, engine)


def same_peaks(timeline, engine):
    rows = engine.rows(
        "select coalesce(p.name || ' ', '') || t.name, max(c.value) from counter c"
        " join track t on t.id = c.track_id left join track p on p.id = t.parent_id group by t.id"
    )
    wanted = {f"rank {r} in flight": x for r, x in enumerate(timeline.in_flight)}
    if timeline.bytes != Bytes():
        wanted |= {f"rank {r.rank} memory": r.peak_bytes for r in timeline.ranks}
    unpadded = {re.sub(r"\b0(?=\d)", "", name): peak for name, peak in rows}
    assert unpadded == wanted


def same_times(timeline, found):
    rounding = 0 if timeline.ticks.exact and timeline.ticks.scale == 1 else len(timeline.start)
    for rank in timeline.ranks:
        lines = found[rank.rank]
        beside = "send", "receive", "host"  # messages and copies
        work = [x for line, x in lines.items() if not any(word in line for word in beside)]
        assert abs(sum(d for x in work for _, d in x) - ns(timeline, rank.busy)) <= rounding
        if timeline.schedule.has_communication:
            assert max(t + d for x in work for t, d in x) <= ns(timeline, rank.end)
            continue
        aside = [x for line, x in lines.items() if "send" in line or "receive" in line]
        assert sum(d for x in aside for _, d in x) == ns(timeline, rank.transfer)
        assert max(t + d for x in lines.values() for t, d in x) == ns(timeline, rank.end)
        assert min(t for x in lines.values() for t, _ in x) == ns(timeline, rank.start)


def same_flows(timeline, ending, engine):
    s, g = timeline.schedule, timeline.graph

    def said(action):
        slot = s.slot(int(s.slot_of_action[action]))
        kinds = [a.kind.name for a in slot]
        if ending == "json":
            kinds = [JSON_NAMES.get(kind, kind) for kind in kinds]
        return " + ".join(f"{kind} {a.mb}" for kind, a in zip(kinds, slot, strict=True))

    crossing = zip(g.source[g.crosses], g.target[g.crosses], strict=True)
    rows = engine.rows(
        "select a.name, b.name, a.ts <= b.ts from flow f"
        " join slice a on a.id = f.slice_out join slice b on b.id = f.slice_in"
    )
    assert Counter((a, b) for a, b, _ in rows) == Counter((said(a), said(b)) for a, b in crossing)
    assert all(forward for _, _, forward in rows)


@pytest.mark.parametrize("ending", FORMATS)
def test_compressed_traces_load(engine, tmp_path, ending):
    load(engine, tmp_path, CASES["dual"], f"{ending}.gz")
    healthy(engine)
    assert engine.rows("select count(*) from flow") == [(8,)]


def test_ranks_are_shown_in_order_by_the_rule_of_the_page(engine, tmp_path):
    load(engine, tmp_path, CASES["1f1b, 12 ranks"], "pftrace")
    engine.rows("include perfetto module viz.summary.track_event")
    rows = engine.rows(
        "select name from _track_event_tracks_ordered_groups where name like 'rank %'"
        " order by order_id"
    )
    assert [name for (name,) in rows] == [f"rank {i}" for i in range(12)]


def test_json_ranks_are_threads_that_sort_by_name_and_number_alike(engine, tmp_path):
    load(engine, tmp_path, CASES["1f1b, 12 ranks"], "json")
    rows = engine.rows("select name, tid, is_main_thread from thread where name like 'rank %'")
    by_number = [name for name, _, _ in sorted(rows, key=lambda row: row[1])]
    assert by_number == [f"rank {i}" for i in range(12)]
    assert not any(main for _, _, main in rows)


def test_children_stand_below_their_rank_in_order(engine, tmp_path):
    load(engine, tmp_path, CASES["messages of two streams"], "pftrace")
    engine.rows("include perfetto module viz.summary.track_event")
    rows = engine.rows(
        "select t.name from _track_event_tracks_ordered_groups t"
        " join track p on p.id = t.parent_id where p.name = 'rank 0' order by t.order_id"
    )
    assert [name for (name,) in rows] == [
        "comm", "comm send", "comm receive", "in flight", "memory",
    ]  # fmt: skip
    units = engine.rows("select distinct name, unit from counter_track order by name")
    assert units == [("in flight", "microbatches"), ("memory", "bytes")]


@pytest.mark.parametrize("ending", FORMATS)
def test_several_timelines_load_side_by_side(engine, tmp_path, ending):
    groups = {"z": CASES["1f1b"], "a": CASES["messages, lanes"], "m": CASES["dual with lanes"]}
    load(engine, tmp_path, groups, ending)
    healthy(engine)
    flows = sum(int(t.graph.crosses.sum()) for t in groups.values())
    assert engine.rows("select count(*) from flow") == [(flows,)]
    if ending == "json":
        rows = engine.rows("select name from process where name is not null order by pid")
        assert [name for (name,) in rows] == list(groups)
        return
    engine.rows("include perfetto module viz.summary.track_event")
    rows = engine.rows(
        "select t.name from _track_event_tracks_ordered_groups t join track p on p.id = t.parent_id"
        " where p.name = 'z | a | m' order by t.order_id"
    )
    assert [name for (name,) in rows] == list(groups)
    (one_root,) = engine.rows("select count(*) from track where parent_id is null")
    assert one_root == (1,)


@pytest.mark.parametrize("ending", FORMATS)
def test_details_of_slices_can_be_asked_for(engine, tmp_path, ending):
    load(engine, tmp_path, CASES["dual"], ending)
    args = "debug" if ending == "pftrace" else "args"
    one, fused = (
        engine.rows(
            f"select name, category, extract_arg(arg_set_id, '{args}.stage{at}'),"
            f" extract_arg(arg_set_id, '{args}.microbatch{at}') from slice"
            f" where category = '{category}' order by ts limit 1"
        )[0]
        for at, category in (("", "F"), ("[1]", "F+B"))
    )
    if ending == "pftrace":
        assert one == ("F 0", "F", 0, 0)
        assert fused == ("F 1 + B 2", "F+B", 1, 2)
        colours = engine.rows(
            "select distinct category, extract_arg(arg_set_id, 'correlation_id') from slice"
        )
        assert dict(colours) == {"F": "F#4382", "B": "B#202", "F+B": "F+B#2653"}
    else:
        assert one == ("Fwd 0", "F", 0, 0)
        assert fused == ("Fwd 1 + Bwd 2", "F+B", 1, 2)


@pytest.mark.parametrize("ending", FORMATS)
def test_overlapping_slices_survive_on_tracks_beside(engine, tmp_path, ending):
    load(engine, tmp_path, CASES["overlapping"], ending, ranks=[0])
    healthy(engine)
    found = by_rank(engine, ending)[0]
    assert found[""] == [(0, 5000), (7000, 1000), (8000, 1000)]
    assert found["compute 2"] == [(3000, 4000)]
    assert found["send"] == [(1000, 3000)]
    assert found["send 2"] == [(2000, 4000)]


def test_every_kind_of_slice_has_a_colour_of_its_own(engine, tmp_path):
    groups = {"one": CASES["messages, latency"], "two": CASES["zero bubble, floats"],
              "three": CASES["dual with lanes"],
              "four": CASES["recomputed and offloaded"]}  # fmt: skip
    load(engine, tmp_path, groups, "pftrace")
    colours = dict(
        engine.rows(
            "select distinct category, extract_arg(arg_set_id, 'correlation_id') from slice"
        )
    )
    assert None not in colours.values()
    assert {kind.name for kind in Kind} <= set(colours)
    assert len({colours[x] for x in ("F", "B", "I", "W", "F+B", "SEND_F", "RECV_F", "wait")}) == 8
    assert colours["send"] == colours["SEND_F"] == colours["SEND_B"]
    assert colours["receive"] == colours["RECV_F"] == colours["RECV_B"]
