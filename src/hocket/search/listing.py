"""The list scheduler: a queue that falls free starts what can start soonest, plus its penalty.

A rule of priority is an array of penalties, in ticks by node. `T` are `kernel.Tables`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Rules(NamedTuple):
    """What the list scheduler knows of a problem beside `Tables`.

    By type: path, number of microbatches, whether it puts a microbatch in flight (`first`) and
    takes it out (`closes`), the backward of its stage. By queue: its first type, those of all
    queues being in a row, and the memory that a forward must leave to others.
    """

    path: Any
    counts: Any
    first: Any
    closes: Any
    partner: Any
    types: Any
    head_room: Any


def reserve(r, t, k, L, take, done):
    """Memory that must stay free for the oldest microbatch of each path in this queue.

    While it can always go on, no order of the others can stop the pipeline for ever. The forward
    of type t, microbatch k, does not keep room for itself.
    """
    total = 0.0
    for a in range(L.types[r], L.types[r + 1]):
        if not L.first[a] or done[a] == L.counts[a]:
            continue
        oldest = done[a]
        for b in range(L.types[r], L.types[r + 1]):
            if L.closes[b] and L.path[b] == L.path[a]:
                oldest = min(oldest, done[b])
        if done[a] <= oldest and not (a == t and k == oldest):
            total += take[a]
    return total


def ready_at(T, L, t, done, end):
    """When what the next microbatch of a type needs has ended; infinite where that is not known."""
    k, at = done[t], 0.0
    if k >= L.counts[t]:
        return np.inf
    for e in range(T.needs[t]):
        u = T.need[t, e]
        if done[u] <= k:
            return np.inf
        at = max(at, end[T.base[u] + k] + T.delay[t, e])
    for e in range(T.own_needs[t]):
        u = T.own_need[t, e]
        if done[u] <= k:
            return np.inf
        at = max(at, end[T.base[u] + k])
    return at


def has_room(T, L, r, t, level, done):
    """True where the queue may start the next microbatch of a type, with so much memory held."""
    after = level + T.take[t]
    if not L.first[t]:
        return after <= T.cap[r]
    after += L.head_room[r]
    return after <= T.cap[r] and after + reserve(r, t, done[t], L, T.take, done) <= T.cap[r]


def choose(T, L, r, bias, ahead, urgent, clock, level, done, end):
    """What a free queue starts next, and when; -1: nothing can.

    Where memory holds something up, kinds that free memory have their bias lessened by `urgent`.
    """
    chosen, at, best, blocked = -1, 0.0, np.inf, False
    for turn in range(2):
        for t in range(L.types[r], L.types[r + 1]):
            if turn == 1 and T.free[t] <= 0.0:
                continue
            ready = max(clock, ready_at(T, L, t, done, end))
            if ready == np.inf:
                continue
            if L.first[t] and done[t] - done[L.partner[t]] >= ahead[t]:
                continue
            if not has_room(T, L, r, t, level, done):
                blocked = blocked or not L.first[t] or ready <= clock
                continue
            score = ready + bias[T.base[t] + done[t]] - (urgent if turn == 1 else 0.0)
            if score < best:
                best, chosen, at = score, t, ready
        if not blocked:
            break
    return chosen, at


def companion(T, L, r, t, by, level, done, end):
    """The type that shares the slot of another best, if it is ready by then; -1: none."""
    found, best = -1, 0.0
    for u in range(L.types[r], L.types[r + 1]):
        f, b = (t, u) if T.side[t] == 0 else (u, t)
        saved = T.dur[t] + T.dur[u] - T.pair[f, b]
        if T.side[f] != 0 or not saved > best or ready_at(T, L, u, done, end) > by:
            continue
        if (
            has_room(T, L, r, f, level + T.take[b], done)
            and level + T.take[f] + T.take[b] <= (T.cap[r])
        ):
            found, best = u, saved
    return found


class Desk(NamedTuple):
    """Room to work in: by type what has run, by node its end, by queue its clock, memory and such.

    `choice` is what a queue starts next, `at` when; `dirty` says that it must choose again.
    """

    done: Any
    end: Any
    clock: Any
    level: Any
    cursor: Any
    choice: Any
    at: Any
    dirty: Any


def enter(T, D, r, t, number, order):
    """Writes the next microbatch of a type to the order as this number; it ends at the clock."""
    D.end[T.base[t] + D.done[t]] = D.clock[r]
    D.level[r] += T.take[t] - T.free[t]
    order[D.cursor[r]] = number
    D.cursor[r] += 1
    D.done[t] += 1
    for e in range(T.feeds[t]):
        D.dirty[T.queue_of[T.feed[t, e]]] = True
    return 1


def dispatch(T, L, D, bias, ahead, urgent, wait, order):
    """Fills `order` greedily; False where it stops.

    A forward runs while at most `ahead[type]` of its stage are before their backward. What starts
    waits up to `wait` for another that makes their common slot cheaper than two; with `wait` below
    0 all slots hold one.
    """
    p, left = len(T.queues) - 1, len(order)
    done, end, clock, level = D.done, D.end, D.clock, D.level
    choice, at, dirty = D.choice, D.at, D.dirty
    while left > 0:
        for r in range(p):
            if dirty[r]:
                choice[r], at[r] = choose(
                    T, L, r, bias, ahead, urgent, clock[r], level[r], done, end
                )
                dirty[r] = False
        soonest, r = np.inf, -1
        for q in range(p):
            if choice[q] >= 0 and at[q] < soonest:
                soonest, r = at[q], q
        if r < 0:
            return False
        t, u, length = choice[r], -1, T.dur[choice[r]]
        if wait >= 0.0:
            u = companion(T, L, r, t, at[r] + wait, level[r], done, end)
        if u >= 0:
            soonest = max(soonest, ready_at(T, L, u, done, end))
            t, u = (t, u) if T.side[t] == 0 else (u, t)
            length = T.pair[t, u]
        clock[r] = soonest + length
        left -= enter(T, D, r, t, t, order)
        if u >= 0:
            left -= enter(T, D, r, u, u + len(T.base), order)
        dirty[r] = True
    return True
