"""Writes a picture as Chrome's JSON trace format, for readers that know nothing newer.

One line an event, written as it is made.

The format is laid out the way Perfetto's importer understands it: threads for tracks (it orders
them by name, and one whose number is its process's would be the "main thread"), flow events
inside their slices, numbers only in counters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from hocket.deps import ROWS
from hocket.ir import Array
from hocket.trace.picture import Picture
from hocket.trace.slices import Part, Verb

BATCH = 1 << 14  # slices written at once: bounds the memory
SAMPLE = 2_000  # slices and counters that `size` looks at

_FIRST_THREAD = 1_000  # above every process number

# Viewers colour a slice by a hash of its name without digits: F and B would both be ochre.
_NAMES = {kind: row.look.trace for kind, row in ROWS.items() if row.work}


def encode(picture: Picture) -> Iterator[bytes]:
    """The file, in pieces."""
    lines = _Lines(picture)
    yield lines.head.encode()
    for first in range(0, len(picture.slices.track), BATCH):
        yield lines.slices(np.arange(first, min(first + BATCH, len(picture.slices.track))))
    for first in range(0, len(picture.counters.track), BATCH):
        yield lines.levels(np.arange(first, min(first + BATCH, len(picture.counters.track))))
    yield b"\n]}\n"


def size(picture: Picture) -> int:
    """About how many bytes `encode` gives: exact for small pictures, else from a sample."""
    lines = _Lines(picture)
    slices = _sampled(len(picture.slices.track), lines.slices)
    levels = _sampled(len(picture.counters.track), lines.levels)
    return len(lines.head.encode()) + slices + levels + len(b"\n]}\n")


def _sampled(n: int, write: Callable[[Array], bytes]) -> int:
    if n <= SAMPLE:
        return len(write(np.arange(n)))
    # in runs, so that neighbours that are alike do not fall into step with the sample
    starts = np.linspace(0, n - SAMPLE // 20, 20).astype(np.int64)
    rows = (starts[:, None] + np.arange(SAMPLE // 20)).ravel()
    return len(write(rows)) * n // len(rows)


def _name(part: Part) -> str:
    own = f"{_NAMES.get(part.kind, part.kind.name)} {part.mb}"
    return own if part.verb == Verb.RUN else f"{part.verb.name.lower()} {own}"


def _category(part: Part) -> str:
    return part.kind.name if part.verb == Verb.RUN else part.verb.name.lower()


def _list(values: tuple[int, ...]) -> str:
    """A number, or of a fused slot a list with one a part."""
    return str(values[0]) if len(values) == 1 else f"[{','.join(map(str, values))}]"


class _FlowEnds(NamedTuple):
    """The ends of all flows by slice; those of slice i are `starts[i]` to `starts[i + 1]`."""

    starts: Array
    phase: list[str]
    time: list[int]
    number: list[int]


def _flow_ends(picture: Picture) -> _FlowEnds:
    """Puts both ends of each flow inside their slices, the first before the second.

    Where both are at one instant, `forward` sees to it that the first comes first in the file.
    """
    start, end = picture.slices.start, picture.slices.end
    source = np.where(picture.forward, picture.flows.source, picture.flows.target)
    target = np.where(picture.forward, picture.flows.target, picture.flows.source)
    arrives = start[target]
    # a slice's last nanosecond: its end is not in it any more
    leaves = np.maximum(start[source], np.minimum(end[source], arrives) - 1)
    n, ends = len(source), np.concatenate([source, target])
    order = np.argsort(ends, kind="stable")
    starts = np.zeros(len(start) + 1, dtype=np.int64)
    np.cumsum(np.bincount(ends, minlength=len(start)), out=starts[1:])
    return _FlowEnds(
        starts,
        np.where(order < n, "s", "f").tolist(),
        np.concatenate([leaves, arrives])[order].tolist(),
        np.tile(np.arange(1, n + 1), 2)[order].tolist(),
    )


class _Lines:
    """Makes the lines of a picture's events; each begins with the comma after the one before."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self._flows = _flow_ends(picture)
        self._labels = [
            f'"name":"{" + ".join(map(_name, label))}","cat":"{"+".join(map(_category, label))}",'
            f'"args":{{"microbatch":{_list(tuple(part.mb for part in label))},"stage":'
            for label in picture.labels
        ]
        self._places = [f"{_list(place)}}}}}" for place in picture.places]
        self._process = dict.fromkeys(range(len(picture.tracks)), 0)
        for i, track in enumerate(picture.tracks):
            if i in picture.timelines:
                self._process[i] = 1 + picture.timelines.index(i)
            elif track.parent is not None:
                self._process[i] = self._process[track.parent]
        ranks = [i for i, track in enumerate(picture.tracks) if track.parent in picture.timelines]
        digits = max(len(picture.tracks[i].name) for i in ranks)
        # counters are sorted letter by letter: `rank 02` before `rank 10`
        self._padded = {i: "rank " + picture.tracks[i].name[5:].zfill(digits - 5) for i in ranks}
        # Perfetto takes an "X" without length to lie inside its neighbour, and at one instant sorts
        # any "E" before an "X": a file with such slices has only begins and ends.
        self._in_two = bool((picture.slices.start == picture.slices.end).any())

    @property
    def head(self) -> str:
        """The opening of the file: processes, threads and their names."""
        lines = []
        for i, track in enumerate(self._picture.tracks):
            process, above = self._process[i], track.parent
            if process == 0 or track.measures is not None:
                continue
            name = track.name
            where, sort = f'"ph":"M","pid":{process}', "process"
            if above is not None and i not in self._picture.timelines:
                where, sort = f'{where},"tid":{_FIRST_THREAD + i}', "thread"
                if above not in self._picture.timelines:
                    name = f"{self._picture.tracks[above].name} {name}"
            lines += [
                f'{{{where},"name":"{sort}_name","args":{{"name":{json.dumps(name)}}}}}',
                f'{{{where},"name":"{sort}_sort_index","args":{{"sort_index":{i}}}}}',
            ]
        return '{"displayTimeUnit":"ns","traceEvents":[\n' + ",\n".join(lines)

    def slices(self, rows: Array) -> bytes:
        """The lines of these slices and their flow ends."""
        s, flows = self._picture.slices, self._flows
        columns = (
            s.track[rows], *np.divmod(s.start[rows], 1000), *np.divmod(s.end[rows], 1000),
            *np.divmod(s.end[rows] - s.start[rows], 1000), s.label[rows], s.place[rows],
            flows.starts[rows], flows.starts[rows + 1],
        )  # fmt: skip
        out: list[str] = []
        for track, us, ns, end_us, end_ns, dur_us, dur_ns, label, place, first, last in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            where = f'"pid":{self._process[track]},"tid":{_FIRST_THREAD + track},"ts":'
            what = f"{self._labels[label]}{self._places[place]}"
            if self._in_two:
                out.append(f',\n{{"ph":"B",{where}{us}.{ns:03d},{what}')
            else:
                out.append(f',\n{{"ph":"X",{where}{us}.{ns:03d},"dur":{dur_us}.{dur_ns:03d},{what}')
            for i in range(first, last):
                out.append(self._flow(i, where))
            if self._in_two:
                out.append(f',\n{{"ph":"E",{where}{end_us}.{end_ns:03d}}}')
        return "".join(out).encode()

    def _flow(self, i: int, where: str) -> str:
        phase, (us, ns) = self._flows.phase[i], divmod(self._flows.time[i], 1000)
        binds = ',"bp":"e"' if phase == "f" else ""
        return (
            f',\n{{"ph":"{phase}"{binds},{where}{us}.{ns:03d},"id":{self._flows.number[i]},'
            '"name":"message","cat":"message"}'
        )

    def levels(self, rows: Array) -> bytes:
        """The lines of these levels."""
        tracks = self._picture.tracks
        track, time, value = (column[rows].tolist() for column in self._picture.counters)
        out = []
        for i, (us, ns), level in zip(track, (divmod(x, 1000) for x in time), value, strict=True):
            parent = tracks[i].parent
            owner = "" if parent is None else self._padded[parent]
            level = int(level) if level.is_integer() else level
            out.append(
                f',\n{{"ph":"C","pid":{self._process[i]},"ts":{us}.{ns:03d},"name":"{owner}",'
                f'"args":{{"{tracks[i].name}":{level}}}}}'
            )
        return "".join(out).encode()
