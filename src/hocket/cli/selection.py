"""Which schedule the words of a command line select: a file, a registered name, a function."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.cli.arguments import option, part
from hocket.errors import UsageError
from hocket.words import named

if TYPE_CHECKING:
    from hocket.comparison import Competitor
    from hocket.costs import Costs
    from hocket.ir import Schedule

FOREIGN = (".json", ".gz", ".pftrace", ".csv", ".jsonl")  # files of other tools, and traces
WORD = "a name from `hocket list`, name:key=value,..., module:function, or a .sched file"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The numbers of ranks, of microbatches and of stages per rank, as far as they are given."""

    p: int | None = option("-p P", "ranks")
    m: int | None = option("-m M", "microbatches")
    v: int | None = option("-v V", "stages per rank")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A schedule's name or file, and the sizes and options of one that is built."""

    schedule: str = option("SCHEDULE", WORD)
    sizes: Sizes = part(Sizes)
    option: tuple[str, ...] = option(
        "-o, --option KEY=VALUE...", "an option of the schedule, such as group=4"
    )

    @property
    def is_file(self) -> bool:
        """True where the schedule is read from a file."""
        return is_file(self.schedule)

    def build(self) -> Schedule:
        """The schedule. Raises: HocketError."""
        return schedule_of(self.schedule, self.sizes, self.option)

    def apart(self, output: str | None) -> tuple[Selection, str | None]:
        """The same without the file that `-o fig.pdf` names, and the file of the output.

        An option of a schedule has a `=`, a file has an ending. Raises: UsageError.
        """
        files = [word for word in self.option if "=" not in word]
        for word in files:
            if not Path(word).suffix:
                raise UsageError(
                    f"expected key=value, found {word!r} (a file is named with --output)"
                )
        both = [*([output] if output else []), *files]
        if len(both) > 1:
            raise UsageError(f"the output is named twice: {both[0]} and {both[1]}")
        rest = tuple(word for word in self.option if word not in files)
        return replace(self, option=rest), (both[0] if both else None)


def is_file(word: str) -> bool:
    """True where a word names a file, not a registered schedule."""
    return word.endswith(".sched") or os.sep in word or Path(word).is_file()


def schedule_of(word: str, sizes: Sizes, more: Sequence[str] = ()) -> Schedule:
    """The schedule of a word; more: options as words. Raises: HocketError."""
    if is_file(word):
        return from_file(word, sizes, more)
    from hocket.schedules import build, entry

    name, options = named(word, more)
    entry(name)  # a wrong name is reported before a missing size
    return build(name, **_settings(name, sizes, options))


def from_file(path: str, sizes: Sizes, more: Sequence[str] = ()) -> Schedule:
    """The schedule in a file; sizes that are given must be those of the file."""
    from hocket.text import load

    if Path(path).suffix.lower() in FOREIGN:
        csv = f", `hocket check {path} --for torch` checks it" if path.endswith(".csv") else ""
        raise UsageError(f"{path} is no .sched file; `hocket import {path}` reads it{csv}")
    schedule = load(path)
    for key in ("p", "m"):
        given = getattr(sizes, key)
        if given is not None and given != getattr(schedule, key):
            raise UsageError(
                f"{path} has {key}={getattr(schedule, key)}, not {given}; leave out -{key}"
            )
    check_bare(path, sizes, more)
    return schedule


def check_bare(path: str, sizes: Sizes, more: Sequence[str]) -> None:
    """Raises UsageError where a file stands beside settings of named schedules."""
    if sizes.v is not None or more:
        raise UsageError(f"{path} is a file: -v and -o are for named schedules")


def competitor_of(word: str, sizes: Sizes) -> Competitor:
    """A registered schedule to compare; -v is for those that take it. Raises: UsageError."""
    from hocket.comparison import competitor
    from hocket.schedules import entry

    name, options = named(word)
    takes_v = entry(name).takes_v and "v" not in options
    sizes = sizes if takes_v else replace(sizes, v=None)
    return competitor(word, name, **_settings(name, sizes, options))


def beside(word: str, first: Schedule, v: int | None) -> Schedule:
    """The schedule to show or run beside a first one; a name takes the sizes of that.

    Sizes that differ are reported by who uses the two. Raises: HocketError.
    """
    if is_file(word):
        return from_file(word, Sizes())
    sizes = {"p": first.p, "m": first.m // first.placement.slices, "v": v}
    own = named(word)[1].keys()
    given = {key: None if key in own else size for key, size in sizes.items()}
    return competitor_of(word, Sizes(**given)).schedule


def _settings(name: str, sizes: Sizes, options: dict[str, Any]) -> dict[str, Any]:
    """Sizes and options together, p, m and v from either."""
    given = {key: getattr(sizes, key) for key in ("p", "m", "v")}
    for key, size in given.items():
        if key in options and size is not None:
            raise UsageError(f"{key} is given twice: -{key} {size} and {key}={options[key]}")
    for key, what in (("p", "ranks"), ("m", "microbatches")):
        if options.get(key, given[key]) is None:
            raise UsageError(f"{name} needs the number of {what}: give -{key}")
    return given | options


def costs_option() -> Any:
    """The field of --costs."""
    return option(
        "--costs FILE", "costs.toml, or a built-in profile (default: F = I = W = 1 per rank)"
    )


def costs_of(path: str | None) -> Costs:
    """The costs of a file or profile; left out, 1 per rank. Raises: CostError, UsageError."""
    from hocket.costs import Costs, load_costs

    return load_costs(path) if path else Costs(per="rank")
