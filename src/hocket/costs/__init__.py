"""Seconds and bytes as plain data, and how they become durations of slots and delays of edges."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from itertools import chain
from numbers import Rational
from pathlib import Path
from typing import Any

import numpy as np

from hocket import loops
from hocket.deps import MESSAGE, OFFSET, ROWS, SIDES
from hocket.errors import CostError, UsageError
from hocket.files import read_text
from hocket.graph import sources_by_stage
from hocket.ir import Array, Kind, Schedule, kinds_of, shown, stages_of

Number = int | float | Fraction
PerStage = Number | tuple[Number, ...]

# What a number above 0 may be: far beyond any unit, and neither a product of a few of them nor
# a sum over a schedule leaves the floats. A time made of several numbers may be longer.
_SMALLEST, _LARGEST, _LONGEST = 1e-100, 1e100, 1e150


class Cycle(tuple[Number, ...]):
    """Values that repeat over the stages: stage s has value s mod their number."""


class Scale(Mapping[str, Number]):
    """`{"scale": x}` as a value, so that costs can be a key: x times the sum of a fused slot."""

    __slots__ = ("_factor",)

    def __init__(self, factor: Number) -> None:
        self._factor = factor

    def __getitem__(self, key: str) -> Number:
        if key != "scale":
            raise KeyError(key)
        return self._factor

    def __iter__(self) -> Iterator[str]:
        return iter(("scale",))

    def __len__(self) -> int:
        return 1

    def __hash__(self) -> int:
        return hash(("scale", self._factor))

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass(frozen=True)
class Bytes:
    """Memory per stage: a number for all stages, or one a stage. Bytes, or any one unit.

    static: weights, gradients, optimiser state. activation: held from F to B (or I). held:
    what of it is still held between I and W (left out: all of it). gradient: buffers of a
    running backward. message: the output of a stage.
    """

    static: PerStage = 0
    activation: PerStage = 0
    held: PerStage | None = None
    gradient: PerStage = 0
    message: PerStage = 0

    def __post_init__(self) -> None:
        _per_stage_fields(self, [f.name for f in fields(self)], optional="held", prefix="bytes.")


@dataclass(frozen=True)
class Costs:
    """How long actions and messages take.

    F, I, W, B: time per stage, one number or one a stage; B left out is I + W. FB: a slot that
    runs a forward and a backward together: "sum", "max", a number, or {"scale": x} of the sum.
    latency: every edge between two ranks; a message never occupies a queue, unless `p2p_overhead`
    is given: (receive, send) times that every F, B, I occupies its queue before and after its work
    (every fused slot once; W has no messages). With SEND and RECV in the order, those times
    are theirs. bandwidth: bytes per time unit, adds `bytes.message / bandwidth` to an edge.
    slice: factor of F, B, I and W for each slice of a sequence (later slices attend to more).
    slowdown: how many times as long work on a rank's compute queue takes while another queue of the
    rank is busy (20 of 132 SMs given to messages: Fraction(132, 112)).
    cores: how many compute queues work at full speed at once, where the ranks share the cores of
    one machine; n of them work at cores/n of it. Left out: each has a core, or a device, to itself.
    comm_cpu: how long each message between ranks keeps a shared core busy beside all that; nobody
    waits for it but for the core.
    Integers and fractions are exact; one float makes all times floats.

    Source: the lane model is that of blocking point-to-point transfers.
    """

    F: PerStage = 1
    I: PerStage = 1  # noqa: E741 (the field's letter)
    W: PerStage = 1
    B: PerStage | None = None
    FB: str | Number | Mapping[str, Number] = "sum"
    latency: Number = 0
    bandwidth: Number | None = None
    p2p_overhead: tuple[Number, Number] | None = None
    slice: tuple[Number, ...] | None = None
    slowdown: Number = 1
    cores: int | None = None
    comm_cpu: Number = 0
    bytes: Bytes = field(default_factory=Bytes)
    unit: str = ""

    def __post_init__(self) -> None:
        _per_stage_fields(self, ["F", "I", "W", "B"], optional="B")
        normal: dict[str, Any] = {
            x: _number(x, getattr(self, x)) for x in ("latency", "slowdown", "comm_cpu")
        }
        if self.bandwidth is not None:
            normal["bandwidth"] = _number("bandwidth", self.bandwidth)
            if not normal["bandwidth"]:
                raise CostError(f"bandwidth is {self.bandwidth}; it must be above 0")
        if normal["slowdown"] < 1:
            raise CostError(f"slowdown is {self.slowdown}; it must be 1 or more")
        if self.cores is not None:
            normal["cores"] = _number("cores", self.cores, "a whole number")
            if not isinstance(normal["cores"], int) or normal["cores"] < 1:
                raise CostError(f"cores is {self.cores}; it must be a whole number, 1 or more")
        if self.p2p_overhead is not None:
            normal["p2p_overhead"] = _row(
                "p2p_overhead", self.p2p_overhead, "two numbers, (receive, send)"
            )
            if len(normal["p2p_overhead"]) != 2:
                raise CostError(
                    f"p2p_overhead is {shown(self.p2p_overhead)}; it must be two numbers, "
                    "(receive, send)"
                )
        if self.slice is not None:
            normal["slice"] = _row("slice", self.slice, "a list with one factor a slice")
        rule, number = fused_rule(self.FB)
        normal["FB"] = {"scale": Scale(number), "number": number}.get(rule, rule)
        for name, value in normal.items():
            object.__setattr__(self, name, value)
        if not isinstance(self.bytes, Bytes):
            raise CostError(f"bytes is {shown(self.bytes)}; it must be Bytes(...)")
        if not isinstance(self.unit, str):
            raise CostError(f'unit is {shown(self.unit)}; it must be a text such as "us"')
        self._check_whole()

    def _check_whole(self) -> None:
        """A backward that is left out needs as many values of I as of W."""
        i, w = (
            x if isinstance(x, tuple) and not isinstance(x, Cycle) else () for x in (self.I, self.W)
        )
        if self.B is None and i and w and len(i) != len(w):
            raise CostError(
                f"I has {len(i)} values and W has {len(w)}, but B is left out and so their sum; "
                "give each one number, or one a stage"
            )

    @property
    def full_backward(self) -> PerStage:
        """Time of a full backward: B, or I + W."""
        if self.B is not None:
            return self.B
        i, w = self.I, self.W
        if not isinstance(i, tuple) and not isinstance(w, tuple):
            return i + w
        fixed = [len(x) for x in (i, w) if isinstance(x, tuple) and not isinstance(x, Cycle)]
        n = max(fixed) if fixed else math.lcm(*(len(x) for x in (i, w) if isinstance(x, Cycle)))
        sums = [a + b for a, b in zip(_spread(i, n), _spread(w, n), strict=True)]
        return tuple(sums) if fixed else Cycle(sums)

    def time(self, field: str) -> PerStage:
        """The times of a kind whose row in `deps` names this field."""
        return self.full_backward if field == "B" else getattr(self, field)

    def is_contended(self, schedule: Schedule) -> bool:
        """True where work may take longer while other queues are busy: see slowdown and cores."""
        computing = sum(not queue.stream for queue in schedule.queues)
        shares = self.slowdown != 1 and len(schedule.queues) > schedule.p
        return shares or self.shares_cores(computing)

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

    def split(self, v: int, slices: int = 1) -> Costs:
        """The same model in v times as many stages and the same sequences in slices.

        A stage takes 1/v, a slice of a sequence 1/slices of what it came from; a message is as
        large as before (a slice's share of it), static memory goes with the stages.
        """
        if v == slices == 1:
            return self

        def part(value: Any, share: int) -> Any:
            if value is None or isinstance(value, str | Mapping):
                return value
            if isinstance(value, tuple):
                return type(value)(quotient(x, share) for x in value for _ in range(v))
            return quotient(value, share)

        shares = dict.fromkeys(("activation", "held", "gradient"), v * slices)
        shares |= {"static": v, "message": slices}
        sizes = {name: part(getattr(self.bytes, name), n) for name, n in shares.items()}
        times = {x: part(getattr(self, x), v * slices) for x in ("F", "I", "W", "B", "FB")}
        return replace(self, **times, bytes=Bytes(**sizes))


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


def _per_stage_fields(value: Any, names: Sequence[str], *, optional: str, prefix: str = "") -> None:
    """Makes fields of a frozen value numbers or tuples of them."""
    for name in names:
        given = getattr(value, name)
        if given is not None or name != optional:
            object.__setattr__(value, name, _per_stage(prefix + name, given))


def _per_stage(name: str, given: Any) -> PerStage:
    """One number, or a tuple or Cycle of some, as Python's own numbers."""
    what = "a number, or a list with one a stage"
    given = given.tolist() if isinstance(given, np.ndarray) else given
    if not isinstance(given, list | tuple):
        return _number(name, given, what)
    if not len(given):
        raise CostError(f"{name} is an empty list; it must be {what}")
    kind = Cycle if isinstance(given, Cycle) else tuple
    return kind(_number(name, x, what) for x in given)


def _row(name: str, given: Any, what: str) -> tuple[Number, ...]:
    """A list that is not by stage, as a tuple of Python's own numbers."""
    given = given.tolist() if isinstance(given, np.ndarray) else given
    if not isinstance(given, list | tuple) or isinstance(given, Cycle) or not given:
        raise CostError(f"{name} is {shown(given)}; it must be {what}")
    return tuple(_number(name, x) for x in given)


def _number(name: str, given: Any, what: str = "a number") -> Number:
    """The number as one of Python's own: an int, a float or a Fraction.

    Raises: CostError where it is no number, is negative, or leads beyond what floats hold.
    """
    if isinstance(given, np.generic):  # sums of np.float32 would round, of np.int64 wrap
        given = float(given) if isinstance(given, np.floating) else given.item()
    if isinstance(given, bool) or not isinstance(given, Rational | float | Decimal):
        raise CostError(f"{name} is {shown(given)}; it must be {what}")
    finite = given.is_finite() if isinstance(given, Decimal) else abs(given) < math.inf
    if not finite or given < 0:
        raise CostError(f"{name} is {shown(given)}; it must be 0 or more, and finite")
    if given and not _SMALLEST <= given <= _LARGEST:
        raise CostError(
            f"{name} is {shown(given)}; what is not 0 must be from {_SMALLEST} to "
            f"{_LARGEST}, choose another unit"
        )
    if isinstance(given, int | float):
        return float(given) if isinstance(given, float) else int(given)
    return Fraction(given) if given else 0


def per_stage(name: str, value: PerStage, n_stages: int) -> tuple[Number, ...]:
    """The value for each of n stages."""
    if isinstance(value, tuple) and not isinstance(value, Cycle) and len(value) != n_stages:
        raise CostError(
            f"{name} has {len(value)} values, but the schedule has {n_stages} stages; "
            "give one number, or one a stage"
        )
    return _spread(value, n_stages)


# --- ticks: exact integers where the costs are exact --------------------------------------


@dataclass(frozen=True)
class Ticks:
    """How times are held in arrays: integers of 1/scale, or floats (scale 1)."""

    scale: int
    exact: bool

    def array(self, values: Sequence[Number]) -> Array:
        """Times as an array of ticks."""
        if not self.exact:
            return np.array([float(x) for x in values], dtype=np.float64)
        whole = {x: int(x * self.scale) for x in set(values)}
        return np.array([*map(whole.__getitem__, values)], dtype=np.int64)

    def value(self, ticks: Any) -> Number:
        """Ticks as a time: an int where it is whole, a Fraction or a float where it is not."""
        if not self.exact:
            return float(ticks)
        whole, rest = divmod(int(ticks), self.scale)
        return Fraction(int(ticks), self.scale) if rest else whole

    def values(self, ticks: Array) -> list[Number]:
        """Each of some ticks as a time, `[...]`."""
        return ticks.tolist() if self.scale == 1 else list(map(self.value, ticks.tolist()))


def ticks_for(values: Sequence[Number], n_actions: int) -> Ticks:
    """The finest exact tick of these values; floats where there is none that fits 63 bits."""
    if float in set(map(type, values)):
        return Ticks(1, exact=False)
    distinct = set(values)
    scale = math.lcm(*(Fraction(x).denominator for x in distinct))
    largest = max(map(abs, distinct), default=0)
    if largest * scale * max(n_actions, 1) >= 2**62:
        return Ticks(1, exact=False)
    return Ticks(scale, exact=True)


# --- from costs to durations ---------------------------------------------------------------


def fused_rule(fb: Any) -> tuple[str, Number]:
    """Which way FB is given, and its number: ("sum" | "max" | "scale" | "number", x).

    Raises: CostError.
    """
    if isinstance(fb, str) and fb in ("sum", "max"):
        return fb, 0
    if isinstance(fb, Mapping) and set(fb) == {"scale"}:
        return "scale", _number("FB.scale", fb["scale"])
    return "number", _number("FB", fb, '"sum", "max", a number, or { scale = x }')


class CostTable:
    """The costs of one schedule as arrays of ticks.

    `table`: time of each computation, `[kind, slice and stage]`.
    """

    def __init__(self, costs: Costs, schedule: Schedule) -> None:
        self.costs, self.schedule = costs, schedule
        n = schedule.placement.n_stages
        times: dict[Kind, tuple[Number, ...]] = {
            kind: per_stage(row.cost, costs.time(row.cost), n) if row.cost else (0,) * n
            for kind, row in ROWS.items()
        }
        receive, send = costs.p2p_overhead if costs.p2p_overhead is not None else (0, 0)
        rule, fused = fused_rule(costs.FB)
        wires = self._wires(n)
        values = [*chain.from_iterable(times.values())]
        values += [receive, send, costs.latency, costs.comm_cpu, *wires]
        if rule == "number":
            values.append(fused)
        slices = self._slice_factors()
        values += [x * factor for factor in {*slices} - {1} for row in times.values() for x in row]
        if rule == "scale":
            values += [x * fused for x in values]
        longest = max(values)
        if not longest <= _LONGEST:
            raise CostError(
                f"these costs make a time of {float(longest):.3g}; it must be at most {_LONGEST}, "
                "choose another unit"
            )
        self.ticks = ticks_for(values, len(schedule.codes))
        self.table = np.stack([
            self.ticks.array([x * factor for factor in slices for x in row])
            if slices != (1,) else self.ticks.array(row) for row in times.values()
        ])  # fmt: skip
        self._wires_ticks = self.ticks.array(wires)
        self._fused = (rule, fused)
        self._lane = self.ticks.array([receive, send])
        self._latency = self.ticks.array([costs.latency])[0]

    def _slice_factors(self) -> tuple[Number, ...]:
        """Factor of each slice; (1,) for schedules without slices."""
        n, given = self.schedule.placement.slices, self.costs.slice
        if given is None or n == 1:
            return (1,) * n
        if len(given) != n:
            raise CostError(f"slice has {len(given)} factors, but the schedule has {n} slices")
        return given

    def _wires(self, n: int) -> list[Number]:
        """Time of each stage's output message beyond the latency."""
        if self.costs.bandwidth is None:
            return [0] * n
        sizes = per_stage("bytes.message", self.costs.bytes.message, n)
        return [quotient(x, self.costs.bandwidth) for x in sizes]

    def work(self) -> Array:
        """Work of each slot without transfers, `[slot]`."""
        s, (rule, fused_cost) = self.schedule, self._fused
        work = np.zeros(s.n_slots, dtype=self.table.dtype)
        fused = np.zeros(0 if s.is_single or rule in ("sum", "max") else s.n_slots, dtype=bool)
        loops.run(
            loops.gather_work, len(s.codes),
            (
                s.codes, s.slots, self.table.ravel(), self.table.shape[1],
                s.placement.n_stages, s.placement.slices, *SIDES, rule == "max",
            ),
            (work, fused),
        )  # fmt: skip
        if rule == "number":
            work[np.flatnonzero(fused)] = self.ticks.array([fused_cost])[0]
        elif rule == "scale":
            at = np.flatnonzero(fused)
            work[at] = [x * fused_cost for x in work[at].tolist()]
        return work

    def occupied(self) -> Array:
        """Time that each slot occupies its queue, `[slot]`: its work, its transfers around it."""
        if self.around is None:
            return self.work()
        before, after = self.around
        return before + self.work() + after

    @cached_property
    def around(self) -> tuple[Array, Array] | None:
        """What `lanes` gives; None where transfers occupy no queue."""
        return None if self.costs.p2p_overhead is None else self.lanes()

    def lanes(self) -> tuple[Array, Array]:
        """Time each slot occupies its queue before and after its work, `[slot]` both."""
        s = self.schedule
        receive, send = self._lane
        before, after = (np.zeros(s.n_slots, dtype=self.table.dtype) for _ in range(2))
        if self.costs.p2p_overhead is None:
            return before, after
        if s.has_communication:
            sends, receives, _ = zip(*MESSAGE.values(), strict=True)
        else:
            sends = receives = tuple(MESSAGE)
        kinds = kinds_of(s.codes)
        for lane, some, time in ((before, receives, receive), (after, sends, send)):
            lane[np.logical_or.reduceat(np.isin(kinds, some), s.slots[:-1])] = time
        return before, after

    @property
    def adds_up(self) -> bool:
        """True when a slot occupies its queue for the sum of its parts, and no longer."""
        return self.costs.p2p_overhead is None and (
            self.schedule.is_single or self._fused[0] == "sum"
        )

    def delays_of_needs(self) -> Array | None:
        """Time from the end of each need's source to who needs it, `[need, path, stage]`.

        None where messages take no time.
        """
        if self.costs.bandwidth is None and not self._latency:
            return None
        codes, crosses = sources_by_stage(self.schedule)
        return np.where(crosses, self.ways(codes), 0)

    def delays(self, source: Array, crosses: Array) -> Array:
        """Time from the end of each edge's source to its target, `[edge]`."""
        delays = np.zeros(len(source), dtype=self.table.dtype)
        if self.costs.bandwidth is None:
            if self._latency:
                np.multiply(crosses, self._latency, out=delays)
            return delays
        delays[crosses] = self.ways(self.schedule.codes[source[crosses]])
        return delays

    def ways(self, codes: Array) -> Array:
        """Time that the results of these actions take to the next rank, `[action]`."""
        kinds, stages = kinds_of(codes), stages_of(codes)
        boundary = stages + np.minimum(OFFSET[kinds], 0)
        return self._latency + self._wires_ticks[boundary]


# --- costs.toml -----------------------------------------------------------------------------

_PROFILES = Path(__file__).parent / "profiles"
_KEYS = {f.name for f in fields(Costs)}
FORMER = {"lane": "p2p_overhead", "share": "slowdown", "copying": "comm_cpu"}
_BYTES = {"static", "activation", "held_between_I_and_W", "gradient", "message"}


def profiles() -> list[str]:
    """The names of the built-in cost profiles."""
    return sorted(file.stem for file in _PROFILES.glob("*.toml"))


def load_costs(path: str | Path) -> Costs:
    """Costs from a `costs.toml` (the format is in docs/format.md), or a built-in profile by name.

    Raises: CostError, naming the file, the key and what it must be.
    """
    import tomllib

    if str(path) in profiles() and not Path(path).exists():
        path = _PROFILES / f"{path}.toml"
    try:
        data = tomllib.loads(read_text(path))
    except UsageError as error:
        known = "" if Path(path).suffix else f"; built-in profiles: {', '.join(profiles())}"
        raise CostError(f"{error}{known}") from None
    except (ValueError, RecursionError) as error:  # also digits and brackets by the thousand
        raise CostError(f"{path}: not TOML: {error}") from None
    try:
        return costs_from(data)
    except CostError as error:
        raise CostError(f"{path}: {error}") from None


def costs_from(data: Mapping[str, Any]) -> Costs:
    """Costs from the plain data of a `costs.toml`."""
    for former, name in FORMER.items():
        if former in data and name in data:
            raise CostError(f"{former} and {name} are both given; {former} is the former name")
    data = {FORMER.get(key, key): value for key, value in data.items()}
    _known("key", data, _KEYS)
    values: dict[str, Any] = {k: _value(v) for k, v in data.items()}
    lane = values.get("p2p_overhead")
    if lane is not None:
        if not isinstance(lane, Mapping):
            raise CostError(f"p2p_overhead is {lane!r}; it must be {{ recv = x, send = y }}")
        _known("key of p2p_overhead", lane, {"recv", "send"})
        values["p2p_overhead"] = (lane.get("recv", 0), lane.get("send", 0))
    sizes = values.get("bytes", {})
    if not isinstance(sizes, Mapping):
        raise CostError(f"bytes is {sizes!r}; it must be a table [bytes]")
    _known("key of bytes", sizes, _BYTES)
    sizes = {k: _value(v) for k, v in sizes.items()}
    if "held_between_I_and_W" in sizes:
        sizes["held"] = sizes.pop("held_between_I_and_W")
    values["bytes"] = Bytes(**sizes)
    return Costs(**values)


def _value(given: Any) -> Any:
    """A list as a tuple, `{ cycle = [...] }` as a Cycle, anything else as it is."""
    if isinstance(given, Mapping) and set(given) == {"cycle"} and isinstance(given["cycle"], list):
        return Cycle(given["cycle"])
    return tuple(given) if isinstance(given, list) else given


def _known(what: str, given: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise CostError(f"unknown {what} {unknown[0]!r}; known are {', '.join(sorted(known))}")


def costs_toml(costs: Costs, comments: Sequence[str] = ()) -> str:
    """Costs as the text of a `costs.toml`, comments above; floats to six digits.

    What is as it would be if left out is left out.
    """
    lines = [f"# {line}".rstrip() for line in comments]
    lines += _entries(costs, {"unit": "", "F": None, "I": None, "W": None}, skip="bytes")
    sizes = _entries(costs.bytes, {})
    lines += ["", "[bytes]", *sizes] if sizes else []
    return "\n".join(lines) + "\n"


def _entries(given: Costs | Bytes, first: Mapping[str, Any], skip: str = "") -> list[str]:
    """`key = value` of each field that is not its default; `first`: order, and other defaults."""
    defaults = {**first, **{f.name: f.default for f in fields(given) if f.name not in first}}
    names = {"held": "held_between_I_and_W"}
    return [
        f"{names.get(key, key)} = {_toml(key, getattr(given, key))}"
        for key, default in defaults.items()
        if key != skip and getattr(given, key) != default
    ]


def _toml(key: str, value: Any) -> str:
    if key == "p2p_overhead":
        value = {"recv": value[0], "send": value[1]}
    if isinstance(value, Cycle):
        value = {"cycle": tuple(value)}
    if isinstance(value, Mapping):
        inside = ", ".join(f"{name} = {_toml(name, x)}" for name, x in value.items())
        return f"{{ {inside} }}"
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(key, x) for x in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # whose escapes are TOML's
    return str(value) if isinstance(value, int) else repr(float(f"{float(value):.6g}"))
