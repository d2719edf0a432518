"""Why the steps of a run are slow: the time lost to each cause, and what would gain most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hocket.costs import Costs, CostTable
from hocket.diagnosis.effects import Cause, Effect, balanced, effects, smooth
from hocket.diagnosis.steps import Steps, sigma, steps_of
from hocket.explanation import Explanation, explain, observe
from hocket.ir import Array
from hocket.measured.readings import readings
from hocket.recognise import recognise
from hocket.simulator import simulate
from hocket.tables import format_time, in_one_unit, plain, table
from hocket.text import ranges
from hocket.timeline import Timeline

MATTERS = 0.005  # of a step: what costs less is not reported
NOISY = 0.05  # of a step: what noise may cost without a word
MOST_CHANGES = 3
MOST_ACTIONS = 10_000  # of an order beside which others are built
MOST_STEPS = 10

# What is left of a step when its causes are gone, in the order in which it is taken off.
REST: tuple[tuple[str, Callable[[Steps], Steps]], ...] = (
    ("noise", smooth),
    ("pauses between actions", lambda x: x.but(pause=np.zeros_like(x.pause))),
    ("exposed messages", lambda x: x.but(delay=np.zeros_like(x.delay))),
)


class Finding(NamedTuple):
    """An effect and what it costs each of its steps; gain: of the mean step without it alone."""

    effect: Effect
    cost: float
    gain: float


class Change(NamedTuple):
    """What would shorten a step, and by how much, as simulation predicts."""

    what: str
    gain: float


@dataclass(frozen=True)
class Slow:
    """Everything that `hocket diagnose` reports of slow steps; times in the unit of the steps.

    lost: by cause, the time that each step loses to it, `[step]`; with the work of the mean rank,
    the sum is the makespan.
    """

    steps: Steps
    findings: tuple[Finding, ...]
    lost: dict[str, Array]
    changes: tuple[Change, ...]
    seen: Explanation
    notes: tuple[str, ...] = ()

    @property
    def typical(self) -> float:
        """The median makespan."""
        return float(np.median(self.steps.makespans))

    @property
    def noise(self) -> float:
        """The standard deviation of the makespan over the steps, outliers apart."""
        return sigma(self.steps.makespans)

    def as_json(self) -> dict[str, Any]:
        """The contract of `diagnose --json`: times in `unit`."""
        seen, spans = self.seen, self.steps.makespans.tolist()
        return {
            "verdict": self.verdict, "schedule": self.steps.schedule.name,
            "unit": self.steps.unit, "makespan": self.typical, "noise": self.noise,
            "findings": [
                {
                    "cause": str(one.cause), "ranks": list(one.ranks), "steps": list(one.steps),
                    "factor": one.factor, "sigma": float(min(one.sigma, 1e9)), "cost": cost,
                    "gain": gain, "detail": list(one.detail), "sure": one.sure,
                    "text": self._sentence(one, cost),
                }
                for one, cost, gain in self.findings
            ],
            "steps": [
                {"step": k, "makespan": span} | {c: float(x[k]) for c, x in self.lost.items()}
                for k, span in enumerate(spans)
            ],
            "ranks": [row | {"rank": r} for r, row in enumerate(self._ranks())],
            "critical_path": {
                "by_kind": {k: plain(x) for k, x in seen.path.items()},
                "by_stage": {str(k): plain(x) for k, x in seen.path_stages.items()},
                "messages": seen.hops,
            },
            "changes": [one._asdict() for one in self.changes], "notes": list(self.notes),
        }  # fmt: skip

    @property
    def verdict(self) -> str:
        """What is wrong, the dearest first; or that nothing is."""
        sentences = [self._sentence(one, cost) for one, cost, _ in self.findings]
        noise = float(self.lost["noise"].mean())
        if noise > NOISY * self.typical:
            sentences.append(
                "The same action takes a different time in every step: this noise costs "
                f"{self._time(noise)} per step ({noise / self.typical:.1%}). Look for background "
                "load on the machines."
            )
        if sentences:
            return "\n".join(sentences)
        bubble = float(np.median(self.lost["bubble of the order"]))
        return (
            f"Nothing is slow. Of {self._time(self.typical)} per step, {self._time(bubble)} are "
            f"the bubble that {self.steps.schedule.name} has anyway."
        )

    def __str__(self) -> str:
        s, n = self.steps.schedule, len(self.steps.work)
        head = (
            f"{s.name}: p={s.p} m={s.m // s.placement.slices}, {n} step{'s' * (n > 1)}, makespan "
            f"{self._time(self.typical)}" + (f" (noise {self._time(self.noise)})" if n > 1 else "")
        )
        parts = [self.verdict, head, self._lost(), self._by_rank(), self._path(), self._would()]
        return "\n\n".join(filter(None, [*parts, *(f"note: {note}" for note in self.notes)]))

    # --- text ---------------------------------------------------------------------------

    def _time(self, value: float) -> str:
        return format_time(value, self.steps.unit)

    def _sentence(self, one: Effect, cost: float) -> str:
        which = "per step" if len(one.steps) == len(self.steps.work) else "in each such step"
        loss = f"this costs {self._time(cost)} {which} ({cost / self.typical:.1%})"
        return f"{_SENTENCES[one.cause](one, self)}; {loss}."

    def when(self, one: Effect) -> str:
        """In which steps."""
        n = len(self.steps.work)
        return (
            "in every step" if len(one.steps) == n else f"in {_counted('step', one.steps)} of {n}"
        )

    def pause(self, one: Effect) -> str:
        """How long a mean pause was."""
        return self._time(one.factor)

    def _lost(self) -> str:
        spans = self.steps.makespans
        shown = sorted(np.argsort(-spans, kind="stable")[:MOST_STEPS].tolist())
        causes = [c for c, x in self.lost.items() if np.abs(x).max() > 1e-3 * self.typical]
        rows = [
            {"step": str(k), "makespan": float(spans[k])}
            | {cause: float(self.lost[cause][k]) for cause in causes}
            for k in shown
        ]
        mean = {c: float(self.lost[c].mean()) for c in causes}
        rows.append({"step": "mean", "makespan": float(spans.mean())} | mean)
        rows, unit = in_one_unit(rows, ["makespan", *causes], self.steps.unit)
        more = (
            f"; the {MOST_STEPS} longest of {len(spans)} steps" if len(shown) < len(spans) else ""
        )
        return f"Where the time went (times in {unit}{more}):\n" + table(rows, list(rows[0]))

    def _ranks(self) -> list[dict[str, Any]]:
        """Of each rank the means over the steps: work, pauses, waiting."""
        x = self.steps
        span = float(x.makespans.mean())
        out = []
        for rank in range(x.schedule.p):
            work, pause = (
                float(part[:, x.rank == rank].sum(axis=1).mean()) for part in (x.work, x.pause)
            )
            out.append({"work": work, "pauses": pause, "waiting": span - work - pause})
        return out

    def _by_rank(self) -> str:
        rows = [{"rank": str(r)} | row for r, row in enumerate(self._ranks())]
        rows, unit = in_one_unit(rows, ["work", "pauses", "waiting"], self.steps.unit)
        return f"Per rank, means over the steps (times in {unit}):\n" + table(rows, list(rows[0]))

    def _path(self) -> str:
        whole = float(self.seen.timeline.makespan) or 1.0
        kinds = ", ".join(
            f"{'messages and pauses' if k == 'waiting' else k} {self._time(float(x))} "
            f"({float(x) / whole:.0%})"
            for k, x in sorted(self.seen.path.items(), key=lambda kx: -kx[1])
        )
        stages = sorted(self.seen.path_stages.items(), key=lambda sx: (-sx[1], sx[0]))[:4]
        most = ", ".join(f"stage {s} {self._time(float(x))}" for s, x in stages)
        return (
            f"The measured critical path of the median step: {kinds}; it crosses ranks "
            f"{self.seen.hops} times. Most of it is in {most}."
        )

    def _would(self) -> str:
        if not self.changes:
            return "No change that was tried would gain more than the noise."
        rows = [
            [one.what, self._time(one.gain), f"{one.gain / self.typical:.1%}"]
            for one in self.changes
        ]
        return "What would help most (simulated):\n" + table(
            rows, ["change", "gain per step", "part"]
        )


def _counted(noun: str, numbers: Sequence[int]) -> str:
    """`rank 3`, `steps 2,5`."""
    return f"{noun}{'s' * (len(numbers) > 1)} {ranges(numbers)}"


def _microbatches(numbers: Sequence[int]) -> str:
    return f"microbatch{'es' * (len(numbers) > 1)} {ranges(numbers)}"


def _slow_rank(one: Effect, run: Slow) -> str:
    doubt = "" if one.sure else " (or its stage has more work; give --costs to tell them apart)"
    times = f"{one.factor:.2f} times as long"
    return f"Rank {one.ranks[0]} is slow: its work takes {times} {run.when(one)}{doubt}"


def _slow_link(one: Effect, run: Slow) -> str:
    ratio = "longer than" if np.isinf(one.factor) else f"{one.factor:.1f} times as long as"
    a, b = one.ranks
    return (
        f"The link between ranks {a} and {b} is slow: a message takes {ratio} on the others "
        f"{run.when(one)}"
    )


def _pauses(one: Effect, run: Slow) -> str:
    count = "once" if one.detail[0] == 1 else f"{one.detail[0]} times"
    return (
        f"Rank {one.ranks[0]} pauses {count} for {run.pause(one)} {run.when(one)}: garbage "
        "collection, data loading, or another process"
    )


def _slow_microbatches(one: Effect, run: Slow) -> str:
    return (
        f"Some work is slow on every rank: that of {_microbatches(one.detail)} takes "
        f"{one.factor:.2f} times as long {run.when(one)}"
    )


def _unequal(one: Effect, run: Slow) -> str:
    return (
        f"The stages are unequal: the work of {_counted('stage', one.detail)} on "
        f"{_counted('rank', one.ranks)} takes up to {one.factor:.2f} times as long as that of most"
    )


_SENTENCES: dict[Cause, Callable[[Effect, Slow], str]] = {
    Cause.PAUSE: _pauses,
    Cause.MICROBATCH: _slow_microbatches,
    Cause.NOW_AND_THEN: _slow_rank,
    Cause.RANK: _slow_rank,
    Cause.LINK: _slow_link,
    Cause.STAGES: _unequal,
}

_CHANGES: dict[Cause, str] = {
    Cause.PAUSE: "rank {0} without its pauses",
    Cause.MICROBATCH: "microbatches of equal length",
    Cause.NOW_AND_THEN: "rank {0} as fast as in its other steps",
    Cause.RANK: "rank {0} as fast as the others",
    Cause.LINK: "the link {0}-{1} as fast as the others",
    Cause.STAGES: "a partition with equal stages (at best)",
}


def diagnose_steps(
    timelines: Sequence[Timeline], costs: Costs | None = None, notes: Sequence[str] = ()
) -> Slow:
    """Where the time of these steps of one order went, and why.

    costs: what the work was expected to take; with them a slow rank differs from a heavy stage.

    Raises: UsageError where the steps ran different orders, CostError for costs that do not fit.
    """
    steps = _named(steps_of(timelines))
    expected = None
    if costs is not None:
        expected = CostTable(costs, steps.schedule).work().astype(float)
    found, base = findings(steps, expected), steps.replayed()
    typical = sorted(timelines, key=lambda t: float(t.makespan))[(len(timelines) - 1) // 2]
    clocks = [
        f"the clock of rank {rank} was moved by {format_time(by, steps.unit)}, else a message had "
        "been received before it was sent"
        for rank, by in steps.moved.items()
    ]
    return Slow(
        steps, tuple(found), _lost(steps, [one.effect for one in found], base),
        _changes(steps, found, base, timelines), observe(typical), (*notes, *clocks),
    )  # fmt: skip


def _named(steps: Steps) -> Steps:
    """The same under the name of the registered schedule that the order is."""
    match = recognise(steps.schedule)
    if match is None or not match.is_same:
        return steps
    return steps.but(schedule=steps.schedule.renamed(match.name))


def findings(steps: Steps, expected: Array | None = None) -> list[Finding]:
    """Each effect that matters, the dearest first. expected: see `effects`."""
    base, found = steps.replayed(), []
    for one in effects(steps, expected):
        lost = base - one.without(steps).replayed()
        cost = float(lost[[*one.steps]].mean())
        if cost > MATTERS * float(np.median(steps.makespans)):
            found.append(Finding(one, cost, float(lost.mean())))
    return sorted(found, key=lambda one: -one.gain)


def _lost(steps: Steps, found: Sequence[Effect], base: Array) -> dict[str, Array]:
    """What each step loses to each cause, one taken off after the other."""
    lost: dict[str, Array] = {}
    now = base
    for name, without in [*((str(x.cause), x.without) for x in found), *REST]:
        steps = without(steps)
        after = steps.replayed()
        lost[name] = lost.get(name, 0.0) + now - after
        now = after
    work = steps.work.sum(axis=1) / steps.schedule.p
    return lost | {"bubble of the order": now - work, "work": work}


def _changes(
    steps: Steps, found: Sequence[Finding], base: Array, timelines: Sequence[Timeline]
) -> tuple[Change, ...]:
    """The changes that would gain most, each simulated."""
    out = [Change(_CHANGES[one.cause].format(*one.ranks), gain) for one, _, gain in found]
    causes = {one.effect.cause for one in found}
    more = [("messages that take no time", REST[2][1])]
    if not causes & {Cause.RANK, Cause.STAGES}:
        more.append((_CHANGES[Cause.STAGES], balanced))
    if Cause.PAUSE not in causes:
        more.append(("no pauses between actions", REST[1][1]))
    for what, without in more:
        out.append(Change(what, float((base - without(steps).replayed()).mean())))
    if len(steps.schedule.codes) <= MOST_ACTIONS:
        costs = readings(timelines).costs("median", "median")
        own = simulate(steps.schedule, costs)
        others = explain(own, costs).others or []
        best = min((o for o in others if o.fits), key=lambda o: float(o.makespan), default=None)
        if best is not None:
            gain = float(own.makespan) - float(best.makespan)
            out.append(Change(f"the order {best.call} in the same memory", gain))
    least = 2 * MATTERS * float(base.mean())
    out = sorted((one for one in out if one.gain > least), key=lambda one: -one.gain)
    return tuple(out[:MOST_CHANGES])
