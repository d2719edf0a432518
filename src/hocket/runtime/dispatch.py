"""The ways to dispatch an order, and two of them: gate before the action, or take what is ready.

The plain way is `Execution.run`: a receive is waited for where its consumer stands. Here, threads
wait for the messages and mark them as arrived.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from hocket.deps import EFFECTS
from hocket.errors import UsageError
from hocket.ir import Schedule
from hocket.runtime.execute import Execution, Parts
from hocket.runtime.program import Entry, Program, Role
from hocket.runtime.queues import OutOfTurn, QueueExecution, side_by_side
from hocket.runtime.transport import Wire

WINDOW = 8  # computing actions that the experiment looks ahead


class Ticket:
    """A receive that a thread waits for."""

    __slots__ = ("done", "error", "work")

    def __init__(self, work: Any) -> None:
        self.work, self.done, self.error = work, False, None


class WatchedWire(Wire):
    """A wire whose receives are waited for by threads; gloo cannot be polled.

    A thread for each receive that is open at a time: messages may come in another order than they
    were posted in.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.changed = threading.Condition()
        self._tickets: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._open = 0

    def recv(self, tensors: list[Any], peer: int, tag: int) -> Ticket:
        """Posts a receive and hands it to a thread."""
        ticket = Ticket(self.group.recv(tensors, peer, tag))
        with self.changed:
            self._open += 1
            if self._open > len(self._threads):
                self._threads.append(threading.Thread(target=self._watch, daemon=True))
                self._threads[-1].start()
        self._tickets.put(ticket)
        return ticket

    def _watch(self) -> None:
        while (ticket := self._tickets.get()) is not None:
            try:
                ticket.work.wait(self.limit)
            except RuntimeError as error:
                ticket.error = error
            with self.changed:
                ticket.done = True
                self._open -= 1
                self.changed.notify_all()

    def wait(self, work: Any) -> None:
        """Gates until a receive is marked; a send is waited for as ever."""
        if not isinstance(work, Ticket):
            super().wait(work)
            return
        with self.changed:
            self.changed.wait_for(lambda: work.done)
        if work.error is not None:
            raise work.error

    def close(self) -> None:
        """Ends the threads; one that waits for a message that does not come is left."""
        for _ in self._threads:
            self._tickets.put(None)
        for thread in self._threads:
            thread.join(timeout=0.1)
        super().close()


class Unit(NamedTuple):
    """A computing action with all that belongs to it."""

    needs: frozenset[int]  # units of the same rank
    posts: list[int]  # entries, as are the next two
    waits: list[int]
    entries: list[int]  # that run together: waits, the action, what it sends and hands on
    flight: int  # change of the number of microbatches in flight


class ReadyExecution(OutOfTurn):
    """Runs whichever action is ready, the earliest in the order first.

    Never holds more microbatches in flight than the static order does at its peak: a forward may
    only be drawn forward where the order between leaves room. The order's next action is always
    allowed, so this cannot deadlock where the order cannot. Not reproducible.
    """

    def __init__(self, program: Program, parts: Parts, wire: WatchedWire | None) -> None:
        super().__init__(program, parts, wire)
        self.watched = wire
        self.units, self.rest = _units(self.program)
        levels = np.cumsum([u.flight for u in self.units])
        self.cap = int(levels.max()) if len(levels) else 0

    def run(self) -> None:
        """Runs every entry, actions out of order."""
        self._clear()
        todo, done, posted = list(range(len(self.units))), set[int](), set[int]()
        flight = 0
        while todo:
            for u in todo[:WINDOW]:
                if u not in posted and self.units[u].needs <= done:
                    posted.add(u)
                    self._do(self.units[u].posts)
            u = self._next(todo, done, posted, flight)
            unit = self.units[u]
            self._do(unit.entries)
            todo.remove(u)
            done.add(u)
            flight += unit.flight
        self._do(self.rest)

    def _do(self, entries: list[int]) -> None:
        for i in entries:
            self._entry(i)

    @property
    def current(self) -> Entry | None:
        """The entry that runs now, or that failed."""
        return next(iter(self._running), None)

    def _next(self, todo: list[int], done: set[int], posted: set[int], flight: int) -> int:
        """The first ready unit; waits for a message where there is none."""
        if self.watched is None:
            return todo[0]
        until = monotonic() + self.watched.limit.total_seconds()
        with self.watched.changed:
            while True:
                level = flight
                peak = 0
                for u in todo[:WINDOW]:
                    unit = self.units[u]
                    first = u == todo[0]
                    fits = first or unit.flight <= 0 or max(peak, flight) + unit.flight <= self.cap
                    if fits and u in posted and unit.needs <= done and self._here(unit):
                        return u
                    level += unit.flight
                    peak = max(peak, level)
                if not self.watched.changed.wait(until - monotonic()) and monotonic() >= until:
                    return todo[0]  # its wait tells what is missing

    def _here(self, unit: Unit) -> bool:
        for i in unit.waits:
            action = self.program.action(self.program.entries[i])
            *_, works = self.parts.boundary(action).posted[action.mb]
            if not all(work.done for work in works):
                return False
        return True


def _units(program: Program) -> tuple[list[Unit], list[int]]:
    """The units of a program, and what comes after the last one: all sends are waited for."""
    units: list[Unit] = []
    unit_of: dict[int, int] = {}
    post_of: dict[int, int] = {}
    waits: list[int] = []
    rest: list[int] = []
    for i, entry in enumerate(program.entries):
        role, action = entry
        if role is Role.POST:
            post_of[action] = i
        elif role is Role.WAIT:
            waits.append(i)
        elif role is Role.RELEASE:
            rest.append(i)
        elif role is Role.RUN:
            needs = frozenset(unit_of[a] for a in program.local.get(action, ()))
            posts = [post_of[program.entries[w].action] for w in waits]
            took, freed = EFFECTS[program.action(entry).kind].of({"in_flight": 1})
            unit_of[action] = len(units)
            units.append(Unit(needs, posts, waits, [*waits, i], took - freed))
            waits = []
        else:
            units[-1].entries.append(i)
    return units, rest


DISPATCH: dict[str, tuple[type[Wire], Callable[[Program, Parts, Any], Execution]]] = {
    "receive": (Wire, Execution),
    "gate": (WatchedWire, Execution),
    "ready": (WatchedWire, ReadyExecution),
    "queues": (Wire, QueueExecution),
}
"""Name of a way to dispatch: the wire and the execution it uses."""


def chosen(dispatch: str | None, schedule: Schedule) -> str:
    """The way to dispatch: this one, or where none is asked for the usual one of the schedule.

    Raises: UsageError for a name that is none.
    """
    if dispatch is None:
        return "queues" if side_by_side(schedule) else "receive"
    if dispatch not in DISPATCH:
        raise UsageError(f"there is no dispatch {dispatch!r}; choose from {', '.join(DISPATCH)}")
    return dispatch
