"""Many orders of one problem, timed together under its memory limit.

An order says in which sequence each queue runs its forwards and input gradients. Weight gradients
go where they fit: into a wait that is long enough, before a forward that the limit would stop, and
after everything else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.ir import Array
from hocket.search.problem import Problem


class Outcome(NamedTuple):
    """What many orders come to: makespan and span in ticks `[order]`, where each can run.

    `lines[order, queue]` holds the nodes as run, W included, then `Trials.stop` to the end of the
    row.
    """

    makespan: Array
    span: Array
    runs: Array
    lines: Array


class Trials:
    """A problem of I and W, ready for many orders."""

    def __init__(self, asked: Problem) -> None:
        self.asked, n = asked, asked.n
        # two nodes beyond those of the problem: one that ended at 0, one that ends an order
        self.n, self.start, self.stop = n, n, n + 1
        types = asked.type_of
        self.duration = self._padded(asked.dur[types])
        self.take = self._padded(asked.take[types])
        self.change = self._padded((asked.take - asked.free)[types])
        self.weight = np.full(n + 2, self.stop)
        for i, w in zip(asked.first_half, asked.second_half, strict=True):
            self.weight[self._nodes(i)] = self._nodes(w)
        self.sources = np.full((asked.need.shape[1], n + 2), self.start)
        self.delays = np.zeros(self.sources.shape)
        for t, needs in enumerate(asked.needs.tolist()):
            for e in range(needs):
                self.sources[e, self._nodes(t)] = self._nodes(asked.need[t, e])
                self.delays[e, self._nodes(t)] = asked.delay[t, e]

    def _padded(self, values: Array) -> Array:
        return np.append(values, np.zeros(2))

    def _nodes(self, t: int) -> Array:
        return self.asked.base[t] + np.arange(self.asked.counts[t])

    def run(self, orders: Array, fit: Array | None = None) -> Outcome:
        """The outcome of every order.

        orders: nodes of forwards and input gradients, `[order, queue, place]`. fit: the share of a
        W that a wait must hold for it to go there, `[order]`, below 0 to put W before every
        forward too; without it the orders hold all W themselves, as an outcome's `lines` do.
        """
        return _Runs(self, orders, fit).outcome()


class _Runs:
    """State of many runs, one row for each queue of each order."""

    def __init__(self, trials: Trials, orders: Array, fit: Array | None) -> None:
        t, (self.n_orders, self.n_queues, width) = trials, orders.shape
        rows = self.n_orders * self.n_queues
        self.t = t
        self.order = np.full((rows, width + 1), t.stop)
        self.order[:, :width] = orders.reshape(rows, width)
        self.order = self.order.ravel()
        self.at = np.arange(rows) * (width + 1)
        self.end = np.full((self.n_orders, t.n + 2), np.inf)
        self.end[:, t.start :] = 0
        self.end = self.end.ravel()
        self.base = np.repeat(np.arange(self.n_orders) * (t.n + 2), self.n_queues)
        self.clock = np.zeros(rows)
        self.begun = np.full(rows, np.inf)
        self.flight = np.zeros(rows)
        self.room = np.tile(t.asked.cap, self.n_orders)
        self.weight = t.weight if fit is not None else np.full_like(t.weight, t.stop)
        self.fit = np.repeat(np.zeros(self.n_orders) if fit is None else fit, self.n_queues)
        self.pending = np.full(rows * (width + 1), t.stop)  # W whose I has run, oldest first
        self.head = self.at.copy()
        self.tail = self.at.copy()
        self.lines = np.full((rows, int(np.diff(t.asked.queues).max())), t.stop)
        self.n_run = np.zeros(rows, dtype=np.int64)

    def outcome(self) -> Outcome:
        while self._round():
            pass
        shape = (self.n_orders, self.n_queues)
        done = (self.order[self.at] == self.t.stop) & (self.tail == self.head)
        clock = self.clock.reshape(shape)
        return Outcome(
            makespan=clock.max(axis=1),
            span=(clock - self.begun.reshape(shape)).max(axis=1),
            runs=done.reshape(shape).all(axis=1),
            lines=self.lines.reshape(*shape, self.lines.shape[1]),
        )

    def _round(self) -> bool:
        """Lets every queue that knows its next action run it; False when none can."""
        t, item = self.t, self.order[self.at]
        ready = self.end[self.base + t.sources[0][item]] + t.delays[0][item]
        for sources, delays in zip(t.sources[1:], t.delays[1:], strict=True):
            ready = np.maximum(ready, self.end[self.base + sources[item]] + delays[item])
        takes = t.take[item] > 0
        known, full = ready < np.inf, takes & (self.flight + t.take[item] > self.room)
        weight, stop = self.pending[self.head], item == t.stop
        waits = known & (ready > self.clock)
        fits = waits & (self.clock + self.fit * t.duration[weight] <= ready)
        fits |= takes & (self.fit < 0)
        fill = (self.tail > self.head) & (full | stop | fits)
        own = known & ~full & ~stop & ~fill
        rows = np.flatnonzero(fill | own)
        if len(rows):
            taken = own[rows]
            self._advance(rows, np.where(taken, item[rows], weight[rows]), taken, ready[rows])
        return len(rows) > 0

    def _advance(self, rows: Array, item: Array, own: Array, ready: Array) -> None:
        """Runs one action on each of these rows; `own` ones stand in the order, others are W."""
        t, clock = self.t, self.clock[rows]
        start = np.where(own, np.maximum(ready, clock), clock)
        end = start + t.duration[item]
        self.clock[rows] = self.end[self.base[rows] + item] = end
        self.begun[rows] = np.minimum(self.begun[rows], start)
        self.flight[rows] += t.change[item]
        self.at[rows] += own
        self.head[rows] += ~own
        weight = self.weight[item]
        split = weight != t.stop
        queued = rows[split]
        self.pending[self.tail[queued]] = weight[split]
        self.tail[queued] += 1
        self.lines[rows, self.n_run[rows]] = item
        self.n_run[rows] += 1
