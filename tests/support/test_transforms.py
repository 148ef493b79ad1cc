"""torch's rejections of graphs are counted for their own error and their own graphs, and for no others."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import sympy
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from tests.support.transforms import COPIED_SHAPE_ENV, TRANSFORMS

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
    "torch.Size([u0, u1]) stride {}. Hint: can call t.contiguous()."
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
        )
    ],
    "make_fx_symbolic": [
        (
            UncapturedHigherOrderOpError("Expected carried_inputs and body_output to have same metadata but found:\n"),
            _graph(higher.while_loop),
            [(UncapturedHigherOrderOpError("Expected carried_inputs and body_output to have same length"), None)],
        ),
        (KeyError(sympy.Symbol("Max(1, u9)")), _graph(higher.cond), [(None, _graph(higher.scan))]),
        (
            RuntimeError(_STRIDES.format("(Max(1, u1), 1)", "(Max(1, u1), 1)")),
            _graph(higher.cond),
            [(RuntimeError(_STRIDES.format("(Max(1, u1), 1)", "(1, Max(1, u0))")), None)],
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
            AttributeError("'Module' object has no attribute 'true_graph_0.repeated_subgraph0'"),
            _graph(higher.invoke_subgraph),
            [(AttributeError("'Module' object has no attribute 'true_graph_0'"), None)],
        ),
        (
            RuntimeError("Runtime assertion failed for expression u0 <= 3 on node 'le'"),
            _graph(aten.slice.Tensor),
            [(RuntimeError("Runtime assertion failed for expression u0 >= 0 on node 'ge'"), None)],
        ),
    ],
    "deepcopy": [
        (RuntimeError("Expected !size_bytes_is_heap_allocated_ to be true, but got false."), _ENV, [])
    ],
}  # fmt: skip

PLAIN = _graph(aten.neg.default)


@pytest.mark.parametrize(
    ("name", "error", "module", "others"),
    [(name, *case) for name, cases in CASES.items() for case in cases],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_a_rejection_explains_its_own_error(
    name: str, error: Exception, module: GraphModule, others: list[tuple[Exception | None, GraphModule | None]]
) -> None:
    transform = TRANSFORMS[name]
    assert transform.rejects(error, module)
    is_of_the_call = "torch.ops.higher_order" in str(error)  # its text has the call
    for other, graph in [*others, *([] if is_of_the_call else [(None, PLAIN)]), (RuntimeError("another"), None)]:
        assert not transform.rejects(other or error, graph or module), (other, graph)


def test_every_rejection_has_a_case() -> None:
    for name, transform in TRANSFORMS.items():
        for rejection in transform.rejections:
            cases = [case for other in ({name, "make_fx"}) for case in CASES.get(other, [])]
            assert any(rejection.explains(error, module) for error, module, _ in cases), (name, rejection)


# --- torch's own errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["split_module", "inline"])
def test_torch_rejects_a_returned_constant(name: str) -> None:
    module = _graph(aten.neg.default, constant=True)
    with pytest.raises(KeyError) as caught:
        TRANSFORMS[name].apply(module, [torch.ones(2)])
    assert TRANSFORMS[name].rejects(caught.value, module)


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
    assert TRANSFORMS["inline"].rejects(caught.value, module)


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
