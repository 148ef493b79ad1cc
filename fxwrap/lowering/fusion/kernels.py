"""From a kernel plan to a kernel of the loop IR and the values of its buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace

from fxwrap.caching import bounded_cache
from fxwrap.devices import DeviceSpec
from fxwrap.loop_ir import (
    CACHE_LINE_BYTES,
    NEAR_BYTES,
    Atom,
    Axis,
    Buffer,
    IndexLike,
    Kernel,
    Scalar,
    as_index,
    canonicalize_axes,
    compare_small_integers,
    drop_repeated_masks,
    fold_selected_constants,
    fold_uniform_reductions,
    fuse_segments,
    in_place_candidates,
    merge_complementary_loads,
    reinplace_output,
    select_unconverted_elements,
    share_windows,
    strided_index,
    unroll_short_rows,
)
from fxwrap.lowering.fusion.definition_plans import MaterialisationPlan
from fxwrap.lowering.fusion.definitions import Definition, Reduced, ReductionSource, Scanned, ScanSource, Scattered
from fxwrap.lowering.fusion.iteration_mappings import KernelPlan, Member, axes_of, substituted
from fxwrap.lowering.fusion.tracing import BodyBuilder, IndexTuple
from fxwrap.lowering.symbols.table import KernelHints, SizeHints
from fxwrap.symbolic import Number, Size, maximum, product, total
from fxwrap.wrapper_ir import TensorType, Value

_MAX_NAMED_OPERATORS = 4


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel of the loop IR; `inputs` and `outputs` are the values of its buffers, in the kernel's order.

    `computed` are the definitions that it computes, inlined ones included; `name` lists their operators.
    """

    kernel: Kernel
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    computed: tuple[Definition, ...]
    name: str

    def values(self) -> dict[str, Value]:
        """Returns the values by the names of their buffers."""
        buffers = (*self.kernel.inputs, *self.kernel.outputs)
        return {buffer.name: value for buffer, value in zip(buffers, (*self.inputs, *self.outputs), strict=True)}

    def replace_output(self, old: Value, new: Value) -> BuiltKernel:
        """Returns the kernel with an output's value replaced."""
        return replace(self, outputs=tuple([new if item == old else item for item in self.outputs]))

    def reusable_inputs(self, output: Value) -> list[Value]:
        """Returns the inputs whose memory the kernel's accesses allow the output to overwrite."""
        names = in_place_candidates(self.kernel, self.kernel.outputs[self.outputs.index(output)].name)
        by_name = {buffer.name: value for buffer, value in zip(self.kernel.inputs, self.inputs, strict=True)}
        return [by_name[name] for name in names]

    def overwriting(self, source: Value, output: Value, new_output: Value) -> BuiltKernel | None:
        """Returns the kernel with an output that overwrites an input, as the value `new_output`; None if illegal."""
        if source not in self.reusable_inputs(output):
            return None
        position = self.inputs.index(source)
        out = self.kernel.outputs[self.outputs.index(output)]
        kernel = reinplace_output(self.kernel, self.kernel.inputs[position].name, out.name)
        inputs = (*self.inputs[:position], *self.inputs[position + 1 :])
        return replace(self, kernel=kernel, inputs=inputs).replace_output(output, new_output)


def build_kernel(
    plan: KernelPlan,
    stored: Collection[Definition],
    value_of: Callable[[Definition], Value],
    definitions: MaterialisationPlan,
    hint: SizeHints,
    spec: DeviceSpec,
) -> BuiltKernel:
    """Returns the kernel of a plan for a device.

    It writes the members `stored` to memory; `value_of` returns the value of a definition that it reads or writes.
    """
    return _PlannedKernelBuilder(plan, stored, value_of, definitions).build(hint, spec)


@dataclass(eq=False)
class _PlannedKernelBuilder:
    """The arguments of `build_kernel`, and the kernel under construction.

    Fields:
        names: the name of the buffer of each value that the kernel reads.
        inputs, outputs: the buffers of the kernel, with their values.
        scalars: the element of each member that an iteration has computed.
        combined: the results of reductions and scans at the points where iterations have computed them.
    """

    plan: KernelPlan
    stored: Collection[Definition]
    value_of: Callable[[Definition], Value]
    definitions: MaterialisationPlan
    names: dict[str, str] = field(default_factory=dict)
    inputs: list[tuple[Buffer, Value]] = field(default_factory=list)
    outputs: list[tuple[Buffer, Value]] = field(default_factory=list)
    scalars: dict[Definition, Scalar] = field(default_factory=dict)
    combined: dict[tuple[ReductionSource | ScanSource, IndexTuple], tuple[Scalar, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.operator_of = self.definitions.operator_of
        self.reader = BodyBuilder(self.definitions.access_of, self._fetch, self.operator_of)
        self.unit_axes: dict[Atom, IndexLike] = {
            axis: 0 for axis in (*self.plan.axes, *self.plan.reduced) if axis.size == 1
        }

    def build(self, hint: SizeHints, spec: DeviceSpec) -> BuiltKernel:
        rounded = self._rounded()
        for member in self.plan.members:
            definition = member.definition
            if not isinstance(definition, Scattered):
                scalar = self._scalar(member)
                if definition in rounded:
                    scalar = scalar.to(definition.dtype).to(definition.compute_dtype)
                self.scalars[definition] = scalar
        for member in self.plan.members:
            if member.definition in self.stored:
                self._store(member)
        inputs, outputs = [buffer for buffer, _ in self.inputs], [buffer for buffer, _ in self.outputs]
        kernel = self.reader.body.finish(self.plan.axes, self.plan.reduced, inputs, outputs)
        hints = hint.of_kernel(kernel)
        kernel = _canonicalize_axes(kernel, kernel.uncompared_fields, hints, spec.massively_parallel)
        used = {item.buffer for item in kernel.accesses}
        loaded = [(buffer, value) for buffer, value in self.inputs if buffer.name in used]
        kernel = replace(kernel, inputs=tuple([buffer for buffer, _ in loaded]))
        computed = tuple(self.reader.evaluated_definitions)
        name = kernel_name(map(self.operator_of, computed))
        values = tuple([value for _, value in loaded])
        return BuiltKernel(kernel, values, tuple([value for _, value in self.outputs]), computed, name)

    def _rounded(self) -> set[Definition]:
        """Returns the members that are rounded before the kernel reads them: others read them with reductions of them.

        Readers outside of the kernel see rounded elements. A maximum, or a sum of exponentials, of others would not be
        theirs: the largest element would not equal the maximum, nor would the weights of a row add up to 1.
        """
        if not self.plan.reduced:
            return set()
        stored = [item for item in self.stored if item.dtype is not item.compute_dtype]
        return {item for item in stored if self._is_read_with(item, self._reductions_of(item))}

    def _reductions_of(self, definition: Definition) -> set[Definition]:
        """Returns the members that depend on reductions of a member and do not vary along reduced axes."""
        elements, dependent = {definition}, set[Definition]()
        reductions: set[Definition] = set()
        for member in self.plan.members:
            item, reads = member.definition, member.plan.reads
            if not reads.isdisjoint(dependent) or (isinstance(item, Reduced) and not reads.isdisjoint(elements)):
                dependent.add(item)
                if axes_of(member.element).isdisjoint(self.plan.reduced):
                    reductions.add(item)
            elif not reads.isdisjoint(elements):
                elements.add(item)
        return reductions

    def _is_read_with(self, definition: Definition, others: Set[Definition]) -> bool:
        """Whether another kernel, or what no kernel computes, reads a member and one of some other members."""
        plan = self.definitions
        if definition in plan.external and not plan.external.isdisjoint(others):
            return True
        readers = plan.readers[definition] - self.plan.computed.keys()
        return any(not plan.definitions[reader].reads.isdisjoint(others) for reader in readers)

    def _scalar(self, member: Member) -> Scalar:
        definition, reader = member.definition, self.reader
        # Members that read equal elements have equal indices: one has an axis of size 1 where another has 0.
        at = substituted(member.at, self.unit_axes)
        if not isinstance(definition, Reduced | Scanned):
            return reader.run(definition, at, member.trace.parallel_rank)
        key = (definition.source, at)
        if key not in self.combined:
            operand = reader.run(definition, at, member.trace.parallel_rank)
            kind = definition.source.kind
            with reader.body.origin_scope(self.operator_of(definition)):
                if isinstance(definition, Scanned):
                    self.combined[key] = reader.body.scan(kind, operand)
                else:
                    axes = self._reduced_axes(member)
                    self.combined[key] = reader.body.reduce(kind, operand, axes, definition.source.operand_precision)
        return self.combined[key][definition.part].to(definition.compute_dtype)

    def _reduced_axes(self, member: Member) -> tuple[Axis, ...]:
        """Returns the axes that a reduction reduces; () for all, in kernels with one kind of these."""
        if not self.plan.columns and not self.plan.rows:
            return ()
        reduced = axes_of(member.at[member.trace.parallel_rank :])
        axes = tuple([axis for axis in self.plan.reduced if axis in reduced])
        assert axes, "a reduction of another axis of size 1 is no member"
        return axes

    def _store(self, member: Member) -> None:
        definition, body = member.definition, self.reader.body
        writes: Sequence[tuple[Sequence[IndexLike], Scalar]]
        if isinstance(definition, Scattered):
            writes, mode = self.reader.run_scatter(definition, member.at), definition.mode
        else:
            writes, mode = [(member.element, self.scalars[definition])], "set"
        out = self.value_of(definition)
        name = f"out{len(self.outputs)}"
        self.outputs.append((_buffer(name, out), out))
        with body.origin_scope(self.operator_of(definition)):
            for target, scalar in writes:
                element = tuple([as_index(index) for index in target])
                stored = scalar.to(definition.compute_dtype).to(definition.dtype)
                body.store(name, strided_index(element, out.tensor_type.strides), stored, mode=mode)

    def _fetch(self, definition: Definition, at: IndexTuple, other: Number) -> Scalar:
        if definition in self.scalars:  # fusion allows reads at its element only; `at` may be another form of the index
            return self.scalars[definition]
        value = self.value_of(definition)
        if extent_of(value.tensor_type) == 0:  # nothing is ever read, and no load may be hoisted out of an empty loop
            return self.reader.body.constant(0, definition.compute_dtype)
        name = self.names.get(value.name)
        if name is None:
            name = self.names[value.name] = f"in{len(self.inputs)}"
            is_ascending = isinstance(definition, Reduced) and definition.is_ascending
            self.inputs.append((replace(_buffer(name, value), is_ascending=is_ascending), value))
        index = strided_index(at, value.tensor_type.strides)
        return self.reader.body.load(name, index, definition.dtype, other).to(definition.compute_dtype)


@bounded_cache(1024)
def _canonicalize_axes(
    kernel: Kernel, _uncompared_fields: tuple[str, ...], hint: KernelHints, is_parallel: bool
) -> Kernel:
    """Returns the kernel over its canonical index space, in which the parts of concatenations share iterations.

    It is computed once for all equal layers of a model. On massively parallel devices, an iteration has a row of a few
    elements too; on others, vectors have those of rows.
    """
    kernel = canonicalize_axes(fold_uniform_reductions(kernel), hint)
    kernel = compare_small_integers(fold_selected_constants(kernel))
    if is_parallel:
        kernel = unroll_short_rows(kernel)
    fused = fuse_segments(kernel, hint, NEAR_BYTES if is_parallel else CACHE_LINE_BYTES)
    kernel = merge_complementary_loads(kernel) if fused is kernel else canonicalize_axes(fused, hint)
    kernel = drop_repeated_masks(kernel)
    if not is_parallel:
        return select_unconverted_elements(kernel)
    shared = share_windows(kernel, hint)
    return kernel if shared is kernel else drop_repeated_masks(canonicalize_axes(shared, hint))


def _buffer(name: str, value: Value) -> Buffer:
    return Buffer(name, value.tensor_type.dtype, extent_of(value.tensor_type))


def extent_of(type_: TensorType) -> Size:
    """Returns the number of elements from a tensor's first element to its last, gaps included."""
    if any(size == 0 for size in type_.sizes):
        return 0
    reach = [product((total((size, -1)), stride)) for size, stride in zip(type_.sizes, type_.strides, strict=True)]
    return total((*reach, 1))


def dense_strides(sizes: Sequence[Size]) -> tuple[Size, ...]:
    """Returns row-major strides as torch computes them: an empty dimension counts as one element."""
    return tuple([product(maximum(size, 1) for size in sizes[dim + 1 :]) for dim in range(len(sizes))])


def same_memory(old: TensorType, new: TensorType) -> bool:
    """Returns whether two types are dense, and equal in dtype, device and number of elements."""
    sizes = (product(old.sizes), product(new.sizes), extent_of(old), extent_of(new))
    counts = {as_index(size) for size in sizes}  # compares as polynomials: extents are sums of products
    return len(counts) == 1 and old.device == new.device and old.dtype is new.dtype


def part_name(kernel: Kernel, name: str) -> str:
    """Returns the name of a part of a kernel of this name: by the operators of its own operations, if they have any.

    Equal parts of different kernels, such as the second launches of split reductions, then are one kernel.
    """
    operators = [operation.origin for operation in kernel.operations if operation.origin]
    return kernel_name(operators) if operators else name


def kernel_name(operators: Iterable[str]) -> str:
    """Returns a readable kernel name: the operators, in order, without repetition."""
    names: dict[str, None] = {}
    for overload in operators:
        operator = overload.split(".")[1] if "." in overload else "kernel"
        names.setdefault(operator.strip("_").removeprefix("native_"))
    text = "_".join(list(names)[:_MAX_NAMED_OPERATORS])
    return text if len(names) <= _MAX_NAMED_OPERATORS else f"{text}_and_{len(names) - _MAX_NAMED_OPERATORS}_more"
