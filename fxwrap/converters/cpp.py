"""Programs as one C++ translation unit over `runtime/native/bridge.h`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import fxwrap.runtime.library  # noqa: F401  # whose operators programs call that use streams
from fxwrap.converters.base import Converter, Handler
from fxwrap.converters.cpp_library import EmittedCpp, is_compiled_by_triton
from fxwrap.converters.cpp_loops import write_map, write_scan, write_while
from fxwrap.converters.cpp_paths import followed
from fxwrap.converters.cpp_replay import is_replayed, write_replay
from fxwrap.converters.cpp_text import CppUnit, Table, comment_text, indented, place, string_text
from fxwrap.converters.cpp_writer import CppWriter, is_whole
from fxwrap.device_registry import language_facts
from fxwrap.errors import Unsupported
from fxwrap.lines import (
    SCATTER_OPERATORS,
    Alloc,
    Assert,
    Bind,
    Call,
    CallFunction,
    CheckLayout,
    Comment,
    Cond,
    EnterDevice,
    EnterRange,
    ExchangeState,
    ExitDevice,
    ExitRange,
    ExtensionLine,
    Free,
    IndexPut,
    Item,
    Launch,
    Let,
    Map,
    Mutate,
    Pool,
    PoolSlice,
    RecordEvent,
    RestoreState,
    Return,
    Reuse,
    SaveState,
    Scan,
    Scatter,
    SizeOf,
    StartCollective,
    View,
    WaitCollective,
    WaitEvent,
    While,
    Workspace,
    Yield,
)  # fmt: skip
from fxwrap.runtime.cpp_kernels import cpp_declaration, cpp_symbol
from fxwrap.runtime.kernels import options_text
from fxwrap.runtime.triton_units import variants_symbol
from fxwrap.symbolic import SymbolInfo, symbol_kind
from fxwrap.torch_compat import out_argument_names
from fxwrap.wrapper_ir import (
    Block,
    Input,
    KernelDefinition,
    OpaqueType,
    Ownership,
    Program,
    ScalarType,
    TensorType,
    Value,
    leaves,
)

_OWNED = (Ownership.OWNED, Ownership.SHARED)


class CppConverter(Converter):
    """Writes a program's lines as statements. Nested blocks are written in place, functions above."""

    name: ClassVar[str] = "cpp"

    def __init__(
        self, program: Program, unit: CppUnit, handlers: Mapping[type[ExtensionLine], Handler] | None = None
    ) -> None:
        super().__init__(handlers)
        self.program = program
        self.unit = unit
        self.writer = CppWriter(unit, self.convert)
        self.outside: set[str] = set()
        self.ranges: list[str] = []
        self.kernels: dict[str, KernelDefinition] = {}
        self.replays: list[CallFunction] = []
        self.replay_handle = ""  # the slot of what names the replayed functions
        self._functions: dict[str, tuple[str, Block, tuple[Any, ...]] | None] = {}

    def run(self) -> list[str]:
        """Returns the statements of the program's body."""
        given = [item.value for item in self.program.inputs]
        for value in [*given, *[constant.value for constant in self.program.constants]]:
            if isinstance(value, Value):
                self.writer.own(value)
                self.outside.add(value.name)
        self.writer.lines(self.program.body)
        return self.unit.part(self.writer.scope.statements)

    # --- memory -----------------------------------------------------------------------------------------------------

    def alloc(self, line: Alloc) -> None:
        self.writer.empty(line, self.writer.define(line.result), line.result.tensor_type)

    def free(self, line: Free) -> None:
        if self.waits_for(line):
            arguments = [self.unit.device(line.root.tensor_type.device), str(line.stream)]
            self.writer.call("fxwrap.record_stream.default", [self.writer.name_of(line.root), *arguments])
        self.writer.drop(list(self.writer.scope.windows.pop(line.root.name).values()))

    def _form(self, line: Reuse | PoolSlice) -> str:
        type_ = line.result.tensor_type
        sizes, strides = self.unit.sizes(type_.sizes), self.unit.sizes(type_.strides)
        return f"{sizes}, {strides}, {self.writer.dtype(line, type_.dtype)}"

    def reuse(self, line: Reuse) -> None:
        windows = self.writer.scope.windows.pop(line.root.name)
        root = windows.pop(line.root.name)
        self.writer.say(f"reuse(f, {self.writer.define(line.result)}, {root}, {self._form(line)});")
        self.writer.drop(list(windows.values()))

    def view(self, line: View) -> None:
        type_ = line.result.tensor_type
        offset = type_.storage_offset - line.base.tensor_type.storage_offset
        slot = self.writer.define(line.result, line.base)
        base = self.writer.name_of(line.base)
        self.writer.window(slot, base, type_.sizes, type_.strides, self.unit.number(offset))

    def pool(self, line: Pool) -> None:
        self.writer.empty(line, self.writer.define(line.result), line.result.tensor_type)

    def pool_slice(self, line: PoolSlice) -> None:
        slots = f"{self.writer.define(line.result, line.pool)}, {self.writer.name_of(line.pool)}"
        self.writer.say(f"pool_slice(f, {slots}, {self.unit.number(line.offset)}, {self._form(line)});")

    def workspace(self, line: Workspace) -> None:
        slot = self.writer.define(line.result)
        self.writer.empty(line, slot, line.result.tensor_type)
        if line.zeroed:
            self.writer.call("aten.zero_.default", [slot])

    # --- kernels and operators --------------------------------------------------------------------------------------

    def launch(self, line: Launch) -> None:
        kernel = self.program.kernel(line.kernel)
        tensors = [item for item in line.arguments if _is_tensor(item)]
        numbers = [item for item in line.arguments if not _is_tensor(item)]
        facts = language_facts(kernel.language)
        if facts.linked:
            self._launch_cpp(line, kernel, [*tensors, *line.outs], numbers)
        elif is_compiled_by_triton(facts) and len(line.arguments) + len(line.outs) == len(kernel.signature):
            self._launch_triton(line, kernel, tensors, numbers)
        else:
            self._launch_by_operator(line, kernel, tensors, numbers)
        self._mark_written(line.outs)

    def _mark_written(self, values: Sequence[Value]) -> None:
        """Moves the version counters of tensors from outside on, which kernels know nothing of."""
        for value in values:
            if self.writer.scope.root_of[value.name] in self.outside:
                self.writer.say(f"mark_written(f, {self.writer.name_of(value)});")

    def _launch_cpp(
        self, line: Launch, kernel: KernelDefinition, tensors: Sequence[Value], numbers: Sequence[Any]
    ) -> None:
        if any(size != 1 for size in line.grid):
            raise self.unsupported(line, "a C++ kernel is called once, so its grid is (1, 1, 1)")
        if len(tensors) + len(numbers) != len(kernel.signature):
            raise self.unsupported(line, f"the signature of @{kernel.name} has {len(kernel.signature)} parameters")
        symbol = cpp_symbol(kernel.source, kernel.signature, kernel.options)
        self.kernels[symbol] = kernel
        function = self.unit.kernel(kernel.name, symbol, cpp_declaration(symbol, kernel.signature))
        pointers = [f"data_ptr(f, {self.writer.name_of(value)})" for value in tensors]
        self.writer.say(f"{function}({', '.join([*pointers, *map(self.writer.number, numbers)])});")

    def _launch_triton(
        self, line: Launch, kernel: KernelDefinition, tensors: Sequence[Value], numbers: Sequence[Any]
    ) -> None:
        """Launches what Triton compiled, which is linked in; without it, and on a CPU, the bridge asks Python."""
        symbol = cpp_symbol(kernel.source, kernel.signature, kernel.options)
        self.kernels[symbol] = kernel
        texts = (kernel.language, kernel.source, ", ".join(kernel.signature), options_text(kernel.options))
        record = self.unit.launched_kernel(kernel.name, symbol, variants_symbol(symbol), texts)
        grid = ", ".join(map(self.unit.number, line.grid))
        slots = [", ".join(map(self.writer.name_of, values)) for values in (tensors, line.outs)]
        given = ", ".join(map(self.writer.number, numbers))
        self.writer.say(f"launch(f, {record}, {{{grid}}}, {{{slots[0]}}}, {{{slots[1]}}}, {{{given}}});")

    def _launch_by_operator(
        self, line: Launch, kernel: KernelDefinition, tensors: Sequence[Value], numbers: Sequence[Any]
    ) -> None:
        """Launches a kernel of another language through an operator of the runtime, which is given its text."""
        source = self.unit.kernel_source(kernel.name, kernel.source)
        facts = [string_text(kernel.language), source, *self.writer.argument(line, kernel.signature)]
        lists = (tuple(line.grid), tuple(tensors), line.outs, tuple(numbers))
        arguments = [*facts, string_text(options_text(kernel.options)), *self.writer.arguments(line, lists)]
        self.writer.call("fxwrap_runtime.launch.default", arguments)

    def call(self, line: Call) -> None:
        names = out_argument_names(line.target) if line.outs else ()
        self._call(line, line.target, [*line.keywords, *zip(names, line.outs)])

    def mutate(self, line: Mutate) -> None:
        self._call(line, line.target, line.keywords)

    def _call(
        self, line: Call | Mutate | StartCollective, target: str, keywords: Sequence[tuple[str, Any]]
    ) -> None:
        arguments = self.writer.arguments(line, line.arguments)
        for name, item in keywords:
            arguments += [f"named({string_text(name)})", *self.writer.argument(line, item)]
        kept = [value for value in leaves(line.results) if value is not None]
        for value in kept:
            self.writer.check_type(line, value)
            self.writer.own(value, line.alias_of(value))
        self.writer.call(target, arguments, self.writer.results(line.results) if kept else ())

    def scatter(self, line: Scatter) -> None:
        writer = self.writer
        (source,) = writer.argument(line, line.source)
        arguments = [writer.name_of(line.target), str(line.dim), writer.name_of(line.index)]
        with_tensor, with_number = SCATTER_OPERATORS[line.reduce]
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

    def index_put(self, line: IndexPut) -> None:
        writer = self.writer
        arguments = [writer.name_of(line.target), *writer.argument(line, line.indices), writer.name_of(line.values)]
        writer.call("aten.index_put_.default", [*arguments, *(["true"] if line.accumulate else [])])

    # --- symbols ----------------------------------------------------------------------------------------------------

    def _assign(self, symbol: SymbolInfo, text: str) -> None:
        self.writer.say(f"{place(self.unit.symbol(symbol.name), symbol_kind(symbol.name))} = {text};")

    def size(self, line: SizeOf) -> None:
        tensor = self.writer.name_of(line.tensor)
        if line.rank:
            self.writer.say(f"check_rank(f, {tensor}, {string_text(line.tensor.name)}, {line.rank});")
        dim = "" if line.of == "storage_offset" else f", {line.dim}"
        self._assign(line.symbol, f"{line.of}(f, {tensor}{dim})")

    def let(self, line: Let) -> None:
        self._assign(line.symbol, self.unit.number(line.expr))

    def item(self, line: Item) -> None:
        self._assign(line.symbol, f"item_{symbol_kind(line.symbol.name)}(f, {self.writer.name_of(line.tensor)})")

    def bind(self, line: Bind) -> None:
        self.writer.check_type(line, line.source)
        text, taken = followed(self.writer, line)
        self._assign(line.symbol, text)
        self.writer.drop(taken)

    def assertion(self, line: Assert) -> None:
        arguments = [string_text(line.text)]
        if line.error != "RuntimeError" or line.shown is not None:
            arguments.append(string_text(line.error))
        if line.shown is not None:
            arguments.append(self.unit.number(line.shown))
        self.writer.say(f"if (!({self.unit.number(line.condition)})) fail_assert({', '.join(arguments)});")

    # --- control ----------------------------------------------------------------------------------------------------

    def cond(self, line: Cond) -> None:
        writer = self.writer

        def branch(block: Block) -> str:
            statements = writer.block(
                block,
                lambda given: writer.hand_over(line.results, given),
                begin=lambda: writer.lend(block.arguments, line.operands),
            )
            return indented(statements)

        then, else_ = branch(line.then), branch(line.else_)
        writer.own_results(line.results)
        writer.say(f"if ({writer.truth(line.predicate)}) {{\n{then}\n}} else {{\n{else_}\n}}")

    def while_(self, line: While) -> None:
        write_while(self.writer, line)

    def scan(self, line: Scan) -> None:
        write_scan(self.writer, line)

    def map(self, line: Map) -> None:
        write_map(self.writer, line)

    def call_function(self, line: CallFunction) -> None:
        if is_replayed(line):
            self.replay_handle = self.replay_handle or self.unit.fresh_slot("replayed_functions")
            write_replay(self.writer, self.program, line, self.replay_handle, len(self.replays))
            self.replays.append(line)
            return
        if line.function not in self._functions:
            self._write_function(line.function)
        written = self._functions[line.function]
        if written is None:
            raise self.unsupported(line, "a function that calls itself would overwrite its own values")
        name, block, given = written
        self.writer.lend(block.arguments, line.operands)
        self.writer.say(f"{name}(f);")
        self.writer.hand_over(line.results, given)
        self.writer.own_results(line.results)
        self._mark_written(line.writes)

    def _write_function(self, label: str) -> None:
        """Writes a function, whose results stay in their slots for the line that called it."""
        self._functions[label] = None
        block = dict(self.program.functions)[label]
        found: list[tuple[Any, ...]] = []
        statements = self.writer.block(block, found.append)
        name = self.unit.fresh(label)
        self.unit.define(name, statements)
        self._functions[label] = (name, block, found[0])

    def yield_(self, line: Yield) -> None:
        self.writer.scope.given = line.values

    def return_(self, line: Return) -> None:
        self.writer.scope.given = tuple([self._output(line, item) for item in line.values])

    def _output(self, line: Return, item: Any) -> str:
        if isinstance(item, complex | str):
            raise self.unsupported(line, f"C++ gives tensors and real numbers, not {item!r}")
        if isinstance(item, Value) and is_whole(item.type):
            raise self.unsupported(line, f"C++ gives tensors and real numbers, and %{item.name} is neither")
        (text,) = self.writer.argument(line, item)
        return text

    # --- the world --------------------------------------------------------------------------------------------------

    def save_state(self, line: SaveState) -> None:
        device = self.unit.device_named(line.device)
        self.writer.say(f"save_random_state(f, {self.writer.define(line.result)}, {device});")

    def restore_state(self, line: RestoreState) -> None:
        device = self.unit.device_named(line.device)
        self.writer.say(f"restore_random_state(f, {self.writer.name_of(line.state)}, {device});")

    def exchange_state(self, line: ExchangeState) -> None:
        device = self.unit.device_named(line.device)
        self.writer.say(f"exchange_random_state(f, {self.writer.name_of(line.generator)}, {device});")

    def enter_device(self, line: EnterDevice) -> None:
        device = self.unit.device_named(line.device)
        if not line.stream:
            self.writer.say(f"enter_device(f, {device});")
            return
        stream = self.unit.fresh_symbol("stream", "int")
        self.writer.call("fxwrap.stream_id.default", [device, str(line.stream)], [stream])
        self.writer.say(f"enter_stream(f, {device}, {place(stream, 'int')});")

    def exit_device(self, line: ExitDevice) -> None:
        self.writer.say("exit_device(f);")

    def check_layout(self, line: CheckLayout) -> None:
        type_ = line.expected
        name = string_text(line.name or line.tensor.name)
        sizes, strides = self.unit.sizes(type_.sizes), self.unit.sizes(type_.strides)
        dtype, device = self.writer.dtype(line, type_.dtype), self.unit.device_named(str(type_.device))
        tensor = self.writer.name_of(line.tensor)
        self.writer.say(f"check_layout(f, {tensor}, {name}, {sizes}, {strides}, {dtype}, {device});")
        if line.alignment != 1:
            self.writer.say(f"check_alignment(f, {tensor}, {name}, {line.alignment});")

    def comment(self, line: Comment) -> None:
        self.writer.say(comment_text(line.text))

    def enter_range(self, line: EnterRange) -> None:
        self.ranges.append(self.unit.fresh_slot("range"))
        self.writer.call("profiler._record_function_enter.default", [string_text(line.name)], self.ranges[-1:])

    def exit_range(self, line: ExitRange) -> None:
        opened = self.ranges.pop()
        self.writer.call("profiler._record_function_exit.default", [opened])
        self.writer.drop([opened])

    def record_event(self, line: RecordEvent) -> None:
        slot = self.unit.slot(line.result.name)
        self.writer.scope.windows[line.result.name] = {line.result.name: slot}
        arguments = [self.unit.device_named(line.device), str(line.stream), *([str(line.event)] if line.event else [])]
        self.writer.call("fxwrap.record_event.default", arguments, [slot])

    def wait_event(self, line: WaitEvent) -> None:
        arguments = [self.unit.slot(line.event.name), self.unit.device_named(line.device), str(line.stream)]
        self.writer.call("fxwrap.wait_event.default", arguments)
        self.free(Free(line.event))

    def start_collective(self, line: StartCollective) -> None:
        self._call(line, line.operator, ())

    def wait_collective(self, line: WaitCollective) -> None:
        result = self.writer.define(line.result, line.pending)
        self.writer.call("_c10d_functional.wait_tensor.default", [self.writer.name_of(line.pending)], [result])


def _is_tensor(item: Any) -> bool:
    return isinstance(item, Value) and isinstance(item.type, TensorType)


def to_cpp(program: Program, handlers: Mapping[type[ExtensionLine], Handler] | None = None) -> EmittedCpp:
    """Returns the program as a C++ translation unit, which is compiled when it is first called.

    `handlers` say how lines of vendors' own are written, by default what registered devices say; without one, such a
    line is written as what it expands to.
    Raises Unsupported for a line that C++ cannot express yet; the first call raises NativeBuildError where there is no
    working compiler.
    """
    unit = CppUnit()
    inputs = Table("inputs", "Input", [_input_text(unit, item) for item in program.inputs])
    slots = [unit.slot(constant.value.name) for constant in program.constants]
    converter = CppConverter(program, unit, handlers)
    run = converter.run()
    constants = Table("constants", "Arg", [*slots, *filter(None, [converter.replay_handle])])
    outputs = Table("outputs", "Arg", converter.writer.scope.given)
    title = "\n".join([f"Program {program.name}, emitted by fxwrap.", *[f"{k}: {text}" for k, text in program.header]])
    source = unit.text(title, program.name, run, (inputs, constants, outputs))
    kernels = list(converter.kernels.values())
    return EmittedCpp(source, program, kernels, converter.replays, lambda part: to_cpp(part, converter.handlers))


def _input_text(unit: CppUnit, item: Input) -> str:
    name = string_text(item.name)
    value = item.value
    if isinstance(value, SymbolInfo):
        return f"{{{name}, {unit.symbol(value.name)}}}"
    match value.type:
        case TensorType():
            slot = unit.slot(value.name)
            return f"{{{name}, {f'owned({slot})' if item.ownership in _OWNED else slot}}}"
        case ScalarType(kind):
            return f"{{{name}, {unit.scalar(value.name, kind)}}}"
        case OpaqueType("NoneType"):
            return f"{{{name}, {unit.slot(value.name)}}}"
        case OpaqueType("Generator"):
            return f"{{{name}, {unit.list_slot(value.name)}}}"
        case _:
            reason = "C++ takes tensors, numbers and generators, neither lists nor other objects"
            raise Unsupported(f"%{value.name}", CppConverter.name, reason)
