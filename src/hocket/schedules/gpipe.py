"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

import numpy as np

from hocket.ir import Kind, Schedule, linear
from hocket.pattern import join, run
from hocket.schedules.registry import Formula, register


@register(
    "gpipe",
    source="Huang et al., GPipe, arXiv 1811.06965, figure 2c",
    use="Only as the baseline: the bubble of 1F1B with every microbatch in memory.",
    formula=Formula(
        "(m + p - 1)(F + B) + 2(p - 1) latency",
        "everywhere",
        lambda: True,
        lambda p, m, F, B, latency: (m + p - 1) * (F + B) + 2 * (p - 1) * latency,
    ),
)
def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards in microbatch order.

    Makespan (m + p - 1)(F + B) + 2(p - 1) latency for equal stages; m microbatches in flight.

    >>> from hocket import build, dumps
    >>> print(dumps(build("gpipe", p=4, m=2)), end="")
    # hocket 1
    name gpipe
    path 0: 0 1 2 3
    0: 0F0 0F1 0B0 0B1
    1: 1F0 1F1 1B0 1B1
    2: 2F0 2F1 2B0 2B1
    3: 3F0 3F1 3B0 3B1
    """
    r = np.arange(p)  # all ranks at once
    line = join(run(Kind.F, r, range(m)), run(Kind.B, r, range(m)))
    return Schedule.from_lines("gpipe", linear(p, m), line)
