"""`hocket run` and `hocket profile`: start the ranks, show the steps, compare, write files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from hocket import files
from hocket.errors import RunError, UsageError
from hocket.train.ab_compare import Arm, beside, beside_text
from hocket.train.launch import cores, join_group, launch
from hocket.train.options import SLEEP, Order, Settings, settings_from
from hocket.train.report import comparison, comparison_text, milliseconds, one_by_one

if TYPE_CHECKING:
    from hocket.costs import Costs
    from hocket.ir import Schedule
    from hocket.timeline import Timeline
    from hocket.train.training import Run

Tell = Callable[[Any], None]


def run_command(args: argparse.Namespace) -> int:
    """Trains as `hocket run` was told; returns the exit status."""
    settings = settings_from(args)
    if settings.costs:
        from hocket.simulator import simulate

        for _, schedule in settings.orders:  # its faults now, not after a run
            costs = costs_of_file(settings, schedule)
            if costs is not None:
                simulate(schedule, costs)
    return _everywhere(train, settings, args, _print_run)


def profile_command(args: argparse.Namespace) -> int:
    """Measures as `hocket profile` was told, writes the costs; returns the exit status."""
    settings = settings_from(args)
    if args.backward == "both":
        settings = replace(settings, orders=both_ways(settings.schedule))
    args.output = args.output or "costs.toml"

    def show(result: dict[str, Any], as_json: bool) -> None:
        files.write(args.output, result["toml"])
        if as_json:
            print(json.dumps(result | {"output": args.output}))
        else:
            print(f"{result['text']}\n\nwritten: {args.output}; use it with --costs {args.output}")

    return _everywhere(measure, settings, args, show)


def _everywhere(
    work: Callable[[Tell, Settings], dict[str, Any] | None],
    settings: Settings,
    args: argparse.Namespace,
    show: Callable[[dict[str, Any], bool], None],
) -> int:
    """Runs `work` on every rank, here or under torchrun, and shows what rank 0 returns."""
    if find_spec("torch") is None:
        raise UsageError("training needs torch: pip install 'hocket[torch]'")
    progress = Progress(settings.steps, quiet=args.json)
    try:
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            result = _as_a_rank(work, settings, progress)
        else:
            launched = launch(
                work, settings.nproc, (settings,), settings.timeout,
                listen=progress.step, device=settings.device,
            )  # fmt: skip
            result = launched[0]
    except RunError as error:
        progress.end()
        print(f"hocket: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        progress.end()
        print("hocket: stopped; all ranks have ended", file=sys.stderr)
        return 130
    progress.end()
    if result is not None:
        show(result, args.json)
    return 0


def _as_a_rank(
    work: Callable[[Tell, Settings], dict[str, Any] | None], settings: Settings, progress: Progress
) -> dict[str, Any] | None:
    """Runs `work` in this process, one of those that torchrun or the like has started."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join_group(rank, world, "env://", settings.timeout, settings.device)
    return work(progress.step, settings)


class Progress:
    """Shows each step: a line each, or on a terminal one line that changes in place."""

    def __init__(self, steps: int, quiet: bool) -> None:
        self.steps, self.quiet = steps, quiet
        self.in_place = sys.stdout.isatty()
        self.open = False

    def step(self, news: tuple[Any, ...]) -> None:
        """Shows (step, loss, seconds of each order)."""
        if self.quiet:
            return
        index, loss, *seconds = news
        width = len(str(self.steps))
        text = f"step {index + 1:{width}}/{self.steps}  loss {loss:.4f}"
        text += "".join(f"  {one:.3f} s" for one in seconds)
        if self.in_place:
            print(f"\r{text}  ", end="", flush=True)
            self.open = True
        else:
            print(text, flush=True)

    def end(self) -> None:
        """Leaves the line that changes in place."""
        if self.open:
            print()
            self.open = False


# --- on a rank -------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """One order of a run: its median step, predicted from these costs, or why it is not."""

    run: Run
    seen: Timeline
    predicted: Timeline | None
    costs: Costs | None
    why: str


def train(tell: Tell, settings: Settings) -> dict[str, Any] | None:
    """All of a run on one rank; rank 0 returns what is to be shown."""
    from hocket.train.training import Trainer, comm_cpu, counted, run

    trainers = [Trainer(replace(settings, schedule=one.schedule)) for one in settings.orders]
    first = trainers[0]
    runs = run(trainers, _told_by_first(tell, first.rank))
    seconds = counted(runs, first.pipeline.device) if len(runs) > 1 else []
    copied = comm_cpu(trainers, runs)
    if first.rank != 0:
        return None
    outcomes = [
        _outcome(settings, order.schedule, one, ms)
        for order, one, ms in zip(settings.orders, runs, copied, strict=True)
    ]
    own = outcomes[0]
    assert own.predicted is not None and own.costs is not None
    if settings.trace:
        from hocket.trace import write_trace

        write_trace(_traced(settings, outcomes), settings.trace)
    return {
        "schedule": settings.schedule.name,
        "p": settings.schedule.p,
        "m": settings.sequences,
        "slices": settings.schedule.placement.slices,
        "replicas": settings.replicas,
        "queues": len(settings.schedule.queues),
        "dispatch": first.pipeline.dispatch,
        "steps": settings.steps,
        "batch": settings.batch,
        "model": settings.model,
        "device": settings.device,
        "cores": cores(),
        "shared_cores": shared_cores(settings),
        "predicted_cores": own.costs.cores,
        "losses": own.run.losses,
        "seconds": own.run.seconds,
        "costs": settings.costs,
        "steps_compared": len(own.run.timelines),
        **comparison(own.predicted, own.seen),
        "trace": settings.trace,
        "beside": beside(_arms(settings, outcomes, seconds)) if seconds else None,
    }


def shared_cores(settings: Settings) -> int | None:
    """How many cores of this machine all ranks share; None where each may have one to itself."""
    here = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")  # or launched by us
    works = settings.device == "cpu" and settings.model != SLEEP
    return cores() if here and works and cores() < settings.nproc else None


def counted_cores(settings: Settings) -> int | None:
    """The cores that the times of one pipeline are read with: None where replicas took part too."""
    return shared_cores(settings) if settings.replicas == 1 else None


def costs_of_file(settings: Settings, schedule: Schedule) -> Costs | None:
    """The costs of an order's stages, from a file with those of the first order's.

    Stages of others are parts of these, or several of them together; None where they are neither.
    """
    from hocket.costs import load_costs
    from hocket.explanation import recut

    costs = load_costs(settings.costs or "")
    if settings.model == SLEEP:
        # Who sleeps needs no core, and sends a few bytes only.
        costs = replace(costs, cores=None, bandwidth=None)
    return recut(costs, settings.schedule, schedule)


def _outcome(settings: Settings, schedule: Schedule, run: Run, comm_cpu: float) -> Outcome:
    """What a run of a schedule was like, and what was to be expected."""
    from hocket.simulator import simulate
    from hocket.train.profile import own_costs, typical

    seen = typical(run.timelines)
    if settings.costs:
        costs = costs_of_file(settings, schedule)
    else:
        costs = own_costs(run.timelines, seen, counted_cores(settings), comm_cpu)
    if costs is None:
        numbers = (s.placement.n_stages for s in (settings.schedule, schedule))
        why = "{} is for {} stages, and it has {}".format(settings.costs, *numbers)
        return Outcome(run, seen, None, None, why)
    return Outcome(run, seen, simulate(one_by_one(schedule), costs), costs, "")


def _traced(settings: Settings, outcomes: Sequence[Outcome]) -> dict[str, Timeline]:
    """The timelines of a run by name; last what readers of a trace take, the first order's."""
    out: dict[str, Timeline] = {}
    for order, one in reversed([*zip(settings.orders, outcomes, strict=True)]):
        word = "" if one is outcomes[0] else f"{order.word} "
        if one.predicted is not None:
            out[f"{word}predicted"] = one.predicted
        out[f"{word}measured"] = one.seen
    return out


def _arms(
    settings: Settings, outcomes: Sequence[Outcome], seconds: Sequence[Sequence[float]]
) -> list[Arm]:
    out = []
    for order, one, took in zip(settings.orders, outcomes, seconds, strict=True):
        t = one.predicted
        ms = None if t is None else milliseconds(t) * float(t.makespan)
        out.append(Arm(order.word, took, one.run.losses, ms, one.why))
    return out


def _told_by_first(tell: Tell, rank: int) -> Callable[..., None]:
    def shown(*news: Any) -> None:
        if rank == 0:
            tell(news)

    return shown


def _print_run(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    source = result["costs"] or "the mean times of its own actions"
    cut = f" in {result['slices']} slices" if result["slices"] > 1 else ""
    cut += f", the first of {result['replicas']} replicas" if result["replicas"] > 1 else ""
    print(
        f"\n{result['schedule']}  p={result['p']} m={result['m']}{cut}; the median one of the last "
        f"{result['steps_compared']} steps, predicted from {source}"
    )
    print(comparison_text(result))
    if result["beside"] is not None:
        print(f"\n{beside_text(result['beside'])}")
    if result["shared_cores"] is not None:
        print(f"\n{_sharing_text(result)}")
    if result["queues"] > result["p"] and result["dispatch"] != "queues":
        print("\nThe queues of a rank ran one after the other; --dispatch queues is side by side.")
    if result["trace"]:
        print(f"\ntrace: {result['trace']} (predicted and measured; open it at ui.perfetto.dev)")


def _sharing_text(result: dict[str, Any]) -> str:
    shared, counted = result["shared_cores"], result["predicted_cores"]
    cores = "core" if shared == 1 else "cores"
    head = f"{result['p'] * result['replicas']} ranks share {shared} {cores} here"
    if counted is None:
        told = ": actions take longer while others run, and the prediction does not know that"
    elif counted == shared:
        told = ", and the prediction counts on that"
    else:
        told = f", but the prediction counts on the {counted} that {result['costs']} names"
    return f"{head}{told}. For the schedule alone: --model {SLEEP}"


def both_ways(schedule: Schedule) -> tuple[Order, ...]:
    """The schedule with whole backwards and with split ones; as it is where it has phases."""
    from hocket.lower.backward import split_backward, whole_backward
    from hocket.lower.phases import has_phases

    if has_phases(schedule.placement):
        return (Order(schedule.name, schedule),)
    whole, split = whole_backward(schedule), split_backward(schedule)
    return Order("whole backwards", whole), Order("split backwards", split)


def measure(tell: Tell, settings: Settings) -> dict[str, Any] | None:
    """All of a profile on one rank; rank 0 returns the costs and how they spread."""
    from hocket.costs import costs_toml
    from hocket.measured import bandwidth_of, fused_of, readings, together
    from hocket.train.profile import bytes_of, messages_of, profile_text
    from hocket.train.training import Trainer, comm_cpu, run

    trainers = [Trainer(replace(settings, schedule=one.schedule)) for one in settings.orders]
    trainer = trainers[0]
    calls = trainer.calls_seen()
    runs = run(trainers, _told_by_first(tell, trainer.rank), kept=settings.steps)
    copied = comm_cpu(trainers, runs)
    probes = trainer.probes(calls)
    messages = messages_of(probes, settings.schedule.placement)
    links = trainer.links(max(messages, default=0))
    if trainer.rank != 0:
        return None
    shared = counted_cores(settings)
    each = [
        readings(one.timelines, "ms", waited=True, cores=shared, comm_cpu=ms)
        for one, ms in zip(runs, copied, strict=True)
    ]
    seen = each[0] if len(each) == 1 else together(*each)
    fused = fused_of(settings.orders[0].schedule, runs[0].timelines, shared)
    costs = seen.costs(
        "median", "low", sizes=bytes_of(probes, seen.n_stages), bandwidth=bandwidth_of(links),
        message=fmean(messages or [0]),
    )  # fmt: skip
    return {
        "toml": costs_toml(costs, _note(settings, runs, any(p.left for p in probes.values()))),
        "text": profile_text(seen, probes, links, fused),
        "losses": runs[0].losses,
        "links": [link._asdict() for link in links],
        "left_after_W": [probes[s].left for s in range(seen.n_stages)],
        "fused": fused._asdict() if fused.count else None,
    }


def _note(settings: Settings, runs: Sequence[Run], left: bool) -> list[str]:
    """What is said above the costs."""
    note = [
        f"measured by hocket profile: {settings.schedule.name}, p={settings.schedule.p}, "
        f"m={settings.sequences}, {settings.model}, batch {settings.batch}",
        f"medians of {len(runs[0].timelines)} steps"
        + (", of as many with split backwards" if len(runs) > 1 else "")
        + "; p2p_overhead.recv is the time between two actions",
    ]
    if settings.schedule.p == 1:
        note.append("one rank: no messages, so no latency and no bandwidth were measured")
    if left:
        note.append("some stages hold of what F kept also after W; no cost here counts that")
    shared = counted_cores(settings)
    if shared is not None:
        note += [
            f"{settings.nproc} ranks shared {shared} cores: times are those of a rank with a core "
            f"to itself, and cores = {shared}",
            "says that they share (comm_cpu: ms of them for each message); delete that line to "
            "plan for a machine with a core a rank",
        ]
    elif shared_cores(settings) is not None:
        note.append(
            f"{settings.nproc} ranks shared {cores()} cores: times are longer than with one each, "
            "and a plan counts on one each"
        )
    return note
