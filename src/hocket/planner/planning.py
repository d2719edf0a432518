"""From a request to a plan: candidates, search, bound, and why the others lose."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hocket.checker import check
from hocket.costs import Costs, Number
from hocket.errors import CostError, PlanError, ScheduleError
from hocket.ir import Array, Placement, Queue, Schedule
from hocket.planner.infeasible import lacking, nothing_fits
from hocket.planner.partition_search import adapt
from hocket.planner.request import Entrant, Plan, Request, limits
from hocket.planner.variants import (
    NOT_ASKED,
    Pricing,
    Variant,
    named,
    needs_copies,
    priced,
    variants,
)
from hocket.search.fuse import Fusing, Pairing, race, saves
from hocket.search.problem import FULL, SPLIT, problem
from hocket.search.problem_bounds import Bound, best_bound, crowded_bound, is_crowded
from hocket.search.search import Arena, Found, Search
from hocket.simulator import simulate
from hocket.timeline import Timeline

_RELAXED = 20.0  # seconds for the bound of ranks alone
_TIMED = 8  # orders of list scheduling that are timed again where ranks share cores
_UNSURE = 0.03  # of a prediction where ranks share cores
_SOLVABLE = 800  # actions up to which the exact solver is worth starting
_FOR_SETTINGS = 0.2  # share of the time limit for the cut of layers and what is recomputed
FOR_FUSING = 0.5  # share of the time limit that slots of two may take beyond it
FOR_NAMES = 0.3  # share of the time limit after which no more options of named schedules are tried


class Progress(NamedTuple):
    """What a search has reached: seconds, the best value, the variant it looks at."""

    seconds: float
    value: Number
    what: str


Finalist = tuple[Number, Schedule, Costs, str]  # value, order, its costs, its name
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
    return _Planning(request, known, progress).run()


@dataclass(eq=False)
class _Contest:
    """A variant in the race: its bound, its search, and its best order: how good, found by whom.

    The search knows nothing of shared cores; where ranks share them, what it finds is timed again.
    """

    variant: Variant
    objective: str
    bound: Bound
    search: Search
    order: Array = field(default_factory=lambda: np.empty(0))
    value: Number = math.inf
    by: str = ""

    def offer(self, found: Found, by: str) -> None:
        """Takes over an order where it is better."""
        value = self._value(found)
        if float(value) < float(self.value):
            self.order, self.value, self.by = found.order, value, by

    def raise_bound(self, bound: Bound) -> None:
        """Takes over a bound where it is higher."""
        if float(bound.value) > float(self.bound.value):
            self.bound = bound

    def _value(self, found: Found) -> Number:
        asked, costs = self.variant.problem, self.variant.costs
        if not is_crowded(asked):
            return asked.ticks.value(found.cost)
        return measure(
            simulate(asked.schedule(found.order, "planned"), costs), costs, self.objective
        )


@dataclass(eq=False)
class _Planning:
    """State of one call of `plan`."""

    request: Request
    known: Sequence[tuple[str, Schedule]]
    progress: Watcher | None
    interrupted: bool = False
    entrants: list[Entrant] = field(default_factory=list)
    schedules: list[Finalist] = field(default_factory=list)
    history: list[tuple[float, Number]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.pricing = Pricing(self.request)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def run(self) -> Plan:
        request = self.request
        choices = self._choices()
        contests: list[_Contest] = []
        placements = {(c.p, frozenset(c.placement.paths)) for c in choices}
        try:
            for name, made in self.known:
                v = max(1, made.placement.n_stages // made.p)
                self._enter(name, v, made, placements)
            if request.named and not self.interrupted:
                self._enter_named(placements)
            for choice in choices:
                self._enter_contest(choice, contests)
                if self.interrupted and contests:
                    break
        except KeyboardInterrupt:
            if not contests and not self.schedules:
                raise
            self.interrupted = True
        if not contests and not self.schedules:
            raise PlanError(nothing_fits(request, choices, self.entrants))
        self._note(contests, "candidates")
        if request.search and contests and not self.interrupted:
            self._race(contests)
        if request.solver and contests and not self.interrupted:
            try:
                self._solve(contests)
            except KeyboardInterrupt:
                self.interrupted = True
        return self._answer(contests)

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

    def _enter_named(self, placements: Placements) -> None:
        """Every registered schedule that the request allows, simulated.

        After a third of the time limit only the simple ones are, without options.
        """
        late = self.request.time_limit * FOR_NAMES
        for name, p, v, made in named(self.request, lambda: self.seconds > late):
            if isinstance(made, str):
                self.entrants.append(_absent(name, p, v, made))
            else:
                self._enter(name, v, made, placements)

    def _enter(self, name: str, v: int, made: Schedule, placements: Placements) -> None:
        """One schedule, unless it has more than one queue a rank."""
        if not any(queue.stream for queue in made.queues):
            known = (made.p, frozenset(made.placement.paths)) in placements
            known |= len(made.placement.paths) > 2 and "mirrored" in self.request.shapes
            self.entrants.append(self._entrant(name, made, v, known))

    def _entrant(self, name: str, made: Schedule, v: int, known: bool) -> Entrant:
        request = self.request
        copies = made.placement.weight_copies
        barred = _barred(request, made, known)
        if barred:
            return _absent(name, made.p, v, barred)
        try:
            costs = self.pricing.costs(made.placement, made.has_split_backward)
            timeline = simulate(made, costs)
        except (CostError, PlanError, ScheduleError) as error:
            return _absent(name, made.p, v, str(error).splitlines()[0])
        value = measure(timeline, costs, request.objective)
        why = over(request, timeline, v)
        if not why:
            self.schedules.append((value, made, costs, name))
        return Entrant(
            name=name, p=made.p, v=v, weights=copies, makespan=timeline.makespan,
            span=timeline.span, value=None if why else value, in_flight=timeline.in_flight(v),
            peak_bytes=max(r.peak_bytes for r in timeline.ranks), why=why,
        )  # fmt: skip

    def _enter_contest(self, variant: Variant, out: list[_Contest]) -> None:
        """Adds a variant that fits, with what list scheduling and the named ones give it."""
        asked = variant.problem
        arena = Arena(asked, self.request.objective)
        orders = (asked.order_of(made) for _, made, _, _ in self.schedules)
        starts = arena.starts([order for order in orders if order is not None])
        if not starts:
            self.entrants.append(_absent(variant.name, variant.p, variant.v, lacking(variant)))
            return
        bound = best_bound(asked, self.request.objective)
        goal = float(bound.value) * (asked.ticks.scale if asked.ticks.exact else 1)
        search = Search(arena, starts, goal=goal, seed=self.request.seed)
        contest = _Contest(variant, self.request.objective, bound, search)
        contest.raise_bound(crowded_bound(asked, self.request.objective))
        for found in starts[: _TIMED if is_crowded(asked) else 1]:
            contest.offer(found, "list scheduling")
        out.append(contest)

    # --- the race -----------------------------------------------------------------------

    def _race(self, contests: list[_Contest]) -> None:
        """Rounds for those that can still win; the slower half leaves after each lap."""
        threads = self.request.threads or os.cpu_count() or 1
        workers = ThreadPoolExecutor(threads)
        try:
            self._laps(contests, workers)
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            workers.shutdown(wait=True, cancel_futures=True)

    def _laps(self, contests: list[_Contest], workers: Executor) -> None:
        field_ = sorted(contests, key=lambda c: float(c.value))
        rounds = self.request.rounds
        for lap in range(rounds):
            best = min([float(c.value) for c in contests] + [float(x[0]) for x in self.schedules])
            field_ = [c for c in field_ if not c.search.done and float(c.bound.value) < best]
            if not field_:
                return
            for contest in field_:
                if self._is_over and (lap or contest is not field_[0]):
                    return
                if contest.search.round(workers):
                    contest.offer(contest.search.best, "search")
                self._note(contests, contest.variant.name)
            field_.sort(key=lambda c: float(c.value))
            if lap % 2 and len(field_) > 1:
                field_ = field_[: (len(field_) + 1) // 2]

    @property
    def _is_over(self) -> bool:
        """True after the time limit, or when nothing better came for as long as one waits."""
        request, waited = self.request, self.seconds - self.history[-1][0]
        bored = request.patience is not None and waited > request.patience
        return bored or self.seconds > request.time_limit

    def _solve(self, contests: list[_Contest]) -> None:
        """Lets the exact solver prove or improve the variants that are small and may still win."""
        from hocket.search.exact import solve

        threads = self.request.threads or os.cpu_count() or 1
        for contest in sorted(contests, key=lambda c: float(c.value)):
            best = min([float(c.value) for c in contests] + [float(x[0]) for x in self.schedules])
            asked = contest.variant.problem
            left = self.request.solver_time - max(0.0, self.seconds - self.request.time_limit)
            if contest.search.done or float(contest.bound.value) >= best:
                continue
            if left <= 0:
                break
            self._relax(contest, min(left / 2, _RELAXED), threads)
            left = self.request.solver_time - max(0.0, self.seconds - self.request.time_limit)
            if asked.n > _SOLVABLE or contest.search.done or left <= 0:
                continue
            solved = solve(
                asked, self.request.objective, contest.search.best, bound=contest.search.goal,
                seconds=left, threads=threads, seed=self.request.seed,
            )  # fmt: skip
            contest.search.add(solved.found)
            contest.offer(solved.found, "exact solver")
            if solved.bound > contest.search.goal:
                ticks = solved.bound + 1e-6 if asked.ticks.exact else solved.bound
                contest.raise_bound(Bound(asked.ticks.value(ticks), "proven by the exact solver"))
                contest.search.goal = solved.bound

    def _relax(self, contest: _Contest, seconds: float, threads: int) -> None:
        """Raises the bound to what each rank alone needs, if that is more."""
        from hocket.search.exact import relaxed

        search, asked = contest.search, contest.variant.problem
        low, why = relaxed(
            asked, self.request.objective, top=search.best.cost, seconds=seconds, threads=threads
        )
        if low > search.goal:
            ticks = math.floor(low + 1e-6) if asked.ticks.exact else low
            contest.raise_bound(Bound(asked.ticks.value(ticks), why))
            search.goal = low

    def _note(self, contests: list[_Contest], what: str) -> None:
        values = [c.value for c in contests] + [x[0] for x in self.schedules]
        best = min(values, key=float)
        if not self.history or best < self.history[-1][1]:
            self.history.append((self.seconds, best))
        if self.progress is not None:
            self.progress(Progress(self.seconds, best, what))

    # --- the answer ---------------------------------------------------------------------

    def _answer(self, contests: list[_Contest]) -> Plan:
        request = self.request
        self._fuse(contests)
        finalists = [*self.schedules]
        for c in contests:
            made = c.variant.problem.schedule(c.order, "planned")
            value = measure(simulate(made, c.variant.costs), c.variant.costs, request.objective)
            entrant = self._searched(c, made, value)
            finalists.append((value, made, c.variant.costs, entrant.name))
            self.entrants.append(entrant)
        value, made, costs, name = self._simplest(finalists)
        check(made).raise_if_bad()
        timeline = simulate(made, costs)
        bound = self._bound_of(made, contests)
        floor = min([*map(self._floor_of, contests), bound], key=lambda b: float(b.value))
        return Plan(
            request=request, schedule=made, costs=costs, value=value, makespan=timeline.makespan,
            span=timeline.span, bound=bound, floor=floor,
            found_by=name.partition(": ")[0], entrants=tuple(_ranked(self.entrants, value, name)),
            history=tuple(self.history), seconds=self.seconds, interrupted=self.interrupted,
            recompute=self._levels(made), layers=self._sizes(made),
            finalists=tuple(_best_of(finalists, made)),
        )  # fmt: skip

    def _simplest(self, finalists: list[Finalist]) -> Finalist:
        """The best one, or of those within the margin of it the one with least to go wrong."""
        best = min(finalists, key=lambda x: (float(x[0]), x[1].placement.weight_copies))
        margin = self.request.margin
        if margin is None:
            margin = _UNSURE if best[2].shares_cores(best[1].p) else 0.0
        if not margin:
            return best

        def effort(one: Finalist) -> tuple[float, float, bool, float]:
            s = one[1]
            stages = s.placement.n_stages / s.p
            return s.placement.weight_copies, stages, s.has_split_backward, float(one[0])

        most = float(best[0]) * (1 + margin)
        return min((x for x in finalists if float(x[0]) <= most), key=effort)

    def _sizes(self, made: Schedule) -> tuple[int, ...]:
        return self.pricing.sizes(made.placement, made.has_split_backward)

    def _levels(self, made: Schedule) -> tuple[str, ...]:
        levels = self.pricing.levels.get((made.placement.paths, made.has_split_backward), ())
        return tuple(x.name for x in levels)

    def _searched(self, contest: _Contest, made: Schedule, value: Number) -> Entrant:
        timeline = simulate(made, contest.variant.costs)
        why = ""
        if float(contest.bound.value) >= float(value):
            chosen = self._sizes(made) or self._levels(made)
            why = "no order of its placement is better" + " with its settings" * bool(chosen)
        return Entrant(
            name=f"{contest.by}: {contest.variant.name}", p=made.p, v=contest.variant.v,
            weights=made.placement.weight_copies, makespan=timeline.makespan, span=timeline.span,
            value=value, in_flight=timeline.in_flight(contest.variant.v),
            peak_bytes=max(r.peak_bytes for r in timeline.ranks), why=why,
        )  # fmt: skip

    def _fuse(self, contests: list[_Contest]) -> None:
        """Adds the best orders with slots of two, where FB may make these cheaper than two slots.

        From then on the bounds are for orders with such slots.
        """
        request = self.request
        some = [c for c in contests if saves(c.variant.costs)]
        for c in some:
            c.bound = self._floor_of(c)
        some = [c for c in some if c.variant.costs.p2p_overhead is None]
        some = [c for c in some if not is_crowded(c.variant.problem)]
        if not some or self.interrupted:
            return
        began, most = time.monotonic(), request.time_limit * FOR_FUSING
        rounds = request.rounds if request.search else 0
        workers = ThreadPoolExecutor(request.threads or os.cpu_count() or 1)
        fields: list[tuple[Variant, Fusing]] = []
        try:
            for c in sorted(some, key=lambda c: float(c.value)):
                if time.monotonic() < began + most / 2:
                    fields.append((c.variant, self._fusing(c)))
            race([f for _, f in fields], workers, rounds=rounds, deadline=began + most)
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            workers.shutdown(wait=True, cancel_futures=True)
        for variant, found in fields:
            made = None if found.best is None else found.pairing.schedule(found.best, "planned")
            if made is not None and not made.is_single:
                name = f"slots of two: {variant.name}"
                self.entrants.append(self._entrant(name, made, variant.v, True))
        with suppress(KeyboardInterrupt):  # all that there was to stop has ended
            self._note(contests, "slots of two")

    def _fusing(self, contest: _Contest) -> Fusing:
        """The search for slots of two, from the best single orders and the registered ones."""
        asked = contest.variant.problem
        listed = [found.order for _, found in contest.search.arena.policies[:3]]
        starts = [asked.schedule(order, "planned") for order in (contest.order, *listed)]
        starts += [made for _, made, _, _ in self.schedules]
        pairing = Pairing.of(asked, self.request.objective)
        return Fusing(pairing, starts, seed=self.request.seed)

    def _floor_of(self, contest: _Contest) -> Bound:
        """The bound of a contest for all orders, those with slots of two among them."""
        if contest.variant.costs.p2p_overhead is None and not saves(contest.variant.costs):
            return contest.bound
        return Pairing.of(contest.variant.problem, self.request.objective).bound

    def _bound_of(self, made: Schedule, contests: list[_Contest]) -> Bound:
        """The bound of the placement of the answer."""
        costs = self.pricing.costs(made.placement, made.has_split_backward)
        for c in contests:
            same = c.variant.placement == made.placement
            if same and c.variant.problem.order_of(made) is not None:
                return c.bound
        if saves(costs) or (costs.p2p_overhead is not None and not made.is_single):
            if made.placement.slices > 1:
                return Bound(0, "no bound of slices with slots of two actions")
            kinds = SPLIT if made.has_split_backward else FULL
            asked = problem(made.placement, costs, kinds)
            return Pairing.of(asked, self.request.objective).bound
        from hocket.search.bounds import lower_bounds

        if self.request.objective == "makespan":
            return max(lower_bounds(made, costs), key=lambda b: float(b.value))
        return Bound(0, "no bound of a span with slots of two actions")


def _best_of(
    finalists: list[Finalist], answer: Schedule, most: int = 6
) -> list[tuple[str, Schedule, Costs]]:
    """The best few, the answer first."""
    ranked = sorted(finalists, key=lambda x: (x[1] is not answer, float(x[0])))
    return [(by, made, costs) for _, made, costs, by in ranked[:most]]


# --- measures ------------------------------------------------------------------------------------


def measure(timeline: Timeline, costs: Costs, objective: str) -> Number:
    """The value of an objective."""
    if objective == "makespan":
        return timeline.makespan
    if objective == "span":
        return timeline.span
    return period(timeline.schedule, costs)


def period(schedule: Schedule, costs: Costs, repeats: int = 4) -> Number:
    """Time from one step to the next when the order repeats without a barrier."""
    ends = [simulate(repeated(schedule, n), costs).makespan for n in (repeats - 1, repeats)]
    return ends[1] - ends[0]


def repeated(schedule: Schedule, times: int) -> Schedule:
    """The order several times over, each with microbatches of its own."""
    from hocket.ir import Line, encode, kinds_of, mbs_of, stages_of

    lines = []
    placement = schedule.placement
    for q in range(len(schedule.queues)):
        a, b = int(schedule.starts[q]), int(schedule.starts[q + 1])
        codes = schedule.codes[schedule.slots[a] : schedule.slots[b]]
        widths = schedule.widths[a:b]
        kinds, stages, mbs = kinds_of(codes), stages_of(codes), mbs_of(codes)
        parts = [encode(kinds, stages, mbs + i * placement.m) for i in range(times)]
        lines.append(Line(np.concatenate(parts), np.tile(widths, times)))
    longer = Placement(placement.paths, placement.path_of * times, placement.slices)
    queues = dict(zip(schedule.queues, lines, strict=True))
    return Schedule.from_lines(schedule.name, longer, queues)


# --- why not -------------------------------------------------------------------------------------


def _absent(name: str, p: int, v: int, why: str) -> Entrant:
    return Entrant(name, p, v, 0.0, None, None, None, None, None, why)


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


def over(request: Request, timeline: Timeline, v: int) -> str:
    """Why a schedule does not fit the limits; empty where it does."""
    p = timeline.schedule.p
    slices = timeline.schedule.placement.slices
    pairs, given = limits(request.in_flight, p, "in_flight"), limits(request.memory, p, "memory")
    out = []
    for rank in timeline.ranks:
        if pairs is not None and rank.peak_in_flight > float(pairs[rank.rank]) * v * slices + 1e-9:
            held = rank.peak_in_flight / v / slices
            excess = held / float(pairs[rank.rank])
            out.append((excess, f"holds {held:g} in flight on rank {rank.rank}; the limit is "
                        f"{float(pairs[rank.rank]):g}"))  # fmt: skip
        if given is not None and rank.peak_bytes > float(given[rank.rank]) * (1 + 1e-9):
            excess = rank.peak_bytes / float(given[rank.rank])
            out.append((excess, f"needs {rank.peak_bytes:g} bytes on rank {rank.rank}; the limit "
                        f"is {float(given[rank.rank]):g}"))  # fmt: skip
    return max(out)[1] if out else ""


def _ranked(entrants: list[Entrant], value: Number, answer: str) -> list[Entrant]:
    """Best first; of a name with several options the best; each with why it is not the answer."""
    best: dict[tuple[str, int, int], Entrant] = {}
    for e in entrants:
        key = (e.name if ": " in e.name else e.name.partition(":")[0], e.p, e.v)
        old = best.get(key)
        if old is None or _order(e) < _order(old):
            best[key] = e
    out = []
    for e in sorted(best.values(), key=_order):
        if e.value is not None:
            above = float(e.value) / float(value) - 1 if value else 0.0
            slower = f"{above:.1%} slower" if above > 5e-4 else "slower" if above > 0 else ""
            faster = f"{-above:.1%} faster, but within the margin and less simple"
            word = slower or ("the plan" if e.name == answer else faster if above else "as good")
            e = e._replace(why=f"{word}; {e.why}" if e.why else word)
        out.append(e)
    return out


def _order(e: Entrant) -> tuple[bool, float, str]:
    value = e.value if e.value is not None else e.makespan
    return e.value is None, float("inf") if value is None else float(value), e.name


__all__ = ["Found", "Progress", "measure", "over", "period", "plan", "repeated"]
