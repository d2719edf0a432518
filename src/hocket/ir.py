"""A schedule as a value: kinds, actions, queues, placement, order. No time, no tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from operator import index
from typing import Any, NamedTuple, Protocol

import numpy as np

from hocket.codes import (
    MAX_MB,
    MAX_STAGE,
    UNUSED_BITS,
    encode,
    kinds_of,
    mbs_of,
    stages_of,
)
from hocket.deps import FORWARDS, FULL, MESSAGES, SPLIT, Kind
from hocket.errors import ScheduleError

Array = np.ndarray


_SET = np.min_scalar_type((1 << len(Kind)) - 1)  # holds a set of kinds, a bit each
# What a backward consists of when it is split, and what any backward consists of.
_SPLIT_BACKWARD = frozenset(SPLIT) - frozenset(FULL)
_ANY_BACKWARD = frozenset(SPLIT + FULL) - frozenset(FORWARDS)

MAX_RANK = (1 << 20) - 1
MAX_MICROBATCHES = 1 << 24  # every one takes memory in the placement, also without an action
_STREAM = re.compile(r"[A-Za-z][\w-]*", re.ASCII)


class Action(NamedTuple):
    """One piece of work, written `2F0`: stage 2, forward, microbatch 0."""

    kind: Kind
    stage: int
    mb: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name}{self.mb}"


class Slot(tuple[Action, ...]):
    """Actions run together, written `0F3+3B1`."""

    def __str__(self) -> str:
        return "+".join(map(str, self))


class Queue(NamedTuple):
    """A serial stream of a rank: `0` is rank 0's compute queue, `0/comm` another of rank 0."""

    rank: int
    stream: str = ""

    def __str__(self) -> str:
        return f"{self.rank}/{self.stream}" if self.stream else str(self.rank)


def action_of(code: int) -> Action:
    """The action that a code stands for."""
    code = int(code)
    return Action(Kind(kinds_of(code)), stages_of(code), mbs_of(code))


def is_name(text: Any) -> bool:
    """True for what a schedule may be called: one word, printable, without `#`."""
    return (
        isinstance(text, str)
        and text.isprintable()
        and text.split() == [text]
        and ("#" not in text)
    )


def shown(value: Any) -> str:
    """The value in a message: its repr, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array


def _own(name: str, given: Any) -> Array:
    """The integers as a read-only array that nobody else can write to; a copy if need be."""
    array = np.asarray(given)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ScheduleError(f"{name} is not a row of integers, but {array.dtype} {array.shape}")
    array = array.astype(np.int64, copy=False)
    # An array that is read-only already and no view of another is taken as it is: that keeps
    # `renamed` cheap at any size.
    owned = array.base is None and not array.flags.writeable
    return array if owned and type(array) is np.ndarray else _frozen(np.array(array))


def _queue(given: Any, what: str) -> Queue:
    """A queue whose rank and stream can be written and read back."""
    good = isinstance(given, tuple) and len(given) == 2
    rank, stream = given if good else (None, None)
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer):
        raise ScheduleError(f"{what} is {shown(given)}; it must be a queue such as Queue(0)")
    if not 0 <= rank <= MAX_RANK:
        raise ScheduleError(f"{what} is {shown(given)}; ranks are 0 to {MAX_RANK}")
    if not isinstance(stream, str) or (stream and not _STREAM.fullmatch(stream)):
        raise ScheduleError(
            f"{what} is {shown(given)}; a stream is named by a letter, then letters, digits, "
            "_ and -"
        )
    return given if type(given) is Queue and type(rank) is int else Queue(int(rank), stream)


def _whole(given: Any, what: str) -> int:
    """A whole number as an int."""
    if isinstance(given, bool | np.bool_):
        raise ScheduleError(f"{what} is {shown(given)}; it must be a whole number")
    try:
        return index(given)
    except TypeError:
        raise ScheduleError(f"{what} is {shown(given)}; it must be a whole number") from None


def _row(given: Any, what: str, of: str) -> tuple[Any, ...]:
    """A sequence as a tuple."""
    if isinstance(given, tuple) and type(given) is not Queue:
        return given
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | tuple | Mapping):
        return tuple(given)
    raise ScheduleError(f"{what} is {shown(given)}; it must be a sequence of {of}")


# --- placement ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """Which queue runs each stage: one path of queues for each copy of the model.

    `paths[k][s]` is the queue of stage s on path k; `path_of[mb]` the path a microbatch takes.
    With `slices` above 1 a sequence is cut into that many microbatches that follow each other:
    microbatch u is slice u mod slices of sequence u // slices.
    """

    paths: tuple[tuple[Queue, ...], ...]
    path_of: tuple[int, ...]
    slices: int = 1

    def __post_init__(self) -> None:
        paths = tuple(
            tuple(
                _queue(q, f"stage {i} of path {k}")
                for i, q in enumerate(_row(path, f"path {k}", "queues"))
            )
            for k, path in enumerate(_row(self.paths, "paths", "paths"))
        )
        path_of = _row(self.path_of, "path_of", "numbers of paths")
        if set(map(type, path_of)) - {int}:  # one pass in C where they are what they should be
            path_of = tuple(_whole(k, f"the path of microbatch {i}") for i, k in enumerate(path_of))
        slices = _whole(self.slices, "slices")
        for name, value in (("paths", paths), ("path_of", path_of), ("slices", slices)):
            object.__setattr__(self, name, value)
        self._check_paths()
        self._check_microbatches()

    def _check_paths(self) -> None:
        if not self.paths or not all(self.paths):
            raise ScheduleError("a placement needs at least one path with at least one stage")
        for k, path in enumerate(self.paths):
            if len(path) > MAX_STAGE + 1:
                raise ScheduleError(
                    f"path {k} has {len(path)} stages; the most there may be is {MAX_STAGE + 1}"
                )
        ranks = sorted({q.rank for path in self.paths for q in path})
        gap = next((i for i, rank in enumerate(ranks) if i != rank), None)
        if gap is not None:
            raise ScheduleError(f"rank {gap} has no stage; ranks are numbered from 0 without gaps")

    def _check_microbatches(self) -> None:
        m, n = len(self.path_of), len(self.paths)
        if not m:
            raise ScheduleError("a schedule needs at least one microbatch")
        if m > MAX_MICROBATCHES:
            raise ScheduleError(
                f"there are {m} microbatches; the most there may be is {MAX_MICROBATCHES}"
            )
        if self.slices < 1 or m % self.slices:
            raise ScheduleError(
                f"{m} microbatches do not make whole sequences of {shown(self.slices)} slices"
            )
        bad = {k for k in set(self.path_of) if not 0 <= k < n}
        if bad:
            mb = next(mb for mb, k in enumerate(self.path_of) if k in bad)
            raise ScheduleError(
                f"microbatch {mb} is on path {shown(self.path_of[mb])}, but the paths are 0 to "
                f"{n - 1}"
            )
        for first in range(0, m, self.slices) if self.slices > 1 < n else ():
            if len(set(self.path_of[first : first + self.slices])) > 1:
                raise ScheduleError(
                    f"the slices of sequence {first // self.slices} are on several paths; a stage "
                    "hands keys and values to itself only, so give them one path"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return Placement, (self.paths, self.path_of, self.slices)

    @cached_property
    def queues(self) -> tuple[Queue, ...]:
        """Every queue of the paths, by rank, a rank's compute queue first."""
        return tuple(sorted({q for path in self.paths for q in path}))

    @property
    def p(self) -> int:
        """Number of ranks."""
        return self.queues[-1].rank + 1

    @property
    def m(self) -> int:
        """Number of microbatches."""
        return len(self.path_of)

    @cached_property
    def n_stages(self) -> int:
        """Number of stages of the longest path."""
        return max(len(path) for path in self.paths)

    @cached_property
    def path_by_mb(self) -> Array:
        """`path_of` as an array, `[microbatch]`."""
        return _frozen(np.array(self.path_of))

    @cached_property
    def lengths(self) -> Array:
        """Number of stages each microbatch walks, `[microbatch]`."""
        return _frozen(np.array([len(path) for path in self.paths])[self.path_by_mb])

    @cached_property
    def stages_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages whose weights each rank holds, `[rank]`; a mirrored rank holds several."""
        held = {(q.rank, s) for path in self.paths for s, q in enumerate(path)}
        return tuple(tuple(sorted(s for r, s in held if r == rank)) for rank in range(self.p))

    @cached_property
    def stages_per_rank(self) -> int | Fraction:
        """Stages that a rank's share of the model is cut into: v."""
        ranks = max(len({queue.rank for queue in path}) for path in self.paths)
        v = Fraction(self.n_stages, ranks)
        return int(v) if v.denominator == 1 else v

    @cached_property
    def weight_copies(self) -> float:
        """Copies of the whole model's weights over all ranks (1, or 2 for a mirrored pair)."""
        return sum(map(len, self.stages_of_rank)) / self.n_stages

    def rank_table(self, queues: Sequence[Queue]) -> Array:
        """Index into `queues` by `[path, stage]`; stages beyond a path get `len(queues)`."""
        index = {q: i for i, q in enumerate(queues)}
        table = np.full((len(self.paths), self.n_stages), len(queues), dtype=np.int32)
        for k, path in enumerate(self.paths):
            table[k, : len(path)] = [index[q] for q in path]
        return table

    def queue(self, stage: int, mb: int) -> Queue:
        """The queue that runs this stage for this microbatch."""
        return self.paths[self.path_of[mb]][stage]


def _path(ranks: Iterable[int]) -> tuple[Queue, ...]:
    return tuple(Queue(r) for r in ranks)


def linear(p: int, m: int) -> Placement:
    """Stage r on rank r."""
    return Placement((_path(range(p)),), (0,) * m)


def looped(p: int, m: int, v: int) -> Placement:
    """v stages per rank, round robin: `0 1 2 3 0 1 2 3` (Megatron's interleaving)."""
    return Placement((_path(list(range(p)) * v),), (0,) * m)


def wave(p: int, m: int, v: int) -> Placement:
    """v stages per rank, there and back: `0 1 2 3 3 2 1 0 0 1 2 3 ...` (Hanayo)."""
    down = list(range(p))
    return Placement(
        (_path(r for c in range(v) for r in (down[::-1] if c % 2 else down)),), (0,) * m
    )


def vshape(p: int, m: int) -> Placement:
    """Two stages per rank, there and back: `0 1 2 3 3 2 1 0`."""
    return wave(p, m, 2)


def mirrored(p: int, path_of: Sequence[int], pipes: int = 2) -> Placement:
    """`pipes` copies of the model: half run down the ranks, each rotated, half run back up.

    Paths alternate: path 2i starts at rank i * 2p / pipes and goes up the ranks, path 2i + 1 is
    the same path reversed. Source: Chimera (arXiv 2107.06925), section 3.6.
    """
    paths = []
    for i in range(pipes // 2):
        down = [(s + i * 2 * p // pipes) % p for s in range(p)]
        paths += [_path(down), _path(down[::-1])]
    return Placement(tuple(paths), tuple(path_of))


# --- order ----------------------------------------------------------------------------------


class Line(NamedTuple):
    """The slots of one queue, written out: action codes, and how many of them each slot takes."""

    codes: Array
    widths: Array


_EMPTY = Line(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


class Lines(Protocol):
    """The lines of several queues before they are written out, such as a `pattern.Pattern`."""

    @property
    def n_queues(self) -> int:
        """How many queues the lines are for."""
        ...

    def written(self) -> Line:
        """The line of the only queue."""
        ...

    def laid(self) -> tuple[Array, Array, Array]:
        """Codes, slots and starts of all queues, as a Schedule has them."""
        ...


@dataclass(frozen=True, eq=False)
class Schedule:
    """Who runs what, in which order: a placement, and the slots of each queue.

    `codes[slots[i]:slots[i + 1]]` are the actions of slot i; slots
    `starts[q]:starts[q + 1]` belong to `queues[q]`. Arrays are read-only.
    """

    name: str
    placement: Placement
    queues: tuple[Queue, ...]
    codes: Array
    slots: Array
    starts: Array

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ScheduleError(
                f"a schedule cannot be named {shown(self.name)}; a name is one word of printable "
                "characters without '#'"
            )
        if not isinstance(self.placement, Placement):
            raise ScheduleError(f"the placement is {shown(self.placement)}; it must be a Placement")
        for name in ("codes", "slots", "starts"):
            object.__setattr__(self, name, _own(name, getattr(self, name)))
        if self.queues is not self.placement.queues:
            self._check_queues()
        self._check_arrays()

    def _check_queues(self) -> None:
        queues = tuple(
            _queue(q, f"queue {i}") for i, q in enumerate(_row(self.queues, "queues", "queues"))
        )
        object.__setattr__(self, "queues", queues)
        ranks, own = self.placement.p, set(self.queues)
        for queue in self.queues:
            if queue.rank >= ranks:
                raise ScheduleError(
                    f"queue {queue} is on no path: rank {queue.rank} has no stage, the ranks are "
                    f"0 to {ranks - 1}"
                )
        missing = [q for q in self.placement.queues if q not in own]
        if missing:
            raise ScheduleError(f"queue {missing[0]} is on a path, but not among the queues")
        if list(self.queues) != sorted(own):
            raise ScheduleError("queues must be unique and sorted by (rank, stream)")

    def _check_arrays(self) -> None:
        """Three passes over the arrays, all of them in numpy."""
        n, bits = len(self.codes), self._bits
        if bits & UNUSED_BITS or kinds_of(bits) >= len(Kind):  # or some code only seems odd
            odd = (self.codes & UNUSED_BITS != 0) | (kinds_of(self.codes) >= len(Kind))
            if odd.any():
                at = int(odd.argmax())
                raise ScheduleError(
                    f"the code {self.codes[at]} at position {at} is of no action; stages are 0 to "
                    f"{MAX_STAGE}, microbatches 0 to {MAX_MB}"
                )
        for name, offsets, last in (
            ("slots", self.slots, n), ("starts", self.starts, len(self.slots) - 1),
        ):  # fmt: skip
            if not len(offsets) or offsets[0] != 0 or offsets[-1] != last:
                raise ScheduleError(f"{name} must start at 0 and end at {last}")
        if len(self.starts) != len(self.queues) + 1 or (self.starts[1:] < self.starts[:-1]).any():
            raise ScheduleError("starts must be non-decreasing, with len(queues) + 1 entries")
        if (self.slots[1:] <= self.slots[:-1]).any():
            raise ScheduleError("slots must be increasing: each slot has at least one action")

    @classmethod
    def from_lines(
        cls, name: str, placement: Placement,
        lines: Lines | Sequence[Lines | Line] | Mapping[Queue, Lines | Line],
    ) -> Schedule:  # fmt: skip
        """A schedule from one line per queue, in `placement.queues` order or by queue, or from
        one pattern of all of them.

        Slots without actions are left out.
        """
        queues = placement.queues
        if isinstance(lines, Mapping):
            by_queue = {_queue(q, "the queue of a line"): line for q, line in lines.items()}
            queues = tuple(sorted({*placement.queues, *by_queue}))
            lines = [by_queue.get(q, _EMPTY) for q in queues]
        is_listed = isinstance(lines, Sequence)
        n_lines = len(lines) if is_listed else lines.n_queues
        if n_lines != len(queues):
            raise ScheduleError(
                f"{name} has {len(queues)} queues, but the order has {n_lines} lines"
            )
        arrays = _joined(name, queues, lines) if is_listed else lines.laid()
        return cls(name, placement, queues, *map(_frozen, arrays))

    @classmethod
    def from_order(
        cls,
        name: str,
        placement: Placement,
        order: Mapping[Queue, Iterable[Iterable[Action]]] | Sequence[Iterable[Iterable[Action]]],
    ) -> Schedule:
        """A schedule from slots written out, a sequence of actions each."""
        if isinstance(order, Mapping):
            by_queue = {q: _line(name, q, slots) for q, slots in order.items()}
            return cls.from_lines(name, placement, by_queue)
        if len(order) != len(placement.queues):
            raise ScheduleError(
                f"{name} has {len(placement.queues)} queues, but the order has {len(order)} lines"
            )
        lines = [_line(name, q, x) for q, x in zip(placement.queues, order, strict=True)]
        return cls.from_lines(name, placement, lines)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return (
            (self.name, self.placement, self.queues) == (other.name, other.placement, other.queues)
            and np.array_equal(self.codes, other.codes)
            and np.array_equal(self.slots, other.slots)
            and np.array_equal(self.starts, other.starts)
        )

    def __hash__(self) -> int:
        return hash((self.name, self.placement, self.codes.tobytes()))

    def __repr__(self) -> str:
        return f"<Schedule {self.name}: p={self.p} m={self.m}, {len(self.codes)} actions>"

    @property
    def p(self) -> int:
        """Number of ranks."""
        return self.placement.p

    @property
    def m(self) -> int:
        """Number of microbatches."""
        return self.placement.m

    @property
    def n_slots(self) -> int:
        """Number of slots over all queues."""
        return len(self.slots) - 1

    @cached_property
    def memo(self) -> dict[str, Any]:
        """What other modules derived from this schedule and keep: it never changes."""
        return {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Schedule, tuple(getattr(self, f.name) for f in fields(self))

    @property
    def is_single(self) -> bool:
        """True when every slot has one action."""
        return self.n_slots == len(self.codes)

    @cached_property
    def widths(self) -> Array:
        """Number of actions in each slot, `[slot]`."""
        return _frozen(np.diff(self.slots))

    @cached_property
    def slot_of_action(self) -> Array:
        """The slot each action is in, `[action]`."""
        if self.is_single:
            return _frozen(np.arange(self.n_slots, dtype=np.int32))
        opens = np.zeros(len(self.codes), dtype=np.int32)
        opens[self.slots[1:-1]] = 1  # numpy repeats by counts four times as slowly
        return _frozen(np.cumsum(opens, dtype=np.int32))

    @cached_property
    def queue_of_slot(self) -> Array:
        """Index of each slot's queue, `[slot]`."""
        queues = np.arange(len(self.queues), dtype=np.int32)
        return _frozen(np.repeat(queues, np.diff(self.starts)))

    @cached_property
    def rank_of_queue(self) -> Array:
        """The rank of each queue, `[queue]`."""
        return _frozen(np.array([q.rank for q in self.queues], dtype=np.int32))

    @cached_property
    def home(self) -> Array:
        """Index of the queue that runs each stage, `[path, stage]`."""
        return _frozen(self.placement.rank_table(self.queues))

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds that the order contains."""
        low = kinds_of(self.codes.astype(np.uint8))  # a byte each: many passes cost little
        bits = int(np.bitwise_or.reduce(_SET.type(1) << low)) if len(low) else 0
        return frozenset(kind for kind in Kind if bits >> kind & 1)

    @cached_property
    def _bits(self) -> int:
        """The bits that some code has."""
        return int(np.bitwise_or.reduce(self.codes))

    def _has(self, wanted: Iterable[Kind]) -> bool:
        """True when some action is of one of these kinds."""
        # No pass over the order where the bits that occur in it make none of these kinds.
        possible = any(kind & ~self._bits == 0 for kind in wanted)
        return possible and not self.kinds.isdisjoint(wanted)

    @cached_property
    def has_communication(self) -> bool:
        """True when the order contains SEND and RECV actions."""
        return self._has(MESSAGES)

    @cached_property
    def has_split_backward(self) -> bool:
        """True when some backward is an I and a W."""
        return self._has(_SPLIT_BACKWARD)

    @cached_property
    def is_forward_only(self) -> bool:
        """True when the order contains no backward (evaluation)."""
        return not self._has(_ANY_BACKWARD)

    def slot(self, index: int) -> Slot:
        """The actions of one slot."""
        return Slot(action_of(c) for c in self.codes[self.slots[index] : self.slots[index + 1]])

    def line(self, queue: Queue | int) -> Iterator[Slot]:
        """The slots of a queue, in order."""
        q = queue if isinstance(queue, int) else self.queues.index(queue)
        return (self.slot(i) for i in range(self.starts[q], self.starts[q + 1]))

    @property
    def order(self) -> dict[Queue, list[Slot]]:
        """Every queue with its slots, as objects (for people; code reads the arrays)."""
        return {q: list(self.line(i)) for i, q in enumerate(self.queues)}

    def renamed(self, name: str) -> Schedule:
        """The same schedule under another name."""
        return replace(self, name=name)


def _joined(
    name: str, queues: Sequence[Queue], lines: Iterable[Lines | Line]
) -> tuple[Array, Array, Array]:
    """Codes, slots and starts of lines written out one by one."""
    written = [line if isinstance(line, Line) else line.written() for line in lines]
    for queue, line in zip(queues, written, strict=True):
        if line.widths.sum() != len(line.codes):
            raise ScheduleError(
                f"{name}: the slots of queue {queue} take {line.widths.sum()} actions, but "
                f"its line has {len(line.codes)}"
            )
    codes = np.concatenate([x.codes for x in written])
    widths = [x.widths if x.widths.all() else x.widths[x.widths > 0] for x in written]
    starts = offsets(np.array([len(w) for w in widths]))
    single = len(codes) == starts[-1]
    return codes, np.arange(len(codes) + 1) if single else offsets(np.concatenate(widths)), starts


def offsets(widths: Array | Sequence[int]) -> Array:
    """Where each of some stretches starts, and where the last one ends, `[stretch + 1]`."""
    offsets = np.zeros(len(widths) + 1, dtype=np.int64)
    np.cumsum(widths, out=offsets[1:])
    return offsets


def _line(name: str, queue: Queue | int, slots: Iterable[Iterable[Action]]) -> Line:
    codes: list[int] = []
    widths: list[int] = []
    for i, slot in enumerate(slots):
        before = len(codes)
        try:
            for kind, stage, mb in slot:
                if not (0 <= kind < len(Kind) and 0 <= stage <= MAX_STAGE and 0 <= mb <= MAX_MB):
                    raise ValueError
                codes.append(encode(index(kind), index(stage), index(mb)))
        except (TypeError, ValueError):
            raise ScheduleError(
                f"{name}: slot {i} of queue {queue} is {shown(slot)}; a slot is a sequence of "
                f"actions, their stages 0 to {MAX_STAGE}, their microbatches 0 to {MAX_MB}"
            ) from None
        widths.append(len(codes) - before)
    return Line(np.array(codes, dtype=np.int64), np.array(widths, dtype=np.int64))
