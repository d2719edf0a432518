"""A user's script: type-checked by test_typing.py, so every public name has the type it needs."""

from __future__ import annotations

from fractions import Fraction
from typing import assert_type

import hocket


def bubble(name: str, costs: hocket.Costs) -> float:
    """The bubble ratio of a built-in schedule."""
    schedule = hocket.build(name, p=4, m=8)
    report = hocket.check(schedule, transport="ordered")
    if not report.ok:
        raise SystemExit("\n".join(problem.text for problem in report.problems))
    timeline = hocket.simulate(schedule, costs)
    return timeline.bubble_ratio


schedule = hocket.build("zb-h1", p=4, m=8)
assert_type(schedule, hocket.Schedule)
assert_type(hocket.loads(hocket.dumps(schedule)), hocket.Schedule)
assert_type(schedule.placement, hocket.Placement)
assert_type(schedule.p, int)

costs = hocket.Costs(F=10, I=(12, 12, 12, 14), W=7.5, latency=Fraction(1, 2))
timeline = hocket.simulate(schedule, costs)
assert_type(timeline, hocket.Timeline)
assert_type(timeline.ranks[0].peak_in_flight, int)

plan = hocket.plan(hocket.Request(p=4, m=8, costs=costs, in_flight=4))
assert_type(plan.schedule, hocket.Schedule)
hocket.write_trace(hocket.simulate(plan.schedule, plan.costs), "plan.pftrace")

try:
    print(bubble("1f1b", costs))
except hocket.HocketError as error:
    print(error)
