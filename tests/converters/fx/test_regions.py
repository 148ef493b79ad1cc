"""Regions as submodules of emitted graphs: sharing, edits, copies, inlining, and import."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.converters.fx import FxForm
from fxwrap.errors import FxImportError, GraphModuleError, RegionError
from fxwrap.lines import Launch
from fxwrap.options import Options
from fxwrap.wrapper_ir import Program, canonicalize_program, print_program

F, aten = torch.nn.functional, torch.ops.aten
SUBGRAPH = Options(kernels="subgraph", compile_cache=False)
FORMS: tuple[FxForm, ...] = ("in_place", "functional")
both_forms = pytest.mark.parametrize("form", FORMS)
INPUTS = torch.randn(4, 8), torch.randn(8, 8)


def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = F.layer_norm(F.gelu(x @ w) * 2, (8,))
    return x


def with_relu(layers: set[int]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns the model with another activation in some layers."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for layer in range(3):
            x = F.layer_norm((F.relu if layer in layers else F.gelu)(x @ w) * 2, (8,))
        return x

    return function


def program_of(dynamic: bool = False) -> Program:
    graph = make_fx(model, tracing_mode="symbolic" if dynamic else "real")(*INPUTS)
    return fxwrap.lower(graph, INPUTS, options=SUBGRAPH)


def emitted(form: FxForm, dynamic: bool = False) -> GraphModule:
    return fxwrap.to_fx(program_of(dynamic), form=form).graph_module


def canonical(program: Program) -> str:
    return print_program(canonicalize_program(program))


def find(module: GraphModule, target: object) -> Node:
    (node,) = module.graph.find_nodes(op="call_function", target=target)
    return node


def find_first(module: GraphModule, target: object) -> Node:
    return module.graph.find_nodes(op="call_function", target=target)[0]


def replace_gelu(module: GraphModule) -> None:
    find(module, aten.gelu.default).target = aten.relu.default
    module.recompile()


@both_forms
@pytest.mark.parametrize("dynamic", [False, True])
def test_equal_regions_share_a_submodule(form: FxForm, dynamic: bool) -> None:
    graph = emitted(form, dynamic)
    calls = fxwrap.fx.regions(graph)
    assert len(calls) == 3
    assert len({id(call.module) for call in calls}) == 1
    assert torch.equal(graph(*INPUTS)[0], model(*INPUTS))
    assert str(calls[0].node.meta["fxwrap_origin"]) != str(calls[1].node.meta["fxwrap_origin"])


@pytest.mark.parametrize("dynamic", [False, True])
def test_import_returns_the_program(dynamic: bool) -> None:
    program = program_of(dynamic)
    assert canonical(fxwrap.from_fx(fxwrap.to_fx(program))) == canonical(program)


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_functional_form_is_imported_as_launches(dynamic: bool) -> None:
    graph = emitted("functional", dynamic)
    assert not graph.graph.find_nodes(op="call_function", target=aten.empty_strided.default)
    imported = fxwrap.from_fx(graph)
    assert sum(isinstance(line, Launch) for line in imported.lines()) == 3
    assert torch.equal(fxwrap.run(imported, INPUTS)[0], model(*INPUTS))
    assert canonical(fxwrap.from_fx(fxwrap.fx.in_place(graph))) == canonical(program_of(dynamic))


@both_forms
def test_inlining_gives_a_graph_of_aten_operators(form: FxForm) -> None:
    graph = emitted(form)
    inlined = fxwrap.fx.inline_regions(graph)
    assert not inlined.graph.find_nodes(op="call_module")
    assert len(inlined.graph.find_nodes(op="call_function", target=aten.gelu.default)) == 3
    assert torch.equal(inlined(*INPUTS)[0], model(*INPUTS))
    assert torch.equal(fxwrap.run(fxwrap.from_fx(inlined), INPUTS)[0], model(*INPUTS))
    assert len(fxwrap.fx.regions(graph)) == 3  # the argument is unchanged


@both_forms
def test_nodes_of_an_inlined_region_have_the_origin_of_its_call(form: FxForm) -> None:
    inlined = fxwrap.fx.inline_regions(emitted(form))
    origins = [node.meta["fxwrap_origin"].nodes for node in inlined.graph.nodes if node.target is aten.gelu.default]
    assert [nodes[0] for nodes in origins] == ["gelu", "gelu_1", "gelu_2"]
    node = find_first(inlined, aten.gelu.default)
    assert node.meta["from_node"][0].name == "gelu"
    assert node.meta["original_aten"] is aten.gelu.default and node.meta["device"] == torch.device("cpu")


@both_forms
def test_copies_and_dead_code_elimination_preserve_regions(form: FxForm) -> None:
    graph = copy.deepcopy(emitted(form))
    graph.graph.eliminate_dead_code()
    graph.recompile()
    assert torch.equal(graph(*INPUTS)[0], model(*INPUTS))
    assert torch.equal(fxwrap.run(fxwrap.from_fx(graph), INPUTS)[0], model(*INPUTS))


@both_forms
def test_a_vendors_module_may_replace_a_region(form: FxForm) -> None:
    graph, compiled = emitted(form), []

    def backend(region: GraphModule, _inputs: object) -> GraphModule:
        compiled.append(region)
        return region

    (call, *_) = fxwrap.fx.regions(graph)
    graph.set_submodule(call.name, torch.compile(call.module, backend=backend, dynamic=False))
    assert torch.equal(graph(*INPUTS)[0], model(*INPUTS))
    assert len(compiled) == 1


# --- edits ------------------------------------------------------------------------------------------------------------


@both_forms
def test_an_edited_region_does_not_match_its_metadata(form: FxForm) -> None:
    graph = emitted(form)
    (call, *others) = fxwrap.fx.regions(graph)
    replace_gelu(call.module)
    with pytest.raises(RegionError) as error:
        fxwrap.from_fx(graph)
    assert (error.value.region, error.value.field) == (call.name, "operators")
    assert "its graph calls aten.relu.default(" in error.value.reason
    assert "where its metadata has aten.gelu.default(" in error.value.reason
    names = ", ".join([item.node.name for item in (call, *others)])
    text = str(error.value)
    assert f"edit the result of fxwrap.fx.copy_region(node); its calls are {names}" in text
    assert "If the edit is intended, call fxwrap.fx.update_region(node)" in text


@both_forms
def test_an_updated_region_is_imported_with_its_new_operators(form: FxForm) -> None:
    graph = emitted(form)
    (call, *_) = fxwrap.fx.regions(graph)
    replace_gelu(call.module)
    region = fxwrap.fx.update_region(call.node)
    assert (region.operators[0], region.index_space, region.loop_ir) == ("aten.relu.default", (), "")
    assert (region.bytes_read, region.bytes_written) == (128, 128)
    imported = fxwrap.from_fx(graph)
    assert torch.equal(fxwrap.run(imported, INPUTS)[0], with_relu({0, 1, 2})(*INPUTS))


def copied(graph: GraphModule) -> Callable[..., object]:
    return copy.deepcopy(graph)


def compiled_by_dynamo(graph: GraphModule) -> Callable[..., object]:
    return torch.compile(graph, backend="eager")


def unchanged(graph: GraphModule) -> Callable[..., object]:
    return graph


@pytest.mark.every_combination
@both_forms
@pytest.mark.parametrize("call_of", [unchanged, copied, compiled_by_dynamo])
def test_calls_of_an_edited_region_raise_until_the_edit_is_accepted(
    form: FxForm, call_of: Callable[[GraphModule], Callable[..., object]]
) -> None:
    graph = emitted(form)
    (call, *_) = fxwrap.fx.regions(graph)
    replace_gelu(call.module)
    with pytest.raises(RegionError) as error:
        call_of(graph)(*INPUTS)
    assert str(error.value) == (
        f"region '{call.name}', operators: its graph was edited: it has aten.relu.default(in0), where its metadata has "
        "aten.gelu.default(in0). To change one call of a shared region, edit the result of "
        "fxwrap.fx.copy_region(node). If the edit is intended, call fxwrap.fx.update_region(node) with a node that "
        "calls it; else undo it"
    )
    fxwrap.fx.update_region(call.node)
    (result,) = call_of(graph)(*INPUTS)  # type: ignore[misc]
    assert torch.equal(result, with_relu({0, 1, 2})(*INPUTS))


def test_an_edit_that_is_undone_is_no_edit() -> None:
    graph = emitted("functional")
    module = fxwrap.fx.regions(graph)[0].module
    replace_gelu(module)
    find(module, aten.relu.default).target = aten.gelu.default
    next(iter(module.graph.nodes)).name = "renamed"
    module.recompile()
    assert torch.equal(graph(*INPUTS)[0], model(*INPUTS))


@both_forms
def test_a_region_that_on_graph_edits_is_refused_at_the_first_call(form: FxForm) -> None:
    def edit(graph: GraphModule, info: object) -> GraphModule:
        find(fxwrap.fx.regions(graph)[0].module, aten.gelu.default).target = aten.relu.default
        return graph

    options = {"kernels": "subgraph", "fx_form": form, "on_graph": edit, "compile_cache": False, "fallback": "error"}
    reason = "RegionError: region 'gelu_mul_layer_norm_0', operators: its graph was edited: it has aten.relu.default"
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match=reason):
        torch.compile(model, backend="fxwrap", options=options)(*INPUTS)


@both_forms
def test_graphs_of_regions_are_plain_graph_modules(form: FxForm) -> None:
    graph = emitted(form)
    region = graph.get_submodule(str(graph.graph.find_nodes(op="call_module")[0].target))
    assert isinstance(region, GraphModule) and "aten.gelu.default" in region.code
    (result,) = torch.compile(emitted(form), backend="eager", fullgraph=True)(*INPUTS)
    assert torch.equal(result, model(*INPUTS))
    for strict in (False, True):
        (result,) = torch.export.export(emitted(form), INPUTS, strict=strict).module()(*INPUTS)
        assert torch.equal(result, model(*INPUTS))


@both_forms
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_copy_changes_one_call_of_a_shared_region(form: FxForm, dynamic: bool) -> None:
    graph = emitted(form, dynamic)
    node = fxwrap.fx.regions(graph)[1].node
    replace_gelu(fxwrap.fx.copy_region(node))
    graph.recompile()
    with pytest.raises(RegionError, match="_copy_0', operators"):
        fxwrap.from_fx(graph)
    fxwrap.fx.update_region(node)
    assert torch.equal(graph(*INPUTS)[0], with_relu({1})(*INPUTS))
    imported = fxwrap.from_fx(graph)
    assert len(imported.kernels) == 2
    assert torch.equal(fxwrap.run(imported, INPUTS)[0], with_relu({1})(*INPUTS))


def add_input(module: GraphModule) -> None:
    first = module.graph.find_nodes(op="placeholder")[0]
    with module.graph.inserting_before(first):
        module.graph.placeholder("more").meta["val"] = first.meta["val"]


def drop_product(module: GraphModule) -> None:
    node = find(module, aten.mul.Tensor)
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    module.graph.erase_node(node)


def return_gelu(module: GraphModule) -> None:
    module.graph.output_node().args = ((find(module, aten.gelu.default),),)


@pytest.mark.parametrize(
    ("edit", "field", "reason"),
    [
        (add_input, "inputs", "its graph takes 1 tensors and 0 symbols, its metadata 0 tensors and 0 symbols"),
        (drop_product, "operators", "where its metadata has aten.mul.Tensor"),
        (return_gelu, "results", "its graph returns v0, its metadata v2_0"),
    ],
)
def test_the_error_names_the_field(edit: Callable[[GraphModule], None], field: str, reason: str) -> None:
    graph = emitted("functional")
    edit(fxwrap.fx.regions(graph)[0].module)
    with pytest.raises(RegionError) as error:
        fxwrap.from_fx(graph)
    assert error.value.field == field
    assert reason in error.value.reason


def test_a_region_with_an_effect_cannot_be_updated() -> None:
    (call, *_) = fxwrap.fx.regions(emitted("functional"))
    find(call.module, aten.gelu.default).target = aten.relu_.default
    with pytest.raises(RegionError, match=r"\(aten\.relu_\.default\) writes its operands or has another effect"):
        fxwrap.fx.update_region(call.node)


def test_a_call_with_other_arguments_is_refused() -> None:
    graph = emitted("in_place")
    (call, *_) = fxwrap.fx.regions(graph)
    call.node.args = (*call.node.args, call.node.args[0])
    reason = "the region takes 1 tensors and 0 symbols, not 2 arguments"
    with pytest.raises(FxImportError, match=f"node '{call.node.name}'.*{reason}"):
        fxwrap.from_fx(graph)


def test_a_node_that_calls_no_region_is_refused() -> None:
    node: Node = next(iter(emitted("in_place").graph.nodes))
    for function in (fxwrap.fx.copy_region, fxwrap.fx.update_region):
        with pytest.raises(GraphModuleError, match=f"node '{node.name}' calls no region"):
            function(node)
