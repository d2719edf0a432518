import json
from dataclasses import replace

import numpy as np
import pytest

from common import written
from hocket import Costs, build, dumps, loads
from hocket.comparison import diff
from hocket.costs import Bytes
from hocket.errors import UsageError
from hocket.ir import encode, kinds_of, mbs_of, stages_of
from hocket.recognise import recognise
from hocket.schedules import entries

QUICK = [e for e in entries() if not e.name.endswith("-auto")]  # those search, for seconds


@pytest.fixture(autouse=True)
def without_searches(monkeypatch):
    monkeypatch.setattr("hocket.recognise.entries", lambda: iter(QUICK))


def anonymous(schedule):
    return schedule.renamed("mine")


def shuffled(schedule):
    """The same order with the microbatches of each path numbered backwards."""
    path_of = np.array(schedule.placement.path_of)
    new = np.arange(schedule.m)
    for k in range(len(schedule.placement.paths)):
        mine = np.flatnonzero(path_of == k)
        new[mine] = mine[::-1]
    codes = schedule.codes
    return replace(schedule, codes=encode(kinds_of(codes), stages_of(codes), new[mbs_of(codes)]))


@pytest.mark.parametrize("name", [e.name for e in QUICK])
def test_every_registered_schedule_is_recognised_by_its_order(name):
    for p, m in ((2, 4), (4, 8)):
        try:
            s = build(name, p=p, m=m, v=2 if name in takes_v() else None)
        except UsageError:
            continue
        match = recognise(s)
        assert (match.name, match.is_same, match.renamed) == (name, True, False)
        match = recognise(anonymous(s))
        assert match.is_same
        again = build(match.name, **match.settings)
        assert dumps(again.renamed("mine")) == dumps(anonymous(s))


def takes_v():
    return [e.name for e in entries() if e.takes_v]


def test_renamed_microbatches_are_seen_through():
    for name in ("zb-h1", "dualpipe", "chimera"):
        match = recognise(shuffled(build(name, p=4, m=8)))
        assert str(match) == f"this is {name} -p 4 -m 8, its microbatches renamed"


def test_options_are_found():
    own = anonymous(build("interleaved", p=2, m=8, v=2, group=4))
    assert str(recognise(own)) == "this is interleaved -p 2 -m 8 -v 2 -o group=4"
    sliced = anonymous(build("seq1f1b", p=2, m=4, slices=3))
    assert str(recognise(sliced)) == "this is seq1f1b -p 2 -m 4 -o slices=3"


def test_the_nearest_is_named_with_the_first_difference():
    text = dumps(build("zb-h1", p=4, m=8)).replace("2W0 2F4", "2F4 2W0")
    match = recognise(loads(text))
    assert (match.name, match.is_same) == ("zb-h1", False)
    assert 0.9 < match.likeness < 1
    assert str(match.first) == "rank 2 slot 7: 2F4, there 2W0"


def test_a_missing_end_is_told_as_nothing_more():
    own = written("mine", ["0 1"], "0: 0F0 0F1 0B0 0B1", "1: 1F0 1B0 1F1")
    match = recognise(own)
    assert str(match) == (
        "nearest is 1f1b -p 2 -m 2 (83% alike); first difference: "
        "rank 1 slot 3: nothing more, there 1B1"
    )


def test_an_unknown_placement_is_nothing():
    assert recognise(written("mine", ["1 0"], "0: 1F0 1B0", "1: 0F0 0B0")) is None


def test_match_as_json():
    data = json.loads(json.dumps(recognise(build("1f1b", p=2, m=4)).as_json()))
    assert data == {
        "schedule": "1f1b", "settings": {"p": 2, "m": 4}, "same": True, "renamed": False,
        "likeness": 1.0, "first_difference": None,
    }  # fmt: skip


def test_diff_tells_what_a_change_did():
    costs = Costs(unit="ms", bytes=Bytes(static=10, activation=2))
    found = diff(build("1f1b", p=4, m=8), build("zb-h1", p=4, m=8), costs)
    assert (found.makespan.before, found.makespan.after, found.makespan.by) == (33, 27, -6)
    assert [(c.before, c.after) for c in found.peaks] == [(18, 18), (16, 18), (14, 18), (12, 18)]
    assert sum(c.after for c in found.path.values()) == 27
    assert str(found).splitlines() == [
        "1f1b -> zb-h1",
        "makespan: 33 ms -> 27 ms (-6 ms, 18.2%)",
        "span: 33 ms -> 27 ms (-6 ms, 18.2%)",
        "bubble: 27.3% -> 11.1%",
        "peak memory, fullest rank: 18 B, as before",
        "peak memory: rank 1 16 B -> 18 B (+2 B, 12.5%), rank 2 14 B -> 18 B (+4 B, 28.6%), "
        "rank 3 12 B -> 18 B (+6 B, 50.0%)",
        str(found).splitlines()[6],
        "first difference: rank 0 slot 4: 0B0, there 0I0",
    ]
    assert str(found).splitlines()[6].startswith("critical path: F ")


def test_equal_orders_and_other_placements_are_told():
    s = build("zb-h1", p=4, m=8)
    assert str(diff(s, shuffled(s))).endswith("the orders are the same")
    other = diff(s, build("zb-v", p=4, m=8))
    assert str(other).endswith("the two have different placements")


def test_limits_are_told_one_sentence_each():
    costs = Costs(unit="ms", bytes=Bytes(activation=2))
    found = diff(build("zb-h1", p=4, m=8), build("1f1b", p=4, m=8), costs)
    assert found.exceeded(max_makespan=33, max_bytes=8) == []
    assert found.exceeded(max_makespan=30, max_bytes=7) == [
        "makespan is 33 ms, the limit 30 ms",
        "the peak is 8 B, the limit 7 B",
    ]
    json.dumps(found.as_json())


def test_the_rounding_of_floats_is_no_change():
    costs = Costs(F=63.16 / 7, I=12.1, W=0.3, latency=0.7)
    text = str(diff(build("1f1b", p=4, m=8), build("zb-h1", p=4, m=8), costs))
    assert "e-" not in text and ", as before" in text.partition("critical path: ")[2]
