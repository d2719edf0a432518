"""R in the order: what F dropped is made again; gradients are those of one process."""

from __future__ import annotations

import gc
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_ranks import Block, assert_like_whole, batch
from torch import Tensor, nn

from hocket.errors import RunError
from hocket.ir import Schedule
from hocket.lower import recompute
from hocket.runtime.stage import Stage
from hocket.schedules import build

pytestmark = pytest.mark.runtime


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("name", "p"),
    [("1f1b", 1), ("1f1b", 2), ("1f1b", 4), ("interleaved", 2), ("zb-v", 2), ("zb-v", 4),
     ("dualpipev", 2), ("chimera", 2), ("zb-h1", 4)],
)  # fmt: skip
def test_every_stage_recomputed_has_the_gradients_of_one_process(
    name: str, p: int, ahead: bool
) -> None:
    schedule = recompute(build(name, p=p, m=2 * p), ahead=ahead)
    modules: list[nn.Module] = [Block(i) for i in range(schedule.placement.n_stages)]
    assert_like_whole(schedule, modules, *batch(4 * p))


@pytest.mark.parametrize("variant", ["checkpointed", "pre-recompute", "shifted"])
def test_merak_has_the_gradients_of_one_process(variant: str) -> None:
    schedule = build("merak", p=3, m=6, variant=variant)
    assert_like_whole(schedule, [Block(i) for i in range(3)], *batch(12))


class Counting(nn.Module):
    """Counts its forwards in a buffer, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(64, 64, dtype=torch.float64) for _ in range(2))
        self.register_buffer("count", torch.zeros(()))
        self.later = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        h = nn.functional.dropout(torch.tanh(self.first(x)), 0.5)
        return torch.tanh(self.second(torch.sin(h) if self.later < 2 else h))


def _one_stage(module: nn.Module, rows: int = 4) -> Stage:
    stage = Stage(0, module, 1, lambda out, target: (out - target).square().mean(), None)
    stage.weights = (1.0,)
    stage.inputs[0] = (torch.randn(rows, 64, dtype=torch.float64),)
    stage.targets[0] = (torch.randn(rows, 64, dtype=torch.float64),)
    return stage


def _gradients(module: nn.Module, *, again: bool) -> list[Any]:
    torch.manual_seed(7)
    stage = _one_stage(module)
    torch.manual_seed(8)
    if again:
        stage.forward_dropped(0, stage.forward_loss)
        drawn = torch.rand(())
        stage.recompute(0)
        assert torch.rand(()) != drawn  # the generator goes on where it was
    else:
        stage.forward_loss(0)
    stage.backward(0)
    assert not stage.leftovers()
    taken = [p.grad for p in module.parameters()]
    module.zero_grad()
    return taken


def test_random_numbers_and_buffers_are_as_in_the_forward() -> None:
    module = Counting()
    plain = _gradients(module, again=False)
    count = module.count.item()
    again = _gradients(module, again=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert module.count.item() == 2 * count


def test_a_forward_that_differs_the_second_time_is_refused() -> None:
    module = Counting()
    stage = _one_stage(module)
    stage.forward_dropped(0, stage.forward_loss)
    module.later = 2
    with pytest.raises(RunError, match="0F0 made other activations when it ran again: "):
        stage.recompute(0)


class Writing(nn.Module):
    """Doubles its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x.mul_(2)))


def test_a_stage_that_wrote_into_its_data_is_refused() -> None:
    stage = _one_stage(Writing())
    stage.forward_dropped(0, stage.forward_loss)
    with pytest.raises(RunError, match="0F0 wrote into its input, so that it cannot run again"):
        stage.recompute(0)


def test_a_stage_that_writes_into_what_it_receives_recomputes_from_a_copy() -> None:
    schedule = recompute(build("zb-h1", p=2, m=4))
    first = nn.Linear(64, 64, dtype=torch.float64)
    rows = torch.randn(8, 64, dtype=torch.float64), torch.randn(8, 64, dtype=torch.float64)
    assert_like_whole(schedule, [first, Writing()], *rows)


def test_between_forward_and_recomputation_the_activations_are_gone() -> None:
    def held() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    rows = 70_000  # 36 MB, which malloc gives back to the system at once
    stage, one = _one_stage(Counting(), rows), rows * 64 * 8
    before = held()
    stage.forward_dropped(0, stage.forward_loss)
    assert held() - before < one / 2
    stage.recompute(0)
    assert held() - before > 2 * one


def test_a_schedule_without_r_stays_as_it_is() -> None:
    schedule: Schedule = build("1f1b", p=2, m=2)
    assert recompute(schedule, stages=[]) == schedule
