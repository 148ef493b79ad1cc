"""Lowering: a graph becomes a program."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from fxwrap.errors import ArgumentError, FusionWarning, GraphError
from fxwrap.fx_passes.attention.flex import expand_declined_attention
from fxwrap.fx_passes.effects import attribute_of, is_token
from fxwrap.fx_passes.fake_propagation import check_example_inputs
from fxwrap.fx_passes.prepare import prepare_graph
from fxwrap.fx_passes.prepared_graph import GraphSource, PreparedGraph
from fxwrap.garbage_collection import gc_paused
from fxwrap.lines import CheckLayout, Return, View
from fxwrap.lines.frees import insert_frees
from fxwrap.lowering.builder import (
    Builder,
    FakeValue,
    LoweringRequest,
    NodeCoverage,
    Payload,
    ProgramState,
    node_coverage,
)
from fxwrap.lowering.calls.nodes import literal
from fxwrap.lowering.control.blocks import BlockLowering
from fxwrap.lowering.control.higher_order import lower_higher_order
from fxwrap.lowering.control.streams import stream_plan
from fxwrap.lowering.fusion.kernels import extent_of
from fxwrap.lowering.graph_lowering import GraphLowering
from fxwrap.lowering.launches import KernelDeclined
from fxwrap.lowering.rules import RULES
from fxwrap.lowering.symbols.inputs import InputBinder, replace_unsolvable
from fxwrap.lowering.symbols.table import ProgramSymbols
from fxwrap.options import Options
from fxwrap.passes.provenance import assign_call_handles
from fxwrap.passes.stream_events import insert_stream_events
from fxwrap.printers import KernelPrinter, print_kernel
from fxwrap.signature.exported import check_examples
from fxwrap.symbolic import Size, SymbolInfo, make_symbol
from fxwrap.torch_compat import OpOverload, is_opaque, one_compile_at_a_time, real_object, storage_identity
from fxwrap.wrapper_ir import (
    Block,
    ConstantStore,
    Input,
    OpaqueType,
    Operand,
    Ownership,
    Program,
    ProgramConstant,
    TensorType,
    Value,
    leaves,
    live_bytes,
    released_inputs,
    symbol_infos,
)
from fxwrap.wrapper_ir.operators import operator_schema


@one_compile_at_a_time
def lower(
    graph: GraphModule | ExportedProgram,
    example_inputs: Sequence[object] | None = None,
    *,
    example_kwargs: Mapping[str, object] | None = None,
    options: Options | None = None,
    ownership: Mapping[int, Ownership] | None = None,
    name: str = "program",
) -> Program:
    """Lowers a graph of ATen operators to a program with the same inputs and outputs, flattened.

    Args:
        graph: a hand-written graph, one from make_fx or AOTAutograd, or an exported program, whose parameters and
            buffers become constants of the program. It is not changed.
        example_inputs: one value per placeholder; needed only where nodes have no fake `meta["val"]`. For an exported
            program, if any, the positional arguments of the export, and `example_kwargs` the keyword arguments.
        options: see `Options`.
        ownership: the ownership of inputs, by position; other inputs are borrowed, or mutable if the graph writes them.
        name: the program's name.

    Raises GraphError, with the node, its location in the model's source and a remedy, if it cannot be compiled, and
    ArgumentError for another object than a graph.
    """
    remedy = "Trace a function with make_fx, or export a module with torch.export.export"
    ArgumentError.check("fxwrap.lower", "graph", graph, (GraphModule, ExportedProgram), remedy)
    if isinstance(graph, ExportedProgram):
        check_examples(graph, example_inputs, example_kwargs)
        example_inputs = None
    elif example_kwargs:
        raise GraphError("", "a GraphModule has no keyword arguments", "Pass one example input for each placeholder")
    else:
        check_example_inputs(graph, example_inputs)
    with gc_paused():
        return lower_with_coverage(graph, example_inputs, options=options, ownership=ownership, name=name).program


@dataclass(frozen=True)
class Lowered:
    """A program, the outcome of each call of its graph, and the nodes whose kernels were declined, with the reasons.

    `warnings` are the texts of warnings that named any of these nodes.
    """

    program: Program
    coverage: tuple[NodeCoverage, ...]
    declined_nodes: Mapping[str, str]
    warnings: tuple[str, ...] = ()


def lower_with_coverage(
    graph: GraphModule | ExportedProgram | GraphSource,
    example_inputs: Sequence[object] | None = None,
    *,
    options: Options | None = None,
    ownership: Mapping[int, Ownership] | None = None,
    name: str = "program",
    print_kernel: KernelPrinter = print_kernel,
) -> Lowered:
    """Prepares and lowers a graph as `lower` does; also returns the coverage of its calls."""
    options = (options or Options()).resolve_devices()
    prepared = prepare_graph(graph, example_inputs, options, name, fused_operators=RULES)
    return lower_prepared(prepared, options, ownership, print_kernel=print_kernel)


def lower_prepared(
    prepared: PreparedGraph,
    options: Options,
    ownership: Mapping[int, Ownership] | None = None,
    *,
    declined_nodes: Mapping[str, str] = MappingProxyType({}),
    print_kernel: KernelPrinter = print_kernel,
    tuned_devices: frozenset[str] = frozenset(),
    library_calls: frozenset[str] = frozenset(),
) -> Lowered:
    """Lowers a graph that `prepare_graph` returned.

    `declined_nodes` are nodes that become extern calls although they have lowering rules, by name, with the reason;
    `print_kernel` chooses how kernels are printed; `tuned_devices` and `library_calls` are a `LoweringRequest`'s.
    """
    issued: list[str] = []
    unfused: frozenset[str] = frozenset()
    while True:
        try:
            request = LoweringRequest(options, declined_nodes, print_kernel, tuned_devices, library_calls, unfused)
            expanded = expand_declined_attention(prepared, options, declined_nodes)
            return replace(_ProgramLowering(expanded, request, ownership or {}).lowered(), warnings=tuple(issued))
        except KernelDeclined as error:
            is_known = error.nodes <= declined_nodes.keys() and error.unfused <= unfused
            if is_known or (options.fallback == "error" and not error.expected):
                raise
            if not error.expected:
                issued.append(f"{error}; these operators are called instead")
                warnings.warn(issued[-1], FusionWarning, stacklevel=4)
            declined_nodes = {**declined_nodes, **dict.fromkeys(sorted(error.nodes), error.reason)}
            unfused |= error.unfused


class _ProgramLowering:
    """The lowering of a program: its inputs, constants, body and outputs."""

    def __init__(self, source: PreparedGraph, request: LoweringRequest, ownership: Mapping[int, Ownership]) -> None:
        self.source = source
        self.request = request
        self.ownership = ownership
        options = request.options
        symbols = ProgramSymbols(options.symbol_ranges, options.symbol_hints, source.least_sizes)
        self.state = ProgramState(symbols, source.graph_id)
        self.nodes: list[Node] = list(source.graph_module.graph.nodes)
        self.builder = Builder(source.fakes, self.state, stream_plan(self.nodes, options.device_specs(), source.fakes))
        self.builder.constants = self
        blocks = BlockLowering(self.builder, self, request, lower_higher_order)
        self.body = GraphLowering(
            self.nodes, self.builder, request, self._lower_attribute, partial(lower_higher_order, blocks),
            source.returns_mutated_inputs,
        )  # fmt: skip
        self.binder = InputBinder(self.builder)
        self.inputs: list[tuple[Node, Value | SymbolInfo]] = []
        self._constants: dict[str, Value] = {}
        self._constant_of: dict[int, Value] = {}
        self._read_only: set[str] = set()

    def lowered(self) -> Lowered:
        builder = self.builder
        placeholders = self.source.graph_module.graph.find_nodes(op="placeholder")
        replace_unsolvable(builder, [builder.fakes[node] for node in placeholders])
        for node in placeholders:
            self._placeholder(node)
        values = [value for _, value in self.inputs if isinstance(value, Value)]
        self.binder.bind_sizes([*values, *self._constants.values()])
        if self.request.options.check_inputs:
            self.binder.add_checks(values)
            tensors = [(value, value.type) for value in values if isinstance(value.type, TensorType)]
            self.binder.lines.extend([CheckLayout(value, type_, value.name) for value, type_ in tensors])
        builder.buffer.lines.extend(self.binder.lines)
        owned = {
            value.name for position, (_, value) in enumerate(self.inputs)
            if self.ownership.get(position) is Ownership.OWNED
        }  # fmt: skip
        first = len(builder.buffer.lines)
        hint = self.body.lower(lambda value: value.name not in owned, self._read_only)
        if self.request.options.check_inputs:
            builder.buffer.lines[first:first] = self.binder.equality_checks()
        program = assign_call_handles(self._assemble(self._outputs()))
        if program.kernels:
            note = peak_memory_note(program, builder, self.nodes, hint)
            program = program.replace(header=tuple(sorted([*program.header, *([("peak", note)] if note else [])])))
        replaced = [node_coverage(node, node.name, kind) for node, kind in self.source.replaced.items()]
        reasons = self.source.coverage_reasons
        coverage = [
            item if item.reason else replace(item, reason=reasons.get(item.node, ""))
            for item in (*replaced, *self.state.coverage)
        ]
        return Lowered(program, tuple(coverage), self.request.declined_nodes)

    def _placeholder(self, node: Node) -> None:
        builder, fake = self.builder, self.builder.fakes[node]
        if node.name in self.source.constants:
            builder.env[node] = self._add_constant(node.name, fake, self.source.constants[node.name])
            return
        if isinstance(fake, tuple | list | dict) and not is_token(node):
            raise GraphError(node.name, "it contains several values", "Use one placeholder for each value")
        value: Value | SymbolInfo
        operand: Operand
        if is_token(node):
            value, operand = Value(builder.unique(node.name), OpaqueType("NoneType")), None
        elif isinstance(fake, torch.Tensor) or is_opaque(fake):
            value = operand = builder.add_value(node.name, fake)
        elif isinstance(fake, torch.SymInt | torch.SymFloat | torch.SymBool):
            operand = builder.symbols.expression(fake)
            value = self.binder.scalar_input(fake)
        else:
            value, operand = builder.add_scalar(node.name, fake), fake
        builder.env[node] = operand
        self.inputs.append((node, value))

    def constant(self, payload: Payload, name: str) -> Value:
        """Returns the value of a constant of the program; adds it if there is none."""
        value = self._constant_of.get(id(payload))
        return self._add_constant(name, payload, payload) if value is None else value

    def _add_constant(self, name: str, fake: FakeValue, payload: Payload) -> Value:
        value = self._constant_of[id(payload)] = self.builder.add_value(name, fake)
        self._constants[value.name] = value
        self.state.constants[value.name] = payload
        return value

    def _lower_attribute(self, node: Node) -> None:
        payload = real_object(attribute_of(node))
        if not isinstance(payload, torch.Tensor) and not is_opaque(payload):
            self.builder.env[node] = payload
            return
        key = str(node.target)
        value = self._constant_of.get(id(payload))
        if value is None:
            fake = self.builder.fakes[node]
            value = self._add_constant(key.replace(".", "_"), payload if fake is None else fake, payload)
        if key.rpartition(".")[2].startswith(("_tensor_constant", "lifted_tensor")):
            self._read_only.add(value.name)
        self.builder.env[node] = value

    def _outputs(self) -> tuple[Operand, ...]:
        self._separate_returned_views()
        output = self.source.output
        return tuple(leaves(literal(self.builder, output.args[0], output)))

    def _separate_returned_views(self) -> None:
        """Makes views of allocated memory that are a returned tensor by their type, too, tensors of their own.

        AOTAutograd marks outputs that need no gradient: a tensor that was also returned as its `detach()` lost its own.
        """
        env, nodes = self.builder.env, self.source.output.all_input_nodes
        external = {value.name for _, value in self.inputs if isinstance(value, Value)} | self._constants.keys()
        returned = Counter([value.name for node in nodes if isinstance(value := env[node], Value)])
        for node in nodes:
            value = env[node]
            if not isinstance(value, Value) or returned[value.name] == 1 or not isinstance(node.target, OpOverload):
                continue
            is_external = self.builder.storages.root(value).name in external
            if operator_schema(node.target).aliased_argument is not None and not is_external:
                env[node] = view = self.builder.add_alias(node.name, value.tensor_type, value)
                self.builder.emit(View(view, value, origin=self.builder.origin(node)))

    def _assemble(self, returned: tuple[Operand, ...]) -> Program:
        builder = self.builder
        inputs = [Input(value, self._ownership(position, value)) for position, (_, value) in enumerate(self.inputs)]
        values = [item.value for item in inputs if isinstance(item.value, Value)]
        initial = [*values, *self._constants.values()]
        lines = insert_frees([*builder.buffer.lines, Return(returned)], initial, released_inputs(inputs))
        mutated = builder.storages.mutated
        program = Program(
            re.sub(r"\W", "_", self.source.name),
            tuple(inputs),
            Block((), lines),
            tuple(ProgramConstant(value, value.name in mutated) for value in self._constants.values()),
            self.state.kernels.definitions(),
            tuple(self.state.functions.items()),
            header=_header(self.request.options, builder.storages.device_types()),
            store=ConstantStore(dict(self.state.constants)),
        )
        return insert_stream_events(program)

    def _ownership(self, position: int, value: Value | SymbolInfo) -> Ownership:
        if not isinstance(value, Value) or not isinstance(value.type, TensorType):
            return Ownership.BORROWED
        ownership = self.ownership.get(position, Ownership.BORROWED)
        if value.name in self.builder.storages.mutated and ownership in (Ownership.BORROWED, Ownership.SHARED):
            return Ownership.MUTABLE
        return ownership


def _header(options: Options, device_types: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Returns the header of a program: the options but for the emitter, and the types of its devices."""
    text = options.replace(emitter=Options().emitter).text()
    parts = {"options": text, "target": ", ".join(device_types)}
    return tuple([(name, part) for name, part in parts.items() if part])


def peak_memory_note(program: Program, builder: Builder, nodes: Sequence[Node], hint: Callable[[Size], int]) -> str:
    """Returns a note for the header of a program whose peak memory is above that of the unfused graph, else "".

    Both count the bytes that the program allocates, with the hints of symbolic sizes.
    """
    hints = builder.symbols.hints(hint)
    hints |= {name: hint(make_symbol(name)) for name in symbol_infos(program) if name not in hints}  # those of blocks
    fused = live_bytes(program, hints, include_inputs=False, include_constants=False).peak
    unfused = _unfused_peak(builder, nodes, hint)
    return f"{fused} bytes, {unfused} without fusion" if fused > unfused else ""


def _unfused_peak(builder: Builder, nodes: Sequence[Node], hint: Callable[[Size], int]) -> int:
    """Returns the peak if every node allocates its results, and each storage is freed after its last user."""
    stored = {node: {storage_identity(fake): fake for fake in _tensors(builder, node)} for node in nodes}
    last_use: dict[int, int] = {}
    for position, node in enumerate(nodes):
        for other in (node, *node.all_input_nodes):
            last_use |= dict.fromkeys(stored[other], position)
    freed_at: dict[int, list[int]] = {}
    for storage, position in last_use.items():
        freed_at.setdefault(position, []).append(storage)
    seen = {storage for node in nodes if node.op in ("placeholder", "get_attr") for storage in stored[node]}
    allocated: dict[int, int] = {}
    live = peak = 0
    for position, node in enumerate(nodes):
        for storage, fake in stored[node].items():
            if storage not in seen:
                seen.add(storage)
                allocated[storage] = hint(extent_of(builder.symbols.tensor_type(fake))) * fake.dtype.itemsize
                live += allocated[storage]
        peak = max(peak, live)
        for storage in freed_at.get(position, ()):
            live -= allocated.pop(storage, 0)
    return peak


def _tensors(builder: Builder, node: Node) -> list[torch.Tensor]:
    fake = builder.fakes.get(node)
    return [item for item in (fake if isinstance(fake, tuple | list) else (fake,)) if isinstance(item, torch.Tensor)]
