"""An interpreter of orders: it runs the queues step by step, and says how that ends.

The verdicts are "runs", "incomplete" (something is missing, doubled, misplaced or mixed),
"stuck" (queues wait for each other), and with messages that have no tags "swapped" (a receive
gets another message) and "blocked" (the sides of two messages wait for each other).
"""

from collections import Counter, defaultdict

from oracle_text import WORK, needs, partner, rank_of

TRANSPORTS = ("tagged", "ordered", "rendezvous")


def verdict(order, transport):
    if not is_complete(order):
        return "incomplete"
    if not _drain(order, _posted):
        return "stuck"
    has_messages = any(a.kind not in WORK for a in order.actions())
    if transport == "tagged" or not has_messages:
        return "runs"  # without any, messages are placed so that nothing waits or crosses
    if not _in_order(order):
        return "swapped"
    if transport == "rendezvous" and not _drain(order, _met):
        return "blocked"
    return "runs"


def is_complete(order):
    """Every action of every stage and microbatch once, on its queue; every message twice."""
    counts = Counter(order.actions())
    if any(n > 1 for n in counts.values()) or not all(order.exists(a) for a in counts):
        return False
    for queue, slots in order.queues.items():
        for slot in slots:
            work = [a.kind in WORK for a in slot]
            if any(work) and not all(work):
                return False
            for a in slot:
                own = order.home(a)
                anywhere = a.kind in ("D", "U") or a.kind not in WORK
                if own != queue and not (anywhere and rank_of(own) == rank_of(queue)):
                    return False
    return _has_all_work(order, counts) and _has_all_messages(order, counts)


def _has_all_work(order, counts):
    trains = any(a.kind in "BIW" for a in counts)
    for mb in range(order.m):
        for stage in range(len(order.path(mb))):
            kinds = {k for k in WORK if (stage, k, mb) in counts}
            whole = kinds - set("RDUA")
            if whole not in ([{"F", "B"}, {"F", "I", "W"}] if trains else [{"F"}]):
                return False
            if kinds - whole not in ([set(), {"R"}, set("DU"), set("DAU")] if trains else [set()]):
                return False
    return True


def _has_all_messages(order, counts):
    messages = [a for a in counts if a.kind not in WORK]
    if any(partner(a) not in counts for a in messages):
        return False
    if not messages:
        return True
    for a in counts:
        for source in needs(order, a, counts):
            if source is None:
                return False
            carried = a.kind.startswith("RECV") or source.kind not in WORK
            if not carried and rank_of(order.home(source)) != rank_of(order.home(a)):
                return False
    return True


def _drain(order, step):
    """Whether every slot ends when each queue takes its next step as soon as it may."""
    present = set(order.actions())
    wants = {a: needs(order, a, present) for a in present}
    at = dict.fromkeys(order.queues, 0)
    done, posted, before = set(), set(), None
    while before != (before := (sum(at.values()), len(done), len(posted))):
        for queue, slots in order.queues.items():
            while at[queue] < len(slots) and step(order, wants, at, queue, done, posted):
                at[queue] += 1
        came = {a for a in posted if done.issuperset(wants[a])}
        done |= came
        posted -= came
    return all(at[q] == len(slots) for q, slots in order.queues.items()) and not posted


def _posted(order, wants, at, queue, done, posted):
    """A receive is posted and holds nobody but who needs its message; a send never waits."""
    slot = order.queues[queue][at[queue]]
    receives = [a for a in slot if a.kind.startswith("RECV")]
    rest = [a for a in slot if a not in receives]
    if not all(n in done or n in slot for a in rest for n in wants[a]):
        return False
    posted.update(receives)
    done.update(rest)
    return True


def _met(order, wants, at, queue, done, posted):
    """A message ends when its two sides are reached at the same time, and both slots may start."""
    slot = order.queues[queue][at[queue]]
    if slot[0].kind in WORK:
        return _posted(order, wants, at, queue, done, posted)

    def may_start(slot):
        sends = [a for a in slot if a.kind.startswith("SEND")]
        return all(n in done for a in sends for n in wants[a])

    heads = [slots[at[q]] for q, slots in order.queues.items() if at[q] < len(slots)]
    started = {a for head in heads if may_start(head) for a in head}
    met = {a for a in slot if a in started and partner(a) in started}
    done.update(met, map(partner, met))
    return done.issuperset(slot)


def _in_order(order):
    """Whether on each channel, from queue to queue, the k-th send meets the k-th receive."""
    place = {a: q for q, slots in order.queues.items() for slot in slots for a in slot}
    sent, received = defaultdict(list), defaultdict(list)
    for slots in order.queues.values():
        for a in (a for slot in slots for a in slot):
            if a.kind.startswith("SEND"):
                sent[place[a], place[partner(a)]].append(a)
            elif a.kind.startswith("RECV"):
                received[place[partner(a)], place[a]].append(partner(a))
    return sent == received
