"""Why nothing fits: what the nearest settings need, and others that are worth trying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from hocket.costs import per_stage
from hocket.errors import HocketError
from hocket.planner.partition_search import least
from hocket.planner.recompute import FULL
from hocket.planner.request import SHAPES, Entrant, Request
from hocket.planner.variants import Pricing, Variant, priced, variants
from hocket.search.problem import SPLIT
from hocket.tables import format_bytes


def lacking(variant: Variant) -> str:
    """Which rank cannot hold even one microbatch, and what it needs."""
    need, cap = least(variant.problem), variant.problem.cap
    worst = int(np.argmax(need - cap))
    rank = variant.placement.queues[worst].rank
    if variant.problem.limited_by == "in_flight":
        v = variant.v
        return (
            f"one microbatch alone needs {need[worst] / v:g} in flight on rank {rank}; "
            f"there is room for {max(0.0, float(cap[worst])) / v:.6g}"
        )
    static = per_stage("bytes.static", variant.costs.bytes.static, variant.placement.n_stages)
    fixed = float(sum(static[s] for s in variant.placement.stages_of_rank[rank]))
    needed, static, alone, limit = (
        format_bytes(float(x), variant.costs.bytes.unit)
        for x in (fixed + need[worst], fixed, need[worst], fixed + cap[worst])
    )
    return (
        f"rank {rank} needs {needed}, {static} static and {alone} for one microbatch; "
        f"the limit is {limit}"
    )


def nothing_fits(request: Request, choices: Sequence[Variant], entrants: Sequence[Entrant]) -> str:
    """What was tried, what the nearest settings need, and others with what these need."""
    ranks = ", ".join(map(str, request.ranks))
    lines = [f"nothing fits p={ranks} m={request.m} under the limits"]
    near = sorted(choices, key=_excess)[:3]
    lines += [f"  nearest: {v.name}: {lacking(v)}" for v in near]
    if not near:
        lines.append(
            f"  no placement of {', '.join(request.shapes)} exists for v in {request.v} and "
            f"{request.copies} copies of the weights; there are {', '.join(SHAPES)}"
        )
    lines += [f"  {e.name}: {e.why}" for e in entrants if e.value is None and e.makespan][:3]
    others = [] if not near else list(_worth_trying(request, _excess(near[0])))
    lines += [f"  worth trying: {text}" for text in others]
    if request.memory is not None and not others:
        lines.append("  less is held with more ranks, or static memory sharded")
    return "\n".join(lines)


def _excess(variant: Variant) -> float:
    return float((least(variant.problem) - variant.problem.cap).max())


def _worth_trying(request: Request, excess: float) -> Iterator[str]:
    """Other settings that need less, each with the placement that needs least."""
    for words, other in _others(request):
        try:
            found = min(_lightest(other), key=_excess, default=None)
        except HocketError:  # costs or limits that are lists for other ranks
            continue
        if found is not None and _excess(found) < excess:
            yield f"{words}: {found.name}: {lacking(found)}"


def _others(request: Request) -> Iterator[tuple[str, Request]]:
    if "linear" not in request.shapes:
        yield "--shapes linear -v 1", replace(request, shapes=("linear",), v=(1,), copies=1)
    if request.memory is None:
        return
    if not request.recompute:
        yield "--recompute full", replace(request, recompute=(FULL,))
    if request.buffers == "each":
        yield "--buffers in-flight", replace(request, buffers="in flight")
    if request.costs.per == "stage":  # more ranks would have another model
        return
    more = 2 * max(request.ranks)
    yield f"-p {more}", replace(request, p=(*request.ranks, more))


def _lightest(request: Request) -> Iterator[Variant]:
    """Every variant of the most ranks, with the same level of recomputation on all stages."""
    pricing = Pricing(request)
    for variant in list(variants(request, pricing)):
        if variant.p != max(request.ranks):
            continue
        yield variant
        key = variant.placement.paths, variant.problem.kinds == SPLIT
        for level in request.recompute:
            pricing.levels[key] = (level,) * variant.placement.n_stages
            yield priced(variant, pricing)
