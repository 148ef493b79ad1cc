"""The state of importing one FX graph: the values of its nodes, the lines so far, and the symbols that they define."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import sympy
import torch
from torch.fx import GraphModule, Node

from fxwrap import wrapper_ir as ir
from fxwrap.converters.access_order import META_KEY, AccessChecker
from fxwrap.converters.from_fx.kernel_table import KernelTable
from fxwrap.converters.from_fx.nodes import (
    failure,
    late_read_failure,
    metadata_of_tools,
    order_failure,
    origin_of,
    target_text,
)
from fxwrap.converters.from_fx.symbols import UNBACKED_PREFIXES, ImportedSymbols
from fxwrap.converters.fx.metadata import FINAL_WRITE
from fxwrap.converters.fx.regions import called_region
from fxwrap.converters.fx.replay import module_attribute, replayed_submodule
from fxwrap.inference import CallInference, with_declared_layout
from fxwrap.lines import Alloc, Bind, Comment, ExternCall, SizeOf, StartCollective, Workspace
from fxwrap.lines.frees import drop_early_frees
from fxwrap.names import NameAllocator
from fxwrap.passes.coalesce_copies import coalesce_copies
from fxwrap.symbolic import NumberOrExpression, SymbolInfo, make_symbol
from fxwrap.torch_compat import is_opaque

_LITERALS = (int, float, bool, str, complex, torch.dtype, torch.device, torch.layout, torch.memory_format)

LineT = TypeVar("LineT", bound=ir.LineBase)


@dataclass(eq=False)
class ImportState:
    """The state that all graphs of one program share.

    `symbols` names symbols, `inference` infers the results of operators, `kernels` has the kernels by hash. `inlined`
    are submodules by id, with and without calls of graphs. `constants` are values by their path in the module,
    `payloads` their tensors by name, `declared_mutable` those that the metadata declares mutable. `functions` are
    blocks by name, `imported_functions` the imports of their modules. `node_of` has the node of each line, by id.
    """

    symbols: ImportedSymbols
    inference: CallInference
    kernels: KernelTable
    names: NameAllocator = field(default_factory=NameAllocator)
    inlined: dict[int, tuple[GraphModule, GraphModule]] = field(default_factory=dict)
    constants: dict[str, ir.Value] = field(default_factory=dict)
    payloads: dict[str, torch.Tensor] = field(default_factory=dict)
    declared_mutable: set[str] = field(default_factory=set)
    functions: dict[str, ir.Block] = field(default_factory=dict)
    imported_functions: dict[object, Any] = field(default_factory=dict)
    node_of: dict[int, Node] = field(default_factory=dict)


@dataclass(frozen=True)
class ListElement:
    """A key path into a list: to an element, or to a number of one that no symbol is bound to yet."""

    source: ir.Value
    path: tuple[ir.Tag, ...]
    type: ir.Type


NodeImporter = Callable[["GraphImporter", Node], None]

NodeImporters = Mapping[Any, NodeImporter]
"""The importers of calls, by target."""


def is_function_call(module: GraphModule, node: Node) -> bool:
    """Whether a node calls a replayed submodule or a region, and is not inlined."""
    return replayed_submodule(module, node) is not None or called_region(module, node) is not None


class GraphImporter:
    """Imports one graph, of a program or a block, node by node.

    A line without an origin gets that of its node.
    """

    def __init__(
        self, state: ImportState, module: GraphModule, import_call: NodeImporter, known_symbols: frozenset[str]
    ) -> None:
        self.state = state
        self.module = module
        self.import_call = import_call
        self.lines: list[ir.LineBase] = []
        self.env: dict[Node, Any] = {}  # values, exact numbers, tuples of them
        self.recomputed: dict[Node, NumberOrExpression] = {}  # numbers as the arithmetic alone computes them
        self.chain_operands: dict[Node, tuple[str, tuple[NumberOrExpression, ...]]] = {}  # of sums and products
        self.root_of: dict[str, str] = {}
        self.folded_views: dict[str, ir.Value] = {}  # the bases of views that only other views use, and have no lines
        self.consumed_by: dict[str, Node] = {}  # the nodes that consumed roots
        self.uninitialized: dict[str, int] = {}  # memory without content, by the position of its line
        self.copies: set[str] = set()  # copies of operands, which functional nodes change
        self.copied_from: dict[str, ir.Value] = {}  # the operand of each
        self.updates: dict[str, ir.Value] = {}  # the first operands of calls that may have been in-place, by the result
        self.functional_results: set[str] = set()  # other results of functional launches
        self._access_checker = AccessChecker(state.symbols.infos)
        self._final_writes: dict[str, Node] = {}  # of inputs and constants in the functional form, by root
        self.absorbed: set[Node] = set()  # nodes that are part of another node's line
        self.guard_stack: list[tuple[str, int]] = []  # the open guards: device and stream
        self.groups: dict[str, str] = {}  # the process groups of collectives, by the roots of their results
        self.reverse_scans: set[Node] = set()
        self.defined_symbols = set(known_symbols)
        self.pending_symbols: dict[str, ir.Value] = {}  # to define before the next line, with a value of the type
        self.pending_rank_checks: dict[str, tuple[ir.Value, int]] = {}  # for the next `symbol.size` of each tensor
        self.external_values: dict[str, ir.Value] = {}  # inputs, constants and arguments, by name
        self.attributes: dict[str, ir.Value] = {}  # tensors that nodes of this graph read, by the node's target
        self.captured: dict[int, ir.Value] = {}  # these and those of nested graphs, by the tensor's id
        self.bound_symbols: dict[str, sympy.Symbol] = {}  # symbols of scalar results, by the value's name
        self.size_symbols: dict[tuple[str, str, int], sympy.Symbol] = {}  # sizes that lines have read, by value
        self.defining_nodes = {
            info.name: node for node in module.graph.nodes
            if node.op == "call_function" and (info := node.meta.get("fxwrap_symbol")) is not None
        }  # fmt: skip

    # --- nodes ------------------------------------------------------------------------------------------------------

    def import_node(self, node: Node) -> None:
        """Imports a node, unless it is imported already or part of another node's line."""
        if node in self.env:
            return
        self.emit_comments(node)
        if node in self.absorbed:
            return
        match node.op:
            case "call_function":
                self.import_call(self, node)
            case "call_module" if is_function_call(self.module, node):
                self.import_call(self, node)
            case "get_attr":
                self.env[node] = self.attribute(node)
            case _:
                remedy = "Trace the module or method with make_fx, or call torch.ops.aten overloads instead"
                raise failure(node, "a program has no modules and no methods", remedy)

    def emit_comments(self, node: Node) -> None:
        """Adds the comments before a node."""
        for text in node.meta.get("fxwrap_comments", ()):
            self.emit(Comment(text), node)

    def attribute(self, node: Node) -> ir.Value | GraphModule:
        """Returns the value of a `get_attr` node: a constant, or a submodule."""
        attribute = module_attribute(self.module, node.target)
        if isinstance(attribute, GraphModule):
            return attribute
        if isinstance(attribute, torch.Tensor) or is_opaque(attribute):
            return self.attributes[str(node.target)]
        reason = f"'{node.target}' is a {type(attribute).__name__}, which no line of a graph takes"
        if attribute is None:
            reason = f"the module has no attribute '{node.target}'"
        raise failure(node, reason, "Pass it as an operand, or register a tensor as a buffer of the module")

    def original_line(self, node: Node, *classes: type[LineT]) -> LineT | None:
        """Returns the line that a node was emitted for, if it has one of these classes and unambiguous symbols."""
        line = node.meta.get("fxwrap_line")
        if not isinstance(line, classes):
            return None
        ambiguous = self.state.symbols.ambiguous
        is_ambiguous = ambiguous and any(symbol.name in ambiguous for symbol in ir.symbols_used(line, *ir.Role))
        return None if is_ambiguous else line

    # --- operands ---------------------------------------------------------------------------------------------------

    def argument(self, node: Node, item: object) -> Any:
        """Returns an argument of a node in the IR's form: values, expressions, literals, tuples for lists."""
        kind = type(item)
        if isinstance(item, Node):
            return self.operand(node, item)
        if isinstance(item, float):
            return math.nan if math.isnan(item) else item
        if kind is int or item is None or kind is bool or isinstance(item, _LITERALS):
            return item
        if isinstance(item, list | tuple):
            return tuple([self.argument(node, part) for part in item])
        if isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self.state.symbols.import_number(item)
        raise failure(node, f"an argument is a {kind.__name__}", "Pass tensors, numbers, strings, dtypes or devices")

    def operand(self, node: Node, item: Node) -> Any:
        """Returns the value of another node. Raises FxImportError if it is undefined or its memory was consumed."""
        if item not in self.env:
            reason = f"it uses '{item.name}', which is not defined before it in this graph"
            raise failure(node, reason, "Put the node that it uses before it, and into the same graph")
        if isinstance(self.env[item], ListElement):
            self._bind_element(node, item, self.env[item])
        value = self.env[item]
        if self.consumed_by:
            self._check_not_consumed(node, item, value)
        return value

    def _check_not_consumed(self, node: Node, item: Node, value: object) -> None:
        if isinstance(value, tuple):
            for part in value:
                self._check_not_consumed(node, item, part)
        elif isinstance(value, ir.Value):
            consumer = self.consumed_by.get(self.root_of.get(value.name, ""))
            if consumer is not None:
                name = consumer.name
                reason = f"it uses '{item.name}' after '{name}' ({target_text(consumer)}) consumed its memory"
                raise failure(node, reason, f"Use it before '{name}', or allocate memory in place of the reuse")

    def _bind_element(self, node: Node, item: Node, element: ListElement) -> None:
        if not isinstance(element.type, ir.ScalarType):
            reason = f"it uses '{item.name}', an element of a list, which no line has"
            raise failure(node, reason, "Pass the whole list")
        symbol = self.bind_fresh(item, element.source, element.path, element.type)
        self.set_number(item, symbol)
        self.state.symbols.map_torch_symbol(item.meta.get("val"), symbol)

    def bind_fresh(self, node: Node, value: ir.Value, path: tuple[ir.Tag, ...], type_: ir.ScalarType) -> sympy.Symbol:
        """Adds the line that binds a new symbol to a scalar, and returns the symbol."""
        info = self.state.symbols.fresh(UNBACKED_PREFIXES[type_.kind])
        self.emit(Bind(info, value, path), node)
        return make_symbol(info.name)

    def tensor(self, node: Node, item: object) -> ir.Value:
        """Returns an argument that must be a tensor."""
        value = self.argument(node, item)
        if isinstance(value, ir.Value) and isinstance(value.type, ir.TensorType):
            return value
        shown = f"'{item.name}'" if isinstance(item, Node) else repr(item)
        raise failure(node, f"its operand {shown} is no tensor", "Pass a tensor")

    def set_number(self, node: Node, exact: object, recomputed: NumberOrExpression | None = None) -> None:
        """Records the number of a node: exactly, and as the arithmetic alone computes it."""
        self.env[node] = exact
        self.recomputed[node] = exact if recomputed is None else recomputed

    # --- values -----------------------------------------------------------------------------------------------------

    def value(self, name_hint: str, type_: ir.Type) -> ir.Value:
        """Returns a new value."""
        return ir.Value(self.state.names.create_name(name_hint), type_)

    def emit_definition(self, line: ir.LineBase, node: Node, node_value: ir.Value | None = None) -> None:
        """Adds a line that defines values; `node_value` becomes the node's value."""
        self.emit(line, node)
        self._access_checker.define(line)
        for value in ir.defined(line):
            self.define(value, line.alias_of(value))
            if isinstance(line, StartCollective):
                self.groups[self.root_of[value.name]] = line.group
        if node_value is not None:
            self.env[node] = node_value

    def emit_without_result(self, line: ir.LineBase, node: Node) -> None:
        """Adds the line of a node that returns nothing."""
        self.emit(line, node)
        self.env[node] = None

    def define(self, value: ir.Value, base: ir.Value | None = None) -> None:
        """Records the root of a new value, and the symbols of its type that the next lines must define."""
        self.root_of[value.name] = value.name if base is None else self.root_of[base.name]
        for symbol in ir.type_symbols(value.type):
            if symbol.name not in self.defined_symbols:
                self.pending_symbols.setdefault(symbol.name, value)

    def define_external(self, value: ir.Value) -> None:
        """Records an input, constant or argument."""
        self.external_values[value.name] = value
        self.define(value)

    def consume(self, node: Node, value: ir.Value) -> None:
        """Records that a node consumes a root. Raises FxImportError for a view."""
        base = self.root_of[value.name]
        if base != value.name:
            raise failure(node, f"it consumes '{value.name}', which is a view of '{base}'", f"Pass '{base}' itself")
        self.consumed_by[value.name] = node

    # --- lines ------------------------------------------------------------------------------------------------------

    def emit(self, line: ir.LineBase, node: Node) -> None:
        """Adds a line, after the lines that define its pending symbols."""
        line = self._with_stream(line)
        origin, metadata = line.origin or origin_of(node), metadata_of_tools(node)
        if metadata or origin.metadata:
            origin = replace(origin, metadata=metadata)
        if line.origin is not origin:
            line = line.replace(origin=origin)
        symbol = ir.defined_symbol(line)
        if symbol is None:
            if self.pending_symbols or self.pending_rank_checks:
                self.define_pending_symbols(node)
        else:
            self.defined_symbols.add(symbol.name)
            self.state.symbols.defined.add(symbol.name)
            self.pending_symbols.pop(symbol.name, None)
        if self.uninitialized:
            self._initialize_if_read(line)
        conflict = self._access_checker.conflict(node, line, self.root_of) if META_KEY in node.meta else None
        if conflict is not None:
            raise order_failure(node, conflict)
        self._check_final_writes(line, node)
        self.lines.append(line)
        self.state.node_of[id(line)] = node
        if isinstance(line, Alloc) or (isinstance(line, Workspace) and not line.zeroed):
            self.uninitialized[line.result.name] = len(self.lines) - 1

    def _check_final_writes(self, line: ir.LineBase, node: Node) -> None:
        """Raises FxImportError if a line reads memory after its final write; views and results may follow it."""
        if self._final_writes and not line.alias_fields and not line.terminator:
            for value in ir.reads(line):
                write = self._final_writes.get(self.root_of.get(value.name, ""))
                if write is not None:
                    raise late_read_failure(node, self.root_of[value.name], write)
        if FINAL_WRITE in node.meta:
            roots = [self.root_of[value.name] for value in ir.writes(line)]
            self._final_writes.update([(root, node) for root in roots if root in self.external_values])

    def _with_stream(self, line: ir.LineBase) -> ir.LineBase:
        """Returns a line on the stream that the open guards make current for its device."""
        if not line.has_stream or line.event_step or line.bracket[1] or ir.is_release(line):
            return line
        device = str(ir.stream_device(line))
        stream = next((number for name, number in reversed(self.guard_stack) if number and name == device), 0)
        return line if stream == line.stream else line.replace(stream=stream)

    def _initialize_if_read(self, line: ir.LineBase) -> None:
        """Replaces the allocation of memory that a line reads before any write by a call that keeps its content."""
        written = {self.root_of[value.name] for value in ir.writes(line)}
        if not line.alias_fields:
            for value in ir.reads(line):
                root = self.root_of.get(value.name, "")
                if root in self.uninitialized and root not in written:
                    position = self.uninitialized.pop(root)
                    allocation = self.lines[position]
                    self.lines[position] = initialized = _as_initialized(allocation)
                    self.state.node_of[id(initialized)] = self.state.node_of[id(allocation)]
        for root in written:
            self.uninitialized.pop(root, None)

    def define_pending_symbols(self, node: Node) -> None:
        """Defines the symbols of value types that no node before this one has defined."""
        for name, value in list(self.pending_symbols.items()):
            defining_node = self.defining_nodes.get(name)
            if name in self.pending_symbols and not (defining_node is not None and self._hoist(defining_node)):
                self._define_from_type(name, value, node)
        for value, rank in list(self.pending_rank_checks.values()):
            info = self.state.symbols.fresh("n")
            self.emit(self.size_line(info, value, 0, "size", rank), node)

    def _hoist(self, node: Node) -> bool:
        """Imports a node of arithmetic early; returns whether that is possible."""
        if node in self.env:
            return False
        if isinstance(node.meta.get("val"), torch.Tensor) or node.target is operator.getitem:
            return False
        if all(item in self.env or self._hoist(item) for item in node.all_input_nodes):
            self.import_node(node)
            return True
        return False

    def _define_from_type(self, name: str, value: ir.Value, node: Node) -> None:
        """Defines a symbol by a size or stride of a value that equals it or is a multiple of it."""
        symbol, info = make_symbol(name), self.state.symbols.info(name)
        for of, dim, number in sizes_of(value.tensor_type):
            if number == symbol:
                is_external = value.name in self.external_values
                line = self.size_line(info, value, dim, of) if is_external else Bind(info, value, (ir.Tag(of, (dim,)),))
                self.emit(line, node)
                return
        for of, dim, number in sizes_of(value.tensor_type):
            factor = constant_factor(number, symbol)
            if factor is not None:
                self.emit(Bind(info, value, (ir.Tag(of, (dim,)), ir.Tag("divide", (factor,)))), node)
                return
        reason = f"no node before it defines {name}, a number in the type of '{value.name}'"
        raise failure(node, reason, f"Keep the node that computes {name}, or add an aten.sym_size.int of a tensor")

    def coalesced_lines(
        self, arguments: Iterable[ir.Value], owned: Collection[str] = (), added: Sequence[ir.LineBase] = ()
    ) -> list[ir.LineBase]:
        """Returns the lines so far, and added ones, without the copies that sharing memory makes superfluous."""
        results = self.functional_results | self.updates.keys()
        arguments = list(arguments)
        lines = drop_early_frees([*self.lines, *added], arguments)
        lines = coalesce_copies(lines, arguments, self.copies, results, owned)
        if not self.updates:
            return lines
        uncertain = self.updates.keys() & {value.name for line in lines for value in ir.used(line)}
        return [item for line in lines for item in self._with_layout(line, uncertain)]

    def _with_layout(self, line: ir.LineBase, uncertain: Collection[str]) -> tuple[ir.LineBase, ...]:
        """Returns a line whose result has the declared layout, now that calls are in-place or not."""
        if isinstance(line, ExternCall) and any(value.name in uncertain for value in ir.defined(line)):
            return with_declared_layout(line)
        return (line,)

    def size_line(self, info: SymbolInfo, tensor: ir.Value, dim: int, of: str, rank: int = 0) -> SizeOf:
        """Returns the line that reads a size of a tensor, with the tensor's pending rank check."""
        pending = self.pending_rank_checks.pop(tensor.name, None)
        self.size_symbols.setdefault((tensor.name, of, dim), make_symbol(info.name))
        return SizeOf(info, tensor, dim, of, rank or (pending[1] if pending is not None else 0))


def _as_initialized(line: ir.LineBase) -> ir.LineBase:
    """Returns a line that makes the same memory with arbitrary content."""
    if isinstance(line, Workspace):
        return line.replace(zeroed=True)
    assert isinstance(line, Alloc)
    type_ = line.result.tensor_type
    keywords = (("dtype", type_.dtype), ("device", type_.device))
    arguments = (type_.sizes, type_.strides)
    target = "aten.empty_strided.default"
    return ExternCall((line.result,), target, arguments, keywords, stream=line.stream, origin=line.origin)


def sizes_of(type_: ir.TensorType) -> list[tuple[str, int, ir.Size]]:
    """Returns the sizes and strides of a type as ("size" or "stride", dimension, number)."""
    sizes = [("size", dim, size) for dim, size in enumerate(type_.sizes)]
    return sizes + [("stride", dim, stride) for dim, stride in enumerate(type_.strides)]


def constant_factor(number: ir.Size, symbol: sympy.Symbol) -> int | None:
    """Returns the constant of a number that is a positive constant times a symbol; None for any other."""
    if not isinstance(number, sympy.Mul):
        return None
    factor, rest = number.as_coeff_Mul()
    return int(factor) if rest == symbol and factor.is_Integer and factor > 0 else None


class OperandMatcher:
    """Compares the operands of a line with those of its node, and maps the line's values to the node's."""

    def __init__(self) -> None:
        self.current_values: dict[str, ir.Value] = {}

    def __call__(self, then: object, now: object) -> bool:
        """Whether two trees of operands agree: literals are equal, and values have equal types."""
        if isinstance(then, ir.Value):
            if type(now) is not ir.Value or now.type != then.type:
                return False
            return self.current_values.setdefault(then.name, now) is now
        if isinstance(then, tuple):
            return isinstance(now, tuple) and len(then) == len(now) and all(map(self, then, now))
        if isinstance(then, float):
            return type(now) is float and (then == now or (then != then and now != now))
        return (type(now) is type(then) or isinstance(then, sympy.Basic)) and bool(then == now)

    def values(self, then: tuple[ir.Value | None, ...]) -> tuple[ir.Value | None, ...]:
        """Returns the node's values for values of the line."""
        return tuple([None if value is None else self.current_values[value.name] for value in then])
