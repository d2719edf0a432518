"""Loops over arrays: plain Python, or the same functions compiled by numba; `run` chooses.

A loop reads arrays and numbers and writes to arrays. Each stands beside its caller. No rule is
written in one: what waits for what comes in as arrays made from `deps.py`. A call loads numba where
it is itself large enough to be worth that, or once the calls of a session have been. Small calls
never ask for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from hocket import codes

Function = Callable[..., Any]

# `i & ROOM` is i. It tells the compiler that an index is not below 0, so that the compiled loop
# does not look for negative ones: a fifth of the time of the loops that use it.
ROOM = (1 << 40) - 1

# What numba's import and its loading of cached code cost, counted in actions that one plain loop
# could have gone over in that time; a call runs several.
WORTH = 100_000
LONG = 30 * WORTH  # a session that plain loops have gone over for so long is no short one
SMALLEST = 4_000  # below it plain loops and numpy are fast enough


class _Chooser:
    """Which loops run compiled, and the compiled ones."""

    def __init__(self) -> None:
        self.forced: bool | None = None
        self._numba: Any = None
        self._absent = False
        self._spent = 0
        self._compiled: dict[Function, Function] = {}

    def choose(self, loop: Function, size: int) -> Function | None:
        """The compiled loop, if it is to be used for this many actions."""
        if not self.forced:
            if self.forced is False or self._absent or size < SMALLEST:
                return None
            if self._numba is None and size < WORTH:
                self._spent += size
                if self._spent < LONG:
                    return None
        return self._compiled.get(loop) or self._compile(loop)

    def _compile(self, loop: Function) -> Function | None:
        numba = self.numba()
        if numba is not None:
            self._compiled[loop] = _compile(numba, loop, self._compiled)
        return self._compiled.get(loop)

    def numba(self) -> Any:
        """numba, loaded at the first use; None where it is not installed."""
        if self._numba is None and not self._absent:
            try:
                import numba
            except ImportError:
                self._absent = True
                return None
            self._numba = numba
            # Once an array of this size was freed, the C library keeps what arrays leave behind
            # for the next ones instead of clearing new memory for each: a third of the time.
            np.empty(31 << 20, dtype=np.uint8)
        return self._numba


_chooser = _Chooser()


def run(
    loop: Function, size: int, inputs: Sequence[Any], outputs: Sequence[np.ndarray] = ()
) -> Any:
    """What `loop(*inputs, *outputs)` returns; it writes to the outputs.

    size: how many actions it goes over, which decides whether it runs compiled.
    """
    fast = choose(loop, size)
    if fast is not None:
        return fast(*inputs, *outputs)
    lists = [x.tolist() for x in outputs]
    values = [x.tolist() if isinstance(x, np.ndarray) else x for x in inputs]
    result = loop(*values, *lists)
    for array, written in zip(outputs, lists, strict=True):
        array[...] = written
    return result


def choose(loop: Function, size: int) -> Function | None:
    """The compiled loop, if `run` would use it: for callers that have numpy do the work else."""
    return _chooser.choose(loop, size)


def is_compiled() -> bool:
    """True when numba is installed (loads it)."""
    return _chooser.forced is not False and _chooser.numba() is not None


@contextmanager
def forced(compiled: bool | None) -> Generator[None]:
    """Inside it every loop runs compiled (True), or none does (False): for tests and benchmarks."""
    before, _chooser.forced = _chooser.forced, compiled
    try:
        yield
    finally:
        _chooser.forced = before


# --- compiling ----------------------------------------------------------------------------------


def _compile(numba: Any, loop: Any, known: dict[Function, Function]) -> Function:
    """The loop, compiled when first called, and the functions that it calls."""
    if loop.__module__ == codes.__name__:
        return numba.njit(inline="always")(loop)
    names: dict[str, Any] = {"__name__": loop.__module__}
    for name in set(loop.__code__.co_names) & set(loop.__globals__):
        value = names[name] = loop.__globals__[name]
        if isinstance(value, FunctionType):
            if value not in known:
                known[value] = _compile(numba, value, known)
            names[name] = known[value]
    with _cache_folder(numba, {loop.__module__, codes.__name__}):
        return _jit(numba, FunctionType(loop.__code__, names, loop.__name__))


# Of a function that only compiled ones call: what would let Python and C call it takes as long to
# compile as the function.
_INNER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def compile_others(
    functions: Sequence[Any], names: dict[str, Any], modules: Sequence[str],
    entries: Sequence[str], **options: Any,
) -> dict[str, Function] | None:  # fmt: skip
    """Functions of other modules by name, compiled when first called; None without numba.

    names: what they use beside each other; modules: whose sources their code depends on; entries:
    those that Python calls; options: of numba.
    """
    numba = _chooser.numba()
    if numba is None:
        return None
    with _cache_folder(numba, modules):
        for function in functions:
            copy = FunctionType(function.__code__, names, function.__name__)
            inner = {} if function.__name__ in entries else _INNER
            names[function.__name__] = _jit(numba, copy, **options, **inner)
    return names


def _jit(numba: Any, function: Function, **options: Any) -> Function:
    try:
        return numba.njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # no folder that can be written to
        return numba.njit(nogil=True, **options)(function)


@contextmanager
def _cache_folder(numba: Any, modules: Iterable[str]) -> Generator[None]:
    """Lets numba keep compiled code in the user's cache, apart for each version of the sources."""
    import hashlib

    digest = hashlib.sha256()
    for module in sorted(modules):
        digest.update(Path(str(sys.modules[module].__file__)).read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    before = numba.config.CACHE_DIR
    if not before:
        numba.config.CACHE_DIR = str(root / "hocket" / digest.hexdigest()[:16])
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before
