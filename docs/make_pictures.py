"""Writes docs/img by the commands that stand in the pages: `python docs/make_pictures.py`.

Also gives translated pages the blocks of the page they translate, and holds what the tests read
pages with. A fenced block `console` holds commands after "$ " and what
they print; a block with a title is a file of that name, which the page's commands find in their
folder. A command with `--output NAME.svg` makes docs/img/NAME.svg.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hocket.cli import main as hocket

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "img"
TRANSLATED = {ROOT / "docs" / "zh" / "story.md": ROOT / "docs" / "story.md"}
PAGES = [
    ROOT / "README.md",
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if p not in TRANSLATED),
]
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)
_PICTURE = re.compile(r"--output (\S+\.svg)")


class Block(NamedTuple):
    """One fenced block: its language, its title ("" for none), what stands in it."""

    kind: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(*found) for found in _BLOCK.findall(page.read_text(encoding="utf-8"))]


def sessions(text: str) -> Iterator[tuple[str, str]]:
    """(command, what it prints) of a console block."""
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def write_files(page: Path, folder: Path) -> None:
    """Writes the titled blocks of a page into a folder."""
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")


def picture_commands(page: Path) -> dict[str, str]:
    """The command of each picture that a page makes, by the name of its file."""
    made = {}
    for block in blocks(page):
        for command, _ in sessions(block.text) if block.kind == "console" else ():
            if found := _PICTURE.search(command):
                made[found[1]] = command
    return made


def pictures() -> dict[str, str]:
    """Every picture of every page, by the name of its file."""
    made = {}
    for page in PAGES:
        with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
            write_files(page, Path(name))
            for file, command in picture_commands(page).items():
                with contextlib.redirect_stdout(io.StringIO()):
                    hocket(shlex.split(command)[1:])
                made[file] = Path(name, file).read_text(encoding="utf-8")
    return made


def translation(page: Path) -> str:
    """A translated page with the blocks of the page it translates, one for one."""
    text, own = (
        page.read_text(encoding="utf-8"),
        iter(_BLOCK.finditer(TRANSLATED[page].read_text())),
    )
    return _BLOCK.sub(lambda _: next(own)[0], text)


def main() -> None:
    """Writes the pictures and the blocks; with --check exits 1 if something would change."""
    os.environ["COLUMNS"] = "200"
    wanted = {IMAGES / name: text for name, text in pictures().items()}
    wanted |= {page: translation(page) for page in TRANSLATED}
    for path, text in wanted.items():
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not what it should be; run python docs/make_pictures.py")


if __name__ == "__main__":
    main()
