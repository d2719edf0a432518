"""Pictures on their way out: what a file's ending asks for, and writing text or bytes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hocket.errors import UsageError
from hocket.files import write

_PIXELS = ("png", "jpg", "jpeg", "gif", "webp")


def form_of(form: str | None, path: str | None, forms: Sequence[str]) -> str:
    """The form that was asked for, else what the file's ending says, else the first of them.

    Raises: UsageError where the ending is that of a picture of pixels.
    """
    ending = Path(path or "").suffix.lower()[1:]
    if form is None and ending in _PIXELS:
        raise UsageError(f"{path}: pictures are drawn as .svg or .pdf, not as .{ending}")
    return form or (ending if ending in forms else forms[0])


def put(data: str | bytes, path: str | None) -> None:
    """Writes to a file, or to standard output.

    Raises: UsageError where the file cannot be written, or bytes would go to a terminal.
    """
    if path is None:
        _print(data)
        return
    write(path, data)


def _print(data: str | bytes) -> None:
    if isinstance(data, str):
        print(data, end="")
        return
    if sys.stdout.isatty():
        raise UsageError("a PDF is no text for a terminal; give --output FILE.pdf")
    sys.stdout.buffer.write(data)
