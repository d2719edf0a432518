"""What a run and a look at its stages say about costs, and how that is shown."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from hocket.costs import Bytes, Costs
from hocket.ir import Placement
from hocket.measured.readings import Link, Readings, Spread, readings
from hocket.tables import table
from hocket.timeline import Timeline

if TYPE_CHECKING:
    from torch import nn

MANY = 8  # links that are shown one by one


def typical(timelines: Sequence[Timeline]) -> Timeline:
    """The timeline whose makespan is the median one."""
    ordered = sorted(timelines, key=lambda t: float(t.makespan))
    return ordered[(len(ordered) - 1) // 2]


def own_costs(
    timelines: Sequence[Timeline], one: Timeline, cores: int | None = None, comm_cpu: float = 0.0
) -> Costs:
    """Costs in ms that predict one of the timelines: its own mean actions, gaps of all of them.

    cores: those that the ranks shared. comm_cpu: ms of these for each message.
    """
    actions = readings([one], "ms", cores=cores, comm_cpu=comm_cpu).actions
    seen = readings(timelines, "ms", waited=True, cores=cores, comm_cpu=comm_cpu)
    return replace(seen, actions=actions).costs("mean", "low")


# --- the stages themselves -------------------------------------------------------------------

Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments and keyword arguments of a forward


class Probe(NamedTuple):
    """One stage by itself, in bytes."""

    static: int
    activation: int
    held: int
    left: int
    message: int


def probe(module: nn.Module, calls: Sequence[Call]) -> Probe:
    """Measures a copy of a stage: the mean of these calls, one of each slice of a sequence.

    static: weights, their gradients and two moments of Adam. activation: what a forward keeps.
    held: what of it, and of the output gradients, waits for W. left: what of the activation is
    there after W.
    """
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    from hocket.runtime import split
    from hocket.runtime.slice_state import carries
    from hocket.runtime.values import map_tensors, tensors_of

    module = copy.deepcopy(module)
    parameters = list(module.parameters())
    own = {p.untyped_storage().data_ptr() for p in [*parameters, *module.buffers()]}
    kept: dict[int, tuple[StorageWeakRef, int]] = {}

    def fresh(t: Any) -> Any:
        return t.detach().clone().requires_grad_(t.is_floating_point())

    def keep(t: Any) -> Any:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
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
            activation, held = sum(nbytes for _, nbytes in kept.values()), pending.nbytes
            pending.run()
            del args, kwargs, out, roots  # ours; a pipeline has let go of them too
            left = sum(nbytes for storage, nbytes in kept.values() if not storage.expired())
            sizes.append((activation, held, left, message))
    activation, held, left, message = (round(fmean(column)) for column in zip(*sizes, strict=True))
    return Probe(
        4 * sum(p.nbytes for p in parameters if p.requires_grad)
        + sum(p.nbytes for p in parameters if not p.requires_grad),
        activation, held, left, message,
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


def messages_of(probes: Mapping[int, Probe], placement: Placement) -> list[int]:
    """Bytes of the output of each stage that goes to another rank."""
    stages = {
        s for path in placement.paths for s, (a, b) in enumerate(pairwise(path)) if a.rank != b.rank
    }
    return [probes[s].message for s in sorted(stages)]


# --- shown -----------------------------------------------------------------------------------


def profile_text(
    seen: Readings, probes: Mapping[int, Probe], links: Sequence[Link], fused: Spread
) -> str:
    """Tables of times, of bytes and of links, and the time of fused slots."""
    rows = [
        [name, f"{x.median:.3f}", f"{x.low:.3f} to {x.high:.3f}", str(x.count)]
        for name, x in seen.named()
    ]
    parts = [table(rows, ["ms", "median", "middle half", "times"])]
    columns = ["static", "activation", "held", "left", "message"]
    sizes = [[s, *(getattr(probes[s], key) for key in columns)] for s in sorted(probes)]
    heads = ["bytes of stage", "static", "after F", "between I and W", "after W", "message"]
    parts.append(table([[*map(str, row)] for row in sizes], heads))
    if links:
        parts.append(table(_link_rows(links), ["link", "latency, ms", "bytes a ms"]))
    if fused.count:
        parts.append(
            f"F and B of one slot take {fused.median:.3f} of their sum, with what is between them "
            f"(middle half {fused.low:.3f} to {fused.high:.3f}, {fused.count} times)"
        )
    return "\n\n".join(parts)


def _link_rows(links: Sequence[Link]) -> list[list[str]]:
    """Each link; of many the one of median bandwidth and the slowest."""
    if len(links) <= MANY:
        return [_link_row("{} - {}".format(*link.ranks), link) for link in links]
    ordered = sorted(links, key=lambda link: link.bandwidth or float("inf"))
    name = "slowest, {} - {}".format(*ordered[0].ranks)
    middle = ordered[len(links) // 2]
    return [_link_row(f"median of {len(links)}", middle), _link_row(name, ordered[0])]


def _link_row(name: str, link: Link) -> list[str]:
    rate = "-" if link.bandwidth is None else f"{link.bandwidth:.0f}"
    return [name, f"{link.latency:.3f}", rate]
