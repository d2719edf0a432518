"""TeraPipe: GPipe over slices of each sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hocket.ir import Kind, Schedule, linear
from hocket.pattern import join, run
from hocket.schedules.registry import Formula, register


@register(
    "terapipe",
    source="Li et al., TeraPipe, arXiv 2102.07988; the order of backwards from the authors' "
    "terapipe.py",
    rules=(("slices of 1 or more", lambda slices: slices >= 1),),
    use="As the baseline for slices: seq1f1b has the same bubble with a few slices in flight.",
    formula=Formula(
        "(m slices + p - 1)(f + b) + 2(p - 1) latency, f and b of one slice",
        "slices that cost the same",
        lambda: True,
        lambda p, m, slices, F, B, latency: (m * slices + p - 1) * (F + B) + 2 * (p - 1) * latency,
    ),
)
def terapipe(p: int, m: int, *, slices: int = 2) -> Schedule:
    """All forwards of all slices, then all backwards in reverse: GPipe for long sequences.

    m counts sequences; the schedule's microbatches are slices: number u is slice u mod slices of
    sequence u // slices. The paper also chooses how long each slice is, by dynamic programming
    over measured times; here slices are equal, and their costs differ by `slice` in the costs.
    Makespan (m slices + p - 1)(f + b) + 2(p - 1) latency in slice costs if all cost the same;
    everything in flight.

    >>> from hocket import build, dumps
    >>> print(dumps(build("terapipe", p=4, m=2, slices=2)), end="")
    # hocket 1
    name terapipe
    slices 2
    path 0: 0 1 2 3
    0: 0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0
    1: 1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0
    2: 2F0 2F1 2F2 2F3 2B3 2B2 2B1 2B0
    3: 3F0 3F1 3F2 3F3 3B3 3B2 3B1 3B0
    """
    r, units = np.arange(p), np.arange(m * slices)
    line = join(run(Kind.F, r, units), run(Kind.B, r, units[::-1]))
    placement = replace(linear(p, m * slices), slices=slices)
    return Schedule.from_lines("terapipe", placement, line)
