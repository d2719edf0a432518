"""The floor that hocket's speed is held against: a bare compiled longest path, and a copy.

Everything is ready in arrays before the clock starts: kind, stage and microbatch of every action,
and where every action stands. The loop knows four kinds and any placement, and counts what is in
flight. It is no part of hocket and checks nothing.
"""

import numba
import numpy as np

from hocket.ir import kinds_of, mbs_of, stages_of

F, B, I, W = range(4)  # noqa: E741


@numba.njit(cache=True)
def longest_path(kind, stage, mb, starts, queue, position, lengths, durations, latency):
    """Makespan and in-flight peaks; goes over the queues until all are done."""
    n, n_queues = len(kind), len(starts) - 1
    start, end = np.empty(n, np.int64), np.empty(n, np.int64)
    done, cursor = np.zeros(n, np.bool_), starts[:-1].copy()
    flight, peak = np.zeros(n_queues, np.int64), np.zeros(n_queues, np.int64)
    moved = True
    while moved:
        moved = False
        for q in range(n_queues):
            i = cursor[q]
            clock = end[i - 1] if i > starts[q] else 0
            while i < starts[q + 1]:
                k, s, u = kind[i], stage[i], mb[i]
                first = second = -1
                if k == F:
                    if s > 0:
                        first = position[F, s - 1, u]
                elif k == W:
                    first = position[I, s, u]
                else:
                    first = position[F, s, u]
                    if s + 1 < lengths[u]:
                        second = position[I, s + 1, u]
                        if second < 0:
                            second = position[B, s + 1, u]
                time, ready = clock, True
                for j in (first, second):
                    if j >= 0:
                        if not done[j]:
                            ready = False
                        else:
                            time = max(time, end[j] + (latency if queue[j] != q else 0))
                if not ready:
                    break
                start[i] = time
                clock = end[i] = time + durations[k, s]
                done[i] = moved = True
                if k == F:
                    flight[q] += 1
                    peak[q] = max(peak[q], flight[q])
                elif k != I:
                    flight[q] -= 1
                i += 1
            cursor[q] = i
    return end.max(), start.min(), peak


def ready(schedule):
    """The arrays that the loop starts from. Fused slots are taken apart."""
    codes, placement = schedule.codes, schedule.placement
    kind, stage, mb = kinds_of(codes), stages_of(codes), mbs_of(codes)
    position = np.full((4, placement.n_stages, schedule.m), -1, dtype=np.int32)
    position[kind, stage, mb] = np.arange(len(codes))
    starts = schedule.slots[schedule.starts]
    queue = np.repeat(np.arange(len(schedule.queues), dtype=np.int32), np.diff(starts))
    durations = np.ones((4, placement.n_stages), dtype=np.int64)
    return (
        kind.astype(np.int8), stage.astype(np.int32), mb.astype(np.int32), starts, queue, position,
        placement.lengths, durations, 0,
    )  # fmt: skip
