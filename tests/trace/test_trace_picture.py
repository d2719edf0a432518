"""What a trace shows, before any format: tracks, slices, counters, flows."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from trace_cases import (
    EACH_US,
    LANES,
    at,
    cases,
    disordered,
    dualpipe_like,
    one_f_one_b,
    overlapping,
    two_streams,
)

from hocket.costs import Bytes, Costs
from hocket.errors import UsageError
from hocket.ir import Kind
from hocket.lower import insert_communication
from hocket.simulator import simulate
from hocket.trace import draw, overlaps
from hocket.trace.slices import Verb, nanoseconds


def pictured(timeline, **options):
    return draw({"it": timeline}, "it", **options)


def path(picture, track):
    """The names from the root's child down to a track."""
    row = picture.tracks[track]
    if row.parent is None:
        return ""
    above = path(picture, row.parent)
    return f"{above}/{row.name}" if above else row.name


def said(picture, label):
    return "+".join(
        f"{'' if p.verb == Verb.RUN else p.verb.name.lower() + ' '}{p.kind.name}{p.mb}"
        for p in picture.labels[label]
    )


def rows(picture):
    """Track path -> [(label, start, end)] in ns."""
    out = {}
    for track, start, end, label in zip(
        *(column.tolist() for column in picture.slices[:4]), strict=True
    ):
        out.setdefault(path(picture, track), []).append((said(picture, label), start, end))
    return out


def test_a_rank_shows_its_work_on_its_own_track_and_counters_below():
    picture = pictured(simulate(one_f_one_b(2, 2), EACH_US))
    assert [(t.name, t.parent, t.place, t.measures) for t in picture.tracks] == [
        ("it", None, 0, None),
        ("rank 0", 0, 0, None),
        ("in flight", 1, 0, "microbatches"),
        ("memory", 1, 1, "bytes"),
        ("rank 1", 0, 1, None),
        ("in flight", 4, 0, "microbatches"),
        ("memory", 4, 1, "bytes"),
    ]
    assert rows(picture) == {
        "rank 0": [("F0", 0, 3000), ("F1", 3000, 6000), ("B0", 11000, 14000), ("B1", 17000, 20000)],
        "rank 1": [("F0", 4000, 7000), ("B0", 7000, 10000), ("F1", 10000, 13000),
                   ("B1", 13000, 16000)],
    }  # fmt: skip


def test_parts_of_a_slot_with_equal_times_are_one_slice():
    timeline = simulate(dualpipe_like(), EACH_US)
    shown = [label for label, _, _ in rows(pictured(timeline))["rank 0"]]
    assert shown == ["F0", "F2", "F1+B2", "F3+B0", "B3", "B1"]
    picture = pictured(timeline)
    fused = [i for i, label in enumerate(picture.labels) if len(label) == 2]
    stages = {picture.places[i] for i in picture.slices.place[np.isin(picture.slices.label, fused)]}
    assert stages == {(0, 1), (1, 0)}


def test_parts_of_a_slot_with_different_times_are_a_slice_each():
    timeline = simulate(dualpipe_like(), EACH_US)
    start = timeline.start[[str(x) for x in actions(timeline)].index("0F1")]
    apart = at(timeline, {"0F1": (start, start + 2), "1B2": (start + 2, start + 6)})
    shown = [label for label, _, _ in rows(pictured(apart))["rank 0"]]
    assert shown == ["F0", "F2", "F1", "B2", "F3+B0", "B3", "B1"]


def actions(timeline):
    return [a for i in range(timeline.schedule.n_slots) for a in timeline.schedule.slot(i)]


def test_overlapping_work_and_sends_go_to_tracks_beside():
    found = rows(pictured(overlapping()))
    assert found["rank 0"][0] == ("F0", 0, 5000)
    assert found["rank 0/compute 2"] == [("B0", 3000, 7000)]
    assert found["rank 0/send"] == [("SEND_F0", 1000, 4000)]
    assert found["rank 0/send 2"] == [("SEND_F1", 2000, 6000)]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_times_nothing_overlaps_and_every_action_keeps_its_own(seed):
    timeline = disordered(seed)
    picture = pictured(timeline)
    assert overlaps(picture.slices) == []
    zero = timeline.start.min()
    wanted = Counter()
    for action, start, end in zip(actions(timeline), timeline.start, timeline.end, strict=True):
        wanted[f"{action.kind.name}{action.mb}"] += int(end - start)
        assert start >= zero
    got = Counter()
    for (label, place), start, end in zip(
        zip(picture.slices.label, picture.slices.place, strict=True),
        picture.slices.start, picture.slices.end, strict=True,
    ):  # fmt: skip
        assert len(picture.labels[label]) == len(picture.places[place])
        for part in picture.labels[label]:
            got[f"{part.kind.name}{part.mb}"] += int(end - start) // 1000
    assert got == wanted


@pytest.mark.parametrize("seed", range(5))
def test_lanes_are_as_few_as_can_be(seed):
    picture = pictured(disordered(seed))
    s = picture.slices
    lines = {}
    for track, start, end in zip(s.track.tolist(), s.start.tolist(), s.end.tolist(), strict=True):
        row = picture.tracks[track]
        rank = track if row.parent == 0 else row.parent
        line = "compute" if row.parent == 0 else row.name.rstrip("0123456789").strip()
        lines.setdefault((rank, line), []).append((track, start, end))
    for slices in lines.values():
        most = max(sum(a <= t < b for _, a, b in slices) for _, t, _ in slices)
        assert len({track for track, _, _ in slices}) <= max(most, 1) + 1


def test_the_self_check_finds_an_overlap():
    picture = pictured(simulate(one_f_one_b(2, 2)))
    end = picture.slices.end.copy()
    end[0] += 1
    assert overlaps(picture.slices._replace(end=end)) == [(0, 1)]


def test_lanes_are_shown_around_the_work_they_belong_to():
    found = rows(pictured(simulate(one_f_one_b(2, 1), LANES)))
    assert found["rank 0"] == [("F0", 4000, 34000), ("B0", 121000, 151000)]
    assert found["rank 0/receive"] == [
        ("receive F0", 0, 4000), ("receive B0", 117000, 121000),
    ]  # fmt: skip
    assert found["rank 0/send"] == [("send F0", 34000, 39000), ("send B0", 151000, 156000)]


def test_a_receive_waits_until_its_send_begins():
    found = rows(pictured(simulate(insert_communication(one_f_one_b(2, 1)), EACH_US)))
    assert found["rank 0/send"] == [("SEND_F0", 3000, 3000)]
    assert found["rank 1/receive"] == [("wait RECV_F0", 0, 3000), ("RECV_F0", 3000, 4000)]


def test_streams_and_their_messages_are_children_of_the_rank():
    picture = pictured(simulate(insert_communication(two_streams()), EACH_US))
    names = [path(picture, i) for i in range(len(picture.tracks))]
    assert names[1:10] == [
        "rank 0", "rank 0/comm", "rank 0/comm send", "rank 0/comm receive", "rank 0/in flight",
        "rank 0/memory", "rank 1", "rank 1/comm", "rank 1/send",
    ]  # fmt: skip


@pytest.mark.parametrize("name", cases())
def test_flows_run_forward_from_slice_to_slice_of_other_ranks(name):
    timeline = cases()[name]
    picture = pictured(timeline)
    g = timeline.graph
    assert len(picture.flows.source) == g.crosses.sum()
    assert overlaps(picture.slices) == []
    named = actions(timeline)
    wanted = Counter(
        (f"{named[a].kind.name}{named[a].mb}", f"{named[b].kind.name}{named[b].mb}")
        for a, b in zip(g.source[g.crosses], g.target[g.crosses], strict=True)
    )
    got = Counter()
    for a, b in zip(*picture.flows, strict=True):
        label_a, label_b = (said(picture, picture.slices.label[x]) for x in (a, b))
        for pair in wanted:
            if pair[0] in label_a.split("+") and pair[1] in label_b.split("+"):
                got[pair] += 1
    assert all(got[pair] >= n for pair, n in wanted.items())
    if name != "nothing takes time":
        assert picture.forward.all()


def test_counters_hold_every_change_and_the_peaks():
    timeline = simulate(one_f_one_b(3, 4), EACH_US)
    picture = pictured(timeline)
    for quantity, name in (("in_flight", "in flight"), ("bytes", "memory")):
        for rank in range(3):
            base = timeline.static_bytes[rank] if quantity == "bytes" else 0
            names = [path(picture, i) for i in range(len(picture.tracks))]
            track = names.index(f"rank {rank}/{name}")
            mine = picture.counters.track == track
            time, value = picture.counters.time[mine], picture.counters.value[mine]
            assert time[0] == 0 and (np.diff(time) >= 0).all()
            ticks, levels = timeline.levels(quantity)[rank]
            for instant, level in dict(zip(ticks.tolist(), levels.tolist(), strict=True)).items():
                assert value[time <= instant * 1000][-1] == level + base
            assert value.max() == timeline.peaks(quantity)[rank] + base


def test_a_peak_that_lasts_for_no_time_is_kept():
    timeline = simulate(one_f_one_b(1, 3), Costs(F=0, I=0, W=0))
    picture = pictured(timeline)
    assert picture.counters.value.max() == timeline.peaks("in_flight")[0] == 1


def test_levels_of_overlapping_work_are_put_in_time_order():
    # one queue: F0 [0, 5), B0 [3, 7), F1 [4, 8), B1 [9, 10)
    timeline = at(
        simulate(one_f_one_b(1, 2)),
        {"0F0": (0, 5), "0B0": (3, 7), "0F1": (4, 8), "0B1": (9, 10)},
    )
    counters = pictured(timeline).counters
    assert list(zip(counters.time.tolist(), counters.value.tolist(), strict=True)) == [
        (0, 1), (4000, 2), (7000, 1), (10000, 0),
    ]  # fmt: skip


def test_memory_is_left_out_where_no_bytes_are_known():
    picture = pictured(simulate(one_f_one_b(2, 2)))
    assert "memory" not in {t.name for t in picture.tracks}


def test_ranks_that_are_not_asked_for_are_left_out_with_their_flows():
    timeline = simulate(one_f_one_b(4, 3), EACH_US)
    whole, part = pictured(timeline), pictured(timeline, ranks=[2, 1])
    kept = {k: v for k, v in rows(whole).items() if k in {"rank 1", "rank 2"}}
    assert rows(part) == kept
    assert [t.name for t in part.tracks if t.parent == 0] == ["rank 1", "rank 2"]
    assert len(part.flows.source) == 6
    assert {t.place for t in part.tracks if t.parent == 0} == {0, 1}


def test_several_timelines_stand_below_each_other_under_one_root():
    first, second = simulate(one_f_one_b(2, 2), EACH_US), simulate(dualpipe_like(), LANES)
    picture = draw({"predicted": first, "measured": second}, "both")
    assert picture.tracks[0] == ("both", None, 0, None)
    assert [picture.tracks[i].name for i in picture.timelines] == ["predicted", "measured"]
    assert [picture.tracks[i].place for i in picture.timelines] == [0, 1]
    found = rows(picture)
    assert {k.removeprefix("predicted/"): v for k, v in found.items() if k[0] == "p"} == rows(
        pictured(first)
    )
    assert {k.removeprefix("measured/"): v for k, v in found.items() if k[0] == "m"} == rows(
        pictured(second)
    )
    assert len(picture.flows.source) == first.graph.crosses.sum() + second.graph.crosses.sum()


def test_a_timeline_begins_at_0_whatever_its_clock_says():
    timeline = simulate(one_f_one_b(2, 2), EACH_US)
    later = replace(timeline, start=timeline.start + 10**9, end=timeline.end + 10**9)
    assert rows(pictured(later)) == rows(pictured(timeline))
    assert (pictured(later).counters.time == pictured(timeline).counters.time).all()


@pytest.mark.parametrize(
    ("unit", "ns"), [("", 7000), ("us", 7000), ("ns", 7), ("ms", 7_000_000), ("s", 7_000_000_000)]
)
def test_units(unit, ns):
    timeline = simulate(one_f_one_b(1, 1), Costs(F=7, unit=unit))
    assert rows(pictured(timeline))["rank 0"][0] == ("F0", 0, ns)


def test_fractions_are_rounded_to_ns_once_never_summed():
    third = simulate(one_f_one_b(1, 4), Costs(F=Fraction(1, 3), unit="ns"))
    assert [x[1:] for x in rows(pictured(third))["rank 0"][:1]] == [(0, 0)]
    starts = nanoseconds(third, third.start)
    assert starts.tolist() == [round(float(third.ticks.value(x))) for x in third.start]


def test_very_fine_ticks_stay_exact():
    fine = Fraction(10**9 + 1, 3 * 10**9 + 7)
    timeline = simulate(one_f_one_b(1, 1), Costs(F=fine, I=0, W=0, unit="s"))
    (name, start, end), _ = rows(pictured(timeline))["rank 0"]
    assert (name, start, end) == ("F0", 0, int(fine * 10**9 + Fraction(1, 2)))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"unit": "min"}, {}, "the unit of the times is 'min'; a trace needs one of "
                              "'', 'ns', 'us', 'ms', 's'"),
        ({}, {"ranks": [1, 4]}, "rank 4 cannot be shown: the ranks are 0 to 1"),
        ({}, {"ranks": []}, "nothing to write: `ranks` is empty"),
        ({"start": np.array([np.nan] * 8)}, {},
         "not every action of 1f1b has a time; a trace needs them all"),
        ({"end": np.full(8, 10**17)}, {},
         "times up to 1e+20 ns do not fit a trace; check the unit"),
    ],
)  # fmt: skip
def test_faults_are_told(change, options, message):
    timeline = replace(simulate(one_f_one_b(2, 2)), **change)
    with pytest.raises(UsageError) as error:
        pictured(timeline, **options)
    assert str(error.value) == message


def test_no_timeline_at_all_is_told():
    with pytest.raises(UsageError, match=r"^nothing to write: no timeline is given$"):
        draw({}, "it")


def test_evaluation_and_bytes_without_static():
    from common import written

    forward = written("forward", ["0 1 | 0-1"], "0: 0F0 0F1", "1: 1F0 1F1")
    timeline = simulate(forward, Costs(bytes=Bytes(activation=0.5)))
    picture = pictured(timeline)
    assert {p.kind for label in picture.labels for p in label} == {Kind.F}
    assert set(picture.counters.value.tolist()) == {0.0, 0.5, 1.0}
