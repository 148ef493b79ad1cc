"""FX graphs read back as programs: as emitted, after torch's tools, after rewrites, and what cannot be read.

Those of models are read back in `tests/models/test_model_graphs.py` and `tests/models/test_models.py`.
"""

from __future__ import annotations

import copy
import gc
import importlib
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module
from torch.fx.subgraph_rewriter import replace_pattern

import fxwrap
from fxwrap.errors import FxImportError
from fxwrap.lines import Alloc, ExternCall, Mutate, View
from fxwrap.memory_planning import apply_plan, plan_memory
from fxwrap.passes import fold_views
from fxwrap.passes.reuse import reuse_memory
from fxwrap.runtime import kernel_table
from fxwrap.wrapper_ir import Ownership, Program
from tests.support.garbage import freeze_heap
from tests.support.long_form import sample_size
from tests.support.program_equality import assert_equal
from tests.support.sample import Sample
from tests.support.samples import SAMPLES
from tests.support.strategies.programs import RandomProgram, random_programs

ATEN = torch.ops.aten
NOT_EMITTED = ("collectives", "types")  # process groups, and an operator that nobody registered
EMITTED = [sample for sample in SAMPLES.values() if sample.name not in NOT_EMITTED]
named = pytest.mark.parametrize("sample", EMITTED, ids=lambda sample: sample.name)


def assert_runs_as(
    program: Program, run: Callable[..., Any], inputs: Callable[[], list[Any]], declared: Program | None = None
) -> None:
    """A program gives, by the interpreter, what a graph gives, and leaves the same in inputs that it does not own.

    `declared` is the program that says which those are, if another one.
    """
    ours, theirs = inputs(), inputs()
    with torch.no_grad():
        torch.manual_seed(3)
        wanted = run(*theirs)
        torch.manual_seed(3)
        result = fxwrap.run(program, ours)
    flat = list(wanted) if isinstance(wanted, tuple | list) else [wanted]
    torch.testing.assert_close(list(result), flat, rtol=0, atol=0, equal_nan=True)
    assert [_strides(item) for item in result] == [_strides(item) for item in flat]
    for mine, other, item in zip(ours, theirs, (declared or program).inputs, strict=True):
        if item.ownership is not Ownership.OWNED:
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


def _strides(item: object) -> list[int] | None:
    """Returns the strides by which memory is addressed; those of size 1 are any number."""
    if not isinstance(item, torch.Tensor) or item.numel() == 0:
        return None
    return [stride for size, stride in zip(item.shape, item.stride(), strict=True) if size > 1]


# --- round trips ------------------------------------------------------------------------------------------------------


@named
def test_samples_round_trip(sample: Sample) -> None:
    program = sample.program()
    assert_equal(program, fxwrap.from_fx(fxwrap.to_fx(program)))


@settings(max_examples=sample_size(25), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=random_programs())
def test_random_programs_round_trip(case: RandomProgram) -> None:
    assert_equal(case.program, fxwrap.from_fx(fxwrap.to_fx(case.program)))


DYNAMIC = """
program @dynamic(%x: borrowed f32[2*s0, 4]@cpu, %w: borrowed f32[4, s1]@cpu) {
  n0 = symbol.size(%x) dim=0 rank=2 range=(2, 64) hint=8
  s0 = symbol.let expr=floordiv(n0, 2)
  s1 = symbol.size(%w) dim=1 hint=3
  n1 = symbol.let expr=s0
  n2 = symbol.let expr=2*s0*(s1 + 1)
  n3 = symbol.let expr=2*s0*(s1 + 1)
  n4 = symbol.let expr=7
  f0 = symbol.let expr=int_true_div(s0, 3) + 0.5
  %y = extern.call @aten.mm.default(%x, %w) : f32[2*s0, s1]@cpu
  %a = memory.alloc() : f32[n2]@cpu
  %b = memory.alloc() : f32[2*s0*(s1 + 1) + n4]@cpu
  extern.mutate @aten.fill_.Scalar(%a, f0) writes=(%a)
  extern.mutate @aten.fill_.Scalar(%b, where(s0 > 2, cleandiv(4*s0, 4), modular_indexing(s0, 2, 3))) writes=(%b)
  %window = memory.view(%y) : f32[s0, s1 | s1, 1 | s0*s1]@cpu
  %low = memory.view(%window) : f32[s0 | s1 | s0*s1 + 1]@cpu
  %n = extern.call @aten.mul.Scalar(%low, n1) : f32[n1]@cpu
  control.return(%n, %y, %a, %b, and(s0 > 1, not(s1 == 4)), max(s0, s1, 3), pow_by_natural(s0, s1), identity(s0), n3)
}
"""


def test_expressions_round_trip_as_written() -> None:
    program = fxwrap.verify(fxwrap.parse(DYNAMIC))
    read = fxwrap.from_fx(fxwrap.to_fx(program))
    assert_equal(program, read)
    x, w = torch.randn(6, 4), torch.randn(4, 5)
    assert_runs_as(read, fxwrap.to_python(program), lambda: [x, w])


COLLECTIVES = """
program @collectives(%x: borrowed f32[8]@cpu, %y: borrowed f32[8]@cpu) {
  %sum = collective.start @_c10d_functional.all_reduce.default(%x, "sum", "0") group="0" : f32[8]@cpu
  %own = extern.call @aten.exp.default(%y) : f32[8]@cpu
  %mean = collective.start @_c10d_functional.all_reduce_.default(%own, "avg", "0") group="0" writes=(%own) \
aliases=(%own) : f32[8]@cpu
  [%all, %too] = collective.start @_c10d_functional.all_gather_into_tensor_coalesced.default([%x, %y], 2, "0") \
group="0" : [f32[16]@cpu, f32[16]@cpu]
  %sum_ready = collective.wait(%sum) group="0" : f32[8]@cpu
  %mean_ready = collective.wait(%mean) group="0" : f32[8]@cpu
  %all_ready = collective.wait(%all) group="0" : f32[16]@cpu
  %too_ready = collective.wait(%too) group="0" : f32[16]@cpu
  %z = extern.call @aten.add.Tensor(%sum_ready, %mean_ready) : f32[8]@cpu
  memory.free(%sum)
  memory.free(%own)
  control.return(%z, %all_ready, %too_ready)
}
"""


def test_collectives_are_imported_by_schema() -> None:
    importlib.import_module("torch.distributed._functional_collectives")  # registers the operators
    program = fxwrap.verify(fxwrap.parse(COLLECTIVES))
    module = fxwrap.to_fx(program).graph_module
    assert_equal(program, fxwrap.from_fx(module))
    for node in module.graph.nodes:
        node.meta.pop("fxwrap_line", None)
    assert_equal(program, fxwrap.from_fx(module))


@settings(max_examples=sample_size(15), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=random_programs())
def test_random_programs_round_trip_without_metadata(case: RandomProgram) -> None:
    """What nodes call and pass is enough: the program may be another one, and means the same."""
    module = fxwrap.to_fx(case.program).graph_module
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            for key in [key for key in node.meta if key.startswith("fxwrap") and key != "fxwrap_ownership"]:
                del node.meta[key]
    run = partial(_run, case.program)
    assert_runs_as(fxwrap.from_fx(module), run, lambda: case.inputs(4))


def _run(program: Program, *inputs: Any) -> Any:
    return fxwrap.run(program, list(inputs))


def test_direct_call_graphs_round_trip() -> None:
    """Their metadata has plain meta tensors and numbers."""
    for name in ("mlp", "symbols_of_all_kinds", "unbacked_results"):
        program = SAMPLES[name].program()
        assert_equal(program, fxwrap.from_fx(fxwrap.to_fx(program, fake_metadata=False)))


def test_names_header_and_origins_are_preserved() -> None:
    program = SAMPLES["mlp"].program()
    read = fxwrap.from_fx(fxwrap.to_fx(program))
    assert (read.name, read.header) == (program.name, program.header)
    assert [item.name for item in read.inputs] == [item.name for item in program.inputs]
    assert [kernel.name for kernel in read.kernels] == ["relu"]
    assert fxwrap.from_fx(fxwrap.to_fx(program), name="other").name == "other"


# --- torch's tools ----------------------------------------------------------------------------------------------------


def _split(module: GraphModule, _inputs: Sequence[Any]) -> GraphModule:
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    part = {node: 3 * index // max(len(nodes), 1) for index, node in enumerate(nodes)}
    return split_module(module, module, lambda node: part[node])  # type: ignore[arg-type]


def _cleaned(module: GraphModule, _inputs: Sequence[Any]) -> GraphModule:
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


TOOLS: dict[str, Callable[[GraphModule, Sequence[Any]], GraphModule]] = {
    "deepcopy": lambda module, _inputs: copy.deepcopy(module),
    "split_module": _split,
    "eliminate_dead_code": _cleaned,
    "make_fx": lambda module, inputs: make_fx(module, tracing_mode="fake")(*inputs),
    "make_fx_symbolic": lambda module, inputs: make_fx(module, tracing_mode="symbolic")(*inputs),
    "functionalize": lambda module, inputs: make_fx(torch.func.functionalize(module), tracing_mode="fake")(*inputs),
}
EXACT = ("deepcopy", "eliminate_dead_code")
TOOL_CASES = (
    "mlp", "cpp_kernel_with_two_outputs", "triton_kernel", "views_share_one_root", "pool_and_workspace",
    "many_results", "scatter_and_index_put", "owned_inputs", "symbols_of_all_kinds", "unbacked_results",
    "cond_nested", "while_loops", "scan_and_map", "random_state",
)  # fmt: skip
SAME_TEXT = ("operator_arguments", "exact_scalars", "scatter_and_index_put", "scan_and_map", "random_state")


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", TOOL_CASES)
@torch.no_grad()
def test_graphs_can_be_imported_after_fx_tools(name: str, tool: str) -> None:
    sample = SAMPLES[name]
    program = sample.program()
    read = fxwrap.from_fx(TOOLS[tool](fxwrap.to_fx(program).graph_module, sample.inputs(1)))
    if tool in EXACT and (name, tool) != ("while_loops", "eliminate_dead_code"):  # that one drops a size of a result
        assert_equal(program, read)
    assert_runs_as(read, fxwrap.to_python(program), lambda: sample.inputs(1), program)


@pytest.mark.parametrize("name", SAME_TEXT)
@torch.no_grad()
def test_a_retraced_graph_without_symbols_is_the_same_program(name: str) -> None:
    sample = SAMPLES[name]
    retraced = TOOLS["make_fx"](fxwrap.to_fx(sample.program()).graph_module, sample.inputs(1))
    assert_equal(sample.program(), fxwrap.from_fx(retraced))


def test_kernels_can_be_passed_as_an_argument() -> None:
    program = SAMPLES["cpp_kernel_with_two_outputs"].program()
    module = fxwrap.to_fx(program).graph_module
    module.meta.clear()
    with kernel_table.empty_kernel_table():
        with pytest.raises(FxImportError, match=r"no kernel with the content hash .*from_fx\(graph, kernels="):
            fxwrap.from_fx(module)
        assert_equal(program, fxwrap.from_fx(module, kernels=program.kernels))


def test_ownership_can_be_passed_as_an_argument() -> None:
    module = fxwrap.to_fx(SAMPLES["owned_inputs"].program()).graph_module
    assert fxwrap.from_fx(module).inputs[1].ownership is Ownership.OWNED
    assert fxwrap.from_fx(module, ownership={"b": Ownership.SHARED}).inputs[1].ownership is Ownership.SHARED


@pytest.mark.parametrize("name", ["mlp", "triton_kernel"])
@torch.no_grad()
def test_a_traced_graph_can_be_imported_after_the_emitted_one_is_gone(name: str) -> None:
    freeze_heap()
    sample = SAMPLES[name]
    traced = TOOLS["make_fx"](fxwrap.to_fx(sample.program()).graph_module, sample.inputs(1))
    gc.collect()
    program = fxwrap.from_fx(traced)
    assert {kernel.hash for kernel in program.kernels} == {kernel.hash for kernel in sample.program().kernels}


COMMENTS = """
program @comments(%x: borrowed f32[4, 3]@cpu) {
  note.comment() text="a loop, whose blocks are attributes"
  %n, %y = control.while(0, %x) : int, f32[4, 3]@cpu {
  ^cond(%a: int, %b: f32[4, 3]@cpu):
    u0 = symbol.bind(%a)
    control.yield(u0 < 2)
  ^body(%c: int, %d: f32[4, 3]@cpu):
    u1 = symbol.bind(%c)
    %e = extern.call @aten.sin.default(%d) : f32[4, 3]@cpu
    control.yield(u1 + 1, %e)
  }
  u2 = symbol.bind(%n)
  note.comment() text="a scan whose inputs are flipped"
  %last, %rows = control.scan(%y) over=(%x) reverse=true : f32[4, 3]@cpu, f32[4]@cpu {
  ^body(%state: f32[4, 3]@cpu, %row: f32[3]@cpu):
    %sum = extern.call @aten.add.Tensor(%state, %row) : f32[4, 3]@cpu
    %top = extern.call @aten.amax.default(%row) : f32[]@cpu
    control.yield(%sum, %top)
  }
  memory.free(%y)
  control.return(%last, %rows)
}
"""


@pytest.mark.parametrize("tool", ["deepcopy", "split_module"])
def test_comments_keep_their_positions(tool: str) -> None:
    program = fxwrap.verify(fxwrap.parse(COMMENTS))
    assert_equal(program, fxwrap.from_fx(TOOLS[tool](_module(COMMENTS), [])))


# --- rewrites ---------------------------------------------------------------------------------------------------------

STATIC = """
program @rewritten(%x: borrowed f32[4, 8]@cpu, %w: borrowed f32[8, 6]@cpu) {
  %h = extern.call @aten.mm.default(%x, %w) : f32[4, 6]@cpu
  %t = memory.view(%h) : f32[6, 4 | 1, 6]@cpu
  %buf = memory.alloc() : f32[6, 4]@cpu
  extern.call @aten.sin.out(%t) outs=(%buf)
  %y = extern.call @aten.mul.Tensor(%buf, %t) : f32[6, 4]@cpu
  memory.free(%h)
  control.return(%y, %buf)
}
"""


def _module(text: str = STATIC) -> GraphModule:
    return fxwrap.to_fx(fxwrap.verify(fxwrap.parse(text))).graph_module


def _node(module: GraphModule, name: str) -> Node:
    return next(node for node in module.graph.nodes if node.name == name)


def _insert(module: GraphModule, after: str, target: Any, *arguments: Any, **keywords: Any) -> Node:
    with module.graph.inserting_after(_node(module, after)):
        return module.graph.call_function(target, tuple(arguments), keywords)


def _other_target(module: GraphModule) -> None:
    """The metadata of the node, and of all after it, says what the old operator gave."""
    node = _node(module, "h")
    flipped = _insert(module, "w", ATEN.flip.default, node.args[1], [0])
    node.target, node.args = ATEN.matmul.default, (node.args[0], flipped)


def _other_dtype(module: GraphModule) -> None:
    wide = _insert(module, "h", ATEN._to_copy.default, _node(module, "h"), dtype=torch.float64)
    _node(module, "h").replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)
    _node(module, "buf").update_kwarg("dtype", torch.float64)


def _several_results(module: GraphModule) -> None:
    best = _insert(module, "y", ATEN.max.dim, _node(module, "y"), 1)
    values = _insert(module, best.name, operator.getitem, best, 0)
    parts = _insert(module, values.name, ATEN.split.Tensor, _node(module, "y"), 2, 1)
    last = _insert(module, parts.name, operator.getitem, parts, 1)
    shared = _insert(module, last.name, ATEN.add_.Tensor, last, 1.0)
    module.graph.output_node().args = ((values, shared, _node(module, "y")),)


def _view_of_a_view(module: GraphModule) -> None:
    row = _insert(module, "t", ATEN.select.int, _node(module, "t"), 0, -1)
    part = _insert(module, row.name, ATEN.slice.Tensor, row, 0, 1, 2**63 - 1)
    flat = _insert(module, part.name, ATEN.view.default, part, [-1])
    module.graph.output_node().args = ((_node(module, "y"), flat),)


def _write_to_an_input(module: GraphModule) -> None:
    x = _node(module, "x")
    x.append(module.graph.call_function(ATEN.mul_.Scalar, (x, 2.0)))


def _erase_and_reorder(module: GraphModule) -> None:
    graph = module.graph
    graph.output_node().args = ((_node(module, "buf"),),)
    _node(module, "x").append(_node(module, "buf"))  # the allocation goes to the start
    graph.erase_node(_node(module, "y"))


def _by_pattern(module: GraphModule) -> None:
    def pattern(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ATEN.mul.Tensor(a, b)

    def replacement(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ATEN.hypot.default(ATEN.exp.default(a), b)

    assert len(replace_pattern(module, pattern, replacement)) == 1


def _unwritten_memory(module: GraphModule) -> None:
    """A functional form reads memory that nothing has written, for its sizes."""
    like = _insert(module, "buf", ATEN.zeros_like.default, _node(module, "buf"))
    filled = _insert(module, like.name, ATEN.copy.default, _node(module, "buf"), like)
    module.graph.output_node().args = ((_node(module, "y"), filled),)


def _composite(module: GraphModule) -> None:
    flat = _insert(module, "t", ATEN.reshape.default, _node(module, "t"), [24])
    same = _insert(module, "h", ATEN.reshape.default, _node(module, "h"), [2, 12])
    module.graph.output_node().args = ((_node(module, "y"), flat, same),)


def _spliced(module: GraphModule) -> None:
    """A whole emitted graph goes into another one, whose values and symbols have the same names."""
    other = fxwrap.to_fx(fxwrap.verify(fxwrap.parse(DYNAMIC))).graph_module
    mapping: dict[Node, Node] = {}
    x, w = other.graph.find_nodes(op="placeholder")
    with module.graph.inserting_before(module.graph.output_node()):
        mapping[x] = module.graph.call_function(ATEN.view.default, (_node(module, "buf"), [6, 4]))
        mapping[w] = module.graph.call_function(ATEN.t.default, (_node(module, "t"),))
        mapping[w] = module.graph.call_function(ATEN.slice.Tensor, (mapping[w], 0, 0, 4))
        result = module.graph.graph_copy(other.graph, mapping)
    module.graph.output_node().args = ((*result, _node(module, "y")),)  # type: ignore[misc]


def _with_nodes_twice(module: GraphModule) -> None:
    """Nodes that define symbols are copied with their metadata."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and "fxwrap_symbol" in node.meta:
            with module.graph.inserting_after(node):
                twin = module.graph.node_copy(node, lambda item: item)
            last = list(node.users)[-1] if node.users else None
            if last is not None:
                last.replace_input_with(node, twin)


REWRITES = (
    _other_target, _other_dtype, _several_results, _view_of_a_view, _write_to_an_input, _erase_and_reorder, _by_pattern,
    _unwritten_memory, _composite, _spliced,
)  # fmt: skip
DYNAMIC_REWRITES = (_with_nodes_twice,)


def _rewritten(rewrite: Callable[[GraphModule], None], text: str) -> GraphModule:
    module = _module(text)
    rewrite(module)
    module.graph.lint()
    module.recompile()
    return module


def _matrices() -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, 8, generator=generator), torch.randn(8, 6, generator=generator)]


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda rewrite: rewrite.__name__.lstrip("_"))
def test_a_rewritten_graph_is_imported_by_its_semantics(rewrite: Callable[[GraphModule], None]) -> None:
    module = _rewritten(rewrite, STATIC)
    program = fxwrap.from_fx(module)
    assert_runs_as(program, module, _matrices)
    for emit in (fxwrap.to_python, fxwrap.to_fx):
        assert_runs_as(program, emit(program), _matrices)
    assert_equal(program, fxwrap.from_fx(fxwrap.to_fx(program)))


def test_a_rewritten_graph_becomes_cpp() -> None:
    module = _rewritten(_several_results, STATIC)
    program = fxwrap.from_fx(module)
    assert_runs_as(program, fxwrap.to_cpp(program), _matrices)


def test_symbols_defined_by_two_nodes_are_distinguished() -> None:
    module = _rewritten(_with_nodes_twice, DYNAMIC)
    inputs = lambda: [torch.ones(6, 4), torch.ones(4, 5)]  # noqa: E731
    program = fxwrap.from_fx(module)
    assert_runs_as(program, module, inputs)
    assert_runs_as(program, fxwrap.to_python(program), inputs)


def test_a_launch_is_replaced_by_operators() -> None:
    sample = SAMPLES["mlp"]
    module = fxwrap.to_fx(sample.program()).graph_module
    (launch,) = module.graph.find_nodes(op="call_function", target=torch.ops.fxwrap.cpp_kernel.default)
    source, out = launch.args[1][0], launch.kwargs["outs"][0]
    with module.graph.inserting_before(launch):
        module.graph.call_function(ATEN.relu.out, (source,), {"out": out})
    module.graph.erase_node(launch)
    module.recompile()
    program = fxwrap.from_fx(module)
    assert not program.kernels and "aten.relu.out" in str(program)
    assert_runs_as(program, fxwrap.to_python(sample.program()), lambda: sample.inputs(1))


def test_a_launch_is_moved_into_another_graph() -> None:
    """Its kernel comes along, under a name of its own."""
    module = fxwrap.to_fx(SAMPLES["cpp_kernel_with_two_outputs"].program()).graph_module
    other = fxwrap.to_fx(SAMPLES["mlp"].program()).graph_module
    (theirs,) = other.graph.find_nodes(op="call_function", target=torch.ops.fxwrap.cpp_kernel.default)
    x, output = _node(module, "x"), module.graph.output_node()
    with module.graph.inserting_before(output):
        out = module.graph.call_function(ATEN.empty_like.default, (x,))
        keywords = {**theirs.kwargs, "outs": [out], "sizes": [32]}
        module.graph.call_function(theirs.target, (theirs.args[0], [x]), keywords)
    output.args = ((*output.args[0], out),)  # type: ignore[misc]
    module.recompile()
    program = fxwrap.from_fx(module)
    assert sorted(kernel.name for kernel in program.kernels) == ["relu", "scale_add"]
    assert_runs_as(program, module, lambda: SAMPLES["cpp_kernel_with_two_outputs"].inputs(2))


def test_passes_and_planning_apply_to_imported_programs() -> None:
    module = _rewritten(_several_results, STATIC)
    program = fxwrap.from_fx(module)
    planned = apply_plan(program, plan_memory(program, alignment=lambda _device: 64))
    for changed in (fold_views(program), reuse_memory(program), planned):
        assert_runs_as(fxwrap.verify(changed), module, _matrices)


# --- operators --------------------------------------------------------------------------------------------------------


@pytest.fixture
def vendor() -> Any:
    """An operator without a rule for fake tensors."""
    with torch.library._scoped_library("from_fx_test", "FRAGMENT") as scoped:
        scoped.define("twice(Tensor x) -> Tensor")
        scoped.impl("twice", lambda x: x * 2, "CPU")
        yield torch.ops.from_fx_test.twice.default


def test_an_operator_without_a_rule_is_typed_by_its_metadata(vendor: Any) -> None:
    module = _module()
    call = _insert(module, "h", vendor, _node(module, "h"))
    _node(module, "h").replace_all_uses_with(call, delete_user_cb=lambda user: user is not call)
    with pytest.raises(FxImportError, match=r"node 'twice.*no fake implementation.*register_fake"):
        fxwrap.from_fx(module)
    call.meta["val"] = _node(module, "h").meta["val"]
    module.recompile()
    program = fxwrap.from_fx(module)
    assert any(isinstance(line, ExternCall) and line.target == "from_fx_test.twice.default" for line in program.lines())
    assert_runs_as(program, module, _matrices)


def test_line_kinds_follow_the_schema() -> None:
    module = _module()
    y = _node(module, "y")
    for target in (ATEN.relu_.default, ATEN.sigmoid.default):
        _insert(module, "y", target, y)
    (first, second) = [line for line in fxwrap.from_fx(module).body.lines if isinstance(line, ExternCall | Mutate)][-2:]
    assert isinstance(first, ExternCall) and first.target == "aten.sigmoid.default"
    assert isinstance(second, Mutate) and second.target == "aten.relu_.default" and not second.results


def test_random_operators_have_their_effect() -> None:
    module = _module()
    _insert(module, "y", ATEN.bernoulli.default, _node(module, "y"))
    lines = [line for line in fxwrap.from_fx(module).lines() if isinstance(line, ExternCall)]
    effects = {line.target: [effect.name for effect in line.effects()] for line in lines}
    assert effects["aten.bernoulli.default"] == ["random"] and effects["aten.mul.Tensor"] == []


def test_calls_without_uses_stay_pure() -> None:
    """The out variant, which gives a result its declared layout, could not be eliminated as dead code."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x + y
        return (x + y, x * 2)

    graph = make_fx(function, tracing_mode="fake")(torch.zeros(1, 4), torch.zeros(4))
    unused = next(node for node in graph.graph.nodes if node.target is ATEN.add.Tensor)
    assert not unused.users
    calls = [line for line in fxwrap.from_fx(graph).body.lines if isinstance(line, ExternCall)]
    assert [(line.target, len(line.outs)) for line in calls] == [
        ("aten.add.Tensor", 0), ("aten.add.out", 1), ("aten.mul.Tensor", 0),
    ]  # fmt: skip


def test_a_chain_of_views_is_imported_as_one_view_line() -> None:
    """Views that only other views use have no lines; the last one is a view of the base of the first."""
    read = fxwrap.from_fx(_rewritten(_view_of_a_view, STATIC))
    views = [line for line in read.lines() if isinstance(line, View)]
    assert [view.result.name for view in views] == ["t", "view_default"]
    last = views[-1].result.tensor_type
    assert views[-1].base.name == views[0].result.name
    assert (last.sizes, last.strides, last.storage_offset) == ((3,), (6,), 11)
    assert sum(isinstance(line, Alloc) for line in read.lines()) == 1


# --- what cannot be read ----------------------------------------------------------------------------------------------


def _python_function(module: GraphModule) -> None:
    _node(module, "y").target = torch.mul


def _own_function(module: GraphModule) -> None:
    def mine(a: Any, b: Any) -> Any:
        return a * b

    _node(module, "y").target = mine


def _packet(module: GraphModule) -> None:
    _node(module, "y").target = ATEN.mul


def _method(module: GraphModule) -> None:
    node = _node(module, "y")
    node.op, node.target = "call_method", "mul"


def _submodule(module: GraphModule) -> None:
    module.add_submodule("relu", torch.nn.ReLU())
    with module.graph.inserting_before(module.graph.output_node()):
        module.graph.call_module("relu", (_node(module, "y"),))


def _graph_that_is_passed_too_little(module: GraphModule) -> None:
    module.add_submodule("part", fxwrap.to_fx(fxwrap.parse(STATIC)).graph_module)
    with module.graph.inserting_before(module.graph.output_node()):
        module.graph.call_module("part", (_node(module, "y"),))


def _used_before_it_is_defined(module: GraphModule) -> None:
    _node(module, "x").prepend(_node(module, "t"))
    _node(module, "w").append(_node(module, "t"))


def _node_of_another_graph(module: GraphModule) -> None:
    other = Graph()
    _node(module, "y").args = (_node(module, "buf"), other.placeholder("stranger"))


def _nested_output(module: GraphModule) -> None:
    module.graph.output_node().args = ((_node(module, "y"), [_node(module, "buf")]),)


def _wrong_shapes(module: GraphModule) -> None:
    _node(module, "y").args = (_node(module, "x"), _node(module, "w"))


def _writes_a_number(module: GraphModule) -> None:
    _insert(module, "y", ATEN.relu_.default, 3.0)


def _reuse_of_a_view(module: GraphModule) -> None:
    _insert(module, "y", torch.ops.fxwrap.reuse.default, _node(module, "t"), [2], [1], torch.float32)


def _higher_order(module: GraphModule) -> None:
    _insert(module, "y", torch.ops.higher_order.wrap, _node(module, "y"))


def _missing_attribute(module: GraphModule) -> None:
    with module.graph.inserting_before(_node(module, "h")):
        module.graph.create_node("get_attr", "nowhere")


BAD: tuple[tuple[Callable[[GraphModule], None], str], ...] = (
    (_python_function, r"node 'y' \(mul\): .*'mul' is applied to 'buf', which is no number.*torch\.ops\.aten overload"),
    (_own_function, r"node 'y' \(mine\): .*'mine' is applied to 'buf'"),
    (_packet, r"node 'y' \(mul\): it calls an operator without an overload.*Call an overload"),
    (_method, r"node 'y' \(call_method of mul\): .*no methods"),
    (_submodule, r"node 'relu' \(call_module of relu\): a program has no modules"),
    (_graph_that_is_passed_too_little, r"node 'part' \(call_module of part\): the graph takes 2 inputs, not 1"),
    (_used_before_it_is_defined, r"node 't' \(aten\.permute\.default\): it uses 'h', which is not defined before it"),
    (_node_of_another_graph, r"node 'y' .*it uses 'stranger', which is not defined before it in this graph"),
    (_nested_output, r"node 'output' .*one of the graph's outputs is a .*list"),
    (_wrong_shapes, r"node 'y' \(aten\.mul\.Tensor\): aten\.mul\.Tensor fails on these inputs"),
    (_writes_a_number, r"node 'relu__default' .*'self', which the operator mutates, is no tensor"),
    (_reuse_of_a_view, r"node 'reuse_default' .*consumes 't', which is a view of 'h'"),
    (_higher_order, r"node 'wrap' .*no line of a program represents this operator"),
    (_missing_attribute, r"node 'nowhere' .*the module has no attribute 'nowhere'"),
)


@pytest.mark.parametrize(("rewrite", "message"), BAD, ids=lambda part: getattr(part, "__name__", "").lstrip("_"))
def test_unsupported_nodes_are_named_in_the_error(rewrite: Callable[[GraphModule], None], message: str) -> None:
    module = _module()
    rewrite(module)
    with pytest.raises(FxImportError, match=message) as caught:
        fxwrap.from_fx(module)
    assert caught.value.node and caught.value.target and caught.value.remedy


def test_reused_memory_cannot_be_read() -> None:
    module = fxwrap.to_fx(SAMPLES["mlp"].program()).graph_module
    (reuse,) = module.graph.find_nodes(op="call_function", target=torch.ops.fxwrap.reuse.default)
    late = _insert(module, reuse.name, ATEN.sin.default, reuse.args[0])
    with pytest.raises(FxImportError, match=rf"node '{late.name}' .*uses 'buf0' after 'buf2' .*consumed its memory"):
        fxwrap.from_fx(module)


def test_a_borrowed_input_cannot_be_reused() -> None:
    module = fxwrap.to_fx(SAMPLES["owned_inputs"].program()).graph_module
    _node(module, "a").meta["fxwrap_ownership"] = "borrowed"
    with pytest.raises(FxImportError, match=r"node 't' .*breaks the rule 'borrowed'.*memory\.reuse"):
        fxwrap.from_fx(module)


def test_a_kernel_requires_its_declared_dtypes() -> None:
    module = fxwrap.to_fx(SAMPLES["cpp_kernel_with_two_outputs"].program()).graph_module
    _node(module, "a").update_kwarg("dtype", torch.float64)
    message = r"node 'scale_add' .*'scale_add' takes a tensor of torch\.float32, but 'a' has torch\.float64"
    with pytest.raises(FxImportError, match=message):
        fxwrap.from_fx(module)


@pytest.mark.parametrize("language", ["cpp", "triton"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bool, torch.uint8, torch.bfloat16], ids=str)
def test_element_types_of_kernels(dtype: torch.dtype, language: str) -> None:
    """Signatures have bytes for float8, so that importing its kernels failed."""
    inputs = [(torch.arange(12.0) % 3).to(dtype).view(3, 4)]
    graph = make_fx(lambda x: ((x.float() + 1).to(dtype), x.float().exp()))(*inputs)
    compiled = fxwrap.compile_graph(graph, inputs, options=fxwrap.Options(emitter="fx", cpu_kernels=language))
    for module in (compiled.graph_module, fxwrap.fx.functional(compiled.graph_module)):
        outputs = fxwrap.run(fxwrap.from_fx(module), inputs)
        for output, wanted in zip(outputs, graph(*inputs), strict=True):
            assert output.dtype == wanted.dtype
            torch.testing.assert_close(output.float(), wanted.float())


def test_an_unregistered_kernel_is_rejected() -> None:
    module = fxwrap.to_fx(SAMPLES["triton_kernel"].program()).graph_module
    (launch,) = [node for node in module.graph.nodes if "kernel_idx" in node.kwargs]
    launch.meta.clear()
    launch.update_kwarg("kernel_idx", 10**6)
    with pytest.raises(FxImportError, match=r"torch's table of Triton kernels has no kernel 1000000"):
        fxwrap.from_fx(module)
    cpp = fxwrap.to_fx(SAMPLES["mlp"].program()).graph_module
    (launch,) = cpp.graph.find_nodes(op="call_function", target=torch.ops.fxwrap.cpp_kernel.default)
    launch.update_arg(0, "0" * 64)
    with pytest.raises(FxImportError, match=r"no kernel with the content hash 0000"):
        fxwrap.from_fx(cpp)
