"""`hocket demo`: a tour that compares, draws, traces, and trains a small model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.cli import run as training
from hocket.cli.arguments import Verb, option
from hocket.cli.output import put_json
from hocket.cli.selection import Selection, Sizes
from hocket.cli.training import Model, Run, Training
from hocket.errors import UsageError

if TYPE_CHECKING:
    from hocket.comparison import Comparison
    from hocket.costs import Costs

P, M = 4, 8


@dataclass(frozen=True, kw_only=True)
class Options:
    """Those of `hocket demo`."""

    output: str = option("--output FOLDER", "folder for the traces", default="traces")
    json: bool = False


def run(options: Options) -> int:
    """Compares every schedule, draws one, writes every trace, and trains."""
    from hocket.comparison import all_that_fit, compare
    from hocket.formats import write_trace
    from hocket.render.grid import grid
    from hocket.schedules import build
    from hocket.simulator import simulate

    folder = Path(options.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror}") from None
    costs = _costs()
    fitting, left_out = all_that_fit(P, M)
    table = compare(fitting, costs, left_out)
    if not options.json:
        print(f"Every schedule at p={P} m={M}, four uneven stages, blocking transfers:\n")
        print(table)
        print(f"\nzb-h1, tile by tile (hocket show zb-h1 -p {P} -m {M}):\n")
        print(grid(simulate(build("zb-h1", p=P, m=M))))
    traces = []
    for name, schedule, _ in fitting:
        split = costs.split(schedule.placement.n_stages // P, schedule.placement.slices)
        traces.append(str(folder / f"{name}.pftrace"))
        write_trace(simulate(schedule, split), traces[-1])
    if not options.json:
        print(f"\n{len(traces)} traces in {folder}/: open one at ui.perfetto.dev")
    return _train(table, traces, folder / "run.pftrace", options)


def _train(table: Comparison, traces: list[str], trace: Path, options: Options) -> int:
    steps = 20
    chosen = Selection(schedule="zb-h1", sizes=Sizes(p=P, m=M))
    wanted = training.Options(
        selection=chosen, training=Training(run=Run(steps=steps), model=Model()),
        shown=training.Shown(trace=str(trace)), json=options.json,
    )  # fmt: skip
    if not options.json:
        words = f"run zb-h1 -p {P} -m {M} --steps {steps} --trace {trace}"
        print(f"\nA small GPT on four processes (hocket {words}):\n", flush=True)
        return training.run(wanted)
    return training.run(
        wanted, show=lambda result: put_json(
            {"compare": table.as_json(), "traces": traces, "run": result})
    )  # fmt: skip


def _costs() -> Costs:
    """Those of a four-rank cut in microseconds and megabytes, with blocking transfers."""
    from hocket.costs import Bytes, Costs

    sizes = Bytes(
        static=(512.0, 563.2, 460.8, 537.6),
        activation=(256.0, 281.6, 230.4, 268.8),
        gradient=(128.0, 140.8, 115.2, 134.4),
    )
    times = (80, 92, 76, 84)
    return Costs(
        F=times, I=times, W=(40, 46, 38, 42), p2p_overhead=(10, 10), unit="us", bytes=sizes
    )


VERB = Verb("demo", "a tour: compare, draw, trace, and train a small model", Options, run)
