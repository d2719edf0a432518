"""`hocket export`: a schedule for torch or for Megatron-LM."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING

from hocket.cli.arguments import Verb, option, part
from hocket.cli.output import put, put_json, put_notes
from hocket.cli.selection import Selection
from hocket.formats import Subject, choose, formats

if TYPE_CHECKING:
    from hocket.interop.megatron import Weights

_NAMES = [one.name for one in formats(Subject.EXPORT)]


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """What the parts of a model beside its layers take, in layers."""

    embedding_weight: float = option(
        "--embedding-weight X", "the embedding (default: 0)", default=0
    )
    mtp_weight: float = option("--mtp-weight X", "multi-token prediction (default: 1)", default=1)
    loss_weight: float = option("--loss-weight X", "head and loss (default: 1)", default=1)

    def weights(self) -> Weights:
        """The same for a layout of Megatron-LM."""
        from hocket.interop.megatron import Weights

        return Weights(embedding=self.embedding_weight, mtp=self.mtp_weight, loss=self.loss_weight)


@dataclass(frozen=True, kw_only=True)
class TorchOptions:
    """How a CSV for torch is written."""

    comms: bool = option("--comms", "write the messages too (torch's compute_comms)")
    padded: bool = option("--padded", "with empty cells, for PipelineScheduleMulti (by columns)")
    receives: str = option(
        "--receives", "as early as they can be, or at their consumers (needs --comms)",
        of=("early", "late"), default="early",
    )  # fmt: skip
    overlap: bool = option("--overlap", "write a slot of forward and backward as OVERLAP_F_B")
    unshard: bool = option("--unshard", "write UNSHARD and RESHARD for FSDP (needs --comms)")


@dataclass(frozen=True, kw_only=True)
class MegatronOptions:
    """How flags of Megatron-LM are written."""

    layout: str | None = option("--layout LAYOUT", "stage by stage, such as 'Et*3|(tt|)*6tL'")
    layers: int | None = option("--layers N", "transformer layers, spread over the stages")
    weights: LayerWeights = part(LayerWeights)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Those of `hocket export`."""

    selection: Selection = part(Selection)
    to: str = option("--to", "what to write", of=_NAMES, default=MISSING)
    output: str | None = option("--output FILE", "write to this file")
    torch: TorchOptions = part(TorchOptions, under="torch-csv")
    megatron: MegatronOptions = part(MegatronOptions, under="megatron")
    json: bool = False


def run(options: Options) -> int:
    """Writes the schedule for another tool."""
    selection, path = options.selection.apart(options.output)
    form = choose(options.to, path, Subject.EXPORT)
    how = vars(options.torch) | vars(options.megatron)
    text, notes, data = form.write(selection.build(), **how)
    if path or not options.json:
        put(text, path)
    if options.json:
        put_json({**data, "to": form.name, "text": text, "notes": list(notes)})
    else:
        put_notes(notes, to_stderr=path is None)
    return 0


VERB = Verb("export", "write a schedule for torch or Megatron-LM", Options, run)
