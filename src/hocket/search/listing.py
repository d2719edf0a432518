"""The list scheduler: a queue that falls free starts what can start soonest, plus its penalty.

A rule of priority is an array of penalties, in ticks by node. `T` are `kernel.Tables`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Rules(NamedTuple):
    """What the list scheduler knows of a problem beside `Tables`.

    By type: path, number of microbatches, whether it puts a microbatch in flight (`first`) and
    takes it out (`closes`), the backward of its stage, and all that it needs as `Tables` has it,
    with no delay on its own queue. By queue: its first type, those of all queues being in a row,
    and the memory that a forward must leave to others.
    """

    path: Any
    counts: Any
    first: Any
    closes: Any
    partner: Any
    needs: Any
    need: Any
    delay: Any
    types: Any
    head_room: Any


# These two are called for each type in turn, so they take what they read and not the tables:
# a compiled call copies every array of a tuple.


def ready_at(t, k, needs, need, delay, base, done, end):
    """When what microbatch k of a type needs has ended; infinite where that is not known."""
    at = 0.0
    for e in range(needs[t]):
        u = need[t, e]
        if done[u] <= k:
            return np.inf
        at = max(at, end[base[u] + k] + delay[t, e])
    return at


def reserve(t, k, low, high, path, first, closes, counts, take, done):
    """Memory that must stay free for the oldest microbatch of each path in the queue of t.

    While it can always go on, no order of the others can stop the pipeline for ever. The forward
    of type t, microbatch k, does not keep room for itself. The queue's types are low to high.
    """
    total = 0.0
    for a in range(low, high):
        if not first[a] or done[a] == counts[a]:
            continue
        oldest = done[a]
        for b in range(low, high):
            if closes[b] and path[b] == path[a]:
                oldest = min(oldest, done[b])
        if done[a] <= oldest and not (a == t and k == oldest):
            total += take[a]
    return total


def has_room(t, k, level, low, high, cap, head_room, path, first, closes, counts, take, done):
    """True where the queue may start microbatch k of a type, with so much memory held."""
    after = level + take[t]
    if cap == np.inf or not first[t]:
        return after <= cap
    after += head_room
    return after <= cap and (
        after + reserve(t, k, low, high, path, first, closes, counts, take, done) <= cap
    )


def companion(T, L, r, t, by, level, done, end):
    """The type that shares the slot of another best, if it is ready by then; -1: none."""
    found, best = -1, 0.0
    for u in range(L.types[r], L.types[r + 1]):
        f, b = (t, u) if T.side[t] == 0 else (u, t)
        saved = T.dur[t] + T.dur[u] - T.pair[f, b]
        if T.side[f] != 0 or not saved > best or done[u] >= L.counts[u]:
            continue
        if ready_at(u, done[u], L.needs, L.need, L.delay, T.base, done, end) > by:
            continue
        if (
            has_room(
                f,
                done[f],
                level + T.take[b],
                L.types[r],
                L.types[r + 1],
                T.cap[r],
                L.head_room[r],
                L.path,
                L.first,
                L.closes,
                L.counts,
                T.take,
                done,
            )
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


def dispatch(  # noqa: C901 (one compiled loop)
    T, L, D, bias, ahead, urgent, wait, order
):
    """Fills `order` greedily; False where it stops.

    A queue starts next what can start soonest with its bias. A forward runs while at most
    `ahead[type]` of its stage are before their backward. Where memory holds something up, kinds
    that free memory have their bias lessened by `urgent`. What starts waits up to `wait` for
    another that makes their common slot cheaper than two; with `wait` below 0 all slots hold one.
    """
    p, n_types, left = len(T.queues) - 1, len(T.base), len(order)
    # Arrays of a tuple are counted at every access in a compiled loop: ten times as slow.
    base, dur, take, free, cap = T.base, T.dur, T.take, T.free, T.cap
    feeds, feed, queue_of = T.feeds, T.feed, T.queue_of
    counts, path, first, closes, partner = L.counts, L.path, L.first, L.closes, L.partner
    needs, need, delay, types, head_room = L.needs, L.need, L.delay, L.types, L.head_room
    done, end, clock, level, cursor = D.done, D.end, D.clock, D.level, D.cursor
    choice, at, dirty = D.choice, D.at, D.dirty
    while left > 0:
        for r in range(p):
            if not dirty[r]:
                continue
            dirty[r] = False
            choice[r], best, blocked = -1, np.inf, False
            low, high = types[r], types[r + 1]
            for turn in range(2):
                for t in range(low, high):
                    k = done[t]
                    if k >= counts[t] or (turn == 1 and free[t] <= 0.0):
                        continue
                    ready = max(clock[r], ready_at(t, k, needs, need, delay, base, done, end))
                    if ready == np.inf or (first[t] and k - done[partner[t]] >= ahead[t]):
                        continue
                    if cap[r] < np.inf and not has_room(
                        t, k, level[r], low, high, cap[r], head_room[r], path, first, closes,
                        counts, take, done,
                    ):  # fmt: skip
                        blocked = blocked or not first[t] or ready <= clock[r]
                        continue
                    score = ready + bias[base[t] + k] - (urgent if turn == 1 else 0.0)
                    if score < best:
                        best, choice[r], at[r] = score, t, ready
                if not blocked:
                    break
        soonest, r = np.inf, -1
        for q in range(p):
            if choice[q] >= 0 and at[q] < soonest:
                soonest, r = at[q], q
        if r < 0:
            return False
        t, u, length = choice[r], -1, dur[choice[r]]
        if wait >= 0.0:
            u = companion(T, L, r, t, at[r] + wait, level[r], done, end)
        if u >= 0:
            soonest = max(soonest, ready_at(u, done[u], needs, need, delay, base, done, end))
            t, u = (t, u) if T.side[t] == 0 else (u, t)
            length = T.pair[t, u]
        clock[r] = soonest + length
        dirty[r] = True
        for entered in (t, u):
            if entered < 0:
                continue
            end[base[entered] + done[entered]] = clock[r]
            level[r] += take[entered] - free[entered]
            order[cursor[r]] = entered + (n_types if entered == u else 0)
            cursor[r] += 1
            done[entered] += 1
            left -= 1
            for e in range(feeds[entered]):
                dirty[queue_of[feed[entered, e]]] = True
    return True
