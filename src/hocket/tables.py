"""Times and tables as plain text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from numbers import Rational
from typing import Any

_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?( ?%| \S+)?|-|")
_DIGITS = 7  # more significant digits than this are cut to 4


def format_time(value: Any, unit: str = "") -> str:
    """A time as short text, exact where that takes at most 7 digits: 33, 28.5, 0.3333.

    Whole numbers are always exact; elsewhere 4 significant digits, never fewer than the whole
    part has. The unit follows after a space: `28.5 us`.
    """
    text = _whole(value) or _decimal(value) or _rounded(value)
    return f"{text} {unit}" if unit else text


def _whole(value: Any) -> str | None:
    if isinstance(value, Rational):
        return str(int(value)) if value.denominator == 1 else None
    if math.isfinite(value):
        return f"{value:.0f}" if value == int(value) and abs(value) < 1e15 else None
    return str(float(value))


def _decimal(value: Any) -> str | None:
    """The exact decimal expansion, if it is short."""
    text = f"{float(value):.{_DIGITS}g}" if abs(value) < 10**_DIGITS else ""
    if not text or "e" in text:
        return None
    same = Fraction(text) == value if isinstance(value, Rational) else float(text) == value
    return text if same else None


def _rounded(value: Any) -> str:
    if 1000 <= abs(value) < 1e15:
        return str(round(value))
    return f"{float(value):.4g}"


def table(
    rows: Iterable[Mapping[str, Any] | Sequence[Any]], columns: Sequence[str] | Mapping[str, str]
) -> str:
    """Rows under their headings, aligned; columns of numbers to the right, others to the left.

    `columns` are the headings, or headings by key. A row is a mapping from column to value, or
    the values in column order. Numbers are printed by `format_time`, None as "-", strings as they
    are; a string such as "33 us" or "27.3%" counts as a number. No trailing spaces.
    """
    keys = list(columns)
    heads = list(columns.values()) if isinstance(columns, Mapping) else keys
    cells = [[_cell(x) for x in _values(row, keys)] for row in rows]
    right = [all(_NUMBER.fullmatch(row[i]) for row in cells) for i in range(len(keys))]
    lines = [heads, *cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(keys))]
    return "\n".join(
        "  ".join(
            x.rjust(w) if r else x.ljust(w) for x, w, r in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def _values(row: Mapping[str, Any] | Sequence[Any], keys: list[str]) -> list[Any]:
    if isinstance(row, Mapping):
        return [row.get(key) for key in keys]
    if len(row) != len(keys):
        raise ValueError(f"a row has {len(row)} values, but the table has {len(keys)} columns")
    return list(row)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else format_time(value)
