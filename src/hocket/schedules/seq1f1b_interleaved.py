"""Seq1F1B-I: interleaved 1F1B over slices of each sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hocket.ir import Kind, Schedule, encode, looped
from hocket.pattern import lay
from hocket.schedules.interleaved import chunk_major
from hocket.schedules.one_f_one_b import in_turn, last_first
from hocket.schedules.registry import Formula, register


@register(
    "seq1f1b-interleaved",
    source="Sun et al., Seq1F1B, arXiv 2406.03488 (Seq1F1B-I); the order from the authors' code, "
    "thunlp/Seq1F1B",
    rules=(
        ("slices of 1 or more, dividing p", lambda p, slices: slices >= 1 and p % slices == 0),
        ("m slices a multiple of p", lambda p, m, slices: slices < 1 or m * slices % p == 0),
    ),
    use="Long sequences with several stages per rank: slices and stages both cut the bubble.",
    formula=Formula(
        "(m slices v + p - 1)(f + b), f and b of one slice and stage",
        "no latency, slices that cost the same",
        lambda latency: latency == 0,
        lambda p, m, v, slices, F, B: (m * slices * v + p - 1) * (F + B),
    ),
)
def seq1f1b_interleaved(p: int, m: int, *, v: int = 2, slices: int = 2) -> Schedule:
    """Interleaved 1F1B over slices: slices take the place of microbatches, in groups of p.

    m counts sequences; the schedule's microbatches are slices: number u is slice u mod slices of
    sequence u // slices. Forwards of a sequence run in order, backwards in reverse, so the
    warm-up is slices - 1 longer than that of interleaving. Makespan (m slices v + p - 1)(f + b) in
    costs of a slice and stage if all slices cost the same; in flight
    (v - 1)p + 2(p - 1 - r) + slices of them.

    >>> from hocket import build, dumps
    >>> print(dumps(build("seq1f1b-interleaved", p=2, m=2, v=2, slices=2)), end="")
    # hocket 1
    name seq1f1b-interleaved
    slices 2
    path 0: 0 1 0 1
    0: 0F0 0F1 2F0 2F1 0F2 0F3 2B1 2F2 2B0 2F3 0B1 0B0 2B3 2B2 0B3 0B2
    1: 1F0 1F1 3F0 3F1 3B1 1F2 3B0 1F3 1B1 3F2 1B0 3F3 3B3 3B2 1B3 1B2
    """
    turns, units = chunk_major([p] * (m * slices // p), v)
    back = last_first(units, slices)
    r = np.arange(p)
    forwards = lay(encode(int(Kind.F), turns * p, units), r)
    backwards = lay(encode(int(Kind.B), (v - 1 - turns) * p, back), r)
    line = in_turn(forwards, backwards, warm_up=2 * (p - 1 - r) + (v - 1) * p + slices - 1)
    placement = replace(looped(p, m * slices, v), slices=slices)
    return Schedule.from_lines("seq1f1b-interleaved", placement, line)
