"""Moves receives in an order: early enough to overlap, late enough to hold few buffers.

A receive that stands late makes its sender wait for the post; one that stands early keeps a buffer,
and with NCCL a spinning kernel, for a message that is not needed yet.
"""

from __future__ import annotations

import numpy as np

from hocket.deps import CONSUMERS, IS_MESSAGE, IS_WORK, SIZED_BY
from hocket.ir import Kind, Line, Schedule, kinds_of, mbs_of, stages_of


def defer_receives(schedule: Schedule, *, lead: int = 1) -> Schedule:
    """The schedule with each RECV moved later, up to `lead` computing slots before its consumer.

    A RECV moves past computation only: never past a communication of its queue, so that every
    channel keeps its order, and never past its consumer.
    """
    lines = {}
    for q, queue in enumerate(schedule.queues):
        slots = range(int(schedule.starts[q]), int(schedule.starts[q + 1]))
        order = _deferred(schedule, slots, lead)
        widths = schedule.widths[order]
        codes = [schedule.codes[schedule.slots[i] : schedule.slots[i + 1]] for i in order]
        joined = np.concatenate(codes) if codes else np.empty(0, dtype=np.int64)
        lines[queue] = Line(joined, widths)
    return Schedule.from_lines(schedule.name, schedule.placement, lines)


def place_receives(schedule: Schedule, *, lead: int = 2) -> Schedule:
    """The schedule with each RECV posted `lead` computing slots before its consumer.

    For transports with tags only: receives may pass each other and the sends. A gradient is never
    posted before the output it belongs to was sent, since that says how large it is.
    """
    lines = {}
    for q, queue in enumerate(schedule.queues):
        slots = range(int(schedule.starts[q]), int(schedule.starts[q + 1]))
        order = _placed(schedule, slots, lead)
        codes = [schedule.codes[schedule.slots[i] : schedule.slots[i + 1]] for i in order]
        joined = np.concatenate(codes) if codes else np.empty(0, dtype=np.int64)
        lines[queue] = Line(joined, schedule.widths[order])
    return Schedule.from_lines(schedule.name, schedule.placement, lines)


def _placed(schedule: Schedule, slots: range, lead: int) -> list[int]:
    """The slots of a queue with the receives at their new places."""
    kinds = kinds_of(schedule.codes).tolist()
    stages, mbs = stages_of(schedule.codes).tolist(), mbs_of(schedule.codes).tolist()
    bounds = schedule.slots.tolist()
    others: list[int] = []  # slots that are not a RECV alone
    computes: list[int] = []  # places in `others` of those that compute
    where: dict[tuple[int, int, int], tuple[int, int]] = {}  # action -> place, computes before it
    receives: list[int] = []
    for i in slots:
        parts = range(bounds[i], bounds[i + 1])
        if len(parts) == 1 and kinds[parts[0]] in CONSUMERS:
            receives.append(i)
            continue
        for a in parts:
            where[kinds[a], stages[a], mbs[a]] = len(others), len(computes)
        if any(IS_WORK[kinds[a]] for a in parts):
            computes.append(len(others))
        others.append(i)
    before: dict[int, list[int]] = {}
    for i in receives:
        a = bounds[i]
        kind, at = Kind(kinds[a]), (stages[a], mbs[a])
        user = min(where[k, *at][1] for k in CONSUMERS[kind] if (k, *at) in where)
        place = computes[max(user - lead, 0)]
        sent = where.get((SIZED_BY[kind], *at)) if kind in SIZED_BY else None
        before.setdefault(place if sent is None else max(place, sent[0] + 1), []).append(i)
    out: list[int] = []
    for place, i in enumerate(others):
        out += [*before.get(place, ()), i]
    return out


def _deferred(schedule: Schedule, slots: range, lead: int) -> list[int]:
    """The slots of a queue in their new order."""
    kinds, stages = kinds_of(schedule.codes), stages_of(schedule.codes)
    mbs = mbs_of(schedule.codes)
    first = schedule.slots[:-1]
    consumed: dict[tuple[int, int, int], int] = {}
    for i in slots:
        for a in range(int(schedule.slots[i]), int(schedule.slots[i + 1])):
            consumed[int(kinds[a]), int(stages[a]), int(mbs[a])] = i
    out: list[int] = []  # built from the back
    for i in reversed(slots):
        a = int(first[i])
        kind = Kind(int(kinds[a])) if schedule.widths[i] == 1 else None
        if kind not in CONSUMERS:
            out.append(i)
            continue
        at = (int(stages[a]), int(mbs[a]))
        users = {consumed.get((int(k), *at)) for k in CONSUMERS[kind]}
        out.insert(_place(out, users, lead, schedule, kinds), i)
    return out[::-1]


def _place(
    out: list[int], users: set[int | None], lead: int, schedule: Schedule, kinds: np.ndarray
) -> int:
    """Where in the reversed line a RECV goes: behind at most the computation it may pass."""
    passed = []  # slots that stand behind the RECV and in front of its user, nearest first
    for i in reversed(out):
        part = kinds[schedule.slots[i] : schedule.slots[i + 1]]
        if i in users or IS_MESSAGE[part].any():
            stopped_by_user = i in users
            break
        passed.append(i)
    else:
        stopped_by_user = False
    moves = max(len(passed) - lead, 0) if stopped_by_user else len(passed)
    return len(out) - moves
