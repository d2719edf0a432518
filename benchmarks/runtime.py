"""Our executor against torch's _PipelineScheduleRuntime: same processes, same order, alternating.

    python benchmarks/runtime.py            about 3 minutes on 2 cores
    python benchmarks/runtime.py --quick    fewer steps and cases

Sleeping stages (F 10 ms, B 20 ms or I 10 ms and W 10 ms, p=4): the excess of each over the ideal,
the critical path of the order with free messages. Empty stages (p=2, m=64): time per computing
action. Ratios are ours / torch's; wanted are at most 0.75 and 0.5.

The two arms take turns step by step, and which goes first alternates. A step of sleeping stages is
timed from the first nap's start to the last nap's end over all ranks; one of empty stages from
the first rank's call to the last rank's return. Medians.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import hocket
from hocket.ir import Kind, Schedule
from hocket.text import load
from hocket.train.launch import launch
from hocket.train.report import one_by_one

WIDTH = 64
NAP = 0.010


class Case(NamedTuple):
    """One order. `torch_rows`: the same order as torch's CSV rows."""

    name: str
    p: int
    m: int
    schedule: Schedule
    torch_rows: list[str]
    sleeping: bool
    steps: int

    @property
    def is_split(self) -> bool:
        return any(self.schedule.codes & 15 == Kind.W)


# --- the orders ------------------------------------------------------------------------------


def row(schedule: Schedule, queue: int, fused: bool) -> str:
    """A rank's order as a row of torch's CSV."""
    cells = []
    for slot in schedule.line(queue):
        parts = sorted(map(str, slot), key=lambda text: "F" not in text)
        if len(parts) > 1 and fused:
            cells.append(f"({';'.join(parts)})OVERLAP_F_B")
        else:
            cells += parts
    return ",".join(cells)


def case(name: str, schedule: Schedule, sleeping: bool, steps: int, fused: bool = True) -> Case:
    rows = [row(schedule, q, fused) for q in range(schedule.p)]
    return Case(name, schedule.p, schedule.m, schedule, rows, sleeping, steps)


def through_a_file(schedule: Schedule, folder: str) -> Schedule:
    """The schedule as read from a .sched file."""
    path = Path(folder) / f"{schedule.name}-{schedule.p}-{schedule.m}.sched"
    path.write_text(hocket.dumps(schedule), encoding="utf-8")
    return load(str(path))


def sleeping_cases(quick: bool, folder: str) -> list[Case]:
    steps = 5 if quick else 9
    cases = []
    for m in (8,) if quick else (8, 16):
        dual = hocket.build("dualpipev", p=4, m=m)
        zb_v = through_a_file(hocket.build("zb-v", p=4, m=m), folder)
        cases += [
            case("1f1b", hocket.build("1f1b", p=4, m=m), True, steps),
            case("interleaved v=2", hocket.build("interleaved", p=4, m=m, v=2), True, steps),
            case("dualpipev", dual, True, steps),
            case("dualpipev, torch unrolled", dual, True, steps, fused=False),
            case("zb-v (file)", zb_v, True, steps),
        ]
    return cases


# --- the stages ------------------------------------------------------------------------------


def make_stage(kind: str, clock: list[float]) -> Any:
    """A stage of one kind: "empty", "whole" (naps in F and B), "split" (in F, I and W)."""
    import torch
    from torch import nn

    from hocket.demo.sleep import nap

    def timed(seconds: float) -> None:
        if not clock:
            clock.extend((perf_counter(), 0.0))
        nap(seconds)
        clock[1] = perf_counter()

    class NapIn(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            timed(NAP)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            timed(NAP)
            return grad.clone()  # torch's runtime sends contiguous tensors only

    class NapWeight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Any) -> Any:
            return w.view_as(w)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            timed(NAP)
            return grad

    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Any) -> Any:
            return x * self.w

    class Whole(Empty):
        """Naps in F and twice in B; for orders that do not split the backward."""

        def forward(self, x: Any) -> Any:
            if not x.requires_grad:  # the first stage, else it would nap once only in B
                x = x.detach().requires_grad_()
            return NapIn.apply(x) + NapWeight.apply(self.w)

    class Split(nn.Module):
        """Naps in I and in W beside a matrix product, whose W our executor finds and puts off."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
            self.linear.weight.register_post_accumulate_grad_hook(lambda _: timed(NAP))

        def forward(self, x: Any) -> Any:
            return NapIn.apply(self.linear(x))

    class TorchSplit(nn.Module):
        """The same product and naps, W's nap in the graph: torch's runtime runs no such hooks."""

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.eye(WIDTH))

        def forward(self, x: Any) -> Any:
            return NapIn.apply(nn.functional.linear(x, NapWeight.apply(self.w)))

    kinds = {"empty": Empty, "whole": Whole, "split": Split, "torch split": TorchSplit}
    return kinds[kind]()


def sum_of(output: Any, target: Any) -> Any:
    return output.sum()


# --- the two arms ----------------------------------------------------------------------------


class Arm:
    """Steps of one executor; `clock` holds the first start and last end of a step's naps."""

    def __init__(self, step: Any, clock: list[float]) -> None:
        self.step, self.clock = step, clock


def ours(case: Case, group: Any) -> Arm:
    import torch

    from hocket.runtime import Pipeline

    clock: list[float] = []
    kind = "empty" if not case.sleeping else "split" if case.is_split else "whole"
    rank = torch.distributed.get_rank()
    stages = {s: make_stage(kind, clock) for s in case.schedule.placement.stages_of_rank[rank]}
    pipeline = Pipeline(case.schedule, stages, sum_of, group=group)
    x = torch.ones(case.m, WIDTH)
    return Arm(lambda: pipeline.step(x, x), clock)


def torchs(case: Case, group: Any) -> Arm:
    import torch
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
    from torch.distributed.pipelining.stage import PipelineStage

    clock: list[float] = []
    rank, placement = torch.distributed.get_rank(), case.schedule.placement
    mine = placement.stages_of_rank[rank]
    kind = "empty" if not case.sleeping else "torch split" if case.is_split else "whole"
    stages = [
        PipelineStage(
            make_stage(kind, clock), s, placement.n_stages,
            torch.device("cpu"), group=group,
        )
        for s in mine
    ]  # fmt: skip
    runtime = _PipelineScheduleRuntime(stages, case.m, loss_fn=sum_of, scale_grads=False)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write("\n".join(case.torch_rows) + "\n")
        file.flush()
        runtime._load_csv(file.name)
    x = torch.ones(case.m, WIDTH)
    inputs = (x,) if 0 in mine else ()
    target = x if placement.n_stages - 1 in mine else None
    losses: list[Any] = []

    def step() -> None:
        losses.clear()
        runtime.step(*inputs, target=target, losses=losses if target is not None else None,
                     return_outputs=False)  # fmt: skip

    return Arm(step, clock)


def on_rank(tell: Any, cases: list[Case], realtime: bool) -> None:
    import torch

    torch.set_num_threads(1)
    groups = [torch.distributed.new_group(), torch.distributed.new_group()]
    if realtime:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))
    for number, one in enumerate(cases):
        arms = {"ours": ours(one, groups[0]), "torch": torchs(one, groups[1])}
        times: dict[str, list[float]] = {name: [] for name in arms}
        for step in range(one.steps + 2):
            for name in sorted(arms, reverse=bool(step % 2)):
                seconds = timed_step(arms[name], one.sleeping)
                if step >= 2:
                    times[name].append(seconds)
        if torch.distributed.get_rank() == 0:
            tell((number, times))


def timed_step(arm: Arm, sleeping: bool) -> float:
    """Seconds of one step over all ranks."""
    import torch

    arm.clock.clear()
    torch.distributed.barrier()
    start = perf_counter()
    arm.step()
    end = perf_counter()
    if sleeping:
        start, end = arm.clock
    ends = torch.tensor([end, -start], dtype=torch.float64)
    torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX)
    return float(ends.sum())


# --- the figures -----------------------------------------------------------------------------


def ideal(schedule: Schedule) -> float:
    """Seconds of the critical path with free messages, forwards of fused slots leaving at once."""
    costs = hocket.Costs(F=NAP, I=NAP, W=NAP)
    return float(hocket.simulate(one_by_one(schedule), costs).makespan)


def figures(one: Case, times: dict[str, list[float]]) -> dict[str, Any]:
    mid = {name: median(values) for name, values in times.items()}
    low = {name: min(values) for name, values in times.items()}
    out: dict[str, Any] = {"case": one.name, "p": one.p, "m": one.m, "steps": one.steps}
    if one.sleeping:
        best = ideal(one.schedule)
        out |= {f"{name}_ms": value * 1e3 for name, value in mid.items()}
        out |= {"ideal_ms": best * 1e3, "wanted": 0.75}
        out |= {f"{name}_excess": value / best - 1 for name, value in mid.items()}
        out["ratio"] = (mid["ours"] - best) / (mid["torch"] - best)
        out["ratio_of_minima"] = (low["ours"] - best) / (low["torch"] - best)
    else:
        n = len(one.schedule.codes) / one.p
        out |= {f"{name}_us": value * 1e6 / n for name, value in mid.items()}
        out |= {f"{name}_us_min": value * 1e6 / n for name, value in low.items()}
        out |= {"ratio": mid["ours"] / mid["torch"], "wanted": 0.5}
        out["ratio_of_minima"] = low["ours"] / low["torch"]
    return out


def line(found: dict[str, Any]) -> str:
    head = f"{found['case']:26} p={found['p']} m={found['m']:<3}"
    ratio = (
        f"ratio {found['ratio']:.2f} (of minima {found['ratio_of_minima']:.2f}, "
        f"wanted <= {found['wanted']})"
    )
    if "ideal_ms" in found:
        return (
            f"{head} ideal {found['ideal_ms']:6.1f} ms  ours {found['ours_ms']:6.1f} "
            f"({found['ours_excess']:+.1%})  torch {found['torch_ms']:6.1f} "
            f"({found['torch_excess']:+.1%})  {ratio}"
        )
    return (
        f"{head} per action: ours {found['ours_us']:.0f} us (min {found['ours_us_min']:.0f})  "
        f"torch {found['torch_us']:.0f} us (min {found['torch_us_min']:.0f})  {ratio}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Our executor against torch's, alternating.")
    parser.add_argument("--quick", action="store_true", help="m=8 only, fewer steps")
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="before all else on the machine (SCHED_RR)",
    )
    parser.add_argument("--only", metavar="NAME", help="cases whose name holds this")
    parser.add_argument("--json", action="store_true", help="one JSON object, nothing else")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []

    with tempfile.TemporaryDirectory() as folder:
        small = case(
            "empty, 1f1b", hocket.build("1f1b", p=2, m=64), False, 20 if args.quick else 60
        )
        sleeping = sleeping_cases(args.quick, folder)
        for group in (sleeping, [small]):
            cases = [one for one in group if args.only is None or args.only in one.name]
            if not cases:
                continue

            def show(news: tuple[int, dict[str, list[float]]], cases: list[Case] = cases) -> None:
                results.append(figures(cases[news[0]], news[1]))
                if not args.json:
                    print(line(results[-1]), flush=True)

            launch(on_rank, cases[0].p, (cases, args.realtime), listen=show)
    if args.json:
        print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
