"""What actions, messages and memory cost, as plain frozen values that are checked when made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from fractions import Fraction
from functools import partial
from numbers import Rational
from typing import Any, TypeGuard

import numpy as np

from hocket.errors import CostError
from hocket.ir import Schedule, shown
from hocket.tables import SIZES

Number = int | float | Fraction
PerStage = Number | tuple[Number, ...]

# What the numbers are the costs of. "rank": one rank's share of the model; "stage": one stage of
# the schedule, as it is; "layer": one layer, given as lists.
PER = ("rank", "stage", "layer")

# What a number above 0 may be: far beyond any unit, and neither a product of a few of them nor
# a sum over a schedule leaves the floats. A time made of several numbers may be longer.
_SMALLEST, _LARGEST, LONGEST = 1e-100, 1e100, 1e150


class Cycle(tuple[Number, ...]):
    """Values that repeat over the stages: stage s has value s mod their number."""


class Scale(dict[str, Number]):
    """`{"scale": x}` that can be a key, as costs are: x times the sum of a fused slot."""

    def __hash__(self) -> int:
        return hash(self["scale"])


@dataclass(frozen=True)
class Bytes:
    """Memory: each a number, or a list of them, per what the costs are per; true where any is set.

    static: weights, gradients, optimiser state. activation: held from F to B (or I). held:
    what of it is still held between I and W (left out: all of it). gradient: buffers of a
    running backward. message: the output of a stage. unit: of all of them, a key of
    `tables.SIZES`.
    """

    static: PerStage = 0
    activation: PerStage = 0
    held: PerStage | None = None
    gradient: PerStage = 0
    message: PerStage = 0
    unit: str = "B"

    def __post_init__(self) -> None:
        _normalise(self, _BYTES_RULES, "bytes.")

    def amount(self, size: Any) -> Any:
        """Bytes in the unit of these; None as it is, and any number where none of these is set."""
        return size if size is None or not self else quotient(size, SIZES[self.unit])

    def __bool__(self) -> bool:
        return (self.static, self.activation, self.held, self.gradient, self.message) != (
            0, 0, None, 0, 0
        )  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """How long actions and messages take.

    F, I, W, B: times, one number or a list; B left out is I + W. R, D, U: of a recomputation, an
    offload and a reload; each left out takes as long as F. FB: a slot that runs a forward
    and a backward together: "sum", "max", a number, or {"scale": x} of the sum.
    latency: every edge between two ranks; a message never occupies a queue, unless `p2p_overhead`
    is given: (receive, send) times that every F, B, I occupies its queue before and after its work
    (every fused slot once; W has no messages). With SEND and RECV in the order, those times
    are theirs. bandwidth: bytes per time unit, adds `bytes.message / bandwidth` to an edge.
    slice: factor of all these times for each slice of a sequence (later slices attend to more).
    microbatch: factor of the times of each microbatch's actions (of each sequence's, with slices).
    speed: relative speed of each rank; an action takes its time divided by its rank's speed.
    Neither changes latency, p2p_overhead or bytes.
    slowdown: how many times as long work on a rank's compute queue takes while another queue of
    the rank is busy (20 of 132 SMs given to messages: Fraction(132, 112)).
    cores: how many compute queues work at full speed at once, where the ranks share the cores of
    one machine; n of them work at cores/n of it. Left out: each has a core, or a device, to itself.
    comm_cpu: how long each message between ranks keeps a shared core busy in addition; it delays
    nothing else.
    per: what F, I, W, B, FB and bytes are the costs of, one of PER; None where a file does not
    say it, which is refused where it matters (`scaling.fitted`).
    Integers and fractions are exact; one float makes all times floats.

    Source: p2p_overhead models blocking point-to-point transfers.
    """

    F: PerStage = 1
    I: PerStage = 1  # noqa: E741 (the field's letter)
    W: PerStage = 1
    B: PerStage | None = None
    R: PerStage | None = None
    D: PerStage | None = None
    U: PerStage | None = None
    FB: str | Number | Mapping[str, Number] = "sum"
    latency: Number = 0
    bandwidth: Number | None = None
    p2p_overhead: tuple[Number, Number] | None = None
    slice: tuple[Number, ...] | None = None
    microbatch: tuple[Number, ...] | None = None
    speed: tuple[Number, ...] | None = None
    slowdown: Number = 1
    cores: int | None = None
    comm_cpu: Number = 0
    bytes: Bytes = field(default_factory=Bytes)
    unit: str = ""
    per: str | None = "stage"

    def __post_init__(self) -> None:
        _normalise(self, _COSTS_RULES)
        lengths = [len(x) for x in (self.I, self.W) if is_list(x)]
        if self.B is None and len(set(lengths)) > 1:
            raise CostError(
                f"I has {lengths[0]} values and W has {lengths[1]}, but B is left out and so their "
                "sum; give each one number, or one per stage"
            )
        if isinstance(self.FB, Number) and (self.microbatch, self.speed) != (None, None):
            raise CostError(
                'FB is one number, which microbatch and speed do not change; give "sum", "max" '
                "or { scale = x }"
            )

    @property
    def full_backward(self) -> PerStage:
        """Time of a full backward: B, or I + W."""
        if self.B is not None:
            return self.B
        i, w = self.I, self.W
        if not isinstance(i, tuple) and not isinstance(w, tuple):
            return i + w
        fixed = [len(x) for x in (i, w) if is_list(x)]
        n = max(fixed) if fixed else math.lcm(*(len(x) for x in (i, w) if isinstance(x, Cycle)))
        sums = [a + b for a, b in zip(_spread(i, n), _spread(w, n), strict=True)]
        return tuple(sums) if fixed else Cycle(sums)

    def time(self, name: str) -> PerStage:
        """The times of a kind whose row in `deps` names this field."""
        value = self.full_backward if name == "B" else getattr(self, name)
        return self.F if value is None else value

    def is_contended(self, schedule: Schedule) -> bool:
        """True where work may take longer while other queues are busy: see slowdown and cores."""
        computing = sum(not queue.stream for queue in schedule.queues)
        slows = self.slowdown != 1 and len(schedule.queues) > schedule.p
        return slows or self.shares_cores(computing)

    def shares_cores(self, queues: int) -> bool:
        """True where so many compute queues share fewer cores."""
        return self.cores is not None and self.cores < queues

    def raise_if_contended(self, schedule: Schedule) -> None:
        """Raises CostError where times depend on what overlaps: an order is not replayed then."""
        if self.is_contended(schedule):
            raise CostError(
                "with slowdown or cores, times depend on what overlaps; leave them out here, or "
                "use simulate for one order after the other"
            )


def is_list(value: Any) -> TypeGuard[tuple[Number, ...]]:
    """True for a list with one value per stage, rank or layer; a cycle is as long as needed."""
    return isinstance(value, tuple) and not isinstance(value, Cycle)


def quotient(a: Number, b: Number) -> Number:
    """a / b, exact where both are."""
    if isinstance(a, float) or isinstance(b, float):
        return a / b
    part = Fraction(a) / Fraction(b)
    return int(part) if part.denominator == 1 else part


def _spread(value: PerStage, n: int) -> tuple[Number, ...]:
    if isinstance(value, Cycle):
        return tuple(value[s % len(value)] for s in range(n))
    return value if isinstance(value, tuple) else (value,) * n


def per_stage(name: str, value: PerStage, n_stages: int) -> tuple[Number, ...]:
    """The value for each of n stages."""
    if is_list(value) and len(value) != n_stages:
        raise CostError(
            f"{name} has {len(value)} values, but the schedule has {n_stages} stages; "
            "give one number, or one per stage"
        )
    return _spread(value, n_stages)


# --- one rule per field: from what is given to the value that is kept ------------------------


FieldRule = Callable[[str, Any], Any]


def _normalise(value: Any, rules: Mapping[str, FieldRule], prefix: str = "") -> None:
    """Replaces each field of a frozen value by what its rule makes of it.

    Raises: CostError with one line per fault.
    """
    faults = []
    for name, rule in rules.items():
        try:
            object.__setattr__(value, name, rule(prefix + name, getattr(value, name)))
        except CostError as error:
            faults.append(str(error))
    if faults:
        raise CostError("\n".join(faults))


def _optional(rule: FieldRule) -> FieldRule:
    return lambda name, given: None if given is None else rule(name, given)


def _number(
    name: str, given: Any, what: str = "a number", least: Number = 0, *, above: bool = False
) -> Number:
    """The number as one of Python's own: an int, a float or a Fraction.

    Raises: CostError where it is no number, is too small, or leads beyond what floats hold.
    """
    if isinstance(given, np.generic):  # sums of np.float32 would round, of np.int64 wrap
        given = float(given) if isinstance(given, np.floating) else given.item()
    if isinstance(given, bool) or not isinstance(given, Rational | float | Decimal):
        raise CostError(f"{name} is {shown(given)}; it must be {what}")
    finite = given.is_finite() if isinstance(given, Decimal) else abs(given) < math.inf
    if not finite or given < 0:
        raise CostError(f"{name} is {shown(given)}; it must be 0 or more, and finite")
    if given < least or (above and not given):
        raise CostError(f"{name} is {given}; it must be {'above 0' if above else '1 or more'}")
    if given and not _SMALLEST <= given <= _LARGEST:
        raise CostError(
            f"{name} is {shown(given)}; non-zero values must lie between {_SMALLEST} and "
            f"{_LARGEST}; use a different unit"
        )
    if isinstance(given, int | float):
        return float(given) if isinstance(given, float) else int(given)
    return Fraction(given) if given else 0


def _per_stage(name: str, given: Any) -> PerStage:
    """One number, or a tuple or Cycle of some, as Python's own numbers."""
    what = "a number, or a list with one per stage"
    given = given.tolist() if isinstance(given, np.ndarray) else given
    if not isinstance(given, list | tuple):
        return _number(name, given, what)
    if not len(given):
        raise CostError(f"{name} is an empty list; it must be {what}")
    kind = Cycle if isinstance(given, Cycle) else tuple
    return kind(_number(name, x, what) for x in given)


def _row(
    name: str, given: Any, what: str, length: int | None = None, *, above: bool = False
) -> tuple[Number, ...]:
    """A list that is not by stage, as a tuple of Python's own numbers."""
    given = given.tolist() if isinstance(given, np.ndarray) else given
    if not isinstance(given, list | tuple) or isinstance(given, Cycle) or not given:
        raise CostError(f"{name} is {shown(given)}; it must be {what}")
    row = tuple(_number(name, x, above=above) for x in given)
    if length not in (None, len(row)):
        raise CostError(f"{name} is {shown(given)}; it must be {what}")
    return row


def _whole(name: str, given: Any) -> int:
    cores = _number(name, given, "a whole number")
    if not isinstance(cores, int) or cores < 1:
        raise CostError(f"{name} is {given}; it must be a whole number, 1 or more")
    return cores


def _word(name: str, given: Any, words: Sequence[str]) -> str:
    if not isinstance(given, str) or given not in words:
        raise CostError(f"{name} is {shown(given)}; it must be one of {', '.join(words)}")
    return given


def _unit(name: str, given: Any) -> str:
    if not isinstance(given, str):
        raise CostError(f'{name} is {shown(given)}; it must be a text such as "us"')
    return given


def _bytes(name: str, given: Any) -> Bytes:
    if not isinstance(given, Bytes):
        raise CostError(f"{name} is {shown(given)}; it must be Bytes(...)")
    return given


def fused_rule(fb: Any) -> tuple[str, Number]:
    """Which way FB is given, and its number: ("sum" | "max" | "scale" | "number", x).

    Raises: CostError.
    """
    if isinstance(fb, str) and fb in ("sum", "max"):
        return fb, 0
    if isinstance(fb, Mapping) and set(fb) == {"scale"}:
        return "scale", _number("FB.scale", fb["scale"])
    return "number", _number("FB", fb, '"sum", "max", a number, or { scale = x }')


def _fused(name: str, given: Any) -> str | Number | Scale:
    rule, number = fused_rule(given)
    return {"scale": Scale(scale=number), "number": number}.get(rule, rule)


_BYTES_RULES: dict[str, FieldRule] = {
    **{f.name: _per_stage for f in fields(Bytes)},
    "held": _optional(_per_stage),
    "unit": partial(_word, words=tuple(SIZES)),
}
_COSTS_RULES: dict[str, FieldRule] = {
    "F": _per_stage,
    "I": _per_stage,
    "W": _per_stage,
    **dict.fromkeys("BRDU", _optional(_per_stage)),
    "FB": _fused,
    "latency": _number,
    "bandwidth": _optional(partial(_number, above=True)),
    "p2p_overhead": _optional(partial(_row, what="two numbers, (receive, send)", length=2)),
    "slice": _optional(partial(_row, what="a list with one factor per slice")),
    "microbatch": _optional(partial(_row, what="a list with one factor per microbatch")),
    "speed": _optional(partial(_row, what="a list with one speed per rank", above=True)),
    "slowdown": partial(_number, least=1),
    "cores": _optional(_whole),
    "comm_cpu": _number,
    "bytes": _bytes,
    "unit": _unit,
    "per": _optional(partial(_word, words=PER)),
}
