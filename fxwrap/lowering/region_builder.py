"""From a kernel plan to its region: the nodes of the prepared graph that compute the kernel's outputs.

The nodes are those between the memory that the kernel reads and its outputs. A node whose results several kernels
compute is in the region of each. There is no region if the kernel shares an operator with another one such that one
of them needs an intermediate result of the other: `RegionCut` names that node, which then becomes an extern call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import sympy
import torch
from torch.fx import Node

from fxwrap.lines import ExternCall
from fxwrap.loop_ir import Kernel, Load
from fxwrap.lowering.calls.nodes import literal, with_device_index
from fxwrap.lowering.fusion.definitions import Definition, Viewed, definitions_in
from fxwrap.lowering.fusion.iteration_mappings import KernelPlan
from fxwrap.lowering.fusion.kernels import BuiltKernel
from fxwrap.lowering.graph_definitions import DefinitionOperand
from fxwrap.lowering.kernel_nodes import KernelContext, KernelNodes, RegionCut, Source
from fxwrap.regions import Region, output_name, without_unused_results
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
    values_in,
)
from fxwrap.wrapper_ir.operators import operator_schema


@dataclass(frozen=True)
class BuiltRegion:
    """A region; `inputs` are the values of `region.reads`, `outputs` those that the launch writes."""

    region: Region
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


def build_region(
    context: KernelContext, plan: KernelPlan, stored: Sequence[Definition], built: BuiltKernel
) -> BuiltRegion:
    """Returns the region of a planned kernel, whose definitions `stored` are written to the outputs of `built`.

    Raises RegionCut if its operators cannot be computed from the memory that the kernel's plan reads.
    """
    return _RegionBuilder(context, plan, list(built.outputs)).build(stored, built)


@dataclass(eq=False)
class _RegionBuilder(KernelNodes):
    """A region under construction.

    Fields:
        outputs: the values that the kernel writes.
        reads: by the name of each value that the region reads: its parameter, and the value.
        overwritten: by the number of an output that the kernel reads, too: its parameter.
        calls: the calls of operators, in order.
        shared: the names of parameters, views and results, whose memory is not the region's alone.
        computed: the result of each node.
    """

    outputs: list[Value] = field(default_factory=list)
    reads: dict[str, tuple[Value, Value]] = field(default_factory=dict)
    overwritten: dict[int, Value] = field(default_factory=dict)
    calls: list[ExternCall] = field(default_factory=list)
    shared: set[str] = field(default_factory=set)
    computed: dict[Node, Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.output_of_root = {self.root(value): index for index, value in enumerate(self.outputs)}

    def build(self, stored: Sequence[Definition], built: BuiltKernel) -> BuiltRegion:
        sources = [self.source_of_output(definition) for definition in stored]
        for node in sorted(self.needed(sources), key=self.context.order.__getitem__):
            self._add_call(node)
        results = tuple([
            self._result(definition, source, position)
            for position, (definition, source) in enumerate(zip(stored, sources, strict=True))
        ])  # fmt: skip
        reads = tuple([parameter for parameter, _ in self.reads.values()])
        kernel = _rename_inputs(built.kernel, [self._parameter_name(value) for value in built.inputs])
        space, reduced = [tuple([(axis.name, axis.size) for axis in axes]) for axes in (kernel.axes, kernel.reduced)]
        overwritten = dict(sorted(self.overwritten.items()))
        symbols = self._symbols((*reads, *overwritten.values()), sources[0][0])
        calls = without_unused_results(self.calls, results)
        region = Region(reads, overwritten, symbols, calls, results, space, reduced, str(kernel))
        return BuiltRegion(region, tuple([value for _, value in self.reads.values()]), tuple(self.outputs))

    def _parameter_name(self, value: Value) -> str:
        """Returns the name of the region's parameter for a value that the kernel reads."""
        if value.name in self.reads:
            return self.reads[value.name][0].name
        position = self.output_of_root.get(self.root(value))
        return f"unread_{value.name}" if position is None else output_name(position)

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
            return self._operand(node, self.source(item))
        if isinstance(item, list | tuple):
            return tuple([self._argument(node, part) for part in item])
        fake = self.builder.fakes[node]
        operand: Operand = map_leaves(literal(self.builder, item, node), lambda leaf: with_device_index(leaf, fake))
        return operand

    def _operand(self, node: Node, source: Source) -> Operand:
        """Returns the value of a result in the region: a parameter if it is in memory."""
        if self.is_boundary(source):
            return self._parameters(node, self.operand_of(source))
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
        position = self.output_of_root.get(self.root(value))
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


def _rename_inputs(kernel: Kernel, names: Sequence[str]) -> Kernel:
    """Returns a kernel whose inputs have the names of the region's parameters."""
    renamed = {buffer.name: name for buffer, name in zip(kernel.inputs, names, strict=True)}
    if all(old == new for old, new in renamed.items()):
        return kernel
    operations = [
        replace(item, buffer=renamed.get(item.buffer, item.buffer)) if isinstance(item, Load) else item
        for item in kernel.operations
    ]
    inputs = [replace(buffer, name=renamed[buffer.name]) for buffer in kernel.inputs]
    return replace(kernel, inputs=tuple(inputs), operations=tuple(operations))


def _is_contiguous(type_: TensorType) -> bool:
    return type_.strides == contiguous_strides(type_.sizes)


def _without_offset(type_: TensorType) -> TensorType:
    return replace(type_, storage_offset=0)
