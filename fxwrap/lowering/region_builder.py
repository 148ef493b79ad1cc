"""From a kernel plan to its region: the nodes of the prepared graph that compute the kernel's outputs.

The nodes are those between the memory that the kernel reads and its outputs. A node whose results several kernels
compute is in the region of each. There is no region if the kernel shares an operator with another one such that one
of them needs an intermediate result of the other: `RegionCut` names that node, which then becomes an extern call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import sympy
import torch
from torch.fx import Node

from fxwrap.lines import ExternCall
from fxwrap.loop_ir import Kernel
from fxwrap.lowering.builder import Builder
from fxwrap.lowering.calls.nodes import literal, with_device_index
from fxwrap.lowering.fusion.definitions import Definition, InPlaceStore, Viewed, definitions_in
from fxwrap.lowering.fusion.iteration_mappings import KernelPlan
from fxwrap.lowering.fusion.materialise import MaterialisationPlan
from fxwrap.lowering.graph_definitions import DefinitionOperand, GraphDefinitions
from fxwrap.regions import Region, output_name
from fxwrap.symbolic import Size
from fxwrap.torch_compat import OpOverload
from fxwrap.wrapper_ir import (
    Operand,
    Result,
    Role,
    TensorType,
    Value,
    contiguous_strides,
    map_leaves,
    symbols_used,
    used,
    values_in,
)
from fxwrap.wrapper_ir.operators import operator_schema


class RegionCut(Exception):
    """A kernel without a region; `node` is the node that the cut goes through."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.name)
        self.node = node


@dataclass(frozen=True)
class BuiltRegion:
    """A region; `inputs` are the values of `region.reads`, `outputs` those that the launch writes."""

    region: Region
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True)
class RegionContext:
    """The graph that regions are parts of: its nodes, and the values of definitions so far."""

    builder: Builder
    definitions: GraphDefinitions
    plan: MaterialisationPlan
    nodes: Sequence[Node]
    values: Mapping[Definition, Value]

    @cached_property
    def order(self) -> Mapping[Node, int]:
        """The positions of the nodes."""
        return {node: position for position, node in enumerate(self.nodes)}


Source: TypeAlias = "tuple[Node, int | None]"
"""A node, and the index of its result if it has several."""


def build_region(
    context: RegionContext, plan: KernelPlan, stored: Sequence[Definition], outputs: Sequence[Value], kernel: Kernel
) -> BuiltRegion:
    """Returns the region of a planned kernel, whose definitions `stored` are written to the values `outputs`.

    Raises RegionCut if its operators cannot be computed from the memory that the kernel's plan reads.
    """
    return _RegionBuilder(context, plan, list(outputs)).build(stored, kernel)


@dataclass(eq=False)
class _RegionBuilder:
    context: RegionContext
    plan: KernelPlan
    outputs: list[Value]
    reads: dict[str, tuple[Value, Value]] = field(default_factory=dict)  # by name: the parameter and the value read
    overwritten: dict[int, Value] = field(default_factory=dict)
    calls: list[ExternCall] = field(default_factory=list)
    shared: set[str] = field(default_factory=set)  # the names of parameters, views and results
    computed: dict[Node, Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.builder = self.context.builder
        self.definitions = self.context.definitions
        self.readable = {*self.plan.reads, *self.plan.operands}
        self.output_of_root = {self._root(value): index for index, value in enumerate(self.outputs)}

    def build(self, stored: Sequence[Definition], kernel: Kernel) -> BuiltRegion:
        sources = [self._source_of_output(definition) for definition in stored]
        for node in sorted(self._needed(sources), key=self.context.order.__getitem__):
            self._add_call(node)
        results = tuple([
            self._result(definition, source, position)
            for position, (definition, source) in enumerate(zip(stored, sources, strict=True))
        ])  # fmt: skip
        reads = tuple([parameter for parameter, _ in self.reads.values()])
        space, reduced = [tuple([(axis.name, axis.size) for axis in axes]) for axes in (kernel.axes, kernel.reduced)]
        overwritten = dict(sorted(self.overwritten.items()))
        symbols = self._symbols((*reads, *overwritten.values()), sources[0][0])
        calls = _without_unused_results(self.calls, results)
        region = Region(reads, overwritten, symbols, calls, results, space, reduced, str(kernel))
        return BuiltRegion(region, tuple([value for _, value in self.reads.values()]), tuple(self.outputs))

    # --- nodes ------------------------------------------------------------------------------------------------------

    def _source_of_output(self, definition: Definition) -> Source:
        result = self.definitions.results.get(definition)
        if result is None:  # an intermediate result of an operator
            raise RegionCut(self.context.nodes[self.context.plan.definitions[definition].position])
        if not isinstance(definition, InPlaceStore):
            return self._source_of_result(definition, result.node)
        write = self.definitions.reinplacing.slice_writes.get(result.node)
        source = result.node.args[1] if write is None else write.source
        assert isinstance(source, Node)
        return self._source(source)

    def _source(self, node: Node) -> Source:
        """Returns the node that computes a node's tensor.

        A node that writes its operand in place has no operator in a region: its memory already has the new content.
        """
        reinplacing = self.definitions.reinplacing
        while node in reinplacing.slice_writes or node in reinplacing.copies:
            write = reinplacing.slice_writes.get(node)
            base = node.args[0] if write is None else write.base
            assert isinstance(base, Node)
            node = base
        definition = self.definitions.operands[node]
        if not isinstance(definition, Definition) or definition not in self.definitions.results:
            return node, None
        return self._source_of_result(definition, self.definitions.results[definition].node)

    def _source_of_result(self, definition: Definition, node: Node) -> Source:
        operand = self.definitions.operands[node]
        return (node, operand.index(definition)) if isinstance(operand, tuple) else (node, None)

    def _needed(self, outputs: Iterable[Source]) -> set[Node]:
        """Returns the nodes that compute the outputs from memory."""
        needed: set[Node] = set()
        pending = [source for source in outputs if not self._is_boundary(source)]
        while pending:
            node, _ = pending.pop()
            if node in needed:
                continue
            if not isinstance(node.target, OpOverload) or not operator_schema(node.target).is_pure:
                raise RegionCut(node)
            needed.add(node)
            operands = [self._source(operand) for operand in node.all_input_nodes]
            pending.extend([source for source in operands if not self._is_boundary(source)])
        return needed

    def _operand_of(self, source: Source) -> DefinitionOperand:
        node, index = source
        operand = self.definitions.operands[node]
        return operand[index] if isinstance(operand, tuple) and index is not None else operand

    def _is_boundary(self, source: Source) -> bool:
        """Whether a result is in memory, or a number."""
        return not any(self._is_computed_here(item) for item in definitions_in(self._operand_of(source)))

    def _is_computed_here(self, definition: Definition) -> bool:
        if isinstance(definition, Viewed) or definition in self.plan.computed:
            return True
        is_result = definition in self.definitions.results
        return is_result and self.context.plan.access_of(definition) != "fetched"

    # --- calls ------------------------------------------------------------------------------------------------------

    def _add_call(self, node: Node) -> None:
        target, fake = node.target, self.builder.fakes[node]
        assert isinstance(target, OpOverload)
        schema = operator_schema(target)
        arguments = tuple([self._argument(node, item) for item in node.args])
        keywords = tuple([(name, self._argument(node, item)) for name, item in node.kwargs.items()])
        result = self._new_result(f"v{len(self.calls)}", fake)
        self.calls.append(ExternCall((result,), schema.name, arguments, keywords))
        if any(isinstance(item, Viewed) for item in definitions_in(self.definitions.operands[node])):
            self.shared |= {value.name for value in values_in((result,))}
        self.computed[node] = result

    def _new_result(self, name: str, fake: object) -> Result:
        if isinstance(fake, torch.Tensor):
            return Value(name, self.builder.symbols.tensor_type(fake))
        items = fake if isinstance(fake, tuple | list) else ()
        return tuple([self._new_result(f"{name}_{index}", item) for index, item in enumerate(items)]) or None

    def _call(self, target: str, operand: Value, type_: TensorType, *arguments: Operand, **keywords: Operand) -> Value:
        """Adds the call of an operator that is not in the graph."""
        result = Value(f"v{len(self.calls)}", type_)
        self.calls.append(ExternCall((result,), target, (operand, *arguments), tuple(keywords.items())))
        return result

    def _argument(self, node: Node, item: object) -> Operand:
        if isinstance(item, Node):
            return self._operand(node, self._source(item))
        if isinstance(item, list | tuple):
            return tuple([self._argument(node, part) for part in item])
        fake = self.builder.fakes[node]
        operand: Operand = map_leaves(literal(self.builder, item, node), lambda leaf: with_device_index(leaf, fake))
        return operand

    def _operand(self, node: Node, source: Source) -> Operand:
        """Returns the value of a result in the region: a parameter if it is in memory."""
        if self._is_boundary(source):
            return self._parameters(node, self._operand_of(source))
        result, index = self.computed[source[0]], source[1]
        return result[index] if isinstance(result, tuple) and index is not None else result

    def _parameters(self, node: Node, operand: DefinitionOperand) -> Operand:
        if isinstance(operand, tuple):
            return tuple([self._parameters(node, item) for item in operand])
        if isinstance(operand, dict):
            raise RegionCut(node)
        return self._parameter(node, operand) if isinstance(operand, Definition) else operand

    def _parameter(self, node: Node, definition: Definition) -> Value:
        value = self.context.values.get(definition)
        if value is None or definition not in self.readable:
            raise RegionCut(node)
        if value.name in self.reads:
            return self.reads[value.name][0]
        type_ = _without_offset(value.tensor_type)
        position = self.output_of_root.get(self._root(value))
        if position is not None and self._reads_output(position, value):
            parameter = self.overwritten.setdefault(position, Value(output_name(position), type_))
        else:
            parameter = Value(f"in{len(self.reads)}", type_)
            self.reads[value.name] = (parameter, value)
        self.shared.add(parameter.name)
        return parameter

    def _reads_output(self, position: int, value: Value) -> bool:
        """Whether an output is the memory of a value that the region reads; if so, the launch writes that value.

        The output may be a reshaped view of it.
        """
        output = self.outputs[position]
        if output.type == value.type:
            return True
        is_reshaped = position not in self.overwritten and output.tensor_type.dtype == value.tensor_type.dtype
        if is_reshaped and _is_contiguous(output.tensor_type) and _is_contiguous(value.tensor_type):
            self.outputs[position] = value
            return True
        return False

    def _root(self, value: Value) -> str:
        """Returns the name of the value that owns a value's memory."""
        return self.builder.storages.root(value).name

    # --- results ----------------------------------------------------------------------------------------------------

    def _result(self, definition: Definition, source: Source, position: int) -> Value:
        """Returns an output: a tensor with memory of its own, of the output's dtype and sizes."""
        value = self._operand(self.definitions.results[definition].node, source)
        assert isinstance(value, Value)
        type_, output = value.tensor_type, self.outputs[position].tensor_type

        def contiguous(sizes: tuple[Size, ...]) -> TensorType:
            return TensorType.contiguous(definition.dtype, sizes, type_.device)

        if type_.dtype != definition.dtype:
            value = self._call("aten._to_copy.default", value, contiguous(type_.sizes), dtype=definition.dtype)
        if type_.sizes != definition.sizes:
            value = self._call("aten.expand.default", value, contiguous(definition.sizes), definition.sizes)
            self.shared.add(value.name)
        if value.name in self.shared:
            layout = torch.contiguous_format
            value = self._call("aten.clone.default", value, contiguous(definition.sizes), memory_format=layout)
        self.shared.add(value.name)  # a second output with the same tensor is a copy
        if output.sizes != definition.sizes:  # the launch writes the memory of a reshaped input
            value = self._call("aten.view.default", value, contiguous(output.sizes), output.sizes)
        return value

    def _symbols(self, parameters: Sequence[Value], node: Node) -> tuple[str, ...]:
        names = {symbol.name: symbol for call in self.calls for symbol in symbols_used(call, *Role)}
        for value in parameters:
            sizes = (*value.tensor_type.sizes, *value.tensor_type.strides)
            names |= {item.name: item for size in sizes if isinstance(size, sympy.Basic) for item in size.free_symbols}
        if not all(map(self.builder.symbols.is_known, names.values())):
            raise RegionCut(node)
        return tuple(sorted(names))


def _without_unused_results(calls: Sequence[ExternCall], results: Sequence[Value]) -> tuple[ExternCall, ...]:
    """Returns calls with unused results of tuples removed."""
    read = {value.name for value in results} | {value.name for call in calls for value in used(call)}

    def used_part(result: Result) -> Result:
        if isinstance(result, tuple):
            return tuple([used_part(item) for item in result])
        return result if result is not None and result.name in read else None

    return tuple([replace(call, results=tuple(map(used_part, call.results))) for call in calls])


def _is_contiguous(type_: TensorType) -> bool:
    return type_.strides == contiguous_strides(type_.sizes)


def _without_offset(type_: TensorType) -> TensorType:
    return replace(type_, storage_offset=0)
