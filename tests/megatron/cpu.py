"""What lets megatron-core run on CPU tensors over gloo, for tests only."""

from __future__ import annotations

import torch
from torch import nn


class _Stream:
    """Stands in for a CUDA stream, on which nothing runs."""

    def wait_stream(self, other) -> None: ...
    def wait_event(self, event) -> None: ...
    def record_event(self, event=None) -> None: ...
    def synchronize(self) -> None: ...


class _Nowhere:
    def __enter__(self):
        return self

    def __exit__(self, *error) -> None: ...


def _on_cpu(factory):
    def made(*args, **kwargs):
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return made


class _Norm:
    """A layer norm whose weights are marked for sequence parallelism, which torch's is refused."""

    def __new__(cls, config, hidden_size, eps=1e-5, **_):
        norm = nn.LayerNorm(hidden_size, eps)
        for p in norm.parameters():
            p.sequence_parallel = config.sequence_parallel
        return norm


def install() -> None:
    """Replaces what asks for CUDA, in this process, for good."""
    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_, **__: None
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _Stream()
    cuda.stream = lambda stream: _Nowhere()
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.manual_seed = torch.manual_seed
    torch.Tensor.cuda = lambda self, *_, **__: self
    for name in ("zeros", "empty", "ones", "tensor"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch_norm.WrappedTorchNorm.__new__ = _Norm.__new__
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 asks for it without Transformer Engine
        moe_utils.te_general_gemm = None
