"""`hocket plan`."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket import files
from hocket.cli.arguments import Answer, Verb, option, part
from hocket.cli.model_plan import ModelOptions, model_plan
from hocket.cli.output import check_writable, warn
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
_SPLIT = {"split": True, "full": False, "either": None}
_POINTS = 9  # of a curve from-to
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


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `hocket plan` takes."""

    asked: ModelOptions = part(ModelOptions)
    # What bears the name of a field of Request is that; None is its default.
    p: tuple[int, ...] | None = option(
        "-p P", "ranks: 8, or several to choose from: 4,8", read=wholes
    )
    m: int | None = option("-m M", "microbatches")
    v: tuple[int, ...] | None = option("-v V", "stages per rank: 2, or several: 1,2,4", read=wholes)
    recorded: tuple[str, ...] = option(
        "--from TRACE+",
        "traces of a run, one per rank: a better order for its measured costs, in its memory",
    )
    costs_file: str | None = costs_option()
    memory: Any = option(
        "--memory LIMIT", "memory of each rank: 80GB, 80GiB or 80e9, or one per rank: 80GB,40GB",
        read=_limit, heading="limits",
    )  # fmt: skip
    in_flight: Any = option(
        "--in-flight N", "microbatches in flight: 4, or one per rank: 4,3,2,1", read=_limit
    )
    shapes: tuple[str, ...] | None = option(
        "--shapes LIST",
        f"placements to try, of {', '.join(SHAPES)} (default: linear,looped,v,wave)",
        read=_list, heading="what may vary",
    )  # fmt: skip
    copies: int | None = option("--copies N", "most copies of weights (default: 1)")
    slices: int | None = option("--slices N", "most slices of a sequence (default: 1)")
    split: bool | None = option(
        "--backward", "I and W apart, together, or whichever is better (default)", of=_SPLIT
    )
    recompute: tuple[Any, ...] | None = option(
        "--recompute LIST", "what stages may recompute: full, selective=TIME/BYTES", read=_levels
    )
    buffers: str | None = option(
        "--buffers", "receive buffers beside activations: per microbatch in flight, or of the step",
        of=_BUFFERS,
    )  # fmt: skip
    layers: str | None = option(
        "--layers FILE", "costs of each layer (TOML): the partition is chosen too"
    )
    objective: str = option(
        "--objective",
        "makespan: barrier after a step (default); span: steps overlap; period: step to step",
        of=OBJECTIVES, default="makespan", heading="the search",
    )  # fmt: skip
    margin: float | None = option(
        "--margin X", "the simplest order within this fraction of the best one (default: 0; 0.03 "
        "where ranks share cores)",
    )  # fmt: skip
    time_limit: float | None = option("--time S", "seconds to search (default: 20; a curve: 300)")
    patience: float | None = option(
        "--patience S", "seconds without a better order that end it", without="--no-search --curve"
    )
    rounds: int | None = option(
        "--rounds N", "most rounds of search (default: 1000)", without="--no-search"
    )
    threads: int | None = option("--threads N", "threads that search (default: one per core)")
    seed: int | None = option("--seed N", "of the search (default: 0)")
    search: bool = option("--no-search", "only named schedules and list scheduling", default=True)
    named: bool = option("--no-named", "leave the registered schedules out", default=True)
    solver: bool = option("--solver", "prove it with OR-tools where it is small enough")
    solver_time: float | None = option(
        "--solver-time S", "seconds more for that (default: 60)", needs="--solver"
    )
    output: str | None = option(
        "-o, --output FILE",
        "write the schedule (.sched); of a plan for --model also a picture "
        "(.svg, .pdf) or what --for prints (.toml, .py, .sh)",
        heading="what is shown",
    )
    stage_costs: str | None = option(
        "--stage-costs FILE", "write the costs of its stages (TOML), with which simulate, show, "
        "view and run know its times",
    )  # fmt: skip
    curve: str | None = option(
        "--curve LIMITS",
        "the time under each limit: in-flight=4-8, in-flight=4,5.5,8 or memory=40GB-80GB",
    )
    points: int | None = option(
        "--points N", "limits of a curve from-to (default: 9)", needs="--curve"
    )
    sensitivity: bool = option("--sensitivity", "what faster links, memory, microbatches give")
    jitter: float | None = option(
        "--jitter X", "the order that is best when work varies by this fraction (0.05: 5 %)"
    )


def run(options: Options) -> Answer:
    """The plan that the options ask for. Raises: HocketError."""
    if options.asked.given:
        _check_alone(options)
        return model_plan(options.asked, options)
    _check_output(options)
    _check_jitter(options)
    _check_recompute(options)
    if options.curve:
        return _run_curve(options, options.curve)
    from hocket.planner.report import as_json, as_text

    recorded = _from_run(options) if options.recorded else None
    plan = _planned(options) if recorded is None else recorded.plan
    extra = _extra(options, plan)
    best = extra["jitter"].best if "jitter" in extra else plan.schedule
    written = _write(options, plan, best)
    data, head = as_json(plan), []
    if recorded is not None:
        data, head = recorded.as_json() | {"plan": data}, [str(recorded)]
    text = "\n\n".join([*head, as_text(plan), *map(str, extra.values())])
    if written:
        what = "" if best is plan.schedule else f" ({best.name}, the best when times vary)"
        text += f"\nwritten: {', '.join(written)}{what}"
    return Answer(text, lambda: data | {k: v.as_json() for k, v in extra.items()})


def _check_alone(options: Options) -> None:
    """Raises UsageError where a plan of a model on a cluster has no use for an option."""
    for one in fields(options):
        value, names = getattr(options, one.name), one.metadata.get("names")
        if names and one.name not in ("v", "memory", "margin", "output") and value != one.default:
            raise UsageError(f"a plan for --model has no use for {names[-1]}")


def _planned(options: Options) -> Plan:
    from hocket.planner.planning import plan

    request = request_of(options)
    if options.jitter is not None and request.costs.cores is not None:
        raise UsageError(
            "--jitter replays orders, which does not tell what ranks that share cores do to "
            "each other; leave out cores in the costs"
        )
    return _with_progress(plan, request)


def _extra(asked: Options, plan: Plan) -> dict[str, Any]:
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


def _check_output(options: Options) -> None:
    """Raises UsageError where a file cannot be written, or is named as another format."""
    for word, path, ending in (
        ("--output", options.output, ".sched"), ("--stage-costs", options.stage_costs, ".toml")
    ):  # fmt: skip
        check_writable(path)
        if path and Path(path).suffix not in ("", ending):
            raise UsageError(
                f"{word} {path}: it is written as {ending}; name it so"
                + ("; `hocket show FILE.sched -o FILE.svg` draws it" if ending == ".sched" else "")
            )


def _check_recompute(options: Options) -> None:
    """Raises UsageError where nothing asks for recomputation: it saves bytes and takes time."""
    limits_bytes = options.memory is not None or (options.curve or "").startswith("memory=")
    if options.recompute and not limits_bytes:
        raise UsageError("--recompute has no effect without a limit in bytes; add --memory")


def _check_jitter(options: Options) -> None:
    """Raises UsageError where orders cannot be compared under this jitter."""
    jitter, objective = options.jitter, options.objective
    if jitter is None:
        return
    if not 0 < jitter < math.inf:
        raise UsageError(f"--jitter is {jitter:g}; it must be above 0, such as 0.05 for 5 %")
    if objective != "makespan":
        raise UsageError(f"--jitter compares makespans; leave out --objective {objective}")


def _run_curve(options: Options, text: str) -> Answer:
    """The time under each limit. Raises: HocketError."""
    from hocket.planner.curve import SECONDS, curve

    given = {
        "--from": options.recorded, "--memory": options.memory, "--in-flight": options.in_flight,
        "--sensitivity": options.sensitivity, "--jitter": options.jitter,
        "--output": options.output, "--stage-costs": options.stage_costs,
    }  # fmt: skip
    for word, value in given.items():
        if value:
            raise UsageError(f"--curve plans once for each of its limits; leave out {word}")
    what, values = _limits_of(text, options.points)
    more = {"time_limit": SECONDS} if options.time_limit is None else {}
    request = request_of(options, **more)
    if what == "memory":
        values = _in_unit(request.costs, values)
    found = _with_progress(curve, request, what, values)
    return Answer(found, found.as_json)


def _limits_of(text: str, count: int | None) -> tuple[str, tuple[Any, ...]]:
    """The limits of `in-flight=4-8`, `memory=40GB,80GB`. Raises: UsageError."""
    from hocket.planner.curve import spread

    name, _, values = text.partition("=")
    first, *more = re.split("(?<![eE])-", values, maxsplit=1)  # 1e-3 is a number
    if name not in ("in-flight", "memory") or not first or more == [""]:
        raise UsageError(
            f"--curve: expected in-flight=4-8, in-flight=4,5.5,8 or memory=40GB-80GB, "
            f"found {text!r}"
        )
    try:
        ends = [sizes(word) for word in (first, *more)]
    except UsageError as error:
        raise UsageError(f"--curve: {error}") from None
    if more and not len(ends[0]) == len(ends[1]) == 1:
        raise UsageError(f"--curve: give a list or from-to, not both; found {text!r}")
    if count is not None and not more:
        raise UsageError("--points is for limits from-to, and --curve lists them; leave it out")
    limits = (
        spread(ends[0][0], ends[1][0], _POINTS if count is None else count) if more else ends[0]
    )
    return name.replace("-", "_"), limits


def request_of(options: Options, **more: Any) -> Request:
    """The request that the options make; more: fields of it. Raises: UsageError, CostError."""
    from hocket.planner.request import Request

    if options.p is None or options.m is None:
        raise UsageError("plan needs the numbers of ranks and microbatches: give -p and -m")
    if options.costs_file and options.layers:
        raise UsageError("--costs and --layers both give the costs; leave one of them out")
    costs = costs_of(options.costs_file or options.layers)
    if options.layers:
        costs = replace(costs, per="layer")
    asked = _asked(options) | more
    if "memory" in asked and costs.bytes:
        asked["memory"] = _in_unit(costs, asked["memory"])
    return Request(costs=costs, **asked)


def _in_unit(costs: Costs, limits: Any) -> Any:
    """Limits of bytes in the unit of the costs."""
    if isinstance(limits, tuple):
        return tuple(map(costs.bytes.amount, limits))
    return costs.bytes.amount(limits)


def _asked(options: Options) -> dict[str, Any]:
    """The fields of a request that the options give; what is left out is not there."""
    from hocket.planner.request import Request

    given = {field.name: getattr(options, field.name, None) for field in fields(Request)}
    return {name: value for name, value in given.items() if value is not None}


def _from_run(options: Options) -> WhatIf:
    """What a better order of the recorded run would gain, within what the options ask."""
    from hocket.planner.from_run import what_if

    for value, word in (
        (options.p, "-p"), (options.m, "-m"), (options.costs_file, "--costs"),
        (options.layers, "--layers"),
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


def _write(options: Options, plan: Plan, best: Schedule) -> list[str]:
    """Writes the best schedule and the costs of its stages where asked; the files' names."""
    from hocket.costs import costs_toml
    from hocket.text import dumps

    costs = next((c for _, s, c in plan.finalists if s is best), plan.costs)
    if options.output:
        files.write(options.output, dumps(best))
    if options.stage_costs:
        head = [f"of the stages of {best.name}, by plan"]
        files.write(options.stage_costs, costs_toml(costs, head))
    return [path for path in (options.output, options.stage_costs) if path]


VERB = Verb("plan", Options, run)
