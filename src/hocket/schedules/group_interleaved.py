"""Group-interleaved 1F1B: interleaving with a short warm-up, for less memory."""

from __future__ import annotations

from math import gcd

import numpy as np

from hocket.ir import Array, Kind, Schedule, encode, looped
from hocket.lower.recomputation import recompute as with_r
from hocket.pattern import Pattern, lay
from hocket.schedules.registry import register

RULES = (("a group of 1 to p", lambda p, group: group is None or 1 <= group <= p),)


@register(
    "group-interleaved",
    source="Wan et al., PipeOffload, arXiv 2503.01328, section 4 (GIS)",
    rules=(*RULES, ("recompute of 0 to v", lambda v, recompute: 0 <= recompute <= v)),
    use="Interleaving under a tight memory limit, with split backwards.",
)
def group_interleaved(
    p: int, m: int, *, v: int = 2, group: int | None = None, recompute: int = 0
) -> Schedule:
    """Interleaved with split backwards and only as much warm-up as its dependencies need.

    A rank runs a group of microbatches through one stage, then through the next; from the first
    I on it takes one F, one I and its W in turn. A group of ceil(p/2), taken when left out,
    holds half of what interleaved does; a group of p is a little faster. Smaller groups wait as
    long as one of ceil(p/2) would. recompute: of each rank, how many of the first stages keep only
    their input, and run R ahead of I.

    >>> from hocket import build, dumps
    >>> print(dumps(build("group-interleaved", p=4, m=2, v=2)), end="")
    # hocket 1
    name group-interleaved
    path 0: 0 1 2 3 0 1 2 3
    0: 0F0 0F1 4F0 4F1 4I0 4W0 4I1 4W1 0I0 0W0 0I1 0W1
    1: 1F0 1F1 5F0 5F1 5I0 5W0 5I1 5W1 1I0 1W0 1I1 1W1
    2: 2F0 2F1 6F0 6F1 6I0 6W0 6I1 6W1 2I0 2W0 2I1 2W1
    3: 3F0 3F1 7F0 7I0 7W0 7F1 7I1 7W1 3I0 3W0 3I1 3W1
    """
    size = (p + 1) // 2 if group is None else group
    line = _by_place(np.arange(p)[:, None], p, m, v, size)
    schedule = Schedule.from_lines("group-interleaved", looped(p, m, v), line)
    return with_r(schedule, range(recompute * p), ahead=True) if recompute else schedule


def _by_place(r: Array, p: int, m: int, v: int, size: int) -> Pattern:
    """All actions of ranks `[rank, 1]` by their place in the repeated block of 3 size v places.

    Forwards of a turn take every third place; the first backward starts when the last stage's
    gradient has come back over 2 places per rank. A turn starts `wait` groups after the one before;
    where it would meet the places of an earlier turn, one more.
    """
    turn, mb = (x.ravel() for x in np.meshgrid(np.arange(v), np.arange(m), indexing="ij"))
    wait = -((p + 1) // 2 // -size)
    begin = 3 * size * (wait * turn + turn * gcd(v, wait) // v)
    place = begin + 3 * (mb % size) + 3 * size * v * (mb // size) + r
    back = place + begin[-1] + 3 * (p - 1 - r) + 1
    last = (v - 1 - turn) * p + r
    codes = [
        encode(int(Kind.F), turn * p + r, mb),
        encode(int(Kind.I), last, mb),
        encode(int(Kind.W), last, mb),
    ]
    order = np.argsort(np.concatenate([place, back, back + 1], axis=1), kind="stable")
    return lay(np.take_along_axis(np.concatenate(codes, axis=1), order, axis=1))
