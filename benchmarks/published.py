"""Published runs beside hocket's predictions: errors of step time, memory and FLOPs by group.

    python benchmarks/published.py ROWS.jsonl... [--json] [--left-out] [--calibrated] [--rows]

Each line of a file is one measurement. Errors are fractions of the measured value, without sign.
A row that cannot be predicted is counted with its reason. Where a source does not print
microbatch, stages per rank or recomputation, the configuration that is predicted to be fastest
and fits in memory is taken; that flatters the error. --left-out: predict each row by a fit to the
other rows of its stack. --calibrated: fit the stack to five random rows of a group and predict
its other rows, the mean over draws.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import hocket
from hocket.cluster import (
    Cluster,
    Measured,
    Mla,
    Model,
    Moe,
    Run,
    Stack,
    calibrate,
    cluster_of,
    dumps_stack,
    errors,
    estimate,
    faults,
    fit,
    flops_per_token,
    left_out,
    load_stack,
    predicted,
    quantile,
    quantities_of_stage,
)

Row = dict[str, Any]


class CannotError(Exception):
    """A row that cannot be predicted, and why."""


# --- from a row to a model, a cluster and runs ----------------------------------------------

_GPUS = {
    "A100-80GB-SXM": "a100",
    "A100 (Ampere, 312 TFLOP/s)": "a100",
    "A100-40GB-SXM": "a100-40gb",
    "H100-80GB-SXM": "h100",
    "H100-80GB-SXM (700 W)": "h100",
    "H100-96GB-HBM2e-500W": "h100-500w",
    "H200": "h200",
    "B200": "b200",
    "B300": "b300",
    "GB200": "gb200",
    "GB300": "gb300",
    "MI325X": "mi325x",
    "MI355X": "mi355x",
    "MI300X": "mi300x",
}


class Group(NamedTuple):
    """What is known of a group of rows and not printed in each of them.

    stack: by GPU and precision. old: GPT of its time: dropout, biases, learned positions. flops:
    the convention of its printed FLOPs, None where they were derived another way. mtp: whether
    the layers that predict further tokens are trained. nic: GB/s per GPU between nodes, where it
    is not the usual one. reserved: its memory is what the allocator reserves, not what is
    allocated.
    """

    stack: Callable[[str, str], str]
    old: bool = False
    flops: str | None = None
    sharding: int = 1
    dense_vocab: int = 51200
    flash: bool = True
    mtp: bool = True
    nic: float | None = None
    reserved: bool = False


def _megatron(gpu: str, precision: str) -> str:
    if gpu.startswith("a100"):
        return "a100-megatron" if precision == "fp16" else "a100-megatron-bf16"
    family = "h100" if gpu in ("h100", "h200", "h800") else "b200"
    if gpu in ("b300", "gb300") and precision in ("fp8", "mxfp8"):
        family = "gb300"
    return f"{family}-megatron" if precision == "bf16" else f"{family}-{precision}-megatron"


def _named(name: str) -> Callable[[str, str], str]:
    return lambda gpu, precision: name.format(
        gpu=gpu.split("-")[0], precision="" if precision == "bf16" else precision + "-"
    )


_OLD = Group(_megatron, old=True, flash=False, sharding=0)
GROUPS: dict[str, Group] = {
    "sc21_table1": _OLD,
    "sc21_table2": _OLD,
    "korthikanti_table5": _OLD,
    "korthikanti_table4_layer": _OLD,
    "zb_table4": _OLD._replace(dense_vocab=50304),
    "zb_table6_stage": _OLD._replace(dense_vocab=50304),
    "zb_table7_sync": _OLD._replace(dense_vocab=50304),
    "zb_table8": _OLD._replace(dense_vocab=50304),
    "zb_table9_few_microbatches": _OLD._replace(dense_vocab=50304),
    "megascale_table2": _OLD,
    "megascale_fig9": _OLD._replace(flops="full"),
    "vtrain_multi": _OLD._replace(nic=12.5),
    "vtrain_single": _OLD,
    "vocab_parallel": Group(_megatron, old=True, sharding=0),
    "llama3_table4": Group(_megatron, flops="causal", sharding=2),
    "mcore_readme_h100": Group(_megatron, flops="full"),
    "mcore_readme_h100_strong": Group(_megatron, flops="full"),
    "nemo_2407": Group(_megatron, flops="full"),
    "nemo_long_seq": Group(_megatron, flops="full"),
    "megatron_bridge": Group(_megatron, flops="causal"),
    "nemo_automodel_h100": Group(_named("h100-automodel"), flops="causal", sharding=3, mtp=False),
    "moe_zoo_qwen3": Group(_megatron, flops="causal"),
    "moe_zoo_qwen3_long": Group(_megatron, flops="causal"),
    "moe_zoo_mixtral": Group(_megatron, flops="causal"),
    "amd_primus": Group(_named("{gpu}-{precision}primus"), flops="causal"),
    "mcore_moe_report": Group(_megatron, flops="causal"),
    **{
        f"torchtitan_{name}": Group(_named("h100-{precision}torchtitan"), sharding=3, reserved=True)
        for name in ("1d", "2d", "3d", "4d", "cp", "asynctp", "h200")
    },
    "simumax_b200": Group(_megatron),
    "llm_foundry": Group(_named("{gpu}-{precision}foundry"), sharding=3),
    "nanotron_h100": Group(_megatron, reserved=True),
}

_PRECISIONS = {
    "fp16/bf16": "fp16",
    "mxfp8": "mxfp8",
    "fp8-cs": "fp8",
    "fp8-mx": "mxfp8",
    "amp_bf16": "bf16",
    "amp_fp8": "fp8",
    "nvfp4": "fp4",
}


def model_of(row: Row, group: Group) -> Model:
    """The model of a row. Raises: CannotError where a size is not printed."""
    m = row["model"]
    for size in ("layers", "hidden", "heads"):
        if not m.get(size):
            raise CannotError("the model's sizes are not printed")
    if m.get("attention") not in (None, "MLA", "GQA", "MHA"):
        raise CannotError(f"attention {m['attention']} is not modelled")
    if any(
        x in m["name"] for x in ("hybrid", "Nemotron_3", "Nemotron-V3", "Qwen3-Next", "DeepSeekV4")
    ):
        raise CannotError("layers with a recurrent or compressed attention are not modelled")
    mla = moe = None
    if m.get("attention") == "MLA":
        mla = Mla(m["q_lora"] or 0, m["kv_lora"], m["qk_nope"], m["qk_rope"], m["v_head"])
    if m.get("experts"):
        dense = m.get("dense_layers")
        dense = {"DeepSeek-V2": 1}.get(m["name"].split(" ")[0], 0) if dense is None else dense
        moe = Moe(m["experts"], m["topk"], m["moe_ffn"], m.get("shared_ffn") or 0, dense)
    return Model(
        m["name"],
        m["layers"],
        m["hidden"],
        m["heads"],
        m.get("vocab") or group.dense_vocab,
        m.get("kv_heads") or 0,
        m.get("head_dim") or 0,
        m.get("ffn") or 0,
        bool(m.get("glu")),
        biases=group.old,
        layer_norm=group.old,
        positions=2048 if group.old else 0,
        dropout=group.old,
        tied=bool(m.get("tied")),
        qk_norm=m["name"].startswith("Qwen3"),
        mtp=(m.get("mtp_layers") or 0) if group.mtp else 0,
        mla=mla,
        moe=moe,
    )


def precision_of(row: Row) -> str:
    """bf16, fp8, mxfp8 or fp4."""
    old = row["group"].startswith("zb_") or "korth" in row["group"]
    text = (row["run"].get("precision") or ("fp16" if old else "bf16")).lower().split(" ")[0]
    return _PRECISIONS.get(text, text)


def gpu_of(row: Row) -> str:
    """The GPU's name in the catalogue. Raises: CannotError."""
    name = row["cluster"].get("gpu")
    if name not in _GPUS:
        raise CannotError(f"the GPU {name} is not in the catalogue")
    return _GPUS[name]


def stack_of(row: Row) -> Stack:
    """The shipped stack that a row is predicted with. Raises: CannotError."""
    if row["group"] == "sc21_table2" and row["run"].get("zero") == 3:
        raise CannotError("no stack is fitted for the ZeRO-3 of 2021; calibrate first")
    name = GROUPS[row["group"]].stack(gpu_of(row), precision_of(row))
    try:
        return load_stack(name)
    except hocket.HocketError:
        raise CannotError(f"no stack {name} is fitted; calibrate first") from None


def _sizes(row: Row) -> tuple[int, int, int, int, int]:
    u, c = row["run"], row["cluster"]
    tp, cp, pp = (u.get(x) or 1 for x in ("tp", "cp", "pp"))
    if "tp" not in u or ("pp" not in u and "pp" in row.get("unknown", ())):
        raise CannotError("the layout is not printed")
    gpus = c.get("gpus")
    if not gpus:
        raise CannotError("the number of GPUs is not printed")
    gbs = u.get("gbs") or (
        u["microbatches"] * u["mbs"] if u.get("microbatches") and u.get("mbs") else None
    )
    gbs = gbs or ((u.get("local_batch") or 0) * (u.get("fsdp") or 1)) or None
    if gbs is None and u.get("mbs"):
        gbs = u["mbs"] * (u.get("fsdp") or gpus // (tp * cp * pp))
    if gbs is None:
        raise CannotError("the global batch is not printed")
    return tp, cp, pp, gpus, gbs


def _lighter(row: Row) -> tuple[int, int]:
    """Layers that the first and the last stage have less."""
    text = str(row["model"].get("layers_note")) + str(row.get("unknown"))
    if "one layer less" in text or "one less" in text:
        return 1, 1
    stages = (row["run"].get("pp") or 1) * (v if isinstance(v := row["run"].get("vp"), int) else 1)
    layers = row["model"]["layers"]  # embedding and loss counted as layers, as Megatron can
    return (1, 1) if layers % stages and (layers + 2) % stages == 0 else (0, 0)


def _schedule(row: Row, pp: int) -> tuple[dict[str, Any], list[int]]:
    """The schedule's fields of a run, and the stages per rank to try."""
    u, layers = row["run"], row["model"]["layers"]
    name, v = u.get("schedule") or "1F1B", u.get("vp")
    if pp == 1 or name == "none":
        return {}, [1]
    if name.startswith("ZB"):
        limit = {"ZB-1p": pp, "ZB-2p": 2 * pp}.get(name)
        if limit is None:
            raise CannotError(f"the schedule {name} is not modelled")
        return {
            "schedule": "zb-auto",
            "options": (("limit", limit),),
            "validated_later": "optimizer" not in u,
        }, [1]
    if " + " in name and not name.endswith(("none", "redistribution")):
        raise CannotError("vocabulary parallelism is not modelled")
    if isinstance(v, str):
        return {"schedule": "interleaved"}, [-(-layers // pp)]
    if v is None and "vp" in row.get("unknown", ()) and "nterleaved" in name:
        full = layers + sum(_lighter(row))
        return {"schedule": "interleaved"}, [
            x for x in (1, 2, 3, 4, 6, 8) if full % (pp * x) == 0
        ] or [1]
    return ({"schedule": "interleaved"}, [v]) if v and v > 1 else ({}, [1])


_RECOMPUTE = {
    "full": ("full",),
    "selective(core attention)": ("core",),
    "selective op": ("norm", "activation"),
    "none": (),
    "layernorm,moe": ("norm", "experts"),
}


def _recomputations(row: Row, old: bool, stage: int) -> list[tuple[tuple[str, ...], int | None]]:
    """What may be recomputed, and in how many layers per stage: all, where that is None."""
    given = (row["run"].get("recompute") or "").split(" (")[0] or None
    if given in _RECOMPUTE:
        return [(_RECOMPUTE[given], None)]
    if row["group"].startswith("megascale"):  # selective: what its Megatron-LM recommends
        return [(("core",), None)]
    if old:
        return [((), None), (("core",), None), (("full",), None)]
    some = [(("full",), n) for n in sorted({max(1, stage // 4), max(1, stage // 2)}) if n < stage]
    return [
        ((), None),
        (("activation",), None),
        (("norm", "activation"), None),
        *some,
        (("full",), None),
    ]


def runs_of(row: Row, group: Group, cluster: Cluster, model: Model) -> tuple[Run, ...]:
    """The runs that a row may be: one, or several where it does not say. Raises: CannotError."""
    u = row["run"]
    tp, cp, pp, gpus, gbs = _sizes(row)
    dp = gpus // (tp * cp * pp)
    fields, stages = _schedule(row, pp)
    sizes = [u["mbs"]] if u.get("mbs") else [x for x in (1, 2, 4, 8) if gbs % (x * dp) == 0]
    if row["group"].startswith("torchtitan") and pp > 1 and not u.get("mbs"):
        sizes = [max(1, gbs // (dp * pp))]  # its default then: as many microbatches as ranks
    flash = u.get("flash")
    shared = u.get("fsdp") not in (None, 0, 1, False, "NO_SHARD")
    sharding = u["zero"] if isinstance(u.get("zero"), int) else 3 if shared else group.sharding
    sp = u.get("sp")
    base = Run(
        u["seq"],
        1,
        gbs,
        tp,
        cp,
        u.get("ep") or 1,
        u.get("etp") or 1,
        pp,
        sp=(tp > 1 and not group.old) if sp is None else bool(sp),
        sharding=sharding,
        flash=group.flash if flash is None else bool(flash),
        grad_overlap=u.get("grad_overlap", not group.old),
        lighter=_lighter(row),
        **fields,
    )
    if "redistribution" in (u.get("schedule") or ""):
        base = replace(base, split=_redistributed(model, pp))
    found = [
        replace(
            base,
            micro_batch=b,
            v=v,
            recompute=again,
            recompute_layers=n,
            schedule=base.schedule if v > 1 or base.options else "1f1b",
        )
        for b in sizes
        for v in stages
        for again, n in _recomputations(row, group.old, -(-model.layers // (pp * v)))
    ]
    legal = [r for r in found if not faults(model, cluster, r)]
    if not legal:
        broken = faults(model, cluster, found[0]) if found else []
        raise CannotError(
            f"not possible: {broken[0].text}" if broken else "no microbatch divides the batch"
        )
    return tuple(legal)


def _redistributed(model: Model, pp: int) -> tuple[int, ...]:
    """Layers per stage where the last has fewer, for its head's work."""
    head = model.vocab / (12 * model.hidden + 2 * model.hidden / 3)
    each = (model.layers + head) / pp
    last = max(0, round(each - head))
    rest, left = divmod(model.layers - last, pp - 1)
    return (*(rest + (i < left) for i in range(pp - 1)), last)


@dataclass(frozen=True)
class Case:
    """A row as hocket sees it."""

    row_id: str
    group: str
    measured: Measured
    stack: Stack


def _seconds(row: Row, group: Group, model: Model) -> float:
    m, u = row["measured"], row["run"]
    for key in ("step_s", "step_s_derived"):
        if m.get(key):
            return m[key]
    *_, gpus, gbs = _sizes(row)
    tokens = gbs * u["seq"] / gpus
    if m.get("tokens_per_s_per_gpu"):
        return tokens / m["tokens_per_s_per_gpu"]
    if m.get("samples_per_gpu_s"):
        return gbs / gpus / m["samples_per_gpu_s"]
    rate = m.get("tflops_per_gpu") or (
        m["mfu"] * cluster_of(gpu_of(row), 1).gpu.bf16 if m.get("mfu") else None
    )
    if rate is None or group.flops is None:
        raise CannotError("no step time is printed, or FLOPs of an unknown convention")
    return tokens * flops_per_token(model, u["seq"], group.flops) / (rate * 1e12)


@lru_cache(maxsize=100_000)
def _fitting(
    runs: tuple[Run, ...], model: Model, cluster: Cluster, stack: Stack
) -> tuple[Run, ...]:
    """Of several runs those that fit in memory; all where none does."""
    if len(runs) == 1:
        return runs
    fitting = tuple(r for r in runs if estimate(model, cluster, stack, r).fits)
    return fitting or runs


def corrected(row: Row) -> Row:
    """The row, with the layout of its recipe where the printed one cannot be right.

    Tables of Megatron-Bridge print `vp 1` or `pp 1` for Llama 3 70B in MXFP8 and NVFP4 on B300 and
    GB300. Every recipe for them has PP 4, VP 5 and one sequence per microbatch, and with PP 1 the
    weights and states alone take 420 GB.

    Source: scripts/performance/configs/llama/llama3_workload_base_configs.py in
    NVIDIA-NeMo/Megatron-Bridge, LLAMA3_70B_PRETRAIN_CONFIG_*_FP8_MX_V2 and *_NVFP4_V2.
    """
    u = row["run"]
    if (
        row["group"] == "megatron_bridge"
        and (row["model"]["name"], row["cluster"].get("gpus")) == ("Llama3-70B", 64)
        and gpu_of(row) in ("b300", "gb300")
        and precision_of(row) in ("mxfp8", "fp4")
        and (u.get("vp") or 1) == 1
    ):
        return row | {"run": u | {"tp": 1, "pp": 4, "vp": 5, "mbs": 1, "fsdp": 0}}
    return row


def case_of(row: Row) -> Case:
    """A row as a case. Raises: CannotError."""
    try:
        return _case(corrected(row))
    except KeyError as error:
        raise CannotError(f"{error.args[0]} is not printed") from None


def _case(row: Row) -> Case:
    group = GROUPS.get(row["group"])
    if group is None:
        raise CannotError("the group is not known")
    if row["run"].get("system") == "MegaScale":
        raise CannotError("MegaScale changes the model: parallel block, sliding window")
    if row["run"].get("task") not in (None, "pretrain", "sft", "SFT"):
        raise CannotError(f"{row['run']['task']}: not all weights are trained")
    if row["run"].get("moe") == "token drop":
        raise CannotError("token dropping is not modelled")
    model, stack = model_of(row, group), stack_of(row)
    if row["kind"] == "memory":
        raise CannotError("parts of a memory, not a run")
    if row["kind"] in ("stage", "layer"):
        return _stage_case(row, group, model, stack)
    *_, gpus, _ = _sizes(row)
    cluster = cluster_of(
        gpu_of(row), gpus, nic=group.nic, per_node=row["cluster"].get("gpus_per_node")
    )
    runs = _fitting(runs_of(row, group, cluster, model), model, cluster, stack)
    return Case(
        row["id"], row["group"], Measured(model, cluster, runs, _seconds(row, group, model)), stack
    )


def _stage_case(row: Row, group: Group, model: Model, stack: Stack) -> Case:
    u, layer = row["run"], row["kind"] == "layer"
    pp = model.layers if layer else u["pp"]
    gpus = u["tp"] * pp
    cluster = cluster_of(gpu_of(row), gpus)
    run = Run(
        u["seq"],
        u["mbs"],
        u["mbs"] * 2 * pp,
        u["tp"],
        pp=pp,
        sp=bool(u.get("sp")),
        flash=False,
        sharding=0,
        recompute=_RECOMPUTE[u["recompute"]],
        lighter=(0, 0) if layer else (1, 1),
    )
    name = "layer_fwd_ms" if layer else "F_ms"
    return Case(
        row["id"],
        row["group"],
        Measured(model, cluster, (run,), row["measured"][name] / 1e3, "F"),
        stack,
    )


# --- errors ---------------------------------------------------------------------------------


def summary(values: Iterable[float]) -> dict[str, Any]:
    """rows, median, p90 and worst of errors without sign."""
    off = [abs(x) for x in values]
    if not off:
        return {"rows": 0}
    return {
        "rows": len(off),
        "median": quantile(off, 0.5),
        "p90": quantile(off, 0.9),
        "worst": max(off),
    }


def memory_error(row: Row, case: Case) -> float | None:
    """The error of the fullest rank's memory; None where the row has none."""
    m = row["measured"]
    if m.get("mem_gib"):
        printed = m["mem_gib"] * 2**30
    elif m.get("mem_gb"):
        printed = m["mem_gb"] * 1e9
    elif m.get("mem_mb_columns"):
        printed = m["mem_mb_columns"][1] * 2**20
    else:
        return None
    if len(case.measured.runs) > 1:
        return None
    if "redistribution" in (row["run"].get("schedule") or ""):
        return None  # the artifact prints the same bytes as without it, to the last digit
    stack = case.stack
    if not GROUPS[case.group].reserved:
        stack = replace(stack, reserved_gb=0.0, slack=0.0)
    found = estimate(case.measured.model, case.measured.cluster, stack, case.measured.runs[0])
    total = found.memory[found.fullest].total
    limit = dict(found.run.options).get("limit")
    if limit:  # the paper's own order is not printed, only the limit that it fills
        held = min(limit, found.microbatches)
        activation = found.costs.bytes.activation
        total = max(
            x.total - x.activations + held * activation[r] for r, x in enumerate(found.memory)
        )
    return total / printed - 1


def flops_error(row: Row) -> float | None:
    """The error of FLOPs per token against FLOP/s over tokens/s; None without both."""
    m, group = row["measured"], GROUPS.get(row["group"])
    if (
        group is None
        or group.flops is None
        or not (m.get("tflops_per_gpu") and m.get("tokens_per_s_per_gpu"))
    ):
        return None
    if "GPT-OSS" in row["model"]["name"] or row["run"].get("task") not in (
        None,
        "pretrain",
        "sft",
        "SFT",
    ):
        return None  # what its windowed layers and frozen weights count is not known
    try:
        model = model_of(row, group)
    except CannotError:
        return None
    return (
        flops_per_token(model, row["run"]["seq"], group.flops)
        * m["tokens_per_s_per_gpu"]
        / (m["tflops_per_gpu"] * 1e12)
        - 1
    )


def stage_errors(row: Row, case: Case) -> dict[str, float]:
    """The error of F, I and W (or the backward) of a stage or layer."""
    m, x = row["measured"], case.measured
    found = quantities_of_stage(x.model, x.cluster, case.stack, x.runs[0])
    if row["kind"] == "layer":
        pairs = {"F": m["layer_fwd_ms"], "B": m["layer_bwd_ms"]}
    else:
        pairs = {k: m[f"{k}_ms"] for k in ("F", "I", "W")}
    return {k: found[k] * 1e3 / v - 1 for k, v in pairs.items()}


# --- fitting the stacks that ship ------------------------------------------------------------

UNSEEN = (
    "zb_table4",
    "zb_table7_sync",
    "zb_table8",
    "zb_table9_few_microbatches",
    "vtrain_multi",
    "vtrain_single",
    "vocab_parallel",
    "megascale_fig9",
    "nanotron_h100",
)
"""Groups that no shipped stack is fitted on."""


_LOOSE = 1.7  # what ships is fitted to many rows


def measurements(row: Row, case: Case) -> list[Measured]:
    """What a row measures: a step, or the phases of a stage."""
    if row["kind"] == "step":
        return [case.measured]
    m = row["measured"]
    names = (
        {"F": "layer_fwd_ms", "B": "layer_bwd_ms"}
        if row["kind"] == "layer"
        else {k: f"{k}_ms" for k in "FIW"}
    )
    return [
        replace(case.measured, what=k, seconds=m[v] / 1e3, weight=0.5) for k, v in names.items()
    ]


def refitted(rows: list[Row], names: list[str]) -> Stack:
    """The first of some stacks, its fitted numbers fitted again to the rows of all of them."""
    found, sources, memory = [], set(), []
    for row in rows:
        try:
            case = case_of(row)
        except CannotError:
            continue
        if case.stack.name in names:
            if row["kind"] == "step" and row["group"] != "nanotron_h100":
                memory.append(memory_error(row, case))
            if row["group"] in UNSEEN:
                continue
            found += measurements(row, case)
            sources.add(f"{row['source']['title']}, {row['source']['where']}".split(" @")[0])
    stack, held = load_stack(names[0]), summary(x for x in memory if x is not None)
    stack = replace(stack, fit=replace(
        stack.fit, rows_memory=held["rows"], median_memory=held.get("median", 0.0),
        worst_memory=held.get("worst", 0.0),
    ))  # fmt: skip
    numbers, sources = stack.fit.fitted, tuple(sorted(sources))
    dense = [x for x in found if x.model.moe is None]
    routed = [x for x in found if x.model.moe is not None]
    if "grouped" in numbers and routed and dense:  # the experts' number from the rows with experts
        rest = tuple(n for n in numbers if n != "grouped")
        base = calibrate(dense, stack, numbers=rest, sources=sources, folds=12, loose=_LOOSE)
        best = fit(routed, base, ("grouped",), loose=_LOOSE)
        off = sorted(abs(e) for e in errors(routed, best))
        return replace(
            best,
            fit=replace(
                base.fit,
                fitted=numbers,
                rows_experts=len(off),
                median_experts=quantile(off, 0.5),
                worst_experts=off[-1],
            ),
        )
    return calibrate(found, stack, numbers=numbers, sources=sources, folds=12, loose=_LOOSE)


# --- what is asked of several rows together -------------------------------------------------


def ranking(rows: list[Row]) -> dict[str, Any]:
    """Pairs of schedules of zb_table4 in the right order, from zb_table6's stage times."""
    times = {
        (r["model"]["name"], r["run"]["microbatches"]): r["measured"]
        for r in rows
        if r["group"] == "zb_table6_stage"
    }
    steps: dict[Any, dict[str, tuple[float, float]]] = defaultdict(dict)
    for r in rows:
        key = (r["model"]["name"], r["run"].get("microbatches"))
        if r["group"] == "zb_table4" and key in times:
            name = r["run"]["schedule"]
            steps[key][name] = (_simulated(name, r, times[key]), r["measured"]["step_s_derived"])
    pairs = [(a, b) for found in steps.values() for a, b in combinations(found.values(), 2)]
    clear = [(a, b) for a, b in pairs if abs(a[1] - b[1]) > 0.05 * min(a[1], b[1])]
    right = [sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in x) for x in (pairs, clear)]
    return {
        "pairs": len(pairs),
        "right": right[0],
        "clear_pairs": len(clear),
        "clear_right": right[1],
    }


def _simulated(name: str, row: Row, m: dict[str, float]) -> float:
    """Step time of a schedule from measured stage times; a send keeps the queue busy."""
    p, count = row["run"]["pp"], row["run"]["microbatches"]
    v = -(-row["model"]["layers"] // p) if name == "1F1B-I" else 1
    made = {
        "1F1B": lambda: hocket.build("1f1b", p=p, m=count),
        "1F1B-I": lambda: hocket.build("interleaved", p=p, m=count, v=v),
        "ZB-1p": lambda: hocket.build("zb-auto", p=p, m=count, limit=p),
        "ZB-2p": lambda: hocket.build("zb-auto", p=p, m=count, limit=2 * p),
    }[name]()
    costs = hocket.Costs(
        F=m["F_ms"] / v, I=m["I_ms"] / v, W=m["W_ms"] / v, p2p_overhead=(0, m["pp_comm_ms"])
    )
    timeline = hocket.simulate(made, costs)
    return float(timeline.span if name.startswith("ZB") else timeline.makespan)


def choice(cases: list[Case]) -> list[float]:
    """How much longer the predicted best of each set took than the best that was measured."""
    sets: dict[Any, list[Case]] = defaultdict(list)
    for c in cases:
        x = c.measured
        sets[x.model, x.cluster, x.runs[0].global_batch, x.runs[0].seq].append(c)
    lost = []
    for found in sets.values():
        if len(found) > 1:
            chosen = min(found, key=lambda c: predicted(c.measured, c.stack))
            lost.append(chosen.measured.seconds / min(c.measured.seconds for c in found) - 1)
    return lost


def calibrated(cases: list[Case], *, draws: int = 8, runs: int = 5) -> dict[str, Any]:
    """Errors on the rows that a fit to five random rows has not seen: means over draws."""
    source, found = random.Random(5), []
    for _ in range(draws):
        order = source.sample(range(len(cases)), len(cases))
        stack = fit([cases[i].measured for i in order[:runs]], cases[0].stack)
        found.append(
            summary(
                predicted(cases[i].measured, stack) / cases[i].measured.seconds - 1
                for i in order[runs:]
            )
        )
    return {
        "draws": draws,
        "runs": runs,
        **{k: sum(f[k] for f in found) / draws for k in ("median", "p90", "worst")},
    }


def left_out_errors(cases: list[Case]) -> dict[str, float]:
    """The error of each step, predicted by a fit to the other rows of its stack."""
    by_stack: dict[Stack, list[Case]] = defaultdict(list)
    for c in cases:
        by_stack[c.stack].append(c)
    result: dict[str, float] = {}
    for stack, found in by_stack.items():
        if len(found) > 3:
            off = left_out([c.measured for c in found], stack, folds=min(len(found), 20))
            result |= {c.row_id: e for c, e in zip(found, off, strict=True)}
    return result


# --- the report -----------------------------------------------------------------------------


def _off(case: Case) -> float:
    return predicted(case.measured, case.stack) / case.measured.seconds - 1


def _kind(row: Row, case: Case) -> str:
    """Which of a group's rows belong together: dense models, or experts by precision."""
    if case.measured.model.moe is None:
        return "dense"
    return f"experts, {'bf16' if precision_of(row) == 'bf16' else '8 or 4 bit (calibrate first)'}"


def report(
    rows: list[Row], *, apart: bool = False, draws: int = 0, each: bool = False
) -> dict[str, Any]:
    """Errors by group, and what is asked of several rows together."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    skipped: dict[str, Counter[str]] = defaultdict(Counter)
    cases: dict[str, list[Case]] = defaultdict(list)
    lines = []
    for row in rows:
        group, of_row = row["group"], values[row["group"]]
        flops = flops_error(row)
        if flops is not None:
            of_row["flops"].append(flops)
        try:
            case = case_of(row)
            off = 0.0 if row["kind"] != "step" else _off(case)
        except (CannotError, hocket.HocketError) as error:
            skipped[group][str(error)] += 1
            continue
        if row["kind"] in ("stage", "layer"):
            for name, off in stage_errors(row, case).items():
                of_row[name].append(off)
                of_row["step"].append(off)
            continue
        of_row["step"].append(off)
        of_row[_kind(row, case)].append(off)
        cases[group].append(case)
        memory = memory_error(row, case)
        if memory is not None:
            of_row["memory"].append(memory)
            of_row["memory of " + str(row["run"].get("schedule"))].append(memory)
        lines.append((case.row_id, row["model"]["name"], off, memory))
    groups = {}
    for group, kinds in values.items():
        groups[group] = {
            **summary(kinds["step"]),
            **{k: summary(x) for k, x in kinds.items() if k != "step"},
        }
        kinds_of_model = [k for k in groups[group] if k == "dense" or k.startswith("experts")]
        if len(kinds_of_model) == 1:
            del groups[group][kinds_of_model[0]]
        if skipped[group]:
            groups[group]["skipped"] = dict(skipped[group])
        if group in ("vtrain_multi", "vtrain_single", "nanotron_h100") and cases[group]:
            groups[group]["choice"] = summary(choice(cases[group]))
            if draws and len(cases[group]) > 10:
                groups[group]["calibrated"] = calibrated(cases[group], draws=draws)
    if apart:
        off = left_out_errors([c for found in cases.values() for c in found])
        for group, found in cases.items():
            groups[group]["left_out"] = summary(off[c.row_id] for c in found if c.row_id in off)
    result: dict[str, Any] = {"groups": groups, "ranking": ranking(rows)}
    if each:
        result["rows"] = [
            dict(zip(("id", "model", "step", "memory"), x, strict=True)) for x in lines
        ]
    return result


def _percent(entry: dict[str, Any]) -> str:
    if not entry.get("rows"):
        return f"{entry.get('rows', 0):4d}" + 24 * " "
    return f"{entry['rows']:4d} {entry['median']:7.1%} {entry['p90']:7.1%} {entry['worst']:7.1%}"


def text(result: dict[str, Any]) -> str:
    """The report for people."""
    head = f"{'group':28s}{'rows':>4s} {'median':>7s} {'p90':>7s} {'worst':>7s}"
    lines = [head]
    for group, entry in result["groups"].items():
        lines.append(f"{group:28s}{_percent(entry)}")
        for name, part in entry.items():
            if isinstance(part, dict) and "rows" in part:
                lines.append(f"  {name:26s}{_percent(part)}")
            elif name == "calibrated":
                three = "".join(f" {part[k]:7.1%}" for k in ("median", "p90", "worst"))
                lines.append(f"  {'after 5 runs, mean':26s}    {three}")
            elif name == "skipped":
                lines += [f"  cannot: {n} row(s), {why}" for why, n in part.items()]
    r = result["ranking"]
    lines.append(
        f"ranking of schedules: {r['right']} of {r['pairs']} pairs, "
        f"{r['clear_right']} of {r['clear_pairs']} that differ by more than 5 %"
    )
    for row in result.get("rows", ()):
        memory = "" if row["memory"] is None else f"{row['memory']:+8.1%}"
        lines.append(f"{row['id']:34s}{row['model'][:30]:32s}{row['step']:+8.1%}{memory}")
    return "\n".join(lines)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="+", metavar="ROWS.jsonl", help="files with one measurement per line"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--left-out", action="store_true", help="refit each stack without the row")
    parser.add_argument(
        "--calibrated", type=int, default=0, metavar="DRAWS", help="draws of five runs to fit"
    )
    parser.add_argument(
        "--fit", metavar="STACK[,STACK]", help="fit a shipped stack again and print it"
    )
    parser.add_argument("--rows", action="store_true", help="print each row's error too")
    options = parser.parse_args()
    texts = [Path(name).read_text(encoding="utf-8") for name in options.files]
    rows = [json.loads(line) for text in texts for line in text.splitlines() if line.strip()]
    if options.fit:
        print(dumps_stack(refitted(rows, options.fit.split(","))), end="")
        return 0
    result = report(rows, apart=options.left_out, draws=options.calibrated, each=options.rows)
    print(json.dumps(result) if options.json else text(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
