"""The automatic zero-bubble schedule: the best order found for these costs and this memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from hocket.costs import Costs
from hocket.errors import UsageError
from hocket.ir import Kind, Schedule
from hocket.schedules.registry import register
from hocket.schedules.v_shape_search import Question, search

_KINDS = (Kind.F, Kind.I, Kind.W)
_EVEN, _ROUGH = Costs(), Costs(F=10, I=12, W=7, B=19, latency=3)


@register(
    "zb-auto",
    source="Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1",
    rules=(("limit >= 1", lambda limit: limit is None or limit >= 1),),
)
def zb_auto(p: int, m: int, *, limit: int | None = None) -> Schedule:
    """Forwards, input and weight gradients in the best order found that keeps to a limit.

    limit: microbatches in flight per rank until W; left out, p (the paper's ZB-1p, the memory
    of 1F1B); 2p gives ZB-2p, which has no bubble within a rank's span where communication costs
    nothing. This order is made for F = I = W; `zb_schedule` takes real costs. With them the
    paper's search is reached or beaten on all of its models, at the same memory.

    >>> from hocket import build, dumps
    >>> print(dumps(build("zb-auto", p=4, m=4)), end="")
    # hocket 1
    """
    return zb_schedule(p, m, limit=p if limit is None else limit)


def zb_schedule(
    p: int, m: int, *, limit: float | Sequence[float], costs: Costs = _EVEN,
    metric: str = "span", held: float = 1, effort: int = 4_000_000,
) -> Schedule:  # fmt: skip
    """The best order found for p stages on p ranks under a limit, for these costs.

    limit: microbatches in flight, for all ranks or one for each. held: the share of a
    microbatch's activations that is still there between I and W (1 counts all until W).
    metric: "span" (the paper's) or "makespan". effort: actions to time in the search.

    Raises: UsageError for a limit below 1.
    """
    limits = (limit,) * p if isinstance(limit, int | float) else tuple(limit)
    if min(limits) < 1:
        raise UsageError(f"limit is {min(limits)}; the smallest that fits is 1")
    return _found(p, m, limits, replace(costs, FB="sum"), metric, held, effort)


@lru_cache(maxsize=64)
def _found(
    p: int, m: int, limits: tuple[float, ...], costs: Costs, metric: str, held: float, effort: int
) -> Schedule:
    target = m * 3 if costs == _EVEN and metric == "span" and min(limits) >= 2 * p - 1 else 0
    if costs == _EVEN and min(limits) <= p:
        target = 3 * m + p - 1
    question = Question(
        "zb-auto", p, m, 1, _KINDS, tuple(min(x, m) for x in limits), costs,
        held=held, metric=metric, target=target, effort=effort,
        also=_ROUGH if costs == _EVEN else None,
    )  # fmt: skip
    return search(question).schedule
