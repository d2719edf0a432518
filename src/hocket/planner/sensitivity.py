"""What other settings would give, and how orders fare when times vary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from hocket.costs import Number, quotient
from hocket.costs.partition import shifted
from hocket.costs.scaling import for_ranks
from hocket.errors import HocketError
from hocket.ir import Schedule
from hocket.planner.measures import measure, over
from hocket.planner.planning import plan
from hocket.planner.recompute import NONE
from hocket.planner.request import Limit, Plan, Request
from hocket.planner.variants import Pricing
from hocket.simulator import simulate
from hocket.simulator.samples import simulate_jitter
from hocket.tables import SIZES, format_time, plain, table


class Change(NamedTuple):
    """One other setting: the value there, and that of one microbatch."""

    what: str
    value: Number | None
    per_microbatch: float | None
    against: float | None


@dataclass(frozen=True)
class Sensitivity:
    """What each change gives; `against`: time per microbatch over that of the plan, less 1."""

    changes: tuple[Change, ...]
    unit: str

    def as_json(self) -> list[dict[str, Any]]:
        """One object a change."""
        return [{k: plain(v) for k, v in c._asdict().items()} for c in self.changes]

    def __str__(self) -> str:
        rows = [
            {"if": c.what, "it takes": None if c.value is None else format_time(c.value, self.unit),
             "a microbatch": "does not fit" if c.against is None else f"{c.against:+.2%}"}
            for c in self.changes
        ]  # fmt: skip
        return table(rows, ["if", "it takes", "a microbatch"])


def sensitivity(found: Plan, *, seconds: float | None = None) -> Sensitivity:
    """What faster links, one microbatch more, more or less memory, one layer moved would give.

    Each is planned again for the same placements, that many seconds each (left out: as long as the
    plan took, 2 to 10 s), from the plan's best orders where they still fit; a layer is moved with
    the order kept.
    """
    if seconds is None:
        seconds = min(max(2.0, found.seconds), 10.0)
    p = found.schedule.p
    costs, first = found.request.costs, found.request.ranks[0]
    if p != first and costs.per != "layer":
        costs = for_ranks(costs, first, p)
    request = replace(found.request, p=p, time_limit=seconds, solver=False, costs=costs)
    rows = [(what, *_value(found, asked)) for what, asked in _others(request)] + _moved(found)
    base, changes = float(found.value) / found.request.m, []
    for what, value, m in rows:
        each = None if value is None else float(value) / m
        changes.append(Change(what, value, each, None if each is None else each / base - 1))
    return Sensitivity(tuple(changes), found.costs.unit)


def _value(found: Plan, asked: Request) -> tuple[Number | None, int]:
    """What a plan of another setting gives (None: nothing fits), and its microbatches."""
    known = [(name, made) for name, made, _ in found.finalists if made.m == asked.m]
    try:
        return plan(asked, known=known).value, asked.m
    except HocketError:
        return None, asked.m


def _others(request: Request) -> list[tuple[str, Request]]:
    out = []
    costs = request.costs

    def priced(**changes: Any) -> Request:
        return replace(request, costs=replace(costs, **changes))

    if costs.latency or costs.bandwidth or any(costs.p2p_overhead or ()):
        bandwidth = None if costs.bandwidth is None else quotient(costs.bandwidth * 11, 10)
        overhead = costs.p2p_overhead and tuple(quotient(x * 10, 11) for x in costs.p2p_overhead)
        latency = quotient(costs.latency * 10, 11)
        faster = priced(latency=latency, bandwidth=bandwidth, p2p_overhead=overhead)
        out.append(("links are 10 % faster", faster))
    if costs.shares_cores(min(request.ranks)):
        out.append(("a core for every rank", priced(cores=None)))
    out.append(("one more microbatch", replace(request, m=request.m + 1)))
    out.append(("twice the microbatches", replace(request, m=2 * request.m)))
    if request.in_flight is not None:
        for step in (1, -1):
            more = _each(request.in_flight, plus=step)
            if more is not None:
                word = "more" if step > 0 else "less"
                out.append((f"one {word} in flight per rank", replace(request, in_flight=more)))
    if request.memory is not None:
        gigabyte = quotient(*map(Fraction, (SIZES["GB"], SIZES[costs.bytes.unit])))
        memory = request.memory
        if (min(memory) if isinstance(memory, tuple) else memory) >= gigabyte:
            more = _each(memory, plus=gigabyte)
            out.append(("1 GB more per rank", replace(request, memory=more)))
        out.append(("10 % more memory", replace(request, memory=_each(memory, times=1.1))))
    return out


def _moved(found: Plan) -> list[tuple[str, Number | None, int]]:
    """One layer moved between neighbouring stages, the order kept: the best three of them."""
    request, made, sizes = found.request, found.schedule, found.layers
    if not sizes:
        return []
    pricing, split = Pricing(request), made.has_split_backward
    levels = {level.name: level for level in (NONE, *request.recompute)}
    if found.recompute:
        pricing.levels[made.placement.paths, split] = tuple(levels[x] for x in found.recompute)
    rows: list[tuple[str, Number | None, int]] = []
    for cut in shifted(sizes):
        a, b = (next(i for i, x in enumerate(cut) if x - sizes[i] == d) for d in (-1, 1))
        if abs(a - b) != 1:
            continue
        pricing.cuts[made.placement.paths, split] = cut
        costs = pricing.costs(made.placement, split)
        timeline = simulate(made, costs)
        if not over(request, timeline):
            value = measure(timeline, costs, request.objective)
            rows.append((f"a layer of stage {a} in stage {b}", value, request.m))
    return sorted(rows, key=lambda row: float(row[1] or 0))[:3]


def _each(limit: Limit, *, plus: Number = 0, times: Number = 1) -> Limit:
    """A limit with every number changed; None where one is not above 0 then."""
    if limit is None:
        return None
    values = tuple(x * times + plus for x in (limit if isinstance(limit, tuple) else (limit,)))
    if min(values) <= 0:
        return None
    return values if isinstance(limit, tuple) else values[0]


class Varied(NamedTuple):
    """One order when times vary: exact makespan, mean and 95th percentile of the samples."""

    name: str
    makespan: Number
    mean: float
    high: float


@dataclass(frozen=True, eq=False)
class Robustness:
    """The best orders when each action's time varies; `best` has the least mean makespan."""

    spread: float
    rows: tuple[Varied, ...]
    best: Schedule

    def as_json(self) -> dict[str, Any]:
        """The rows, and which order is best."""
        return {
            "spread": self.spread, "best": self.rows[0].name,
            "rows": [{k: plain(v) for k, v in r._asdict().items()} for r in self.rows],
        }  # fmt: skip

    def __str__(self) -> str:
        rows = [
            {"when times vary by " + f"{self.spread:.0%}": r.name, "makespan": r.makespan,
             "mean": r.mean, "95 %": r.high}
            for r in self.rows
        ]  # fmt: skip
        return table(rows, list(rows[0]))


def jittered(found: Plan, spread: float, *, samples: int = 500, seed: int = 0) -> Robustness:
    """How the plan's best orders fare when every action's time varies at random.

    spread: standard deviation of an action's time as a share of it.
    """
    tried = []
    for name, schedule, costs in found.finalists:
        got = simulate_jitter(schedule, costs, samples=samples, spread=spread, seed=seed)
        mean, high = float(np.mean(got.makespan)), float(np.quantile(got.makespan, 0.95))
        exact = simulate_jitter(schedule, costs, samples=1, spread=0.0).makespan[0]
        tried.append((Varied(name, float(exact), mean, high), schedule))
    tried.sort(key=lambda x: x[0].mean)
    return Robustness(spread, tuple(x for x, _ in tried), tried[0][1])
