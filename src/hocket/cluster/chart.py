"""A search as a picture: memory of the answer's ranks, and step time against memory of all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from fractions import Fraction

from hocket.cluster.reasons import estimate_words, percent, reason
from hocket.cluster.search import Fate, Found
from hocket.render.figure import Box, Dot, Figure, Lines, Shape, Text
from hocket.render.tiles import marks, steps
from hocket.tables import format_bytes, format_time

WIDTH, LEFT, RIGHT = 720.0, 64.0, 24.0
_ROW, _TALLEST, _PLOT = 16.0, 320.0, 300.0
_COLOURS = {"weights": "F", "gradients": "B", "optimizer": "W", "activations": "I", "buffers": "M"}
_CUT = 3.0  # times the fastest step: what is slower is not drawn


def chart(found: Found) -> Figure:
    """The picture of a search that found something."""
    cluster, ranks = found.cluster, len(found.best[0].memory)
    row = min(_ROW, _TALLEST / ranks)
    bottom = 70 + ranks * row
    title = f"{found.best[0].model.name} on {cluster.gpus:,} {cluster.gpu.name}"
    shapes = [
        Text("title", LEFT, 22, title, size=15),
        *_bars(found, row),
        *_points(found, bottom + 60),
    ]
    return Figure(WIDTH, bottom + 60 + _PLOT + 52, title, shapes)


def _x(n_bytes: float, most: float) -> float:
    return LEFT + n_bytes / most * (WIDTH - LEFT - RIGHT)


def _bars(found: Found, row: float) -> Iterator[Shape]:
    """The memory of each pipeline rank in its parts, and the limit."""
    memory, cluster, top = found.best[0].memory, found.cluster, 62.0
    most = 1.05 * max(cluster.memory, *(x.total for x in memory))
    at = LEFT
    for name, css in _COLOURS.items():
        yield Box(css, at, 34, 10, 10)
        yield Text("faint", at + 14, 43, name)
        at += 90
    for rank, parts in enumerate(memory):
        y, used = top + rank * row, 0.0
        if row > 9 or rank in (0, len(memory) - 1):
            yield Text("faint", LEFT - 6, y + row * 0.75, f"rank {rank}", "end")
        for name, size in asdict(parts).items():
            start, used = used, used + size
            width = _x(used, most) - _x(start, most)
            yield Box(_COLOURS[name], _x(start, most), y, width, 0.85 * row)
    x = _x(cluster.memory, most)
    yield Lines("front", [[(x, top - 6), (x, top + len(memory) * row)]])
    yield Text("faint", x, top - 8, f"limit {format_bytes(cluster.memory)}", "end")


def _points(found: Found, top: float) -> Iterator[Shape]:
    """Step time upwards against the memory of the fullest rank, for all that were simulated."""
    best, cluster, fastest = found.best[0], found.cluster, min(e.step for e in found.best)
    shown = [x for x in found.outcomes if x.parts and x.seconds and x.n_bytes]
    shown = [x for x in shown if (x.seconds or 0.0) < _CUT * fastest]
    most = 1.05 * max(cluster.memory, *(min(x.n_bytes or 0.0, 2 * cluster.memory) for x in shown))
    slowest, bottom = 1.05 * max(x.seconds or 0.0 for x in shown), top + _PLOT
    x_limit = _x(cluster.memory, most)

    def y_of(seconds: float) -> float:
        return bottom - seconds / slowest * _PLOT

    yield Lines("axis", [[(LEFT, top), (LEFT, bottom), (WIDTH - RIGHT, bottom)]])
    for value in _ticks(most / 1e9):
        x = _x(float(value) * 1e9, most)
        yield Lines("axis", [[(x, bottom), (x, bottom + 4)]])
        yield Text("faint", x, bottom + 17, format_bytes(float(value) * 1e9), "middle")
    for value in _ticks(slowest):
        yield Text("faint", LEFT - 8, y_of(float(value)) + 4, format_time(float(value), "s"), "end")
    yield Text("faint", LEFT, top - 8, "time of a step; filled: within the margin")
    yield Text("faint", WIDTH - RIGHT, bottom + 36, "memory of the fullest rank", "end")
    yield Lines("front", [[(x_limit, top), (x_limit, bottom)]])
    for one in sorted(shown, key=lambda x: x.fate is Fate.KEPT):
        x = _x(min(one.n_bytes or 0.0, most), most)
        why = reason(one, found)
        about = f"{estimate_words(one.run)}: {format_time(one.seconds, 's')}, {why}"
        yield Dot("on" if one.fate is Fate.KEPT else "off", x, y_of(one.seconds or 0.0), 3, about)
    x = _x(best.memory[best.fullest].total, most)
    yield Text("", x, y_of(best.step) + 16, f"the answer, MFU {percent(best.mfu)}", "end")


def _ticks(highest: float) -> list[Fraction]:
    total = Fraction(highest).limit_denominator(10**6)
    return marks(total, next(steps(total, 8)))
