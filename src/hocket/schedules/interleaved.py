"""Interleaved 1F1B: several stages a rank, round robin."""

from __future__ import annotations

import numpy as np

from hocket.ir import Array, Kind, Schedule, alternate, cut, encode, join, lay, looped
from hocket.schedules.registry import register


def _group_fits(p: int, m: int, group: int | None) -> bool:
    if group is None:
        return True
    return min(p, m) <= group <= m and (m % group == 0 or m % group >= p)


@register(
    "interleaved",
    source="Narayanan et al., Megatron-LM, arXiv 2104.04473, section 2.2 and figure 4",
    rules=(
        (
            "a group of at least min(p, m) and at most m microbatches, "
            "with m mod group either 0 or at least p",
            _group_fits,
        ),
    ),
)
def interleaved(p: int, m: int, *, v: int = 2, group: int | None = None) -> Schedule:
    """1F1B over v stages a rank: less bubble for more messages and more in flight.

    Microbatches go in groups: a rank runs a whole group through one of its stages before the
    next stage (`group` is Megatron's microbatch_group_size_per_vp_stage). Left out, the groups
    are as small and as equal as they can be with p or more in each, which needs the least
    memory; any m is possible, m < p too. Makespan (mv + p - 1)(F + B) for equal stages and no
    latency; in flight (v - 1) group + 2(p - 1 - r) + 1 stages.

    >>> from hocket import build, dumps
    >>> print(dumps(build("interleaved", p=4, m=4, v=2)), end="")
    # hocket 1
    name interleaved
    path 0: 0 1 2 3 0 1 2 3
    0: 0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 4B0 4B1 4B2 4B3 0B0 0B1 0B2 0B3
    1: 1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3 5B0 5B1 5B2 5B3 1B0 1B1 1B2 1B3
    2: 2F0 2F1 2F2 2F3 6F0 6F1 6F2 6B0 6F3 6B1 6B2 6B3 2B0 2B1 2B2 2B3
    3: 3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3B0 3B1 3B2 3B3
    """
    sizes = group_sizes(p, m, group)
    turns, mbs = chunk_major(sizes, v)
    n, lines = m * v, []
    for r in range(p):
        w = min(2 * (p - 1 - r) + (v - 1) * sizes[0], n)
        forwards = lay(encode(int(Kind.F), turns * p + r, mbs))
        backwards = lay(encode(int(Kind.B), (v - 1 - turns) * p + r, mbs))
        steady = alternate(cut(forwards, w), cut(backwards, 0, n - w))
        lines.append(join(cut(forwards, 0, w), steady, cut(backwards, n - w)))
    return Schedule.from_lines("interleaved", looped(p, m, v), lines)


def group_sizes(p: int, m: int, group: int | None) -> list[int]:
    """Microbatches of each group: those of `group` and a rest, or as equal as can be."""
    if group is not None:
        return [group] * (m // group) + [m % group] * (m % group > 0)
    n = max(1, m // p)
    return [m // n + (i < m % n) for i in range(n)]


def chunk_major(sizes: list[int], v: int) -> tuple[Array, Array]:
    """Turn (0 to v - 1) and microbatch of each step: a group goes through all turns in order."""
    turns = [np.repeat(np.arange(v), size) for size in sizes]
    starts = np.cumsum([0, *sizes[:-1]])
    mbs = [np.tile(start + np.arange(size), v) for start, size in zip(starts, sizes, strict=True)]
    return np.concatenate(turns), np.concatenate(mbs)
