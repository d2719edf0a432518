"""Pictures of schedules, hocket's own and others, read back to the microsecond."""

import gzip
import json

import pytest

from common import DATA
from hocket import Costs, build, simulate, write_trace
from hocket.errors import HocketError, TextError
from hocket.interop.traces.load import load_foreign
from hocket.interop.traces.perfetto import is_pftrace, read_pftrace
from hocket.interop.traces.pictures import read_drawn

FOLDER = DATA / "interop"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_seven_recorded_pictures_give_their_orders_costs_and_makespans(name):
    data = gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes())
    ((title, found),) = read_drawn(data).items()
    assert title == name
    order = [" ".join(map(str, found.schedule.line(q))) for q in found.schedule.queues]
    assert order == EXPECTED[name]["order"]
    assert float(found.timeline.makespan) == EXPECTED[name]["makespan"]
    assert simulate(found.schedule, found.costs).makespan == EXPECTED[name]["makespan"]


CASES = [
    ("dualpipe", {"p": 4, "m": 8}, Costs(F=3, I=4, W=2, latency=2, unit="us")),
    ("zb-v", {"p": 2, "m": 4}, Costs(F=(3, 4, 5, 6), I=2, W=1, p2p_overhead=(1, 2), unit="us")),
    ("interleaved", {"p": 2, "m": 4, "v": 2}, Costs(F=7, B=13, I=6, W=7, latency=5, unit="us")),
    ("moe-pair", {"p": 1, "m": 2}, Costs(unit="us")),
]


@pytest.mark.parametrize("ending", ["json", "pftrace", "pftrace.gz"])
@pytest.mark.parametrize("case", CASES, ids=[name for name, _, _ in CASES])
def test_our_own_traces_come_back_as_the_schedule_with_its_costs(case, ending, tmp_path):
    name, size, costs = case
    s = build(name, **size)
    want = simulate(s, costs)
    path = tmp_path / f"own.{ending}"
    write_trace(want, path)
    found = load_foreign([path])
    assert found.schedule == (s if found.schedule.name == s.name else s.renamed("own"))
    assert found.costs is not None
    assert simulate(found.schedule, found.costs).makespan == want.makespan
    assert float(found.timeline.makespan) == float(want.makespan)


def test_of_several_timelines_the_last_is_taken_and_the_others_are_named(tmp_path):
    s = build("1f1b", p=2, m=4)
    path = tmp_path / "two.pftrace"
    write_trace({"predicted": simulate(s), "measured": simulate(s, Costs(F=2))}, path)
    assert is_pftrace(path.read_bytes())
    assert list(read_pftrace(path.read_bytes())) == ["predicted", "measured"]
    found = load_foreign([path])
    assert found.schedule.name == "measured"
    assert found.notes == ("of several timelines measured is taken, not predicted",)
    assert found.costs.F == (2, 2)


def test_files_without_a_schedule_are_refused():
    with pytest.raises(TextError, match="no slice of a forward or a backward"):
        read_drawn(b'{"traceEvents": []}')
    with pytest.raises(TextError, match=r"own.json:1: not a trace in Chrome's JSON"):
        read_drawn(b"[", "own.json")
    with pytest.raises(TextError, match="not a trace that hocket wrote"):
        read_pftrace(b"\x0a\xff\xff")


def test_of_several_files_the_one_that_is_no_picture_is_named(tmp_path):
    (tmp_path / "text.json").write_text("no trace\n")
    write_trace(simulate(build("1f1b", p=2, m=2)), tmp_path / "drawn.json")
    with pytest.raises(HocketError, match=r"text\.json:1: not a trace in Chrome's JSON"):
        load_foreign([tmp_path / "text.json", tmp_path / "drawn.json"])
    with pytest.raises(HocketError, match="holds all ranks; give one file"):
        load_foreign([tmp_path / "drawn.json", tmp_path / "text.json"])
