"""When a slot starts and ends: along the graph, and in one compiled pass without it.

The rule stands in `deps.py`: a slot starts when its queue is free and all that it needs has ended
and is there; its parts share start and end; whatever it transfers around its work belongs to it.
`longest_path` follows the graph, of every order. `walk` is the specialised pass for large
orders without messages and slices; a test holds the two equal.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from hocket import compiled
from hocket.codes import kinds_of, mbs_of, stages_of
from hocket.compiled import ROOM
from hocket.deps import IS_WORK, NEEDS, USERS, Kind
from hocket.graph import Graph
from hocket.ir import Array, Schedule


class Times(NamedTuple):
    """When things start and end, and when what held them had ended.

    Of actions, and `held` of slots (`walk`); of nodes (`longest_path`). `held` is the start where
    only the queue held; empty where messages take no time, since it is the start then.
    """

    start: Array
    end: Array
    held: Array


def longest_path(graph: Graph, durations: Array, delays: Array) -> Times:
    """When each node starts and ends if every node starts as early as it can.

    Units and exactness are those of the arrays: integers stay integers. Nodes that wait for ever
    are at 0; `graph.stuck` names the first of them.
    """
    start, durations = np.zeros_like(durations), durations.copy()
    held = np.zeros_like(durations) if delays.any() else durations[:0]
    if graph.stuck:
        waiting = np.ones(graph.n_nodes, dtype=bool)
        waiting[graph.sequence] = False
        durations[waiting] = 0
    compiled.run(
        follow, graph.n_nodes,
        (
            graph.sequence, graph.heads, graph.receives, graph.need_starts, graph.needs, delays,
        ),
        (start, durations, held),
    )  # fmt: skip
    return Times(start, durations, held)


def delays_of(graph: Graph, wires: Array | None) -> Array:
    """Time from the end of each edge's source to its target, `[edge]`.

    wires: time that each result takes to the next rank, `[kind, stage]`; None: none.
    """
    if wires is None:
        return np.zeros(len(graph.source), dtype=np.int64)
    codes = graph.schedule.codes[graph.source]
    return np.where(graph.crosses, wires[kinds_of(codes), stages_of(codes)], 0)


class _Rows(NamedTuple):
    """The needs of computations as arrays, for the loop that goes by times.

    The ends of all actions stand in `n_rows` rows of `[stage + 2, microbatch]`, before and behind
    the stages one that never runs: kinds that stand in for each other share a row. Kind k writes
    at `row_of[k]` (below 0: nobody waits for it). Every kind has `len(each)` needs, from
    `len(each) * k` on: its last one is repeated, and a kind without any looks into one of the
    `n_full` rows behind the others, where everything has ended. Need i stands at `place_of[i]`,
    its stage at `offset_of[i]`; one of the kinds that meet it is `kind_of[i]`.
    """

    each: tuple[int, ...]
    offset_of: Array
    place_of: Array
    row_of: Array
    kind_of: Array
    n_rows: int
    n_full: int


@lru_cache(maxsize=64)
def _rows(n_stages: int, m: int) -> _Rows:
    # Of the orders that a pass is made over, which are without the kinds in USERS.
    needs = [
        [
            need._replace(sources=tuple(x for x in need.sources if x[0] not in USERS))
            for need in NEEDS[Kind.F if kind in USERS else kind]
            if not need.step
        ]
        for kind in Kind
    ]
    rows: list[set[Kind]] = []
    for need in chain.from_iterable(needs):
        alike = {kind for kind, _ in need.sources if IS_WORK[kind]}
        joined = [row for row in rows if row & alike]
        rows = [row for row in rows if not row & alike] + [alike.union(*joined)] * bool(alike)
    size = (n_stages + 2) * m
    row_of = np.full(len(Kind), -1)
    for i, row in enumerate(rows):
        row_of[[*row]] = i * size + m
    each = (0,) * max(map(len, needs))
    columns = []
    for some in needs:
        own = [(row_of[need.sources[-1][0]], *need.sources[-1]) for need in some]
        own = own or [(len(rows) * size + m, Kind(0), 0)]
        columns += own + own[-1:] * (len(each) - len(own))
    row, kind_of, offset_of = (np.array(column) for column in zip(*columns, strict=True))
    n_full = int(not all(needs))
    return _Rows(each, offset_of, row + offset_of * m, row_of, kind_of, len(rows), n_full)


def _delays_of_needs(schedule: Schedule, rows: _Rows, wires: Array) -> Array:
    """Time from the end of each need's source to the stage that needs it, `[need, path, stage]`."""
    n = schedule.placement.n_stages
    wanted = np.arange(n) + rows.offset_of[:, None]
    source = wanted.clip(0, n - 1)
    rank = np.append(schedule.rank_of_queue, -1)[schedule.home]  # -1: beyond the path's end
    theirs, own = rank[:, source].swapaxes(0, 1), rank[None]
    crosses = (source == wanted)[:, None] & (theirs >= 0) & (theirs != own)
    return np.where(crosses, wires[rows.kind_of[:, None], source][:, None], 0)


def walk(
    schedule: Schedule, table: Array, work: Array | None = None, wires: Array | None = None, *,
    timed: bool = True,
) -> Times | None:  # fmt: skip
    """What `longest_path` gives, in one compiled pass and without a graph, of a complete schedule.

    table: time of each computation, `[kind, stage]`; work: of each slot, instead, `[slot]`. wires:
    as for `delays_of`. timed: whether the times are wanted, or only whether all can run. None where
    some slot never starts, and where a pass is too simple to tell: with messages or slices, kinds
    that may stand in for one another (deps.USERS), slots whose parts need each other, and where it
    would not run compiled.
    """
    placement, n = schedule.placement, len(schedule.codes)
    fast = compiled.choose(pass_over, n)
    if fast is None or schedule.has_communication or placement.slices > 1:
        return None
    if not schedule.kinds.isdisjoint(USERS):
        return None
    rows = _rows(placement.n_stages, placement.m)
    shape = rows.n_rows + rows.n_full, placement.n_stages + 2, placement.m
    ends = np.full(shape, -1, dtype=table.dtype)
    ends[rows.n_rows :] = 0
    ends[:, 0] = 0
    ends[:, placement.lengths + 1, np.arange(placement.m)] = 0
    delays = None if wires is None else _delays_of_needs(schedule, rows, wires)
    sizes = (n, n, 0 if delays is None else schedule.n_slots) if timed else (0, 0, 0)
    times = Times(*(np.empty(size, dtype=table.dtype) for size in sizes))
    n_queues = len(schedule.queues)
    n_ran = fast(
        schedule.codes, None if schedule.is_single else schedule.slots, schedule.starts,
        schedule.home.ravel(), placement.path_by_mb, placement.n_stages, *rows[:4],
        None if delays is None else delays.ravel(), table.ravel(), work,
        ends.ravel(), schedule.starts[:-1].copy(), np.full(n_queues, -1),
        np.append(np.arange(1, n_queues), -1), np.zeros(n_queues, dtype=table.dtype), *times,
    )  # fmt: skip
    return times if n_ran == schedule.n_slots else None


def along(g: Graph, durations: Array, wires: Array | None) -> Times | None:
    """The same along the graph, for any order; None where some slot never starts.

    durations: of each node.
    """
    if g.stuck or g.n_open:
        return None
    start, end, held = longest_path(g, durations, delays_of(g, wires))
    node = g.node_of_action
    return Times(start[node], end[node], held[node[g.schedule.slots[:-1]]] if len(held) else held)


# --- loops, plain or compiled ------------------------------------------------------------------


def pass_over(  # noqa: C901 (a call inside this nest would make it ten times slower)
    codes, slots, starts, home, path_of, n_stages, each, offset_of, place_of, row_of,
    delays, table, work, ends, cursor, owed, behind, free, start, end, held_until,
):  # fmt: skip
    """When each action starts and ends if all start as early as they can.

    Returns how many slots ran. Kind k has `len(each)` needs, from `len(each) * k` on: the compiler
    knows the length of a tuple, which halves the time. Need i of an action is ready at
    `ends[place_of[i] + cell]`, which is below 0 while that has not ended; cell: where its stage and
    microbatch stand in each row of `ends`. Every queue runs until it meets what has not ended, then
    waits in the list `owed` of the queue it waits for; `behind` links these lists, and that of the
    queues that may move. `free`: when each queue falls free.
    A slot takes `work[slot]`, without that the sum of its parts in `table[kind, stage]`. Without
    room in `start` no times are written; with `delays[need, path, stage]`, `held_until` gets when
    what held a slot had ended. Arrays that are None cost nothing: compiled code is made for each
    case.
    """
    m, none, n_paths = len(path_of), 0 * table[0], len(home) // n_stages
    timed = len(start) > 0
    n_done, queue, last_queue = 0, 0, len(owed) - 1
    while queue >= 0:
        q = queue & ROOM
        queue = behind[q]
        i, last, owing = cursor[q] & ROOM, starts[q + 1], -1
        begun, a = i, i if slots is None else slots[i]
        clock = free[q]
        time, held, spent = clock, clock, none
        while i < last:
            code = codes[a & ROOM]
            kind, stage, mb = kinds_of(code), stages_of(code), mbs_of(code) & ROOM
            cell = stage * m + mb
            for need in range(len(each) * kind, len(each) * (kind + 1)):
                ready = ends[(place_of[need] + cell) & ROOM]
                if ready < 0:
                    owing = home[(path_of[mb] * n_stages + stage + offset_of[need]) & ROOM]
                    break
                if delays is not None:
                    way = (need * n_paths + path_of[mb]) * n_stages + stage
                    due = ready + delays[way & ROOM]
                    if due > time:
                        time, held = due, ready
                elif ready > time:
                    time = ready
            if owing >= 0:
                break
            spent += table[(kind * n_stages + stage) & ROOM]
            a += 1
            if slots is not None and a < slots[(i + 1) & ROOM]:
                continue
            clock = time + (spent if work is None else work[i & ROOM])
            at = i if slots is None else a - 1
            row = row_of[kind]
            if row >= 0:
                ends[(row + cell) & ROOM] = clock
            if timed:
                start[at & ROOM], end[at & ROOM] = time, clock
            if slots is not None:
                for part in range(slots[i & ROOM], a - 1):
                    b = part & ROOM
                    code, row = codes[b], row_of[kinds_of(codes[b])]
                    if row >= 0:
                        ends[(row + stages_of(code) * m + mbs_of(code)) & ROOM] = clock
                    if timed:
                        start[b], end[b] = time, clock
            if delays is not None:
                held_until[i & ROOM] = held
            time, held, spent = clock, clock, none
            i += 1
        if owing >= 0:
            behind[q], owed[owing & ROOM] = owed[owing & ROOM], q
        if i > begun:
            cursor[q], free[q] = i, clock
            n_done += i - begun
            woken, owed[q] = owed[q], -1
            if woken >= 0:
                if queue < 0:
                    queue = woken
                else:
                    behind[last_queue & ROOM] = woken
                while behind[woken & ROOM] >= 0:
                    woken = behind[woken & ROOM]
                last_queue = woken
    return n_done


def follow(sequence, heads, receives, need_starts, needs, delays, start, end, held):
    """When each node starts and ends, taken in an order in which all can run.

    `end` holds the durations before and the ends after. With room in `held`, when what held the
    node had ended; a RECV is seen through to its SEND. `receives`: which nodes are one; may be
    empty.
    """
    told, messages = len(held) > 0, len(receives) > 0
    for i in sequence:
        time = 0 if heads[i] else end[i - 1]
        behind = messages and not heads[i] and receives[i - 1]
        until = held[i - 1] if told and behind else time
        e, stop = need_starts[i], need_starts[i + 1]
        while e < stop:
            j = needs[e]
            ready = end[j] + delays[e]
            if ready > time or (behind and ready == time):
                time, behind = ready, False
                if told:
                    until = held[j] if messages and receives[j] else end[j]
            e += 1
        start[i] = time
        end[i] += time
        if told:
            held[i] = until
