"""PipeOffload: group-interleaved 1F1B whose longest-lived activations wait in host memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from hocket.deps import BACKWARDS
from hocket.ir import Action, Kind, Queue, Schedule, action_of
from hocket.schedules.group_interleaved import RULES, group_interleaved
from hocket.schedules.registry import register

Pair = tuple[int, int]  # stage, microbatch
Span = tuple[float, float]  # start, end

SOLO = 0.7  # of the time of a copy, while nothing is reloaded


@register(
    "pipeoffload",
    source="Wan et al., PipeOffload, arXiv 2503.01328, and the authors' timetable of copies",
    rules=(
        *RULES,
        ("chunks of 0 to v", lambda v, chunks: chunks is None or 0 <= chunks <= v),
        ("ratio >= 1", lambda ratio: ratio >= 1),
    ),
    use="Long sequences or wide layers, where a copy to host memory takes less than the compute.",
)
def pipeoffload(
    p: int, m: int, *, v: int = 2, group: int | None = None, chunks: int | None = None,
    ratio: int = 50,
) -> Schedule:  # fmt: skip
    """Group-interleaved with the first `chunks` stages of each rank offloaded between F and I.

    group: as in group-interleaved; left out, p. chunks: left out, all but the last one, whose
    activations live shortest. ratio: the paper's k in percent, that is a copy there and back over
    F + I + W of a stage. Two ranks share a link, and one copies out while the other copies in. Each
    copy has a place in a timetable for F = I = W; what has none, or lives for less than three
    copies there and back, stays on the device. `A` is where a reload takes its memory, and may
    start.

    >>> from hocket import build, dumps
    >>> print(dumps(build("pipeoffload", p=2, m=3, v=2)), end="")
    # hocket 1
    name pipeoffload
    path 0: 0 1 0 1
    0: 0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 0A0 2W1 0I0 0A1 0W0 2F2 0I1 0A2 0W1 2I2 2W2 0I2 0W2
    0/host: 0D0 0D1 0D2 0U0 0U1 0U2
    1: 1F0 1F1 3F0 3I0 3W0 3F1 1A0 3I1 3W1 1F2 1A1 1I0 1W0 1I1 1W1 1A2 3F2 3I2 3W2 1I2 1W2
    1/host: 1D0 1D1 1U0 1U1 1D2 1U2
    """
    first = group_interleaved(p, m, v=v, group=p if group is None else group)
    lines = [[action for slot in first.line(Queue(r)) for action in slot] for r in range(p)]
    when = _postponed(first, lines, _times(first))
    copy = round(0.015 * ratio, 2)
    n_stages = p * (max(v - 1, 1) if chunks is None else chunks)
    order: dict[Queue, list[Sequence[Action]]] = {}
    for even in range(0, p, 2):
        start = when[lines[even][0]][1]
        tables = [
            _Timetable.of(line, when, copy, start + i * copy, n_stages)
            for i, line in enumerate(lines[even : even + 2])
        ]
        _pack(tables, copy)
        for r, table in enumerate(tables, even):
            order[Queue(r)] = [(action,) for action in _with_rooms(lines[r], when, table)]
            if copies := table.copies([when[action] for action in lines[r]]):
                order[Queue(r, "host")] = [(action,) for action in copies]
    return Schedule.from_order("pipeoffload", first.placement, order)


@dataclass(frozen=True)
class _Timetable:
    """When each copy of one rank starts; `ends` has the end of each forward."""

    out: dict[Pair, float]
    back: dict[Pair, float]
    ends: dict[Pair, float]

    @classmethod
    def of(
        cls, line: Sequence[Action], when: Mapping[Action, Span], copy: float, start: float,
        n_stages: int,
    ) -> _Timetable:  # fmt: skip
        """Copies out from `start` on, copies in halfway between them, of stages below n_stages.

        Copies out are as early as can be, in the order of the forwards; copies in are as late as
        can be, and end the length of a backward before it.
        """
        own = [a for a in line if a.stage < n_stages]
        ends = {a[1:]: when[a][1] for a in own if a.kind is Kind.F}
        due = {a[1:]: 2 * when[a][0] - when[a][1] for a in own if a.kind in BACKWARDS}
        out: dict[Pair, float] = {}
        time = start
        for pair in (x for x, end in ends.items() if due[x] - end > 6 * copy):
            while time < ends[pair]:
                time += 2 * copy
            out[pair] = time
            time += 2 * copy
        while time < when[line[-1]][1]:
            time += 2 * copy
        back: dict[Pair, float] = {}
        for pair in (x for x in reversed(due) if x in out):
            while time > due[pair]:
                time -= 2 * copy
            if time - copy > out[pair] + copy:
                back[pair] = time - copy
                time -= 2 * copy
        return cls({pair: out[pair] for pair in out if pair in back}, back, ends)

    def copies(self, spans: Sequence[Span]) -> list[Action]:
        """All copies in the order in which a rank issues them, between its actions of these times.

        One out comes in front of the action during which it starts, one in behind it.
        """
        starts, ends = zip(*spans, strict=True)
        issued = {
            Action(Kind.D, *pair): (bisect_right(ends, time), time)
            for pair, time in self.out.items()
        }
        issued |= {
            Action(Kind.U, *pair): (bisect_left(starts, time), time)
            for pair, time in self.back.items()
        }
        return sorted(issued, key=lambda action: issued[action])


def _times(schedule: Schedule) -> dict[Action, Span]:
    """When each action runs where each takes 1."""
    from hocket.simulator import simulate  # it is slow to import, and few schedules need it

    t = simulate(schedule)
    spans = zip(t.start.astype(float).tolist(), t.end.astype(float).tolist(), strict=True)
    return dict(zip(map(action_of, schedule.codes.tolist()), spans, strict=True))


def _postponed(
    schedule: Schedule, lines: Sequence[Sequence[Action]], when: dict[Action, Span]
) -> dict[Action, Span]:
    """The times with each forward of the warm-up as late as its successor and its rank allow.

    The first backward keeps its own length before it free.
    """
    when, last = dict(when), schedule.placement.n_stages - schedule.p
    for line in reversed(lines):
        at = next(i for i, action in enumerate(line) if action.kind in BACKWARDS)
        limit = 2 * when[line[at]][0] - when[line[at]][1]
        for action in reversed(line[:at]):
            if action.stage >= last and action.mb == 0:
                break
            start, end = when[action]
            following = when[action._replace(stage=action.stage + 1)][0]
            late = max(start, min(following, limit) - (end - start))
            when[action] = late, late + end - start
            limit = late
    return when


def _pack(tables: Sequence[_Timetable], copy: float) -> None:
    """Moves the copies out before the first copy in of two ranks together, one at a time."""
    begin = min(chain.from_iterable(x.back.values() for x in tables), default=0.0)
    early = sorted(
        (time, i, pair) for i, table in enumerate(tables)
        for pair, time in table.out.items() if time < begin
    )  # fmt: skip
    free = 0.0
    for _, i, pair in early:
        tables[i].out[pair] = start = max(free, tables[i].ends[pair])
        free = start + SOLO * copy


def _with_rooms(
    line: Sequence[Action], when: Mapping[Action, Span], table: _Timetable
) -> list[Action]:
    """The line of a rank with each A before the action that runs when the reload starts."""
    waiting = sorted((time, pair) for pair, time in table.back.items())
    out: list[Action] = []
    for action in line:
        while waiting and waiting[0][0] < when[action][1]:
            out.append(Action(Kind.A, *waiting.pop(0)[1]))
        out.append(action)
    return out
