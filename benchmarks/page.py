"""The page at size: `python benchmarks/page.py [p m]` prints its figures, taken in a real Chromium.

98,304 tiles by default (zb-h1, 64 ranks, 512 microbatches). Times are CPU time of the page's main
thread, as the kernel counts it (Linux only): all that follows a turn of the wheel, or a change of
the window with the reading back of a pixel, so that rasterising counts. The first turns run code
that has not run before, and count like the others.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "page"))

from browser import Browser, why_not

from hocket import Costs, build, simulate
from hocket.costs import Bytes
from hocket.page.document import page

COSTS = Costs(F=10, I=12, W=7, latency=3, unit="us", bytes=Bytes(static=10, activation=5))
ZOOMS = (1, 0.5, 0.25, 0.1, 0.05, 0.02, 0.005)
REDRAW = """((part, path, i) => {
  const a = hocket, whole = Math.max(...a.views.map(v => v.makespan));
  a.state.show.path = path;
  const from = whole * (1 - part) * (0.4 + i / 40);
  [a.state.from, a.state.to] = [from, from + whole * part];
  a.drawNow(a);
  a.surface.context.getImageData(0, 0, 1, 1);
})"""
BUSY = "(() => { for (const start = performance.now(); performance.now() - start < 60;); })()"
TURNS = [-120] * 24 + [160] * 16  # of the wheel: into 1% of the step, and out again


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
            _wheel(browser, file.as_uri())
            _redraws(browser, file.as_uri())
    finally:
        browser.close()


def _data(text: str) -> str:
    start = text.index('id="data">') + len('id="data">')
    return text[start : text.index("</script>", start)]


class Page:
    """A page, and the CPU time that its main thread takes; on Linux, whose kernel counts it."""

    def __init__(self, browser: Browser, url: str) -> None:
        self._browser = browser
        before = self._times()
        self.tab = browser.open("about:blank", ready="true")
        self.tab.go(url)
        self.tab.settle()
        after = self._times()
        self.tab.run(BUSY)  # which of the browser's processes draws this page?
        self._pid = max(after, key=lambda pid: self._time(pid) - after[pid])
        spent = after[self._pid] - before.get(self._pid, 0)
        self.opened = spent / 1e6  # ms, the browser's own start of a page included

    def cost(self, do: Callable[[], object]) -> float:
        """Milliseconds that something takes the main thread."""
        before = self._time(self._pid)
        do()
        return (self._time(self._pid) - before) / 1e6

    def _times(self) -> dict[int, int]:
        processes = self._browser.ask("SystemInfo.getProcessInfo")["processInfo"]
        return {p["id"]: self._time(p["id"]) for p in processes if p["type"] == "renderer"}

    @staticmethod
    def _time(pid: int) -> int:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])


def _first_picture(browser: Browser, url: str) -> None:
    """Until the picture stands, of five loads the least and the middle."""
    times = []
    for _ in range(5):
        page = Page(browser, url)
        times.append(page.opened)
        heap = page.tab.run("performance.memory.usedJSHeapSize")
        page.tab.close()
    times.sort()
    print(f"first picture               {times[0]:.0f} ms at best, {times[2]:.0f} in the middle")
    print(f"JavaScript heap             {heap / 1e6:.0f} MB")


def _wheel(browser: Browser, url: str) -> None:
    """Every turn of the wheel from the first on, in five pages: the worst of each page."""
    worst, usual = [], []
    for _ in range(5):
        page = Page(browser, url)
        costs = [page.cost(lambda by=by, page=page: page.tab.wheel(700, 400, by)) for by in TURNS]
        worst.append(max(costs))
        usual.append(sorted(costs)[len(costs) // 2])
        page.tab.close()
    print(f"a turn of the wheel         {min(usual):.0f} to {max(usual):.0f} ms in the middle")
    print(f"the worst of {len(TURNS)} turns       {' '.join(f'{x:.0f}' for x in sorted(worst))} ms")


def _redraws(browser: Browser, url: str) -> None:
    page = Page(browser, url)
    for part in ZOOMS:
        for path in (False, True):
            calls = (f"{REDRAW}({part}, {str(path).lower()}, {i})" for i in range(9))
            times = sorted(page.cost(lambda call=call: page.tab.run(call)) for call in calls)
            what = f"{part:.1%} of the step" + (", critical path" if path else "")
            print(
                f"redraw, {what:<28}{times[0]:4.0f} ms at best, {times[4]:4.0f} in the middle, "
                f"{times[-1]:4.0f} at worst"
            )
    page.tab.close()


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:3])) if len(sys.argv) > 2 else main(64, 512)
