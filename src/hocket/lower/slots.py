"""Puts the forwards of each slot first."""

from __future__ import annotations

import numpy as np

from hocket.ir import Kind, Schedule, kinds_of


def forwards_first(schedule: Schedule) -> Schedule:
    """The schedule with the parts of each slot sorted: forwards, then the rest as it stood.

    A forward's result can then leave while the slot's backward runs, and the messages that
    `insert_communication` adds stand in the order in which they leave.
    """
    later = kinds_of(schedule.codes) != Kind.F
    order = np.lexsort((np.arange(len(later)), later, schedule.slot_of_action))
    return Schedule(
        name=schedule.name,
        placement=schedule.placement,
        queues=schedule.queues,
        codes=schedule.codes[order],
        slots=schedule.slots,
        starts=schedule.starts,
    )
