"""DualPipe and DualPipeV: forwards and backwards of two directions run together."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hocket.ir import Array, Kind, Schedule, kinds_of, mirrored, vshape
from hocket.pattern import Pattern, alternate, cut, fuse, join, keep, run
from hocket.schedules.registry import Formula, register


def _lost(k: int, F: Any, I: Any, W: Any, FB: Any) -> Any:
    """What k ranks of warm-up cost beyond the fused pairs."""
    return max(k * F, k * I - F) + k * (FB - W - min(I, W))


@register(
    "dualpipe",
    source="DeepSeek-V3 technical report, arXiv 2412.19437, section 3.2.1 and figure 5",
    rules=(
        ("p even", lambda p: p % 2 == 0),
        ("m even", lambda m: m % 2 == 0),
        ("m >= 2p", lambda p, m: m >= 2 * p),
    ),
    weights="2x",
    use="MoE models where F and B of different microbatches really overlap, and weights fit twice.",
    formula=Formula(
        "(p + 1)(F + B) + (m - p - 1)FB + max(kF, kI - F) + k(FB - W - min(I, W)), k = p/2 - 1",
        "no latency, FB >= max(F, B)",
        lambda F, B, FB, latency: latency == 0 and max(F, B) <= FB,
        lambda p, m, F, I, W, B, FB: (
            (p + 1) * (F + B) + (m - p - 1) * FB + _lost(p // 2 - 1, F, I, W, FB)
        ),
    ),
)
def dualpipe(p: int, m: int) -> Schedule:
    """Two copies of the model from both ends, so that a forward always meets a backward to hide.

    Half of the microbatches enter at rank 0, half at rank p - 1; rank r holds stages r and
    p - 1 - r. Makespan (p + 1)(F + B) + (m - p - 1)FB + max(kF, kI - F) + k(FB - W - min(I, W))
    with k = p/2 - 1, for equal stages, no latency, FB >= max(F, B); p + 1 in flight; weights
    twice.

    >>> from hocket import build, dumps
    >>> print(dumps(build("dualpipe", p=4, m=8)), end="")
    # hocket 1
    name dualpipe
    path 0: 0 1 2 3 | 0-3
    path 1: 3 2 1 0 | 4-7
    0: 0F0 0F1 0F2 3F4 3I4 3W4 3F5 0F3+3B5 3F6+0B0 3B6 3F7+0B1 3B7 0I2 0W2 0I3 0W3
    1: 1F0 2F4 1F1 2F5 1F2 2B4 2F6+1B0 1F3+2B5 2F7+1B1 2B6 1B2 2I7 1I3 2W7 1W3
    2: 1F4 2F0 1F5 2F1 1F6 2B0 2F2+1B4 1F7+2B1 2F3+1B5 2B2 1B6 2I3 1I7 2W3 1W7
    3: 0F4 0F5 0F6 3F0 3I0 3W0 3F1 0F7+3B1 3F2+0B4 3B2 3F3+0B5 3B3 0I6 0W6 0I7 0W7
    """
    half, r = m // 2, np.arange(p)  # all ranks at once
    distance = np.minimum(r, p - 1 - r)  # from the nearer end
    near = _Stream(distance, np.where(r < p // 2, 0, half), half)
    far = _Stream(p - 1 - distance, np.where(r < p // 2, half, 0), half)
    line = _eight_steps(distance, p // 2, near, far)
    return Schedule.from_lines("dualpipe", mirrored(p, (0,) * half + (1,) * half), line)


@register(
    "dualpipev",
    source="Qi et al., DualPipe could be better without the Dual, 2025; DeepSeek DualPipe, "
    "dualpipev.py",
    rules=(("m >= 2p", lambda p, m: m >= 2 * p),),
    stages_per_rank=2,
    use="DualPipe's overlap with weights held once; zb-v is better where nothing overlaps.",
    formula=Formula(
        "(2p + 1)(f + b) + (2m - 2p - 1)fb + max(kf, ki - f) + k(fb - w - min(i, w)), k = p - 1",
        "no latency, fb >= max(f, b)",
        lambda F, B, FB, latency: latency == 0 and max(F, B) <= FB,
        lambda p, m, F, I, W, B, FB: (
            (2 * p + 1) * (F + B) + (2 * m - 2 * p - 1) * FB + _lost(p - 1, F, I, W, FB)
        ),
    ),
)
def dualpipev(p: int, m: int) -> Schedule:
    """DualPipe cut in half: the way back runs on the same ranks, so weights are held once.

    Rank r holds stages r and 2p - 1 - r. Makespan in stage costs (2p + 1)(f + b) +
    (2m - 2p - 1)fb + max(kf, ki - f) + k(fb - w - min(i, w)) with k = p - 1, for equal stages,
    no latency, fb >= max(f, b); 2p + 1 stages in flight.

    >>> from hocket import build, dumps
    >>> print(dumps(build("dualpipev", p=2, m=4)), end="")
    # hocket 1
    name dualpipev
    path 0: 0 1 1 0
    0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3+3B1 3F2+0B0 3B2 3F3+0B1 3B3 0I2 0W2 0I3 0W3
    1: 1F0 2F0 1F1 2F1 1F2 2B0 2F2+1B0 1F3+2B1 2F3+1B1 2B2 1B2 2I3 1I3 2W3 1W3
    """
    r = np.arange(p)
    line = _eight_steps(r, p, _Stream(r, 0, m), _Stream(2 * p - 1 - r, 0, m))
    return Schedule.from_lines("dualpipev", vshape(p, m), line)


class _Stream:
    """n microbatches of one stage, from `first` on, taken in order by forwards and by backwards.

    stage, first and what is taken: one number, or one per rank.
    """

    def __init__(self, stage: Any, first: Any, n: int) -> None:
        self.n, self._stage, self._mbs = n, stage, np.arange(n + np.max(first))
        self._forwards = self._backwards = first

    def forward(self, n: Any) -> Pattern:
        """The next n forwards."""
        self._forwards, first = self._forwards + n, self._forwards
        return cut(run(Kind.F, self._stage, self._mbs), first, first + n)

    def backward(self, n: Any, kind: Kind = Kind.B) -> Pattern:
        """The next n backwards of a kind."""
        self._backwards, first = self._backwards + n, self._backwards
        return cut(run(kind, self._stage, self._mbs), first, first + n)


class _Steps(NamedTuple):
    """How often each of the eight steps repeats."""

    far: Array
    near: Array
    main: Array


def _eight_steps(h: Array, half: int, a: _Stream, b: _Stream) -> Pattern:
    """The order of ranks at distance h from the end where `a` enters, of `half` ranks.

    Source: the eight loops of DualPipe's `step`, each a repeated pattern over two streams.
    """
    n = _Steps(far=half - h - 1, near=h + 1, main=a.n - 2 * half + h + 1)
    one = a.forward(2 * n.far)
    two = alternate(a.forward(n.near), b.forward(n.near))
    early = b.backward(n.far, Kind.I)
    three = alternate(early, _weights(early), b.forward(n.far))
    four = _main(a, b, n.main, meets=h == half - 1)
    five = alternate(b.backward(n.far), fuse(b.forward(n.far), a.backward(n.far)))
    # halfway through step six the weight gradients are put off; on even ranks one action later
    middle, odd = np.divmod(n.near, 2)
    six = join(
        alternate(b.backward(middle), a.backward(middle)),
        alternate(b.backward(odd), a.backward(odd, Kind.I)),
        alternate(b.backward(middle, Kind.I), a.backward(middle, Kind.I)),
    )
    late = a.backward(n.far, Kind.I)
    weights = _weights(join(six, late))
    seven = alternate(cut(weights, 0, n.far), late)
    return join(one, two, three, four, five, six, seven, cut(weights, n.far))


def _main(a: _Stream, b: _Stream, n: Array, meets: Array) -> Pattern:
    """Step four: a forward of each direction fused with a backward of the other.

    Where the two directions meet the first backward of `b` waits for the forward just before
    it, so that pair is not fused.
    """
    first = np.where(meets, np.minimum(n, 1), 0)
    apart = alternate(
        a.forward(first), b.backward(first), fuse(b.forward(first), a.backward(first))
    )
    rest = n - first
    together = alternate(
        fuse(a.forward(rest), b.backward(rest)), fuse(b.forward(rest), a.backward(rest))
    )
    return join(apart, together)


def _weights(line: Pattern) -> Pattern:
    """The weight gradients of a line's input gradients, in their order."""
    return keep(line, lambda codes: kinds_of(codes) == Kind.I, add=Kind.W - Kind.I)
