"""What a stack is: the few numbers that are fitted for one GPU, software and precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hocket.cluster.hardware import Gpu, load_gpu
from hocket.cluster.tables import (
    catalogue,
    catalogue_entry,
    hashed_once,
    known_keys,
    load_toml,
    required,
)
from hocket.errors import UsageError


@dataclass(frozen=True)
class Fit:
    """Where a stack's numbers come from, and how far off it is on the runs it was fitted on.

    median, p90, worst: of the relative error of the step time, each run left out of its own fit.
    rows_experts and so on: the same of models with experts, whose one number is fitted to them.
    rows_memory and so on: of the fullest rank's memory, which nothing is fitted to.
    fitted: the names of the numbers that were fitted; all others are assumed or from data sheets.
    own: the runs are those of the cluster that is predicted, not published ones.
    """

    rows: int = 0
    median: float = 0.0
    p90: float = 0.0
    worst: float = 0.0
    rows_experts: int = 0
    median_experts: float = 0.0
    worst_experts: float = 0.0
    rows_memory: int = 0
    median_memory: float = 0.0
    worst_memory: float = 0.0
    own: bool = False
    fitted: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


@hashed_once
@dataclass(frozen=True)
class Stack:
    """The speed and the habits of one software on one GPU in one precision.

    Fitted on step times: gemm (the highest share of the peak that a matrix product reaches), half
    (the size of a dimension at which half of that is lost), traffic (element-wise time, relative
    to the bytes moved over the memory's rate), layer_ms (CPU time to launch one layer's forward).

    Others: attention (share of the 16-bit peak in a fused attention core), weight (time of a weight
    gradient's product, relative to the curve), grouped (the experts' products, relative to the
    curve), tp_hidden, gradient_hidden, ep_hidden (shares of those collectives that run under
    computation: tensor parallel in the forward, data parallel, experts), tp_back_hidden (share of
    the weight gradient's product that hides the input gradient's message), once_per_node (a token
    is sent once to each node that has experts for it, as DeepEP does), network (of the usable
    rate between nodes), latency (of a message, relative to the cluster's), message_ms (what a
    message between stages keeps a queue busy), step (share that each pass takes longer than its
    kernels), fixed_ms (per step).

    Memory: master (bytes per parameter of optimizer states that the distributed optimizer shards),
    gradient, weights (bytes of each), saved (bytes per number of a product's input that is kept for
    its W), logits (bytes per logit while the loss is computed),
    expert_outputs (what the experts put out is kept for the gradient of its weights),
    unused_gradients (one 16-bit gradient for each shape of weight, which Transformer Engine keeps
    beside the fused accumulation), reserved_gb (CUDA context and communication libraries: 1 to
    3 GiB, assumed 2), slack (share of the activations that the allocator cannot use: 3 to 6 %,
    assumed 4). The last two are outside of what frameworks print as allocated.
    """

    name: str
    gpu: str
    software: str
    precision: str
    gemm: float
    half: float
    traffic: float = 1.0
    layer_ms: float = 0.0
    attention: float = 0.6
    weight: float = 0.85
    grouped: float = 1.0
    tp_hidden: float = 0.0
    gradient_hidden: float = 0.0
    tp_back_hidden: float = 1.0
    ep_hidden: float = 0.0
    once_per_node: bool = False
    network: float = 1.0
    latency: float = 1.0
    message_ms: float = 0.0
    step: float = 0.0
    fixed_ms: float = 4.0
    master: float = 12.0
    gradient: float = 4.0
    weights: float = 2.0
    unused_gradients: bool = False
    reserved_gb: float = 2.1
    slack: float = 0.04
    saved: int = 2
    logits: float = 4.0
    expert_outputs: bool = False
    calibrate_first: bool = False
    fit: Fit = field(default_factory=Fit, compare=False)

    @property
    def narrow(self) -> bool:
        """Whether products are computed in fewer than 16 bits."""
        return self.precision in ("fp8", "mxfp8", "fp4")


def stack_from(entry: Mapping[str, Any], where: str) -> Stack:
    """The stack that a table describes. Raises: UsageError naming the key."""
    known_keys(entry, Stack, where)
    values = dict(entry)
    if "fit" in values:
        known_keys(values["fit"], Fit, f"{where}: fit")
        values["fit"] = Fit(**required(values["fit"], Fit, f"{where}: fit"))
    stack = Stack(**required(values, Stack, where))
    for name in ("gemm", "half", "traffic", "attention", "weight", "grouped"):
        if getattr(stack, name) <= 0:
            raise UsageError(f"{where}: {name} is {getattr(stack, name)}; it must be above 0")
    for name in ("tp_hidden", "gradient_hidden", "ep_hidden"):
        if not 0 <= getattr(stack, name) <= 1:
            raise UsageError(f"{where}: {name} is {getattr(stack, name)}; it must be from 0 to 1")
    return stack


def load_stack(name: str) -> Stack:
    """The stack of a name in the catalogue or of a TOML file. Raises: UsageError."""
    if name.endswith(".toml"):
        return stack_from(load_toml(name), name)
    return stack_from(catalogue_entry("stacks", name, "stack"), name)


def stack_of(gpu: Gpu, software: str = "") -> Stack:
    """The stack that is taken for a GPU where none is named; of a `software` where there is one.

    A stack of another maker's GPU is scaled by the share of the peak that the fastest measured
    product reaches on each; its error is unknown, and it asks to be calibrated.

    Raises: UsageError where the catalogue has none, with the stacks that it has.
    """
    names = catalogue("stacks")
    asked = f"{gpu.stack.partition('-')[0]}-{software}"
    name = asked if asked in names and not gpu.borrowed else gpu.stack
    if not name:
        raise UsageError(
            f"no stack is the usual one of {gpu.name}; choose one with --stack: {', '.join(names)}"
        )
    stack = load_stack(name)
    if not gpu.borrowed:
        return stack
    home = load_gpu(stack.gpu)
    scale = gpu.reached / gpu.bf16 / (home.reached / home.bf16) if gpu.reached else 1.0
    return replace(
        stack, name=f"{stack.name} for {gpu.name}", gemm=stack.gemm * scale, fit=Fit(),
        calibrate_first=True,
    )  # fmt: skip


def dumps_stack(stack: Stack) -> str:
    """The stack as TOML, which `load_stack` reads back."""

    def value(x: Any) -> str:
        if isinstance(x, bool):
            return str(x).lower()
        if isinstance(x, tuple):
            return "[" + ", ".join(map(value, x)) + "]"
        if isinstance(x, str):
            return '"' + x.replace("\\", "\\\\").replace('"', '\\"') + '"'
        return f"{x:.4g}" if isinstance(x, float) else str(x)

    lines = [
        f"{f.name} = {value(getattr(stack, f.name))}" for f in fields(stack) if f.name != "fit"
    ]
    lines += ["", "[fit]"]
    lines += [f"{f.name} = {value(getattr(stack.fit, f.name))}" for f in fields(stack.fit)]
    return "\n".join(lines) + "\n"
