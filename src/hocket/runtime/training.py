"""A training run on one rank: the model from its reference, batches, optimiser, steps, timelines.

Imports torch, errors, costs, timeline and the rest of runtime.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hocket.errors import UsageError
from hocket.runtime.carry import whole
from hocket.runtime.options import Settings
from hocket.runtime.pipeline import Pipeline
from hocket.runtime.report import flat
from hocket.timeline import Timeline

KEPT = 10  # the timelines of this many last steps are gathered
WARM = 2  # but, where there are more, not of these first ones
LEFT_OUT = ("size", "stage", "n_stages", "step", "slices", "group")  # what the schedule says


class Task(NamedTuple):
    """What is trained. `build(stage)` makes a module, `batch(step)` gives inputs and targets."""

    build: Callable[[int], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    batch: Callable[[int], tuple[Any, Any]]


def task_from(settings: Settings, *, slices: int | None = None, group: Any = None) -> Task:
    """The model of the settings with its options.

    The module of `build` may hold `loss(output, targets)` and `batch(step, size)`; without them
    it is the cross-entropy of the last dimension, and batches of text. slices: what `build` is
    told if it asks; left out: what the schedule has. group: the group of a rank's replicas, which
    `build` is told if it asks.

    Raises: UsageError for a reference that does not exist, or an option that nothing takes.
    """
    build, module = _find(settings.model)
    batch: Any = getattr(module, "batch", None) or import_module("hocket.demo.data").batch
    loss = getattr(module, "loss", _cross_entropy)
    options: dict[str, Any] = {"seed": settings.seed, **settings.model_options}
    given = set(settings.model_options)
    if settings.data is not None:
        options["data"] = settings.data
        given.add("data")
    if isinstance(options.get("dtype"), str):
        options["dtype"] = _dtype(options["dtype"])
    unknown = sorted(given - _takes(build, options) - _takes(batch, options))
    if unknown:
        known = ", ".join(sorted(_names(build) | _names(batch))) or "none"
        raise UsageError(f"{settings.model} has no option {unknown[0]!r}; its options: {known}")
    n = settings.schedule.placement.n_stages
    build_options = {k: options[k] for k in _takes(build, options)}
    if "slices" in inspect.signature(build).parameters:
        build_options["slices"] = slices or settings.schedule.placement.slices
    if "group" in inspect.signature(build).parameters:
        build_options["group"] = group
    batch_options = {k: options[k] for k in _takes(batch, options)}
    return Task(
        build=lambda stage: build(stage, n, **build_options),
        loss=loss,
        batch=lambda step: batch(step, settings.batch, **batch_options),
    )


def _find(reference: str) -> tuple[Callable[..., nn.Module], Any]:
    """The build function that `pkg.mod:build` names, and its module."""
    name, _, attribute = reference.partition(":")
    attribute = attribute or "build"
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"--model {reference}: there is no module {error.name!r}") from None
        raise
    build = getattr(module, attribute, None)
    if not callable(build):
        raise UsageError(f"--model {reference}: {name} has no function {attribute!r}")
    return build, module


def _names(fn: Callable[..., Any]) -> set[str]:
    """Options that a function names."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(fn).parameters.values()
    return {p.name for p in parameters if p.kind in kinds} - set(LEFT_OUT)


def _takes(fn: Callable[..., Any], options: dict[str, Any]) -> set[str]:
    """Which of these options a function takes; all of them where it has `**options`."""
    parameters = inspect.signature(fn).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return set(options)
    return _names(fn) & set(options)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"dtype {name!r} is not one of torch's, such as float64")
    return dtype


def _cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def _groups(settings: Settings) -> tuple[Any, Any]:
    """The groups of this rank's pipeline and of its replicas; None where there is one of them."""
    if settings.replicas == 1:
        return None, None
    p, world, rank = settings.schedule.p, settings.nproc, torch.distributed.get_rank()
    made = [
        torch.distributed.new_group([*ranks], timeout=timedelta(seconds=settings.timeout))
        for ranks in (
            *(range(first, first + p) for first in range(0, world, p)),
            *(range(r, world, p) for r in range(p)),
        )
    ]
    return made[rank // p], made[settings.replicas + rank % p]


class Adam:
    """Adam, as in torch.optim. That one imports the compiler: several seconds in every rank.

    Source: Kingma and Ba (arXiv 1412.6980), algorithm 1.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        self.lr, self.steps = lr, 0
        self.moments = [(p, torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]

    def step(self) -> None:
        """Moves the parameters along their gradients, and drops the gradients."""
        self.steps += 1
        first, second = 1 - 0.9**self.steps, 1 - 0.999**self.steps
        with torch.no_grad():
            for p, mean, square in self.moments:
                if p.grad is not None:
                    mean.lerp_(p.grad, 1 - 0.9)
                    square.lerp_(p.grad.square(), 1 - 0.999)
                    scale = (square / second).sqrt_().add_(1e-8)
                    p.addcdiv_(mean, scale, value=-self.lr / first)
                    p.grad = None


@dataclass(frozen=True)
class Run:
    """What a run gave: the loss and the seconds of each step, the timelines of the last ones."""

    losses: list[float]
    seconds: list[float]
    timelines: list[Timeline]


class Trainer:
    """The modules of this rank, their optimiser and the pipeline of a run."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.rank = settings, torch.distributed.get_rank()
        group, self.replicas = _groups(settings)
        self.task = task_from(settings, group=self.replicas)
        device = torch.device(settings.device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        placement = settings.schedule.placement
        self.replica, rank = divmod(self.rank, placement.p)
        self.modules = {s: self.task.build(s).to(device) for s in placement.stages_of_rank[rank]}
        self.pipeline = Pipeline(
            settings.schedule,
            self.modules,
            self.task.loss,
            group=group,
            data_parallel=self.replicas,
            device=device,
            dispatch=settings.dispatch,
            verify=settings.verify,
            timeout=settings.timeout,
            seed=settings.seed,
        )
        parameters = [p for module in self.modules.values() for p in module.parameters()]
        self.optimizer = Adam(parameters, settings.lr)

    def step(self, index: int) -> float:
        """The loss of one training step; every replica takes a batch of its own."""
        batch = self.task.batch(index * self.settings.replicas + self.replica)
        loss = self.pipeline.step(*batch).to(self.pipeline.device)
        if self.replicas is not None:
            torch.distributed.all_reduce(loss, group=self.replicas)
        self.optimizer.step()
        return float(loss) / self.settings.replicas

    def run(self, shown: Callable[[int, float, float], None], kept: int = KEPT) -> Run:
        """All steps; `shown(step, loss, seconds)` is called after each."""
        steps = self.settings.steps
        first = max(min(WARM, steps - 1), steps - kept)
        losses, seconds, timelines = [], [], []
        for index in range(steps):
            started = perf_counter()
            losses.append(self.step(index))
            seconds.append(perf_counter() - started)
            shown(index, losses[-1], seconds[-1])
            if index >= first:
                timelines.append(flat(self.pipeline.gather_timeline()))
        return Run(losses, seconds, timelines)

    def calls_seen(self) -> dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
        """The arguments of a forward of each stage, from one step whose gradients are dropped.

        With slices, those of a forward of each slice.
        """
        slices = self.settings.schedule.placement.slices
        seen: dict[int, list[Any]] = {s: [None] * slices for s in self.modules}
        part, hooks = dict.fromkeys(self.modules, 0), []
        stages = self.pipeline._stages
        for s, module in self.modules.items():

            def noted(value: Any, mb: int, s: int = s, call: Any = stages[s]._call) -> Any:
                part[s] = mb % slices
                return call(value, mb)

            def keep(_: Any, args: Any, kwargs: Any, s: int = s) -> None:
                seen[s][part[s]] = (args, kwargs)

            vars(stages[s])["_call"] = noted
            hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))
        self.pipeline.step(*self.task.batch(0))
        for hook in hooks:
            hook.remove()
        for s, module in self.modules.items():
            del vars(stages[s])["_call"]
            module.zero_grad()
        return seen


def unpipelined(settings: Settings) -> list[float]:
    """The losses of the same run in this process alone, microbatch by microbatch, no schedule.

    Sequences are whole, also where the schedule cuts them into slices.
    """
    task, placement = task_from(settings, slices=1), settings.schedule.placement
    stages = [task.build(s) for s in range(placement.n_stages)]
    optimizer = Adam(nn.Sequential(*stages).parameters(), settings.lr)
    m = placement.m // placement.slices
    return [_plain_step(task, stages, optimizer, index, m) for index in range(settings.steps)]


def _plain_step(
    task: Task, stages: Sequence[nn.Module], optimizer: Adam, index: int, m: int
) -> float:
    inputs, targets = task.batch(index)
    total = 0.0
    for x, y in zip(torch.tensor_split(inputs, m), torch.tensor_split(targets, m), strict=True):
        for stage in stages:
            x = whole(stage, x)
        loss = task.loss(x, y) * (len(y) / len(targets))
        loss.backward()
        total += float(loss.detach())
    optimizer.step()
    return total
