"""From the times that ranks recorded to one timeline on one clock.

Imports timeline, graph, program; no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hocket.costs import Ticks
from hocket.graph import Index, graph, message_pairs
from hocket.ir import Array, Kind, Line, Schedule, kinds_of
from hocket.runtime.program import Role, programs
from hocket.timeline import Timeline


def host() -> str:
    """What two processes share whose `perf_counter_ns` is one clock; "" where that is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def timeline(schedule: Schedule, spans: Sequence[Array], offsets: Sequence[float]) -> Timeline:
    """The measured timeline of a lowered schedule, in microseconds from its first start.

    spans: for each rank start and end of each entry of its program, nanoseconds of its own clock,
    `[entry, 2]`. offsets: what to add to each rank's clock.
    """
    start, end = np.zeros(len(schedule.codes)), np.zeros(len(schedule.codes))
    peer: dict[int, int] = {}
    for program, span in zip(programs(schedule), spans, strict=True):
        peer |= program.peer
        for (role, action), (begin, finish) in zip(program.entries, span.tolist(), strict=True):
            if role in (Role.RUN, Role.SEND, Role.POST):
                start[action] = begin
            if role in (Role.RUN, Role.SEND, Role.WAIT):
                end[action] = finish
    rank = schedule.rank_of_queue[schedule.queue_of_slot[schedule.slot_of_action]]
    sends, receives = message_pairs(Index(schedule))
    clocks = aligned(
        np.asarray(offsets, dtype=float), rank[sends], rank[receives], start[sends], end[receives]
    )
    zero = start.min() if len(start) else 0.0
    start = (start - zero + clocks[rank]) / 1e3
    end = (end - zero + clocks[rank]) / 1e3
    end[sends] = np.maximum(start[sends], np.minimum(end[sends], end[receives]))
    return _timeline(schedule, start, end)


def _timeline(schedule: Schedule, start: Array, end: Array) -> Timeline:
    ran = _as_run(schedule, start)
    if ran is not None:
        schedule, order = ran
        start, end = start[order], end[order]
    g = graph(schedule)
    kinds = kinds_of(schedule.codes)
    delays = np.zeros(len(g.source))
    message = g.crosses & (kinds[g.source] >= Kind.SEND_F)
    delays[message] = end[g.target[message]] - end[g.source[message]]
    zeros = np.zeros(schedule.n_slots)
    return Timeline(
        schedule=schedule, graph=g, start=start, end=end, before=zeros, after=zeros,
        delays=delays, ticks=Ticks(1, exact=False), unit="us", measured=True,
    )  # fmt: skip


def aligned(
    offsets: Array, senders: Array, receivers: Array, sent: Array, received: Array
) -> Array:
    """Offsets, moved as little as needed so that no message arrives before it was sent.

    Longest paths over ranks: the receiver's clock must be late enough for each of its messages.
    """
    offsets = offsets.copy()
    lag: dict[tuple[int, int], float] = {}
    for s, r, gap in zip(
        senders.tolist(), receivers.tolist(), (sent - received).tolist(), strict=True
    ):
        lag[s, r] = max(lag.get((s, r), gap), gap)
    for _ in range(len(offsets)):
        moved = False
        for (s, r), gap in lag.items():
            if offsets[r] < offsets[s] + gap:
                offsets[r], moved = offsets[s] + gap, True
        if not moved:
            break
    return offsets


def _as_run(schedule: Schedule, start: Array) -> tuple[Schedule, Array] | None:
    """The schedule in the order in which it ran, if that is another: new order of the actions."""
    compute = kinds_of(schedule.codes) < Kind.SEND_F
    queue = schedule.queue_of_slot[schedule.slot_of_action]
    keys = np.where(compute, start, np.nan)
    steady = all(
        (np.diff(keys[(queue == q) & compute]) >= 0).all() for q in range(len(schedule.queues))
    )
    if steady:
        return None
    order = np.lexsort((np.arange(len(start)), start, queue))
    lines = {}
    for q, name in enumerate(schedule.queues):
        mine = order[queue[order] == q]
        lines[name] = Line(schedule.codes[mine], np.ones(len(mine), dtype=np.int64))
    return Schedule.from_lines(schedule.name, schedule.placement, lines), order
