"""What differs on CUDA: events instead of clocks, and NCCL. UNTESTED: written without a GPU.

NCCL has no tags, so a wire has a communicator for each directed pair of ranks: a transfer that
waits holds up only those behind it on the same edge, on a stream of its own. What changes rarely
(specs, losses, shared gradients) goes over a gloo group beside it. Imports transport and execute.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from hocket.ir import Placement
from hocket.runtime.execute import Execution, Parts
from hocket.runtime.program import Program
from hocket.runtime.transport import LINE, Wire


class NcclWire(Wire):
    """Messages in device memory over NCCL, one communicator a directed edge. UNTESTED.

    The header of each message is read by the CPU, which waits for it to arrive.
    """

    tagged = False

    def __init__(
        self, group: Any, timeout: float, device: torch.device, placement: Placement
    ) -> None:
        ranks = torch.distributed.get_process_group_ranks(group)
        limit = timedelta(seconds=timeout)
        control = torch.distributed.new_group(ranks, backend="gloo", timeout=limit)
        super().__init__(control._get_backend(torch.device("cpu")), timeout, device)
        self.memory = device
        self.rank = group.rank()
        ends = [(a.rank, b.rank) for path in placement.paths for a, b in pairwise(path)]
        edges = sorted({edge for a, b in ends if a != b for edge in ((a, b), (b, a))})
        self.edges = {
            (a, b): torch.distributed.new_group([ranks[a], ranks[b]], "nccl", limit)
            for a, b in edges
        }

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Sends in the order of the calls; the tag is not sent."""
        return self.edges[self.rank, peer].send(tensors, int(peer > self.rank), 0)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Posts a receive in the order of the peer's sends."""
        return self.edges[peer, self.rank].recv(tensors, int(peer > self.rank), 0)

    def header(self, buffer: Tensor) -> Any:
        """The header, once it is there."""
        return buffer[: max(LINE, min(len(buffer), 8 * LINE))].cpu().numpy()


class EventExecution(Execution):
    """A program whose times are the device's, from events on the current stream. UNTESTED."""

    def __init__(self, program: Program, parts: Parts, wire: Any) -> None:
        super().__init__(program, parts, wire)
        self.events: list[Any] = []

    def run(self) -> None:
        """Runs every entry in order, and waits for the device at the end."""
        self.events, self.times = [], []
        torch.cuda.synchronize()
        self.start = perf_counter_ns()
        first = _event()
        for call, mb in self.calls:
            call(mb)
            self.events.append(_event())
            self.times.append(perf_counter_ns())
        torch.cuda.synchronize()
        self.times = [self.start + int(first.elapsed_time(e) * 1e6) for e in self.events]


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
