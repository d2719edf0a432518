"""What every picture draws: tiles of work and of messages, their shades, the marks of an axis."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from hocket.costs import Number
from hocket.deps import ROWS
from hocket.ir import Action, Array, Kind, Queue, Schedule, action_of, kinds_of, mbs_of, stages_of
from hocket.tables import format_time
from hocket.timeline import Timeline

NAMES = {kind: row.name for kind, row in ROWS.items() if row.work}

NO_TIME = 1e-9  # a smaller part of the makespan than this is no time to draw

Part = tuple[Action, int]
"""An action and its shade."""


class Tiles(NamedTuple):
    """Stretches of time: `slot` has `queue` from `start` to `end`, ticks from the first start."""

    slot: Array
    queue: Array
    start: Array
    end: Array

    def pick(self, which: Array) -> Tiles:
        """The tiles of a mask or of indices."""
        return Tiles(*(column[which] for column in self))


class Drawing(NamedTuple):
    """Everything of a timeline that a picture needs; `length` is the makespan in ticks."""

    work: Tiles
    messages: Tiles
    length: Number
    shades: Array


def drawing(timeline: Timeline) -> Drawing:
    """The tiles of a timeline, in order of slots; work that takes no time has no tile."""
    s = timeline.schedule
    start, end = timeline.slot_start, timeline.slot_end
    works = np.flatnonzero(timeline.computes)
    outer_start, outer_end = start - timeline.before, end + timeline.after
    zero = start.dtype.type(0)
    first = outer_start[works].min() if len(works) else zero
    last = outer_end[works].max() if len(works) else zero
    other = np.flatnonzero(~timeline.computes)
    everyone = np.arange(s.n_slots)
    pieces = [
        (other, start[other], end[other]),
        (everyone, outer_start, start),
        (everyone, end, outer_end),
    ]
    slot, a, b = (np.concatenate(column) for column in zip(*pieces, strict=True))
    messages = Tiles(slot, s.queue_of_slot[slot], np.maximum(a - first, 0), b - first)
    messages = messages._replace(end=np.minimum(messages.end, last - first))
    work = Tiles(works, s.queue_of_slot[works], start[works] - first, end[works] - first)
    least = float(last - first) * NO_TIME
    return Drawing(
        work.pick(work.end - work.start > least),
        messages.pick(messages.end - messages.start > least),
        (last - first).item(),
        shades(s),
    )


def shades(schedule: Schedule) -> Array:
    """0 or 1 for each action: whether its stage is an even or an odd one of its queue's stages.

    A queue's stages are counted path by path, so the second copy of a mirrored pair has shade 1.
    """
    paths = np.array(schedule.placement.path_of)[mbs_of(schedule.codes)]
    return _positions(schedule)[paths, stages_of(schedule.codes)] % 2


def shade_means(schedule: Schedule) -> str:
    """What shade 1 stands for."""
    two = int(_positions(schedule).max()) == 1
    return "is a rank's second stage" if two else "is a rank's 2nd, 4th ... stage"


def _positions(schedule: Schedule) -> Array:
    """How many stages of the same queue come before, `[path, stage]`."""
    placement = schedule.placement
    table = np.zeros((len(placement.paths), placement.n_stages), dtype=np.int64)
    seen: Counter[Queue] = Counter()
    for k, path in enumerate(placement.paths):
        for stage, queue in enumerate(path):
            table[k, stage] = seen[queue]
            seen[queue] += 1
    return table


def common_unit(drawn: Drawing) -> float | None:
    """The largest time of which all times are multiples, in ticks; None where there is none.

    Floats count as multiples within a millionth of the shortest tile.
    """
    spans = [span for span in (drawn.work, drawn.messages) if len(span.slot)]
    if not spans:
        return None
    times = np.concatenate([x for span in spans for x in (span.start, span.end)])
    shortest = float(min((span.end - span.start).min() for span in spans))
    if float(drawn.length) / shortest > 1e6:  # no picture has that many columns
        return None
    for scale in (1, 10, 100, 1000):
        whole = np.rint(times * scale)
        if np.allclose(times * scale, whole, rtol=0, atol=1e-6 * shortest * scale):
            return float(np.gcd.reduce(whole.astype(np.int64))) / scale
    return None


def parts(schedule: Schedule, drawn: Drawing, slot: int) -> list[Part]:
    """The actions of a slot, each with its shade."""
    span = range(int(schedule.slots[slot]), int(schedule.slots[slot + 1]))
    return [(action_of(schedule.codes[i]), int(drawn.shades[i])) for i in span]


def kinds_drawn(timeline: Timeline) -> list[Kind]:
    """The kinds of work that stand in the order."""
    return [k for k in NAMES if bool((kinds_of(timeline.schedule.codes) == k).any())]


def idle_share(timeline: Timeline, rank: int) -> float:
    """The part of a rank's time, over its queues that work, in which it does nothing."""
    r = timeline.ranks[rank]
    whole = float(r.busy + r.transfer + r.idle)
    return float(r.idle) / whole if whole else 0.0


def headline(timeline: Timeline) -> list[str]:
    """Name, size, makespan, span and bubble ratio, as pieces of a line."""
    s = timeline.schedule
    slices = s.placement.slices
    name = f"{s.name} (measured)" if timeline.measured else s.name
    return [
        name,
        f"p={s.p} m={s.m // slices}" + (f" in {slices} slices" if slices > 1 else ""),
        f"makespan {format_time(timeline.makespan, timeline.unit)}",
        f"span {format_time(timeline.span, timeline.unit)}",
        f"bubble ratio {timeline.bubble_ratio:.1%}",
    ]


def steps(total: Number, most: int) -> Iterator[Fraction]:
    """1, 2 or 5 times a power of ten, from the first that divides `total` in at most `most` on."""
    exponent = math.floor(math.log10(float(total) / most))
    while True:
        for digit in (1, 2, 5):
            step = digit * Fraction(10) ** exponent
            if total <= step * most:
                yield step
        exponent += 1


def marks(total: Number, step: Fraction) -> list[Fraction]:
    """The multiples of a step from 0 to a total."""
    return [i * step for i in range(math.floor(total / step) + 1)]
