"""What commands print and write."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hocket.errors import UsageError
from hocket.files import write


def put(data: str | bytes, path: str | None) -> None:
    """Writes to a file, or to standard output.

    Raises: UsageError where the file cannot be written, or bytes would go to a terminal.
    """
    if path is not None:
        write(path, data)
    elif isinstance(data, str):
        print(data, end="")
    elif sys.stdout.isatty():
        raise UsageError("refusing to write a PDF to a terminal; give --output FILE.pdf")
    else:
        sys.stdout.buffer.write(data)


def warn(text: str) -> None:
    """Prints a sentence to the standard error."""
    print(f"hocket: {text}", file=sys.stderr)


def check_writable(*paths: str | None) -> None:
    """Raises UsageError now, not after long work, where a file cannot be written."""
    for path in filter(None, paths):
        folder = Path(path).parent
        if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(path).is_dir():
            raise UsageError(f"{path}: cannot be written there")


def prepare() -> None:
    """Makes sure that printing cannot fail for want of a stream or of a character."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (lives as long as the process)
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def drop() -> None:
    """What is still in the buffer goes nowhere."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def put_notes(notes: Sequence[str], *, to_stderr: bool) -> None:
    """Prints notes; beside a file on the standard output they go to the other stream."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr if to_stderr else sys.stdout)
