"""The handcrafted zero-bubble schedules: weight gradients fill what would be idle."""

from __future__ import annotations

import numpy as np

from hocket.ir import Array, Kind, Schedule, linear, mbs_of, vshape
from hocket.pattern import Pattern, alternate, cut, join, keep, run
from hocket.schedules.registry import Formula, register

_SOURCE = "Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241"


@register(
    "zb-h1",
    source=f"{_SOURCE}, section 2.1 and figure 3 (top)",
    use="Instead of 1F1B wherever the backward can be split: a third of its bubble, same memory.",
    formula=Formula(
        "m(F + I + W) + (p - 1)(F + I - W)",
        "no latency, m >= p, W <= min(F, I)",
        lambda p, m, F, I, W, latency: latency == 0 and m >= p and min(F, I) >= W,
        lambda p, m, F, I, W: m * (F + I + W) + (p - 1) * (F + I - W),
    ),
)
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
    r = np.arange(p)  # all ranks at once
    warm_up, lag = p - 1 - r, r
    if m < p:  # too few microbatches to take turns: all but the last rank run F first
        warm_up, lag = np.where(r < p - 1, m, 0), np.where(r < p - 1, 0, m)
    return Schedule.from_lines("zb-h1", linear(p, m), _stage(r, m, warm_up, lag))


@register(
    "zb-h2",
    source=f"{_SOURCE}, section 2.2 and figure 3 (bottom)",
    use="Where steps may overlap (optimiser validated afterwards) and twice the memory is there.",
    formula=Formula(
        "m(F + I + W) + (p - 1)(F + I - 2W)",
        "no latency, m >= 2p - 1, W <= min(F, I)",
        lambda p, m, F, I, W, latency: latency == 0 and m >= 2 * p - 1 and min(F, I) >= W,
        lambda p, m, F, I, W: m * (F + I + W) + (p - 1) * (F + I - 2 * W),
        metric="span",
    ),
)
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
    r = np.arange(p)
    line = _stage(r, m, warm_up=2 * (p - 1 - r), lag=2 * r)
    return Schedule.from_lines("zb-h2", linear(p, m), line)


@register(
    "zb-v",
    source="Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, "
    "section 4 (V-ZB)",
    stages_per_rank=2,
    use="Zero bubble without extra memory or weights, if F, I and W cost about the same.",
    formula=Formula(
        "f(6m + p - 1)",
        "no latency, m >= 2p - 1, f = i = w",
        lambda p, m, F, I, W, latency: latency == 0 and m >= 2 * p - 1 and F == I == W,
        lambda p, m, F: F * (6 * m + p - 1),
    ),
)
def zb_v(p: int, m: int) -> Schedule:
    """Zero bubble on a V: two stages per rank, there and back, with the memory of 1F1B.

    Rank r holds stages r and 2p - 1 - r. For F = I = W and m >= 2p - 1 the span has no bubble
    (6m stage units) and the makespan is 6m + p - 1; for other costs the bubble does not grow
    with m. 2p stages in flight on every rank (m >= 2p - 1).

    >>> from hocket import build, dumps
    >>> print(dumps(build("zb-v", p=2, m=4)), end="")
    # hocket 1
    name zb-v
    path 0: 0 1 1 0
    0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
    1: 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
    """  # noqa: E501
    return Schedule.from_lines("zb-v", vshape(p, m), _there_and_back(np.arange(p), p, m))


def _there_and_back(r: Array, p: int, m: int) -> Pattern:
    """Three parts of warm-up, the steady six actions, four parts of cool-down.

    The order is laid out for at least 2p - 1 microbatches; those beyond m are left out.
    """
    n = max(2 * p - 1, m)
    out, back = r, 2 * p - 1 - r
    f0, i0, w0 = (run(kind, out, range(n)) for kind in (Kind.F, Kind.I, Kind.W))
    f1, i1, w1 = (run(kind, back, range(n)) for kind in (Kind.F, Kind.I, Kind.W))
    first, near, steady = 2 * (p - r) - 1, p - r, n - p
    late = first + r + steady - n  # turns of the steady part whose F of the way out has run
    turns = [cut(i0, 0, steady), cut(w0, 0, steady), cut(f1, p, n), cut(i1, near, near + steady),
             cut(w1, near, near + steady)]  # fmt: skip
    early = [cut(x, 0, steady - late) for x in turns]
    rest = [cut(x, steady - late) for x in turns]
    line = join(
        cut(f0, 0, first),
        alternate(cut(f1, 0, r), cut(f0, first, first + r)),
        alternate(cut(f1, r, p), cut(i1, 0, near), cut(w1, 0, near)),
        alternate(cut(f0, first + r), *early),
        alternate(*rest),
        alternate(cut(i0, steady, steady + r), cut(i1, near + steady)),
        alternate(cut(i0, steady + r), cut(w0, steady, steady + near)),
        cut(w1, near + steady),
        cut(w0, steady + near),
    )
    return line if n == m else keep(line, lambda codes: mbs_of(codes) < m)


def delayed(
    forwards: Pattern, inputs: Pattern, weights: Pattern, warm_up: Array, lag: Array
) -> Pattern:
    """Warm-up forwards; then F, I and the W of `lag` actions before; then the other W."""
    n = forwards.single().times
    w, lag = np.minimum(warm_up, n), np.minimum(lag, n)
    last = n - w  # the turn that has no F any more
    both, one = np.minimum(last, lag), np.maximum(last, lag)
    return join(
        cut(forwards, 0, w),
        alternate(cut(forwards, w, w + both), cut(inputs, 0, both)),
        alternate(cut(forwards, w + lag), cut(inputs, lag, last), cut(weights, 0, last - lag)),
        cut(inputs, last, lag),  # neither F nor W
        alternate(cut(inputs, one), cut(weights, one - lag, n - lag)),
        cut(weights, n - lag),
    )


def _stage(stage: Array, m: int, warm_up: Array, lag: Array) -> Pattern:
    """The order of ranks that hold one stage."""
    f, i, w = (run(kind, stage, range(m)) for kind in (Kind.F, Kind.I, Kind.W))
    return delayed(f, i, w, warm_up, lag)
