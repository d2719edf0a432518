"""The `.sched` text form and JSON, in and out. Reading never guesses: every fault is reported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hocket import limits
from hocket.deps import MESSAGES, WORK
from hocket.errors import ScheduleError, TextError
from hocket.files import read
from hocket.ir import (
    MAX_MB,
    MAX_MICROBATCHES,
    MAX_RANK,
    MAX_STAGE,
    Action,
    Kind,
    Placement,
    Queue,
    Schedule,
    is_name,
    mbs_of,
)

HEADER = "# hocket 1"
_LETTERS = " ".join(kind.name for kind in (*WORK, *MESSAGES))
_ACTION = re.compile(r"([0-9]+)([A-Z_]+?)([0-9]+)")
_QUEUE = re.compile(r"([0-9]+)(?:/([A-Za-z][A-Za-z0-9_-]*))?")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_NUMBER = re.compile(r"[0-9]+")
_ODD = re.compile(r"[\s#:|]")  # what no queue or slot of JSON may hold: it would read as more


def dumps(schedule: Schedule) -> str:
    """The schedule as `.sched` text; `loads(dumps(s)) == s`."""
    lines = (f"{q}: {' '.join(map(str, schedule.line(q)))}".rstrip() for q in schedule.queues)
    return head(schedule) + "\n".join(lines) + "\n"


def as_name(text: str) -> str:
    """A schedule's name from any text: what a name may not hold becomes a dash."""
    return re.sub(r"[\s#]+", "-", text).strip("-") or "imported"


def head(schedule: Schedule) -> str:
    """The lines of the text before those of the queues."""
    placement = schedule.placement
    out = [HEADER, f"name {schedule.name}"]
    if placement.slices > 1:
        out.append(f"slices {placement.slices}")
    for k, path in enumerate(placement.paths):
        line = f"path {k}: {' '.join(map(str, path))}"
        if len(placement.paths) > 1:
            mbs = [mb for mb, on in enumerate(placement.path_of) if on == k]
            line = f"{line} | {ranges(mbs)}".rstrip()
        elif placement.m != _largest_mb(schedule) + 1:
            line = f"{line} | {ranges(range(placement.m))}"  # the actions do not say how many
        out.append(line)
    return "\n".join(out) + "\n"


def ranges(numbers: Sequence[int]) -> str:
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

    Raises: TextError with every fault, UsageError when the file cannot be read.
    """
    try:
        text = read(path, limits.TEXT).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise TextError(str(path), [(1, "this is not UTF-8 text")]) from None
    return loads(text, source=str(path))


def loads(text: str, *, source: str = "<text>") -> Schedule:
    """The schedule that a `.sched` text describes.

    Raises: TextError with every fault: line, token, what was expected.
    """
    reader = _Reader(source)
    lines = text.removeprefix("\ufeff").removesuffix("\n").split("\n")  # \r is stripped below
    if not lines or lines[0].strip() != HEADER:
        found = lines[0].strip() if lines else ""
        reader.fault(1, f"expected the first line to be {HEADER!r}, found {found!r}")
    for number, raw in enumerate(lines, 1):
        line = raw.partition("#")[0].strip()
        if line:
            reader.line(number, line)
    return reader.schedule(len(lines))


def number_up_to(digits: str, most: int) -> int | None:
    """The number that some decimal digits write; None above the most there may be, or for others.

    int() refuses thousands of digits, and takes signs, spaces and digits of other scripts.
    """
    digits = digits.lstrip("0") or "0"
    if len(digits) > len(str(most)) or not (digits.isascii() and digits.isdigit()):
        return None
    return number if (number := int(digits)) <= most else None


_SPARSE = 1_000_000


def sparse(n_stages: int, m: int, n_actions: int) -> str | None:
    """Why so few actions are no schedule of such a size; None where they may be one.

    Each stage runs a forward of each microbatch. What is missing is otherwise the checker's to
    report, but a file of a few bytes does not make it count to millions.
    """
    if n_stages * m <= max(_SPARSE, n_actions):
        return None
    return (
        f"{n_stages} stages and microbatches 0 to {m - 1} need {n_stages * m} forwards, but there "
        f"are only {n_actions} actions; number microbatches from 0 without gaps"
    )


class _Range(NamedTuple):
    """Microbatches first to last on one path, and the line that says so."""

    first: int
    last: int
    path: int
    line: int


class _Path(NamedTuple):
    """What a line `path k: ...` says; mbs: None where it does not name microbatches."""

    line: int
    queues: list[Queue]
    mbs: list[_Range] | None


class _Reader:
    """Collects what the lines say, and every fault.

    A line that cannot be understood is reported once; what is missing because of it is not.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.faults: list[tuple[int, str]] = []
        self.name: str | None = None
        self.slices: int | None = None
        self.paths: dict[int, _Path] = {}
        self.order: dict[Queue, tuple[int, list[list[Action]]]] = {}
        self.seen: set[str] = set()  # the kinds of lines that are there, right or wrong
        self.paths_are_good = True

    def fault(self, line: int, text: str) -> None:
        self.faults.append((line, text))

    def line(self, number: int, line: str) -> None:
        before, colon, rest = line.partition(":")
        words, head = line.split(), before.split()
        if words[0] == "name":
            self._name(number, words)
        elif words[0] == "slices":
            self._slices(number, line)
        elif head and head[0] == "path":
            faults = len(self.faults)
            self._path(number, before, colon, rest)
            self.paths_are_good &= faults == len(self.faults)
        elif not colon:
            self.fault(
                number, f"expected 'name', 'slices', 'path k:' or 'queue:', found {words[0]!r}"
            )
        else:
            self._queue(number, before.strip(), rest)

    def _name(self, number: int, words: list[str]) -> None:
        self.seen.add("name")
        if len(words) != 2:
            self.fault(number, f"expected one word after 'name', found {len(words) - 1}")
        elif not is_name(words[1]):
            self.fault(number, f"expected a name of printable characters, found {words[1]!r}")
        elif self.name is not None:
            self.fault(number, f"a second name {words[1]!r}; the schedule is named {self.name!r}")
        else:
            self.name = words[1]

    def _slices(self, number: int, line: str) -> None:
        words = line.split()
        good = len(words) == 2 and _NUMBER.fullmatch(words[1])
        slices = number_up_to(words[1], MAX_MICROBATCHES) if good else None
        if not slices:
            self.fault(number, f"expected a number of slices after 'slices', found {line!r}")
        elif self.slices is not None:
            self.fault(number, "a second line 'slices'")
        else:
            self.slices = slices

    def _path(self, number: int, before: str, colon: str, rest: str) -> None:
        head = before.split()
        self.seen.add("path")
        good = colon and len(head) == 2 and _NUMBER.fullmatch(head[1])
        k = number_up_to(head[1], MAX_MICROBATCHES) if good else None
        if k is None:
            self.fault(number, f"expected 'path k: queues', found {(before + colon).strip()!r}")
            return
        if k in self.paths:
            self.fault(number, f"path {k} stands twice; the first is on line {self.paths[k].line}")
            return
        queues_text, bar, mbs_text = rest.partition("|")
        queues = [self._queue_name(number, token) for token in queues_text.split()]
        if not queues:
            self.fault(number, f"path {k} has no stages; name a queue for each stage")
        mbs = self._numbers(number, k, mbs_text) if bar else None
        self.paths[k] = _Path(number, [q for q in queues if q is not None], mbs)

    def _queue_name(self, number: int, token: str) -> Queue | None:
        match = _QUEUE.fullmatch(token)
        if not match:
            self.fault(number, f"expected a queue such as 0 or 0/comm, found {token!r}")
            return None
        rank = number_up_to(match[1], MAX_RANK)
        if rank is None:
            self.fault(number, f"rank {match[1]} in {token!r} is above the largest, {MAX_RANK}")
            return None
        return Queue(rank, match[2] or "")

    def _numbers(self, number: int, path: int, text: str) -> list[_Range]:
        out: list[_Range] = []
        for token in filter(None, (t.strip() for t in text.split(","))):
            match, most = _RANGE.fullmatch(token), MAX_MICROBATCHES - 1
            first = number_up_to(match[1], most) if match else 0
            last = number_up_to(match[2], most) if match and match[2] else first
            if first is None or last is None:
                large = token.split("-")[first is not None]
                self.fault(number, f"microbatch {large} is above the largest, {most}")
            elif not match or last < first:
                self.fault(
                    number,
                    f"expected microbatches such as 3 or 0-3 in rising order, found {token!r}",
                )
            else:
                out.append(_Range(first, last, path, number))
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
                f"expected an action such as 2F0 (stage, one of {_LETTERS}, "
                f"microbatch), found {token!r}",
            )
            return None
        stage, mb = number_up_to(match[1], MAX_STAGE), number_up_to(match[3], MAX_MB)
        if stage is None:
            self.fault(number, f"stage {match[1]} in {token!r} is above the largest, {MAX_STAGE}")
            return None
        if mb is None:
            self.fault(number, f"microbatch {match[3]} in {token!r} is above the largest, {MAX_MB}")
            return None
        return Action(Kind[match[2]], stage, mb)

    # --- the whole ----------------------------------------------------------------------

    def schedule(self, n_lines: int) -> Schedule:
        if "name" not in self.seen:
            self.fault(n_lines, "there is no line 'name ...'")
        if "path" not in self.seen:
            self.fault(n_lines, "there is no line 'path 0: ...'")
        path_of = self._path_of(n_lines) if self.paths and self.paths_are_good else ()
        if path_of and self._is_sparse(len(path_of), n_lines):
            path_of = ()
        placement = None
        if path_of:
            try:
                paths = tuple(tuple(self.paths[k].queues) for k in sorted(self.paths))
                placement = Placement(paths, path_of, self.slices or 1)
            except ScheduleError as error:
                self.fault(min(path.line for path in self.paths.values()), str(error))
        if placement is not None:
            self._match_queues(placement, n_lines)
        if self.faults:
            raise TextError(self.source, sorted(self.faults))
        assert placement is not None and self.name is not None
        order = {queue: slots for queue, (_, slots) in self.order.items()}
        return Schedule.from_order(self.name, placement, order)

    def _is_sparse(self, m: int, n_lines: int) -> bool:
        """Whether actions are far fewer than so many microbatches need; a fault then."""
        n_actions = sum(len(slot) for _, slots in self.order.values() for slot in slots)
        why = sparse(max(len(path.queues) for path in self.paths.values()), m, n_actions)
        if why:
            self.fault(n_lines, why)
        return why is not None

    def _match_queues(self, placement: Placement, n_lines: int) -> None:
        """Every queue of the paths has a line, and every line per rank of the paths."""
        if not self.faults:  # a line that is missing may be one that could not be read
            for queue in placement.queues:
                if queue not in self.order:
                    self.fault(
                        n_lines, f"there is no line for queue {queue}; expected '{queue}: ...'"
                    )
        for queue, (number, _) in self.order.items():
            if queue.rank >= placement.p:
                self.fault(
                    number,
                    f"queue {queue} is on no path; the paths take ranks 0 to {placement.p - 1}",
                )

    def _path_of(self, n_lines: int) -> tuple[int, ...]:
        """The path of each microbatch, from the path lines, or from the actions if there is one."""
        if sorted(self.paths) != list(range(len(self.paths))):
            self.fault(
                max(path.line for path in self.paths.values()),
                f"paths are numbered 0 to {len(self.paths) - 1} without gaps, "
                f"found {sorted(self.paths)}",
            )
            return ()
        if len(self.paths) == 1 and self.paths[0].mbs is None:
            return self._from_actions(n_lines)
        ranges: list[_Range] = []
        for k, path in sorted(self.paths.items()):
            if path.mbs is None:
                self.fault(
                    path.line, f"path {k} does not say which microbatches take it: '... | 0-3'"
                )
            ranges += path.mbs or ()
        if any(path.mbs is None for path in self.paths.values()):
            return ()
        return self._laid_out(sorted(ranges), n_lines)

    def _from_actions(self, n_lines: int) -> tuple[int, ...]:
        if self.faults:  # among what could not be read may be the last microbatch
            return ()
        line, mb = max(
            ((number, a.mb) for number, slots in self.order.values() for s in slots for a in s),
            key=lambda found: found[1],
            default=(n_lines, -1),
        )
        if mb >= MAX_MICROBATCHES:
            self.fault(line, f"microbatch {mb} is above the largest, {MAX_MICROBATCHES - 1}")
        elif mb < 0:
            self.fault(n_lines, "there are no microbatches")
        return (0,) * (mb + 1) if mb < MAX_MICROBATCHES else ()

    def _laid_out(self, ranges: list[_Range], n_lines: int) -> tuple[int, ...]:
        """The path of each microbatch: rising ranges, which have to meet without gap or overlap."""
        path_of: list[int] = []
        good = True
        before = _Range(0, -1, 0, 0)
        for one in ranges:
            if one.first <= before.last:
                good = False
                where = (
                    f"is on path {before.path} and on path {one.path}"
                    if before.path != one.path
                    else f"stands twice on path {one.path}"
                )
                self.fault(max(before.line, one.line), f"microbatch {one.first} {where}")
            elif one.first > before.last + 1 and good:
                good = False
                self.fault(
                    n_lines,
                    f"microbatch {before.last + 1} is on no path; they are numbered from 0",
                )
            elif good:
                path_of += [one.path] * (one.last - one.first + 1)
            before = max(before, one, key=lambda r: r.last)
        if not ranges:
            self.fault(n_lines, "there are no microbatches")
        return tuple(path_of) if good else ()


def _largest_mb(schedule: Schedule) -> int:
    return int(mbs_of(schedule.codes).max(initial=-1))


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
        name, paths, order = data["name"], data["paths"], data["order"]
        path_of, slices = list(data["path_of"]), data.get("slices", 1)
        by_path: list[list[int]] = [[] for _ in paths]
        for mb, k in enumerate(path_of):
            if type(k) is not int or not 0 <= k < len(by_path):
                raise TypeError(f"microbatch {mb} is on path {k!r}")
            by_path[k].append(mb)
        words = [*order, *(q for path in paths for q in path)]
        words += [s for slots in order.values() for s in slots]
        odd = [w for w in words if not isinstance(w, str) or _ODD.search(w)]
        odd += [name] * (not is_name(name)) + [slices] * (type(slices) is not int)
        if odd:
            raise TypeError(f"{odd[0]!r} cannot be read")
        lines: Iterable[str] = [
            HEADER,
            f"name {name}",
            f"slices {slices}",
            *(
                f"path {k}: {' '.join(path)} | {ranges(mbs)}"
                for k, (path, mbs) in enumerate(zip(paths, by_path, strict=True))
            ),
            *(f"{q}: {' '.join(slots)}" for q, slots in order.items()),
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise TextError(
            source, [(1, f"expected name, paths, path_of and order: {error}")]
        ) from None
    return loads("\n".join(lines), source=source)
