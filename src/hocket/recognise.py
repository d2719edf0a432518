"""Which registered schedule an order is, or the nearest one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, pairwise
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from hocket.errors import HocketError
from hocket.ir import Array, Kind, Queue, Schedule, Slot, encode, kinds_of, mbs_of, stages_of
from hocket.schedules import Entry, build, entries, settings_of

MOST_VALUES = 32  # of one option that are tried
LARGE = 8_000  # actions from which on generators that search are left out
SEARCHES = 0.3  # seconds from which on a generator is not asked again with other options
MOST_RANKS = 32  # up to which generators that search are asked


class Difference(NamedTuple):
    """Where two orders first differ: slot `position` of a queue; None: one has ended."""

    queue: Queue
    position: int
    ours: Slot | None
    theirs: Slot | None

    def __str__(self) -> str:
        ours, theirs = (str(slot) if slot else "nothing more" for slot in self[2:])
        return f"rank {self.queue} slot {self.position}: {ours}, there {theirs}"


class Match(NamedTuple):
    """A registered schedule next to an order.

    likeness: the part of neighbouring slots that are neighbours in both, 1 where they are equal.
    renamed: the microbatches have other numbers. first: where they first differ, after renaming.
    """

    name: str
    settings: dict[str, Any]
    likeness: float
    renamed: bool
    first: Difference | None

    @property
    def is_same(self) -> bool:
        """True when the order is this schedule, up to the microbatches' numbers."""
        return self.first is None

    @property
    def call(self) -> str:
        """Name and settings, as words of the command line: `interleaved -p 4 -m 8 -v 2`."""
        words = [self.name]
        for key, value in self.settings.items():
            words += [f"-{key}", str(value)] if key in "pmv" else ["-o", f"{key}={value}"]
        return " ".join(words)

    def __str__(self) -> str:
        if self.first is None:
            other = ", its microbatches renamed" if self.renamed else ""
            return f"this is {self.call}{other}"
        return f"nearest is {self.call} ({self.likeness:.0%} alike); first difference: {self.first}"

    def as_json(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        return {
            "schedule": self.name, "settings": self.settings, "same": self.is_same,
            "renamed": self.renamed, "likeness": self.likeness,
            "first_difference": None if self.first is None else {
                "queue": str(self.first.queue), "position": self.first.position,
                "ours": None if self.first.ours is None else str(self.first.ours),
                "theirs": None if self.first.theirs is None else str(self.first.theirs),
            },
        }  # fmt: skip


# --- recognise ---------------------------------------------------------------------------------


def recognise(schedule: Schedule) -> Match | None:
    """The registered schedule that this order is, else the nearest on the same placement.

    Microbatches may be numbered in any way. None where no registered schedule has its placement.
    """
    best: Match | None = None
    for name, settings, candidate in _candidates(schedule):
        match = _match(schedule, name, settings, candidate)
        if match is None:
            continue
        if match.is_same:
            return match
        if best is None or match.likeness > best.likeness:
            best = match
    return best


def _candidates(schedule: Schedule) -> Iterator[tuple[str, dict[str, Any], Schedule]]:
    """Registered schedules of this size: that of its name first, then plain ones.

    Some names have the same order at some sizes: the shortest name that needs no v is the plainest.
    """
    v = max(schedule.placement.n_stages // schedule.p, 1)
    fitting = [entry for entry in entries() if entry.takes_v or entry.stages_per_rank == v]
    fitting = [e for e in fitting if e.name == schedule.name or is_quick(e, schedule)]
    fitting.sort(key=lambda e: (e.name != schedule.name, e.takes_v and v == 1, len(e.name)))
    slow: set[str] = set()
    plain = ((e, {}) for e in fitting)
    others = ((e, options) for e in fitting for options in _options(e, schedule))
    for entry, options in chain(plain, others):
        if options and entry.name in slow:
            continue
        settings = _settings(entry, schedule, v, options)
        if _is_refused(entry, **settings):
            continue
        began = perf_counter()
        try:
            candidate = build(entry.name, **settings)
        except HocketError:
            continue
        if perf_counter() - began > SEARCHES:
            slow.add(entry.name)
        yield entry.name, settings, candidate


def _settings(entry: Entry, schedule: Schedule, v: int, options: dict[str, Any]) -> dict[str, Any]:
    slices = schedule.placement.slices
    settings = {"p": schedule.p, "m": schedule.m // slices}
    settings |= ({"v": v} if entry.takes_v else {}) | options
    return settings | ({"slices": slices} if "slices" in entry.options else {})


def _is_refused(entry: Entry, p: int, m: int, v: int | None = None, **options: Any) -> bool:
    """Whether the generator does not take these; `build` would look for others that it takes."""
    try:
        return bool(entry.broken(settings_of(entry, p, m, v, options)))
    except HocketError:
        return True


def is_quick(entry: Entry, schedule: Schedule) -> bool:
    """Whether this generator can be asked for a schedule as large as this one.

    Those that search for their order take minutes and much memory for large ones.
    """
    return not entry.searches or (len(schedule.codes) < LARGE and schedule.p <= MOST_RANKS)


def _options(entry: Entry, schedule: Schedule) -> Iterator[dict[str, Any]]:
    """Other values of each whole-number option, one option at a time."""
    for option in entry.options:
        few = len(schedule.codes) < LARGE
        if few and option != "slices" and entry.is_number(option):
            highest = min(max(schedule.p, schedule.m), MOST_VALUES)
            yield from ({option: value} for value in range(1, highest + 1))


def _match(
    schedule: Schedule, name: str, settings: dict[str, Any], candidate: Schedule
) -> Match | None:
    ours = renumbered(schedule, candidate)
    if ours is None:
        return None
    first = first_difference(ours, candidate)
    renamed = not np.array_equal(
        mbs_of(ours.codes), mbs_of(_sorted_slots(schedule, schedule.codes))
    )
    likeness = 1.0 if first is None else _likeness(ours, candidate)
    return Match(name, settings, likeness, renamed and first is None, first)


def renumbered(schedule: Schedule, like: Schedule) -> Schedule | None:
    """The schedule with its microbatches numbered as in another one; None on another placement.

    The i-th microbatch that enters a path gets the number of the i-th that enters it there.
    """
    a, b = schedule.placement, like.placement
    if (a.m, a.slices, sorted(a.paths)) != (b.m, b.slices, sorted(b.paths)):
        return None
    new = np.full(a.m, -1, dtype=np.int64)
    ours, theirs = _entering(schedule), _entering(like)
    for path in a.paths:
        for mine, other in zip(ours[path], theirs[path], strict=True):
            if len(mine) != len(other):
                return None
            new[mine] = other
    mbs = mbs_of(schedule.codes)
    if (new < 0).any() or len(np.unique(new)) < a.m or mbs.max(initial=0) >= a.m:
        return None
    codes = encode(kinds_of(schedule.codes), stages_of(schedule.codes), new[mbs])
    return replace(schedule, codes=_sorted_slots(schedule, codes), placement=b)


def _entering(schedule: Schedule) -> dict[tuple[Queue, ...], list[list[int]]]:
    """For each path (equal ones together) the microbatches in the order in which they enter."""
    first = (kinds_of(schedule.codes) == Kind.F) & (stages_of(schedule.codes) == 0)
    mbs = mbs_of(schedule.codes[first])
    mbs = mbs[mbs < schedule.m]
    on = np.array(schedule.placement.path_of)[mbs]
    out: dict[tuple[Queue, ...], list[list[int]]] = {}
    for k, path in enumerate(schedule.placement.paths):
        out.setdefault(path, []).append(mbs[on == k].tolist())
    return out


def _sorted_slots(schedule: Schedule, codes: Array) -> Array:
    """The same codes, those of each slot in order: `0F3+3B1` is `3B1+0F3`."""
    if schedule.is_single:
        return codes
    return codes[np.lexsort((codes, schedule.slot_of_action))]


def first_difference(a: Schedule, b: Schedule) -> Difference | None:
    """The earliest slot in which two orders differ, queue by queue; None where they are equal."""
    for queue in sorted({*a.queues, *b.queues}):
        ours, theirs = (_keys(s, queue) for s in (a, b))
        shared = min(len(ours), len(theirs))
        unlike = np.flatnonzero(ours[:shared] != theirs[:shared])
        if len(unlike) or len(ours) != len(theirs):
            i = int(unlike[0]) if len(unlike) else shared
            return Difference(queue, i, _slot(a, queue, i), _slot(b, queue, i))
    return None


def _keys(schedule: Schedule, queue: Queue) -> Array:
    """A number for each slot of a queue, equal for equal sets of actions."""
    if queue not in schedule.queues:
        return np.zeros(0, dtype=np.uint64)
    q = schedule.queues.index(queue)
    slots = schedule.slots[schedule.starts[q] : schedule.starts[q + 1] + 1]
    codes = schedule.codes[slots[0] : slots[-1]].astype(np.uint64)
    if schedule.is_single or not len(codes):
        return codes
    mixed = codes * np.uint64(0x9E3779B97F4A7C15)  # so that sums of different slots differ
    mixed ^= mixed >> np.uint64(29)
    return np.add.reduceat(mixed, slots[:-1] - slots[0])


def _slot(schedule: Schedule, queue: Queue, i: int) -> Slot | None:
    """Slot i of a queue, None where it has none."""
    if queue not in schedule.queues:
        return None
    q = schedule.queues.index(queue)
    at = int(schedule.starts[q]) + i
    return schedule.slot(at) if at < schedule.starts[q + 1] else None


def _likeness(a: Schedule, b: Schedule) -> float:
    """The part of a's neighbours that are neighbours in b too."""
    pairs, shared = 0, 0
    for queue in a.queues:
        ours, theirs = _keys(a, queue), _keys(b, queue)
        pairs += max(len(ours), len(theirs)) - 1
        known = set(pairwise(theirs.tolist()))
        shared += sum(pair in known for pair in pairwise(ours.tolist()))
    return shared / pairs if pairs > 0 else 1.0
