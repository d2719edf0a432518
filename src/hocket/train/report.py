"""Predicted next to measured: per rank where the difference comes from, as data and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from hocket.ir import Queue, Schedule
from hocket.lower.slots import forwards_first
from hocket.measured import timeline_of
from hocket.measured.readings import SECONDS
from hocket.tables import table
from hocket.timeline import Timeline

PARTS = ("work", "waiting", "transfers", "end")
SMALL = 0.01  # of the step: below this a difference is not explained


def one_by_one(schedule: Schedule) -> Schedule:
    """The order as the executor runs it: every action a slot of its own, forwards first.

    So the forward's result of a fused slot leaves before the slot's backward starts.
    """
    s = forwards_first(schedule)
    return replace(s, slots=np.arange(len(s.codes) + 1), starts=s.slots[s.starts])


def flat(measured: Timeline) -> Timeline:
    """The measured timeline with every action a slot of its own."""
    schedule = one_by_one(measured.schedule)
    return timeline_of(schedule, measured.start, measured.end, unit=measured.unit)


def comparison(predicted: Timeline, measured: Timeline) -> dict[str, Any]:
    """Both step times in ms and per rank their parts; `why` says what made the difference.

    work: time in actions. waiting: for what other ranks have not finished. transfers: messages
    under way, and what passes between actions. end: when the rank has nothing left to do, from
    the step's first start on; the sum of the other three.
    """
    step = milliseconds(measured) * float(measured.makespan)
    ours, theirs = milliseconds(predicted) * float(predicted.makespan), step
    ranks = []
    for rank in range(predicted.schedule.p):
        a, b = _parts(predicted, rank), _parts(measured, rank)
        difference = {key: b[key] - a[key] for key in PARTS}
        ranks.append({
            "rank": rank, "predicted": a, "measured": b, "difference": difference,
            "why": _why(predicted, measured, rank, difference, SMALL * step),
        })  # fmt: skip
    return {
        "unit": "ms",
        "predicted": ours,
        "measured": theirs,
        "difference": theirs / ours - 1 if ours else 0.0,
        "ranks": ranks,
    }


def comparison_text(data: Mapping[str, Any]) -> str:
    """The comparison as a table of three lines per rank, and one sentence a rank below it."""
    rows = []
    for row in data["ranks"]:
        for name in ("predicted", "measured", "difference"):
            form = "{:+.1f}" if name == "difference" else "{:.1f}"
            rows.append([
                str(row["rank"]) if name == "predicted" else "",
                name,
                *(form.format(row[name][key]) for key in PARTS),
            ])  # fmt: skip
    head = (
        f"step: predicted {data['predicted']:.1f} ms, measured {data['measured']:.1f} ms "
        f"({data['difference']:+.1%})"
    )
    whys = "\n".join(f"rank {row['rank']}: {row['why']}" for row in data["ranks"])
    return f"{head}\n\n{table(rows, ['rank', 'ms', *PARTS])}\n\n{whys}"


def milliseconds(timeline: Timeline) -> float:
    """How many ms the timeline's unit has; a unit that is no time counts as one."""
    return SECONDS.get(timeline.unit, 1e-3) * 1e3


def _queues(timeline: Timeline, rank: int) -> list[Queue]:
    return [q for q in timeline.schedule.queues if q.rank == rank]


def _parts(timeline: Timeline, rank: int) -> dict[str, float]:
    summary, ms = timeline.ranks[rank], milliseconds(timeline)
    return {
        "work": float(summary.busy) * ms,
        "waiting": float(summary.waits["dependency"]) * ms,
        "transfers": float(summary.waits["transfer"] + summary.transfer) * ms,
        "end": float(summary.end) * ms,
    }


def _why(
    predicted: Timeline,
    measured: Timeline,
    rank: int,
    difference: Mapping[str, float],
    small: float,
) -> str:
    """One phrase for the largest parts of a rank's difference."""
    if all(abs(difference[key]) < small for key in PARTS):
        return "as predicted"
    causes = {
        "work": lambda: _work(predicted, measured, rank, difference["work"]),
        "waiting": lambda: _gap(predicted, measured, rank, "dependency", difference["waiting"]),
        "transfers": lambda: _gap(predicted, measured, rank, "transfer", difference["transfers"]),
    }
    largest = sorted(causes, key=lambda key: -abs(difference[key]))
    told = [key for key in largest[:2] if abs(difference[key]) >= small]
    return "; ".join(causes[key]() for key in told)


def _work(predicted: Timeline, measured: Timeline, rank: int, total: float) -> str:
    a, b = _durations(predicted, rank), _durations(measured, rank)
    word = "slower" if total > 0 else "faster"
    name, most = _most({k: b[k] - a[k] for k in a.keys() & b.keys()}, total)
    return f"{word} actions, most {name} {most:+.1f}" if name else f"{word} actions"


def _durations(timeline: Timeline, rank: int) -> dict[str, float]:
    s, ms = timeline.schedule, milliseconds(timeline)
    out: dict[str, float] = {}
    for i in np.flatnonzero(timeline.computes).tolist():
        if s.queues[s.queue_of_slot[i]].rank == rank:
            ticks = timeline.slot_end[i] - timeline.slot_start[i]
            out[str(s.slot(i))] = float(timeline.ticks.value(ticks)) * ms
    return out


def _gap(predicted: Timeline, measured: Timeline, rank: int, cause: str, total: float) -> str:
    a, b = _gaps(predicted, rank, cause), _gaps(measured, rank, cause)
    changes = {k: b.get(k, (0.0, ""))[0] - a.get(k, (0.0, ""))[0] for k in a.keys() | b.keys()}
    name, most = _most(changes, total)
    if not name:
        return "elsewhere"
    word = "longer" if total > 0 else "shorter"
    if cause == "transfer":
        return f"{word} between actions, most before {name} {most:+.1f}"
    source = b[name][1] if name in b else a[name][1]
    return f"waits {word}, most {name}{source} {most:+.1f}"


def _gaps(timeline: Timeline, rank: int, cause: str) -> dict[str, tuple[float, str]]:
    """Slot -> (length of the gap before it, what it waits for)."""
    out: dict[str, tuple[float, str]] = {}
    ms = milliseconds(timeline)
    for queue in _queues(timeline, rank):
        for gap in timeline.gaps(queue):
            if gap.cause == cause and gap.before is not None:
                source = "" if gap.waits_for is None else f" for {gap.waits_for}"
                where = "" if gap.waits_on is None else f" on rank {gap.waits_on}"
                out[str(gap.before)] = (float(gap.end - gap.start) * ms, source + where)
    return out


def _most(changes: Mapping[str, float], total: float) -> tuple[str, float]:
    """The entry that moves furthest in the direction of the total."""
    sign = 1 if total > 0 else -1
    name = max(changes, key=lambda k: (sign * changes[k], k), default="")
    return name, changes.get(name, 0.0)
