"""Where a rank waits: three ways to dispatch the same order, with stages whose times jitter.

    python benchmarks/dispatch.py            about 2 minutes on 2 cores
    python benchmarks/dispatch.py --quick

receive: the rank waits for a message where its consumer stands. gate: threads wait for messages,
an action starts once all it needs is there; same order. ready: as gate, but the first action that
is ready runs, out of order, with at most as many microbatches in flight as the order itself has.
All arms run in the same processes, taking turns step by step, each with the same naps: F, I, W
sleep 4 ms each, drawn anew for every action with the given coefficient of variation. Step times are
medians in ms of the gathered timelines.
`eager-1f1b, receive` is the static order that spends the memory of more microbatches in flight.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from statistics import median
from time import process_time
from typing import Any

import hocket
from hocket.train.launch import launch

NAP = 0.004
P, M = 4, 16
ARMS = [
    ("1f1b", "receive"), ("1f1b", "gate"), ("1f1b", "ready"),
    ("zb-h1", "receive"), ("zb-h1", "gate"), ("zb-h1", "ready"),
    ("eager-1f1b", "receive"),
]  # fmt: skip


def make_stage(stage: int, jitter: list[float]) -> Any:
    """A stage whose naps are drawn per step, microbatch and kind; `jitter` is [step, cv]."""
    import torch
    from torch import nn

    from hocket.demo.sleep import WIDTH, nap

    def drawn(kind: str, mb: int) -> float:
        step, cv = jitter
        draw = random.Random(f"{step} {stage} {mb} {kind}").gauss(1.0, cv)
        return NAP * max(draw, 0.1)

    class Nap(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, mb: int) -> Any:
            ctx.mb = mb
            nap(drawn("F", mb))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            nap(drawn("I", ctx.mb))
            module.done.append(ctx.mb)
            return grads[0], None

    class Jittering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
            self.linear.weight.register_post_accumulate_grad_hook(
                lambda _: nap(drawn("W", self.done.pop(0)))
            )
            self.done: list[int] = []

        def forward(self, x: Any) -> Any:
            return Nap.apply(self.linear(x), round(float(x.detach()[0, 0])))

    class First(nn.Module):
        """Keeps the microbatch's number in column 0 on its way through the stages."""

        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any) -> Any:
            out = self.inner(x)
            return torch.cat([x[:, :1].detach(), out[:, 1:]], dim=1)

    module = Jittering()
    return First(module)


def on_rank(tell: Any, levels: list[float], steps: int, realtime: bool) -> None:
    import torch

    from hocket.demo import sleep
    from hocket.runtime import Pipeline

    rank = torch.distributed.get_rank()
    jitter = [0, 0.0]
    pipelines = {}
    for name, dispatch in ARMS:
        schedule = hocket.build(name, p=P, m=M)
        stages = {rank: make_stage(rank, jitter)}
        group = torch.distributed.new_group()
        pipelines[name, dispatch] = Pipeline(
            schedule, stages, sleep.loss, group=group, dispatch=dispatch
        )
    if realtime:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))
    x = torch.zeros(M, sleep.WIDTH)
    x[:, 0] = torch.arange(M)
    for cv in levels:
        for step in range(steps + 1):
            jitter[:] = [step, cv]
            for arm, pipeline in pipelines.items():
                torch.distributed.barrier()
                cpu = process_time()
                pipeline.step(x, torch.zeros(M))
                cpu = process_time() - cpu
                timeline = pipeline.gather_timeline()
                if step and rank == 0:
                    ms = float(timeline.makespan) / 1e3
                    order = [str(slot) for slot in timeline.schedule.line(P - 1)]
                    peak = max(r.peak_in_flight for r in timeline.ranks)
                    tell((arm, cv, ms, peak, cpu * 1e3, hash(tuple(order))))


def main() -> None:
    parser = argparse.ArgumentParser(description="receive, gate and ready, compared.")
    parser.add_argument("--quick", action="store_true", help="fewer steps and levels of jitter")
    parser.add_argument("--realtime", action="store_true", help="before all else (SCHED_RR)")
    parser.add_argument("--json", action="store_true", help="one JSON object, nothing else")
    args = parser.parse_args()
    levels = [0.0, 0.2] if args.quick else [0.0, 0.05, 0.1, 0.2]
    seen: list[Any] = []
    steps = 4 if args.quick else 10
    launch(on_rank, P, (levels, steps, args.realtime), listen=seen.append)
    rows = []
    for cv in levels:
        base = {}
        for name, dispatch in ARMS:
            mine = [row for row in seen if row[0] == (name, dispatch) and row[1] == cv]
            ms = median(row[2] for row in mine)
            base.setdefault(name, ms)
            rows.append({
                "jitter": cv, "schedule": name, "dispatch": dispatch, "step_ms": ms,
                "to_receive": ms / base[name], "in_flight": max(row[3] for row in mine),
                "cpu_ms": median(row[4] for row in mine),
                "orders": len({row[5] for row in mine}),
            })  # fmt: skip
    if args.json:
        print(json.dumps({"p": P, "m": M, "nap_ms": NAP * 1e3, "rows": rows}))
        return
    print("jitter  schedule    dispatch  step ms  to receive  in flight  cpu ms  orders seen")
    for r in rows:
        print(
            f"{r['jitter']:6.0%}  {r['schedule']:10}  {r['dispatch']:8}  {r['step_ms']:7.1f}  "
            f"{r['to_receive']:10.3f}  {r['in_flight']:9}  {r['cpu_ms']:6.1f}  {r['orders']:11}"
        )


if __name__ == "__main__":
    main()
