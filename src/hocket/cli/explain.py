"""`hocket explain`: where the bubble is, why, and what would help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hocket.cli.arguments import Verb, option, part
from hocket.cli.output import put_json
from hocket.cli.selection import Selection, costs_of, costs_option
from hocket.words import size


def memory_option(use: str) -> Any:
    """The field of --memory, one limit for every rank; use: what it is for."""
    text = "bytes per rank, in the unit of the costs (without bytes there: microbatches in flight)"
    return option("--memory LIMIT", f"{text}, {use}", read=size)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Those of `hocket explain`."""

    selection: Selection = part(Selection)
    costs: str | None = costs_option()
    memory: float | None = memory_option(
        "that another schedule has to keep (default: what this one takes)"
    )
    alone: bool = option("--alone", "do not try the other registered schedules")
    json: bool = False


def run(options: Options) -> int:
    """Prints the explanation."""
    from hocket.explanation import explain
    from hocket.simulator import simulate

    schedule, costs = options.selection.build(), costs_of(options.costs)
    explanation = explain(
        simulate(schedule, costs), costs, limit=options.memory, others=not options.alone
    )
    if options.json:
        put_json(explanation.as_json())
    else:
        print(explanation)
    return 0


VERB = Verb("explain", "where the bubble is, why, what would help", Options, run)
