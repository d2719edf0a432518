"""`hocket check`, for hocket's runtime or for torch's."""

from __future__ import annotations

from dataclasses import dataclass

from hocket import files
from hocket.cli.arguments import Answer, Verb, option, part
from hocket.cli.selection import Selection, check_bare


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `hocket check` takes."""

    selection: Selection = part(Selection)
    transport: str = option(
        "--transport NAME", "how messages travel: tagged (default), ordered, rendezvous",
        default="tagged", without="--for",
    )  # fmt: skip
    foreign: str | None = option(
        "--for", "also find what torch.distributed.pipelining would get wrong; SCHEDULE may be a "
        "CSV", of=("torch",), heading="for other tools",
    )  # fmt: skip
    defer_recv: bool = option(
        "--defer-recv", "report what defer_pp_recv=True does to the order", needs="--for"
    )
    runtime: str = option(
        "--runtime", "_PipelineScheduleRuntime, or PipelineScheduleMulti (by columns)",
        of=("runtime", "multi"), default="runtime", needs="--for",
    )  # fmt: skip


def run(options: Options) -> Answer:
    """Every fault; 1 where there is one."""
    if options.foreign:
        return _run_foreign(options)
    from hocket.checker import check

    report = check(options.selection.build(), options.transport)
    codes = ", ".join(sorted({problem.code for problem in report.problems}))
    notes = [*(f"note: {note}" for note in report.notes), *([f"codes: {codes}"] if codes else [])]
    data = {
        "schedule": report.schedule.name,
        "transport": report.transport,
        "ok": report.ok,
        "problems": [p._asdict() for p in report.problems],
        "notes": list(report.notes),
    }
    return Answer("\n".join([str(report), *notes]), lambda: data, 0 if report.ok else 1)


def _run_foreign(options: Options) -> Answer:
    """What torch would get wrong: of a CSV, or of a schedule as it would be exported."""
    from hocket.interop.torch.check import check_torch
    from hocket.interop.torch.csv import torch_order
    from hocket.interop.torch.text import read_rows

    selection = options.selection
    if selection.schedule.endswith(".csv"):
        check_bare(selection.schedule, selection.sizes, selection.option)
        text, source = files.read_text(selection.schedule), selection.schedule
    else:
        schedule = selection.build()
        text, source = torch_order(schedule, overlap=True).text, schedule.name
    report = check_torch(
        read_rows(text, source), p=selection.sizes.p, m=selection.sizes.m,
        runtime=options.runtime, defer=options.defer_recv,
    )  # fmt: skip
    return Answer(report, report.as_json, 0 if report.ok else 1)


VERB = Verb("check", Options, run)
