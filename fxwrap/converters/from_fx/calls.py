"""Import of operators' calls as `extern.call` and `extern.mutate`, by the operator's schema."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap import inference
from fxwrap import wrapper_ir as ir
from fxwrap.converters.from_fx.graph_importer import GraphImporter, ListElement, OperandMatcher
from fxwrap.converters.from_fx.nodes import failure, result_name
from fxwrap.converters.from_fx.numbers import import_list_element, set_result
from fxwrap.errors import RewriteError
from fxwrap.lines import ExternCall, Mutate, StartCollective
from fxwrap.torch_compat import (
    FakeTensor,
    OpOverload,
    in_place_of_functional,
    is_composite,
    storage_identity,
    torch_schema,
)
from fxwrap.wrapper_ir.operators import is_collective, used_result_indices


@dataclass(frozen=True, eq=False)
class CallOperands:
    """The operands of a node that calls an operator; `keywords` are without `outs`, the out arguments."""

    schema: ir.OperatorSchema
    arguments: tuple[Any, ...]
    keywords: inference.Keywords
    outs: tuple[ir.Value, ...]

    def values(self) -> list[ir.Value]:
        """Returns the values among the operands."""
        return [leaf for leaf in ir.leaves((self.arguments, self.keywords, self.outs)) if isinstance(leaf, ir.Value)]

    def devices(self, results: Iterable[object] = ()) -> list[torch.device]:
        """Returns the devices of operands and results."""
        values = [*self.values(), *[leaf for leaf in ir.leaves(results) if isinstance(leaf, ir.Value)]]
        return [value.type.device for value in values if isinstance(value.type, ir.TensorType)]


def import_operator_call(importer: GraphImporter, node: Node) -> None:
    """Imports a call of an operator: as the line that it was emitted for if that still fits, else by its schema."""
    operator: Any = node.target
    operands = _operands(importer, node, operator)
    if _reuse_original_line(importer, node, operands):
        return
    replacement = operands.schema.replacement
    if replacement is not None:
        operator, arguments, keywords = replacement(operator, operands.arguments, operands.keywords)
        operands = CallOperands(ir.operator_schema(operator), arguments, keywords, ())
    _check_mutated_operands(node, operands)
    schema = operands.schema
    if is_collective(operator):
        _import_collective(importer, node, operator, operands)
    elif schema.is_out_variant:
        effects = schema.effects(operands.devices())
        line = ExternCall((), schema.name, operands.arguments, operands.keywords, operands.outs, effect_set=effects)
        importer.emit_definition(line, node)
        importer.env[node] = _unwrap_single(operands.outs)
    else:
        _import_by_schema(importer, node, operator, operands)


def _operands(importer: GraphImporter, node: Node, operator: OpOverload) -> CallOperands:
    schema = ir.operator_schema(operator)
    arguments = tuple([importer.argument(node, item) for item in node.args])
    keywords = {name: importer.argument(node, item) for name, item in node.kwargs.items()}
    outs: tuple[ir.Value, ...] = ()
    if schema.is_out_variant:
        items = [keywords.pop(name, None) for name in schema.mutated_arguments]
        outs = tuple([item for item in items if isinstance(item, ir.Value)])
    return CallOperands(schema, arguments, tuple(keywords.items()), outs)


def _unwrap_single(items: tuple[Any, ...]) -> Any:
    return None if not items else items[0] if len(items) == 1 else items


def _check_mutated_operands(node: Node, operands: CallOperands) -> None:
    schema = operands.schema
    for name, item in (*operands.keywords, *zip(schema.argument_names, operands.arguments, strict=False)):
        if name in schema.mutated_arguments and item is not None and item != ():
            if not any(isinstance(leaf, ir.Value) for leaf in ir.leaves(item)):
                raise failure(node, f"'{name}', which the operator mutates, is no tensor", "Pass a tensor")


# --- by the original line ---------------------------------------------------------------------------------------------


def _reuse_original_line(importer: GraphImporter, node: Node, operands: CallOperands) -> bool:
    """Imports a node as the line it was emitted for, if operator, operands and used results still fit."""
    line = importer.original_line(node, ExternCall, Mutate, StartCollective)
    if not isinstance(line, ExternCall | Mutate | StartCollective):
        return False
    match = OperandMatcher()
    is_collective = isinstance(line, StartCollective)
    target = line.operator if isinstance(line, StartCollective) else line.target
    keywords = () if isinstance(line, StartCollective) else line.keywords
    outs = () if isinstance(line, Mutate) else line.outs
    before, now = (line.arguments, keywords, outs), (operands.arguments, operands.keywords, operands.outs)
    if target != operands.schema.name or not match(before, now) or not _defines_used_results(node, line.results):
        return False
    if not all(
        has_resolvable_symbols(importer, item.type) for item in ir.leaves(line.results) if isinstance(item, ir.Value)
    ):
        return False
    results = new_results(importer, node, line.results)
    changes: dict[str, object] = {"aliases": match.values(line.aliases), "arguments": operands.arguments}
    if not is_collective:
        changes["keywords"] = operands.keywords
    if not isinstance(line, Mutate):
        changes["outs"] = operands.outs
    if not isinstance(line, ExternCall):
        changes["writes"] = match.values(line.writes)
    importer.emit_definition(line.replace(results=results, origin=None, **changes), node)
    _set_node_value(importer, node, operands, results)
    return True


def _defines_used_results(node: Node, results: tuple[Any, ...]) -> bool:
    if not node.users or not results:
        return True
    tree = results[0] if len(results) == 1 and results[0] is not None else results
    if isinstance(tree, ir.Value):
        return True
    used = used_result_indices(node)
    if used is None:
        return all(item is not None for item in ir.leaves(tree))
    return all(type(index) is int and index < len(tree) and tree[index] is not None for index in used)


def has_resolvable_symbols(importer: GraphImporter, type_: ir.Type) -> bool:
    """Whether every symbol of a type is defined, or can be by a node or by the type itself."""
    for symbol in ir.type_symbols(type_):
        if symbol.name in importer.defined_symbols or symbol.name in importer.defining_nodes:
            continue
        if not isinstance(type_, ir.TensorType) or symbol not in (*type_.sizes, *type_.strides):
            return False
    return True


def new_results(importer: GraphImporter, node: Node, results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns new values of the same types as results, named after their nodes."""

    def copy(item: Any, path: Sequence[int]) -> Any:
        if isinstance(item, tuple):
            return tuple([copy(part, (*path, index)) for index, part in enumerate(item)])
        return None if item is None else importer.value(result_name(node, path), item.type)

    if len(results) == 1 and results[0] is not None:
        return (copy(results[0], ()),)
    return tuple([copy(item, (index,)) for index, item in enumerate(results)])


def _set_node_value(importer: GraphImporter, node: Node, operands: CallOperands, results: tuple[Any, ...]) -> None:
    """Records the value of a node: its results, or the operands that it returns."""
    if not results:
        returned = operands.schema.returned_operands(operands.arguments, operands.keywords) or ()
        importer.env[node] = _unwrap_single(operands.outs or returned)
    elif len(results) == 1 and isinstance(results[0], ir.Value):
        set_result(importer, node, results[0])
    else:
        importer.env[node] = results[0] if len(results) == 1 and results[0] is not None else results


# --- by the schema ----------------------------------------------------------------------------------------------------


def _import_by_schema(importer: GraphImporter, node: Node, operator: OpOverload, operands: CallOperands) -> None:
    schema, arguments, keywords = operands.schema, operands.arguments, operands.keywords
    returned = schema.returned_operands(arguments, keywords) if schema.mutated_arguments else None
    results: tuple[Any, ...] = ()
    aliases: tuple[ir.Value | None, ...] = ()
    if returned is None:
        results, aliases = _results(importer, node, operator, operands)
    effects = schema.effects(operands.devices(results))
    if schema.mutated_arguments:
        writes = schema.mutated_operands(arguments, keywords)
        line: ExternCall | Mutate = Mutate(results, schema.name, arguments, writes, keywords, aliases, effects)
    else:
        line = ExternCall(results, schema.name, arguments, keywords, (), aliases, effects)
    items: tuple[ir.LineBase, ...] = (line,)
    if isinstance(line, ExternCall) and _may_be_in_place(line):
        importer.updates[results[0].name] = arguments[0]
    elif isinstance(line, ExternCall) and node.users:
        items = inference.with_declared_layout(line)
    for item in items:
        importer.emit_definition(item, node)
    if returned is not None:
        importer.env[node] = _unwrap_single(returned)
        return
    for value in ir.leaves(results):
        if isinstance(value, ir.Value) and isinstance(value.type, ir.ScalarType):
            importer.bound_symbols[value.name] = importer.bind_fresh(node, value, (), value.type)
    items = tuple([_substitute_bound_symbols(importer, item) for item in results])
    importer.env[node] = _unwrap_single(items) if schema.return_count == 1 else items
    if not isinstance(importer.env[node], ir.Value | tuple | type(None)):
        importer.recomputed[node] = importer.env[node]


def _may_be_in_place(line: ExternCall) -> bool:
    """Whether a call may have been an in-place one: its result has the sizes and dtype of its first operand."""
    match line:
        case ExternCall(results=(ir.Value(type=ir.TensorType() as type_),), arguments=(ir.Value() as operand, *_)):
            old = operand.tensor_type
            is_similar = (old.dtype, old.sizes, old.device) == (type_.dtype, type_.sizes, type_.device)
            return is_similar and not line.effect_set and in_place_of_functional(line.target) is not None
        case _:
            return False


def _substitute_bound_symbols(importer: GraphImporter, item: Any) -> Any:
    if isinstance(item, tuple):
        return tuple([_substitute_bound_symbols(importer, part) for part in item])
    return importer.bound_symbols.get(item.name, item) if isinstance(item, ir.Value) else item


def _results(
    importer: GraphImporter, node: Node, operator: OpOverload, operands: CallOperands
) -> tuple[tuple[Any, ...], tuple[ir.Value | None, ...]]:
    """Returns the values that an operator defines, one tree for each return of its schema, and their aliases."""
    trees = infer_results(importer, node, operator, operands)
    is_single = operands.schema.return_count == 1
    values = operands.values()
    tree = trees[0] if is_single else trees
    used = used_result_indices(node) if isinstance(tree, tuple) and node.users else None
    aliases: list[ir.Value | None] = []

    def define(item: inference.InferredTree, path: tuple[int, ...]) -> Any:
        if isinstance(item, tuple):
            return tuple([define(part, (*path, index)) for index, part in enumerate(item)])
        if item is None or (used is not None and path and path[0] not in used):
            aliases.append(None)
            return None
        aliases.append(None if item.base is None else values[item.base])
        return importer.value(result_name(node, path), item.type)

    results = (define(trees[0], ()),) if is_single else define(trees, ())
    return results, tuple(aliases) if any(alias is not None for alias in aliases) else ()


def infer_view_type(importer: GraphImporter, node: Node) -> ir.TensorType:
    """Returns the type of the result of a view operator."""
    operator: Any = node.target
    (result,) = infer_results(importer, node, operator, _operands(importer, node, operator))
    assert isinstance(result, inference.InferredResult) and isinstance(result.type, ir.TensorType)
    return result.type


def infer_results(
    importer: GraphImporter, node: Node, operator: OpOverload, operands: CallOperands
) -> tuple[inference.InferredTree, ...]:
    """Returns the results of a call: by the operator's fake implementation, else by the node's metadata."""
    calls = importer.state.inference
    try:
        return calls.results(operator, operands.arguments, operands.keywords)
    except RewriteError as error:
        val = node.meta.get("val")
        count = operands.schema.return_count
        is_inconclusive = isinstance(error, inference.UnknownResultError) or calls.has_symbols
        if not is_inconclusive or (val is None and count):
            name = torch_schema(operator).name
            remedy = f"Correct the call, or register a fake implementation with torch.library.register_fake({name!r})"
            raise failure(node, error.reason, remedy) from error
        may_alias = operands.schema.aliased_argument is not None or is_composite(operator)
        vals = _operand_vals(importer, node) if may_alias else []
        items: Iterable[object] = () if not count else (val,) if count == 1 else val  # type: ignore[assignment]
        return tuple([_result_from_metadata(importer, item, vals) for item in items])


def _operand_vals(importer: GraphImporter, node: Node) -> list[tuple[ir.Value, object]]:
    """Returns the values among a node's operands, each with its node's metadata, in order."""
    operands: list[tuple[ir.Value, object]] = []
    for operand in ir.leaves(inference.lists_to_tuples((node.args, tuple(node.kwargs.values())))):
        if isinstance(operand, Node):
            values, vals = importer.env[operand], operand.meta.get("val")
            is_single = isinstance(values, ir.Value)
            pairs = (
                [(values, vals)] if is_single else zip(ir.leaves(values), ir.leaves(inference.lists_to_tuples(vals)))
            )
            operands.extend([(value, val) for value, val in pairs if isinstance(value, ir.Value)])
    return operands


def _result_from_metadata(
    importer: GraphImporter, val: object, operands: list[tuple[ir.Value, object]]
) -> inference.InferredTree:
    """Returns a result as the metadata describes it; `operands` are those that it may alias."""
    if val is None:
        return None
    if isinstance(val, tuple | list):
        return tuple([_result_from_metadata(importer, item, operands) for item in val])
    if not isinstance(val, FakeTensor):
        return inference.InferredResult(ir.ScalarType(inference.scalar_kind(val) or "int"))
    symbols = importer.state.symbols
    type_ = symbols.type_of(val)
    for index, (value, base) in enumerate(operands):
        if isinstance(base, torch.Tensor) and storage_identity(base) == storage_identity(val):
            distance: Any = symbols.import_number(val.storage_offset() - base.storage_offset())
            return inference.InferredResult(inference.view_type(type_, value.tensor_type, distance), index)
    return inference.InferredResult(type_)


# --- collectives ------------------------------------------------------------------------------------------------------


def _import_collective(importer: GraphImporter, node: Node, operator: OpOverload, operands: CallOperands) -> None:
    schema = operands.schema
    results, aliases = _results(importer, node, operator, operands)
    named = dict(zip(schema.argument_names, operands.arguments, strict=False)) | dict(operands.keywords)
    arguments = (*operands.arguments, *[item for _, item in operands.keywords])
    writes = schema.mutated_operands(operands.arguments, operands.keywords)
    argument = named.get("group_name", "")
    group = argument.name if isinstance(argument, ir.Value) else str(argument)
    line = StartCollective(results, schema.name, arguments, group, 0, writes, operands.outs, aliases)
    importer.emit_definition(line, node)
    importer.env[node] = _unwrap_single(results) if schema.return_count == 1 else results


# --- items of results -------------------------------------------------------------------------------------------------


def import_getitem(importer: GraphImporter, node: Node) -> bool:
    """Imports an item of a node's result; returns whether the result has items."""
    source: Any = node.args[0]
    if not isinstance(source, Node):
        return False
    result, index = importer.env.get(source), node.args[1]
    if isinstance(result, ListElement) and isinstance(result.type, ir.ListType):
        import_list_element(importer, node, result)
        return True
    result = importer.operand(node, source)
    if isinstance(result, dict):
        importer.env[node] = result[index]
        return True
    if isinstance(result, ir.Value) and isinstance(result.type, ir.ListType | ir.OpaqueType):
        import_list_element(importer, node, result)
        return True
    if not isinstance(result, tuple):
        return False
    if type(index) is not int or not -len(result) <= index < len(result):
        raise failure(node, f"'{source.name}' has no item {index}", "Pass the index of an existing item")
    item = result[index]
    if isinstance(item, ir.Value):
        set_result(importer, node, item)
    elif isinstance(item, tuple) or item is None:  # None: an undefined result
        importer.env[node] = item
    else:
        importer.set_number(node, item)
    return True
