"""BitPipe: two V-shaped pipes in opposite directions through the same ranks."""

from __future__ import annotations

from hocket.deps import FULL
from hocket.ir import Placement, Schedule, vshape
from hocket.schedules.chimera import joined
from hocket.schedules.registry import Formula, register
from hocket.search.problem import all_actions


@register(
    "bitpipe",
    source="Wu et al., BitPipe, arXiv 2410.19367; the order from the authors' bitpipe_schedule.py",
    rules=(
        ("p even", lambda p: p % 2 == 0),
        ("m a multiple of p", lambda p, m: m % p == 0),
    ),
    stages_per_rank=2,
    weights="2x",
    use="As Chimera with two pipes, for half of its bubble and twice its messages.",
    formula=Formula(
        "2m(f + b) + (p - 2)(max(f, b) + (m/p - 1)|f - b|), times of one stage",
        "no latency",
        lambda latency: latency == 0,
        lambda p, m, F, B: 2 * m * (F + B) + (p - 2) * (max(F, B) + (m // p - 1) * abs(F - B)),
    ),
)
def bitpipe(p: int, m: int) -> Schedule:
    """Chimera's two directions, each of them a V: half of the bubble for twice the messages.

    Each rank holds two stages of each copy of the model; at both turns of a path the next stage
    is on the same rank. Units of p microbatches are joined end to end as in Chimera's direct
    concatenation; at most 2p stages are in flight.

    >>> from hocket import build, dumps
    >>> print(dumps(build("bitpipe", p=4, m=4)), end="")
    # hocket 1
    name bitpipe
    path 0: 0 1 2 3 3 2 1 0 | 0,2
    path 1: 3 2 1 0 0 1 2 3 | 1,3
    0: 0F0 0F2 3F1 4F1 3F3 4F3 7F0 7B0 7F2 7B2 4B1 3B1 4B3 3B3 0B0 0B2
    1: 1F0 2F1 1F2 2F3 5F1 6F0 5F3 6F2 6B0 5B1 6B2 5B3 2B1 1B0 2B3 1B2
    2: 1F1 2F0 1F3 2F2 5F0 6F1 5F2 6F3 6B1 5B0 6B3 5B2 2B0 1B1 2B2 1B3
    3: 0F1 0F3 3F0 4F0 3F2 4F2 7F1 7B1 7F3 7B3 4B0 3B0 4B2 3B2 0B1 0B3
    """
    down = vshape(p, 1).paths[0]
    placement = Placement((down, down[p:] + down[:p]), tuple(mb % 2 for mb in range(m)))
    return joined(all_actions("bitpipe", placement, FULL))
