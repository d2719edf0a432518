"""What a trace shows, as columns: tracks, slices, counters, flows. The same for every format."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from hocket.errors import UsageError
from hocket.ir import Array, Queue
from hocket.timeline import Timeline
from hocket.trace.slices import Line, Marks, Part, marks, nanoseconds, origin


class Track(NamedTuple):
    """A row of the picture. `place` counts its siblings before it; `measures` makes a counter."""

    name: str
    parent: int | None
    place: int
    measures: str | None = None


class Slices(NamedTuple):
    """Slices by track, then by time; times in ns. `label`, `place` index the picture's lists."""

    track: Array
    start: Array
    end: Array
    label: Array
    place: Array


class Counters(NamedTuple):
    """Levels: each value holds on its track from its time (ns) on."""

    track: Array
    time: Array
    value: Array


class Flows(NamedTuple):
    """Arrows from slice to slice."""

    source: Array
    target: Array


@dataclass(frozen=True, eq=False)
class Picture:
    """All that a trace holds. Labels are what slices say, places the stages of their parts.

    `timelines` are the tracks that stand for one timeline each: parents of its ranks.
    """

    tracks: tuple[Track, ...]
    timelines: tuple[int, ...]
    labels: tuple[tuple[Part, ...], ...]
    places: tuple[tuple[int, ...], ...]
    slices: Slices
    counters: Counters
    flows: Flows

    @cached_property
    def forward(self) -> Array:
        """Which flows have their source before their target, in time or, in a tie, in the file.

        The others run between clocks that disagree, or within one instant.
        """
        start, (source, target) = self.slices.start, self.flows
        tie = (start[source] == start[target]) & (source < target)
        return (start[source] < start[target]) | tie


def draw(
    timelines: Mapping[str, Timeline], name: str, ranks: Collection[int] | None = None
) -> Picture:
    """The picture of some timelines, each under a track of its own, each from time 0.

    name: of the whole, shown above several. ranks: which ranks to show; left out, all.

    Raises: UsageError for an unknown rank or unit, or where an action has no time.
    """
    if not timelines:
        raise UsageError("nothing to write: no timeline is given")
    p = max(t.schedule.p for t in timelines.values())
    shown = sorted(set(range(p) if ranks is None else ranks))
    unknown = [r for r in shown if not 0 <= r < p]
    if unknown:
        raise UsageError(f"rank {unknown[0]} cannot be shown: the ranks are 0 to {p - 1}")
    if not shown:
        raise UsageError("nothing to write: `ranks` is empty")
    seen = [(own, t, [r for r in shown if r < t.schedule.p]) for own, t in timelines.items()]
    pictures = [_draw(own, t, mine) for own, t, mine in seen if mine]
    return pictures[0] if len(pictures) == 1 else _beside(name, pictures)


def overlaps(slices: Slices) -> list[tuple[int, int]]:
    """Pairs of slices that overlap on one track: none, ever, in what `draw` returns."""
    order = np.lexsort((slices.end, slices.start, slices.track))
    track, start, end = slices.track[order], slices.start[order], slices.end[order]
    bad = np.flatnonzero((track[1:] == track[:-1]) & (start[1:] < end[:-1]))
    return [(int(order[i]), int(order[i + 1])) for i in bad]


def _draw(name: str, timeline: Timeline, ranks: Sequence[int]) -> Picture:
    """The picture of one timeline."""
    queues = timeline.schedule.queues
    found, source, target = marks(timeline, ranks)
    order, row_of, rows = _rows(found, queues)
    counters = _counters(timeline)
    tracks, numbers = _tracks(Track(name, None, 0), rows, ranks, counters)
    at = np.empty(len(order), dtype=np.int64)
    at[order] = np.arange(len(order))
    levels = [counter.levels[rank] for rank in ranks for counter in counters]
    on = [i for i, track in enumerate(tracks) if track.measures is not None]
    return Picture(
        tracks=tuple(tracks),
        timelines=(0,),
        labels=tuple(found.labels),
        places=tuple(found.places),
        slices=Slices(
            np.array(numbers, dtype=np.int64)[row_of], found.start[order], found.end[order],
            found.label[order], found.place[order],
        ),
        counters=Counters(
            np.repeat(on, [len(time) for time, _ in levels]),
            np.concatenate([time for time, _ in levels]),
            np.concatenate([value for _, value in levels]),
        ),
        flows=Flows(at[source], at[target]),
    )  # fmt: skip


def _beside(name: str, pictures: Sequence[Picture]) -> Picture:
    """One picture of several under one root: their lists and columns one after the other."""

    def offsets(first: int, sizes: Iterable[int]) -> list[int]:
        return [first, *(first + np.cumsum(list(sizes))).tolist()][:-1]

    track = offsets(1, (len(x.tracks) for x in pictures))
    label = offsets(0, (len(x.labels) for x in pictures))
    place = offsets(0, (len(x.places) for x in pictures))
    first = offsets(0, (len(x.slices.track) for x in pictures))
    slices, counters, flows, tracks = [], [], [], [Track(name, None, 0)]
    for i, x in enumerate(pictures):
        s, t = x.slices, track[i]
        slices.append(Slices(s.track + t, s.start, s.end, s.label + label[i], s.place + place[i]))
        counters.append(x.counters._replace(track=x.counters.track + t))
        flows.append(Flows(x.flows.source + first[i], x.flows.target + first[i]))
        for row in x.tracks:
            if row.parent is None:
                tracks.append(row._replace(parent=0, place=i))
            else:
                tracks.append(row._replace(parent=row.parent + t))
    return Picture(
        tracks=tuple(tracks),
        timelines=tuple(track),
        labels=tuple(row for x in pictures for row in x.labels),
        places=tuple(row for x in pictures for row in x.places),
        slices=Slices(*map(np.concatenate, zip(*slices, strict=True))),
        counters=Counters(*map(np.concatenate, zip(*counters, strict=True))),
        flows=Flows(*map(np.concatenate, zip(*flows, strict=True))),
    )


# --- tracks ---------------------------------------------------------------------------------


class _Row(NamedTuple):
    """One track of slices: a line of a queue, and beside it lanes for what would overlap."""

    queue: Queue
    line: Line
    lane: int

    @property
    def name(self) -> str:
        """Its name under its rank; empty for the rank's own track, its compute queue."""
        own = {Line.WORK: "", Line.SEND: "send", Line.RECEIVE: "receive"}[self.line]
        name = f"{self.queue.stream} {own}".strip()
        return f"{name or 'compute'} {self.lane + 1}" if self.lane else name

    @property
    def place(self) -> tuple[bool, Queue, Line, int]:
        """Sorts the rows of a rank for the eye: work first, then messages, queue by queue."""
        return self.line != Line.WORK, self.queue, self.line, self.lane


def _rows(found: Marks, queues: Sequence[Queue]) -> tuple[Array, Array, list[_Row]]:
    """What sorts the marks by row and time, the row of each so sorted, and the rows.

    Rows stand in file order: all work, all sends, all receives.
    """
    line = found.line.astype(np.int64) * len(queues) + found.queue
    by_time = _sorting(line, found.start, found.end)
    line = line[by_time]
    lane = _lanes(line, found.start[by_time], found.end[by_time])
    lanes = int(lane.max(initial=0)) + 1
    key = line * lanes + lane
    by_row = np.argsort(key, kind="stable")
    key = key[by_row]
    opens = np.diff(key, prepend=-1) != 0
    rows = []
    for one in key[opens].tolist():
        line_and_queue, lane_of_row = divmod(one, lanes)
        line_of_row, queue = divmod(line_and_queue, len(queues))
        rows.append(_Row(queues[queue], Line(line_of_row), lane_of_row))
    return by_time[by_row], np.cumsum(opens) - 1, rows


def _sorting(*columns: Array) -> Array:
    """What sorts rows by the first column, then the next; costs little where they are sorted."""
    falls = np.zeros(max(len(columns[0]) - 1, 0), dtype=bool)
    tied = ~falls
    for x in columns:
        falls |= tied & (x[1:] < x[:-1])
        tied &= x[1:] == x[:-1]
    return np.lexsort(columns[::-1]) if falls.any() else np.arange(len(columns[0]))


def _lanes(line: Array, start: Array, end: Array) -> Array:
    """The lane of each slice: above 0 where it would overlap another. Sorted by line and time."""
    lane = np.zeros(len(line), dtype=np.int64)
    clash = (line[1:] == line[:-1]) & (start[1:] < end[:-1])
    for crowded in np.unique(line[1:][clash]).tolist():
        part = slice(*np.searchsorted(line, [crowded, crowded + 1]).tolist())
        lane[part] = _pack(start[part].tolist(), end[part].tolist())
    return lane


def _pack(starts: list[int], ends: list[int]) -> list[int]:
    """The lowest lane that is free at each start."""
    lanes: list[int] = []
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    for start, end in zip(starts, ends, strict=True):
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else len(busy)
        heappush(busy, (end, lane))
        lanes.append(lane)
    return lanes


def _tracks(
    root: Track, rows: list[_Row], ranks: Sequence[int], counters: Sequence[_Counter]
) -> tuple[list[Track], list[int]]:
    """All tracks as they are shown, rank by rank, and the number of each row's track."""
    tracks = [root]
    numbers: dict[_Row, int] = {}
    of_rank: dict[int, list[_Row]] = {rank: [] for rank in ranks}
    for row in rows:
        of_rank[row.queue.rank].append(row)
    for position, rank in enumerate(ranks):
        parent = len(tracks)
        tracks.append(Track(f"rank {rank}", 0, position))
        place = 0
        for row in sorted(of_rank[rank], key=lambda row: row.place):
            numbers[row] = len(tracks) if row.name else parent
            if row.name:
                tracks.append(Track(row.name, parent, place))
                place += 1
        for counter in counters:
            tracks.append(Track(counter.name, parent, place, counter.measures))
            place += 1
    return tracks, [numbers[row] for row in rows]


# --- counters -------------------------------------------------------------------------------


class _Counter(NamedTuple):
    """One counter of every rank: `levels[rank]` is its (times in ns, values)."""

    name: str
    measures: str
    levels: list[tuple[Array, Array]]


def _counters(timeline: Timeline) -> list[_Counter]:
    """What is in flight and, where bytes are known, the memory."""
    zero, p = origin(timeline), timeline.schedule.p
    parts = float(timeline.parts)
    in_flight = [(time, value / parts) for time, value in timeline.levels("in_flight")]
    found = [("in flight", "microbatches", in_flight, [0.0] * p)]
    if timeline.bytes:
        found.append(("memory", "bytes", timeline.levels("bytes"), timeline.static_bytes))
    return [
        _Counter(name, measures, [
            _changes(nanoseconds(timeline, time - zero), value + base, base)
            for (time, value), base in zip(levels, bases, strict=True)
        ])
        for name, measures, levels, bases in found
    ]  # fmt: skip


def _changes(time: Array, value: Array, base: float) -> tuple[Array, Array]:
    """The levels that differ from the one before, from `base` at time 0 on.

    Of several levels at one instant the last stays, and before it the highest where it is above
    both neighbours: the peak must not be lost, not even one that lasts for no time.
    """
    if (np.diff(time) < 0).any():  # spans of one queue overlap: put the changes in time order
        order = np.argsort(time, kind="stable")
        time, value = time[order], base + np.cumsum(np.diff(value, prepend=base)[order])
    time, value = np.insert(time, 0, 0), np.insert(value, 0, base)
    first = np.flatnonzero(np.diff(time, prepend=-1) != 0)
    last = np.append(first[1:], len(time)) - 1
    highest, final = np.maximum.reduceat(value, first), value[last]
    before = np.append(base, final[:-1])
    peak = highest > np.maximum(before, final)
    change = final != before
    change[0] = True
    count = peak.astype(np.int64) + (change | peak)
    out = np.repeat(final, count)
    out[(np.cumsum(count) - count)[peak]] = highest[peak]
    return np.repeat(time[first], count), out
