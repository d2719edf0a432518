"""What one rank does, one entry after the other: the lowered order with its waits made explicit.

Plain data, no torch. Imports ir, deps, graph; the needs come from their table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from hocket.deps import MESSAGE, NEEDS
from hocket.graph import Index, graph, longest_path
from hocket.ir import Action, Kind, Schedule, action_of

RECEIVES = (Kind.RECV_F, Kind.RECV_B)
SENDS = (Kind.SEND_F, Kind.SEND_B)
BACKWARDS = (Kind.B, Kind.I, Kind.W)


class Role(Enum):
    """What an entry does with its action."""

    RUN = "run"  # compute
    SEND = "send"
    POST = "post"  # of a RECV, where it stands
    WAIT = "wait"  # of a RECV, where its consumer stands
    HAND = "hand"  # a result to the neighbour stage of the same rank
    RELEASE = "release"  # of a SEND, once it is surely complete


class Entry(NamedTuple):
    """One thing to do. `action` is the position of its action in the lowered order."""

    role: Role
    action: int


@dataclass(frozen=True, eq=False)
class Program:
    """The entries of one rank, and who is on the other side of its messages.

    `peer[a]`: the rank that SEND or RECV `a` speaks to. `last[s]`: whether stage s ends the path
    of a microbatch is asked of the placement.
    """

    schedule: Schedule
    rank: int
    entries: tuple[Entry, ...]
    peer: dict[int, int]

    def action(self, entry: Entry) -> Action:
        """The action of an entry."""
        return action_of(self.schedule.codes[entry.action])


def programs(schedule: Schedule) -> list[Program]:
    """The program of every rank of a lowered schedule."""
    links = _Links(schedule)
    sequences = [_sequence(schedule, rank) for rank in range(schedule.p)]
    return [Program(schedule, r, links.entries(seq), links.peer) for r, seq in enumerate(sequences)]


def program(schedule: Schedule, rank: int) -> Program:
    """The program of one rank of a lowered schedule."""
    links = _Links(schedule)
    return Program(schedule, rank, links.entries(_sequence(schedule, rank)), links.peer)


class _Links:
    """Who waits for which receive and who hands to whom, from the table of needs."""

    def __init__(self, schedule: Schedule) -> None:
        self.index = index = Index(schedule)
        self.kinds = index.kinds.tolist()
        self.rank = schedule.rank_of_queue[schedule.queue_of_slot[schedule.slot_of_action]].tolist()
        self.waits: dict[int, list[int]] = {}
        self.hands: set[int] = set()
        self.peer: dict[int, int] = {}
        for kind, needs in NEEDS.items():
            positions = np.flatnonzero(index.kinds == kind)
            for need in needs if len(positions) else ():
                having, found = index.sources(need, positions)
                for a, source in zip(having.tolist(), found.tolist(), strict=True):
                    if source < index.n:
                        self._link(a, source)

    def _link(self, action: int, source: int) -> None:
        kind, wanted = self.kinds[action], self.kinds[source]
        if kind in RECEIVES:
            self.peer[action], self.peer[source] = self.rank[source], self.rank[action]
        elif wanted in RECEIVES:
            self.waits.setdefault(action, []).append(source)
        elif wanted in MESSAGE and kind not in SENDS and self._other_stage(action, source):
            self.hands.add(source)

    def _other_stage(self, action: int, source: int) -> bool:
        return bool(self.index.stages[action] != self.index.stages[source])

    def entries(self, sequence: list[int]) -> tuple[Entry, ...]:
        """The entries of actions in the order in which a rank runs them."""
        out: list[Entry] = []
        sent: dict[tuple[int, tuple[int, int]], int] = {}  # sends whose gradient has not come back
        for a in sequence:
            kind = self.kinds[a]
            if kind in RECEIVES:
                out.append(Entry(Role.POST, a))
                continue
            if kind in SENDS:
                out.append(Entry(Role.SEND, a))
                sent[kind, self._key(a)] = a
                continue
            for receive in self.waits.get(a, ()):
                out.append(Entry(Role.WAIT, receive))
                if self.kinds[receive] == Kind.RECV_B:
                    done = sent.pop((Kind.SEND_F, self._key(receive)), None)
                    if done is not None:
                        out.append(Entry(Role.RELEASE, done))
            out.append(Entry(Role.RUN, a))
            if a in self.hands:
                out.append(Entry(Role.HAND, a))
        out += [Entry(Role.RELEASE, a) for a in sent.values()]
        return tuple(out)

    def _key(self, action: int) -> tuple[int, int]:
        return int(self.index.stages[action]), int(self.index.mbs[action])


def _sequence(schedule: Schedule, rank: int) -> list[int]:
    """Positions of a rank's actions in the order in which they run.

    A rank's queues are merged along one order of the whole schedule in which every action comes
    after what it needs; so the merge cannot deadlock either.
    """
    queues = [q for q, queue in enumerate(schedule.queues) if queue.rank == rank]
    slots = [i for q in queues for i in range(schedule.starts[q], schedule.starts[q + 1])]
    if len(queues) > 1:
        g = graph(schedule)
        times = longest_path(
            g, np.ones(g.n_nodes, dtype=np.int64), np.zeros(len(g.needs), dtype=np.int64)
        )
        first = schedule.slots[slots]
        when = [times.start[g.node_of_action[a]] for a in first.tolist()]
        slots = [slot for _, slot in sorted(zip(when, slots, strict=True))]
    return _unfold(schedule, slots)


def _unfold(schedule: Schedule, slots: list[int]) -> list[int]:
    """The actions of the slots; each SEND behind a slot moves up to the part it belongs to."""
    kinds = [Kind(k) for k in (schedule.codes & 15).tolist()]
    bounds = schedule.slots.tolist()
    out: list[int] = []
    open_parts: list[int] = []  # parts of the last slot of computation, in running order
    for slot in slots:
        parts = list(range(bounds[slot], bounds[slot + 1]))
        if len(parts) == 1 and kinds[parts[0]] in SENDS and len(open_parts) > 1:
            at = _after_source(schedule, out, open_parts, parts[0])
            out.insert(at, parts[0])
            continue
        parts.sort(key=lambda a: _RANKING[kinds[a]])
        out += parts
        open_parts = parts
    return out


# In a slot, receives are posted first and forwards run before backwards, so that their results
# are under way meanwhile; sends follow what they carry.
_RANKING = {k: 0 if k in RECEIVES else 1 if k == Kind.F else 3 if k in SENDS else 2 for k in Kind}


def _after_source(schedule: Schedule, out: list[int], parts: list[int], send: int) -> int:
    """Where in `out` a SEND goes: behind the part it carries and behind every earlier SEND."""
    action = action_of(schedule.codes[send])
    at = len(out)
    while at > 0:
        before = out[at - 1]
        other = action_of(schedule.codes[before])
        carries = (other.stage, other.mb) == (action.stage, action.mb)
        if before not in parts or other.kind.is_communication or carries:
            return at
        at -= 1
    return at
