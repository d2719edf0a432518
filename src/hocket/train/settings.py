"""What a run trains and how, as plain data. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hocket.errors import UsageError

if TYPE_CHECKING:
    from hocket.ir import Schedule

DEMO = "hocket.demo.gpt:build"
MOE = "hocket.demo.moe:build"
SLEEP = "hocket.demo.sleep:build"
HF = "hocket.demo.huggingface:build"
DISPATCH = ("receive", "gate", "ready", "queues")


class Order(NamedTuple):
    """A built schedule, and the word that it was asked for by."""

    word: str
    schedule: Schedule


class Saving(NamedTuple):
    """Where a run's checkpoints are, after how many steps there is one, whether one is read."""

    folder: str
    every: int
    resume: bool

    def check(self) -> None:
        """Makes the folder.

        Raises: UsageError for such a number, a folder that cannot be, or one of another run.
        """
        if self.every < 1:
            raise UsageError(f"--every is {self.every}; it must be 1 or more")
        try:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--save {self.folder}: {error.strerror}") from None
        if not self.resume and any(Path(self.folder).glob("step-*")):
            raise UsageError(
                f"{self.folder} holds checkpoints already; go on from them with --resume, or give "
                "another folder"
            )


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
    saving: Saving | None = None

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
