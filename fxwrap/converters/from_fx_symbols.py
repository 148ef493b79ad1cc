"""The names of symbols while graphs are read back, and the numbers that torch's metadata says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch

from fxwrap.symbolic import SymbolInfo, canonical, expression_kind, is_symbol_name, make_symbol
from fxwrap.torch_compat import symbol_bounds, symbol_hint, symbolic_number
from fxwrap.wrapper_ir import TensorType

_PREFIXES = {"int": "u", "float": "uf", "bool": "b"}


class Symbols:
    """Names for symbols: `infos` says what the emitted module knows of each, `claimed` which names nodes have.

    Names that more than one node has are `ambiguous`: graphs were joined. `defined` are those that lines define.
    """

    def __init__(self, infos: Mapping[str, SymbolInfo], claimed: frozenset[str], ambiguous: frozenset[str]) -> None:
        self._infos = dict(infos)
        self._taken = {*infos, *claimed}
        self._counts: dict[str, int] = {}
        self._of_torch: dict[sympy.Basic, sympy.Basic] = {}
        self.ambiguous = ambiguous
        self.defined: set[str] = set()

    def info(self, name: str) -> SymbolInfo:
        """Returns what is known of a symbol."""
        return self._infos.get(name) or SymbolInfo(name)

    def fresh(self, prefix: str) -> SymbolInfo:
        """Returns a symbol that nothing has yet, and takes its name."""
        number = self._counts.get(prefix, 0)
        while f"{prefix}{number}" in self._taken:
            number += 1
        self._counts[prefix] = number + 1
        name = f"{prefix}{number}"
        self._taken.add(name)
        return SymbolInfo(name)

    def to_define(self, info: SymbolInfo) -> SymbolInfo:
        """Returns a symbol for a node to define: the one it names, or a new one where that is defined already."""
        if info.name not in self.defined:
            self._taken.add(info.name)
            self._infos.setdefault(info.name, info)
            return info
        other = self.fresh(info.name.rstrip("0123456789"))
        return SymbolInfo(other.name, info.lower, info.upper, info.hint, info.divisor)

    # --- torch's numbers --------------------------------------------------------------------------------------------

    def stands_for(self, number: Any, symbol: sympy.Basic) -> None:
        """Makes a symbolic number of torch's, if it is a symbol, stand for one of the program's."""
        expression = getattr(getattr(number, "node", None), "expr", None)
        if isinstance(expression, sympy.Symbol):
            self._of_torch.setdefault(expression, symbol)

    def of_val(self, number: Any) -> Any:
        """Returns a number in a node's metadata as one of the program; a symbol that is new gets a name."""
        node = getattr(number, "node", None)
        if node is None:
            return number
        expression = node.expr
        known = self._of_torch.get(expression)
        if known is not None:
            return known
        rename: dict[sympy.Symbol, sympy.Symbol] = {}
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self._of_torch:
                kind = expression_kind(symbol) if is_symbol_name(symbol.name.removeprefix("z")) else "int"
                self._of_torch[symbol] = self._named(symbol, symbolic_number(node.shape_env, symbol, kind))
            rename[symbol] = self._of_torch[symbol]
        return canonical(expression, rename)

    def _named(self, symbol: sympy.Symbol, number: Any) -> sympy.Symbol:
        wish = symbol.name.removeprefix("z")
        name = wish if is_symbol_name(wish) and wish not in self._taken else self.fresh(_prefix(wish)).name
        self._taken.add(name)
        lower, upper = symbol_bounds(number)
        hint = symbol_hint(number)
        self._infos[name] = SymbolInfo(name, lower, upper, hint)
        return make_symbol(name)

    def type_of(self, fake: torch.Tensor) -> TensorType:
        """Returns the type of a tensor in a node's metadata, as a root."""
        sizes = tuple([self.of_val(size) for size in fake.shape])
        strides = tuple([self.of_val(stride) for stride in fake.stride()])
        return TensorType(fake.dtype, sizes, strides, fake.device)


def _prefix(wish: str) -> str:
    prefix = wish.rstrip("0123456789")
    return prefix if is_symbol_name(f"{prefix}0") else "s"


def new_prefix(number: Any) -> str:
    """Returns the prefix of a new symbol that is found when the program runs."""
    if isinstance(number, torch.SymBool | bool):
        return _PREFIXES["bool"]
    return _PREFIXES["float"] if isinstance(number, torch.SymFloat | float) else _PREFIXES["int"]
