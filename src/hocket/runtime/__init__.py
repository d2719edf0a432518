"""Runs schedules on real PyTorch modules; the only part of hocket that imports torch.

Names are imported when first used: `hocket.runtime` itself loads without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.interop.torch.runtime import torch_schedule
    from hocket.runtime.checkpoint import Checkpoints
    from hocket.runtime.compiled import split_backend
    from hocket.runtime.huggingface import load_stage, split_model
    from hocket.runtime.pipeline import Hooks, Pipeline
    from hocket.runtime.records import record
    from hocket.runtime.split import put_off

_HOME = {
    "Checkpoints": "hocket.runtime.checkpoint",
    "Hooks": "hocket.runtime.pipeline",
    "Pipeline": "hocket.runtime.pipeline",
    "load_stage": "hocket.runtime.huggingface",
    "put_off": "hocket.runtime.split",
    "record": "hocket.runtime.records",
    "split_backend": "hocket.runtime.compiled",
    "split_model": "hocket.runtime.huggingface",
    "torch_schedule": "hocket.interop.torch.runtime",
}

__all__ = [
    "Checkpoints", "Hooks", "Pipeline", "load_stage", "put_off", "record", "split_backend",
    "split_model", "torch_schedule",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hocket.runtime' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
