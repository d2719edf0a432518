"""The action words and CSV files of torch.distributed.pipelining, as plain data.

One line per rank, cells apart by commas: `2F0`, `3SEND_F1`, `0UNSHARD`, `(0F7;7B3)OVERLAP_F_B`; an
empty cell is a bubble.

Source: torch/distributed/pipelining/schedules.py (torch 2.13): `_Action`, `_load_csv`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hocket.errors import MOST_FAULTS, TextError
from hocket.ir import MAX_MICROBATCHES, MAX_STAGE, Action, Kind
from hocket.text import number_up_to

OVERLAP = "OVERLAP_F_B"
HOUSEKEEPING = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
_WORD = re.compile(r"(\d+)([A-Z][A-Z_]*?)(\d*)", re.ASCII)
# What torch itself looks for; it takes the beginning of a cell that fits.
_TORCH = re.compile(r"(\d+)(F|I|B|W|UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)(\d*)")
_EXPECTED = "expected an action such as 2F0, 3SEND_F1, 0UNSHARD or (0F7;7B3)OVERLAP_F_B"


class Item(NamedTuple):
    """One thing that torch's runtime does; an OVERLAP_F_B has `parts` and neither stage nor mb."""

    type: str
    stage: int | None = None
    mb: int | None = None
    parts: tuple[Item, ...] = ()

    def __str__(self) -> str:
        if self.parts or self.type == OVERLAP:
            return f"({';'.join(map(str, self.parts))}){self.type}"
        return f"{self.stage}{self.type}{'' if self.mb is None else self.mb}"

    @property
    def leaves(self) -> tuple[Item, ...]:
        """Itself, or its parts."""
        return self.parts or (self,)

    @property
    def actions(self) -> tuple[Action, ...]:
        """What of it is an action of a schedule; nothing for UNSHARD and the like."""
        return tuple(
            Action(Kind[x.type], x.stage, x.mb)
            for x in self.leaves
            if x.type in Kind.__members__ and x.stage is not None and x.mb is not None
        )

    @property
    def is_message(self) -> bool:
        """True for SEND and RECV."""
        return self.type in Kind.__members__ and Kind[self.type].is_communication

    @property
    def is_compute(self) -> bool:
        """True for F, B, I, W and OVERLAP_F_B."""
        return self.type == OVERLAP or (self.type in Kind.__members__ and not self.is_message)


def item_of(action: Action) -> Item:
    """An action in torch's words."""
    return Item(action.kind.name, action.stage, action.mb)


class Cell(NamedTuple):
    """A word in its place: `column` counts the cells of a line from 0, bubbles too."""

    column: int
    item: Item


@dataclass(frozen=True)
class TorchFile:
    """What a CSV says. `rows[rank]` are its cells without bubbles; `bubbles[rank]` counts those.

    `unknown`: words of types that hocket does not know, with how often they appear.
    """

    source: str
    rows: tuple[tuple[Cell, ...], ...]
    bubbles: tuple[int, ...]
    unknown: dict[str, int]

    @property
    def items(self) -> list[list[Item]]:
        """The cells without their places, `[rank][...]`."""
        return [[cell.item for cell in row] for row in self.rows]

    @property
    def has_messages(self) -> bool:
        """True when SEND and RECV stand in it: torch's "compute_comms", else "compute_only"."""
        return any(cell.item.is_message for row in self.rows for cell in row)

    def cells(self) -> Iterator[tuple[int, Cell]]:
        """Every (rank, cell)."""
        return ((rank, cell) for rank, row in enumerate(self.rows) for cell in row)


def dump_rows(rows: Iterable[Iterable[Item | None]]) -> str:
    """Rows as the text of a CSV; None is a bubble."""
    return "".join(
        ",".join("" if item is None else str(item) for item in row) + "\n" for row in rows
    )


def read_rows(text: str, source: str = "<csv>") -> TorchFile:
    """The rows of a CSV; words of unknown types are kept and counted.

    Raises: TextError with every cell that is no word at all.
    """
    faults: list[tuple[int, str]] = []
    rows, bubbles = [], []
    unknown: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if len(faults) > MOST_FAULTS:
            break
        cells, empty = [], 0
        for column, raw in enumerate(line.split(",") if line.strip() else ()):
            word = raw.strip().strip('"')
            found = read_word(word) if word else None
            if not word:
                empty += 1
            elif isinstance(found, str):
                faults.append((number, f"cell {column}: {found}"))
            elif found is not None:
                cells.append(Cell(column, found))
                for leaf in found.leaves:
                    if leaf.type not in Kind.__members__ and leaf.type not in HOUSEKEEPING:
                        unknown[leaf.type] = unknown.get(leaf.type, 0) + 1
        rows.append(tuple(cells))
        bubbles.append(empty)
    if not any(rows) and not faults:
        faults.append((1, f"there are no actions; {_EXPECTED}"))
    if faults:
        raise TextError(source, faults)
    return TorchFile(source, tuple(rows), tuple(bubbles), unknown)


def read_word(word: str) -> Item | str:
    """The item that a word stands for, or a sentence that says what is wrong with it."""
    if word.startswith("("):
        return _compound(word)
    match = _WORD.fullmatch(word)
    if not match:
        return f"{_EXPECTED}, found {_short(word)}{_as_torch(word)}"
    stage, kind, mb = number_up_to(match[1], MAX_STAGE), match[2], None
    if stage is None:
        return f"the stage of {_short(word)} is above the largest, {MAX_STAGE}"
    if match[3]:
        mb = number_up_to(match[3], MAX_MICROBATCHES - 1)
        if mb is None:
            return f"the microbatch of {_short(word)} is above the largest, {MAX_MICROBATCHES - 1}"
    elif kind in Kind.__members__:
        return f"{_short(word)} names no microbatch; {_EXPECTED}"
    return Item(kind, stage, mb)


def _compound(word: str) -> Item | str:
    inside, bracket, kind = word[1:].partition(")")
    if not bracket or kind != OVERLAP:
        more = f"; torch takes it, and fails when it runs {_short(word)}" if bracket else ""
        return f"{_EXPECTED}, found {_short(word)}{more}"
    parts = [read_word(part.strip()) for part in inside.split(";") if part.strip()]
    wrong = next((part for part in parts if isinstance(part, str)), None)
    if wrong is not None:
        return wrong
    found = tuple(part for part in parts if isinstance(part, Item))
    if not found or any(part.parts for part in found):
        return f"{_short(word)} has no parts; {_EXPECTED}"
    return Item(OVERLAP, parts=found)


def _short(word: str) -> str:
    return repr(word if len(word) <= 60 else f"{word[:60]}...")


def _as_torch(word: str) -> str:
    """What torch makes of a word that is none, where it makes something of it."""
    match = _TORCH.match(word)
    return f"; torch reads it as {match[0]} without a word" if match else ""


def torch_reads(item: Item) -> str | None:
    """What torch 2.13 makes of a word of an unknown type; None where it refuses the file."""
    match = _TORCH.match(str(item))
    return match[0] if match else None


def slots_of(row: Sequence[Item]) -> list[tuple[Action, ...]]:
    """The slots of one rank: every item with actions."""
    return [item.actions for item in row if item.actions]
