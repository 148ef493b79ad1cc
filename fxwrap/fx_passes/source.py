"""Import of FX graphs and exported programs into one form, and the model's source of their nodes."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxwrap.errors import GraphError
from fxwrap.fx_passes.attention.grouped_queries import find_query_groups, rewrite_query_groups
from fxwrap.fx_passes.attention.masks import find_mask_rewrites, may_mutate, rewrite_masks
from fxwrap.fx_passes.decompose import decompose, may_be_decomposed
from fxwrap.fx_passes.decompositions import decomposition_table
from fxwrap.fx_passes.effects import attribute_of, operator_label, submodules
from fxwrap.fx_passes.fake_propagation import fake_values
from fxwrap.fx_passes.layout_changes import replace_layout_changes
from fxwrap.fx_passes.model_source import location_of
from fxwrap.fx_passes.prepared_graph import FxPassContext, GraphSource
from fxwrap.fx_passes.small_sizes import least_sizes
from fxwrap.options import Options, Step, enabled_steps
from fxwrap.torch_compat import (
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    find_shape_env,
    isolate_pending_symbols,
    set_grad_enabled,
    storage_identity,
)
from fxwrap.wrapper_ir.operators import operator_schema

_TORCH = str(Path(torch.__file__).parent)

SYMBOLIC_BUILTINS: frozenset[Callable[..., object]] = frozenset(
    {
        operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
        operator.neg, operator.pos, operator.abs, operator.lshift, operator.rshift,
        operator.and_, operator.or_, operator.xor, operator.not_,
        operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
        torch.sym_float, torch.sym_int, torch.sym_ite, torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_sum,
        torch.sym_sqrt, round, max, min, abs, int, float, bool, pow, divmod,
    }
)  # fmt: skip
"""Python functions that a graph may call on symbolic numbers; their results are expressions, not lines."""

SOURCE_PASSES: tuple[Step[GraphModule, FxPassContext], ...] = (
    Step(
        "remove_inert_calls", "remove checks of inputs and switches of the gradient mode",
        lambda graph, _context: remove_inert_calls(graph),
    ),
    Step(
        "inline_subgraph_calls", "inline the graphs of operators that only call them (control_deps, invoke_quant)",
        lambda graph, _context: inline_subgraph_calls(graph),
    ),
    Step(
        "replace_layout_changes", "let operators that change the layout of a tensor in place return a view",
        lambda graph, _context: replace_layout_changes(graph),
    ),
    Step(
        "simplify_attention_masks", "remove all-true attention masks, detect causal ones, make others contiguous",
        lambda graph, context: _simplify_masks(graph, context.options), "fuse",
    ),
    Step(
        "pack_query_groups", "attend with one query row to key heads that several query heads share, without copies",
        lambda graph, context: _pack_query_groups(graph, context.options), "fuse",
    ),
    Step(
        "decompose", "decompose operators, those on lists of tensors and composite ones included",
        lambda graph, context: _decompose(graph, context), "decompositions",
    ),
)  # fmt: skip
"""The passes over a graph of ATen operators, before fake-tensor propagation; an exported program is functional."""

EXPORTED_GRAPH_PASSES: tuple[Step[GraphSource, ExportGraphSignature], ...] = (
    Step("remove_tokens", "remove effect tokens", lambda source, signature: _remove_tokens(source, signature)),
    Step(
        "write_back", "copy new values of buffers and inputs, which an exported graph returns, into these",
        lambda source, signature: _write_back(source, signature),
    ),
)  # fmt: skip
"""The passes over the graph of an exported program, after `SOURCE_PASSES`; they may edit it in place."""


def graph_source(
    graph: GraphModule | ExportedProgram,
    example_inputs: Sequence[object] | None,
    options: Options,
    name: str,
    fused_operators: Collection[str] = frozenset(),
) -> GraphSource:
    """Returns the imported graph, decomposed by the options' table. The graph itself is not changed.

    `fused_operators` are the names of the overloads with a lowering rule. Raises GraphError for a graph with
    unsupported nodes.
    """
    if isinstance(graph, ExportedProgram):
        return _exported_source(graph, options, name, fused_operators)
    check_graph(graph)
    context = FxPassContext(options, fused_operators, example_inputs)
    return GraphSource(_run_source_passes(graph, context), name, graph_id=id(graph.graph))


def _run_source_passes(graph: GraphModule, context: FxPassContext) -> GraphModule:
    for step in enabled_steps(SOURCE_PASSES, context.options):
        graph = step.run(graph, context)
    return graph


def _decompose(graph: GraphModule, context: FxPassContext) -> GraphModule:
    if not any(may_be_decomposed(node, context) for node in graph.graph.nodes):
        return graph
    return decompose(graph, fake_values(graph, context.example_inputs), context)


def _simplify_masks(graph: GraphModule, options: Options) -> GraphModule:
    if not find_mask_rewrites(graph.graph, options) or _may_mutate(graph):
        return graph
    copy = GraphModule(graph, deepcopy(graph.graph))
    rewrite_masks(find_mask_rewrites(copy.graph, options), options)
    return copy


def _pack_query_groups(graph: GraphModule, options: Options) -> GraphModule:
    if not find_query_groups(graph.graph, options) or _may_mutate(graph):
        return graph
    copy = GraphModule(graph, deepcopy(graph.graph))
    rewrite_query_groups(find_query_groups(copy.graph, options))
    return copy


def _may_mutate(graph: GraphModule) -> bool:
    """Whether a call may mutate a tensor: the metadata of a traced graph does not say what else shares its memory."""
    return any(may_mutate(node) for node in graph.graph.nodes if node.op == "call_function")


def _exported_source(
    exported: ExportedProgram, options: Options, name: str, fused_operators: Collection[str]
) -> GraphSource:
    """Returns an exported program as a graph that mutates its placeholders and has no effect tokens."""
    graph_id = id(exported.graph)
    placeholders = exported.graph.find_nodes(op="placeholder")
    shape_env = find_shape_env([node.meta.get("val") for node in placeholders])
    with warnings.catch_warnings(), isolate_pending_symbols(shape_env):
        warnings.simplefilter("ignore", FutureWarning)  # torch's own copy of its tree specification warns
        least = least_sizes(exported, decomposition_table(options))
        exported = exported.run_decompositions({})  # functional, with composite operators
        check_graph(exported.graph_module)
        graph = _run_source_passes(exported.graph_module, FxPassContext(options, fused_operators))
    constants: dict[str, torch.Tensor] = {}
    signature = exported.graph_signature
    for spec in signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            constants[spec.arg.name] = exported.state_dict.get(spec.target, exported.constants.get(spec.target))
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constants[spec.arg.name] = exported.constants[spec.target]
    source = GraphSource(graph, name, constants, True, graph_id, least)
    for step in enabled_steps(EXPORTED_GRAPH_PASSES, options):
        source = step.run(source, signature)
    return source


def remove_inert_calls(graph_module: GraphModule) -> GraphModule:
    """Returns a graph without calls that programs do not need; the graph itself without one.

    These are the call in `ExportedProgram.module()` that checks inputs, which a program does by the metadata of their
    placeholders, and switches of the gradient mode in graphs that were traced before dispatch: programs compute none.
    """
    if not any(map(_is_inert, graph_module.graph.nodes)):
        return graph_module
    copy = GraphModule(graph_module, deepcopy(graph_module.graph))
    for node in filter(_is_inert, reversed(copy.graph.nodes)):
        copy.graph.erase_node(node)
    return copy


def _is_inert(node: Node) -> bool:
    is_call = node.op == "call_function" and node.target is set_grad_enabled and not node.users
    return is_call or (node.op == "call_module" and node.target == _INPUT_GUARDS)


_INPUT_GUARDS = "_guards_fn"


# --- checks -----------------------------------------------------------------------------------------------------------


def check_graph(graph_module: GraphModule) -> None:
    """Raises GraphError for the first unsupported node of a graph, nested graphs included."""
    output: Node | None = None
    before = set[Node]()
    for node in graph_module.graph.nodes:
        later = next((operand for operand in node.all_input_nodes if operand not in before), None)
        before.add(node)
        if _is_inert(node):
            continue
        if later is not None:
            raise _error(
                node,
                f"it reads node '{later.name}', which does not come before it",
                "Order the nodes so that each reads earlier ones, as Graph.lint() checks",
            )
        if output is not None:
            raise _error(node, f"it comes after the output node '{output.name}'", "End the graph with its output")
        if node.op == "output":
            output = node
        elif node.op in ("call_module", "call_method"):
            reason = f"{node.op} of '{node.target}' is not an ATen operator"
            raise _error(node, reason, "Trace the module with torch.export or make_fx first")
        elif node.op == "call_function":
            _check_call(node)
            for nested in submodules(node):
                check_graph(nested)
    if output is None:
        raise GraphError("", "the graph has no output node", "End it with graph.output(...)")


def _check_call(node: Node) -> None:
    target = node.target
    # Lowering rejects higher-order operators that it does not support, and functions of numbers that return tensors.
    if isinstance(target, OpOverload | HigherOrderOperator) or target is operator.getitem or is_hint(node):
        return
    if target in SYMBOLIC_BUILTINS or getattr(target, "__module__", "") == "math":
        return
    reason = f"'{getattr(target, '__name__', target)}' is not an operator overload with a schema"
    remedy = "Call an overload such as torch.ops.aten.add.Tensor, or trace the graph with make_fx(pre_dispatch=False)"
    raise _error(node, reason, remedy)


def _error(node: Node, reason: str, remedy: str) -> GraphError:
    return GraphError(node.name, reason, remedy, location_of(node))


_aten = torch.ops.aten


def _remove_tokens(source: GraphSource, signature: ExportGraphSignature) -> GraphSource:
    """Removes effect tokens from a graph's placeholders and outputs, in place."""
    tokens = {spec.arg.name for spec in signature.input_specs if spec.kind is InputKind.TOKEN}
    graph, output = source.graph_module.graph, source.output
    for node in graph.find_nodes(op="placeholder"):
        if node.name in tokens:
            for user in list(node.users):
                user.args = tuple([None if item is node else item for item in user.args])
            graph.erase_node(node)
    items: Any = output.args[0]
    specs = signature.output_specs
    output.args = (tuple([item for item, spec in zip(items, specs, strict=True) if spec.kind is not OutputKind.TOKEN]),)
    source.graph_module.recompile()
    return source


def _mutated_placeholders(signature: ExportGraphSignature) -> dict[int, str]:
    """Returns the name of the mutated placeholder, by the position among the non-token outputs of its new value."""
    placeholder_of = {spec.target: spec.arg.name for spec in signature.input_specs if spec.target is not None}
    mutations: dict[int, str] = {}
    outputs = [spec for spec in signature.output_specs if spec.kind is not OutputKind.TOKEN]
    for position, spec in enumerate(outputs):
        if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION):
            mutations[position] = placeholder_of[str(spec.target)]
        elif spec.kind is OutputKind.USER_INPUT_MUTATION:
            mutations[position] = str(spec.target)
    return mutations


def _write_back(source: GraphSource, signature: ExportGraphSignature) -> GraphSource:
    """Replaces outputs that are new values of placeholders by copies into those placeholders, in place.

    The mutations are simultaneous: a value that aliases a storage that an earlier copy writes is cloned before all
    copies. A remaining output that is also a mutation's value is the placeholder, as in `ExportedProgram.module()`.
    """
    mutations, output = _mutated_placeholders(signature), source.output
    if not mutations:
        return source
    placeholders = {node.name: node for node in source.graph_module.graph.find_nodes(op="placeholder")}
    storage_of = {node: _storage_key(node, source.constants) for node in placeholders.values()}
    items: Any = output.args[0]
    written: set[Hashable] = set()
    copies: list[tuple[Node, Node]] = []
    for position, name in mutations.items():
        target, value = placeholders[name], items[position]
        if value is target:
            continue
        aliased = storage_of.get(_view_root(value))
        if aliased is not None and (aliased in written or aliased == storage_of[target]):
            value = _clone(output, value)
        copies.append((target, value))
        written.add(storage_of[target])
    mutated: dict[object, Node] = {}
    for target, value in copies:
        mutated.setdefault(value, _insert(output, _aten.copy_.default, (target, value), target.meta.get("val")))
    returned = [item for position, item in enumerate(items) if position not in mutations]
    output.args = (tuple([mutated.get(item, item) for item in returned]),)
    source.graph_module.recompile()
    return source


def _storage_key(placeholder: Node, constants: Mapping[str, torch.Tensor]) -> Hashable:
    """Returns a key that is equal for placeholders known to share a storage."""
    payload = constants.get(placeholder.name)
    return placeholder if payload is None else storage_identity(payload)


def _view_root(node: Node) -> Node:
    """Returns the node that a node is a view of, through any number of view operators."""
    while isinstance(node.target, OpOverload):
        position = operator_schema(node.target).aliased_argument
        base = node.args[position] if position is not None and position < len(node.args) else None
        if not isinstance(base, Node):
            break
        node = base
    return node


def _insert(output: Node, target: OpOverload, arguments: tuple[Node, ...], fake: object, **keywords: Any) -> Node:
    """Inserts a call before the output node, with the metadata of its last operand."""
    with output.graph.inserting_before(output):
        call = output.graph.call_function(target, arguments, keywords)
    call.meta = {**arguments[-1].meta, "val": fake}
    return call


def _clone(output: Node, value: Node) -> Node:
    fake: FakeTensor = value.meta["val"]
    with fake.fake_mode:
        copy = fake.new_empty(fake.shape)
    return _insert(output, _aten.clone.default, (value,), copy, memory_format=torch.contiguous_format)


_INLINED: Mapping[str, Callable[..., tuple[Node, Sequence[object]]]] = {
    "control_deps": lambda _after, graph, *operands: (graph, operands),  # AOTAutograd wraps stream operators in it
    "foreach_map": lambda graph, *operands: (graph, operands),
    "hints_wrapper": lambda graph, operands, *_hints: (graph, operands),
    "invoke_quant": lambda graph, *operands: (graph, operands),
    "invoke_quant_packed": lambda graph, *operands: (graph, operands),
    "run_const_graph": lambda graph, operands: (graph, operands),
    "strict_mode": lambda graph, operands: (graph, operands),
    "tag_activation_checkpoint": lambda graph, *operands: (graph, operands),
    "wrap": lambda graph, *operands: (graph, operands),
    "wrap_with_set_grad_enabled": lambda _enabled, graph, *operands: (graph, operands),
}
"""For each operator, a function of its arguments that returns the graph and its operands."""


def inline_subgraph_calls(graph_module: GraphModule) -> GraphModule:
    """Returns a graph with the calls inside these operators in their place; the graph itself if it has none.

    Keyword arguments of the operators are hints for other compilers, and are dropped.
    """
    while any(_is_subgraph_call(node) for node in graph_module.graph.nodes):
        graph_module = _inline(graph_module)
    return graph_module


def is_hint(node: Node) -> bool:
    """Whether a node is only a keyword argument of such operators."""
    return bool(node.users) and all(_is_subgraph_call(user) and node in user.kwargs.values() for user in node.users)


def _inline(graph_module: GraphModule) -> GraphModule:
    graph = Graph()
    node_map: dict[Node, Any] = {}
    for node in graph_module.graph.nodes:
        if _is_subgraph_call(node):
            inner, operands = _call_of(node)
            node_map[node] = _copy_calls(graph, inner, map_arg(operands, node_map.__getitem__))
        elif node.target is operator.getitem and _is_subgraph_call(node.args[0]):
            node_map[node] = node_map[node.args[0]][node.args[1]]
        elif not is_hint(node) and not _is_inlined_graph(node):
            node_map[node] = graph.node_copy(node, lambda operand: node_map[operand])
    return GraphModule(graph_module, graph)


def _call_of(node: Node) -> tuple[Node, Sequence[object]]:
    """Returns the graph that a node calls, and its operands."""
    return _INLINED[operator_label(node.target)](*node.args)  # type: ignore[arg-type]


def _is_subgraph_call(node: object) -> bool:
    target = node.target if isinstance(node, Node) else None
    return isinstance(target, HigherOrderOperator) and operator_label(target) in _INLINED


def _is_inlined_graph(node: Node) -> bool:
    is_used = node.op == "get_attr" and bool(node.users)
    return is_used and all(_is_subgraph_call(user) and _call_of(user)[0] is node for user in node.users)


def _copy_calls(graph: Graph, attribute: Node, operands: Sequence[Any]) -> Any:
    """Copies the calls of the graph that an attribute holds into another, and returns its results."""
    inner: GraphModule = attribute_of(attribute)
    node_map: dict[Node, Any] = dict(zip(inner.graph.find_nodes(op="placeholder"), operands, strict=True))
    for node in inner.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copy = node_map[node] = graph.node_copy(node, node_map.__getitem__)
            if node.op == "get_attr":
                copy.target = f"{attribute.target}.{node.target}"
    return map_arg(inner.graph.output_node().args[0], node_map.__getitem__)
