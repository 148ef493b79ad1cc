"""Whether printers have schedules for planned kernels that compute matmuls, asked before and after fusion."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, replace

from torch.fx import Node

from fxwrap.caching import bounded_cache
from fxwrap.devices import DeviceSpec, language_traits
from fxwrap.loop_ir import (
    ONE,
    Axis,
    Kernel,
    SplitKernel,
    Store,
    as_index,
    find_rows_and_columns,
    hoist_expressions,
    parallel_column_block,
    reduces_columns,
    split_checked_rows,
    split_columns,
    split_reductions,
    split_rows,
)
from fxwrap.lowering.builder import Builder, LoweringRequest
from fxwrap.lowering.fusion.definition_plans import DefinitionPlan, MaterialisationPlan
from fxwrap.lowering.fusion.definitions import Definition, Reduced
from fxwrap.lowering.fusion.independent import independent_parts
from fxwrap.lowering.fusion.iteration_mappings import IterationMapping, KernelPlan, Member, joined_plan
from fxwrap.lowering.fusion.kernels import build_kernel
from fxwrap.lowering.fusion.tracing import Trace, has_byte_weights
from fxwrap.lowering.graph_definitions import GraphDefinitions, library_family
from fxwrap.lowering.launches import kernel_request
from fxwrap.lowering.rules.registry import may_reduce_rows
from fxwrap.lowering.symbols.table import KernelHints, SizeHints
from fxwrap.printers import has_schedule
from fxwrap.symbolic import product
from fxwrap.wrapper_ir import Value


def is_matmul(definition: Definition, operator: str) -> bool:
    """Whether a result of an operator is the sum of products of a matmul, not of integers that select its operands."""
    is_sum = isinstance(definition, Reduced) and definition.source.dtype.is_floating_point
    return is_sum and library_family(operator) == "matmul"


@dataclass(eq=False)
class KernelSchedules:
    """The schedules of planned kernels of one graph, as printers see these kernels when their lines are emitted."""

    builder: Builder
    definitions: GraphDefinitions
    plan: MaterialisationPlan
    request: LoweringRequest
    hint: SizeHints
    nodes: Sequence[Node]

    def __post_init__(self) -> None:
        self._specs = self.request.options.device_specs()

    def is_matmul(self, definition: Definition) -> bool:
        """Whether a definition is the sum of products of a matmul, not of integers that select its operands."""
        return is_matmul(definition, self.plan.operator_of(definition))

    def matmul_node(self, definition: Definition) -> str:
        """Returns the qualified name of the node of a matmul."""
        return self.builder.qualified(self.nodes[self.plan.definitions[definition].position])

    def can_join(self, kernel: KernelPlan, mapping: IterationMapping, plan: DefinitionPlan, trace: Trace) -> bool:
        """Whether printers have a schedule for a kernel that also computes a definition, if it computes matmuls then.

        Members are in memory if definitions outside of the kernel read them, though some of these may join it later.
        """
        if mapping.columns and not self._may_reduce_rows(kernel):
            return False
        members = {plan.definition, *[member.definition for member in kernel.members]}
        has_matmul = any(map(self.is_matmul, members))
        if not has_matmul and not mapping.rows:
            return True
        if has_matmul and mapping.rows:
            return False
        joined, stored = joined_plan(kernel, mapping, plan, trace), self._stored(members)
        if mapping.rows:  # a reduction of a broadcast tensor may vary along neither rows nor columns
            return find_rows_and_columns(self._built(joined, stored, self.plan)) is not None
        return self._is_schedulable(joined, stored, self.plan)

    def built(self, kernel: KernelPlan) -> Kernel:
        """Returns the loop IR of a planned kernel."""
        return self._built(kernel, self._stored({member.definition for member in kernel.members}), self.plan)

    def is_massively_parallel(self, kernel: KernelPlan) -> bool:
        """Whether the device of a kernel has many more threads than cores."""
        return self._specs[kernel.device_type].massively_parallel

    def _stored(self, members: Set[Definition]) -> set[Definition]:
        return {item for item in members if item in self.plan.external or not self.plan.readers[item] <= members}

    def has_parts(self, kernel: KernelPlan, mapping: IterationMapping, plan: DefinitionPlan, trace: Trace) -> bool:
        """Whether a kernel that also computes a definition is split into parts, which load and store whole rows.

        Parts of a whole reduction in two layouts also have columns, along which their tiles store elements.
        """
        members = {plan.definition, *[member.definition for member in kernel.members]}
        built = self._built(joined_plan(kernel, mapping, plan, trace), self._stored(members), self.plan)
        split = self.split(built, kernel.device_type)
        if split is None or len(split.kernels) != 2 or split.matmul:
            return False
        first = split.kernels[0]
        columns = () if built.axes else first.axes[1:]
        return not reduces_columns(first) and _stores_along(first, (*first.reduced, *columns))

    def parts(self, kernel: KernelPlan) -> list[KernelPlan]:
        """Returns the kernels that compute a planned kernel: on massively parallel devices, matmuls by themselves.

        Of several rows, or of quantised weights, those that share their left operand alone are computed in different
        tiles, by more programs in several launches, which become one (`combo_kernels`) if they are too few to occupy
        the device.
        """
        sums = [member for member in kernel.members if isinstance(member.definition, Reduced)]
        spec = self._specs[kernel.device_type]
        if len(sums) < 2 or not all(map(self._is_tiled, sums)) or not spec.massively_parallel:
            return [kernel]
        return [kernel] if language_traits(spec.kernel_language).takes_regions else independent_parts(kernel)

    def _is_tiled(self, member: Member) -> bool:
        """Whether programs of a matmul compute tiles: it has several rows, or quantised weights."""
        definition = member.definition
        if not isinstance(definition, Reduced) or not self.is_matmul(definition):
            return False
        return self.hint(product(definition.source.parallel[:-1])) > 1 or has_byte_weights(definition)

    def _may_reduce_rows(self, kernel: KernelPlan) -> bool:
        """Whether a kernel may reduce rows of its results, which are those of matmuls."""
        sizes = [item.definition.sizes for item in kernel.members if self.is_matmul(item.definition)]
        rows = [item[-2] if len(item) > 1 else 1 for item in sizes]
        options, is_tuned = self.request.options, kernel.device_type in self.request.tuned_devices
        spec = self._specs[kernel.device_type]
        return bool(rows) and may_reduce_rows(options.matmul_kernels, is_tuned, spec, rows[0])

    def has_schedule_alone(self, matmul: Definition) -> bool:
        """Whether a kernel has a schedule that computes a matmul alone, with operands in memory."""
        trace = self.plan.tracer.trace(matmul)
        kernel = KernelPlan(trace.axes[: trace.parallel_rank], trace.axes[trace.parallel_rank :])
        kernel.add(Member(DefinitionPlan(matmul, 0), trace, tuple([as_index(axis) for axis in trace.axes])))
        operands = {other: DefinitionPlan(other, 0) for other, _ in trace.reads}
        return self._is_schedulable(kernel, {matmul}, replace(self.plan, definitions=operands))

    def _built(self, kernel: KernelPlan, stored: Collection[Definition], plan: MaterialisationPlan) -> Kernel:
        """Returns the loop IR of a planned kernel."""
        values: dict[Definition, Value] = {}

        def value_of(definition: Definition) -> Value:
            if definition not in values:
                type_ = self.definitions.tensor_type(definition, self.builder.symbols.tensor_type)
                values[definition] = Value(f"v{len(values)}", type_)
            return values[definition]

        spec = self._specs[kernel.device_type]
        return build_kernel(kernel, stored, value_of, plan, self.hint, spec).kernel

    def _is_schedulable(self, kernel: KernelPlan, stored: Collection[Definition], plan: MaterialisationPlan) -> bool:
        built = self._built(kernel, stored, plan)
        split = self.split(built, kernel.device_type)
        first, formulas = hoist_expressions(built if split is None else split.kernels[split.matmul])
        device = kernel.members[0].definition.device
        language = self.request.options.text_language(device.type)
        symbols = self.builder.state.symbols
        spec = self._specs[device.type]
        return has_schedule(kernel_request(symbols, first, formulas, language, device, spec, is_matmul=True))

    def split(self, kernel: Kernel, device_type: str) -> SplitKernel | None:
        """Returns the kernels that replace one with long reductions, or with checks of the rows of a matmul."""
        return _split(kernel, kernel.uncompared_fields, self._specs[device_type], self.hint.of_kernel(kernel))


def _stores_along(kernel: Kernel, axes: Collection[Axis]) -> bool:
    """Whether elements of a reduction are stored beside each other along one of the axes, not in another layout."""
    pairs = zip(kernel.operations, kernel.address_axes, strict=True)
    stores = [item.index for item, own in pairs if isinstance(item, Store) and not own.isdisjoint(kernel.reduced)]
    return all(any(index.stride(axis) == ONE for axis in axes) for index in stores)


@bounded_cache(1024)
def _split(
    kernel: Kernel, _uncompared_fields: tuple[str, ...], spec: DeviceSpec, hint: KernelHints
) -> SplitKernel | None:
    """Returns the kernels that replace one, once for all equal layers of a model."""
    if not spec.massively_parallel:
        return split_columns(kernel)
    checked = split_checked_rows(kernel, hint)
    if checked is None:
        return _split_reductions(kernel, spec, hint)
    check, matmul = checked.kernels
    split = _split_reductions(matmul, spec, hint)
    if split is None:
        return checked
    return SplitKernel((check, *split.kernels), (*checked.temporaries, *split.temporaries), matmul=1)


def _split_reductions(kernel: Kernel, spec: DeviceSpec, hint: KernelHints) -> SplitKernel | None:
    if not kernel.reduces_in_steps:
        return split_reductions(kernel, hint, spec.multiprocessors)
    block = parallel_column_block(kernel, hint, spec.multiprocessors)
    return split_rows(kernel, hint, spec.multiprocessors) or split_columns(kernel, block)
