"""Metrics and losses that stages and the loss record, per microbatch."""

from __future__ import annotations

import pytest
import torch
from runtime_ranks import Block, batch, close, gradients, held, mean_square, on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from hocket.errors import RunError
from hocket.runtime import Pipeline, record
from hocket.schedules import build

pytestmark = pytest.mark.runtime

BALANCE = 0.3


class Balanced(Block):
    """A block with a loss of its own, as a router of experts has one."""

    def forward(self, x):
        y = super().forward(x)
        record("balance", self.linear(x).square().mean(), weight=BALANCE)
        record("rows", len(x))
        return y


class Recomputed(Balanced):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def loss(out, target):
    record("largest", out.abs().max())
    return mean_square(out, target)


def by_microbatch(modules, x, y, weights):
    """Loss, metrics and gradients of the microbatches one after the other, in one process."""
    total, balances, largest = 0.0, [], []
    for rows, targets, weight in zip(x, y, weights, strict=True):
        value, balance = rows, 0.0
        for module in modules:
            if isinstance(module, Balanced):
                balance = balance + module.linear(value).square().mean()
            value = Block.forward(module, value)
        part = weight * (mean_square(value, targets) + BALANCE * balance)
        part.backward()
        total += float(part.detach())
        balances.append(float(balance.detach()))
        largest.append(float(value.detach().abs().max()))
    return total, {"balance": balances, "largest": largest}, [gradients(m) for m in modules]


@pytest.mark.parametrize("kind", [Balanced, Recomputed])
@pytest.mark.parametrize(("name", "p"), [("zb-h1", 3), ("1f1b", 1), ("zb-v", 2), ("dualpipe", 2)])
def test_losses_of_middle_stages_are_trained_and_metrics_are_on_every_rank(name, p, kind):
    schedule, (x, y) = build(name, p=p, m=4), batch(10)
    n = schedule.placement.n_stages
    modules = [kind(s) if s < n - 1 or n == 1 else Block(s) for s in range(n)]
    parts = [[*t.tensor_split(4)] for t in (x, y)]
    rows = [len(part) for part in parts[0]]

    def rank(r, g):
        stages = held(schedule, r, modules)
        pipe = Pipeline(schedule, stages, loss, group=g.group, verify=True)
        got = pipe.step(x, y)
        metrics, grads = pipe.metrics, {s: gradients(m) for s, m in stages.items()}
        evaluated = pipe.eval(x, y)
        assert {n: t.tolist() for n, t in pipe.metrics.items()} == {
            n: t.tolist() for n, t in metrics.items()
        }
        return got, evaluated, metrics, grads

    total, metrics, want = by_microbatch(modules, *parts, [count / 10 for count in rows])
    copies = sum(isinstance(module, Balanced) for module in modules)
    for r, (got, evaluated, found, grads) in enumerate(on_ranks(p, rank)):
        assert float(got) == pytest.approx(total, rel=1e-12)
        assert float(evaluated) == pytest.approx(total, rel=1e-12)
        assert found["rows"].tolist() == [copies * count for count in rows]
        for key, values in metrics.items():
            assert found[key].tolist() == pytest.approx(values, rel=1e-12)
        for s, by_name in grads.items():
            for key, grad in by_name.items():
                close(grad, want[s][key], f"rank {r}, stage {s}, {key}")


def test_a_recorded_loss_weighs_as_its_microbatch_and_not_at_all_with_weight_0():
    schedule, (x, y) = build("1f1b", p=2, m=2), batch(8)
    modules, weights = [Balanced(0), Block(1)], [0.0, 1.5]

    def rank(r, g):
        stages = held(schedule, r, modules)
        pipe = Pipeline(schedule, stages, mean_square, group=g.group)
        pipe.step(x, None if r == 0 else y, weights=weights)
        return gradients(stages[r])

    parts = [[*t.tensor_split(2)] for t in (x, y)]
    _, _, want = by_microbatch(modules, *parts, weights)
    for r, grads in enumerate(on_ranks(2, rank)):
        for key, grad in grads.items():
            close(grad, want[r][key], f"rank {r}, {key}")


def test_what_cannot_be_recorded_is_refused_on_all_ranks():
    schedule, (x, y) = build("1f1b", p=2, m=2), batch(8)

    class Long(Block):
        def forward(self, x):
            record("rows", x)
            return super().forward(x)

    def refused(module, targets):
        def rank(r, g):
            stages = held(schedule, r, [module, Block(1)])
            pipe = Pipeline(schedule, stages, mean_square, group=g.group)
            pipe.step(x, targets if r == 0 else y)

        errors = on_ranks(2, rank, raises=False)
        assert all(isinstance(error, RunError) for error in errors)
        return str(errors[0])

    assert "'rows' is (4, 3); record one number" in refused(Long(0), y)
    assert "give this rank the targets or weights= too" in refused(Balanced(0), None)


def test_outside_a_pipeline_nothing_is_recorded():
    record("x", torch.ones(()))
    pipe = Pipeline(build("1f1b", p=1, m=2), {0: nn.Linear(3, 3).double()}, mean_square)
    pipe.step(*batch(4))
    assert pipe.metrics == {}
