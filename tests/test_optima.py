"""No named schedule goes below a proven optimum; those that should reach it do."""

import json

import pytest

from common import DATA
from hocket import Costs, build, simulate
from hocket.errors import UsageError
from hocket.schedules import entries

PROVEN = json.loads((DATA / "optima.json").read_text())


def _costs(record):
    def of(key):
        value = record["costs"].get(key)
        return tuple(value) if isinstance(value, list) else value

    c = {k: of(k) for k in ("F", "I", "W", "B") if of(k) is not None}
    if "I" not in c:
        c["I"], c["W"] = c["B"] - 1, 1
    return Costs(**c, latency=record["costs"]["comm"])


def _named(record):
    for entry in entries():
        try:
            s = build(entry.name, p=record["p"], m=record["m"],
                      v=record["v"] if entry.takes_v else None)  # fmt: skip
        except UsageError:
            continue
        if [[q.rank for q in path] for path in s.placement.paths] == record["paths"]:
            yield s


@pytest.mark.parametrize("i", range(len(PROVEN)))
def test_no_named_schedule_beats_a_proven_optimum_under_its_cap(i):
    record = PROVEN[i]
    cap = record["in_flight_cap"]
    for s in _named(record):
        t = simulate(s, _costs(record))
        fits = cap is None or all(r.peak_in_flight <= c for r, c in zip(t.ranks, cap, strict=True))
        splits = s.has_split_backward
        if fits and (record["split_backward"] or not splits) and (s.widths == 1).all():
            assert t.makespan >= record["optimal_makespan"]


def test_1f1b_reaches_the_proven_2820_under_caps_4_3_2_1():
    costs = Costs(F=(100, 112, 96, 104), I=(100, 112, 96, 104), W=(40, 46, 38, 42))
    t = simulate(build("1f1b", p=4, m=8), costs)
    assert t.makespan == 2820
    assert [r.peak_in_flight for r in t.ranks] == [4, 3, 2, 1]


def test_eager_1f1b_reaches_the_proven_2740_without_a_cap():
    costs = Costs(F=(100, 112, 96, 104), I=(100, 112, 96, 104), W=(40, 46, 38, 42))
    assert simulate(build("eager-1f1b", p=4, m=8), costs).makespan == 2740


@pytest.mark.parametrize(("p", "m", "optimum"), [(4, 8, 27), (2, 2, 7), (4, 4, 15)])
def test_zb_h1_reaches_the_proven_optimum_at_unit_costs(p, m, optimum):
    assert simulate(build("zb-h1", p=p, m=m)).makespan == optimum
