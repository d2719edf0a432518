"""`hocket export`: a schedule for torch or for Megatron-LM."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hocket.cli.arguments import Verb, option, part
from hocket.cli.output import put, put_json, put_notes
from hocket.cli.selection import Selection
from hocket.errors import UsageError

if TYPE_CHECKING:
    from hocket.interop.megatron import Weights
    from hocket.ir import Schedule


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
    to: str = option("--to", "what to write", of=("torch-csv", "megatron"), default=MISSING)
    output: str | None = option("--output FILE", "write to this file")
    torch: TorchOptions = part(TorchOptions, under="torch-csv")
    megatron: MegatronOptions = part(MegatronOptions, under="megatron")
    json: bool = False


class Exported(NamedTuple):
    """The text of a file, what its user has to know, and more for --json."""

    text: str
    notes: tuple[str, ...]
    data: dict[str, Any]


def run(options: Options) -> int:
    """Writes the schedule for another tool."""
    selection, path = options.selection.apart(options.output)
    write = {"torch-csv": _for_torch, "megatron": _for_megatron}[options.to]
    text, notes, data = write(selection.build(), options)
    if path or not options.json:
        put(text, path)
    if options.json:
        put_json({**data, "to": options.to, "text": text, "notes": list(notes)})
    else:
        put_notes(notes, to_stderr=path is None)
    return 0


def _for_torch(schedule: Schedule, options: Options) -> Exported:
    from hocket.interop.torch.csv import torch_order

    how = options.torch
    if how.comms and how.padded:
        raise UsageError("--padded is for files without messages; leave out --comms")
    order = torch_order(
        schedule, "messages" if how.comms else "padded" if how.padded else "compute",
        receives=how.receives, overlap=how.overlap, unshard=how.unshard,
    )  # fmt: skip
    return Exported(order.text, order.notes, {"microbatches": list(order.microbatches)})


def _for_megatron(schedule: Schedule, options: Options) -> Exported:
    from hocket.interop.megatron import balanced, flags, read_layout, settings_of

    how, stages = options.megatron, None
    if how.layout is not None:
        stages = read_layout(how.layout)
    elif how.layers is not None:
        stages = balanced(how.layers, schedule.placement.n_stages, how.weights.weights())
    settings = settings_of(schedule, stages)
    text = "\n".join(flags(settings)) + "\n"
    return Exported(text, (), {"v": settings.v, "group": settings.group})


VERB = Verb("export", "write a schedule for torch or Megatron-LM", Options, run)
