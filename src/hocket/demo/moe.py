"""A small mixture of experts, cut into phases: attention, dispatch, experts, combine.

Dispatch and combine are all-to-all calls over the replicas of a rank; each of them holds its share
of the experts of every layer, and a copy of everything else.

    hocket run moe-pair -p 2 -m 4 -O slow=0.005
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from hocket.demo import data as text
from hocket.demo.gpt import Attention, Embedding, Head, loss
from hocket.errors import UsageError
from hocket.lower.phases import PHASES

__all__ = ["batch", "build", "loss"]


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

    def __deepcopy__(self, memo: Any) -> Wire:
        return self

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

    def __init__(
        self, width: int, heads: int, dropout: float, experts: int, top: int, first: nn.Module
    ) -> None:
        super().__init__()
        self.first, self.top, self.experts = first, top, experts
        self.attention = Attention(width, heads, dropout)
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

    draws = False

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
    """This rank's experts, two layers each, on the rows that came for them from all replicas."""

    draws = False

    def __init__(self, experts: list[nn.Module], stage: int, first: int) -> None:
        super().__init__()
        self.experts, self.stage, self.first = nn.ModuleList(experts), stage, first
        for parameter in self.parameters():
            vars(parameter)["allreduce"] = False  # no other replica has it

    def whole_name(self, name: str) -> str:
        """A weight's name in the model: with the number of its expert among those of all ranks."""
        experts, number, rest = name.split(".", 2)
        return f"{self.stage}.{experts}.{self.first + int(number)}.{rest}"

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

    draws = False

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
    stage: int, n_stages: int, *, group: Any = None, experts: int = 4, top: int = 2,
    width: int = 32, heads: int = 2, seq: int = 32, dropout: float = 0.0, slow: float = 0.0,
    seed: int = 0, dtype: torch.dtype = torch.float32,
) -> nn.Module:  # fmt: skip
    """Phase `stage` of n_stages / 4 layers; the same weights however many ranks share them.

    group: those that share the experts. slow: seconds by which a message takes longer.
    Raises: UsageError for numbers that do not fit each other.
    """
    wire, phase = Wire(group, slow), PHASES[stage % len(PHASES)]
    _refuse_odd(n_stages, wire.size, experts, top, width, heads)
    picks = torch.Generator().manual_seed(1_000_003 * seed + stage)
    if phase == "attn":
        first = nn.Identity() if stage else Embedding(width, seq)
        return _filled(Attend(width, heads, dropout, experts, top, first), picks).to(dtype)
    if phase == "disp":
        return Dispatch(wire)
    if phase == "mlp":
        every = [_filled(_expert(width), picks) for _ in range(experts)]
        here = experts // wire.size
        first = 0 if group is None else group.rank() * here
        return Experts(every[first : first + here], stage, first).to(dtype)
    last = Head(width) if stage == n_stages - 1 else nn.Identity()
    return _filled(Combine(wire, last), picks).to(dtype)


def batch(
    step: int, size: int, *, seq: int = 32, seed: int = 0, data: str | None = None
) -> tuple[Tensor, Tensor]:
    """Batches of text, of shorter sequences than usual."""
    return text.batch(step, size, seq=seq, seed=seed, data=data)


def _refuse_odd(n_stages: int, ranks: int, experts: int, top: int, width: int, heads: int) -> None:
    if n_stages % len(PHASES):
        raise UsageError(
            f"this model has {len(PHASES)} stages per layer ({', '.join(PHASES)}), but the "
            f"schedule has {n_stages} stages; take moe-pair, or another --model"
        )
    if experts % ranks:
        raise UsageError(f"{experts} experts cannot be shared evenly by {ranks} replicas")
    if not 1 <= top <= experts:
        raise UsageError(f"top is {top}; it must be 1 to {experts}, the number of experts")
    if width % heads:
        raise UsageError(f"the width {width} is no multiple of the {heads} heads")


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
