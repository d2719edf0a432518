"""The terminal grid: time across, a row for each queue, tiles by kind with their microbatch."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hocket.costs import Number
from hocket.ir import Array, Schedule, mbs_of
from hocket.render import cells, sample, tiles
from hocket.render.cells import ASCII, COLOUR_STYLES, PLAIN_STYLES, UNICODE, Marks, Row, Style
from hocket.render.tiles import Drawing
from hocket.tables import format_time
from hocket.timeline import Timeline

PIPED_WIDTH = 200
NARROWEST = 20  # columns; a narrower terminal breaks the lines itself
BARE = 40  # columns below which idle shares and peaks are left out
MOST_ROWS = 64  # more queues than this are grouped
MOST_LINES = 96  # styles with several lines per queue are left out beyond this
NUMBERED_ROWS = 16  # a sampled grid of at most this many rows has a line of numbers under each
ENOUGH = 0.8  # part of the tiles that must have room for their label before sampling


def grid(
    timeline: Timeline, *, width: int | None = None, colour: bool = False, ascii: bool = False
) -> str:
    """A timeline as a picture of characters: time across, a row for each queue, ranks down.

    `F3` is the forward of microbatch 3, `F3+B1` a fused slot; dots are idle. To the right of a
    rank: the part of its time in which it idles, and its peak of microbatches in flight. Column
    widths are exact where times allow. `width` (left out: the terminal's, 200 when piped; 20 at
    least) is kept by leaving out what stands to the right (below 40), dropping spaces, putting
    numbers under the letters, writing them downwards, and at last by sampling; the legend says what
    a column is. `colour` adds ANSI colours, `ascii` keeps to ASCII characters.
    """
    columns = max(width or _terminal_width(), NARROWEST)
    picture = _Picture.of(timeline, columns, colour, ASCII if ascii else UNICODE)
    return "\n".join(picture.text())


def _terminal_width() -> int:
    return (
        shutil.get_terminal_size((PIPED_WIDTH, 24)).columns if sys.stdout.isatty() else PIPED_WIDTH
    )


@dataclass(frozen=True)
class _Scale:
    """Columns per tick; `unit` ticks are a whole number of columns where the scale is exact."""

    per_tick: float
    columns: int
    unit: Number | None

    def column(self, ticks: Array) -> list[int]:
        """The column at which each time lies."""
        return np.floor(np.asarray(ticks, dtype=float) * self.per_tick + 0.5).astype(int).tolist()


@dataclass(frozen=True)
class _Margins:
    """What stands left and right of each row's tiles."""

    left: list[str]
    right: list[str]

    @property
    def columns(self) -> int:
        """Columns taken, with the two sides and the space before the right one."""
        right = len(self.right[0])
        return len(self.left[0]) + 2 + (1 + right if right else 0)


@dataclass(frozen=True)
class _Picture:
    timeline: Timeline
    drawn: Drawing
    groups: list[range]
    margins: _Margins
    style: Style | None  # None: sampled
    scale: _Scale
    width: int
    colour: bool
    marks: Marks

    @classmethod
    def of(cls, timeline: Timeline, width: int, colour: bool, marks: Marks) -> _Picture:
        """Chooses how to draw."""
        drawn = tiles.drawing(timeline)
        n = len(timeline.schedule.queues)
        size = math.ceil(n / MOST_ROWS)
        groups = [range(i, min(i + size, n)) for i in range(0, n, size)]
        margins = _margins(timeline, groups, bare=width < BARE)
        room = max(width - margins.columns, 8)
        styles = (COLOUR_STYLES if colour else PLAIN_STYLES) if size == 1 else ()
        style, scale = _choose(timeline.schedule, drawn, styles, room)
        return cls(timeline, drawn, groups, margins, style, scale, width, colour, marks)

    def text(self) -> list[str]:
        """The lines of the picture."""
        rows = self._sampled() if self.style is None else self._labelled(self.style)
        side = self.marks.side
        blank_left = " " * len(self.margins.left[0])
        lines = []
        for row, left, right in zip(rows, self.margins.left, self.margins.right, strict=True):
            first, *others = row.text(self.colour)
            lines.append(f"{left}{side}{first}{side} {right}".rstrip())
            lines += [f"{blank_left}{side}{line}{side}" for line in others]
        return [*self._head(), *lines, *self._axis(), *self._legend(rows)]

    # --- rows ---------------------------------------------------------------------------

    def _labelled(self, style: Style) -> list[Row]:
        s, drawn = self.timeline.schedule, self.drawn
        height = style.rows(len(str(s.m - 1)))
        rows = [Row(self.scale.columns, height, self.marks) for _ in s.queues]
        for kind, slot, queue, start, stop in self._placed():
            if kind == "message":
                rows[queue].message(start, stop, _message_label(s, slot))
            else:
                rows[queue].tile(start, stop, tiles.parts(s, drawn, slot), style)
        return rows

    def _placed(self) -> list[tuple[str, int, int, int, int]]:
        """(layer, slot, queue, first column, column after), messages below work."""
        out = []
        for name, layer in (("message", self.drawn.messages), ("work", self.drawn.work)):
            start, stop = self.scale.column(layer.start), self.scale.column(layer.end)
            slots, queues = layer.slot.tolist(), layer.queue.tolist()
            placed = zip(slots, queues, start, stop, strict=True)
            out += [(name, *tile) for tile in placed if tile[3] > tile[2]]
        return out

    def _sampled(self) -> list[Row]:
        numbered = len(self.groups) <= NUMBERED_ROWS and self.drawn.length > 0
        rows = []
        for queues in self.groups:
            row = Row(self.scale.columns, 1 + numbered, self.marks, bare=True)
            rows.append(row)
            if self.drawn.length > 0:
                taken = sample.sample(
                    self.timeline.schedule, self.drawn, queues, self.scale.columns
                )
                self._fill(row, taken)
                if numbered:
                    self._number(row.lines[1], taken)
        return rows

    def _fill(self, row: Row, taken: sample.Sample) -> None:
        looks = _looks(self.marks, self.colour)
        for column, c in enumerate(taken.classes):
            row.lines[0][column], row.paints[column] = looks[c]

    def _number(self, line: list[str], taken: sample.Sample) -> None:
        free, last = 0, None
        for column, slot in enumerate(taken.slots):
            if slot is None or slot == last or column < free:
                continue
            label = "+".join(str(a.mb) for a in self.timeline.schedule.slot(slot))
            if column + len(label) <= len(line):
                line[column : column + len(label)] = label
                free, last = column + len(label) + 1, slot

    # --- around the rows ----------------------------------------------------------------

    def _head(self) -> list[str]:
        lines = _wrap(tiles.headline(self.timeline), self.width)
        if not self.margins.right[0]:
            return lines
        total = self.margins.columns + self.scale.columns
        right = "idle, peak in flight"
        if len(lines[-1]) + 2 + len(right) <= total:
            return [*lines[:-1], lines[-1] + right.rjust(total - len(lines[-1]))]
        return [*lines, right.rjust(total)]

    def _axis(self) -> list[str]:
        """The line under the rows with its ticks, and the times of the ticks."""
        n, makespan = self.scale.columns, self.timeline.makespan
        line = [self.marks.corners[0], *self.marks.line * n, self.marks.corners[1]]
        left = len(self.margins.left[0])
        numbers = ""
        for at, label in self._ticks(makespan) if makespan > 0 else []:
            if at < n:  # the end has its corner
                line[1 + at] = self.marks.tick
            numbers = numbers.ljust(left + 1 + at) + label
        return [" " * left + "".join(line), numbers or " " * left + " 0"]

    def _ticks(self, makespan: Number) -> list[tuple[int, str]]:
        """(column, label) of each time mark, as close as labels allow."""
        scale = self.timeline.ticks.scale
        for step in tiles.steps(makespan, max(self.scale.columns // 6, 1)):
            times = tiles.marks(makespan, step)
            labels = [format_time(t) for t in times]
            at = self.scale.column(np.array([float(t) * scale for t in times]))
            ends = [c + len(label) for c, label in zip(at, labels, strict=True)]
            room = self.scale.columns + self.margins.columns - len(self.margins.left[0]) - 1
            if all(e + 1 < a for e, a in zip(ends, at[1:], strict=False)) and ends[-1] <= room:
                return list(zip(at, labels, strict=True))
        raise AssertionError("steps never end")

    def _legend(self, rows: list[Row]) -> list[str]:
        notes = "; ".join([*self._column_is(), *self._notes()])
        return [*_wrap(self._key(rows), self.width), *textwrap.wrap(notes, self.width)]

    def _column_is(self) -> list[str]:
        """What one column is, or how many columns make the unit that is a whole number of them."""
        t, scale = self.timeline, self.scale
        if self.drawn.length == 0:
            return ["nothing takes time"]
        if scale.unit is not None:
            columns = round(scale.per_tick * float(scale.unit))
            what = "1 column is" if columns == 1 else f"{columns} columns are"
            return [f"{what} {_duration(t.ticks.value(scale.unit), t.unit)}"]
        one = t.makespan / scale.columns
        about = "" if self.style is None else "about "
        return [f"1 column is {about}{_duration(one, t.unit)}"]

    def _key(self, rows: list[Row]) -> list[str]:
        """What letters and colours stand for; only what is in the picture."""
        s = self.timeline.schedule
        shown = {c for row in rows for c in row.lines[0]}
        key = []
        for kind in tiles.kinds_drawn(self.timeline):
            swatch = cells.painted(f" {kind.name} ", cells.PAINTS[kind, 0])
            key.append(f"{swatch if self.colour else kind.name} {tiles.NAMES[kind]}")
        if (s.widths > 1).any():
            key.append(self._fused_key())
        if "-" in shown:
            letters = " (S send, R receive)" if s.has_communication and self.style else ""
            key.append(self._swatch("-", cells.MESSAGE_PAINT) + " message" + letters)
        if self.marks.idle in shown:
            key.append(self._swatch(self.marks.idle, cells.IDLE_PAINT) + " idle")
        if self.drawn.shades.any():
            how = "lighter" if self.colour else "lower case"
            key.append(f"{how} {tiles.shade_means(s)}")
        return key

    def _swatch(self, text: str, paint: str) -> str:
        return cells.painted(text, paint) if self.colour else text

    def _fused_key(self) -> str:
        if self.style is not None:
            return "+ run together"
        mark = self.marks.half if self.colour else "&"
        return self._swatch(mark, cells.FUSED_PAINT) + " run together"

    def _notes(self) -> list[str]:
        if self.style is None:
            return self._sampling_notes()
        notes = []
        if self.style.upright and self.timeline.schedule.m > 10:
            notes.append("numbers read downwards")
        needs = _needs(self.timeline.schedule, self.style) - self.style.gap
        work = [(slot, b - a) for layer, slot, _, a, b in self._placed() if layer == "work"]
        bare = sum(columns < needs[slot] for slot, columns in work)
        hidden = int(self.timeline.computes.sum()) - len(work)
        if bare:
            notes.append(f"{bare} {'number has' if bare == 1 else 'numbers have'} no room")
        if hidden and self.drawn.length > 0:
            slots = "slot is" if hidden == 1 else "slots are"
            notes.append(f"{hidden} {slots} too short for a column and not drawn")
        return notes

    def _sampling_notes(self) -> list[str]:
        if self.drawn.length == 0:
            return []
        notes = ["a column shows one of the kinds that run in it, each as often as its time"]
        if len(self.groups) <= NUMBERED_ROWS:
            notes.append("a number belongs to what is above it")
        if len(self.groups[0]) > 1:
            notes.append(f"a row is {len(self.groups[0])} queues")
        return notes


def _duration(value: Number, unit: str) -> str:
    return format_time(value, unit or ("time unit" if value == 1 else "time units"))


def _looks(marks: Marks, colour: bool) -> dict[int, tuple[str, str]]:
    """Character and paint of each class of sampled time."""
    looks = {
        sample.FUSED: (marks.half if colour else "&", cells.FUSED_PAINT),
        sample.MESSAGE: ("-", cells.MESSAGE_PAINT),
        sample.IDLE: (marks.idle, cells.IDLE_PAINT),
    }
    for (kind, shade), paint in cells.PAINTS.items():
        name = kind.name.lower() if shade else kind.name
        looks[kind * 2 + shade] = (name, paint)
    return looks


def _message_label(schedule: Schedule, slot: int) -> str:
    """S3 or R3 for a SEND or RECV of microbatch 3; nothing for a lane of a slot of work."""
    actions = [a for a in schedule.slot(slot) if a.kind.is_communication]
    return "+".join(f"{a.kind.name[0]}{a.mb}" for a in actions)


# --- choosing ---------------------------------------------------------------------------------


def _choose(
    schedule: Schedule, drawn: Drawing, styles: Sequence[Style], room: int
) -> tuple[Style | None, _Scale]:
    """The first style in which every tile has room for its label, then in which most have."""
    digits, n = len(str(schedule.m - 1)), len(schedule.queues)
    usable = [s for s in styles if s.rows(digits) == 1 or s.rows(digits) * n <= MOST_LINES]
    work, whole = drawn.work, float(drawn.length)
    if len(work.slot) == 0:
        columns = room if whole else min(room, 8)
        return (usable[0] if usable else None), _Scale(columns / (whole or 1), columns, None)
    durations = (work.end - work.start).astype(float)
    unit = tiles.common_unit(drawn)
    for style in usable:
        needed = float((_needs(schedule, style)[work.slot] / durations).max())
        if unit is not None:
            columns = math.ceil(needed * unit - 1e-9)
            if columns * round(whole / unit) <= room:
                return style, _Scale(columns / unit, columns * round(whole / unit), unit)
        if math.floor(needed * whole + 0.5) <= room:
            return style, _Scale(needed, math.floor(needed * whole + 0.5), None)
    for style in usable:
        fits = np.floor(durations * room / whole + 1e-9) >= _needs(schedule, style)[work.slot]
        if fits.mean() >= ENOUGH:
            return style, _Scale(room / whole, room, None)
    return None, _sampling(whole, unit, room)


def _sampling(whole: float, unit: float | None, room: int) -> _Scale:
    """Whole columns a unit where they fit, else the whole room."""
    columns = room if unit is None else room // round(whole / unit)
    if unit is None or columns == 0:
        return _Scale(room / whole, room, None)
    return _Scale(columns / unit, columns * round(whole / unit), unit)


def _needs(schedule: Schedule, style: Style) -> Array:
    """Columns that each slot's label takes, `[slot]`."""
    digits = np.char.str_len(mbs_of(schedule.codes).astype(str))
    action = np.ones_like(digits) if style.upright else digits
    if style.letters and not style.own_row:
        action = action + 1
    widths = schedule.widths
    needs = np.zeros(len(widths), dtype=np.int64)
    filled = np.flatnonzero(widths > 0)
    needs[filled] = np.add.reduceat(action, schedule.slots[:-1][filled])
    return needs + widths - 1 + style.gap


# --- text ---------------------------------------------------------------------------------


def _margins(timeline: Timeline, groups: list[range], *, bare: bool) -> _Margins:
    queues = timeline.schedule.queues
    left, idle, peak, seen = [], [], [], set()
    for group in groups:
        ranks = sorted({queues[i].rank for i in group})
        left.append(str(queues[group[0]]) if len(group) == 1 else f"{ranks[0]}-{ranks[-1]}")
        share = sum(tiles.idle_share(timeline, r) for r in ranks) / len(ranks)
        new = ranks[0] not in seen
        seen.update(ranks)
        idle.append(f"{share:.0%}" if new else "")
        peak.append(format_time(max(timeline.in_flight[r] for r in ranks)) if new else "")
    wide = [max(map(len, texts)) for texts in (left, idle, peak)]
    return _Margins(
        [x.rjust(wide[0]) if x.isdigit() else x.ljust(wide[0]) for x in left],
        ["" if bare else f"{a:>{wide[1]}} {b:>{wide[2]}}" for a, b in zip(idle, peak, strict=True)],
    )


def _wrap(pieces: list[str], width: int) -> list[str]:
    """Pieces two spaces apart, as many on a line as fit; escape sequences take no room."""
    lines, used = [""], 0
    for piece in (part for whole in pieces for part in _broken(whole, width)):
        size = len(_plain(piece))
        if used and used + 2 + size > width:
            lines.append("")
            used = 0
        lines[-1] += ("  " if used else "") + piece
        used += size + (2 if used else 0)
    return lines


def _broken(piece: str, width: int) -> list[str]:
    """A piece as it is, or in several where it is wider than a line."""
    return [piece] if len(_plain(piece)) <= width else textwrap.wrap(piece, width)


def _plain(text: str) -> str:
    while "\x1b[" in text:
        before, _, rest = text.partition("\x1b[")
        text = before + rest.partition("m")[2]
    return text
