"""An action as one integer: kind in 6 bits, stage in 20, microbatch in 31."""

from __future__ import annotations

from typing import Any

_STAGE_SHIFT, _MB_SHIFT, _END_SHIFT = 6, 26, 57
MAX_KIND, _STAGE_MASK = (1 << 6) - 1, (1 << 20) - 1
UNUSED_BITS = -1 << _END_SHIFT  # no code has one of them
MAX_STAGE = _STAGE_MASK
MAX_MB = (1 << (_END_SHIFT - _MB_SHIFT)) - 1


def encode(kind: Any, stage: Any, mb: Any) -> Any:
    """The code of an action; scalars or arrays.

    Stages from 0 to MAX_STAGE and microbatches from 0 to MAX_MB have a code of their own. Others
    are not refused here, so that a neighbour which does not exist can be looked up.
    """
    return (mb << _MB_SHIFT) | (stage << _STAGE_SHIFT) | kind


def kinds_of(codes: Any) -> Any:
    """The kind of each code."""
    return codes & MAX_KIND


def stages_of(codes: Any) -> Any:
    """The stage of each code."""
    return (codes >> _STAGE_SHIFT) & _STAGE_MASK


def mbs_of(codes: Any) -> Any:
    """The microbatch of each code."""
    return codes >> _MB_SHIFT
