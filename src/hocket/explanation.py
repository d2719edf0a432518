"""Why a timeline is as long as it is, and what would help: in words, and as data.

Every "would" is a simulation; there is no rule here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

from hocket.costs import Costs, Number, fitted, per_stage, quotient, refitted
from hocket.costs.scaling import per_of
from hocket.deps import ROWS, TIMES, USERS
from hocket.errors import HocketError
from hocket.ir import Queue, Schedule, Slot
from hocket.recognise import is_quick
from hocket.schedules import Entry, build, entries
from hocket.simulator import simulate
from hocket.tables import format_bytes, format_time, in_one_unit, plain, table
from hocket.text import ranges
from hocket.timeline import CAUSES, PHASES, Gap, Timeline

ROUNDING = 1e-9  # a smaller part of a number is no change of it
TENTH = Fraction(9, 10)
MOST_GROUPS = 5  # causes told
MOST_STAGES = 12  # stages whose costs are varied: the heaviest of the critical path
MOST_GAINS = 8
MOST_OTHERS = 3

_CAUSE = {
    "dependency": "waiting for work elsewhere",
    "transfer": "waiting for messages under way",
    "end": "nothing left to do",
}


class Cause(NamedTuple):
    """Idle stretches that go back to one slot: had it ended earlier, all of them were shorter.

    root: the slot, None for queues that have nothing left to do. on: its queue.
    """

    root: Slot | None
    on: Queue | None
    idle: Number
    gaps: int
    ranks: tuple[int, ...]
    phases: dict[str, Number]
    first: Gap


class Gain(NamedTuple):
    """What the makespan would be with one cost changed."""

    change: str
    makespan: Number
    gain: Number


class Other(NamedTuple):
    """Another registered schedule under the same costs; `peak` as in `Explanation.limit`."""

    call: str
    makespan: Number
    peak: float
    weights: float
    fits: bool
    why: str


@dataclass(frozen=True)
class Explanation:
    """Everything that `hocket explain` says.

    `idle[phase][cause]`: idle time of all queues; `whole`: queues x makespan. `path`: time on the
    critical path by kind, `path_stages` by stage. `limit`: bytes of the fullest rank where the
    costs tell bytes, else its microbatches in flight (of a rank's full share).
    """

    timeline: Timeline
    whole: Number
    idle: dict[str, dict[str, Number]]
    causes: list[Cause]
    path: dict[str, Number]
    path_stages: dict[int, Number]
    hops: int
    gains: list[Gain]
    limit: float
    others: list[Other] | None
    per: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The contract of `explain --json`: times in `unit`."""
        t = self.timeline
        return {
            "schedule": t.schedule.name, "p": t.schedule.p, "unit": t.unit, "per": self.per,
            "makespan": plain(t.makespan), "bubble_ratio": t.bubble_ratio,
            "idle": {p: {c: plain(x) for c, x in row.items()} for p, row in self.idle.items()},
            "causes": [
                {
                    "root": None if c.root is None else str(c.root),
                    "queue": None if c.on is None else str(c.on),
                    "idle": plain(c.idle), "gaps": c.gaps, "ranks": list(c.ranks),
                    "phases": {k: plain(x) for k, x in c.phases.items()},
                }
                for c in self.causes
            ],
            "critical_path": {
                "by_kind": {k: plain(x) for k, x in self.path.items()},
                "by_stage": {str(k): plain(x) for k, x in self.path_stages.items()},
                "messages": self.hops,
            },
            "gains": [
                {"change": g.change, "makespan": plain(g.makespan), "gain": plain(g.gain)}
                for g in self.gains
            ],
            "memory_limit": self.limit,
            "others": None if self.others is None else [
                {k: plain(x) for k, x in o._asdict().items()} for o in self.others
            ],
        }  # fmt: skip

    @property
    def seen(self) -> str:
        """The part that needs no costs: where the bubble is, its causes, the critical path."""
        return "\n\n".join([self._where(), self._why(), self._path()])

    def __str__(self) -> str:
        parts = [self._head(), self.seen, self._would()]
        if self.others is not None:
            parts.append(self._else())
        return "\n\n".join(parts)

    # --- text ---------------------------------------------------------------------------

    def _time(self, value: Number) -> str:
        return format_time(value, self.timeline.unit)

    def _memory(self, value: float) -> str:
        if self.timeline.bytes:
            return format_bytes(value, self.timeline.bytes.unit)
        return f"{format_time(round(value, 2))} microbatches in flight"

    def _head(self) -> str:
        t, s = self.timeline, self.timeline.schedule
        return (
            f"{s.name}: p={s.p} m={s.m // s.placement.slices}, makespan {self._time(t.makespan)}, "
            f"bubble {t.bubble_ratio:.1%}"
        )

    def _where(self) -> str:
        total = sum(x for row in self.idle.values() for x in row.values())
        if not total:
            return "There is no bubble: no queue is ever idle."
        rows = []
        for phase in PHASES:
            of_phase = sum(self.idle[phase].values())
            part = f"{float(of_phase) / float(total):.0%}"
            causes = {_CAUSE[c]: self.idle[phase][c] for c in CAUSES}
            rows.append({"phase": phase, "idle": of_phase, "part": part, **causes})
        times = ["idle", *_CAUSE.values()]
        rows, unit = in_one_unit(rows, times, self.timeline.unit)
        part = float(total) / float(self.whole)
        return (
            f"Where the bubble is: {self._time(total)} of {self._time(self.whole)} "
            f"(queues x makespan, {part:.1%}){f'; times in {unit}' if unit else ''}\n"
            + table(rows, list(rows[0]))
        )

    def _why(self) -> str:
        total = sum(c.idle for c in self.causes)
        if not total:
            return "No gap to explain."
        lines = ["Gaps with one cause, longest together first:"]
        for cause in self.causes[:MOST_GROUPS]:
            lines.append(f"  {self._time(cause.idle)}, {_counted(cause)}: {_because(cause)}")
        rest = self.causes[MOST_GROUPS:]
        if rest:
            idle = self._time(sum(c.idle for c in rest))
            lines.append(f"  {idle} of {len(rest)} other causes")
        return "\n".join(lines)

    def _path(self) -> str:
        whole = float(self.timeline.makespan) or 1.0
        kinds = ", ".join(
            f"{'messages' if k == 'waiting' else k} {self._time(x)} ({float(x) / whole:.0%})"
            for k, x in sorted(self.path.items(), key=lambda kx: -kx[1])
        )
        most = sorted(self.path_stages.items(), key=lambda sx: (-sx[1], sx[0]))
        stages = ", ".join(f"stage {s} {self._time(x)}" for s, x in most[:4])
        more = f", {len(most) - 4} stages with less" if len(most) > 4 else ""
        return (
            f"The critical path: {kinds}; it crosses ranks {self.hops} times.\n"
            f"Most of it is in {stages}{more}."
        )

    def _would(self) -> str:
        found = [g for g in self.gains if g.gain > 0]
        if not found:
            return "No single cost tried would shorten the step."
        lines = ["What one change would gain (simulated, the order kept):"]
        rows = [
            [g.change, self._time(g.makespan), self._time(g.gain),
             f"{float(g.gain) / float(self.timeline.makespan):.1%}"]
            for g in found[:MOST_GAINS]
        ]  # fmt: skip
        lines.append(table(rows, ["change", "makespan", "gain", "part"]))
        useless = [g.change for g in self.gains if g.gain <= 0]
        if useless:
            more = f" and {len(useless) - 3} more" if len(useless) > 3 else ""
            lines.append(f"no gain: {', '.join(useless[:3])}{more}")
        return "\n".join(lines)

    def _else(self) -> str:
        head = f"Other schedules, on the fullest rank at most {self._memory(self.limit)}:"
        others = self.others or []
        good = [o for o in others if o.fits and o.makespan < self.timeline.makespan]
        lines = [f"  {o.call}: {self._time(o.makespan)}; {o.why}" for o in good[:MOST_OTHERS]]
        if not good:
            lines = ["  none of the registered ones is shorter"]
        faster = min(
            (o for o in others if not o.fits and o.makespan < self.timeline.makespan),
            key=lambda o: o.makespan, default=None,
        )  # fmt: skip
        if faster is not None and (not good or faster.makespan < good[0].makespan):
            need = self._memory(faster.peak)
            copies = f" and weights {faster.weights:g}x" if faster.weights > 1 else ""
            lines.append(
                f"  with more memory: {faster.call}, {self._time(faster.makespan)}, "
                f"takes {need}{copies}; {faster.why}"
            )
        return "\n".join([head, *lines])


def explain(
    timeline: Timeline, costs: Costs, *, limit: float | None = None, others: bool = True
) -> Explanation:
    """Where the bubble is and why, what the critical path is made of, and what would help.

    limit: memory that another schedule has to keep; left out, what this one takes. others: whether
    to try the other registered schedules (each is built and simulated).

    Raises: CostError where the costs do not fit the schedule.
    """
    placement = timeline.schedule.placement
    own = fitted(costs, placement)
    seen = observe(timeline)
    limit = peak(timeline) if limit is None else limit
    compared = others and not any(queue.stream for queue in timeline.schedule.queues)
    return replace(
        seen,
        per=per_of(costs, placement),
        gains=_gains(timeline, own, seen.path_stages),
        limit=limit,
        others=_others(timeline, costs, limit) if compared else None,
    )


def observe(timeline: Timeline) -> Explanation:
    """What can be seen in the timeline alone: no change is tried, no other schedule."""
    schedule = timeline.schedule
    gaps = [gap for queue in schedule.queues for gap in timeline.gaps(queue)]
    idle: dict[str, dict[str, Number]] = {phase: dict.fromkeys(CAUSES, 0) for phase in PHASES}
    for gap in gaps:
        idle[gap.phase][gap.cause] += gap.end - gap.start
    steps = timeline.critical_path()
    stages: dict[int, Number] = {}
    for step in steps:
        share = quotient(step.end - step.start, len(step.slot))
        for action in step.slot:
            stages[action.stage] = stages.get(action.stage, 0) + share
    worked = sum(1 for queue in range(len(schedule.queues))
                 if schedule.starts[queue] < schedule.starts[queue + 1])  # fmt: skip
    return Explanation(
        timeline=timeline,
        whole=timeline.makespan * worked,
        idle=idle,
        causes=_causes(gaps),
        path=path_time(timeline),
        path_stages=stages,
        hops=sum(a.queue.rank != b.queue.rank for a, b in pairwise(steps)),
        gains=[],
        limit=peak(timeline),
        others=None,
    )


def path_time(timeline: Timeline) -> dict[str, Number]:
    """Time on the critical path by what is done: a kind, kinds run together, or "waiting"."""
    out: dict[str, Number] = {}
    last: Number = 0
    for step in timeline.critical_path():
        kinds = "+".join(dict.fromkeys(action.kind.name for action in step.slot))
        out[kinds] = out.get(kinds, 0) + step.end - step.start
        if step.start - last > ROUNDING * timeline.makespan:
            out["waiting"] = out.get("waiting", 0) + step.start - last
        last = step.end
    return out


# --- gaps with one cause -----------------------------------------------------------------------


def _causes(gaps: list[Gap]) -> list[Cause]:
    """The gaps by what they go back to, the most idle time first."""
    held = {g.before: g for g in gaps if g.waits_for is not None}
    groups: dict[tuple[Any, Any], list[Gap]] = defaultdict(list)
    for gap in gaps:
        groups[_root(gap, held)].append(gap)
    causes = [_cause(root, on, some) for (root, on), some in groups.items()]
    return sorted(causes, key=lambda c: (-c.idle, c.first.start, c.first.queue))


def _root(gap: Gap, held: dict[Any, Gap]) -> tuple[Slot | None, Queue | None]:
    """From what the gap waits for back to a slot that itself waited for nobody."""
    seen = set()
    while gap.waits_for is not None and gap.waits_for in held and gap.waits_for not in seen:
        seen.add(gap.waits_for)
        gap = held[gap.waits_for]
    return gap.waits_for, gap.waits_on


def _cause(root: Slot | None, on: Queue | None, gaps: list[Gap]) -> Cause:
    phases: dict[str, Number] = {}
    for gap in gaps:
        phases[gap.phase] = phases.get(gap.phase, 0) + gap.end - gap.start
    stretches = {(g.queue, g.before) for g in gaps}
    return Cause(
        root=root, on=on, idle=sum(g.end - g.start for g in gaps), gaps=len(stretches),
        ranks=tuple(sorted({g.queue.rank for g in gaps})), phases=dict(phases),
        first=min(gaps, key=lambda g: (g.start, g.queue)),
    )  # fmt: skip


def _counted(cause: Cause) -> str:
    gaps = "1 gap" if cause.gaps == 1 else f"{cause.gaps} gaps"
    ranks = f"rank {cause.ranks[0]}" if len(cause.ranks) == 1 else f"ranks {ranges(cause.ranks)}"
    return f"{gaps} on {ranks} ({' and '.join(p for p in PHASES if p in cause.phases)})"


def _because(cause: Cause) -> str:
    if cause.root is None:
        return "nothing left to do until the last rank ends"
    gap = cause.first
    if cause.gaps == 1:
        return str(gap)
    return f"all go back to {cause.root} on rank {cause.on}; first, {gap}"


# --- one change of cost ------------------------------------------------------------------------


def _gains(timeline: Timeline, costs: Costs, stages: dict[int, Number]) -> list[Gain]:
    schedule, now = timeline.schedule, timeline.makespan
    if timeline.measured:  # a prediction is compared with a prediction
        now = simulate(schedule, costs).makespan
    out = []
    for change, other in _changes(schedule, costs, stages):
        new = simulate(schedule, other).makespan
        out.append(Gain(change, new, now - new))
    return sorted(out, key=lambda g: -g.gain)


def _changes(
    schedule: Schedule, costs: Costs, stages: dict[int, Number]
) -> Iterator[tuple[str, Costs]]:
    """Costs with one thing better: the link, one kind of work, one stage, the balance."""
    n = schedule.placement.n_stages
    beside = [ROWS[kind].cost for kind in USERS if kind in schedule.kinds]
    costs = replace(costs, **{name: costs.time(name) for name in beside if name})  # apart from F
    if costs.latency:
        yield "no latency", replace(costs, latency=0)
    if costs.bandwidth is not None:
        yield "twice the bandwidth", replace(costs, bandwidth=2 * costs.bandwidth)
    if costs.p2p_overhead is not None and any(costs.p2p_overhead):
        yield "transfers that occupy no queue", replace(costs, p2p_overhead=None)
    if costs.slowdown != 1:
        yield "no sharing between queues", replace(costs, slowdown=1)
    if costs.shares_cores(schedule.p):
        yield "a core for every rank", replace(costs, cores=None)
    names = {kind.name for kind in schedule.kinds}
    for name in TIMES:
        if name in names:
            yield f"every {name} 10% shorter", _scaled(costs, (name,), range(n), n)
    if {"I", "W"} <= names:
        yield "a tenth of I done in W instead", _shifted(costs, n)
    uneven = _balanced(costs, n)
    if uneven is not None:
        yield "all stages alike (same sum)", uneven
    heaviest = sorted(stages, key=lambda s: -stages[s])
    used = heaviest[:MOST_STAGES] if n > MOST_STAGES else range(n)
    for stage in sorted(used) if n > 1 else ():
        yield f"stage {stage} 10% shorter", _scaled(costs, TIMES, (stage,), n)


def _spread(costs: Costs, name: str, n: int) -> tuple[Number, ...]:
    return per_stage(name, costs.time(name), n)


def _scaled(costs: Costs, names: tuple[str, ...], stages: Any, n: int) -> Costs:
    """The costs with some times of some stages a tenth shorter."""
    chosen = set(stages)
    values = {
        name: tuple(x * TENTH if s in chosen else x for s, x in enumerate(_spread(costs, name, n)))
        for name in names
    }
    return replace(costs, **values)


def _shifted(costs: Costs, n: int) -> Costs:
    """The same backward, cut a little earlier: the next rank gets its gradient sooner."""
    i, w = _spread(costs, "I", n), _spread(costs, "W", n)
    later = tuple(y + x - x * TENTH for x, y in zip(i, w, strict=True))
    return replace(costs, I=tuple(x * TENTH for x in i), W=later, B=_spread(costs, "B", n))


def _balanced(costs: Costs, n: int) -> Costs | None:
    """Every stage at the mean; None where they are alike already."""
    rows = {name: _spread(costs, name, n) for name in TIMES}
    if all(len(set(row)) == 1 for row in rows.values()):
        return None
    return replace(costs, **{name: quotient(sum(row), n) for name, row in rows.items()})


# --- other schedules ---------------------------------------------------------------------------


def peak(timeline: Timeline) -> float:
    """Memory of the fullest rank: bytes, or microbatches in flight of a rank's full share."""
    return float(max(timeline.peak_bytes if timeline.bytes else timeline.in_flight))


def _others(timeline: Timeline, costs: Costs, limit: float) -> list[Other]:
    """Every other registered schedule at this size, shortest first."""
    out = []
    for entry in entries():
        found = _other(entry, timeline, costs, limit)
        if found is not None:
            out.append(found)
    return sorted(out, key=lambda o: (o.makespan, o.weights, o.call))


def _other(entry: Entry, timeline: Timeline, costs: Costs, limit: float) -> Other | None:
    mine = timeline.schedule
    v = max(mine.placement.n_stages // mine.p, 2) if entry.takes_v else None
    if entry.name == mine.name or not is_quick(entry, mine):
        return None
    try:
        schedule = build(entry.name, p=mine.p, m=mine.m // mine.placement.slices, v=v)
        if any(queue.stream for queue in schedule.queues):
            return None
        other_costs = refitted(costs, mine.placement, schedule.placement)
        other = simulate(schedule, other_costs)
    except HocketError:
        return None
    weights = schedule.placement.weight_copies
    light = bool(timeline.bytes) or weights <= max(mine.placement.weight_copies, 1)
    takes = peak(other)
    return Other(
        call=entry.name if v is None else f"{entry.name} -v {v}",
        makespan=other.makespan,
        peak=takes,
        weights=weights,
        fits=light and takes <= limit * (1 + 1e-9),
        why=_reason(timeline, other),
    )


def _reason(mine: Timeline, other: Timeline) -> str:
    """Where the other one has less idle time, per rank; or less work, or less on the path."""
    p = mine.schedule.p
    saved = {
        phase: sum(r.bubble[phase] for r in mine.ranks) - sum(r.bubble[phase] for r in other.ranks)
        for phase in PHASES
    }
    busy = sum(r.busy for r in mine.ranks) - sum(r.busy for r in other.ranks)
    phase = max(saved, key=lambda name: saved[name])
    if busy > max(saved[phase], 0):
        return f"less work: {format_time(quotient(busy, p), mine.unit)} a rank"
    if saved[phase] <= 0:
        return "no more idle time"
    before, after = (
        format_time(_short(sum(r.bubble[phase] for r in t.ranks), p), mine.unit)
        for t in (mine, other)
    )
    filled = ""
    if other.schedule.has_split_backward and not mine.schedule.has_split_backward:
        filled = ", filled with weight gradients"
    elif other.schedule.placement.n_stages > mine.schedule.placement.n_stages:
        filled = ", with shorter stages"
    return f"less idle in {phase}: {before} -> {after} a rank{filled}"


def _short(total: Number, p: int) -> Number:
    """A mean that is read, not computed with: at most three decimals."""
    mean = float(total) / p
    return round(mean) if math.isclose(mean, round(mean)) else round(mean, 3)
