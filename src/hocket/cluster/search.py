"""The search over TP, CP, EP, PP, v, microbatch, recomputation, layers and schedule for a model.

Every configuration is tested by the rules, then by the memory of its weights and states, then
ranked by a time that no order can beat; those that could still win are simulated. The most
promising are refined: fewer layers recompute, the first and last stages are lighter. What became
of each is kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import product
from typing import NamedTuple

from hocket.cluster.estimate import Breakdown, Estimate, estimate
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
_SIMULATED = 300  # of those that a question is about


def anything(run: Run) -> bool:
    """True of every run."""
    return True


@dataclass(frozen=True)
class Space:
    """What a search may choose from; an empty field: whatever suits the model and the cluster.

    Tensor parallelism stays within a node unless it is named. partly: fewer layers than all may
    recompute; by_stage: differently many in each stage. uneven: first and last stages may be
    lighter. sharding: see Run. allows: false for what cannot be chosen beyond that.
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
    partly: bool = True
    by_stage: bool = True
    uneven: bool = True
    sharding: int = 1
    allows: Callable[[Run], bool] = anything


class Fate(Enum):
    """What became of a configuration, in the order in which it is found out."""

    RULE = "break a rule"
    STATES = "need more memory for weights and states alone"
    BOUND = "are slower by a bound"
    MEMORY = "do not fit when simulated"
    SLOWER = "are slower when simulated"
    KEPT = "are within the margin"


class Outcome(NamedTuple):
    """What became of one configuration, and the figures that decided it.

    seconds: of its step, or that no order can beat (BOUND). n_bytes: of its fullest rank, or that
    it needs at least (STATES). parts: of the step, where it was simulated.
    """

    run: Run
    fate: Fate
    seconds: float | None = None
    n_bytes: float | None = None
    parts: Breakdown | None = None


@dataclass(frozen=True)
class Found:
    """The answer: those within the margin of the fastest, simplest first; what became of all."""

    model: Model
    cluster: Cluster
    best: tuple[Estimate, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def counts(self) -> Mapping[str, int]:
        """Configurations by their fate."""
        counts = Counter(x.fate for x in self.outcomes)
        return {fate.value: counts[fate] for fate in Fate}

    @property
    def fastest(self) -> Estimate | None:
        """The one with the shortest step; None where nothing fits."""
        return min(self.best, key=lambda e: e.step, default=None)


def search(
    model: Model, cluster: Cluster, stack: Stack, space: Space, *, margin: float = 0.03
) -> Found:
    """The fastest configurations of a model on a cluster that fit in its memory.

    margin: those that take at most this share longer than the fastest are kept. The bound never
    exceeds the time of a simulation, so no configuration is lost to it.
    """
    _check(space)
    race = _Race(model, cluster, stack, margin)
    race.enter(runs_of(model, cluster, space))
    race.enter(tuple(_lighter_ends(race, space)))
    race.enter(tuple(_partly_recomputed(race, space)))
    return race.result()


def outcomes_of(model: Model, cluster: Cluster, stack: Stack, space: Space) -> tuple[Outcome, ...]:
    """What becomes of every configuration of a space, all that fit simulated, the fastest first.

    Of a large space, only the most promising are simulated.
    """
    _check(space)
    race = _Race(model, cluster, stack, math.inf, most=_SIMULATED)
    race.enter(runs_of(model, cluster, space))
    order = {fate: i for i, fate in enumerate(reversed(Fate))}
    return tuple(sorted(race.result().outcomes, key=lambda x: (
        order[x.fate], x.seconds or 0.0, x.n_bytes or 0.0
    )))  # fmt: skip


@dataclass(eq=False)
class _Race:
    """The state of a search: what is known of each configuration, and the time to beat."""

    model: Model
    cluster: Cluster
    stack: Stack
    margin: float
    most: float = math.inf  # simulations
    fits: list[tuple[int, Estimate]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    limit: float = math.inf

    def enter(self, runs: Iterable[Run]) -> None:
        """Judges some more configurations."""
        ranked: list[tuple[float, int, Run]] = []
        for number, run in enumerate(runs, len(self.outcomes)):
            if faults(self.model, self.cluster, run):
                self.outcomes.append(Outcome(run, Fate.RULE))
                continue
            found = stages(self.model, self.cluster, self.stack, run)
            least = _least_bytes(found, self.cluster, self.stack, run)
            if least > self.cluster.memory:
                self.outcomes.append(Outcome(run, Fate.STATES, n_bytes=least))
            else:
                ranked.append((bound(found, self.cluster, self.stack, run), number, run))
        for least, number, run in sorted(ranked, key=lambda x: x[:2]):
            self._simulate(least, number, run)

    def _simulate(self, least: float, number: int, run: Run) -> None:
        if least > self.limit or len(self.fits) >= self.most:
            self.outcomes.append(Outcome(run, Fate.BOUND, least))
            return
        try:
            one = estimate(self.model, self.cluster, self.stack, run)
        except HocketError:  # the schedule has rules of its own
            self.outcomes.append(Outcome(run, Fate.RULE))
            return
        if not one.fits:
            self.outcomes.append(_outcome(one, Fate.MEMORY))
            return
        self.fits.append((number, one))
        self.limit = min(self.limit, one.step * (1 + self.margin))

    def result(self) -> Found:
        """All that were judged, those within the margin apart."""
        kept = [(n, e) for n, e in self.fits if e.step <= self.limit]
        fates = (Fate.KEPT if e.step <= self.limit else Fate.SLOWER for _, e in self.fits)
        last = [_outcome(e, fate) for (_, e), fate in zip(self.fits, fates, strict=True)]
        best = sorted(kept, key=lambda x: (*_effort(x[1]), x[0]))
        return Found(self.model, self.cluster, tuple(e for _, e in best), (*self.outcomes, *last))


def _outcome(one: Estimate, fate: Fate) -> Outcome:
    return Outcome(one.run, fate, one.step, one.memory[one.fullest].total, one.breakdown)


_REFINED = 6  # layouts whose ends are made lighter
_REPAIRED = 12  # layouts that do not fit and recompute a part of their layers
_ENDS = ((0, 1), (1, 1), (0, 2), (1, 2))  # layers that the first and the last stage have less


def _lighter_ends(race: _Race, space: Space) -> Iterator[Run]:
    """The fastest layouts with fewer layers in the first and the last stage."""
    fastest = sorted((e.step, n, e.run) for n, e in race.fits if e.run.pp > 1)
    for _, _, run in fastest[: _REFINED if space.uneven else 0]:
        for ends in _ENDS:
            if ends != run.lighter:
                yield replace(run, lighter=ends)


def _partly_recomputed(race: _Race, space: Space) -> Iterator[Run]:
    """The fastest layouts that do not fit, with so many recomputed layers that they should."""
    if not (space.partly and ("full",) in space.recompute):
        return
    short = [
        x for x in race.outcomes
        if x.fate is Fate.MEMORY and not x.run.recompute and (x.seconds or 0.0) < race.limit
    ]  # fmt: skip
    for outcome in sorted(short, key=lambda x: x.seconds or 0.0)[:_REPAIRED]:
        run = outcome.run
        needed = _layers_to_recompute(race, run)
        if needed is None:
            continue
        full = replace(run, recompute=("full",))
        yield replace(full, recompute_layers=max(needed))
        if space.by_stage and len(set(needed)) > 1:
            yield replace(full, recompute_layers=needed)


def _layers_to_recompute(race: _Race, run: Run) -> tuple[int, ...] | None:
    """For each stage the fewest layers that make its rank fit; None where all are not enough."""
    case = (race.model, race.cluster, race.stack)
    none, full = (estimate(*case, replace(run, recompute=x)) for x in ((), ("full",)))
    sizes = run.layers_of(race.model.layers)
    needed = [0] * len(sizes)
    for rank, (before, after) in enumerate(zip(none.memory, full.memory, strict=True)):
        over, gain = before.total - race.cluster.memory, before.total - after.total
        if over > gain:
            return None
        for stage in none.timeline.schedule.placement.stages_of_rank[rank]:
            needed[stage] = math.ceil(sizes[stage] * over / gain) if over > 0 else 0
    return tuple(needed)


def _check(space: Space) -> None:
    """Raises: UsageError for a schedule that a search does not try, or lists without end."""
    for name in space.schedule:
        if name not in WAYS:
            raise UsageError(f"a search does not try {name!r}; {hint(name, WAYS)}")
    lists = (space.tp, space.cp, space.ep, space.pp, space.v, space.micro_batch)
    count = math.prod(max(1, len(x)) for x in lists)
    at_most("configurations to search", count, _MOST, "name fewer of --tp, --cp, --ep, --pp")


def _effort(found: Estimate) -> tuple[float, ...]:
    """How far a configuration is from a plain one, then its time: the simplest first."""
    run = found.run
    kinds = sum(n > 1 for n in (run.tp, run.cp, run.ep, run.pp))
    parts = len(run.recompute) + (run.recompute_layers is not None)
    parts += isinstance(run.recompute_layers, tuple)
    uneven = len(set(run.layers_of(found.model.layers))) > 1
    return kinds, list(WAYS).index(run.schedule), parts, uneven, run.v, found.step


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
                run = Run(
                    space.seq, micro, space.global_batch, tp=tp, cp=cp, ep=ep, pp=pp, v=v,
                    schedule=name, recompute=recompute, sp=tp > 1, sharding=space.sharding,
                    lighter=_lighter(model.layers, pp * v),
                )  # fmt: skip
                if space.allows(run):
                    yield run


def _lighter(layers: int, n: int) -> tuple[int, int]:
    """One layer fewer at both ends where all stages are then even, else none."""
    return (1, 1) if n > 0 and layers % n and (layers + 2) % n == 0 else (0, 0)


def _powers(most: int) -> tuple[int, ...]:
    """1, 2, 4 and so on up to a number."""
    return tuple(1 << i for i in range(most.bit_length()))
