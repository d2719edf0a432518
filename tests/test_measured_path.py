"""The critical path of a run: a message holds a rank up only where the rank waited for it."""

from itertools import pairwise

import numpy as np
import pytest

from hocket import Costs, build, loads, simulate
from hocket.costs import Ticks
from hocket.lower import insert_communication
from hocket.measured import timeline_of
from hocket.timeline import Timeline

# 1F1B where rank 1 works 100 a forward and never idles after its first message; rank 0 works 10.
# Receives are posted one slot ahead, and each is recorded until its rank had waited for it.
ORDER = """# hocket 1
name busy
path 0: 0 1
0: 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0F2 0SEND_F2 0RECV_B2 0B1 0B2
1: 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1RECV_F2 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2
"""
SPANS = {
    "0F0": (0, 10), "0SEND_F0": (10, 10.2), "0RECV_B0": (10.2, 111.4), "0F1": (10.3, 20.3),
    "0SEND_F1": (20.3, 20.5), "0RECV_B1": (20.5, 212.6), "0B0": (111.4, 112.4),
    "0F2": (112.4, 122.4), "0SEND_F2": (122.4, 122.6), "0RECV_B2": (122.6, 313.8),
    "0B1": (212.6, 213.6), "0B2": (313.8, 314.8), "1RECV_F0": (0, 10.3), "1RECV_F1": (0.1, 111.5),
    "1F0": (10.3, 110.3), "1B0": (110.3, 111.1), "1SEND_B0": (111.1, 111.3),
    "1RECV_F2": (111.3, 212.6), "1F1": (111.5, 211.5), "1B1": (211.5, 212.3),
    "1SEND_B1": (212.3, 212.5), "1F2": (212.6, 312.6), "1B2": (312.6, 313.4),
    "1SEND_B2": (313.4, 313.6),
}  # fmt: skip


def run():
    schedule = loads(ORDER)
    names = [str(a) for line in schedule.order.values() for slot in line for a in slot]
    start, end = np.array([SPANS[name] for name in names]).T
    return timeline_of(schedule, start, end)


def test_the_path_stays_on_the_rank_that_never_idles():
    path = run().critical_path()
    work = [str(step.slot) for step in path if "SEND" not in str(step.slot)]
    assert work == ["0F0", "1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "0B2"]
    assert all(b.start - a.end < 0.4 for a, b in pairwise(path))


def test_a_wait_longer_than_a_message_takes_is_the_messages():
    timeline = run()
    late = [str(a) for a in ("1F1", "1B1", "1SEND_B1", "1F2", "1B2", "1SEND_B2", "0B1", "0B2")]
    names = [str(a) for line in timeline.schedule.order.values() for slot in line for a in slot]
    start, end = timeline.start.copy(), timeline.end.copy()
    for name in late:  # the message of 0F1 comes 50 after rank 1 was free
        start[names.index(name)] += 50
        end[names.index(name)] += 50
    for name in ("1RECV_F1", "0RECV_B1", "0RECV_B2"):
        end[names.index(name)] += 50
    path = timeline_of(timeline.schedule, start, end).critical_path()
    assert [str(s.slot) for s in path][:4] == ["0F0", "0SEND_F0", "0F1", "0SEND_F1"]


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved"])
def test_a_simulated_run_taken_for_a_measured_one_keeps_a_path_without_holes(name):
    schedule = insert_communication(build(name, p=3, m=6))
    t = simulate(schedule, Costs(F=10, I=12, W=7, latency=3))
    measured = Timeline(
        schedule=schedule, start=t.start.astype(float), end=t.end.astype(float),
        ticks=Ticks(1, exact=False), measured=True,
    )  # fmt: skip
    path = measured.critical_path()
    assert path[0].start == 0
    assert path[-1].end == t.makespan
    assert all(b.start - a.end in (0, 3) for a, b in pairwise(path))


@pytest.mark.parametrize(
    ("lines", "start", "took"),
    [
        (("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
         [0, 4, 3, 2, 0, 4, 2, 5], [1, 1, 0, 1, 0, 2, 0, 2]),
        (("0B0 0F0", "1B0 1F0"), [5, 3, 3, 1], [0, 0, 0, 0]),
        (("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"),
         [0, 0, 2, 3, 4, 4, 5, 5], [0, 0, 2, 1, 0, 2, 0, 1]),
    ],
)  # fmt: skip
def test_the_path_of_a_recorded_order_that_cannot_run_ends(lines, start, took):
    text = "\n".join(f"{rank}: {line}" for rank, line in enumerate(lines))
    schedule = loads(f"# hocket 1\nname d\npath 0: 0 1\n{text}\n")
    begin = np.array(start, dtype=float)
    path = timeline_of(schedule, begin, begin + np.array(took)).critical_path()
    slots = [str(step.slot) for step in path]
    assert len(set(slots)) == len(slots) and path[0].after == "start"


# Rank 0 gets its first message while its network is still sending: the RECV waits for the SEND.
SENDING = """# hocket 1
name sending
path 0: 0 1 0
0: 0F0 0F1 0F2 2F0 2B0 2F1 2B1 2F2 2B2 0B0 0B1 0B2
0/net: 0SEND_F0 0SEND_F1 0SEND_F2 2RECV_F0 2SEND_B0 2RECV_F1 2SEND_B1 2RECV_F2 2SEND_B2 0RECV_B0 0RECV_B1 0RECV_B2
1: 1F0 1F1 1F2 1B0 1B1 1B2
1/net: 1RECV_F0 1SEND_F0 1RECV_F1 1SEND_F1 1RECV_F2 1SEND_F2 1RECV_B0 1SEND_B0 1RECV_B1 1SEND_B1 1RECV_B2 1SEND_B2
"""  # noqa: E501


def test_a_receive_that_its_own_queue_holds_up_is_on_the_critical_path():
    path = simulate(loads(SENDING), Costs(F=1, B=1, p2p_overhead=(0, 5))).critical_path()
    at = next(i for i, step in enumerate(path) if "+".join(map(str, step.slot)) == "2F0")
    before = [("+".join(map(str, step.slot)), step.after) for step in path[at - 2 : at + 1]]
    assert before == [("0SEND_F2", "queue"), ("2RECV_F0", "queue"), ("2F0", "message")]
    for one, other in pairwise(path):
        assert other.after == "message" or one.end == other.start
