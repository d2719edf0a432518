"""From the times that ranks recorded to one timeline on one clock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hocket.deps import IS_WORK
from hocket.ir import Array, Line, Schedule, kinds_of
from hocket.measured import timeline_of
from hocket.measured.clocks import messages_of, no_time_travel, until_received
from hocket.runtime.handshake import clock_offsets
from hocket.runtime.program import Role, programs
from hocket.runtime.session import Session
from hocket.timeline import Timeline


def gather(schedule: Schedule, spans: Array, session: Session, tag: int) -> Timeline:
    """The measured timeline of a lowered schedule, of all ranks on one clock; collective."""
    raw = session.exchange(np.ascontiguousarray(spans, dtype=np.int64).tobytes())
    every = [np.frombuffer(own, dtype=np.int64).reshape(-1, 2) for own in raw]
    offsets = clock_offsets(session.wire, session.rank, session.hosts, tag)
    return timeline(schedule, every, offsets)


def timeline(schedule: Schedule, spans: Sequence[Array], offsets: Sequence[float]) -> Timeline:
    """The measured timeline of a lowered schedule, in microseconds from its first start.

    spans: for each rank start and end of each entry of its program, nanoseconds of its own clock,
    `[entry, 2]`. offsets: what to add to each rank's clock.
    """
    start, end = np.zeros(len(schedule.codes)), np.zeros(len(schedule.codes))
    for program, span in zip(programs(schedule), spans, strict=True):
        for (role, action), (begin, finish) in zip(program.entries, span.tolist(), strict=True):
            if role in (Role.RUN, Role.SEND, Role.POST):
                start[action] = begin
            if role in (Role.RUN, Role.SEND, Role.WAIT):
                end[action] = finish
    rank = schedule.rank_of_queue[schedule.queue_of_slot[schedule.slot_of_action]]
    clocks = no_time_travel(np.asarray(offsets), messages_of(schedule, start, end))
    zero = start.min() if len(start) else 0.0
    start = (start - zero + clocks[rank]) / 1e3
    end = until_received(schedule, start, (end - zero + clocks[rank]) / 1e3)
    ran = _as_run(schedule, start)
    if ran is not None:
        schedule, order = ran
        start, end = start[order], end[order]
    return timeline_of(schedule, start, end)


def _as_run(schedule: Schedule, start: Array) -> tuple[Schedule, Array] | None:
    """The schedule in the order in which it ran, if that is another: new order of the actions."""
    compute = IS_WORK[kinds_of(schedule.codes)]
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
