"""One estimate in words, verdict first; and the costs of its stages as a commented file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from hocket.cluster.calibrate import Measured, errors, predicted, quantile
from hocket.cluster.estimate import Estimate, needs_calibration
from hocket.cluster.hardware import Cluster
from hocket.cluster.model import Model
from hocket.cluster.operations import CONVENTIONS
from hocket.cluster.run import Run
from hocket.cluster.search import Found
from hocket.cluster.stack import Fit, Stack
from hocket.cluster.stages import costs_of
from hocket.costs import costs_toml
from hocket.tables import format_bytes, format_time, table


class Part(NamedTuple):
    """A part of the step: its name, and changes that make it shorter, each where it is possible."""

    name: str
    changes: Mapping[str, Callable[[Run], bool]]


def _always(run: Run) -> bool:
    return True


_BATCH = {"a larger --global-batch": _always}
PARTS = {
    "compute": Part("computation", {
        "less --recompute": lambda run: bool(run.recompute),
        "a smaller --tp": lambda run: run.tp > 1,
        "a larger --micro-batch": _always,
    }),
    "messages": Part("exposed TP, CP, EP", {
        "a smaller --tp": lambda run: run.tp > 1,
        "a smaller --cp": lambda run: run.cp > 1,
        "a smaller --ep": lambda run: run.ep > 1,
    }),
    "gradients": Part("exposed DP", {
        "no --no-grad-overlap": lambda run: not run.grad_overlap, **_BATCH
    }),
    "update": Part("optimizer", _BATCH),
    "imbalance": Part("imbalance", {"fewer layers at the ends (--lighter or --split)": _always}),
    "bubble": Part("bubble", {**_BATCH, "a larger -v": _always, "another --schedule": _always}),
}  # the fields of Breakdown  # fmt: skip
_FEWER_BYTES = "--recompute, a larger --pp or --tp, or --sharding"


def limited_by(found: Estimate) -> str:
    """What limits a configuration, one sentence: its memory, else what takes most of the step.

    Computation is named only where it takes four fifths of the step.
    """
    memory = found.memory[found.fullest].total
    if not found.fits:
        over = format_bytes(memory - found.cluster.memory)
        return f"memory: rank {found.fullest} needs {over} more than it has; try {_FEWER_BYTES}"
    parts = asdict(found.breakdown)
    useful = parts.pop("compute")
    name = "compute" if useful >= 0.8 * found.step else max(parts, key=parts.__getitem__)
    share = getattr(found.breakdown, name) / found.step
    tries = [text for text, possible in PARTS[name].changes.items() if possible(found.run)]
    return f"{PARTS[name].name}, {_percent(share)} of the step; try {' or '.join(tries)}"


def error_text(found: Estimate) -> str:
    """How far off the stack is on measured runs of such models, one sentence."""
    error = found.error
    kind = "of models with experts " if found.model.moe else ""
    if error.rows < 2:  # one run is never left out of its own fit
        few = "one run" if error.rows else "no run"
        return f"{found.stack.name} was fitted on {few} {kind}".rstrip() + ": its error is unknown"
    known = f"median {_percent(error.median)}, worst {_percent(error.worst)}"
    return f"error on the {error.rows} runs {kind}that {found.stack.name} was fitted on: {known}"


def as_text(found: Estimate) -> str:
    """The estimate for a reader, verdict first; times in seconds, memory in bytes of 10^9."""
    return "\n\n".join(
        ("\n".join(_verdict(found)), _time(found), _memory(found), "\n".join(_rest(found)))
    )


def as_json(found: Estimate) -> dict[str, Any]:
    """The estimate as plain data: seconds, bytes, shares from 0 to 1."""
    return found.as_dict() | {"limited_by": limited_by(found)}


def _verdict(found: Estimate) -> Iterator[str]:
    if found.calibrate_first:
        yield "calibrate first: too few measurements support these numbers (hocket calibrate)"
    gpus = f"{found.cluster.gpus:,} {found.cluster.gpu.name}"
    rate = f"{found.tokens_per_second:,.0f} tokens/s per GPU"
    yield (
        f"{found.model.name} on {gpus}: {format_time(found.step, 's')} per step, {rate}, "
        f"MFU {_percent(found.mfu)}"
    )
    need, limit = found.memory[found.fullest].total, found.cluster.memory
    verb = "fits" if found.fits else "does not fit"
    yield (
        f"it {verb}: rank {found.fullest} is the fullest, with {format_bytes(need)} of "
        f"{format_bytes(limit)}"
    )
    yield f"limited by {limited_by(found)}"
    yield error_text(found)


def _time(found: Estimate) -> str:
    rows = [
        (part.name, format_time(seconds, "s"), _percent(seconds / found.step))
        for name, part in PARTS.items()
        for seconds in [getattr(found.breakdown, name)]
    ]
    return table([*rows, ("step", format_time(found.step, "s"), "100.0 %")],
                 ("time, average rank", "per step", "share"))  # fmt: skip


def _memory(found: Estimate) -> str:
    parts = asdict(found.memory[found.fullest])
    total = found.memory[found.fullest].total
    sizes = {**parts, "total": total, "limit": found.cluster.memory}
    rows = [
        (name, format_bytes(size), _percent(size / found.cluster.memory))
        for name, size in sizes.items()
    ]
    return table(rows, (f"memory, rank {found.fullest}", "per GPU", "of the limit"))


def _rest(found: Estimate) -> Iterator[str]:
    run = found.run
    yield _layout(run, found.dp)
    yield (
        f"batch: {run.global_batch:,} sequences of {run.seq:,} tokens, {found.microbatches:,} "
        f"microbatches of {run.micro_batch} per rank"
    )
    counted = CONVENTIONS[found.convention]
    yield (
        f"MFU counts {found.flops_per_token / 1e9:,.1f} GFLOP per token ({counted}), "
        f"relative to {found.cluster.gpu.peak(found.stack.precision) / 1e12:,.0f} TFLOP/s "
        f"({found.stack.precision})"
    )
    for note in found.notes:
        yield f"note: {note}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def costs_text(model: Model, cluster: Cluster, stack: Stack, run: Run) -> str:
    """The costs of a run per stage as a commented `costs.toml`, in seconds and bytes."""
    return costs_toml(costs_of(model, cluster, stack, run), (
        f"{model.name} on {cluster.gpus:,} {cluster.gpu.name}, {run.pp * run.v} stages of "
        f"{', '.join(map(str, run.layers_of(model.layers)))} layers",
        _layout(run, run.dp(cluster)),
        f"one microbatch: {run.micro_batch} x {run.seq:,} tokens; "
        f"recomputed: {', '.join(run.recompute) or 'nothing'}",
        f"numbers of {stack.name} ({stack.software}, {stack.precision})"
        + (": calibrate first" if needs_calibration(model, stack) else ""),
        "",
        "F, I, W: seconds per microbatch, exposed collectives of TP, CP and EP included.",
        "p2p_overhead: seconds that a message occupies the queue of its sender.",
        "static: weights, gradients and optimizer states; activation: held from F to I;",
        "held_between_I_and_W: from I to W; gradient: more during a backward.",
        "Not here: reduction of gradients, optimizer step, buffers (see `hocket estimate`).",
    ))  # fmt: skip


def _layout(run: Run, dp: int) -> str:
    degrees = {"tp": run.tp, "cp": run.cp, "ep": run.ep, "etp": run.etp, "pp": run.pp,
               "v": run.v, "dp": dp}  # fmt: skip
    shown = ", ".join(f"{k} {n}" for k, n in degrees.items() if n > 1 or k in ("tp", "pp", "dp"))
    return f"layout: {shown}" + (f"; {run.schedule}" if run.pp > 1 else "")


def _errors(fit: Fit) -> Iterator[tuple[str, int, float, float]]:
    """Kind of models, number of runs, median and worst error; only kinds that were measured."""
    if fit.rows:
        yield "", fit.rows, fit.median, fit.worst
    if fit.rows_experts:
        yield " with experts", fit.rows_experts, fit.median_experts, fit.worst_experts


def calibration_text(measured: Sequence[Measured], before: Stack, after: Stack) -> str:
    """What a calibration brought: the errors first, then each run."""
    runs = "1 run" if len(measured) == 1 else f"{len(measured)} runs"
    lines = [f"{after.name}: {', '.join(after.fit.fitted)} fitted to {runs}"]
    for kind, rows, median, worst in _errors(after.fit):
        old = [
            abs(e) for x, e in zip(measured, errors(measured, before), strict=True)
            if (x.model.moe is not None) is bool(kind)
        ]  # fmt: skip
        lines.append(
            f"error{kind}: median {_percent(median)}, worst {_percent(worst)}; {before.name} as "
            f"it was: median {_percent(quantile(old, 0.5))}, worst {_percent(max(old))}"
        )
        if rows > 1 and median > quantile(old, 0.5):
            lines.append(f"the fit is no better than {before.name}: measure more runs")
    lines.append(
        "each run was left out of the fit that predicts it"
        if len(measured) > 1
        else "that run was not left out of the fit: measure five to know the error"
    )
    heads = ("run", "model", "GPUs", "layout", "measured", before.name, after.name)
    rows = [
        (str(n), x.model.name, str(x.cluster.gpus),
         _layout(x.runs[0], x.runs[0].dp(x.cluster)).removeprefix("layout: "),
         *(format_time(t, "s") for t in (x.seconds, predicted(x, before), predicted(x, after))))
        for n, x in enumerate(measured, 1)
    ]  # fmt: skip
    return "\n".join(lines) + "\n\n" + table(rows, heads)


def calibration_json(measured: Sequence[Measured], before: Stack, after: Stack) -> dict[str, Any]:
    """The same as plain data: seconds, relative errors."""
    return {
        "stack": after.name,
        "from": before.name,
        "errors": [
            {"experts": bool(kind), "rows": rows, "median": median, "worst": worst}
            for kind, rows, median, worst in _errors(after.fit)
        ],
        "fitted": {name: getattr(after, name) for name in after.fit.fitted},
        "runs": [
            {"measured_s": x.seconds, "before_s": predicted(x, before),
             "after_s": predicted(x, after)}
            for x in measured
        ],
    }  # fmt: skip


_SHOWN = 10  # alternatives


def found_text(found: Found, margin: float) -> str:
    """The answer of a search: what to run, the estimate, the alternatives, and all the others."""
    first, fastest = found.best[0], min(e.step for e in found.best)
    heads = ("layout", "microbatch", "recomputed", "step", "above the fastest", "memory", "MFU")
    rows = [
        (_layout(e.run, e.dp).removeprefix("layout: "), str(e.run.micro_batch),
         ", ".join(e.run.recompute) or "nothing", format_time(e.step, "s"),
         _percent(e.step / fastest - 1), format_bytes(e.memory[e.fullest].total), _percent(e.mfu))
        for e in found.best[:_SHOWN]
    ]  # fmt: skip
    left = len(found.best) - len(rows)
    counts = "; ".join(f"{n:,} {fate}" for fate, n in found.counts.items())
    return "\n\n".join((
        f"run {_layout(first.run, first.dp).removeprefix('layout: ')}: {estimate_words(first.run)}",
        as_text(first),
        f"within {_percent(margin)} of the fastest, simplest first\n" + table(rows, heads)
        + (f"\nand {left} more (--json)" if left else ""),
        f"of {sum(found.counts.values()):,} configurations, {counts}",
    ))  # fmt: skip


def estimate_words(run: Run) -> str:
    """The options of `hocket estimate` that describe the layout of a run."""
    words = [f"--{k} {n}" for k in ("tp", "cp", "ep", "pp") if (n := getattr(run, k)) > 1]
    words += [f"--schedule {run.schedule}"] if run.pp > 1 else []
    words += [f"-v {run.v}"] if run.v > 1 else []
    words += [f"--micro-batch {run.micro_batch}"]
    words += [f"--recompute {','.join(run.recompute)}"] if run.recompute else []
    words += [f"--lighter {run.lighter[0]},{run.lighter[1]}"] if any(run.lighter) else []
    return " ".join(words)


def found_json(found: Found) -> dict[str, Any]:
    """The same as plain data: the configurations within the margin, simplest first; the counts."""
    return {
        "best": [as_json(e) | {"options": estimate_words(e.run)} for e in found.best],
        "counts": dict(found.counts),
    }
