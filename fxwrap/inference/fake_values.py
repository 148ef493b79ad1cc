"""Fake tensors and symbolic numbers for the values of a program, made from their types.

No operator is run: making them from types takes a tenth of the time of fake-tensor propagation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, TypeAlias

import sympy
import torch

from fxwrap import torch_compat
from fxwrap.errors import FxwrapError
from fxwrap.symbolic import SymbolInfo, evaluate, expression_kind, make_symbol, symbol_kind
from fxwrap.wrapper_ir import ListType, OptionalType, ScalarType, Size, TensorType, Type, Value

FakeNumber: TypeAlias = int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool

_SMALLEST_HINT = 2

_MAX_TERMS = 200
"""The most parts of an expression that symbols of later ones repeat."""


class FakeValues:
    """Makes the fake value of everything a program defines, in one fake mode.

    A symbol that the mode's ShapeEnv knows by name is that one; others are new ones of it, backed by their hint, which
    `infos` declare.
    """

    def __init__(
        self, mode: torch_compat.FakeTensorMode | None = None, infos: Mapping[str, SymbolInfo] | None = None
    ) -> None:
        self.mode = mode or self._create_mode()
        self._infos = infos or {}
        self._expressions: dict[sympy.Symbol, sympy.Basic] = {}
        self._numbers: dict[sympy.Basic, FakeNumber] = {}
        self._meta_tensors: dict[str, torch.Tensor] = {}  # by the value's name

    def _create_mode(self) -> torch_compat.FakeTensorMode | None:
        return torch_compat.fresh_fake_mode()

    def with_own_names(self) -> FakeValues:
        """Returns fake values of the same mode and symbols for a graph whose values have names of their own."""
        nested = copy.copy(self)
        nested._meta_tensors = {}
        return nested

    @cached_property
    def shape_env(self) -> Any:
        """The mode's ShapeEnv, created on first use: torch imports parts of Dynamo for it."""
        return torch_compat.shape_env_of(self.mode or torch_compat.fresh_fake_mode())

    @cached_property
    def _shape_symbols(self) -> dict[str, sympy.Symbol]:
        """The ShapeEnv's symbols, by their names in a program."""
        return {name.removeprefix("z"): symbol for name, symbol in torch_compat.shape_symbols(self.shape_env).items()}

    # --- numbers ----------------------------------------------------------------------------------------------------

    def symbol(self, info: SymbolInfo) -> Any:
        """Returns the symbolic number of a symbol."""
        return self.number(make_symbol(info.name), info)

    def number(self, expression: object, info: SymbolInfo | None = None) -> Any:
        """Returns the symbolic number of an expression; a plain number is itself."""
        if not isinstance(expression, sympy.Basic):
            return expression
        number = self._numbers.get(expression)
        if number is None:
            symbols = {symbol: self._expression(symbol, info) for symbol in expression.free_symbols}
            renamed = expression.xreplace(symbols)
            number = torch_compat.symbolic_number(self.shape_env, renamed, expression_kind(expression))
            self._numbers[expression] = number
        return number

    def _expression(self, symbol: sympy.Symbol, info: SymbolInfo | None) -> sympy.Basic:
        """Returns the ShapeEnv's expression for a symbol of the program."""
        expression = self._expressions.get(symbol)
        if expression is None:
            expression = self._shape_symbols.get(symbol.name)
            if expression is None:
                hint = default_hint(info or self._infos.get(symbol.name) or SymbolInfo(symbol.name))
                number = torch_compat.new_symbol(self.shape_env, symbol.name, symbol_kind(symbol.name), hint)
                expression = torch_compat.symbol_expression(number)
            self._expressions[symbol] = expression
        return expression

    def define(self, symbol: sympy.Symbol, number: Any) -> Any:
        """Defines a symbol as a number, such as the one that a `symbol.let` computes; returns the number.

        That is a symbol of its own where the expression is long: those of later symbols would repeat it, and torch
        takes minutes to compare nested extrema, such as offsets in memory pools.
        """
        node = getattr(number, "node", None)
        expression = sympy.sympify(number) if node is None else torch_compat.symbol_expression(number)
        parts = islice(sympy.preorder_traversal(expression), _MAX_TERMS, None)
        if isinstance(number, torch.SymInt) and next(parts, None) is not None:
            bounds, hint = torch_compat.symbol_bounds(number), torch_compat.symbol_hint(number)
            hint = None if hint is None else int(hint)
            number = torch_compat.new_symbol(self.shape_env, symbol.name, "int", hint)
            torch_compat.bound_symbol(self.shape_env, number, *bounds)
            expression = torch_compat.symbol_expression(number)
        self._expressions[symbol] = expression
        return number

    def unbacked_number(self, kind: str) -> FakeNumber:
        """Returns a new unbacked symbol of a kind."""
        number: FakeNumber = torch_compat.new_symbol(self.shape_env, "", kind, None)
        return number

    # --- tensors ----------------------------------------------------------------------------------------------------

    def add_input(self, value: Value, fake: torch_compat.FakeTensor) -> torch_compat.FakeTensor:
        """Records the fake tensor of an input of the graph, and returns it."""
        self._meta_tensors[value.name] = torch.empty(0, dtype=fake.dtype, device="meta").set_(
            fake.untyped_storage(), fake.storage_offset(), fake.shape, fake.stride()
        )
        return fake

    def fake(self, type_: Type) -> Any:
        """Returns a fake value of a type, with a new storage if it is a tensor; opaque values are None."""
        match type_:
            case TensorType():
                return self._on_device(self._empty(type_), type_)
            case ScalarType():
                return self.unbacked_number(type_.kind)
            case OptionalType():
                return None if isinstance(type_.element, TensorType) else self.fake(type_.element)
            case _:
                return [] if isinstance(type_, ListType) else None

    def root(self, value: Value) -> Any:
        """Returns the fake of a value that is a root (or a number, or opaque)."""
        if not isinstance(value.type, TensorType):
            return self.fake(value.type)
        return self._register(value, self._empty(value.type))

    def view(self, value: Value, base: Value, offset: Size) -> torch.Tensor:
        """Returns the fake of a view, `offset` elements (of the view's dtype) from the first element of its base."""
        type_ = value.tensor_type
        meta = self._meta_tensors[base.name]
        sizes, strides = self._layout(type_)
        start = meta.storage_offset()
        if meta.dtype is type_.dtype:
            return self._register(value, torch.as_strided(meta, sizes, strides, start + self.number(offset)))
        start = start * meta.dtype.itemsize // type_.dtype.itemsize + self.number(offset)
        view = torch.empty(0, dtype=type_.dtype, device="meta")
        return self._register(value, view.set_(meta.untyped_storage(), start, sizes, strides))

    def _empty(self, type_: TensorType) -> torch.Tensor:
        sizes, strides = self._layout(type_)
        return torch.empty_strided(sizes, strides, dtype=type_.dtype, device="meta")

    def _register(self, value: Value, meta: torch.Tensor) -> torch.Tensor:
        self._meta_tensors[value.name] = meta
        return self._on_device(meta, value.tensor_type)

    def _on_device(self, meta: torch.Tensor, type_: TensorType) -> torch.Tensor:
        return meta if self.mode is None else torch_compat.fake_tensor(self.mode, meta, type_.device)

    def _layout(self, type_: TensorType) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple([self.number(size) for size in type_.sizes]), tuple([self.number(n) for n in type_.strides])


class ExampleValues(FakeValues):
    """Meta tensors and plain numbers in place of fake values, where importing torch's tracing takes too long.

    Tensors are in no fake mode. A number is its symbol's hint, or a constant of its kind; an operator or expression
    that rejects these numbers raises as usual.
    """

    def __init__(self) -> None:
        super().__init__()
        self._examples: dict[str, Any] = {}

    def _create_mode(self) -> None:
        return None

    def number(self, expression: object, info: SymbolInfo | None = None) -> Any:
        """Returns the value of an expression for the examples."""
        if not isinstance(expression, sympy.Basic):
            return expression
        for symbol in expression.free_symbols:
            if symbol.name not in self._examples:
                kind, hint = symbol_kind(symbol.name), info.hint if info is not None else None
                self._examples[symbol.name] = self.unbacked_number(kind) if hint is None else hint
        return evaluate(expression, self._examples)

    def define(self, symbol: sympy.Symbol, number: object) -> object:
        """Defines a symbol as a number, such as the one that a `symbol.let` computes; returns the number."""
        self._examples[symbol.name] = number
        return number

    def unbacked_number(self, kind: str) -> FakeNumber:
        """Returns a constant of a kind."""
        return {"int": 8, "float": 0.5, "bool": True}[kind]


def default_hint(info: SymbolInfo) -> int | None:
    """Returns a hint for an int symbol: the one that is known, else its smallest value; None for an unbacked symbol."""
    if info.name.startswith("u"):
        return None
    if info.hint is not None:
        return int(info.hint)
    return _SMALLEST_HINT if info.lower is None else max(_SMALLEST_HINT, int(info.lower))


class FakeCallError(FxwrapError):
    """A call that fails on fake tensors.

    Fields: `reason` names the operator and the error; `remedy` says what to do; `is_unknown` states whether the
    results cannot be inferred, although the call may be right.
    """

    def __init__(self, reason: str, remedy: str, *, is_unknown: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        self.is_unknown = is_unknown


def explain_fake_call(target: object, error: Exception) -> FakeCallError:
    """Returns the explanation of an exception that a call on fake tensors raised."""
    if torch_compat.is_missing_fake_impl(error):
        name = torch_compat.torch_schema(target).name if isinstance(target, torch_compat.OpOverload) else str(target)
        remedy = f"Register one with torch.library.register_fake({name!r})"
        return FakeCallError(f"the operator {name} has no fake implementation", remedy, is_unknown=True)
    if torch_compat.is_data_dependent_error(error):
        reason = f"the results of {target} are known only at run time"
        return FakeCallError(reason, "Pass operands from which they follow", is_unknown=True)
    message = str(error).partition("\n")[0]
    return FakeCallError(
        f"{target} fails on these inputs: {message}", "Correct the call or its inputs", is_unknown=False
    )


def call_on_fakes(
    mode: torch_compat.FakeTensorMode,
    target: Callable[..., object],
    arguments: Sequence[object],
    keywords: Mapping[str, object],
) -> Any:
    """Returns the result of a call on a mode's fake tensors. Raises FakeCallError if the call fails."""
    try:
        # Some operators reject inputs that require gradients.
        with torch_compat.in_dispatched_fake_mode(mode), torch.no_grad():
            try:
                return target(*arguments, **keywords)
            except Exception as error:  # noqa: BLE001 - an operator's own
                return torch_compat.infer_despite_reads(error, target, arguments, keywords)
    except Exception as error:  # an operator may raise anything
        raise explain_fake_call(target, error) from error
