"""Inserts the messages between ranks into an order, so that no transport can deadlock."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket import compiled
from hocket.deps import IS_WORK, MESSAGE
from hocket.errors import ScheduleError
from hocket.graph import graph, sends_first
from hocket.ir import (
    Array,
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
    messages, n = _messages(schedule), len(schedule.queues)
    sequence = _rounds(schedule)
    queue_of_slot = schedule.queue_of_slot
    added = np.bincount(queue_of_slot[schedule.slot_of_action[messages.action]], minlength=n)
    added += np.bincount(messages.receiver, minlength=n)
    code_at, width_at = (
        _starts(np.diff(x) + added) for x in (schedule.slots[schedule.starts], schedule.starts)
    )
    places = np.full(len(schedule.codes), -1, dtype=np.int32)
    places[messages.action] = np.arange(len(messages.action), dtype=np.int32)
    codes = np.empty(code_at[-1], dtype=np.int64)
    widths = np.empty(width_at[-1], dtype=np.int64)
    compiled.run(
        place_messages, len(codes),
        (
            sequence, queue_of_slot, schedule.codes, schedule.slots, messages.send,
            messages.receive, messages.receiver, places,
        ),
        (codes, widths, code_at[:-1].copy(), width_at[:-1].copy()),
    )  # fmt: skip
    slots = _starts(widths)
    for array in (codes, slots, width_at):
        array.flags.writeable = False  # given away, so that Schedule need not copy
    return Schedule(schedule.name, schedule.placement, schedule.queues, codes, slots, width_at)


def _starts(lengths: Array) -> Array:
    """Where each of some parts laid end to end starts, and where the last ends."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def strip_communication(schedule: Schedule) -> Schedule:
    """The schedule without its SEND and RECV actions."""
    return keep(schedule, IS_WORK[kinds_of(schedule.codes)])


def keep(schedule: Schedule, wanted: Array) -> Schedule:
    """The schedule with only the wanted actions, `[action]`, in the order in which they stand."""
    kept = np.zeros(schedule.n_slots, dtype=np.int64)
    np.add.at(kept, schedule.slot_of_action[wanted], 1)
    lines = {}
    for q, queue in enumerate(schedule.queues):
        part = slice(int(schedule.starts[q]), int(schedule.starts[q + 1]))
        first, last = schedule.slots[part.start], schedule.slots[part.stop]
        widths = kept[part]
        lines[queue] = Line(schedule.codes[first:last][wanted[first:last]], widths[widths > 0])
    return Schedule.from_lines(schedule.name, schedule.placement, lines)


def has_wide_messages(schedule: Schedule) -> bool:
    """True where some slot may hold several messages."""
    return schedule.has_communication and not schedule.is_single


def part_messages(schedule: Schedule) -> Schedule:
    """The schedule with the receives of each slot in a slot of their own behind that of its sends.

    So a slot of messages runs where messages occupy their queue.
    """
    if "parted" not in schedule.memo:
        order, opens = sends_first(schedule)
        slots = np.append(np.flatnonzero(opens), len(order))
        starts = np.searchsorted(slots, schedule.slots[schedule.starts])
        schedule.memo["parted"] = Schedule(
            schedule.name, schedule.placement, schedule.queues, schedule.codes[order], slots, starts
        )
    return schedule.memo["parted"]


class _Messages(NamedTuple):
    """The messages of an order: whose result it carries, codes, and the receiving queue."""

    action: Array
    send: Array
    receive: Array
    receiver: Array


def _messages(schedule: Schedule) -> _Messages:
    """One message for each action whose result leaves its rank."""
    table, path_of = schedule.home, schedule.placement.path_by_mb
    lengths = schedule.placement.lengths
    kinds, stages = kinds_of(schedule.codes), stages_of(schedule.codes)
    mbs = mbs_of(schedule.codes)
    ranks = schedule.rank_of_queue
    rows = []
    for kind, (send, receive, offset) in MESSAGE.items():
        (at,) = np.nonzero(kinds == kind)
        to = stages[at] + offset
        inside = (to >= 0) & (to < lengths[mbs[at]])
        at, to = at[inside], to[inside]
        queue = table[path_of[mbs[at]], to]
        own = schedule.queue_of_slot[schedule.slot_of_action[at]]
        leaves = ranks[queue] != ranks[own]
        at, to, queue = at[leaves], to[leaves], queue[leaves]
        sends = encode(int(send), stages[at], mbs[at])
        rows.append((at, sends, encode(int(receive), to, mbs[at]), queue))
    return _Messages(*map(np.concatenate, zip(*rows, strict=True)))


def _rounds(schedule: Schedule) -> Array:
    """An order in which all slots can run: every queue in turn runs its next slot if it can."""
    g, n = graph(schedule), schedule.n_slots
    cursor, sequence = schedule.starts[:-1].copy(), np.zeros(n, dtype=np.int32)
    n_done = compiled.run(
        rounds, n, (schedule.starts, g.need_starts, g.needs),
        (np.zeros(n, dtype=bool), cursor, sequence),
    )  # fmt: skip
    if n_done < n:
        first = cursor[cursor < schedule.starts[1:]][0]
        waiting = action_of(int(schedule.codes[schedule.slots[first]]))
        raise ScheduleError(
            f"{schedule.name} cannot run: {waiting} waits forever; `check` prints the cycle"
        )
    return sequence


# --- loops, plain or compiled ------------------------------------------------------------------


def rounds(starts, need_starts, needs, done, cursor, sequence):
    """An order in which all slots can run: every queue in turn runs its next slot if it can.

    Returns how many slots ran.
    """
    n, n_done, before = len(sequence), 0, -1
    while n_done < n and n_done > before:
        before = n_done
        for q in range(len(starts) - 1):
            i = cursor[q]
            if i == starts[q + 1]:
                continue
            free = True
            for e in range(need_starts[i], need_starts[i + 1]):
                if not done[needs[e]]:
                    free = False
                    break
            if free:
                done[i] = True
                cursor[q] = i + 1
                sequence[n_done] = i
                n_done += 1
    return n_done


def place_messages(
    sequence, queue_of_slot, codes, slots, sends, receives, receiver, places, new_codes, new_widths,
    code_at, width_at,
):  # fmt: skip
    """Lays slots down in `sequence`, each message behind its sender's slot and at its receiver.

    `places[a]` is the row of action a's message in `sends`, `receives`, `receiver`; below 0: none.
    Queue q writes from `code_at[q]` and `width_at[q]` on.
    """
    for slot in sequence:
        q = queue_of_slot[slot]
        for a in range(slots[slot], slots[slot + 1]):
            new_codes[code_at[q]] = codes[a]
            code_at[q] += 1
        new_widths[width_at[q]] = slots[slot + 1] - slots[slot]
        width_at[q] += 1
        for a in range(slots[slot], slots[slot + 1]):
            k = places[a]
            if k >= 0:
                to = receiver[k]
                new_codes[code_at[q]], new_widths[width_at[q]] = sends[k], 1
                code_at[q] += 1
                width_at[q] += 1
                new_codes[code_at[to]], new_widths[width_at[to]] = receives[k], 1
                code_at[to] += 1
                width_at[to] += 1
