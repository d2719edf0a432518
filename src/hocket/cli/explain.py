"""`hocket explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hocket.cli.arguments import Answer, Verb, option, part
from hocket.cli.selection import Selection, costs_of, costs_option
from hocket.words import size


def memory_option(use: str, **how: Any) -> Any:
    """The field of --memory, one limit for every rank; use: what it is for."""
    text = "memory per rank, such as 80GB (without bytes in the costs: microbatches in flight)"
    return option("--memory LIMIT", f"{text}, {use}", read=size, **how)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `hocket explain` takes."""

    selection: Selection = part(Selection)
    costs: str | None = costs_option()
    memory: float | None = memory_option(
        "that another schedule must keep (default: as this one)", without="--alone"
    )
    alone: bool = option("--alone", "do not try the other registered schedules")


def run(options: Options) -> Answer:
    """The explanation."""
    from hocket.explanation import explain
    from hocket.simulator import simulate

    costs = costs_of(options.costs)
    timeline = simulate(options.selection.build(), costs)
    limit = costs.bytes.amount(options.memory)
    explanation = explain(timeline, costs, limit=limit, others=not options.alone)
    return Answer(explanation, explanation.as_json)


VERB = Verb("explain", Options, run)
