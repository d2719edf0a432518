"""`hocket compare`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hocket.cli import selection as selecting
from hocket.cli.arguments import Answer, Verb, option, part
from hocket.cli.output import put, warn
from hocket.cli.selection import Sizes, is_file
from hocket.errors import UsageError
from hocket.formats import Subject, choose, names
from hocket.words import named

if TYPE_CHECKING:
    from hocket.comparison import Competitor, Diff
    from hocket.costs import Costs


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `hocket compare` takes."""

    schedules: tuple[str, ...] = option("SCHEDULE...", selecting.WORD)
    sizes: Sizes = part(Sizes)
    costs: str | None = selecting.costs_option()
    chart: bool = option("--chart", "draw bubble against memory too")
    format: str | None = option(
        "--format", "of the chart (default: by the file's ending, else text)",
        of=names(Subject.COMPARISON),
    )  # fmt: skip
    output: str | None = option("-o, --output FILE", "write the chart to this file")
    max_makespan: float | None = option(
        "--max-makespan T", "exit 1 if it takes longer",
        heading="exactly two schedules: what the second one changes",
    )  # fmt: skip
    max_bytes: float | None = option("--max-bytes N", "exit 1 if a rank needs more")
    json: bool = False


def run(options: Options) -> Answer | int:
    """The table, and the chart where it is asked for; 1 where a limit is broken."""
    from hocket.comparison import compare

    path, costs = options.output, selecting.costs_of(options.costs)
    competitors, left_out = _competitors(options.schedules, options.sizes)
    form = choose(options.format, path, Subject.COMPARISON)
    if options.json and path is None and (options.chart or options.format):
        raise UsageError("--json prints no chart; give --output FILE, or leave the chart out")
    table = compare(competitors, costs, left_out)
    change, broken = _change(competitors, costs, options)
    status = 1 if broken else 0
    for sentence in () if options.json else broken:
        warn(sentence)
    chart = form.write(table) if options.chart or options.format or path else None
    if chart is not None and (path or form.suffixes):
        put(chart, path)
        if path is None:  # the picture is the output
            return status
    parts = (table, f"chart: {path}" if path else chart, change)
    data: dict[str, Any] = {"chart": path} if path else {}
    if change is not None:
        data |= {"change": change.as_json(), "exceeded": broken}
    text = "\n\n".join(str(x) for x in parts if x is not None)
    return Answer(text, lambda: table.as_json() | data, status)


def _change(
    competitors: list[Competitor], costs: Costs, options: Options
) -> tuple[Diff | None, list[str]]:
    """What the second of two schedules changes, and the limits that it breaks."""
    limits = {key: getattr(options, key) for key in ("max_makespan", "max_bytes")}
    if len(options.schedules) != 2:
        if any(limit is not None for limit in limits.values()):
            raise UsageError("--max-makespan and --max-bytes need exactly two schedules")
        return None, []
    from hocket.comparison import diff

    change = diff(*(c.schedule for c in competitors), costs)
    return change, change.exceeded(**limits)


def _competitors(
    words: tuple[str, ...], sizes: Sizes
) -> tuple[list[Competitor], list[tuple[str, str]]]:
    """What to compare: the words, or every registered name; and what does not fit, and why."""
    from hocket.comparison import Competitor, all_that_fit

    if not words:
        if sizes.p is None or sizes.m is None:
            raise UsageError("compare needs -p and -m")
        return all_that_fit(sizes.p, sizes.m, sizes.v)
    _check_v(words, sizes)
    files = {word: selecting.from_file(word, sizes) for word in words if is_file(word)}
    for key in ("p", "m"):  # the names take the size of the files, where that is one
        found = {getattr(schedule, key) for schedule in files.values()}
        if getattr(sizes, key) is None and len(found) == 1:
            sizes = replace(sizes, **{key: found.pop()})
    return [
        Competitor(word, files[word]) if word in files else selecting.competitor_of(word, sizes)
        for word in words
    ], []


def _check_v(words: tuple[str, ...], sizes: Sizes) -> None:
    """Raises UsageError where -v is given and none of the names takes it."""
    from hocket.schedules import entry

    names = [named(word)[0] for word in words if not is_file(word)]
    if sizes.v is not None and names and not any(entry(name).takes_v for name in names):
        raise UsageError(f"-v is for schedules that take it, and {' and '.join(names)} do not")


VERB = Verb("compare", Options, run)
