"""The schedule as a graph of integer arrays, and the longest path through it.

Built from the table in `deps.py`, never from a rule of its own. Imports ir, deps, errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hocket.deps import NEEDS, Need
from hocket.ir import Array, Kind, Schedule, kinds_of, mbs_of, stages_of


class Index:
    """Finds actions by arithmetic: `index.find(kind, stages, mbs)` gives positions in `codes`.

    A position equal to `n` means that no such action stands in the order.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.n = len(schedule.codes)
        self.kinds = kinds_of(schedule.codes)
        self.stages = stages_of(schedule.codes)
        self.mbs = mbs_of(schedule.codes)
        self.lengths = schedule.placement.lengths
        self._stages = schedule.placement.n_stages
        self._m = schedule.m
        self.slices = schedule.placement.slices
        self._tables: dict[Kind, Array] = {}
        for kind in Kind:
            (positions,) = np.nonzero(self.kinds == kind)
            if len(positions):
                table = np.full(self._stages * self._m, self.n, dtype=np.int32)
                inside = (self.stages[positions] < self._stages) & (self.mbs[positions] < self._m)
                positions = positions[inside]
                table[self.stages[positions] * self._m + self.mbs[positions]] = positions
                self._tables[kind] = table

    def find(self, kind: Kind, stages: Array, mbs: Array) -> Array:
        """Positions of (kind, stage, mb); stages must lie on the microbatches' paths."""
        table = self._tables.get(kind)
        if table is None:
            return np.full(len(stages), self.n, dtype=np.int32)
        return table[stages * self._m + mbs]

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


class Missing(NamedTuple):
    """A need that nothing in the order satisfies."""

    action: int
    need: Need


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes in chains, and what each node waits for.

    A node is a slot of computation, or one communication. The nodes of a chain run one after
    the other; node i needs `needs[need_starts[i]:need_starts[i + 1]]`. Edge e goes from action
    `source[e]` to action `target[e]`; `crosses[e]` says that the two are on different ranks.
    """

    schedule: Schedule
    node_of_action: Array
    chains: Array
    need_starts: Array
    needs: Array
    source: Array
    target: Array
    crosses: Array
    missing: tuple[Missing, ...]

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return len(self.need_starts) - 1

    @cached_property
    def first_action(self) -> Array:
        """The first action of each node, `[node]`."""
        first = np.empty(self.n_nodes, dtype=np.int64)
        first[self.node_of_action[::-1]] = np.arange(len(self.node_of_action))[::-1]
        return first

    def edges_of(self, node: int) -> range:
        """The edges that a node waits for."""
        return range(int(self.need_starts[node]), int(self.need_starts[node + 1]))


def graph(schedule: Schedule, *, blocking: bool = False) -> Graph:
    """The dependency graph of a schedule.

    A RECV that stands in the order is posted there and holds nobody up but its consumer; with
    `blocking` it holds its queue until the message is there.
    """
    index = Index(schedule)
    node_of_action, chains, posted = _nodes(schedule, index, blocking)
    sources, targets, missing = _edges(index)
    if posted is not None:
        before, after = posted
        sources, targets = np.concatenate([sources, before]), np.concatenate([targets, after])
    return assemble(schedule, node_of_action, chains, sources, targets, missing)


def edges(schedule: Schedule) -> tuple[Array, Array]:
    """All (source, target) pairs of actions that the table of needs asks for."""
    sources, targets, _ = _edges(Index(schedule))
    return sources, targets


def _edges(index: Index) -> tuple[Array, Array, tuple[Missing, ...]]:
    """Action to action edges from the table of needs, and the needs left open."""
    sources, targets, missing = [], [], []
    inside = index.mbs < len(index.lengths)
    inside[inside] &= index.stages[inside] < index.lengths[index.mbs[inside]]
    for kind, needs in NEEDS.items():
        (positions,) = np.nonzero((index.kinds == kind) & inside)
        for need in needs if len(positions) else ():
            if need.step and index.slices == 1:
                continue
            having, found = index.sources(need, positions)
            there = found < index.n
            sources.append(found[there])
            targets.append(having[there])
            missing += [Missing(int(a), need) for a in having[~there]]
    if not sources:
        return np.empty(0, np.int32), np.empty(0, np.int32), tuple(missing)
    return np.concatenate(sources), np.concatenate(targets), tuple(missing)


def _nodes(
    schedule: Schedule, index: Index, blocking: bool
) -> tuple[Array, Array, tuple[Array, Array] | None]:
    """Node of each action, chain offsets, and the edges that hold a posted RECV to its post."""
    if not schedule.has_communication:
        return schedule.slot_of_action, schedule.starts, None
    is_comm = index.kinds >= Kind.SEND_F
    alone = np.repeat(schedule.widths == 1, schedule.widths) | is_comm
    opens = alone.copy()
    opens[schedule.slots[:-1][schedule.widths > 0]] = True
    raw = np.cumsum(opens) - 1  # nodes in the order they stand
    first = np.flatnonzero(opens)
    queue = schedule.queue_of_slot[schedule.slot_of_action[first]]
    kinds = index.kinds[first]
    apart = ((kinds == Kind.RECV_F) | (kinds == Kind.RECV_B)) & (not blocking)
    serial = np.flatnonzero(~apart)
    counts = np.bincount(queue[serial], minlength=len(schedule.queues))
    lengths = np.concatenate([counts, np.ones(apart.sum(), dtype=np.int64)])
    chains = np.concatenate([[0], np.cumsum(lengths)])
    order = np.concatenate([serial, np.flatnonzero(apart)])
    rank = np.empty(len(order), dtype=np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    # a posted RECV starts after the serial node that stands before it in its queue
    last = np.maximum.accumulate(np.where(apart, -1, np.arange(len(first))))
    own = np.flatnonzero(apart)
    has = (last[own] >= 0) & (queue[np.maximum(last[own], 0)] == queue[own])
    return rank[raw], chains, (first[last[own[has]]], first[own[has]])


def assemble(
    schedule: Schedule,
    node_of_action: Array,
    chains: Array,
    sources: Array,
    targets: Array,
    missing: tuple[Missing, ...],
) -> Graph:
    """Sorts the edges by node and drops those that the chain implies."""
    n_nodes = int(chains[-1])
    chain_of = np.repeat(np.arange(len(chains) - 1, dtype=np.int32), np.diff(chains))
    from_node, to_node = node_of_action[sources], node_of_action[targets]
    implied = (chain_of[from_node] == chain_of[to_node]) & (from_node <= to_node)
    sources, targets = sources[~implied], targets[~implied]
    from_node, to_node = from_node[~implied], to_node[~implied]
    by_target = np.argsort(to_node, kind="stable")
    sources, targets, needs = sources[by_target], targets[by_target], from_node[by_target]
    need_starts = np.zeros(n_nodes + 1, dtype=np.int64)
    np.cumsum(np.bincount(to_node, minlength=n_nodes), out=need_starts[1:])
    rank = schedule.rank_of_queue[schedule.queue_of_slot[schedule.slot_of_action]]
    return Graph(
        schedule=schedule,
        node_of_action=node_of_action,
        chains=chains,
        need_starts=need_starts,
        needs=needs,
        source=sources,
        target=targets,
        crosses=rank[sources] != rank[targets],
        missing=missing,
    )


class Times(NamedTuple):
    """Start and end of every node; `stuck` lists, for each chain that stopped, its next node."""

    start: list[Any]
    end: list[Any]
    stuck: list[int]


def longest_path(graph: Graph, durations: Array, delays: Array) -> Times:
    """When each node starts and ends if every node starts as early as it can.

    Units and exactness are those of the arrays: integers stay integers.
    """
    n, chains = graph.n_nodes, graph.chains.tolist()
    start, end = [0] * n, [0] * n
    cursor = chains[:-1]
    done = _advance(
        chains, graph.need_starts.tolist(), graph.needs.tolist(),
        durations.tolist(), delays.tolist(), start, end, cursor,
        [False] * n, [-1] * n, [-1] * len(cursor), list(range(len(cursor))),
    )  # fmt: skip
    stuck = [] if done == n else [i for i, last in zip(cursor, chains[1:], strict=True) if i < last]
    return Times(start, end, stuck)


def _advance(
    chains, need_starts, needs, durations, delays, start, end, cursor,
    done, waiting, next_waiting, stack,
):  # fmt: skip
    """Runs every chain until all stand still; returns the number of nodes done.

    `stack` holds the chains that may move; a chain that meets an unfinished node joins the list
    of those waiting for it. Plain loops over plain sequences: works on lists and on arrays.
    """
    top, n_done = len(stack), 0
    while top:
        top -= 1
        chain = stack[top]
        i, last = cursor[chain], chains[chain + 1]
        clock = end[i - 1] if i > chains[chain] else 0
        moving = True
        while moving and i < last:
            time = clock
            for e in range(need_starts[i], need_starts[i + 1]):
                j = needs[e]
                if not done[j]:
                    next_waiting[chain], waiting[j] = waiting[j], chain
                    moving = False
                    break
                ready = end[j] + delays[e]
                if ready > time:
                    time = ready
            if moving:
                start[i] = time
                clock = end[i] = time + durations[i]
                done[i] = True
                n_done += 1
                woken = waiting[i]
                while woken >= 0:
                    stack[top] = woken
                    top += 1
                    woken = next_waiting[woken]
                i += 1
        cursor[chain] = i
    return n_done


def cycle(graph: Graph, times: Times) -> Iterator[tuple[int, int]]:
    """One circle of waits among stuck nodes: pairs (node, edge it waits for).

    Each node stands at the head of its chain; the next pair's node heads the chain that holds
    the previous pair's source.
    """
    heads = {
        int(np.searchsorted(graph.chains, node, side="right") - 1): node for node in times.stuck
    }
    ended = np.zeros(graph.n_nodes, dtype=bool)
    for chain in range(len(graph.chains) - 1):
        ended[graph.chains[chain] : heads.get(chain, graph.chains[chain + 1])] = True
    seen: dict[int, int] = {}
    walk: list[tuple[int, int]] = []
    node = times.stuck[0]
    while node not in seen:
        seen[node] = len(walk)
        edge = next(e for e in graph.edges_of(node) if not ended[graph.needs[e]])
        walk.append((node, edge))
        chain = int(np.searchsorted(graph.chains, graph.needs[edge], side="right") - 1)
        node = heads[chain]
    yield from walk[seen[node] :]


def runs(schedule: Schedule) -> bool:
    """True when no action of the schedule waits for itself."""
    g = graph(schedule)
    zeros = np.zeros(max(g.n_nodes, len(g.needs)), dtype=np.int64)
    return not longest_path(g, zeros[: g.n_nodes], zeros[: len(g.needs)]).stuck
