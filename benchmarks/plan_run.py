"""A plan from measured costs, run beside 1F1B: same processes, same model, steps in turn.

    python benchmarks/plan_run.py              about 3 minutes on 2 cores
    python benchmarks/plan_run.py --realtime   before all else on the machine (chrt -r 1)

It runs the commands that a user would, and prints them: `hocket profile 1f1b` of the demo GPT on p
ranks, then twice `hocket plan` in the memory of 1F1B and `hocket run 1f1b --beside plan.sched`:

- for the model itself, from the costs as they were measured. Where there are fewer cores than
  ranks, a rank that waits lends its core to one that works, so there is little idle time to gain;
- for stages that sleep for the measured F, I and W, stretched so that a rank naps 60 ms a
  microbatch: as on a machine with a core for every rank. The prediction of each order has to hold
  within 6 % here, or the exit status is 1.

What is predicted comes from the costs that the plan was made from, not from the run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from hocket.costs import Bytes, Costs, costs_toml, load_costs, per_stage

STRETCHED = 60.0  # ms of F + I + W of the mean rank
HOLDS = 0.06  # how far a prediction may be off where stages sleep


def hocket(*words: Any, realtime: bool = False) -> str:
    """What a command prints."""
    before = ("chrt", "-r", "1") if realtime else ()
    print("$", *before, "hocket", *words, file=sys.stderr, flush=True)
    command = [*before, sys.executable, "-m", "hocket", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def stretched(costs: Costs, p: int) -> Costs:
    """The costs of p stages with a core each, F, I and W so long that the mean rank's take
    STRETCHED ms; what passes between actions as it was measured. Messages are a few bytes, so
    they take the latency alone; sizes are the model's, and are left out.
    """
    f, i, w = (per_stage(kind, getattr(costs, kind), p) for kind in ("F", "I", "W"))
    factor = STRETCHED * p / float(sum((*f, *i, *w)))
    f, i, w = (tuple(factor * float(x) for x in kind) for kind in (f, i, w))
    alone = replace(costs, cores=None, bandwidth=None, bytes=Bytes())
    return replace(alone, F=f, I=i, W=w, B=None)


def planned_and_run(
    args: argparse.Namespace, folder: Path, costs: Path, model: list[Any]
) -> dict[str, Any]:
    """1F1B and the plan from these costs, as `hocket run --json` compares them."""
    size, best = ["-p", args.p, "-m", args.m], folder / "plan.sched"
    limits = ["--in-flight", args.p, "--time", args.plan_time]
    plan = hocket("plan", *size, "--costs", costs, *limits, "--output", best)
    print(plan, file=sys.stderr, flush=True)
    words = ["--beside", best, "--costs", costs, "--steps", args.steps, "--json"]
    ran = hocket("run", "1f1b", *size, *words, *model, realtime=args.realtime)
    return json.loads(ran)["beside"]


def told(case: str, beside: dict[str, Any]) -> str:
    """One line for what was measured."""
    rows = ", ".join(
        f"{Path(row['schedule']).stem} {row['median']:.1f} ms (predicted {row['predicted']:.1f}, "
        f"{row['difference']:+.1%})"
        for row in beside["orders"]
    )
    ratio = beside["orders"][1]["ratio"]
    middle = f"{ratio['low']:.3f} to {ratio['high']:.3f}"
    return f"{case}: {rows}; plan : 1f1b {ratio['median']:.3f} (middle half {middle})"


def main() -> int:
    parser = argparse.ArgumentParser(description="A plan from measured costs beside 1F1B.")
    parser.add_argument("-p", type=int, default=4)
    parser.add_argument("-m", type=int, default=8)
    parser.add_argument("--width", type=int, default=128, help="of the demo model")
    parser.add_argument("--seq", type=int, default=128, help="length of its sequences")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--plan-time", type=float, default=20.0, help="seconds of each search")
    parser.add_argument("--realtime", action="store_true", help="SCHED_RR; needs the right to it")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        costs, naps = folder / "costs.toml", folder / "naps.toml"
        size = ["--width", args.width, "--seq", args.seq]
        profile = ["profile", "1f1b", "-p", args.p, "-m", args.m, *size, "--output", costs]
        hocket(*profile, realtime=args.realtime)
        print(costs.read_text(), file=sys.stderr)
        naps.write_text(costs_toml(stretched(load_costs(costs), args.p)))
        sleeping = ["--model", "hocket.demo.sleep:build", "-O", f"costs={naps}"]
        rows = {
            case: planned_and_run(args, folder, *words)
            for case, words in (
                ("demo model", (costs, size)), ("sleeping stages", (naps, sleeping))
            )
        }  # fmt: skip
    if args.json:
        print(json.dumps({"p": args.p, "m": args.m, "cores": os.cpu_count(), "cases": rows}))
    else:
        print("\n".join(told(case, row) for case, row in rows.items()))
    slept = rows["sleeping stages"]["orders"]
    return int(any(abs(row["difference"]) > HOLDS for row in slept))


if __name__ == "__main__":
    sys.exit(main())
