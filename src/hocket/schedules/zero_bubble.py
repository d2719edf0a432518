"""The handcrafted zero-bubble schedules: weight gradients fill what would be idle."""

from __future__ import annotations

import numpy as np

from hocket.ir import Kind, Line, Schedule, encode, join, lay, linear, run
from hocket.schedules.registry import register

_SOURCE = "Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241"


@register("zb-h1", source=f"{_SOURCE}, section 2.1 and figure 3 (top)")
def zb_h1(p: int, m: int) -> Schedule:
    """1F1B with the weight gradients delayed to where a rank would wait: the memory of 1F1B.

    Makespan m(F + I + W) + (p - 1)(F + I - W) for equal stages, no latency, m >= p, and
    W <= min(F, I) only; min(m, p) in flight until W, p - r until I.

    >>> from hocket import build, dumps
    >>> print(dumps(build("zb-h1", p=4, m=4)), end="")
    # hocket 1
    name zb-h1
    path 0: 0 1 2 3
    0: 0F0 0F1 0F2 0F3 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3
    1: 1F0 1F1 1F2 1I0 1F3 1I1 1W0 1I2 1W1 1I3 1W2 1W3
    2: 2F0 2F1 2I0 2F2 2I1 2F3 2I2 2W0 2I3 2W1 2W2 2W3
    3: 3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3W1 3W2 3W3
    """
    lines = []
    for r in range(p):
        warm_up, lag = p - 1 - r, r
        if m < p:  # too few microbatches to take turns: all but the last rank run F first
            warm_up, lag = (0, m) if r == p - 1 else (m, 0)
        lines.append(_delayed(r, m, warm_up, lag))
    return Schedule.from_lines("zb-h1", linear(p, m), lines)


@register("zb-h2", source=f"{_SOURCE}, section 2.2 and figure 3 (bottom)")
def zb_h2(p: int, m: int) -> Schedule:
    """Twice the warm-up of ZB-H1: no bubble within a rank's span, for twice the memory.

    Span m(F + I + W) + (p - 1)(F + I - 2W) for equal stages, no latency, m >= 2p - 1, and
    W <= min(F, I) only; the makespan is that of ZB-H1 at best. min(m, 2p - 1) in flight.

    >>> from hocket import build, dumps
    >>> print(dumps(build("zb-h2", p=3, m=5)), end="")
    # hocket 1
    name zb-h2
    path 0: 0 1 2
    0: 0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4
    1: 1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4
    2: 2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4
    """
    lines = [_delayed(r, m, warm_up=2 * (p - 1 - r), lag=2 * r) for r in range(p)]
    return Schedule.from_lines("zb-h2", linear(p, m), lines)


def _delayed(stage: int, m: int, warm_up: int, lag: int) -> Line:
    """Warm-up forwards; then F, I and the W of `lag` microbatches before; then the other W."""
    w, lag = min(warm_up, m), min(lag, m)
    i = np.arange(m)
    turns = np.stack(
        [
            encode(int(Kind.F), stage, w + i),
            encode(int(Kind.I), stage, i),
            encode(int(Kind.W), stage, np.maximum(i - lag, 0)),
        ],
        axis=1,
    )
    exists = np.stack([w + i < m, i < m, i >= lag], axis=1)
    return join(
        run(Kind.F, stage, i[:w]), lay(turns[exists]), run(Kind.W, stage, np.arange(m - lag, m))
    )
