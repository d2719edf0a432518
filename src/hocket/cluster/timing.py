"""From the rows of a layer to seconds and bytes: the only place that knows how fast work is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from hocket.cluster.hardware import Cluster
from hocket.cluster.model import Model
from hocket.cluster.operations import F, Hides, I, Row, Shape, Tensor, W, Work, layer
from hocket.cluster.stack import Stack
from hocket.cluster.tables import hashed_once

_USABLE_HBM = 0.85  # of the memory's rate, for large copies
_BACKWARD_LAUNCHES = 1.4  # CPU time of a layer's backward, relative to its forward


class Seconds(NamedTuple):
    """Time of one phase: computation, and what is exposed of each kind of message."""

    compute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    dp: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.compute + self.tp + self.cp + self.ep + self.dp

    def plus(self, other: Seconds) -> Seconds:
        """The sum, part by part."""
        return Seconds(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Seconds:
        """Each part this many times."""
        return Seconds(*(a * factor for a in self))


class LayerCost(NamedTuple):
    """What one layer costs on one rank for one microbatch.

    Bytes: activation is held from F to I, held from I to W, transient only during I (what was
    recomputed). parameters: outside the experts, of the experts. shapes: of the weights.
    """

    F: Seconds
    I: Seconds  # noqa: E741 (the field's letter)
    W: Seconds
    activation: float
    held: float
    transient: float
    parameters: tuple[float, float]
    shapes: tuple[tuple[float, float], ...]


@hashed_once
@dataclass(frozen=True)
class Machine:
    """A stack on a cluster, with the sizes of the groups that exchange messages."""

    cluster: Cluster
    stack: Stack
    tp: int
    cp: int
    ep: int
    etp: int
    replicas: int  # ranks with the same weights, context parallel ones included

    def seconds(self, row: Row) -> float:
        """Time of a row by itself."""
        return _TIME[row.work](self, row)


def _product(machine: Machine, row: Row) -> float:
    """A matrix product: the curve of the stack, or the memory's rate where that is slower."""
    stack, gpu = machine.stack, machine.cluster.gpu
    low = stack.narrow and row.work is not Work.HEAD
    peak = gpu.peak(stack.precision if low else "bf16")
    m, n, k, half = row.m, row.n, row.k, stack.half
    loss = (1 + half / m) * (1 + half / n) * (1 + half / k)
    factor = stack.grouped if row.work is Work.EXPERTS else 1.0
    if row.phase is W:
        factor *= stack.weight
    moved = (1 if low else 2) * (m * k + k * n) + 2 * m * n
    slowest = max(
        2 * m * n * k * loss * factor / (stack.gemm * peak), moved / (_USABLE_HBM * gpu.hbm * 1e12)
    )
    return row.count * slowest


def _attention(machine: Machine, row: Row) -> float:
    return row.flops / (machine.stack.attention * machine.cluster.gpu.peak("bf16"))


def _traffic(machine: Machine, row: Row) -> float:
    return row.amount * machine.stack.traffic / (_USABLE_HBM * machine.cluster.gpu.hbm * 1e12)


def _collective(machine: Machine, row: Row) -> float:
    m, cluster = machine, machine.cluster
    if row.group == "tp":
        return cluster.ring(row.amount, m.tp, 1, row.rounds)
    if row.group == "cp":
        return cluster.ring(row.amount, m.cp, m.tp, row.rounds)
    if row.group == "ep":
        nodes = max(1.0, m.ep * m.etp / cluster.node)
        once = nodes * (1 - (1 - 1 / nodes) ** row.k) / row.k  # nodes that k random experts are on
        return cluster.all_to_all(row.amount, m.ep, m.etp, once if m.stack.once_per_node else 1.0)
    if row.group == "etp":
        return cluster.ring(row.amount, m.etp, 1)
    return cluster.ring(row.amount, m.replicas, m.tp, row.rounds)


_TIME = {
    Work.PRODUCT: _product,
    Work.EXPERTS: _product,
    Work.HEAD: _product,
    Work.ATTENTION: _attention,
    Work.TRAFFIC: _traffic,
    Work.COLLECTIVE: _collective,
}


def _phase(machine: Machine, rows: list[Row], products: dict[tuple[str, str], float]) -> Seconds:
    """The time of the rows of one phase: work one after the other, and exposed messages."""
    compute = core = 0.0
    exposed = dict.fromkeys(("tp", "cp", "ep", "dp"), 0.0)
    late = []
    for row in rows:
        time = machine.seconds(row)
        if row.work is not Work.COLLECTIVE:
            compute += time
            core += time if "core" in row.parts else 0.0
        else:
            late.append((row, time))
    stack = machine.stack
    shares = {"tp": 1 - stack.tp_hidden, "ep": 1 - stack.ep_hidden, "etp": 1 - stack.ep_hidden}
    for row, time in late:
        under = {
            Hides.NOTHING: 0.0,
            Hides.WEIGHTS: stack.tp_back_hidden * products.get((row.op, "W"), 0.0),
            Hides.INPUTS: products.get((row.op, "I"), 0.0),
            Hides.ATTENTION: core,
            Hides.LAYER: compute,
        }[row.hides]
        group = "ep" if row.group == "etp" else row.group
        exposed[group] += max(0.0, shares.get(row.group, 1.0) * time - under)
    return Seconds(compute, **exposed)


def _again(recompute: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    return "full" in recompute or any(x in recompute for x in parts)


@lru_cache(maxsize=65536)
def layer_cost(
    kind: str, shape: Shape, model: Model, machine: Machine, recompute: tuple[str, ...] = ()
) -> LayerCost:
    """What a layer of a kind costs in a shape on a machine, with parts of it recomputed."""
    it = layer(kind, shape, model)
    body = kind in ("dense", "experts", "further token")
    recompute = recompute if body else ()
    phases = {phase: [r for r in it.rows if r.phase is phase] for phase in (F, I, W)}
    products = {
        (row.op, phase.name): machine.seconds(row)
        for phase in (I, W)
        for row in phases[phase]
        if row.work is Work.PRODUCT
    }
    repeated = [r for r in phases[F] if _again(recompute, r.parts)]
    times = [_phase(machine, phases[phase], products) for phase in (F, I, W)]
    if repeated:
        times[1] = times[1].plus(_phase(machine, repeated, products))
    if body:
        times = _launched(machine.stack, times, again="full" in recompute)
    return LayerCost(
        *times,
        *_bytes(it.tensors, shape, model, recompute),
        it.parameters,
        tuple((w.rows, w.columns) for w in it.weights if w.product),
    )


def _launched(stack: Stack, times: list[Seconds], *, again: bool) -> list[Seconds]:
    """The times where the CPU may need longer to launch a layer's kernels than they run."""
    forward, back = times[0], times[1].total + times[2].total
    cpu = stack.layer_ms * 1e-3
    slow_forward = max(1.0, cpu / forward.total)
    slow_back = max(1.0, cpu * (_BACKWARD_LAUNCHES + again) / back)
    return [times[0].times(slow_forward), times[1].times(slow_back), times[2].times(slow_back)]


def _bytes(
    tensors: tuple[Tensor, ...], shape: Shape, model: Model, recompute: tuple[str, ...]
) -> tuple[float, float, float]:
    """Bytes held from F to I, from I to W, and only during I."""
    forward = [t for t in tensors if t.made is F]
    again = [t for t in forward if _again(recompute, t.parts)]
    kept = sum(t.amount for t in forward) - sum(t.amount for t in again)
    if "full" in recompute:
        kept += 2 * model.hidden * shape.own
    held = sum(t.amount for t in tensors if t.until is W)
    return kept, held, sum(t.amount for t in again)
