"""A picture as plain shapes, before it is SVG or PDF; their colours by class.

Pixels, y downwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hocket.deps import ROWS

# Fill of the tile and of the number on it, by class: a kind, or M for messages; x is shade 1.
FILLS = {
    f"{kind.name if row.work else 'M'}{' x' * i}": (shade.fill, shade.ink)
    for kind, row in ROWS.items()
    for i, shade in enumerate(row.look.shades[: 1 + row.work])
}
MARKS = {"on": "#2f6fc4", "off": "#8b949e", "front": "#2f6fc4"}  # of a chart
LIGHT = {"ink": "#1f2328", "faint": "#59636e", "line": "#818b98", "lane": "#eceef1"}
DARK = {"ink": "#f0f6fc", "faint": "#9198a1", "line": "#656c76", "lane": "#21262d"}
DARK_GROUND = "#0d1117"  # under the picture: not every page is dark when its reader's scheme is
FONT, TITLE = 11.0, 15.0  # sizes of text that has no other
DASHED = {"front": (4, 3)}
# Thousandths of the size that a letter of Helvetica takes; 556 for all others.
_BY_WIDTH = {
    191: "'", 222: "ijl", 260: "|", 278: " !,./:;I[\\]ft\N{MIDDLE DOT}", 333: "()-`r", 334: "{}",
    355: '"', 389: "*", 469: "^", 500: "Jcksvxyz", 584: "+<=>~", 611: "FTZ", 667: "&ABEKPSVXY",
    722: "CDHNRUw", 778: "GOQ", 833: "Mm", 889: "%", 944: "W", 1015: "@",
}  # fmt: skip
WIDER = 1.1  # the widest usual font against Helvetica
WIDTHS = {letter: width for width, letters in _BY_WIDTH.items() for letter in letters}


class Box(NamedTuple):
    """A filled rectangle."""

    css: str
    x: float
    y: float
    width: float
    height: float


class Bars(NamedTuple):
    """Stretches (from, to) of one lane in one colour; y is the middle."""

    css: str
    y: float
    height: float
    runs: Sequence[Sequence[float]]


class Lines(NamedTuple):
    """Polylines, one pixel wide (1.5 where dashed)."""

    css: str
    paths: Sequence[Sequence[tuple[float, float]]]


class Dot(NamedTuple):
    """A filled circle with what it stands for."""

    css: str
    x: float
    y: float
    radius: float
    about: str


class Text(NamedTuple):
    """Words on one line: y is the baseline, `anchor` (start, middle, end) is at x."""

    css: str
    x: float
    y: float
    text: str
    anchor: str = "start"
    size: float = FONT


Shape = Box | Bars | Lines | Dot | Text


class Figure(NamedTuple):
    """A picture: its size, its title for those who do not see it, and what is drawn in order."""

    width: float
    height: float
    title: str
    shapes: list[Shape]


def short(value: float) -> str:
    """A number in at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def text_width(text: str, size: float = FONT) -> float:
    """Pixels that text takes in Helvetica. Source: Adobe's metrics of the 14 standard fonts."""
    return sum(WIDTHS.get(letter, 556) for letter in text) * size / 1000
