"""The search over TP, CP, EP, PP, v, microbatch, recomputation and schedule for a model.

Every configuration is tested by the rules, then by the memory of its weights and states, then
ranked by a time that no order can beat; those that could still win are simulated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from hocket.cluster.estimate import Estimate, estimate
from hocket.cluster.hardware import Cluster
from hocket.cluster.model import Model
from hocket.cluster.run import Run, faults
from hocket.cluster.stack import Stack
from hocket.cluster.stages import Stage, stages, state_bytes
from hocket.errors import HocketError, UsageError
from hocket.limits import at_most
from hocket.words import hint


class Way(NamedTuple):
    """A schedule that may be chosen: its stages per rank, whether I and W are one action."""

    v: tuple[int, ...]
    full_backward: bool

    def choices(self, asked: tuple[int, ...]) -> tuple[int, ...]:
        """Its stages per rank, of those that are asked for where any are."""
        if not asked:
            return self.v
        return tuple(v for v in asked if v in self.v or (len(self.v) > 1 and v > 1))


WAYS: Mapping[str, Way] = {
    "1f1b": Way((1,), True), "interleaved": Way((2, 3, 4, 5, 6, 7, 8), True),
    "zb-h1": Way((1,), False), "zb-v": Way((2,), False),
}  # fmt: skip
RECOMPUTE = ((), ("norm", "activation"), ("full",))  # the simplest first
_MOST = 20_000  # of what a request names


@dataclass(frozen=True)
class Space:
    """What a search may choose from; an empty field: whatever suits the model and the cluster.

    Tensor parallelism stays within a node unless it is named. even: only stages with equally many
    layers, embedding and head counted as one each where that makes them even.
    """

    seq: int
    global_batch: int
    tp: tuple[int, ...] = ()
    cp: tuple[int, ...] = ()
    ep: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    v: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = (1, 2, 4)
    schedule: tuple[str, ...] = tuple(WAYS)
    recompute: tuple[tuple[str, ...], ...] = RECOMPUTE
    even: bool = False


@dataclass(frozen=True)
class Found:
    """The answer: those within the margin of the fastest, simplest first, and what became of all.

    counts: configurations by their fate. fastest: of all that fit.
    """

    best: tuple[Estimate, ...]
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def fastest(self) -> Estimate | None:
        """The one with the shortest step; None where nothing fits."""
        return min(self.best, key=lambda e: e.step, default=None)


FATES = ("break a rule", "need more memory for weights and states alone", "are slower by a bound",
         "do not fit when simulated", "are slower when simulated",
         "are within the margin")  # fmt: skip


def search(
    model: Model, cluster: Cluster, stack: Stack, space: Space, *, margin: float = 0.03
) -> Found:
    """The fastest configurations of a model on a cluster that fit in its memory.

    margin: those that take at most this share longer than the fastest are kept. The bound never
    exceeds the time of a simulation, so no configuration is lost to it.
    """
    _check(space)
    fates: Counter[str] = Counter({fate: 0 for fate in FATES})
    ranked: list[tuple[float, int, Run]] = []
    for number, run in enumerate(runs_of(model, cluster, space)):
        if faults(model, cluster, run):
            fates[FATES[0]] += 1
            continue
        found = stages(model, cluster, stack, run)
        if _least_bytes(found, cluster, stack, run) > cluster.memory:
            fates[FATES[1]] += 1
        else:
            ranked.append((bound(found, cluster, stack, run), number, run))
    best: list[tuple[float, int, Estimate]] = []
    limit = float("inf")
    for least, number, run in sorted(ranked, key=lambda x: x[:2]):
        if least > limit:
            fates[FATES[2]] += 1
            continue
        try:
            one = estimate(model, cluster, stack, run)
        except HocketError:  # the schedule has rules of its own
            fates[FATES[0]] += 1
            continue
        if not one.fits:
            fates[FATES[3]] += 1
            continue
        best.append((one.step, number, one))
        limit = min(limit, one.step * (1 + margin))
    kept = [x for x in best if x[0] <= limit]
    fates[FATES[4]], fates[FATES[5]] = len(best) - len(kept), len(kept)
    return Found(tuple(e for _, _, e in sorted(kept, key=lambda x: _effort(x[2]))), dict(fates))


def _check(space: Space) -> None:
    """Raises: UsageError for a schedule that a search does not try, or lists without end."""
    for name in space.schedule:
        if name not in WAYS:
            raise UsageError(f"a search does not try {name!r}; {hint(name, WAYS)}")
    lists = (space.tp, space.cp, space.ep, space.pp, space.v, space.micro_batch)
    count = math.prod(max(1, len(x)) for x in lists)
    at_most("configurations to search", count, _MOST, "name fewer of --tp, --cp, --ep, --pp")


def _effort(found: Estimate) -> tuple[int, int, int, int, float]:
    """How far a configuration is from a plain one, then its time: the simplest first."""
    run = found.run
    kinds = sum(n > 1 for n in (run.tp, run.cp, run.ep, run.pp))
    return kinds, list(WAYS).index(run.schedule), len(run.recompute), run.v, found.step


def bound(found: list[Stage], cluster: Cluster, stack: Stack, run: Run) -> float:
    """Seconds that no order of the run's stages can beat, in loops or in a V.

    The rank of a pipeline's middle stages cannot start before a forward has come through all
    stages before it; where I and W are one action, a backward must go back after its last one.
    """
    m, pp = run.microbatches(cluster), run.pp
    forward = [s.F.total for s in found]
    backward = [s.I.total + s.W.total for s in found]
    total = m * (sum(forward) + sum(backward)) / pp  # on the average rank
    least = total
    for rank in range(pp if WAYS[run.schedule].full_backward else 0):  # in loops
        work = sum(forward[rank::pp]) + sum(backward[rank::pp])
        least = max(least, sum(forward[:rank]) + m * work + sum(backward[:rank]))
    return least * (1 + stack.step)


def _least_bytes(found: list[Stage], cluster: Cluster, stack: Stack, run: Run) -> float:
    """Bytes of the rank whose states need most, with one microbatch in flight."""
    sizes = [sum(state_bytes(s, stack, run, cluster)) + s.activation for s in found]
    return max(sum(sizes) / run.pp, *sizes) + stack.reserved_gb * 1e9


def runs_of(model: Model, cluster: Cluster, space: Space) -> Iterator[Run]:
    """Every configuration of a space."""
    node, gpus = cluster.node, cluster.gpus
    tps = space.tp or _powers(min(node, gpus))
    cps = space.cp or _powers(min(16, gpus))
    experts = model.moe.experts if model.moe else 1
    eps = space.ep or tuple(n for n in _powers(min(experts, gpus)) if experts % n == 0)
    pps = space.pp or _powers(min(model.layers + 2, gpus))
    for pp, tp, cp, ep in product(pps, tps, cps, eps):
        for name in space.schedule if pp > 1 else ("1f1b",):
            for v, micro, recompute in product(
                WAYS[name].choices(space.v), space.micro_batch, space.recompute
            ):
                lighter = _lighter(model.layers, pp * v)
                if space.even and pp * v > 0 and (model.layers + sum(lighter)) % (pp * v):
                    continue
                yield Run(
                    space.seq, micro, space.global_batch, tp=tp, cp=cp, ep=ep, pp=pp, v=v,
                    schedule=name, recompute=recompute, sp=tp > 1,
                    lighter=lighter,
                )  # fmt: skip


def _lighter(layers: int, n: int) -> tuple[int, int]:
    """One layer fewer at both ends where all stages are then even, else none."""
    return (1, 1) if n > 0 and layers % n and (layers + 2) % n == 0 else (0, 0)


def _powers(most: int) -> tuple[int, ...]:
    """1, 2, 4 and so on up to a number."""
    return tuple(1 << i for i in range(most.bit_length()))
