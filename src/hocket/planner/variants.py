"""What may be chosen: placements, kinds of backward, recomputation; and who competes by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from hocket.costs import Costs, fitted, per_stage, scaling
from hocket.costs.partition import Room
from hocket.errors import CostError, PlanError, UsageError
from hocket.ir import Kind, Placement, Queue, Schedule
from hocket.planner.recompute import (
    Level,
    needs,
    recomputed,
    with_receive_buffers,
    without_full,
)
from hocket.planner.request import SHAPES, Request, limits, shape_of
from hocket.schedules import Entry, build, entries
from hocket.search.problem import FULL, SPLIT, Problem, fuses, problem

MANY = 4096  # ranks times microbatches from which on making one schedule takes seconds
NOT_ASKED = "its placement is not among those asked for"
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
        kinds = "split" if self.problem.kinds == SPLIT else "full"
        v = f" v={self.v}" if self.shape in ("looped", "wave") else ""
        return f"{self.shape}{v} p={self.p}, {kinds} backward"


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
            same = self.cuts.get((placement.paths, not split))
            self.cuts[key] = same or self._cut(self.request.layers, placement)
        return self.cuts[key]

    def _cut(self, layers: Costs, placement: Placement) -> tuple[int, ...]:
        """The most even partition with room for one microbatch on every rank, if any."""
        request = self.request
        memory = limits(request.memory, placement.p, "memory")
        if memory is None:
            return scaling.layer_partition(layers, placement)
        need = needs(layers, placement, levels=request.recompute, buffers=request.buffers)
        room = Room([float(x) for x in memory], need)
        return scaling.layer_partition(layers, placement, room=room)

    def costs(self, placement: Placement, is_split: bool, *, apart: bool = False) -> Costs:
        """Costs of each stage of a placement. Raises: CostError, PlanError.

        apart: what is recomputed in full is no part of the backward, but an R of its own.
        """
        costs, layers = self.request.costs, self.request.layers
        if layers is not None:
            costs = scaling.join(layers, self.sizes(placement, is_split))
            costs = scaling.split(costs, 1, placement.slices)
        elif scaling.list_length(costs) is None and scaling.per_of(costs, placement) == "rank":
            costs = scaling.for_ranks(costs, self.request.ranks[0], placement.p)
            costs = fitted(costs, placement)
        else:
            costs = scaling.of_model(costs, placement)
        if placement.slices == 1:
            costs = replace(costs, slice=None)
        if self.request.buffers != "none":
            costs = with_receive_buffers(costs, placement, each=self.request.buffers == "each")
        levels = self.levels.get((placement.paths, is_split))
        if levels is not None and apart:
            levels = without_full(levels)
        return costs if levels is None else recomputed(costs, levels)


def room_of(request: Request, placement: Placement, costs: Costs) -> list[float] | None:
    """Bytes of each rank beside the static ones, or None without a limit in bytes."""
    given = limits(request.memory, placement.p, "memory")
    if given is None:
        return None
    static = per_stage("bytes.static", costs.bytes.static, placement.n_stages)
    held = placement.stages_of_rank
    return [float(x) - float(sum(static[s] for s in held[r])) for r, x in enumerate(given)]


def variants(request: Request, pricing: Pricing) -> Iterator[Variant]:
    """Every placement and kind of backward that the request allows.

    Raises: CostError where the costs fit none of them.
    """
    errors, n = [], 0
    for p, shape, v in product(request.ranks, request.shapes, request.v):
        made = SHAPES[shape]
        if not made.exists(p, v) or made.copies > request.copies or made.copies > request.m:
            continue
        for kinds in (SPLIT, FULL):
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
    fused = fuses(costs, placement.p)
    return problem_of(pricing.request, placement, costs, kinds, v=v, fused=fused)


def problem_of(
    request: Request, placement: Placement, costs: Costs, kinds: tuple[Kind, ...], *, v: int,
    fused: bool,
) -> Problem:  # fmt: skip
    """The problem of ordering these kinds under the limits of a request, v stages per rank."""
    room = room_of(request, placement, costs)
    pairs = limits(request.in_flight, placement.p, "in_flight")
    if room is not None and pairs is not None:
        raise UsageError("give a limit in bytes or one of microbatches in flight, not both")
    pairs = None if pairs is None else tuple(x * v for x in pairs)
    return problem(placement, costs, kinds, in_flight=pairs, room=room, fused=fused)


def priced(variant: Variant, pricing: Pricing) -> Variant:
    """The variant as it is priced now."""
    placement, kinds = variant.placement, variant.problem.kinds
    costs = pricing.costs(placement, kinds == SPLIT)
    return replace(variant, costs=costs, problem=asked(pricing, placement, kinds, variant.v))


def named(
    request: Request, is_late: Callable[[], bool] = lambda: False
) -> Iterator[tuple[str, int, int, Schedule | str]]:
    """Every registered schedule: (name with options, p, v, schedule, or why it cannot be).

    First each with its defaults, those that are searches of their own last, then with options over
    their range. What has a placement that is not asked for is not built; once it is late, neither
    are searches, options, and with many microbatches the rest.
    """
    registered = sorted(entries(), key=lambda entry: entry.searches)
    for p, entry in product(request.ranks, registered):
        if (entry.searches or p * request.m > MANY) and is_late():
            yield entry.name, p, entry.stages_per_rank, "left out: it takes long to make"
            continue
        vs = request.v if entry.takes_v else (None,)
        found = [
            (entry.name, p, v or entry.stages_per_rank, why)
            if (why := _unwanted(request, entry, v))
            else _built(entry, p, request.m, v, {})
            for v in vs
        ]
        yield from [x for x in found if isinstance(x[3], Schedule)] or found[:1]
    for p, entry in product(request.ranks, registered):
        for v in request.v if entry.takes_v else (None,):
            for options in _options(entry, p, request.m):
                if _unwanted(request, entry, v):
                    break
                if is_late():
                    return
                found_one = _built(entry, p, request.m, v, options)
                if isinstance(found_one[3], Schedule):
                    yield found_one


def _unwanted(request: Request, entry: Entry, v: int | None) -> str:
    """Why the placement of a schedule is surely not asked for; empty where it may be."""
    shape = _shape_of(entry, v)
    if shape is None or (shape in request.shapes and (v or entry.stages_per_rank) in request.v):
        return ""
    copies = SHAPES[shape].copies
    return NOT_ASKED if copies <= request.copies else needs_copies(copies, request)


def needs_copies(copies: float, request: Request) -> str:
    """Why a schedule with more copies of the weights is not allowed."""
    return f"needs {copies:g} copies of the weights; allowed: {request.copies}"


@cache
def _shape_of(entry: Entry, v: int | None) -> str | None:
    """The name of a schedule's placement, read from a small one; None where it has none."""
    stages = entry.stages_per_rank if v is None else v
    for p, m in ((4, 8), (2, 4)):
        try:
            paths = build(entry.name, p=p, m=m, v=v).placement.paths
        except UsageError:
            continue
        return shape_of(paths, p, m, stages)
    return None


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
