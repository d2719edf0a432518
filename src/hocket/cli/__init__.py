"""The command line: parses words, calls one function, prints. No knowledge of its own.

Heavy modules are imported inside the command that needs them.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket import __version__
from hocket.errors import CostError, HocketError, TextError, UsageError

if TYPE_CHECKING:
    from hocket.comparison import Comparison, Competitor
    from hocket.costs import Costs
    from hocket.ir import Schedule
    from hocket.recognise import Diff
    from hocket.schedules import Entry
    from hocket.timeline import Timeline

_SCHEDULE_HELP = "a name from `hocket list`, name:key=value,..., module:function, or a .sched file"


_NARROWEST = 20  # columns of a grid
_SHOWN = ("grid", "sched", "json", "svg", "pdf")
_FOREIGN = (".json", ".gz", ".pftrace", ".csv")
_LARGE = 100_000  # actions from which on a trace is measured before it is written


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 cannot run, 2 wrong use or unreadable."""
    _prepare_output()
    parser = _parser()
    args = parser.parse_args(argv)
    if not hasattr(args, "run"):
        parser.print_help()
        return 2
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except (UsageError, TextError, CostError) as error:
        return _fail(error, 2)
    except HocketError as error:
        return _fail(error, 1)
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        _drop_output()
        return 0
    except KeyboardInterrupt:
        print("hocket: stopped", file=sys.stderr)
        return 130
    except OSError as error:  # a full disk under the output, say
        _drop_output()
        return _fail(UsageError(f"cannot write: {error.strerror}"), 1)


def _prepare_output() -> None:
    """Makes sure that printing cannot fail for want of a stream or of a character."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (lives as long as the process)
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _drop_output() -> None:
    """What is still in the buffer goes nowhere."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: HocketError, status: int) -> int:
    print(f"hocket: {error}", file=sys.stderr)
    return status


# --- arguments ---------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hocket",
        description="Pipeline-parallel training schedules: generate, check, predict, see, run.",
    )
    parser.add_argument("--version", action="version", version=f"hocket {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> Any:
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        sub.set_defaults(run=run)
        if name != "demo":
            sub.add_argument("--json", action="store_true", help="print one JSON object")
        return sub

    command("list", _list, "every schedule, what it needs, its weights and source")
    show = command("show", _show, "draw a schedule, or print its text")
    _add_schedule(show)
    _add_costs(show)
    show.add_argument("--format", choices=_SHOWN, help="default: by the file's ending, else grid")
    show.add_argument("--width", type=int, help="columns of the grid (default: the terminal's)")
    show.add_argument("--output", metavar="FILE", help="write to this file; also -o FILE")
    check = command("check", _check, "find every fault of a schedule before it runs")
    _add_schedule(check)
    check.add_argument(
        "--transport",
        default="tagged",
        help="how messages travel: tagged (default), ordered, rendezvous",
    )
    import_module("hocket.cli.interop_options").add_check_arguments(check)
    simulate = command("simulate", _simulate, "predict time, bubble, memory and critical path")
    _add_schedule(simulate)
    _add_costs(simulate)
    simulate.add_argument("--trace", metavar="FILE", help="write .pftrace (Perfetto) or .json")
    simulate.add_argument("--ranks", help="ranks in the trace, such as 0-7 (default: all)")
    simulate.add_argument("--why", action="store_true", help="tell the reason of every idle gap")
    simulate.add_argument(
        "--blocking-receive",
        action="store_true",
        help="a RECV in the order holds its rank until the message is there",
    )
    compare = command("compare", _compare, "every schedule that fits, in one table")
    compare.add_argument("names", nargs="*", metavar="SCHEDULE", help=_SCHEDULE_HELP)
    _add_size(compare)
    _add_costs(compare)
    compare.add_argument("--chart", action="store_true", help="draw bubble against memory too")
    compare.add_argument(
        "--format",
        choices=("text", "svg", "pdf"),
        help="of the chart (default: by the file's ending, else text)",
    )
    compare.add_argument("-o", "--output", metavar="FILE", help="write the chart to this file")
    limits = compare.add_argument_group("exactly two schedules: what the second one changes")
    limits.add_argument("--max-makespan", type=float, metavar="T", help="exit 1 if it takes longer")
    limits.add_argument("--max-bytes", type=float, metavar="N", help="exit 1 if a rank needs more")
    demo = command("demo", _demo, "a tour: compare, draw, trace, and train a small model")
    demo.add_argument("--output", default="traces", help="folder for the traces")
    _add_brought(command)
    return parser


# The modules of a package: its arguments, and its commands.
_MODULES = {
    "planner": ("cli.plan_options", "cli.plan"),
    "interop": ("cli.interop_options", "cli.interop"),
    "render": ("cli.view_options", "cli.view"),
    "runtime": ("train.options", "train.command"),
}

# Commands that a package brings: its `options.py` has `add_NAME_arguments`, its `command.py` has
# `NAME_command`. (name, package, arguments that are the same in several commands, what it does)
_BROUGHT = (
    ("run", "runtime", ("schedule",), "train a real model with exactly this schedule"),
    ("profile", "runtime", ("schedule",), "measure the costs of a real model"),
    ("plan", "planner", ("ranges", "costs"), "the best schedule for these costs under a limit"),
    ("explain", "render", ("schedule", "costs"), "where the bubble is, why, what would help"),
    ("view", "render", ("schedule", "costs"), "the interactive page: tiles, memory, chains"),
    ("export", "interop", ("schedule",), "write a schedule for torch or Megatron-LM"),
    ("import", "interop", (), "read torch's CSV, real traces, or a Megatron-LM layout"),
)


def _add_brought(command: Callable[..., Any]) -> None:
    shared = {"schedule": _add_schedule, "costs": _add_costs, "ranges": _add_ranges}
    for name, package, same, text in _BROUGHT:
        sub = command(name, partial(_brought, name, package, "schedule" in same), text)
        for words in same:
            shared[words](sub)
        options = import_module(f"hocket.{_MODULES[package][0]}")
        getattr(options, f"add_{name}_arguments")(sub)


def _add_ranges(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-p", metavar="P", help="ranks: 8, or several to choose from: 4,8")
    parser.add_argument("-m", type=int, metavar="M", help="microbatches")
    parser.add_argument("-v", metavar="V", help="stages per rank: 2, or several: 1,2,4")
    parser.add_argument(
        "--from", dest="recorded", nargs="+", metavar="TRACE",
        help="traces of a run, one a rank: a better order for its measured costs, in its memory",
    )  # fmt: skip


def _brought(name: str, package: str, takes_schedule: bool, args: argparse.Namespace) -> int:
    _take_output(args)
    if name == "view" and _reads_traces(args):
        takes_schedule = False
    if takes_schedule:
        args.word, args.schedule = args.schedule, _schedule(args)
    if package == "runtime":
        from hocket.checker import check

        args.beside = [(word, _beside(word, args)) for word in getattr(args, "beside", ())]
        for schedule in (args.schedule, *(other for _, other in args.beside)):
            check(schedule).raise_if_bad()
    if package in ("runtime", "planner"):  # before it takes long
        for file in ("trace", "output", "stage_costs"):
            _writable(getattr(args, file, None))
    return getattr(import_module(f"hocket.{_MODULES[package][1]}"), f"{name}_command")(args)


def _reads_traces(args: argparse.Namespace) -> bool:
    """True where `hocket view` was given traces, which are read into `args.found`."""
    words = [args.schedule, *args.traces]
    if Path(args.schedule).suffix.lower() not in _FOREIGN:
        if args.step is not None:
            raise UsageError("--step is for traces of torch.profiler")
        if args.traces:
            raise UsageError(
                f"view shows one schedule, and {args.traces[0]} with --beside; only traces of one "
                "run can be several"
            )
        return False
    if args.option or (args.p, args.m, args.v) != (None, None, None):
        raise UsageError(f"{args.schedule} is a file: -p, -m, -v and -o are for named schedules")
    from hocket.interop.traces.load import load_foreign

    args.found = load_foreign(words, step=args.step)
    if args.step is not None and not args.found.spread:
        raise UsageError(f"{args.schedule} holds one step; --step is for traces of torch.profiler")
    return True


def _take_output(args: argparse.Namespace) -> None:
    """`-o fig.pdf` names the output; options of a schedule have a `=`, files an ending."""
    words = getattr(args, "option", None)
    if not words or not hasattr(args, "output"):
        return
    files = [word for word in words if "=" not in word and Path(word).suffix]
    args.option = [word for word in words if word not in files]
    for path in files:
        if args.output:
            raise UsageError(f"the output is named twice: {args.output} and {path}")
        args.output = path


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("schedule", metavar="SCHEDULE", help=_SCHEDULE_HELP)
    _add_size(parser)
    parser.add_argument(
        "-o", "--option", action="append", default=[], metavar="KEY=VALUE",
        help="an option of the schedule, such as group=4",
    )  # fmt: skip


def _add_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-p", type=int, help="ranks")
    parser.add_argument("-m", type=int, help="microbatches")
    parser.add_argument("-v", type=int, help="stages per rank")


def _add_costs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--costs", metavar="FILE", help="costs.toml, or a built-in profile (default: F = I = W = 1)"
    )


def _is_file(word: str) -> bool:
    return word.endswith(".sched") or os.sep in word or Path(word).is_file()


def _schedule(args: argparse.Namespace) -> Schedule:
    """The schedule that the arguments name."""
    if _is_file(args.schedule):
        return _from_file(args)
    name, options = _named(args.schedule, args.option)
    return _built(name, args, options)


def _beside(word: str, args: argparse.Namespace) -> Schedule:
    """The schedule that another word names; a name takes the size of `args.schedule`."""
    if _is_file(word):
        return _from_file(argparse.Namespace(schedule=word, p=None, m=None, v=None))
    first = args.schedule
    size = {"p": first.p, "m": first.m // first.placement.slices, "v": args.v}
    _, given = _named(word)
    size |= dict.fromkeys(size.keys() & given.keys())  # what differs is told later
    return _competitor(word, argparse.Namespace(**size)).schedule


def _built(name: str, args: argparse.Namespace, options: dict[str, Any]) -> Schedule:
    from hocket.schedules import build, entry

    entry(name)  # a wrong name is told before a missing size
    size = _sizes(name, args, options)
    return build(name, **size, **options)


def _sizes(name: str, args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """p, m and v from the flags, or taken out of the options."""
    size = {"p": args.p, "m": args.m, "v": args.v}
    for key in size:
        if key in options and size[key] is not None:
            raise UsageError(f"{key} is given twice: -{key} {size[key]} and {key}={options[key]}")
    size |= {k: options.pop(k) for k in size if k in options}
    for key, what in (("p", "ranks"), ("m", "microbatches")):
        if size[key] is None:
            raise UsageError(f"{name} needs the number of {what}: give -{key}")
    return size


def _from_file(args: argparse.Namespace) -> Schedule:
    from hocket.text import load

    schedule = load(args.schedule)
    for key in ("p", "m"):
        given = getattr(args, key)
        if given is not None and given != getattr(schedule, key):
            raise UsageError(
                f"{args.schedule} has {key}={getattr(schedule, key)}, not {given}; leave out -{key}"
            )
    if args.v is not None or getattr(args, "option", []):
        raise UsageError(f"{args.schedule} is a file: -v and -o are for named schedules")
    return schedule


def _named(word: str, more: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """Name and options of `interleaved:v=4,group=8`, `module:function` or both."""
    name, _, rest = word.partition(":")
    first, _, last = rest.partition(":")
    if first and "=" not in first:
        name, rest = f"{name}:{first}", last
    return name, _options([*filter(None, rest.split(",")), *more])


def _option(word: str) -> dict[str, Any]:
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise UsageError(f"expected key=value, found {word!r} (a file is named with --output)")
    try:
        return {key: int(value)}
    except ValueError:
        return {key: value}


def _options(words: Sequence[str]) -> dict[str, Any]:
    """key=value words as options; none may be given twice."""
    out: dict[str, Any] = {}
    for word in words:
        for key, value in _option(word).items():
            if key in out:
                raise UsageError(f"{key} is given twice: {out[key]} and {value}")
            out[key] = value
    return out


def _costs(args: argparse.Namespace) -> Costs:
    from hocket.costs import Costs, load_costs

    return load_costs(args.costs) if args.costs else Costs()


def _writable(path: str | None) -> None:
    """Raises UsageError now, not after the work, where a file cannot be written."""
    if not path:
        return
    folder = Path(path).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(path).is_dir():
        raise UsageError(f"{path}: cannot be written there")


# --- commands ----------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    from hocket.schedules import entries

    if args.json:
        return _print_json({"schedules": [_entry_json(entry) for entry in entries()]})
    for entry in entries():
        print(f"{entry.name}\n    {entry.summary}")
        options = "".join(f"; option {k} ({_default(d)})" for k, d in entry.options.items())
        stages = "v" if entry.takes_v else entry.stages_per_rank
        print(f"    stages per rank: {stages}; weights: {entry.weights}{options}")
        if entry.rules:
            print(f"    needs: {'; '.join(rule.text for rule in entry.rules)}")
        if entry.formula:
            print(f"    {entry.formula.metric}: {entry.formula.text}  ({entry.formula.range})")
        if entry.use:
            print(f"    use: {entry.use}")
        print(f"    source: {entry.source}")
    return 0


def _default(value: Any) -> str:
    return "chosen when left out" if value is None else f"{value} when left out"


def _entry_json(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "summary": entry.summary,
        "stages_per_rank": "v" if entry.takes_v else entry.stages_per_rank,
        "options": entry.options,
        "needs": [rule.text for rule in entry.rules],
        "weights": entry.weights,
        "use": entry.use,
        "formula": None
        if entry.formula is None
        else {k: getattr(entry.formula, k) for k in ("metric", "text", "range")},
        "source": entry.source,
    }


def _show(args: argparse.Namespace) -> int:
    from hocket.cli.output import form_of, put

    _take_output(args)
    schedule = _schedule(args)
    put(_shown(schedule, args, form_of("json" if args.json else args.format, args.output, _SHOWN)),
        args.output)  # fmt: skip
    return 0


def _shown(schedule: Schedule, args: argparse.Namespace, form: str) -> str | bytes:
    from hocket.text import as_json, dumps

    if form == "sched":
        return dumps(schedule)
    if form == "json":
        return json.dumps(as_json(schedule)) + "\n"
    if args.width is not None and args.width < _NARROWEST:
        raise UsageError(f"--width is {args.width}; it must be {_NARROWEST} or more")
    from hocket.simulator import simulate

    timeline = simulate(schedule, _costs(args))
    if form == "svg":
        from hocket.render.svg import svg

        return svg(timeline) + "\n"
    if form == "pdf":
        from hocket.render.pdf import pdf

        return pdf(timeline)
    text = _grid(timeline, args)
    if _is_file(args.schedule):
        from hocket.recognise import recognise

        match = recognise(schedule)
        text += "" if match is None else f"{match}\n"
    return text


def _grid(timeline: Timeline, args: argparse.Namespace) -> str:
    from hocket.render.grid import grid

    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    colour = sys.stdout.isatty() and not args.output and not plain
    return grid(timeline, width=args.width, colour=colour, ascii=not _draws_lines()) + "\n"


def _draws_lines() -> bool:
    """True where the output takes the characters of the grid."""
    try:
        "│·┬─".encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _check(args: argparse.Namespace) -> int:
    if args.foreign:
        from hocket.cli.interop import check_foreign

        return check_foreign(args, None if args.schedule.endswith(".csv") else _schedule(args))
    from hocket.checker import check

    report = check(_schedule(args), args.transport)
    if args.json:
        _print_json({
            "schedule": report.schedule.name,
            "transport": report.transport,
            "ok": report.ok,
            "problems": [p._asdict() for p in report.problems],
            "notes": list(report.notes),
        })  # fmt: skip
    else:
        print(report)
        for note in report.notes:
            print(f"note: {note}")
    return 0 if report.ok else 1


def _simulate(args: argparse.Namespace) -> int:
    from hocket.simulator import simulate

    schedule, costs = _schedule(args), _costs(args)
    timeline = simulate(schedule, costs, blocking=args.blocking_receive)
    written = _write_trace(timeline, args)
    from hocket.comparison import as_json, as_text

    if args.json:
        return _print_json(as_json(timeline, costs) | ({"trace": written} if written else {}))
    print(as_text(timeline, costs, why=args.why))
    if written:
        print(f"trace: {written} (open it at ui.perfetto.dev)")
    return 0


def _write_trace(timeline: Timeline, args: argparse.Namespace) -> str | None:
    if not args.trace:
        return None
    from hocket.trace import trace_size, write_trace

    ranks = None if args.ranks is None else _numbers(args.ranks, timeline.schedule.p)
    if len(timeline.schedule.codes) > _LARGE:
        warning = trace_size(timeline, args.trace, ranks=ranks).warning
        if warning:
            print(f"hocket: {warning} (--ranks 0-7)", file=sys.stderr)
    write_trace(timeline, args.trace, ranks=ranks)
    return args.trace


def _numbers(text: str, p: int) -> list[int]:
    """`0-3,8` as ranks below p."""
    out: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.isascii() and first.isdecimal()) or (dash and not last.isdecimal()):
            raise UsageError(f"expected ranks such as 0-3,8, found {text!r}")
        low, high = int(first), int(last or first)
        if not low <= high < p:
            raise UsageError(f"there are no ranks {part} (they are 0 to {p - 1}, rising)")
        out += range(low, high + 1)
    return out


def _compare(args: argparse.Namespace) -> int:
    from hocket.comparison import compare

    competitors, left_out = _competitors(args)
    costs = _costs(args)
    table = compare(competitors, costs, left_out)
    change, broken = _change(competitors, costs, args)
    chart = _chart(table, args)
    if args.json:
        changed = {} if change is None else {"change": change.as_json(), "exceeded": broken}
        changed |= {"chart": args.output} if args.output else {}
        _print_json(table.as_json() | changed)
        return 1 if broken else 0
    if chart is None:  # the picture is the output
        return 1 if broken else 0
    print(table, *chart, sep="\n\n")
    if change is not None:
        print(f"\n{change}")
    for sentence in broken:
        print(f"hocket: {sentence}", file=sys.stderr)
    return 1 if broken else 0


def _chart(table: Comparison, args: argparse.Namespace) -> list[str] | None:
    """What to print of the chart, if it is asked for; None where it is printed alone."""
    if not (args.chart or args.format or args.output):
        return []
    from hocket.cli.output import form_of, put
    from hocket.comparison import CHARTS, chart

    form = form_of(args.format, args.output, CHARTS)
    drawn = chart(table, form)
    if args.output:
        put(drawn, args.output)
        return [f"chart: {args.output}"]
    if isinstance(drawn, str) and (form == "text" or args.json):
        return [drawn]
    put(drawn, None)
    return None


def _change(
    competitors: list[Competitor], costs: Costs, args: argparse.Namespace
) -> tuple[Diff | None, list[str]]:
    """What the second of two schedules changes, and the limits that it breaks."""
    limits = {"max_makespan": args.max_makespan, "max_bytes": args.max_bytes}
    if len(args.names) != 2:
        if any(limit is not None for limit in limits.values()):
            raise UsageError("--max-makespan and --max-bytes need exactly two schedules")
        return None, []
    from hocket.comparison import costs_of
    from hocket.recognise import diff

    before, after = (c.schedule for c in competitors)
    change = diff(before, after, costs_of(before, costs), b_costs=costs_of(after, costs))
    return change, change.exceeded(**limits)


def _competitors(args: argparse.Namespace) -> tuple[list[Competitor], list[tuple[str, str]]]:
    """What to compare: the words, or every registered name; and what does not fit, and why."""
    from hocket.comparison import Competitor, all_that_fit

    if not args.names:
        if args.p is None or args.m is None:
            raise UsageError("compare needs -p and -m")
        return all_that_fit(args.p, args.m, args.v)
    args.option = []
    files: dict[str, Schedule] = {}
    for word in filter(_is_file, args.names):
        args.schedule = word
        files[word] = _from_file(args)
    for size in ("p", "m"):  # the names take the size of the files, where that is one
        sizes = {getattr(schedule, size) for schedule in files.values()}
        if getattr(args, size) is None and len(sizes) == 1:
            setattr(args, size, sizes.pop())
    return [
        Competitor(word, files[word]) if word in files else _competitor(word, args)
        for word in args.names
    ], []


def _competitor(word: str, args: argparse.Namespace) -> Competitor:
    """A named schedule; -v is for those that take it."""
    from hocket.comparison import competitor
    from hocket.schedules import entry

    name, options = _named(word)
    v = args.v if entry(name).takes_v and "v" not in options else None
    size = _sizes(name, argparse.Namespace(p=args.p, m=args.m, v=v), options)
    return competitor(word, name, **size, **options)


def _demo(args: argparse.Namespace) -> int:
    from hocket.cli.demo import tour

    folder = Path(args.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror}") from None
    tour(folder)
    words = ["run", "zb-h1", "-p", "4", "-m", "8", "--steps", "20"]
    words += ["--trace", str(folder / "run.pftrace")]
    print(f"\nA small GPT on four processes (hocket {' '.join(words)}):\n", flush=True)
    return main(words)


def _print_json(data: dict[str, Any]) -> int:
    print(json.dumps(data))
    return 0
