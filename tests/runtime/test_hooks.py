"""What training code may put into a step: its hooks, and what ranks do together around it."""

from __future__ import annotations

import pytest
import torch
from runtime_ranks import batch, blocks, close, gradients, held, mean_square, on_ranks, whole
from torch import nn

from hocket.errors import RunError
from hocket.runtime import Hooks, Pipeline
from hocket.schedules import build

pytestmark = pytest.mark.runtime


def test_hooks_are_called_in_order_around_a_step_and_not_in_an_evaluation():
    modules, data = blocks(1), batch(4)
    pipe = Pipeline(build("1f1b", p=1, m=2), {0: modules[0]}, mean_square)
    seen = []
    pipe.hooks.append(
        Hooks(
            before_step=lambda inputs, targets: seen.append(inputs is data[0]),
            before_forward=lambda stage, mb, args, kwargs: seen.append((stage, mb, args[0].shape)),
            gradients_ready=lambda: seen.append(modules[0].linear.weight.grad.norm() > 0),
            after_step=lambda loss: seen.append(float(loss)),
        )
    )
    pipe.eval(*data)
    assert seen == []
    loss = float(pipe.step(*data))
    assert seen == [True, (0, 0, (2, 3)), (0, 1, (2, 3)), True, loss]
    pipe.eval(*data)
    pipe.verify(*data)
    pipe.hooks.clear()
    pipe.step(*data)
    assert len(seen) == 5


def test_an_optimizer_in_gradients_ready_trains_like_one_process():
    schedule, modules, data = build("zb-h1", p=2, m=4), blocks(2), batch(8)

    def rank(r, g):
        stages = held(schedule, r, modules)
        pipe = Pipeline(schedule, stages, mean_square, group=g.group)
        optimizer = torch.optim.SGD(stages[r].parameters(), lr=0.1)

        def update():
            optimizer.step()
            optimizer.zero_grad()

        pipe.hooks.append(Hooks(gradients_ready=update))
        return [pipe.step(*data) for _ in range(3)]

    model = nn.Sequential(*blocks(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    want = []
    for _ in range(3):
        loss, _ = mean_square(model(data[0]), data[1]), optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        want.append(loss.detach())
    for losses in on_ranks(2, rank):
        for got, right in zip(losses, want, strict=True):
            close(got, right, "loss")


def test_verify_calls_no_hook_and_leaves_the_step_as_it_was():
    modules, data = blocks(1), batch(4)
    _, want = whole(modules, *data)
    pipe = Pipeline(build("1f1b", p=1, m=2), {0: modules[0]}, mean_square, verify=True)
    calls = []
    pipe.hooks.append(Hooks(gradients_ready=lambda: calls.append(1)))
    pipe.step(*data)
    assert calls == [1]
    for name, grad in gradients(modules[0]).items():
        close(grad, want[0][name], name)


@pytest.mark.parametrize("name", ["before_step", "before_forward", "gradients_ready", "after_step"])
def test_a_hook_that_raises_ends_all_ranks_and_is_named(name):
    schedule, modules = build("1f1b", p=2, m=2), blocks(2)

    def bad(*args):
        raise ValueError("no room")

    def rank(r, g):
        stages = held(schedule, r, modules)
        pipe = Pipeline(schedule, stages, mean_square, group=g.group)
        if r == 1:
            pipe.hooks.append(Hooks(**{name: bad}))
        pipe.step(*batch(4))
        return pipe.step(*batch(4))  # a hook behind the last message is known of in the next step

    where = "1F0" if name == "before_forward" else f"the hook {name}"
    for error in on_ranks(2, rank, raises=False):
        assert isinstance(error, RunError), error
        assert f"rank 1 failed in {where}: ValueError: no room" in str(error)


def test_what_ranks_do_together_around_a_step_ends_all_when_one_fails():
    schedule, modules = build("1f1b", p=2, m=2), blocks(2)

    def rank(r, g):
        stages = held(schedule, r, modules)
        pipe = Pipeline(schedule, stages, mean_square, group=g.group)

        def meet():
            if r == 0:
                raise ValueError("not ready")
            g.group.barrier().wait()

        pipe.guard(meet, "the barrier")

    first, second = on_ranks(2, rank, raises=False)
    assert str(first) == "rank 0 failed in the barrier: ValueError: not ready"
    assert str(second).startswith(f"{first}\n  rank 1 was in the barrier")
