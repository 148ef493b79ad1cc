"""Torch's higher-order operators read back as lines with blocks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxwrap.converters.from_fx_calls import can_be_known, named
from fxwrap.converters.from_fx_modules import flattened, held_tensors
from fxwrap.converters.from_fx_reader import Reader, Table, failure, origin_of
from fxwrap.converters.from_fx_world import find_filled
from fxwrap.converters.fx_attributes import attribute_of
from fxwrap.converters.fx_replay import replay_facts, replayed_submodule
from fxwrap.lines import Bind, Call, CallFunction, Cond, Map, Scan, While, Yield
from fxwrap.lines.frees import insert_frees
from fxwrap.symbolic import expression_kind, make_symbol
from fxwrap.torch_compat import while_loop_stack_output
from fxwrap.wrapper_ir import (
    Block,
    ScalarType,
    TensorType,
    Type,
    Value,
    contiguous_strides,
    roots,
    type_symbols,
    types_agree,
    writes,
)

_HIGHER = torch.ops.higher_order
_FLIP = torch.ops.aten.flip.default


# --- blocks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ReadBlock:
    """A submodule as a block, what it yields, which of the operands are its arguments, and which tensors more."""

    block: Block
    yielded: tuple[Any, ...]
    taken: tuple[bool, ...]
    held: tuple[torch.Tensor, ...]

    def of(self, reader: Reader, operands: Sequence[Any]) -> tuple[Any, ...]:
        """Returns those of the operands that are arguments, then what is passed for the tensors it holds."""
        taken = [item for item, is_taken in zip(operands, self.taken, strict=True) if is_taken]
        return (*taken, *[reader.held[id(tensor)] for tensor in self.held])


def _submodule(reader: Reader, node: Node, item: Any) -> GraphModule:
    found = reader.env.get(item) if isinstance(item, Node) else None
    if not isinstance(found, GraphModule):
        raise failure(node, f"its operand '{item}' is no graph", "Pass a GraphModule of the module, by a get_attr node")
    return _flat(reader, found)


def _flat(reader: Reader, module: GraphModule) -> GraphModule:
    """Returns a graph without calls of graphs, the same object each time."""
    return reader.shared.flat.setdefault(id(module), (module, flattened(module)))[1]


def _held(*modules: GraphModule) -> tuple[torch.Tensor, ...]:
    """Returns the tensors that graphs hold, and those inside of them: each once."""
    return tuple({id(tensor): tensor for module in modules for _, _, tensor in held_tensors(module)}.values())


def _type_of(item: Any) -> Type:
    if isinstance(item, Value):
        return item.type
    if isinstance(item, bool | int | float):
        return ScalarType(type(item).__name__)
    return ScalarType(expression_kind(item))


def _block(
    reader: Reader,
    node: Node,
    module: GraphModule,
    operands: Sequence[Any],
    types: Sequence[Type] | None = None,
    changing: int = 0,
    results: Sequence[Type | None] | None = None,
    held: tuple[torch.Tensor, ...] | None = None,
) -> ReadBlock:
    """Reads a submodule as a block.

    `types` are those of the arguments, those of the operands if not given; the first `changing` operands change from
    round to round, so that they are arguments also where they are numbers. Other numbers are what they are outside,
    unless the placeholder says that it is an argument. `results` are the types that the block must yield.
    `held` are the tensors that it is passed for those that it holds, all of its own if not given.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(operands):
        reason = f"a graph that it holds takes {len(placeholders)} operands, but {len(operands)} are given"
        raise failure(node, reason, "Give it one operand a placeholder")
    reader.settle(node)
    inner = Reader(reader.shared, module, reader.read_call, frozenset(reader.known))
    arguments: list[Value] = []
    taken = []
    for position, (placeholder, operand) in enumerate(zip(placeholders, operands, strict=True)):
        type_ = types[position] if types is not None and position < len(types) else _type_of(operand)
        is_argument = _is_argument(placeholder, operand, position < changing)
        taken.append(is_argument)
        if is_argument:
            arguments.append(_argument(inner, placeholder, type_))
        else:
            inner.set_number(placeholder, operand)
    held = _held(module) if held is None else held
    arguments += [_passed(reader, inner, tensor) for tensor in held]
    for child in module.graph.find_nodes(op="get_attr"):
        tensor = attribute_of(module, child.target)
        if isinstance(tensor, torch.Tensor):
            inner.attributes[str(child.target)] = inner.held[id(tensor)]
    find_parts(inner)
    for child in module.graph.nodes:
        if child.op not in ("placeholder", "output"):
            inner.read(child)
    output = module.graph.output_node()
    inner.comments(output)
    yielded = _yielded(inner, output, results)
    inner.emit(Yield(yielded, origin=origin_of(output)), output)
    block = Block(tuple(arguments), insert_frees(inner.lines, arguments, ()))
    return ReadBlock(block, yielded, tuple(taken), held)


def _is_argument(placeholder: Node, operand: Any, changes: bool) -> bool:
    is_number = not isinstance(operand, Value) or isinstance(operand.type, ScalarType)
    return changes or not is_number or isinstance(placeholder.meta.get("fxwrap_type"), ScalarType)


def _passed(reader: Reader, inner: Reader, tensor: torch.Tensor) -> Value:
    """Makes the argument that stands for a tensor which a graph holds."""
    outer = reader.held[id(tensor)]
    value = inner.held[id(tensor)] = inner.value(outer.name, _own(outer.type))
    inner.given[value.name] = value
    inner.define(value)
    return value


def _argument(inner: Reader, placeholder: Node, type_: Type) -> Value:
    """Takes an operand as an argument: with the type that it had where that agrees, offsets counting from its start."""
    if isinstance(type_, TensorType):
        type_ = replace(type_, storage_offset=0)
    known = placeholder.meta.get("fxwrap_type")
    if isinstance(known, TensorType) and types_agree(known, type_) and _are_known(inner, known):
        type_ = known
    value = inner.value(placeholder.name, type_)
    inner.given[value.name] = value
    inner.define(value)
    inner.env[placeholder] = value
    if isinstance(type_, ScalarType):
        info = placeholder.meta.get("fxwrap_symbol") or inner.shared.symbols.fresh(_PREFIXES[type_.kind])
        info = inner.shared.symbols.to_define(info)
        inner.emit(Bind(info, value, (), origin=origin_of(placeholder)), placeholder)
        inner.set_number(placeholder, make_symbol(info.name))
    return value


_PREFIXES = {"int": "u", "float": "uf", "bool": "b"}


def _are_known(inner: Reader, type_: Type) -> bool:
    symbols = inner.shared.symbols
    return all(item.name in inner.known and item.name not in symbols.ambiguous for item in type_symbols(type_))


def _yielded(inner: Reader, output: Node, wanted: Sequence[Type | None] | None) -> tuple[Any, ...]:
    """Returns what a block gives: what it owns, each with memory of its own; of anything else a copy."""
    tree: Any = output.args[0]
    items = tree if isinstance(tree, tuple | list) else (tree,)
    found: list[Any] = []
    roots: set[str] = set()
    for position, item in enumerate(items):
        value = inner.argument(output, item)
        if isinstance(value, tuple):
            raise failure(output, "it gives several values in one place", "Give a flat tuple")
        if isinstance(value, Value) and isinstance(value.type, TensorType):
            type_ = wanted[position] if wanted is not None and position < len(wanted) else None
            root = inner.root_of[value.name]
            is_own = root == value.name and root not in inner.given and root not in roots
            if not is_own or (isinstance(type_, TensorType) and not types_agree(value.type, type_)):
                value = _copied(inner, output, value)
            roots.add(value.name)
        found.append(value)
    return tuple(found)


def _copied(inner: Reader, node: Node, value: Value) -> Value:
    type_ = value.tensor_type
    made = inner.value(value.name, replace(type_, strides=contiguous_strides(type_.sizes), storage_offset=0))
    layout = (("memory_format", torch.contiguous_format),)
    inner.make(Call((made,), "aten.clone.default", (value,), layout, origin=origin_of(node)), node)
    return made


# --- results ----------------------------------------------------------------------------------------------------------


def _results(reader: Reader, node: Node, line: Any, types: Sequence[Type]) -> tuple[Any, ...]:
    """Makes the results of a line with blocks: with the types they had where these agree with those that follow."""
    used = {user.args[1] for user in node.users if user.target is operator.getitem}
    before = line.results if line is not None and len(line.results) == len(types) else (None,) * len(types)
    chosen: list[Any] = []
    for position, (known, type_) in enumerate(zip(before, types, strict=True)):
        if known is not None and _fits(reader, known.type, type_):
            chosen.append(known)
        elif line is not None and known is None and len(line.results) == len(types) and position not in used:
            chosen.append(None)
        else:
            chosen.append(Value("", type_) if isinstance(type_, ScalarType) or line is not None or used else None)
    return tuple(named(reader, node, tuple(chosen)) if len(chosen) != 1 else _only(reader, node, chosen[0]))


def _only(reader: Reader, node: Node, item: Value | None) -> tuple[Value | None, ...]:
    """Names the only result, which is taken out of a tuple too."""
    if item is None:
        return (None,)
    taker = next((user for user in node.users if user.target is operator.getitem), node)
    return (reader.value(taker.name, item.type),)


def _fits(reader: Reader, known: Type, type_: Type) -> bool:
    ambiguous = reader.shared.symbols.ambiguous
    clear = all(item.name not in ambiguous for item in type_symbols(known))
    return clear and types_agree(known, type_) and can_be_known(reader, known)


def _given(reader: Reader, node: Node, line: Any) -> None:
    """Adds a line with blocks; what it gives is taken out of a tuple."""
    reader.make(line, node)
    reader.env[node] = line.results


def _dense(type_: TensorType, sizes: tuple[Any, ...]) -> TensorType:
    return TensorType(type_.dtype, sizes, contiguous_strides(sizes), type_.device)


def _outside(reader: Reader, first: Any, second: Any) -> Any:
    """Returns a size that two blocks give: one that is known outside of both, else a new symbol."""
    symbols = () if isinstance(first, int) else first.free_symbols
    if first == second and all(symbol.name in reader.known for symbol in symbols):
        return first
    return make_symbol(reader.shared.symbols.fresh("u").name)


def _common(reader: Reader, first: Any, second: Any) -> Type:
    """Returns the type that a result has which two blocks give."""
    one, other = _type_of(first), _type_of(second)
    if not isinstance(one, TensorType) or not isinstance(other, TensorType):
        return one
    sizes = tuple([_outside(reader, *pair) for pair in zip(one.sizes, other.sizes)])
    known = all(_outside_known(reader, size) for size in one.strides) and one.strides == other.strides
    return replace(one, sizes=sizes, strides=one.strides if known else contiguous_strides(sizes))


def _outside_known(reader: Reader, size: Any) -> bool:
    return isinstance(size, int) or all(symbol.name in reader.known for symbol in size.free_symbols)


# --- operators --------------------------------------------------------------------------------------------------------


def _operands(reader: Reader, node: Node, items: Any) -> list[Any]:
    return [reader.argument(node, item) for item in items]


def _cond(reader: Reader, node: Node) -> None:
    predicate, then_item, else_item, items = (*node.args, ())[:4]
    operands = _operands(reader, node, items)
    then_module, else_module = _submodule(reader, node, then_item), _submodule(reader, node, else_item)
    first = _as_arguments(operands, [then_module, else_module])
    held = _held(then_module, else_module)
    then = _block(reader, node, then_module, operands, changing=first, held=held)
    otherwise = _block(reader, node, else_module, operands, changing=first, held=held)
    if len(then.yielded) != len(otherwise.yielded):
        reason = f"one branch gives {len(then.yielded)} results, the other {len(otherwise.yielded)}"
        raise failure(node, reason, "Make both give as many")
    types = [_common(reader, one, other) for one, other in zip(then.yielded, otherwise.yielded)]
    results = _results(reader, node, reader.hint(node, Cond), types)
    condition = reader.argument(node, predicate)
    taken = then.of(reader, operands)
    _given(reader, node, Cond(results, condition, taken, then.block, otherwise.block, origin=origin_of(node)))


def _as_arguments(operands: Sequence[Any], modules: Sequence[GraphModule]) -> int:
    """Returns how many operands, from the first on, every block must take since one of them says so."""
    last = 0
    for module in modules:
        for position, placeholder in enumerate(module.graph.find_nodes(op="placeholder")):
            if position < len(operands) and isinstance(placeholder.meta.get("fxwrap_type"), ScalarType):
                last = max(last, position + 1)
    return last


def _while(reader: Reader, node: Node) -> None:
    cond_item, body_item, carried_items, extra_items = (*node.args, (), ())[:4]
    carried, extra = _operands(reader, node, carried_items), _operands(reader, node, extra_items)
    operands, count = [*carried, *extra], len(carried)
    cond_module, body_module = _submodule(reader, node, cond_item), _submodule(reader, node, body_item)
    held = _held(cond_module, body_module)
    cond = _block(reader, node, cond_module, operands, changing=count, held=held)
    types = [_own(_type_of(item)) for item in carried]
    body = _block(reader, node, body_module, operands, changing=count, results=types, held=held)
    stacked = node.target is while_loop_stack_output
    line = reader.hint(node, While)
    given = [_stacked(reader, type_) for type_ in types] if stacked else types
    results = _results(reader, node, line, given)
    taken = cond.of(reader, operands)[count:]
    made = While(results, tuple(carried), cond.block, body.block, taken, stacked, origin=origin_of(node))
    _given(reader, node, made)


def _own(type_: Type) -> Type:
    return replace(type_, storage_offset=0) if isinstance(type_, TensorType) else type_


def _stacked(reader: Reader, type_: Type) -> Type:
    rounds = make_symbol(reader.shared.symbols.fresh("u").name)
    if not isinstance(type_, TensorType):
        return TensorType.contiguous(torch.int64, (rounds,), torch.device("cpu"))
    return _dense(type_, (rounds, *type_.sizes))


def _scan(reader: Reader, node: Node) -> None:
    body_item, carried_items, over_items, extra_items = (*node.args, ())[:4]
    reverse = node in reader.reversed
    if reverse:
        over_items = [item.args[0] for item in over_items]  # type: ignore[union-attr]
    carried, extra = _operands(reader, node, carried_items), _operands(reader, node, extra_items)
    over = tuple([reader.tensor(node, item) for item in over_items])  # type: ignore[union-attr]
    operands, count = [*carried, *over, *extra], len(carried)
    types: list[Type] = [*[_type_of(item) for item in carried], *[_slice(value) for value in over]]
    wanted = [_own(type_) for type_ in types[:count]]
    body = _block(reader, node, _submodule(reader, node, body_item), operands, types, count, wanted)
    stacked = [_stack(node, over, item) for item in body.yielded[count:]]
    results = _results(reader, node, reader.hint(node, Scan), [*wanted, *stacked])
    taken = body.of(reader, operands)[count + len(over) :]
    made = Scan(results, tuple(carried), over, body.block, taken, reverse, origin=origin_of(node))
    _given(reader, node, made)
    if reverse:
        _unflip(reader, node, results)


def _slice(value: Value) -> Type:
    whole = value.tensor_type
    return replace(whole, sizes=whole.sizes[1:], strides=whole.strides[1:], storage_offset=0)


def _stack(node: Node, over: Sequence[Value], item: Any) -> Type:
    if not isinstance(item, Value) or not over:
        raise failure(node, "a result that is stacked is no tensor", "Give a tensor for each slice")
    type_ = item.tensor_type
    return _dense(type_, (over[0].tensor_type.sizes[0], *type_.sizes))


def _map(reader: Reader, node: Node) -> None:
    body_item, over_items, extra_items = (*node.args, ())[:3]
    over = tuple([reader.tensor(node, item) for item in over_items])  # type: ignore[union-attr]
    extra = _operands(reader, node, extra_items)
    types = [_slice(value) for value in over]
    body = _block(reader, node, _submodule(reader, node, body_item), [*over, *extra], types)
    stacked = [_stack(node, over, item) for item in body.yielded]
    results = _results(reader, node, reader.hint(node, Map), stacked)
    taken = body.of(reader, [*over, *extra])[len(over) :]
    _given(reader, node, Map(results, over, body.block, taken, origin=origin_of(node)))


def _call_function(reader: Reader, node: Node) -> None:
    body_item, label, *items = node.args
    _called(reader, node, _submodule(reader, node, body_item), str(label), items)


def call_replayed(reader: Reader, node: Node) -> None:
    """Reads a call of a submodule whose work is recorded and replayed."""
    module = replayed_submodule(reader.module, node)
    assert module is not None
    _called(reader, node, _flat(reader, module), str(node.target), node.args)


def _called(reader: Reader, node: Node, module: GraphModule, label: str, items: Sequence[Any]) -> None:
    operands = _operands(reader, node, items)
    key = (id(module), tuple([_key(item) for item in operands]))
    known = reader.shared.called.get(key)
    if known is None:
        block = _block(reader, node, module, operands)
        name = _function_name(reader, label)
        reader.shared.functions[name] = block.block
        known = reader.shared.called[key] = (name, block)
    name, block = known
    line = reader.hint(node, CallFunction)
    types = [_outer_type(reader, item) for item in block.yielded]
    results = _results(reader, node, line, types)
    taken = block.of(reader, operands)
    written = _written(block.block)
    facts = replay_facts(replayed_submodule(reader.module, node))
    places = facts.fixed if facts is not None else ()
    made = CallFunction(
        results, name, taken,
        tuple([item for argument, item in zip(block.block.arguments, taken) if argument.name in written]),
        0 if facts is None else facts.recordings,
        tuple([operands[place] for place in places if isinstance(operands[place], Value)]),
        origin=origin_of(node),
    )  # fmt: skip
    _given(reader, node, made)


def _written(block: Block) -> set[str]:
    """Returns the arguments that a block writes, by name."""
    root_of = roots(block.lines, block.arguments)
    return {root_of[value.name] for line in block.lines for value in writes(line)}


def _key(operand: Any) -> Any:
    """What must be equal for two calls to run one function: types of operands, and numbers as they are."""
    if isinstance(operand, Value):
        return _own(operand.type)
    return type(operand), operand


def _outer_type(reader: Reader, item: Any) -> Type:
    type_ = _type_of(item)
    if not isinstance(type_, TensorType):
        return type_
    sizes = tuple([_outside(reader, size, size) for size in type_.sizes])
    return type_ if sizes == type_.sizes else replace(type_, sizes=sizes, strides=contiguous_strides(sizes))


def _function_name(reader: Reader, wish: str) -> str:
    name = "".join([letter if letter.isalnum() else "_" for letter in wish]) or "function"
    found, number = name, 0
    while found in reader.shared.functions:
        number += 1
        found = f"{name}_{number}"
    return found


# --- reversed scans ---------------------------------------------------------------------------------------------------


def find_parts(reader: Reader) -> None:
    """Finds the nodes of a graph that are part of another one's line."""
    _find_reversed(reader)
    find_filled(reader)


def _find_reversed(reader: Reader) -> None:
    """Finds the scans that go from the last slice to the first: flips on all of both sides belong to them."""
    for node in reader.module.graph.find_nodes(op="call_function", target=_HIGHER.scan):
        count, over = len(node.args[1]), node.args[2]
        takers = [user for user in node.users if user.target is operator.getitem and user.args[1] >= count]
        flips = [flip for taker in takers for flip in taker.users]
        if over and all(_is_flip(item) and len(item.users) == 1 for item in over) and all(map(_is_flip, flips)):
            reader.reversed.add(node)
            reader.absorbed.update([*over, *takers, *flips])


def _is_flip(node: Any) -> bool:
    return isinstance(node, Node) and node.target is _FLIP and list(node.args[1]) == [0]  # type: ignore[arg-type]


def _unflip(reader: Reader, node: Node, results: tuple[Any, ...]) -> None:
    for taker in node.users:
        if taker in reader.absorbed:
            item = results[taker.args[1]]  # type: ignore[index]
            for flip in taker.users:
                reader.env[flip] = item


CONTROL: Table = {
    _HIGHER.cond: _cond,
    _HIGHER.while_loop: _while,
    while_loop_stack_output: _while,
    _HIGHER.scan: _scan,
    _HIGHER.map_impl: _map,
    _HIGHER.invoke_subgraph: _call_function,
}
