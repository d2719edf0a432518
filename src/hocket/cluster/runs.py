"""Measured runs from a TOML file, for `calibrate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from hocket.cluster.calibrate import Measured
from hocket.cluster.estimate import schedule_for, usual_stages
from hocket.cluster.hardware import cluster_of, load_cluster
from hocket.cluster.model import load_model
from hocket.cluster.run import Run, raise_faults
from hocket.cluster.tables import load_toml, required
from hocket.errors import UsageError
from hocket.words import hint, named

_WHERE = ("model", "gpu", "gpus", "cluster")
_STEP = "step_s"
_KEYS = (*_WHERE, _STEP, *(f.name for f in fields(Run)))


def load_runs(path: str | Path) -> tuple[Measured, ...]:
    """The measured runs of a TOML file: tables `[[run]]`; keys above them hold for all runs.

    ```
    model = "llama3-70b"        # as --model takes it
    gpu = "h100"                # or cluster = "mine.toml"
    gpus = 64
    seq = 8192                  # and every other field of a Run
    tp = 8
    [[run]]
    pp = 4
    micro_batch = 1
    global_batch = 64
    step_s = 9.31               # seconds of one step
    ```

    Sequence parallelism is on where tp is above 1 and `sp` is left out.

    Raises: UsageError with the file and the number of the run, from 1.
    """
    shared = load_toml(path)
    tables = shared.pop("run", None)
    if not isinstance(tables, list) or not tables:
        raise UsageError(f"{path}: there is no [[run]]; give at least one, five are enough")
    result = []
    for number, table in enumerate(tables, 1):
        where = f"{path}: run {number}"
        if not isinstance(table, Mapping):
            raise UsageError(f"{where} is {table!r}; it must be a table [[run]]")
        try:
            result.append(_measured({**shared, **table}))
        except UsageError as error:
            raise UsageError("\n".join(f"{where}: {x}" for x in str(error).splitlines())) from None
    return tuple(result)


def _measured(entry: Mapping[str, Any]) -> Measured:
    unknown = next((key for key in entry if key not in _KEYS), None)
    if unknown is not None:
        raise UsageError(f"{unknown} is not a known key; {hint(unknown, _KEYS)}")
    for key, (suits, what) in _VALUES.items():
        if key in entry and not suits(entry[key]):
            raise UsageError(f"{key} is {entry[key]!r}; it must be {what}")
    for keys in (("model",), ("gpu", "cluster"), ("gpus", "cluster"), (_STEP,)):
        if not any(key in entry for key in keys):
            raise UsageError(f"{' or '.join(keys)} is missing")
    model = load_model(entry["model"])
    cluster = (
        load_cluster(entry["cluster"])
        if "cluster" in entry
        else cluster_of(entry["gpu"], entry["gpus"])
    )
    run = _run({k: v for k, v in entry.items() if k not in (*_WHERE, _STEP)})
    raise_faults(model, cluster, run)
    schedule_for(run, cluster)
    return Measured(model, cluster, (run,), float(entry[_STEP]))


def _run(entry: dict[str, Any]) -> Run:
    name, options = named(entry.pop("schedule", "1f1b"))
    values = {"sp": entry.get("tp", 1) != 1, **entry, "schedule": name}
    values["options"] = tuple({**options, **entry.get("options", {})}.items())
    values = required(values, Run, "a run")
    if "v" not in values:
        values["v"] = usual_stages(name, values.get("pp", 1), values["options"])
    return Run(**values)


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_step(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (_is_text, "a name or a file"),
    "gpu": (_is_text, "a name"),
    "gpus": (_is_whole, "a whole number"),
    "cluster": (_is_text, "a file"),
    "schedule": (_is_text, "a name"),
    "options": (lambda x: isinstance(x, dict), "a table"),
    "recompute": (lambda x: isinstance(x, list) and all(map(_is_text, x)), "a list of parts"),
    "recompute_layers": (
        lambda x: _is_whole(x) or (isinstance(x, list) and all(map(_is_whole, x))),
        "a whole number, or a list of them",
    ),
    "split": (lambda x: isinstance(x, list) and all(map(_is_whole, x)), "a list of whole numbers"),
    "lighter": (
        lambda x: isinstance(x, list) and len(x) == 2 and all(map(_is_whole, x)),
        "two whole numbers",
    ),
    _STEP: (_is_step, "the seconds of one step, above 0"),
}  # what `required` does not test
