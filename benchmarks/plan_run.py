"""A plan from measured costs, run beside 1F1B: same processes, same model, alternating steps.

    python benchmarks/plan_run.py              about 2 minutes on 2 cores
    python benchmarks/plan_run.py --realtime   before all else on the machine (SCHED_RR)

The user's own commands make the plan: `hocket profile 1f1b` of the demo GPT on p ranks, then
`hocket plan` from these costs in the memory of 1F1B. Both orders then run step by step in turn,
which goes first alternates; medians of the time from the first rank's call to the last return:

- the model itself. Where there are fewer cores than ranks, a rank that waits lends its core to one
  that works, so an order with less idle time gains little;
- stages that sleep for the measured F, I and W, stretched so that a rank naps 60 ms a microbatch:
  as on a machine with a core for every rank. Here the prediction of each order is checked too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import hocket
from hocket.costs import Costs, load_costs
from hocket.ir import Schedule
from hocket.planner import Plan, Request, plan
from hocket.planner.report import as_text
from hocket.runtime.launch import launch
from hocket.runtime.report import one_by_one

STRETCHED = 0.060  # seconds of F + I + W of the mean rank, all its sleeping stages together
WARM = 3


class Arm(NamedTuple):
    """One order, what its stages sleep (none: the demo model runs), and the model's options."""

    name: str
    schedule: Schedule
    naps: Costs | None
    width: int
    seq: int


def planned(p: int, m: int, width: int, seq: int, seconds: float) -> Plan:
    """Profile and plan, as a user does."""
    with tempfile.TemporaryDirectory() as folder:
        costs = f"{folder}/costs.toml"
        size = ["-p", str(p), "-m", str(m)]
        size += ["--width", str(width), "--seq", str(seq)]
        command = [sys.executable, "-m", "hocket", "profile", "1f1b", *size, "--output", costs]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return plan(Request(p, m, load_costs(costs), in_flight=p, time_limit=seconds))


def stretched(costs: Costs, n: int, p: int) -> Costs:
    """The costs of n stages on p ranks in seconds, times so much that a rank takes STRETCHED."""
    each = [getattr(costs, kind) for kind in ("F", "I", "W")]
    times = [value if isinstance(value, tuple) else (value,) * n for value in each]
    factor = STRETCHED / (sum(map(sum, times)) / p)
    f, i, w = (tuple(factor * x for x in kind) for kind in times)
    return Costs(F=f, I=i, W=w, unit="s")


# --- on a rank -------------------------------------------------------------------------------


def step_of(arm: Arm) -> Callable[[int], Any]:
    """A training step of this rank under an arm's order."""
    from torch import distributed, nn

    from hocket.demo import data, gpt, sleep
    from hocket.runtime import Pipeline

    placement, rank = arm.schedule.placement, distributed.get_rank()

    def build(stage: int) -> nn.Module:
        if arm.naps is None:
            return gpt.build(stage, placement.n_stages, width=arm.width, seq=arm.seq)
        naps: Any = arm.naps
        return sleep.Sleep(naps.F[stage], naps.I[stage], naps.W[stage])

    stages = {s: build(s) for s in placement.stages_of_rank[rank]}
    loss = sleep.loss if arm.naps else cross_entropy
    pipeline = Pipeline(arm.schedule, stages, loss, group=distributed.new_group())
    size = 2 * placement.m

    def step(index: int) -> None:
        batch = sleep.batch(index, size) if arm.naps else data.batch(index, size, seq=arm.seq)
        pipeline.step(*batch)
        for module in stages.values():
            module.zero_grad()

    return step


def cross_entropy(output: Any, targets: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def on_rank(arms: list[Arm], steps: int, realtime: bool) -> dict[str, list[float]]:
    """Seconds of each step of each arm."""
    import torch

    torch.set_num_threads(1)
    if realtime:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))
    ready = {arm.name: step_of(arm) for arm in arms}
    times: dict[str, list[float]] = {name: [] for name in ready}
    for index in range(steps + WARM):
        for name in sorted(ready, reverse=bool(index % 2)):
            torch.distributed.barrier()
            start = perf_counter()
            ready[name](index)
            ends = torch.tensor([perf_counter(), -start], dtype=torch.float64)
            torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX)
            if index >= WARM:
                times[name].append(float(ends.sum()))
    return times


# --- the figures -----------------------------------------------------------------------------


def compared(case: str, arms: list[Arm], steps: int, realtime: bool) -> dict[str, Any]:
    """Both orders, measured, and predicted where the stages sleep."""
    times = launch(on_rank, arms[0].schedule.p, (arms, steps, realtime))[0]
    row: dict[str, Any] = {"case": case, "steps": steps, "ms": {}, "predicted": {}}
    for arm in arms:
        row["ms"][arm.name] = 1e3 * median(times[arm.name])
        if arm.naps:
            row["predicted"][arm.name] = 1e3 * float(
                hocket.simulate(one_by_one(arm.schedule), arm.naps).makespan
            )
    row["ratio"] = row["ms"]["plan"] / row["ms"]["1f1b"]
    return row


def line(row: dict[str, Any]) -> str:
    parts = []
    for name, ms in row["ms"].items():
        parts.append(f"{name} {ms:.1f} ms")
        if name in row["predicted"]:
            parts[-1] += f" (predicted {row['predicted'][name]:.1f}, "
            parts[-1] += f"{ms / row['predicted'][name] - 1:+.1%})"
    return f"{row['case']}: {', '.join(parts)}; plan : 1f1b {row['ratio']:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="A plan from measured costs beside 1F1B.")
    parser.add_argument("-p", type=int, default=4)
    parser.add_argument("-m", type=int, default=8)
    parser.add_argument("--width", type=int, default=128, help="of the demo model")
    parser.add_argument("--seq", type=int, default=128, help="length of its sequences")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--plan-time", type=float, default=20.0, help="seconds to search")
    parser.add_argument("--realtime", action="store_true", help="SCHED_RR; needs the right to it")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    found = planned(args.p, args.m, args.width, args.seq, args.plan_time)
    orders = {"1f1b": hocket.build("1f1b", p=args.p, m=args.m), "plan": found.schedule}
    if not args.json:
        print(as_text(found), flush=True)
    naps = {
        name: stretched(costs, order.placement.n_stages, args.p)
        for (name, order), costs in zip(
            orders.items(), (found.request.costs, found.costs), strict=True
        )
    }
    rows = []
    for case, sleeping in (("demo model", False), ("sleeping stages", True)):
        arms = [
            Arm(name, order, naps[name] if sleeping else None, args.width, args.seq)
            for name, order in orders.items()
        ]
        rows.append(compared(case, arms, args.steps, args.realtime))
        if not args.json:
            print(line(rows[-1]), flush=True)
    if args.json:
        print(json.dumps({"p": args.p, "m": args.m, "cores": os.cpu_count(), "rows": rows}))


if __name__ == "__main__":
    main()
