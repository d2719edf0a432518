"""Inserts the messages between ranks into an order, so that no transport can deadlock.

Imports ir, deps, graph, errors.
"""

from __future__ import annotations

import numpy as np

from hocket.deps import MESSAGE
from hocket.errors import ScheduleError
from hocket.graph import graph
from hocket.ir import (
    Kind,
    Line,
    Schedule,
    action_of,
    encode,
    kinds_of,
    mbs_of,
    stages_of,
)


def insert_communication(schedule: Schedule) -> Schedule:
    """The schedule with a SEND after each result that leaves its rank, and its RECV.

    Walks one order in which all slots can run (every queue in turn, one slot a round) and
    appends each SEND to its sender and the RECV to its receiver at the same moment. That walk,
    taken one message at a time, is itself a run in which every send meets its receive, and what
    a rank does next never depends on timing; so the result runs on tagged, ordered and
    rendezvous transports.

    Raises: ScheduleError when the schedule has communication already or cannot run.

    Source: the insertion rule of torch.distributed.pipelining (`_add_send_recv`).
    """
    if schedule.has_communication:
        raise ScheduleError(f"{schedule.name} has SEND and RECV actions already")
    messages = _messages(schedule)
    lines: list[list[int]] = [[] for _ in schedule.queues]
    widths: list[list[int]] = [[] for _ in schedule.queues]
    codes, offsets = schedule.codes.tolist(), schedule.slots.tolist()
    queue_of = schedule.queue_of_slot.tolist()
    for slot in _rounds(schedule):
        q = queue_of[slot]
        actions = range(offsets[slot], offsets[slot + 1])
        lines[q].extend(codes[a] for a in actions)
        widths[q].append(len(actions))
        for a in actions:
            if a in messages:
                send, receive, to = messages[a]
                for queue, code in ((q, send), (to, receive)):
                    lines[queue].append(code)
                    widths[queue].append(1)
    made = [
        Line(np.array(c, dtype=np.int64), np.array(w, dtype=np.int64))
        for c, w in zip(lines, widths, strict=True)
    ]
    return Schedule.from_lines(
        schedule.name, schedule.placement, dict(zip(schedule.queues, made, strict=True))
    )


def strip_communication(schedule: Schedule) -> Schedule:
    """The schedule without its SEND and RECV actions."""
    compute = kinds_of(schedule.codes) < Kind.SEND_F
    kept = np.zeros(schedule.n_slots, dtype=np.int64)
    np.add.at(kept, schedule.slot_of_action[compute], 1)
    lines = {}
    for q, queue in enumerate(schedule.queues):
        part = slice(int(schedule.starts[q]), int(schedule.starts[q + 1]))
        first, last = schedule.slots[part.start], schedule.slots[part.stop]
        widths = kept[part]
        lines[queue] = Line(schedule.codes[first:last][compute[first:last]], widths[widths > 0])
    return Schedule.from_lines(schedule.name, schedule.placement, lines)


def _messages(schedule: Schedule) -> dict[int, tuple[int, int, int]]:
    """For each action whose result leaves its rank: (send, receive, receiving queue)."""
    table = schedule.placement.rank_table(schedule.queues)
    path_of = np.array(schedule.placement.path_of)
    lengths = schedule.placement.lengths
    kinds, stages = kinds_of(schedule.codes), stages_of(schedule.codes)
    mbs = mbs_of(schedule.codes)
    ranks = schedule.rank_of_queue
    out = {}
    for kind, (send, receive, offset) in MESSAGE.items():
        (at,) = np.nonzero(kinds == kind)
        to = stages[at] + offset
        inside = (to >= 0) & (to < lengths[mbs[at]])
        at, to = at[inside], to[inside]
        queue = table[path_of[mbs[at]], to]
        own = schedule.queue_of_slot[schedule.slot_of_action[at]]
        leaves = ranks[queue] != ranks[own]
        at, to, queue = at[leaves], to[leaves], queue[leaves]
        sends = encode(int(send), stages[at], mbs[at]).tolist()
        receives = encode(int(receive), to, mbs[at]).tolist()
        out.update(zip(at.tolist(), zip(sends, receives, queue.tolist(), strict=True), strict=True))
    return out


def _rounds(schedule: Schedule) -> list[int]:
    """An order in which all slots can run: every queue in turn runs its next slot if it can."""
    g = graph(schedule)
    needs, need_starts = g.needs.tolist(), g.need_starts.tolist()
    cursor, last = schedule.starts[:-1].tolist(), schedule.starts[1:].tolist()
    done = [False] * schedule.n_slots
    open_queues = [q for q in range(len(cursor)) if cursor[q] < last[q]]
    order: list[int] = []
    while open_queues:
        before = len(order)
        for q in open_queues:
            i = cursor[q]
            if all(done[needs[e]] for e in range(need_starts[i], need_starts[i + 1])):
                done[i] = True
                cursor[q] = i + 1
                order.append(i)
        if len(order) == before:
            waiting = action_of(int(schedule.codes[schedule.slots[cursor[open_queues[0]]]]))
            raise ScheduleError(
                f"{schedule.name} cannot run: {waiting} waits forever; `check` prints the circle"
            )
        open_queues = [q for q in open_queues if cursor[q] < last[q]]
    return order
