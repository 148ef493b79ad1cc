"""Names of symbols during an import, and the numbers in torch's metadata as expressions of the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import sympy
import torch

from fxwrap.inference import scalar_kind
from fxwrap.names import NameAllocator
from fxwrap.symbolic import NumberOrExpression, SymbolInfo, canonicalize, expression_kind, is_symbol_name, make_symbol
from fxwrap.torch_compat import find_shape_env, symbol_bounds, symbol_expression, symbol_hint, symbolic_number
from fxwrap.wrapper_ir import TensorType

UNBACKED_PREFIXES = {"int": "u", "float": "uf", "bool": "b"}
"""The prefixes of symbols that are known only at run time, by kind."""

_SYMBOLIC_CLASSES = (torch.SymInt, torch.SymFloat, torch.SymBool)


class ImportedSymbols:
    """Names for symbols: `infos` are those of the emitted module, `claimed` the names that nodes define.

    Names that several nodes define are `ambiguous`: graphs were joined. `defined` are those that lines define.
    `declared` has the declarations of torch's symbols, where the program has other ranges and hints than torch.
    """

    def __init__(
        self,
        infos: Mapping[str, SymbolInfo],
        claimed: frozenset[str],
        ambiguous: frozenset[str],
        declared: Mapping[str, SymbolInfo],
    ) -> None:
        self.infos = dict(infos)
        self._declared = declared
        self._names = NameAllocator({*infos, *claimed})
        self._from_torch: dict[sympy.Basic, sympy.Basic] = {}
        self.ambiguous = ambiguous
        self.defined: set[str] = set()

    def info(self, name: str) -> SymbolInfo:
        """Returns the range, hint and divisor of a symbol."""
        return self.infos.get(name) or SymbolInfo(name)

    def fresh(self, prefix: str) -> SymbolInfo:
        """Returns a new symbol."""
        return SymbolInfo(self._names.create_numbered(prefix))

    def fresh_for(self, number: object) -> SymbolInfo:
        """Returns a new symbol of the kind of a number, an int if that is unknown."""
        return self.fresh(UNBACKED_PREFIXES[scalar_kind(number) or "int"])

    def reserve(self, info: SymbolInfo) -> SymbolInfo:
        """Returns the symbol that a node defines: its own, or a new one if a line defines that already."""
        if info.name not in self.defined:
            self._names.used.add(info.name)
            self.infos.setdefault(info.name, info)
            return info
        other = self.fresh(info.name.rstrip("0123456789"))
        return SymbolInfo(other.name, info.lower, info.upper, info.hint, info.divisor)

    # --- torch's numbers --------------------------------------------------------------------------------------------

    def map_torch_symbol(self, number: object, symbol: sympy.Basic) -> None:
        """Maps torch's symbolic number, if it is a single symbol, to a symbol of the program."""
        if isinstance(number, _SYMBOLIC_CLASSES) and isinstance(symbol_expression(number), sympy.Symbol):
            self._from_torch.setdefault(symbol_expression(number), symbol)

    def import_number(self, number: object) -> NumberOrExpression:
        """Returns a number of a node's metadata as an expression of the program; an unknown symbol gets a name."""
        if not isinstance(number, _SYMBOLIC_CLASSES):
            assert isinstance(number, int | float | bool)
            return number
        expression = symbol_expression(number)
        known = self._from_torch.get(expression)
        if known is not None:
            return known
        renamed: dict[sympy.Symbol, sympy.Basic] = {}
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self._from_torch:
                kind = expression_kind(symbol) if is_symbol_name(symbol.name.removeprefix("z")) else "int"
                shape_env = find_shape_env(number)
                assert shape_env is not None
                self._from_torch[symbol] = self._import_symbol(symbol, symbolic_number(shape_env, symbol, kind))
            renamed[symbol] = self._from_torch[symbol]
        return canonicalize(expression, renamed)

    def _import_symbol(self, symbol: sympy.Symbol, number: torch.SymInt | torch.SymFloat) -> sympy.Symbol:
        name = symbol.name.removeprefix("z")
        declared = self._declared.get(name)
        if not is_symbol_name(name) or name in self._names.used:
            prefix = name.rstrip("0123456789")
            name = self.fresh(prefix if is_symbol_name(f"{prefix}0") else "s").name
        self._names.used.add(name)
        lower, upper = symbol_bounds(number)
        self.infos[name] = SymbolInfo(name, lower, upper, symbol_hint(number))
        if declared is not None:
            self.infos[name] = replace(declared, name=name)
        return make_symbol(name)

    def type_of(self, fake: torch.Tensor) -> TensorType:
        """Returns the type of a tensor of a node's metadata, as a root."""
        sizes = tuple([self.import_number(size) for size in fake.shape])
        strides = tuple([self.import_number(stride) for stride in fake.stride()])
        return TensorType(fake.dtype, sizes, strides, fake.device)
