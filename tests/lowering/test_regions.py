"""Kernels as regions: which operators they hold, what they say of themselves, and that they compute what eager does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.compile import emit
from fxwrap.devices import DeviceSpec, scoped_registration
from fxwrap.errors import OptionError
from fxwrap.lines import ExternCall, Launch
from fxwrap.options import EMITTERS, Options
from fxwrap.regions import Region, parse_region
from fxwrap.wrapper_ir import Program
from tests.support.long_form import sample_size
from tests.support.strategies.graphs import RandomGraph, graphs

SUBGRAPH = Options(kernels="subgraph", compile_cache=False)
F = torch.nn.functional


def lowered(function: Callable[..., Any], *inputs: Any, options: Options = SUBGRAPH, dynamic: bool = False) -> Program:
    """Lowers a function with regions, and checks that the interpreter computes what the function does."""
    graph = make_fx(function, tracing_mode="symbolic" if dynamic else "real")(*inputs)
    program = fxwrap.verify(fxwrap.lower(graph, inputs, options=options))
    assert_equal(fxwrap.run(program, [item.clone() for item in inputs]), function(*[item.clone() for item in inputs]))
    return program


def assert_equal(results: Any, expected: Any) -> None:
    expected = expected if isinstance(expected, tuple | list) else (expected,)
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def regions_of(program: Program) -> list[Region]:
    return [parse_region(kernel.source) for kernel in program.kernels if kernel.language == "fx"]


def calls_of(program: Program) -> list[str]:
    return [line.target for line in program.lines() if isinstance(line, ExternCall)]


def softmax_of_view(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(torch.softmax(x.view(4, 2, 8).permute(0, 2, 1), -1))


def test_a_region_holds_the_operators_of_the_graph_with_the_views_between_them() -> None:
    (region,) = regions_of(lowered(softmax_of_view, torch.randn(4, 16)))
    names = ["aten.view.default", "aten.permute.default", "aten._softmax.default", "aten.gelu.default"]
    assert list(region.operators) == names


def test_a_region_has_the_axes_bytes_and_loop_ir_of_its_kernel() -> None:
    (region,) = regions_of(lowered(softmax_of_view, torch.randn(4, 16)))
    assert (region.index_space, region.reduced) == ((("p0", 4), ("p1", 8)), (("r0", 2),))
    assert (region.bytes_read, region.bytes_written) == (256, 256)
    assert "load in0[16*p0 + p1 + 8*r0]  # aten._softmax.default" in region.loop_ir


def test_loop_ir_names_the_parameters_of_the_region() -> None:
    """The kernel reads the second operand first, and the region takes it second."""
    (region,) = regions_of(lowered(lambda x, y: F.layer_norm(y, (8,)) * x, torch.randn(8), torch.randn(4, 8)))
    sizes = {value.name: value.tensor_type.sizes for value in region.reads}
    assert sizes == {"in0": (4, 8), "in1": (8,)}
    assert "in0: f32[32]" in region.loop_ir
    assert "in1: f32[8]" in region.loop_ir


def test_equal_layers_share_a_region_for_any_depth() -> None:
    def layers(depth: int) -> Callable[..., torch.Tensor]:
        def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            for _ in range(depth):
                x = F.layer_norm(x + F.gelu(x @ w), (8,))
            return x

        return model

    counts = []
    for depth in (2, 5):
        program = lowered(layers(depth), torch.randn(4, 8), torch.randn(8, 8))
        counts.append((len(program.kernels), sum(isinstance(line, Launch) for line in program.lines())))
    assert counts == [(2, 2), (2, 5)]  # the memory of the first operand belongs to the caller


def test_results_overwrite_dead_memory_as_kernels_do() -> None:
    """The memory of the matmul is reused, through a view of another shape."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).view(2, 2, 8).relu() + 1

    inputs = torch.randn(4, 8), torch.randn(8, 8)
    (region,) = regions_of(program := lowered(function, *inputs))
    assert "memory.alloc" not in str(program)
    assert [value.tensor_type.sizes for value in region.overwritten.values()] == [(4, 8)]
    text = lowered_as_text(function, *inputs)
    assert str(text).count("memory.alloc") == 0


def lowered_as_text(function: Callable[..., Any], *inputs: Any) -> Program:
    return fxwrap.lower(make_fx(function)(*inputs), inputs, options=Options(compile_cache=False))


def test_sizes_are_symbols_of_the_region() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0] * 2, -1).softmax(-1) * x.shape[0]

    program = lowered(function, torch.randn(6, 8), dynamic=True)
    (region,) = regions_of(program)
    assert len(region.symbols) == 2
    assert region.signature == ("*f32", "*f32", "i64", "i64")
    other = torch.randn(10, 4)
    assert_equal(fxwrap.run(program, [other]), function(other))


def test_stores_in_place_and_scatters_are_functional_operators() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        x[1:3].copy_(y.exp())
        z = torch.zeros(5, 4).index_add(0, index, y)
        x.add_(1)
        return z

    inputs = torch.randn(4, 4), torch.randn(2, 4), torch.tensor([1, 1])
    graph = make_fx(torch.func.functionalize(function))(*inputs)
    for emitter in ("interpreter", "fx"):
        program = fxwrap.lower(graph, inputs, options=SUBGRAPH)
        ours, theirs = [[item.clone() for item in inputs] for _ in range(2)]
        assert_equal(emit(program, emitter)(*ours), function(*theirs))
        assert_equal(ours, theirs)
    assert not any(operator.endswith("_.default") for region in regions_of(program) for operator in region.operators)


def test_an_operand_that_no_kernel_reads_stays_alive_for_the_region() -> None:
    """The elements of `y` do not matter to `full_like`; the operator takes it, as the model wrote it."""
    program = lowered(lambda x, w: torch.full_like(x @ w, 2.0) * w, torch.randn(4, 4), torch.randn(4, 4))
    assert "aten.full_like.default" in regions_of(program)[0].operators
    assert calls_of(program) == ["aten.mm.default"]


def test_results_of_one_operator_in_two_kernels_are_computed_by_both() -> None:
    def function(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
        mean, rstd = x.mean(-1, keepdim=True), torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5)
        return torch.ops.aten.native_layer_norm_backward(g, x, [64], mean, rstd, w, w, [True, True, True])

    program = lowered(function, torch.randn(16, 64), torch.randn(16, 64), torch.randn(64))
    holders = [item for item in regions_of(program) if "aten.native_layer_norm_backward.default" in item.operators]
    assert len(holders) == 2
    assert "aten.native_layer_norm_backward.default" not in calls_of(program)


def test_a_sum_that_keeps_dimensions_of_size_one_is_one_region() -> None:
    """The sum and its result of another shape are one kernel, or the sum would be an intermediate result in memory."""
    program = lowered(lambda x: x[:, 0:1].sum([0], True), torch.randn(2, 5, 64))
    assert [region.operators for region in regions_of(program)] == [("aten.slice.Tensor", "aten.sum.dim_IntList")]
    text = lowered_as_text(lambda x: x[:, 0:1].sum([0], True), torch.randn(2, 5, 64))
    assert sum(isinstance(line, Launch) for line in text.lines()) == 1


# --- the form of each kernel ------------------------------------------------------------------------------------------


def three_kernels(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = F.layer_norm(x, (8,)) @ w
    return F.gelu(y) @ torch.softmax(w, -1)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_function_chooses_the_form_of_each_kernel(emitter: str) -> None:
    forms = {"aten.native_layer_norm.default": "text", "aten.gelu.default": "call", "aten._softmax.default": "subgraph"}
    seen: list[Region] = []

    def choose(region: Region) -> str:
        seen.append(region)
        return forms[region.operators[0]]

    inputs = torch.randn(4, 8), torch.randn(8, 8)
    options = Options(choose_kernel_form=choose, emitter=emitter, compile_cache=False)  # type: ignore[arg-type]
    compiled = fxwrap.compile_graph(make_fx(three_kernels)(*inputs), inputs, options=options)
    assert sorted(kernel.language for kernel in compiled.program.kernels) == ["cpp", "fx"]
    assert "aten.gelu.default" in calls_of(compiled.program)
    torch.testing.assert_close(compiled(*inputs)[0], three_kernels(*inputs), rtol=1e-5, atol=1e-5)
    assert all(region.loop_ir for region in seen)


def test_a_form_that_does_not_exist_is_refused() -> None:
    reason = "returned 'c' for the region layer_norm; it returns 'text', 'subgraph' or 'call'"
    with pytest.raises(OptionError, match=reason):
        lowered(three_kernels, torch.randn(4, 8), torch.randn(8, 8), options=Options(choose_kernel_form=lambda _: "c"))


def test_a_device_may_have_regions_as_its_kernel_language() -> None:
    inputs = torch.randn(4, 8), torch.randn(8, 8)
    with scoped_registration(DeviceSpec("cpu", kernel_language="fx")):
        program = lowered(three_kernels, *inputs, options=Options(compile_cache=False))
        assert {kernel.language for kernel in program.kernels} == {"fx"}
        text = Options(choose_kernel_form=lambda _: "text", compile_cache=False)
        with pytest.raises(OptionError, match="since the kernel language of the device 'cpu' has no other printer"):
            lowered(three_kernels, *inputs, options=text)


def test_the_form_is_an_option_with_two_values() -> None:
    with pytest.raises(OptionError, match="option 'kernels' takes 'text' or 'subgraph', not 'fx'"):
        Options(kernels="fx")  # type: ignore[arg-type]


@pytest.mark.parametrize("emitter", EMITTERS)
def test_every_emitter_runs_regions(emitter: str) -> None:
    inputs = torch.randn(4, 8), torch.randn(8, 8)
    compiled = fxwrap.compile_graph(make_fx(three_kernels)(*inputs), inputs, options=SUBGRAPH.replace(emitter=emitter))
    assert_equal(compiled(*inputs), three_kernels(*inputs))


def test_a_program_with_regions_is_parsed_to_an_equal_one() -> None:
    program = lowered(three_kernels, torch.randn(4, 8), torch.randn(8, 8))
    parsed = fxwrap.parse(str(program))
    assert str(parsed) == str(program)
    assert parsed.kernels == program.kernels


@given(graphs(steps=10, writes=3, sizes=(3, 4)))
@settings(max_examples=sample_size(25), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_regions_of_random_graphs_compute_what_the_graph_does(graph: RandomGraph) -> None:
    """In both forms, as submodules and inlined; inputs that the graph writes too."""
    theirs = [item.clone() for item in graph.inputs]
    results = graph.module(*theirs)
    expected = [*(results if isinstance(results, tuple | list) else (results,)), *theirs]
    program = fxwrap.verify(fxwrap.lower(graph.module, list(graph.inputs), options=SUBGRAPH))
    for form in ("in_place", "functional"):
        emitted = fxwrap.to_fx(program, form=form)
        for run in (emitted, fxwrap.fx.inline_regions(emitted.graph_module)):
            ours = [item.clone() for item in graph.inputs]
            for one, other in zip([*run(*ours), *ours], expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)
