"""One chunk of a Megatron model as a stage: its forward is Megatron's `forward_step`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from hocket.runtime.stage import Stage


@dataclass(kw_only=True)
class Call:
    """The arguments of one call of `forward_backward_func`, as Megatron names them."""

    forward_step_func: Any
    data_iterator: Any
    model: Any
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    adjust_tensor_shapes_fn: Any = None
    p2p_communicator: Any = None
    pg_collection: Any = None
    force_all_reduce: bool = False


@contextmanager
def standing_at(stage: int, ranks: tuple[int, ...], p: int) -> Generator[None]:
    """Inside, Megatron takes this rank for the one where it would place the stage itself.

    Its own place for stage s is rank s mod p, virtual stage s // p.
    """
    before = (
        parallel_state._MPU_PIPELINE_MODEL_PARALLEL_RANK,
        parallel_state.get_virtual_pipeline_model_parallel_rank(),
    )
    if ranks[stage] != stage % p:
        parallel_state.set_pipeline_model_parallel_rank(stage % p)
    if len(ranks) > p:
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage // p)
    try:
        yield
    finally:
        parallel_state.set_pipeline_model_parallel_rank(before[0])
        parallel_state.set_virtual_pipeline_model_parallel_rank(before[1])


class Microbatches:
    """An iterator of data from which forwards take microbatches in any order.

    Megatron reads one iterator per chunk, in order.
    """

    def __init__(self, source: Any, in_order: bool) -> None:
        self.source, self.in_order, self.n = source, in_order, 0
        self.kept: dict[int, Any] = {}

    def at(self, mb: int) -> Iterator[Any] | None:
        """What the forward of a microbatch reads from."""
        if self.source is None or self.in_order:
            return self.source
        for n in range(self.n, mb + 1):
            self.kept[n] = next(self.source)
        self.n = max(self.n, mb + 1)
        return iter((self.kept.pop(mb),))


class Chunk(Stage):
    """The life of each microbatch in one chunk.

    `begin` comes before each call; `on_end` is called once the last gradient of the chunk's
    weights is there. found: by microbatch what the loss function reported. in_order: its forwards
    take the microbatches in order.
    """

    def __init__(
        self, index: int, module: Any, m: int, plan: Any, ranks: tuple[int, ...], *, in_order: bool
    ) -> None:
        super().__init__(index, module, m, None, plan)
        self.ranks, self.p, self.in_order = ranks, max(ranks) + 1, in_order
        self.is_last = index == len(ranks) - 1
        self.vp_stage = index // self.p if len(ranks) > self.p else None

    def begin(self, call: Call, source: Any, config: Any, on_end: Callable[[], None]) -> None:
        """Gets ready for one call."""
        self.call, self.config, self.on_end = call, config, on_end
        self.data = Microbatches(source, self.in_order)
        self.found: dict[int, Any] = {}
        self.tokens: list[Tensor] = []
        self.is_fresh, self.left = True, len(self.roots)

    def _output(self, mb: int) -> Any:
        """The output of a forward, which is the loss where the chunk is the last one."""
        call, config, found = self.call, self.config, []
        value, self.inputs[mb] = self.inputs[mb], None
        if call.forward_only:
            self.leaves[mb] = None
        if self.is_fresh and config.param_sync_func is not None:
            of_chunk(config.param_sync_func, call, self.module)(self.module.parameters())
        is_first = self.is_fresh
        if call.forward_only and call.first_val_step is not None:
            is_first = is_first and call.first_val_step
        self.is_fresh = False
        with standing_at(self.index, self.ranks, self.p):
            output, tokens = schedules.forward_step(
                call.forward_step_func, self.data.at(mb), self.module, call.num_microbatches,
                None if value is None else value[0], found, config, call.pg_collection.cp.size(),
                collect_non_loss_data=call.collect_non_loss_data, is_first_microbatch=is_first,
                current_microbatch=mb, vp_stage=self.vp_stage, is_last_stage=self.is_last,
            )  # fmt: skip
        self.tokens.append(tokens)
        if found:
            (self.found[mb],) = found
        return output

    def forward(self, mb: int) -> None:
        """F: leaves the output in `results`."""
        output = self._output(mb)
        self.roots[mb] = (get_gradient_edge(output),) if output.requires_grad else ()
        self.results[mb] = (output,)

    def forward_loss(self, mb: int) -> None:
        """F of the last stage."""
        loss, scale = self._output(mb), self.config.grad_scale_func
        if scale is not None:
            loss = scale(loss)
        self.roots[mb] = (get_gradient_edge(loss),) if loss.requires_grad else ()
        self.gradients[mb] = (torch.ones_like(loss),)

    def evaluate(self, mb: int) -> None:
        """F without a backward."""
        self.results[mb] = (self._output(mb),)

    def evaluate_loss(self, mb: int) -> None:
        """F of the last stage without a backward."""
        self._output(mb)

    def backward(self, mb: int) -> None:
        """B."""
        super().backward(mb)
        self._end()

    def weight_backward(self, mb: int) -> None:
        """W."""
        super().weight_backward(mb)
        self._end()

    def _start(self, mb: int) -> Any:
        if not self.roots[mb]:  # all before it is frozen
            self.gradients[mb] = ()
        return super()._start(mb)

    def _end(self) -> None:
        self.left -= 1
        if not self.left:
            self.on_end()


def of_chunk(functions: Any, call: Call, module: Any) -> Any:
    """A chunk's own function, where the config has one for each."""
    return functions[call.model.index(module)] if isinstance(functions, list) else functions
