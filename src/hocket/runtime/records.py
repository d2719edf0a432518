"""What a stage or a loss records while a microbatch is under way: metrics, and losses beside it."""

from __future__ import annotations

import threading

from torch import Tensor

HERE = threading.local()  # .records: where a thread records while a forward or a loss runs in it

Record = tuple[str, Tensor | float, float]  # name, value, weight in the loss


def record(name: str, value: Tensor | float, *, weight: float = 0.0) -> None:
    """Records one number of the microbatch that is under way, in `Pipeline.metrics` after the step.

    Call it in the forward of a stage, on any rank, or in the loss. Values of one name and one
    microbatch add up. With a weight, that many times the value is added to the microbatch's loss
    and trained with it: an auxiliary loss. Outside a pipeline nothing is recorded.
    """
    records = getattr(HERE, "records", None)
    if records is not None:
        records.append((name, value, weight))
