"""Import of regions: calls of their submodules as launches, and graphs of operators as regions."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from fxwrap import wrapper_ir as ir
from fxwrap.converters.from_fx.functional import copy_operand
from fxwrap.converters.from_fx.graph_importer import GraphImporter, ImportState
from fxwrap.converters.from_fx.kernel_table import KernelTable
from fxwrap.converters.from_fx.kernels import emit_launch
from fxwrap.converters.from_fx.nodes import failure, result_name
from fxwrap.converters.from_fx.numbers import import_arithmetic
from fxwrap.converters.from_fx.symbols import ImportedSymbols
from fxwrap.converters.fx.regions import (
    ACCEPT,
    EDIT_ONE,
    FORM,
    REGION,
    accept_graph,
    called_region,
    get_called_region,
    region_of,
)
from fxwrap.devices import FX
from fxwrap.errors import RegionError, RewriteError
from fxwrap.inference import CallInference, InferredResult
from fxwrap.lines import Alloc, ExternCall
from fxwrap.regions import Region, output_name, without_unused_results
from fxwrap.symbolic import SymbolInfo, canonicalize, is_symbol_name, make_symbol
from fxwrap.torch_compat import OpOverload
from fxwrap.wrapper_ir import KernelDefinition, TensorType, Value

_COPY = torch.ops.aten.copy_.default

# --- calls of regions -----------------------------------------------------------------------------------------------


def import_region_call(importer: GraphImporter, node: Node) -> None:
    """Imports the call of a region's submodule as a launch of a kernel in the language "fx"."""
    module = called_region(importer.module, node)
    region = region_of(module)
    assert module is not None and region is not None
    check_region(module, str(node.target), _calls_of(node))
    is_functional = module.meta.get(FORM) == "functional"
    tensors = len(region.reads) + (len(region.overwritten) if is_functional else len(region.results))
    if node.kwargs or len(node.args) != tensors + len(region.symbols):
        reason = f"the region takes {tensors} tensors and {len(region.symbols)} symbols, not {len(node.args)} arguments"
        raise failure(node, reason, "Pass each of them once, by position")
    items = [importer.tensor(node, item) for item in node.args[:tensors]]
    symbols = [importer.argument(node, item) for item in node.args[tensors:]]
    reads, outs = items[: len(region.reads)], tuple(items[len(region.reads) :])
    if is_functional:
        outs = _allocate_results(importer, node, region, outs, symbols)
    definition = KernelDefinition(str(node.target), FX.name, str(region), region.signature)
    kernel = importer.state.kernels.add(definition)
    emit_launch(importer, node, kernel, reads, outs, symbols, (1, 1, 1))
    importer.env[node] = outs if is_functional else ()


def _allocate_results(
    importer: GraphImporter, node: Node, region: Region, overwritten: Sequence[Value], symbols: Sequence[object]
) -> tuple[Value, ...]:
    """Returns the memory of a functional region's results: copies of the tensors that it overwrites, or new memory."""
    old = dict(zip(region.overwritten, overwritten, strict=True))
    numbers = {make_symbol(name): sympy.sympify(item) for name, item in zip(region.symbols, symbols, strict=True)}
    outs = []
    for index, result in enumerate(region.results):
        if index in old:
            outs.append(copy_operand(importer, node, old[index]))
            continue
        type_ = result.tensor_type
        sizes, strides = [_substituted(items, numbers) for items in (type_.sizes, type_.strides)]
        value = importer.value(result_name(node, (index,)), TensorType(type_.dtype, sizes, strides, type_.device))
        importer.emit_definition(Alloc(value), node)
        outs.append(value)
    return tuple(outs)


def _substituted(sizes: tuple[ir.Size, ...], numbers: Mapping[sympy.Symbol, sympy.Basic]) -> tuple[ir.Size, ...]:
    return tuple([canonicalize(size, numbers) if isinstance(size, sympy.Basic) else size for size in sizes])


def _calls_of(node: Node) -> list[str]:
    """Returns the names of the nodes that call the same submodule."""
    return [other.name for other in node.graph.nodes if other.op == "call_module" and other.target == node.target]


# --- consistency ----------------------------------------------------------------------------------------------------


def check_region(module: GraphModule, name: str, calls: Sequence[str] = ()) -> None:
    """Raises RegionError if the graph of a region's submodule is not that of its metadata.

    `name` is that of the submodule; `calls` are the names of the nodes that call it.
    """
    region = region_of(module)
    assert region is not None, f"{name} has no metadata of a region"
    difference = _difference(_GraphReader(module, name).read(), region)
    if difference is None:
        return
    shared = f"{EDIT_ONE}; its calls are {', '.join(calls)}. " if len(calls) > 1 else ""
    raise RegionError(name, *difference, shared + ACCEPT)


def update_region(node: Node) -> Region:
    """Makes the metadata of a region that of its edited graph, for all calls that share it, and returns it.

    The new metadata has no loop IR and no axes: these describe the kernel that fxwrap built. `node` calls the region.
    Raises RegionError if its graph is no region.
    """
    module = get_called_region(node)
    region = _GraphReader(module, str(node.target), CallInference(SymbolInfo)).read()
    module.meta[REGION] = region
    accept_graph(module)
    module.recompile()
    return region


def _difference(actual: Region, recorded: Region) -> tuple[str, str] | None:
    """Returns the field in which two regions differ, and how; None if they have equal operators."""
    counts = [(len(item.reads), len(item.symbols)) for item in (actual, recorded)]
    if counts[0] != counts[1]:
        shown = [f"{tensors} tensors and {symbols} symbols" for tensors, symbols in counts]
        return "inputs", f"its graph takes {shown[0]}, its metadata {shown[1]}"
    for position, call in enumerate(actual.calls):
        known = recorded.calls[position] if position < len(recorded.calls) else None
        if known is None or _call_text(call) != _call_text(known):
            other = "nothing" if known is None else _call_text(known)
            return "operators", f"its graph calls {_call_text(call)}, where its metadata has {other}"
    if len(actual.calls) < len(recorded.calls):
        return "operators", f"its graph has no call {_call_text(recorded.calls[len(actual.calls)])}"
    names = [[value.name for value in item.results] for item in (actual, recorded)]
    if names[0] != names[1]:
        return "results", f"its graph returns {', '.join(names[0])}, its metadata {', '.join(names[1])}"
    return None


def _call_text(call: ExternCall) -> str:
    return ir.line_text(call.replace(results=())).removeprefix("extern.call @")


# --- graphs as regions ----------------------------------------------------------------------------------------------


class _GraphReader:
    """Reads the graph of a region's submodule; result types come from `inference`, and are unknown without it."""

    def __init__(self, module: GraphModule, name: str, inference: CallInference | None = None) -> None:
        self.module = module
        self.name = name
        self.inference = inference
        nodes = list(module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self.symbols = [node for node in placeholders if _symbol_of(node) is not None]
        self.tensors = [node for node in placeholders if node not in self.symbols]
        self.nodes = [node for node in nodes if node.op not in ("placeholder", "output")]
        self.output = module.graph.output_node()
        self.calls: list[ExternCall] = []
        names = frozenset([info.name for node in self.symbols if (info := _symbol_of(node)) is not None])
        symbols = ImportedSymbols({}, names, frozenset(), {})
        inference = inference or CallInference(symbols.info, symbols.fresh)
        state = ImportState(symbols, inference, KernelTable(()))
        self.importer = GraphImporter(state, module, import_arithmetic, names)

    def read(self) -> Region:
        written = self._written()
        outs = list(written)
        reads = [node for node in self.tensors if node not in written]
        if self.module.meta.get(FORM) == "functional":
            outs = [node for node in reads if str(node.target).startswith("out")]
            reads = [node for node in reads if node not in outs]
        parameters = [self._parameter(node, f"in{index}") for index, node in enumerate(reads)]
        positions = [self._position(node, index) for index, node in enumerate(outs)]
        old = {position: self._parameter(node, output_name(position)) for position, node in zip(positions, outs)}
        names = [self._symbol(node) for node in self.symbols]
        for node in self.nodes:
            if node not in written.values():
                self._node(node)
        returned: Any = [node.args[1] for node in written.values()] or self.output.args[0]
        results = [self.importer.operand(self.output, item) for item in returned]
        read = {value.name for call in self.calls for value in ir.used(call)}
        overwritten = {position: value for position, value in old.items() if value.name in read}
        calls = without_unused_results(self.calls, results)
        return Region(tuple(parameters), overwritten, tuple(names), calls, tuple(results))

    def _error(self, field: str, reason: str) -> RegionError:
        remedy = "A region calls operators without effects, and writes its results to its outputs at its end"
        return RegionError(self.name, field, reason, remedy)

    def _written(self) -> dict[Node, Node]:
        """Returns the outputs of the in-place form, each with the node that writes it, in the order of placeholders."""
        writes = {node.args[0]: node for node in self.nodes if node.target is _COPY}
        return {node: writes[node] for node in self.tensors if node in writes}

    def _position(self, node: Node, index: int) -> int:
        suffix = str(node.target).removeprefix("out")
        return int(suffix) if suffix.isdigit() else index

    def _parameter(self, node: Node, name: str) -> Value:
        type_ = node.meta.get("fxwrap_type")
        if type_ is None:
            val = node.meta.get("val")
            if not isinstance(val, torch.Tensor):
                raise self._error("inputs", f"its input '{node.name}' has no meta['val']")
            type_ = self.importer.state.symbols.type_of(val)
        value = self.importer.env[node] = Value(name, type_)
        return value

    def _symbol(self, node: Node) -> str:
        info = _symbol_of(node)
        assert info is not None
        self.importer.set_number(node, make_symbol(info.name))
        return info.name

    def _node(self, node: Node) -> None:
        target, importer = node.target, self.importer
        source = node.args[0] if node.args else None
        if target is operator.getitem and isinstance(source, Node) and isinstance(importer.env.get(source), tuple):
            importer.env[node] = importer.env[source][node.args[1]]
        elif isinstance(target, OpOverload):
            self._call(node, target)
        else:
            importer.import_node(node)

    def _call(self, node: Node, target: OpOverload) -> None:
        schema, importer = ir.operator_schema(target), self.importer
        if not schema.is_pure:
            raise self._error("operators", f"'{node.name}' ({target}) writes its operands or has another effect")
        arguments = tuple([importer.argument(node, item) for item in node.args])
        keywords = tuple([(name, importer.argument(node, item)) for name, item in node.kwargs.items()])
        name = f"v{len(self.calls)}"
        if self.inference is None:
            result = _result_without_type(node, name)
        else:
            try:
                types = self.inference.results(target, arguments, keywords)
            except RewriteError as error:
                raise self._error("operators", f"'{node.name}' ({target}) fails: {error}") from error
            result = _typed_result(types[0] if len(types) == 1 else types, name)
        importer.env[node] = result
        self.calls.append(ExternCall((result,), schema.name, arguments, keywords))


def _symbol_of(node: Node) -> SymbolInfo | None:
    """Returns the symbol of a placeholder; None for a tensor."""
    info = node.meta.get("fxwrap_symbol")
    if isinstance(info, SymbolInfo):
        return info
    is_number = isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool)
    return SymbolInfo(str(node.target)) if is_number and is_symbol_name(str(node.target)) else None


def _result_without_type(node: Node, name: str) -> ir.Result:
    indices: list[Any] = [user.args[1] for user in node.users if user.target is operator.getitem]
    type_ = ir.OpaqueType("unknown")
    if not indices:
        return Value(name, type_)
    return tuple([Value(f"{name}_{index}", type_) for index in range(max(indices) + 1)])


def _typed_result(tree: InferredResult | tuple[Any, ...] | None, name: str) -> ir.Result:
    if isinstance(tree, tuple):
        return tuple([_typed_result(item, f"{name}_{index}") for index, item in enumerate(tree)])
    return None if tree is None else Value(name, tree.type)
