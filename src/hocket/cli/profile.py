"""`hocket profile`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from hocket import files
from hocket.cli.arguments import Verb, option, part
from hocket.cli.output import check_writable
from hocket.cli.selection import Selection
from hocket.cli.training import Training, everywhere
from hocket.train.settings import Order


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `hocket profile` takes."""

    selection: Selection = part(Selection)
    training: Training = part(Training)
    backward: str = option(
        "--backward", "both: the order with full backwards and with split ones, step by step in "
        "turn; holds the model twice. own: as the schedule has them (default: both)",
        of=("both", "own"), default="both",
    )  # fmt: skip
    output: str | None = option("--output FILE", "where (default: costs.toml); also -o FILE")
    json: bool = False


def run(options: Options) -> int:
    """Measures, and writes the costs."""
    from hocket.train.work import both_ways, measure

    selection, named = options.selection.apart(options.output)
    path, schedule = named or "costs.toml", selection.build()
    check_writable(path)
    settings = options.training.settings([Order(selection.schedule, schedule)], 10)
    if options.backward == "both":
        settings = replace(settings, orders=both_ways(schedule))

    def show(result: dict[str, Any]) -> None:
        files.write(path, result["toml"])
        text = f"{result['text']}\n\nwritten: {path}; use it with --costs {path}"
        print(json.dumps(result | {"output": path}) if options.json else text)

    return everywhere(measure, settings, show, quiet=options.json)


VERB = Verb("profile", Options, run)
