"""`hocket demo`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hocket.cli import run as training
from hocket.cli.arguments import Verb, option
from hocket.cli.selection import Selection, Sizes
from hocket.cli.training import Training
from hocket.errors import UsageError

P, M, STEPS = 4, 8, 20


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `hocket demo` takes."""

    output: str = option("--output FOLDER", "folder for the traces", default="traces")
    json: bool = False


def run(options: Options) -> int:
    """Compares every schedule, draws one, writes every trace, and trains."""
    from hocket.comparison import all_that_fit, compare
    from hocket.costs import Bytes, Costs
    from hocket.formats import write_trace
    from hocket.render.grid import grid
    from hocket.schedules import build
    from hocket.simulator import simulate

    folder = Path(options.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror}") from None
    f, w = (80, 92, 76, 84), (40, 46, 38, 42)
    sizes = Bytes(
        unit="MB",
        static=(512.0, 563.2, 460.8, 537.6),
        activation=(256.0, 281.6, 230.4, 268.8),
        gradient=(128.0, 140.8, 115.2, 134.4),
    )
    costs = Costs(F=f, I=f, W=w, p2p_overhead=(10, 10), unit="us", bytes=sizes, per="rank")
    fitting, left_out = all_that_fit(P, M)
    table = compare(fitting, costs, left_out)
    trace = str(folder / "run.pftrace")
    for name, schedule, _ in fitting:
        write_trace(simulate(schedule, costs), folder / f"{name}.pftrace")
    if not options.json:
        print(
            f"Every schedule at p={P} m={M}, four uneven stages, blocking transfers:\n\n{table}\n\n"
            f"zb-h1, tile by tile (hocket show zb-h1 -p {P} -m {M}):\n\n"
            f"{grid(simulate(build('zb-h1', p=P, m=M)))}\n\n"
            f"{len(fitting)} traces in {folder}/: open one at ui.perfetto.dev\n\n"
            f"A small GPT on four processes "
            f"(hocket run zb-h1 -p {P} -m {M} --steps {STEPS} --trace {trace}):\n", flush=True,
        )  # fmt: skip
    selection = Selection(schedule="zb-h1", sizes=Sizes(p=P, m=M))
    wanted = training.Options(
        selection=selection, training=Training(steps=STEPS), trace=trace, json=options.json
    )
    return training.run(wanted, compare=table.as_json(), traces=str(folder))


VERB = Verb("demo", Options, run)
