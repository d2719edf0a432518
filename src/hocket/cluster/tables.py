"""TOML tables and the catalogues: entries by name, and one sentence for each mistake."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from hocket.errors import UsageError
from hocket.files import read_text

_T = TypeVar("_T")
_PLAIN = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def hashed_once(kind: type[_T]) -> type[_T]:
    """The frozen dataclass, which computes its hash once: its values are the keys of caches."""
    whole = kind.__hash__

    def __hash__(self: Any) -> int:
        known = self.__dict__.get("_hash")
        if known is None:
            known = whole(self)
            object.__setattr__(self, "_hash", known)
        return known

    setattr(kind, "__hash__", __hash__)  # noqa: B010 (the type checker forbids an assignment)
    return kind


def load_toml(path: str | Path) -> dict[str, Any]:
    """The content of a TOML file. Raises: UsageError."""
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: this is not TOML: {error}") from None


@cache
def catalogue(kind: str) -> dict[str, Any]:
    """Every entry of a catalogue ("models", "gpus", "stacks", "keys") that ships, by name."""
    folder = resources.files("hocket.cluster") / "data" / kind
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return {f.name.removesuffix(".toml"): tomllib.loads(f.read_text("utf-8")) for f in files}


def catalogue_entry(kind: str, name: str, what: str) -> dict[str, Any]:
    """One entry of a catalogue. Raises: UsageError with the nearest names."""
    entries = catalogue(kind)
    if name in entries:
        return entries[name]
    lower = {x.lower(): x for x in entries}
    if name.lower() in lower:
        return entries[lower[name.lower()]]
    near = difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(lower[x] for x in near)}?" if near else "use a TOML file, or"
    rest = "" if near else f" one of {', '.join(entries)}"
    raise UsageError(f"there is no {what} named {name!r}; {hint}{rest}")


def known_keys(entry: Mapping[str, Any], kind: Any, where: str) -> None:
    """Raises: UsageError for a key that the dataclass does not have."""
    names = [f.name for f in fields(kind)]
    for key in entry:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
            raise UsageError(f"{where}: {key} is not a known key; {hint}")


def required(entry: Mapping[str, Any], kind: Any, where: str) -> dict[str, Any]:
    """The values of a dataclass, tested for presence and type.

    Raises: UsageError for a value that is missing or of the wrong type.
    """
    hints = get_type_hints(kind)
    values = dict(entry)
    for f in fields(kind):
        if f.name not in values:
            if f.default is MISSING and f.default_factory is MISSING:
                raise UsageError(f"{where}: {f.name} is missing")
            continue
        values[f.name] = _typed(values[f.name], hints[f.name], f"{where}: {f.name}")
    return values


def _typed(value: Any, kind: Any, where: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if kind in _PLAIN and type(value) is not kind:
        raise UsageError(f"{where} is {value!r}; it must be {_PLAIN[kind]}")
    return tuple(value) if isinstance(value, list) else value
