"""The split backward against the plain one: same gradients, no more work, no more memory."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hocket.runtime import split

pytestmark = pytest.mark.runtime


@pytest.fixture(autouse=True)
def _float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # The tensors are tiny, and other tests run beside.
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)


class Block(nn.Module):
    """A pre-norm transformer block; the activation of the MLP changes its input in place."""

    def __init__(self, width=8, heads=2, inplace=False):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act = nn.ReLU(inplace=True) if inplace else nn.GELU()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(self.act(self.up(self.norm2(x))))


def blocks(count=2, **options):
    return nn.Sequential(*(Block(**options) for _ in range(count)))


def close(got, want, tolerance=1e-12):
    """Largest error relative to the largest entry; None only equals None."""
    if got is None or want is None:
        assert got is None and want is None
        return
    assert got.shape == want.shape and got.dtype == want.dtype
    assert (got - want).abs().max() <= tolerance * want.abs().max()


def tensors(value):
    return [value] if isinstance(value, torch.Tensor) else list(value)


def backward_of(outputs):
    """A backward that gives every output that has a graph its own, uneven, gradient."""
    roots = [y for y in tensors(outputs) if y.requires_grad]
    torch.autograd.backward(roots, [torch.cos(y.detach()) + 0.5 for y in roots])


def check(module, *inputs, deferred=None, rounds=2, tolerance=1e-12, in_both=()):
    """Run plain and split side by side: outputs, input and parameter gradients must agree.

    Round 2 adds to the gradients of round 1. Returns the split module and its plan.
    """
    plain, halves = module, copy.deepcopy(module)
    plan = split.prepare(halves)
    for turn in range(rounds):
        xs, ys = (
            [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs] for _ in "ab"
        )
        outputs = plain(*xs)
        backward_of(outputs)
        others = halves(*ys)
        for got, want in zip(tensors(others), tensors(outputs), strict=True):
            close(got, want, tolerance)
        with plan.input_backward() as pending:
            backward_of(others)
        for x, y in zip(xs, ys, strict=True):
            close(y.grad, x.grad, tolerance)
        if deferred is not None:
            assert len(pending) == deferred
        if turn == 0:
            early = {n for n, p in halves.named_parameters() if p.grad is not None}
            assert early <= set(plan.whole) | shared(halves) | set(in_both)
        pending.run()
        assert len(pending) == pending.nbytes == 0
        for (name, got), want in zip(halves.named_parameters(), plain.parameters(), strict=True):
            assert got.grad is None or got.grad.grad_fn is None, name
            close(got.grad, want.grad, tolerance)
    return halves, plan


def shared(module):
    """Names of parameters that more than one module holds."""
    names = [(n, id(p)) for n, p in module.named_parameters(remove_duplicate=False)]
    ids = [key for _, key in names]
    return {n for n, key in names if ids.count(key) > 1}


def rand(*shape, grad=True):
    return torch.randn(*shape, requires_grad=grad)


class Apply(nn.Module):
    """A module made of a function of its children and parameters, to write one-off stages."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *xs):
        return self.function(self, *xs)


# ---- the numbers, the work, the memory


def test_transformer_blocks_have_the_gradients_of_the_plain_backward():
    _, plan = check(blocks(2), rand(2, 5, 8), deferred=14)
    assert [n for n in plan.deferred if n.startswith("0.")] == [
        *("0.qkv.weight", "0.qkv.bias", "0.out.weight"),
        *("0.up.weight", "0.up.bias", "0.down.weight", "0.down.bias"),
    ]


def test_the_first_microbatch_is_bit_equal():
    plain = blocks(2)
    halves = copy.deepcopy(plain)
    plan = split.prepare(halves)
    x = rand(2, 5, 8)
    backward_of(plain(x))
    with plan.input_backward() as pending:
        backward_of(halves(x))
    pending.run()
    for got, want in zip(halves.parameters(), plain.parameters(), strict=True):
        assert torch.equal(got.grad, want.grad)


def test_a_backward_outside_of_an_I_is_whole_and_bit_equal():
    plain = blocks(2)
    halves = copy.deepcopy(plain)
    split.prepare(halves)
    x = rand(2, 5, 8)
    for module in (plain, halves):
        for _ in range(2):
            backward_of(module(x))
    for got, want in zip(halves.parameters(), plain.parameters(), strict=True):
        assert torch.equal(got.grad, want.grad)


def test_I_and_W_together_do_the_matrix_products_of_B_and_no_more():
    plain = blocks(2, width=16)
    halves = copy.deepcopy(plain)
    plan = split.prepare(halves)
    x = rand(2, 8, 16)

    def flops(call):
        with FlopCounterMode(display=False) as counter:
            call()
        return counter.get_total_flops()

    def half():
        with plan.input_backward() as pending:
            y.backward(torch.ones_like(y))
        queue.append(pending)

    queue = []
    y = plain(x)
    whole = flops(lambda: y.backward(torch.ones_like(y)))
    y = halves(x)
    i, w = flops(half), flops(queue[0].run)
    assert i + w == whole
    # W: 2 flops for each of the 16 tokens and each entry of the weights (12 width^2 a block).
    assert w == 2 * 16 * (2 * 12 * 16 * 16)


def test_between_I_and_W_no_tensor_of_the_graph_lives_but_the_inputs_of_products():
    halves = blocks(2)
    plan = split.prepare(halves)
    saved, inputs = [], []
    x = rand(2, 5, 8)
    leaves = {p.untyped_storage()._cdata for p in (x, *halves.parameters())}

    def storage(t):
        return StorageWeakRef(t.untyped_storage())

    def alive(among):
        return {ref.cdata for ref in among if not ref.expired()} - leaves

    for module in halves.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, args: inputs.append(storage(args[0])))
    with saved_tensors_hooks(lambda t: saved.append(storage(t)) or t, lambda t: t):
        y = halves(x)
    assert len(alive(saved)) > 20
    with plan.input_backward() as pending:
        backward_of(y)
    assert len(inputs) == 8 and alive(saved) == alive(inputs) == {ref.cdata for ref in inputs}
    pending.run()
    assert alive(saved) == set()


def test_nbytes_is_X_and_dY_of_every_product_with_each_storage_counted_once():
    def three(m, x):
        return m.q(x) + m.k(x) * m.v(x)

    halves = Apply(three, q=nn.Linear(4, 6), k=nn.Linear(4, 6), v=nn.Linear(4, 6))
    plan = split.prepare(halves)
    y = halves(rand(10, 4))
    with plan.input_backward() as pending:
        backward_of(y)
    assert len(pending) == 6
    assert pending.nbytes == 8 * (10 * 4 + 3 * 10 * 6)  # One X, three dY, float64.
    pending.run()
    assert pending.nbytes == 0


def test_the_allocator_holds_nbytes_between_I_and_W_and_nothing_after():
    halves = blocks(2, width=32)
    plan = split.prepare(halves)
    x = rand(2, 16, 32)
    for p in (x, *halves.parameters()):
        p.grad = torch.zeros_like(p)
    dy = torch.ones_like(x)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        y = halves(x)
        with plan.input_backward() as pending:
            y.backward(dy)
        del y
        held = pending.nbytes - dy.nbytes  # The caller's dY was there before.
        with record_function("mark I"):
            pass
        pending.run()
        with record_function("mark W"):
            pass
    events = prof.profiler.kineto_results.events()
    marks = sorted(e.start_ns() for e in events if e.name().startswith("mark "))
    memory = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    after_i, after_w = (sum(size for at, size in memory if at < mark) for mark in marks)
    assert held <= after_i <= held + 1024 and after_w <= 1024  # A few scalars of the profiler.


def test_no_graph_hangs_on_a_gradient_and_X_and_dY_die_in_W():
    halves = blocks(1)
    plan = split.prepare(halves)
    kept = []
    halves[0].down.register_forward_pre_hook(lambda _, args: kept.append(weakref.ref(args[0])))
    y = halves(rand(2, 5, 8))
    y.register_hook(lambda dy: kept.append(weakref.ref(dy)))
    with plan.input_backward() as pending:
        backward_of(y)
    assert len(kept) == 2 and all(ref() is not None for ref in kept)
    with torch.enable_grad():
        pending.run()
    assert all(p.grad.grad_fn is None and not p.grad.requires_grad for p in halves.parameters())
    assert [ref() for ref in kept] == [None, None]


def test_W_adds_in_place_where_a_gradient_exists():
    halves = nn.Linear(4, 3)
    plan = split.prepare(halves)
    main = torch.ones(3, 4)
    halves.weight.grad = main
    with plan.input_backward() as pending:
        halves(rand(5, 4)).sum().backward()
    assert torch.equal(main, torch.ones(3, 4))
    pending.run()
    assert halves.weight.grad is main and not torch.equal(main, torch.ones(3, 4))


def test_a_new_gradient_has_the_strides_of_its_parameter_and_its_own_memory():
    halves = nn.Linear(4, 3)
    halves.weight.data = torch.randn(4, 3).t()
    plan = split.prepare(halves)
    dy, x = torch.ones(1, 3), rand(1, 4)
    with plan.input_backward() as pending:
        halves(x).backward(dy)
    pending.run()
    assert halves.weight.grad.stride() == (1, 3)
    held = {p.grad.untyped_storage().data_ptr() for p in halves.parameters()}
    assert len(held | {dy.data_ptr(), x.data_ptr()}) == 4


def test_a_gradient_kept_in_another_dtype_stays_in_it():
    halves = nn.Linear(4, 3).to(torch.bfloat16)
    if not hasattr(halves.weight, "grad_dtype"):
        pytest.skip("this torch has no Tensor.grad_dtype")
    halves.weight.grad_dtype = torch.float32
    plan = split.prepare(halves)
    for _ in range(2):
        with plan.input_backward() as pending:
            halves(rand(5, 4).to(torch.bfloat16)).sum().backward()
        pending.run()
        assert halves.weight.grad.dtype is torch.float32
        assert halves.bias.grad.dtype is torch.bfloat16


# ---- stages of every kind


def test_a_weight_tied_between_two_linears():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    check(nn.Sequential(first, nn.Tanh(), second), rand(3, 4), deferred=4)


def test_a_head_tied_to_the_embedding_gets_both_parts():
    embed, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embed.weight
    module = nn.Sequential(embed, Block(4), head)
    _, plan = check(module, torch.randint(7, (2, 5)), deferred=8)
    assert plan.whole["0.weight"] == "a lookup is not a matrix product"
    assert "2.weight" in plan.deferred


def test_a_module_called_several_times_in_one_forward():
    check(
        Apply(lambda m, x: m.f(torch.tanh(m.f(m.f(x)))), f=nn.Linear(4, 4)), rand(3, 4), deferred=6
    )


def test_one_X_used_twice():
    check(Apply(lambda m, x: m.f(x) * m.g(x) + x, f=nn.Linear(4, 4), g=nn.Linear(4, 4)), rand(3, 4))


def test_a_product_of_two_parameters():
    module = Apply(lambda m, x: m.f(m.g.weight) @ m.g(x), f=nn.Linear(4, 4), g=nn.Linear(4, 4))
    check(module, rand(4, 4), deferred=4, in_both=["g.weight"])


def test_frozen_parameters_get_nothing_and_their_module_passes_the_gradient_on():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].requires_grad_(False)
    module[2].bias.requires_grad_(False)
    _, plan = check(module, rand(3, 4), deferred=3)
    assert plan.whole["1.weight"] == "it is frozen (requires_grad is False)"


def test_a_trainable_bias_on_a_frozen_weight_comes_in_I():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].weight.requires_grad_(False)
    _, plan = check(module, rand(3, 4), deferred=2)
    assert plan.whole["0.bias"] == (
        "its weight is left whole: it is frozen (requires_grad is False)"
    )


def test_a_first_stage_with_integer_input():
    check(nn.Sequential(nn.Embedding(7, 8), Block()), torch.randint(7, (2, 5)), deferred=7)


def test_an_input_that_needs_no_gradient():
    check(blocks(2), rand(2, 5, 8, grad=False), deferred=14)


def test_unused_parameters_get_no_gradient():
    module = Apply(lambda m, x: m.f(x), f=nn.Linear(4, 4), idle=nn.Linear(4, 4))
    halves, _ = check(module, rand(3, 4), deferred=2)
    assert halves.idle.weight.grad is None


def test_an_expert_without_tokens_gets_zeros_as_in_the_plain_backward():
    module = Apply(lambda m, x: m.f(x[:0]).sum(0) + m.g(x), f=nn.Linear(4, 4), g=nn.Linear(4, 4))
    halves, _ = check(module, rand(3, 4), deferred=4)
    assert not halves.f.weight.grad.any()


def test_inputs_of_one_and_of_four_axes():
    check(nn.Linear(4, 3), rand(4), deferred=2)
    check(nn.Linear(4, 3), rand(2, 3, 2, 4), deferred=2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_is_recomputed_once_and_in_I(reentrant):
    def run(m, x):
        for block in m.layers:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    halves, plan = check(Apply(run, layers=blocks(2)), rand(2, 5, 8), deferred=14)
    for block in halves.layers:
        block.calls = 0
    y = halves(rand(2, 5, 8))
    assert [block.calls for block in halves.layers] == [1, 1]
    with plan.input_backward() as pending:
        backward_of(y)
    assert [block.calls for block in halves.layers] == [2, 2]
    pending.run()
    assert [block.calls for block in halves.layers] == [2, 2]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_outside_of_an_I_is_whole(reentrant):
    plain = Apply(lambda m, x: checkpoint(m.f, x, use_reentrant=reentrant), f=Block())
    halves = copy.deepcopy(plain)
    split.prepare(halves)
    for module in (plain, halves):
        torch.manual_seed(1)
        backward_of(module(rand(2, 5, 8)))
    for got, want in zip(halves.parameters(), plain.parameters(), strict=True):
        close(got.grad, want.grad)


class Double(torch.autograd.Function):
    """A function of the user's: 2x, and its weight counted once."""

    calls = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return 2 * x * weight

    @staticmethod
    def backward(ctx, dy):
        Double.calls += 1
        x, weight = ctx.saved_tensors
        return 2 * dy * weight, (2 * dy * x).sum(0)


def test_a_function_of_the_user_runs_once_and_whole():
    def run(m, x):
        return m.f(Double.apply(m.f(x), m.scale))

    module = Apply(run, f=nn.Linear(4, 4), scale=nn.Parameter(torch.ones(4)))
    Double.calls = 0
    check(module, rand(3, 4), deferred=4, rounds=1)
    assert Double.calls == 2  # Once in the plain backward and once in the split one.


def test_changes_in_place_after_the_product():
    check(blocks(1, inplace=True), rand(2, 5, 8), deferred=7)
    check(Apply(lambda m, x: m.f(x).view(2, 6).mul_(3).relu_(), f=nn.Linear(4, 4)), rand(3, 4))


def test_views_as_outputs():
    module = Apply(lambda m, x: m.f(x)[:, 1:].transpose(0, 1), f=nn.Linear(4, 4))
    check(module, rand(3, 4), deferred=2)
    check(Apply(lambda m, x: m.f(x).chunk(2, -1), f=nn.Linear(4, 4)), rand(3, 4), deferred=2)


def test_an_output_of_which_dY_is_not_contiguous():
    module = Apply(lambda m, x: m.f(x).transpose(0, 1).exp(), f=nn.Linear(4, 4))
    check(module, rand(3, 5, 4), deferred=2)


def test_several_outputs_one_of_them_without_a_gradient():
    module = Apply(
        lambda m, x: (m.f(x), m.g(x).detach(), m.g(x)), f=nn.Linear(4, 4), g=nn.Linear(4, 2)
    )
    check(module, rand(3, 4), deferred=4)


def test_an_output_that_the_loss_does_not_use():
    halves = Apply(lambda m, x: (m.f(x), m.g(x)), f=nn.Linear(4, 4), g=nn.Linear(4, 2))
    plan = split.prepare(halves)
    with plan.input_backward() as pending:
        halves(rand(3, 4))[0].sum().backward()
    pending.run()
    assert halves.f.weight.grad is not None and halves.g.weight.grad is None


def test_parameters_used_by_functions_come_right_in_I():
    def run(m, x):
        x = F.linear(x, m.f.weight, m.f.bias) + m.f(x)
        return torch.einsum("bi,io->bo", x @ m.g.weight, m.w) + m.g(x)

    module = Apply(run, f=nn.Linear(4, 4), g=nn.Linear(4, 4), w=nn.Parameter(torch.randn(4, 4)))
    plain, halves = module, copy.deepcopy(module)
    plan = split.prepare(halves)
    x = rand(3, 4)
    backward_of(plain(x))
    with plan.input_backward() as pending:
        backward_of(halves(x))
    assert len(pending) == 4
    pending.run()
    for got, want in zip(halves.parameters(), plain.parameters(), strict=True):
        close(got.grad, want.grad)


def test_autocast_holds_the_cast_X_and_gives_gradients_in_the_dtype_of_the_parameters():
    def run(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m.f(x).float() ** 2

    torch.set_default_dtype(torch.float32)
    module = Apply(run, f=blocks(2))
    halves, plan = check(module, rand(2, 5, 8), deferred=14, rounds=1, tolerance=1e-6)
    linear = Apply(run, f=nn.Linear(8, 4, bias=False))
    plan = split.prepare(linear)
    with plan.input_backward() as pending:
        backward_of(linear(rand(5, 8)))
    assert pending.nbytes == 2 * (5 * 8 + 5 * 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # W does not care.
        pending.run()
    assert {p.grad.dtype for p in (*linear.parameters(), *halves.parameters())} == {torch.float32}


def test_autocast_leaves_float64_alone():
    def run(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m.f(x)

    check(Apply(run, f=nn.Linear(8, 4)), rand(3, 8), deferred=2)


def test_bfloat16_parameters():
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(torch.bfloat16)
    check(module, rand(3, 8).to(torch.bfloat16), deferred=4, rounds=1, tolerance=0)


@pytest.mark.parametrize(
    ("conv", "shape"),
    [
        (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 9)),
        (lambda: nn.Conv2d(4, 6, (3, 2), dilation=2, groups=2, bias=False), (2, 4, 9, 8)),
        (lambda: nn.Conv3d(2, 3, 2, padding=1), (2, 2, 4, 4, 3)),
        (lambda: nn.Conv2d(4, 6, 3), (4, 9, 8)),
    ],
    ids=["1d", "2d-groups", "3d", "unbatched"],
)
def test_convolutions(conv, shape):
    check(nn.Sequential(conv(), nn.Tanh()), rand(*shape))


def test_a_channels_last_convolution_keeps_the_strides_of_its_weight():
    module = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    halves, _ = check(module, rand(2, 4, 9, 8).to(memory_format=torch.channels_last).detach())
    assert halves.weight.grad.stride() == halves.weight.stride()


def test_module_hooks_see_what_they_always_see():
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    halves = copy.deepcopy(plain)
    plan = split.prepare(halves)
    seen = {}
    for module in (plain, halves):
        record = seen.setdefault(module, [])
        module[0].register_forward_pre_hook(lambda _, a, r=record: r.append(a[0].detach()))
        module[0].register_forward_hook(lambda _, a, y, r=record: r.append(y.detach()) or y * 2)
        module[2].register_full_backward_hook(lambda _, a, b, r=record: r.extend((*a, *b)))
        module[2].register_full_backward_pre_hook(lambda _, a, r=record: r.extend(a))
    x = rand(3, 4)
    backward_of(plain(x))
    with plan.input_backward() as pending:
        backward_of(halves(x))
    pending.run()
    assert len(seen[plain]) == len(seen[halves]) == 5
    for got, want in zip(seen[halves], seen[plain], strict=True):
        close(got, want)
    for got, want in zip(halves.parameters(), plain.parameters(), strict=True):
        close(got.grad, want.grad)


# ---- hooks of parameters


def test_a_post_accumulate_hook_fires_once_after_W_with_the_whole_gradient():
    halves = blocks(1)
    plan = split.prepare(halves)
    fired = []
    for name, p in halves.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, n=name: fired.append((n, p.grad.clone())))
    plain = copy.deepcopy(halves)
    x = rand(2, 5, 8)
    backward_of(plain(x))
    fired.clear()
    with plan.input_backward() as pending:
        backward_of(halves(x))
    assert {name for name, _ in fired} == {n for n in plan.whole}
    pending.run()
    assert sorted(name for name, _ in fired) == sorted(n for n, _ in halves.named_parameters())
    for name, grad in fired:
        close(grad, plain.get_parameter(name).grad)


def tied_stage():
    embed, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embed.weight
    return nn.Sequential(embed, nn.Linear(4, 4), head)


def test_an_optimizer_in_the_hook_of_a_tied_weight_sees_one_microbatch_at_a_time():
    plain = tied_stage()
    halves = copy.deepcopy(plain)
    plan = split.prepare(halves)
    seen = {}
    for module in (plain, halves):

        def step(p, module=module):
            seen.setdefault(module, []).append(p.grad)
            p.grad = None

        module[0].weight.register_post_accumulate_grad_hook(step)
    batches = [torch.randint(7, (2, 5)) for _ in range(2)]
    for x in batches:
        backward_of(plain(x))
    pendings = []
    for y in [halves(x) for x in batches]:
        with plan.input_backward() as pending:
            backward_of(y)
        pendings.append(pending)
    assert halves not in seen
    for pending in pendings:
        pending.run()
    assert len(seen[halves]) == 2 and halves[0].weight.grad is None
    for got, want in zip(seen[halves], seen[plain], strict=True):
        close(got, want)


def test_a_hook_of_a_tied_weight_leaves_earlier_gradients_in_place():
    halves = tied_stage()
    plan = split.prepare(halves)
    main = torch.ones(7, 4)
    halves[0].weight.grad = main
    hook = halves[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with plan.input_backward() as pending:
        backward_of(halves(torch.randint(7, (2, 5))))
    assert halves[0].weight.grad is main and torch.equal(main, torch.ones(7, 4))
    pending.run()
    assert halves[0].weight.grad is main and not torch.equal(main, torch.ones(7, 4))
    hook.remove()
    assert not halves[0].weight._post_accumulate_grad_hooks


def test_a_sparse_part_of_a_hooked_tied_weight():
    module = tied_stage()
    module[0].sparse = True
    halves = copy.deepcopy(module)
    plan = split.prepare(halves)
    fired = []
    halves[0].weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad))
    x = torch.randint(7, (2, 5))
    backward_of(module(x))
    with plan.input_backward() as pending:
        backward_of(halves(x))
    assert pending.nbytes > 0
    pending.run()
    assert len(fired) == 1
    close(halves[0].weight.grad.to_dense(), module[0].weight.grad.to_dense())


def test_a_tensor_hook_before_prepare_leaves_its_parameter_whole():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].weight.register_hook(lambda g: 3 * g)
    module[1].bias.register_hook(lambda g: 3 * g)
    plan = split.prepare(module)
    reason = "it has a tensor hook (register_hook), which may replace its gradient"
    assert plan.whole == {
        "0.weight": reason,
        "0.bias": f"its weight is left whole: {reason}",
        "1.bias": reason,
    }


def test_a_tensor_hook_after_prepare_runs_once_on_the_whole_gradient():
    plain = tied_stage()
    halves = copy.deepcopy(plain)
    plan = split.prepare(halves)
    calls = []
    for module in (plain, halves):
        for p in (module[0].weight, module[1].weight):
            p.register_hook(lambda g: calls.append(g.shape) or 3 * g)
            p.register_post_accumulate_grad_hook(lambda p: calls.append("post"))
    x = torch.randint(7, (2, 5))
    backward_of(plain(x))
    first = sorted(map(str, calls))
    calls.clear()
    with plan.input_backward() as pending:
        backward_of(halves(x))
    pending.run()
    assert sorted(map(str, calls)) == first and len(first) == 4
    for got, want in zip(halves.parameters(), plain.parameters(), strict=True):
        close(got.grad, want.grad)


def test_a_multi_gradient_hook_gets_its_gradients():
    halves = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = split.prepare(halves)
    got = []
    register_multi_grad_hook([halves[0].weight, halves[1].weight], got.append)
    with plan.input_backward() as pending:
        backward_of(halves(rand(3, 4)))
    pending.run()
    assert len(got) == 1 and all(grad is not None for grad in got[0])


def all_reduce_of_one(_, bucket):
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def test_data_parallel_with_gradient_sync_is_whole_and_without_sync_is_split():
    # The fake backend has no threads: the end of a gloo group can wait for one that needs the GIL.
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        plain = blocks(1)
        inner = copy.deepcopy(plain)
        plan = split.prepare(inner)
        wrapped = nn.parallel.DistributedDataParallel(inner)
        wrapped.register_comm_hook(None, all_reduce_of_one)
        batches = [rand(2, 5, 8) for _ in range(2)]
        for x in batches:
            backward_of(plain(x))
        with wrapped.no_sync():
            y = wrapped(batches[0])
            with plan.input_backward() as pending:
                backward_of(y)
        assert len(pending) == 7
        pending.run()
        with plan.input_backward() as pending:
            backward_of(wrapped(batches[1]))
        assert len(pending) == 0
        pending.run()
        for got, want in zip(inner.parameters(), plain.parameters(), strict=True):
            close(got.grad, want.grad)
    finally:
        torch.distributed.destroy_process_group()


# ---- the report


class Scaled(nn.Linear):
    """A Linear that computes something else."""

    def forward(self, x):
        return F.linear(2 * x, self.weight, self.bias)


def weight_normed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(4, 4))


def replaced():
    module = nn.Linear(4, 4)
    module.forward = lambda x: F.linear(x.abs(), module.weight, module.bias)
    return module


KINDS = "is not one of Linear, Conv1d, Conv2d, Conv3d"


@pytest.mark.parametrize(
    ("module", "name", "reason"),
    [
        (Scaled(4, 4), "0.weight", "Scaled is a subclass of Linear and may compute something else"),
        (
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "0.bias",
            "ParametrizedLinear computes it from other tensors",
        ),
        (
            weight_normed(),
            "0.weight_v",
            "a hook computes the weight of this Linear from other tensors",
        ),
        (replaced(), "0.weight", "its forward was replaced on the instance"),
        (nn.LayerNorm(4), "0.weight", f"LayerNorm {KINDS}"),
        (nn.Bilinear(4, 4, 2), "0.weight", f"Bilinear {KINDS}"),
        (nn.MultiheadAttention(4, 2), "0.in_proj_weight", f"MultiheadAttention {KINDS}"),
        (
            nn.MultiheadAttention(4, 2),
            "0.out_proj.weight",
            "NonDynamicallyQuantizableLinear is a subclass of Linear and may compute something "
            "else",
        ),
        (
            nn.Conv1d(4, 4, 3, padding="same"),
            "0.weight",
            "its padding is not plain zeros of a given width",
        ),
        (
            nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"),
            "0.weight",
            "its padding is not plain zeros of a given width",
        ),
        (nn.Linear(4, 4, dtype=torch.complex128), "0.weight", "it is complex"),
        (
            nn.LazyLinear(4),
            "0.weight",
            "it is a UninitializedParameter, not a plain Parameter",
        ),
        (nn.EmbeddingBag(4, 4), "0.weight", "a lookup is not a matrix product"),
    ],
)
def test_what_is_left_whole_is_reported_with_its_reason(module, name, reason):
    plan = split.prepare(nn.Sequential(module))
    assert plan.deferred == () and plan.whole[name] == reason
    assert f"  I  {name}: {reason}" in str(plan).splitlines()


@pytest.mark.parametrize(
    "make", [lambda: Scaled(4, 4), weight_normed, lambda: nn.Bilinear(4, 4, 2)]
)
def test_what_is_left_whole_has_right_gradients(make):
    make_stage = make()
    if isinstance(make_stage, nn.Bilinear):
        check(Apply(lambda m, x: m.f(x, x) * 2, f=make_stage), rand(3, 4), deferred=0)
    else:
        module = nn.Sequential(make_stage, nn.Tanh(), nn.Linear(4, 4))
        plan = split.prepare(module)
        x = rand(3, 4)
        with plan.input_backward() as pending:
            backward_of(module(x))
        assert len(pending) == 2
        pending.run()
        got = [p.grad for p in module.parameters()]
        plan.close()
        module.zero_grad()
        backward_of(module(x))
        for grad, p in zip(got, module.parameters(), strict=True):
            close(grad, p.grad)


def test_a_parametrization_put_on_after_prepare_is_whole_and_right():
    module = nn.Linear(4, 4)
    plan = split.prepare(module)
    nn.utils.parametrizations.weight_norm(module)
    check_against = copy.deepcopy(module)
    plan.close()
    x = rand(3, 4)
    backward_of(module(x))
    with split.prepare(check_against) as second, second.input_backward() as pending:
        backward_of(check_against(x))
        assert len(pending) == 0
    pending.run()
    for got, want in zip(check_against.parameters(), module.parameters(), strict=True):
        close(got.grad, want.grad)


def test_compiled_modules_are_whole_wherever_they_are_met():
    inner = nn.Linear(4, 4)
    module = nn.ModuleDict({"plain": inner, "fast": torch.compile(inner, backend="eager")})
    module["own"] = nn.Sequential(nn.Linear(4, 4))
    module["own"].compile(backend="eager")
    plan = split.prepare(module)
    assert set(plan.whole.values()) == {
        "it runs under torch.compile, whose products wait for W only with "
        "backend=hocket.runtime.split_backend"
    }
    assert plan.deferred == ()


def test_compiling_after_prepare_is_whole_and_right():
    plain = nn.Linear(4, 4)
    halves = copy.deepcopy(plain)
    plan = split.prepare(halves)
    x = rand(3, 4)
    backward_of(plain(x))
    with plan.input_backward() as pending:
        backward_of(torch.compile(lambda x: halves(x), backend="eager")(x))
    pending.run()
    for got, want in zip(halves.parameters(), plain.parameters(), strict=True):
        close(got.grad, want.grad)


def test_the_report_says_how_many_and_names_each():
    plan = split.prepare(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Embedding(2, 2)))
    assert str(plan) == (
        "1 parameters deferred to W, 1 whole in I\n"
        "  W  0.weight\n"
        "  I  1.weight: a lookup is not a matrix product"
    )


def test_a_module_of_another_plan_is_left_to_that_plan():
    inner = nn.Linear(4, 4)
    first = split.prepare(inner)
    second = split.prepare(nn.Sequential(inner, nn.Linear(4, 4)))
    assert second.whole["0.weight"] == "another plan already splits it"
    assert second.deferred == ("1.weight", "1.bias")
    first.close()
    second.close()
    assert "forward" not in vars(inner)


# ---- other kinds of autograd, and plain use


def test_second_derivatives_through_a_prepared_module():
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    conv = nn.Conv1d(2, 2, 2)
    plan, _ = split.prepare(module), split.prepare(conv)
    assert torch.autograd.gradgradcheck(module, (rand(2, 3),))
    assert torch.autograd.gradgradcheck(conv, (rand(1, 2, 4),))
    x = rand(2, 3)
    loss = module(x).sum()
    with plan.input_backward() as pending, pytest.warns(UserWarning, match="create_graph=True"):
        loss.backward(create_graph=True)
    assert len(pending) == 0 and module[0].weight.grad.requires_grad
    module.zero_grad()


def test_autograd_grad_is_never_deferred():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = rand(3, 4)
    want = torch.autograd.grad(module(x).sum(), [x, module[0].weight])
    plan = split.prepare(module)
    with plan.input_backward() as pending:
        got = torch.autograd.grad(module(x).sum(), [x, module[0].weight])
    assert len(pending) == 0 and all(map(torch.equal, got, want))


def test_autograd_grad_under_autocast_is_never_deferred():
    torch.set_default_dtype(torch.float32)
    module = nn.Linear(4, 4)
    plan = split.prepare(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(rand(3, 4))
    with plan.input_backward() as pending:
        (grad,) = torch.autograd.grad(y.sum(), [module.weight])
    assert len(pending) == 0 and grad.dtype is torch.float32


def test_only_the_asked_for_gradients_are_deferred():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = split.prepare(module)
    with plan.input_backward() as pending:
        module(rand(3, 4)).sum().backward(inputs=[module[1].weight])
    assert len(pending) == 1
    pending.run()
    assert [p.grad is None for p in module.parameters()] == [True, True, False, True]


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # Torch's own use.
def test_functional_transforms_and_tangents_use_the_plain_forward():
    module = nn.Linear(4, 3)
    split.prepare(module)
    params = dict(module.named_parameters())
    x = torch.randn(2, 4)

    def loss(params, x):
        return torch.func.functional_call(module, params, (x,)).sum()

    assert torch.func.grad(loss)(params, x)["weight"].shape == (3, 4)
    assert torch.vmap(module)(x).shape == (2, 3)
    assert torch.func.jvp(module, (x,), (x,))[1].shape == (2, 3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        assert torch.autograd.forward_ad.unpack_dual(module(dual)).tangent.shape == (2, 3)


def test_without_gradients_the_forward_is_the_plain_one():
    module = nn.Linear(4, 3)
    split.prepare(module)
    with torch.no_grad():
        assert module(rand(2, 4)).grad_fn is None
    assert module(input=rand(2, 4)).grad_fn.name() == "_LinearNodeBackward"
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        module(rand(2, 5))
    with pytest.raises(TypeError, match="forward"):
        module(rand(2, 4), 1)


def test_a_graph_kept_for_a_second_backward_counts_twice():
    module = nn.Linear(4, 3)
    plan = split.prepare(module)
    y = module(rand(2, 4)).sum()
    y.backward(retain_graph=True)
    once = module.weight.grad.clone()
    with plan.input_backward() as pending:
        y.backward(retain_graph=True)
        y.backward()
    pending.run()
    close(module.weight.grad, 3 * once)


def test_loading_and_moving_keeps_the_split():
    module = nn.Linear(4, 3)
    plan = split.prepare(module)
    module.load_state_dict(nn.Linear(4, 3).state_dict())
    module.float()
    with plan.input_backward() as pending:
        module(rand(2, 4).float()).sum().backward()
    assert len(pending) == 2
    pending.run()
    assert module.weight.grad.dtype is torch.float32


# ---- microbatches, stages, threads


def test_microbatches_interleave_in_any_order():
    plain = blocks(2)
    halves = copy.deepcopy(plain)
    plan = split.prepare(halves)
    xs = [rand(2, 5, 8) for _ in range(3)]
    for x in xs:
        backward_of(plain(x))
    ys, pendings = {}, {}
    for letter, mb in ("F0", "F1", "I0", "F2", "I1", "W0", "I2", "W2", "W1"):
        mb = int(mb)
        if letter == "F":
            ys[mb] = halves(xs[mb])
        elif letter == "I":
            with plan.input_backward() as pendings[mb]:
                backward_of(ys.pop(mb))
        else:
            pendings.pop(mb).run()
    for got, want in zip(halves.parameters(), plain.parameters(), strict=True):
        close(got.grad, want.grad)


def test_two_stages_with_their_own_plans_do_not_meet():
    plain = blocks(2)
    halves = copy.deepcopy(plain)
    plans = [split.prepare(stage) for stage in halves]
    x = rand(2, 5, 8)
    backward_of(plain(x))
    inner = halves[0](x)
    cut = inner.detach().requires_grad_()
    y = halves[1](cut)
    with plans[1].input_backward() as second:
        backward_of(y)
    with plans[0].input_backward() as first:
        inner.backward(cut.grad)
    assert len(first) == len(second) == 7
    first.run()
    second.run()
    for got, want in zip(halves.parameters(), plain.parameters(), strict=True):
        close(got.grad, want.grad)


def test_a_backward_through_the_stage_of_another_plan_is_whole_there():
    halves = blocks(2)
    plans = [split.prepare(stage) for stage in halves]
    y = halves(rand(2, 5, 8))
    with plans[1].input_backward() as pending:
        backward_of(y)
    assert len(pending) == 7 and halves[0].up.weight.grad is not None
    pending.run()


def test_stages_in_threads_at_once():
    plain = [blocks(2) for _ in range(4)]
    halves = copy.deepcopy(plain)
    xs = [rand(2, 5, 8) for _ in plain]
    start = threading.Barrier(len(plain), timeout=240)

    def work(stage, x):
        plan = split.prepare(stage)
        start.wait()
        for _ in range(5):
            y = stage(x)
            with plan.input_backward() as pending:
                backward_of(y)
            pending.run()

    with ThreadPoolExecutor(len(plain)) as pool:
        list(pool.map(work, halves, xs))
    for stage, other, x in zip(halves, plain, xs, strict=True):
        for _ in range(5):
            backward_of(other(x))
        for got, want in zip(stage.parameters(), other.parameters(), strict=True):
            close(got.grad, want.grad)


def test_a_backward_in_another_thread_finds_the_queue_and_W_may_run_in_a_third():
    halves = blocks(1)
    plan = split.prepare(halves)
    y = halves(rand(2, 5, 8))

    def elsewhere(call):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(call).result()

    with plan.input_backward() as pending:
        elsewhere(lambda: backward_of(y))
    assert len(pending) == 7 and halves[0].up.weight.grad is None
    elsewhere(pending.run)
    assert halves[0].up.weight.grad.grad_fn is None


# ---- the life of a plan


def test_close_takes_everything_off():
    module = blocks(1)
    before = {name: sorted(vars(part)) for name, part in module.named_modules()}
    keys = list(module.state_dict())
    plan = split.prepare(module)
    assert list(module.state_dict()) == keys
    plan.close()
    plan.close()
    assert {name: sorted(vars(part)) for name, part in module.named_modules()} == before
    assert b"hocket.runtime" not in pickle.dumps(module[0].up)
    assert module(rand(2, 5, 8)).grad_fn.next_functions[1][0].name() != "_LinearNodeBackward"


def test_copies_and_pickles_of_a_prepared_module_are_plain_modules():
    module = blocks(1)
    plan = split.prepare(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    x = rand(2, 5, 8)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        with torch.no_grad():
            other[0].down.weight.zero_()
            other[0].down.bias.zero_()
        assert not torch.equal(other(x), module(x))
        with plan.input_backward() as pending:
            backward_of(other(x))
        assert len(pending) == 0
        assert len(split.prepare(other).deferred) == 7


def test_a_forward_that_somebody_wrapped_again_goes_plain_after_close():
    module = nn.Linear(4, 4)
    plan = split.prepare(module)
    ours = module.forward
    module.forward = lambda x: ours(x) * 2
    y = module(rand(3, 4))
    with plan.input_backward() as pending:
        backward_of(y)
    assert len(pending) == 2
    plan.close()
    pending.run()
    assert module.weight.grad is not None
    assert module(rand(3, 4)).grad_fn.next_functions[0][0].name() == "AddmmBackward0"


def test_leaving_the_plan_closes_it():
    module = nn.Linear(4, 4)
    with split.prepare(module) as plan:
        assert "forward" in vars(module)
    assert "forward" not in vars(module)
    closed = pytest.raises(
        RuntimeError, match=r"^this plan is closed: prepare\(\) the module again$"
    )
    with closed, plan.input_backward():
        pass


def test_W_runs_once():
    module = nn.Linear(4, 4)
    plan = split.prepare(module)
    with plan.input_backward() as pending:
        backward_of(module(rand(3, 4)))
    pending.run()
    once = r"^this W already ran: run\(\) works once for each input_backward\(\)$"
    with pytest.raises(RuntimeError, match=once):
        pending.run()


def test_W_waits_for_the_end_of_I():
    module = nn.Linear(4, 4)
    plan = split.prepare(module)
    with plan.input_backward() as first:
        backward_of(module(rand(3, 4)))
        own = r"^run\(\) inside input_backward\(\): leave the `with` first, then run W$"
        with pytest.raises(RuntimeError, match=own):
            first.run()
    with plan.input_backward():
        other = r"^run\(\) inside an input_backward\(\) of the same plan: W waits for it$"
        with pytest.raises(RuntimeError, match=other):
            first.run()
        active = r"^input_backward\(\) is already active: a plan runs one I at a time$"
        with pytest.raises(RuntimeError, match=active), plan.input_backward():
            pass
        inside = r"^close\(\) inside input_backward\(\): leave the I first$"
        with pytest.raises(RuntimeError, match=inside):
            plan.close()
    first.run()


def test_a_backward_that_fails_holds_nothing_and_leaves_hooks_and_gradients_alone():
    module = Apply(lambda m, x: m.f(Fails.apply(m.f(x))), f=nn.Linear(4, 4))
    fired = []
    hook = module.f.weight.register_post_accumulate_grad_hook(fired.append)
    main = module.f.weight.grad = torch.zeros(4, 4)
    plan = split.prepare(module)
    with pytest.raises(ValueError, match="no gradient today"), plan.input_backward() as pending:
        backward_of(module(rand(3, 4)))
    assert pending.nbytes == 0 and module.f.weight.grad is main
    assert hook.id in module.f.weight._post_accumulate_grad_hooks and not fired
    lost = "^the backward inside input_backward.. failed, so its weight gradients are not complete$"
    with pytest.raises(RuntimeError, match=lost):
        pending.run()
    with plan.input_backward() as pending:
        backward_of(module.f(rand(3, 4)))
    pending.run()
    assert len(fired) == 1


class Fails(torch.autograd.Function):
    """A function whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        raise ValueError("no gradient today")


@pytest.mark.parametrize("which", ["x", "dy"])
def test_an_X_or_dY_that_changed_after_I_is_refused(which):
    module = nn.Linear(4, 4)
    plan = split.prepare(module)
    buffers = {"x": torch.randn(3, 4), "dy": torch.randn(3, 4)}
    with plan.input_backward() as pending:
        module(buffers["x"]).backward(buffers["dy"])
    buffers[which].copy_(torch.zeros(3, 4))
    told = (
        "^the W of weight cannot run: its X or dY was changed in place after I. Clone the stage's"
    )
    with pytest.raises(RuntimeError, match=told):
        pending.run()
    assert pending.nbytes == 0


def test_a_W_that_is_forgotten_warns():
    module = nn.Linear(4, 4)
    plan = split.prepare(module)
    with plan.input_backward() as pending:
        backward_of(module(rand(3, 4)))
    told = r"^run\(\) was never called: the gradients of bias, weight lack this backward$"
    with pytest.warns(RuntimeWarning, match=told):
        del pending


# ---- random stages

LAYERS = {
    "linear": lambda: nn.Linear(4, 4),
    "bare": lambda: nn.Linear(4, 4, bias=False),
    "norm": lambda: nn.LayerNorm(4),
    "tanh": nn.Tanh,
    "relu": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)),
    "scaled": lambda: Scaled(4, 4),
    "conv": lambda: nn.Sequential(nn.Conv1d(3, 3, 3, padding=1), nn.ReLU(inplace=True)),
    "checkpoint": lambda: Apply(
        lambda m, x: checkpoint(m.f, x, use_reentrant=False), f=nn.Linear(4, 4)
    ),
    "residual": lambda: Apply(lambda m, x: x + m.f(x), f=nn.Linear(4, 4)),
    "block": lambda: Block(4),
}


@settings(max_examples=30, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=5),
    tie=st.booleans(),
    frozen=st.sets(st.integers(0, 8), max_size=2),
    needs_grad=st.booleans(),
)
def test_random_stacks_agree_with_the_plain_backward(kinds, tie, frozen, needs_grad):
    module = nn.Sequential(nn.Linear(4, 4), *(LAYERS[kind]() for kind in kinds), nn.Tanh())
    linears = [m for m in module.modules() if type(m) is nn.Linear and m.weight.shape == (4, 4)]
    if tie:
        linears[-1].weight = linears[0].weight
    for index, p in enumerate(module.parameters()):
        p.requires_grad_(index not in frozen)
    x = rand(2, 3, 4, grad=needs_grad)
    if module(x).requires_grad:
        check(module, x)
