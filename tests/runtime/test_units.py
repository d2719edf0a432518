"""Chimera's joined units, and sequences in slices, train like the unpipelined model."""

from __future__ import annotations

import pytest
from runtime_ranks import Looking, assert_like_whole, batch, blocks, sequences

from hocket.schedules import build

pytestmark = pytest.mark.runtime


@pytest.mark.parametrize("concat", ["direct", "doubling", "halving"])
@pytest.mark.parametrize(("p", "m", "pipes"), [(2, 8, 2), (4, 8, 2), (4, 16, 4)])
def test_joined_chimera_units_train_like_the_unpipelined_model(concat, p, m, pipes) -> None:
    schedule = build("chimera", p=p, m=m, pipes=pipes, concat=concat)
    assert_like_whole(schedule, blocks(schedule.placement.n_stages), *batch(2 * m + 1))


@pytest.mark.parametrize(("p", "m", "slices"), [(1, 2, 3), (2, 3, 2), (4, 2, 3)])
def test_terapipe_has_the_gradients_of_uncut_sequences(p, m, slices) -> None:
    schedule = build("terapipe", p=p, m=m, slices=slices)
    assert_like_whole(schedule, [Looking(s) for s in range(p)], *sequences(m + 1, 7))


@pytest.mark.parametrize(("p", "m", "v", "slices"), [(2, 2, 2, 2), (2, 3, 2, 2), (4, 2, 1, 4)])
def test_interleaved_slices_have_the_gradients_of_uncut_sequences(p, m, v, slices) -> None:
    schedule = build("seq1f1b-interleaved", p=p, m=m, v=v, slices=slices)
    assert_like_whole(schedule, [Looking(s) for s in range(p * v)], *sequences(m + 1, 7))
