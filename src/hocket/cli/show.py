"""`hocket show`: a schedule drawn, or as text."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hocket.cli.arguments import Verb, option, part
from hocket.cli.output import form_of, put
from hocket.cli.selection import Selection, costs_of, costs_option
from hocket.errors import UsageError

if TYPE_CHECKING:
    from hocket.ir import Schedule
    from hocket.timeline import Timeline

_NARROWEST = 20  # columns of a grid
_SHOWN = ("grid", "sched", "json", "svg", "pdf")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Those of `hocket show`."""

    selection: Selection = part(Selection)
    costs: str | None = costs_option()
    format: str | None = option("--format", "default: by the file's ending, else grid", of=_SHOWN)
    width: int | None = option("--width N", "columns of the grid (default: the terminal's)")
    output: str | None = option("--output FILE", "write to this file; also -o FILE")
    json: bool = False


def run(options: Options) -> int:
    """Writes the schedule in the format asked for."""
    selection, path = options.selection.apart(options.output)
    options = replace(options, selection=selection, output=path)
    form = form_of("json" if options.json else options.format, path, _SHOWN)
    put(_shown(selection.build(), options, form), path)
    return 0


def _shown(schedule: Schedule, options: Options, form: str) -> str | bytes:
    from hocket.text import as_json, dumps

    if form == "sched":
        return dumps(schedule)
    if form == "json":
        return json.dumps(as_json(schedule)) + "\n"
    if options.width is not None and options.width < _NARROWEST:
        raise UsageError(f"--width is {options.width}; it must be {_NARROWEST} or more")
    from hocket.simulator import simulate

    timeline = simulate(schedule, costs_of(options.costs))
    if form == "svg":
        from hocket.render.svg import svg

        return svg(timeline) + "\n"
    if form == "pdf":
        from hocket.render.pdf import pdf

        return pdf(timeline)
    text = _grid(timeline, options)
    if options.selection.is_file:
        from hocket.recognise import recognise

        match = recognise(schedule)
        text += "" if match is None else f"{match}\n"
    return text


def _grid(timeline: Timeline, options: Options) -> str:
    from hocket.render.grid import grid

    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    colour = sys.stdout.isatty() and not options.output and not plain
    return grid(timeline, width=options.width, colour=colour, ascii=not _draws_lines()) + "\n"


def _draws_lines() -> bool:
    """True where the output takes the characters of the grid."""
    try:
        "│·┬─".encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


VERB = Verb("show", "draw a schedule, or print its text", Options, run)
