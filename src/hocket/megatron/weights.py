"""Weight gradients put off from I to W, through the seam of Megatron's fused kernels.

A linear layer of Megatron with `gradient_accumulation_fusion` calls one function that adds
dY^T X to `main_grad`; while an order runs, that function is ours. Layers of Transformer Engine
have a store of their own (UNTESTED: written without a GPU).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import layers
from torch import Tensor, nn

from hocket.errors import UsageError

KERNELS = ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16")
_NAME = "fused_weight_gradient_mlp_cuda"
Product = Callable[[], Any]


class Seam:
    """Stands in for the module of fused kernels: a product runs at once, or goes to `queue`."""

    def __init__(self, own: Any) -> None:
        self.queue: list[Product] | None = None
        for name in KERNELS:
            setattr(self, name, partial(self._product, getattr(own, name, _add)))

    def _product(self, kernel: Callable, x: Tensor, dy: Tensor, grad: Tensor) -> None:
        if self.queue is None:
            kernel(x, dy, grad)
        else:
            self.queue.append(partial(kernel, _kept(x), _kept(dy), grad))

    @contextmanager
    def installed(self) -> Generator[None]:
        """Inside, Megatron's layers call this seam."""
        before = vars(layers).get(_NAME)
        setattr(layers, _NAME, self)
        try:
            yield
        finally:
            if before is None:
                delattr(layers, _NAME)
            else:
                setattr(layers, _NAME, before)


def seam() -> Seam:
    """A seam in front of the kernels that Megatron has loaded, or of a plain product."""
    return Seam(vars(layers).get(_NAME))


def _add(x: Tensor, dy: Tensor, grad: Tensor) -> None:
    grad.addmm_(dy.t().to(grad.dtype), x.to(grad.dtype))


def _kept(t: Tensor) -> Tensor:
    """The tensor, copied where the next layer will write over it.

    With sequence parallelism the inputs of all layers are gathered into one buffer.
    """
    shared = {b.untyped_storage().data_ptr() for b in get_global_memory_buffer().buffer.values()}
    return t.clone() if t.untyped_storage().data_ptr() in shared else t


class Pending:
    """The weight gradients that one I left for its W."""

    def __init__(self, products: list[Product]) -> None:
        self.products = products

    def run(self) -> None:
        """Adds them to `main_grad`."""
        with torch.no_grad():
            for product in self.products:
                product()


class Deferral:
    """The split backward of one chunk of a model.

    Raises: UsageError where none of its layers can be split.
    """

    def __init__(self, seam: Seam, module: nn.Module, stage: int) -> None:
        self.seam = seam
        own = (layers.ColumnParallelLinear, layers.RowParallelLinear)
        local: list[Any] = [m for m in module.modules() if isinstance(m, own)]
        engine: list[Any] = [m for m in module.modules() if hasattr(m, "wgrad_store")]
        if not local and not engine:
            raise UsageError(
                f"stage {stage} has no layer whose weight gradient can be put off to W: neither "
                "a linear layer of Megatron nor one of Transformer Engine; take an order without I"
            )
        for name, param in module.named_parameters():
            if param.requires_grad and not hasattr(param, "main_grad"):
                raise UsageError(
                    f"{name} of stage {stage} has no main_grad, into which W adds; wrap the model "
                    "in Megatron's DistributedDataParallel, or take an order without I"
                )
        for layer in local:
            layer.gradient_accumulation_fusion = True
        for layer in engine:
            _check_engine(layer, stage)
        self._stores = [layer.wgrad_store for layer in engine]

    @contextmanager
    def input_backward(self) -> Generator[Pending]:
        """Inside, backwards leave the weight gradients to the value that it gives."""
        pending = Pending([])
        self.seam.queue = pending.products
        for store in self._stores:
            store.context, store.enabled = SimpleQueue(), True
        try:
            yield pending
        finally:
            self.seam.queue = None
            for store in self._stores:
                store.enabled = False
                while not store.context.empty():
                    tensors, product = store.context.get()
                    pending.products.append(partial(product, *tensors))


def _check_engine(layer: Any, stage: int) -> None:
    """Raises UsageError for a layer of Transformer Engine whose gradients W could not add."""
    checks = {
        "use_bias": "the gradient of its bias would be lost",
        "ub_bulk_wgrad": "its weight gradient overlaps a message of the same backward",
    }
    whys = [f"{name} is set: {why}" for name, why in checks.items() if getattr(layer, name, False)]
    if not getattr(layer, "fuse_wgrad_accumulation", False):
        whys.append("gradient_accumulation_fusion is off: W could not add to main_grad")
    if whys:
        raise UsageError(
            f"{type(layer).__name__} of stage {stage} cannot be split, {'; '.join(whys)}; change "
            "that, or take an order without I"
        )
