"""The same order with its backwards split, or whole."""

import pytest

from common import order_of
from hocket import Costs, build, check, simulate
from hocket.lower.backward import split_backward, whole_backward
from hocket.schedules import entries

NAMES = [e.name for e in entries() if e.name != "moe-pair"]


def test_a_split_order_has_each_w_right_after_its_i():
    s = split_backward(build("1f1b", p=2, m=2))
    assert order_of(s) == ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"]
    assert order_of(whole_backward(s)) == order_of(build("1f1b", p=2, m=2))


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_can_be_split_and_made_whole(name):
    p, m = (4, 8)
    s = build(name, p=p, m=m)
    for other, kinds in ((split_backward(s), "FIW"), (whole_backward(s), "FB")):
        assert check(other).ok
        assert {k.name for k in other.kinds} - set("RDUA") == set(kinds)
        assert other.placement == s.placement
    if not s.has_split_backward and s.is_single:
        costs = Costs(F=3, I=4, W=2)
        assert simulate(split_backward(s), costs).makespan <= simulate(s, costs).makespan
        assert whole_backward(split_backward(s)) == s
