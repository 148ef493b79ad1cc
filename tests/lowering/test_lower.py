"""Lowering: what each kind of graph becomes, and that it means the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.errors import CallError, CallIndexError, CallRuntimeError, GraphError
from fxwrap.lines import Alloc, Bind, CheckLayout, ExternCall, Free, Launch, Mutate, ReadItem, View
from fxwrap.torch_compat import FakeTensorMode
from fxwrap.wrapper_ir import Ownership

aten = torch.ops.aten

CALLS = Options(fuse=False)
"""Every operator is a call, for tests of calls, views and frees."""


def lines_of(program: fxwrap.Program, *classes: type) -> list:
    return [line for line in program.body.lines if isinstance(line, classes)]


def hand_written(build, *names: str) -> GraphModule:
    graph = Graph()
    graph.output(build(graph, *[graph.placeholder(name) for name in names]))
    return GraphModule(nn.Module(), graph)


def test_views_are_lines_and_operators_are_calls() -> None:
    def function(x):
        return x.t().relu().view(-1)

    graph_module, inputs = make_fx(function)(torch.randn(3, 4).t().contiguous().t()), [torch.randn(4, 3).t()]
    program = fxwrap.lower(graph_module, inputs, options=CALLS)
    assert [type(line) for line in program.body.lines] == [
        CheckLayout,
        View,
        ExternCall,
        View,
        type(program.body.lines[-1]),
    ]


def test_views_of_real_tensors_and_of_merged_nodes_keep_their_offset() -> None:
    """make_fx records a view of a real tensor as a tensor of its own, without its offset."""

    def function(x):
        return x[1:].t()[:, 1:], (x + 1)[2]

    x = torch.randn(4, 3)
    program = fxwrap.lower(make_fx(function)(x), [x], options=CALLS)
    assert [line.result.type.storage_offset for line in lines_of(program, View)] == [3, 3, 6, 6]
    torch.testing.assert_close(fxwrap.run(program, [x]), function(x))


def test_a_graph_without_metadata_is_propagated_and_not_modified() -> None:
    graph_module = hand_written(lambda graph, x: graph.call_function(aten.relu.default, (x,)), "x")
    program = fxwrap.lower(graph_module, [torch.randn(2)], options=CALLS)
    assert str(program.body.lines[1].results[0].type.sizes) == "(2,)"
    fused = fxwrap.lower(graph_module, [torch.randn(2)])
    assert str(lines_of(fused, Alloc)[0].result.type.sizes) == "(2,)"
    assert all(not node.meta for node in graph_module.graph.nodes)


def test_the_header_records_options_and_target() -> None:
    graph_module = make_fx(lambda x: x.relu())(torch.randn(2))
    plain = fxwrap.lower(graph_module, [torch.randn(2)])
    assert plain.header == (("target", "cpu"),)
    assert 'target="cpu" {' in str(plain)
    unchecked = fxwrap.lower(graph_module, [torch.randn(2)], options=Options(check_inputs=False, emitter="cpp"))
    assert unchecked.header == (("options", "check_inputs=False"), ("target", "cpu"))
    assert fxwrap.parse(str(unchecked)) == unchecked


def test_dead_pure_calls_are_eliminated_but_random_ones_are_not() -> None:
    def build(graph, x):
        graph.call_function(aten.relu.default, (x,))
        graph.call_function(aten.rand_like.default, (x,))
        return graph.call_function(aten.neg.default, (x,))

    program = fxwrap.lower(hand_written(build, "x"), [torch.randn(2)], options=CALLS)
    assert [line.target for line in lines_of(program, ExternCall)] == ["aten.rand_like.default", "aten.neg.default"]
    fused = fxwrap.lower(hand_written(build, "x"), [torch.randn(2)])
    assert [line.target for line in lines_of(fused, ExternCall)] == ["aten.rand_like.default"]
    assert [line.kernel for line in lines_of(fused, Launch)] == ["neg_0"]


def test_frees_follow_the_last_use() -> None:
    graph_module = make_fx(lambda x: (x + 1).relu() * 2)(torch.randn(2))
    program = fxwrap.lower(graph_module, [torch.randn(2)], options=CALLS)
    kinds = [type(line) for line in program.body.lines[1:]]
    assert kinds[:5] == [ExternCall, ExternCall, Free, ExternCall, Free]


def test_owned_and_shared_inputs_are_freed() -> None:
    graph_module = make_fx(lambda x, y: x + y)(torch.randn(2), torch.randn(2))
    inputs = [torch.randn(2), torch.randn(2)]
    ownership = {0: Ownership.OWNED, 1: Ownership.SHARED}
    fused = fxwrap.lower(graph_module, inputs, ownership=ownership)
    assert [line.outs[0].name for line in lines_of(fused, Launch)] == [fused.inputs[0].name]  # it is overwritten
    assert [line.root.name for line in lines_of(fused, Free)] == [fused.inputs[1].name]
    program = fxwrap.lower(graph_module, inputs, ownership=ownership, options=CALLS)
    assert {line.root.name for line in lines_of(program, Free)} == {item.name for item in program.inputs}
    fxwrap.verify(program)


class AllLineKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)
        self.tied = self.linear.weight
        self.register_buffer("k", torch.arange(4.0))
        self.plain = torch.ones(4)

    def forward(self, x, n, y=None):
        x.mul_(2)
        return {"a": self.norm(self.linear(x)) @ self.tied + self.k + self.plain, "n": n, "none": None, "x": x}


def test_an_exported_program_has_the_modules_signature() -> None:
    module, x = AllLineKinds().train(), torch.randn(3, 4)
    reference, reference_x = copy.deepcopy(module), x.clone()
    exported = torch.export.export(module, (torch.randn(3, 4), 5))
    compiled = fxwrap.compile_graph(exported)
    wanted = reference(reference_x, 5)
    result = compiled(x, 5)
    assert list(result) == list(wanted) and (result["n"], result["none"]) == (5, None) and result["x"] is x
    torch.testing.assert_close(result["a"], wanted["a"])
    torch.testing.assert_close(x, reference_x)
    torch.testing.assert_close(compiled.program.store.tensors["b_norm_running_mean"], reference.norm.running_mean)


def test_an_exported_program_is_decomposed_except_preserved_operators() -> None:
    exported = torch.export.export(AllLineKinds().eval(), (torch.randn(3, 4), 5))
    targets = {line.target for line in lines_of(fxwrap.lower(exported), ExternCall)}
    assert "aten.matmul.default" not in targets and "aten.linear.default" not in targets
    preserved = fxwrap.lower(exported, options=Options(preserve_ops=frozenset({"aten.linear.default"})))
    assert "aten.linear.default" in {line.target for line in lines_of(preserved, ExternCall)}


def test_one_program_covers_all_sizes_of_a_dynamic_dimension() -> None:
    class Module(nn.Module):
        def forward(self, x, y):
            return (x @ y).relu().view(-1), x.shape[0] * 2

    exported = torch.export.export(
        Module(), (torch.randn(3, 4), torch.randn(4, 5)), dynamic_shapes=({0: Dim("b", min=2, max=50)}, None)
    )
    compiled = fxwrap.compile_graph(exported)
    for size in (2, 7, 50):
        x, y = torch.randn(size, 4), torch.randn(4, 5)
        flat, number = compiled(x, y)
        torch.testing.assert_close(flat, (x @ y).relu().view(-1))
        assert number == 2 * size


def test_unbacked_symbols_are_bound_from_results() -> None:
    def function(x):
        return x.nonzero() * 2, x[x > 0].sum(), x.sum().item() + 1

    programs = []

    def keep(program):
        programs.append(program)
        return program

    compiled = torch.compile(function, backend="fxwrap", fullgraph=True, options={"passes": [keep]})
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        for size in (3, 6):
            x = torch.arange(-1.0, size - 1)  # small whole numbers: their sum is exact in every order
            torch.testing.assert_close(compiled(x), function(x))
    assert lines_of(programs[0], Bind) and lines_of(programs[0], ReadItem)


def test_a_failing_symbolic_assertion_has_its_message() -> None:
    def function(x):
        size = x.sum().item()
        torch._check(size >= 2, lambda: "too small")
        return torch.ones(size)

    compiled = torch.compile(function, backend="fxwrap", fullgraph=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        torch.testing.assert_close(compiled(torch.tensor([3, 1])), torch.ones(4))
        with pytest.raises(RuntimeError, match=r"too small|u0 >= 2"):
            compiled(torch.tensor([0, 1]))


def test_a_lines_origin_is_the_models_own_source() -> None:
    exported = torch.export.export(AllLineKinds().eval(), (torch.randn(3, 4), 5))
    origins = {str(line.origin) for line in lines_of(fxwrap.lower(exported), ExternCall)}
    assert all("test_lower.py:" in origin for origin in origins)
    assert any(origin.startswith("linear: aten.addmm  test_lower.py:") for origin in origins)


def test_symbol_ranges_narrow_the_graphs_ranges() -> None:
    class Module(nn.Module):
        def forward(self, x):
            return x + 1

    exported = torch.export.export(Module(), (torch.randn(4),), dynamic_shapes=({0: Dim("b", min=2, max=50)},))
    name = fxwrap.lower(exported).body.lines[0].symbol.name
    program = fxwrap.lower(exported, options=Options(symbol_ranges={name: (4, 8)}))
    assert (program.body.lines[0].symbol.lower, program.body.lines[0].symbol.upper) == (4, 8)


def test_a_symbol_range_that_excludes_the_only_size_is_an_error() -> None:
    graph = make_fx(lambda x: x + torch.ones(3), tracing_mode="symbolic")(torch.randn(3))
    (placeholder,) = graph.graph.find_nodes(op="placeholder")
    (name,) = map(str, placeholder.meta["val"].fake_mode.shape_env.var_to_range)
    with pytest.raises(GraphError, match=rf"{name} is 3 by the guards of the graph, .* \(4, 64\)"):
        fxwrap.lower(graph, options=Options(symbol_ranges={name: (4, 64)}))


def test_in_place_and_out_variants() -> None:
    def build(graph, x, y):
        buffer = graph.call_function(aten.empty_like.default, (x,))
        filled = graph.call_function(aten.mul.out, (x, y), {"out": buffer})
        graph.call_function(aten.add_.Tensor, (x, filled))
        return (filled, x)

    graph_module = hand_written(build, "x", "y")
    x, y = torch.randn(3), torch.randn(3)
    program = fxwrap.lower(graph_module, [x, y])
    assert program.inputs[0].ownership is Ownership.MUTABLE
    calls = fxwrap.lower(graph_module, [x, y], options=CALLS)
    assert [type(line) for line in lines_of(calls, ExternCall, Mutate)] == [ExternCall, ExternCall, Mutate]
    wanted = (x * y, x + x * y)
    for lowered in (program, calls):
        torch.testing.assert_close(fxwrap.run(lowered, [x.clone(), y]), wanted)


def test_ordinary_builtins_and_prims_work() -> None:
    import operator

    def build(graph, x):
        size = graph.call_function(aten.sym_size.int, (x, 0))
        doubled = graph.call_function(operator.mul, (size, 2))
        total = graph.call_function(torch.sym_sum, ([doubled, size],))
        converted = graph.call_function(torch.ops.prims.convert_element_type.default, (x, torch.float64))
        copied = graph.call_function(aten.lift_fresh_copy.default, (converted,))
        pair = graph.call_function(aten.split.Tensor, (copied, 1))
        return (graph.call_function(operator.getitem, (pair, 1)), doubled, total)

    x = torch.randn(2)
    result = fxwrap.compile_graph(hand_written(build, "x"), [x])(x)
    torch.testing.assert_close(result[0], x[1:].double())
    assert result[1:] == (4, 6)


def test_user_lowerings_take_precedence() -> None:
    def lower_relu(builder, node):
        builder.env[node] = builder.env[node.args[0]]

    graph_module = make_fx(lambda x: x.relu() + 1)(torch.randn(2))
    own = CALLS.replace(lowerings={"aten.relu.default": lower_relu})
    program = fxwrap.lower(graph_module, [torch.randn(2)], options=own)
    assert [line.target for line in lines_of(program, ExternCall)] == ["aten.add.Tensor"]
    fused = fxwrap.lower(graph_module, [torch.randn(2)], options=own.replace(fuse=True))
    assert [line.kernel for line in lines_of(fused, Launch)] == ["add_0"]
    torch.testing.assert_close(fxwrap.run(fused, [torch.tensor([-2.0, 1.0])]), (torch.tensor([-1.0, 2.0]),))


def test_user_decompositions_apply_to_hand_written_graphs() -> None:
    table = {aten.relu.default: lambda x: torch.clamp(x, min=0)}
    graph_module = hand_written(lambda graph, x: graph.call_function(aten.relu.default, (x,)), "x")
    program = fxwrap.lower(graph_module, [torch.randn(2)], options=CALLS.replace(decompositions=table))
    assert [line.target for line in lines_of(program, ExternCall)] == ["aten.clamp.default"]
    preserving = Options(decompositions=table, preserve_ops=frozenset({"aten.relu.default"}))
    assert [
        line.target for line in lines_of(fxwrap.lower(graph_module, [torch.randn(2)], options=preserving), ExternCall)
    ] == ["aten.relu.default"]


# --- graphs that cannot be compiled ----------------------------------------------------------------------------------


def test_call_module_is_rejected() -> None:
    graph = Graph()
    graph.output(graph.call_module("layer", (graph.placeholder("x"),)))
    module = nn.Module()
    module.layer = nn.ReLU()
    with pytest.raises(GraphError, match=r"node 'layer': call_module of 'layer' is not an ATen operator.*make_fx"):
        fxwrap.lower(GraphModule(module, graph), [torch.randn(2)])


def test_a_graph_with_a_cycle_is_rejected() -> None:
    graph = Graph()
    first = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    second = graph.call_function(torch.ops.aten.neg.default, (first,))
    graph.output((second,))
    first.args = (second,)
    with pytest.raises(
        GraphError, match=f"node '{first.name}': it reads node '{second.name}', which does not come before"
    ):
        fxwrap.compile_graph(GraphModule(nn.Module(), graph), [torch.randn(2)])


def test_a_builtin_on_tensors_is_rejected() -> None:
    import operator

    graph_module = hand_written(lambda graph, x: graph.call_function(operator.add, (x, x)), "x")
    with pytest.raises(GraphError, match="node 'add': the Python builtin 'add' is applied to the tensor 'x'"):
        fxwrap.lower(graph_module, [torch.randn(2)])


def test_a_function_without_a_schema_is_rejected() -> None:
    graph_module = hand_written(lambda graph, x: graph.call_function(torch.relu, (x,)), "x")
    with pytest.raises(GraphError, match="'relu' is not an operator overload with a schema"):
        fxwrap.lower(graph_module, [torch.randn(2)])


def test_autocast_in_a_graph_traced_before_dispatch_is_rejected_with_a_remedy() -> None:
    """Its casts are operators in a graph traced after dispatch."""

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.mm(x, y)

    inputs = torch.randn(4, 4), torch.randn(4, 4)
    with pytest.raises(GraphError, match=r"'_enter_autocast' is not an operator .*make_fx\(pre_dispatch=False\)"):
        fxwrap.lower(make_fx(product, pre_dispatch=True)(*inputs), inputs)
    (result,) = fxwrap.compile_graph(make_fx(product, pre_dispatch=False)(*inputs), inputs)(*inputs)
    torch.testing.assert_close(result, product(*inputs))


def test_an_unknown_higher_order_operator_is_rejected() -> None:
    wrap = torch.ops.higher_order.wrap_activation_checkpoint
    graph_module = hand_written(lambda graph, x: graph.call_function(wrap, (None, (x,))), "x")
    for node in graph_module.graph.nodes:
        node.meta["val"] = FakeTensorMode().from_tensor(torch.randn(2))
    with pytest.raises(
        GraphError, match="the higher-order operator 'wrap_activation_checkpoint' has no operator schema"
    ):
        fxwrap.lower(graph_module)


def test_a_node_after_output_is_rejected() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((x,))
    with graph.inserting_after(next(node for node in graph.nodes if node.op == "output")):
        graph.call_function(aten.relu.default, (x,))
    with pytest.raises(GraphError, match="node 'relu_default': it comes after the output node 'output'"):
        fxwrap.lower(GraphModule(nn.Module(), graph), [torch.randn(2)])


def test_a_graph_without_output_is_rejected() -> None:
    graph_module = hand_written(lambda graph, x: x, "x")
    graph_module.graph.erase_node(list(graph_module.graph.nodes)[-1])
    with pytest.raises(GraphError, match="graph: the graph has no output node"):
        fxwrap.lower(graph_module, [torch.randn(2)])


def test_writing_an_immutable_constant_is_rejected() -> None:
    graph = Graph()
    constant = graph.get_attr("_tensor_constant0")
    graph.output((graph.call_function(aten.add_.Tensor, (constant, 1)),))
    module = nn.Module()
    module._tensor_constant0 = torch.ones(2)
    with pytest.raises(GraphError, match="node 'add__tensor': it writes the constant '_tensor_constant0'"):
        fxwrap.lower(GraphModule(module, graph), [])


def test_writing_a_buffer_changes_the_module() -> None:
    graph = Graph()
    buffer = graph.get_attr("count")
    graph.output((graph.call_function(aten.add_.Tensor, (buffer, 1)),))
    module = nn.Module()
    module.register_buffer("count", torch.zeros(()))
    graph_module = GraphModule(module, graph)
    compiled = fxwrap.compile_graph(graph_module, [])
    compiled()
    compiled()
    assert graph_module.count.item() == 2


def test_a_failing_call_names_its_node() -> None:
    graph_module = hand_written(lambda graph, x, y: graph.call_function(aten.mm.default, (x, y)), "x", "y")
    with pytest.raises(GraphError, match=r"node 'mm_default': aten.mm.default fails on these inputs"):
        fxwrap.lower(graph_module, [torch.randn(2, 3), torch.randn(2, 3)])


EMPTY, LARGE = torch.ones(3, 0), torch.ones(1).expand(1 << 10, 1 << 10)
BOOLS = torch.ones(3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("target", "operands", "error"),
    [
        *[(getattr(aten, name).default, (EMPTY, [1]), CallIndexError) for name in ("amax", "amin")],
        *[
            (getattr(aten, name).default, (EMPTY, *dim), CallIndexError)
            for name in ("argmax", "argmin")
            for dim in ((), (1,))
        ],
        (aten.aminmax.default, (EMPTY,), CallRuntimeError),
        (aten.sum.dim_IntList, (EMPTY, [4]), CallIndexError),
        *[(getattr(aten, name).Tensor, (BOOLS, BOOLS), CallError) for name in ("sub", "rsub")],
        (aten.neg.default, (BOOLS,), CallError),
        (aten.reshape.default, (LARGE, [7]), CallRuntimeError),  # fake tensors alone: more elements than are tried
    ],
    ids=str,
)
def test_a_call_that_eager_mode_rejects_raises_an_error_of_its_class(
    target: Any, operands: tuple[Any, ...], error: type[CallError]
) -> None:
    tensors = [item for item in operands if isinstance(item, torch.Tensor)]
    graph_module = hand_written(
        lambda graph, *xs: graph.call_function(target, (*xs, *operands[len(xs) :])), *"xy"[: len(tensors)]
    )
    with pytest.raises((IndexError, RuntimeError)) as eager:
        target(*operands)
    with pytest.raises(error) as raised:
        fxwrap.lower(graph_module, tensors)
    assert isinstance(raised.value, GraphError) and isinstance(raised.value, type(eager.value))
    if target is not aten.reshape.default:
        assert str(eager.value).partition("\n")[0] in str(raised.value)


def test_classes_of_call_errors() -> None:
    for error in (IndexError, ValueError, TypeError, NotImplementedError, RuntimeError):
        assert CallError.of(error()).__bases__ == (CallError, error)
    assert CallError.of(AttributeError()) is CallError


def test_the_wrong_number_of_example_inputs_is_rejected() -> None:
    graph_module = hand_written(lambda graph, x: graph.call_function(aten.relu.default, (x,)), "x")
    with pytest.raises(GraphError, match="the graph has 1 inputs, but there are 2 example inputs"):
        fxwrap.lower(graph_module, [torch.randn(2), torch.randn(2)])


def test_a_placeholder_of_several_tensors_is_rejected() -> None:
    import operator

    graph_module = hand_written(lambda graph, x: graph.call_function(operator.getitem, (x, 0)), "x")
    graph_module.graph.find_nodes(op="placeholder")[0].meta["val"] = (torch.randn(2, device="meta"),)
    with pytest.raises(GraphError, match="node 'x': it contains several values"):
        fxwrap.lower(graph_module, [(torch.randn(2),)])


def test_a_tensor_subclass_is_rejected() -> None:
    class Own(torch.Tensor):
        pass

    graph_module = hand_written(lambda graph, x: graph.call_function(aten.relu.default, (x,)), "x")
    with pytest.raises(GraphError, match="node 'x': it is the tensor subclass Own"):
        fxwrap.lower(graph_module, [torch.randn(2).as_subclass(Own)])


def test_an_argument_type_outside_the_ir_is_rejected() -> None:
    target = aten.set.source_Storage
    graph_module = hand_written(lambda graph, x: graph.call_function(target, (x,)), "x")
    (call,) = graph_module.graph.find_nodes(op="call_function", target=target)
    call.args = (*call.args, torch.UntypedStorage(8, device="meta"))
    with pytest.raises(GraphError, match="node 'set_source_storage': an argument is a UntypedStorage"):
        fxwrap.lower(graph_module, [torch.randn(2)])
