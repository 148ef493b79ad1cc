"""The state of one lowering: values by node, lines so far, and whose memory each value is a window on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxwrap.errors import GraphError
from fxwrap.lowering.source import check_desugared, source_of
from fxwrap.lowering.streams import StreamPlan
from fxwrap.symbolic import SymbolInfo, canonical, floor_divide, make_symbol, product, total
from fxwrap.torch_compat import guarded_bounds, storage_identity, symbol_bounds
from fxwrap.wrapper_ir import (
    GENERATOR,
    Block,
    KernelDefinition,
    LineBase,
    OpaqueType,
    Origin,
    ScalarType,
    Size,
    Source,
    TensorType,
    Type,
    Value,
    used,
)


@dataclass
class ProgramState:
    """What the graphs of one program, its own and those of its blocks, make together.

    `names` are those of values and `symbol_names` those of symbols that are taken; `infos` says what is known of
    symbols, `constants` holds payloads by name, `kernels` are definitions by hash, `functions` blocks that several
    lines share, by name, and `shared` what is known of them by the graph they are from; `outcomes` says what became of
    each call.
    """

    symbol_ranges: Mapping[str, tuple[int, int]]
    symbol_hints: Mapping[str, int]
    names: set[str] = field(default_factory=set)
    symbol_names: set[str] = field(default_factory=set)
    infos: dict[str, SymbolInfo] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    kernels: dict[str, KernelDefinition] = field(default_factory=dict)
    functions: dict[str, Block] = field(default_factory=dict)
    shared: dict[int, Any] = field(default_factory=dict)
    outcomes: list[Any] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def fresh_symbol(self, prefix: str) -> str:
        """Returns a symbol's name with this prefix that none has yet, and takes it."""
        number = self.counts.get(f"symbol {prefix}", 0)
        while f"{prefix}{number}" in self.symbol_names:
            number += 1
        self.counts[f"symbol {prefix}"] = number + 1
        self.symbol_names.add(f"{prefix}{number}")
        return f"{prefix}{number}"

    def fresh_function(self, wish: str) -> str:
        """Returns a name that no function has yet, as near to the wish as can be."""
        name = "".join([letter if letter.isalnum() else "_" for letter in wish])
        found, number = name, 0
        while found in self.functions:
            found, number = f"{name}_{number}", number + 1
        return found

    def add_kernel(self, definition: KernelDefinition) -> str:
        """Keeps a kernel unless an equal one is known; returns the name that the program has for it."""
        known = self.kernels.get(definition.hash)
        if known is not None:
            return known.name
        number = self.counts.get(f"kernel {definition.name}", 0)
        self.counts[f"kernel {definition.name}"] = number + 1
        named = replace(definition, name=f"{definition.name}_{number}")
        self.kernels[definition.hash] = named
        return named.name


class Builder:
    """Collects the lines of a graph, a program's or a block's, while it is walked node by node.

    `scope` stands before the names of a nested graph's nodes where they are told apart from others.
    """

    def __init__(self, fakes: dict[Node, Any], state: ProgramState, scope: str = "") -> None:
        self.fakes = fakes
        self.state = state
        self.scope = scope
        self.lines: list[LineBase] = []
        self.env: dict[Node, Any] = {}
        self.root_of: dict[str, Value] = {}
        self.fake_of: dict[str, Any] = {}  # tensors, and generators that are given
        self.root_by_storage: dict[int, Value] = {}
        self.mutated: set[str] = set()
        self.symbols: dict[sympy.Symbol, Any] = {}  # a ShapeEnv's as symbols or expressions of the program
        self._only_size: dict[sympy.Basic, int | None] = {}  # sizes that are known, by a ShapeEnv's expressions of them
        self._guarded: dict[sympy.Basic, tuple[int | None, int | None]] | None = None
        self.replaced: dict[sympy.Basic, sympy.Symbol] = {}  # expressions of the ShapeEnv that are symbols here
        self.given: list[SymbolInfo] = []  # inputs that are numbers
        self.given_numbers: list[Any] = []  # what those of them are that are no symbols of the graph
        self.known_symbols: set[str] = set()
        self.streams: StreamPlan | None = None
        self.stream = 0  # the stream that the lines of now are on
        self.numbers: dict[str, Any] = {}  # scalar results by name, as the expressions they stand for

    def nested(self, fakes: dict[Node, Any], scope: str) -> Builder:
        """Returns the builder of a block, which knows the symbols that are known here and now."""
        inner = Builder(fakes, self.state, f"{self.scope}{scope}.")
        inner.symbols, inner.known_symbols = dict(self.symbols), set(self.known_symbols)
        inner.replaced = self.replaced
        return inner

    @property
    def infos(self) -> dict[str, SymbolInfo]:
        """What is known of the program's symbols, by name."""
        return self.state.infos

    @property
    def symbol_ranges(self) -> Mapping[str, tuple[int, int]]:
        """The bounds that the caller gave for symbols, by name."""
        return self.state.symbol_ranges

    @property
    def symbol_hints(self) -> Mapping[str, int]:
        """The typical values that the caller gave for symbols, by name."""
        return self.state.symbol_hints

    # --- names and types --------------------------------------------------------------------------------------------

    def unique(self, name: str) -> str:
        """Returns a name that no value has yet, as near to the wish as can be."""
        name = name if name.isidentifier() else "v_" + "".join(c if c.isalnum() else "_" for c in name)
        found, names, counts = name, self.state.names, self.state.counts
        while found in names:
            counts[name] = counts.get(name, 0) + 1
            found = f"{name}_{counts[name]}"
        names.add(found)
        return found

    def qualified(self, node: Node) -> str:
        """Returns the name of a node that no node of another of the program's graphs has."""
        return self.scope + node.name

    def origin(self, node: Node) -> Origin:
        """Returns where a node came from, for the lines it becomes."""
        return Origin((self.source(node),))

    def source(self, node: Node) -> Source:
        """Returns the place of a node in the program's graph and in the model."""
        found = source_of(node)
        return replace(found, node=self.qualified(node)) if self.scope else found

    def size(self, number: Any) -> Size:
        """Returns an int or symbolic int of torch's as a size of ours.

        One that is the same in all runs is an int: of `s0//2` that was broadcast a guard says that it is 1.
        """
        if type(number) is int or isinstance(number.node.expr, sympy.Symbol):
            return number if type(number) is int else self.expression(number)
        expression = number.node.expr
        if expression not in self._only_size:
            self._only_size[expression] = self._only(number)
        only = self._only_size[expression]
        return self.expression(number) if only is None else only

    def _only(self, number: Any) -> int | None:
        """Returns the only value that a symbolic size has, or None."""
        if self._guarded is None:
            self._guarded = guarded_bounds(number.node.shape_env)
        bounds = zip(symbol_bounds(number), self._guarded.get(number.node.expr, (None, None)), strict=True)
        (low, least), (high, most) = bounds
        lower = max([int(item) for item in (low, least) if item is not None], default=None)
        upper = min([int(item) for item in (high, most) if item is not None], default=None)
        return lower if lower == upper else None

    def expression(self, number: Any) -> Any:
        """Returns a symbolic number of torch's as an expression over the program's symbols."""
        node = getattr(number, "node", None)
        if node is None:
            return number
        return self.ours(node.expr)

    def ours(self, expression: Any) -> Any:
        """Returns a ShapeEnv's expression as one over the program's symbols."""
        if self.replaced and not isinstance(expression, sympy.Symbol):
            expression = expression.subs(self.replaced)
        for symbol in expression.free_symbols:
            if symbol not in self.symbols:
                self.symbols[symbol] = self._symbol_for(symbol)
        return canonical(expression, self.symbols)

    def _symbol_for(self, symbol: sympy.Symbol) -> sympy.Symbol:
        """Returns the program's symbol for one of a ShapeEnv's: zf0 becomes f0, zuf0 uf0, the others keep their name.

        Graphs of several blocks may each define the same symbol; the program's are all different.
        """
        wish = make_symbol(symbol.name.removeprefix("z"))
        if wish.name in self.state.symbol_names:
            return make_symbol(self.state.fresh_symbol(wish.name.rstrip("0123456789")))
        self.state.symbol_names.add(wish.name)
        return wish

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

    def add_generator(self, name: str, generator: torch.Generator) -> Value:
        """Makes a value for a random number generator that is given."""
        value = Value(self.unique(name), GENERATOR)
        self.fake_of[value.name] = generator
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
        """Adds a line, on the stream of now."""
        if self.streams is not None:
            line = self.streams.on_stream(line, self.stream)
            touched = [self.root_of[value.name].name for value in used(line) if value.name in self.root_of]
            self.streams.touch(touched, line)
        self.lines.append(line)
