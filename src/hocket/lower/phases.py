"""MoE layers inside a stage: attention, dispatch, experts, combine as stages on two queues.

No kinds and no rules of its own: a phase is a stage, its stream per queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import NamedTuple

import numpy as np

from hocket.errors import ScheduleError, UsageError
from hocket.ir import Action, Kind, Placement, Queue, Schedule, Slot, encode
from hocket.pattern import Pattern, lay

PHASES = ("attn", "disp", "mlp", "comb")
"""The phases of a layer in the order of its forward; the second and the fourth are messages."""
STREAMS = ("", "comm", "", "comm")
"""The stream of each phase: computation, or the all-to-all between the experts' ranks."""

ORDERS: Mapping[str, str] = {
    "serial": "combB mlpB dispB attnB | attnF dispF mlpF combF",
    "naive": "combB attnF mlpB dispF dispB mlpF combF attnB",
    "ring": "combB attnF mlpB dispF dispB mlpF mlpW combF attnB attnW",
    "deepseek": "combB attnF mlpB dispF dispB mlpW mlpF attnB attnW combF",
    "megatron": "combB attnF mlpB dispF mlpW dispB mlpF combF attnB attnW",
    "megatron-early": "combB attnF mlpB dispF mlpW dispB attnB mlpF combF attnW",
}
"""How the forward of one layer and the backward of another run together, in launch order.

A word is a phase and a letter: F forward, B backward, W weight gradient; where a phase has a W
word its B is the input gradient only. The phases of each queue run in the order of their words.
All layers run the words before a bar first, then the words after it.

serial: nothing overlaps. naive: phase against phase, full backwards, as the reference trace
"moe_bad_overlap". ring: the same with weight gradients on their own, after the next forward of
the same phase. deepseek: the weight gradient of the experts before their next forward, which
fills the wait for the dispatch (read from DeepSeek's published trace, github.com/deepseek-ai/
profile-data, the same in all its layers). megatron: the launch order of Megatron-LM's
combined_1f1b; its two queues see the same as with deepseek. megatron-early: its option
ep_overlap_early_attn_memory_release, which frees the activations of attention sooner.
"""


class _Word(NamedTuple):
    phase: int
    letter: Kind


def placement(coarse: Placement, layers: int) -> Placement:
    """The placement in which every stage of `coarse` becomes `layers` layers of four phases.

    Stage s becomes the stages 4 layers s to 4 layers (s + 1) - 1: `0 0/comm 0 0/comm` a layer.
    """
    paths = tuple(
        tuple(Queue(q.rank, stream) for q in path for _ in range(layers) for stream in STREAMS)
        for path in coarse.paths
    )
    return Placement(paths, coarse.path_of, coarse.slices)


def has_phases(placement: Placement) -> bool:
    """True when every path is made of such layers of four phases."""
    return all(
        tuple(q.stream for q in path) == STREAMS * (len(path) // len(STREAMS))
        for path in placement.paths
    )


def phases(schedule: Schedule, *, layers: int = 1, order: str = "deepseek") -> Schedule:
    """The schedule with every stage cut into the phases of its `layers` MoE layers.

    A slot of a forward and a backward runs as `order` pairs them: layer i of the forward with
    layer layers - 1 - i of the backward. All other slots run their phases one after the other.
    order: a key of ORDERS, or words such as those of its values.

    The backward of a message is a whole B; that of a computation is B, or I and W where the
    order or the schedule splits it.

    Raises: UsageError for an unknown order, ScheduleError for a schedule with messages in it.
    """
    parts = _parse(order)
    if schedule.has_communication:
        raise ScheduleError(f"{schedule.name} has SEND and RECV actions; cut it before lowering")
    lines: dict[Queue, list[int]] = {}
    for q, queue in enumerate(schedule.queues):
        for slot in schedule.line(q):
            for action in _expand(slot, layers, parts):
                own = Queue(queue.rank, STREAMS[action.stage % len(PHASES)])
                lines.setdefault(own, []).append(encode(*map(int, action)))
    return Schedule.from_lines(
        schedule.name, placement(schedule.placement, layers),
        {q: _line(codes) for q, codes in lines.items()},
    )  # fmt: skip


def pair(layers: int = 1, order: str = "deepseek") -> Schedule:
    """Only the pair: the backward of microbatch 0 with the forward of microbatch 1, on one rank.

    It is a fragment: the forward of microbatch 0 ran before it and the backward of microbatch 1
    runs after it, so it does not check as complete; `simulate_shared(..., fragment=True)` times
    it alone. `hocket simulate moe-pair` runs it with what comes before and after.

    >>> for queue, slots in pair(1, "deepseek").order.items():
    ...     print(f"{queue}:", *slots)
    0: 0F1 2I0 2W0 2F1 0I0 0W0
    0/comm: 3B0 1F1 1B0 3F1
    """
    one = Placement(((Queue(0),),), (0, 0))
    slot = Slot([Action(Kind.F, 0, 1), Action(Kind.B, 0, 0)])
    return phases(Schedule.from_order("moe-pair", one, [[slot]]), layers=layers, order=order)


def _line(codes: list[int]) -> Pattern:
    return lay(np.array(codes, dtype=np.int64))


def _parse(order: str) -> list[list[_Word]]:
    """The words of an order by name or written out, in parts between the bars.

    Raises: UsageError.
    """
    if order not in ORDERS and " " not in order:
        near = get_close_matches(order, ORDERS, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(ORDERS)}"
        raise UsageError(f"there is no order {order!r} of phases; {hint}")
    return [[_word(w) for w in part.split()] for part in ORDERS.get(order, order).split("|")]


def _word(text: str) -> _Word:
    phase, letter = text[:-1], text[-1:]
    if phase not in PHASES or letter not in ("F", "B", "W"):
        raise UsageError(
            f"{text!r} is no phase and letter; phases: {', '.join(PHASES)}; letters: F, B, W"
        )
    word = _Word(PHASES.index(phase), Kind[letter])
    if word.letter is Kind.W and STREAMS[word.phase]:
        raise UsageError(f"{text!r}: a message has no weights; leave it out")
    return word


_WEIGHTS = [_word("mlpW"), _word("attnW")]


def _expand(slot: Slot, layers: int, parts: list[list[_Word]]) -> Iterator[Action]:
    """The phases of one slot, in launch order."""
    there = {action.kind: action for action in slot}
    backwards = there.keys() - {Kind.F}
    if len(there) != len(slot) or (Kind.B in there and len(backwards) > 1):
        raise ScheduleError(f"slot {slot}: phases pair one forward with one backward, not more")
    split = {w.phase for part in parts for w in part if w.letter is Kind.W}
    if Kind.W in there and not split:
        parts = [*parts, _WEIGHTS]
    for part in parts:
        for i in range(layers):
            for word in part:
                found = _phase(word, there, split)
                if found is not None:
                    kind, action = found
                    layer = i if word.letter is Kind.F else layers - 1 - i
                    stage = (action.stage * layers + layer) * len(PHASES) + word.phase
                    yield Action(kind, stage, action.mb)


def _phase(
    word: _Word, there: dict[Kind, Action], split: set[int]
) -> tuple[Kind, Action] | None:  # fmt: skip
    """What a word stands for in a slot with these actions: a kind, and the action it is part of."""
    if word.letter is Kind.F:
        return (Kind.F, there[Kind.F]) if Kind.F in there else None
    whole = there.get(Kind.B)
    if word.letter is Kind.W:
        action = whole or there.get(Kind.W)
        return None if action is None else (Kind.W, action)
    action = whole or there.get(Kind.I)
    if action is None:
        return None
    if STREAMS[word.phase]:
        return Kind.B, action
    return Kind.I if whole is None or word.phase in split else Kind.B, action
