"""What a stage hands from one slice of a sequence to the next, and the gradients on their way back.

A module with `carries = True` is called as `output, carried = module(x, carried=carried)`; None
goes into the first slice. Which slice waits for which is not said here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hocket.errors import RunError
from hocket.runtime.values import flatten, keywords, rebuild


def carries(module: nn.Module) -> bool | None:
    """Whether a module hands something from slice to slice; None where it does not say."""
    said = getattr(module, "carries", None)
    return None if said is None else bool(said)


class Carry:
    """What one stage carries, by microbatch, which here is a slice of a sequence.

    `values` (what the forward before left for this one), `leaves` (its tensors that need a
    gradient), `roots` (where this forward made what the next one gets) and `gradients` (those of
    the roots). Each is taken once; after the backward of its first slice nothing is left of a
    sequence.
    """

    def __init__(self, stage: int, m: int, slices: int) -> None:
        self.stage, self.slices = stage, slices
        self.values: list[Any] = [None] * m
        self.leaves: list[Sequence[Tensor] | None] = [None] * m
        self.roots: list[Sequence[GradientEdge] | None] = [None] * m
        self.gradients: list[Sequence[Tensor | None] | None] = [None] * m

    def carried(self, mb: int) -> Any:
        """What the forward before left for this one; None in the first slice."""
        value = self.values[mb]
        return None if value is None else value[0]

    def keep(self, made: Any, mb: int) -> Any:
        """The output of a slice, of what its forward made; what it carries waits for the next."""
        self.values[mb] = None
        if not isinstance(made, tuple) or len(made) != 2:
            raise RunError(
                f"stage {self.stage} has carries = True, so its forward must return the pair "
                f"(output, carried), but it returned {_kind(made)}"
            )
        output, carried = made
        part = mb % self.slices + 1
        if part < self.slices:
            if carried is None:
                raise RunError(
                    f"stage {self.stage} carried nothing on (None) from slice {part} of "
                    f"{self.slices}, which tells the next slice that it is the first one; return "
                    "(output, carried) with what the next slice needs, such as keys and values"
                )
            self._hand_on(carried, mb)
        return output

    def _hand_on(self, carried: Any, mb: int) -> None:
        structure, tensors = flatten(carried, f"what stage {self.stage} carries")
        if not torch.is_grad_enabled():
            self.values[mb + 1] = (carried,)
            return
        self.roots[mb] = [get_gradient_edge(t) for t in tensors if t.requires_grad]
        cut = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        self.leaves[mb + 1] = [t for t in cut if t.requires_grad]
        self.values[mb + 1] = (rebuild(structure, cut),)

    def start(self, mb: int) -> tuple[Sequence[GradientEdge], Sequence[Tensor | None]]:
        """More roots for the backward of a slice, and their gradients; none for the last slice."""
        roots, gradients = self.roots[mb], self.gradients[mb]
        self.roots[mb] = self.gradients[mb] = None
        if roots is None:
            return (), ()
        assert gradients is not None, f"the slice after {self.stage}F{mb} had no backward"
        return roots, gradients

    def finish(self, mb: int) -> None:
        """Gives the gradients of what this slice got to the slice before."""
        leaves, self.leaves[mb] = self.leaves[mb], None
        if leaves is not None:
            self.gradients[mb - 1] = [leaf.grad for leaf in leaves]


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return f"{len(value)} values" if isinstance(value, tuple) else f"a {type(value).__name__}"


def check_carries(modules: Mapping[int, nn.Module], why: str | None) -> None:
    """Checks what modules say of what they hand from one part of a sequence to the next.

    why: each must say something; None: it need not.

    Raises: RunError for one that says nothing then, or cannot be called as it says.
    """
    for module in modules.values():
        name = type(module).__name__  # and no stage: all ranks are to say the same
        names = keywords(module) if carries(module) else None
        if names is not None and "carried" not in names:
            raise RunError(f"{name} has carries = True, but its forward takes no `carried`")
        if carries(module) is None and why is not None:
            raise RunError(
                f"{why}, but {name} does not say what it hands from slice to slice; give it "
                "carries = True, take `carried` and return (output, carried), or carries = False "
                "if no position looks at another"
            )
