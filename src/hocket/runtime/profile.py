"""What a run and a look at its stages say about costs.

Imports torch (inside the probe only), costs, measured, timeline and split.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from hocket.costs import Bytes, Costs
from hocket.measured import readings
from hocket.timeline import Timeline

if TYPE_CHECKING:
    from torch import nn


def typical(timelines: Sequence[Timeline]) -> Timeline:
    """The timeline whose makespan is the median one."""
    ordered = sorted(timelines, key=lambda t: float(t.makespan))
    return ordered[(len(ordered) - 1) // 2]


def own_costs(timelines: Sequence[Timeline], one: Timeline, cores: int | None = None) -> Costs:
    """Costs in ms that predict one of the timelines: its own mean actions, gaps of all of them.

    cores: those that the ranks shared.
    """
    actions = readings([one], "ms", cores=cores).actions
    seen = readings(timelines, "ms", waited=True, cores=cores)
    return replace(seen, actions=actions).costs("mean", "low")


# --- the stages themselves -------------------------------------------------------------------

Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments and keyword arguments of a forward


class Probe(NamedTuple):
    """One stage by itself, in bytes."""

    static: int
    activation: int
    held: int
    message: int


def probe(module: nn.Module, calls: Sequence[Call]) -> Probe:
    """Measures a copy of a stage: the mean of these calls, one of each slice of a sequence.

    static: weights, their gradients and two moments of Adam. activation: what a forward keeps.
    held: what of it, and of the output gradients, waits for W.
    """
    import torch

    from hocket.runtime import split
    from hocket.runtime.carry import carries
    from hocket.runtime.values import map_tensors, tensors_of

    module = copy.deepcopy(module)
    parameters = list(module.parameters())
    own = {p.untyped_storage().data_ptr() for p in [*parameters, *module.buffers()]}
    kept: dict[int, int] = {}

    def fresh(t: Any) -> Any:
        return t.detach().clone().requires_grad_(t.is_floating_point())

    def keep(t: Any) -> Any:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    sizes = []
    with split.prepare(module) as plan:
        for args, kwargs in (map_tensors(call, fresh) for call in calls):
            kept.clear()
            hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
            with torch.enable_grad(), hooks:
                out = module(*args, **kwargs)
            message = sum(t.nbytes for t in tensors_of(out[0] if carries(module) else out))
            roots = [t for t in tensors_of(out) if t.requires_grad]
            with plan.input_backward() as pending:
                torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
            sizes.append((sum(kept.values()), pending.nbytes, message))
            pending.run()
    activation, held, message = (round(fmean(column)) for column in zip(*sizes, strict=True))
    return Probe(
        4 * sum(p.nbytes for p in parameters if p.requires_grad)
        + sum(p.nbytes for p in parameters if not p.requires_grad),
        activation, held, message,
    )  # fmt: skip


def bytes_of(probes: Mapping[int, Probe], n_stages: int) -> Bytes:
    """The probes of all stages as sizes."""
    rows = [probes[s] for s in range(n_stages)]
    return Bytes(
        static=tuple(r.static for r in rows),
        activation=tuple(r.activation for r in rows),
        held=tuple(r.held for r in rows),
        message=tuple(r.message for r in rows),
    )
