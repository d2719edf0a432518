"""Activations that D moves to the host and U brings back: what autograd saved, by storage.

On the CPU they go to a temporary file, which has no name and is gone with the process. On CUDA they
go to pinned memory, on the stream of the queue that D and U stand on; that is UNTESTED.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from io import BufferedRandom
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hocket.errors import RunError

DEVICES = ("cpu", "cuda")


class _Away:
    """The memory of some saved tensors: there until D, away until U."""

    def __init__(self, storage: UntypedStorage) -> None:
        self.size, self.device = storage.nbytes(), storage.device
        self.here: UntypedStorage | None = storage
        self.pinned: Tensor | None = None

    def bytes(self) -> Tensor:
        """All of it as one tensor of bytes."""
        assert self.here is not None
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.here)


class _Saved(NamedTuple):
    """One saved tensor: its place in the memory."""

    away: _Away
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Moved:
    """One microbatch of one stage between its F and its backward.

    kept: tensors whose memory stays, such as parameters and the stage's input. what: the forward,
    in errors.
    """

    def __init__(self, what: str, kept: Iterable[Tensor]) -> None:
        self.what = what
        plain = (t for t in kept if not is_traceable_wrapper_subclass(t))
        self.kept = {t.untyped_storage().data_ptr() for t in plain}
        self.aways: dict[int, _Away] = {}
        self._versions: list[tuple[Tensor, int]] = []
        self._file: BufferedRandom | None = None

    @contextmanager
    def keeping(self) -> Generator[None]:
        """Around F: what it saves for the backward can be moved.

        Raises: RunError for a tensor that cannot be moved.
        """
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def clear(self) -> None:
        """Forgets what was saved, for a forward that starts again."""
        self.aways.clear()
        self._versions.clear()

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        own = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if own or not tensor.numel():
            return tensor
        plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if not plain or tensor.is_conj() or tensor.is_neg() or tensor.device.type not in DEVICES:
            raise RunError(
                f"{self.what} saves a {type(tensor).__name__} ({tensor.layout}) on "
                f"{tensor.device} for its backward, and D moves plain tensors on cpu and cuda "
                "only; leave D, A and U out of the order for this stage"
            )
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.kept:
            return tensor
        away = self.aways.setdefault(storage.data_ptr(), _Away(storage))
        self._versions.append((tensor.detach(), tensor._version))
        return _Saved(
            away, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )

    def out(self) -> None:
        """D: moves everything that was saved.

        Raises: RunError where the forward wrote into something that it had saved before, and where
        the host has no room.
        """
        if any(tensor._version != version for tensor, version in self._versions):
            raise RunError(
                f"{self.what} wrote into a tensor after it was saved for the backward; write into "
                "a copy there (clone it first)"
            )
        self._versions.clear()
        for away in self.aways.values():
            if away.device.type == "cuda":
                there = away.bytes()
                away.pinned = torch.empty(away.size, dtype=torch.uint8, pin_memory=True)
                away.pinned.copy_(there, non_blocking=True)
                there.record_stream(torch.cuda.current_stream())
            else:
                self._write(away)
            away.here = None

    def _write(self, away: _Away) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 (open from D to U)
                weakref.finalize(self, self._file.close)
            self._file.write(away.bytes().numpy().data)
        except OSError as error:
            raise RunError(
                f"{self.what}: its activations cannot be written to {tempfile.gettempdir()} "
                f"({error.strerror}); make room there, or set TMPDIR to a folder that has some"
            ) from None

    def back(self) -> None:
        """U: brings everything back, to memory of its own."""
        if self._file is not None:
            self._file.seek(0)
        for away in self.aways.values():
            away.here = UntypedStorage(away.size, device=away.device)
            if away.pinned is not None:
                away.bytes().copy_(away.pinned, non_blocking=True)
                away.pinned = None
            else:
                self._read(away)
        if self._file is not None:
            self._file.close()

    def _read(self, away: _Away) -> None:
        assert self._file is not None
        if self._file.readinto(away.bytes().numpy().data) != away.size:
            raise RunError(f"{self.what}: its file in {tempfile.gettempdir()} was cut short")

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        away, dtype, shape, stride, offset = saved
        assert away.here is not None, f"{self.what} was not reloaded before its backward"
        tensor = torch.empty(0, dtype=dtype, device=away.device)
        tensor.set_(away.here, offset, shape, stride)
        if away.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream())
        return tensor
