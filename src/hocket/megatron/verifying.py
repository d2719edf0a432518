"""The gradients of a first step against those of the same chunks, one microbatch at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.errors import RunError, UsageError
from hocket.megatron.binding import Bound
from hocket.megatron.chunk import Call
from hocket.runtime.verify import difference

Gradients = Mapping[tuple[int, str], Tensor | None]


def verify(
    run: Callable[[Bound, list[Any]], Any], order: Bound, reference: Bound, call: Call, config: Any
) -> None:
    """Compares the gradients of a step with those of a reference; collective.

    run: runs an order on iterators, without any reduction. Gradients are left as they were, and
    `call.data_iterator` gives the data of the step once more.

    Raises: RunError that names the parameter of each rank that is furthest off.
    """
    drops = [k for k in ("hidden_dropout", "attention_dropout") if getattr(config, k, 0)]
    if drops:
        raise UsageError(
            "verify=True cannot compare gradients under dropout, whose draws depend on the order; "
            f"set {' and '.join(drops)} to 0 for this check"
        )
    sources = call.data_iterator
    data = [s if s is None else [next(s) for _ in range(call.num_microbatches)] for s in sources]
    before = _copied(_gradients(order))
    found = []
    for bound in (order, reference):
        run(bound, _again(data))
        found.append(_copied(_gradients(order)))
        for key, now in found[-1].items():
            earlier = before[key]
            if now is not None and earlier is not None:
                now.sub_(earlier)
        _restore(order, before)
    call.data_iterator = _again(data)
    every: list[Any] = [None] * call.pg_collection.pp.size()
    dist.all_gather_object(every, difference(*found), group=call.pg_collection.pp)
    lines = [f"rank {r}: {text}" for r, text in enumerate(every) if text]
    if lines:
        raise RunError(
            f"the gradients of {order.lowered.name} differ from those of one microbatch after the "
            "other:\n  " + "\n  ".join(lines)
        )


def _again(data: list[Any]) -> list[Any]:
    return [kept if kept is None else iter(kept) for kept in data]


def _parameters(bound: Bound) -> dict[tuple[int, str], Any]:
    return {
        (s, name): p
        for s, chunk in bound.chunks.items()
        for name, p in chunk.module.named_parameters()
    }


def _gradients(bound: Bound) -> Gradients:
    return {k: getattr(p, "main_grad", p.grad) for k, p in _parameters(bound).items()}


def _copied(gradients: Gradients) -> dict[tuple[int, str], Tensor | None]:
    return {k: None if g is None else g.detach().clone() for k, g in gradients.items()}


def _restore(bound: Bound, before: Gradients) -> None:
    """Gradients as they were, and none that Megatron takes for added already."""
    for key, p in _parameters(bound).items():
        kept, main = before[key], getattr(p, "main_grad", None)
        if main is not None and kept is not None:
            main.copy_(kept)
            p.grad_added_to_main_grad = False
        else:
            p.grad = None if kept is None else torch.clone(kept)
