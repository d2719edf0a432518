"""Activations that are made again in the order, as actions of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hocket.deps import BACKWARDS, FORWARDS
from hocket.errors import ScheduleError
from hocket.ir import Action, Kind, Schedule


def recompute(
    schedule: Schedule, stages: Collection[int] | None = None, *, ahead: bool = False
) -> Schedule:
    """The schedule with an R for every microbatch of these stages (left out: of all stages).

    R runs in one slot with its backward, as checkpointing does; ahead: in the slot before, so
    that it need not wait for the gradient. What has an R already keeps it.

    Raises: ScheduleError for a stage that does not exist.
    """
    chosen = known_stages(schedule, stages)
    there = {a for line in schedule.order.values() for slot in line for a in slot}
    order = {
        queue: [new for slot in line for new in _with_r(slot, chosen, there, ahead=ahead)]
        for queue, line in schedule.order.items()
    }
    return Schedule.from_order(schedule.name, schedule.placement, order)


def known_stages(schedule: Schedule, stages: Collection[int] | None) -> Collection[int]:
    """These stages, or where left out all of the schedule.

    Raises: ScheduleError for a stage that does not exist.
    """
    every = range(schedule.placement.n_stages)
    for stage in every if stages is None else stages:
        if stage not in every:
            raise ScheduleError(
                f"{schedule.name} has no stage {stage}; its stages are 0 to {len(every) - 1}"
            )
    return every if stages is None else stages


def _with_r(
    slot: tuple[Action, ...], stages: Collection[int], there: set[Action], *, ahead: bool
) -> Iterator[tuple[Action, ...]]:
    again = (a._replace(kind=Kind.R) for a in slot if a.kind in BACKWARDS and a.stage in stages)
    added = tuple(r for r in again if r not in there)
    forwards = tuple(a for a in slot if a.kind in FORWARDS)
    if ahead:
        yield from ((r,) for r in added)
        yield slot
    else:
        yield (*forwards, *added, *(a for a in slot if a not in forwards))
