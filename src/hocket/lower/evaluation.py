"""The forward half of an order, for evaluation."""

from __future__ import annotations

from hocket.ir import Kind, Schedule, kinds_of
from hocket.lower.communication import keep


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule with only its forwards, in the order in which they stand."""
    return keep(schedule, kinds_of(schedule.codes) == Kind.F)
