"""The options of `hocket plan`, read from the command line. No numpy here."""

from __future__ import annotations

import argparse
from typing import Any

from hocket.errors import UsageError

OBJECTIVES = ("makespan", "span", "period")
SHAPES = ("linear", "looped", "v", "wave", "mirrored")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `hocket plan`; -p, -m, -v, --costs and --json are the caller's.

    -p and -v are taken as numbers, or as text such as 4,8 where the caller leaves them text.
    """
    add = parser.add_argument_group("limits").add_argument
    add(
        "--memory",
        metavar="LIMIT",
        help="bytes of each rank: 80e9, or one a rank: 80e9,40e9",
    )
    add(
        "--in-flight",
        metavar="N",
        help="microbatches in flight: 4, or one a rank: 4,3,2,1",
    )
    add = parser.add_argument_group("what may vary").add_argument
    add(
        "--shapes",
        metavar="LIST",
        help=f"placements to try, of {', '.join(SHAPES)} (default: linear,looped,v,wave)",
    )
    add("--copies", type=int, metavar="N", help="most copies of weights (default: 1)")
    add("--slices", type=int, metavar="N", help="most slices of a sequence (default: 1)")
    add(
        "--backward",
        choices=("split", "whole", "either"),
        default="either",
        help="I and W apart, together, or whichever is better (default)",
    )
    add(
        "--recompute",
        default="",
        metavar="LIST",
        help="what stages may compute again: full, selective=TIME/BYTES (default: nothing)",
    )
    add(
        "--buffers",
        choices=("none", "in-flight", "each"),
        default="none",
        help="receive buffers beside the activations: of each in flight, or each of the step",
    )
    add("--layers", metavar="FILE", help="costs of each layer (TOML): the cut is chosen too")
    add = parser.add_argument_group("the search").add_argument
    add(
        "--objective",
        choices=OBJECTIVES,
        default="makespan",
        help="makespan: barrier after a step (default); span: steps overlap; period: step to step",
    )
    add("--margin", type=float, metavar="X", help="of orders within this share of the best "
        "the simplest (default: 0; 0.03 where ranks share cores)")  # fmt: skip
    add("--time", type=float, metavar="S", help="seconds to search (default: 20; a curve: 300)")
    add("--patience", type=float, metavar="S", help="seconds without a better order that end it")
    add("--rounds", type=int, default=1000, metavar="N", help="most rounds of search")
    add("--threads", type=int, metavar="N", help="threads that search (default: one a core)")
    add("--seed", type=int, default=0, help="of the search (default: 0)")
    add("--no-search", action="store_true", help="only named schedules and list scheduling")
    add("--no-named", action="store_true", help="leave the registered schedules out")
    add("--solver", action="store_true", help="prove it with OR-tools where it is small enough")
    add("--solver-time", type=float, metavar="S", help="seconds more for that (default: 60)")
    add = parser.add_argument_group("what is shown").add_argument
    add("--output", metavar="FILE", help="write the schedule (.sched)")
    add("--stage-costs", metavar="FILE", help="write the costs of its stages (TOML), with which "
        "simulate, show, view and run know its times")  # fmt: skip
    add("--curve", metavar="LIMITS", help="the time under each limit: in-flight=4-8, "
        "in-flight=4,5.5,8 or memory=40e9-80e9")  # fmt: skip
    add("--points", type=int, default=9, metavar="N", help="limits of a curve from-to (default: 9)")
    add("--sensitivity", action="store_true", help="what faster links, memory, microbatches give")
    add("--jitter", type=float, metavar="X", help="prefer the order whose makespan is best when "
        "work varies by this share (0.05: 5 %%)")  # fmt: skip


def numbers(text: str | int | None, what: str, kind: type = float) -> tuple[Any, ...] | None:
    """`4`, `4,3,2,1` or `2-4` as numbers; None as None.

    Raises: UsageError.
    """
    if text is None:
        return None
    out: list[Any] = []
    for part in str(text).split(","):
        first, dash, last = part.partition("-")
        try:
            if dash and kind is int:
                values = range(int(first), int(last) + 1)
                if not values:
                    raise UsageError(f"{what}: {part} has no numbers; give the smaller one first")
                out += values
            else:
                out.append(_number(part, kind))
        except (ValueError, OverflowError):
            raise UsageError(f"{what}: expected 4 or 4,3,2,1 or alike, found {text!r}") from None
    return tuple(out)


def _number(text: str, kind: type) -> Any:
    if kind is int:
        return int(text)
    value = float(text)
    return int(value) if value == int(value) else value


def one_or_all(values: tuple[Any, ...] | None) -> Any:
    """One number for a list of one."""
    return values[0] if values is not None and len(values) == 1 else values
