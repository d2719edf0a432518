"""The costs of one schedule as arrays of ticks: durations of slots, delays of edges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from hocket.costs.model import LONGEST, Costs, Number, fused_rule, per_stage, quotient
from hocket.costs.scaling import fitted
from hocket.deps import MESSAGE, OFFSET, ROWS, SIDES
from hocket.errors import CostError
from hocket.ir import Array, Kind, Schedule, encode, kinds_of, mbs_of, stages_of


@dataclass(frozen=True)
class Ticks:
    """How times are held in arrays: integers of 1/scale, or floats (scale 1)."""

    scale: int
    exact: bool

    def array(self, values: Sequence[Number]) -> Array:
        """Times as an array of ticks."""
        if not self.exact:
            return np.array([float(x) for x in values], dtype=np.float64)
        whole = {x: int(x * self.scale) for x in set(values)}
        return np.array([*map(whole.__getitem__, values)], dtype=np.int64)

    def value(self, ticks: Any) -> Number:
        """Ticks as a time: an int where it is whole, a Fraction or a float where it is not."""
        if not self.exact:
            return float(ticks)
        whole, rest = divmod(int(ticks), self.scale)
        return Fraction(int(ticks), self.scale) if rest else whole

    def values(self, ticks: Array) -> list[Number]:
        """Each of some ticks as a time, `[...]`."""
        return ticks.tolist() if self.scale == 1 else list(map(self.value, ticks.tolist()))


def ticks_for(values: Sequence[Number], longest: Number) -> Ticks:
    """The finest exact tick of these values; floats where `longest` does not fit 63 bits then.

    longest: no time that is computed from the values is longer.
    """
    if float in set(map(type, values)):
        return Ticks(1, exact=False)
    distinct = set(values)
    scale = math.lcm(*(Fraction(x).denominator for x in distinct))
    if longest * scale >= 2**62:
        return Ticks(1, exact=False)
    return Ticks(scale, exact=True)


def _denominator(factors: Sequence[Number]) -> int:
    """Of these exact factors, the smallest common one."""
    return math.lcm(*(Fraction(x).denominator for x in factors))


def _in_parts(
    values: Sequence[Number], factors: Sequence[tuple[Sequence[Number], Array]]
) -> list[Number]:
    """Times of which any of these values, times one factor of each row, is a whole multiple."""
    if not factors:
        return []
    rows = [row for row, _ in factors]
    if any(isinstance(x, float) for x in chain(*rows)):
        return [0.0]  # no common time: floats
    scale = math.prod(map(_denominator, rows))
    return [quotient(x, scale) for x in values]


def _check_length(name: str, what: str, row: Sequence[Number], n: int) -> None:
    if len(row) != n:
        raise CostError(
            f"{name} has {len(row)} values, but the schedule has {n} {what}; give one for each"
        )


class CostTable:
    """The costs of one schedule as arrays of ticks.

    `costs`: those of its stages. `table`: time of each computation, `[kind, slice and stage]`.

    Raises: CostError where the costs do not fit the schedule.
    """

    def __init__(self, costs: Costs, schedule: Schedule) -> None:
        costs = fitted(costs, schedule.placement)
        self.costs, self.schedule = costs, schedule
        n = self._n_stages = schedule.placement.n_stages
        times: dict[Kind, tuple[Number, ...]] = {
            kind: per_stage(row.cost, costs.time(row.cost), n)
            for kind, row in ROWS.items()
            if row.cost
        }
        receive, send = costs.p2p_overhead if costs.p2p_overhead is not None else (0, 0)
        rule, fused = fused_rule(costs.FB)
        wires = self._wires(n)
        values = [*chain.from_iterable(times.values())]
        values += [receive, send, costs.latency, costs.comm_cpu, *wires]
        if rule == "number":
            values.append(fused)
        slices = self._slice_factors()
        if slices != (1,):
            times = {k: tuple(x * f for f in slices for x in row) for k, row in times.items()}
            values += chain.from_iterable(times.values())
        if rule == "scale":
            values += [x * fused for x in values]
        factors = self._factors()
        values += _in_parts(values, factors)
        longest = max(values) * math.prod(max(1, *row) for row, _ in factors)
        if not longest <= LONGEST:
            raise CostError(
                f"these costs make a time of {float(longest):.3g}; it must be at most {LONGEST}; "
                "use a different unit"
            )
        # A path goes through each action once, with the transfers around it and one message; a
        # rank's idle time is summed over its queues.
        step = longest + receive + send + costs.latency + costs.comm_cpu + max(wires)
        most = max(1, len(schedule.codes)) * int(np.bincount(schedule.rank_of_queue).max())
        self.ticks = ticks_for(values, step * most)
        self._wires_ticks = self.ticks.array(wires)
        self.table = np.zeros((len(Kind), n * len(slices)), dtype=self._wires_ticks.dtype)
        for kind, row in times.items():
            self.table[kind] = self.ticks.array(row)
        self._fused = (rule, fused)
        self._overhead = self.ticks.array([receive, send])
        self._latency = self.ticks.array([costs.latency])[0]

    def _factors(self) -> list[tuple[tuple[Number, ...], Array]]:
        """What multiplies the time of each action: some factors, and which of them, `[action]`."""
        s, (microbatch, speed) = self.schedule, (self.costs.microbatch, self.costs.speed)
        factors: list[tuple[tuple[Number, ...], Array]] = []
        if microbatch is not None:
            _check_length("microbatch", "microbatches", microbatch, s.m // s.placement.slices)
            factors.append((microbatch, mbs_of(s.codes) // s.placement.slices))
        if speed is not None:
            _check_length("speed", "ranks", speed, s.p)
            ranks = s.rank_of_queue[s.queue_of_slot[s.slot_of_action]]
            factors.append((tuple(quotient(1, x) for x in speed), ranks))
        return factors

    def _slice_factors(self) -> tuple[Number, ...]:
        """Factor of each slice; (1,) for schedules without slices."""
        n, factors = self.schedule.placement.slices, self.costs.slice
        if factors is None:
            return (1,) * n
        if n == 1:
            raise CostError(
                f"slice has {len(factors)} factors, but {self.schedule.name} does not cut "
                "sequences into slices; leave slice out of the costs"
            )
        if len(factors) != n:
            raise CostError(f"slice has {len(factors)} factors, but the schedule has {n} slices")
        return factors

    def _wires(self, n: int) -> list[Number]:
        """Time of each stage's output message beyond the latency."""
        if self.costs.bandwidth is None:
            return [0] * n
        sizes = per_stage("bytes.message", self.costs.bytes.message, n)
        return [quotient(x, self.costs.bandwidth) for x in sizes]

    def work(self) -> Array:
        """Work of each slot without transfers, `[slot]`."""
        s, (rule, fused_cost) = self.schedule, self._fused
        kinds, column = kinds_of(s.codes), stages_of(s.codes)
        if s.placement.slices > 1:
            column = column + mbs_of(s.codes) % s.placement.slices * s.placement.n_stages
        parts = self.table[kinds, column]
        for row, which in self._factors():
            scale = _denominator(row) if self.ticks.exact else 1
            by = np.array([x * scale for x in row], dtype=parts.dtype)[which]
            parts = parts // scale * by if self.ticks.exact else parts * by
        if s.is_single:
            return parts
        work, first = np.zeros(s.n_slots, dtype=parts.dtype), s.slots[:-1]
        np.add.at(work, s.slot_of_action, parts)
        forward, backward = (np.logical_or.reduceat(side[kinds], first) for side in SIDES)
        fused = np.flatnonzero(forward & backward)
        if rule == "max":
            work[fused] = np.maximum.reduceat(parts, first)[fused]
        elif rule == "number":
            work[fused] = self.ticks.array([fused_cost])[0]
        elif rule == "scale":
            work[fused] = [x * fused_cost for x in work[fused].tolist()]
        return work

    def occupied(self) -> Array:
        """Time that each slot occupies its queue, `[slot]`: its work, its transfers around it."""
        if self.around is None:
            return self.work()
        before, after = self.around
        return before + self.work() + after

    @cached_property
    def around(self) -> tuple[Array, Array] | None:
        """What `overheads` gives; None where transfers occupy no queue."""
        return None if self.costs.p2p_overhead is None else self.overheads()

    def overheads(self) -> tuple[Array, Array]:
        """Time each slot occupies its queue before and after its work, `[slot]` both."""
        s = self.schedule
        receive, send = self._overhead
        before, after = (np.zeros(s.n_slots, dtype=self.table.dtype) for _ in range(2))
        if self.costs.p2p_overhead is None:
            return before, after
        if s.has_communication:
            sends, receives, _ = zip(*MESSAGE.values(), strict=True)
        else:
            sends = receives = tuple(MESSAGE)
        kinds = kinds_of(s.codes)
        for side, some, time in ((before, receives, receive), (after, sends, send)):
            side[np.logical_or.reduceat(np.isin(kinds, some), s.slots[:-1])] = time
        return before, after

    @property
    def adds_up(self) -> bool:
        """True when a slot occupies its queue for the sum of its parts, and no longer."""
        c = self.costs
        return (c.p2p_overhead, c.microbatch, c.speed) == (None, None, None) and (
            self.schedule.is_single or self._fused[0] == "sum"
        )

    @cached_property
    def wires(self) -> Array | None:
        """Time that each result takes to the next rank, `[kind, stage]`; None: no time."""
        if self.costs.bandwidth is None and not self._latency:
            return None
        return self.ways(encode(np.arange(len(Kind))[:, None], np.arange(self._n_stages), 0))

    def delays(self, source: Array, crosses: Array) -> Array:
        """Time from the end of each edge's source to its target, `[edge]`."""
        delays = np.zeros(len(source), dtype=self.table.dtype)
        if self.costs.bandwidth is None:
            if self._latency:
                np.multiply(crosses, self._latency, out=delays)
            return delays
        delays[crosses] = self.ways(self.schedule.codes[source[crosses]])
        return delays

    def ways(self, codes: Array) -> Array:
        """Time that the results of these actions take to the next rank, `[action]`."""
        kinds, stages = kinds_of(codes), stages_of(codes)
        boundary = stages + np.minimum(OFFSET[kinds], 0)
        return self._latency + self._wires_ticks[boundary]
