"""Every order trains like the unpipelined model."""

from __future__ import annotations

import pytest
from runtime_ranks import assert_like_whole, batch, blocks

from hocket.errors import UsageError
from hocket.schedules import build, entries

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
        assert_like_whole(schedule, blocks(schedule.placement.n_stages), *batch(2 * m + 1))
        ran += 1
    assert ran >= 2
