"""Several orders of one run next to each other.

Whose turn it is, and their times as data and text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hocket.measured.readings import spread_of
from hocket.tables import table

ALIKE = 1e-3  # relative: below this, losses differ as sums of float32 in another order do


class Arm(NamedTuple):
    """One order of a run: seconds of its counted steps, losses of all, predicted ms or why not."""

    word: str
    seconds: Sequence[float]
    losses: Sequence[float]
    predicted: float | None
    why: str = ""


def turns(step: int, n: int) -> list[int]:
    """Which of n orders runs when in a step: each begins as often as any other."""
    return [(step + i) % n for i in range(n)]


def beside(arms: Sequence[Arm]) -> dict[str, Any]:
    """The times of the orders in ms, and each step's ratio to that of the first order.

    losses_differ: the largest difference of any loss from the first order's, relative to it.
    """
    return {
        "unit": "ms",
        "steps": len(arms[0].seconds),
        "losses_differ": max(_difference(arm.losses, arms[0].losses) for arm in arms),
        "orders": [_row(arm, arms[0]) for arm in arms],
    }


def _difference(losses: Sequence[float], first: Sequence[float]) -> float:
    pairs = zip(losses, first, strict=True)
    return max(abs(a - b) / abs(b) if b else abs(a) for a, b in pairs)


def _row(arm: Arm, first: Arm) -> dict[str, Any]:
    ms = [1e3 * s for s in arm.seconds]
    ratios = [a / b for a, b in zip(arm.seconds, first.seconds, strict=True)]
    took = _spread(ms)
    return {
        "schedule": arm.word,
        "losses": list(arm.losses),
        "times": ms,
        **took,
        "predicted": arm.predicted,
        "difference": took["median"] / arm.predicted - 1 if arm.predicted else None,
        "ratio": _spread(ratios),
        "why": arm.why,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    found = spread_of(values)
    return {"median": found.median, "low": found.low, "high": found.high}


def beside_text(data: Mapping[str, Any]) -> str:
    """The orders as a table, and below it what to know of it."""
    first = data["orders"][0]["schedule"]
    rows = [
        [
            row["schedule"],
            f"{row['median']:.1f}",
            _middle(row, 1),
            None if row["predicted"] is None else f"{row['predicted']:.1f}",
            None if row["difference"] is None else f"{row['difference']:+.1%}",
            f"{row['ratio']['median']:.3f}",
            _middle(row["ratio"], 3),
        ]
        for row in data["orders"]
    ]
    heads = [
        "schedule", "ms", "middle half", "predicted", "difference", f"to {first}", "middle half",
    ]  # fmt: skip
    return "\n\n".join([
        f"in turn, {data['steps']} steps of each, in ms; to {first}: the ratio step by step",
        table(rows, heads),
        "\n".join([_losses(data["losses_differ"]), *_unpredicted(data)]),
    ])  # fmt: skip


def _middle(spread: Mapping[str, float], digits: int) -> str:
    return f"{spread['low']:.{digits}f} to {spread['high']:.{digits}f}"


def _losses(differ: float) -> str:
    if differ <= ALIKE:
        return f"the losses are the same (largest relative difference {differ:.1g})"
    return (
        f"the losses differ, by up to {differ:.1g} of them: the orders do not train the same; "
        "build must make the same weights for any number of stages, and batch the same for a step"
    )


def _unpredicted(data: Mapping[str, Any]) -> list[str]:
    return [
        f"{row['schedule']}: not predicted: {row['why']}" for row in data["orders"] if row["why"]
    ]
