"""Six traces recorded elsewhere replay to the microsecond from their order and costs alone."""

import json

import pytest

from common import DATA, SEED_COSTS
from hocket import check, simulate
from hocket.text import load

EXPECTED = json.loads((DATA / "seed" / "expected.json").read_text())
MAKESPANS = {
    "gpipe": 2880, "1f1b": 2820, "chimera": 2712,
    "zerobubble-1f1b": 2474, "dualpipe": 1852, "dualpipev": 3020,
}  # fmt: skip


def _replay(name):
    schedule = load(DATA / "seed" / f"{name}.sched")
    check(schedule).raise_if_bad()
    return simulate(schedule, SEED_COSTS)


@pytest.mark.parametrize("name", MAKESPANS)
def test_makespan_busy_idle_and_transfer_equal_the_trace(name):
    t, e = _replay(name), EXPECTED[name]
    assert t.makespan == MAKESPANS[name] == e["makespan"]
    assert [r.busy for r in t.ranks] == e["compute_busy"]
    assert [r.transfer for r in t.ranks] == e["comm_lane"]
    assert [r.idle for r in t.ranks] == e["idle"]
    assert [r.end for r in t.ranks] == e["per_rank_end"]
    assert [r.start for r in t.ranks] == e["per_rank_start"]


@pytest.mark.parametrize("name", [n for n in MAKESPANS if n != "zerobubble-1f1b"])
def test_memory_peaks_equal_the_trace(name):
    peaks = [r.peak_bytes for r in _replay(name).ranks]
    assert peaks == pytest.approx(EXPECTED[name]["peak_mem_mb"])


def test_zero_bubble_activations_are_held_until_w_not_until_i():
    t = _replay("zerobubble-1f1b")
    assert [r.peak_in_flight for r in t.ranks] == [8, 8, 8, 8]
    assert t.ranks[3].peak_bytes == pytest.approx(537.6 + 8 * 268.8 + 134.4)
    assert EXPECTED["zerobubble-1f1b"]["peak_mem_mb"][3] == 940.8  # the trace's own, wrong


def test_fusing_for_free_is_what_makes_the_dualpipe_trace_fast():
    from dataclasses import replace

    schedule = load(DATA / "seed" / "dualpipe.sched")
    assert simulate(schedule, replace(SEED_COSTS, FB="sum")).makespan == 2174
    assert simulate(schedule, replace(SEED_COSTS, FB={"scale": 0.8})).makespan == pytest.approx(
        2006, abs=0.5
    )
