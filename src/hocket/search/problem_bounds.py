"""What no order of a problem can beat, with the argument: work, chains and memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from hocket.deps import BACKWARDS
from hocket.ir import Array, Kind
from hocket.search.bounds import Bound, shared_bound
from hocket.search.problem import Problem


def best_bound(problem: Problem, objective: str) -> Bound:
    """The highest lower bound of the objective over all orders of a problem, in costs' units.

    Full backwards among I and W, and slots of a forward and a backward, count where the problem
    has them.
    """
    if problem.fused:
        found = _fused_bounds(problem, objective)
    else:
        found = [*_bounds(problem.relaxed, objective), *_mixed_bounds(problem, objective)]
    ticks, argument = max(found, key=lambda pair: pair[0])
    if problem.ticks.exact:
        ticks = math.ceil(ticks - 1e-6)
    return Bound(problem.ticks.value(ticks), argument)


def is_crowded(problem: Problem) -> bool:
    """True where the ranks share fewer cores than they are."""
    return problem.costs.shares_cores(problem.placement.p)


def crowded_bound(problem: Problem, objective: str) -> Bound | None:
    """What the work of all ranks takes on the cores that they share; None where nothing does.

    Ranks may be apart in time, so it is no bound of a span.
    """
    if not is_crowded(problem) or objective == "span" or problem.costs.cores is None:
        return None
    if problem.fused:
        queues = range(len(problem.queues) - 1)
        forwards = [np.flatnonzero((problem.queue_of == q) & (problem.side == 0)) for q in queues]
        work = sum(_least_work(problem, f, weights=True)[0] for f in forwards if len(f))
    else:
        work = problem.relaxed.work.sum()
    return shared_bound(problem.ticks.value(work), problem.costs.cores)


def _bounds(problem: Problem, objective: str) -> Iterator[tuple[float, str]]:
    ways = lags(problem)
    if objective == "makespan":
        chain = problem.head + problem.dur + problem.tail
        yield float(chain.max()), "one microbatch alone takes that long there and back"
        heads = problem.head
        for queue in range(len(problem.queues) - 1):
            yield from _queue_bounds(
                problem, queue, heads, problem.tail, "from the start to the end"
            )
            yield from _memory_bounds(problem, queue, ways, ends=True)
        return
    for queue in range(len(problem.queues) - 1):
        mine = np.flatnonzero(problem.queue_of == queue)
        before = ways[mine].max(axis=0)
        after = (ways[:, mine] + problem.dur[mine]).max(axis=1) - problem.dur
        for other in range(len(problem.queues) - 1):
            here = other == queue
            heads = np.maximum(before, 0.0) if here else before
            tails = np.maximum(after, 0.0) if here else after
            name = problem.placement.queues[queue]
            yield from _queue_bounds(problem, other, heads, tails, f"from {name} and back to it")
        yield from _memory_bounds(problem, queue, ways, ends=False)


def lags(problem: Problem) -> Array:
    """The longest way from the start of each type to the start of another, -inf: none."""
    n = problem.n_types
    ways = np.full((n, n), -np.inf)
    np.fill_diagonal(ways, 0.0)
    for t in np.argsort(problem.head, kind="stable").tolist():
        for e in range(int(problem.needs[t])):
            u = int(problem.need[t, e])
            ways[:, t] = np.maximum(ways[:, t], ways[:, u] + problem.dur[u] + problem.delay[t, e])
    return ways


def _queue_bounds(
    problem: Problem, queue: int, heads: Array, tails: Array, where: str
) -> Iterator[tuple[float, str]]:
    """One queue: the shortest way to a set of its types, their work, the shortest way from them."""
    mine = np.flatnonzero(problem.queue_of == queue)
    mine = mine[np.isfinite(heads[mine]) & np.isfinite(tails[mine])]
    work = problem.dur * problem.counts
    name = problem.placement.queues[queue]
    for head, tail in product(sorted(set(heads[mine])), sorted(set(tails[mine]))):
        chosen = mine[(heads[mine] >= head) & (tails[mine] >= tail)]
        if not len(chosen):
            continue
        kinds = "".join(sorted({Kind(k).name for k in problem.kind[chosen]}))
        whole = len(chosen) == int((problem.queue_of == queue).sum())
        what = "all its work" if whole else f"its {kinds}"
        text = f"rank {name}: the shortest way to {what}, that work, and the way out, {where}"
        yield float(heads[chosen].min() + work[chosen].sum() + tails[chosen].min()), text


def _mixed_bounds(problem: Problem, objective: str) -> Iterator[tuple[float, str]]:
    """One queue, where a full backward delays its gradient and a split one is more work.

    Every forward runs before its own backward. So all forwards of the queue, and of each backward
    its I or the whole of it, end before the queue's last gradient does; that is one of a path's
    lowest stage there, and its way out leads over other queues. Whatever is chosen for each
    backward, no order ends before either of two sums: the way in, forwards, I and full backwards,
    and the way out; the way in and all work. The bound is the least, over all choices, of the
    larger sum. It holds as well for those actions alone that have a longer way in.
    """
    if not problem.mixes or objective != "makespan":
        return
    least, first_half = problem.relaxed, problem.first_half
    apart = problem.dur[first_half] + problem.dur[problem.second_half]
    soon, work = (np.minimum(problem.full, x) for x in (problem.dur[first_half], apart))
    later, more = problem.full - soon, apart - work  # of a full backward; of a split one
    for q, queue in enumerate(problem.placement.queues):
        forwards = np.flatnonzero((problem.queue_of == q) & (problem.side == 0))
        mine = first_half[problem.queue_of[first_half] == q]
        lowest = {problem.path[i]: i for i in sorted(mine, key=lambda i: -problem.stage[i])}
        out = min((_way_out(least, i) for i in lowest.values()), default=0.0)
        text = f"rank {queue}: full backwards delay its last gradient, split ones are more work"
        for head in sorted(set(least.head[[*forwards, *mine]])):
            early = forwards[least.head[forwards] >= head]
            begun = head + float((problem.dur * problem.counts)[early].sum())
            own = np.flatnonzero(np.isin(first_half, mine) & (least.head[first_half] >= head))
            counts = problem.counts[first_half[own]]
            choices: Counter[tuple[float, float]] = Counter()
            for k, n in zip(own.tolist(), counts.tolist(), strict=True):
                choices[float(later[k]), float(more[k])] += n
            sums = begun + float(soon[own] @ counts) + out, begun + float(work[own] @ counts)
            yield _least_of_larger(*sums, choices), text


def _way_out(least: Problem, i: int) -> float:
    """The shortest time from the end of a queue's last gradient to the end of all."""
    ways = [
        delay + least.dur[b] + least.tail[b]
        for a, b, delay in least.arcs
        if a == i and least.queue_of[b] != least.queue_of[i]
    ]
    return float(max(ways, default=0.0))


def _least_of_larger(first: float, second: float, choices: Counter[tuple[float, float]]) -> float:
    """The larger of two sums, where each of some choices adds to one of them, as low as can be.

    choices: how often one may choose between this much on the first and that much on the second.
    Shares of a choice are allowed where the choices differ, so no real one is lower.
    """
    first += sum(n * a for (a, _), n in choices.items())
    for (a, b), n in sorted(choices.items(), key=lambda x: x[0][1] / (x[0][0] or math.inf)):
        turned = min(float(n), max(0.0, (first - second) / (a + b))) if a else 0.0
        if len(choices) == 1:
            near = {math.floor(turned), math.ceil(turned)}
            return min(max(first - x * a, second + x * b) for x in near)
        first, second = first - turned * a, second + turned * b
    return max(first, second)


def _memory_bounds(
    problem: Problem, queue: int, lags: Array, *, ends: bool
) -> Iterator[tuple[float, str]]:
    """What the memory limit of one queue costs; `ends`: with the way in and out."""
    cap = float(problem.limit[queue])
    mine = np.flatnonzero(problem.queue_of == queue)
    if not math.isfinite(cap) or not len(mine):
        return
    outside = float(problem.head[mine].min() + problem.tail[mine].min()) if ends else 0.0
    name = problem.placement.queues[queue]
    area = sum(_area(problem, int(t), lags) for t in mine if problem.kind[t] == Kind.F)
    if area and cap > 0:
        text = f"rank {name}: memory x time that the microbatches hold, under the limit"
        yield outside + area / cap, text
    idle = _warm_up(problem, mine, lags, cap) + _drain(problem, mine, lags, cap)
    work = float((problem.dur * problem.counts)[mine].sum())
    text = f"rank {name}: its work, and the wait for the first and last gradient with memory full"
    yield outside + work + idle, text


def _back(problem: Problem, forward: int) -> tuple[int, int | None]:
    """The backward of a forward, and its W if the backward is split."""
    same = (problem.path == problem.path[forward]) & (problem.stage == problem.stage[forward])
    back = np.flatnonzero(same & np.isin(problem.kind, BACKWARDS))[0]
    later = np.flatnonzero(same & (problem.kind == Kind.W))
    return int(back), int(later[0]) if len(later) else None


def _area(problem: Problem, forward: int, lags: Array) -> float:
    """The least memory x time of all microbatches of a stage."""
    back, later = _back(problem, forward)
    dur, take, free = problem.dur, problem.take, problem.free
    area = take[forward] * (lags[forward, back] + dur[back]) + take[back] * dur[back]
    if later is not None:
        area += max(0.0, take[forward] + take[back] - free[back]) * dur[later]
    return float(area * problem.counts[forward])


def _warm_up(problem: Problem, mine: Array, lags: Array, cap: float) -> float:
    """Idle time before a queue's first backward: only so many forwards fit."""
    forwards = mine[problem.kind[mine] == Kind.F]
    backs = mine[np.isin(problem.kind[mine], BACKWARDS)]
    if not len(forwards) or (problem.take[forwards] <= 0).any():
        return 0.0
    wait = min(max(lags[f, b] for f in forwards) for b in backs)
    rate = (problem.dur[forwards] / problem.take[forwards]).max()
    if len(set(problem.take[forwards])) == len(set(problem.dur[forwards])) == 1:
        fits = math.floor(cap / problem.take[forwards[0]] + 1e-9) * problem.dur[forwards[0]]
    else:
        fits = cap * rate
    total = float((problem.dur * problem.counts)[forwards].sum())
    return max(0.0, float(wait) - min(fits, total))


def _drain(problem: Problem, mine: Array, lags: Array, cap: float) -> float:
    """Idle time between a queue's last forward and its backward, for queues of one stage."""
    forwards = mine[problem.kind[mine] == Kind.F]
    if len(forwards) != 1 or problem.take[forwards[0]] <= 0:
        return 0.0
    f = int(forwards[0])
    back, later = _back(problem, f)
    fits = math.floor(cap / problem.take[f] + 1e-9)
    if later is not None and problem.free[back] > 0:
        # Each microbatch that has only a W left holds less: bound by memory, not by number.
        held = problem.take[f] + problem.take[back] - problem.free[back]
        room = cap - problem.take[f]
        per = (problem.dur[back] + problem.dur[later]) / problem.take[f]
        if held > 0:
            per = max(per, problem.dur[later] / held)
        else:
            return 0.0
        work = room * per
    else:
        others = problem.dur[back] + (problem.dur[later] if later is not None else 0.0)
        work = (fits - 1) * others
    if fits >= problem.counts[f]:
        return 0.0  # the first backward may come after the last forward: the two waits overlap
    return max(0.0, float(lags[f, back] - problem.dur[f]) - work)


# --- slots of a forward and a backward ------------------------------------------------------------


def _fused_bounds(problem: Problem, objective: str) -> Iterator[tuple[float, str]]:
    """Bounds of orders with slots of a forward and a backward; memory is not looked at.

    A queue's first slot holds no backward and its last no forward, so one of each has a slot of
    its own.
    """
    ways, span = replace(problem, dur=_shortest_slots(problem)), objective != "makespan"
    if not span:
        chain = ways.head + ways.dur + ways.tail
        yield float(chain.max()), "one microbatch alone takes that long there and back"
    lag = lags(ways) if span else np.zeros((0, 0))
    for q, queue in enumerate(problem.placement.queues):
        mine = problem.queue_of == q
        forwards, backs = (np.flatnonzero(mine & (problem.side == x)) for x in (0, 1))
        if not len(forwards):
            continue
        head = first = tail = 0.0
        if span:
            first = float(lag[np.ix_(forwards, backs)].max(axis=0).min())
        else:
            head, first = float(ways.head[mine].min()), float(ways.head[backs].min())
            tail = float(ways.tail[backs].min())
        for weights, out in ((True, 0.0), (False, tail)):
            work, back = _least_work(problem, forwards, weights=weights)
            text = f"rank {queue}: its work, with as many fused forward-backward slots as possible"
            yield head + work + out, text
            text = f"rank {queue}: the wait for its first gradient, and its backwards"
            yield first + back + out, text


def _shortest_slots(problem: Problem) -> Array:
    """The shortest slot that each forward and backward may be in; 0 for the W."""
    slots = np.minimum(*problem.joint)
    dur = np.minimum(problem.dur, np.minimum(slots.min(axis=0), slots.min(axis=1)))
    return np.where(problem.side == 2, 0.0, dur)


def _least_work(problem: Problem, forwards: Array, *, weights: bool) -> tuple[float, float]:
    """The least work of a queue, and of its slots with a backward; `weights`: with its W."""
    p, count = problem, problem.counts[forwards].astype(float)
    pair, trio = p.joint
    kind = Kind.I if len(p.first_half) else Kind.B
    backs = p.by_place[p.path[forwards], kind, p.stage[forwards]]
    alone, both = p.dur[backs], pair[np.ix_(forwards, backs)]
    if kind == Kind.I:
        later = p.by_place[p.path[forwards], Kind.W, p.stage[forwards]]
        more = weights * p.dur[later]
        alone = np.minimum(alone + more, pair[backs, later])
        both = np.minimum(both + more, trio[np.ix_(forwards, backs)])
    saved = np.maximum(0.0, p.dur[forwards][:, None] + alone[None, :] - both)
    most = min(float(best @ count - best.min()) for best in (saved.max(axis=1), saved.max(axis=0)))
    back = np.minimum(alone, both.min(axis=0))
    return float(count @ (p.dur[forwards] + alone)) - most, float(count @ back)


__all__ = ["Bound", "best_bound", "crowded_bound", "is_crowded", "lags"]
