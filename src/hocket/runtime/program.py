"""What one rank does, one entry after the other: the lowered order with its waits made explicit.

Plain data, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from hocket.deps import FORWARDS, MESSAGE, NEEDS, RECEIVES, SENDS
from hocket.engine import longest_path
from hocket.graph import Index, graph
from hocket.ir import Action, Kind, Schedule, action_of, kinds_of

WINDOW = 4  # messages of an evaluation on their way from one rank


class Role(Enum):
    """What an entry does with its action."""

    RUN = "run"  # compute
    SEND = "send"
    POST = "post"  # of a RECV, where it stands
    WAIT = "wait"  # of a RECV, where its consumer stands
    HAND = "hand"  # a result to the neighbour stage of the same rank
    FREE = "free"  # of a SEND that is surely complete
    RELEASE = "release"  # of a SEND, which is waited for


class Entry(NamedTuple):
    """One thing to do. `action` is the position of its action in the lowered order."""

    role: Role
    action: int


@dataclass(frozen=True, eq=False)
class Program:
    """The entries of one rank, and what its actions need.

    `peer[a]`: the rank that SEND or RECV `a` speaks to. `local[a]`: the computations of the same
    rank that computation `a` needs.
    """

    schedule: Schedule
    rank: int
    entries: tuple[Entry, ...]
    peer: dict[int, int]
    local: dict[int, list[int]]

    def action(self, entry: Entry) -> Action:
        """The action of an entry."""
        return action_of(self.schedule.codes[entry.action])


def programs(schedule: Schedule, ranks: Sequence[int] | None = None) -> list[Program]:
    """The programs of all ranks of a lowered schedule, or of some."""
    links = _Links(schedule)
    sequences = [_sequence(schedule, rank) for rank in range(schedule.p)]
    releases = _releases(links, sequences)
    return [
        Program(schedule, r, links.entries(sequences[r], releases), links.peer, links.local)
        for r in (range(schedule.p) if ranks is None else ranks)
    ]


def _releases(links: _Links, sequences: list[list[int]]) -> dict[int, list[int]]:
    """For each action the SENDs of its rank that are surely complete once its messages are there.

    A rank knows how far another one has come from the messages it got, directly or through third
    ranks; a SEND is complete when the receiver has come to the action that waits for it. Without
    backwards nothing comes back: then a SEND stands still once WINDOW earlier ones have left, until
    one of them is complete. All ranks are walked through together, and a SEND waits only for one
    whose receiver the walk has brought that far, so the walk itself is a run without a deadlock.
    """
    p = len(sequences)
    at = {a: i for seq in sequences for i, a in enumerate(seq)}
    window = WINDOW if links.schedule.is_forward_only else None
    known = np.zeros((p, p), dtype=np.int64)  # [rank, other]: entries of other surely reached
    told: dict[int, np.ndarray] = {}
    open_: list[dict[int, int]] = [{} for _ in range(p)]  # send -> where its consumer stands
    out: dict[int, list[int]] = {}
    cursor = [0] * p
    stuck: list[int] = []  # ranks that stand still since their window is full
    moving = True
    while moving or stuck:
        hurried = stuck.pop() if stuck and not moving else None  # one of them goes on all the same
        stuck.clear()
        moving = False
        for r, seq in enumerate(sequences):
            while cursor[r] < len(seq):
                a = seq[cursor[r]]
                arrived = [links.sender[w] for w in links.waits.get(a, ())]
                if not all(s in told for s in arrived):
                    break
                full = window is not None and links.kinds[a] in SENDS and len(open_[r]) >= window
                received = (s for s, j in open_[r].items() if j < cursor[links.peer[s]])
                oldest = next(received, None) if full else None
                if full and oldest is None and r != hurried:
                    stuck.append(r)
                    break
                hurried = None if r == hurried else hurried
                for s in arrived:
                    np.maximum(known[r], told.pop(s), out=known[r])
                known[r, r] = cursor[r] = cursor[r] + 1
                moving = True
                if links.kinds[a] in SENDS:
                    told[a] = known[r].copy()
                    if oldest is not None:
                        open_[r].pop(oldest)
                        out.setdefault(a, []).append(oldest)
                    open_[r][a] = at[links.consumer[a]]
                elif arrived:
                    done = [s for s, j in open_[r].items() if j < known[r, links.peer[s]]]
                    for s in done:
                        del open_[r][s]
                    out[a] = done
    return out


class _Links:
    """Who waits for which receive and who hands to whom, from the table of needs."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.index = index = Index(schedule)
        self.kinds = index.kinds.tolist()
        self.rank = schedule.rank_of_queue[schedule.queue_of_slot[schedule.slot_of_action]].tolist()
        self.waits: dict[int, list[int]] = {}
        self.hands: set[int] = set()
        self.peer: dict[int, int] = {}
        self.local: dict[int, list[int]] = {}
        self.sender: dict[int, int] = {}  # of a RECV, its SEND
        self.consumer: dict[int, int] = {}  # of a SEND, the computation that waits for it
        for kind, needs in NEEDS.items():
            positions = np.flatnonzero(index.kinds == kind)
            for need in needs if len(positions) else ():
                having, found = index.sources(need, positions)
                for a, source in zip(having.tolist(), found.tolist(), strict=True):
                    if source < index.n:
                        self._link(a, source)
        for a, receives in self.waits.items():
            self.consumer |= {self.sender[r]: a for r in receives}

    def _link(self, action: int, source: int) -> None:
        kind, wanted = self.kinds[action], self.kinds[source]
        if kind in RECEIVES:
            self.peer[action], self.peer[source] = self.rank[source], self.rank[action]
            self.sender[action] = source
        elif wanted in RECEIVES:
            self.waits.setdefault(action, []).append(source)
        elif kind not in SENDS:
            self.local.setdefault(action, []).append(source)
            if wanted in MESSAGE and self._other_stage(action, source):
                self.hands.add(source)

    def _other_stage(self, action: int, source: int) -> bool:
        return bool(self.index.stages[action] != self.index.stages[source])

    def entries(self, sequence: list[int], releases: dict[int, list[int]]) -> tuple[Entry, ...]:
        """The entries of actions in the order in which a rank runs them."""
        out: list[Entry] = []
        open_: dict[int, None] = {}
        for a in sequence:
            kind = self.kinds[a]
            out += [Entry(Role.WAIT, receive) for receive in self.waits.get(a, ())]
            for send in releases.get(a, ()):
                out.append(Entry(Role.RELEASE if kind in SENDS else Role.FREE, send))
                del open_[send]
            role = Role.POST if kind in RECEIVES else Role.SEND if kind in SENDS else Role.RUN
            out.append(Entry(role, a))
            if kind in SENDS:
                open_[a] = None
            elif a in self.hands:
                out.append(Entry(Role.HAND, a))
        out += [Entry(Role.RELEASE, send) for send in open_]
        return tuple(out)


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
    kinds = [Kind(k) for k in kinds_of(schedule.codes).tolist()]
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
_RANKING = {k: 0 if k in RECEIVES else 1 if k in FORWARDS else 3 if k in SENDS else 2 for k in Kind}


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
