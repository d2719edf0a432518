"""A backend of torch.compile that cuts each backward in two graphs: I, and the products of W."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch._functorch import config

from hocket.runtime.split import put_off_together

_ATEN = torch.ops.aten
_PRODUCTS = frozenset({
    _ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default,
    _ATEN.convolution_backward.default,
})  # fmt: skip
_VIEWS = frozenset({
    _ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default, _ATEN.t.default,
    _ATEN.permute.default, _ATEN.transpose.int, _ATEN.expand.default, _ATEN.unsqueeze.default,
    _ATEN.squeeze.dim,
})  # fmt: skip
_SUMS = frozenset({
    _ATEN.add.Tensor, _ATEN._to_copy.default, torch.ops.prims.convert_element_type.default,
})  # fmt: skip


def split_backend(graph: fx.GraphModule, inputs: Sequence[Any], *, options: Any = None) -> Any:
    """Returns what torch.compile's own backend does, with a backward that I and W can share.

    `torch.compile(stage, backend=split_backend)`; options are those of torch.compile. The weight
    gradients that end in a matrix product wait for W, and biases and all else are in I. A graph is
    left whole where one of its weights cannot wait, and with CUDA graphs.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compiled(inner: Any) -> Any:
        return compile_fx(graph, list(inputs), inner_compile=inner, config_patches=options)

    return _Halves(compile_fx_inner, inputs).around(compiled)


def split_backend_eager(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Returns the same graphs as `split_backend`, run operation by operation: for debugging."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compiled(inner: Any) -> Any:
        def backward(graph: Any, examples: Any) -> Any:
            return inner(graph, examples, is_backward=True)

        return aot_autograd(
            fw_compiler=inner, bw_compiler=backward,
            partition_fn=min_cut_rematerialization_partition,
        )(graph, inputs)  # fmt: skip

    return _Halves(lambda graph, *_, **__: make_boxed_func(graph.forward), inputs).around(compiled)


class _Halves:
    """One compiled graph: its forward notes the parameters for the backward of the same call."""

    def __init__(self, compiler: Callable[..., Any], inputs: Sequence[Any]) -> None:
        self._compiler = compiler
        self._places = {i for i, x in enumerate(inputs) if isinstance(x, nn.Parameter)}

    def around(self, compiled: Callable[[Any], Any]) -> Callable[..., Any]:
        """The forward."""
        # A backward out of a cache is whole; a donated buffer may be overwritten before W.
        with config.patch(enable_autograd_cache=False, donated_buffer=False):
            forward = compiled(self._compile)

        def run(*args: Any) -> Any:
            outputs = forward(*args)
            for node in _nodes(outputs):
                if not hasattr(node, "split_by"):
                    node.split_by = self
                    node.parameters = {i: args[i] for i in self._places}
            return outputs

        return run

    def _compile(self, graph: fx.GraphModule, examples: Sequence[Any], **more: Any) -> Any:
        cut = (
            _cut(graph, self._places)
            if more.get("is_backward") and not more.get("cudagraphs")
            else None
        )
        if cut is None:
            return self._compiler(graph, examples, **more)
        first = self._compiler(cut.first, examples, **more)
        more.pop("static_input_idxs", None)  # places of inputs in the whole graph
        second = self._compiler(cut.second, cut.examples, **more)
        return self._backward(cut, first, second)

    def _backward(self, cut: _Cut, first: Any, second: Any) -> Callable[[list[Any]], list[Any]]:
        def run(args: list[Any]) -> list[Any]:
            values = list(args)
            made = _call(first, args)
            grads: list[Any] = [None] * (len(cut.now) + len(cut.late))
            for i, grad in zip(cut.now, made, strict=False):
                grads[i] = grad
            values += made[len(cut.now) :]
            held = [values[i] for i in cut.held]
            node: Any = torch._C._current_autograd_node()
            if getattr(node, "split_by", None) is self:
                owners = [node.parameters[i] for i in cut.owners]
                if put_off_together(node, owners, lambda held: _call(second, held), held):
                    return grads
            for i, grad in zip(cut.late, _call(second, held), strict=True):
                grads[i] = grad
            return grads

        run._boxed_call = True  # ty: ignore[missing-attribute]
        return run


def _call(compiled: Any, args: Iterable[Any]) -> list[Any]:
    return list(compiled(list(args)))


def _nodes(outputs: Iterable[Any]) -> Iterable[Any]:
    """The nodes of compiled graphs that these tensors, or what they are views of, come from."""
    for t in outputs:
        node = t.grad_fn if isinstance(t, Tensor) else None
        above = [] if node is None else [node, *(n for n, _ in node.next_functions[:1])]
        yield from (n for n in above if type(n).__name__ == "CompiledFunctionBackward")


class _Cut(NamedTuple):
    """The graph of a backward in two; numbers are places among its inputs or outputs."""

    first: fx.GraphModule
    second: fx.GraphModule
    now: list[int]
    """The outputs of the first graph, before what it hands to the second one."""
    late: list[int]
    """The outputs of the second one."""
    owners: list[int]
    """The inputs of the forward of which these are the gradients."""
    held: list[int]
    """What the second graph takes, of the inputs of the first and what that hands over."""
    examples: list[Any]


def _cut(graph: fx.GraphModule, parameters: set[int]) -> _Cut | None:
    """The backward without the products that nothing but weight gradients needs, and these."""
    end = graph.graph.output_node()
    outputs: Any = end.args[0]
    owners = {i: place for i, place in _owners(end).items() if place in parameters}
    tails = {i: tail for i in owners if (tail := _tail(outputs[i]))}
    needed = _above(out for i, out in enumerate(outputs) if i not in tails)
    late = [i for i, tail in tails.items() if not tail & needed]
    if not late:
        return None
    now = [i for i in range(len(outputs)) if i not in late]
    inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
    held = _held(graph.graph, set().union(*(tails[i] for i in late)))
    made = [n for n in held if n.op != "placeholder"]
    places = {n: i for i, n in enumerate([*inputs, *made])}
    return _Cut(
        _part(graph, inputs, [*(outputs[i] for i in now), *made]),
        _part(graph, held, [outputs[i] for i in late]),
        now, late, [owners[i] for i in late], [places[n] for n in held],
        [n.meta["val"] for n in held],
    )  # fmt: skip


def _owners(end: fx.Node) -> dict[int, int]:
    """Output -> the input of the forward of which it is the gradient, where that is plain."""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

    return {
        i: desc.grad_of.idx
        for i, desc in enumerate(end.meta.get("desc", ()))
        if isinstance(desc, GradAOTOutput) and isinstance(desc.grad_of, PlainAOTInput)
    }


def _above(ends: Iterable[Any]) -> set[fx.Node]:
    """All that some nodes need, and they themselves."""
    found, left = set(), [n for n in ends if isinstance(n, fx.Node)]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _tail(node: Any) -> set[fx.Node]:
    """The products that a weight gradient ends in, with the sums, casts and views after them."""
    if not isinstance(node, fx.Node) or node.target in _PRODUCTS:
        return {node} if isinstance(node, fx.Node) else set()
    above = [_tail(n) for n in node.all_input_nodes] if node.target in _VIEWS | _SUMS else []
    return {node}.union(*above) if above and all(above) else set()


def _held(graph: fx.Graph, tail: set[fx.Node]) -> list[fx.Node]:
    """What products need that is not of their tail; not views of it, which are made again."""
    left, seen, held = list(tail), set(tail), set()
    while left:
        for n in left.pop().all_input_nodes:
            if n not in seen and n.op != "get_attr":
                seen.add(n)
                if n.target in _VIEWS:
                    left.append(n)
                else:
                    held.add(n)
    return [n for n in graph.nodes if n in held]


def _part(graph: fx.GraphModule, inputs: list[Any], outputs: list[Any]) -> fx.GraphModule:
    """The graph that gives some values of a graph from others."""
    from torch._functorch.partitioners import _extract_graph_with_inputs_outputs

    return fx.GraphModule(
        graph,
        _extract_graph_with_inputs_outputs(
            graph.graph, inputs, outputs, cast("Any", [None] * len(outputs)), "backward",
            ignore_must_be_in_fw_bw=True,
        ),
    )  # fmt: skip
