"""`hocket plan`: from the words of the command line to a plan, told."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket import files
from hocket.cli.plan_options import numbers, one_or_all
from hocket.costs import Costs, Number, costs_toml, load_costs
from hocket.errors import UsageError
from hocket.ir import Schedule
from hocket.planner.curve import SECONDS, curve, spread
from hocket.planner.planning import Progress, plan
from hocket.planner.recompute import level
from hocket.planner.report import as_json, as_text
from hocket.planner.request import Plan, Request
from hocket.planner.sensitivity import jittered, sensitivity
from hocket.text import dumps

if TYPE_CHECKING:
    from hocket.planner.from_run import WhatIf


def plan_command(args: argparse.Namespace) -> int:
    """Plans what the arguments ask for; 0. Raises: HocketError."""
    _check_output(args)
    _check_jitter(args)
    if args.curve:
        return _curve_command(args)
    shown = sys.stderr.isatty()
    run = _from_run(args) if args.recorded else None
    if run is None:
        request = request_of(args)
        if args.jitter is not None and (request.layers or request.costs).cores is not None:
            raise UsageError(
                "--jitter replays orders, which does not tell what ranks that share cores do to "
                "each other; leave out cores in the costs"
            )
        found = plan(request, progress=_progress if shown else None)
    else:
        found = run.plan
    if shown:
        print("\r\033[K", end="", file=sys.stderr)
    extra = _extra(args, found)
    best = extra["jitter"].best if "jitter" in extra else found.schedule
    written = _write(args, found, best)
    if args.json:
        told = as_json(found) if run is None else run.as_json() | {"plan": as_json(found)}
        print(json.dumps(told | {k: v.as_json() for k, v in extra.items()}))
    else:
        told = [as_text(found)] if run is None else [str(run), as_text(found)]
        print("\n\n".join([*told, *map(str, extra.values())]))
        if written:
            what = "" if best is found.schedule else f" ({best.name}, the best when times vary)"
            print(f"written: {', '.join(written)}{what}")
    return 0


def _extra(args: argparse.Namespace, found: Plan) -> dict[str, Any]:
    """What is asked for beside the plan; an interrupt, also one before, leaves it out."""
    extra: dict[str, Any] = {}
    try:
        if found.interrupted and (args.jitter is not None or args.sensitivity):
            raise KeyboardInterrupt
        if args.jitter is not None:
            extra["jitter"] = jittered(found, args.jitter)
        if args.sensitivity:
            extra["sensitivity"] = sensitivity(found)
    except KeyboardInterrupt:
        print("hocket: stopped; without all that was asked beside the plan", file=sys.stderr)
    return extra


def _check_output(args: argparse.Namespace) -> None:
    """Raises UsageError where a file's name asks for another format than is written."""
    for word, path, ending in (
        ("--output", args.output, ".sched"), ("--stage-costs", args.stage_costs, ".toml")
    ):  # fmt: skip
        if path and Path(path).suffix not in ("", ending):
            raise UsageError(
                f"{word} {path}: it is written as {ending}; name it so"
                + ("; `hocket show FILE.sched -o FILE.svg` draws it" if ending == ".sched" else "")
            )


def _check_jitter(args: argparse.Namespace) -> None:
    """Raises UsageError where orders cannot be compared under this jitter."""
    if args.jitter is None:
        return
    if not 0 < args.jitter < math.inf:
        raise UsageError(f"--jitter is {args.jitter:g}; it must be above 0, such as 0.05 for 5 %")
    if args.objective != "makespan":
        raise UsageError(f"--jitter compares makespans; leave out --objective {args.objective}")


def _curve_command(args: argparse.Namespace) -> int:
    """The time under each limit; 0. Raises: HocketError."""
    refused = {
        "--from": args.recorded, "--memory": args.memory, "--in-flight": args.in_flight,
        "--sensitivity": args.sensitivity, "--jitter": args.jitter is not None,
        "--output": args.output, "--stage-costs": args.stage_costs,
    }  # fmt: skip
    for word, given in refused.items():
        if given:
            raise UsageError(f"--curve plans once for each of its limits; leave out {word}")
    what, limits = _limits_of(args.curve, args.points)
    args.time = SECONDS if args.time is None else args.time
    shown = sys.stderr.isatty()
    found = curve(request_of(args), what, limits, progress=_progress if shown else None)
    if shown:
        print("\r\033[K", end="", file=sys.stderr)
    print(json.dumps(found.as_json()) if args.json else found)
    return 0


def _limits_of(text: str, count: int) -> tuple[str, tuple[Number, ...]]:
    """The limits of `in-flight=4-8`, `memory=40e9,80e9`. Raises: UsageError."""
    name, _, values = text.partition("=")
    first, *more = re.split("(?<![eE])-", values, maxsplit=1)  # 1e-3 is a number
    dash, last = bool(more), "".join(more)
    if name not in ("in-flight", "memory") or not first or not (last or not dash):
        raise UsageError(
            f"--curve: expected in-flight=4-8, in-flight=4,5.5,8 or memory=40e9-80e9, "
            f"found {text!r}"
        )
    ends = [numbers(word, "--curve") or () for word in ((first, last) if dash else (values,))]
    if dash and not len(ends[0]) == len(ends[1]) == 1:
        raise UsageError(f"--curve: give a list or from-to, not both; found {text!r}")
    limits = spread(ends[0][0], ends[1][0], count) if dash else ends[0]
    return name.replace("-", "_"), limits


def request_of(args: argparse.Namespace) -> Request:
    """The request that the arguments make. Raises: UsageError, CostError."""
    ranks, m = numbers(args.p, "-p", int), numbers(args.m, "-m", int)
    if ranks is None or m is None or len(m) != 1:
        raise UsageError("plan needs the numbers of ranks and microbatches: give -p and -m")
    return Request(
        p=ranks, m=m[0], costs=load_costs(args.costs) if args.costs else Costs(),
        layers=load_costs(args.layers) if args.layers else None,
        **_asked(args),
    )  # fmt: skip


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request that the arguments give; what is left out is not there."""
    shapes = tuple(word for word in (args.shapes or "").split(",") if word)
    given = {
        "memory": one_or_all(numbers(args.memory, "--memory")),
        "in_flight": one_or_all(numbers(args.in_flight, "--in-flight")),
        "shapes": shapes or None,
        "v": numbers(args.v, "-v", int),
        "copies": args.copies,
        "slices": args.slices,
        "split": {"split": True, "whole": False, "either": None}[args.backward],
        "recompute": tuple(level(word) for word in args.recompute.split(",") if word),
        "buffers": args.buffers.replace("-", " "),
        "objective": args.objective,
        "margin": args.margin,
        "time_limit": args.time,
        "patience": args.patience,
        "rounds": args.rounds,
        "seed": args.seed,
        "search": not args.no_search,
        "named": not args.no_named,
        "threads": args.threads,
        "solver": args.solver,
        "solver_time": args.solver_time,
    }
    return {name: value for name, value in given.items() if value is not None}


def _from_run(args: argparse.Namespace) -> WhatIf:
    """What a better order of the recorded run would gain, within what the arguments ask."""
    from hocket.planner.from_run import what_if

    for value, word in (
        (args.p, "-p"), (args.m, "-m"), (args.costs, "--costs"), (args.layers, "--layers")
    ):  # fmt: skip
        if value is not None:
            raise UsageError(f"--from takes sizes and costs from the run; leave out {word}")
    asked = _asked(args)
    if "memory" in asked:
        asked.setdefault("in_flight", None)  # instead of what the run held
    return what_if(args.recorded, **asked)


def _progress(now: Progress) -> None:
    text = f"\r\033[K{now.seconds:.0f} s: {float(now.value):g} ({now.what})"
    print(text, end="", file=sys.stderr, flush=True)


def _write(args: argparse.Namespace, found: Plan, best: Schedule) -> list[str]:
    """Writes the best schedule and the costs of its stages where asked; the files' names."""
    costs = next((c for _, s, c in found.finalists if s is best), found.costs)
    texts = {
        args.output: lambda: dumps(best),
        args.stage_costs: lambda: costs_toml(costs, [f"of the stages of {best.name}, by plan"]),
    }
    for path, text in texts.items():
        if path:
            files.write(path, text())
    return [path for path in texts if path]
