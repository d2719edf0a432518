"""The norm of all gradients of a pipeline, and clipping to it, against one process."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from runtime_ranks import Block, Gloo, batch, blocks, close, gradients, held, mean_square, on_ranks
from torch import nn
from torch.nn.utils import clip_grad_norm_

from hocket.errors import RunError
from hocket.runtime import Hooks, Pipeline
from hocket.schedules import build

pytestmark = pytest.mark.runtime


def reference(modules, data, max_norm, norm_type):
    """Total norm before, and gradients after clipping, of one process."""
    plain = nn.Sequential(*copy.deepcopy(modules))
    mean_square(plain(data[0]), data[1]).backward()
    return clip_grad_norm_(plain.parameters(), max_norm, norm_type), plain


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("name", ["zb-h1", "chimera", "interleaved", "dualpipev"])
def test_clipping_is_that_of_one_process_and_mirrored_copies_count_once(name, norm_type):
    schedule, data = build(name, p=2, m=4), batch(8)
    modules = blocks(schedule.placement.n_stages)
    want, plain = reference(modules, data, 0.1, norm_type)

    def rank(r, g):
        stages = held(schedule, r, modules)
        pipe = Pipeline(schedule, stages, mean_square, group=g.group)
        pipe.step(*data)
        before = pipe.grad_norm(norm_type)
        return before, pipe.clip_grad_norm_(0.1, norm_type), pipe.grad_norm(norm_type), stages

    for before, total, after, stages in on_ranks(2, rank):
        close(before, want, "norm")
        assert torch.equal(before, total)
        assert float(after) == pytest.approx(0.1, rel=1e-4)
        for s, module in stages.items():
            for key, grad in gradients(plain[s]).items():
                close(gradients(module)[key], grad, f"stage {s}, {key}")


def test_a_small_norm_clips_nothing():
    module, data = Block(0), batch(4)
    pipe = Pipeline(build("1f1b", p=1, m=2), {0: module}, mean_square)
    pipe.step(*data)
    before = gradients(module)
    pipe.clip_grad_norm_(1e6)
    assert all(torch.equal(before[key], grad) for key, grad in gradients(module).items())


def test_tied_weights_count_once():
    data = batch(4)
    first, last = nn.Linear(3, 3, dtype=torch.float64), nn.Linear(3, 3, dtype=torch.float64)
    plain = nn.Sequential(copy.deepcopy(first), copy.deepcopy(last))
    plain[1].weight = plain[0].weight
    mean_square(plain(data[0]), data[1]).backward()
    want = clip_grad_norm_(plain.parameters(), 1.0)

    def rank(r, g):
        tied = [[(0, "weight"), (1, "weight")]]
        pipe = Pipeline(
            build("1f1b", p=2, m=2), {r: copy.deepcopy((first, last)[r])}, mean_square,
            group=g.group, tied=tied,
        )  # fmt: skip
        pipe.step(*data)
        return pipe.grad_norm()

    for norm in on_ranks(2, rank):
        close(norm, want, "norm")


def test_experts_of_all_replicas_count_and_what_they_share_counts_once():
    shared, experts = Block(0), [Block(1), Block(2)]
    data = [batch(4, seed=i) for i in range(2)]
    (
        sum(mean_square(e(shared(x)), y) for e, (x, y) in zip(experts, data, strict=True)) / 2
    ).backward()
    want = clip_grad_norm_([p for m in (shared, *experts) for p in m.parameters()], 1.0)

    def rank(r, g):
        expert = Block(1 + r)
        for p in expert.parameters():
            p.allreduce = False
        pipe = Pipeline(
            build("interleaved", p=1, m=2, v=2), {0: Block(0), 1: expert}, mean_square,
            data_parallel=g.group,
        )  # fmt: skip
        pipe.step(*data[r])
        return pipe.grad_norm()

    for norm in on_ranks(2, rank):
        close(norm, want, "norm")


def test_the_parameters_of_a_loss_count():
    class Weighed(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, out, target):
            return mean_square(self.scale * out, target)

    data, loss, module = batch(4), Weighed(), Block(0)
    loss(module(data[0]), data[1]).backward()
    want = clip_grad_norm_([*module.parameters(), *loss.parameters()], 1.0)
    pipe = Pipeline(build("1f1b", p=1, m=2), {0: Block(0)}, Weighed())
    pipe.step(*data)
    close(pipe.grad_norm(), want, "norm")


def test_clipping_in_the_hook_trains_like_one_process():
    schedule, modules, data = build("zb-h1", p=2, m=4), blocks(2), batch(8)
    plain = nn.Sequential(*copy.deepcopy(modules))
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    want = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = mean_square(plain(data[0]), data[1])
        loss.backward()
        clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        want.append(float(loss.detach()))

    def rank(r, g):
        stages = held(schedule, r, modules)
        pipe = Pipeline(schedule, stages, mean_square, group=g.group)
        optimizer = torch.optim.Adam(stages[r].parameters(), lr=0.1)

        def update():
            pipe.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()

        pipe.hooks.append(Hooks(gradients_ready=update))
        return [float(pipe.step(*data)) for _ in range(4)]

    for losses in on_ranks(2, rank):
        assert losses == pytest.approx(want, abs=1e-10)


def test_a_norm_that_is_not_finite_is_refused_on_all_ranks_and_training_goes_on():
    schedule, modules, data = build("1f1b", p=2, m=2), blocks(2), batch(4)

    def rank(r, g):
        stages = held(schedule, r, modules)
        pipe = Pipeline(schedule, stages, mean_square, group=g.group)
        pipe.step(*data)
        if r:
            stages[1].linear.bias.grad[0] = math.nan
        with pytest.raises(RunError, match=r"^the norm of the gradients is nan, so they cannot be"):
            pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
        stages[r].zero_grad()
        return float(pipe.step(*data))

    assert all(math.isfinite(loss) for loss in on_ranks(2, rank))


def test_replicas_of_a_pipeline_clip_their_mean_gradient():
    schedule, modules = build("1f1b", p=2, m=2), blocks(2)
    data = [batch(4, seed=i) for i in range(2)]
    plain = nn.Sequential(*copy.deepcopy(modules))
    (sum(mean_square(plain(x), y) for x, y in data) / 2).backward()
    want = clip_grad_norm_(plain.parameters(), 0.1)

    def rank(r, g):
        replica, r = divmod(r, 2)
        groups = [
            Gloo(f"{name}{i}", g.store, a, 2)
            for name, i, a in (("pipe", replica, r), ("dp", r, replica))
        ]
        stages = held(schedule, r, modules)
        pipe = Pipeline(schedule, stages, mean_square, group=groups[0], data_parallel=groups[1])
        pipe.step(*data[replica])
        total = pipe.clip_grad_norm_(0.1)
        return total, r, gradients(stages[r])

    for total, r, grads in on_ranks(4, rank):
        close(total, want, "norm")
        for key, grad in gradients(plain[r]).items():
            close(grads[key], grad, key)
