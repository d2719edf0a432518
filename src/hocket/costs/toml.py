"""`costs.toml`: reading with every fault in one run, writing, and the built-in profiles."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hocket.costs.model import Bytes, Costs, Cycle
from hocket.errors import CostError, UsageError
from hocket.files import read_text

_PROFILES = Path(__file__).parent / "profiles"
_KEYS = {f.name for f in fields(Costs)}
_HELD = "held_between_I_and_W"
_BYTES = {f.name for f in fields(Bytes)} - {"held"} | {_HELD}
FORMER = {"lane": "p2p_overhead", "share": "slowdown", "copying": "comm_cpu"}


def profiles() -> list[str]:
    """The names of the built-in cost profiles."""
    return sorted(file.stem for file in _PROFILES.glob("*.toml"))


def load_costs(path: str | Path) -> Costs:
    """Costs from a `costs.toml` (the format is in docs/format.md), or a built-in profile by name.

    Raises: CostError with a line for every fault: the file, the key and what it must be.
    """
    import tomllib

    if str(path) in profiles() and not Path(path).exists():
        path = _PROFILES / f"{path}.toml"
    try:
        data = tomllib.loads(read_text(path))
    except UsageError as error:
        known = "" if Path(path).suffix else f"; built-in profiles: {', '.join(profiles())}"
        raise CostError(f"{error}{known}") from None
    except (ValueError, RecursionError) as error:  # also digits and brackets by the thousand
        raise CostError(f"{path}: not TOML: {error}") from None
    try:
        return costs_from(data)
    except CostError as error:
        raise CostError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None


def costs_from(data: Mapping[str, Any]) -> Costs:
    """Costs from the plain data of a `costs.toml`; without `per` they do not say what they are per.

    Raises: CostError with a line for every fault.
    """
    faults: list[str] = []
    data = dict(data)
    for former, name in FORMER.items():
        if former in data and name in data:
            faults.append(f"{former} and {name} are both given; {former} is the former name")
        if former in data:
            data[name] = data.pop(former)
    values: dict[str, Any] = {"per": None} | _known("key", data, _KEYS, faults)
    overhead = values.get("p2p_overhead")
    if isinstance(overhead, Mapping):
        ends = _known("key of p2p_overhead", overhead, {"recv", "send"}, faults)
        values["p2p_overhead"] = (ends.get("recv", 0), ends.get("send", 0))
    elif overhead is not None:
        faults.append(f"p2p_overhead is {overhead!r}; it must be {{ recv = x, send = y }}")
        del values["p2p_overhead"]
    sizes = values.pop("bytes", {})
    if isinstance(sizes, Mapping):
        sizes = _known("key of bytes", sizes, _BYTES, faults)
        if _HELD in sizes:
            sizes["held"] = sizes.pop(_HELD)
        values["bytes"] = _made(Bytes, sizes, faults)
    else:
        faults.append(f"bytes is {sizes!r}; it must be a table [bytes]")
    costs = _made(Costs, values, faults)
    if faults or costs is None:
        raise CostError("\n".join(faults))
    return costs


def _made(kind: Any, values: Mapping[str, Any], faults: list[str]) -> Any:
    """The value; None where it has faults, which are added to those."""
    try:
        return kind(**{key: value for key, value in values.items() if key != "bytes" or value})
    except CostError as error:
        faults += str(error).splitlines()
        return None


def _value(given: Any) -> Any:
    """A list as a tuple, `{ cycle = [...] }` as a Cycle, anything else as it is."""
    if isinstance(given, Mapping) and set(given) == {"cycle"} and isinstance(given["cycle"], list):
        return Cycle(given["cycle"])
    return tuple(given) if isinstance(given, list) else given


def _known(
    what: str, data: Mapping[str, Any], known: Iterable[str], faults: list[str]
) -> dict[str, Any]:
    """The values of known keys; the others are faults."""
    names = ", ".join(sorted(known))
    faults += [f"unknown {what} {x!r}; known are {names}" for x in sorted(set(data) - set(known))]
    return {key: _value(value) for key, value in data.items() if key in known}


def costs_toml(costs: Costs, comments: Sequence[str] = ()) -> str:
    """Costs as the text of a `costs.toml`, comments above; floats to six digits.

    What is as it would be if left out is left out.
    """
    lines = [f"# {line}".rstrip() for line in comments]
    first = {"unit": "", "per": None, "F": None, "I": None, "W": None}
    lines += _entries(costs, first, skip="bytes")
    sizes = _entries(costs.bytes, {})
    lines += ["", "[bytes]", *sizes] if sizes else []
    return "\n".join(lines) + "\n"


def _entries(costs: Costs | Bytes, first: Mapping[str, Any], skip: str = "") -> list[str]:
    """`key = value` of each field that is not its default; `first`: order, and other defaults."""
    defaults = {**first, **{f.name: f.default for f in fields(costs) if f.name not in first}}
    return [
        f"{_HELD if key == 'held' else key} = {_toml(key, getattr(costs, key))}"
        for key, default in defaults.items()
        if key != skip and getattr(costs, key) != default
    ]


def _toml(key: str, value: Any) -> str:
    if key == "p2p_overhead":
        value = {"recv": value[0], "send": value[1]}
    if isinstance(value, Cycle):
        value = {"cycle": tuple(value)}
    if isinstance(value, Mapping):
        inside = ", ".join(f"{name} = {_toml(name, x)}" for name, x in value.items())
        return f"{{ {inside} }}"
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(key, x) for x in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # whose escapes are TOML's
    return str(value) if isinstance(value, int) else repr(float(f"{float(value):.6g}"))
