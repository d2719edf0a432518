"""Files of the user, read and written; where that fails, one sentence."""

from __future__ import annotations

from pathlib import Path

from hocket import limits
from hocket.errors import UsageError


def read(path: str | Path) -> bytes:
    """The content of a file. Raises: UsageError, also for a file that is too large."""
    try:
        if Path(path).is_file():
            limits.at_most(f"{path}: bytes", Path(path).stat().st_size, limits.FILE)
            return Path(path).read_bytes()
        with Path(path).open("rb") as stream:
            data = stream.read(limits.STREAM + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > limits.STREAM:
        raise UsageError(f"{path}: is no file, and has more than {limits.STREAM:,} bytes")
    return data


def read_text(path: str | Path) -> str:
    """The text of a file in UTF-8, with or without a mark of it. Raises: UsageError."""
    try:
        return read(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}:{line}: this is not UTF-8 text") from None


def write(path: str | Path, data: str | bytes) -> None:
    """Writes a file; text in UTF-8. Raises: UsageError."""
    try:
        Path(path).write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
