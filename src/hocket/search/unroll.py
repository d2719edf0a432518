"""An order for few microbatches made one for many: its steady state repeated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from hocket.ir import Array, Placement
from hocket.search.problem import Problem

_CUTS = (0.5, 0.45, 0.55, 0.4, 0.6, 0.35, 0.65, 0.3)  # of the whole time: where to repeat


def shorter(problem: Problem, m: int) -> Problem | None:
    """The same problem with the first m microbatches; None where its paths then differ in more."""
    placement = problem.placement
    less = Placement(placement.paths, placement.path_of[:m], placement.slices)
    per_path = np.bincount(np.array(less.path_of), minlength=len(less.paths))
    counts = per_path[problem.path]
    if len(set((problem.counts - counts).tolist())) != 1 or counts.min() < 2:
        return None
    per_queue = np.bincount(
        problem.queue_of, weights=counts, minlength=len(problem.queues) - 1
    ).astype(np.int64)
    return replace(
        problem, placement=less, counts=counts.astype(np.int64),
        base=np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64),
        queues=np.concatenate([[0], np.cumsum(per_queue)]).astype(np.int64),
    )  # fmt: skip


def unrolled(small: Problem, order: Array, begin: Array, large: Problem) -> Iterator[Array]:
    """Orders of the large problem that repeat a stretch of a small one's order.

    begin: start of each position of `order`. In every queue the stretch holds each type once.
    """
    more = int((large.counts - small.counts)[0])
    for cut in _CUTS:
        parts = []
        for line, near in _lines(small, order, begin, begin.max() * cut):
            first = _stretch(line, near, 1, small.n_types)
            if first is None:
                break
            stretch = line[first : first + len(np.unique(line % small.n_types))]
            parts += [line[:first], np.tile(stretch, more), line[first:]]
        else:
            yield np.concatenate(parts)


def shortened(large: Problem, order: Array, begin: Array, small: Problem) -> Iterator[Array]:
    """Orders of the small problem: a stretch of a large one's order is left out.

    The stretch holds each type as often as the problems differ by.
    """
    less = int((large.counts - small.counts)[0])
    whole = int(large.counts.max())
    for cut in _CUTS:
        parts = []
        at = begin.max() * cut * (whole - less) / whole
        for line, near in _lines(large, order, begin, at):
            first = _stretch(line, near, less, large.n_types)
            if first is None:
                break
            length = less * len(np.unique(line % large.n_types))
            parts += [line[:first], line[first + length :]]
        else:
            yield np.concatenate(parts)


def _lines(problem: Problem, order: Array, begin: Array, at: float) -> Iterator[tuple[Array, int]]:
    """Each queue's types, and the first position that starts at this time or later."""
    for a, b in zip(problem.queues[:-1], problem.queues[1:], strict=True):
        yield order[a:b], int(np.searchsorted(begin[a:b], at))


def _stretch(line: Array, near: int, times: int, n_types: int) -> int | None:
    """The position next to `near` from which each type stands that many times, in whole slots."""
    types = np.unique(line % n_types)
    length = len(types) * times
    if length > len(line):
        return None
    seen = np.zeros((len(line) + 1, len(types)), dtype=np.int64)
    seen[1:] = np.cumsum((line % n_types)[:, None] == types, axis=0)
    opens = np.append(line < n_types, True)
    good = (seen[length:] - seen[:-length] == times).all(axis=1)
    good = np.flatnonzero(good & opens[length:] & opens[:-length])
    return int(good[np.argmin(np.abs(good - near))]) if len(good) else None
