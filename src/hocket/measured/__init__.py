"""Recorded times as timelines, put on one clock (`clocks`), and the costs in them (`readings`)."""

from __future__ import annotations

from hocket.costs import Ticks
from hocket.ir import Array, Schedule
from hocket.timeline import Timeline


def timeline_of(
    schedule: Schedule,
    start: Array,
    end: Array,
    *,
    around: tuple[Array, Array] | None = None,
    unit: str = "us",
) -> Timeline:
    """The measured timeline of a schedule whose every action has times, `[action]`.

    around: how long each slot occupies its queue before and after its work, `[slot]` both.
    """
    return Timeline(
        schedule=schedule, start=start, end=end, around=around, ticks=Ticks(1, exact=False),
        unit=unit, measured=True,
    )  # fmt: skip
