"""Text as batches of bytes: the documentation that every Python carries, or a file."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hocket.errors import UsageError
from hocket.files import read


@cache
def text(path: str | None = None) -> Tensor:
    """The bytes of a file, or of Python's documentation topics, as uint8 `[byte]`.

    Raises: UsageError for a file that cannot be read.
    """
    if path is None:
        from pydoc_data.topics import topics

        raw = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        raw = read(path)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def windows(source: Tensor, step: int, size: int, seq: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 `[sequence, position]` both: pieces of a text, and what follows.

    Raises: UsageError for a text shorter than one sequence.
    """
    if len(source) <= seq:
        raise UsageError(f"the text has {len(source)} tokens; --seq {seq} needs {seq + 1} or more")
    picks = torch.Generator().manual_seed((seed << 32) + step)
    starts = torch.randint(len(source) - seq, (size, 1), generator=picks)
    pieces = source[starts + torch.arange(seq + 1)].long()
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def batch(
    step: int, size: int, *, seq: int = 128, seed: int = 0, data: str | None = None
) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one step, int64 `[sequence, position]` both: each byte, the next byte.

    The same step, size, seq and seed always give the same batch.
    Raises: UsageError for a text shorter than one sequence.
    """
    return windows(text(data), step, size, seq, seed)
