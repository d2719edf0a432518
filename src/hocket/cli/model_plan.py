"""`hocket plan --model`: the fastest layout of a model on a cluster."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.cli.arguments import Answer, option
from hocket.cli.configuration import cluster_from, words
from hocket.cli.output import check_writable
from hocket.errors import PlanError, UsageError
from hocket.files import write
from hocket.words import hint, settings, wholes

if TYPE_CHECKING:
    from hocket.cli.plan import Options
    from hocket.cluster import Cluster, Model, Stack
    from hocket.cluster.search import Found, Space
    from hocket.cluster.targets import Target


def _parts(text: str) -> tuple[tuple[str, ...], ...]:
    """`norm+activation` as what is recomputed."""
    return (() if text == "none" else tuple(text.split("+")),)


_ASKED: dict[str, Callable[[str], tuple[Any, ...]]] = {
    **dict.fromkeys(("tp", "cp", "ep", "pp", "v", "micro-batch"), wholes),
    "schedule": words, "recompute": _parts,
}  # fmt: skip


def question(text: str) -> dict[str, Any]:
    """`tp=4,pp=16` as the fields of a Space. Raises: UsageError."""
    asked = settings(text.split(","))
    for key in asked:
        if key not in _ASKED:
            raise UsageError(f"{key} is not what --why asks about; {hint(key, _ASKED)}")
    return {k.replace("-", "_"): _ASKED[k](str(x).lower()) for k, x in asked.items()}


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
        "--for FRAMEWORK", "print its flags, file or script, and choose only what it has",
        of=("megatron", "torchtitan", "hocket"),
    )  # fmt: skip
    why: dict[str, Any] | None = option(
        "--why LAYOUT", "why these are not the answer: tp=4,pp=16 or schedule=zb-v", read=question
    )
    order: float | None = option(
        "--order S", "then plan the order of the answer in the memory that is left, for S seconds"
    )

    @property
    def given(self) -> bool:
        """Whether any of these options is set."""
        return any(getattr(self, one.name) is not None for one in fields(self))


def model_plan(asked: ModelOptions, more: Options) -> Answer:
    """The fastest configurations that fit. Raises: HocketError; PlanError where none does."""
    from hocket.cluster.reasons import helps, nothing_fits
    from hocket.cluster.report import found_json, found_text, helps_json, outcomes_json, why_text
    from hocket.cluster.search import outcomes_of, search
    from hocket.cluster.targets import TARGETS

    target = TARGETS[asked.target] if asked.target else None
    _check(asked, more, target)
    case = _case(asked, more, target)
    model, cluster, stack, space = case
    margin = 0.03 if more.margin is None else more.margin
    found = search(*case, margin=margin)
    if found.fastest is None:
        raise PlanError(nothing_fits(found))
    if asked.order is not None:
        found = with_planned(found, asked.order, more.output)
    first, remedies = found.best[0], helps(found.best[0])
    data: dict[str, Any] = {"would_help": helps_json(remedies)}
    texts = []
    if target is not None:
        data["flags"] = target.text(first)
        texts.append(data["flags"].rstrip())
    texts.append(found_text(found, margin, remedies))
    if asked.why is not None:
        outcomes = outcomes_of(model, cluster, stack, replace(space, **asked.why))
        texts.append(why_text(asked.why, outcomes, found))
        data["why"] = outcomes_json(outcomes, found)
    if more.output is not None:
        write(more.output, _file(found, target, more.output))
        texts.append(f"written: {more.output}")
    return Answer("\n\n".join(texts), lambda: found_json(found) | data)


def _check(asked: ModelOptions, more: Options, target: Target | None) -> None:
    """Raises: UsageError for what is missing or out of range."""
    for name, value in (("--model", asked.model), ("--seq", asked.seq),
                        ("--global-batch", asked.global_batch)):  # fmt: skip
        if value is None:
            raise UsageError(f"a plan of a model on a cluster needs {name}")
    if asked.gpus is None and asked.cluster is None:
        raise UsageError("a plan of a model on a cluster needs --gpus")
    if more.margin is not None and not 0 <= more.margin < 1:
        raise UsageError(f"--margin is {more.margin:g}; it must be from 0 to below 1")
    if asked.order is not None and not 0 < asked.order < math.inf:
        raise UsageError(f"--order is {asked.order:g}; it must be seconds above 0")
    if asked.order is not None and target is not None and not target.any_order:
        raise UsageError(f"{asked.target} runs no order but those it has; leave out --order")
    check_writable(more.output)


def _case(
    asked: ModelOptions, more: Options, target: Target | None
) -> tuple[Model, Cluster, Stack, Space]:
    """What is searched. Raises: HocketError."""
    from hocket.cluster import load_model, load_stack, stack_of
    from hocket.cluster.search import Space

    model = load_model(asked.model or "")
    cluster = cluster_from(asked.gpu, asked.cluster, asked.gpus, more.memory, 1)
    software = "megatron" if target is None else target.software
    stack = load_stack(asked.stack) if asked.stack else stack_of(cluster.gpu, software)
    names = ("seq", "global_batch", "micro_batch", "tp", "cp", "ep", "pp", "schedule")
    limits: dict[str, Any] = {n: getattr(asked, n) for n in names} | {"v": more.v}
    space = Space(**{n: x for n, x in limits.items() if x is not None})
    if target is None:
        return model, cluster, stack, space
    names = space.schedule if asked.schedule else target.schedules
    _check_schedules(names, target.schedules, asked.target or "")
    for name, allowed in target.only.items():
        if not set(getattr(space, name)) <= set(allowed):
            raise UsageError(f"{asked.target} has no --{name}; leave it out")
    kept = {n: getattr(target, n) for n in ("recompute", "partly", "by_stage", "sharding",
                                            "allows")}  # fmt: skip
    return model, cluster, stack, replace(space, schedule=names, **kept, **target.only)


def with_planned(found: Found, seconds: float, path: str | None) -> Found:
    """The same with a planned order for the answer, where one is found that is faster.

    path: of a file that the order will be in, if it is a `.sched`.

    Raises: HocketError.
    """
    from hocket.cluster import estimate
    from hocket.planner.planning import plan
    from hocket.planner.request import Request

    first = found.best[0]
    run, fullest = first.run, first.memory[first.fullest]
    if run.pp == 1:
        return found
    slack = 1 + first.stack.slack
    static = [x.weights + x.gradients + x.optimizer for x in first.memory]
    other = fullest.buffers - (slack - 1) * fullest.activations
    limits = tuple((found.cluster.memory - other + (slack - 1) * x) / slack for x in static)
    shape = "linear" if run.v == 1 else "v" if run.schedule == "zb-v" else "looped"
    request = Request(
        p=run.pp, m=first.microbatches, costs=first.costs, memory=limits, v=(run.v,),
        shapes=(shape,), time_limit=seconds,
    )  # fmt: skip
    order = plan(request, known=[(run.schedule, first.timeline.schedule)]).schedule
    is_kept = path is not None and Path(path).suffix == ".sched"
    name = path if is_kept else f"{run.schedule}-planned.sched"
    if order.placement != first.timeline.schedule.placement:
        return found
    other_order = replace(order, name=name)
    one = estimate(first.model, found.cluster, first.stack, run, order=other_order)
    better = one.fits and one.step < first.step
    return replace(found, best=(one, *found.best)) if better else found


def _file(found: Found, target: Target | None, path: str) -> str | bytes:
    """What goes into a file: by its ending the order or a picture, else what --for prints."""
    from hocket.cluster.chart import chart
    from hocket.render.pdf import as_pdf
    from hocket.render.svg import as_svg
    from hocket.text import dumps

    drawn = {".svg": as_svg, ".pdf": as_pdf}.get(Path(path).suffix)
    if drawn is not None:
        return drawn(chart(found))
    if Path(path).suffix == ".sched":
        return dumps(found.best[0].timeline.schedule)
    if target is None:
        raise UsageError(f"--output {path}: without --for it must end in .sched, .svg or .pdf")
    return target.text(found.best[0])


def _check_schedules(names: tuple[str, ...], known: tuple[str, ...], target: str) -> None:
    """Raises: UsageError for a schedule that a framework does not have."""
    for name in names:
        if name not in known:
            raise UsageError(f"{target} does not have {name!r}; {hint(name, known)}")
