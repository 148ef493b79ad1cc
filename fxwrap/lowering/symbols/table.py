"""The symbols of a graph's ShapeEnv as symbols and expressions of the program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import sympy
import torch

from fxwrap.errors import GraphError
from fxwrap.loop_ir import Kernel
from fxwrap.lowering.symbols.equalities import Replacements, apply_replacements, solve_equalities
from fxwrap.names import NameAllocator
from fxwrap.symbolic import (
    Expression,
    SymbolInfo,
    bounds,
    canonicalize,
    evaluate_size,
    expression_kind,
    make_symbol,
    simplify_by_ranges,
)
from fxwrap.torch_compat import (
    find_shape_env,
    guarded_bounds,
    guarded_equalities,
    is_opaque,
    is_positive,
    opaque_class_name,
    symbol_bounds,
    symbol_expression,
    symbol_hint,
    symbolic_number,
)
from fxwrap.wrapper_ir import OpaqueType, ScalarType, Size, TensorType, Type

SymbolicNumber = torch.SymInt | torch.SymFloat | torch.SymBool

_Bounds: TypeAlias = "Mapping[sympy.Basic, tuple[int | None, int | None]]"


class ProgramSymbols:
    """The names of a program's symbols, and the ranges and hints of those that are defined.

    `ranges` and `hints` are the caller's choices by name; they replace those of the ShapeEnv. `least` has lower bounds
    of the ShapeEnv's symbols by name, which replace its own.
    """

    def __init__(
        self, ranges: Mapping[str, tuple[int, int]], hints: Mapping[str, int], least: Mapping[str, int]
    ) -> None:
        self.ranges = ranges
        self.hints = hints
        self.least = least
        self.infos: dict[str, SymbolInfo] = {}
        self._names = NameAllocator()

    def fresh(self, prefix: str) -> str:
        """Returns an unused symbol name with this prefix, and reserves it."""
        return self._names.create_numbered(prefix)

    def unique(self, name: str) -> str:
        """Returns this symbol name, or a fresh one with its prefix if it is used, and reserves it."""
        if name in self._names.used:
            return self.fresh(name.rstrip("0123456789"))
        self._names.used.add(name)
        return name

    def add(self, name: str, number: object) -> SymbolInfo:
        """Records the range and the hint of a symbol: the caller's choice, or those of a symbolic number."""
        lower, upper = self.ranges.get(name) or symbol_bounds(number, self.least)  # type: ignore[arg-type]
        hint = self.hints.get(name, symbol_hint(number))  # type: ignore[arg-type]
        if hint is not None:
            hint = hint if lower is None else max(hint, lower)
            hint = hint if upper is None else min(hint, upper)
        info = self.infos[name] = SymbolInfo(name, lower, upper, hint)
        return info


class GraphSymbols:
    """Translates the numbers of one graph's ShapeEnv; knows which symbols the lines so far define.

    A block also knows the symbols of the enclosing graph, `outer`.
    """

    def __init__(self, program: ProgramSymbols, outer: GraphSymbols | None = None) -> None:
        self.program = program
        self._expressions: dict[sympy.Symbol, Expression] = {} if outer is None else dict(outer._expressions)
        self._known: set[str] = set() if outer is None else set(outer._known)
        self._replacements: dict[sympy.Basic, sympy.Symbol] = {} if outer is None else outer._replacements
        self._inputs: frozenset[sympy.Basic] = frozenset()
        self._simplified: dict[sympy.Basic, sympy.Basic | int] = {}
        self._guarded_bounds: _Bounds | None = None
        self._equalities: Replacements = {}
        self._used: dict[sympy.Basic, sympy.Basic] = {}

    # --- defined symbols --------------------------------------------------------------------------------------------

    def define(self, name: str) -> None:
        """Records that a line defines a symbol."""
        self._known.add(name)

    def is_known(self, symbol: sympy.Symbol) -> bool:
        """Whether a line, or an enclosing graph, defines a symbol of the program."""
        return symbol.name in self._known

    def unknown(self, expression: object) -> set[sympy.Symbol]:
        """Returns the symbols of an expression that no line defines yet."""
        if not isinstance(expression, sympy.Basic):
            return set()
        return {symbol for symbol in expression.free_symbols if symbol.name not in self._known}

    # --- expressions ------------------------------------------------------------------------------------------------

    def expression(self, number: object) -> Expression:
        """Returns a symbolic number as an expression over the program's symbols; other numbers are unchanged."""
        return self.translate(symbol_expression(number)) if isinstance(number, SymbolicNumber) else number

    def translate(self, expression: sympy.Basic) -> Expression:
        """Returns a ShapeEnv's expression as one over the program's symbols."""
        if self._replacements and not isinstance(expression, sympy.Symbol):
            expression = expression.subs(self._replacements)
        for symbol in expression.free_symbols:
            if symbol not in self._expressions:
                # zf0 becomes f0 and zuf0 uf0; two blocks may define the same symbol, the program's are distinct
                self._expressions[symbol] = make_symbol(self.program.unique(symbol.name.removeprefix("z")))
        return canonicalize(expression, self._expressions)

    def is_translated(self, symbol: sympy.Symbol) -> bool:
        """Whether a ShapeEnv's symbol already has an expression over the program's symbols."""
        return symbol in self._expressions

    def derive(self, symbol: sympy.Symbol, expression: Expression) -> None:
        """Defines a ShapeEnv's symbol as an expression over the program's symbols."""
        self._expressions[symbol] = sympy.sympify(expression)

    def replace(self, expression: sympy.Basic, symbol: sympy.Symbol) -> None:
        """Translates a ShapeEnv's expression to a symbol of the program, wherever it occurs."""
        self._expressions[symbol] = symbol
        self._replacements[expression] = symbol

    def size(self, number: int | torch.SymInt) -> Size:
        """Returns a size or stride over the program's symbols, simplified by the guards of the graph and their ranges.

        A symbolic size with one possible value is that int: a guard may restrict `s0//2` of a broadcast to 1.
        """
        if isinstance(number, int):
            return number
        expression = symbol_expression(number)
        if isinstance(expression, sympy.Symbol):
            return self.translate(expression)
        if expression not in self._simplified:
            self._simplified[expression] = self._simplify(number, expression)
        simplified = self._simplified[expression]
        if isinstance(simplified, int):
            return simplified
        translated = self.translate(simplified)
        return translated if expression in self._inputs else simplify_by_ranges(translated, self.program.infos)

    def replace_guarded(self, number: SymbolicNumber) -> None:
        """Translates each symbol for which the guards of the ShapeEnv of a number state a value to that value.

        Raises GraphError if the caller's range of the symbol excludes the value.
        """
        self._solve_guards(number)
        for symbol, value in self._equalities.items():
            if isinstance(symbol, sympy.Symbol) and value.is_Integer:
                lower, upper = self.program.ranges.get(symbol.name, (value, value))
                if not lower <= value <= upper:
                    excluded = f"{symbol} is {value} by the guards of the graph, but option 'symbol_ranges' has"
                    remedy = f"Leave {symbol} out of the option, or trace the graph without these guards"
                    raise GraphError("", f"{excluded} ({lower}, {upper})", remedy)
                self._expressions[symbol] = value

    def preserve(self, expressions: Iterable[sympy.Basic]) -> None:
        """Records expressions of the inputs, which determine symbols and are simplified to integers only."""
        self._inputs = frozenset(expressions)

    def _simplify(self, number: torch.SymInt, expression: sympy.Expr) -> sympy.Basic | int:
        """Returns a symbolic size as the graph's guards simplify it."""
        bounds = self._solve_guards(number)
        simplified = apply_replacements(expression, self._equalities)
        if simplified != expression and (
            simplified.is_Integer or not (expression in self._inputs or self._replacements)
        ):
            used = {old: new for old, new in self._equalities.items() if expression.has(old)}
            self._used.update(used)
            return int(simplified) if simplified.is_Integer else simplified
        value = self._only_value(number, bounds)
        return expression if value is None else value

    def _solve_guards(self, number: SymbolicNumber) -> _Bounds:
        """Solves the equalities of the guards of a number's ShapeEnv, once; returns the bounds that its guards set."""
        if self._guarded_bounds is None:
            shape_env = find_shape_env(number)
            self._guarded_bounds = guarded_bounds(shape_env)
            if shape_env is not None:
                equalities = guarded_equalities(shape_env)
                self._equalities = solve_equalities(equalities, functools.partial(is_positive, shape_env))
        return self._guarded_bounds

    def used_equalities(self) -> list[tuple[Expression, Expression]]:
        """Returns both sides of the equalities of the graph's guards by which sizes were simplified so far."""
        return [(self.translate(old), self.translate(new)) for old, new in self._used.items()]

    def _only_value(self, number: torch.SymInt, guarded: _Bounds) -> int | None:
        """Returns the only possible value of a symbolic size, or None."""
        low, high = symbol_bounds(number)
        guarded_low, guarded_high = guarded.get(symbol_expression(number), (None, None))
        lower = max([int(item) for item in (low, guarded_low) if item is not None], default=None)
        upper = min([int(item) for item in (high, guarded_high) if item is not None], default=None)
        return lower if lower == upper else None

    # --- ranges and hints -------------------------------------------------------------------------------------------

    def info(self, number: object) -> SymbolInfo:
        """Returns the range and the hint of a symbolic number. Raises GraphError if it is not a symbol."""
        symbol = self.expression(number)
        if not isinstance(symbol, sympy.Symbol):
            raise GraphError("", f"{symbol} is not a symbol", "Pass sizes as plain symbols")
        return self.program.add(symbol.name, number)

    def info_of(self, symbol: sympy.Symbol, number: object) -> SymbolInfo:
        """Returns the range and the hint of a symbol of the program; `number` is a fake value with its ShapeEnv."""
        if symbol.name in self.program.infos:
            return self.program.infos[symbol.name]
        original = next((key for key, expression in self._expressions.items() if expression == symbol), None)
        shape_env = find_shape_env(number)
        if original is None or shape_env is None:
            return SymbolInfo(symbol.name)
        return self.program.add(symbol.name, symbolic_number(shape_env, original, expression_kind(symbol)))

    def hints(self, hint: Callable[[Size], int]) -> dict[str, int | float]:
        """Returns typical values of the program's symbols by name; those of `hint` where the ShapeEnv has none."""
        guesses: dict[str, int | float] = {
            str(expression): hint(expression) for expression in self._expressions.values()
        }
        return guesses | {name: info.hint for name, info in self.program.infos.items() if info.hint is not None}

    # --- types ------------------------------------------------------------------------------------------------------

    def tensor_type(self, fake: torch.Tensor, offset: Size = 0) -> TensorType:
        """Returns the type of a fake tensor whose first element is at `offset` in its root, in elements."""
        if fake.layout is not torch.strided:
            remedy = "Only strided tensors are compiled: call the operator outside of the compiled function"
            raise GraphError("", f"a tensor has the layout {fake.layout}", remedy)
        strides = tuple([number if type(number) is int else self.size(number) for number in fake.stride()])
        return TensorType(fake.dtype, self.sizes(fake), strides, fake.device, offset)

    def sizes(self, fake: torch.Tensor) -> tuple[Size, ...]:
        """Returns the sizes of a fake tensor."""
        return tuple([number if type(number) is int else self.size(number) for number in fake.shape])

    def may_lack(self, size: Size, index: int = 0) -> bool:
        """Whether the ranges of symbols allow that a dimension of this size has no element at an index."""
        lower, _ = bounds(size, self.program.infos)
        return lower is None or lower < (index + 1 if index >= 0 else -index)

    def type_of(self, fake: object) -> Type:
        """Returns the type of any fake value."""
        if isinstance(fake, torch.Tensor):
            return self.tensor_type(fake)
        if is_opaque(fake):
            return OpaqueType(opaque_class_name(fake))
        if isinstance(fake, bool | torch.SymBool):
            return ScalarType("bool")
        if isinstance(fake, int | torch.SymInt):
            return ScalarType("int")
        if isinstance(fake, float | torch.SymFloat):
            return ScalarType("float")
        return OpaqueType(opaque_class_name(fake))


_UNBACKED_HINT, _MIN_UNBACKED_HINT = 8192, 8
"""The hint of an unbacked symbol, and the least one where the buffers of a kernel would be large."""
_MAX_HINTED_BYTES = 2**30
"""The total size of a kernel's buffers at unbacked hints: autotuning allocates them."""


@dataclass(frozen=True, eq=False)
class SizeHints:
    """A function from a size to its value for the sizes that the graph was traced with, at least 0.

    The hint of a symbol without one is `default`, clamped to the symbol's range.
    """

    symbols: ProgramSymbols
    default: int = _UNBACKED_HINT

    def __call__(self, size: Size) -> int:
        if isinstance(size, int):
            return size
        values = {symbol.name: _symbol_hint(self.symbols, symbol.name, self.default) for symbol in size.free_symbols}
        return max(evaluate_size(size, values), 0)

    def of_kernel(self, kernel: Kernel, formulas: Mapping[sympy.Symbol, sympy.Basic] | None = None) -> KernelHints:
        """Returns the hints of a kernel, some of whose symbols stand for `formulas`."""
        extents = [item.extent for item in (*kernel.inputs, *kernel.outputs)]
        if not kernel.symbols and all(isinstance(extent, int) for extent in extents):
            return KernelHints()
        names = sorted({*self.symbols.infos, *self.symbols.hints})
        values = [(name, _symbol_hint(self.symbols, name, self.default)) for name in names]
        return KernelHints(tuple(values), self.default, tuple((formulas or {}).items()))


@dataclass(frozen=True)
class KernelHints:
    """`SizeHints` of one kernel, as data: what follows from equal kernels and equal hints is computed once.

    Fields: `values` of symbols by name, `default` of others, and `formulas`, the sizes that symbols stand for.
    """

    values: tuple[tuple[str, int], ...] = ()
    default: int = _UNBACKED_HINT
    formulas: tuple[tuple[sympy.Symbol, sympy.Basic], ...] = ()

    def __call__(self, size: Size) -> int:
        size = substitute_formulas(size, dict(self.formulas))
        if isinstance(size, int):
            return size
        values = dict.fromkeys([symbol.name for symbol in size.free_symbols], self.default) | dict(self.values)
        return max(evaluate_size(size, values), 0)


def _symbol_hint(symbols: ProgramSymbols, name: str, default: int) -> int:
    info = symbols.infos.get(name)
    if info is not None and info.hint is not None:
        return int(info.hint)
    default = symbols.hints.get(name, default)
    if info is None:
        return default
    lower = info.lower if isinstance(info.lower, int) else 0
    return max(min(default, info.upper) if isinstance(info.upper, int) else default, lower)


def substitute_formulas(size: Size, formulas: Mapping[sympy.Symbol, sympy.Basic]) -> Size:
    """Returns a size with the symbols of a kernel's hoisted expressions replaced by these expressions."""
    if not formulas or isinstance(size, int):
        return size
    substituted: Size = canonicalize(size.xreplace(dict(formulas)))
    return substituted


def kernel_size_hints(
    symbols: ProgramSymbols, kernel: Kernel, formulas: Mapping[sympy.Symbol, sympy.Basic]
) -> KernelHints:
    """Returns the hints of a kernel's sizes; the hint of unbacked symbols is smaller if its buffers would be large."""
    buffers = [(substitute_formulas(item.extent, formulas), item.dtype) for item in (*kernel.inputs, *kernel.outputs)]
    default = _UNBACKED_HINT
    while True:
        hint = SizeHints(symbols, default)
        bytes_ = sum(hint(size) * dtype.itemsize for size, dtype in buffers)
        if default == _MIN_UNBACKED_HINT or bytes_ <= _MAX_HINTED_BYTES:
            return hint.of_kernel(kernel, formulas)
        default //= 2
