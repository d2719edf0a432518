"""Why a job hangs: who waits for whom, and the rank at the end of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from hocket.diagnosis.plan import Message, Place, Plan, Progress
from hocket.errors import UsageError
from hocket.interop.dumps import Dump, Op
from hocket.ir import Schedule
from hocket.tables import table
from hocket.text import ranges

# Collectives whose tensors are equally large on all ranks.
_EQUAL = frozenset(("all_reduce", "broadcast", "reduce", "reduce_scatter_tensor_coalesced"))
# What a rank does that is not in a message, by a part of its innermost frames.
_DOING = {
    "torch/utils/data/": "loading data", "checkpoint": "writing or reading a checkpoint",
    "torch/serialization": "writing or reading a checkpoint", "_dynamo": "compiling",
}  # fmt: skip


class Fault(StrEnum):
    """Why a job hangs."""

    GONE = "rank gone"
    BUSY = "rank stuck outside of messages"
    SEND = "missing send"
    RECEIVES = "swapped receives"
    MICROBATCHES = "other number of microbatches"
    ORDER = "another order"
    COLLECTIVE = "collective mismatch"
    LOST = "message lost"
    CYCLE = "cycle of waits"
    NONE = "nothing waits"


_ADVICE = {
    Fault.GONE: "Look for its end in its own log and in the kernel's (out of memory, a lost host).",
    Fault.BUSY: "Look at its stack (py-spy dump) and at its host.",
    Fault.SEND: "Look for the path through its code that skips this send.",
    Fault.RECEIVES: "Let it receive in the order of the schedule, or tag the messages.",
    Fault.MICROBATCHES: "Give all ranks the same number of microbatches.",
    Fault.ORDER: "Give all ranks one schedule; `hocket check` proves it before it runs.",
    Fault.COLLECTIVE: "Let all ranks of the group call the same collective with the same sizes.",
    Fault.LOST: "Look at the link between the two, and at the limit on time of the backend.",
    Fault.CYCLE: "Run `hocket check --transport rendezvous` on the schedule.",
    Fault.NONE: "Take the dumps while the job hangs.",
}


class _Verdict(NamedTuple):
    """A fault, whose it is, the action that was not done, and a sentence."""

    fault: Fault
    culprits: tuple[int, ...]
    action: str
    text: str


class State(NamedTuple):
    """Where a rank is, in words; and the ranks that it waits for. seen: there is a dump of it."""

    rank: int
    last: str
    now: str
    waits_for: tuple[int, ...]
    seen: bool


@dataclass(frozen=True)
class Hang:
    """The verdict on a job that hangs. action: what the culprit did not do, where that is known.

    behind: the ranks that only wait for the culprits.
    """

    fault: Fault
    culprits: tuple[int, ...]
    action: str
    verdict: str
    behind: tuple[int, ...]
    states: tuple[State, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The contract of `diagnose --json` for dumps."""
        return {
            "verdict": self.verdict, "fault": str(self.fault), "ranks": list(self.culprits),
            "action": self.action, "behind": list(self.behind), "advice": _ADVICE[self.fault],
            "states": [one._asdict() for one in self.states], "notes": list(self.notes),
        }  # fmt: skip

    def __str__(self) -> str:
        rows = [
            [str(x.rank), x.last, x.now, ranges(x.waits_for) if x.waits_for else None]
            for x in self.states
        ]
        parts = [f"{self.verdict}\n{_ADVICE[self.fault]}"]
        if self.behind:
            only = "Rank" if len(self.behind) == 1 else "Ranks"
            verb = "waits" if len(self.behind) == 1 else "wait"
            parts.append(f"{only} {ranges(self.behind)} only {verb} behind that.")
        parts.append(table(rows, ["rank", "last done", "in progress", "waits for"]))
        return "\n\n".join([*parts, *(f"note: {note}" for note in self.notes)])


def diagnose_hang(dumps: Sequence[Dump], schedule: Schedule | None = None) -> Hang:
    """Who is to blame that a job hangs, from the dumps of its ranks or of some of them.

    schedule: what each pipeline runs; without it actions have no names, and ranks without a dump
    are not looked behind.

    Raises: UsageError where no group of ranks can have run the schedule.
    """
    return _Case({one.rank: one for one in dumps}, schedule).verdict()


class _Case:
    """The evidence: dumps by rank, what each waits for, and the plan of each pipeline."""

    def __init__(self, dumps: dict[int, Dump], schedule: Schedule | None) -> None:
        self.dumps = dumps
        named = {r for d in dumps.values() for ranks in d.groups.values() for r in ranks}
        peers = {op.peer for d in dumps.values() for op in d.ops if op.peer is not None}
        self.ranks = sorted({*dumps, *named, *peers})
        self.plans = {} if schedule is None else self._plans(schedule)
        self.progress = {rank: self._progress(rank) for rank in dumps}

    def _plans(self, schedule: Schedule) -> dict[int, Plan]:
        """The plan of each rank's pipeline: the group in which it sends and receives."""
        groups = {
            d.groups[op.group[0]]
            for d in self.dumps.values() for op in d.ops
            if op.is_message and op.group[0] in d.groups
        }  # fmt: skip
        fitting = [group for group in groups if len(group) == schedule.p]
        if not fitting and len(self.ranks) <= schedule.p:
            fitting = [tuple(range(schedule.p))]
            self.ranks = sorted({*self.ranks, *fitting[0]})
        if not fitting:
            sizes = ", ".join(map(str, sorted({len(group) for group in groups}))) or "none"
            raise UsageError(
                f"{schedule.name} has {schedule.p} ranks, but the groups that exchange messages "
                f"have {sizes}; give the schedule of one pipeline"
            )
        return {
            rank: plan for group in fitting for plan in [Plan(schedule, group)] for rank in group
        }

    def now(self, rank: int) -> Op | None:
        """The operation that a rank waits for; None where it waits for none."""
        dump = self.dumps[rank]
        own = [op for op in dump.ops if not op.done and (op.waited or not dump.own)]
        return own[0] if own else None

    def _progress(self, rank: int) -> Progress:
        ops, now = self.dumps[rank].ops, self.now(rank)
        waits = (now.other, now.seq) if now is not None and now.kind == "recv" else None
        messages = [i for i, op in enumerate(ops) if op.is_message]
        after = any(not op.is_message for op in ops[messages[-1] :]) if messages else False
        return Progress(
            Counter(op.other for op in ops if op.kind == "send"),
            Counter(op.other for op in ops if op.kind == "recv" and op.done),
            waits, after and waits is None,
        )  # fmt: skip

    @cached_property
    def places(self) -> dict[int, Place]:
        """Where each rank is that has a dump and a plan."""
        return {r: self.plans[r].place(r, p) for r, p in self.progress.items() if r in self.plans}

    @cached_property
    def inferred(self) -> dict[int, Message | None]:
        """What each rank without a dump waits for; None where it stands still by itself.

        Others wait for what a healthy rank would have sent; so one stands still. Of these ranks
        each that alone explains all waits may be the one; where none does, several stand still.
        """
        out: dict[int, Message | None] = {}
        for plan in {id(plan): plan for plan in self.plans.values()}.values():
            places = [self.places[rank] for rank in plan.ranks if rank in self.places]
            step = min((place.step for place in places), default=0)
            due = [place.message for place in places if place.message is not None]
            none: dict[int, int | None] = {r: None for r in plan.ranks if r not in self.dumps}
            lacks, done = plan.healthy(self.progress, step, none)
            still = [one.sender for one in due if one.source in done]
            alone = []
            for rank in [*dict.fromkeys(still), *none] if still else ():
                stopped, ran = plan.healthy(
                    self.progress, step, none | {rank: self._stop(plan, step, due, rank)}
                )
                if rank not in alone and not any(one.source in ran for one in due):
                    lacks = lacks if alone else stopped
                    alone.append(rank)
            out |= lacks | dict.fromkeys(alone or still)
        return out

    def _stop(self, plan: Plan, step: int, due: list[Message], rank: int) -> int:
        """The first slot that a rank without a dump may not have run, for all that is known."""
        own = [one.source for one in due if one.sender == rank]
        ran = [
            one.source + 1
            for (sender, receiver), some in plan.received.items()
            if sender == rank and receiver in self.progress
            for number, one in enumerate(some)
            if plan.has_received(one, number, self.progress[receiver], step)
        ]
        return min(own, default=max(ran, default=plan.slots(rank)[0]))

    # --- who waits for whom -------------------------------------------------------------

    @cached_property
    def edges(self) -> dict[int, tuple[int, ...]]:
        """The ranks that each rank waits for."""
        return {rank: self._waits_for(rank) for rank in self.ranks}

    def _waits_for(self, rank: int) -> tuple[int, ...]:
        if rank not in self.dumps:
            message = self.inferred.get(rank)
            return () if message is None else (message.sender,)
        now = self.now(rank)
        if now is None:
            return ()
        if now.is_message:
            return () if self._is_met(rank, now) else (now.other,)
        members = self.members(now)
        behind = [r for r in members if r in self.dumps and not self._joined(r, now)]
        return tuple(behind or [r for r in members if r not in self.dumps])

    def _is_met(self, rank: int, op: Op) -> bool:
        """Whether the other side has posted its part of a message."""
        if op.peer not in self.dumps:
            return False
        other, theirs = "send" if op.kind == "recv" else "recv", self.dumps[op.peer]
        return any(x.kind == other and x.peer == rank and x.seq == op.seq for x in theirs.ops)

    def members(self, op: Op) -> list[int]:
        """The ranks of the group of an operation, as far as they are known."""
        name = op.group[0]
        known = {r for d in self.dumps.values() for r in d.groups.get(name, ())}
        users = {d.rank for d in self.dumps.values() for x in d.ops if x.group[0] == name}
        return sorted(known or (users if name != "0" else set(self.ranks)))

    def _joined(self, rank: int, op: Op) -> bool:
        return any(
            x.group[0] == op.group[0] and not x.is_message and x.seq == op.seq
            for x in self.dumps[rank].ops
        )

    # --- the verdict --------------------------------------------------------------------

    def verdict(self) -> Hang:
        """The first of: unequal collectives, a rank off the plan, the end of the waits."""
        fault, culprits, action, text = self._mismatch() or self._root()
        waiting = {rank for rank, others in self.edges.items() if others}
        behind = tuple(sorted(waiting - set(culprits)))
        notes = []
        missing = [rank for rank in self.ranks if rank not in self.dumps]
        if missing:
            notes.append(f"there is no dump of rank{'s' * (len(missing) > 1)} {ranges(missing)}")
        cut = [rank for rank, dump in self.dumps.items() if not dump.whole]
        if cut and self.plans:
            notes.append(
                f"the dumps of rank{'s' * (len(cut) > 1)} {ranges(cut)} do not reach back to the "
                "first message, so actions may have wrong names; record more entries"
            )
        states = tuple(self._state(rank) for rank in self.ranks)
        return Hang(fault, culprits, action, text, behind, states, tuple(notes))

    def _mismatch(self) -> _Verdict | None:
        """Ranks of one group whose collective of the same number differs from the others'."""
        calls: dict[tuple[str, int], dict[int, Op]] = {}
        for rank, dump in self.dumps.items():
            for op in dump.ops:
                if not op.is_message:
                    calls.setdefault((op.group[0], op.seq), {})[rank] = op
        for some in calls.values():
            what = {r: _call(op) for r, op in some.items()}
            usual, count = Counter(what.values()).most_common(1)[0]
            if count == len(what):
                continue
            odd = tuple(r for r, x in what.items() if x != usual)
            if 2 * count == len(what):
                odd = tuple(what)
            one = next(iter(some.values()))
            calls_of = "; ".join(f"rank {r} calls {what[r]}" for r in odd[:4])
            others = "" if len(odd) == len(what) else f", the others call {usual}"
            group = one.group[1] or one.group[0]
            text = f"In group {group} (call {one.seq}) the collectives differ: {calls_of}{others}."
            return _Verdict(Fault.COLLECTIVE, odd, what[odd[0]], text)
        return None

    def _root(self) -> _Verdict:
        """The rank at the end of the waits; in a cycle, the one that is off the plan."""
        ends: Counter[int] = Counter()
        cycle: list[int] = []
        for rank in self.ranks:
            chain = [rank]
            while self.edges[chain[-1]]:
                after = self.edges[chain[-1]][0]
                if after in chain:
                    cycle = cycle or chain[chain.index(after) :]
                    break
                chain.append(after)
            else:
                ends[chain[-1]] += len(chain) > 1
        for rank in [*cycle, *self.places]:
            found = self._off_posts(rank) or self._off_plan(rank)
            if found is not None:
                return found
        roots = sorted((-n, r not in self.dumps, r) for r, n in ends.items() if n)
        if roots:  # a rank that was seen to wait for nobody is surer than one that was not seen
            return self._end(min(roots, key=lambda x: (x[1], x[0]))[2])
        if cycle:
            path = " -> ".join(f"rank {r}" for r in [*cycle, cycle[0]])
            more = "" if self.plans else " Give --schedule to find the one that is off it."
            text = f"Ranks wait for each other: {path}.{more}"
            return _Verdict(Fault.CYCLE, tuple(sorted(cycle)), "", text)
        lost = [r for r in self.dumps if self.now(r) is not None and not self.edges[r]]
        if lost:
            return self._end(lost[0])
        return _Verdict(Fault.NONE, (), "", "No rank waits for another in these dumps.")

    def _off_posts(self, rank: int) -> _Verdict | None:
        """One send too few or two receives exchanged, where all else is as the schedule says."""
        place = self.places.get(rank)
        if place is None or not place.skipped or not self.dumps[rank].whole:
            return None
        plan = self.plans[rank]
        due = plan.posted(rank)
        ops = [(op.kind, op.peer) for op in self.dumps[rank].ops if op.is_message]
        ops = ops[place.step * len(due) :]
        off = next((i for i, op in enumerate(ops) if i >= len(due) or op != due[i][:2]), None)
        if off is None and place.slot is None and len(ops) < len(due):
            off = len(ops)
        if off is None or off >= len(due):
            return None

        def explains(line: list[tuple[str, int, Message]]) -> bool:
            return [x[:2] for x in line[: len(ops)]] == ops

        kind, peer, message = due[off]
        if kind == "send" and explains(due[:off] + due[off + 1 :]):
            text = f"Rank {rank} did not send the result of {message.action} to rank {peer}."
            return _Verdict(Fault.SEND, (rank,), str(message.action), text)
        later = [i for i in range(off + 1, len(due)) if due[i][:2] == ops[off : off + 1][0]]
        for i in later[:1] if kind == "recv" and ops[off][0] == "recv" else ():
            other = due[i]
            if explains([*due[:off], other, *due[off + 1 : i], due[off], *due[i + 1 :]]):
                name, before = plan.name(other[2].target), plan.name(message.target)
                text = f"Rank {rank} takes what {name} needs before what {before} needs."
                return _Verdict(Fault.RECEIVES, (rank,), before, text)
        return None

    def _off_plan(self, rank: int) -> _Verdict | None:
        """What a rank did otherwise than its schedule says, by the numbers of its messages."""
        place = self.places.get(rank)
        if place is None or not place.skipped:
            return None
        plan, seen = self.plans[rank], self.progress[rank]
        action, after = plan.name(place.skipped[0]), plan.name(place.slot)
        needs = plan.needs_of.get(place.skipped[0], ())
        fewer = self._fewer(rank, place)
        if fewer is not None and (place.slot is None or len(place.skipped) > 1):
            m = plan.schedule.m
            text = f"Rank {rank} runs {fewer} microbatches, and the schedule has {m}."
            return _Verdict(Fault.MICROBATCHES, (rank,), action, text)
        if needs and all(plan.has_received(*one, seen, place.step) for one in needs):
            to = plan.sends_of[place.skipped[0]][0][0].receiver
            text = (
                f"Rank {rank} sent rank {to} too few messages: it is at {after}, and the result of "
                f"{action} is missing."
            )
            return _Verdict(Fault.SEND, (rank,), action, text)
        text = f"Rank {rank} runs another order: it is at {after} without having run {action}."
        return _Verdict(Fault.ORDER, (rank,), action, text)

    def _fewer(self, rank: int, place: Place) -> int | None:
        """The number of microbatches that this rank runs, where it left out all from one on."""
        plan, seen = self.plans[rank], self.progress[rank]
        fewest = min(min(plan.mbs(slot)) for slot in place.skipped)
        for slot in plan.slots(rank):
            if min(plan.mbs(slot)) >= fewest:
                sends = plan.sends_of.get(slot, ())
                if any(plan.has_sent(*one, seen, place.step) for one in sends):
                    return None
            elif slot in place.skipped:
                return None
        return fewest or None

    def _end(self, rank: int) -> _Verdict:
        """What is wrong with a rank for which others wait, and which itself waits for nobody."""
        due = self._due(rank)
        if rank not in self.dumps:
            return self._gone(rank, due)
        now = self.now(rank)
        if now is not None and now.is_message:
            text = (
                f"A message was posted on both sides and did not arrive: {self._words(rank, now)}."
            )
            return _Verdict(Fault.LOST, tuple(sorted((rank, now.other))), due, text)
        stack = "\n".join(self.dumps[rank].stack[:6])
        doing = next((what for part, what in _DOING.items() if part in stack), "in its own code")
        place = self.places.get(rank)
        where = f", due to do {due}" if due else ""
        if place is not None and place.slot is None:
            where = ", at the end of its step"
        frame = self.dumps[rank].stack[:1]
        at = f" ({frame[0]})" if frame else ""
        text = f"Rank {rank} is {doing}{where}, and waits for no message{at}."
        return _Verdict(Fault.BUSY, (rank,), due, text)

    def _gone(self, rank: int, due: str) -> _Verdict:
        """A rank without a dump for which others wait, or several that may be the one."""
        missing = [r for r in self.ranks if r not in self.dumps]
        alike = tuple(r for r in missing if r in self.plans and self.inferred.get(r) is None)
        if len(alike) > 1 and rank in alike:
            text = f"One of ranks {ranges(alike)}, which left no dumps, is gone or stuck."
            return _Verdict(Fault.GONE, alike, due, text)
        where = f" before {due} was done" if due else ""
        text = f"Rank {rank} left no dump and does not answer: it is gone or stuck{where}."
        if len(missing) > 1 and rank not in self.plans:
            text = (
                f"The waits end at rank {rank}, which left no dump: it is gone, or it waits "
                "for another rank without one. Give --schedule to look behind such ranks."
            )
        return _Verdict(Fault.GONE, (rank,), due, text)

    def _due(self, rank: int) -> str:
        """The action that a rank should do next."""
        if rank in self.places:
            return self.plans[rank].name(self.places[rank].slot)
        waiting = [p.message for p in self.places.values() if p.message is not None]
        due = min((x for x in waiting if x.sender == rank), key=lambda x: x.source, default=None)
        return "" if due is None else str(due.action)

    # --- words --------------------------------------------------------------------------

    def _words(self, rank: int, op: Op) -> str:
        if not op.is_message:
            return f"{op.kind} {op.seq} of group {op.group[1] or op.group[0]}"
        place = self.places.get(rank)
        if op.kind == "recv" and place is not None and place.message is not None:
            plan = self.plans[rank]
            return f"{plan.name(place.slot)}, waiting for {place.message}"
        way = "to" if op.kind == "send" else "from"
        return f"{op.kind} {op.seq} {way} rank {op.peer}"

    def _state(self, rank: int) -> State:
        waits = self.edges[rank]
        if rank not in self.dumps:
            message = self.inferred.get(rank)
            now = "no dump" if message is None else f"no dump; healthy, it waits for {message}"
            return State(rank, "-", now, waits, seen=False)
        done = [op for op in self.dumps[rank].ops if op.done]
        last, place, now = "-", self.places.get(rank), self.now(rank)
        if place is not None:
            plan = self.plans[rank]
            before = [
                slot for slot in plan.slots(rank)
                if (place.slot is None or slot < place.slot) and slot not in place.skipped
            ]  # fmt: skip
            last = f"{plan.name(before[-1])}, step {place.step}" if before else "-"
        elif done:
            last = self._words(rank, done[-1])
        doing = self._due(rank) or "its own code"
        return State(rank, last, doing if now is None else self._words(rank, now), waits, seen=True)


def _call(op: Op) -> str:
    sizes = f" of {[list(x) for x in op.sizes]}" if op.kind in _EQUAL else ""
    return f"{op.kind}{sizes}"
