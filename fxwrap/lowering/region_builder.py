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
from fxwrap.lowering.builder import Builder, Operand
from fxwrap.lowering.calls.nodes import literal, with_device_index
from fxwrap.lowering.fusion.definitions import Definition, InPlaceStore, Viewed, definitions_in
from fxwrap.lowering.fusion.iteration_mappings import KernelPlan
from fxwrap.lowering.fusion.materialise import MaterialisationPlan
from fxwrap.lowering.graph_definitions import GraphDefinitions
from fxwrap.regions import Region, output_name
from fxwrap.torch_compat import OpOverload
from fxwrap.wrapper_ir import Result, Role, TensorType, Value, contiguous_strides, symbols_used, used, values_in
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
    views: set[str] = field(default_factory=set)  # the names of parameters and of views
    computed: dict[Node, Operand] = field(default_factory=dict)

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
        result = self.definitions.results.get(definition) if isinstance(definition, Definition) else None
        return (node, None) if result is None else self._source_of_result(definition, result.node)

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

    def _operand_of(self, source: Source) -> Operand:
        node, index = source
        operand = self.definitions.operands[node]
        return operand if index is None else operand[index]

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
        tensor_type = self.builder.symbols.tensor_type
        if isinstance(fake, torch.Tensor):
            result = self._call(schema.name, arguments, keywords, tensor_type(fake))
        else:
            types = [None if item is None else tensor_type(item) for item in fake]
            result = self._call(schema.name, arguments, keywords, *types, is_tuple=True)
        if any(isinstance(item, Viewed) for item in definitions_in(self.definitions.operands[node])):
            self.views |= {value.name for value in values_in((result,))}
        self.computed[node] = result

    def _call(
        self,
        target: str,
        arguments: tuple[Operand, ...],
        keywords: tuple[tuple[str, Operand], ...],
        *types: TensorType | None,
        is_tuple: bool = False,
    ) -> Operand:
        name = f"v{len(self.calls)}"
        names = [f"{name}_{index}" for index in range(len(types))] if is_tuple else [name]
        values = tuple([None if type_ is None else Value(name, type_) for name, type_ in zip(names, types)])
        result = values if is_tuple else values[0]
        self.calls.append(ExternCall((result,), target, arguments, keywords))
        return result

    def _argument(self, node: Node, item: object) -> Operand:
        if isinstance(item, Node):
            return self._operand(node, self._source(item))
        if isinstance(item, list | tuple):
            return tuple([self._argument(node, part) for part in item])
        return with_device_index(literal(self.builder, item, node), self.builder.fakes[node])  # type: ignore[return-value]

    def _operand(self, node: Node, source: Source) -> Operand:
        """Returns the value of a result in the region: a parameter if it is in memory."""
        if self._is_boundary(source):
            return self._parameters(node, self._operand_of(source))
        operand, index = self.computed[source[0]], source[1]
        return operand if index is None else operand[index]

    def _parameters(self, node: Node, operand: Operand) -> Operand:
        if isinstance(operand, tuple):
            return tuple([self._parameters(node, item) for item in operand])
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
        self.views.add(parameter.name)
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
        """Returns an output: a tensor that is no view, of the output's dtype and sizes."""
        value = self._operand(self.definitions.results[definition].node, source)
        assert isinstance(value, Value)
        type_ = value.tensor_type
        if type_.dtype != definition.dtype:
            type_ = TensorType.contiguous(definition.dtype, type_.sizes, type_.device)
            value = self._call("aten._to_copy.default", (value,), (("dtype", definition.dtype),), type_)
        output = self.outputs[position].tensor_type
        if type_.sizes != definition.sizes:
            shape = TensorType.contiguous(type_.dtype, definition.sizes, type_.device)
            value = self._call("aten.expand.default", (value, definition.sizes), (), shape)
            self.views.add(value.name)
        if output.sizes != definition.sizes:  # the launch writes the memory of a reshaped input
            shape = TensorType.contiguous(type_.dtype, output.sizes, type_.device)
            return self._call("aten.reshape.default", (value, output.sizes), (), shape)
        if value.name in self.views:
            contiguous = TensorType.contiguous(type_.dtype, definition.sizes, type_.device)
            value = self._call(
                "aten.clone.default", (value,), (("memory_format", torch.contiguous_format),), contiguous
            )
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
