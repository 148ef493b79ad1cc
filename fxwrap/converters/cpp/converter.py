"""Emission of a program as a C++ translation unit that uses `runtime/native/bridge.h`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, TypeGuard

import fxwrap.lines as lines
import fxwrap.runtime.library  # noqa: F401  # registers the operators for streams
from fxwrap import wrapper_ir as ir
from fxwrap.converters.base import Handlers
from fxwrap.converters.cpp.library import LAUNCH_OPERATOR, EmittedCpp, is_launched_by_python
from fxwrap.converters.cpp.loops import LoopConverter
from fxwrap.converters.cpp.replay import is_replayed, write_replay
from fxwrap.converters.cpp.text import CppUnit, StaticArray, comment_text, frame_field, indent_statements, string_text
from fxwrap.converters.cpp.writer import CppWriter, read_key_path
from fxwrap.devices import language_traits
from fxwrap.errors import UnsupportedError
from fxwrap.runtime.cpp_kernels import cpp_symbol, emit_cpp_declaration
from fxwrap.runtime.kernels import serialize_options
from fxwrap.runtime.triton.binaries import variants_symbol
from fxwrap.symbolic import SymbolInfo, symbol_kind
from fxwrap.torch_compat import out_argument_names

_OWNED = (ir.Ownership.OWNED, ir.Ownership.SHARED)


class CppConverter(LoopConverter):
    """Writes the lines of a program as statements: nested blocks inline, functions before the program's."""

    name: ClassVar[str] = "cpp"

    def __init__(self, program: ir.Program, unit: CppUnit, handlers: Handlers | None = None) -> None:
        super().__init__(handlers)
        self.program = program
        self.unit = unit
        self.writer = CppWriter(unit, self.convert)
        self.external_values: set[str] = set()
        self.outputs: list[str] = []
        self.kernels: dict[str, ir.KernelDefinition] = {}
        self.replayed_calls: list[lines.CallFunction] = []
        self.replayed_functions_slot = ""  # of the handle to the replayed functions
        inputs = enumerate(program.inputs)
        self.opaque_inputs = {item.name: position for position, item in inputs if _is_opaque(item.value)}
        self._functions: dict[str, tuple[str, ir.Block, tuple[ir.Operand, ...]] | None] = {}

    def run(self) -> list[str]:
        """Returns the statements of the program's body."""
        for value in ir.program_arguments(self.program):
            self.writer.track_value(value)
            self.external_values.add(value.name)
        self.writer.lines(self.program.body)
        return self.unit.outline(self.writer.scope.statements)

    # --- memory -----------------------------------------------------------------------------------------------------

    def alloc(self, line: lines.Alloc | lines.Pool) -> None:
        self.writer.emit_allocation(line, self.writer.define(line.result), line.result.tensor_type)

    pool = alloc

    def free(self, line: lines.Free) -> None:
        if self.needs_record_stream(line):
            arguments = [self.unit.device(line.root.tensor_type.device), str(line.stream)]
            self.writer.call("fxwrap.record_stream.default", [self.writer.name_of(line.root), *arguments])
        self.writer.drop(list(self.writer.scope.slots_by_root.pop(line.root.name).values()))

    def _layout_text(self, line: lines.Reuse | lines.PoolSlice) -> str:
        type_ = line.result.tensor_type
        sizes, strides = self.unit.sizes(type_.sizes), self.unit.sizes(type_.strides)
        return f"{sizes}, {strides}, {self.writer.dtype(line, type_.dtype)}"

    def reuse(self, line: lines.Reuse) -> None:
        slots_by_root = self.writer.scope.slots_by_root.pop(line.root.name)
        root = slots_by_root.pop(line.root.name)
        self.writer.emit(f"reuse(f, {self.writer.define(line.result)}, {root}, {self._layout_text(line)});")
        self.writer.drop(list(slots_by_root.values()))

    def view(self, line: lines.View) -> None:
        type_ = line.result.tensor_type
        offset = type_.storage_offset - line.base.tensor_type.storage_offset
        slot = self.writer.define(line.result, line.base)
        base = self.writer.name_of(line.base)
        self.writer.emit_view(slot, base, type_.sizes, type_.strides, self.unit.number(offset))

    def pool_slice(self, line: lines.PoolSlice) -> None:
        slots = f"{self.writer.define(line.result, line.pool)}, {self.writer.name_of(line.pool)}"
        self.writer.emit(f"pool_slice(f, {slots}, {self.unit.number(line.offset)}, {self._layout_text(line)});")

    def workspace(self, line: lines.Workspace) -> None:
        slot = self.writer.define(line.result)
        self.writer.emit_allocation(line, slot, line.result.tensor_type)
        if line.zeroed:
            self.writer.call("aten.zero_.default", [slot])

    # --- kernels and operators --------------------------------------------------------------------------------------

    def launch(self, line: lines.Launch) -> None:
        kernel = self.program.kernel(line.kernel)
        tensors = [item for item in line.arguments if _is_tensor(item)]
        scalars = [item for item in line.arguments if not _is_tensor(item)]
        if language_traits(kernel.language).links_into_cpp:
            self._launch_cpp(line, kernel, [*tensors, *line.outs], scalars)
        elif is_launched_by_python(line, kernel):
            self._launch_by_runtime(line, kernel, tensors, scalars)
        else:
            self._launch_triton(line, kernel, tensors, scalars)
        self._bump_versions(line.outs)

    def _bump_versions(self, values: Sequence[ir.Value]) -> None:
        """Increments the version counters of inputs and constants, which kernels do not do."""
        for value in values:
            if self.writer.scope.root_of[value.name] in self.external_values:
                self.writer.emit(f"bump_version(f, {self.writer.name_of(value)});")

    def _launch_cpp(
        self,
        line: lines.Launch,
        kernel: ir.KernelDefinition,
        tensors: Sequence[ir.Value],
        scalars: Sequence[ir.Operand],
    ) -> None:
        if any(size != 1 for size in line.grid):
            raise self.unsupported(line, "the grid of a C++ kernel must be (1, 1, 1)")
        if len(tensors) + len(scalars) != len(kernel.signature):
            raise self.unsupported(line, f"the signature of @{kernel.name} has {len(kernel.signature)} parameters")
        symbol = cpp_symbol(kernel.source, kernel.signature, kernel.options)
        self.kernels[symbol] = kernel
        function = self.unit.kernel(kernel.name, symbol, emit_cpp_declaration(symbol, kernel.signature))
        pointers = [f"data_ptr(f, {self.writer.name_of(value)})" for value in tensors]
        arguments = ", ".join([*pointers, *map(self.writer.number, scalars)])
        self.writer.emit(f"KERNEL(f, {function}, ({arguments}));")

    def _launch_triton(
        self,
        line: lines.Launch,
        kernel: ir.KernelDefinition,
        tensors: Sequence[ir.Value],
        scalars: Sequence[ir.Operand],
    ) -> None:
        """Launches a Triton kernel, whose compiled code is linked in; else, and on a CPU, the bridge calls Python."""
        symbol = cpp_symbol(kernel.source, kernel.signature, kernel.options)
        self.kernels[symbol] = kernel
        texts = (kernel.language, kernel.source, ", ".join(kernel.signature), serialize_options(kernel.options))
        record = self.unit.launched_kernel(kernel.name, symbol, variants_symbol(symbol), texts)
        sizes = [*map(self.unit.number, line.grid), *["1"] * (3 - len(line.grid) if line.dependent else 0)]
        grid = ", ".join([*sizes, *(["true"] if line.dependent else [])])
        slots = [", ".join(map(self.writer.name_of, values)) for values in (tensors, line.outs)]
        numbers = ", ".join(map(self.writer.number, scalars))
        self.writer.emit(f"launch(f, {record}, {{{grid}}}, {{{slots[0]}}}, {{{slots[1]}}}, {{{numbers}}});")

    def _launch_by_runtime(
        self,
        line: lines.Launch,
        kernel: ir.KernelDefinition,
        tensors: Sequence[ir.Value],
        scalars: Sequence[ir.Operand],
    ) -> None:
        """Launches a kernel of another language by its text, through an operator of the runtime."""
        source = self.unit.kernel_source(kernel.name, kernel.source)
        identity = [string_text(kernel.language), source, *self.writer.argument(line, kernel.signature)]
        lists = (tuple(line.grid), tuple(tensors), line.outs, tuple(scalars))
        arguments = [*identity, string_text(serialize_options(kernel.options)), *self.writer.arguments(line, lists)]
        self.writer.call(LAUNCH_OPERATOR, arguments)

    def call(self, line: lines.ExternCall | lines.Mutate) -> None:
        if _is_plain_copy(line):
            target, source = [self.writer.name_of(item) for item in ir.values_in(line.arguments)]
            self.writer.emit(f"copy(f, {target}, {source});")
            return
        outs = line.outs if isinstance(line, lines.ExternCall) else ()
        names = out_argument_names(line.target) if outs else ()
        self._call(line, line.target, [*line.keywords, *zip(names, outs)])

    mutate = call

    def _call(
        self,
        line: lines.ExternCall | lines.Mutate | lines.StartCollective,
        target: str,
        keywords: Sequence[tuple[str, ir.Operand]],
    ) -> None:
        arguments = self.writer.arguments(line, line.arguments)
        for name, item in keywords:
            arguments += [f"named({string_text(name)})", *self.writer.argument(line, item)]
        for value in ir.values_in(line.results):
            self.writer.check_type(line, value)
            self.writer.track_value(value, line.alias_of(value))
        self.writer.call(target, arguments, self.writer.results(line.results) if ir.values_in(line.results) else ())

    def scatter(self, line: lines.Scatter) -> None:
        writer = self.writer
        (source,) = writer.argument(line, line.source)
        arguments = [writer.name_of(line.target), str(line.dim), writer.name_of(line.index)]
        with_tensor, with_number = lines.SCATTER_OPERATORS[line.reduce]
        form = with_tensor if _is_tensor(line.source) else with_number
        filled = []
        if not form:
            filled = [self.unit.fresh_slot("filled")]
            dtype = writer.dtype(line, line.target.tensor_type.dtype)
            writer.call("aten.full_like.default", [arguments[-1], source, 'named("dtype")', dtype], filled)
        options = [] if not line.reduce else ['named("reduce")', string_text(line.reduce)]
        if with_tensor.endswith(".two"):
            options += ['named("include_self")', "true" if line.include_self else "false"]
        writer.call(form or with_tensor, [*arguments, *(filled or [source]), *options])
        writer.drop(filled)

    def index_put(self, line: lines.IndexPut) -> None:
        writer = self.writer
        arguments = [writer.name_of(line.target), *writer.argument(line, line.indices), writer.name_of(line.values)]
        writer.call("aten.index_put_.default", [*arguments, *(["true"] if line.accumulate else [])])

    # --- symbols ----------------------------------------------------------------------------------------------------

    def _assign(self, symbol: SymbolInfo, text: str) -> None:
        self.writer.emit(f"{frame_field(self.unit.symbol(symbol.name), symbol_kind(symbol.name))} = {text};")

    def size(self, line: lines.SizeOf) -> None:
        tensor = self.writer.name_of(line.tensor)
        if line.rank:
            self.writer.emit(f"check_rank(f, {tensor}, {string_text(line.tensor.name)}, {line.rank});")
        dim = "" if line.of == "storage_offset" else f", {line.dim}"
        self._assign(line.symbol, f"{line.of}(f, {tensor}{dim})")

    def let(self, line: lines.Let) -> None:
        self._assign(line.symbol, self.unit.number(line.expr))

    def item(self, line: lines.ReadItem) -> None:
        self._assign(line.symbol, f"item_{symbol_kind(line.symbol.name)}(f, {self.writer.name_of(line.tensor)})")

    def bind(self, line: lines.Bind) -> None:
        self.writer.check_type(line, line.source)
        text, temporaries = read_key_path(self.writer, line)
        self._assign(line.symbol, text)
        self.writer.drop(temporaries)

    def assertion(self, line: lines.Assert) -> None:
        arguments = ["f", string_text(line.text)]
        if line.error != "RuntimeError" or line.shown is not None:
            arguments.append(string_text(line.error))
        if line.shown is not None:
            arguments.append(self.unit.number(line.shown))
        self.writer.emit(f"if (!({self.unit.number(line.condition)})) fail_assert({', '.join(arguments)});")

    # --- control ----------------------------------------------------------------------------------------------------

    def cond(self, line: lines.Cond) -> None:
        writer = self.writer

        def branch(block: ir.Block) -> str:
            statements = writer.block(
                block,
                lambda outputs: writer.move_outputs(line.results, outputs),
                begin=lambda: writer.alias_arguments(block.arguments, line.operands),
            )
            return indent_statements(statements)

        then, else_ = branch(line.then), branch(line.else_)
        writer.track_results(line.results)
        writer.emit(f"if ({writer.condition_text(line.predicate)}) {{\n{then}\n}} else {{\n{else_}\n}}")

    def call_function(self, line: lines.CallFunction) -> None:
        if is_replayed(line):
            self.replayed_functions_slot = self.replayed_functions_slot or self.unit.fresh_slot("replayed_functions")
            write_replay(self.writer, self.program, line, self.replayed_functions_slot, len(self.replayed_calls))
            self.replayed_calls.append(line)
            return
        if line.function not in self._functions:
            self._write_function(line.function)
        function = self._functions[line.function]
        if function is None:
            raise self.unsupported(line, "a recursive function would overwrite its own values")
        name, block, outputs = function
        self.writer.alias_arguments(block.arguments, line.operands)
        self.writer.emit(f"{name}(f);")
        self.writer.move_outputs(line.results, outputs)
        self.writer.track_results(line.results)
        self._bump_versions(line.writes)

    def _write_function(self, label: str) -> None:
        """Writes a function, whose results stay in their slots for the caller."""
        self._functions[label] = None
        block = dict(self.program.functions)[label]
        outputs: list[tuple[ir.Operand, ...]] = []
        statements = self.writer.block(block, outputs.append)
        name = self.unit.fresh(label)
        self.unit.define(name, statements)
        self._functions[label] = (name, block, outputs[0])

    def yield_(self, line: lines.Yield) -> None:
        self.writer.scope.outputs = line.values

    def return_(self, line: lines.Return) -> None:
        self.outputs = [self._output(line, item) for item in line.values]

    def _output(self, line: lines.Return, item: ir.Operand) -> str:
        if isinstance(item, complex | str):
            raise self.unsupported(line, f"C++ returns tensors, real numbers, lists and objects, not {item!r}")
        if isinstance(item, ir.Value) and item.name in self.opaque_inputs:
            return f"same_input({self.opaque_inputs[item.name]})"
        (text,) = self.writer.argument(line, item)
        return text

    # --- devices, randomness, checks and profiling ------------------------------------------------------------------

    def save_state(self, line: lines.SaveRngState) -> None:
        tensor, device = self.writer.define(line.result), self._generator_device(line.device)
        self.writer.emit(f"save_random_state(f, {tensor}, {device});")

    def restore_state(self, line: lines.RestoreRngState) -> None:
        tensor, device = self.writer.name_of(line.state), self._generator_device(line.device)
        self.writer.emit(f"restore_random_state(f, {tensor}, {device});")

    def exchange_state(self, line: lines.ExchangeRngState) -> None:
        generator, device = self.writer.name_of(line.generator), self._generator_device(line.device)
        self.writer.emit(f"exchange_random_state(f, {generator}, {device});")

    def _generator_device(self, device: str) -> str:
        self.unit.needs_torch = True
        return self.unit.device(device)

    def enter_device(self, line: lines.EnterDevice) -> None:
        device = self.unit.device(line.device)
        if not line.stream:
            self.writer.emit(f"enter_device(f, {device});")
            return
        stream = self.unit.fresh_symbol("stream", "int")
        self.writer.call("fxwrap.stream_id.default", [device, str(line.stream)], [stream])
        self.writer.emit(f"enter_stream(f, {device}, {frame_field(stream, 'int')});")

    def exit_device(self, line: lines.ExitDevice) -> None:
        self.writer.emit("exit_device(f);")

    def check_layout(self, line: lines.CheckLayout) -> None:
        type_ = line.expected
        name = string_text(line.name or line.tensor.name)
        sizes, strides = self.unit.sizes(type_.sizes), self.unit.sizes(type_.strides)
        dtype, device = self.writer.dtype(line, type_.dtype), self.unit.device(type_.device)
        tensor = self.writer.name_of(line.tensor)
        operator = f", {string_text(line.operator)}" if line.operator else ""
        self.writer.emit(f"check_layout(f, {tensor}, {name}, {sizes}, {strides}, {dtype}, {device}{operator});")
        if line.alignment != 1:
            self.writer.emit(f"check_alignment(f, {tensor}, {name}, {line.alignment});")

    def comment(self, line: lines.Comment) -> None:
        self.writer.emit(comment_text(line.text))

    def enter_range(self, line: lines.EnterRange) -> None:
        self.writer.emit(f"enter_range(f, {string_text(line.name)});")

    def exit_range(self, line: lines.ExitRange) -> None:
        self.writer.emit("exit_range(f);")

    def record_event(self, line: lines.RecordEvent) -> None:
        slot = self.unit.slot(line.result.name)
        self.writer.scope.slots_by_root[line.result.name] = {line.result.name: slot}
        arguments = [self.unit.device(line.device), str(line.stream), *([str(line.event)] if line.event else [])]
        self.writer.call("fxwrap.record_event.default", arguments, [slot])

    def wait_event(self, line: lines.WaitEvent) -> None:
        arguments = [self.unit.slot(line.event.name), self.unit.device(line.device), str(line.stream)]
        self.writer.call("fxwrap.wait_event.default", arguments)
        self.free(lines.Free(line.event))

    def start_collective(self, line: lines.StartCollective) -> None:
        names = out_argument_names(line.operator) if line.outs else ()
        self._call(line, line.operator, tuple(zip(names, line.outs)))

    def wait_collective(self, line: lines.WaitCollective) -> None:
        result = self.writer.define(line.result, line.pending)
        self.writer.call("_c10d_functional.wait_tensor.default", [self.writer.name_of(line.pending)], [result])


def _is_tensor(item: ir.Operand) -> TypeGuard[ir.Value]:
    return isinstance(item, ir.Value) and isinstance(item.type, ir.TensorType)


def to_cpp(program: ir.Program, handlers: Handlers | None = None) -> EmittedCpp:
    """Returns the program as a C++ translation unit, which is compiled at the first call.

    `handlers` emit extension lines; the default are the handlers of the registered devices. Raises UnsupportedError for
    a line that C++ cannot express, and ArgumentError for another object than a program; the first call raises
    NativeBuildError if there is no working compiler.
    """
    ir.check_program("fxwrap.to_cpp", program)
    unit = CppUnit()
    passed_through = _passed_through(program)
    inputs = StaticArray(
        "inputs", "Input", [_input_text(unit, item, item.name in passed_through) for item in program.inputs]
    )
    slots = [_constant_text(unit, constant.value) for constant in program.constants]
    converter = CppConverter(program, unit, handlers)
    run = converter.run()
    constants = StaticArray("constants", "Arg", [*slots, *filter(None, [converter.replayed_functions_slot])])
    outputs = StaticArray("outputs", "Arg", converter.outputs)
    title = "\n".join([f"Program {program.name}, emitted by fxwrap.", *[f"{k}: {text}" for k, text in program.header]])
    source = unit.text(title, program.name, run, (inputs, constants, outputs))
    kernels = list(converter.kernels.values())
    return EmittedCpp(
        source,
        program,
        kernels,
        converter.replayed_calls,
        unit.operators,
        "torch" if unit.needs_torch else "cpu",
        lambda part: to_cpp(part, converter.handlers),
    )


def _is_plain_copy(line: lines.ExternCall | lines.Mutate) -> bool:
    """Returns whether a call copies a tensor to another of the same dtype and sizes, on one device."""
    if line.target != "aten.copy_.default" or ir.values_in(line.results) or len(line.arguments) != 2 or line.keywords:
        return False
    types = [item.tensor_type for item in line.arguments if _is_tensor(item)]
    return len({(type_.dtype, type_.sizes, type_.device) for type_ in types}) == 1 and len(types) == 2


def _passed_through(program: ir.Program) -> set[str]:
    """Returns the names of the opaque inputs that no line but the last one reads."""
    read = {value.name for line in program.body.lines[:-1] for value in ir.used(line)}
    return {item.name for item in program.inputs if item.name not in read and _is_opaque(item.value)}


def _is_opaque(value: ir.Value | SymbolInfo) -> bool:
    return isinstance(value, ir.Value) and isinstance(value.type, ir.OpaqueType)


def _constant_text(unit: CppUnit, value: ir.Value) -> str:
    return _opaque_text(unit, value) if _is_opaque(value) else unit.slot(value.name)


def _opaque_text(unit: CppUnit, value: ir.Value) -> str:
    """Returns the place of an object: a generator is one in C++ too, others are objects of Python."""
    slot = unit.list_slot(value.name)
    return slot if value.type == ir.GENERATOR else f"opaque({slot})"


def _input_text(unit: CppUnit, item: ir.Input, is_passed_through: bool) -> str:
    name = string_text(item.name)
    value = item.value
    if is_passed_through:
        return f"{{{name}, none}}"
    if isinstance(value, SymbolInfo):
        return f"{{{name}, {unit.symbol(value.name)}}}"
    match value.type:
        case ir.TensorType():
            slot = unit.slot(value.name)
            return f"{{{name}, {f'owned({slot})' if item.ownership in _OWNED else slot}}}"
        case ir.ScalarType(kind):
            return f"{{{name}, {unit.scalar(value.name, kind)}}}"
        case ir.OpaqueType() | ir.ListType():
            return f"{{{name}, {_opaque_text(unit, value)}}}"
        case _:
            reason = "the inputs of a C++ program are tensors, numbers, lists and opaque objects"
            raise UnsupportedError(f"%{value.name}", CppConverter.name, reason)
