"""Lines of many queues as repeated blocks of slots: what the generators write orders in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hocket import compiled
from hocket.codes import MAX_STAGE, encode
from hocket.deps import Kind
from hocket.errors import ScheduleError
from hocket.ir import Array, Line, offsets, shown


class Part(NamedTuple):
    """An action of a slot that repeats: `codes[first + i] + add` in repeat i.

    first, add: one number, or one per queue.
    """

    codes: Array
    first: Any
    add: Any


class Block(NamedTuple):
    """Some slots, repeated `times` times: one number, or one per queue."""

    times: Any
    slots: tuple[tuple[Part, ...], ...]


@dataclass(frozen=True)
class Pattern:
    """What one queue runs, or each of several: blocks of slots one after the other.

    All queues have the same blocks, with numbers of their own; nothing is written out before a
    schedule is made of them.
    """

    blocks: tuple[Block, ...]

    @property
    def _parts(self) -> list[Part]:
        return [part for block in self.blocks for slot in block.slots for part in slot]

    @cached_property
    def _numbers(self) -> Array:
        """Times of the blocks, then where the parts begin, then what is added to them."""
        parts = self._parts
        rows = [*(b.times for b in self.blocks), *(x.first for x in parts), *(x.add for x in parts)]
        n_queues = max((getattr(row, "size", 1) for row in rows), default=1)
        table = np.empty((len(rows), n_queues), dtype=np.int64)
        for i, row in enumerate(rows):
            table[i] = row
        return table

    @property
    def n_queues(self) -> int:
        """How many queues it is for."""
        return self._numbers.shape[1]

    def written(self) -> Line:
        """The line of one queue."""
        codes, slots, _ = self.laid()
        return Line(codes, np.diff(slots))

    def laid(self) -> tuple[Array, Array, Array]:
        """Codes, slots and starts of all queues, as a Schedule has them."""
        blocks, parts, table = self.blocks, self._parts, self._numbers
        times, add = table[: len(blocks)], table[len(table) - len(parts) :]
        pools = {id(x.codes): x.codes for x in parts}
        base = dict(zip(pools, offsets([len(x) for x in pools.values()]).tolist(), strict=False))
        pool_of = np.array([base[id(x.codes)] for x in parts], dtype=np.int64)
        first = table[len(blocks) : len(table) - len(parts)] + pool_of[:, None]
        opens = [k == 0 for b in blocks for slot in b.slots for k in range(len(slot))]
        width = np.array([sum(map(len, b.slots)) for b in blocks], dtype=np.int64)
        height = np.array([len(b.slots) for b in blocks], dtype=np.int64)
        starts, n = offsets(height @ times), int((width @ times).sum())
        codes = np.empty(n, dtype=np.int64)
        slots = np.arange(n + 1) if n == starts[-1] else np.full(starts[-1] + 1, n)
        compiled.run(
            lay_down, n,
            (
                times.ravel(), offsets(width), np.array(opens, dtype=np.int64), first.ravel(),
                add.ravel(), np.concatenate([*pools.values(), codes[:0]]),
            ),
            (codes, slots if n > starts[-1] else slots[:0]),
        )  # fmt: skip
        return codes, slots, starts

    def single(self) -> Block:
        """The same as one block of one slot; written out if need be."""
        if len(self.blocks) == 1 and len(self.blocks[0].slots) == 1:
            return self.blocks[0]
        codes, slots, starts = self.laid()
        assert len(codes) == len(slots) - 1, "a slot of several actions among others"
        return Block(np.diff(starts), ((Part(codes, starts[:-1], 0),),))


def run(kind: Kind, stage: Any, mbs: Iterable[int] | Array) -> Pattern:
    """One slot for each microbatch: `run(Kind.F, 2, range(3))` is `2F0 2F1 2F2`.

    stage: one number, or one per queue.
    """
    if np.min(stage) < 0 or np.max(stage) > MAX_STAGE:
        raise ScheduleError(f"there is no stage {shown(stage)}; stages are 0 to {MAX_STAGE}")
    if isinstance(mbs, range):
        mbs = np.arange(mbs.start, mbs.stop, mbs.step)
    return lay(encode(int(kind), 0, np.asarray(mbs, dtype=np.int64)), stage)


def lay(codes: Array, stage: Any = 0) -> Pattern:
    """One slot for each code; `stage`, one number or one per queue, is added to their stages.

    codes: `[slot]`, or `[queue, slot]`.
    """
    codes, first = np.asarray(codes, dtype=np.int64), 0
    if codes.ndim > 1:
        first = np.arange(len(codes)) * codes.shape[1]
    return _one(codes.shape[-1], (Part(codes.ravel(), first, encode(0, stage, 0)),))


def _one(times: Any, *slots: tuple[Part, ...]) -> Pattern:
    return Pattern((Block(times, slots),))


def cut(line: Pattern, start: Any, stop: Any = None) -> Pattern:
    """Slots start to stop (one number, or one per queue) of a line of single slots."""
    n, (slot,) = line.single()
    start = np.minimum(np.maximum(start, 0), n)
    stop = n if stop is None else np.minimum(np.maximum(stop, start), n)
    return _one(stop - start, tuple(x._replace(first=x.first + start) for x in slot))


def join(*lines: Pattern) -> Pattern:
    """The lines one after the other."""
    return Pattern(tuple(block for line in lines for block in line.blocks))


def alternate(*lines: Pattern) -> Pattern:
    """First slot of each line, then the second of each, ...: `a0 b0 a1 b1`; equal lengths."""
    blocks = [line.single() for line in lines]
    return _one(_length(blocks), *(block.slots[0] for block in blocks))


def fuse(*lines: Pattern) -> Pattern:
    """The i-th slots of all lines made one slot: `a0+b0 a1+b1`; equal lengths."""
    blocks = [line.single() for line in lines]
    return _one(_length(blocks), tuple(part for block in blocks for part in block.slots[0]))


def keep(line: Pattern, wanted: Callable[[Array], Array], *, add: int = 0) -> Pattern:
    """The slots, all of them single, whose code is wanted, with `add` added to it."""
    codes, _, starts = line.laid()
    found = wanted(codes)
    kept = offsets(found)[starts]
    return _one(np.diff(kept), (Part(codes[found], kept[:-1], add),))


def _length(blocks: Sequence[Block]) -> Any:
    """How often all of these repeat."""
    n = blocks[0].times
    if any(np.any(block.times != n) for block in blocks):
        lengths = ", ".join(str(block.times) for block in blocks)
        raise ScheduleError(f"lines of {lengths} slots; they must be equally long to go together")
    return n


# --- loops, plain or compiled ------------------------------------------------------------------


def lay_down(times, part_of, opens, first, add, pool, codes, slots):
    """Writes repeated patterns, queue by queue, to `codes`, and where slots start to `slots`.

    Block b of queue q repeats `times[b, q]` times its parts `part_of[b]` to `part_of[b + 1]`: part
    j in repeat i is `pool[first[j, q] + i] + add[j, q]`, and `opens[j]` a slot. Without room in
    `slots` these are not written.
    """
    n_blocks, n, k = len(part_of) - 1, 0, 0
    n_queues = len(times) // n_blocks if n_blocks else 0
    for q in range(n_queues):
        for b in range(n_blocks):
            n_times, width, height = times[b * n_queues + q], part_of[b + 1] - part_of[b], 0
            for j in range(part_of[b], part_of[b + 1]):
                height += opens[j]
            at, slot = n, k - 1
            for j in range(part_of[b], part_of[b + 1]):
                source, more = first[j * n_queues + q], add[j * n_queues + q]
                for i in range(n_times):
                    codes[at + i * width] = pool[source + i] + more
                slot += opens[j]
                if opens[j] and len(slots):
                    for i in range(n_times):
                        slots[slot + i * height] = at + i * width
                at += 1
            n += n_times * width
            k += n_times * height
