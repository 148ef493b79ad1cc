"""Unbacked symbols: read from tensors, bound to results of operators, and asserted.

Where the graph stores the key path of a symbol in a node's result (`meta["unbacked_bindings"]`), lowering follows it.
Otherwise it looks for the symbol in the sizes and strides of the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxwrap.lines import Assert, Bind, Let, ReadItem
from fxwrap.lowering.builder import Builder, FakeValue, node_error
from fxwrap.lowering.symbols.inputs import boolean_symbol, linear_parts, solve_linear
from fxwrap.symbolic import (
    Expression,
    SymbolInfo,
    canonicalize,
    depends_on_data,
    make_symbol,
    normalize_index,
    product,
    slice_length,
    slice_start,
    total,
)
from fxwrap.torch_compat import symbol_expression, unbacked_bindings
from fxwrap.wrapper_ir import OpaqueType, Operand, Result, ScalarType, Tag, TensorType, Value, map_leaves

_SELECT, _SLICE = torch.ops.aten.select.int, torch.ops.aten.slice.Tensor


# --- scalars read from tensors, and conditions ------------------------------------------------------------------------


def lower_item(builder: Builder, node: Node, fake: FakeValue) -> None:
    """Reads an element of a tensor as a symbol."""
    symbols, expression = builder.symbols, builder.symbols.expression(fake)
    symbol = boolean_symbol(expression) or expression
    if isinstance(symbol, sympy.Symbol) and not symbols.is_known(symbol):
        info = SymbolInfo(symbol.name, 0, 1) if symbol is not expression else symbols.info_of(symbol, fake)
    elif symbols.unknown(symbol):
        raise node_error(node, f"the number read from a tensor is {expression}, not a symbol", "Read it with .item()")
    else:  # the graph knows or asserts the number, but the read is an effect, which stays
        info = SymbolInfo(symbols.program.fresh("f" if isinstance(fake, torch.SymFloat | float) else "u"))
    symbols.define(info.name)
    builder.emit(ReadItem(info, builder.value(node.args[0]), origin=builder.origin(node)))
    if info.name.startswith("u") and info.name != str(symbol):
        _assert_equal(builder, node, make_symbol(info.name), symbol)
    builder.env[node] = expression


def is_asserted_read(node: Node) -> bool:
    """Whether a node reads a new number from a tensor; if it is known, the graph asserts it."""
    return node.target is torch.ops.aten._local_scalar_dense.default and bool(node.meta.get("unbacked_bindings"))


def _assert_equal(builder: Builder, node: Node, symbol: sympy.Symbol, expected: Expression) -> None:
    """Checks a number of a result that the graph asserts to be another: its own conditions hold after replacement."""
    message = f"Runtime assertion failed for expression Eq({symbol}, {expected}) on the result of '{node.name}'"
    expected = int(expected) if isinstance(expected, bool) else expected
    lower_assert(builder, node, canonicalize(sympy.Eq(symbol, expected)), message)


def lower_assert(builder: Builder, node: Node, condition: Expression | bool, message: str) -> None:
    """Emits the check of a condition over symbols, unless it always holds."""
    builder.env[node] = None
    if condition is not True and condition is not sympy.true:
        builder.emit(Assert(condition, message, origin=builder.origin(node)))


# --- symbols of results -----------------------------------------------------------------------------------------------


def bind_results(
    builder: Builder, node: Node, fakes: Sequence[FakeValue], results: Sequence[Result]
) -> tuple[Operand, ...]:
    """Binds each new unbacked symbol of a node's results, by key path where the graph stores one.

    `results` is one tree of values for each return of the operator. Returns the operands of the results, like
    `bind_values`. Raises GraphError for a symbol that no result determines.
    """
    symbols = builder.symbols
    unbound = {symbol for value, fake in _pairs(results, fakes) for symbol in _unbound(builder, value, fake)}
    for original, path in unbacked_bindings(node, fakes):
        target = _follow_path(results[0] if len(results) == 1 else tuple(results), path)
        expression = symbols.translate(original)
        if target is None:
            continue
        if isinstance(expression, int):
            symbol = make_symbol(symbols.program.fresh("n"))
            symbols.define(symbol.name)
            builder.emit(Bind(SymbolInfo(symbol.name), *target, origin=builder.origin(node)))
            _assert_equal(builder, node, symbol, expression)
        elif not unbound.isdisjoint(expression.free_symbols):
            _bind(builder, node, expression, *target)
    return bind_values(builder, node, fakes, results)


def bind_values(
    builder: Builder, node: Node, fakes: Sequence[FakeValue], results: Sequence[Result]
) -> tuple[Operand, ...]:
    """Binds the unbacked symbols that the results of a node determine by themselves.

    Returns the operands of the results: scalars become expressions, other results are unchanged. Raises GraphError for
    a symbol that no result determines.
    """
    scalars: dict[str, Expression] = {}
    for value, fake in _pairs(results, fakes):
        if isinstance(value.type, TensorType):
            _bind_type(builder, node, value)
        elif isinstance(value.type, ScalarType):
            scalars[value.name] = builder.symbols.expression(fake)
            _bind(builder, node, scalars[value.name], value, ())
    return tuple(map_leaves(results, lambda leaf: scalars.get(leaf.name, leaf) if leaf else leaf))


def new_values(builder: Builder, node: Node, fakes: Sequence[FakeValue]) -> tuple[Result, ...]:
    """Adds a root for each tensor, and a value for each scalar and opaque object, among the results of a node.

    Returns them in the same tuples as the fake values.
    """

    def make(fakes: Sequence[FakeValue], name: str) -> tuple[Result, ...]:
        return tuple([make_one(fake, f"{name}_{number}") for number, fake in enumerate(fakes)])

    def make_one(fake: FakeValue, name: str) -> Result:
        if isinstance(fake, tuple | list):
            return make(fake, name)
        return None if fake is None else builder.add_value(name, fake)

    return make(fakes, node.name)


def _unbound(builder: Builder, value: Value, fake: FakeValue) -> set[sympy.Symbol]:
    """Returns the symbols of a value, or of its type, that no line defines yet."""
    symbols = builder.symbols
    if isinstance(value.type, OpaqueType):
        return set()
    if not isinstance(value.type, TensorType):
        return symbols.unknown(symbols.expression(fake))
    type_ = value.type
    numbers = (*type_.sizes, *type_.strides, type_.storage_offset)
    return {symbol for number in numbers for symbol in symbols.unknown(number)}


def _pairs(results: Result | Sequence[Result], fakes: FakeValue) -> Iterator[tuple[Value, FakeValue]]:
    """Yields the values in nested results, each with its fake value."""
    if isinstance(results, Value):
        yield results, fakes
    elif isinstance(results, tuple | list):
        for result, fake in zip(results, fakes, strict=True):
            yield from _pairs(result, fake)


def _follow_path(tree: Result, path: Sequence[tuple[str, int]]) -> tuple[Value, tuple[Tag, ...]] | None:
    """Returns the value at a key path, and the tags of the remaining steps; None for an unused result."""
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


def _bind_type(builder: Builder, node: Node, value: Value) -> None:
    """Binds each unknown symbol in the sizes and strides of a result."""
    type_ = value.tensor_type
    if all(type(number) is int for number in (*type_.sizes, *type_.strides)):
        return
    for step, numbers in (("size", type_.sizes), ("stride", type_.strides)):
        for dim, number in enumerate(numbers):
            _bind(builder, node, number, value, (Tag(step, (dim,)),))
    missing = {symbol.name for number in (*type_.sizes, *type_.strides) for symbol in builder.symbols.unknown(number)}
    if missing:
        reason = f"the symbol {', '.join(sorted(missing))} in the result's type {type_} cannot be read off the result"
        raise node_error(node, reason, "Return the size itself from the operator")


def _bind(builder: Builder, node: Node, expression: Expression, value: Value, path: tuple[Tag, ...]) -> None:
    """Binds the unknown symbol of the expression at a key path, if there is one and it can be solved for."""
    symbols = builder.symbols
    unknown = symbols.unknown(expression)
    if len(unknown) != 1:
        return
    symbol, origin = next(iter(unknown)), builder.origin(node)
    info = symbols.info_of(symbol, builder.fakes[node])
    if expression == symbol:
        builder.emit(Bind(info, value, path, origin=origin))
    elif boolean_symbol(expression) is not None:
        builder.emit(Bind(info, value, (*path, Tag("truth", ())), origin=origin))
    else:
        parts = linear_parts(expression, symbol)
        if parts is None:
            return
        factor, rest = (canonicalize(part) for part in parts)
        if isinstance(factor, int) and factor > 0 and rest == 0:
            builder.emit(Bind(info, value, (*path, Tag("divide", (factor,))), origin=origin))
        else:
            whole = make_symbol(symbols.program.fresh("n"))
            symbols.define(whole.name)
            builder.emit(Bind(SymbolInfo(whole.name), value, path, origin=origin))
            builder.emit(Let(info, solve_linear(whole, *parts), origin=origin))
    symbols.define(symbol.name)


# --- views at unbacked positions --------------------------------------------------------------------------------------


def derive_symbols(builder: Builder, node: Node) -> None:
    """Derives the new symbols of a view at unbacked positions from the known symbols.

    A graph has a new symbol for the size and the offset of `x[a:b]`, and for the offset of `x[a]`.
    """
    if node.target not in (_SELECT, _SLICE):
        return
    symbols, fake, base = builder.symbols, builder.fakes[node], builder.fakes[node.args[0]]  # type: ignore[index]
    dim: int = _argument(builder, node, 1, 0) % max(base.dim(), 1)
    size_symbol = _new_symbol(builder, fake.shape[dim]) if node.target is _SLICE else None
    offset_symbol = _new_symbol(builder, fake.storage_offset())
    if size_symbol is None and offset_symbol is None:
        return
    size, stride = symbols.size(base.shape[dim]), symbols.size(base.stride(dim))
    if node.target is _SELECT:
        start = normalize_index(_argument(builder, node, 2, 0), size)
    else:
        start = slice_start(_argument(builder, node, 2, None), size)
    if size_symbol is not None:
        end, step = _argument(builder, node, 3, None), _argument(builder, node, 4, 1)
        symbols.derive(size_symbol, slice_length(start, end, step, size))
    if offset_symbol is not None:
        symbols.derive(offset_symbol, total((symbols.size(base.storage_offset()), product((start, stride)))))


def _new_symbol(builder: Builder, number: object) -> sympy.Symbol | None:
    """Returns the ShapeEnv's symbol of a number, if no earlier node has it."""
    symbol = symbol_expression(number) if isinstance(number, torch.SymInt) else None
    return symbol if isinstance(symbol, sympy.Symbol) and not builder.symbols.is_translated(symbol) else None


def is_bounds_checked_at_run_time(builder: Builder, node: Node) -> bool:
    """Whether a node selects an element at an unbacked position, or one that a dimension may not have.

    The operator itself checks the position, as in eager mode.
    """
    if node.target is not _SELECT:
        return False
    position = _argument(builder, node, 2, 0)
    if isinstance(position, int):
        base: torch.Tensor = builder.fakes[node.args[0]]  # type: ignore[index]
        return builder.symbols.may_lack(builder.symbols.size(base.shape[_argument(builder, node, 1, 0)]), position)
    return depends_on_data(position)


def _argument(builder: Builder, node: Node, position: int, default: object) -> Any:
    if position >= len(node.args):
        return default
    argument = node.args[position]
    return builder.symbols.expression(builder.fakes[argument] if isinstance(argument, Node) else argument)
