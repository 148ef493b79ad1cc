"""The scalar operations of the loop IR as C++ operators and functions of `kernel.h`."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from typing_extensions import assert_never

from fxwrap.loop_ir import (
    INTEGERS,
    STORAGE_ONLY,
    Atom,
    Axis,
    Compute,
    FloorDivide,
    Index,
    IndirectIndex,
    Kernel,
    Modulo,
    SizeAtom,
    float8_format,
    operation_dtype,
)
from fxwrap.symbolic import CppPrinter, Size

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


_E4M3FN = float8_format(torch.float8_e4m3fn)
_SATURATES = _E4M3FN.overflow == _E4M3FN.largest  # the text of a kernel says how torch rounded when it was compiled

CPP_TYPES: Final[Mapping[torch.dtype, str]] = {
    torch.float32: "float", torch.float64: "double", torch.bfloat16: "bfloat16", torch.float16: "float16",
    torch.bool: "bool", torch.int8: "int8_t", torch.int16: "int16_t", torch.int32: "int32_t", torch.int64: "int64_t",
    torch.uint8: "uint8_t", torch.float8_e5m2: "float8_e5m2", torch.float8_e4m3fnuz: "float8_e4m3fnuz",
    torch.float8_e5m2fnuz: "float8_e5m2fnuz",
    torch.float8_e4m3fn: "float8_e4m3fn" if _SATURATES else "float8_e4m3fn_nan",
}  # fmt: skip

SYMBOL_TYPES: Final[Mapping[str, tuple[str, str]]] = {
    "int": ("i64", "int64_t"), "float": ("f64", "double"), "bool": ("bool", "bool"),
}  # fmt: skip
"""The type of a symbol in a kernel's signature and in C++, by its kind."""

PROMOTED_INTEGERS: Final[frozenset[torch.dtype]] = frozenset({torch.int8, torch.int16, torch.uint8})
"""Integers that C++ promotes to int in arithmetic, so that results are narrowed again."""


def literal(value: float | int | bool, dtype: torch.dtype) -> str:
    """Returns a number as a C++ expression of the dtype's C++ type."""
    match dtype:
        case torch.bool:
            return "true" if value else "false"
        case torch.float32 | torch.float64:
            return _float_literal(float(value), dtype)
        case _ if dtype in STORAGE_ONLY:
            return f"to<{CPP_TYPES[dtype]}>({_float_literal(float(value), torch.float32)})"
        case torch.int32:
            return str(int(value)) if value != -(2**31) else "INT32_MIN"
        case _:
            text = str(int(value)) if value != -(2**63) else "INT64_MIN"
            return f"{CPP_TYPES[dtype]}({text})"


def _float_literal(value: float, dtype: torch.dtype) -> str:
    single = dtype is torch.float32
    if math.isnan(value) or math.isinf(value):
        text = "nan" if math.isnan(value) else "infinity" if value > 0 else "-infinity"
        return f"float({text})" if single else text
    text = _shortest_float32(value) if single else repr(value)
    if "." not in text and "e" not in text:
        text += ".0"
    return f"{text}f" if single else text


def _shortest_float32(value: float) -> str:
    exact = struct.pack("f", value)
    texts = [f"{value:.{digits}g}" for digits in (6, 7, 8, 9)]
    return next(text for text in texts if struct.pack("f", float(text)) == exact)


_NAME_OR_NUMBER = re.compile(r"[\d.]+e-\d+f?|[\w:.]*(<[\w, ]*>)?")


def parenthesize(text: str) -> str:
    """Returns an expression in parentheses unless it is a name, a number, an element or a call."""
    rest = text[_NAME_OR_NUMBER.match(text).end() :]  # type: ignore[union-attr]
    while rest and rest[0] in "([":
        depth = 0
        for position, letter in enumerate(rest):
            depth += (letter in "([") - (letter in ")]")
            if depth == 0:
                rest = rest[position + 1 :]
                break
    return f"({text})" if rest else text


def print_size(size: Size) -> str:
    """Returns a size as a C++ expression of type int64_t over the kernel's scalar parameters."""
    return str(size) if isinstance(size, int) else CppPrinter().print(size)


@dataclass(frozen=True, slots=True)
class CppIndexPrinter:
    """Prints indices. `value_of` returns the text of the operation that an indirect index names."""

    value_of: Callable[[int], str]

    def __call__(self, index: Index) -> str:
        """Returns the index as a C++ expression of type int64_t."""
        text = ""
        for monomial, coefficient in sorted(index.terms, key=lambda term: (not term[0], -abs(term[1]))):
            factors = [self._atom(atom) for atom in monomial]
            if not factors or abs(coefficient) != 1:
                factors.insert(0, str(abs(coefficient)))
            sign = "-" if coefficient < 0 else "+"
            term = " * ".join(factors)
            text = f"{text} {sign} {term}" if text else (f"-{term}" if sign == "-" else term)
        return text or "0"

    def _atom(self, atom: Atom) -> str:
        match atom:
            case Axis():
                return atom.name
            case SizeAtom():
                return parenthesize(print_size(atom.expression))
            case IndirectIndex():
                return parenthesize(self.value_of(atom.operation))
            case FloorDivide():
                return self._division("/", "fxwrap::floordiv", atom)
            case Modulo():
                return self._division("%", "fxwrap::mod", atom)
            case _:
                assert_never(atom)

    def _division(self, sign: str, function: str, atom: FloorDivide | Modulo) -> str:
        base, divisor = self(atom.base), self(atom.divisor)
        if atom.base.is_nonnegative():
            return f"({parenthesize(base)} {sign} {parenthesize(divisor)})"
        return f"{function}({base}, {divisor})"


def compared_width(kernel: Kernel, position: int) -> int:
    """Returns the width in bytes of the widest numbers that a truth value compares, 1 for one that is loaded."""
    item, width = kernel.operations[position], 1
    if isinstance(item, Compute):
        for operand in item.operands:
            dtype = operation_dtype(kernel.operations[operand])
            is_truth = dtype is torch.bool
            width = max(width, compared_width(kernel, operand) if is_truth else dtype.itemsize)
    return width
