"""Every fault of a CSV for torch.distributed.pipelining.

Those that torch never tells among them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from hocket.checker import check
from hocket.deps import ENDS, PARTNER
from hocket.errors import Code, Problem, ScheduleError
from hocket.interop.torch.csv import (
    TorchOrder,
    from_rows,
    schedule_of,
    stages_by_rank,
    titan_name,
    torch_order,
)
from hocket.interop.torch.lowering import lower_as_torch, sources_of
from hocket.interop.torch.text import (
    HOUSEKEEPING,
    OVERLAP,
    Cell,
    Item,
    TorchFile,
    slots_of,
    torch_reads,
)
from hocket.ir import Kind, Schedule, kinds_of, mbs_of, stages_of

RUNTIMES = ("runtime", "multi")


@dataclass(frozen=True)
class Deferred:
    """What `defer_pp_recv=True` makes of an order, and an order with late receives that is safe."""

    problems: tuple[Problem, ...]
    safe: TorchOrder

    @property
    def ok(self) -> bool:
        """True when every receive still meets its own send."""
        return not self.problems

    def __str__(self) -> str:
        if self.ok:
            return "defer_pp_recv=True: every receive meets its own send"
        return "\n".join([
            "defer_pp_recv=True: receives meet other sends; the gradients would be wrong:",
            *(f"  {p.text}" for p in self.problems),
            "  leave it off; late receives that keep the order of every channel: "
            "hocket export --to torch-csv --receives late",
        ])  # fmt: skip


@dataclass(frozen=True)
class ForeignReport:
    """What torch would do with a CSV. form: torch's word for it."""

    source: str
    form: str
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()
    schedule: Schedule | None = None
    deferred: Deferred | None = field(default=None)

    @property
    def ok(self) -> bool:
        """True when torch runs it as meant, with `defer_pp_recv` too if that was asked."""
        return not self.problems and (self.deferred is None or self.deferred.ok)

    def as_json(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        late = self.deferred
        return {
            "source": self.source,
            "for": "torch",
            "form": self.form,
            "ok": self.ok,
            "problems": [p._asdict() for p in self.problems],
            "notes": list(self.notes),
            "defer_pp_recv": None if late is None else {
                "ok": late.ok,
                "problems": [p._asdict() for p in late.problems],
                "safe": late.safe.text,
            },
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [p.text for p in self.problems]
        if not lines and self.schedule is not None:
            s = self.schedule
            lines = [
                f"{self.source}: {len(s.codes)} actions on {s.p} ranks ({self.form}), "
                "torch runs it as meant"
            ]
        if self.deferred is not None:
            lines.append(str(self.deferred))
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def check_torch(
    file: TorchFile,
    *,
    p: int | None = None,
    m: int | None = None,
    runtime: str = "runtime",
    defer: bool = False,
) -> ForeignReport:
    """Every fault of a CSV for torch.

    p, m: ranks and microbatches of the run, where they are known. runtime: "runtime" for
    `_PipelineScheduleRuntime`, "multi" for `PipelineScheduleMulti`, which goes by columns. defer:
    also say what `defer_pp_recv=True` does.
    """
    form = "compute_comms" if file.has_messages else "compute_only"
    problems = [*_rows(file, p), *_words(file, form)]
    notes = list(_notes(file))
    try:
        schedule = schedule_of(file)
    except ScheduleError as error:
        return ForeignReport(file.source, form, (*problems, *error.problems), tuple(notes))
    problems += _placed(file)
    problems += _range(file, m)
    problems += _by_checker(file, schedule)
    problems += _ascending(file, schedule)
    problems += [*_housekeeping(file, form), *_within_a_rank(file, schedule)]
    if runtime == "multi":
        problems += _lock_step(file, schedule)
    deferred = None
    if defer and not problems:
        deferred = deferred_receives(schedule)
        if file.has_messages:
            notes.append(
                "torch leaves the messages of this file where they are, whatever defer_pp_recv "
                "says; the verdict is for its computation alone"
            )
    notes += _advice(schedule)
    return ForeignReport(
        file.source, form, tuple(dict.fromkeys(problems)), tuple(notes), schedule, deferred
    )


def deferred_receives(schedule: Schedule) -> Deferred:
    """What torch's `defer_pp_recv=True` makes of the computation of a schedule.

    Torch sends without tags: a receive takes the first message of its rank pair that is left.
    """
    rows = torch_order(schedule, overlap=True).rows
    lowered = lower_as_torch(rows, defer=True)
    found = check(from_rows(schedule.name, [slots_of(row) for row in lowered]), "ordered")
    return Deferred(found.problems, torch_order(schedule, "messages", receives="late"))


# --- the file -------------------------------------------------------------------------------


def _fault(rank: int | None, slot: int | None, action: str, text: str) -> Problem:
    return Problem(rank, slot, action, text, Code.TORCH)


def _problem(rank: int, cell: Cell, text: str) -> Problem:
    return _fault(rank, cell.column, str(cell.item), f"rank {rank} cell {cell.column}: {text}")


def _rows(file: TorchFile, p: int | None) -> Iterator[Problem]:
    """Lines that are no rank, and the wrong number of ranks."""
    for rank, row in enumerate(file.rows):
        if not row:
            yield _fault(rank, None, "", f"line {rank + 1} is blank; torch counts it as a rank")
    if p is not None and len(file.rows) != p:
        yield _fault(None, None, "", f"the file has {len(file.rows)} ranks, but the run has {p}")


def _words(file: TorchFile, form: str) -> Iterator[Problem]:
    """Words that torch takes for others, and cells that this form must not have."""
    for rank, cell in file.cells():
        for leaf in cell.item.leaves:
            known = leaf.type in Kind.__members__ or leaf.type in HOUSEKEEPING
            if not known and torch_reads(leaf):
                yield _problem(rank, cell, f"torch reads {leaf} as {torch_reads(leaf)}")
        if form == "compute_only" and cell.item.type in HOUSEKEEPING:
            yield _problem(
                rank, cell,
                f"{cell.item} is in a file without messages; torch refuses that: leave it "
                "out, or give SEND and RECV too",
            )  # fmt: skip
    if form == "compute_comms":
        for rank, empty in enumerate(file.bubbles):
            if empty:
                yield _fault(
                    rank, None, "", f"rank {rank} has {empty} empty cells; torch refuses them in a "
                    "file with messages: leave them out",
                )  # fmt: skip


def _placed(file: TorchFile) -> list[Problem]:
    """Stages that stand on two ranks."""
    first: dict[int | None, int] = {}
    out, told = [], set()
    for rank, cell in file.cells():
        for leaf in cell.item.leaves:
            other = first.setdefault(leaf.stage, rank)
            if other != rank and leaf.stage not in told:
                told.add(leaf.stage)
                out.append(_problem(
                    rank, cell,
                    f"{leaf}: stage {leaf.stage} is on rank {other} too; torch knows one rank for "
                    "each stage",
                ))  # fmt: skip
    return out


def _range(file: TorchFile, m: int | None) -> list[Problem]:
    """Microbatches beyond those of the run."""
    out = []
    for rank, cell in file.cells() if m is not None else ():
        for leaf in cell.item.leaves:
            if leaf.mb is not None and m is not None and leaf.mb >= m:
                text = f"{leaf}: there is no microbatch {leaf.mb} (they are 0 to {m - 1})"
                out.append(_problem(rank, cell, text))
    if m is not None and not out:
        known = {x.mb for _, c in file.cells() for x in c.item.leaves if x.mb is not None}
        if len(known) != m:
            text = f"the file has {len(known)} microbatches, but the run has {m}"
            out.append(_fault(None, None, "", text))
    return out


_PLACE = re.compile(r"rank (\d+) slot (\d+)")
_OWN_SLOT = re.compile(r"\(slot (\d+)\)")


def _by_checker(file: TorchFile, schedule: Schedule) -> list[Problem]:
    """What the checker finds, with messages in order of sending; its slots told as cells."""
    columns = [[c.column for c in row if c.item.actions] for row in file.rows]

    def told(problem: Problem) -> Problem:
        rank, slot = problem.rank, problem.slot
        text = _PLACE.sub(
            lambda x: f"rank {x[1]} cell {columns[int(x[1])][int(x[2])]}", problem.text
        )
        if rank is not None:
            text = _OWN_SLOT.sub(lambda x: f"(cell {columns[rank][int(x[1])]})", text)
        cell = None if rank is None or slot is None else columns[rank][slot]
        return problem._replace(slot=cell, text=text)

    copied = len(schedule.placement.paths) > 1  # told already
    return [
        told(p) for p in check(schedule, "ordered").problems if not copied or p.slot is not None
    ]


def _ascending(file: TorchFile, schedule: Schedule) -> list[Problem]:
    """The last stage has to take the microbatches in rising order."""
    codes, last = schedule.codes, schedule.placement.n_stages - 1
    taken = mbs_of(codes[(kinds_of(codes) == Kind.F) & (stages_of(codes) == last)]).tolist()
    late = next(((a, b) for a, b in pairwise(taken) if b < a), None)
    if late is None:
        return []
    for rank, cell in file.cells():
        if Item("F", last, late[1]) in cell.item.leaves:
            return [_problem(
                rank, cell,
                f"{last}F{late[1]} comes after {last}F{late[0]}; torch keeps losses and outputs "
                "in the order in which they are made and looks them up by microbatch: silently "
                "wrong gradients. hocket import and export number the microbatches so that they "
                "rise",
            )]  # fmt: skip
    return []


# --- REDUCE_GRAD, UNSHARD, messages that torch does not send -----------------------------------


def _housekeeping(file: TorchFile, form: str) -> Iterator[Problem]:
    """REDUCE_GRAD once, behind the last backward of each stage; UNSHARD and RESHARD in turn."""
    if form == "compute_only":
        return
    for rank, row in enumerate(file.rows):
        ends: dict[int, Cell] = {}
        reduced: dict[int, list[Cell]] = {}
        for cell in row:
            ends |= {action.stage: cell for action in cell.item.actions if action.kind in ENDS}
            for leaf in cell.item.leaves:
                if leaf.stage is not None and leaf.type == "REDUCE_GRAD":
                    reduced.setdefault(leaf.stage, []).append(cell)
        for stage, end in ends.items():
            yield from _reduction(rank, stage, end, reduced.get(stage, []))
        yield from _shards(rank, row)


def _reduction(rank: int, stage: int, end: Cell, reduced: list[Cell]) -> Iterator[Problem]:
    if not reduced:
        yield _fault(
            rank, None, f"{stage}REDUCE_GRAD",
            f"rank {rank}: {stage}REDUCE_GRAD is missing; without it the gradients of stage "
            f"{stage} are not divided by the number of microbatches: silently wrong",
        )  # fmt: skip
    for cell in reduced[:1]:
        if cell.column < end.column:
            yield _problem(
                rank, cell, f"{cell.item} is placed before {end.item} (cell {end.column}): later "
                "gradients are neither reduced nor divided",
            )  # fmt: skip
    for cell in reduced[1:]:
        text = f"{cell.item} appears twice: the gradients would be divided twice"
        yield _problem(rank, cell, text)


def _shards(rank: int, row: tuple[Cell, ...]) -> Iterator[Problem]:
    """With FSDP a stage computes only between its UNSHARD and its RESHARD."""
    if not any(cell.item.type == "UNSHARD" for cell in row):
        return
    active: set[int | None] = set()
    for cell in row:
        item = cell.item
        if item.type == "UNSHARD":
            if item.stage in active:
                yield _problem(rank, cell, f"{item} appears twice without a RESHARD; FSDP refuses")
            active.add(item.stage)
        elif item.type == "RESHARD":
            if item.stage not in active:
                yield _problem(rank, cell, f"{item} comes without an UNSHARD; FSDP refuses")
            active.discard(item.stage)
        elif item.is_compute:
            for leaf in item.leaves:
                if leaf.stage not in active:
                    text = f"{leaf} runs while stage {leaf.stage} is not unsharded; FSDP refuses"
                    yield _problem(rank, cell, text)


def _within_a_rank(file: TorchFile, schedule: Schedule) -> Iterator[Problem]:
    """Messages between two stages of one rank: torch hands those over by itself."""
    path = [queue.rank for queue in schedule.placement.paths[0]]
    for rank, cell in file.cells():
        if not cell.item.is_message or cell.item.stage is None:
            continue
        other = cell.item.stage + PARTNER[Kind[cell.item.type]][1]
        if 0 <= other < len(path) and path[other] == path[cell.item.stage]:
            yield _problem(
                rank, cell, f"{cell.item}: stage {other} is on rank {rank} too; torch hands its "
                "value over without a message",
            )  # fmt: skip


def _lock_step(file: TorchFile, schedule: Schedule) -> Iterator[Problem]:
    """PipelineScheduleMulti receives in the column in which the other rank computes."""
    at = {action: (rank, cell) for rank, cell in file.cells() for action in cell.item.actions}
    for action, (rank, cell) in at.items():
        if cell.item.type == OVERLAP:
            continue
        for source in sources_of(action):
            if source not in at or at[source][0] == rank:
                continue
            if at[source][1].column >= cell.column:
                yield _problem(
                    rank, cell, f"{action} comes no later than {source} (rank {at[source][0]} "
                    f"cell {at[source][1].column}); PipelineScheduleMulti goes by columns and "
                    "would compute on what is not there: pad with empty cells (export --padded), "
                    "or use _PipelineScheduleRuntime",
                )  # fmt: skip


# --- notes -------------------------------------------------------------------------------------


def _notes(file: TorchFile) -> Iterator[str]:
    if file.unknown:
        words = ", ".join(f"{n} {t}" for t, n in sorted(file.unknown.items()))
        yield f"types that hocket does not know, left out: {words} (torch 2.13 refuses them)"
    blocks = Counter(cell.item.type for _, cell in file.cells())[OVERLAP]
    if blocks:
        yield (
            f"{blocks} OVERLAP_F_B: torch runs their parts one after the other and sends only "
            "after the last, unless a function of yours overlaps them; without it, leave them out"
        )


def _advice(schedule: Schedule) -> Iterator[str]:
    yield f"give every rank its stages in rising order: {stages_by_rank(schedule)}"
    path = [queue.rank for queue in schedule.placement.paths[0]]
    near = next((s for s in range(len(path) - 1) if path[s] == path[s + 1]), None)
    if near is not None and schedule.p > 1:
        yield f"stages {near} and {near + 1} are on one rank: torch's eval() fails with that"
    if titan_name(schedule) is None:
        yield "torchtitan cannot place stages like this"
    split = schedule.codes[np.isin(kinds_of(schedule.codes), (Kind.I, Kind.W))]
    last = schedule.placement.n_stages - 1
    if last and bool((stages_of(split) == last).any()):
        yield (
            f"stage {last} has I and W: torch drops the gradients of weights that FSDP reshards "
            "between F and I, such as the last norm under torchtitan's chunked loss"
        )
