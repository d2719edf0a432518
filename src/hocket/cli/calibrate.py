"""`hocket calibrate`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from hocket.cli.arguments import Answer, Verb, option
from hocket.cli.output import check_writable
from hocket.files import write


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `hocket calibrate` takes."""

    runs: str = option("RUNS", "a TOML file with a table [[run]] for each (docs/cluster.md)")
    stack: str = option(
        "--stack STACK", "where to start: a name from `hocket list --stacks`, or a file",
        default=MISSING,
    )  # fmt: skip
    output: str = option(
        "-o, --output FILE", "where the fitted stack goes, such as mine.toml", default=MISSING
    )


def run(options: Options) -> Answer:
    """Fits, and writes the stack."""
    from hocket.cluster import STEP_NUMBERS, calibrate, dumps_stack, load_runs, load_stack
    from hocket.cluster.report import calibration_json, calibration_text

    path = options.output
    check_writable(path)
    measured, before = load_runs(options.runs), load_stack(options.stack)
    routed = any(x.model.moe is not None for x in measured)
    after = calibrate(
        measured, before, numbers=(*STEP_NUMBERS, *(["grouped"] if routed else [])),
        name=Path(path).stem, sources=(options.runs,), own=True,
    )  # fmt: skip
    write(path, dumps_stack(after))
    text = calibration_text(measured, before, after)
    return Answer(
        f"{text}\n\nwritten: {path}; use it with --stack {path}",
        lambda: calibration_json(measured, before, after) | {"output": path},
    )


VERB = Verb("calibrate", Options, run)
