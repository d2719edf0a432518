"""Activations that wait in host memory between their forward and their backward."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from hocket.deps import BACKWARDS, FORWARDS, Kind
from hocket.engine import longest_path
from hocket.graph import graph
from hocket.ir import Action, Queue, Schedule, Slot
from hocket.lower.recomputation import known_stages

HOST = "host"
_MOVES = (Kind.D, Kind.A, Kind.U)


def offload(schedule: Schedule, stages: Collection[int] | None = None) -> Schedule:
    """The schedule with the activations of these stages (left out: of all) in host memory.

    D follows its forward, on the queue `host` of the rank. One slot before the backward's, A takes
    the room and U starts. What has fewer than two slots in between, or has an R or a D already,
    stays.

    Raises: ScheduleError for a stage that does not exist.

    Source: AMD Primus, offload of the first leg of V schedules.
    """
    chosen = known_stages(schedule, stages)
    g = graph(schedule)
    steps = longest_path(g, np.ones(g.n_nodes, dtype=np.int64), np.zeros(len(g.needs), np.int64))
    starts = iter(steps.start[g.node_of_action[schedule.slots[:-1]]].tolist())
    when = {queue: [next(starts) for _ in line] for queue, line in schedule.order.items()}
    moved = {a[1:] for line in schedule.order.values() for slot in line for a in slot
             if a.kind in (Kind.R, Kind.D)}  # fmt: skip
    order: dict[Queue, list[Slot]] = {}
    copies: dict[Queue, list[tuple[int, Slot]]] = {}
    for queue, line in schedule.order.items():
        host = copies.setdefault(Queue(queue.rank, HOST), [])
        if queue.stream == HOST:
            host += zip(when[queue], line, strict=True)
            continue
        rooms: dict[int, list[Slot]] = {}
        for action, first, last in _lives(line):
            if action.stage in chosen and action[1:] not in moved and last > first + 2:
                out, room, back = (Slot([action._replace(kind=k)]) for k in _MOVES)
                host += [(when[queue][first] + 1, out), (when[queue][last - 1], back)]
                rooms.setdefault(last - 1, []).append(room)
        order[queue] = [new for i, slot in enumerate(line) for new in (*rooms.get(i, ()), slot)]
    order |= {queue: _in_time(host) for queue, host in copies.items() if host}
    return Schedule.from_order(schedule.name, schedule.placement, order)


def _lives(line: list[Slot]) -> Iterator[tuple[Action, int, int]]:
    """Each forward of a queue with its slot and that of its backward."""
    place: Mapping[tuple[int, int], int] = {
        a[1:]: i for i, slot in enumerate(line) for a in slot if a.kind in BACKWARDS
    }
    for i, slot in enumerate(line):
        yield from ((a, i, place[a[1:]]) for a in slot if a.kind in FORWARDS and a[1:] in place)


def _in_time(host: list[tuple[int, Slot]]) -> list[Slot]:
    """The copies of a rank in the order of their times, those out first."""
    return [slot for _, slot in sorted(host, key=lambda x: (x[0], x[1][0].kind))]
