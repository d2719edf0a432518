"""What an action waits for, what it holds, what carries its result: one row per kind.

Theory of operation
-------------------
A schedule is queues of slots of actions. Three rules say what that means, and every part of
hocket reads them from the rows below.

Rule 1, when a slot starts. A slot starts when its queue is free and every need of each of its
actions is met by an action outside the slot that has ended, plus the time of the message where
the two are on different ranks. The parts of a slot start together and end together.

Rule 2, what is held. An action takes what its effect `takes` when it starts and gives back what
it `frees` when it ends. The parts of a slot take everything before any of them frees anything.

Rule 3, what travels. Where a need is met on another rank, the result of the kind that meets it
travels in that kind's message: one SEND on the queue of the source, one RECV on the queue of the
action that needs it.

The kinds of one stage and one microbatch; an arrow points from an action to one that needs it:

    F  <- RECV_F or F of stage -1; F of the slice -1
    B  <- U or R or F; RECV_B or I of stage +1 or B of stage +1; I or B of the slice +1
    I  <- U or R or F; RECV_B or I of stage +1 or B of stage +1; I or B of the slice +1
    W  <- I
    R  <- F
    D  <- F
    U  <- A or D
    A  <- D

What reads rule 1. Three engines say when the slots of a given order start:
1. `engine.longest_path` follows the graph of any order. Its loop exists once more in
   `simulator.samples`, over many samples side by side; and by events in `simulator.contention`,
   where durations depend on what overlaps, so that no longest path exists.
2. `engine.walk` is one compiled pass without a graph, for large orders without messages and slices.
3. `search.kernel` settles the times of an order again after a change.
Tests hold all three equal, and also the samples, and the events where nothing slows. What builds
an order in `search` decides besides when its next slot could start: `listing`, `trials`, `exact`
and `v_reorder`. They return orders, which the engines time.

What the rows do not cover: how long an action takes (`costs`), when a blocking transfer occupies
its queue (the p2p overhead in `costs`), which transport reorders messages (`checker`), and what
slows actions that overlap (`simulator.contention`).

A new kind is one member of `Kind` and one row of `ROWS`. Text, checks, times, memory, pictures,
page, traces and programs follow; the runtime needs a method that does its work.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np


class Kind(IntEnum):
    """What an action does. The names are torch.distributed.pipelining's letters."""

    F = 0
    B = 1
    I = 2  # noqa: E741 (the field's letter; the zero-bubble papers call it B)
    W = 3
    SEND_F = 4
    RECV_F = 5
    SEND_B = 6
    RECV_B = 7
    R = 8  # recomputation
    D = 9  # offload: device to host
    U = 10  # reload: host to device
    A = 11  # allocation of the room for a reload, which may start then

    @property
    def is_communication(self) -> bool:
        """True for the kinds that lowering inserts."""
        return not ROWS[self].work


class Need(NamedTuple):
    """One thing an action waits for: the first of `sources` that the order contains.

    A source is (kind, stage offset), for the same microbatch. A need whose stage lies beyond
    the ends of the microbatch's path does not exist: the first stage reads the data, the last
    one makes its own gradient from the loss. `step`: the source belongs to the slice that many
    after this one of the same sequence; such a need exists only in sliced schedules.
    """

    sources: tuple[tuple[Kind, int], ...]
    what: str
    step: int = 0


class Effect(NamedTuple):
    """Change of memory by one action: what it takes at its start, what it gives back at its end.

    Each entry is a factor of one quantity: microbatches in flight, a stage's `activation`, what
    is `held` between I and W, the `gradient` buffers of a running backward, and the stage's
    `input` where that alone is kept until R.
    """

    takes: Mapping[str, int]
    frees: Mapping[str, int]

    def of(self, sizes: Mapping[str, Any]) -> tuple[Any, Any]:
        """What it takes and what it gives back, of quantities with these sizes alone."""
        took, freed = (
            sum(factor * sizes[name] for name, factor in changes.items() if name in sizes)
            for changes in self
        )
        return took, freed


class Message(NamedTuple):
    """What carries a result to another rank; `offset`: from the sending stage to the receiving."""

    send: Kind
    receive: Kind
    offset: int


class Shade(NamedTuple):
    """Colours of a tile: fill and ink in RGB, and both as an ANSI code of 256 colours."""

    fill: str
    ink: str
    ansi: str


class Look(NamedTuple):
    """How pictures and traces show a kind.

    shades: of a rank's first, third, ... stage, and of its others. trace: its name in Chrome's
    trace format, whose viewers colour by name. hue: a text that Perfetto hashes to the colour.
    """

    shades: tuple[Shade, Shade]
    trace: str
    hue: str


class Row(NamedTuple):
    """All that hocket knows of one kind.

    name: in words. needs: what it waits for. work: False for messages. forward, backward: it
    makes a stage's output, or the gradient of its input. any_queue: it may stand on any queue of
    its rank, not only on the one of its stage. cost: the field of `Costs` that holds its time, None
    for messages and for what takes none. effect: on memory. message: what carries its result.
    """

    name: str
    needs: tuple[Need, ...]
    look: Look
    work: bool = True
    forward: bool = False
    backward: bool = False
    any_queue: bool = False
    cost: str | None = None
    effect: Effect = Effect({}, {})
    message: Message | None = None


_INPUT = Need(((Kind.RECV_F, 0), (Kind.F, -1)), "its input")
_OUTPUT_GRADIENT = Need(
    ((Kind.RECV_B, 0), (Kind.I, +1), (Kind.B, +1)), "the gradient of its output"
)
_FORWARD = Need(((Kind.F, 0),), "its own forward")
_ACTIVATIONS = Need(((Kind.U, 0), (Kind.R, 0), (Kind.F, 0)), "the activations of its forward")
_EARLIER_SLICE = Need(((Kind.F, 0),), "keys and values of the slice before", step=-1)
_LATER_SLICE = Need(
    ((Kind.I, 0), (Kind.B, 0)), "the gradient of its keys and values from the slice after", step=+1
)
_OUTPUT = Message(Kind.SEND_F, Kind.RECV_F, +1)
_GRADIENT = Message(Kind.SEND_B, Kind.RECV_B, -1)

_GREY = Shade("#9a9ea4", "#fff", "48;5;247;38;5;16")
_BROWN = Shade("#8a5a2b", "#fff", "48;5;94;38;5;231")
_TAN = Shade("#dcc3a1", "#35200a", "48;5;180;38;5;16")
_SENT = Look((_GREY, _GREY), "SEND", "SEND#1300")
_RECEIVED = Look((_GREY, _GREY), "RECV", "RECV#7459")

ROWS: dict[Kind, Row] = {
    Kind.F: Row(
        name="forward",
        needs=(_INPUT, _EARLIER_SLICE),
        forward=True,
        cost="F",
        effect=Effect(takes={"in_flight": 1, "activation": 1}, frees={}),
        message=_OUTPUT,
        look=Look(
            (
                Shade("#2f6fc4", "#fff", "48;5;25;38;5;231"),
                Shade("#a9caf4", "#0f2440", "48;5;111;38;5;16"),
            ),
            "Fwd",
            "F#4382",
        ),
    ),
    Kind.B: Row(
        name="backward",
        needs=(_ACTIVATIONS, _OUTPUT_GRADIENT, _LATER_SLICE),
        backward=True,
        cost="B",
        effect=Effect(
            takes={"gradient": 1}, frees={"in_flight": 1, "activation": 1, "gradient": 1}
        ),
        message=_GRADIENT,
        look=Look(
            (
                Shade("#2a8249", "#fff", "48;5;28;38;5;231"),
                Shade("#9fd6ae", "#0e2d18", "48;5;114;38;5;16"),
            ),
            "Bwd",
            "B#202",
        ),
    ),
    Kind.I: Row(
        name="input gradient",
        needs=(_ACTIVATIONS, _OUTPUT_GRADIENT, _LATER_SLICE),
        backward=True,
        cost="I",
        effect=Effect(takes={"gradient": 1}, frees={"activation": 1, "held": -1, "gradient": 1}),
        message=_GRADIENT,
        look=Look(
            (
                Shade("#0f7f8a", "#fff", "48;5;30;38;5;231"),
                Shade("#97dde2", "#0a3236", "48;5;80;38;5;16"),
            ),
            "Igrad",
            "I#4476",
        ),
    ),
    Kind.W: Row(
        name="weight gradient",
        needs=(Need(((Kind.I, 0),), "its input gradient"),),
        cost="W",
        effect=Effect(takes={}, frees={"in_flight": 1, "held": 1}),
        look=Look(
            (
                Shade("#e5a32e", "#2b1c00", "48;5;172;38;5;16"),
                Shade("#f8dfa8", "#3d2a05", "48;5;222;38;5;16"),
            ),
            "Wgrad",
            "W#3976",
        ),
    ),
    Kind.SEND_F: Row(
        name="send of an output",
        needs=(Need(((Kind.F, 0),), "the output it sends"),),
        work=False,
        look=_SENT,
    ),
    Kind.RECV_F: Row(
        name="recv of an output",
        needs=(Need(((Kind.SEND_F, -1),), "the matching send"),),
        work=False,
        look=_RECEIVED,
    ),
    Kind.SEND_B: Row(
        name="send of a gradient",
        needs=(Need(((Kind.I, 0), (Kind.B, 0)), "the gradient it sends"),),
        work=False,
        look=_SENT,
    ),
    Kind.RECV_B: Row(
        name="recv of a gradient",
        needs=(Need(((Kind.SEND_B, +1),), "the matching send"),),
        work=False,
        look=_RECEIVED,
    ),
    Kind.R: Row(
        name="recomputation",
        needs=(_FORWARD,),
        cost="R",
        effect=Effect(takes={"activation": 1}, frees={}),
        look=Look(
            (
                Shade("#7b4bb3", "#fff", "48;5;97;38;5;231"),
                Shade("#d3bdee", "#2a1145", "48;5;183;38;5;16"),
            ),
            "Recompute",
            "R#1",
        ),
    ),
    Kind.D: Row(
        name="offload",
        any_queue=True,
        needs=(_FORWARD,),
        cost="D",
        effect=Effect(takes={}, frees={"activation": 1}),
        look=Look((_BROWN, _BROWN), "Offload", "D#1"),
    ),
    Kind.U: Row(
        name="reload",
        any_queue=True,
        needs=(Need(((Kind.A, 0), (Kind.D, 0)), "its own offload"),),
        cost="U",
        effect=Effect(takes={"activation": 1}, frees={}),
        look=Look((_TAN, _TAN), "Reload", "U#1"),
    ),
    Kind.A: Row(
        name="allocation",
        needs=(Need(((Kind.D, 0),), "its own offload"),),
        effect=Effect(takes={"activation": 1}, frees={}),
        look=Look((_TAN, _TAN), "Allocation", "A#1"),
    ),
}

# The kinds that a stage runs for each microbatch of a training step: backwards full, or split.
# Any other kind of work may be in the order or not.
FULL = (Kind.F, Kind.B)
SPLIT = (Kind.F, Kind.I, Kind.W)

# Without any backward in the order (evaluation) a forward keeps nothing.
EVALUATION: dict[Kind, Effect] = {
    Kind.F: Effect(
        takes={"in_flight": 1, "activation": 1}, frees={"in_flight": 1, "activation": 1}
    ),
}

# Where the order has such a kind for a stage and microbatch, the effects there that differ. With R,
# F keeps only the stage's input, and the backward needs what R made again. With A, the reload finds
# its memory taken.
ALTERED: dict[Kind, dict[Kind, Effect]] = {
    Kind.R: {
        Kind.F: Effect(
            takes={"in_flight": 1, "activation": 1}, frees={"activation": 1, "input": -1}
        ),
        Kind.R: Effect(takes={"activation": 1, "input": -1}, frees={}),
    },
    Kind.A: {Kind.U: Effect(takes={}, frees={})},
}

# The send, of the same stage and microbatch, that tells how large a received message is: a
# gradient is as large as the output that it belongs to. The receive is posted after it.
SIZED_BY: dict[Kind, Kind] = {Kind.RECV_B: Kind.SEND_F}


# --- columns of the table ---------------------------------------------------------------------

NEEDS: dict[Kind, tuple[Need, ...]] = {kind: row.needs for kind, row in ROWS.items()}
EFFECTS: dict[Kind, Effect] = {kind: row.effect for kind, row in ROWS.items()}

# The message that a kind's result travels in when the next stage is on another rank.
MESSAGE: dict[Kind, Message] = {k: row.message for k, row in ROWS.items() if row.message}

WORK = tuple(kind for kind, row in ROWS.items() if row.work)
MESSAGES = tuple(kind for kind, row in ROWS.items() if not row.work)
COPIES = tuple(kind for kind, row in ROWS.items() if row.any_queue)
FORWARDS = tuple(kind for kind, row in ROWS.items() if row.forward)
BACKWARDS = tuple(kind for kind, row in ROWS.items() if row.backward)
SENDS = tuple(dict.fromkeys(message.send for message in MESSAGE.values()))
RECEIVES = tuple(dict.fromkeys(message.receive for message in MESSAGE.values()))

# The kinds that put a microbatch in flight at a stage when they start, and those that take it out
# when they end.
STARTS = tuple(kind for kind, effect in EFFECTS.items() if "in_flight" in effect.takes)
ENDS = tuple(kind for kind, effect in EFFECTS.items() if "in_flight" in effect.frees)

# The other side of each message, and the stage offset to it.
PARTNER: dict[Kind, tuple[Kind, int]] = {
    kind: other
    for send, receive, offset in MESSAGE.values()
    for kind, other in ((send, (receive, offset)), (receive, (send, -offset)))
}

# The actions of the same stage that a received message lets start.
CONSUMERS: dict[Kind, tuple[Kind, ...]] = {
    receive: tuple(
        kind for kind, needs in NEEDS.items() if any((receive, 0) in need.sources for need in needs)
    )
    for receive in RECEIVES
}


# The fields of `Costs` that hold times.
TIMES = tuple(dict.fromkeys(row.cost for row in ROWS.values() if row.cost))


def _users(kind: Kind) -> list[tuple[Kind, list[Kind]]]:
    return [
        (user, [other for other, _ in need.sources[: need.sources.index((kind, 0))]])
        for user, needs in NEEDS.items()
        for need in needs
        if (kind, 0) in need.sources
    ]


# Of each kind of work that may be left out: the kinds of the same stage that need its result, and
# which kinds each of them takes in its place.
USERS = {kind: some for kind in WORK if kind not in FULL + SPLIT and (some := _users(kind))}


def mask(kinds: tuple[Kind, ...]) -> np.ndarray:
    """Which kinds are among these, `[kind]` bool: `mask(WORK)[kinds_of(codes)]`."""
    return np.isin(np.arange(len(Kind)), kinds)


IS_WORK, IS_SEND, IS_RECEIVE = mask(WORK), mask(SENDS), mask(RECEIVES)
IS_FORWARD, IS_BACKWARD = mask(FORWARDS), mask(BACKWARDS)
IS_MESSAGE = ~IS_WORK
ANY_QUEUE = IS_MESSAGE | mask(COPIES)  # a message too may leave from any queue of its rank
SIDES = IS_FORWARD, IS_BACKWARD

# Stages that a kind's result, or the message itself, moves on its way, `[kind]`: +1, -1, or 0.
OFFSET = np.array([
    next((x.offset for k, x in MESSAGE.items() if kind in (k, x.send, x.receive)), 0)
    for kind in Kind
])  # fmt: skip


def changes(
    sizes: Mapping[str, Any], shape: tuple[int, ...] = (), *, forward_only: bool = False
) -> np.ndarray:
    """What each kind takes at its start and gives back at its end, `[2, kind, *shape]`.

    After these rows come, again by kind, those of each entry in `ALTERED`. sizes: of the quantities
    that count, each a number or an array that fits `shape`. forward_only: for an order without any
    backward.
    """
    plain = EVALUATION if forward_only else EFFECTS
    every = [plain, *(plain | altered for altered in ALTERED.values())]
    table = np.zeros((2, len(every) * len(Kind), *shape))
    for i, effects in enumerate(every):
        for kind, effect in effects.items():
            row = i * len(Kind) + kind
            table[0, row], table[1, row] = effect.of(sizes)
    return table


def diagram() -> str:
    """The needs of the rows as text, one line per kind of work: what each waits for."""
    lines = []
    for kind in WORK:
        wants = []
        for need in ROWS[kind].needs:
            sources = [f"{k.name}{f' of stage {o:+d}' if o else ''}" for k, o in need.sources]
            slice_ = f" of the slice {need.step:+d}" if need.step else ""
            wants.append(f"{' or '.join(sources)}{slice_}")
        lines.append(f"    {kind.name:<2} <- {'; '.join(wants)}")
    return "\n".join(lines)
