"""Traces: timelines as files that the viewers of Perfetto and Chrome open."""

from __future__ import annotations

import gzip
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from hocket.errors import UsageError
from hocket.timeline import Timeline
from hocket.trace.picture import Picture, draw, overlaps

__all__ = [
    "LIMIT", "Encoder", "TraceSize", "Written", "draw", "overlaps", "picture_of", "size_of",
    "write",
]  # fmt: skip

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


class Encoder(Protocol):
    """A format of traces."""

    def encode(self, picture: Picture) -> Iterator[bytes]:
        """The file, piece by piece."""
        ...

    def size(self, picture: Picture) -> int:
        """The bytes of the file, without making it."""
        ...


def picture_of(
    timeline: Timelines, name: str | None = None, ranks: Collection[int] | None = None
) -> Picture:
    """What a trace of a timeline shows, or of several by name; name: above it all."""
    if isinstance(timeline, Timeline):
        name = timeline.schedule.name if name is None else name
        return draw({name: timeline}, name, ranks)
    return draw(timeline, " | ".join(timeline) if name is None else name, ranks)


def write(picture: Picture, path: Path, encoder: Encoder) -> Written:
    """Where the picture was written, and what it holds; `.gz` as the last ending compresses it.

    Raises: UsageError where the file cannot be written.
    """
    n = 0
    try:
        with path.open("wb") as raw, _compressed(path, raw) as file:
            for piece in encoder.encode(picture):
                n += file.write(piece)
    except FileNotFoundError:
        raise UsageError(
            f"{path}: the folder {path.parent} does not exist; make it, or choose another path"
        ) from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    return Written(path, size_of(picture, n))


def _compressed(path: Path, raw: IO[bytes]) -> AbstractContextManager[IO[bytes] | gzip.GzipFile]:
    if path.suffix != ".gz":
        return nullcontext(raw)
    # no time and no name in it: equal timelines make equal files
    return gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0)


def size_of(picture: Picture, n_bytes: int) -> TraceSize:
    """What a picture holds, written in this many bytes."""
    return TraceSize(
        slices=len(picture.slices.track),
        flows=len(picture.flows.source),
        counters=len(picture.counters.track),
        bytes=n_bytes,
    )
