"""When a chunk's gradients are reduced, and what ties the embedding to the head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model

from hocket.errors import UsageError
from hocket.megatron.binding import Bound
from hocket.megatron.chunk import Call, of_chunk


def default_groups() -> ProcessGroupCollection:
    """The groups of Megatron's parallel state that a schedule needs."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    return groups


def ends_of(
    bound: Bound, held: Sequence[ExitStack], config: Any, call: Call
) -> list[Callable[[], None]]:
    """For each chunk what is done once its gradients are complete.

    held: what keeps the reduction of each chunk from starting. Where embedding and head are tied
    and on one rank, both are reduced together, after their gradients were summed.
    """
    stages = [*bound.chunks]
    tied = tied_here(bound)
    waiting = {0, len(bound.ranks) - 1} if tied else set()

    def release(stage: int) -> None:
        module: Any = bound.chunks[stage].module
        held[stages.index(stage)].close()
        ddp = getattr(module, "ddp_config", None)
        if config.grad_sync_func is not None:
            of_chunk(config.grad_sync_func, call, module)(module.parameters())
        elif getattr(ddp, "overlap_grad_reduce", False):
            module.start_grad_sync()

    def end(stage: int) -> None:
        if stage not in waiting:
            release(stage)
            return
        waiting.discard(stage)
        if not waiting:
            _sum(*tied)
            release(0)
            release(len(bound.ranks) - 1)

    return [lambda stage=stage: end(stage) for stage in stages]


def finalizing(bound: Bound, call: Call) -> Any:
    """The groups by which gradients are reduced: none for the embedding where this rank has both.

    Raises: UsageError where the tied weights are where Megatron cannot reduce them.
    """
    groups, ranks = call.pg_collection, bound.ranks
    if ranks[0] == ranks[-1]:
        groups = copy.copy(groups)
        groups.embd = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    return groups


def check_tied(bound: Bound) -> None:
    """Raises UsageError where tied weights are on ranks between which Megatron reduces nothing."""
    ends = bound.ranks[0], bound.ranks[-1]
    shares = any(shares_embedding(chunk.module) for chunk in bound.chunks.values())
    if shares and ends[0] != ends[1] and ends != (0, bound.lowered.p - 1):
        raise UsageError(
            f"{bound.lowered.name} places the embedding on rank {ends[0]} and the head on rank "
            f"{ends[1]}; Megatron can tie their weights on one rank, or on ranks 0 and "
            f"{bound.lowered.p - 1}: untie them (untie_embeddings_and_output_weights)"
        )


def tied_here(bound: Bound) -> tuple[Any, ...]:
    """The weights of embedding and head where they are tied, apart, and both on this rank."""
    first, last = 0, len(bound.ranks) - 1
    if not {first, last} <= bound.chunks.keys() or first == last:
        return ()
    ends = [bound.chunks[s].module for s in (first, last)]
    return tuple(map(shared_weight, ends)) if all(map(shares_embedding, ends)) else ()


def shared_weight(module: Any) -> Any:
    """The weight of a chunk's embedding, or of its head."""
    return _inner(module).shared_embedding_or_output_weight()


def _inner(module: Any) -> Any:
    return get_attr_wrapped_model(module, "pre_process", return_model_obj=True)


def shares_embedding(module: Any) -> bool:
    """Whether embedding and head of a chunk's model are tied."""
    return getattr(_inner(module), "share_embeddings_and_output_weights", False)


def _sum(embedding: Any, head: Any) -> None:
    """Makes both gradients their sum."""
    a, b = (w.main_grad if hasattr(w, "main_grad") else w.grad for w in (embedding, head))
    if a is not None and b is not None:
        a.add_(b)
        b.copy_(a)
