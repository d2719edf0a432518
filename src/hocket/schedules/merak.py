"""1F1B that keeps only the inputs of its stages, and makes the activations again in bubbles."""

from __future__ import annotations

from collections.abc import Iterator

from hocket.ir import Action, Kind, Queue, Schedule, linear
from hocket.schedules.registry import Formula, register

VARIANTS = ("checkpointed", "pre-recompute", "last-no-recompute", "shifted")


@register(
    "merak",
    source="Lai et al., Merak, IEEE TPDS 2023, section 5, and the engine's schedule classes",
    rules=((f"variant of {', '.join(VARIANTS)}", lambda variant: variant in VARIANTS),),
    use="1F1B where activations must be recomputed: less of it on the critical path.",
    formula=Formula(
        "(m + p - 1)(F + B + R), and (p - 1)R less with pre-recompute",
        "variant checkpointed or pre-recompute, no latency, m >= p",
        lambda p, m, variant, latency: variant in VARIANTS[:2] and latency == 0 and m >= p,
        lambda p, m, variant, F, B, R: (
            (m + p - 1) * (F + B + R) - (p - 1) * R * (variant == "pre-recompute")
        ),
    ),
)
def merak(p: int, m: int, *, variant: str = "shifted") -> Schedule:
    """1F1B with recomputation, started before its gradient arrives where the order leaves a gap.

    checkpointed: R runs in one slot with its backward. pre-recompute: the last p - 1 - r
    microbatches of rank r run R ahead of the gradient. last-no-recompute: besides, the last rank
    keeps its activations, and the rank before it runs the first R ahead. shifted: besides, that
    rank runs one more forward before its first backward, and two R ahead; the rank before it
    runs the first R ahead.

    >>> from hocket import build, dumps
    >>> print(dumps(build("merak", p=3, m=4)), end="")
    # hocket 1
    name merak
    path 0: 0 1 2
    0: 0F0 0F1 0F2 0R0 0B0 0F3 0R1+0B1 0R2 0B2 0R3 0B3
    1: 1F0 1F1 1F2 1R0 1B0 1R1 1B1 1F3 1R2+1B2 1R3+1B3
    2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
    """
    order = {Queue(r): list(_line(p, m, r, VARIANTS.index(variant))) for r in range(p)}
    return Schedule.from_order("merak", linear(p, m), order)


def _line(p: int, m: int, r: int, level: int) -> Iterator[list[Action]]:
    from_end = p - 1 - r
    keeps = level >= 2 and from_end == 0
    ahead = {mb for mb in range(m - from_end, m) if level and (level < 2 or from_end > 1)}
    ahead |= {0} if (level >= 2 and from_end == 1) or (level == 3 and from_end == 2) else set()
    ahead |= {1} if level == 3 and from_end == 1 else set()
    warm_up = min(m, p - r)
    shift = level == 3 and from_end == 1 and m > warm_up
    forwards, done = iter(range(m)), 0
    for mb in range(m):
        for _ in range(warm_up + shift if mb == 0 else int(done < m and not (shift and mb == 1))):
            if (forward := next(forwards, None)) is not None:
                yield [Action(Kind.F, r, forward)]
                done += 1
        backward = Action(Kind.B, r, mb)
        again = Action(Kind.R, r, mb)
        if keeps:
            yield [backward]
        elif mb in ahead:
            yield from ([again], [backward])
        else:
            yield [again, backward]
