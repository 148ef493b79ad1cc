"""Typical values of symbolic sizes, for decisions that correctness does not depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import sympy

from fxwrap.loop_ir import Kernel
from fxwrap.lowering.symbols.table import ProgramSymbols
from fxwrap.symbolic import Size, canonicalize, evaluate

_UNBACKED_HINT, _MIN_UNBACKED_HINT = 8192, 8
"""The hint of an unbacked symbol, and the least one where the buffers of a kernel would be large."""
_MAX_HINTED_BYTES = 2**30
"""The total size of a kernel's buffers at unbacked hints: autotuning allocates them."""


def size_hints(symbols: ProgramSymbols, default: int = _UNBACKED_HINT) -> Callable[[Size], int]:
    """Returns a function from a size to its value for the sizes that the graph was traced with.

    The hint of a symbol without one is `default`, clamped to the symbol's range.
    """

    def hint(size: Size) -> int:
        if isinstance(size, int):
            return size
        values = {symbol.name: _symbol_hint(symbols, symbol.name, default) for symbol in size.free_symbols}
        return max(int(evaluate(size, values)), 0)

    return hint


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
) -> Callable[[Size], int]:
    """Returns the hints of a kernel's sizes; the hint of unbacked symbols is smaller if its buffers would be large."""
    buffers = [(substitute_formulas(item.extent, formulas), item.dtype) for item in (*kernel.inputs, *kernel.outputs)]
    default = _UNBACKED_HINT
    while True:
        hint = size_hints(symbols, default)
        bytes_ = sum(hint(size) * dtype.itemsize for size, dtype in buffers)
        if default == _MIN_UNBACKED_HINT or bytes_ <= _MAX_HINTED_BYTES:
            return lambda size: hint(substitute_formulas(size, formulas))
        default //= 2
