"""Writes docs/schedules.md from the registry: `python docs/make_gallery.py`."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hocket.costs import Bytes, Costs
from hocket.errors import UsageError
from hocket.ir import Kind, Schedule, kinds_of
from hocket.render.grid import grid
from hocket.schedules import Entry, build, entries
from hocket.simulator import simulate
from hocket.tables import table
from hocket.timeline import Timeline

PAGE = Path(__file__).parent / "schedules.md"
SIZES = [(4, 8), (8, 16), (8, 64)]
HEAD = """# Schedules

Made by `python docs/make_gallery.py` from the registry; a test holds it up to date. Pictures and
numbers are hocket's own: p ranks, m microbatches, F = I = W = 1 for 1/p of the model (a stage of
v takes 1/v, a slice its share), no latency; a fused F+B takes the sum of its parts. In flight: the
fullest rank, in microbatches of 1/p of the model. A formula is shown with the range in which it
equals the simulated value; outside it `hocket compare` says "does not apply".
"""
SAME_MEMORY = (("1f1b", 1), ("v-half", 2))
OFFLOADED = [  # p, m, v, group, chunks, ratio
    (2, 4, 2, 2, 1, 60), (4, 8, 2, 2, 1, 50), (4, 8, 2, 4, 1, 50), (4, 8, 2, 4, 1, 100),
    (4, 12, 3, 4, 2, 80), (4, 8, 4, 4, 2, 100), (4, 16, 4, 4, 3, 60), (8, 16, 2, 8, 1, 100),
    (8, 16, 2, 4, 1, 100),
]  # fmt: skip
PICTURES = {"chimera": {"concat": "doubling"}}  # options shown beside the default, at p=4 m=8
OTHER_NAMES = """
## Under another name

| published as | here |
|---|---|
| DAPPLE, PipeDream-flush, Megatron-LM's schedule without interleaving | `1f1b` |
| Alpa's eager 1F1B, 1F1B with twice the warm-up | `eager-1f1b` |
| Megatron-LM's `microbatch_group_size_per_vp_stage` | `interleaved`, option `group` |
| Megatron-LM's combined 1F1B, JaxPP's overlapped interleaving | `interleaved-overlap` |
| breadth-first pipeline parallelism | `looped-bfs` |
| ZB-1p, ZB-2p | `zb-auto` with `limit=p` and `limit=2p` |
| V-ZB, V-Half, V-Min, their adaptive form, 1F1B-V | `zb-v`, `v-half`, `v-min`, `v-auto`, `v-1f1b` |
| DualPipe cut in half | `dualpipev` |
| PipeOffload's group-interleaved schedule (GIS) | `group-interleaved`, option `recompute` |
| PO-H, PO-F | `pipeoffload` with a `ratio` of 100 to 200, and below 100 |
| Primus' offload of V schedules | `hocket.lower.offload` for the stages 0 to p - 1 |
| Chimera's direct concatenation, forward doubling, backward halving | `chimera`, option `concat` |
| Seq1F1B-I | `seq1f1b-interleaved` |
| naive model parallelism, the whole batch at once | `gpipe` with `m=1` |
"""
OFFLOAD = """
## Activations in host memory

`pipeoffload` against the `group-interleaved` that it starts from, at F = I = W = 1 per stage and
with copies of the time that `ratio` allows them. Peaks are activations of one stage and one
microbatch, from F to W less the time between D and A, of the ranks in order:

```text
{offload}
```

Where half or three quarters of the activations leave, the peak falls to the share that stays, or
below: what lives longest leaves first. The orders are those of the authors' code for every size
that could be compared, action by action. Their compute stream also waits for the end of some
copies out, which takes 3.6% there (p=4 m=16 v=4 in the table); here no computation waits for a D
but the one behind its A. A rank that holds fewer activations here than in their count got its
memory back a little sooner. They refuse what does not fit their timetable, and here it stays on
the device. Primus has a simpler rule for V schedules, which `hocket.lower.offload` follows: the
peaks of `zb-v` at p=4 m=8 fall from 8 on each rank to 2, 4, 6 and 7. Where a forward precedes the
backward, Primus reloads between the two and waits for that.
"""
OUTSIDE = """
## Not here, and why

**Weights of several steps at once.** PipeDream, PipeDream-2BW, PipeMare and XPipe update weights
while older microbatches are still in flight: a backward may use other weights than its forward.
hocket's schedules are synchronous: one step, one version of the weights, gradients equal to the
unpipelined model.

**Activations that move.** BPipe runs 1F1B in which rank r < p/2 parks activations on rank
p - 1 - r, so that every rank holds p/2 + 1 microbatches, not p - r. That says where bytes lie, not
who runs what: the order is that of `1f1b`, and in hocket only a backward frees what a forward took.
Its price is traffic: with the latest microbatch evicted first, rank r sends away and fetches back
(p/2 - 1 - r)/(p - 1 - r) of its microbatches. An activation takes about 34 bytes per layer, token
and hidden unit (bf16, attention scores not kept), a message 2; so with ten layers a stage and p=8,
rank 0 sends 73 messages' worth for every microbatch and fetches them back: each takes 0.6 F of
every 3 F over 50 GB/s at hidden 8192. `v-half`, with two stages per rank and split backwards, holds
exactly as much as BPipe, moves nothing, and is faster; F = I = W = 1:

```text
{bpipe}
```

`hocket compare -p 8 -m 32 1f1b v-half v-auto:limit=10` makes such a row; `v-auto` has an order for
any limit. D and U move activations to the host of the same rank ([format.md](format.md)); an
eviction would also take memory on another rank, which no action does here.

**Recomputation that is planned.** AdaPipe and Mario search for what each stage recomputes and
when, and publish no orders. Merak's orders are here (`merak`) and reach the proven optima with R
anywhere between F and B, for all sizes that were solved (p = 2 to 4, m = 4 to 8).
`hocket.lower.recompute` puts an `R` into any order, and `hocket plan` chooses recomputation stage
by stage as part of the backward ([planning.md](planning.md)). It does not search for the place of
an `R` of its own.

**Weights that move.** WeiPipe, TawPipe and RoundPipe send weights from rank to rank or from the
host, to where the activations are. A placement in hocket keeps a stage on its ranks for the step.

**More than one chain of stages.** Vocabulary parallelism cuts the output layer over all ranks,
which run it together; BigMac and Optimus nest encoders into the bubbles of a language model;
GraphPipe has stages that branch; PipeFill and PipeFisher fill bubbles with other work. A
microbatch in hocket walks one path, and a schedule holds its forwards and backwards only.

**Slices of sequences that share work.** SlimPipe is 1F1B over equal slices, as `seq1f1b`, and
evens out their attention by sending parts of it to other ranks, which hocket does not model:
`slice` in the costs gives each slice its own time. HelixPipe gives the attention of one layer to
another rank for each microbatch. MEPipe interleaves slices over several stages per
rank, as `seq1f1b-interleaved` does; its own order could not be checked.

**Samples of uneven length.** DynaPipe, SlimPack and Skrull form microbatches from the lengths of
the samples at hand; costs in hocket are by stage and slice, the same for every microbatch.

**Tensor and pipeline parallelism braided.** STP and dual-batch overlap run parts of two layers
against each other's messages. Stages on two queues of a rank hold such orders, as in `moe-pair`;
none of them is built in.

**Weight gradients put off.** 2BP delays them, minPP's zb1f1b until a rank has run its last
forward. That is as fast as `zb-h1` with every microbatch in flight (p=4 m=8, F = I = W = 1: 27,
and 8 in flight against 4); `zb-auto` takes any limit between.

**Solvers and languages.** Tessel, AdaPtis and integer programs such as OptPipe find an order for
given costs and have no rule of their own: `hocket plan` does that. FlexPipe and the tabular
abstraction are ways to write schedules down, as `.sched` files are ([format.md](format.md)).
"""


def main() -> None:
    """Writes the page; with --check exits 1 if it would change."""
    text = page()
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")


def page() -> str:
    """The whole page."""
    sections = "".join(section(entry) for entry in entries())
    after = OFFLOAD.format(offload=offloaded()) + OUTSIDE.format(bpipe=balanced())
    return HEAD + sections + OTHER_NAMES + after


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
    for schedule in filter(None, (example(entry), variant(entry))):
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


def variant(entry: Entry) -> Schedule | None:
    """The schedule with the options of `PICTURES`, named after them."""
    options: dict[str, Any] = PICTURES.get(entry.name, {})
    words = ",".join(f"{key}={value}" for key, value in options.items())
    made = build(entry.name, p=4, m=8, **options) if options else None
    return made and made.renamed(f"{entry.name}:{words}")


def balanced() -> str:
    """What BPipe would hold and move, beside 1F1B and v-half; p even."""
    rows = []
    for p in (4, 8, 16):
        m = 4 * p
        t, v = (simulate(build(name, p=p, m=m), Costs(per="rank")) for name, n in SAME_MEMORY)
        moved = (p / 2 - 1) / (p - 1)
        rows.append(
            [p, m, peak(t), t.makespan, p // 2 + 1, f"{moved:.0%}", peak(v) / 2, v.makespan]
        )
    heads = ["p", "m", "1f1b: in flight", "makespan", "BPipe: in flight", "moved by rank 0",
             "v-half: in flight", "makespan"]  # fmt: skip
    return table(rows, heads)


def offloaded() -> str:
    """Peaks and makespans without and with copies to the host, `[row]`."""
    rows = []
    for p, m, v, group, chunks, ratio in OFFLOADED:
        sizes = {"p": p, "m": m, "v": v, "group": group}
        copy = ratio * 3 / 200
        costs = Costs(D=copy, U=copy, bytes=Bytes(activation=1, held=1))
        plain = simulate(build("group-interleaved", **sizes), costs)
        moved = simulate(build("pipeoffload", **sizes, chunks=chunks, ratio=ratio), costs)
        leave = np.count_nonzero(kinds_of(moved.schedule.codes) == Kind.D)
        rows.append({
            **sizes, "chunks": chunks, "ratio": ratio, "leave": f"{leave / (p * v * m):.0%}",
            "peaks": fullest(plain), "offloaded": fullest(moved),
            "makespan": plain.makespan, "with copies": f"{float(moved.makespan):g}",
        })  # fmt: skip
    return table(rows, list(rows[0]))


def fullest(timeline: Timeline) -> str:
    """The peak of each rank in bytes."""
    return " ".join(f"{rank.peak_bytes:g}" for rank in timeline.ranks)


def peak(timeline: Timeline) -> int:
    """Stages in flight on the fullest rank."""
    return max(r.peak_in_flight for r in timeline.ranks)


def numbers(entry: Entry, p: int, m: int) -> dict[str, object] | None:
    """One row of the table, or None where the schedule does not fit."""
    try:
        s = build(entry.name, p=p, m=m)
    except UsageError:
        return None
    v, slices = max(1, s.placement.n_stages // s.p), s.placement.slices
    t = simulate(s, Costs(per="rank"))
    flight = peak(t) / v / slices
    if any(q.stream for q in s.queues):
        return None
    return {
        "p": p, "m": m, "v": v, "makespan": t.makespan, "span": t.span,
        "bubble": f"{t.bubble_ratio:.1%}", "in flight": flight,
    }  # fmt: skip


if __name__ == "__main__":
    main()
