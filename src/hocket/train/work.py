"""What every rank does in `hocket run` and `hocket profile`: train, then compare or measure."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from hocket.train.ab_compare import Arm, beside
from hocket.train.launch import cores
from hocket.train.report import comparison, milliseconds, one_by_one
from hocket.train.settings import SLEEP, Order, Settings

if TYPE_CHECKING:
    from hocket.costs import Costs
    from hocket.ir import Schedule
    from hocket.timeline import Timeline
    from hocket.train.training import Run

Tell = Callable[[Any], None]


class Outcome(NamedTuple):
    """One order of a run: its median step, predicted from these costs, or why it is not."""

    run: Run
    seen: Timeline
    predicted: Timeline | None
    costs: Costs | None
    why: str


def train(tell: Tell, settings: Settings) -> dict[str, Any] | None:
    """All of a run on one rank; rank 0 returns what is to be shown."""
    from hocket.train.saving import Saver
    from hocket.train.training import Trainer, comm_cpu, counted, run

    trainers = [Trainer(replace(settings, schedule=one.schedule)) for one in settings.orders]
    first = trainers[0]
    saver = None if settings.saving is None else Saver(settings.saving, first, tell)
    told = _told_by_first(tell, first.rank)
    if saver is None:
        runs = run(trainers, told)
    else:
        runs = run(trainers, told, start=saver.start, after=saver.after)
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
    if settings.trace and settings.trace.endswith(".jsonl"):
        from hocket.interop.traces.rows import write_rows

        write_rows(own.run.timelines, settings.trace)
    elif settings.trace:
        from hocket.formats import write_trace

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
        "steps_before": 0 if saver is None else saver.start,
        "checkpoint": None if saver is None else saver.path,
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


def costs_of_file(settings: Settings, schedule: Schedule) -> tuple[Costs | None, str]:
    """The costs of an order's stages, from a file with those of the model that all orders run.

    Where another order than the first has stages that they do not fit: None, and why.
    Raises: CostError.
    """
    from hocket.costs import fitted_together, load_costs
    from hocket.errors import CostError

    costs = load_costs(settings.costs or "")
    if settings.model == SLEEP:
        # Who sleeps needs no core, and sends a few bytes only.
        costs = replace(costs, cores=None, bandwidth=None)
    try:
        both = [settings.schedule.placement, schedule.placement]
        return fitted_together(costs, both)[1], ""
    except CostError as error:
        if schedule is settings.schedule:
            raise
        return None, f"{settings.costs}: {error}"


def _outcome(settings: Settings, schedule: Schedule, run: Run, comm_cpu: float) -> Outcome:
    """What a run of a schedule was like, and what was to be expected."""
    from hocket.simulator import simulate
    from hocket.train.profile import own_costs, typical

    seen = typical(run.timelines)
    why = ""
    if settings.costs:
        costs, why = costs_of_file(settings, schedule)
    else:
        costs = own_costs(run.timelines, seen, counted_cores(settings), comm_cpu)
    predicted = None if costs is None else simulate(one_by_one(schedule), costs)
    return Outcome(run, seen, predicted, costs, why)


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


def both_ways(schedule: Schedule) -> tuple[Order, ...]:
    """The schedule with full backwards and with split ones; as it is where it has phases."""
    from hocket.lower.backward import split_backward, whole_backward
    from hocket.lower.phases import has_phases

    if has_phases(schedule.placement):
        return (Order(schedule.name, schedule),)
    whole, split = whole_backward(schedule), split_backward(schedule)
    return Order("full backwards", whole), Order("split backwards", split)


def measure(tell: Tell, settings: Settings) -> dict[str, Any] | None:
    """All of a profile on one rank; rank 0 returns the costs and how they spread."""
    from hocket.costs import costs_toml
    from hocket.measured.readings import bandwidth_of, fused_of, readings, together
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
            "plan for a machine with a core per rank",
        ]
    elif shared_cores(settings) is not None:
        note.append(
            f"{settings.nproc} ranks shared {cores()} cores: times are longer than with one each, "
            "and a plan counts on one each"
        )
    return note
