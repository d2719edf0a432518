"""What torch's runtime makes of a compute-only order before it runs it, pass by pass.

Its order of messages decides which receive meets which send, since torch sends without tags; so
these passes give the same order as torch's own. Imports deps, ir, torch_text and errors.

Source: torch/distributed/pipelining/schedules.py (torch 2.13): `_add_unshard_reshard`,
`_add_reduce_grad`, `_add_send_recv`, `_defer_recv_ops`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hocket.deps import MESSAGE, NEEDS
from hocket.errors import ScheduleError
from hocket.interop.torch_text import Item
from hocket.ir import Kind

Rows = list[list[Item]]
ACTIVE_STAGES = 3  # how many stages of a rank torch keeps unsharded at a time
_BACKWARDS = ("B", "W")  # what ends the gradient of a microbatch
_CONSUMERS = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}


def lower_as_torch(rows: Sequence[Sequence[Item]], *, defer: bool = False) -> Rows:
    """The order that torch runs for a compute-only order; defer: with `defer_pp_recv=True`.

    Raises: ScheduleError where no rank can go on.
    """
    ready = [add_reduce_grad(add_unshard(row)) for row in rows]
    lowered = _add_messages(ready)
    return _deferred_as_torch(lowered) if defer else lowered


def add_unshard(row: Sequence[Item]) -> list[Item]:
    """A rank's items with UNSHARD before a stage is needed and RESHARD once others are."""
    left = _stages_left(row)
    active: set[int] = set()
    out: list[Item] = []
    for i, item in enumerate(row):
        upcoming = _upcoming(row, i, min(ACTIVE_STAGES, left[i]))
        fetch = [s for s in upcoming if s not in active]
        evict = [s for s in active if s not in upcoming]
        active.difference_update(evict)
        active.update(fetch)
        out += [Item("RESHARD", s) for s in evict] + [Item("UNSHARD", s) for s in fetch]
        out.append(item)
    return out + [Item("RESHARD", s) for s in active]


def _stages_left(row: Sequence[Item]) -> list[int]:
    """How many stages stand in the rest of the row, `[item]`."""
    seen: set[int | None] = set()
    out = []
    for item in reversed(row):
        seen.update(leaf.stage for leaf in item.leaves)
        out.append(len(seen))
    return out[::-1]


def _upcoming(row: Sequence[Item], start: int, count: int) -> list[int]:
    """The next `count` stages; one more where the last item brings two."""
    out: list[int] = []
    for i in range(start, len(row)):
        stages = dict.fromkeys(x.stage for x in row[i].leaves if x.stage is not None)
        out += [s for s in stages if s not in out]
        if len(out) >= count:
            break
    return out


def add_reduce_grad(row: Sequence[Item]) -> list[Item]:
    """A rank's items with REDUCE_GRAD behind the last backward of each stage."""
    last: dict[int | None, int] = {}
    for i, item in enumerate(row):
        last |= {leaf.stage: i for leaf in item.leaves if leaf.type in _BACKWARDS}
    out: list[Item] = []
    for i, item in enumerate(row):
        out.append(item)
        stages = [leaf.stage for leaf in item.leaves if last.get(leaf.stage) == i]
        out += [Item("REDUCE_GRAD", s) for s in dict.fromkeys(stages)]
    return out


def _add_messages(rows: Rows) -> Rows:
    """The items with SEND and RECV, both put down when the result is there.

    Every rank in turn puts down its next item if it has what that needs.
    """
    ranks = {leaf.stage: rank for rank, row in enumerate(rows) for x in row for leaf in x.leaves}
    at, out, there = [0] * len(rows), [list[Item]() for _ in rows], [set[Item]() for _ in rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            if at[rank] == len(row):
                continue
            item = row[at[rank]]
            if not all(_is_ready(leaf, there[rank], ranks) for leaf in item.leaves):
                continue
            at[rank] += 1
            moved = True
            out[rank].append(item)
            for leaf in item.leaves:
                there[rank].add(leaf)
                message = _message(leaf, rank, ranks)
                if message is not None:
                    send, receive = message
                    out[rank].append(send)
                    to = ranks[receive.stage]
                    out[to].append(receive)
                    there[to].add(receive)
    stuck = [str(row[i]) for i, row in zip(at, rows, strict=True) if i < len(row)]
    if stuck:
        raise ScheduleError(f"no rank can go on: {', '.join(stuck)} wait for each other")
    return out


def _is_ready(item: Item, there: set[Item], ranks: dict[int | None, int]) -> bool:
    """True when the results of other stages that an item needs are on its rank."""
    if item.type not in ("F", "B", "I"):
        return True
    assert item.stage is not None
    for need in NEEDS[Kind[item.type]]:
        wanted = [Item(kind.name, item.stage + shift, item.mb) for kind, shift in need.sources]
        other = wanted[-1].stage != item.stage and not need.step
        if other and wanted[-1].stage in ranks and there.isdisjoint(wanted):
            return False
    return True


def _message(item: Item, rank: int, ranks: dict[int | None, int]) -> tuple[Item, Item] | None:
    """The SEND and the RECV of a result that another rank needs."""
    if item.type not in ("F", "B", "I"):
        return None
    assert item.stage is not None
    send, receive, shift = MESSAGE[Kind[item.type]]
    to = item.stage + shift
    if ranks.get(to, rank) == rank:
        return None
    return Item(send.name, item.stage, item.mb), Item(receive.name, to, item.mb)


def _deferred_as_torch(rows: Rows) -> Rows:
    """The order of `defer_pp_recv=True`: each RECV at its consumer, or at a send to its rank.

    Only the lower one of two ranks puts its receives before its sends.
    """
    ranks = {leaf.stage: rank for rank, row in enumerate(rows) for x in row for leaf in x.leaves}
    out = []
    for rank, row in enumerate(rows):
        line: list[Item] = []
        waiting: dict[Item, int] = {}  # a RECV, and the rank that sends it
        for item in row:
            assert item.stage is not None or item.parts
            if item.type in ("RECV_F", "RECV_B"):
                waiting[item] = ranks[(item.stage or 0) + (-1 if item.type == "RECV_F" else 1)]
                continue
            if item.type in ("SEND_F", "SEND_B"):
                peer = ranks[(item.stage or 0) + (1 if item.type == "SEND_F" else -1)]
                flushed = [r for r, sender in waiting.items() if rank < peer == sender]
            else:
                wanted = [Item(_CONSUMERS.get(x.type, ""), x.stage, x.mb) for x in item.leaves]
                flushed = [r for r in wanted if r in waiting]
            for receive in flushed:
                del waiting[receive]
            line += [*flushed, item]
        out.append(line + list(waiting))
    return out
