"""Every error hocket raises for a user's mistake."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Code(StrEnum):
    """What is wrong, for programs: a code never changes its meaning. `meaning` is for people."""

    meaning: str

    def __new__(cls, code: str, meaning: str) -> Code:
        """A member with its meaning."""
        self = str.__new__(cls, code)
        self._value_, self.meaning = code, meaning
        return self

    SCHEDULE = "HK100", "A schedule or a placement that cannot exist."
    DEADLOCK = "HK101", "Actions wait for each other in a cycle, so the run never ends."
    BLOCKED_RECEIVE = "HK102", "A cycle of waits, where each RECV holds its queue until it is met."
    BLOCKED_SEND = "HK103", "A cycle of waits, where each SEND and RECV holds its rank until met."
    UNKNOWN_ACTION = "HK110", "The action's stage or microbatch does not exist."
    MISPLACED = "HK111", "The action is on a queue that does not hold its stage."
    DOUBLED = "HK112", "The action appears more than once."
    MISSING = "HK113", "An action is missing for some stage and microbatch."
    EXCLUSIVE = "HK114", "A full backward appears beside I or W of the same microbatch."
    MIXED_SLOT = "HK115", "A slot holds work and messages."
    OUT_OF_ORDER = "HK116", "The action is placed before one that it needs, on its own queue."
    UNUSED = "HK117", "A recomputation, offload or reload whose result no action needs."
    UNPAIRED = "HK120", "A SEND or RECV has no other side."
    UNCARRIED = "HK121", "A result is needed on another rank, and no message carries it."
    SWAPPED = "HK122", "Without tags, a receive would take another message than it means."
    TORCH = "HK150", "torch.distributed.pipelining would refuse the file, or run it differently."
    USAGE = "HK200", "Wrong use: an option or a setting that does not fit."
    TEXT = "HK300", "A file that cannot be read."
    COSTS = "HK400", "Costs that are missing, malformed, or do not fit the schedule."
    PLAN = "HK500", "No schedule satisfies the request."
    RUN = "HK600", "A step failed on some rank."


class Problem(NamedTuple):
    """One fault: where it is, one sentence that says what to do, and its code."""

    rank: int | None
    slot: int | None
    action: str
    text: str
    code: Code = Code.SCHEDULE

    def __str__(self) -> str:
        return self.text


class HocketError(Exception):
    """Base of all errors that are answered with a message and no traceback.

    `code` says what is wrong in general, `problems` lists every fault, each with its own code.
    """

    code = Code.USAGE

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.problems: tuple[Problem, ...] = (Problem(None, None, "", text, self.code),)


class ScheduleError(HocketError):
    """The schedule cannot run."""

    code = Code.SCHEDULE

    def __init__(self, problems: list[Problem] | tuple[Problem, ...] | str) -> None:
        if isinstance(problems, str):
            problems = (Problem(None, None, "", problems),)
        super().__init__("\n".join(p.text for p in problems))
        self.problems = tuple(problems)


class UsageError(HocketError):
    """A name, option or setting that hocket does not have or a schedule does not allow."""


MOST_FAULTS = 1000  # of one file; a file with more is no file of this kind


class TextError(HocketError):
    """A file that cannot be read; `faults` lists (line, sentence), the first thousand."""

    code = Code.TEXT

    def __init__(self, source: str, faults: list[tuple[int, str]]) -> None:
        if len(faults) > MOST_FAULTS:
            faults = [*faults[:MOST_FAULTS], (faults[MOST_FAULTS][0], "and more faults")]
        self.source, self.faults = source, tuple(faults)
        super().__init__("\n".join(f"{source}:{line}: {text}" for line, text in faults))


class CostError(HocketError):
    """Costs that are missing, malformed, or do not fit the schedule."""

    code = Code.COSTS


class PlanError(HocketError):
    """No schedule satisfies the request."""

    code = Code.PLAN


class RunError(HocketError):
    """A step failed on some rank; `rank` and `action` say where."""

    code = Code.RUN

    def __init__(self, text: str, *, rank: int | None = None, action: str = "") -> None:
        self.rank, self.action = rank, action
        super().__init__(text)
