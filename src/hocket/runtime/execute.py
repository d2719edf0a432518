"""Runs the program of one rank: a table says which method each entry calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
import torch

from hocket.deps import OFFSET, SENDS
from hocket.ir import Action, Kind
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
    remade: frozenset[tuple[int, int]] = frozenset()
    """The stages and microbatches whose activations an R makes again."""
    moved: frozenset[tuple[int, int]] = frozenset()
    """Those whose activations a D moves to the host."""

    def boundary(self, action: Action) -> Downstream | Upstream:
        """The boundary of the action's stage that a message crosses."""
        leaves = (action.kind in SENDS) == (OFFSET[action.kind] > 0)
        return (self.down if leaves else self.up)[action.stage]

    def check_clean(self) -> None:
        """Raises AssertionError where something is left over after a step."""
        left = [text for stage in self.stages.values() for text in stage.leftovers()]
        assert not left, f"left over after the step: {', '.join(left)}"
        ends = (*self.up.values(), *self.down.values())
        assert all(end.quiet for end in ends), "messages left over after the step"


def _forward(parts: Parts, stage: int, mb: int) -> Call:
    s = parts.stages[stage]
    if parts.training:
        forward = s.forward_loss if mb in parts.last[stage] else s.forward
        if (stage, mb) in parts.remade:
            return lambda mb: s.forward_dropped(mb, forward)
        if (stage, mb) in parts.moved:
            return lambda mb: s.forward_moved(mb, forward)
        return forward
    return s.evaluate_loss if mb in parts.last[stage] else s.evaluate


Bind = Callable[[Parts, int, int], Call]
TABLE: dict[Kind, Bind] = {
    Kind.F: _forward,
    Kind.B: lambda parts, stage, mb: parts.stages[stage].backward,
    Kind.I: lambda parts, stage, mb: parts.stages[stage].input_backward,
    Kind.W: lambda parts, stage, mb: parts.stages[stage].weight_backward,
    Kind.R: lambda parts, stage, mb: parts.stages[stage].recompute,
    Kind.D: lambda parts, stage, mb: parts.stages[stage].offload,
    Kind.U: lambda parts, stage, mb: parts.stages[stage].reload,
    Kind.A: lambda parts, stage, mb: parts.stages[stage].allocate,
}
"""What a kind of work calls, given its stage and microbatch. A new kind is one entry."""


def _send_output(parts: Parts, stage: int, mb: int) -> Call:
    results, send = parts.stages[stage].results, parts.down[stage].send

    def send_output(mb: int) -> None:
        (value,), results[mb] = results[mb], None
        send(mb, value)

    return send_output


def _send_gradients(parts: Parts, stage: int, mb: int) -> Call:
    returns, send = parts.stages[stage].returns, parts.up[stage].send

    def send_gradients(mb: int) -> None:
        gradients, returns[mb] = returns[mb], None
        assert gradients is not None
        send(mb, gradients)

    return send_gradients


def _take_input(parts: Parts, stage: int, mb: int) -> Call:
    s, wait = parts.stages[stage], parts.up[stage].wait
    inputs, leaves = s.inputs, s.leaves

    def take_input(mb: int) -> None:
        value, found = wait(mb)
        leaves[mb] = found or None
        inputs[mb] = (value,)

    return take_input


def _take_gradients(parts: Parts, stage: int, mb: int) -> Call:
    gradients, wait = parts.stages[stage].gradients, parts.down[stage].wait

    def take_gradients(mb: int) -> None:
        gradients[mb] = wait(mb)

    return take_gradients


MOVES: dict[tuple[Role, bool], Bind] = {
    (Role.SEND, True): _send_output,
    (Role.SEND, False): _send_gradients,
    (Role.WAIT, True): _take_input,
    (Role.WAIT, False): _take_gradients,
}
"""What moves a result between ranks, to a later stage (True) or an earlier one."""


def _move(role: Role, parts: Parts, action: Action) -> Call:
    """What an entry calls that is not work: it moves a result to a neighbour, or waits for that."""
    stage, offset = parts.stages[action.stage], int(OFFSET[action.kind])
    if role is Role.HAND:
        to = parts.stages[action.stage + offset]
        hand = stage.hand_on if offset > 0 else stage.hand_back
        return lambda mb: hand(mb, to)
    if (role, offset > 0) in MOVES:
        return MOVES[role, offset > 0](parts, action.stage, action.mb)
    return getattr(parts.boundary(action), role.value)


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
    if entry.role is Role.RUN:
        return TABLE[action.kind](parts, action.stage, action.mb), action.mb
    return _move(entry.role, parts, action), action.mb
