"""Launches of a user's kernels as lines, kernel definitions and nodes; and calls that cannot be lowered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import wrap_triton

import fxwrap
from fxwrap.comparison import capture
from fxwrap.errors import ArtifactError, FxwrapError, GraphError
from fxwrap.lines import Alloc, Launch, Mutate
from fxwrap.testing import assert_emitters_agree, assert_programs_agree
from fxwrap.torch_compat import add_triton_constants, triton_kernel_at, triton_kernel_index, triton_launch
from tests.user_kernels import kernels, operators
from tests.user_kernels.triton_on_cpu import triton_on_cpu


@pytest.fixture(autouse=True)
def _triton_on_cpu() -> Iterator[None]:
    with triton_on_cpu():
        yield


def program_of(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> fxwrap.Program:
    (graph,) = capture(function, inputs, **options)
    return graph.compiled.program


def lines_of(program: fxwrap.Program, kind: type) -> list[Any]:
    return [line for line in program.lines() if isinstance(line, kind)]


def doubled(x: Tensor) -> Tensor:
    y = x + 1
    kernels.double_in_place[(4,)](y, x.numel(), BLOCK=64)
    return y


def doubled_in_place(x: Tensor) -> Tensor:
    wrap_triton(kernels.double_in_place)[(4,)](x, 100, BLOCK=64)
    return x + 1


def test_dead_operands_are_written_in_place() -> None:
    program = program_of(doubled, torch.randn(100))
    assert not lines_of(program, Mutate)
    (allocated,), (_, launch) = lines_of(program, Alloc), lines_of(program, Launch)
    assert launch.outs == (allocated.result,)


def test_live_operands_are_copied() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        kernels.double_in_place[(4,)](x[2:5], 3, BLOCK=64)
        return x, x + 1

    program = program_of(function, torch.randn(100))
    copies = [line.writes[0].name for line in lines_of(program, Mutate) if line.target == "aten.copy_.default"]
    (launch,) = [line for line in lines_of(program, Launch) if line.kernel.startswith("double")]
    assert launch.outs[0].name in copies


def test_a_copied_back_input_is_written_in_place() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        kernels.double_in_place[(4,)](x, x.numel(), BLOCK=64)
        operators.shift_(x[1], 2.0)
        kernels.double_in_place[(4,)](x, x.numel(), BLOCK=64)
        return y, x.t() * 2

    x = torch.randn(4, 8)
    program = program_of(function, x)
    assert [line.target for line in lines_of(program, Mutate)] == ["user_code.shift_.default"]
    assert {line.outs[0].name for line in lines_of(program, Launch)[1:3]} == {program.inputs[0].name}
    assert_emitters_agree(function, x)


def test_an_input_whose_old_value_is_read_later_is_copied() -> None:
    x = torch.randn(100)
    graph = make_fx(torch.func.functionalize(doubled_in_place))(x)
    (copy,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    with graph.graph.inserting_before(copy):
        late = graph.graph.call_function(torch.ops.aten.mul.Tensor, (copy.args[0], 3))
        late.meta["val"] = copy.args[1].meta["val"]
    (output,) = graph.graph.find_nodes(op="output")
    output.args = ((output.args[0], late),)
    graph.recompile()
    assert len(lines_of(fxwrap.lower(graph, [x]), Mutate)) == 2
    assert_emitters_agree(graph, x)


def test_equal_launches_share_a_kernel() -> None:
    def function(x: Tensor) -> Tensor:
        x = x + 1
        for block in (32, 64, 32):
            kernels.double_in_place[(4,)](x, x.numel(), BLOCK=block)
        return x

    program = program_of(function, torch.randn(100))
    launched = [line.kernel for line in lines_of(program, Launch)]
    assert launched[1:] == ["double_in_place_0", "double_in_place_1", "double_in_place_0"]
    assert len(program.kernels) == 3


def test_each_configuration_has_its_grid() -> None:
    def function(x: Tensor) -> Tensor:
        out, n = torch.empty_like(x), x.numel()
        kernels.tuned[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
        return out

    (launch,) = lines_of(program_of(function, torch.randn(200)), Launch)
    assert launch.arguments[1:] == (200, 2, 1, 1) and launch.grid == (4, 1, 1)


def test_tuning_restores_read_write_arguments() -> None:
    """Eager tuning runs a kernel repeatedly on its own results, which is not reproduced."""

    def in_place(x: Tensor) -> Tensor:
        y = x + 1
        kernels.tuned_unrestored[(4,)](y, y.numel())
        return y

    def from_nothing(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernels.tuned[(4,)](x, out, x.numel())
        return out

    x = torch.randn(100)
    assert "restore_value=['x_ptr']" in program_of(in_place, x).kernel("tuned_in_place_0").source
    assert "restore_value" not in program_of(from_nothing, x).kernel("tuned_0").source


@pytest.mark.parametrize("dynamic", [False, True])
def test_program_text_is_self_contained(dynamic: bool) -> None:
    def function(x: Tensor) -> Tensor:
        out, n = torch.empty_like(x), x.numel()
        kernels.add[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, x, out, n, BLOCK=64, num_warps=2)
        kernels.gaps[(1,)](out, 8, BLOCK=16)
        return out

    program = program_of(function, torch.randn(100), dynamic=dynamic)
    parsed = fxwrap.parse(str(program))
    assert parsed == program
    inputs = [100, torch.randn(100)] if dynamic else [torch.randn(100)]
    assert_programs_agree(parsed, inputs)


def test_a_process_local_kernel() -> None:
    def function(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernels.profiled[(1,)](x, out, x.numel(), BLOCK=256)
        return out

    program = program_of(function, torch.randn(100))
    text, kernel = str(program), program.kernel("profiled_0")
    assert_programs_agree(fxwrap.parse(text), [torch.randn(100)])
    key = dict(kernel.options)["live"]
    options = tuple([(name, "0" if option == key else option) for name, option in kernel.options])
    elsewhere = replace(kernel, options=options)
    wanted = "only in the process that compiled it: its 'launch_metadata' is a function"
    with pytest.raises(FxwrapError, match=wanted):
        fxwrap.run(program.replace(kernels=(elsewhere,)), [torch.randn(100)])


def test_nodes_of_an_emitted_graph() -> None:
    program = program_of(doubled, torch.randn(100))
    emitted = fxwrap.to_fx(program)
    (node,) = emitted.graph_module.graph.find_nodes(op="call_function", target=triton_launch)
    assert node.meta["fxwrap_kernel"] == program.kernel("double_in_place_0").hash
    assert triton_kernel_at(node.kwargs["kernel_idx"]).fxwrap_hash == node.meta["fxwrap_kernel"]
    assert set(node.kwargs["kwargs"]) == {"x_ptr", "n"} and node.kwargs["grid"] == [(4, 1, 1)]


# --- graphs that are not functional ---------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_graph_that_writes_its_inputs(mode: str) -> None:
    def function(x: Tensor) -> Tensor:
        y = x + 1
        wrap_triton(kernels.double_in_place)[[4]](y, x.shape[0], BLOCK=64, num_warps=8)
        z = y * 2
        wrap_triton(kernels.double_in_place)[(4,)](x, x.shape[0], BLOCK=64)
        wrap_triton(kernels.tuned)[lambda meta: (triton.cdiv(200, meta["BLOCK"]),)](z, y, x.shape[0])
        return z + x + y

    x = torch.randn(200)
    graph = make_fx(function, tracing_mode=mode)(x)
    assert_emitters_agree(graph, x)
    launches = lines_of(fxwrap.lower(graph, [x]), Launch)
    users = [line for line in launches if not line.kernel.startswith(("add", "mul"))]
    assert [len(line.outs) for line in users] == [1, 1, 1]  # z is read only


@triton.jit
def described(x_desc, out_ptr, SIZE: tl.constexpr):
    block = x_desc.load([tl.program_id(0) * SIZE])
    tl.store(out_ptr + tl.program_id(0) * SIZE + tl.arange(0, SIZE), block * 2)


def call_of(kernel: Any, constants: dict[str, Any], descriptors: dict[str, Any], *names: str) -> GraphModule:
    """Returns a graph that launches a kernel over 4 programs; it writes and returns the last of the names."""
    graph = Graph()
    placeholders = {name: graph.placeholder(name) for name in names}
    keywords = {
        "kernel_idx": triton_kernel_index(kernel), "constant_args_idx": add_triton_constants(constants),
        "grid": [(4, 1, 1)], "tma_descriptor_metadata": descriptors, "kwargs": placeholders,
    }  # fmt: skip
    graph.call_function(triton_launch, (), keywords)
    graph.output((placeholders[names[-1]],))
    return GraphModule({}, graph)


def test_tensor_descriptors() -> None:
    x = torch.randn(64)
    graph = call_of(described, {"SIZE": 16}, {"x_desc": ("stable", ([16],))}, "x_desc", "out_ptr")
    for emitter in fxwrap.options.options.EMITTERS:
        out = torch.zeros(64)
        compiled = fxwrap.compile_graph(graph, [x, out], options=fxwrap.Options(emitter=emitter))
        compiled(x, out)
        torch.testing.assert_close(out, x * 2)


def test_old_tensor_descriptors_are_rejected() -> None:
    graph = call_of(described, {"SIZE": 16}, {"x_desc": ("experimental", ([64], [16], 4))}, "x_desc", "out_ptr")
    message = r"'x_desc' of its kernel has no constant block shape.*TensorDescriptor\.from_tensor"
    with pytest.raises(GraphError, match=message):
        fxwrap.compile_graph(graph, [torch.randn(64), torch.zeros(64)])


def test_non_kernels_are_rejected() -> None:
    class Other:
        arg_names = ("x_ptr",)

    graph = call_of(Other(), {}, {}, "x_ptr")
    with pytest.raises(GraphError, match=r"its kernel is a Other, not a function of @triton\.jit"):
        fxwrap.compile_graph(graph, [torch.randn(64)])


def test_a_file_for_processes_without_python_is_refused(tmp_path: Path) -> None:
    """The error names the kernel; the file for Python has the kernel's text, and runs."""

    def increased(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernels.tuned[(4,)](x, out, x.numel())
        return out

    x = torch.randn(100)
    (graph,) = capture(increased, (x,))
    with pytest.raises(ArtifactError, match=r"Triton kernel @tuned_0 is launched by Python: it is autotuned: give it"):
        graph.compiled.save(tmp_path / "increased.fxw", target="native")
    assert not list(tmp_path.iterdir())
    graph.compiled.save(tmp_path / "increased.fxw")
    torch.testing.assert_close(fxwrap.load(tmp_path / "increased.fxw").flat(x)[0], increased(x))
