"""Every order trains like the unpipelined model."""

from __future__ import annotations

import pytest
from runtime_ranks import Looking, assert_like_whole, batch, blocks, sequences

from hocket.errors import UsageError
from hocket.schedules import build, entries
from hocket.text import loads

pytestmark = pytest.mark.runtime

CASES = [
    (entry.name, p, m, 2 if entry.takes_v else None)
    for entry in entries()
    for p in (1, 2, 4)
    for m in sorted({1, p - 1, p, 2 * p + 1, 4 * p} - {0})
]


@pytest.mark.parametrize("name", sorted({case[0] for case in CASES}))
def test_every_registered_schedule_trains_like_the_unpipelined_model(name: str) -> None:
    ran = 0
    for _, p, m, v in (case for case in CASES if case[0] == name):
        try:
            schedule = build(name, p=p, m=m, v=v)
        except UsageError:
            continue
        n = schedule.placement.n_stages
        if schedule.placement.slices > 1:
            modules, data = [Looking(s) for s in range(n)], sequences(2 * m + 1, 5)
        else:
            modules, data = blocks(n), batch(2 * m + 1)
        assert_like_whole(schedule, modules, *data)
        ran += 1
    assert ran >= 2


HAND_WRITTEN = {
    "uneven stages": """# hocket 1
name uneven
path 0: 0 0 0 1
0: 0F0 1F0 2F0 0F1 1F1 2F1 2B0 1B0 0B0 0F2 1F2 2F2 2B1 1B1 0B1 2B2 1B2 0B2
1: 3F0 3B0 3F1 3B1 3F2 3B2
""",
    "contiguous stages": """# hocket 1
name contiguous
path 0: 0 0 1 1
0: 0F0 1F0 0F1 1F1 1I0 0B0 1W0 1I1 0B1 1W1
1: 2F0 3F0 3B0 2I0 2F1 3F1 3B1 2I1 2W1 2W0
""",
    "a wave": """# hocket 1
name wave
path 0: 0 1 1 0 0 1 1 0
0: 0F0 0F1 3F0 4F0 3F1 4F1 7F0 7B0 7F1 7B1 4B0 3B0 4B1 3B1 0B0 0B1
1: 1F0 2F0 1F1 2F1 5F0 6F0 5F1 6F1 6B0 5B0 6B1 5B1 2B0 1B0 2B1 1B1
""",
    "three pipes": """# hocket 1
name pipes
path 0: 0 1 2 | 0-1
path 1: 1 2 0 | 2,3
path 2: 2 0 1 | 4
0: 0F0 2F2 2B2 1F4 0F1 2F3 2B3 1B4 0B0 0B1
1: 0F2 1F0 2F4 2B4 0F3 1F1 1B0 0B2 1B1 0B3
2: 0F4 1F2 2F0 2B0 1F3 1B2 2F1 2B1 1B3 0B4
""",
    "the last stage takes microbatches out of order": """# hocket 1
name mixed
path 0: 0 1
0: 0F0 0F1 0F2 0F3 0B2 0B0 0B3 0B1
1: 1F2 1F0+1B2 1F3+1B0 1F1+1B3 1B1
""",
    "stages on two queues of a rank": """# hocket 1
name queues
path 0: 0 0/comm 1 1/comm
0: 0F0 0F1 0F2 0B0 0B1 0B2
0/comm: 1F0 1F1 1B0 1F2 1B1 1B2
1: 2F0 2F1 2B0 2F2 2B1 2B2
1/comm: 3F0 3B0 3F1 3B1 3F2 3B2
""",
    "messages written out": """# hocket 1
name messages
path 0: 0 1
0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0RECV_B0 0B0 0B1
1: 1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1
""",
}


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_a_hand_written_order_trains_like_the_unpipelined_model(name: str) -> None:
    schedule = loads(HAND_WRITTEN[name])
    assert_like_whole(schedule, blocks(schedule.placement.n_stages), *batch(7), steps=2)
