"""One clock for the ranks of a run, from the messages between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from hocket.graph import Index, message_pairs
from hocket.ir import Array, Schedule


class Messages(NamedTuple):
    """Who sent when, by the sender's clock, and who had it when, by the receiver's."""

    senders: Array
    receivers: Array
    sent: Array
    received: Array


class Clocks(NamedTuple):
    """What to add to each rank's clock, and by how much that may be wrong; in the clocks' unit.

    `uncertainty[r]` is None where nothing bounds it: messages go one way only.
    """

    offsets: Array
    uncertainty: list[float | None]


def messages_of(schedule: Schedule, start: Array, end: Array) -> Messages:
    """The messages of an order with SEND and RECV: each SEND's start, its RECV's end."""
    sends, receives = _pairs(schedule)
    rank = schedule.rank_of_queue[schedule.queue_of_slot[schedule.slot_of_action]]
    return Messages(rank[sends], rank[receives], start[sends], end[receives])


def until_received(schedule: Schedule, start: Array, end: Array) -> Array:
    """The ends, those of SENDs no later than when the message was there.

    What a sender does for a message after that, such as tidying up, is no part of its way.
    """
    sends, receives = _pairs(schedule)
    end = end.copy()
    end[sends] = np.maximum(start[sends], np.minimum(end[sends], end[receives]))
    return end


def _pairs(schedule: Schedule) -> tuple[Array, Array]:
    """The positions of every SEND whose RECV stands in the order, and of the RECV."""
    index = Index(schedule)
    sends, receives = message_pairs(index)
    known = receives < index.n
    return sends[known], receives[known]


def clocks_of(p: int, messages: Messages, *, shared: bool = False) -> Clocks:
    """The clocks of p ranks, from messages that went both ways between them.

    Between two ranks the shortest apparent latencies a and b of the two directions give the
    offset (a - b) / 2, wrong by (a + b) / 2 at most; over the ranks the surest pairs are taken.
    No message then arrives before it was sent. shared: the ranks read one clock; it is kept
    unless a message contradicts that.
    """
    lag = _lags(messages)
    if shared and all(gap >= 0 for gap in lag.values()):
        return Clocks(np.zeros(p), [0.0] * p)
    offsets, uncertainty = np.zeros(p), [None] * p
    uncertainty[0] = 0.0
    joined = {0}
    while len(joined) < p:
        pairs = [
            ((lag[a, b] + lag[b, a]) / 2, a, b)
            for a, b in lag
            if a in joined and b not in joined and (b, a) in lag
        ]
        if not pairs:
            break
        width, a, b = min(pairs)
        offsets[b] = offsets[a] - (lag[a, b] - lag[b, a]) / 2
        uncertainty[b] = (uncertainty[a] or 0.0) + abs(width)
        joined.add(b)
    return Clocks(_no_time_travel(offsets, lag), uncertainty)


def no_time_travel(offsets: Array, messages: Messages) -> Array:
    """Offsets, moved as little as needed so that no message arrives before it was sent."""
    return _no_time_travel(np.asarray(offsets, dtype=float), _lags(messages))


def _no_time_travel(offsets: Array, lag: Mapping[tuple[int, int], float]) -> Array:
    offsets = offsets.copy()
    for _ in range(len(offsets)):
        moved = False
        for (s, r), gap in lag.items():
            if offsets[r] < offsets[s] - gap:
                offsets[r], moved = offsets[s] - gap, True
        if not moved:
            break
    return offsets


def _lags(messages: Messages) -> dict[tuple[int, int], float]:
    """By sender and receiver, the shortest time that a message seems to have taken."""
    lag: dict[tuple[int, int], float] = {}
    gaps = (messages.received - messages.sent).tolist()
    pairs = zip(messages.senders.tolist(), messages.receivers.tolist(), strict=True)
    for pair, gap in zip(pairs, gaps, strict=True):
        lag[pair] = min(lag.get(pair, gap), gap)
    return lag
