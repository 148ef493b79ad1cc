"""Import of functional nodes: calls that return a changed copy of an operand become a copy and a write of it.

Whether the copy is necessary is decided for all of them together, by `coalesce_copies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from fxwrap import torch_compat
from fxwrap import wrapper_ir as ir
from fxwrap.converters.from_fx.calls import CallOperands, import_operator_call, infer_results
from fxwrap.converters.from_fx.graph_importer import GraphImporter, NodeImporters
from fxwrap.converters.from_fx.nodes import failure
from fxwrap.converters.fx.copied_operands import COPY
from fxwrap.inference import InferredResult
from fxwrap.lines import Alloc, ExternCall, Launch, Mutate, View, Yield
from fxwrap.torch_compat import OpOverload, auto_functionalized
from fxwrap.wrapper_ir import TensorType, Value

_ATEN = torch.ops.aten


def copy_operand(importer: GraphImporter, node: Node, value: Value) -> Value:
    """Returns new memory with a tensor's content, if that is initialized, and its strides.

    A copy of a tensor that has elements of memory several times has each of them for itself, as in eager mode.
    """
    root, type_ = importer.root_of[value.name], replace(value.tensor_type, storage_offset=0)
    repeats = any(stride == 0 and size != 1 for size, stride in zip(type_.sizes, type_.strides, strict=True))
    if repeats:
        (cloned,) = importer.state.inference.results(_ATEN.clone.default, (value,), ())
        assert isinstance(cloned, InferredResult) and isinstance(cloned.type, TensorType)
        type_ = cloned.type
    is_empty = root in importer.uninitialized
    if is_empty and root == value.name and _is_used_once(importer, value):
        importer.functional_results.add(value.name)
        return value  # a template of the result
    copy = importer.value(f"{node.name}_{value.name}", type_)
    if is_empty:
        importer.functional_results.add(copy.name)
        importer.emit_definition(Alloc(copy), node)
        return copy
    importer.copies.add(copy.name)
    importer.copied_from[copy.name] = value
    if repeats or type_.storage_bytes == type_.element_count * type_.dtype.itemsize:
        importer.emit_definition(ExternCall((copy,), "aten.clone.default", (value,)), node)
    else:  # a clone has no gaps
        importer.emit_definition(Alloc(copy), node)
        importer.emit(Mutate((), "aten.copy_.default", (copy, value), (copy,)), node)
    return copy


def _is_used_once(importer: GraphImporter, value: Value) -> bool:
    """Whether only one node uses memory that a node allocates."""
    node = importer.state.node_of[id(importer.lines[importer.uninitialized[value.name]])]
    return len(node.users) == 1


def new_result(importer: GraphImporter, node: Node, name: str, type_: TensorType, index: int) -> Value:
    """Allocates a result of a launch, in the memory space and layout of the original line if its type agrees."""
    line = importer.original_line(node, Launch)
    known = line.outs[index].type if line is not None and index < len(line.outs) else None
    if isinstance(known, TensorType):
        agreeing = replace(type_, memory_space=known.memory_space, layout=known.layout)
        type_ = agreeing if agreeing == replace(known, storage_offset=0) else type_
    value = importer.value(name, type_)
    importer.emit_definition(Alloc(value), node)
    importer.functional_results.add(value.name)
    return value


# --- functions --------------------------------------------------------------------------------------------------------


def write_arguments(
    inner: GraphImporter, output: Node, arguments: Sequence[Value], results: tuple[Any, ...]
) -> dict[int, Value]:
    """Makes a function write arguments where it would return changed copies of them; adds the lines that do.

    Returns the arguments by the positions of the results that they replace. Those are the arguments in whose memory a
    result, which began as their copy, can be computed.
    """
    argument_of: dict[int, Value] = {}
    for position in reversed(range(len(results))):
        source = _copied_argument(inner, arguments, results[position])
        if source is not None and source not in argument_of.values():
            argument_of[position] = source
    while argument_of:
        origins = {position: ir.Origin(()) for position in argument_of}
        rest = tuple([item for position, item in enumerate(results) if position not in argument_of])
        writes = [
            Mutate((), "aten.copy_.default", (value, results[position]), (value,), origin=origins[position])
            for position, value in argument_of.items()
        ]
        remaining = [line.origin for line in inner.coalesced_lines(arguments, added=(*writes, Yield(rest)))]
        superfluous = [position for position, origin in origins.items() if not any(o is origin for o in remaining)]
        if len(superfluous) == len(argument_of):
            for line in writes:
                inner.emit(line.replace(origin=None), output)
            return argument_of
        argument_of = {position: argument_of[position] for position in superfluous}
    return {}


def _copied_argument(inner: GraphImporter, arguments: Sequence[Value], result: object) -> Value | None:
    """Returns the argument that a result is a changed copy of."""
    source = result
    while isinstance(source, Value) and source not in arguments:
        source = inner.copied_from.get(source.name)
    return source if isinstance(source, Value) and isinstance(result, Value) and source.type == result.type else None


# --- operators --------------------------------------------------------------------------------------------------------


def import_as_write(importer: GraphImporter, node: Node) -> bool:
    """Imports the functional overload of an in-place operator as the line it was emitted for; returns whether it is.

    A copy of an operand that only a line in its submodule writes is one that coalescing may remove.
    """
    if COPY in node.meta and node.target is _ATEN.copy_.default:
        copy, source = (importer.tensor(node, item) for item in node.args)
        importer.copies.add(copy.name)
        importer.copied_from[copy.name] = source
        importer.emit(Mutate((), "aten.copy_.default", (copy, source), (copy,)), node)
        importer.env[node] = copy
        return True
    line = importer.original_line(node, Mutate)
    target: Any = node.target
    if line is None or not isinstance(target, OpOverload) or not node.args:
        return False
    if torch_compat.functional_of_in_place(line.target) is target:
        _write(importer, node, torch_compat.operator_overload(line.target))
        return True
    if torch_compat.functional_of_mutating(line.target) is target:
        operator = torch_compat.operator_overload(line.target)
        names = ir.operator_schema(operator).argument_names
        _write_several(importer, node, operator, {**dict(zip(names, node.args, strict=False)), **node.kwargs})
        return True
    return False


def _write(importer: GraphImporter, node: Node, operator: OpOverload) -> None:
    """Adds the call of an in-place operator on a copy of its first operand, which is the node's value."""
    copy = copy_operand(importer, node, importer.tensor(node, node.args[0]))
    schema = ir.operator_schema(operator)
    arguments = (copy, *[importer.argument(node, item) for item in node.args[1:]])
    keywords = tuple([(name, importer.argument(node, item)) for name, item in node.kwargs.items()])
    effects = schema.effects([copy.tensor_type.device])
    importer.emit(Mutate((), schema.name, arguments, (copy,), keywords, (), effects), node)
    importer.env[node] = copy


def _write_several(
    importer: GraphImporter, node: Node, operator: OpOverload, items: dict[str, object], at_least: int = 0
) -> None:
    """Adds the call of an operator on copies of the operands that it writes; the node's value ends with them.

    The node has at least `at_least` results before the copies.
    """
    schema = ir.operator_schema(operator)
    inputs = {name: importer.argument(node, item) for name, item in items.items()}
    for name in schema.mutated_arguments:
        inputs[name] = _copies(importer, node, inputs.get(name))
    arguments, keywords = _by_schema(operator, inputs)
    operands = CallOperands(schema, arguments, keywords, ())
    writes = schema.mutated_operands(arguments, keywords)
    trees = infer_results(importer, node, operator, operands)
    results = tuple([_define(importer, f"{node.name}_{index}", tree) for index, tree in enumerate(trees)])
    effects = schema.effects(operands.devices(results))
    importer.emit_definition(Mutate(results, schema.name, arguments, writes, keywords, (), effects), node)
    first = results + (None,) * (at_least - len(results))
    importer.env[node] = (*first, *[inputs[name] for name in schema.mutated_arguments])


def _copies(importer: GraphImporter, node: Node, item: Any) -> Any:
    if isinstance(item, tuple):
        return tuple([_copies(importer, node, part) for part in item])
    return copy_operand(importer, node, item) if isinstance(item, Value) else item


def _define(importer: GraphImporter, name: str, tree: Any) -> Any:
    if isinstance(tree, tuple):
        return tuple([_define(importer, f"{name}_{index}", part) for index, part in enumerate(tree)])
    return None if tree is None else importer.value(name, tree.type)


def _by_schema(operator: OpOverload, inputs: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """Returns arguments by name as positional ones and keywords."""
    arguments: list[Any] = []
    keywords: list[tuple[str, Any]] = []
    is_positional = True
    for argument in torch_compat.torch_schema(operator).arguments:
        is_positional = is_positional and not argument.kwarg_only and argument.name in inputs
        if is_positional:
            arguments.append(inputs[argument.name])
        elif argument.name in inputs:
            keywords.append((argument.name, inputs[argument.name]))
    return tuple(arguments), tuple(keywords)


def _auto_functionalized(importer: GraphImporter, node: Node) -> None:
    operator = node.args[0] if node.args else None
    if not isinstance(operator, OpOverload):
        raise failure(node, "its first argument is no operator", "Pass the overload that it calls on copies")
    _write_several(importer, node, operator, dict(node.kwargs), at_least=1)


def absorb_out_calls(importer: GraphImporter) -> None:
    """Finds calls whose only use is the copy that gives their result the layout of an out variant's."""
    for node in importer.module.graph.find_nodes(op="call_function", target=_ATEN.copy.default):
        if _out_call(importer, node) is not None:
            importer.absorbed.add(node.args[1])


def _out_call(importer: GraphImporter, node: Node) -> ExternCall | None:
    """Returns the out variant for which a copy and the call of its source were emitted, if they still fit it."""
    line = importer.original_line(node, ExternCall)
    if line is None or len(line.outs) != 1 or len(node.args) != 2 or node.kwargs:
        return None
    source = node.args[1]
    if not isinstance(source, Node) or len(source.users) > 1 or source.op != "call_function":
        return None
    between = source.next
    while between is not node and (between.target is _ATEN.empty_strided.default or _is_arithmetic(between)):
        between = between.next
    is_called = source.target is torch_compat.functional_of_out_variant(line.target)
    return line if between is node and is_called else None


def _is_arithmetic(node: Node) -> bool:
    """Whether a node computes a number, such as a stride of the memory that the result is copied into."""
    is_operator = isinstance(node.target, OpOverload | torch_compat.HigherOrderOperator)
    return node.op == "call_function" and not is_operator


def _import_out_call(importer: GraphImporter, node: Node, line: ExternCall) -> None:
    """Imports a copy and the call of its source as an out variant."""
    out, call = copy_operand(importer, node, importer.tensor(node, node.args[0])), node.args[1]
    assert isinstance(call, Node)
    arguments = tuple([importer.argument(call, item) for item in call.args])
    keywords = tuple([(name, importer.argument(call, item)) for name, item in call.kwargs.items()])
    importer.emit(ExternCall((), line.target, arguments, keywords, (out,), effect_set=line.effect_set), call)
    importer.env[node] = out


def _functional_overload(importer: GraphImporter, node: Node) -> None:
    """Imports an operator that writes a copy of its first operand."""
    line = importer.original_line(node, ExternCall)
    if node.args and len(node.args) > 1 and node.args[1] in importer.absorbed and line is not None:
        _import_out_call(importer, node, line)
    elif line is not None or not node.args:
        import_operator_call(importer, node)
    else:
        _write(importer, node, _IN_PLACE[node.target])


# --- views ------------------------------------------------------------------------------------------------------------


def _view_scatter(importer: GraphImporter, node: Node) -> None:
    """Imports an operator that overwrites a view of a copy of its first operand."""
    view_operator = _SCATTERED_VIEWS[node.target]
    numbers = [importer.argument(node, item) for item in node.args[2:]]
    is_plain = len(node.args) > 1 and not node.kwargs and _checks_nothing(node.target, numbers)
    if importer.original_line(node, ExternCall) is not None or not is_plain:
        import_operator_call(importer, node)
        return
    copy = copy_operand(importer, node, importer.tensor(node, node.args[0]))
    (inferred,) = importer.state.inference.results(view_operator, (copy, *numbers), ())
    assert isinstance(inferred, InferredResult) and isinstance(inferred.type, TensorType)
    import_view_scatter(importer, node, copy, inferred.type)


def import_view_scatter(importer: GraphImporter, node: Node, copy: Value, type_: TensorType) -> None:
    """Imports a node that overwrites a view of a copy of its first operand with the second; `type_` is the view's."""
    source = importer.tensor(node, node.args[1])
    view = importer.value(f"{node.name}_part", type_)
    importer.emit_definition(View(view, copy), node)
    importer.emit(Mutate((), "aten.copy_.default", (view, source), (view,)), node)
    importer.env[node] = copy


def _checks_nothing(target: object, numbers: Sequence[object]) -> bool:
    """Whether the position of a view is not checked at run time."""
    return target is not _ATEN.select_scatter.default or isinstance(numbers[-1], int)


_SCATTERED_VIEWS: dict[Any, OpOverload] = {
    _ATEN.slice_scatter.default: _ATEN.slice.Tensor,
    _ATEN.select_scatter.default: _ATEN.select.int,
    _ATEN.diagonal_scatter.default: _ATEN.diagonal.default,
}

_IN_PLACE: dict[Any, OpOverload] = {_ATEN.copy.default: _ATEN.copy_.default}

FUNCTIONAL: NodeImporters = {
    auto_functionalized: _auto_functionalized,
    **dict.fromkeys(_SCATTERED_VIEWS, _view_scatter),
    **dict.fromkeys(_IN_PLACE, _functional_overload),
}
