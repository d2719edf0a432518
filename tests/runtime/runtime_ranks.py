"""Ranks as threads of one process, tiny float64 models, and the unpipelined model as oracle."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.ir import Schedule
from hocket.runtime import Pipeline

torch.set_num_threads(1)

WIDTH = 3
# Seconds. No load of the machine delays a message by LONG: what ends much sooner did not wait for
# it. SHORT is how long a rank that hangs may be silent, where a test waits for just that.
LONG, SHORT = 240.0, 4.0


class Gloo(dist.ProcessGroupGloo):
    """A group that torch.distributed knows nothing of; those of a test share a store."""

    def __init__(self, name: str, store: Any, rank: int, size: int, timeout: float = LONG) -> None:
        super().__init__(dist.PrefixStore(name, store), rank, size, timedelta(seconds=timeout))
        self.store = store


class Group:
    """One rank's process group and the store that all ranks share."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.group = Gloo("group", store, rank, size)


def on_ranks(p: int, fn: Callable[[int, Group], Any], raises: bool = True) -> list[Any]:
    """What `fn(rank, group)` returns on each of p threads; an exception is raised, or returned."""
    store = dist.HashStore()
    out: list[Any] = [None] * p

    def one(rank: int) -> None:
        try:
            out[rank] = fn(rank, Group(store, rank, p))
        except BaseException as error:
            out[rank] = error

    threads = [threading.Thread(target=one, args=(r,), daemon=True) for r in range(p)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LONG)
        assert not thread.is_alive(), "a rank hangs"
    errors = [x for x in out if isinstance(x, BaseException)]
    if errors and raises:
        raise errors[0]
    return out


class Block(nn.Module):
    """A linear layer with a residual, so that gradients flow well through many stages."""

    def __init__(self, seed: int, width: int = WIDTH) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.linear = nn.Linear(width, width, dtype=torch.float64)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=g, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Looking(nn.Module):
    """A block on `[row, position, 3]`; positions look at earlier ones, also of earlier slices."""

    carries = True

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.block, self.key = Block(seed), Block(seed + 100).linear

    def forward(self, x: Tensor, carried: Any = None) -> tuple[Tensor, Any]:
        keys = self.key(x)
        if carried is not None:
            assert carried["seen"] == carried["keys"].shape[1]
            keys = torch.cat([carried["keys"], keys], dim=1)
        new, upto = x.shape[1], keys.shape[1]
        later = torch.ones(new, upto).triu(upto - new + 1).bool()
        scores = (x @ keys.transpose(1, 2)).masked_fill(later, -torch.inf)
        out = self.block(x + scores.softmax(-1) @ keys)
        return out, {"keys": keys, "seen": upto}


def sequences(rows: int, positions: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, `[row, position, 3]`."""
    inputs, targets = batch(rows * positions)
    return inputs.view(rows, positions, WIDTH), targets.view(rows, positions, WIDTH)


def blocks(n: int) -> list[nn.Module]:
    return [Block(i) for i in range(n)]


def batch(rows: int, width: int = WIDTH, seed: int = 7) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, width, generator=g, dtype=torch.float64),
        torch.randn(rows, width, generator=g, dtype=torch.float64),
    )


def mean_square(out: Tensor, target: Tensor) -> Tensor:
    return ((out - target) ** 2).mean()


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def whole(
    modules: list[nn.Module],
    inputs: Any,
    targets: Any,
    loss: Callable = mean_square,
    steps: int = 1,
) -> tuple[Tensor, list[dict[str, Tensor | None]]]:
    """Loss and gradients of the unpipelined model on the whole batch, after `steps` backwards."""
    modules = copy.deepcopy(modules)
    for _ in range(steps):
        value = inputs
        for module in modules:
            if getattr(module, "carries", False):
                value, _ = module(value, carried=None)
            elif isinstance(value, tuple):
                value = module(*value)
            elif isinstance(value, dict):
                value = module(**value)
            else:
                value = module(value)
        total = loss(value, targets)
        total.backward()
    return total.detach(), [gradients(module) for module in modules]


def close(got: Tensor | None, want: Tensor | None, what: str, tolerance: float = 1e-10) -> None:
    if want is None or got is None:
        zero = [t is None or not t.any() for t in (got, want)]
        assert all(zero), f"{what}: one side has no gradient"
        return
    worst = float((got - want).abs().max())
    assert worst <= tolerance, f"{what} differs by {worst}"


def held(schedule: Schedule, rank: int, modules: list[nn.Module]) -> dict[int, nn.Module]:
    """Copies of the modules whose stages per rank holds."""
    return {s: copy.deepcopy(modules[s]) for s in schedule.placement.stages_of_rank[rank]}


def assert_like_whole(
    schedule: Schedule,
    modules: list[nn.Module],
    inputs: Any,
    targets: Any,
    loss: Callable = mean_square,
    steps: int = 1,
    step: Callable[[Pipeline, int], Tensor] | None = None,
    **options: Any,
) -> None:
    """One training run on p ranks gives the loss and the gradients of the unpipelined model."""
    want_loss, want = whole(modules, inputs, targets, loss, steps)

    def rank(r: int, g: Group) -> Any:
        stages = held(schedule, r, modules)
        pipe = Pipeline(schedule, stages, loss, group=g.group, timeout=LONG, **options)
        for _ in range(steps):
            got = step(pipe, r) if step else pipe.step(inputs, targets)
        return got, {s: gradients(module) for s, module in stages.items()}

    for r, (got, grads) in enumerate(on_ranks(schedule.p, rank)):
        close(got, want_loss, f"loss on rank {r}")
        for s, by_name in grads.items():
            for name, grad in by_name.items():
                close(grad, want[s][name], f"rank {r}, stage {s}, {name}")
