"""The kernel's functions, compiled by numba where it is installed, plain where it is not.

Imports kernel.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

from hocket.planner import kernel


@cache
def kernels() -> Any:
    """The functions of `kernel` by name; `.compiled` says whether numba made them fast."""
    functions = {k: f for k, f in vars(kernel).items() if isinstance(f, FunctionType)}
    try:
        import numba
    except ImportError:
        return SimpleNamespace(**functions, compiled=False)
    names: dict[str, Any] = {"__name__": kernel.__name__, "np": np}
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = before or _folder()
    try:
        for name, function in functions.items():
            copy = FunctionType(function.__code__, names, name)
            copy.__qualname__ = name
            names[name] = _jit(numba, copy)
    finally:
        config.CACHE_DIR = before
    return SimpleNamespace(**{k: names[k] for k in functions}, compiled=True)


def _jit(numba: Any, function: FunctionType) -> Any:
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder that can be written to
        return numba.njit(nogil=True)(function)


def _folder() -> str:
    """The user's cache, apart for each version of the kernel."""
    digest = hashlib.sha256(Path(str(kernel.__file__)).read_bytes()).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return str(root / "hocket" / f"planner-{digest}")
