"""What a training script asks of a Pipeline beside a step."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from runtime_ranks import (
    Block,
    Group,
    batch,
    blocks,
    close,
    gradients,
    held,
    mean_square,
    on_ranks,
    whole,
)
from torch import nn

from hocket.errors import RunError, UsageError
from hocket.ir import Kind, kinds_of
from hocket.measured.clocks import Messages, no_time_travel
from hocket.runtime import Pipeline
from hocket.schedules import build

pytestmark = pytest.mark.runtime


# --- evaluation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "dualpipe", "dualpipev"])
def test_evaluation_before_between_and_after_training(name: str) -> None:
    schedule = build(name, p=2, m=4)
    modules = blocks(schedule.placement.n_stages)
    inputs, targets = batch(8)

    def rank(r, g):
        stages = held(schedule, r, modules)
        pipe = Pipeline(schedule, stages, mean_square, group=g.group)
        losses = [pipe.eval(inputs, targets)]
        assert all(p.grad is None for x in stages.values() for p in x.parameters())
        losses.append(pipe.step(inputs, targets))
        before = {s: gradients(x) for s, x in stages.items()}
        losses.append(pipe.eval(inputs, targets))
        for s, x in stages.items():
            for key, grad in gradients(x).items():
                close(grad, before[s][key], key, 0.0)
        return [float(x) for x in losses]

    want, _ = whole(modules, inputs, targets)
    for losses in on_ranks(2, rank):
        assert losses == pytest.approx([float(want)] * 3, abs=1e-12)


def test_evaluation_gives_outputs_only_where_asked_and_no_loss_without_targets() -> None:
    schedule, modules = build("1f1b", p=2, m=4), blocks(2)
    inputs, _ = batch(7)

    def rank(r, g):
        pipe = Pipeline(schedule, held(schedule, r, modules), mean_square, group=g.group)
        return pipe.eval(inputs, outputs=True), pipe.eval(inputs)

    first, last = on_ranks(2, rank)
    assert first == ((None, [None] * 4), None) and last[1] is None
    want = modules[1](modules[0](inputs)).detach()
    close(torch.cat(last[0][1]), want, "outputs")


def test_a_forward_only_schedule_evaluates_and_refuses_to_train() -> None:
    from hocket.lower.evaluation import forward_only

    schedule, modules = forward_only(build("1f1b", p=2, m=4)), blocks(2)

    def rank(r, g):
        pipe = Pipeline(schedule, held(schedule, r, modules), mean_square, group=g.group)
        with pytest.raises(RunError, match=r"^1f1b has no backward; use eval$"):
            pipe.step(*batch(8))
        return float(pipe.eval(*batch(8)))

    assert on_ranks(2, rank) == pytest.approx([float(whole(modules, *batch(8))[0])] * 2)


def test_a_long_evaluation_keeps_few_messages_under_way() -> None:
    schedule, modules = build("1f1b", p=2, m=32), blocks(2)

    def rank(r, g):
        pipe = Pipeline(schedule, held(schedule, r, modules), mean_square, group=g.group)
        down, peaks = pipe._evaluation.parts.down[r], [0]

        def counted(call):
            def run(mb):
                call(mb)
                peaks.append(sum(x is not None for x in down.sent))

            return run

        pipe._evaluation.calls = [(counted(call), mb) for call, mb in pipe._evaluation.calls]
        pipe.eval(*batch(32))
        return max(peaks)

    assert on_ranks(2, rank) == [4, 0]


# --- loss, one rank, inputs ---------------------------------------------------------------------


def test_the_loss_is_the_same_on_every_rank_and_rows_need_only_be_where_they_are_used() -> None:
    schedule, modules = build("1f1b", p=4, m=4), blocks(4)
    inputs, targets = batch(8)

    def rank(r, g):
        pipe = Pipeline(schedule, held(schedule, r, modules), mean_square, group=g.group)
        return pipe.step(inputs if r == 0 else None, targets if r == 3 else None)

    losses = on_ranks(4, rank)
    close(losses[0], whole(modules, inputs, targets)[0], "loss", 1e-12)
    assert all(torch.equal(x, losses[0]) and x.dim() == 0 for x in losses)


def test_one_rank_needs_no_process_group() -> None:
    modules = blocks(1)
    pipe = Pipeline(build("1f1b", p=1, m=3), {0: copy.deepcopy(modules[0])}, mean_square)
    close(pipe.step(*batch(7)), whole(modules, *batch(7))[0], "loss")
    assert pipe.timeline.measured


def test_too_few_rows_are_told() -> None:
    pipe = Pipeline(build("1f1b", p=1, m=3), {0: Block(0)}, mean_square)
    with pytest.raises(RunError, match=r"inputs has 2 rows, too few for 3 microbatches$"):
        pipe.step(*batch(2))


def test_unknown_dispatch_is_told() -> None:
    with pytest.raises(UsageError, match="there is no dispatch 'x'; choose from receive, gate, re"):
        Pipeline(build("1f1b", p=1, m=3), {0: Block(0)}, mean_square, dispatch="x")


# --- dispatch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dispatch", ["gate", "ready"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "chimera", "dualpipev"])
def test_other_ways_to_dispatch_give_the_same_gradients(name: str, dispatch: str) -> None:
    from runtime_ranks import assert_like_whole

    schedule = build(name, p=4, m=8)
    modules = blocks(schedule.placement.n_stages)
    assert_like_whole(schedule, modules, *batch(16), dispatch=dispatch, steps=2)


def test_out_of_order_dispatch_stays_under_the_in_flight_peak_of_the_order() -> None:
    schedule, modules = build("1f1b", p=4, m=12), blocks(4)

    def rank(r, g):
        stages = held(schedule, r, modules)
        pipe = Pipeline(schedule, stages, mean_square, group=g.group, dispatch="ready")
        for _ in range(2):
            pipe.step(*batch(12))
        return [x.peak_in_flight for x in pipe.timeline.ranks]

    for peaks in on_ranks(4, rank):
        assert all(a <= b for a, b in zip(peaks, [4, 3, 2, 1], strict=True))


# --- measured -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "zb-h1", "interleaved"])
def test_the_timeline_has_every_action_and_no_message_arrives_before_it_was_sent(name: str) -> None:
    schedule = build(name, p=2, m=4)
    modules = blocks(schedule.placement.n_stages)

    def rank(r, g):
        pipe = Pipeline(schedule, held(schedule, r, modules), mean_square, group=g.group)
        pipe.step(*batch(8))
        pipe.eval(*batch(8))
        return pipe.gather_timeline()

    for t in on_ranks(2, rank):
        assert t.measured and t.unit == "us"
        assert (t.end >= t.start).all() and t.start.min() == 0 and t.makespan > 0
        kinds = kinds_of(t.schedule.codes)
        assert (kinds < Kind.SEND_F).sum() == len(schedule.codes)
        at = {int(code): i for i, code in enumerate(t.schedule.codes)}
        for e in range(len(t.graph.source)):
            source, target = t.graph.source[e], t.graph.target[e]
            if t.graph.crosses[e]:
                assert t.start[source] <= t.end[source] <= t.end[target]
        assert len(at) == len(t.schedule.codes)
        for summary in t.ranks:
            assert 0 < summary.busy <= t.makespan
        assert t.critical_path()[-1].end == pytest.approx(t.makespan)


def test_clocks_that_disagree_are_moved_until_messages_arrive_after_they_were_sent() -> None:
    import numpy as np

    senders, receivers = np.array([0, 1, 1]), np.array([1, 0, 2])
    sent, received = np.array([100.0, 60.0, 60.0]), np.array([50.0, 120.0, 10.0])
    offsets = no_time_travel(np.zeros(3), Messages(senders, receivers, sent, received))
    assert (received + offsets[receivers] >= sent + offsets[senders]).all()
    assert offsets.tolist() == [0.0, 50.0, 100.0]


def test_profiler_shows_the_labels_of_torch() -> None:
    pipe = Pipeline(build("1f1b", p=1, m=2), {0: Block(0)}, mean_square)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pipe.step(*batch(4))
    names = {event.key for event in profile.key_averages()}
    assert {"PP:0F0", "PP:0B0", "PP:0F1", "PP:0B1"} <= names


# --- random numbers -----------------------------------------------------------------------------


def test_dropout_does_not_depend_on_schedule_or_number_of_ranks() -> None:
    layers = [nn.Sequential(Block(i), nn.Dropout(0.5)) for i in range(4)]
    flat = [layer for pair in layers for layer in pair]
    inputs, targets = batch(8)

    def losses(name: str, p: int) -> list[float]:
        schedule = build(name, p=p, m=4)
        n = schedule.placement.n_stages
        size = len(flat) // n
        modules = [nn.Sequential(*flat[i * size : (i + 1) * size]) for i in range(n)]

        def rank(r, g):
            stages = held(schedule, r, modules)
            pipe = Pipeline(schedule, stages, mean_square, group=g.group, seed=3)
            return [float(pipe.step(inputs, targets)) for _ in range(3)]

        return on_ranks(p, rank)[0]

    state = torch.get_rng_state()
    want = losses("1f1b", 1)
    assert len(set(want)) == 3
    assert torch.equal(state, torch.get_rng_state())
    for name, p in (("1f1b", 2), ("gpipe", 4), ("zb-h1", 4), ("chimera", 2), ("dualpipev", 2)):
        assert losses(name, p) == pytest.approx(want, abs=1e-12)


# --- shared weights and replicas ----------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
        self.last = last

    def forward(self, x):
        return self.w * x + 5 * self.w if self.last else self.w * x


@pytest.mark.parametrize("steps", [1, 2])
def test_tied_weights_on_two_ranks_get_the_sum_of_their_gradients(steps: int) -> None:
    schedule = build("1f1b", p=2, m=1)
    x = torch.full((1, 1), 2.0, dtype=torch.float64)

    def rank(r, g):
        module = Tied(r == 1)
        tied = [[(0, "w"), (1, "w")]]
        pipe = Pipeline(schedule, {r: module}, lambda o, t: o.mean(), group=g.group, tied=tied)
        for _ in range(steps):
            pipe.step(x, x)
        grad = float(module.w.grad)
        torch.optim.SGD([module.w], lr=0.1 / steps).step()
        return grad, float(module.w.detach())

    assert on_ranks(2, rank) == [(17.0 * steps, pytest.approx(1.3))] * 2


def test_a_tied_name_that_does_not_exist_is_told() -> None:
    with pytest.raises(RunError, match=r"^tied: stage 0 has no parameter 'x'$"):
        Pipeline(build("1f1b", p=1, m=1), {0: Block(0)}, mean_square, tied=[[(0, "x")]])


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
def test_mirrored_copies_start_equal_and_stay_equal_to_the_last_bit(name: str) -> None:
    schedule = build(name, p=2, m=4)

    def rank(r, g):
        stages = {s: Block(10 * r + s) for s in schedule.placement.stages_of_rank[r]}
        pipe = Pipeline(schedule, stages, mean_square, group=g.group)
        optimizer = torch.optim.SGD([p for x in stages.values() for p in x.parameters()], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            pipe.step(*batch(8))
            optimizer.step()
        return {(s, n): p.detach() for s, x in stages.items() for n, p in x.named_parameters()}

    first, second = on_ranks(2, rank)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_replicas_get_the_mean_gradient_by_one_reduction_a_step(name: str) -> None:
    schedule, modules = build(name, p=2, m=4), blocks(2)
    batches = [batch(8, seed=i) for i in range(2)]
    counts: list[int] = []

    class Counting:
        def __init__(self, group):
            self.group = group

        def __getattr__(self, name):
            return getattr(self.group, name)

        def allreduce(self, tensors):
            counts.append(1)
            return self.group.allreduce(tensors)

    def rank(r, g):
        replica, r = divmod(r, 2)
        pipe_store = dist.PrefixStore(f"pipe{replica}", g.store)
        dp_store = dist.PrefixStore(f"dp{r}", g.store)
        stages = held(schedule, r, modules)
        pipe = Pipeline(
            schedule,
            stages,
            mean_square,
            group=dist.ProcessGroupGloo(pipe_store, r, 2),
            data_parallel=Counting(dist.ProcessGroupGloo(dp_store, replica, 2)),
        )
        for _ in range(2):
            pipe.step(*batches[replica])
        return gradients(stages[r])

    wants = [whole(modules, *b)[1] for b in batches]
    for i, grads in enumerate(on_ranks(4, rank)):
        for key, grad in grads.items():
            close(grad, wants[0][i % 2][key] + wants[1][i % 2][key], key)
    assert len(counts) == 2 * 4


# --- verified -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "chimera", "interleaved"])
def test_verify_accepts_a_right_step_and_leaves_no_trace(name: str) -> None:
    schedule = build(name, p=2, m=4)
    modules = blocks(schedule.placement.n_stages)

    def rank(r, g):
        stages = held(schedule, r, modules)
        pipe = Pipeline(schedule, stages, mean_square, group=g.group, verify=True)
        pipe.step(*batch(9))
        pipe.verify(*([*torch.tensor_split(t, 4)] for t in batch(9)))
        return {s: gradients(x) for s, x in stages.items()}

    _, want = whole(modules, *batch(9))
    for grads in on_ranks(2, rank):
        for s, by_name in grads.items():
            for key, grad in by_name.items():
                close(grad, want[s][key], key)


def test_verify_names_the_parameter_that_is_off() -> None:
    schedule, modules = build("1f1b", p=2, m=4), blocks(2)

    def rank(r, g):
        def total(out, target):
            return ((out - target) ** 2).sum()

        pipe = Pipeline(schedule, held(schedule, r, modules), total, group=g.group)
        pipe.verify(*batch(8))

    for error in on_ranks(2, rank, raises=False):
        assert isinstance(error, RunError)
        assert "differs from the unpipelined model:\n  the loss is" in str(error)
        assert "rank 0: stage 0, linear." in str(error) and "off by 0.75 of its norm" in str(error)


def test_verify_of_unequal_rows_where_a_stage_mixes_rows_refuses() -> None:
    schedule = build("1f1b", p=2, m=2)

    def rank(r, g: Group):
        module = nn.Sequential(Block(r), nn.BatchNorm1d(3, dtype=torch.float64))
        pipe = Pipeline(schedule, {r: module}, mean_square, group=g.group, verify=True)
        pipe.step(*batch(8))

    for error in on_ranks(2, rank, raises=False):
        assert "or mix rows (batch norm)?" in str(error)


def test_a_stage_that_cannot_be_split_says_so_before_the_first_step_and_is_right() -> None:
    class Scaled(nn.Module):
        """A parameter that no matrix product uses."""

        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor([1.5, -0.5, 2.0], dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x * self.factor)

    schedule = build("zb-h1", p=1, m=3)
    inputs, targets = batch(6)
    want_loss, want = whole([Scaled()], inputs, targets)
    module = Scaled()
    pipe = Pipeline(schedule, {0: module}, mean_square)
    with pytest.warns(UserWarning, match="stage 0: no part of its backward can be put off") as told:
        loss = pipe.step(inputs, targets)
    assert "factor" in str(told[0].message)
    assert "factor" in pipe.split_plans[0].whole
    assert float(loss) == pytest.approx(float(want_loss), abs=1e-12)
    close(gradients(module)["factor"], want[0]["factor"], "factor")
