"""A batch cut into microbatches, and those into slices; how much each of them weighs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from hocket.errors import RunError
from hocket.runtime.values import map_tensors, tensors_of


def microbatches(
    batch: Any, m: int, what: str, device: torch.device, slices: int = 1
) -> Sequence[Any]:
    """The batch as m microbatches: a list is ready, anything else is split along dimension 0.

    With slices it is split into m / slices parts, and each of these along dimension 1, the
    positions, into slices. Tensors are split as `torch.tensor_split` does, those without
    positions in rows only; other parts go to every microbatch as they are. Tensors are moved to
    the device and cut off from any graph.

    Raises: RunError where there are too few rows or positions, or not m ready microbatches.
    """
    if isinstance(batch, list) and len(batch) != m:
        cut = f" ({m // slices} of {slices} slices)" if slices > 1 else ""
        raise RunError(f"{what} has {len(batch)} microbatches, but the schedule has {m}{cut}")
    batch = map_tensors(batch, lambda t: t.detach().to(device))
    if isinstance(batch, list):
        return batch
    _check_size(batch, 0, m // slices, what)
    if slices > 1:
        _check_size(batch, 1, slices, what)
    if isinstance(batch, Tensor):
        return _parts(batch, m, slices)
    parts: dict[int, Sequence[Tensor]] = {}

    def part(t: Tensor, mb: int) -> Tensor:
        if not t.dim():
            return t
        if id(t) not in parts:
            parts[id(t)] = _parts(t, m, slices)
        return parts[id(t)][mb]

    return [map_tensors(batch, lambda t, mb=mb: part(t, mb)) for mb in range(m)]


def _check_size(batch: Any, dim: int, parts: int, what: str) -> None:
    """Raises RunError where a dimension of the batch cannot be split into that many parts."""
    name, pieces = (("rows", "microbatches"), ("positions (dimension 1)", "slices"))[dim]
    sizes = {t.shape[dim] for t in tensors_of(batch) if t.dim() > dim}
    if not sizes:
        raise RunError(f"{what} has no tensor with {name} to split into {parts} {pieces}")
    if len(sizes) > 1:
        raise RunError(f"the tensors of {what} differ in {name}: {sorted(sizes)}")
    (size,) = sizes
    if size < parts:
        raise RunError(f"{what} has {size} {name}, too few for {parts} {pieces}")


def _parts(t: Tensor, m: int, slices: int) -> Sequence[Tensor]:
    """A tensor as m microbatches; slices lie in memory as if they were all there is."""
    if slices == 1:
        return torch.tensor_split(t, m)
    rows = torch.tensor_split(t, m // slices)
    if t.dim() < 2:
        return [row for row in rows for _ in range(slices)]
    cut = (torch.tensor_split(row, slices, dim=1) for row in rows)
    return [part.contiguous() for part in chain.from_iterable(cut)]


def shares(
    values: Sequence[Any], weights: Sequence[float] | None, slices: int = 1
) -> tuple[float, ...]:
    """The weight of each microbatch in the gradient: its share of the rows, unless given.

    With slices it is the share of the positions of all rows. Microbatches without rows (a number
    as target) weigh the same.

    Raises: RunError for the wrong number of weights.
    """
    m = len(values)
    if weights is not None:
        if len(weights) != m:
            raise RunError(
                f"there are {len(weights)} weights, but the schedule has {m} microbatches"
            )
        return tuple(float(w) for w in weights)
    dims = 1 if slices == 1 else 2
    sizes = [_extent(v, dims) for v in values]
    if None in sizes:
        return (1 / m,) * m
    total = sum(n for n in sizes if n is not None)
    if not total:
        raise RunError("the batch has no rows")
    return tuple((n or 0) / total for n in sizes)


def _extent(value: Any, dims: int) -> int | None:
    """Rows of a microbatch, or with two dims its rows times positions."""
    shape = next((t.shape for t in tensors_of(value) if t.dim() >= dims), None)
    return None if shape is None else prod(shape[:dims])
