"""Shows the gradient that torch's own I and W lose in torchtitan's debug model, on one CPU rank.

    python examples/torchtitan/halves.py

torchtitan shards the last norm and the head as one FSDP group. Its chunked loss runs the head and
its backward inside the loss, and then reshards the group. torch's I looks for the weights in
`module.parameters()`, and finds the sharded ones, which the graph of the forward never saw. So the
norm's weight is in no group of I, and W computes nothing for it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight


class Last(nn.Module):
    """The end of a decoder: the loss calls the head."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.head = nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors `[row, 8]` to vectors."""
        return self.norm(self.linear(x))


def gradients(*, split: bool, reshards: bool) -> dict[str, torch.Tensor]:
    """By name the gradients of two microbatches, with full backwards or with I and W."""
    torch.manual_seed(0)
    stage = Last()
    mesh = init_device_mesh("cpu", (1,))
    fully_shard([stage.norm, stage.head], mesh=mesh)
    fully_shard(stage, mesh=mesh, reshard_after_forward=False)
    stage.set_requires_gradient_sync(False)  # as torch's runtime does before each backward
    stage.set_reshard_after_backward(False)
    for _ in range(2):
        x = torch.randn(4, 8, requires_grad=True)
        hidden = stage(x)
        end = hidden.detach().requires_grad_()
        stage.head.unshard()
        stage.head(end).square().mean().backward()
        if reshards:
            stage.head.reshard()
        if split:
            _, groups = stage_backward_input([hidden], [end.grad], [x], stage.parameters())
            stage_backward_weight(stage.parameters(), groups)
        else:
            hidden.backward(end.grad)
    stage.set_requires_gradient_sync(True)
    stage.set_reshard_after_backward(True)
    stage._get_fsdp_state()._root_post_backward_final_callback()
    return {
        name: torch.zeros(p.shape) if p.grad is None else p.grad.full_tensor()
        for name, p in stage.named_parameters()
    }


def main() -> None:
    """Prints by name how far I and W are from full backwards."""
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        for reshards in (False, True):
            whole = gradients(split=False, reshards=reshards)
            halves = gradients(split=True, reshards=reshards)
            for name, want in whole.items():
                off = float((halves[name] - want).norm() / want.norm())
                print(f"reshards={reshards} {name}: {off:.3f} of its gradient is missing")
    finally:
        destroy_process_group()


if __name__ == "__main__":
    main()
