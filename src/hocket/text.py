"""The `.sched` text form and JSON, in and out. Reading never guesses: every fault is told.

Imports ir and errors, nothing else of hocket.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hocket.errors import ScheduleError, TextError
from hocket.ir import MAX_STAGE, Action, Kind, Placement, Queue, Schedule

HEADER = "# hocket 1"
_ACTION = re.compile(r"(\d+)([A-Z_]+?)(\d+)")
_QUEUE = re.compile(r"(\d+)(?:/([A-Za-z][\w-]*))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def dumps(schedule: Schedule) -> str:
    """The schedule as `.sched` text; `loads(dumps(s)) == s`."""
    placement = schedule.placement
    out = [HEADER, f"name {schedule.name}"]
    if placement.slices > 1:
        out.append(f"slices {placement.slices}")
    for k, path in enumerate(placement.paths):
        line = f"path {k}: {' '.join(map(str, path))}"
        mbs = [mb for mb, on in enumerate(placement.path_of) if on == k]
        out.append(line if len(placement.paths) == 1 else f"{line} | {_ranges(mbs)}".rstrip())
    for queue in schedule.queues:
        out.append(f"{queue}: {' '.join(map(str, schedule.line(queue)))}".rstrip())
    return "\n".join(out) + "\n"


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3,8` for 0 1 2 3 8."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def load(path: str | Path) -> Schedule:
    """The schedule in a `.sched` file.

    Raises: TextError with every fault, OSError when the file cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise TextError(str(path), [(1, "this is not UTF-8 text")]) from None
    return loads(text, source=str(path))


def loads(text: str, *, source: str = "<text>") -> Schedule:
    """The schedule that a `.sched` text describes.

    Raises: TextError with every fault: line, token, what was expected.
    """
    reader = _Reader(source)
    lines = text.splitlines()
    if not lines or lines[0].strip() != HEADER:
        found = lines[0].strip() if lines else ""
        reader.fault(1, f"expected the first line to be {HEADER!r}, found {found!r}")
    for number, raw in enumerate(lines, 1):
        line = raw.partition("#")[0].strip()
        if line:
            reader.line(number, line)
    return reader.schedule(len(lines))


class _Reader:
    """Collects what the lines say, and every fault."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.faults: list[tuple[int, str]] = []
        self.name: str | None = None
        self.slices: int | None = None
        self.paths: dict[int, tuple[int, list[Queue], list[int] | None]] = {}
        self.order: dict[Queue, tuple[int, list[list[Action]]]] = {}

    def fault(self, line: int, text: str) -> None:
        self.faults.append((line, text))

    def line(self, number: int, line: str) -> None:
        word, colon, rest = line.partition(":")
        if line.split()[0] == "name":
            self._name(number, line)
        elif line.split()[0] == "slices":
            self._slices(number, line)
        elif word.split()[0] == "path":
            self._path(number, word, colon, rest)
        elif not colon:
            self.fault(
                number,
                f"expected 'name', 'slices', 'path k:' or 'queue:', found {line.split()[0]!r}",
            )
        else:
            self._queue(number, word.strip(), rest)

    def _name(self, number: int, line: str) -> None:
        words = line.split()
        if len(words) != 2:
            self.fault(number, f"expected one word after 'name', found {len(words) - 1}")
        elif self.name is not None:
            self.fault(number, f"a second name {words[1]!r}; the schedule is named {self.name!r}")
        else:
            self.name = words[1]

    def _slices(self, number: int, line: str) -> None:
        words = line.split()
        if len(words) != 2 or not words[1].isdecimal() or int(words[1]) < 1:
            self.fault(number, f"expected a number of slices after 'slices', found {line!r}")
        elif self.slices is not None:
            self.fault(number, "a second line 'slices'")
        else:
            self.slices = int(words[1])

    def _path(self, number: int, word: str, colon: str, rest: str) -> None:
        head = word.split()
        if not colon or len(head) != 2 or not head[1].isdecimal():
            self.fault(number, f"expected 'path k: queues', found {(word + colon).strip()!r}")
            return
        k = int(head[1])
        if k in self.paths:
            self.fault(number, f"path {k} stands twice; the first is on line {self.paths[k][0]}")
            return
        queues_text, bar, mbs_text = rest.partition("|")
        queues = [self._queue_name(number, token) for token in queues_text.split()]
        if not queues:
            self.fault(number, f"path {k} has no stages; name a queue for each stage")
        mbs = self._numbers(number, mbs_text) if bar else None
        self.paths[k] = (number, [q for q in queues if q is not None], mbs)

    def _queue_name(self, number: int, token: str) -> Queue | None:
        match = _QUEUE.fullmatch(token)
        if not match:
            self.fault(number, f"expected a queue such as 0 or 0/comm, found {token!r}")
            return None
        return Queue(int(match[1]), match[2] or "")

    def _numbers(self, number: int, text: str) -> list[int]:
        out: list[int] = []
        for token in filter(None, (t.strip() for t in text.split(","))):
            match = _RANGE.fullmatch(token)
            if not match or (match[2] and int(match[2]) < int(match[1])):
                self.fault(
                    number,
                    f"expected microbatches such as 3 or 0-3 in rising order, found {token!r}",
                )
            else:
                out += range(int(match[1]), int(match[2] or match[1]) + 1)
        return out

    def _queue(self, number: int, token: str, rest: str) -> None:
        queue = self._queue_name(number, token)
        if queue is None:
            return
        if queue in self.order:
            self.fault(
                number, f"queue {queue} stands twice; the first is on line {self.order[queue][0]}"
            )
            return
        slots = [[self._action(number, part) for part in slot.split("+")] for slot in rest.split()]
        self.order[queue] = (number, [[a for a in slot if a is not None] for slot in slots])

    def _action(self, number: int, token: str) -> Action | None:
        match = _ACTION.fullmatch(token)
        if not match or match[2] not in Kind.__members__:
            self.fault(
                number,
                f"expected an action such as 2F0 (stage, one of {' '.join(Kind.__members__)}, "
                f"microbatch), found {token!r}",
            )
            return None
        stage, mb = int(match[1]), int(match[3])
        if stage > MAX_STAGE:
            self.fault(number, f"stage {stage} in {token!r} is above the largest, {MAX_STAGE}")
            return None
        return Action(Kind[match[2]], stage, mb)

    # --- the whole ----------------------------------------------------------------------

    def schedule(self, n_lines: int) -> Schedule:
        if self.name is None:
            self.fault(n_lines or 1, "there is no line 'name ...'")
        path_of = self._path_of(n_lines)
        if self.faults:
            raise TextError(self.source, sorted(self.faults))
        assert self.name is not None
        try:
            paths = tuple(tuple(self.paths[k][1]) for k in sorted(self.paths))
            placement = Placement(paths, tuple(path_of), self.slices or 1)
        except ScheduleError as error:
            line = min(number for number, _, _ in self.paths.values())
            raise TextError(self.source, [(line, str(error))]) from None
        for queue in placement.queues:
            if queue not in self.order:
                self.fault(n_lines, f"there is no line for queue {queue}; expected '{queue}: ...'")
        if self.faults:
            raise TextError(self.source, sorted(self.faults))
        order = {queue: slots for queue, (_, slots) in self.order.items()}
        return Schedule.from_order(self.name, placement, order)

    def _path_of(self, n_lines: int) -> list[int]:
        """The path of each microbatch, from the path lines, or from the actions if there is one."""
        if not self.paths:
            self.fault(n_lines or 1, "there is no line 'path 0: ...'")
            return []
        if sorted(self.paths) != list(range(len(self.paths))):
            self.fault(
                max(n for n, _, _ in self.paths.values()),
                f"paths are numbered 0 to {len(self.paths) - 1} without gaps, "
                f"found {sorted(self.paths)}",
            )
        on: dict[int, int] = {}
        for k, (number, _, mbs) in sorted(self.paths.items()):
            if mbs is None and len(self.paths) == 1:
                mbs = list(range(self._largest_mb() + 1))
            elif mbs is None:
                self.fault(number, f"path {k} does not say which microbatches take it: '... | 0-3'")
                mbs = []
            for mb in mbs:
                if mb in on:
                    self.fault(number, f"microbatch {mb} is on path {on[mb]} and on path {k}")
                on[mb] = k
        missing = sorted(set(range(max(on, default=-1) + 1)) - set(on))
        if missing:
            self.fault(n_lines, f"microbatch {missing[0]} is on no path; they are numbered from 0")
        if not on and not self.faults:
            self.fault(n_lines, "there are no microbatches")
        return [on.get(mb, 0) for mb in range(len(on))]

    def _largest_mb(self) -> int:
        return max((a.mb for _, slots in self.order.values() for s in slots for a in s), default=-1)


# --- JSON -------------------------------------------------------------------------------------


def as_json(schedule: Schedule) -> dict[str, Any]:
    """The schedule as plain data: name, paths, path_of, order by queue."""
    return {
        "name": schedule.name,
        "paths": [[str(q) for q in path] for path in schedule.placement.paths],
        "path_of": list(schedule.placement.path_of),
        "slices": schedule.placement.slices,
        "order": {str(q): [str(s) for s in slots] for q, slots in schedule.order.items()},
    }


def from_json(data: dict[str, Any], *, source: str = "<json>") -> Schedule:
    """The schedule that `as_json` wrote.

    Raises: TextError.
    """
    try:
        by_path = [
            _ranges([mb for mb, on in enumerate(data["path_of"]) if on == k])
            for k in range(len(data["paths"]))
        ]
        lines: Iterable[str] = [
            HEADER,
            f"name {data['name']}",
            f"slices {data.get('slices', 1)}",
            *(
                f"path {k}: {' '.join(path)} | {mbs}"
                for k, (path, mbs) in enumerate(zip(data["paths"], by_path, strict=True))
            ),
            *(f"{q}: {' '.join(slots)}" for q, slots in data["order"].items()),
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise TextError(
            source, [(1, f"expected name, paths, path_of and order: {error}")]
        ) from None
    return loads("\n".join(lines), source=source)
