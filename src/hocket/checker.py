"""Every fault of a schedule at once, before any process starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, NoReturn

import numpy as np

from hocket import compiled
from hocket.codes import kinds_of, mbs_of, stages_of
from hocket.compiled import ROOM
from hocket.deps import (
    ANY_QUEUE,
    FULL,
    IS_MESSAGE,
    IS_RECEIVE,
    IS_WORK,
    NEEDS,
    PARTNER,
    ROWS,
    SPLIT,
    USERS,
    WORK,
    Kind,
)
from hocket.engine import walk
from hocket.errors import Code, Problem, ScheduleError, UsageError
from hocket.graph import (
    Graph,
    Index,
    assemble,
    cycles,
    graph,
    message_pairs,
)
from hocket.ir import Array, Schedule, action_of, offsets
from hocket.lower import insert_communication

SHOWN = 20  # problems of one kind that are reported one by one


@dataclass(frozen=True)
class Report:
    """What a check found. `notes` say what the check assumed."""

    schedule: Schedule
    transport: str
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True when nothing was found."""
        return not self.problems

    def raise_if_bad(self) -> None:
        """Raises: ScheduleError with every problem."""
        if self.problems:
            raise ScheduleError(self.problems)

    def __str__(self) -> str:
        s = self.schedule
        if self.ok:
            actions = f"{len(s.codes)} action{'s' * (len(s.codes) != 1)}"
            ranks = f"{s.p} rank{'s' * (s.p != 1)}"
            return f"{s.name}: {actions} on {ranks}, complete, no deadlock ({self.transport})"
        return "\n".join(p.text for p in self.problems)


def check(schedule: Schedule, transport: str = "tagged") -> Report:
    """Every fault of a schedule, for one way of sending messages.

    transport: "tagged" (gloo, MPI: a receive names the message it wants), "ordered" (no tags:
    the k-th send from one rank to another is the k-th receive), "rendezvous" (ordered, and a
    SEND or RECV blocks its rank until the other side is there). A schedule without SEND and
    RECV actions is checked with those that `insert_communication` places.
    """
    if transport not in TRANSPORTS:
        raise UsageError(
            f"there is no transport {transport!r}; choose from {', '.join(TRANSPORTS)}"
        )
    problems = [] if _is_sound(schedule) else _faults(schedule)
    notes: tuple[str, ...] = ()
    if not problems and TRANSPORTS[transport]:
        lowered = schedule
        if not schedule.has_communication:
            lowered = insert_communication(schedule)
            notes = ("messages are where insert_communication places them",)
        for find in TRANSPORTS[transport]:
            problems += find(lowered)
    return Report(schedule, transport, tuple(problems), notes)


def raise_fault(schedule: Schedule, *, blocking: bool) -> NoReturn:
    """Raises ScheduleError: why a schedule cannot run to its end.

    blocking: each RECV holds its queue until the message is there.
    """
    check(schedule).raise_if_bad()
    assert blocking, "a sound schedule that cannot run"
    raise ScheduleError(
        _deadlock(
            graph(schedule, blocking=True),
            Code.BLOCKED_RECEIVE,
            " when a RECV holds its queue",
            "\n  (so it is with p2p overhead in the costs, or --blocking-receive); without that "
            "this order runs, and with it the order that insert_communication makes",
        )
    )


def _is_sound(schedule: Schedule) -> bool:
    """True when the order is complete and can run, as far as one pass over it tells."""
    no_time = np.zeros((len(Kind), schedule.placement.n_stages), dtype=np.int8)
    return is_complete(schedule) and walk(schedule, no_time, timed=False) is not None


def _faults(schedule: Schedule) -> list[Problem]:
    """What is misplaced, doubled, missing, mixed or out of order, else what deadlocks."""
    problems, index = [*_incomplete(schedule)], Index(schedule)
    g = graph(schedule, index=index)
    if g.n_late or g.stuck or problems:
        problems += _own_order(schedule, index)
    return problems or _deadlock(g)


class _Where:
    """Words for the place of an action."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def action(self, position: int) -> str:
        return str(action_of(self.schedule.codes[position]))

    def rank(self, position: int) -> int:
        s = self.schedule
        return s.queues[s.queue_of_slot[s.slot_of_action[position]]].rank

    def slot(self, position: int) -> int:
        s = self.schedule
        slot = int(s.slot_of_action[position])
        return slot - int(s.starts[s.queue_of_slot[slot]])

    def place(self, position: int) -> str:
        s = self.schedule
        queue = s.queues[s.queue_of_slot[s.slot_of_action[position]]]
        stream = f"/{queue.stream}" if queue.stream else ""
        return f"rank {queue.rank}{stream} slot {self.slot(position)}"

    def problem(self, position: int, text: str, code: Code) -> Problem:
        where = self.rank(position), self.slot(position), self.action(position)
        return Problem(*where, text, code)


def _some(problems: list[Problem], more: int, what: str) -> list[Problem]:
    """The problems, and one that counts those left out."""
    if more > 0:
        text, code = f"... and {more} more {what}", problems[-1].code
        problems.append(Problem(None, None, "", text, code))
    return problems


# --- placed -----------------------------------------------------------------------------------


def _misplaced(schedule: Schedule, index: Index) -> list[Problem]:
    """Actions of stages or microbatches that do not exist, or on a queue that is not theirs."""
    where = _Where(schedule)
    placement = schedule.placement
    mb_known = index.mbs < placement.m
    lengths = np.zeros(index.n, dtype=np.int64)
    lengths[mb_known] = index.lengths[index.mbs[mb_known]]
    known = mb_known & (index.stages < lengths)
    out = []
    for a in np.flatnonzero(~known)[:SHOWN].tolist():
        mb, stage = int(index.mbs[a]), int(index.stages[a])
        if not mb_known[a]:
            text = f"there is no microbatch {mb} (they are 0 to {placement.m - 1})"
        else:
            k = placement.path_of[mb]
            text = f"path {k} has no stage {stage} (its stages are 0 to {lengths[a] - 1})"
        text = f"{where.place(a)}: {where.action(a)}: {text}"
        out.append(where.problem(a, text, Code.UNKNOWN_ACTION))
    _some(out, int((~known).sum()) - SHOWN, "such actions")
    table, paths = schedule.home, placement.path_by_mb
    own = schedule.queue_of_slot[schedule.slot_of_action]
    right = own.copy()
    right[known] = table[paths[index.mbs[known]], index.stages[known]]
    anywhere = ANY_QUEUE[index.kinds]
    ranks = schedule.rank_of_queue
    wrong = np.flatnonzero(known & np.where(anywhere, ranks[own] != ranks[right], own != right))
    for a in wrong[:SHOWN].tolist():
        k, stage = placement.path_of[int(index.mbs[a])], int(index.stages[a])
        queue = schedule.queues[right[a]]
        text = (
            f"{where.place(a)}: {where.action(a)} belongs on rank {queue} "
            f"(path {k} places stage {stage} there)"
        )
        out.append(where.problem(a, text, Code.MISPLACED))
    return _some(out, len(wrong) - SHOWN, "misplaced actions")


def _mixed(schedule: Schedule, index: Index) -> list[Problem]:
    """Slots that hold work and messages; a message is no part of what runs together."""
    if not schedule.has_communication or schedule.is_single:
        return []
    where, slots = _Where(schedule), schedule.slots[:-1]
    message = IS_MESSAGE[index.kinds]
    both = np.logical_or.reduceat(message, slots) & np.logical_or.reduceat(~message, slots)
    mixed = np.flatnonzero(both)
    out = []
    for slot in mixed[:SHOWN].tolist():
        a = int(slots[slot])
        text = f"{where.place(a)}: {schedule.slot(slot)} holds work and messages; give them apart"
        out.append(where.problem(a, text, Code.MIXED_SLOT))
    return _some(out, len(mixed) - SHOWN, "such slots")


# --- complete and unique ------------------------------------------------------------------------


def _counts(schedule: Schedule, index: Index) -> list[Problem]:
    """Actions that are doubled, missing, or exclude each other."""
    where = _Where(schedule)
    out: list[Problem] = []
    seen, count = np.unique(schedule.codes, return_counts=True)
    doubled = np.flatnonzero(count > 1)
    for i in doubled[:SHOWN].tolist():
        places = np.flatnonzero(schedule.codes == seen[i]).tolist()
        text = (
            f"{where.action(places[0])} appears {count[i]} times: "
            + ", ".join(where.place(a) for a in places[:4])
            + "; each action runs once"
        )
        out.append(where.problem(places[1], text, Code.DOUBLED))
    _some(out, len(doubled) - SHOWN, "doubled actions")
    stages, mbs = _all_pairs(schedule)
    has = {kind: index.find(kind, stages, mbs) for kind in Kind}
    there = {kind: found < index.n for kind, found in has.items()}
    for absent, name, text, code in _absences(there, schedule.is_forward_only):
        for i in np.flatnonzero(absent)[:SHOWN].tolist():
            queue = schedule.placement.queue(int(stages[i]), int(mbs[i]))
            action = f"{stages[i]}{name}{mbs[i]}"
            sentence = f"rank {queue}: {action} {text.format(stage=stages[i], mb=mbs[i])}"
            out.append(Problem(queue.rank, None, action, sentence, code))
        _some(out, int(absent.sum()) - SHOWN, f"such {name}")
    out += _messages_complete(schedule, index)
    return out


def is_complete(schedule: Schedule) -> bool:
    """True when every action is placed, single and there, and every message has its other side."""
    return not _incomplete(schedule)


def _incomplete(schedule: Schedule) -> list[Problem]:
    """What is misplaced, doubled, missing or mixed; looked for once."""
    if "incomplete" not in schedule.memo:
        found: list[Problem] = []
        if schedule.has_communication or not _is_whole(schedule):
            index = Index(schedule)
            found += _misplaced(schedule, index) + _counts(schedule, index)
            found += _mixed(schedule, index)
        schedule.memo["incomplete"] = found
    return schedule.memo["incomplete"]


def _is_whole(schedule: Schedule) -> bool:
    """True when every action is placed and single, and no stage and microbatch lacks one."""
    placement, n = schedule.placement, len(schedule.codes)
    fast = compiled.choose(tally, n)
    if fast is None:
        return _is_whole_by_index(schedule)
    faulty = _faulty_sets(schedule.is_forward_only)
    seen = np.zeros(placement.n_stages * placement.m, np.min_scalar_type(len(faulty) - 1))
    n_odd = fast(
        schedule.codes, schedule.slots, schedule.starts, schedule.home.ravel(),
        placement.path_by_mb, placement.lengths, placement.n_stages, seen,
    )  # fmt: skip
    found = np.zeros(len(faulty), dtype=bool)
    compiled.run(census, n, (seen, placement.lengths, placement.n_stages), (found,))
    return not n_odd and not (found & faulty).any()


def _is_whole_by_index(schedule: Schedule) -> bool:
    """The same, by whole arrays."""
    index, queues = Index(schedule), schedule.queue_of_slot[schedule.slot_of_action]
    if not index.known.all():
        return False
    paths = schedule.placement.path_by_mb[index.mbs]
    stages, mbs = _all_pairs(schedule)
    there = {kind: index.find(kind, stages, mbs) < index.n for kind in WORK}
    return (
        np.array_equal(schedule.home[paths, index.stages], queues)
        and sum(map(np.count_nonzero, there.values())) == index.n
        and not any(x.any() for x, *_ in _absences(there, schedule.is_forward_only))
    )


@cache
def _faulty_sets(forward_only: bool) -> Array:
    """Which sets of kinds a pair of stage and microbatch may not have, `[set]`, a bit each kind."""
    sets = np.arange(1 << len(Kind))
    there = {kind: sets >> kind & 1 > 0 for kind in WORK}
    absent = [one[0] for one in _absences(there, forward_only)]
    return np.logical_or.reduce(absent)


def _all_pairs(schedule: Schedule) -> tuple[Array, Array]:
    """Every (stage, microbatch) that must run, as two flat arrays."""
    lengths = schedule.placement.lengths
    mbs = np.repeat(np.arange(schedule.m), lengths)
    first = np.cumsum(lengths) - lengths
    return np.arange(len(mbs)) - np.repeat(first, lengths), mbs


def _absences(
    there: dict[Kind, Array], forward_only: bool
) -> Iterator[tuple[Array, str, str, Code]]:
    """Which pairs, the kind's letter, what is wrong and its code, for each way to be incomplete.

    A stage runs the kinds of `deps.FULL` or those of `deps.SPLIT` for each microbatch, and others
    only where an action of that stage and microbatch needs what they make.
    """
    for kind, users in USERS.items():
        used = [there[user] & ~np.logical_or.reduce([there[x] for x in sooner], initial=False)
                for user, sooner in users]  # fmt: skip
        text = "is of no use: no action needs it"
        yield there[kind] & ~np.logical_or.reduce(used), kind.name, text, Code.UNUSED
        text = f"is missing, but {{stage}}{kind.name}{{mb}} needs it"
        for sources in ([source for source, _ in need.sources] for need in NEEDS[kind]):
            met = np.logical_or.reduce([there[source] for source in sources])
            yield there[kind] & ~met, sources[-1].name, text, Code.MISSING
    always = [kind for kind in FULL if kind in SPLIT]
    (full,), parts = ([k for k in way if k not in always] for way in (FULL, SPLIT))
    begun = np.logical_and.reduce([there[kind] for kind in always])
    for kind in always:
        text = "is missing: stage {stage} never runs microbatch {mb}"
        yield ~there[kind], kind.name, text, Code.MISSING
    if forward_only:
        return
    some = np.logical_or.reduce([there[kind] for kind in parts])
    none = begun & ~there[full] & ~some
    text = "is missing: stage {stage} has no backward for microbatch {mb}"
    yield none, full.name, text, Code.MISSING
    halves = " and ".join(kind.name for kind in parts)
    before = np.zeros_like(some)
    for kind in parts:
        text = f"is beside {{stage}}{kind.name}{{mb}}: use a full backward, or {halves}"
        yield there[full] & there[kind] & ~before, full.name, text, Code.EXCLUSIVE
        before |= there[kind]
    for kind in parts:
        others = [k for k in parts if k != kind]
        needing = next((k for k in others if any((kind, 0) in n.sources for n in NEEDS[k])), None)
        text = (
            f"is missing: the {ROWS[kind].name}s of stage {{stage}} for microbatch {{mb}} would be "
            "lost"
            if needing is None
            else f"is missing, but {{stage}}{needing.name}{{mb}} needs it"
        )
        yield some & ~there[kind] & ~there[full], kind.name, text, Code.MISSING


def _messages_complete(schedule: Schedule, index: Index) -> list[Problem]:
    """SEND without RECV, RECV without SEND, and edges between ranks without either."""
    if not schedule.has_communication:
        return []
    where = _Where(schedule)
    out = []
    for kind, (other, offset) in PARTNER.items():
        known = (index.kinds == kind) & (index.mbs < len(index.lengths))
        at = np.flatnonzero(known)
        to = index.stages[at] + offset
        inside = (to >= 0) & (to < index.lengths[index.mbs[at]])
        for a in at[~inside].tolist():
            text = f"{where.place(a)}: {where.action(a)} has no stage on its other side"
            out.append(where.problem(a, text, Code.UNPAIRED))
        at, to = at[inside], to[inside]
        alone = at[index.find(other, to, index.mbs[at]) == index.n]
        for a in alone[:SHOWN].tolist():
            partner = f"{int(index.stages[a]) + offset}{other.name}{int(index.mbs[a])}"
            text = f"{where.place(a)}: {where.action(a)} has no partner; {partner} is missing"
            out.append(where.problem(a, text, Code.UNPAIRED))
        _some(out, len(alone) - SHOWN, f"{kind.name} without a partner")
    out += _uncarried(schedule, index, where)
    return out


def _uncarried(schedule: Schedule, index: Index, where: _Where) -> list[Problem]:
    """Results needed on another rank that no message carries, once some messages are written."""
    g = graph(schedule)
    kinds = index.kinds[g.source]
    bare = np.flatnonzero(g.crosses & IS_WORK[kinds])
    out = []
    for e in bare[:SHOWN].tolist():
        a, source = int(g.target[e]), int(g.source[e])
        text = (
            f"{where.place(a)}: {where.action(a)} needs {where.action(source)} of rank "
            f"{where.rank(source)}, but no SEND and RECV carry it"
        )
        out.append(where.problem(a, text, Code.UNCARRIED))
    return _some(out, len(bare) - SHOWN, "results that no message carries")


# --- order -----------------------------------------------------------------------------------


def _own_order(schedule: Schedule, index: Index) -> list[Problem]:
    """Actions that are placed before what they need in their own queue."""
    where = _Where(schedule)
    out: list[Problem] = []
    slot = schedule.slot_of_action
    queue = schedule.queue_of_slot[slot]
    known = index.known
    for kind, needs in NEEDS.items():
        positions = np.flatnonzero((index.kinds == kind) & known)
        for need in needs if len(positions) else ():
            having, found = index.sources(need, positions)
            there = found < index.n
            having, found = having[there], found[there]
            late = (queue[having] == queue[found]) & (slot[having] < slot[found])
            for a, source in zip(having[late][:SHOWN].tolist(), found[late].tolist(), strict=False):
                text = (
                    f"{where.place(a)}: {where.action(a)} is placed before "
                    f"{where.action(source)} (slot {where.slot(source)}), {need.what}"
                )
                out.append(where.problem(a, text, Code.OUT_OF_ORDER))
            _some(out, int(late.sum()) - SHOWN, f"{kind.name} before what they need")
    return out


def _deadlock(
    g: Graph, code: Code = Code.DEADLOCK, when: str = "", advice: str = ""
) -> list[Problem]:
    """Each cycle of waits of a schedule that stops, action by action, and who hangs behind them.

    when, advice: words after "deadlock", and at the end of each cycle.
    """
    if not g.stuck:
        return []
    where = _Where(g.schedule)
    found, behind = cycles(g)
    out = []
    for one in found[:SHOWN]:
        lines = []
        for (_, edge), (after, next_edge) in zip(one, one[1:] + one[:1], strict=True):
            text, wanted = _wait(g, where, edge)
            if int(g.node_of_action[wanted]) != after:
                text += f", which is queued behind {where.action(int(g.first_action[after]))}"
            elif wanted != int(g.target[next_edge]):
                text += f", which runs together with {where.action(int(g.target[next_edge]))}"
            lines.append(f"\n  {text}")
        text = f"deadlock{when}: circular wait:{''.join(lines)}{advice}"
        out.append(where.problem(int(g.target[one[0][1]]), text, code))
    _some(out, len(found) - SHOWN, "circular waits")
    for _, edge in behind[:SHOWN]:
        text, _ = _wait(g, where, edge)
        out.append(where.problem(int(g.target[edge]), f"hangs behind it: {text}", code))
    return _some(out, len(behind) - SHOWN, "queues that hang behind it")


def _wait(g: Graph, where: _Where, edge: int) -> tuple[str, int]:
    """An unmet wait in words, and the action that is waited for."""
    action = int(g.target[edge])
    wanted, reason = _wanted(g, action, int(g.source[edge]))
    text = (
        f"{where.place(action)}: {where.action(action)} waits for {where.action(wanted)} on rank "
        f"{where.rank(wanted)} ({reason})"
    )
    return text, wanted


def _wanted(g: Graph, action: int, source: int) -> tuple[int, str]:
    """What an action really waits for, and why; for a message that is its other side."""
    index = Index(g.schedule)
    asked = {}
    for need in NEEDS[Kind(int(index.kinds[action]))]:
        _, found = index.sources(need, np.array([action]))
        asked |= dict.fromkeys(found[found < index.n].tolist(), need.what)
    if source in asked:
        return source, asked[source]
    if IS_WORK[index.kinds[action]]:  # it waits for what its RECV waits for
        return next((a, what) for a, what in asked.items() if IS_RECEIVE[index.kinds[a]])
    return _partner(index, action), "the other side of the message"


# --- transports ------------------------------------------------------------------------------


def _crossed(schedule: Schedule) -> list[Problem]:
    """Channels without tags on which the k-th send is not the k-th receive.

    Each queue of a rank has its own channels: actions of two queues have no order.
    """
    where = _Where(schedule)
    sends, receives = message_pairs(Index(schedule))
    queue, queues = schedule.queue_of_slot[schedule.slot_of_action], schedule.queues
    channel = queue[sends].astype(np.int64) * len(queues) + queue[receives]
    by_channel = np.argsort(channel, kind="stable")  # a channel's sends in the order they stand
    channel, sends, wanted = channel[by_channel], sends[by_channel], receives[by_channel]
    received = wanted[np.lexsort((wanted, channel))]
    bad = np.flatnonzero(wanted != received)
    _, first, counts = np.unique(channel[bad], return_index=True, return_counts=True)
    starts = np.searchsorted(channel, channel[bad[first]])
    out = []
    rows = zip(bad[first].tolist(), starts.tolist(), counts.tolist(), strict=True)
    for at, start, count in sorted(rows, key=lambda row: sends[row[1]]):
        s, r = int(sends[at]), int(received[at])
        text = (
            f"{where.place(r)}: message {at - start} from rank {queues[queue[s]]} to rank "
            f"{queues[queue[r]]} is {where.action(s)} ({where.place(s)}), but "
            f"{where.action(r)} receives it; "
            "without tags the two are swapped silently: receive in the order of the sends"
        )
        if count > 2:
            text += f" ({count} messages of this channel are out of order)"
        out.append(where.problem(r, text, Code.SWAPPED))
    return out


def _partner(index: Index, message: int) -> int:
    """The position of the other side of a SEND or RECV."""
    kind, offset = PARTNER[Kind(int(index.kinds[message]))]
    part = slice(message, message + 1)
    return int(index.find(kind, index.stages[part] + offset, index.mbs[part])[0])


def _unmet(schedule: Schedule) -> list[Problem]:
    """The cycles of waits when every SEND and RECV holds its rank until both sides are there."""
    blocking = graph(schedule, blocking=True)
    index = Index(schedule)
    g = _rendezvous(schedule, index, blocking)
    return _deadlock(
        g,
        Code.BLOCKED_SEND,
        " when sends block",
        "\n  ranks that both send first must send and receive in one slot, such as "
        "0SEND_F1+0RECV_B0; the order that insert_communication makes never blocks",
    )


def _rendezvous(schedule: Schedule, index: Index, g: Graph) -> Graph:
    """The graph in which a message starts when both ranks have reached it.

    Slots are the nodes again, so that messages of one slot progress together. Each side waits
    for what lets the other side's slot start: what precedes it, and what its sends need. A message
    of a queue to itself waits for its other side behind it.
    """
    slot, queue = schedule.slot_of_action, schedule.queue_of_slot
    is_comm = IS_MESSAGE[index.kinds]
    sends, receives = message_pairs(index)
    send_of = np.empty(index.n, dtype=np.int64)
    send_of[receives] = sends
    work, starts = ~is_comm[g.source], _what_starts(schedule, g, is_comm)
    sources, targets = [g.source[work]], [g.target[work]]

    def wait(some: Array, actions: Array) -> None:
        """Lets some actions wait for what lets the slots of others start."""
        which, source = starts.of(slot[actions])
        sources.append(source)
        targets.append(some[which])

    wait(sends, receives)
    wait(receives, sends)
    # Work waits for its RECV, not for the others of that slot; SEND to RECV is no edge.
    keep = is_comm[g.source] & ~is_comm[g.target]
    source, target = g.source[keep], g.target[keep]
    wait(target, source)
    wait(target, send_of[source])
    own = (queue[slot[sends]] == queue[slot[receives]]) & (slot[sends] != slot[receives])
    sources.append(np.maximum(sends, receives)[own])
    targets.append(np.minimum(sends, receives)[own])
    return assemble(schedule, np.concatenate(sources), np.concatenate(targets))


class _Rows(NamedTuple):
    """Rows of different lengths, laid end to end: row i is `values[first[i]:first[i + 1]]`."""

    first: Array
    values: Array

    def of(self, rows: Array) -> tuple[Array, Array]:
        """The values of some rows, and at which place in `rows` each belongs."""
        counts = np.diff(self.first)[rows]
        which = np.repeat(np.arange(len(rows)), counts)
        at = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        return which, self.values[self.first[rows][which] + at]


def _what_starts(schedule: Schedule, g: Graph, is_comm: Array) -> _Rows:
    """What must have ended when a slot of messages starts, `[slot]`: actions."""
    slot = schedule.slot_of_action
    sent = ~is_comm[g.source] & is_comm[g.target]
    behind = np.setdiff1d(np.arange(schedule.n_slots), schedule.starts[:-1])
    of = np.concatenate([slot[g.target[sent]], behind])
    sources = np.concatenate([g.source[sent], schedule.slots[behind - 1]])
    order = np.argsort(of, kind="stable")
    return _Rows(offsets(np.bincount(of, minlength=schedule.n_slots)), sources[order])


Finder = Callable[[Schedule], list[Problem]]
TRANSPORTS: dict[str, tuple[Finder, ...]] = {
    "tagged": (),
    "ordered": (_crossed,),
    "rendezvous": (_crossed, _unmet),
}


# --- loops, plain or compiled ------------------------------------------------------------------


def tally(codes, slots, starts, home, path_of, lengths, n_stages, seen):
    """Marks every action in `seen[stage, mb]`, a bit for each kind; returns how many are odd.

    Odd: of no stage or microbatch, on a queue that is not `home[path, stage]`, or doubled.
    """
    m, n_odd = len(path_of), 0
    for q in range(len(starts) - 1):
        for a in range(slots[starts[q]], slots[starts[q + 1]]):
            code = codes[a]
            kind, stage, mb = kinds_of(code), stages_of(code), mbs_of(code) & ROOM
            if mb >= m or stage >= lengths[mb] or home[path_of[mb] * n_stages + stage] != q:
                n_odd += 1
                continue
            cell = stage * m + mb
            n_odd += seen[cell] >> kind & 1
            seen[cell] |= 1 << kind
    return n_odd


def census(seen, lengths, n_stages, found):
    """Marks in `found` which sets of kinds the (stage, microbatch) pairs have."""
    m = len(lengths)
    for stage in range(n_stages):
        for mb in range(m):
            if stage < lengths[mb]:
                found[seen[stage * m + mb]] = True
