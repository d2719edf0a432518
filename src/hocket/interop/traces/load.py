"""Any foreign file as schedule, costs and times; what a plan for a recorded run starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from hocket.costs import Costs
from hocket.errors import UsageError
from hocket.files import read, read_text, unpacked
from hocket.interop.torch.csv import import_csv
from hocket.interop.traces.kineto import Recording, is_kineto, rank_trace, recording
from hocket.interop.traces.perfetto import is_pftrace, read_pftrace
from hocket.interop.traces.pictures import read_drawn
from hocket.interop.traces.rows import read_rows
from hocket.ir import Schedule
from hocket.lower import strip_communication
from hocket.measured.readings import readings
from hocket.text import as_name
from hocket.timeline import Timeline


@dataclass(frozen=True)
class Loaded:
    """What files say. costs and timeline are there for traces only.

    schedule: without messages where a timeline has them. spread: a line for each time that was
    read, notes: what was left out or found on the way; for people. steps: all that were measured.
    """

    schedule: Schedule
    costs: Costs | None = None
    timeline: Timeline | None = None
    notes: tuple[str, ...] = ()
    spread: tuple[str, ...] = ()
    steps: tuple[Timeline, ...] = ()


def load_foreign(
    paths: Sequence[str | Path], *, name: str | None = None, step: int | None = None
) -> Loaded:
    """What a CSV of torch, the traces of a run, or a picture of a schedule says.

    step: which step of the traces, from 0; left out, the one whose makespan is the median.

    Raises: UsageError, TextError, ScheduleError.
    """
    if not paths:
        raise UsageError("there is nothing to read; give a CSV, or the traces of a run")
    known = name or _stem(paths[0])
    if PurePath(paths[0]).suffix == ".csv":
        _only(paths, "a CSV holds all ranks", step)
        found = import_csv(read_text(paths[0]), str(paths[0]), name=known)
        return Loaded(found.schedule, notes=found.notes)
    if PurePath(paths[0]).suffix == ".jsonl":
        return _of_run(read_rows([(read_text(path), str(path)) for path in paths], known), step)
    first = unpacked(read(paths[0]), paths[0])
    if is_kineto(first):
        return _recorded(first, paths, known, step)
    pictures = (read_pftrace if is_pftrace(first) else read_drawn)(first, str(paths[0]))
    _only(paths, "this is a picture of a schedule, which holds all ranks", step)
    title, one = next(reversed(pictures.items()))
    others = [x for x in pictures if x != title]
    notes = (f"of several timelines {title} is taken, not {', '.join(others)}",) if others else ()
    schedule = one.schedule if name is None else one.schedule.renamed(name)
    return Loaded(schedule, one.costs, one.timeline, notes, steps=(one.timeline,))


def _recorded(first: bytes, paths: Sequence[str | Path], name: str, step: int | None) -> Loaded:
    """A run of torch.profiler; one file after the other is in memory."""
    traces = [rank_trace(first, str(paths[0]))]
    del first
    traces += (rank_trace(unpacked(read(path), path), str(path)) for path in paths[1:])
    return _of_run(recording(traces, name), step)


def _of_run(run: Recording, step: int | None) -> Loaded:
    """All steps of a run, and the one that was asked for."""
    steps = run.timelines
    if step is not None and not 0 <= step < len(steps):
        raise UsageError(f"there is no step {step}; the traces have 0 to {len(steps) - 1}")
    timeline = run.typical if step is None else steps[step]
    seen = readings(steps if step is None else [timeline])
    bare = strip_communication(timeline.schedule)
    return Loaded(bare, seen.costs(), timeline, run.notes, tuple(seen.rows()), steps)


def _stem(path: str | Path) -> str:
    return as_name(PurePath(path).name.split(".")[0])


def _only(paths: Sequence[str | Path], why: str, step: int | None) -> None:
    if len(paths) > 1:
        raise UsageError(f"{paths[0]}: {why}; give one file")
    if step is not None:
        raise UsageError(f"{paths[0]} holds one step; --step is for traces of torch.profiler")
