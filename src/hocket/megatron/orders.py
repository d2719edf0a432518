"""Which orders Megatron can take, and the order for a number of microbatches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hocket.deps import COPIES
from hocket.errors import UsageError
from hocket.ir import Kind, Schedule
from hocket.planner import Plan
from hocket.schedules import build, entry
from hocket.text import load
from hocket.words import named

Order = str | Path | Schedule | Plan


@dataclass(frozen=True)
class Source:
    """Where schedules come from, by numbers of ranks and microbatches. fixed: the only one."""

    make: Callable[[int, int], Schedule]
    fixed: Schedule | None = None

    def order(self, p: int, m: int) -> Schedule:
        """The schedule of a step. Raises: HocketError."""
        fixed = self.fixed
        if fixed is None:
            return _fit(self.make(p, m))
        if (p, m) != (fixed.p, fixed.m):
            raise UsageError(
                f"{fixed.name} is written for {fixed.p} ranks and {fixed.m} microbatches, but "
                f"Megatron has {p} ranks and a step of {m} microbatches; take a named schedule, "
                "which is built for every number"
            )
        return fixed

    def example(self, p: int) -> Schedule:
        """A schedule of some number of microbatches; all have one placement. Raises: HocketError.

        The numbers that a schedule can have are tried in turn.
        """
        if self.fixed is not None:
            return self.order(p, self.fixed.m)
        for m in range(2 * p, 6 * p):
            try:
                return self.order(p, m)
            except UsageError:
                continue
        return self.order(p, 2 * p)


def source_of(order: Order, v: int | None = None) -> Source:
    """Where the schedules of an order come from.

    order: a name as on the command line (`interleaved:group=4`), a `.sched` file, a schedule or
    a plan; all but a name are for one number of microbatches.

    Raises: HocketError where it cannot be read, or Megatron cannot run it.
    """
    if isinstance(order, str) and not order.endswith(".sched"):
        name, options = named(order)
        entry(name)  # a wrong name is reported at once
        sizes = {} if v is None else {"v": v}
        return Source(lambda p, m: build(name, p=p, m=m, **sizes, **options))
    if v is not None:
        raise UsageError(f"v={v} is for named schedules; {order} has its own stages")
    fixed = order.schedule if isinstance(order, Plan) else order
    schedule = _fit(fixed if isinstance(fixed, Schedule) else load(fixed))
    return Source(lambda p, m: schedule, schedule)


def _fit(schedule: Schedule) -> Schedule:
    """The schedule. Raises: UsageError where Megatron cannot run it, with the reason."""
    placement, name, p = schedule.placement, schedule.name, schedule.p
    whys = []
    if len(placement.paths) > 1:
        whys.append(
            f"it has {len(placement.paths)} paths, so a stage is on several ranks, and Megatron "
            "keeps one copy of the weights; take an order with one path, such as dualpipev"
        )
    elif any(queue.stream for queue in placement.queues):
        whys.append("it has several queues per rank, and Megatron runs one thing at a time")
    else:
        counts = {len(stages) for stages in placement.stages_of_rank}
        if len(counts) > 1:
            whys.append(f"its ranks hold {sorted(counts)} stages, and Megatron gives all the same")
    if placement.slices > 1:
        whys.append("it cuts sequences into slices, which Megatron's models do not carry on")
    again = [kind.name for kind in (Kind.R, *COPIES) if kind in schedule.kinds]
    if again:
        whys.append(
            f"it has {' and '.join(again)}; Megatron recomputes and offloads by its own settings"
        )
    if schedule.is_forward_only:
        whys.append("it has no backward")
    if whys:
        raise UsageError(f"{name} (p={p}) cannot run inside Megatron: {'; '.join(whys)}")
    return schedule
