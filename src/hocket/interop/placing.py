"""Where stages are, found from who runs what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from hocket.errors import ScheduleError
from hocket.ir import Action, Kind, Placement, Queue
from hocket.text import sparse

Slots = Sequence[Iterable[Action]]
_SHOWN = 8


def placement_of(rows: Sequence[Slots] | Mapping[Queue, Slots]) -> Placement:
    """The placement of an order written out, `rows[rank][slot]` or slots by queue.

    A stage is where its forward runs; microbatches that walk the ranks in different ways take
    different paths, numbered by their lowest microbatch.

    Raises: ScheduleError where some stage or microbatch is never used.
    """
    if not isinstance(rows, Mapping):
        rows = {Queue(rank): slots for rank, slots in enumerate(rows)}
    found = _queues(rows)
    if not found:
        raise ScheduleError("there are no actions in it")
    stages, m = sorted({stage for stage, _ in found}), 1 + max(mb for _, mb in found)
    n_stages = 1 + stages[-1]
    gaps = [(a + 1, b - 1) for a, b in pairwise([-1, *stages]) if b - a > 1]
    if gaps:
        shown = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in gaps[:_SHOWN])
        more = f" and {len(gaps) - _SHOWN} other gaps" if len(gaps) > _SHOWN else ""
        what = f"stage {shown} is" if shown.isdigit() and not more else f"stages {shown}{more} are"
        raise ScheduleError(f"{what} never used; the stages are 0 to {n_stages - 1}")
    if why := sparse(n_stages, m, len(found)):
        raise ScheduleError(why)
    usual = {stage: queue for (stage, _), queue in sorted(found.items(), reverse=True)}
    paths: dict[tuple[Queue, ...], int] = {}
    path_of = []
    for mb in range(m):
        path = tuple(found.get((s, mb), usual[s]) for s in range(n_stages))
        path_of.append(paths.setdefault(path, len(paths)))
    return Placement(tuple(paths), tuple(path_of))


def _queues(rows: Mapping[Queue, Slots]) -> dict[tuple[int, int], Queue]:
    """The queue of each stage and microbatch: that of its forward, else of anything it does."""
    forwards: dict[tuple[int, int], Queue] = {}
    others: dict[tuple[int, int], Queue] = {}
    for queue, slots in rows.items():
        for action in (a for slot in slots for a in slot):
            known = forwards if action.kind == Kind.F else others
            known.setdefault((action.stage, action.mb), queue)
    return others | forwards
