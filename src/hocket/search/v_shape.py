"""The search behind the memory-controlled schedules: building blocks first, then single moves.

A building block says when one microbatch runs each of its actions; the same block, once a period
later for each microbatch, gives every queue its order (repetition), the time between the blocks
is squeezed out by running that order as early as it can, and weight gradients go into what waits
remain (reordering). Random numbers are numpy's frozen ones, always from the same seed: the same
question has the same answer.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, sections 3, 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hocket.costs import Costs
from hocket.deps import SPLIT
from hocket.ir import Array, Kind, Schedule, encode, kinds_of, mbs_of, stages_of, wave
from hocket.pattern import lay
from hocket.search.problem import problem
from hocket.search.trials import Outcome, Trials
from hocket.search.v_reorder import Block, blocks_holding, half_block, min_block, reordered

FITS = np.array([-1, 0, 0.25, 0.5, 0.75, 1])
_EVEN, _ROUGH = Costs(), Costs(F=10, I=12, W=7, B=19, latency=3)
_EFFORT = 2_500_000  # actions to time
_BATCH, _KEPT, _ALIKE, _BLOCKS = 240, 30, 4, 12
_STUCK = 1e300
_LARGE = 40_000  # actions from which on a known order that reaches the target is the answer


@dataclass(frozen=True)
class Question:
    """What to search: a wave of v stages per rank, a limit in stages in flight for every rank.

    metric: "makespan" or "span", what to make small first, for F = I = W. target: good enough to
    stop there; the makespan of the same orders under uneven costs is to be small second. starts:
    how often blocks are sought. known: orders to begin with.
    """

    name: str
    p: int
    m: int
    v: int
    limit: int
    metric: str
    target: int
    starts: int = 2
    known: tuple[Schedule, ...] = ()


def search(question: Question) -> Schedule:
    """The best order found; it keeps to the limit."""
    q, random = question, np.random.RandomState(20240524)
    short = _Shape(q, min(q.m, 2 * q.p + 2))
    shape = short if short.m == q.m else _Shape(q, q.m)
    begun = _Pool(shape, random, written=True)
    begun.add(shape.lines(q.known), None)
    if begun.reached and shape.asked.n > _LARGE:
        begun.keep()
        return begun.best()
    if q.v == 2:
        begun.add(_reordered(short, shape), None)
    begun.keep()
    if begun.reached:
        _polish(begun, _batches(shape, 0.05))
        return begun.best()
    numbers = np.concatenate([_evolve(short, random) for _ in range(q.starts)])
    pool = _Pool(shape, random, written=False)
    pool.add(shape.orders(numbers), shape.fit(numbers))
    pool.keep()
    _polish(pool, max(_batches(shape, 0.25), 1))
    begun.add(pool.whole(), None)
    begun.keep()
    _polish(begun, max(_batches(shape, 0.25), 1))
    return begun.best()


def _reordered(short: _Shape, shape: _Shape) -> Array:
    """Whole orders from building blocks, the paper's among them, reordered on a unit grid."""
    q = short.question
    limit = min(q.limit, 2 * q.p)
    paper = [half_block(q.p), min_block(q.p)]
    blocks, some = paper, blocks_holding(q.p, limit)
    if some:
        steps, turns = (np.array(x) for x in zip(*some, strict=True))
        numbers = _numbers(short, steps, turns)
        outcome = short.trials.run(short.orders(numbers), short.fit(numbers))
        blocks = paper + [some[k] for k in _best(_scores(short, outcome))[:_BLOCKS].tolist()]

    def orders(m: int, ways: list[tuple[Block, bool]]) -> list[Schedule | None]:
        return [reordered(q.name, q.p, m, b, limit, close=close) for b, close in ways]

    # the paper's blocks either way; the other ones are best with a close end
    ways = [(b, False) for b in paper] + [(b, True) for b in blocks]
    if short is not shape:
        found = orders(short.m, ways)
        ways = [way for way, s in zip(ways, found, strict=True) if s]
        outcome = short.trials.run(short.lines([s for s in found if s]))
        ways = [ways[k] for k in _best(_scores(short, outcome))[:4].tolist()]
    return shape.lines([s for s in orders(q.m, ways) if s])


# --- building blocks ------------------------------------------------------------------------


class _Shape:
    """How a row of numbers becomes an order: the layout, and the actions it places.

    A microbatch crosses the ranks in 2v legs: v of forwards, v of backwards, down and up in
    turn. A block is one row: time from rank to rank on each leg (`links`), from each leg to the
    next (`turns`), the period, the share of a W that a wait must hold, whether to fill the
    memory with forwards before the first backward (`pack`), and for the first and the last few
    microbatches how much closer they come on each leg (`ramps`, `reach`).
    """

    def __init__(self, question: Question, m: int) -> None:
        q = self.question = question
        self.p, self.m, self.legs = q.p, m, 2 * q.v
        placement, limit = wave(q.p, m, q.v), [q.limit] * q.p
        even, rough = (problem(placement, x, SPLIT, in_flight=limit) for x in (_EVEN, _ROUGH))
        self.asked, self.trials, self.other = even, Trials(even), Trials(rough)
        self._layout()
        kinds, stages, self.mb = even.kind[even.type_of], even.stage[even.type_of], even.mb_of
        down = stages // q.p
        self.leg = np.where(kinds == Kind.F, down, self.legs - 1 - down)
        # what moves together: the actions of a leg, or the W of a stage
        self.stream = np.where(kinds == Kind.W, self.legs + down, self.leg)
        self.rank = even.queue_of[even.type_of]
        self.codes = encode(kinds, stages, self.mb)
        in_turn = np.lexsort((stages, self.mb, kinds, self.rank))
        in_turn = in_turn[kinds[in_turn] != Kind.W]
        self.mine = in_turn.reshape(q.p, -1)

    def _layout(self) -> None:
        """Where each number stands in a row, and its least value, in units of F = I = W."""
        ends = np.cumsum([self.legs * (self.p - 1), self.legs - 1, 1, 1, 1, 2 * self.legs, 2])
        self.links, self.turns, self.period, self.share, self.pack, self.ramps, self.reach = (
            slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)
        )
        self.width = int(ends[-1])
        self.least = np.full(self.width, -np.inf)
        self.least[self.links] = self.least[self.turns] = 1
        self.least[self.period] = self.legs // 2 * 3
        self.least[self.share] = -1
        self.least[self.pack] = self.least[self.reach] = 0

    def lines(self, schedules: Sequence[Schedule]) -> Array:
        """The nodes of whole orders, `[order, queue, place]`."""
        asked, found = self.asked, np.zeros((len(schedules), self.asked.n), dtype=np.int64)
        for row, s in zip(found, schedules, strict=True):
            row[:] = asked.base[asked.by_place[0, kinds_of(s.codes), stages_of(s.codes)]]
            row += mbs_of(s.codes)
        return found.reshape(len(schedules), self.p, asked.n // self.p)

    def fit(self, numbers: Array) -> Array:
        """The share of a W that a wait must hold, `[block]`."""
        return numbers[:, self.share][:, 0]

    def offsets(self, numbers: Array) -> Array:
        """When the first microbatch runs on each leg and rank, `[block, leg, rank]`."""
        n = len(numbers)
        links = numbers[:, self.links].reshape(n, self.legs, self.p - 1)
        before = np.concatenate([np.zeros((n, self.legs, 1)), np.cumsum(links, axis=2)], axis=2)
        whole = before[:, :, -1:].copy()
        before[:, 1::2] = (whole - before)[:, 1::2]  # every second leg goes up the ranks
        turns = np.concatenate([np.zeros((n, 1)), numbers[:, self.turns]], axis=1)
        legs = np.concatenate([np.zeros((n, 1)), whole[:, :-1, 0]], axis=1)
        return before + np.cumsum(turns + legs, axis=1)[:, :, None]

    def orders(self, numbers: Array) -> Array:
        """The order of every queue, `[block, queue, place]`."""
        when = self.offsets(numbers)[:, self.leg, self.rank] + self.mb * numbers[:, self.period]
        first, last = numbers[:, self.reach].T[:, :, None]
        ramps = numbers[:, self.ramps].reshape(len(numbers), 2, self.legs)[:, :, self.leg]
        when += ramps[:, 0] * np.maximum(first - self.mb, 0)
        when += ramps[:, 1] * np.maximum(self.mb - (self.m - 1 - last), 0)
        in_turn = np.argsort(when[:, self.mine], axis=2, kind="stable")
        out = np.take_along_axis(self.mine[None], in_turn, axis=2)
        packed = np.flatnonzero(numbers[:, self.pack][:, 0] > 0.5)
        out[packed] = self._packed(out[packed])
        return out

    def _packed(self, orders: Array) -> Array:
        """The orders with as many forwards before the first backward as the limit allows.

        More forwards of the first stage come in; what follows is taken as it arrives.
        """
        leg, mb, half = self.leg[orders], self.mb[orders], self.legs // 2
        begun = np.maximum.accumulate(leg >= half, axis=2)
        others = (~begun & (leg > 0)).sum(axis=2)
        firsts = self.question.limit - others
        early = (~begun & (leg > 0)) | ((leg == 0) & (mb < firsts[:, :, None]))
        rank = np.arange(self.p)[None, :, None]
        arrives = leg * self.p + np.where(leg % 2, self.p - 1 - rank, rank) + (1 + leg) * mb
        key = np.where(early, arrives - 2.0 * self.trials.n, np.arange(orders.shape[2]))
        return np.take_along_axis(orders, np.argsort(key, axis=2, kind="stable"), axis=2)


def _seeds(shape: _Shape, random: np.random.RandomState, n: int) -> Array:
    """Blocks to begin with: serial ones, even ones, and those whose periods interlock."""
    q, legs, links = shape.question, shape.legs, shape.p - 1
    few = np.tile(np.where(np.isfinite(shape.least), shape.least, 0), (q.p * q.v + 1, 1))
    chain = few[0, shape.links].sum() + few[0, shape.turns].sum() + legs + 1
    few[:, shape.period] = chain / (1 + np.arange(len(few)))[:, None]
    even = np.tile(few[0], (n // 2, 1))
    even[:, shape.period] = shape.least[shape.period] * random.uniform(1, 1.3, (len(even), 1))
    extra = random.exponential(size=(len(even), legs))
    # every second one as long as the memory allows: limit times the period is held on a rank
    long = random.uniform(0.6, 1.2, (len(even), 1)) * q.limit * even[:, shape.period]
    room = np.maximum(long - few[0, shape.links].sum(), 0) / max(links, 1)
    extra[::2] = (extra * room / extra.sum(axis=1, keepdims=True))[::2]
    even[:, shape.links] += np.repeat(extra, links, axis=1)
    even[:, shape.turns] += random.exponential(size=(len(even), legs - 1))
    steps, turns = _interlocking(shape, random, 16 * n)
    steps, turns = steps[: n // 2], turns[: n // 2]
    for block in (half_block(q.p), min_block(q.p)) if q.v == 2 else ():
        steps = np.concatenate([np.tile(block.steps, (10, 1, 1)), steps])
        turns = np.concatenate([np.tile(block.turns, (10, 1)), turns])
    exact = _numbers(shape, steps, turns)
    exact[:, shape.share] = random.choice([-1, 1], (len(exact), 1))
    even[:, shape.share] = random.choice(FITS, (len(even), 1))
    bent = [np.concatenate([exact, even]) for _ in range(2)]
    for numbers in bent:
        _bend(shape, numbers, random)
        numbers[:, shape.pack] = random.randint(2, size=(len(numbers), 1))
    return np.concatenate([few, exact, even, *bent])


def _numbers(shape: _Shape, steps: Array, turns: Array) -> Array:
    """The rows of blocks given in units of F = I = W."""
    least = np.where(np.isfinite(shape.least), shape.least, 0)
    numbers = np.tile(least, (len(steps), 1))
    numbers[:, shape.links] += (steps - 1).reshape(len(steps), -1)
    numbers[:, shape.turns] += np.maximum(turns - 1, 0)
    numbers[:, shape.share] = 1
    return numbers


def _bend(shape: _Shape, numbers: Array, random: np.random.RandomState) -> None:
    """Lets the first and the last few microbatches walk without the waits of the block.

    In the steady state a block may wait between legs, as much as the memory allows. The first
    microbatches meet no others, so they can start closer to each other, and the last ones are
    met by none, so they can follow closer: the less they wait, the sooner the step ends.
    """
    n = len(numbers)
    least = np.where(np.isfinite(shape.least), shape.least, 0)[None]
    waits = shape.offsets(numbers).min(axis=2) - shape.offsets(least).min(axis=2)
    reach = random.randint(1, shape.p + 2, size=(n, 2))
    some = random.choice([0, 0.5, 1, 1], (n, 2))
    first = (waits[:, -1:] - waits) * (some[:, :1] / reach[:, :1])
    last = -waits * (some[:, 1:] / reach[:, 1:])
    numbers[:, shape.ramps] = np.concatenate([first, last], axis=1)
    numbers[:, shape.reach] = reach


def _interlocking(shape: _Shape, random: np.random.RandomState, n: int) -> tuple[Array, Array]:
    """Blocks in units of F = I = W whose periods leave no two actions of a rank together.

    Steps `[block, leg, link]` and turns `[block, turn]`, those that hold just less than the
    limit first. Walks from the last rank to the first; each step is drawn until it fits.
    """
    legs, p, tries = shape.legs, shape.p, 12
    turns = random.randint(1, 6, size=(n, legs - 1))
    place = np.cumsum(np.concatenate([np.zeros((n, 1), int), turns], axis=1), axis=1)
    fits = _apart(shape, place)
    turns, place = turns[fits], place[fits]
    n = len(turns)
    steps = np.zeros((n, legs, p - 1), dtype=np.int64)
    last = random.randint(1, 5, size=(n, legs))
    sign = np.where(np.arange(legs) % 2, 1, -1)
    alive = np.ones(n, dtype=bool)
    for link in range(p - 2, -1, -1):
        draw = random.randint(1, 5, size=(n, tries, legs))
        even = random.rand(n, tries) < 0.6  # backwards as forwards
        forwards, backwards = np.split(draw, 2, axis=2)
        backwards[even] = forwards[even]
        same = random.rand(n, tries) < 0.5
        same[:, 0] = random.rand(n) < 0.9
        draw = np.where(same[:, :, None], last[:, None, :], draw)
        fits = _apart(shape, place[:, None, :] + sign * draw)
        last = draw[np.arange(n), fits.argmax(axis=1)]
        alive &= fits.any(axis=1)
        place = place + sign * last
        steps[:, :, link] = last
    steps, turns, place = steps[alive], turns[alive], place[alive]
    period = 3 * legs // 2
    turns[:, 1::2] = (place[:, 2::2] - place[:, 1:-1:2]) % period  # those at rank 0
    return _by_memory(shape, steps, turns, period)


def _apart(shape: _Shape, place: Array) -> Array:
    """Where no two of the legs' actions overlap in a period, `[..., leg] -> [...]`."""
    period = 3 * shape.legs // 2
    gaps = (place[..., None, :] - place[..., :, None]) % period
    own = np.eye(shape.legs, dtype=bool)
    return ((gaps > 0) | own).all(axis=(-1, -2))


def _by_memory(shape: _Shape, steps: Array, turns: Array, period: int) -> tuple[Array, Array]:
    """The blocks that may keep to the limit, fullest first."""
    numbers = np.zeros((len(steps), shape.width))
    numbers[:, shape.links] = steps.reshape(len(steps), -1)
    numbers[:, shape.turns] = turns
    when, half = shape.offsets(numbers), shape.legs // 2
    held = (when[:, : half - 1 : -1] - when[:, :half] + 2).sum(axis=1).max(axis=1) / period
    most = shape.question.limit + 0.7
    order = np.argsort(np.where(held <= most, most - held, 1e6 + held), kind="stable")
    return steps[order], turns[order]


def _evolve(shape: _Shape, random: np.random.RandomState) -> Array:
    """Good blocks: the best of the seeds, varied again and again."""
    q = shape.question
    affordable = int(_EFFORT * 0.5 / q.starts / shape.trials.n)
    numbers = _seeds(shape, random, max(affordable // 8, _BATCH // 2))
    kept = np.zeros((0, shape.width))
    scores = np.zeros((0, 3))
    for _ in range(max(affordable * 2 // 3 // _BATCH, 2)):
        for start in range(0, len(numbers), _BATCH):
            some = numbers[start : start + _BATCH]
            outcome = shape.trials.run(shape.orders(some), shape.fit(some))
            kept = np.concatenate([kept, some])
            scores = np.concatenate([scores, _scores(shape, outcome)])
            best = _best(scores)
            kept, scores = kept[best], scores[best]
        numbers = _vary(shape, kept, random)
    return kept


def _scores(shape: _Shape, outcome: Outcome) -> Array:
    """What is to be small first, second and third, `[order, 3]`; `_STUCK` where it cannot run."""
    metrics = [outcome.makespan, outcome.span]
    if shape.question.metric == "span":
        metrics.reverse()
    scores = np.stack([*metrics, shape.other.run(outcome.lines).makespan], axis=1)
    return np.where(outcome.runs[:, None], scores, _STUCK)


def _ascending(scores: Array) -> Array:
    """The orders from the best to the worst, `[order]`."""
    return np.lexsort(scores.T[::-1])


def _best(scores: Array) -> Array:
    """The best, at most a few with the same score."""
    order = _ascending(scores)
    new = np.any(np.diff(scores[order], axis=0, prepend=-1) != 0, axis=1)
    place = np.arange(len(order))
    since = place - np.maximum.accumulate(np.where(new, place, 0))
    return order[since < _ALIKE][:_KEPT]


def _vary(shape: _Shape, kept: Array, random: np.random.RandomState) -> Array:
    """New blocks from old ones: steps, turns, period, ramps changed, steps copied, rows mixed."""
    n = _BATCH
    numbers = kept[random.randint(len(kept), size=n)].copy()
    what, scale = random.rand(n, 1), random.choice([0.25, 0.5, 1, 2], (n, 1))
    _vary_links(shape, numbers, what < 0.6, scale, random)
    turns = _changes(random, (n, shape.legs - 1), scale) * ((what > 0.2) & (what < 0.8))
    numbers[:, shape.turns] += turns * (random.rand(*turns.shape) < 0.3)
    numbers[:, shape.period] += random.standard_normal((n, 1)) * scale * (
        random.rand(n, 1) < 0.15
    )  # fmt: skip
    ramps = random.standard_normal((n, 2 * shape.legs)) * scale * (what > 0.5)
    numbers[:, shape.ramps] += ramps * (random.rand(*ramps.shape) < 0.3)
    reach = random.randint(-2, 3, size=(n, 2)) * (what > 0.5)
    numbers[:, shape.reach] += reach * (random.rand(n, 2) < 0.3)
    again = np.flatnonzero(random.rand(n) < 0.15)
    straight = numbers[again]
    _bend(shape, straight, random)
    numbers[again] = straight
    other = random.rand(n, 1) < 0.1
    numbers[:, shape.share] = np.where(other, random.choice(FITS, (n, 1)), numbers[:, shape.share])
    flips = random.rand(n, 1) < 0.1
    numbers[:, shape.pack] = np.where(flips, random.randint(2, size=(n, 1)), numbers[:, shape.pack])
    mixed = (random.rand(n, 1) < 0.1) & (random.rand(n, shape.width) < 0.5)
    numbers = np.where(mixed, kept[random.randint(len(kept), size=n)], numbers)
    return np.maximum(numbers, shape.least)


def _changes(random: np.random.RandomState, size: tuple, scale: Array) -> Array:
    """Changes by a little, or by whole units."""
    some = random.standard_normal(size) * scale.reshape(-1, *[1] * (len(size) - 1))
    whole = random.randint(-1, 2, size=size)
    return np.where(random.rand(size[0], *[1] * (len(size) - 1)) < 0.5, some, whole)


def _vary_links(
    shape: _Shape, numbers: Array, chosen: Array, scale: Array, random: np.random.RandomState
) -> None:
    """Changes the steps of a stretch of ranks, and copies steps from one rank to its neighbour."""
    n, links, legs = len(numbers), shape.p - 1, shape.legs
    if links == 0:
        return
    first = random.randint(links, size=n)
    last = np.minimum(first + random.randint(0, shape.p, size=n), links - 1)
    kind = random.rand(n)
    first = np.where(kind < 0.2, 0, first)
    last = np.where(kind < 0.2, links - 1, np.where(kind < 0.5, first, last))
    link = np.arange(links)
    inside = (link >= first[:, None]) & (link <= last[:, None]) & chosen
    change = _changes(random, (n, legs), scale) * (random.rand(n, legs) < 0.4)
    numbers[:, shape.links] += (change[:, :, None] * inside[:, None, :]).reshape(n, -1)
    if links < 2:
        return
    rows = np.flatnonzero(random.rand(n) < 0.15)
    at = random.randint(links - 1, size=len(rows))
    back = random.randint(2, size=len(rows))
    steps = numbers[rows][:, shape.links].reshape(len(rows), legs, links)
    each = np.arange(len(rows))
    steps[each, :, at + 1 - back] = steps[each, :, at + back]
    numbers[rows, shape.links] = steps.reshape(len(rows), -1)


# --- single moves ---------------------------------------------------------------------------


class _Pool:
    """The best orders so far, all different.

    Either without W, which go where they fit, or whole (`written`), where W are moved like
    everything else.
    """

    def __init__(self, shape: _Shape, random: np.random.RandomState, *, written: bool) -> None:
        self.shape, self.random, self.written = shape, random, written
        width = shape.asked.n // shape.p if written else len(shape.mine[0])
        self.orders = np.zeros((0, shape.p, width), dtype=np.int64)
        self.fit, self.scores = np.zeros(0), np.zeros((0, 3))
        self.marks = np.zeros(0, dtype=np.int64)
        self.factors = random.randint(1, 2**31 - 1, size=shape.p * width).astype(np.int64)

    @property
    def reached(self) -> bool:
        """True when the best is good enough."""
        return len(self.scores) > 0 and bool(self.scores[0, 0] <= self.shape.question.target)

    def whole(self) -> Array:
        """The orders with W where they fit, under either costs, whatever fitting means."""
        shape = self.shape
        orders, fit = np.repeat(self.orders, len(FITS), axis=0), np.tile(FITS, len(self.orders))
        found = [shape.trials.run(self.orders, self.fit)]
        found += [t.run(orders, fit) for t in (shape.trials, shape.other)]
        return np.concatenate([x.lines[x.runs] for x in found])

    def add(self, orders: Array, fit: Array | None) -> None:
        """Times more orders; whole ones need no fit."""
        outcome = self.shape.trials.run(orders, fit)
        marks = (orders.reshape(len(orders), len(self.factors)) * self.factors).sum(axis=1)
        if fit is not None:
            marks += (8 * fit).astype(int)
            self.fit = np.concatenate([self.fit, fit])
        self.orders = np.concatenate([self.orders, orders])
        self.scores = np.concatenate([self.scores, _scores(self.shape, outcome)])
        self.marks = np.concatenate([self.marks, marks])

    def keep(self) -> None:
        """Drops all but the best."""
        _, different = np.unique(self.marks, return_index=True)
        different.sort()
        best = different[_ascending(self.scores[different])][:_KEPT]
        self.orders = self.orders[best]
        self.fit = self.fit if self.written else self.fit[best]
        self.scores, self.marks = self.scores[best], self.marks[best]

    def best(self) -> Schedule:
        """The best order."""
        shape = self.shape
        outcome = shape.trials.run(self.orders[:1])
        assert outcome.runs[0], "one microbatch after the other always runs"
        lines = lay(shape.codes[outcome.lines[0]])
        return Schedule.from_lines(shape.question.name, shape.asked.placement, lines)


def _batches(shape: _Shape, share: float) -> int:
    """How many batches of orders take this share of the question's effort."""
    return int(_EFFORT * share / shape.trials.n) // _BATCH


def _polish(pool: _Pool, batches: int) -> None:
    """Moves actions of the best orders, so many times.

    Or the target reached; whole orders may still do better under the uneven costs.
    """
    shape, random = pool.shape, pool.random
    for _ in range(batches):
        if pool.reached and not pool.written:
            return
        parents = random.randint(len(pool.orders), size=_BATCH)
        fit = None
        if not pool.written:
            other = random.rand(_BATCH) < 0.05
            fit = np.where(other, random.choice(FITS, _BATCH), pool.fit[parents])
        pool.add(_moved(shape, pool.orders[parents], random), fit)
        pool.keep()


def _moved(shape: _Shape, orders: Array, random: np.random.RandomState) -> Array:
    """One stream's actions moved a few places, on one rank or several, for one mb or several."""
    n, p, width = orders.shape

    def stretch(size: int) -> tuple[Array, Array]:
        first, kind = random.randint(size, size=n), random.rand(n)
        last = np.minimum(first + random.randint(1, size + 1, size=n), size - 1)
        return first, np.where(kind < 0.6, first, np.where(kind < 0.8, last, size - 1))

    whole = width > len(shape.mine[0])
    stream = random.randint(shape.legs * 3 // 2 if whole else shape.legs, size=n)
    ranks, mbs = stretch(p), stretch(shape.m)
    places = (random.randint(1, 4, size=n) + 0.5) * random.choice([-1, 1], n)
    moved = np.append(shape.stream, [-1, -1])[orders] == stream[:, None, None]
    mb, rank = np.append(shape.mb, [0, 0])[orders], np.arange(p)[None, :, None]
    for value, (first, last) in ((rank, ranks), (mb, mbs)):
        moved &= (value >= first[:, None, None]) & (value <= last[:, None, None])
    key = np.arange(width) + moved * places[:, None, None]
    orders = np.take_along_axis(orders, np.argsort(key, axis=2, kind="stable"), axis=2)
    # microbatches of a stream stay in order
    streams = np.append(shape.stream, [-1, -1])[orders]
    where = np.argsort(streams, axis=2, kind="stable")
    mbs = np.append(shape.mb, [0, 0])[orders]
    items = np.argsort(streams * shape.m + mbs, axis=2, kind="stable")
    out = np.empty_like(orders)
    np.put_along_axis(out, where, np.take_along_axis(orders, items, axis=2), axis=2)
    return out
