"""Schedules as points: bubble against memory, and which of them nothing beats in both.

In characters for the terminal, and as a figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from hocket.render.figure import WIDER, Dot, Figure, Lines, Shape, Text, text_width
from hocket.render.pdf import as_pdf
from hocket.render.svg import as_svg
from hocket.render.tiles import marks, steps
from hocket.tables import format_time

WIDTH, HEIGHT = 720.0, 420.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 24.0, 48.0, 52.0
RADIUS = 4.0  # of a point, pixels
CLOSE = 9.5  # from here on a line leads from the point to its label
ROW = 13.0  # pixels that a label is high
BELOW = 3.0  # of it below the baseline


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
    memory: str = "microbatches in flight",
    *,
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


# --- SVG and PDF -----------------------------------------------------------------------------


def pareto_svg(
    points: Sequence[Point], memory: str = "microbatches in flight", *, title: str = ""
) -> str:
    """The same as an SVG document, every point with its name; the front is a line of steps."""
    return as_svg(figure(points, memory=memory, title=title))


def pareto_pdf(
    points: Sequence[Point], memory: str = "microbatches in flight", *, title: str = ""
) -> bytes:
    """The same as a PDF."""
    return as_pdf(figure(points, memory=memory, title=title))


def figure(
    points: Sequence[Point], memory: str = "microbatches in flight", *, title: str = ""
) -> Figure:
    """The same as a figure."""
    axes = _Axes.of(points)
    points = _together(points)
    best = front(points)
    heading = title or f"Bubble against {memory}, fullest rank"
    shapes: list[Shape] = [
        Text("title", LEFT, 22, heading, size=15),
        *_grid(axes, memory),
        *_steps(best, axes),
        *_points(points, set(best), axes),
    ]
    return Figure(WIDTH, HEIGHT, heading, shapes)


def _at(point: Point, axes: _Axes) -> tuple[float, float]:
    return (
        LEFT + axes.x(point.memory) * (WIDTH - LEFT - RIGHT),
        HEIGHT - BOTTOM - axes.y(point.bubble) * (HEIGHT - TOP - BOTTOM),
    )


def _grid(axes: _Axes, memory: str) -> Iterator[Shape]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    lines = [[(LEFT, TOP), (LEFT, bottom), (right, bottom)]]
    texts = []
    for value in _ticks(axes.memory):
        x, _ = _at(Point("", 0, float(value)), axes)
        lines.append([(x, bottom), (x, bottom + 4)])
        texts.append(Text("faint", x, bottom + 17, format_time(value), "middle"))
    for value in _ticks(axes.bubble * 100):
        _, y = _at(Point("", float(value) / 100, 0), axes)
        lines.append([(LEFT, y), (LEFT - 4, y)])
        texts.append(Text("faint", LEFT - 8, y + 4, f"{format_time(value)}%", "end"))
    yield Lines("axis", lines)
    yield from texts
    yield Text("faint", LEFT, TOP - 8, "bubble")
    yield Text("faint", right, bottom + 36, memory, "end")


def _ticks(highest: float) -> list[Fraction]:
    total = Fraction(highest).limit_denominator(10**6)
    return marks(total, next(steps(total, 8)))


def _steps(best: Sequence[Point], axes: _Axes) -> Iterator[Shape]:
    """From each point of the front to the right, then down to the next."""
    if not best:
        return
    path = [_at(best[0], axes)]
    for point in best[1:]:
        x, y = _at(point, axes)
        path += [(x, path[-1][1]), (x, y)]
    yield Lines("front", [[*path, (WIDTH - RIGHT, path[-1][1])]])


def _points(points: Sequence[Point], best: set[Point], axes: _Axes) -> Iterator[Shape]:
    places = {point: _at(point, axes) for point in points}
    steps = [places[point] for point in points if point in best]
    dots = [_Area.around(x, y, RADIUS) for x, y in places.values()]
    labels: list[_Area] = []
    leaders: list[_Area] = []
    for point in sorted(points, key=lambda p: (p not in best, p.memory, p.bubble, p.label)):
        x, y = places[point]
        on = point in best
        facts = f"{point.label}: bubble {point.bubble:.1%}, {format_time(point.memory)}"
        width = text_width(point.label) * WIDER
        least = [*dots, *labels]
        most = [*least, *leaders, *_front_areas(steps, below=not on)]
        free = [(most, most), ([*least, *leaders], labels), (least, [])]
        area = _place(width, x, y, free, leftwards=on)
        labels.append(area)
        leaders += _leader(area, x, y)
        if _leader(area, x, y):
            yield Lines("axis", [[(x, y), area.nearest(x, y)]])
        yield Dot("on" if on else "off", x, y, RADIUS, facts)
        yield Text("" if on else "faint", area.left, area.bottom - BELOW, point.label)


class _Area(NamedTuple):
    """What is taken: by a point, a line, a label."""

    left: float
    top: float
    right: float
    bottom: float

    @classmethod
    def around(cls, x: float, y: float, radius: float) -> _Area:
        return cls(x - radius, y - radius, x + radius, y + radius)

    def meets(self, other: _Area) -> bool:
        """True where both have some place in common."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom

    def within(self, other: _Area) -> bool:
        """True where all of it lies in the other."""
        across = other.left <= self.left and self.right <= other.right
        return across and other.top <= self.top and self.bottom <= other.bottom

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """The place in it that is nearest to a point."""
        return min(max(x, self.left), self.right), min(max(y, self.top), self.bottom)


def _leader(label: _Area, x: float, y: float) -> list[_Area]:
    """Where the line from a point to its label runs; nothing where both stand together."""
    to_x, to_y = label.nearest(x, y)
    length = math.hypot(to_x - x, to_y - y)
    if length < CLOSE:
        return []
    parts = (i / length for i in range(7, int(length), 2))  # from outside of the point on
    return [_Area.around(x + (to_x - x) * part, y + (to_y - y) * part, 1) for part in parts]


def _front_areas(steps: Sequence[tuple[float, float]], *, below: bool) -> list[_Area]:
    """Where the line of the front runs, or all that lies below it."""
    if not steps:
        return []
    ends = [*(x for x, _ in steps[1:]), WIDTH - RIGHT]
    level = zip(steps, ends, strict=True)
    if below:
        first = _Area(LEFT, TOP, steps[0][0] - RADIUS, HEIGHT)
        return [first, *(_Area(x, y - 1, end, HEIGHT) for (x, y), end in level)]
    across = [_Area(x, y - 1, end, y + 1) for (x, y), end in level]
    return across + [_Area(x - 1, a, x + 1, b) for (_, a), (x, b) in pairwise(steps)]


def _place(
    width: float,
    x: float,
    y: float,
    free: Sequence[tuple[Sequence[_Area], Sequence[_Area]]],
    *,
    leftwards: bool,
) -> _Area:
    """Where a label stands: beside its point, else as near as nothing is in the way.

    free: what should not lie under the label, and under the line to it; where there is no such
    place what must not at least, and so on.
    """
    choices = []
    for down in range(-10, 11):
        for away in (*range(8, 90, 12), 120, 160, 200):
            for side in (-1, 1):
                left = x + away if side > 0 else x - away - width
                bottom = y + 4 + ROW * down + BELOW
                far = ROW * abs(down) + away + 2 * ((side < 0) != leftwards)
                choices.append((far, _Area(left, bottom - ROW, left + width, bottom)))
    page = _Area(LEFT + 4, TOP, WIDTH - 4, HEIGHT - BOTTOM)
    ordered = [area for _, area in sorted(choices) if area.within(page)]
    for under_label, under_line in free:
        for area in ordered:
            line = _leader(area, x, y)
            if not any(map(area.meets, under_label)) and not any(
                a.meets(b) for a in line for b in under_line
            ):
                return area
    return ordered[0]
