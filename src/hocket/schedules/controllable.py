"""The V family under a memory limit: V-Half, V-Min, V-1F1B, and the best order for any limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from hocket.costs import Costs, Number
from hocket.errors import UsageError
from hocket.ir import Kind, Schedule
from hocket.schedules.registry import register
from hocket.schedules.v_reorder import half_block, min_block, reordered
from hocket.schedules.v_shape_search import Question, search

_SOURCE = "Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362"
_SPLIT, _WHOLE = (Kind.F, Kind.I, Kind.W), (Kind.F, Kind.B)
_EVEN, _ROUGH = Costs(), Costs(F=10, I=12, W=7, B=19, latency=3)


@register("v-half", source=f"{_SOURCE}, section 3 and figure 3", stages_per_rank=2)
def v_half(p: int, m: int) -> Schedule:
    """Half the activation memory of 1F1B for a bubble that does not grow with m.

    Rank r holds stages r and 2p - 1 - r. floor(p/2) + 1 microbatches in flight (of two stages
    each, until W). Makespan at F = I = W, no latency, p >= 3, m >= 2p: 6m + 6 floor((p-1)/2) - 1
    stage times, which is optimal for p = 4, m = 8. With other costs the bubble stays constant in m
    where W + 2I >= 2F and W + 2F >= 2I.

    >>> from hocket import build, dumps
    >>> print(dumps(build("v-half", p=4, m=4)), end="")
    # hocket 1
    """
    limit = 2 * (p // 2 + 1)
    published = reordered("v-half", p, m, half_block(p), limit) if p > 2 else None
    return published or _even("v-half", p, m, limit)


@register("v-min", source=f"{_SOURCE}, section 3 and figure 3", stages_per_rank=2)
def v_min(p: int, m: int) -> Schedule:
    """A third of the activation memory of 1F1B, the least that keeps a constant bubble.

    Rank r holds stages r and 2p - 1 - r. ceil((p + 2)/3) microbatches in flight (of two stages
    each, until W). The order is the best found: 6m + 23 stage times for p = 8, m = 16 at
    F = I = W, where the paper's block gives 6m + 27.

    >>> from hocket import build, dumps
    >>> print(dumps(build("v-min", p=4, m=4)), end="")
    # hocket 1
    """
    limit = 2 * ((p + 4) // 3)
    return reordered("v-min", p, m, min_block(p), limit) or _even("v-min", p, m, limit)


@register(
    "v-auto",
    source=f"{_SOURCE}, section 4 and appendix",
    rules=(("limit >= 2", lambda limit: limit is None or limit >= 2),),
    stages_per_rank=2,
)
def v_auto(p: int, m: int, *, limit: int | None = None) -> Schedule:
    """Two stages a rank in a V, in the best order found that keeps to a limit.

    limit: stages in flight per rank until W, two for a whole microbatch; left out, 2p, where
    nothing waits between a rank's first and last action. Bubble at F = I = W, no latency,
    m >= 2p: max(p - 1, 6p - 1 - 3 limit) stage times from the memory of V-Min on. This order
    is made for F = I = W; `v_schedule` takes real costs.

    >>> from hocket import build, dumps
    >>> print(dumps(build("v-auto", p=3, m=4, limit=5)), end="")
    # hocket 1
    """
    return _even("v-auto", p, m, 2 * p if limit is None else limit)


@register("v-1f1b", source=f"{_SOURCE}, section 3", stages_per_rank=2)
def v_1f1b(p: int, m: int) -> Schedule:
    """Whole backwards in a V: two thirds of the memory of 1F1B and about its bubble.

    Rank r holds stages r and 2p - 1 - r. ceil((2p + 1)/3) microbatches in flight, of two stages
    each.

    >>> from hocket import build, dumps
    >>> print(dumps(build("v-1f1b", p=4, m=4)), end="")
    # hocket 1
    """
    return _even("v-1f1b", p, m, 2 * ((2 * p + 3) // 3), split=False)


def v_schedule(
    p: int, m: int, *, limit: float | Sequence[float], costs: Costs = _EVEN,
    metric: str = "makespan", split: bool = True, held: float = 1, effort: int = 4_000_000,
    name: str = "v-auto",
) -> Schedule:  # fmt: skip
    """The best order found for 2p stages in a V on p ranks under a limit, for these costs.

    limit: stages in flight, for all ranks or one for each. metric: what is to be small,
    "makespan" or "span". split: backwards as I and W. held: the share of a stage's activations
    that is still there between I and W (1 counts all until W). effort: actions to time in the
    search; the same effort always gives the same order.

    Raises: UsageError for a limit below 2: each rank must hold both stages of a microbatch.
    """
    limits = (limit,) * p if isinstance(limit, int | float) else tuple(limit)
    if min(limits) < 2:
        raise UsageError(f"limit is {min(limits)}; the smallest that fits is 2")
    return _found(name, p, m, limits, replace(costs, FB="sum"), metric, split, held, effort)


def _even(name: str, p: int, m: int, limit: int, *, split: bool = True) -> Schedule:
    return v_schedule(p, m, limit=limit, split=split, name=name)


@lru_cache(maxsize=64)
def _found(
    name: str, p: int, m: int, limits: tuple[float, ...], costs: Costs, metric: str, split: bool,
    held: float, effort: int,
) -> Schedule:  # fmt: skip
    question = Question(
        name, p, m, 2, _SPLIT if split else _WHOLE, tuple(min(x, 2 * m) for x in limits), costs,
        held=held, metric=metric, effort=effort,
        also=_ROUGH if costs == _EVEN else None,
        target=_target(p, m, min(limits), metric) if split and costs == _EVEN else 0,
    )  # fmt: skip
    return search(question).schedule


def _target(p: int, m: int, limit: float, metric: str) -> Number:
    """What is known to be reached with F = I = W and no latency; the search stops there."""
    least = {"makespan": p - 1, "span": 0}[metric]
    return max(6 * m + max(least, 6 * p - 1 - 3 * int(limit)), 4 * p + 1)
