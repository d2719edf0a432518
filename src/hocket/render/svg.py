"""A timeline as SVG for READMEs and papers: rects with classes, selectable numbers, no script.

Imports timeline, tiles and compare.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple
from xml.sax.saxutils import escape

import numpy as np

from hocket.ir import Array, mbs_of
from hocket.render import tiles
from hocket.render.compare import format_time
from hocket.render.tiles import Drawing
from hocket.timeline import Timeline

MOST_RECTS = 5000  # more tiles than this are merged into paths, without numbers
NARROWEST, WIDEST = 420.0, 1600.0  # pixels that the lanes take
TILE = 18.0  # wished least width of a tile
DIGIT = 0.58  # width of a digit, in font sizes
RIGHT = 96.0  # pixels right of the lanes

# Fill of the tile and of the number on it, by class: a kind, or M for messages; x is shade 1.
FILLS = {
    "F": ("#2f6fc4", "#fff"),
    "F.x": ("#a9caf4", "#0f2440"),
    "B": ("#2a8249", "#fff"),
    "B.x": ("#9fd6ae", "#0e2d18"),
    "I": ("#148f9b", "#fff"),
    "I.x": ("#97dde2", "#0a3236"),
    "W": ("#e5a32e", "#2b1c00"),
    "W.x": ("#f8dfa8", "#3d2a05"),
    "M": ("#9a9ea4", "#fff"),
}
LIGHT = {"ink": "#1f2328", "faint": "#59636e", "line": "#818b98", "lane": "#eceef1"}
DARK = {"ink": "#f0f6fc", "faint": "#9198a1", "line": "#656c76", "lane": "#21262d"}


def svg(timeline: Timeline, *, title: str | None = None) -> str:
    """A timeline as an SVG document: time across, a lane for each queue, ranks down.

    Tiles are rects with the class of their kind (F, B, I, W, M for messages; `x` for a rank's
    other stage), so that a page may restyle them; numbers are text. A fused slot is a tile of
    layers. The lines around the tiles follow the reader's light or dark scheme; there is no
    background, and the picture shrinks with its page. Above 5000 tiles each queue and kind is one
    path, without numbers. `title` stands above; left out, it is name and size, "" leaves none.
    """
    drawn = tiles.drawing(timeline)
    name, size, *facts = tiles.headline(timeline)
    heading = _xml(f"{name}, {size}" if title is None else title)
    page = _Page.of(timeline, drawn, headed=bool(heading))
    legend = list(_legend(timeline, drawn, page))
    height = max((y for y, _ in legend), default=page.axis + 20) + 12
    box = f'viewBox="0 0 {_n(page.width)} {_n(height)}" width="{_n(page.width)}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="hocket" {box} height="{_n(height)}"'
            ' role="img">',
            f"<title>{heading or _xml(name)}</title>",
            f"<style>\n{_css(page)}\n</style>",
            *_heading(heading, facts, page),
            *_lanes(timeline, page),
            *(_merged(timeline, drawn, page) if page.merged else _rects(timeline, drawn, page)),
            *_axis(timeline, page),
            *(element for _, element in legend),
            "</svg>\n",
        ]
    )


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
        per_tick = _per_tick(timeline, drawn, min(11.0, lane - 2))
        return cls(
            left=round(16 + 6.2 * max(len(_label(q)) for q in queues)),
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
        return min(11.0, self.lane - 2)

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


def _rects(timeline: Timeline, drawn: Drawing, page: _Page) -> Iterator[str]:
    numbers: list[str] = []
    for t in _layers(timeline, drawn, page):
        gap = 1.0 if t.width >= 4 else 0.0
        at = f'x="{_n(t.x + gap / 2)}" y="{_n(t.y)}"'
        size = f'width="{_n(t.width - gap)}" height="{_n(t.height)}"'
        yield f'<rect class="{t.css}" {at} {size}/>'
        font = min(page.font, t.height * 0.8)
        if t.number and font >= 8 and len(t.number) * DIGIT * font + 2 <= t.width:
            small = "" if font == page.font else f' font-size="{_n(font)}"'
            x, y = _n(t.x + t.width / 2), _n(t.y + t.height / 2 + font * 0.36)
            numbers.append(f'<text class="{t.css}" x="{x}" y="{y}"{small}>{t.number}</text>')
    yield f'<g font-size="{_n(page.font)}" text-anchor="middle">'
    yield from numbers
    yield "</g>"


def _merged(timeline: Timeline, drawn: Drawing, page: _Page) -> Iterator[str]:
    """One stroked path for each queue, kind and layer; stretches that touch are one."""
    strokes: dict[tuple[int, str, float, float], list[list[float]]] = defaultdict(list)
    for t in _layers(timeline, drawn, page):
        runs = strokes[t.queue, t.css, t.y, t.height]
        if runs and t.x - runs[-1][1] < 0.005:
            runs[-1][1] = t.x + t.width
        else:
            runs.append([t.x, t.x + t.width])
    for (_, css, y, height), runs in strokes.items():
        path = _path(runs, y + height / 2)
        yield f'<path class="{css}" stroke-width="{_n(height)}" d="{path}"/>'


def _path(runs: list[list[float]], y: float) -> str:
    """Horizontal strokes from each start to its end, by relative moves of whole hundredths."""
    text, at = [f"M0 {_n(y)}"], 0
    for start, end in runs:
        a, b = round(start * 100), round(end * 100)
        text.append(f"m{_n((a - at) / 100)} 0h{_n((b - a) / 100)}")
        at = b
    return "".join(text)


# --- around the tiles -----------------------------------------------------------------------


def _label(queue: object) -> str:
    return f"rank {queue}"


def _heading(heading: str, facts: list[str], page: _Page) -> Iterator[str]:
    y = page.top - 12
    if heading:
        yield f'<text class="title" x="{_n(page.left)}" y="{_n(y - 20)}">{heading}</text>'
    line = "  \N{MIDDLE DOT}  ".join(map(_xml, facts))
    yield f'<text class="faint" x="{_n(page.left)}" y="{_n(y)}">{line}</text>'
    for x, text in ((page.right + 34, "idle"), (page.width - 6, "in flight")):
        yield f'<text class="faint end" x="{_n(x)}" y="{_n(y)}">{text}</text>'


def _lanes(timeline: Timeline, page: _Page) -> Iterator[str]:
    """The lane of each queue with its label; a rank's idle share and in-flight peak."""
    seen = set()
    for i, queue in enumerate(timeline.schedule.queues):
        at = f'x="{_n(page.left)}" y="{_n(page.y(i))}"'
        size = f'width="{_n(page.lanes_width)}" height="{_n(page.lane)}"'
        yield f'<rect class="lane" {at} {size}/>'
        if i not in page.labelled:
            continue
        y = _n(page.y(i) + page.lane / 2 + 4)
        yield f'<text class="end" x="{_n(page.left - 8)}" y="{y}">{_xml(_label(queue))}</text>'
        if queue.rank in seen:
            continue
        seen.add(queue.rank)
        peak = timeline.ranks[queue.rank].peak_in_flight
        idle = f"{tiles.idle_share(timeline, queue.rank):.0%}"
        yield f'<text class="end" x="{_n(page.right + 34)}" y="{y}">{idle}</text>'
        yield f'<text class="end" x="{_n(page.width - 6)}" y="{y}">{peak}</text>'


def _axis(timeline: Timeline, page: _Page) -> Iterator[str]:
    y, scale = page.axis, timeline.ticks.scale
    ticks = [f"M{_n(page.left)} {_n(y)}H{_n(page.right)}"]
    texts = []
    if timeline.makespan > 0:
        most = max(int(page.lanes_width // 44), 2)
        times = tiles.marks(timeline.makespan, next(tiles.steps(timeline.makespan, most)))
        for t, x in zip(times, page.x(np.array([float(t) * scale for t in times])), strict=True):
            ticks.append(f"M{_n(x)} {_n(y)}v4")
            texts.append(f'<text x="{_n(x)}" y="{_n(y + 16)}">{format_time(t)}</text>')
    yield f'<path class="axis" d="{"".join(ticks)}"/>'
    yield '<g class="faint" text-anchor="middle">'
    yield from texts
    yield "</g>"
    unit = f"time ({timeline.unit})" if timeline.unit else "time"
    yield f'<text class="faint" x="{_n(page.right + 20)}" y="{_n(y + 16)}">{_xml(unit)}</text>'


def _legend(timeline: Timeline, drawn: Drawing, page: _Page) -> Iterator[tuple[float, str]]:
    """(baseline, element) of each entry, in lines as wide as the page."""
    x, y = page.left, page.axis + 40
    for swatch, text in _entries(timeline, drawn):
        width = 18 + 6.2 * len(text) + 16
        if x > page.left and x + width > page.width:
            x, y = page.left, y + 18
        for i, css in enumerate(swatch):
            h = 12 / len(swatch)
            rect = f'<rect class="{css}" x="{_n(x)}" y="{_n(y - 10 + i * h)}"'
            yield y, f'{rect} width="12" height="{_n(h)}"/>'
        yield y, f'<text x="{_n(x + 18)}" y="{_n(y)}">{text}</text>'
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


# --- text -----------------------------------------------------------------------------------


def _css(page: _Page) -> str:
    """The style sheet: every rule inside `.hocket`, so that a page may hold several pictures."""
    lines = [
        ".hocket{font:11px Inter,'Helvetica Neue',Helvetica,Arial,sans-serif;max-width:100%;"
        "height:auto}",
        ".hocket .title{font-size:15px;font-weight:600}",
        ".hocket .end{text-anchor:end}",
        ".hocket path{fill:none}",
    ]
    for name, (fill, ink) in FILLS.items():
        prefix = "path" if page.merged else "rect"
        lines.append(f".hocket rect.{name}{{fill:{fill}}}.hocket text.{name}{{fill:{ink}}}")
        if prefix == "path":
            lines.append(f".hocket path.{name}{{stroke:{fill}}}")
    lines.insert(4, _scheme(LIGHT))
    lines.append(f"@media(prefers-color-scheme:dark){{{_scheme(DARK)}}}")
    return "\n".join(lines)


def _scheme(colours: dict[str, str]) -> str:
    return (
        f".hocket text{{fill:{colours['ink']}}}"
        f".hocket .faint,.hocket .faint text{{fill:{colours['faint']}}}"
        f".hocket .axis{{stroke:{colours['line']}}}"
        f".hocket rect.lane{{fill:{colours['lane']}}}"
    )


_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _xml(text: str) -> str:
    """Text as XML; characters that XML cannot hold become a replacement character."""
    return escape(_NOT_XML.sub("\ufffd", text))


def _n(value: float) -> str:
    """A number in at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
