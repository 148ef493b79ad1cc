"""Calls of operators read back as `extern.call` and `extern.mutate`, by the operator's schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxwrap.converters.from_fx_numbers import item_of_list, number_result
from fxwrap.converters.from_fx_reader import Element, Match, Reader, failure, name_of_item, origin_of
from fxwrap.converters.from_fx_rules import Given, RuleError
from fxwrap.converters.from_fx_symbols import new_prefix
from fxwrap.lines import Bind, Call, Mutate, StartCollective
from fxwrap.symbolic import Size, floor_divide, make_symbol, product, total
from fxwrap.torch_compat import FakeTensor, OpOverload, is_composite, storage_identity
from fxwrap.wrapper_ir import (
    ListType,
    OpaqueType,
    OperatorFacts,
    ScalarType,
    TensorType,
    Type,
    Value,
    leaves,
    operator_facts,
    type_symbols,
)
from fxwrap.wrapper_ir.operators import used_items

COLLECTIVES = "_c10d_functional"


@dataclass(frozen=True, eq=False)
class Operands:
    """What a node passes to an operator: arguments, keywords without out arguments, and these."""

    facts: OperatorFacts
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    outs: tuple[Value, ...]

    def values(self) -> list[Value]:
        """Returns the values among the operands."""
        found = leaves((self.arguments, self.keywords, self.outs))
        return [leaf for leaf in found if isinstance(leaf, Value)]

    def tensors(self) -> list[Value]:
        """Returns the tensors among the operands."""
        return [value for value in self.values() if isinstance(value.type, TensorType)]


def call(reader: Reader, node: Node) -> None:
    """Reads a call of an operator: as the line that it was made for if that fits still, else as its schema says."""
    operator: Any = node.target
    facts = operator_facts(operator)
    arguments = tuple([reader.argument(node, item) for item in node.args])
    keywords = tuple([(name, reader.argument(node, item)) for name, item in node.kwargs.items()])
    operands = _operands(facts, arguments, keywords)
    if _as_it_was(reader, node, operands):
        return
    if facts.replacement is not None:
        operator, arguments, keywords = facts.replacement(operator, arguments, keywords)
        facts = operator_facts(operator)
        operands = _operands(facts, arguments, keywords)
    _check_written(reader, node, operands)
    if operator.namespace == COLLECTIVES:
        _collective(reader, node, operator, operands)
    elif facts.is_out:
        effects = facts.effects(_devices(operands, ()))
        line = Call((), facts.name, operands.arguments, operands.keywords, operands.outs, effect_set=effects,
                    origin=origin_of(node))  # fmt: skip
        reader.make(line, node)
        reader.env[node] = _whole(operands.outs)
    else:
        _by_schema(reader, node, operator, operands)


def _operands(facts: OperatorFacts, arguments: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...]) -> Operands:
    if not facts.is_out:
        return Operands(facts, arguments, keywords, ())
    named = dict(keywords)
    outs = tuple([named[name] for name in facts.written if isinstance(named.get(name), Value)])
    return Operands(facts, arguments, tuple([pair for pair in keywords if pair[0] not in facts.written]), outs)


def _whole(items: tuple[Any, ...]) -> Any:
    return None if not items else items[0] if len(items) == 1 else items


def _check_written(reader: Reader, node: Node, operands: Operands) -> None:
    facts = operands.facts
    given = (*operands.keywords, *zip(facts.argument_names, operands.arguments, strict=False))
    for name, item in given:
        if name in facts.written and item is not None and not any(isinstance(leaf, Value) for leaf in leaves(item)):
            if item != ():
                raise failure(node, f"'{name}', which it writes, is no tensor", "Pass a tensor")


# --- as the line was --------------------------------------------------------------------------------------------------


def _as_it_was(reader: Reader, node: Node, operands: Operands) -> bool:
    """Reads a node as the line it was made for, where operator, operands and the results that are used fit."""
    line = reader.hint(node, Call, Mutate, StartCollective)
    if line is None:
        return False
    match = Match()
    target = line.operator if isinstance(line, StartCollective) else line.target
    keywords = () if isinstance(line, StartCollective) else line.keywords
    outs = line.outs if isinstance(line, Call) else ()
    before, now = (line.arguments, keywords, outs), (operands.arguments, operands.keywords, operands.outs)
    if target != operands.facts.name or not match(before, now) or not _gives_what_is_used(node, line.results):
        return False
    if not all(can_be_known(reader, item.type) for item in leaves(line.results) if isinstance(item, Value)):
        return False
    results = named(reader, node, line.results)
    changes: dict[str, Any] = {"aliases": match.values(line.aliases), "arguments": operands.arguments}
    if not isinstance(line, StartCollective):
        changes["keywords"] = operands.keywords
    if isinstance(line, Call):
        changes["outs"] = operands.outs
    else:
        changes["writes"] = match.values(line.writes)
    reader.make(replace(line, results=results, origin=origin_of(node), **changes), node)
    _stands_for(reader, node, operands, results)
    return True


def _gives_what_is_used(node: Node, results: tuple[Any, ...]) -> bool:
    """Whether all that is used of a node's result is there."""
    if not node.users or not results:
        return True
    tree = results[0] if len(results) == 1 and results[0] is not None else results
    if isinstance(tree, Value):
        return True
    used = used_items(node)
    if used is None:
        return all(item is not None for item in leaves(tree))
    return all(type(index) is int and index < len(tree) and tree[index] is not None for index in used)


def can_be_known(reader: Reader, type_: Type) -> bool:
    """Whether every symbol of a type is known, or is one that a node or the type itself says."""
    for symbol in type_symbols(type_):
        if symbol.name in reader.known or symbol.name in reader.claimed:
            continue
        if not isinstance(type_, TensorType) or symbol not in (*type_.sizes, *type_.strides):
            return False
    return True


def named(reader: Reader, node: Node, results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns new values of the same types as results were, named after the nodes that stand for them."""
    is_one = len(results) == 1

    def make(item: Any, path: Sequence[int]) -> Any:
        if isinstance(item, tuple):
            return tuple([make(part, (*path, index)) for index, part in enumerate(item)])
        return None if item is None else reader.value(name_of_item(node, path), item.type)

    if is_one and results[0] is not None:
        return (make(results[0], ()),)
    return tuple([make(item, (index,)) for index, item in enumerate(results)])


def _stands_for(reader: Reader, node: Node, operands: Operands, results: tuple[Any, ...]) -> None:
    """Records what a node stands for: its results, or the operands that it gives back."""
    if not results:
        back = operands.facts.returned_operands(operands.arguments, operands.keywords) or ()
        reader.env[node] = _whole(operands.outs or back)
    elif len(results) == 1 and isinstance(results[0], Value):
        number_result(reader, node, results[0])
    else:
        reader.env[node] = results[0] if len(results) == 1 and results[0] is not None else results


# --- as the schema says -----------------------------------------------------------------------------------------------


def _by_schema(reader: Reader, node: Node, operator: OpOverload, operands: Operands) -> None:
    facts = operands.facts
    arguments, keywords = operands.arguments, operands.keywords
    back = facts.returned_operands(arguments, keywords) if facts.written else None
    if back is not None:  # every return is an operand itself, or there is none
        results: tuple[Any, ...] = ()
        aliases: tuple[Value | None, ...] = ()
    else:
        results, aliases = _results(reader, node, operator, operands)
    effects = facts.effects(_devices(operands, results))
    origin = origin_of(node)
    if facts.written:
        writes = facts.written_operands(arguments, keywords)
        line: Call | Mutate = Mutate(results, facts.name, arguments, writes, keywords, aliases, effects, origin=origin)
    else:
        line = Call(results, facts.name, arguments, keywords, (), aliases, effects, origin=origin)
    reader.make(line, node)
    if back is not None:
        reader.env[node] = _whole(back)
        return
    for value in leaves(results):
        if isinstance(value, Value) and isinstance(value.type, ScalarType):
            _bind_number(reader, node, value)
    found = tuple([_with_numbers(reader, item) for item in results])
    reader.env[node] = _whole(found) if facts.return_count == 1 else found
    if not isinstance(reader.env[node], Value | tuple | type(None)):
        reader.plain[node] = reader.env[node]


def _bind_number(reader: Reader, node: Node, value: Value) -> None:
    assert isinstance(value.type, ScalarType)
    prefix = {"int": "u", "float": "uf", "bool": "b"}[value.type.kind]
    info = reader.shared.symbols.fresh(prefix)
    reader.emit(Bind(info, value, (), origin=origin_of(node)), node)
    reader.bound[value.name] = make_symbol(info.name)


def _with_numbers(reader: Reader, item: Any) -> Any:
    if isinstance(item, tuple):
        return tuple([_with_numbers(reader, part) for part in item])
    return reader.bound.get(item.name, item) if isinstance(item, Value) else item


def _results(
    reader: Reader, node: Node, operator: OpOverload, operands: Operands
) -> tuple[tuple[Any, ...], tuple[Value | None, ...]]:
    """Makes the values that an operator defines, one tree a return of its schema, and what each is a window on."""
    trees = _given(reader, node, operator, operands)
    count = operands.facts.return_count
    places = list(leaves((operands.arguments, operands.keywords)))
    tree = trees[0] if count == 1 else trees
    used = used_items(node) if isinstance(tree, tuple) and node.users else None
    aliases: list[Value | None] = []

    def make(item: Any, path: tuple[int, ...]) -> Any:
        if isinstance(item, tuple):
            return tuple([make(part, (*path, index)) for index, part in enumerate(item)])
        if item is None or (used is not None and path and path[0] not in used):
            aliases.append(None)
            return None
        base = None if item.operand is None else places[item.operand]
        aliases.append(base)
        type_ = item.type if base is None else _window_type(item, base)
        return reader.value(name_of_item(node, path), type_)

    results = (make(trees[0], ()),) if count == 1 else make(trees, ())
    return results, tuple(aliases) if any(alias is not None for alias in aliases) else ()


def _window_type(given: Given, base: Value) -> Type:
    """Returns the type of a window; its offset counts from the base's root."""
    type_ = given.type
    assert isinstance(type_, TensorType)
    before: Size = base.tensor_type.storage_offset
    old, new = base.tensor_type.dtype.itemsize, type_.dtype.itemsize
    if old != new:
        before = floor_divide(product((before, old)), new)
    return replace(type_, storage_offset=total((before, given.start)))


def window_type(reader: Reader, node: Node, base: Value) -> TensorType:
    """Returns the type of what a view operator gives, by its rule for fake tensors."""
    operator: Any = node.target
    operands = _operands(
        operator_facts(operator),
        tuple([reader.argument(node, item) for item in node.args]),
        tuple([(name, reader.argument(node, item)) for name, item in node.kwargs.items()]),
    )
    (given,) = _given(reader, node, operator, operands)
    found = _window_type(given, base)
    assert isinstance(found, TensorType)
    return found


def _given(reader: Reader, node: Node, operator: OpOverload, operands: Operands) -> tuple[Any, ...]:
    """Returns what a call gives: by its rule for fake tensors, else by the node's metadata."""
    try:
        return reader.shared.rules.results(operator, operands.arguments, operands.keywords)
    except RuleError as error:
        val = node.meta.get("val")
        returns = operands.facts.return_count
        if not error.may_be_right or (val is None and returns):
            name = operator._schema.name
            remedy = f"Correct the call, or register a rule with torch.library.register_fake({name!r})"
            raise failure(node, str(error), remedy) from error
        vals = list(leaves(_tuples(map_arg((node.args, node.kwargs), lambda item: item.meta.get("val")))))
        storages = {storage_identity(item): place for place, item in enumerate(vals) if isinstance(item, torch.Tensor)}
        if operands.facts.aliased is None and not is_composite(operator):
            storages = {}
        trees = () if not returns else (val,) if returns == 1 else tuple(val)  # type: ignore[arg-type]
        return tuple([_given_by_val(reader, item, storages, vals) for item in trees])


def _tuples(tree: Any) -> Any:
    if isinstance(tree, dict):
        return tuple([_tuples(item) for item in tree.values()])
    return tuple([_tuples(item) for item in tree]) if isinstance(tree, tuple | list) else tree


def _given_by_val(reader: Reader, val: Any, storages: dict[int, int], vals: list[Any]) -> Any:
    if val is None:
        return None
    if isinstance(val, tuple | list):
        return tuple([_given_by_val(reader, item, storages, vals) for item in val])
    if not isinstance(val, FakeTensor):
        kinds = {"b": "bool", "uf": "float", "u": "int"}
        return Given(ScalarType(kinds[new_prefix(val)]))
    symbols = reader.shared.symbols
    operand = storages.get(storage_identity(val))
    start: Size = 0
    if operand is not None:
        start = symbols.of_val(val.storage_offset() - vals[operand].storage_offset())
    return Given(symbols.type_of(val), operand, start)


def _devices(operands: Operands, results: Any) -> list[torch.device]:
    """Returns the devices of a call's operands and results."""
    tensors = [item for item in leaves(results) if isinstance(item, Value) and isinstance(item.type, TensorType)]
    return [value.tensor_type.device for value in (*operands.tensors(), *tensors)]


# --- collectives ------------------------------------------------------------------------------------------------------


def _collective(reader: Reader, node: Node, operator: OpOverload, operands: Operands) -> None:
    facts = operands.facts
    results, aliases = _results(reader, node, operator, operands)
    named_arguments = dict(zip(facts.argument_names, operands.arguments, strict=False))
    group = str({**named_arguments, **dict(operands.keywords)}.get("group_name", ""))
    arguments = (*operands.arguments, *[item for _, item in operands.keywords])
    writes = facts.written_operands(operands.arguments, operands.keywords)
    line = StartCollective(results, facts.name, arguments, group, 0, writes, aliases, origin=origin_of(node))
    reader.make(line, node)
    reader.env[node] = _whole(results) if facts.return_count == 1 else results


# --- results that are taken apart -------------------------------------------------------------------------------------


def take_item(reader: Reader, node: Node) -> bool:
    """Reads a node that takes an item out of a result; returns whether the result is something to take out of."""
    whole: Any = node.args[0]
    if not isinstance(whole, Node):
        return False
    found, index = reader.env.get(whole), node.args[1]
    if isinstance(found, Element) and isinstance(found.type, ListType):
        item_of_list(reader, node, found)
        return True
    found = reader.operand(node, whole)
    if isinstance(found, dict):
        reader.env[node] = found[index]
        return True
    if isinstance(found, Value) and isinstance(found.type, ListType | OpaqueType):
        item_of_list(reader, node, found)
        return True
    if not isinstance(found, tuple):
        return False
    if type(index) is not int or not -len(found) <= index < len(found):
        raise failure(node, f"'{whole.name}' gives no item {index}", "Take one that it gives")
    item = found[index]
    if isinstance(item, Value):
        number_result(reader, node, item)
    elif isinstance(item, tuple) or item is None:  # None: what the operator leaves undefined
        reader.env[node] = item
    else:
        reader.set_number(node, item)
    return True
