"""Runs schedules on real PyTorch modules; the only part of hocket that imports torch.

Names are imported when first used: `hocket.runtime` itself loads without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.interop.torch.runtime import torch_schedule
    from hocket.runtime.checkpoint import Checkpoints
    from hocket.runtime.pipeline import Hooks, Pipeline
    from hocket.runtime.records import record

_HOME = {
    "Checkpoints": "hocket.runtime.checkpoint",
    "Hooks": "hocket.runtime.pipeline",
    "Pipeline": "hocket.runtime.pipeline",
    "record": "hocket.runtime.records",
    "torch_schedule": "hocket.interop.torch.runtime",
}

__all__ = ["Checkpoints", "Hooks", "Pipeline", "record", "torch_schedule"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hocket.runtime' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
