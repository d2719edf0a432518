"""The catalogues as rows: models, GPUs and stacks with their sizes, rates, errors and sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hocket.cluster.hardware import load_gpu
from hocket.cluster.model import load_model
from hocket.cluster.operations import active_parameters, parameters
from hocket.cluster.stack import load_stack
from hocket.cluster.tables import catalogue


def _model(name: str) -> dict[str, Any]:
    model = load_model(name)
    moe = model.moe
    return {
        "name": name,
        "parameters": parameters(model, mtp=False),
        "active": active_parameters(model),
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": None if model.mla else model.kv_heads,
        "experts": moe and moe.experts,
        "top_k": moe and moe.top_k,
        "vocab": model.vocab,
        "source": model.source,
    }


def _gpu(name: str) -> dict[str, Any]:
    gpu = load_gpu(name)
    return {
        "name": name,
        "bf16_tflops": gpu.bf16,
        "fp8_tflops": gpu.fp8 or None,
        "memory_gb": gpu.memory_gb,
        "hbm_tb_per_s": gpu.hbm,
        "link_gb_per_s": gpu.link,
        "scale_up": gpu.scale_up,
        "nic_gb_per_s": gpu.nic,
        "source": gpu.source,
    }


def _stack(name: str) -> dict[str, Any]:
    stack = load_stack(name)
    fit = stack.fit
    errors = {"median": fit.median, "worst": fit.worst} if fit.rows else {}
    with_experts = {"median_experts": fit.median_experts, "worst_experts": fit.worst_experts}
    return {
        "name": name,
        "gpu": stack.gpu,
        "precision": stack.precision,
        "rows": fit.rows,
        **errors,
        "rows_experts": fit.rows_experts,
        **(with_experts if fit.rows_experts else {}),
        "calibrate_first": stack.calibrate_first,
        "software": stack.software,
        "sources": list(fit.sources),
    }


class Listing(NamedTuple):
    """A catalogue: the row of an entry, and the headings of its table by key."""

    kind: str
    row: Callable[[str], dict[str, Any]]
    heads: Mapping[str, str]

    def data(self) -> list[dict[str, Any]]:
        """Every entry as plain data."""
        return [self.row(name) for name in catalogue(self.kind)]

    def rows(self) -> list[dict[str, Any]]:
        """Every entry as texts for a table."""
        return [{k: _text(k, row.get(k)) for k in self.heads} for row in self.data()]


def _text(key: str, value: Any) -> Any:
    if key in ("parameters", "active"):
        return f"{value / 1e9:.1f}"
    if value is not None and key.startswith(("median", "worst")):
        return f"{100 * value:.1f} %"
    return value


LISTS = {
    "models": Listing("models", _model, {
        "name": "model", "parameters": "parameters, 10^9", "active": "active", "layers": "layers",
        "hidden": "hidden", "heads": "heads", "kv_heads": "KV heads", "experts": "experts",
        "top_k": "per token", "source": "source",
    }),
    "gpus": Listing("gpus", _gpu, {
        "name": "GPU", "bf16_tflops": "BF16 TFLOP/s", "fp8_tflops": "FP8", "memory_gb": "GB",
        "hbm_tb_per_s": "TB/s", "link_gb_per_s": "link GB/s", "scale_up": "GPUs per node",
        "nic_gb_per_s": "network GB/s", "source": "source",
    }),
    "stacks": Listing("stacks", _stack, {
        "name": "stack", "precision": "precision", "rows": "runs", "median": "median error",
        "worst": "worst", "rows_experts": "runs with experts", "median_experts": "median error ",
        "worst_experts": "worst ", "software": "software",
    }),
}  # fmt: skip
