"""A real mixture of experts: all-to-all over gloo, its queues on two threads."""

from __future__ import annotations

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from runtime_ranks import Gloo, on_ranks

from hocket.demo import moe
from hocket.errors import UsageError
from hocket.runtime import Pipeline
from hocket.schedules import build
from hocket.train.training import Adam

pytestmark = pytest.mark.runtime

STEPS, ROWS = 3, 6


def _whole_model(n_stages, replicas):
    """Losses of the model with all experts in one place, on the batches of all replicas."""
    modules = [moe.build(s, n_stages, dtype=torch.float64) for s in range(n_stages)]
    optimiser = Adam([p for x in modules for p in x.parameters()], lr=3e-3)
    losses = []
    for step in range(STEPS):
        parts = [moe.batch(step, ROWS, seed=replica) for replica in range(replicas)]
        value, targets = (torch.cat(x) for x in zip(*parts, strict=True))
        for module in modules:
            value = module(*value) if isinstance(value, tuple) else module(value)
        total = moe.loss(value, targets)
        total.backward()
        optimiser.step()
        losses.append(total.item())
    return losses


def _trained(p, replicas, order, dispatch):
    """The losses of each replica's first rank; every replica has batches of its own."""
    schedule = build("moe-pair", p=p, m=3, layers=2 // p, order=order)

    def rank(number, g):
        replica, r = divmod(number, p)

        def group(name, rank, size):
            return Gloo(name, g.store, rank, size, 20)

        own, others = group(f"pipe{replica}", r, p), group(f"rank{r}", replica, replicas)
        n = schedule.placement.n_stages
        stages = {
            s: moe.build(s, n, group=others, dtype=torch.float64)
            for s in schedule.placement.stages_of_rank[r]
        }
        pipe = Pipeline(
            schedule, stages, moe.loss, group=own, data_parallel=others,
            dispatch=dispatch,
        )  # fmt: skip
        assert pipe.dispatch == (dispatch or "queues")
        optimiser = Adam([p for x in stages.values() for p in x.parameters()], lr=3e-3)
        losses = []
        for step in range(STEPS):
            losses.append(float(pipe.step(*moe.batch(step, ROWS, seed=replica))))
            optimiser.step()
        pipe.close()
        return losses

    return on_ranks(p * replicas, rank)[::p]


@pytest.mark.parametrize("p", [1, 2])
def test_overlapped_training_loses_what_serial_training_and_the_whole_model_lose(p):
    serial = _trained(p, 2, "serial", "receive")
    both = _trained(p, 2, "deepseek", None)
    for one, other in zip(both, serial, strict=True):
        assert one == pytest.approx(other, rel=1e-13)
    mean = [sum(x) / 2 for x in zip(*both, strict=True)]
    assert mean == pytest.approx(_whole_model(8, 2), rel=1e-9)
    assert mean[-1] < mean[0]


@pytest.mark.parametrize("order", ["naive", "ring", "megatron"])
def test_threads_change_no_bit_of_the_same_order(order):
    one, two = (_trained(1, 2, order, how) for how in ("receive", "queues"))
    assert one == two


def test_experts_that_cannot_be_shared_are_one_sentence():
    class Three:
        def size(self):
            return 3

    with pytest.raises(UsageError, match=r"^4 experts cannot be shared evenly by 3 replicas$"):
        moe.build(0, 4, group=Three())
    with pytest.raises(UsageError, match=r"^this model has 4 stages per layer \(attn, disp, mlp, "
                       r"comb\), but the schedule has 2 stages; take moe-pair, or another "
                       r"--model$"):  # fmt: skip
        moe.build(0, 2)


def test_a_copy_of_a_phase_talks_over_the_same_group():
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=9))
    module = moe.build(1, 4, group=group)
    assert copy.deepcopy(module).wire is module.wire
