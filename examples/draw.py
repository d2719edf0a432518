"""Generate a schedule, print it as a grid and save it as SVG."""

import sys
from pathlib import Path

import hocket
from hocket.render.grid import grid
from hocket.render.svg import svg

# ZB-H1 splits each backward into I (input gradient) and W (weight gradient).
schedule = hocket.build("zb-h1", p=4, m=8)  # 4 ranks, 8 microbatches
timeline = hocket.simulate(schedule)  # every F, I and W takes one unit of time

print(grid(timeline, width=120))
picture = Path(sys.argv[1] if len(sys.argv) > 1 else "zb-h1.svg")
picture.write_text(svg(timeline), encoding="utf-8")
print(f"saved {picture}")
