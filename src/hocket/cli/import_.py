"""`hocket import`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hocket import files
from hocket.cli.arguments import Answer, Verb, option
from hocket.cli.output import put_notes
from hocket.errors import UsageError
from hocket.formats import write_trace

if TYPE_CHECKING:
    from hocket.interop.traces.load import Loaded


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `hocket import` takes."""

    files: tuple[str, ...] = option(
        "FILE...", "a CSV of torch; or traces: of torch.profiler one per rank (.json, .gz), or a "
        "picture of a schedule (.json, .pftrace)",
    )  # fmt: skip
    output: str | None = option("--output FILE", "write the schedule (.sched)")
    costs: str | None = option("--costs FILE", "write the costs that were read (.toml)")
    trace: str | None = option("--trace FILE", "write what was measured as a trace")
    name: str | None = option("--name NAME", "the schedule's name (default: the file's)")
    step: int | None = option(
        "--step N", "which step of a trace (default: the median one)", without="--layout"
    )
    why: bool = option("--why", "report the reason of every idle gap", without="--layout")
    layout: str | None = option(
        "--layout LAYOUT", "such as 'Et*3|(tt|)*29,m|L'",
        heading="a layout of Megatron-LM, in place of files",
    )  # fmt: skip
    p: int | None = option("-p P", "pipeline ranks", needs="--layout")
    m: int | None = option("-m M", "microbatches", needs="--layout")
    group: int | None = option(
        "--group N", "microbatch group size per virtual stage (default: p)", needs="--layout"
    )
    layers: int | None = option(
        "--layers N", "layers of the model, to compare the layout with", needs="--layout"
    )
    embedding: float = option(
        "--embedding-weight X", "in layers (default: 0)", default=0, needs="--layout"
    )
    mtp: float = option(
        "--mtp-weight X", "of multi-token prediction (default: 1)", default=1, needs="--layout"
    )
    loss: float = option(
        "--loss-weight X", "of head and loss (default: 1)", default=1, needs="--layout"
    )
    json: bool = False


def run(options: Options) -> Answer | int:
    """What the files say, written or printed."""
    from hocket.text import dumps

    loaded, text = _load(options), ""
    if options.output:
        files.write(options.output, dumps(loaded.schedule))
    if options.costs:
        _write_costs(options.costs, loaded)
    if options.trace:
        if loaded.timeline is None:
            raise UsageError("there are no times to draw; --trace is for traces of a run")
        write_trace(loaded.timeline, options.trace)
    if options.why and loaded.timeline is None:
        raise UsageError("there are no times, so no gaps; --why is for traces of a run")
    if options.json:
        return Answer("", lambda: _data(loaded, why=options.why))
    if loaded.timeline is not None:
        text = _report(loaded, why=options.why) + "\n"
    elif not options.output:
        text = dumps(loaded.schedule)
    print(text, end="")
    put_notes(loaded.notes, to_stderr=loaded.timeline is None and not options.output)
    return 0


def _load(options: Options) -> Loaded:
    from hocket.interop.traces.load import Loaded, load_foreign

    layout, name = options.layout, options.name
    if layout is None:
        return load_foreign(options.files, name=name, step=options.step)
    from hocket.interop.megatron import Weights, megatron_run

    if options.files:
        raise UsageError("give files or --layout, not both")
    if options.p is None or options.m is None:
        raise UsageError("--layout needs -p and -m")
    weights = Weights(embedding=options.embedding, mtp=options.mtp, loss=options.loss)
    read = megatron_run(
        layout, p=options.p, m=options.m, group=options.group, layers=options.layers,
        weights=weights,
    )  # fmt: skip
    schedule = read.schedule if name is None else read.schedule.renamed(name)
    return Loaded(schedule, read.costs, None, read.warnings)


def _write_costs(path: str, loaded: Loaded) -> None:
    from hocket.costs import costs_toml

    if loaded.costs is None:
        raise UsageError("there are no times in the file; --costs is for traces and layouts")
    head = [f"read by hocket import: {loaded.schedule.name}", *loaded.spread]
    files.write(path, costs_toml(loaded.costs, head))


def _report(loaded: Loaded, *, why: bool) -> str:
    """What was measured, and what the costs that were read predict."""
    from hocket.report import as_text
    from hocket.simulator import simulate
    from hocket.tables import format_time

    measured = loaded.timeline
    assert measured is not None and loaded.costs is not None
    predicted = simulate(loaded.schedule, loaded.costs)
    difference = float(predicted.makespan) / float(measured.makespan) - 1
    time = format_time(predicted.makespan, measured.unit)
    return "\n".join([
        as_text(measured, loaded.costs, why=why), "",
        f"the costs read back predict {time} ({difference:+.1%})", *loaded.spread,
    ])  # fmt: skip


def _data(loaded: Loaded, *, why: bool) -> dict[str, Any]:
    from hocket import report
    from hocket.costs import costs_toml
    from hocket.simulator import simulate
    from hocket.text import as_json

    data: dict[str, Any] = {"schedule": as_json(loaded.schedule), "notes": list(loaded.notes)}
    if loaded.costs is not None:
        data["costs"] = costs_toml(loaded.costs)
    if loaded.timeline is not None and loaded.costs is not None:
        data["measured"] = report.as_json(loaded.timeline, loaded.costs, why=why)
        data["predicted"] = float(simulate(loaded.schedule, loaded.costs).makespan)
        data["spread"] = list(loaded.spread)
    return data


VERB = Verb("import", Options, run)
