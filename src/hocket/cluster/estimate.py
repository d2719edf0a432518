"""One configuration in numbers: step time, memory per rank, MFU, and what limits it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from hocket import Costs, Schedule, Timeline, build, simulate
from hocket.cluster.hardware import Cluster, load_gpu, slowed
from hocket.cluster.model import Model, padded_vocab
from hocket.cluster.operations import flops_per_token
from hocket.cluster.run import Run, raise_faults
from hocket.cluster.stack import Stack
from hocket.cluster.stages import Stage, costs_of_stages, stages, state_bytes
from hocket.cluster.timing import Seconds
from hocket.errors import UsageError
from hocket.schedules import entry

_ROUNDING = 1e-9  # sums of floats in another order differ by less
_OPTIMIZER_TRAFFIC = 40  # bytes over the GPU's memory per parameter: gradient, states, weight


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at its fullest.

    buffers: gradients that the library keeps unused, context, communication libraries, and what
    the allocator cannot use.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


@dataclass(frozen=True)
class Breakdown:
    """Where a step's seconds go, on the average rank; the parts add up to the step.

    messages: exposed tp, cp and ep collectives. gradients: exposed reduction and gathering of data
    parallel ranks. update: optimizer and what a step costs once. imbalance: waiting because other
    ranks have more work. bubble: all other waiting, and the messages between stages.
    """

    compute: float
    messages: float
    gradients: float
    update: float
    imbalance: float
    bubble: float


class Error(NamedTuple):
    """Relative errors of the step time on measured runs, each left out of its own fit."""

    rows: int
    median: float
    worst: float


@dataclass(frozen=True)
class Estimate:
    """What a configuration is predicted to do. Seconds, bytes, shares from 0 to 1.

    tokens_per_second: per GPU. mfu: model FLOPs under `convention`, relative to the peak of the
    stack's precision. memory: per pipeline rank. costs: for `hocket.simulate` and the planner.
    planned: the name of an order that replaces the one of the run's schedule.
    """

    model: Model
    cluster: Cluster
    stack: Stack
    run: Run
    dp: int
    microbatches: int
    step: float
    tokens_per_second: float
    flops_per_token: float
    mfu: float
    convention: str
    breakdown: Breakdown
    memory: tuple[Memory, ...]
    costs: Costs = field(repr=False, compare=False)
    timeline: Timeline = field(repr=False, compare=False)
    planned: str | None = None

    @property
    def fullest(self) -> int:
        """The pipeline rank that needs most memory."""
        return max(range(len(self.memory)), key=lambda r: self.memory[r].total)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank stays within the cluster's usable memory."""
        return self.memory[self.fullest].total <= self.cluster.memory

    @property
    def error(self) -> Error:
        """How far off the stack is on measured runs of such models."""
        fit = self.stack.fit
        if self.model.moe is None:
            return Error(fit.rows, fit.median, fit.worst)
        return Error(fit.rows_experts, fit.median_experts, fit.worst_experts)

    @property
    def calibrate_first(self) -> bool:
        """Whether the stack's numbers are too uncertain for this model to be trusted unseen."""
        return needs_calibration(self.model, self.stack)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is known to be less certain about this configuration, one sentence each."""
        found = []
        if self.run.tp > self.cluster.node:
            found.append(
                f"tp is {self.run.tp} and a node has {self.cluster.node} GPUs: steps with tensor "
                "parallelism over nodes were measured 20 to 25 % longer than predicted"
            )
        if self.calibrate_first:
            found.append("calibrate first: this stack is not measured well enough for this model")
        if self.cluster.gpu.name.lower() != load_gpu(self.stack.gpu).name.lower():
            found.append(
                f"the stack was fitted on {self.stack.gpu}, not on {self.cluster.gpu.name}"
            )
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """The estimate as plain data for JSON; without costs and timeline."""
        fullest = self.memory[self.fullest]
        return {
            "model": self.model.name,
            "gpu": self.cluster.gpu.name,
            "gpus": self.cluster.gpus,
            "stack": self.stack.name,
            "stack_error": self.error._asdict(),
            "calibrate_first": self.calibrate_first,
            "notes": list(self.notes),
            "run": {k: v for k, v in asdict(self.run).items() if v is not None},
            "planned": self.planned,
            "dp": self.dp,
            "microbatches": self.microbatches,
            "step_s": self.step,
            "tokens_per_s_per_gpu": self.tokens_per_second,
            "mfu": self.mfu,
            "flops_per_token": self.flops_per_token,
            "flops_convention": self.convention,
            "breakdown_s": asdict(self.breakdown),
            "fullest_rank": self.fullest,
            "memory_bytes": {
                **asdict(fullest),
                "total": fullest.total,
                "limit": self.cluster.memory,
            },
            "fits": self.fits,
            "ranks_bytes": [m.total for m in self.memory],
        }


def needs_calibration(model: Model, stack: Stack) -> bool:
    """Whether a stack's numbers are too uncertain for a model to be trusted unseen."""
    experts, fit = model.moe is not None, stack.fit
    rows = fit.rows_experts if experts else fit.rows
    return stack.calibrate_first or rows < 2 or (experts and stack.narrow and not fit.own)


@lru_cache(maxsize=256)
def schedule_of(name: str, pp: int, microbatches: int, v: int, options: tuple) -> Schedule:
    """The schedule of a run; the one stage of an unsplit model has no name. Raises: UsageError."""
    if pp == 1 and name != "1f1b":
        name, options = "1f1b", ()
    settings: dict[str, Any] = dict(options)
    return build(name, p=pp, m=microbatches, v=v if v > 1 else None, **settings)


def usual_stages(name: str, pp: int, options: tuple[tuple[str, object], ...] = ()) -> int:
    """How many stages per rank a schedule has where nothing else is said, those of one path.

    Raises: UsageError.
    """
    known = entry(name)
    if pp < 2:
        return 1
    if known.takes_v:
        return known.parameters.get("v", 1)
    if known.stages_per_rank == 1:
        return 1
    settings: dict[str, Any] = dict(options)
    return build(name, p=pp, m=4 * pp, **settings).placement.n_stages // pp


def schedule_for(run: Run, cluster: Cluster) -> Schedule:
    """The schedule of a run. Raises: UsageError for one whose time would be wrong."""
    schedule = schedule_of(run.schedule, run.pp, run.microbatches(cluster), run.v, run.options)
    placement = schedule.placement
    what = {
        "divides sequences into slices": placement.slices > 1,
        "has several queues per rank": len(placement.queues) > placement.p,
    }
    for text, is_so in what.items():
        if is_so:
            raise UsageError(f"{run.schedule} {text}; an estimate knows no costs for that")
    if placement.n_stages != run.pp * run.v:
        raise UsageError(
            f"{run.schedule} has {placement.n_stages} stages on {run.pp} ranks and the run has "
            f"{run.pp * run.v}; set v to {placement.n_stages // run.pp}"
        )
    return schedule


@dataclass(frozen=True)
class _Simulated:
    """A run after its simulation: stages, those of each rank with the microbatches that it runs
    of each, and the seconds after its last W."""

    stages: list[Stage]
    owned: list[dict[int, int]]
    costs: Costs
    timeline: Timeline
    after: list[tuple[float, float]]
    step: float


def step_seconds(model: Model, cluster: Cluster, stack: Stack, run: Run) -> float:
    """Seconds of one step of a run; what `estimate` says, without the rest."""
    return _simulated(model, cluster, stack, run).step


def _simulated(
    model: Model, cluster: Cluster, stack: Stack, run: Run, order: Schedule | None = None
) -> _Simulated:
    schedule = order or schedule_for(run, cluster)
    found = stages(model, cluster, stack, run)
    placement = schedule.placement
    costs = costs_of_stages(found, model, cluster, stack, run)
    timeline = simulate(schedule, costs)
    owned: list[dict[int, int]] = [{} for _ in range(run.pp)]
    counts = np.bincount(placement.path_by_mb, minlength=len(placement.paths)).tolist()
    for path, count in zip(placement.paths, counts, strict=True):
        for stage, queue in enumerate(path):
            owned[queue.rank][stage] = owned[queue.rank].get(stage, 0) + count
    copies = len(placement.paths)
    seen: dict[tuple[int, ...], tuple[float, float]] = {}
    after = []
    for own in owned:
        key = tuple(id(found[s]) for s in own)
        if key not in seen:
            seen[key] = _after(model, cluster, stack, run, [found[s] for s in own], copies)
        after.append(seen[key])
    begins = [float(t.start) if run.validated_later else 0.0 for t in timeline.ranks]
    ends = [float(t.end) - begin for t, begin in zip(timeline.ranks, begins, strict=True)]
    step = max(end + sum(late) for end, late in zip(ends, after, strict=True))
    return _Simulated(found, owned, costs, timeline, after, step)


def estimate(
    model: Model, cluster: Cluster, stack: Stack, run: Run, *, convention: str = "causal",
    order: Schedule | None = None,
) -> Estimate:  # fmt: skip
    """What a run of a model on a cluster is predicted to take, by a stack's numbers.

    convention: which FLOPs the MFU counts, a key of operations.CONVENTIONS. order: instead of that
    of the run's schedule, on the same placement.

    Raises: UsageError with a sentence for each rule that the run breaks, ScheduleError where the
    schedule does not suit it.
    """
    raise_faults(model, cluster, run)
    sim = _simulated(model, cluster, stack, run, order)
    tokens = run.global_batch * run.seq
    flops = flops_per_token(model, run.seq, convention)
    rate = tokens / sim.step / cluster.gpus
    return Estimate(
        model, cluster, stack, run, run.dp(cluster), run.microbatches(cluster), sim.step, rate,
        flops, rate * flops / cluster.gpu.peak(stack.precision), convention,
        _breakdown(sim, stack, run, cluster), _memory(sim, stack, run, cluster), sim.costs,
        sim.timeline, order.name if order else None,
    )  # fmt: skip


def _reduction(
    parameters: float, size: int, stride: int, stack: Stack, run: Run, cluster: Cluster
) -> tuple[float, float]:
    """Seconds to reduce gradients over the ranks that share weights, and to gather the weights."""
    if run.kept_sharding == 3 or size == 1:
        return 0.0, 0.0
    rounds = 2 if run.sharding == 0 else 1
    reduce = cluster.ring(parameters * stack.gradient, size, stride, rounds)
    gather = cluster.ring(parameters * 2, size, stride) if run.sharding else 0.0
    return reduce, gather


def _after(
    model: Model, cluster: Cluster, stack: Stack, run: Run, own: list[Stage], mirrored: int
) -> tuple[float, float]:
    """Seconds after a rank's last W: what is exposed of the gradients' reduction, and the update.

    Overlapped, the reduction runs under the last microbatch's backward and the gathering under the
    first one's forward; the last bucket always shows. mirrored: pipeline ranks that hold the same
    stages; they sum their gradients too.
    """
    dp, cp, cluster = run.dp(cluster), run.cp, slowed(cluster, stack.network, stack.latency)
    shared = sum(s.parameters for s in own)
    expert = sum(s.expert_parameters for s in own)
    copies = run.expert_dp(cluster)
    pairs = [
        _reduction(shared, dp * cp, run.tp, stack, run, cluster),
        _reduction(expert, copies, run.etp * run.ep, stack, run, cluster),
    ]
    if mirrored > 1:
        both = (shared + expert) * stack.gradient
        pairs.append((cluster.ring(both, mirrored, cluster.gpus // run.pp, 2), 0.0))
    windows = (sum(s.I.total + s.W.total for s in own), sum(s.F.total for s in own))
    exposed = 0.0
    for times, window in zip(zip(*pairs, strict=True), windows, strict=True):
        total = sum(times)
        hidden = min(stack.gradient_hidden * total, window) if run.grad_overlap else 0.0
        exposed += total - hidden
    if model.tied and run.pp > 1:
        exposed += cluster.point_to_point(
            2 * 4 * padded_vocab(model, run.tp) / run.tp * model.hidden, cluster.gpus // run.pp
        )
    shares = (dp * cp, copies) if run.sharding else (1, 1)
    states = shared / shares[0] + expert / shares[1]
    update = states * _OPTIMIZER_TRAFFIC / (0.85 * cluster.gpu.hbm * 1e12) + stack.fixed_ms * 1e-3
    return exposed, update


def _hidden_in_slots(sim: _Simulated) -> float:
    """Seconds of messages that slots of a forward and a backward hide, on the average rank."""
    if not isinstance(sim.costs.FB, Mapping):
        return 0.0
    share, ranks = 1 - float(sim.costs.FB["scale"]), len(sim.owned)
    schedule = sim.timeline.schedule
    pairs = len(schedule.codes) - schedule.n_slots
    both = sum(s.F.total + s.I.total + s.W.total for s in sim.stages) / len(sim.stages)
    return share * both * pairs / ranks


def _breakdown(sim: _Simulated, stack: Stack, run: Run, cluster: Cluster) -> Breakdown:
    works = []
    for own in sim.owned:
        total = Seconds()
        for number, m in own.items():
            stage = sim.stages[number]
            total = total.plus(stage.F.plus(stage.I).plus(stage.W).times(m * (1 + stack.step)))
        works.append(total)
    n = len(works)
    totals = [w.total for w in works]
    compute = sum(w.compute for w in works) / n
    messages = sum(w.tp + w.cp + w.ep for w in works) / n - _hidden_in_slots(sim)
    gradients = sum(w.dp for w in works) / n + sum(a[0] for a in sim.after) / n
    update = sum(a[1] for a in sim.after) / n
    imbalance = max(totals) - sum(totals) / n
    bubble = sim.step - compute - messages - gradients - update - imbalance
    bubble = 0.0 if bubble < _ROUNDING * sim.step else bubble
    return Breakdown(compute, messages, gradients, update, imbalance, bubble)


def _memory(sim: _Simulated, stack: Stack, run: Run, cluster: Cluster) -> tuple[Memory, ...]:
    result = []
    for own, rank in zip(sim.owned, sim.timeline.ranks, strict=True):
        states = [state_bytes(sim.stages[s], stack, run, cluster) for s in own]
        weights, gradients, optimizer = (sum(x[i] for x in states) for i in range(3))
        activations = float(rank.peak_bytes) - weights - gradients - optimizer
        buffers = stack.reserved_gb * 1e9 + stack.slack * activations
        buffers += max(sim.stages[s].unused_gradients for s in own)
        result.append(Memory(weights, gradients, optimizer, activations, buffers))
    return tuple(result)
