"""The metadata of emitted FX graphs: fake tensors and symbolic numbers, made from the types of a program.

Nothing is run: the types say it all, at a tenth of the cost of running the graph under a fake mode.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import sympy
import torch

from fxwrap.symbolic import SymbolInfo, evaluate, expression_kind, make_symbol, symbol_kind
from fxwrap.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    fake_tensor,
    fresh_fake_mode,
    new_symbol,
    shape_env_of,
    shape_symbols,
    symbolic_number,
)
from fxwrap.wrapper_ir import ListType, OptionalType, ScalarType, TensorType, Type, Value

_SMALLEST_HINT = 2


class FakeValues:
    """Makes the fake value of everything a program defines, in one fake mode.

    A symbol that the mode's ShapeEnv knows by name is that one; others are new ones of it, backed by their hint.
    """

    def __init__(self, mode: FakeTensorMode | None = None) -> None:
        self.mode = mode or self._own_mode()
        self._expressions: dict[sympy.Symbol, sympy.Basic] = {}
        self._numbers: dict[sympy.Basic, Any] = {}
        self._memory: dict[str, torch.Tensor] = {}  # the meta tensor behind each value, by name

    def _own_mode(self) -> FakeTensorMode | None:
        return fresh_fake_mode()

    @cached_property
    def shape_env(self) -> Any:
        """The mode's ShapeEnv, made when it is first needed: torch imports parts of Dynamo to make one."""
        return shape_env_of(self.mode or fresh_fake_mode())

    @cached_property
    def _known(self) -> dict[str, sympy.Symbol]:
        """The symbols that the ShapeEnv has, by the names that a program has for them."""
        return {name.removeprefix("z"): symbol for name, symbol in shape_symbols(self.shape_env).items()}

    # --- numbers ----------------------------------------------------------------------------------------------------

    def symbol(self, info: SymbolInfo) -> Any:
        """Returns the symbolic number that a symbol stands for."""
        return self.number(make_symbol(info.name), info)

    def number(self, expression: Any, info: SymbolInfo | None = None) -> Any:
        """Returns the symbolic number of an expression; a plain number is itself."""
        if not isinstance(expression, sympy.Basic):
            return expression
        found = self._numbers.get(expression)
        if found is None:
            known = {symbol: self._expression(symbol, info) for symbol in expression.free_symbols}
            found = symbolic_number(self.shape_env, expression.xreplace(known), expression_kind(expression))
            self._numbers[expression] = found
        return found

    def _expression(self, symbol: sympy.Symbol, info: SymbolInfo | None) -> sympy.Basic:
        """Returns the ShapeEnv's expression for a symbol of the program."""
        found = self._expressions.get(symbol)
        if found is None:
            found = self._known.get(symbol.name)
            if found is None:
                hint = _hint(symbol.name, info)
                found = new_symbol(self.shape_env, symbol.name, symbol_kind(symbol.name), hint).node.expr
            self._expressions[symbol] = found
        return found

    def define(self, symbol: sympy.Symbol, number: Any) -> None:
        """Makes a symbol stand for a number: what a `symbol.let` computes."""
        node = getattr(number, "node", None)
        self._expressions[symbol] = sympy.sympify(number) if node is None else node.expr

    def unknown(self, kind: str) -> Any:
        """Returns a new symbolic number of which nothing is known before the program runs."""
        return new_symbol(self.shape_env, "", kind, None)

    # --- tensors ----------------------------------------------------------------------------------------------------

    def given(self, value: Value, fake: FakeTensor) -> FakeTensor:
        """Takes the fake tensor that an input of the graph is known to be."""
        self._memory[value.name] = torch.empty(0, dtype=fake.dtype, device="meta").set_(
            fake.untyped_storage(), fake.storage_offset(), fake.shape, fake.stride()
        )
        return fake

    def root(self, value: Value) -> Any:
        """Returns the fake of a value with memory of its own (or of a number, or of something opaque)."""
        if not isinstance(value.type, TensorType):
            return self._other(value.type)
        sizes, strides = self._layout(value.type)
        memory = torch.empty_strided(sizes, strides, dtype=value.type.dtype, device="meta")
        return self._kept(value, memory)

    def window(self, value: Value, base: Value, offset: Any) -> Any:
        """Returns the fake of a value in the memory of another, `offset` elements (of its own type) from its start."""
        type_ = value.tensor_type
        memory = self._memory[base.name]
        sizes, strides = self._layout(type_)
        start = memory.storage_offset()
        if memory.dtype is type_.dtype:
            made = torch.as_strided(memory, sizes, strides, start + self.number(offset))
        else:
            start = start * memory.dtype.itemsize // type_.dtype.itemsize + self.number(offset)
            made = torch.empty(0, dtype=type_.dtype, device="meta")
            made.set_(memory.untyped_storage(), start, sizes, strides)
        return self._kept(value, made)

    def _kept(self, value: Value, memory: torch.Tensor) -> torch.Tensor:
        self._memory[value.name] = memory
        return memory if self.mode is None else fake_tensor(self.mode, memory, value.tensor_type.device)

    def _layout(self, type_: TensorType) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        if all(type(number) is int for number in (*type_.sizes, *type_.strides)):
            return type_.sizes, type_.strides
        return tuple([self.number(size) for size in type_.sizes]), tuple([self.number(n) for n in type_.strides])

    def _other(self, type_: Type) -> Any:
        if isinstance(type_, ScalarType):
            return self.unknown(type_.kind)
        if isinstance(type_, OptionalType):
            return self._other(type_.element) if not isinstance(type_.element, TensorType) else None
        return [] if isinstance(type_, ListType) else None


class ExampleValues(FakeValues):
    """Stands for fake values where torch's tracing, which makes them, takes too long to import.

    Tensors are on the device "meta" and in no mode; numbers are examples: a symbol's hint, or a number like any other.
    What an operator or expression refuses for these numbers raises as it does for any.
    """

    def __init__(self) -> None:
        super().__init__()
        self._examples: dict[str, Any] = {}

    def _own_mode(self) -> None:
        return None

    def number(self, expression: Any, info: SymbolInfo | None = None) -> Any:
        """Returns the value of an expression for the examples."""
        if not isinstance(expression, sympy.Basic):
            return expression
        for symbol in expression.free_symbols:
            if symbol.name not in self._examples:
                kind, hint = symbol_kind(symbol.name), info.hint if info is not None else None
                self._examples[symbol.name] = self.unknown(kind) if hint is None else hint
        return evaluate(expression, self._examples)

    def define(self, symbol: sympy.Symbol, number: Any) -> None:
        """Makes a symbol stand for a number: what a `symbol.let` computes."""
        self._examples[symbol.name] = number

    def unknown(self, kind: str) -> Any:
        """Returns a number like any other."""
        return _LIKE_ANY[kind]


_LIKE_ANY = {"int": 8, "float": 0.5, "bool": True}


def _hint(name: str, info: SymbolInfo | None) -> int | None:
    """Returns an example of an int symbol's value; None for an unbacked one."""
    if name.startswith("u"):
        return None
    if info is not None and info.hint is not None:
        return int(info.hint)
    lowest = info.lower if info is not None else None
    return max(_SMALLEST_HINT, int(lowest)) if lowest is not None else _SMALLEST_HINT
