"""The V family under a memory limit: V-Half, V-Min, V-1F1B, and the best order for any limit."""

from __future__ import annotations

from functools import lru_cache

from hocket.ir import Schedule
from hocket.schedules.registry import Formula, register
from hocket.schedules.zero_bubble import zb_v
from hocket.search.v_reorder import half_block, min_block, reordered, whole_block

_SOURCE = "Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362"


@register(
    "v-half",
    source=f"{_SOURCE}, section 3 and figure 3",
    stages_per_rank=2,
    use="Half the activation memory of 1F1B, if F, I and W cost about the same.",
    formula=Formula(
        "f(6m + 6 floor((p - 1)/2) - 1)",
        "no latency, p >= 3, m >= 2p, f = i = w",
        lambda p, m, F, I, W, latency: latency == 0 and p >= 3 and m >= 2 * p and F == I == W,
        lambda p, m, F: F * (6 * m + 6 * ((p - 1) // 2) - 1),
    ),
)
def v_half(p: int, m: int) -> Schedule:
    """Half the activation memory of 1F1B for a bubble that does not grow with m.

    Rank r holds stages r and 2p - 1 - r. floor(p/2) + 1 microbatches in flight (of two stages
    each, until W). Makespan at F = I = W, no latency, p >= 3, m >= 2p: 6m + 6 floor((p-1)/2) - 1
    stage times, which is optimal for p = 4, m = 8. With other costs the bubble stays constant in m
    where W + 2I >= 2F and W + 2F >= 2I.

    >>> from hocket import build, dumps
    >>> print(dumps(build("v-half", p=4, m=3)), end="")
    # hocket 1
    name v-half
    path 0: 0 1 2 3 3 2 1 0
    0: 0F0 0F1 0F2 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 0I0 0W0 0I1 0W1 0I2 0W2
    1: 1F0 1F1 1F2 6F0 6F1 6I0 6W0 6F2 6I1 6W1 1I0 6I2 1W0 1I1 6W2 1W1 1I2 1W2
    2: 2F0 2F1 2F2 5F0 5F1 5F2 5I0 5W0 5I1 2I0 5W1 2W0 2I1 5I2 2W1 5W2 2I2 2W2
    3: 3F0 4F0 3F1 4F1 3F2 4F2 4I0 4W0 3I0 3W0 4I1 3I1 4W1 3W1 4I2 3I2 4W2 3W2
    """
    limit = 2 * (p // 2 + 1)
    if p < 3:  # the block of the paper is for three ranks and more
        return _searched("v-half", p, m, limit)
    return _kept(reordered("v-half", p, m, half_block(p), limit))


@register(
    "v-min",
    source=f"{_SOURCE}, section 3 and figure 3",
    stages_per_rank=2,
    use="A third of the activation memory of 1F1B, for a bubble of two thirds of that of 1F1B.",
    formula=Formula(
        "f(6m + 12 floor(p/3) - (7 if 3 divides p else 1))",
        "no latency, p >= 3, m >= p, f = i = w",
        lambda p, m, F, I, W, latency: latency == 0 and p >= 3 and m >= p and F == I == W,
        lambda p, m, F: F * (6 * m + 12 * (p // 3) - (1 if p % 3 else 7)),
    ),
)
def v_min(p: int, m: int) -> Schedule:
    """A third of the activation memory of 1F1B, the least that keeps a constant bubble.

    Rank r holds stages r and 2p - 1 - r. ceil((p + 2)/3) microbatches in flight (of two stages
    each, until W). Makespan at F = I = W, no latency, p >= 3, m >= p: 6m + 12k - 7 stage times for
    p = 3k, 6m + 12k - 1 for 3k + 1 and 3k + 2; in the last case the paper's code has 4 more. No
    order is faster for p = 4, m = 8 at this memory.

    >>> from hocket import build, dumps
    >>> print(dumps(build("v-min", p=4, m=3)), end="")
    # hocket 1
    name v-min
    path 0: 0 1 2 3 3 2 1 0
    0: 0F0 0F1 0F2 7F0 7I0 7W0 7F1 7I1 7W1 0I0 0W0 7F2 7I2 0I1 7W2 0W1 0I2 0W2
    1: 1F0 1F1 6F0 6F1 6I0 6W0 1F2 6I1 6W1 1I0 1W0 6F2 1I1 6I2 1W1 6W2 1I2 1W2
    2: 2F0 2F1 5F0 5F1 5I0 5W0 2F2 2I0 2W0 5I1 5W1 5F2 2I1 2W1 5I2 5W2 2I2 2W2
    3: 3F0 4F0 3F1 4F1 4I0 3I0 4W0 3W0 3F2 4F2 4I1 3I1 4W1 3W1 4I2 3I2 4W2 3W2
    """
    limit = 2 * ((p + 4) // 3)
    return _kept(reordered("v-min", p, m, min_block(p), limit))


@register(
    "v-auto",
    searches=True,
    source=f"{_SOURCE}, section 4 and appendix",
    rules=(("limit >= 2", lambda limit: limit is None or limit >= 2),),
    stages_per_rank=2,
    use="Any activation memory between V-Min and ZB-V: the best order found for that limit.",
)
def v_auto(p: int, m: int, *, limit: int | None = None) -> Schedule:
    """Two stages per rank in a V, in the best order found that keeps to a limit.

    limit: stages in flight per rank until W, two for a whole microbatch; left out, 2p, where
    ZB-V's makespan is reached. This order is made for F = I = W, where from V-Min's memory on it
    has the least bubble that a limit allows: 6p - 1 - 3 limit stage times up to 3p/2, from there
    3p - 1 - limit (tested for p = 3 to 16, m = 2p and more). For real costs:
    `hocket plan --shapes v -v 2`.

    >>> from hocket import build, dumps
    >>> print(dumps(build("v-auto", p=3, m=3, limit=5)), end="")
    # hocket 1
    name v-auto
    path 0: 0 1 2 2 1 0
    0: 0F0 0F1 0F2 5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0 5F2 5I2 0I1 5W2 0W1 0I2 0W2
    1: 1F0 1F1 1F2 4F0 4F1 4I0 4W0 1I0 4I1 4F2 1W0 1I1 4I2 4W1 1W1 1I2 4W2 1W2
    2: 2F0 3F0 2F1 3F1 2F2 3I0 2I0 3W0 3F2 3I1 2I1 2W0 3W1 3I2 2I2 2W1 3W2 2W2
    """
    return _searched("v-auto", p, m, 2 * p if limit is None else limit)


@register(
    "v-1f1b",
    source=f"{_SOURCE}, section 3",
    stages_per_rank=2,
    use="Two thirds of the activation memory of 1F1B where backwards cannot be split.",
)
def v_1f1b(p: int, m: int) -> Schedule:
    """Full backwards in a V: two thirds of the memory of 1F1B and about its bubble.

    Rank r holds stages r and 2p - 1 - r. ceil((2p + 1)/3) microbatches in flight, of two stages
    each. Bubble at F = 1, B = 2, no latency: 15 stage times for p = 4, 33 for p = 8, where 1F1B
    has 18 and 42.

    >>> from hocket import build, dumps
    >>> print(dumps(build("v-1f1b", p=4, m=4)), end="")
    # hocket 1
    name v-1f1b
    path 0: 0 1 2 3 3 2 1 0
    0: 0F0 0F1 0F2 0F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 0B0 0B1 0B2 0B3
    1: 1F0 1F1 1F2 1F3 6F0 6F1 6B0 6F2 6B1 6B2 6F3 1B0 6B3 1B1 1B2 1B3
    2: 2F0 2F1 2F2 5F0 5F1 5F2 5B0 2F3 5B1 2B0 5F3 5B2 2B1 5B3 2B2 2B3
    3: 3F0 4F0 3F1 4F1 3F2 4F2 4B0 3B0 3F3 4F3 4B1 3B1 4B2 3B2 4B3 3B3
    """
    limit = 2 * ((2 * p + 3) // 3)
    return _kept(reordered("v-1f1b", p, m, whole_block(p), limit, split=False))


def _kept(schedule: Schedule | None) -> Schedule:
    assert schedule is not None, "the paper's blocks put no two actions of a rank at one time"
    return schedule


@lru_cache(maxsize=64)
def _searched(name: str, p: int, m: int, limit: int) -> Schedule:
    from hocket.search.v_shape import Question, search  # for these schedules alone

    known = (zb_v(p, m),) if m >= 2 * p - 1 else ()
    limit = min(limit, 2 * m)
    return search(Question(name, p, m, 2, limit, "makespan", _target(p, m, limit), known=known))


def _target(p: int, m: int, limit: int) -> int:
    """No order is faster with F = I = W and no latency; the search stops where it gets there.

    A backward reaches the last rank 3p - 1 units after the start, and until then the rank has
    only as many forwards as its memory holds. After its last forward the step takes 3p units
    more, and the rank has a backward and a weight gradient of each stage that it still holds.
    """
    held = min(limit, 2 * p)
    begin = 2 * p - held
    end = max(3 * p - 2 * held, 0) if held < 2 * m else 0
    return max(6 * m + p - 1 + begin + end, 4 * p + 1)
