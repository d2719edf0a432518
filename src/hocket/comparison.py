"""Several schedules under the same costs: as a table, as a chart, and what a change did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from hocket.costs import Costs, Number, fitted_together
from hocket.costs.scaling import per_of
from hocket.errors import UsageError
from hocket.explanation import ROUNDING, path_time
from hocket.ir import Schedule
from hocket.recognise import Difference, first_difference, renumbered
from hocket.schedules import build, closed_form, entries, entry, settings_of
from hocket.simulator import simulate
from hocket.tables import SIZES, format_bytes, format_time, in_one_unit, plain, table

if TYPE_CHECKING:
    from hocket.render.pareto import Point

RANK = Costs(per="rank")


class Competitor(NamedTuple):
    """One schedule to compare, with its published formula if there is one.

    `formula` gives the value under costs per stage, None where it does not apply.
    """

    label: str
    schedule: Schedule
    formula: Callable[[Costs], Number | None] | None = None


class Row(NamedTuple):
    """One schedule of a comparison; in_flight in microbatches of a rank's full share.

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
    """Rows by makespan, and what was left out and why; `costs`: of all of them."""

    rows: list[Row]
    left_out: list[tuple[str, str]]
    costs: Costs
    per: str

    def as_json(self) -> dict[str, Any]:
        """The contract of `compare --json`."""
        return {
            "unit": self.costs.unit,
            "per": self.per,
            "rows": [{k: plain(v) for k, v in r._asdict().items()} for r in self.rows],
            "left_out": [{"schedule": name, "reason": why} for name, why in self.left_out],
        }

    def points(self) -> tuple[list[Point], str]:
        """Each row as a point of bubble against memory, and what the axis of memory counts.

        Memory is that of the fullest rank: bytes where the costs have them, else in flight.
        """
        from hocket.render.pareto import Point

        sizes = self.costs.bytes
        if not sizes:
            points = [Point(r.schedule, r.bubble_ratio, r.in_flight) for r in self.rows]
            return points, "microbatches in flight"
        most = max((r.peak_bytes for r in self.rows), default=0)
        unit = format_bytes(most, sizes.unit).split()[-1]
        scale = float(SIZES[sizes.unit] / SIZES[unit])
        points = [Point(r.schedule, r.bubble_ratio, r.peak_bytes * scale) for r in self.rows]
        return points, f"memory ({unit})"

    def __str__(self) -> str:
        sizes = self.costs.bytes
        rows = [
            {
                "schedule": r.schedule, "v": r.v, "makespan": r.makespan, "span": r.span,
                "formula": r.formula, "bubble": f"{r.bubble_ratio:.1%}",
                "in flight": r.in_flight, "memory": format_bytes(r.peak_bytes, sizes.unit),
                "weights": f"{r.weights:g}x",
            }
            for r in self.rows
        ]  # fmt: skip
        rows, unit = in_one_unit(rows, ["makespan", "span", "formula"], self.costs.unit)
        columns = ["schedule", "v", "makespan", "span", "formula", "bubble", "in flight"]
        columns += ["memory", "weights"] if sizes else ["weights"]
        notes = [
            f"times{f' in {unit}' if unit else ''}; {_MEANING[self.per]};",
            "in flight: peak activations on the fullest rank, in microbatches of a rank's full "
            "share;",
            "formula: the published closed form (for zb-h2 of the span), where it applies",
        ]
        notes += [f"left out: {why}" for _, why in self.left_out]
        return "\n".join([table(rows, columns), "", *notes])


_MEANING = {
    "rank": "costs are those of one rank's share of the model: with v stages per rank each takes "
    "1/v of them",
    "stage": "costs are those of each stage, as they are",
    "layer": "costs are those of layers, joined to stages",
}


def competitor(
    label: str, name: str, *, p: int, m: int, v: int | None = None, **options: Any
) -> Competitor:
    """A registered schedule with its formula.

    Raises: UsageError where it does not fit.
    """
    registered = entry(name)
    settings = settings_of(registered, p, m, v, options)
    formula = None if registered.formula is None else partial(closed_form, registered, settings)
    return Competitor(label, build(name, p=p, m=m, v=v, **options), formula)


def all_that_fit(
    p: int, m: int, v: int | None = None
) -> tuple[list[Competitor], list[tuple[str, str]]]:
    """Every registered schedule at these sizes, and (name, why) of those left out.

    v is for those that take it. Schedules of phases are another thing: their costs are those of
    phases, so they are left out.
    """
    fitting, left_out = [], []
    for registered in entries():
        name = registered.name
        try:
            one = competitor(name, name, p=p, m=m, v=v if registered.takes_v else None)
        except UsageError as error:
            left_out.append((name, str(error)))
            continue
        if any(queue.stream for queue in one.schedule.queues):
            why = f"{name} cuts stages into phases on two queues; name it to compare it"
            left_out.append((name, why))
        else:
            fitting.append(one)
    return fitting, left_out


def compare(
    competitors: Sequence[Competitor], costs: Costs, left_out: Sequence[tuple[str, str]] = ()
) -> Comparison:
    """Every schedule under the same costs of one model, best makespan first.

    Raises: CostError where the costs do not say what they are per and the answer depends on it, or
    are those of another model for each schedule.
    """
    placements = [c.schedule.placement for c in competitors]
    rows = sorted(
        (_row(*x) for x in zip(competitors, fitted_together(costs, placements), strict=True)),
        key=lambda r: (r.makespan, r.weights, r.in_flight, r.schedule),
    )
    per = next((per_of(costs, placement) for placement in placements), "rank")
    return Comparison(rows, list(left_out), costs, per)


def _row(competitor: Competitor, costs: Costs) -> Row:
    schedule, formula = competitor.schedule, competitor.formula
    timeline = simulate(schedule, costs)
    value = None if formula is None else formula(costs)
    return Row(
        schedule=competitor.label,
        v=max(1, int(schedule.placement.stages_per_rank)),
        makespan=timeline.makespan,
        span=timeline.span,
        bubble_ratio=timeline.bubble_ratio,
        in_flight=float(max(timeline.in_flight)),
        peak_bytes=max(timeline.peak_bytes),
        weights=schedule.placement.weight_copies,
        formula="does not apply" if value is None and formula is not None else value,
    )


# --- what a change did -------------------------------------------------------------------------


class Change(NamedTuple):
    """What became of one number."""

    before: Number
    after: Number

    @property
    def by(self) -> Number:
        """After minus before; 0 where they differ in the rounding of floats only."""
        change = self.after - self.before
        return 0 if abs(change) <= ROUNDING * max(abs(self.before), abs(self.after)) else change


class Diff(NamedTuple):
    """What a change of a schedule did, under the same costs.

    `peaks`, one per rank: memory in `sizes` where the costs have it, else microbatches in flight of
    a rank's full share (`sizes` is None). `path`: time on the critical path by kind, and "waiting".
    """

    names: tuple[str, str]
    unit: str
    per: str
    makespan: Change
    span: Change
    bubble_ratio: Change
    peaks: tuple[Change, ...]
    sizes: str | None
    path: dict[str, Change]
    first: Difference | None
    comparable: bool

    @property
    def peak(self) -> Change:
        """The fullest rank."""
        return Change(max(c.before for c in self.peaks), max(c.after for c in self.peaks))

    def _memory(self, value: Number) -> str:
        return format_time(value) if self.sizes is None else format_bytes(value, self.sizes)

    def _time(self, value: Number) -> str:
        return format_time(value, self.unit)

    def exceeded(
        self, *, max_makespan: Number | None = None, max_bytes: Number | None = None
    ) -> list[str]:
        """One sentence for each limit that the second schedule breaks; for an exit code."""
        out = []
        if max_makespan is not None and self.makespan.after > max_makespan:
            out.append(
                f"makespan is {self._time(self.makespan.after)}, "
                f"the limit {self._time(max_makespan)}"
            )
        what = " microbatches in flight" if self.sizes is None else ""
        if max_bytes is not None and self.peak.after > max_bytes:
            out.append(
                f"the peak is {self._memory(self.peak.after)}{what}, "
                f"the limit {self._memory(max_bytes)}"
            )
        return out

    def as_json(self) -> dict[str, Any]:
        """Plain data with stable keys; each number as {"before", "after"}."""

        def change(c: Change) -> dict[str, Any]:
            return {key: plain(x) for key, x in c._asdict().items()}

        return {
            "schedules": list(self.names), "unit": self.unit, "per": self.per,
            **{key: change(getattr(self, key)) for key in ("makespan", "span", "bubble_ratio")},
            "peak_in_flight" if self.sizes is None else "peak_bytes": [*map(change, self.peaks)],
            "critical_path": {key: change(c) for key, c in self.path.items()},
            "first_difference": None if self.first is None else str(self.first),
        }  # fmt: skip

    def __str__(self) -> str:
        before, after = self.names
        peak = "peak in flight" if self.sizes is None else "peak memory"
        lines = [
            f"{before} -> {after}",
            f"makespan: {_text(self.makespan, self._time)}",
            f"span: {_text(self.span, self._time)}",
            f"bubble: {self.bubble_ratio.before:.1%} -> {self.bubble_ratio.after:.1%}",
            f"{peak}, fullest rank: {_text(self.peak, self._memory)}",
        ]
        moved = [r for r, change in enumerate(self.peaks) if change.by]
        if moved:
            each = ", ".join(f"rank {r} {_text(self.peaks[r], self._memory)}" for r in moved[:8])
            lines.append(f"{peak}: {each}{', ...' if len(moved) > 8 else ''}")
        path = [f"{k} {_text(c, self._time)}" for k, c in self.path.items() if c.before or c.after]
        lines.append(f"critical path: {', '.join(path)}")
        if not self.comparable:
            lines.append("the two have different placements")
        elif self.first is not None:
            lines.append(f"first difference: {self.first}")
        else:
            lines.append("the orders are the same")
        return "\n".join(lines)


def _text(change: Change, show: Callable[[Number], str]) -> str:
    if not change.by:
        return f"{show(change.after)}, as before"
    sign = "+" if change.by > 0 else "-"
    part = f", {abs(float(change.by)) / float(change.before):.1%}" if change.before else ""
    return f"{show(change.before)} -> {show(change.after)} ({sign}{show(abs(change.by))}{part})"


def diff(a: Schedule, b: Schedule, costs: Costs = RANK) -> Diff:
    """What changes from schedule a to schedule b, as two partitions of one model.

    Raises: ScheduleError where one of them cannot run, CostError where the costs do not fit.
    """
    both = (a, b)
    priced = fitted_together(costs, [s.placement for s in both])
    times = [simulate(s, c) for s, c in zip(both, priced, strict=True)]
    one, other = times
    p = max(a.p, b.p)
    levels = [t.peak_bytes if costs.bytes else t.in_flight for t in times]
    peaks = zip(*([*x, *[0] * (p - len(x))] for x in levels), strict=True)
    paths = [path_time(t) for t in times]
    ours = renumbered(a, b)
    return Diff(
        names=(a.name, b.name),
        unit=costs.unit,
        per=per_of(costs, a.placement),
        makespan=Change(one.makespan, other.makespan),
        span=Change(one.span, other.span),
        bubble_ratio=Change(one.bubble_ratio, other.bubble_ratio),
        peaks=tuple(Change(*pair) for pair in peaks),
        sizes=costs.bytes.unit if costs.bytes else None,
        path={k: Change(*(x.get(k, 0) for x in paths)) for k in {**paths[0], **paths[1]}},
        first=first_difference(ours, b) if ours is not None else None,
        comparable=ours is not None and a.queues == b.queues,
    )
