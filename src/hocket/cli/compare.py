"""`hocket compare`: several schedules under the same costs, in one table and one chart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hocket.cli import selection as selecting
from hocket.cli.arguments import Verb, option, part
from hocket.cli.output import put, put_json, warn
from hocket.cli.selection import Sizes, is_file
from hocket.errors import UsageError
from hocket.formats import Subject, choose, formats

if TYPE_CHECKING:
    from hocket.comparison import Competitor
    from hocket.costs import Costs
    from hocket.recognise import Diff


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the second of exactly two schedules must keep."""

    max_makespan: float | None = option("--max-makespan T", "exit 1 if it takes longer")
    max_bytes: float | None = option("--max-bytes N", "exit 1 if a rank needs more")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Those of `hocket compare`."""

    names: tuple[str, ...] = option("SCHEDULE...", selecting.WORD)
    sizes: Sizes = part(Sizes)
    costs: str | None = selecting.costs_option()
    chart: bool = option("--chart", "draw bubble against memory too")
    format: str | None = option(
        "--format", "of the chart (default: by the file's ending, else text)",
        of=[one.name for one in formats(Subject.COMPARISON)],
    )  # fmt: skip
    output: str | None = option("-o, --output FILE", "write the chart to this file")
    limits: Limits = part(Limits, under="exactly two schedules: what the second one changes")
    json: bool = False


def run(options: Options) -> int:
    """Prints the table, and the chart where it is asked for; 1 where a limit is broken."""
    from hocket.comparison import compare

    competitors, left_out = _competitors(options.names, options.sizes)
    costs = selecting.costs_of(options.costs)
    table = compare(competitors, costs, left_out)
    change, broken = _change(competitors, costs, options)
    form = choose(options.format, options.output, Subject.COMPARISON)
    drawn = form.write(table) if options.chart or options.format or options.output else None
    if drawn is not None and options.output:
        put(drawn, options.output)
    if options.json:
        data = table.as_json()
        if change is not None:
            data |= {"change": change.as_json(), "exceeded": broken}
        put_json(data | ({"chart": options.output} if options.output else {}))
    elif drawn is not None and form.suffixes and not options.output:
        put(drawn, None)  # the picture is the output
    else:
        chart = f"chart: {options.output}" if options.output else drawn
        print(*(x for x in (table, chart, change) if x is not None), sep="\n\n")
        for sentence in broken:
            warn(sentence)
    return 1 if broken else 0


def _change(
    competitors: list[Competitor], costs: Costs, options: Options
) -> tuple[Diff | None, list[str]]:
    """What the second of two schedules changes, and the limits that it breaks."""
    if len(options.names) != 2:
        if options.limits != Limits():
            raise UsageError("--max-makespan and --max-bytes need exactly two schedules")
        return None, []
    from hocket.comparison import costs_of
    from hocket.recognise import diff

    before, after = (c.schedule for c in competitors)
    change = diff(before, after, costs_of(before, costs), b_costs=costs_of(after, costs))
    return change, change.exceeded(**vars(options.limits))


def _competitors(
    words: tuple[str, ...], sizes: Sizes
) -> tuple[list[Competitor], list[tuple[str, str]]]:
    """What to compare: the words, or every registered name; and what does not fit, and why."""
    from hocket.comparison import Competitor, all_that_fit

    if not words:
        if sizes.p is None or sizes.m is None:
            raise UsageError("compare needs -p and -m")
        return all_that_fit(sizes.p, sizes.m, sizes.v)
    files = {word: selecting.from_file(word, sizes) for word in words if is_file(word)}
    common = sizes
    for key in ("p", "m"):  # the names take the size of the files, where that is one
        found = {getattr(schedule, key) for schedule in files.values()}
        if getattr(sizes, key) is None and len(found) == 1:
            common = replace(common, **{key: found.pop()})
    return [
        Competitor(word, files[word]) if word in files else selecting.competitor_of(word, common)
        for word in words
    ], []


VERB = Verb("compare", "every schedule that fits, in one table", Options, run)
