"""Writes docs/schedules.md from the registry: `python docs/make_gallery.py`."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from hocket.costs import Costs
from hocket.errors import UsageError
from hocket.ir import Schedule
from hocket.render.compare import table
from hocket.render.grid import grid
from hocket.schedules import Entry, build, entries
from hocket.simulator import simulate

PAGE = Path(__file__).parent / "schedules.md"
SIZES = [(4, 8), (8, 16), (8, 64)]
HEAD = """# Schedules

Made by `python docs/make_gallery.py` from the registry; a test holds it up to date. Pictures and
numbers are hocket's own: p ranks, m microbatches, F = I = W = 1 for 1/p of the model (a stage of
v takes 1/v, a slice its share), no latency; a fused F+B takes the sum of its parts. In flight: the
fullest rank, in microbatches of 1/p of the model. A formula is shown with the range in which it
equals the simulated value; outside it `hocket compare` says "does not apply".
"""
OUTSIDE = """
## Not here, and why

**PipeDream** and **PipeDream-2BW** update weights while older microbatches are still in flight: a
backward may use other weights than its forward. hocket's schedules are synchronous: one step, one
version of the weights, gradients equal to the unpipelined model.

**BPipe** moves activations between rank r and rank p - 1 - r so that all ranks hold about
(p + 2)/2 of 1F1B's. That is about where an activation is kept, not about who runs what: its order
is 1F1B's (`hocket show 1f1b`), and evicting and loading are not actions of a stage.

**Chimera's forward doubling and backward halving** run two microbatches forward (or half of one
backward) at a time, so that both passes last equally long and units join without a bubble. Here the
order alone starts a unit inside the last one's bubble (52 against 58 for p=4 m=16, F=1 B=2), at the
paper's memory and without running anything on other sizes.
"""


def main() -> None:
    """Writes the page; with --check exits 1 if it would change."""
    text = page()
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")


def page() -> str:
    """The whole page."""
    return HEAD + "".join(section(entry) for entry in entries()) + OUTSIDE


def section(entry: Entry) -> str:
    """One schedule: what it is, when to use it, its picture, its numbers."""
    text = inspect.cleandoc(entry.make.__doc__ or "").partition(">>>")[0].strip()
    out = [f"\n## {entry.name}\n", text, ""]
    if entry.use:
        out += [f"**Use.** {entry.use}\n"]
    if entry.rules:
        out += [f"**Needs.** {'; '.join(rule.text for rule in entry.rules)}.\n"]
    if entry.formula:
        f = entry.formula
        out += [f"**Formula.** {f.metric} = {f.text}; holds for: {f.range}.\n"]
    out += [f"**Weights.** {entry.weights}. **Source.** {entry.source}.\n"]
    schedule = example(entry)
    if schedule is not None:
        out += [f"```text\n{grid(simulate(schedule), width=118)}\n```\n"]
    rows = [row for row in (numbers(entry, p, m) for p, m in SIZES) if row]
    columns = ["p", "m", "v", "makespan", "span", "bubble", "in flight"]
    out += [f"```text\n{table(rows, columns)}\n```"] if rows else []
    return "\n".join(out) + "\n"


def example(entry: Entry) -> Schedule | None:
    """The schedule at p=4 with few microbatches, or at the first size that it allows."""
    for p, m in ((4, 4), (4, 8), (1, 2)):
        try:
            return build(entry.name, p=p, m=m)
        except UsageError:
            continue
    return None


def numbers(entry: Entry, p: int, m: int) -> dict[str, object] | None:
    """One row of the table, or None where the schedule does not fit."""
    try:
        s = build(entry.name, p=p, m=m)
    except UsageError:
        return None
    v, slices = max(1, s.placement.n_stages // s.p), s.placement.slices
    t = simulate(s, Costs().split(v, slices))
    flight = max(r.peak_in_flight for r in t.ranks) / v / slices
    if any(q.stream for q in s.queues):
        return None
    return {
        "p": p, "m": m, "v": v, "makespan": t.makespan, "span": t.span,
        "bubble": f"{t.bubble_ratio:.1%}", "in flight": flight,
    }  # fmt: skip


if __name__ == "__main__":
    main()
