"""What may be chosen: placements, kinds of backward, recomputation; and who competes by name.

Imports request, problem, schedules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from hocket.costs import Costs, Cycle, Number, per_stage
from hocket.errors import CostError, PlanError, UsageError
from hocket.ir import Kind, Placement, Queue, Schedule
from hocket.planner.partition import cut_for, stages_from
from hocket.planner.problem import SPLIT, WHOLE, Problem, problem
from hocket.planner.recompute import Level, recomputed, with_receive_buffers
from hocket.planner.request import SHAPES, Request, limits
from hocket.schedules import Entry, build, entries

Paths = tuple[tuple[Queue, ...], ...]


@dataclass(frozen=True, eq=False)
class Variant:
    """One placement with one kind of backward: the problem of ordering it."""

    shape: str
    p: int
    v: int
    copies: int
    placement: Placement
    costs: Costs
    problem: Problem

    @property
    def name(self) -> str:
        """How the variant is called: `v p=4 split`."""
        kinds = "split" if self.problem.kinds == SPLIT else "whole"
        v = f" v={self.v}" if self.shape in ("looped", "wave") else ""
        return f"{self.shape}{v} p={self.p}, {kinds} backward"


def stage_costs(costs: Costs, p: int, v: int) -> Costs:
    """The costs of each of p * v stages: lists that long as they are, else of 1/p cut in v."""
    lists = [
        x
        for x in (costs.F, costs.I, costs.W, costs.B, *vars(costs.bytes).values())
        if isinstance(x, tuple) and not isinstance(x, Cycle)
    ]
    if v > 1 and lists and all(len(x) == p * v for x in lists):
        return costs
    return costs.split(v)


class Pricing:
    """The costs of a request's stages: what they are given as, how cut, what is recomputed."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.cuts: dict[tuple[Paths, bool], tuple[int, ...]] = {}
        self.levels: dict[tuple[Paths, bool], tuple[Level, ...]] = {}

    def sizes(self, placement: Placement, split: bool) -> tuple[int, ...]:
        """Layers of each stage; empty where the request gives stages."""
        if self.request.layers is None:
            return ()
        key = placement.paths, split
        if key not in self.cuts:
            self.cuts[key] = cut_for(self.request.layers, placement)
        return self.cuts[key]

    def costs(self, placement: Placement, split: bool) -> Costs:
        """Costs of each stage of a placement. Raises: CostError, PlanError."""
        layers = self.request.layers
        if layers is not None:
            costs = stages_from(layers, self.sizes(placement, split))
        else:
            costs = stage_costs(self.request.costs, placement.p, placement.n_stages // placement.p)
        costs = costs.split(1, placement.slices)
        if self.request.buffers != "none":
            costs = with_receive_buffers(costs, placement, each=self.request.buffers == "each")
        levels = self.levels.get((placement.paths, split))
        return costs if levels is None else recomputed(costs, levels)


def room_of(request: Request, placement: Placement, costs: Costs) -> list[float] | None:
    """Bytes of each rank beside the static ones, or None without a limit in bytes."""
    given = limits(request.memory, placement.p, "memory")
    if given is None:
        return None
    static = per_stage("bytes.static", costs.bytes.static, placement.n_stages)
    held = placement.stages_of_rank
    return [float(x) - float(sum(static[s] for s in held[r])) for r, x in enumerate(given)]


def pairs_of(request: Request, p: int, v: int) -> tuple[Number, ...] | None:
    """The limit of (stage, microbatch) pairs of each rank, or None."""
    given = limits(request.in_flight, p, "in_flight")
    return None if given is None else tuple(x * v for x in given)


def variants(request: Request, pricing: Pricing) -> Iterator[Variant]:
    """Every placement and kind of backward that the request allows.

    Raises: CostError where the costs fit none of them.
    """
    errors, n = [], 0
    for p, shape, v in product(request.ranks, request.shapes, request.v):
        made = SHAPES[shape]
        if not made.exists(p, v) or made.copies > request.copies or made.copies > request.m:
            continue
        for kinds in (SPLIT, WHOLE):
            if request.split is not None and request.split != (kinds == SPLIT):
                continue
            try:
                found = _variant(pricing, shape, p, v, kinds)
            except (CostError, PlanError) as error:
                errors.append(error)
                continue
            n += 1
            yield found
    if not n and errors:
        raise errors[0]


def _variant(pricing: Pricing, shape: str, p: int, v: int, kinds: tuple[Kind, ...]) -> Variant:
    made = SHAPES[shape]
    placement = made.make(p, pricing.request.m, v)
    costs = pricing.costs(placement, kinds == SPLIT)
    return Variant(shape, p, v, made.copies, placement, costs, asked(pricing, placement, kinds, v))


def asked(pricing: Pricing, placement: Placement, kinds: tuple[Kind, ...], v: int) -> Problem:
    """The problem of ordering these kinds on a placement, as it is priced now."""
    costs = pricing.costs(placement, kinds == SPLIT)
    room = room_of(pricing.request, placement, costs)
    pairs = pairs_of(pricing.request, placement.p, v)
    if room is not None and pairs is not None:
        raise UsageError("give a limit in bytes or one of microbatches in flight, not both")
    return problem(placement, costs, kinds, in_flight=pairs, room=room)


def named(request: Request) -> Iterator[tuple[str, int, int, Schedule | str]]:
    """Every registered schedule: (name with options, p, v, schedule, or why it cannot be).

    First each with its defaults, then with its options over their range.
    """
    for p, entry in product(request.ranks, entries()):
        if not entry.takes_v:
            yield _built(entry, p, request.m, None, {})
            continue
        found = [_built(entry, p, request.m, v, {}) for v in request.v]
        fitting = [x for x in found if isinstance(x[3], Schedule)]
        yield from fitting or found[:1]
    for p, entry in product(request.ranks, entries()):
        for v in request.v if entry.takes_v else (None,):
            for options in _options(entry, p, request.m):
                found_one = _built(entry, p, request.m, v, options)
                if isinstance(found_one[3], Schedule):
                    yield found_one


def _built(
    entry: Entry, p: int, m: int, v: int | None, options: dict[str, Any]
) -> tuple[str, int, int, Schedule | str]:
    words = ",".join(f"{k}={x}" for k, x in options.items())
    name = f"{entry.name}:{words}" if words else entry.name
    stages = entry.stages_per_rank if v is None else v
    try:
        return name, p, stages, build(entry.name, p=p, m=m, v=v, **options)
    except UsageError as error:
        return name, p, stages, str(error)


def _options(entry: Entry, p: int, m: int) -> Iterator[dict[str, Any]]:
    """Each whole-number option at values from 1 to 2p, and m."""
    values = sorted({1, 2, max(1, p // 2), p - 1, p, p + p // 2, 2 * p, m} - {0})
    for name, default in entry.options.items():
        if entry.is_number(name):
            yield from ({name: x} for x in values if x != default)
