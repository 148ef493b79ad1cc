"""The reference meaning of a program: each line done at once, the slow and obvious way.

Every result is checked against its type, so that metadata that lies is found here and not as wrong numbers elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import sympy
import torch

from fxwrap.converters.base import Converter, Handler
from fxwrap.converters.emitted import kernel_texts
from fxwrap.errors import FxwrapError, InputError
from fxwrap.lines import (
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
from fxwrap.runtime import checks, control, devices, tensors
from fxwrap.runtime.kernels import load_kernel, prepare_kernels
from fxwrap.symbolic import evaluate, symbol_kind
from fxwrap.torch_compat import operator_overload, out_argument_names
from fxwrap.wrapper_ir import Block, Program, TensorType, Value, map_leaves, type_symbols

_MISDESCRIBED = frozenset(
    {
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_cudnn_attention.default",
    }
)
"""Operators whose fake rules put the random seed and offset on the GPU while they come back on the CPU. Nothing but the
operator's own backward reads them, so the lie is harmless."""


class Interpreter(Converter):
    """Runs one call of a program. `symbols` and `values` are what has been defined so far."""

    name = "interpreter"

    def __init__(self, program: Program, handlers: Mapping[type[ExtensionLine], Handler] | None = None) -> None:
        super().__init__(handlers)
        self.program = program
        self.values: dict[str, Any] = {}
        self.symbols: dict[str, int | float | bool] = {}
        self.root_of: dict[str, str] = {}
        self.given: tuple[Any, ...] = ()
        self.guards: list[Any] = []
        self.functions = dict(program.functions)

    def run(self, inputs: list[Any]) -> tuple[Any, ...]:
        """Runs the program on the flat inputs, which it takes out of the list, and returns the flat outputs."""
        checks.check_count(self.program.name, len(self.program.inputs), len(inputs))
        for item, given in zip(self.program.inputs, inputs, strict=True):
            if isinstance(item.value, Value):
                self.define(item.value, given, check=False)
            else:
                checks.check_number(given, item.name, symbol_kind(item.name))
                self.symbols[item.name] = given
        inputs.clear()
        for constant in self.program.constants:
            self.define(constant.value, self.program.store.tensors[constant.value.name])
        prepare_kernels(kernel_texts(self.program))
        with torch.no_grad():
            self._lines(self.program.body)
        return self.given

    # --- values -----------------------------------------------------------------------------------------------------

    def define(self, value: Value, content: Any, *, check: bool = True) -> None:
        """Gives a value its content, and checks that this is what the value's type says."""
        if check and isinstance(value.type, TensorType):
            self._check_result(value, content)
        self.values[value.name] = content
        self.root_of[value.name] = value.name

    def _check_result(self, value: Value, content: Any) -> None:
        """Raises FxwrapError when a result is not what its type says. Unbound symbols are not compared."""
        type_ = value.tensor_type
        if any(symbol.name not in self.symbols for symbol in type_symbols(type_)):
            return  # the lines that follow read these symbols off this very result
        sizes, strides = self._numbers(type_.sizes), self._numbers(type_.strides)
        try:
            checks.check_layout(content, value.name, type_.dtype, sizes, strides, type_.device)
        except InputError as error:
            raise FxwrapError(f"a result is not what the program says: {error}") from None

    def _number(self, size: Any) -> Any:
        return evaluate(size, self.symbols) if isinstance(size, sympy.Basic) else size

    def _numbers(self, sizes: tuple[Any, ...]) -> tuple[int, ...]:
        return tuple([self._number(size) for size in sizes])

    def _literal(self, tree: Any) -> Any:
        """Returns arguments with values and symbols replaced by what they stand for, lists as lists."""
        if type(tree) is tuple:
            return [self._literal(item) for item in tree]
        if type(tree) is Value:
            return self.values[tree.name]
        return self._number(tree)

    def _lines(self, block: Block) -> None:
        try:
            for line in block.lines:
                self.convert(line)
        finally:
            while self.guards:  # only where a line raised
                self.guards.pop().__exit__(None, None, None)

    def _block(self, block: Block, arguments: list[Any]) -> tuple[Any, ...]:
        """Runs a nested block."""
        inner = self._inner(block, arguments)
        inner._lines(block)
        return inner.given

    def _inner(self, block: Block, arguments: list[Any]) -> Interpreter:
        """Returns the scope of a nested block, which sees its arguments and the symbols defined so far."""
        inner = type(self)(self.program, self.handlers)
        inner.symbols = dict(self.symbols)
        for value, given in zip(block.arguments, arguments, strict=True):
            inner.define(value, given)
        return inner

    def _results(self, results: tuple[Any, ...], given: tuple[Any, ...], *, check: bool = True) -> None:
        for result, content in zip(results, given, strict=True):
            if type(result) is tuple:
                self._results(result, tuple(content), check=check)
            elif result is not None:
                self.define(result, content, check=check)

    # --- memory -----------------------------------------------------------------------------------------------------

    def alloc(self, line: Alloc) -> None:
        self.define(line.result, self._empty(line.result.tensor_type))

    def _empty(self, type_: TensorType) -> torch.Tensor:
        sizes, strides = self._numbers(type_.sizes), self._numbers(type_.strides)
        return torch.empty_strided(sizes, strides, dtype=type_.dtype, device=type_.device)

    def free(self, line: Free) -> None:
        if self.waits_for(line):
            devices.record_stream(self.values[line.root.name], line.root.tensor_type.device, line.stream)
        for name in [name for name, root in self.root_of.items() if root == line.root.name]:
            del self.values[name], self.root_of[name]

    def reuse(self, line: Reuse) -> None:
        old = self.values[line.root.name]
        self.free(Free(line.root))
        self.define(line.result, self._reinterpret(old, line.result, 0))

    def _reinterpret(self, memory: torch.Tensor, value: Value, offset: int) -> torch.Tensor:
        type_ = value.tensor_type
        sizes, strides = self._numbers(type_.sizes), self._numbers(type_.strides)
        return tensors.reinterpret(memory, sizes, strides, type_.dtype, offset)

    def _window(self, value: Value, base: Value, content: Any) -> None:
        self.define(value, content)
        self.root_of[value.name] = self.root_of[base.name]

    def view(self, line: View) -> None:
        base, type_ = self.values[line.base.name], line.result.tensor_type
        offset = self._number(type_.storage_offset) - self._number(line.base.tensor_type.storage_offset)
        sizes, strides = self._numbers(type_.sizes), self._numbers(type_.strides)
        self._window(line.result, line.base, torch.as_strided(base, sizes, strides, base.storage_offset() + offset))

    def pool(self, line: Pool) -> None:
        self.alloc(Alloc(line.result))

    def pool_slice(self, line: PoolSlice) -> None:
        memory = self.values[line.pool.name]
        self._window(line.result, line.pool, self._reinterpret(memory, line.result, self._number(line.offset)))

    def workspace(self, line: Workspace) -> None:
        self.alloc(Alloc(line.result))
        if line.zeroed:
            self.values[line.result.name].zero_()

    # --- kernels and operators --------------------------------------------------------------------------------------

    def launch(self, line: Launch) -> None:
        kernel = self.program.kernel(line.kernel)
        arguments = self._literal(line.arguments)
        pointers = [item for item in arguments if isinstance(item, torch.Tensor)]
        numbers = [item for item in arguments if not isinstance(item, torch.Tensor)]
        launch = load_kernel(kernel.language, kernel.source, kernel.signature, kernel.options)
        launch(self._numbers(line.grid), *pointers, *self._literal(line.outs), *numbers)

    def _operator(self, line: Call | Mutate, keywords: dict[str, Any]) -> tuple[Any, ...]:
        operator = operator_overload(line.target)
        given = operator(*self._literal(line.arguments), **keywords)
        return () if not line.results else (given,) if len(line.results) == 1 else tuple(given)

    def call(self, line: Call) -> None:
        keywords = {name: self._literal(item) for name, item in line.keywords}
        names = out_argument_names(line.target) if line.outs else ()
        keywords |= {name: self.values[out.name] for name, out in zip(names, line.outs, strict=True)}
        self._results(line.results, self._operator(line, keywords), check=line.target not in _MISDESCRIBED)
        self._mark_aliases(line)

    def mutate(self, line: Mutate) -> None:
        self._results(line.results, self._operator(line, {name: self._literal(item) for name, item in line.keywords}))
        self._mark_aliases(line)

    def _mark_aliases(self, line: Call | Mutate) -> None:
        def mark(leaf: Any) -> Any:
            base = line.alias_of(leaf) if leaf is not None else None
            if base is not None:
                self.root_of[leaf.name] = self.root_of[base.name]
            return leaf

        map_leaves(line.results, mark)

    def scatter(self, line: Scatter) -> None:
        target, index, source = self.values[line.target.name], self.values[line.index.name], self._literal(line.source)
        tensors.scatter(target, line.dim, index, source, line.reduce, line.include_self)

    def index_put(self, line: IndexPut) -> None:
        indices = [None if index is None else self.values[index.name] for index in line.indices]
        arguments = (self.values[line.target.name], indices, self.values[line.values.name], line.accumulate)
        torch.ops.aten.index_put_.default(*arguments)

    # --- symbols ----------------------------------------------------------------------------------------------------

    def size(self, line: SizeOf) -> None:
        tensor = self.values[line.tensor.name]
        if line.rank:
            checks.check_rank(tensor, line.tensor.name, line.rank)
        if line.of == "storage_offset":
            self.symbols[line.symbol.name] = tensor.storage_offset()
        else:
            self.symbols[line.symbol.name] = (tensor.shape if line.of == "size" else tensor.stride())[line.dim]

    def let(self, line: Let) -> None:
        self.symbols[line.symbol.name] = self._number(line.expr)

    def item(self, line: Item) -> None:
        self.symbols[line.symbol.name] = self.values[line.tensor.name].item()

    def bind(self, line: Bind) -> None:
        found = self.values[line.source.name]
        for step in line.path:
            found = tensors.follow(found, step.name, *step.arguments)
        self.symbols[line.symbol.name] = found

    def assertion(self, line: Assert) -> None:
        if not self._number(line.condition):
            checks.fail(line.error, line.text, None if line.shown is None else self._number(line.shown))

    # --- control ----------------------------------------------------------------------------------------------------

    def cond(self, line: Cond) -> None:
        chosen = line.then if bool(self._literal(line.predicate)) else line.else_
        self._results(line.results, self._block(chosen, self._literal(line.operands)))

    def while_(self, line: While) -> None:
        cond, body = partial(self._block, line.cond), partial(self._block, line.body)
        carried, extra = self._literal(line.carried), self._literal(line.extra)
        self._results(line.results, control.while_loop(cond, body, carried, extra, line.stacked))

    def scan(self, line: Scan) -> None:
        self._over_slices(line, line.carried, line.reverse)

    def map(self, line: Map) -> None:
        self._over_slices(line, (), False)

    def _over_slices(self, line: Scan | Map, carried: tuple[Any, ...], reverse: bool) -> None:
        stacked = [self._empty(value.tensor_type) for value in line.results[len(carried) :]]
        lists = (self._literal(carried), self._literal(line.over), self._literal(line.extra))
        last = control.scan(partial(self._block, line.body), *lists, stacked, reverse)
        self._results(line.results, (*last, *stacked))

    def call_function(self, line: CallFunction) -> None:
        self._results(line.results, self._block(self.functions[line.function], self._literal(line.operands)))

    def yield_(self, line: Yield) -> None:
        self.given = tuple(self._literal(line.values))

    def return_(self, line: Return) -> None:
        self.given = tuple(self._literal(line.values))

    # --- the world --------------------------------------------------------------------------------------------------

    def save_state(self, line: SaveState) -> None:
        self.define(line.result, tensors.random_state(line.device))

    def restore_state(self, line: RestoreState) -> None:
        tensors.set_random_state(line.device, self.values[line.state.name])

    def exchange_state(self, line: ExchangeState) -> None:
        tensors.exchange_random_state(line.device, self.values[line.generator.name])

    def enter_device(self, line: EnterDevice) -> None:
        self.guards.append(devices.on(line.device, line.stream)())
        self.guards[-1].__enter__()

    def exit_device(self, line: ExitDevice) -> None:
        self.guards.pop().__exit__(None, None, None)

    def check_layout(self, line: CheckLayout) -> None:
        type_ = line.expected
        sizes, strides = self._numbers(type_.sizes), self._numbers(type_.strides)
        given = self.values[line.tensor.name]
        name = line.name or line.tensor.name
        checks.check_layout(given, name, type_.dtype, sizes, strides, type_.device)
        checks.check_alignment(given, name, line.alignment)

    def comment(self, line: Comment) -> None:
        """Nothing to do."""

    def enter_range(self, line: EnterRange) -> None:
        self.guards.append(torch.profiler.record_function(line.name))
        self.guards[-1].__enter__()

    def exit_range(self, line: ExitRange) -> None:
        self.guards.pop().__exit__(None, None, None)

    def record_event(self, line: RecordEvent) -> None:
        self.define(line.result, devices.record_event(torch.device(line.device), line.stream, line.event))

    def wait_event(self, line: WaitEvent) -> None:
        devices.wait_event(self.values.pop(line.event.name), torch.device(line.device), line.stream)

    def start_collective(self, line: StartCollective) -> None:
        given = operator_overload(line.operator)(*self._literal(line.arguments))
        self._results(line.results, (given,) if len(line.results) == 1 else tuple(given))

    def wait_collective(self, line: WaitCollective) -> None:
        wait = operator_overload("_c10d_functional.wait_tensor.default")
        self._window(line.result, line.pending, wait(self.values[line.pending.name]))


def run(program: Program, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Runs a program line by line on its flat inputs and returns its flat outputs: the reference meaning.

    Raises InputError for inputs the program was not made for, and whatever an operator raises.
    """
    return Interpreter(program).run(list(inputs))
