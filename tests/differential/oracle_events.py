"""A simulation of orders by events: what happens at which time, in fractions, one by one.

Costs are the plain data of a `costs.toml`. All times are Fractions; a float counts as the
fraction that it is.
"""

import heapq
from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import count

from oracle_text import WORK, Order, needs, rank_of


class Stopped(Exception):
    """The order cannot run to its end."""


class Prices:
    """How long the work of an order, its transfers and its messages take."""

    def __init__(self, order, costs):
        self.order, self.costs = order, costs
        self.n_stages = max(map(len, order.paths))
        self.overhead = {k: Fraction(v) for k, v in costs.get("p2p_overhead", {}).items()}
        self.blocking = "p2p_overhead" in costs
        self.has_messages = any(a.kind not in WORK for a in order.actions())

    def per_stage(self, value, stage):
        if isinstance(value, dict):
            return Fraction(value["cycle"][stage % len(value["cycle"])])
        return Fraction(value[stage] if isinstance(value, list) else value)

    def alone(self, action):
        """The work of one action."""
        if action.kind not in WORK or action.kind == "A":
            return Fraction(0)
        of = {kind: self.costs.get(kind, 1) for kind in "FIW"}
        of |= {kind: self.costs.get(kind, of["F"]) for kind in "RDU"}
        if action.kind == "B" and "B" not in self.costs:
            time = self.per_stage(of["I"], action.stage) + self.per_stage(of["W"], action.stage)
        else:
            time = self.per_stage({**self.costs, **of}[action.kind], action.stage)
        if "slice" in self.costs and self.order.slices > 1:
            time *= Fraction(self.costs["slice"][action.mb % self.order.slices])
        if "microbatch" in self.costs:
            time *= Fraction(self.costs["microbatch"][action.mb // self.order.slices])
        if "speed" in self.costs:
            time /= Fraction(self.costs["speed"][rank_of(self.order.home(action))])
        return time

    def work(self, slot):
        parts = [self.alone(a) for a in slot]
        kinds = {a.kind for a in slot}
        rule = self.costs.get("FB", "sum")
        if "F" in kinds and kinds & {"B", "I"} and rule != "sum":
            if rule == "max":
                return max(parts)
            return (
                sum(parts) * Fraction(rule["scale"]) if isinstance(rule, dict) else Fraction(rule)
            )
        return sum(parts)

    def around(self, slot):
        """Transfers before and after the work of a slot."""
        kinds = {a.kind for a in slot}
        if self.has_messages:
            receives, sends = kinds & {"RECV_F", "RECV_B"}, kinds & {"SEND_F", "SEND_B"}
        else:
            receives = sends = kinds & {"F", "B", "I"}
        before, after = (self.overhead.get(side, Fraction(0)) for side in ("recv", "send"))
        return before if receives else Fraction(0), after if sends else Fraction(0)

    def way(self, source):
        """From one rank to another: the output of a stage, or the gradient of its input."""
        time = Fraction(self.costs.get("latency", 0))
        if "bandwidth" in self.costs:
            forward = source.kind in ("F", "SEND_F")
            stage = source.stage if forward else source.stage - 1
            size = self.costs.get("bytes", {}).get("message", 0)
            time += self.per_stage(size, stage) / Fraction(self.costs["bandwidth"])
        return time


@dataclass
class Run:
    """Start and end of each action's work, and what occupies each queue: (slot, from, to)."""

    order: object
    times: dict = field(default_factory=dict)
    occupied: dict = field(default_factory=lambda: defaultdict(list))
    busy: dict = field(default_factory=lambda: defaultdict(Fraction))

    def busy_of(self, rank):
        return sum(time for queue, time in self.busy.items() if rank_of(queue) == rank)

    @cached_property
    def working(self):
        """The queues that do any work; one of messages or copies alone is none to keep busy."""
        return [
            queue for queue, slots in self.order.queues.items()
            if any(slot[0].kind in WORK and slot[0].kind not in ("D", "U") for slot in slots)
        ]  # fmt: skip

    def extent(self, *ranks):
        """First start and last end on these ranks; None where nothing runs."""
        spans = [s for q in self.working for s in self.occupied[q] if rank_of(q) in ranks]
        return (min(s[1] for s in spans), max(s[2] for s in spans)) if spans else None

    @property
    def makespan(self):
        first, last = self.extent(*range(self.order.p))
        return last - first

    @property
    def span(self):
        extents = [self.extent(rank) for rank in range(self.order.p)]
        return max(e[1] - e[0] for e in extents if e)

    @property
    def bubble_ratio(self):
        """1 - busy / (queues x makespan)."""
        whole = self.makespan * len(self.working)
        return 1 - sum(self.busy.values()) / whole if whole else Fraction(0)


class _Machine:
    """The state between two events: which slot each queue is at, and what each action lacks."""

    def __init__(self, order, costs):
        self.order, self.prices = order, Prices(order, costs)
        self.run = Run(order)
        self.at = dict.fromkeys(order.queues, 0)
        self.running = dict.fromkeys(order.queues, False)
        self.events, self.number = [], count()
        self.place = {
            a: (q, i) for q, slots in order.queues.items() for i, slot in enumerate(slots)
            for a in slot
        }  # fmt: skip
        self.lacks, self.wanted_by = dict.fromkeys(self.place, 0), defaultdict(list)
        for a in self.place:
            for source in needs(order, a, self.place):
                if source is None:
                    raise Stopped(f"nothing lets {a} start")
                if self.place[source] != self.place[a]:
                    self.lacks[a] += 1
                    self.wanted_by[source].append(a)

    def go(self):
        for queue in self.order.queues:
            self.later(Fraction(0), self.try_next, queue)
        while self.events:
            now, _, act, *what = heapq.heappop(self.events)
            act(now, *what)
        if any(self.at[q] < len(slots) for q, slots in self.order.queues.items()):
            raise Stopped("queues wait for each other")
        if any(self.lacks.values()):
            raise Stopped("a message never comes")
        return self.run

    def later(self, time, act, *what):
        heapq.heappush(self.events, (time, next(self.number), act, *what))

    def try_next(self, now, queue):
        """Starts the next slot of a queue that is free, where what it needs is there."""
        if self.running[queue] or self.at[queue] == len(self.order.queues[queue]):
            return
        slot = self.order.queues[queue][self.at[queue]]
        receives = [a for a in slot if a.kind.startswith("RECV")]
        if any(self.lacks[a] for a in slot if a not in receives):
            return
        if self.prices.blocking and any(self.lacks[a] for a in receives):
            return
        before, after = self.prices.around(slot)
        work = self.prices.work(slot)
        began, end = now + before, now + before + work
        for a in slot:
            posted = a in receives and not self.prices.blocking
            waits = now, None if self.lacks[a] else now
            self.run.times[a] = waits if posted else (began, end)
        if work or before or after or slot[0].kind in WORK:
            self.run.occupied[queue].append((slot, now, end + after))
        if queue in self.run.working:
            self.run.busy[queue] += work
        self.running[queue] = True
        self.later(end + after, self.finish, queue, slot)

    def finish(self, now, queue, slot):
        self.running[queue] = False
        self.at[queue] += 1
        for a in slot:
            if not self.lacks[a]:
                self.deliver(now, a)
        self.try_next(now, queue)

    def deliver(self, now, source):
        """Sends an action's result to those who wait for it."""
        here = rank_of(self.place[source][0])
        for target in self.wanted_by.pop(source, ()):
            there = rank_of(self.place[target][0])
            way = self.prices.way(source) if here != there else 0
            self.later(now + way, self.arrive, target)

    def arrive(self, now, target):
        self.lacks[target] -= 1
        if self.lacks[target]:
            return
        if target in self.run.times:  # a receive that was posted before
            self.run.times[target] = (self.run.times[target][0], now)
            self.deliver(now, target)
        else:
            self.try_next(now, self.place[target][0])


def parted(order):
    """The order with the receives of each slot in a slot of their own behind its sends."""
    out = Order(order.paths, order.path_of, order.slices)
    for queue, slots in order.queues.items():
        sides = [[a for a in slot if a.kind.startswith("RECV") == receives]
                 for slot in slots for receives in (False, True)]  # fmt: skip
        out.queues[queue] = [tuple(side) for side in sides if side]
    return out


def simulate(order, costs):
    """The run of an order under these costs; where messages block, parted. Raises: Stopped."""
    return _Machine(parted(order) if "p2p_overhead" in costs else order, costs).go()
