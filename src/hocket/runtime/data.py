"""A batch on its way through the stages: cut, weighed, put into them, and its loss summed."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from hocket.errors import RunError
from hocket.runtime.execute import Execution
from hocket.runtime.stage import Stage
from hocket.runtime.transport import Wire
from hocket.runtime.values import keywords, map_tensors, tensors_of

Arguments = Mapping[str, Any] | list[Mapping[str, Any]]
REPLICATED = "; name a part that every microbatch gets whole in replicated="


class Batch(NamedTuple):
    """What a step is given; `weights` is None where each microbatch weighs as its rows do.

    replicated: the places (of a tuple) or keys (of a dict) of inputs that are not rows, and keys of
    arguments. scale: by which the gradients are larger. arguments: what stages get beside inputs,
    a list where they are split already.
    """

    inputs: Any
    targets: Any
    weights: Sequence[float] | None = None
    replicated: Collection[Any] = ()
    scale: float = 1.0
    arguments: Arguments | None = None

    @property
    def ready(self) -> bool:
        """Whether its microbatches are made already, or weighed."""
        given = isinstance(self.inputs, list) or isinstance(self.targets, list)
        return given or self.weights is not None

    @property
    def whole_inputs(self) -> list[Any]:
        """The places or keys of inputs that are not rows."""
        return [key for key in self.replicated if key not in (self.arguments or {})]


def joined(batches: Sequence[Sequence[Any]], m: int, slices: int, device: torch.device) -> Batch:
    """Several batches as the microbatches of one, which weigh as they do in their own."""
    inputs: list[Any] = []
    targets: list[Any] = []
    weights: list[float] = []
    arguments: list[Any] = []
    for x, y, *more in batches:
        rest = more[0] if more else None
        arguments += microbatches(rest, m, "arguments", device, slices) if rest else [{}] * m
        if x is not None:
            inputs += microbatches(x, m, "inputs", device, slices)
        if y is not None:
            values = microbatches(y, m, "targets", device, slices)
            targets += values
            weights += shares(values, None, slices)
    return Batch(inputs or None, targets or None, weights or None, arguments=arguments)


def load(batch: Batch, execution: Execution, device: torch.device) -> None:
    """Puts a rank's microbatches into its first and last stages.

    Raises: RunError for a batch that lacks a part that this rank needs, or cannot be cut.
    """
    parts, placement = execution.parts, execution.program.schedule.placement
    rank, m, slices = execution.program.rank, placement.m, placement.slices
    if parts.first:
        if batch.inputs is None:
            raise RunError(f"rank {rank} runs stage 0, so it needs inputs")
        values = microbatches(batch.inputs, m, "inputs", device, slices, batch.whole_inputs)
        for mb in parts.first:
            parts.stages[0].inputs[mb] = (values[mb],)
    _put_arguments(batch, parts.stages, device, slices)
    for s, stage in parts.stages.items():
        stage.targets[:] = [None] * m
        stage.scale, stage.weigh = batch.scale, partial(_weights, batch, m, slices, rank)
        stage.weights = stage.weights if parts.last[s] else ()
    last = [(parts.stages[s], mb) for s, mbs in parts.last.items() for mb in mbs]
    if not last or (batch.targets is None and not parts.training):
        return
    missing = "targets" if batch.targets is None else "loss=" if last[0][0].loss is None else ""
    if missing:
        raise RunError(f"rank {rank} runs the last stage, so it needs {missing}")
    values = microbatches(batch.targets, m, "targets", device, slices)
    weights = shares(values, batch.weights, slices)
    for stage, mb in last:
        stage.targets[mb] = (values[mb],)
    for stage in {stage for stage, _ in last}:
        if stage.weights != weights:  # else the same object, which is quicker to compare
            stage.weights = weights


def _put_arguments(
    batch: Batch, stages: Mapping[int, Stage], device: torch.device, slices: int
) -> None:
    """Gives each stage those of the arguments that its module's forward names.

    Raises: RunError where they cannot be split as the inputs are.
    """
    (m,) = {len(stage.inputs) for stage in stages.values()}
    parts: Sequence[Any] = [{}] * m
    given, same = batch.arguments or {}, batch.replicated
    if isinstance(given, list):
        given, parts = {}, microbatches(given, m, "arguments", device, slices)
    rows = {key: value for key, value in given.items() if key not in same and tensors_of(value)}
    if rows:
        if not isinstance(batch.inputs, list | None):
            own = _sorted_out(batch.inputs, batch.whole_inputs, "inputs")[1]
            both = [*own, *tensors_of(rows)]
            _check_size(both, 0, m // slices, "inputs")
        parts = microbatches(rows, m, "arguments", device, slices)
    rest = {key: value for key, value in given.items() if key not in rows}
    rest = map_tensors(rest, lambda t: t.detach().to(device))
    every = [{**part, **rest} for part in parts]
    keys = tuple(sorted({key for part in every for key in part}))
    for stage in stages.values():
        names, stage.keys_given = keywords(stage.module) if keys else (), keys
        stage.arguments = [
            {key: part[key] for key in part if names is None or key in names} for part in every
        ]


def _weights(batch: Batch, m: int, slices: int, rank: int) -> tuple[float, ...]:
    """The weights of microbatches on a rank that need not have the last stage."""
    if batch.weights is None and batch.targets is None:
        raise RunError(
            f"a stage of rank {rank} records a loss, which weighs as its microbatch does; give "
            "this rank the targets or weights= too"
        )
    if batch.weights is not None:
        return shares([None] * m, batch.weights)
    shapes = microbatches(batch.targets, m, "targets", torch.device("meta"), slices)
    return shares(shapes, None, slices)


def losses_of(stages: Mapping[int, Stage], wire: Wire | None) -> tuple[Tensor | None, bool]:
    """The weighted loss of each microbatch, None where there are no targets; collective.

    Also whether anything was recorded on any rank.

    Raises: RunError where ranks had other arguments for their stages.
    """
    m = max(len(stage.losses) for stage in stages.values())
    # The last: how many ranks have any, record; a hash of the names of arguments, and its square.
    losses = torch.zeros(m + 4, dtype=torch.float64)
    names = crc32(repr(next(iter(stages.values())).keys_given).encode()) % 2**20
    losses[m + 2], losses[m + 3] = names, names**2
    for stage in stages.values():
        there = [mb for mb, loss in enumerate(stage.losses) if loss is not None]
        if there:
            values = torch.stack([loss for loss in stage.losses if loss is not None])
            weights = torch.tensor([stage.weights[mb] for mb in there], dtype=torch.float64)
            losses[there] = values.double().cpu() * weights
            losses[m] = 1
            stage.losses[:] = [None] * len(stage.losses)
        losses[m + 1] += any(stage.records)
    if wire is not None:
        wire.wait(wire.group.allreduce([losses]))
        if wire.group.size() * losses[m + 3] != losses[m + 2] ** 2:
            raise RunError(
                "the ranks were given other arguments= than each other; give all the same"
            )
    return losses[:m] if losses[m] else None, bool(losses[m + 1])


class Recorded(NamedTuple):
    """What was recorded in a step: values by name and microbatch, and losses, `[microbatch]` each.

    has_losses: whether something was recorded with a weight.
    """

    values: dict[str, Tensor]
    losses: Tensor
    has_losses: bool


def recorded_of(stages: Mapping[int, Stage], exchange: Callable[[bytes], list[bytes]]) -> Recorded:
    """What all ranks recorded; a microbatch without a value has nan. Collective."""
    own = {
        "weights": next((stage.weights for stage in stages.values() if stage.weights), ()),
        "records": [
            (mb, name, float(value), weight)
            for stage in stages.values()
            for mb, records in enumerate(stage.records)
            for name, value, weight in records
        ],
    }
    every = [json.loads(raw) for raw in exchange(json.dumps(own).encode())]
    m = max(len(stage.records) for stage in stages.values())
    weights = next((said["weights"] for said in every if said["weights"]), [0.0] * m)
    values: dict[str, Tensor] = {}
    losses = torch.zeros(m, dtype=torch.float64)
    rows = [row for said in every for row in said["records"]]
    for mb, name, value, weight in rows:
        of_name = values.setdefault(name, torch.full((m,), torch.nan, dtype=torch.float64))
        of_name[mb] = value if of_name[mb].isnan() else of_name[mb] + value
        losses[mb] += weights[mb] * weight * value if weight and weights[mb] else 0.0
    for stage in stages.values():
        stage.records = [[] for _ in stage.records]
    return Recorded(values, losses, any(weight for *_, weight in rows))


def microbatches(
    batch: Any, m: int, what: str, device: torch.device, slices: int = 1,
    replicated: Collection[Any] = (),
) -> Sequence[Any]:  # fmt: skip
    """The batch as m microbatches: a list is ready, anything else is split along dimension 0.

    With slices it is split into m / slices parts, and each of these along dimension 1, the
    positions, into slices. Tensors are split as `torch.tensor_split` does, those without
    positions in rows only; other parts go to every microbatch as they are, and so do those at the
    `replicated` places or keys. Tensors are moved to the device and cut off from any graph.

    Raises: RunError where there are too few rows or positions, or not m ready microbatches.
    """
    if isinstance(batch, list) and len(batch) != m:
        cut = f" ({m // slices} of {slices} slices)" if slices > 1 else ""
        raise RunError(f"{what} has {len(batch)} microbatches, but the schedule has {m}{cut}")
    batch = map_tensors(batch, lambda t: t.detach().to(device))
    if isinstance(batch, list):
        return batch
    same, rows = _sorted_out(batch, replicated, what)
    _check_size(rows, 0, m // slices, what)
    if slices > 1:
        _check_size(rows, 1, slices, what)
    if isinstance(batch, Tensor):
        return _parts(batch, m, slices)
    parts: dict[int, Sequence[Tensor]] = {}

    def part(t: Tensor, mb: int) -> Tensor:
        if not t.dim() or id(t) in same:
            return t
        if id(t) not in parts:
            parts[id(t)] = _parts(t, m, slices)
        return parts[id(t)][mb]

    return [map_tensors(batch, lambda t, mb=mb: part(t, mb)) for mb in range(m)]


def _sorted_out(
    batch: Any, replicated: Collection[Any], what: str
) -> tuple[set[int], list[Tensor]]:
    """The ids of the tensors of a batch that every microbatch gets, and the other tensors.

    Raises: RunError for a place or key that the batch does not have.
    """
    places = dict(enumerate(batch)) if isinstance(batch, tuple) else batch
    if replicated and not isinstance(places, dict):
        raise RunError(f"replicated= is for {what} that are a tuple or a dict")
    missing = [key for key in replicated if key not in places]
    if missing:
        raise RunError(f"replicated: {what} has no part {missing[0]!r}; it has {[*places]}")
    same = {id(t) for key in replicated for t in tensors_of(places[key])}
    return same, [t for t in tensors_of(batch) if id(t) not in same]


def _check_size(batch: Sequence[Tensor], dim: int, parts: int, what: str) -> None:
    """Raises RunError where a dimension of these tensors cannot be split into so many parts."""
    name, pieces = (("rows", "microbatches"), ("positions (dimension 1)", "slices"))[dim]
    sizes = {t.shape[dim] for t in batch if t.dim() > dim}
    if not sizes:
        raise RunError(f"{what} has no tensor with {name} to split into {parts} {pieces}")
    if len(sizes) > 1:
        way_out = REPLICATED if what == "inputs" else ""
        raise RunError(f"the tensors of {what} differ in {name}: {sorted(sizes)}{way_out}")
    (size,) = sizes
    if size < parts:
        raise RunError(f"{what} has {size} {name}, too few for {parts} {pieces}")


def _parts(t: Tensor, m: int, slices: int) -> Sequence[Tensor]:
    """A tensor as m microbatches; slices lie in memory as if they were all there is."""
    if slices == 1:
        return torch.tensor_split(t, m)
    rows = torch.tensor_split(t, m // slices)
    if t.dim() < 2:
        return [row for row in rows for _ in range(slices)]
    cut = (torch.tensor_split(row, slices, dim=1) for row in rows)
    return [part.contiguous() for part in chain.from_iterable(cut)]


def shares(
    values: Sequence[Any], weights: Sequence[float] | None, slices: int = 1
) -> tuple[float, ...]:
    """The weight of each microbatch in the gradient: its share of the rows, unless given.

    With slices it is the share of the positions of all rows. Microbatches without rows (a number
    as target) weigh the same.

    Raises: RunError for the wrong number of weights.
    """
    m = len(values)
    if weights is not None:
        if len(weights) != m:
            raise RunError(
                f"there are {len(weights)} weights, but the schedule has {m} microbatches"
            )
        return tuple(float(w) for w in weights)
    dims = 1 if slices == 1 else 2
    sizes = [_extent(v, dims) for v in values]
    if None in sizes:
        return (1 / m,) * m
    total = sum(n for n in sizes if n is not None)
    if not total:
        raise RunError("the batch has no rows")
    return tuple((n or 0) / total for n in sizes)


def _extent(value: Any, dims: int) -> int | None:
    """Rows of a microbatch, or with two dims its rows times positions."""
    shape = next((t.shape for t in tensors_of(value) if t.dim() >= dims), None)
    return None if shape is None else prod(shape[:dims])
