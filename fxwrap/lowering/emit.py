"""From planned items to lines: operator calls through the builder, kernels as allocations and launches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import sympy
from torch.fx import Node

from fxwrap.device_spec import DeviceSpec
from fxwrap.errors import FxwrapError
from fxwrap.lines import Alloc, Launch, Mutate, View
from fxwrap.lines import Item as ReadItem
from fxwrap.loop_ir import Kernel, as_index, split_reductions, with_named_numbers
from fxwrap.lowering.builder import Builder
from fxwrap.lowering.define import Defining, copy_of, definitions_in
from fxwrap.lowering.definitions import Definition, Scattered, Written, viewed_base
from fxwrap.lowering.fusion import Item
from fxwrap.lowering.host_numbers import NumberRead
from fxwrap.lowering.kernels import BuiltKernel, build_kernel, kernel_name, same_memory
from fxwrap.lowering.nodes import lower_call
from fxwrap.lowering.placement import KernelPlan, Member
from fxwrap.lowering.realise import Use, Uses
from fxwrap.lowering.tracing import trace_with
from fxwrap.lowering.windows import emit_window
from fxwrap.options import Options
from fxwrap.printers import KernelPrinter, KernelRequest, PrintedKernel
from fxwrap.symbolic import Size, bounds, canonical, evaluate, maximum, product
from fxwrap.torch_compat import HigherOrderOperator
from fxwrap.wrapper_ir import KernelDefinition, Origin, Source, TensorType, Value


class KernelRefused(FxwrapError):
    """A kernel could not be printed; `nodes` are the graph's nodes it computes.

    `planned` says that nothing is amiss: one kernel cannot do it, and operator calls are the way.
    """

    def __init__(self, nodes: frozenset[str], reason: str, planned: bool = False) -> None:
        super().__init__(f"the kernel for {', '.join(sorted(nodes))} cannot be generated: {reason}")
        self.nodes = nodes
        self.planned = planned


class Emission:
    """Emits the lines of items in order, and the values that nodes and definitions stand for."""

    def __init__(
        self,
        builder: Builder,
        defining: Defining,
        uses: Uses,
        options: Options,
        hint: Callable[[Size], int],
        last_reader: Mapping[Definition, Item],
        print_kernel: KernelPrinter,
        lower_higher_order: Callable[[Node, Collection[str]], None],
    ) -> None:
        self.builder = builder
        self.defining = defining
        self.uses = uses
        self.options = options
        self.hint = hint
        self.last_reader = last_reader
        self.print_kernel = print_kernel
        self.lower_higher_order = lower_higher_order
        self.values: dict[Definition, Value] = {}
        self._specs: dict[str, DeviceSpec] = options.device_specs()

    def emit(self, item: Item, wanted: set[Definition]) -> None:
        """Emits an item; `wanted` are the definitions that something outside their kernel reads."""
        if item.node is not None:
            self._call(item, item.node)
        elif item.kernel is not None:
            self._kernel(item, item.kernel, wanted)
        elif item.number is not None:
            self._read(item.number)

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

    def _call(self, item: Item, node: Node) -> None:
        for operand in node.all_input_nodes:
            self.ensure(operand)
        written = self.defining.in_place.written.get(node, {}).values()
        custom = self.options.lowerings.get(str(node.target))
        if node in self.defining.in_place.windows:
            self._overwrite(node)
        elif custom is not None:
            custom(self.builder, node)
        else:
            read = definitions_in([self.defining.known[operand] for operand in node.all_input_nodes])
            dying = frozenset([value.name for value in self._dying_at(item, map(viewed_base, read))])
            dying |= {self.builder.env[operand].name for operand in written}
            if isinstance(node.target, HigherOrderOperator):
                self.lower_higher_order(node, dying)
            else:
                lower_call(self.builder, node, dying)
        self.record(self.defining.known[node], self.builder.env[node])
        if any(self.values.get(self.defining.known[operand]) != self.builder.env[operand] for operand in written):
            raise AssertionError(f"'{node.name}' writes a copy of what it is to write in place")

    def _overwrite(self, node: Node) -> None:
        """Emits the copy of a tensor into a slice of another."""
        window = self.defining.in_place.windows[node]
        target, origin = self._window(node), self.builder.origin(node)
        assert window.source is not None
        self.ensure(window.source)
        self.builder.mutated.add(self.builder.root_of[target.name].name)
        value = self.builder.env[window.source]
        self.builder.emit(Mutate((), "aten.copy_.default", (target, value), (target,), origin=origin))
        self.builder.env[node] = self.builder.env[window.base]

    def _window(self, node: Node) -> Value:
        """Returns the slice of a tensor that a call overwrites, whose view is emitted here."""
        window = self.defining.in_place.windows[node]
        self.ensure(window.base)
        base: Value = self.builder.env[window.base]
        return emit_window(self.builder, node, base, window)

    def _read(self, number: NumberRead) -> None:
        """Emits the line that reads a number."""
        value = self.values.get(number.definition)
        if value is None:  # a view, which becomes a value where it is used
            self.ensure(number.node)
            value = self.builder.env[number.node]
        self.builder.known_symbols.add(number.symbol.name)
        self.builder.emit(ReadItem(number.symbol, value, origin=self.builder.origin(number.node)))

    def record(self, known: Any, found: Any) -> None:
        """Records the values of definitions, both in the same nested tuples."""
        if isinstance(known, Definition):
            if isinstance(found, Value):
                self.values[known] = found
        elif isinstance(known, tuple) and isinstance(found, tuple | list):
            for inner, value in zip(known, found, strict=True):
                self.record(inner, value)
        elif isinstance(known, dict):
            for key, inner in known.items():
                self.record(inner, found[key])

    # --- kernels ----------------------------------------------------------------------------------------------------

    def _kernel(self, item: Item, plan: KernelPlan, wanted: set[Definition]) -> None:
        stored = [member.use.definition for member in plan.members if member.use.definition in wanted]
        for definition in stored:
            self.values[definition] = self._planned(definition)
        built = build_kernel(plan, stored, self._value_of, self.uses.inlined, self.hint)
        for definition, value in zip(stored, built.outputs, strict=True):
            if isinstance(definition, Written):
                built = self._overwriting(definition, value, built)
            else:
                built = self._in_place(definition, value, built, item) or self._allocated(definition, value, built)
            if isinstance(definition, Scattered) and self.values[definition] != self.values.get(definition.initial):
                self._copy_initial(definition)
        self._launch(plan, built)

    def _value_of(self, definition: Definition) -> Value:
        found = self.values.get(definition)
        if found is None:
            raise AssertionError(f"'{definition.name}' is read before it is computed")
        return found

    def _planned(self, definition: Definition) -> Value:
        """Returns what a kernel is built with for an output: its type, or the value that it overwrites."""
        if isinstance(definition, Written):
            overwriting = self.defining.windows.get(definition.target)
            return self._value_of(definition.target) if overwriting is None else self._window(overwriting)
        fake = self.defining.fake_of.get(definition)
        name = f"?{len(self.values)}"  # definitions may have equal names
        if fake is not None:
            return Value(name, self.builder.tensor_type(fake))
        strides = contiguous_strides(definition.sizes)
        return Value(name, TensorType(definition.dtype, definition.sizes, strides, definition.device))

    def _allocated(self, definition: Definition, planned: Value, built: BuiltKernel) -> BuiltKernel:
        """Emits the allocation of an output."""
        fake = self.defining.fake_of.get(definition)
        if fake is None:
            value = self.builder.add_buffer(definition.name, planned.tensor_type)
        else:
            value = self.builder.add_root(definition.name, fake)
        self.values[definition] = value
        self.builder.emit(Alloc(value, origin=self._origin((definition,))))
        return built.with_output(planned, value)

    def _overwriting(self, definition: Written, value: Value, built: BuiltKernel) -> BuiltKernel:
        """Returns the kernel that reads what it overwrites through its output."""
        root = self.builder.root_of[value.name]
        self.builder.mutated.add(root.name)
        if definition.target in self.defining.windows:
            if any(self.builder.root_of[item.name] is root for item in built.inputs):
                reason = "it reads memory of which it overwrites a slice"
                raise KernelRefused(frozenset(self._origin((definition,)).nodes), reason, True)
            return built
        if value not in built.inputs:
            return built
        merged = built.overwriting(value, value)
        if merged is None:
            raise KernelRefused(
                frozenset(self._origin((definition,)).nodes), "it reads elements that it has overwritten", True
            )
        return merged

    def _in_place(self, definition: Definition, planned: Value, built: BuiltKernel, item: Item) -> BuiltKernel | None:
        """Returns the kernel with an output in memory that nothing else needs, if there is some.

        It is an input's, or what a scatter begins with, which then need not be copied.
        """
        fake = self.defining.fake_of.get(definition)
        if fake is None:
            return None
        assert item.kernel is not None
        dying = self._dying_at(item, item.kernel.reads)
        if isinstance(definition, Scattered):
            sources = [] if (initial := self._initial(definition, planned, built)) is None else [initial]
        else:
            sources = built.overwritable(planned)
        for source in sources:
            if source not in dying or not same_memory(source.tensor_type, planned.tensor_type):
                continue
            root = self.builder.root_of[source.name]
            if sum(self.builder.root_of[item.name] is root for item in built.inputs) > 1:
                continue  # it reads the same memory through a view too
            value = source
            if source.type != planned.type:
                value = self.builder.add_retyped(definition.name, fake, source)
                self.builder.emit(View(value, source, origin=self._origin((definition,))))
            self.builder.fake_of[value.name] = fake
            self.builder.share_root(fake, root)
            self.builder.mutated.add(root.name)
            self.values[definition] = value
            if isinstance(definition, Scattered):
                return built.with_output(planned, value)
            return built.overwriting(source, planned, value)
        return None

    def _initial(self, definition: Scattered, planned: Value, built: BuiltKernel) -> Value | None:
        """Returns what a scatter begins with, where that is a tensor like its result that the kernel does not read."""
        found = self.values.get(definition.initial)
        if found is None or found.type != planned.type:
            return None
        root = self.builder.root_of[found.name]
        return None if any(self.builder.root_of[value.name] is root for value in built.inputs) else found

    def _dying_at(self, item: Item, read: Iterable[Definition]) -> list[Value]:
        """Returns the values that are roots, among what an item reads, and that it is the last to read."""
        values = [
            self.values[definition] for definition in read
            if self.last_reader.get(definition) is item and definition in self.values
        ]  # fmt: skip
        streams, stream = self.builder.streams, self.builder.stream
        if streams is not None:
            values = [value for value in values if not streams.is_touched_elsewhere(value.name, stream)]
        return [value for value in values if self.builder.root_of[value.name] == value]

    def _copy_initial(self, definition: Scattered) -> None:
        """Launches what fills a scatter's result before it is scattered into."""
        copy = copy_of(definition.initial)
        copy.origin, copy.name = definition.origin, definition.name
        trace = trace_with(copy, self.uses.inlined)
        plan = KernelPlan(trace.axes, ())
        plan.members.append(Member(Use(copy, 0), trace, tuple([as_index(axis) for axis in trace.axes])))
        self.values[copy] = self.values[definition]
        self._launch(plan, build_kernel(plan, (copy,), self._value_of, self.uses.inlined, self.hint))

    def _launch(self, plan: KernelPlan, built: BuiltKernel) -> None:
        """Emits the launch of a kernel; on a GPU, of the several that a long reduction is cut into."""
        values = built.values()
        split = split_reductions(built.kernel, self.hint) if self._specs[plan.device_type].wide else None
        kernels = (built.kernel,) if split is None else split.kernels
        for buffer in split.temporaries if split is not None else ():
            device = plan.members[0].use.definition.device
            type_ = TensorType(buffer.dtype, (buffer.extent,), (1,), device)
            values[buffer.name] = self.builder.add_buffer(f"{built.outputs[0].name}_parts", type_)
            self.builder.emit(Alloc(values[buffer.name], origin=self._origin(built.computed)))
        for unnamed in kernels:
            kernel, formulas = with_named_numbers(unnamed)
            printed = self._printed(plan, kernel, built, formulas)
            wish = kernel_name(built.computed)
            definition = KernelDefinition(wish, printed.language, printed.source, printed.signature, printed.options)
            name = self.builder.state.add_kernel(definition)
            numbers = [formulas.get(symbol, symbol) for symbol in kernel.numbers]
            arguments: tuple[Any, ...] = (*[values[buffer.name] for buffer in kernel.inputs], *numbers)
            outs = tuple([values[buffer.name] for buffer in kernel.outputs])
            grid = tuple([_in_terms_of(size, formulas) for size in printed.grid])
            self.builder.emit(Launch(name, arguments, outs, grid, origin=self._origin(built.computed)))

    def _printed(
        self, plan: KernelPlan, kernel: Kernel, built: BuiltKernel, formulas: Mapping[sympy.Symbol, sympy.Basic]
    ) -> PrintedKernel:
        language = self.options.kernel_language(self._specs[plan.device_type])
        limits = {name: info.upper for name, info in self.builder.infos.items() if isinstance(info.upper, int)}
        for symbol, formula in formulas.items():
            limits.pop(symbol.name, None)  # names within the kernel are its own
            upper = bounds(formula, self.builder.infos)[1]
            limits |= {symbol.name: upper} if isinstance(upper, int) else {}

        hint = kernel_hints(self.builder, kernel, formulas) if kernel.numbers else self.hint
        try:
            device, name = plan.members[0].use.definition.device, kernel_name(built.computed)
            return self.print_kernel(KernelRequest(kernel, language, device, hint, limits, name))
        except FxwrapError as error:
            raise KernelRefused(frozenset(self._origin(built.computed).nodes), str(error)) from error

    def _origin(self, definitions: tuple[Definition, ...]) -> Origin:
        """Returns where a kernel's definitions came from."""
        nodes = [node for definition in definitions if (node := self.defining.node_of.get(definition)) is not None]
        if not nodes:
            return Origin((Source("", next((definition.origin for definition in definitions), "")),))
        return Origin(tuple([self.builder.source(node) for node in dict.fromkeys(nodes)]))


def _in_terms_of(size: Size, formulas: Mapping[sympy.Symbol, sympy.Basic]) -> Size:
    """Returns a size with the names of numbers within a kernel replaced by what the launch computes them as."""
    if not formulas or isinstance(size, int):
        return size
    found: Size = canonical(size.xreplace(dict(formulas)))
    return found


def contiguous_strides(sizes: Sequence[Size]) -> tuple[Size, ...]:
    """Returns row-major strides, as torch gives them: a dimension of no element counts as one of one."""
    return tuple([product(maximum(size, 1) for size in sizes[dim + 1 :]) for dim in range(len(sizes))])


_GUESS, _LEAST_GUESS = 8192, 8
"""What a number that nobody knows before it is computed is taken to be, and down to what where that is much."""
_MOST_GUESSED_BYTES = 2**30
"""What the buffers of a kernel may take together at guessed sizes: it is timed with buffers of these."""


def symbol_hints(builder: Builder, guess: int = _GUESS) -> Callable[[Size], int]:
    """Returns a function that gives a typical value of a size: the one the graph was traced with.

    A symbol that has none is taken to be `guess`, or what is nearest to that in the symbol's range.
    """

    def hint(size: Size) -> int:
        if isinstance(size, int):
            return size
        values = {symbol.name: _symbol_hint(builder, symbol, guess) for symbol in size.free_symbols}
        return max(int(evaluate(size, values)), 0)

    return hint


def _symbol_hint(builder: Builder, symbol: sympy.Symbol, guess: int) -> int:
    info = builder.infos.get(symbol.name)
    if info is None or info.hint is None:
        guess = builder.symbol_hints.get(symbol.name, guess)
    if info is None:
        return guess
    if info.hint is not None:
        return int(info.hint)
    lower = info.lower if isinstance(info.lower, int) else 0
    return max(min(guess, info.upper) if isinstance(info.upper, int) else guess, lower)


def kernel_hints(
    builder: Builder, kernel: Kernel, formulas: Mapping[sympy.Symbol, sympy.Basic]
) -> Callable[[Size], int]:
    """Returns typical values of a kernel's sizes; guesses are smaller where its buffers would else be very large."""
    guess = _GUESS
    while True:
        hint = symbol_hints(builder, guess)
        buffers = [(_in_terms_of(item.extent, formulas), item.dtype) for item in (*kernel.inputs, *kernel.outputs)]
        if guess == _LEAST_GUESS or sum(hint(size) * dtype.itemsize for size, dtype in buffers) <= _MOST_GUESSED_BYTES:
            return lambda size: hint(_in_terms_of(size, formulas))
        guess //= 2
