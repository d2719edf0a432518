"""Fitting a stack's few numbers to measured runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hocket.cluster.estimate import step_seconds
from hocket.cluster.hardware import Cluster
from hocket.cluster.model import Model
from hocket.cluster.run import Run
from hocket.cluster.stack import Fit, Stack
from hocket.cluster.stages import quantities_of_stage
from hocket.errors import UsageError


@dataclass(frozen=True)
class Measured:
    """One measurement: a model on a cluster, laid out as one of `runs`, and the seconds it took.

    runs: more than one where the source does not say which; the fastest is taken then. what: a key
    of QUANTITIES. weight: how much it counts.
    """

    model: Model
    cluster: Cluster
    runs: tuple[Run, ...]
    seconds: float
    what: str = "step"
    weight: float = 1.0


class Number(NamedTuple):
    """A number that can be fitted: where it starts at the least, and how far it may wander.

    width: standard deviation of its logarithm before anything is measured; most: its upper bound.
    """

    start: float
    width: float
    most: float


NUMBERS = {
    "gemm": Number(0.3, 0.3, 0.98),
    "half": Number(20.0, 0.3, 1000.0),
    "traffic": Number(0.3, 0.3, 20.0),
    "layer_ms": Number(1.0, 0.15, 50.0),
    "attention": Number(0.1, 0.4, 0.9),
    "weight": Number(0.5, 0.2, 1.3),
    "grouped": Number(0.3, 0.5, 20.0),
    "step": Number(0.01, 0.7, 0.5),
    "message_ms": Number(0.05, 0.7, 5.0),
    "latency": Number(0.1, 0.3, 50.0),
    "network": Number(0.02, 0.7, 1.0),
    "fixed_ms": Number(1.0, 0.7, 500.0),
}
STEP_NUMBERS = ("gemm", "half", "traffic", "layer_ms")

_SPREAD = 0.2  # of a measurement around its prediction, before the tails
_STEP = 1.02  # by which a number is moved to see what it does
_TAIL = 1.0  # spreads beyond which a measurement counts less (Huber)


def _of_stage(name: str) -> Callable[[Model, Cluster, Stack, Run], float]:
    return lambda *case: quantities_of_stage(*case)[name]


QUANTITIES: dict[str, Callable[[Model, Cluster, Stack, Run], float]] = {
    "step": step_seconds, **{name: _of_stage(name) for name in ("F", "I", "W", "B")},
}  # fmt: skip


def _fastest(measured: Measured, stack: Stack) -> Run:
    if len(measured.runs) == 1:
        return measured.runs[0]
    quantity = QUANTITIES[measured.what]
    return min(
        measured.runs, key=lambda run: quantity(measured.model, measured.cluster, stack, run)
    )


def predicted(measured: Measured, stack: Stack) -> float:
    """Seconds that a stack predicts for a measurement: those of its fastest run."""
    quantity = QUANTITIES[measured.what]
    return min(quantity(measured.model, measured.cluster, stack, run) for run in measured.runs)


def errors(measured: Sequence[Measured], stack: Stack) -> list[float]:
    """The relative error of each prediction: 0.1 where it is a tenth too long."""
    return [predicted(x, stack) / x.seconds - 1 for x in measured]


def _objective(
    measured: Sequence[Measured], stack: Stack, prior: Stack, names: Sequence[str], loose: float
) -> np.ndarray:
    """Residuals of the measurements and of the prior, in standard deviations."""
    data = [
        math.sqrt(x.weight) * math.log(predicted(x, stack) / x.seconds) / _SPREAD for x in measured
    ]
    tails = [d if abs(d) <= _TAIL else math.copysign(math.sqrt(_TAIL * (2 * abs(d) - _TAIL)), d)
             for d in data]  # fmt: skip
    drift = []
    for n in names:
        center = max(getattr(prior, n), NUMBERS[n].start)
        drift.append(math.log(getattr(stack, n) / center) / (loose * NUMBERS[n].width))
    return np.array(tails + drift)


def fit(measured: Sequence[Measured], stack: Stack, numbers: Sequence[str] = STEP_NUMBERS, *,
        start: Stack | None = None, rounds: int = 10, loose: float = 1.0) -> Stack:  # fmt: skip
    """The stack with some of its numbers fitted and kept near its own; `start`: where to begin.

    loose: how many times as far as usual they may wander, for many runs.

    Least squares of the logarithms of predicted over measured, with a tail that counts outliers
    less, by Levenberg and Marquardt's method.
    """
    begin = start or stack
    best = replace(begin, **{n: max(getattr(begin, n), NUMBERS[n].start) for n in numbers})
    damping = 1e-2
    for _ in range(rounds):
        settled = [replace(x, runs=(_fastest(x, best),)) for x in measured]
        residuals = _objective(settled, best, stack, numbers, loose)
        columns = []
        for n in numbers:
            moved = replace(best, **{n: getattr(best, n) * _STEP})
            columns.append(
                (_objective(settled, moved, stack, numbers, loose) - residuals) / math.log(_STEP)
            )

        def objective(tried: Stack, seen: list[Measured] = settled) -> np.ndarray:
            return _objective(seen, tried, stack, numbers, loose)

        slope = np.array(columns).T
        best, gain, damping = _descent(slope, residuals, damping, best, numbers, objective)
        if gain < 1e-3:
            break
    return best


def _descent(
    slope: np.ndarray, residuals: np.ndarray, damping: float, best: Stack, numbers: Sequence[str],
    objective: Callable[[Stack], np.ndarray],
) -> tuple[Stack, float, float]:  # fmt: skip
    """The stack after one damped step that gains something, how much, and the next damping."""
    normal, gradient, before = slope.T @ slope, slope.T @ residuals, residuals @ residuals
    while damping < 1e4:
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
        tried = replace(best, **{
            n: min(NUMBERS[n].most, getattr(best, n) * math.exp(d))
            for n, d in zip(numbers, np.clip(step, -0.7, 0.7).tolist(), strict=True)
        })  # fmt: skip
        after = objective(tried)
        if after @ after < before:
            return tried, 1 - (after @ after) / before, damping / 4
        damping *= 8
    return best, 0.0, damping


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which a share of the values lies, between neighbours in proportion."""
    return float(np.quantile(np.array(values), share)) if len(values) else math.nan


def _spread(off: Sequence[float]) -> tuple[float, float, float]:
    """Median, 90th percentile and largest of some errors; zeros of none."""
    return (quantile(off, 0.5), quantile(off, 0.9), max(off)) if off else (0.0, 0.0, 0.0)


def calibrate(
    measured: Sequence[Measured], stack: Stack, *, name: str = "",
    numbers: Sequence[str] = STEP_NUMBERS, sources: Sequence[str] = (), folds: int | None = None,
    loose: float = 1.0, own: bool = False,
) -> Stack:  # fmt: skip
    """The stack fitted to measured runs, with its error on each run that its fit had not seen.

    About five runs are enough; with fewer than three, only the speed of products is fitted. own:
    the runs are those of the cluster that is to be predicted.

    Raises: UsageError where there is no run, or a step takes no time.
    """
    if not measured:
        raise UsageError("there is no measured run; give at least one, five are enough")
    for x in measured:
        if not x.seconds > 0:
            raise UsageError(
                f"{x.model.name}: a step of {x.seconds} s was measured; it must be above 0"
            )
    numbers = tuple(numbers) if len(measured) > 2 else ("gemm",)
    best = fit(measured, stack, numbers, loose=loose)
    apart = (
        left_out(measured, stack, numbers, folds=folds, loose=loose)
        if len(measured) > 1
        else errors(measured, best)
    )
    routed = [x.model.moe is not None for x in measured]
    off, experts = (
        [abs(e) for e, r in zip(apart, routed, strict=True) if r is kind] for kind in (False, True)
    )
    record = Fit(
        len(off), *_spread(off), len(experts), *_spread(experts)[::2], own=own,
        fitted=tuple(numbers), sources=tuple(sources), rows_memory=stack.fit.rows_memory,
        median_memory=stack.fit.median_memory, worst_memory=stack.fit.worst_memory,
    )  # fmt: skip
    return replace(best, name=name or stack.name, fit=record, calibrate_first=False)


def left_out(measured: Sequence[Measured], stack: Stack, numbers: Sequence[str] = STEP_NUMBERS, *,
             folds: int | None = None, loose: float = 1.0) -> list[float]:  # fmt: skip
    """The relative error of each measurement, predicted by a fit to all but its own fold."""
    n, whole = len(measured), fit(measured, stack, numbers, loose=loose)
    folds = min(n, folds or n)
    result = [0.0] * n
    for fold in range(folds):
        mine = range(fold, n, folds)
        seen = [x for i, x in enumerate(measured) if i % folds != fold]
        without = fit(seen, stack, numbers, start=whole, rounds=3, loose=loose)
        for i, e in zip(mine, errors([measured[j] for j in mine], without), strict=True):
            result[i] = e
    return result
