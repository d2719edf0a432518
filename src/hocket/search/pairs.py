"""Inner loops over orders whose slots may hold a forward with a backward; compiled with numba.

Queue q holds the types `order[top[q]:top[q] + size[q]]`; `opens[i]` says that a slot begins at i,
and the forward of a slot of two stands first. A stage's B and I are counted together: the k-th of
them is of the k-th microbatch of its path. A type writes its end to `ends[cell[type] + k]` (no
cell: below 0) and waits for `ends[need[type, i] + k]`.
"""

from __future__ import annotations

import numpy as np

from hocket.search.kernel import below, draw

# --- one order ------------------------------------------------------------------------------------


def fits(q, top, size, order, opens, occ, side, group, weight_of, take, free, cap, seen):
    """Numbers the microbatches of a queue; True where it keeps its limit and no W comes too soon.

    A slot of two holds what both take before it frees what both free.
    """
    for t in range(len(group)):
        seen[t] = 0
    level = 0.0
    i, last = top[q], top[q] + size[q]
    while i < last:
        took = freed = 0.0
        while True:
            t = order[i]
            if side[t] == 2:
                seen[t] -= 1
                if seen[t] < 0:
                    return False
            else:
                occ[i] = seen[group[t]]
                seen[group[t]] += 1
                if side[t] == 1 and group[t] == t:
                    seen[weight_of[t]] += 1
            took += take[t]
            freed += free[t]
            i += 1
            if i == last or opens[i]:
                break
        if level + took > cap[q]:
            return False
        level += took - freed
    return True


def times(  # noqa: C901 (one compiled loop)
    top, size, order, opens, occ, dur, pair, cell, needs, need, delay, span, limit, ends, at,
    first, clock,
):  # fmt: skip
    """The makespan, or the longest time of a queue; -1.0: it never ends or passes the limit."""
    n_queues = len(size)
    for i in range(len(ends)):
        ends[i] = -1.0
    for q in range(n_queues):
        at[q], first[q], clock[q] = top[q], -1.0, 0.0
    moved = True
    while moved:
        moved = False
        for q in range(n_queues):
            i, last = at[q], top[q] + size[q]
            now = clock[q]
            while i < last:
                j = i + 2 if i + 1 < last and not opens[i + 1] else i + 1
                start, free = now, True
                for a in range(i, j):
                    t = order[a]
                    for e in range(needs[t]):
                        ready = ends[need[t, e] + occ[a]]
                        if ready < 0:
                            free = False
                            break
                        start = max(start, ready + delay[t, e])
                    if not free:
                        break
                if not free:
                    break
                t = order[i]
                now = start + (dur[t] if j == i + 1 else pair[t, order[i + 1]])
                if first[q] < 0:
                    first[q] = start
                if now - (first[q] if span else 0.0) > limit:
                    return -1.0
                for a in range(i, j):
                    if cell[order[a]] >= 0:
                        ends[cell[order[a]] + occ[a]] = now
                i = j
            if i > at[q]:
                moved = True
            at[q], clock[q] = i, now
    cost = 0.0
    for q in range(n_queues):
        if at[q] < top[q] + size[q]:
            return -1.0
        if size[q]:
            cost = max(cost, clock[q] - (first[q] if span else 0.0))
    return cost


# --- changes of one queue -------------------------------------------------------------------------


def take_out(i, q, top, size, order, opens):
    """Removes what stands at i; its partner stays, alone."""
    last = top[q] + size[q]
    if opens[i] and i + 1 < last:
        opens[i + 1] = True
    for a in range(i, last - 1):
        order[a], opens[a] = order[a + 1], opens[a + 1]
    size[q] -= 1


def put_in(i, t, new, q, top, size, order, opens):
    """Inserts a type at i, as a slot of its own or (not `new`) with what stands before."""
    for a in range(top[q] + size[q], i, -1):
        order[a], opens[a] = order[a - 1], opens[a - 1]
    order[i], opens[i] = t, new
    size[q] += 1


def apart(i, q, top, size, opens):
    """The nearest place at or before i where a slot begins, or the queue's end."""
    if i >= top[q] + size[q]:
        return top[q] + size[q]
    while i > top[q] and not opens[i]:
        i -= 1
    return i


def far(state, n):
    """A distance, mostly short."""
    u = draw(state)
    return 1 + int(u * u * u * n)


def moved(i, q, top, size, order, opens, state):
    """Moves the slot at i to another place of its queue."""
    i = apart(i, q, top, size, opens)
    t, u = order[i], -1
    if i + 1 < top[q] + size[q] and not opens[i + 1]:
        u = order[i + 1]
        take_out(i + 1, q, top, size, order, opens)
    take_out(i, q, top, size, order, opens)
    step = far(state, size[q] // 3)
    if below(state, 2):
        to = min(i + step, top[q] + size[q])
        while to < top[q] + size[q] and not opens[to]:
            to += 1
    else:
        to = apart(max(i - step, top[q]), q, top, size, opens)
    put_in(to, t, True, q, top, size, order, opens)
    if u >= 0:
        put_in(to + 1, u, False, q, top, size, order, opens)


def joined(i, q, top, size, order, opens, side, state):
    """Puts what stands at i into one slot with another that is alone; False where none is near."""
    t = order[i]
    if side[t] == 2:
        return False
    take_out(i, q, top, size, order, opens)
    step = -1 if below(state, 2) else 1
    to = i + step * (far(state, size[q] // 3) - 1) - (step < 0)
    for _ in range(8):
        if to < top[q] or to >= top[q] + size[q]:
            return False
        alone = opens[to] and (to + 1 == top[q] + size[q] or opens[to + 1])
        if alone and side[order[to]] == 1 - side[t]:
            break
        to += step
    else:
        return False
    if side[t] == 0:
        put_in(to, t, True, q, top, size, order, opens)
        opens[to + 1] = False
    else:
        put_in(to + 1, t, False, q, top, size, order, opens)
    return True


def parted(i, q, top, size, order, opens, state):
    """Takes what stands at i out of its slot of two, to a place near; False where it is alone."""
    last = top[q] + size[q]
    if opens[i] and (i + 1 == last or opens[i + 1]):
        return False
    t = order[i]
    take_out(i, q, top, size, order, opens)
    step = far(state, size[q] // 4)
    to = min(max(i + (step if below(state, 2) else 1 - step), top[q]), top[q] + size[q])
    put_in(apart(to, q, top, size, opens), t, True, q, top, size, order, opens)
    return True


def exchanged(i, q, top, size, order, opens, side, state):
    """Exchanges two of one side, each staying in the other's slot; False where they are alike."""
    step = far(state, size[q] // 3) * (1 if below(state, 2) else -1)
    j = min(max(i + step, top[q]), top[q] + size[q] - 1)
    if side[order[i]] != side[order[j]] or order[i] == order[j]:
        return False
    order[i], order[j] = order[j], order[i]
    return True


def recast(i, q, top, size, order, opens, side, group, whole_of, weight_of, state):
    """Makes a B an I and a W, or an I and the next W of its stage a B; False: it is neither."""
    t, last = order[i], top[q] + size[q]
    if side[t] != 1:
        return False
    if group[t] != t:
        order[i] = group[t]
        to = min(i + far(state, size[q]), last)
        while to < last and not opens[to]:
            to += 1
        put_in(to, weight_of[group[t]], True, q, top, size, order, opens)
        return True
    for a in range(i + 1, last):
        if order[a] == weight_of[t]:
            take_out(a, q, top, size, order, opens)
            order[i] = whole_of[t]
            return True
    return False


def changed(i, q, top, size, order, opens, side, group, whole_of, weight_of, mixes, state):
    """One change by chance; False where it came to nothing and the queue is to be put back."""
    r = below(state, 12 if mixes else 10)
    if r < 4:
        moved(i, q, top, size, order, opens, state)
        return True
    if r < 7:
        return joined(i, q, top, size, order, opens, side, state)
    if r < 8:
        return parted(i, q, top, size, order, opens, state)
    if r < 10:
        return exchanged(i, q, top, size, order, opens, side, state)
    return recast(i, q, top, size, order, opens, side, group, whole_of, weight_of, state)


def copied(a, b, order, opens, occ, to_order, to_opens, to_occ):
    """Copies positions a to b of an order."""
    for i in range(a, b):
        to_order[i], to_opens[i], to_occ[i] = order[i], opens[i], occ[i]


def anneal(
    top, size, order, opens, side, group, whole_of, weight_of, dur, pair, cell, needs, need, delay,
    take, free, cap, n_ends, span, mixes, moves, hot, cold, goal, seed, best_size, best_order,
    best_opens,
):  # fmt: skip
    """Simulated annealing; writes the best order and returns its cost, -1.0 for a bad start.

    hot, cold: first and last temperature, in ticks; ends early at a cost of `goal`.
    """
    n_queues, n = len(size), len(order)
    state = np.array([seed % 2147483646 + 1], dtype=np.int64)
    occ, seen = np.zeros(n, dtype=np.int64), np.zeros(len(group), dtype=np.int64)
    old_order, old_opens, old_occ = order.copy(), opens.copy(), occ.copy()
    ends, first, clock = np.zeros(n_ends), np.zeros(n_queues), np.zeros(n_queues)
    at = np.zeros(n_queues, dtype=np.int64)
    for q in range(n_queues):
        if not fits(q, top, size, order, opens, occ, side, group, weight_of, take, free, cap, seen):
            return -1.0
    cost = times(top, size, order, opens, occ, dur, pair, cell, needs, need, delay, span, 1e300,
                 ends, at, first, clock)  # fmt: skip
    if cost < 0:
        return -1.0
    best = cost
    best_size[:], best_order[:], best_opens[:] = size, order, opens
    cooling = (cold / hot) ** (1.0 / max(1, moves)) if hot > 0 else 1.0
    heat = hot
    for _ in range(moves):
        if best <= goal:
            break
        heat *= cooling
        q = below(state, n_queues)
        if size[q] < 2:
            continue
        old_size, a = size[q], top[q]
        copied(a, a + old_size, order, opens, occ, old_order, old_opens, old_occ)
        i = a + below(state, old_size)
        limit = cost - heat * np.log(max(draw(state), 1e-12))
        good = changed(i, q, top, size, order, opens, side, group, whole_of, weight_of, mixes,
                       state)  # fmt: skip
        good = good and fits(q, top, size, order, opens, occ, side, group, weight_of, take, free,
                             cap, seen)  # fmt: skip
        new = -1.0
        if good:
            new = times(top, size, order, opens, occ, dur, pair, cell, needs, need, delay, span,
                        limit, ends, at, first, clock)  # fmt: skip
        if new < 0:
            size[q] = old_size
            copied(a, a + old_size, old_order, old_opens, old_occ, order, opens, occ)
            continue
        cost = new
        if cost < best:
            best = cost
            best_size[:], best_order[:], best_opens[:] = size, order, opens
    return best


# --- list scheduling ------------------------------------------------------------------------------


def ready(q, wanted, now, room, types_of, n_types, side, group, counts, done, needs, need, delay,
          ends, take, kept, ahead, warm, lean, soon):  # fmt: skip
    """The type of one side that was ready first, or -1; lowers `soon[q]` to when the next will be.

    It and what it leaves to others fits the room, and fewer than `warm` are ahead. Type t counts as
    ready `lean[t]` later than it is.
    """
    found, best = -1, 1e300
    for x in range(n_types[q]):
        t = types_of[q, x]
        if side[t] != wanted or done[group[t]] >= counts[t] or take[t] + kept[t] > room:
            continue
        if wanted == 0 and ahead[t] >= warm[t]:
            continue
        at = 0.0
        for e in range(needs[t]):
            end = ends[need[t, e] + done[group[t]]]
            at = max(at, end + delay[t, e]) if end >= 0 else 1e300
        if at > now:
            soon[q] = min(soon[q], at)
        elif at + lean[t] < best:
            found, best = t, at + lean[t]
    return found


def owing(q, types_of, n_types, side, owed):
    """A W that can run, or -1."""
    for x in range(n_types[q]):
        t = types_of[q, x]
        if side[t] == 2 and owed[t] > 0:
            return t
    return -1


def may_come(q, room, types_of, n_types, side, counts, done, take):
    """True while a forward is left that takes no more than the room."""
    for x in range(n_types[q]):
        t = types_of[q, x]
        if side[t] == 0 and done[t] < counts[t] and take[t] <= room:
            return True
    return False


def dispatch(  # noqa: C901 (one compiled loop)
    top, types_of, n_types, side, group, forward_of, whole_of, weight_of, counts, dur, pair,
    cell, needs, need, delay, take, free, cap, n_ends, warm, kept, lean, patient, joint, size,
    order, opens,
):  # fmt: skip
    """A list scheduler that puts ready forwards and backwards into one slot; True when all ended.

    A forward of type t runs alone while fewer than `warm[t]` of its stage are ahead of their
    backwards, and leaves `kept[t]` of the memory to later stages; a backward runs alone (`patient`)
    where no forward is left or fits. Who waits for ever runs what there is. `joint`: an I that
    shares a slot takes its W with it, as a B, where that is shorter.
    """
    n_queues = len(size)
    ends, done = np.full(n_ends, -1.0), np.zeros(len(group), dtype=np.int64)
    owed, ahead = np.zeros(len(group), dtype=np.int64), np.zeros(len(group), dtype=np.int64)
    now, clock = np.zeros(n_queues), np.zeros(n_queues)
    level, soon = np.zeros(n_queues), np.zeros(n_queues)
    endless = np.full(len(group), 1e300)
    size[:] = 0
    todo, latest = 0, 0.0
    for q in range(n_queues):
        for x in range(n_types[q]):
            todo += counts[types_of[q, x]] * (side[types_of[q, x]] < 2)
    while todo:
        q = np.argmin(now)
        forced, at = now[q] >= 1e300, now[q]
        f = b = w = -1
        for r in range(n_queues if forced else 1):
            if forced:
                q, at = r, latest
            room, soon[q] = cap[q] - level[q], 1e300
            b = ready(q, 1, at, room, types_of, n_types, side, group, counts, done, needs, need,
                      delay, ends, take, kept, ahead, warm, lean, soon)  # fmt: skip
            less = free[b] - take[b] if b >= 0 else 0.0
            f = ready(q, 0, at, room + less, types_of, n_types, side, group, counts, done, needs,
                      need, delay, ends, take, kept, ahead, endless if forced or b >= 0 else warm,
                      lean, soon)  # fmt: skip
            w = owing(q, types_of, n_types, side, owed)
            if f >= 0 and b >= 0:
                own = forward_of[b] == f and done[f] == done[group[b]]
                f = -1 if own or take[f] + take[b] > room else f
            elif not forced and b >= 0 and patient:
                wait = may_come(q, room - take[b], types_of, n_types, side, counts, done, take)
                b = -1 if wait else b
            if f >= 0 or b >= 0 or w >= 0:
                break
        if f < 0 and b < 0 and w < 0:
            if forced:
                return False
            now[q] = soon[q]
            continue
        later = weight_of[b] if joint and f >= 0 and b >= 0 else -1
        if later >= 0 and pair[f, whole_of[b]] < pair[f, b] + dur[later]:
            b = whole_of[b]
        i = top[q] + size[q]
        t = f if f >= 0 else b if b >= 0 else w
        last = at + (pair[f, b] if f >= 0 and b >= 0 else dur[t])
        for u in (f, b, w if t == w else -1):
            if u < 0:
                continue
            order[i], opens[i] = u, u == t
            i += 1
            level[q] += take[u] - free[u]
            if side[u] == 2:
                owed[u] -= 1
                continue
            todo -= 1
            ends[cell[u] + done[group[u]]] = last
            done[group[u]] += 1
            ahead[forward_of[u]] += 1 if side[u] == 0 else -1
            if weight_of[u] >= 0:
                owed[weight_of[u]] += 1
        size[q] = i - top[q]
        now[q] = clock[q] = last
        for r in range(n_queues):  # who waits looks again when this has ended
            now[r] = max(clock[r], min(now[r], last))
        latest = max(latest, last)
    for q in range(n_queues):
        for x in range(n_types[q]):
            t = types_of[q, x]
            while side[t] == 2 and owed[t] > 0:
                order[top[q] + size[q]], opens[top[q] + size[q]] = t, True
                size[q] += 1
                owed[t] -= 1
    return True
