"""Where stages are, found from who runs what. Imports ir and errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hocket.errors import Problem, ScheduleError
from hocket.ir import Action, Kind, Placement, Queue

Rows = Sequence[Sequence[Iterable[Action]]]


def placement_of(rows: Rows) -> Placement:
    """The placement of an order written out rank by rank, `rows[rank][slot]`.

    A stage is where its forward runs; microbatches that walk the ranks in different ways take
    different paths, numbered by their lowest microbatch.

    Raises: ScheduleError where some stage or microbatch stands nowhere.
    """
    found = _ranks(rows)
    if not found:
        raise ScheduleError("there are no actions in it")
    n_stages = 1 + max(stage for stage, _ in found)
    m = 1 + max(mb for _, mb in found)
    usual = {stage: rank for (stage, _), rank in sorted(found.items(), reverse=True)}
    missing = [stage for stage in range(n_stages) if stage not in usual]
    if missing:
        raise ScheduleError([
            Problem(None, None, "", f"stage {s} stands nowhere; the stages are 0 to {n_stages - 1}")
            for s in missing
        ])  # fmt: skip
    paths: dict[tuple[Queue, ...], int] = {}
    path_of = []
    for mb in range(m):
        path = tuple(Queue(found.get((s, mb), usual[s])) for s in range(n_stages))
        path_of.append(paths.setdefault(path, len(paths)))
    return Placement(tuple(paths), tuple(path_of))


def _ranks(rows: Rows) -> dict[tuple[int, int], int]:
    """The rank of each stage and microbatch: that of its forward, else of anything it does."""
    forwards: dict[tuple[int, int], int] = {}
    others: dict[tuple[int, int], int] = {}
    for rank, slots in enumerate(rows):
        for action in (a for slot in slots for a in slot):
            known = forwards if action.kind == Kind.F else others
            known.setdefault((action.stage, action.mb), rank)
    return others | forwards
