"""Checkpoints of a training run: when one is written, and where a run goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hocket.errors import UsageError
from hocket.runtime import Checkpoints
from hocket.train.settings import Saving, Settings
from hocket.train.training import Trainer


class Data(NamedTuple):
    """What decides the batches of a run; a checkpoint keeps it, and `say` hears of what differs."""

    settings: Settings
    say: Callable[[str], Any]

    def state_dict(self) -> dict[str, Any]:
        """The options by their names."""
        s = self.settings
        rows = s.batch * s.replicas
        return {"--model": s.model, "--data": s.data, "--seed": s.seed, "rows per step": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Reports each option that was another one when the checkpoint was written."""
        for name, value in self.state_dict().items():
            if value != state[name]:
                self.say(f"the checkpoint is of a run with {name} {state[name]}, not {value}")


class Saver:
    """Saves a trainer after every so many steps, and after the last one.

    say: called on the first rank with what there is to know of the checkpoints.
    """

    def __init__(self, saving: Saving, trainer: Trainer, say: Callable[[str], Any]) -> None:
        self.every, self.trainer = saving.every, trainer
        self.checkpoints = Checkpoints(saving.folder, report=say)
        quiet = trainer.rank > 0
        self.data = Data(trainer.settings, (lambda _: None) if quiet else say)
        self.path: str | None = None  # of the last one that was written or read
        self.start = self._resumed(say) if saving.resume else 0

    def _resumed(self, say: Callable[[str], Any]) -> int:
        """The number of steps that are done already."""
        trainer = self.trainer
        path = self.checkpoints.load(trainer.pipeline, trainer.optimizer, data=self.data)
        done, steps = trainer.pipeline.steps_done, trainer.settings.steps
        if path is not None and done >= steps:
            raise UsageError(f"{path} has {done} steps already; give --steps more than {done}")
        what = (
            f"{self.checkpoints.folder} has no checkpoint" if path is None else f"{path} is loaded"
        )
        if trainer.rank == 0:
            say(f"{what}; the run begins with step {done + 1}")
        self.path = None if path is None else str(path)
        return done

    def after(self, done: int) -> None:
        """Saves, if it is time to after this number of steps."""
        trainer = self.trainer
        if done % self.every == 0 or done == trainer.settings.steps:
            path = self.checkpoints.save(trainer.pipeline, trainer.optimizer, data=self.data)
            self.path = str(path)
