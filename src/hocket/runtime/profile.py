"""Costs read back from measured timelines and from the stages themselves; `costs.toml` out.

Imports torch (inside the probe only), costs, timeline and split.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hocket.costs import Bytes, Costs
from hocket.interop.measured import Spread, spread_of
from hocket.ir import COMPUTE, Kind, kinds_of, stages_of
from hocket.runtime.report import milliseconds
from hocket.timeline import Timeline

if TYPE_CHECKING:
    from torch import nn

Key = tuple[Kind, int]  # kind and stage


@dataclass(frozen=True)
class Measured:
    """What timelines say: times by kind and stage, between actions, and of a message; in ms."""

    actions: dict[Key, Spread]
    between: Spread
    latency: Spread
    n_stages: int

    def costs(
        self,
        chosen: Callable[[Spread], float],
        *,
        shares: Mapping[int, float] | None = None,
        sizes: Bytes | None = None,
    ) -> Costs:
        """Costs that predict such a timeline; `chosen` takes the mean or the median of actions.

        What passes between two actions is the receive lane. Of it and of messages the lower
        quartile is taken: the long ones are those of a busy machine, or of a late message.
        A kind that the schedule does not have comes from those it has: `shares` are those of I in
        B by stage (else a half).
        """
        known = shares or {}
        f, i, w, b = (self._stages_of(kind, chosen) for kind in (Kind.F, Kind.I, Kind.W, Kind.B))
        between, latency = self.between.low, self.latency.low
        for s in range(self.n_stages):
            if b[s] is None:
                b[s] = None if i[s] is None else i[s] + (w[s] or 0.0)
            elif i[s] is None:
                i[s] = b[s] * known.get(s, 0.5)
                w[s] = b[s] - i[s]
        return Costs(
            F=_tuple(f), I=_tuple(i), W=_tuple(w), B=_tuple(b),
            latency=max(0.0, latency - between), lane=(between, 0.0),
            bytes=sizes or Bytes(), unit="ms",
        )  # fmt: skip

    def _stages_of(self, kind: Kind, chosen: Callable[[Spread], float]) -> list[Any]:
        found = (self.actions.get((kind, s)) for s in range(self.n_stages))
        return [None if spread is None else chosen(spread) for spread in found]


def _tuple(values: list[Any]) -> tuple[float, ...]:
    return tuple(0.0 if x is None else x for x in values)


def measured(timelines: Sequence[Timeline]) -> Measured:
    """The times of all actions of these timelines of one schedule, put together."""
    actions: dict[Key, list[float]] = {}
    between: list[float] = []
    latency: list[float] = []
    for timeline in timelines:
        _add_actions(timeline, actions)
        for queue in timeline.schedule.queues:
            _add_gaps(timeline, queue, between, latency)
    return Measured(
        {key: spread_of(times) for key, times in actions.items()},
        spread_of(between), spread_of(latency),
        timelines[0].schedule.placement.n_stages,
    )  # fmt: skip


def _add_actions(timeline: Timeline, actions: dict[Key, list[float]]) -> None:
    ms, codes = milliseconds(timeline), timeline.schedule.codes
    kinds, stages = kinds_of(codes), stages_of(codes)
    ticks = timeline.end - timeline.start
    for kind in COMPUTE:
        for stage in np.unique(stages[kinds == kind]).tolist():
            chosen = ticks[(kinds == kind) & (stages == stage)].tolist()
            times = [float(timeline.ticks.value(t)) * ms for t in chosen]
            actions.setdefault((kind, stage), []).extend(times)


def _add_gaps(timeline: Timeline, queue: Any, between: list[float], latency: list[float]) -> None:
    """Sorts a queue's short gaps: after a wait for another rank they are a message's time."""
    ms, awaited = milliseconds(timeline), None
    for gap in timeline.gaps(queue):
        if gap.cause == "transfer":
            is_message = gap.before == awaited and gap.waits_on != queue
            (latency if is_message else between).append(float(gap.end - gap.start) * ms)
        awaited = gap.before if gap.cause == "dependency" else None


def typical(timelines: Sequence[Timeline]) -> Timeline:
    """The timeline whose makespan is the median one."""
    ordered = sorted(timelines, key=lambda t: float(t.makespan))
    return ordered[(len(ordered) - 1) // 2]


def own_costs(timelines: Sequence[Timeline], one: Timeline) -> Costs:
    """Costs that predict one of the timelines: its own mean actions, gaps of all of them."""
    actions = measured([one]).actions
    return replace(measured(timelines), actions=actions).costs(lambda times: times.mean)


# --- the stages themselves -------------------------------------------------------------------


class Probe(NamedTuple):
    """One stage by itself: bytes, and the share of I in a backward."""

    static: int
    activation: int
    held: int
    message: int
    share: float


def probe(module: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Probe:
    """Measures a copy of a stage on the inputs of one microbatch (arguments, keyword arguments).

    static: weights, their gradients and two moments of Adam. activation: what a forward keeps.
    held: what of it, and of the output gradients, waits for W.
    """
    import torch

    from hocket.runtime import split
    from hocket.runtime.values import map_tensors, tensors_of

    module = copy.deepcopy(module)
    parameters = list(module.parameters())
    own = {p.untyped_storage().data_ptr() for p in [*parameters, *module.buffers()]}

    def fresh(t: Any) -> Any:
        return t.detach().clone().requires_grad_(t.is_floating_point())

    kept: dict[int, int] = {}

    def keep(t: Any) -> Any:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    shares, held, message = [], 0, 0
    with split.prepare(module) as plan:
        for _ in range(5):
            args, kwargs = map_tensors(inputs, fresh)
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                kept.clear()
                out = module(*args, **kwargs)
            outs = tensors_of(out)
            message = sum(t.nbytes for t in outs)
            roots = [t for t in outs if t.requires_grad]
            clocks = [_now()]
            with plan.input_backward() as pending:
                torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
            clocks.append(_now())
            held = pending.nbytes
            pending.run()
            clocks.append(_now())
            shares.append((clocks[1] - clocks[0]) / (clocks[2] - clocks[0]))
    return Probe(
        4 * sum(p.nbytes for p in parameters if p.requires_grad)
        + sum(p.nbytes for p in parameters if not p.requires_grad),
        sum(kept.values()), held, message, median(shares),
    )  # fmt: skip


def _now() -> float:
    from time import perf_counter

    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return perf_counter()


def bytes_of(probes: Mapping[int, Probe], n_stages: int) -> Bytes:
    """The probes of all stages as sizes."""
    rows = [probes[s] for s in range(n_stages)]
    return Bytes(
        static=tuple(r.static for r in rows),
        activation=tuple(r.activation for r in rows),
        held=tuple(r.held for r in rows),
        message=tuple(r.message for r in rows),
    )


# --- costs.toml ------------------------------------------------------------------------------


def costs_toml(costs: Costs, note: str) -> str:
    """Costs as the text of a `costs.toml`; `note` becomes comment lines."""
    lane = costs.lane or (0, 0)
    lines = [f"# {line}".rstrip() for line in note.splitlines()]
    lines += [f'unit = "{costs.unit}"']
    lines += [f"{name} = {_toml(getattr(costs, name))}" for name in ("F", "I", "W")]
    if costs.B is not None:
        lines.append(f"B = {_toml(costs.B)}")
    lines += [
        f"latency = {_toml(costs.latency)}",
        f"lane = {{ recv = {_toml(lane[0])}, send = {_toml(lane[1])} }}",
    ]
    if costs.bytes != Bytes():
        lines += ["", "[bytes]"]
        names = {"held": "held_between_I_and_W"}
        for name in ("static", "activation", "held", "message"):
            value = getattr(costs.bytes, name)
            if value is not None:
                lines.append(f"{names.get(name, name)} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value) if isinstance(value, int) else repr(float(f"{value:.5g}"))
