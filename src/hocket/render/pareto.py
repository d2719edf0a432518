"""Schedules as points: bubble against memory, and which of them nothing beats in both.

In characters for the terminal and as SVG. Imports svg (its colours) and compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from hocket.render.compare import format_time
from hocket.render.svg import DARK, LIGHT, _n, _xml
from hocket.render.tiles import marks, steps

WIDTH, HEIGHT = 720.0, 420.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 24.0, 40.0, 52.0
CHARACTER = 6.3  # pixels that a letter of a label takes
ROW = 13.0  # pixels between labels

FRONT, BEHIND = "#2f6fc4", "#8b949e"


class Point(NamedTuple):
    """One schedule: the part of the time that is bubble, and memory of its fullest rank."""

    label: str
    bubble: float
    memory: float


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats in bubble without taking more memory, by memory."""
    best = math.inf
    out = []
    for point in sorted(points, key=lambda p: (p.memory, p.bubble, p.label)):
        if point.bubble < best - 1e-12:
            best = point.bubble
            out.append(point)
    return out


def _together(points: Sequence[Point]) -> list[Point]:
    """Points by memory; those at one place are one, with all their names."""
    names: dict[tuple[float, float], list[str]] = {}
    for point in points:
        key = (float(f"{point.memory:.6g}"), round(point.bubble, 6))
        names.setdefault(key, []).append(point.label)
    return [
        Point(", ".join(sorted(names[key], key=lambda n: (len(n), n))), key[1], key[0])
        for key in sorted(names)
    ]


# --- the terminal ------------------------------------------------------------------------------


def pareto_text(
    points: Sequence[Point],
    *,
    memory: str = "microbatches in flight",
    width: int = 72,
    height: int = 16,
) -> str:
    """Bubble upwards, memory to the right; letters in the order of memory.

    Capitals are on the front: nothing has less bubble with as much memory. `memory` names the
    axis.
    """
    if not points:
        return "no schedule to show"
    ordered = _together(points)
    best = set(front(ordered))
    columns, rows = max(width - 8, 20), max(height, 6)
    axes = _Axes.of(points)
    cells = [[" "] * columns for _ in range(rows)]
    legend = []
    for i, point in enumerate(ordered):
        letter = _letter(i, upper=point in best)
        column = min(int(axes.x(point.memory) * (columns - 1) + 0.5), columns - 1)
        row = min(int((1 - axes.y(point.bubble)) * (rows - 1) + 0.5), rows - 1)
        taken = cells[row][column] != " "
        cells[row][column] = "*" if taken else letter
        facts = f"bubble {point.bubble:.1%}, {memory} {format_time(point.memory)}"
        legend.append(f"  {letter}  {point.label}: {facts}")
    lines = [f"bubble against {memory}, fullest rank; capitals: nothing beats them in both"]
    for i, row in enumerate(cells):
        at = axes.bubble * (1 - i / (rows - 1))
        tick = f"{at:>5.0%}" if i % 5 == 0 or i == rows - 1 else " " * 5
        lines.append(f"{tick} |{''.join(row)}".rstrip())
    lines.append(" " * 6 + "+" + "-" * columns)
    middle, last = format_time(_round(axes.memory / 2)), format_time(_round(axes.memory))
    ends = f"0{middle:^{columns - 1 - len(last)}}{last}"
    lines.append(" " * 7 + ends)
    crowded = any("*" in row for row in cells)
    return "\n".join([*lines, *legend, *(["  *  several"] if crowded else [])])


def _letter(i: int, *, upper: bool) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    letter = letters[i % len(letters)]
    return letter.upper() if upper else letter


def _round(value: float) -> float:
    return float(f"{value:.3g}")


@dataclass(frozen=True)
class _Axes:
    """The highest bubble and memory shown; both axes begin at 0."""

    bubble: float
    memory: float

    @classmethod
    def of(cls, points: Sequence[Point]) -> _Axes:
        return cls(
            max((p.bubble for p in points), default=0) * 1.05 or 1.0,
            max((p.memory for p in points), default=0) * 1.05 or 1.0,
        )

    def x(self, memory: float) -> float:
        return memory / self.memory

    def y(self, bubble: float) -> float:
        return bubble / self.bubble


# --- SVG ---------------------------------------------------------------------------------------


def pareto_svg(
    points: Sequence[Point], *, memory: str = "microbatches in flight", title: str = ""
) -> str:
    """The same as an SVG document, every point with its name; the front is a line of steps."""
    axes = _Axes.of(points)
    points = _together(points)
    best = front(points)
    heading = _xml(title or f"Bubble against {memory}, fullest rank")
    size = f'viewBox="0 0 {_n(WIDTH)} {_n(HEIGHT)}" width="{_n(WIDTH)}" height="{_n(HEIGHT)}"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" class="hocket" {size} role="img">',
        f"<title>{heading}</title>",
        f"<style>\n{_css()}\n</style>",
        f'<text class="title" x="{_n(LEFT)}" y="22">{heading}</text>',
        *_grid(axes, memory),
        *_steps(best, axes),
        *_points(points, set(best), axes),
        "</svg>\n",
    ])  # fmt: skip


def _at(point: Point, axes: _Axes) -> tuple[float, float]:
    return (
        LEFT + axes.x(point.memory) * (WIDTH - LEFT - RIGHT),
        HEIGHT - BOTTOM - axes.y(point.bubble) * (HEIGHT - TOP - BOTTOM),
    )


def _grid(axes: _Axes, memory: str) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    lines = [f"M{_n(LEFT)} {_n(TOP)}V{_n(bottom)}H{_n(right)}"]
    texts = []
    for value in _ticks(axes.memory):
        x, _ = _at(Point("", 0, float(value)), axes)
        lines.append(f"M{_n(x)} {_n(bottom)}v4")
        texts.append(f'<text text-anchor="middle" x="{_n(x)}" y="{_n(bottom + 17)}">'
                     f"{format_time(value)}</text>")  # fmt: skip
    for value in _ticks(axes.bubble * 100):
        _, y = _at(Point("", float(value) / 100, 0), axes)
        lines.append(f"M{_n(LEFT)} {_n(y)}h-4")
        texts.append(f'<text class="end" x="{_n(LEFT - 8)}" y="{_n(y + 4)}">'
                     f"{format_time(value)}%</text>")  # fmt: skip
    yield f'<path class="axis" d="{"".join(lines)}"/>'
    yield '<g class="faint">'
    yield from texts
    yield f'<text x="{_n(LEFT)}" y="{_n(TOP - 6)}">bubble</text>'
    yield f'<text class="end" x="{_n(right)}" y="{_n(bottom + 36)}">{_xml(memory)}</text>'
    yield "</g>"


def _ticks(highest: float) -> list[Fraction]:
    total = Fraction(highest).limit_denominator(10**6)
    return marks(total, next(steps(total, 8)))


def _steps(best: Sequence[Point], axes: _Axes) -> Iterator[str]:
    """From each point of the front to the right, then down to the next."""
    if not best:
        return
    x, y = _at(best[0], axes)
    path = [f"M{_n(x)} {_n(y)}"]
    for point in best[1:]:
        x, y = _at(point, axes)
        path.append(f"H{_n(x)}V{_n(y)}")
    yield f'<path class="front" d="{"".join(path)}H{_n(WIDTH - RIGHT)}"/>'


def _points(points: Sequence[Point], best: set[Point], axes: _Axes) -> Iterator[str]:
    taken = [(x - 5, x + 5, y + 4) for x, y in (_at(point, axes) for point in points)]
    for point in sorted(points, key=lambda p: (p not in best, p.memory, p.bubble, p.label)):
        x, y = _at(point, axes)
        css = "on" if point in best else "off"
        facts = f"{point.label}: bubble {point.bubble:.1%}, {format_time(point.memory)}"
        circle = f'<circle class="{css}" cx="{_n(x)}" cy="{_n(y)}" r="4">'
        yield f"{circle}<title>{_xml(facts)}</title></circle>"
        above = 7 if point in best else 0  # the front's line leaves to the right
        left, base = _label_at(point.label, x, y - above, taken)
        yield f'<text class="{css}" x="{_n(left)}" y="{_n(base)}">{_xml(point.label)}</text>'


def _label_at(
    label: str, x: float, y: float, taken: list[tuple[float, float, float]]
) -> tuple[float, float]:
    """Beside the point, moved up or down until no other label is in the way."""
    width = CHARACTER * len(label)
    left = x + 7 if x + 7 + width < WIDTH - 4 else x - 7 - width
    for i in range(40):
        base = y + 4 + ROW * ((i + 1) // 2) * (1 if i % 2 else -1)
        inside = TOP < base < HEIGHT - BOTTOM - 2
        free = all(
            abs(base - b) >= ROW - 1 or left > right or left + width < start
            for start, right, b in taken
        )
        if inside and free:
            break
    taken.append((left, left + width, base))
    return left, base


def _css() -> str:
    def scheme(colours: dict[str, str]) -> str:
        return (
            f".hocket text{{fill:{colours['ink']}}}"
            f".hocket .faint text,.hocket text.off{{fill:{colours['faint']}}}"
            f".hocket .axis{{stroke:{colours['line']}}}"
        )

    return "\n".join([
        ".hocket{font:11px Inter,'Helvetica Neue',Helvetica,Arial,sans-serif;max-width:100%;"
        "height:auto}",
        ".hocket .title{font-size:14px;font-weight:600}.hocket .end{text-anchor:end}",
        ".hocket path{fill:none}",
        scheme(LIGHT),
        f"@media(prefers-color-scheme:dark){{{scheme(DARK)}}}",
        f".hocket .front{{stroke:{FRONT};stroke-width:1.5;stroke-dasharray:4 3}}",
        f".hocket circle.on{{fill:{FRONT}}}.hocket circle.off{{fill:{BEHIND}}}",
    ])  # fmt: skip
