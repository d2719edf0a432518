"""Messages between stages on different ranks, over the send and recv of a process group.

Holds the protocol of one boundary between two stages; knows nothing of orders.

Both ends remember the spec of a microbatch's last message. A message of that spec is one packed
buffer, header first; large tensors follow on their own, without a copy. A message of another spec
(the first one, or a changed shape) keeps the sizes that the receiver has posted, says so in its
header, and is followed by one that carries the new spec and the payload. So shapes are learnt with
the first message, checked with every other one, and may change at any time. Gradients need no spec
of their own: they are those of the forward message's tensors that require one, and the header says
which of them are absent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hocket.errors import RunError
from hocket.runtime.values import LINE, Layout, Spec, flatten, rebuild

SETTLED = 0.05  # seconds after a collective's end in which gloo's thread surely forgets it
AGREED, CHANGED = 0xA5, 0x5A  # first byte of a header
_MAX_TAG = 2**31


class Wire:
    """Sends and receives of one process group, with a limit on how long to wait.

    `group` is a backend with `send` and `recv` of CPU tensors; CUDA tensors go through the CPU.
    `memory` is where messages are packed, `tagged` says that receives may be posted in any order.
    """

    tagged = True

    def __init__(self, group: Any, timeout: float, device: torch.device) -> None:
        self.group = group
        self.limit = timedelta(seconds=timeout)
        self.device = device
        self.memory = torch.device("cpu")

    @cached_property
    def send(self) -> Any:
        """`send([tensor], rank, tag)` of the group."""
        return self.group.send

    @cached_property
    def recv(self) -> Any:
        """`recv([tensor], rank, tag)` of the group."""
        return self.group.recv

    def wait(self, work: Any) -> None:
        """Waits for one send or receive; each may be waited for only once.

        Raises: RuntimeError when the other side is gone or the limit has passed.
        """
        work.wait(self.limit)

    def fetch(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        """Receives at once, into CPU tensors."""
        self.wait(self.group.recv(tensors, peer, tag))

    def close(self) -> None:
        """Ends what the wire started, at Python's exit at the latest.

        gloo's thread needs Python to let go of the tensors of a collective, and does so after
        the wait for it is over. Where Python has ended meanwhile, the process aborts.
        """
        time.sleep(SETTLED)

    def empty(self, nbytes: int) -> Tensor:
        """A buffer that the group can send."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.memory)

    def header(self, buffer: Tensor) -> Any:
        """The bytes of a buffer that has arrived, as far as its header goes at least."""
        return buffer.numpy()


def break_connections(group: Any) -> None:
    """Breaks a gloo group's connections, which wakes both ends of everything under way.

    A receive whose time is over closes its connection; `abort` does not.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            try:
                nothing = torch.empty(1, dtype=torch.uint8)
                group.recv([nothing], peer, _MAX_TAG - 1).wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue


class Packed:
    """A packed buffer ready to be filled: its header, and a view for each small tensor."""

    __slots__ = ("buffer", "header", "layout", "partial", "views")

    def __init__(self, layout: Layout, buffer: Tensor) -> None:
        self.layout, self.buffer = layout, buffer
        head = self.buffer[: layout.head]
        self.header = head.numpy() if head.device.type == "cpu" else np.empty(layout.head, np.uint8)
        self.header[0] = AGREED
        self.header[LINE:] = 1  # presence of gradients
        self.partial = False
        self.views = layout.views(self.buffer)
        self.stamp()

    def stamp(self) -> None:
        """Puts the header into the buffer, where it is not there already."""
        if self.buffer.device.type != "cpu":
            self.buffer[: self.layout.head].copy_(torch.from_numpy(self.header))


class Sent:
    """A message on its way: what must stay alive until its sends are complete."""

    __slots__ = ("kept", "packed", "works")

    def __init__(self, works: list[Any], packed: Packed | None, kept: Any) -> None:
        self.works, self.packed, self.kept = works, packed, kept

    def reuse(self) -> None:
        """Gives its buffer back."""
        if self.packed is not None:
            self.packed.layout.pool.append(self.packed)


class Agreement:
    """The specs that both ends of a boundary hold for each microbatch, and their layouts."""

    def __init__(self, m: int, alone: bool) -> None:
        self.specs: list[Spec | None] = [None] * m
        self._alone = alone
        self._known: dict[bytes, Spec] = {}
        self.forward: dict[Spec, Layout] = {}
        self.backward: dict[Spec, Layout] = {}

    def learn(self, mb: int, spec: Spec) -> Spec:
        """Makes `spec` the agreed one of this microbatch."""
        known = self._known.setdefault(spec.key, spec)
        if known is spec:
            self.forward[spec] = Layout(spec.tensors, LINE, self._alone)
            head = LINE + -(-len(spec.gradients) // LINE) * LINE
            self.backward[spec] = Layout(spec.gradients, head, self._alone)
        self.specs[mb] = known
        return known


BARE = Layout((), LINE, alone=False)


class _End:
    """What both ends of a boundary share.

    boundary: the stage before it, of n. peers: the rank on the other side, by microbatch of m.
    """

    def __init__(self, wire: Wire, boundary: int, n: int, m: int, peers: Mapping[int, int]) -> None:
        self.wire = wire
        self.peers = peers
        self.agreement = Agreement(m, alone=wire.memory == wire.device)
        self.forward_tags = [(mb * n + boundary) * 2 for mb in range(m)]
        self.backward_tags = [tag + 1 for tag in self.forward_tags]
        if m * n * 2 >= _MAX_TAG:
            raise RunError(f"{m} microbatches of {n} stages need more tags than there are")
        self.posted: list[Any] = [None] * m
        self.sent: list[Sent | None] = [None] * m

    def release(self, mb: int) -> None:
        """Waits for the send of this microbatch and frees what it held."""
        sent = self.sent[mb]
        assert sent is not None, f"nothing sent for microbatch {mb}"
        for work in sent.works:
            self.wire.wait(work)
        self.free(mb)

    def free(self, mb: int) -> None:
        """Frees what a send held that the receiver is known to have got."""
        sent = self.sent[mb]
        assert sent is not None, f"nothing sent for microbatch {mb}"
        self.sent[mb] = None
        sent.reuse()

    def _push(self, layout: Layout, tensors: Sequence[Tensor | None], mb: int, tag: int) -> Packed:
        """Sends tensors in a layout; an absent one leaves its place as it is."""
        wire, peer = self.wire, self.peers[mb]
        packed = layout.pool.pop() if layout.pool else Packed(layout, wire.empty(layout.nbytes))
        for view, tensor in zip(packed.views, tensors, strict=True):
            if view is not None and tensor is not None:
                view.copy_(tensor.detach())
        works = [wire.send([packed.buffer], peer, tag)]
        kept = None
        if layout.large:
            kept = [
                wire.empty(spec.nbytes) if tensor is None else tensor.detach().contiguous()
                for spec, view, tensor in zip(layout.tensors, packed.views, tensors, strict=True)
                if view is None
            ]
            works += [wire.send([tensor], peer, tag) for tensor in kept]
        self.sent[mb] = Sent(works, packed, kept)
        return packed

    def _post(self, layout: Layout, mb: int, tag: int) -> None:
        wire, peer = self.wire, self.peers[mb]
        buffer = wire.empty(layout.nbytes)
        works = [wire.recv([buffer], peer, tag)]
        large = [torch.empty(s.shape, dtype=s.dtype, device=wire.memory) for s in layout.large]
        works += [wire.recv([tensor], peer, tag) for tensor in large]
        self.posted[mb] = (layout, buffer, large, works)

    def _arrived(self, mb: int) -> tuple[Layout, Tensor, list[Tensor]]:
        layout, buffer, large, works = self.posted[mb]
        self.posted[mb] = None
        for work in works:
            self.wire.wait(work)
        return layout, buffer, large

    def _unpack(self, layout: Layout, buffer: Tensor, large: list[Tensor]) -> list[Tensor]:
        if not layout.large:
            tensors: list[Any] = layout.views(buffer)
        else:
            rest = iter(large)
            tensors = [next(rest) if v is None else v for v in layout.views(buffer)]
        if buffer.device != self.wire.device:
            tensors = [t.to(self.wire.device) for t in tensors]
        return tensors

    @property
    def quiet(self) -> bool:
        """True when nothing is posted and nothing is on its way."""
        m = len(self.posted)
        return self.posted.count(None) == m == self.sent.count(None)


class Downstream(_End):
    """A stage's boundary to the next stage: results leave, their gradients come back."""

    def send(self, mb: int, value: Any) -> None:
        """Sends the output of a microbatch."""
        structure, tensors = flatten(value, "the output")
        agreement = self.agreement
        spec = agreement.specs[mb]
        if spec is not None and spec.fits(structure, tensors):
            self._push(agreement.forward[spec], tensors, mb, self.forward_tags[mb])
        else:
            self._introduce(mb, spec, structure, tensors)

    def _introduce(self, mb: int, agreed: Spec | None, structure: Any, tensors: Any) -> None:
        wire, peer, tag = self.wire, self.peers[mb], self.forward_tags[mb]
        spec = self.agreement.learn(mb, Spec.of(structure, tensors))
        second = Layout(spec.tensors, -(-(LINE + len(spec.key)) // LINE) * LINE, alone=False)
        layout = self.agreement.forward[agreed] if agreed is not None else BARE
        first = Packed(layout, wire.empty(layout.nbytes))
        first.header[0] = CHANGED
        first.header[8:16].view("<u8")[0] = second.nbytes
        first.stamp()
        parts = [first.buffer, *(wire.empty(s.nbytes) for s in layout.large)]
        works = [wire.send([part], peer, tag) for part in parts]
        packed = Packed(second, torch.empty(second.nbytes, dtype=torch.uint8))
        packed.header[8:16].view("<u8")[0] = len(spec.key)
        packed.header[LINE : LINE + len(spec.key)] = list(spec.key)
        for view, tensor in zip(packed.views, tensors, strict=True):
            assert view is not None
            view.copy_(tensor.detach())
        works.append(wire.group.send([packed.buffer], peer, tag))
        self.sent[mb] = Sent(works, None, [*parts, packed.buffer])

    def post(self, mb: int) -> None:
        """Posts the receive of the output's gradients."""
        spec = self.agreement.specs[mb]
        assert spec is not None, f"microbatch {mb} awaits gradients of an output it never sent"
        self._post(self.agreement.backward[spec], mb, self.backward_tags[mb])

    def wait(self, mb: int) -> list[Tensor | None]:
        """The gradients of the output's tensors that require one; None where there is none."""
        layout, buffer, large = self._arrived(mb)
        tensors: list[Tensor | None] = [*self._unpack(layout, buffer, large)]
        header = self.wire.header(buffer)
        if header[0] == CHANGED:
            for i in range(len(tensors)):
                if not header[LINE + i]:
                    tensors[i] = None
        elif header[0] != AGREED:
            raise RunError(_foreign(self.peers[mb]))
        return tensors


class Upstream(_End):
    """A stage's boundary to the previous stage: inputs come in, their gradients go back."""

    def post(self, mb: int) -> None:
        """Posts the receive of a microbatch's input."""
        spec = self.agreement.specs[mb]
        layout = BARE if spec is None else self.agreement.forward[spec]
        self._post(layout, mb, self.forward_tags[mb])

    def wait(self, mb: int) -> tuple[Any, list[Tensor]]:
        """The input, fresh leaves where the sender's tensors require a gradient; those leaves."""
        layout, buffer, large = self._arrived(mb)
        header = self.wire.header(buffer)
        if header[0] == CHANGED:
            spec, tensors = self._learn(mb, header)
        elif header[0] == AGREED:
            known = self.agreement.specs[mb]
            assert known is not None
            spec, tensors = known, self._unpack(layout, buffer, large)
        else:
            raise RunError(_foreign(self.peers[mb]))
        if spec.single is not None:
            tensor = tensors[0]
            if spec.single.requires_grad:
                tensor.requires_grad_()
                return tensor, tensors
            return tensor, []
        leaves = [
            tensor.requires_grad_()
            for tensor, s in zip(tensors, spec.tensors, strict=True)
            if s.requires_grad
        ]
        return rebuild(spec.structure, tensors), leaves

    def _learn(self, mb: int, header: Any) -> tuple[Spec, list[Tensor]]:
        buffer = torch.empty(int(header[8:16].view("<u8")[0]), dtype=torch.uint8)
        self.wire.fetch([buffer], self.peers[mb], self.forward_tags[mb])
        raw = buffer.numpy()
        length = int(raw[8:16].view("<u8")[0])
        spec = self.agreement.learn(mb, Spec.read(raw[LINE : LINE + length].tobytes()))
        layout = Layout(spec.tensors, -(-(LINE + length) // LINE) * LINE, alone=False)
        return spec, self._unpack(layout, buffer, [])

    def send(self, mb: int, gradients: Sequence[Tensor | None]) -> None:
        """Sends the gradients of the input's leaves."""
        spec = self.agreement.specs[mb]
        assert spec is not None
        layout, tag = self.agreement.backward[spec], self.backward_tags[mb]
        absent = [gradient is None for gradient in gradients]
        if True in absent or (layout.pool and layout.pool[-1].partial):
            self._mark(layout, gradients)
        self._push(layout, gradients, mb, tag)

    def _mark(self, layout: Layout, gradients: Sequence[Tensor | None]) -> None:
        """Writes into the next buffer's header which gradients are there."""
        buffer = None if layout.pool else self.wire.empty(layout.nbytes)
        packed = layout.pool.pop() if buffer is None else Packed(layout, buffer)
        there = [gradient is not None for gradient in gradients]
        packed.partial = not all(there)
        packed.header[0] = CHANGED if packed.partial else AGREED
        packed.header[LINE : LINE + len(there)] = there
        packed.stamp()
        layout.pool.append(packed)


def _foreign(rank: int) -> str:
    return (
        f"a message of rank {rank} is not one of this pipeline's; "
        "does something else use the group?"
    )
