"""A configuration as the flags of another framework, and what that framework can run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hocket.cluster.run import Run

_DEGREES = {
    "tensor-model-parallel-size": "tp", "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep", "pipeline-model-parallel-size": "pp",
    "num-virtual-stages-per-pipeline-rank": "v",
}  # fmt: skip
_BATCH = {
    "micro-batch-size": "micro_batch", "global-batch-size": "global_batch", "seq-length": "seq"
}  # fmt: skip


def megatron(run: Run) -> str:
    """The flags of Megatron-LM that lay out a run; degrees of 1 are left out."""
    words = [f"--{flag} {n}" for flag, key in _DEGREES.items() if (n := getattr(run, key)) > 1]
    words += [f"--{flag} {getattr(run, key)}" for flag, key in _BATCH.items()]
    flags = {
        "sequence-parallel": run.sp,
        "account-for-embedding-in-pipeline-split": run.lighter[0] > 0,
        "account-for-loss-in-pipeline-split": run.lighter[1] > 0,
        "use-distributed-optimizer": run.sharding > 0,
        "overlap-grad-reduce": run.grad_overlap,
        "recompute-granularity full --recompute-method uniform --recompute-num-layers 1":
            "full" in run.recompute,
    }  # fmt: skip
    return " ".join(words + [f"--{flag}" for flag, is_set in flags.items() if is_set])


class Target(NamedTuple):
    """A framework: the schedules and the recomputation that it has, and its flags for a run.

    Layouts are searched whose stages have equally many layers, embedding and head counted as one
    layer each where that makes them even.
    """

    schedules: tuple[str, ...]
    recompute: tuple[tuple[str, ...], ...]
    flags: Callable[[Run], str]


TARGETS = {"megatron": Target(("1f1b", "interleaved"), ((), ("full",)), megatron)}
