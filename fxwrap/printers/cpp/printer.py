"""A kernel of the loop IR as C++ source."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from fxwrap.devices.kernel_names import make_function_name
from fxwrap.loop_ir import (
    Axis,
    Index,
    Kernel,
    KernelError,
    Load,
    Operation,
    Store,
    as_index,
    find_streaming_reduction,
    map_operation,
)
from fxwrap.printers.cpp.columns import ColumnPrinter
from fxwrap.printers.cpp.contractions import ContractionPrinter, plan_contraction
from fxwrap.printers.cpp.factor_contractions import FactorContractionPrinter, plan_factors
from fxwrap.printers.cpp.few_columns import FewColumnPrinter, plan_few_columns
from fxwrap.printers.cpp.few_rows_streaming import FewRowsPrinter, has_few_rows
from fxwrap.printers.cpp.flat_rows import flatten_rows
from fxwrap.printers.cpp.gathered_rows import GatheredRowPrinter, gathered_block
from fxwrap.printers.cpp.grouped_columns import plan_grouped_columns
from fxwrap.printers.cpp.loop_plan import LoopPlan, decompose_reductions, make_loop_plan
from fxwrap.printers.cpp.loops import LoopPrinter, PointwisePrinter
from fxwrap.printers.cpp.matrix_contractions import MatrixContractionPrinter, is_matrix_contraction
from fxwrap.printers.cpp.operations import CPP_TYPES, SYMBOL_TYPES
from fxwrap.printers.cpp.row_blocks import RowBlockPrinter, plan_row_blocks
from fxwrap.printers.cpp.rows import RowPrinter
from fxwrap.printers.cpp.scans import RowScanPrinter
from fxwrap.printers.cpp.scatters import ScatterPrinter
from fxwrap.printers.cpp.segments import split_transposed
from fxwrap.printers.cpp.statements import CppSourceWriter
from fxwrap.printers.cpp.streaming import StreamingPrinter
from fxwrap.printers.cpp.transposed_columns import TransposedColumnPrinter, plan_short_columns, plan_transposed_columns
from fxwrap.printers.cpp.transposed_rows import (
    TransposedLoadPrinter,
    TransposedRowPrinter,
    find_columns,
    find_transposed_axis,
    find_transposed_loads,
)
from fxwrap.printers.printed_kernel import SIGNATURE_TYPES, PrintedKernel
from fxwrap.symbolic import symbol_kind

INCLUDE = '#include "kernel.h"\n'
"""The first line of every generated kernel."""

_VECTOR_MATH = '#include "vector_math.h"\n'
_VECTOR_MATH_CALLS = ("op::fmod(", "op::remainder(", "op::floor_divide(")
"""Calls with vector forms that the C library lacks, which only kernels with such calls compile."""

_HALF_BLOCKS = '#include "half_blocks.h"\n'
_HALF_BLOCK_CALLS = ("widen(", "narrow(")
"""Calls that convert blocks of float16."""

_RESERVED_WORDS = """
kernel lane lanes line key keys rows columns run width first i j scores maxima factors next weights tile part start end
count offset block place is_new height op combine part largest total visible fxwrap to update bitcast literal infinity
nan for_lanes for_overlapping_lanes for_lane_block for_blocks for_overlapping_blocks widen narrow repeated zero
alignas alignof and asm auto bool break case catch char class const continue default delete do double else enum
explicit export extern false float for friend goto if inline int long mutable namespace new noexcept not operator or
private protected public register return short signed sizeof static struct switch template this throw true try typedef
typename union unsigned using virtual void volatile while xor int8_t int16_t int32_t int64_t uint8_t uint16_t bfloat16
float16
"""
_RESERVED = frozenset(_RESERVED_WORDS.split())


def print_cpp_kernel(kernel: Kernel, name: str = "", origin_comments: bool = True) -> PrintedKernel:
    """Returns a kernel as C++ source. `name` describes its computation; `origin_comments` prints origins."""
    kernel = decompose_reductions(_sanitize_names(kernel))
    writer = CppSourceWriter()
    function = make_function_name(name)
    _make_loop_printer(make_loop_plan(flatten_rows(kernel)), writer, origin_comments).print_kernel(function)
    symbols = [(SYMBOL_TYPES[symbol_kind(symbol.name)], symbol.name) for symbol in kernel.symbols]
    parameters = [
        *[f"const {CPP_TYPES[item.dtype]}* {item.name}" for item in kernel.inputs],
        *[f"{CPP_TYPES[item.dtype]}* {item.name}" for item in kernel.outputs],
        *[f"{types[1]} {text}" for types, text in symbols],
    ]
    head = f'extern "C" void {function}({", ".join(parameters)}) {{'
    body = "\n".join(writer.lines)
    signature = (
        *[f"*{SIGNATURE_TYPES[item.dtype]}" for item in (*kernel.inputs, *kernel.outputs)],
        *[types[0] for types, _ in symbols],
    )
    headers = ((_VECTOR_MATH, _VECTOR_MATH_CALLS), (_HALF_BLOCKS, _HALF_BLOCK_CALLS))
    includes = INCLUDE + "".join([header for header, calls in headers if any(call in body for call in calls)])
    return PrintedKernel("cpp", f"{includes}\n{head}\n{body}\n}}\n", signature)


def _make_loop_printer(plan: LoopPlan, writer: CppSourceWriter, origin_comments: bool) -> LoopPrinter:
    kernel = plan.kernel
    contraction = plan_contraction(kernel)
    if contraction is not None:
        if is_matrix_contraction(contraction):
            return MatrixContractionPrinter(plan, contraction, writer, origin_comments)
        factors = plan_factors(contraction)
        if factors is not None:
            return FactorContractionPrinter(plan, factors, writer, origin_comments)
        return ContractionPrinter(plan, contraction, writer, origin_comments)
    if plan.serial and not kernel.reduced:
        return ScatterPrinter(plan, writer, origin_comments)
    if not kernel.reduced:
        rows = plan_row_blocks(kernel)
        if rows is not None:
            return RowBlockPrinter(rows, writer, origin_comments)
        columns = plan_short_columns(plan)
        if columns is not None:
            return TransposedColumnPrinter(columns, writer, origin_comments)
        printers = [_make_loop_printer(part, writer, origin_comments) for part in split_transposed(plan)]
        if printers:
            return _PartsPrinter(plan, printers, writer, origin_comments)
        block = gathered_block(plan)
        if block:
            return GatheredRowPrinter(plan, block, writer, origin_comments)
        return PointwisePrinter(plan, writer, origin_comments)
    if kernel.reduces_in_steps:
        parts = find_streaming_reduction(kernel)
        if parts is None:
            raise KernelError("it reduces some of its reduced axes, and is no streaming reduction")
        streaming = FewRowsPrinter if has_few_rows(kernel, parts) else StreamingPrinter
        return streaming(plan, parts, writer, origin_comments)
    grouped = plan_grouped_columns(kernel)
    if grouped is not None:
        return ColumnPrinter(grouped, writer, origin_comments)
    columns = plan_transposed_columns(plan)
    if columns is not None:
        return TransposedColumnPrinter(columns, writer, origin_comments)
    few = plan_few_columns(kernel)
    if few is not None:
        return FewColumnPrinter(few, writer, origin_comments)
    if not plan.vector_axis_is_reduced:
        return ColumnPrinter(plan, writer, origin_comments)
    across = find_transposed_axis(plan)
    if across is not None:
        return TransposedRowPrinter(plan, across, writer, origin_comments)
    loads = find_transposed_loads(plan)
    if loads is not None:
        return TransposedLoadPrinter(plan, loads, writer, origin_comments)
    column = find_columns(plan)
    if column is not None:
        return ColumnPrinter(replace(plan, vector_axis=column), writer, origin_comments)
    return (RowScanPrinter if kernel.scans else RowPrinter)(plan, writer, origin_comments)


class _PartsPrinter(LoopPrinter):
    """A kernel of several parts, each with loops of its own."""

    def __init__(
        self, plan: LoopPlan, parts: Sequence[LoopPrinter], writer: CppSourceWriter, origin_comments: bool
    ) -> None:
        super().__init__(plan, writer, origin_comments)
        self.parts = parts

    def print(self) -> None:
        """Writes the loops of each part."""
        for part in self.parts:
            if part.kernel.stores:
                with self.writer.block(""):
                    part.print()


def _sanitize_names(kernel: Kernel) -> Kernel:
    """Returns the kernel with unique C++ identifiers as the names of buffers and axes."""
    used = {str(symbol.name) for symbol in kernel.symbols}
    names: dict[str, str] = {}
    buffers = [item.name for item in (*kernel.inputs, *kernel.outputs)]
    axes = [axis.name for axis in (*kernel.axes, *kernel.reduced)]
    for old in (*buffers, *axes):
        name = re.sub(r"\W", "_", old) or "x"
        name = f"_{name}" if name[0].isdigit() else name
        while name in used or name in _RESERVED:
            name += "_"
        used.add(name)
        names[old] = name
    if all(old == new for old, new in names.items()):
        return kernel
    return _rename(kernel, names)


def _rename(kernel: Kernel, names: dict[str, str]) -> Kernel:
    axes = {axis: Axis(names[axis.name], axis.size) for axis in (*kernel.axes, *kernel.reduced)}

    def index(old: Index) -> Index:
        return old.substitute({axis: as_index(new) for axis, new in axes.items()})

    def buffer(operation: Operation) -> Operation:
        operation = map_operation(operation, lambda position: position, index)
        return replace(operation, buffer=names[operation.buffer]) if isinstance(operation, Load | Store) else operation

    return Kernel(
        tuple([axes[axis] for axis in kernel.axes]),
        tuple([axes[axis] for axis in kernel.reduced]),
        tuple([replace(item, name=names[item.name]) for item in kernel.inputs]),
        tuple([replace(item, name=names[item.name]) for item in kernel.outputs]),
        tuple([buffer(operation) for operation in kernel.operations]),
    )
