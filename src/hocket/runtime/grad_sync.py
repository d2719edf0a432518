"""Gradients that several ranks share: summed over copies, averaged over replicas; their norm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import RunError
from hocket.runtime.copies import Copies, align, exchange, like, plain
from hocket.runtime.dtensor import alike
from hocket.runtime.session import Session


class GradientSync:
    """Keeps the copies of this rank's parameters equal, and the replicas of the pipeline.

    Between `open` and `close` gradients that must not be summed or divided twice are those of one
    step only, so that steps may be accumulated: what was there before is set aside.
    """

    def __init__(
        self, groups: Sequence[Copies], modules: Mapping[int, nn.Module], session: Session, tag: int
    ) -> None:
        self.session, self.tag = session, tag
        self.parameters = [p for module in modules.values() for p in module.parameters()]
        named = {s: dict(module.named_parameters()) for s, module in modules.items()}
        self.bundles: dict[tuple[int, ...], list[list[Tensor]]] = {}
        for group in groups:
            here = [named[s][name] for s, name in group.names if s in named]
            mine: list[Tensor] = list({id(p): p for p in here}.values())
            if mine and (len(group.ranks) > 1 or len(mine) > 1):
                self.bundles.setdefault(group.ranks, []).append(mine)
        once = [p for bundle in self.bundles.values() for members in bundle for p in members]
        if session.replicas is not None:
            once += [p for p in self.parameters if not shared_by_replicas(p)]
        self._once = list({id(p): p for p in once}.values())
        self._before: list[tuple[Tensor, Tensor]] = []
        self.unsynced = False  # gradients of earlier steps wait for the sum and the average

    @property
    def shared(self) -> bool:
        """Whether a parameter of this rank has copies."""
        return bool(self.bundles)

    def open(self, *, sync: bool) -> None:
        """Sets aside the gradients of earlier steps, unless they wait as those of this step will.

        Raises: RunError where some are complete and this step's will not be.
        """
        if self.unsynced:
            return
        self._before = [(p, p.grad) for p in self._once if p.grad is not None]
        if not sync and any(bool(plain(grad).any()) for _, grad in self._before):
            raise RunError(
                "there are gradients already that are summed over copies and replicas, so those of "
                "a step with sync=False cannot be added; set them to None before it"
            )
        for p, _ in self._before:
            p.grad = None

    def sum(self) -> None:
        """Sums the step's gradients over all copies, in the order of the ranks everywhere."""
        with torch.no_grad():
            packed = {ranks: _packed(bundle) for ranks, bundle in self.bundles.items()}
            for ranks, every in exchange(self.session, self.tag, packed).items():
                bundle = self.bundles[ranks]
                parts = _parted(sum(every[1:], every[0]), [members[0] for members in bundle])
                for members, part in zip(bundle, parts, strict=True):
                    for p in members:
                        copied = None if part is None else part.to(p.device, p.dtype, copy=True)
                        p.grad = None if copied is None else like(p, copied)

    def average(self) -> None:
        """Makes the gradients their mean over the replicas."""
        average(self.parameters, self.session.replicas, self.session.wait)

    def close(self, *, sync: bool) -> None:
        """Adds what was set aside."""
        self.unsynced = not sync
        with torch.no_grad():
            for p, before in self._before:
                p.grad = before if p.grad is None else before.add_(p.grad)
        self._before = []

    def align(self) -> None:
        """Gives every copy the values of the first one: lowest rank, lowest stage."""
        first = {
            ranks: [members[0] for members in bundle] for ranks, bundle in self.bundles.items()
        }
        with torch.no_grad():
            align(self.session, self.tag, first)
            for bundle in self.bundles.values():
                for one, *others in bundle:
                    for p in others:
                        plain(p.detach()).copy_(plain(one.detach()))


def _packed(bundle: Sequence[Sequence[Tensor]]) -> Tensor:
    """One flat CPU tensor: the gradients of all members of each group, and which there are."""
    dtype = reduce(torch.promote_types, {members[0].dtype for members in bundle})
    flat, there = [], []
    for members in bundle:
        grads = [plain(alike(p.grad, p)) for p in members if p.grad is not None]
        total = sum(grads[1:], grads[0]) if grads else torch.zeros_like(plain(members[0]))
        flat.append(total.detach().reshape(-1).to("cpu", dtype))
        there.append(float(bool(grads)))
    return torch.cat([*flat, torch.tensor(there, dtype=dtype)])


def _parted(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of parameters out of a flat tensor that ends with how many had each."""
    sizes = [plain(p).numel() for p in parameters]
    *parts, there = flat.split([*sizes, len(sizes)])
    return [part if n else None for part, n in zip(parts, (there > 0).tolist(), strict=True)]


def shared_by_replicas(p: Tensor) -> bool:
    """False for a parameter with `allreduce = False`, Megatron-LM's mark of an expert."""
    return getattr(p, "allreduce", True)


def average(parameters: Iterable[Tensor], group: Any, wait: Any) -> None:
    """Replaces gradients by their mean over a group of replicas, one all-reduce per dtype.

    A parameter without gradient on every replica stays without; on some counts as zero there. One
    that only this replica has met the rows of all of them: its gradient is divided by their number.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for p in parameters:
        if p.requires_grad and shared_by_replicas(p):
            kinds.setdefault((p.dtype, p.device), []).append(p)
        elif p.requires_grad and p.grad is not None:
            p.grad /= group.size()
    flats = []
    for some in kinds.values():
        there = torch.tensor([float(p.grad is not None) for p in some]).to(plain(some[0]))
        parts = [
            torch.zeros_like(plain(p)) if p.grad is None else plain(alike(p.grad, p)) for p in some
        ]
        flats.append(torch.cat([*(part.reshape(-1) for part in parts), there]).detach())
    works = [group.allreduce([flat]) for flat in flats]
    for work, flat, some in zip(works, flats, kinds.values(), strict=True):
        wait(work)
        for p, part in zip(some, _parted(flat, some), strict=True):
            if part is not None:
                p.grad = like(p.detach(), part / group.size())
