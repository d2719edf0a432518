"""`hocket demo`: the whole project in one minute, on real input.

Imports everything it shows; torch only for the last part.
"""

from __future__ import annotations

from pathlib import Path

from hocket.costs import Bytes, Costs
from hocket.errors import UsageError
from hocket.render.grid import grid
from hocket.schedules import build, entries
from hocket.simulator import simulate
from hocket.summary import Competitor, compare
from hocket.trace import write_trace

# A four-rank cut measured in microseconds and megabytes, with blocking transfers.
COSTS = Costs(
    F=(80, 92, 76, 84), I=(80, 92, 76, 84), W=(40, 46, 38, 42), lane=(10, 10), unit="us",
    bytes=Bytes(
        static=(512.0, 563.2, 460.8, 537.6),
        activation=(256.0, 281.6, 230.4, 268.8),
        gradient=(128.0, 140.8, 115.2, 134.4),
    ),
)  # fmt: skip


def tour(folder: Path) -> int:
    """Compares all schedules at p=4 m=8, draws one, writes every trace; returns 0."""
    p, m = 4, 8
    print(f"Every schedule at p={p} m={m}, four uneven stages, blocking transfers:\n")
    built = []
    for entry in entries():
        try:
            built.append(Competitor(entry.name, build(entry.name, p=p, m=m)))
        except UsageError as error:
            print(f"left out: {error}")
    print(compare(built, COSTS))
    print("\nzb-h1, one column a fixed time (hocket show zb-h1 -p 4 -m 8):\n")
    print(grid(simulate(build("zb-h1", p=p, m=m))))
    folder.mkdir(parents=True, exist_ok=True)
    for name, schedule, _ in built:
        v = schedule.placement.n_stages // p
        write_trace(simulate(schedule, COSTS.split(v)), str(folder / f"{name}.pftrace"))
    print(f"\n{len(built)} traces in {folder}/: open one at ui.perfetto.dev")
    return 0
