"""Weights and buffers that several stages or ranks hold: who has them, and that they are alike.

A copy is the same parameter on another rank (mirrored stages), or another parameter that is tied
to it. Of a sharded one (DTensor) each rank keeps its own shard like that of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hocket.errors import RunError
from hocket.runtime.dtensor import joined, part
from hocket.runtime.session import Session

Name = tuple[int, str]  # stage and parameter name


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


# --- alike ----------------------------------------------------------------------------------


def in_words(
    held: Sequence[Sequence[int]], modules: Mapping[int, nn.Module], tied: Iterable[Iterable[Name]]
) -> dict[str, dict[str, str]]:
    """What copies must agree in: shape and type of all that a stage with copies holds."""
    shared = {s for group in tied for s, _ in group}
    shared |= {s for s in modules if sum(s in stages for stages in held) > 1}
    return {
        str(s): {
            **{name: _text(p) for name, p in modules[s].named_parameters()},
            **{name: f"a buffer {_text(b)}" for name, b in modules[s].named_buffers()},
        }
        for s in shared & modules.keys()
    }


def check_alike(
    words: Sequence[Mapping[str, Mapping[str, str]]], tied: Iterable[Iterable[Name]]
) -> None:
    """Checks what `in_words` says of every rank.

    Raises: RunError that names every parameter whose copies differ, the same on all ranks.
    """
    problems = []
    for s in sorted({s for own in words for s in own}, key=int):
        of_rank = {r: own[s] for r, own in enumerate(words) if s in own}
        for name in dict.fromkeys(name for own in of_rank.values() for name in own):
            texts = {f"rank {r}": own.get(name, "missing") for r, own in of_rank.items()}
            problems += _differing(f"copies of stage {s} differ: {name} is", texts)
    for group in tied:
        texts = {}
        for s, name in group:
            own = next((own[str(s)] for own in words if str(s) in own), {})
            texts[f"stage {s} ({name})"] = own.get(name, "missing")
        problems += _differing("tied parameters differ:", texts)
    if problems:
        raise RunError("\n".join(problems))


def _differing(what: str, texts: Mapping[str, str]) -> list[str]:
    """One sentence about the first of these texts that is not like the one before it; or none."""
    (first, own), *others = texts.items()
    for where, text in others:
        if text != own:
            return [f"{what} {own} on {first}, but {text} on {where}"]
    return []


def _text(t: Tensor) -> str:
    text = f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}"
    if plain(t) is not t:
        text += f" as {list(plain(t).shape)}"
    return text


# --- kept alike -----------------------------------------------------------------------------


def plain(t: Tensor) -> Tensor:
    """A tensor as memory of this rank: of a DTensor its shard, of a sparse one the dense values."""
    t = part(t)
    return t.to_dense() if t.layout is not torch.strided else t


def like(p: Tensor, value: Tensor) -> Tensor:
    """A value for what `plain` took apart: the gradient of a DTensor is one too."""
    return joined(value.view_as(plain(p)), p)


def exchange(
    session: Session, tag: int, packed: Mapping[tuple[int, ...], Tensor]
) -> dict[tuple[int, ...], list[Tensor]]:
    """What each of some ranks packed, in the order of the ranks; for several groups at once.

    Each group has the same groups of the others, in the same order.
    """
    out, works = {}, []
    for ranks, own in sorted(packed.items()):
        arrived = {r: own if r == session.rank else torch.empty_like(own) for r in ranks}
        for r in ranks:
            if r != session.rank and session.wire is not None:
                works.append(session.wire.group.recv([arrived[r]], r, tag))
                works.append(session.wire.group.send([own], r, tag))
        out[ranks] = [arrived[r] for r in ranks]
    for work in works:
        session.wait(work)
    return out


class Buffers:
    """The buffers of stages that other ranks hold too: equal at the start and after each step.

    What a step adds to one of whole numbers (BatchNorm counts its batches) is added on all ranks;
    one of other numbers becomes the mean of the copies, as running means do.
    """

    def __init__(
        self, held: Sequence[Sequence[int]], modules: Mapping[int, nn.Module], session: Session,
        tag: int,
    ) -> None:  # fmt: skip
        self.session, self.tag = session, tag
        self._modules: dict[tuple[int, ...], list[nn.Module]] = {}
        for s, module in modules.items():
            ranks = tuple(r for r, stages in enumerate(held) if s in stages)
            if len(ranks) > 1 and any(True for _ in module.buffers()):
                self._modules.setdefault(ranks, []).append(module)
        self._before: dict[tuple[int, ...], list[Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._modules)

    def _own(self) -> dict[tuple[int, ...], list[Tensor]]:
        return {
            ranks: [b for module in modules for b in module.buffers()]
            for ranks, modules in self._modules.items()
        }

    def align(self) -> None:
        """Gives every copy the buffers of the first one."""
        align(self.session, self.tag, self._own())

    def open(self) -> None:
        """Notes the buffers before a step."""
        self._before = {ranks: [b.clone() for b in own] for ranks, own in self._own().items()}

    def close(self) -> None:
        """Brings those together that a step has changed on some rank."""
        own = self._own()
        marks = {
            ranks: torch.tensor([
                not torch.equal(b, old) for b, old in zip(own[ranks], before, strict=True)
            ])
            for ranks, before in self._before.items()
        }  # fmt: skip
        every = exchange(self.session, self.tag, marks)
        masks = {ranks: torch.stack(parts).any(0).tolist() for ranks, parts in every.items()}
        changed = {
            ranks: [b for b, mark in zip(own[ranks], mask, strict=True) if mark]
            for ranks, mask in masks.items() if any(mask)
        }  # fmt: skip
        for ranks, parts in exchange(self.session, self.tag, _flat(changed)).items():
            before = [x for x, mark in zip(self._before[ranks], masks[ranks], strict=True) if mark]
            _fill(changed[ranks], _merged(before, parts))
        self._before = {}


def align(session: Session, tag: int, own: Mapping[tuple[int, ...], Sequence[Tensor]]) -> None:
    """Gives the tensors of every rank of a group the values of those of its first rank."""
    for ranks, every in exchange(session, tag, _flat(own)).items():
        _fill(own[ranks], every[0])


def _flat(tensors: Mapping[tuple[int, ...], Sequence[Tensor]]) -> dict[tuple[int, ...], Tensor]:
    """The tensors of each group as one, of float64, which holds whole numbers up to 2^53."""
    return {
        ranks: torch.cat([_real(t).reshape(-1).to("cpu", torch.float64) for t in some])
        for ranks, some in tensors.items()
    }


def _real(t: Tensor) -> Tensor:
    """A buffer as real numbers of this rank, in the memory where it is."""
    t = plain(t.detach())
    return torch.view_as_real(t) if t.is_complex() else t


def _fill(tensors: Sequence[Tensor], values: Tensor) -> None:
    places = [_real(t) for t in tensors]
    for place, value in zip(places, values.split([t.numel() for t in places]), strict=True):
        place.copy_(value.view_as(place))


def _merged(before: Sequence[Tensor], every: Sequence[Tensor]) -> Tensor:
    """What all copies of some buffers become, flat."""
    reals = [_real(old) for old in before]
    sizes = [old.numel() for old in reals]
    out = []
    for old, *parts in zip(reals, *(x.split(sizes) for x in every), strict=True):
        start = parts[0] if old.is_floating_point() else old.reshape(-1).to("cpu", torch.float64)
        changed = sum((part - start for part in parts), torch.zeros_like(start))
        out.append(start + (changed / len(parts) if old.is_floating_point() else changed))
    return torch.cat(out)
