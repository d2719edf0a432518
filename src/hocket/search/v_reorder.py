"""The paper's own way from a building block to an order: repeat, reorder, squeeze.

Everything on a grid of unit times (F = I = W = 1). What waits for
what on the grid, and from when to when a rank holds a stage, comes from the tables of deps.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, permutations, product
from typing import NamedTuple

import numpy as np

from hocket.deps import ENDS, FULL, SPLIT, STARTS
from hocket.graph import edges
from hocket.ir import Array, Kind, Schedule, encode, kinds_of, mbs_of, stages_of, vshape
from hocket.pattern import lay
from hocket.search.problem import all_actions

_ROOM = 1 << 22  # numbers that are worked on at once
_PERIOD, _W = 6, 4  # units from one block to the next; the fifth row of a rank are its W


class Block(NamedTuple):
    """A building block: steps `[leg][link]` from rank to rank, and from each leg to the next.

    Legs: forwards down and up the ranks, backwards down and up; link k joins ranks k and k + 1.
    """

    steps: tuple[tuple[int, ...], ...]
    turns: tuple[int, ...]


def even(p: int, steps: tuple[int, ...], turns: tuple[int, ...]) -> Block:
    """A block whose steps are the same between all ranks."""
    return Block(tuple((step,) * (p - 1) for step in steps), turns)


def half_block(p: int) -> Block:
    """V-Half: half the memory of 1F1B."""
    return even(p, (2, 1, 2, 1), (1, 1 if p % 2 else 4, 2))


def min_block(p: int) -> Block:
    """V-Min: nothing waits between ranks. For p = 3k + 2 the loss waits longer than in the paper.

    With 5 instead of 1 the block still fits the memory, and reordering saves 4 units of bubble.
    """
    return even(p, (1, 1, 1, 1), (1, (3, 1, 5)[p % 3], 1))


def whole_block(p: int) -> Block:
    """V-1F1B: full backwards (2 units), which wait 3 units at every third rank."""
    steps = [5 if (i - p - 1) % 3 == 0 else 2 for i in range(2 * p - 1)]
    ones, down, up = (1,) * (p - 1), tuple(steps[: p - 1]), tuple(steps[:-p:-1])
    return Block((ones, ones, down, up), (1, 1 if p % 3 else 4, steps[p - 1]))


def blocks_holding(p: int, holding: int) -> list[Block]:
    """Blocks in a steady state of which the fullest rank holds that many stages.

    Two slopes: up the ranks each step takes 1; down, backwards as forwards, the first ones take
    one time and the rest another. For one stage more than V-Min, p = 3k + 1, only the first step
    down and the last up are long.

    Source: the paper's appendix A; that last block, and which times are tried, is ours.
    """
    ones = (1,) * (p - 1)
    slopes = {
        (near,) * n + (far,) * (p - 1 - n)
        for near, far in permutations((1, 2, 3, 5), 2)
        for n in range(p)
    }
    turns = list(product((1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 3)))
    some = [Block((x, ones, x, ones), t) for x in sorted(slopes) for t in turns]
    some.append(Block(((4, *ones)[: p - 1], ones, ones, (3, *ones)[: p - 1]), (1, 1, 1)))
    at_once = max(1, _ROOM // (24 * p))
    held = np.concatenate([_held(p, some[i : i + at_once]) for i in range(0, len(some), at_once)])
    return [some[k] for k in np.flatnonzero(held == holding).tolist()]


def _held(p: int, blocks: list[Block]) -> Array:
    """The most stages that a rank holds in each block's steady state; 0 where actions meet.

    In closed form, for many blocks at once: a stage is held from its F to its W. It only says
    which blocks are worth trying; the grid and the search keep to the limit.
    """
    n, at = len(blocks), np.arange(_PERIOD)
    steps = np.array([b.steps for b in blocks], dtype=np.int64).reshape(n, 4, p - 1)
    when = np.concatenate([np.zeros((n, 4, 1), dtype=int), np.cumsum(steps, axis=2)], axis=2)
    whole = when[:, :, -1:].copy()
    when[:, 1::2] = (whole - when)[:, 1::2]
    when[:, 1:] += np.cumsum(np.array([b.turns for b in blocks]) + whole[:, :-1, 0], axis=1)[
        ..., None
    ]
    runs = (when % _PERIOD)[..., None] == at  # `[block, leg, rank, unit]`
    begun = (at - when[..., None]) // _PERIOD
    free, backward = ~runs.any(axis=1), runs[:, 2:].any(axis=1)
    waiting, before = np.zeros(free.shape[:2], dtype=int), np.zeros(free.shape, dtype=int)
    for unit in np.tile(at, 2):  # twice: W that wait from one period to the next
        before[..., unit] = waiting
        waiting += backward[..., unit] - (free[..., unit] & (waiting > 0)).astype(int)
    held = begun[:, :2].sum(axis=1) - begun[:, 2:].sum(axis=1) + before + backward
    apart = (runs.sum(axis=1) <= 1).all(axis=(1, 2))
    return np.where(apart, held.max(axis=(1, 2)), 0)


def reordered(
    name: str, p: int, m: int, block: Block, limit: int, *, split: bool = True, close: bool = False
) -> Schedule | None:
    """The order that a building block of a V gives, two stages and 6 units of work a rank.

    Before the first and after the last backward of the steady state, actions move up to the
    first free time at which they are ready and the rank has room for them. None where the block
    puts two actions of a rank at one time. Without `split` backwards are whole, of 2 units.
    close: the last backwards go where the last microbatch's are met, before they move up.
    """
    grid = _Grid(p, m, block, split)
    if not grid.interlocks:
        return None
    if not split:
        grid.move_up(limit, warm_up=True)
        return grid.schedule(name)
    grid.fill()
    grid.move_up(limit, warm_up=True)
    grid.squeeze()
    grid.drop()
    if close and not grid.close(limit):
        return None
    grid.move_up(limit, warm_up=False)
    grid.fill()
    return grid.schedule(name)


@lru_cache(maxsize=64)
def _needs(p: int, split: bool) -> list[list[list[tuple[int, int]]]]:
    """The (rank, leg) that each leg of each rank waits for, `[rank][leg]`; all W are one leg."""
    work = all_actions("one", vshape(p, 1), SPLIT if split else FULL)
    kinds, back = kinds_of(work.codes), stages_of(work.codes) >= p
    legs = np.where(kinds == Kind.F, back, np.where(kinds == Kind.W, _W, 3 - back))
    rows = list(zip(work.queue_of_slot.tolist(), legs.tolist(), strict=True))
    out: list[list[list[tuple[int, int]]]] = [[[] for _ in range(_W + 1)] for _ in range(p)]
    for source, target in zip(*(x.tolist() for x in edges(work)), strict=True):
        rank, leg = rows[target]
        out[rank][leg].append(rows[source])
    return out


class _Grid:
    """Times of all actions: `time[rank][leg][mb]`, legs being both forwards, then backwards.

    A fifth leg are the W of both stages, by time; the i-th belongs to the i-th backward.
    """

    def __init__(self, p: int, m: int, block: Block, split: bool) -> None:
        self.p, self.m, self.split = p, m, split
        backward = Kind.I if split else Kind.B
        self.kinds = (Kind.F, Kind.F, backward, backward, *([Kind.W] if split else []))
        self.long = [2 if kind == Kind.B else 1 for kind in self.kinds]
        self.starts = [leg for leg, kind in enumerate(self.kinds) if kind in STARTS]
        self.ends = [leg for leg, kind in enumerate(self.kinds) if kind in ENDS]
        self.needs = _needs(p, split)
        start, legs = 0, []
        for leg, (steps, turn) in enumerate(zip(block.steps, (*block.turns, 0), strict=True)):
            down = [sum(steps[:r]) for r in range(p)]
            legs.append([start + (sum(steps) - x if leg % 2 else x) for x in down])
            start += sum(steps) + turn
        self.time: list[list[list[int]]] = [
            [[leg[r] + _PERIOD * mb for mb in range(m)] for leg in legs] + [[]] for r in range(p)
        ]

    @property
    def interlocks(self) -> bool:
        """True when no two actions of a rank stand at the same time."""
        times = [
            [t + k for leg, row in enumerate(rows) for t in row for k in range(self.long[leg])]
            for rows in self.time
        ]
        return all(len(set(t)) == len(t) for t in times)

    def fill(self) -> None:
        """Puts every W into the first free time after what it needs."""
        for rank, rows in enumerate(self.time):
            rows[_W] = self._filled(rank)

    def _filled(self, rank: int) -> list[int]:
        """The times of all W of a rank, if they fill every free time."""
        rows = self.time[rank]
        taken = rows[0] + rows[1] + rows[2] + rows[3]
        size = max(taken) + 2 * self.m + 2
        needs = np.bincount(self._weights_need(rank), minlength=size)
        done = _weights_done(np.bincount(taken, minlength=size), needs)
        return np.searchsorted(done, np.arange(1, 2 * self.m + 1)).tolist()

    def _weights_need(self, rank: int) -> list[int]:
        """When what the W of a rank wait for runs, in order of time."""
        return sorted(chain.from_iterable(self.time[r][leg] for r, leg in self.needs[rank][_W]))

    def drop(self) -> None:
        """Takes the W away."""
        for rows in self.time:
            rows[_W] = []

    def sweep(self) -> Iterator[tuple[int, int, int, int]]:
        """Every (time, rank, leg, index), by time."""
        yield from sorted(
            (t, rank, leg, i)
            for rank, rows in enumerate(self.time)
            for leg, row in enumerate(rows)
            for i, t in enumerate(row)
        )

    def ready(self, rank: int, leg: int, i: int) -> int:
        """The first time after everything this action needs."""
        row, long = self.time[rank][leg], self.long
        after = [row[i - 1] + long[leg]] if i else [0]
        if leg == _W:
            after.append(self._weights_need(rank)[i] + 1)
        else:
            after += [self.time[r][other][i] + long[other] for r, other in self.needs[rank][leg]]
        return max(after)

    def move_up(self, limit: int, *, warm_up: bool) -> None:
        """Moves actions outside the steady state to the first time that is free."""
        first, last = self.time[0][3][0], self.time[0][0][-1]
        busy: list[set[int]] = [set() for _ in range(self.p)]
        flows = [_Flow(self, rank) for rank in range(self.p)]
        for t, rank, leg, i in list(self.sweep()):
            outside = (t < first and warm_up) or t > (last if warm_up else max(first, last))
            if outside or not self.split:
                self._move(rank, leg, i, busy[rank], flows[rank], limit)
            now = self.time[rank][leg][i]
            busy[rank].update(range(now, now + self.long[leg]))

    def _move(self, rank: int, leg: int, i: int, busy: set[int], flow: _Flow, limit: int) -> None:
        """Moves one action to the first free time that keeps to the limit, or leaves it."""
        row = self.time[rank][leg]
        for t in range(self.ready(rank, leg, i), row[i]):
            if busy.isdisjoint(range(t, t + self.long[leg])):
                flow.move(leg, row[i], t)
                if flow.peak() <= limit:
                    row[i] = t
                    return
                flow.move(leg, t, row[i])

    def squeeze(self) -> None:
        """Runs the order as early as it can."""
        clock = [0] * self.p
        for _, rank, leg, i in list(self.sweep()):
            now = clock[rank]  # a W follows what it needs on its own rank
            if leg != _W:
                now = max(now, self.ready(rank, leg, i))
            self.time[rank][leg][i] = now
            clock[rank] = now + self.long[leg]

    def close(self, limit: int) -> bool:
        """Puts the last backwards in turn, as if nothing else held up the last microbatch.

        After its last forward rank 0 starts the last way back, which then takes a unit a rank;
        before it come, one every second unit, as many more backwards of either leg as the rank
        holds. False where two actions of a rank would meet or change places.
        """
        last = self.time[0][1][-1]
        n_up = min((limit + 1) // 2, self.m)
        for rank, rows in enumerate(self.time):
            n_down = min(limit - n_up, self.m, rank + 1)
            rows[2][self.m - n_down :] = range(last + 3 + rank - 2 * n_down, last + 2 + rank, 2)
            end = last + 2 * self.p - rank
            rows[3][self.m - n_up :] = range(end + 2 - 2 * n_up, end + 1, 2)
            times = [t for row in rows for t in row]
            if len(set(times)) < len(times) or any(row != sorted(row) for row in rows):
                return False
        return True

    def schedule(self, name: str) -> Schedule:
        """The order of these times."""
        lines = []
        for rank, rows in enumerate(self.time):
            when = [np.array(row, dtype=np.int64) for row in rows]
            stages = [rank, 2 * self.p - 1 - rank, 2 * self.p - 1 - rank, rank]
            codes = [
                encode(int(kind), stage, np.arange(self.m))
                for kind, stage in zip(self.kinds[:_W], stages, strict=True)
            ]
            if len(when[_W]):  # the i-th W is that of the i-th backward
                by_time = np.argsort(np.concatenate(when[2:_W]), kind="stable")
                codes.append(np.concatenate(codes[2:])[by_time])
                codes[_W] = encode(int(Kind.W), stages_of(codes[_W]), mbs_of(codes[_W]))
                when[_W] = np.sort(when[_W])
            used = np.concatenate(when)
            lines.append(lay(np.concatenate(codes)[np.argsort(used, kind="stable")]))
        return Schedule.from_lines(name, vshape(self.p, self.m), lines)


class _Flow:
    """What a rank holds over time: forwards that start, stages that end, times that are taken.

    Where the W of a grid are taken away they fill every free time.
    """

    def __init__(self, grid: _Grid, rank: int) -> None:
        rows, self.long, self.legs = grid.time[rank], grid.long, (grid.starts, grid.ends)
        self.fills = grid.split and not rows[_W]
        self.size = max(map(max, filter(None, rows))) + 2 * grid.m + 4
        self.level = np.cumsum(self._count([t for leg in grid.starts for t in rows[leg]]))
        ended = [t + grid.long[leg] for leg in grid.ends for t in rows[leg]]
        self.level -= np.cumsum(self._count(ended))
        self.taken = self._count([t for row in rows[:_W] for t in row])
        self.backs = self._count([t for row in rows[2:_W] for t in row])

    def _count(self, times: list[int]) -> Array:
        return np.bincount(np.array(times, dtype=np.int64), minlength=self.size)

    def move(self, leg: int, old: int, new: int) -> None:
        """Moves one action of a leg."""
        starts, ends = self.legs
        for counts in [self.taken] + [self.backs] * (2 <= leg < _W):
            counts[old] -= 1
            counts[new] += 1
        sign, long = (1 if new < old else -1), self.long[leg]
        low, high = min(old, new), max(old, new)
        if leg in starts:
            self.level[low:high] += sign
        if leg in ends:
            self.level[low + long : high + long] -= sign

    def peak(self) -> int:
        """Most stages in flight."""
        if not self.fills:
            return int(self.level.max())
        done = _weights_done(self.taken, self.backs)
        return int(max(self.level[0], (self.level[1:] - done[:-1]).max()))


def _weights_done(taken: Array, backs: Array) -> Array:
    """W done by each time, where they fill every free time: as many as fit, and as there are."""
    free, open_ = np.cumsum(taken == 0), np.cumsum(backs)
    return free + np.minimum(np.minimum.accumulate(open_ - free), 0)
