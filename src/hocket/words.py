"""Words that people write, as values: numbers, ranges, sizes, options, names of schedules.

The command line and the form of the page read their words here and nowhere else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

from hocket.errors import UsageError

Number = int | float

_WORDS = {"true": True, "false": False, "none": None}
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_SIZE = re.compile(r"(.*?) ?(?:([kMGTP])(i?))?B?", re.I)
_MOST = 10_000  # numbers that one word may stand for


def hint(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """The known words that look like this one, whatever the case of its letters; else all."""
    lower = {name.lower(): name for name in known}
    near = [word.lower()] if word.lower() in lower else get_close_matches(word.lower(), lower)
    close = [lower[name] for name in near]
    if close:
        return f"did you mean {' or '.join(close)}?"
    return otherwise or f"choose from {', '.join(lower.values())}"


def value(text: str) -> Any:
    """A number, true, false or none where the text reads so; else the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for read in (int, float):
        try:
            number = read(text)
        except ValueError:
            continue
        return number if math.isfinite(number) else text
    return text


def settings(words: Iterable[str]) -> dict[str, Any]:
    """Words such as `group=4` as names and values.

    Raises: UsageError for a word without `=`, or a name that occurs twice.
    """
    out: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UsageError(f"expected key=value, found {word!r}")
        if key in out:
            raise UsageError(f"{key} is given twice: {out[key]} and {text}")
        out[key] = value(text)
    return out


def named(word: str, more: Iterable[str] = ()) -> tuple[str, dict[str, Any]]:
    """Name and options of `interleaved:v=4,group=8`, `module:function`, or both.

    more: further words `key=value`. Raises: UsageError.
    """
    name, _, rest = word.partition(":")
    first, _, last = rest.partition(":")
    if first and "=" not in first:
        name, rest = f"{name}:{first}", last
    return name, settings([*filter(None, rest.split(",")), *more])


def whole(text: str) -> int:
    """A whole number. Raises: UsageError."""
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"expected a whole number, found {text!r}") from None


def number(text: str) -> Number:
    """A finite number, an int where it is whole. Raises: UsageError."""
    try:
        found = float(text)
        return int(found) if found == int(found) else found
    except (ValueError, OverflowError):
        raise UsageError(f"expected a number, found {text!r}") from None


def size(text: str) -> Number:
    """A number, also with a unit of bytes: 80e9, 80GB, 80 GiB. Raises: UsageError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or not match[2]:
        return number(text)
    base = 1024 if match[3] else 1000
    return number(match[1]) * base ** (1 + "kmgtp".index(match[2].lower()))


def numbers(text: str, read: Callable[[str], Number] = number) -> tuple[Number, ...]:
    """`4` or `4,3,2,1` as numbers; `read` reads each. Raises: UsageError."""
    try:
        return tuple(read(part) for part in text.split(","))
    except UsageError:
        raise UsageError(f"expected a number or a comma-separated list, found {text!r}") from None


def sizes(text: str) -> tuple[Number, ...]:
    """`80GB` or `80GiB,40e9` as numbers of bytes. Raises: UsageError."""
    return numbers(text, size)


def ranges(text: str) -> tuple[range, ...]:
    """`0-3,8` as ranges. Raises: UsageError."""
    out = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"expected whole numbers such as 4, 0-3 or 0-3,8, found {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"{part} has no numbers; give the smaller one first")
        out.append(range(first, last + 1))
    return tuple(out)


def wholes(text: str) -> tuple[int, ...]:
    """`4,8` or `2-4` as numbers. Raises: UsageError."""
    found = ranges(text)
    if sum(part.stop - part.start for part in found) > _MOST:
        raise UsageError(f"{text} are more than {_MOST:,} numbers")
    return tuple(n for part in found for n in part)


def below(found: Iterable[range], end: int, what: str) -> list[int]:
    """The numbers of ranges that lie below an end. Raises: UsageError."""
    for part in found:
        if part.stop > end:
            name = f"{part.start}-{part[-1]}" if len(part) > 1 else f"{part.start}"
            raise UsageError(f"there are no {what} {name} (they are 0 to {end - 1}, rising)")
    return [n for part in found for n in part]


def options_text(text: str) -> dict[str, Any]:
    """Options as one text: `group=4 limit=2`, also with commas. Raises: UsageError."""
    return settings(text.replace(",", " ").split())
