"""Lines as readable Python statements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

import fxwrap.lines as lines
from fxwrap import wrapper_ir as ir
from fxwrap.converters.base import Converter, Handlers
from fxwrap.converters.python.text import INDENT, PythonModule, call_text, literal_text, tuple_text
from fxwrap.converters.view_chains import single_view_operator
from fxwrap.converters.views import arguments_written_by_kernels, detached_results, untracked_views
from fxwrap.devices import language_traits
from fxwrap.torch_compat import PROFILER_FLAG, out_argument_names


class PythonConverter(Converter):
    """Writes the statements of one block. Nested blocks become functions before the program's."""

    name: ClassVar[str] = "python"

    def __init__(self, program: ir.Program, module: PythonModule, handlers: Handlers | None = None) -> None:
        super().__init__(handlers)
        self.program = program
        self.module = module
        self.statements: list[str] = []
        self.names_by_root: dict[str, list[str]] = {}
        self.root_of: dict[str, str] = {}
        self.ranges: list[str] = []
        self.untracked: frozenset[str] = frozenset()
        self.written: tuple[ir.Value, ...] = ()  # arguments whose version counters the next launch increments
        self._guard_starts: list[int] = []  # positions of the first statements of open `with` blocks
        self._origin = ""

    def block(self, block: ir.Block) -> list[str]:
        """Returns the statements of a block."""
        for value in block.arguments:
            self.track_value(value.name)
        arguments = [*ir.program_arguments(self.program), *block.arguments]
        self.untracked = untracked_views(block.lines, arguments)
        self.written = arguments_written_by_kernels(block.lines, arguments)
        for line in block.lines:
            self._emit_origin(line)
            self.convert(line)
        return self.statements

    # --- text -------------------------------------------------------------------------------------------------------

    def _emit_origin(self, line: ir.LineBase) -> None:
        origin = str(line.origin) if line.origin is not None else ""
        if origin and origin != self._origin:
            self.emit(f"# {origin}")
        self._origin = origin

    def emit(self, statement: str) -> None:
        """Adds a statement."""
        self.statements.append(INDENT * len(self._guard_starts) + statement)

    def assign(self, value: ir.Value, text: str, base: ir.Value | None = None) -> None:
        """Adds a statement that defines a value, an alias of `base` or a root."""
        name = self.module.local(value.name)
        self.emit(f"{name} = {text}")
        self.track_value(value.name, base)

    def track_value(self, name: str, base: ir.Value | None = None) -> None:
        """Records the root of a value, so that a free deletes all its aliases."""
        root = self.root_of.get(base.name, base.name) if base is not None else name
        self.root_of[name] = root
        self.names_by_root.setdefault(root, []).append(name)

    def text(self, operand: ir.Operand) -> str:
        """Returns the text of an operand."""
        return literal_text(self.module, operand)

    def _sizes(self, sizes: tuple[ir.Size, ...]) -> str:
        return tuple_text([self.text(size) for size in sizes])

    def _runtime(self, module: str, function: str) -> str:
        return self.module.runtime(module, function)

    # --- memory -----------------------------------------------------------------------------------------------------

    def _empty(self, type_: ir.TensorType) -> str:
        shape = f"{self._sizes(type_.sizes)}, {self._sizes(type_.strides)}"
        if (group := type_.symmetric_group) is not None:
            device = self.text(type_.device)
            function = self._runtime("symmetric_memory", "allocate")
            return f"{function}({shape}, {self.text(type_.dtype)}, {device}, {group!r})"
        return f"{self.module.allocator(type_.device)}({shape}, {self.text(type_.dtype)})"

    def alloc(self, line: lines.Alloc | lines.Pool) -> None:
        self.assign(line.result, self._empty(line.result.tensor_type))

    pool = alloc

    def free(self, line: lines.Free) -> None:
        if self.needs_record_stream(line):
            device = self.text(line.root.tensor_type.device)
            self.emit(f"{self._runtime('devices', 'record_stream')}({self.text(line.root)}, {device}, {line.stream})")
        names = self.names_by_root.pop(line.root.name)
        self._delete([self.module.local(name) for name in names])

    def _delete(self, names: list[str]) -> None:
        text = ", ".join(names)
        if self.statements and self.statements[-1].startswith(INDENT * len(self._guard_starts) + "del "):
            self.statements[-1] += ", " + text
        else:
            self.emit("del " + text)

    def _reinterpret(self, memory: ir.Value, type_: ir.TensorType, offset: ir.Size) -> str:
        function = self._runtime("tensors", "reinterpret")
        arguments = [self.text(memory), self._sizes(type_.sizes), self._sizes(type_.strides), self.text(type_.dtype)]
        if offset != 0:
            arguments.append(self.text(offset))
        return f"{function}({', '.join(arguments)})"

    def reuse(self, line: lines.Reuse) -> None:
        old, new = line.root.tensor_type, line.result.tensor_type
        same = old.dtype == new.dtype
        self.assign(line.result, self._alias(line.root, new, 0) if same else self._reinterpret(line.root, new, 0))
        self.free(lines.Free(line.root))

    def _alias(self, base: ir.Value, type_: ir.TensorType, offset: ir.Size) -> str:
        """Returns a view of another type with the same dtype, `offset` elements after the first element of `base`."""
        arguments = [self.text(base), self._sizes(type_.sizes), self._sizes(type_.strides)]
        if offset != 0:
            arguments.append(self.text(offset))
        return f"{self._runtime('tensors', 'strided_view')}({', '.join(arguments)})"

    def view(self, line: lines.View) -> None:
        if line.result.name in self.untracked:
            old, new = line.base.tensor_type, line.result.tensor_type
            text = self._alias(line.base, new, new.storage_offset - old.storage_offset)
        else:
            text = self._torch_view(line)
        self.assign(line.result, text, line.base)

    def _torch_view(self, line: lines.View) -> str:
        """Returns a torch view, which has the `_base` and the version counter of eager mode."""
        base, type_ = self.text(line.base), line.result.tensor_type
        view = single_view_operator(line.base.tensor_type, type_)
        match view.kind:
            case "slice" if {int}.issuperset(map(type, view.arguments)) and view.arguments[3] == 1:
                dim, start = view.arguments[:2]
                return f"{base}.narrow({dim}, {start}, {self.text(type_.sizes[dim])})"
            case "slice" | "as_strided":
                offset = type_.storage_offset - line.base.tensor_type.storage_offset
                shift = "" if offset == 0 else f", {base}.storage_offset() + {self._operand(offset)}"
                return f"{base}.as_strided({self._sizes(type_.sizes)}, {self._sizes(type_.strides)}{shift})"
            case "view" | "permute" | "expand":
                return f"{base}.{view.kind}({self._sizes(view.arguments[0])})"
            case _:
                return f"{base}.{view.kind}({', '.join(map(self.text, view.arguments))})"

    def _operand(self, size: ir.Size) -> str:
        text = self.text(size)
        return text if text.isidentifier() or text.isdigit() else f"({text})"

    def pool_slice(self, line: lines.PoolSlice) -> None:
        type_ = line.result.tensor_type
        if isinstance(line.offset, int) and line.offset % type_.dtype.itemsize == 0:
            text = self._alias(self._typed_pool(line.pool, type_), type_, line.offset // type_.dtype.itemsize)
        else:
            text = self._reinterpret(line.pool, type_, line.offset)
        self.assign(line.result, text, line.pool)

    def _typed_pool(self, pool: ir.Value, type_: ir.TensorType) -> ir.Value:
        """Returns the pool reinterpreted as the dtype of a slice, which the first slice of the dtype defines."""
        if pool.tensor_type.dtype == type_.dtype:
            return pool
        dtype = str(type_.dtype).removeprefix("torch.")
        typed = ir.Value(f"{pool.name}.{dtype}", replace(type_, sizes=(0,), strides=(1,)))
        if typed.name not in self.root_of:
            self.assign(typed, self._reinterpret(pool, typed.tensor_type, 0), pool)
        return typed

    def workspace(self, line: lines.Workspace) -> None:
        self.assign(line.result, self._empty(line.result.tensor_type) + (".zero_()" if line.zeroed else ""))

    # --- kernels and operators --------------------------------------------------------------------------------------

    def launch(self, line: lines.Launch) -> None:
        definition = self.program.kernel(line.kernel)
        gridless = language_traits(definition.language).gridless and line.grid == (1, 1, 1)
        kernel = self.module.kernel(definition, gridless=gridless, dependent=line.dependent)
        tensors = [item for item in line.arguments if isinstance(item, ir.Value)]
        scalars = [item for item in line.arguments if not isinstance(item, ir.Value)]
        grid = [] if gridless else [self._sizes(line.grid)]
        arguments = [*grid, *[self.text(item) for item in (*tensors, *line.outs, *scalars)]]
        if self.written:
            self.emit(f"{self._runtime('tensors', 'increment_versions')}(({self._arguments(self.written)},))")
            self.written = ()
        self.emit(f"{kernel}({', '.join(arguments)})")

    def call(self, line: lines.ExternCall | lines.Mutate) -> None:
        keywords = dict(line.keywords)
        if isinstance(line, lines.ExternCall) and line.outs:
            keywords |= zip(out_argument_names(line.target), line.outs, strict=True)
        self._bind_operator_results(line, call_text(self.module, line.target, line.arguments, keywords))

    mutate = call

    def _bind_operator_results(self, line: lines.ExternCall | lines.Mutate | lines.StartCollective, call: str) -> None:
        """Binds the results of an operator and deletes the unused ones."""
        values = ir.values_in(line.results)
        for value in values:
            self.track_value(value.name, line.alias_of(value))
        only = line.results[0] if len(line.results) == 1 else None
        if not values:
            self.emit(call)
        elif isinstance(only, ir.Value):
            self.emit(f"{self.module.local(only.name)} = {call}")
        else:
            self.emit(f"{self._patterns(only or line.results)} = {call}")
            if any(leaf is None for leaf in ir.leaves(line.results)):
                self._delete(["_"])

    def _patterns(self, results: tuple[ir.Result, ...]) -> str:
        return ", ".join([self._pattern(result) for result in results]) + ("," if len(results) == 1 else "")

    def _pattern(self, result: ir.Result) -> str:
        if isinstance(result, tuple):
            return f"[{', '.join([self._pattern(item) for item in result])}]"
        return "_" if result is None else self.module.local(result.name)

    def scatter(self, line: lines.Scatter) -> None:
        arguments = [self.text(item) for item in (line.target, line.dim, line.index, line.source)]
        form = lines.SCATTER_OPERATORS[line.reduce][not isinstance(line.source, ir.Value)]
        if not form:
            arguments += [self.text(line.reduce), self.text(line.include_self)]
            self.emit(f"{self._runtime('tensors', 'scatter')}({', '.join(arguments)})")
            return
        if form.endswith(".two"):
            arguments += [self.text(line.reduce), f"include_self={self.text(line.include_self)}"]
        elif line.reduce:
            arguments.append(f"reduce={self.text(line.reduce)}")
        method = form.split(".")[1]
        self.emit(f"{arguments[0]}.{method}({', '.join(arguments[1:])})")

    def index_put(self, line: lines.IndexPut) -> None:
        function = self.module.operator("aten.index_put_.default")  # the method accepts no None among the indices
        indices = f"[{', '.join([self.text(index) for index in line.indices])}]"
        accumulate = ", True" if line.accumulate else ""
        self.emit(f"{function}({self.text(line.target)}, {indices}, {self.text(line.values)}{accumulate})")

    # --- symbols ----------------------------------------------------------------------------------------------------

    def size(self, line: lines.SizeOf) -> None:
        if line.rank:
            check = self._runtime("checks", "check_rank")
            self.emit(f"{check}({self.text(line.tensor)}, {line.tensor.name!r}, {line.rank})")
        tensor = self.text(line.tensor)
        dim = "" if line.of == "storage_offset" else line.dim
        self.emit(f"{line.symbol.name} = {tensor}.{line.of}({dim})")

    def let(self, line: lines.Let) -> None:
        self.emit(f"{line.symbol.name} = {self.text(line.expr)}")

    def item(self, line: lines.ReadItem) -> None:
        self.emit(f"{line.symbol.name} = {self.text(line.tensor)}.item()")

    def bind(self, line: lines.Bind) -> None:
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
        self.emit(f"{line.symbol.name} = {text}")

    def assertion(self, line: lines.Assert) -> None:
        self.emit(f"if not ({self.text(line.condition)}):")
        if line.error == "RuntimeError" and line.shown is None:
            self.emit(f"    raise RuntimeError({line.text!r})")
            return
        shown = "" if line.shown is None else f", {self.text(line.shown)}"
        self.emit(f"    {self._runtime('checks', 'raise_error')}({line.error!r}, {line.text!r}{shown})")

    # --- control ----------------------------------------------------------------------------------------------------

    def _function(self, label: str, block: ir.Block) -> str:
        """Writes a nested block as a function, whose last parameters are the symbols that it captures."""
        return self.module.function(
            label, block, lambda nested: PythonConverter(self.program, self.module, self.handlers).block(nested)
        )

    def _targets(self, results: tuple[ir.Result, ...]) -> str:
        for value in ir.values_in(results):
            self.track_value(value.name)
        return self._patterns(results)

    def _bind_results(self, results: tuple[ir.Result, ...], text: str) -> None:
        self.emit(f"{self._targets(results)} = {text}" if results else text)

    def cond(self, line: lines.Cond) -> None:
        then, else_ = self._function("then", line.then), self._function("else", line.else_)
        operands = self._arguments(line.operands)
        assigned = f"{self._targets(line.results)} = " if line.results else ""
        self.emit(f"if {self.text(line.predicate)}:")
        self.emit(f"    {assigned}{then}([{operands}]{self.module.captured_symbols(line.then)})")
        self.emit("else:")
        self.emit(f"    {assigned}{else_}([{operands}]{self.module.captured_symbols(line.else_)})")

    def _arguments(self, values: Sequence[ir.Operand]) -> str:
        return ", ".join([self.text(value) for value in values])

    def _block_callable(self, label: str, block: ir.Block) -> str:
        """Returns a nested block as a function of its boxed arguments only."""
        name, symbols = self._function(label, block), self.module.captured_symbols(block)
        return f"lambda arguments: {name}(arguments{symbols})" if symbols else name

    def _lists(self, *items: Sequence[ir.Operand]) -> str:
        return ", ".join([f"[{self._arguments(item)}]" for item in items])

    def while_(self, line: lines.While) -> None:
        blocks = f"{self._block_callable('cond', line.cond)}, {self._block_callable('body', line.body)}"
        lists = self._lists(line.carried, line.extra)
        stacked = ", stacked=True" if line.stacked else ""
        self._bind_results(line.results, f"{self._runtime('control', 'while_loop')}({blocks}, {lists}{stacked})")

    def scan(self, line: lines.ScanLoop | lines.Map) -> None:
        stacked = ir.values_in(line.results[len(line.carried) :])
        for value in stacked:
            self.assign(value, self._empty(value.tensor_type))
        body, lists = self._block_callable("body", line.body), self._lists(line.carried, line.over, line.extra, stacked)
        call = f"{self._runtime('control', 'scan')}({body}, {lists}{', reverse=True' if line.reverse else ''})"
        self._bind_results(line.results[: len(line.carried)], call)

    map = scan

    def call_function(self, line: lines.CallFunction) -> None:
        block = dict(self.program.functions)[line.function]
        function = self._function(line.function, block)
        if line.max_captures:
            function = self.module.replay_wrapper(function, line, block)
        operands = self._arguments(line.operands)
        self._bind_results(line.results, f"{function}([{operands}]{self.module.captured_symbols(block)})")

    def yield_(self, line: lines.Yield) -> None:
        self.emit(f"return {tuple_text([self.text(item) for item in line.values])}")

    def return_(self, line: lines.Return) -> None:
        views = detached_results(self.program.body.lines, ir.program_arguments(self.program))
        detached = {name for name in views if name not in self.untracked}
        texts = [self.text(item) + ".detach()" * (isinstance(item, ir.Value) and item.name in detached)
                 for item in line.values]  # fmt: skip
        self.emit(f"return {tuple_text(texts)}")

    # --- devices, randomness, checks and profiling ------------------------------------------------------------------

    def save_state(self, line: lines.SaveRngState) -> None:
        self.assign(line.result, f"{self._runtime('tensors', 'random_state')}({line.device!r})")

    def restore_state(self, line: lines.RestoreRngState) -> None:
        self.emit(f"{self._runtime('tensors', 'set_random_state')}({line.device!r}, {self.text(line.state)})")

    def exchange_state(self, line: lines.ExchangeRngState) -> None:
        exchange = self._runtime("tensors", "exchange_random_state")
        self.emit(f"{exchange}({line.device!r}, {self.text(line.generator)})")

    def enter_device(self, line: lines.EnterDevice) -> None:
        self.emit(f"with {self.module.guard(line.device, line.stream)}():")
        self._guard_starts.append(len(self.statements))

    def exit_device(self, line: lines.ExitDevice) -> None:
        if all(statement.lstrip().startswith("#") for statement in self.statements[self._guard_starts[-1] :]):
            self.emit("pass")
        self._guard_starts.pop()

    def check_layout(self, line: lines.CheckLayout) -> None:
        type_ = line.expected
        arguments = [self.text(line.tensor), repr(line.name or line.tensor.name), self.text(type_.dtype)]
        arguments += [self._sizes(type_.sizes), self._sizes(type_.strides), self.text(type_.device)]
        arguments += [repr(line.operator)] if line.operator else []
        self.emit(f"{self._runtime('checks', 'check_layout')}({', '.join(arguments)})")
        if line.alignment != 1:
            check = self._runtime("checks", "check_alignment")
            self.emit(f"{check}({arguments[0]}, {arguments[1]}, {line.alignment})")

    def comment(self, line: lines.Comment) -> None:
        for text in line.text.splitlines():
            visible = "".join([c if c.isprintable() else repr(c)[1:-1] for c in text])
            self.emit(f"# {visible}".rstrip())

    def enter_range(self, line: lines.EnterRange) -> None:
        enter = self.module.define_global("range_enter", self._runtime("ranges", "enter_range"))
        profiler = self.module.define_global("range_profiler", self._runtime("ranges", "profiler_module"))
        self.ranges.append(f"range_{len(self.statements)}")
        self.emit(f"{self.ranges[-1]} = {enter}({line.name!r}) if {profiler}.{PROFILER_FLAG} else None")

    def exit_range(self, line: lines.ExitRange) -> None:
        name = self.ranges.pop()
        self.emit(f"if {name}:")
        self.emit(f"    {name}.__exit__(None, None, None)")

    def record_event(self, line: lines.RecordEvent) -> None:
        number = f", {line.event}" if line.event else ""
        record = self._runtime("devices", "record_event")
        self.assign(line.result, f"{record}({self.text(torch.device(line.device))}, {line.stream}{number})")

    def wait_event(self, line: lines.WaitEvent) -> None:
        arguments = f"{self.text(line.event)}, {self.text(torch.device(line.device))}, {line.stream}"
        self.emit(f"{self._runtime('devices', 'wait_event')}({arguments})")
        self.free(lines.Free(line.event))

    def start_collective(self, line: lines.StartCollective) -> None:
        outs = dict(zip(out_argument_names(line.operator), line.outs)) if line.outs else {}
        self._bind_operator_results(line, call_text(self.module, line.operator, line.arguments, outs))

    def wait_collective(self, line: lines.WaitCollective) -> None:
        wait = self.module.operator("_c10d_functional.wait_tensor.default")
        self.assign(line.result, f"{wait}({self.text(line.pending)})", line.pending)
