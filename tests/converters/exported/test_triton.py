"""Exported programs with Triton kernels, fxwrap's and the user's, which are launched by content hash, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.library import wrap_triton

import fxwrap
from fxwrap import Compiled, Stage
from fxwrap.comparison import capture
from fxwrap.compile import CompileResult
from fxwrap.errors import ExportError
from fxwrap.runtime import kernel_table
from fxwrap.runtime.kernel_texts import parse_kernels
from fxwrap.wrapper_ir import KernelDefinition
from tests.converters.exported.models import CASES, assert_calls_equal, reloaded
from tests.support.program_equality import assert_equal
from tests.user_kernels import kernels
from tests.user_kernels.triton_on_cpu import triton_on_cpu


@pytest.fixture(autouse=True)
def _triton_on_cpu() -> Iterator[None]:
    with triton_on_cpu():
        yield


def _languages(exported: ExportedProgram) -> set[str]:
    return {kernel.language for kernel in parse_kernels(exported.constants["fxwrap_kernels"]).values()}


def _own_operators(exported: ExportedProgram) -> list[str]:
    graphs = [module.graph for module in exported.graph_module.modules() if isinstance(module, GraphModule)]
    return [str(node.target) for graph in graphs for node in graph.nodes if str(node.target).startswith("fxwrap.")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["everything", "branches"])
def test_generated_kernels(name: str) -> None:
    case = CASES[name]
    compiled = fxwrap.compile_graph(case.export(), options=fxwrap.Options(cpu_kernels="triton"))
    exported = reloaded(fxwrap.fx.export(compiled))
    assert _languages(exported) == {"triton"}
    assert "fxwrap.cpp_kernel_functional.default" in _own_operators(exported)
    if name == "everything":
        again = fxwrap.compile_graph(exported, options=fxwrap.Options(cpu_kernels="triton"))
        assert_equal(compiled.program, again.program, copied=True)
    with kernel_table.empty_kernel_table():
        assert_calls_equal(case.export(), exported, case)


def _user_launches(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x)
    wrap_triton(kernels.add)[(4,)](x + 1, y, out, 200, BLOCK=64)
    wrap_triton(kernels.double_in_place)[(4,)](y, 200, BLOCK=64)
    return out * 2, y + 1


def test_kernels_of_the_users() -> None:
    inputs = torch.randn(200), torch.randn(200)
    (graph,) = capture(_user_launches, inputs)
    exported = reloaded(fxwrap.fx.export(graph.compiled))
    assert "user_triton" in _languages(exported)
    ours, theirs = [[item.clone() for item in inputs] for _ in range(2)]
    with kernel_table.empty_kernel_table():
        got = exported.module()(*ours)
    torch.testing.assert_close(tuple(got), _user_launches(*theirs))
    torch.testing.assert_close(ours, theirs)


def test_a_kernel_that_exists_only_in_this_process_is_refused() -> None:
    options = (("live", "0" * 64), ("reason", "it has hooks"))
    kernel = KernelDefinition("k", "user_triton", "", ("*f32 x", "*f32 y"), options)
    program = fxwrap.parse("""program @p(%x: borrowed f32[4]@cpu) {
  %y = memory.alloc() : f32[4]@cpu
  kernel.launch @k(%x) outs=(%y) grid=(1, 1, 1)
  control.return(%y)
}
""").replace(kernels=(kernel,))
    compiled = Compiled(CompileResult((Stage("parsed", program),), fxwrap.Options(), fxwrap.to_python(program)))
    with pytest.raises(ExportError, match=r"the kernel 'k' exists only in this process: it has hooks"):
        fxwrap.fx.export(compiled)
