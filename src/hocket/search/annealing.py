"""One order made better by single moves, each timed by what it changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hocket.costs import Costs
from hocket.ir import Array, Schedule
from hocket.search.incremental import Incremental

_MOVES, _OVERHEAD = 1000, 32  # moves drawn at a time; what a move costs besides what it looks at
_OFTEN = 400  # moves an action gets where worse orders are worth going through


def annealed(
    schedule: Schedule, costs: Costs, limits: Sequence[float], *, held: float, metric: str,
    effort: float, random: np.random.RandomState,
) -> Schedule:  # fmt: skip
    """The best order met while actions move a few places on their queue.

    A move that makes the order worse is kept the more rarely the worse it is and the later it
    comes. limits: stages in flight, one for each queue. effort: actions to look at.

    Source: simulated annealing, Kirkpatrick et al., Science 220, 1983.
    """
    state = Incremental(schedule, costs, limit=limits, held=held)
    best, least = schedule, _value(state, metric)
    lengths = np.diff(schedule.starts)
    heat = _heat(least, lengths, effort)
    spent, now = 0.0, least
    while spent < effort:
        warmth = heat * (1 - spent / effort)
        for queue, at, to, luck in _draw(lengths, random):
            if state.move(queue, at, to):
                new = _value(state, metric)
                if new > now and new - now > warmth * luck:
                    state.undo()
                else:
                    now = new
            spent += state.looked_at + _OVERHEAD
        if now < least:
            best, least = state.schedule(), now
    return best


def _value(state: Incremental, metric: str) -> float:
    return state.ticks if metric == "makespan" else state.span_ticks


def _heat(whole: float, lengths: Array, effort: float) -> float:
    """How much worse an order may be at first: a share of an action's time.

    Less where the effort is small for the size: then only moves that do no harm are kept.
    """
    n = lengths.sum()
    often = effort / (n / 5 + _OVERHEAD) / n
    return 0.07 * whole / lengths.max() * min(often / _OFTEN, 1) ** 2


def _draw(lengths: Array, random: np.random.RandomState) -> list[tuple[int, int, int, float]]:
    """Moves `(queue, from, to)`, and how much worse than the warmth each may be."""
    queue = random.randint(len(lengths), size=_MOVES)
    last = lengths[queue] - 1
    at = np.minimum((random.rand(_MOVES) * lengths[queue]).astype(int), last)
    by = random.choice([1, 1, 1, 2, 3], _MOVES) * random.choice([-1, 1], _MOVES)
    to = np.clip(at + by, 0, last)
    luck = -np.log(random.rand(_MOVES))
    return list(zip(queue.tolist(), at.tolist(), to.tolist(), luck.tolist(), strict=True))
