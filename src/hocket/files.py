"""Files of the user, read and written; where that fails, one sentence."""

from __future__ import annotations

import gzip
import zlib
from io import BytesIO
from pathlib import Path
from typing import IO

from hocket import limits
from hocket.errors import UsageError

_CHUNK = 2**20


def read(path: str | Path, most: int = limits.FILE) -> bytes:
    """The content of a file of at most so many bytes. Raises: UsageError."""
    try:
        is_file = Path(path).is_file()  # else a pipe or a device, which may never end
        if is_file:
            limits.at_most(f"{path}: bytes", Path(path).stat().st_size, most)
        most = most if is_file else min(most, limits.STREAM)
        with Path(path).open("rb") as file:
            data = _up_to(file, most + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > most:
        how = "" if is_file else "is no file, and "
        raise UsageError(f"{path}: {how}has more than {most:,} bytes")
    return data


def unpacked(data: bytes, path: str | Path, most: int = limits.FILE) -> bytes:
    """The content of a file that may be compressed with gzip. Raises: UsageError."""
    if data[:2] != b"\x1f\x8b":
        return data
    try:
        with gzip.GzipFile(fileobj=BytesIO(data)) as file:
            content = _up_to(file, most + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise UsageError(f"{path}: cannot be unpacked: {error}") from None
    if len(content) > most:
        raise UsageError(f"{path}: it unpacks to more bytes than hocket takes ({most:,})")
    return content


def _up_to(file: IO[bytes] | gzip.GzipFile, most: int) -> bytes:
    """The first bytes of a file, in memory for what is there."""
    parts: list[bytes] = []
    while most > 0 and (part := file.read(min(most, _CHUNK))):
        parts.append(part)
        most -= len(part)
    return b"".join(parts)


def read_text(path: str | Path, most: int = limits.TEXT) -> str:
    """The text of a file in UTF-8, with or without a mark of it. Raises: UsageError."""
    try:
        return read(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}:{line}: this is not UTF-8 text") from None


def write(path: str | Path, data: str | bytes) -> None:
    """Writes a file; text in UTF-8. Raises: UsageError."""
    try:
        Path(path).write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
