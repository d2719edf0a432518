"""Chimera: copies of the model run in opposite directions through the same ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from hocket.costs import Costs
from hocket.deps import FULL
from hocket.ir import Array, Kind, Placement, Schedule, kinds_of, mbs_of, mirrored, stages_of
from hocket.pattern import lay
from hocket.schedules.registry import Formula, register
from hocket.search.problem import all_actions, problem
from hocket.simulator import simulate

_EVEN, _ROUGH = Costs(), Costs(F=10, I=12, W=7, latency=3)
_PACES = (_EVEN, Costs(F=2, I=1, W=2))
Rule = Callable[[Array, Array, Array], tuple[Array, ...]]
_FORWARDS = {"direct": 1, "doubling": 2, "halving": 2}  # microbatches of one forward slot


def _lost(p: int, m: int, pipes: int, concat: str, F: Any, B: Any) -> Any:
    """What the two ends of n units cost, and their n - 1 joints."""
    if concat in ("doubling", "halving"):
        ends, joint, n = max(F + B, 2 * F, 2 * B - 2 * F), max(F - B, B - 2 * F, 0), m // (2 * p)
    else:
        ends, joint, n = 2 * max(F, B), abs(F - B), m // p
    return (p // pipes - 1) * (ends + 2 * (n - 1) * joint)


@register(
    "chimera",
    source="Li and Hoefler, Chimera, arXiv 2107.06925, sections 3.1, 3.5 and 3.6, figure 7",
    rules=(
        ("pipes even, 2 or more", lambda pipes: pipes >= 2 and pipes % 2 == 0),
        ("pipes dividing p", lambda p, pipes: pipes < 1 or p % pipes == 0),
        ("m >= pipes", lambda m, pipes: m >= pipes),
        ("limit >= pipes", lambda pipes, limit: limit is None or limit >= pipes),
        (
            "concat as one of greedy, direct, doubling, halving",
            lambda concat: concat == "greedy" or concat in _FORWARDS,
        ),
        (
            "m a multiple of p for concat=direct, of 2p for doubling and halving",
            lambda p, m, concat: concat not in _FORWARDS or m % (_FORWARDS[concat] * p) == 0,
        ),
        (
            "no limit unless concat=greedy",
            lambda concat, limit: limit is None or concat not in _FORWARDS,
        ),
    ),
    weights="one copy a pipe",
    use="Few microbatches (m near p) and weights that fit twice; not for large m.",
    formula=Formula(
        "m(F + B) + (p/pipes - 1)(x + 2(n - 1)y); direct: n = m/p, x = 2 max(F, B), y = |F - B|; "
        "doubling, halving: n = m/2p, x = max(F + B, 2F, 2B - 2F), y = max(F - B, B - 2F, 0)",
        "no latency; a concat other than greedy, or m = p",
        lambda p, m, concat, limit, latency: (
            latency == 0 and (concat in _FORWARDS or (m == p and limit is None))
        ),
        lambda p, m, pipes, concat, F, B: m * (F + B) + _lost(p, m, pipes, concat, F, B),
    ),
)
def chimera(
    p: int, m: int, *, pipes: int = 2, limit: int | None = None, concat: str = "greedy"
) -> Schedule:
    """1F1B in `pipes` directions at once: half the bubble of 1F1B with two copies of the weights.

    The basic unit has p microbatches. `concat` says how more are run. `direct` joins units end to
    end, which loses (p/pipes - 1)(B - F) twice at every joint. `doubling` makes units of 2p: a
    forward slot runs two microbatches, a backward slot one of them, so that units join without
    a bubble for F <= B <= 2F, with 2p in flight. `halving` is the same order: a microbatch of
    it is half of one of direct's, so m counts halves, p whole ones are in flight, and backwards
    and messages are half as large, which may cost efficiency. The two forwards of a slot are two
    actions here, the first sent while the second runs. `greedy` is the unit for m = p, else the
    best of direct and a few greedy orders, which start a unit inside the last one's bubble: 52,
    against 58 direct and 51 doubling, for p=4 m=16, F=1 B=2. limit, for greedy: microbatches in
    flight per rank; left out, p (the paper's fullest rank), and for more than 2p microbatches
    p // (4 pipes) more, which hide latency in deep pipelines. Weights and their gradients are
    held `pipes` times.

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
    >>> print(dumps(build("chimera", p=4, m=8, concat="doubling")), end="")
    # hocket 1
    name chimera
    path 0: 0 1 2 3 | 0-1,4-5
    path 1: 3 2 1 0 | 2-3,6-7
    0: 0F0 0F1 0F4 0F5 3F2 3F3 3B2 3F6 3F7 3B3 0B0 3B6 0B1 3B7 0B4 0B5
    1: 1F0 1F1 2F2 2F3 1F4 1F5 2F6 2F7 2B2 1B0 2B3 1B1 2B6 1B4 2B7 1B5
    2: 1F2 1F3 2F0 2F1 1F6 1F7 2F4 2F5 2B0 1B2 2B1 1B3 2B4 1B6 2B5 1B7
    3: 0F2 0F3 0F6 0F7 3F0 3F1 3B0 3F4 3F5 3B1 0B2 3B4 0B3 3B5 0B6 0B7
    """
    forwards = _FORWARDS.get(concat, 1)
    work = _work(p, m, pipes, forwards)
    if concat in _FORWARDS or (m == p and limit is None):
        return joined(work, forwards)
    if limit is None:
        limit = p + (p // (4 * pipes) if m > 2 * p else 0)
    orders = [
        listed(work.name, work.placement, costs, rule, limit=limit)
        for rule, costs in product((deepest, oldest), _PACES)
    ]
    if m % p == 0 and limit >= p:
        orders.append(joined(work))
    return min(orders, key=lambda s: (simulate(s, _EVEN).makespan, simulate(s, _ROUGH).makespan))


def joined(work: Schedule, forwards: int = 1) -> Schedule:
    """Basic units end to end, `forwards` microbatches in each forward slot.

    `work`: all forwards and backwards of some pipes of S stages that cross every rank alike. In
    places as long as a backward, the forward slots of a pipe and unit stand at every other place
    from the stage's number on, its backward slots at every other place from 2S - 1 - stage on,
    after every p / pipes of them S places later. So the slots of all pipes of a rank fill a whole
    unit of (forwards + 1)S places, and the next unit begins that much later.
    """
    p, n_stages, pipes = work.p, work.placement.n_stages, len(work.placement.paths)
    stages, mbs = stages_of(work.codes), mbs_of(work.codes)
    unit, slot = mbs // forwards // p, mbs // forwards % p // pipes
    lap, back = np.divmod(forwards * slot + mbs % forwards, p // pipes)
    forward = stages + 2 * slot
    backward = 2 * n_stages - 1 - stages + 2 * back + n_stages * lap
    place = np.where(kinds_of(work.codes) == Kind.F, forward, backward)
    order = np.lexsort((mbs, place + (forwards + 1) * n_stages * unit, work.queue_of_slot))
    lines = np.split(work.codes[order], work.starts[1:-1])
    return Schedule.from_lines(work.name, work.placement, [lay(line) for line in lines])


def _work(p: int, m: int, pipes: int, forwards: int) -> Schedule:
    """All forwards and backwards, the pipes taking `forwards` microbatches in turn."""
    path_of = [mb // forwards % pipes for mb in range(m)]
    return all_actions("chimera", mirrored(p, path_of, pipes), FULL)


def listed(
    name: str, placement: Placement, costs: Costs, rule: Rule, *, limit: int | None = None
) -> Schedule:
    """The order where a free rank takes, of what can start soonest, what the rule puts first.

    rule: from kind, stage and microbatch of each action to sort keys, the first one decides.
    limit: microbatches in flight per rank, each on one stage.
    """
    from hocket.search.search import Arena  # for these schedules alone

    room = None if limit is None else [limit] * placement.p
    asked = problem(placement, costs, FULL, in_flight=room)
    types = asked.type_of
    order = Arena(asked).ranked(*rule(asked.kind[types], asked.stage[types], asked.mb_of))
    assert order is not None, "one microbatch of every path always fits"
    return asked.schedule(order, name)


def deepest(kind: Array, stage: Array, mb: Array) -> tuple[Array, ...]:
    """Backwards first, of forwards the deepest."""
    forward = kind == Kind.F
    return forward, np.where(forward, -stage, stage), mb


def oldest(kind: Array, stage: Array, mb: Array) -> tuple[Array, ...]:
    """Forwards first, of the first microbatch."""
    return kind != Kind.F, mb, stage
