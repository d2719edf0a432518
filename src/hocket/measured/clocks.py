"""One clock for the ranks of a run, from the messages between them."""

from __future__ import annotations

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


def no_time_travel(offsets: Array, messages: Messages) -> Array:
    """Offsets, moved as little as needed so that no message arrives before it was sent."""
    lag = _lags(messages)
    offsets = np.array(offsets, dtype=float)
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
