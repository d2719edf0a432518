"""A stage's backward in two halves: I gives the input gradients, W the weight gradients.

It holds what catches the matrix products of a module and the queue of products put off, and never
imports a schedule.

A zero-bubble schedule fills the waits of a pipeline with W, which no other stage waits for (Qi et
al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241). The cut here is the WeightGradStore's of
that paper's code and of DeepSeek's DualPipe (https://github.com/deepseek-ai/DualPipe): each Linear
and convolution is one autograd node whose backward gives dX at once and puts (X, dY) into a queue;
W then computes dY^T X and adds it to the parameter's gradient. So I + W is the work of B, every
other node of the graph (norms, activations, attention, embeddings, functions of your own) runs once
and whole in I, and between the two only X and dY are held. Unlike there, a queue
belongs to one `SplitPlan`, found through the node, so stages, microbatches and threads do not meet.
Functions (`put_off`) and compiled graphs know parameters only, and find the plan that offers these
in `_SLOTS`. And W runs under `no_grad`: otherwise each gradient drags a graph along that
keeps X and dY alive.

    plan = prepare(stage)                        # print(plan) says what is deferred, and why not
    y = stage(x)                                 # F, unchanged
    with plan.input_backward() as pending:       # I
        torch.autograd.backward(y, dy)
    pending.run()                                # W, any time later, also after other F and I

A backward outside `input_backward` stays whole. Three rules for the caller: `dy` and the stage's
input must not be overwritten before W; W runs on the stream that I ran on; and a parameter that
two plans share is to be worked on by one thread at a time. Hooks on the node that accumulates a
gradient (not on the parameter) cannot be seen or put off. DistributedDataParallel has such hooks:
a forward through it with gradient sync on is therefore left whole.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from hocket.runtime.dtensor import alike, is_dtensor, joined, layout, part
from hocket.runtime.fsdp import Shards, kind_of

__all__ = ["PendingWeights", "SplitPlan", "plan_of", "prepare"]

# A rule takes the gradient so far (or None) and a product's operands, and gives the new gradient:
# the same tensor where it could add in place.
Rule = Callable[..., Tensor]


def prepare(module: nn.Module) -> SplitPlan:
    """Return the plan by which `module`'s backward is split, and catch its matrix products.

    Every Linear, Conv1d, Conv2d and Conv3d is caught by an instance-level `forward`; classes,
    parameters and `state_dict` stay as they are. What cannot be deferred safely is left whole: its
    gradient is right, and comes in I. The plan says which and why. `plan.close()` undoes it.
    Prepare after loading, wrapping and moving: a parameter object that is replaced later, or used
    other than through its module (`F.linear(x, m.weight)`), is whole as well, just not foretold.
    """
    slot = _Slot()
    averaged = _in_ddp(module)
    deferred: list[str] = []
    whole: dict[str, str] = {}
    calls = []
    compiled = _under_compile(module)
    for prefix, child in module.named_modules():
        reason = _why_module_whole(child, compiled)
        if reason is None and (why := _why_parameter_whole(child.weight)):
            reason = f"its weight is left whole: {why}"
        for key, param in child.named_parameters(recurse=False):
            name = f"{prefix}.{key}" if prefix else key
            why = _why_parameter_whole(param)
            if why is None and param not in averaged:
                slot.offered.setdefault(param, name)
                _SLOTS.setdefault(param, set()).add(slot)
            why = why or reason
            if why is None:
                deferred.append(name)
                slot.names.setdefault(param, name)
            else:
                whole[name] = why
        if reason is None:
            calls.append(_Forward(child, slot))
    for call in calls:
        call._module.forward = call
    return SplitPlan(tuple(deferred), MappingProxyType(whole), slot, tuple(calls))


def plan_of(module: nn.Module) -> Any:
    """The split of a stage's backward: its own, of a method `split_plan`, or that of `prepare`."""
    own = getattr(module, "split_plan", None)
    with Shards(module).whole():
        return prepare(module) if own is None else own()


def warn_if_empty(stage: int, plan: Any, pending: Any) -> None:
    """Warns where an I put nothing off although there are weights."""
    whole = {name: why for name, why in getattr(plan, "whole", {}).items() if why != _FROZEN}
    if whole and not plan.deferred and not len(pending):
        name, why = next(iter(whole.items()))
        warnings.warn(
            f"stage {stage}: no part of its backward can be put off, so I does all of it and W is "
            f"empty; {name}: {why}",
            stacklevel=4,
        )


@dataclass(frozen=True, eq=False, repr=False)
class SplitPlan:
    """What `prepare` found and installed: the deferred parameters, the whole ones with reasons.

    One plan serves one stage and one backward at a time; forwards, pending W and other plans may
    interleave with it as they like. `close()` restores the module; so does leaving `with plan:`.
    """

    deferred: tuple[str, ...]
    """Names of parameters whose gradient is put off to W where a caught module uses them."""
    whole: Mapping[str, str]
    """Name -> reason of every other parameter: its gradient comes in I."""
    _slot: _Slot = field(repr=False)
    _calls: tuple[_Forward, ...] = field(repr=False)

    @contextlib.contextmanager
    def input_backward(self) -> Generator[PendingWeights, None, None]:
        """Give the queue into which backwards inside the `with` put their weight gradients.

        Call `torch.autograd.backward` (or `Tensor.backward`) inside. `torch.autograd.grad` and
        `create_graph=True` need every gradient at once and stay whole.

        Raises:
            RuntimeError: the plan is closed, or is already inside an I.
        """
        slot = self._slot
        slot.check_open()
        if slot.pending is not None:
            raise RuntimeError("input_backward() is already active: a plan runs one I at a time")
        pending = PendingWeights(slot)
        shelves = [_Shelf(param) for param in slot.names if param._post_accumulate_grad_hooks]
        slot.pending = pending
        early: list[tuple[nn.Parameter, Tensor]] = []
        try:
            yield pending
        except BaseException:
            pending._fail()
            raise
        finally:
            slot.pending = None
            for shelf in shelves:
                early += shelf.restore()
        for param, grad in early:
            pending._put(param, _added, (alike(grad, param),))
        pending._ready()

    def close(self) -> None:
        """Take the catching off the module; pending W of earlier I may still run.

        Raises:
            RuntimeError: inside `input_backward()`.
        """
        if self._slot.pending is not None:
            raise RuntimeError("close() inside input_backward(): leave the I first")
        self._slot.closed = True
        for param in self._slot.offered:
            _SLOTS[param].discard(self._slot)
        for call in self._calls:
            call.remove()

    def __enter__(self) -> SplitPlan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        lines = [f"{len(self.deferred)} parameters deferred to W, {len(self.whole)} whole in I"]
        lines += [f"  W  {name}" for name in self.deferred]
        lines += [f"  I  {name}: {why}" for name, why in self.whole.items()]
        return "\n".join(lines)


class _State(enum.Enum):
    """Where a queue stands; the value says why `run()` cannot be called there."""

    COLLECTING = "run() inside input_backward(): leave the `with` first, then run W"
    READY = ""
    RAN = "this W already ran: run() works once for each input_backward()"
    FAILED = "the backward inside input_backward() failed, so its weight gradients are not complete"


class PendingWeights:
    """The weight gradients of one I that W still has to compute, first in first out."""

    def __init__(self, slot: _Slot) -> None:
        self._slot = slot
        self._queue: deque[_Product] = deque()
        self._state = _State.COLLECTING

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def nbytes(self) -> int:
        """Bytes of the X and dY held now, each storage counted once and in full."""
        operands = (t for product in self._queue for t in product.operands)
        dense = (
            p for t in operands for p in ((t._indices(), t._values()) if t.is_sparse else (t,))
        )
        storages = (t.untyped_storage() for t in dense)
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def run(self) -> None:
        """Compute the weight gradients and add them to `param.grad`; afterwards nothing is held.

        Hooks of `register_post_accumulate_grad_hook` run once a parameter, after its last product.

        Raises:
            RuntimeError: W ran already, I has not ended or failed, or an X or dY was overwritten.
        """
        if self._state is not _State.READY:
            raise RuntimeError(self._state.value)
        if self._slot.pending is not None:
            raise RuntimeError("run() inside an input_backward() of the same plan: W waits for it")
        self._state = _State.RAN
        left = Counter(product.param for product in self._queue)
        devices = {product.param.device.type for product in self._queue}
        try:
            with torch.no_grad(), _autocast_off(*devices):
                while self._queue:
                    _finish(self._queue.popleft(), left)
        finally:
            self._queue.clear()

    def __del__(self) -> None:
        if self._state is _State.READY and self._queue:
            names = sorted({product.name for product in self._queue})
            warnings.warn(
                f"run() was never called: the gradients of {', '.join(names)} lack this backward",
                RuntimeWarning,
                stacklevel=2,
            )

    def _put(self, param: nn.Parameter, rule: Rule, operands: tuple[Tensor, ...]) -> None:
        self._queue.append(_Product(param, self._slot.offered[param], rule, operands))

    def _ready(self) -> None:
        self._state = _State.READY

    def _fail(self) -> None:
        self._state = _State.FAILED
        self._queue.clear()


class _Product:
    """One term of one parameter's gradient: `rule(param.grad, *operands)`."""

    __slots__ = ("name", "operands", "param", "rule", "versions")

    def __init__(
        self, param: nn.Parameter, name: str, rule: Rule, operands: tuple[Tensor, ...]
    ) -> None:
        self.param, self.name, self.rule, self.operands = param, name, rule, operands
        # Autograd checks that X is unchanged when it hands X to I; from there on it is up to us.
        self.versions = _versions(operands)

    def check(self) -> None:
        if _versions(self.operands) != self.versions:
            raise RuntimeError(
                f"the W of {self.name} cannot run: its X or dY was changed in place after I. Clone "
                "the stage's input or the gradient given to backward, or run W before the change"
            )


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [0 if t.is_inference() else t._version for t in tensors]


def _finish(product: _Product, left: Counter[nn.Parameter]) -> None:
    """Add one product to its parameter's gradient; fire the hooks if it was the last one."""
    product.check()
    param = product.param
    grad = product.rule(alike(param.grad, param), *product.operands)
    if grad is not part(param.grad):
        param.grad = joined(_laid_out(grad, part(param)), param)
    left[param] -= 1
    if not left[param] and (hooks := param._post_accumulate_grad_hooks):
        for hook in tuple(hooks.values()):
            hook(param)


def _laid_out(grad: Tensor, param: Tensor) -> Tensor:
    """Return `grad` in the dtype and strides that autograd itself would give `param.grad`."""
    dtype = getattr(param, "grad_dtype", param.dtype) or grad.dtype
    if grad.layout is not torch.strided:
        return grad.to(dtype)
    if grad.dtype == dtype and grad.stride() == param.stride():
        return grad
    return torch.empty_like(param, dtype=dtype).copy_(grad)


class _Shelf:
    """Keeps a hooked parameter out of I's way, so that its hooks see one finished gradient, in W.

    A parameter may be used by a caught module and elsewhere too (an embedding tied to the head).
    The other use's gradient then arrives in I; it is taken here and becomes a product of this W.
    """

    def __init__(self, param: nn.Parameter) -> None:
        self._param, self._grad = param, param.grad
        self._hooks = dict(param._post_accumulate_grad_hooks)
        # Emptied and not replaced: the autograd engine holds this very dictionary.
        param._post_accumulate_grad_hooks.clear()
        param.grad = None

    def restore(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Put gradient and hooks back; return what I accumulated meanwhile, if anything."""
        param, part = self._param, self._param.grad
        param.grad = self._grad
        added = dict(param._post_accumulate_grad_hooks)
        param._post_accumulate_grad_hooks.clear()
        param._post_accumulate_grad_hooks.update(self._hooks | added)
        return [] if part is None else [(param, part)]


class _Slot:
    """What the nodes of one plan share: where to put products now, and for which parameters."""

    def __init__(self) -> None:
        self.pending: PendingWeights | None = None
        self.names: dict[Any, str] = {}
        """The parameters of caught modules."""
        self.offered: dict[Any, str] = {}
        """All whose gradient may be put off, also by functions and compiled graphs."""
        self.closed = False

    def check_open(self) -> None:
        if self.closed:
            raise RuntimeError("this plan is closed: prepare() the module again")

    def queue_for(self, param: nn.Parameter, wanted: bool | None) -> PendingWeights | None:
        """Return where `param`'s product goes, or None if it has to be computed at once."""
        at_once = (
            wanted is None
            or param not in self.offered
            # Their hooks would run in I, before W.
            or (param not in self.names and bool(param._post_accumulate_grad_hooks))
            # A tensor hook may replace the gradient, so autograd has to see it.
            or bool(param._backward_hooks)
            # create_graph: W would be outside the graph.
            or torch.is_grad_enabled()
            or torch._C._are_functorch_transforms_active()
        )
        return None if at_once else self.pending


_SLOTS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameter -> the slots of the open plans that offer it."""


class _Site(NamedTuple):
    """Where a product came from; reaches the backward through the node, never through a thread."""

    slot: _Slot
    weight: nn.Parameter
    bias: nn.Parameter | None
    splits: bool
    adds_bias: bool = True


class _Forward:
    """The instance-level `forward` of a caught module.

    Without a slot (after `close`, in a deep copy, after unpickling) it is the class's own forward.
    """

    def __init__(self, module: nn.Module, slot: _Slot | None = None) -> None:
        self._module: Any = module
        self._slot = slot

    def remove(self) -> None:
        self._slot = None
        if vars(self._module).get("forward") is self:
            del self._module.forward

    @property
    def live(self) -> bool:
        return self._slot is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        module, slot = self._module, self._slot
        x: Any = args[0] if args else kwargs.get("input")
        if slot is None or len(args) + len(kwargs) != 1 or not _splits(slot, x, module.weight):
            return type(module).forward(module, *args, **kwargs)
        site = _Site(slot, module.weight, module.bias, not _in_synced_ddp())
        return _CALLS[kind_of(module)](module, site, x)

    def __reduce__(self) -> tuple[type, tuple[nn.Module]]:
        return _Forward, (self._module,)


def _splits(slot: _Slot, x: Any, weight: Tensor) -> bool:
    """Tell whether this call may become a node of ours; elsewhere the class's forward is right."""
    return (
        (type(x) in (Tensor, nn.Parameter) or is_dtensor(x))
        and is_dtensor(x) is is_dtensor(weight)
        and x.layout is torch.strided
        and not x.is_nested
        # functional_call puts other tensors in the parameter's place.
        and weight in slot.names
        and weight.requires_grad
        and torch.is_grad_enabled()
        and forward_ad._current_level < 0
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
    )


def _in_synced_ddp() -> bool:
    """Tell whether DistributedDataParallel will all-reduce at the end of this forward's backward.

    Its reducer counts calls of the accumulating nodes, which come in I even for an absent gradient.
    """
    ddp = DistributedDataParallel._active_ddp_module
    return ddp is not None and ddp.require_backward_grad_sync


# ---- the nodes


class _LinearNode(torch.autograd.Function):
    """Y = X W^T + b over the last axis: X [..., in], W [out, in], b [out], Y [..., out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, site: _Site) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.site = site
        x = part(x)  # Of tensor parallelism it may still be on its way.
        ctx.save_for_backward(x, weight)
        return _own(functional.linear(x, weight, bias if site.adds_bias else None))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        (dy,) = dys
        if dy is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        with _autocast_off(dy.device.type):
            rows = _rows(part(dy))
            dx = (rows @ weight).reshape(x.shape) if ctx.needs_input_grad[0] else None
            weights = _now_or_later(ctx, (_linear_weight, (x, rows)), (_bias, (rows,)))
        return dx, *weights, None


class _ConvNode(torch.autograd.Function):
    """The convolution of X [batch, in, ...] with W [out, in / groups, ...]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, site: _Site, geometry: tuple
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.site, ctx.geometry = site, geometry
        ctx.save_for_backward(x, weight)
        return _own(torch.convolution(x, weight, bias, *geometry))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        (dy,) = dys
        if dy is None:
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        with _autocast_off(dy.device.type):
            dx = None
            if ctx.needs_input_grad[0]:
                dx = _conv_backward(dy, x, weight, ctx.geometry, 0)
            rule = functools.partial(_conv_weight, shape=weight.shape, geometry=ctx.geometry)
            weights = _now_or_later(ctx, (rule, (x, dy)), (_bias, (dy,)))
        return dx, *weights, None, None


def _own(y: Tensor) -> Tensor:
    """Return `y` as no view: torch forbids changing a view that a node returns in place."""
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


def _now_or_later(ctx: Any, *terms: tuple[Rule, tuple[Tensor, ...]]) -> list[Tensor | None]:
    """Return dW and db of a node, None for each that went to the queue or that nobody wants."""
    site, grads = ctx.site, []
    owners = (site.weight, site.bias)
    for place, (param, (rule, operands)) in enumerate(zip(owners, terms, strict=True), start=1):
        wanted = ctx.needs_input_grad[place] and _wanted(ctx.next_functions[place][0])
        grad = None
        if wanted is not False:
            pending = site.slot.queue_for(param, wanted) if site.splits else None
            if pending is None:
                grad = rule(None, *operands)
            else:
                pending._put(param, rule, operands)
        grads.append(grad)
    return grads


def put_off(
    ctx: Any, parameter: Tensor, compute: Callable[..., Tensor], *operands: Tensor
) -> Tensor | None:
    """Return a parameter's gradient in the backward of a Function, or None if it waits for W.

    `compute(*operands)` gives the gradient. Call this in place of it, for a parameter that the
    Function was applied to, and return the result as that input's gradient. Outside of an I, and
    wherever waiting would not be exact, it computes at once. Operands must not change in place
    until W, where `compute` runs without gradient and autocast.

        dx, dw = dy @ weight, put_off(ctx, weight, lambda dy, x: dy.T @ x, dy, x)
    """

    def run(operands: Sequence[Tensor]) -> list[Tensor]:
        return [compute(*operands)]

    if put_off_together(ctx, [parameter], run, operands):
        return None
    return compute(*operands)


def put_off_together(
    node: Any, owners: Sequence[Any], run: Callable[[Any], list[Tensor]], operands: Sequence[Any]
) -> bool:
    """Whether the gradients of parameters that a node leads to wait for W: all, or none.

    run: called in W with the operands, some of which may be numbers; the gradients in order.
    """
    leaves = [_leaf(above) for above, _ in node.next_functions if above is not None]
    ends = {id(leaf.variable): leaf for leaf in leaves if hasattr(leaf, "variable")}
    queues = set()
    for param in owners:
        slots = [slot for slot in _SLOTS.get(param, ()) if slot.pending is not None]
        if len(slots) != 1 or id(param) not in ends:
            return False
        queues.add(slots[0].queue_for(param, _wanted(ends[id(param)])))
    if len(queues) != 1 or None in queues:
        return False
    (pending,) = queues
    tensors = tuple(t for t in operands if isinstance(t, Tensor))
    numbers = [None if isinstance(t, Tensor) else t for t in operands]
    results: list[Tensor] = []

    def rule(grad: Tensor | None, *held: Tensor) -> Tensor:
        if held:  # The first of them.
            left = iter(held)
            results.extend(_apart(run([next(left) if t is None else t for t in numbers]), held))
        return _added(grad, results.pop(0))

    for number, param in enumerate(owners):
        pending._put(param, rule, () if number else tensors)
    return True


def _apart(terms: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """Return the terms, each in memory of its own, since gradients are added to in place."""
    taken = {t.untyped_storage()._cdata for t in others}
    out = []
    for term in terms:
        own = term.clone() if term.untyped_storage()._cdata in taken else term
        taken.add(own.untyped_storage()._cdata)
        out.append(own)
    return out


def _leaf(node: Any) -> Any:
    """Return the node above the casts of autocast and the `to_local` of a DTensor."""
    while node.name() in ("ToCopyBackward0", "_ToTorchTensorBackward"):
        node = node.next_functions[0][0]
    return node


def _wanted(node: Any) -> bool | None:
    """Tell whether this backward accumulates at `node`; None if it hands the gradient out."""
    node = _leaf(node)
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # What the engine says of a leaf under torch.autograd.grad.
        return None


# ---- the rules


def _added(grad: Tensor | None, term: Tensor) -> Tensor:
    if grad is None:
        return term
    if grad.is_sparse and not term.is_sparse:
        return term + grad
    return grad.add_(term)


def _linear_weight(grad: Tensor | None, x: Tensor, rows: Tensor) -> Tensor:
    """Add dY^T X: `rows` is dY as [tokens, out]."""
    left, right = rows.t(), _rows(x)
    if grad is not None and grad.dtype == right.dtype and grad.layout is torch.strided:
        return grad.addmm_(left, right)  # One pass over the gradient less than mm and add.
    return _added(grad, left @ right)


def _conv_weight(
    grad: Tensor | None, x: Tensor, dy: Tensor, *, shape: torch.Size, geometry: tuple
) -> Tensor:
    # Only the shape of the weight counts for its own gradient.
    weight = x.new_empty(()).expand(shape)
    return _added(grad, _conv_backward(dy, x, weight, geometry, 1))


def _conv_backward(dy: Tensor, x: Tensor, weight: Tensor, geometry: tuple, which: int) -> Tensor:
    """Return the gradient of input (`which` 0) or weight (1) of a convolution, and only that."""
    mask = [which == 0, which == 1, False]
    return torch.ops.aten.convolution_backward(dy, x, weight, None, *geometry, mask)[which]


def _bias(grad: Tensor | None, dy: Tensor) -> Tensor:
    """Add the sum of dY over all axes but the channels: `dy` is [rows or batch, out, ...]."""
    return _added(grad, dy.sum([axis for axis in range(dy.dim()) if axis != 1]))


def _rows(t: Tensor) -> Tensor:
    """Return `t` [..., n] as [rows, n]; also right for no rows at all."""
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


# ---- what is caught


def _call_linear(module: nn.Linear, site: _Site, x: Tensor) -> Tensor:
    if is_dtensor(x):
        spread = layout(module, x)
        if spread is None:
            return nn.Linear.forward(module, x)
        site = site._replace(adds_bias=spread.adds_bias)
        return spread.closed(_linear(*spread.opened(module, x), site), module, x)
    return _linear(x, module.weight, module.bias, site)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, site: _Site) -> Tensor:
    cast = _autocast(x.device.type)
    if x.dim() > 2:
        x = x.contiguous()  # Once and here; else both F and W would copy it into rows.
    return _LinearNode.apply(cast(x), cast(weight), cast(bias), site)


def _call_conv(module: Any, site: _Site, x: Tensor) -> Tensor:
    unbatched = x.dim() < module.weight.dim()
    output_padding = (0,) * len(module.stride)
    widths = (module.stride, module.padding, module.dilation)
    geometry = (*widths, False, output_padding, module.groups)
    cast = _autocast(x.device.type)
    x = cast(x.unsqueeze(0) if unbatched else x)
    y = _ConvNode.apply(x, cast(module.weight), cast(module.bias), site, geometry)
    return y.squeeze(0) if unbatched else y


_CALLS: Mapping[type, Callable[[Any, _Site, Tensor], Tensor]] = MappingProxyType(
    {
        nn.Linear: _call_linear,
        nn.Conv1d: _call_conv,
        nn.Conv2d: _call_conv,
        nn.Conv3d: _call_conv,
    }
)


def _autocast(device: str) -> Callable[[Any], Any]:
    """Return the cast of autocast at this call; done in the graph, before the node."""
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return lambda t: t
    dtype = torch.get_autocast_dtype(device)
    kept = (None, torch.float64)
    return lambda t: t if getattr(t, "dtype", None) in kept else t.to(dtype)


def _autocast_off(*devices: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the products keep the dtype that the forward chose."""
    stack = contextlib.ExitStack()
    for device in devices:
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


# ---- the reasons

_FROZEN = "it is frozen (requires_grad is False)"


def _in_ddp(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that a DistributedDataParallel inside the module averages."""
    return {
        param
        for child in module.modules() if isinstance(child, DistributedDataParallel)
        for param in child.parameters()
    }  # fmt: skip


def _under_compile(module: nn.Module) -> set[nn.Module]:
    """Return the modules that run inside `torch.compile`, under whichever name they are met."""
    roots = (m for m in module.modules() if is_compiled(m))
    return {part for root in roots for part in root.modules()}


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` compiles this very module."""
    wrapped = type(module).__module__.startswith("torch._dynamo")
    return wrapped or module._compiled_call_impl is not None


def _why_module_whole(module: nn.Module, compiled: set[nn.Module]) -> str | None:
    """Return why the products of this very module cannot be put off, or None if they can."""
    kind = kind_of(module)
    override = vars(module).get("forward")
    checks = {
        "it runs under torch.compile, whose products wait for W only with "
        "backend=hocket.runtime.split_backend": module in compiled,
        f"{kind.__name__} computes it from other tensors": hasattr(module, "parametrizations"),
        _why_type_whole(kind): kind not in _CALLS,
        "another plan already splits it": isinstance(override, _Forward) and override.live,
        "its forward was replaced on the instance": not isinstance(override, _Forward | None),
        f"a hook computes the weight of this {kind.__name__} from other tensors": (
            kind in _CALLS and "weight" not in module._parameters
        ),
        f"{kind.__name__} of DTensors is left to torch": (
            kind in _CALLS and kind is not nn.Linear and is_dtensor(module.weight)
        ),
        "its padding is not plain zeros of a given width": (
            getattr(module, "padding_mode", "zeros") != "zeros"
            or isinstance(getattr(module, "padding", None), str)
        ),
    }
    return next((reason for reason, holds in checks.items() if holds), None)


def _why_type_whole(kind: type) -> str:
    if issubclass(kind, nn.Embedding | nn.EmbeddingBag):
        return "a lookup is not a matrix product"
    base = next((base.__name__ for base in _CALLS if issubclass(kind, base)), None)
    if base is not None:
        return f"{kind.__name__} is a subclass of {base} and may compute something else"
    return f"{kind.__name__} is not one of {', '.join(base.__name__ for base in _CALLS)}"


def _why_parameter_whole(param: Tensor) -> str | None:
    """Return why this parameter's gradient cannot be put off wherever it is used, or None."""
    if not param.requires_grad:
        return _FROZEN
    if type(param) is not nn.Parameter and not is_dtensor(param):
        return f"it is a {type(param).__name__}, not a plain Parameter"
    if param.is_complex():
        return "it is complex"
    if param._backward_hooks:
        return "it has a tensor hook (register_hook), which may replace its gradient"
    return None
