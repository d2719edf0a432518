"""The planner: the best schedule for these costs under this memory, and how good it can be.

Names are imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.planner.planning import Progress, plan
    from hocket.planner.request import Entrant, Plan, Request

_HOME = {"Entrant": "request", "Plan": "request", "Request": "request", "Progress": "planning",
         "plan": "planning"}  # fmt: skip

__all__ = ["Entrant", "Plan", "Progress", "Request", "plan"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hocket.planner' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"hocket.planner.{_HOME[name]}"), name)
