"""One timeline as text and JSON."""

from __future__ import annotations

from typing import Any

from hocket.costs import Costs
from hocket.costs.scaling import per_of
from hocket.search.bounds import Bound, lower_bounds
from hocket.tables import format_bytes, format_time, in_one_unit, plain, table
from hocket.timeline import PHASES, Gap, RankSummary, Timeline

_PATH_SHOWN = 24


def bound_of(timeline: Timeline, costs: Costs) -> Bound:
    """The best lower bound of the makespan."""
    return max(lower_bounds(timeline.schedule, costs), key=lambda b: b.value)


def as_json(timeline: Timeline, costs: Costs, *, why: bool = False) -> dict[str, Any]:
    """The contract of `simulate --json`: times in `unit`, bytes in the unit they were given in.

    peak_in_flight: microbatches of a rank's full share of the model; per: what the costs are per;
    gaps: with `why`.
    """
    s = timeline.schedule
    bound = bound_of(timeline, costs)
    return {
        "schedule": s.name,
        "p": s.p,
        "m": s.m // s.placement.slices,
        "unit": timeline.unit,
        "per": per_of(costs, s.placement),
        "makespan": plain(timeline.makespan),
        "span": plain(timeline.span),
        "bubble_ratio": timeline.bubble_ratio,
        "lower_bound": plain(bound.value),
        "lower_bound_argument": bound.argument,
        "weights": s.placement.weight_copies,
        "ranks": [
            _rank_json(*x) for x in zip(timeline.ranks, timeline.in_flight, strict=True)
        ],
        "critical_path": [
            {"queue": str(x.queue), "slot": str(x.slot), "start": plain(x.start),
             "end": plain(x.end), "after": x.after}
            for x in timeline.critical_path()
        ],
        **({"gaps": [_gap_json(gap) for gap in _gaps(timeline)]} if why else {}),
    }  # fmt: skip


def _gaps(timeline: Timeline) -> list[Gap]:
    return [gap for queue in timeline.schedule.queues for gap in timeline.gaps(queue)]


def _gap_json(gap: Gap) -> dict[str, Any]:
    out = {key: None if x is None else str(x) for key, x in gap._asdict().items()}
    return out | {"start": plain(gap.start), "end": plain(gap.end), "why": str(gap)}


def _rank_json(r: RankSummary, in_flight: Any) -> dict[str, Any]:
    out = {k: plain(v) for k, v in r._asdict().items()} | {"peak_in_flight": plain(in_flight)}
    for key in ("waits", "bubble"):
        out[key] = {k: plain(v) for k, v in out[key].items()}
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
        rank_table(timeline),
        "",
        _path_text(timeline),
    ]
    if why:
        out += ["", "idle:", *_gap_lines(timeline)]
    return "\n".join(out)


def rank_table(timeline: Timeline, *columns: str) -> str:
    """One row per rank: when it works, its idle time by phase, and its peaks of memory.

    columns: of these names; left out: all.
    """
    times = ["start", "end", "busy", "transfer", "idle", *PHASES]
    sizes = timeline.bytes
    rows = [
        {
            "rank": r.rank, "start": r.start, "end": r.end, "busy": r.busy,
            "transfer": r.transfer, "idle": r.idle, **r.bubble, "in flight": in_flight,
            "memory": format_bytes(r.peak_bytes, sizes.unit),
        }
        for r, in_flight in zip(timeline.ranks, timeline.in_flight, strict=True)
    ]  # fmt: skip
    rows, unit = in_one_unit(rows, times, timeline.unit)
    drop = set() if any(r.transfer for r in timeline.ranks) else {"transfer"}
    drop |= set() if sizes else {"memory"}
    text = table(rows, [c for c in columns or rows[0] if c not in drop])
    return text + (f"\n(times in {unit})" if unit else "")


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
    for gap in _gaps(timeline):
        at = " to ".join(format_time(x, timeline.unit) for x in (gap.start, gap.end))
        out.append(f"  rank {gap.queue}, {at}, {gap.phase}: {gap}")
    return out
