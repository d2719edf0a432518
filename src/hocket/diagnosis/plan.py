"""What every rank should be doing: the messages of a schedule, and how far each rank has come."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hocket.deps import ROWS
from hocket.errors import UsageError
from hocket.graph import graph
from hocket.ir import Action, Schedule, action_of, mbs_of


class Message(NamedTuple):
    """A result on its way: by which slot it is sent and for which it is, and by which ranks."""

    sender: int
    receiver: int
    source: int
    target: int
    action: Action

    def __str__(self) -> str:
        what = "gradient" if ROWS[self.action.kind].backward else "output"
        return f"the {what} of microbatch {self.action.mb} from rank {self.sender}"


class Progress(NamedTuple):
    """What one rank has sent to and received from each other rank, counted over all steps.

    waits: the rank whose message it waits for, and which one that is. ended: it is past its step.
    """

    sent: Mapping[int, int]
    received: Mapping[int, int]
    waits: tuple[int, int] | None
    ended: bool = False


class Place(NamedTuple):
    """Where a rank is in its step: at which slot, and which slots before it have sent nothing.

    Slot None: after the last one. message: what it waits for.
    """

    step: int
    slot: int | None
    skipped: tuple[int, ...]
    message: Message | None


@dataclass(frozen=True)
class Plan:
    """The order of a pipeline whose rank r is `ranks[r]` among all."""

    schedule: Schedule
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.schedule.queues) != self.schedule.p:
            raise UsageError(
                f"{self.schedule.name} has several queues per rank, and dumps do not say on which "
                "one a message was; leave out the schedule"
            )

    @cached_property
    def messages(self) -> list[Message]:
        """All messages of a step, in the order in which each rank sends them."""
        s, g = self.schedule, graph(self.schedule)
        owner = s.rank_of_queue[s.queue_of_slot]
        edges = (x[g.crosses].tolist() for x in (g.needs, g.target, s.codes[g.source]))
        out = []
        for source, target, code in sorted(zip(*edges, strict=True)):
            slot = int(s.slot_of_action[target])
            ends = self.ranks[owner[source]], self.ranks[owner[slot]]
            out.append(Message(*ends, source, slot, action_of(code)))
        return out

    @cached_property
    def sent(self) -> dict[tuple[int, int], list[Message]]:
        """By sender and receiver, as they are sent."""
        out: dict[tuple[int, int], list[Message]] = {}
        for one in self.messages:
            out.setdefault((one.sender, one.receiver), []).append(one)
        return out

    @cached_property
    def received(self) -> dict[tuple[int, int], list[Message]]:
        """By sender and receiver, as they are needed."""
        return {pair: sorted(some, key=lambda x: x.target) for pair, some in self.sent.items()}

    @cached_property
    def sends_of(self) -> dict[int, list[tuple[Message, int]]]:
        """Of each slot its messages, each with its number among those of the two ranks."""
        out: dict[int, list[tuple[Message, int]]] = {}
        for some in self.sent.values():
            for number, one in enumerate(some):
                out.setdefault(one.source, []).append((one, number))
        return out

    @cached_property
    def needs_of(self) -> dict[int, list[tuple[Message, int]]]:
        """Of each slot the messages that it needs, each with its number as they are received."""
        out: dict[int, list[tuple[Message, int]]] = {}
        for some in self.received.values():
            for number, one in enumerate(some):
                out.setdefault(one.target, []).append((one, number))
        return out

    def slots(self, rank: int) -> range:
        """The slots of a rank in order."""
        own = self.ranks.index(rank)
        queue = next(i for i, q in enumerate(self.schedule.queues) if q.rank == own)
        return range(int(self.schedule.starts[queue]), int(self.schedule.starts[queue + 1]))

    def name(self, slot: int | None) -> str:
        """A slot in words."""
        return "the end of the step" if slot is None else str(self.schedule.slot(slot))

    def mbs(self, slot: int) -> set[int]:
        """The microbatches of a slot."""
        s = self.schedule
        return set(mbs_of(s.codes[s.slots[slot] : s.slots[slot + 1]]).tolist())

    def has_sent(self, one: Message, number: int, seen: Progress, step: int) -> bool:
        """Whether a rank with this progress has sent a message in this step."""
        whole = len(self.sent[one.sender, one.receiver])
        return seen.sent.get(one.receiver, 0) > step * whole + number

    def has_received(self, one: Message, number: int, seen: Progress, step: int) -> bool:
        """Whether a rank with this progress has received a message in this step."""
        whole = len(self.received[one.sender, one.receiver])
        return seen.received.get(one.sender, 0) > step * whole + number

    def place(self, rank: int, seen: Progress) -> Place:
        """Where a rank is that has come so far."""
        counts = [
            (seen.sent.get(b, 0) if a == rank else seen.received.get(a, 0), len(some))
            for (a, b), some in self.sent.items()
            if rank in (a, b)
        ]
        step = max([0, *((count - 1) // whole for count, whole in counts if count)])
        message = None
        if seen.waits is not None and (seen.waits[0], rank) in self.received:
            coming = self.received[seen.waits[0], rank]
            step, number = divmod(seen.waits[1], len(coming))
            message = coming[number]
        open_ = [slot for slot in self.slots(rank) if self._is_open(slot, seen, step)]
        if message is not None:
            return Place(
                step, message.target, tuple(x for x in open_ if x < message.target), message
            )
        if seen.ended or not open_:
            return Place(step, None, tuple(open_), None)
        return Place(step, open_[0], (), None)

    def _is_open(self, slot: int, seen: Progress, step: int) -> bool:
        sends = self.sends_of.get(slot, ())
        return any(not self.has_sent(*one, seen, step) for one in sends)

    def posted(self, rank: int) -> list[tuple[str, int, Message]]:
        """What a rank posts in a step that receives when it needs to: what, with whom, which."""
        out = []
        for slot in self.slots(rank):
            out += [("recv", one.sender, one) for one, _ in self.needs_of.get(slot, ())]
            out += [("send", one.receiver, one) for one, _ in self.sends_of.get(slot, ())]
        return out

    def healthy(
        self, seen: Mapping[int, Progress], step: int, missing: Mapping[int, int | None]
    ) -> tuple[dict[int, Message | None], set[int]]:
        """Which message each missing rank waits for, if it ran as far as the others let it.

        None where nothing holds it up; and the slots that they then have run. seen: the progress
        of the others. missing: ranks, and the slot at which one stands still for a reason of its
        own.
        """
        at = {
            rank: [slot for slot in self.slots(rank) if until is None or slot < until]
            for rank, until in missing.items()
        }
        done: set[int] = set()
        moved = True
        while moved:
            moved = False
            for line in at.values():
                while line and self._lacks(line[0], seen, step, done) is None:
                    done.add(line.pop(0))
                    moved = True
        lacks = {
            rank: self._lacks(line[0], seen, step, done) if line else None
            for rank, line in at.items()
        }
        return lacks, done

    def _lacks(
        self, slot: int, seen: Mapping[int, Progress], step: int, done: Collection[int]
    ) -> Message | None:
        """The first message that a slot needs and that was not sent."""
        for one, _ in self.needs_of.get(slot, ()):
            if one.sender not in seen:
                if one.source not in done:
                    return one
                continue
            number = self.sent[one.sender, one.receiver].index(one)
            if not self.has_sent(one, number, seen[one.sender], step):
                return one
        return None
