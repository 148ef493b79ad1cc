"""The scalar operations of the loop IR as C++ operators and functions of `kernel.h`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from fxwrap.loop_ir import INTEGERS, STORAGE_ONLY, Compute
from fxwrap.printers.cpp.index_printer import parenthesize
from fxwrap.printers.cpp.types import CPP_TYPES, PROMOTED_INTEGERS

_INFIX: Final[Mapping[str, str]] = {
    "add": "+", "sub": "-", "mul": "*", "div": "/",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
    "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^",
    "logical_and": "&", "logical_or": "|", "logical_xor": "!=",
}  # fmt: skip

_PREFIX: Final[Mapping[str, str]] = {"neg": "-", "logical_not": "!"}

_INTEGER_FUNCTIONS: Final[Mapping[str, str]] = {
    "floor_divide": "integer_floor_divide", "trunc_divide": "integer_trunc_divide", "remainder": "integer_remainder",
    "fmod": "integer_fmod",
}  # fmt: skip

INLINABLE: Final[frozenset[str]] = frozenset({*_INFIX, *_PREFIX, "cast"})
"""Operations that are readable inside a larger expression."""


def expression(operation: Compute, operands: Sequence[str], dtype: torch.dtype) -> str:
    """Returns an operation's C++ expression. `dtype` is that of its last operand."""
    name = operation.name
    match name:
        case "cast":
            return _cast(operation.dtype, operands[0], dtype)
        case "bitcast":
            return f"bitcast<{CPP_TYPES[operation.dtype]}>({operands[0]})"
        case "where":
            of = "<bool>" if operation.dtype is torch.bool else ""  # C++ gives `a & b` of two bools the type int
            return f"op::where{of}({', '.join(operands)})"
        case "bitwise_not":
            operand = parenthesize(operands[0])
            return f"!{operand}" if dtype is torch.bool else _truncate(f"~{operand}", dtype)
        case _:
            return _format_operator(name, operation.dtype, operands, dtype)


def _cast(result: torch.dtype, operand: str, dtype: torch.dtype) -> str:
    if result is dtype:
        return operand
    narrow = f"to<{CPP_TYPES[dtype]}>("
    is_narrowed = dtype in STORAGE_ONLY and operand.startswith(narrow) and parenthesize(operand) == operand
    if is_narrowed and result is torch.float32:
        return f"rounded<{CPP_TYPES[dtype]}>({operand.removeprefix(narrow)}"
    return f"to<{CPP_TYPES[result]}>({operand})"


def _format_operator(name: str, result: torch.dtype, operands: Sequence[str], dtype: torch.dtype) -> str:
    if name in ("eq", "ne") and dtype in STORAGE_ONLY:
        operands = [f"to<float>({operand})" for operand in operands]
    if name in _INFIX:
        text = f"{parenthesize(operands[0])} {_INFIX[name]} {parenthesize(operands[1])}"
        return _truncate(text, result)
    if name in _PREFIX:
        return _truncate(f"{_PREFIX[name]}{parenthesize(operands[0])}", result)
    function = _INTEGER_FUNCTIONS.get(name, name) if dtype in INTEGERS else name
    return f"op::{function}({', '.join(operands)})"


def _truncate(text: str, dtype: torch.dtype) -> str:
    """Returns the text of integer arithmetic, converted back from C++'s promotion to int."""
    return f"{CPP_TYPES[dtype]}({text})" if dtype in PROMOTED_INTEGERS else text
