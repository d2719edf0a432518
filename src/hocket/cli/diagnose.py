"""`hocket diagnose`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hocket.cli.arguments import Answer, Verb, option, part
from hocket.cli.selection import FOREIGN, WORD, Sizes, costs_of, schedule_of
from hocket.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `hocket diagnose` takes."""

    files: tuple[str, ...] = option(
        "FILE...", "what the job left: traces of its steps (of torch.profiler one per rank, of "
        "hocket, or lines of JSON), or dumps of a flight recorder, one per rank; or a folder",
    )  # fmt: skip
    schedule: str | None = option("--schedule SCHEDULE", f"what the ranks of the dumps ran: {WORD}")
    sizes: Sizes = part(Sizes)
    costs: str | None = option(
        "--costs FILE", "what the work was expected to take; a slow rank then differs from a heavy "
        "stage",
    )  # fmt: skip


def run(options: Options) -> Answer:
    """The verdict."""
    from hocket.interop.dumps import is_dump

    files = _files(options.files)
    if is_dump(_head(files[0])):
        return _of_dumps(files, options)
    if options.schedule is not None or options.sizes != Sizes():
        raise UsageError("--schedule, -p, -m and -v are for dumps; traces say which order ran")
    return _of_traces(files, options)


def _of_dumps(files: list[Path], options: Options) -> Answer:
    from hocket.diagnosis.hang import diagnose_hang
    from hocket.interop.dumps import read_dumps

    if options.costs is not None:
        raise UsageError("--costs is for traces; a dump has no times of work")
    word, schedule = options.schedule, None
    if word is not None:
        schedule = schedule_of(word, options.sizes)
    elif options.sizes != Sizes():
        raise UsageError("-p, -m and -v have no effect without --schedule")
    answer = diagnose_hang(read_dumps(files), schedule)
    return Answer(answer, answer.as_json)


def _of_traces(files: list[Path], options: Options) -> Answer:
    from hocket.diagnosis.slow import diagnose_steps
    from hocket.interop.traces.load import load_foreign

    loaded = load_foreign(files)
    if not loaded.steps:
        raise UsageError(f"{files[0]} has no times; give the traces of a run")
    costs = None if options.costs is None else costs_of(options.costs)
    answer = diagnose_steps(loaded.steps, costs, loaded.notes)
    return Answer(answer, answer.as_json)


def _head(path: Path) -> bytes:
    """The beginning of a file. Raises: UsageError."""
    try:
        with path.open("rb") as file:
            return file.read(512)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def _files(words: tuple[str, ...]) -> list[Path]:
    """The files that are named, and those of folders. Raises: UsageError where there are none."""
    from hocket.interop.dumps import is_dump

    out: list[Path] = []
    for path in map(Path, words):
        inside = sorted(filter(Path.is_file, path.iterdir())) if path.is_dir() else []
        known = [x for x in inside if x.suffix in FOREIGN or is_dump(_head(x))]
        out += known if path.is_dir() else [path]
    if not out:
        raise UsageError("there is nothing to read; give the files that the job left")
    return out


VERB = Verb("diagnose", Options, run)
