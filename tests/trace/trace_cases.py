"""The timelines that traces are made of here, from orders written by hand."""

from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np

from common import written
from hocket.costs import Bytes, Costs
from hocket.ir import Kind, Line, Schedule, action_of, linear
from hocket.lower import insert_communication
from hocket.pattern import join, run
from hocket.simulator import simulate
from hocket.text import loads
from hocket.timeline import Timeline


def one_f_one_b(p: int, m: int, backward: tuple[Kind, ...] = (Kind.B,)) -> Schedule:
    """Each rank p - r forwards ahead; a backward of I and W makes it the zero-bubble kind."""
    lines = []
    for r in range(p):
        ahead = min(m, p - r)
        parts: list[Line] = [run(Kind.F, r, range(ahead))]
        for mb in range(m):
            parts += [run(kind, r, [mb]) for kind in backward]
            parts += [run(Kind.F, r, [mb + ahead])] if mb + ahead < m else []
        lines.append(join(*parts))
    return Schedule.from_lines("1f1b", linear(p, m), lines)


def v_shaped() -> Schedule:
    return written(
        "v", ["0 1 1 0 | 0-1"],
        "0: 0F0 0F1 3F0 3F1 3I0 3W0 3I1 3W1 0I0 0W0 0I1 0W1",
        "1: 1F0 1F1 2F0 2F1 2I0 2W0 2I1 2W1 1I0 1W0 1I1 1W1",
    )  # fmt: skip


def dualpipe_like() -> Schedule:
    """Both ends at once, with fused slots in the middle."""
    return written(
        "dual", ["0 1 | 0-1", "1 0 | 2-3"],
        "0: 0F0 1F2 0F1+1B2 1F3+0B0 1B3 0B1",
        "1: 0F2 1F0 0F3+1B0 1F1+0B2 1B1 0B3",
    )  # fmt: skip


def two_streams() -> Schedule:
    """Stages of one rank on two queues, as when a mixture of experts sends beside its work."""
    return written(
        "experts", ["0 0/comm 1 1/comm | 0-2"],
        "0: 0F0 0F1 0F2 0B0 0B1 0B2",
        "0/comm: 1F0 1F1 1F2 1B0 1B1 1B2",
        "1: 2F0 2F1 2F2 2B0 2B1 2B2",
        "1/comm: 3F0 3B0 3F1 3B1 3F2 3B2",
    )  # fmt: skip


ZERO_BUBBLE = (Kind.I, Kind.W)
EACH_US = Costs(F=3, I=2, W=1, latency=1, unit="us", bytes=Bytes(static=1000, activation=64))
LANES = Costs(F=30, I=20, W=10, p2p_overhead=(4, 5), unit="us")
THIRDS = Costs(F=Fraction(1, 3), I=Fraction(2, 7), W=Fraction(1, 9), latency=1, unit="us")
FLOATS = Costs(F=0.25, I=0.1, W=0.05, latency=1e-3, unit="s")


COPIED = """# hocket 1
name copied
path 0: 0 1
0: 0F0 0F1 0R0+0B0 0A1 0B1
0/host: 0D1 0U1
1: 1F0 1B0 1F1 1R1 1B1
"""


@cache
def cases() -> dict[str, Timeline]:
    lowered = insert_communication(one_f_one_b(4, 6))
    return {
        "1f1b": simulate(one_f_one_b(4, 8)),
        "1f1b of one rank": simulate(one_f_one_b(1, 2)),
        "1f1b, 12 ranks": simulate(one_f_one_b(12, 14)),
        "zero bubble, latency, bytes": simulate(one_f_one_b(4, 6, ZERO_BUBBLE), EACH_US),
        "zero bubble, thirds": simulate(one_f_one_b(3, 4, ZERO_BUBBLE), THIRDS),
        "zero bubble, floats": simulate(one_f_one_b(3, 4, ZERO_BUBBLE), FLOATS),
        "W that takes no time": simulate(one_f_one_b(3, 4, ZERO_BUBBLE), Costs(W=0)),
        "nothing takes time": simulate(one_f_one_b(3, 2), Costs(F=0, I=0, W=0)),
        "1f1b with lanes": simulate(one_f_one_b(4, 6), LANES),
        "v": simulate(v_shaped(), EACH_US),
        "dual": simulate(dualpipe_like(), EACH_US),
        "dual with lanes": simulate(dualpipe_like(), LANES),
        "two streams": simulate(two_streams(), EACH_US),
        "recomputed and offloaded": simulate(loads(COPIED), EACH_US),
        "messages": simulate(lowered),
        "messages, latency": simulate(lowered, EACH_US),
        "messages, blocking": simulate(lowered, EACH_US, blocking=True),
        "messages, lanes": simulate(lowered, LANES),
        "messages of fused slots": simulate(insert_communication(dualpipe_like()), EACH_US),
        "messages of two streams": simulate(insert_communication(two_streams()), EACH_US),
    }


def at(timeline: Timeline, times: dict[str, tuple[float, float]]) -> Timeline:
    """The timeline with other times for some actions."""
    start, end = timeline.start.copy(), timeline.end.copy()
    names = [str(action_of(c)) for c in timeline.schedule.codes]
    for name, (first, last) in times.items():
        start[names.index(name)], end[names.index(name)] = first, last
    return replace(timeline, start=start, end=end)


def overlapping() -> Timeline:
    """Rank 0: F [0, 5) and B [3, 7) at once, and two sends [1, 4) and [2, 6)."""
    schedule = insert_communication(one_f_one_b(2, 2))
    return at(
        simulate(schedule),
        {
            "0F0": (0, 5), "0B0": (3, 7), "0F1": (7, 8), "0B1": (8, 9),
            "0SEND_F0": (1, 4), "0SEND_F1": (2, 6), "0RECV_B0": (2, 3), "0RECV_B1": (7, 8),
            "1RECV_F0": (1, 5), "1RECV_F1": (5, 7),
        },
    )  # fmt: skip


def disordered(seed: int) -> Timeline:
    """Times without any order, as if every clock were wrong."""
    timeline = simulate(insert_communication(dualpipe_like()), EACH_US)
    random = np.random.default_rng(seed)
    start = random.integers(0, 40, len(timeline.start))
    return replace(timeline, start=start, end=start + random.integers(0, 9, len(start)))
