"""Train a model with Pipeline: torchrun --nproc-per-node 2 examples/train.py"""

import torch
from torch import distributed, nn

import hocket
from hocket.runtime import Pipeline

distributed.init_process_group("gloo")
rank = distributed.get_rank()
schedule = hocket.build("zb-h1", p=2, m=4)

# Every rank builds the stages that the schedule places on it.
torch.manual_seed(rank)
stages = {
    stage: nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    for stage in schedule.placement.stages_of_rank[rank]
}
pipeline = Pipeline(schedule, stages, nn.functional.mse_loss)
optimizer = torch.optim.SGD([p for module in stages.values() for p in module.parameters()], lr=0.5)

# Every rank passes the whole batch: the first stage reads the inputs, the last one the targets.
inputs = torch.rand(32, 16, generator=torch.Generator().manual_seed(0))
targets = inputs.flip(1) / 2
for step in range(10):
    loss = pipeline.step(inputs, targets)  # the same loss on every rank
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}  loss {float(loss):.4f}")
pipeline.close()
distributed.destroy_process_group()
