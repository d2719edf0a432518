"""Questions people argue about, each answered by one table; docs/questions.md shows them.

    python benchmarks/questions.py                 the names of the questions
    python benchmarks/questions.py chimera moe     these tables

Times are in F, the forward of 1/p of the model for one microbatch, unless a table says other.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from heapq import heappop, heappush
from itertools import permutations, product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from hocket import Costs, Schedule, build, load_costs, simulate
from hocket.costs import CostTable, split
from hocket.engine import longest_path
from hocket.graph import graph, runs
from hocket.ir import Kind, Line, encode, looped
from hocket.lower.phases import ORDERS, pair
from hocket.pattern import alternate, cut, join, lay
from hocket.schedules.interleaved import chunk_major, group_sizes
from hocket.simulator.contention import simulate_shared
from hocket.tables import table

F1B2 = Costs(F=1, B=2)
THIRDS = Costs(F=1, I=1, W=1)
TRACE = Path(__file__).parent.parent / "tests" / "data" / "seed" / "moe-bad-overlap"


def _time(schedule: Schedule, costs: Costs) -> float:
    """Makespan under costs of 1/p of the model."""
    return float(simulate(schedule, split(costs, _stages(schedule))).makespan)


def _stages(schedule: Schedule) -> int:
    """Stages on each rank (of one copy of the model)."""
    return schedule.placement.n_stages // schedule.p


def _in_flight(schedule: Schedule) -> float:
    """Microbatches of 1/p of the model in flight on the fullest rank."""
    return max(r.peak_in_flight for r in simulate(schedule).ranks) / _stages(schedule)


# --- more than two Chimera pipes ---------------------------------------------------------------


def exchange(copies: int, replicas: int, once: float) -> float:
    """Time in which a rank sums its gradients with the other copies and replicas.

    A rank holds one stage of each of the `copies` pipes; each stage is on copies x replicas ranks.
    once: time to send the gradients of 1/p of the model once; a ring sends 2 (n - 1) / n of them.
    """
    n = copies * replicas
    return copies * 2 * (n - 1) / n * once


def gradient_time(flops: float, bandwidth: float, tokens: int, size: int) -> float:
    """Time to send all gradients of a stage once, in forwards of the stage.

    A forward takes 2 operations a weight and token; so the size of the model cancels out.
    """
    return size * flops / (2 * tokens * bandwidth)


def chimera(ps: tuple[int, ...] = (8, 16, 32, 64)) -> Iterator[str]:
    """Do more than two Chimera pipes pay?"""
    once = gradient_time(flops=4e14, bandwidth=5e10, tokens=4096, size=2)
    yield "B = 2 F, messages F/20. Gradients: bf16, 50 GB/s a rank, 400 TFLOP/s, 4096 tokens a"
    yield f"microbatch: sending those of 1/p of the model once takes {once:.2f} F; 8 replicas"
    costs = replace(F1B2, latency=Fraction(1, 20))
    rows = []
    for p in ps:
        for m in (p, 4 * p):
            options: list[tuple[str, int, Schedule]] = [("1f1b", 1, build("1f1b", p=p, m=m))]
            options.append(("interleaved, v=4", 1, build("interleaved", p=p, m=m, v=4)))
            for pipes in (2, 4, 8):
                s = build("chimera", p=p, m=m, pipes=pipes)
                options.append((f"chimera, {pipes} pipes", pipes, s))
            for name, copies, s in options:
                compute, gradients = _time(s, costs), exchange(copies, 8, once)
                rows.append([p, m, name, copies, _in_flight(s), f"{compute:.1f}",
                             f"{gradients:.1f}", f"{compute + gradients:.1f}"])  # fmt: skip
    heads = ["p", "m", "schedule", "weights", "in flight", "compute", "gradients", "sum"]
    yield table(rows, heads)


def units() -> Iterator[str]:
    """How to join Chimera's units?"""
    yield "B = 2 F; m microbatches of direct; in () those in flight on the fullest rank"
    for latency in (0, Fraction(1, 20)):
        rows = []
        for p, pipes, k in product((4, 8), (2, 4), (2, 4)):
            if pipes < p:
                cells = [
                    f"{time:.1f} ({flight:g})" for time, flight in _joined(p, pipes, k, latency)
                ]
                rows.append([p, pipes, k * p, *cells])
        yield f"\n{f'a message takes {latency} F' if latency else 'no latency'}:"
        yield table(rows, ["p", "pipes", "m", *JOINS])


# (options, microbatches that one of direct is cut into, in-flight limit in p)
JOINS: dict[str, tuple[dict[str, str], int, int | None]] = {
    "direct": ({"concat": "direct"}, 1, None),
    "greedy": ({}, 1, None),
    "greedy, limit 2p": ({}, 1, 2),
    "doubling": ({"concat": "doubling"}, 1, None),
    "halving": ({"concat": "halving"}, 2, None),
    "greedy on halves": ({}, 2, 2),
}


def _joined(p: int, pipes: int, k: int, latency: Fraction | int) -> Iterator[tuple[float, float]]:
    """Time and microbatches in flight of every way to run k units of Chimera."""
    for options, parts, limit in JOINS.values():
        chosen: dict[str, Any] = {**options, "pipes": pipes}
        if limit is not None:
            chosen["limit"] = limit * p
        s = build("chimera", p=p, m=k * p * parts, **chosen)
        costs = Costs(F=Fraction(1, parts), B=Fraction(2, parts), latency=latency)
        yield _time(s, costs), _in_flight(s) / parts


# --- interleaving depth against latency --------------------------------------------------------


def depth() -> Iterator[str]:
    """How deep to interleave at which latency?"""
    p, m, depths = 8, 32, (1, 2, 4, 8, 16)
    yield f"p={p} m={m}, B = 2 F; makespan by latency and stages per rank v (best marked *)"
    for group in (p, 2 * p):
        rows = []
        for latency in (0, Fraction(1, 50), Fraction(1, 20), Fraction(1, 10), Fraction(1, 4),
                        Fraction(1, 2), 1):  # fmt: skip
            costs = replace(F1B2, latency=latency)
            times = [_time(build("interleaved", p=p, m=m, v=v, group=group), costs) for v in depths]
            marks = [f"{t:.1f}{'*' if t == min(times) else ' '}" for t in times]
            rows.append([float(latency), *marks])
        yield f"\ngroups of {group} microbatches:"
        yield table(rows, ["latency / F", *(f"v={v}" for v in depths)])


# --- the warm-up of interleaving ---------------------------------------------------------------


def interleaved(p: int, m: int, v: int, factor: int) -> Schedule:
    """Interleaved with factor x (p - 1 - r) + (v - 1) p forwards of warm-up on rank r."""
    turns, mbs = chunk_major(group_sizes(p, m, None), v)
    lines: list[Line] = []
    for r in range(p):
        warm_up = min(factor * (p - 1 - r) + (v - 1) * p, m * v)
        forwards = lay(encode(int(Kind.F), turns * p + r, mbs))
        backwards = lay(encode(int(Kind.B), (v - 1 - turns) * p + r, mbs))
        steady = alternate(cut(forwards, warm_up), cut(backwards, 0, m * v - warm_up))
        lines.append(join(cut(forwards, 0, warm_up), steady, cut(backwards, m * v - warm_up)))
    return Schedule.from_lines("interleaved", looped(p, m, v), lines)


def warmup(samples: int = 100) -> Iterator[str]:
    """Why is the warm-up of interleaving twice as deep?"""
    p, m = 8, 32
    yield f"p={p} m={m}, B = 2 F; jitter: each duration uniform within 35% of its mean (cv 20%),"
    yield f"mean of {samples} samples"
    rows = []
    for v in (1, 2, 4):
        for factor in (1, 2):
            s = interleaved(p, m, v, factor)
            costs = split(F1B2, v)
            late = [_time(s, replace(F1B2, latency=Fraction(1, n))) for n in (20, 10)]
            shaken = mean(_jittered(s, costs, even(0.2), samples))
            rows.append([v, f"{factor} (p-1-r) + (v-1) p", _in_flight(s), _time(s, F1B2), *late,
                         f"{shaken:.1f}"])  # fmt: skip
    yield table(
        rows, ["v", "warm-up of rank r", "in flight", "latency 0", "F/20", "F/10", "jitter"]
    )


# --- static against dynamic order --------------------------------------------------------------

Jitter = Callable[[random.Random], float]


def even(cv: float) -> Jitter:
    """A factor uniform around 1 with this coefficient of variation."""
    return lambda rng: 1 + cv * 3**0.5 * (2 * rng.random() - 1)


def stragglers(share: float, factor: float) -> Jitter:
    """A factor 1, and now and then `factor`."""
    return lambda rng: factor if rng.random() < share else 1.0


def _durations(schedule: Schedule, costs: Costs, jitter: Jitter, seed: int) -> np.ndarray:
    """Durations of all actions; the same action gets the same factor in every schedule."""
    rng = random.Random(seed)
    factors = np.empty(len(schedule.codes))
    factors[np.argsort(schedule.codes)] = [jitter(rng) for _ in range(len(factors))]
    costed = CostTable(costs, schedule)
    return costed.work() / costed.ticks.scale * factors


def _jittered(schedule: Schedule, costs: Costs, jitter: Jitter, samples: int) -> Iterator[float]:
    """Makespans of the static order under random durations."""
    g = graph(schedule)
    delays = np.zeros(len(g.needs))
    for seed in range(samples):
        durations = _durations(schedule, costs, jitter, seed)
        yield float(max(longest_path(g, durations[g.first_action], delays).end))


def dispatch(
    work: Schedule, durations: np.ndarray, prefer: tuple[Kind, ...], caps: list[int]
) -> float:
    """Makespan when every free rank takes the first ready kind of `prefer`.

    The oldest microbatch first. A forward starts only while fewer than caps[rank] microbatches
    are in flight there (until B, or W where the backward is split). Linear placement, no latency;
    ranks know at once what is ready.
    """
    p, m = work.p, work.m
    code = dict(zip(work.codes.tolist(), durations.tolist(), strict=True))
    split = Kind.I in prefer
    back, last = (Kind.I, Kind.W) if split else (Kind.B, Kind.B)
    ready: list[dict[Kind, list[int]]] = [{k: [] for k in prefer} for _ in range(p)]
    ready[0][Kind.F] = list(range(m))
    flight, free, running = [0] * p, set(range(p)), []
    now = 0.0
    while True:
        for r in sorted(free):
            for kind in prefer:
                if ready[r][kind] and (kind is not Kind.F or flight[r] < caps[r]):
                    mb = heappop(ready[r][kind])
                    flight[r] += kind is Kind.F
                    heappush(running, (now + code[encode(int(kind), r, mb)], r, kind, mb))
                    free.remove(r)
                    break
        if not running:
            return now
        now, r, kind, mb = heappop(running)
        free.add(r)
        flight[r] -= kind is last
        if kind is Kind.F:
            to, what = (r + 1, Kind.F) if r + 1 < p else (r, back)
            heappush(ready[to][what], mb)
        elif kind is back:
            if r > 0:
                heappush(ready[r - 1][back], mb)
            if split:
                heappush(ready[r][Kind.W], mb)


def jitter(samples: int = 100) -> Iterator[str]:
    """Static or dynamic order under jitter?"""
    p, m = 8, 32
    kinds = {
        "none": even(0), "cv 5%": even(0.05), "cv 10%": even(0.1), "cv 20%": even(0.2),
        "1 of 50 takes 4x": stragglers(0.02, 4),
    }  # fmt: skip
    yield f"p={p} m={m}, F = I = W = 1; mean makespan of {samples} samples, the same for all"
    whole, split = build("1f1b", p=p, m=m), build("zb-h1", p=p, m=m)
    few, many = [p - r for r in range(p)], [2 * (p - r) - 1 for r in range(p)]
    b_first, f_first = (Kind.B, Kind.F), (Kind.F, Kind.B)
    i_first, fill = (Kind.I, Kind.F, Kind.W), (Kind.F, Kind.I, Kind.W)
    rows: list[tuple[str, str, Schedule, Callable[[np.ndarray], float] | None]] = [
        ("1f1b, static", "p - r", whole, None),
        ("dynamic, B before F", "p - r", whole, partial(_dispatch, whole, b_first, few)),
        ("dynamic, F before B", "p - r", whole, partial(_dispatch, whole, f_first, few)),
        ("eager-1f1b, static", "2 (p - r) - 1", build("eager-1f1b", p=p, m=m), None),
        ("dynamic, B before F", "2 (p - r) - 1", whole, partial(_dispatch, whole, b_first, many)),
        ("dynamic, F before B", "2 (p - r) - 1", whole, partial(_dispatch, whole, f_first, many)),
        ("dynamic, B before F", "m", whole, partial(_dispatch, whole, b_first, [m] * p)),
        ("zb-h1, static", "p", split, None),
        ("dynamic, I before F before W", "p", split, partial(_dispatch, split, i_first, [p] * p)),
        ("dynamic, F before I before W", "p", split, partial(_dispatch, split, fill, [p] * p)),
    ]
    out = []
    for name, cap, schedule, run in rows:
        means = []
        for factor in kinds.values():
            if run is None:
                times = list(_jittered(schedule, THIRDS, factor, samples))
            else:
                times = [run(_durations(schedule, THIRDS, factor, seed)) for seed in range(samples)]
            means.append(f"{mean(times):.1f}")
        out.append([name, cap, *means])
    yield table(out, ["order", "in flight", *kinds])


def _dispatch(
    work: Schedule, prefer: tuple[Kind, ...], caps: list[int], durations: np.ndarray
) -> float:
    return dispatch(work, durations, prefer, caps)


# --- overlap that makes things worse -----------------------------------------------------------


def overlap() -> Iterator[str]:
    """When does overlap make things worse?"""
    costs = load_costs(f"{TRACE}.toml")
    from hocket.text import load

    yield "the seventh trace: p=4 m=8, all-to-all inside the slots; us"
    rows = []
    for name, s in (
        ("no overlap, plain 1f1b", build("1f1b", p=4, m=8)),
        ("fused F+B, warm-up of 1f1b (the trace)", load(f"{TRACE}.sched")),
        ("fused F+B, warm-up 2 (p-1-r) + 1", build("1f1b-overlap", p=4, m=8)),
    ):
        t = simulate(s, costs)
        flight = max(r.peak_in_flight for r in t.ranks)
        rows.append([name, t.makespan, f"{t.bubble_ratio:.0%}", flight])
    yield table(rows, ["order", "makespan", "bubble", "in flight"])
    yield "\none pair of forward and backward of four MoE layers, DeepSeek's times on H800; ms"
    yield moe_table()
    n, found = every_order()
    yield f"\nall {n} orders that a layer can have, the same in every layer: {n - len(found)} wait"
    yield "for themselves; the best of the others"
    rows = [[f"{ms:.1f}", order[:23], order[24:]] for ms, order in found[:4]]
    yield table(rows, ["ms", "messages", "work"])


def moe_table() -> str:
    """The orders of one F+B pair; with sharing as messages take 20 of 132 SMs from the work."""
    costs = load_costs("deepseek-v3-h800")
    alone = float(Fraction(112, 132))  # their work ran on 112 SMs; alone it would have 132
    quick = replace(
        costs, F=_scaled(costs.F, alone), I=_scaled(costs.I, alone), W=_scaled(costs.W, alone),
        slowdown=1 / alone,
    )  # fmt: skip
    rows = []
    for order in ORDERS:
        times = [simulate_shared(pair(4, order), c, fragment=True).makespan for c in (costs, quick)]
        rows.append([order, *(f"{t:.1f}" for t in times)])
    return table(rows, ["order", "112 SMs always", "132 SMs where no message runs"])


def every_order() -> tuple[int, list[tuple[float, str]]]:
    """How many orders a layer of a pair can have, and (ms, order) of those that run, best first.

    Split backwards; the same order in all four layers; each queue in any order in which no phase
    stands before what it needs in its own queue.
    """
    costs = load_costs("deepseek-v3-h800")
    n, found = 0, []
    messages = _permuted("combB dispB", "dispF combF")
    work = _permuted("attnF mlpF", "mlpB attnB", "mlpB mlpW", "attnB attnW")
    for words in product(messages, work):
        order = " ".join(sum(words, ()))
        s = pair(4, order)
        n += 1
        if runs(s):
            found.append((float(simulate_shared(s, costs, fragment=True).makespan), order))
    return n, sorted(found)


def _permuted(*before: str) -> Iterator[tuple[str, ...]]:
    """All orders of the words in which the first of each pair stands before the second."""
    pairs = [tuple(x.split()) for x in before]
    words = dict.fromkeys(word for x in pairs for word in x)
    for order in permutations(words):
        if all(order.index(a) < order.index(b) for a, b in pairs):
            yield order


def _scaled(values, factor: float):
    """Work scaled, messages as they are."""
    return type(values)(x * factor if i % 2 == 0 else x for i, x in enumerate(values))


# --- DualPipe, DualPipeV, zb-v ------------------------------------------------------------------


def dualpipe() -> Iterator[str]:
    """DualPipe, DualPipeV or zb-v at equal devices and equal memory?"""
    p, m = 8, 32
    yield f"p={p} m={m}, F = I = W = 1. FB: a fused forward and backward, of the sum 3. Latency:"
    yield "F/20 for each message. Memory in activations of 1/p of the model (A), with 4 A for the"
    yield "weights, gradients and optimiser state of 1/p of the model"
    rows = []
    for name, v in (("dualpipe", None), ("dualpipev", None), ("zb-v", None), ("interleaved-zb", 4),
                    ("interleaved-overlap", 2), ("interleaved-overlap", 4),
                    ("1f1b-overlap", None)):  # fmt: skip
        s = build(name, p=p, m=m, v=v)
        flight, copies = _in_flight(s), s.placement.weight_copies
        times = [
            _time(s, replace(THIRDS, FB=fb, latency=c))
            for c in (0, Fraction(1, 20))
            for fb in ("sum", {"scale": Fraction(4, 5)})
        ]
        rows.append([name if v is None else f"{name} v={v}", f"{copies:g}x", flight,
                     f"{4 * copies + flight:g} A", *(f"{t:.1f}" for t in times)])  # fmt: skip
    heads = ["schedule", "weights", "in flight", "memory", "FB 100%", "FB 80%",
             "FB 100%, latency", "FB 80%, latency"]  # fmt: skip
    yield table(rows, heads)


# --- when may communication be ignored ----------------------------------------------------------


def latency() -> Iterator[str]:
    """When may communication be ignored?"""
    p, m = 8, 32
    steps = (Fraction(1, 100), Fraction(1, 50), Fraction(1, 20), Fraction(1, 10), Fraction(1, 4))
    yield f"p={p} m={m}, F = I = W = 1; longer by, with a message of this time between two ranks"
    rows = []
    for name, options in (
        ("gpipe", {}), ("1f1b", {}), ("eager-1f1b", {}), ("interleaved", {"v": 2}),
        ("interleaved", {"v": 4}), ("interleaved", {"v": 4, "group": 16}), ("chimera", {}),
        ("zb-h1", {}), ("zb-h2", {}), ("zb-v", {}), ("dualpipe", {}), ("dualpipev", {}),
    ):  # fmt: skip
        s = build(name, p=p, m=m, **options)
        zero = _time(s, THIRDS)
        more = [_time(s, replace(THIRDS, latency=c)) / zero - 1 for c in steps]
        word = ",".join(f"{k}={x}" for k, x in options.items())
        rows.append([f"{name}:{word}" if word else name, zero, *(f"{x:.1%}" for x in more)])
    yield table(rows, ["schedule", "makespan", *(f"F/{1 / c}" for c in steps)])
    yield "\na message in F: 2 hidden bytes a token against 24 hidden^2 operations a layer and"
    yield "token, at 400 TFLOP/s"
    rows = []
    for hidden, layers in ((2048, 3), (4096, 4), (8192, 10), (12288, 12)):
        row: list[object] = [hidden, layers]
        for bandwidth in (450e9, 50e9, 3e9):
            message = 2 * hidden / bandwidth
            forward = 24 * hidden**2 * layers / 4e14
            row.append(f"{message / forward:.1%}")
        rows.append(row)
    yield table(rows, ["hidden", "layers a stage", "450 GB/s", "50 GB/s", "3 GB/s"])


# --- traffic of TP, DP and PP ---------------------------------------------------------------------


def traffic(
    hidden: int = 12288, layers: int = 96, sequence: int = 2048, m: int = 64,
    tp: int = 8, pp: int = 8, dp: int = 8,
) -> Iterator[str]:  # fmt: skip
    """What do TP, DP and PP send, and who gets the fast links?"""
    yield f"{layers} layers of hidden {hidden}, {m} microbatches of one sequence of {sequence};"
    yield f"tp={tp} pp={pp} dp={dp}, bf16, 400 TFLOP/s a rank; what one rank sends in one step"
    per_stage = layers // pp
    tensor = 2 * hidden * sequence
    weights = 12 * hidden**2 * per_stage / tp
    compute = 3 * 2 * weights * sequence * m / 4e14
    sent = {
        "TP": (8 * (tp - 1) / tp * tensor * per_stage * m, "4 all-reduces a layer, in the way"),
        "PP": (2 * tensor * m, "1 message a slot, beside the next slot"),
        "PP v=4": (2 * 4 * tensor * m, "4 times as many"),
        "DP": (2 * (dp - 1) / dp * 2 * weights, "1 all-reduce a step, beside the last backwards"),
    }  # fmt: skip
    rows = [
        [name, f"{size / 1e9:.1f}", *(f"{size / b / compute:.1%}" for b in (450e9, 50e9, 3e9)), how]
        for name, (size, how) in sent.items()
    ]
    yield f"a rank computes {compute * 1e3:.0f} ms a step; sending takes of that:"
    yield table(rows, ["", "GB", "450 GB/s", "50 GB/s", "3 GB/s", "how"])


QUESTIONS: dict[str, Callable[[], Iterator[str]]] = {
    "chimera": chimera, "units": units, "depth": depth, "warmup": warmup, "jitter": jitter,
    "overlap": overlap, "dualpipe": dualpipe, "latency": latency, "traffic": traffic,
}  # fmt: skip


def main(names: list[str]) -> int:
    """Prints the tables of these questions, or what questions there are."""
    unknown = [name for name in names if name not in QUESTIONS]
    if unknown or not names:
        print("\n".join(f"{name:10}{make.__doc__}" for name, make in QUESTIONS.items()))
        return 2 if unknown else 0
    for i, name in enumerate(names):
        print("\n" * (i > 0) + "\n".join(QUESTIONS[name]()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
