"""Stages sharded by FSDP2 and copies of them, in processes of their own, against one process."""

from __future__ import annotations

import copy

import pytest

from hocket.errors import RunError
from hocket.train.launch import launch

pytestmark = pytest.mark.runtime

LONG = 200.0
SLOW = [("chimera", False)]  # a process takes seconds to import what shards


def _model(n):
    import torch
    from torch import nn

    torch.manual_seed(0)
    return [nn.Linear(4, 4, dtype=torch.float64) for _ in range(n)]


def _data(replica):
    import torch

    picks = torch.Generator().manual_seed(replica)
    return [torch.randn(8, 4, generator=picks, dtype=torch.float64) for _ in range(2)]


def _meshed(replicas):
    """The ranks as 2 pipeline ranks times replicas: mesh, rank of the pipeline, replica."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, replicas), mesh_dim_names=("pp", "dp"))
    return mesh, mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()


def sharded(name, tied):
    """Largest error of two steps' gradients, and of their norm, with copies of sharded weights."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    import hocket
    from hocket.runtime import Pipeline

    mesh, rank, replica = _meshed(2)
    schedule = hocket.build(name, p=2, m=4)
    modules = _model(schedule.placement.n_stages)
    plain = copy.deepcopy(modules)
    if tied:
        plain[1].weight = plain[0].weight
    whole = nn.Sequential(*plain)
    loss = sum(nn.functional.mse_loss(whole(x), y) for x, y in map(_data, range(2)))
    loss.backward()  # two steps, each with the mean of two replicas
    stages = {
        s: fully_shard(copy.deepcopy(modules[s]), mesh=mesh["dp"])
        for s in schedule.placement.stages_of_rank[rank]
    }
    pipe = Pipeline(
        schedule, stages, nn.functional.mse_loss, group=mesh["pp"].get_group(),
        tied=[[(0, "weight"), (1, "weight")]] if tied else None, timeout=LONG,
    )  # fmt: skip
    for _ in range(2):
        pipe.step(*_data(replica))
    norm = pipe.clip_grad_norm_(0.1)
    want = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    worst = float((norm - want).abs())
    for s, module in stages.items():
        for key, p in module.named_parameters():
            right = dict(plain[s].named_parameters())[key].grad
            worst = max(worst, float((p.grad.full_tensor() - right).abs().max()))
    assert torch.isfinite(norm)
    return worst


@pytest.mark.parametrize(
    ("name", "tied"),
    [("zb-h1", True), *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW)],
)
def test_copies_of_sharded_weights_train_and_clip_like_one_process(name, tied):
    assert max(launch(sharded, 4, (name, tied), LONG)) < 1e-10


def distributed_output():
    import torch
    from torch import nn
    from torch.distributed.tensor import distribute_tensor

    import hocket
    from hocket.runtime import Pipeline

    mesh, rank, _ = _meshed(1)

    class Sharded(nn.Linear):
        def forward(self, x):
            return distribute_tensor(super().forward(x).detach(), mesh["dp"])

    stages = {rank: nn.Linear(4, 4) if rank else Sharded(4, 4)}
    pipe = Pipeline(hocket.build("gpipe", p=2, m=2), stages, nn.functional.mse_loss, timeout=LONG)
    pipe.step(torch.ones(4, 4), torch.ones(4, 4))


@pytest.mark.filterwarnings("ignore")
def test_a_dtensor_as_output_is_refused_by_its_own_rank():
    with pytest.raises(RunError) as caught:
        launch(distributed_output, 2, (), LONG)
    assert str(caught.value).splitlines()[0] == (
        "rank 0 failed in 0SEND_F0: the output is a DTensor; stages hand over dense tensors of "
        "their own rank: return x.to_local()"
    )


def unlike():
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    import hocket
    from hocket.runtime import Pipeline

    mesh, rank, _ = _meshed(1)
    module = nn.Linear(4, 4)
    if rank:
        module = fully_shard(module, mesh=mesh["dp"])
    try:
        Pipeline(
            hocket.build("1f1b", p=2, m=2), {rank: module}, nn.functional.mse_loss,
            group=mesh["pp"].get_group(), tied=[[(0, "weight"), (1, "weight")]],
        )  # fmt: skip
    except RunError as error:
        torch.distributed.barrier()
        return str(error)


def test_a_sharded_copy_of_a_weight_that_is_whole_elsewhere_is_refused_on_all_ranks():
    assert set(launch(unlike, 2, (), LONG)) == {
        "tied parameters differ: [4, 4] float32 on stage 0 (weight), but [4, 4] float32 as [4, 4] "
        "on stage 1 (weight)"
    }


def resumed(folder):
    """Weights and moments of a sharded model after 4 steps; then of one resumed after 2 of them."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import hocket
    from hocket.runtime import Checkpoints, Pipeline
    from hocket.train.training import Adam

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    store, out = Checkpoints(folder), []
    for steps in (4, 2, 2):
        module = fully_shard(nn.Sequential(*_model(2)), mesh=mesh["dp"])
        pipe = Pipeline(
            hocket.build("1f1b", p=1, m=2), {0: module}, nn.functional.mse_loss,
            group=mesh["pp"].get_group(),
        )  # fmt: skip
        optimizer = Adam(module.parameters(), 0.1)
        if steps == 2:
            store.load(pipe, optimizer)
        for _ in range(steps):
            pipe.step(*_data(mesh["dp"].get_local_rank()))
            optimizer.step()
        if steps == 2:
            store.save(pipe, optimizer)
        out.append([t.full_tensor().detach() for row in optimizer.moments for t in row])
    return out[0], out[2]


def test_sharded_weights_are_saved_and_read_by_other_numbers_of_processes(tmp_path):
    import torch
    from torch import nn

    import hocket
    from hocket.runtime import Checkpoints, Pipeline
    from hocket.train.training import Adam

    (whole, parts), _ = launch(resumed, 2, (str(tmp_path),), LONG)
    module = nn.Sequential(*_model(2))
    pipe = Pipeline(hocket.build("1f1b", p=1, m=2), {0: module}, nn.functional.mse_loss)
    optimizer = Adam(module.parameters(), 0.1)
    with pytest.warns(UserWarning, match="another number of ranks, so that random numbers start"):
        Checkpoints(tmp_path).load(pipe, optimizer)
    alone = [t for row in optimizer.moments for t in row]
    for a, b, c in zip(whole, parts, alone, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert (optimizer.steps, pipe.steps_done) == (4, 4)
