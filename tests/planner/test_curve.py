"""Time against memory limit: monotone, each point a plan that fits; and what ends it early."""

import json
from dataclasses import replace

import pytest

from hocket import Bytes, Costs, check, simulate
from hocket.cli import main
from hocket.errors import PlanError, UsageError
from hocket.planner import Request, plan
from hocket.planner.curve import curve, spread
from hocket.search.compiled import kernels

SKEW = Costs(F=20, I=24, W=14, latency=3, per="rank")
ASKED = Request(p=4, m=6, costs=SKEW, shapes=("v",), v=(2,), split=True, named=False,
                time_limit=2, threads=1)  # fmt: skip
fast = pytest.mark.skipif(not kernels().compiled, reason="searches need numba to be fast")


@fast
def test_a_larger_limit_never_takes_longer_and_every_point_fits_its_limit():
    found = curve(ASKED, "in_flight", (3, 2, 2.5, 4))
    assert [p.limit for p in found.points] == [2, 2.5, 3, 4]
    values = [p.value for p in found.points]
    assert values == sorted(values, reverse=True) and values[0] > values[-1]
    for point in found.points:
        assert check(point.schedule).ok and point.bound <= point.value
        held = [r.peak_in_flight for r in simulate(point.schedule).ranks]
        assert max(held) <= 2 * point.limit


def test_an_order_of_a_smaller_limit_competes_under_a_larger_one_without_search():
    ask = Request(p=4, m=6, shapes=("linear",), v=(1,), search=False, named=False, in_flight=2)
    small = plan(ask)
    again = plan(replace(ask, in_flight=4), known=[("before", small.schedule)])
    assert again.value <= small.value
    assert any(e.name == "before" for e in again.entrants)


def test_a_curve_over_bytes_says_where_nothing_fits():
    costs = Costs(bytes=Bytes(static=10, activation=4))
    ask = Request(p=2, m=4, costs=costs, shapes=("linear",), v=(1,), search=False,
                  named=False)  # fmt: skip
    found = curve(ask, "memory", (12, 14, 18))
    assert [p.value is None for p in found.points] == [True, False, False]
    assert found.points[0].name == "nothing fits" and "nothing fits" in str(found)
    with pytest.raises(PlanError):
        curve(ask, "memory", (11, 12))


def test_an_interrupt_ends_a_curve_with_the_points_so_far():
    seen = []

    def stop(now):
        seen.append(now)
        if len(seen) == 2:
            raise KeyboardInterrupt

    ask = Request(p=2, m=4, shapes=("linear",), v=(1,), search=False, named=False)
    found = curve(ask, "in_flight", (1, 2, 3), progress=stop)
    assert [p.limit for p in found.points] == [1] and found.missing == (2, 3)
    assert "ended before the limits 2, 3" in str(found)


def test_limits_are_spread_evenly_and_stay_whole_where_they_are():
    assert spread(4, 8, 5) == (4, 5, 6, 7, 8)
    assert spread(4, 8, 17)[:3] == (4, 4.25, 4.5)
    with pytest.raises(UsageError) as caught:
        spread(8, 4, 3)
    assert str(caught.value) == (
        "a curve from 8 to 4 of 3 limits: needs 0 < from < to, and 2 limits or more"
    )


def _run(capsys, *words):
    status = main([str(w) for w in words])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_the_command_prints_the_curve_as_a_table_and_as_json(capsys):
    words = ["plan", "-p", 2, "-m", 4, "--shapes", "linear", "-v", 1, "--no-search", "--no-named"]
    status, out, _ = _run(capsys, *words, "--curve", "in-flight=1-3", "--points", 3)
    assert status == 0
    head, *rows = out.splitlines()
    assert head.split()[:4] == ["in", "flight", "makespan", "bound"]
    assert [row.split()[0] for row in rows[:3]] == ["1", "2", "3"]
    status, out, _ = _run(capsys, *words, "--curve", "in-flight=1,2", "--json")
    told = json.loads(out)
    assert [p["limit"] for p in told["points"]] == [1, 2] and told["limit"] == "in_flight"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--curve", "4-8"], "--curve: expected in-flight=4-8, in-flight=4,5.5,8 or "
         "memory=40GB-80GB, found '4-8'"),
        (["--curve", "in-flight=4-2"], "a curve from 4 to 2 of 9 limits: needs 0 < from < to, "
         "and 2 limits or more"),
        (["--curve", "in-flight=1-2", "--memory", "8"],
         "--curve plans once for each of its limits; leave out --memory"),
        (["--curve", "memory=1-2"], "a curve over memory needs costs with bytes; these have none"),
        (["--curve", "in-flight=0,2"], "in_flight is 0; it must be above 0"),
    ],
)  # fmt: skip
def test_a_curve_that_cannot_be_is_told_in_one_sentence(words, said, capsys):
    status, _, err = _run(capsys, "plan", "-p", 2, "-m", 4, "--no-search", *words)
    assert (status, err) == (2, f"hocket: {said}\n")
