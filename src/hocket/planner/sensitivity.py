"""What other settings would give, and how orders fare when times vary.

Imports planning, request, samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from hocket.costs import Number, quotient
from hocket.errors import HocketError
from hocket.ir import Schedule
from hocket.planner.planning import plan
from hocket.planner.report import plain
from hocket.planner.request import Limit, Plan, Request
from hocket.render.compare import format_time, table
from hocket.samples import simulate_jitter

_GIGABYTE = 10**9


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


def sensitivity(found: Plan, *, seconds: float = 2.0) -> Sensitivity:
    """What faster links, one microbatch more, and more or less memory would give.

    Each is planned again for the same placements, that many seconds each.
    """
    base = float(found.value) / found.request.m
    changes = []
    for what, request in _others(found.request):
        asked = replace(request, time_limit=seconds, solver=False, p=found.schedule.p)
        try:
            value: Number | None = plan(asked).value
        except HocketError:
            value = None
        each = None if value is None else float(value) / asked.m
        changes.append(Change(what, value, each, None if each is None else each / base - 1))
    return Sensitivity(tuple(changes), found.request.costs.unit)


def _others(request: Request) -> list[tuple[str, Request]]:
    out = []
    costs = request.costs
    if costs.latency or costs.bandwidth:
        faster = replace(
            costs, latency=quotient(costs.latency * 10, 11),
            bandwidth=None if costs.bandwidth is None else quotient(costs.bandwidth * 11, 10),
        )  # fmt: skip
        out.append(("links are 10 % faster", replace(request, costs=faster)))
    if costs.cores is not None and costs.cores < min(request.ranks):
        alone = replace(request, costs=replace(costs, cores=None))
        out.append(("a core for every rank", alone))
    if request.layers is None:
        out.append(("one more microbatch", replace(request, m=request.m + 1)))
        out.append(("twice the microbatches", replace(request, m=2 * request.m)))
    if request.in_flight is not None:
        for step in (1, -1):
            more = _plus(request.in_flight, step)
            if more is not None:
                word = "more" if step > 0 else "less"
                out.append((f"one {word} in flight a rank", replace(request, in_flight=more)))
    if request.memory is not None:
        out.append((
            "1 GB more a rank", replace(request, memory=_plus(request.memory, _GIGABYTE))
        ))  # fmt: skip
        out.append(("10 % more memory", replace(request, memory=_times(request.memory, 1.1))))
    return out


def _plus(limit: Limit, step: Number) -> Limit:
    values = limit if isinstance(limit, tuple) else (limit,)
    sums = tuple(x + step for x in values if x is not None)
    if any(x <= 0 for x in sums):
        return None
    return sums if isinstance(limit, tuple) else sums[0]


def _times(limit: Limit, factor: float) -> Limit:
    if isinstance(limit, tuple):
        return tuple(x * factor for x in limit)
    return None if limit is None else limit * factor


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
    """How the plan's best orders fare when every action's time varies by chance.

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
