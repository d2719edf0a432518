"""GEMS: two copies of the model take turns, one microbatch in memory."""

from __future__ import annotations

import numpy as np

from hocket.ir import Kind, Schedule, encode, mirrored
from hocket.pattern import lay
from hocket.schedules.registry import Formula, register


@register(
    "gems",
    source="Jain et al., GEMS, SC 2020; as in Li and Hoefler, Chimera, arXiv 2107.06925, section 2",
    weights="2x",
    use="Where memory holds one microbatch and weights fit twice; else 1f1b with two or more.",
    formula=Formula(
        "mp max(F, B) + (m + p - 1) min(F, B)",
        "no latency",
        lambda latency: latency == 0,
        lambda p, m, F, B: m * p * max(F, B) + (m + p - 1) * min(F, B),
    ),
)
def gems(p: int, m: int) -> Schedule:
    """Microbatches down and up in turn, each forward right behind the backward of the last one.

    Every rank runs a microbatch's forward and backward before it takes the next: one in flight.
    The second copy of the model turns the way around, so that a forward follows the backward
    before it. Bubble ratio near (p - 1)/(p + 1/2) for B = 2F, whatever m is.

    >>> from hocket import build, dumps
    >>> print(dumps(build("gems", p=4, m=4)), end="")
    # hocket 1
    name gems
    path 0: 0 1 2 3 | 0,2
    path 1: 3 2 1 0 | 1,3
    0: 0F0 0B0 3F1 3B1 0F2 0B2 3F3 3B3
    1: 1F0 1B0 2F1 2B1 1F2 1B2 2F3 2B3
    2: 2F0 2B0 1F1 1B1 2F2 2B2 1F3 1B3
    3: 3F0 3B0 0F1 0B1 3F2 3B2 0F3 0B3
    """
    r, mbs = np.arange(p)[:, None], np.arange(m)
    stages = np.where(mbs % 2, p - 1 - r, r)
    turns = [encode(int(kind), stages, mbs) for kind in (Kind.F, Kind.B)]
    line = lay(np.stack(turns, axis=2).reshape(p, -1))
    return Schedule.from_lines("gems", mirrored(p, (mbs % 2).tolist()), line)
