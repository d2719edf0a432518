"""The options of export, import and the check for other tools, for the command line."""

from __future__ import annotations

import argparse

TARGETS = ("torch-csv", "megatron")


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `hocket export`; the schedule's own are the caller's."""
    parser.add_argument(
        "--to", choices=TARGETS, required=True, help="what to write: torch-csv or megatron"
    )
    parser.add_argument("--output", metavar="FILE", help="write to this file")
    group = parser.add_argument_group("torch-csv")
    group.add_argument(
        "--comms", action="store_true", help="write the messages too (torch's compute_comms)"
    )
    group.add_argument(
        "--padded",
        action="store_true",
        help="with empty cells, for PipelineScheduleMulti, which goes by columns",
    )
    group.add_argument(
        "--receives",
        choices=("early", "late"),
        default="early",
        help="where receives stand: as early as they can, or at their consumers (needs --comms)",
    )
    group.add_argument(
        "--overlap",
        action="store_true",
        help="write a forward and a backward of one slot as OVERLAP_F_B",
    )
    group.add_argument(
        "--unshard", action="store_true", help="write UNSHARD and RESHARD for FSDP (needs --comms)"
    )
    other = parser.add_argument_group("megatron")
    other.add_argument("--layout", help="what each stage holds, such as 'Et*3|(tt|)*6tL'")
    other.add_argument("--layers", type=int, help="transformer layers, spread over the stages")
    _add_weights(other)


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `hocket import`."""
    parser.add_argument(
        "files", nargs="*", metavar="FILE",
        help="a CSV of torch; or traces: of torch.profiler one a rank (.json, .gz), or a picture "
        "of a schedule (.json, .pftrace)",
    )  # fmt: skip
    parser.add_argument("--output", metavar="FILE", help="write the schedule (.sched)")
    parser.add_argument("--costs", metavar="FILE", help="write the costs that were read (.toml)")
    parser.add_argument("--trace", metavar="FILE", help="write what was measured as a trace")
    parser.add_argument("--name", help="the schedule's name (default: the file's)")
    parser.add_argument("--step", type=int, help="which step of a trace (default: the median one)")
    parser.add_argument("--why", action="store_true", help="tell the reason of every idle gap")
    group = parser.add_argument_group("a layout of Megatron-LM, in place of files")
    group.add_argument("--layout", help="such as 'Et*3|(tt|)*29,m|L'")
    group.add_argument("-p", type=int, help="pipeline ranks")
    group.add_argument("-m", type=int, help="microbatches")
    group.add_argument(
        "--group", type=int, help="microbatch group size per virtual stage (default: p)"
    )
    _add_weights(group)


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds to `hocket check` what checks for other tools need."""
    group = parser.add_argument_group("for other tools")
    group.add_argument(
        "--for", dest="foreign", choices=("torch",),
        help="also find what torch.distributed.pipelining would get wrong; SCHEDULE may be a CSV",
    )  # fmt: skip
    group.add_argument(
        "--defer-recv",
        action="store_true",
        help="with --for torch: say what defer_pp_recv=True does to the order",
    )
    group.add_argument(
        "--runtime",
        choices=("runtime", "multi"),
        default="runtime",
        help="with --for torch: _PipelineScheduleRuntime, or PipelineScheduleMulti (by columns)",
    )


def _add_weights(group: argparse._ArgumentGroup) -> None:
    for name, default, what in (
        ("embedding", 0.0, "the embedding"),
        ("mtp", 1.0, "a layer of multi-token prediction"),
        ("loss", 1.0, "head and loss"),
    ):
        group.add_argument(
            f"--{name}-weight", type=float, default=default, metavar="X",
            help=f"what {what} takes, in layers (default: {default:g})",
        )  # fmt: skip
