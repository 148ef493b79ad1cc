"""What an operator's call gives: types, windows and effects, found with fake tensors and the operator's schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from fxwrap.converters.fx_values import FakeValues
from fxwrap.errors import ExpressionError, RewriteError
from fxwrap.symbolic import SymbolInfo, canonical, floor_divide, make_symbol, product, total
from fxwrap.torch_compat import (
    depends_on_data,
    fresh_fake_mode,
    is_plain_view,
    lacks_fake_rule,
    on_fake_tensors,
    operator_overload,
    storage_identity,
)
from fxwrap.wrapper_ir import (
    Effect,
    OpaqueType,
    OperatorFacts,
    Program,
    ScalarType,
    Size,
    TensorType,
    Type,
    Value,
    leaves,
    map_leaves,
    operator_facts,
    symbol_infos,
    type_symbols,
)


@dataclass(frozen=True, slots=True)
class Result:
    """One result of a call: its type, and the number of the operand whose root it shares, if it does.

    Operands are counted among the values of arguments and keywords. `plain` says that it differs from that operand in
    sizes, strides and offset alone.
    """

    type: Type
    base: int | None = None
    plain: bool = False


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What a call of an operator gives and does: a tree of `Result` (None for what is not there), its effects."""

    operator: OperatorFacts
    results: tuple[Any, ...]
    effects: tuple[Effect, ...]


class UnknownResult(RewriteError):
    """A call of which only its run says what it gives."""


class CallInference:
    """Answers what calls give in a program. Equal calls are run on fake tensors once."""

    def __init__(self, program: Program) -> None:
        self._infos = symbol_infos(program)
        self._mode = fresh_fake_mode()
        self._fakes = FakeValues(self._mode)
        self._known: dict[Any, tuple[Any, ...]] = {}
        self._ours: dict[sympy.Symbol, sympy.Symbol] = {}  # the ShapeEnv's symbols as the program's

    def call(self, target: str, arguments: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...] = ()) -> CallFacts:
        """Returns what a call gives and does.

        Args:
            target: "namespace.name.overload".
            arguments, keywords: as a line has them: values, literals, expressions, tuples for lists.

        Raises RewriteError for an operator that torch does not know, or that fails on these arguments, and
        UnknownResult for one whose results are known only when it has run.
        """
        try:
            facts = operator_facts(operator_overload(target))
        except LookupError as error:
            raise RewriteError(str(error)) from None
        operands = [leaf for leaf in leaves((arguments, keywords)) if isinstance(leaf, Value)]
        names = [value.name for value in operands]
        key = target, map_leaves((arguments, keywords), _typed), tuple(map(names.index, names))
        results = self._known.get(key)
        if results is None:
            results = self._known[key] = self._run(target, arguments, keywords, facts)
        types = [value.type for value in operands]
        types += [leaf.type for leaf in leaves(results) if isinstance(leaf, Result)]
        return CallFacts(facts, results, facts.effects([t.device for t in types if isinstance(t, TensorType)]))

    def _run(self, target: str, arguments: Any, keywords: Any, facts: OperatorFacts) -> tuple[Any, ...]:
        fakes: dict[str, Any] = {}
        names: list[str] = []

        def fake(leaf: Any) -> Any:
            if isinstance(leaf, Value):
                names.append(leaf.name)
                if leaf.name not in fakes:
                    fakes[leaf.name] = self._fake(leaf)
                return fakes[leaf.name]
            return self._number(leaf) if isinstance(leaf, sympy.Basic) else leaf

        given = _as_list(map_leaves(arguments, fake))
        named = {name: _lists(map_leaves(item, fake)) for name, item in keywords}
        try:
            with on_fake_tensors(self._mode):
                found = operator_overload(target)(*given, **named)
        except Exception as error:  # whatever an operator raises for arguments that it does not take
            if lacks_fake_rule(error):
                raise UnknownResult(f"{target} has no rule for fake tensors, so nothing says what it gives") from error
            if depends_on_data(error):
                raise UnknownResult(f"what {target} gives is known only when it has run") from error
            first, _, _ = str(error).partition("\n")
            raise RewriteError(f"{target} fails on these arguments: {first}") from error
        operands = [fakes[name] for name in names]
        results = () if facts.return_count == 0 else (found,) if facts.return_count == 1 else tuple(found)
        values = {value.name: value for value in leaves((arguments, keywords)) if isinstance(value, Value)}
        types = [values[name].type for name in names]
        return tuple([self._result(target, item, operands, types) for item in results])

    def _fake(self, value: Value) -> Any:
        for symbol in type_symbols(value.type):
            self._number(symbol)
        return self._fakes.root(Value(f"operand{len(self._known)}_{value.name}", value.type))

    def _number(self, expression: sympy.Basic) -> Any:
        for symbol in expression.free_symbols:
            number = self._fakes.symbol(self._infos.get(symbol.name, SymbolInfo(symbol.name)))
            own = getattr(getattr(number, "node", None), "expr", None)
            if isinstance(own, sympy.Symbol):
                self._ours[own] = make_symbol(symbol.name)
        return self._fakes.number(expression)

    def _result(self, target: str, found: Any, operands: list[Any], types: list[Type]) -> Any:
        if isinstance(found, tuple | list):
            return tuple([self._result(target, item, operands, types) for item in found])
        if isinstance(found, torch.Tensor):
            return self._tensor(target, found, operands, types)
        if isinstance(found, bool | torch.SymBool):
            return Result(ScalarType("bool"))
        if isinstance(found, int | torch.SymInt):
            return Result(ScalarType("int"))
        if isinstance(found, float | torch.SymFloat):
            return Result(ScalarType("float"))
        return None if found is None else Result(OpaqueType(type(found).__name__))

    def _tensor(self, target: str, found: torch.Tensor, operands: list[Any], types: list[Type]) -> Result:
        tensors = {index: item for index, item in enumerate(operands) if isinstance(item, torch.Tensor)}
        base = next((i for i, item in tensors.items() if storage_identity(item) == storage_identity(found)), None)
        offset: Size = 0
        plain = False
        if base is not None:
            type_ = types[base]
            assert isinstance(type_, TensorType)
            before = type_.storage_offset
            if type_.dtype.itemsize != found.dtype.itemsize:
                before = floor_divide(product((before, type_.dtype.itemsize)), found.dtype.itemsize)
            offset = total((before, self._size(target, found.storage_offset())))
            plain = is_plain_view(found, tensors[base])
        sizes = tuple([self._size(target, size) for size in found.shape])
        strides = tuple([self._size(target, stride) for stride in found.stride()])
        return Result(TensorType(found.dtype, sizes, strides, found.device, offset), base, plain)

    def _size(self, target: str, size: Any) -> Size:
        if type(size) is int:
            return size
        expression = size.node.expr
        unknown = [symbol for symbol in expression.free_symbols if symbol not in self._ours]
        if unknown:
            raise UnknownResult(f"the sizes that {target} gives here are known only when it has run")
        try:
            return canonical(expression, self._ours)
        except ExpressionError as error:
            raise RewriteError(f"a size that {target} gives has no form in a program: {error}") from None


def _typed(leaf: Any) -> Any:
    """Returns what a leaf of arguments means for the result; equal numbers of other types are not equal."""
    return leaf.type if isinstance(leaf, Value) else (type(leaf), leaf)


def _lists(tree: Any) -> Any:
    return tree if type(tree) is not tuple else _as_list(tree)


def _as_list(tree: tuple[Any, ...]) -> list[Any]:
    return [_as_list(item) if type(item) is tuple else item for item in tree]


Keywords = tuple[tuple[str, Any], ...]


def keyword_pairs(keywords: Mapping[str, Any]) -> Keywords:
    """Returns keyword arguments as a line has them."""
    return tuple([(name, tuples(item)) for name, item in keywords.items()])


def tuples(item: Any) -> Any:
    """Returns an argument as a line has it: lists as tuples."""
    return tuple([tuples(inner) for inner in item]) if isinstance(item, tuple | list) else item
