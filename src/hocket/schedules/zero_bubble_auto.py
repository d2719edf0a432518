"""The automatic zero-bubble schedule: the best order found for these costs and this memory."""

from __future__ import annotations

from functools import lru_cache

from hocket.ir import Schedule
from hocket.schedules.registry import register
from hocket.schedules.zero_bubble import zb_h1, zb_h2


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
    nothing. This order is made for F = I = W. For real costs: `hocket plan --shapes linear -v 1`.

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
    return _searched(p, m, p if limit is None else limit)


@lru_cache(maxsize=64)
def _searched(p: int, m: int, limit: int) -> Schedule:
    from hocket.search.v_shape import Question, search  # for these schedules alone

    target = 3 * m if limit >= 2 * p - 1 else 0
    if limit <= p:
        target = 3 * m + p - 1
    return search(Question(
        "zb-auto", p, m, 1, min(limit, m), "span", target,
        starts=4 if p <= 16 else 8, known=(zb_h1(p, m), zb_h2(p, m)),
    ))  # fmt: skip
