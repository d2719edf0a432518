"""Gradients of weights that several ranks hold: summed over copies, averaged over replicas.

A copy is the same parameter on another rank (mirrored stages), or another parameter that is tied
to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import RunError
from hocket.runtime.session import Session

Name = tuple[int, str]  # stage and parameter name
BUCKET = 25 << 20  # bytes of one all-reduce


@dataclass(frozen=True)
class Copies:
    """Parameters that must stay equal, and who holds them: `holders[i]` the ranks of `names[i]`."""

    names: tuple[Name, ...]
    holders: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that holds one of them."""
        return tuple(sorted({r for ranks in self.holders for r in ranks}))


def copies(
    held: Sequence[Sequence[int]],
    parameters: Mapping[int, Sequence[str]],
    tied: Iterable[Iterable[Name]],
) -> list[Copies]:
    """The groups of parameters with several holders, in one order on all ranks.

    held: the stages of each rank. parameters: the parameter names of this rank's stages.

    Raises: RunError for a tied name that a stage does not have.
    """
    n = 1 + max(s for stages in held for s in stages)
    holders = [tuple(r for r, stages in enumerate(held) if s in stages) for s in range(n)]
    group_of: dict[Name, list[Name]] = {}
    for group in tied:
        members = [(int(s), name) for s, name in group]
        for stage, name in members:
            if not 0 <= stage < n or name not in parameters.get(stage, (name,)):
                raise RunError(f"tied: stage {stage} has no parameter {name!r}")
        merged = sorted({n for member in members for n in group_of.get(member, [member])})
        group_of.update(dict.fromkeys(merged, merged))
    for stage, names in parameters.items():
        if len(holders[stage]) > 1:
            for name in names:
                group_of.setdefault((stage, name), [(stage, name)])
    unique = sorted({tuple(group) for group in group_of.values()})
    return [Copies(names, tuple(holders[s] for s, _ in names)) for names in unique]


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
            found = [named[s][name] for s, name in group.names if s in named]
            mine: list[Tensor] = list({id(p): p for p in found}.values())
            if mine and (len(group.ranks) > 1 or len(mine) > 1):
                self.bundles.setdefault(group.ranks, []).append(mine)
        self._before: list[tuple[Tensor, Tensor]] = []

    @property
    def shared(self) -> bool:
        """Whether a parameter of this rank has copies."""
        return bool(self.bundles)

    def open(self) -> None:
        """Sets aside the gradients of earlier steps."""
        once = [p for bundle in self.bundles.values() for members in bundle for p in members]
        self._before = [(p, p.grad) for p in once if p.grad is not None]
        for p, _ in self._before:
            p.grad = None

    def sum(self) -> None:
        """Sums the step's gradients over all copies."""
        with torch.no_grad():
            for members, total in self._exchange(_local_sum):
                for p in members:
                    p.grad = None if total is None else total.clone().view_as(p)

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
            for members, value in self._exchange(lambda members: members[0].detach(), first=True):
                for p in members:
                    assert value is not None
                    p.copy_(value.view_as(p))

    def _exchange(self, take: Any, first: bool = False) -> list[tuple[list[Tensor], Tensor | None]]:
        """For each group, the sum over its ranks (or the first rank's part) of what `take` gives.

        Sums run in the order of the ranks everywhere, so all copies are equal to the last bit.
        """
        out: list[tuple[list[Tensor], Tensor | None]] = []
        running: list[Any] = []
        for ranks, bundle in sorted(self.bundles.items(), key=lambda item: item[0]):
            parts = [take(members) for members in bundle]
            packed = _pack(parts, bundle)
            rank, wire = self.session.rank, self.session.wire
            others = [r for r in ranks if r != rank]
            arrived = {r: torch.empty_like(packed) for r in others}
            works = []
            if wire is not None:
                works += [wire.group.recv([arrived[r]], r, self.tag) for r in others]
                works += [wire.group.send([packed], r, self.tag) for r in others]
            arrived[rank] = packed
            running.append((bundle, arrived, works, ranks))
        for bundle, arrived, works, ranks in running:
            for work in works:
                self.session.wait(work)
            total = arrived[ranks[0]].clone()
            if not first:
                for r in ranks[1:]:
                    total += arrived[r]
            out += zip(bundle, _unpack(total, bundle), strict=True)
        return out


def _local_sum(members: list[Tensor]) -> Tensor | None:
    grads = [p.grad for p in members if p.grad is not None]
    return sum(grads[1:], grads[0]) if grads else None


def _pack(parts: Sequence[Tensor | None], bundle: Sequence[Sequence[Tensor]]) -> Tensor:
    """One flat CPU tensor: the parts in float64 or their own type, then which are there."""
    dtype = bundle[0][0].dtype
    for members in bundle:
        dtype = torch.promote_types(dtype, members[0].dtype)
    flat = [
        torch.zeros(members[0].numel(), dtype=dtype) if part is None
        else part.detach().reshape(-1).to("cpu", dtype)
        for part, members in zip(parts, bundle, strict=True)
    ]  # fmt: skip
    there = torch.tensor([float(part is not None) for part in parts], dtype=dtype)
    return torch.cat([*flat, there])


def _unpack(total: Tensor, bundle: Sequence[Sequence[Tensor]]) -> list[Tensor | None]:
    sizes = [members[0].numel() for members in bundle]
    *flat, there = total.split([*sizes, len(bundle)])
    return [
        part.to(members[0].device, members[0].dtype) if present else None
        for part, members, present in zip(flat, bundle, (there > 0).tolist(), strict=True)
    ]


def average(parameters: Iterable[Tensor], group: Any, wait: Any) -> None:
    """Replaces gradients by their mean over a group of replicas, one all-reduce a bucket.

    A parameter without gradient on every replica stays without; on some counts as zero there. One
    with `allreduce = False` (Megatron-LM's mark of an expert) is of this replica only, and has met
    the rows of all of them: its gradient is divided by their number.
    """
    buckets: list[list[Tensor]] = []
    room: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for p in parameters:
        if not p.requires_grad:
            continue
        if not getattr(p, "allreduce", True):
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
        there = bucket[0].new_tensor([float(p.grad is not None) for p in bucket])
        parts = [p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in bucket]
        flats.append(torch.cat([*parts, there]).detach())
    works = [group.allreduce([flat]) for flat in flats]
    for work, flat, bucket in zip(works, flats, buckets, strict=True):
        wait(work)
        *parts, there = flat.split([*(p.numel() for p in bucket), len(bucket)])
        for p, part, present in zip(bucket, parts, (there > 0).tolist(), strict=True):
            if present:
                p.grad = part.view_as(p) / group.size()
