"""What an action needs, and what it holds and frees. The only place that says so.

Checker, simulator, executor, memory model and lowering read these tables; none of them knows
the rule by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from hocket.ir import Array, Kind


class Need(NamedTuple):
    """One thing an action waits for: the first of `sources` that stands in the order.

    A source is (kind, stage offset), for the same microbatch. A need whose stage lies beyond
    the ends of the microbatch's path does not exist: the first stage reads the data, the last
    one makes its own gradient from the loss. `step`: the source belongs to the slice that many
    after this one of the same sequence; such a need exists only in sliced schedules.
    """

    sources: tuple[tuple[Kind, int], ...]
    what: str
    step: int = 0


_INPUT = Need(((Kind.RECV_F, 0), (Kind.F, -1)), "its input")
_OUTPUT_GRADIENT = Need(
    ((Kind.RECV_B, 0), (Kind.I, +1), (Kind.B, +1)), "the gradient of its output"
)
_ACTIVATIONS = Need(((Kind.F, 0),), "its own forward")
_EARLIER_SLICE = Need(((Kind.F, 0),), "keys and values of the slice before", step=-1)
_LATER_SLICE = Need(
    ((Kind.I, 0), (Kind.B, 0)), "the gradient of its keys and values from the slice after", step=+1
)

NEEDS: dict[Kind, tuple[Need, ...]] = {
    Kind.F: (_INPUT, _EARLIER_SLICE),
    Kind.B: (_ACTIVATIONS, _OUTPUT_GRADIENT, _LATER_SLICE),
    Kind.I: (_ACTIVATIONS, _OUTPUT_GRADIENT, _LATER_SLICE),
    Kind.W: (Need(((Kind.I, 0),), "its input gradient"),),
    Kind.SEND_F: (Need(((Kind.F, 0),), "the output it sends"),),
    Kind.RECV_F: (Need(((Kind.SEND_F, -1),), "the matching send"),),
    Kind.SEND_B: (Need(((Kind.I, 0), (Kind.B, 0)), "the gradient it sends"),),
    Kind.RECV_B: (Need(((Kind.SEND_B, +1),), "the matching send"),),
}

# The kinds that a stage runs for each microbatch of a training step: backwards whole, or split.
WHOLE = (Kind.F, Kind.B)
SPLIT = (Kind.F, Kind.I, Kind.W)

# The message that a compute action's result travels in when the next stage is on another rank:
# (the send, the receive, the stage offset from sender to receiver).
MESSAGE: dict[Kind, tuple[Kind, Kind, int]] = {
    Kind.F: (Kind.SEND_F, Kind.RECV_F, +1),
    Kind.B: (Kind.SEND_B, Kind.RECV_B, -1),
    Kind.I: (Kind.SEND_B, Kind.RECV_B, -1),
}

# The kinds that make the gradient of a stage's input: a whole backward, or the first part of one.
BACKWARDS = tuple(kind for kind, (send, _, _) in MESSAGE.items() if send is Kind.SEND_B)

# Which kinds are forwards and which are those backwards, `[kind]` both.
SIDES = tuple(np.array([kind in some for kind in Kind]) for some in ((Kind.F,), BACKWARDS))

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
    for _, receive, _ in MESSAGE.values()
}

# The send, of the same stage and microbatch, that tells how large a received message is: a
# gradient is as large as the output that it belongs to. The receive is posted after it.
SIZED_BY: dict[Kind, Kind] = {Kind.RECV_B: Kind.SEND_F}


class Effect(NamedTuple):
    """Change of memory by one action: what it takes at its start, what it gives back at its end.

    Each entry is a factor of one quantity: microbatches in flight, a stage's `activation`, what
    is `held` between I and W, and the `gradient` buffers of a running backward.
    """

    takes: dict[str, int]
    frees: dict[str, int]

    def of(self, sizes: Mapping[str, Any]) -> tuple[Any, Any]:
        """What it takes and what it gives back, of quantities with these sizes alone."""
        took, freed = (
            sum(factor * sizes[name] for name, factor in changes.items() if name in sizes)
            for changes in self
        )
        return took, freed


EFFECTS: dict[Kind, Effect] = {
    Kind.F: Effect(takes={"in_flight": 1, "activation": 1}, frees={}),
    Kind.B: Effect(takes={"gradient": 1}, frees={"in_flight": 1, "activation": 1, "gradient": 1}),
    Kind.I: Effect(takes={"gradient": 1}, frees={"activation": 1, "held": -1, "gradient": 1}),
    Kind.W: Effect(takes={}, frees={"in_flight": 1, "held": 1}),
}

# The kinds that put a microbatch in flight at a stage when they start, and those that take it out
# when they end.
STARTS = tuple(kind for kind, effect in EFFECTS.items() if "in_flight" in effect.takes)
ENDS = tuple(kind for kind, effect in EFFECTS.items() if "in_flight" in effect.frees)

# Without any backward in the order (evaluation) a forward keeps nothing.
EVALUATION: dict[Kind, Effect] = {
    Kind.F: Effect(
        takes={"in_flight": 1, "activation": 1}, frees={"in_flight": 1, "activation": 1}
    ),
}


def changes(
    sizes: Mapping[str, Any], shape: tuple[int, ...] = (), *, forward_only: bool = False
) -> Array:
    """What each kind takes at its start and gives back at its end, `[2, kind, *shape]`.

    sizes: of the quantities that count, each a number or an array that fits `shape`.
    forward_only: for an order without any backward.
    """
    table = np.zeros((2, len(Kind), *shape))
    for kind, effect in (EVALUATION if forward_only else EFFECTS).items():
        table[0, kind], table[1, kind] = effect.of(sizes)
    return table
