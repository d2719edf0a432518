"""Gradients over several steps: summed and averaged once, and scaled alike on all ranks."""

from __future__ import annotations

import pytest
import torch
from runtime_ranks import (
    Block,
    Gloo,
    batch,
    blocks,
    close,
    gradients,
    held,
    mean_square,
    on_ranks,
    whole,
)

from hocket.errors import RunError
from hocket.runtime import Hooks, Pipeline
from hocket.schedules import build

pytestmark = pytest.mark.runtime


class Sgd:
    """What a GradScaler needs of an optimizer; torch's own take seconds to import."""

    def __init__(self, module):
        self.param_groups, self.steps = [{"params": [*module.parameters()]}], 0

    def step(self):
        self.steps += 1


def added(every, s, name):
    """The sum of a parameter's gradients in the unpipelined model."""
    return sum(grads[s][name] for grads in every)


def test_steps_without_sync_are_averaged_over_replicas_once():
    schedule, modules = build("zb-h1", p=2, m=4), blocks(2)
    batches = [[batch(8, seed=10 * replica + step) for step in range(3)] for replica in range(2)]

    def rank(r, g):
        replica, r = divmod(r, 2)
        pipes, replicas = (
            Gloo(f"{name}{i}", g.store, a, 2)
            for name, i, a in (("pipe", replica, r), ("dp", r, replica))
        )
        stages, ready, sums = held(schedule, r, modules), [], []
        pipe = Pipeline(schedule, stages, mean_square, group=pipes, data_parallel=replicas)
        pipe.hooks.append(Hooks(gradients_ready=lambda: ready.append(pipe.steps_done)))
        shared = pipe._parameters.gradients
        average = shared.average
        shared.average = lambda: (sums.append(pipe.steps_done), average())
        pipe.step(*batches[replica][0], sync=False)
        pipe.step(*batches[replica][1], sync=False)
        with pytest.raises(RunError, match=r"^grad_norm needs complete gradients, but the last"):
            pipe.grad_norm()
        pipe.step(*batches[replica][2])
        assert (ready, sums) == ([3], [2])
        return {s: gradients(module) for s, module in stages.items()}

    every = [whole(modules, *data)[1] for replica in batches for data in replica]
    for grads in on_ranks(4, rank):
        for s, by_name in grads.items():
            for name, grad in by_name.items():
                close(grad, added(every, s, name) / 2, f"stage {s}, {name}")


def test_copies_are_summed_at_the_end_and_not_after_gradients_that_are_complete():
    schedule, modules = build("dualpipe", p=2, m=4), blocks(2)
    data = [batch(8, seed=step) for step in range(4)]

    def rank(r, g):
        stages = held(schedule, r, modules)
        pipe = Pipeline(schedule, stages, mean_square, group=g.group)
        for step in range(4):
            pipe.step(*data[step], sync=step in (1, 2, 3))
        out = {s: gradients(module) for s, module in stages.items()}
        with pytest.raises(RunError, match="those of a step with sync=False cannot be added"):
            pipe.step(*data[0], sync=False)
        return out

    every = [whole(modules, *one)[1] for one in data]
    for grads in on_ranks(2, rank):
        for s, by_name in grads.items():
            for name, grad in by_name.items():
                close(grad, added(every, s, name), f"stage {s}, {name}")


@pytest.mark.parametrize("infinite", [None, 0, 1])
def test_one_infinite_gradient_skips_the_step_of_all_ranks_and_lowers_every_scale(infinite):
    schedule, modules, data = build("zb-h1", p=2, m=4), blocks(2), batch(8)

    def rank(r, g):
        stages = held(schedule, r, modules)
        pipe = Pipeline(schedule, stages, mean_square, group=g.group)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
        optimizer = Sgd(stages[r])
        loss = pipe.step(*data, scaler=scaler)
        if infinite == r:
            stages[r].linear.bias.grad[0] = torch.inf
        bad = pipe.unscale_(scaler, optimizer)
        grads = gradients(stages[r])
        scaler.step(optimizer)
        scaler.update()
        return loss, grads, (bad, optimizer.steps, scaler.get_scale())

    want_loss, want = whole(modules, *data)
    bad = infinite is not None
    for r, (loss, grads, found) in enumerate(on_ranks(2, rank)):
        close(loss, want_loss, "the loss is not scaled")
        assert found == (bad, 0 if bad else 1, 2.0**9 if bad else 2.0**11)
        for name, grad in grads.items():
            if infinite != r:
                close(grad, want[r][name], f"rank {r}, {name}")


def test_scales_that_differ_are_refused_on_all_ranks():
    schedule = build("1f1b", p=2, m=2)

    def rank(r, g):
        module = Block(r)
        pipe = Pipeline(schedule, {r: module}, mean_square, group=g.group)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + r))
        pipe.step(*batch(4), scaler=scaler)
        pipe.unscale_(scaler, Sgd(module))

    for error in on_ranks(2, rank, raises=False):
        assert isinstance(error, RunError)
        assert "the scales of the ranks differ: 256.0, 512.0" in str(error)
