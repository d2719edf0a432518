"""What a run is: how a model is laid out over a cluster, and the rules that it must keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from hocket.cluster.hardware import Cluster
from hocket.cluster.model import Model
from hocket.errors import UsageError

RECOMPUTE = {
    "none": "every activation is kept",
    "core": "the attention core: scores and softmax (Megatron's selective)",
    "norm": "outputs of normalisations",
    "activation": "outputs of activation functions",
    "mla_up": "queries, keys and values from their compressed form",
    "experts": "the whole expert network",
    "full": "the whole layer: only its input is kept",
}


@dataclass(frozen=True)
class Run:
    """One configuration: sizes of the batch, of every dimension of parallelism, and its habits.

    seq, micro_batch, global_batch: tokens and sequences. tp, cp, ep, pp: degrees; etp: tensor
    parallelism within an expert; v: stages per rank. dp is what is left of the GPUs. schedule,
    options: a name of `hocket list` and its settings. recompute: keys of RECOMPUTE.
    recompute_layers: how many layers per stage recompute, one number or one for each stage (left
    out: all). sp: sequence
    parallelism. sharding: what data parallel ranks share: 0 nothing, 1 optimizer states, 2
    gradients too, 3 weights too (FSDP). flash: fused attention. split: layers per stage (left
    out: as even as can be, after `lighter` layers are taken off for embedding and head).
    validated_later: the optimizer step is validated afterwards, so that steps overlap
    (zero-bubble schedules).
    """

    seq: int
    micro_batch: int
    global_batch: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    pp: int = 1
    v: int = 1
    schedule: str = "1f1b"
    options: tuple[tuple[str, object], ...] = ()
    recompute: tuple[str, ...] = ()
    recompute_layers: int | tuple[int, ...] | None = None
    sp: bool = False
    sharding: int = 1
    flash: bool = True
    grad_overlap: bool = True
    split: tuple[int, ...] | None = None
    lighter: tuple[int, int] = (0, 0)
    validated_later: bool = False

    @property
    def kept_sharding(self) -> int:
        """What is shared throughout a step: with a pipeline, FSDP keeps its weights gathered.

        Source: torchtitan's fsdp_reshard_after_forward, "default": gathering for each microbatch
        would cost more; gradients are then reduced once, too.
        """
        return 1 if self.sharding == 3 and self.pp > 1 else self.sharding

    def dp(self, cluster: Cluster) -> int:
        """Copies of the model's layout: the data parallel degree."""
        return cluster.gpus // (self.tp * self.cp * self.pp)

    def expert_dp(self, cluster: Cluster) -> int:
        """Copies of each expert."""
        return max(1, cluster.gpus // (self.etp * self.ep * self.pp))

    def microbatches(self, cluster: Cluster) -> int:
        """Microbatches per rank and step."""
        return self.global_batch // (self.micro_batch * self.dp(cluster))

    def recomputed_in(self, stage: int) -> int | None:
        """How many layers of a stage recompute; None: all."""
        n = self.recompute_layers
        return n[stage] if isinstance(n, tuple) else n

    def layers_of(self, layers: int) -> tuple[int, ...]:
        """Layers per stage: `split`, or as even as can be with lighter ends."""
        if self.split is not None:
            return self.split
        n = self.pp * self.v
        first, last = self.lighter
        base, rest = divmod(layers + first + last, n)
        sizes = [base + (i < rest) for i in range(n)]
        sizes[0] -= first
        sizes[-1] -= last
        return tuple(sizes)


class Fault(NamedTuple):
    """A rule that a configuration breaks: the fields it is about, and one sentence."""

    fields: tuple[str, ...]
    text: str


class _Case(NamedTuple):
    model: Model
    cluster: Cluster
    run: Run


class Rule(NamedTuple):
    """One rule: the fields it is about, whether it holds, and what is wrong where it does not."""

    fields: tuple[str, ...]
    holds: Callable[[_Case], bool]
    text: Callable[[_Case], str]


def _recomputed(c: _Case) -> tuple[int, ...]:
    n = c.run.recompute_layers
    return n if isinstance(n, tuple) else () if n is None else (n,)


def _experts(c: _Case) -> int:
    return c.model.moe.experts if c.model.moe else 0


RULES = (
    Rule(("tp", "cp", "pp"), lambda c: c.cluster.gpus % (c.run.tp * c.run.cp * c.run.pp) == 0,
         lambda c: f"tp cp pp is {c.run.tp * c.run.cp * c.run.pp}; it must divide the "
                   f"{c.cluster.gpus} GPUs"),
    Rule(("etp", "ep", "pp"), lambda c: not _experts(c)
         or c.cluster.gpus % (c.run.etp * c.run.ep * c.run.pp) == 0,
         lambda c: f"etp ep pp is {c.run.etp * c.run.ep * c.run.pp}; it must divide the "
                   f"{c.cluster.gpus} GPUs"),
    Rule(("ep",), lambda c: c.run.ep == 1 or (_experts(c) > 0 and _experts(c) % c.run.ep == 0),
         lambda c: f"ep is {c.run.ep}; it must divide the {_experts(c)} experts"),
    Rule(("tp",), lambda c: c.model.heads % c.run.tp == 0,
         lambda c: f"tp is {c.run.tp}; it must divide the {c.model.heads} heads"),
    Rule(("tp",), lambda c: c.model.mla is not None or c.model.kv_heads % c.run.tp == 0
         or c.run.tp % c.model.kv_heads == 0,
         lambda c: f"tp is {c.run.tp}; it must divide the {c.model.kv_heads} key-value "
                   "heads, or be a multiple of them"),
    Rule(("tp",), lambda c: c.model.ffn % c.run.tp == 0,
         lambda c: f"tp is {c.run.tp}; it must divide the width {c.model.ffn} of the dense "
                   "network"),
    Rule(("etp",), lambda c: c.model.moe is None or c.model.moe.ffn % c.run.etp == 0,
         lambda c: f"etp is {c.run.etp}; it must divide the width of an expert"),
    Rule(("cp",), lambda c: c.run.cp == 1 or c.run.seq % (2 * c.run.cp) == 0,
         lambda c: f"cp is {c.run.cp}; 2 cp must divide the {c.run.seq} tokens of a sequence"),
    Rule(("tp", "sp"), lambda c: not c.run.sp or c.run.seq % c.run.tp == 0,
         lambda c: f"tp is {c.run.tp}; with sequence parallelism it must divide the {c.run.seq} "
                   "tokens of a sequence"),
    Rule(("micro_batch", "global_batch"),
         lambda c: c.run.global_batch % (c.run.micro_batch * max(1, c.run.dp(c.cluster))) == 0,
         lambda c: f"micro_batch dp is {c.run.micro_batch * c.run.dp(c.cluster)}; it must "
                   f"divide the global batch of {c.run.global_batch}"),
    Rule(("v", "pp"), lambda c: c.run.v == 1 or c.run.pp > 1,
         lambda c: f"v is {c.run.v} and pp is 1; several stages per rank need pp of 2 or more"),
    Rule(("pp", "v"), lambda c: c.run.split is not None or (
            c.run.pp * c.run.v <= c.model.layers + sum(c.run.lighter)
            and min(c.run.layers_of(c.model.layers)) >= 0),
         lambda c: f"pp v is {c.run.pp * c.run.v}; it must be at most the {c.model.layers} layers"),
    Rule(("split",), lambda c: c.run.split is None or (len(c.run.split) == c.run.pp * c.run.v
         and sum(c.run.split) == c.model.layers and min(c.run.split) >= 0),
         lambda c: f"split has {len(c.run.split or ())} stages with {sum(c.run.split or ())} "
                   f"layers; it needs {c.run.pp * c.run.v} stages with {c.model.layers} layers"),
    Rule(("recompute",), lambda c: all(x in RECOMPUTE for x in c.run.recompute),
         lambda c: f"recompute is {', '.join(c.run.recompute)}; known are {', '.join(RECOMPUTE)}"),
    Rule(("recompute_layers",), lambda c: min(_recomputed(c), default=0) >= 0,
         lambda c: f"recompute_layers is {c.run.recompute_layers}; it must be 0 or more"),
    Rule(("recompute_layers",), lambda c: len(_recomputed(c)) in (0, 1, c.run.pp * c.run.v),
         lambda c: f"recompute_layers has {len(_recomputed(c))} numbers; it needs 1, or one for "
                   f"each of {c.run.pp * c.run.v} stages"),
    Rule(("lighter",), lambda c: min(c.run.lighter) >= 0,
         lambda c: f"lighter is {c.run.lighter[0]}, {c.run.lighter[1]}; each must be 0 or more"),
    Rule(("sharding",), lambda c: c.run.sharding in (0, 1, 2, 3),
         lambda c: f"sharding is {c.run.sharding}; it must be 0, 1, 2 or 3"),
)  # fmt: skip

_POSITIVE = ("seq", "micro_batch", "global_batch", "tp", "cp", "ep", "etp", "pp", "v")


def faults(model: Model, cluster: Cluster, run: Run) -> list[Fault]:
    """Every rule that a configuration breaks; an empty list where it can run."""
    low = [x for x in _POSITIVE if getattr(run, x) < 1]
    if low:
        return [Fault((x,), f"{x} is {getattr(run, x)}; it must be 1 or more") for x in low]
    case = _Case(model, cluster, run)
    return [Fault(rule.fields, rule.text(case)) for rule in RULES if not rule.holds(case)]


def raise_faults(model: Model, cluster: Cluster, run: Run) -> None:
    """Raises: UsageError with one sentence for each rule that a configuration breaks."""
    found = faults(model, cluster, run)
    if found:
        raise UsageError("\n".join(x.text for x in found))
