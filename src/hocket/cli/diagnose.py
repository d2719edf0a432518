"""`hocket diagnose`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hocket.cli.arguments import Answer, Verb, option
from hocket.cli.selection import FOREIGN, costs_of
from hocket.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `hocket diagnose` takes."""

    files: tuple[str, ...] = option(
        "FILE...", "what the job left: traces of its steps (of torch.profiler one per rank, of "
        "hocket, or lines of JSON), or a folder of them",
    )  # fmt: skip
    costs: str | None = option(
        "--costs FILE", "what the work was expected to take; a slow rank then differs from a heavy "
        "stage",
    )  # fmt: skip


def run(options: Options) -> Answer:
    """The verdict."""
    from hocket.diagnosis.slow import diagnose_steps
    from hocket.interop.traces.load import load_foreign

    loaded = load_foreign(_files(options.files))
    if not loaded.steps:
        raise UsageError(f"{options.files[0]} has no times; give the traces of a run")
    costs = None if options.costs is None else costs_of(options.costs)
    answer = diagnose_steps(loaded.steps, costs, loaded.notes)
    return Answer(answer, answer.as_json)


def _files(words: tuple[str, ...]) -> list[Path]:
    """The files that are named, and those of folders. Raises: UsageError where there are none."""
    out: list[Path] = []
    for path in map(Path, words):
        found = (
            sorted(x for x in path.iterdir() if x.suffix in FOREIGN) if path.is_dir() else [path]
        )
        out += found
    if not out:
        raise UsageError("there is nothing to read; give the files that the job left")
    return out


VERB = Verb("diagnose", Options, run)
