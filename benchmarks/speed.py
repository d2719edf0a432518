"""How fast hocket is: every stage from name to trace, against the floor and against torch.

    python benchmarks/speed.py                 the table, at sizes up to (1024, 8192)
    python benchmarks/speed.py --fast          at sizes up to (64, 512), without torch
    python benchmarks/speed.py --save          adds the numbers to benchmarks/history.json
    python benchmarks/speed.py --counts        what CI holds: counts of work, no seconds

Times are CPU seconds of one thread, the best of several runs in a process of its own, so that other
work on the machine matters little; ratios are taken within that process.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from time import thread_time

HERE = Path(__file__).parent
HISTORY, COUNTS = HERE / "history.json", HERE / "counts.json"
SIZES = [(8, 64), (16, 256), (64, 512), (256, 2048), (1024, 8192)]
SCHEDULES = {"1f1b": None, "interleaved": 2, "zb-v": None, "dualpipev": None}
STAGES = ("generate", "check", "simulate", "metrics", "lower", "trace")
PATH = STAGES[:4]  # from name to metrics
NEEDED = {"1f1b": 4, "interleaved": 6, "zb-v": 6, "dualpipev": 6}
TORCH = {"1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
         "zb-v": "ScheduleZBVZeroBubble", "dualpipev": "ScheduleDualPipeV"}  # fmt: skip


def clocked(function, *args):
    """(CPU seconds, result)."""
    before = thread_time()
    result = function(*args)
    return thread_time() - before, result


# --- one schedule at one size, in a process of its own --------------------------------------------


def metrics(t):
    return t.makespan, t.span, t.bubble_ratio, t.ranks


def one(name: str, p: int, m: int, lowered: bool) -> dict:
    import floor
    import numpy as np

    from hocket import build, check, compiled, simulate
    from hocket.formats import write_trace
    from hocket.lower import insert_communication

    v = SCHEDULES[name]
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    n_runs = 4 if p >= 256 else 100
    best = dict.fromkeys(STAGES, float("inf")) | {"simulate alone": float("inf")}
    first, peak = {}, 0
    with compiled.forced(True), tempfile.TemporaryDirectory() as folder:
        for i in range(n_runs):
            seconds = {}
            seconds["generate"], s = clocked(lambda: build(name, p=p, m=m, v=v))
            seconds["check"], report = clocked(check, s)
            assert report.ok
            seconds["simulate"], t = clocked(simulate, s)
            seconds["metrics"] = clocked(metrics, t)[0]
            peak = peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            if lowered and i < 8:
                seconds["trace"] = clocked(write_trace, t, Path(folder) / "x.pftrace")[0]
                seconds["lower"] = clocked(insert_communication, s)[0]
            del t
            fresh = s.renamed(name)
            seconds["simulate alone"] = clocked(simulate, fresh)[0]
            del fresh
            first = first or dict(seconds)
            best = {k: min(x, seconds.get(k, x)) for k, x in best.items()}
        n = len(s.codes)
        arrays = floor.ready(s)
        floor.longest_path(*floor.ready(build(name, p=4, m=16, v=v)))
        bare = min(clocked(floor.longest_path, *arrays)[0] for _ in range(n_runs + 1))
        copy = min(clocked(np.copy, s.codes)[0] for _ in range(n_runs + 1))
    whole = sum(best[k] for k in PATH)
    return {
        "schedule": name, "p": p, "m": m, "actions": n, "floor": bare, "copy": copy,
        "stages": {k: x for k, x in best.items() if x < float("inf")}, "first": first,
        "path": whole, "path_of_floor": bare / whole,
        "simulate_of_floor": bare / best["simulate alone"],
        "needed": 1 / NEEDED[name], "peak_mb": peak // 1024, "start_mb": base // 1024,
    }  # fmt: skip


def in_process(*args: str, limit: float = 600) -> dict | None:
    """What this file prints as JSON when it is run with these arguments; None when out of time."""
    command = [sys.executable, __file__, *args]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        raise SystemExit(f"{' '.join(args)} failed:\n{done.stderr}")
    return json.loads(done.stdout)


# --- the rest ------------------------------------------------------------------------------------


def cold() -> dict:
    """CPU seconds of a small `hocket simulate`, and of build, check and simulate within it."""
    command = [sys.executable, "-m", "hocket", "simulate", "zb-v", "-p", "8", "-m", "32"]
    code = (
        "from time import process_time as t\nimport hocket.checker, hocket.simulator\n"
        "from hocket import build, check, simulate\n"
        "build('1f1b', p=2, m=2)\n"
        "a = t(); s = build('zb-v', p=8, m=32); check(s); simulate(s).makespan; print(t() - a)"
    )
    whole = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        whole.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    part = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
        for _ in range(5)
    ]
    return {"command": min(whole), "build_check_simulate": min(part)}


def small() -> dict:
    """Name to metrics of 1f1b at (8, 64): CPU ms of plain code, and times those of compiled."""
    from hocket import build, check, compiled, simulate

    def whole():
        s = build("1f1b", p=8, m=64)
        assert check(s).ok
        metrics(simulate(s))

    out = []
    for how in (False, True):
        with compiled.forced(how):
            whole()
            out.append(min(clocked(whole)[0] for _ in range(200)))
    return {"plain_ms": 1e3 * out[0], "of_compiled": out[0] / out[1]}


def many() -> dict:
    """Samples and orders a second."""
    from functools import partial

    import numpy as np

    from hocket import Costs, build, compiled
    from hocket.graph import graph
    from hocket.search.problem import FULL, SPLIT, problem
    from hocket.search.search import Arena
    from hocket.simulator.samples import replay_samples, simulate_jitter

    s = build("1f1b", p=64, m=512)
    out = {}
    with compiled.forced(True):
        g = graph(s)
        simulate_jitter(s, samples=8)
        out["jitter_1000"] = min(
            clocked(lambda: simulate_jitter(s, samples=1000))[0] for _ in "abc"
        )
        for k in (1, 16, 32):
            end = np.ones((g.n_nodes, k))
            order = (g.sequence, g.heads, g.need_starts, g.needs, np.zeros((1, k)))
            best = min(
                clocked(compiled.run, replay_samples, end.size, order, (np.zeros(k), end))[0]
                for _ in range(20)
            )
            out[f"replay_{k}"] = end.size / best
        for name in ("1f1b", "zb-v"):
            s = build(name, p=8, m=32)
            asked = problem(s.placement, Costs(), SPLIT if s.has_split_backward else FULL)
            arena, order = Arena(asked), asked.order_of(s)
            more = {"hot": 0.1, "cold": 0.1, "goal": 0.0, "seed": 1}
            arena.anneal(order, moves=1, **more)
            seconds, _ = clocked(partial(arena.anneal, order, moves=20_000, **more))
            out[f"orders_{name}"] = 20_000 / seconds
    return out


def torch_peer(name: str, p: int, m: int) -> dict:
    """CPU seconds of torch's schedule construction, all ranks' orders, and its lowering."""
    from unittest import mock

    import torch.distributed.pipelining.schedules as peer

    made = getattr(peer, TORCH[name])
    v = 1 if name == "1f1b" else 2

    def stage(index):
        return mock.Mock(
            num_stages=p * v, stage_index=index, group_size=p, group_rank=0, is_first=index == 0,
            is_last=index == p * v - 1, has_backward=True, stage_index_to_group_rank={},
        )  # fmt: skip

    if name == "1f1b":
        return {}  # single-stage schedules have no order to build: they are loops in `step`
    stages = [stage(0), stage(p if name == "interleaved" else 2 * p - 1)]
    with mock.patch.object(peer.torch.distributed, "get_rank", return_value=0, create=True):
        construct, s = clocked(lambda: made(stages, m))
    order, where = s.pipeline_order, s.stage_index_to_group_rank
    plain = {r: [a for a in line if a is not None] for r, line in order.items()}
    lowering, lowered = clocked(
        peer._add_send_recv, {r: list(x) for r, x in plain.items()}, lambda i: where[i], p * v
    )
    return {"construct": construct, "lower": lowering, "actions": sum(map(len, plain.values())),
            "lowered": sum(map(len, lowered.values()))}  # fmt: skip


def counts() -> dict:
    """Sizes of what the loops go over: the same on every machine."""
    from unittest import mock

    from hocket import build, check, compiled, simulate
    from hocket.graph import edges, graph
    from hocket.lower import insert_communication

    out = {}
    for name, v in SCHEDULES.items():
        with mock.patch.object(compiled, "run", wraps=compiled.run) as ran:
            s = build(name, p=8, m=32, v=v)
            assert check(s).ok
            metrics(simulate(s))
        out[name] = {
            "actions": len(s.codes), "gone_over": sum(call.args[1] for call in ran.mock_calls),
            "slots": s.n_slots, "needs": len(edges(s)[0]),
            "edges": len(graph(s).needs), "lowered": len(insert_communication(s).codes),
        }  # fmt: skip
    return out


# --- the table ------------------------------------------------------------------------------------


def rows(sizes: list[tuple[int, int]]) -> list[dict]:
    out = []
    for name in SCHEDULES:
        for p, m in sizes:
            lowered = "lower" if p < 1000 else ""
            found = in_process("--one", name, str(p), str(m), lowered)
            if found is not None:
                out.append(found)
                print(line(found), flush=True)
    return out


HEAD = (
    f"{'schedule':12}{'p':>5}{'m':>6}{'actions':>12}"
    + "".join(f"{s:>10}" for s in STAGES)
    + f"{'path':>10}{'M/s':>7}{'floor M/s':>10}{'path:floor':>11}{'sim:floor':>10}{'MB':>7}"
)


def line(x: dict) -> str:
    """One row: milliseconds of each stage, million actions a second, shares of the floor."""
    stages = "".join(
        f"{1e3 * x['stages'][s]:10.2f}" if s in x["stages"] else f"{'':10}" for s in STAGES
    )
    n = x["actions"] / 1e6
    return (
        f"{x['schedule']:12}{x['p']:5}{x['m']:6}{x['actions']:12,}{stages}{1e3 * x['path']:10.2f}"
        f"{n / x['path']:7.1f}{n / x['floor']:10.1f}{x['path_of_floor']:11.3f}"
        f"{x['simulate_of_floor']:10.2f}{x['peak_mb']:7}"
    )


def peers(sizes: list[tuple[int, int]], limit: float) -> list[dict]:
    """torch's construction and lowering, next to hocket's, where they end in time."""
    out = []
    for name in list(SCHEDULES)[1:]:
        for p, m in sizes:
            found = in_process("--torch", name, str(p), str(m), limit=limit)
            if found is None:
                print(f"{name:12}{p:5}{m:6}   torch: not done in {limit:.0f} s")
                break
            out.append({"schedule": name, "p": p, "m": m, **found})
            print(
                f"{name:12}{p:5}{m:6}{found['actions']:12,}   torch constructs in "
                f"{found['construct']:.3f} s, lowers in {found['lower']:.3f} s", flush=True
            )  # fmt: skip
    return out


def save(result: dict) -> None:
    """Adds a result to the history."""
    history = json.loads(HISTORY.read_text()) if HISTORY.exists() else []
    history.append(result)
    HISTORY.write_text(json.dumps(history, indent=1) + "\n")


def run(*, sizes: list[tuple[int, int]], torch: bool = True) -> dict:
    """Prints the tables; returns what they hold."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, text=True,
                            capture_output=True).stdout.strip()  # fmt: skip
    print(f"milliseconds of CPU, warm, compiled; commit {commit}\n{HEAD}")
    result: dict = {"commit": commit, "date": time.strftime("%Y-%m-%d")}
    result |= {"python": platform.python_version(), "machine": platform.machine()}
    result["rows"] = rows(sizes)
    result["cold"] = cold()
    print(
        "\ncold, no numba: " + ", ".join(f"{k} {1e3 * x:.1f} ms" for k, x in result["cold"].items())
    )
    result["small"] = in_process("--small")
    print(
        "small, no numba: {plain_ms:.2f} ms, {of_compiled:.1f} times compiled".format(
            **result["small"]
        )
    )
    result["many"] = in_process("--many")
    rates = ", ".join(f"{k} {x:,.0f}" for k, x in result["many"].items() if x > 10)
    jitter = result["many"]["jitter_1000"]
    print(f"a second: {rates}; 1,000 jitter samples of 1f1b (64, 512) in {jitter:.2f} s")
    if torch:
        result["torch"] = peers([s for s in sizes if s[0] <= 64], limit=60)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--fast", action="store_true", help="sizes up to (64, 512), no torch")
    parser.add_argument("--save", action="store_true", help="add to the history")
    parser.add_argument("--counts", action="store_true", help="counts of work, compared with CI's")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--torch", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--many", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, p, m, lowered = args.one
        print(json.dumps(one(name, int(p), int(m), bool(lowered))))
    elif args.torch:
        print(json.dumps(torch_peer(args.torch[0], int(args.torch[1]), int(args.torch[2]))))
    elif args.small:
        print(json.dumps(small()))
    elif args.many:
        print(json.dumps(many()))
    elif args.counts:
        found = json.dumps(counts(), indent=1) + "\n"
        if args.save:
            COUNTS.write_text(found)
        print(found, end="")
        sys.exit(found != COUNTS.read_text())
    else:
        result = run(sizes=SIZES[:3] if args.fast else SIZES, torch=not args.fast)
        if args.save:
            save(result)


if __name__ == "__main__":
    main()
