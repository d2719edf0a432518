"""What differs on CUDA: events instead of clocks, streams, NCCL. UNTESTED: written without a GPU.

NCCL has no tags, so a wire has a communicator for each directed pair of ranks: a transfer that
waits holds up only those behind it on the same edge, on a stream of its own. What changes rarely
(specs, losses, shared gradients) goes over a gloo group beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from hocket.deps import OFFSET
from hocket.ir import Placement
from hocket.runtime.execute import Execution, Parts
from hocket.runtime.program import Program, Role
from hocket.runtime.queues import QueueExecution
from hocket.runtime.transport import LINE, Wire
from hocket.runtime.values import tensors_of


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


class StreamExecution(QueueExecution):
    """Queues on streams of their own, which wait for each other on the device. UNTESTED."""

    def __init__(self, program: Program, parts: Parts, wire: Any = None) -> None:
        super().__init__(program, parts, wire)
        self.device = torch.cuda.current_device()
        self.streams = [torch.cuda.Stream() for _ in self.lines]
        self.marks: dict[int, Any] = {}
        self.events: dict[int, tuple[Any, Any]] = {}

    def run(self) -> None:
        """Runs all queues, and waits for the device at the end."""
        self.marks, self.events = {}, {}
        torch.cuda.synchronize()
        zero, first = perf_counter_ns(), _event()
        super().run()
        torch.cuda.synchronize()
        for i, (begin, end) in self.events.items():
            self.begins[i] = zero + int(first.elapsed_time(begin) * 1e6)
            self.ends[i] = zero + int(first.elapsed_time(end) * 1e6)

    @contextmanager
    def _stream(self, line: int) -> Generator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self.streams[line]):
            yield

    def _met(self, needs: tuple[int, ...]) -> bool:
        met = super()._met(needs)
        for action in needs if met else ():
            torch.cuda.current_stream().wait_event(self.marks[action])
        return met

    def _mark(self, action: int) -> None:
        self.marks[action] = _event()
        super()._mark(action)

    def _entry(self, i: int) -> None:
        begin = _event()
        super()._entry(i)
        self.events[i] = (begin, _event())
        if self.program.entries[i].role is Role.HAND:
            self._lend(i)

    def _lend(self, i: int) -> None:
        """Keeps the memory of what was handed on from being used again too early."""
        kind, stage, mb = self.program.action(self.program.entries[i])
        offset = int(OFFSET[kind])
        to = self.parts.stages[stage + offset]
        for tensor in tensors_of((to.inputs if offset > 0 else to.gradients)[mb]):
            for stream in self.streams:
                tensor.record_stream(stream)


ON_DEVICE: Mapping[Callable, Callable] = {
    Execution: EventExecution, QueueExecution: StreamExecution,
}  # fmt: skip
"""What runs on CUDA in place of what runs on the CPU."""


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
