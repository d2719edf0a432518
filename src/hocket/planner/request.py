"""What is asked of the planner, and what it answers, as plain data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from hocket.costs import Costs, Number
from hocket.costs.scaling import check_choice
from hocket.errors import CostError, UsageError
from hocket.ir import Placement, Queue, Schedule, linear, looped, mirrored, vshape, wave
from hocket.limits import PLANNED, at_most, check_schedule
from hocket.planner.recompute import Level
from hocket.search.bounds import Bound
from hocket.timeline import Timeline

_ROUNDING = 1e-9  # sums of floats in another order differ by less
Limit = Number | tuple[Number, ...] | None

OBJECTIVES = {
    "makespan": "first start to last end: steps meet at a barrier",
    "span": "the longest any rank takes from its first start to its last end: steps overlap, the "
    "optimiser step is validated afterwards",
    "period": "from one step to the next when the same order repeats without a barrier",
}


class Shape(NamedTuple):
    """A family of placements: for which v it exists, its weight copies, and how it is made."""

    exists: Callable[[int, int], bool]
    copies: int
    make: Callable[[int, int, int], Placement]


SHAPES: dict[str, Shape] = {
    "linear": Shape(lambda p, v: v == 1, 1, lambda p, m, v: linear(p, m)),
    "looped": Shape(lambda p, v: v > 1 and p > 1, 1, looped),
    "v": Shape(lambda p, v: v == 2, 1, lambda p, m, v: vshape(p, m)),
    "wave": Shape(lambda p, v: v > 2 and v % 2 == 0, 1, wave),
    "mirrored": Shape(
        lambda p, v: v == 1 and p % 2 == 0, 2,
        lambda p, m, v: mirrored(p, [mb % 2 for mb in range(m)]),
    ),
}  # fmt: skip


def shape_of(paths: tuple[tuple[Queue, ...], ...], p: int, m: int, v: int) -> str | None:
    """The name of the placement with these paths, in any order; None where there is none."""
    for name, shape in SHAPES.items():
        if shape.exists(p, v) and set(shape.make(p, m, v).paths) == set(paths):
            return name
    return None


@dataclass(frozen=True)
class Request:
    """A question to the planner.

    p: ranks, one number or several to choose from. m: microbatches. costs: per rank, of several p
    for the first; or per stage, or per layer, to be joined to stages.
    memory: limit of each rank in the unit of the bytes, static ones included; in_flight: limit in
    microbatches of a rank's whole share of the model (a stage of v counts 1/v); numbers, or one
    per rank.
    shapes, v, copies: placements that may be used, stages per rank, most copies of the weights.
    slices: most parts of a sequence. split: backward as I and W (True), whole (False), or either
    (None). named: also the registered schedules. recompute: what may be computed again instead of
    held, stage by stage, see `recompute.py`. buffers: receive buffers beside the activations:
    "none", one for each microbatch "in flight", or "each" of the step. search: look for orders
    beyond the registered and listed ones. objective: a key of OBJECTIVES. margin: of
    orders whose value is above the best by no more than this share, the simplest is the answer:
    fewest copies, fewest stages per rank, full backwards, then the fastest (left out: 0, or
    0.03 where cores are shared, as predictions are no surer there). time_limit: seconds; rounds:
    the most rounds of search (the answer depends on these and the seed alone if the time
    suffices); patience: seconds without a better order that end the search. solver: prove or
    improve with OR-tools where it is small enough, in solver_time more.
    """

    p: int | tuple[int, ...]
    m: int
    costs: Costs = field(default_factory=lambda: Costs(per="rank"))
    memory: Limit = None
    in_flight: Limit = None
    shapes: tuple[str, ...] = ("linear", "looped", "v", "wave")
    v: tuple[int, ...] = (1, 2, 4)
    copies: int = 1
    slices: int = 1
    split: bool | None = None
    named: bool = True
    search: bool = True
    recompute: tuple[Level, ...] = ()
    buffers: str = "none"
    objective: str = "makespan"
    margin: float | None = None
    time_limit: float = 20.0
    patience: float | None = None
    rounds: int = 1000
    seed: int = 0
    solver: bool = False
    solver_time: float = 60.0
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise UsageError(
                f"objective is {self.objective!r}; it must be one of {', '.join(OBJECTIVES)}"
            )
        unknown = [s for s in self.shapes if s not in SHAPES]
        if unknown:
            raise UsageError(f"there is no placement {unknown[0]!r}; there are {', '.join(SHAPES)}")
        if self.buffers not in ("none", "in flight", "each"):
            raise UsageError(f"buffers is {self.buffers!r}; it must be none, in flight or each")
        self._check_numbers()

    def _check_numbers(self) -> None:
        least = {"p": 1, "m": 1, "v": 1, "copies": 1, "slices": 1, "rounds": 1, "seed": 0}
        for name, low in least.items():
            value = getattr(self, name)
            for x in value if isinstance(value, tuple) else (value,):
                if isinstance(x, bool) or not isinstance(x, int) or x < low:
                    raise UsageError(f"{name} is {x!r}; it must be a whole number, {low} or more")
        for name in ("memory", "in_flight"):
            value = getattr(self, name)
            for x in value if isinstance(value, tuple) else (value,):
                if x is not None and not 0 < x < math.inf:
                    raise UsageError(f"{name} is {x!r}; it must be above 0")
        if self.margin is not None and not 0 <= self.margin < 1:
            raise UsageError(f"margin is {self.margin}; it must be a share from 0 to below 1")
        for name in ("time_limit", "patience", "solver_time", "threads"):
            number = getattr(self, name)
            if number is not None and not number > 0:
                raise UsageError(f"{name.replace('_', ' ')} is {number}; it must be above 0")
        p = max(self.p) if isinstance(self.p, tuple) else self.p
        at_most("a plan: ranks", p, PLANNED)
        check_schedule("a plan", p, p * max(self.v), self.m, self.slices)

    def check_costs(self) -> None:
        """Raises UsageError where limits and costs do not fit each other."""
        if self.memory is not None and not self.costs.bytes:
            raise UsageError(
                "memory is a limit in bytes, but the costs have none; give [bytes] in them, or a "
                "limit in microbatches (in_flight)"
            )
        if self.costs.slice is not None and self.slices == 1:
            raise CostError(
                f"slice has {len(self.costs.slice)} factors, but the plan has no slices; leave "
                "slice out of the costs, or allow slices"
            )
        stages = {p * v for p in self.ranks for v in self.v}
        check_choice(self.costs, stages, v=self.v, slices=self.slices)

    @property
    def layers(self) -> Costs | None:
        """The costs of layers, where the costs are those."""
        return self.costs if self.costs.per == "layer" else None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of ranks to choose from."""
        return self.p if isinstance(self.p, tuple) else (self.p,)


def limits(value: Limit, p: int, what: str) -> tuple[Number, ...] | None:
    """The limit of each rank, or None.

    Raises: UsageError where a list has another length.
    """
    if value is None:
        return None
    if isinstance(value, tuple):
        if len(value) != p:
            raise UsageError(f"{what} has {len(value)} values, but there are {p} ranks")
        return value
    return (value,) * p


class Entrant(NamedTuple):
    """One competitor: what it reaches, and why it is not the answer.

    value: of the objective; None where it cannot be used. in_flight: the fullest rank, in
    microbatches of a rank's whole share. family: what it is one setting of, of which the best is
    shown; empty where it is alone.
    """

    name: str
    p: int
    v: int
    weights: float
    makespan: Number | None
    span: Number | None
    value: Number | None
    in_flight: float | None
    peak_bytes: float | None
    why: str
    family: str = ""

    @classmethod
    def timed(
        cls, name: str, v: int, timeline: Timeline, value: Number | None, why: str
    ) -> Entrant:
        """A competitor whose order was simulated."""
        made = timeline.schedule
        return cls(
            name, made.p, v, made.placement.weight_copies, timeline.makespan, timeline.span, value,
            float(max(timeline.in_flight)), max(timeline.peak_bytes), why,
        )  # fmt: skip

    @classmethod
    def absent(cls, name: str, p: int, v: int, why: str) -> Entrant:
        """A competitor that is not allowed or cannot be made."""
        return cls(name, p, v, 0.0, None, None, None, None, None, why)


class Ahead(NamedTuple):
    """The order of a plan with R as actions of their own, those of some stages ahead."""

    schedule: Schedule
    costs: Costs
    value: Number
    stages: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """The answer: a schedule that fits, its costs per stage, what it reaches and what nothing can.

    bound: of the orders that `scope` names, with this partition of layers and recomputation;
    floor: of every placement considered. proven: value is the floor, and that holds for every
    partition and recomputation. found_by: where the order comes from. history: (seconds, value)
    whenever a better one was found. recompute: level, and layers: number of layers of each stage,
    if any. interrupted: the search was ended by Ctrl-C. finalists: the best orders by name, the
    answer first. ahead: the order with R that need not wait for its gradient, where that is better.
    """

    request: Request
    schedule: Schedule
    costs: Costs
    value: Number
    makespan: Number
    span: Number
    bound: Bound
    scope: str
    floor: Bound
    found_by: str
    entrants: tuple[Entrant, ...]
    history: tuple[tuple[float, Number], ...]
    seconds: float
    recompute: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    interrupted: bool = False
    finalists: tuple[tuple[str, Schedule, Costs], ...] = ()
    ahead: Ahead | None = None

    @property
    def gap(self) -> float:
        """How far the value is above the bound of its placement, as a share of the bound."""
        return _above(self.value, self.bound.value) if self.bound.value else 0.0

    @property
    def is_chosen(self) -> bool:
        """True when other partitions of layers or other recomputation are not ruled out.

        Recomputation only takes time where no limit in bytes asks for it.
        """
        request = self.request
        return request.layers is not None or bool(request.recompute and request.memory)

    @property
    def proven(self) -> bool:
        """True when nothing that was allowed can be better: no placement, cut or recomputation."""
        if self.is_chosen or self.interrupted:
            return False
        return bool(self.floor.value or not self.value) and not _above(self.value, self.floor.value)


def _above(value: Number, bound: Number) -> float:
    """The share by which a value is above its bound; 0 where floats differ by rounding alone."""
    if value <= bound:
        return 0.0
    share = float(value) / float(bound) - 1
    is_exact = not isinstance(value, float) and not isinstance(bound, float)
    return share if is_exact or share > _ROUNDING else 0.0
