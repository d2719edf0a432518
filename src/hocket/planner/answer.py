"""The answer of a plan: the order to take, what none can beat, and why the others lose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hocket.costs import Costs, Number
from hocket.ir import Schedule
from hocket.planner.race import Contest, Finalist
from hocket.planner.request import Entrant, Request
from hocket.planner.variants import problem_of
from hocket.search.bounds import Bound, lower_bounds, work_bound
from hocket.search.problem import FULL, SPLIT, Problem, saves
from hocket.search.problem_bounds import best_bound, crowded_bound

_UNSURE = 0.03  # of a prediction where ranks share cores


def simplest(finalists: Sequence[Finalist], margin: float | None) -> Finalist:
    """The best one, or of those within the margin of it the one with least to go wrong."""
    best = min(finalists, key=lambda x: (float(x.value), x.schedule.placement.weight_copies))
    if margin is None:
        margin = _UNSURE if best.costs.shares_cores(best.schedule.p) else 0.0
    if not margin:
        return best

    def effort(one: Finalist) -> tuple[float, float, bool, float]:
        placement = one.schedule.placement
        stages = placement.n_stages / one.schedule.p
        split = one.schedule.has_split_backward
        return placement.weight_copies, stages, split, float(one.value)

    most = float(best.value) * (1 + margin)
    return min((x for x in finalists if float(x.value) <= most), key=effort)


def best_of(
    finalists: Sequence[Finalist], answer: Schedule, most: int = 6
) -> list[tuple[str, Schedule, Costs]]:
    """The best few, the answer first."""
    ordered = sorted(finalists, key=lambda x: (x.schedule is not answer, float(x.value)))
    return [(x.name, x.schedule, x.costs) for x in ordered[:most]]


# --- what no order can beat -----------------------------------------------------------------------


def bound_of(
    request: Request, made: Schedule, costs: Costs, contests: Sequence[Contest]
) -> tuple[Bound, str]:
    """The bound of the answer, and of which orders it is one.

    These are all orders of its placement with its costs that the request allows: backwards split,
    full or mixed, unless all shall be full; slots of a forward and a backward too where FB makes
    these cheaper. Of a sequence in slices they are those of the answer's own slots.
    """
    if made.placement.slices > 1:
        some = lower_bounds(made, costs) if request.objective == "makespan" else ()
        found = max((*some, work_bound(made, costs)), key=lambda b: float(b.value))
        return found, "of these slots"
    kinds = FULL if request.split is False else SPLIT
    fused = saves(costs) or (costs.p2p_overhead is not None and not made.is_single)
    v = max(1, made.placement.n_stages // made.p)
    asked = problem_of(request, made.placement, costs, kinds, v=v, fused=fused)
    bounds = [c.bound for c in contests if _same(c.variant.problem, asked)]
    bounds = bounds or [best_bound(asked, request.objective)]
    bounds += [x for x in [crowded_bound(asked, request.objective)] if x is not None]
    text = "of this placement" + " with full backwards" * (kinds == FULL)
    if costs.p2p_overhead is not None and not fused:
        text += " without fused forward-backward slots"
    return max(bounds, key=lambda b: float(b.value)), text


def _same(one: Problem, other: Problem) -> bool:
    """True where a bound of one problem is one of the other."""
    return (one.placement, one.costs, one.kinds, one.fused) == (
        other.placement, other.costs, other.kinds, other.fused,
    )  # fmt: skip


def with_all_slots(asked: Problem) -> Problem:
    """The problem with fused forward-backward slots wherever a simulation has them cheaper."""
    cheaper = asked.costs.p2p_overhead is not None or saves(asked.costs)
    return replace(asked, fused=True) if cheaper and not asked.fused else asked


def floor_of(contest: Contest) -> Bound:
    """The bound of a contest for all orders, fused slots among them where they may be cheaper."""
    asked = with_all_slots(contest.variant.problem)
    if asked is contest.variant.problem:
        return contest.bound
    return best_bound(asked, contest.objective)


# --- why not --------------------------------------------------------------------------------------


def ranked(entrants: Sequence[Entrant], value: Number, answer: str) -> list[Entrant]:
    """Best first; of a family the best; each with why it is not the answer."""
    best: dict[tuple[str, int, int], Entrant] = {}
    for e in entrants:
        key = (e.family or e.name, e.p, e.v)
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
