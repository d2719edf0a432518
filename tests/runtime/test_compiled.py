"""torch.compile with a backward in two graphs, and functions that name their weight part."""

from __future__ import annotations

import copy

import pytest
import torch
from test_parallel import Products
from torch import nn

from hocket.runtime import Pipeline, put_off, split
from hocket.runtime.compiled import split_backend_eager
from hocket.schedules import build

pytestmark = [
    pytest.mark.runtime,
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf"
    ),  # torch's
]

WIDTH = 6


class Block(nn.Module):
    """Two linears with the same gradient of their biases, a norm, and a product of activations."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in "abc")

    def forward(self, x):
        h = self.norm(x)
        return x + self.c(torch.tanh(self.a(h) + self.b(h)) @ h.mT @ h)


class Broken(Block):
    """Three graphs: one weight is used in two of them, one twice in the same."""

    def forward(self, x):
        y = self.a(x)
        torch._dynamo.graph_break()
        z = torch.tanh(self.b(self.b(y)) + self.a(y))
        torch._dynamo.graph_break()
        return (y + self.c(z)).transpose(0, 1)


def whole(stage, **options):
    return torch.compile(stage, backend=split_backend_eager, **options)


def each(stage):
    for block in stage:
        block.compile(backend=split_backend_eager)
    return stage


def compare(plain, halves, *, products, needs_grad=True):
    """I and W of three microbatches, in turn, against full backwards; returns the plan."""
    plan = split.plan_of(halves)
    parameters = [*plain.parameters()]
    xs = [torch.randn(4, 3, WIDTH).double().requires_grad_(needs_grad) for _ in range(3)]
    others = [x.detach().clone().requires_grad_(needs_grad) for x in xs]
    dy = torch.cos(plain(xs[0]).detach())
    for x in xs:
        plain(x).backward(dy)
    ys = [halves(x) for x in others]
    queue = []
    for y in ys:
        with plan.input_backward() as pending:
            y.backward(dy)
        queue.append(pending)
    Products.count = 0
    for pending in queue:
        with Products():
            pending.run()
    assert Products.count == products * len(xs)
    for got, want in zip([*halves.parameters(), *others], [*parameters, *xs], strict=True):
        if want.grad is None:
            assert got.grad is None
        else:
            assert (got.grad - want.grad).abs().max() < 1e-12 * want.grad.abs().max() + 1e-14
    return plan


@pytest.mark.parametrize(
    ("make", "wrap", "products", "needs_grad"),
    [
        (lambda: [Block(), Block()], whole, 6, True),
        (lambda: [Block(), Block()], each, 6, False),
        (lambda: [Broken()], lambda stage: whole(stage, dynamic=True), 5, True),
    ],
    ids=["whole", "each block", "graph breaks"],
)
def test_the_products_of_a_compiled_stage_wait_for_W(make, wrap, products, needs_grad):
    torch.manual_seed(0)
    stage = nn.Sequential(*make()).double()
    compare(copy.deepcopy(stage), wrap(stage), products=products, needs_grad=needs_grad)


def test_a_compiled_graph_with_a_hooked_weight_is_whole_and_right():
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()
    plain = copy.deepcopy(stage)
    seen = []
    stage[1].weight.register_post_accumulate_grad_hook(seen.append)
    compare(plain, whole(stage), products=0)
    assert len(seen) == 3


def test_a_compiled_stage_trains_in_a_pipeline_and_a_full_backward_is_right():
    torch.manual_seed(0)
    stage = nn.Sequential(Block()).double()
    plain = copy.deepcopy(stage)
    x, y = torch.randn(6, 3, WIDTH).double(), torch.randn(6, 3, WIDTH).double()
    for name in ("zb-h1", "1f1b"):
        nn.functional.mse_loss(plain(x), y).backward()
        pipe = Pipeline(build(name, p=1, m=3), {0: whole(stage)}, nn.functional.mse_loss)
        pipe.step(x, y)
        pipe.close()
    for got, want in zip(stage.parameters(), plain.parameters(), strict=True):
        assert (got.grad - want.grad).abs().max() < 1e-12


# --- functions -------------------------------------------------------------------------------


def product(dy, x):
    return dy.flatten(0, 1).T @ x.flatten(0, 1)


class Rounded(torch.autograd.Function):
    """A product of rounded factors, as in fp8; the gradients go through the rounding."""

    @staticmethod
    def forward(ctx, x, weight):
        x8, w8 = (t.detach().to(torch.float8_e4m3fn).to(t.dtype) for t in (x, weight))
        ctx.save_for_backward(x8, w8, weight)
        return x8 @ w8.T

    @staticmethod
    def backward(ctx, dy):
        x8, w8, weight = ctx.saved_tensors
        return dy @ w8, put_off(ctx, weight, product, dy, x8)


class RoundedLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).double())

    def forward(self, x):
        return Rounded.apply(x, self.seen())

    def seen(self):
        return self.weight


class Scaled(RoundedLinear):
    """Computes the weight, whose gradient cannot wait."""

    def seen(self):
        return 2.0 * self.weight


def rounded(*kinds):
    torch.manual_seed(0)
    stage = nn.Sequential(*(kind() for kind in kinds))
    return copy.deepcopy(stage), stage


def test_the_weight_part_of_a_function_waits_for_W():
    plan = compare(*rounded(RoundedLinear, RoundedLinear), products=2)
    assert plan.deferred == ()  # known only when the function calls
    plain, stage = rounded(RoundedLinear)
    stage = nn.Sequential(stage, stage)  # one weight, used twice
    compare(nn.Sequential(plain, plain), stage, products=2)


@pytest.mark.parametrize("why", ["computed", "tensor hook", "hook", "closed"])
def test_the_weight_part_of_a_function_is_computed_at_once_where_it_cannot_wait(why):
    plain, stage = rounded(Scaled if why == "computed" else RoundedLinear)
    if why == "tensor hook":
        for one in (plain, stage):
            one[0].weight.register_hook(lambda grad: 2 * grad)
    if why == "hook":
        stage[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    if why == "closed":
        split.prepare(stage).close()
        stage = nn.Sequential(stage, nn.Linear(WIDTH, WIDTH).double())
        plain = nn.Sequential(plain, copy.deepcopy(stage[1]))
        compare(plain, stage, products=2)
        return
    compare(plain, stage, products=0)


def test_a_gradient_that_is_one_of_the_operands_gets_memory_of_its_own():
    class Add(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, bias):
            ctx.save_for_backward(bias)
            return x + bias

        @staticmethod
        def backward(ctx, dy):
            (bias,) = ctx.saved_tensors
            return dy, put_off(ctx, bias, lambda dy: dy, dy)

    class Bias(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(4, 3, WIDTH).double())

        def forward(self, x):
            return Add.apply(x, self.bias)

    stage = nn.Sequential(Bias(), Bias())
    compare(copy.deepcopy(stage), stage, products=0)
