"""The state of reading one FX graph back: what its nodes stand for, the lines so far, and the symbols they define."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from fxwrap.converters.from_fx_kernel_table import Kernels
from fxwrap.converters.from_fx_rules import Rules
from fxwrap.converters.from_fx_symbols import Symbols
from fxwrap.converters.fx_attributes import attribute_of
from fxwrap.converters.fx_replay import replayed_submodule
from fxwrap.errors import ReadBackError
from fxwrap.lines import Alloc, Bind, Call, Comment, SizeOf, StartCollective, Workspace
from fxwrap.symbolic import Number, SymbolInfo, make_symbol
from fxwrap.wrapper_ir import (
    Block,
    LineBase,
    Origin,
    Role,
    ScalarType,
    Size,
    Source,
    Tag,
    TensorType,
    Type,
    Value,
    defined,
    defined_symbol,
    is_release,
    reads,
    stream_device,
    symbols_used,
    type_symbols,
    writes,
)

_LITERALS = (int, float, bool, str, complex, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(eq=False)
class Shared:
    """What all graphs of one program make together.

    `symbols` names them, `rules` say what operators give, `kernels` are known by hash; `flat` are graphs inside of
    others by id, without calls of graphs; `constants` are values by their path in the module, with their `payloads`,
    and those that the metadata calls mutable; `functions` are blocks
    by name, `called` what is known of them by module; `node_of` says which node a line is of, by the line's id.
    """

    symbols: Symbols
    rules: Rules
    kernels: Kernels
    names: set[str] = field(default_factory=set)
    flat: dict[int, tuple[GraphModule, GraphModule]] = field(default_factory=dict)
    constants: dict[str, Value] = field(default_factory=dict)
    payloads: dict[str, torch.Tensor] = field(default_factory=dict)
    declared_mutable: set[str] = field(default_factory=set)
    functions: dict[str, Block] = field(default_factory=dict)
    called: dict[Any, Any] = field(default_factory=dict)
    node_of: dict[int, Node] = field(default_factory=dict)

    def unique(self, wish: str) -> str:
        """Returns a name that no value has yet, as near to the wish as can be, and takes it."""
        name = wish if wish.isidentifier() else "v_" + "".join([c if c.isalnum() else "_" for c in wish])
        found, number = name, 0
        while found in self.names:
            number += 1
            found = f"{name}_{number}"
        self.names.add(found)
        return found


@dataclass(frozen=True)
class Element:
    """What a key path through a list leads to: an element, or a number of one that no symbol stands for yet."""

    source: Value
    path: tuple[Tag, ...]
    type: Type


def target_text(node: Node) -> str:
    """Returns what a node calls or names, for people."""
    if node.op == "call_function":
        is_overload = hasattr(node.target, "_schema")
        return str(node.target if is_overload else getattr(node.target, "__name__", node.target))
    return f"{node.op} of {node.target}"


def failure(node: Node, reason: str, remedy: str) -> ReadBackError:
    """Returns the error for a node that no line says."""
    return ReadBackError(node.name, target_text(node), reason, remedy)


def origin_of(node: Node) -> Origin:
    """Returns where the line of a node came from: what the node carries, or the node itself."""
    found = node.meta.get("fxwrap_origin")
    return found if isinstance(found, Origin) else Origin((Source(node.name, target_text(node)),))


ReadCall = Callable[["Reader", Node], None]


class Reader:
    """Reads one graph, a program's or a block's, node by node."""

    def __init__(self, shared: Shared, module: GraphModule, read_call: ReadCall, known: frozenset[str]) -> None:
        self.shared = shared
        self.module = module
        self.read_call = read_call
        self.lines: list[LineBase] = []
        self.env: dict[Node, Any] = {}  # values, exact numbers, tuples of them
        self.plain: dict[Node, Number] = {}  # numbers as the arithmetic alone says them
        self.factors: dict[Node, tuple[str, tuple[Number, ...]]] = {}  # the operands of sums and products
        self.root_of: dict[str, str] = {}
        self.taken: dict[str, Node] = {}  # roots that a node took
        self.unwritten: dict[str, int] = {}  # memory without content, by the position of its line
        self.absorbed: set[Node] = set()  # nodes that are part of another one's line
        self.entered: list[tuple[str, int]] = []  # the guards that nodes have entered: device and stream
        self.groups: dict[str, str] = {}  # the process groups of collectives, by the roots of their results
        self.reversed: set[Node] = set()  # scans that go from the last slice to the first
        self.known = set(known)  # symbols that are defined here
        self.awaited: dict[str, Value] = {}  # symbols that the next lines must define, and where they are found
        self.ranks: dict[str, tuple[Value, int]] = {}  # checks of ranks that no line holds yet
        self.given: dict[str, Value] = {}  # values that came from outside, by name
        self.attributes: dict[str, Value] = {}  # the tensors that nodes of this graph get, by the node's target
        self.held: dict[int, Value] = {}  # these, and those that graphs inside of it get, by the tensor's id
        self.bound: dict[str, sympy.Symbol] = {}  # the symbols of results that are numbers, by the name of the value
        self.sizes: dict[tuple[str, str, int], sympy.Symbol] = {}  # sizes that lines have read, by value
        self.claimed = {
            info.name: node for node in module.graph.nodes
            if node.op == "call_function" and (info := node.meta.get("fxwrap_symbol")) is not None
        }  # fmt: skip

    # --- nodes ------------------------------------------------------------------------------------------------------

    def read(self, node: Node) -> None:
        """Reads a node, unless it is read already or part of another one's line."""
        if node in self.env or node in self.absorbed:
            return
        self.comments(node)
        match node.op:
            case "call_function":
                self.read_call(self, node)
            case "call_module" if replayed_submodule(self.module, node) is not None:
                self.read_call(self, node)
            case "get_attr":
                self.env[node] = self.attribute(node)
            case _:
                reason = "a program has no modules and no methods"
                remedy = "Trace what it calls with make_fx, or write its torch.ops.aten overloads in its place"
                raise failure(node, reason, remedy)

    def comments(self, node: Node) -> None:
        """Adds the remarks that stand before a node."""
        for text in node.meta.get("fxwrap_comments", ()):
            self.emit(Comment(text), node)

    def attribute(self, node: Node) -> Any:
        """Returns what a `get_attr` node stands for: a constant as its value, a submodule itself."""
        found = attribute_of(self.module, node.target)
        if isinstance(found, GraphModule):
            return found
        if isinstance(found, torch.Tensor):
            return self.attributes[str(node.target)]
        reason = f"'{node.target}' is a {type(found).__name__}, which no line of a graph takes"
        if found is None:
            reason = f"the module has no attribute '{node.target}'"
        raise failure(node, reason, "Pass it as an operand, or register a tensor as a buffer of the module")

    def hint(self, node: Node, *classes: type[LineBase]) -> Any:
        """Returns the line that a node was made for, or None: if it is of these classes and its symbols are clear."""
        line = node.meta.get("fxwrap_line")
        if not isinstance(line, classes):
            return None
        ambiguous = self.shared.symbols.ambiguous
        if ambiguous and any(symbol.name in ambiguous for symbol in symbols_used(line, *Role)):
            return None
        return line

    # --- operands ---------------------------------------------------------------------------------------------------

    def argument(self, node: Node, item: Any) -> Any:
        """Returns an argument of a node as the IR has it: values, expressions, literals, lists as tuples."""
        kind = type(item)
        if kind is Node:
            return self.operand(node, item)
        if kind is float:
            return math.nan if math.isnan(item) else item
        if kind is int or item is None or kind is bool or isinstance(item, _LITERALS):
            return item
        if isinstance(item, list | tuple):
            return tuple([self.argument(node, part) for part in item])
        if isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self.shared.symbols.of_val(item)
        reason = f"an argument is a {kind.__name__}"
        raise failure(node, reason, "Pass tensors, numbers, strings, dtypes or devices")

    def operand(self, node: Node, item: Node) -> Any:
        """Returns what another node stands for. Raises ReadBackError where that is not there, or no longer."""
        if item not in self.env:
            reason = f"it uses '{item.name}', which is not defined before it in this graph"
            raise failure(node, reason, "Put the node that it uses before it, and into the same graph")
        found = self.env[item]
        if isinstance(found, Element):
            self._bind(node, item, found)
            found = self.env[item]
        if self.taken:
            self._check_there(node, item, found)
        return found

    def _check_there(self, node: Node, item: Node, found: Any) -> None:
        if isinstance(found, tuple):
            for part in found:
                self._check_there(node, item, part)
        elif isinstance(found, Value):
            taker = self.taken.get(self.root_of.get(found.name, ""))
            if taker is not None:
                reason = f"it uses '{item.name}' after '{taker.name}' ({target_text(taker)}) took its memory"
                raise failure(node, reason, f"Use it before '{taker.name}', or allocate memory in place of the reuse")

    def _bind(self, node: Node, item: Node, found: Element) -> None:
        """Binds a symbol to a number in a list that a node uses."""
        if not isinstance(found.type, ScalarType):
            reason = f"it uses '{item.name}', an element of a list, which no line has"
            raise failure(node, reason, "Pass the list whole")
        info = self.shared.symbols.fresh({"int": "u", "float": "uf", "bool": "b"}[found.type.kind])
        self.emit(Bind(info, found.source, found.path, origin=origin_of(item)), item)
        self.set_number(item, make_symbol(info.name))
        self.shared.symbols.stands_for(item.meta.get("val"), make_symbol(info.name))

    def tensor(self, node: Node, item: Any) -> Value:
        """Returns an argument that must be a tensor."""
        found = self.argument(node, item)
        if isinstance(found, Value) and isinstance(found.type, TensorType):
            return found
        shown = f"'{item.name}'" if isinstance(item, Node) else repr(item)
        raise failure(node, f"its operand {shown} is no tensor", "Pass a tensor")

    def set_number(self, node: Node, exact: Any, plain: Number | None = None) -> None:
        """Records the number that a node stands for: exactly, and as the arithmetic alone says it."""
        self.env[node] = exact
        self.plain[node] = exact if plain is None else plain

    # --- values -----------------------------------------------------------------------------------------------------

    def value(self, wish: str, type_: Type) -> Value:
        """Makes a value under a name that no other one has."""
        return Value(self.shared.unique(wish), type_)

    def make(self, line: LineBase, node: Node, stands_for: Any = None) -> None:
        """Adds a line that defines values; with `stands_for`, the node stands for that."""
        self.emit(line, node)
        for value in defined(line):
            self.define(value, line.alias_of(value))
            if isinstance(line, StartCollective):
                self.groups[self.root_of[value.name]] = line.group
        if stands_for is not None:
            self.env[node] = stands_for

    def define(self, value: Value, base: Value | None = None) -> None:
        """Records whose memory a new value is, and which symbols the lines after the one that makes it must define."""
        self.root_of[value.name] = value.name if base is None else self.root_of[base.name]
        for symbol in type_symbols(value.type):
            if symbol.name not in self.known:
                self.awaited.setdefault(symbol.name, value)

    def take(self, node: Node, value: Value) -> None:
        """Records that a node takes the memory of a value. Raises ReadBackError for a window."""
        if self.root_of[value.name] != value.name:
            base = self.root_of[value.name]
            raise failure(node, f"it takes '{value.name}', which is a window on '{base}'", f"Take '{base}' itself")
        self.taken[value.name] = node

    # --- lines ------------------------------------------------------------------------------------------------------

    def emit(self, line: LineBase, node: Node) -> None:
        """Adds a line, and before it those that define symbols which must be defined by then."""
        line = self._on_stream(line)
        made = defined_symbol(line)
        if made is None:
            if self.awaited or self.ranks:
                self.settle(node)
        else:
            self.known.add(made.name)
            self.shared.symbols.defined.add(made.name)
            self.awaited.pop(made.name, None)
        if self.unwritten:
            self._note_content(line)
        self.lines.append(line)
        self.shared.node_of[id(line)] = node
        if isinstance(line, Alloc) or (isinstance(line, Workspace) and not line.zeroed):
            self.unwritten[line.result.name] = len(self.lines) - 1

    def _on_stream(self, line: LineBase) -> LineBase:
        """Returns a line on the stream that the guards around its node make current for its device."""
        if not hasattr(line, "stream") or line.event_step or line.bracket[1] or is_release(line):
            return line
        device = str(stream_device(line))
        stream = next((number for name, number in reversed(self.entered) if number and name == device), 0)
        return line if stream == line.stream else line.replace(stream=stream)

    def _note_content(self, line: LineBase) -> None:
        """Makes memory that is read before anything is written to it such as has content, whichever."""
        written = {self.root_of[value.name] for value in writes(line)}
        if not line.alias_fields:
            for value in reads(line):
                root = self.root_of.get(value.name, "")
                if root in self.unwritten and root not in written:
                    position = self.unwritten.pop(root)
                    before, made = self.lines[position], _with_content(self.lines[position])
                    self.lines[position] = made
                    self.shared.node_of[id(made)] = self.shared.node_of[id(before)]
        for root in written:
            self.unwritten.pop(root, None)

    def settle(self, node: Node) -> None:
        """Defines the symbols that are in types of values and that no node before this one has defined."""
        for name, value in list(self.awaited.items()):
            claimed = self.claimed.get(name)
            if name in self.awaited and not (claimed is not None and self._hoist(claimed)):
                self._find(name, value, node)
        for value, rank in list(self.ranks.values()):
            info = self.shared.symbols.fresh("n")
            self.emit(self.size_line(info, value, 0, "size", node, rank), node)

    def _hoist(self, node: Node) -> bool:
        """Reads a node of arithmetic before its turn; returns whether that can be."""
        if node in self.env:
            return False
        if isinstance(node.meta.get("val"), torch.Tensor) or node.target is operator.getitem:
            return False
        if all(item in self.env or self._hoist(item) for item in node.all_input_nodes):
            self.read(node)
            return True
        return False

    def _find(self, name: str, value: Value, node: Node) -> None:
        """Defines a symbol by the size or stride of a value that it is, or that is a multiple of it."""
        symbol, info = make_symbol(name), self.shared.symbols.info(name)
        for of, dim, number in sizes_of(value.tensor_type):
            if number == symbol:
                bound = Bind(info, value, (Tag(of, (dim,)),), origin=origin_of(node))
                is_given = value.name in self.given
                self.emit(self.size_line(info, value, dim, of, node) if is_given else bound, node)
                return
        for of, dim, number in sizes_of(value.tensor_type):
            factor = multiple_of(number, symbol)
            if factor is not None:
                path = (Tag(of, (dim,)), Tag("divide", (factor,)))
                self.emit(Bind(info, value, path, origin=origin_of(node)), node)
                return
        reason = f"nothing before it says what {name} is, a number in the type of '{value.name}'"
        raise failure(node, reason, f"Keep the node that computes {name}, or add an aten.sym_size.int of a tensor")

    def size_line(self, info: SymbolInfo, tensor: Value, dim: int, of: str, node: Node, rank: int = 0) -> SizeOf:
        """Returns the line that reads a size of a tensor, with the check of its rank that came before, if one did."""
        known = self.ranks.pop(tensor.name, None)
        found = rank or (known[1] if known is not None else 0)
        self.sizes.setdefault((tensor.name, of, dim), make_symbol(info.name))
        return SizeOf(info, tensor, dim, of, found, origin=origin_of(node))


def _with_content(line: LineBase) -> LineBase:
    """Returns a line that makes the same memory with some content."""
    if isinstance(line, Workspace):
        return line.replace(zeroed=True)  # type: ignore[no-any-return]
    assert isinstance(line, Alloc)
    type_ = line.result.tensor_type
    keywords = (("dtype", type_.dtype), ("device", type_.device))
    arguments = (type_.sizes, type_.strides)
    made = "aten.empty_strided.default"
    return Call((line.result,), made, arguments, keywords, stream=line.stream, origin=line.origin)


def sizes_of(type_: TensorType) -> list[tuple[str, int, Size]]:
    """Returns the sizes and strides of a type, each with what it is and its dimension."""
    sizes = [("size", dim, size) for dim, size in enumerate(type_.sizes)]
    return sizes + [("stride", dim, stride) for dim, stride in enumerate(type_.strides)]


def multiple_of(number: Any, symbol: sympy.Symbol) -> int | None:
    """Returns the factor of a number that is a constant times a symbol; None for any other."""
    if not isinstance(number, sympy.Mul):
        return None
    factor, rest = number.as_coeff_Mul()
    return int(factor) if rest == symbol and factor.is_Integer and factor > 0 else None


def name_of_item(node: Node, path: Sequence[int]) -> str:
    """Returns the name for an item of a node's result: that of the node that takes it out, if there is one."""
    found = node
    for index in path:
        taker = next((user for user in found.users if user.target is operator.getitem and user.args[1] == index), None)
        if taker is None:
            return "_".join([node.name, *map(str, path)])
        found = taker
    return found.name


class Match:
    """Compares the operands that a line had with those that its node has now, and says which value is which."""

    def __init__(self) -> None:
        self.now: dict[str, Value] = {}

    def __call__(self, then: Any, now: Any) -> bool:
        """Whether two trees of operands agree: literals are equal, and values have equal types."""
        kind = type(then)
        if kind is Value:
            if type(now) is not Value or now.type != then.type:
                return False
            return self.now.setdefault(then.name, now) is now
        if kind is tuple:
            return (
                type(now) is tuple and len(then) == len(now) and all(self(one, other) for one, other in zip(then, now))
            )
        if kind is float:
            return type(now) is float and (then == now or (then != then and now != now))
        return (type(now) is kind or isinstance(then, sympy.Basic)) and bool(then == now)

    def values(self, then: tuple[Value | None, ...]) -> tuple[Value | None, ...]:
        """Returns the values of now for those of then."""
        return tuple([None if value is None else self.now[value.name] for value in then])


Table = Mapping[Any, ReadCall]
"""How nodes are read, by what they call."""
