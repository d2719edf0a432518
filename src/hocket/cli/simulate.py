"""`hocket simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.cli.arguments import Answer, Verb, option, part
from hocket.cli.output import warn
from hocket.cli.selection import Selection, costs_of, costs_option
from hocket.errors import UsageError
from hocket.formats import Subject, endings, trace_size, write_trace
from hocket.words import below, ranges

if TYPE_CHECKING:
    from hocket.timeline import Timeline

_LARGE = 100_000  # actions from which on a trace is measured before it is written


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `hocket simulate` takes."""

    selection: Selection = part(Selection)
    costs: str | None = costs_option()
    trace: str | None = option(
        "--trace FILE", f"write a trace ({endings(Subject.TRACE)}; .gz after it compresses)"
    )
    ranks: tuple[range, ...] | None = option(
        "--ranks RANKS",
        "ranks in the trace, such as 0-7 (default: all)",
        read=ranges,
        needs="--trace",
    )
    why: bool = option("--why", "report the reason of every idle gap")
    blocking_receive: bool = option(
        "--blocking-receive", "a RECV in the order holds its rank until the message is there"
    )


def run(options: Options) -> Answer:
    """The timeline; writes its trace."""
    from hocket.report import as_json, as_text
    from hocket.simulator import simulate

    schedule, costs, trace = options.selection.build(), costs_of(options.costs), options.trace
    if options.blocking_receive and not schedule.has_communication:
        raise UsageError(f"{schedule.name} has no RECV in its order; leave out --blocking-receive")
    timeline = simulate(schedule, costs, blocking=options.blocking_receive)
    text, data = as_text(timeline, costs, why=options.why), {}
    if trace is not None:
        _write_trace(timeline, trace, options.ranks)
        text += f"\ntrace: {trace} (open it at ui.perfetto.dev)"
        data = {"trace": trace}
    return Answer(text, lambda: as_json(timeline, costs, why=options.why) | data)


def _write_trace(timeline: Timeline, path: str, ranks: tuple[range, ...] | None) -> None:
    shown = None if ranks is None else below(ranks, timeline.schedule.p, "ranks")
    if len(timeline.schedule.codes) > _LARGE:
        warning = trace_size(timeline, path, ranks=shown).warning
        if warning:
            warn(f"{warning} (--ranks 0-7)")
    write_trace(timeline, path, ranks=shown)


VERB = Verb("simulate", Options, run)
