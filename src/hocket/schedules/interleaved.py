"""Interleaved 1F1B: several stages per rank, round robin."""

from __future__ import annotations

import numpy as np

from hocket.graph import runs
from hocket.ir import Array, Kind, Schedule, encode, looped
from hocket.pattern import Pattern, fuse, join, lay
from hocket.schedules.one_f_one_b import in_turn
from hocket.schedules.registry import Formula, register
from hocket.schedules.zero_bubble import delayed


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
    use="The default for many ranks and few microbatches: v times less bubble than 1F1B.",
    formula=Formula(
        "(mv + p - 1)(f + b), f and b of one stage",
        "no latency, m >= p",
        lambda p, m, latency: latency == 0 and m >= p,
        lambda p, m, v, F, B: (m * v + p - 1) * (F + B),
    ),
)
def interleaved(p: int, m: int, *, v: int = 2, group: int | None = None) -> Schedule:
    """1F1B over v stages per rank: less bubble for more messages and more in flight.

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
    forwards, backwards = _passes(p, v, sizes)
    warm_up = 2 * (p - 1 - np.arange(p)) + (v - 1) * sizes[0]
    line = in_turn(forwards, backwards, warm_up=warm_up)
    return Schedule.from_lines("interleaved", looped(p, m, v), line)


@register(
    "interleaved-overlap",
    source="NVIDIA Megatron-LM, combined 1F1B of MoE models (overlap of expert communication)",
    rules=(("a group of at least min(p, m) and at most m microbatches, "
            "with m mod group either 0 or at least p", _group_fits),),
    use="MoE models with several stages per rank: hides expert communication under the other pass.",
    formula=Formula(
        "pv(f + b) + (mv - p(v - 1) - 1)fb, times of one stage",
        "no latency, m a multiple of p, groups of p, fb >= max(f, b)",
        lambda p, m, group, F, B, FB, latency: (
            latency == 0 and m % p == 0 and group in (None, p) and max(F, B) <= FB
        ),
        lambda p, m, v, F, B, FB: p * v * (F + B) + (m * v - p * (v - 1) - 1) * FB,
    ),
)  # fmt: skip
def interleaved_overlap(p: int, m: int, *, v: int = 2, group: int | None = None) -> Schedule:
    """Interleaved with one more forward of warm-up, so that F and B of the steady part can fuse.

    Makespan in stage costs (p - 1)(f + b) + (p(v - 1) + 1)(f + b) + (mv - p(v - 1) - 1)fb for
    m a multiple of p, equal stages, no latency, groups of p; (v - 1) group + 2(p - 1 - r) + 2
    stages in flight. Without `group`, groups of p and a rest (the published table), or equal
    groups where that order would deadlock.

    >>> from hocket import build, dumps
    >>> print(dumps(build("interleaved-overlap", p=4, m=4, v=2)), end="")
    # hocket 1
    name interleaved-overlap
    path 0: 0 1 2 3 0 1 2 3
    0: 0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 4B0 4B1 4B2 4B3 0B0 0B1 0B2 0B3
    1: 1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3 5B0 5B1 5B2 5B3 1B0 1B1 1B2 1B3
    2: 2F0 2F1 2F2 2F3 6F0 6F1 6F2 6F3+6B0 6B1 6B2 6B3 2B0 2B1 2B2 2B3
    3: 3F0 3F1 3F2 3F3 7F0 7F1+7B0 7F2+7B1 7F3+7B2 7B3 3B0 3B1 3B2 3B3
    """
    if group is None:
        published = _overlapped(p, m, v, group_sizes(p, m, min(p, m)))
        if m % p == 0 or runs(published):
            return published
    return _overlapped(p, m, v, group_sizes(p, m, group))


def _overlapped(p: int, m: int, v: int, sizes: list[int]) -> Schedule:
    forwards, backwards = _passes(p, v, sizes)
    warm_up = 2 * (p - 1 - np.arange(p)) + (v - 1) * sizes[0] + 1
    line = in_turn(forwards, backwards, warm_up=warm_up, pair=fuse)
    return Schedule.from_lines("interleaved-overlap", looped(p, m, v), line)


@register(
    "looped-bfs",
    source="Lamy-Poirier, Breadth-first pipeline parallelism, arXiv 2211.05953",
    use="Where weights are gathered for each pass (sharded data parallel): each stage once a pass.",
    formula=Formula(
        "(mv + p - 1)(f + b), f and b of one stage",
        "no latency, m >= p",
        lambda p, m, latency: latency == 0 and m >= p,
        lambda p, m, v, F, B: (m * v + p - 1) * (F + B),
    ),
)
def looped_bfs(p: int, m: int, *, v: int = 2) -> Schedule:
    """All forwards stage by stage, then all backwards stage by stage, microbatches reversed.

    Makespan (mv + p - 1)(f + b) in stage costs for m >= p; everything in flight.

    >>> from hocket import build, dumps
    >>> print(dumps(build("looped-bfs", p=4, m=2, v=2)), end="")
    # hocket 1
    name looped-bfs
    path 0: 0 1 2 3 0 1 2 3
    0: 0F0 0F1 4F0 4F1 4B1 4B0 0B1 0B0
    1: 1F0 1F1 5F0 5F1 5B1 5B0 1B1 1B0
    2: 2F0 2F1 6F0 6F1 6B1 6B0 2B1 2B0
    3: 3F0 3F1 7F0 7F1 7B1 7B0 3B1 3B0
    """
    turns, mbs = chunk_major([m], v)
    forwards, backwards = (encode(int(kind), turns * p, mbs) for kind in (Kind.F, Kind.B))
    line = join(lay(forwards, np.arange(p)), lay(backwards[::-1], np.arange(p)))
    return Schedule.from_lines("looped-bfs", looped(p, m, v), line)


@register("interleaved-zb", source="torch.distributed.pipelining, ScheduleInterleavedZeroBubble; "
          "after Qi et al., arXiv 2401.10241",
    use="The shortest step at little latency, in the memory of 1F1B; v times its messages.",
    formula=Formula(
        "mv(f + i + w) + (p - 1)(f + i - w), times of one stage",
        "no latency, m a multiple of p, w <= min(f, i)",
        lambda p, m, F, I, W, latency: latency == 0 and m % p == 0 and min(F, I) >= W,
        lambda p, m, v, F, I, W: m * v * (F + I + W) + (p - 1) * (F + I - W),
    ),
)  # fmt: skip
def interleaved_zb(p: int, m: int, *, v: int = 2) -> Schedule:
    """Interleaved with the short warm-up and delayed weight gradients: the memory of 1F1B.

    Makespan mv(f + i + w) + (p - 1)(f + i - w) in stage costs for equal stages, no latency,
    m a multiple of p, w <= min(f, i); vp stages in flight on every rank.

    >>> from hocket import build, dumps
    >>> print(dumps(build("interleaved-zb", p=4, m=1, v=2)), end="")
    # hocket 1
    name interleaved-zb
    path 0: 0 1 2 3 0 1 2 3
    0: 0F0 4F0 4I0 4W0 0I0 0W0
    1: 1F0 5F0 5I0 1I0 5W0 1W0
    2: 2F0 6F0 6I0 2I0 6W0 2W0
    3: 3F0 7F0 7I0 3I0 7W0 3W0
    """
    r, sizes = np.arange(p), group_sizes(p, m, None)
    forwards, inputs, weights = _passes(p, v, sizes, (Kind.I, Kind.W))
    line = delayed(forwards, inputs, weights, warm_up=(v - 1) * sizes[0] + p - 1 - r, lag=r)
    return Schedule.from_lines("interleaved-zb", looped(p, m, v), line)


def _passes(
    p: int, v: int, sizes: list[int], kinds: tuple[Kind, ...] = (Kind.B,)
) -> tuple[Pattern, ...]:
    """Forwards, and the backwards of each kind, of all ranks; a backward reverses the turns."""
    turns, mbs = chunk_major(sizes, v)
    forwards = encode(int(Kind.F), turns * p, mbs)
    backwards = [encode(int(kind), (v - 1 - turns) * p, mbs) for kind in kinds]
    return tuple(lay(codes, np.arange(p)) for codes in (forwards, *backwards))


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
