"""Run-time checks of the results of operators from outside torch, whose types a fake implementation determined.

Emitted code reads a result by the sizes, strides and dtype of its type. Nothing else notices that a function passed to
`torch.library.register_fake` differs from the operator.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxwrap import wrapper_ir as ir
from fxwrap.lines import CheckLayout, ExternCall, Mutate
from fxwrap.torch_compat import is_torch_operator

_CALL_METHOD = "fxwrap_runtime.call_method.default"
"""The call of a script object's method, of which the user's fake class has a fake implementation."""


def check_results(program: ir.Program) -> ir.Program:
    """Returns the program with a check after each call of an operator from outside torch, for each result.

    Checks follow the lines that define the symbols of the results' types. In a function that a device captures it runs
    when the operator does: at the capture. Linear in the number of lines; returns the same object without such calls.
    """
    if not any(_is_checked(line) for line in program.lines()):
        return program
    functions = tuple([(name, _checked(block)) for name, block in program.functions])
    return program.replace(body=_checked(program.body), functions=functions)


def _checked(block: ir.Block) -> ir.Block:
    undefined = [symbol.name for line in block.lines if (symbol := ir.defined_symbol(line)) is not None]
    lines: list[ir.LineBase] = []
    pending: list[CheckLayout] = []
    for line in block.lines:
        inner = {name: _checked(nested) for name, nested in ir.blocks(line)}
        consumed = {value.name for value in ir.consumed(line)}
        pending = [check for check in pending if check.tensor.name not in consumed]
        lines.append(line.replace(**inner) if inner else line)
        symbol = ir.defined_symbol(line)
        if symbol is not None:
            undefined.remove(symbol.name)
        pending += _checks(line)
        if frozenset(undefined).isdisjoint([name for check in pending for name in _symbols(check)]):
            lines += pending
            pending = []
    return ir.Block(block.arguments, tuple(lines))


def _is_checked(line: ir.LineBase) -> bool:
    if not isinstance(line, ExternCall | Mutate) or not line.results:
        return False
    return line.target == _CALL_METHOD or not is_torch_operator(line.target)


def _checks(line: ir.LineBase) -> Iterator[CheckLayout]:
    """Yields the checks of a call's results. Sparse tensors have no strides."""
    if not isinstance(line, ExternCall | Mutate) or not _is_checked(line):
        return
    for value in ir.defined(line):
        if isinstance(value.type, ir.TensorType) and not value.type.layout:
            yield CheckLayout(value, value.type, value.name, operator=line.target, origin=line.origin)


def _symbols(check: CheckLayout) -> list[str]:
    type_ = check.expected
    return [
        symbol.name for symbol in ir.type_symbols(ir.TensorType(type_.dtype, type_.sizes, type_.strides, type_.device))
    ]
