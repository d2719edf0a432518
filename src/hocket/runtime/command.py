"""`hocket run` and `hocket profile`: start the ranks, show the steps, compare, write files.

Imports torch only inside the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from hocket import files
from hocket.errors import RunError
from hocket.runtime.launch import cores, join_group, launch
from hocket.runtime.options import SLEEP, Settings, settings_from
from hocket.runtime.report import comparison, comparison_text, one_by_one

Tell = Callable[[Any], None]


def run_command(args: argparse.Namespace) -> int:
    """Trains as `hocket run` was told; returns the exit status."""
    settings = settings_from(args)
    if settings.costs:
        from hocket.costs import load_costs
        from hocket.simulator import simulate

        simulate(settings.schedule, load_costs(settings.costs))  # its faults now, not after a run
    return _everywhere(train, settings, args, _print_run)


def profile_command(args: argparse.Namespace) -> int:
    """Measures as `hocket profile` was told, writes the costs; returns the exit status."""
    settings = settings_from(args)
    args.output = args.output or "costs.toml"

    def show(result: dict[str, Any], as_json: bool) -> None:
        files.write(args.output, result["toml"])
        if as_json:
            print(json.dumps(result | {"output": args.output}))
        else:
            print(f"{result['text']}\n\nwritten: {args.output}; use it with --costs {args.output}")

    return _everywhere(measure, settings, args, show)


def _everywhere(
    work: Callable[[Tell, Settings], dict[str, Any] | None],
    settings: Settings,
    args: argparse.Namespace,
    show: Callable[[dict[str, Any], bool], None],
) -> int:
    """Runs `work` on every rank, here or under torchrun, and shows what rank 0 returns."""
    progress = Progress(settings.steps, quiet=args.json)
    try:
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            result = _as_a_rank(work, settings, progress)
        else:
            launched = launch(
                work, settings.nproc, (settings,), settings.timeout,
                listen=progress.step, device=settings.device,
            )  # fmt: skip
            result = launched[0]
    except RunError as error:
        progress.end()
        print(f"hocket: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        progress.end()
        print("hocket: stopped; all ranks have ended", file=sys.stderr)
        return 130
    progress.end()
    if result is not None:
        show(result, args.json)
    return 0


def _as_a_rank(
    work: Callable[[Tell, Settings], dict[str, Any] | None], settings: Settings, progress: Progress
) -> dict[str, Any] | None:
    """Runs `work` in this process, one of those that torchrun or the like has started."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join_group(rank, world, "env://", settings.timeout, settings.device)
    return work(progress.step, settings)


class Progress:
    """Shows each step: a line each, or on a terminal one line that changes in place."""

    def __init__(self, steps: int, quiet: bool) -> None:
        self.steps, self.quiet = steps, quiet
        self.in_place = sys.stdout.isatty()
        self.open = False

    def step(self, news: tuple[int, float, float]) -> None:
        """Shows (step, loss, seconds)."""
        if self.quiet:
            return
        index, loss, seconds = news
        width = len(str(self.steps))
        text = f"step {index + 1:{width}}/{self.steps}  loss {loss:.4f}  {seconds:.3f} s"
        if self.in_place:
            print(f"\r{text}  ", end="", flush=True)
            self.open = True
        else:
            print(text, flush=True)

    def end(self) -> None:
        """Leaves the line that changes in place."""
        if self.open:
            print()
            self.open = False


# --- on a rank -------------------------------------------------------------------------------


def train(tell: Tell, settings: Settings) -> dict[str, Any] | None:
    """All of a run on one rank; rank 0 returns what is to be shown."""
    from hocket.costs import load_costs
    from hocket.runtime.profile import own_costs, typical
    from hocket.runtime.training import Trainer
    from hocket.simulator import simulate

    trainer = Trainer(settings)
    run = trainer.run(_told_by_first(tell, trainer.rank))
    if trainer.rank != 0:
        return None
    seen = typical(run.timelines)
    costs = load_costs(settings.costs) if settings.costs else own_costs(run.timelines, seen)
    predicted = simulate(one_by_one(settings.schedule), costs)
    if settings.trace:
        from hocket.trace import write_trace

        write_trace({"predicted": predicted, "measured": seen}, settings.trace)
    return {
        "schedule": settings.schedule.name,
        "p": settings.schedule.p,
        "m": settings.sequences,
        "slices": settings.schedule.placement.slices,
        "replicas": settings.replicas,
        "queues": len(settings.schedule.queues),
        "dispatch": trainer.pipeline.dispatch,
        "steps": settings.steps,
        "batch": settings.batch,
        "model": settings.model,
        "device": settings.device,
        "cores": cores(),
        "losses": run.losses,
        "seconds": run.seconds,
        "costs": settings.costs,
        "steps_compared": len(run.timelines),
        **comparison(predicted, seen),
        "trace": settings.trace,
    }


def _told_by_first(tell: Tell, rank: int) -> Callable[[int, float, float], None]:
    def shown(index: int, loss: float, seconds: float) -> None:
        if rank == 0:
            tell((index, loss, seconds))

    return shown


def _print_run(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    source = result["costs"] or "the mean times of its own actions"
    cut = f" in {result['slices']} slices" if result["slices"] > 1 else ""
    cut += f", the first of {result['replicas']} replicas" if result["replicas"] > 1 else ""
    print(
        f"\n{result['schedule']}  p={result['p']} m={result['m']}{cut}; the median one of the last "
        f"{result['steps_compared']} steps, predicted from {source}"
    )
    print(comparison_text(result))
    ranks = result["p"] * result["replicas"]
    if result["model"] != SLEEP and result["device"] == "cpu" and result["cores"] < ranks:
        print(
            f"\n{ranks} ranks share {result['cores']} cores here: actions take longer while "
            f"others run. For the schedule alone: --model {SLEEP}"
        )
    if result["queues"] > result["p"] and result["dispatch"] != "queues":
        print("\nThe queues of a rank ran one after the other; --dispatch queues is side by side.")
    if result["trace"]:
        print(f"\ntrace: {result['trace']} (predicted and measured; open it at ui.perfetto.dev)")


def measure(tell: Tell, settings: Settings) -> dict[str, Any] | None:
    """All of a profile on one rank; rank 0 returns the costs and how they spread."""
    from torch import distributed

    from hocket.costs import costs_toml
    from hocket.measured import readings
    from hocket.runtime.profile import bytes_of, probe
    from hocket.runtime.training import Trainer

    trainer = Trainer(settings)
    shown = _told_by_first(tell, trainer.rank)
    calls = trainer.calls_seen()
    run = trainer.run(shown, kept=settings.steps)
    found = {}
    for turn in range(settings.schedule.p):  # none disturbs another; replicas may meet in a stage
        if turn == trainer.rank % settings.schedule.p:
            found = {s: probe(module, calls[s]) for s, module in trainer.modules.items()}
        distributed.barrier()
    gathered: list[Any] = [None] * settings.nproc
    distributed.all_gather_object(gathered, found)
    if trainer.rank != 0:
        return None
    probes = {s: p for part in gathered for s, p in part.items()}
    seen = readings(run.timelines, "ms", waited=True)
    sizes = bytes_of(probes, seen.n_stages)
    parts = {s: p.parts for s, p in probes.items()}
    costs = seen.costs("median", "low", parts=parts, sizes=sizes)
    text = _spread_text(seen)
    note = [
        f"measured by hocket profile: {settings.schedule.name}, p={settings.schedule.p}, "
        f"m={settings.sequences}, {settings.model}, batch {settings.batch}",
        f"medians of {len(run.timelines)} steps; lane.recv is the time between two actions",
    ]
    if settings.device == "cpu" and cores() < settings.nproc:
        note.append(
            f"{settings.nproc} ranks shared {cores()} cores: times are longer than with one each, "
            "and a plan counts on one each"
        )
    return {"toml": costs_toml(costs, note), "text": text, "losses": run.losses}


def _spread_text(seen: Any) -> str:
    from hocket.render.compare import table

    rows = [[name, *_spread_cells(spread)] for name, spread in seen.named()]
    return table(rows, ["ms", "median", "middle half", "times"])


def _spread_cells(spread: Any) -> list[str]:
    return [f"{spread.median:.3f}", f"{spread.low:.3f} to {spread.high:.3f}", str(spread.count)]
