"""A timeline, or several, told in text and JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from hocket.costs import Bytes, Costs, Number
from hocket.errors import UsageError
from hocket.ir import Schedule
from hocket.schedules import build, closed_form, entries, entry, settings_of
from hocket.search.bounds import Bound, lower_bounds
from hocket.simulator import simulate
from hocket.tables import format_time, table
from hocket.timeline import PHASES, RankSummary, Timeline

if TYPE_CHECKING:
    from hocket.render.pareto import Point

_PATH_SHOWN = 24


def plain(value: Any) -> Any:
    """A number that JSON knows: fractions as floats."""
    return float(value) if isinstance(value, Fraction) else value


def bound_of(timeline: Timeline, costs: Costs) -> Bound:
    """The best lower bound of the makespan."""
    return max(lower_bounds(timeline.schedule, costs), key=lambda b: b.value)


def as_json(timeline: Timeline, costs: Costs) -> dict[str, Any]:
    """The contract of `simulate --json`: times in `unit`, bytes in the unit they were given in."""
    s = timeline.schedule
    bound = bound_of(timeline, costs)
    return {
        "schedule": s.name,
        "p": s.p,
        "m": s.m // s.placement.slices,
        "unit": timeline.unit,
        "makespan": plain(timeline.makespan),
        "span": plain(timeline.span),
        "bubble_ratio": timeline.bubble_ratio,
        "lower_bound": plain(bound.value),
        "lower_bound_argument": bound.argument,
        "weights": s.placement.weight_copies,
        "ranks": [_rank_json(r) for r in timeline.ranks],
        "critical_path": [
            {"queue": str(x.queue), "slot": str(x.slot), "start": plain(x.start),
             "end": plain(x.end), "after": x.after}
            for x in timeline.critical_path()
        ],
    }  # fmt: skip


def _rank_json(r: RankSummary) -> dict[str, Any]:
    out = {k: plain(v) for k, v in r._asdict().items() if not isinstance(v, dict)}
    out["waits"] = {k: plain(v) for k, v in r.waits.items()}
    out["bubble"] = {k: plain(v) for k, v in r.bubble.items()}
    return out


def as_text(timeline: Timeline, costs: Costs, *, why: bool = False) -> str:
    """The timeline for a reader: the whole, each rank, the critical path, the gaps."""
    s, unit = timeline.schedule, timeline.unit
    bound = bound_of(timeline, costs)
    above = float(timeline.makespan) / float(bound.value) - 1 if bound.value else 0.0
    above = max(above, 0.0)  # rounding of floats
    out = [
        f"{s.name}: p={s.p} m={s.m // s.placement.slices}"
        + (f" in {s.placement.slices} slices" if s.placement.slices > 1 else ""),
        f"makespan {format_time(timeline.makespan, unit)}, "
        f"span {format_time(timeline.span, unit)}, bubble {timeline.bubble_ratio:.1%}",
        f"lower bound {format_time(bound.value, unit)} ({bound.argument}); "
        f"this order is {above:.1%} above it",
        "",
        _rank_table(timeline),
        "",
        _path_text(timeline),
    ]
    if why:
        out += ["", "idle:", *_gap_lines(timeline)]
    return "\n".join(out)


def _rank_table(timeline: Timeline) -> str:
    columns = ["rank", "start", "end", "busy", "transfer", "idle", *PHASES, "in flight", "bytes"]
    drop = set()
    if not any(r.transfer for r in timeline.ranks):
        drop.add("transfer")
    if timeline.bytes == Bytes():
        drop.add("bytes")
    rows = [
        {
            "rank": r.rank, "start": r.start, "end": r.end, "busy": r.busy,
            "transfer": r.transfer, "idle": r.idle, **r.bubble,
            "in flight": r.peak_in_flight, "bytes": r.peak_bytes,
        }
        for r in timeline.ranks
    ]  # fmt: skip
    return table(rows, [c for c in columns if c not in drop])


def _path_text(timeline: Timeline) -> str:
    steps = timeline.critical_path()
    words = [f"{x.slot}{'' if x.after == 'queue' else '*' if x.after == 'message' else ''}"
             for x in steps]  # fmt: skip
    hops = sum(x.after == "message" for x in steps)
    if len(words) > _PATH_SHOWN:
        half = _PATH_SHOWN // 2
        words = [*words[:half], f"... {len(words) - 2 * half} more ...", *words[-half:]]
    return f"critical path, {len(steps)} slots, {hops} after waiting for another (*): " + " ".join(
        words
    )


def _gap_lines(timeline: Timeline) -> list[str]:
    out = []
    for queue in timeline.schedule.queues:
        for gap in timeline.gaps(queue):
            at = f"{format_time(gap.start)} to {format_time(gap.end, timeline.unit)}"
            out.append(f"  rank {queue}, {at}, {gap.phase}: {gap}")
    return out


# --- compare -----------------------------------------------------------------------------------


class Competitor(NamedTuple):
    """One schedule to compare, with its published formula if there is one.

    `formula` gives the value under costs per stage, None where it does not apply.
    """

    label: str
    schedule: Schedule
    formula: Callable[[Costs], Number | None] | None = None


class Row(NamedTuple):
    """One schedule of a comparison; in_flight in microbatches of 1/p of the model.

    formula: the published closed form's value, "does not apply", or None if there is none.
    """

    schedule: str
    v: int
    makespan: Number
    span: Number
    bubble_ratio: float
    in_flight: float
    peak_bytes: float
    weights: float
    formula: Number | str | None


class Comparison(NamedTuple):
    """Rows by makespan, and what was left out and why."""

    rows: list[Row]
    left_out: list[tuple[str, str]]
    unit: str
    has_bytes: bool

    def as_json(self) -> dict[str, Any]:
        """The contract of `compare --json`."""
        return {
            "unit": self.unit,
            "rows": [{k: plain(v) for k, v in r._asdict().items()} for r in self.rows],
            "left_out": [{"schedule": name, "reason": why} for name, why in self.left_out],
        }

    def points(self) -> tuple[list[Point], str]:
        """Each row as a point of bubble against memory, and what the axis of memory counts.

        Memory is that of the fullest rank: bytes where the costs have them, else in flight.
        """
        from hocket.render.pareto import Point

        if not self.has_bytes:
            points = [Point(r.schedule, r.bubble_ratio, r.in_flight) for r in self.rows]
            return points, "microbatches in flight"
        most = max((r.peak_bytes for r in self.rows), default=0)
        scales = (("billions", 1e9), ("millions", 1e6), ("thousands", 1e3))
        name, scale = next((one for one in scales if most >= one[1]), ("", 1))
        points = [Point(r.schedule, r.bubble_ratio, r.peak_bytes / scale) for r in self.rows]
        return points, f"bytes ({name})" if name else "bytes"

    def __str__(self) -> str:
        rows = [
            {
                "schedule": r.schedule, "v": r.v, "makespan": r.makespan, "span": r.span,
                "formula": r.formula, "bubble": f"{r.bubble_ratio:.1%}",
                "in flight": r.in_flight, "bytes": r.peak_bytes, "weights": f"{r.weights:g}x",
            }
            for r in self.rows
        ]  # fmt: skip
        columns = ["schedule", "v", "makespan", "span", "formula", "bubble", "in flight"]
        columns += ["bytes", "weights"] if self.has_bytes else ["weights"]
        unit = f" in {self.unit}" if self.unit else ""
        notes = [
            f"times{unit}; costs are those of 1/p of the model, a stage of v takes 1/v of them;",
            "in flight: the fullest rank, in microbatches of 1/p of the model;",
            "formula: the published closed form (for zb-h2 of the span), where it applies",
        ]
        notes += [f"left out: {why}" for _, why in self.left_out]
        return "\n".join([table(rows, columns), "", *notes])


def competitor(
    label: str, name: str, *, p: int, m: int, v: int | None = None, **options: Any
) -> Competitor:
    """A registered schedule with its formula.

    Raises: UsageError where it does not fit.
    """
    found = entry(name)
    settings = settings_of(found, p, m, v, options)
    formula = None if found.formula is None else partial(closed_form, found, settings)
    return Competitor(label, build(name, p=p, m=m, v=v, **options), formula)


def all_that_fit(
    p: int, m: int, v: int | None = None
) -> tuple[list[Competitor], list[tuple[str, str]]]:
    """Every registered schedule at these sizes, and (name, why) of those left out.

    v is for those that take it. Schedules of phases are another thing: their costs are those of
    phases, so they are left out.
    """
    fitting, left_out = [], []
    for found in entries():
        try:
            one = competitor(found.name, found.name, p=p, m=m, v=v if found.takes_v else None)
        except UsageError as error:
            left_out.append((found.name, str(error)))
            continue
        if any(queue.stream for queue in one.schedule.queues):
            why = f"{found.name} cuts stages into phases on two queues; name it to compare it"
            left_out.append((found.name, why))
        else:
            fitting.append(one)
    return fitting, left_out


def compare(
    competitors: Sequence[Competitor], costs: Costs, left_out: Sequence[tuple[str, str]] = ()
) -> Comparison:
    """Every schedule under the same costs of 1/p of the model, best makespan first."""
    rows = sorted(
        (_row(c, costs) for c in competitors),
        key=lambda r: (r.makespan, r.weights, r.in_flight, r.schedule),
    )
    return Comparison(rows, list(left_out), costs.unit, costs.bytes != Bytes())


def costs_of(schedule: Schedule, costs: Costs) -> Costs:
    """The costs of each stage of a schedule, from those of 1/p of the model."""
    v = max(1, schedule.placement.n_stages // schedule.p)
    phased = any(queue.stream for queue in schedule.queues)  # its costs are given by phase
    return costs.split(1 if phased else v, schedule.placement.slices)


def _row(competitor: Competitor, costs: Costs) -> Row:
    schedule = competitor.schedule
    v = max(1, schedule.placement.n_stages // schedule.p)
    costs = costs_of(schedule, costs)
    timeline = simulate(schedule, costs)
    return Row(
        schedule=competitor.label,
        v=v,
        makespan=timeline.makespan,
        span=timeline.span,
        bubble_ratio=timeline.bubble_ratio,
        in_flight=timeline.in_flight(v),
        peak_bytes=max(r.peak_bytes for r in timeline.ranks),
        weights=schedule.placement.weight_copies,
        formula=_formula(competitor, costs),
    )


def _formula(competitor: Competitor, costs: Costs) -> Number | str | None:
    if competitor.formula is None:
        return None
    value = competitor.formula(costs)
    return "does not apply" if value is None else value


__all__ = [
    "Comparison",
    "Competitor",
    "Row",
    "all_that_fit",
    "as_json",
    "as_text",
    "bound_of",
    "compare",
    "competitor",
    "costs_of",
]
