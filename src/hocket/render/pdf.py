"""PDF of figures: one page as large as the picture, real text in the reader's own Helvetica.

Source: ISO 32000-1, sections 7.5 (file), 8.5 (paths) and 9.4 (text).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from functools import singledispatch

from hocket.render.figure import (
    DASHED,
    FILLS,
    LIGHT,
    MARKS,
    Bars,
    Box,
    Dot,
    Figure,
    Lines,
    Shape,
    Text,
    short,
    text_width,
)
from hocket.render.layout import figure
from hocket.timeline import Timeline

POINT = 0.75  # points a pixel
ROUND = 0.5523  # where a quarter circle's control points lie, in radii
ENCODING = "cp1252"  # the fonts' letters


def pdf(timeline: Timeline, *, title: str | None = None) -> bytes:
    """A timeline as a PDF: the picture of `svg` in its light colours, without a background.

    Text can be selected and searched; letters outside Western European ones become `?`. The
    fonts are the reader's own: some venues ask for embedded ones, which need another tool.
    """
    return as_pdf(figure(timeline, title))


def as_pdf(drawn: Figure) -> bytes:
    """A figure as a PDF file; equal figures make equal files."""
    box = f"[0 0 {short(drawn.width * POINT)} {short(drawn.height * POINT)}]"
    content = zlib.compress(_content(drawn).encode(ENCODING), 9)
    fonts = "".join(f"/{name} {i} 0 R" for i, name in ((5, "F"), (6, "FB")))
    return _file(
        [
            b"<</Type/Catalog/Pages 2 0 R/Lang(en)/ViewerPreferences<</DisplayDocTitle true>>>>",
            b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
            f"<</Type/Page/Parent 2 0 R/MediaBox{box}/Contents 4 0 R"
            f"/Resources<</Font<<{fonts}>>>>>>".encode(),
            f"<</Length {len(content)}/Filter/FlateDecode>>\nstream\n".encode()
            + content + b"\nendstream",
            _font("Helvetica"),
            _font("Helvetica-Bold"),
            f"<</Title<{_hex(drawn.title)}>/Producer(hocket)>>".encode(),
        ]
    )  # fmt: skip


def _hex(text: str) -> str:
    return (b"\xfe\xff" + text.encode("utf-16-be", "replace")).hex()


def _font(name: str) -> bytes:
    return f"<</Type/Font/Subtype/Type1/BaseFont/{name}/Encoding/WinAnsiEncoding>>".encode()


def _file(objects: Sequence[bytes]) -> bytes:
    """Objects from 1 on; the first is the catalogue, the last the document's information."""
    out, places = bytearray(b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n"), []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start, count = len(out), len(objects) + 1
    out += b"xref\n0 %d\n0000000000 65535 f \n" % count
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    out += b"trailer\n<</Size %d/Root 1 0 R/Info %d 0 R>>\n" % (count, count - 1)
    return bytes(out + b"startxref\n%d\n%%%%EOF\n" % start)


# --- the page -------------------------------------------------------------------------------


def _content(drawn: Figure) -> str:
    """Operators in pixels, y upwards; a colour is set where it changes."""
    out, set_before = [f"{POINT} 0 0 {POINT} 0 0 cm"], ""
    for shape in drawn.shapes:
        colour = _colour(shape)
        if colour != set_before:
            out.append(set_before := colour)
        out.extend(_operators(shape, drawn.height))
    return "\n".join(out)


def _colour(shape: Shape) -> str:
    if isinstance(shape, Text):
        colour = FILLS[shape.css][1] if shape.css in FILLS else LIGHT.get(shape.css, LIGHT["ink"])
    elif isinstance(shape, Lines):
        return f"{_rgb(MARKS.get(shape.css, LIGHT['line']))} RG"
    else:
        colour = FILLS[shape.css][0] if shape.css in FILLS else (MARKS | LIGHT)[shape.css]
    return f"{_rgb(colour)} rg"


def _rgb(colour: str) -> str:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    return " ".join(f"{int(digits[i : i + 2], 16) / 255:.3g}" for i in (0, 2, 4))


@singledispatch
def _operators(shape: Shape, height: float) -> Iterator[str]:
    raise TypeError(shape)


@_operators.register
def _box(shape: Box, height: float) -> Iterator[str]:
    yield f"{_numbers(shape.x, height - shape.y - shape.height, shape.width, shape.height)} re f"


@_operators.register
def _bars(shape: Bars, height: float) -> Iterator[str]:
    bottom, high = short(height - shape.y - shape.height / 2), short(shape.height)
    for start, end in shape.runs:
        yield f"{short(start)} {bottom} {short(end - start)} {high} re"
    yield "f"


@_operators.register
def _lines(shape: Lines, height: float) -> Iterator[str]:
    dashes = DASHED.get(shape.css)
    yield f"[{_numbers(*dashes)}] 0 d 1.5 w" if dashes else "[] 0 d 1 w"
    for (x, y), *others in shape.paths:
        yield f"{_numbers(x, height - y)} m"
        for to_x, to_y in others:
            yield f"{_numbers(to_x, height - to_y)} l"
    yield "S"


@_operators.register
def _dot(shape: Dot, height: float) -> Iterator[str]:
    x, y, r = shape.x, height - shape.y, shape.radius
    k = r * ROUND
    yield f"{_numbers(x + r, y)} m"
    for a, b in ((1, 0), (0, 1), (-1, 0), (0, -1)):  # a quarter turn from (a, b) to (-b, a)
        yield (
            f"{_numbers(x + r * a - k * b, y + r * b + k * a)} "
            f"{_numbers(x - r * b + k * a, y + r * a + k * b, x - r * b, y + r * a)} c"
        )
    yield "f"


@_operators.register
def _text(shape: Text, height: float) -> Iterator[str]:
    text = shape.text.encode(ENCODING, "replace").decode(ENCODING)
    back = {"start": 0.0, "middle": 0.5, "end": 1.0}[shape.anchor] * text_width(text, shape.size)
    escaped = "".join(f"\\{c}" if c in "\\()" else " " if c < " " else c for c in text)
    font = "FB" if shape.css == "title" else "F"
    at = _numbers(shape.x - back, height - shape.y)
    yield f"BT /{font} {short(shape.size)} Tf {at} Td ({escaped}) Tj ET"


def _numbers(*values: float) -> str:
    return " ".join(map(short, values))
