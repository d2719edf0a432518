"""The unpipelined model as a schedule of its own, and the comparison with it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hocket.errors import RunError
from hocket.ir import Action, Kind, Placement, Schedule

TOLERANCE = {
    torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2,
}  # fmt: skip
SLICED = " Does every slice use all that the stage carried, and know its positions?"


@contextmanager
def without_dropout(modules: Mapping[int, nn.Module]) -> Generator[None]:
    """The modules in evaluation mode, afterwards each of its parts as it was."""
    training = [part for module in modules.values() for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def one_after_the_other(schedule: Schedule, *, whole: bool) -> Schedule:
    """The order without any pipelining: every microbatch alone, forward and full backward.

    The slices of a sequence go together. whole: the batch is a single microbatch on path 0, its
    sequences uncut.
    """
    placement = schedule.placement
    if whole:
        placement = Placement((placement.paths[0],), (0,))
    order: dict = {queue: [] for queue in placement.queues}
    for first in range(0, placement.m, placement.slices):
        walk = [
            (queue, stage, mb)
            for mb in range(first, first + placement.slices)
            for stage, queue in enumerate(placement.paths[placement.path_of[mb]])
        ]
        for kind, steps in ((Kind.F, walk), (Kind.B, walk[::-1])):
            for queue, stage, mb in steps:
                order[queue].append([Action(kind, stage, mb)])
    return Schedule.from_order("one-after-the-other", placement, order)


class Difference(NamedTuple):
    """What is different, in words: the gradient furthest off, the loss; "" where all is right."""

    gradient: str
    loss: str


def compare(
    modules: Mapping[int, nn.Module], step: Callable[[], Tensor], reference: Callable[[], Tensor]
) -> Difference:
    """How a step's loss and gradients differ from those of the reference.

    Gradients and buffers are left as they were.
    """
    saved = _Saved(modules)
    try:
        loss, got = step(), gradients(modules)
        saved.forget()
        want = reference()
        text = difference(got, gradients(modules))
    finally:
        saved.restore()
    dtype = next((g.dtype for g in got.values() if g is not None), torch.float32)
    return Difference(text, compare_losses(loss, want, dtype))


class _Saved:
    """Gradients and buffers of modules, set aside and put back."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self.modules = modules
        self.grads = [(p, p.grad) for module in modules.values() for p in module.parameters()]
        self.buffers = [
            (b, b.detach().clone()) for module in modules.values() for b in module.buffers()
        ]
        self.forget()

    def forget(self) -> None:
        """Parameters without gradients, buffers as they were."""
        for p, _ in self.grads:
            p.grad = None
        for b, before in self.buffers:
            b.detach().copy_(before)

    def restore(self) -> None:
        """All as it was."""
        self.forget()
        for p, grad in self.grads:
            p.grad = grad


def gradients(modules: Mapping[int, nn.Module]) -> dict[tuple[int, str], Tensor | None]:
    """The gradients by (stage, parameter name)."""
    return {
        (s, name): p.grad for s, module in modules.items() for name, p in module.named_parameters()
    }


def difference(
    got: Mapping[tuple[int, str], Tensor | None], want: Mapping[tuple[int, str], Tensor | None]
) -> str:
    """The parameter whose gradient is furthest off, in words; "" where all are right."""
    worst, text = 1.0, ""
    for (stage, name), right in want.items():
        grad = got[stage, name]
        if grad is None or right is None:
            missing = grad is not right and any(
                t is not None and bool(t.any()) for t in (grad, right)
            )
            if missing:
                side = "no gradient" if grad is None else "a gradient where there is none"
                return f"stage {stage}, {name}: the pipeline gives {side}"
            continue
        limit = TOLERANCE.get(right.dtype, 1e-3)
        scale = float(right.norm()) or 1.0
        error = float((grad - right).norm()) / scale
        if not error / limit <= worst:  # also where it is not a number
            worst = error / limit
            text = f"stage {stage}, {name}: the gradient is off by {error:.2g} of its norm"
    return text


def compare_losses(got: Tensor, want: Tensor, dtype: torch.dtype) -> str:
    """How far the losses differ, in words; "" where they agree."""
    limit = TOLERANCE.get(dtype, 1e-3)
    if abs(float(got - want)) <= limit * max(abs(float(want)), 1e-6):
        return ""
    return f"the loss is {float(got):.9g}, but that of the unpipelined model {float(want):.9g}"


def refuse(rank_texts: list[str], loss: str, *, sliced: bool) -> None:
    """Raises RunError with every rank's difference, if there is any."""
    lines = [f"rank {r}: {t}" for r, t in enumerate(rank_texts) if t]
    if loss:
        lines.insert(0, loss)
    if lines:
        raise RunError(
            "the pipelined step differs from the unpipelined model:\n  " + "\n  ".join(lines)
            + "\n  Is the loss a mean over the rows? Do the stages draw random numbers (give "
            "seed=) or mix rows (batch norm)?" + (SLICED if sliced else "")
        )  # fmt: skip
