"""The schedule as a graph of integer arrays, and the longest path through it.

Built from the table in `deps.py`, never from a rule of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from hocket import loops
from hocket.deps import IS_MESSAGE, IS_RECEIVE, NEEDS, PARTNER, SENDS, WORK, Need
from hocket.ir import Array, Kind, Schedule, encode, kinds_of, mbs_of, stages_of

_NONE = np.empty(0, dtype=np.int32)


class Index:
    """Finds actions by arithmetic: `index.find(kind, stages, mbs)` gives positions in `codes`.

    A position equal to `n` means that no such action stands in the order.
    """

    def __init__(self, schedule: Schedule) -> None:
        placement = schedule.placement
        self.schedule = schedule
        self.n = len(schedule.codes)
        self.lengths = placement.lengths
        self.slices = placement.slices
        self.n_stages, self.m = placement.n_stages, placement.m
        self.table = np.empty(len(Kind) * self.n_stages * self.m, dtype=np.int32)
        self.counts = np.zeros(len(Kind), dtype=np.int64)
        loops.run(
            loops.locate, self.n, (schedule.codes, self.lengths, self.n_stages, self.n),
            (self.table, self.counts),
        )  # fmt: skip

    @cached_property
    def kinds(self) -> Array:
        """The kind of each action."""
        return kinds_of(self.schedule.codes)

    @cached_property
    def stages(self) -> Array:
        """The stage of each action."""
        return stages_of(self.schedule.codes)

    @cached_property
    def mbs(self) -> Array:
        """The microbatch of each action."""
        return mbs_of(self.schedule.codes)

    def find(self, kind: Kind, stages: Array, mbs: Array) -> Array:
        """Positions of (kind, stage, mb); stages must lie on the microbatches' paths."""
        if not self.counts[kind]:
            return np.full(len(stages), self.n, dtype=np.int32)
        row = int(kind) * self.n_stages * self.m
        return self.table[row + stages * self.m + mbs]

    def sources(self, need: Need, positions: Array) -> tuple[Array, Array]:
        """Which of `positions` have this need at all, and what satisfies it (`n`: nothing)."""
        offset = need.sources[-1][1]
        wanted = self.stages[positions] + offset
        exists = (wanted >= 0) & (wanted < self.lengths[self.mbs[positions]])
        if need.step:
            part = self.mbs[positions] % self.slices + need.step
            exists &= (part >= 0) & (part < self.slices)
        having = positions[exists]
        found = np.full(len(having), self.n, dtype=np.int32)
        for kind, shift in need.sources:
            open_ = found == self.n
            where = having[open_]
            mbs = self.mbs[where] + need.step
            found[open_] = self.find(kind, self.stages[where] + shift, mbs)
        return having, found


class _Rules(NamedTuple):
    """`deps.NEEDS` as arrays, for the loops.

    Needs `need_of_kind[k]:need_of_kind[k + 1]` are those of kind k; need i exists where the stage
    at `offset_of[i]` does, in the slice at `step_of[i]`, and is met by the first of the sources
    `source_of[i]:source_of[i + 1]`; source s stands in the index's table `source_cells[s]` cells
    behind the place of an F of the action's own stage and microbatch.
    """

    need_of_kind: Array
    offset_of: Array
    step_of: Array
    source_of: Array
    source_cells: Array


def _rules(index: Index) -> _Rules:
    """The needs that can exist in this order, with the sources that stand in it."""
    need_of_kind, offsets, steps, source_of, cells = [0], [], [], [0], []
    for kind in Kind:
        for need in NEEDS[kind]:
            if need.step and index.slices == 1:
                continue
            offsets.append(need.sources[-1][1])
            steps.append(need.step)
            cells += [
                (int(k) * index.n_stages + shift) * index.m + need.step
                for k, shift in need.sources
                if index.counts[k]
            ]
            source_of.append(len(cells))
        need_of_kind.append(len(offsets))
    columns = (need_of_kind, offsets, steps, source_of, cells)
    return _Rules(*(np.array(column, dtype=np.int64) for column in columns))


class _Rows(NamedTuple):
    """`deps.NEEDS` of computations as arrays, for the loop that goes by times.

    The ends of all actions stand in `n_rows` rows of `[stage + 2, microbatch]`, before and behind
    the stages one that never runs: kinds that stand in for each other share a row. Kind k writes
    at `row_of[k]` (below 0: nobody waits for it); its needs are `n_needs * k` to
    `n_needs * (k + 1)`, the last one repeated. Need i stands at `place_of[i]`, its stage at
    `offset_of[i]`; one of the kinds that meet it is `kind_of[i]`.
    """

    n_rows: int
    n_needs: int
    offset_of: Array
    place_of: Array
    row_of: Array
    kind_of: Array


@lru_cache(maxsize=64)
def _rows(n_stages: int, m: int) -> _Rows:
    # Messages never come here: they have the needs of some computation.
    table = [NEEDS[kind if kind in WORK else WORK[0]] for kind in Kind]
    needs = [[need for need in row if not need.step] for row in table]
    n_needs = max(map(len, needs))
    flat = [need for some in needs for need in some + some[-1:] * (n_needs - len(some))]
    rows: list[set[Kind]] = []
    for need in flat:
        alike = {kind for kind, _ in need.sources if kind in WORK}
        joined = [row for row in rows if row & alike]
        rows = [row for row in rows if not row & alike] + [alike.union(*joined)]
    size = (n_stages + 2) * m
    row_of = [next((i * size + m for i, row in enumerate(rows) if k in row), -1) for k in Kind]
    kinds, offsets = zip(*(need.sources[-1] for need in flat), strict=True)
    place_of = [row_of[k] + offset * m for k, offset in zip(kinds, offsets, strict=True)]
    columns = (np.array(column, np.int64) for column in (offsets, place_of, row_of, kinds))
    return _Rows(len(rows), n_needs, *columns)


class Missing(NamedTuple):
    """A need that nothing in the order satisfies."""

    action: int
    need: Need


class _Nodes(NamedTuple):
    """The nodes of a schedule: `visit[first[i]:first[i + 1]]` are the actions of node i.

    Without `visit` they are those positions themselves, without `of_action` each action is a
    node. `posts[k]`: the action that a posted RECV, the k-th of the last nodes, stands behind;
    below 0 where it stands first.
    """

    chains: Array
    first: Array
    visit: Array
    of_action: Array
    posts: Array


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes in chains, and what each node waits for.

    A node is a slot of computation, or one communication. The nodes of a chain run one after
    the other; node i needs `needs[need_starts[i]:need_starts[i + 1]]`. Edge e goes from action
    `source[e]` to action `target[e]`; `crosses[e]` says that the two are on different ranks.
    `n_open` counts the needs that nothing satisfies, `n_late` those that are satisfied behind
    the action in its own chain.
    """

    schedule: Schedule
    nodes: _Nodes
    need_starts: Array
    needs: Array
    source: Array
    targets: Array
    crosses: Array
    n_open: int
    n_late: int

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return len(self.need_starts) - 1

    @property
    def chains(self) -> Array:
        """The first node of each chain, and the number of nodes."""
        return self.nodes.chains

    @cached_property
    def node_of_action(self) -> Array:
        """The node of each action, `[action]`."""
        if len(self.nodes.of_action):
            return self.nodes.of_action
        return np.arange(self.n_nodes, dtype=np.int32)

    @cached_property
    def target(self) -> Array:
        """The action that waits, `[edge]`."""
        if len(self.targets) or not len(self.needs):
            return self.targets
        return np.repeat(np.arange(self.n_nodes, dtype=np.int32), np.diff(self.need_starts))

    @cached_property
    def first_action(self) -> Array:
        """The first action of each node, `[node]`."""
        first = self.nodes.first[:-1]
        return self.nodes.visit[first] if len(self.nodes.visit) else first

    @cached_property
    def missing(self) -> tuple[Missing, ...]:
        """The needs that nothing in the order satisfies."""
        if not self.n_open:
            return ()
        index = Index(self.schedule)
        out = []
        for kind, needs in NEEDS.items():
            positions = np.flatnonzero((index.kinds == kind) & inside(index))
            for need in needs:
                if not need.step or index.slices > 1:
                    having, found = index.sources(need, positions)
                    out += [Missing(int(a), need) for a in having[found == index.n]]
        return tuple(out)

    def edges_of(self, node: int) -> range:
        """The edges that a node waits for."""
        return range(int(self.need_starts[node]), int(self.need_starts[node + 1]))

    @cached_property
    def heads(self) -> Array:
        """Which nodes are the first of their chain, `[node]`."""
        heads = np.zeros(self.n_nodes, dtype=bool)
        heads[self.chains[:-1][np.diff(self.chains) > 0]] = True
        return heads

    @cached_property
    def _order(self) -> tuple[Array, Array]:
        """An order in which the nodes can run, and the next node of each chain that stops."""
        n = self.n_nodes
        cursor = self.chains[:-1].copy()
        sequence = np.empty(n, dtype=np.int32)
        n_chains = len(cursor)
        n_done = loops.run(
            loops.topological, n, (self.chains, self.need_starts, self.needs),
            (
                np.zeros(n, dtype=bool), np.full(n, -1, dtype=np.int32),
                np.full(n_chains, -1, dtype=np.int32), np.arange(n_chains), cursor, sequence,
            ),
        )  # fmt: skip
        return sequence[:n_done], cursor[cursor < self.chains[1:]]

    @property
    def sequence(self) -> Array:
        """The nodes in an order in which they can run, without those that wait for ever."""
        return self._order[0]

    @property
    def stuck(self) -> list[int]:
        """For each chain that stops, its next node; empty when everything can run."""
        return self._order[1].tolist()


def inside(index: Index) -> Array:
    """Which actions are of a stage and a microbatch that exist, `[action]`."""
    known = index.mbs < index.m
    known[known] &= index.stages[known] < index.lengths[index.mbs[known]]
    return known


def graph(schedule: Schedule, *, blocking: bool = False, index: Index | None = None) -> Graph:
    """The dependency graph of a schedule, made once.

    A RECV that stands in the order is posted there and holds nobody up but its consumer; with
    `blocking` it holds its queue until the message is there. index: its index, where it is known.
    """
    key = "blocking" if blocking and schedule.has_communication else "graph"
    if key not in schedule.memo:
        index = Index(schedule) if index is None else index
        schedule.memo[key] = _linked(index, _nodes(schedule, index, blocking), keep=False)
    return schedule.memo[key]


def edges(schedule: Schedule) -> tuple[Array, Array]:
    """All (source, target) pairs of actions that the table of needs asks for."""
    return all_edges(schedule)[:2]


def all_edges(schedule: Schedule) -> tuple[Array, Array, Array]:
    """The same, by the target's slot; and where the pairs of each slot start, `[slot + 1]`."""
    g = _linked(Index(schedule), _nodes_of_slots(schedule), keep=True)
    return g.source, g.target, g.need_starts


def _linked(index: Index, nodes: _Nodes, *, keep: bool) -> Graph:
    """The graph over these nodes; with `keep` also the edges that the chains imply."""
    schedule, rules = index.schedule, _rules(index)
    most = int(index.counts @ np.diff(rules.need_of_kind)) + len(nodes.posts)
    single = not len(nodes.of_action)
    need_starts = np.zeros(len(nodes.first), dtype=np.int32)
    needs, crosses = np.empty(most, dtype=np.int32), np.empty(most, dtype=bool)
    source = needs if single else np.empty(most, dtype=np.int32)
    target = _NONE if single else np.empty(most, dtype=np.int32)
    n_edges, n_open, n_late = loops.run(
        loops.link, index.n,
        (
            schedule.codes, nodes.first, nodes.visit, nodes.of_action, nodes.chains,
            _ranks(schedule, nodes), nodes.posts, index.lengths, index.slices,
            index.table, index.n, keep, *rules,
        ),
        (need_starts, needs, source, target, crosses),
    )  # fmt: skip
    return Graph(
        schedule=schedule, nodes=nodes, need_starts=need_starts, needs=needs[:n_edges],
        source=source[:n_edges], targets=target[:n_edges], crosses=crosses[:n_edges],
        n_open=n_open, n_late=n_late,
    )  # fmt: skip


def _ranks(schedule: Schedule, nodes: _Nodes) -> Array:
    """The rank of each node."""
    if len(nodes.visit):
        slots = schedule.slot_of_action[nodes.visit[nodes.first[:-1]]]
        return schedule.rank_of_queue[schedule.queue_of_slot[slots]]
    return np.repeat(schedule.rank_of_queue, np.diff(schedule.starts))


def _nodes_of_slots(schedule: Schedule) -> _Nodes:
    """Every slot a node, every queue a chain."""
    of_action = _NONE if schedule.is_single else schedule.slot_of_action
    return _Nodes(schedule.starts, schedule.slots, _NONE, of_action, _NONE)


def _nodes(schedule: Schedule, index: Index, blocking: bool) -> _Nodes:
    """The nodes: slots; where messages stand in the order, each of them by itself."""
    if not schedule.has_communication:
        return _nodes_of_slots(schedule)
    is_comm = IS_MESSAGE[index.kinds]
    alone = np.repeat(schedule.widths == 1, schedule.widths) | is_comm
    opens = alone.copy()
    opens[schedule.slots[:-1][schedule.widths > 0]] = True
    raw = np.cumsum(opens) - 1  # nodes in the order they stand
    first = np.flatnonzero(opens)
    queue = schedule.queue_of_slot[schedule.slot_of_action[first]]
    kinds = index.kinds[first]
    apart = IS_RECEIVE[kinds] & (not blocking)
    serial, own = np.flatnonzero(~apart), np.flatnonzero(apart)
    counts = np.bincount(queue[serial], minlength=len(schedule.queues))
    chains = np.concatenate([[0], np.cumsum(counts), len(serial) + 1 + np.arange(len(own))])
    rank = np.empty(len(first), dtype=np.int32)
    rank[serial] = np.arange(len(serial), dtype=np.int32)
    rank[own] = len(serial) + np.arange(len(own), dtype=np.int32)
    # a posted RECV starts after the serial node that stands before it in its queue
    last = np.maximum.accumulate(np.where(apart, -1, np.arange(len(first))))[own]
    has = (last >= 0) & (queue[np.maximum(last, 0)] == queue[own])
    posts = np.where(has, first[np.maximum(last, 0)], -1)
    node_of_action = rank[raw]
    visit = np.argsort(node_of_action, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(node_of_action, minlength=len(first)))])
    return _Nodes(chains, offsets, visit, node_of_action, posts)


def assemble(schedule: Schedule, sources: Array, targets: Array) -> Graph:
    """The graph of these edges over the slots, sorted by node, without those a queue implies."""
    nodes = _nodes_of_slots(schedule)
    node_of_action, n_nodes = schedule.slot_of_action, schedule.n_slots
    from_node, to_node = node_of_action[sources], node_of_action[targets]
    queue = schedule.queue_of_slot
    kept = (queue[from_node] != queue[to_node]) | (from_node > to_node)
    kept = np.flatnonzero(kept)[np.argsort(to_node[kept], kind="stable")]
    need_starts = np.zeros(n_nodes + 1, dtype=np.int32)
    np.cumsum(np.bincount(to_node[kept], minlength=n_nodes), out=need_starts[1:])
    sources, targets = sources[kept], targets[kept]
    rank = schedule.rank_of_queue[queue]
    return Graph(
        schedule=schedule, nodes=nodes, need_starts=need_starts, needs=from_node[kept],
        source=sources, targets=targets, crosses=rank[from_node[kept]] != rank[to_node[kept]],
        n_open=0, n_late=0,
    )  # fmt: skip


class Times(NamedTuple):
    """Start and end of every node; `stuck` lists, for each chain that stopped, its next node."""

    start: Array
    end: Array
    stuck: list[int]


def longest_path(graph: Graph, durations: Array, delays: Array) -> Times:
    """When each node starts and ends if every node starts as early as it can.

    Units and exactness are those of the arrays: integers stay integers. Nodes that wait for ever
    are at 0.
    """
    return replay(graph, durations.copy(), delays)


def replay(graph: Graph, durations: Array, delays: Array) -> Times:
    """The same, written over `durations`: they become the ends."""
    start = np.empty_like(durations)
    if graph.stuck:
        ran = np.zeros(graph.n_nodes, dtype=bool)
        ran[graph.sequence] = True
        start[~ran] = durations[~ran] = 0
    loops.run(
        loops.replay, graph.n_nodes,
        (graph.sequence, graph.heads, graph.need_starts, graph.needs, delays), (start, durations),
    )  # fmt: skip
    return Times(start, durations, graph.stuck)


def sources_by_stage(schedule: Schedule) -> tuple[Array, Array]:
    """The source of each need of `walk`, by the stage that needs it, and whether it crosses ranks.

    Codes of microbatch 0, `[need, 1, stage]`, and `[need, path, stage]`.
    """
    n = schedule.placement.n_stages
    rows = _rows(n, schedule.m)
    wanted = np.arange(n) + rows.offset_of[:, None]
    source = wanted.clip(0, n - 1)
    rank = np.append(schedule.rank_of_queue, -1)[schedule.home]  # -1: beyond the path's end
    theirs, own = rank[:, source].swapaxes(0, 1), rank[None]
    crosses = (source == wanted)[:, None] & (theirs >= 0) & (theirs != own)
    return encode(rows.kind_of[:, None], source, 0)[:, None], crosses


class Walk(NamedTuple):
    """Start and end of each action, and `Timeline.until`."""

    start: Array
    end: Array
    until: Array | None


def walk(
    schedule: Schedule, table: Array, work: Array | None = None, delays: Array | None = None, *,
    timed: bool = True,
) -> Walk | None:  # fmt: skip
    """What `longest_path` gives, in one pass and without a graph, for a complete schedule.

    table: time of each computation, `[kind, stage]`; work: of each slot, instead, `[slot]`.
    delays: of the sources of `sources_by_stage`, `[need, path, stage]`; left out where there are
    none. timed: whether the times are wanted, or only whether all can run. None where some slot
    never starts, and where a pass is too simple to tell: with messages or slices, and slots whose
    parts need each other.
    """
    placement, n = schedule.placement, len(schedule.codes)
    if schedule.has_communication or placement.slices > 1:
        return None
    rows = _rows(placement.n_stages, placement.m)
    ends = np.full((rows.n_rows, placement.n_stages + 2, placement.m), -1, dtype=table.dtype)
    ends[:, 0] = 0
    ends[:, placement.lengths + 1, np.arange(placement.m)] = 0
    sizes = (n, n, 0 if delays is None else schedule.n_slots) if timed else (0, 0, 0)
    start, end, until = (np.empty(size, dtype=table.dtype) for size in sizes)
    n_queues = len(schedule.queues)
    n_ran = loops.run(
        loops.walk, n,
        (
            schedule.codes, None if schedule.is_single else schedule.slots, schedule.starts,
            schedule.home.ravel(), placement.path_by_mb, placement.n_stages, *rows[1:-1],
            None if delays is None else delays.ravel(), table.ravel(), work,
        ),
        (
            ends.ravel(), schedule.starts[:-1].copy(), np.full(n_queues, -1),
            np.append(np.arange(1, n_queues), -1), np.zeros(n_queues, dtype=table.dtype), start,
            end, until,
        ),
    )  # fmt: skip
    return Walk(start, end, until) if n_ran == schedule.n_slots else None


def cycles(graph: Graph) -> tuple[list[list[tuple[int, int]]], list[tuple[int, int]]]:
    """The cycles of waits among stuck nodes, and the stuck nodes that only wait behind them.

    Each node is given with an edge that it waits for: (node, edge). The nodes are the heads of
    their chains; in a cycle, the next pair's node heads the chain that holds the source of the
    previous pair's edge. One cycle is returned for each set of chains that wait for each other.
    """
    ended = np.zeros(graph.n_nodes, dtype=bool)
    ended[graph.sequence] = True
    heads = {int(np.searchsorted(graph.chains, node, side="right") - 1): node
             for node in graph.stuck}  # fmt: skip
    waits = {
        node: {
            heads[int(np.searchsorted(graph.chains, graph.needs[e], side="right") - 1)]: e
            for e in graph.edges_of(node)
            if not ended[graph.needs[e]]
        }
        for node in heads.values()
    }
    found, behind = [], []
    for group in _components(waits):
        node = group[0]
        if len(group) == 1 and node not in waits[node]:
            behind.append((node, next(iter(waits[node].values()))))
            continue
        members, seen, walk = set(group), dict[int, int](), list[tuple[int, int]]()
        while node not in seen:
            seen[node] = len(walk)
            after, edge = next((n, e) for n, e in waits[node].items() if n in members)
            walk.append((node, edge))
            node = after
        found.append(walk[seen[node] :])
    return found, sorted(behind)


def _components(after: Mapping[int, Iterable[int]]) -> list[list[int]]:
    """The strongly connected components of a graph (Tarjan 1972), without recursion."""
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    open_: list[int] = []
    inside, out = set[int](), list[list[int]]()
    for root in after:
        work = [] if root in number else [(root, iter(after[root]))]
        while work:
            node, rest = work[-1]
            if node not in number:
                number[node] = low[node] = len(number)
                open_.append(node)
                inside.add(node)
            fresh = next((n for n in rest if n not in number), None)
            if fresh is not None:
                work.append((fresh, iter(after[fresh])))
                continue
            work.pop()
            low[node] = min([low[node], *(low[n] for n in after[node] if n in inside)])
            if low[node] == number[node]:
                at = open_.index(node)
                out.append(open_[at:])
                inside.difference_update(open_[at:])
                del open_[at:]
    return out


def runs(schedule: Schedule) -> bool:
    """True when no action of the schedule waits for itself."""
    return not graph(schedule).stuck


def message_pairs(index: Index) -> tuple[Array, Array]:
    """The positions of every SEND, in the order they stand, and of the RECV of each (`n`: none)."""
    sends, receives = [], []
    for kind in SENDS:
        at = np.flatnonzero(index.kinds == kind)
        other, offset = PARTNER[kind]
        sends.append(at)
        receives.append(index.find(other, index.stages[at] + offset, index.mbs[at]))
    sent = np.concatenate(sends)
    order = np.argsort(sent)
    return sent[order], np.concatenate(receives)[order].astype(np.int64)
