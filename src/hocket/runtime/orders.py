"""The orders that a pipeline runs: lowered, checked, and bound to the stages of a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from hocket.checker import check
from hocket.deps import MESSAGE
from hocket.ir import Kind, Schedule, kinds_of, mbs_of, stages_of
from hocket.lower import insert_communication
from hocket.lower.evaluation import forward_only
from hocket.lower.receives import defer_receives, place_receives
from hocket.lower.slots import forwards_first
from hocket.runtime.cuda import ON_DEVICE
from hocket.runtime.execute import Execution, Parts
from hocket.runtime.program import programs
from hocket.runtime.stage import Stage
from hocket.runtime.transport import Downstream, Upstream, Wire


class Orders(NamedTuple):
    """A schedule with its messages, as it trains and as it evaluates."""

    training: Schedule
    evaluation: Schedule


def orders_of(schedule: Schedule, *, tagged: bool) -> Orders:
    """The orders of a schedule.

    Raises: ScheduleError when it cannot run.
    """
    training = lower(schedule, tagged=tagged)
    return Orders(training, lower(forward_only(schedule), tagged=tagged))


def lower(schedule: Schedule, *, tagged: bool = True) -> Schedule:
    """The order that is executed: the schedule with its messages; checked for the transport.

    Raises: ScheduleError when it cannot run.
    """
    if not schedule.has_communication:
        check(schedule).raise_if_bad()
        move = place_receives if tagged else defer_receives
        schedule = move(insert_communication(forwards_first(schedule)))
    check(schedule, "tagged" if tagged else "rendezvous").raise_if_bad()
    return schedule


def forwards(schedule: Schedule, times: int) -> Schedule:
    """The forwards of a schedule so many times over, each time of microbatches of their own."""
    one = forward_only(schedule)
    m = one.m
    placement = replace(one.placement, path_of=one.placement.path_of * times)
    order = {
        queue: [
            [action._replace(mb=action.mb + first) for action in slot]
            for first in range(0, times * m, m)
            for slot in slots
        ]
        for queue, slots in one.order.items()
    }
    return Schedule.from_order(schedule.name, placement, order)


def split_stages(schedule: Schedule) -> set[int]:
    """The stages that have an I somewhere."""
    return set(stages_of(schedule.codes[kinds_of(schedule.codes) == Kind.I]).tolist())


def bind(
    lowered: Schedule, rank: int, stages: Mapping[int, Stage], wire: Wire | None,
    execute: Callable[..., Execution], *, training: bool, device: torch.device,
) -> Execution:  # fmt: skip
    """The order as calls on these stages of a rank, with message boundaries of its own."""
    placement = lowered.placement
    lengths, m, n = placement.lengths.tolist(), placement.m, placement.n_stages
    first = [mb for mb in range(m) if placement.queue(0, mb).rank == rank]
    last = {
        s: [
            mb for mb in range(m)
            if lengths[mb] == s + 1 and placement.queue(s, mb).rank == rank
        ]
        for s in stages
    }  # fmt: skip
    down: dict[int, Downstream] = {}
    up: dict[int, Upstream] = {}
    if wire is not None:
        offset = MESSAGE[Kind.F].offset
        down = {s: Downstream(wire, s, n, m, _peers(lowered, s + offset)) for s in stages}
        up = {s: Upstream(wire, s - offset, n, m, _peers(lowered, s - offset)) for s in stages}
    remade, moved = _pairs(lowered, Kind.R), _pairs(lowered, Kind.D)
    parts = Parts(stages, down, up, first, last, training, remade, moved)
    if device.type == "cuda":
        execute = ON_DEVICE.get(execute, execute)
    return execute(programs(lowered, [rank])[0], parts, wire)


def _pairs(schedule: Schedule, kind: Kind) -> frozenset[tuple[int, int]]:
    """The stages and microbatches that have such an action."""
    codes = schedule.codes[kinds_of(schedule.codes) == kind]
    return frozenset(zip(stages_of(codes).tolist(), mbs_of(codes).tolist(), strict=True))


def _peers(schedule: Schedule, stage: int) -> dict[int, int]:
    """The rank of a stage by microbatch, for those whose path has it."""
    placement = schedule.placement
    return {
        mb: placement.queue(stage, mb).rank
        for mb in range(placement.m)
        if 0 <= stage < placement.lengths[mb]
    }
