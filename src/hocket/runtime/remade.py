"""Activations that F drops and R makes again: what autograd saved, by its place in the forward."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from hocket.errors import RunError


class _Place:
    """One tensor that autograd saved: empty between F and R."""

    __slots__ = ("form", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.form = tensor.shape, tensor.dtype
        self.tensor: Tensor | None = None


class Remade:
    """One microbatch of one stage between its F and its R.

    Parameters, and the tensors of the stage's own input, are never dropped. The graph of F stays,
    so that whoever holds an edge of it need not know of R. seeded: each layer gets random numbers
    of its own anyway, and no state of the generators is kept.

    Source: Chen et al., arXiv 1604.06174, section 4; by saved-tensor hooks, as
    torch.utils.checkpoint does without reentry.
    """

    def __init__(
        self, what: str, value: Any, target: Any, inputs: Iterable[Tensor], *, seeded: bool
    ) -> None:
        self.what, self.value, self.target = what, value, target
        inputs = tuple(inputs)
        self.random = None if seeded else (torch.get_rng_state(), *get_device_states(*inputs))
        self.kept = {t.data_ptr() for t in inputs}
        self._written = [(t, t._version) for t in inputs]
        self.places: list[_Place] = []

    def _stays(self, tensor: Tensor) -> bool:
        own = isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)
        return own or tensor.data_ptr() in self.kept

    @contextmanager
    def dropping(self) -> Generator[None]:
        """Around F: what it saves for the backward is dropped."""

        def drop(tensor: Tensor) -> Tensor | _Place:
            if self._stays(tensor):
                return tensor
            self.places.append(_Place(tensor))
            return self.places[-1]

        with saved_tensors_hooks(drop, self._find):
            yield

    def make(self, run: Callable[[], Any], buffers: Iterable[Tensor]) -> None:
        """R: runs the forward again, with the same random numbers, and keeps what it saves.

        Raises: RunError where F wrote into its input, or saved something else.
        """
        if any(t._version != version for t, version in self._written):
            raise RunError(
                f"{self.what} wrote into its input, so that it cannot run again; write into a copy "
                "there (clone it first), or leave R out of the order for this stage"
            )
        before = [(b, b.detach().clone()) for b in buffers]
        made: list[Tensor] = []

        def keep(tensor: Tensor) -> None:
            if not self._stays(tensor):
                made.append(tensor.detach())

        with self._same_numbers(), saved_tensors_hooks(keep, lambda _: _never()):
            run()
        for b, old in before:
            b.detach().copy_(old)
        if [x.form for x in self.places] != [(t.shape, t.dtype) for t in made]:
            raise RunError(
                f"{self.what} made other activations when it ran again: {len(made)} tensors "
                f"instead of {len(self.places)}, or of other shapes; the forward of a stage that "
                "recomputes must do the same both times"
            )
        for place, tensor in zip(self.places, made, strict=True):
            place.tensor = tensor
        self.places = []

    @contextmanager
    def _same_numbers(self) -> Generator[None]:
        if self.random is None:
            yield
            return
        state, devices, states = self.random
        with torch.random.fork_rng(devices):
            torch.set_rng_state(state)
            set_device_states(devices, states)
            yield

    def _find(self, saved: Tensor | _Place) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        assert saved.tensor is not None, f"{self.what} was not run again before its backward"
        return saved.tensor


def _never() -> Tensor:
    raise AssertionError("the graph of a recomputation is not for a backward")
