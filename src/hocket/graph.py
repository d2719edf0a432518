"""The schedule as a graph of integer arrays.

Built from the table in `deps.py`, never from a rule of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from hocket import compiled
from hocket.deps import IS_RECEIVE, NEEDS, PARTNER, SENDS, Need
from hocket.ir import Array, Kind, Schedule, kinds_of, mbs_of, offsets, stages_of

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
        self.kinds, self.stages = kinds_of(schedule.codes), stages_of(schedule.codes)
        self.mbs = mbs_of(schedule.codes)
        cells = self.n_stages * self.m
        known = self.mbs < self.m
        known[known] = self.stages[known] < self.lengths[self.mbs[known]]
        self.known, at = known, np.flatnonzero(known)
        kinds = self.kinds[at]
        self.counts = np.bincount(kinds, minlength=len(Kind))
        self.table = np.empty(len(Kind) * cells, dtype=np.int32)
        for kind in np.flatnonzero(self.counts).tolist():
            self.table[kind * cells : (kind + 1) * cells] = self.n
        self.table[kinds * cells + self.stages[at] * self.m + self.mbs[at]] = at

    def find(self, kind: Kind, stages: Array, mbs: Array) -> Array:
        """Positions of (kind, stage, mb); stages must lie on the microbatches' paths."""
        if not self.counts[kind]:
            return np.full(len(stages), self.n, dtype=np.int32)
        row = int(kind) * self.n_stages * self.m
        return self.table[row + stages * self.m + mbs]

    def positions(self, kind: Kind) -> Array:
        """Where the actions of a kind stand, without those of no stage or microbatch."""
        if not self.counts[kind]:
            return _NONE
        return np.flatnonzero((self.kinds == kind) & self.known)

    def sources(self, need: Need, positions: Array) -> tuple[Array, Array]:
        """Which of `positions` have this need at all, and what satisfies it (`n`: nothing)."""
        offset = need.sources[-1][1]
        if need.step and self.slices == 1:
            return _NONE, _NONE
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


class Rules(NamedTuple):
    """`deps.NEEDS` as arrays, for the loops.

    Needs `need_of_kind[k]:need_of_kind[k + 1]` are those of kind k; need i exists where the stage
    at `offset[i]` does, in the slice at `step[i]`, and is met by the first of the sources
    `source_of[i]:source_of[i + 1]` that the order contains. Source s is of `kind[s]`, `shift[s]`
    stages on.
    """

    need_of_kind: Array
    offset: Array
    step: Array
    source_of: Array
    kind: Array
    shift: Array


@cache
def rules(*, sliced: bool) -> Rules:
    """The needs that can exist in an order, with slices or without."""
    table = [[n for n in NEEDS[kind] if sliced or not n.step] for kind in Kind]
    needs = [need for row in table for need in row]
    kinds, shifts = zip(*(source for need in needs for source in need.sources), strict=True)
    columns = (
        offsets([*map(len, table)]), [n.sources[-1][1] for n in needs], [n.step for n in needs],
        offsets([len(n.sources) for n in needs]), kinds, shifts,
    )  # fmt: skip
    return Rules(*(np.array(column, dtype=np.int64) for column in columns))


class _Nodes(NamedTuple):
    """The nodes of a schedule: `visit[first[i]:first[i + 1]]` are the actions of node i.

    Without `visit` they are those positions themselves, without `of_action` each action is a
    node. `posts[k]`: the action that a posted RECV, the k-th of the last nodes, follows;
    below 0 where it comes first.
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

    def by_node(self, values: Array) -> Array:
        """Of values by slot, `[slot]`, those of the slot of each node, `[node]`."""
        if not self.schedule.has_communication:
            return values
        return values[self.schedule.slot_of_action[self.first_action]]

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
    def receives(self) -> Array:
        """Which nodes are a RECV, `[node]`; empty where no messages stand in the order."""
        if not self.schedule.has_communication:
            return np.zeros(0, dtype=bool)
        return IS_RECEIVE[kinds_of(self.schedule.codes[self.first_action])]

    @cached_property
    def _order(self) -> tuple[Array, Array]:
        """An order in which the nodes can run, and the next node of each chain that stops."""
        n = self.n_nodes
        cursor = self.chains[:-1].copy()
        sequence = np.empty(n, dtype=np.int32)
        n_chains = len(cursor)
        n_done = compiled.run(
            topological, n, (self.chains, self.need_starts, self.needs),
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
    g = _linked(Index(schedule), _nodes_of_slots(schedule), keep=True)
    return g.source, g.target


def _linked(index: Index, nodes: _Nodes, *, keep: bool) -> Graph:
    """The graph over these nodes; with `keep` also the edges that the chains imply."""
    schedule, n, ranks = index.schedule, index.n, _ranks(index.schedule, nodes)
    fast = compiled.choose(link, n)
    if fast is None:
        return _joined(index, nodes, ranks, keep=keep)
    asked = rules(sliced=index.slices > 1)
    most = int(index.counts @ np.diff(asked.need_of_kind)) + len(nodes.posts)
    single = not len(nodes.of_action)
    need_starts = np.zeros(len(nodes.first), dtype=np.int32)
    needs, crosses = np.empty(most, dtype=np.int32), np.empty(most, dtype=bool)
    source = needs if single else np.empty(most, dtype=np.int32)
    target = _NONE if single else np.empty(most, dtype=np.int32)
    there = index.counts[asked.kind] > 0
    per_source = np.repeat(asked.step, np.diff(asked.source_of))
    cells = (asked.kind * index.n_stages + asked.shift) * index.m + per_source
    n_edges, n_open, n_late = fast(
        schedule.codes, nodes.first, nodes.visit, nodes.of_action, nodes.chains, ranks,
        nodes.posts, index.lengths, index.slices, index.table, n, keep, *asked[:3],
        offsets(there)[asked.source_of], cells[there], need_starts, needs, source, target, crosses,
    )  # fmt: skip
    return Graph(
        schedule=schedule, nodes=nodes, need_starts=need_starts, needs=needs[:n_edges],
        source=source[:n_edges], targets=target[:n_edges], crosses=crosses[:n_edges],
        n_open=n_open, n_late=n_late,
    )  # fmt: skip


def _joined(index: Index, nodes: _Nodes, ranks: Array, *, keep: bool) -> Graph:
    """What `link` makes, of whole arrays: each need of a kind by itself, then sorted by node."""
    places = {kind: index.positions(kind) for kind in Kind if index.counts[kind]}
    asked = [index.sources(need, at) for kind, at in places.items() for need in NEEDS[kind]]
    target, source = (np.concatenate(side) for side in zip((_NONE, _NONE), *asked, strict=True))
    met = source < index.n
    posted = np.flatnonzero(nodes.posts >= 0)
    behind = (
        nodes.visit[nodes.first[len(ranks) - len(nodes.posts) + posted]] if len(posted) else _NONE
    )
    edges = (
        np.append(source[met], nodes.posts[posted]), np.append(target[met], behind),
    )  # fmt: skip
    n_open = len(met) - int(np.count_nonzero(met))
    return _sorted(index.schedule, nodes, ranks, edges, keep=keep, n_open=n_open)


def _sorted(
    schedule: Schedule, nodes: _Nodes, ranks: Array, edges: tuple[Array, Array], *, keep: bool,
    n_open: int = 0,
) -> Graph:  # fmt: skip
    """The graph of these edges, (source, target), by node; with `keep` also what chains imply."""
    source, target = edges
    own = nodes.of_action if len(nodes.of_action) else np.arange(len(ranks), dtype=np.int32)
    chain = np.repeat(np.arange(len(nodes.chains) - 1), np.diff(nodes.chains))
    to, of = own[target], own[source]
    alone, behind = chain[to] != chain[of], of > to
    n_late = int(np.count_nonzero(behind & ~alone))
    place = target if not len(nodes.visit) else np.argsort(nodes.visit)[target]
    order = np.argsort(place, kind="stable")
    if not keep:
        order = order[(alone | behind)[order]]
    to, of = to[order], of[order]
    return Graph(
        schedule=schedule, nodes=nodes,
        need_starts=offsets(np.bincount(to, minlength=len(ranks))).astype(np.int32), needs=of,
        source=source[order].astype(np.int32), targets=target[order].astype(np.int32),
        crosses=ranks[to] != ranks[of], n_open=n_open, n_late=n_late,
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
    """The nodes: slots; where messages stand in the order, their sends apart from their receives.

    The sends of a slot are one node before its receives, which are one where they block, and else
    each by itself.
    """
    if not schedule.has_communication:
        return _nodes_of_slots(schedule)
    order, opens = sends_first(schedule)
    opens = opens | (IS_RECEIVE[index.kinds[order]] & (not blocking))
    raw = np.empty(index.n, dtype=np.int64)
    raw[order] = np.cumsum(opens) - 1  # nodes in the order they stand
    first = order[opens]
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


def sends_first(schedule: Schedule) -> tuple[Array, Array]:
    """The actions with the sends of each slot before its receives, and which open such a part."""
    slot, receive = schedule.slot_of_action, IS_RECEIVE[kinds_of(schedule.codes)]
    order = np.lexsort((receive, slot))
    slot, receive = slot[order], receive[order]
    opens = np.append(True, (slot[1:] != slot[:-1]) | (receive[1:] != receive[:-1]))
    return order, opens


def assemble(schedule: Schedule, sources: Array, targets: Array) -> Graph:
    """The graph of these edges over the slots, without those that a queue implies."""
    nodes = _nodes_of_slots(schedule)
    return _sorted(schedule, nodes, _ranks(schedule, nodes), (sources, targets), keep=False)


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


# --- loops, plain or compiled ------------------------------------------------------------------


def link(  # noqa: C901 (a call inside this nest would make it ten times slower, compiled)
    codes, first, visit, node_of, chains, ranks, posts, lengths, slices, table, empty,
    keep, need_of_kind, offset_of, step_of, source_of, source_cells,
    need_starts, needs, source, target, crosses,
):  # fmt: skip
    """Writes what every node waits for; returns the numbers of edges, open needs and late ones.

    Node i holds the actions `visit[first[i]:first[i + 1]]`, or those positions themselves where
    `visit` is empty, and is its own action where `node_of` is empty. Edges that a chain's own
    order implies are left out unless `keep`. Late: a source that comes later in the same chain.
    """
    m, e, n_open, n_late = len(lengths), 0, 0, 0
    n_serial = len(first) - 1 - len(posts)
    for chain in range(len(chains) - 1):
        top, last = chains[chain], chains[chain + 1]
        for i in range(top, last):
            for v in range(first[i], first[i + 1]):
                a = visit[v] if len(visit) else v
                code = codes[a]
                kind, stage, mb = kinds_of(code), stages_of(code), mbs_of(code)
                length = lengths[mb] if mb < m else 0
                if stage >= length:
                    continue
                here = stage * m + mb
                for need in range(need_of_kind[kind], need_of_kind[kind + 1]):
                    wanted, step, j = stage + offset_of[need], step_of[need], empty
                    if wanted < 0 or wanted >= length:
                        continue
                    if step != 0 and not 0 <= mb % slices + step < slices:
                        continue
                    for s in range(source_of[need], source_of[need + 1]):
                        j = table[here + source_cells[s]]
                        if j != empty:
                            break
                    if j == empty:
                        n_open += 1
                        continue
                    node = node_of[j] if len(node_of) else j
                    n_late += i < node < last
                    if keep or not top <= node <= i:
                        needs[e], source[e], crosses[e] = node, j, ranks[node] != ranks[i]
                        if len(target):
                            target[e] = a
                        e += 1
            if i >= n_serial and posts[i - n_serial] >= 0:
                j = posts[i - n_serial]
                needs[e], source[e], target[e] = node_of[j], j, visit[first[i]]
                crosses[e] = False
                e += 1
            need_starts[i + 1] = e
    return e, n_open, n_late


def topological(chains, need_starts, needs, done, waiting, next_waiting, stack, cursor, sequence):
    """Runs every chain until all stand still; returns how many nodes ran, in `sequence`.

    `stack` holds the chains that may move; a chain that meets an unfinished node joins the list
    of those waiting for it.
    """
    top, n_done = len(stack), 0
    while top:
        top -= 1
        chain = stack[top]
        i, last = cursor[chain], chains[chain + 1]
        e = need_starts[i]
        while i < last:
            stop = need_starts[i + 1]
            while e < stop and done[needs[e]]:
                e += 1
            if e < stop:
                j = needs[e]
                next_waiting[chain], waiting[j] = waiting[j], chain
                break
            done[i] = True
            sequence[n_done] = i
            n_done += 1
            woken = waiting[i]
            while woken >= 0:
                stack[top] = woken
                top += 1
                woken = next_waiting[woken]
            i += 1
        cursor[chain] = i
    return n_done
