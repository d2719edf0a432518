"""What `hocket run` and `hocket profile` have in common: the training, its ranks, its progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from hocket import limits
from hocket.cli.arguments import option
from hocket.cli.output import warn
from hocket.errors import RunError, UsageError
from hocket.train.settings import DEMO, DISPATCH, HF, MOE, SLEEP, Order, Settings, sequences
from hocket.words import settings

_KEPT = ("lr", "seed", "dispatch", "verify", "timeout", "device", "data")  # as Settings has them


@dataclass(frozen=True, kw_only=True)
class Training:
    """What to train and how; None where the model or the command chooses."""

    nproc: int | None = option(
        "--nproc N", "local processes, the schedule's ranks once for each replica of the pipeline "
        "(default: one; two for the MoE demo, whose experts they share)", heading="the run",
    )  # fmt: skip
    steps: int | None = option("--steps N", "training steps (default: 20; of a profile 10)")
    lr: float = option("--lr X", "learning rate of Adam (default: 0.001)", default=1e-3)
    batch: int | None = option(
        "--batch N", "sequences per step, of each replica (default: 2 per microbatch)"
    )
    seed: int = option("--seed N", "of weights, batches and dropout (default: 0)", default=0)
    dispatch: str | None = option(
        "--dispatch", "where a rank waits (default: queues, where ranks have several; else "
        "receive)", of=DISPATCH,
    )  # fmt: skip
    verify: bool = option("--verify", "first compare a step with the unpipelined model")
    timeout: float = option("--timeout S", "longest silence, in seconds", default=60.0)
    device: str = option(
        "--device", "(cuda: one GPU per rank; untested)", of=("cpu", "cuda"), default="cpu"
    )
    model: str | None = option(
        "--model PKG.MOD:BUILD", f"your own (default: {DEMO}; for phases of MoE layers {MOE})",
        heading="the model",
    )  # fmt: skip
    hf: str | None = option(
        "--hf DIR", "a Hugging Face model: its config.json, and safetensors or else random weights"
    )
    model_options: tuple[str, ...] = option(
        "-O KEY=VALUE...", "an option of the model's build or batch; again for more"
    )
    data: str | None = option("--data FILE", "text (default: Python's documentation topics)")
    seq: int | None = option("--seq N", "length of a sequence (demo: 128)")
    layers: int | None = option("--layers N", "layers of the model (demo: 8)")
    width: int | None = option("--width N", "width of the model (demo: 128)")
    dropout: float | None = option("--dropout X", "dropout (demo: 0)")
    float64: bool = option("--float64", "train in double precision")

    def settings(self, orders: Sequence[Order], steps: int, **more: Any) -> Settings:
        """The settings of a training by the first of some orders, and by the others beside it.

        steps: where they are not given. more: fields of Settings.

        Raises: UsageError for numbers or orders that do not fit each other, ScheduleError.
        """
        from hocket.checker import check
        from hocket.lower.phases import has_phases  # and with it numpy: not for --help

        for order in orders:
            check(order.schedule).raise_if_bad()
        schedule = orders[0].schedule
        p, m = schedule.p, sequences(schedule)
        if self.hf and self.model:
            raise UsageError("--hf and --model both name a model; leave one of them out")
        default = HF if self.hf else MOE if has_phases(schedule.placement) else DEMO
        model = self.model or default
        values = {key: value for key, value in vars(self).items() if key in _KEPT} | more
        out = Settings(
            schedule=schedule, orders=_distinct(orders), model=model,
            model_options=self._model_options(), nproc=_processes(p, model, self.nproc),
            steps=steps if self.steps is None else self.steps,
            batch=2 * m if self.batch is None else self.batch, **values,
        )  # fmt: skip
        if not _launched():
            advice = "start them with torchrun, on several machines"
            limits.at_most("--nproc: processes of one machine", out.nproc, limits.PROCESSES, advice)
        if out.nproc < 1 or out.nproc % p:
            raise UsageError(
                f"--nproc is {out.nproc}, but the schedule has {p} rank{'s' * (p > 1)}; give a "
                f"multiple of {p} or leave it out"
            )
        if out.saving is not None:
            out.saving.check()
        if out.steps < 1:
            raise UsageError(f"--steps is {out.steps}; it must be 1 or more")
        if out.batch < m:
            raise UsageError(
                f"--batch is {out.batch}, but the schedule has {m} microbatches; give {m} or more"
            )
        _refuse_unlike(orders, model, out.model_options)
        return out

    def _model_options(self) -> dict[str, Any]:
        named = {key: getattr(self, key) for key in ("seq", "layers", "width", "dropout")}
        named |= {"dtype": "float64" if self.float64 else None, "hf": self.hf}
        try:
            more = settings(self.model_options)
        except UsageError as error:
            raise UsageError(f"-O: {error}") from None
        known = {key: value for key, value in named.items() if value is not None}
        for key in known.keys() & more.keys():
            raise UsageError(f"{key} is given twice: {known[key]}, and {more[key]} by -O")
        return known | more


def _refuse_unlike(orders: Sequence[Order], model: str, options: dict[str, Any]) -> None:
    """Raises UsageError where orders cannot train the same model on the same batches."""
    from hocket.lower.phases import has_phases

    first = orders[0]
    for word, schedule in orders[1:]:
        for what, count in (
            ("ranks (-p)", lambda s: s.p),
            ("microbatches (-m)", sequences),
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


def _launched() -> bool:
    """True in a process that torchrun or the like has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _processes(p: int, model: str, asked: int | None) -> int:
    """How many processes: those that torchrun or the like has started, or as asked for."""
    if _launched():
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


# --- the ranks ---------------------------------------------------------------------------------

Work = Callable[[Callable[[Any], None], Settings], "dict[str, Any] | None"]


def everywhere(
    work: Work, settings: Settings, show: Callable[[dict[str, Any]], None], *, quiet: bool
) -> int:
    """Runs `work` on every rank, here or under torchrun, and shows what rank 0 returns.

    Returns the exit status. quiet: shows no progress.
    """
    from hocket.train.launch import end_late, join_group, launch

    if find_spec("torch") is None:
        raise UsageError("training needs torch: pip install 'hocket[torch]'")
    progress = Progress(settings.steps, quiet=quiet)
    try:
        if _launched():
            end_late()
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            join_group(rank, world, "env://", settings.timeout, settings.device)
            result = work(progress.step, settings)
        else:
            result = launch(
                work, settings.nproc, (settings,), settings.timeout,
                listen=progress.step, device=settings.device,
                preload=["hocket.train.saving"] * bool(settings.saving)
                + ["transformers.modeling_utils"] * (settings.model == HF),
            )[0]  # fmt: skip
    except RunError as error:
        progress.end()
        warn(str(error))
        return 1
    except KeyboardInterrupt:
        progress.end()
        warn("stopped; all ranks have ended")
        return 130
    progress.end()
    if result is not None:
        show(result)
    return 0


class Progress:
    """Shows each step: a line each, or on a terminal one line that changes in place."""

    def __init__(self, steps: int, quiet: bool) -> None:
        self.steps, self.quiet = steps, quiet
        self.in_place = sys.stdout.isatty()
        self.open = False

    def step(self, news: tuple[Any, ...] | str) -> None:
        """Shows (step, loss, seconds of each order), or a sentence."""
        if isinstance(news, str):
            self.end()
            warn(news)
            return
        if self.quiet:
            return
        index, loss, *seconds = news
        text = f"step {index + 1:{len(str(self.steps))}}/{self.steps}  loss {loss:.4f}"
        text += "".join(f"  {one:.3f} s" for one in seconds)
        self.open = self.in_place
        print(*(["\r" + text, "  "] if self.open else [text, "\n"]), sep="", end="", flush=True)

    def end(self) -> None:
        """Leaves the line that changes in place."""
        print("\n" if self.open else "", end="")
        self.open = False
