"""A rank's queues at the same time: one thread for each, which waits for what the others make.

For ranks that exchange no messages of the pipeline (p = 1): what their stages send, such as the
all-to-all of experts, is the stages' own. Imports execute, program.
"""

from __future__ import annotations

import threading
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import torch

from hocket.errors import RunError
from hocket.runtime.execute import Execution, Parts
from hocket.runtime.program import Entry, Program, Role


class _Unit(NamedTuple):
    """One action: the entries that belong to it, and the actions of other queues it waits for."""

    action: int
    entries: tuple[int, ...]
    needs: tuple[int, ...]


class QueueExecution(Execution):
    """Runs every queue of the rank in a thread of its own, each in its own order.

    Raises: RunError where the program holds messages between ranks.
    """

    def __init__(self, program: Program, parts: Parts, wire: Any = None) -> None:
        super().__init__(program, parts)
        if any(entry.role not in (Role.RUN, Role.HAND) for entry in program.entries):
            raise RunError("queues run at the same time only on ranks without messages: give p=1")
        self.lines = _lines(program)
        self._changed = threading.Condition()
        self._done: set[int] = set()
        self._failed: list[tuple[int, BaseException]] = []

    def run(self) -> None:
        """Runs all queues; the first one in this thread. An exception in any of them ends all."""
        n = len(self.calls)
        self.begins, self.ends = [0] * n, [0] * n
        self.times, self._done, self._failed = [], set(), []
        self.start = perf_counter_ns()
        mode = torch.is_grad_enabled()
        threads = [
            threading.Thread(target=self._line, args=(line, mode), daemon=True)
            for line in self.lines[1:]
        ]
        for thread in threads:
            thread.start()
        for line in self.lines[:1]:
            self._line(line, mode)
        for thread in threads:
            thread.join()
        if self._failed:
            raise self._failed[0][1]

    def _line(self, line: list[_Unit], mode: bool) -> None:
        """One queue, in order; the mode of gradients belongs to a thread."""
        with torch.set_grad_enabled(mode):
            for unit in line:
                with self._changed:
                    self._changed.wait_for(lambda u=unit: self._ready(u))
                    if self._failed:
                        return
                for i in unit.entries:
                    if not self._entry(i):
                        return
                with self._changed:
                    self._done.add(unit.action)
                    self._changed.notify_all()

    def _ready(self, unit: _Unit) -> bool:
        return bool(self._failed) or self._done.issuperset(unit.needs)

    def _entry(self, i: int) -> bool:
        call, mb = self.calls[i]
        self.begins[i] = perf_counter_ns()
        try:
            call(mb)
        except BaseException as error:
            with self._changed:
                self._failed.append((i, error))
                self._changed.notify_all()
            return False
        self.ends[i] = perf_counter_ns()
        self.times.append(self.ends[i])
        return True

    @property
    def spans(self) -> np.ndarray:
        """Start and end of each entry, nanoseconds, `[entry, 2]`."""
        return np.array([self.begins, self.ends], dtype=np.int64).T

    @property
    def current(self) -> Entry | None:
        """The entry that failed, or the first that has not ended."""
        if self._failed:
            return self.program.entries[self._failed[0][0]]
        left = (i for i, end in enumerate(self.ends) if not end)
        return next((self.program.entries[i] for i in left), None)


def _lines(program: Program) -> list[list[_Unit]]:
    """The units of each queue of the rank, in its order."""
    s = program.schedule
    queue = s.queue_of_slot[s.slot_of_action].tolist()
    entries: dict[int, list[int]] = {}
    for i, entry in enumerate(program.entries):
        entries.setdefault(entry.action, []).append(i)
    lines: dict[int, list[_Unit]] = {
        q: [] for q, name in enumerate(s.queues) if name.rank == program.rank
    }
    for action, own in entries.items():
        others = [a for a in program.local.get(action, ()) if queue[a] != queue[action]]
        lines[queue[action]].append(_Unit(action, tuple(own), tuple(others)))
    return [line for line in lines.values() if line]
