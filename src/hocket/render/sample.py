"""A timeline cut into equal intervals: what to show of each when tiles are too small to draw."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.ir import Array, Schedule, kinds_of
from hocket.render.tiles import Drawing, Tiles

# Classes of time. 0 to 7 are kind * 2 + shade of F, B, I, W.
FUSED, MESSAGE, IDLE = 8, 9, 10
CLASSES = 11


class Sample(NamedTuple):
    """One row: the class of each interval, and a slot of that class running in it (or None)."""

    classes: list[int]
    slots: list[int | None]


def sample(schedule: Schedule, drawn: Drawing, queues: range, columns: int) -> Sample:
    """What a group of queues does in each of `columns` equal intervals.

    Each interval shows a class of time that occurs in it. Which one is settled by what the row
    still owes: over the row every class gets its share of the time, and no beat between the
    schedule's period and the interval hides a kind.
    """
    work, messages = _of(drawn.work, queues), _of(drawn.messages, queues)
    edges = np.linspace(0.0, float(drawn.length), columns + 1)
    classes = classes_of(schedule, drawn)[work.slot]
    shares = np.zeros((CLASSES, columns))
    for c in np.unique(classes).tolist():
        shares[c] = _time(work.pick(classes == c), edges)
    shares *= columns / (float(drawn.length) * len(queues))
    shares[shares < 1e-9] = 0
    free = np.maximum(1 - shares.sum(axis=0), 0)
    during = _time(messages, edges) * columns / (float(drawn.length) * len(queues))
    shares[MESSAGE] = np.minimum(during, free)
    shares[IDLE] = free - shares[MESSAGE]
    shares[shares < 1e-9] = 0
    chosen = _share_out(shares)
    return Sample(chosen, _slots(work, classes, chosen, edges) if len(queues) == 1 else [])


def classes_of(schedule: Schedule, drawn: Drawing) -> Array:
    """The class of each slot, `[slot]`; FUSED where kinds or shades are mixed."""
    filled = np.flatnonzero(schedule.widths > 0)
    codes = np.minimum(kinds_of(schedule.codes) * 2 + drawn.shades, MESSAGE)
    starts = schedule.slots[:-1][filled]
    low, high = np.minimum.reduceat(codes, starts), np.maximum.reduceat(codes, starts)
    out = np.full(schedule.n_slots, IDLE, dtype=np.int64)
    out[filled] = np.where(low == high, low, FUSED)
    return out


def _of(tiles: Tiles, queues: range) -> Tiles:
    return tiles.pick((tiles.queue >= queues.start) & (tiles.queue < queues.stop))


def _time(tiles: Tiles, edges: Array) -> Array:
    """Time that tiles take in each interval; tiles may overlap."""
    return np.diff(_since(edges, tiles.start) - _since(edges, tiles.end))


def _since(at: Array, points: Array) -> Array:
    """Sum over points of the time from the point to `at`, where that is later."""
    points = np.sort(points).astype(float)
    before = np.searchsorted(points, at)
    return before * at - np.concatenate([[0.0], np.cumsum(points)])[before]


def _share_out(shares: Array) -> list[int]:
    owed = np.zeros(CLASSES)
    chosen = []
    for share in shares.T:
        owed += share
        best = int(np.argmax(np.where(share > 0, owed, -np.inf)))
        owed[best] -= 1
        chosen.append(best)
    return chosen


def _slots(work: Tiles, classes: Array, chosen: list[int], edges: Array) -> list[int | None]:
    """For each interval the first slot of the chosen class that runs in it."""
    out: list[int | None] = [None] * len(chosen)
    for c in set(chosen) - {MESSAGE, IDLE}:
        mine = work.pick(classes == c)
        order = np.argsort(mine.end, kind="stable")
        columns = np.flatnonzero(np.array(chosen) == c)
        found = np.searchsorted(mine.end[order], edges[columns], side="right")
        for column, i in zip(columns.tolist(), np.minimum(found, len(order) - 1), strict=True):
            out[column] = int(mine.slot[order[i]])
    return out
