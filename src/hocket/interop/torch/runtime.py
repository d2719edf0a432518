"""A schedule run by torch.distributed.pipelining, on the PipelineStage objects of a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hocket.errors import RunError, UsageError
from hocket.interop.torch.csv import TorchOrder, stages_by_rank, torch_order
from hocket.ir import Schedule

if TYPE_CHECKING:
    import torch

_OURS = "defer_pp_recv"


def torch_schedule(
    schedule: Schedule,
    stages: Sequence[Any] | Any,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    n_microbatches: int | None = None,
    *,
    receives: str = "early",
    overlap: bool = False,
    **options: Any,
) -> Any:
    """A runtime schedule of torch, ready for `.step()`, that runs exactly this order.

    stages: the PipelineStage objects of this rank, in any order. n_microbatches: the number of
    the schedule, given once more as a check. receives: "late" posts each one at its consumer,
    past computation only (what `defer_pp_recv` is meant to do). overlap: give a forward and a
    backward of one slot to torch as OVERLAP_F_B. options: go to torch as they are, such as
    `scale_grads`. Microbatches are taken as the last stage takes them, so that `losses=` has them
    in their order; the file of `hocket export` says how they are numbered.

    Raises: ScheduleError where torch cannot run the schedule, RunError where the stages of this
    rank do not fit it, naming the first that is wrong.
    """
    given = list(stages) if isinstance(stages, list | tuple) else [stages]
    if _OURS in options:
        raise UsageError(
            "defer_pp_recv reorders receives and not sends, which trains wrong gradients with "
            'some schedules; give receives="late"'
        )
    if n_microbatches is not None and n_microbatches != schedule.m:
        raise UsageError(
            f"{schedule.name} has {schedule.m} microbatches, but n_microbatches is {n_microbatches}"
        )
    own = _fitting(schedule, given)
    from torch.distributed.pipelining import schedules  # takes seconds: after what can be refused

    order = torch_order(
        schedule, "messages", receives=receives, overlap=overlap, unshard=_is_sharded(own)
    )
    runtime = schedules._PipelineScheduleRuntime(own, schedule.m, loss_fn=loss_fn, **options)
    _load(runtime, order, schedules)
    return runtime


def _fitting(schedule: Schedule, stages: list[Any]) -> list[Any]:
    """The stages in rising order.

    Raises: RunError where they are not those of this rank.
    """
    if not stages:
        raise RunError("there are no stages; give the PipelineStage objects of this rank")
    placement, first = schedule.placement, stages[0]
    rank = first.group_rank
    if first.group_size != schedule.p:
        raise RunError(
            f"the stages' group has {first.group_size} ranks, but {schedule.name} has {schedule.p}"
        )
    if first.num_stages != placement.n_stages:
        raise RunError(
            f"the stages were made for {first.num_stages} stages, but {schedule.name} has "
            f"{placement.n_stages}"
        )
    needed, given = list(placement.stages_of_rank[rank]), [s.stage_index for s in stages]
    if sorted(given) != needed:
        wrong = min(set(needed).symmetric_difference(given), default=given[0])
        raise RunError(
            f"rank {rank} was given the stages {sorted(given)}, but {schedule.name} places "
            f"{needed} there; the first wrong one is stage {wrong}. All of them: "
            f"{stages_by_rank(schedule)}",
            rank=rank,
        )
    for stage in stages:
        _refuse_skips(stage)
    return sorted(stages, key=lambda stage: stage.stage_index)


def _refuse_skips(stage: Any) -> None:
    """Raises RunError where a traced stage reads what an earlier one than its neighbour made.

    torch's runtime sends between neighbouring stages only; it would find out in the first step.
    """
    nodes = getattr(stage, "node", None)
    index_of = getattr(stage, "submod_to_stage_index", None)
    if nodes is None or index_of is None:
        return
    for source in nodes.all_input_nodes:
        maker = index_of.get(getattr(source, "name", None))
        if maker is None and source.op == "call_function" and source.all_input_nodes:
            maker = index_of.get(source.all_input_nodes[0].name)
        if maker is not None and maker != stage.stage_index - 1:
            raise RunError(
                f"stage {stage.stage_index} reads what stage {maker} makes: the edge {maker}->"
                f"{stage.stage_index} skips a stage, and torch.distributed.pipelining sends only "
                "to the next one; hand the value on through the stages between",
                rank=stage.group_rank,
            )


def _is_sharded(stages: list[Any]) -> bool:
    """True when some stage of this rank is sharded by FSDP."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(stage.submod, FSDPModule) for stage in stages)


def _load(runtime: Any, order: TorchOrder, schedules: Any) -> None:
    """Gives the order to torch's runtime, in its own words."""
    has_reduce = hasattr(schedules, "REDUCE_GRAD")  # torch 2.9 and older scale by themselves
    rows = {
        rank: [
            schedules._Action.from_str(str(item))
            for item in row
            if has_reduce or item.type != "REDUCE_GRAD"
        ]
        for rank, row in enumerate(order.rows)
    }
    compute = {rank: [a for a in row if _computes(a)] for rank, row in rows.items()}
    runtime.pipeline_order = compute
    load = getattr(runtime, "_prepare_schedule_with_comms", None) or runtime._load_actions
    load(rows, format="compute_comms")


def _computes(action: Any) -> bool:
    return action.computation_type.value in ("F", "B", "I", "W", "OVERLAP_F_B")
