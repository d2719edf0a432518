"""A schedule run on real modules: what a training script holds. Imports the rest of runtime."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from hocket.checker import check
from hocket.errors import RunError
from hocket.ir import Schedule
from hocket.lower import insert_communication
from hocket.lower.evaluation import forward_only
from hocket.lower.receives import defer_receives
from hocket.lower.slots import forwards_first
from hocket.runtime import split
from hocket.runtime.data import microbatches, shares, to_device
from hocket.runtime.execute import Execution, Parts
from hocket.runtime.program import program
from hocket.runtime.sharing import Sharing, average, copies
from hocket.runtime.stage import Loss, Stage
from hocket.runtime.transport import Downstream, Upstream, Wire


class Pipeline:
    """Runs a schedule on this rank's stages.

    stages: the modules of the stages that this rank holds, by stage number. loss: called with the
    output and the target of a microbatch on the rank of its last stage; a mean over its rows.
    group: the process group of the pipeline, rank r of it is rank r of the schedule (left out: the
    default group; none at all for one rank). timeout: seconds that one message may take.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, nn.Module],
        loss: Loss | None = None,
        *,
        group: Any = None,
        device: torch.device | str | None = None,
        timeout: float = 60.0,
        data_parallel: Any = None,
        tied: Iterable[Iterable[tuple[int, str]]] | None = None,
    ) -> None:
        self.schedule = schedule
        self.device = _device(device, stages)
        self.rank, self.wire = _wire(group, schedule, timeout, self.device)
        self.loss = loss
        self._replicas = data_parallel
        self._limit = timedelta(seconds=timeout)
        self.modules = dict(stages)
        self._stages = {
            s: Stage(s, module, schedule.m, loss, split.prepare(module))
            for s, module in sorted(stages.items())
        }
        self.lowered = lower(schedule)
        self._training = None if schedule.is_forward_only else self._execution(self.lowered, True)
        evaluation = lower(forward_only(schedule))
        self._evaluation = self._execution(evaluation, False)
        names = {s: [n for n, _ in m.named_parameters()] for s, m in self.modules.items()}
        groups = copies(schedule.placement.stages_of_rank, names, tied or ())
        tag = 2 * schedule.m * schedule.placement.n_stages
        self._sharing = Sharing(groups, self.modules, self.wire, self.rank, tag)
        self._sharing.align()

    def _execution(self, lowered: Schedule, training: bool) -> Execution:
        placement = lowered.placement
        n, m = placement.n_stages, lowered.m
        last = {
            s: frozenset(mb for mb in range(m) if placement.lengths[mb] == s + 1)
            for s in self._stages
        }
        down: dict[int, Downstream] = {}
        up: dict[int, Upstream] = {}
        if self.wire is not None:
            for s in self._stages:
                down[s] = Downstream(self.wire, s, n, self._peers(s, s + 1))
                up[s] = Upstream(self.wire, s - 1, n, self._peers(s, s - 1))
        return Execution(program(lowered, self.rank), Parts(self._stages, down, up, last, training))

    def _peers(self, stage: int, other: int) -> list[int | None]:
        """The rank of `other` for each microbatch that this rank runs `stage` of."""
        placement = self.schedule.placement
        return [
            placement.queue(other, mb).rank if 0 <= other < placement.lengths[mb] else None
            for mb in range(placement.m)
        ]

    def step(
        self, inputs: Any, targets: Any, *, weights: Sequence[float] | None = None
    ) -> Tensor | None:
        """The loss of the batch, the same on every rank; gradients are added to the parameters'.

        inputs, targets: a tensor, tuple or dict, split along dimension 0 into m microbatches, or
        a list of m of them; None on ranks that need none.
        """
        if self._training is None:
            raise RunError(f"{self.schedule.name} has no backward; use eval")
        self._load(inputs, targets, weights)
        self._sharing.open()
        loss = self._run(self._training)
        self._sharing.close()
        if self._replicas is not None:
            parameters = [p for module in self.modules.values() for p in module.parameters()]
            average(parameters, self._replicas, lambda work: work.wait(self._limit))
        return loss

    def eval(self, inputs: Any, targets: Any = None, *, outputs: bool = False) -> Any:
        """The loss without any gradient; with `outputs` also the list of the outputs."""
        self._load(inputs, targets, None)
        for stage in self._stages.values():
            stage.outputs = [None] * self.schedule.m if outputs else None
        loss = self._run(self._evaluation)
        if not outputs:
            return loss
        made = [None] * self.schedule.m
        for stage in self._stages.values():
            assert stage.outputs is not None
            made = [a if b is None else b for a, b in zip(made, stage.outputs, strict=True)]
            stage.outputs = None
        return loss, made

    def _load(self, inputs: Any, targets: Any, weights: Sequence[float] | None) -> None:
        placement = self.schedule.placement
        mine = [
            (mb, s, s == 0, s == placement.lengths[mb] - 1)
            for mb in range(placement.m)
            for s in self._stages
            if s < placement.lengths[mb] and placement.queue(s, mb).rank == self.rank
        ]
        if any(first for _, _, first, _ in mine):
            values = microbatches(inputs, placement.m, "inputs")
            for mb, s, first, _ in mine:
                if first:
                    self._stages[s].inputs[mb] = (to_device(values[mb], self.device),)
        if any(last for *_, last in mine):
            values = microbatches(targets, placement.m, "targets")
            given = shares(values, weights)
            for mb, s, _, last in mine:
                if last:
                    self._stages[s].targets[mb] = (to_device(values[mb], self.device),)
                    self._stages[s].weights = given

    def _run(self, execution: Execution) -> Tensor | None:
        with torch.no_grad():
            execution.run()
            return self._total()

    def _total(self) -> Tensor:
        m = self.schedule.m
        losses = torch.zeros(m, dtype=torch.float64)
        for stage in self._stages.values():
            for mb, loss in enumerate(stage.losses):
                if loss is not None:
                    losses[mb] = loss.double().cpu() * stage.weights[mb]
                    stage.losses[mb] = None
        if self.wire is not None:
            self.wire.wait(self.wire.group.allreduce([losses]))
        return losses.sum()


def lower(schedule: Schedule) -> Schedule:
    """The order that is executed: the schedule with its messages; checked."""
    if not schedule.has_communication:
        schedule = insert_communication(forwards_first(schedule))
        deferred = defer_receives(schedule)
        if check(deferred, "rendezvous").ok:
            schedule = deferred
    check(schedule, "tagged").raise_if_bad()
    return schedule


def _device(device: torch.device | str | None, stages: Mapping[int, nn.Module]) -> torch.device:
    if device is not None:
        return torch.device(device)
    first = next((p for module in stages.values() for p in module.parameters()), None)
    return torch.device("cpu") if first is None else first.device


def _wire(group: Any, schedule: Schedule, timeout: float, device: Any) -> tuple[int, Wire | None]:
    if group is None and schedule.p == 1:
        return 0, None
    if group is None:
        group = torch.distributed.group.WORLD
    if group is None:
        raise RunError("there is no process group; call torch.distributed.init_process_group first")
    rank, backend = group.rank(), group
    if isinstance(group, torch.distributed.ProcessGroup):
        backend = group._get_backend(torch.device("cpu"))
    return rank, Wire(backend, timeout, device, device.type != "cpu")
