"""The steps of a run as arrays that can be replayed with parts of them changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from hocket.errors import UsageError
from hocket.graph import Graph, graph
from hocket.interop.traces.kineto import without_messages
from hocket.ir import Array, Schedule, action_of, mbs_of
from hocket.measured.clocks import Messages, no_time_travel
from hocket.recognise import first_difference
from hocket.simulator.samples import replay
from hocket.timeline import Timeline

SPREAD = 1.4826  # standard deviations per median absolute deviation, of normal numbers
OUTLIER = 8  # standard deviations


@dataclass(frozen=True)
class Steps:
    """What every slot and every message took, step by step; replayed, these give the run again.

    work, pause: `[step, slot]`, of a slot and of the idle time before it for which no message is
    to blame. delay: `[step, message]`, and waited: where a slot was seen to wait for it; of the
    others the delay is that of their link. message: of the graph's edges those between ranks.
    """

    schedule: Schedule
    unit: str
    makespans: Array
    work: Array
    pause: Array
    delay: Array
    waited: Array
    moved: dict[int, float]

    @property
    def graph(self) -> Graph:
        """What each slot waits for."""
        return graph(self.schedule)

    @cached_property
    def rank(self) -> Array:
        """The rank of each slot."""
        return self.schedule.rank_of_queue[self.schedule.queue_of_slot]

    @cached_property
    def mb(self) -> Array:
        """The microbatch of each slot, of its first action where it has several."""
        return mbs_of(self.schedule.codes[self.schedule.slots[:-1]])

    @cached_property
    def groups(self) -> list[tuple[tuple[str, ...], tuple[int, ...], int]]:
        """Slots that do the same work: kinds, stages and rank of each such group."""
        return list(dict.fromkeys(self._keys))

    @cached_property
    def group(self) -> Array:
        """The group of each slot."""
        at = {key: i for i, key in enumerate(self.groups)}
        return np.array([at[key] for key in self._keys])

    @cached_property
    def _keys(self) -> list[tuple[tuple[str, ...], tuple[int, ...], int]]:
        s, ranks = self.schedule, self.rank.tolist()
        actions = [action_of(code) for code in s.codes.tolist()]
        slots = (actions[a:b] for a, b in zip(s.slots[:-1], s.slots[1:], strict=True))
        return [
            (tuple(a.kind.name for a in slot), tuple(a.stage for a in slot), rank)
            for slot, rank in zip(slots, ranks, strict=True)
        ]

    @cached_property
    def link(self) -> Array:
        """Sending and receiving rank of each message, `[message, 2]`."""
        return _links(self.schedule)

    def replayed(self) -> Array:
        """The makespan of each step by simulation, `[step]`."""
        g = self.graph
        delays = np.zeros((len(g.needs), len(self.work)))
        delays[g.crosses] = self.delay.T
        return replay(g, (self.work + self.pause).T, delays).makespan

    def but(self, **changed: Any) -> Steps:
        """The same with some of the times changed."""
        return replace(self, **changed)


def steps_of(timelines: Sequence[Timeline]) -> Steps:
    """The steps of a run. Raises: UsageError where they did not all run one order."""
    schedule, times = None, []
    for k, timeline in enumerate(timelines):
        own, start, end = timeline.schedule, timeline.start, timeline.end
        if own.has_communication:
            own, start, end = without_messages(own, start, end)
        schedule = own if schedule is None else schedule
        if own.renamed(schedule.name) != schedule:
            where = first_difference(schedule, own)
            raise UsageError(
                f"step {k} ran another order than step 0 ({where}); give the steps of one order"
            )
        first = own.slots[:-1]
        times.append((np.minimum.reduceat(start, first), np.maximum.reduceat(end, first)))
    if schedule is None:
        raise UsageError("there are no steps in the files")
    start, end = (
        np.array(x, dtype=float) / timelines[0].ticks.scale for x in zip(*times, strict=True)
    )
    return _taken_apart(schedule, start, end, timelines[0].unit)


def _links(schedule: Schedule) -> Array:
    g = graph(schedule)
    rank = schedule.rank_of_queue[schedule.queue_of_slot]
    source, target = g.needs[g.crosses], g.node_of_action[g.target[g.crosses]]
    return np.stack([rank[source], rank[target]], axis=1)


def _taken_apart(schedule: Schedule, start: Array, end: Array, unit: str) -> Steps:
    """What each slot and message took, from when slots started and ended, `[step, slot]`."""
    g, links = graph(schedule), _links(schedule)
    target, source = g.node_of_action[g.target], g.needs
    sent, got = source[g.crosses], target[g.crosses]
    start, end, moved = _on_one_clock(schedule, start, end, links, sent, got)
    ready = np.empty_like(start)  # when the slot could have started but for messages
    ready[:, 1:] = end[:, :-1]
    ready[:, g.heads] = start.min(axis=1, keepdims=True)
    for local in np.flatnonzero(~g.crosses).tolist():
        ready[:, target[local]] = np.maximum(ready[:, target[local]], end[:, source[local]])
    lag = np.maximum(start[:, got] - end[:, sent], 0.0)
    waited = (end[:, sent] >= ready[:, got]) & (start[:, got] > ready[:, got])
    usual, most = _by_link(links, lag, waited)
    late = end[:, sent] + usual > ready[:, got]  # it was under way when the rank was free
    known = waited | (late & (start[:, got] > ready[:, got]))
    delay = np.minimum(lag, np.where(known, most, usual))  # beyond that, the receiver pauses
    arrived = ready.copy()
    for i, slot in enumerate(got.tolist()):
        arrived[:, slot] = np.maximum(arrived[:, slot], end[:, sent[i]] + delay[:, i])
    pause = np.maximum(start - arrived, 0.0)
    makespans = end.max(axis=1) - start.min(axis=1)
    return Steps(schedule, unit, makespans, end - start, pause, delay, waited, moved)


def _by_link(links: Array, lag: Array, waited: Array) -> tuple[Array, Array]:
    """Of the messages of each link that were waited for the median, and what few exceed.

    Without any, 0 and no bound.
    """
    usual, most = np.zeros(len(links)), np.full(len(links), np.inf)
    for pair in np.unique(links, axis=0):
        own = (links == pair).all(axis=1)
        seen = lag[:, own][waited[:, own]]
        if len(seen):
            usual[own] = np.median(seen)
            most[own] = usual[own] + OUTLIER * sigma(seen)
    return usual, most


def sigma(values: Array) -> float:
    """The standard deviation of numbers, outliers apart."""
    return float(SPREAD * np.median(np.abs(values - np.median(values)))) if values.size else 0.0


def _on_one_clock(
    schedule: Schedule, start: Array, end: Array, links: Array, sent: Array, got: Array
) -> tuple[Array, Array, dict[int, float]]:
    """The times, those of some ranks moved so that nothing is received before it was sent."""
    n = len(start)
    messages = Messages(
        np.tile(links[:, 0], n),
        np.tile(links[:, 1], n),
        end[:, sent].ravel(),
        start[:, got].ravel(),
    )
    offsets = no_time_travel(np.zeros(schedule.p), messages)
    by_slot = offsets[schedule.rank_of_queue[schedule.queue_of_slot]]
    moved = {rank: float(x) for rank, x in enumerate(offsets) if x > 0}
    return start + by_slot, end + by_slot, moved
