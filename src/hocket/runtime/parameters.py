"""The parameters of one rank's part of a model: which have copies elsewhere, and their gradients.

The loss, where it is a module, counts as one stage after the last one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hocket.errors import RunError
from hocket.ir import Placement
from hocket.runtime.copies import Buffers, Copies, check_alike, copies, in_words
from hocket.runtime.grad_sync import GradientSync, shared_by_replicas
from hocket.runtime.session import Session

Tied = Iterable[Iterable[tuple[int, str]]]


class Parameters:
    """All parameters and buffers of a rank, and what is done with their gradients around a step."""

    def __init__(
        self, placement: Placement, modules: Mapping[int, nn.Module], loss: Any, tied: Tied | None,
        session: Session,
    ) -> None:  # fmt: skip
        own = next((getattr(m, "tied_parameters", ()) for m in modules.values()), ())
        self.session = session
        self.tied = [[(int(s), n) for s, n in names] for names in (*(tied or ()), *own)]
        n, ends = placement.n_stages, {path[-1].rank for path in placement.paths}
        self.held = [
            (*own, *([n] if r in ends else ())) for r, own in enumerate(placement.stages_of_rank)
        ]
        self.modules = dict(modules)
        if session.rank in ends and isinstance(loss, nn.Module):
            self.modules[n] = loss

    def groups(self) -> list[Copies]:
        """The parameters with copies.

        Raises: RunError for a tied name that a stage does not have, or a stage that averages its
        gradients itself.
        """
        for s, module in self.modules.items():
            parts = (m for m in module.modules() if isinstance(m, DistributedDataParallel))
            if any(part.require_backward_grad_sync for part in parts):
                raise RunError(
                    f"stage {s} holds a DistributedDataParallel, which averages after one backward "
                    "per forward; give the module inside it, and data_parallel=group"
                )
        names = {s: [n for n, _ in m.named_parameters()] for s, m in self.modules.items()}
        return copies(self.held, names, self.tied)

    def in_words(self) -> dict[str, dict[str, str]]:
        """What copies must agree in."""
        return in_words(self.held, self.modules, self.tied)

    def connect(self, words: Sequence[Mapping[str, Mapping[str, str]]], tag: int) -> None:
        """Makes copies equal, where the `in_words` of all ranks agree; collective.

        Raises: RunError that names what differs, the same on all ranks.
        """
        check_alike(words, self.tied)
        self.gradients = GradientSync(self.groups(), self.modules, self.session, tag)
        self.buffers = Buffers(self.held, self.modules, self.session, tag)
        self._guarded(True, self.gradients.align, "the broadcast of mirrored weights")
        self._guarded(self.buffers, self.buffers.align, "the broadcast of mirrored buffers")

    def _guarded(self, needed: Any, call: Callable[[], Any], phase: str) -> None:
        if needed:
            self.session.guard(call, phase)

    def open(self, *, sync: bool) -> None:
        """Notes the state before a step."""
        self.gradients.open(sync=sync)
        self.buffers.open()

    def close(self, *, trained: bool, sync: bool) -> None:
        """Brings the gradients of a step together; `trained`: buffers and replicas too."""
        gradients, averaged = self.gradients, trained and self.session.replicas is not None
        self._guarded(sync and gradients.shared, gradients.sum, "the sum of shared gradients")
        self._guarded(sync and averaged, gradients.average, "the average over replicas")
        self._guarded(trained and self.buffers, self.buffers.close, "the exchange of buffers")
        gradients.close(sync=sync)

    def check_synced(self, what: str) -> None:
        """Raises RunError where gradients are not those of all copies and replicas yet."""
        if self.gradients.unsynced:
            raise RunError(f"{what} needs complete gradients, but the last step had sync=False")

    def unscale(self, scaler: Any, optimizer: Any) -> bool:
        """Unscales a rank's gradients; whether one of any rank is not finite; collective.

        Raises: RunError where the ranks have other scales.
        """
        scaler.unscale_(optimizer)
        found = scaler._found_inf_per_device(optimizer)
        own = [any(bool(flag) for flag in found.values()), scaler.get_scale()]
        every = [json.loads(raw) for raw in self.session.exchange(json.dumps(own).encode())]
        if self.session.replicas is not None:
            raw = self.session.exchange_with_replicas(json.dumps(every).encode())
            every = [words for replica in raw for words in json.loads(replica)]
        scales = sorted({scale for _, scale in every})
        if len(scales) > 1:
            raise RunError(f"the scales of the ranks differ: {', '.join(map(str, scales))}")
        device = self.session.device
        found.setdefault(device, torch.zeros((), dtype=torch.float32, device=device))
        bad = any(flag for flag, _ in every)
        for flag in found.values():
            flag.fill_(float(bad))
        return bad

    # --- the norm ---------------------------------------------------------------------------

    def norm(self, norm_type: float) -> float:
        """The norm of all gradients of the pipeline, each weight counted once; collective.

        Experts of other replicas count, too, where a parameter has `allreduce = False`.
        """
        counted = {id(p): p for p in self.gradients.parameters}
        for ranks, bundle in self.gradients.bundles.items():
            for members in bundle:
                mine = members[0] if ranks[0] == self.session.rank else None
                for p in members:
                    if p is not mine:
                        counted.pop(id(p), None)
        replicas = self.session.replicas
        sides: dict[bool, list[Tensor]] = {True: [], False: []}
        for p in counted.values():
            if p.grad is not None:
                sides[replicas is None or shared_by_replicas(p)].append(p.grad)
        own = [_norm(sides[shared], norm_type) for shared in (True, False)]
        every = [json.loads(raw) for raw in self.session.exchange(json.dumps(own).encode())]
        total, experts = (_joined(column, norm_type) for column in zip(*every, strict=True))
        if replicas is not None:
            raw = self.session.exchange_with_replicas(json.dumps(experts).encode())
            experts = _joined([json.loads(x) for x in raw], norm_type)
        return _joined([total, experts], norm_type)

    def clip(self, max_norm: float, total: Tensor, foreach: bool | None) -> None:
        """Scales the gradients so that a total norm becomes `max_norm` at most."""
        parameters = list({id(p): p for p in self.gradients.parameters}.values())
        for dtype in {p.dtype for p in parameters}:
            some = [p for p in parameters if p.dtype == dtype]
            clip_grads_with_norm_(some, max_norm, total.to(dtype), foreach=foreach)


def _norm(gradients: Sequence[Tensor], norm_type: float) -> float:
    """The norm of some gradients; of sharded ones over all shards, which is collective."""
    groups: dict[Any, list[Tensor]] = {}
    for grad in gradients:
        mesh = getattr(grad, "device_mesh", None)
        groups.setdefault((mesh, grad.dtype, grad.device), []).append(
            grad.to_dense() if grad.layout is not torch.strided else grad
        )
    norms = []
    for some in groups.values():
        norm: Any = get_total_norm(some, norm_type)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
    return _joined(norms, norm_type)


def _joined(norms: Sequence[float], norm_type: float) -> float:
    """The norm of a vector whose parts have these norms."""
    if any(math.isnan(x) for x in norms):
        return math.nan
    if math.isinf(norm_type):
        return max(norms, default=0.0)
    return math.fsum(x**norm_type for x in norms) ** (1 / norm_type) if norms else 0.0
