"""`hocket plan`: the best schedule for given costs under a limit."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket import files
from hocket.cli.arguments import Verb, option, part
from hocket.cli.output import check_writable, put_json, warn
from hocket.cli.selection import costs_of, costs_option
from hocket.errors import UsageError
from hocket.words import Number, sizes, wholes

if TYPE_CHECKING:
    from hocket.costs import Costs
    from hocket.ir import Schedule
    from hocket.planner.from_run import WhatIf
    from hocket.planner.planning import Progress
    from hocket.planner.request import Plan, Request

OBJECTIVES = ("makespan", "span", "period")
SHAPES = ("linear", "looped", "v", "wave", "mirrored")
_SPLIT = {"split": True, "whole": False, "either": None}
_BUFFERS = {"none": "none", "in-flight": "in flight", "each": "each"}


def _limit(text: str) -> Number | tuple[Number, ...]:
    """One number, also of a list of one, or one per rank."""
    values = sizes(text)
    return values[0] if len(values) == 1 else values


def _list(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _levels(text: str) -> tuple[Any, ...]:
    from hocket.planner.recompute import level

    return tuple(map(level, _list(text)))


# The fields of these are those of a Request; None where that has a default of its own.
@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a rank may hold, in bytes or in microbatches."""

    memory: Any = option(
        "--memory LIMIT", "bytes of each rank: 80GB, 80GiB or 80e9, or one per rank: 80e9,40e9",
        read=_limit,
    )  # fmt: skip
    in_flight: Any = option(
        "--in-flight N", "microbatches in flight: 4, or one per rank: 4,3,2,1", read=_limit
    )


@dataclass(frozen=True, kw_only=True)
class Space:
    """What may vary."""

    shapes: tuple[str, ...] | None = option(
        "--shapes LIST",
        f"placements to try, of {', '.join(SHAPES)} (default: linear,looped,v,wave)", read=_list,
    )  # fmt: skip
    copies: int | None = option("--copies N", "most copies of weights (default: 1)")
    slices: int | None = option("--slices N", "most slices of a sequence (default: 1)")
    split: bool | None = option(
        "--backward", "I and W apart, together, or whichever is better (default)", of=_SPLIT
    )
    recompute: tuple[Any, ...] | None = option(
        "--recompute LIST",
        "what stages may compute again: full, selective=TIME/BYTES (default: nothing)",
        read=_levels,
    )
    buffers: str | None = option(
        "--buffers",
        "receive buffers beside the activations: of each in flight, or each of the step",
        of=_BUFFERS,
    )
    layers: Costs | None = option(
        "--layers FILE", "costs of each layer (TOML): the cut is chosen too", read=costs_of
    )


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is searched for, and how long."""

    objective: str = option(
        "--objective",
        "makespan: barrier after a step (default); span: steps overlap; period: step to step",
        of=OBJECTIVES, default="makespan",
    )  # fmt: skip
    margin: float | None = option(
        "--margin X", "of orders within this share of the best the simplest (default: 0; 0.03 "
        "where ranks share cores)",
    )  # fmt: skip
    time_limit: float | None = option("--time S", "seconds to search (default: 20; a curve: 300)")
    patience: float | None = option("--patience S", "seconds without a better order that end it")
    rounds: int = option("--rounds N", "most rounds of search", default=1000)
    threads: int | None = option("--threads N", "threads that search (default: one per core)")
    seed: int = option("--seed N", "of the search (default: 0)", default=0)
    search: bool = option("--no-search", "only named schedules and list scheduling", default=True)
    named: bool = option("--no-named", "leave the registered schedules out", default=True)
    solver: bool = option("--solver", "prove it with OR-tools where it is small enough")
    solver_time: float | None = option("--solver-time S", "seconds more for that (default: 60)")


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What is shown and written."""

    output: str | None = option("--output FILE", "write the schedule (.sched)")
    stage_costs: str | None = option(
        "--stage-costs FILE", "write the costs of its stages (TOML), with which simulate, show, "
        "view and run know its times",
    )  # fmt: skip
    curve: str | None = option(
        "--curve LIMITS",
        "the time under each limit: in-flight=4-8, in-flight=4,5.5,8 or memory=40e9-80e9",
    )
    points: int = option("--points N", "limits of a curve from-to (default: 9)", default=9)
    sensitivity: bool = option("--sensitivity", "what faster links, memory, microbatches give")
    jitter: float | None = option(
        "--jitter X", "prefer the order whose makespan is best when work varies by this share "
        "(0.05: 5 %%)",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options:
    """Those of `hocket plan`."""

    p: tuple[int, ...] | None = option(
        "-p P", "ranks: 8, or several to choose from: 4,8", read=wholes
    )
    m: int | None = option("-m M", "microbatches")
    v: tuple[int, ...] | None = option("-v V", "stages per rank: 2, or several: 1,2,4", read=wholes)
    recorded: tuple[str, ...] = option(
        "--from TRACE+",
        "traces of a run, one per rank: a better order for its measured costs, in its memory",
    )
    costs: str | None = costs_option()
    limits: Limits = part(Limits, under="limits")
    space: Space = part(Space, under="what may vary")
    search: Search = part(Search, under="the search")
    answers: Answers = part(Answers, under="what is shown")
    json: bool = False


def run(options: Options) -> int:
    """Plans what the options ask for, and prints the plan. Raises: HocketError."""
    _check_output(options.answers)
    _check_jitter(options)
    if options.answers.curve:
        return _run_curve(options, options.answers.curve)
    from hocket.planner.report import as_json, as_text

    recorded = _from_run(options) if options.recorded else None
    plan = recorded.plan if recorded is not None else _planned(options)
    extra = _extra(options.answers, plan)
    best = extra["jitter"].best if "jitter" in extra else plan.schedule
    written = _write(options.answers, plan, best)
    if options.json:
        data = as_json(plan)
        data = data if recorded is None else recorded.as_json() | {"plan": data}
        put_json(data | {k: v.as_json() for k, v in extra.items()})
        return 0
    head = [] if recorded is None else [recorded]
    print(*head, as_text(plan), *extra.values(), sep="\n\n")
    if written:
        what = "" if best is plan.schedule else f" ({best.name}, the best when times vary)"
        print(f"written: {', '.join(written)}{what}")
    return 0


def _planned(options: Options) -> Plan:
    from hocket.planner.planning import plan

    request = request_of(options)
    jitter = options.answers.jitter
    if jitter is not None and (request.layers or request.costs).cores is not None:
        raise UsageError(
            "--jitter replays orders, which does not tell what ranks that share cores do to "
            "each other; leave out cores in the costs"
        )
    return _with_progress(plan, request)


def _extra(asked: Answers, plan: Plan) -> dict[str, Any]:
    """What is asked for beside the plan; an interrupt, also one before, leaves it out."""
    from hocket.planner.sensitivity import jittered, sensitivity

    extra: dict[str, Any] = {}
    try:
        if plan.interrupted and (asked.jitter is not None or asked.sensitivity):
            raise KeyboardInterrupt
        if asked.jitter is not None:
            extra["jitter"] = jittered(plan, asked.jitter)
        if asked.sensitivity:
            extra["sensitivity"] = sensitivity(plan)
    except KeyboardInterrupt:
        warn("stopped; without all that was asked beside the plan")
    return extra


def _check_output(answers: Answers) -> None:
    """Raises UsageError where a file cannot be written, or is named as another format."""
    for word, path, ending in (
        ("--output", answers.output, ".sched"), ("--stage-costs", answers.stage_costs, ".toml")
    ):  # fmt: skip
        check_writable(path)
        if path and Path(path).suffix not in ("", ending):
            raise UsageError(
                f"{word} {path}: it is written as {ending}; name it so"
                + ("; `hocket show FILE.sched -o FILE.svg` draws it" if ending == ".sched" else "")
            )


def _check_jitter(options: Options) -> None:
    """Raises UsageError where orders cannot be compared under this jitter."""
    jitter, objective = options.answers.jitter, options.search.objective
    if jitter is None:
        return
    if not 0 < jitter < math.inf:
        raise UsageError(f"--jitter is {jitter:g}; it must be above 0, such as 0.05 for 5 %")
    if objective != "makespan":
        raise UsageError(f"--jitter compares makespans; leave out --objective {objective}")


def _run_curve(options: Options, text: str) -> int:
    """The time under each limit. Raises: HocketError."""
    from hocket.planner.curve import SECONDS, curve

    answers, limits = options.answers, options.limits
    refused = {
        "--from": options.recorded, "--memory": limits.memory, "--in-flight": limits.in_flight,
        "--sensitivity": answers.sensitivity, "--jitter": answers.jitter,
        "--output": answers.output, "--stage-costs": answers.stage_costs,
    }  # fmt: skip
    for word, given in refused.items():
        if given:
            raise UsageError(f"--curve plans once for each of its limits; leave out {word}")
    what, values = _limits_of(text, answers.points)
    more = {"time_limit": SECONDS} if options.search.time_limit is None else {}
    found = _with_progress(curve, request_of(options, **more), what, values)
    if options.json:
        put_json(found.as_json())
    else:
        print(found)
    return 0


def _limits_of(text: str, count: int) -> tuple[str, tuple[Any, ...]]:
    """The limits of `in-flight=4-8`, `memory=40e9,80e9`. Raises: UsageError."""
    from hocket.planner.curve import spread

    name, _, values = text.partition("=")
    first, *more = re.split("(?<![eE])-", values, maxsplit=1)  # 1e-3 is a number
    if name not in ("in-flight", "memory") or not first or more == [""]:
        raise UsageError(
            f"--curve: expected in-flight=4-8, in-flight=4,5.5,8 or memory=40e9-80e9, "
            f"found {text!r}"
        )
    try:
        ends = [sizes(word) for word in (first, *more)]
    except UsageError as error:
        raise UsageError(f"--curve: {error}") from None
    if more and not len(ends[0]) == len(ends[1]) == 1:
        raise UsageError(f"--curve: give a list or from-to, not both; found {text!r}")
    limits = spread(ends[0][0], ends[1][0], count) if more else ends[0]
    return name.replace("-", "_"), limits


def request_of(options: Options, **more: Any) -> Request:
    """The request that the options make; more: fields of it. Raises: UsageError, CostError."""
    from hocket.planner.request import Request

    if options.p is None or options.m is None:
        raise UsageError("plan needs the numbers of ranks and microbatches: give -p and -m")
    return Request(
        p=options.p, m=options.m, costs=costs_of(options.costs), **(_asked(options) | more)
    )


def _asked(options: Options) -> dict[str, Any]:
    """The fields of a request that the options give; what is left out is not there."""
    fields = {"v": options.v}
    for asked in (options.limits, options.space, options.search):
        fields |= vars(asked)
    return {name: value for name, value in fields.items() if value is not None}


def _from_run(options: Options) -> WhatIf:
    """What a better order of the recorded run would gain, within what the options ask."""
    from hocket.planner.from_run import what_if

    for value, word in (
        (options.p, "-p"), (options.m, "-m"), (options.costs, "--costs"),
        (options.space.layers, "--layers"),
    ):  # fmt: skip
        if value is not None:
            raise UsageError(f"--from takes sizes and costs from the run; leave out {word}")
    asked = _asked(options)
    if "memory" in asked:
        asked.setdefault("in_flight", None)  # instead of what the run held
    return what_if(options.recorded, **asked)


def _with_progress(work: Any, *args: Any) -> Any:
    """What `work(*args, progress=...)` returns, its progress shown on a terminal meanwhile."""
    if not sys.stderr.isatty():
        return work(*args, progress=None)
    try:
        return work(*args, progress=_progress)
    finally:
        print("\r\033[K", end="", file=sys.stderr)


def _progress(now: Progress) -> None:
    text = f"\r\033[K{now.seconds:.0f} s: {float(now.value):g} ({now.what})"
    print(text, end="", file=sys.stderr, flush=True)


def _write(answers: Answers, plan: Plan, best: Schedule) -> list[str]:
    """Writes the best schedule and the costs of its stages where asked; the files' names."""
    from hocket.costs import costs_toml
    from hocket.text import dumps

    costs = next((c for _, s, c in plan.finalists if s is best), plan.costs)
    if answers.output:
        files.write(answers.output, dumps(best))
    if answers.stage_costs:
        head = [f"of the stages of {best.name}, by plan"]
        files.write(answers.stage_costs, costs_toml(costs, head))
    return [path for path in (answers.output, answers.stage_costs) if path]


VERB = Verb("plan", "the best schedule for these costs under a limit", Options, run)
