"""The functions of `kernel` and `annealing`, compiled where numba is installed."""

from __future__ import annotations

from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

from hocket.compiled import compile_others
from hocket.search import annealing, kernel

_MODULES = (kernel, annealing)
_ENTRIES = ("prepare", "warm", "chance", "anneal")  # called from Python


@cache
def kernels() -> Any:
    """The functions by name; `.compiled` says whether numba made them fast."""
    plain = {k: f for m in _MODULES for k, f in vars(m).items() if isinstance(f, FunctionType)}
    functions = [_chooser() if name == "propose" else f for name, f in plain.items()]
    names = [__name__, *(m.__name__ for m in _MODULES)]
    made = compile_others(
        functions, {"__name__": annealing.__name__, "np": np}, names, _ENTRIES,
        _nrt=False, forceinline=True,
    )  # fmt: skip
    return SimpleNamespace(**{k: (made or plain)[k] for k in plain}, compiled=made is not None)


def _chooser() -> Any:
    """`annealing.propose` with a branch for each entry of the table, which numba can compile."""
    lines = ["def propose(which, T, S, at, right, distance):"]
    for i, move in enumerate(annealing.MOVES):
        call = f"return {move.make.__name__}(T, S, at, right, distance)"
        lines.append(f"    if which == {i}:\n        {call}")
    made: dict[str, Any] = {}
    lines.append("    return False")
    exec(compile("\n".join(lines), str(annealing.__file__), "exec"), made)
    return made["propose"]
