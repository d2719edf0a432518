"""The slices of a trace.

Before they are laid out on tracks: what is shown, when, in which words.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from hocket.deps import IS_MESSAGE, IS_SEND, IS_WORK
from hocket.errors import UsageError
from hocket.ir import Array, Kind, kinds_of, mbs_of, stages_of
from hocket.timeline import Timeline

# Nanoseconds of each unit. Costs without a unit are shown as microseconds: 1 reads as "1 us".
UNITS = {"": 1_000, "ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
LONGEST = 2**62  # ns, 146 years: beyond it sums of times no longer fit


class Line(IntEnum):
    """Which line of its queue a slice is drawn on, in the order in which a file holds them.

    Sends precede receives: where both begin at the same instant, viewers draw the arrow
    from the one that they read first.
    """

    WORK = 0
    SEND = 1
    RECEIVE = 2


class Verb(IntEnum):
    """What a slice shows of its actions: themselves, or a transfer or a wait beside them."""

    RUN = 0
    SEND = 1
    RECEIVE = 2
    WAIT = 3


class Part(NamedTuple):
    """One action of a slice's label; its stage stands in the slice's place."""

    verb: Verb
    kind: Kind
    mb: int


class Marks(NamedTuple):
    """All slices of a timeline, in no order; times in ns from the timeline's beginning.

    `label` and `place` index `labels` (what a slice says) and `places` (the stages of its parts);
    `queue` indexes the schedule's queues.
    """

    queue: Array
    line: Array
    start: Array
    end: Array
    label: Array
    place: Array
    labels: list[tuple[Part, ...]]
    places: list[tuple[int, ...]]


def marks(timeline: Timeline, ranks: Collection[int]) -> tuple[Marks, Array, Array]:
    """The slices of these ranks, and the source and target slice of each flow among them.

    Raises: UsageError for an unknown unit, or where an action has no time.
    """
    s = timeline.schedule
    kept = np.isin(s.rank_of_queue[s.queue_of_slot[s.slot_of_action]], list(ranks))
    work, messages = _work(timeline, kept), _messages(timeline, kept)
    slice_of = np.empty(len(kept), dtype=np.int64)
    slice_of[work.actions] = np.repeat(np.arange(len(work.widths)), work.widths)
    slice_of[messages.actions] = len(work.widths) + np.arange(len(messages.widths))
    g = timeline.graph
    edges = np.flatnonzero(g.crosses & kept[g.source] & kept[g.target])
    source, target = slice_of[g.source[edges]], slice_of[g.target[edges]]
    begin = np.concatenate([work.start, messages.start])
    messages, waits = _cut(messages, target - len(work.widths), begin[source])
    return _gather(timeline, [work, messages, waits, *_lanes(timeline, kept)]), source, target


# --- time -----------------------------------------------------------------------------------


def nanoseconds(timeline: Timeline, ticks: Array) -> Array:
    """Ticks as whole nanoseconds, halves rounded up.

    Raises: UsageError for a unit that is not known, or times beyond 146 years.
    """
    if timeline.unit not in UNITS:
        known = ", ".join(repr(u) for u in UNITS)
        raise UsageError(
            f"the unit of the times is {timeline.unit!r}; a trace needs one of {known}"
        )
    factor, scale = UNITS[timeline.unit], timeline.ticks.scale
    largest = float(np.abs(ticks).max(initial=0)) / scale * factor
    if not largest < LONGEST:
        raise UsageError(f"times up to {largest:.3g} ns do not fit a trace; check the unit")
    if not timeline.ticks.exact:
        return np.floor(ticks * factor + 0.5).astype(np.int64)
    if scale == 1:
        return ticks * factor
    whole, rest = np.divmod(ticks, scale)
    if 2 * scale * factor + scale >= 2**63:
        rest = rest.astype(object)  # Python's integers: slow, and still exact
    return whole * factor + ((2 * factor * rest + scale) // (2 * scale)).astype(np.int64)


def origin(timeline: Timeline) -> Array:
    """The tick that is shown as time 0, `[1]`: the first that anything of the timeline occupies."""
    earliest = timeline.start - timeline.before[timeline.schedule.slot_of_action]
    if not (np.isfinite(earliest).all() and np.isfinite(timeline.end).all()):
        raise UsageError(
            f"not every action of {timeline.schedule.name} has a time; a trace needs them all"
        )
    return earliest.min(keepdims=True) if len(earliest) else np.zeros(1, dtype=earliest.dtype)


# --- pieces ---------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """Slices of one sort: slice i stands for the next `widths[i]` of `actions`; times in ticks."""

    verb: Verb
    line: Array
    start: Array
    end: Array
    actions: Array
    widths: Array


def _work(timeline: Timeline, kept: Array) -> _Piece:
    """One slice a slot whose parts share their times, else one a part."""
    s = timeline.schedule
    actions = np.flatnonzero(IS_WORK[kinds_of(s.codes)] & kept)
    slot, start, end = s.slot_of_action[actions], timeline.start[actions], timeline.end[actions]
    same_slot = slot[1:] == slot[:-1]
    apart = np.zeros(s.n_slots, dtype=bool)
    apart[slot[1:][same_slot & ((start[1:] != start[:-1]) | (end[1:] != end[:-1]))]] = True
    opens = np.ones(len(actions), dtype=bool)
    opens[1:] = ~same_slot | apart[slot[1:]]
    first = np.flatnonzero(opens)
    line = np.full(len(first), Line.WORK)
    widths = np.diff(first, append=len(actions))
    return _Piece(Verb.RUN, line, start[first], end[first], actions, widths)


def _messages(timeline: Timeline, kept: Array) -> _Piece:
    """One slice a SEND or RECV of the order, as long as it occupies its queue."""
    s = timeline.schedule
    kinds = kinds_of(s.codes)
    actions = np.flatnonzero(IS_MESSAGE[kinds] & kept)
    slot = s.slot_of_action[actions]
    alone = ~timeline.computes[slot]
    sends = IS_SEND[kinds[actions]]
    return _Piece(
        Verb.RUN,
        np.where(sends, Line.SEND, Line.RECEIVE),
        timeline.start[actions] - np.where(alone, timeline.before[slot], 0),
        timeline.end[actions] + np.where(alone, timeline.after[slot], 0),
        actions,
        np.ones(len(actions), dtype=np.int64),
    )


def _cut(messages: _Piece, target: Array, sent: Array) -> tuple[_Piece, _Piece]:
    """The messages, each RECV from its SEND's begin on; and apart, what it waited before that.

    `sent` is the begin of each flow's source, `target` the index of its target in `messages`
    (below 0: another slice). A RECV may be posted long before its SEND, and viewers draw an arrow
    only from an earlier slice to a later one; besides, nothing is under way before the SEND.
    """
    message = target >= 0
    target, sent = target[message], sent[message]
    cut = (messages.start[target] < sent) & (sent <= messages.end[target])
    target, sent = target[cut], sent[cut]
    start = messages.start.copy()
    start[target] = sent
    waits = _Piece(
        Verb.WAIT, messages.line[target], messages.start[target], sent,
        messages.actions[target], messages.widths[target],
    )  # fmt: skip
    return messages._replace(start=start), waits


def _lanes(timeline: Timeline, kept: Array) -> list[_Piece]:
    """What slots of work occupy their queues for beside the work: receiving, then sending."""
    s = timeline.schedule
    work = IS_WORK[kinds_of(s.codes)] & kept
    out = []
    for verb, line, time in (
        (Verb.RECEIVE, Line.RECEIVE, timeline.before),
        (Verb.SEND, Line.SEND, timeline.after),
    ):
        actions = np.flatnonzero(work & (time > 0)[s.slot_of_action])
        slots, widths = np.unique(s.slot_of_action[actions], return_counts=True)
        received, done = timeline.slot_start[slots], timeline.slot_end[slots]
        start = received - time[slots] if verb == Verb.RECEIVE else done
        end = received if verb == Verb.RECEIVE else done + time[slots]
        out.append(_Piece(verb, np.full(len(slots), line), start, end, actions, widths))
    return out


def _gather(timeline: Timeline, pieces: list[_Piece]) -> Marks:
    """The pieces one after the other, labels interned, times in ns from the origin."""
    s = timeline.schedule
    actions = np.concatenate([x.actions for x in pieces])
    widths = np.concatenate([x.widths for x in pieces])
    verbs = np.repeat([int(x.verb) for x in pieces], [len(x.actions) for x in pieces])
    codes = s.codes[actions]
    keys = (mbs_of(codes) * len(Verb) + verbs) * len(Kind) + kinds_of(codes)
    label, labels = _intern(keys, widths)
    place, places = _intern(stages_of(codes), widths)
    zero = origin(timeline)
    return Marks(
        queue=s.queue_of_slot[s.slot_of_action[actions[np.cumsum(widths) - widths]]],
        line=np.concatenate([x.line for x in pieces]),
        start=nanoseconds(timeline, np.concatenate([x.start for x in pieces]) - zero),
        end=nanoseconds(timeline, np.concatenate([x.end for x in pieces]) - zero),
        label=label,
        place=place,
        labels=[tuple(map(_part, row)) for row in labels],
        places=places,
    )


def _part(key: int) -> Part:
    """The part that a key of `_gather` stands for."""
    rest, kind = divmod(key, len(Kind))
    mb, verb = divmod(rest, len(Verb))
    return Part(Verb(verb), Kind(kind), mb)


def _intern(keys: Array, widths: Array) -> tuple[Array, list[tuple[int, ...]]]:
    """A number for each row of keys, equal for equal rows, and the row of each number.

    Row i is the next `widths[i]` keys, at least one. Beginnings of longer rows have numbers too.
    """
    first = np.cumsum(widths) - widths
    table, ids = _numbered(keys[first])
    rows: list[tuple[int, ...]] = [(x,) for x in table.tolist()]
    widest = int(widths.max(initial=0))
    values, codes = _numbered(keys) if widest > 1 else (table, ids)
    for column in range(1, widest):
        longer = np.flatnonzero(widths > column)
        pairs = ids[longer] * len(values) + codes[first[longer] + column]
        table, inverse = _numbered(pairs)
        ids[longer] = len(rows) + inverse
        rows += [(*rows[x // len(values)], int(values[x % len(values)])) for x in table.tolist()]
    return ids, rows


def _numbered(keys: Array) -> tuple[Array, Array]:
    """The different keys in order, and the number of each key: without sorting where few occur."""
    most = int(keys.max(initial=0))
    if most > 8 * len(keys) + 1000:
        table, ids = np.unique(keys, return_inverse=True)
        return table, ids
    there = np.zeros(most + 1, dtype=bool)
    there[keys] = True
    return np.flatnonzero(there), (np.cumsum(there) - 1)[keys]
