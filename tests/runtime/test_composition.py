"""What real models bring into a pipeline: exact, or refused in one sentence on all ranks."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed as dist
from runtime_ranks import Block, Gloo, batch, blocks, close, gradients, held, mean_square, on_ranks
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.testing._internal.distributed.fake_pg import FakeStore

from hocket.errors import RunError
from hocket.lower import recompute
from hocket.runtime import Hooks, Pipeline
from hocket.schedules import build

pytestmark = pytest.mark.runtime


def one_rank(modules, loss=mean_square, m=2, **options):
    """A pipeline of one rank; several modules are its stages."""
    n = len(modules)
    schedule = build("gpipe", p=1, m=m) if n == 1 else build("interleaved", p=1, m=m, v=n)
    return Pipeline(schedule, dict(enumerate(modules)), loss, **options)


def refusal(p, construct):
    """The sentence with which all ranks refuse."""
    errors = on_ranks(p, construct, raises=False)
    assert all(isinstance(e, RunError) for e in errors), errors
    assert len({str(e) for e in errors}) == 1
    return str(errors[0])


# --- values ----------------------------------------------------------------------------------


class Structured(nn.Module):
    """Hands on its output with a mask, as a tuple or a dict; takes either."""

    def __init__(self, seed, how, last):
        super().__init__()
        self.block, self.how, self.last = Block(seed), how, last

    def forward(self, x, mask=None):
        out = self.block(x)
        if self.last:
            return out
        mask = torch.ones(len(x)) if mask is None else mask
        return {"x": out, "mask": mask} if self.how == "dict" else (out, mask)


@pytest.mark.parametrize("how", ["tuple", "dict"])
def test_eval_with_structured_outputs_between_stages_of_one_rank_leaves_nothing_over(how):
    modules = [Structured(i, how, i == 2) for i in range(3)]
    pipe, data = one_rank(modules), batch(4)
    want = float(pipe.step(*data))
    assert float(pipe.eval(*data)) == pytest.approx(want, abs=1e-12)
    assert float(pipe.step(*data)) == pytest.approx(want, abs=1e-12)


class Sparse(nn.Module):
    def forward(self, x):
        return x.to_sparse()


def test_a_sparse_output_of_a_stage_is_refused_by_its_own_rank():
    schedule = build("gpipe", p=2, m=2)

    def rank(r, g):
        module = Block(1) if r else nn.Sequential(Block(0), Sparse())
        pipe = Pipeline(schedule, {r: module}, mean_square, group=g.group)
        pipe.step(*batch(4))

    for error in on_ranks(2, rank, raises=False):
        assert str(error).startswith(
            "rank 0 failed in 0SEND_F0: the output is a sparse tensor; stages hand over dense "
            "tensors of their own rank: return x.to_dense()"
        )


class First(nn.Module):
    """Writes into its input, as a ReLU(inplace=True) at the start of a stage does."""

    def __init__(self, seed):
        super().__init__()
        self.block, self.norm = Block(seed), nn.BatchNorm1d(3, dtype=torch.float64)

    def forward(self, x):
        y = self.norm(x + 1.0)
        x.relu_()
        return self.block(x) + y


@pytest.mark.parametrize("p", [1, 2])
def test_a_stage_that_writes_into_its_input_trains_like_one_process(p):
    modules, data = [Block(0), First(1)], batch(4)
    plain = nn.Sequential(*copy.deepcopy(modules))
    loss = sum(mse_loss(plain(x), y) / 2 for x, y in zip(*(t.split(2) for t in data), strict=True))
    loss.backward()
    schedule = build("interleaved", p=1, m=2, v=2) if p == 1 else build("gpipe", p=2, m=2)

    def rank(r, g):
        stages = held(schedule, r, modules)
        pipe = Pipeline(schedule, stages, mean_square, group=g.group)
        got = pipe.step(*data)
        return got, {s: gradients(m) for s, m in stages.items()}, stages

    for got, grads, stages in on_ranks(p, rank):
        close(got, loss.detach(), "loss")
        for s, by_name in grads.items():
            for name, want in gradients(plain[s]).items():
                close(by_name[name], want, name)
        if 1 in stages:
            close(stages[1].norm.running_mean, plain[1].norm.running_mean, "running mean")


def test_an_input_of_another_dtype_than_the_parameters_is_mentioned():
    class Wide(nn.Module):
        def forward(self, x):
            return x.float()

    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))

        def forward(self, x):
            return x * self.scale

    pipe = one_rank([nn.Sequential(Block(0), Wide()), Narrow()])
    sentence = "stage 1 has parameters of torch.bfloat16, but gets an input of torch.float32"
    with pytest.warns(UserWarning, match=sentence):
        pipe.step(*batch(4))


# --- the loss --------------------------------------------------------------------------------


class Weighed(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, out, target):
        return ((self.scale * out - target) ** 2).mean()


@pytest.mark.parametrize("name", ["1f1b", "chimera"])
@pytest.mark.parametrize("steps", [1, 2])
def test_parameters_of_the_loss_are_averaged_over_replicas_and_summed_over_copies(name, steps):
    schedule, loss = build(name, p=2, m=4), Weighed()
    modules = blocks(schedule.placement.n_stages)
    data = [batch(8, seed=i) for i in range(2)]
    plain, own = nn.Sequential(*copy.deepcopy(modules)), Weighed()
    (sum(own(plain(x), y) for x, y in data) * steps / 2).backward()

    def rank(r, g):
        replica, r = divmod(r, 2)
        groups = [
            Gloo(f"{name}{i}", g.store, a, 2)
            for name, i, a in (("pipe", replica, r), ("dp", r, replica))
        ]
        mine = copy.deepcopy(loss)
        pipe = Pipeline(
            schedule, held(schedule, r, modules), mine,
            group=groups[0], data_parallel=groups[1],
        )  # fmt: skip
        for _ in range(steps):
            pipe.step(*data[replica])
        return r, mine.scale.grad

    for r, grad in on_ranks(4, rank):
        if r == 1 or name == "chimera":
            close(grad, own.scale.grad, "scale")


def test_the_gradient_of_an_expert_accumulates_over_steps():
    def rank(r, g):
        module = nn.Linear(3, 3, dtype=torch.float64)
        module.weight.allreduce = False
        pipe = one_rank([module], data_parallel=g.group)
        pipe.step(*batch(4))
        first = module.weight.grad.clone()
        pipe.step(*batch(4))
        return module.weight.grad / first

    for ratio in on_ranks(2, rank):
        assert torch.allclose(ratio, torch.full_like(ratio, 2.0), atol=1e-12, rtol=0)


def test_a_loss_without_gradient_is_refused_as_torch_does():
    pipe = one_rank([Block(0)], lambda out, y: mean_square(out.detach(), y))
    with pytest.raises(RunError, match=r"the loss of microbatch 0 has no gradient; is the output"):
        pipe.step(*batch(4))


def test_a_stage_whose_output_needs_no_gradient_is_mentioned_once():
    class Detached(Block):
        def forward(self, x):
            return super().forward(x).detach()

    pipe = one_rank([Detached(0), Block(1)])
    with pytest.warns(UserWarning, match=r"^the output of stage 0 needs no gradient") as caught:
        pipe.step(*batch(4))
        pipe.step(*batch(4))
    assert len(caught) == 1


TOKENS = torch.tensor([1, 2, 3, 4, -100, -100, -100, -100])


def test_a_microbatch_of_weight_0_adds_nothing_even_where_its_loss_is_not_a_number():
    modules = [nn.Linear(3, 3, dtype=torch.float64), nn.Linear(3, 5, dtype=torch.float64)]
    x, plain = batch(8)[0], nn.Sequential(*copy.deepcopy(modules))
    want = cross_entropy(plain(x), TOKENS)
    want.backward()
    pipe = one_rank(modules, cross_entropy)
    close(pipe.step(x, TOKENS, weights=[1, 0]), want.detach(), "loss")
    close(pipe.eval(x, TOKENS, weights=[1, 0]), want.detach(), "evaluated")
    for module, right in zip(modules, plain, strict=True):
        for name, grad in gradients(right).items():
            close(gradients(module)[name], grad, name)


def test_eval_takes_weights_such_as_shares_of_the_tokens():
    module, x = nn.Linear(3, 5, dtype=torch.float64), batch(8)[0]
    targets = torch.tensor([1, 2, 3, 4, 0, -100, -100, -100])
    pipe = one_rank([module], cross_entropy)
    want = cross_entropy(module(x), targets).detach()
    close(pipe.eval(x, targets, weights=[4 / 5, 1 / 5]), want, "evaluated")


def test_a_microbatch_without_rows_adds_nothing():
    modules, (x, y) = blocks(2), batch(4)
    plain = nn.Sequential(*copy.deepcopy(modules))
    want = mean_square(plain(x), y)
    want.backward()
    pipe = one_rank(modules)
    close(pipe.step([x, x[:0]], [y, y[:0]]), want.detach(), "loss")
    for module, right in zip(modules, plain, strict=True):
        for name, grad in gradients(right).items():
            close(gradients(module)[name], grad, name)


def test_a_loss_that_is_not_a_number_is_mentioned_with_its_microbatches():
    pipe, (x, y) = one_rank([Block(0)], m=4), batch(8)
    x[2] = torch.nan
    with pytest.warns(UserWarning, match=r"^step 0: the loss of microbatch 1 is nan"):
        pipe.step(x, y)


# --- parts that are not rows -----------------------------------------------------------------


class Positioned(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block(0)

    def forward(self, x, positions):
        return self.block(x + positions[:, None])


@pytest.mark.parametrize("keyed", [False, True])
def test_replicated_parts_reach_every_microbatch_whole(keyed):
    module = Positioned()
    x, y = (t.view(8, 4, 3) for t in batch(32))
    positions = torch.arange(4.0, dtype=torch.float64)
    want = mean_square(module(x, positions), y).detach()
    pipe = one_rank([module], m=4)
    inputs = {"x": x, "positions": positions} if keyed else (x, positions)
    key = "positions" if keyed else 1
    close(pipe.step(inputs, y, replicated=[key]), want, "loss")
    close(pipe.eval(inputs, y, replicated=[key]), want, "evaluated")
    pipe.verify(inputs, y, replicated=[key])
    with pytest.raises(RunError, match=r"\[4, 8\]; name a part .* whole in replicated=$"):
        pipe.step(inputs, y)


@pytest.mark.parametrize(
    ("inputs", "key", "sentence"),
    [
        ((torch.ones(4, 3),), 1, "replicated: inputs has no part 1; it has [0]"),
        ({"x": torch.ones(4, 3)}, "y", "replicated: inputs has no part 'y'; it has ['x']"),
        (torch.ones(4, 3), 0, "replicated= is for inputs that are a tuple or a dict"),
    ],
)
def test_a_replicated_part_that_does_not_exist_is_refused(inputs, key, sentence):
    with pytest.raises(RunError, match=re.escape(sentence)):
        one_rank([Block(0)]).step(inputs, batch(4)[1], replicated=[key])


class Masked(nn.Module):
    """Takes a scale for each row, and one for all of them."""

    def __init__(self, seed):
        super().__init__()
        self.block = Block(seed)

    def forward(self, x, scale=None, bias=0.0):
        return self.block(x) * (1.0 if scale is None else scale[:, None]) + bias


def test_arguments_reach_the_stages_that_name_them_and_no_other():
    modules = [Masked(0), Block(1), Masked(2), Block(3)]
    (x, y), scale = batch(8), torch.linspace(0.5, 2, 8, dtype=torch.float64)
    bias = torch.ones(3, dtype=torch.float64)
    more = {"scale": scale, "bias": bias}
    out = modules[1](modules[0](x, scale, bias))
    want = mean_square(modules[3](modules[2](out, scale, bias)), y).detach()
    seen = {}

    def rank(r, g):
        schedule = recompute(build("1f1b", p=4, m=4), stages=[2])
        pipe = Pipeline(schedule, held(schedule, r, modules), mean_square, group=g.group)
        pipe.hooks.append(Hooks(before_forward=lambda s, mb, a, k: seen.setdefault(s, [*k])))
        given = {"arguments": more, "replicated": ["bias"]}
        pipe.verify(x, y, **given)
        close(pipe.eval(x, y, **given), want, "evaluated")
        parts = [{"scale": rows, "bias": bias} for rows in scale.split(2)]
        close(pipe.eval(x, y, arguments=parts), want, "arguments of each microbatch")
        bare = pipe.eval(x, y)
        own = {"scale": scale, "bias": torch.ones(8, 3, dtype=torch.float64)}
        both = pipe.eval_batches([(x, y), (x, y, own)])
        assert torch.equal(both[0], bare) and not torch.equal(both[0], both[1])
        close(both[1], want, "one of several batches")
        with pytest.raises(RunError, match=r"^arguments: no stage takes 'scal'$"):
            pipe.eval_batches([(x, y, {"scal": scale})])
        return pipe.step(x, y, **given)

    for loss in on_ranks(4, rank):
        close(loss, want, "loss")
    assert seen == {0: ["scale", "bias"], 1: [], 2: ["scale", "bias"], 3: []}


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ([[{"scal": torch.ones(2)}] * 2] * 2, "arguments: no stage takes 'scal'"),
        ([[{"scale": torch.ones(4)}]] * 2, "arguments has 1 microbatches, but the schedule has 2"),
        ([{"scal": torch.ones(4)}] * 2, "arguments: no stage takes 'scal'"),
        ([{"scale": torch.ones(4)}, None], "the ranks were given other arguments= than each other"),
        ([{"scale": torch.ones(2)}] * 2, r"the tensors of inputs differ in rows: \[2, 4\]; name"),
        ([{"bias": torch.ones(3)}] * 2, r"differ in rows: \[3, 4\]; name a part that every"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_on_all_ranks(more, sentence):
    def rank(r, g):
        pipe = Pipeline(build("1f1b", p=2, m=2), {r: Masked(r)}, mean_square, group=g.group)
        pipe.step(*batch(4), arguments=more[r])

    for error in on_ranks(2, rank, raises=False):
        assert isinstance(error, RunError) and re.search(sentence, str(error))


# --- copies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda r: nn.Linear(4, 4 + r),
            "tied parameters differ: [4, 4] float32 on stage 0 (weight), but [5, 4] float32 on "
            "stage 1 (weight)",
        ),
        (
            lambda r: nn.Linear(4, 4, dtype=(torch.float32, torch.float64)[r]),
            "tied parameters differ: [4, 4] float32 on stage 0 (weight), but [4, 4] float64 on "
            "stage 1 (weight)",
        ),
    ],
)
def test_tied_parameters_that_differ_are_named_on_all_ranks(make, sentence):
    def rank(r, g):
        tied = [[(0, "weight"), (1, "weight")]]
        Pipeline(build("1f1b", p=2, m=2), {r: make(r)}, mse_loss, group=g.group, tied=tied)

    assert refusal(2, rank) == sentence


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda m: m.register_parameter("bias", nn.Parameter(torch.ones(2))),
            "copies of stage 0 differ: bias is [3] float32 on rank 0, but [2] float32 on rank 1",
        ),
        (
            lambda m: m.register_parameter("more", nn.Parameter(torch.ones(2))),
            "copies of stage 0 differ: more is missing on rank 0, but [2] float32 on rank 1",
        ),
        (
            lambda m: m.register_buffer("scale", torch.ones(2)),
            "copies of stage 0 differ: scale is missing on rank 0, but a buffer [2] float32 on "
            "rank 1",
        ),
    ],
)
def test_mirrored_copies_that_differ_are_named_on_all_ranks(change, sentence):
    schedule = build("chimera", p=2, m=2)

    def rank(r, g):
        stages = {s: nn.Linear(3, 3) for s in schedule.placement.stages_of_rank[r]}
        if r:
            change(stages[0])
        Pipeline(schedule, stages, mse_loss, group=g.group)

    assert refusal(2, rank) == sentence


class Counting(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.block = Block(seed)
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.register_buffer("scale", torch.tensor(1.0 + seed, dtype=torch.float64))
        self.register_buffer("turns", torch.full((2,), 1j * seed, dtype=torch.complex64))

    def forward(self, x):
        return self.norm(self.block(x)) * self.scale


def test_buffers_of_mirrored_copies_start_equal_and_stay_equal():
    schedule = build("chimera", p=2, m=4)

    def rank(r, g):
        stages = {s: Counting(10 * r + s) for s in schedule.placement.stages_of_rank[r]}
        pipe = Pipeline(schedule, stages, mean_square, group=g.group)
        scales = {s: float(m.scale) for s, m in stages.items()}
        for step in range(2):
            pipe.step(*batch(16, seed=step))
        return scales, {(s, n): b for s, m in stages.items() for n, b in m.named_buffers()}

    (scales, first), (others, second) = on_ranks(2, rank)
    assert scales == others == {0: 1.0, 1: 2.0}
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert int(first[0, "norm.num_batches_tracked"]) == 8  # as in one process
    assert first[0, "norm.running_mean"].any()
    assert second[1, "turns"].tolist() == [1j, 1j]  # those of rank 0


def test_a_stage_that_averages_its_own_gradients_is_refused():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        module = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
        with pytest.raises(RunError) as caught:
            one_rank([nn.Sequential(nn.Linear(3, 3), module)])
    finally:
        dist.destroy_process_group()
    assert str(caught.value) == (
        "stage 0 holds a DistributedDataParallel, which averages after one backward per "
        "forward; give the module inside it, and data_parallel=group"
    )


# --- random numbers --------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer that drops out in a child and by itself."""

    def __init__(self, seed):
        super().__init__()
        self.block, self.drop = Block(seed), nn.Dropout(0.5)

    def forward(self, x):
        return nn.functional.dropout(x + self.drop(self.block(x)), 0.3, self.training)


class Stage(nn.Module):
    """Layers in a list, as the models of Hugging Face have them, with placeholders at the ends."""

    def __init__(self, layers, first, last):
        super().__init__()
        self.first = Block(7) if first else nn.Identity()
        self.layers = nn.ModuleList(layers)
        self.last = nn.Dropout(0.2) if last else nn.Identity()

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def losses(cut, steps=3, done=0, m=2, replicas=None):
    stages, at = [], 0
    for i, n in enumerate(cut):
        layers = [Layer(seed) for seed in range(at, at + n)]
        stages.append(Stage(layers, i == 0, i == len(cut) - 1))
        at += n
    pipe = one_rank(stages, m=m, seed=5, data_parallel=replicas)
    pipe.steps_done = done
    return [float(pipe.step(*batch(4))) for _ in range(steps)]


@pytest.mark.parametrize("cut", [(2, 2), (1, 3), (0, 4), (1, 1, 1, 1)])
def test_random_numbers_do_not_depend_on_the_partition_of_any_module(cut):
    want = losses((4,))
    assert len(set(want)) == 3
    assert losses(cut) == pytest.approx(want, abs=1e-12)


def test_a_resumed_run_goes_on_with_the_random_numbers_of_its_step():
    assert losses((4,), steps=1, done=2) == pytest.approx(losses((4,))[2:], abs=1e-12)


def test_replicas_draw_numbers_of_their_own():
    first, second = on_ranks(2, lambda r, g: losses((4,), steps=1, replicas=g.group))
    assert first != second and first == pytest.approx(losses((4,), steps=1), abs=1e-12)
