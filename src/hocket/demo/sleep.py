"""Stages that only sleep, for known times: what a schedule costs without what a model costs.

`hocket run ... --model hocket.demo.sleep:build -O f=0.01 -O i=0.01 -O w=0.01`, or `-O costs=FILE`
for the times of a costs.toml.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hocket.costs import load_costs, per_stage, recut
from hocket.costs.scaling import list_length
from hocket.errors import CostError, UsageError
from hocket.measured.readings import SECONDS

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

    W is where a weight's gradient is complete: there sleeps a hook. Ones stay ones, in any number
    of stages.
    """

    carries = False  # slices of a sequence have nothing to do with each other

    draws = False

    def __init__(self, f: float, i: float, w: float) -> None:
        super().__init__()
        self.f, self.i = f, i
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.eye_(self.linear.weight)
        self.linear.weight.register_post_accumulate_grad_hook(_sleeping(w))

    def forward(self, x: Tensor) -> Tensor:
        """Vectors `[row, position, 8]` to vectors."""
        return _Nap.apply(self.linear(x), self.f, self.i)


def _sleeping(seconds: float) -> Callable[[Tensor], None]:
    return lambda _: nap(seconds)


def build(
    stage: int, n_stages: int, *, f: float = 0.01, i: float = 0.01, w: float = 0.01,
    costs: str | None = None,
) -> nn.Module:  # fmt: skip
    """A stage that sleeps f, i and w seconds, all stages alike.

    costs: instead, a costs.toml whose F, I and W each stage sleeps. Lists of fewer values than
    there are stages are divided: each value is that of as many stages.
    Raises: CostError, UsageError for a file that is not for such stages, or has no unit of time.
    """
    return Sleep(f, i, w) if costs is None else Sleep(*_naps(costs, stage, n_stages))


def _naps(file: str, stage: int, n_stages: int) -> tuple[float, float, float]:
    """Seconds of F, I and W of a stage."""
    costs = load_costs(file)
    length = list_length(costs)
    if length is None or costs.unit not in SECONDS:
        raise UsageError(
            f"{file}: to sleep so long, F, I or W must be a list, one value per stage, and unit "
            f"one of {', '.join(SECONDS)}"
        )
    try:
        fitting = recut(costs, length, n_stages)
        rows = [per_stage(kind, getattr(fitting, kind), n_stages) for kind in ("F", "I", "W")]
    except CostError as error:
        raise CostError(f"{file}: {error}") from None
    f, i, w = (float(row[stage]) * SECONDS[costs.unit] for row in rows)
    return f, i, w


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Mean square of what the output differs from ones; the targets are not read."""
    return (output - 1).square().mean()


def batch(step: int, size: int, *, seq: int = 8) -> tuple[Tensor, Tensor]:
    """Ones, `[row, position, 8]`, and targets of zeros, `[row, position]`."""
    return torch.ones(size, seq, WIDTH), torch.zeros(size, seq)
