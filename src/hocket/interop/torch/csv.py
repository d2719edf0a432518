"""Schedules as CSV files of torch.distributed.pipelining, out and in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath

import numpy as np

from hocket.checker import check
from hocket.deps import BACKWARDS, FULL, MESSAGES, ROWS, SPLIT
from hocket.engine import longest_path
from hocket.errors import ScheduleError, UsageError
from hocket.graph import graph
from hocket.interop.placing import placement_of
from hocket.interop.torch.lowering import add_reduce_grad, add_unshard
from hocket.interop.torch.text import (
    HOUSEKEEPING,
    OVERLAP,
    Item,
    TorchFile,
    dump_rows,
    item_of,
    read_rows,
    slots_of,
)
from hocket.ir import Action, Kind, Schedule, Slot, encode, kinds_of, mbs_of, stages_of
from hocket.lower import insert_communication, strip_communication
from hocket.lower.receives import defer_receives
from hocket.lower.slots import forwards_first
from hocket.text import as_name

FORMS = ("compute", "messages", "padded")
RECEIVES = ("early", "late")


@dataclass(frozen=True)
class TorchOrder:
    """An order that torch runs as meant.

    schedule: what it says, microbatches relabelled, as hocket has it. rows: of each rank; columns
    that stay empty, if any, by `padding`: how many before each item. microbatches: the number
    that torch knows each microbatch of the original by, `[microbatch]`. notes: what the user of
    the file has to know.
    """

    schedule: Schedule
    rows: list[list[Item]]
    microbatches: tuple[int, ...]
    notes: tuple[str, ...]
    padding: list[list[int]] | None = None

    @property
    def text(self) -> str:
        """The CSV."""
        if self.padding is None:
            return dump_rows(self.rows)
        return dump_rows(
            [cell for item, n in zip(row, empty, strict=True) for cell in (*[None] * n, item)]
            for row, empty in zip(self.rows, self.padding, strict=True)
        )


@dataclass(frozen=True)
class Imported:
    """A schedule that was read, and what of the file it does not hold."""

    schedule: Schedule
    notes: tuple[str, ...]


def torch_order(
    schedule: Schedule,
    form: str = "compute",
    *,
    receives: str = "early",
    overlap: bool = False,
    unshard: bool = False,
) -> TorchOrder:
    """The schedule as torch's `_PipelineScheduleRuntime` runs it.

    form: "compute" leaves messages to torch ("compute_only"); "messages" writes them
    ("compute_comms"); "padded" is for `PipelineScheduleMulti`, which goes by columns: computation
    with empty cells, so that nothing stands in the column of what it needs. receives: "late" moves
    each RECV to its consumer, past computation only. overlap: write a slot of a forward and a
    backward as OVERLAP_F_B instead of one after the other. unshard: write UNSHARD and RESHARD,
    which stages with FSDP need ("messages" only).

    Raises: ScheduleError where torch cannot run it, with the reason.
    """
    for what, given, known in (("form", form, FORMS), ("receives", receives, RECEIVES)):
        if given not in known:
            raise UsageError(f"there is no {what} {given!r}; choose from {', '.join(known)}")
    _refuse(schedule)
    check(schedule).raise_if_bad()
    schedule, numbers = relabelled(schedule)
    notes = _notes(schedule, numbers)
    ordered = schedule if overlap else unrolled(schedule)
    if form != "messages":
        if receives == "late" or unshard:
            raise UsageError("receives and unshard are for files with messages (--comms)")
        padded = form == "padded"
        ordered = strip_communication(unrolled(schedule) if padded else ordered)
        rows = [_row(ordered, rank) for rank in range(ordered.p)]
        return TorchOrder(schedule, rows, numbers, notes, _padding(ordered) if padded else None)
    if not ordered.has_communication:
        ordered = insert_communication(ordered)
    if receives == "late":
        ordered = defer_receives(ordered, lead=0)
    check(ordered, "ordered").raise_if_bad()
    if not check(ordered, "rendezvous").ok:
        notes += (
            "with NCCL this order may hang: two ranks wait for each other's receive; "
            "leave the messages out, and hocket places them so that they cannot",
        )
    rows = []
    for rank in range(ordered.p):
        row = _row(ordered, rank)
        rows.append(add_reduce_grad(_with_unshard(row) if unshard else row))
    if not unshard:
        notes += ("without UNSHARD: for stages with FSDP leave the messages to torch",)
    return TorchOrder(schedule, rows, numbers, notes)


def import_csv(text: str, source: str = "<csv>", *, name: str | None = None) -> Imported:
    """The schedule of a CSV; UNSHARD and the like and unknown types are left out and named.

    Raises: TextError for what cannot be read, ScheduleError where stages are missing.
    """
    file = read_rows(text, source)
    return Imported(schedule_of(file, name), tuple(_left_out(file)))


def schedule_of(file: TorchFile, name: str | None = None) -> Schedule:
    """The actions of a CSV as a schedule; everything else is left out."""
    rows = [slots_of(row) for row in file.items]
    return from_rows(name or as_name(PurePath(file.source).stem), rows)


def from_rows(name: str, rows: Sequence[Sequence[tuple[Action, ...]]]) -> Schedule:
    """A schedule from slots rank by rank."""
    placement = placement_of(rows)
    order = {queue: [] for queue in placement.queues}
    return Schedule.from_order(name, placement, {queue: rows[queue.rank] for queue in order})


def _left_out(file: TorchFile) -> list[str]:
    """What of a file is no part of a schedule, one sentence a sort."""
    found = Counter(leaf.type for _, cell in file.cells() for leaf in cell.item.leaves)
    out = []
    known = [f"{found[t]} {t}" for t in HOUSEKEEPING if found[t]]
    if known:
        out.append(f"left out: {', '.join(known)} (torch adds them by itself)")
    if file.unknown:
        words = ", ".join(f"{n} {t}" for t, n in sorted(file.unknown.items()))
        out.append(f"left out, not known to hocket: {words}")
    if sum(file.bubbles):
        out.append(f"left out: {sum(file.bubbles)} empty cells (an order has no time)")
    return out


# --- what torch needs -----------------------------------------------------------------------


def _refuse(schedule: Schedule) -> None:
    """Raises ScheduleError for what torch's runtime has no way to run."""
    placement, name = schedule.placement, schedule.name
    ranks_of = [
        sorted({path[s].rank for path in placement.paths if s < len(path)})
        for s in range(placement.n_stages)
    ]
    copied = next((s for s, ranks in enumerate(ranks_of) if len(ranks) > 1), None)
    if copied is not None:
        raise ScheduleError(
            f"{name} runs stage {copied} on ranks {' and '.join(map(str, ranks_of[copied]))}; "
            "torch.distributed.pipelining knows one rank for each stage and does not sum the "
            "gradients of copies; choose a schedule with one path, such as zb-v or dualpipev, "
            "or run this one with hocket.runtime.Pipeline"
        )
    if len({len(path) for path in placement.paths}) > 1:
        raise ScheduleError(f"{name} has paths of different lengths; torch knows one number")
    if placement.slices > 1:
        raise ScheduleError(
            f"{name} cuts sequences into {placement.slices} slices, which share keys and values; "
            "torch.distributed.pipelining passes only a stage's output on"
        )
    streams = [q for q in schedule.queues if q.stream]
    if streams:
        raise ScheduleError(
            f"{name} has the queue {streams[0]} beside the rank's own; "
            "torch.distributed.pipelining runs one action of a rank at a time"
        )
    if schedule.is_forward_only:
        raise ScheduleError(f"{name} has no backward; torch refuses such a file")
    unknown = sorted(schedule.kinds.difference(FULL, SPLIT, MESSAGES))
    if unknown:
        raise ScheduleError(
            f"{name} has the action {unknown[0].name} ({ROWS[unknown[0]].name}), which "
            "torch.distributed.pipelining does not know; leave it out of the order, or run this "
            "one with hocket.runtime.Pipeline"
        )


def relabelled(schedule: Schedule) -> tuple[Schedule, tuple[int, ...]]:
    """The schedule with its microbatches numbered as the last stage takes them, and the numbers.

    torch stores losses and outputs in the order in which they are made, and looks them up by
    microbatch: any other numbering trains silently wrong.
    """
    codes = schedule.codes
    last = schedule.placement.n_stages - 1
    taken = mbs_of(codes[(kinds_of(codes) == Kind.F) & (stages_of(codes) == last)]).tolist()
    if taken == list(range(schedule.m)):
        return schedule, tuple(range(schedule.m))
    numbers = np.empty(schedule.m, dtype=np.int64)
    numbers[taken] = np.arange(schedule.m)
    return Schedule(
        name=schedule.name, placement=schedule.placement, queues=schedule.queues,
        codes=encode(kinds_of(codes), stages_of(codes), numbers[mbs_of(codes)]),
        slots=schedule.slots, starts=schedule.starts,
    ), tuple(numbers.tolist())  # fmt: skip


def unrolled(schedule: Schedule) -> Schedule:
    """The schedule with every action a slot of its own, forwards first."""
    if schedule.is_single:
        return schedule
    s = forwards_first(schedule)
    return Schedule(
        name=s.name, placement=s.placement, queues=s.queues, codes=s.codes,
        slots=np.arange(len(s.codes) + 1), starts=s.slots[s.starts],
    )  # fmt: skip


def _padding(schedule: Schedule) -> list[list[int]]:
    """How many columns stay empty before each slot, if each takes one and starts when it can.

    Raises: ScheduleError where a rank holds neighbouring stages.
    """
    path = [queue.rank for queue in schedule.placement.paths[0]]
    if any(a == b for a, b in pairwise(path)) and schedule.p > 1:
        raise ScheduleError(
            f"{schedule.name} has neighbouring stages on one rank, which PipelineScheduleMulti "
            "does not run; _PipelineScheduleRuntime does, and needs no padding"
        )
    g = graph(schedule)
    unit = np.ones(g.n_nodes, dtype=np.int64)
    start = longest_path(g, unit, np.zeros(len(g.needs), dtype=np.int64)).start
    return [
        (np.diff(start[first:last], prepend=-1) - 1).tolist()
        for first, last in pairwise(schedule.starts.tolist())
    ]


def _row(schedule: Schedule, rank: int) -> list[Item]:
    """A rank's slots as items."""
    out: list[Item] = []
    for slot in schedule.line(schedule.queues[rank]):
        out += _items(slot)
    return out


def _items(slot: Slot) -> list[Item]:
    """A slot as one item where it is a forward and a backward, else its parts one by one."""
    parts = tuple(item_of(action) for action in slot)
    kinds = {action.kind for action in slot}
    if len(slot) == 2 and Kind.F in kinds and not kinds.isdisjoint(BACKWARDS):
        return [Item(OVERLAP, parts=parts)]
    return list(parts)


def _with_unshard(row: list[Item]) -> list[Item]:
    """A row with UNSHARD and RESHARD among its computation; messages stay where they are."""
    compute = [item for item in row if item.is_compute]
    extended = iter(add_unshard(compute))
    out: list[Item] = []
    for item in row:
        if item.is_compute:
            for more in extended:
                out.append(more)
                if more is item:
                    break
        else:
            out.append(item)
    return out + list(extended)


# --- what the user has to know -----------------------------------------------------------------


def stages_by_rank(schedule: Schedule) -> str:
    """`rank 0: 0 7, rank 1: 1 6`."""
    held = schedule.placement.stages_of_rank
    return ", ".join(f"rank {r}: {' '.join(map(str, stages))}" for r, stages in enumerate(held))


def titan_name(schedule: Schedule) -> str | None:
    """The schedule name under which torchtitan places stages like this; None where none does."""
    (path, *_), p = schedule.placement.paths, schedule.p
    ranks, n = [queue.rank for queue in path], schedule.placement.n_stages
    if ranks == list(range(p)):
        return "1F1B"
    if ranks == [s % p for s in range(n)]:
        return "Interleaved1F1B"
    return "ZBVZeroBubble" if ranks == [*range(p), *reversed(range(p))] else None


def _notes(schedule: Schedule, numbers: tuple[int, ...]) -> tuple[str, ...]:
    notes = [f"{schedule.m} microbatches; the stages: {stages_by_rank(schedule)}"]
    moved = [f"{mb} is {new}" for mb, new in enumerate(numbers) if mb != new]
    if moved:
        shown = ", ".join(moved[:8]) + (f" and {len(moved) - 8} more" if len(moved) > 8 else "")
        notes.append(
            f"microbatches are numbered as the last stage takes them, or torch's losses would be "
            f"wrong: {shown}"
        )
    name = titan_name(schedule)
    notes.append(
        "torchtitan cannot place stages like this"
        if name is None
        else f"in torchtitan start it under the name {name}"
    )
    return tuple(notes)
