"""Layers cut into stages: the largest load of a rank as small as it can be, no stage empty.

Imports costs, ir.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from hocket.costs import Bytes, Costs, Cycle, Number, per_stage
from hocket.errors import PlanError
from hocket.ir import Placement


def partition(
    loads: Sequence[Number], parts: int, owners: Sequence[Sequence[int]] | None = None
) -> tuple[int, ...]:
    """Number of consecutive layers in each of `parts` stages.

    The largest load is the smallest possible, then the sum of squares; no stage is empty.
    owners: for each rank the stages it holds (left out: one each); the loads are then those of
    ranks. With one stage a rank this is exact; with several, moves of one layer at a time end it.

    Raises: PlanError with fewer layers than stages.
    """
    if len(loads) < parts:
        raise PlanError(
            f"{len(loads)} layers do not make {parts} stages: each needs at least one layer; "
            f"use at most {len(loads)} stages"
        )
    sizes = _by_stage(loads, parts)
    if owners is None or all(len(x) == 1 for x in owners):
        return sizes
    return _moved(loads, sizes, owners)


def _by_stage(loads: Sequence[Number], parts: int) -> tuple[int, ...]:
    """Exact for stages: first the least largest load, then the least sum of squares under it."""
    sums = [0, *accumulate(loads)]
    n = len(loads)
    worst: list[Number] = [sums[i] for i in range(n + 1)]
    for k in range(2, parts + 1):
        worst = [
            min((max(worst[j], sums[i] - sums[j]) for j in range(k - 1, i)), default=float("inf"))
            for i in range(n + 1)
        ]
    limit = worst[n] + (1e-12 * abs(float(worst[n])) if isinstance(worst[n], float) else 0)
    best: list[tuple[Number, tuple[int, ...]] | None] = [
        (sums[i] ** 2, (i,)) if i > 0 and sums[i] <= limit else None for i in range(n + 1)
    ]
    for _ in range(1, parts):
        now: list[tuple[Number, tuple[int, ...]] | None] = [None] * (n + 1)
        for i in range(1, n + 1):
            for j in range(1, i):
                before, load = best[j], sums[i] - sums[j]
                if before is None or load > limit:
                    continue
                cost = before[0] + load**2
                here = now[i]
                if here is None or cost < here[0]:
                    now[i] = (cost, (*before[1], i - j))
        best = now
    found = best[n]
    assert found is not None, "the limit was reached by a cut"
    return found[1]


def rank_loads(
    loads: Sequence[Number], sizes: Sequence[int], owners: Sequence[Sequence[int]]
) -> list[Number]:
    """Load of each rank."""
    stages = _stage_sums(loads, sizes)
    return [sum(stages[s] for s in held) for held in owners]


def _stage_sums(values: Sequence[Number], sizes: Sequence[int]) -> list[Number]:
    ends = [0, *accumulate(sizes)]
    return [sum(values[a:b]) for a, b in pairwise(ends)]


def _moved(
    loads: Sequence[Number], sizes: tuple[int, ...], owners: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """Layers moved over one or several boundaries while that lessens the largest load."""

    def score(cut: tuple[int, ...]) -> tuple[float, float]:
        ranks = [float(x) for x in rank_loads(loads, cut, owners)]
        return max(ranks), sum(x * x for x in ranks)

    best = score(sizes)
    improved = True
    while improved:
        improved = False
        for cut in shifted(sizes):
            new = score(cut)
            if new < best:
                best, sizes, improved = new, cut, True
                break
    return sizes


def shifted(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Cuts in which one layer less is in one stage and one more in another."""
    out = []
    for a in range(len(sizes)):
        for b in range(len(sizes)):
            if a != b and sizes[a] > 1:
                cut = list(sizes)
                cut[a], cut[b] = cut[a] - 1, cut[b] + 1
                out.append(tuple(cut))
    return out


def n_layers(layers: Costs) -> int:
    """The number of layers that per-layer costs are given for.

    Raises: PlanError where no list says it.
    """
    for x in (layers.F, layers.I, layers.W, layers.B, *vars(layers.bytes).values()):
        if isinstance(x, tuple) and not isinstance(x, Cycle):
            return len(x)
    raise PlanError("the costs of layers must be lists, one value a layer")


def layer_loads(layers: Costs) -> list[Number]:
    """Time of forward and backward of each layer."""
    n = n_layers(layers)
    f, b = per_stage("F", layers.F, n), per_stage("B", layers.whole, n)
    return [x + y for x, y in zip(f, b, strict=True)]


def stages_from(layers: Costs, sizes: Sequence[int]) -> Costs:
    """Costs of stages of that many layers; a stage's message is that of its last layer."""
    n = n_layers(layers)

    def total(name: str, value: object) -> tuple[Number, ...]:
        return tuple(_stage_sums(per_stage(name, value, n), sizes))  # ty: ignore

    ends = [x - 1 for x in accumulate(sizes)]
    message = per_stage("bytes.message", layers.bytes.message, n)
    b = layers.bytes
    sizes_ = Bytes(
        static=total("static", b.static), activation=total("activation", b.activation),
        held=None if b.held is None else total("held", b.held),
        gradient=total("gradient", b.gradient), message=tuple(message[i] for i in ends),
    )  # fmt: skip
    return replace(
        layers, F=total("F", layers.F), I=total("I", layers.I), W=total("W", layers.W),
        B=None if layers.B is None else total("B", layers.B), bytes=sizes_,
    )  # fmt: skip


def cut_for(layers: Costs, placement: Placement) -> tuple[int, ...]:
    """The cut with the least largest load of a rank for this placement."""
    return partition(layer_loads(layers), placement.n_stages, placement.stages_of_rank)
