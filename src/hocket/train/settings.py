"""What a run trains and how, as plain data. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hocket.ir import Schedule

DEMO = "hocket.demo.gpt:build"
MOE = "hocket.demo.moe:build"
SLEEP = "hocket.demo.sleep:build"
DISPATCH = ("receive", "gate", "ready", "queues")


class Order(NamedTuple):
    """A built schedule, and the word that it was asked for by."""

    word: str
    schedule: Schedule


@dataclass(frozen=True)
class Settings:
    """What to train and how, as given; `schedule` is built already.

    orders: the schedule and those beside it, no two by the same word.
    """

    schedule: Schedule
    orders: tuple[Order, ...]
    nproc: int
    steps: int
    batch: int
    model: str
    model_options: dict[str, Any]
    data: str | None
    lr: float
    seed: int
    dispatch: str | None
    verify: bool
    timeout: float
    device: str
    trace: str | None = None
    costs: str | None = None

    @property
    def replicas(self) -> int:
        """How many times the ranks of the schedule run side by side."""
        return self.nproc // self.schedule.p

    @property
    def sequences(self) -> int:
        """What -m says: microbatches, before their sequences are cut into slices."""
        return sequences(self.schedule)


def sequences(schedule: Schedule) -> int:
    """Microbatches, before their sequences are cut into slices."""
    return schedule.placement.m // schedule.placement.slices
