"""What the planner reaches against known optima: python benchmarks/planner.py DATA [GROUP ...].

DATA is a folder with optima.json, caps.json and zb_paper.json; groups are optima, solver, caps,
paper, seed, curve and mixed; other words choose records by name. Prints one line a record, with
processor seconds of both cores (at most twice the seconds allowed), and a sum a group. mixed
compares plans that choose for each backward whether it is full with plans of one kind alone, and
takes costs files in DATA (`hocket profile ... --output costs.toml`) beside the paper's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from hocket.costs import Bytes, Costs, load_costs, split
from hocket.ir import Placement, Queue, linear, mirrored, vshape
from hocket.schedules import build
from hocket.search.exact import solve
from hocket.search.problem import FULL, SPLIT, Problem, problem
from hocket.search.problem_bounds import best_bound
from hocket.search.search import Arena, Search


class Task(NamedTuple):
    """One record: what to order, for what, and what to reach; seconds of processor time."""

    name: str
    problem: Problem
    objective: str
    target: float
    proven: bool
    seconds: float
    seeds: tuple[str, ...] = ()


def costs_of(given: dict[str, Any]) -> Costs:
    def one(key: str) -> Any:
        value = given.get(key)
        return tuple(value) if isinstance(value, list) else value

    times = {k: one(k) for k in ("F", "I", "W", "B") if one(k) is not None}
    if "I" not in times:
        times["I"], times["W"] = times["B"] - 1, 1
    return Costs(**times, latency=given["comm"])


def optima(data: Path) -> Iterator[Task]:
    for i, r in enumerate(json.loads((data / "optima.json").read_text())["records"]):
        paths = tuple(tuple(map(Queue, path)) for path in r["paths"])
        placement = Placement(paths, tuple(mb % len(paths) for mb in range(r["m"])))
        kinds = SPLIT if r["split_backward"] else FULL
        asked = problem(placement, costs_of(r["costs"]), kinds, in_flight=r["in_flight_cap"])
        name = f"{i} p={r['p']} m={r['m']} v={r['v']} cap={r['in_flight_cap']}"
        yield Task(name, asked, "makespan", r["optimal_makespan"], r["proven"], 20)


def caps(data: Path) -> Iterator[Task]:
    known = json.loads((data / "caps.json").read_text())
    for r in known["v_placement"]:
        asked = held_by_half(vshape(r["p"], r["m"]), r["costs_per_stage"], r["cap_microbatches"], 2)
        name = f"V p={r['p']} m={r['m']} F={r['costs_per_stage']['F']} cap={r['cap_microbatches']}"
        yield Task(name, asked, r["objective"], r["best_known"], r["proven_optimal"], 30, ("zb-v",))
    for r in known["linear"]:
        asked = held_by_half(linear(r["p"], r["m"]), r["costs_per_stage"], r["cap_microbatches"], 1)
        for objective in ("span", "makespan"):
            name = f"linear p={r['p']} F={r['costs_per_stage']['F']} cap={r['cap_microbatches']}"
            yield Task(name, asked, objective, r[f"optimal_{objective}"], True, 30)


def held_by_half(placement: Placement, c: dict[str, Any], cap: float, v: int) -> Problem:
    """I frees half of what F took; a stage of v holds 1/v of a microbatch."""
    part = Fraction(1, v)
    costs = Costs(F=c["F"], I=c["I"], W=c["W"], latency=c["latency"],
                  bytes=Bytes(activation=part, held=part / 2))  # fmt: skip
    return problem(placement, costs, SPLIT, room=[cap] * placement.p)


def paper(data: Path) -> Iterator[Task]:
    for i, r in enumerate(json.loads((data / "zb_paper.json").read_text())["rows"]):
        p, m = r["p"], r["m"]
        costs = Costs(
            F=r["T_F"], I=r["T_B(input)"], W=r["T_W"], latency=r["T_comm"],
            bytes=Bytes(activation=r["mem_f"], held=r["mem_f"] + r["mem_b"]),
        )  # fmt: skip
        results = {k: x["sim_max_rank_span"] for k, x in r["results"].items()}
        seconds = 60 if p <= 16 else 180
        wanted = [("1p", 1, 1, min(results["ZB-H1"], results["ZB-1p"])),
                  ("2p", 2, 1, results["ZB-2p"])]  # fmt: skip
        if "ZB-V" in results:
            wanted.append(("V", 1, 2, results["ZB-V"]))
        for word, factor, v, target in wanted:
            placement = linear(p, m) if v == 1 else vshape(p, m)
            room = [factor * p * r["mem_f"]] * p
            asked = problem(placement, split(costs, v), SPLIT, room=room)
            seeds = ("zb-v",) if v == 2 else ()
            if v == 2:
                order = asked.order_of(build("zb-v", p=p, m=m))
                target = min(target, Arena(asked, "span").cost(order) / asked.ticks.scale)
            yield Task(f"{i} p={p} m={m} {word}", asked, "span", target, False, seconds, seeds)


def seed(data: Path) -> Iterator[Task]:
    lanes = Costs(F=(80, 92, 76, 84), I=(80, 92, 76, 84), W=(40, 46, 38, 42), p2p_overhead=(10, 10))
    path = linear(4, 8)
    both = mirrored(4, [mb % 2 for mb in range(8)])
    for name, placement, kinds, limit, target in (
        ("whole, 4 3 2 1", path, FULL, (4, 3, 2, 1), 2820),
        ("whole", path, FULL, None, 2740),
        ("split, 4", path, SPLIT, (4,) * 4, 2488),
        ("split", path, SPLIT, None, 2320),
        ("mirrored, whole, 5", both, FULL, (5,) * 4, 2240),
    ):
        asked = problem(placement, lanes, kinds, in_flight=limit)
        yield Task(name, asked, "makespan", target, True, 20)
    asked = problem(both, Costs(F=1, B=2, I=1, W=1), FULL)
    yield Task("mirrored, F=1 B=2", asked, "makespan", 27, True, 20)


def curve(data: Path) -> Iterator[Task]:
    c = {"F": 149, "I": 147, "W": 100, "latency": 5}
    for i in range(17):
        cap = 4 + i * Fraction(1, 4)
        asked = held_by_half(vshape(8, 16), c, float(cap), 2)
        yield Task(f"cap {float(cap)}", asked, "makespan", float("inf"), False, 10, ("zb-v",))


def mixed(data: Path) -> Iterator[Task]:
    """The paper's models in the memory of 1F1B, B = 0.95 (I + W); costs files as they are."""
    for i, r in enumerate(json.loads((data / "zb_paper.json").read_text())["rows"]):
        p, m, i_time, w_time = r["p"], r["m"], r["T_B(input)"], r["T_W"]
        costs = Costs(
            F=r["T_F"], I=i_time, W=w_time, B=Fraction(19, 20) * (i_time + w_time),
            latency=r["T_comm"], bytes=Bytes(activation=r["mem_f"], held=r["mem_f"] + r["mem_b"]),
        )  # fmt: skip
        asked = problem(linear(p, m), costs, SPLIT, room=[p * r["mem_f"]] * p)
        yield Task(f"{i} p={p} m={m}", asked, "makespan", float("inf"), False, 10)
    for path in sorted(data.glob("*.toml")):
        costs = replace(load_costs(path), cores=None)
        p = len(costs.F) if isinstance(costs.F, tuple) else 4
        for m in (2 * p, 4 * p):
            asked = problem(linear(p, m), costs, SPLIT, in_flight=range(p, 0, -1))
            yield Task(f"{path.stem} p={p} m={m}", asked, "makespan", float("inf"), False, 10)


def gains(task: Task) -> bool:
    """What each kind of plan reaches, and what choosing for each backward saves."""
    asked = task.problem
    whole = replace(asked.costs, B=None)  # a full backward is then I and W, one after the other
    limit = {"room" if asked.limited_by == "bytes" else "in_flight": asked.limit}
    split = problem(asked.placement, whole, SPLIT, **limit)
    values = [
        searched(task._replace(problem=one), full=True)[0].best.cost / one.ticks.scale
        for one in (split, asked.with_kinds(FULL), asked)
    ]
    best, saved = min(values[:2]), [1 - values[2] / x for x in (values[0], min(values[:2]))]
    text = ", ".join(
        f"{w} {x:.6g}" for w, x in zip(("split", "full", "mixed"), values, strict=True)
    )
    print(f"{'ok ' if values[2] <= best else 'BAD'} {task.name} {text}: saves {saved[0]:.2%} of "
          f"split, {saved[1]:.2%} of the better", flush=True)  # fmt: skip
    return values[2] <= best


def searched(task: Task, *, full: bool = False) -> tuple[Search, float]:
    """The search until the target is reached, and its processor seconds."""
    from concurrent.futures import ThreadPoolExecutor

    began = time.process_time()
    asked = task.problem
    arena, scale = Arena(asked, task.objective), asked.ticks.scale
    seeds = [asked.order_of(build(n, p=asked.placement.p, m=asked.placement.m)) for n in task.seeds]
    bound = float(best_bound(asked, task.objective).value) * scale
    search = Search(arena, arena.starts([s for s in seeds if s is not None]), goal=bound, seed=1)
    with ThreadPoolExecutor(2) as workers:
        while not search.done and time.process_time() - began < 2 * task.seconds:
            if not full and search.best.cost <= task.target * scale:
                break
            search.round(workers)
    return search, time.process_time() - began


def report(task: Task) -> bool:
    search, seconds = searched(task, full=task.target == float("inf"))
    scale = task.problem.ticks.scale
    value, bound = search.best.cost / scale, search.goal / scale
    good = value <= task.target
    line = f"{'ok ' if good else 'BAD'} {task.name} {task.objective} {value:.10g}"
    if task.target < float("inf"):
        line += f" of {task.target:.10g}"
    if not good:
        line += f" {value / task.target - 1:.3%} above"
    print(f"{line}, bound {bound:.10g} (gap {value / bound - 1:.2%}), {seconds:.1f} s", flush=True)
    return good


def proved(task: Task) -> bool:
    """With the solver: proven within 60 s."""
    search, spent = searched(replace_seconds(task, 5))
    if not search.done:
        solved = solve(task.problem, task.objective, search.best, bound=search.goal,
                       seconds=60 - spent, threads=2)  # fmt: skip
        good, value = solved.proven, solved.found.cost
    else:
        good, value = True, search.best.cost
    scale = task.problem.ticks.scale
    print(f"{'ok ' if good else 'BAD'} {task.name} {value / scale:.10g}"
          f"{' proven' if good else ''}; {task.target:.10g} known", flush=True)  # fmt: skip
    return good and value / scale <= task.target


def replace_seconds(task: Task, seconds: float) -> Task:
    return task._replace(seconds=seconds)


GROUPS: dict[str, tuple[Callable[[Path], Iterator[Task]], Callable[[Task], bool]]] = {
    "optima": (optima, report), "solver": (optima, proved), "caps": (caps, report),
    "paper": (paper, report), "seed": (seed, report), "curve": (curve, report),
    "mixed": (mixed, gains),
}  # fmt: skip


def main() -> None:
    words = sys.argv[2:]
    data, chosen = Path(sys.argv[1]), [w for w in words if w in GROUPS] or list(GROUPS)
    only = [w for w in words if w not in GROUPS]
    for name in chosen:
        make, judge = GROUPS[name]
        began = time.monotonic()
        results = [judge(t) for t in make(data) if all(w in t.name for w in only)]
        print(f"{name}: {sum(results)} of {len(results)} hold, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
