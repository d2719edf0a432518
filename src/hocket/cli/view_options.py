"""The options of `hocket view` and `hocket explain`, read from the command line."""

from __future__ import annotations

import argparse


def add_view_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `hocket view`; the schedule's own and --costs are the caller's."""
    parser.add_argument(
        "traces", nargs="*", metavar="TRACE",
        help="more traces of the same run, one a rank; SCHEDULE is the first of them then: "
        ".pftrace, .json or .gz, of hocket or torch.profiler (or a .csv of torch)",
    )  # fmt: skip
    parser.add_argument("--step", type=int, help="which step of the traces (default: the median)")
    _add_memory(parser, "drawn under the tiles")
    parser.add_argument(
        "--beside", metavar="SCHEDULE",
        help="a second schedule below the first: a name (same p and m), or a .sched file",
    )  # fmt: skip
    parser.add_argument(
        "--output", metavar="FILE.html", help="write one self-contained file and serve nothing"
    )
    parser.add_argument(
        "--port", type=int, default=0, help="port on 127.0.0.1 (default: a free one)"
    )
    parser.add_argument(
        "--no-open", action="store_true", help="print the address, but start no browser"
    )


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `hocket explain`; the schedule's own and --costs are the caller's."""
    _add_memory(parser, "that another schedule has to keep (default: what this one takes)")
    parser.add_argument(
        "--alone", action="store_true", help="do not try the other registered schedules"
    )


def _add_memory(parser: argparse.ArgumentParser, use: str) -> None:
    parser.add_argument(
        "--memory", type=float, metavar="LIMIT",
        help="bytes a rank has, in the unit of the costs (without bytes there: microbatches in "
        f"flight), {use}",
    )  # fmt: skip
