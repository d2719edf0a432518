import json
import math

import pytest

from hocket import Costs, build, simulate
from hocket.costs import Bytes, recut
from hocket.errors import CostError
from hocket.explanation import explain, peak
from hocket.schedules import entries
from hocket.timeline import CAUSES, PHASES

QUICK = [e for e in entries() if not e.name.endswith("-auto")]  # those search, for seconds
LINKED = Costs(F=10, I=12, W=7, latency=3, unit="us")
UNEVEN = Costs(
    F=(10, 10, 14, 10), I=12, W=7, latency=3, unit="us", bytes=Bytes(static=10, activation=5)
)


@pytest.fixture(autouse=True)
def without_searches(monkeypatch):
    monkeypatch.setattr("hocket.explanation.entries", lambda: iter(QUICK))


def told(name, costs, *, p=4, m=8, others=False, **options):
    timeline = simulate(build(name, p=p, m=m, **options), costs)
    return explain(timeline, costs, others=others)


def test_idle_by_phase_and_cause_is_all_of_the_bubble():
    for name in ("1f1b", "zb-h1", "dualpipe", "gpipe"):
        e = told(name, LINKED)
        total = sum(x for row in e.idle.values() for x in row.values())
        assert total / e.whole == pytest.approx(e.timeline.bubble_ratio)
        assert total == sum(c.idle for c in e.causes)
        for phase in PHASES:
            assert sum(e.idle[phase].values()) == sum(r.bubble[phase] for r in e.timeline.ranks)
        for cause in CAUSES:
            assert sum(e.idle[phase][cause] for phase in PHASES) == sum(
                r.waits[cause] for r in e.timeline.ranks
            )


def test_gaps_of_the_first_microbatch_s_way_have_one_cause():
    e = told("zb-h1", Costs())
    first = next(c for c in e.causes if str(c.root) == "0F0")
    assert (first.idle, first.gaps, first.ranks) == (6, 3, (1, 2, 3))
    back = next(c for c in e.causes if str(c.root) == "3I0")
    assert (back.idle, back.gaps, back.ranks, back.phases) == (6, 3, (0, 1, 2), {"warm-up": 6})


def test_the_path_s_parts_sum_to_the_makespan():
    e = told("1f1b", LINKED)
    assert sum(e.path.values()) == e.timeline.makespan == 367
    assert e.path["waiting"] == 3 * e.hops
    assert sum(e.path_stages.values()) + e.path["waiting"] == 367


def test_a_gain_is_what_simulating_again_says():
    e = told("zb-h1", UNEVEN)
    gains = {g.change: g for g in e.gains}
    without = simulate(build("zb-h1", p=4, m=8), Costs(F=(10, 10, 14, 10), I=12, W=7)).makespan
    assert gains["no latency"].makespan == without
    assert gains["no latency"].gain == e.timeline.makespan - without
    alike = simulate(build("zb-h1", p=4, m=8), Costs(F=11, I=12, W=7, latency=3)).makespan
    assert gains["all stages alike (same sum)"].makespan == alike
    assert gains["stage 2 10% shorter"].gain > gains["stage 1 10% shorter"].gain
    assert [g.gain for g in e.gains] == sorted((g.gain for g in e.gains), reverse=True)


def test_cutting_the_backward_earlier_is_tried_where_it_is_split():
    e = told("zb-h1", LINKED)
    found = next(g for g in e.gains if g.change == "a tenth of I done in W instead")
    other = Costs(F=10, I=10.8, W=8.2, latency=3)
    assert float(found.makespan) == pytest.approx(
        simulate(build("zb-h1", p=4, m=8), other).makespan
    )
    assert "a tenth of I done in W instead" not in [g.change for g in told("1f1b", LINKED).gains]


def test_only_costs_that_there_are_can_change():
    changes = [g.change for g in told("1f1b", Costs(), m=4, p=2).gains]
    assert sorted(changes) == [
        "every B 10% shorter", "every F 10% shorter", "stage 0 10% shorter", "stage 1 10% shorter",
    ]  # fmt: skip


def test_others_keep_the_memory_that_the_schedule_takes():
    e = told("1f1b", Costs(), others=True)
    assert e.limit == 4
    fitting = [o for o in e.others if o.fits]
    assert all(o.peak <= 4 and o.weights == 1 for o in fitting)
    best = next(o for o in e.others if o.call == "zb-h1")
    assert (best.makespan, best.fits) == (27, True)
    assert best.why.endswith("filled with weight gradients")
    assert not next(o for o in e.others if o.call == "zb-h2").fits
    assert not next(o for o in e.others if o.call == "dualpipe").fits


def test_text_has_every_part():
    text = str(told("zb-h1", UNEVEN, others=True))
    for words in (
        "zb-h1: p=4 m=8, makespan 333 us, bubble ", "Where the bubble is: ", "warm-up", "steady",
        "Gaps with one cause, longest together first:",
        "all go back to 3I0 on rank 3; first, 0I0 on 0 waits for 1I0, which runs on 1",
        "The critical path: ", "no latency", "at most 30 B:", "with more memory: ",
    ):  # fmt: skip
        assert words in text


def test_no_bubble_is_told():
    assert "There is no bubble: no queue is ever idle." in str(told("gpipe", Costs(), p=1, m=3))


def test_json_has_stable_keys_and_plain_numbers():
    data = json.loads(json.dumps(told("dualpipe", LINKED, others=True).as_json()))
    assert list(data) == [
        "schedule", "p", "unit", "per", "makespan", "bubble_ratio", "idle", "causes",
        "critical_path", "gains", "memory_limit", "others",
    ]  # fmt: skip


def test_orders_with_messages_slices_and_phases_are_explained():
    from hocket.lower import insert_communication

    lowered = insert_communication(build("1f1b", p=3, m=4))
    for schedule in (lowered, build("seq1f1b", p=3, m=4), build("moe-pair", p=2, m=4)):
        timeline = simulate(schedule, Costs())
        e = explain(timeline, Costs())
        assert math.isclose(float(sum(e.path.values())), float(timeline.makespan))
        assert str(e)


def test_costs_follow_the_cut():
    halves = recut(UNEVEN, 4, 8)
    assert halves.F == (5, 5, 5, 5, 7, 7, 5, 5)
    assert recut(halves, 8, 4).F == (10, 10, 14, 10)
    assert recut(halves, 8, 4).bytes.static == (10,) * 4
    with pytest.raises(CostError, match=r"^costs of 3 stages do not fit 4: neither divides"):
        recut(Costs(), 3, 4)


def test_peak_counts_parts_of_the_model():
    assert peak(simulate(build("1f1b", p=4, m=8))) == 4
    assert peak(simulate(build("interleaved", p=4, m=8, v=2))) == 5.5
