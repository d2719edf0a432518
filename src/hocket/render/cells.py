"""Character cells of the terminal grid: labels of tiles, colours, rows as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from hocket.deps import ROWS, Kind
from hocket.ir import Action
from hocket.render.tiles import Part

# Background and foreground (256 colours) by kind and shade; the shades of a kind differ in light.
PAINTS: dict[tuple[Kind, int], str] = {
    (kind, i): shade.ansi
    for kind, row in ROWS.items()
    if row.work
    for i, shade in enumerate(row.look.shades)
}
MESSAGE_PAINT = ROWS[Kind.SEND_F].look.shades[0].ansi
IDLE_PAINT = "38;5;244"
FUSED_PAINT = "48;5;28;38;5;25"  # for a half block: forward's colour beside backward's


class Marks(NamedTuple):
    """The characters that are not labels."""

    idle: str
    side: str
    corners: str
    line: str
    tick: str
    half: str


UNICODE = Marks("·", "│", "└┘", "─", "┬", "▌")
ASCII = Marks(".", "|", "++", "-", "+", "&")


class Style(NamedTuple):
    """How a tile is labelled.

    letters: letters distinguish kinds (colours where not). own_row: letters have a row above
    the numbers. upright: numbers are written downwards, so that a tile needs one column.
    gap: blank columns after a label.
    """

    letters: bool
    own_row: bool
    upright: bool
    gap: int

    def rows(self, digits: int) -> int:
        """Lines that a queue takes when the longest number has `digits` digits."""
        return (digits if self.upright else 1) + self.own_row


PLAIN_STYLES = (
    Style(True, False, False, 1),
    Style(True, False, False, 0),
    Style(True, True, False, 0),
    Style(True, True, True, 0),
)
COLOUR_STYLES = (
    Style(False, False, False, 1),
    Style(False, False, False, 0),
    Style(False, False, True, 0),
)


def letter(action: Action, shade: int) -> str:
    """F, B, I or W; lower case for shade 1."""
    return action.kind.name.lower() if shade else action.kind.name


def block(part: Part, style: Style, rows: int) -> list[str]:
    """The label of one action as `rows` lines of equal length."""
    action, shade = part
    numbers = list(str(action.mb)) if style.upright else [str(action.mb)]
    lines = [letter(action, shade), *numbers] if style.own_row else numbers
    if style.letters and not style.own_row:
        lines = [letter(action, shade) + lines[0]]
    width = max(map(len, lines))
    return [line.ljust(width) for line in lines + [""] * (rows - len(lines))]


class Row:
    """The cells of one queue: lines of characters, and the paints that they share.

    bare: only the first line is painted.
    """

    def __init__(self, columns: int, rows: int, marks: Marks, *, bare: bool = False) -> None:
        self.bare = bare
        blank = [" "] * columns
        self.lines = [[marks.idle] * columns, *(list(blank) for _ in range(rows - 1))]
        self.paints = [IDLE_PAINT] * columns

    def put(self, start: int, texts: Sequence[str], paint: str) -> None:
        """Writes lines of equal length from a column on."""
        stop = start + len(texts[0])
        for line, text in zip(self.lines, texts, strict=True):
            line[start:stop] = text
        self.paints[start:stop] = [paint] * (stop - start)

    def tile(self, start: int, stop: int, parts: Sequence[Part], style: Style) -> None:
        """Draws a tile of work; where its label has no room, the kind's letter or nothing."""
        rows = len(self.lines)
        width = stop - start
        blocks = [block(p, style, rows) for p in parts]
        lengths = [len(b[0]) for b in blocks]
        if sum(lengths) + len(parts) - 1 > width:
            names = "+".join(letter(*p) for p in parts) if style.letters else ""
            short = names if len(names) <= width else names[:1]
            paint = paint_of(parts[0])
            self.put(start, [short.ljust(width), *[" " * width] * (rows - 1)], paint)
            return
        for part, lines, extra in zip(
            parts, blocks, self._extra(lengths, width, style), strict=True
        ):
            last = part is parts[-1]
            texts = [x.ljust(len(x) + extra) + ("" if last else "+ "[i > 0]) for i, x in
                     enumerate(lines)]  # fmt: skip
            bold = "1;" if style.gap == 0 and part[0].mb % 2 else ""
            self.put(start, texts, bold + paint_of(part))
            start += len(texts[0])

    @staticmethod
    def _extra(lengths: list[int], width: int, style: Style) -> list[int]:
        """Blank columns after each part's label: shared out in colour, else all at the end."""
        n = len(lengths)
        spare = width - sum(lengths) - (n - 1)
        share = 0 if style.letters else spare // n
        return [share] * (n - 1) + [spare - share * (n - 1)]

    def message(self, start: int, stop: int, label: str) -> None:
        """Draws a stretch of sending or receiving."""
        text = (label if len(label) <= stop - start else "").ljust(stop - start, "-")
        blanks = [" " * (stop - start)] * (len(self.lines) - 1)
        self.put(start, [text, *blanks], MESSAGE_PAINT)

    def text(self, colour: bool) -> list[str]:
        """The lines, with ANSI colours or without."""
        if not colour:
            return ["".join(line) for line in self.lines]
        return [
            "".join(line) if self.bare and i else _painted(line, self.paints)
            for i, line in enumerate(self.lines)
        ]


def paint_of(part: Part) -> str:
    """The colours of an action."""
    action, shade = part
    return PAINTS[action.kind, shade] if action.kind in COLOURED else MESSAGE_PAINT


COLOURED = frozenset(kind for kind, _ in PAINTS)


def painted(text: str, paint: str) -> str:
    """Text in a colour."""
    return f"\x1b[{paint}m{text}\x1b[0m"


def _painted(line: list[str], paints: list[str]) -> str:
    runs = groupby(zip(paints, line, strict=True), key=lambda cell: cell[0])
    return "".join(painted("".join(c for _, c in cells), paint) for paint, cells in runs)
