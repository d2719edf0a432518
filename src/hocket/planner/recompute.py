"""Activations computed again instead of held, and buffers of messages: other costs, same rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hocket.costs import Costs, Number, per_stage, quotient
from hocket.errors import UsageError
from hocket.ir import Placement


class Level(NamedTuple):
    """How much a stage computes again: time as a share of F, and the share of bytes still held.

    keep None: only the stage's input (its message) stays from F to the backward.
    """

    name: str
    time: Number
    keep: Number | None


NONE = Level("none", 0, 1)
FULL = Level("full", 1, None)


def level(text: str) -> Level:
    """`full`, or `selective=TIME/KEEP`: shares of F and of the activation.

    Raises: UsageError.
    """
    if text in ("full", "none"):
        return FULL if text == "full" else NONE
    name, equals, shares = text.partition("=")
    time, slash, keep = shares.partition("/")
    wrong = UsageError(
        "recompute: expected full or selective=TIME/KEEP such as selective=0.1/0.4, TIME 0 or more "
        f"and KEEP from 0 to 1, found {text!r}"
    )
    if not (equals and slash):
        raise wrong
    try:
        found = Level(name, float(time), float(keep))
    except ValueError:
        raise wrong from None
    if not (0 <= float(time) < math.inf and 0 <= float(keep) <= 1):
        raise wrong
    return found


def recomputed(costs: Costs, levels: Sequence[Level]) -> Costs:
    """Costs of stages that recompute at these levels, `[stage]`.

    The backward (I where it is split) first runs the missing part of the forward again. What it
    makes is held while the backward runs, and, where W comes later, until W as if nothing had been
    saved: delaying W takes back the saving.
    """
    n = len(levels)
    b = costs.bytes
    f = per_stage("F", costs.F, n)
    extra = [x * lv.time for x, lv in zip(f, levels, strict=True)]

    def plus(name: str, value: object) -> tuple[Number, ...]:
        return tuple(x + y for x, y in zip(per_stage(name, value, n), extra, strict=True))  # ty: ignore

    activation = per_stage("bytes.activation", b.activation, n)
    message = per_stage("bytes.message", b.message, n)
    held = activation if b.held is None else per_stage("bytes.held", b.held, n)
    kept = tuple(
        a if lv.keep == 1 else min(a, message[max(0, s - 1)]) if lv.keep is None
        else a * lv.keep
        for s, (a, lv) in enumerate(zip(activation, levels, strict=True))
    )  # fmt: skip
    gradient = per_stage("bytes.gradient", b.gradient, n)
    again = tuple(g + a - k for g, a, k in zip(gradient, activation, kept, strict=True))
    return replace(
        costs, I=plus("I", costs.I), B=None if costs.B is None else plus("B", costs.B),
        bytes=replace(b, activation=kept, held=held, gradient=again),
    )  # fmt: skip


def receive_buffers(
    placement: Placement, costs: Costs, *, in_flight: Sequence[int], prefetch: bool = False
) -> list[dict[str, Number]]:
    """Bytes of receive buffers of each rank: needed, and with one for every microbatch.

    An input is needed until its backward: a buffer for each microbatch in flight; of gradients one
    is in use at a time (two with `prefetch`).
    """
    n, m = placement.n_stages, placement.m
    message = per_stage("bytes.message", costs.bytes.message, n)
    out: list[dict[str, Number]] = []
    for rank in range(placement.p):
        forward = backward = 0
        for path in placement.paths:
            for s, queue in enumerate(path):
                if queue.rank != rank:
                    continue
                if s and path[s - 1].rank != rank:
                    forward += message[s - 1]
                if s + 1 < len(path) and path[s + 1].rank != rank:
                    backward += message[s]
        stages = sum(q.rank == rank for path in placement.paths for q in path)
        needed = quotient(forward * in_flight[rank], stages) if stages else 0
        out.append({
            "forward": needed, "backward": backward * (2 if prefetch else 1),
            "forward_each": forward * m, "backward_each": backward * m,
        })  # fmt: skip
    return out


def with_receive_buffers(costs: Costs, placement: Placement, *, each: bool) -> Costs:
    """Costs whose bytes count receive buffers that the activations do not include.

    each: one buffer for every microbatch of the step, allocated once; else one for each in flight
    and one for gradients.
    """
    n, m = placement.n_stages, placement.m
    b = costs.bytes
    message = per_stage("bytes.message", b.message, n)
    path = placement.paths[0]
    forward = [
        message[s - 1] if s and path[s - 1].rank != path[s].rank else 0 for s in range(len(path))
    ]
    backward = [
        message[s] if s + 1 < n and path[s + 1].rank != path[s].rank else 0
        for s in range(len(path))
    ]
    static = per_stage("bytes.static", b.static, n)
    activation = per_stage("bytes.activation", b.activation, n)
    if each:
        fixed = tuple(x + m * (f + g) for x, f, g in zip(static, forward, backward, strict=True))
        return replace(costs, bytes=replace(b, static=fixed))
    held = None if b.held is None else per_stage("bytes.held", b.held, n)
    return replace(costs, bytes=replace(
        b, static=tuple(x + g for x, g in zip(static, backward, strict=True)),
        activation=tuple(x + f for x, f in zip(activation, forward, strict=True)),
        held=held if held is not None else activation,
    ))  # fmt: skip
