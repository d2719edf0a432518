"""A real mixture of experts: all-to-all over gloo, its queues on two threads."""

from __future__ import annotations

import pytest
import torch
from runtime_ranks import batch as rows
from runtime_ranks import blocks, close, gradients, mean_square, on_ranks, whole

from hocket.demo import moe
from hocket.demo.data import batch
from hocket.errors import RunError
from hocket.moe import ORDERS, phases
from hocket.runtime import Pipeline
from hocket.runtime.queues import QueueExecution
from hocket.schedules import build

pytestmark = pytest.mark.runtime

STEPS = 3


def _two_queues(pipe):
    pipe._training = pipe._bind(pipe.lowered, pipe._stages, True, QueueExecution)
    return pipe


@pytest.mark.parametrize("order", ORDERS)
def test_two_threads_give_the_gradients_of_the_unpipelined_model(order):
    schedule = build("moe-pair", p=1, m=5, layers=2, order=order)
    modules = blocks(schedule.placement.n_stages)
    inputs, targets = rows(11)
    want_loss, want = whole(modules, inputs, targets)
    pipe = _two_queues(Pipeline(schedule, dict(enumerate(modules)), mean_square))
    close(pipe.step(inputs, targets), want_loss, "loss")
    for s, module in enumerate(modules):
        for name, grad in gradients(module).items():
            close(grad, want[s][name], f"stage {s}, {name}")


def _whole_model(n_stages, ranks, m):
    """Losses of the model with all experts in one place, on the batches of all ranks."""
    modules = [moe.build(s, n_stages, dtype=torch.float64) for s in range(n_stages)]
    optimiser = torch.optim.Adam([p for x in modules for p in x.parameters()], lr=3e-3)
    losses = []
    for step in range(STEPS):
        parts = [batch(step, 2 * m, seq=32, seed=rank) for rank in range(ranks)]
        value, targets = (torch.cat(x) for x in zip(*parts, strict=True))
        for module in modules:
            value = module(*value) if isinstance(value, tuple) else module(value)
        total = moe.loss(value, targets)
        total.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(total.item())
    return losses


def _trained(ranks, **options):
    return on_ranks(
        ranks, lambda r, g: moe.train(r, g.group, steps=STEPS, dtype=torch.float64, **options)
    )


def test_overlapped_training_loses_what_serial_training_and_the_whole_model_lose():
    ranks, m, layers = 2, 3, 2
    serial = _trained(ranks, m=m, layers=layers, order="serial", threads=False)
    both = _trained(ranks, m=m, layers=layers, order="deepseek")
    for rank in range(ranks):
        assert both[rank].losses == pytest.approx(serial[rank].losses, rel=1e-13)
    mean = [sum(x) / ranks for x in zip(*(r.losses for r in both), strict=True)]
    assert mean == pytest.approx(_whole_model(4 * layers, ranks, m), rel=1e-9)
    assert mean[-1] < mean[0]


def test_threads_change_no_bit_of_the_same_order():
    one, two = (_trained(2, m=3, layers=1, order="ring", threads=t) for t in (False, True))
    assert [r.losses for r in one] == [r.losses for r in two]


def test_messages_run_under_computation():
    (made,) = _trained(1, m=4, layers=1, slow=0.004)
    t = made.timeline
    assert t.measured
    busy = [
        [(a, b) for a, b, q in zip(t.slot_start, t.slot_end, t.schedule.queue_of_slot, strict=True)
         if q == queue]
        for queue in range(2)
    ]  # fmt: skip
    shared = sum(
        max(0.0, min(b, d) - max(a, c)) for a, b in busy[0] for c, d in busy[1]
    )  # fmt: skip
    assert shared > 0
    assert sum(b - a for a, b in busy[1]) > 16 * 4000  # 8 messages each way, 4 ms each


class _Broken(torch.nn.Module):
    def forward(self, *values):
        raise ValueError("a bad day")


def test_failure_in_one_thread_ends_the_other_and_names_the_action():
    schedule = build("moe-pair", p=1, m=3)
    modules = dict(enumerate(blocks(4)))
    modules[1] = _Broken()
    pipe = _two_queues(Pipeline(schedule, modules, mean_square))
    with pytest.raises(RunError, match=r"1F0.*a bad day"):
        pipe.step(*rows(6))


def test_queues_with_messages_between_ranks_are_refused():
    def rank(r, g):
        schedule = phases(build("1f1b", p=2, m=2))
        stages = {s: blocks(8)[s] for s in schedule.placement.stages_of_rank[r]}
        pipe = Pipeline(schedule, stages, mean_square, group=g.group, store=g.store)
        with pytest.raises(RunError, match=r"only on ranks without messages: give p=1$"):
            _two_queues(pipe)

    on_ranks(2, rank)
