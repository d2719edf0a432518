"""A rank's queues at the same time: one thread for each, which waits for what the others make."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from time import monotonic, perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import torch

from hocket.deps import FORWARDS, SIZED_BY
from hocket.errors import RunError
from hocket.graph import graph
from hocket.ir import Schedule
from hocket.runtime.execute import Call, Execution, Parts
from hocket.runtime.program import Entry, Program, Role

PATIENCE = 2.0  # seconds that the other threads get to end once one has failed


def _locked(lock: threading.Lock, call: Call, mb: int) -> None:
    with lock:
        call(mb)


class _Unit(NamedTuple):
    """Entries that run together, and what they need.

    action: what is marked as done after them; `needs` are actions of the rank's other queues,
    `awaited` says that one of those needs this one.
    """

    action: int
    entries: list[int]
    needs: tuple[int, ...]
    awaited: bool


class OutOfTurn(Execution):
    """Entries that may run in another order or at the same time: each has a start of its own."""

    def __init__(self, program: Program, parts: Parts, wire: Any = None) -> None:
        super().__init__(waiting(program), parts, wire)
        self._clear()

    def _clear(self) -> None:
        n = len(self.calls)
        self.begins, self.ends, self.times = [0] * n, [0] * n, []
        self.start = perf_counter_ns()

    def _entry(self, i: int) -> None:
        call, mb = self.calls[i]
        self.begins[i] = perf_counter_ns()
        call(mb)
        self.ends[i] = end = perf_counter_ns()
        self.times.append(end)

    @property
    def spans(self) -> np.ndarray:
        """Start and end of each entry, nanoseconds, `[entry, 2]`."""
        return np.array([self.begins, self.ends], dtype=np.int64).T

    @property
    def _running(self) -> list[Entry]:
        """The entries that have begun and not ended."""
        times = zip(self.program.entries, self.begins, self.ends, strict=True)
        return [entry for entry, begin, end in times if begin and not end]


class QueueExecution(OutOfTurn):
    """Runs every queue of the rank in a thread of its own, each in its own order.

    A send or receive runs in the thread of the queue on which it stands. Backwards of stages on
    two queues that hold one parameter, the same object, take turns. Threads get the modes of
    gradients and autocast of the caller; everything else that belongs to a thread, such as hooks
    of saved tensors, stays with it.

    Raises: RunError for a stage on two queues of its rank; where a transport without tags would
    have to take messages from two queues.
    """

    def __init__(self, program: Program, parts: Parts, wire: Any = None) -> None:
        super().__init__(program, parts, wire)
        found = _stage_on_two(program.schedule)
        if found is not None:
            raise RunError(
                f"stage {found[1]} of rank {found[0]} is on the queues {found[2]}, and a stage "
                'runs in one thread; give dispatch="receive"'
            )
        self.lines = _lines(self.program)
        self._take_turns()
        if wire is not None and not wire.tagged:
            _refuse_mixed(self.program)
        self._changed = threading.Condition()
        self._done: set[int] = set()
        self._left = 0
        self._failed: list[tuple[Entry | None, BaseException]] = []
        self._threads: list[threading.Thread] = []

    def _take_turns(self) -> None:
        """Puts one lock around the backwards that may add to the gradient of one parameter."""
        placement, homes = self.program.schedule.placement, dict[int, set[str]]()
        held = {s: {id(p) for p in x.module.parameters()} for s, x in self.parts.stages.items()}
        for path in placement.paths:
            for stage, queue in enumerate(path):
                for p in held.get(stage, ()) if queue.rank == self.program.rank else ():
                    homes.setdefault(p, set()).add(queue.stream)
        shared = {p for p, streams in homes.items() if len(streams) > 1}
        lock = threading.Lock()
        for i, entry in enumerate(self.program.entries):
            kind, stage, mb = self.program.action(entry)
            if entry.role is Role.RUN and kind not in FORWARDS and held[stage] & shared:
                self.calls[i] = (partial(_locked, lock, self.calls[i][0]), mb)

    def run(self) -> None:
        """Runs all queues; returns when all are through, or raises what the first failed with.

        After a failure the others may still wait for a message: break the connections, then `end`.
        """
        self._done, self._failed, self._threads = set(), [], []
        self._left = len(self.lines)
        self._clear()
        if len(self.lines) == 1:
            self._line(0)
        elif self.lines:
            self._side_by_side()
        if self._failed:
            raise self._failed[0][1]

    def _side_by_side(self) -> None:
        modes = _modes()

        def thread(line: int) -> None:
            with modes():
                self._line(line)

        self._threads = [
            threading.Thread(target=thread, args=(q,), name=f"hocket-queue-{q}", daemon=True)
            for q in range(len(self.lines))
        ]
        for t in self._threads:
            t.start()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._failed or not self._left)
        except BaseException as error:  # Ctrl-C
            self._fail(None, error)
        if not self._failed:
            self.end()

    def end(self) -> None:
        """Waits for the threads to end, some seconds at most."""
        until = monotonic() + PATIENCE
        for thread in self._threads:
            thread.join(max(until - monotonic(), 0.0))

    def _line(self, line: int) -> None:
        """One queue, in order, up to the first failure anywhere."""
        i = None
        try:
            with self._stream(line):
                for unit in self.lines[line]:
                    if self._failed or not self._met(unit.needs):
                        return
                    for i in unit.entries:
                        self._entry(i)
                    i = None
                    if unit.awaited:
                        self._mark(unit.action)
        except BaseException as error:
            self._fail(i, error)
            return
        with self._changed:
            self._left -= 1
            self._changed.notify_all()

    @contextmanager
    def _stream(self, line: int) -> Generator[None]:
        """What is around all that one queue runs."""
        yield

    def _met(self, needs: tuple[int, ...]) -> bool:
        """Waits until these actions are done; False where they never will be."""
        if needs:
            with self._changed:
                self._changed.wait_for(lambda: self._failed or self._done.issuperset(needs))
        return not self._failed

    def _mark(self, action: int) -> None:
        with self._changed:
            self._done.add(action)
            self._changed.notify_all()

    def _fail(self, i: int | None, error: BaseException) -> None:
        with self._changed:
            self._failed.append((None if i is None else self.program.entries[i], error))
            self._changed.notify_all()

    @property
    def current(self) -> Entry | None:
        """The entry that failed; else one that runs now, rather than one that waits."""
        if self._failed:
            return self._failed[0][0]
        waits = (Role.WAIT, Role.RELEASE)
        return min(self._running, key=lambda entry: entry.role in waits, default=None)


def waiting(program: Program) -> Program:
    """The program with every send waited for.

    What a program says of sends that are surely complete holds where all ranks run theirs in order.
    """
    entries = tuple(
        e._replace(role=Role.RELEASE) if e.role is Role.FREE else e for e in program.entries
    )
    return replace(program, entries=entries)


def side_by_side(schedule: Schedule) -> bool:
    """True when some rank has several queues, and a thread each can run them all."""
    several = len(schedule.queues) > len({queue.rank for queue in schedule.queues})
    return several and _stage_on_two(schedule) is None


def _stage_on_two(schedule: Schedule) -> tuple[int, int, str] | None:
    """A rank, a stage and the queues of the rank that this stage is on, if there are several."""
    home: dict[tuple[int, int], set[str]] = {}
    for path in schedule.placement.paths:
        for stage, queue in enumerate(path):
            home.setdefault((queue.rank, stage), set()).add(str(queue))
    several = (item for item in home.items() if len(item[1]) > 1)
    return next(((r, s, " and ".join(sorted(names))) for (r, s), names in several), None)


def _lines(program: Program) -> list[list[_Unit]]:
    """The units of each queue of the rank, in its order.

    A wait belongs to the computation that it precedes, a release to what comes next on its
    queue. A receive is posted where it stands on its queue: among several queues, the program has
    it where its message comes.
    """
    s = program.schedule
    queue = s.queue_of_slot[s.slot_of_action].tolist()
    own = [q for q, name in enumerate(s.queues) if name.rank == program.rank]
    needs = _needs(program, queue)
    awaited = {a for found in needs.values() for a in found}
    lines: dict[int, list[_Unit]] = {q: [] for q in own}
    posts: dict[int, list[_Unit]] = {q: [] for q in own}
    releases: dict[int, list[int]] = {q: [] for q in own}
    waits: list[int] = []
    for i, (role, action) in enumerate(program.entries):
        q = queue[action]
        if role is Role.WAIT:
            waits.append(i)
        elif role is Role.RELEASE:
            releases[q].append(i)
        elif role is Role.HAND:
            lines[q][-1].entries.append(i)
        else:
            before, waits = (waits, []) if role is Role.RUN else ([], waits)
            if role is not Role.POST:
                before, releases[q] = before + releases[q], []
            unit = _Unit(action, [*before, i], tuple(needs.get(action, ())), action in awaited)
            (posts if role is Role.POST else lines)[q].append(unit)
    made = []
    for q in own:
        end = [_Unit(lines[q][-1].action, releases[q], (), awaited=False)] if releases[q] else []
        made.append(_posted([*lines[q], *end], posts[q], s.slot_of_action.tolist()))
    return [line for line in made if line]


def _posted(line: list[_Unit], posts: list[_Unit], slot: list[int]) -> list[_Unit]:
    """The units of a queue with its receives where they stand on it."""
    out: list[_Unit] = []
    left = sorted(posts, key=lambda unit: -slot[unit.action])
    for unit in line:
        while left and slot[left[-1].action] < slot[unit.action]:
            out.append(left.pop())
        out.append(unit)
    return out + left[::-1]


def _needs(program: Program, queue: list[int]) -> dict[int, list[int]]:
    """For each action of the rank what it needs from the rank's other queues."""
    g, s = graph(program.schedule), program.schedule
    rank_of = s.rank_of_queue.tolist()
    pairs = list(zip(g.target.tolist(), g.source.tolist(), strict=True))
    pairs += _sizes(program)
    out: dict[int, list[int]] = {}
    for action, source in pairs:
        here, there = queue[action], queue[source]
        if here != there and rank_of[here] == rank_of[there] == program.rank:
            out.setdefault(action, []).append(source)
    return out


def _sizes(program: Program) -> list[tuple[int, int]]:
    """Each receive with the send that says how large its message is."""
    at = {program.action(e): e.action for e in program.entries if e.role in (Role.SEND, Role.POST)}
    sized = {a: a._replace(kind=SIZED_BY[a.kind]) for a in at if a.kind in SIZED_BY}
    return [(at[receive], at[send]) for receive, send in sized.items() if send in at]


def _refuse_mixed(program: Program) -> None:
    """Raises RunError where messages of one direction between two ranks stand on two queues."""
    s = program.schedule
    seen: dict[tuple[bool, int], set[str]] = {}
    for role, action in program.entries:
        if role in (Role.SEND, Role.POST):
            name = str(s.queues[s.queue_of_slot[s.slot_of_action[action]]])
            seen.setdefault((role is Role.SEND, program.peer[action]), set()).add(name)
    for (sends, peer), names in seen.items():
        if len(names) > 1:
            way = "to" if sends else "from"
            raise RunError(
                f"the messages {way} rank {peer} stand on the queues {' and '.join(sorted(names))}"
                '; NCCL tells them apart by their order only, so give dispatch="receive"'
            )


def _modes() -> Callable[[], ExitStack]:
    """Enters, in another thread, the modes of gradients and autocast that this one has now."""
    grad, cached = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]

    def enter() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind, dtype in casts:
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
        return stack

    return enter
