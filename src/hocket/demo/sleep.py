"""Stages that only sleep, for known times: what a schedule costs without what a model costs.

`hocket run ... --model hocket.demo.sleep:build -O f=0.01 -O i=0.01 -O w=0.01`. Imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["batch", "build", "loss"]

SPIN = 2e-4  # seconds before the end from which on the clock is read all the time
WIDTH = 8


def nap(seconds: float) -> None:
    """Returns after this time, a few microseconds late at most where a core is free."""
    end = time.perf_counter() + seconds
    if seconds > SPIN:
        time.sleep(seconds - SPIN)
    while time.perf_counter() < end:
        pass


class _Nap(torch.autograd.Function):
    """Its input unchanged; sleeps in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: float, i: float) -> Tensor:
        ctx.seconds = i
        nap(f)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        nap(ctx.seconds)
        return grads[0], None, None


class Sleep(nn.Module):
    """A stage that sleeps `f` seconds in F, `i` in I and `w` in W, and so i + w in B.

    W is where a weight's gradient is complete: there sleeps a hook.
    """

    carries = False  # slices of a sequence have nothing to do with each other

    draws = False

    def __init__(self, f: float, i: float, w: float) -> None:
        super().__init__()
        self.f, self.i = f, i
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.linear.weight.register_post_accumulate_grad_hook(_sleeping(w))

    def forward(self, x: Tensor) -> Tensor:
        """Vectors `[row, position, 8]` to vectors."""
        return _Nap.apply(self.linear(x), self.f, self.i)


def _sleeping(seconds: float) -> Callable[[Tensor], None]:
    return lambda _: nap(seconds)


def build(
    stage: int, n_stages: int, *, f: float = 0.01, i: float = 0.01, w: float = 0.01
) -> nn.Module:
    """A stage that sleeps f, i and w seconds; all stages are alike."""
    return Sleep(f, i, w)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Mean square of the output; the targets are not read."""
    return output.square().mean()


def batch(step: int, size: int, *, seq: int = 8) -> tuple[Tensor, Tensor]:
    """Ones, `[row, position, 8]`, and targets of zeros, `[row, position]`."""
    return torch.ones(size, seq, WIDTH), torch.zeros(size, seq)
