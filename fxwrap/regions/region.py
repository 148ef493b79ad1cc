"""A region: the ATen operators that one kernel computes, and the loop IR of that kernel.

A region is a small program of `extern.call` lines without frees. It returns one tensor for each output of the launch,
which copies each into the memory of its output. The text of a region, the source of a kernel in the language "fx", is
the text of this program, whose header has the kernel's axes, and after it that of the kernel in the loop IR.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fxwrap.errors import ParseError
from fxwrap.lines import ExternCall, Return
from fxwrap.loop_ir import Kernel, parse_kernel
from fxwrap.symbolic import Size, SymbolInfo, TokenStream, print_expr, product, read_size, symbol_kind, total
from fxwrap.torch_compat import DTYPE_NAMES
from fxwrap.wrapper_ir import Block, Input, Ownership, Program, Result, Value, parse_program, print_program, used

Axes = tuple[tuple[str, Size], ...]
"""The names and sizes of axes."""

_NAME = "region"
_LOOP_IR = "\nkernel("
_SCALAR_ENTRIES = {"int": "i64", "float": "f64", "bool": "i1"}


@dataclass(frozen=True)
class Region:
    """The ATen operators of one kernel.

    Fields:
        reads: the tensors that it reads and whose memory the launch does not write.
        overwritten: the outputs whose old content it reads, by position.
        symbols: the names of the symbols that it takes.
        calls: the operators in order. Views are calls too.
        results: the tensors that the launch copies into its outputs, in order.
        index_space: the parallel axes of the kernel.
        reduced: its reduced axes.
        loop_ir: its text in the loop IR; "" for operators that were edited.
    """

    reads: tuple[Value, ...]
    overwritten: Mapping[int, Value]
    symbols: tuple[str, ...]
    calls: tuple[ExternCall, ...]
    results: tuple[Value, ...]
    index_space: Axes = ()
    reduced: Axes = ()
    loop_ir: str = ""

    def __str__(self) -> str:
        return print_program(self._program) + self.loop_ir

    @property
    def _program(self) -> Program:
        header = {"index_space": _print_axes(self.index_space), "reduced": _print_axes(self.reduced)}
        inputs = [Input(value) for value in self.reads]
        inputs += [Input(value, Ownership.MUTABLE) for value in self.overwritten.values()]
        inputs += [Input(SymbolInfo(name)) for name in self.symbols]
        body = Block((), (*self.calls, Return(self.results)))
        return Program(_NAME, tuple(inputs), body, header=tuple([item for item in header.items() if item[1]]))

    @cached_property
    def operators(self) -> tuple[str, ...]:
        """The overload names of the operators, in order."""
        return tuple([call.target for call in self.calls])

    @cached_property
    def kernel(self) -> Kernel | None:
        """The kernel in the loop IR; None for operators that were edited."""
        return parse_kernel(self.loop_ir) if self.loop_ir else None

    @property
    def inputs(self) -> tuple[Value, ...]:
        """All tensors that it reads."""
        return (*self.reads, *self.overwritten.values())

    @property
    def device(self) -> torch.device:
        """The device of its results."""
        return self.results[0].tensor_type.device

    @property
    def bytes_read(self) -> Size:
        """The bytes of the tensors that it reads, each once."""
        return _bytes(self.inputs)

    @property
    def bytes_written(self) -> Size:
        """The bytes of its results."""
        return _bytes(self.results)

    @property
    def signature(self) -> tuple[str, ...]:
        """The entries of a kernel's signature: tensors that are read, outputs, symbols."""
        dtypes = [value.tensor_type.dtype for value in (*self.reads, *self.results)]
        tensors = ["*i1" if dtype is torch.bool else f"*{DTYPE_NAMES[dtype]}" for dtype in dtypes]
        return (*tensors, *[_SCALAR_ENTRIES[symbol_kind(name)] for name in self.symbols])


def _bytes(values: Iterable[Value]) -> Size:
    types = [value.tensor_type for value in values]
    return total([product((*type_.sizes, type_.dtype.itemsize)) for type_ in types])


def without_unused_results(calls: Sequence[ExternCall], results: Sequence[Value]) -> tuple[ExternCall, ...]:
    """Returns calls with unused results of tuples removed."""
    read = {value.name for value in results} | {value.name for call in calls for value in used(call)}

    def used_part(result: Result) -> Result:
        if isinstance(result, tuple):
            return tuple([used_part(item) for item in result])
        return result if result is not None and result.name in read else None

    return tuple([replace(call, results=tuple(map(used_part, call.results))) for call in calls])


# --- text -----------------------------------------------------------------------------------------------------------


def parse_region(text: str) -> Region:
    """Returns the region of a text. Raises ParseError with line and column."""
    operators, mark, loop_ir = text.partition(_LOOP_IR)
    program = parse_program(operators + "\n" if mark else operators, (ExternCall, Return))
    *calls, last = program.body.lines or (None,)
    if not isinstance(last, Return) or not all(isinstance(call, ExternCall) for call in calls):
        raise ParseError("a region is a list of extern.call lines and one control.return", 1, 1)
    tensors = [(item.value, item.ownership) for item in program.inputs if isinstance(item.value, Value)]
    header = dict(program.header)
    return Region(
        tuple([value for value, ownership in tensors if ownership is not Ownership.MUTABLE]),
        {_position(value): value for value, ownership in tensors if ownership is Ownership.MUTABLE},
        tuple([item.name for item in program.inputs if isinstance(item.value, SymbolInfo)]),
        tuple([call for call in calls if isinstance(call, ExternCall)]),
        tuple([item for item in last.values if isinstance(item, Value)]),
        _parse_axes(header.get("index_space", "")),
        _parse_axes(header.get("reduced", "")),
        mark[1:] + loop_ir if mark else "",
    )


def output_name(position: int) -> str:
    """Returns the name of an output whose old content a region reads."""
    return f"out{position}"


def _position(value: Value) -> int:
    position = value.name.removeprefix("out")
    if not position.isdigit():
        raise ParseError(f"a mutable input of a region is an output, %out0 for the first one, not %{value.name}", 1, 1)
    return int(position)


def _print_axes(axes: Axes) -> str:
    return ", ".join([f"{name}: {print_expr(size)}" for name, size in axes])


def _parse_axes(text: str) -> Axes:
    return tuple(_axes(TokenStream(text))) if text else ()


def _axes(stream: TokenStream) -> Iterator[tuple[str, Size]]:
    while True:
        name = stream.expect("name").text
        stream.expect(":")
        yield name, read_size(stream)
        if not stream.accept(","):
            stream.expect("end")
            return
