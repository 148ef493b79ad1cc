"""Programs as a readable Python module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from fxwrap.converters.base import Converter, Handler
from fxwrap.converters.emitted import Boxed, Emitted, kernel_texts
from fxwrap.converters.python_text import INDENT, PythonModule, call_text, literal_text, tuple_text, unpack_text
from fxwrap.converters.views import unseen_views, view_form
from fxwrap.device_registry import language_facts
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
from fxwrap.runtime.kernels import prepare_kernels
from fxwrap.runtime.modules import load_module
from fxwrap.runtime.replay import Memory, owning
from fxwrap.symbolic import symbol_kind
from fxwrap.torch_compat import out_argument_names
from fxwrap.wrapper_ir import Block, LineBase, Program, TensorType, Value, leaves, program_arguments


class PythonConverter(Converter):
    """Writes the statements of one block; nested blocks are functions of their own, written above."""

    name: ClassVar[str] = "python"

    def __init__(
        self, program: Program, module: PythonModule, handlers: Mapping[type[ExtensionLine], Handler] | None = None
    ) -> None:
        super().__init__(handlers)
        self.program = program
        self.module = module
        self.statements: list[str] = []
        self.windows: dict[str, list[str]] = {}
        self.root_of: dict[str, str] = {}
        self.ranges: list[str] = []
        self.unseen: frozenset[str] = frozenset()
        self._blocks: list[int] = []  # where the `with` blocks that are open begin
        self._origin = ""

    def block(self, block: Block) -> list[str]:
        """Returns the statements of a block."""
        for value in block.arguments:
            self.own(value.name)
        self.unseen = unseen_views(block.lines, [*program_arguments(self.program), *block.arguments])
        for line in block.lines:
            self._remark(line)
            self.convert(line)
        return self.statements

    # --- text -------------------------------------------------------------------------------------------------------

    def _remark(self, line: LineBase) -> None:
        origin = str(line.origin) if line.origin is not None else ""
        if origin and origin != self._origin:
            self.say(f"# {origin}")
        self._origin = origin

    def say(self, statement: str) -> None:
        """Adds a statement."""
        self.statements.append(INDENT * len(self._blocks) + statement)

    def assign(self, value: Value, text: str, base: Value | None = None) -> None:
        """Adds a statement that defines a value, a window on `base` or a root."""
        name = self.module.local(value.name)
        self.say(f"{name} = {text}")
        self.own(value.name, base)

    def own(self, name: str, base: Value | None = None) -> None:
        """Notes a value and the root it is a window on, so that a free lets go of all windows."""
        root = self.root_of.get(base.name, base.name) if base is not None else name
        self.root_of[name] = root
        self.windows.setdefault(root, []).append(name)

    def text(self, item: Any) -> str:
        """Returns an argument's text."""
        return literal_text(self.module, item)

    def _sizes(self, sizes: tuple[Any, ...]) -> str:
        return tuple_text([self.text(size) for size in sizes])

    def _runtime(self, module: str, function: str) -> str:
        return self.module.runtime(module, function)

    # --- memory -----------------------------------------------------------------------------------------------------

    def _empty(self, type_: TensorType) -> str:
        shape = f"{self._sizes(type_.sizes)}, {self._sizes(type_.strides)}"
        return f"{self.module.allocator(type_.device)}({shape}, {self.text(type_.dtype)})"

    def alloc(self, line: Alloc) -> None:
        self.assign(line.result, self._empty(line.result.tensor_type))

    def free(self, line: Free) -> None:
        if self.waits_for(line):
            device = self.text(line.root.tensor_type.device)
            self.say(f"{self._runtime('devices', 'record_stream')}({self.text(line.root)}, {device}, {line.stream})")
        names = self.windows.pop(line.root.name)
        self._delete([self.module.local(name) for name in names])

    def _delete(self, names: list[str]) -> None:
        text = ", ".join(names)
        if self.statements and self.statements[-1].startswith(INDENT * len(self._blocks) + "del "):
            self.statements[-1] += ", " + text
        else:
            self.say("del " + text)

    def _reinterpret(self, memory: Value, type_: TensorType, offset: Any) -> str:
        function = self._runtime("tensors", "reinterpret")
        arguments = [self.text(memory), self._sizes(type_.sizes), self._sizes(type_.strides), self.text(type_.dtype)]
        if offset != 0:
            arguments.append(self.text(offset))
        return f"{function}({', '.join(arguments)})"

    def reuse(self, line: Reuse) -> None:
        old, new = line.root.tensor_type, line.result.tensor_type
        same = old.dtype == new.dtype
        self.assign(line.result, self._window(line.root, new, 0) if same else self._reinterpret(line.root, new, 0))
        self.free(Free(line.root))

    def _window(self, base: Value, type_: TensorType, offset: Any) -> str:
        """Returns memory under another type of the same dtype, `offset` elements after the first of `base`."""
        arguments = [self.text(base), self._sizes(type_.sizes), self._sizes(type_.strides)]
        if offset != 0:
            arguments.append(self.text(offset))
        return f"{self._runtime('tensors', 'window')}({', '.join(arguments)})"

    def view(self, line: View) -> None:
        if line.result.name in self.unseen:
            old, new = line.base.tensor_type, line.result.tensor_type
            text = self._window(line.base, new, new.storage_offset - old.storage_offset)
        else:
            text = self._torch_view(line)
        self.assign(line.result, text, line.base)

    def _torch_view(self, line: View) -> str:
        """Returns a view of torch's, with the base and the version counter that eager's has."""
        base = self.text(line.base)
        form = view_form(line.base.tensor_type, line.result.tensor_type)
        match form.kind:
            case "slice":
                dim, start, end, _ = form.arguments
                return f"{base}.narrow({dim}, {start}, {end - start})"
            case "as_strided":
                sizes, strides, offset = form.arguments
                place = "" if offset == 0 else f", {base}.storage_offset() + {self._operand(offset)}"
                return f"{base}.as_strided({self._sizes(sizes)}, {self._sizes(strides)}{place})"
            case "select":
                return f"{base}.select({form.arguments[0]}, {form.arguments[1]})"
            case _:
                return f"{base}.{form.kind}({self._sizes(form.arguments[0])})"

    def _operand(self, size: Any) -> str:
        text = self.text(size)
        return text if text.isidentifier() or text.isdigit() else f"({text})"

    def pool(self, line: Pool) -> None:
        self.assign(line.result, self._empty(line.result.tensor_type))

    def pool_slice(self, line: PoolSlice) -> None:
        type_ = line.result.tensor_type
        if isinstance(line.offset, int) and line.offset % type_.dtype.itemsize == 0:
            text = self._window(self._typed_pool(line.pool, type_), type_, line.offset // type_.dtype.itemsize)
        else:
            text = self._reinterpret(line.pool, type_, line.offset)
        self.assign(line.result, text, line.pool)

    def _typed_pool(self, pool: Value, type_: TensorType) -> Value:
        """Returns a pool's memory under the dtype of a slice, said where the first slice of the dtype is."""
        if pool.tensor_type.dtype == type_.dtype:
            return pool
        dtype = str(type_.dtype).removeprefix("torch.")
        typed = Value(f"{pool.name}.{dtype}", replace(type_, sizes=(0,), strides=(1,)))
        if typed.name not in self.root_of:
            self.assign(typed, self._reinterpret(pool, typed.tensor_type, 0), pool)
        return typed

    def workspace(self, line: Workspace) -> None:
        self.assign(line.result, self._empty(line.result.tensor_type) + (".zero_()" if line.zeroed else ""))

    # --- kernels and operators --------------------------------------------------------------------------------------

    def launch(self, line: Launch) -> None:
        definition = self.program.kernel(line.kernel)
        called_once = language_facts(definition.language).called_once and line.grid == (1, 1, 1)
        kernel = self.module.kernel_function(definition) if called_once else self.module.kernel(definition)
        tensors = [item for item in line.arguments if isinstance(item, Value)]
        numbers = [item for item in line.arguments if not isinstance(item, Value)]
        grid = [] if called_once else [self._sizes(line.grid)]
        arguments = [*grid, *[self.text(item) for item in (*tensors, *line.outs, *numbers)]]
        self.say(f"{kernel}({', '.join(arguments)})")

    def call(self, line: Call) -> None:
        names = out_argument_names(line.target) if line.outs else ()
        self._take(line, call_text(self.module, line.target, line.arguments, line.keywords, line.outs, names))

    def mutate(self, line: Mutate) -> None:
        self._take(line, call_text(self.module, line.target, line.arguments, line.keywords, ()))

    def _take(self, line: Call | Mutate | StartCollective, call: str) -> None:
        """Binds an operator's results: those nobody wants are not kept alive."""
        named = [leaf for leaf in leaves(line.results) if leaf is not None]
        for value in named:
            self.own(value.name, line.alias_of(value))
        if not named:
            self.say(call)
        elif len(line.results) == 1 and isinstance(line.results[0], Value):
            self.say(f"{self.module.local(line.results[0].name)} = {call}")
        else:
            # an operator that returns one list: its items
            items = line.results[0] if len(line.results) == 1 else line.results
            pattern = ", ".join([self._pattern(item) for item in items]) + ("," if len(items) == 1 else "")
            self.say(f"{pattern} = {call}")
            if any(leaf is None for leaf in leaves(line.results)):
                self._delete(["_"])

    def _pattern(self, item: Any) -> str:
        if item is None:
            return "_"
        if isinstance(item, Value):
            return self.module.local(item.name)
        return f"[{', '.join([self._pattern(part) for part in item])}]"

    def scatter(self, line: Scatter) -> None:
        arguments = [self.text(item) for item in (line.target, line.dim, line.index, line.source)]
        form = SCATTER_OPERATORS[line.reduce][not isinstance(line.source, Value)]
        if not form:
            arguments += [self.text(line.reduce), self.text(line.include_self)]
            self.say(f"{self._runtime('tensors', 'scatter')}({', '.join(arguments)})")
            return
        if form.endswith(".two"):
            arguments += [self.text(line.reduce), f"include_self={self.text(line.include_self)}"]
        elif line.reduce:
            arguments.append(f"reduce={self.text(line.reduce)}")
        method = form.split(".")[1]
        self.say(f"{arguments[0]}.{method}({', '.join(arguments[1:])})")

    def index_put(self, line: IndexPut) -> None:
        function = self.module.operator("aten.index_put_.default")  # the method takes no None among the indices
        indices = f"[{', '.join([self.text(index) for index in line.indices])}]"
        accumulate = ", True" if line.accumulate else ""
        self.say(f"{function}({self.text(line.target)}, {indices}, {self.text(line.values)}{accumulate})")

    # --- symbols ----------------------------------------------------------------------------------------------------

    def size(self, line: SizeOf) -> None:
        if line.rank:
            check = self._runtime("checks", "check_rank")
            self.say(f"{check}({self.text(line.tensor)}, {line.tensor.name!r}, {line.rank})")
        tensor = self.text(line.tensor)
        taken = {"size": f".size({line.dim})", "stride": f".stride({line.dim})", "storage_offset": ".storage_offset()"}
        self.say(f"{line.symbol.name} = {tensor}{taken[line.of]}")

    def let(self, line: Let) -> None:
        self.say(f"{line.symbol.name} = {self.text(line.expr)}")

    def item(self, line: Item) -> None:
        self.say(f"{line.symbol.name} = {self.text(line.tensor)}.item()")

    def bind(self, line: Bind) -> None:
        text = self.text(line.source)
        for step in line.path:
            match step.name:
                case "size" | "stride" | "storage_offset":
                    text += f".{step.name}({', '.join(map(str, step.arguments))})"
                case "element":
                    text += f"[{step.arguments[0]}]"
                case "divide":
                    text = f"({text} // {step.arguments[0]})"
                case _:
                    text = f"int(bool({text}))"
        self.say(f"{line.symbol.name} = {text}")

    def assertion(self, line: Assert) -> None:
        self.say(f"if not ({self.text(line.condition)}):")
        if line.error == "RuntimeError" and line.shown is None:
            self.say(f"    raise RuntimeError({line.text!r})")
            return
        shown = "" if line.shown is None else f", {self.text(line.shown)}"
        self.say(f"    {self._runtime('checks', 'fail')}({line.error!r}, {line.text!r}{shown})")

    # --- control ----------------------------------------------------------------------------------------------------

    def _function(self, label: str, block: Block) -> str:
        """Writes a nested block as a function above; its last parameters are the symbols it uses, by the same names."""
        return self.module.function(label, block, lambda: PythonConverter(self.program, self.module, self.handlers))

    def _targets(self, results: tuple[Any, ...]) -> str:
        """Returns the names that results are unpacked into; a place that gives nothing has none."""
        for value in results:
            if value is not None:
                self.own(value.name)
        return ", ".join([self._pattern(value) for value in results]) + ("," if len(results) == 1 else "")

    def _bind_results(self, results: tuple[Any, ...], text: str) -> None:
        self.say(f"{self._targets(results)} = {text}" if results else text)

    def cond(self, line: Cond) -> None:
        then, else_ = self._function("then", line.then), self._function("else", line.else_)
        operands = self._arguments(line.operands)
        assigned = f"{self._targets(line.results)} = " if line.results else ""
        self.say(f"if {self.text(line.predicate)}:")
        self.say(f"    {assigned}{then}([{operands}]{self.module.captured(line.then)})")
        self.say("else:")
        self.say(f"    {assigned}{else_}([{operands}]{self.module.captured(line.else_)})")

    def _arguments(self, values: tuple[Any, ...]) -> str:
        return ", ".join([self.text(value) for value in values])

    def _runnable(self, label: str, block: Block) -> str:
        """Returns a nested block as a function of its boxed arguments alone."""
        name, symbols = self._function(label, block), self.module.captured(block)
        return f"lambda arguments: {name}(arguments{symbols})" if symbols else name

    def _lists(self, *items: tuple[Any, ...]) -> str:
        return ", ".join([f"[{self._arguments(item)}]" for item in items])

    def while_(self, line: While) -> None:
        blocks = f"{self._runnable('cond', line.cond)}, {self._runnable('body', line.body)}"
        lists = self._lists(line.carried, line.extra)
        stacked = ", stacked=True" if line.stacked else ""
        self._bind_results(line.results, f"{self._runtime('control', 'while_loop')}({blocks}, {lists}{stacked})")

    def scan(self, line: Scan) -> None:
        self._over_slices(line, line.carried, line.reverse)

    def map(self, line: Map) -> None:
        self._over_slices(line, (), False)

    def _over_slices(self, line: Scan | Map, carried: tuple[Any, ...], reverse: bool) -> None:
        """Says a loop over slices, which writes into stacked results that are allocated before."""
        stacked = line.results[len(carried) :]
        for value in stacked:
            self.assign(value, self._empty(value.tensor_type))
        body, lists = self._runnable("body", line.body), self._lists(carried, line.over, line.extra, stacked)
        call = f"{self._runtime('control', 'scan')}({body}, {lists}{', reverse=True' if reverse else ''})"
        self._bind_results(line.results[: len(carried)], call)

    def call_function(self, line: CallFunction) -> None:
        block = dict(self.program.functions)[line.function]
        function = self._function(line.function, block)
        if line.replay:
            function = self.module.replayed(function, line, block)
        operands = self._arguments(line.operands)
        self._bind_results(line.results, f"{function}([{operands}]{self.module.captured(block)})")

    def yield_(self, line: Yield) -> None:
        self.say(f"return {tuple_text([self.text(item) for item in line.values])}")

    def return_(self, line: Return) -> None:
        self.say(f"return {tuple_text([self.text(item) for item in line.values])}")

    # --- the world --------------------------------------------------------------------------------------------------

    def save_state(self, line: SaveState) -> None:
        self.assign(line.result, f"{self._runtime('tensors', 'random_state')}({line.device!r})")

    def restore_state(self, line: RestoreState) -> None:
        self.say(f"{self._runtime('tensors', 'set_random_state')}({line.device!r}, {self.text(line.state)})")

    def exchange_state(self, line: ExchangeState) -> None:
        exchange = self._runtime("tensors", "exchange_random_state")
        self.say(f"{exchange}({line.device!r}, {self.text(line.generator)})")

    def enter_device(self, line: EnterDevice) -> None:
        self.say(f"with {self.module.guard(line.device, line.stream)}():")
        self._blocks.append(len(self.statements))

    def exit_device(self, line: ExitDevice) -> None:
        if all(statement.lstrip().startswith("#") for statement in self.statements[self._blocks[-1] :]):
            self.say("pass")
        self._blocks.pop()

    def check_layout(self, line: CheckLayout) -> None:
        type_ = line.expected
        arguments = [self.text(line.tensor), repr(line.name or line.tensor.name), self.text(type_.dtype)]
        arguments += [self._sizes(type_.sizes), self._sizes(type_.strides), self.text(type_.device)]
        self.say(f"{self._runtime('checks', 'check_layout')}({', '.join(arguments)})")
        if line.alignment != 1:
            check = self._runtime("checks", "check_alignment")
            self.say(f"{check}({arguments[0]}, {arguments[1]}, {line.alignment})")

    def comment(self, line: Comment) -> None:
        for text in line.text.splitlines():
            visible = "".join([c if c.isprintable() else repr(c)[1:-1] for c in text])
            self.say(f"# {visible}".rstrip())

    def enter_range(self, line: EnterRange) -> None:
        self.ranges.append(f"range_{len(self.statements)}")
        self.say(f"{self.ranges[-1]} = torch.profiler.record_function({line.name!r})")
        self.say(f"{self.ranges[-1]}.__enter__()")

    def exit_range(self, line: ExitRange) -> None:
        self.say(f"{self.ranges.pop()}.__exit__(None, None, None)")

    def record_event(self, line: RecordEvent) -> None:
        number = f", {line.event}" if line.event else ""
        record = self._runtime("devices", "record_event")
        self.assign(line.result, f"{record}({self.text(torch.device(line.device))}, {line.stream}{number})")

    def wait_event(self, line: WaitEvent) -> None:
        arguments = f"{self.text(line.event)}, {self.text(torch.device(line.device))}, {line.stream}"
        self.say(f"{self._runtime('devices', 'wait_event')}({arguments})")
        self.free(Free(line.event))

    def start_collective(self, line: StartCollective) -> None:
        self._take(line, call_text(self.module, line.operator, line.arguments, (), ()))

    def wait_collective(self, line: WaitCollective) -> None:
        wait = self.module.operator("_c10d_functional.wait_tensor.default")
        self.assign(line.result, f"{wait}({self.text(line.pending)})", line.pending)


def to_python(program: Program, handlers: Mapping[type[ExtensionLine], Handler] | None = None) -> Emitted:
    """Returns the program as a Python module, which is written to the cache folder when it is first called.

    `handlers` say how lines of vendors' own are written, by default what registered devices say; without one, such a
    line is written as what it expands to.
    Raises Unsupported for a line that Python cannot express yet.
    """
    module = PythonModule(dict(program.functions))
    writer = PythonConverter(program, module, handlers)
    constants = [constant.value for constant in program.constants]
    for value in program_arguments(program):
        writer.own(value.name)
    count, check = len(program.inputs), module.runtime("checks", "check_count")
    statements = [f"if len(arguments) != {count}:", f"    {check}({program.name!r}, {count}, len(arguments))"]
    statements += unpack_text([module.local(item.name) for item in program.inputs])
    for symbol in [item.name for item in program.inputs if not isinstance(item.value, Value)]:
        kind, check = symbol_kind(symbol), module.runtime("checks", "check_number")
        statements += [f"if type({symbol}) is not {kind}:", f"    {check}({symbol}, {symbol!r}, {kind!r})"]
    statements += writer.block(program.body)
    function = "\n    ".join([f"def {module.local(program.name)}(arguments):", *statements])
    names = [module.local(value.name) for value in constants]
    source = module.text(_title(program), _constants_text(names, constants) + function)
    return Emitted(source, lambda: _build(source, program, module.local(program.name)))


def _title(program: Program) -> str:
    header = "".join(f"\n{key}: {text}" for key, text in program.header)
    return f"Program {program.name}, emitted by fxwrap.{header}"


def _constants_text(names: list[str], constants: list[Value]) -> str:
    if not names:
        return ""
    taken = "\n    ".join([f"{name} = constants[{value.name!r}]" for name, value in zip(names, constants, strict=True)])
    return f"def load_constants(constants):\n    global {', '.join(names)}\n    {taken}\n\n\n"


def _build(source: str, program: Program, function: str) -> Boxed:
    prepare_kernels(kernel_texts(program))
    module = load_module(source, program.name)
    if program.constants:
        module.load_constants(program.store.tensors)
    built: Boxed = getattr(module, function)
    return owning(built, [item for item in vars(module).values() if isinstance(item, Memory)])
