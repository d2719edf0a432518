"""The function that takes the place of Megatron's own schedules, and runs an order."""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.utils._pytree import tree_map

from hocket.errors import RunError, UsageError
from hocket.megatron.binding import Bound, bind, set_wire
from hocket.megatron.chunk import Call
from hocket.megatron.compatibility import check_config, check_version, finalize
from hocket.megatron.gradients import check_tied, default_groups, ends_of, finalizing
from hocket.megatron.orders import Order, Source, source_of
from hocket.megatron.verifying import verify
from hocket.megatron.weights import seam
from hocket.runtime.generation import one_pass
from hocket.runtime.measure import timeline
from hocket.runtime.verify import one_after_the_other
from hocket.timeline import Timeline


def forward_backward_func(
    order: Order, *, v: int | None = None, verify: bool = False
) -> ForwardBackward:
    """What Megatron's `get_forward_backward_func()` returns, for an order of hocket.

    order: a name as on the command line, a `.sched` file, a Schedule or a Plan. v: stages per
    rank of a named one. verify: the first training step compares its gradients with those of
    the same chunks run one microbatch after the other.

    Raises: HocketError where the order cannot run inside Megatron, or its version is unknown.
    """
    check_version()
    return ForwardBackward(source_of(order, v), verify=verify)


class ForwardBackward:
    """Runs an order, called as Megatron calls its own schedules.

    The order is built and checked when a number of microbatches is met for the first time. In an
    evaluation each stage runs its forwards in turn, in any number.
    """

    __name__ = "hocket_forward_backward"

    def __init__(self, source: Source, *, verify: bool) -> None:
        self.source = source
        self._verify_next = verify
        self._seam = seam()
        self._known: dict[tuple[int, bool], Bound] = {}
        self._ran: Bound | None = None

    def __call__(self, **arguments: Any) -> list[Any]:
        """What the loss function reported, by microbatch, on the last rank of the pipeline.

        Raises: HocketError where the order or a setting of Megatron cannot be respected.
        """
        call = Call(**arguments)
        call.model = call.model if isinstance(call.model, list) else [call.model]
        if not isinstance(call.data_iterator, list):
            call.data_iterator = [call.data_iterator] * len(call.model)
        call.pg_collection = call.pg_collection or default_groups()
        config = get_model_config(call.model[0])
        bound = self._bound(call, config)
        set_wire(bound.wire, call, config)
        if self._verify_next and not call.forward_only:
            self._verify_next = False
            reference = one_after_the_other(self._schedule(call), whole=False)
            other = bind(reference, call, config, self._seam)
            verify(
                lambda bound, data: self._run(bound, call, data, config, reduce=False),
                bound, other, call, config,
            )  # fmt: skip
        timer = None if config.timers is None else config.timers("forward-backward", log_level=1)
        if timer is not None:
            timer.start(barrier=config.barrier_with_L1_time)
        tokens = self._run(bound, call, call.data_iterator, config)
        found, tokens = _moved(bound, call, tokens)
        if not call.forward_only:
            self._ran = bound
            if config.finalize_model_grads_func is not None:
                groups = finalizing(bound, call)
                finalize(config, call.model, tokens, groups, call.force_all_reduce)
        if timer is not None:
            timer.stop()
        return found

    def _bound(self, call: Call, config: Any) -> Bound:
        """The order of a call, bound to its model. Raises: HocketError, on all ranks alike."""
        key = call.num_microbatches, call.forward_only
        known = self._known.get(key)
        if known is None or not known.fits(call.model):
            if call.adjust_tensor_shapes_fn is not None:
                raise UsageError(
                    "adjust_tensor_shapes_fn is given, but shapes are those of 1F1B there; leave "
                    "it out, or set variable_seq_lengths"
                )
            check_config(config, call.model)
            known = bind(self._schedule(call), call, config, self._seam)
            check_tied(known)
            self._known[key] = known
        return known

    def _schedule(self, call: Call) -> Any:
        p, m = call.pg_collection.pp.size(), call.num_microbatches
        if call.forward_only:
            return one_pass(self.source.example(p), m)
        return self.source.order(p, m)

    def _run(
        self, bound: Bound, call: Call, data: list[Any], config: Any, *, reduce: bool = True
    ) -> Tensor:
        """The number of tokens that the last stage counted, after all actions of this rank.

        reduce: let the gradients of a chunk be reduced once they are complete.
        """
        chunks = [*bound.chunks.values()]
        syncs = config.no_sync_func or nullcontext
        syncs = syncs if isinstance(syncs, list) else [syncs] * len(chunks)
        with ExitStack() as stack:
            stack.enter_context(self._seam.installed())
            held = [stack.enter_context(ExitStack()) for _ in chunks]
            for context, no_sync in zip(held, syncs, strict=True):
                context.enter_context(no_sync())
            ends = ends_of(bound, held, config, call) if reduce else [_nothing] * len(chunks)
            for chunk, source, end in zip(chunks, data, ends, strict=True):
                chunk.begin(call, source, config, end)
            bound.execution.run()
        if not call.forward_only:
            bound.execution.parts.check_clean()
        tokens = torch.zeros([], dtype=torch.int, device=bound.wire.device)
        for chunk in chunks:
            for counted in chunk.tokens:
                tokens = tokens + counted.to(bound.wire.device)
        return tokens

    def timeline(self) -> Timeline:
        """The measured timeline of the last training step; collective in the pipeline.

        Clocks of different hosts are compared by their system time, as far as messages allow. On
        GPUs the times are those at which the CPU launched the work.

        Raises: RunError before the first step.
        """
        if self._ran is None:
            raise RunError("there is no timeline before the first step")
        wire = self._ran.wire
        own = self._ran.execution.spans, time.time_ns() - time.perf_counter_ns()
        every: list[Any] = [None] * len(wire.ranks)
        dist.all_gather_object(every, own, group=wire.group)
        clocks = np.array([clock for _, clock in every], dtype=np.int64)
        return timeline(
            self._ran.lowered, [spans for spans, _ in every], [*(clocks - clocks[0]).astype(float)]
        )


def _nothing() -> None:
    pass


def _moved(bound: Bound, call: Call, tokens: Tensor) -> tuple[list[Any], Tensor]:
    """What the last stage reported and counted, on the last rank, where Megatron looks for it."""
    last = len(bound.ranks) - 1
    chunk = bound.chunks.get(last)
    found = [] if chunk is None else [chunk.found[mb] for mb in sorted(chunk.found)]
    home, end = bound.ranks[last], len(bound.wire.ranks) - 1
    if home == end:
        return found, tokens
    box: list[Any] = [None]
    if chunk is not None:
        box = [tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, (found, tokens))]
    dist.broadcast_object_list(box, bound.wire.ranks[home], group=bound.wire.group)
    if call.pg_collection.pp.rank() != end:
        return [], tokens
    device = bound.wire.device
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, box[0])
