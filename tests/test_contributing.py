"""CONTRIBUTING's map has every room in the order of the layers, and its paths exist."""

import re
from itertools import pairwise
from pathlib import Path

import hocket
from test_structure import LAYERS

ROOT = Path(__file__).parent.parent
SRC = Path(hocket.__file__).parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def _rows():
    table = TEXT.partition("## The map")[2].partition("## A walk")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.M)
    return [re.findall(r"`(\w+)/?`", cell) for cell in cells]


def test_the_map_has_every_room():
    assert {name for row in _rows() for name in row} == set(LAYERS) - {"__init__", "__main__"}


def test_rooms_lie_below_the_rows_that_come_after_them():
    levels = [[LAYERS.index(name) for name in row] for row in _rows()]
    for row, later in pairwise(levels):
        assert max(row) < min(later), (row, later)


def test_every_path_in_the_text_exists():
    for path in re.findall(r"`([\w./-]+\.(?:py|md))`|\]\(([\w./-]+)\)", TEXT):
        name = "".join(path)
        assert any((folder / name).exists() for folder in (ROOT, SRC)), name
    for room in re.findall(r"`(\w+/)`", TEXT):
        assert (SRC / room).is_dir() or (ROOT / room).is_dir(), room
