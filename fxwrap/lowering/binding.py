"""Numbers that exist only when a program runs: read from tensors, found in results of operators, and asserted.

Where a graph says by what key path of a node's result its symbols are found (`meta["unbacked_bindings"]`), that is
followed. Where it does not, a symbol is looked for in the sizes and strides of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxwrap.errors import GraphError
from fxwrap.lines import Assert, Bind, Item, Let
from fxwrap.lowering.builder import Builder
from fxwrap.lowering.slices import from_front, slice_count, slice_start
from fxwrap.lowering.source import location_of
from fxwrap.lowering.symbols import known_info, linear_parts, solution, truth_symbol
from fxwrap.symbolic import (
    SymbolInfo,
    canonical,
    make_symbol,
    product,
    total,
)
from fxwrap.torch_compat import unbacked_bindings
from fxwrap.wrapper_ir import ScalarType, Tag, TensorType, Value, map_leaves

_SELECT, _SLICE = torch.ops.aten.select.int, torch.ops.aten.slice.Tensor


# --- numbers read from tensors, and conditions ------------------------------------------------------------------------


def lower_item(builder: Builder, node: Node, fake: Any) -> None:
    """Reads the number that an element of a tensor is, as a symbol."""
    expression = builder.expression(fake)
    symbol = truth_symbol(expression) or expression
    if isinstance(symbol, sympy.Symbol) and symbol.name not in builder.known_symbols:
        info = SymbolInfo(symbol.name, 0, 1) if symbol is not expression else known_info(builder, symbol, fake)
    elif isinstance(symbol, sympy.Basic) and _unknown(builder, symbol):
        raise _error(node, f"the number read from a tensor is {expression}, not a symbol", "Read it with .item()")
    else:  # the graph knows what the number is; reading it is an effect that stays
        info = SymbolInfo(builder.state.fresh_symbol("f" if isinstance(fake, torch.SymFloat | float) else "u"))
    builder.known_symbols.add(info.name)
    builder.emit(Item(info, builder.env[node.args[0]], origin=builder.origin(node)))  # type: ignore[index]
    builder.env[node] = expression


def lower_assert(builder: Builder, node: Node, condition: Any, message: str) -> None:
    """A condition over symbols is a line of its own; one that always holds is none."""
    builder.env[node] = None
    if condition is not True and condition is not sympy.true:
        builder.emit(Assert(condition, message, origin=builder.origin(node)))


# --- symbols of results -----------------------------------------------------------------------------------------------


def bind_results(builder: Builder, node: Node, fakes: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
    """Binds each unbacked symbol that the results of a node bring: one tree of values a return of its operator.

    Returns what they stand for, as `bind_values` does. Raises GraphError for a symbol that no result gives.
    """
    single = len(results) == 1
    wanted = {symbol for value, fake in _paired(results, fakes) for symbol in _symbols_of(builder, value, fake)}
    for expression, path in unbacked_bindings(node, fakes):
        found = _followed(results[0] if single else tuple(results), path)
        if found is not None and not wanted.isdisjoint(builder.ours(expression).free_symbols):
            _bind(builder, node, builder.ours(expression), *found)
    return bind_values(builder, node, fakes, results)


def bind_values(builder: Builder, node: Node, fakes: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
    """Binds the unbacked symbols that can be read off the results of a node themselves.

    Returns what the results stand for, in the same trees: numbers are expressions, all else is as it is. Raises
    GraphError for a symbol that no result gives.
    """
    for value, fake in _paired(results, fakes):
        if isinstance(value.type, TensorType):
            bind_symbols(builder, node, value)
        elif isinstance(value.type, ScalarType):
            builder.numbers[value.name] = builder.expression(fake)
            _bind(builder, node, builder.numbers[value.name], value, ())
    return tuple(map_leaves(results, lambda leaf: builder.numbers.get(leaf.name, leaf) if leaf else leaf))


def new_values(builder: Builder, node: Node, fakes: Sequence[Any]) -> tuple[Any, ...]:
    """Makes a value for each tensor and number among results of a node that are in memory of their own.

    They are in the same trees as the fake values `fakes`, which may hold None.
    """

    def make(fake: Any, name: str) -> Any:
        if isinstance(fake, tuple | list):
            return tuple([make(item, f"{name}_{number}") for number, item in enumerate(fake)])
        if isinstance(fake, torch.Tensor):
            return builder.add_root(name, fake)
        return None if fake is None else Value(builder.unique(name), builder.type_of(fake))

    return tuple([make(fake, f"{node.name}_{number}") for number, fake in enumerate(fakes)])


def _symbols_of(builder: Builder, value: Value, fake: Any) -> set[sympy.Symbol]:
    """Returns the symbols that the lines which follow a value must have bound, of those not known yet."""
    if not isinstance(value.type, TensorType):
        return _unknown(builder, builder.expression(fake))
    type_ = value.type
    numbers = (*type_.sizes, *type_.strides, type_.storage_offset)
    return {symbol for number in numbers for symbol in _unknown(builder, number)}


def _paired(results: Any, fakes: Any) -> list[tuple[Value, Any]]:
    """Returns the values of nested results, each with its fake."""
    if isinstance(results, Value):
        return [(results, fakes)]
    if not isinstance(results, tuple | list):
        return []
    return [pair for result, fake in zip(results, fakes, strict=True) for pair in _paired(result, fake)]


def _followed(tree: Any, path: Sequence[tuple[str, int]]) -> tuple[Value, tuple[Tag, ...]] | None:
    """Returns the value that a key path leads to, and the steps from there; None where nothing keeps that result."""
    steps = list(path)
    while isinstance(tree, tuple) and steps and steps[0][0] == "at":
        tree = tree[steps.pop(0)[1]]
    if not isinstance(tree, Value):
        return None
    tags: list[Tag] = []
    while steps:
        name, argument = steps.pop(0)
        match name:
            case "size" | "stride":
                tags.append(Tag(name, (steps.pop(0)[1],)))
            case "storage_offset" | "truth":
                tags.append(Tag(name, ()))
            case _:
                tags.append(Tag({"at": "element"}.get(name, name), (argument,)))
    return tree, tuple(tags)


def bind_symbols(builder: Builder, node: Node, value: Value) -> None:
    """Binds each symbol of a result's type that is not known yet and that a size or a stride gives."""
    type_ = value.tensor_type
    if all(type(number) is int for number in (*type_.sizes, *type_.strides)):
        return
    for step, numbers in (("size", type_.sizes), ("stride", type_.strides)):
        for dim, number in enumerate(numbers):
            _bind(builder, node, number, value, (Tag(step, (dim,)),))
    missing = {symbol for number in (*type_.sizes, *type_.strides) for symbol in _unknown(builder, number)}
    if missing:
        names = ", ".join(sorted(symbol.name for symbol in missing))
        reason = f"the symbol {names} in the result's type {type_} cannot be read off the result"
        raise _error(node, reason, "Return the size itself from the operator")


def _unknown(builder: Builder, number: Any) -> set[sympy.Symbol]:
    if not isinstance(number, sympy.Basic):
        return set()
    return {symbol for symbol in number.free_symbols if symbol.name not in builder.known_symbols}


def _bind(builder: Builder, node: Node, expression: Any, value: Value, path: tuple[Tag, ...]) -> None:
    """Binds the one unknown symbol of what a key path leads to, where it can be solved for."""
    unknown = _unknown(builder, expression)
    if len(unknown) != 1:
        return
    symbol, origin = next(iter(unknown)), builder.origin(node)
    info = known_info(builder, symbol, builder.fakes[node])
    if expression == symbol:
        builder.emit(Bind(info, value, path, origin=origin))
    elif truth_symbol(expression) is not None:
        builder.emit(Bind(info, value, (*path, Tag("truth", ())), origin=origin))
    else:
        parts = linear_parts(expression, symbol)
        if parts is None:
            return
        factor, rest = (canonical(part) for part in parts)
        if isinstance(factor, int) and factor > 0 and rest == 0:
            builder.emit(Bind(info, value, (*path, Tag("divide", (factor,))), origin=origin))
        else:
            whole = make_symbol(builder.state.fresh_symbol("n"))
            builder.known_symbols.add(whole.name)
            builder.emit(Bind(SymbolInfo(whole.name), value, path, origin=origin))
            builder.emit(Let(info, solution(whole, *parts), origin=origin))
    builder.known_symbols.add(symbol.name)


# --- views at numbers that are read from tensors ----------------------------------------------------------------------


def derive_symbols(builder: Builder, node: Node) -> None:
    """Gives the symbols that a view at unbacked positions brings what they are: expressions of symbols known before.

    A graph has a new symbol for the size and the offset of `x[a:b]` and for the offset of `x[a]`.
    """
    if node.target not in (_SELECT, _SLICE):
        return
    fake, base = builder.fakes[node], builder.fakes[node.args[0]]  # type: ignore[index]
    dim = _argument(builder, node, 1, 0) % max(base.dim(), 1)
    size_symbol = _new_symbol(builder, fake.shape[dim]) if node.target is _SLICE else None
    offset_symbol = _new_symbol(builder, fake.storage_offset())
    if size_symbol is None and offset_symbol is None:
        return
    size, stride = builder.size(base.shape[dim]), builder.size(base.stride(dim))
    if node.target is _SELECT:
        start = from_front(_argument(builder, node, 2, 0), size)
    else:
        start = slice_start(_argument(builder, node, 2, None), size)
    if size_symbol is not None:
        count = slice_count(start, _argument(builder, node, 3, None), _argument(builder, node, 4, 1), size)
        builder.symbols[size_symbol] = sympy.sympify(count)
    if offset_symbol is not None:
        offset = total((builder.size(base.storage_offset()), product((start, stride))))
        builder.symbols[offset_symbol] = sympy.sympify(offset)


def _new_symbol(builder: Builder, number: Any) -> sympy.Symbol | None:
    """Returns the ShapeEnv's symbol that a number is, where nothing before has brought it."""
    found = getattr(getattr(number, "node", None), "expr", None)
    return found if isinstance(found, sympy.Symbol) and found not in builder.symbols else None


def fails_at_run_time(builder: Builder, node: Node) -> bool:
    """Whether a view is of an element at an unbacked position: eager checks it, so the operator itself is called."""
    if node.target is not _SELECT:
        return False
    position = _argument(builder, node, 2, 0)
    return isinstance(position, sympy.Basic) and any(symbol.name.startswith("u") for symbol in position.free_symbols)


def _argument(builder: Builder, node: Node, position: int, default: Any) -> Any:
    if position >= len(node.args):
        return default
    given = node.args[position]
    return builder.expression(builder.fakes[given] if isinstance(given, Node) else given)


def _error(node: Node, reason: str, remedy: str) -> GraphError:
    return GraphError(node.name, reason, remedy, location_of(node))
