"""A plan told in text and JSON."""

from __future__ import annotations

from typing import Any

from hocket.planner.request import OBJECTIVES, Plan
from hocket.search.problem import saves
from hocket.tables import format_bytes, format_time, in_one_unit, plain, table

_ROWS = 16


def as_json(plan: Plan) -> dict[str, Any]:
    """The contract of `plan --json`: times in `unit`, in_flight as in `compare`."""
    from hocket.text import dumps

    s, request = plan.schedule, plan.request
    return {
        "schedule": s.name, "p": s.p, "m": request.m, "v": max(1, s.placement.n_stages // s.p),
        "unit": plan.costs.unit, "per": request.costs.per or "stage",
        "objective": request.objective,
        "objective_means": OBJECTIVES[request.objective], "value": plain(plan.value),
        "makespan": plain(plan.makespan), "span": plain(plan.span),
        "lower_bound": plain(plan.bound.value), "lower_bound_argument": plan.bound.argument,
        "gap": plan.gap, "floor": plain(plan.floor.value), "proven": plan.proven,
        "found_by": plan.found_by, "seconds": plan.seconds, "seed": request.seed,
        "interrupted": plan.interrupted,
        "fused_slots": "searched for"
        if saves(plan.costs) and not misses_slots_of_two(plan)
        else "registered schedules only",
        "weights": s.placement.weight_copies, "recompute": list(plan.recompute),
        "layers": list(plan.layers),
        "competitors": [{k: plain(x) for k, x in e._asdict().items()} for e in plan.entrants],
        "history": [[seconds, plain(value)] for seconds, value in plan.history],
        "sched": dumps(s),
        "ahead": plan.ahead and {
            "stages": sorted(plan.ahead.stages), "value": plain(plan.ahead.value),
            "sched": dumps(plan.ahead.schedule),
        },
    }  # fmt: skip


FUSED = (
    "a forward and a backward in one slot are cheaper here than apart, but only registered "
    "schedules have such slots: the search makes none where ranks share cores, or for the sake of "
    "p2p_overhead"
)


def misses_slots_of_two(plan: Plan) -> bool:
    """True where slots of a forward and a backward may be cheaper, but are not searched for."""
    costs = plan.costs
    return costs.p2p_overhead is not None or (saves(costs) and costs.shares_cores(plan.schedule.p))


def as_text(plan: Plan) -> str:
    """The plan for a reader: what it is, how good it can be, who loses and why."""
    s, request = plan.schedule, plan.request
    unit = plan.costs.unit
    out = [
        f"{s.name}: p={s.p} m={request.m}, {_shape(plan)}; found by {plan.found_by}",
        f"{request.objective} {format_time(plan.value, unit)} ({OBJECTIVES[request.objective]})",
        f"makespan {format_time(plan.makespan, unit)}, span {format_time(plan.span, unit)}",
        _bound_line(plan),
    ]
    if plan.interrupted:
        out.append("ended by an interrupt: this is the best so far")
    if misses_slots_of_two(plan):
        out.append(FUSED)
    if plan.costs.shares_cores(s.p):
        out.append(
            f"{s.p} ranks share {plan.costs.cores} cores: all are timed so, but the search looks "
            "for orders as if each had its own"
        )
    if plan.recompute:
        out.append(f"recomputed, by stage: {' '.join(plan.recompute)}")
    if plan.ahead:
        less = 1 - float(plan.ahead.value) / float(plan.value)
        stages = " ".join(map(str, sorted(plan.ahead.stages)))
        out.append(
            f"with R ahead of the gradient in stages {stages}: {request.objective} "
            f"{format_time(plan.ahead.value, unit)}, {less:.1%} less (--json has this order)"
        )
    if plan.layers:
        out.append(f"layers of each stage: {' '.join(map(str, plan.layers))}")
    out += ["", _table(plan), "", f"{plan.seconds:.1f} s, seed {request.seed}"]
    return "\n".join(out)


def _shape(plan: Plan) -> str:
    placement = plan.schedule.placement
    paths = [" ".join(str(q) for q in path) for path in placement.paths]
    shown = " | ".join(p if len(p) <= 40 else p[:37] + "..." for p in paths)
    return f"stages on ranks {shown}"


def _bound_line(plan: Plan) -> str:
    unit = plan.costs.unit
    settings = {"partition of layers": plan.layers, "recomputation": plan.recompute}
    chosen = " and ".join(f"this {name}" for name, values in settings.items() if values)
    line = f"no order {plan.scope}{f' with {chosen}' if chosen else ''} is below "
    line += f"{format_time(plan.bound.value, unit)} ({plan.bound.argument}): "
    best = "this is the best of these" if chosen else "this is optimal"
    line += best if plan.gap <= 0 else f"this is within {plan.gap:.2%} of that"
    if chosen:
        line += "; other choices were tried, not ruled out"
    if plan.floor.value < plan.bound.value and not plan.proven:
        own = ", each with its own," if chosen else ""
        line += f"; of all placements tried{own} none is below "
        line += format_time(plan.floor.value, unit)
    return line


def _table(plan: Plan) -> str:
    shown, sizes = plan.entrants[:_ROWS], plan.costs.bytes
    rows = [
        {
            "candidate": e.name, "p": e.p, "v": e.v, "makespan": e.makespan, "span": e.span,
            "in flight": e.in_flight,
            "memory": None if e.peak_bytes is None else format_bytes(e.peak_bytes, sizes.unit),
            "weights": f"{e.weights:g}x" if e.weights else "", "why not": e.why,
        }
        for e in shown
    ]  # fmt: skip
    rows, unit = in_one_unit(rows, ["makespan", "span"], plan.costs.unit)
    columns = [c for c in rows[0] if sizes or c != "memory"] if rows else ["candidate"]
    more = len(plan.entrants) - len(shown)
    left = f"\n... and {more} more (--json has all)" if more > 0 else ""
    return table(rows, columns) + left + (f"\n(times in {unit})" if unit else "")
