"""What differs between versions of Megatron, and what none of them can run with another order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import megatron.core

from hocket.errors import UsageError

TESTED = ((0, 15), (0, 19))
"""The first and the last version, of which tests have run."""

REFUSED: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "overlap_moe_expert_parallel_comm": (bool, "it merges a forward and a backward of its own"),
    "hybrid_context_parallel": (bool, "it has a schedule of its own"),
    "defer_embedding_wgrad_compute": (bool, "an order with I and W puts these gradients off, too"),
    "num_microbatches_with_partial_activation_checkpoints": (
        lambda value: value is not None,
        "it counts the microbatches in flight of 1F1B; choose layers with recompute_num_layers",
    ),
    "fine_grained_activation_offloading": (bool, "it assumes the order of 1F1B"),
    "cuda_graph_impl": (lambda value: value not in (None, "none"), "graphs record one order"),
    "enable_cuda_graph": (bool, "graphs record one order"),
}
"""Settings of Megatron's config: whether a value is refused, and why."""


def check_version() -> None:
    """Raises UsageError for a version of megatron-core that was never tested."""
    version = megatron.core.__version__
    number = tuple(int(part) for part in version.split(".")[:2])
    if not TESTED[0] <= number <= TESTED[1]:
        first, last = (".".join(map(str, v)) for v in TESTED)
        raise UsageError(
            f"megatron-core {version} is installed, but hocket.megatron is tested with {first} to "
            f"{last}; install one of these"
        )


def check_config(config: Any, model: list[Any]) -> None:
    """Raises UsageError for a setting that another order cannot respect."""
    for name, (refused, why) in REFUSED.items():
        value = getattr(config, name, None)
        if refused(value):
            raise UsageError(
                f"{name}={value!r} cannot be used with an order of hocket: {why}; turn it off"
            )
    for chunk in model:
        ddp = getattr(chunk, "ddp_config", None)
        if getattr(ddp, "use_megatron_fsdp", False):
            raise UsageError(
                "Megatron FSDP shards and frees gradients in each backward, and was not tested "
                "with other orders; use the distributed optimizer instead"
            )


def finalize(config: Any, model: list[Any], tokens: Any, groups: Any, force: bool) -> None:
    """Calls the function that reduces the gradients; `force_all_reduce` exists since 0.16."""
    more = {"force_all_reduce": True} if force else {}
    config.finalize_model_grads_func(
        model, tokens if config.calculate_per_token_loss else None, pg_collection=groups, **more
    )
