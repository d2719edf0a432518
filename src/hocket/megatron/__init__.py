"""Runs any order of hocket inside Megatron-LM, in place of its own pipeline schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.megatron.placing import Installed, use
    from hocket.megatron.step import ForwardBackward, forward_backward_func

_HOME = {
    "ForwardBackward": "hocket.megatron.step",
    "Installed": "hocket.megatron.placing",
    "forward_backward_func": "hocket.megatron.step",
    "use": "hocket.megatron.placing",
}

__all__ = ["ForwardBackward", "Installed", "forward_backward_func", "use"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hocket.megatron' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
