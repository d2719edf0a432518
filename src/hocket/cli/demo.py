"""`hocket demo`, first part: compare, draw, trace. The command line then trains."""

from __future__ import annotations

from pathlib import Path

from hocket.comparison import all_that_fit, compare
from hocket.costs import Bytes, Costs
from hocket.render.grid import grid
from hocket.schedules import build
from hocket.simulator import simulate
from hocket.trace import write_trace

# A four-rank cut measured in microseconds and megabytes, with blocking transfers.
COSTS = Costs(
    F=(80, 92, 76, 84), I=(80, 92, 76, 84), W=(40, 46, 38, 42), p2p_overhead=(10, 10), unit="us",
    bytes=Bytes(
        static=(512.0, 563.2, 460.8, 537.6),
        activation=(256.0, 281.6, 230.4, 268.8),
        gradient=(128.0, 140.8, 115.2, 134.4),
    ),
)  # fmt: skip


def tour(folder: Path) -> None:
    """Compares all schedules at p=4 m=8, draws one, writes every trace."""
    p, m = 4, 8
    print(f"Every schedule at p={p} m={m}, four uneven stages, blocking transfers:\n")
    fitting, left_out = all_that_fit(p, m)
    print(compare(fitting, COSTS, left_out))
    print("\nzb-h1, tile by tile (hocket show zb-h1 -p 4 -m 8):\n")
    print(grid(simulate(build("zb-h1", p=p, m=m))))
    for name, schedule, _ in fitting:
        costs = COSTS.split(schedule.placement.n_stages // p, schedule.placement.slices)
        write_trace(simulate(schedule, costs), folder / f"{name}.pftrace")
    print(f"\n{len(fitting)} traces in {folder}/: open one at ui.perfetto.dev")
