"""From layers to the stages of a pipeline: hocket's Costs, and the bytes that every rank keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from hocket import Bytes, Costs
from hocket.cluster.hardware import Cluster, slowed
from hocket.cluster.model import Model
from hocket.cluster.operations import Shape, kinds_of
from hocket.cluster.run import Run
from hocket.cluster.stack import Stack
from hocket.cluster.timing import LayerCost, Machine, Seconds, layer_cost


@dataclass(frozen=True)
class Stage:
    """What one stage costs: seconds per microbatch, bytes, parameters on one rank.

    activation is held from F to I, held from I to W, transient only during I.
    """

    F: Seconds
    I: Seconds  # noqa: E741 (the field's letter)
    W: Seconds
    activation: float
    held: float
    transient: float
    parameters: float
    expert_parameters: float
    unused_gradients: float


def shape_of(run: Run, stack: Stack, cluster: Cluster) -> Shape:
    """The part of a run that decides the rows of its layers."""
    return Shape(
        run.seq, run.micro_batch, run.tp, run.cp, run.ep, run.etp, run.sp and run.tp > 1, run.flash,
        saved=stack.saved, logits=stack.logits, expert_outputs=stack.expert_outputs,
        gathered=run.dp(cluster) * run.cp if run.kept_sharding == 3 else 1,
    )  # fmt: skip


def machine_of(run: Run, stack: Stack, cluster: Cluster) -> Machine:
    """The part of a run that decides how fast its rows are."""
    replicas = run.dp(cluster) * run.cp if run.kept_sharding == 3 else 1
    slow = slowed(cluster, stack.network, stack.latency)
    return Machine(slow, stack, run.tp, run.cp, run.ep, run.etp, replicas)


@lru_cache(maxsize=4096)
def layers_by_stage(
    model: Model, sizes: tuple[int, ...]
) -> tuple[tuple[tuple[str, int], ...], ...]:
    """How many layers of each kind every stage has; embedding first, head and MTP last."""
    kinds = kinds_of(model)
    body, tail, at = kinds[1 : model.layers + 1], kinds[model.layers + 1 :], 0
    stages = []
    for i, size in enumerate(sizes):
        names = [*(kinds[:1] if i == 0 else ()), *body[at : at + size]]
        names += tail if i == len(sizes) - 1 else []
        stages.append(tuple(Counter(names).items()))
        at += size
    return tuple(stages)


def stages(model: Model, cluster: Cluster, stack: Stack, run: Run) -> list[Stage]:
    """What each stage of a run costs, in the order of the model."""
    shape, machine = shape_of(run, stack, cluster), machine_of(run, stack, cluster)
    found: dict[object, Stage] = {}
    costs: dict[tuple[str, tuple[str, ...]], LayerCost] = {}
    result = []
    for i, counts in enumerate(layers_by_stage(model, run.layers_of(model.layers))):
        key = (counts, run.recomputed_in(i))
        if key not in found:
            found[key] = _stage(*key, model, shape, machine, run.recompute, costs)
        result.append(found[key])
    return result


def _stage(
    counts: Iterable[tuple[str, int]],
    left: int | None,
    model: Model,
    shape: Shape,
    machine: Machine,
    recompute: tuple[str, ...],
    known: dict[tuple[str, tuple[str, ...]], LayerCost],
) -> Stage:
    costs: list[tuple[int, LayerCost]] = []
    for kind, n in counts:
        again = n if left is None else min(n, left)
        if left is not None and kind in ("dense", "experts"):
            left -= again
        for number, parts in ((again, recompute), (n - again, ())):
            if number:
                if (kind, parts) not in known:
                    known[kind, parts] = layer_cost(kind, shape, model, machine, parts)
                costs.append((number, known[kind, parts]))
    times = []
    for phase in ("F", "I", "W"):
        parts = zip(*(getattr(c, phase).times(n) for n, c in costs), strict=True)
        times.append(Seconds(*map(sum, parts)))
    shapes = {s for _, cost in costs for s in cost.shapes}
    return Stage(
        *times,
        activation=sum(n * c.activation for n, c in costs),
        held=sum(n * c.held for n, c in costs),
        transient=max((c.transient for _, c in costs), default=0.0),
        parameters=sum(n * c.parameters[0] for n, c in costs),
        expert_parameters=sum(n * c.parameters[1] for n, c in costs),
        unused_gradients=sum(2 * a * b for a, b in shapes)
        if machine.stack.unused_gradients
        else 0.0,
    )


def message_bytes(model: Model, run: Run) -> float:
    """Bytes that a stage sends to the next for one microbatch, per rank."""
    size = 2.0 * model.hidden * run.seq * run.micro_batch / run.cp
    return size / run.tp if run.sp else size


def state_bytes(
    stage: Stage, stack: Stack, run: Run, cluster: Cluster
) -> tuple[float, float, float]:
    """Bytes of a stage's weights, gradients and optimizer states on one rank."""
    total = [0.0, 0.0, 0.0]
    groups = (
        (stage.parameters, run.dp(cluster) * run.cp),
        (stage.expert_parameters, run.expert_dp(cluster)),
    )
    for parameters, ranks in groups:
        shares = [ranks if run.kept_sharding >= level else 1 for level in (3, 2, 1)]
        sizes = (stack.weights, stack.gradient, stack.master)
        for i, (size, share) in enumerate(zip(sizes, shares, strict=True)):
            total[i] += parameters * size / share
    return total[0], total[1], total[2]


def costs_of(model: Model, cluster: Cluster, stack: Stack, run: Run) -> Costs:
    """The run's costs per stage, in seconds and bytes, for `hocket.simulate` and the planner.

    static holds weights, gradients and optimizer states. Raises: UsageError by way of `Costs`.
    """
    return costs_of_stages(stages(model, cluster, stack, run), model, cluster, stack, run)


def costs_of_stages(
    found: list[Stage], model: Model, cluster: Cluster, stack: Stack, run: Run
) -> Costs:
    """The costs of stages that are known already: see `costs_of`."""
    slower = 1 + stack.step
    static = [sum(state_bytes(s, stack, run, cluster)) for s in found]
    message = (
        slowed(cluster, stack.network, stack.latency).point_to_point(
            message_bytes(model, run) / (1 if run.sp else run.tp), max(1, cluster.gpus // run.pp)
        )
        if run.pp > 1
        else 0.0
    )
    return Costs(
        F=tuple(slower * s.F.total for s in found),
        I=tuple(slower * s.I.total for s in found),
        W=tuple(slower * s.W.total for s in found),
        FB=_fused(found),
        p2p_overhead=(0.0, message + stack.message_ms * 1e-3) if run.pp > 1 else None,
        unit="s",
        bytes=Bytes(
            static=tuple(static),
            activation=tuple(s.activation for s in found),
            held=tuple(s.held for s in found),
            gradient=tuple(s.transient for s in found),
            message=message_bytes(model, run),
        ),
    )


def _fused(found: list[Stage]) -> str | dict[str, float]:
    """A slot of a forward and a backward: each runs under the experts' messages of the other.

    Source: DeepSeek-V3, arXiv 2412.19437, section 3.2.1.
    """
    parts = [getattr(s, phase) for s in found for phase in ("F", "I", "W")]
    exposed, compute = sum(x.ep for x in parts), sum(x.compute for x in parts)
    total = sum(x.total for x in parts)
    return {"scale": 1 - min(exposed, compute) / total} if exposed else "sum"


def quantities_of_stage(model: Model, cluster: Cluster, stack: Stack, run: Run) -> dict[str, float]:
    """Seconds of an inner stage's kernels for a microbatch: F, I, W, and B, the sum of I and W."""
    found = stages(model, cluster, stack, run)
    stage = found[len(found) // 2]
    times = {phase: getattr(stage, phase).total for phase in ("F", "I", "W")}
    return times | {"B": times["I"] + times["W"]}
