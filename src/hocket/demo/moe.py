"""A small mixture of experts, cut into phases: attention, dispatch, experts, combine.

Dispatch and combine are all-to-all calls over a process group; each rank holds its share of the
experts of every layer and a copy of everything else. Imports torch, gpt, runtime.

    python -m hocket.demo.moe --ranks 2 --steps 20 --slow 5
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from hocket.demo.data import batch
from hocket.demo.gpt import Attention, Embedding, Head, loss
from hocket.moe import PHASES
from hocket.runtime import Pipeline
from hocket.runtime.queues import QueueExecution
from hocket.schedules import build as build_schedule
from hocket.timeline import Timeline

__all__ = ["build", "loss", "synchronise"]


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks they are meant for; the gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, wire: Wire, sent: list[int], got: list[int]) -> Tensor:
        ctx.wire, ctx.splits = wire, (sent, got)
        return wire.exchange(rows, sent, got)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sent, got = ctx.splits
        return ctx.wire.exchange(grads[0].contiguous(), got, sent), None, None, None


class Wire:
    """The all-to-all of a group of ranks; `slow`: seconds by which each call takes longer."""

    def __init__(self, group: Any, slow: float = 0.0) -> None:
        self.group, self.slow = group, slow
        self.size = 1 if group is None else group.size()

    def exchange(self, rows: Tensor, sent: list[int], got: list[int]) -> Tensor:
        """Sends `sent[i]` rows to rank i and returns the `got[i]` rows of each rank i."""
        if self.slow:
            time.sleep(self.slow)
        if self.group is None:
            return rows.clone()
        out = rows.new_empty((sum(got), *rows.shape[1:]))
        self.group.alltoall_base(out, rows, got, sent).wait()
        return out


class Attend(nn.Module):
    """Attention and the router: every token gets its `top` experts and how much each counts."""

    def __init__(self, width: int, heads: int, experts: int, top: int, first: nn.Module) -> None:
        super().__init__()
        self.first, self.top, self.experts = first, top, experts
        self.attention = Attention(width, heads, 0.0)
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """(residual, rows sorted by expert, gates, order of the rows, rows of each expert)."""
        x = self.attention(self.first(x))
        y = self.norm(x).flatten(0, 1)
        gates, chosen = self.router(y).softmax(-1).topk(self.top, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.experts)
        return x, y[order // self.top], gates, order, counts


class Dispatch(nn.Module):
    """Sends every row to the rank of its expert."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.wire = wire

    def forward(
        self, x: Tensor, rows: Tensor, gates: Tensor, order: Tensor, counts: Tensor
    ) -> tuple[Tensor, ...]:
        """The same with the rows of this rank's experts, and `[rank, expert]` how many came."""
        ranks = self.wire.size
        came = counts
        if ranks > 1:
            ones = [len(counts) // ranks] * ranks
            came = torch.empty_like(counts)
            self.wire.group.alltoall_base(came, counts, ones, ones).wait()
        came, sent = came.reshape(ranks, -1), counts.reshape(ranks, -1).sum(1).tolist()
        rows = _AllToAll.apply(rows, self.wire, sent, came.sum(1).tolist())
        return x, rows, gates, order, counts, came


class Experts(nn.Module):
    """This rank's experts, two layers each, on the rows that came for them."""

    def __init__(self, experts: list[nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def forward(
        self, x: Tensor, rows: Tensor, gates: Tensor, order: Tensor, counts: Tensor, came: Tensor
    ) -> tuple[Tensor, ...]:
        """The same with what the experts made of the rows, in the order in which they came."""
        ranks, n = came.shape
        of = torch.arange(n).repeat(ranks).repeat_interleave(came.flatten())
        order_here = of.argsort(stable=True)
        parts = rows[order_here].split(came.sum(0).tolist())
        made = torch.cat([e(part) for e, part in zip(self.experts, parts, strict=True)])
        return x, made[order_here.argsort()], gates, order, counts, came


class Combine(nn.Module):
    """Brings every row back to its token and adds what its experts made, by their gates."""

    def __init__(self, wire: Wire, last: nn.Module) -> None:
        super().__init__()
        self.wire, self.last = wire, last

    def forward(
        self, x: Tensor, rows: Tensor, gates: Tensor, order: Tensor, counts: Tensor, came: Tensor
    ) -> Tensor:
        """The output of the layer, `[sequence, position, width]`."""
        sent, got = came.sum(1).tolist(), counts.reshape(self.wire.size, -1).sum(1).tolist()
        rows = _AllToAll.apply(rows, self.wire, sent, got)[order.argsort()]
        mixed = (rows.unflatten(0, gates.shape) * gates.unsqueeze(-1)).sum(1)
        return self.last(x + mixed.view_as(x))


def build(
    stage: int, n_stages: int, *, rank: int = 0, group: Any = None, experts: int = 4, top: int = 2,
    width: int = 32, heads: int = 2, seq: int = 32, slow: float = 0.0, seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:  # fmt: skip
    """Phase `stage` of a model of n_stages / 4 layers; the same weights for any number of ranks."""
    wire, phase = Wire(group, slow), PHASES[stage % len(PHASES)]
    picks = torch.Generator().manual_seed(1_000_003 * seed + stage)
    if phase == "attn":
        first = nn.Identity() if stage else Embedding(width, seq)
        return _filled(Attend(width, heads, experts, top, first), picks).to(dtype)
    if phase == "disp":
        return Dispatch(wire)
    if phase == "mlp":
        every = [_filled(_expert(width), picks) for _ in range(experts)]
        here = experts // wire.size
        return Experts(every[rank * here : (rank + 1) * here]).to(dtype)
    last = Head(width) if stage == n_stages - 1 else nn.Identity()
    return _filled(Combine(wire, last), picks).to(dtype)


def _expert(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def _filled(module: nn.Module, picks: torch.Generator) -> nn.Module:
    """The module with weights of these picks, not of the random numbers that all threads share."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=picks)
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return module


def synchronise(stages: Mapping[int, nn.Module], group: Any) -> None:
    """Makes the gradients those of the mean loss over the ranks of a group.

    What every rank has a copy of is averaged; an expert has met the rows of all ranks already.
    """
    if group is None:
        return
    for module in stages.values():
        for parameter in module.parameters():
            if parameter.grad is not None:
                if not isinstance(module, Experts):
                    group.allreduce([parameter.grad]).wait()
                parameter.grad /= group.size()


# --- python -m hocket.demo.moe ------------------------------------------------------------------


class Trained(NamedTuple):
    """The loss of this rank before each step, seconds a step, the measured timeline of the last."""

    losses: list[float]
    seconds: float
    timeline: Timeline


def train(
    rank: int, group: Any, *, order: str = "deepseek", threads: bool = True, layers: int = 2,
    m: int = 4, steps: int = 4, slow: float = 0.0, dtype: torch.dtype = torch.float32,
) -> Trained:  # fmt: skip
    """Trains on batches of this rank's own, in the order of `moe-pair`.

    threads: a thread for each of the two queues; otherwise everything in one.
    """
    schedule = build_schedule("moe-pair", p=1, m=m, layers=layers, order=order)
    n = schedule.placement.n_stages
    stages = {s: build(s, n, rank=rank, group=group, slow=slow, dtype=dtype) for s in range(n)}
    pipe = Pipeline(schedule, stages, loss)
    if threads:
        pipe._training = pipe._bind(pipe.lowered, pipe._stages, True, QueueExecution)
    parameters = [p for module in stages.values() for p in module.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=3e-3)
    losses, start = [], time.perf_counter()
    for step in range(steps):
        losses.append(float(pipe.step(*batch(step, 2 * m, seq=32, seed=rank))))
        synchronise(stages, group)
        optimiser.step()
        optimiser.zero_grad()
    seconds = (time.perf_counter() - start) / steps
    found = Trained(losses, seconds, pipe.gather_timeline())
    pipe.close()
    return found


def _process(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.PrefixStore("experts", dist.FileStore(f"{folder}/store", args.ranks))
    group = dist.ProcessGroupGloo(store, rank, args.ranks, timedelta(seconds=60))
    options = {"layers": args.layers, "m": args.m, "steps": args.steps, "slow": args.slow / 1e3}
    if rank == 0:
        print(f"{args.ranks} ranks, {args.layers} layers, {args.m} microbatches; rank 0:")
    for order, threads in (("serial", False), *((order, True) for order in args.order)):
        made = train(rank, group, order=order, threads=threads, **options)
        if rank == 0:
            first, last = made.losses[0], made.losses[-1]
            how = "two threads" if threads else "one thread"
            print(f"{order:9} {how:12} loss {first:.6f} to {last:.6f}, "
                  f"{1e3 * made.seconds:.1f} ms a step")  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Trains the same model in several orders of its phases."""
    parser = argparse.ArgumentParser(prog="python -m hocket.demo.moe", description=main.__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="processes that share the 4 experts")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("-m", type=int, default=4, help="microbatches of two sequences")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--slow", type=float, default=0, help="ms by which a message takes longer")
    parser.add_argument("--order", nargs="*", default=["serial", "naive", "ring", "deepseek"])
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        spawn(_process, (args, folder), args.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
