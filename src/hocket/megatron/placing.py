"""An order put in Megatron's own place: its schedules replaced, its models built where it wants."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from megatron.core import parallel_state, pipeline_parallel

from hocket.megatron.binding import ranks_of
from hocket.megatron.chunk import standing_at
from hocket.megatron.gradients import shared_weight, shares_embedding
from hocket.megatron.orders import Order
from hocket.megatron.step import ForwardBackward, forward_backward_func

_GETTER = "get_forward_backward_func"


def use(order: Order, *, v: int | None = None, verify: bool = False) -> Installed:
    """An order installed in Megatron, whose training and evaluation run it from now on.

    order, v, verify: as of `forward_backward_func`. Replaces `get_forward_backward_func` in
    `megatron.core.pipeline_parallel` and, where it is imported, in `megatron.training.training`;
    `restore()` undoes that. Without pipeline parallelism Megatron's own function runs.

    Raises: HocketError where the order cannot run inside Megatron, or its version is unknown.
    """
    return Installed(forward_backward_func(order, v=v, verify=verify))


class Installed:
    """An order that is installed in Megatron. function: what runs it."""

    def __init__(self, function: ForwardBackward) -> None:
        self.function = function
        own = getattr(pipeline_parallel, _GETTER)

        @wraps(own)
        def get(*args: Any, **kwargs: Any) -> Any:
            if parallel_state.get_pipeline_model_parallel_world_size() == 1:
                return own(*args, **kwargs)
            return function

        training = sys.modules.get("megatron.training.training")
        self._replaced = [
            (m, getattr(m, _GETTER)) for m in (pipeline_parallel, training) if m is not None
        ]
        for module, _ in self._replaced:
            setattr(module, _GETTER, get)

    def restore(self) -> None:
        """Gives Megatron its own functions back; a second time nothing happens."""
        while self._replaced:
            module, own = self._replaced.pop()
            setattr(module, _GETTER, own)

    def place(self, model_provider: Callable[..., Any]) -> Callable[..., Any]:
        """A model provider that builds the stages which the order places on this rank.

        Megatron calls it once per chunk, as it calls `model_provider`. Chunk i of a rank is its
        i-th stage; stage s has the layers that Megatron gives to rank s mod p, virtual stage
        s // p.
        """
        first: list[Any] = []

        @wraps(model_provider)
        def provider(*args: Any, **kwargs: Any) -> Any:
            p = parallel_state.get_pipeline_model_parallel_world_size()
            if p == 1:
                return model_provider(*args, **kwargs)
            kwargs |= dict(zip(("pre_process", "post_process"), args, strict=False))
            ranks = ranks_of(self.function.source.example(p))
            rank = parallel_state.get_pipeline_model_parallel_group().rank()
            own = [s for s, r in enumerate(ranks) if r == rank]
            stage = own[kwargs.get("vp_stage") or 0]
            kwargs |= {"pre_process": stage == 0, "post_process": stage == len(ranks) - 1}
            if len(ranks) > p:
                kwargs["vp_stage"] = stage // p
            with _building(stage, ranks, p, kwargs):
                model = model_provider(**kwargs)
            if stage == 0:
                first[:] = [model]
            elif kwargs["post_process"] and ranks[0] == rank and shares_embedding(model):
                shared_weight(model).data.copy_(shared_weight(first[0]).data)
            return model

        return provider


class _View:
    """The pipeline group as it looks from another rank of it."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group, self._rank = group, rank

    def rank(self) -> int:
        return self._rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@contextmanager
def _building(
    stage: int, ranks: tuple[int, ...], p: int, kwargs: dict[str, Any]
) -> Generator[None]:
    """Inside, a model is built as on the rank where Megatron would place the stage itself.

    Embedding and head on one rank are tied by us, so there is no group for them then.
    """
    if ranks[stage] == stage % p and ranks[0] != ranks[-1]:
        yield
        return
    state: Any = parallel_state
    before = state._PIPELINE_MODEL_PARALLEL_GROUP, state._EMBEDDING_GROUP
    seen = {"pp": _View(before[0], stage % p)}
    if ranks[0] == ranks[-1]:
        seen["embd"] = None
    if kwargs.get("pg_collection") is not None:
        kwargs["pg_collection"] = groups = copy.copy(kwargs["pg_collection"])
        for name, group in seen.items():
            setattr(groups, name, group)
    state._PIPELINE_MODEL_PARALLEL_GROUP = seen["pp"]
    state._EMBEDDING_GROUP = seen.get("embd", before[1])
    try:
        with standing_at(stage, ranks, p):
            yield
    finally:
        state._PIPELINE_MODEL_PARALLEL_GROUP, state._EMBEDDING_GROUP = before
