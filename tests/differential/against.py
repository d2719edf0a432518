"""What hocket gives, beside what the oracles give. All names of hocket's inside stand here."""

import contextlib
import io
import json
import random
from fractions import Fraction

import oracle_draw
import oracle_events
import oracle_memory
from known import OPEN
from oracle_text import WORK, read, write
from oracle_verdicts import TRANSPORTS, verdict

import hocket
from hocket.cli import main
from hocket.costs import Cycle

WITHIN = 0 if "messages within a rank" in OPEN else 0.1
CLOSE = 1e-9  # of two floats, relative: sums in another order


def costs_of(data):
    """hocket.Costs of the plain data of a costs file."""

    def given(value):
        if isinstance(value, dict):
            return Cycle(value["cycle"]) if "cycle" in value else value
        return tuple(value) if isinstance(value, list) else value

    out = {name: given(value) for name, value in data.items() if name not in ("bytes", "lane")}
    if "lane" in data:
        out["lane"] = (data["lane"]["recv"], data["lane"]["send"])
    sizes = {name: given(value) for name, value in data.get("bytes", {}).items()}
    if "held_between_I_and_W" in sizes:
        sizes["held"] = sizes.pop("held_between_I_and_W")
    return hocket.Costs(**out, bytes=hocket.Bytes(**sizes))


def times_of(timeline):
    """Start and end of each action by name."""
    schedule, value = timeline.schedule, timeline.ticks.value
    names = [str(a) for slots in schedule.order.values() for slot in slots for a in slot]
    times = zip(timeline.start.tolist(), timeline.end.tolist(), strict=True)
    return {name: (value(a), value(b)) for name, (a, b) in zip(names, times, strict=True)}


def agree(a, b):
    """Whether two numbers are equal: exactly, or where one is a float, but for rounding."""
    if isinstance(a, float):
        return abs(a - float(b)) <= CLOSE * max(1.0, abs(a))
    return Fraction(a) == b


def differences_of_times(order, costs):
    """Where hocket's simulation and the one by events differ, as sentences."""
    timeline = hocket.simulate(hocket.loads(write(order)), costs_of(costs))
    run = oracle_events.simulate(order, costs)
    got = times_of(timeline)
    out = []
    for action, (start, end) in run.times.items():
        for name, a, b in zip(("start", "end"), got[str(action)], (start, end), strict=True):
            out += [] if agree(a, b) else [f"{name} of {action}: hocket {a}, events {b}"]
    whole = {
        "makespan": (timeline.makespan, run.makespan),
        "span": (timeline.span, run.span),
        "bubble ratio": (float(timeline.bubble_ratio), run.bubble_ratio),
    }
    for rank, (summary, (pairs, sizes)) in enumerate(
        zip(timeline.ranks, oracle_memory.peaks(run, costs), strict=True)
    ):
        busy = sum(t for q, t in run.busy.items() if int(q.split("/")[0]) == rank)
        whole[f"busy of rank {rank}"] = summary.busy, busy
        whole[f"in flight on rank {rank}"] = summary.peak_in_flight, pairs
        whole[f"bytes of rank {rank}"] = float(summary.peak_bytes), sizes
    return out + [
        f"{what}: hocket {a}, events {b}" for what, (a, b) in whole.items() if not agree(a, b)
    ]


def verdict_of(order, transport):
    """Whether hocket's check finds nothing."""
    return hocket.check(hocket.loads(write(order)), transport=transport).ok


def drawn(rng):
    """A valid order without what is known to be wrong."""
    order = oracle_draw.order(rng, oracle_draw.placement(rng), within=WITHIN)
    return alone(order) if "slots of messages on streams" in OPEN else order


def alone(order):
    """The order with the messages of its streams one to a slot."""
    for queue, slots in order.queues.items():
        if any("/" in q for q in order.queues):
            order.queues[queue] = [
                part for slot in slots
                for part in ([slot] if slot[0].kind in WORK else [(a,) for a in slot])
            ]  # fmt: skip
    return order


def times_agree(seed):
    """One drawn order under drawn costs. Raises: AssertionError with all that is needed to see it."""
    rng = random.Random(f"times {seed}")
    order = drawn(rng)
    costs = oracle_draw.costs(rng, order)
    if "transfers in a slot of messages" in OPEN and "lane" in costs and any(
        len(slot) > 1 and slot[0].kind not in WORK for slots in order.queues.values() for slot in slots
    ):
        del costs["lane"]
    assert read(write(order)) == order
    found = differences_of_times(order, costs)
    assert not found, "\n".join([f"seed {seed}", *found[:6], write(order), str(costs)])


def verdicts_agree(seed):
    """One drawn order, mostly broken, under each transport; gives the verdicts."""
    rng = random.Random(f"verdicts {seed}")
    order = drawn(rng)
    if rng.random() < 0.8:
        order = oracle_draw.broken(rng, order)
        order = alone(order) if "slots of messages on streams" in OPEN else order
    verdicts = {transport: verdict(order, transport) for transport in TRANSPORTS}
    if "rendezvous on streams" in OPEN and any("/net" in q for q in order.queues):
        del verdicts["rendezvous"]
    wrong = [
        f"{transport}: hocket says {'fine' if ok else 'bad'}, the interpreter {wanted}"
        for transport, wanted in verdicts.items()
        if (ok := verdict_of(order, transport)) != (wanted == "runs")
    ]
    assert not wrong, "\n".join([f"seed {seed}", *wrong, write(order)])
    return tuple(verdicts.values())


# --- bounds of a simulation ----------------------------------------------------------------------


def toml(costs):
    """The text of a costs file."""

    def text(value):
        if isinstance(value, dict):
            return "{ " + ", ".join(f"{k} = {text(v)}" for k, v in value.items()) + " }"
        if isinstance(value, list):
            return "[" + ", ".join(map(text, value)) + "]"
        return json.dumps(float(value) if isinstance(value, Fraction) else value)

    return "".join(f"{name} = {text(value)}\n" for name, value in costs.items())


def command(*words):
    """What a command prints as JSON."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main([*map(str, words), "--json"])
    assert not status, out.getvalue()
    return json.loads(out.getvalue())


def bounds_hold(seed, folder):
    """The bound that a simulation prints is no longer than the run; the file reads as it was meant."""
    rng = random.Random(f"bounds {seed}")
    placed = oracle_draw.placement(rng)
    order = drawn(rng, placed)
    costs = oracle_draw.costs(rng, order)
    idle = any(not slots for slots in order.queues.values())
    if "bounds with a rank that runs nothing" in OPEN and idle:
        return
    schedule, file = folder / "drawn.sched", folder / "costs.toml"
    schedule.write_text(write(order))
    file.write_text(toml(costs))
    result = command("simulate", schedule, "--costs", file)
    ...
