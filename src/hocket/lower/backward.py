"""The same order with every backward split into I and W, or whole again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hocket.ir import Action, Kind, Schedule

Actions = tuple[Action, ...]


def split_backward(schedule: Schedule) -> Schedule:
    """The schedule with I in place of each B, and its W in a slot of its own right after."""

    def apart(slot: Actions) -> Iterator[Actions]:
        yield tuple(a._replace(kind=Kind.I) if a.kind == Kind.B else a for a in slot)
        yield from ((a._replace(kind=Kind.W),) for a in slot if a.kind == Kind.B)

    return _changed(schedule, apart)


def whole_backward(schedule: Schedule) -> Schedule:
    """The schedule with B in place of each I, and without W."""

    def together(slot: Actions) -> Iterator[Actions]:
        kept = tuple(a for a in slot if a.kind != Kind.W)
        if kept:
            yield tuple(a._replace(kind=Kind.B) if a.kind == Kind.I else a for a in kept)

    return _changed(schedule, together)


def merge_backward(schedule: Schedule) -> tuple[Schedule, int]:
    """The schedule with B in place of each I whose W is the next slot of its queue, and how many.

    It is faster where B costs less than I + W and nobody waits for the I.
    """
    count, order = 0, {}
    for queue in schedule.queues:
        line: list[Actions] = []
        for slot in schedule.line(queue):
            halves = [slot[0]._replace(kind=Kind.I)] if slot[0].kind == Kind.W else []
            if len(slot) == 1 and line and halves and halves[0] in line[-1]:
                line[-1] = tuple(a._replace(kind=Kind.B) if a == halves[0] else a for a in line[-1])
                count += 1
            else:
                line.append(tuple(slot))
        order[queue] = line
    return Schedule.from_order(schedule.name, schedule.placement, order), count


def _changed(schedule: Schedule, change: Callable[[Actions], Iterator[Any]]) -> Schedule:
    order = {q: [new for slot in schedule.line(q) for new in change(slot)] for q in schedule.queues}
    return Schedule.from_order(schedule.name, schedule.placement, order)
