"""Random numbers that depend on what is computed, not on where or when.

Dropout draws from one stream a process, so its masks change with the placement and the order. With
keys, every layer of every microbatch draws from a stream of its own.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from hocket.ir import Placement
from hocket.runtime.stage import Stage

_LOCK = threading.RLock()  # the default generator is one for all threads
_MASK = (1 << 64) - 1


def layers(module: nn.Module) -> list[nn.Module]:
    """The layers that get keys of their own: the children of a Sequential, else the module."""
    return [*module.children()] if isinstance(module, nn.Sequential) and len(module) else [module]


def key(seed: int, *parts: int) -> int:
    """A well-mixed 63-bit number from a seed and counters. Source: SplitMix64 (Steele, 2014)."""
    state = seed & _MASK
    for part in parts:
        state = (state ^ (part + 0x9E3779B97F4A7C15)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class Keys:
    """Seeds the generators before each layer from (seed, step, layer, microbatch).

    The generators' own state is restored after each stage. Layers are numbered over the whole
    model, so a Sequential cut elsewhere draws the same numbers.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device
        self.step = 0
        self._mb: int | None = None

    def attach(self, stages: Mapping[int, Stage], counts: Mapping[int, int]) -> None:
        """Puts keys around the stages' forwards and backwards; `counts`: layers of every stage.

        Of several threads one at a time gets through, since they share the generators. A module
        with `draws = False` says that it draws no random numbers, and gets none.
        """
        for s, stage in stages.items():
            if getattr(stage.module, "draws", True):
                first = sum(counts[i] for i in range(s))
                for number, layer in enumerate(layers(stage.module), first):
                    layer.register_forward_pre_hook(lambda *_, number=number: self._seed(number))
                stage.keys = self._around

    def _seed(self, layer: int) -> None:
        if self._mb is None:
            return
        seed = key(self.seed, self.step, layer, self._mb)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)

    @contextmanager
    def _around(self, mb: int) -> Generator[None]:
        with (
            _LOCK,
            torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []),
        ):
            self._mb = mb
            try:
                yield
            finally:
                self._mb = None


def warn_if_in_turn(placement: Placement, rank: int, stages: Mapping[int, Stage]) -> None:
    """Warns that stages on several queues of a rank may draw random numbers, so they take turns."""
    first: dict[str, int] = {}
    for path in placement.paths:
        for s, queue in enumerate(path):
            if queue.rank == rank and stages[s].keys is not None:
                first.setdefault(str(queue), s)
    if len(first) > 1:
        (one, a), (two, b) = list(first.items())[:2]
        warnings.warn(
            f"stage {a} on queue {one} and stage {b} on queue {two} may both draw random numbers, "
            "from one generator, so they take turns; a module that draws none says draws = False",
            stacklevel=3,
        )
