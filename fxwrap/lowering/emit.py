"""From planned items to lines: operator calls through the builder, kernels as allocations and launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
from torch.fx import Node

from fxwrap.device_spec import DeviceSpec
from fxwrap.errors import FxwrapError
from fxwrap.lines import Alloc, Launch
from fxwrap.loop_ir import as_index
from fxwrap.lowering.builder import Builder, origin_of
from fxwrap.lowering.define import Defining
from fxwrap.lowering.definitions import Definition, Pointwise, Scattered
from fxwrap.lowering.fusion import Item, KernelPlan, Member
from fxwrap.lowering.kernels import BuiltKernel, build_kernel, kernel_name
from fxwrap.lowering.nodes import lower_call
from fxwrap.lowering.realise import Use, Uses
from fxwrap.lowering.tracing import trace_with
from fxwrap.options import Options
from fxwrap.printers import PrintedKernel, print_kernel
from fxwrap.symbolic import Size, maximum, product
from fxwrap.wrapper_ir import KernelDefinition, Origin, TensorType, Value


class KernelRefused(FxwrapError):
    """A kernel could not be printed; `nodes` are the graph's nodes it computes."""

    def __init__(self, nodes: frozenset[str], reason: str) -> None:
        super().__init__(f"the kernel for {', '.join(sorted(nodes))} cannot be generated: {reason}")
        self.nodes = nodes


class Emission:
    """Emits the lines of items in order, and the values that nodes and definitions stand for."""

    def __init__(
        self, builder: Builder, defining: Defining, uses: Uses, options: Options, hint: Callable[[Size], int]
    ) -> None:
        self.builder = builder
        self.defining = defining
        self.uses = uses
        self.options = options
        self.hint = hint
        self.values: dict[Definition, Value] = {}
        self.kernels: dict[str, KernelDefinition] = {}
        self._names: dict[str, int] = {}
        self._specs: dict[str, DeviceSpec] = {spec.device_type: spec for spec in options.devices}

    def emit(self, item: Item, wanted: set[Definition]) -> None:
        """Emits an item; `wanted` are the definitions that something outside their kernel reads."""
        if item.node is not None:
            self._call(item.node)
        elif item.kernel is not None:
            self._kernel(item.kernel, wanted)

    def ensure(self, node: Node) -> None:
        """Makes the value of a node exist: of what a kernel made, or a view of it."""
        env = self.builder.env
        if node in env:
            return
        known = self.defining.known[node]
        if isinstance(known, Definition) and known in self.values:
            env[node] = self.values[known]
        elif isinstance(known, tuple) and all(item is None or item in self.values for item in known):
            env[node] = tuple([None if item is None else self.values[item] for item in known])
        elif not isinstance(known, Definition | tuple):
            env[node] = known
        else:
            for operand in node.all_input_nodes:
                self.ensure(operand)
            lower_call(self.builder, node)

    # --- calls ------------------------------------------------------------------------------------------------------

    def _call(self, node: Node) -> None:
        for operand in node.all_input_nodes:
            self.ensure(operand)
        custom = self.options.lowerings.get(str(node.target))
        if custom is not None:
            custom(self.builder, node)
        else:
            lower_call(self.builder, node)
        self.record(self.defining.known[node], self.builder.env[node])

    def record(self, known: Any, found: Any) -> None:
        """Records the values of definitions, both in the same nested tuples."""
        if isinstance(known, Definition):
            if isinstance(found, Value):
                self.values[known] = found
        elif isinstance(known, tuple) and isinstance(found, tuple | list):
            for inner, value in zip(known, found, strict=True):
                self.record(inner, value)

    # --- kernels ----------------------------------------------------------------------------------------------------

    def _kernel(self, plan: KernelPlan, wanted: set[Definition]) -> None:
        stored = [member.use.definition for member in plan.members if member.use.definition in wanted]
        for definition in stored:
            self._allocate(definition)
            if isinstance(definition, Scattered):
                self._copy_initial(definition)
        self._launch(plan, build_kernel(plan, stored, self._value_of, self.uses.inlined, self.hint))

    def _value_of(self, definition: Definition) -> Value:
        found = self.values.get(definition)
        if found is None:
            raise AssertionError(f"'{definition.name}' is read before it is computed")
        return found

    def _allocate(self, definition: Definition) -> None:
        fake = self.defining.fake_of.get(definition)
        if fake is None:
            type_ = TensorType(definition.dtype, definition.sizes, contiguous_strides(definition), definition.device)
            value = self.builder.add_buffer(definition.name, type_)
        else:
            value = self.builder.add_root(definition.name, fake)
        self.values[definition] = value
        self.builder.emit(Alloc(value, origin=self._origin((definition,))))

    def _copy_initial(self, definition: Scattered) -> None:
        """Launches what fills a scatter's result before it is scattered into."""
        copy = Pointwise(
            definition.sizes, definition.dtype, definition.device,
            lambda reader, indices: reader.load(definition.initial, indices),
        )  # fmt: skip
        copy.origin, copy.name = definition.origin, definition.name
        trace = trace_with(copy, self.uses.inlined)
        plan = KernelPlan(trace.axes, ())
        plan.members.append(Member(Use(copy, 0), trace, tuple([as_index(axis) for axis in trace.axes])))
        self.values[copy] = self.values[definition]
        self._launch(plan, build_kernel(plan, (copy,), self._value_of, self.uses.inlined, self.hint))

    def _launch(self, plan: KernelPlan, built: BuiltKernel) -> None:
        printed = self._printed(plan, built)
        name = self._named(kernel_name(built.computed), printed)
        arguments: tuple[Any, ...] = (*built.inputs, *built.kernel.numbers)
        origin = self._origin(built.computed)
        self.builder.emit(Launch(name, arguments, built.outputs, printed.grid, origin=origin))

    def _printed(self, plan: KernelPlan, built: BuiltKernel) -> PrintedKernel:
        spec = self._specs[plan.device_type]
        language = self.options.cpu_kernels if plan.device_type == "cpu" else spec.kernel_language
        try:
            return print_kernel(built.kernel, language, self.hint)
        except FxwrapError as error:
            raise KernelRefused(frozenset(self._origin(built.computed).nodes), str(error)) from error

    def _named(self, wish: str, printed: PrintedKernel) -> str:
        """Returns the program's name for a kernel: the known one of an equal kernel, else a new one."""
        definition = KernelDefinition(wish, printed.language, printed.source, printed.signature, printed.options)
        known = self.kernels.get(definition.hash)
        if known is not None:
            return known.name
        number = self._names.get(wish, 0)
        self._names[wish] = number + 1
        name = f"{wish}_{number}"
        self.kernels[definition.hash] = KernelDefinition(
            name, printed.language, printed.source, printed.signature, printed.options
        )
        return name

    def _origin(self, definitions: tuple[Definition, ...]) -> Origin:
        """Returns where a kernel's definitions came from: all their nodes, and the place of the first."""
        nodes = [node for definition in definitions if (node := self.defining.node_of.get(definition)) is not None]
        nodes = list(dict.fromkeys(nodes))
        if not nodes:
            return Origin((), next((definition.origin for definition in definitions), ""))
        operators = dict.fromkeys(definition.origin.removesuffix(".default") for definition in definitions)
        last = origin_of(nodes[-1])
        return Origin(tuple([node.name for node in nodes]), ", ".join(operators), last.location, last.module)


def contiguous_strides(definition: Definition) -> tuple[Size, ...]:
    """Returns row-major strides for a definition's sizes."""
    sizes = definition.sizes
    return tuple([product(maximum(size, 1) for size in sizes[dim + 1 :]) for dim in range(len(sizes))])


def symbol_hints(builder: Builder) -> Callable[[Size], int]:
    """Returns a function that gives a typical value of a size: the one the graph was traced with."""

    def hint(size: Size) -> int:
        if isinstance(size, int):
            return size
        values = {symbol: _symbol_hint(builder, symbol) for symbol in size.free_symbols}
        return max(int(size.subs(values)), 0)

    return hint


def _symbol_hint(builder: Builder, symbol: sympy.Symbol) -> int:
    info = builder.infos.get(symbol.name)
    found = info.hint if info is not None else None
    return int(found) if found is not None else 8192
