"""Runs orders through torch's own pipeline runtime, on four local ranks in one launch.

Importing torch's pipelining takes seconds, so one process imports it and forks the ranks.
"""

from __future__ import annotations

import datetime
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from hocket.interop.torch.csv import TorchOrder, import_csv, torch_order
from hocket.text import loads

WIDTH = 3
SIZE = 4
LIMIT = datetime.timedelta(minutes=4)  # no load delays a message so long
WORK = 0.012  # seconds of each F, I and W of a profiled stage
_GROUPS: list[Any] = []


class Case(NamedTuple):
    """One run. how: "csv", "messages", "multi" (all load a file) or "schedule" (torch_schedule)."""

    name: str
    sched: str
    how: str = "csv"
    receives: str = "early"
    overlap: bool = False


class Profiled(NamedTuple):
    """One profiled run. by: "torch" or "hocket"; work: seconds of each F, I and W."""

    sched: str
    by: str
    work: float = WORK


class Outcome(NamedTuple):
    """The largest error of a gradient, and torch's own dumps of both forms."""

    error: float
    largest: float
    compute: str
    messages: str


def order_of(case: Case) -> TorchOrder:
    form = {"csv": "compute", "multi": "padded"}.get(case.how, "messages")
    late = case.receives if form == "messages" else "early"
    return torch_order(loads(case.sched), form, receives=late, overlap=case.overlap)


def on_four_ranks(jobs: dict[str, list[Any]], seconds: float = 600) -> dict[str, list[dict]]:
    """What each function of this module returned on four ranks, called with (cases, folder)."""
    with tempfile.TemporaryDirectory(prefix="hocket-torch-") as folder:
        plain = {name: [tuple(case) for case in cases] for name, cases in jobs.items()}
        Path(folder, "jobs").write_bytes(pickle.dumps(plain))
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, __file__, folder],
            capture_output=True, text=True, timeout=seconds, check=False, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-20000:]
        ranks = [pickle.loads(Path(folder, f"rank{r}").read_bytes()) for r in range(SIZE)]
        return {name: [rank[name] for rank in ranks] for name in jobs}


def serve(folder: str) -> int:
    """Forks the ranks, once all of torch is imported; 0 when all of them ended well."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.pipelining  # noqa: F401

    children = [_fork(rank, folder) for rank in range(SIZE)]
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


def _fork(rank: int, folder: str) -> int:
    child = os.fork()
    if child:
        return child
    try:
        from torch import distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=SIZE,
            timeout=LIMIT,
        )  # fmt: skip
        jobs = pickle.loads(Path(folder, "jobs").read_bytes())
        out = {name: globals()[name](cases, folder) for name, cases in jobs.items()}
        Path(folder, f"rank{rank}").write_bytes(pickle.dumps(out))
        dist.barrier()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def run_cases(cases: list[tuple], folder: str) -> dict[int, Outcome]:
    """What this rank saw of each case that it takes part in, by number."""
    return _on_groups([Case(*case) for case in cases], folder, _run)


def run_deferred(cases: list[tuple[str, int, int]], folder: str) -> dict[int, tuple]:
    """(name of torch's class, p, m) each: with `defer_pp_recv=True`, then our safe order.

    Returns: the two errors, and the CSV of the class's computation.
    """
    return _on_groups(cases, folder, _run_deferred)


def _on_groups(cases, folder, run):
    import torch
    from torch import distributed as dist

    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    rank = dist.get_rank()
    members = ([0, 1], [2, 3], [0, 1, 2], [0, 1, 2, 3])
    if not _GROUPS:
        _GROUPS.extend(dist.new_group(ranks, timeout=LIMIT) for ranks in members)
    *pairs, three, four = _GROUPS
    groups = {3: three, 4: four}
    out = {}
    twos = 0
    for number, case in enumerate(cases):
        p = case[1] if isinstance(case[1], int) else loads(case.sched).p
        group = pairs[twos % 2] if p == 2 else groups[p]
        twos += p == 2
        if dist.get_rank(group) >= 0:
            try:
                out[number] = run(case, group, Path(folder) / f"{number}-{rank}")
            except BaseException:
                print(f"rank {rank}, case {number}: {case}", file=sys.stderr)
                raise
    return out


def blocks(n):
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, seed):
            super().__init__()
            g = torch.Generator().manual_seed(seed)
            self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
            for p in self.parameters():
                p.data = torch.randn(p.shape, generator=g, dtype=torch.float64)

        def forward(self, x):
            return x + torch.tanh(self.linear(x))

    return [Block(i) for i in range(n)]


def mean_square(out, target):
    return ((out - target) ** 2).mean()


def batch(rows):
    import torch

    g = torch.Generator().manual_seed(7)
    return tuple(torch.randn(rows, WIDTH, generator=g, dtype=torch.float64) for _ in range(2))


def whole(n, x, y):
    """Gradients of the unpipelined model, `[stage]`."""
    modules = blocks(n)
    for module in modules:
        x = module(x)
    mean_square(x, y).backward()
    return [[p.grad for p in module.parameters()] for module in modules]


def pipeline_stages(group, held, n, m):
    import torch
    from torch.distributed.pipelining import PipelineStage

    x, _ = batch(2 * m)
    example = x[:2]
    modules = blocks(n)
    return [
        PipelineStage(
            modules[s], s, n, torch.device("cpu"),
            input_args=(example.clone().requires_grad_(s > 0),),
            output_args=(example.clone().requires_grad_(),), group=group,
        )
        for s in held
    ]  # fmt: skip


def compared(runtime, stages, n, m):
    """The largest error of this rank's gradients after one step, and the largest gradient."""
    x, y = batch(2 * m)
    is_last = any(stage.is_last for stage in stages)
    runtime.step(*([x] if any(s.is_first for s in stages) else []), target=y if is_last else None)
    want = whole(n, x, y)
    error = largest = 0.0
    for stage in stages:
        for got, expected in zip(stage.submod.parameters(), want[stage.stage_index], strict=True):
            assert got.grad is not None
            error = max(error, float((got.grad - expected).abs().max()))
            largest = max(largest, float(expected.abs().max()))
    return error, largest


def _run(case, group, path):
    from torch.distributed.pipelining import schedules

    from hocket.interop.torch.runtime import torch_schedule

    order = order_of(case)
    s = loads(case.sched)
    held = s.placement.stages_of_rank[group.rank()]
    n = s.placement.n_stages
    stages = pipeline_stages(group, held, n, s.m)
    if case.how == "schedule":
        runtime = torch_schedule(
            s, stages[::-1], mean_square, s.m, receives=case.receives, overlap=case.overlap
        )
    else:
        file = path.with_suffix(".csv")
        file.write_text(order.text)
        multi = case.how == "multi"
        kind = schedules.PipelineScheduleMulti if multi else schedules._PipelineScheduleRuntime
        runtime = kind(stages, s.m, loss_fn=mean_square)
        form = "compute_comms" if case.how == "messages" else "compute_only"
        runtime._load_csv(str(file), format=form)
    error, largest = compared(runtime, stages, n, s.m)
    return Outcome(error, largest, *([""] * 2 if case.how == "multi" else _dumps(runtime, path)))


def _dumps(runtime, path):
    out = []
    for form in ("compute_only", "compute_comms"):
        file = path.with_suffix(f".{form}")
        runtime._dump_csv(str(file), format=form)
        with open(file, newline=None) as lines:
            out.append(lines.read())
    return out


def _run_deferred(case, group, path):
    from torch.distributed.pipelining import schedules

    from hocket.interop.torch.runtime import torch_schedule

    name, p, m = case
    rank, n = group.rank(), 2 * p
    v_shaped = name in ("ZBVZeroBubble", "DualPipeV")
    held = (rank, n - 1 - rank) if v_shaped else (rank, rank + p)
    stages = pipeline_stages(group, held, n, m)
    deferred = schedules.get_schedule_class(name)(
        stages, m, loss_fn=mean_square, defer_pp_recv=True
    )
    error, _ = compared(deferred, stages, n, m)
    text = _dumps(deferred, path)[0]
    stages = pipeline_stages(group, held, n, m)
    safe = torch_schedule(
        import_csv(text).schedule, stages, mean_square, m, receives="late", overlap=True
    )
    return error, compared(safe, stages, n, m)[0], text


def run_profiled(cases: list[tuple[str, str, float]], folder: str) -> dict[int, tuple]:
    """Fields of a Profiled each: three steps of sleeping stages, profiled.

    Returns: the Chrome JSON of this rank, and the time of each step by its own clock, in us: of
    hocket's step what its timeline says, of torch's from the first rank's start to the last's end.
    """
    return _on_groups([Profiled(*case) for case in cases], folder, _run_profiled)


STEPS = 3


def _run_profiled(case, group, path):
    import time

    import torch
    from torch import distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.profiler import ProfilerActivity, profile

    from hocket.demo import sleep
    from hocket.interop.torch.runtime import torch_schedule
    from hocket.runtime import Pipeline

    text, by, work = case
    s = loads(text)
    n, held = s.placement.n_stages, s.placement.stages_of_rank[group.rank()]
    x, y = sleep.batch(0, s.m)
    modules = {stage: sleep.build(stage, n, f=work, i=work, w=work) for stage in held}
    if by == "hocket":
        pipe = Pipeline(s, modules, sleep.loss, group=group, timeout=LIMIT.total_seconds())

        def step():
            pipe.step(x, y)
            return pipe.gather_timeline().makespan
    else:
        example = x[:1]
        stages = [
            PipelineStage(
                module, stage, n, torch.device("cpu"),
                input_args=(example.clone().requires_grad_(stage > 0),),
                output_args=(example.clone().requires_grad_(),), group=group,
            )
            for stage, module in modules.items()
        ]  # fmt: skip
        runtime = torch_schedule(s, stages, sleep.loss)

        def step():
            begin = time.time_ns()
            runtime.step(*([x] if 0 in held else []), target=y if n - 1 in held else None)
            ends: list = [None] * s.p
            dist.all_gather_object(ends, (begin, time.time_ns()), group)
            return (max(end for _, end in ends) - min(start for start, _ in ends)) / 1e3

    step()
    clocks = []
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(STEPS):
            dist.barrier(group)
            clocks.append(float(step()))
    file = path.with_suffix(".json")
    profiler.export_chrome_trace(str(file))
    return file.read_text(), clocks


def run_sharded(cases: list[tuple[str]], folder: str) -> dict[int, float]:
    """The largest error of two replicas of two ranks whose stages are sharded by FSDP."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from hocket.interop.torch.runtime import torch_schedule

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))
    group, out = mesh["pipeline"].get_group(), {}
    for number, (text,) in enumerate(cases):
        s = loads(text)
        n, held = s.placement.n_stages, s.placement.stages_of_rank[group.rank()]
        stages = pipeline_stages(group, held, n, s.m)
        for stage in stages:
            stage.submod = fully_shard(stage.submod, mesh=mesh["replica"])
        runtime = torch_schedule(s, stages, mean_square, receives="late")
        x, y = batch(2 * s.m)
        runtime.step(*([x] if 0 in held else []), target=y if n - 1 in held else None)
        want = whole(n, x, y)
        out[number] = max(
            float((got.grad.full_tensor() - expected).abs().max())
            for stage in stages
            for got, expected in zip(
                stage.submod.parameters(), want[stage.stage_index], strict=True
            )
        )
    return out


if __name__ == "__main__":
    import torch_ranks  # by its name, so that what is pickled can be found again

    sys.exit(torch_ranks.serve(sys.argv[1]))
