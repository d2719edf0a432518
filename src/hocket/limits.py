"""How large what is asked for may be: asked before anything is built or read."""

from __future__ import annotations

from hocket.errors import UsageError

ACTIONS = 50_000_000  # of a schedule; one takes about 100 bytes while it is timed
RANKS = 1 << 20
STAGES = 1 << 20
SLICES = 1 << 16  # of a sequence
PLANNED = 4096  # ranks of a plan
PROCESSES = 1024  # that one machine starts
FILE = 512 * 2**20  # bytes of a file, also when it is unpacked; a trace takes three times as much
TEXT = 64 * 2**20  # bytes of a text that is read word by word: some 7 million actions
STREAM = 64_000_000  # bytes of a pipe or a device, which may never end


def at_most(what: str, count: int, most: int, advice: str = "") -> None:
    """Nothing. Raises: UsageError where there are more than there may be; advice: what to do."""
    if count > most:
        raise UsageError(
            f"{what}: {count:,} are more than hocket takes ({most:,})" + (advice and f"; {advice}")
        )


def check_schedule(name: str, p: int, stages: int, mbs: int, slices: int = 1) -> None:
    """Nothing. Raises: UsageError where a schedule would be too large to build.

    stages: of the model. mbs: microbatches, or sequences of so many slices.
    """
    for what, count, most in (
        ("ranks", p, RANKS), ("stages", stages, STAGES), ("slices of a sequence", slices, SLICES),
        ("actions, about", 3 * stages * mbs * slices, ACTIONS),
    ):  # fmt: skip
        at_most(f"{name}: {what}", count, most)
