"""What stages hand to each other: nested values, taken apart and put together again.

Holds the structure, shapes and memory layout of a value; knows nothing of messages or schedules.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hocket.errors import RunError

Structure = Any  # "T" a tensor, "N" None, ["c", x] a plain value, ["t" | "l", parts], ["d", pairs]
PLAIN = (bool, int, float, str)
LINE = 64  # payloads start on cache lines
LARGE = 1 << 16  # bytes from which on a tensor travels alone, without a copy


class TensorSpec(NamedTuple):
    """Shape, dtype and whether a gradient comes back."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class Place(NamedTuple):
    """Where a tensor lies in a packed buffer; `offset` and `strides` count elements."""

    shape: torch.Size
    dtype: torch.dtype
    strides: tuple[int, ...]
    offset: int


class Layout:
    """How tensors travel: one packed buffer of `nbytes`, and the large ones on their own.

    The buffer starts with a header of `head` bytes. `places[i]` is None for a large tensor.
    `pool` holds packed buffers that wait to be used again.
    """

    def __init__(self, tensors: Sequence[TensorSpec], head: int, alone: bool) -> None:
        self.tensors = tuple(tensors)
        self.places: list[Place | None] = []
        at = self.head = head
        for spec in self.tensors:
            if alone and spec.nbytes >= LARGE:
                self.places.append(None)
                continue
            self.places.append(
                Place(spec.shape, spec.dtype, _strides(spec.shape), at // spec.dtype.itemsize)
            )
            at += -(-spec.nbytes // LINE) * LINE
        self.nbytes = at
        self.large = [s for s, place in zip(self.tensors, self.places, strict=True) if not place]
        self.pool: list[Any] = []

    def views(self, buffer: Tensor) -> list[Tensor | None]:
        """The packed tensors inside a uint8 buffer of `nbytes`."""
        return [
            place and buffer.view(place.dtype).as_strided(place.shape, place.strides, place.offset)
            for place in self.places
        ]


def _is_plain(t: Tensor) -> bool:
    """Whether a tensor is dense memory of this rank: neither sparse, nor a DTensor or the like."""
    return t.layout is torch.strided and type(t).__torch_dispatch__ is Tensor.__torch_dispatch__


def _strides(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class Spec:
    """Structure and tensors of one value; equal specs travel alike."""

    def __init__(self, structure: Structure, tensors: Sequence[TensorSpec]) -> None:
        self.structure = structure
        self.tensors = tuple(tensors)
        self.single = self.tensors[0] if structure == "T" else None

    @classmethod
    def of(cls, structure: Structure, tensors: Sequence[Tensor]) -> Spec:
        """The spec of a value that `flatten` took apart.

        Raises: RunError for a tensor that is not dense memory of this rank.
        """
        for t in tensors:
            if not _is_plain(t):
                sparse = t.layout is not torch.strided
                kind, way = (
                    ("sparse tensor", "to_dense") if sparse else (type(t).__name__, "to_local")
                )
                raise RunError(
                    f"the output is a {kind}; stages hand over dense tensors of their own rank: "
                    f"return x.{way}()"
                )
        return cls(structure, [TensorSpec(t.shape, t.dtype, t.requires_grad) for t in tensors])

    def fits(self, structure: Structure, tensors: Sequence[Tensor]) -> bool:
        """Whether this value has exactly this spec."""
        one = self.single
        if one is not None and structure == "T":
            t = tensors[0]
            return (
                t.shape == one.shape
                and t.dtype is one.dtype
                and t.requires_grad is one.requires_grad
                and _is_plain(t)
            )
        return (
            structure == self.structure
            and self.tensors
            == tuple(TensorSpec(t.shape, t.dtype, t.requires_grad) for t in tensors)
            and all(map(_is_plain, tensors))
        )

    @cached_property
    def gradients(self) -> tuple[TensorSpec, ...]:
        """The tensors for which a gradient comes back: the ones that require it."""
        return tuple(s for s in self.tensors if s.requires_grad)

    @cached_property
    def key(self) -> bytes:
        """The spec as bytes; `Spec.read` turns them back."""
        rows = [[list(s.shape), str(s.dtype)[6:], s.requires_grad] for s in self.tensors]
        return json.dumps([self.structure, rows]).encode()

    @classmethod
    def read(cls, key: bytes) -> Spec:
        """The spec that `key` was made from."""
        structure, rows = json.loads(key)
        return cls(
            structure,
            [TensorSpec(torch.Size(s), getattr(torch, dtype), rg) for s, dtype, rg in rows],
        )


def flatten(value: Any, where: str = "value") -> tuple[Structure, list[Tensor]]:
    """Structure of a value, and its tensors from left to right.

    Raises: RunError for a part that stages cannot hand over; `where` names the value.
    """
    if isinstance(value, Tensor):
        return "T", [value]
    tensors: list[Tensor] = []
    return _take(value, tensors, where), tensors


def _take(value: Any, tensors: list[Tensor], where: str) -> Structure:
    if isinstance(value, Tensor):
        tensors.append(value)
        return "T"
    if value is None:
        return "N"
    if isinstance(value, PLAIN):
        return ["c", value]
    if isinstance(value, tuple | list):
        parts = [_take(v, tensors, f"{where}[{i}]") for i, v in enumerate(value)]
        return ["t" if isinstance(value, tuple) else "l", parts]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, PLAIN):
                raise RunError(f"{where} has the key {key!r}; keys must be text or numbers")
        return ["d", [[k, _take(v, tensors, f"{where}[{k!r}]")] for k, v in value.items()]]
    raise RunError(
        f"{where} is a {type(value).__name__}; stages hand over tensors, None, plain values, and "
        "tuples, lists and dicts of these"
    )


def rebuild(structure: Structure, tensors: Sequence[Tensor]) -> Any:
    """The value that `flatten` took apart, with these tensors."""
    if structure == "T":
        return tensors[0]
    return _put(structure, iter(tensors))


def _put(structure: Structure, tensors: Any) -> Any:
    if structure == "T":
        return next(tensors)
    if structure == "N":
        return None
    tag, parts = structure
    if tag == "c":
        return parts
    if tag == "d":
        return {key: _put(part, tensors) for key, part in parts}
    made = [_put(part, tensors) for part in parts]
    return tuple(made) if tag == "t" else made


def map_tensors(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """The value with `fn` applied to its tensors; parts of other kinds stay as they are."""
    return fn(value) if isinstance(value, Tensor) else tree_map_only(Tensor, fn, value)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a value, from left to right."""
    leaves = [value] if isinstance(value, Tensor) else tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def arguments(value: Any, **more: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and keyword arguments of a module called with a value, and with `more`."""
    if isinstance(value, tuple):
        return value, more
    return ((), value | more) if isinstance(value, dict) else ((value,), more)


def keywords(module: Any) -> list[str] | None:
    """The names that a module's forward takes arguments by; None where it takes any."""
    forward = getattr(module, "_orig_mod", module).forward
    parameters = inspect.signature(forward).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    unnamed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    return [p.name for p in parameters if p.kind not in unnamed]


def call(module: Callable[..., Any], value: Any, **more: Any) -> Any:
    """The module's output: a tuple is positional arguments, a dict keyword arguments."""
    if isinstance(value, Tensor):
        return module(value, **more)
    args, kwargs = arguments(value, **more)
    return module(*args, **kwargs)
