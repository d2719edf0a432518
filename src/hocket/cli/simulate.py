"""`hocket simulate`: the predicted times and memory of a schedule, and its trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.cli.arguments import Verb, option, part
from hocket.cli.output import put_json, warn
from hocket.cli.selection import Selection, costs_of, costs_option
from hocket.formats import Subject, endings, trace_size, write_trace
from hocket.words import below, ranges

if TYPE_CHECKING:
    from hocket.timeline import Timeline

_LARGE = 100_000  # actions from which on a trace is measured before it is written


@dataclass(frozen=True, kw_only=True)
class Options:
    """Those of `hocket simulate`."""

    selection: Selection = part(Selection)
    costs: str | None = costs_option()
    trace: str | None = option(
        "--trace FILE", f"write a trace ({endings(Subject.TRACE)}; .gz after it compresses)"
    )
    ranks: tuple[range, ...] | None = option(
        "--ranks RANKS", "ranks in the trace, such as 0-7 (default: all)", read=ranges
    )
    why: bool = option("--why", "report the reason of every idle gap", default=False)
    blocking_receive: bool = option(
        "--blocking-receive", "a RECV in the order holds its rank until the message is there"
    )
    json: bool = False


def run(options: Options) -> int:
    """Prints the timeline, and writes its trace."""
    from hocket.comparison import as_json, as_text
    from hocket.simulator import simulate

    schedule, costs = options.selection.build(), costs_of(options.costs)
    timeline = simulate(schedule, costs, blocking=options.blocking_receive)
    if options.trace:
        _write_trace(timeline, options.trace, options.ranks)
    if options.json:
        put_json(as_json(timeline, costs) | ({"trace": options.trace} if options.trace else {}))
        return 0
    print(as_text(timeline, costs, why=options.why))
    if options.trace:
        print(f"trace: {options.trace} (open it at ui.perfetto.dev)")
    return 0


def _write_trace(timeline: Timeline, path: str, ranks: tuple[range, ...] | None) -> None:
    shown = None if ranks is None else below(ranks, timeline.schedule.p, "ranks")
    if len(timeline.schedule.codes) > _LARGE:
        warning = trace_size(timeline, path, ranks=shown).warning
        if warning:
            warn(f"{warning} (--ranks 0-7)")
    write_trace(timeline, path, ranks=shown)


VERB = Verb("simulate", "predict time, bubble, memory and critical path", Options, run)
