"""The scalar operations of the loop IR as C++ expressions; what is no operator is a function of `kernel.h`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from fxwrap.loop_ir import INTEGERS, STORAGE_ONLY, Compute
from fxwrap.printers.cpp.index_text import grouped
from fxwrap.printers.cpp.types import CPP_TYPES, NARROW

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

CHEAP: Final[frozenset[str]] = frozenset({*_INFIX, *_PREFIX, "cast"})
"""Operations that may stand inside a larger expression without making it hard to read."""


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
            return f"!{grouped(operands[0])}" if dtype is torch.bool else _narrowed(f"~{grouped(operands[0])}", dtype)
        case _:
            return _by_table(name, operation.dtype, operands, dtype)


def _cast(result: torch.dtype, operand: str, dtype: torch.dtype) -> str:
    if result is dtype:
        return operand
    narrow = f"to<{CPP_TYPES[dtype]}>("
    if dtype in STORAGE_ONLY and result is torch.float32 and operand.startswith(narrow) and grouped(operand) == operand:
        return f"rounded<{CPP_TYPES[dtype]}>({operand.removeprefix(narrow)}"  # narrowed and widened again
    return f"to<{CPP_TYPES[result]}>({operand})"


def _by_table(name: str, result: torch.dtype, operands: Sequence[str], dtype: torch.dtype) -> str:
    if name in ("eq", "ne") and dtype in STORAGE_ONLY:
        operands = [f"to<float>({operand})" for operand in operands]
    if name in _INFIX:
        text = f"{grouped(operands[0])} {_INFIX[name]} {grouped(operands[1])}"
        return _narrowed(text, result)
    if name in _PREFIX:
        return _narrowed(f"{_PREFIX[name]}{grouped(operands[0])}", result)
    function = _INTEGER_FUNCTIONS.get(name, name) if dtype in INTEGERS else name
    return f"op::{function}({', '.join(operands)})"


def _narrowed(text: str, dtype: torch.dtype) -> str:
    """Returns arithmetic that C++ did on int as the narrower type it is of."""
    return f"{CPP_TYPES[dtype]}({text})" if dtype in NARROW else text
