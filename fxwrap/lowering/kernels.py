"""From a planned kernel to the loop IR, and from there to the program's lines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from fxwrap.loop_ir import (
    Buffer,
    Kernel,
    Load,
    Number,
    Scalar,
    Store,
    as_index,
    may_overwrite,
    normal_space,
    overwriting,
    strided_index,
)
from fxwrap.lowering.definitions import Definition, Reduced, Scanned, Scattered
from fxwrap.lowering.placement import KernelPlan, Member
from fxwrap.lowering.tracing import BodyReader, Multi
from fxwrap.symbolic import Size, product, total
from fxwrap.wrapper_ir import TensorType, Value

_MOST_NAMED = 4


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel of the loop IR with the values that its buffers are, inputs and outputs each in the kernel's order.

    `computed` are all definitions it computes, inlined ones included.
    """

    kernel: Kernel
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    computed: tuple[Definition, ...]

    def values(self) -> dict[str, Value]:
        """Returns the values by the names of their buffers."""
        buffers = (*self.kernel.inputs, *self.kernel.outputs)
        return {buffer.name: value for buffer, value in zip(buffers, (*self.inputs, *self.outputs), strict=True)}

    def with_output(self, planned: Value, value: Value) -> BuiltKernel:
        """Returns the kernel with an output's value replaced."""
        return replace(self, outputs=tuple([value if item == planned else item for item in self.outputs]))

    def overwritable(self, output: Value) -> list[Value]:
        """Returns the inputs in whose memory an output may be written, as far as the kernel's accesses say."""
        names = may_overwrite(self.kernel, self.kernel.outputs[self.outputs.index(output)].name)
        by_name = {buffer.name: value for buffer, value in zip(self.kernel.inputs, self.inputs, strict=True)}
        return [by_name[name] for name in names]

    def overwriting(self, source: Value, output: Value, value: Value | None = None) -> BuiltKernel | None:
        """Returns the kernel that reads an input through an output in its memory; None where it may not.

        `value` is what the output becomes, when that is another value.
        """
        if source not in self.overwritable(output):
            return None
        position = self.inputs.index(source)
        out = self.kernel.outputs[self.outputs.index(output)]
        kernel = overwriting(self.kernel, self.kernel.inputs[position].name, out.name)
        inputs = (*self.inputs[:position], *self.inputs[position + 1 :])
        return replace(self, kernel=kernel, inputs=inputs).with_output(output, value or output)


def build_kernel(
    plan: KernelPlan,
    stored: Collection[Definition],
    value_of: Callable[[Definition], Value],
    inlined: Callable[[Definition], bool],
    hint: Callable[[Size], int],
) -> BuiltKernel:
    """Returns the kernel of a plan.

    `stored` are those of its definitions that something outside reads; `value_of` gives the memory of these and of all
    that it reads; `inlined` says which definitions have none.
    """
    return _Building(plan, stored, value_of, inlined).built(hint)


class _Building:
    def __init__(
        self,
        plan: KernelPlan,
        stored: Collection[Definition],
        value_of: Callable[[Definition], Value],
        inlined: Callable[[Definition], bool],
    ) -> None:
        self.plan = plan
        self.stored = stored
        self.value_of = value_of
        self.reader = BodyReader(inlined, self._fetch)
        self.names: dict[str, str] = {}
        self.inputs: list[tuple[Buffer, Value]] = []
        self.outputs: list[tuple[Buffer, Value]] = []
        self.values: dict[Definition, Scalar] = {}
        self.parts: dict[tuple[Any, Multi], tuple[Scalar, ...]] = {}

    def built(self, hint: Callable[[Size], int]) -> BuiltKernel:
        scatters = [member for member in self.plan.members if isinstance(member.use.definition, Scattered)]
        for member in self.plan.members:
            if member not in scatters:
                self.values[member.use.definition] = self._value(member)
        for member in self.plan.members:
            if member.use.definition in self.stored:
                self._store(member)
        body = self.reader.body
        inputs, outputs = [buffer for buffer, _ in self.inputs], [buffer for buffer, _ in self.outputs]
        kernel = body.finish(self.plan.axes, self.plan.reduced, inputs, outputs)
        kernel = normal_space(kernel, hint) if kernel.numbers else _normal_space_once(kernel, kernel.details)
        used = {item.buffer for item in kernel.operations if isinstance(item, Load | Store)}
        kept = [(buffer, value) for buffer, value in self.inputs if buffer.name in used]
        kernel = replace(kernel, inputs=tuple([buffer for buffer, _ in kept]))
        outs = tuple([value for _, value in self.outputs])
        return BuiltKernel(kernel, tuple([value for _, value in kept]), outs, tuple(self.reader.ran))

    def _value(self, member: Member) -> Scalar:
        definition, reader = member.use.definition, self.reader
        if not isinstance(definition, Reduced | Scanned):
            return reader.run(definition, member.at, member.trace.kept)
        source = definition.source
        parts = self.parts.get((source, member.at))
        if parts is None:
            value = reader.run(definition, member.at, member.trace.kept)
            with reader.body.origins(definition.origin):
                combine = reader.body.reduce if isinstance(definition, Reduced) else reader.body.scan
                parts = self.parts[source, member.at] = combine(source.kind, value)
        return parts[definition.part].to(definition.compute_dtype)

    def _store(self, member: Member) -> None:
        definition, body = member.use.definition, self.reader.body
        element, mode = member.element, "set"
        if isinstance(definition, Scattered):
            target, value = self.reader.scattered(definition, member.at)
            element, mode = tuple([as_index(index) for index in target]), definition.mode
        else:
            value = self.values[definition]
        out = self.value_of(definition)
        name = f"out{len(self.outputs)}"
        self.outputs.append((_buffer(name, out), out))
        with body.origins(definition.origin):
            stored = value.to(definition.compute_dtype).to(definition.dtype)
            body.store(name, strided_index(element, out.tensor_type.strides), stored, mode=mode)

    def _fetch(self, definition: Definition, at: Multi, other: Number) -> Scalar:
        if definition in self.values and self.plan.computed[definition] == at:
            return self.values[definition]
        value = self.value_of(definition)
        if extent_of(value.tensor_type) == 0:  # nothing is ever read, so nothing may be hoisted out of an empty loop
            return self.reader.body.constant(0, definition.compute_dtype)
        name = self.names.get(value.name)
        if name is None:
            name = self.names[value.name] = f"in{len(self.inputs)}"
            self.inputs.append((_buffer(name, value), value))
        index = strided_index(at, value.tensor_type.strides)
        return self.reader.body.load(name, index, definition.dtype, other).to(definition.compute_dtype)


@lru_cache(maxsize=1024)
def _normal_space_once(kernel: Kernel, details: tuple[str, ...]) -> Kernel:
    """Returns a kernel of fixed sizes in normal space, found once for all equal layers of a model."""
    return normal_space(kernel, int)


def _buffer(name: str, value: Value) -> Buffer:
    return Buffer(name, value.tensor_type.dtype, extent_of(value.tensor_type))


def extent_of(type_: TensorType) -> Size:
    """Returns how many elements a tensor reaches over, from its first to its last."""
    if any(size == 0 for size in type_.sizes):
        return 0
    reach = [product((total((size, -1)), stride)) for size, stride in zip(type_.sizes, type_.strides, strict=True)]
    return total((*reach, 1))


def same_memory(old: TensorType, new: TensorType) -> bool:
    """Returns whether two types are of tensors without gaps that fill the same memory."""
    sizes = (product(old.sizes), product(new.sizes), extent_of(old), extent_of(new))
    counts = {as_index(size) for size in sizes}  # as polynomials: an extent is written as a sum of products
    return len(counts) == 1 and old.device == new.device and old.dtype is new.dtype


def kernel_name(computed: Iterable[Definition]) -> str:
    """Returns a readable name for what a kernel computes: its operators, in order, without repetition."""
    names: dict[str, None] = {}
    for definition in computed:
        operator = definition.origin.split(".")[1] if "." in definition.origin else "kernel"
        names.setdefault(operator.strip("_").removeprefix("native_"))
    text = "_".join(list(names)[:_MOST_NAMED])
    return text if len(names) <= _MOST_NAMED else f"{text}_and_{len(names) - _MOST_NAMED}_more"
