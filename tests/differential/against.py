"""What hocket gives, beside what the oracles give: the claims, one function each, by seed.

Each function draws its input from a seed, raises AssertionError with that input where hocket and
the oracle differ, and returns what it met, to be counted. What is imported from the inside of
hocket stands here and nowhere else.
"""

import contextlib
import io
import json
import random
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import oracle_draw
import oracle_events
import oracle_memory
import oracle_optima
from oracle_text import Order, read, write
from oracle_verdicts import TRANSPORTS, verdict

import hocket
from hocket.cli import main
from hocket.costs import Cycle
from hocket.lower import insert_communication

CLOSE = 1e-9  # of two floats, relative: their sums are in another order


# --- hocket's side -------------------------------------------------------------------------------


def costs_of(data):
    """hocket.Costs of the plain data of a costs file."""

    def python(value):
        if isinstance(value, dict):
            return Cycle(value["cycle"]) if "cycle" in value else value
        return tuple(value) if isinstance(value, list) else value

    out = {
        name: python(value) for name, value in data.items() if name not in ("bytes", "p2p_overhead")
    }
    if "p2p_overhead" in data:
        out["p2p_overhead"] = (data["p2p_overhead"]["recv"], data["p2p_overhead"]["send"])
    sizes = {name: python(value) for name, value in data.get("bytes", {}).items()}
    if "held_between_I_and_W" in sizes:
        sizes["held"] = sizes.pop("held_between_I_and_W")
    return hocket.Costs(**out, bytes=hocket.Bytes(**sizes))


def times_of(timeline):
    """Start and end of each action by name."""
    schedule, value = timeline.schedule, timeline.ticks.value
    names = [str(a) for slots in schedule.order.values() for slot in slots for a in slot]
    times = zip(timeline.start.tolist(), timeline.end.tolist(), strict=True)
    return {name: (value(a), value(b)) for name, (a, b) in zip(names, times, strict=True)}


def toml(costs):
    """The text of a costs file, per stage; a fraction is written as the float next to it."""

    def text(value):
        if isinstance(value, dict):
            return "{ " + ", ".join(f"{k} = {text(v)}" for k, v in value.items()) + " }"
        if isinstance(value, list):
            return "[" + ", ".join(map(text, value)) + "]"
        return json.dumps(float(value) if isinstance(value, Fraction) else value)

    lines = {"per": "stage"} | costs
    return "".join(f"{name} = {text(value)}\n" for name, value in lines.items())


def command(*words):
    """What a command prints as JSON."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main([*map(str, words), "--json"])
    assert not status, out.getvalue()
    return json.loads(out.getvalue())


# --- times and memory ----------------------------------------------------------------------------


def agree(a, b):
    """Whether two numbers are equal: exactly, or where one is a float, but for rounding."""
    if isinstance(a, float):
        return abs(a - float(b)) <= CLOSE * max(1.0, abs(a))
    return a == b


def differences(order, costs):
    """Where hocket's simulation and the one by events differ, as sentences."""
    timeline = hocket.simulate(hocket.loads(write(order)), costs_of(costs))
    run = oracle_events.simulate(order, costs)
    times = times_of(timeline)
    pairs = {"makespan": (timeline.makespan, run.makespan), "span": (timeline.span, run.span)}
    pairs["bubble ratio"] = float(timeline.bubble_ratio), run.bubble_ratio
    for action, both in run.times.items():
        for what, a, b in zip(("start", "end"), times[str(action)], both, strict=True):
            pairs[f"{what} of {action}"] = a, b
    peaks = oracle_memory.peaks(run, costs)
    # Between queues, rounding says what comes first of what ends and what starts at one time.
    rounded = not timeline.ticks.exact and any("/" in queue for queue in order.queues)
    for rank, (summary, (in_flight, sizes)) in enumerate(zip(timeline.ranks, peaks, strict=True)):
        pairs[f"busy of rank {rank}"] = summary.busy, run.busy_of(rank)
        if rounded:
            continue
        pairs |= {
            f"in flight on rank {rank}": (summary.peak_in_flight, in_flight),
            f"bytes of rank {rank}": (float(summary.peak_bytes), sizes),
        }
    wrong = [f"{what}: hocket {a}, events {b}" for what, (a, b) in pairs.items() if not agree(a, b)]
    return wrong + (out_of_range(timeline, run, costs) if rounded else [])


def out_of_range(timeline, run, costs):
    """Peaks that no order of what happens at one time gives, rounding aside, as sentences."""
    near = Fraction(CLOSE) * max(1, run.makespan)
    wrong = []
    for rank, ranges in enumerate(oracle_memory.possible_peaks(run, costs, near)):
        summary = timeline.ranks[rank]
        for peak, (least, largest) in zip(
            (summary.peak_in_flight, float(summary.peak_bytes)), ranges, strict=True
        ):
            if peak < least - CLOSE * max(1, least) or peak > largest + CLOSE * max(1, largest):
                wrong.append(f"peak of rank {rank}: hocket {peak}, events {least} to {largest}")
    return wrong


def explained(seed, wrong, order, costs=""):
    """The text of a failure: the seed, what differs, and all that is needed to see it again."""
    return "\n".join([f"seed {seed}", *wrong[:6], write(order), str(costs)])


def times_agree(seed, folder):
    """One drawn order under drawn costs: start, end, memory, makespan, span, bubble."""
    rng = random.Random(f"times {seed}")
    order = drawn(rng)
    costs = oracle_draw.costs(rng, order)
    assert read(write(order)) == order
    wrong = differences(order, costs)
    assert not wrong, explained(seed, wrong, order, costs)
    return "times"


def drawn(rng):
    """A valid order."""
    return oracle_draw.order(rng, oracle_draw.placement(rng))


# --- verdicts ------------------------------------------------------------------------------------


def verdicts_agree(seed, folder):
    """One drawn order, mostly broken, under each transport."""
    rng = random.Random(f"verdicts {seed}")
    order = drawn(rng)
    if rng.random() < 0.8:
        order = oracle_draw.broken(rng, order)
    return compare_verdicts(seed, order)


def compare_verdicts(seed, order):
    wanted = {transport: verdict(order, transport) for transport in TRANSPORTS}
    schedule = hocket.loads(write(order))
    fine = {transport: hocket.check(schedule, transport=transport).ok for transport in wanted}
    wrong = [
        f"{transport}: hocket finds {'nothing' if fine[transport] else 'faults'}, it {end}"
        for transport, end in wanted.items()
        if fine[transport] != (end == "runs")
    ]
    assert not wrong, explained(seed, wrong, order)
    return " ".join(dict.fromkeys(wanted.values()))


# --- registered schedules ------------------------------------------------------------------------


def registered_agree(seed, folder):
    """A schedule by name, its messages placed too: times, and that every transport takes it."""
    rng = random.Random(f"registered {seed}")
    names = [e["name"] for e in command("list")["schedules"]]
    name = rng.choice([n for n in names if n not in SEARCHED])
    p, m, v = rng.randint(1, 6), rng.randint(1, 9), rng.choice((None, None, 2, 3, 4))
    try:
        schedule = hocket.build(name, p=p, m=m, **({} if v is None else {"v": v}))
    except hocket.HocketError:
        return "does not fit"
    costs = {}
    for one in (schedule, insert_communication(schedule)):
        order = read(hocket.dumps(one))
        costs = costs or oracle_draw.costs(rng, order)
        wrong = differences(order, costs)
        assert not wrong, explained(seed, wrong, order, costs)
        assert compare_verdicts(seed, order) == "runs", explained(seed, [], order)
    return name


SEARCHED = {"v-auto", "v-half", "v-min", "v-1f1b", "zb-auto"}  # take too long to be made often


# --- bounds and optima ---------------------------------------------------------------------------


def bounds_hold(seed, folder):
    """The bound that `simulate` prints is no longer than the run; its files read as written."""
    rng = random.Random(f"bounds {seed}")
    order = drawn(rng)
    costs = oracle_draw.costs(rng, order)
    if "slice" in costs:
        costs["slice"] = [x / 4 for x in costs["slice"]]
    (folder / "drawn.sched").write_text(write(order))
    (folder / "costs.toml").write_text(toml(costs))
    result = command("simulate", folder / "drawn.sched", "--costs", folder / "costs.toml")
    makespan, bound = result["makespan"], result["lower_bound"]
    exact = oracle_events.simulate(order, costs).makespan
    wrong = [] if near(makespan, exact) else [f"makespan {makespan}, by events {exact}"]
    if bound > makespan * (1 + CLOSE):
        wrong.append(f"bound {bound} above makespan {makespan}")
    wrong += loose(result["critical_path"], makespan)
    assert not wrong, explained(seed, wrong, order, costs)
    return "bounds"


def loose(path, makespan):
    """What does not hang together in a critical path, as sentences."""
    wrong = []
    for before, step in pairwise([None, *path]):
        if before is None:
            fits = step["after"] == "start" and step["start"] == 0
        elif step["after"] == "queue":
            fits = step["queue"] == before["queue"] and near(step["start"], before["end"])
        else:
            fits = step["after"] == "message" and step["start"] >= before["end"] - CLOSE
        wrong += [] if fits else [f"critical path: {step} after {before}"]
    if not near(path[-1]["end"], makespan):
        wrong.append(f"the critical path ends at {path[-1]['end']}, not at {makespan}")
    return wrong


def near(a, b):
    return abs(float(a) - float(b)) <= CLOSE * max(1.0, abs(float(b)))


class Problem(NamedTuple):
    """A question to the planner: the placement, as hocket calls it and as paths."""

    shape: str
    p: int
    v: int
    paths: list
    path_of: list


SHAPES: dict[str, tuple[int, Callable]] = {
    "linear": (1, lambda line: [line]),
    "looped": (2, lambda line: [line * 2]),
    "v": (2, lambda line: [line + line[::-1]]),
    "mirrored": (1, lambda line: [line, line[::-1]]),
}


SPLIT = {"whole": False, "split": True, "either": None}


def problem(rng, most_ranks, most_microbatches):
    shape = rng.choice(("linear", "linear", "looped", "v", "mirrored"))
    v, make = SHAPES[shape]
    p = 2 if shape == "mirrored" else rng.randint(1 + (v == 2), max(2, most_ranks - v + 1))
    paths = make([str(r) for r in range(p)])
    m = rng.randint(len(paths), most_microbatches)
    return Problem(shape, p, v, paths, [mb % len(paths) for mb in range(m)])


def plans_hold(seed, folder, *, most_ranks=3, most_microbatches=3, branches=20_000, seconds=0.2):
    """A plan: what it says of itself, its bound and "optimal" against the best of all orders."""
    rng = random.Random(f"plans {seed}")
    asked = problem(rng, most_ranks, most_microbatches)
    costs = oracle_draw.costs_of_stages(rng, len(asked.paths[0]))
    most = rng.choice((None, rng.randint(1, 3)))
    backward = rng.choice(("whole", "split", "either", "either"))
    request = hocket.Request(
        p=asked.p, m=len(asked.path_of), shapes=(asked.shape,), v=(asked.v,),
        named=rng.random() < 0.3, copies=len(asked.paths), costs=costs_of(costs),
        in_flight=most, rounds=2, split=SPLIT[backward], seed=seed,
        search=rng.random() < 0.5, time_limit=seconds, patience=seconds, threads=1,
    )  # fmt: skip
    order = Order(asked.paths, asked.path_of)
    where = [str(request), str(costs)]
    try:
        plan = hocket.plan(request)
    except hocket.HocketError as error:
        return refused(error, most, where)
    made = read(hocket.dumps(plan.schedule))
    run = oracle_events.simulate(made, costs)
    wrong = (
        [] if near(plan.value, run.makespan) else [f"value {plan.value}, by events {run.makespan}"]
    )
    peaks = [pairs for pairs, _ in oracle_memory.peaks(run, costs)]
    if most is not None and max(peaks) > most * asked.v:
        wrong.append(f"holds {max(peaks)} pairs, allowed are {most * asked.v}")
    best, known = least(order, costs, backward, most and [most * asked.v] * asked.p, plan, branches)
    for what, bound in (("bound", plan.bound.value), ("floor", plan.floor.value)):
        if float(bound) > float(best) * (1 + CLOSE):
            wrong.append(f"{what} {bound} is above the order of {best}")
    if plan.proven and float(best) < float(plan.value) * (1 - CLOSE):
        wrong.append(f"{plan.value} is called optimal; there is an order of {best}")
    assert not wrong, "\n".join([f"seed {seed}", *wrong, *where])
    return f"{'best known' if known else 'too large'}, {'proven' if plan.proven else 'open'}"


def refused(error, most, where):
    """A question that the planner does not answer: only a limit may be the reason."""
    assert most is not None, "\n".join([str(error), *where])
    return "refused"


def least(order, costs, backward, most, plan, branches):
    """The least makespan of all orders asked for, and whether it is certain."""
    best = Fraction(plan.value)
    search = oracle_optima.Search(order.paths, order.path_of, costs, backward=backward, most=most)
    try:
        found, certain = search.below(best, most=branches), True
    except oracle_optima.TooLarge:
        found, certain = search.found, False
    return best if found is None else found, certain


CLAIMS = {
    "times": times_agree,
    "verdicts": verdicts_agree,
    "registered": registered_agree,
    "bounds": bounds_hold,
    "plans": plans_hold,
}
