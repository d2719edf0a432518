"""The forward half of an order, for evaluation. Imports ir."""

from __future__ import annotations

import numpy as np

from hocket.ir import Kind, Line, Schedule, kinds_of


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule with only its forwards, in the order in which they stand."""
    forward = kinds_of(schedule.codes) == Kind.F
    kept = np.zeros(schedule.n_slots, dtype=np.int64)
    np.add.at(kept, schedule.slot_of_action[forward], 1)
    lines = {}
    for q, queue in enumerate(schedule.queues):
        part = slice(int(schedule.starts[q]), int(schedule.starts[q + 1]))
        first, last = schedule.slots[part.start], schedule.slots[part.stop]
        widths = kept[part]
        lines[queue] = Line(schedule.codes[first:last][forward[first:last]], widths[widths > 0])
    return Schedule.from_lines(schedule.name, schedule.placement, lines)
