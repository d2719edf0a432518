"""Runs the program of one rank: a table says which method each entry calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
import torch

from hocket.ir import Kind
from hocket.runtime.program import Entry, Program, Role
from hocket.runtime.stage import Stage
from hocket.runtime.transport import Downstream, Upstream, Wire

Call = Callable[[int], None]


@dataclass(frozen=True)
class Parts:
    """What a program works on: the stages of its rank and their boundaries to other ranks."""

    stages: Mapping[int, Stage]
    down: Mapping[int, Downstream]
    up: Mapping[int, Upstream]
    first: Sequence[int]
    """The microbatches whose path begins on this rank."""
    last: Mapping[int, Sequence[int]]
    """Stage -> the microbatches whose path ends there on this rank."""
    training: bool


def _forward(parts: Parts, stage: int, mb: int) -> Call:
    s = parts.stages[stage]
    if parts.training:
        return s.forward_loss if mb in parts.last[stage] else s.forward
    return s.evaluate_loss if mb in parts.last[stage] else s.evaluate


def _send_forward(parts: Parts, stage: int, mb: int) -> Call:
    results, send = parts.stages[stage].results, parts.down[stage].send

    def send_output(mb: int) -> None:
        (value,), results[mb] = results[mb], None
        send(mb, value)

    return send_output


def _send_backward(parts: Parts, stage: int, mb: int) -> Call:
    returns, send = parts.stages[stage].returns, parts.up[stage].send

    def send_gradients(mb: int) -> None:
        gradients, returns[mb] = returns[mb], None
        assert gradients is not None
        send(mb, gradients)

    return send_gradients


def _wait_forward(parts: Parts, stage: int, mb: int) -> Call:
    s, wait = parts.stages[stage], parts.up[stage].wait
    inputs, leaves = s.inputs, s.leaves

    def take_input(mb: int) -> None:
        value, found = wait(mb)
        leaves[mb] = found or None
        inputs[mb] = (value,)

    return take_input


def _wait_backward(parts: Parts, stage: int, mb: int) -> Call:
    gradients, wait = parts.stages[stage].gradients, parts.down[stage].wait

    def take_gradients(mb: int) -> None:
        gradients[mb] = wait(mb)

    return take_gradients


def _hand_on(parts: Parts, stage: int, mb: int) -> Call:
    hand, to = parts.stages[stage].hand_on, parts.stages[stage + 1]
    return lambda mb: hand(mb, to)


def _hand_back(parts: Parts, stage: int, mb: int) -> Call:
    hand, to = parts.stages[stage].hand_back, parts.stages[stage - 1]
    return lambda mb: hand(mb, to)


Bind = Callable[[Parts, int, int], Call]
TABLE: dict[tuple[Role, Kind], Bind] = {
    (Role.RUN, Kind.F): _forward,
    (Role.RUN, Kind.B): lambda parts, stage, mb: parts.stages[stage].backward,
    (Role.RUN, Kind.I): lambda parts, stage, mb: parts.stages[stage].input_backward,
    (Role.RUN, Kind.W): lambda parts, stage, mb: parts.stages[stage].weight_backward,
    (Role.SEND, Kind.SEND_F): _send_forward,
    (Role.SEND, Kind.SEND_B): _send_backward,
    (Role.POST, Kind.RECV_F): lambda parts, stage, mb: parts.up[stage].post,
    (Role.POST, Kind.RECV_B): lambda parts, stage, mb: parts.down[stage].post,
    (Role.WAIT, Kind.RECV_F): _wait_forward,
    (Role.WAIT, Kind.RECV_B): _wait_backward,
    (Role.HAND, Kind.F): _hand_on,
    (Role.HAND, Kind.B): _hand_back,
    (Role.HAND, Kind.I): _hand_back,
    (Role.FREE, Kind.SEND_F): lambda parts, stage, mb: parts.down[stage].free,
    (Role.FREE, Kind.SEND_B): lambda parts, stage, mb: parts.up[stage].free,
    (Role.RELEASE, Kind.SEND_F): lambda parts, stage, mb: parts.down[stage].release,
    (Role.RELEASE, Kind.SEND_B): lambda parts, stage, mb: parts.up[stage].release,
}


class Execution:
    """A program bound to the stages and boundaries of its rank, ready to run any number of times.

    `times[i]` is when entry i ended; entry 0 started at `start` (perf_counter_ns).
    """

    def __init__(self, program: Program, parts: Parts, wire: Wire | None = None) -> None:
        self.program, self.parts, self.wire = program, parts, wire
        self.calls = [_bind(program, entry, parts) for entry in program.entries]
        self.start = 0
        self.times: list[int] = []

    def run(self) -> None:
        """Runs every entry in order; after an exception `times` tells how far it came."""
        self.times = times = []
        clock, ended = perf_counter_ns, times.append
        if torch.autograd._profiler_enabled():
            self._run_labelled()
            return
        self.start = clock()
        for call, mb in self.calls:
            call(mb)
            ended(clock())

    def _run_labelled(self) -> None:
        """The same with the labels of torch.distributed.pipelining, for torch.profiler."""
        self.start = perf_counter_ns()
        for entry, (call, mb) in zip(self.program.entries, self.calls, strict=True):
            label = f"PP:{self.program.action(entry)}"
            wait = "" if entry.role in (Role.RUN, Role.SEND) else f" {entry.role.value}"
            with torch.profiler.record_function(label + wait):
                call(mb)
            self.times.append(perf_counter_ns())

    def end(self) -> None:
        """Waits, after a failure, for what still runs: here nothing does."""

    @property
    def spans(self) -> np.ndarray:
        """Start and end of each entry, nanoseconds, `[entry, 2]`."""
        ends = np.array(self.times, dtype=np.int64)
        return np.stack([np.concatenate([[self.start], ends[:-1]]), ends], axis=1)

    @property
    def current(self) -> Entry | None:
        """The entry that runs now, or that failed."""
        entries = self.program.entries
        return entries[len(self.times)] if len(self.times) < len(entries) else None


def _bind(program: Program, entry: Entry, parts: Parts) -> tuple[Call, int]:
    action = program.action(entry)
    return TABLE[entry.role, action.kind](parts, action.stage, action.mb), action.mb
