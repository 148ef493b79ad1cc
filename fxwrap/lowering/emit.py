"""From scheduled items to lines: operator calls, and the allocations and launches of kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import sympy
from torch.fx import Node

from fxwrap.devices import FX, language_traits
from fxwrap.errors import FxwrapError, OptionError
from fxwrap.lines import Alloc, Launch, ReadItem, View
from fxwrap.loop_ir import Kernel, ScheduleError, as_index, hoist_expressions
from fxwrap.lowering.builder import Builder, LoweringRequest, NodeOperand
from fxwrap.lowering.calls.copies import emit_copy_into
from fxwrap.lowering.calls.nodes import lower_call
from fxwrap.lowering.calls.slice_writes import emit_slice_view
from fxwrap.lowering.fusion.definition_plans import DefinitionPlan, MaterialisationPlan
from fxwrap.lowering.fusion.definitions import (
    Definition,
    InPlaceScatter,
    InPlaceWrite,
    Scattered,
    copy_definition,
    fills_a_copy,
    unwrap_views,
)
from fxwrap.lowering.fusion.fusion import ScheduledItem
from fxwrap.lowering.fusion.iteration_mappings import KernelPlan, Member
from fxwrap.lowering.fusion.kernels import BuiltKernel, build_kernel, part_name, same_memory
from fxwrap.lowering.fusion.tracing import trace_with
from fxwrap.lowering.graph_definitions import DefinitionOperand, GraphDefinitions
from fxwrap.lowering.kernel_calls import kernel_calls
from fxwrap.lowering.kernel_nodes import KernelContext, RegionCut
from fxwrap.lowering.kernel_schedules import KernelSchedules
from fxwrap.lowering.launches import KernelDeclined, define_kernel, kernel_request
from fxwrap.lowering.region_builder import BuiltRegion, build_region
from fxwrap.lowering.symbols.cpu_scalars import ScalarRead
from fxwrap.lowering.symbols.table import substitute_formulas
from fxwrap.printers import PrintedKernel
from fxwrap.regions import Region
from fxwrap.symbolic import make_symbol
from fxwrap.torch_compat import HigherOrderOperator
from fxwrap.wrapper_ir import KernelDefinition, Origin, Source, TensorType, Value


def _form_error(form: object, name: str, device_type: str) -> OptionError:
    """Returns the error for a form that the option `choose_kernel_form` returned."""
    forms = "'text', 'subgraph' or 'call'"
    if form == "text":
        forms = f"'subgraph' or 'call', since the kernel language of the device '{device_type}' has no other printer"
    return OptionError(f"option 'choose_kernel_form' returned {form!r} for the region {name}; it returns {forms}")


@dataclass(eq=False)
class LineEmitter:
    """Emits the lines of scheduled items, in order.

    `last_reader` has the last item that reads each definition whose memory may be overwritten; `stored` are the
    definitions that are read outside of their kernel. `values` are the values of definitions so far.
    """

    builder: Builder
    definitions: GraphDefinitions
    plan: MaterialisationPlan
    request: LoweringRequest
    schedules: KernelSchedules
    last_reader: Mapping[Definition, ScheduledItem]
    stored: Set[Definition]
    lower_higher_order: Callable[[Node, Collection[str]], None]
    nodes: Sequence[Node]
    values: dict[Definition, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._options = self.request.options
        self._specs = self._options.device_specs()
        self._context = KernelContext(self.builder, self.definitions, self.plan, self.nodes, self.values)
        self.hint = self.schedules.hint
        self._called: set[str] = set()
        self._unfused: set[str] = set()
        for node, value in self.builder.env.items():
            self._record(self.definitions.operands.get(node), value)

    def emit(self, item: ScheduledItem) -> None:
        """Emits the lines of an item."""
        if item.node is not None:
            self._call(item, item.node)
        elif item.kernel is not None:
            self._kernel(item, item.kernel)
        elif item.scalar_read is not None:
            self._emit_scalar_read(item.scalar_read)

    def ensure(self, node: Node) -> None:
        """Makes sure that a node has an operand: the result of a kernel, or a view of one."""
        env = self.builder.env
        if node in env:
            return
        operand = self.definitions.operands[node]
        if isinstance(operand, Definition) and operand in self.values:
            env[node] = self.values[operand]
        elif isinstance(operand, tuple) and all(item is None or item in self.values for item in operand):
            env[node] = tuple([self.values[item] if isinstance(item, Definition) else None for item in operand])
        elif not isinstance(operand, Definition | tuple):
            env[node] = operand
        else:
            for other in node.all_input_nodes:
                self.ensure(other)
            lower_call(self.builder, node)

    def _record(self, definitions: DefinitionOperand, values: NodeOperand) -> None:
        """Records the values of definitions, both in the same nested tuples."""
        if isinstance(definitions, Definition):
            if isinstance(values, Value):
                self.values[definitions] = values
        elif isinstance(definitions, tuple) and isinstance(values, tuple):
            for definition, value in zip(definitions, values, strict=True):
                self._record(definition, value)
        elif isinstance(definitions, dict) and isinstance(values, dict):
            for key, definition in definitions.items():
                self._record(definition, values[key])

    # --- calls ------------------------------------------------------------------------------------------------------

    def _call(self, item: ScheduledItem, node: Node) -> None:
        builder, definitions = self.builder, self.definitions
        for operand in node.all_input_nodes:
            self.ensure(operand)
        written = definitions.reinplacing.written.get(node, {}).values()
        custom = self._options.lowerings.get(str(node.target))
        if node in definitions.reinplacing.slice_writes:
            self._emit_slice_copy(node)
        elif custom is not None:
            custom(builder, node)
        else:
            read = map(unwrap_views, definitions.of_nodes(node.all_input_nodes))
            dead_roots = frozenset([value.name for value in self._dead_inputs(item, read)])
            dead_roots |= {builder.value(operand).name for operand in written}
            if isinstance(node.target, HigherOrderOperator):
                self.lower_higher_order(node, dead_roots)
            else:
                lower_call(builder, node, dead_roots)
        self._record(definitions.operands[node], builder.env[node])
        if any(self.values.get(definitions.definition(operand)) != builder.env[operand] for operand in written):
            raise AssertionError(f"'{node.name}' must write its operand in place, but writes a copy")

    def _emit_slice_copy(self, node: Node) -> None:
        """Emits the copy of a tensor into a slice of another."""
        write = self.definitions.reinplacing.slice_writes[node]
        target = self._emit_slice_view(node)
        assert write.source is not None
        self.ensure(write.source)
        self.builder.storages.mark_mutated(target)
        emit_copy_into(self.builder, target, self.builder.value(write.source), self.builder.origin(node))
        self.builder.env[node] = self.builder.env[write.base]

    def _emit_slice_view(self, node: Node) -> Value:
        """Emits the view of the slice that a call overwrites."""
        write = self.definitions.reinplacing.slice_writes[node]
        self.ensure(write.base)
        return emit_slice_view(self.builder, node, self.builder.value(write.base), write)

    def _emit_scalar_read(self, read: ScalarRead) -> None:
        value = self.values.get(read.definition)
        if value is None:  # a view, which has no value before its first use
            self.ensure(read.node)
            value = self.builder.value(read.node)
        self.builder.symbols.define(read.symbol.name)
        self.builder.emit(ReadItem(read.symbol, value, origin=self.builder.origin(read.node)))

    # --- kernels ----------------------------------------------------------------------------------------------------

    def _kernel(self, item: ScheduledItem, kernel: KernelPlan) -> None:
        stored = [member.definition for member in kernel.members if member.definition in self.stored]
        for definition in stored:
            self.values[definition] = self._output_prototype(definition)
        built = build_kernel(kernel, stored, self._value_of, self.plan, self.hint, self._specs[kernel.device_type])
        for definition, output in zip(stored, built.outputs, strict=True):
            if isinstance(definition, InPlaceWrite):
                built = self._store_in_place(definition, output, built)
            else:
                reused = self._reuse_input(definition, output, built, self._dead_inputs(item, kernel.reads))
                built = reused or self._allocate_output(definition, output, built)
        if built.kernel.operations:  # nothing may be left of values that only unread parts of a concatenation have
            self._launch(kernel, built, stored)

    def _value_of(self, definition: Definition) -> Value:
        value = self.values.get(definition)
        if value is None:
            raise AssertionError(f"'{self.plan.labels[definition].name}' is read before it is computed")
        return value

    def _output_prototype(self, definition: Definition) -> Value:
        """Returns a placeholder for an output while its kernel is built, or the value that it overwrites."""
        if isinstance(definition, InPlaceWrite):
            writer = self.definitions.slice_writes.get(definition.target)
            return self._value_of(definition.target) if writer is None else self._emit_slice_view(writer)
        type_ = self.definitions.tensor_type(definition, self.builder.symbols.tensor_type)
        return Value(f"?{len(self.values)}", type_)  # definitions may have equal names

    def _allocate_output(self, definition: Definition, prototype: Value, built: BuiltKernel) -> BuiltKernel:
        """Emits the allocation of an output."""
        fake, name = self.definitions.fake(definition), self.plan.labels[definition].name
        if fake is None:
            value = self.builder.add_buffer(name, prototype.tensor_type)
        else:
            value = self.builder.add_root(name, fake)
        self.values[definition] = value
        self.builder.emit(Alloc(value, origin=self._origin((definition,))))
        return built.replace_output(prototype, value)

    def _store_in_place(self, definition: InPlaceWrite, output: Value, built: BuiltKernel) -> BuiltKernel:
        """Returns the kernel with its reads of the overwritten tensor through the output."""
        storages = self.builder.storages
        storages.mark_mutated(output)
        nodes = frozenset(self._origin((definition,)).nodes)
        if isinstance(definition, InPlaceScatter) or definition.target in self.definitions.slice_writes:
            if any(storages.root(value) is storages.root(output) for value in built.inputs):
                raise KernelDeclined(nodes, "it reads memory of which it overwrites a part", True)
            return built
        if output not in built.inputs:
            return built
        merged = built.overwriting(output, output, output)
        if merged is None:
            raise KernelDeclined(nodes, "it reads elements that it has overwritten", True)
        return merged

    def _reuse_input(
        self, definition: Definition, prototype: Value, built: BuiltKernel, dead_inputs: Collection[Value]
    ) -> BuiltKernel | None:
        """Returns the kernel with an output in the memory of a dead input, if there is one.

        A scatter reuses the memory of its initial tensor, which then need not be copied.
        """
        storages, fake = self.builder.storages, self.definitions.fake(definition)
        if fake is None:
            return None
        if isinstance(definition, Scattered):
            sources = self._scatter_base(definition, prototype, built)
        else:
            sources = built.reusable_inputs(prototype)
        for source in sources:
            if source not in dead_inputs or not same_memory(source.tensor_type, prototype.tensor_type):
                continue
            root = storages.root(source)
            if sum(storages.root(value) is root for value in built.inputs) > 1:
                continue  # it reads the same memory through a view too
            if not isinstance(definition, Scattered) and self._prevents_split(built, source, prototype):
                continue
            value = source
            if source.type != prototype.type:
                type_ = self.builder.symbols.tensor_type(fake, source.tensor_type.storage_offset)
                value = self.builder.add_alias(self.plan.labels[definition].name, type_, source)
                self.builder.emit(View(value, source, origin=self._origin((definition,))))
            storages.add_fake(value, fake)
            storages.share(fake, root)
            storages.mark_mutated(root)
            self.values[definition] = value
            if isinstance(definition, Scattered):
                return built.replace_output(prototype, value)
            return built.overwriting(source, prototype, value)
        return None

    def _prevents_split(self, built: BuiltKernel, source: Value, output: Value) -> bool:
        """Whether an output in the memory of an input prevents the split of long reductions, which occupies a device.

        A result of a reduction in the memory of an operand of the elements that depend on it is an example.
        """
        if not built.kernel.reductions:
            return False
        device_type = output.tensor_type.device.type
        merged = built.overwriting(source, output, output)
        split = self.schedules.split(built.kernel, device_type)
        if merged is None or split is None:
            return False
        other = self.schedules.split(merged.kernel, device_type)
        return other is None or len(other.kernels) < len(split.kernels)

    def _scatter_base(self, definition: Scattered, prototype: Value, built: BuiltKernel) -> list[Value]:
        """Returns the initial tensor of a scatter if it has the result's type and the kernel does not read it."""
        initial, root = self.values.get(definition.initial), self.builder.storages.root
        if initial is None or initial.type != prototype.type:
            return []
        return [] if any(root(value) is root(initial) for value in built.inputs) else [initial]

    def _dead_inputs(self, item: ScheduledItem, reads: Iterable[Definition]) -> list[Value]:
        """Returns the roots that an item is the last to read."""
        values = [
            self.values[definition] for definition in reads
            if self.last_reader.get(definition) is item and definition in self.values
        ]  # fmt: skip
        streams, stream = self.builder.buffer.streams, self.builder.buffer.stream
        if streams is not None:
            values = [value for value in values if not streams.is_used_on_other_stream(value.name, stream)]
        return [value for value in values if self.builder.storages.root(value) == value]

    def _emit_scatter_base_copy(self, definition: Scattered) -> None:
        """Launches the copy of a scatter's initial tensor into its result."""
        copy = copy_definition(definition.initial)
        plan = replace(self.plan, labels={**self.plan.labels, copy: self.plan.labels[definition]})
        trace = trace_with(copy, plan.access_of)
        kernel = KernelPlan(trace.axes, ())
        at = tuple([as_index(axis) for axis in trace.axes])
        kernel.members.append(Member(DefinitionPlan(copy, 0), trace, at))
        self.values[copy] = self.values[definition]
        built = build_kernel(kernel, (copy,), self._value_of, plan, self.hint, self._specs[kernel.device_type])
        self._launch_text(kernel, built, (copy,))

    def _launch(self, plan: KernelPlan, built: BuiltKernel, stored: Sequence[Definition]) -> None:
        """Emits the launch of a kernel in the form that the options choose for it."""
        language = self._options.kernel_language(self._specs[plan.device_type])
        takes_regions, choose = language_traits(language).takes_regions, self._options.choose_kernel_form
        if not takes_regions and choose is None:
            self._launch_text(plan, built, stored)
            return
        try:
            region = build_region(self._context, plan, stored, built)
        except RegionCut as cut:
            if takes_regions:
                self._called |= self._region_nodes(cut, built)
            else:
                self._launch_text(plan, built, stored)
            return
        form = ("subgraph" if takes_regions else "text") if choose is None else choose(region.region)
        match form:
            case "subgraph":
                self._launch_region(plan, built, region, stored, language if takes_regions else FX.name)
            case "text" if not language_traits(self._options.text_language(plan.device_type)).takes_regions:
                self._launch_text(plan, built, stored)
            case "call":
                self._called |= set(self._origin(built.computed).nodes)
            case _:
                raise _form_error(form, built.name, plan.device_type)

    def _region_nodes(self, cut: RegionCut, built: BuiltKernel) -> set[str]:
        """Returns the nodes to call instead of a kernel without a region: that of the cut, else all of the kernel."""
        name = self.builder.qualified(cut.node)
        is_called = name in self.request.declined_nodes
        return set(self._origin(built.computed).nodes) if is_called else {name}

    def raise_declined(self) -> None:
        """Raises KernelDeclined for the nodes that other lines compute, if there are any."""
        if self._called or self._unfused:
            reason = "the options call its operators, or no schedule fits it"
            raise KernelDeclined(frozenset(self._called), reason, True, frozenset(self._unfused))

    def _launch_region(
        self, plan: KernelPlan, built: BuiltKernel, region: BuiltRegion, stored: Sequence[Definition], language: str
    ) -> None:
        printed = self._print_kernel(plan, built.kernel, built, {}, language, region.region)
        kernel = KernelDefinition(
            built.name, language, printed.source, printed.signature, printed.options, printed.scheduled
        )
        name = self.builder.state.kernels.add(kernel)
        arguments = (*region.inputs, *map(make_symbol, region.region.symbols))
        calls = kernel_calls(self._context, plan, stored, region.inputs, region.outputs)
        origin = replace(self._origin(built.computed), calls=calls)
        self.builder.emit(Launch(name, arguments, region.outputs, printed.grid, origin=origin))

    def _launch_text(self, plan: KernelPlan, built: BuiltKernel, stored: Sequence[Definition]) -> None:
        """Emits the launch of a kernel; on a massively parallel device, a long reduction is split into two launches."""
        for item in stored:
            if fills_a_copy(item) and self.values[item] != self.values.get(item.initial):
                self._emit_scatter_base_copy(item)
        language = self._options.text_language(plan.device_type)
        values, origin, computed = built.values(), self._origin(built.computed), self._computed_nodes(built, stored)
        split = self.schedules.split(built.kernel, plan.device_type)
        kernels = (built.kernel,) if split is None else split.kernels
        for buffer in split.temporaries if split is not None else ():
            type_ = TensorType(buffer.dtype, (buffer.extent,), (1,), plan.members[0].definition.device)
            values[buffer.name] = self.builder.add_buffer(f"{built.outputs[0].name}_parts", type_)
            self.builder.emit(Alloc(values[buffer.name], origin=origin))
        matmul = kernels[0 if split is None else split.matmul]  # others combine the parts of sums, or check rows
        for original in kernels:
            kernel, formulas = hoist_expressions(original)
            matmuls = tuple(filter(self.schedules.is_matmul, built.computed)) if original is matmul else ()
            part = built if split is None else replace(built, name=part_name(kernel, built.name))
            try:
                printed = self._print_kernel(plan, kernel, part, formulas, language, is_matmul=bool(matmuls))
            except ScheduleError:
                self._decline_matmuls(matmuls)
                return
            definition = define_kernel(part.name, printed, kernel)
            name = self.builder.state.kernels.add(definition)
            symbols = [formulas.get(symbol, symbol) for symbol in kernel.symbols]
            arguments = (*[values[buffer.name] for buffer in kernel.inputs], *symbols)
            outs = tuple([values[buffer.name] for buffer in kernel.outputs])
            grid = tuple([substitute_formulas(size, formulas) for size in printed.grid])
            origin = replace(origin, results=tuple([computed.get(value, ("", 0)) for value in outs]))
            if split is None:
                origin = replace(origin, calls=kernel_calls(self._context, plan, stored, arguments, outs))
            self.builder.emit(Launch(name, arguments, outs, grid, origin=origin))

    def _decline_matmuls(self, matmuls: Iterable[Definition]) -> None:
        """Notes the matmuls of a kernel without a schedule: they are computed alone, or called if that has none."""
        for matmul in matmuls:
            node = self.schedules.matmul_node(matmul)
            is_unfused = node in self.request.unfused_operands or not self.schedules.has_schedule_alone(matmul)
            (self._called if is_unfused else self._unfused).add(node)

    def _print_kernel(
        self,
        plan: KernelPlan,
        kernel: Kernel,
        built: BuiltKernel,
        formulas: Mapping[sympy.Symbol, sympy.Basic],
        language: str,
        region: Region | None = None,
        is_matmul: bool = False,
    ) -> PrintedKernel:
        """Prints a kernel.

        Raises KernelDeclined for nodes that are to be called, and ScheduleError for a matmul without a schedule.
        """
        symbols, device = self.builder.state.symbols, plan.members[0].definition.device
        spec = self._specs[device.type]
        request = kernel_request(symbols, kernel, formulas, language, device, spec, built.name, region, is_matmul)
        try:
            return self.request.print_kernel(request)
        except FxwrapError as error:
            if is_matmul and isinstance(error, ScheduleError):
                raise
            raise KernelDeclined(frozenset(self._origin(built.computed).nodes), str(error)) from error

    def _computed_nodes(self, built: BuiltKernel, stored: Sequence[Definition]) -> dict[Value, tuple[str, int]]:
        """Returns the node of each output of a kernel, and its position among that node's results."""
        results = self.definitions.results
        return {
            value: (self.builder.qualified(results[item].node), results[item].index)
            for item, value in zip(stored, built.outputs, strict=True)
            if item in results
        }

    def _origin(self, definitions: tuple[Definition, ...]) -> Origin:
        """Returns the origin of a kernel: the nodes of its definitions."""
        results = self.definitions.results
        nodes = [results[item].node for item in definitions if item in results]
        if not nodes:
            return Origin((Source("", next((self.plan.operator_of(item) for item in definitions), "")),))
        return Origin(tuple([self.builder.source(node) for node in dict.fromkeys(nodes)]))
