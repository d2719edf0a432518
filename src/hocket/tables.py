"""Times and tables as plain text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from numbers import Rational
from typing import Any

_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?( ?%| \S+)?|-|")
_CLOCK = {"ns": Fraction(1, 10**9), "us": Fraction(1, 10**6), "ms": Fraction(1, 1000), "s": 1}
SECONDS: dict[str, Any] = {**_CLOCK, "µs": _CLOCK["us"]}
_MEMORY = {"B": Fraction(1), **{f"{x}B": Fraction(1000) ** n for n, x in enumerate("kMGT", 1)}}
SIZES = _MEMORY | {f"{x}iB": Fraction(1024) ** n for n, x in enumerate("KMGT", 1)}
_DIGITS = 7  # more significant digits than this are cut to 4


def format_time(value: Any, unit: str = "") -> str:
    """A time as short text: in a real unit for people, `7.49 s`, `157 ms`; else as a number.

    A number without a unit is exact where that takes at most 7 digits: 33, 28.5, 0.3333. Whole
    ones are always exact; elsewhere 4 significant digits, never fewer than the whole part has.
    """
    if unit in SECONDS:
        return _for_people(value, SECONDS[unit], _CLOCK)
    text = _whole(value) or _decimal(value) or _rounded(value)
    return f"{text} {unit}" if unit else text


def format_bytes(value: Any, unit: str = "B") -> str:
    """An amount of memory for people: `35.1 GB`."""
    return _for_people(value, SIZES[unit], _MEMORY)


def _for_people(value: Any, scale: Any, units: Mapping[str, Any]) -> str:
    """Three significant digits in the smallest unit that needs no more than three places."""
    if not value:
        return f"0 {next(n for n, u in units.items() if u >= scale)}"
    name, one = next(
        ((n, u) for n, u in units.items() if abs(value) * (scale / u) < 999.5), [*units.items()][-1]
    )
    amount = float(value) * float(scale / one)
    return f"{amount:.3g} {name}" if abs(amount) < 999.5 else f"{_rounded(amount)} {name}"


def in_one_unit(
    rows: Sequence[dict[str, Any]], columns: Sequence[str], unit: str
) -> tuple[list[dict[str, Any]], str]:
    """Rows whose times in these columns are texts in one unit for all, and that unit.

    As many decimals for all as give the largest 4 significant digits; without a real unit the rows
    stay as they are.
    """
    times = [x for row in rows for c in columns if isinstance(x := row.get(c), Rational | float)]
    largest = max((abs(float(x)) for x in times), default=0.0)
    if unit not in SECONDS or not largest:
        return list(rows), unit
    name = next((n for n, u in _CLOCK.items() if largest * SECONDS[unit] / u < 1000), "s")
    factor = Fraction(SECONDS[unit]) / Fraction(_CLOCK[name])
    whole = all(x * factor == int(x * factor) for x in times)
    decimals = 0 if whole else max(0, 3 - math.floor(math.log10(largest * float(factor))))

    def text(x: Any) -> Any:
        return f"{float(x * factor):.{decimals}f}" if isinstance(x, Rational | float) else x

    return [{k: text(x) if k in columns else x for k, x in row.items()} for row in rows], name


def plain(value: Any) -> Any:
    """A number that JSON knows: fractions as floats."""
    return float(value) if isinstance(value, Fraction) else value


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
