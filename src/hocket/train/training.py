"""A training run on one rank.

The model from its reference, batches, optimiser, steps, timelines.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from statistics import fmean
from time import perf_counter, process_time, thread_time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hocket.deps import IS_SEND
from hocket.errors import UsageError
from hocket.ir import kinds_of
from hocket.measured.readings import Link
from hocket.runtime import Hooks, Pipeline
from hocket.runtime.values import map_tensors
from hocket.timeline import Timeline
from hocket.train.ab_compare import turns
from hocket.train.link_probe import links
from hocket.train.profile import Call, Probe, probe
from hocket.train.report import flat
from hocket.train.settings import Settings

KEPT = 10  # the timelines of this many last steps are gathered
WARM = 2  # but, where there are more, not of these first ones
LEFT_OUT = ("size", "stage", "n_stages", "step", "slices", "group")  # what the schedule says


class Task(NamedTuple):
    """What is trained. `build(stage)` makes a module, `batch(step)` the rows of all replicas.

    Also a module that draws its weights without asking for the seed is the same on every rank.
    """

    build: Callable[[int], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    batch: Callable[[int], tuple[Any, Any]]


def task_from(settings: Settings, *, slices: int | None = None, group: Any = None) -> Task:
    """The model of the settings with its options.

    The module of `build` may hold `loss(output, targets)` and `batch(step, size)`; without them
    it is the cross-entropy of the last dimension, and batches of text. slices: passed to `build` if
    it takes them; left out: what the schedule has. group: the group of a rank's replicas, passed to
    `build` if it takes one.

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

    def seeded(stage: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1_000_003 * settings.seed + stage)
            return build(stage, n, **build_options)

    return Task(
        build=seeded,
        loss=loss,
        batch=lambda step: batch(step, settings.batch * settings.replicas, **batch_options),
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
    """The groups of this rank's pipeline and of its replicas.

    None for the default group, where that is the only pipeline's, and where there are no replicas.
    """
    if settings.replicas == 1:
        alone = len(settings.orders) == 1
        return None if alone else _new_group(range(settings.nproc), settings.timeout), None
    p, world, rank = settings.schedule.p, settings.nproc, torch.distributed.get_rank()
    made = [
        _new_group(ranks, settings.timeout)
        for ranks in (
            *(range(first, first + p) for first in range(0, world, p)),
            *(range(r, world, p) for r in range(p)),
        )
    ]
    return made[rank // p], made[settings.replicas + rank % p]


def _new_group(ranks: Iterable[int], timeout: float) -> Any:
    return torch.distributed.new_group([*ranks], timeout=timedelta(seconds=timeout))


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

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group, as torch's optimizers have them."""
        return [{"params": [p for p, _, _ in self.moments]}]

    def state_dict(self) -> dict[str, Any]:
        """Moments and steps, in the form of torch's optimizers."""
        states = {i: {"mean": m, "square": s} for i, (_, m, s) in enumerate(self.moments)}
        return {"state": states, "param_groups": [{"steps": self.steps, "params": [*states]}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes in what a `state_dict` had; the learning rate stays."""
        for i, (_, mean, square) in enumerate(self.moments):
            mean.copy_(state["state"][i]["mean"])
            square.copy_(state["state"][i]["square"])
        self.steps = state["param_groups"][0]["steps"]


@dataclass(frozen=True)
class Run:
    """What a run gave: the loss and the seconds of each step, the timelines of the last ones.

    inside: the seconds of each step that this rank spent in `Pipeline.step`. aside: seconds of
    processor time in each that other threads of this rank took meanwhile, those of messages.
    """

    losses: list[float]
    seconds: list[float]
    inside: list[float]
    aside: list[float]
    timelines: list[Timeline]


class Trainer:
    """The modules of this rank, their optimiser and the pipeline of a run.

    A pipeline is on a process group of its own where the settings have several orders.
    """

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

    def step(self, index: int) -> tuple[float, float, float]:
        """The loss of one training step, and seconds: `inside` and `aside` of a `Run`.

        With several orders, all ranks begin together.
        """
        batch = self._batch(index)
        if len(self.settings.orders) > 1:
            self.pipeline.guard(torch.distributed.barrier, "the barrier before the step")
        started, others = perf_counter(), process_time() - thread_time()
        loss = self.pipeline.step(*batch).to(self.pipeline.device)
        inside, aside = perf_counter() - started, process_time() - thread_time() - others
        if self.replicas is not None:
            torch.distributed.all_reduce(loss, group=self.replicas)
        self.optimizer.step()
        return float(loss) / self.settings.replicas, inside, aside

    def _batch(self, index: int) -> tuple[Any, Any]:
        """This replica's rows of the batch of a step, which is the same for any number of them."""
        n, batch = self.settings.replicas, self.task.batch(index)
        return map_tensors(batch, lambda t: t.tensor_split(n)[self.replica] if t.dim() else t)

    def calls_seen(self) -> dict[int, list[Call]]:
        """The arguments of a forward of each stage, from one step whose gradients are dropped.

        With slices, those of a forward of each slice.
        """
        slices = self.settings.schedule.placement.slices
        seen: dict[int, list[Any]] = {s: [None] * slices for s in self.modules}

        def keep(stage: int, mb: int, args: Any, kwargs: Any) -> None:
            seen[stage][mb % slices] = (args, kwargs)

        hooks = Hooks(before_forward=keep)
        self.pipeline.hooks.append(hooks)
        self.pipeline.step(*self._batch(0))
        self.pipeline.hooks.remove(hooks)
        for module in self.modules.values():
            module.zero_grad()
        return seen

    def probes(self, calls: Mapping[int, Sequence[Call]]) -> dict[int, Probe]:
        """Every stage of the model by itself, called as in `calls_seen`; collective.

        One rank after the other, so that none disturbs another; replicas may meet in a stage.
        """
        p, found = self.settings.schedule.p, {}
        for turn in range(p):
            if turn == self.rank % p:
                found = {s: probe(module, calls[s]) for s, module in self.modules.items()}
            torch.distributed.barrier()
        return {s: one for part in self._gathered(found) for s, one in part.items()}

    def links(self, largest: int) -> list[Link]:
        """The links between the ranks of the first replica; collective.

        largest: bytes of the largest message.
        """
        wire, placement = self.pipeline.wire, self.settings.schedule.placement
        measured = self.pipeline.guard(
            lambda: links(wire, self.rank, placement, largest, torch.distributed.barrier),
            "the measurement of the links",
        )
        return [link for part in self._gathered(measured) for link in part]

    def _gathered(self, own: Any) -> list[Any]:
        """What each rank has; collective."""
        every: list[Any] = [None] * self.settings.nproc
        torch.distributed.all_gather_object(every, own)
        return every


def warm(steps: int) -> int:
    """How many first steps of a run are not counted."""
    return min(WARM, steps - 1)


def run(
    trainers: Sequence[Trainer], shown: Callable[..., None], kept: int = KEPT, *,
    start: int = 0, after: Callable[[int], None] | None = None,
) -> list[Run]:  # fmt: skip
    """All steps of each trainer, one step of each in turn; who begins changes with every step.

    `shown(step, loss, seconds, ...)` is called after each: the loss of the first, seconds of all.
    start: the number of steps that are done already. after: called with how many are done.
    """
    steps = trainers[0].settings.steps
    first = max(start + warm(steps - start), steps - kept)
    runs = [Run([], [], [], [], []) for _ in trainers]
    for index in range(start, steps):
        for i in turns(index, len(trainers)):
            started = perf_counter()
            loss, inside, aside = trainers[i].step(index)
            runs[i].seconds.append(perf_counter() - started)
            runs[i].losses.append(loss)
            runs[i].inside.append(inside)
            runs[i].aside.append(aside)
            if index >= first:
                runs[i].timelines.append(flat(trainers[i].pipeline.gather_timeline()))
        shown(index, runs[0].losses[-1], *(one.seconds[-1] for one in runs))
        if after is not None:
            after(index + 1)
    return runs


def counted(runs: Sequence[Run], device: torch.device) -> list[list[float]]:
    """Seconds of each counted step of each run, `[run, step]`: of the rank it took longest on.

    Each rank reads its own clock, from when all have met to its return from `Pipeline.step`, so
    that ranks may be on several machines. Batches and optimiser do not count. Collective.
    """
    times = [one.inside[warm(len(one.inside)) :] for one in runs]
    longest = torch.tensor(times, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(longest, torch.distributed.ReduceOp.MAX)
    return longest.tolist()


def comm_cpu(trainers: Sequence[Trainer], runs: Sequence[Run]) -> list[float]:
    """Milliseconds of a core that each message took in threads of its own, `[run]`. Collective.

    0 where other threads compute too, or there are no messages.
    """
    taken = torch.tensor(
        [fmean(one.aside[warm(len(one.aside)) :]) for one in runs], dtype=torch.float64
    ).to(trainers[0].pipeline.device)
    torch.distributed.all_reduce(taken)
    out = []
    for trainer, seconds in zip(trainers, taken.tolist(), strict=True):
        n = int(IS_SEND[kinds_of(trainer.pipeline.lowered.codes)].sum())
        alone = trainer.pipeline.dispatch == "receive" and n
        out.append(1e3 * seconds / (n * trainer.settings.replicas) if alone else 0.0)
    return out
