"""torchtitan's train command on CPU ranks: what its 0.3.0 needs beside a release of torch.

Started by run.py under torchrun. Nothing of torchtitan's own code is changed on disk:
- the device is the CPU (it takes "cuda" where it finds no other);
- `torch.distributed.set_timeout` and `step(arg_mbs=...)` are of a newer torch than 2.13;
- FlexAttention has no backward on the CPU; causal attention stands in for it (documents of one
  sequence then see each other, which is of no matter here).
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from torch.distributed.pipelining import schedules


def main() -> None:
    """Puts the stand-ins in place, then trains."""
    stand_in_device()
    stand_in_torch()
    stand_in_attention()
    from torchtitan.train import main as train

    train()


def stand_in_device() -> None:
    """A device module of the CPU with what torchtitan asks of one."""
    properties = SimpleNamespace(name="cpu", total_memory=os.sysconf("SC_PHYS_PAGES") * 4096)
    module = SimpleNamespace(
        __name__="torch.cpu",
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        synchronize=lambda *args: None,
        get_device_name=lambda *args: "cpu",
        get_device_properties=lambda *args: properties,
        reset_peak_memory_stats=lambda *args: None,
        empty_cache=lambda: None,
        memory_stats=lambda *args: dict.fromkeys(_MEMORY, 0),
    )
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda kind: module


_MEMORY = (
    "active_bytes.all.peak",
    "reserved_bytes.all.peak",
    "num_alloc_retries",
    "num_ooms",
)


def stand_in_torch() -> None:
    """What torchtitan 0.3.0 takes from a newer torch."""
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = lambda timeout, group=None: None
    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        stand_in_step(kind)


def stand_in_step(kind: Any) -> None:
    """A step of a kind of schedules that takes microbatches, too."""
    whole_batch = kind.step

    def step(self: Any, *args: Any, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, losses: Any = None, return_outputs: bool = True, loss_kwargs: Any = None, **kwargs: Any) -> Any:  # fmt: skip  # noqa: E501
        if kwarg_mbs is None and arg_mbs is None and target_mbs is None:
            return whole_batch(self, *args, losses=losses, return_outputs=return_outputs, **kwargs)
        for stage in self._stages if hasattr(self, "_stages") else [self._stage]:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        self._step_microbatches(
            arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs
        )
        return None

    kind.step = step


def stand_in_attention() -> None:
    """Causal attention for the compiled FlexAttention, `[batch, head, sequence, dim]`."""
    from torchtitan.models.common import attention

    def causal(q: Any, k: Any, v: Any, *, scale: Any = None, **options: Any) -> tuple[Any, Any]:
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=bool(options.get("enable_gqa"))
        )
        return out, SimpleNamespace(lse=None)

    attention.FlexAttention._compiled_flex_attn = causal
    attention._compiled_create_block_mask = attention.create_block_mask


if __name__ == "__main__":
    main()
