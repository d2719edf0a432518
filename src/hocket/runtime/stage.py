"""One stage on one rank: forward, full backward, and backward in two halves, a microbatch each.

Holds what a microbatch keeps alive between its actions, and frees it at once; knows neither orders
nor messages.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hocket.errors import RunError
from hocket.runtime.fsdp import Shards
from hocket.runtime.moved import Moved
from hocket.runtime.records import HERE, Record
from hocket.runtime.remade import Remade
from hocket.runtime.slice_state import Carry, carries
from hocket.runtime.split import warn_if_empty
from hocket.runtime.values import arguments, call, flatten, map_tensors, rebuild, tensors_of

Loss = Callable[[Any, Any], Tensor]
Observer = Callable[[int, int, tuple[Any, ...], dict[str, Any]], Any]


class Stage:
    """The life of each microbatch in one stage.

    Per microbatch: `inputs` (put there by a receive, a neighbour or the data), `leaves` (input
    tensors that need a gradient), `roots` (where the backward starts: edges of the graph, which do
    not keep the output itself alive), `gradients` (those of the roots), `more` (roots and
    gradients of losses that were recorded), `results` (the output on its way out) and `returns`
    (the gradients of the leaves on their way back). Each is taken once and then empty again.
    `carry` has what goes from slice to slice, where the module does that. `arguments` are what the
    module gets beside its input, and stay until the next step. `observers` are called
    before each forward with stage, microbatch, and the arguments and keyword arguments of the
    module.
    """

    def __init__(
        self, index: int, module: nn.Module, m: int, loss: Loss | None, plan: Any, slices: int = 1
    ) -> None:
        self.index = index
        self.module = module
        self.loss = loss
        self.plan = plan
        self.shards = Shards(module)
        self.carry = Carry(index, m, slices) if carries(module) else None
        self.keys: Callable[[int], AbstractContextManager] | None = None
        self.observers: tuple[Observer, ...] = ()
        self.fresh = True  # not every kind of input was seen in a forward with gradients yet
        self.writes = False  # the module writes into its input
        self.reported = False  # an output that needs no gradient
        self.reported_whole = False  # the first I was seen
        self.inputs: list[Any] = [None] * m
        self.arguments: list[dict[str, Any]] = [{}] * m
        self.keys_given: tuple[str, ...] = ()  # of all stages' arguments
        self.leaves: list[Sequence[Tensor] | None] = [None] * m
        self.roots: list[Sequence[GradientEdge] | None] = [None] * m
        self.gradients: list[Sequence[Tensor | None] | None] = [None] * m
        self.results: list[Any] = [None] * m
        self.returns: list[Sequence[Tensor | None] | None] = [None] * m
        self.pending: list[Any] = [None] * m
        self.targets: list[Any] = [None] * m
        self.weights: tuple[float, ...] = ()
        self.scale = 1.0
        self._weight_kind: Any = None
        self._weight_tensors: Sequence[Tensor] = ()
        self.weigh: Callable[[], tuple[float, ...]] | None = None
        self.losses: list[Tensor | None] = [None] * m
        self.records: list[list[Record]] = [[] for _ in range(m)]
        self.more: list[Any] = [None] * m
        self.remade: list[Remade | None] = [None] * m
        self.moved: list[Moved | None] = [None] * m
        self.outputs: list[Any] | None = None

    # --- forward ----------------------------------------------------------------------------

    def forward(self, mb: int) -> None:
        """F: leaves the output in `results`."""
        out = self._run(mb)
        if self.records[mb]:
            self._take_records(mb)
        if isinstance(out, Tensor):
            self.roots[mb] = (get_gradient_edge(out),) if out.requires_grad else ()
        else:
            _, tensors = flatten(out, f"the output of stage {self.index}")
            self.roots[mb] = [get_gradient_edge(t) for t in tensors if t.requires_grad]
        if not self.roots[mb] and not self.reported:
            self._report_if_cut_off(mb)
        self.results[mb] = (out,)

    def forward_loss(self, mb: int) -> None:
        """F of a path's last stage: leaves the loss in `losses`.

        Of a microbatch of weight 0 there is no loss, which may not be a number; the backward runs
        all the same, with zeros.

        Raises: RunError for a loss that is not one number, or has no gradient.
        """
        out = self._run(mb)
        if not self.weights[mb]:
            self.records[mb] = []
            ends = [t for t in tensors_of(out) if t.requires_grad]
            self.roots[mb] = [get_gradient_edge(t) for t in ends]
            self.gradients[mb] = [torch.zeros_like(t) for t in ends]
            self.losses[mb], self.targets[mb] = _zero(out), None
            return
        loss = self._loss_of(out, mb)
        if not loss.requires_grad:
            raise RunError(
                f"the loss of microbatch {mb} has no gradient; is the output detached, computed "
                "under no_grad, or every parameter frozen?"
            )
        if self.records[mb]:
            self._take_records(mb)
        self.roots[mb] = (get_gradient_edge(loss),)
        self.gradients[mb] = (self._weight(loss, mb),)
        self.losses[mb] = loss.detach()

    def forward_dropped(self, mb: int, forward: Callable[[int], None]) -> None:
        """F, by one of the above, that keeps only the stage's input until R."""
        value, target = self.inputs[mb], self.targets[mb]
        if self.carry is not None:
            raise RunError(
                f"stage {self.index} carries values from slice to slice, which R cannot make "
                "again; leave R out of the order for it"
            )
        self.remade[mb] = remade = Remade(
            f"{self.index}F{mb}", value, target, tensors_of(value[0]), seeded=self.keys is not None
        )
        with remade.dropping():
            forward(mb)

    def recompute(self, mb: int) -> None:
        """R: makes again what F dropped."""
        remade, self.remade[mb] = self.remade[mb], None
        assert remade is not None, f"no forward of {self.index}R{mb}"
        taken = self.records[mb]

        def run() -> None:
            with self.keys(mb) if self.keys is not None else _NOTHING:
                out = self._forward(remade.value[0], mb)
            if remade.target is not None and self.loss is not None and self.weights[mb]:
                HERE.records = self.records[mb]
                self.loss(out, remade.target[0])
                HERE.records = None

        remade.make(run, self.module.buffers())
        self.records[mb] = taken

    def forward_moved(self, mb: int, forward: Callable[[int], None]) -> None:
        """F, by one of the above, whose activations D can move."""
        held = [self.inputs[mb], self.targets[mb], self._own()]
        if self.carry is not None:
            held.append(self.carry.carried(mb))
        self.moved[mb] = moved = Moved(f"{self.index}F{mb}", tensors_of(held))
        with moved.keeping():
            forward(mb)

    def _own(self) -> list[Tensor]:
        """Parameters and buffers, also of a loss that has some."""
        modules = [x for x in (self.module, self.loss) if isinstance(x, nn.Module)]
        return [t for x in modules for t in (*x.parameters(), *x.buffers())]

    def offload(self, mb: int) -> None:
        """D: moves to the host what F saved."""
        moved = self.moved[mb]
        assert moved is not None, f"no forward of {self.index}D{mb}"
        moved.out()

    def reload(self, mb: int) -> None:
        """U: brings back what D moved."""
        moved, self.moved[mb] = self.moved[mb], None
        assert moved is not None, f"no offload of {self.index}U{mb}"
        moved.back()

    def allocate(self, mb: int) -> None:
        """A: lets U start, which takes the memory itself."""

    def evaluate(self, mb: int) -> None:
        """F of an evaluation: nothing is kept for a backward."""
        self.results[mb] = (self._run(mb),)
        self._take_records(mb)

    def evaluate_loss(self, mb: int) -> None:
        """F of a path's last stage in an evaluation."""
        out = self._run(mb)
        if self.outputs is not None:
            self.outputs[mb] = out
        if self.targets[mb] is not None:
            self.losses[mb] = self._loss_of(out, mb) if self.weights[mb] else _zero(out)
            self.targets[mb] = None
        self._take_records(mb)

    def _run(self, mb: int) -> Any:
        """The output; the gradient mode is the caller's."""
        value, self.inputs[mb] = self.inputs[mb], None
        assert value is not None, f"{self.index}F{mb} has no input"
        if self.keys is None:
            return self._call(value[0], mb)
        with self.keys(mb):
            return self._call(value[0], mb)

    def _call(self, value: Any, mb: int) -> Any:
        if self.observers:
            more = {} if self.carry is None else {"carried": self.carry.carried(mb)}
            more |= self.arguments[mb]
            for observe in self.observers:
                observe(self.index, mb, *arguments(value, **more))
        if self.fresh and torch.is_grad_enabled():
            return self._first_call(value, mb)
        return self._forward(value, mb)

    def _forward(self, value: Any, mb: int) -> Any:
        if self.writes:
            value = map_tensors(value, _copied)
        HERE.records = self.records[mb] = []
        if self.carry is None:
            made = call(self.module, value, **self.arguments[mb])
        else:
            carried = self.carry.carried(mb)
            carried = map_tensors(carried, _copied) if self.writes else carried
            more = self.arguments[mb]
            made = self.carry.keep(call(self.module, value, carried=carried, **more), mb)
        HERE.records = None
        return made

    def _first_call(self, value: Any, mb: int) -> Any:
        """The first forward of the stage, which shows whether the module writes into its input.

        One that does is called again, with a copy of it, from now on in every forward.
        """
        self.fresh = self.carry is not None and self.carry.carried(mb) is None
        _warn_of_dtypes(self.index, self.module, value)
        buffers = [(b, b.detach().clone()) for b in self.module.buffers()]
        numbers = torch.get_rng_state()
        try:
            return self._forward(value, mb)
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
        for b, before in buffers:
            b.detach().copy_(before)
        torch.set_rng_state(numbers)
        self.writes = True
        if (remade := self.remade[mb]) is not None:
            remade.places.clear()
        if (moved := self.moved[mb]) is not None:
            moved.clear()
        return self._forward(value, mb)

    def _report_if_cut_off(self, mb: int) -> None:
        self.reported = True
        trained = any(p.requires_grad for p in self.module.parameters())
        if self.leaves[mb] or trained:
            warnings.warn(
                f"the output of stage {self.index} needs no gradient, so its parameters and the "
                "stages before it get none; is it detached, or checkpointed as a whole by a "
                "reentrant checkpoint (give use_reentrant=False)?",
                stacklevel=2,
            )

    def _loss_of(self, out: Any, mb: int) -> Tensor:
        target, self.targets[mb] = self.targets[mb], None
        assert self.loss is not None
        HERE.records = self.records[mb]
        loss = self.loss(out, target[0])
        HERE.records = None
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"{tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise RunError(f"the loss of microbatch {mb} is {what}; it must be one number")
        return loss if loss.dim() == 0 else loss.reshape(())

    def _take_records(self, mb: int) -> None:
        """Keeps of what was recorded the numbers, and of losses the ends of their graphs."""
        taken, edges, gradients = [], [], []
        for name, value, weight in self.records[mb]:
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise RunError(f"{name!r} is {tuple(value.shape)}; record one number")
                if weight and value.requires_grad and self._shares()[mb]:
                    edges.append(get_gradient_edge(value))
                    gradients.append((weight * self._weight(value, mb)).expand_as(value))
                value = value.detach()
            taken.append((name, value, weight))
        self.records[mb] = taken
        self.more[mb] = (edges, gradients) if edges else None

    def _shares(self) -> tuple[float, ...]:
        """The weights of all microbatches, which a stage that is not the last seldom needs."""
        if not self.weights and self.weigh is not None:
            self.weights = self.weigh()
        return self.weights

    def _weight(self, loss: Tensor, mb: int) -> Tensor:
        """The gradient of a microbatch's loss: its scaled weight, as a tensor like the loss."""
        kind = (self.weights, self.scale, loss.dtype, loss.device)
        if self._weight_kind != kind:
            made = torch.tensor(self.weights, dtype=loss.dtype, device=loss.device) * self.scale
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
            if not self.reported_whole:
                self.reported_whole = True
                warn_if_empty(self.index, self.plan, pending)
        self.pending[mb] = (pending,)
        self._finish(mb)

    def weight_backward(self, mb: int) -> None:
        """W: adds the gradients that I put off."""
        (pending,), self.pending[mb] = self.pending[mb], None
        if pending is not None:
            pending.run()
            self.shards.fold()

    def open(self) -> None:
        """Before the actions of a step."""
        if self.plan is not None:
            self.shards.hold()

    def close(self) -> None:
        """After them; collective among the ranks that FSDP shards the stage over."""
        if self.plan is not None:
            self.shards.reduce()

    def _start(self, mb: int) -> tuple[tuple[GradientEdge, ...], tuple[Tensor | None, ...]]:
        roots, gradients = self.roots[mb], self.gradients[mb]
        self.roots[mb] = self.gradients[mb] = None
        assert roots is not None, f"no forward of {self.index}F{mb}"
        assert gradients is not None, f"no gradient for the output of {self.index}F{mb}"
        if self.carry is not None:
            more, theirs = self.carry.start(mb)
            roots, gradients = (*roots, *more), (*gradients, *theirs)
        if self.more[mb] is not None:
            (more, theirs), self.more[mb] = self.more[mb], None
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
        to.leaves[mb] = [t for t in leaves if t.requires_grad] or None
        to.inputs[mb] = (rebuild(structure, leaves),)

    def hand_back(self, mb: int, to: Stage) -> None:
        """Gives the gradients of the input to the previous stage."""
        to.gradients[mb], self.returns[mb] = self.returns[mb], None

    # --- state ------------------------------------------------------------------------------

    def leftovers(self) -> list[str]:
        """What is still held, for the check after a step; empty when all is clean."""
        names = (
            "inputs", "leaves", "roots", "gradients", "more", "results", "returns", "pending",
            "remade", "moved",
        )  # fmt: skip
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


def _copied(t: Tensor) -> Tensor:
    return t.clone() if t.requires_grad else t


def _zero(out: Any) -> Tensor:
    """A loss of 0, where the output is."""
    device = next((t.device for t in tensors_of(out)), torch.device("cpu"))
    return torch.zeros((), dtype=torch.float64, device=device)


def _warn_of_dtypes(stage: int, module: nn.Module, value: Any) -> None:
    """Warns where no input of a stage has the type of any of its parameters."""
    own = {p.dtype for p in module.parameters() if p.is_floating_point()}
    got = [t for t in tensors_of(value) if t.is_floating_point()]
    cast = any(torch.is_autocast_enabled(t.device.type) for t in got)
    if own and got and not cast and not own & {t.dtype for t in got}:
        names = ", ".join(sorted(str(dtype) for dtype in own))
        warnings.warn(
            f"stage {stage} has parameters of {names}, but gets an input of {got[0].dtype}; cast "
            "the output of the stage before if that is not meant",
            stacklevel=2,
        )


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
