"""`hocket export`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass

from hocket.cli.arguments import Answer, Verb, option, part, taken
from hocket.cli.output import put, put_notes
from hocket.cli.selection import Selection
from hocket.formats import Subject, choose, names


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `hocket export` takes."""

    selection: Selection = part(Selection)
    to: str = option("--to", "what to write", of=names(Subject.EXPORT), default=MISSING)
    output: str | None = option("--output FILE", "write to this file")
    comms: bool = option(
        "--comms", "write the messages too (torch's compute_comms)", heading="torch-csv"
    )
    padded: bool = option("--padded", "with empty cells, for PipelineScheduleMulti (by columns)")
    receives: str = option(
        "--receives", "as early as they can be, or at their consumers (needs --comms)",
        of=("early", "late"), default="early",
    )  # fmt: skip
    overlap: bool = option(
        "--overlap", "write a slot of forward and backward as OVERLAP_F_B", without="--padded"
    )
    unshard: bool = option("--unshard", "write UNSHARD and RESHARD for FSDP (needs --comms)")
    layout: str | None = option(
        "--layout LAYOUT", "stage by stage, such as 'Et*3|(tt|)*6tL'", heading="megatron"
    )
    layers: int | None = option(
        "--layers N", "transformer layers, spread over the stages", without="--layout"
    )
    embedding: float = option(
        "--embedding-weight X", "in layers (default: 0)", default=0, needs="--layers"
    )
    loss: float = option(
        "--loss-weight X", "of head and loss (default: 1)", default=1, needs="--layers"
    )
    json: bool = False


def run(options: Options) -> Answer | int:
    """Writes the schedule for another tool."""
    selection, path = options.selection.apart(options.output)
    form = choose(options.to, path, Subject.EXPORT)
    own = taken(options, form, Subject.EXPORT)
    text, notes, data = form.write(selection.build(), **own)
    if path or not options.json:
        put(text, path)
    if options.json:
        return Answer("", lambda: {**data, "to": form.name, "text": text, "notes": list(notes)})
    put_notes(notes, to_stderr=path is None)
    return 0


VERB = Verb("export", Options, run)
