"""One stage on one rank: forward, whole backward, and backward in two halves, a microbatch each.

Holds what a microbatch keeps alive between its actions, and frees it at once; knows neither orders
nor messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hocket.errors import RunError
from hocket.runtime.slice_state import Carry, carries
from hocket.runtime.values import arguments, call, flatten, rebuild

Loss = Callable[[Any, Any], Tensor]
Observer = Callable[[int, int, tuple[Any, ...], dict[str, Any]], Any]


class Stage:
    """The life of each microbatch in one stage.

    Per microbatch: `inputs` (put there by a receive, a neighbour or the data), `leaves` (input
    tensors that need a gradient), `roots` (where the backward starts: edges of the graph, which do
    not keep the output itself alive), `gradients` (those of the
    roots, or None for the loss), `results` (the output on its way out) and `returns` (the
    gradients of the leaves on their way back). Each is taken once and then empty again. `carry`
    has what goes from slice to slice, where the module does that. `observers` are called before
    each forward with stage, microbatch, and the arguments and keyword arguments of the module.
    """

    def __init__(
        self, index: int, module: nn.Module, m: int, loss: Loss | None, plan: Any, slices: int = 1
    ) -> None:
        self.index = index
        self.module = module
        self.loss = loss
        self.plan = plan
        self.carry = Carry(index, m, slices) if carries(module) else None
        self.keys: Callable[[int], AbstractContextManager] | None = None
        self.observers: tuple[Observer, ...] = ()
        self.inputs: list[Any] = [None] * m
        self.leaves: list[Sequence[Tensor] | None] = [None] * m
        self.roots: list[Sequence[GradientEdge] | None] = [None] * m
        self.gradients: list[Sequence[Tensor | None] | None] = [None] * m
        self.results: list[Any] = [None] * m
        self.returns: list[Sequence[Tensor | None] | None] = [None] * m
        self.pending: list[Any] = [None] * m
        self.targets: list[Any] = [None] * m
        self.weights: tuple[float, ...] = ()
        self._weight_kind: Any = None
        self._weight_tensors: Sequence[Tensor] = ()
        self.losses: list[Tensor | None] = [None] * m
        self.outputs: list[Any] | None = None

    # --- forward ----------------------------------------------------------------------------

    def forward(self, mb: int) -> None:
        """F: leaves the output in `results`."""
        out = self._run(mb)
        if isinstance(out, Tensor):
            self.roots[mb] = (get_gradient_edge(out),) if out.requires_grad else ()
        else:
            _, tensors = flatten(out, f"the output of stage {self.index}")
            self.roots[mb] = [get_gradient_edge(t) for t in tensors if t.requires_grad]
        self.results[mb] = (out,)

    def forward_loss(self, mb: int) -> None:
        """F of a path's last stage: leaves the loss in `losses`."""
        loss = self._loss_of(self._run(mb), mb)
        if loss.requires_grad:
            self.roots[mb] = (get_gradient_edge(loss),)
            self.gradients[mb] = (self._weight(loss, mb),)
        else:
            self.roots[mb], self.gradients[mb] = (), ()
        self.losses[mb] = loss.detach()

    def evaluate(self, mb: int) -> None:
        """F of an evaluation: nothing is kept for a backward."""
        self.results[mb] = (self._run(mb),)

    def evaluate_loss(self, mb: int) -> None:
        """F of a path's last stage in an evaluation."""
        out = self._run(mb)
        if self.outputs is not None:
            self.outputs[mb] = out
        if self.targets[mb] is not None:
            self.losses[mb] = self._loss_of(out, mb)

    def _run(self, mb: int) -> Any:
        """The output; the gradient mode is the caller's."""
        value, self.inputs[mb] = self.inputs[mb], None
        assert value is not None, f"{self.index}F{mb} has no input"
        if self.plan is None and self.keys is None:
            return self._call(value[0], mb)
        around = self.keys(mb) if self.keys is not None else _NOTHING
        forward = self.plan.forward() if self.plan is not None else _NOTHING
        with around, forward:
            return self._call(value[0], mb)

    def _call(self, value: Any, mb: int) -> Any:
        if self.observers:
            more = {} if self.carry is None else {"carried": self.carry.carried(mb)}
            for observe in self.observers:
                observe(self.index, mb, *arguments(value, **more))
        if self.carry is None:
            return call(self.module, value)
        return self.carry.forward(self.module, value, mb)

    def _loss_of(self, out: Any, mb: int) -> Tensor:
        target, self.targets[mb] = self.targets[mb], None
        assert self.loss is not None
        loss = self.loss(out, target[0])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"{tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise RunError(f"the loss of microbatch {mb} is {what}; it must be one number")
        return loss if loss.dim() == 0 else loss.reshape(())

    def _weight(self, loss: Tensor, mb: int) -> Tensor:
        """The gradient of a microbatch's loss: its weight, as a tensor like the loss."""
        kind = (self.weights, loss.dtype, loss.device)
        if self._weight_kind != kind:
            made = torch.tensor(self.weights, dtype=loss.dtype, device=loss.device)
            self._weight_kind, self._weight_tensors = kind, made.unbind()
        return self._weight_tensors[mb]

    # --- backward ---------------------------------------------------------------------------

    def backward(self, mb: int) -> None:
        """B: leaves the gradients of the input in `returns`, adds those of the parameters."""
        roots, gradients = self._start(mb)
        if roots:
            with self.keys(mb) if self.keys is not None else _NOTHING:
                _backward(roots, gradients)
        self._finish(mb)

    def input_backward(self, mb: int) -> None:
        """I: like B, but the gradients of the weights wait in `pending`."""
        roots, gradients = self._start(mb)
        pending = None
        if roots:
            around = self.keys(mb) if self.keys is not None else _NOTHING
            with around, self.plan.input_backward() as pending:
                _backward(roots, gradients)
        self.pending[mb] = (pending,)
        self._finish(mb)

    def weight_backward(self, mb: int) -> None:
        """W: adds the gradients that I put off."""
        (pending,), self.pending[mb] = self.pending[mb], None
        if pending is not None:
            pending.run()

    def _start(self, mb: int) -> tuple[tuple[GradientEdge, ...], tuple[Tensor | None, ...]]:
        roots, gradients = self.roots[mb], self.gradients[mb]
        self.roots[mb] = self.gradients[mb] = None
        assert roots is not None, f"no forward of {self.index}F{mb}"
        assert gradients is not None, f"no gradient for the output of {self.index}F{mb}"
        if self.carry is not None:
            more, theirs = self.carry.start(mb)
            roots, gradients = (*roots, *more), (*gradients, *theirs)
        there = [i for i, gradient in enumerate(gradients) if gradient is not None]
        return tuple(roots[i] for i in there), tuple(gradients[i] for i in there)

    def _finish(self, mb: int) -> None:
        if self.carry is not None:
            self.carry.finish(mb)
        leaves, self.leaves[mb] = self.leaves[mb], None
        if self.index:  # nobody wants the gradients of the data
            self.returns[mb] = [leaf.grad for leaf in leaves] if leaves else ()

    # --- neighbours on the same rank ---------------------------------------------------------

    def hand_on(self, mb: int, to: Stage) -> None:
        """Gives the output to the next stage, cut off from this one's graph, without a copy."""
        (out,), self.results[mb] = self.results[mb], None
        if isinstance(out, Tensor):
            leaf = out.detach()
            if out.requires_grad:
                leaf.requires_grad_()
                to.leaves[mb] = (leaf,)
            to.inputs[mb] = (leaf,)
            return
        structure, tensors = flatten(out)
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        to.leaves[mb] = [t for t in leaves if t.requires_grad]
        to.inputs[mb] = (rebuild(structure, leaves),)

    def hand_back(self, mb: int, to: Stage) -> None:
        """Gives the gradients of the input to the previous stage."""
        to.gradients[mb], self.returns[mb] = self.returns[mb], None

    # --- state ------------------------------------------------------------------------------

    def leftovers(self) -> list[str]:
        """What is still held, for the check after a step; empty when all is clean."""
        names = ("inputs", "leaves", "roots", "gradients", "results", "returns", "pending")
        held = {name: getattr(self, name) for name in names}
        if self.carry is not None:
            more = ("values", "leaves", "roots", "gradients")
            held |= {f"carried {name}": getattr(self.carry, name) for name in more}
        left = []
        for name, slots in held.items():
            if slots.count(None) < len(slots):
                mbs = [mb for mb, value in enumerate(slots) if value is not None]
                left.append(f"{name} of microbatches {mbs} in stage {self.index}")
        return left


_NOTHING = nullcontext()
_ENGINE = getattr(torch.autograd.Variable, "_execution_engine", None)


def _backward(roots: tuple[GradientEdge, ...], gradients: tuple[Tensor | None, ...]) -> None:
    """torch.autograd.backward, without the 5 us that checking the shapes in Python takes.

    The engine checks them again; they are right by construction.
    """
    if _ENGINE is None:
        torch.autograd.backward(roots, gradients)
        return
    _ENGINE.run_backward(
        roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )
