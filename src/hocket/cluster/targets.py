"""A configuration as another framework takes it, and what that framework can run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import resources
from typing import NamedTuple

from hocket.cluster.estimate import Estimate
from hocket.cluster.model import Model, load_model
from hocket.cluster.readers import TITAN_MODELS, TITAN_SCHEDULES
from hocket.cluster.run import Run
from hocket.cluster.search import RECOMPUTE, WAYS, anything
from hocket.interop.megatron import write_layout

# --- Megatron-LM -------------------------------------------------------------------------------

_DEGREES = {
    "tensor-model-parallel-size": "tp", "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep", "pipeline-model-parallel-size": "pp",
}  # fmt: skip
_BATCH = {
    "micro-batch-size": "micro_batch", "global-batch-size": "global_batch", "seq-length": "seq"
}  # fmt: skip


def megatron(found: Estimate) -> str:
    """The flags of Megatron-LM that lay out a run; degrees of 1 are left out."""
    run = found.run
    words = [f"--{flag} {n}" for flag, key in _DEGREES.items() if (n := getattr(run, key)) > 1]
    words += _stages(found.model, run)
    words += [f"--{flag} {getattr(run, key)}" for flag, key in _BATCH.items()]
    flags = {
        "sequence-parallel": run.sp,
        "use-distributed-optimizer": run.sharding > 0,
        "overlap-grad-reduce": run.grad_overlap,
        f"recompute-granularity full {_recomputed(run)}": "full" in run.recompute,
    }
    return " ".join(words + [f"--{flag}" for flag, is_set in flags.items() if is_set])


def _recomputed(run: Run) -> str:
    if run.recompute_layers is None:
        return "--recompute-method uniform --recompute-num-layers 1"
    return f"--recompute-method block --recompute-num-layers {run.recompute_layers}"


def _stages(model: Model, run: Run) -> list[str]:
    """The flags of the virtual stages: a layout where they have differently many layers."""
    sizes, (first, last) = run.layers_of(model.layers), run.lighter
    whole = [size + first * (i == 0) + last * (i == len(sizes) - 1) for i, size in enumerate(sizes)]
    if len(set(whole)) > 1 or max(first, last) > 1 or model.mtp:
        letters = ["t" * size for size in sizes]
        letters[0] = "E" + letters[0]
        letters[-1] += "m" * model.mtp + "L"
        return [f'--pipeline-model-parallel-layout "{write_layout(letters)}"'] if run.pp > 1 else []
    flags = [f"--num-virtual-stages-per-pipeline-rank {run.v}"] if run.v > 1 else []
    flags += ["--account-for-embedding-in-pipeline-split"] if first else []
    return flags + (["--account-for-loss-in-pipeline-split"] if last else [])


# --- torchtitan --------------------------------------------------------------------------------

_MODES = {(): "none", ("norm", "activation"): "selective", ("full",): "full"}


def torchtitan(found: Estimate) -> str:
    """The settings of torchtitan as TOML; a comment has the command that writes its CSV."""
    run, model = found.run, found.model
    key = next((key for key, name in TITAN_MODELS.items() if load_model(name) == model), None)
    local = run.global_batch // found.dp
    lines = ["[model]"]
    lines += (
        [f'name = "{key[0]}"', f'flavor = "{key[1]}"']
        if key
        else [f"# name and flavor: those of {model.name} in your torchtitan"]
    )
    lines += [
        "", "[training]", f"seq_len = {run.seq}", f"local_batch_size = {local}",
        f"global_batch_size = {run.global_batch}", "", "[activation_checkpoint]",
        f'mode = "{_MODES[run.recompute]}"', "", "[parallelism]",
        "data_parallel_shard_degree = -1", f"tensor_parallel_degree = {run.tp}",
        f"context_parallel_degree = {run.cp}", f"pipeline_parallel_degree = {run.pp}",
    ]  # fmt: skip
    if run.ep > 1:
        lines.append(f"expert_parallel_degree = {run.ep}")
    return "\n".join([*lines, *_titan_pipeline(found)]) + "\n"


def _titan_pipeline(found: Estimate) -> list[str]:
    run = found.run
    if run.pp == 1:
        return []
    names = {ours: name for name, ours in TITAN_SCHEDULES.items()}
    name = names.get(run.schedule, "1F1B")  # zb-h1 has the placement of 1F1B
    lines = [
        f'pipeline_parallel_schedule = "{name}"',
        f"pipeline_parallel_microbatch_size = {run.micro_batch}",
        *_titan_stages(found.model, run),
    ]
    if run.schedule in names and found.planned is None:
        return lines
    csv = f"{run.schedule}-p{run.pp}-m{found.microbatches}.csv"
    source = found.planned or f"{run.schedule} -p {run.pp} -m {found.microbatches}"
    return [
        *lines,
        f'pipeline_parallel_schedule_csv = "{csv}"',
        f"# hocket export {source} --to torch-csv --output {csv}",
    ]


def _titan_stages(model: Model, run: Run) -> list[str]:
    """The layers of each stage: as numbers, or by name where those give another partition."""
    sizes = run.layers_of(model.layers)
    most = max(sizes[0] + run.lighter[0], *sizes[1:])
    if run.split is None and -(-(model.layers + sum(run.lighter)) // most) == len(sizes):
        return [
            f"pipeline_parallel_first_stage_less_layers = {run.lighter[0]}",
            f"pipeline_parallel_last_stage_less_layers = {run.lighter[1]}",
            f"pipeline_parallel_layers_per_stage = {most}",
        ]
    parts, at = [], 0
    for size in sizes:
        parts.append([f"layers.{i}" for i in range(at, at + size)])
        at += size
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return [f"module_fqns_per_model_part = {json.dumps(parts)}"]


def _whole_backward_or_kept(run: Run) -> bool:
    """torchtitan's checkpointing fails where the backward is split into I and W."""
    return not run.recompute or run.pp == 1 or WAYS[run.schedule].full_backward


# --- hocket ------------------------------------------------------------------------------------


def hocket_script(found: Estimate) -> str:
    """A training script for hocket's runtime; its layers and batches are stand-ins for yours."""
    run, model = found.run, found.model
    sizes = run.layers_of(model.layers)
    counts = [run.recomputed_in(i) for i in range(len(sizes))]
    again = [
        (size if n is None else min(size, n)) if run.recompute else 0
        for size, n in zip(sizes, counts, strict=True)
    ]
    settings = "".join(f", {k}={v!r}" for k, v in run.options)
    name = run.schedule if run.pp > 1 else "1f1b"
    named = f'hocket.build("{name}", p=P, m={found.microbatches}'
    named += f"{f', v={run.v}' if run.v > 1 else ''}{settings})"
    order = f'hocket.loads(open("{found.planned}").read())' if found.planned else named
    node = found.cluster.node
    script = (resources.files("hocket.cluster") / "data" / "train.py.txt").read_text("utf-8")
    return script.format(
        nodes=-(-found.cluster.gpus // node), per_node=node, model=model.name,
        layout=f"pp {run.pp}, dp {found.dp}; {name}", layers=sizes, recomputed=tuple(again),
        pp=run.pp, dp=found.dp, seq=run.seq, vocab=model.vocab, hidden=model.hidden,
        heads=model.heads, ffn=model.ffn, batch=run.global_batch // found.dp,
        schedule=f"schedule = {order}",
    )  # fmt: skip


# --- the table ---------------------------------------------------------------------------------


class Target(NamedTuple):
    """A framework: what it takes, as a text, and what a search may choose for it.

    schedules, recompute, partly, by_stage, sharding, allows: see Space. only: degrees that it
    fixes. any_order: it runs orders that it has no name for. software: of the stack.
    """

    text: Callable[[Estimate], str]
    schedules: tuple[str, ...]
    recompute: tuple[tuple[str, ...], ...]
    partly: bool = False
    by_stage: bool = False
    sharding: int = 1
    allows: Callable[[Run], bool] = anything
    only: Mapping[str, tuple[int, ...]] = {}
    any_order: bool = False
    software: str = "megatron"


TARGETS: Mapping[str, Target] = {
    "megatron": Target(megatron, ("1f1b", "interleaved"), ((), ("full",)), partly=True),
    "torchtitan": Target(torchtitan, tuple(WAYS), RECOMPUTE, sharding=3, any_order=True,
                         allows=_whole_backward_or_kept, software="torchtitan"),
    "hocket": Target(hocket_script, tuple(WAYS), ((), ("full",)), partly=True, by_stage=True,
                     sharding=0, any_order=True, only={"tp": (1,), "cp": (1,), "ep": (1,)}),
}  # fmt: skip
