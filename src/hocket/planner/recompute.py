"""Activations computed again instead of held, and buffers of messages: other costs, same rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from hocket.costs import Costs, Number, per_stage
from hocket.costs.scaling import n_layers
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


def without_full(levels: Sequence[Level]) -> tuple[Level, ...]:
    """The levels without what an R does: nothing in the place of all."""
    return tuple(NONE if level == FULL else level for level in levels)


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


def needs(
    layers: Costs, placement: Placement, *, levels: Sequence[Level], buffers: str
) -> Callable[[int, int, int], tuple[float, float, float]]:
    """What a stage of some layers needs with one microbatch, as `Room.need`.

    levels: what it may compute again; the one that holds least counts. buffers: as in a Request.
    """
    n, m, path = n_layers(layers), placement.m, placement.paths[0]
    b = layers.bytes
    held = b.activation if b.held is None else b.held
    static, activation, after, gradient = (
        [0.0, *accumulate(map(float, per_stage(name, value, n)))]
        for name, value in (
            ("static", b.static), ("activation", b.activation), ("held", held),
            ("gradient", b.gradient),
        )
    )  # fmt: skip
    message = [float(x) for x in per_stage("message", b.message, n)]
    comes = [s > 0 and path[s - 1].rank != path[s].rank for s in range(len(path))]
    each = m if buffers == "each" else 0
    flying = 1 if buffers == "in flight" else 0

    def need(s: int, start: int, end: int) -> tuple[float, float, float]:
        first = message[start - 1] if s and comes[s] else 0.0
        last = message[end - 1] if s + 1 < len(path) and comes[s + 1] else 0.0
        fixed = static[end] - static[start] + each * (first + last) + flying * last
        made = activation[end] - activation[start] + flying * first
        entry = message[start - 1] if s else message[end - 1]
        kept = min(
            [made, *(min(made, entry) if x.keep is None else made * float(x.keep) for x in levels)]
        )
        running = max(made + gradient[end] - gradient[start], after[end] - after[start])
        return fixed, kept, running - kept

    return need
