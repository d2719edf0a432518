"""A timeline as columns of 32-bit integers, packed for a page: small, and fast to read there."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from hocket.graph import edges
from hocket.ir import Array, encode, kinds_of, mbs_of, stages_of
from hocket.render import tiles
from hocket.timeline import Timeline

LARGEST = 2**31 - 1
FINEST = 2**30  # steps of the makespan where times are not small whole numbers

SHADE = 64  # above every kind; added to an action's kind where its shade is 1


class Column(NamedTuple):
    """One column; `difference`: each value is written as its difference to the one before."""

    name: str
    values: Array
    difference: bool = False


class Scale(NamedTuple):
    """How ticks become integers that fit 32 bits: `(ticks - first) / step`, of `unit` time each."""

    first: Any
    step: float | int
    unit: float

    def at(self, ticks: Array) -> Array:
        """A time, counted from the first."""
        return self.length(ticks - self.first)

    def length(self, ticks: Array) -> Array:
        """A length of time, which has no first."""
        return ticks if self.step == 1 else np.rint(ticks / self.step).astype(np.int64)


def scale_of(timeline: Timeline) -> Scale:
    """Exact where the ticks are, else the finest steps that fit."""
    works = timeline.computes
    begin = (timeline.slot_start - timeline.before)[works]
    finish = (timeline.slot_end + timeline.after)[works]
    first = begin.min(initial=LARGEST) if len(begin) else 0
    length = finish.max(initial=0) - first if len(finish) else 0
    per_tick = 1 / timeline.ticks.scale
    if timeline.ticks.exact and length < LARGEST // 2:
        return Scale(first, 1, per_tick)
    step = float(length) / FINEST or 1.0
    return Scale(first, step, step * per_tick)


def columns(timeline: Timeline, scale: Scale) -> list[Column]:
    """Everything of a timeline that has one value an action, an edge, or a change of memory."""
    s = timeline.schedule
    start, end = scale.at(timeline.start), scale.at(timeline.end)
    out = [
        Column("kind", kinds_of(s.codes) + SHADE * tiles.shades(s), difference=True),
        Column("stage", stages_of(s.codes), difference=True),
        Column("mb", mbs_of(s.codes), difference=True),
        Column("start", start, difference=True),
        Column("length", end - start),
    ]
    if not s.is_single:  # the actions of a slot follow each other
        out.append(Column("joined", np.diff(s.slot_of_action, prepend=-1) == 0))
    if timeline.before.any() or timeline.after.any():
        out += [
            Column("before", scale.length(timeline.before)[s.slot_of_action]),
            Column("after", scale.length(timeline.after)[s.slot_of_action]),
        ]
    return [*out, *_edges(timeline, scale), Column("path", _path(timeline), difference=True)]


def _edges(timeline: Timeline, scale: Scale) -> Iterable[Column]:
    """What each action needs, also where its queue's own order sees to it; sorted by action."""
    s, g = timeline.schedule, timeline.graph
    source, target = (x.astype(np.int64) for x in edges(s))
    n = len(s.codes)
    key = np.unique(np.concatenate([target * n + source, g.target.astype(np.int64) * n + g.source]))
    delays = np.zeros(len(key), dtype=timeline.delays.dtype)
    delays[np.searchsorted(key, g.target.astype(np.int64) * n + g.source)] = timeline.delays
    target, source = np.divmod(key, n) if n else (key, key)
    yield Column("needs", np.bincount(target, minlength=n))
    yield Column("source", source - target)
    yield Column("delay", scale.length(delays))


def _path(timeline: Timeline) -> Array:
    """The first action of each slot of the critical path."""
    s = timeline.schedule
    order = np.argsort(s.codes, kind="stable")
    steps = timeline.critical_path() if timeline.computes.any() else []
    wanted = np.array([encode(int(k), stage, mb) for (k, stage, mb), *_ in
                       (step.slot for step in steps)], dtype=np.int64)  # fmt: skip
    return order[np.searchsorted(s.codes[order], wanted)]


class Levels(NamedTuple):
    """Memory over time: `counts` changes a rank; values are whole numbers of `unit`."""

    quantity: str
    unit: float
    counts: list[int]
    columns: list[Column]


def levels(timeline: Timeline, scale: Scale) -> Levels:
    """Bytes where the costs tell them, else microbatches in flight; only the changes."""
    quantity = "bytes" if timeline.bytes else "in_flight"
    times, values = [], []
    for time, value in timeline.levels(quantity):
        changes = np.diff(value, prepend=0.0) != 0
        times.append(scale.at(time[changes]))
        values.append(value[changes])
    highest = max((float(v.max(initial=0)) for v in values), default=0.0)
    whole = highest < LARGEST // 2 and all(bool((v == np.rint(v)).all()) for v in values)
    unit = 1.0 if whole else highest / FINEST or 1.0
    parts = timeline.parts if quantity == "in_flight" else 1
    packed = [
        Column("level_time", np.concatenate(times), difference=True),
        Column("level", np.rint(np.concatenate(values) / unit), difference=True),
    ]
    return Levels(quantity, unit / float(parts), [len(v) for v in values], packed)


def pack(found: Iterable[Column]) -> str:
    """All columns as text: base64 of zlib of their bytes, the lowest byte of all values first."""
    planes = []
    for column in found:
        values = np.asarray(column.values).astype(np.int64)
        if column.difference:
            values = np.diff(values, prepend=0)
        raw = values.astype("<i4")  # differences wrap around, and back when they are summed
        planes.append(raw.view(np.uint8).reshape(-1, 4).T.tobytes())
    return base64.b64encode(zlib.compress(b"".join(planes), 9)).decode()
