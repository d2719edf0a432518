"""Every format that hocket writes, one entry each, and the choice among them.

A format that is added to FORMATS is taken by the commands, the help and the messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hocket.errors import UsageError

if TYPE_CHECKING:
    from hocket.comparison import Comparison
    from hocket.ir import Schedule
    from hocket.timeline import Timeline
    from hocket.trace import Encoder, Timelines, TraceSize, Written

_PIXELS = (".png", ".jpg", ".jpeg", ".gif", ".webp")


class Subject(Enum):
    """What a format writes."""

    TIMELINE = "the times of a schedule"
    SCHEDULE = "a schedule"
    COMPARISON = "a table of schedules"
    TRACE = "timelines, with every event"
    EXPORT = "a schedule for another tool"


@dataclass(frozen=True)
class Format:
    """One format: its name, the endings of its files, what it writes and how.

    `write` takes the subject and keywords: for a TIMELINE how a terminal is drawn on (`width`,
    `colour`, `ascii`), for an EXPORT the options that it takes. For a TRACE it takes nothing
    and returns the encoder. A format that has no ending is for a terminal. takes: the options of
    `hocket show` or `hocket export` that only some formats take.
    """

    name: str
    subject: Subject
    write: Callable[..., Any]
    suffixes: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


class Exported(NamedTuple):
    """The text of a file for another tool, what its user has to know, and more for --json."""

    text: str
    notes: tuple[str, ...]
    data: dict[str, Any]


def formats(*subjects: Subject) -> tuple[Format, ...]:
    """The formats that write one of these, the first of them where none is asked for."""
    return tuple(one for one in FORMATS if one.subject in subjects)


def names(*subjects: Subject) -> list[str]:
    """The names of the formats that write one of these."""
    return [one.name for one in formats(*subjects)]


def endings(*subjects: Subject) -> str:
    """The endings of files that the formats write: `.svg, .pdf`."""
    return ", ".join(suffix for one in formats(*subjects) for suffix in one.suffixes)


def choose(name: str | None, path: str | Path | None, *subjects: Subject) -> Format:
    """The format of this name; without one that of the file's ending, else the first.

    Raises: UsageError for an ending of another format than that, and of a picture of pixels.
    """
    known = formats(*subjects)
    suffixes = [suffix.lower() for suffix in Path(path or "").suffixes if suffix.lower() != ".gz"]
    ending = suffixes[-1] if suffixes else ""
    if name is not None:
        if other := next((x for x in known if ending in x.suffixes and x.name != name), None):
            raise UsageError(
                f"{path} is the name of a file of {other.name}, but {name} is asked for; leave one "
                "of them out"
            )
        return next(one for one in known if one.name == name)
    if ending in _PIXELS:
        can = " or ".join(one.suffixes[0] for one in known if one.name in ("svg", "pdf"))
        raise UsageError(f"{path}: pictures are drawn as {can}, not as {ending}")
    return next((one for one in known if ending in one.suffixes), known[0])


def write_trace(
    timeline: Timelines,
    path: str | Path,
    *,
    name: str | None = None,
    ranks: Collection[int] | None = None,
) -> Written:
    """Where the trace was written and what it holds.

    `timeline` is one, or several by name (`{"predicted": t1, "measured": t2}`), which are shown
    one below the other, each from time 0. name: shown above it all; left out, the schedule's.
    ranks: which ranks to show, left out all. `path` ending in `.json`: Chrome's JSON, in any
    other way: Perfetto's format; `.gz` after it: compressed.

    Times are written as nanoseconds; those of a timeline without a unit as if they were
    microseconds. Fractions of nanoseconds are rounded.

    Raises: UsageError for a path that cannot be written, an unknown rank or an unknown unit.
    """
    from hocket import trace

    encoder = choose(None, path, Subject.TRACE).write()
    return trace.write(trace.picture_of(timeline, name, ranks), Path(path), encoder)


def trace_size(
    timeline: Timelines,
    path: str | Path = "trace.pftrace",
    *,
    name: str | None = None,
    ranks: Collection[int] | None = None,
) -> TraceSize:
    """What `write_trace` would write with the same arguments, without writing it.

    Counts are exact; bytes (before compression) are exact for Perfetto's format, and for JSON
    estimated from a sample. `warning` says so when they are more than Perfetto's page takes.

    Raises: UsageError for an unknown rank or an unknown unit.
    """
    from hocket import trace

    picture = trace.picture_of(timeline, name, ranks)
    return trace.size_of(picture, choose(None, path, Subject.TRACE).write().size(picture))


# --- the writers -------------------------------------------------------------------------------


def _grid(timeline: Timeline, **look: Any) -> str:
    from hocket.render.grid import grid

    return grid(timeline, **look) + "\n"


def _svg(timeline: Timeline, **_: Any) -> str:
    from hocket.render.svg import svg

    return svg(timeline) + "\n"


def _pdf(timeline: Timeline, **_: Any) -> bytes:
    from hocket.render.pdf import pdf

    return pdf(timeline)


def _sched(schedule: Schedule) -> str:
    from hocket.text import dumps

    return dumps(schedule)


def _json(schedule: Schedule) -> str:
    from hocket.text import as_json

    return json.dumps(as_json(schedule)) + "\n"


def _chart_text(table: Comparison) -> str:
    from hocket.render.pareto import pareto_text

    return pareto_text(*table.points())


def _chart_svg(table: Comparison) -> str:
    from hocket.render.pareto import pareto_svg

    return pareto_svg(*table.points())


def _chart_pdf(table: Comparison) -> bytes:
    from hocket.render.pareto import pareto_pdf

    return pareto_pdf(*table.points())


def _perfetto() -> Encoder:
    from hocket.trace import perfetto

    return perfetto


def _chrome() -> Encoder:
    from hocket.trace import chrome

    return chrome


def _torch_csv(
    schedule: Schedule, *, comms: bool, padded: bool, receives: str, overlap: bool, unshard: bool
) -> Exported:  # fmt: skip
    from hocket.interop.torch.csv import torch_order

    if comms and padded:
        raise UsageError("--padded is for files without messages; leave out --comms")
    form = "messages" if comms else "padded" if padded else "compute"
    order = torch_order(schedule, form, receives=receives, overlap=overlap, unshard=unshard)
    return Exported(order.text, order.notes, {"microbatches": list(order.microbatches)})


def _megatron(
    schedule: Schedule, *, layout: str | None, layers: int | None, embedding: float, loss: float
) -> Exported:
    from hocket.interop.megatron import Weights, balanced, flags, read_layout, settings_of

    stages = None
    if layout is not None:
        stages = read_layout(layout)
    elif layers is not None:
        weights = Weights(embedding=embedding, loss=loss)
        stages = balanced(layers, schedule.placement.n_stages, weights)
    settings = settings_of(schedule, stages)
    text = "\n".join(flags(settings)) + "\n"
    return Exported(text, (), {"v": settings.v, "group": settings.group})


FORMATS = (
    Format("grid", Subject.TIMELINE, _grid, takes=("width",)),
    Format("sched", Subject.SCHEDULE, _sched, (".sched",)),
    Format("json", Subject.SCHEDULE, _json, (".json",)),
    Format("svg", Subject.TIMELINE, _svg, (".svg",)),
    Format("pdf", Subject.TIMELINE, _pdf, (".pdf",)),
    Format("text", Subject.COMPARISON, _chart_text),
    Format("svg", Subject.COMPARISON, _chart_svg, (".svg",)),
    Format("pdf", Subject.COMPARISON, _chart_pdf, (".pdf",)),
    Format("perfetto", Subject.TRACE, _perfetto, (".pftrace",)),
    Format("chrome", Subject.TRACE, _chrome, (".json",)),
    Format(
        "torch-csv",
        Subject.EXPORT,
        _torch_csv,
        (".csv",),
        takes=("comms", "padded", "receives", "overlap", "unshard"),
    ),
    Format("megatron", Subject.EXPORT, _megatron, takes=("layout", "layers", "embedding", "loss")),
)
