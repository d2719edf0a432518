"""Gradients that several ranks share: summed over copies, averaged over replicas; their norm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.copies import Copies, exchange, like, plain
from hocket.runtime.session import Session

BUCKET = 25 << 20  # bytes of one all-reduce


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

    @property
    def shared(self) -> bool:
        """Whether a parameter of this rank has copies."""
        return bool(self.bundles)

    def open(self) -> None:
        """Sets aside the gradients of earlier steps."""
        self._before = [(p, p.grad) for p in self._once if p.grad is not None]
        for p, _ in self._before:
            p.grad = None

    def sum(self) -> None:
        """Sums the step's gradients over all copies, in the order of the ranks everywhere."""
        with torch.no_grad():
            parts = {
                ranks: [_local_sum(members) for members in bundle]
                for ranks, bundle in self.bundles.items()
            }
            for ranks, every in self._exchange(parts).items():
                total = every[0].clone()
                for other in every[1:]:
                    total += other
                bundle = self.bundles[ranks]
                for members, value in zip(bundle, _unpack(total, bundle), strict=True):
                    for p in members:
                        p.grad = None if value is None else like(p, value.clone())

    def average(self) -> None:
        """Makes the gradients their mean over the replicas."""
        average(self.parameters, self.session.replicas, self.session.wait)

    def close(self) -> None:
        """Adds what was set aside."""
        with torch.no_grad():
            for p, before in self._before:
                p.grad = before if p.grad is None else before.add_(p.grad)
        self._before = []

    def align(self) -> None:
        """Gives every copy the values of the first one: lowest rank, lowest stage."""
        with torch.no_grad():
            parts = {
                ranks: [plain(members[0].detach()) for members in bundle]
                for ranks, bundle in self.bundles.items()
            }
            for ranks, every in self._exchange(parts).items():
                bundle = self.bundles[ranks]
                for members, value in zip(bundle, _unpack(every[0], bundle), strict=True):
                    for p in members:
                        assert value is not None
                        here = plain(p.detach())
                        here.copy_(value.view_as(here))

    def _exchange(
        self, parts: Mapping[tuple[int, ...], Sequence[Tensor | None]]
    ) -> dict[tuple[int, ...], list[Tensor]]:
        packed = {ranks: _pack(some, self.bundles[ranks]) for ranks, some in parts.items()}
        return exchange(self.session, self.tag, packed)


def _local_sum(members: list[Tensor]) -> Tensor | None:
    grads = [plain(_placed(p, p.grad)) for p in members if p.grad is not None]
    return sum(grads[1:], grads[0]) if grads else None


def _placed(p: Any, grad: Any) -> Tensor:
    """The gradient of a sharded parameter, sharded as that is."""
    if hasattr(p, "placements") and grad.placements != p.placements:
        return grad.redistribute(placements=p.placements)
    return grad


def _pack(parts: Sequence[Tensor | None], bundle: Sequence[Sequence[Tensor]]) -> Tensor:
    """One flat CPU tensor: the parts in float64 or their own type, then which are there."""
    dtype = bundle[0][0].dtype
    for members in bundle:
        dtype = torch.promote_types(dtype, members[0].dtype)
    flat = [
        torch.zeros(plain(members[0]).numel(), dtype=dtype) if part is None
        else part.detach().reshape(-1).to("cpu", dtype)
        for part, members in zip(parts, bundle, strict=True)
    ]  # fmt: skip
    there = torch.tensor([float(part is not None) for part in parts], dtype=dtype)
    return torch.cat([*flat, there])


def _unpack(total: Tensor, bundle: Sequence[Sequence[Tensor]]) -> list[Tensor | None]:
    sizes = [plain(members[0]).numel() for members in bundle]
    *flat, there = total.split([*sizes, len(bundle)])
    return [
        part.to(members[0].device, members[0].dtype) if present else None
        for part, members, present in zip(flat, bundle, (there > 0).tolist(), strict=True)
    ]


def shared_by_replicas(p: Tensor) -> bool:
    """False for a parameter with `allreduce = False`, Megatron-LM's mark of an expert."""
    return getattr(p, "allreduce", True)


def average(parameters: Iterable[Tensor], group: Any, wait: Any) -> None:
    """Replaces gradients by their mean over a group of replicas, one all-reduce a bucket.

    A parameter without gradient on every replica stays without; on some counts as zero there. One
    that only this replica has met the rows of all of them: its gradient is divided by their number.
    """
    buckets: list[list[Tensor]] = []
    room: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for p in parameters:
        if not p.requires_grad:
            continue
        if not shared_by_replicas(p):
            if p.grad is not None:
                p.grad /= group.size()
            continue
        bucket, used = room.get((p.dtype, p.device), ([], BUCKET))
        if used + p.nbytes > BUCKET:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(p)
        room[p.dtype, p.device] = (bucket, used + p.nbytes)
    flats = []
    for bucket in buckets:
        there = torch.tensor([float(p.grad is not None) for p in bucket]).to(plain(bucket[0]))
        parts = [
            torch.zeros_like(plain(p)) if p.grad is None else plain(_placed(p, p.grad))
            for p in bucket
        ]
        flats.append(torch.cat([*(part.reshape(-1) for part in parts), there]).detach())
    works = [group.allreduce([flat]) for flat in flats]
    for work, flat, bucket in zip(works, flats, buckets, strict=True):
        wait(work)
        *parts, there = flat.split([*(plain(p).numel() for p in bucket), len(bucket)])
        for p, part, present in zip(bucket, parts, (there > 0).tolist(), strict=True):
            if present:
                p.grad = like(p.detach(), part / group.size())
