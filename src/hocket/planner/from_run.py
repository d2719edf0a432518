"""A recorded run and what a better order of it would gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.errors import UsageError
from hocket.interop.traces.load import Loaded, load_foreign
from hocket.timeline import Timeline

if TYPE_CHECKING:
    from hocket.ir import Schedule
    from hocket.planner import Plan, Request


@dataclass(frozen=True)
class WhatIf:
    """A run and a plan for it.

    loaded: what the files say. now: the run's own order under the costs read from it; the plan is
    compared with that, since both lack what costs do not say.
    """

    loaded: Loaded
    now: Timeline
    plan: Plan
    notes: tuple[str, ...]

    @property
    def gain(self) -> float:
        """The share of the step that the planned order saves."""
        return 1 - float(self.plan.makespan) / float(self.now.makespan)

    @property
    def _effect(self) -> str:
        gain = self.gain
        return f"save {gain:.1%} of the step" if gain >= 0 else f"take {-gain:.1%} longer"

    def as_json(self) -> dict[str, Any]:
        """Plain data with stable keys; times in `unit`."""
        seen = self.loaded.timeline
        return {
            "schedule": self.loaded.schedule.name,
            "unit": self.now.unit,
            "measured": None if seen is None else float(seen.makespan),
            "now": float(self.now.makespan),
            "planned": float(self.plan.makespan),
            "gain": self.gain,
            "floor": float(self.plan.bound.value),
            "order": self.plan.schedule.name,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from hocket.tables import format_time

        seen, unit = self.loaded.timeline, self.now.unit
        lines = []
        if seen is not None:
            lines.append(f"measured {format_time(seen.makespan, unit)}")
        lines += [
            f"the order that ran: {format_time(self.now.makespan, unit)} under the costs read back",
            f"the order planned: {format_time(self.plan.makespan, unit)} "
            f"({self.plan.schedule.name}, {self.plan.found_by})",
            f"it would {self._effect}; nothing in this placement is faster than "
            f"{format_time(self.plan.bound.value, unit)}",
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def what_if(paths: Sequence[str | Path], *, step: int | None = None, **limits: Any) -> WhatIf:
    """A better order for a recorded run: same placement, no rank fuller than its fullest.

    limits: fields of `hocket.planner.Request` that replace those taken from the run, such as
    in_flight, memory, time_limit, split or shapes.

    Raises: UsageError where the files hold no times, PlanError where nothing fits.
    """
    from hocket.planner import plan
    from hocket.simulator import simulate

    loaded = load_foreign(paths, step=step)
    if loaded.costs is None:
        raise UsageError(f"{paths[0]} holds an order but no times; give traces of a run")
    now = simulate(loaded.schedule, loaded.costs)
    notes = []
    if not loaded.schedule.has_split_backward and limits.get("split") is None:
        notes.append("the run has full backwards; I and W are taken as halves of them")
    return WhatIf(loaded, now, plan(request_of(loaded, now, **limits)), tuple(notes))


def request_of(loaded: Loaded, now: Timeline, **limits: Any) -> Request:
    """The request to the planner that fits a recorded run."""
    from hocket.planner import Request

    schedule = loaded.schedule
    v = max(1, schedule.placement.n_stages // schedule.p)
    asked: dict[str, Any] = {
        "p": schedule.p,
        "m": schedule.m,
        "costs": loaded.costs,
        "v": (v,),
        "in_flight": max(1 / v, float(max(now.in_flight))),
        "copies": max(1, round(schedule.placement.weight_copies)),
    }
    if "shapes" not in limits:
        asked["shapes"] = (_shape(schedule, v),)
    return Request(**{**asked, **limits})


def _shape(schedule: Schedule, v: int) -> str:
    """The planner's name of a placement."""
    from hocket.planner.request import shape_of

    name = shape_of(schedule.placement.paths, schedule.p, schedule.m, v)
    if name is None:
        raise UsageError(
            f"the planner has no placement like that of {schedule.name}; name others to try "
            "(shapes)"
        )
    return name
