"""Every error hocket raises for a user's mistake."""

from __future__ import annotations

from typing import NamedTuple


class HocketError(Exception):
    """Base of all errors that are answered with a message and no traceback."""


class Problem(NamedTuple):
    """One fault of a schedule: where it is, and one sentence that says what to do."""

    rank: int | None
    slot: int | None
    action: str
    text: str

    def __str__(self) -> str:
        return self.text


class ScheduleError(HocketError):
    """The schedule cannot run; `problems` lists every fault found."""

    def __init__(self, problems: list[Problem] | tuple[Problem, ...] | str) -> None:
        if isinstance(problems, str):
            problems = (Problem(None, None, "", problems),)
        self.problems = tuple(problems)
        super().__init__("\n".join(p.text for p in self.problems))


class UsageError(HocketError):
    """A name, option or setting that hocket does not have or a schedule does not allow."""


class TextError(HocketError):
    """A file that cannot be read; `faults` lists (line, sentence)."""

    def __init__(self, source: str, faults: list[tuple[int, str]]) -> None:
        self.source, self.faults = source, tuple(faults)
        super().__init__("\n".join(f"{source}:{line}: {text}" for line, text in faults))


class CostError(HocketError):
    """Costs that are missing, malformed, or do not fit the schedule."""


class PlanError(HocketError):
    """No schedule satisfies the request."""


class RunError(HocketError):
    """A step failed on some rank; `rank` and `action` say where."""

    def __init__(self, text: str, *, rank: int | None = None, action: str = "") -> None:
        self.rank, self.action = rank, action
        super().__init__(text)
