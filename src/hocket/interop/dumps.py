"""Dumps of a job that hangs: torch's Flight Recorder (pickle or JSON), and hocket's own recorder.

Source: the schema is that of torch.distributed.flight_recorder, version 2.x. Nothing in a pickle is
executed: only containers, numbers and text are read.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hocket.errors import TextError, UsageError
from hocket.files import read, unpacked
from hocket.ir import MAX_RANK
from hocket.text import number_up_to

# What a pickle of containers, numbers and text consists of; all else could name something or run.
_HARMLESS = re.compile(
    "PROTO|FRAME|STOP|MARK|NONE|NEWTRUE|NEWFALSE|(BIN)?(INT|FLOAT)|BININT[12]|LONG[14]?|"
    "((SHORT_)?BIN)?UNICODE|BINUNICODE8|(SHORT_)?BINBYTES|(EMPTY_)?(LIST|DICT|TUPLE)|TUPLE[123]|"
    "APPENDS?|SETITEMS?|((LONG_)?BIN)?(PUT|GET)|MEMOIZE"
)
_NAME = re.compile(r"(\w+):(\w+)(?: (\d+)(?:->|<-)(\d+))?")
_WHOLE = frozenset(("Long", "Int", "Short", "Byte", "Char", "int64", "int32", "uint8", "int16"))


class _Entry(msgspec.Struct):
    profiling_name: str
    process_group: tuple[str, str]
    record_id: int = 0
    collective_seq_id: int = 0
    p2p_seq_id: int = 0
    state: str = "scheduled"
    retired: bool = False
    is_p2p: bool = False
    input_sizes: list[list[int]] = []
    output_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    time_created_ns: int = 0
    tag: int | None = None
    part: str = ""
    frames: list[dict[str, Any]] = []


class _Group(msgspec.Struct):
    ranks: str = "[]"
    desc: str = ""


class _File(msgspec.Struct):
    entries: list[_Entry]
    version: str = ""
    pg_config: dict[str, _Group] = {}
    rank: int | None = None
    reason: str = ""
    stack: list[str] = []


class Op(NamedTuple):
    """One message or collective of a rank.

    group: the name of its process group, and what it is for. peer: of a message, the other rank
    among all. seq: of a collective, its number in its group; of a message, which one between the
    two ranks in its direction it is, among those that are not whole numbers (such carry shapes).
    """

    kind: str
    group: tuple[str, str]
    peer: int | None
    seq: int
    done: bool
    waited: bool
    sizes: tuple[tuple[int, ...], ...]
    created: int
    tag: int | None

    @property
    def is_message(self) -> bool:
        """True for a send and a recv."""
        return self.peer is not None

    @property
    def other(self) -> int:
        """The other rank of a message."""
        assert self.peer is not None
        return self.peer


class Dump(NamedTuple):
    """What one rank left. groups: the ranks of each process group, by name.

    own: by hocket's recorder, which knows what the rank waits for. reason: why it was written.
    stack: where the main thread was, innermost first. whole: no earlier operations are missing.
    """

    source: str
    rank: int
    ops: tuple[Op, ...]
    groups: dict[str, tuple[int, ...]]
    own: bool
    reason: str
    stack: tuple[str, ...]
    whole: bool


def is_dump(data: bytes) -> bool:
    """True for the beginning of a file that a recorder wrote."""
    head = data[:512].lstrip()
    return data[:1] == b"\x80" or (
        head[:1] == b"{" and any(key in head for key in (b'"comm_lib_version"', b'"hocket_dump"'))
    )


def read_dumps(paths: Sequence[str | Path]) -> list[Dump]:
    """The dumps of a job, by rank.

    Raises: TextError for what is no dump, UsageError where two are of one rank.
    """
    dumps = [_dump(unpacked(read(path), path), str(path)) for path in paths]
    ranks = [one.rank for one in dumps]
    for one in dumps:
        if ranks.count(one.rank) > 1:
            raise UsageError(
                f"{one.source}: there is another dump of rank {one.rank}; leave it out"
            )
    return sorted(dumps, key=lambda one: one.rank)


def _dump(data: bytes, source: str) -> Dump:
    what = "not a dump of a flight recorder"
    try:
        file = msgspec.convert(_content(data), _File, strict=False)
    except (msgspec.MsgspecError, ValueError, RecursionError, pickle.UnpicklingError) as error:
        raise TextError(source, [(1, f"{what}: {error}")]) from None
    except (EOFError, IndexError, KeyError, TypeError, AttributeError, MemoryError):
        raise TextError(source, [(1, f"{what}: it is damaged or cut off")]) from None
    digits = re.search(r"(\d+)\D*$", Path(source).name.removesuffix(".json"))
    rank = file.rank
    if rank is None and digits:
        rank = number_up_to(digits[1], MAX_RANK)
    if rank is None:
        raise TextError(source, [(1, "no rank: name the file like nccl_trace_rank_3")])
    groups = {}
    for name, group in file.pg_config.items():
        if not re.fullmatch(r"\[[\d, ]*\]", group.ranks):
            raise TextError(
                source, [(1, f"{what}: the ranks of group {name!r} are {group.ranks!r}")]
            )
        groups[name] = tuple(sorted({int(x) for x in re.findall(r"\d+", group.ranks)}))
    ops = [*_ops(file.entries, source, groups)]
    whole = not file.entries or min(e.record_id for e in file.entries) == 0
    own = file.rank is not None
    return Dump(source, rank, tuple(ops), groups, own, file.reason, tuple(file.stack), whole)


def _content(data: bytes) -> Any:
    """The values in a file. Raises: ValueError and what damaged files bring about."""
    if data[:1] != b"\x80":
        return msgspec.json.decode(data)
    count = 0
    for count, (code, argument, _) in enumerate(pickletools.genops(data), 1):
        if not _HARMLESS.fullmatch(code.name):
            raise ValueError(
                f"it holds a pickle that would run code ({code.name}), which no recorder writes"
            )
        if "PUT" in code.name and int(argument or 0) > count:
            raise ValueError(f"it numbers {argument} values, but has only {count}")
    return _Values(io.BytesIO(data)).load()


class _Values(pickle.Unpickler):
    """Reads containers, numbers and text."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, _: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside")


def _ops(
    entries: Sequence[_Entry], source: str, groups: dict[str, tuple[int, ...]]
) -> Iterator[Op]:
    """The entries as operations, without messages that carry shapes.

    A message of hocket's own Pipeline may have several parts, one behind the other.
    """
    counts: dict[tuple[str, str, int], int] = {}
    last: dict[tuple[str, str, int], int | None] = {}
    for entry in sorted(entries, key=lambda e: e.record_id):
        match = _NAME.fullmatch(entry.profiling_name)
        if match is None:
            name = entry.profiling_name[:80]
            raise TextError(source, [(1, f"entry {entry.record_id} is {name!r}")])
        kind, peer, seq = match[2], None, entry.collective_seq_id
        if kind in ("send", "recv") and match[4] is not None:
            known = groups.get(entry.process_group[0], ())
            peer = int(match[4])
            peer = known[peer] if peer < len(known) else peer
            key = kind, entry.process_group[0], peer
            whole = not entry.part and set(entry.input_dtypes) & _WHOLE
            if whole or entry.part == "header" or (entry.part and last.get(key) == entry.tag):
                continue
            last[key] = entry.tag
            seq = counts[key] = counts.get(key, -1) + 1
        sizes = entry.input_sizes if kind != "recv" else entry.output_sizes or entry.input_sizes
        yield Op(
            kind, entry.process_group, peer, seq, entry.retired or entry.state == "completed",
            entry.state == "started", tuple(map(tuple, sizes)), entry.time_created_ns, entry.tag,
        )  # fmt: skip
