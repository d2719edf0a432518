"""The search's inner loops over orders as sequences of types; compiled where numba is installed.

A type is (path, kind, stage); the k-th time it stands in a queue is its k-th microbatch: node
`base[type] + k`. Types wait for `need[type, i]` of the same microbatch, `delay[type, i]` after its
end. These arrays are made from `deps.py`.
"""

from __future__ import annotations

import numpy as np

# --- random numbers: a generator whose state is an array, the same compiled or not ---------------


def draw(state):
    """A number in [0, 1)."""
    state[0] = state[0] * 48271 % 2147483647
    return state[0] / 2147483647.0


def below(state, n):
    """A whole number from 0 to n - 1."""
    state[0] = state[0] * 48271 % 2147483647
    return state[0] % n


# --- an order, and its times ----------------------------------------------------------------------


def label(seq, occ, place, base):
    """Numbers the occurrences of each type; `place[node]` is where each node stands."""
    seen = np.zeros(len(base), dtype=np.int64)
    for pos in range(len(seq)):
        t = seq[pos]
        occ[pos] = seen[t]
        place[base[t] + seen[t]] = pos
        seen[t] += 1


def levels(queues, seq, take, free, cap, level):
    """Memory before each position; returns the largest excess over the cap."""
    worst = -1e300
    for r in range(len(queues) - 1):
        now = 0.0
        for pos in range(queues[r], queues[r + 1]):
            level[pos] = now
            worst = max(worst, now + take[seq[pos]] - cap[r])
            now += take[seq[pos]] - free[seq[pos]]
    return worst


def times(queues, seq, occ, base, dur, needs, need, delay, span, start, end, done, cursor, clock):
    """Writes `start` and `end` of every node; returns the cost, or -1.0 where it waits for ever.

    Cost: the last end, or with `span` the longest queue from first start to last end. `done`,
    `cursor` and `clock` are room to work in.
    """
    p, left = len(queues) - 1, len(seq)
    cursor[:], clock[:], done[:] = queues[:-1], 0.0, False
    up = True
    while left > 0:
        before = left
        for i in range(p):
            r = i if up else p - 1 - i
            pos, time = cursor[r], clock[r]
            while pos < queues[r + 1]:
                t, k = seq[pos], occ[pos]
                at, free = time, True
                for e in range(needs[t]):
                    node = base[need[t, e]] + k
                    if not done[node]:
                        free = False
                        break
                    at = max(at, end[node] + delay[t, e])
                if not free:
                    break
                time = at + dur[t]
                start[base[t] + k], end[base[t] + k], done[base[t] + k] = at, time, True
                pos += 1
            left -= pos - cursor[r]
            cursor[r], clock[r] = pos, time
        if left == before:
            return -1.0
        up = not up
    return cost_of(queues, seq, occ, base, span, start, end)


def cost_of(queues, seq, occ, base, span, start, end):
    """The last end, or with `span` the longest queue from first start to last end."""
    worst = 0.0
    for r in range(len(queues) - 1):
        low, high = queues[r], queues[r + 1] - 1
        if low <= high:
            first = start[base[seq[low]] + occ[low]] if span else 0.0
            worst = max(worst, end[base[seq[high]] + occ[high]] - first)
    return worst


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


def settle_near(  # noqa: C901 (one compiled loop: calls of closures are not)
    since, until, queues, queue_of, seq, occ, place, base, dur, needs, need, delay, feeds, feed,
    begin, rank, start, end, touched, was, dirty, cursor, more, sizes,
):  # fmt: skip
    """New times of all that started from `since` to `until` (`begin`) before a change there.

    Writes the nodes that moved to `touched`, their number to `sizes[0]` and their times before to
    `was`. What they may move after `until` is marked in `dirty[rank[position]]`, the first and
    last of these ranks are in `sizes[1]` and `sizes[2]`. False where something waits for ever.
    `cursor` and `more` are room to work in.
    """
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
            pos, stop = cursor[r], queues[r + 1]
            time = end[base[seq[pos - 1]] + occ[pos - 1]] if pos > queues[r] else 0.0
            while True:
                if pos == stop or begin[pos] > until:
                    more[r], stuck = False, False
                    left -= 1
                    break
                t, k = seq[pos], occ[pos]
                at, free = time, True
                for e in range(needs[t]):
                    u = need[t, e]
                    node = base[u] + k
                    if place[node] >= cursor[queue_of[u]]:
                        free = False
                        break
                    at = max(at, end[node] + delay[t, e])
                if not free:
                    break
                node, time = base[t] + k, at + dur[t]
                pos += 1
                cursor[r], stuck = pos, False
                if at == start[node]:
                    continue
                touched[n], was[n, 0], was[n, 1] = node, start[node], end[node]
                n += 1
                start[node], end[node] = at, time
                if pos < stop and begin[pos] > until:
                    dirty[rank[pos]] = True
                    sizes[1], sizes[2] = min(sizes[1], rank[pos]), max(sizes[2], rank[pos])
                for e in range(feeds[t]):
                    other = place[base[feed[t, e]] + k]
                    if begin[other] > until:
                        dirty[rank[other]] = True
                        sizes[1], sizes[2] = min(sizes[1], rank[other]), max(sizes[2], rank[other])
        sizes[0] = n
        if stuck:
            return False
        up = not up
    return True


def settle_far(
    limit, surely, queues, queue_of, seq, occ, place, base, dur, needs, need, delay, feeds, feed,
    span, begin, sequence, rank, after, start, end, touched, was, dirty, sizes,
):  # fmt: skip
    """New times of what moves from the dirty positions on, as in `settle_near`.

    They are met in the order of their starts before, after all that they need, and the way `after`
    each is as it was. False where it shows that the cost is above `limit`; with `span` that is
    looked for after `surely`, the last first start of a queue.
    """
    n, i, far, still = sizes[0], sizes[1], sizes[2], True
    while i <= far:
        if not dirty[i]:
            i += 1
            continue
        dirty[i] = False
        pos = sequence[i]
        t, k = seq[pos], occ[pos]
        r, node, at = queue_of[t], base[t] + k, 0.0
        if pos > queues[r]:
            at = end[base[seq[pos - 1]] + occ[pos - 1]]
        for e in range(needs[t]):
            at = max(at, end[base[need[t, e]] + k] + delay[t, e])
        if at == start[node]:
            continue
        touched[n], was[n, 0], was[n, 1] = node, start[node], end[node]
        n += 1
        start[node], end[node] = at, at + dur[t]
        still = still and not (span and pos == queues[r])
        late = still and begin[pos] > surely and end[node] + after[node] > limit
        if late or n == len(touched):
            sizes[0], sizes[1], sizes[2] = n, i, far
            return False
        if pos + 1 < queues[r + 1]:
            j = rank[pos + 1]
            dirty[j] = True
            i, far = min(i, j), max(far, j)
        for e in range(feeds[t]):
            j = rank[place[base[feed[t, e]] + k]]
            dirty[j] = True
            i, far = min(i, j), max(far, j)
    sizes[0], sizes[1], sizes[2] = n, i, far
    return True


def restore(start, end, touched, was, dirty, sizes):
    """Puts back the times of the touched nodes, the last first; nothing is dirty any more."""
    for i in range(sizes[0] - 1, -1, -1):
        start[touched[i]], end[touched[i]] = was[i, 0], was[i, 1]
    for i in range(sizes[1], sizes[2] + 1):
        dirty[i] = False


def settle_after(
    low, i, queues, queue_of, seq, occ, place, base, dur, needs, need, feeds, feed, lag, span,
    begin, sequence, rank, after, dirty,
):  # fmt: skip
    """The longest way from each node's end to the end of all, from the dirty positions back.

    The ranks of these are from `low` to `i`. With `span`: to the end of a queue, less its first
    start.
    """
    while i >= low:
        if not dirty[i]:
            i -= 1
            continue
        dirty[i] = False
        pos = sequence[i]
        t, k = seq[pos], occ[pos]
        r, way = queue_of[t], -1e300
        if pos + 1 < queues[r + 1]:
            u = seq[pos + 1]
            way = dur[u] + after[base[u] + occ[pos + 1]]
        else:
            way = -begin[queues[r]] if span else 0.0
        for e in range(feeds[t]):
            u = feed[t, e]
            way = max(way, lag[t, e] + dur[u] + after[base[u] + k])
        if after[base[t] + k] == way:
            continue
        after[base[t] + k] = way
        if pos > queues[r]:
            j = rank[pos - 1]
            dirty[j] = True
            i, low = max(i, j), min(low, j)
        for e in range(needs[t]):
            j = rank[place[base[need[t, e]] + k]]
            dirty[j] = True
            i, low = max(i, j), min(low, j)


# --- changes of one queue -------------------------------------------------------------------------


def allowed(
    low, high, fresh, seq, occ, place, base, needs, need, own, take, free, cap, level, counts
):
    """True when the types `fresh` can stand at positions low to high.

    None before what it needs in its own queue (`own[type, i]`), memory not above `cap`.
    """
    for pos in range(high, low - 1, -1):
        counts[seq[pos]] = occ[pos]
    now = level[low]
    for i in range(high - low + 1):
        t = fresh[i]
        now += take[t]
        if now > cap:
            return False
        now -= free[t]
        k = counts[t]
        for e in range(needs[t]):
            if own[t, e]:
                u = need[t, e]
                at = place[base[u] + k]
                if at > high or (at >= low and counts[u] <= k):
                    return False
        counts[t] = k + 1
    return True


def arrange(low, high, fresh, seq, occ, place, base, take, free, level, counts):
    """Puts the types `fresh` at positions low to high."""
    for pos in range(high, low - 1, -1):
        counts[seq[pos]] = occ[pos]
    now = level[low]
    for i in range(high - low + 1):
        t, pos = fresh[i], low + i
        seq[pos] = t
        occ[pos] = counts[t]
        place[base[t] + counts[t]] = pos
        counts[t] += 1
        level[pos] = now
        now += take[t] - free[t]


def critical(
    queues, queue_of, seq, occ, place, base, dur, needs, need, delay, span, begin, node_end,
    state, path,
):  # fmt: skip
    """Writes the positions of a critical path, last first; returns how many."""
    best, at = -1.0, 0
    for r in range(len(queues) - 1):
        last = queues[r + 1] - 1
        if last < queues[r]:
            continue
        length = node_end[base[seq[last]] + occ[last]] - (begin[queues[r]] if span else 0.0)
        if length > best:
            best, at = length, last
    n = 0
    while n < len(path):
        path[n] = at
        n += 1
        t, k = seq[at], occ[at]
        time, before = begin[at], -1
        if at > queues[queue_of[t]]:
            other = seq[at - 1]
            if node_end[base[other] + occ[at - 1]] >= time:
                before = at - 1
        if before < 0 or draw(state) < 0.3:
            for e in range(needs[t]):
                node = base[need[t, e]] + k
                if node_end[node] + delay[t, e] >= time:
                    before = place[node]
        if before < 0:
            break
        at = before
    return n


def reach(state, longest):
    """How far to move: mostly next to it, sometimes far."""
    u = draw(state)
    if u < 0.45:
        return 1
    if u < 0.85:
        return 2 + below(state, 5)
    return 2 + below(state, longest)


def propose(at, right, kind, distance, queues, queue_of, seq, fresh, bounds):
    """A change of the queue around a position into `fresh`; writes low, high; False for none.

    kind 0: the type there moves by the distance; 1: it changes places with another. It stops
    before its own type, which it cannot be told from.
    """
    t = seq[at]
    r = queue_of[t]
    other = at
    if right:
        stop = min(at + distance, queues[r + 1] - 1)
        while other < stop and seq[other + 1] != t:
            other += 1
    else:
        stop = max(at - distance, queues[r])
        while other > stop and seq[other - 1] != t:
            other -= 1
    if other == at:
        return False
    low, high = min(at, other), max(at, other)
    bounds[0], bounds[1] = low, high
    step = 0 if kind == 1 else 1 if right else -1
    for pos in range(max(low, low - step), min(high, high - step) + 1):
        fresh[pos - low] = seq[pos + step]
    if step <= 0:
        fresh[0] = seq[high]
    if step >= 0:
        fresh[high - low] = seq[low]
    return True


def anneal(  # noqa: C901 (one compiled loop: calls of closures are not)
    order, queues, queue_of, base, dur, needs, need, delay, own, feeds, feed, lag, take, free, cap,
    span, hot, cold, n_moves, focus, goal, seed, quiet, best_order, info,
):  # fmt: skip
    """Searches from `order` by moves within queues; writes the best to `best_order`.

    Returns its cost; -1.0 where `order` cannot run. Temperature falls from `hot` to `cold`. A
    share `focus` of the moves begins on a critical path. What starts from `quiet[0]` to `quiet[1]`
    is left as it is.
    """
    n, p = len(order), len(queues) - 1
    state = np.zeros(1, dtype=np.int64)
    state[0] = seed % 2147483646 + 1
    for _ in range(10):
        draw(state)
    seq = order.copy()
    occ, place = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    level, begin, after = np.zeros(n), np.zeros(n), np.full(n, -1e300)
    start, end, was = np.zeros(n), np.zeros(n), np.zeros((2 * n, 2))
    touched, rank = np.zeros(2 * n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    dirty, done = np.zeros(n, dtype=np.bool_), np.zeros(n, dtype=np.bool_)
    cursor, clock, more = np.zeros(p, dtype=np.int64), np.zeros(p), np.zeros(p, dtype=np.bool_)
    sizes = np.zeros(3, dtype=np.int64)
    counts, fresh = np.zeros(len(base), dtype=np.int64), np.zeros(n, dtype=np.int64)
    path, bounds = np.zeros(n, dtype=np.int64), np.zeros(2, dtype=np.int64)
    kept, marks = np.zeros((4, n), dtype=np.int64), np.zeros((4, 2), dtype=np.int64)
    label(seq, occ, place, base)
    levels(queues, seq, take, free, cap, level)
    cost = times(
        queues, seq, occ, base, dur, needs, need, delay, span, start, end, done, cursor, clock,
    )  # fmt: skip
    best_order[:] = seq
    if cost < 0.0 or n_moves == 0:
        return cost
    best = cost
    for pos in range(n):
        begin[pos] = start[base[seq[pos]] + occ[pos]]
    first = np.zeros(p)
    for r in range(p):
        if queues[r] < queues[r + 1]:
            first[r] = begin[queues[r]]
    sequence = np.argsort(begin, kind="mergesort")
    rank[sequence] = np.arange(n)
    dirty[:] = True
    settle_after(
        0, n - 1, queues, queue_of, seq, occ, place, base, dur, needs, need, feeds, feed, lag, span,
        begin, sequence, rank, after, dirty,
    )  # fmt: skip
    n_path, longest = 0, max(4, min(60, n // p - 1))
    cooling = (cold / hot) ** (1.0 / max(1, n_moves))
    heat, accepted = hot, 0
    for _ in range(n_moves):
        heat *= cooling
        if draw(state) < focus:
            if n_path == 0:
                n_path = critical(
                    queues, queue_of, seq, occ, place, base, dur, needs, need, delay, span, begin,
                    end, state, path,
                )  # fmt: skip
            at = path[below(state, n_path)]
        else:
            at = below(state, n)
        parts, since = 0, 1e300
        u = draw(state)
        wanted = 1 if u < 0.4 else 2 if u < 0.7 else 3 if u < 0.9 else 4
        for _ in range(wanted):
            right = draw(state) < 0.5
            kind = 1 if draw(state) < 0.25 else 0
            if not propose(
                at, right, kind, reach(state, longest), queues, queue_of, seq, fresh, bounds
            ):
                break
            low, high = bounds[0], bounds[1]
            r = queue_of[seq[low]]
            if begin[low] < quiet[1] and begin[high] >= quiet[0]:
                break
            if not allowed(
                low, high, fresh, seq, occ, place, base, needs, need, own, take, free, cap[r],
                level, counts,
            ):  # fmt: skip
                break
            for i in range(high - low + 1):
                kept[parts, i] = seq[low + i]
            marks[parts, 0], marks[parts, 1] = low, high
            parts += 1
            since = min(since, begin[low])
            arrange(low, high, fresh, seq, occ, place, base, take, free, level, counts)
            if parts < wanted:  # the next part somewhere near in time, on any queue
                r = below(state, p)
                if queues[r + 1] == queues[r]:
                    break
                soon = first_from(since, queues[r], queues[r + 1], begin)
                at = min(queues[r + 1] - 1, soon + below(state, longest // 2 + 1))
        if parts == 0:
            continue
        limit = cost - heat * np.log(draw(state) + 1e-12)
        until, surely = -1.0, first.max() if span else -1.0
        for j in range(parts):
            until = max(until, begin[marks[j, 1]])
        sizes[0], sizes[1], sizes[2] = 0, n, -1
        for j in range(parts):
            pos = marks[j, 1] + 1
            if pos < queues[queue_of[seq[pos - 1]] + 1] and begin[pos] > until:
                dirty[rank[pos]] = True
                sizes[1], sizes[2] = min(sizes[1], rank[pos]), max(sizes[2], rank[pos])
        good = settle_near(
            since, until, queues, queue_of, seq, occ, place, base, dur, needs, need, delay, feeds,
            feed, begin, rank, start, end, touched, was, dirty, cursor, more, sizes,
        ) and settle_far(
            limit, surely, queues, queue_of, seq, occ, place, base, dur, needs, need, delay, feeds,
            feed, span, begin, sequence, rank, after, start, end, touched, was, dirty, sizes,
        )  # fmt: skip
        new = cost_of(queues, seq, occ, base, span, start, end) if good else 1e300
        if new > limit:
            restore(start, end, touched, was, dirty, sizes)
            for i in range(parts):
                j = parts - 1 - i
                low, high = marks[j, 0], marks[j, 1]
                for k in range(high - low + 1):
                    fresh[k] = kept[j, k]
                arrange(low, high, fresh, seq, occ, place, base, take, free, level, counts)
            continue
        accepted += 1
        cost, n_path = new, 0
        low, high = n, -1
        for i in range(sizes[0]):
            pos = place[touched[i]]
            begin[pos] = start[touched[i]]
            low, high = min(low, rank[pos]), max(high, rank[pos])
        for j in range(parts):
            for pos in range(marks[j, 0], marks[j, 1] + 1):
                begin[pos] = start[base[seq[pos]] + occ[pos]]
                low, high = min(low, rank[pos]), max(high, rank[pos])
        sort(low, high, sequence, rank, begin)
        low, high = n, -1
        for r in range(p if span else 0):
            if queues[r] < queues[r + 1] and begin[queues[r]] != first[r]:
                first[r] = begin[queues[r]]
                at = rank[queues[r + 1] - 1]
                dirty[at] = True
                low, high = min(low, at), max(high, at)
        for j in range(parts):
            r = queue_of[seq[marks[j, 0]]]
            for pos in range(max(queues[r], marks[j, 0] - 1), marks[j, 1] + 1):
                dirty[rank[pos]] = True
                low, high = min(low, rank[pos]), max(high, rank[pos])
        settle_after(
            low, high, queues, queue_of, seq, occ, place, base, dur, needs, need, feeds, feed, lag,
            span, begin, sequence, rank, after, dirty,
        )  # fmt: skip
        if cost < best:
            best = cost
            best_order[:] = seq
            if best <= goal:
                break
    info[0] = accepted
    return best


# --- list scheduling ------------------------------------------------------------------------------


def reserve(r, t, k, types_of, n_types_of, path, first, closes, take, counts, done):
    """Memory that must stay free for the oldest microbatch of each path in this queue.

    While it can always go on, no order of the others can stop the pipeline for ever. The forward
    of type t, microbatch k, does not keep room for itself.
    """
    total = 0.0
    for i in range(n_types_of[r]):
        a = types_of[r, i]
        if not first[a] or done[a] == counts[a]:
            continue
        oldest = done[a]
        for j in range(n_types_of[r]):
            b = types_of[r, j]
            if closes[b] and path[b] == path[a]:
                oldest = min(oldest, done[b])
        if done[a] <= oldest and not (a == t and k == oldest):
            total += take[a]
    return total


def dispatch(  # noqa: C901 (one compiled loop: calls of closures are not)
    queues, queue_of, path, base, counts, dur, needs, need, delay, take, free, cap, first, closes,
    partner, wakes, types_of, n_types_of, head_room, bias, ahead, urgent, order,
):  # fmt: skip
    """Fills `order` greedily: a free queue runs the type with the least start + bias.

    `first` marks forwards, `closes` the kind that ends a microbatch; a forward runs while at most
    `ahead[type]` of its stage are before their backward `partner`; `wakes[type]` are the queues
    that wait for a type. Where memory holds a forward
    up, kinds that free memory have their bias lessened by `urgent`. False where it stops.
    """
    p, n = len(queues) - 1, len(order)
    done = np.zeros(len(base), dtype=np.int64)
    end = np.zeros(n)
    clock, level = np.zeros(p), np.zeros(p)
    cursor = queues[:-1].copy()
    choice, at = np.full(p, -1, dtype=np.int64), np.zeros(p)
    dirty = np.ones(p, dtype=np.bool_)
    for _ in range(n):
        for r in range(p):
            if not dirty[r]:
                continue
            dirty[r] = False
            choice[r] = -1
            best, blocked = 1e300, 0
            for turn in range(2):
                for i in range(n_types_of[r]):
                    t = types_of[r, i]
                    k = done[t]
                    if k >= counts[t] or (turn == 1 and free[t] <= 0.0):
                        continue
                    ready = clock[r]
                    for e in range(needs[t]):
                        u = need[t, e]
                        if done[u] <= k:
                            ready = -1.0
                            break
                        ready = max(ready, end[base[u] + k] + delay[t, e])
                    if ready < 0.0:
                        continue
                    score = ready + bias[t] - (urgent if turn == 1 else 0.0)
                    if first[t]:
                        if k - done[partner[t]] >= ahead[t]:
                            continue
                        after = level[r] + take[t] + head_room[r]
                        if (
                            after > cap[r]
                            or after
                            + reserve(
                                r,
                                t,
                                k,
                                types_of,
                                n_types_of,
                                path,
                                first,
                                closes,
                                take,
                                counts,
                                done,
                            )
                            > cap[r]
                        ):
                            if ready <= clock[r]:
                                blocked = 1
                            continue
                    elif level[r] + take[t] > cap[r]:
                        blocked = 1
                        continue
                    if score < best:
                        best, choice[r], at[r] = score, t, ready
                if blocked == 0:
                    break
        soonest, r = 1e300, -1
        for q in range(p):
            if choice[q] >= 0 and at[q] < soonest:
                soonest, r = at[q], q
        if r < 0:
            return False
        t = choice[r]
        end[base[t] + done[t]] = clock[r] = at[r] + dur[t]
        level[r] += take[t] - free[t]
        order[cursor[r]] = t
        cursor[r] += 1
        done[t] += 1
        dirty[r] = True
        for i in range(wakes.shape[1]):
            if wakes[t, i] >= 0:
                dirty[wakes[t, i]] = True
    return True
