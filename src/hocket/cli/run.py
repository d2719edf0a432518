"""`hocket run`: trains a real model with exactly a schedule, and compares with the prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hocket.cli.arguments import Verb, option, part
from hocket.cli.output import check_writable, put_json
from hocket.cli.selection import Selection, beside
from hocket.cli.training import Training, checked, everywhere
from hocket.train.settings import SLEEP, Order, Settings


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What is compared, and what is written."""

    beside: tuple[str, ...] = option(
        "--beside SCHEDULE...", "train with this one too, step by step in turn, and compare the "
        "times (a name takes the same p and m); again for more",
    )  # fmt: skip
    trace: str | None = option("--trace FILE", "write predicted and measured as one trace")
    costs: str | None = option("--costs FILE", "predict from these costs (default: from this run)")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Those of `hocket run`."""

    selection: Selection = part(Selection)
    training: Training = part(Training)
    shown: Shown = part(Shown, under="what is shown")
    json: bool = False


def settings_of(options: Options) -> Settings:
    """What is trained. Raises: HocketError."""
    selection, shown = options.selection, options.shown
    first = selection.build()
    others = [Order(w, beside(w, first, selection.sizes.v)) for w in shown.beside]
    check_writable(shown.trace)
    orders = checked(Order(selection.schedule, first), *others)
    return options.training.settings(orders, 20, trace=shown.trace, costs=shown.costs)


def run(options: Options, show: Callable[[dict[str, Any]], None] | None = None) -> int:
    """Trains, and shows predicted beside measured: as text, as JSON, or in another way."""
    from hocket.train.work import costs_of_file, train

    settings = settings_of(options)
    if settings.costs:
        from hocket.simulator import simulate

        for _, schedule in settings.orders:  # its faults now, not after a run
            costs = costs_of_file(settings, schedule)
            if costs is not None:
                simulate(schedule, costs)
    show = show or (put_json if options.json else _print)
    return everywhere(train, settings, show, quiet=options.json)


def _print(result: dict[str, Any]) -> None:
    from hocket.train.ab_compare import beside_text
    from hocket.train.report import comparison_text

    source = result["costs"] or "the mean times of its own actions"
    cut = f" in {result['slices']} slices" if result["slices"] > 1 else ""
    cut += f", the first of {result['replicas']} replicas" if result["replicas"] > 1 else ""
    print(
        f"\n{result['schedule']}  p={result['p']} m={result['m']}{cut}; the median one of the last "
        f"{result['steps_compared']} steps, predicted from {source}"
    )
    print(comparison_text(result))
    if result["beside"] is not None:
        print(f"\n{beside_text(result['beside'])}")
    if result["shared_cores"] is not None:
        print(f"\n{sharing_text(result)}")
    if result["queues"] > result["p"] and result["dispatch"] != "queues":
        print("\nThe queues of a rank ran one after the other; --dispatch queues is side by side.")
    if result["trace"]:
        print(f"\ntrace: {result['trace']} (predicted and measured; open it at ui.perfetto.dev)")


def sharing_text(result: dict[str, Any]) -> str:
    """Whether the prediction counts on the cores that the ranks share."""
    shared, counted = result["shared_cores"], result["predicted_cores"]
    cores = "core" if shared == 1 else "cores"
    head = f"{result['p'] * result['replicas']} ranks share {shared} {cores} here"
    if counted is None:
        told = ": actions take longer while others run, and the prediction does not know that"
    elif counted == shared:
        told = ", and the prediction counts on that"
    else:
        told = f", but the prediction counts on the {counted} that {result['costs']} names"
    return f"{head}{told}. For the schedule alone: --model {SLEEP}"


VERB = Verb("run", "train a real model with exactly this schedule", Options, run)
