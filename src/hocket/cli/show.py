"""`hocket show`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from hocket.cli.arguments import Verb, option, part, taken
from hocket.cli.output import put
from hocket.cli.selection import Selection, costs_of, costs_option
from hocket.errors import UsageError
from hocket.formats import Subject, choose, endings, names

_NARROWEST = 20  # columns of a grid
_SUBJECTS = (Subject.TIMELINE, Subject.SCHEDULE)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `hocket show` takes."""

    selection: Selection = part(Selection)
    costs: str | None = costs_option()
    format: str | None = option(
        "--format",
        "default: by the file's ending, else grid",
        of=names(*_SUBJECTS),
        without="--json",
    )
    width: int | None = option("--width N", "columns of the grid (default: the terminal's)")
    output: str | None = option(
        "--output FILE", f"write to this file ({endings(*_SUBJECTS)}); also -o FILE"
    )
    json: bool = False


def run(options: Options) -> int:
    """Writes the schedule in the format asked for."""
    selection, path = options.selection.apart(options.output)
    form = choose("json" if options.json else options.format, path, *_SUBJECTS)
    taken(options, form, *_SUBJECTS)
    schedule = selection.build()
    if form.subject is Subject.SCHEDULE:
        if options.costs is not None:
            raise UsageError(f"{form.name} holds no times; leave out --costs")
        put(form.write(schedule), path)
        return 0
    if options.width is not None and options.width < _NARROWEST:
        raise UsageError(f"--width is {options.width}; it must be {_NARROWEST} or more")
    from hocket.simulator import simulate

    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    colour = sys.stdout.isatty() and path is None and not plain
    look = {"width": options.width, "colour": colour, "ascii": not _draws_lines()}
    put(form.write(simulate(schedule, costs_of(options.costs)), **look), path)
    if selection.is_file and not form.suffixes:
        from hocket.recognise import recognise

        match = recognise(schedule)
        print("" if match is None else f"{match}\n", end="")
    return 0


def _draws_lines() -> bool:
    """True where the output takes the characters of the grid."""
    try:
        "│·┬─".encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


VERB = Verb("show", Options, run)
