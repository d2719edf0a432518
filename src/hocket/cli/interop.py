"""`hocket export`, `hocket import` and the check for torch: arguments in, text out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hocket import files
from hocket.errors import UsageError

if TYPE_CHECKING:
    from hocket.interop.megatron import Weights
    from hocket.interop.traces.load import Loaded
    from hocket.ir import Schedule


def export_command(args: argparse.Namespace) -> int:
    """`hocket export`; `args.schedule` is a Schedule. Returns the exit status."""
    text, notes, data = _EXPORTS[args.to](args)
    if args.output:
        files.write(args.output, text)
    if args.json:
        print(json.dumps({**data, "to": args.to, "text": text, "notes": list(notes)}))
        return 0
    if not args.output:
        print(text, end="")
    _tell(notes, to_stderr=not args.output)
    return 0


def _export_torch(args: argparse.Namespace) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    from hocket.interop.torch.csv import torch_order

    if args.comms and args.padded:
        raise UsageError("--padded is for files without messages; leave out --comms")
    order = torch_order(
        args.schedule, "messages" if args.comms else "padded" if args.padded else "compute",
        receives=args.receives, overlap=args.overlap, unshard=args.unshard,
    )  # fmt: skip
    return order.text, order.notes, {"microbatches": list(order.microbatches)}


def _export_megatron(args: argparse.Namespace) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    from hocket.interop.megatron import balanced, flags, read_layout, settings_of

    n = args.schedule.placement.n_stages
    stages = None
    if args.layout is not None:
        stages = read_layout(args.layout)
    elif args.layers is not None:
        stages = balanced(args.layers, n, _weights(args))
    settings = settings_of(args.schedule, stages)
    return "\n".join(flags(settings)) + "\n", (), {"v": settings.v, "group": settings.group}


_EXPORTS = {"torch-csv": _export_torch, "megatron": _export_megatron}


def import_command(args: argparse.Namespace) -> int:
    """`hocket import`. Returns the exit status."""
    from hocket.text import dumps

    found = _from_layout(args) if args.layout is not None else _from_files(args)
    if args.output:
        files.write(args.output, dumps(found.schedule))
    if args.costs:
        _write_costs(args.costs, found)
    if args.trace:
        if found.timeline is None:
            raise UsageError("there are no times to draw; --trace is for traces of a run")
        from hocket.trace import write_trace

        write_trace(found.timeline, args.trace)
    if args.json:
        print(json.dumps(_json(found)))
    elif found.timeline is not None:
        print(_told(found, why=args.why))
    elif not args.output:
        print(dumps(found.schedule), end="")
    if not args.json:
        _tell(found.notes, to_stderr=found.timeline is None and not args.output)
    return 0


def check_foreign(args: argparse.Namespace, schedule: Schedule | None = None) -> int:
    """`hocket check ... --for torch`; of a CSV, or of a schedule as it would be exported.

    Returns the exit status: 0, or 1 where torch would not run it as meant.
    """
    from hocket.interop.torch.check import check_torch
    from hocket.interop.torch.csv import torch_order
    from hocket.interop.torch.text import read_rows

    if schedule is None:
        text = files.read_text(args.schedule)
        source = args.schedule
    else:
        text, source = torch_order(schedule, overlap=True).text, schedule.name
    report = check_torch(
        read_rows(text, source),
        p=args.p, m=args.m, runtime=args.runtime, defer=args.defer_recv,
    )  # fmt: skip
    print(json.dumps(report.as_json()) if args.json else report)
    return 0 if report.ok else 1


# --- import, told --------------------------------------------------------------------------------


def _from_files(args: argparse.Namespace) -> Loaded:
    from hocket.interop.traces.load import load_foreign

    return load_foreign(args.files, name=args.name, step=args.step)


def _from_layout(args: argparse.Namespace) -> Loaded:
    from hocket.interop.megatron import megatron_run
    from hocket.interop.traces.load import Loaded

    if args.files:
        raise UsageError("give files or --layout, not both")
    if args.p is None or args.m is None:
        raise UsageError("--layout needs -p and -m")
    run = megatron_run(args.layout, p=args.p, m=args.m, group=args.group, weights=_weights(args))
    schedule = run.schedule if args.name is None else run.schedule.renamed(args.name)
    return Loaded(schedule, run.costs, None, run.warnings)


def _weights(args: argparse.Namespace) -> Weights:
    from hocket.interop.megatron import Weights

    plain = [
        int(x) if float(x).is_integer() else x
        for x in (args.embedding_weight, args.mtp_weight, args.loss_weight)
    ]
    return Weights(embedding=plain[0], mtp=plain[1], loss=plain[2])


def _write_costs(path: str, found: Loaded) -> None:
    from hocket.costs import costs_toml

    if found.costs is None:
        raise UsageError("there are no times in the file; --costs is for traces and layouts")
    head = [f"read by hocket import: {found.schedule.name}", *found.spread]
    files.write(path, costs_toml(found.costs, head))


def _told(found: Loaded, *, why: bool) -> str:
    """What was measured, and what the costs that were read predict."""
    from hocket.comparison import as_text
    from hocket.simulator import simulate
    from hocket.tables import format_time

    assert found.timeline is not None and found.costs is not None
    seen = found.timeline
    predicted = simulate(found.schedule, found.costs)
    difference = float(predicted.makespan) / float(seen.makespan) - 1
    lines = [as_text(seen, found.costs, why=why), ""]
    lines.append(
        f"the costs read back predict {format_time(predicted.makespan, seen.unit)} "
        f"({difference:+.1%})"
    )
    return "\n".join([*lines, *found.spread])


def _json(found: Loaded) -> dict[str, Any]:
    from hocket.costs import costs_toml
    from hocket.text import as_json

    data: dict[str, Any] = {"schedule": as_json(found.schedule), "notes": list(found.notes)}
    if found.costs is not None:
        data["costs"] = costs_toml(found.costs)
    if found.timeline is not None and found.costs is not None:
        from hocket import comparison as summary
        from hocket.simulator import simulate

        data["measured"] = summary.as_json(found.timeline, found.costs)
        data["predicted"] = float(simulate(found.schedule, found.costs).makespan)
        data["spread"] = list(found.spread)
    return data


def _tell(notes: Sequence[str], *, to_stderr: bool) -> None:
    """Prints notes; beside a file on standard output they go to the other stream."""
    import sys

    for note in notes:
        print(f"note: {note}", file=sys.stderr if to_stderr else sys.stdout)
