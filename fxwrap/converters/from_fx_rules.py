"""What calls of operators give: found by their rules for fake tensors, on tensors of the types that operands have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from fxwrap.errors import FxwrapError
from fxwrap.symbolic import SymbolInfo, canonical, expression_kind, make_symbol, symbol_kind
from fxwrap.torch_compat import (
    OpOverload,
    fake_tensor,
    fresh_fake_mode,
    lacks_fake_rule,
    new_symbol,
    storage_identity,
    symbolic_number,
)
from fxwrap.wrapper_ir import OpaqueType, ScalarType, Size, TensorType, Type, Value

_FIRST_HINT = 11


class RuleError(FxwrapError):
    """An operator whose rule for fake tensors fails; with `may_be_right`, perhaps only since sizes are unknown."""

    def __init__(self, reason: str, *, may_be_right: bool) -> None:
        super().__init__(reason)
        self.may_be_right = may_be_right


@dataclass(frozen=True, slots=True)
class Given:
    """One result of a call: its type, as if it were a root, and whose memory it is.

    `operand` is the position of that operand among all leaves of arguments and keywords, None for memory of its own;
    `start` the distance from the first element of that operand to its own, in elements of its own type.
    """

    type: Type
    operand: int | None = None
    start: Size = 0


class Rules:
    """Runs operators' rules in a fake mode of its own, once for each different call.

    `info` says what is known of a symbol by name, `fresh` gives a new symbol for a number that only a run knows.
    """

    def __init__(self, info: Callable[[str], SymbolInfo], fresh: Callable[[str], SymbolInfo]) -> None:
        self.mode = fresh_fake_mode()
        self.definitions: dict[str, Any] = {}  # what `symbol.let` lines say of symbols
        self._info = info
        self._fresh = fresh
        self._known: dict[Any, tuple[Any, ...]] = {}
        self._numbers: dict[sympy.Basic, Any] = {}
        self._torchs: dict[sympy.Symbol, sympy.Basic] = {}  # the program's symbols in the mode's ShapeEnv
        self._ours: dict[sympy.Symbol, sympy.Symbol] = {}  # and back
        self._new = False

    def results(
        self, operator: OpOverload, arguments: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...]
    ) -> tuple[Any, ...]:
        """Returns what a call gives: one tree a return of the schema, of Given or None.

        Raises RuleError where the rule fails.
        """
        key = (operator, _frozen(arguments), _frozen(keywords))
        found = self._known.get(key)
        if found is None:
            self._new = False
            found = self._run(operator, arguments, keywords)
            if not self._new:  # numbers that a run makes are new ones each time
                self._known[key] = found
        return found

    def _run(
        self, operator: OpOverload, arguments: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...]
    ) -> tuple[Any, ...]:
        operands: dict[int, int] = {}
        count = 0

        def fake(item: Any) -> Any:
            nonlocal count
            if isinstance(item, tuple):
                return [fake(part) for part in item]
            count += 1
            if not isinstance(item, Value):
                return self._number(item)
            made = self._fake(item.type)
            if isinstance(made, torch.Tensor):
                operands.setdefault(storage_identity(made), count - 1)
            return made

        try:
            positional = [fake(item) for item in arguments]
            named = {name: fake(item) for name, item in keywords}
            with self.mode, torch.no_grad():
                given = operator(*positional, **named)
        except Exception as error:  # whatever a rule raises
            if lacks_fake_rule(error):
                raise RuleError(f"{operator} has no rule for fake tensors", may_be_right=True) from error
            reason = f"{operator} does not take these operands: {error}"
            raise RuleError(reason, may_be_right=bool(self._numbers)) from error
        returns = len(operator._schema.returns)
        results = () if returns == 0 else (given,) if returns == 1 else tuple(given)
        return tuple([self._given(item, operands) for item in results])

    # --- from the program to torch ----------------------------------------------------------------------------------

    def _fake(self, type_: Type) -> Any:
        if isinstance(type_, ScalarType):
            return new_symbol(self._shape_env, "", type_.kind, _FIRST_HINT)
        if not isinstance(type_, TensorType):
            return None
        sizes = [self._number(size) for size in type_.sizes]
        strides = [self._number(stride) for stride in type_.strides]
        memory = torch.empty_strided(sizes, strides, dtype=type_.dtype, device="meta")
        return fake_tensor(self.mode, memory, type_.device)

    @property
    def _shape_env(self) -> Any:
        return self.mode.shape_env

    def _number(self, expression: Any) -> Any:
        if not isinstance(expression, sympy.Basic):
            return expression
        found = self._numbers.get(expression)
        if found is None:
            known = {symbol: self._symbol(symbol) for symbol in expression.free_symbols}
            found = symbolic_number(self._shape_env, expression.xreplace(known), expression_kind(expression))
            self._numbers[expression] = found
        return found

    def _symbol(self, symbol: sympy.Symbol) -> sympy.Basic:
        """Returns a symbol as the ShapeEnv has it: backed by a hint, so that no rule fails for want of one."""
        found = self._torchs.get(symbol)
        if found is None:
            definition = self.definitions.get(symbol.name)
            if definition is not None:
                number = self._number(definition)
                found = number.node.expr if hasattr(number, "node") else sympy.sympify(number)
            else:
                info = self._info(symbol.name)
                hint = info.hint if info.hint is not None else max(_FIRST_HINT + len(self._torchs), info.lower or 0)
                made = new_symbol(self._shape_env, symbol.name, symbol_kind(symbol.name), int(hint))
                found = made.node.expr
                for inner in found.free_symbols:
                    self._ours[inner] = symbol
            self._torchs[symbol] = found
        return found

    # --- and back ---------------------------------------------------------------------------------------------------

    def _given(self, item: Any, operands: Mapping[int, int]) -> Any:
        if item is None:
            return None
        if isinstance(item, tuple | list):
            return tuple([self._given(part, operands) for part in item])
        if isinstance(item, torch.Tensor):
            type_ = TensorType(item.dtype, self._sizes(item.shape), self._sizes(item.stride()), item.device)
            operand = operands.get(storage_identity(item))
            return Given(type_, operand, 0 if operand is None else self._size(item.storage_offset()))
        for kind, classes in _SCALARS.items():
            if isinstance(item, classes):
                return Given(ScalarType(kind))
        return Given(OpaqueType(type(item).__name__))

    def _sizes(self, numbers: Any) -> tuple[Size, ...]:
        return tuple([self._size(number) for number in numbers])

    def _size(self, number: Any) -> Any:
        node = getattr(number, "node", None)
        if node is None:
            return number
        for symbol in sorted(node.expr.free_symbols, key=str):
            if symbol not in self._ours:
                self._new = True
                self._ours[symbol] = made = make_symbol(self._fresh("u").name)
                self._torchs[made] = symbol
        return canonical(node.expr, self._ours)


_SCALARS: Mapping[str, tuple[type, ...]] = {
    "bool": (bool, torch.SymBool), "int": (int, torch.SymInt), "float": (float, torch.SymFloat),
}  # fmt: skip


def _frozen(item: Any) -> Any:
    """Returns an operand as a key: a value by its type, numbers apart by their class."""
    if isinstance(item, tuple):
        return tuple([_frozen(part) for part in item])
    if isinstance(item, Value):
        type_ = item.type
        if isinstance(type_, TensorType):
            return "value", type_.dtype, type_.sizes, type_.strides, type_.device
        return "value", type_
    return (type(item), repr(item)) if isinstance(item, float | complex) else (type(item), item)
