"""What several tests share: the recorded orders, the two cost sets, small helpers."""

import ast
import json
from functools import cache
from pathlib import Path

from hocket.costs import Bytes, Costs
from hocket.ir import Placement, Queue, Schedule
from hocket.text import loads

DATA = Path(__file__).parent / "data"
COSTS = {
    "unit": Costs(F=1, I=1, W=1, FB=3),
    "skew": Costs(F=10, I=12, W=7, B=19, FB=25, latency=3),
}
SEED_COSTS = Costs(
    F=(80, 92, 76, 84), I=(80, 92, 76, 84), W=(40, 46, 38, 42), FB="max", p2p_overhead=(10, 10),
    unit="us",
    bytes=Bytes(
        static=(512.0, 563.2, 460.8, 537.6),
        activation=(256.0, 281.6, 230.4, 268.8),
        gradient=(128.0, 140.8, 115.2, 134.4),
    ),
)  # fmt: skip


@cache
def tree(path):
    """The syntax tree of a source file, parsed once for all tests of a process."""
    return ast.parse(path.read_text(encoding="utf-8"))


def records():
    """Published orders as their authors' code emits them, with makespans and peaks."""
    with (DATA / "orders.jsonl").open() as lines:
        return [json.loads(line) for line in lines]


def placement_of(record):
    paths = tuple(tuple(Queue(r) for r in path) for path in record["paths"])
    return Placement(paths, tuple(record["path_of"]))


def order_of(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, schedule.line(q))) for q in schedule.queues]


def written(name: str, paths: list[str], *lines: str) -> Schedule:
    """A schedule written by hand: paths such as "0 1 | 0-3", one line per queue."""
    head = ["# hocket 1", f"name {name}", *(f"path {k}: {p}" for k, p in enumerate(paths))]
    return loads("\n".join([*head, *lines]))
