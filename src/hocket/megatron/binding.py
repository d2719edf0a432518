"""An order bound to the chunks of a Megatron model on this rank."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_attr_wrapped_model

from hocket.errors import RunError, UsageError
from hocket.ir import Kind, Schedule, kinds_of, mbs_of, stages_of
from hocket.megatron.chunk import Call, Chunk, standing_at
from hocket.megatron.messages import Down, Up, Wire
from hocket.megatron.weights import Deferral, Seam
from hocket.runtime.execute import Execution, Parts
from hocket.runtime.orders import lower, split_stages
from hocket.runtime.program import programs
from hocket.text import dumps


class Bound(NamedTuple):
    """An order bound to chunks; `ranks` has the rank of each stage."""

    model: list[Any]
    lowered: Schedule
    ranks: tuple[int, ...]
    execution: Execution
    chunks: Mapping[int, Chunk]
    wire: Wire

    def fits(self, model: list[Any]) -> bool:
        """Whether it is bound to just these chunks."""
        return len(model) == len(self.model) and all(map(_is, model, self.model))


def bind(schedule: Schedule, call: Call, config: Any, seam: Seam) -> Bound:
    """The order, lowered and checked, bound to the chunks of this rank; collective.

    Raises: HocketError where it cannot run on this model; no microbatch has moved then.
    """
    lowered = lower(schedule, tagged=False)
    group, ranks = call.pg_collection.pp, ranks_of(schedule)
    own = [s for s, rank in enumerate(ranks) if rank == group.rank()]
    _check_model(schedule, ranks, own, call.model, config)
    _check_alike(lowered, group)
    split = split_stages(schedule)
    m, n = schedule.m, len(ranks)
    chunks = {}
    for s, module in zip(own, call.model, strict=True):
        plan = Deferral(seam, module, s) if s in split else None
        chunks[s] = Chunk(s, module, m, plan, ranks, in_order=_in_order(schedule, s))
    wire = _wire(call, config)
    down: dict[int, Any] = {s: Down(wire, s, n, ranks[s + 1]) for s in own if s + 1 < n}
    up: dict[int, Any] = {s: Up(wire, s - 1, n, ranks[s - 1]) for s in own if s}
    last = {s: range(m) if s == n - 1 else () for s in own}
    parts = Parts(chunks, down, up, (), last, not call.forward_only)
    program = programs(lowered, [group.rank()])[0]
    return Bound(call.model, lowered, ranks, Execution(program, parts), chunks, wire)


def ranks_of(schedule: Schedule) -> tuple[int, ...]:
    """The rank of each stage."""
    return tuple(queue.rank for queue in schedule.placement.paths[0])


def set_wire(wire: Wire, call: Call, config: Any) -> None:
    """Prepares the messages of a call, whose microbatches may have another shape than before."""
    wire.shape = _wire(call, config).shape


def _is(one: Any, other: Any) -> bool:
    return one is other


def _wire(call: Call, config: Any) -> Wire:
    groups = call.pg_collection
    length = call.seq_length if call.decoder_seq_length is None else call.decoder_seq_length
    length //= groups.cp.size() * (groups.tp.size() if config.sequence_parallel else 1)
    return Wire(
        groups.pp, dist.get_process_group_ranks(groups.pp),
        (length, call.micro_batch_size, config.hidden_size), config.pipeline_dtype,
        torch.cuda.current_device(), bool(config.variable_seq_lengths),
    )  # fmt: skip


def _in_order(schedule: Schedule, stage: int) -> bool:
    """Whether the forwards of a stage take the microbatches in order."""
    codes = schedule.codes
    codes = codes[(kinds_of(codes) == Kind.F) & (stages_of(codes) == stage)]
    return all(a < b for a, b in pairwise(mbs_of(codes).tolist()))


def _check_alike(lowered: Schedule, group: Any) -> None:
    """Raises RunError where the ranks have different orders."""
    own = sha256(dumps(lowered).encode()).hexdigest()
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, own, group=group)
    others = [r for r, text in enumerate(every) if text != every[0]]
    if others:
        raise RunError(
            f"rank {others[0]} of the pipeline has another order for {lowered.name} than rank 0; "
            "does every host have the same file, and the same version of hocket?"
        )


def _check_model(
    schedule: Schedule, ranks: tuple[int, ...], own: list[int], model: list[Any], config: Any
) -> None:
    """Raises UsageError where the chunks are not those of the placement."""
    name, p = schedule.name, schedule.p
    v = config.virtual_pipeline_model_parallel_size or 1
    if len(own) != len(model) or v != len(own):
        raise UsageError(
            f"{name} places {len(own)} stages on each rank, but the model has {len(model)} chunks "
            f"and virtual_pipeline_model_parallel_size is {v}; set it to {len(own)}"
        )
    for s, module in zip(own, model, strict=True):
        inner = get_attr_wrapped_model(module, "pre_process", return_model_obj=True)
        layers = getattr(getattr(inner, "decoder", None), "layers", None) or [None]
        first = getattr(layers[0], "layer_number", None)
        with standing_at(s, ranks, p):
            want = get_transformer_layer_offset(config, s // p if v > 1 else None, s % p) + 1
        ends = inner.pre_process == (s == 0) and inner.post_process == (s == len(ranks) - 1)
        if not ends or (first is not None and first != want):
            raise UsageError(
                f"chunk {own.index(s)} of rank {ranks[s]} is not built as stage {s} of {name} "
                f"(it begins at layer {first}, and stage {s} at layer {want}); build the model "
                "with place(model_provider)"
            )
