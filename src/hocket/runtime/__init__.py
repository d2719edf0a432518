"""Runs schedules on real PyTorch modules; the only part of hocket that imports torch.

Names are imported when first used: the command line reads `runtime.options` without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.runtime.pipeline import Pipeline

__all__ = ["Pipeline"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hocket.runtime' has no attribute {name!r}")
    from hocket.runtime.pipeline import Pipeline

    return Pipeline
