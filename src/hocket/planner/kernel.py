"""The search's inner loops over orders as sequences of types; compiled where numba is installed.

A type is (path, kind, stage); the k-th time it stands in a queue is its k-th microbatch: node
`base[type] + k`. Types wait for `need[type, i]` of the same microbatch, `delay[type, i]` after its
end. These arrays are made from `deps.py`. Imports numpy, nothing of hocket.
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


def levels(queues, seq, take, free, cap, dur, level, rest):
    """Memory before, and work from each position on; returns the largest excess over the cap."""
    worst = -1e300
    for r in range(len(queues) - 1):
        now = 0.0
        for pos in range(queues[r], queues[r + 1]):
            level[pos] = now
            worst = max(worst, now + take[seq[pos]] - cap[r])
            now += take[seq[pos]] - free[seq[pos]]
        work = 0.0
        for pos in range(queues[r + 1] - 1, queues[r] - 1, -1):
            work += dur[seq[pos]]
            rest[pos] = work
    return worst


def advance(  # noqa: C901 (one compiled loop: calls of closures are not)
    queues, seq, occ, base, dur, needs, need, delay, tail, rest, span, limit, since, begin,
    node_start, node_end, stamp, now, new_start, new_end, cursor, clock,
):  # fmt: skip
    """Times of everything that starts at `since` or later; returns the cost, or -1.0.

    `begin[position]`, `node_start`, `node_end` hold the times before a change that touches
    nothing before `since`; new times go to `new_start`, `new_end` (by node), marked `now` in
    `stamp`. Cost: the last end, or with `span` the longest queue from first start to last end.
    -1.0: something waits for ever, or the cost is above `limit`.
    """
    p = len(queues) - 1
    left = 0
    worst = 0.0
    for r in range(p):
        low, high = queues[r], queues[r + 1]
        while low < high:
            mid = (low + high) // 2
            if begin[mid] >= since:
                high = mid
            else:
                low = mid + 1
        cursor[r] = low
        left += queues[r + 1] - low
        clock[r, 0] = 0.0
        clock[r, 1] = -1.0  # first start, where span counts from
        if low > queues[r]:
            t = seq[low - 1]
            clock[r, 0] = node_end[base[t] + occ[low - 1]]
            clock[r, 1] = begin[queues[r]] if span else 0.0
            if low == queues[r + 1]:
                worst = max(worst, clock[r, 0] - clock[r, 1])
        elif not span:
            clock[r, 1] = 0.0
    up = True
    while left > 0:
        before = left
        for i in range(p):
            r = i if up else p - 1 - i
            pos, stop = cursor[r], queues[r + 1]
            time, first = clock[r, 0], clock[r, 1]
            while pos < stop:
                t, k = seq[pos], occ[pos]
                at = time
                free = True
                for e in range(needs[t]):
                    node = base[need[t, e]] + k
                    if node_start[node] < since:
                        ready = node_end[node] + delay[t, e]
                    elif stamp[node] == now:
                        ready = new_end[node] + delay[t, e]
                    else:
                        free = False
                        break
                    if ready > at:
                        at = ready
                if not free:
                    break
                node = base[t] + k
                if first < 0.0:
                    first = at
                time = at + dur[t]
                if at + rest[pos] - first > limit or (time + tail[t] > limit and not span):
                    return -1.0
                new_start[node] = at
                new_end[node] = time
                stamp[node] = now
                pos += 1
            left -= pos - cursor[r]
            cursor[r] = pos
            clock[r, 0], clock[r, 1] = time, first
            if pos == stop and time - first > worst:
                worst = time - first
        if left == before:
            return -1.0
        up = not up
    return worst


# --- changes of one queue -------------------------------------------------------------------------


def first_counts(low, high, seq, occ, counts):
    """Writes the first occurrence number of each type at positions low to high."""
    for i in range(high - low + 1):
        pos = high - i
        counts[seq[pos]] = occ[pos]


def allowed(
    low, high, fresh, seq, occ, place, base, needs, need, own, take, free, cap, level, counts
):
    """True when the types `fresh` can stand at positions low to high.

    None before what it needs in its own queue (`own[type, i]`), memory not above `cap`.
    """
    first_counts(low, high, seq, occ, counts)
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


def arrange(low, high, fresh, seq, occ, place, base, take, free, dur, level, rest, counts):
    """Puts the types `fresh` at positions low to high."""
    first_counts(low, high, seq, occ, counts)
    now, work = level[low], rest[low]
    for i in range(high - low + 1):
        t, pos = fresh[i], low + i
        seq[pos] = t
        occ[pos] = counts[t]
        place[base[t] + counts[t]] = pos
        counts[t] += 1
        level[pos] = now
        now += take[t] - free[t]
        rest[pos] = work
        work -= dur[t]


def shifted(low, high, to_right, seq, fresh):
    """The types at low to high with the first one moved last, or the last one first."""
    n = high - low + 1
    if to_right:
        for i in range(n - 1):
            fresh[i] = seq[low + i + 1]
        fresh[n - 1] = seq[low]
    else:
        for i in range(n - 1):
            fresh[i + 1] = seq[low + i]
        fresh[0] = seq[high]


def swapped(low, high, seq, fresh):
    """The types at low to high with the first and the last exchanged."""
    n = high - low + 1
    for i in range(n):
        fresh[i] = seq[low + i]
    fresh[0], fresh[n - 1] = seq[high], seq[low]


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
    bounds[0], bounds[1] = min(at, other), max(at, other)
    if kind == 0:
        shifted(bounds[0], bounds[1], right, seq, fresh)
    else:
        swapped(bounds[0], bounds[1], seq, fresh)
    return True


def anneal(  # noqa: C901 (one compiled loop: calls of closures are not)
    order, queues, queue_of, base, dur, needs, need, delay, own, take, free, cap, tail, span,
    hot, cold, n_moves, goal, seed, quiet, best_order, info,
):  # fmt: skip
    """Searches from `order` by moves within queues; writes the best to `best_order`.

    Returns its cost; -1.0 where `order` cannot run. Temperature falls from `hot` to `cold`. What
    starts from `quiet[0]` to `quiet[1]` is left as it is.
    """
    n, p, n_nodes = len(order), len(queues) - 1, len(order)
    state = np.zeros(1, dtype=np.int64)
    state[0] = seed % 2147483646 + 1
    for _ in range(10):
        draw(state)
    seq = order.copy()
    occ, place = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    level, rest, begin = np.zeros(n), np.zeros(n), np.zeros(n)
    node_start, node_end = np.zeros(n_nodes), np.zeros(n_nodes)
    new_start, new_end = np.zeros(n_nodes), np.zeros(n_nodes)
    stamp = np.full(n_nodes, -1, dtype=np.int64)
    cursor, clock = np.zeros(p, dtype=np.int64), np.zeros((p, 2))
    counts, fresh = np.zeros(len(base), dtype=np.int64), np.zeros(n, dtype=np.int64)
    path, bounds = np.zeros(n, dtype=np.int64), np.zeros(2, dtype=np.int64)
    kept, marks = np.zeros((4, n), dtype=np.int64), np.zeros((4, 2), dtype=np.int64)
    label(seq, occ, place, base)
    levels(queues, seq, take, free, cap, dur, level, rest)
    cost = advance(
        queues, seq, occ, base, dur, needs, need, delay, tail, rest, span, 1e300, -1.0, begin,
        node_start, node_end, stamp, 0, new_start, new_end, cursor, clock,
    )  # fmt: skip
    best_order[:] = seq
    if cost < 0.0:
        return cost
    best = cost
    node_start[:], node_end[:] = new_start, new_end
    for pos in range(n):
        begin[pos] = new_start[base[seq[pos]] + occ[pos]]
    n_path, longest = 0, max(4, min(60, n // p - 1))
    cooling = (cold / hot) ** (1.0 / max(1, n_moves))
    heat, accepted = hot, 0
    for move in range(1, n_moves + 1):
        heat *= cooling
        if draw(state) < 0.5:
            if n_path == 0:
                n_path = critical(
                    queues, queue_of, seq, occ, place, base, dur, needs, need, delay, span, begin,
                    node_end, state, path,
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
            arrange(low, high, fresh, seq, occ, place, base, take, free, dur, level, rest, counts)
            if parts < wanted:  # the next part somewhere near in time, on any queue
                r = below(state, p)
                if queues[r + 1] == queues[r]:
                    break
                a, b = queues[r], queues[r + 1]
                while a < b:
                    mid = (a + b) // 2
                    if begin[mid] >= since:
                        b = mid
                    else:
                        a = mid + 1
                at = min(queues[r + 1] - 1, a + below(state, longest // 2 + 1))
        if parts == 0:
            continue
        limit = cost - heat * np.log(draw(state) + 1e-12)
        new = advance(
            queues, seq, occ, base, dur, needs, need, delay, tail, rest, span, limit, since, begin,
            node_start, node_end, stamp, move, new_start, new_end, cursor, clock,
        )  # fmt: skip
        if new < 0.0 or new > limit:
            for i in range(parts):
                j = parts - 1 - i
                low, high = marks[j, 0], marks[j, 1]
                for k in range(high - low + 1):
                    fresh[k] = kept[j, k]
                arrange(
                    low, high, fresh, seq, occ, place, base, take, free, dur, level, rest, counts
                )
            continue
        accepted += 1
        cost, n_path = new, 0
        for r in range(p):
            pos = queues[r + 1] - 1
            while pos >= queues[r]:
                node = base[seq[pos]] + occ[pos]
                if stamp[node] != move:
                    break
                begin[pos] = new_start[node]
                node_start[node], node_end[node] = new_start[node], new_end[node]
                pos -= 1
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
