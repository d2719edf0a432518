"""What splitting costs and holds where something else spreads, casts or recomputes a stage.

For each composition: (I + W) / B in processor time, where B is the full backward of a second copy
in the same wrapping, and the two take turns; and the bytes held between I and W over those that F
holds. Two ranks share each stage where it is spread.

Then the step time of zb-h1 relative to 1f1b, p=2 and m=4, in turn, with stages that also sleep
40 ms in each of F, I and W, so that cores do not count. By the formulas it is 0.867.

    python benchmarks/composition.py [rounds]
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hocket
from hocket.demo.sleep import nap
from hocket.runtime import Pipeline, put_off, split, split_backend
from hocket.runtime.dtensor import part
from hocket.runtime.fsdp import Shards
from hocket.train.launch import launch

NAP, SLEEPER = 0.04, 128  # seconds; width
WIDTH, BATCH, TOKENS, LAYERS = 256, 2, 128, 2


class Block(nn.Module):
    """A pre-norm transformer block whose number of heads follows from the local width."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.n, self.m = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in "qkv")
        self.o, self.a = nn.Linear(width, width), nn.Linear(width, 4 * width)
        self.b = nn.Linear(4 * width, width)

    def forward(self, x):
        h = self.n(x)
        q, k, v = (f(h).unflatten(-1, (-1, 64)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        return x + self.b(functional.gelu(self.a(self.m(x))))


def tensor_parallel(stage, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module as parallelize

    styles: dict[str, Any] = dict.fromkeys("qkva", ColwiseParallel())
    styles |= dict.fromkeys("ob", RowwiseParallel())
    for block in stage:
        parallelize(block, mesh, styles)
    return stage


def fsdp(stage, mesh):
    from torch.distributed.fsdp import fully_shard

    for block in stage:
        fully_shard(block, mesh=mesh)
    return fully_shard(stage, mesh=mesh)


class Checkpointed(nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, x):
        for block in self.stage:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Autocast(nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.stage(x).float()


class Product(torch.autograd.Function):
    """A Linear without bias, as a library with products of its own would write it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx, *dys):
        (dy,) = dys
        x, weight = ctx.saved_tensors
        return dy @ weight, put_off(ctx, weight, weight_gradient, x, dy)


def weight_gradient(x, dy):
    return dy.flatten(0, -2).T @ x.flatten(0, -2)


class Own(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.weight = linear.weight

    def forward(self, x):
        return Product.apply(x, self.weight)


def functions(stage, mesh):
    for block in stage:
        for name in "qkvoab":
            setattr(block, name, Own(getattr(block, name)))
    return stage


COMPOSITIONS = {
    "nothing": lambda stage, mesh: stage,
    "checkpoint": lambda stage, mesh: Checkpointed(stage),
    "autocast": lambda stage, mesh: Autocast(stage),
    "put_off": functions,
    "torch.compile": lambda stage, mesh: torch.compile(stage, backend=split_backend),
    "tensor parallel": tensor_parallel,
    "fully_shard": fsdp,
}


def timed(call):
    start = time.process_time()
    value = call()
    return time.process_time() - start, value


def kept(forward, parameters):
    """Bytes that autograd keeps of a forward, without parameters, and the output."""
    found = {}
    own = {part(p).untyped_storage().data_ptr() for p in parameters}

    def note(t):
        storage = part(t).untyped_storage()
        if storage.data_ptr() not in own and not isinstance(t, nn.Parameter):
            found[storage.data_ptr()] = storage.nbytes()
        return t

    with saved_tensors_hooks(note, lambda t: t):
        y = forward()
    return sum(found.values()), y


def measured(name, rounds):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    stage = nn.Sequential(*(Block() for _ in range(LAYERS)))
    whole, halves = (COMPOSITIONS[name](copy.deepcopy(stage), mesh) for _ in "ab")
    plan = split.plan_of(halves)
    x, dy = (torch.randn(BATCH, TOKENS, WIDTH) for _ in "xy")
    x.requires_grad_()
    for module in (whole, halves):
        Shards(module).hold()

    def backward(y):
        with plan.input_backward() as pending:
            y.backward(dy)
        return pending

    ratios = []
    for _ in range(rounds):
        y = whole(x)
        b, _ = timed(lambda y=y: y.backward(dy))
        y = halves(x)
        i, pending = timed(lambda y=y: backward(y))
        held = pending.nbytes
        w, _ = timed(pending.run)
        ratios.append((i + w) / b)
    after_f, y = kept(lambda: halves(x), halves.parameters())
    backward(y).run()
    return statistics.median(ratios[2:]), held, after_f


class Slept(torch.autograd.Function):
    """Its input times a weight, with a sleep in F, in I and in the weight part."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        nap(NAP)
        return x * weight

    @staticmethod
    def backward(ctx, *dys):
        (dy,) = dys
        x, weight = ctx.saved_tensors
        nap(NAP)
        return dy * weight, put_off(ctx, weight, slept_gradient, x, dy)


def slept_gradient(x, dy):
    nap(NAP)
    return (x * dy).sum((0, 1))


class Sleeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SLEEPER))

    def forward(self, x):
        return Slept.apply(x, self.weight)


def raced(name, steps):
    """Step times of zb-h1 and 1f1b on 2 x 2 ranks, in turn, in seconds."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "other"))
    rank = mesh["pp"].get_local_rank()
    pipes = []
    for schedule in ("zb-h1", "1f1b"):
        torch.manual_seed(rank)
        inside = COMPOSITIONS[name](nn.Sequential(Block(SLEEPER)), mesh["other"])
        stage = nn.Sequential(Sleeper(), inside)
        pipes.append(
            Pipeline(
                hocket.build(schedule, p=2, m=4),
                {rank: stage},
                functional.mse_loss,
                group=mesh["pp"],
                timeout=120.0,
            )
        )
    x = torch.randn(4, 8, SLEEPER)
    times = []
    for _ in range(steps):
        row = []
        for pipe in pipes:
            torch.distributed.barrier()
            start = time.perf_counter()
            pipe.step(x, x)
            row.append(time.perf_counter() - start)
        times.append(row)
    return times[1:]


def ratio_of(every):
    """The median over steps of zb-h1 over 1f1b, each on the rank where it takes longest."""
    rows = zip(*every, strict=True)
    return statistics.median(
        max(zb for zb, _ in row) / max(whole for _, whole in row) for row in rows
    )


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    print(f"{'composition':18}{'(I+W)/B':>9}{'held over F':>13}{'zb-h1 : 1f1b':>14}")
    preload = ["torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
    for name in COMPOSITIONS:
        (ratio, held, after_f), _ = launch(measured, 2, (name, rounds), 120.0, preload=preload)
        race = ratio_of(launch(raced, 4, (name, 8), 120.0, preload=preload))
        print(f"{name:18}{ratio:9.3f}{held / after_f:13.2f}{race:14.3f}", flush=True)


if __name__ == "__main__":
    main()
