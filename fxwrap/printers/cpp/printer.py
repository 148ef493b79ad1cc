"""A kernel of the loop IR as C++ source."""

from __future__ import annotations

import re
from dataclasses import replace

from fxwrap.kernel_names import function_name
from fxwrap.loop_ir import Axis, Buffer, Index, Kernel, Load, Operation, Store, as_index, map_operation
from fxwrap.printers.cpp.body import Writer
from fxwrap.printers.cpp.columns import ColumnPrinter
from fxwrap.printers.cpp.loops import LoopPrinter, PointwisePrinter, RowPrinter
from fxwrap.printers.cpp.plan import Plan, make_plan
from fxwrap.printers.cpp.rewrite import with_plain_reductions
from fxwrap.printers.cpp.scans import ScanPrinter
from fxwrap.printers.cpp.types import CPP_TYPES, NUMBER_TYPES, SIGNATURE_ENTRIES
from fxwrap.printers.printed import PrintedKernel
from fxwrap.symbolic import symbol_kind

INCLUDE = '#include "kernel.h"\n'
"""How every generated kernel begins."""

_RESERVED_WORDS = """
kernel lane lanes tile part start end count offset op combine fxwrap to update bitcast literal infinity nan for_lanes
alignas alignof and asm auto bool break case catch char class const continue default delete do double else enum
explicit export extern false float for friend goto if inline int long mutable namespace new noexcept not operator or
private protected public register return short signed sizeof static struct switch template this throw true try typedef
typename union unsigned using virtual void volatile while xor int8_t int16_t int32_t int64_t uint8_t uint16_t bfloat16
float16
"""
_RESERVED = frozenset(_RESERVED_WORDS.split())


def print_cpp_kernel(kernel: Kernel, name: str = "", origins: bool = True) -> PrintedKernel:
    """Returns a kernel as C++ source. `name` says what it does; `origins` says whether statements carry theirs."""
    kernel = with_plain_reductions(_with_safe_names(kernel))
    writer = Writer()
    _loops(make_plan(kernel), writer, origins).print_kernel()
    numbers = [(NUMBER_TYPES[symbol_kind(symbol.name)], symbol.name) for symbol in kernel.numbers]
    parameters = [
        *[f"const {CPP_TYPES[item.dtype]}* {item.name}" for item in kernel.inputs],
        *[f"{CPP_TYPES[item.dtype]}* {item.name}" for item in kernel.outputs],
        *[f"{types[1]} {text}" for types, text in numbers],
    ]
    head = f'extern "C" void {function_name(name)}({", ".join(parameters)}) {{'
    body = "\n".join(writer.lines)
    includes = INCLUDE + ("#include <cmath>\n#include <limits>\n" if "std::" in body else "")
    signature = (
        *[SIGNATURE_ENTRIES[item.dtype] for item in (*kernel.inputs, *kernel.outputs)],
        *[types[0] for types, _ in numbers],
    )
    return PrintedKernel("cpp", f"{includes}\n{head}\n{body}\n}}\n", signature)


def _loops(plan: Plan, writer: Writer, origins: bool) -> LoopPrinter:
    kernel = plan.kernel
    if not kernel.reduced:
        return PointwisePrinter(plan, writer, origins)
    if not plan.lane_is_reduced:
        return ColumnPrinter(plan, writer, origins)
    return (ScanPrinter if kernel.scans else RowPrinter)(plan, writer, origins)


def _with_safe_names(kernel: Kernel) -> Kernel:
    """Returns the kernel with buffers and axes whose names are C++ identifiers of their own."""
    taken = {str(symbol.name) for symbol in kernel.numbers}
    names: dict[str, str] = {}
    buffers = [item.name for item in (*kernel.inputs, *kernel.outputs)]
    axes = [axis.name for axis in (*kernel.axes, *kernel.reduced)]
    for old in (*buffers, *axes):
        name = re.sub(r"\W", "_", old) or "x"
        name = f"_{name}" if name[0].isdigit() else name
        while name in taken or name in _RESERVED:
            name += "_"
        taken.add(name)
        names[old] = name
    if all(old == new for old, new in names.items()):
        return kernel
    return _renamed(kernel, names)


def _renamed(kernel: Kernel, names: dict[str, str]) -> Kernel:
    axes = {axis: Axis(names[axis.name], axis.size) for axis in (*kernel.axes, *kernel.reduced)}

    def index(old: Index) -> Index:
        return old.substitute({axis: as_index(new) for axis, new in axes.items()})

    def buffer(operation: Operation) -> Operation:
        operation = map_operation(operation, lambda position: position, index)
        return replace(operation, buffer=names[operation.buffer]) if isinstance(operation, Load | Store) else operation

    return Kernel(
        tuple([axes[axis] for axis in kernel.axes]),
        tuple([axes[axis] for axis in kernel.reduced]),
        tuple([Buffer(names[item.name], item.dtype, item.extent) for item in kernel.inputs]),
        tuple([Buffer(names[item.name], item.dtype, item.extent) for item in kernel.outputs]),
        tuple([buffer(operation) for operation in kernel.operations]),
    )
