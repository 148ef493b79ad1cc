"""Allocations and launches of kernels that are built as a whole, from a call with several results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy
import torch
from torch.fx import Node

from fxwrap.devices import DeviceSpec
from fxwrap.errors import ExpressionError, FxwrapError
from fxwrap.lines import Alloc, Launch
from fxwrap.loop_ir import Kernel, hoist_expressions
from fxwrap.lowering.builder import Builder, LoweringRequest
from fxwrap.lowering.symbols.table import ProgramSymbols, kernel_size_hints, substitute_formulas
from fxwrap.printers import KernelRequest, PrintedKernel
from fxwrap.regions import Region
from fxwrap.symbolic import Number, bounds, evaluate
from fxwrap.wrapper_ir import KernelDefinition, Value


class KernelDeclined(FxwrapError):
    """A kernel that cannot be generated; `nodes` are the graph's nodes that it computes, `reason` says why.

    `expected` means that one kernel cannot compute these nodes, and that other lines are the intended fallback.
    `unfused` are matmuls for which a kernel has a schedule if it does not compute their operands too.
    """

    def __init__(
        self, nodes: frozenset[str], reason: str, expected: bool = False, unfused: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(f"the kernel for {', '.join(sorted(nodes | unfused))} cannot be generated: {reason}")
        self.nodes = nodes
        self.reason = reason
        self.expected = expected
        self.unfused = unfused


def emit_whole_kernel(
    builder: Builder,
    request: LoweringRequest,
    node: Node,
    name: str,
    kernel: Kernel,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    updated: Sequence[Value] = (),
) -> None:
    """Emits the allocations of a node's results and the launch of the kernel that computes them.

    `updated` are allocated results after the outputs that the kernel updates.

    Raises FxwrapError for a kernel that its language cannot express.
    """
    kernel, formulas = hoist_expressions(kernel)
    written = (*outputs, *updated)
    device = written[0].tensor_type.device
    language, spec = request.options.text_language(device.type), request.options.device_specs()[device.type]
    asked = kernel_request(builder.state.symbols, kernel, formulas, language, device, spec, name)
    printed = request.print_kernel(asked)
    definition = define_kernel(name, printed, kernel)
    for value in outputs:
        builder.emit(Alloc(value, origin=builder.origin(node)))
    symbols = [formulas.get(symbol, symbol) for symbol in kernel.symbols]
    grid = tuple([substitute_formulas(size, formulas) for size in printed.grid])
    launched = builder.state.kernels.add(definition)
    builder.emit(Launch(launched, (*inputs, *symbols), written, grid, origin=builder.origin(node)))


def kernel_request(
    symbols: ProgramSymbols,
    kernel: Kernel,
    formulas: Mapping[sympy.Symbol, sympy.Basic],
    language: str,
    device: torch.device,
    spec: DeviceSpec,
    name: str = "",
    region: Region | None = None,
    is_matmul: bool = False,
) -> KernelRequest:
    """Returns the request to print a kernel whose compound sizes are symbols of `formulas`."""
    limits, hint = symbol_limits(symbols, formulas), kernel_size_hints(symbols, kernel, formulas)
    numbers = _typical_numbers(symbols, kernel, formulas)
    return KernelRequest(kernel, language, device, spec, hint, limits, name, region, is_matmul, numbers)


def _typical_numbers(
    symbols: ProgramSymbols, kernel: Kernel, formulas: Mapping[sympy.Symbol, sympy.Basic]
) -> tuple[Number, ...] | None:
    """Returns the values of a kernel's symbols for which the graph was traced, None if one has no hint."""
    values = {name: info.hint for name, info in symbols.infos.items() if info.hint is not None}
    try:
        return tuple([evaluate(formulas.get(symbol, symbol), values) for symbol in kernel.symbols])
    except (ExpressionError, ArithmeticError, ValueError):
        return None


def define_kernel(name: str, printed: PrintedKernel, kernel: Kernel) -> KernelDefinition:
    """Returns the definition of a printed kernel."""
    return KernelDefinition(
        name, printed.language, printed.source, printed.signature, printed.options, printed.scheduled, kernel
    )


def symbol_limits(symbols: ProgramSymbols, formulas: Mapping[sympy.Symbol, sympy.Basic]) -> dict[str, int]:
    """Returns upper bounds of integers that are not negative by name; within a kernel, some are formulas."""
    ranges = {name: (info.lower, info.upper) for name, info in symbols.infos.items()}
    ranges |= {symbol.name: bounds(formula, symbols.infos) for symbol, formula in formulas.items()}
    return {
        name: upper for name, (lower, upper) in ranges.items()
        if isinstance(lower, int) and lower >= 0 and isinstance(upper, int)
    }  # fmt: skip
