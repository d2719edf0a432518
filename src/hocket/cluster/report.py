"""One estimate in words, verdict first; and the costs of its stages as a commented file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hocket.cluster import reasons
from hocket.cluster.calibrate import Measured, errors, predicted, quantile
from hocket.cluster.estimate import Estimate, needs_calibration
from hocket.cluster.hardware import Cluster
from hocket.cluster.model import Model
from hocket.cluster.operations import CONVENTIONS
from hocket.cluster.reasons import PARTS, Help, estimate_words, layers_text, percent, reason
from hocket.cluster.run import Run
from hocket.cluster.search import Fate, Found, Outcome
from hocket.cluster.stack import Fit, Stack
from hocket.cluster.stages import costs_of
from hocket.costs import costs_toml
from hocket.tables import format_bytes, format_time, table

_REMEDIES = 3  # shown
_FIVE = ("compute", "messages", "gradients", "bubble", "imbalance")


def limited_by(found: Estimate) -> str:
    """What limits a configuration, one sentence: its memory, else what takes most of the step.

    Computation is named only where it takes four fifths of the step.
    """
    memory = found.memory[found.fullest].total
    if not found.fits:
        over = format_bytes(memory - found.cluster.memory)
        return f"memory: rank {found.fullest} needs {over} more than it has"
    parts = asdict(found.breakdown)
    useful = parts["compute"] >= 0.8 * found.step
    name = "compute" if useful else max(parts.keys() - {"compute"}, key=parts.__getitem__)
    return f"{PARTS[name]}, {percent(parts[name] / found.step)} of the step"


def help_text(found: Estimate, remedies: Sequence[Help]) -> str:
    """What would help most, one sentence."""
    head = "would help most" if found.fits else "would fit with"
    if not remedies:
        return f"{head}: no single change of layout, batch or network"
    return f"{head}: " + "; ".join(
        f"{x.text} ({100 * x.gain:+.1f} % tokens/s)" for x in remedies[:_REMEDIES]
    )


def error_text(found: Estimate) -> str:
    """How far off the stack is on measured runs of such models, one sentence."""
    error = found.error
    kind = "of models with experts " if found.model.moe else ""
    if error.rows < 2:  # one run is never left out of its own fit
        few = "one run" if error.rows else "no run"
        return f"{found.stack.name} was fitted on {few} {kind}".rstrip() + ": its error is unknown"
    known = f"median {percent(error.median)} (±), worst {percent(error.worst)}"
    return f"error on the {error.rows} runs {kind}that {found.stack.name} was fitted on: {known}"


def memory_error_text(found: Estimate) -> str:
    """How far off the memory is on measured runs of the stack, one sentence."""
    fit = found.stack.fit
    if not fit.rows_memory:
        return f"no run of {found.stack.name} prints its memory: that error is unknown"
    known = f"median {percent(fit.median_memory)}, worst {percent(fit.worst_memory)}"
    return f"error of the memory on {fit.rows_memory} runs of {found.stack.name}: {known}"


def _bar(found: Estimate) -> float | None:
    """The stack's median error of the step time, where it is known."""
    return found.error.median if found.error.rows > 1 else None


def _pm(share: float | None) -> str:
    return "" if share is None else f" ± {percent(share)}"


def as_text(found: Estimate, remedies: Sequence[Help] | None = None) -> str:
    """The estimate for a reader, verdict first; times in seconds, memory in bytes of 10^9."""
    remedies = reasons.helps(found) if remedies is None else remedies
    return "\n\n".join(
        ("\n".join(_verdict(found, remedies)), _time(found), _memory(found),
         "\n".join(_rest(found)))
    )  # fmt: skip


def as_json(found: Estimate) -> dict[str, Any]:
    """The estimate as plain data: seconds, bytes, shares from 0 to 1."""
    bar, fit = _bar(found), found.stack.fit
    sizes = {"step_s": found.step, "tokens_per_s_per_gpu": found.tokens_per_second,
             "mfu": found.mfu}  # fmt: skip
    return found.as_dict() | {
        "limited_by": limited_by(found),
        "plus_minus": {
            **{name: None if bar is None else bar * x for name, x in sizes.items()},
            "memory_bytes": fit.median_memory * found.memory[found.fullest].total
            if fit.rows_memory
            else None,
        },
        "ranks_memory_bytes": [asdict(x) for x in found.memory],
    }


def helps_json(remedies: Sequence[Help]) -> list[dict[str, Any]]:
    """What would help most as plain data."""
    return [{"change": x.text, "tokens_per_s_gain": x.gain} for x in remedies]


def _verdict(found: Estimate, remedies: Sequence[Help]) -> Iterator[str]:
    if found.calibrate_first:
        yield "calibrate first: too few measurements support these numbers (hocket calibrate)"
    gpus = f"{found.cluster.gpus:,} {found.cluster.gpu.name}"
    rate = f"{found.tokens_per_second:,.0f} tokens/s per GPU"
    yield (
        f"{found.model.name} on {gpus}: {format_time(found.step, 's')} per step{_pm(_bar(found))}, "
        f"{rate}, MFU {percent(found.mfu)}"
    )
    need, limit = found.memory[found.fullest].total, found.cluster.memory
    fit = found.stack.fit
    verb = "fits" if found.fits else "does not fit"
    yield (
        f"it {verb}: rank {found.fullest} is the fullest, with {format_bytes(need)}"
        f"{_pm(fit.median_memory if fit.rows_memory else None)} of {format_bytes(limit)}"
    )
    yield f"limited by {limited_by(found)}"
    shares = {name: getattr(found.breakdown, name) / found.step for name in _FIVE}
    yield "; ".join(f"{PARTS[name]} {percent(x)}" for name, x in shares.items())
    yield help_text(found, remedies)
    yield error_text(found)
    yield memory_error_text(found)


def _time(found: Estimate) -> str:
    bar = _bar(found)
    seconds = {PARTS[k]: x for k, x in asdict(found.breakdown).items()} | {"step": found.step}
    rows = [
        (
            name,
            format_time(x, "s"),
            "" if bar is None else format_time(bar * x, "s"),
            percent(x / found.step),
        )
        for name, x in seconds.items()
    ]
    return table(rows, ("time, average rank", "per step", "±", "share"))


def _memory(found: Estimate) -> str:
    parts = asdict(found.memory[found.fullest])
    total = found.memory[found.fullest].total
    sizes = {**parts, "total": total, "limit": found.cluster.memory}
    rows = [
        (name, format_bytes(size), percent(size / found.cluster.memory))
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
            f"error{kind}: median {percent(median)}, worst {percent(worst)}; {before.name} as "
            f"it was: median {percent(quantile(old, 0.5))}, worst {percent(max(old))}"
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


def _recomputed(run: Run) -> str:
    some = run.recompute_layers if run.recompute else None
    where = "" if some is None else f" in {layers_text(some)} layers"
    return (", ".join(run.recompute) or "nothing") + where


def _short(run: Run, cluster: Cluster) -> tuple[str, str, str]:
    """A configuration in a table: layout, microbatch, what is recomputed."""
    lighter = f"; ends lighter by {run.lighter[0]}, {run.lighter[1]}" if any(run.lighter) else ""
    layout = _layout(run, run.dp(cluster)).removeprefix("layout: ") + lighter
    return layout, str(run.micro_batch), _recomputed(run)


def found_text(found: Found, margin: float, remedies: Sequence[Help]) -> str:
    """The answer of a search: what to run, the estimate, the alternatives, and all the others."""
    first, cluster, fastest = found.best[0], found.cluster, min(e.step for e in found.best)
    bar = _bar(first)
    heads = ("layout", "microbatch", "recomputed", f"step{_pm(bar)}", "above the fastest",
             "memory", "MFU")  # fmt: skip
    rows = [
        (*_short(e.run, cluster), format_time(e.step, "s"), percent(e.step / fastest - 1),
         format_bytes(e.memory[e.fullest].total), percent(e.mfu))
        for e in _families(found.best)[:_SHOWN]
    ]  # fmt: skip
    left = len(found.best) - len(rows)
    counts = "; ".join(f"{n:,} {fate}" for fate, n in found.counts.items())
    layout = _short(first.run, cluster)[0]
    order = f"; the order is {first.planned}" if first.planned else ""
    lines = [f"within {percent(margin)} of the fastest, simplest first\n" + table(rows, heads)]
    if left:
        lines.append(f"and {left} more, mostly with other -v, microbatches or ends (--json)")
    if len(found.best) > 1 and bar is not None and bar > margin:
        lines.append("these differ by less than the stack's error: measure two or three of them")
    return "\n\n".join((
        f"run {layout}{order}: {estimate_words(first.run)}",
        as_text(first, remedies),
        "\n".join(lines),
        "\n".join((f"of {sum(found.counts.values()):,} configurations, {counts}",
                   *_barely_too_large(found, first))),
    ))  # fmt: skip


def _families(best: Sequence[Estimate]) -> list[Estimate]:
    """The simplest of each layout and schedule: other stages per rank, microbatches are alike."""
    firsts: dict[tuple[object, ...], Estimate] = {}
    for e in best:
        firsts.setdefault((e.run.tp, e.run.cp, e.run.ep, e.run.pp, e.run.schedule), e)
    return list(firsts.values())


def _barely_too_large(found: Found, first: Estimate) -> Iterator[str]:
    """The fastest configuration that does not fit, where it is faster than the answer."""
    short = [x for x in found.outcomes if x.fate is Fate.MEMORY and (x.seconds or 0) < first.step]
    if short:
        one = min(short, key=lambda x: x.seconds or 0.0)
        layout, micro, recomputed = _short(one.run, found.cluster)
        yield (
            f"with more memory: {layout}, microbatch {micro}, recomputing {recomputed} takes "
            f"{format_time(one.seconds, 's')} and {reason(one, found)}"
        )


def why_text(asked: Mapping[str, Any], outcomes: Sequence[Outcome], found: Found) -> str:
    """Why the configurations of a question are not the answer: the best of them first."""
    counts = Counter(x.fate for x in outcomes)
    words = ", ".join(f"{k.replace('_', '-')}={'|'.join(map(_plain, x))}" for k, x in asked.items())
    rows = [
        (*_short(x.run, found.cluster), format_time(x.seconds, "s") if x.seconds else "",
         format_bytes(x.n_bytes) if x.n_bytes else "", reason(x, found))
        for x in outcomes[:_SHOWN]
    ]  # fmt: skip
    left = len(outcomes) - len(rows)
    some = counts[Fate.KEPT] + counts[Fate.SLOWER]
    broken, large = counts[Fate.RULE], counts[Fate.STATES] + counts[Fate.MEMORY]
    return (
        f"why not {words}: of {len(outcomes):,} such configurations, {broken:,} break a rule, "
        f"{large:,} need more memory, {some:,} fit and were simulated"
        + (f", {n:,} are slower by a bound" if (n := counts[Fate.BOUND]) else "")
        + "\n"
        + table(rows, ("layout", "microbatch", "recomputed", "step", "memory", "why"))
        + (f"\nand {left:,} more (--json)" if left else "")
    )


def _plain(value: Any) -> str:
    return "+".join(value) or "none" if isinstance(value, tuple) else str(value)


def outcomes_json(outcomes: Iterable[Outcome], found: Found) -> list[dict[str, Any]]:
    """What became of configurations as plain data; a bound's seconds are the least possible."""
    return [
        {
            "options": estimate_words(x.run),
            "dp": x.run.dp(found.cluster),
            "fate": x.fate.name.lower(),
            "reason": reason(x, found),
            "step_s": x.seconds,
            "memory_bytes": x.n_bytes,
        }
        for x in outcomes
    ]


def found_json(found: Found) -> dict[str, Any]:
    """The same as plain data: the configurations within the margin, simplest first, and all."""
    return {
        "best": [as_json(e) | {"options": estimate_words(e.run)} for e in found.best],
        "counts": dict(found.counts),
        "configurations": outcomes_json(found.outcomes, found),
    }
