"""Runs any order with one path inside torchtitan, in place of torch's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hocket.deps import COPIES
from hocket.errors import UsageError
from hocket.ir import Kind, Schedule
from hocket.runtime import Pipeline
from hocket.schedules import build, entry
from hocket.words import named

TESTED = "0.3."
"""How the versions of torchtitan begin that tests have run with."""

UNTESTED = ("dp_replicate", "dp_shard", "cp", "tp", "ep")
"""Dimensions of torchtitan's mesh that must be 1."""


def use(order: str | Schedule, *, v: int | None = None) -> Installed:
    """An order installed in torchtitan, whose training and validation run it from now on.

    order: a name as on the command line (`interleaved:group=4`), which is built for torchtitan's
    numbers of ranks and microbatches, or a schedule. v: stages per rank of a named one. Call it
    before torchtitan's `main`; `restore()` undoes it. Without pipeline parallelism nothing changes.

    Raises: HocketError for an unknown name, a version of torchtitan that was never tested, or where
    an order is installed already.
    """
    _check_version()
    if isinstance(order, Schedule):
        if v is not None:
            raise UsageError(f"v={v} is for named schedules; {order.name} has its own stages")
        return Installed(lambda p, m: order)
    name, options = named(order)
    entry(name)  # a wrong name is reported at once
    sizes = {} if v is None else {"v": v}
    return Installed(lambda p, m: build(name, p=p, m=m, **sizes, **options))


class Installed:
    """An order that is installed in torchtitan.

    replaced: (owner, name, what stood there) of each attribute that is replaced. schedule: what the
    last trainer runs; None before there is one, and without pipeline parallelism.
    """

    def __init__(self, make: Callable[[int, int], Schedule]) -> None:
        from torchtitan import trainer
        from torchtitan.distributed import pipeline_parallel

        if isinstance(getattr(trainer.Trainer.__init__, "installed", None), Installed):
            raise UsageError("an order is installed in torchtitan already; restore() it first")
        self._make = make
        self.schedule: Schedule | None = None
        self.replaced: list[tuple[Any, str, Any]] = []
        self._replace(trainer.Trainer, "__init__", self._trainer)
        self._replace(pipeline_parallel, "_get_pipeline_metadata", self._metadata)
        self._replace(pipeline_parallel, "_get_pp_rank_to_stage_indices_mapping", self._stages)
        self._replace(pipeline_parallel, "_build_pipeline_schedule", self._pipeline)

    def _replace(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        own = getattr(owner, name)

        @wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            return around(own, *args, **kwargs)

        vars(call)["installed"] = self
        self.replaced.append((owner, name, own))
        setattr(owner, name, call)

    def restore(self) -> None:
        """Gives torchtitan its own functions back; a second time nothing happens."""
        while self.replaced:
            setattr(*self.replaced.pop())

    # --- instead of torchtitan's own ---------------------------------------------------------

    def _trainer(self, own: Callable[..., None], trainer: Any, config: Any) -> None:
        """Makes the order for a trainer's numbers, before anything else is built.

        The name of torch's schedule only says which rank shows the loss.
        """
        settings, self.schedule = config.parallelism, None
        p = settings.pipeline_parallel_degree
        if p > 1:
            m = config.training.local_batch_size // settings.pipeline_parallel_microbatch_size
            _check_settings(config)
            self.schedule = schedule = _fit(self._make(p, m), p, m)
            at_first = schedule.placement.paths[0][-1].rank == 0
            settings.pipeline_parallel_schedule = "ZBVZeroBubble" if at_first else "1F1B"
        own(trainer, config)

    def _metadata(
        self, own: Callable[..., Any], parallel_dims: Any, parallelism: Any, model_config: Any
    ) -> tuple[int, ...]:
        """The number of the order's stages, and of the model's layers and their weights."""
        for name in UNTESTED:
            if getattr(parallel_dims, name) > 1:
                raise UsageError(
                    f"torchtitan's mesh has {name}={getattr(parallel_dims, name)}, which was not "
                    "tested with an order of hocket; use pipeline parallelism alone"
                )
        _, *rest = own(parallel_dims, parallelism, model_config)
        return self._order().placement.n_stages, *rest

    def _stages(
        self, own: Callable[..., Any], pp_rank: int, pp_degree: int, pp_schedule: str, n: int
    ) -> tuple[int, ...]:
        """The stages of a rank; the last one comes last, as torchtitan expects."""
        schedule = self._order()
        if n != schedule.placement.n_stages:
            raise UsageError(
                f"module_fqns_per_model_part has {n} parts, but {schedule.name} has "
                f"{schedule.placement.n_stages} stages; give a part for each"
            )
        return tuple(schedule.placement.stages_of_rank[pp_rank])

    def _pipeline(
        self, own: Callable[..., Any], *, stages: list[Any], loss_fn: Callable[..., Any],
        backward_requires_autograd: bool = True, **_: Any,
    ) -> Step:  # fmt: skip
        """What torchtitan calls as its schedule."""
        if not backward_requires_autograd:
            raise UsageError("hocket's orders run with autograd, not with torchtitan's Graph PP")
        return Step(self._order(), stages, loss_fn)

    def _order(self) -> Schedule:
        if self.schedule is None:
            raise UsageError("this trainer is none of torchtitan's Trainer, so it has no order")
        return self.schedule


class Step:
    """A pipeline with the two methods that torchtitan calls. pipeline: None before the first."""

    def __init__(self, schedule: Schedule, stages: list[Any], loss: Callable[..., Any]) -> None:
        self.schedule, self._stages, self._loss = schedule, stages, loss
        self._more: Mapping[str, Any] = {}  # what the loss gets beside output and target
        self.pipeline: Pipeline | None = None

    def step(self, **batch: Any) -> None:
        """Trains on a batch of microbatches, and puts its loss into `losses`."""
        self._run("step", **batch)

    def eval(self, **batch: Any) -> None:
        """Computes the loss of a batch of microbatches, and puts it into `losses`."""
        self._run("eval", **batch)

    def _run(
        self, method: str, *, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None,
        losses: list[Any] | None = None, loss_kwargs: Any = None, return_outputs: bool = False,
    ) -> None:  # fmt: skip
        """torchtitan's loss is a sum, divided by the tokens of the whole batch: weight 1 each."""
        if return_outputs:
            raise UsageError("a schedule of hocket inside torchtitan returns no outputs")
        if self.pipeline is None:  # not before: torchtitan makes the weights after the schedule
            self.pipeline = self._built()
        self._more = loss_kwargs or {}
        loss = getattr(self.pipeline, method)(
            arg_mbs, target_mbs, weights=[1.0] * self.schedule.m, arguments=kwarg_mbs
        )
        if losses is not None:
            losses.append(loss.float())

    def _built(self) -> Pipeline:
        first = self._stages[0]
        return Pipeline(
            self.schedule,
            {stage.stage_index: stage.submod for stage in self._stages},
            lambda output, target: self._loss(output, target, **self._more)[0],
            group=first.group,
            device=first.device,
            timeout=300.0,  # a first step may compile
        )


def _check_version() -> None:
    """Raises UsageError for a version of torchtitan that was never tested, or none."""
    try:
        found = f"{version('torchtitan')} is"
    except PackageNotFoundError:
        found = "is not"
    if not found.startswith(TESTED):
        raise UsageError(
            f"torchtitan {found} installed, but hocket.torchtitan is tested with {TESTED}0; "
            "install that"
        )


def _check_settings(config: Any) -> None:
    """Raises UsageError for a setting that another order cannot respect."""
    settings, prefix = config.parallelism, "parallelism.pipeline_parallel_"
    whys = {
        f"{prefix}schedule_csv": settings.pipeline_parallel_schedule_csv
        and "the order is the one given to hocket.torchtitan.use",
        f"{prefix}layers_per_stage": settings.pipeline_parallel_layers_per_stage
        and "the order says how many stages there are",
        "compile.enable": config.compile.enable and "compiled stages were not tested here",
    }
    for name, why in whys.items():
        if why:
            raise UsageError(f"{name} is set, but {why}; leave it out")


def _fit(schedule: Schedule, p: int, m: int) -> Schedule:
    """The schedule. Raises: UsageError where torchtitan cannot run it, with the reason."""
    why = _why_not(schedule)
    if why:
        raise UsageError(f"{schedule.name} (p={p}) cannot run inside torchtitan: {why}")
    if (p, m) != (schedule.p, schedule.m):
        raise UsageError(
            f"{schedule.name} has {schedule.p} ranks and {schedule.m} microbatches, but torchtitan "
            f"has {p} ranks and a step of {m} microbatches (training.local_batch_size / "
            "parallelism.pipeline_parallel_microbatch_size); take a named schedule, which is built "
            "for every number"
        )
    return schedule


def _why_not(schedule: Schedule) -> str:
    """Why torchtitan cannot run an order, whatever its numbers; empty where it can."""
    placement, last = schedule.placement, schedule.p - 1
    again = [kind.name for kind in (Kind.R, *COPIES) if kind in schedule.kinds]
    end = placement.paths[0][-1].rank
    if len(placement.paths) > 1:
        return (
            f"it has {len(placement.paths)} paths, so a stage is on several ranks, and torchtitan "
            "would count its copies more than once in the norm of the gradients and in "
            "checkpoints; take an order with one path, such as dualpipev"
        )
    if placement.slices > 1:
        return "it cuts sequences into slices, which torchtitan's models do not carry on"
    if again:
        return (
            f"it has {' and '.join(again)}; torchtitan recomputes and offloads by its own settings"
        )
    if any(queue.stream for queue in placement.queues):
        return "it has several queues per rank, and torchtitan's models have no phases for them"
    if schedule.is_forward_only:
        return "it has no backward"
    if end not in (0, last):
        return f"its last stage is on rank {end}, and torchtitan shows losses of ranks 0 and {last}"
    return ""
