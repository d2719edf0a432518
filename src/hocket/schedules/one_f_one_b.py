"""1F1B and its eager form: one forward, one backward in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from hocket.ir import Array, Kind, Schedule, linear
from hocket.pattern import Pattern, alternate, cut, fuse, join, run
from hocket.schedules.registry import Formula, register


@register(
    "1f1b",
    source="Narayanan et al., PipeDream-flush, arXiv 2006.09503, figure 2b; DAPPLE",
    use="The default where the backward is not split: least memory, one message each way.",
    formula=Formula(
        "(m + p - 1)(F + B)",
        "no latency",
        lambda latency: latency == 0,
        lambda p, m, F, B: (m + p - 1) * (F + B),
    ),
)
def one_f_one_b(p: int, m: int) -> Schedule:
    """One forward, one backward in turn, after p - 1 - r forwards on rank r.

    Makespan (m + p - 1)(F + B) for equal stages and no latency; min(m, p - r) in flight.

    >>> from hocket import build, dumps
    >>> print(dumps(build("1f1b", p=4, m=4)), end="")
    # hocket 1
    name 1f1b
    path 0: 0 1 2 3
    0: 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
    1: 1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3
    2: 2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3
    3: 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3
    """
    r = np.arange(p)  # all ranks at once
    line = in_turn(run(Kind.F, r, range(m)), run(Kind.B, r, range(m)), warm_up=p - 1 - r)
    return Schedule.from_lines("1f1b", linear(p, m), line)


@register(
    "eager-1f1b",
    source="Zhuang et al., arXiv 2211.05322, section 4 (Alpa)",
    use="Where messages are slow: it hides their latency for about twice the memory of 1F1B.",
    formula=Formula(
        "(m + p - 1)(F + B) + 2(p - 1) latency",
        "latency <= min(F, B)",
        lambda F, B, latency: latency <= min(F, B),
        lambda p, m, F, B, latency: (m + p - 1) * (F + B) + 2 * (p - 1) * latency,
    ),
)
def eager(p: int, m: int) -> Schedule:
    """1F1B with twice the warm-up, which hides the latency of messages.

    Makespan (m + p - 1)(F + B) + 2(p - 1) latency; min(m, 2(p - r) - 1) in flight.

    >>> from hocket import build, dumps
    >>> print(dumps(build("eager-1f1b", p=4, m=8)), end="")
    # hocket 1
    name eager-1f1b
    path 0: 0 1 2 3
    0: 0F0 0F1 0F2 0F3 0F4 0F5 0F6 0B0 0F7 0B1 0B2 0B3 0B4 0B5 0B6 0B7
    1: 1F0 1F1 1F2 1F3 1F4 1B0 1F5 1B1 1F6 1B2 1F7 1B3 1B4 1B5 1B6 1B7
    2: 2F0 2F1 2F2 2B0 2F3 2B1 2F4 2B2 2F5 2B3 2F6 2B4 2F7 2B5 2B6 2B7
    3: 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7
    """
    r = np.arange(p)
    line = in_turn(run(Kind.F, r, range(m)), run(Kind.B, r, range(m)), warm_up=2 * (p - 1 - r))
    return Schedule.from_lines("eager-1f1b", linear(p, m), line)


@register("1f1b-overlap", source="1F1B with batch-level overlap, as in MoE training practice; "
          "Victarry, PP-Schedule-Visualization",
    use="Where a fused F+B is much shorter than its parts, as in MoE models; twice 1F1B's memory.",
    formula=Formula(
        "p(F + B) + (m - 1)FB", "no latency, m >= 2p - 1, FB >= max(F, B)",
        lambda p, m, F, B, FB, latency: latency == 0 and m >= 2 * p - 1 and max(F, B) <= FB,
        lambda p, m, F, B, FB: p * (F + B) + (m - 1) * FB,
    ),
)  # fmt: skip
def overlap(p: int, m: int) -> Schedule:
    """Eager 1F1B with one more forward of warm-up, so that each F and B of the steady part fuse.

    Makespan p(F + B) + (m - 1)FB for equal stages, no latency, m >= 2p - 1; 2(p - r) in flight.

    >>> from hocket import build, dumps
    >>> print(dumps(build("1f1b-overlap", p=4, m=8)), end="")
    # hocket 1
    name 1f1b-overlap
    path 0: 0 1 2 3
    0: 0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7+0B0 0B1 0B2 0B3 0B4 0B5 0B6 0B7
    1: 1F0 1F1 1F2 1F3 1F4 1F5+1B0 1F6+1B1 1F7+1B2 1B3 1B4 1B5 1B6 1B7
    2: 2F0 2F1 2F2 2F3+2B0 2F4+2B1 2F5+2B2 2F6+2B3 2F7+2B4 2B5 2B6 2B7
    3: 3F0 3F1+3B0 3F2+3B1 3F3+3B2 3F4+3B3 3F5+3B4 3F6+3B5 3F7+3B6 3B7
    """
    r = np.arange(p)
    forwards, backwards = run(Kind.F, r, range(m)), run(Kind.B, r, range(m))
    line = in_turn(forwards, backwards, warm_up=2 * (p - 1 - r) + 1, pair=fuse)
    return Schedule.from_lines("1f1b-overlap", linear(p, m), line)


@register(
    "seq1f1b",
    source="Sun et al., Seq1F1B, arXiv 2406.03488, section 3.2",
    rules=(("slices of 1 or more", lambda slices: slices >= 1),),
    use="Long sequences: memory and bubble shrink with the number of slices.",
    formula=Formula(
        "(m slices + p - 1)(f + b), f and b of one slice",
        "no latency, slices that cost the same",
        lambda latency: latency == 0,
        lambda p, m, slices, F, B: (m * slices + p - 1) * (F + B),
    ),
)
def seq1f1b(p: int, m: int, *, slices: int = 2) -> Schedule:
    """1F1B over slices of each sequence: less bubble and less memory for long sequences.

    Every sequence is cut into `slices`; their forwards run in order (attention looks back),
    their backwards in reverse. m counts sequences; the schedule's microbatches are slices:
    number u is slice u mod slices of sequence u // slices. Makespan (m slices + p - 1)(f + b) in
    slice costs if all slices cost the same; p - r - 1 + slices slices in flight.

    >>> from hocket import build, dumps
    >>> print(dumps(build("seq1f1b", p=4, m=2, slices=2)), end="")
    # hocket 1
    name seq1f1b
    slices 2
    path 0: 0 1 2 3
    0: 0F0 0F1 0F2 0F3 0B1 0B0 0B3 0B2
    1: 1F0 1F1 1F2 1F3 1B1 1B0 1B3 1B2
    2: 2F0 2F1 2F2 2B1 2F3 2B0 2B3 2B2
    3: 3F0 3F1 3B1 3F2 3B0 3F3 3B3 3B2
    """
    r, units = np.arange(p), np.arange(m * slices)
    forwards, backwards = run(Kind.F, r, units), run(Kind.B, r, last_first(units, slices))
    line = in_turn(forwards, backwards, warm_up=p - r - 2 + slices)
    placement = replace(linear(p, m * slices), slices=slices)
    return Schedule.from_lines("seq1f1b", placement, line)


def last_first(units: Array, slices: int) -> Array:
    """Slices with those of each sequence in reverse: 0 1 2 3 in pairs becomes 1 0 3 2."""
    return units // slices * slices + slices - 1 - units % slices


def in_turn(
    forwards: Pattern, backwards: Pattern, *, warm_up: Any,
    pair: Callable[..., Pattern] = alternate,
) -> Pattern:  # fmt: skip
    """Forwards of the warm-up, then forward and backward in turn, then the other backwards."""
    n = forwards.single().times
    w = np.minimum(warm_up, n)
    turns = pair(cut(forwards, w), cut(backwards, 0, n - w))
    return join(cut(forwards, 0, w), turns, cut(backwards, n - w))
