"""Types, aliases and effects of an operator's call, inferred with fake tensors and the operator's schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import sympy
import torch

from fxwrap import wrapper_ir as ir
from fxwrap.errors import ExpressionError, RewriteError
from fxwrap.inference.fake_values import FakeCallError, FakeNumber, FakeValues, call_on_fakes, default_hint
from fxwrap.symbolic import (
    SymbolInfo,
    canonicalize,
    depends_on_data,
    floor_divide,
    make_symbol,
    product,
    slice_length,
    slice_start,
    symbol_kind,
    total,
)
from fxwrap.torch_compat import (
    OpOverload,
    bound_symbol,
    fresh_fake_mode,
    is_plain_view,
    new_symbol,
    opaque_class_name,
    operator_overload,
    storage_identity,
    symbol_expression,
)

Keywords: TypeAlias = tuple[tuple[str, object], ...]
"""Keyword arguments as a line holds them."""

_FIRST_HINT = 11
_SLICE = torch.ops.aten.slice.Tensor


@dataclass(frozen=True, slots=True)
class InferredResult:
    """One result of a call: its type, and the index of the operand whose root it shares, or None for a new root.

    Operands are counted among the values of arguments and keywords. `is_strided_view` states whether the result differs
    from that operand in sizes, strides and offset only.
    """

    type: ir.Type
    base: int | None = None
    is_strided_view: bool = False


InferredTree: TypeAlias = InferredResult | tuple["InferredTree", ...] | None
"""A return of an operator: a list is a tuple, a missing tensor is None."""


@dataclass(frozen=True, slots=True)
class InferredCall:
    """The results of an operator's call, one tree for each return of its schema, and its effects."""

    operator: ir.OperatorSchema
    results: tuple[InferredTree, ...]
    effects: tuple[ir.Effect, ...]


class UnknownResultError(RewriteError):
    """A call whose results are known only at run time."""


class CallInference:
    """Infers the results of operators' calls, one run on fake tensors for each distinct call.

    Args:
        info: returns the range and hint of a symbol, by name.
        fresh: returns a new symbol with a prefix, for a size that is known only at run time; without it, such a size
            raises UnknownResultError. With it, calls that fail on unbacked symbols run on hints of them.
    """

    def __init__(self, info: Callable[[str], SymbolInfo], fresh: Callable[[str], SymbolInfo] | None = None) -> None:
        self.definitions: dict[str, object] = {}  # the expressions of `symbol.let` lines, by the symbol's name
        self._info = info
        self._fresh = fresh
        self._mode = fresh_fake_mode()
        self._fakes = FakeValues(self._mode)
        self._cache: dict[object, tuple[InferredTree, ...]] = {}
        self._defined: set[sympy.Symbol] = set()
        self._program_symbols: dict[sympy.Symbol, sympy.Symbol] = {}  # the ShapeEnv's symbols as the program's
        self._created_symbols = False
        self._unhinted: CallInference | None = None

    @classmethod
    def for_program(cls, program: ir.Program) -> CallInference:
        """Returns an inference over the symbols of a program."""
        infos = ir.symbol_infos(program)
        return cls(lambda name: infos.get(name) or SymbolInfo(name))

    @property
    def has_symbols(self) -> bool:
        """Whether an operand so far had symbols: a call may then fail on their hints, and be right."""
        return bool(self._defined)

    def call(self, target: str, arguments: tuple[object, ...], keywords: Keywords = ()) -> InferredCall:
        """Returns the results and effects of a call.

        Args:
            target: "namespace.name.overload".
            arguments, keywords: as a line holds them: values, literals, expressions, tuples for lists.

        Raises RewriteError for an operator that torch does not know or that fails on these arguments, and
        UnknownResultError for one whose results are known only at run time.
        """
        try:
            overload = operator_overload(target)
        except LookupError as error:
            raise RewriteError(str(error)) from None
        schema, results = ir.operator_schema(overload), self.results(overload, arguments, keywords)
        leaves = ir.leaves((arguments, keywords, results))
        types = [leaf.type for leaf in leaves if isinstance(leaf, ir.Value | InferredResult)]
        return InferredCall(schema, results, schema.effects([t.device for t in types if isinstance(t, ir.TensorType)]))

    def results(
        self, operator: OpOverload, arguments: tuple[object, ...], keywords: Keywords
    ) -> tuple[InferredTree, ...]:
        """Returns the results of a call, one tree for each return of the schema. Raises as `call` does."""
        operands = [leaf for leaf in ir.leaves((arguments, keywords)) if isinstance(leaf, ir.Value)]
        names = [value.name for value in operands]
        key = operator, _cache_key(arguments), _cache_key(keywords), tuple(map(names.index, names))
        results = self._cache.get(key)
        if results is None:
            self._created_symbols = False
            part = _unbacked_slice(operator, arguments, keywords)
            results = (part,) if part is not None else self._results_without_hints(operator, arguments, keywords)
            if results is None:
                results = self._run(operator, arguments, keywords, operands)
            if not self._created_symbols:  # each call has new symbols
                self._cache[key] = results
        return results

    def _results_without_hints(
        self, operator: OpOverload, arguments: tuple[object, ...], keywords: Keywords
    ) -> tuple[InferredTree, ...] | None:
        """Returns the results of a call on unbacked symbols, if they hold for any value of these; hints are one."""
        if self._fresh is None or not any(map(_is_unbacked, ir.leaves((arguments, keywords)))):
            return None
        if self._unhinted is None:
            self._unhinted = CallInference(self._info)
            self._unhinted.definitions = self.definitions
        try:
            return self._unhinted.results(operator, arguments, keywords)
        except RewriteError:
            return None

    def _run(
        self, operator: OpOverload, arguments: tuple[object, ...], keywords: Keywords, operands: Sequence[ir.Value]
    ) -> tuple[InferredTree, ...]:
        for value in operands:
            if isinstance(value.type, ir.OpaqueType) and value.type != ir.GENERATOR:
                raise UnknownResultError(f"the results of {operator} depend on the object %{value.name}")
        fakes = {value.name: self._fake(value.type) for value in operands}

        def fake(item: object) -> object:
            if isinstance(item, tuple):
                return [fake(part) for part in item]
            return fakes[item.name] if isinstance(item, ir.Value) else self._number(item)

        try:
            positional, named = [fake(item) for item in arguments], {name: fake(item) for name, item in keywords}
            outputs = call_on_fakes(self._mode, operator, positional, named)
        except FakeCallError as error:
            raise (UnknownResultError if error.is_unknown else RewriteError)(error.reason) from error
        count = ir.operator_schema(operator).return_count
        bases = [(value.type, fakes[value.name]) for value in operands]
        outputs = () if count == 0 else (outputs,) if count == 1 else tuple(outputs)
        return tuple([self._result(operator, item, bases) for item in outputs])

    # --- from the program to torch ----------------------------------------------------------------------------------

    def _fake(self, type_: ir.Type) -> object:
        for symbol in ir.type_symbols(type_):
            self._define(symbol)
        if isinstance(type_, ir.ScalarType) and self._fresh is not None:
            return new_symbol(self._fakes.shape_env, "", type_.kind, _FIRST_HINT)
        return self._fakes.fake(type_)

    def _number(self, item: object) -> object:
        if not isinstance(item, sympy.Basic):
            return item
        for symbol in item.free_symbols:
            self._define(symbol)
        return self._fakes.number(item)

    def _define(self, symbol: sympy.Symbol) -> None:
        """Creates the ShapeEnv's symbol for a symbol of the program."""
        if symbol in self._defined:
            return
        self._defined.add(symbol)
        definition = self.definitions.get(symbol.name)
        if definition is not None:
            number = self._number(definition)
            own = self._fakes.define(symbol, number)
            if own is not number:
                self._program_symbols[symbol_expression(own)] = symbol
            return
        shape_env, kind, hint = self._fakes.shape_env, symbol_kind(symbol.name), self._hint(symbol.name)
        number = new_symbol(shape_env, symbol.name, kind, hint)
        if kind == "int":  # operators reject a size that may be negative: the hints of others do not decide min(s0, u0)
            info = self._info(symbol.name)
            bound_symbol(shape_env, number, info.lower, info.upper if hint is None else None)
        self._fakes.define(symbol, number)
        for torch_symbol in symbol_expression(number).free_symbols:
            self._program_symbols[torch_symbol] = symbol

    def _hint(self, name: str) -> int | None:
        info = self._info(name)
        if self._fresh is None:
            return default_hint(info)
        return int(info.hint if info.hint is not None else max(_FIRST_HINT + len(self._defined), info.lower or 0))

    # --- and back ---------------------------------------------------------------------------------------------------

    def _result(self, operator: OpOverload, item: object, operands: Sequence[tuple[ir.Type, object]]) -> InferredTree:
        if item is None:
            return None
        if isinstance(item, tuple | list):
            return tuple([self._result(operator, part, operands) for part in item])
        if isinstance(item, torch.Tensor):
            return self._tensor(operator, item, operands)
        kind = scalar_kind(item)
        return InferredResult(ir.OpaqueType(opaque_class_name(item)) if kind is None else ir.ScalarType(kind))

    def _tensor(
        self, operator: OpOverload, fake: torch.Tensor, operands: Sequence[tuple[ir.Type, object]]
    ) -> InferredResult:
        sizes = tuple([self._size(operator, size) for size in fake.shape])
        strides = tuple([self._size(operator, stride) for stride in fake.stride()])
        type_ = ir.TensorType(fake.dtype, sizes, strides, fake.device)
        for index, (base_type, base) in enumerate(operands):
            if isinstance(base, torch.Tensor) and storage_identity(base) == storage_identity(fake):
                assert isinstance(base_type, ir.TensorType)
                distance = self._size(operator, fake.storage_offset())
                return InferredResult(view_type(type_, base_type, distance), index, is_plain_view(fake, base))
        return InferredResult(type_)

    def _size(self, operator: OpOverload, size: FakeNumber) -> ir.Size:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = symbol_expression(size)
        for symbol in sorted(expression.free_symbols - self._program_symbols.keys(), key=str):
            if self._fresh is None:
                raise UnknownResultError(f"the sizes of the results of {operator} are known only at run time")
            self._created_symbols = True
            self._program_symbols[symbol] = new = make_symbol(self._fresh("u").name)
            self._defined.add(new)
            self._fakes.define(new, symbol)
        try:
            return canonicalize(expression, self._program_symbols)
        except ExpressionError as error:
            raise RewriteError(f"a size of the results of {operator} is no expression of the IR: {error}") from None


def _is_unbacked(item: object) -> bool:
    """Whether a number, or the type of a value, has an unbacked symbol."""
    if isinstance(item, ir.Value):
        return any(symbol.name.startswith("u") for symbol in ir.type_symbols(item.type))
    return depends_on_data(item)


def _unbacked_slice(operator: OpOverload, arguments: tuple[object, ...], keywords: Keywords) -> InferredResult | None:
    """Returns the view that a slice at unbacked positions is; torch would clamp their hints, or have a new symbol."""
    if operator is not _SLICE:
        return None
    schema = ir.operator_schema(operator)
    bound = {**dict(zip(schema.argument_names, arguments)), **dict(keywords)}
    base, positions = bound["self"], (bound.get("start"), bound.get("end"))
    symbols = {symbol.name for item in positions if isinstance(item, sympy.Basic) for symbol in item.free_symbols}
    step = bound.get("step", 1)
    if all(name.startswith("s") for name in symbols) or not isinstance(base, ir.Value) or not isinstance(step, int):
        return None
    type_, dim = base.tensor_type, bound.get("dim", 0)
    assert isinstance(dim, int)
    dim %= len(type_.sizes)
    sizes, strides = list(type_.sizes), list(type_.strides)
    start = slice_start(cast(ir.Size | None, positions[0]), sizes[dim])
    distance = product((start, strides[dim]))
    sizes[dim] = slice_length(start, cast(ir.Size | None, positions[1]), step, sizes[dim])
    strides[dim] = product((strides[dim], step))
    sliced = ir.TensorType(type_.dtype, tuple(sizes), tuple(strides), type_.device)
    return InferredResult(view_type(sliced, type_, distance), 0, True)


def view_type(type_: ir.TensorType, base: ir.TensorType, distance: ir.Size) -> ir.TensorType:
    """Returns the type of a view of a base; `distance` counts elements of the view's dtype from the base's first."""
    offset = base.storage_offset
    if base.dtype.itemsize != type_.dtype.itemsize:
        offset = floor_divide(product((offset, base.dtype.itemsize)), type_.dtype.itemsize)
    return ir.TensorType(type_.dtype, type_.sizes, type_.strides, type_.device, total((offset, distance)))


def scalar_kind(item: object) -> str | None:
    """Returns "bool", "int" or "float" for a plain or symbolic number, None for anything else."""
    if isinstance(item, bool | torch.SymBool):
        return "bool"
    if isinstance(item, int | torch.SymInt):
        return "int"
    return "float" if isinstance(item, float | torch.SymFloat) else None


def _cache_key(item: object) -> object:
    """Returns an argument as a part of a key: a value is its type, and equal numbers of two classes differ."""
    if isinstance(item, tuple):
        return tuple([_cache_key(part) for part in item])
    if isinstance(item, ir.Value):
        return item.type
    return (type(item), repr(item)) if isinstance(item, float | complex) else (type(item), item)


def keyword_pairs(keywords: Mapping[str, object]) -> Keywords:
    """Returns keyword arguments as a line holds them."""
    return tuple([(name, lists_to_tuples(item)) for name, item in keywords.items()])


def lists_to_tuples(item: object) -> Any:
    """Returns an argument as a line holds it: lists as tuples."""
    return tuple([lists_to_tuples(part) for part in item]) if isinstance(item, tuple | list) else item
