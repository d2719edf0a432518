"""A schedule run on real modules: what a training script holds."""

from __future__ import annotations

import json
import secrets
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hocket.checker import check
from hocket.errors import HocketError, RunError, UsageError
from hocket.ir import Kind, Schedule, kinds_of, stages_of
from hocket.lower import insert_communication
from hocket.lower.evaluation import forward_only
from hocket.lower.receives import defer_receives, place_receives
from hocket.lower.slots import forwards_first
from hocket.runtime import split, verify
from hocket.runtime.cuda import ON_DEVICE, NcclWire
from hocket.runtime.data import microbatches, shares
from hocket.runtime.dispatch import DISPATCH, usual
from hocket.runtime.execute import Execution, Parts
from hocket.runtime.failure import STAY, Board, Place, Silence, Watch, failure, place
from hocket.runtime.grad_sync import Sharing, average, copies
from hocket.runtime.handshake import agree, clock_offsets, describe, exchange, exchange_spans
from hocket.runtime.measure import host, timeline
from hocket.runtime.program import Role, programs
from hocket.runtime.rng import Keys, layers
from hocket.runtime.slice_state import check_carries
from hocket.runtime.stage import Loss, Stage
from hocket.runtime.transport import Downstream, Upstream, Wire, break_connections
from hocket.timeline import Timeline

Tied = Iterable[Iterable[tuple[int, str]]]


class Pipeline:
    """Runs a schedule on this rank's stages; built on all ranks together.

    stages: the modules of the stages that this rank holds, by stage number; copies of a mirrored
    stage get the weights of the first one. One with `carries = True` is called with `carried` and
    returns (output, carried): what it hands from slice to slice of a sequence. loss: called with
    output and target of a microbatch on the rank of its last stage; a mean over its rows (and
    positions, where there are slices). group: the process group of the pipeline, in
    which rank r is rank r of the schedule (left out: the default group; none for one rank).
    dispatch: "receive" waits for a message where its consumer stands, "gate" lets threads wait and
    starts an action once it is ready, "ready" takes actions out of order; these run the queues of
    a rank one after the other. "queues" runs each in a thread of its own, and is what is taken
    where ranks have several and nothing is asked for (else "receive"). verify: compare the
    first step with the unpipelined model. timeout: seconds that one message may take.
    data_parallel: the process group of this rank's replicas; gradients become their mean (one of
    a parameter with `allreduce = False`, which only this replica has, is divided by their number:
    it must have met the rows of all). tied:
    groups of (stage, parameter name) that share one weight; their gradients are summed. seed: give
    every layer of every microbatch random numbers of its own, so that dropout does not depend on
    schedule or placement; a module with `draws = False` says that it needs none, others take
    turns where queues run side by side. store: where ranks leave word of a failure (left out: the
    default group's store). A module may bring its own split of the backward: a method `split_plan`
    that returns what `hocket.runtime.split.prepare` returns. `split_plans` tells, by stage, whose
    gradients are put off to W and whose are not, and why (`print(pipe.split_plans[0])`).

    Raises: ScheduleError, RunError when the schedule cannot run or the ranks do not fit together.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, nn.Module],
        loss: Loss | None = None,
        *,
        group: Any = None,
        device: torch.device | str | None = None,
        dispatch: str | None = None,
        verify: bool = False,
        timeout: float = 60.0,
        data_parallel: Any = None,
        tied: Tied | None = None,
        seed: int | None = None,
        store: Any = None,
    ) -> None:
        dispatch = usual(schedule) if dispatch is None else dispatch
        if dispatch not in DISPATCH:
            raise UsageError(
                f"there is no dispatch {dispatch!r}; choose from {', '.join(DISPATCH)}"
            )
        self.schedule, self.modules, self.loss = schedule, dict(sorted(stages.items())), loss
        self.device = _device(device, stages)
        make_wire, self._execute = DISPATCH[dispatch]
        self.rank, self.size, self.wire = _wire(group, schedule, timeout, self.device, make_wire)
        self._timeout, self.dispatch = timeout, dispatch
        self._replicas, self._verify_first = data_parallel, verify
        self._names = _names(group, self.size, data_parallel)
        self._keys = None if seed is None else Keys(seed, self.device)
        tied = [[(int(s), n) for s, n in names] for names in tied or ()]
        first_layer = self._meet(store, {"tied": tied, "seed": seed, "dispatch": dispatch})
        m = schedule.m
        self.split_plans = {s: _plan(self.modules[s]) for s in self._split & set(self.modules)}
        for s, plan in self.split_plans.items():
            _warn_if_whole(s, self.modules[s], plan)
        self._stages = {
            s: Stage(s, module, m, loss, self.split_plans.get(s), schedule.placement.slices)
            for s, module in self.modules.items()
        }
        if self._keys is not None:
            for s, stage in self._stages.items():
                stage.keys = self._keys.attach(stage.module, first_layer[s])
            if dispatch == "queues":
                _warn_if_in_turn(schedule, self.rank, self._stages)
        self._training = None
        if not schedule.is_forward_only:
            self._training = self._bind(self.lowered, self._stages, True, self._execute)
        self._evaluation = self._bind(self._eval_order, self._stages, False, self._execute)
        names = {s: [n for n, _ in m.named_parameters()] for s, m in self.modules.items()}
        groups = copies(schedule.placement.stages_of_rank, names, tied)
        tag = 2 * m * schedule.placement.n_stages
        self._sharing = Sharing(groups, self.modules, self.wire, self.rank, tag)
        self._ran: Execution | None = None
        self._timeline: Timeline | None = None
        self._running: Execution | None = None
        self._phase = ""
        self._broken = ""
        groups = [data_parallel, None if self.wire is None else self.wire.group]
        self._break = partial(_break, [group for group in groups if group is not None])
        own = self._names[self.rank]
        self._watch = Watch(self, self._board, own, min(timeout / 6, 5.0), self._break)
        self._watch.where = _where(self)
        if self.wire is not None:
            weakref.finalize(self, self.wire.close)
        self._guarded(self._sharing.align, "the broadcast of mirrored weights")

    # --- construction -----------------------------------------------------------------------

    def _meet(self, store: Any, settings: dict[str, Any]) -> dict[int, int]:
        """Prepares the orders and checks, with all ranks, that they fit together.

        Returns: the number of the first layer of each stage.
        """
        error: HocketError | None = None
        try:
            tagged = self.wire is None or self.wire.tagged
            self.lowered = lower(self.schedule, tagged=tagged)
            self._eval_order = lower(forward_only(self.schedule), tagged=tagged)
            self._split = _split_stages(self.schedule)
            self._check_own()
        except HocketError as own:
            error = own
        words = {
            "problem": "" if error is None else str(error),
            "same": describe(self.schedule, settings),
            "layers": {str(s): len(layers(module)) for s, module in self.modules.items()},
            "token": secrets.token_hex(8),
            "host": host(),
        }
        said = [
            json.loads(raw) for raw in exchange(self.wire, self.size, json.dumps(words).encode())
        ]
        try:
            agree(said, self.size)
        except RunError:
            if error is not None and all(s["problem"] == words["problem"] for s in said):
                raise error from None
            raise
        alone = self.wire is None and self._replicas is None
        if store is None and not alone and torch.distributed.is_initialized():
            store = torch.distributed.distributed_c10d._get_default_store()
        token = _of_first_replica(said[0]["token"], self._replicas, self._timeout)
        others = _others(self._replicas, self._names[self.rank], self.size)
        self._board = Silence() if store is None else Board(store, f"hocket/{token}", others)
        self._hosts = [s["host"] for s in said]
        counts = {int(s): n for words in said for s, n in words["layers"].items()}
        return {s: sum(counts[i] for i in range(s)) for s in counts}

    def _check_own(self) -> None:
        """Raises RunError where this rank was not given what it needs."""
        placement = self.schedule.placement
        if self.size != placement.p:
            raise RunError(f"the group has {self.size} ranks, but the schedule has {placement.p}")
        needed, given = set(placement.stages_of_rank[self.rank]), set(self.modules)
        if needed != given:
            raise RunError(
                f"it holds the stages {sorted(needed)}, but was given modules for {sorted(given)}"
            )
        check_carries(self.schedule, self.modules)

    def _bind(
        self, lowered: Schedule, stages: Mapping[int, Stage], training: bool, execute: Callable
    ) -> Execution:
        """The order as calls on these stages, with message boundaries of its own."""
        placement = lowered.placement
        lengths, m = placement.lengths.tolist(), placement.m
        first = [mb for mb in range(m) if placement.queue(0, mb).rank == self.rank]
        last = {
            s: [
                mb for mb in range(m)
                if lengths[mb] == s + 1 and placement.queue(s, mb).rank == self.rank
            ]
            for s in stages
        }  # fmt: skip
        down: dict[int, Downstream] = {}
        up: dict[int, Upstream] = {}
        if self.wire is not None:
            n = placement.n_stages
            for s in stages:
                down[s] = Downstream(self.wire, s, n, m, _peers(lowered, s + 1))
                up[s] = Upstream(self.wire, s - 1, n, m, _peers(lowered, s - 1))
        parts = Parts(stages, down, up, first, last, training)
        if self.device.type == "cuda":
            execute = ON_DEVICE.get(execute, execute)
        return execute(programs(lowered, [self.rank])[0], parts, self.wire)

    # --- running ----------------------------------------------------------------------------

    def step(self, inputs: Any, targets: Any, *, weights: Sequence[float] | None = None) -> Tensor:
        """The loss of the batch, the same on every rank; gradients are added to the parameters'.

        inputs, targets: a tensor, tuple or dict, split along dimension 0 into m microbatches, or
        a list of m of them; None on ranks that need none. In a schedule with slices m counts
        slices: rows are split into m / slices parts, and each of these along dimension 1.
        weights: of each microbatch in loss and gradient; left out: its share of the rows, or of
        the positions in slices.

        Raises: RunError that names the first rank that failed, its action, and who waits for whom.
        """
        if self._training is None:
            raise RunError(f"{self.schedule.name} has no backward; use eval")
        if self._verify_first:
            self.verify(inputs, targets, weights=weights)
        loss = self._train(self._training, self._stages, inputs, targets, weights)
        if self._replicas is not None:
            self._guarded(self._average, "the average over replicas")
        if self._keys is not None:
            self._keys.step += 1
        return loss

    def _train(
        self, execution: Execution, stages: Mapping[int, Stage], inputs: Any, targets: Any,
        weights: Sequence[float] | None,
    ) -> Tensor:  # fmt: skip
        def load() -> None:
            self._load(execution, stages, inputs, targets, weights)
            self._sharing.open()

        self._guarded(load, "the start of the step")
        loss = self._run(execution, stages)
        if self._sharing:
            self._guarded(self._sharing.close, "the sum of shared gradients")
        return loss

    def _average(self) -> None:
        parameters = [p for module in self.modules.values() for p in module.parameters()]
        wait = Wire(None, self._timeout, self.device).wait
        average(parameters, self._replicas, wait)

    def eval(self, inputs: Any, targets: Any = None, *, outputs: bool = False) -> Any:
        """The loss without any gradient; without targets None.

        With `outputs`: (loss, list of the output of each microbatch; None where another rank has
        it).
        """
        stages = self._stages

        def load() -> None:
            self._load(self._evaluation, stages, inputs, targets, None)
            for stage in stages.values():
                stage.outputs = [None] * self.schedule.m if outputs else None

        self._guarded(load, "the start of the evaluation")
        loss = self._run(self._evaluation, stages)
        if not outputs:
            return loss
        made: list[Any] = [None] * self.schedule.m
        for stage in stages.values():
            assert stage.outputs is not None
            made = [a if b is None else b for a, b in zip(made, stage.outputs, strict=True)]
            stage.outputs = None
        return loss, made

    def _load(
        self, execution: Execution, stages: Mapping[int, Stage], inputs: Any, targets: Any,
        weights: Sequence[float] | None,
    ) -> None:  # fmt: skip
        """Puts this rank's microbatches into its first and last stages."""
        parts, placement = execution.parts, execution.program.schedule.placement
        firsts = parts.first
        if firsts:
            if inputs is None:
                raise RunError(f"rank {self.rank} runs stage 0, so it needs inputs")
            values = microbatches(inputs, placement.m, "inputs", self.device, placement.slices)
            for mb in firsts:
                stages[0].inputs[mb] = (values[mb],)
        lasts = [(s, mb) for s, mbs in parts.last.items() for mb in mbs]
        for s in stages:
            stages[s].targets[:] = [None] * placement.m
        if not lasts or (targets is None and not parts.training):
            return
        if targets is None or self.loss is None:
            what = "targets" if targets is None else "loss="
            raise RunError(f"rank {self.rank} runs the last stage, so it needs {what}")
        values = microbatches(targets, placement.m, "targets", self.device, placement.slices)
        given = shares(values, weights, placement.slices)
        for s, mb in lasts:
            stages[s].targets[mb] = (values[mb],)
            stages[s].weights = given

    def _run(self, execution: Execution, stages: Mapping[int, Stage]) -> Any:
        def run() -> None:
            with torch.set_grad_enabled(execution.parts.training):
                execution.run()
            _assert_clean(execution)

        self._running, self._timeline = execution, None
        try:
            self._guarded(run, "")
        finally:
            self._running = None
        if execution is self._training:
            self._ran = execution
        return self._guarded(lambda: self._total(stages), "the sum of the losses")

    def _total(self, stages: Mapping[int, Stage]) -> Tensor | None:
        """The weighted sum of the losses, added in the order of the microbatches everywhere."""
        m = max(len(stage.losses) for stage in stages.values())
        losses = torch.zeros(m + 1, dtype=torch.float64)
        for stage in stages.values():
            found = {mb: loss for mb, loss in enumerate(stage.losses) if loss is not None}
            if found:
                there = [*found]
                values = torch.stack([*found.values()]).double().cpu()
                weights = torch.tensor([stage.weights[mb] for mb in there], dtype=torch.float64)
                losses[there] = values * weights
                losses[m] = 1
                stage.losses[:] = [None] * len(stage.losses)
        if self.wire is not None:
            self.wire.wait(self.wire.group.allreduce([losses]))
        return losses[:m].sum() if losses[m] else None

    # --- measured ---------------------------------------------------------------------------

    @property
    def timeline(self) -> Timeline:
        """The measured timeline of the last step; collective when it was not gathered yet."""
        return self.gather_timeline() if self._timeline is None else self._timeline

    def gather_timeline(self) -> Timeline:
        """The times of all ranks' last step on one clock; collective.

        Raises: RunError before the first step.
        """
        if self._ran is None:
            raise RunError("there is no timeline before the first step")
        if self._timeline is None:
            spans = exchange_spans(self.wire, self.size, self._ran.spans)
            tag = 2 * self.schedule.m * self.schedule.placement.n_stages + 1
            offsets = clock_offsets(self.wire, self.rank, self._hosts, tag)
            self._timeline = timeline(self.lowered, spans, offsets)
        return self._timeline

    # --- verified ---------------------------------------------------------------------------

    def verify(self, inputs: Any, targets: Any, *, weights: Sequence[float] | None = None) -> None:
        """Compares loss and gradients of one step with the unpipelined model; collective.

        The whole batch goes through the stages one after the other, with whole backwards; or its
        microbatches do, where the batch is a list or weights or a seed are given. In a schedule
        with slices a seed does not count: the sequences are left uncut, and nothing is dropped
        out. Gradients and buffers are left as they were.

        Raises: RunError that names the parameter that is furthest off.
        """
        if self._training is None:
            raise RunError(f"{self.schedule.name} has no backward to verify")
        self._verify_first = False
        sliced = self.schedule.placement.slices > 1
        ready = isinstance(inputs, list) or isinstance(targets, list) or weights is not None
        ready = ready or (self._keys is not None and not sliced)
        flags = exchange(self.wire, self.size, b"1" if ready else b"0")
        saved = verify.Saved(self.modules)
        try:
            with verify.without_dropout(self.modules) if sliced else nullcontext():
                loss = self._train(self._training, self._stages, inputs, targets, weights)
                got = verify.gradients(self.modules)
                saved.forget()
                reference = self._reference(b"1" not in flags)
                want_loss = self._train(*reference, inputs, targets, weights)
                text = verify.difference(got, verify.gradients(self.modules))
        finally:
            saved.restore()
        texts = [raw.decode() for raw in exchange(self.wire, self.size, text.encode())]
        dtype = next((g.dtype for g in got.values() if g is not None), torch.float32)
        verify.refuse(texts, verify.compare_losses(loss, want_loss, dtype), sliced=sliced)

    def _reference(self, whole: bool) -> tuple[Execution, dict[int, Stage]]:
        order = verify.one_after_the_other(self.schedule, whole=whole)
        order = lower(order, tagged=self.wire is None or self.wire.tagged)
        stages = {
            s: Stage(s, stage.module, order.m, self.loss, None, order.placement.slices)
            for s, stage in self._stages.items()
        }
        for s, stage in stages.items():
            stage.keys = self._stages[s].keys
        return self._bind(order, stages, True, DISPATCH["receive"][1]), stages

    # --- failure ----------------------------------------------------------------------------

    def _guarded(self, call: Callable[[], Any], phase: str) -> Any:
        """Runs a part of the step; a failure is told to all ranks and ends the pipeline."""
        if self._broken:
            raise RunError(f"this pipeline has ended: {self._broken}")
        self._phase = phase
        try:
            return call()
        except BaseException as error:
            at, communicating = self._at(error)
            failed = failure(error, self._names[self.rank], at, communicating, self._board)
            self._broken = str(failed)
            self._break()
            if self._running is not None:
                self._running.end()
            if not self._board.gone:
                time.sleep(STAY)
            if not isinstance(error, Exception):
                raise
            raise failed from (None if communicating else error)

    def _at(self, error: BaseException) -> tuple[Place, bool]:
        """Where this rank is, and whether the error came from a message."""
        running = self._running
        foreign = isinstance(error, RuntimeError)
        if running is None:
            return Place(self._phase), foreign and not self._phase.startswith("the start")
        entry = running.current
        return place(running.program, entry, self._names), (
            foreign and entry is not None and entry.role not in (Role.RUN, Role.HAND)
        )

    def close(self) -> None:
        """Ends the threads of this pipeline and takes the split backward off its modules."""
        self._watch.end()
        if self.wire is not None:
            self.wire.close()
        for stage in self._stages.values():
            if stage.plan is not None:
                stage.plan.close()


def lower(schedule: Schedule, *, tagged: bool = True) -> Schedule:
    """The order that is executed: the schedule with its messages; checked for the transport.

    Raises: ScheduleError when it cannot run.
    """
    if not schedule.has_communication:
        check(schedule).raise_if_bad()
        move = place_receives if tagged else defer_receives
        schedule = move(insert_communication(forwards_first(schedule)))
    check(schedule, "tagged" if tagged else "rendezvous").raise_if_bad()
    return schedule


def _plan(module: nn.Module) -> Any:
    """How a module's backward is split: its own way (a method `split_plan`), or the usual one."""
    own = getattr(module, "split_plan", None)
    return split.prepare(module) if own is None else own()


def _warn_if_whole(stage: int, module: nn.Module, plan: Any) -> None:
    """Says before the first step that a stage's backward cannot be split, and why."""
    whole = getattr(plan, "whole", None)
    if not whole or plan.deferred or not any(p.requires_grad for p in module.parameters()):
        return
    name, why = next(iter(whole.items()))
    warnings.warn(
        f"stage {stage}: no part of its backward can be put off, so I does all of it and W is "
        f"empty; {name}: {why}",
        stacklevel=4,
    )


def _warn_if_in_turn(schedule: Schedule, rank: int, stages: Mapping[int, Stage]) -> None:
    """Says that stages of several queues may draw random numbers, and so never run together."""
    first: dict[str, int] = {}
    for path in schedule.placement.paths:
        for s, queue in enumerate(path):
            if queue.rank == rank and stages[s].keys is not None:
                first.setdefault(str(queue), s)
    if len(first) > 1:
        (one, a), (two, b) = list(first.items())[:2]
        warnings.warn(
            f"stage {a} on queue {one} and stage {b} on queue {two} may both draw random numbers, "
            "from one generator, so they take turns; a module that draws none says draws = False",
            stacklevel=3,
        )


def _split_stages(schedule: Schedule) -> set[int]:
    """The stages that have an I somewhere."""
    split_ = kinds_of(schedule.codes) == Kind.I
    return set(stages_of(schedule.codes[split_]).tolist())


def _peers(schedule: Schedule, stage: int) -> dict[int, int]:
    """The rank of a stage by microbatch, for those whose path has it."""
    placement = schedule.placement
    return {
        mb: placement.queue(stage, mb).rank
        for mb in range(placement.m)
        if 0 <= stage < placement.lengths[mb]
    }


def _assert_clean(execution: Execution) -> None:
    parts = execution.parts
    left = [text for stage in parts.stages.values() for text in stage.leftovers()]
    assert not left, f"left over after the step: {', '.join(left)}"
    for ends in (parts.up, parts.down):
        assert all(end.quiet for end in ends.values()), "messages left over after the step"


def _break(groups: Sequence[Any]) -> None:
    for group in groups:
        break_connections(group)


def _where(pipeline: Pipeline) -> Callable[[], tuple[Any, Place] | None]:
    """Where a pipeline is, without keeping it alive."""
    reference = weakref.ref(pipeline)

    def where() -> tuple[Any, Place] | None:
        pipe = reference()
        running = None if pipe is None else pipe._running
        if pipe is None or running is None:
            return None
        at = place(running.program, running.current, pipe._names)
        return (id(running.times), len(running.times)), at

    return where


def _device(device: torch.device | str | None, stages: Mapping[int, nn.Module]) -> torch.device:
    if device is not None:
        return torch.device(device)
    first = next((p for module in stages.values() for p in module.parameters()), None)
    return torch.device("cpu") if first is None else first.device


def _names(group: Any, size: int, replicas: Any) -> list[int]:
    """The number of each rank of a pipeline among all processes, for what is said of failures."""
    if isinstance(group, torch.distributed.ProcessGroup):
        return torch.distributed.get_process_group_ranks(group)
    first = 0 if replicas is None else replicas.rank() * size
    return list(range(first, first + size))


def _others(replicas: Any, own: int, size: int) -> list[int]:
    """The numbers of the other replicas of a rank; `own` is its own number."""
    if replicas is None:
        return []
    if isinstance(replicas, torch.distributed.ProcessGroup):
        every = torch.distributed.get_process_group_ranks(replicas)
    else:
        every = [own + (i - replicas.rank()) * size for i in range(replicas.size())]
    return [r for r in every if r != own]


def _of_first_replica(token: str, replicas: Any, timeout: float) -> str:
    """The token of the first replica, so that all of them look at one board; collective.

    Over NCCL each replica keeps its own.
    """
    if replicas is None or _is_nccl(replicas):
        return token
    wire = Wire(replicas, timeout, torch.device("cpu"))
    return exchange(wire, replicas.size(), token.encode())[0].decode()


def _is_nccl(group: Any) -> bool:
    made = isinstance(group, torch.distributed.ProcessGroup)
    return made and torch.distributed.get_backend(group) == "nccl"


def _wire(
    group: Any, schedule: Schedule, timeout: float, device: torch.device, make: type[Wire]
) -> tuple[int, int, Wire | None]:
    """Rank, number of ranks, and the wire; none where there is only one rank."""
    if group is None and torch.distributed.is_initialized():
        group = torch.distributed.group.WORLD
    if group is None:
        if schedule.p > 1:
            raise RunError(
                "there is no process group; call torch.distributed.init_process_group first"
            )
        return 0, 1, None
    rank, size, backend = group.rank(), group.size(), group
    if size == 1:
        return 0, 1, None
    if _is_nccl(group):
        return rank, size, NcclWire(group, timeout, device, schedule.placement)
    if isinstance(group, torch.distributed.ProcessGroup):
        backend = group._get_backend(torch.device("cpu"))
    return rank, size, make(backend, timeout, device)
