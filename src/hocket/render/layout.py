"""A timeline as a figure: time across, a lane for each queue, ranks down; for SVG and PDF."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hocket.ir import Array, mbs_of
from hocket.render import tiles
from hocket.render.figure import (
    FONT,
    TITLE,
    WIDER,
    Bars,
    Box,
    Figure,
    Lines,
    Shape,
    Text,
    text_width,
)
from hocket.render.tiles import Drawing
from hocket.tables import format_time
from hocket.timeline import Timeline

MOST_RECTS = 5000  # more tiles than this are merged into bars, without numbers
NARROWEST, WIDEST = 420.0, 1600.0  # pixels that the lanes take
TILE = 18.0  # wished least width of a tile
DIGIT = 0.58  # width of a digit, in font sizes
RIGHT = 96.0  # pixels right of the lanes


def figure(timeline: Timeline, title: str | None = None) -> Figure:
    """The picture of a timeline.

    A fused slot is a tile of layers. Above 5000 tiles each queue and kind is one shape, without
    numbers. `title` stands above; left out, it is name and size, "" leaves none.
    """
    drawn = tiles.drawing(timeline)
    name, size, *facts = tiles.headline(timeline)
    heading = f"{name}, {size}" if title is None else title
    page = _Page.of(timeline, drawn, headed=bool(heading))
    legend = list(_legend(timeline, drawn, page))
    height = max((y for y, _ in legend), default=page.axis + 20) + 12
    shapes: list[Shape] = [
        *_heading(heading, facts, page),
        *_lanes(timeline, page),
        *(_merged(timeline, drawn, page) if page.merged else _boxes(timeline, drawn, page)),
        *_axis(timeline, page),
        *(shape for _, shape in legend),
    ]
    return Figure(page.width, height, heading or name, shapes)


@dataclass(frozen=True)
class _Page:
    """Where things are, in pixels."""

    left: float
    top: float
    per_tick: float
    lanes_width: float
    lane: float  # height of a queue's tiles
    pitch: float  # from one queue to the next
    queues: int
    merged: bool

    @classmethod
    def of(cls, timeline: Timeline, drawn: Drawing, *, headed: bool) -> _Page:
        """Chooses sizes in which numbers have room, up to a widest page."""
        queues = timeline.schedule.queues
        n = len(queues)
        lane = 24.0 if n <= 16 else 16.0 if n <= 40 else 10.0 if n <= 160 else 4.0
        per_tick = _per_tick(timeline, drawn, min(FONT, lane - 2))
        return cls(
            left=round(18 + WIDER * max(text_width(_label(q)) for q in queues)),
            top=56 if headed else 36,
            per_tick=per_tick,
            lanes_width=float(drawn.length) * per_tick or NARROWEST,
            lane=lane,
            pitch=lane + (4 if n <= 16 else 2 if n <= 160 else 1),
            queues=n,
            merged=len(drawn.work.slot) > MOST_RECTS,
        )

    @property
    def font(self) -> float:
        """Size of the numbers on tiles."""
        return min(FONT, self.lane - 2)

    @property
    def right(self) -> float:
        """End of the lanes."""
        return self.left + self.lanes_width

    @property
    def width(self) -> float:
        """Width of the page."""
        return math.ceil(self.right + RIGHT)

    @property
    def axis(self) -> float:
        """Height of the axis."""
        return self.top + self.queues * self.pitch + 2

    @property
    def labelled(self) -> range:
        """The queues whose label has room."""
        return range(0, self.queues, math.ceil(12 / self.pitch))

    def y(self, queue: int) -> float:
        """The top of a lane."""
        return self.top + queue * self.pitch

    def x(self, ticks: Array) -> list[float]:
        """Where times are."""
        return (self.left + np.asarray(ticks, dtype=float) * self.per_tick).tolist()


def _per_tick(timeline: Timeline, drawn: Drawing, font: float) -> float:
    """Pixels per tick: nearly every number has room, a unit of time has whole pixels."""
    whole = float(drawn.length)
    if len(drawn.work.slot) == 0:
        return NARROWEST / whole if whole else 0.0
    s = timeline.schedule
    digits = np.char.str_len(mbs_of(s.codes).astype(str))
    filled = np.flatnonzero(s.widths > 0)
    most = np.ones(s.n_slots)
    most[filled] = np.maximum.reduceat(digits, s.slots[:-1][filled])
    needed = np.maximum(most[drawn.work.slot] * DIGIT * font + 5, TILE)
    wish = float(np.quantile(needed / (drawn.work.end - drawn.work.start), 0.95))
    scale = min(max(wish, NARROWEST / whole), WIDEST / whole)
    unit = tiles.common_unit(drawn)
    pixels = 0 if unit is None else math.floor(scale * unit + 1e-9)
    return pixels / unit if unit is not None and pixels >= 3 else scale


# --- tiles ----------------------------------------------------------------------------------


class _Layer(NamedTuple):
    """One action of a tile, or a message: a stretch of a lane."""

    queue: int
    css: str
    x: float
    y: float
    width: float
    height: float
    number: str


def _layers(timeline: Timeline, drawn: Drawing, page: _Page) -> Iterator[_Layer]:
    """Everything to draw, messages below work; the actions of a slot share its lane."""
    m = drawn.messages
    for queue, a, b in zip(m.queue.tolist(), page.x(m.start), page.x(m.end), strict=True):
        y, h = page.y(queue) + page.lane * 0.3, page.lane * 0.4
        yield _Layer(queue, "M", a, y, b - a, h, "")
    w = drawn.work
    spans = zip(w.slot.tolist(), w.queue.tolist(), page.x(w.start), page.x(w.end), strict=True)
    for slot, queue, a, b in spans:
        parts = tiles.parts(timeline.schedule, drawn, slot)
        height = page.lane / len(parts)
        for i, (action, shade) in enumerate(parts):
            css = "M" if action.kind.is_communication else action.kind.name + " x" * shade
            y = page.y(queue) + i * height
            yield _Layer(queue, css, a, y, b - a, height, str(action.mb))


def _boxes(timeline: Timeline, drawn: Drawing, page: _Page) -> Iterator[Shape]:
    numbers: list[Text] = []
    for t in _layers(timeline, drawn, page):
        gap = 1.0 if t.width >= 4 else 0.0
        yield Box(t.css, t.x + gap / 2, t.y, t.width - gap, t.height)
        font = min(page.font, t.height * 0.8)
        if t.number and font >= 8 and len(t.number) * DIGIT * font + 2 <= t.width:
            x, y = t.x + t.width / 2, t.y + t.height / 2 + font * 0.36
            numbers.append(Text(t.css, x, y, t.number, "middle", font))
    yield from numbers


def _merged(timeline: Timeline, drawn: Drawing, page: _Page) -> Iterator[Shape]:
    """Bars for each queue, kind and layer; stretches that touch are one."""
    strokes: dict[tuple[int, str, float, float], list[list[float]]] = defaultdict(list)
    for t in _layers(timeline, drawn, page):
        runs = strokes[t.queue, t.css, t.y, t.height]
        if runs and t.x - runs[-1][1] < 0.005:
            runs[-1][1] = t.x + t.width
        else:
            runs.append([t.x, t.x + t.width])
    for (_, css, y, height), runs in strokes.items():
        yield Bars(css, y + height / 2, height, runs)


# --- around the tiles -----------------------------------------------------------------------


def _label(queue: object) -> str:
    return f"rank {queue}"


def _heading(heading: str, facts: list[str], page: _Page) -> Iterator[Shape]:
    y = page.top - 12
    if heading:
        yield Text("title", page.left, y - 20, heading, size=TITLE)
    yield Text("faint", page.left, y, "  \N{MIDDLE DOT}  ".join(facts))
    for x, text in ((page.right + 34, "idle"), (page.width - 6, "in flight")):
        yield Text("faint", x, y, text, "end")


def _lanes(timeline: Timeline, page: _Page) -> Iterator[Shape]:
    """The lane of each queue with its label; a rank's idle share and in-flight peak."""
    seen = set()
    for i, queue in enumerate(timeline.schedule.queues):
        yield Box("lane", page.left, page.y(i), page.lanes_width, page.lane)
        if i not in page.labelled:
            continue
        y = page.y(i) + page.lane / 2 + 4
        yield Text("", page.left - 8, y, _label(queue), "end")
        if queue.rank in seen:
            continue
        seen.add(queue.rank)
        peak = format_time(timeline.in_flight[queue.rank])
        idle = f"{tiles.idle_share(timeline, queue.rank):.0%}"
        yield Text("", page.right + 34, y, idle, "end")
        yield Text("", page.width - 6, y, str(peak), "end")


def _axis(timeline: Timeline, page: _Page) -> Iterator[Shape]:
    y, scale = page.axis, timeline.ticks.scale
    ticks = [[(page.left, y), (page.right, y)]]
    texts = []
    if timeline.makespan > 0:
        most = max(int(page.lanes_width // 44), 2)
        times = tiles.marks(timeline.makespan, next(tiles.steps(timeline.makespan, most)))
        for t, x in zip(times, page.x(np.array([float(t) * scale for t in times])), strict=True):
            ticks.append([(x, y), (x, y + 4)])
            texts.append(Text("faint", x, y + 16, format_time(t), "middle"))
    yield Lines("axis", ticks)
    yield from texts
    unit = f"time ({timeline.unit})" if timeline.unit else "time"
    yield Text("faint", page.right + 20, y + 16, unit)


def _legend(timeline: Timeline, drawn: Drawing, page: _Page) -> Iterator[tuple[float, Shape]]:
    """(baseline, shape) of each entry, in lines as wide as the page."""
    x, y = page.left, page.axis + 40
    for swatch, text in _entries(timeline, drawn):
        width = 18 + WIDER * text_width(text) + 16
        if x > page.left and x + width > page.width:
            x, y = page.left, y + 18
        h = 12 / len(swatch)
        for i, css in enumerate(swatch):
            yield y, Box(css, x, y - 10 + i * h, 12, h)
        yield y, Text("", x + 18, y, text)
        x += width


def _entries(timeline: Timeline, drawn: Drawing) -> Iterator[tuple[list[str], str]]:
    kinds = tiles.kinds_drawn(timeline)
    for kind in kinds:
        yield [kind.name], tiles.NAMES[kind]
    if (timeline.schedule.widths > 1).any() and kinds:
        yield [kinds[0].name, kinds[min(1, len(kinds) - 1)].name], "run together"
    if len(drawn.messages.slot):
        yield ["M"], "message"
    yield ["lane"], "idle"
    if drawn.shades.any() and kinds:
        meaning = tiles.shade_means(timeline.schedule).removeprefix("is ")
        yield [f"{kinds[0].name} x"], meaning
