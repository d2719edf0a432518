"""The page at size: `python benchmarks/page.py [p m]` prints its figures, taken in a real Chromium.

98,304 tiles by default (zb-h1, 64 ranks, 512 microbatches). Each redraw is timed in the page and
made to end by reading a pixel back, so that rasterising counts. Times are of this machine, with
whatever else it does: the least of several is the one to compare.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "page"))

from browser import Browser, why_not

from hocket import Costs, build, simulate
from hocket.costs import Bytes
from hocket.render.page import page

COSTS = Costs(F=10, I=12, W=7, latency=3, unit="us", bytes=Bytes(static=10, activation=5))
ZOOMS = (1, 0.5, 0.25, 0.1, 0.05, 0.02, 0.005)
REDRAW = """((part, path) => {
  const a = hocket, whole = Math.max(...a.views.map(v => v.makespan)), times = [];
  a.state.show.path = path;
  for (let i = 0; i < 9; i++) {
    const from = whole * (1 - part) * (0.4 + i / 40);
    [a.state.from, a.state.to] = [from, from + whole * part];
    const began = performance.now();
    a.drawNow(a);
    a.surface.context.getImageData(0, 0, 1, 1);
    times.push(performance.now() - began);
  }
  return times.sort((x, y) => x - y);
})"""


def main(p: int, m: int) -> None:
    """Prints one figure a line."""
    missing = why_not()
    if missing:
        raise SystemExit(f"benchmarks/page.py {missing}")
    timeline = simulate(build("zb-h1", p=p, m=m), COSTS)
    began = time.process_time()
    text = page(timeline)
    print(f"tiles                       {len(timeline.schedule.codes):,}")
    print(f"made by Python in           {time.process_time() - began:.2f} s of CPU")
    carried = len(json.loads(_data(text))["views"][0]["trace"]["gzip"])
    print(
        f"page                        {len(text) / 1000:.0f} kB, {carried / 1000:.0f} of it trace"
    )
    browser = Browser(1400, 900)
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "page.html"
            file.write_text(text, encoding="utf-8")
            _first_picture(browser, file.as_uri())
            _redraws(browser, file.as_uri())
    finally:
        browser.close()


def _data(text: str) -> str:
    start = text.index('id="data">') + len('id="data">')
    return text[start : text.index("</script>", start)]


def _first_picture(browser: Browser, url: str) -> None:
    """Main-thread time until the picture stands, of five loads the least and the middle."""
    times, draws = [], []
    for _ in range(5):
        tab = browser.open(url.rsplit("/", 1)[0] + "/", ready="document.readyState")
        tab.ask("Performance.enable")  # a page beside it first: loads are counted from here on
        tab.go(url)
        tab.settle()
        found = {x["name"]: x["value"] for x in tab.ask("Performance.getMetrics")["metrics"]}
        times.append(found["TaskDuration"])
        draws.append(tab.run("hocket.firstDrawn"))
        heap = found["JSHeapUsedSize"]
        tab.close()
    times.sort()
    print(f"first picture, main thread  {times[0]:.2f} s at best, {times[2]:.2f} s in the middle")
    print(f"of which drawing            {min(draws):.0f} ms")
    print(f"JavaScript heap             {heap / 1e6:.0f} MB")


def _redraws(browser: Browser, url: str) -> None:
    tab = browser.open(url)
    for part in ZOOMS:
        for path in (False, True):
            times = tab.run(f"{REDRAW}({part}, {str(path).lower()})")
            what = f"{part:.1%} of the step" + (", critical path" if path else "")
            print(
                f"redraw, {what:<28}{times[0]:4.0f} ms at best, {times[4]:4.0f} in the middle, "
                f"{times[-1]:4.0f} at worst"
            )
    tab.close()


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:3])) if len(sys.argv) > 2 else main(64, 512)
