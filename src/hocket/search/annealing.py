"""Simulated annealing over orders of slots: the table of its moves, and the loop that tries them.

The functions are compiled where numba is installed; their arguments are `kernel.Tables` (T) and
`kernel.State` (S).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hocket.search.kernel import (
    allowed,
    arrange,
    cost_of,
    first_from,
    head_of,
    restore,
    settle_after,
    settle_far,
    settle_near,
    sort,
    stop_of,
)

# --- random numbers: a generator whose state is an array, the same compiled or not ---------------


def draw(state):
    """A number in [0, 1)."""
    state[0] = state[0] * 48271 % 2147483647
    return state[0] / 2147483647.0


def below(state, n):
    """A whole number from 0 to n - 1."""
    state[0] = state[0] * 48271 % 2147483647
    return state[0] % n


def chance(state, seed):
    """The state of a seed, written to it."""
    state[0] = seed % 2147483646 + 1
    for _ in range(10):
        draw(state)
    return state


def reach(state, longest):
    """How far to move: mostly next to it, sometimes far."""
    u = draw(state)
    if u < 0.45:
        return 1
    if u < 0.85:
        return 2 + below(state, 5)
    return 2 + below(state, longest)


# --- moves ----------------------------------------------------------------------------------------
# A move writes what shall stand at the positions bounds[0] to bounds[1] to `fresh`, whole slots of
# one queue; False where it makes nothing. `distance` is how far it may reach, in slots. Whether the
# result may stand there is asked afterwards (`allowed`).


def copy(S, a, b, i):
    """Copies the positions a to b - 1 to `fresh`, from i on; returns the next free place there."""
    for pos in range(a, b):
        S.fresh[i], S.fresh_opens[i] = S.seq[pos], S.opens[pos]
        i += 1
    return i


def without(S, a, b, at, i):
    """Copies the slot at a to b - 1 without what stands at `at`."""
    first = True
    for pos in range(a, b):
        if pos != at:
            S.fresh[i], S.fresh_opens[i] = S.seq[pos], first
            i, first = i + 1, False
    return i


def together(T, S, a, b, t, i):
    """Copies the slot at a to b - 1 with the type t in it: forward, backward, W."""
    begun, placed = i, False
    for pos in range(a, b):
        if not placed and T.side[t] < T.side[S.seq[pos]]:
            S.fresh[i], placed = t, True
            i += 1
        S.fresh[i] = S.seq[pos]
        i += 1
    if not placed:
        S.fresh[i] = t
        i += 1
    for j in range(begun, i):
        S.fresh_opens[j] = j == begun
    return i


def joins(T, S, a, b, t):
    """True where the slot at a to b - 1 may take in the type t."""
    u = S.seq[a]
    if b == a + 1:
        return (T.pair[t, u] if T.side[t] < T.side[u] else T.pair[u, t]) < np.inf
    if T.side[t] == 0:
        return T.trio[t, u] < np.inf
    return b == a + 2 and T.pair[S.seq[a + 1], t] < np.inf


def swap(T, S, at, right, distance):
    """Exchanges two types, each staying in the other's slot; none passes one of its type."""
    seq, t, other = S.seq, S.seq[at], at
    r = T.queue_of[t]
    if right:
        stop = min(at + distance, T.queues[r + 1] - 1)
        while other < stop and seq[other + 1] != t:
            other += 1
    else:
        stop = max(at - distance, T.queues[r])
        while other > stop and seq[other - 1] != t:
            other -= 1
    if other == at:
        return False
    low = head_of(min(at, other), S.opens)
    high = stop_of(max(at, other), T.queues[r + 1], S.opens)
    copy(S, low, high, 0)
    S.fresh[at - low], S.fresh[other - low] = seq[other], t
    S.bounds[0], S.bounds[1] = low, high - 1
    return True


def shift(T, S, at, right, distance):
    """Moves a slot past others; it stops before one that looks like it."""
    seq, opens = S.seq, S.opens
    r = T.queue_of[seq[at]]
    first, last = T.queues[r], T.queues[r + 1]
    low = head_of(at, opens)
    high = stop_of(low, last, opens)
    t, width, n = seq[low], high - low, 0
    to = high if right else low
    while n < distance:
        if to == (last if right else first):
            break
        a = to if right else head_of(to - 1, opens)
        b = stop_of(a, last, opens)
        if seq[a] == t and b - a == width:
            break
        to = b if right else a
        n += 1
    if n == 0:
        return False
    if right:
        copy(S, low, high, copy(S, high, to, 0))
        S.bounds[0], S.bounds[1] = low, to - 1
    else:
        copy(S, to, low, copy(S, low, high, 0))
        S.bounds[0], S.bounds[1] = to, high - 1
    return True


def join(T, S, at, right, distance):
    """Puts a type into another slot: a forward to a backward, a W to an I that it makes full."""
    opens, t = S.opens, S.seq[at]
    r = T.queue_of[t]
    first, last = T.queues[r], T.queues[r + 1]
    low = head_of(at, opens)
    high = stop_of(low, last, opens)
    a = b = high if right else low
    n, good = 0, False
    while not good and n < distance + 7:
        if (b == last) if right else (a == first):
            return False
        a = b if right else head_of(a - 1, opens)
        b = stop_of(a, last, opens)
        n += 1
        good = n >= distance and joins(T, S, a, b, t)
    if not good:
        return False
    if right:
        together(T, S, a, b, t, copy(S, high, a, without(S, low, high, at, 0)))
        S.bounds[0], S.bounds[1] = low, b - 1
    else:
        without(S, low, high, at, copy(S, b, low, together(T, S, a, b, t, 0)))
        S.bounds[0], S.bounds[1] = a, high - 1
    return True


def part(T, S, at, right, distance):
    """Takes a type out of its slot, to a slot of its own."""
    opens, t = S.opens, S.seq[at]
    r = T.queue_of[t]
    low = head_of(at, opens)
    high = stop_of(low, T.queues[r + 1], opens)
    if high == low + 1:
        return False
    to = high if right else low
    for _ in range(distance - 1):
        if right and to < T.queues[r + 1]:
            to = stop_of(to, T.queues[r + 1], opens)
        elif not right and to > T.queues[r]:
            to = head_of(to - 1, opens)
    if right:
        i = copy(S, high, to, without(S, low, high, at, 0))
        S.fresh[i], S.fresh_opens[i] = t, True
        S.bounds[0], S.bounds[1] = low, to - 1
    else:
        S.fresh[0], S.fresh_opens[0] = t, True
        without(S, low, high, at, copy(S, to, low, 1))
        S.bounds[0], S.bounds[1] = to, high - 1
    return True


class Move(NamedTuple):
    """A move, and how often it is tried where all slots hold one action, and elsewhere."""

    make: Any
    alone: float
    joint: float


MOVES = (
    Move(swap, 0.25, 0.2),
    Move(shift, 0.75, 0.4),
    Move(join, 0.0, 0.28),
    Move(part, 0.0, 0.12),
)


def propose(which, T, S, at, right, distance):
    """Makes the move with this number."""
    return MOVES[which].make(T, S, at, right, distance)


# --- the loop -------------------------------------------------------------------------------------


def critical(T, S, span, state):
    """Writes the positions of a critical path, last first; returns how many."""
    queues, queue_of, base, needs, need = T.queues, T.queue_of, T.base, T.needs, T.need
    seq, opens, occ, begin, end, path = S.seq, S.opens, S.occ, S.begin, S.end, S.path
    best, at = -1.0, 0
    for r in range(len(queues) - 1):
        last = queues[r + 1] - 1
        if last < queues[r]:
            continue
        length = end[base[seq[last]] + occ[last]] - (begin[queues[r]] if span else 0.0)
        if length > best:
            best, at = length, last
    n = 0
    while n < len(path):
        pos, r = head_of(at, opens), queue_of[seq[at]]
        stop = stop_of(pos, queues[r + 1], opens)
        for a in range(pos, min(stop, pos + len(path) - n)):
            path[n] = a
            n += 1
        time, before = begin[pos], -1
        if pos > queues[r] and end[base[seq[pos - 1]] + occ[pos - 1]] >= time:
            before = pos - 1
        if before < 0 or draw(state) < 0.3:
            for a in range(pos, stop):
                t, k = seq[a], occ[a]
                for e in range(needs[t]):
                    node = base[need[t, e]] + k
                    if end[node] + T.delay[t, e] >= time:
                        before = S.place[node]
        if before < 0:
            break
        at = before
    return n


def changed(T, S, at, odds, quiet, longest, state):
    """Changes the order around a position by one move or several; returns how many were made.

    What was there before is in `kept`, where it was in `marks`. What starts from `quiet[0]` to
    `quiet[1]` is left as it is.
    """
    parts, since, p = 0, np.inf, len(T.queues) - 1
    u = draw(state)
    wanted = 1 if u < 0.4 else 2 if u < 0.7 else 3 if u < 0.9 else 4
    for _ in range(wanted):
        right, share, which = draw(state) < 0.5, draw(state), 0
        while share >= odds[which]:
            which += 1
        if not propose(which, T, S, at, right, reach(state, longest)):
            break
        low, high = S.bounds[0], S.bounds[1]
        if S.begin[low] < quiet[1] and S.begin[high] >= quiet[0]:
            break
        if not allowed(T, S, low, high, S.fresh, S.fresh_opens):
            break
        for i in range(high - low + 1):
            S.kept[parts, i], S.kept_opens[parts, i] = S.seq[low + i], S.opens[low + i]
        S.marks[parts, 0], S.marks[parts, 1] = low, high
        parts += 1
        since = min(since, S.begin[low])
        arrange(T, S, low, high, S.fresh, S.fresh_opens)
        if parts < wanted:  # the next part somewhere near in time, on any queue
            r = below(state, p)
            if T.queues[r + 1] == T.queues[r]:
                break
            soon = first_from(since, T.queues[r], T.queues[r + 1], S.begin)
            at = min(T.queues[r + 1] - 1, soon + below(state, longest // 2 + 1))
    return parts


def settled(T, S, parts, limit, span):
    """The cost after so many changes; infinite where it waits for ever or is above the limit."""
    marks, begin, sizes = S.marks, S.begin, S.sizes
    since, until, surely = np.inf, -1.0, -1.0
    for r in range(len(S.first) if span else 0):
        surely = max(surely, S.first[r])
    for j in range(parts):
        since, until = min(since, begin[marks[j, 0]]), max(until, begin[marks[j, 1]])
    sizes[0], sizes[1], sizes[2] = 0, len(begin), -1
    for j in range(parts):
        pos = marks[j, 1] + 1
        if pos < T.queues[T.queue_of[S.seq[pos - 1]] + 1] and begin[pos] > until:
            k = S.rank[pos]
            S.dirty[k] = True
            sizes[1], sizes[2] = min(sizes[1], k), max(sizes[2], k)
    if settle_near(T, S, since, until) and settle_far(T, S, limit, surely, span):
        return cost_of(T, S, span)
    return np.inf


def undo(T, S, parts):
    """Takes the changes back, the last first, and what they did to the times."""
    restore(S)
    for i in range(parts):
        j = parts - 1 - i
        arrange(T, S, S.marks[j, 0], S.marks[j, 1], S.kept[j], S.kept_opens[j])


def accept(T, S, parts, span):
    """Takes the new times over into what is known by position, and the ways to the end."""
    queues, base, seq, occ, marks = T.queues, T.base, S.seq, S.occ, S.marks
    begin, rank, start, touched, dirty = S.begin, S.rank, S.start, S.touched, S.dirty
    first, n = S.first, len(seq)
    low, high = n, -1
    for i in range(S.sizes[0]):
        pos = S.place[touched[i]]
        begin[pos] = start[touched[i]]
        low, high = min(low, rank[pos]), max(high, rank[pos])
    for j in range(parts):
        for pos in range(marks[j, 0], marks[j, 1] + 1):
            begin[pos] = start[base[seq[pos]] + occ[pos]]
            low, high = min(low, rank[pos]), max(high, rank[pos])
    sort(low, high, S.sequence, rank, begin)
    low, high = n, -1
    for r in range(len(queues) - 1 if span else 0):
        if queues[r] < queues[r + 1] and begin[queues[r]] != first[r]:
            first[r] = begin[queues[r]]
            at = rank[queues[r + 1] - 1]
            dirty[at] = True
            low, high = min(low, at), max(high, at)
    for j in range(parts):
        r = T.queue_of[seq[marks[j, 0]]]
        for pos in range(max(queues[r], marks[j, 0] - 1), marks[j, 1] + 1):
            dirty[rank[pos]] = True
            low, high = min(low, rank[pos]), max(high, rank[pos])
    settle_after(T, S, low, high, span)


def warm(T, S, span):
    """Makes the times of a prepared order ready for changes; `S.sequence` holds all positions."""
    for r in range(len(T.queues) - 1):
        S.first[r] = S.begin[T.queues[r]] if T.queues[r] < T.queues[r + 1] else 0.0
    for i in range(len(S.seq)):
        S.rank[S.sequence[i]], S.dirty[i] = i, True
    settle_after(T, S, 0, len(S.seq) - 1, span)


def anneal(T, S, cost, span, hot, cold, n_moves, focus, goal, state, quiet, odds, order, opens):
    """Searches from a warm order of this cost by moves within queues; writes the best.

    Returns its cost. Temperature falls from `hot` to `cold`. A share `focus` of the moves begins on
    a critical path. `state` holds random numbers.
    """
    n, p = len(S.seq), len(T.queues) - 1
    n_path, longest, best, heat = 0, max(4, min(60, n // p - 1)), cost, hot
    cooling = (cold / hot) ** (1.0 / max(1, n_moves))
    for _ in range(n_moves):
        heat *= cooling
        if draw(state) < focus:
            if n_path == 0:
                n_path = critical(T, S, span, state)
            at = S.path[below(state, n_path)]
        else:
            at = below(state, n)
        parts = changed(T, S, at, odds, quiet, longest, state)
        if parts == 0:
            continue
        limit = cost - heat * np.log(draw(state) + 1e-12)
        new = settled(T, S, parts, limit, span)
        if new > limit:
            undo(T, S, parts)
            continue
        cost, n_path = new, 0
        accept(T, S, parts, span)
        if cost < best:
            best = cost
            for pos in range(n):
                order[pos], opens[pos] = S.seq[pos], S.opens[pos]
            if best <= goal:
                break
    return best
