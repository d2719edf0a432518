"""SVG of figures, for READMEs and papers: rects with classes, selectable numbers, no script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import singledispatch
from itertools import groupby
from xml.sax.saxutils import escape

from hocket.render.figure import (
    DARK,
    DARK_GROUND,
    DASHED,
    FILLS,
    FONT,
    LIGHT,
    MARKS,
    TITLE,
    Bars,
    Box,
    Dot,
    Figure,
    Lines,
    Shape,
    Text,
    short,
)
from hocket.render.layout import figure
from hocket.timeline import Timeline


def svg(timeline: Timeline, *, title: str | None = None) -> str:
    """A timeline as an SVG document: time across, a lane for each queue, ranks down.

    Tiles are rects with the class of their kind (F, B, I, W, M for messages; `x` for a rank's
    other stage), so that a page may restyle them; numbers are text. A fused slot is a tile of
    layers. The lines around the tiles follow the reader's light or dark scheme (no background in
    the light one), and the picture shrinks with its page. Above 5000 tiles each queue and kind is
    one path, without numbers. `title` stands above; left out, it is name and size, "" leaves none.
    """
    return as_svg(figure(timeline, title))


def as_svg(drawn: Figure) -> str:
    """A figure as an SVG document."""
    width, height = short(drawn.width), short(drawn.height)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="hocket" {size} role="img">',
            f"<title>{_xml(drawn.title)}</title>",
            f"<style>\n{_css(drawn)}\n</style>",
            *_elements(drawn.shapes),
            "</svg>\n",
        ]
    )


def _elements(shapes: Sequence[Shape]) -> Iterator[str]:
    """One element a shape; texts that follow each other share what they can."""
    for common, run in groupby(shapes, key=_common):
        elements = list(map(_element, run))
        if not common:
            yield from elements
        elif len(elements) == 1:
            yield f"<text{common}{elements[0].removeprefix('<text')}"
        else:
            yield from (f"<g{common}>", *elements, "</g>")


def _common(shape: Shape) -> str:
    """What texts in a row may have in common: anchor and size."""
    if not isinstance(shape, Text) or shape.css == "title":
        return ""
    anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
    return anchor + ("" if shape.size == FONT else f' font-size="{short(shape.size)}"')


@singledispatch
def _element(shape: Shape) -> str:
    raise TypeError(shape)


@_element.register
def _box(shape: Box) -> str:
    at, size = _at(shape.x, shape.y), f'width="{short(shape.width)}" height="{short(shape.height)}"'
    return f'<rect class="{shape.css}" {at} {size}/>'


@_element.register
def _bars(shape: Bars) -> str:
    """Horizontal strokes from each start to its end, by relative moves of whole hundredths."""
    path, at = [f"M0 {short(shape.y)}"], 0
    for start, end in shape.runs:
        a, b = round(start * 100), round(end * 100)
        path.append(f"m{short((a - at) / 100)} 0h{short((b - a) / 100)}")
        at = b
    thick = short(shape.height)
    return f'<path class="{shape.css}" stroke-width="{thick}" d="{"".join(path)}"/>'


@_element.register
def _lines(shape: Lines) -> str:
    return f'<path class="{shape.css}" d="{"".join(map(_polyline, shape.paths))}"/>'


def _polyline(points: Sequence[tuple[float, float]]) -> str:
    (x, y), *others = points
    out = [f"M{short(x)} {short(y)}"]
    for to_x, to_y in others:
        level, upright = to_y == y, to_x == x
        if level or upright:
            out.append(f"H{short(to_x)}" if level else f"V{short(to_y)}")
        else:
            out.append(f"L{short(to_x)} {short(to_y)}")
        x, y = to_x, to_y
    return "".join(out)


@_element.register
def _dot(shape: Dot) -> str:
    at = f'cx="{short(shape.x)}" cy="{short(shape.y)}" r="{short(shape.radius)}"'
    return f'<circle class="{shape.css}" {at}><title>{_xml(shape.about)}</title></circle>'


@_element.register
def _text(shape: Text) -> str:
    css = f' class="{shape.css}"' if shape.css else ""
    return f"<text{css} {_at(shape.x, shape.y)}>{_xml(shape.text)}</text>"


def _at(x: float, y: float) -> str:
    return f'x="{short(x)}" y="{short(y)}"'


# --- style ----------------------------------------------------------------------------------


def _css(drawn: Figure) -> str:
    """The style sheet: every rule inside `.hocket`, so that a page may hold several pictures."""
    return "\n".join(
        [
            f".hocket{{font:{short(FONT)}px Inter,'Helvetica Neue',Helvetica,Arial,sans-serif;"
            "max-width:100%;height:auto}",
            f".hocket .title{{font-size:{short(TITLE)}px;font-weight:600}}",
            ".hocket path{fill:none}",
            _scheme(LIGHT),
            *filter(None, _kinds(drawn.shapes)),
            f"@media(prefers-color-scheme:dark){{.hocket{{background:{DARK_GROUND}}}"
            f"{_scheme(DARK)}}}",
        ]
    )


def _kinds(shapes: Sequence[Shape]) -> Iterator[str]:
    """The rules of the classes that are there."""
    used = {(type(shape), shape.css) for shape in shapes}
    for css, fill in {**{css: fill for css, (fill, _) in FILLS.items()}, **MARKS}.items():
        name = css.replace(" ", ".")
        rules = [
            (Box, f"rect.{name}{{fill:{fill}}}"),
            (Dot, f"circle.{name}{{fill:{fill}}}"),
            (Bars, f"path.{name}{{stroke:{fill}}}"),
            (Lines, f"path.{name}{{stroke:{fill}{_dashes(css)}}}"),
            (Text, f"text.{name}{{fill:{FILLS.get(css, ('', ''))[1]}}}"),
        ]
        yield "".join(f".hocket {rule}" for kind, rule in rules if (kind, css) in used)


def _dashes(css: str) -> str:
    dashes = DASHED.get(css)
    return f";stroke-width:1.5;stroke-dasharray:{dashes[0]} {dashes[1]}" if dashes else ""


def _scheme(colours: dict[str, str]) -> str:
    return (
        f".hocket text{{fill:{colours['ink']}}}"
        f".hocket .faint{{fill:{colours['faint']}}}"
        f".hocket .axis{{stroke:{colours['line']}}}"
        f".hocket rect.lane{{fill:{colours['lane']}}}"
    )


_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _xml(text: str) -> str:
    """Text as XML; characters that XML cannot hold become a replacement character."""
    return escape(_NOT_XML.sub("\ufffd", text))
