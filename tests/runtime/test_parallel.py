"""Split backwards of stages that something else spreads or compiles, against one process."""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hocket
from hocket.errors import RunError
from hocket.runtime import Pipeline
from hocket.runtime.dtensor import is_dtensor
from hocket.runtime.split import PendingWeights
from hocket.train.launch import launch

pytestmark = [pytest.mark.runtime, pytest.mark.slow]

LONG = 200.0
WIDTH, ROWS, TOKENS, M = 16, 8, 4, 4
LINEARS = 6
PRELOAD = ["torch.distributed.fsdp", "torch.distributed.tensor.parallel"]


class Block(nn.Module):
    """A transformer block whose heads are as many as the local width of its values gives."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.n, self.m = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in "qkv")
        self.o, self.a = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.b = nn.Linear(2 * width, width)

    def forward(self, x):
        h = self.n(x)
        q, k, v = (f(h).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        return x + self.b(torch.relu(self.a(self.m(x))))


def data(replica=0):
    picks = torch.Generator().manual_seed(replica)
    return [torch.randn(ROWS, TOKENS, WIDTH, generator=picks).double() for _ in "xy"]


def one_process(stages, replicas=1, steps=2):
    """The stages with the gradients of all replicas' mean."""
    plain = copy.deepcopy(stages)
    for _ in range(steps):
        for x, y in map(data, range(replicas)):
            (functional.mse_loss(nn.Sequential(*plain)(x), y) / replicas).backward()
    return plain


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        Products.count += name.removesuffix("_") in ("mm", "addmm", "bmm")
        return func(*args, **(kwargs or {}))


def run_counted(pending, run=PendingWeights.run):
    with Products():
        run(pending)


def tensor_parallel(stage, mesh, *, sequence=False):
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    columns = ColwiseParallel(input_layouts=Shard(1)) if sequence else ColwiseParallel()
    rows = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    plan = {**dict.fromkeys("qkva", columns), **dict.fromkeys("ob", rows)}
    if sequence:
        plan |= {"n": SequenceParallel(), "m": SequenceParallel()}
    for block in stage:
        parallelize_module(block, mesh["tp"], plan)
    return stage


class Gathered(nn.Module):
    """A stage whose inside has the sequence in parts."""

    def __init__(self, inside, mesh):
        super().__init__()
        self.inside, self.mesh = inside, mesh

    def forward(self, x):
        from torch.distributed.tensor import DTensor, Replicate, Shard

        whole = DTensor.from_local(x, self.mesh, [Replicate()])
        y = self.inside(whole.redistribute(placements=[Shard(1)]).to_local())
        return DTensor.from_local(y, self.mesh, [Shard(1)]).full_tensor()


def sequence_parallel(stage, mesh):
    return Gathered(tensor_parallel(stage, mesh, sequence=True), mesh["tp"])


def fsdp(stage, mesh, **options):
    from torch.distributed.fsdp import fully_shard

    for block in stage:
        fully_shard(block, mesh=mesh["dp"], **options)
    return fully_shard(stage, mesh=mesh["dp"], **options)


def fsdp_of_linears(stage, mesh):
    from torch.distributed.fsdp import fully_shard

    for block in stage:
        for name in "qkvoab":
            fully_shard(getattr(block, name), mesh=mesh["dp"])
    return fully_shard(stage, mesh=mesh["dp"])


def fsdp_bfloat16(stage, mesh):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp(stage.float(), mesh, mp_policy=narrow)


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def checkpointed(spread):
    """Recomputes each block in I, inside of what spreads it."""

    def spread_checkpointed(stage, mesh):
        for block in stage:
            block.__class__ = Checkpointed
        return spread(stage, mesh)

    return spread_checkpointed


SPREAD = {
    "tensor checkpoint": checkpointed(tensor_parallel),
    "fsdp checkpoint": checkpointed(fsdp),
    "tensor": tensor_parallel,
    "sequence": sequence_parallel,
    "fsdp": fsdp,
    "fsdp kept": lambda stage, mesh: fsdp(stage, mesh, reshard_after_forward=False),
    "fsdp linears": fsdp_of_linears,
    "fsdp bfloat16": fsdp_bfloat16,
    "fsdp tensor": lambda stage, mesh: fsdp(tensor_parallel(stage, mesh), mesh),
}

NARROW = {"fsdp bfloat16": torch.bfloat16}  # what is compared with full backwards, not float64


def grads_of(stage):
    grads = {key.removeprefix("inside."): p.grad for key, p in stage.named_parameters()}
    return {key: g.full_tensor() if is_dtensor(g) else g for key, g in grads.items()}


def meshes(p, tp):
    """The ranks as p pipeline ranks, times 2 replicas, times tp; without tp the replicas are it."""
    if tp == 1:
        mesh = init_device_mesh("cpu", (p, 2), mesh_dim_names=("pp", "dp"))
        return {"pp": mesh["pp"], "dp": mesh["dp"], "tp": mesh["dp"]}
    return init_device_mesh("cpu", (p, 2, tp), mesh_dim_names=("pp", "dp", "tp"))


def trained(names, p, tp):
    """For each way to spread: error of two steps' gradients, and products in W per microbatch."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    PendingWeights.run = run_counted
    mesh = meshes(p, tp)
    rank = mesh["pp"].get_local_rank()
    torch.manual_seed(0)
    stages = [nn.Sequential(Block()).double() for _ in range(p)]

    def run(name, schedule, replica, averages):
        stage = SPREAD[name](copy.deepcopy(stages[rank]), mesh)
        pipe = Pipeline(
            hocket.build(schedule, p=p, m=M), {rank: stage}, functional.mse_loss, timeout=LONG,
            group=mesh["pp"], data_parallel=mesh["dp"] if averages else None,
        )  # fmt: skip
        for _ in range(2):
            pipe.step(*(t.to(NARROW.get(name)) for t in data(replica)))
        norm = pipe.grad_norm()
        pipe.close()
        return {**grads_of(stage), "norm": norm}

    found = {}
    for name in names:
        replicas = 2 if tp > 1 or "fsdp" in name else 1
        replica = mesh["dp"].get_local_rank() if replicas == 2 else 0
        plain = one_process(stages, replicas)
        grads = [p.grad for p in nn.Sequential(*plain).parameters()]
        right = {**grads_of(plain[rank]), "norm": nn.utils.get_total_norm(grads)}
        Products.count = 0
        own = run(name, "zb-h1", replica, averages=tp > 1 and "fsdp" not in name)
        products = Products.count / (2 * M)
        if name in NARROW:
            right = run(name, "1f1b", replica, averages=False)
        errors = [float((own[key] - want).abs().max()) for key, want in right.items()]
        found[name] = max(errors), products
    return found


ALONE = tuple(name for name in SPREAD if name not in ("tensor", "fsdp tensor"))


@pytest.mark.parametrize(
    ("names", "p", "tp"), [(ALONE, 1, 1), (("tensor", "fsdp tensor"), 2, 2)], ids=["2", "2x2x2"]
)
def test_spread_stages_are_split_and_train_like_one_process(names, p, tp):
    for found in launch(trained, 2 * p * tp, (names, p, tp), LONG, preload=PRELOAD):
        for name, (worst, products) in found.items():
            assert worst < 1e-10, name
            assert products == LINEARS, name


def test_a_mesh_of_several_dimensions_is_refused_as_a_group():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp"))
        with pytest.raises(RunError) as caught:
            Pipeline(hocket.build("1f1b", p=1, m=2), {0: Block()}, group=mesh)
    finally:
        torch.distributed.destroy_process_group()
    assert str(caught.value) == (
        "group= is a mesh of 2 dimensions (pp, dp); give one of them, such as mesh['pp']"
    )
