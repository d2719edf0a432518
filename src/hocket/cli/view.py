"""`hocket view`, served or as one file."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.cli.arguments import Answer, Verb, option, part
from hocket.cli.explain import memory_option
from hocket.cli.output import put, warn
from hocket.cli.selection import FOREIGN, Selection, Sizes, beside, costs_option
from hocket.errors import UsageError

if TYPE_CHECKING:
    from hocket.page.api import Given


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `hocket view` takes."""

    selection: Selection = part(Selection)
    costs: str | None = costs_option()
    traces: tuple[str, ...] = option(
        "TRACE...", "more traces of the same run, one per rank; SCHEDULE is then the first of "
        "them: .pftrace, .json or .gz, of hocket or torch.profiler (or a .csv of torch)",
    )  # fmt: skip
    step: int | None = option("--step N", "which step of the traces (default: the median)")
    memory: float | None = memory_option("drawn under the tiles")
    beside: str | None = option(
        "--beside SCHEDULE", "a second schedule below: a name (same p and m), or a .sched file"
    )
    output: str | None = option("--output FILE", "write one self-contained file, serve nothing")
    port: int = option("--port N", "port on 127.0.0.1 (default: a free one)", default=0)
    no_open: bool = option("--no-open", "print the address, but start no browser")
    json: bool = False


def run(options: Options) -> Answer | int:
    """Writes the page (--output), or serves it until Ctrl-C."""
    selection, path = options.selection.apart(options.output)
    if path is not None and (options.port or options.no_open):
        raise UsageError("--port and --no-open are for the served page; leave out the file")
    given = _given(replace(options, selection=selection))
    if path is None:
        return _serve(given, options)
    from hocket.page.api import shown
    from hocket.page.document import page

    text = page(shown(given), limit=given.limit, notes=given.notes)
    put(text, path)
    n_bytes = len(text.encode())
    sentence = f"page: {path} ({n_bytes / 1000:.0f} kB; open it in a browser)"
    return Answer(sentence, lambda: {"page": path, "bytes": n_bytes})


def _given(options: Options) -> Given:
    """What the page shows: a trace above what its costs predict, or one or two schedules."""
    from hocket.page.api import Given

    selection, costs, memory = options.selection, options.costs, options.memory
    if Path(selection.schedule).suffix.lower() in FOREIGN:
        return _of_traces(options)
    if options.step is not None:
        raise UsageError("--step is for traces of torch.profiler")
    if options.traces:
        raise UsageError(
            f"view shows one schedule, and {options.traces[0]} with --beside; only traces of one "
            "run can be several"
        )
    schedule = selection.build()
    word, v = options.beside, selection.sizes.v
    second = None if word is None else beside(word, schedule, v)
    return Given(schedule=schedule, costs=costs, limit=memory, beside=second)


def _of_traces(options: Options) -> Given:
    from hocket.interop.traces.load import load_foreign
    from hocket.page.api import Given

    first = options.selection.schedule
    if options.selection.option or options.selection.sizes != Sizes():
        raise UsageError(f"{first} is a file: -p, -m, -v and -o are for named schedules")
    loaded = load_foreign([first, *options.traces], step=options.step)
    if options.beside is not None:
        raise UsageError(
            "a trace is shown above what its own costs predict; leave out --beside (the served "
            "page's form has other schedules)"
        )
    return Given.of_trace(loaded, options.costs, options.memory)


def _serve(given: Given, options: Options) -> int:
    from hocket.page.serve import Server

    with Server(given, options.port) as server:
        try:
            _announce(server.url, options)
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print(file=sys.stderr)  # the next prompt below the terminal's ^C
    return 0


def _announce(url: str, options: Options) -> None:
    print(json.dumps({"url": url}) if options.json else f"{url} (Ctrl-C ends it)", flush=True)
    if not options.no_open:
        import webbrowser

        if not webbrowser.open(url):
            warn("no browser found here; open the address yourself")


VERB = Verb("view", Options, run)
