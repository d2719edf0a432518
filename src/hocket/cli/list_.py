"""`hocket list`: every registered schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hocket.cli.arguments import Verb
from hocket.cli.output import put_json

if TYPE_CHECKING:
    from hocket.schedules import Entry


@dataclass(frozen=True, kw_only=True)
class Options:
    """Those of `hocket list`."""

    json: bool = False


def run(options: Options) -> int:
    """Prints the schedules, what each needs, its weights and source."""
    from hocket.schedules import entries

    if options.json:
        put_json({"schedules": [_data(entry) for entry in entries()]})
    else:
        print(*(line for entry in entries() for line in _lines(entry)), sep="\n")
    return 0


def _lines(entry: Entry) -> Iterator[str]:
    yield f"{entry.name}\n    {entry.summary}"
    options = "".join(f"; option {k} ({_default(d)})" for k, d in entry.options.items())
    yield f"    stages per rank: {_stages(entry)}; weights: {entry.weights}{options}"
    if entry.rules:
        yield f"    needs: {'; '.join(rule.text for rule in entry.rules)}"
    if entry.formula:
        yield f"    {entry.formula.metric}: {entry.formula.text}  ({entry.formula.range})"
    if entry.use:
        yield f"    use: {entry.use}"
    yield f"    source: {entry.source}"


def _stages(entry: Entry) -> int | str:
    return "v" if entry.takes_v else entry.stages_per_rank


def _default(value: Any) -> str:
    return "chosen when left out" if value is None else f"{value} when left out"


def _data(entry: Entry) -> dict[str, Any]:
    formula = entry.formula
    return {
        "name": entry.name,
        "summary": entry.summary,
        "stages_per_rank": _stages(entry),
        "options": entry.options,
        "needs": [rule.text for rule in entry.rules],
        "weights": entry.weights,
        "use": entry.use,
        "formula": formula and {k: getattr(formula, k) for k in ("metric", "text", "range")},
        "source": entry.source,
    }


VERB = Verb("list", "every schedule, what it needs, its weights and source", Options, run)
