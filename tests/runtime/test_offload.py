"""D and U in the order: activations leave, come back, and gradients are those of one process."""

from __future__ import annotations

import gc
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runtime_ranks import Block, Looking, assert_like_whole, batch, sequences
from torch import Tensor, nn

from hocket.errors import RunError
from hocket.ir import Kind
from hocket.lower import offload
from hocket.runtime.stage import Stage
from hocket.schedules import build

pytestmark = pytest.mark.runtime


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "dualpipev", "pipeoffload"])
def test_offloaded_stages_have_the_gradients_of_one_process(name: str, p: int) -> None:
    schedule = offload(build(name, p=p, m=2 * p + 1))
    assert (Kind.D in schedule.kinds) == (p > 1 or name != "1f1b")
    modules: list[nn.Module] = [Block(i) for i in range(schedule.placement.n_stages)]
    assert_like_whole(schedule, modules, *batch(4 * p + 2), steps=2)
    if p == 2:
        assert_like_whole(schedule, modules, *batch(4 * p + 2), dispatch="receive")


def test_two_directions_and_slices_offload_too() -> None:
    both = offload(build("chimera", p=4, m=4))
    assert_like_whole(both, [Block(i) for i in range(4)], *batch(8))
    sliced = offload(build("seq1f1b", p=2, m=4))
    assert Kind.D in both.kinds & sliced.kinds
    assert_like_whole(sliced, [Looking(s) for s in range(2)], *sequences(9, 5))


class Layers(nn.Module):
    """Saves its inputs, views of one tensor, a buffer, an empty tensor, and a mask in bits."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(width, width, dtype=torch.float64) for _ in range(2))
        self.register_buffer("scale", torch.full((width,), 0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x)) * self.scale
        left, right = h.chunk(2, dim=-1)
        h = torch.cat([left * right, left.t().contiguous().t(), right[:, :0]], dim=-1)
        return torch.tanh(nn.functional.dropout(self.second(h), 0.25))


def _stage(module: nn.Module, rows: int = 4, width: int = 64) -> Stage:
    torch.manual_seed(7)
    stage = Stage(0, module, 1, lambda out, target: (out - target).square().mean(), None)
    stage.weights = (1.0,)
    stage.inputs[0] = (torch.randn(rows, width, dtype=torch.float64),)
    stage.targets[0] = (torch.randn(rows, width, dtype=torch.float64),)
    return stage


def _gradients(*, moved: bool) -> list[Tensor | None]:
    torch.manual_seed(1)
    stage = _stage(Layers())
    if moved:
        stage.forward_moved(0, stage.forward_loss)
        stage.offload(0)
        stage.reload(0)
    else:
        stage.forward_loss(0)
    stage.backward(0)
    assert not stage.leftovers()
    return [p.grad for p in stage.module.parameters()]


def test_gradients_are_the_same_to_the_last_bit() -> None:
    pairs = zip(_gradients(moved=False), _gradients(moved=True), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs if a is not None and b is not None)


def test_memory_falls_at_d_and_rises_at_u() -> None:
    def held() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    rows = 70_000  # 36 MB, which malloc gives back to the system at once
    stage, one = _stage(Layers(), rows), rows * 64 * 8
    before = held()
    stage.forward_moved(0, stage.forward_loss)
    full = held() - before
    stage.offload(0)
    away = held() - before
    stage.reload(0)
    back = held() - before
    assert full > 4 * one
    assert away < one
    assert back > 4 * one


def test_the_file_has_no_name_and_is_gone_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stage = _stage(Layers())
    stage.forward_moved(0, stage.forward_loss)
    stage.offload(0)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    stage = _stage(Layers())
    stage.forward_moved(0, stage.forward_loss)
    with pytest.raises(
        RunError, match=r"0F0: its activations cannot be written to .*none .No such"
    ):
        stage.offload(0)


class Function(nn.Module):
    """Applies a function to what a layer makes."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(64, 64, dtype=torch.float64), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def test_what_is_written_after_it_was_saved_is_refused() -> None:
    stage = _stage(Function(lambda h: torch.sigmoid(h).mul_(2)))
    stage.forward_moved(0, stage.forward_loss)
    with pytest.raises(RunError, match="0F0 wrote into a tensor after it was saved for the backw"):
        stage.offload(0)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda h: torch.sparse.mm(h.to_sparse(), h.t()) @ h, r"Tensor \(torch.sparse_coo\) on"),
        (lambda h: (h * torch.conj(h * 1j)).real, r"Tensor \(torch.strided\) on"),
    ],
)
def test_what_cannot_move_is_refused(function: Callable[[Tensor], Tensor], what: str) -> None:
    stage = _stage(Function(function))
    with pytest.raises(RunError, match=f"0F0 saves a {what} cpu for its backward, and D moves"):
        stage.forward_moved(0, stage.forward_loss)
