"""The automatic zero-bubble schedule: the best order found for these costs and this memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from hocket.costs import Costs
from hocket.deps import SPLIT
from hocket.errors import UsageError
from hocket.ir import Schedule
from hocket.schedules.registry import register
from hocket.schedules.zero_bubble import zb_h1, zb_h2

_EVEN, _ROUGH = Costs(), Costs(F=10, I=12, W=7, B=19, latency=3)


@register(
    "zb-auto",
    searches=True,
    source="Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1",
    rules=(("limit >= 1", lambda limit: limit is None or limit >= 1),),
    use="Split backwards without a V: any memory from 1F1B's up, in the best order found.",
)
def zb_auto(p: int, m: int, *, limit: int | None = None) -> Schedule:
    """Forwards, input and weight gradients in the best order found that keeps to a limit.

    limit: microbatches in flight per rank until W; left out, p (the paper's ZB-1p, the memory
    of 1F1B); 2p gives ZB-2p, which has no bubble within a rank's span where communication costs
    nothing. This order is made for F = I = W; `zb_schedule` takes real
    costs.

    >>> from hocket import build, dumps
    >>> print(dumps(build("zb-auto", p=4, m=4)), end="")
    # hocket 1
    name zb-auto
    path 0: 0 1 2 3
    0: 0F0 0F1 0F2 0F3 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3
    1: 1F0 1F1 1F2 1F3 1I0 1I1 1W0 1I2 1W1 1I3 1W2 1W3
    2: 2F0 2F1 2F2 2I0 2F3 2I1 2W0 2I2 2I3 2W1 2W2 2W3
    3: 3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3W1 3W2 3W3
    """
    return zb_schedule(p, m, limit=p if limit is None else limit, effort=2_500_000)


def zb_schedule(
    p: int, m: int, *, limit: float | Sequence[float], costs: Costs = _EVEN,
    metric: str = "span", held: float = 1, effort: int | None = None,
) -> Schedule:  # fmt: skip
    """The best order found for p stages on p ranks under a limit, for these costs.

    limit: microbatches in flight, for all ranks or one for each. held: the share of a
    microbatch's activations that is still there between I and W (1 counts all until W).
    metric: "span" (the paper's) or "makespan". effort: actions to time in the search,
    left out for one that suits the size.

    Raises: UsageError for a limit below 1.
    """
    limits = (limit,) * p if isinstance(limit, int | float) else tuple(limit)
    if min(limits) < 1:
        raise UsageError(f"limit is {min(limits)}; the smallest that fits is 1")
    if effort is None:
        effort = min(max(6_000_000, 10_000 * p * m), 40_000_000)
    return _found(p, m, limits, replace(costs, FB="sum"), metric, held, effort)


@lru_cache(maxsize=64)
def _found(
    p: int, m: int, limits: tuple[float, ...], costs: Costs, metric: str, held: float, effort: int
) -> Schedule:
    target = m * 3 if costs == _EVEN and metric == "span" and min(limits) >= 2 * p - 1 else 0
    if costs == _EVEN and min(limits) <= p:
        target = 3 * m + p - 1
    from hocket.search.v_shape import Question, search  # for these schedules alone

    question = Question(
        "zb-auto", p, m, 1, SPLIT, tuple(min(x, m) for x in limits), costs,
        held=held, metric=metric, target=target, effort=effort, starts=4 if p <= 16 else 8,
        known=(zb_h1(p, m), zb_h2(p, m)),
        also=_ROUGH if costs == _EVEN else None,
    )  # fmt: skip
    return search(question)
