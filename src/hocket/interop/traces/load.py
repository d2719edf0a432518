"""Any foreign file as schedule, costs and times; what a plan for a recorded run starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from hocket.costs import Costs
from hocket.errors import UsageError
from hocket.files import read_text
from hocket.interop.torch.csv import import_csv
from hocket.interop.traces.kineto import is_kineto, rank_trace, read_bytes, recording
from hocket.interop.traces.perfetto import is_pftrace, read_pftrace
from hocket.interop.traces.pictures import read_drawn
from hocket.ir import Schedule
from hocket.lower import strip_communication
from hocket.measured import readings
from hocket.text import as_name
from hocket.timeline import Timeline


@dataclass(frozen=True)
class Loaded:
    """What files say. costs and timeline are there for traces only.

    schedule: without messages where a timeline has them. spread: a line for each time that was
    read, notes: what was left out or found on the way; for people.
    """

    schedule: Schedule
    costs: Costs | None = None
    timeline: Timeline | None = None
    notes: tuple[str, ...] = ()
    spread: tuple[str, ...] = ()


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
        _only(paths, "a CSV holds all ranks")
        found = import_csv(read_text(paths[0]), str(paths[0]), name=known)
        return Loaded(found.schedule, notes=found.notes)
    contents = [read_bytes(path) for path in paths]
    if is_kineto(contents[0]):
        run = recording(
            [rank_trace(d, str(p)) for d, p in zip(contents, paths, strict=True)], known
        )
        steps = run.timelines
        if step is not None and not 0 <= step < len(steps):
            raise UsageError(f"there is no step {step}; the traces have 0 to {len(steps) - 1}")
        timeline = run.typical if step is None else steps[step]
        seen = readings(steps if step is None else [timeline])
        bare = strip_communication(timeline.schedule)
        return Loaded(bare, seen.costs(), timeline, run.notes, tuple(seen.rows()))
    _only(paths, "this is a picture of a schedule, which holds all ranks")
    read = read_pftrace if is_pftrace(contents[0]) else read_drawn
    pictures = read(contents[0], str(paths[0]))
    title, one = next(reversed(pictures.items()))
    others = [x for x in pictures if x != title]
    notes = (f"of several timelines {title} is taken, not {', '.join(others)}",) if others else ()
    schedule = one.schedule if name is None else one.schedule.renamed(name)
    return Loaded(schedule, one.costs, one.timeline, notes)


def measured_case(paths: Sequence[str | Path]) -> tuple[Schedule, Costs]:
    """The order and the costs of a recorded run: what a better plan has to beat.

    Raises: UsageError where the files hold no times, and what `load_foreign` raises.
    """
    found = load_foreign(paths)
    if found.costs is None:
        raise UsageError(f"{paths[0]} holds an order but no times; give traces of a run")
    return found.schedule, found.costs


def _stem(path: str | Path) -> str:
    return as_name(PurePath(path).name.split(".")[0])


def _only(paths: Sequence[str | Path], why: str) -> None:
    if len(paths) > 1:
        raise UsageError(f"{paths[0]}: {why}; give one file")
