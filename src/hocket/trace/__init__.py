"""Traces: timelines as files that Perfetto and Chrome's trace viewers open.

A file's ending says its format: `.json` is Chrome's JSON, any other is Perfetto's own
(`.pftrace`); `.gz` after it compresses.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, NamedTuple

from hocket.errors import UsageError
from hocket.timeline import Timeline
from hocket.trace import chrome, perfetto
from hocket.trace.picture import Picture, draw, overlaps

__all__ = ["LIMIT", "TraceSize", "Written", "draw", "overlaps", "trace_size", "write_trace"]

# What Perfetto's web page is made for; much above it, a browser's tab runs out of memory.
LIMIT = 200_000_000

Timelines = Timeline | Mapping[str, Timeline]


class TraceSize(NamedTuple):
    """What a trace holds, and its bytes before compression."""

    slices: int
    flows: int
    counters: int
    bytes: int

    @property
    def events(self) -> int:
        """Slices, both ends of every flow, and levels of counters."""
        return self.slices + 2 * self.flows + self.counters

    @property
    def warning(self) -> str | None:
        """What to do about a trace that is too large for Perfetto's web page, else None."""
        if self.bytes <= LIMIT:
            return None
        return (
            f"the trace has {self.events:,} events and {self.bytes / 1e6:,.0f} MB before "
            f"compression, and ui.perfetto.dev takes about {LIMIT / 1e6:.0f} MB; "
            "show fewer ranks, or open it with Perfetto's trace_processor"
        )


class Written(NamedTuple):
    """A trace that was written: where, and what it holds."""

    path: Path
    size: TraceSize


class _Format(NamedTuple):
    encode: Callable[[Picture], Iterator[bytes]]
    size: Callable[[Picture], int]


_CHROME = _Format(chrome.encode, chrome.size)
_PERFETTO = _Format(perfetto.encode, perfetto.size)


def write_trace(
    timeline: Timelines,
    path: str | Path,
    *,
    name: str | None = None,
    ranks: Collection[int] | None = None,
) -> Written:
    """Where the trace was written and what it holds.

    `timeline` is one, or several by name (`{"predicted": t1, "measured": t2}`), which are shown
    one below the other, each from time 0. name: shown above it all; left out, the schedule's.
    ranks: which ranks to show, left out all. `path` ending in `.json`: Chrome's JSON, in any
    other way: Perfetto's format; `.gz` after it: compressed.

    Times are written as nanoseconds; those of a timeline without a unit as if they were
    microseconds. Fractions of nanoseconds are rounded.

    Raises: UsageError for a path that cannot be written, an unknown rank or an unknown unit.
    """
    path = Path(path)
    picture = _drawn(timeline, name, ranks)
    n = 0
    try:
        with path.open("wb") as raw, _compressed(path, raw) as file:
            for piece in _format(path).encode(picture):
                n += file.write(piece)
    except FileNotFoundError:
        raise UsageError(
            f"{path}: the folder {path.parent} does not exist; make it, or choose another path"
        ) from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    return Written(path, _size(picture, n))


def trace_size(
    timeline: Timelines,
    path: str | Path = "trace.pftrace",
    *,
    name: str | None = None,
    ranks: Collection[int] | None = None,
) -> TraceSize:
    """What `write_trace` would write with the same arguments, without writing it.

    Counts are exact; bytes (before compression) are exact for Perfetto's format, and for JSON
    estimated from a sample. `warning` says so when they are more than Perfetto's page takes.

    Raises: UsageError for an unknown rank or an unknown unit.
    """
    picture = _drawn(timeline, name, ranks)
    return _size(picture, _format(Path(path)).size(picture))


def _drawn(timeline: Timelines, name: str | None, ranks: Collection[int] | None) -> Picture:
    if isinstance(timeline, Timeline):
        name = timeline.schedule.name if name is None else name
        return draw({name: timeline}, name, ranks)
    return draw(timeline, " | ".join(timeline) if name is None else name, ranks)


def _compressed(path: Path, raw: IO[bytes]) -> AbstractContextManager[IO[bytes] | gzip.GzipFile]:
    if path.suffix != ".gz":
        return nullcontext(raw)
    # no time and no name in it: equal timelines make equal files
    return gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0)


def _format(path: Path) -> _Format:
    stem = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return _CHROME if stem.suffix.lower() == ".json" else _PERFETTO


def _size(picture: Picture, n_bytes: int) -> TraceSize:
    return TraceSize(
        slices=len(picture.slices.track),
        flows=len(picture.flows.source),
        counters=len(picture.counters.track),
        bytes=n_bytes,
    )
