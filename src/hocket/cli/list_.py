"""`hocket list`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hocket.cli.arguments import Answer, Verb, option

if TYPE_CHECKING:
    from hocket.schedules import Entry


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `hocket list` takes."""

    models: bool = option("--models", "the models of the catalogue, for --model")
    gpus: bool = option("--gpus", "the GPUs, for --gpu")
    stacks: bool = option("--stacks", "the software stacks and their errors, for --stack")


def run(options: Options) -> Answer:
    """The registered schedules, or catalogues."""
    kinds = [kind for kind in ("models", "gpus", "stacks") if getattr(options, kind)]
    if kinds:
        return _catalogues(kinds)
    from hocket.schedules import entries

    text = "\n".join(line for entry in entries() for line in _lines(entry))
    return Answer(text, lambda: {"schedules": [_data(entry) for entry in entries()]})


def _catalogues(kinds: list[str]) -> Answer:
    from hocket.cluster.lists import LISTS
    from hocket.tables import table

    lists = {kind: LISTS[kind] for kind in kinds}
    text = "\n\n".join(table(one.rows(), one.heads) for one in lists.values())
    return Answer(text, lambda: {kind: one.data() for kind, one in lists.items()})


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
        **{key: getattr(entry, key) for key in ("name", "summary", "options", "weights", "use")},
        "stages_per_rank": _stages(entry),
        "needs": [rule.text for rule in entry.rules],
        "formula": formula and {k: getattr(formula, k) for k in ("metric", "text", "range")},
        "source": entry.source,
    }


VERB = Verb("list", Options, run)
