"""Tokens one after the other: the order of a forward, what stages keep, the choice of a token."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.errors import RunError
from hocket.ir import Action, Kind, Placement, Schedule
from hocket.runtime.slice_state import Carry


class Cache(Carry):
    """What a stage carries from token to token, by microbatch, such as keys and values."""

    def __init__(self, stage: int, m: int) -> None:
        super().__init__(stage, m, 1)
        self.kept: list[Any] = [None] * m

    def carried(self, mb: int) -> Any:
        """What the forward before left; None in the first."""
        return self.kept[mb]

    def keep(self, made: Any, mb: int) -> Any:
        """The output of a forward, of what it made."""
        output = super().keep(made, mb)
        self.kept[mb] = made[1]
        return output


def one_pass(schedule: Schedule, m: int) -> Schedule:
    """The forwards of so many microbatches on the first path, stage by stage.

    Raises: RunError where this path does not pass every rank.
    """
    path = schedule.placement.paths[0]
    away = {*range(schedule.p)} - {queue.rank for queue in path}
    if away:
        raise RunError(f"path 0 of {schedule.name} does not pass rank {min(away)}")
    placement = Placement((path,), (0,) * m)
    order: dict[Any, list[list[Action]]] = {queue: [] for queue in placement.queues}
    for stage, queue in enumerate(path):
        order[queue] += [[Action(Kind.F, stage, mb)] for mb in range(m)]
    return Schedule.from_order("generation", placement, order)


class Chooser:
    """Takes the next token of each sequence: the likeliest, or with a temperature a drawn one.

    end: the token after which a sequence only repeats it.
    """

    def __init__(self, rows: int, temperature: float, seed: int, end: int | None) -> None:
        self.temperature, self.end = temperature, end
        self.ended = torch.zeros(rows, dtype=torch.bool)
        self._generator = torch.Generator().manual_seed(seed)

    def choose(self, outputs: Sequence[Any], exchange: Callable[[bytes], list[bytes]]) -> Tensor:
        """The tokens, int64 `[sequence, 1]`, the same on all ranks; collective.

        outputs: of each microbatch, on the rank of the last stage.
        """
        own = [] if outputs[0] is None else self._chosen(outputs).tolist()
        every = [json.loads(raw) for raw in exchange(json.dumps(own).encode())]
        tokens = torch.tensor(next(said for said in every if said))
        if self.end is not None:
            tokens[self.ended] = self.end
            self.ended |= tokens == self.end
        return tokens.unsqueeze(1)

    def _chosen(self, outputs: Sequence[Tensor]) -> Tensor:
        if outputs[0].dim() != 3:
            raise RunError(
                f"the last stage gives {[*outputs[0].shape]}, but choosing a token takes scores, "
                "[sequence, position, token]"
            )
        scores = torch.cat([out[:, -1] for out in outputs]).double().cpu()
        if not self.temperature:
            return scores.argmax(-1)
        chances = (scores / self.temperature).softmax(-1)
        return torch.multinomial(chances, 1, generator=self._generator).squeeze(1)
