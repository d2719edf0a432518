"""What torch's runtime makes of a compute-only order before it runs it, pass by pass.

Its order of messages decides which receive meets which send, since torch sends without tags; so
these passes give the same order as torch's own.

Source: torch/distributed/pipelining/schedules.py (torch 2.13): `_add_unshard_reshard`,
`_add_reduce_grad`, `_add_send_recv`, `_defer_recv_ops`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hocket.deps import CONSUMERS, ENDS, MESSAGE, NEEDS, PARTNER
from hocket.errors import ScheduleError
from hocket.interop.torch.text import Item, item_of
from hocket.ir import Action, Kind

Rows = list[list[Item]]
ACTIVE_STAGES = 3  # how many stages of a rank torch keeps unsharded at a time
_RECEIVE = {user: receive for receive, users in CONSUMERS.items() for user in users}


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
        last |= {action.stage: i for action in item.actions if action.kind in ENDS}
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
    at, out, there = [0] * len(rows), [list[Item]() for _ in rows], [set[Action]() for _ in rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            if at[rank] == len(row):
                continue
            item = row[at[rank]]
            actions = item.actions
            if not all(_is_ready(action, there[rank], ranks) for action in actions):
                continue
            at[rank] += 1
            moved = True
            out[rank].append(item)
            for action in actions:
                there[rank].add(action)
                message = _message(action, rank, ranks)
                if message is not None:
                    send, receive = message
                    out[rank].append(item_of(send))
                    to = ranks[receive.stage]
                    out[to].append(item_of(receive))
                    there[to].add(receive)
    stuck = [str(row[i]) for i, row in zip(at, rows, strict=True) if i < len(row)]
    if stuck:
        raise ScheduleError(f"no rank can go on: {', '.join(stuck)} wait for each other")
    return out


def sources_of(action: Action) -> list[Action]:
    """The results of the neighbouring stage of which an action needs one."""
    return [
        Action(kind, action.stage + shift, action.mb)
        for need in NEEDS[action.kind] if not need.step
        for kind, shift in need.sources if shift and kind in MESSAGE
    ]  # fmt: skip


def _is_ready(action: Action, there: set[Action], ranks: dict[int | None, int]) -> bool:
    """True when what an action needs of another stage is on its rank."""
    sources = [source for source in sources_of(action) if source.stage in ranks]
    if not sources:
        return True
    return not there.isdisjoint([action._replace(kind=_RECEIVE[action.kind]), *sources])


def _message(
    action: Action, rank: int, ranks: dict[int | None, int]
) -> tuple[Action, Action] | None:
    """The SEND and the RECV of a result that another rank needs."""
    if action.kind not in MESSAGE:
        return None
    send, receive, shift = MESSAGE[action.kind]
    to = action.stage + shift
    if ranks.get(to, rank) == rank:
        return None
    return action._replace(kind=send), Action(receive, to, action.mb)


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
            if item.is_message:
                kind = Kind[item.type]
                peer = ranks[(item.stage or 0) + PARTNER[kind][1]]
                if kind in CONSUMERS:
                    waiting[item] = peer
                    continue
                flushed = [r for r, sender in waiting.items() if rank < peer == sender]
            else:
                read = [a._replace(kind=_RECEIVE.get(a.kind, a.kind)) for a in item.actions]
                flushed = [r for r in map(item_of, read) if r in waiting]
            for receive in flushed:
                del waiting[receive]
            line += [*flushed, item]
        out.append(line + list(waiting))
    return out
