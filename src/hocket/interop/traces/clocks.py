"""Clocks of hosts that differ and drift: for each a line over time, from messages both ways.

What is added to a clock at its time t is offset + rate t. A message bounds this line from one
side: it did not arrive before it was sent. Of all lines between the bounds of both directions the
one with the most room on both sides is taken; half of that room is what it may be wrong by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hocket.ir import Array
from hocket.measured.clocks import Messages, no_time_travel

FASTEST = 1e-3  # how much faster one clock runs than another at most; quartz is far below


class Line(NamedTuple):
    """What is added to a clock: offset + rate t, and by how much that may be wrong.

    within: None where nothing bounds it, below 0 where no line fits all messages.
    """

    offset: float
    rate: float
    within: float | None

    def at(self, times: Array) -> Array:
        """What is added at these times of the clock."""
        return self.offset + self.rate * times


ONE = Line(0.0, 0.0, 0.0)  # the clock that the others are read by


def lines_of(clocks: int, steps: Sequence[Messages]) -> list[list[Line]]:
    """For each step the line of each clock.

    The same for all steps where one line fits the messages of all, else for each half of them,
    and so on.
    """
    lines = _lines(clocks, Messages(*map(np.concatenate, zip(*steps, strict=True))))
    if len(steps) > 1 and any(line.within is not None and line.within < 0 for line in lines):
        half = len(steps) // 2
        return lines_of(clocks, steps[:half]) + lines_of(clocks, steps[half:])
    return [lines] * len(steps)


def _lines(clocks: int, messages: Messages) -> list[Line]:
    """Clock by clock, the surest next: the line to a clock whose own line is known."""
    pairs = _by_pair(messages)
    lines: dict[int, Line] = {0: ONE}
    open_: dict[int, Line] = {}  # the surest line of each clock that has none yet
    latest = 0
    while len(lines) < clocks:
        for a, b in pairs:
            if a == latest and b not in lines and (b, a) in pairs:
                line = _between(lines[a], pairs[a, b], pairs[b, a])
                if b not in open_ or _width(line) < _width(open_[b]):
                    open_[b] = line
        if not open_:
            break
        latest = min(open_, key=lambda b: (_width(open_[b]), b))
        lines[latest] = open_.pop(latest)
    out = [lines.get(clock, Line(0.0, 0.0, None)) for clock in range(clocks)]
    return _in_order(out, messages)


def _width(line: Line) -> float:
    return abs(line.within or 0.0)


def _by_pair(messages: Messages) -> dict[tuple[int, int], tuple[Array, Array]]:
    """When messages were sent and received, by sender and receiver."""
    order = np.lexsort((messages.receivers, messages.senders))
    senders, receivers, sent, received = (x[order] for x in messages)
    at = np.flatnonzero(np.diff(senders, prepend=-1) | np.diff(receivers, prepend=-1))
    return {
        (int(senders[i]), int(receivers[i])): (sent[i:j], received[i:j])
        for i, j in pairwise([*at.tolist(), len(senders)])
    }


def _in_order(lines: list[Line], messages: Messages) -> list[Line]:
    """The lines, moved as little as needed so that no message arrives before it was sent."""
    sent, received = (
        times + np.array([line.offset for line in lines])[ends]
        + np.array([line.rate for line in lines])[ends] * times
        for times, ends in (
            (messages.sent, messages.senders), (messages.received, messages.receivers)
        )
    )  # fmt: skip
    moved = no_time_travel(
        np.zeros(len(lines)), Messages(messages.senders, messages.receivers, sent, received)
    )
    return [line._replace(offset=line.offset + by) for line, by in zip(lines, moved, strict=True)]


def _between(line: Line, there: tuple[Array, Array], back: tuple[Array, Array]) -> Line:
    """The line of a clock, from messages to and from another whose line is known."""
    (sent, low_at), (high_at, received) = there, back
    low = sent + line.at(sent) - low_at
    high = received + line.at(received) - high_at

    def room(rate: float) -> tuple[float, float]:
        """The highest offset below all upper bounds, the lowest above the others."""
        return float((high - rate * high_at).min()), float((low - rate * low_at).max())

    def width(rate: float) -> float:
        above, below = room(rate)
        return above - below

    length = float(max(low_at.max(), high_at.max()) - min(low_at.min(), high_at.min()))
    rate = 0.0
    if abs(width(0.0)) < 2 * FASTEST * length or width(0.0) < 0:
        rate = _widest(width)
    above, below = room(rate)
    return Line((above + below) / 2, rate, (above - below) / 2 + (line.within or 0.0))


def _widest(width: Callable[[float], float]) -> float:
    """The rate with the most room; the room is concave in it."""
    low, high = -FASTEST, FASTEST
    for _ in range(60):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (a, high) if width(a) < width(b) else (low, b)
    return (low + high) / 2
