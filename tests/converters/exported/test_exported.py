"""Compiled graphs as exported programs: signature, results, files, and the way back to the program."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.errors import ExportError, FxwrapError, InputError
from tests.converters.exported.models import (
    CASES,
    Elementwise,
    Largest,
    assert_calls_equal,
    compiled_case,
    export,
    exported_case,
    reloaded,
)
from tests.support.program_equality import assert_equal

TEXTS = "fxwrap_kernels"


def _inputs(exported: ExportedProgram) -> list[tuple[str, InputKind, str | None, bool | None]]:
    specs = exported.graph_signature.input_specs
    return [(spec.arg.name, spec.kind, spec.target, spec.persistent) for spec in specs if spec.target != TEXTS]


def _mutations(exported: ExportedProgram) -> set[tuple[OutputKind, str | None]]:
    specs = exported.graph_signature.output_specs
    return {(spec.kind, spec.target) for spec in specs if spec.kind is not OutputKind.USER_OUTPUT}


# --- the signature --------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_the_signature_is_the_original_one(name: str) -> None:
    original = CASES[name].export()
    exported = fxwrap.fx.export(compiled_case(name))
    functional = original.run_decompositions({})
    for program in (exported, reloaded(exported)):
        assert _inputs(program) == _inputs(original)
        assert _mutations(program) == _mutations(functional)
        assert program.call_spec == original.call_spec
        assert str(program.range_constraints) == str(original.range_constraints)
        assert program.state_dict.keys() == original.state_dict.keys()
        assert program.constants.keys() - {TEXTS} == original.constants.keys()
        assert (TEXTS in program.constants) == (name != "views_only")
    state = compiled_case(name).signature.state_dict  # type: ignore[union-attr]
    assert all(exported.state_dict[key] is tensor for key, tensor in state.items())


def test_tied_weights_stay_one_tensor() -> None:
    module = exported_case("everything").module()
    assert module.get_parameter("up.weight").data_ptr() == module.get_parameter("down.weight").data_ptr()


def test_a_graph_module_has_flat_inputs_and_its_placeholders_names() -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.register_buffer("total", torch.zeros(4))

    owner, graph = Owner(), torch.fx.Graph()
    x, weight, total = graph.placeholder("features"), graph.get_attr("weight"), graph.get_attr("total")
    scaled = graph.call_function(torch.ops.aten.mul.Tensor, (x, weight))
    graph.call_function(
        torch.ops.aten.add_.Tensor, (total, graph.call_function(torch.ops.aten.sum.dim_IntList, (scaled, [0])))
    )
    graph.output((scaled, None, 3))
    example = torch.randn(2, 4, 4)[0]
    before = copy.deepcopy(owner)
    exported = reloaded(fxwrap.fx.export(fxwrap.compile_graph(torch.fx.GraphModule(owner, graph), [example])))
    assert [spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT] == [
        "features"
    ]
    assert exported.graph_signature.parameters == ("weight",) and exported.graph_signature.buffers == ("total",)
    module = exported.module()
    result, nothing, number = module(example)
    torch.testing.assert_close(result, example * before.weight)
    assert (nothing, number) == (None, 3)
    torch.testing.assert_close(module.total, (example * before.weight).sum(0))


def test_a_symbolic_number_is_an_input_of_its_own() -> None:
    def scale(x: Tensor, rows: int) -> tuple[Tensor, int]:
        return torch.tanh(x).expand(rows, 3) + 1, rows * 2

    class Scale(nn.Module):
        def forward(self, x: Tensor, rows: int) -> tuple[Tensor, int]:
            return scale(x, rows)

    dynamic = {"x": None, "rows": torch.export.Dim.DYNAMIC}
    exported = reloaded(export(torch.export.export(Scale(), (torch.randn(3), 4), dynamic_shapes=dynamic)))
    x = torch.randn(3)
    got, wanted = exported.module()(x, 7), scale(x, 7)
    torch.testing.assert_close(got[0], wanted[0])
    assert got[1] == wanted[1]


# --- results --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_calls_are_those_of_the_original(name: str) -> None:
    assert_calls_equal(CASES[name].export(), exported_case(name), CASES[name])


def test_calls_need_no_file() -> None:
    case = CASES["everything"]
    assert_calls_equal(case.export(), export(case.export()), case)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{"memory_planning": "greedy_by_size"}, {"fuse": False, "emitter": "fx"}], ids=str)
def test_options_do_not_matter(options: dict[str, Any]) -> None:
    case = CASES["everything"]
    assert_calls_equal(case.export(), reloaded(export(case.export(), **options)), case)


def test_sizes_are_checked_again() -> None:
    case = CASES["everything"]
    exported = exported_case("everything")
    for rows in (1, 65):
        with pytest.raises((RuntimeError, AssertionError, InputError)):
            exported.module()(*case.make_inputs(rows))
    inputs = {"x": torch.randn(8, 5).t(), "count": torch.zeros(3)}
    with pytest.raises(InputError, match="input 'batch_x'"):
        exported.module()(inputs, 2)


@pytest.mark.parametrize("rows", [2, 1000])
def test_a_size_may_be_anything_in_its_range(rows: int) -> None:
    case = CASES["elementwise"]
    assert_calls_equal(case.export(), exported_case("elementwise"), case, rows)


def test_ranges_are_those_of_the_program() -> None:
    exported = torch.export.export(Elementwise(), (torch.randn(3, 5),), dynamic_shapes=({0: Dim("rows", max=9)},))
    assert "VR[0, 9]" in str(exported.range_constraints)
    assert reloaded(export(exported)).range_constraints == exported.range_constraints
    least = torch.export.export(Largest(), (torch.randn(3, 5),), dynamic_shapes=({0: Dim("rows", max=9)},))
    (bounds,) = reloaded(export(least)).range_constraints.values()
    assert (int(bounds.lower), int(bounds.upper)) == (1, 9)


def test_a_result_that_is_a_copy_of_a_written_input_stays_a_copy() -> None:
    def body(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.sin(x) * 2
        x.copy_(y)
        return (y,)

    x = torch.randn(4)
    graph = make_fx(body, tracing_mode="fake")(x)
    module = reloaded(fxwrap.fx.export(fxwrap.compile_graph(graph, [x]))).module()
    other = x.clone()
    (result,) = module(other)
    torch.testing.assert_close(other, torch.sin(x) * 2)
    result.zero_()
    torch.testing.assert_close(other, torch.sin(x) * 2)


def test_buffers_that_exchange_their_contents() -> None:
    class Swap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("one", torch.ones(3))
            self.register_buffer("two", torch.full((3,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            one, two = self.one.clone(), self.two.clone()
            self.one.copy_(two)
            self.two.copy_(one)
            return torch.exp(x) + 1

    module = reloaded(export(torch.export.export(Swap(), (torch.randn(3),)))).module()
    module(torch.randn(3))
    assert module.one.tolist() == [2.0] * 3 and module.two.tolist() == [1.0] * 3


def test_a_written_parameter_is_a_mutation() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.count.add_(1)
            return x * self.count

    exported = reloaded(export(torch.export.export(Counter(), (torch.randn(3),))))
    assert _mutations(exported) == {(OutputKind.PARAMETER_MUTATION, "count")}
    module = exported.module()
    with torch.no_grad():
        assert module(torch.ones(3)).tolist() == module.count.tolist() == [2.0] * 3


def _aliases(x: Tensor) -> tuple[Tensor, ...]:
    return x, x.view(-1), x[0], x.t()


def _random(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def _number(x: Tensor) -> Tensor:
    return torch.sin(x) * x.max().item()


def _loop(x: Tensor) -> Tensor:
    def body(step: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return step + 1, y * 2 + 1

    result: Tensor = torch.while_loop(lambda step, _: step < 3, body, (torch.tensor(0), x))[1]
    return result


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", [_aliases, _random, _number, _loop], ids=lambda function: function.__name__)
def test_kinds_of_calls(function: Callable[[Tensor], Any]) -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return function(x)

    x = torch.randn(2, 3)
    exported = reloaded(export(torch.export.export(Module(), (x,))))
    torch.manual_seed(0)
    wanted = function(x)
    torch.manual_seed(0)
    got = exported.module()(x)
    torch.testing.assert_close(got, wanted)
    if function is _aliases:
        assert all(result.data_ptr() == x.data_ptr() for result in got)


def test_a_backward_through_a_launch_raises() -> None:
    case = CASES["everything"]
    result = exported_case("everything").module()(*case.make_inputs(4))["out"]
    with pytest.raises(FxwrapError, match="a launched kernel has no gradient; to train"):
        result.sum().backward()


def test_two_programs_with_equal_kernels_in_threads() -> None:
    programs = [reloaded(export(torch.export.export(Elementwise(), (torch.randn(3, 7),)))) for _ in range(2)]
    x, errors = torch.randn(3, 7), list[BaseException]()
    wanted, barrier = torch.sigmoid(x) * x + 1, threading.Barrier(4)

    def call(program: ExportedProgram) -> None:
        try:
            module = program.module()
            barrier.wait()
            for _ in range(20):
                torch.testing.assert_close(module(x), wanted)
        except BaseException as error:  # noqa: BLE001  of any thread
            errors.append(error)

    threads = [threading.Thread(target=call, args=(program,)) for program in programs for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    del programs[0]
    torch.testing.assert_close(programs[0].module()(x), wanted)


# --- compiled again -------------------------------------------------------------------------------------------------


NOT_DECLARED = frozenset({"branches"})
"""Cases with unbacked symbols, whose ranges are not in the file."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_compiled_again_it_is_the_same_program(name: str) -> None:
    compiled = compiled_case(name)
    exported = fxwrap.fx.export(compiled)
    for program in (exported, reloaded(exported)):
        again = fxwrap.compile_graph(program)
        is_loaded = program is not exported
        if not (is_loaded and name in NOT_DECLARED):
            assert_equal(compiled.program, again.program, copied=is_loaded)
        once_more = fxwrap.fx.export(again)
        assert _inputs(once_more) == _inputs(exported)
    assert_calls_equal(CASES[name].export(), once_more, CASES[name])


def test_torchs_own_decompositions_leave_launches_alone() -> None:
    case = CASES["everything"]
    assert_calls_equal(case.export(), exported_case("everything").run_decompositions({}), case)


def test_regions_are_refused() -> None:
    compiled = fxwrap.compile_graph(CASES["elementwise"].export(), options=fxwrap.Options(kernels="subgraph"))
    with pytest.raises(ExportError, match=r"calls a submodule, as fusion regions do, .* Compile without kernels="):
        fxwrap.fx.export(compiled)
