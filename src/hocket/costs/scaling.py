"""How costs follow the partition of a model: the only place that splits or joins them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from hocket.costs.model import Costs, Number, PerStage, is_list, per_stage, quotient
from hocket.costs.partition import partition
from hocket.deps import ROWS, TIMES, USERS, Kind
from hocket.errors import CostError
from hocket.ir import Placement

# Where costs do not say what they are per: what to add.
SAY = 'add per = "rank" (one rank\'s share of the model) or per = "stage" (as it is) to the costs'


class Rule(NamedTuple):
    """How one cost follows when a stage is split: by the stage's size, by the slice's, or both.

    Joined stages have the sum, or, where the stage's size does not matter, that of the last one.
    """

    by_stage: bool
    by_slice: bool


RULES = {
    **dict.fromkeys((*TIMES, "FB"), Rule(by_stage=True, by_slice=True)),
    "bytes.static": Rule(by_stage=True, by_slice=False),
    **dict.fromkeys(
        ("bytes.activation", "bytes.held", "bytes.gradient"), Rule(by_stage=True, by_slice=True)
    ),
    "bytes.message": Rule(by_stage=False, by_slice=True),
}


def get(costs: Costs, name: str) -> Any:
    """The value of a name in RULES."""
    return getattr(costs.bytes, name[6:]) if name.startswith("bytes.") else getattr(costs, name)


def with_values(costs: Costs, values: dict[str, Any]) -> Costs:
    """The costs with other values of names in RULES, per stage."""
    sizes = {name[6:]: x for name, x in values.items() if name.startswith("bytes.")}
    times = {name: x for name, x in values.items() if not name.startswith("bytes.")}
    return replace(costs, **times, bytes=replace(costs.bytes, **sizes), per="stage")


def split(costs: Costs, parts: Number, slices: int = 1) -> Costs:
    """The costs of stages of the same model split in so many, and of so many slices of a sequence.

    parts: also a fraction, where the costs are numbers.
    """
    if parts == slices == 1:
        return replace(costs, per="stage")
    values = {}
    for name, rule in RULES.items():
        value = get(costs, name)
        share = (parts if rule.by_stage else 1) * (slices if rule.by_slice else 1)
        if isinstance(value, tuple):
            if parts != int(parts):
                raise CostError(
                    f"{name} is a list, which cannot be split into stages of {quotient(1, parts)} "
                    "each; give one number, or the costs of layers"
                )
            value = type(value)(quotient(x, share) for x in value for _ in range(int(parts)))
        elif isinstance(value, Number):
            value = quotient(value, share)
        values[name] = value
    return with_values(costs, values)


def join(costs: Costs, sizes: Sequence[int]) -> Costs:
    """The costs of stages made of so many neighbouring ones (or layers) each."""
    n, ends = sum(sizes), [0, *accumulate(sizes)]

    def joined(name: str, rule: Rule, value: PerStage) -> PerStage:
        row = per_stage(name, value, n)
        if not rule.by_stage:
            return tuple(row[end - 1] for end in ends[1:])
        return tuple(sum(row[a:b]) for a, b in pairwise(ends))

    values: dict[str, Any] = {
        name: joined(name, rule, get(costs, name))
        for name, rule in RULES.items()
        if name != "FB" and get(costs, name) is not None
    }
    if isinstance(costs.FB, Number) and len(set(sizes)) > 1:
        raise CostError(
            'FB is one number, but the stages differ in size; give "sum", "max" or { scale = x }'
        )
    if isinstance(costs.FB, Number):
        values["FB"] = costs.FB * sizes[0]
    return with_values(costs, values)


def read_times(found: Mapping[Kind, Sequence[Number | None]]) -> dict[str, Any]:
    """The times of `Costs`, by field, of those that were read of each kind: per stage, or None.

    A full backward is I and W, and these are half of it each. What else was never read takes no
    time; a kind that may be left out of an order and was never read has no field, and is as F in
    the stages where it was not.
    """

    def filled(row: Iterable[Number | None], other: Sequence[Number]) -> tuple[Number, ...]:
        return tuple(y if x is None else x for x, y in zip(row, other, strict=True))

    i, w = found[Kind.I], found[Kind.W]
    full = filled(found[Kind.B], [(x or 0) + (y or 0) for x, y in zip(i, w, strict=True)])
    half = [quotient(x, 2) for x in full]
    f = filled(found[Kind.F], [0] * len(full))
    more = {cost: found[kind] for kind in USERS if (cost := ROWS[kind].cost)}
    return {
        **{name: filled(row, f) for name, row in more.items() if any(x is not None for x in row)},
        "F": f, "I": filled(i, half), "W": filled(w, half), "B": full,
    }  # fmt: skip


def list_length(costs: Costs) -> int | None:
    """The length of the lists among the costs that follow the partition, or None without one."""
    return next((len(x) for name in RULES if is_list(x := get(costs, name))), None)


def _is_model(costs: Costs) -> bool:
    """True where something depends on what the costs are per: not the built-in times alone."""
    plain = Costs()
    values = [(get(costs, x), get(plain, x)) for x, rule in RULES.items() if rule.by_stage]
    return any(x != y and isinstance(x, Number | tuple) for x, y in values)


def per_of(costs: Costs, placement: Placement) -> str:
    """What the costs are per, for this placement: as they say, or as the length of lists tells.

    Raises: CostError where nothing tells and the answer would depend on it.
    """
    if costs.per is not None:
        return costs.per
    if not _is_model(costs):
        return "rank"
    n, v, slices = placement.n_stages, placement.stages_per_rank, placement.slices
    if slices == 1:
        length = list_length(costs)
        is_cycle = any(isinstance(get(costs, x), tuple) for x in RULES) and length is None
        if length is not None and length * v == n:
            return "rank"
        if v == 1 or length is not None or is_cycle:
            return "stage"
    what = f"{float(v):g} stages per rank" if v != 1 else f"sequences in {slices} slices"
    raise CostError(f"the costs do not say what they are per, but the schedule has {what}; {SAY}")


def fitted(costs: Costs, placement: Placement) -> Costs:
    """The costs of each stage of a placement.

    Costs of layers are joined to stages so that the largest load of a rank is as small as it can
    be. Raises: CostError.
    """
    per = per_of(costs, placement)
    if per == "stage":
        return costs if costs.per == "stage" else replace(costs, per="stage")
    if per == "layer":
        layers = join(costs, layer_partition(costs, placement))
        return split(layers, 1, placement.slices)
    v, length = placement.stages_per_rank, list_length(costs)
    if length is not None and length * v != placement.n_stages:
        raise CostError(
            f"the costs are per rank in lists of {length}, but the schedule has "
            f"{placement.n_stages} stages, {float(v):g} per rank"
        )
    return split(costs, v, placement.slices)


def fitted_together(costs: Costs, placements: Sequence[Placement]) -> list[Costs]:
    """The costs of each of several placements of one model, whichever comes first.

    Factors of slices are for those that have slices. Raises: CostError where costs per stage are
    those of another model for each placement.
    """

    def of_one(placement: Placement) -> Costs:
        return replace(costs, slice=None) if placement.slices == 1 and sliced else costs

    sliced = any(placement.slices > 1 for placement in placements)
    n = {placement.n_stages for placement in placements}
    slices = {placement.slices for placement in placements}
    pers = {per_of(costs, placement) for placement in placements}
    is_same = len(slices) == 1 and (len(n) == 1 or list_length(costs) is not None)
    if pers == {"stage"} and not is_same:
        raise CostError(
            "the costs are per stage, but these schedules have "
            f"{' and '.join(map(str, sorted(n)))} stages"
            + f" in {' and '.join(map(str, sorted(slices)))} slices" * (len(slices) > 1)
            + ', so they would be different models; use per = "rank"'
        )
    return [of_model(of_one(placement), placement) for placement in placements]


def of_model(costs: Costs, placement: Placement) -> Costs:
    """The costs of each stage of a placement, of a model in as many parts as the lists have values.

    Raises: CostError where its parts neither are parts of the stages nor have them as parts.
    """
    length, per = list_length(costs), per_of(costs, placement)
    if length is None or per == "layer" or (per == "stage" and placement.slices > 1):
        return fitted(costs, placement)
    return recut(costs, length, placement.n_stages, placement.slices)


def recut(costs: Costs, before: int, after: int, slices: int = 1) -> Costs:
    """The costs per stage of the same model in another number of stages, and more slices.

    Raises: CostError where the stages do not nest.
    """
    if after % before == 0:
        return split(costs, after // before, slices)
    if before % after:
        raise CostError(f"costs of {before} stages do not fit {after}: neither divides the other")
    return split(join(costs, [before // after] * after), 1, slices)


def check_choice(costs: Costs, stages: set[int], *, v: Sequence[int], slices: int) -> None:
    """Raises CostError where stages are chosen from several numbers, but costs fit any as they are.

    stages, v: the numbers of stages, and per rank, that may be chosen.
    """
    is_open = len(stages) > 1 or slices > 1
    if list_length(costs) is not None or not _is_model(costs):
        return
    if costs.per == "stage" and is_open:
        raise CostError(
            "the costs are per stage, but the number of stages is not fixed, so plans would be of "
            'different models; use per = "rank", or allow one -p and one -v only'
        )
    if costs.per is None and (is_open or set(v) != {1}):
        raise CostError(f"the costs do not say what they are per, but stages are chosen; {SAY}")


def refitted(costs: Costs, before: Placement, after: Placement) -> Costs:
    """The costs of each stage of a placement, of the model whose costs these are on another one.

    Raises: CostError where their stages or slices do not nest.
    """
    per = per_of(costs, before)
    if after.slices == 1 < before.slices:
        costs = replace(costs, slice=None)
    if per != "stage":
        return fitted(replace(costs, per=per), after)
    if after.slices % before.slices:
        raise CostError(f"costs of {before.slices} slices do not fit {after.slices}")
    return recut(costs, before.n_stages, after.n_stages, after.slices // before.slices)


def for_ranks(costs: Costs, before: int, after: int) -> Costs:
    """The costs per rank of a model on another number of ranks. Raises: CostError for lists."""
    if before == after:
        return costs
    return replace(split(costs, quotient(after, before)), per="rank")


# --- costs of layers -------------------------------------------------------------------------


def n_layers(layers: Costs) -> int:
    """The number of layers that per-layer costs are given for.

    Raises: CostError where no list says it.
    """
    length = list_length(layers)
    if length is None:
        raise CostError("the costs of layers must be lists, one value per layer")
    return length


def layer_loads(layers: Costs) -> list[Number]:
    """Time of forward and backward of each layer."""
    n = n_layers(layers)
    f, b = per_stage("F", layers.F, n), per_stage("B", layers.full_backward, n)
    return [x + y for x, y in zip(f, b, strict=True)]


def layer_partition(layers: Costs, placement: Placement, **how: Any) -> tuple[int, ...]:
    """Layers of each stage, with the smallest possible largest load of a rank; how: `room`."""
    owners = placement.stages_of_rank
    return partition(layer_loads(layers), placement.n_stages, owners, speed=layers.speed, **how)
