"""The options of `hocket run` and `hocket profile`, read from the command line. No torch here."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hocket.errors import UsageError

if TYPE_CHECKING:
    from hocket.ir import Schedule

DEMO = "hocket.demo.gpt:build"
MOE = "hocket.demo.moe:build"
SLEEP = "hocket.demo.sleep:build"
DISPATCH = ("receive", "gate", "ready", "queues")


class Order(NamedTuple):
    """A built schedule, and the word that it was asked for by."""

    word: str
    schedule: Schedule


@dataclass(frozen=True)
class Settings:
    """What to train and how, as given; `schedule` is built already.

    orders: the schedule and those beside it, no two by the same word.
    """

    schedule: Schedule
    orders: tuple[Order, ...]
    nproc: int
    steps: int
    batch: int
    model: str
    model_options: dict[str, Any]
    data: str | None
    lr: float
    seed: int
    dispatch: str | None
    verify: bool
    timeout: float
    device: str
    trace: str | None
    costs: str | None

    @property
    def replicas(self) -> int:
        """How many times the ranks of the schedule run side by side."""
        return self.nproc // self.schedule.p

    @property
    def sequences(self) -> int:
        """What -m says: microbatches, before their sequences are cut into slices."""
        return _sequences(self.schedule)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `hocket run`; the schedule's own are the caller's."""
    _add_common(parser, steps=20)
    group = parser.add_argument_group("what is shown")
    group.add_argument(
        "--beside", action="append", default=[], metavar="SCHEDULE",
        help="train with this one too, step by step in turn, and compare the times (a name takes "
        "the same p and m); again for more",
    )  # fmt: skip
    group.add_argument("--trace", metavar="FILE", help="write predicted and measured as one trace")
    group.add_argument(
        "--costs", metavar="FILE", help="predict from this costs.toml (default: from this run)"
    )


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `hocket profile`; the schedule's own are the caller's."""
    _add_common(parser, steps=10)
    parser.add_argument(
        "--backward", choices=("both", "own"), default="both",
        help="both: the order with whole backwards and with split ones, step by step in turn; "
        "holds the model twice. own: as the schedule has them (default: both)",
    )  # fmt: skip
    group = parser.add_argument_group("what is written")
    group.add_argument("--output", metavar="FILE", help="where (default: costs.toml); also -o FILE")


def _add_common(parser: argparse.ArgumentParser, steps: int) -> None:
    add = parser.add_argument_group("the run").add_argument
    add(
        "--nproc", type=int, metavar="N",
        help="local processes, the schedule's ranks once for each replica of the pipeline "
        "(default: one; two for the MoE demo, whose experts they share)",
    )  # fmt: skip
    add("--steps", type=int, default=steps, metavar="N", help=f"training steps (default: {steps})")
    add("--lr", type=float, default=1e-3, help="learning rate of Adam (default: 0.001)")
    add(
        "--batch", type=int, metavar="N",
        help="sequences a step, of each replica (default: 2 a microbatch)",
    )  # fmt: skip
    add("--seed", type=int, default=0, help="of weights, batches and dropout (default: 0)")
    add(
        "--dispatch", choices=DISPATCH,
        help="where a rank waits (default: queues, where ranks have several; else receive)",
    )  # fmt: skip
    add("--verify", action="store_true", help="first compare a step with the unpipelined model")
    add("--timeout", type=float, default=60.0, metavar="S", help="longest silence, in seconds")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="(cuda: one GPU a rank; untested)")
    add = parser.add_argument_group("the model").add_argument
    add(
        "--model", metavar="PKG.MOD:BUILD",
        help=f"your own (default: {DEMO}; for phases of MoE layers {MOE})",
    )  # fmt: skip
    add(
        "-O", action="append", default=[], metavar="KEY=VALUE", dest="model_options",
        help="an option of the model's build or batch; again for more",
    )  # fmt: skip
    add("--data", metavar="FILE", help="text to train on (default: Python's documentation topics)")
    add("--seq", type=int, metavar="N", help="length of a sequence (demo: 128)")
    add("--layers", type=int, metavar="N", help="layers of the model (demo: 8)")
    add("--width", type=int, metavar="N", help="width of the model (demo: 128)")
    add("--dropout", type=float, metavar="X", help="dropout (demo: 0)")
    add("--float64", action="store_true", help="train in double precision")


def settings_from(args: argparse.Namespace) -> Settings:
    """The settings of a parsed command line; `args.schedule` is the built schedule.

    Raises: UsageError for numbers that do not fit each other.
    """
    from hocket.lower.phases import has_phases  # and with it numpy: not for --help

    schedule = args.schedule
    p, m = schedule.p, _sequences(schedule)
    model = args.model or (MOE if has_phases(schedule.placement) else DEMO)
    nproc = _processes(p, model, args.nproc)
    batch = 2 * m if args.batch is None else args.batch
    if nproc < 1 or nproc % p:
        raise UsageError(
            f"--nproc is {nproc}, but the schedule has {p} rank{'s' * (p > 1)}; give a multiple "
            f"of {p} or leave it out"
        )
    if args.steps < 1:
        raise UsageError(f"--steps is {args.steps}; it must be 1 or more")
    if batch < m:
        raise UsageError(
            f"--batch is {batch}, but the schedule has {m} microbatches; give {m} or more"
        )
    options = _model_options(args)
    orders = [Order(getattr(args, "word", schedule.name), schedule)]
    orders += [Order(*pair) for pair in getattr(args, "beside", ())]
    _refuse_unlike(orders, model, options)
    return Settings(
        schedule=schedule, orders=_distinct(orders), nproc=nproc, steps=args.steps, batch=batch,
        model=model, model_options=options, data=args.data, lr=args.lr, seed=args.seed,
        dispatch=args.dispatch, verify=args.verify, timeout=args.timeout, device=args.device,
        trace=getattr(args, "trace", None), costs=getattr(args, "costs", None),
    )  # fmt: skip


def _sequences(schedule: Schedule) -> int:
    """Microbatches, before their sequences are cut into slices."""
    return schedule.placement.m // schedule.placement.slices


def _refuse_unlike(orders: Sequence[Order], model: str, options: dict[str, Any]) -> None:
    """Raises UsageError where orders cannot train the same model on the same batches."""
    from hocket.lower.phases import has_phases

    first = orders[0]
    for word, schedule in orders[1:]:
        for what, count in (
            ("ranks (-p)", lambda s: s.p),
            ("microbatches (-m)", _sequences),
            ("slices of a sequence", lambda s: s.placement.slices),
        ):
            ours, theirs = count(first.schedule), count(schedule)
            if ours != theirs:
                raise UsageError(
                    f"--beside {word}: the number of {what} is {theirs}, but {first.word} has "
                    f"{ours}; it must be the same"
                )
        placements = first.schedule.placement, schedule.placement
        if has_phases(placements[0]) != has_phases(placements[1]):
            raise UsageError(
                f"--beside {word}: one of {first.word} and {word} cuts stages into phases and the "
                "other does not, so no model fits both"
            )
        ours, theirs = (placement.n_stages for placement in placements)
        if model == SLEEP and "costs" not in options and ours != theirs:
            raise UsageError(
                f"--beside {word}: it has {theirs} stages, but {first.word} has {ours}, and each "
                "sleeps as long; give -O costs=FILE, which is divided among the stages"
            )


def _distinct(orders: Sequence[Order]) -> tuple[Order, ...]:
    """The orders with a number after a word that was there before."""
    words = [order.word for order in orders]
    return tuple(
        Order(f"{word} ({n})" if (n := words[: i + 1].count(word)) > 1 else word, schedule)
        for i, (word, schedule) in enumerate(orders)
    )


def _processes(p: int, model: str, asked: int | None) -> int:
    """How many processes: those that torchrun or the like has started, or as asked for."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        world = int(os.environ["WORLD_SIZE"])
        if world % p or asked not in (None, world):
            raise UsageError(
                f"the launcher started {world} processes, but "
                + (f"--nproc is {asked}" if asked else f"the schedule has {p} ranks")
            )
        return world
    if asked is not None:
        return asked
    return 2 * p if model == MOE else p


def _model_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options given for the model, by name."""
    named = {key: getattr(args, key) for key in ("seq", "layers", "width", "dropout")}
    options = {key: value for key, value in named.items() if value is not None}
    if args.float64:
        options["dtype"] = "float64"
    for text in args.model_options:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise UsageError(f"-O {text}: give KEY=VALUE")
        options[key] = _value(value)
    return options


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
