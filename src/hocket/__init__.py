"""Schedules of pipeline-parallel training: generate, check, predict, see, run.

Names are imported when first used, so that `import hocket` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.checker import Report, check
    from hocket.costs import Bytes, Costs, load_costs
    from hocket.errors import HocketError
    from hocket.formats import write_trace
    from hocket.ir import Action, Kind, Placement, Schedule
    from hocket.planner import Request, plan
    from hocket.schedules import build
    from hocket.simulator import simulate
    from hocket.text import dumps, loads
    from hocket.timeline import Timeline

__version__ = "0.2.0"

_HOME = {
    "Action": "ir",
    "Bytes": "costs",
    "Costs": "costs",
    "HocketError": "errors",
    "Kind": "ir",
    "Placement": "ir",
    "Report": "checker",
    "Request": "planner",
    "Schedule": "ir",
    "Timeline": "timeline",
    "build": "schedules",
    "check": "checker",
    "dumps": "text",
    "load_costs": "costs",
    "loads": "text",
    "plan": "planner",
    "simulate": "simulator",
    "write_trace": "formats",
}

__all__ = [
    "Action", "Bytes", "Costs", "HocketError", "Kind", "Placement", "Report", "Request", "Schedule",
    "Timeline", "build", "check", "dumps", "load_costs", "loads", "plan", "simulate", "write_trace",
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
