"""Random numbers that depend on what is computed, not on where or when.

Dropout draws from one stream per process, so its masks change with the placement and the order.
With keys, every layer of every microbatch draws from a stream of its own.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from hashlib import blake2b

import torch
from torch import nn

from hocket.ir import Placement
from hocket.runtime.split import is_compiled
from hocket.runtime.stage import Stage

_LOCK = threading.RLock()  # the default generator is one for all threads
Layer = tuple[int, int, int]


def n_layers(module: nn.Module) -> int:
    """How many leaves a module has: modules without children that may draw, no placeholders."""
    return sum(_is_leaf(part) for part in module.modules())


def layers(module: nn.Module, first: int) -> list[tuple[nn.Module, Layer]]:
    """The parts of a stage that get keys of their own, and what identifies each in the model.

    That is the number of its first leaf (`first` is that of the stage), how many leaves it has, and
    how deep they lie: the same whatever stage it is in. Inside a compiled part there are none.
    """
    out: list[tuple[nn.Module, Layer]] = []
    seen: set[nn.Module] = set()

    def walk(part: nn.Module, first: int, hooked: bool) -> tuple[int, int]:
        """Leaves and depth of a part."""
        if part in seen:
            return 0, 0
        seen.add(part)
        at, n, depth = len(out), int(_is_leaf(part)), 0
        if hooked:
            out.append((part, (0, 0, 0)))
        inside = hooked and not is_compiled(part)
        for child in part.children():
            more, below = walk(child, first + n, inside)
            n, depth = n + more, max(depth, below + 1)
        if hooked:
            out[at] = (part, (first, n, depth))
        return n, depth

    walk(module, first, True)
    return out


def _is_leaf(module: nn.Module) -> bool:
    if not getattr(module, "draws", True):
        return False
    placeholders = (nn.Identity, nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return next(module.children(), None) is None and not isinstance(module, placeholders)


def key(seed: int, *parts: int) -> int:
    """A well-mixed 63-bit number from a seed and counters."""
    digest = blake2b(repr((seed, *parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


class Keys:
    """Seeds the generators before each layer from (seed, step, microbatch, layer).

    Microbatches are counted over all replicas; `first` is the number of this one's first.

    The generators' own state is restored after each stage. A layer that is called several times
    for one microbatch draws the same numbers each time, as a recomputed one must.
    """

    def __init__(self, seed: int, device: torch.device, first: int) -> None:
        self.seed, self.device, self.first = seed, device, first
        self.step = 0
        self._key: int | None = None

    def attach(self, stages: Mapping[int, Stage], counts: Mapping[int, int]) -> None:
        """Puts keys around the stages' forwards and backwards; `counts`: leaves of every stage.

        Of several threads one at a time gets through, since they share the generators. A module
        with `draws = False` says that it draws no random numbers, and gets none.
        """
        for s, stage in stages.items():
            if getattr(stage.module, "draws", True):
                for part, layer in layers(stage.module, sum(counts[i] for i in range(s))):
                    part.register_forward_pre_hook(lambda *_, layer=layer: self._seed(layer))
                stage.keys = self._around

    def _seed(self, layer: Layer) -> None:
        if self._key is None:
            return
        seed = key(self._key, *layer)
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
            self._key = key(self.seed, self.step, self.first + mb)
            try:
                yield
            finally:
                self._key = None


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
            stacklevel=4,
        )
