"""The search's inner loops over orders of types in slots; compiled where numba is installed.

A type is (path, kind, stage); the k-th time it stands in a queue is its k-th microbatch: node
`base[type] + k`. A slot holds a forward, a backward, or both; an I and a W in one slot are a full
backward. What a type needs on its own queue is kept by the order alone, since a queue is serial;
what it needs from others makes the times. These tables are made from `deps.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Tables(NamedTuple):
    """What does not change while a problem is searched, by type.

    `queues[q]:queues[q + 1]` are the positions of queue q. `need[type, i]`, of the same microbatch
    on another queue, must end `delay[type, i]` before; `feed` and `lag` say the same the other way
    round; `own_need` is on the same queue. `pair` and `trio` are the times of slots of several:
    of two types, and of a forward, an I and its W.
    """

    queues: Any
    queue_of: Any
    base: Any
    dur: Any
    needs: Any
    need: Any
    delay: Any
    feeds: Any
    feed: Any
    lag: Any
    own_needs: Any
    own_need: Any
    take: Any
    free: Any
    cap: Any
    side: Any
    pair: Any
    trio: Any


class State(NamedTuple):
    """An order, its times, and room to work in.

    By position: type, whether a slot opens there, microbatch, memory before, start when the order
    was last settled, rank by that start. By node: position, length of its slot, start, end, longest
    way from there to the end. By rank: position, and whether it must be looked at.
    """

    seq: Any
    opens: Any
    occ: Any
    level: Any
    begin: Any
    rank: Any
    place: Any
    long: Any
    start: Any
    end: Any
    after: Any
    sequence: Any
    dirty: Any
    first: Any
    done: Any
    touched: Any
    was: Any
    cursor: Any
    clock: Any
    more: Any
    sizes: Any
    counts: Any
    fresh: Any
    fresh_opens: Any
    bounds: Any
    kept: Any
    kept_opens: Any
    marks: Any
    path: Any


# --- slots ----------------------------------------------------------------------------------------


def head_of(pos, opens):
    """Where the slot of a position begins."""
    while not opens[pos]:
        pos -= 1
    return pos


def stop_of(pos, last, opens):
    """Where the slot that begins at a position ends, at most `last`."""
    pos += 1
    while pos < last and not opens[pos]:
        pos += 1
    return pos


def length_of(types, i, j, dur, pair, trio):
    """How long a slot of the types i to j - 1 takes; infinite where there is no such slot."""
    if j == i + 1:
        return dur[types[i]]
    if j == i + 2:
        return pair[types[i], types[i + 1]]
    if j == i + 3 and pair[types[i + 1], types[i + 2]] < np.inf:
        return trio[types[i], types[i + 1]]
    return np.inf


def allowed(T, S, low, high, fresh, fresh_opens):
    """True when these slots can stand at positions low to high.

    There are such slots, each after what it needs on its own queue, and memory is kept: a slot
    takes all before it frees.
    """
    seq, occ, place, counts = S.seq, S.occ, S.place, S.counts
    base, own_needs, own_need, take, free = T.base, T.own_needs, T.own_need, T.take, T.free
    for pos in range(high, low - 1, -1):
        counts[seq[pos]] = occ[pos]
    now, cap = S.level[low], T.cap[T.queue_of[seq[low]]]
    n, i = high - low + 1, 0
    while i < n:
        j = stop_of(i, n, fresh_opens)
        if j > i + 1 and not length_of(fresh, i, j, T.dur, T.pair, T.trio) < np.inf:
            return False
        freed = 0.0
        for a in range(i, j):
            t = fresh[a]
            now += take[t]
            freed += free[t]
            if a > i and T.side[t] == 2:
                continue  # the last part of a full backward
            k = counts[t]
            for e in range(own_needs[t]):
                u = own_need[t, e]
                at = place[base[u] + k]
                if at > high or (at >= low and counts[u] <= k):
                    return False
        if now > cap:
            return False
        now -= freed
        for a in range(i, j):
            counts[fresh[a]] += 1
        i = j
    return True


def arrange(T, S, low, high, fresh, fresh_opens):
    """Puts these slots at positions low to high."""
    seq, opens, occ, place, level, long = S.seq, S.opens, S.occ, S.place, S.level, S.long
    counts, base, take, free = S.counts, T.base, T.take, T.free
    for pos in range(high, low - 1, -1):
        counts[seq[pos]] = occ[pos]
    now, n, i = level[low], high - low + 1, 0
    while i < n:
        j = stop_of(i, n, fresh_opens)
        length = length_of(fresh, i, j, T.dur, T.pair, T.trio)
        before = now
        for a in range(i, j):
            t, pos = fresh[a], low + a
            node = base[t] + counts[t]
            seq[pos], opens[pos], occ[pos], level[pos] = t, a == i, counts[t], before
            place[node], long[node] = pos, length
            counts[t] += 1
            now += take[t] - free[t]
        i = j


# --- times ----------------------------------------------------------------------------------------


def times(T, S, span):
    """Writes start and end of every node; returns the cost, infinite where it waits for ever.

    Cost: the last end, or with `span` the longest queue from first start to last end.
    """
    queues, base, needs, need, delay = T.queues, T.base, T.needs, T.need, T.delay
    seq, opens, occ, long, start, end = S.seq, S.opens, S.occ, S.long, S.start, S.end
    done, cursor, clock = S.done, S.cursor, S.clock
    p, left = len(queues) - 1, len(seq)
    for r in range(p):
        cursor[r], clock[r] = queues[r], 0.0
    for node in range(len(done)):
        done[node] = False
    up = True
    while left > 0:
        before = left
        for i in range(p):
            r = i if up else p - 1 - i
            pos, time = cursor[r], clock[r]
            while pos < queues[r + 1]:
                stop = stop_of(pos, queues[r + 1], opens)
                at, free = time, True
                for a in range(pos, stop):
                    t, k = seq[a], occ[a]
                    for e in range(needs[t]):
                        node = base[need[t, e]] + k
                        if not done[node]:
                            free = False
                            break
                        at = max(at, end[node] + delay[t, e])
                if not free:
                    break
                time = at + long[base[seq[pos]] + occ[pos]]
                for a in range(pos, stop):
                    node = base[seq[a]] + occ[a]
                    start[node], end[node], done[node] = at, time, True
                pos = stop
            left -= pos - cursor[r]
            cursor[r], clock[r] = pos, time
        if left == before:
            return np.inf
        up = not up
    return cost_of(T, S, span)


def cost_of(T, S, span):
    """The last end, or with `span` the longest queue from first start to last end."""
    queues, base, seq, occ = T.queues, T.base, S.seq, S.occ
    worst = 0.0
    for r in range(len(queues) - 1):
        low, high = queues[r], queues[r + 1] - 1
        if low <= high:
            first = S.start[base[seq[low]] + occ[low]] if span else 0.0
            worst = max(worst, S.end[base[seq[high]] + occ[high]] - first)
    return worst


def prepare(T, S, span):
    """Times of the order in `fresh`; returns its cost, infinite where it cannot run or fit."""
    for t in range(len(S.counts)):
        S.counts[t] = 0
    for pos in range(len(S.seq)):
        t = S.fresh[pos]
        S.seq[pos], S.opens[pos], S.occ[pos] = t, S.fresh_opens[pos], S.counts[t]
        S.place[T.base[t] + S.counts[t]] = pos
        S.counts[t] += 1
    for r in range(len(T.queues) - 1):
        low, high = T.queues[r], T.queues[r + 1] - 1
        if low > high:
            continue
        S.level[low] = 0.0
        fresh, opens = S.fresh[low : high + 1], S.fresh_opens[low : high + 1]
        if not allowed(T, S, low, high, fresh, opens):
            return np.inf
        arrange(T, S, low, high, fresh, opens)
    return times(T, S, span)


# --- times after a change: only of what moves -----------------------------------------------------


def sort(low, high, sequence, rank, begin):
    """Sorts `sequence` by `begin` again after a change of those at low to high."""
    for i in range(max(1, low), len(sequence)):
        pos, j = sequence[i], i
        while j > 0 and begin[sequence[j - 1]] > begin[pos]:
            sequence[j] = sequence[j - 1]
            rank[sequence[j]] = j
            j -= 1
        if j < i:
            sequence[j] = pos
            rank[pos] = j
        elif i > high:
            break


def first_from(time, low, high, begin):
    """The first of the positions low to high - 1 that starts at this time or later, or `high`."""
    while low < high:
        mid = (low + high) // 2
        if begin[mid] >= time:
            high = mid
        else:
            low = mid + 1
    return low


def settle_near(T, S, since, until):  # noqa: C901 (one compiled loop: calls of closures are not)
    """New times of all that started from `since` to `until` (`begin`) before a change there.

    Writes the nodes that moved to `touched`, their number to `sizes[0]` and their times before to
    `was`. What they may move after `until` is marked in `dirty[rank[position]]`, the first and
    last of these ranks are in `sizes[1]` and `sizes[2]`. False where something waits for ever.
    """
    queues, queue_of, base = T.queues, T.queue_of, T.base
    needs, need, delay, feeds, feed = T.needs, T.need, T.delay, T.feeds, T.feed
    seq, opens, occ, place, long = S.seq, S.opens, S.occ, S.place, S.long
    begin, rank, start, end = S.begin, S.rank, S.start, S.end
    touched, was, dirty, cursor, more, sizes = S.touched, S.was, S.dirty, S.cursor, S.more, S.sizes
    p = len(queues) - 1
    n, left, up = 0, p, True
    for r in range(p):
        cursor[r] = first_from(since, queues[r], queues[r + 1], begin)
        more[r] = True
    while left > 0:
        stuck = True
        for i in range(p):
            r = i if up else p - 1 - i
            if not more[r]:
                continue
            pos, last = cursor[r], queues[r + 1]
            time = end[base[seq[pos - 1]] + occ[pos - 1]] if pos > queues[r] else 0.0
            while True:
                if pos == last or begin[pos] > until:
                    more[r], stuck = False, False
                    left -= 1
                    break
                stop = stop_of(pos, last, opens)
                at, free = time, True
                for a in range(pos, stop):
                    t, k = seq[a], occ[a]
                    for e in range(needs[t]):
                        u = need[t, e]
                        node = base[u] + k
                        if place[node] >= cursor[queue_of[u]]:
                            free = False
                            break
                        at = max(at, end[node] + delay[t, e])
                if not free:
                    break
                time = at + long[base[seq[pos]] + occ[pos]]
                first, pos = pos, stop
                cursor[r], stuck = pos, False
                for a in range(first, stop):
                    t, k = seq[a], occ[a]
                    node = base[t] + k
                    if at == start[node] and time == end[node]:
                        continue
                    touched[n], was[n, 0], was[n, 1] = node, start[node], end[node]
                    n += 1
                    start[node], end[node] = at, time
                    if pos < last and begin[pos] > until:
                        j = rank[pos]
                        dirty[j] = True
                        sizes[1], sizes[2] = min(sizes[1], j), max(sizes[2], j)
                    for e in range(feeds[t]):
                        other = place[base[feed[t, e]] + k]
                        if begin[other] > until:
                            j = rank[other]
                            dirty[j] = True
                            sizes[1], sizes[2] = min(sizes[1], j), max(sizes[2], j)
        sizes[0] = n
        if stuck:
            return False
        up = not up
    return True


def settle_far(T, S, limit, surely, span):
    """New times of what moves from the dirty positions on, as in `settle_near`.

    They are met in the order of their starts before, after all that they need, and the way `after`
    each is as it was. False where it shows that the cost is above `limit`; with `span` that is
    looked for after `surely`, the last first start of a queue.
    """
    queues, queue_of, base = T.queues, T.queue_of, T.base
    needs, need, delay, feeds, feed = T.needs, T.need, T.delay, T.feeds, T.feed
    seq, opens, occ, place, long = S.seq, S.opens, S.occ, S.place, S.long
    begin, rank, sequence, after = S.begin, S.rank, S.sequence, S.after
    start, end, touched, was, dirty, sizes = S.start, S.end, S.touched, S.was, S.dirty, S.sizes
    n, i, far, still = sizes[0], sizes[1], sizes[2], True
    while i <= far:
        if not dirty[i]:
            i += 1
            continue
        dirty[i] = False
        pos = head_of(sequence[i], opens)
        r, node, at = queue_of[seq[pos]], base[seq[pos]] + occ[pos], 0.0
        if pos > queues[r]:
            at = end[base[seq[pos - 1]] + occ[pos - 1]]
        stop = stop_of(pos, queues[r + 1], opens)
        for a in range(pos, stop):
            t, k = seq[a], occ[a]
            for e in range(needs[t]):
                at = max(at, end[base[need[t, e]] + k] + delay[t, e])
        if at == start[node]:
            continue
        time = at + long[node]
        still = still and not (span and pos == queues[r])
        late = still and begin[pos] > surely and time + after[node] > limit
        for a in range(pos, stop):
            t, k = seq[a], occ[a]
            node = base[t] + k
            touched[n], was[n, 0], was[n, 1] = node, start[node], end[node]
            n += 1
            start[node], end[node] = at, time
            for e in range(feeds[t]):
                j = rank[place[base[feed[t, e]] + k]]
                dirty[j] = True
                i, far = min(i, j), max(far, j)
        if stop < queues[r + 1]:
            j = rank[stop]
            dirty[j] = True
            i, far = min(i, j), max(far, j)
        if late or n + 3 > len(touched):
            sizes[0], sizes[1], sizes[2] = n, i, far
            return False
    sizes[0], sizes[1], sizes[2] = n, i, far
    return True


def restore(S):
    """Puts back the times of the touched nodes, the last first; nothing is dirty any more."""
    touched, was, sizes = S.touched, S.was, S.sizes
    for i in range(sizes[0] - 1, -1, -1):
        S.start[touched[i]], S.end[touched[i]] = was[i, 0], was[i, 1]
    for i in range(sizes[1], sizes[2] + 1):
        S.dirty[i] = False


def settle_after(T, S, low, i, span):
    """The longest way from each node's end to the end of all, from the dirty positions back.

    The ranks of these are from `low` to `i`. With `span`: to the end of a queue, less its first
    start.
    """
    queues, queue_of, base = T.queues, T.queue_of, T.base
    needs, need, feeds, feed, lag = T.needs, T.need, T.feeds, T.feed, T.lag
    seq, opens, occ, place, long = S.seq, S.opens, S.occ, S.place, S.long
    begin, rank, sequence, after, dirty = S.begin, S.rank, S.sequence, S.after, S.dirty
    while i >= low:
        if not dirty[i]:
            i -= 1
            continue
        dirty[i] = False
        pos = head_of(sequence[i], opens)
        r = queue_of[seq[pos]]
        stop = stop_of(pos, queues[r + 1], opens)
        if stop < queues[r + 1]:
            node = base[seq[stop]] + occ[stop]
            way = long[node] + after[node]
        else:
            way = -begin[queues[r]] if span else 0.0
        for a in range(pos, stop):
            t, k = seq[a], occ[a]
            for e in range(feeds[t]):
                node = base[feed[t, e]] + k
                way = max(way, lag[t, e] + long[node] + after[node])
        changed = False
        for a in range(pos, stop):
            node = base[seq[a]] + occ[a]
            changed = changed or after[node] != way
            after[node] = way
        if not changed:
            continue
        if pos > queues[r]:
            j = rank[pos - 1]
            dirty[j] = True
            i, low = max(i, j), min(low, j)
        for a in range(pos, stop):
            t, k = seq[a], occ[a]
            for e in range(needs[t]):
                j = rank[place[base[need[t, e]] + k]]
                dirty[j] = True
                i, low = max(i, j), min(low, j)
