"""A schedule run on real modules: what a training script holds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import RunError
from hocket.ir import Schedule
from hocket.runtime import orders, verify
from hocket.runtime.data import Arguments, Batch, joined, load, losses_of, recorded_of
from hocket.runtime.dispatch import DISPATCH, chosen
from hocket.runtime.execute import Execution
from hocket.runtime.generation import Cache, Chooser, one_pass
from hocket.runtime.handshake import describe
from hocket.runtime.measure import gather
from hocket.runtime.names import parts, renamings
from hocket.runtime.parameters import Parameters, Tied
from hocket.runtime.rng import Keys, n_layers, warn_if_in_turn
from hocket.runtime.session import Session
from hocket.runtime.slice_state import check_carries
from hocket.runtime.split import plan_of
from hocket.runtime.stage import Loss, Observer, Stage
from hocket.runtime.values import keywords
from hocket.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Functions that a pipeline calls in each step; put one into `pipe.hooks`.

    before_step: called with the batch's inputs and targets. before_forward: called before each
    forward of a stage with its number, the microbatch, and the arguments and keyword arguments of
    the module. gradients_ready: called without arguments once the gradients of the step are
    complete, summed over copies and averaged over replicas: the place to clip them, or for an
    optimizer's step. after_step: called with the loss.

    One that raises ends the step on all ranks, with its error.
    """

    before_step: Callable[[Any, Any], Any] | None = None
    before_forward: Observer | None = None
    gradients_ready: Callable[[], Any] | None = None
    after_step: Callable[[Tensor], Any] | None = None


class Pipeline:
    """Runs a schedule on this rank's stages; built on all ranks together.

    stages: the modules of the stages that this rank holds, by stage number; copies of a mirrored
    stage get the weights and buffers of the first one. One with `carries = True` is called with
    `carried` and returns (output, carried): what it hands from slice to slice of a sequence. loss:
    called with output and target of a microbatch on the rank of its last stage; a mean over its
    rows (and positions, where there are slices). If it is a module with parameters, it counts as
    one stage after the last. group: the process group of the pipeline, or a DeviceMesh of one
    dimension, in which rank r is rank r of the schedule (left out: the default group; none for one
    rank). Ranks leave word of a failure
    in the default group's store, or in a group's own attribute `store`. dispatch: "receive" waits
    for a message where its consumer stands, "gate" lets threads wait and starts an action once it
    is ready, "ready" takes actions out of order; these run a rank's queues one after the other.
    "queues" runs each in a thread of its own, and is what is taken where ranks have several and
    nothing is asked for (else "receive"). verify: compare the first step with the unpipelined
    model. timeout: seconds that one message may take. data_parallel: the process group of this
    rank's replicas; gradients become their mean (one of a parameter with `allreduce = False`, which
    only this replica has, is divided by their number: it must have met the rows of all). tied:
    groups of (stage, parameter name) that share one weight; their gradients are summed. seed:
    random numbers depend on (seed, step, layer, microbatch) alone, microbatches counted over all
    replicas, so that dropout depends on no schedule or placement; a module with `draws = False`
    says that it needs none, others take turns where queues run side by side. Stages
    may name such groups themselves, all of them the same, in an attribute `tied_parameters`, as
    those of `split_model` do. A module may bring its
    own split of the backward: a method `split_plan` that returns what
    `hocket.runtime.split.prepare` returns.

    Public attributes: `modules` by stage, `hooks` (a list of `Hooks`), `lowered` (the order with
    its messages), `wire` (what carries them), `metrics` (what was recorded in the last step, by
    name a number per microbatch), `split_plans` (by stage, whose gradients are put off to W and
    whose are not, and why), and `steps_done`, which counts the steps; set that when a run is
    resumed, since random numbers depend on it.

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
    ) -> None:
        self.schedule, self.modules, self.loss = schedule, dict(sorted(stages.items())), loss
        self.hooks: list[Hooks] = []
        self.steps_done, self.seed = 0, seed
        self._reported = False  # a loss that is not finite
        self._adds_losses = False  # stages record losses, of microbatches each
        self.metrics: dict[str, Tensor] = {}
        self.dispatch = chosen(dispatch, schedule)
        make_wire, self._execute = DISPATCH[self.dispatch]
        self.device = _device(device, stages)
        self._session = session = Session(
            schedule, group, data_parallel,
            device=self.device, timeout=timeout, make_wire=make_wire,
        )  # fmt: skip
        self.rank, self.size, self.wire = session.rank, session.size, session.wire
        self._parameters = Parameters(schedule.placement, self.modules, loss, tied, session)
        settings = {"tied": self._parameters.tied, "seed": seed, "dispatch": self.dispatch}
        own = {
            "layers": {str(s): n_layers(module) for s, module in self.modules.items()},
            "parts": parts(self._parameters.modules),
            "keywords": [keywords(module) for module in self.modules.values()],
            "shared": self._parameters.in_words(),
        }
        prepared, every = session.meet(self._prepare, describe(schedule, settings), own)
        self.lowered, evaluation = prepared
        self._keywords = [names for said in every for names in said["keywords"]]
        self._renamings = renamings(
            self._parameters.modules, [said["parts"] for said in every],
            schedule.placement.n_stages,
        )  # fmt: skip
        split = orders.split_stages(schedule)
        self.split_plans = {s: plan_of(m) for s, m in self.modules.items() if s in split}
        self._stages = self._stages_of(schedule, self.split_plans)
        self._keys = None if seed is None else self._keyed(seed, [s["layers"] for s in every])
        self._training = None
        if not schedule.is_forward_only:
            self._training = self._bind(self.lowered, self._stages, self._execute)
        self._evaluation = self._bind(evaluation, self._stages, self._execute, training=False)
        self._evaluations: dict[int, Execution] = {}  # of several batches, by their number
        self._verify_first = verify
        self._ran: Execution | None = None
        self._timeline: Timeline | None = None
        self._parameters.connect([said["shared"] for said in every], self._tag(0))

    def _keyed(self, seed: int, said: Sequence[Mapping[str, int]]) -> Keys:
        """Keys around all that draws; said: the number of layers of each stage, by rank."""
        keys = Keys(seed, self.device, self._session.replica * self.schedule.m)
        keys.attach(self._stages, {int(s): n for own in said for s, n in own.items()})
        if self.dispatch == "queues":
            warn_if_in_turn(self.schedule.placement, self.rank, self._stages)
        return keys

    def _prepare(self) -> orders.Orders:
        """The orders of the schedule.

        Raises: ScheduleError, RunError where they cannot run, or not on these modules.
        """
        prepared = orders.orders_of(self.schedule, tagged=self._session.tagged)
        placement = self.schedule.placement
        if self.size != placement.p:
            raise RunError(f"the group has {self.size} ranks, but the schedule has {placement.p}")
        needed, given = set(placement.stages_of_rank[self.rank]), set(self.modules)
        if needed != given:
            raise RunError(
                f"it holds the stages {sorted(needed)}, but was given modules for {sorted(given)}"
            )
        cut = f"{self.schedule.name} cuts sequences into {placement.slices} slices"
        check_carries(self.modules, cut if placement.slices > 1 else None)
        self._parameters.groups()
        return prepared

    def _stages_of(self, order: Schedule, plans: Mapping[int, Any]) -> dict[int, Stage]:
        m, slices = order.m, order.placement.slices
        return {
            s: Stage(s, module, m, self.loss, plans.get(s), slices)
            for s, module in self.modules.items()
        }

    def _bind(
        self, order: Schedule, stages: Mapping[int, Stage], execute: Callable[..., Execution], *,
        training: bool = True,
    ) -> Execution:  # fmt: skip
        return orders.bind(
            order, self.rank, stages, self.wire, execute, training=training, device=self.device
        )

    def _tag(self, number: int) -> int:
        """A tag that no message between stages has."""
        return 2 * self.schedule.m * self.schedule.placement.n_stages + number

    # --- running ----------------------------------------------------------------------------

    def step(
        self, inputs: Any, targets: Any, *, weights: Sequence[float] | None = None,
        replicated: Collection[Any] = (), scaler: Any = None, sync: bool = True,
        arguments: Arguments | None = None,
    ) -> Tensor:  # fmt: skip
        """The loss of the batch, the same on every rank; gradients are added to the parameters'.

        inputs, targets: a tensor, tuple or dict, split along dimension 0 into m microbatches, or
        a list of m of them; None on ranks that need none. In a schedule with slices m counts
        slices: rows are split into m / slices parts, and each of these along dimension 1.
        weights: of each microbatch in loss and gradient; left out: its share of the rows, or of
        the positions in slices. Of one of weight 0 no loss is computed. replicated: the places
        (in a tuple) or keys (in a dict) of parts of the inputs that are not rows: every microbatch
        gets them whole. arguments: by name, what stages get beside their inputs, such as masks:
        split as the inputs are, the same on all ranks, and each stage gets those that its forward
        names; a list has those of each microbatch. scaler: a `torch.amp.GradScaler`, one on each
        rank, by whose scale the gradients are larger; `unscale_` comes next. sync=False: the
        gradients stay those of this rank until the next step without it, which sums them over
        copies and replicas; the hook `gradients_ready` waits for that, too.

        Raises: RunError that names the first rank that failed, its action, and who waits for whom.
        """
        if self._training is None:
            raise RunError(f"{self.schedule.name} has no backward; use eval")
        if self._keys is not None:
            self._keys.step = self.steps_done
        if self._verify_first:
            self.verify(
                inputs, targets, weights=weights, replicated=replicated, arguments=arguments
            )
        self._call_hooks("before_step", inputs, targets)
        scale = 1.0 if scaler is None else float(scaler.scale(torch.ones((), device=self.device)))
        batch = self._batch(inputs, targets, weights, replicated, arguments, scale)
        loss = self._train(self._training, batch, trained=True, sync=sync)
        self.steps_done += 1
        if sync:
            self._call_hooks("gradients_ready")
        self._call_hooks("after_step", loss)
        return loss

    def _batch(
        self, inputs: Any, targets: Any, weights: Sequence[float] | None,
        replicated: Collection[Any], arguments: Arguments | None, scale: float = 1.0,
    ) -> Batch:  # fmt: skip
        self._check_taken(arguments)
        return Batch(inputs, targets, weights, replicated, scale, arguments)

    def _check_taken(self, arguments: Arguments | None = None) -> None:
        """Raises RunError for an argument that no stage takes."""
        parts = arguments if isinstance(arguments, list) else [arguments or {}]
        for key in dict.fromkeys(key for part in parts for key in part):
            if all(names is not None and key not in names for names in self._keywords):
                raise RunError(f"arguments: no stage takes {key!r}")

    def _call_hooks(self, name: str, *args: Any) -> None:
        for hook in self.hooks:
            call = getattr(hook, name)
            if call is not None:
                self.guard(lambda call=call: call(*args), f"the hook {name}")

    def _train(
        self, execution: Execution, batch: Batch, *, trained: bool, sync: bool = True
    ) -> Any:
        """The loss of a step; `trained`: with its hooks, and the gradients of all replicas."""

        hooks = (hook.before_forward for hook in self.hooks if trained)
        seen = tuple(call for call in hooks if call is not None)
        stages = execution.parts.stages.values()

        def start() -> None:
            load(batch, execution, self.device)
            self._parameters.open(sync=sync)
            for stage in stages:
                stage.observers = seen
                stage.open()

        self.guard(start, "the start of the step")
        losses = self._run(execution)
        assert losses is not None
        for stage in stages:
            self.guard(stage.close, "the reduction of sharded gradients")
        if execution is self._training and not bool(losses.isfinite().all()):
            self._report_odd(losses)
        self._parameters.close(trained=trained, sync=sync)
        return losses.sum()

    def eval(
        self, inputs: Any, targets: Any = None, *, outputs: bool = False,
        weights: Sequence[float] | None = None, replicated: Collection[Any] = (),
        arguments: Arguments | None = None,
    ) -> Any:  # fmt: skip
        """The loss without any gradient; without targets None. The others are as in `step`.

        With `outputs`: (loss, list of the output of each microbatch; None where another rank has
        it).
        """
        batch = self._batch(inputs, targets, weights, replicated, arguments)
        losses, kept = self._evaluate(self._evaluation, lambda: batch, outputs)
        loss = None if losses is None else losses.sum()
        return (loss, kept) if outputs else loss

    def eval_batches(self, batches: Sequence[Sequence[Any]], *, outputs: bool = False) -> list[Any]:
        """For each pair of inputs and targets what `eval` returns, without a pause between them.

        A batch may be a triple, with arguments by name. In these, too, all tensors have rows.
        The forwards of a batch begin while those of the one before are still under way, so that
        only the first and the last ranks' waits are left, once for all batches together.

        Raises: RunError where the ranks have other numbers of batches, or for an argument that no
        stage takes.
        """
        for batch in batches:
            self._check_taken(*batch[2:])
        n, m, slices = len(batches), self.schedule.m, self.schedule.placement.slices
        every = self.guard(lambda: self._session.exchange(str(n).encode()), _START)
        if len({*every}) > 1:
            counts = ", ".join(raw.decode() for raw in every)
            raise RunError(f"the ranks have other numbers of batches: {counts}")
        if not n:
            return []
        if n not in self._evaluations:
            order = orders.forwards(self.schedule, n)
            self._evaluations[n] = self._apart(order, self._execute, training=False)
        losses, kept = self._evaluate(
            self._evaluations[n], lambda: joined(batches, m, slices, self.device), outputs
        )
        each = [None] * n if losses is None else [*losses.view(n, m).sum(1)]
        parts = (kept[first : first + m] for first in range(0, n * m, m))
        return [*zip(each, parts, strict=True)] if outputs else each

    def generate(
        self, tokens: Tensor, n: int, *, temperature: float = 0.0, seed: int = 0,
        end: int | None = None,
    ) -> Tensor:  # fmt: skip
        """The tokens that follow, int64 `[sequence, position]`, n at most; the same on every rank.

        tokens: the beginnings, int64 `[sequence, position]`, on every rank; one sequence is enough.
        temperature: 0 takes the likeliest token, more draws one from the scores divided by it, with
        this seed. end: a sequence that has this token only repeats it, and when all have it the
        rest is left out. Each stage keeps keys and values: it has `carries = True` and returns
        (output, carried), as for slices of a sequence, or `carries = False`. Dropout stays as the
        modules have it, so call their `eval()` first.

        Raises: RunError for a stage that does not say what it carries.
        """
        check_carries(self.modules, "generation calls a stage once for each token")
        m = min(self.schedule.m, len(tokens))
        execution = self._apart(one_pass(self.schedule, m), self._execute, training=False)
        for s, stage in execution.parts.stages.items():
            stage.carry = None if stage.carry is None else Cache(s, m)
        chooser = Chooser(len(tokens), temperature, seed, end)
        made = [tokens[:, :0].cpu()]
        while len(made) <= n and not bool(chooser.ended.all()):
            batch = Batch(tokens, None)
            _, outputs = self._evaluate(execution, lambda batch=batch: batch, True)
            tokens = self.guard(
                lambda outputs=outputs: chooser.choose(outputs, self._session.exchange),
                "the choice of a token",
            )
            made.append(tokens)
        return torch.cat(made, dim=1)

    def _evaluate(
        self, execution: Execution, make: Callable[[], Batch], outputs: bool
    ) -> tuple[Tensor | None, list[Any]]:
        """The losses of microbatches, and the outputs if wanted, where this rank has them."""
        stages = execution.parts.stages.values()
        m = execution.program.schedule.m

        def start() -> None:
            load(make(), execution, self.device)
            for stage in stages:
                stage.outputs, stage.observers = [None] * m if outputs else None, ()

        self.guard(start, _START)
        losses = self._run(execution)
        kept = [stage.outputs for stage in stages if stage.outputs is not None]
        return losses, [
            next((out for out in of_mb if out is not None), None)
            for of_mb in zip(*kept, strict=True)
        ]

    def _run(self, execution: Execution) -> Tensor | None:
        """The weighted losses of microbatches, None where there are no targets."""

        def run() -> None:
            with torch.set_grad_enabled(execution.parts.training):
                execution.run()
            execution.parts.check_clean()

        self._timeline = None
        self._session.run(execution, run)
        if execution is self._training:
            self._ran = execution
        stages = execution.parts.stages
        losses, records = self.guard(lambda: losses_of(stages, self.wire), "the sum of the losses")
        self.metrics = {}
        if records:
            found = self.guard(
                lambda: recorded_of(stages, self._session.exchange), "the exchange of metrics"
            )
            self.metrics, self._adds_losses = found.values, found.has_losses
            losses = None if losses is None else losses + found.losses
        return losses

    def _report_odd(self, losses: Tensor) -> None:
        """Warns, once, of losses that are not finite."""
        odd = [mb for mb, loss in enumerate(losses.tolist()) if not math.isfinite(loss)]
        if not self._reported:
            warnings.warn(
                f"step {self.steps_done}: the loss of microbatch {odd[0]} is "
                f"{float(losses[odd[0]])} ({len(odd)} of {len(losses)} are not finite); a hook "
                "before_forward shows which stage gets the first such value",
                stacklevel=4,
            )
        self._reported = True

    # --- gradients --------------------------------------------------------------------------

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of the whole model, float64, the same on all ranks; collective.

        Copies and tied weights count once, of sharded weights all shards, and the experts of all
        replicas.

        Raises: RunError after a step with sync=False.
        """
        self._parameters.check_synced("grad_norm")
        total = self.guard(lambda: self._parameters.norm(norm_type), "the norm of the gradients")
        return torch.tensor(total, dtype=torch.float64, device=self.device)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:  # fmt: skip
        """The norm of the gradients before they are scaled to `max_norm` at most; collective.

        As `torch.nn.utils.clip_grad_norm_`, for the model that all ranks hold together: after
        `step`, or in the hook `gradients_ready`.

        Raises: RunError for a norm that is not finite, with `error_if_nonfinite`.
        """
        total = self.grad_norm(norm_type)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RunError(
                f"the norm of the gradients is {float(total)}, so they cannot be clipped"
            )
        self._parameters.clip(max_norm, total, foreach)
        return total

    def unscale_(self, scaler: Any, optimizer: Any) -> bool:
        """Whether a gradient of any rank is infinite or not a number; collective.

        Divides the gradients of this rank by the scale of its `torch.amp.GradScaler`. All ranks
        then decide alike: `scaler.step(optimizer)` and `scaler.update()` come next, with
        `clip_grad_norm_` before them.

        Raises: RunError where the ranks have other scales, or gradients are not complete.
        """
        self._parameters.check_synced("unscale_")
        return self.guard(lambda: self._parameters.unscale(scaler, optimizer), "unscale_")

    # --- by the names of the whole model ----------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank by their names in the whole model, whatever the partition.

        A stage is a part of the model, or as many as an `nn.Sequential` has: `7.linear.weight` is
        in the part that seven others come before. Names of a loss begin with `loss.`. A module
        with a method `whole_name(name)` says itself what its weights are called.
        """
        for s, module in self._parameters.modules.items():
            for name, p in module.named_parameters(remove_duplicate=False):
                yield self._renamings[s](name), p

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers of this rank, named as in `named_parameters`.

        Raises: RunError for a name that two stages have.
        """
        out: dict[str, Any] = {}
        for s, module in self._parameters.modules.items():
            for name, value in module.state_dict().items():
                whole = self._renamings[s](name)
                if whole in out:
                    raise RunError(f"stage {s} and one before it both have the name {whole!r}")
                out[whole] = value
        return out

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes this rank's parameters and buffers from a `state_dict`, which may hold others too.

        Raises: RunError for one that is missing or does not fit.
        """
        for s, module in self._parameters.modules.items():
            names = {name: self._renamings[s](name) for name in module.state_dict()}
            missing = [whole for whole in names.values() if whole not in state]
            if missing:
                raise RunError(f"the state has no {missing[0]!r}, which stage {s} needs")
            try:
                module.load_state_dict({name: state[whole] for name, whole in names.items()})
            except RuntimeError as error:
                reason = str(error).splitlines()[-1].strip()
                raise RunError(f"the state does not fit stage {s}: {reason}") from None

    # --- measured and verified --------------------------------------------------------------

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
            self._timeline = gather(self.lowered, self._ran.spans, self._session, self._tag(1))
        return self._timeline

    def verify(
        self, inputs: Any, targets: Any, *, weights: Sequence[float] | None = None,
        replicated: Collection[Any] = (), arguments: Arguments | None = None,
    ) -> None:  # fmt: skip
        """Compares loss and gradients of one step with the unpipelined model; collective.

        The whole batch goes through the stages one after the other, with full backwards; or its
        microbatches do, where the batch is a list, weights or a seed are given, or stages record
        losses. In a schedule
        with slices a seed does not count: the sequences are left uncut, and nothing is dropped
        out. Gradients and buffers are left as they were.

        Raises: RunError that names the parameter that is furthest off.
        """
        training = self._training
        if training is None:
            raise RunError(f"{self.schedule.name} has no backward to verify")
        self._verify_first = False
        self._parameters.check_synced("verify")
        batch = self._batch(inputs, targets, weights, replicated, arguments)
        sliced = self.schedule.placement.slices > 1
        ready = batch.ready or (self._keys is not None and not sliced)
        whole = b"1" not in self._session.exchange(b"1" if ready else b"0")
        with verify.without_dropout(self.modules) if sliced else nullcontext():
            off = verify.compare(
                self._parameters.modules,
                lambda: self._train(training, batch, trained=False),
                lambda: self._train(
                    self._reference(whole and not self._adds_losses), batch, trained=False
                ),
            )
        texts = [raw.decode() for raw in self._session.exchange(off.gradient.encode())]
        verify.refuse(texts, off.loss, sliced=sliced)

    def _reference(self, whole: bool) -> Execution:
        return self._apart(verify.one_after_the_other(self.schedule, whole=whole), Execution)

    def _apart(
        self, order: Schedule, execute: Callable[..., Execution], *, training: bool = True
    ) -> Execution:
        """Another order on the same modules, with backwards that are not split."""
        stages = self._stages_of(order, {})
        for s, stage in stages.items():
            stage.keys = self._stages[s].keys
        order = orders.lower(order, tagged=self._session.tagged)
        return self._bind(order, stages, execute, training=training)

    # --- the other ranks --------------------------------------------------------------------

    def guard(self, call: Callable[[], Any], what: str) -> Any:
        """What a call returns; for what ranks do together around the steps, such as a barrier.

        A failure in it ends the pipeline on all ranks, as one in a step does. what: names it in
        the error, in words.

        Raises: RunError that names the first rank that failed, where and why.
        """
        return self._session.guard(call, what)

    def close(self) -> None:
        """Ends the threads of this pipeline and takes the split backward off its modules."""
        self._session.close()
        for plan in self.split_plans.values():
            plan.close()


_START = "the start of the evaluation"


def _device(device: torch.device | str | None, stages: Mapping[int, nn.Module]) -> torch.device:
    if device is not None:
        return torch.device(device)
    first = next((p for module in stages.values() for p in module.parameters()), None)
    return torch.device("cpu") if first is None else first.device
