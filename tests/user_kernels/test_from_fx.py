"""Launches of a user's kernels that a rewrite puts into an emitted graph: it is read back with them, and runs on."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.errors import FxImportError
from fxwrap.lines import Launch
from fxwrap.testing import assert_programs_agree
from fxwrap.torch_compat import add_triton_constants, triton_kernel_index, triton_launch, triton_launch_functional
from tests.user_kernels import kernels
from tests.user_kernels.triton_on_cpu import triton_on_cpu


@pytest.fixture(autouse=True)
def _triton_on_cpu() -> Iterator[None]:
    with triton_on_cpu():
        yield


def emitted(x: Tensor) -> GraphModule:
    """The graph of `relu(x) * 2`, which a C++ kernel computes."""
    traced = make_fx(lambda x: x.relu() * 2)(x)
    return fxwrap.to_fx(fxwrap.lower(traced, [x])).graph_module


def launch_after(module: GraphModule, kernel: Any, functional: bool = False, **arguments: Any) -> Any:
    """Adds the launch of a kernel at the end of a graph, its tensors by name, and returns its node."""
    graph = module.graph
    tensors = {name: item for name, item in arguments.items() if isinstance(item, torch.fx.Node)}
    keywords = {
        "kernel_idx": triton_kernel_index(kernel),
        "constant_args_idx": add_triton_constants({name: arguments[name] for name in arguments if name not in tensors}),
        "grid": [(4, 1, 1)],
        "tma_descriptor_metadata": {},
        "kwargs": tensors,
    }
    with graph.inserting_before(graph.output_node()):
        if not functional:
            return graph.call_function(triton_launch, kwargs=keywords)
        return graph.call_function(triton_launch_functional, kwargs={**keywords, "tensors_to_clone": list(tensors)})


def return_node(module: GraphModule, node: torch.fx.Node) -> None:
    """Makes a node the only output."""
    module.graph.output_node().args = ((node,),)
    module.graph.lint()
    module.recompile()


def test_a_launch_into_new_memory() -> None:
    x = torch.randn(100)
    module = emitted(x)
    computed = module.graph.output_node().args[0][0]  # type: ignore[index]
    with module.graph.inserting_before(module.graph.output_node()):
        allocation = module.graph.call_function(torch.ops.aten.empty_like.default, (computed,))
    allocation.meta["val"] = computed.meta["val"]
    launch_after(module, kernels.add, x_ptr=computed, y_ptr=None, out_ptr=allocation, n=100, BLOCK=64, num_warps=2)
    return_node(module, allocation)
    program = fxwrap.from_fx(module)
    launch = [line for line in program.lines() if isinstance(line, Launch)][-1]
    assert [value.name for value in launch.outs] == ["empty_like_default"]
    assert program.kernel(launch.kernel).language == "user_triton"
    (result,) = fxwrap.run(program, [x])
    torch.testing.assert_close(result, x.relu() * 2 + 0.5)
    assert_programs_agree(program, [x])
    assert fxwrap.from_fx(fxwrap.to_fx(program)) == program


@pytest.mark.parametrize("functional", [False, True])
def test_a_launch_on_computed_values(functional: bool) -> None:
    x = torch.randn(100)
    module = emitted(x)
    computed = module.graph.output_node().args[0][0]  # type: ignore[index]
    node = launch_after(module, kernels.double_in_place, functional, x_ptr=computed, n=100, BLOCK=64)
    if functional:
        with module.graph.inserting_after(node):
            node = module.graph.call_function(operator.getitem, (node, "x_ptr"))
    return_node(module, node if functional else computed)
    program = fxwrap.from_fx(module)
    assert_programs_agree(program, [x])
    (result,) = fxwrap.run(program, [x])
    torch.testing.assert_close(result, x.relu() * 4)


def test_written_arguments_must_be_declared() -> None:
    module = emitted(torch.randn(100))
    computed = module.graph.output_node().args[0][0]  # type: ignore[index]
    launch_after(module, kernels.double_in_place, x_ptr=computed, n=100, BLOCK=64)
    del computed.meta["val"]
    with pytest.raises(FxImportError, match=r"its argument 'x_ptr' has no meta\['val'\]"):
        fxwrap.from_fx(module)


def test_a_kernel_that_is_not_a_triton_function() -> None:
    module = emitted(torch.randn(100))
    computed = module.graph.output_node().args[0][0]  # type: ignore[index]
    launch_after(module, abs, x_ptr=computed)
    with pytest.raises(FxImportError, match=r"builtin_function_or_method, not a function of @triton\.jit"):
        fxwrap.from_fx(module)
