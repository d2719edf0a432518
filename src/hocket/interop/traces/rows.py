"""Recorded times as lines of JSON: rank, step, action, start and end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from hocket.errors import TextError, UsageError
from hocket.files import write
from hocket.interop.torch.text import read_word
from hocket.interop.traces.kineto import Recording, without_messages
from hocket.interop.traces.lanes import LONGEST
from hocket.interop.traces.pictures import Block, drawn
from hocket.ir import MAX_RANK, Action, Queue
from hocket.tables import SECONDS
from hocket.timeline import Timeline


class Row(msgspec.Struct, gc=False, omit_defaults=True):
    """What one rank did in one stretch of time; action: `2F0`, or the parts of a slot with `+`."""

    rank: int
    action: str
    start: float
    end: float
    step: int = 0
    unit: str = "s"


def read_rows(texts: Sequence[tuple[str, str]], name: str) -> Recording:
    """The steps that lines say, each file a text and its name; one clock for all ranks.

    Raises: TextError where a line says something else, UsageError where there are none.
    """
    rows = [row for text, source in texts for row in _rows(text, source)]
    if not rows:
        raise UsageError(f"{texts[0][1]}: there are no lines in it")
    zero = min(one.start for one, _, _ in rows)
    steps: dict[int, list[Block]] = {}
    for one, actions, second in rows:
        start, end = (round((time - zero) * second * 1e9) for time in (one.start, one.end))
        steps.setdefault(one.step, []).append(Block(Queue(one.rank), actions, start, end))
    timelines = tuple(
        drawn(blocks, name, texts[0][1]).timeline for _, blocks in sorted(steps.items())
    )
    note = f"{timelines[0].schedule.p} ranks, {len(timelines)} steps"
    return Recording(timelines, (note,))


def write_rows(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Writes measured steps of one order so that `read_rows` reads them, a line per slot."""
    lines = []
    for step, timeline in enumerate(timelines):
        schedule, *times = timeline.schedule, timeline.start, timeline.end
        if schedule.has_communication:
            schedule, *times = without_messages(schedule, *times)
        first = schedule.slots[:-1]
        second = float(SECONDS.get(timeline.unit, 1)) / timeline.ticks.scale
        start, end = np.minimum.reduceat(times[0], first), np.maximum.reduceat(times[1], first)
        rank = schedule.rank_of_queue[schedule.queue_of_slot]
        for slot, row in enumerate(zip(rank.tolist(), start * second, end * second, strict=True)):
            action = "+".join(map(str, schedule.slot(slot)))
            one = Row(row[0], action, round(float(row[1]), 9), round(float(row[2]), 9), step)
            lines.append(msgspec.json.encode(one).decode())
    write(path, "\n".join([*lines, ""]))


def _rows(text: str, source: str) -> Iterator[tuple[Row, tuple[Action, ...], float]]:
    """Every line with its actions, and the seconds of its unit."""
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    faults: list[tuple[int, str]] = []
    for number, line in lines:
        try:
            one = msgspec.json.decode(line, type=Row)
            yield one, _actions(one), float(SECONDS[one.unit])
        except (msgspec.MsgspecError, UsageError, KeyError, ValueError) as error:
            what = (
                f"the unit is one of {', '.join(SECONDS)}" if isinstance(error, KeyError) else error
            )
            faults.append((number, f"not a line with rank, action, start and end: {what}"))
    if faults:
        raise TextError(source, faults)


def _actions(one: Row) -> tuple[Action, ...]:
    """The actions of a line whose numbers can be. Raises: UsageError."""
    if not 0 <= one.rank <= MAX_RANK:
        raise UsageError(f"rank {one.rank} is not one of 0 to {MAX_RANK}")
    if not -LONGEST <= one.start <= one.end <= LONGEST:
        raise UsageError(f"it starts at {one.start:g} and ends at {one.end:g}")
    out: list[Action] = []
    for word in one.action.split("+"):
        item = read_word(word)
        if isinstance(item, str):
            raise UsageError(item)
        if not item.is_compute:
            raise UsageError(f"{word} is not computation; leave out all else")
        out += item.actions
    return tuple(out)
