"""From a request to a plan: its candidates, their race, and the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hocket.checker import check
from hocket.costs import Number
from hocket.errors import CostError, PlanError, ScheduleError
from hocket.ir import Kind, Queue, Schedule
from hocket.lower import recompute
from hocket.planner.answer import best_of, bound_of, floor_of, ranked, simplest, with_all_slots
from hocket.planner.infeasible import lacking, nothing_fits
from hocket.planner.measures import measure, over
from hocket.planner.partition_search import adapt
from hocket.planner.race import Contest, Finalist, Progress, Race
from hocket.planner.recompute import FULL
from hocket.planner.request import Ahead, Entrant, Plan, Request
from hocket.planner.variants import (
    MANY,
    NOT_ASKED,
    Pricing,
    Variant,
    named,
    needs_copies,
    priced,
    variants,
)
from hocket.search.problem_bounds import best_bound
from hocket.search.search import Arena
from hocket.simulator import simulate

_FOR_SETTINGS = 0.2  # share of the time limit for the partition of layers and what is recomputed
FOR_NAMES = 0.3  # share of the time limit after which no more options of named schedules are tried

Placements = set[tuple[int, frozenset[tuple[Queue, ...]]]]
Watcher = Callable[[Progress], None]


def plan(
    request: Request,
    *,
    known: Sequence[tuple[str, Schedule]] = (),
    progress: Watcher | None = None,
) -> Plan:
    """The best schedule found for a request, with its bound and its competitors.

    known: schedules by name that compete too, and from which the search may begin. progress:
    called between rounds of search; an interrupt (Ctrl-C) ends the search there, and the best so
    far is the answer.

    Raises: PlanError where nothing fits, naming the nearest settings and what they need;
    KeyboardInterrupt where there is no answer yet.
    """
    request.check_costs()
    return _Planning(request, known, Race(request, progress)).run()


@dataclass(eq=False)
class _Planning:
    """State of one call of `plan`."""

    request: Request
    known: Sequence[tuple[str, Schedule]]
    race: Race
    interrupted: bool = False
    entrants: list[Entrant] = field(default_factory=list)
    skipped: list[Variant] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pricing = Pricing(self.request)

    def run(self) -> Plan:
        request, race = self.request, self.race
        choices = self._choices()
        try:
            self._enter_all(choices)
        except KeyboardInterrupt:
            if not race.contests and not race.finalists:
                raise
            self.interrupted = True
        if not race.contests and not race.finalists:
            raise PlanError(nothing_fits(request, choices, self.entrants))
        race.note("candidates")
        try:
            if request.search and race.contests and not self.interrupted:
                race.run()
            if request.solver and race.contests and not self.interrupted:
                race.solve()
        except KeyboardInterrupt:
            self.interrupted = True
        return self._answer()

    def _choices(self) -> list[Variant]:
        """Every variant, with layers moved and activations recomputed where that is better.

        A share of the time limit is for that; an interrupt ends it.
        """
        request, found = self.request, list(variants(self.request, self.pricing))
        if request.layers is None and not request.recompute:
            return found
        try:
            for variant in found:
                share = request.time_limit * _FOR_SETTINGS / len(found)
                adapt(variant, self.pricing, seconds=share)
        except KeyboardInterrupt:
            self.interrupted = True
        return [priced(v, self.pricing) for v in found]

    # --- candidates ---------------------------------------------------------------------

    def _enter_all(self, choices: Sequence[Variant]) -> None:
        """The known and registered schedules, then every variant."""
        placements = {(c.p, frozenset(c.placement.paths)) for c in choices}
        for name, made in self.known:
            v = max(1, made.placement.n_stages // made.p)
            self._enter(name, name, v, made, placements)
        if self.request.named and not self.interrupted:
            self._enter_named(placements)
        for choice in choices:
            large = choice.p * self.request.m > MANY
            late = large and self.race.seconds > self.request.time_limit
            if (self.interrupted or late) and self.race.contests:
                why = "left out: the time was over before it began"
                self.entrants.append(Entrant.absent(choice.name, choice.p, choice.v, why))
                self.skipped.append(choice)
            else:
                self._enter_contest(choice)

    def _enter_named(self, placements: Placements) -> None:
        """Every registered schedule that the request allows, simulated.

        After a third of the time limit only the simple ones are, without options.
        """
        late = self.request.time_limit * FOR_NAMES
        for name, p, v, made in named(self.request, lambda: self.race.seconds > late):
            if isinstance(made, str):
                self.entrants.append(Entrant.absent(name, p, v, made))
            else:
                self._enter(name, made.name, v, made, placements)

    def _enter(
        self, name: str, family: str, v: int, made: Schedule, placements: Placements
    ) -> None:
        """One schedule, unless it has more than one queue per rank."""
        if any(queue.stream for queue in made.queues):
            return
        known = (made.p, frozenset(made.placement.paths)) in placements
        known |= len(made.placement.paths) > 2 and "mirrored" in self.request.shapes
        entrant = self._entrant(name, made, v, known)
        self.entrants.append(entrant._replace(family=family))

    def _entrant(self, name: str, made: Schedule, v: int, known: bool) -> Entrant:
        request = self.request
        barred = _barred(request, made, known)
        if barred:
            return Entrant.absent(name, made.p, v, barred)
        try:
            costs = self.pricing.costs(made.placement, made.has_split_backward)
            timeline = simulate(made, costs)
        except (CostError, PlanError, ScheduleError) as error:
            return Entrant.absent(name, made.p, v, str(error).splitlines()[0])
        value = measure(timeline, costs, request.objective)
        why = over(request, timeline)
        if not why:
            self.race.finalists.append(Finalist(value, made, costs, name, name))
        return Entrant.timed(name, v, timeline, None if why else value, why)

    def _enter_contest(self, variant: Variant) -> None:
        """Adds a variant that fits, with what list scheduling and the named ones give it."""
        asked = variant.problem
        orders = (asked.order_of(f.schedule) for f in self.race.finalists)
        arena = Arena(asked, self.request.objective)
        starts = arena.starts([order for order in orders if order is not None])
        if starts:
            self.race.contests.append(Contest.begun(variant, arena, self.request, starts))
        else:
            why = lacking(variant)
            self.entrants.append(Entrant.absent(variant.name, variant.p, variant.v, why))

    # --- the answer ---------------------------------------------------------------------

    def _answer(self) -> Plan:
        request, race = self.request, self.race
        for contest in race.contests:
            self._enter_searched(contest)
        value, made, costs, name, by = simplest(race.finalists, request.margin)
        check(made).raise_if_bad()
        timeline = simulate(made, costs)
        bound, scope = bound_of(request, made, costs, race.contests)
        floors = [*map(floor_of, race.contests), bound]
        floors += [best_bound(with_all_slots(v.problem), request.objective) for v in self.skipped]
        floor = min(floors, key=lambda b: float(b.value))
        return Plan(
            request=request, schedule=made, costs=costs, value=value, makespan=timeline.makespan,
            span=timeline.span, bound=bound, scope=scope, floor=floor, found_by=by,
            entrants=tuple(ranked(self.entrants, value, name)), history=tuple(race.history),
            seconds=race.seconds, interrupted=self.interrupted, recompute=self._levels(made),
            layers=self._sizes(made), finalists=tuple(best_of(race.finalists, made)),
            ahead=self._ahead(made, value),
        )  # fmt: skip

    def _ahead(self, made: Schedule, value: Number) -> Ahead | None:
        """The answer with each R that helps ahead of its gradient, where that is better.

        Stages are tried one by one, the last one first.
        """
        levels = self.pricing.levels.get((made.placement.paths, made.has_split_backward), ())
        full = [s for s, level in enumerate(levels) if level == FULL]
        if not full or not made.is_single or Kind.R in made.kinds:
            return None
        request, best, early = self.request, None, list[int]()
        costs = self.pricing.costs(made.placement, made.has_split_backward, apart=True)
        for stage in reversed(full):
            order = recompute(recompute(made, [*early, stage], ahead=True), full)
            timeline = simulate(order, costs)
            reached = measure(timeline, costs, request.objective)
            if reached < value and not over(request, timeline):
                value, best = reached, Ahead(order, costs, reached, (*early, stage))
                early.append(stage)
        return best

    def _enter_searched(self, contest: Contest) -> None:
        """The best order of a contest, as simulated."""
        variant, made = contest.variant, contest.schedule()
        timeline = simulate(made, variant.costs)
        value = measure(timeline, variant.costs, self.request.objective)
        why = ""
        bound, scope = bound_of(self.request, made, variant.costs, self.race.contests)
        if float(bound.value) >= float(value):
            chosen = self._sizes(made) or self._levels(made)
            why = f"no order {scope} is better" + " with its settings" * bool(chosen)
        self.race.finalists.append(Finalist(value, made, variant.costs, contest.name, contest.by))
        self.entrants.append(Entrant.timed(contest.name, variant.v, timeline, value, why))

    def _sizes(self, made: Schedule) -> tuple[int, ...]:
        return self.pricing.sizes(made.placement, made.has_split_backward)

    def _levels(self, made: Schedule) -> tuple[str, ...]:
        levels = self.pricing.levels.get((made.placement.paths, made.has_split_backward), ())
        return tuple(x.name for x in levels)


def _barred(request: Request, made: Schedule, known: bool) -> str:
    """Why the request does not allow a schedule; empty where it does."""
    copies, slices = made.placement.weight_copies, made.placement.slices
    if copies > request.copies:
        return needs_copies(copies, request)
    if slices > request.slices:
        return f"cuts sequences into {slices} slices; allowed: {request.slices}"
    if request.split is not None and made.has_split_backward != request.split:
        return f"{'splits' if made.has_split_backward else 'does not split'} the backward"
    return "" if known else NOT_ASKED


__all__ = ["Progress", "measure", "over", "plan"]
