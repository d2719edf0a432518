"""A small byte-level GPT, cut into any number of stages. The model of `hocket run`.

To run your own model, write a file like this one: `build`, and where the defaults (this file's
cross-entropy, and batches of text) do not fit, `loss` and `batch`. Imports torch and errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from hocket.demo.data import batch
from hocket.errors import UsageError

__all__ = ["batch", "build", "loss"]

BYTES = 256  # the vocabulary


class Embedding(nn.Module):
    """Bytes `[sequence, position]` to vectors `[sequence, position, width]`."""

    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(seq, width)

    def forward(self, x: Tensor) -> Tensor:
        """The vector of each byte plus that of its position."""
        return self.byte(x) + self.position(torch.arange(x.shape[1], device=x.device))


class Attention(nn.Module):
    """Half a block: every position looks at those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """`x` plus what attention adds, `[sequence, position, width]`."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))


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
) -> nn.Module:
    """Stage `stage` of `n_stages`: the same weights however the model is cut.

    Raises: UsageError where the model has fewer parts than stages.
    """
    if width % heads:
        raise UsageError(f"--width {width} must be a multiple of the {heads} heads")
    # The parts in order, with their matrix work a token; attention itself grows with seq.
    block = [(4 * width + seq) * width, 8 * width * width]
    work = [width, *block * layers, BYTES * width]
    first, last = cut(work, n_stages)[stage]

    def part(index: int) -> nn.Module:
        if index == 0:
            return Embedding(width, seq)
        if index == len(work) - 1:
            return Head(width)
        return Attention(width, heads, dropout) if index % 2 else Mlp(width, dropout)

    parts = []
    for index in range(first, last):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1_000_003 * seed + index)  # a part's weights depend on nothing else
            parts.append(part(index))
    return nn.Sequential(*parts).to(dtype)


def cut(work: Sequence[float], n_stages: int) -> list[tuple[int, int]]:
    """(first, beyond last) part of each stage: the cut whose heaviest stage is lightest.

    Among those, the cut with the smallest sum of squares, so that the rest is even as well.
    """
    if not 1 <= n_stages <= len(work):
        raise UsageError(
            f"the schedule has {n_stages} stages, but the model has {len(work)} parts "
            f"(2 a layer, the embedding and the head); give --layers {-(-(n_stages - 2) // 2)} "
            "or more"
        )
    upto = [0, *accumulate(work)]
    # best[j]: (heaviest stage, sum of squares, borders) of the first j parts in s stages.
    best = {0: (0.0, 0.0, (0,))}
    for stages in range(1, n_stages + 1):
        best = {
            j: min(
                (max(high, own := upto[j] - upto[i]), squares + own * own, (*borders, j))
                for i, (high, squares, borders) in best.items()
                if i < j
            )
            for j in range(stages, len(work) - (n_stages - stages) + 1)
        }
    borders = best[len(work)][2]
    return list(pairwise(borders))
