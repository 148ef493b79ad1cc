"""Import of torch's higher-order operators as lines with blocks."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from fxwrap import wrapper_ir as ir
from fxwrap.converters.from_fx.calls import has_resolvable_symbols, new_results
from fxwrap.converters.from_fx.effects import absorb_scatter_fills
from fxwrap.converters.from_fx.functional import absorb_out_calls, copy_operand, write_arguments
from fxwrap.converters.from_fx.graph_importer import GraphImporter, NodeImporters
from fxwrap.converters.from_fx.inlining import constant_attributes, inline_subgraphs
from fxwrap.converters.from_fx.nodes import failure
from fxwrap.converters.from_fx.symbols import UNBACKED_PREFIXES
from fxwrap.converters.fx.replay import module_attribute, replay_spec, replayed_submodule
from fxwrap.inference import scalar_kind
from fxwrap.lines import Bind, CallFunction, Cond, ExternCall, Map, ScanLoop, While, Yield
from fxwrap.lines.frees import insert_frees
from fxwrap.lines.operands import slice_types
from fxwrap.symbolic import NumberOrExpression, expression_kind, make_symbol
from fxwrap.torch_compat import while_loop_stack_output

_HIGHER = torch.ops.higher_order
_FLIP = torch.ops.aten.flip.default


# --- blocks -----------------------------------------------------------------------------------------------------------


Operand: TypeAlias = ir.Value | NumberOrExpression | None


@dataclass(frozen=True, eq=False)
class ImportedBlock:
    """A submodule as a block.

    `yielded` are the results of the submodule, `argument_mask` tells which of the operands are arguments; `captured`
    are the tensors that are further arguments. `argument_of` has the positions of the arguments that a function writes,
    by the positions of the results of the submodule which are their new contents.
    """

    block: ir.Block
    yielded: tuple[Operand, ...]
    argument_mask: tuple[bool, ...]
    captured: tuple[Any, ...]
    argument_of: Mapping[int, int] = field(default_factory=dict)

    def operands_for(self, importer: GraphImporter, operands: Sequence[Operand]) -> tuple[Operand, ...]:
        """Returns the operands that are arguments, then those for the captured tensors."""
        arguments = [item for item, is_argument in zip(operands, self.argument_mask, strict=True) if is_argument]
        return (*arguments, *[importer.captured[id(tensor)] for tensor in self.captured])


def _submodule(importer: GraphImporter, node: Node, item: object) -> GraphModule:
    module = importer.env.get(item) if isinstance(item, Node) else None
    if not isinstance(module, GraphModule):
        raise failure(node, f"its operand '{item}' is no graph", "Pass a GraphModule of the module, by a get_attr node")
    return _inlined(importer, module)


def _inlined(importer: GraphImporter, module: GraphModule) -> GraphModule:
    """Returns a graph without calls of graphs, the same object each time."""
    return importer.state.inlined.setdefault(id(module), (module, inline_subgraphs(module)))[1]


def _captured_constants(*modules: GraphModule) -> tuple[Any, ...]:
    """Returns the tensors and opaque objects that are attributes of graphs and of their submodules, each once."""
    return tuple({id(item): item for module in modules for _, _, item in constant_attributes(module)}.values())


def _type_of(item: Operand) -> ir.Type:
    return item.type if isinstance(item, ir.Value) else ir.ScalarType(scalar_kind(item) or expression_kind(item))


def _block(
    importer: GraphImporter,
    node: Node,
    module: GraphModule,
    operands: Sequence[Operand],
    types: Sequence[ir.Type] = (),
    carried_count: int = 0,
    results: Sequence[ir.Type] = (),
    captured: tuple[Any, ...] | None = None,
    is_function: bool = False,
) -> ImportedBlock:
    """Imports a submodule as a block.

    Args:
        types: the types of the first arguments, by default those of the operands.
        carried_count: the number of loop-carried operands, which are arguments even if they are numbers. Other numbers
            are the outer ones, unless the placeholder is declared an argument.
        results: the types that the block must yield.
        captured: the constants that are further arguments, by default the attributes of the module.
        is_function: whether the block may write its arguments, and then does so instead of returning a changed copy.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(operands):
        reason = f"one of its graphs takes {len(placeholders)} operands, not {len(operands)}"
        raise failure(node, reason, "Pass one operand for each placeholder")
    importer.define_pending_symbols(node)
    inner = GraphImporter(importer.state, module, importer.import_call, frozenset(importer.defined_symbols))
    arguments: list[ir.Value] = []
    argument_mask = []
    for position, (placeholder, operand) in enumerate(zip(placeholders, operands, strict=True)):
        is_argument = position < carried_count or _is_argument(placeholder, operand)
        argument_mask.append(is_argument)
        if is_argument:
            type_ = types[position] if position < len(types) else _type_of(operand)
            arguments.append(_block_argument(inner, placeholder, type_))
        else:
            inner.set_number(placeholder, operand)
    captured = _captured_constants(module) if captured is None else captured
    arguments += [_capture(importer, inner, item) for item in captured]
    for child in module.graph.find_nodes(op="get_attr"):
        payload = module_attribute(module, child.target)
        if id(payload) in inner.captured:
            inner.attributes[str(child.target)] = inner.captured[id(payload)]
    find_absorbed_nodes(inner)
    for child in module.graph.nodes:
        if child.op not in ("placeholder", "output"):
            inner.import_node(child)
    output = module.graph.output_node()
    inner.emit_comments(output)
    yielded = _owned_yields(inner, output, results)
    written = write_arguments(inner, output, arguments, yielded) if is_function else {}
    inner.emit(Yield(tuple([item for index, item in enumerate(yielded) if index not in written])), output)
    block = ir.Block(tuple(arguments), insert_frees(inner.coalesced_lines(arguments), arguments, ()))
    argument_of = {position: arguments.index(value) for position, value in written.items()}
    return ImportedBlock(block, yielded, tuple(argument_mask), captured, argument_of)


def _is_argument(placeholder: Node, operand: Operand) -> bool:
    is_number = not isinstance(operand, ir.Value) or isinstance(operand.type, ir.ScalarType)
    return not is_number or isinstance(placeholder.meta.get("fxwrap_type"), ir.ScalarType)


def _capture(importer: GraphImporter, inner: GraphImporter, constant: Any) -> ir.Value:
    """Returns a new argument for a tensor or an opaque object that is an attribute of a graph."""
    outer = importer.captured[id(constant)]
    value = inner.captured[id(constant)] = inner.value(outer.name, _as_root_type(outer.type))
    inner.define_external(value)
    return value


def _block_argument(inner: GraphImporter, placeholder: Node, type_: ir.Type) -> ir.Value:
    """Returns the argument of a placeholder: of its original type if that agrees, as a root."""
    type_ = _as_root_type(type_)
    original = placeholder.meta.get("fxwrap_type")
    if isinstance(original, ir.TensorType) and _fits_inside(inner, original, type_):
        type_ = original
    value = inner.value(placeholder.name, type_)
    inner.define_external(value)
    inner.env[placeholder] = value
    if isinstance(type_, ir.ScalarType):
        info = placeholder.meta.get("fxwrap_symbol") or inner.state.symbols.fresh(UNBACKED_PREFIXES[type_.kind])
        info = inner.state.symbols.reserve(info)
        inner.emit(Bind(info, value, ()), placeholder)
        inner.set_number(placeholder, make_symbol(info.name))
    return value


def _fits_inside(inner: GraphImporter, original: ir.Type, type_: ir.Type) -> bool:
    names = {symbol.name for symbol in ir.type_symbols(original)}
    is_clear = names <= inner.defined_symbols and names.isdisjoint(inner.state.symbols.ambiguous)
    return is_clear and ir.types_agree(original, type_)


def _owned_yields(inner: GraphImporter, output: Node, types: Sequence[ir.Type]) -> tuple[Operand, ...]:
    """Returns the results of a block: owned roots, each once; anything else is copied."""
    tree = output.args[0]
    items = tree if isinstance(tree, tuple | list) else (tree,)
    yielded: list[Operand] = []
    roots: set[str] = set()
    for position, item in enumerate(items):
        value = inner.argument(output, item)
        if isinstance(value, tuple):
            raise failure(output, "one of its results is a tuple", "Return a flat tuple")
        if isinstance(value, ir.Value) and isinstance(value.type, ir.TensorType):
            type_ = types[position] if position < len(types) else None
            root = inner.root_of[value.name]
            is_owned = root == value.name and root not in inner.external_values and root not in roots
            if not is_owned or (isinstance(type_, ir.TensorType) and not ir.types_agree(value.type, type_)):
                value = _clone(inner, output, value)
            roots.add(value.name)
        yielded.append(value)
    return tuple(yielded)


def _clone(inner: GraphImporter, node: Node, value: ir.Value) -> ir.Value:
    type_ = value.tensor_type
    clone = inner.value(value.name, replace(type_, strides=ir.contiguous_strides(type_.sizes), storage_offset=0))
    layout = (("memory_format", torch.contiguous_format),)
    inner.emit_definition(ExternCall((clone,), "aten.clone.default", (value,), layout), node)
    return clone


# --- results ----------------------------------------------------------------------------------------------------------


BlockLine: TypeAlias = Cond | While | ScanLoop | Map | CallFunction


def _results(
    importer: GraphImporter,
    node: Node,
    line: BlockLine | None,
    types: Sequence[ir.Type],
    positions: Sequence[int] | None = None,
) -> tuple[ir.Value | None, ...]:
    """Returns the results of a line with blocks, of their original types if these agree with the inferred ones.

    `positions` are those in the results of the node, by default all.
    """
    used = {user.args[1] for user in node.users if user.target is operator.getitem}
    positions = range(len(types)) if positions is None else positions
    is_original = line is not None and len(line.results) == len(types)
    originals = line.results if line is not None and is_original else (None,) * len(types)
    chosen: list[ir.Value | None] = []
    for position, original, type_ in zip(positions, originals, types, strict=True):
        if isinstance(original, ir.Value) and _is_compatible_type(importer, original.type, type_):
            chosen.append(original)
        elif is_original and original is None and position not in used:
            chosen.append(None)
        else:
            chosen.append(ir.Value("", type_) if isinstance(type_, ir.ScalarType) or line is not None or used else None)
    if len(chosen) != 1:
        return new_results(importer, node, tuple(chosen))
    if chosen[0] is None:
        return (None,)
    item = next((user for user in node.users if user.target is operator.getitem), node)
    return (importer.value(item.name, chosen[0].type),)


def _is_compatible_type(importer: GraphImporter, original: ir.Type, type_: ir.Type) -> bool:
    ambiguous = importer.state.symbols.ambiguous
    is_clear = all(item.name not in ambiguous for item in ir.type_symbols(original))
    return is_clear and ir.types_agree(original, type_) and has_resolvable_symbols(importer, original)


def _emit_with_results(importer: GraphImporter, node: Node, line: BlockLine) -> None:
    """Adds a line with blocks; the node's value is the tuple of its results."""
    importer.emit_definition(line, node)
    importer.env[node] = line.results


def _outer_size(importer: GraphImporter, first: ir.Size, second: ir.Size) -> ir.Size:
    """Returns a size of a result of two blocks: that of both if it is defined outside, else a new symbol."""
    if first == second and _is_outer_size(importer, first):
        return first
    return make_symbol(importer.state.symbols.fresh("u").name)


def _join_types(importer: GraphImporter, first: Operand, second: Operand) -> ir.Type:
    one, other = _type_of(first), _type_of(second)
    if not isinstance(one, ir.TensorType) or not isinstance(other, ir.TensorType):
        return one
    sizes = tuple([_outer_size(importer, *pair) for pair in zip(one.sizes, other.sizes)])
    known = all(_is_outer_size(importer, size) for size in one.strides) and one.strides == other.strides
    return replace(one, sizes=sizes, strides=one.strides if known else ir.contiguous_strides(sizes))


def _is_outer_size(importer: GraphImporter, size: ir.Size) -> bool:
    return isinstance(size, int) or all(symbol.name in importer.defined_symbols for symbol in size.free_symbols)


# --- operators --------------------------------------------------------------------------------------------------------


def _operands(importer: GraphImporter, node: Node, items: object) -> list[Operand]:
    return [importer.argument(node, item) for item in items]  # type: ignore[attr-defined]


def _cond(importer: GraphImporter, node: Node) -> None:
    predicate, then_item, else_item, items = (*node.args, ())[:4]
    operands = _operands(importer, node, items)
    then_module, else_module = _submodule(importer, node, then_item), _submodule(importer, node, else_item)
    first = _argument_prefix(operands, [then_module, else_module])
    captured = _captured_constants(then_module, else_module)
    then = _block(importer, node, then_module, operands, carried_count=first, captured=captured)
    otherwise = _block(importer, node, else_module, operands, carried_count=first, captured=captured)
    if len(then.yielded) != len(otherwise.yielded):
        reason = f"one branch has {len(then.yielded)} results, the other {len(otherwise.yielded)}"
        raise failure(node, reason, "Return the same number of results from both")
    types = [_join_types(importer, one, other) for one, other in zip(then.yielded, otherwise.yielded)]
    results = _results(importer, node, importer.original_line(node, Cond), types)
    condition = importer.argument(node, predicate)
    arguments = then.operands_for(importer, operands)
    _emit_with_results(importer, node, Cond(results, condition, arguments, then.block, otherwise.block))


def _argument_prefix(operands: Sequence[Operand], modules: Sequence[GraphModule]) -> int:
    """Returns the number of first operands that are arguments of every block, since one block declares the last one."""
    last = 0
    for module in modules:
        for position, placeholder in enumerate(module.graph.find_nodes(op="placeholder")):
            if position < len(operands) and isinstance(placeholder.meta.get("fxwrap_type"), ir.ScalarType):
                last = max(last, position + 1)
    return last


def _while(importer: GraphImporter, node: Node) -> None:
    cond_item, body_item, carried_items, extra_items = (*node.args, (), ())[:4]
    carried, extra = _operands(importer, node, carried_items), _operands(importer, node, extra_items)
    operands, count = [*carried, *extra], len(carried)
    cond_module, body_module = _submodule(importer, node, cond_item), _submodule(importer, node, body_item)
    captured = _captured_constants(cond_module, body_module)
    cond = _block(importer, node, cond_module, operands, carried_count=count, captured=captured)
    types = [_as_root_type(_type_of(item)) for item in carried]
    body = _block(importer, node, body_module, operands, carried_count=count, results=types, captured=captured)
    stacked = node.target is while_loop_stack_output
    line = importer.original_line(node, While)
    result_types = [_stacked_type(importer, type_) for type_ in types] if stacked else types
    results = _results(importer, node, line, result_types)
    extra_operands = cond.operands_for(importer, operands)[count:]
    loop = While(results, tuple(carried), cond.block, body.block, extra_operands, stacked)
    _emit_with_results(importer, node, loop)


def _as_root_type(type_: ir.Type) -> ir.Type:
    return replace(type_, storage_offset=0) if isinstance(type_, ir.TensorType) else type_


def _stacked_type(importer: GraphImporter, type_: ir.Type) -> ir.Type:
    rounds = make_symbol(importer.state.symbols.fresh("u").name)
    if not isinstance(type_, ir.TensorType):
        return ir.TensorType.contiguous(torch.int64, (rounds,), torch.device("cpu"))
    return ir.TensorType.contiguous(type_.dtype, (rounds, *type_.sizes), type_.device)


def _scan(importer: GraphImporter, node: Node) -> None:
    body_item, carried_items, over_items, extra_items = (*node.args, ())[:4]
    reverse = node in importer.reverse_scans
    if reverse:
        over_items = [item.args[0] for item in over_items]  # type: ignore[union-attr]
    carried, extra = _operands(importer, node, carried_items), _operands(importer, node, extra_items)
    over = tuple([importer.tensor(node, item) for item in over_items])  # type: ignore[union-attr]
    operands, count = [*carried, *over, *extra], len(carried)
    types: list[ir.Type] = [*[_type_of(item) for item in carried], *slice_types(over)]
    carried_types = [_as_root_type(type_) for type_ in types[:count]]
    body = _block(importer, node, _submodule(importer, node, body_item), operands, types, count, carried_types)
    stacked = [_stacked_slice_type(node, over, item) for item in body.yielded[count:]]
    results = _results(importer, node, importer.original_line(node, ScanLoop), [*carried_types, *stacked])
    extra_operands = body.operands_for(importer, operands)[count + len(over) :]
    _emit_with_results(importer, node, ScanLoop(results, tuple(carried), over, body.block, extra_operands, reverse))
    if reverse:
        _unflip(importer, node, results)


def _stacked_slice_type(node: Node, over: Sequence[ir.Value], item: Operand) -> ir.Type:
    if not isinstance(item, ir.Value) or not over:
        raise failure(node, "a stacked result is no tensor", "Return a tensor for each slice")
    type_ = item.tensor_type
    return ir.TensorType.contiguous(type_.dtype, (over[0].tensor_type.sizes[0], *type_.sizes), type_.device)


def _map(importer: GraphImporter, node: Node) -> None:
    body_item, over_items, extra_items = (*node.args, ())[:3]
    over = tuple([importer.tensor(node, item) for item in over_items])  # type: ignore[union-attr]
    extra = _operands(importer, node, extra_items)
    body = _block(importer, node, _submodule(importer, node, body_item), [*over, *extra], slice_types(over))
    stacked = [_stacked_slice_type(node, over, item) for item in body.yielded]
    results = _results(importer, node, importer.original_line(node, Map), stacked)
    extra_operands = body.operands_for(importer, [*over, *extra])[len(over) :]
    _emit_with_results(importer, node, Map(results, over, body.block, extra_operands))


def _call_function(importer: GraphImporter, node: Node) -> None:
    body_item, label, *items = node.args
    _import_function_call(importer, node, _submodule(importer, node, body_item), str(label), items)


def import_replayed_call(importer: GraphImporter, node: Node) -> None:
    """Imports a call of a submodule that is captured and replayed."""
    module = replayed_submodule(importer.module, node)
    assert module is not None
    _import_function_call(importer, node, _inlined(importer, module), str(node.target), node.args)


def _import_function_call(
    importer: GraphImporter, node: Node, module: GraphModule, label: str, items: Sequence[object]
) -> None:
    operands = _operands(importer, node, items)
    key = (id(module), tuple([_call_key(item) for item in operands]))
    known = importer.state.imported_functions.get(key)
    if known is None:
        block = _block(importer, node, module, operands, is_function=True)
        name = _function_name(importer, label)
        importer.state.functions[name] = block.block
        known = importer.state.imported_functions[key] = (name, block)
    name, block = known
    positions = [position for position in range(len(block.yielded)) if position not in block.argument_of]
    types = [_outer_type(importer, block.yielded[position]) for position in positions]
    results = _results(importer, node, importer.original_line(node, CallFunction), types, positions)
    arguments = list(block.operands_for(importer, operands))
    copies: dict[int, ir.Value] = {}
    for position, index in block.argument_of.items():
        operand = arguments[index]
        assert isinstance(operand, ir.Value), "a written argument is a tensor"
        arguments[index] = copies[position] = copy_operand(importer, node, operand)
    lines, parameters = block.block.lines, block.block.arguments
    root_of = ir.alias_roots(lines, parameters)
    written = {root_of[value.name] for line in lines for value in ir.writes(line)}
    mutated_operands = tuple([item for value, item in zip(parameters, arguments) if value.name in written])
    spec = replay_spec(replayed_submodule(importer.module, node))
    max_captures = 0 if spec is None else spec.max_captures
    fixed = [arguments[sum(block.argument_mask[:index])] for index in spec.fixed] if spec is not None else []
    static_operands = tuple([item for item in fixed if isinstance(item, ir.Value)])
    call = CallFunction(results, name, tuple(arguments), mutated_operands, max_captures, static_operands)
    _emit_with_results(importer, node, call)
    if copies:
        remaining = iter(results)
        importer.env[node] = tuple([copies.get(index) or next(remaining) for index in range(len(block.yielded))])


def _call_key(operand: Operand) -> object:
    """Returns the part of the key of a function's import: the type of an operand, or the number."""
    return _as_root_type(operand.type) if isinstance(operand, ir.Value) else (type(operand), operand)


def _outer_type(importer: GraphImporter, item: Operand) -> ir.Type:
    type_ = _type_of(item)
    if not isinstance(type_, ir.TensorType):
        return type_
    sizes = tuple([_outer_size(importer, size, size) for size in type_.sizes])
    return type_ if sizes == type_.sizes else replace(type_, sizes=sizes, strides=ir.contiguous_strides(sizes))


def _function_name(importer: GraphImporter, name_hint: str) -> str:
    base = "".join([letter if letter.isalnum() else "_" for letter in name_hint]) or "function"
    name, number = base, 0
    while name in importer.state.functions:
        number += 1
        name = f"{base}_{number}"
    return name


# --- reversed scans ---------------------------------------------------------------------------------------------------


def find_absorbed_nodes(importer: GraphImporter) -> None:
    """Finds the nodes of a graph that are part of another node's line."""
    _find_reverse_scans(importer)
    absorb_scatter_fills(importer)
    absorb_out_calls(importer)


def _find_reverse_scans(importer: GraphImporter) -> None:
    """Finds the reversed scans: all their operands and stacked results are flipped."""
    for node in importer.module.graph.find_nodes(op="call_function", target=_HIGHER.scan):
        count, over = len(node.args[1]), node.args[2]
        items = [user for user in node.users if user.target is operator.getitem and user.args[1] >= count]
        flips = [flip for item in items for flip in item.users]
        if over and all(_is_flip(item) and len(item.users) == 1 for item in over) and all(map(_is_flip, flips)):
            importer.reverse_scans.add(node)
            importer.absorbed.update([*over, *items, *flips])


def _is_flip(node: object) -> bool:
    return isinstance(node, Node) and node.target is _FLIP and list(node.args[1]) == [0]  # type: ignore[arg-type]


def _unflip(importer: GraphImporter, node: Node, results: tuple[ir.Value | None, ...]) -> None:
    for item in node.users:
        if item in importer.absorbed:
            for flip in item.users:
                importer.env[flip] = results[item.args[1]]  # type: ignore[index]


CONTROL: NodeImporters = {
    _HIGHER.cond: _cond,
    _HIGHER.while_loop: _while,
    while_loop_stack_output: _while,
    _HIGHER.scan: _scan,
    _HIGHER.map_impl: _map,
    _HIGHER.invoke_subgraph: _call_function,
}
