"""Small schedules for the renderers' tests, written out or built from ir alone."""

import re

from hypothesis import strategies as st

from hocket.ir import Action, Kind, Placement, Queue, Schedule, linear, looped, mirrored
from hocket.pattern import alternate, join, run

_ACTION = re.compile(r"(\d+)([A-Z_]+?)(\d+)")


def schedule(name: str, placement: Placement, lines: list[str]) -> Schedule:
    """A schedule from lines of slots such as `0F0 0F1+1B0`."""
    order = [
        [
            [Action(Kind[kind], int(stage), int(mb)) for stage, kind, mb in _ACTION.findall(slot)]
            for slot in line.split()
        ]
        for line in lines
    ]
    return Schedule.from_order(name, placement, order)


def one_f_one_b(p: int, m: int) -> Schedule:
    lines = []
    for rank in range(p):
        warm = min(p - rank - 1, m)
        lines.append(
            join(
                run(Kind.F, rank, range(warm)),
                alternate(run(Kind.F, rank, range(warm, m)), run(Kind.B, rank, range(m - warm))),
                run(Kind.B, rank, range(m - warm, m)),
            )
        )
    return Schedule.from_lines("1f1b", linear(p, m), lines)


def split_backward(p: int, m: int) -> Schedule:
    """All forwards, then I and W of each microbatch."""
    lines = [
        join(
            run(Kind.F, r, range(m)),
            alternate(run(Kind.I, r, range(m)), run(Kind.W, r, range(m))),
        )
        for r in range(p)
    ]
    return Schedule.from_lines("split", linear(p, m), lines)


def two_stages_a_rank(p: int, m: int) -> Schedule:
    """All forwards of a rank's first stage, then of its second, then back."""
    lines = [
        join(
            run(Kind.F, r, range(m)),
            run(Kind.F, p + r, range(m)),
            run(Kind.B, p + r, range(m)),
            run(Kind.B, r, range(m)),
        )
        for r in range(p)
    ]
    return Schedule.from_lines("two-stages", looped(p, m, 2), lines)


def dualpipe() -> Schedule:
    """The published order of DualPipe for 4 ranks and 8 microbatches."""
    return schedule(
        "dualpipe",
        mirrored(4, (0, 0, 0, 0, 1, 1, 1, 1)),
        [
            "0F0 0F1 0F2 3F4 3I4 3W4 3F5 0F3+3B5 3F6+0B0 3B6 3F7+0B1 3B7 0I2 0W2 0I3 0W3",
            "1F0 2F4 1F1 2F5 1F2 2B4 2F6+1B0 1F3+2B5 2F7+1B1 2B6 1B2 2I7 1I3 2W7 1W3",
            "1F4 2F0 1F5 2F1 1F6 2B0 2F2+1B4 1F7+2B1 2F3+1B5 2B2 1B6 2I3 1I7 2W3 1W7",
            "0F4 0F5 0F6 3F0 3I0 3W0 3F1 0F7+3B1 3F2+0B4 3B2 3F3+0B5 3B3 0I6 0W6 0I7 0W7",
        ],
    )


def with_messages() -> Schedule:
    """Two ranks, one microbatch, SEND and RECV in the order."""
    return schedule(
        "messages",
        linear(2, 1),
        ["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"],
    )


def comm_queue() -> Schedule:
    """A path that walks through a second queue of each rank."""
    path = (Queue(0), Queue(0, "comm"), Queue(1), Queue(1, "comm"))
    order = {
        queue: [[Action(kind, stage, mb)] for kind in (Kind.F, Kind.B) for mb in range(3)]
        for stage, queue in enumerate(path)
    }
    return Schedule.from_order("comm", Placement((path,), (0,) * 3), order)


SMALL = st.one_of(
    st.builds(one_f_one_b, st.integers(1, 9), st.integers(1, 14)),
    st.builds(split_backward, st.integers(1, 6), st.integers(1, 12)),
    st.builds(two_stages_a_rank, st.integers(2, 5), st.integers(2, 11)),
    st.just(dualpipe()),
    st.just(comm_queue()),
)
