"""Activation checkpointing under every kind of backward: right gradients, one recomputation."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from runtime_ranks import Block, Looking, assert_like_whole, batch, sequences
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hocket.schedules import build

pytestmark = pytest.mark.runtime


class Checkpointed(Block):
    """A block that keeps only its input; counts how often its inside runs."""

    runs = 0
    counting = threading.Lock()

    def __init__(self, seed: int, reentrant: bool) -> None:
        super().__init__(seed)
        self.reentrant = reentrant

    def inside(self, x: Tensor) -> Tensor:
        with Checkpointed.counting:
            Checkpointed.runs += 1
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_stage_recomputes_once_and_has_the_right_gradients(
    name: str, reentrant: bool
) -> None:
    schedule = build(name, p=2, m=4)
    n = schedule.placement.n_stages
    # a reentrant checkpoint makes no gradients where its input needs none, as in stage 0
    modules: list[torch.nn.Module] = [Checkpointed(i, reentrant and i > 0) for i in range(n)]
    inputs, targets = batch(8)
    Checkpointed.runs = 0
    assert_like_whole(schedule, modules, inputs, targets)
    whole = 2 * n  # of the unpipelined model: forward and recomputation
    assert Checkpointed.runs - whole <= 2 * n * schedule.m


class CheckpointedLooking(Looking):
    """Recomputes a slice from its input and what it was given."""

    def forward(self, x: Tensor, carried: Any = None) -> Any:
        return checkpoint(super().forward, x, carried, use_reentrant=False)


def test_a_checkpointed_stage_may_carry_from_slice_to_slice() -> None:
    modules: list[torch.nn.Module] = [CheckpointedLooking(s) for s in range(2)]
    assert_like_whole(build("seq1f1b", p=2, m=2), modules, *sequences(4, 6))
