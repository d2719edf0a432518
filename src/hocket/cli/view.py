"""The commands `hocket view` and `hocket explain`: from parsed words to a page, or to text."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.cli.output import put
from hocket.errors import UsageError

if TYPE_CHECKING:
    from hocket.costs import Costs
    from hocket.ir import Schedule
    from hocket.page.api import Given


def view_command(args: argparse.Namespace) -> int:
    """Writes the page (--output), or serves it until Ctrl-C; returns the exit status.

    `args.schedule` is built, `args.costs` a path or None; `args.found`, where it is there, is what
    traces say (`interop.loading.Loaded`): its timeline is shown above what its costs predict.
    """
    given = _given(args)
    if args.output is None:
        return _serve(given, args)
    text = _page(given)
    put(text, args.output)
    if getattr(args, "json", False):
        print(json.dumps({"page": args.output, "bytes": len(text.encode())}))
    else:
        print(f"page: {args.output} ({len(text.encode()) / 1000:.0f} kB; open it in a browser)")
    return 0


def _given(args: argparse.Namespace) -> Given:
    from hocket.page.api import Given

    found = getattr(args, "found", None)
    if found is None:
        beside = None if args.beside is None else _other(args.beside, args.schedule)
        return Given(schedule=args.schedule, costs=args.costs, limit=args.memory, beside=beside)
    if args.beside is not None:
        raise UsageError(
            "a trace is shown above what its own costs predict; leave out --beside (the served "
            "page's form has other schedules)"
        )
    return Given.of_trace(found, args.costs, args.memory)


def _page(given: Given) -> str:
    from hocket.page.api import shown
    from hocket.page.document import page

    return page(shown(given), limit=given.limit, notes=given.notes)


def _serve(given: Given, args: argparse.Namespace) -> int:
    from hocket.page.serve import Server

    with Server(given, args.port) as server:
        try:
            _announce(server.url, args)
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print(file=sys.stderr)  # the next prompt below the terminal's ^C
    return 0


def _announce(url: str, args: argparse.Namespace) -> None:
    if getattr(args, "json", False):
        print(json.dumps({"url": url}), flush=True)
    else:
        print(f"{url} (Ctrl-C ends it)", flush=True)
    if not args.no_open:
        _open(url)


def _open(url: str) -> None:
    import webbrowser

    if not webbrowser.open(url):
        print("hocket: no browser found here; open the address yourself", file=sys.stderr)


def _other(word: str, beside: Schedule) -> Schedule:
    """The schedule of --beside: a file, or a name with options (`interleaved:v=2`)."""
    from hocket.schedules import build
    from hocket.text import load

    if word.endswith(".sched") or "/" in word or Path(word).is_file():
        return load(word)
    from hocket.page.api import options_of

    name, _, rest = word.partition(":")
    size = {"p": beside.p, "m": beside.m // beside.placement.slices}
    return build(name, **{**size, **options_of(rest)})


def _costs(path: str | None) -> Costs:
    from hocket.costs import Costs, load_costs

    return Costs() if path is None else load_costs(path)


def explain_command(args: argparse.Namespace) -> int:
    """Prints where the bubble is, why, and what would help; returns the exit status.

    `args.schedule` is built, `args.costs` a path or None.
    """
    from hocket.explanation import explain
    from hocket.simulator import simulate

    costs = _costs(args.costs)
    told = explain(simulate(args.schedule, costs), costs, limit=args.memory, others=not args.alone)
    print(json.dumps(told.as_json()) if getattr(args, "json", False) else told)
    return 0
