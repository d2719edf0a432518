"""Messages between chunks on different ranks: one tensor each, in the order of the program.

NCCL has no tags, so receives are never posted out of order; on gloo tags are sent all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.errors import RunError


@dataclass
class Wire:
    """What all messages of one call have in common.

    ranks: the number of each rank of the pipeline among all processes. shape: `[sequence,
    microbatch, hidden]` of a message on this rank. varies: microbatches have shapes of their own,
    which are sent first.
    """

    group: Any
    ranks: list[int]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: Any
    varies: bool = False

    def send(self, tensor: Tensor, rank: int, tag: int) -> tuple[Any, Tensor]:
        """A send on its way, with what must stay alive until it has ended."""
        tensor = tensor.detach().contiguous()
        return dist.isend(tensor, self.ranks[rank], group=self.group, tag=tag), tensor

    def receive(self, rank: int, tag: int, shape: tuple[int, ...]) -> tuple[Any, Tensor]:
        """A receive that is posted, and where it arrives."""
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        return dist.irecv(tensor, self.ranks[rank], group=self.group, tag=tag), tensor


class _End:
    """One end of the boundary between two stages. boundary: the stage before it."""

    def __init__(self, wire: Wire, boundary: int, n: int, peer: int) -> None:
        self.wire, self.boundary, self.n, self.peer = wire, boundary, n, peer
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.posted: dict[int, tuple[Any, Tensor]] = {}
        self.sent: dict[int, list[tuple[Any, Tensor]]] = {}

    def _tag(self, mb: int, part: int) -> int:
        """part: 0 for an output, 1 for its gradient, 2 for a shape."""
        return (mb * self.n + self.boundary) * 3 + part

    def _arrived(self, mb: int) -> Tensor:
        work, tensor = self.posted.pop(mb)
        work.wait()
        return tensor

    def release(self, mb: int) -> None:
        """Waits for a send, and lets go of what it sent."""
        for work, _ in self.sent.pop(mb):
            work.wait()

    free = release

    @property
    def quiet(self) -> bool:
        """Whether nothing is on its way."""
        return not self.posted and not self.sent


class Down(_End):
    """A chunk's boundary to the next stage: outputs leave, their gradients come back."""

    def send(self, mb: int, output: Any) -> None:
        """Sends an output. Raises: RunError where it is not what the next stage expects."""
        wire = self.wire
        shape = tuple(output.shape) if isinstance(output, Tensor) else ()
        fits = len(shape) == len(wire.shape) if wire.varies else shape == wire.shape
        if not fits or output.dtype != wire.dtype:
            what = f"{list(shape)} of {output.dtype}" if shape else type(output).__name__
            raise RunError(
                f"the output of stage {self.boundary} is {what}, but its neighbours were set up "
                f"for {list(wire.shape)} of {wire.dtype}; check seq_length, micro_batch_size and "
                "pipeline_dtype"
            )
        self.shapes[mb] = shape
        self.sent[mb] = []
        if wire.varies:
            sizes = torch.tensor(shape, dtype=torch.int64, device=wire.device)
            self.sent[mb].append(wire.send(sizes, self.peer, self._tag(mb, 2)))
        self.sent[mb].append(wire.send(output, self.peer, self._tag(mb, 0)))

    def post(self, mb: int) -> None:
        """Posts the receive of a gradient."""
        self.posted[mb] = self.wire.receive(self.peer, self._tag(mb, 1), self.shapes.pop(mb))

    def wait(self, mb: int) -> list[Tensor | None]:
        """The gradient of an output."""
        return [self._arrived(mb)]


class Up(_End):
    """A chunk's boundary to the previous stage: inputs come in, their gradients go back."""

    def post(self, mb: int) -> None:
        """Posts the receive of an input."""
        wire = self.wire
        shape = wire.shape
        if wire.varies:
            sizes = torch.empty(len(shape), dtype=torch.int64, device=wire.device)
            tag = self._tag(mb, 2)
            dist.recv(sizes, wire.ranks[self.peer], group=wire.group, tag=tag)
            shape = tuple(sizes.tolist())
        self.shapes[mb] = shape
        self.posted[mb] = wire.receive(self.peer, self._tag(mb, 0), shape)

    def wait(self, mb: int) -> tuple[Tensor, list[Tensor]]:
        """The input, which needs a gradient; and once more as a list."""
        tensor = self._arrived(mb).requires_grad_()
        return tensor, [tensor]

    def send(self, mb: int, gradients: list[Tensor | None]) -> None:
        """Sends the gradient of an input, zeros where it has none."""
        (gradient,), shape, wire = gradients, self.shapes.pop(mb), self.wire
        if gradient is None:
            gradient = torch.zeros(shape, dtype=wire.dtype, device=wire.device)
        self.sent[mb] = [wire.send(gradient.to(wire.dtype), self.peer, self._tag(mb, 1))]
