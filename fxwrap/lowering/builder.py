"""The state of one lowering: values by node, lines so far, and whose memory each value is a window on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxwrap.errors import GraphError
from fxwrap.lowering.source import check_desugared, location_of
from fxwrap.symbolic import SymbolInfo, canonical, floor_divide, make_symbol, product, total
from fxwrap.torch_compat import storage_identity
from fxwrap.wrapper_ir import LineBase, OpaqueType, Origin, ScalarType, Size, TensorType, Type, Value


class Builder:
    """Collects the lines of a program while its graph is walked, node by node."""

    def __init__(self, fakes: dict[Node, Any], symbol_ranges: Mapping[str, tuple[int, int]]) -> None:
        self.fakes = fakes
        self.symbol_ranges = symbol_ranges
        self.lines: list[LineBase] = []
        self.env: dict[Node, Any] = {}
        self.root_of: dict[str, Value] = {}
        self.fake_of: dict[str, torch.Tensor] = {}
        self.root_by_storage: dict[int, Value] = {}
        self.mutated: set[str] = set()
        self.constants: dict[str, torch.Tensor] = {}
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        self.known_symbols: set[str] = set()
        self.infos: dict[str, SymbolInfo] = {}
        self.numbers: dict[str, Any] = {}  # scalar results by name, as the expressions they stand for
        self._names: set[str] = set()
        self._counts: dict[str, int] = {}

    # --- names and types --------------------------------------------------------------------------------------------

    def unique(self, name: str) -> str:
        """Returns a name that no value has yet, as near to the wish as can be."""
        name = name if name.isidentifier() else "v_" + "".join(c if c.isalnum() else "_" for c in name)
        found = name
        while found in self._names:
            self._counts[name] = self._counts.get(name, 0) + 1
            found = f"{name}_{self._counts[name]}"
        self._names.add(found)
        return found

    def size(self, number: Any) -> Size:
        """Returns an int or symbolic int of torch's as a size of ours."""
        return number if type(number) is int else self.expression(number)

    def expression(self, number: Any) -> Any:
        """Returns a symbolic number of torch's as an expression over the program's symbols."""
        node = getattr(number, "node", None)
        if node is None:
            return number
        expression = node.expr
        for symbol in expression.free_symbols:
            if symbol not in self.symbols:
                self.symbols[symbol] = symbol_for(symbol)
        return canonical(expression, self.symbols)

    def tensor_type(self, fake: torch.Tensor, offset: Size = 0) -> TensorType:
        """Returns the type of a fake tensor whose first element is `offset` elements into its root."""
        if fake.layout is not torch.strided:
            raise GraphError("", f"a tensor has the layout {fake.layout}", "Only strided tensors are compiled")
        sizes, strides = tuple(fake.shape), fake.stride()
        if any(type(number) is not int for number in (*sizes, *strides)):
            sizes = tuple([self.size(number) for number in sizes])
            strides = tuple([self.size(number) for number in strides])
        return TensorType(fake.dtype, sizes, strides, fake.device, offset)

    def type_of(self, fake: Any, offset: Size = 0) -> Type:
        """Returns the type of any fake value."""
        if isinstance(fake, torch.Tensor):
            return self.tensor_type(fake, offset)
        if isinstance(fake, bool | torch.SymBool):
            return ScalarType("bool")
        if isinstance(fake, int | torch.SymInt):
            return ScalarType("int")
        if isinstance(fake, float | torch.SymFloat):
            return ScalarType("float")
        return OpaqueType(type(fake).__name__)

    # --- values -----------------------------------------------------------------------------------------------------

    def add_root(self, name: str, fake: torch.Tensor) -> Value:
        """Makes a value that is its own root."""
        check_desugared(name, fake)
        value = Value(self.unique(name), self.tensor_type(fake))
        self.root_of[value.name] = value
        self.fake_of[value.name] = fake
        self.root_by_storage.setdefault(storage_identity(fake), value)
        return value

    def add_buffer(self, name: str, type_: TensorType) -> Value:
        """Makes a value that is its own root and that no node of the graph stands for."""
        value = Value(self.unique(name), type_)
        self.root_of[value.name] = value
        return value

    def share_root(self, fake: torch.Tensor, root: Value) -> None:
        """Records that a tensor of the graph is in the memory of a root that another one made."""
        self.root_by_storage[storage_identity(fake)] = root

    def add_window(self, name: str, fake: torch.Tensor, base: Value) -> Value:
        """Makes a value that is a window on the root of another."""
        value = Value(self.unique(name), self.tensor_type(fake, self.offset_in_root(base, fake)))
        self.root_of[value.name] = self.root_of[base.name]
        self.fake_of[value.name] = fake
        return value

    def add_retyped(self, name: str, fake: torch.Tensor, base: Value) -> Value:
        """Makes a value for a tensor that starts where another one does, in the same memory."""
        value = Value(self.unique(name), self.tensor_type(fake, base.tensor_type.storage_offset))
        self.root_of[value.name] = self.root_of[base.name]
        self.fake_of[value.name] = fake
        return value

    def offset_in_root(self, base: Value, fake: torch.Tensor) -> Size:
        """Returns the distance of a window's first element from its root's, in elements of its own type.

        It adds up the steps from window to window: nodes that were merged have metadata of different storages, but the
        step from a base to its view is the same in each.
        """
        base_fake, before = self.fake_of[base.name], base.tensor_type.storage_offset
        start, own = base_fake.storage_offset(), fake.storage_offset()
        old_bytes, new_bytes = base_fake.dtype.itemsize, fake.dtype.itemsize
        if old_bytes != new_bytes:
            start, before = start * old_bytes // new_bytes, floor_divide(product((before, old_bytes)), new_bytes)
        return total((before, self.size(own - start)))

    def device_types(self) -> list[str]:
        """Returns the types of the devices that the tensors so far are on, sorted."""
        return sorted({fake.device.type for fake in self.fake_of.values()})

    def emit(self, line: LineBase) -> None:
        """Adds a line."""
        self.lines.append(line)


def origin_of(node: Node) -> Origin:
    """Returns where a node came from, for the lines it becomes."""
    stack = node.meta.get("nn_module_stack") or {}
    module = str(next(reversed(stack.values()))[0]) if stack else ""
    return Origin((node.name,), str(node.target).removesuffix(".default"), location_of(node), module)


def symbol_for(symbol: sympy.Symbol) -> sympy.Symbol:
    """Returns the program's symbol for one of a ShapeEnv's: zf0 becomes f0, zuf0 uf0, the others keep their name."""
    return make_symbol(symbol.name.removeprefix("z"))
