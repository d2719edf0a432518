"""Tensors that tensor parallelism spreads over ranks: this rank's part, and a Linear of parts."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


def is_dtensor(t: Any) -> bool:
    """Whether a tensor is a DTensor, without importing what makes them."""
    return hasattr(t, "_local_tensor")


def part(t: Any) -> Tensor:
    """This rank's part of a tensor, once it has arrived; any other tensor as it is."""
    t = getattr(t, "_local_tensor", t)
    return t.trigger_wait() if hasattr(t, "trigger_wait") else t


def alike(grad: Any, param: Any) -> Tensor:
    """This rank's part of a gradient, placed as its parameter is; collective where it is not."""
    if is_dtensor(grad) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return part(grad)


def joined(own: Tensor, like: Any) -> Tensor:
    """The DTensor of which `own` is this rank's part, spread as `like` is; else `own`."""
    if not is_dtensor(like):
        return own
    return type(like).from_local(
        own, like.device_mesh, like.placements,
        run_check=False, shape=like.shape, stride=like.stride(),
    )  # fmt: skip


class Layout(NamedTuple):
    """How Y and dX of a Linear are spread; whether this rank's part of Y includes the bias."""

    y: tuple[Any, ...]
    dx: tuple[Any, ...]
    adds_bias: bool

    def opened(self, module: Any, x: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """This rank's parts of X, W and b, inside the graph."""
        bias = None if module.bias is None else module.bias.to_local()
        return x.to_local(grad_placements=self.dx), module.weight.to_local(), bias

    def closed(self, own: Tensor, module: Any, x: Any) -> Tensor:
        """Y, of which `own` is this rank's part."""
        shape = torch.Size((*x.shape[:-1], module.weight.shape[0]))
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return type(x).from_local(
            own, x.device_mesh, self.y, run_check=False, shape=shape, stride=stride
        )


def layout(module: Any, x: Any) -> Layout | None:
    """The layout with which each rank multiplies its own parts alone; None if there is none.

    Per dimension of the mesh W is split by its columns or rows, or whole; X fits it.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    weight, bias, last = module.weight, module.bias, x.dim() - 1
    whole = Replicate()
    rules = {  # of X and W: of Y, dX and b
        (whole, Shard(0)): (Shard(last), Partial(), Shard(0)),
        (Shard(last), Shard(1)): (Partial(), Shard(last), whole),
        (whole, whole): (whole, whole, whole),
    }
    rows = [rules.get(pair) for pair in zip(x.placements, weight.placements, strict=False)]
    if x.device_mesh != weight.device_mesh or None in rows:
        return None
    y, dx, b = zip(*rows, strict=True)
    if bias is not None and (not is_dtensor(bias) or bias.placements != b):
        return None
    first = (weight.device_mesh.get_local_rank(i) == 0 for i in range(len(y)))
    adds_bias = all(own or not placed.is_partial() for own, placed in zip(first, y, strict=True))
    return Layout(y, dx, adds_bias)
