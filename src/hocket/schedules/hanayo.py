"""Hanayo: waves, several there-and-back trips through the ranks."""

from __future__ import annotations

from hocket.costs import Costs
from hocket.ir import Schedule, wave
from hocket.schedules.chimera import deepest, listed
from hocket.schedules.registry import register
from hocket.simulator import simulate

_PACES = (Costs(F=2, I=1, W=1), Costs())  # a backward as long as a forward, and twice as long


@register(
    "hanayo",
    source="Liu et al., Hanayo, arXiv 2308.15762, section 3",
    rules=(("v even: a wave is two stages per rank", lambda v: v % 2 == 0),),
    use="Few microbatches without a second copy of the weights; v/2 waves cut the bubble.",
)
def hanayo(p: int, m: int, *, v: int = 2) -> Schedule:
    """v/2 waves: a microbatch goes down the ranks and back up, the turn needs no message.

    Weights once, unlike Chimera. The paper gives a rule, not a formula: a rank that is free
    takes a backward before a forward, the deepest first. That is optimal for m = p (36 and 60
    stage units for p=4, F=1 B=2, v=2 and 4) and holds pv stages in flight; with m above p it
    keeps that memory.

    >>> from hocket import build, dumps
    >>> print(dumps(build("hanayo", p=4, m=2, v=2)), end="")
    # hocket 1
    name hanayo
    path 0: 0 1 2 3 3 2 1 0
    0: 0F0 0F1 7F0 7B0 7F1 7B1 0B0 0B1
    1: 1F0 1F1 6F0 6F1 6B0 6B1 1B0 1B1
    2: 2F0 2F1 5F0 5F1 5B0 5B1 2B0 2B1
    3: 3F0 4F0 3F1 4F1 4B0 3B0 4B1 3B1
    """
    orders = [listed("hanayo", wave(p, m, v), pace, deepest) for pace in _PACES]
    lean = [s for s in orders if _peak(s) <= p * v] or orders
    return min(lean, key=lambda s: simulate(s).makespan)


def _peak(schedule: Schedule) -> int:
    return max(r.peak_in_flight for r in simulate(schedule).ranks)
