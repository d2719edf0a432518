"""Schedules of pipeline-parallel training: generate, check, predict, see, run.

Names are imported when first used, so that `import hocket` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.checker import Report, check
    from hocket.costs import Bytes, Costs, load_costs
    from hocket.errors import (
        Code,
        CostError,
        HocketError,
        PlanError,
        Problem,
        RunError,
        ScheduleError,
        TextError,
        UsageError,
    )
    from hocket.formats import write_trace
    from hocket.ir import Action, Kind, Placement, Schedule
    from hocket.planner import Request, plan
    from hocket.schedules import build
    from hocket.simulator import simulate
    from hocket.text import dumps, loads
    from hocket.timeline import Timeline

__version__ = "0.2.0"

_NAMES = {
    "checker": "Report check",
    "costs": "Bytes Costs load_costs",
    "errors": "Code CostError HocketError PlanError Problem RunError ScheduleError TextError "
    "UsageError",
    "formats": "write_trace",
    "ir": "Action Kind Placement Schedule",
    "planner": "Request plan",
    "schedules": "build",
    "simulator": "simulate",
    "text": "dumps loads",
    "timeline": "Timeline",
}

_HOME = {name: room for room, names in _NAMES.items() for name in names.split()}

__all__ = [
    "Action", "Bytes", "Code", "CostError", "Costs", "HocketError", "Kind", "Placement",
    "PlanError", "Problem", "Report", "Request", "RunError", "Schedule", "ScheduleError",
    "TextError", "Timeline", "UsageError", "build", "check", "dumps", "load_costs", "loads",
    "plan", "simulate", "write_trace",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hocket' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"hocket.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
