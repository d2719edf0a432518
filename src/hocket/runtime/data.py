"""A batch cut into microbatches, and how much each of them weighs.

Imports torch, values and errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.errors import RunError
from hocket.runtime.values import map_tensors, tensors_of


def microbatches(batch: Any, m: int, what: str, device: torch.device) -> Sequence[Any]:
    """The batch as m microbatches: a list is ready, anything else is split along dimension 0.

    Tensors with dimensions are split as `torch.tensor_split` does; other parts go to every
    microbatch as they are. Tensors are moved to the device and cut off from any graph.

    Raises: RunError where there are fewer rows than microbatches, or not m ready ones.
    """
    if isinstance(batch, list) and len(batch) != m:
        raise RunError(f"{what} has {len(batch)} microbatches, but the schedule has {m}")
    batch = map_tensors(batch, lambda t: t.detach().to(device))
    if isinstance(batch, list):
        return batch
    sizes = {t.shape[0] for t in tensors_of(batch) if t.dim()}
    if not sizes:
        raise RunError(f"{what} has no tensor with rows to split into {m} microbatches")
    if len(sizes) > 1:
        raise RunError(f"the tensors of {what} differ in rows: {sorted(sizes)}")
    (rows,) = sizes
    if rows < m:
        raise RunError(f"{what} has {rows} rows, too few for {m} microbatches")
    if isinstance(batch, Tensor):
        return torch.tensor_split(batch, m)
    parts: dict[int, Sequence[Tensor]] = {}

    def part(t: Tensor, mb: int) -> Tensor:
        if not t.dim():
            return t
        if id(t) not in parts:
            parts[id(t)] = torch.tensor_split(t, m)
        return parts[id(t)][mb]

    return [map_tensors(batch, lambda t, mb=mb: part(t, mb)) for mb in range(m)]


def shares(values: Sequence[Any], weights: Sequence[float] | None) -> tuple[float, ...]:
    """The weight of each microbatch in the gradient: its share of the rows, unless given.

    Microbatches without rows (a number as target) weigh the same.

    Raises: RunError for the wrong number of weights.
    """
    m = len(values)
    if weights is not None:
        if len(weights) != m:
            raise RunError(
                f"there are {len(weights)} weights, but the schedule has {m} microbatches"
            )
        return tuple(float(w) for w in weights)
    rows = [_rows(v) for v in values]
    if None in rows:
        return (1 / m,) * m
    total = sum(r for r in rows if r is not None)
    if not total:
        raise RunError("the batch has no rows")
    return tuple((r or 0) / total for r in rows)


def _rows(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else None
    return next((t.shape[0] for t in tensors_of(value) if t.dim()), None)
