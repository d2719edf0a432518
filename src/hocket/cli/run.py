"""`hocket run`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hocket.cli.arguments import Verb, option, part
from hocket.cli.output import check_writable
from hocket.cli.selection import Selection, beside
from hocket.cli.training import Training, everywhere
from hocket.errors import UsageError
from hocket.train.settings import SLEEP, Order, Saving, Settings


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `hocket run` takes."""

    selection: Selection = part(Selection)
    training: Training = part(Training)
    beside: tuple[str, ...] = option(
        "--beside SCHEDULE...", "train with this one too, step by step in turn, and compare the "
        "times (a name takes the same p and m); again for more", heading="what is shown",
    )  # fmt: skip
    trace: str | None = option(
        "--trace FILE", "write predicted and measured as one trace; .jsonl: each of the last steps"
    )
    costs: str | None = option("--costs FILE", "predict from these costs (default: from this run)")
    save: str | None = option(
        "--save DIR", "write checkpoints there; the last two are kept", heading="checkpoints"
    )
    every: int = option("--every N", "after every N steps, and the last (default: 10)", default=10)
    resume: bool = option(
        "--resume", "go on from the newest that is not damaged, also with another schedule or "
        "number of ranks; --steps counts the steps before, too", default=False,
    )  # fmt: skip
    json: bool = False


def settings_of(options: Options) -> Settings:
    """What is trained. Raises: HocketError."""
    selection, first = options.selection, options.selection.build()
    others = [Order(word, beside(word, first, selection.sizes.v)) for word in options.beside]
    check_writable(options.trace)
    orders = [Order(selection.schedule, first), *others]
    if options.resume and options.save is None:
        raise UsageError("--resume needs --save DIR, the folder of the checkpoints")
    if options.save is not None and others:
        raise UsageError("--save is for one order; leave --beside out")
    saving = Saving(options.save, options.every, options.resume) if options.save else None
    return options.training.settings(
        orders, 20, trace=options.trace, costs=options.costs, saving=saving
    )


def run(options: Options, **more: Any) -> int:
    """Trains, and shows predicted beside measured; more: of the object of --json."""
    from hocket.train.work import costs_of_file, train

    settings = settings_of(options)
    if settings.costs:
        from hocket.simulator import simulate

        for _, schedule in settings.orders:  # its faults now, not after a run
            costs, _ = costs_of_file(settings, schedule)
            if costs is not None:
                simulate(schedule, costs)

    def show(result: dict[str, Any]) -> None:
        print(json.dumps(result | more) if options.json else _text(result))

    return everywhere(train, settings, show, quiet=options.json)


def _text(result: dict[str, Any]) -> str:
    from hocket.train.ab_compare import beside_text
    from hocket.train.report import comparison_text

    source = result["costs"] or "the mean times of its own actions"
    cut = f" in {result['slices']} slices" if result["slices"] > 1 else ""
    cut += f", the first of {result['replicas']} replicas" if result["replicas"] > 1 else ""
    text = (
        f"\n{result['schedule']}  p={result['p']} m={result['m']}{cut}; the median one of the last "
        f"{result['steps_compared']} steps, predicted from {source}\n{comparison_text(result)}"
    )
    if result["beside"] is not None:
        text += f"\n\n{beside_text(result['beside'])}"
    if result["shared_cores"] is not None:
        text += f"\n\n{sharing_text(result)}"
    if result["queues"] > result["p"] and result["dispatch"] != "queues":
        text += "\n\nThe queues of a rank ran one after the other; "
        text += "--dispatch queues is side by side."
    if result["checkpoint"]:
        text += f"\n\ncheckpoint: {result['checkpoint']} (--resume goes on from it)"
    if result["trace"]:
        trace = result["trace"]
        use = "predicted and measured; open it at ui.perfetto.dev"
        if trace.endswith(".jsonl"):
            use = f"the last steps; run `hocket diagnose {trace}`"
        text += f"\n\ntrace: {trace} ({use})"
    return text


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


VERB = Verb("run", Options, run)
