"""The page: timelines as one self-contained HTML file, or as JSON for the served page.

The page's own code lies in `page/`, JavaScript and CSS by hand; nothing is loaded from anywhere
else.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.deps import RECEIVES, ROWS, Kind
from hocket.errors import UsageError
from hocket.explanation import observe
from hocket.page.columns import columns, levels, pack, scale_of
from hocket.render import tiles
from hocket.report import rank_table
from hocket.text import head
from hocket.timeline import PHASES, Timeline
from hocket.trace import draw, perfetto
from hocket.trace.slices import UNITS

FOLDER = Path(__file__).parent / "assets"
SCRIPTS = (
    "decode", "model", "colours", "scene", "paint", "svg", "address", "export", "tell", "control",
    "form", "main",
)  # fmt: skip
MOST_EXPLAINED = 50_000  # actions up to which the summary says why
LARGEST_TRACE = 400_000  # compressed bytes of the trace that a page carries

Timelines = Timeline | Mapping[str, Timeline]


def page(
    timelines: Timelines,
    *,
    limit: float | None = None,
    notes: Mapping[str, str] | None = None,
) -> str:
    """One HTML document that shows a timeline, or two by name one above the other.

    limit: bytes that a rank has (microbatches in flight where the costs tell no bytes), drawn in
    the memory under its tiles. notes: for some of the names a text that is shown below.

    Raises: UsageError for more than two timelines, or units that cannot share an axis.
    """
    data = page_data(timelines, limit=limit, notes=notes)
    for view, timeline in zip(data["views"], _named(timelines).values(), strict=True):
        view["trace"] = _trace(view["label"], timeline)
    return document(data)


def document(data: Mapping[str, Any]) -> str:
    """The page around its data."""
    text = _asset("page.html")
    title = " and ".join(view["label"] for view in data["views"]) or "hocket"
    script = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    for mark, value in (
        ("TITLE", _html(title)),
        ("STYLE", _asset("page.css")),
        ("SUMMARY", _html("\n\n".join(view["summary"] for view in data["views"]))),
        ("DATA", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")),
        ("SCRIPT", script),
    ):
        text = text.replace(f"<!--{mark}-->", value, 1)
    return text


def page_data(
    timelines: Timelines,
    *,
    limit: float | None = None,
    notes: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What the page draws, as plain data; the columns of all views are one text, `blob`."""
    named = _named(timelines)
    if len(named) > 2:
        raise UsageError(f"a page shows one or two timelines, not {len(named)}")
    factors = _common_unit(list(named.values()))
    views, packed = [], []
    for (label, timeline), factor in zip(named.items(), factors, strict=True):
        view, found = _view(label, timeline, factor)
        view["note"] = (notes or {}).get(label, "")
        views.append(view)
        packed += found
    return {
        "unit": next(iter(named.values())).unit,
        "limit": next(iter(named.values())).bytes.amount(limit),
        "kinds": [_kind(kind) for kind in Kind],
        "views": views,
        "blob": pack(packed),
    }


def trace_bytes(label: str, timeline: Timeline, ranks: range | None = None) -> bytes:
    """The timeline as a Perfetto trace."""
    return b"".join(perfetto.encode(draw({label: timeline}, label, ranks)))


def _named(timelines: Timelines) -> Mapping[str, Timeline]:
    if not isinstance(timelines, Timeline):
        return timelines
    name = timelines.schedule.name
    return {f"{name} (measured)" if timelines.measured else name: timelines}


def _common_unit(timelines: list[Timeline]) -> list[float]:
    """For each timeline what its unit is in the first one's."""
    units = [t.unit for t in timelines]
    if len(set(units)) == 1:
        return [1.0] * len(units)
    unknown = [u for u in units if u not in UNITS or not u]
    if unknown:
        raise UsageError(
            f"times in {units[0] or 'no unit'} and in {units[1] or 'no unit'} have no common axis"
        )
    return [UNITS[u] / UNITS[units[0]] for u in units]


def _view(label: str, timeline: Timeline, factor: float) -> tuple[dict[str, Any], list[Any]]:
    s, scale = timeline.schedule, scale_of(timeline)
    memory = levels(timeline, scale)
    found = [*columns(timeline, scale), *memory.columns]
    peaks = timeline.peak_bytes if memory.quantity == "bytes" else None
    return {
        "label": label,
        "facts": tiles.headline(timeline)[1:],
        "measured": timeline.measured,
        "blocking": s.has_communication and len(timeline.graph.chains) - 1 == len(s.queues),
        "unit": timeline.unit,
        "per_step": scale.unit * factor,
        "makespan": float(timeline.makespan) * factor,
        "queues": [{"name": str(q), "rank": q.rank} for q in s.queues],
        "first": s.slots[s.starts].tolist(),
        "idle": [tiles.idle_share(timeline, r) for r in range(s.p)],
        "peaks": [float(x) for x in (timeline.in_flight if peaks is None else peaks)],
        "static": timeline.static_bytes if peaks is not None else [0] * s.p,
        "memory": {"quantity": memory.quantity, "unit": memory.unit, "counts": memory.counts},
        "shade": tiles.shade_means(s) if tiles.shades(s).any() else "",
        "head": head(s),
        "summary": summary(label, timeline),
        "columns": [[c.name, len(c.values), int(c.difference)] for c in found],
    }, found  # fmt: skip


def _kind(kind: Kind) -> dict[str, Any]:
    """What the page knows of a kind; `colours` are (fill, ink) of both shades."""
    row = ROWS[kind]
    return {
        "letter": kind.name,
        "name": row.name,
        "message": not row.work,
        "receive": kind in RECEIVES,
        "colours": [(shade.fill, shade.ink) for shade in row.look.shades],
    }


def _trace(label: str, timeline: Timeline) -> dict[str, Any]:
    """The trace that the page carries: of all ranks, or of the first that leave it small."""
    p = timeline.schedule.p
    data = gzip.compress(trace_bytes(label, timeline), 6, mtime=0)
    ranks = p
    while len(data) > LARGEST_TRACE and ranks > 1:
        ranks = max(1, min(ranks - 1, ranks * LARGEST_TRACE // len(data)))
        data = gzip.compress(trace_bytes(label, timeline, range(ranks)), 6, mtime=0)
    return {"ranks": ranks, "gzip": base64.b64encode(data).decode()}


def summary(label: str, timeline: Timeline) -> str:
    """The timeline in words and tables: what a reader who cannot see the picture hears."""
    ranks = rank_table(timeline, "rank", "busy", "idle", *PHASES, "in flight", "memory")
    parts = [f"{label}: {', '.join(tiles.headline(timeline)[1:])}.", ranks]
    if timeline.computes.any() and len(timeline.schedule.codes) <= MOST_EXPLAINED:
        parts.append(observe(timeline).seen)
    return "\n\n".join(parts)


def _asset(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
