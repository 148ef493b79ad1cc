"""Hypothesis strategy for valid programs over ATen that a CPU can run, each with a maker of random inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch

from fxwrap.lines import (
    Alloc,
    Assert,
    Bind,
    CallFunction,
    CheckLayout,
    Comment,
    Cond,
    ExternCall,
    Free,
    Launch,
    Let,
    Map,
    Mutate,
    ReadItem,
    RecordEvent,
    Return,
    Reuse,
    ScanLoop,
    SizeOf,
    View,
    WaitEvent,
    While,
    Yield,
)
from fxwrap.passes.device_guards import insert_device_guards
from fxwrap.symbolic import Number, SymbolInfo, ceiling_divide, make_symbol
from fxwrap.wrapper_ir import (
    Block,
    ConstantStore,
    Input,
    KernelDefinition,
    LineBase,
    OpaqueType,
    Ownership,
    Program,
    ProgramConstant,
    ScalarType,
    Size,
    TensorType,
    Value,
)
from tests.support.samples import random_tensor
from tests.support.strategies.texts import CHARACTERS

_CPU = torch.device("cpu")
_SYMBOL = make_symbol("s0")
_UNARY = ("sin", "tanh", "sigmoid", "neg")
_COMMENTS = st.text(CHARACTERS, max_size=8)
_BINARY = ("add.Tensor", "sub.Tensor", "mul.Tensor", "maximum.default")


@dataclass(frozen=True)
class RandomProgram:
    """A program with the values of its symbols; `inputs(seed)` returns random flat inputs for it."""

    program: Program
    symbols: Mapping[str, Number]

    def inputs(self, seed: int) -> list[Any]:
        """Returns fresh inputs, equal for equal seeds."""
        generator = torch.Generator().manual_seed(seed)
        return [
            self.symbols[item.name]
            if isinstance(item.value, SymbolInfo)
            else random_tensor(item.value.tensor_type, self.symbols, generator)
            for item in self.program.inputs
        ]


def _tensor(*sizes: Size, dtype: torch.dtype = torch.float32) -> TensorType:
    return TensorType.contiguous(dtype, sizes, _CPU)


@dataclass(frozen=True)
class ProgramKernel:
    """A kernel that drawn programs launch over all elements of contiguous float32 tensors of one type.

    Its parameters are `reads` tensors, one that it writes, and the number of elements. With `in_place` it reads the
    tensor that it writes.
    """

    definition: KernelDefinition
    reads: int
    block: int = 0  # elements of one program of the grid; 0 for a grid of one

    @property
    def in_place(self) -> bool:
        """Whether the kernel changes a tensor."""
        return not self.reads

    def grid(self, count: Size) -> tuple[Size, ...]:
        """Returns the grid for a number of elements."""
        return (ceiling_divide(count, self.block), 1, 1) if self.block else (1, 1, 1)


class _Builder:
    """The lines of one block while it grows: what can be read, what may be written, and what must be released.

    Results of operators come from dense operands alone, so that their strides are known; other windows are operands of
    out= calls, matrix products and mutations.
    """

    def __init__(self, draw: st.DrawFn, names: list[int], kernels: Sequence[ProgramKernel] = ()) -> None:
        self.draw = draw
        self.kernels = kernels
        self.names = names  # the next free number, shared by all blocks of a program
        self.lines: list[LineBase] = []
        self.readable: list[Value] = []
        self.root_of: dict[str, Value] = {}
        self.owned: list[Value] = []
        self.writable: set[str] = set()  # roots
        self.constants: tuple[Value, ...] = ()  # which every block inside gets as its last arguments
        self.others: list[Value] = []  # results that are no matrices
        self.may_call = True

    def value(self, type_: TensorType, base: Value | None = None) -> Value:
        """Makes a value: a readable window on `base`, or a readable root of its own that the block owns."""
        value = self.unwritten(type_)
        if base is not None:
            self.owned.remove(value)
            self.writable.discard(value.name)
            self.root_of[value.name] = self.root_of[base.name]
        self.readable.append(value)
        return value

    def unwritten(self, type_: TensorType) -> Value:
        """Makes a root that nothing has written yet."""
        self.names[0] += 1
        value = Value(f"v{self.names[0]}", type_)
        self.root_of[value.name] = value
        self.owned.append(value)
        self.writable.add(value.name)
        return value

    def borrow(self, type_: TensorType, *, mutable: bool = False) -> Value:
        """Makes an input or an argument of a block."""
        value = self.value(type_)
        self.owned.remove(value)
        if not mutable:
            self.writable.discard(value.name)
        return value

    def pick(self, *, dense: bool = False) -> Value:
        """Draws a readable float value; with `dense`, one in row-major order."""
        return self.draw(
            st.sampled_from([value for value in self.readable if not dense or value.tensor_type.is_contiguous])
        )

    def release(self, root: Value) -> None:
        """Forgets a root that a line consumes, and all windows on it."""
        self.owned.remove(root)
        self.readable = [value for value in self.readable if self.root_of[value.name] != root]
        self.others = [value for value in self.others if self.root_of[value.name] != root]

    # --- steps ------------------------------------------------------------------------------------------------------

    def unary(self) -> None:
        operand = self.pick(dense=True)
        result = self.value(_tensor(*operand.tensor_type.sizes))
        self.lines.append(ExternCall((result,), f"aten.{self.draw(st.sampled_from(_UNARY))}.default", (operand,)))

    def binary(self) -> None:
        first = self.pick(dense=True)
        alike = [value for value in self.readable if value.type == first.type]
        arguments = (first, self.draw(st.sampled_from(alike)))
        result = self.value(_tensor(*first.tensor_type.sizes))
        self.lines.append(ExternCall((result,), f"aten.{self.draw(st.sampled_from(_BINARY))}", arguments))

    def matmul(self) -> None:
        operand = self.pick()
        other = self.value(_transposed(operand.tensor_type), operand)
        self.lines.append(View(other, operand))
        rows = operand.tensor_type.sizes[0]
        result = self.value(_tensor(rows, rows))
        self.lines.append(ExternCall((result,), "aten.mm.default", (operand, other)))

    def transpose(self) -> None:
        base = self.pick()
        result = self.value(_transposed(base.tensor_type), base)
        self.lines.append(View(result, base))

    def slice_rows(self) -> None:
        base = self.pick()
        type_ = base.tensor_type
        start = self.draw(st.integers(0, 1))
        sizes = (type_.sizes[0] - start, type_.sizes[1])
        offset = type_.storage_offset + start * type_.strides[0]
        sliced = TensorType(type_.dtype, sizes, type_.strides, _CPU, offset)
        # A slice keeps at least one row, since every size is two or more when it starts.
        if all(not isinstance(size, int) or size > 1 for size in sizes) and _SYMBOL not in _free_symbols(sizes):
            self.lines.append(View(self.value(sliced, base), base))

    def fill_allocation(self) -> None:
        operand = self.pick()
        result = self.unwritten(_tensor(*operand.tensor_type.sizes))
        self.lines.append(Alloc(result))
        self._write_into(result, operand)

    def fill_reused_memory(self) -> None:
        roots = [root for root in self.owned if root.tensor_type.dtype == torch.float32]
        operand = self.pick()
        fitting = [
            root
            for root in roots
            if root.tensor_type.element_count == operand.tensor_type.element_count
            and self.root_of[operand.name] != root
        ]
        if fitting:
            root = self.draw(st.sampled_from(fitting))
            self.release(root)
            result = self.unwritten(_tensor(*operand.tensor_type.sizes))
            self.lines.append(Reuse(result, root))
            self._write_into(result, operand)

    def _write_into(self, result: Value, operand: Value) -> None:
        self.lines.append(ExternCall((), f"aten.{self.draw(st.sampled_from(_UNARY))}.out", (operand,), outs=(result,)))
        self.readable.append(result)

    def mutate(self) -> None:
        targets = [value for value in self.readable if self.root_of[value.name].name in self.writable]
        if targets:
            value = self.draw(st.sampled_from(targets))
            factor = self.draw(st.sampled_from([0.5, -1.0, 2]))
            self.lines.append(Mutate((), "aten.mul_.Scalar", (value, factor), (value,)))

    def launch(self) -> None:
        """Launches a kernel into new memory, or on memory that may be written."""
        if not self.kernels:
            return
        kernel = self.draw(st.sampled_from(self.kernels))
        if kernel.in_place:
            writable = [value for value in self.readable if self.root_of[value.name].name in self.writable]
            types = {value.name: value.tensor_type for value in writable}
            targets = [
                value for value in writable if types[value.name].is_contiguous and not types[value.name].storage_offset
            ]
            if not targets:
                return
            operands, result = [], self.draw(st.sampled_from(targets))
        else:
            first = self.pick(dense=True)
            alike = [value for value in self.readable if value.type == first.type]
            operands = [first, *[self.draw(st.sampled_from(alike)) for _ in range(kernel.reads - 1)]]
            result = self.unwritten(_tensor(*first.tensor_type.sizes))
            self.lines.append(Alloc(result))
            self.readable.append(result)
        count = result.tensor_type.element_count
        arguments = (*operands, count)
        self.lines.append(Launch(kernel.definition.name, arguments, (result,), kernel.grid(count)))

    def side_stream(self) -> None:
        """Computes on another stream, between events that order its work with that of the current one."""
        operand = self.pick(dense=True)
        stream = self.draw(st.integers(1, 2))
        begun, done = self._event(), self._event()
        result = self.value(_tensor(*operand.tensor_type.sizes))
        target = f"aten.{self.draw(st.sampled_from(_UNARY))}.default"
        self.lines += [
            RecordEvent(begun, "cpu"),
            WaitEvent(begun, "cpu", stream),
            ExternCall((result,), target, (operand,), stream=stream),
            RecordEvent(done, "cpu", stream),
            WaitEvent(done, "cpu"),
        ]

    def _event(self) -> Value:
        self.names[0] += 1
        return Value(f"v{self.names[0]}", OpaqueType("Event"))

    def two_results(self) -> None:
        operand = self.pick(dense=True)
        rows = operand.tensor_type.sizes[0]
        best = self.value(_tensor(rows, 1))
        where = self.unwritten(_tensor(rows, 1, dtype=torch.int64))
        self.lines.append(ExternCall((best, where), "aten.max.dim", (operand, 1), (("keepdim", True),)))

    def free(self) -> None:
        if len(self.owned) > 1:
            root = self.draw(st.sampled_from(self.owned))
            self.lines.append(Free(root))
            self.release(root)

    def note(self) -> None:
        self.lines.append(Comment(self.draw(_COMMENTS)))

    def read_number(self) -> None:
        """Multiplies by a number read from a tensor, a symbol that this block defines."""
        operand = self.pick(dense=True)
        place = self.unwritten(_tensor(dtype=torch.int64))
        self.lines.append(ExternCall((place,), "aten.argmax.default", (operand,)))
        number = self.symbol()
        self.lines.append(ReadItem(SymbolInfo(number.name, 0), place))
        result = self.value(_tensor(*operand.tensor_type.sizes))
        self.lines.append(ExternCall((result,), "aten.mul.Scalar", (operand, number + self.draw(st.integers(-2, 2)))))

    def symbol(self) -> Any:
        """Returns a symbol that nothing has used yet."""
        self.names[0] += 1
        return make_symbol(f"u{self.names[0]}")

    # --- blocks -----------------------------------------------------------------------------------------------------

    def condition(self) -> None:
        operand = self.pick(dense=True)
        predicate = self.draw(st.integers(2, 7)) < _SYMBOL
        then, otherwise = (self._nested(operand.tensor_type) for _ in range(2))
        result = self.value(_tensor(*operand.tensor_type.sizes))
        self.lines.append(Cond((result,), predicate, (operand, *self.constants), then, otherwise))

    def loop(self) -> None:
        """Carries a number and a tensor for up to three rounds; the number is a symbol in each block."""
        operand, rounds = self.pick(dense=True), self.draw(st.integers(0, 3))
        type_ = _tensor(*operand.tensor_type.sizes)
        start = self.draw(st.integers(0, 1))
        seen = self._inner()
        number, counted = seen._number(), seen.lines
        looked_at = (number, *seen.take((type_, *self._constant_types())))
        cond = Block(looked_at, (*counted, Yield((seen.number_symbol < start + rounds,))))
        inner = self._inner()
        carried = inner._number()
        arguments = (carried, *inner.take((type_, *self._constant_types())))
        inner.grow(_BLOCK_STEPS, 3)
        body = inner.block(arguments, type_, (inner.number_symbol + 1,))
        last = self._unbound()
        result = self.value(type_)
        self.lines.append(While((last, result), (start, operand), cond, body, self.constants))
        self.lines.append(Bind(SymbolInfo(self.symbol().name, 0), last, ()))

    def slices(self) -> None:
        """Scans over the rows of a matrix, carrying another one, or maps over them."""
        over = self.pick()
        rows, columns = over.tensor_type.sizes
        fitting = [value for value in self.readable if value.tensor_type.is_contiguous
                   and value.tensor_type.sizes[1] == columns]  # fmt: skip
        if not fitting:
            return
        start = self.draw(st.sampled_from(fitting))
        type_ = _tensor(*start.tensor_type.sizes)
        row = TensorType(torch.float32, (columns,), over.tensor_type.strides[1:], _CPU)
        inner = self._inner()
        carried, *others = inner.take((type_, *self._constant_types()))
        inner.names[0] += 1
        slice_ = Value(f"v{inner.names[0]}", row)
        total = inner.value(type_)
        inner.lines.append(ExternCall((total,), "aten.add.Tensor", (carried, slice_)))
        inner.grow(_BLOCK_STEPS, 2)
        best = inner.unwritten(_tensor())
        inner.lines.append(ExternCall((best,), "aten.amax.default", (inner.pick(),)))
        stacked = self.unwritten(_tensor(rows))
        if self.draw(st.booleans()):
            body = inner.block((carried, slice_, *others), type_, (), (best,))
            result = self.value(type_)
            self.lines.append(
                ScanLoop((result, stacked), (start,), (over,), body, self.constants, self.draw(st.booleans()))
            )
        else:
            lines = [*inner.lines, *[Free(root) for root in inner.owned if root != best], Yield((best,))]
            body = Block((slice_, carried, *others), tuple(lines))
            self.lines.append(Map((stacked,), (over,), body, (start, *self.constants)))
        self.others.append(stacked)

    def call_shared(self) -> None:
        """Calls the program's function, which takes and returns a matrix of four rows and three columns."""
        fitting = [value for value in self.readable if value.type == _SHARED]
        if fitting and self.may_call:
            operand = self.draw(st.sampled_from(fitting))
            self.lines.append(CallFunction((self.value(_SHARED),), "shared", (operand, *self.constants)))

    def _inner(self) -> _Builder:
        inner = _Builder(self.draw, self.names, self.kernels)
        inner.may_call = self.may_call
        return inner

    def _number(self) -> Value:
        """Returns an argument that is a number, bound to `number_symbol`."""
        value = self._unbound()
        self.number_symbol = self.symbol()
        self.lines.append(Bind(SymbolInfo(self.number_symbol.name, 0), value, ()))
        return value

    def _unbound(self) -> Value:
        self.names[0] += 1
        return Value(f"v{self.names[0]}", ScalarType("int"))

    def _constant_types(self) -> tuple[TensorType, ...]:
        return tuple([value.tensor_type for value in self.constants])

    def take(self, types: tuple[TensorType, ...]) -> tuple[Value, ...]:
        """Makes the arguments of a block: one operand, then the constants that blocks inside get too."""
        arguments = tuple([self.borrow(type_) for type_ in types])
        self.constants = arguments[1:]
        return arguments

    def block(
        self,
        arguments: tuple[Value, ...],
        type_: TensorType,
        before: tuple[Any, ...] = (),
        after: tuple[Value, ...] = (),
    ) -> Block:
        """Returns what has grown as a block, which yields numbers, a tensor of a type, then other roots."""
        alike = [value for value in self.readable if value.type == type_]
        result = self.value(type_)
        self.lines.append(ExternCall((result,), "aten.tanh.default", (self.draw(st.sampled_from(alike)),)))
        yielded = (result, *after)
        self.lines.extend(Free(root) for root in self.owned if root not in yielded)
        return Block(arguments, (*self.lines, Yield((*before, *yielded))))

    def _nested(self, type_: TensorType) -> Block:
        inner = self._inner()
        arguments = inner.take((_tensor(*type_.sizes), *self._constant_types()))
        inner.grow((*_BLOCK_STEPS, *_WITH_BLOCKS), 3)
        return inner.block(arguments, arguments[0].tensor_type)

    def grow(self, steps: tuple[str, ...], most: int) -> None:
        """Adds up to `most` steps, drawn by name."""
        for step in self.draw(st.lists(st.sampled_from(steps), max_size=most)):
            getattr(self, step)()


_BLOCK_STEPS = (
    "unary", "binary", "matmul", "transpose", "slice_rows", "fill_allocation", "fill_reused_memory", "mutate",
    "two_results", "free", "note", "read_number", "launch",
)  # fmt: skip
_STREAM_STEPS = ("side_stream", "side_stream")
_WITH_BLOCKS = ("condition", "loop", "slices", "call_shared")
_SHARED = TensorType.contiguous(torch.float32, (4, 3), _CPU)


def _free_symbols(sizes: tuple[Size, ...]) -> set[Any]:
    return {symbol for size in sizes if not isinstance(size, int) for symbol in size.free_symbols}


def _transposed(type_: TensorType) -> TensorType:
    return TensorType(type_.dtype, type_.sizes[::-1], type_.strides[::-1], _CPU, type_.storage_offset)


@st.composite
def random_programs(
    draw: st.DrawFn, most_steps: int = 12, kernels: Sequence[ProgramKernel] = (), streams: bool = False
) -> RandomProgram:
    """Draws a valid program over matrices: calls, views, mutation, reuse, frees, symbols, branches and loops.

    It launches some of `kernels`. With `streams`, it may have work on other streams, for a device that has them.
    """
    builder = _Builder(draw, [0], kernels)
    inputs = [Input(builder.borrow(_tensor(_SYMBOL, 4)), Ownership.BORROWED)]
    inputs.append(Input(builder.borrow(_SHARED, mutable=True), Ownership.MUTABLE))
    if draw(st.booleans()):
        inputs.append(Input(builder.value(_SHARED), Ownership.OWNED))
    constants = (builder.borrow(_SHARED),) if draw(st.booleans()) else ()
    builder.constants = constants
    builder.may_call = False  # a function calls no function
    shared = builder._nested(_SHARED)
    builder.may_call = True
    symbolic = inputs[0].value
    assert isinstance(symbolic, Value)
    hint = draw(st.integers(2, 8))
    builder.lines.append(SizeOf(SymbolInfo("s0", 2, 8, hint), symbolic, 0))
    if draw(st.booleans()):
        builder.lines.extend(CheckLayout(item.value, item.value.tensor_type, item.name) for item in inputs)
        builder.lines.append(Assert(_SYMBOL >= 2, "at least two rows"))
    builder.lines.append(Let(SymbolInfo("n0"), 3 * _SYMBOL + draw(st.integers(-4, 4))))
    builder.grow((*_BLOCK_STEPS, *_WITH_BLOCKS, *(_STREAM_STEPS if streams else ())), most_steps)
    outputs = draw(st.lists(st.sampled_from([*builder.readable, *builder.others]), max_size=4))
    returned = {builder.root_of[value.name] for value in outputs}
    builder.lines.extend(Free(root) for root in builder.owned if root not in returned)
    builder.lines.append(Return((*outputs, make_symbol("n0"), None)))
    payloads = {value.name: torch.linspace(-1, 1, 12).reshape(4, 3) for value in constants}
    program = Program(
        "random",
        tuple(inputs),
        Block((), tuple(builder.lines)),
        tuple([ProgramConstant(value) for value in constants]),
        kernels=tuple([kernel.definition for kernel in kernels]),
        functions=(("shared", shared),),
        store=ConstantStore(payloads),
    )
    program = insert_device_guards(program)
    return RandomProgram(program, {"s0": hint})
