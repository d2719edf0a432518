"""The cut of layers and the recomputation of each stage, chosen by what list scheduling reaches.

Imports variants, search, partition, recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from hocket.planner.partition import shifted
from hocket.planner.problem import SPLIT
from hocket.planner.recompute import NONE, Level
from hocket.planner.search import Arena
from hocket.planner.variants import Pricing, Variant, asked

_MOST = 400  # settings tried


def adapted(variant: Variant, pricing: Pricing) -> Variant:
    """The variant with the best cut and levels found; `pricing` keeps them."""
    placement, kinds = variant.placement, variant.problem.kinds
    key = placement.paths, kinds == SPLIT

    def value() -> float:
        problem = asked(pricing, placement, kinds, variant.v)
        return Arena(problem, pricing.request.objective).listed_cost / problem.ticks.scale

    best = value()
    if pricing.request.recompute:
        levels = _levels(variant, pricing)
        best = _climb(pricing.levels, key, levels, best, value)
    if pricing.request.layers is not None:
        pricing.sizes(placement, kinds == SPLIT)
        _climb(pricing.cuts, key, lambda now: iter(shifted(now or ())), best, value)
    costs = pricing.costs(placement, kinds == SPLIT)
    return replace(variant, costs=costs, problem=asked(pricing, placement, kinds, variant.v))


def _climb(
    table: dict[Any, Any],
    key: Any,
    near: Callable[[Any], Iterator[Any]],
    best: float,
    value: Callable[[], float],
) -> float:
    """Changes `table[key]` to neighbours while the value falls."""
    tried, improved = 0, True
    while improved and tried < _MOST:
        improved = False
        before = table.get(key)
        for setting in near(before):
            table[key] = setting
            tried += 1
            new = value()
            if new < best:
                best, improved = new, True
                break
            if before is None:
                del table[key]
            else:
                table[key] = before
    return best


def _levels(
    variant: Variant, pricing: Pricing
) -> Callable[[tuple[Level, ...] | None], Iterator[tuple[Level, ...]]]:
    """Neighbours: all stages at one level, then the stages of one rank at another."""
    n = variant.placement.n_stages
    choices = [NONE, *pricing.request.recompute]

    def near(now: tuple[Level, ...] | None) -> Iterator[tuple[Level, ...]]:
        for level in choices:
            yield (level,) * n
        now = now or (NONE,) * n
        for held, level in product(variant.placement.stages_of_rank, choices):
            yield tuple(level if s in held else x for s, x in enumerate(now))

    return near
