"""torch's rejections of graphs are counted for their own error and their own graphs, and for no others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import sympy
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound

from tests.support.transforms import COPIED_SHAPE_ENV, TRANSFORMS, Transform
from tests.support.versions import is_before

aten, higher = torch.ops.aten, torch.ops.higher_order


def _graph(*calls: Callable[..., object], constant: bool = False, block: str = "") -> GraphModule:
    """A graph that calls functions, reads a constant `c` that it returns, and a block."""
    graph, root = Graph(), torch.nn.Module()
    x = graph.placeholder("x")
    results = [graph.call_function(call, (x,)) for call in calls]
    if constant:
        root.c = torch.ones(2)
        results.append(graph.get_attr("c"))
    if block:
        setattr(root, block, GraphModule(torch.nn.Module(), Graph()))
        graph.get_attr(block)
    graph.output(tuple(results))
    return GraphModule(root, graph)


def _loop() -> GraphModule:
    """A loop over a tensor, a number and a tensor."""
    graph, root = Graph(), torch.nn.Module()
    root.block = GraphModule(torch.nn.Module(), Graph())
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    block = graph.get_attr("block")
    graph.output(graph.call_function(higher.while_loop, (block, block, (x, 3), (x,))))
    return GraphModule(root, graph)


_LOOP = _loop()


class UnsupportedAliasMutationException(Exception): ...


class SpecViolationError(Exception): ...


class SerializeError(Exception): ...


class UncapturedHigherOrderOpError(Exception): ...


def _guard(expression: str) -> Exception:
    text = f"Could not guard on data-dependent expression {expression}"
    return GuardOnDataDependentSymNode(sympy.true, text)


def _select_by_a_mask(tensor_sizes: list[int]) -> GraphModule:
    """A graph that selects elements by a mask of 3 x 4."""
    function = lambda x, mask: (aten.masked_select.default(x, mask),)  # noqa: E731
    return make_fx(function, tracing_mode="symbolic")(torch.rand(tensor_sizes), torch.rand(3, 4) > 0.5)


def _map(body: Callable[..., object]) -> GraphModule:
    """A graph that maps a graph with one call over its input."""
    graph, root = Graph(), torch.nn.Module()
    root.body = _graph(body)
    x = graph.placeholder("x")
    graph.output((graph.call_function(higher.map_impl, (graph.get_attr("body"), [x], [])),))
    return GraphModule(root, graph)


def _abs_of_unbacked_size(out: bool) -> GraphModule:
    """A graph that computes in memory of an unbacked size, or in new memory."""

    def function(x: Tensor) -> tuple[Tensor]:
        selected = aten.masked_select.default(x, x > 0)
        memory = torch.empty_strided([selected.size(0)], [1])
        return (torch.ops.aten.abs.out(selected, out=memory) if out else selected.abs(),)

    return make_fx(function, tracing_mode="symbolic")(torch.rand(4))


_POINTER = (
    "Cannot access data pointer of Tensor (e.g. FakeTensor, FunctionalTensor). If you're using torch.compile/export/fx,"
    " it is likely that we are erroneously tracing into a custom kernel. To fix this, please wrap"
)
_LIST = (
    "Failed serializing node n in graph: %n : [num_users=1] = call_function[target={}](args = ((0, %x),), kwargs = "
    "{{}})\n Original exception Traceback (most recent call last):\nAssertionError: "
    "Unsupported list/tuple argument type"
)
_KERNEL = (
    "Failed serializing node triton_kernel_wrapper_functional_proxy in graph: %triton_kernel_wrapper_functional_proxy"
    "\n Original exception Traceback (most recent call last):\nAssertionError: {}\n"
)
_STRIDES = (
    "It seems one of cond's output stride is not a simple accumulative multiplication of sizes. This could be because "
    "cond returns a slice. True branch has size torch.Size([u0, u1]), stride {} and false branch has size "
    "torch.Size([u0, {}]) stride {}. Hint: can call t.contiguous()."
)
_NESTED_KERNEL = _KERNEL.replace("node triton_kernel_wrapper_functional_proxy", "node cond")
_ENV = _graph(aten.neg.default)
_ENV.shape_env = object()

CASES = {
    "split_module": [(KeyError("c"), _graph(aten.neg.default, constant=True), [(KeyError("x"), None)])],
    "inline": [
        (KeyError("c"), _graph(aten.neg.default, constant=True), [(KeyError("x"), None)]),
        (
            RuntimeError("Node body target body references nonexistent attribute body of "),
            _graph(aten.neg.default, block="body"),
            [(RuntimeError("Node other target other references nonexistent attribute other of "), None)],
        ),
    ],
    "make_fx": [
        (
            RuntimeError(_POINTER),
            _graph(higher.scan, constant=True),
            [(None, _graph(higher.scan)), (RuntimeError("erroneously tracing into a custom kernel"), None)],
        ),
        (
            PendingUnbackedSymbolNotFound("Pending unbacked symbols {u1} not in returned outputs (FakeTensor(...),) ."),
            _map(aten._local_scalar_dense.default),
            [(None, _map(aten.neg.default)), (None, _graph(aten._local_scalar_dense.default))],
        ),
        (
            _guard("Eq(u0, 1) (unhinted: Eq(u0, 1))"),
            _abs_of_unbacked_size(out=True),
            [
                (None, _abs_of_unbacked_size(out=False)),
                (_guard("u0 < 3"), None),
                (_guard("Eq(s0, 1)"), None),
            ],
        ),
    ],
    "make_fx_symbolic": [
        (
            UncapturedHigherOrderOpError("Expected carried_inputs and body_output to have same metadata but found:\n"),
            _graph(higher.while_loop),
            [(UncapturedHigherOrderOpError("Expected carried_inputs and body_output to have same length"), None)],
        ),
        (KeyError(sympy.Symbol("Max(1, u9)")), _graph(higher.cond), [(None, _graph(higher.scan))]),
        (
            RuntimeError(_STRIDES.format("(Max(1, u1), 1)", "s9", "(s9, 1)")),
            _graph(higher.cond),
            [
                (RuntimeError(_STRIDES.format("(Max(1, u1), 1)", "u1", "(1, Max(1, u0))")), None),
                (RuntimeError(_STRIDES.format("(2*u1, 1)", "u1", "(Max(1, u1), 1)")), None),
                (None, _graph(higher.scan)),
            ],
        ),
        (
            _guard("Eq(4, u1) (unhinted: Eq(4, u1))"),
            _graph(higher.cond, constant=True),
            [
                (None, _graph(higher.cond)),
                (_guard("u1 < 4"), None),
            ],
        ),
    ],
    "functionalize": [
        (
            AttributeError("'FunctorchFunctionalizeAPI' object has no attribute 'mode'"),
            _graph(higher.invoke_subgraph),
            [(None, _graph(higher.cond)), (AttributeError("'Other' object has no attribute 'mode'"), None)],
        ),
        (
            UnsupportedAliasMutationException("torch.cond might be aliasing the input or the output!"),
            _graph(higher.cond),
            [(ValueError("torch.cond might be aliasing the input or the output!"), None)],
        ),
        (
            RuntimeError("at::functionalization::impl::isFunctionalTensor(t) INTERNAL ASSERT FAILED at x.cpp"),
            _graph(higher.cond, constant=True),
            [(None, _graph(higher.cond)), (RuntimeError("t INTERNAL ASSERT FAILED"), None)],
        ),
        (
            RuntimeError("at::functionalization::impl::isFunctionalTensor(t) INTERNAL ASSERT FAILED at x.cpp"),
            _graph(higher.triton_kernel_wrapper_mutation, constant=True),
            [(None, _graph(higher.triton_kernel_wrapper_mutation))],
        ),
    ],
    "export": [
        (
            SpecViolationError("Node.meta arg1_1 is missing val field."),
            _LOOP,
            [
                (SpecViolationError("Node.meta arg1_1 is wrong"), None),
                (SpecViolationError("Node.meta arg0_1 is missing val field."), None),
                (SpecViolationError("Node.meta arg2_1 is missing val field."), None),
            ],
        ),
        (
            SpecViolationError("Node.meta triton_kernel_wrapper_mutation_proxy is missing val field."),
            _graph(higher.triton_kernel_wrapper_mutation),
            [(None, _graph(higher.triton_kernel_wrapper_functional))],
        ),
        (
            AttributeError("type object 'PythonReferenceAnalysis' has no attribute 'expr_cond_pair'"),
            _graph(torch.sym_ite),
            [(AttributeError("type object 'PythonReferenceAnalysis' has no attribute 'other'"), None)],
        ),
        (
            AttributeError("'int' object has no attribute 'name'"),
            _LOOP,
            [(AttributeError("'int' object has no attribute 'names'"), None), (None, _graph(higher.while_loop))],
        ),
        (
            SyntaxError("duplicate argument 'b_v3' in function definition"),
            _graph(higher.map_impl),
            [(SyntaxError("invalid syntax"), None)],
        ),
        (
            SerializeError(_LIST.format("torch.ops.higher_order.while_loop")),
            _graph(higher.while_loop),
            [(SerializeError(_LIST.format("torch.ops.aten.cat.default")), None)],
        ),
        (
            SerializeError(_KERNEL.format("kernel caches not found for kernel add")),
            _graph(higher.triton_kernel_wrapper_functional),
            [(SerializeError(_KERNEL.format("another")), None)],
        ),
        (
            SerializeError(_NESTED_KERNEL.format("kernel caches not found for kernel add")),
            _graph(higher.cond, higher.triton_kernel_wrapper_functional),
            [(None, _graph(higher.cond))],
        ),
        (
            AttributeError("'Module' object has no attribute 'false_graph_0.true_graph_0.repeated_subgraph0'"),
            _graph(higher.invoke_subgraph),
            [(AttributeError("'Module' object has no attribute 'true_graph_0'"), None)],
        ),
        (
            RuntimeError("Runtime assertion failed for expression u0 <= 3 on node 'le'"),
            _graph(aten.slice.Tensor),
            [(RuntimeError("Runtime assertion failed for expression u0 >= 0 on node 'ge'"), None)],
        ),
        (
            RuntimeError("Runtime assertion failed for expression u0 <= 4 on node 'le'"),
            _select_by_a_mask([4]),
            [(None, _select_by_a_mask([3, 4]))],
        ),
    ],
    "deepcopy": [
        (RuntimeError("Expected !size_bytes_is_heap_allocated_ to be true, but got false."), _ENV, [])
    ],
}  # fmt: skip

PLAIN = _graph(aten.neg.default)


def _of_any_release(name: str) -> Transform:
    """A transform with the rejections of all releases of torch."""
    transform = TRANSFORMS[name]
    return replace(transform, rejections=tuple([replace(item, before="") for item in transform.rejections]))


@pytest.mark.parametrize(
    ("name", "error", "module", "others"),
    [(name, *case) for name, cases in CASES.items() for case in cases],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_a_rejection_explains_its_own_error(
    name: str, error: Exception, module: GraphModule, others: list[tuple[Exception | None, GraphModule | None]]
) -> None:
    transform = _of_any_release(name)
    assert transform.rejection(error, module)
    is_of_the_call = "torch.ops.higher_order" in str(error)  # its text has the call
    for other, graph in [*others, *([] if is_of_the_call else [(None, PLAIN)]), (RuntimeError("another"), None)]:
        assert not transform.rejection(other or error, graph or module), (other, graph)


def test_every_rejection_has_a_case() -> None:
    for name in TRANSFORMS:
        for rejection in _of_any_release(name).rejections:
            cases = [case for other in ({name, "make_fx"}) for case in CASES.get(other, [])]
            assert any(rejection.explains(error, module) for error, module, _ in cases), (name, rejection)


# --- torch's own errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["split_module", "inline"])
def test_torch_rejects_a_returned_constant(name: str) -> None:
    module = _graph(aten.neg.default, constant=True)
    with pytest.raises(KeyError) as caught:
        TRANSFORMS[name].apply(module, [torch.ones(2)])
    assert TRANSFORMS[name].rejection(caught.value, module)


def test_torch_inlines_a_reader_of_a_block_without_the_block() -> None:
    inner = GraphModule(torch.nn.Module(), Graph())
    inner.graph.output((inner.graph.placeholder("x"),))
    inner.recompile()
    graph, root = Graph(), torch.nn.Module()
    root.body = inner
    x = graph.placeholder("x")
    graph.output((graph.call_function(higher.invoke_subgraph, (graph.get_attr("body"), "body", x)),))
    module = GraphModule(root, graph)
    with pytest.raises(RuntimeError) as caught:
        TRANSFORMS["inline"].apply(module, [torch.ones(2)])
    assert TRANSFORMS["inline"].rejection(caught.value, module)


def test_torch_cannot_copy_a_storage_of_symbolic_size() -> None:
    traced: list[torch.UntypedStorage] = []

    def function(x: Tensor) -> Tensor:
        traced.append(x.untyped_storage())
        return x + 1

    module = TRANSFORMS["make_fx_symbolic"].apply(function, [torch.ones(3)])  # type: ignore[arg-type]
    assert module.shape_env is not None
    with pytest.raises(RuntimeError) as caught:
        copy.deepcopy(traced[0])
    assert COPIED_SHAPE_ENV.explains(caught.value, module)


def _item_of_a_row(row: Tensor, x: Tensor) -> tuple[Tensor]:
    return (row * x.argmax().item(),)


def _sums_of_items(x: Tensor) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = higher.map_impl(_item_of_a_row, [x], [x])
    return results


def _abs_in_memory(x: Tensor) -> Tensor:
    selected = aten.masked_select.default(x, x > 0)
    return aten.copy_.default(torch.empty_strided([selected.size(0)], [1]), selected)


@pytest.mark.parametrize(("function", "before"), [(_sums_of_items, "2.13"), (_abs_in_memory, "2.12")])
def test_older_releases_of_torch_reject_unbacked_sizes(function: Callable[..., object], before: str) -> None:
    """Functions that fxwrap has not emitted are rejected by the releases that reject emitted graphs, and no others."""
    x, transform = torch.tensor([[1.0, -2.0], [3.0, 4.0]]), TRANSFORMS["make_fx"]
    if not is_before(before):
        transform.apply(function, [x])  # type: ignore[arg-type]
        return
    is_map = function is _sums_of_items
    module = _map(aten._local_scalar_dense.default) if is_map else _abs_of_unbacked_size(out=True)
    with pytest.raises(Exception, match=r"unbacked symbols|data-dependent") as caught:
        transform.apply(function, [x])  # type: ignore[arg-type]
    assert transform.rejection(caught.value, module)


def test_torch_bounds_the_elements_that_a_wider_mask_selects() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return aten.masked_select.default(x, mask)

    x, mask = torch.rand(4), torch.ones(3, 4, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="u0 <= 4") as caught:
        TRANSFORMS["export"].apply(Module(), [x, mask])  # type: ignore[arg-type]
    assert TRANSFORMS["export"].rejection(caught.value, _select_by_a_mask([4]))


def test_torch_knows_no_sizes_after_a_cond_of_a_constant_and_an_input() -> None:
    constant = torch.ones(4, 3)

    def function(predicate: Tensor, x: Tensor) -> Tensor:
        then, otherwise = lambda a, b: (a.tanh(),), lambda a, b: (b.tanh(),)
        result = higher.cond(predicate, then, otherwise, (x, constant))[0]
        return aten.sigmoid.out(result, out=torch.empty(4, 3))

    transform = TRANSFORMS["make_fx_symbolic"]
    with pytest.raises(GuardOnDataDependentSymNode) as caught:
        transform.apply(function, [torch.tensor(True), torch.ones(4, 3)])  # type: ignore[arg-type]
    assert transform.rejection(caught.value, _graph(higher.cond, constant=True))
