"""What splitting a backward costs, and what it holds: CPU time and bytes of F, B, I and W.

B is the backward of an untouched copy of the same blocks, measured in the same run: the two take
turns, once a round. Time is CPU time of the thread, so other work on the machine counts little.
Bytes are the allocator's own records, less what was allocated before F; unit: one [batch, tokens,
width] tensor.

    python benchmarks/split_backward.py [rounds]
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function

from hocket.runtime import split


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    batch: int
    tokens: int


SIZES = (Size(4, 256, 4, 2, 128), Size(2, 512, 8, 2, 256), Size(2, 768, 12, 1, 512))


class Block(nn.Module):
    """A pre-norm transformer block: attention and a GELU MLP, both residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, d))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def timed(call) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


class Stages(NamedTuple):
    """The same blocks twice, untouched and split, with one input and one output gradient."""

    whole: nn.Module
    halves: nn.Module
    plan: split.SplitPlan
    x: Tensor
    dy: Tensor

    @classmethod
    def build(cls, size: Size) -> Stages:
        torch.manual_seed(0)
        whole = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        halves = copy.deepcopy(whole)
        shape = (size.batch, size.tokens, size.width)
        x = torch.randn(shape, requires_grad=True)
        return cls(whole, halves, split.prepare(halves), x, torch.randn(shape))

    def backward_whole(self) -> dict[str, float]:
        y = self.whole(self.x)
        return {"B": timed(lambda: y.backward(self.dy))}

    def backward_split(self) -> dict[str, float]:
        out: list[Tensor] = []
        times = {"F": timed(lambda: out.append(self.halves(self.x)))}

        def half() -> None:
            with self.plan.input_backward() as pending:
                out[0].backward(self.dy)
            queue.append(pending)

        queue: list[split.PendingWeights] = []
        times["I"] = timed(half)
        times["W"] = timed(queue[0].run)
        return times

    def held(self) -> list[int]:
        """Bytes held after F, between I and W, after W, more than before F."""
        self.x.grad = torch.zeros_like(self.x)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            y = self.halves(self.x)
            with record_function("mark F"):
                pass
            with self.plan.input_backward() as pending:
                y.backward(self.dy)
            del y
            with record_function("mark I"):
                pass
            pending.run()
            with record_function("mark W"):
                pass
        events = prof.profiler.kineto_results.events()
        marks = sorted(e.start_ns() for e in events if e.name().startswith("mark "))
        memory = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
        return [sum(size for at, size in memory if at < mark) for mark in marks]


def measure(size: Size, rounds: int) -> str:
    stages = Stages.build(size)
    runs: list[dict[str, float]] = []
    for turn in range(rounds + 2):
        first, second = stages.backward_whole, stages.backward_split
        if turn % 2:
            first, second = second, first
        runs.append(first() | second())
    runs = runs[2:]  # The first rounds allocate the gradients and warm up.
    unit = statistics.median(run["F"] for run in runs)
    times = {key: statistics.median(run[key] for run in runs) for key in "FBIW"}
    ratio = statistics.median((run["I"] + run["W"]) / run["B"] for run in runs)
    tensor = stages.x.numel() * stages.x.element_size()
    held = [f"{amount / tensor / size.layers:8.2f}" for amount in stages.held()]
    name = f"L{size.layers} d{size.width} T{size.tokens} B{size.batch}"
    phases = " ".join(f"{times[key] / unit:6.2f}" for key in "FBIW")
    return f"{name:20} {unit * 1e3:8.1f} {phases} {ratio:8.3f} {' '.join(held)}"


def main() -> None:
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    print("times in units of F; bytes in [batch, tokens, width] tensors a layer")
    print(
        f"{'blocks':20} {'F ms':>8} {'F':>6} {'B':>6} {'I':>6} {'W':>6} {'(I+W)/B':>8} "
        f"{'after F':>8} {'I to W':>8} {'after W':>8}"
    )
    for size in SIZES:
        print(measure(size, rounds), flush=True)


if __name__ == "__main__":
    main()
