"""Which configuration the words of a command line describe: model, cluster, stack, layout."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from hocket.cli.arguments import option
from hocket.errors import UsageError
from hocket.words import named, size, wholes

if TYPE_CHECKING:
    from hocket.cluster import Cluster, Model, Run, Stack


class Case(NamedTuple):
    """A model, a cluster, a stack, and how the one runs on the other."""

    model: Model
    cluster: Cluster
    stack: Stack
    run: Run


def words(text: str) -> tuple[str, ...]:
    """`core,norm` as words."""
    return tuple(text.split(","))


def counts(text: str) -> tuple[int, ...]:
    """`10,11,11` as whole numbers. Raises: UsageError."""
    return tuple(n for part in text.split(",") for n in wholes(part))


def one_or_more(text: str) -> int | tuple[int, ...]:
    """`3` as a whole number, `3,2,1` as several. Raises: UsageError."""
    found = counts(text)
    return found[0] if len(found) == 1 else found


def pair(text: str) -> tuple[int, int]:
    """`1,2` as two whole numbers. Raises: UsageError."""
    found = counts(text)
    if len(found) != 2:
        raise UsageError(f"expected two whole numbers such as 1,2, found {text!r}")
    return found[0], found[1]


def cluster_from(
    gpu: str | None, file: str | None, gpus: int | None, memory: Any, needed: int
) -> Cluster:
    """The cluster of a GPU's name or of a file; needed: how many GPUs where none says.

    Raises: UsageError.
    """
    from hocket.cluster import cluster_of, load_cluster

    if file is None and gpu is not None:
        found = cluster_of(gpu, needed if gpus is None else gpus)
    elif file is not None and gpu is None:
        found = load_cluster(file)
        gpus = found.gpus if gpus is None else gpus
        if not 1 <= gpus <= found.gpus:
            raise UsageError(f"gpus is {gpus}; {file} has {found.gpus}")
        found = replace(found, gpus=gpus)
    else:
        raise UsageError("name the GPU with --gpu, or a file of the cluster with --cluster")
    if memory is None:
        return found
    if isinstance(memory, tuple) or not memory > 0:
        raise UsageError(f"memory is {memory}; it must be one size above 0")
    return replace(found, memory_gb=memory / 1e9)


def raise_with_nearest(model: Model, cluster: Cluster, run: Run) -> None:
    """Raises: UsageError with each rule that a run breaks, and the nearest possible runs."""
    from hocket.cluster import faults
    from hocket.cluster.reasons import nearest_text

    broken = [fault.text for fault in faults(model, cluster, run)]
    if broken:
        raise UsageError("\n".join([*broken, *nearest_text(model, cluster, run)]))


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One configuration, as far as it is given."""

    model: str = option(
        "--model MODEL", "a name from `hocket list --models`, a model.toml, or a config.json of "
        "Hugging Face", default=MISSING, heading="model and cluster",
    )  # fmt: skip
    gpu: str | None = option("--gpu GPU", "a name from `hocket list --gpus`")
    cluster: str | None = option("--cluster FILE", "a cluster.toml, instead of --gpu")
    gpus: int | None = option(
        "--gpus N", "how many (default: those of the file, else as many as the layout needs)"
    )
    memory: int | float | None = option(
        "--memory SIZE", "memory per GPU that may be used, such as 76GB (default: all of it)",
        read=size,
    )  # fmt: skip
    stack: str | None = option(
        "--stack STACK", "a name from `hocket list --stacks`, or a file of `hocket calibrate` "
        "(default: GPU-megatron)",
    )  # fmt: skip
    seq: int = option("--seq N", "tokens per sequence (default: 4096)", default=4096,
                      heading="batch")  # fmt: skip
    micro_batch: int = option("--micro-batch N", "sequences per microbatch (default: 1)", default=1)
    global_batch: int | None = option(
        "--global-batch N", "sequences per step (default: four microbatches per pipeline rank)"
    )
    tp: int = option("--tp N", "tensor parallel ranks (default: 1)", default=1, heading="layout")
    cp: int = option("--cp N", "context parallel ranks (default: 1)", default=1)
    ep: int = option("--ep N", "expert parallel ranks (default: 1)", default=1)
    etp: int = option("--etp N", "tensor parallel ranks within an expert (default: 1)", default=1)
    pp: int = option("--pp N", "pipeline parallel ranks (default: 1)", default=1)
    dp: int | None = option("--dp N", "data parallel ranks (default: what is left of the GPUs)")
    v: int | None = option("-v V", "stages per rank (default: those of the schedule)")
    schedule: str = option(
        "--schedule NAME", "a name from `hocket list`, or name:key=value,... (default: 1f1b)",
        default="1f1b",
    )  # fmt: skip
    split: tuple[int, ...] | None = option(
        "--split LAYERS",
        "layers of each stage, such as 19,21,21,19 (default: as even as can be)",
        read=counts,
    )
    lighter: tuple[int, int] = option(
        "--lighter A,B", "layers by which the first and the last stage are lighter (default: 0,0)",
        read=pair, default=(0, 0),
    )  # fmt: skip
    recompute: tuple[str, ...] = option(
        "--recompute PARTS", "what the backward computes again: full, or a list of core, norm, "
        "activation, mla_up, experts (default: nothing)", read=words, default=("none",),
        heading="memory",
    )  # fmt: skip
    recompute_layers: int | tuple[int, ...] | None = option(
        "--recompute-layers N", "layers per stage that do, or one number for each stage: 4,3,1,0 "
        "(default: all)", read=one_or_more,
    )  # fmt: skip
    sharding: int = option(
        "--sharding LEVEL", "what data parallel ranks share: 0 nothing, 1 optimizer states, 2 "
        "gradients too, 3 weights too (FSDP) (default: 1)", default=1,
    )  # fmt: skip
    sp: bool = option("--no-sp", "no sequence parallelism beside --tp", default=True)
    flash: bool = option("--no-flash", "attention is not fused", default=True)
    grad_overlap: bool = option(
        "--no-grad-overlap", "gradients are reduced after the backward", default=True
    )
    validated_later: bool = option(
        "--validated-later", "the optimizer step is validated afterwards, so that steps overlap"
    )

    def case(self) -> Case:
        """What is described. Raises: HocketError."""
        from hocket.cluster import load_model, load_stack, stack_of

        model, needed = load_model(self.model), self._needed()
        cluster = cluster_from(self.gpu, self.cluster, self.gpus, self.memory, needed)
        stack = load_stack(self.stack) if self.stack else stack_of(cluster.gpu)
        run = self._run(cluster)
        raise_with_nearest(model, cluster, run)
        if self.dp is not None and run.dp(cluster) != self.dp:
            raise UsageError(
                f"dp is {self.dp}; {cluster.gpus} GPUs with tp {self.tp}, cp {self.cp} and pp "
                f"{self.pp} have {run.dp(cluster)} data parallel ranks"
            )
        return Case(model, cluster, stack, run)

    def _needed(self) -> int:
        """The fewest GPUs that the layout can run on."""
        both = (self.tp * self.cp * (self.dp or 1), self.ep * self.etp)
        return max(1, self.pp) * max(1, math.lcm(*both))

    def _run(self, cluster: Cluster) -> Run:
        from hocket.cluster import Run, usual_stages

        name, options = named(self.schedule)
        for key, where in (("p", "--pp"), ("m", "--global-batch"), ("v", "-v")):
            if key in options:
                raise UsageError(f"{key} of {name} is set by {where}")
        batch = self.global_batch
        if batch is None:
            copies = cluster.gpus // max(1, self.tp * self.cp * self.pp)
            batch = max(1, copies) * max(1, self.micro_batch) * 4 * max(1, self.pp)
        return Run(
            seq=self.seq,
            micro_batch=self.micro_batch,
            global_batch=batch,
            tp=self.tp, cp=self.cp, ep=self.ep, etp=self.etp, pp=self.pp,
            v=usual_stages(name, self.pp, tuple(options.items())) if self.v is None else self.v,
            schedule=name,
            options=tuple(options.items()),
            recompute=() if self.recompute == ("none",) else self.recompute,
            recompute_layers=self.recompute_layers,
            sp=self.sp and self.tp > 1,
            sharding=self.sharding, flash=self.flash, grad_overlap=self.grad_overlap,
            split=self.split, lighter=self.lighter, validated_later=self.validated_later,
        )  # fmt: skip
