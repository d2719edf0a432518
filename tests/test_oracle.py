"""Orders equal those of the papers' own code, action by action; so do times and peaks."""

import hashlib

import pytest

from common import COSTS, order_of, placement_of, records, written
from hocket import build, check, simulate
from hocket.schedules import entries

REGISTERED = {e.name: e for e in entries()}
SEARCHED = {"chimera", "v-half", "v-min"}  # their authors break ties by search
BUILT = [r for r in records() if r["schedule"] in REGISTERED]


def _id(r):
    return f"{r['schedule']}-p{r['p']}-m{r['m']}-v{r['v']}" + "".join(
        f"-{k}{v}" for k, v in r["options"].items()
    )


def _build(r):
    v = r["v"] if REGISTERED[r["schedule"]].takes_v else None
    return build(r["schedule"], p=r["p"], m=r["m"], v=v, **r["options"])


@pytest.mark.parametrize("r", [r for r in BUILT if r["schedule"] not in SEARCHED], ids=_id)
def test_order_equals_the_published_one_action_by_action(r):
    s = _build(r)
    assert s.placement == placement_of(r)
    if "order" in r:
        assert order_of(s) == r["order"]
    else:
        assert hashlib.sha256("\n".join(order_of(s)).encode()).hexdigest() == r["sha256"]


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("r", [r for r in BUILT if r["schedule"] not in SEARCHED], ids=_id)
def test_makespan_span_and_peaks_equal_the_published_ones(r, costs):
    t = simulate(_build(r), COSTS[costs])
    expected = r["expected"][costs]
    assert t.makespan == expected["makespan"]
    assert t.span == expected["span"]
    assert [x.peak_in_flight for x in t.ranks] == expected["peak_in_flight"]


@pytest.mark.parametrize("r", [r for r in BUILT if r["schedule"] in SEARCHED], ids=_id)
def test_searched_order_is_at_least_as_good_as_the_published_one(r):
    s = _build(r)
    assert check(s).ok
    for name, costs in COSTS.items():
        t, expected = simulate(s, costs), r["expected"][name]
        assert t.makespan <= expected["makespan"]
        assert max(x.peak_in_flight for x in t.ranks) <= max(expected["peak_in_flight"])


@pytest.mark.parametrize(("p", "m", "joined"), [(4, 8, 30), (4, 16, 58), (8, 16, 66), (8, 24, 99)])
def test_chimera_beats_units_joined_end_to_end_when_m_exceeds_p(p, m, joined):
    assert simulate(build("chimera", p=p, m=m)).makespan < joined


@pytest.mark.parametrize("r", [r for r in records() if "order" in r], ids=_id)
def test_recorded_order_checks_clean_and_simulates_to_its_record(r):
    paths = [
        " ".join(map(str, path))
        + " | "
        + ",".join(str(mb) for mb, on in enumerate(r["path_of"]) if on == k)
        for k, path in enumerate(r["paths"])
    ]
    s = written("recorded", paths, *(f"{q}: {line}" for q, line in enumerate(r["order"])))
    for transport in ("tagged", "ordered", "rendezvous"):
        assert check(s, transport).problems == ()
    for name, costs in COSTS.items():
        t, expected = simulate(s, costs), r["expected"][name]
        assert (t.makespan, t.span) == (expected["makespan"], expected["span"])
        assert [x.peak_in_flight for x in t.ranks] == expected["peak_in_flight"]
