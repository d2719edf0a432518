"""Chimera: copies of the model run in opposite directions through the same ranks."""

from __future__ import annotations

from itertools import product

import numpy as np

from hocket.costs import Costs
from hocket.ir import Array, Kind, Schedule, kinds_of, mbs_of, mirrored, stages_of
from hocket.policy import all_actions, list_schedule, ranked
from hocket.schedules.registry import register
from hocket.simulator import simulate

_EVEN, _ROUGH = Costs(), Costs(F=10, I=12, W=7, latency=3)
_PACES = (_EVEN, Costs(F=2, I=1, W=2))


@register(
    "chimera",
    source="Li and Hoefler, Chimera, arXiv 2107.06925, sections 3.1 and 3.6",
    rules=(
        ("pipes even, 2 or more", lambda pipes: pipes >= 2 and pipes % 2 == 0),
        ("pipes dividing p", lambda p, pipes: pipes < 1 or p % pipes == 0),
        ("m >= pipes", lambda m, pipes: m >= pipes),
        (
            "limit >= pipes",
            lambda pipes, limit: limit is None or limit >= pipes,
        ),
    ),
    weights="one copy a pipe",
    use="Few microbatches (m near p) and weights that fit twice; not for large m.",
)
def chimera(p: int, m: int, *, pipes: int = 2, limit: int | None = None) -> Schedule:
    """1F1B in `pipes` directions at once: half the bubble of 1F1B with two copies of the weights.

    limit: microbatches in flight per rank; left out, p (the paper's fullest rank), and for more
    than 2p microbatches p // (4 pipes) more, which hide latency in deep pipelines. For m <= p
    this is the paper's basic unit; beyond, the paper joins units end to end (makespan
    (m/p)(3p/2 + ...)), while here the order is the best of a few greedy ones, which lets the
    next unit start inside the last one's bubble: 52 against 58 for p=4 m=16, F=1 B=2. Weights
    and their gradients are held `pipes` times.

    >>> from hocket import build, dumps
    >>> print(dumps(build("chimera", p=4, m=4)), end="")
    # hocket 1
    name chimera
    path 0: 0 1 2 3 | 0,2
    path 1: 3 2 1 0 | 1,3
    0: 0F0 0F2 3F1 3B1 3F3 3B3 0B0 0B2
    1: 1F0 2F1 1F2 2F3 2B1 1B0 2B3 1B2
    2: 1F1 2F0 1F3 2F2 2B0 1B1 2B2 1B3
    3: 0F1 0F3 3F0 3B0 3F2 3B2 0B1 0B3
    """
    placement = mirrored(p, [mb % pipes for mb in range(m)], pipes)
    work = all_actions("chimera", placement, (Kind.F, Kind.B))
    if limit is None:
        limit = p + (p // (4 * pipes) if m > 2 * p else 0)
    orders = [
        list_schedule(work, costs, prefer=prefer, limit=limit)
        for prefer, costs in product(_preferences(work), _PACES)
    ]
    return min(orders, key=lambda s: (simulate(s, _EVEN).makespan, simulate(s, _ROUGH).makespan))


def _preferences(work: Schedule) -> list[Array]:
    """Ways to rank actions: backwards first and deepest forward, or forwards first and oldest."""
    forward = kinds_of(work.codes) == Kind.F
    stages, mbs = stages_of(work.codes), mbs_of(work.codes)
    return [
        ranked(forward, np.where(forward, -stages, stages), mbs),
        ranked(~forward, mbs, stages),
    ]
