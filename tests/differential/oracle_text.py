"""The text of a schedule as plain data, and the rules of an order: from the handbook alone.

Nothing of hocket is imported here or in any other module named `oracle_*`. What they know is
docs/format.md (the text, the costs), docs/glossary.md (slots, memory, metrics), docs/design.md
(needs) and docs/deadlocks.md (messages and transports).
"""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|[FBIWRDUA])(\d+)")
WORK = ("F", "B", "I", "W", "R", "D", "U", "A")


class Action(NamedTuple):
    stage: int
    kind: str
    mb: int

    def __str__(self):
        return f"{self.stage}{self.kind}{self.mb}"


@dataclass
class Order:
    """Paths of queue names, the path of each microbatch, and the slots of each queue."""

    paths: list[list[str]]
    path_of: list[int]
    slices: int = 1
    queues: dict[str, list[tuple[Action, ...]]] = field(default_factory=dict)

    @property
    def m(self):
        return len(self.path_of)

    @property
    def p(self):
        return 1 + max(rank_of(q) for path in self.paths for q in path)

    def path(self, mb):
        return self.paths[self.path_of[mb]]

    def exists(self, a):
        return a.mb < self.m and 0 <= a.stage < len(self.path(a.mb))

    def home(self, a):
        return self.path(a.mb)[a.stage]

    def actions(self):
        return [a for slots in self.queues.values() for slot in slots for a in slot]


def rank_of(queue):
    return int(queue.split("/")[0])


def read(text):
    """The order that a `.sched` text writes; for texts that are right by construction."""
    order = Order([], [])
    taken = {}
    for raw in text.split("\n"):
        head, _, rest = raw.partition("#")[0].partition(":")
        if head.startswith("path"):
            queues, _, mbs = rest.partition("|")
            for part in filter(None, mbs.strip().split(",")):
                first, _, last = part.partition("-")
                for mb in range(int(first), int(last or first) + 1):
                    taken[mb] = len(order.paths)
            order.paths.append(queues.split())
        elif head.startswith("slices"):
            order.slices = int(head.split()[1])
        elif head.strip() and not head.startswith("name"):
            order.queues[head.strip()] = [
                tuple(
                    Action(int(stage), kind, int(mb))
                    for stage, kind, mb in (ACTION.fullmatch(a).groups() for a in slot.split("+"))
                )
                for slot in rest.split()
            ]
    m = len(taken) or 1 + max(a.mb for a in order.actions())
    order.path_of = [taken.get(mb, 0) for mb in range(m)]
    return order


def write(order, name="drawn"):
    """The `.sched` text of an order."""
    lines = ["# hocket 1", f"name {name}"]
    if order.slices > 1:
        lines.append(f"slices {order.slices}")
    for k, path in enumerate(order.paths):
        mbs = ",".join(str(mb) for mb, own in enumerate(order.path_of) if own == k)
        lines.append(f"path {k}: {' '.join(path)} | {mbs}")
    for queue, slots in order.queues.items():
        lines.append(f"{queue}: " + " ".join("+".join(map(str, slot)) for slot in slots))
    return "\n".join(lines) + "\n"


def needs(order, action, present):
    """What an action waits for, each as the action that must have ended.

    A need that nothing in the order meets comes as None. present: the set of the order's actions.
    """
    stage, kind, mb = action

    def first(*choices):
        return next((Action(*c) for c in choices if Action(*c) in present), None)

    last = len(order.path(mb)) - 1
    part = mb % order.slices
    out = []
    if kind == "F":
        if stage > 0:
            out.append(first((stage, "RECV_F", mb), (stage - 1, "F", mb)))
        if part > 0:
            out.append(first((stage, "F", mb - 1)))
    elif kind in "BI":
        out.append(first((stage, "U", mb), (stage, "R", mb), (stage, "F", mb)))
        if stage < last:
            out.append(first((stage, "RECV_B", mb), (stage + 1, "I", mb), (stage + 1, "B", mb)))
        if part < order.slices - 1:
            out.append(first((stage, "I", mb + 1), (stage, "B", mb + 1)))
    elif kind == "W":
        out.append(first((stage, "I", mb)))
    elif kind == "U":
        out.append(first((stage, "A", mb), (stage, "D", mb)))
    elif kind == "A":
        out.append(first((stage, "D", mb)))
    elif kind in ("R", "D", "SEND_F"):
        out.append(first((stage, "F", mb)))
    elif kind == "SEND_B":
        out.append(first((stage, "I", mb), (stage, "B", mb)))
    else:
        out.append(first(partner(action)))
    return out


def partner(message):
    """The other side of a message."""
    stage, kind, mb = message
    return {
        "SEND_F": Action(stage + 1, "RECV_F", mb),
        "RECV_F": Action(stage - 1, "SEND_F", mb),
        "SEND_B": Action(stage - 1, "RECV_B", mb),
        "RECV_B": Action(stage + 1, "SEND_B", mb),
    }[kind]
