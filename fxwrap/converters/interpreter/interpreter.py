"""The interpreter, which defines the semantics of programs: it runs each line eagerly.

It checks every result against its type, so that a wrong type raises an error here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import takewhile
from typing import Any, TypeAlias

import sympy
import torch
from typing_extensions import Self

import fxwrap.lines as lines
from fxwrap.converters.base import Converter, Handlers
from fxwrap.converters.emitted_program import kernel_texts
from fxwrap.converters.views import detached_results
from fxwrap.errors import FxwrapError, InputError
from fxwrap.lines import ExternCall, Mutate
from fxwrap.runtime import checks, control, devices, symmetric_memory, tensors
from fxwrap.runtime.kernels import load_kernel, prepare_kernels
from fxwrap.runtime.plain_inputs import with_plain_inputs
from fxwrap.runtime.ranges import enter_range
from fxwrap.symbolic import Number, evaluate, symbol_kind
from fxwrap.torch_compat import operator_overload, out_argument_names, storage_identity
from fxwrap.wrapper_ir import (
    Block,
    Operand,
    Program,
    Result,
    TensorType,
    Value,
    check_program,
    defined,
    program_arguments,
    reads,
    type_symbols,
    values_in,
)

_WRONG_FAKE_DEVICE = frozenset(
    {
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_cudnn_attention.default",
    }
)
"""Operators whose fake-tensor propagation puts the random seed and offset on the GPU instead of the CPU. Only the
backward operator reads them."""

Content: TypeAlias = Any
"""A run-time value: a tensor, scalar, list, generator or opaque object."""


class Interpreter(Converter):
    """Runs one call of a program. `values` and `symbols` hold the values and symbols defined so far."""

    name = "interpreter"

    def __init__(self, program: Program, handlers: Handlers | None = None) -> None:
        super().__init__(handlers)
        self.program = program
        self.values: dict[str, Content] = {}
        self.symbols: dict[str, Number] = {}
        self.root_of: dict[str, str] = {}
        self.arguments: set[str] = set()
        self.outputs: tuple[Content, ...] = ()
        self.guards: list[AbstractContextManager[object]] = []
        self.functions = dict(program.functions)

    def run(self, inputs: list[Content]) -> tuple[Content, ...]:
        """Runs the program on the flat inputs and returns the flat outputs. Clears the list of inputs."""
        outputs: tuple[Content, ...] = with_plain_inputs(self._run)(inputs)
        return outputs

    def _run(self, inputs: list[Content]) -> tuple[Content, ...]:
        self.define_inputs(inputs)
        inputs.clear()
        contents = self.program.constant_operands()
        for constant in self.program.constants:
            self.define(constant.value, contents[constant.value.name])
            self.arguments.add(constant.value.name)
        self.prepare_kernels()
        with torch.no_grad():
            self._run_lines(self.program.body)
        return self.outputs

    def prepare_kernels(self) -> None:
        """Compiles the program's kernels."""
        prepare_kernels(kernel_texts(self.program))

    def define_inputs(self, inputs: Sequence[Content]) -> None:
        """Sets the values and symbols of the inputs. Raises InputError for a wrong number of them, or another kind."""
        checks.check_input_count(self.program.name, len(self.program.inputs), len(inputs))
        for item, argument in zip(self.program.inputs, inputs, strict=True):
            if isinstance(item.value, Value):
                self.define(item.value, argument, check=False)
                self.arguments.add(item.value.name)
            else:
                checks.check_number(argument, item.name, symbol_kind(item.name))
                self.symbols[item.name] = argument

    # --- values -----------------------------------------------------------------------------------------------------

    def define(self, value: Value, content: Content, *, check: bool = True) -> None:
        """Sets the content of a value. With `check`, raises FxwrapError unless a tensor has the value's type."""
        if check and isinstance(value.type, TensorType):
            self._check_result(value, content)
        self.values[value.name] = content
        self.root_of[value.name] = value.name

    def _check_result(self, value: Value, content: Content) -> None:
        type_ = value.tensor_type
        if any(symbol.name not in self.symbols for symbol in type_symbols(type_)):
            return  # the next lines read these symbols from this result
        sizes, strides = self._shape(type_)
        try:
            checks.check_layout(content, value.name, type_.dtype, sizes, strides, type_.device)
        except InputError as error:
            raise FxwrapError(f"a result does not have the type that the program declares: {error}") from None

    def _shape(self, type_: TensorType) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(self._evaluate(type_.sizes)), tuple(self._evaluate(type_.strides))

    def _evaluate(self, operand: Operand) -> Content:
        """Returns the content of an operand: contents of values, values of expressions, lists for tuples."""
        if isinstance(operand, tuple):
            return [self._evaluate(item) for item in operand]
        if isinstance(operand, Value):
            return self.values[operand.name]
        return evaluate(operand, self.symbols) if isinstance(operand, sympy.Basic) else operand

    def _run_lines(self, block: Block) -> None:
        try:
            for line in block.lines:
                self.convert(line)
        finally:
            while self.guards:  # a line raised an error
                self.guards.pop().__exit__(None, None, None)

    def _run_block(self, block: Block, arguments: list[Content]) -> tuple[Content, ...]:
        inner = self._block_interpreter(block, arguments)
        inner._run_lines(block)
        return inner.outputs

    def _block_interpreter(self, block: Block, arguments: list[Content]) -> Self:
        """Returns an interpreter for a nested block, which sees its arguments and the symbols defined so far."""
        inner = type(self)(self.program, self.handlers)
        inner.symbols = dict(self.symbols)
        for value, argument in zip(block.arguments, arguments, strict=True):
            inner.define(value, argument)
            inner.arguments.add(value.name)
        return inner

    def _define_results(self, results: tuple[Result, ...], contents: Sequence[Content], *, check: bool = True) -> None:
        for result, content in zip(results, contents, strict=True):
            if isinstance(result, tuple):
                self._define_results(result, content, check=check)
            elif result is not None:
                self.define(result, content, check=check)

    # --- memory -----------------------------------------------------------------------------------------------------

    def alloc(self, line: lines.Alloc | lines.Pool) -> None:
        self.define(line.result, self._empty(line.result.tensor_type))

    pool = alloc

    def _empty(self, type_: TensorType) -> torch.Tensor:
        if (group := type_.symmetric_group) is not None:
            return symmetric_memory.allocate(*self._shape(type_), type_.dtype, type_.device, group)
        return torch.empty_strided(*self._shape(type_), dtype=type_.dtype, device=type_.device)

    def free(self, line: lines.Free) -> None:
        if self.needs_record_stream(line):
            devices.record_stream(self.values[line.root.name], line.root.tensor_type.device, line.stream)
        for name in [name for name, root in self.root_of.items() if root == line.root.name]:
            del self.values[name], self.root_of[name]

    def reuse(self, line: lines.Reuse) -> None:
        old = self.values[line.root.name]
        self.free(lines.Free(line.root))
        self.define(line.result, self._reinterpret(old, line.result, 0))

    def _reinterpret(self, memory: torch.Tensor, value: Value, offset: int) -> torch.Tensor:
        type_ = value.tensor_type
        return tensors.reinterpret(memory, *self._shape(type_), type_.dtype, offset)

    def _define_view(self, value: Value, base: Value, content: Content) -> None:
        self.define(value, content)
        self.root_of[value.name] = self.root_of[base.name]

    def view(self, line: lines.View) -> None:
        base, type_ = self.values[line.base.name], line.result.tensor_type
        offset = self._evaluate(type_.storage_offset) - self._evaluate(line.base.tensor_type.storage_offset)
        view = torch.as_strided(base, *self._shape(type_), base.storage_offset() + offset)
        self._define_view(line.result, line.base, view)

    def pool_slice(self, line: lines.PoolSlice) -> None:
        memory = self.values[line.pool.name]
        self._define_view(line.result, line.pool, self._reinterpret(memory, line.result, self._evaluate(line.offset)))

    def workspace(self, line: lines.Workspace) -> None:
        self.alloc(lines.Alloc(line.result))
        if line.zeroed:
            self.values[line.result.name].zero_()

    # --- kernels and operators --------------------------------------------------------------------------------------

    def launch(self, line: lines.Launch) -> None:
        kernel = self.program.kernel(line.kernel)
        arguments = self._evaluate(line.arguments)
        pointers = [item for item in arguments if isinstance(item, torch.Tensor)]
        numbers = [item for item in arguments if not isinstance(item, torch.Tensor)]
        launch = load_kernel(kernel.language, kernel.source, kernel.signature, kernel.options)
        launch(tuple(self._evaluate(line.grid)), *pointers, *self._evaluate(line.outs), *numbers)
        written = {self.root_of[value.name] for value in line.outs} & self.arguments
        tensors.increment_versions([self.values[name] for name in sorted(written)])

    def call(self, line: lines.ExternCall | lines.Mutate) -> None:
        keywords = {name: self._evaluate(item) for name, item in line.keywords}
        if isinstance(line, lines.ExternCall) and line.outs:
            keywords |= zip(out_argument_names(line.target), self._evaluate(line.outs), strict=True)
        returned = operator_overload(line.target)(*self._evaluate(line.arguments), **keywords)
        contents = () if not line.results else (returned,) if len(line.results) == 1 else returned
        self._define_results(line.results, contents, check=line.target not in _WRONG_FAKE_DEVICE)
        for value in defined(line):
            base = line.alias_of(value)
            if base is not None:
                self.root_of[value.name] = self.root_of[base.name]

    mutate = call

    def scatter(self, line: lines.Scatter) -> None:
        target, index, source = self._evaluate((line.target, line.index, line.source))
        tensors.scatter(target, line.dim, index, source, line.reduce, line.include_self)

    def index_put(self, line: lines.IndexPut) -> None:
        arguments = self._evaluate((line.target, line.indices, line.values))
        torch.ops.aten.index_put_.default(*arguments, line.accumulate)

    # --- symbols ----------------------------------------------------------------------------------------------------

    def size(self, line: lines.SizeOf) -> None:
        tensor = self.values[line.tensor.name]
        if line.rank:
            checks.check_rank(tensor, line.tensor.name, line.rank)
        if line.of == "storage_offset":
            self.symbols[line.symbol.name] = tensor.storage_offset()
        else:
            self.symbols[line.symbol.name] = (tensor.shape if line.of == "size" else tensor.stride())[line.dim]

    def let(self, line: lines.Let) -> None:
        self.symbols[line.symbol.name] = self._evaluate(line.expr)

    def item(self, line: lines.ReadItem) -> None:
        self.symbols[line.symbol.name] = self.values[line.tensor.name].item()

    def bind(self, line: lines.Bind) -> None:
        content = self.values[line.source.name]
        for step in line.path:
            content = tensors.follow_key_step(content, step.name, *step.arguments)
        self.symbols[line.symbol.name] = content

    def assertion(self, line: lines.Assert) -> None:
        if not self._evaluate(line.condition):
            checks.raise_error(line.error, line.text, self._evaluate(line.shown))

    # --- control ----------------------------------------------------------------------------------------------------

    def cond(self, line: lines.Cond) -> None:
        block = line.then if self._evaluate(line.predicate) else line.else_
        self._define_results(line.results, self._run_block(block, self._evaluate(line.operands)))

    def while_(self, line: lines.While) -> None:
        cond, body = partial(self._run_block, line.cond), partial(self._run_block, line.body)
        carried, extra = self._evaluate(line.carried), self._evaluate(line.extra)
        self._define_results(line.results, control.while_loop(cond, body, carried, extra, line.stacked))

    def scan(self, line: lines.ScanLoop | lines.Map) -> None:
        stacked = [self._empty(value.tensor_type) for value in values_in(line.results[len(line.carried) :])]
        carried, over, extra = self._evaluate((line.carried, line.over, line.extra))
        last = control.scan(partial(self._run_block, line.body), carried, over, extra, stacked, line.reverse)
        self._define_results(line.results, (*last, *stacked))

    map = scan

    def call_function(self, line: lines.CallFunction) -> None:
        outputs = self._run_block(self.functions[line.function], self._evaluate(line.operands))
        self._define_results(line.results, outputs)

    def yield_(self, line: lines.Yield | lines.Return) -> None:
        self.outputs = tuple(self._evaluate(line.values))

    def return_(self, line: lines.Return) -> None:
        arguments = program_arguments(self.program)
        for name in detached_results(self.program.body.lines, arguments):
            self.values[name] = torch.ops.aten.detach.default(self.values[name])
        self.yield_(line)

    # --- devices, randomness, checks and profiling ------------------------------------------------------------------

    def save_state(self, line: lines.SaveRngState) -> None:
        self.define(line.result, tensors.random_state(line.device))

    def restore_state(self, line: lines.RestoreRngState) -> None:
        tensors.set_random_state(line.device, self.values[line.state.name])

    def exchange_state(self, line: lines.ExchangeRngState) -> None:
        tensors.exchange_random_state(line.device, self.values[line.generator.name])

    def enter_device(self, line: lines.EnterDevice) -> None:
        self.guards.append(devices.device_context(line.device, line.stream)())
        self.guards[-1].__enter__()

    def exit_device(self, line: lines.ExitDevice | lines.ExitRange) -> None:
        self.guards.pop().__exit__(None, None, None)

    exit_range = exit_device

    def check_layout(self, line: lines.CheckLayout) -> None:
        type_, tensor, name = line.expected, self.values[line.tensor.name], line.name or line.tensor.name
        checks.check_layout(tensor, name, type_.dtype, *self._shape(type_), type_.device, line.operator)
        checks.check_alignment(tensor, name, line.alignment)

    def comment(self, line: lines.Comment) -> None:
        """Does nothing."""

    def enter_range(self, line: lines.EnterRange) -> None:
        self.guards.append(enter_range(line.name) or nullcontext())

    def record_event(self, line: lines.RecordEvent) -> None:
        self.define(line.result, devices.record_event(torch.device(line.device), line.stream, line.event))

    def wait_event(self, line: lines.WaitEvent) -> None:
        devices.wait_event(self.values.pop(line.event.name), torch.device(line.device), line.stream)

    def start_collective(self, line: lines.StartCollective) -> None:
        outs = dict(zip(out_argument_names(line.operator), self._evaluate(line.outs))) if line.outs else {}
        returned = operator_overload(line.operator)(*self._evaluate(line.arguments), **outs)
        self._define_results(line.results, (returned,) if len(line.results) == 1 else returned)

    def wait_collective(self, line: lines.WaitCollective) -> None:
        wait = operator_overload("_c10d_functional.wait_tensor.default")
        self._define_view(line.result, line.pending, wait(self.values[line.pending.name]))


_CHECKS = (lines.CheckLayout, lines.SizeOf, lines.Let, lines.Assert, lines.Comment)


def check_inputs(program: Program, inputs: Sequence[Content]) -> None:
    """Runs the checks at the start of a program. Raises InputError for the first input that does not match."""
    interpreter = Interpreter(program)
    interpreter.define_inputs(inputs)
    for line in takewhile(lambda line: isinstance(line, _CHECKS), program.body.lines):
        interpreter.convert(line)


def run(program: Program, inputs: Sequence[Content]) -> tuple[Content, ...]:
    """Interprets a program on its flat inputs and returns its flat outputs.

    Raises InputError for inputs that do not match the program, ArgumentError for another object than a program, and the
    errors of the operators.
    """
    check_program("fxwrap.run", program)
    return Interpreter(program).run(list(inputs))


class UntrustedInterpreter(Interpreter):
    """An interpreter that zeroes the memory it allocates, and raises FxwrapError for undeclared aliases.

    So a program reads nothing that was in memory before, and writes no input that it may not write.
    """

    def _empty(self, type_: TensorType) -> torch.Tensor:
        return super()._empty(type_).zero_()

    def call(self, line: ExternCall | Mutate) -> None:
        operands = self._storages(reads(line))
        super().call(line)
        for value in defined(line):
            if line.alias_of(value) is None and not operands.isdisjoint(self._storages([value])):
                raise FxwrapError(
                    f"{line.target} returned memory of an operand as %{value.name}, which owns its memory"
                )

    mutate = call

    def _storages(self, values: Sequence[Value]) -> set[int]:
        contents = [self.values[value.name] for value in values]
        return {storage_identity(item) for item in contents if isinstance(item, torch.Tensor)}
