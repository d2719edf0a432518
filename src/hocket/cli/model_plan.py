"""`hocket plan --model`: the fastest layout of a model on a cluster."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from hocket.cli.arguments import Answer, option
from hocket.cli.configuration import cluster_from, words
from hocket.errors import PlanError, UsageError
from hocket.words import hint, wholes


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model and a cluster, and what the search may choose from."""

    model: str | None = option(
        "--model MODEL", "plan the layout of a model on a cluster instead: a name from `hocket "
        "list --models`, a model.toml or a config.json; of the other options it takes -v, "
        "--memory and --margin (default: 0.03)", heading="a model on a cluster",
    )  # fmt: skip
    gpu: str | None = option("--gpu GPU", "a name from `hocket list --gpus`")
    cluster: str | None = option("--cluster FILE", "a cluster.toml, instead of --gpu")
    gpus: int | None = option("--gpus N", "how many")
    stack: str | None = option("--stack STACK", "the software (default: GPU-megatron)")
    seq: int | None = option("--seq N", "tokens per sequence")
    global_batch: int | None = option("--global-batch N", "sequences per step")
    micro_batch: tuple[int, ...] | None = option(
        "--micro-batch LIST", "sequences per microbatch (default: 1,2,4)", read=wholes
    )
    tp: tuple[int, ...] | None = option(
        "--tp LIST", "tensor parallel ranks: 8, or several: 4,8 (default: within a node)",
        read=wholes,
    )  # fmt: skip
    cp: tuple[int, ...] | None = option("--cp LIST", "context parallel ranks", read=wholes)
    ep: tuple[int, ...] | None = option("--ep LIST", "expert parallel ranks", read=wholes)
    pp: tuple[int, ...] | None = option("--pp LIST", "pipeline parallel ranks", read=wholes)
    schedule: tuple[str, ...] | None = option(
        "--schedule LIST", "of 1f1b, interleaved, zb-h1, zb-v (default: all)", read=words
    )
    target: str | None = option(
        "--for FRAMEWORK", "print its flags, and choose only what it has", of=("megatron",)
    )

    @property
    def given(self) -> bool:
        """Whether any of these options is set."""
        return any(getattr(self, one.name) is not None for one in fields(self))


def model_plan(
    asked: ModelOptions, v: tuple[int, ...] | None, memory: Any, margin: float | None
) -> Answer:
    """The fastest configurations that fit. Raises: HocketError; PlanError where none does."""
    from hocket.cluster import load_model, load_stack, stack_of
    from hocket.cluster.flags import TARGETS
    from hocket.cluster.report import found_json, found_text
    from hocket.cluster.search import Space, search

    for name, value in (("--model", asked.model), ("--seq", asked.seq),
                        ("--global-batch", asked.global_batch)):  # fmt: skip
        if value is None:
            raise UsageError(f"a plan of a model on a cluster needs {name}")
    if asked.gpus is None and asked.cluster is None:
        raise UsageError("a plan of a model on a cluster needs --gpus")
    model = load_model(asked.model or "")
    cluster = cluster_from(asked.gpu, asked.cluster, asked.gpus, memory, 1)
    stack = load_stack(asked.stack) if asked.stack else stack_of(cluster.gpu)
    names = ("seq", "global_batch", "micro_batch", "tp", "cp", "ep", "pp", "schedule")
    limits: dict[str, Any] = {n: getattr(asked, n) for n in names} | {"v": v}
    space = Space(**{n: x for n, x in limits.items() if x is not None})
    target = TARGETS[asked.target] if asked.target else None
    if target is not None:
        names = space.schedule if asked.schedule else target.schedules
        _check_schedules(names, target.schedules, asked.target or "")
        space = replace(space, schedule=names, recompute=target.recompute, even=True)
    margin = 0.03 if margin is None else margin
    if not 0 <= margin < 1:
        raise UsageError(f"--margin is {margin:g}; it must be from 0 to below 1")
    found = search(model, cluster, stack, space, margin=margin)
    if not found.best:
        counts = ", ".join(f"{n:,} {fate}" for fate, n in found.counts.items() if n)
        raise PlanError(f"no configuration fits: {counts or 'there is none to try'}")
    flags = {} if target is None else {"flags": target.flags(found.best[0].run)}
    text = "\n\n".join([*flags.values(), found_text(found, margin)])
    return Answer(text, lambda: found_json(found) | flags)


def _check_schedules(names: tuple[str, ...], known: tuple[str, ...], target: str) -> None:
    """Raises: UsageError for a schedule that a framework does not have."""
    for name in names:
        if name not in known:
            raise UsageError(f"{target} does not have {name!r}; {hint(name, known)}")
