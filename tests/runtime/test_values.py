"""Values, shapes and weights: what stages may hand over, and how it may change."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from runtime_ranks import (
    Block,
    assert_like_whole,
    batch,
    blocks,
    close,
    gradients,
    held,
    mean_square,
    on_ranks,
    whole,
)  # fmt: skip
from torch import nn

from hocket.errors import RunError
from hocket.runtime import Pipeline
from hocket.runtime.values import LARGE, Layout, Spec, flatten, rebuild
from hocket.schedules import build

pytestmark = pytest.mark.runtime
ORDERS = [("1f1b", 2), ("zb-h1", 2), ("1f1b", 3), ("zb-h1", 3)]


def test_flatten_and_rebuild_give_back_a_nested_value() -> None:
    t = torch.ones(2)
    value = {"a": (t, None, [t, 3, "x"]), "b": {"c": True, 4: 1.5}}
    structure, tensors = flatten(value)
    spec = Spec.read(Spec.of(structure, tensors).key)
    assert spec.fits(structure, tensors)
    assert rebuild(spec.structure, tensors) == value


def test_a_value_that_cannot_travel_is_named() -> None:
    with pytest.raises(RunError, match=r"^the output\['a'\]\[1\] is a object; stages hand over"):
        flatten({"a": (None, object())}, "the output")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16, torch.complex64])
def test_packed_tensors_keep_their_type(dtype: torch.dtype) -> None:
    spec = Spec.of(*flatten((torch.ones(3, dtype=dtype), torch.ones(0, 2), torch.tensor(1.5))))
    layout = Layout(spec.tensors, 64, alone=True)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    views = layout.views(buffer)
    views[0].copy_(torch.ones(3, dtype=dtype))
    assert views[0].dtype == dtype and views[0].eq(torch.ones(3, dtype=dtype)).all()
    assert views[1].shape == (0, 2) and views[2].shape == ()


class Splitter(nn.Module):
    """Hands on (h, u): u is a second result that the next stage may ignore."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.h, self.u = Block(seed), Block(seed + 100)

    def forward(self, x, u=None):
        return self.h(x), self.u(x)


class Ignorer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.h = Block(seed)

    def forward(self, h, u):
        return self.h(h)


@pytest.mark.parametrize(("name", "p"), ORDERS)
def test_an_output_that_gets_no_gradient_does_not_hang(name: str, p: int) -> None:
    modules = [*(Splitter(i) for i in range(p - 1)), Ignorer(9)]
    assert_like_whole(build(name, p=p, m=4), modules, *batch(8))


class WithMask(nn.Module):
    """Hands on a hidden state, an integer mask and a float table that needs no gradient."""

    def __init__(self, seed: int, first: bool = False, last: bool = False) -> None:
        super().__init__()
        self.block, self.first, self.last = Block(seed), first, last
        self.register_buffer("table", torch.full((3,), 0.5, dtype=torch.float64))

    def forward(self, h, mask=None, rope=None):
        if self.first:
            mask, rope = (h > 0).to(torch.int32), self.table
        h = self.block(h) * mask + rope
        return h if self.last else {"h": h, "mask": mask, "rope": rope}


@pytest.mark.parametrize(("name", "p"), ORDERS)
def test_a_float_tensor_without_gradient_does_not_hang(name: str, p: int) -> None:
    modules = [WithMask(i, i == 0, i == p - 1) for i in range(p)]
    assert_like_whole(build(name, p=p, m=4), modules, *batch(8))


def test_one_gradient_tensor_a_boundary_and_microbatch() -> None:
    schedule = build("1f1b", p=3, m=4)
    modules = [WithMask(i, i == 0, i == 2) for i in range(3)]

    def rank(r, g):
        pipe = Pipeline(schedule, held(schedule, r, modules), mean_square, group=g.group)
        pipe.step(*batch(8))
        return [
            len(spec.gradients)
            for down in pipe._training.parts.down.values()
            for spec in down.agreement.specs
            if spec is not None
        ]

    assert [n for ns in on_ranks(3, rank) for n in ns] == [1] * 8


class Nested(nn.Module):
    def __init__(self, seed: int, last: bool) -> None:
        super().__init__()
        self.block, self.last = Block(seed), last

    def forward(self, x, extra=None):
        h = self.block(x)
        if extra is not None:
            none, (twice, _), number = extra["deep"]
            assert none is None and number == 7
            h = h + twice
        return h if self.last else (h, {"deep": [None, (2 * h, x > 0), 7]})


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "dualpipev"])
def test_nested_values_pass_between_and_within_ranks(name: str) -> None:
    schedule = build(name, p=2, m=4)
    n = schedule.placement.n_stages
    assert_like_whole(schedule, [Nested(i, i == n - 1) for i in range(n)], *batch(8))


def test_a_last_smaller_microbatch_weighs_less() -> None:
    for rows, m in ((5, 3), (8, 3)):
        for name in ("1f1b", "gpipe"):
            assert_like_whole(build(name, p=2, m=m), blocks(2), *batch(rows))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return x * self.w


def test_unequal_microbatches_give_the_loss_of_the_batch_and_not_the_mean_of_means() -> None:
    schedule = build("1f1b", p=2, m=3)
    x = torch.arange(1.0, 9.0, dtype=torch.float64)[:, None]

    def rank(r, g):
        pipe = Pipeline(schedule, {r: Scale()}, mean_square, group=g.group)
        return float(pipe.step(x, torch.zeros_like(x)))

    assert on_ranks(2, rank) == [25.5, 25.5]


def test_weights_of_the_user_replace_the_rows() -> None:
    schedule, modules = build("1f1b", p=2, m=3), blocks(2)
    inputs, targets = batch(6)
    weights = [0.5, 2.0, 1.0]

    def loss(out, target):
        parts = zip(torch.tensor_split(out, 3), torch.tensor_split(target, 3), strict=True)
        return sum(w * mean_square(o, t) for w, (o, t) in zip(weights, parts, strict=True))

    want, grads = whole(modules, inputs, targets, loss)

    def rank(r, g):
        stages = held(schedule, r, modules)
        pipe = Pipeline(schedule, stages, mean_square, group=g.group)
        return pipe.step(inputs, targets, weights=weights), gradients(stages[r])

    for r, (got, mine) in enumerate(on_ranks(2, rank)):
        close(got, want, "loss")
        for name, grad in mine.items():
            close(grad, grads[r][name], name)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipev"])
def test_shapes_may_change_between_steps_and_between_microbatches(name: str) -> None:
    schedule = build(name, p=2, m=4)
    modules = blocks(schedule.placement.n_stages)
    rows = [8, 16, 5, 4, 8, 64]

    def rank(r, g):
        stages = held(schedule, r, modules)
        pipe = Pipeline(schedule, stages, mean_square, group=g.group)
        out = []
        for n in rows:
            for module in stages.values():
                module.zero_grad()
            out.append((pipe.step(*batch(n)), {s: gradients(x) for s, x in stages.items()}))
        return out

    wants = [whole(modules, *batch(n)) for n in rows]
    for steps in on_ranks(2, rank):
        for (loss, grads), (want_loss, want) in zip(steps, wants, strict=True):
            close(loss, want_loss, "loss")
            for s, by_name in grads.items():
                for key, grad in by_name.items():
                    close(grad, want[s][key], f"stage {s} {key}")


def test_microbatches_of_different_sequence_length() -> None:
    schedule, modules = build("1f1b", p=2, m=3), blocks(2)
    inputs = [torch.randn(2, length, 3, dtype=torch.float64) for length in (4, 7, 2)]
    targets = [torch.zeros_like(x) for x in inputs]

    def rank(r, g):
        stages = held(schedule, r, modules)
        pipe = Pipeline(schedule, stages, mean_square, group=g.group)
        pipe.step(inputs[::-1], targets[::-1])
        stages[r].zero_grad()
        return pipe.step(inputs, targets), gradients(stages[r])

    reference = copy.deepcopy(modules)
    losses = [mean_square(reference[1](reference[0](x)), 0 * x) / 3 for x in inputs]
    sum(losses).backward()
    for r, (got, grads) in enumerate(on_ranks(2, rank)):
        close(got, sum(losses).detach(), "loss")
        for name, grad in grads.items():
            close(grad, gradients(reference[r])[name], name)


@pytest.mark.filterwarnings("ignore:stage .. no part of its backward can be put off")
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_large_tensors_travel_alone_and_change_shape(name: str) -> None:
    width = LARGE // 8
    schedule = build(name, p=2, m=2)

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.linspace(0, 1, width, dtype=torch.float64))

        def forward(self, x, small=None):
            return torch.sin(x * self.w), x.sum()

    def loss(out, target):
        return mean_square(out[0], target)

    for rows in (2, 4, 6):
        modules = [Wide(), Wide()]
        assert_like_whole(schedule, modules, *batch(rows, width), loss=loss)

    def rank(r, g):
        pipe = Pipeline(schedule, {r: Wide()}, loss, group=g.group)
        return [float(pipe.step(*batch(rows, width))) for rows in (2, 4, 4, 6, 2)]

    first, second = on_ranks(2, rank)
    assert first == second and first[0] == first[-1] and first[1] == first[2]


def test_gradients_of_accumulated_steps_add_up() -> None:
    for name, p in (("1f1b", 2), ("zb-h1", 2), ("chimera", 2), ("dualpipe", 2)):
        schedule = build(name, p=p, m=4)
        modules = blocks(schedule.placement.n_stages)
        assert_like_whole(schedule, modules, *batch(8), steps=3)


def test_a_frozen_first_stage_has_no_gradient_and_the_others_are_exact() -> None:
    for name in ("1f1b", "zb-h1", "interleaved", "dualpipev"):
        schedule = build(name, p=2, m=4)
        modules = blocks(schedule.placement.n_stages)
        modules[0].requires_grad_(False)
        assert_like_whole(schedule, modules, *batch(8))
        if len(modules) == 2:
            continue
        modules[-1].requires_grad_(False)
        assert_like_whole(schedule, modules, *batch(8))


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, dtype=torch.float64)

    def forward(self, tokens):
        return self.table(tokens)


@pytest.mark.filterwarnings("ignore:stage .. no part of its backward can be put off")
def test_integer_input_of_the_first_stage() -> None:
    tokens = torch.arange(8) % 5
    for name in ("1f1b", "zb-h1", "dualpipe"):
        schedule = build(name, p=2, m=4)
        modules = [Embedding(), *blocks(schedule.placement.n_stages - 1)]
        assert_like_whole(schedule, modules, tokens, batch(8)[1])


def test_an_output_that_is_a_view_or_the_input_itself() -> None:
    class Pass(nn.Module):
        def forward(self, x):
            return x

    class Turn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(3)

        def forward(self, x):
            return self.block(x).t().t()

    for name in ("1f1b", "zb-h1"):
        modules = [Turn(), Pass(), Turn()]
        assert_like_whole(build(name, p=3, m=4), modules, *batch(8))


def test_an_output_is_freed_once_it_was_sent_and_not_kept_until_its_backward() -> None:
    schedule, seen = build("gpipe", p=2, m=6), []

    class Seen(Block):
        def forward(self, x):
            out = super().forward(x) * 1.0  # no backward needs this result
            seen.append(weakref.ref(out))
            out.register_hook(lambda grad: alive.append(sum(r() is not None for r in seen)))
            return out

    alive: list[int] = []

    def rank(r, g):
        module = Seen(0) if r == 0 else Block(1)
        Pipeline(schedule, {r: module}, mean_square, group=g.group).step(*batch(6))

    on_ranks(2, rank)
    assert len(alive) == 6 and max(alive) <= 1


def test_receive_buffers_do_not_grow_with_m() -> None:
    """At most as many messages are posted or on their way as the order has in flight."""
    schedule = build("1f1b", p=4, m=64)
    modules = blocks(4)

    def rank(r, g):
        pipe = Pipeline(schedule, held(schedule, r, modules), mean_square, group=g.group)
        pipe.step(*batch(64))
        peak = 0
        parts = pipe._training.parts
        ends = [*parts.up.values(), *parts.down.values()]
        calls = pipe._training.calls

        def counted(call, mb):
            def run(mb):
                nonlocal peak
                call(mb)
                peak = max(peak, sum(x is not None for e in ends for x in (*e.posted, *e.sent)))

            return run, mb

        pipe._training.calls = [counted(call, mb) for call, mb in calls]
        pipe.step(*batch(64))
        return peak

    assert max(on_ranks(4, rank)) <= 12
