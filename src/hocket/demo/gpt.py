"""A small byte-level GPT, cut into any number of stages. The model of `hocket run`.

To run your own model, write a file like this one: `build`, and where the defaults (this file's
cross-entropy, and batches of text) do not fit, `loss` and `batch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hocket.costs.partition import partition
from hocket.demo.data import batch
from hocket.errors import UsageError

__all__ = ["batch", "build", "loss"]

BYTES = 256  # the vocabulary


class Embedding(nn.Module):
    """Bytes `[sequence, position]` to vectors `[sequence, position, width]`.

    With `carries` it takes slices of sequences, and carries how many positions came before.
    """

    def __init__(self, width: int, seq: int, carries: bool = False) -> None:
        super().__init__()
        self.carries = carries
        self.byte = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(seq, width)

    def forward(self, x: Tensor, carried: int | None = None) -> Any:
        """The vector of each byte plus that of its position."""
        first = carried or 0
        end = first + x.shape[1]
        y = self.byte(x) + self.position(torch.arange(first, end, device=x.device))
        return (y, end) if self.carries else y


class Attention(nn.Module):
    """Half a block: every position looks at those before it.

    With `carries` it takes slices of sequences, and carries the keys and values so far, each
    `[sequence, head, position, width / heads]`.
    """

    def __init__(self, width: int, heads: int, dropout: float, carries: bool = False) -> None:
        super().__init__()
        self.heads, self.carries = heads, carries
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, carried: tuple[Tensor, Tensor] | None = None) -> Any:
        """`x` plus what attention adds, `[sequence, position, width]`."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        mask = None
        if carried is not None:
            k, v = (torch.cat(both, dim=2) for both in zip(carried, (k, v), strict=True))
            new, upto = q.shape[2], k.shape[2]
            mask = torch.ones(new, upto, dtype=torch.bool, device=x.device).tril(upto - new)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None
        )
        y = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return (y, (k, v)) if self.carries else y


class Mlp(nn.Module):
    """The other half of a block: every position by itself."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """`x` plus what the two layers add, `[sequence, position, width]`."""
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


class Head(nn.Module):
    """Vectors to a score for each possible next byte, `[sequence, position, 256]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, BYTES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The scores."""
        return self.scores(self.norm(x))


class Sliced(nn.Sequential):
    """Parts one after the other; what each of them carries goes from slice to slice."""

    carries = True

    def forward(self, input: Tensor, carried: tuple[Any, ...] | None = None) -> Any:
        """The output, and what each part carries (None where it carries nothing)."""
        x, out = input, []
        for part, own in zip(self, carried or (None,) * len(self), strict=True):
            x, own = part(x, own) if getattr(part, "carries", False) else (part(x), None)
            out.append(own)
        return x, tuple(out)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the scores with the next bytes, in nats."""
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def build(
    stage: int,
    n_stages: int,
    *,
    layers: int = 8,
    width: int = 128,
    heads: int = 4,
    seq: int = 128,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    slices: int = 1,
    parts: str = "",
) -> nn.Module:
    """Stage `stage` of `n_stages`: the same weights however the model is cut.

    With more than one slice a sequence, it carries keys, values and positions from one to the next.
    parts: how many of each stage, such as 5,4,4,5 (several numbers of stages: 9,9/5,4,4,5); left
    out, the stages are as even as can be.

    Raises: UsageError where the model has fewer parts than stages, or others than are given.
    """
    if width % heads:
        raise UsageError(f"--width {width} must be a multiple of the {heads} heads")
    # The parts in order, with their matrix work a token; attention itself grows with seq.
    block = [(4 * width + seq) * width, 8 * width * width]
    work = [width, *block * layers, BYTES * width]
    first, last = (given(parts, len(work), n_stages) if parts else cut(work, n_stages))[stage]

    def part(index: int) -> nn.Module:
        if index == 0:
            return Embedding(width, seq, slices > 1)
        if index == len(work) - 1:
            return Head(width)
        if index % 2:
            return Attention(width, heads, dropout, slices > 1)
        return Mlp(width, dropout)

    made = []
    for index in range(first, last):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1_000_003 * seed + index)  # a part's weights depend on nothing else
            made.append(part(index))
    return (Sliced if slices > 1 else nn.Sequential)(*made).to(dtype)


def given(text: str, n_parts: int, n_stages: int) -> list[tuple[int, int]]:
    """(first, beyond last) part of each stage, of the cut in `9,9/5,4,4,5` with so many stages."""
    for one in text.split("/"):
        sizes = [int(x) for x in one.split(",") if x.isdecimal() and x != "0"]
        if len(sizes) == n_stages and sum(sizes) == n_parts and one.count(",") == n_stages - 1:
            return list(pairwise((0, *accumulate(sizes))))
    raise UsageError(
        f"parts={text}: the schedule has {n_stages} stages and the model {n_parts} parts; give a "
        "number of parts for each stage, such as 5,4,4,5 (cuts for other numbers of stages after /)"
    )


def cut(work: Sequence[float], n_stages: int) -> list[tuple[int, int]]:
    """(first, beyond last) part of each stage: the partition whose heaviest stage is lightest."""
    if not 1 <= n_stages <= len(work):
        raise UsageError(
            f"the schedule has {n_stages} stages, but the model has {len(work)} parts "
            f"(2 a layer, the embedding and the head); give --layers {-(-(n_stages - 2) // 2)} "
            "or more"
        )
    return list(pairwise((0, *accumulate(partition(work, n_stages)))))
