"""`hocket plan`: from the words of the command line to a plan, told.

Imports everything of the planner; imported when the command runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from hocket.costs import Costs, load_costs
from hocket.errors import UsageError
from hocket.planner.options import numbers, one_or_all
from hocket.planner.planning import Progress, plan
from hocket.planner.recompute import level
from hocket.planner.report import as_json, as_text
from hocket.planner.request import Request
from hocket.planner.sensitivity import jittered, sensitivity


def plan_command(args: argparse.Namespace) -> int:
    """Plans what the arguments ask for; 0. Raises: HocketError."""
    request = request_of(args)
    shown = sys.stderr.isatty()
    found = plan(request, progress=_progress if shown else None)
    if shown:
        print("\r\033[K", end="", file=sys.stderr)
    extra: dict[str, Any] = {}
    if args.jitter is not None:
        extra["jitter"] = jittered(found, args.jitter)
    if args.sensitivity:
        extra["sensitivity"] = sensitivity(found)
    if args.output:
        steady = extra.get("jitter")
        _write(args.output, found.schedule if steady is None else steady.best)
    if args.json:
        told = as_json(found) | {k: v.as_json() for k, v in extra.items()}
        print(json.dumps(told))
    else:
        print("\n\n".join([as_text(found), *map(str, extra.values())]))
        if args.output:
            print(f"written: {args.output}")
    return 0


def request_of(args: argparse.Namespace) -> Request:
    """The request that the arguments make. Raises: UsageError, CostError."""
    ranks, m = numbers(args.p, "-p", int), numbers(args.m, "-m", int)
    if ranks is None or m is None or len(m) != 1:
        raise UsageError("plan needs the numbers of ranks and microbatches: give -p and -m")
    levels = tuple(level(word) for word in args.recompute.split(",") if word)
    return Request(
        p=ranks, m=m[0], costs=load_costs(args.costs) if args.costs else Costs(),
        memory=one_or_all(numbers(args.memory, "--memory")),
        in_flight=one_or_all(numbers(args.in_flight, "--in-flight")),
        shapes=tuple(word for word in args.shapes.split(",") if word),
        v=numbers(args.v, "-v", int) or (1, 2, 4), copies=args.copies, slices=args.slices,
        split={"split": True, "whole": False, "either": None}[args.backward],
        recompute=levels, layers=load_costs(args.layers) if args.layers else None,
        objective=args.objective, time_limit=args.time, rounds=args.rounds, seed=args.seed,
        search=not args.no_search, solver=args.solver,
    )  # fmt: skip


def _progress(now: Progress) -> None:
    text = f"\r\033[K{now.seconds:.0f} s: {float(now.value):g} ({now.what})"
    print(text, end="", file=sys.stderr, flush=True)


def _write(path: str, schedule: object) -> None:
    from hocket.ir import Schedule
    from hocket.text import dumps

    assert isinstance(schedule, Schedule)
    try:
        Path(path).write_text(dumps(schedule), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
