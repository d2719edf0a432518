"""Runs schedules on real PyTorch modules; the only part of hocket that imports torch.

Names are imported when first used: the command line reads `runtime.options` without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.runtime.pipeline import Pipeline
    from hocket.runtime.torch_runtime import torch_schedule

_HOME = {"Pipeline": "pipeline", "torch_schedule": "torch_runtime"}

__all__ = ["Pipeline", "torch_schedule"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hocket.runtime' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"hocket.runtime.{_HOME[name]}"), name)
