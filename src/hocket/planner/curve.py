"""The time that each memory limit allows: one plan a limit, each from the orders before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

from hocket.costs import Number
from hocket.errors import PlanError, UsageError
from hocket.ir import Schedule
from hocket.planner.planning import Progress, Watcher, plan
from hocket.planner.request import Plan, Request
from hocket.planner.variants import named
from hocket.search.bounds import Bound
from hocket.tables import format_bytes, format_time, plain, table

LIMITS = ("in_flight", "memory")
SECONDS = 300.0  # of a whole curve, where nothing is said
_WIDTH = 40  # characters of the drawing
_FOR_NAMES = 0.1  # of the time after which no more options of registered schedules are made
_LEAST = 2.0  # seconds without a better order after which the next limit's turn comes
_PATIENCE = 0.4  # or this share of the time that a limit has


class Point(NamedTuple):
    """What one limit allows: the objective's value, its bound, and the schedule; None: nothing.

    proven: nothing that was allowed can be better.
    """

    limit: Number
    value: Number | None
    bound: Number | None
    argument: str
    name: str
    found_by: str
    schedule: Schedule | None
    proven: bool = False


@dataclass(frozen=True)
class Curve:
    """Points by limit; no larger limit takes longer. what: a name of LIMITS; sizes: bytes' unit."""

    what: str
    objective: str
    unit: str
    points: tuple[Point, ...]
    seconds: float
    missing: tuple[Number, ...] = ()
    sizes: str = "B"

    def as_json(self) -> dict[str, Any]:
        """The contract of `plan --curve --json`."""
        rows = [
            {k: plain(x) for k, x in p._asdict().items() if k != "schedule"} for p in self.points
        ]
        return {
            "limit": self.what, "objective": self.objective, "unit": self.unit, "points": rows,
            "missing": [plain(x) for x in self.missing], "seconds": self.seconds,
        }  # fmt: skip

    def _limit(self, limit: Number) -> str:
        return format_time(limit) if self.what == "in_flight" else format_bytes(limit, self.sizes)

    def __str__(self) -> str:
        word = self.what.replace("_", " ")
        drawn = dict(zip(self.points, _drawn(self.points), strict=True))
        rows = [
            {
                word: self._limit(p.limit), self.objective: _told(p.value, self.unit),
                "bound": _told(p.bound, self.unit), "gap": _gap(p), "schedule": p.name,
                "bound |, time *": drawn[p],
            }
            for p in self.points
        ]  # fmt: skip
        out = [table(rows, [word, self.objective, "bound", "gap", "schedule", "bound |, time *"])]
        if self.missing:
            left = ", ".join(map(self._limit, self.missing))
            out.append(f"ended before the limits {left}")
        out.append(f"{self.seconds:.1f} s")
        return "\n\n".join(out)


def curve(
    request: Request,
    what: str,
    limits: Sequence[Number],
    *,
    progress: Callable[[Progress], None] | None = None,
) -> Curve:
    """The best time under each limit of every rank; `request.time_limit` is for all of them.

    An order that fits a limit fits every larger one and competes there, so no larger limit takes
    longer; afterwards it is offered to every smaller one. Ctrl-C ends it with the points so far.

    what: "in_flight" or "memory". Raises: UsageError; PlanError where nothing fits any limit.
    """
    if what not in LIMITS:
        raise UsageError(f"a curve is over in-flight or memory, not {what!r}")
    if what == "memory" and not request.costs.bytes:
        raise UsageError("a curve over memory needs costs with bytes; these have none")
    began = time.monotonic()
    wanted = sorted(set(limits))
    for limit in wanted:  # before the first takes its time
        _limited(request, what, limit, request.time_limit)
    plans: list[Plan | None] = []
    error: PlanError | None = None
    named_ones = _named(request, began) if request.named else []
    request = replace(request, named=False)
    for i, limit in enumerate(wanted):
        left = request.time_limit - (time.monotonic() - began)
        share = max(0.1, left / (len(wanted) - i))
        asked = _limited(request, what, limit, share)
        try:
            plans.append(plan(asked, known=named_ones + _last(plans), progress=progress))
        except PlanError as failed:
            error = failed
            plans.append(None)
        except KeyboardInterrupt:
            break
        done = plans[-1]
        if done is not None and done.interrupted:
            break
    if error is not None and not any(plans):
        raise error
    if not plans:
        raise KeyboardInterrupt
    _offered(request, what, wanted, plans)
    return Curve(
        what, request.objective, request.costs.unit,
        tuple(_point(x, p) for x, p in zip(wanted, plans, strict=False)),
        time.monotonic() - began, tuple(wanted[len(plans) :]), request.costs.bytes.unit,
    )  # fmt: skip


def _limited(request: Request, what: str, limit: Number, seconds: float) -> Request:
    """The request at one limit, of which search and solver take so long together."""
    seconds /= 1 + request.solver
    patience = max(_LEAST, seconds * _PATIENCE)
    changed: dict[str, Any] = {name: None for name in LIMITS} | {what: limit}
    return replace(
        request, **changed, time_limit=seconds, patience=patience,
        solver_time=min(request.solver_time, seconds),
    )  # fmt: skip


def _named(request: Request, began: float) -> list[tuple[str, Schedule]]:
    """The registered schedules, made once for all limits."""
    out: list[tuple[str, Schedule]] = []
    late = began + request.time_limit * _FOR_NAMES
    for name, _, _, made in named(request, lambda: time.monotonic() > late):
        if isinstance(made, Schedule):
            out.append((name, made))
    return out


def _last(plans: Sequence[Plan | None]) -> list[tuple[str, Schedule]]:
    """The last plans' best orders, to begin from."""
    last = [p for p in plans if p is not None][-1:]
    return [("the order of a smaller limit", made) for p in last for _, made, _ in p.finalists]


def _offered(
    request: Request, what: str, wanted: Sequence[Number], plans: list[Plan | None]
) -> None:
    """Puts an order found for a larger limit where it fits a smaller one and is faster there."""
    for i in range(len(plans) - 2, -1, -1):
        mine, larger = plans[i], plans[i + 1]
        if larger is None or (mine is not None and mine.value <= larger.value):
            continue
        asked = replace(_limited(request, what, wanted[i], 1.0), search=False)
        try:
            now = plan(asked, known=[("the order of a larger limit", larger.schedule)])
        except PlanError:
            continue
        if mine is None or now.value < mine.value:
            plans[i] = now


def _point(limit: Number, found: Plan | None) -> Point:
    if found is None:
        return Point(limit, None, None, "", "nothing fits", "", None)
    bound: Bound = found.floor
    paths = found.schedule.placement.paths
    shape = f"{found.schedule.name}, {len(paths[0]) // found.schedule.p} stages per rank"
    return Point(
        limit, found.value, bound.value, bound.argument, shape, found.found_by, found.schedule,
        found.proven,
    )  # fmt: skip


def _told(value: Number | None, unit: str) -> str:
    return "" if value is None else format_time(value, unit)


def _gap(point: Point) -> str:
    if point.value is None or not point.bound:
        return ""
    above = float(point.value) / float(point.bound) - 1
    if above > 0:
        return f"{above:.2%}"
    return "optimal" if point.proven else "bound met"


def _drawn(points: Sequence[Point]) -> Iterator[str]:
    """Each point's bound and time on one scale, from the least bound to the longest time."""
    low = min((float(p.bound) for p in points if p.bound is not None), default=0.0)
    high = max((float(p.value) for p in points if p.value is not None), default=1.0)
    scale = (_WIDTH - 1) / (high - low) if high > low else 0.0
    for p in points:
        if p.value is None or p.bound is None:
            yield ""
            continue
        a, b = round((float(p.bound) - low) * scale), round((float(p.value) - low) * scale)
        yield " " * a + ("*" if a == b else "|" + "-" * (b - a - 1) + "*")


def spread(first: Number, last: Number, count: int) -> tuple[Number, ...]:
    """That many limits from the first to the last, equally far apart; whole where they are."""
    if count < 2 or not 0 < first < last:
        raise UsageError(
            f"a curve from {first:g} to {last:g} of {count} limits: needs 0 < from < to, "
            f"and 2 limits or more"
        )
    out = []
    for i in range(count):
        x = Fraction(first) + Fraction(Fraction(last) - Fraction(first)) * i / (count - 1)
        out.append(int(x) if x.denominator == 1 else float(x))
    return tuple(out)


__all__ = ["SECONDS", "Curve", "Point", "Watcher", "curve", "spread"]
