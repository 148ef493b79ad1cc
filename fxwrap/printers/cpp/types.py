"""C++ types of the loop IR's dtypes, and C++ literals."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Final

import torch

CPP_TYPES: Final[Mapping[torch.dtype, str]] = {
    torch.float32: "float", torch.float64: "double", torch.bfloat16: "bfloat16", torch.float16: "float16",
    torch.bool: "bool", torch.int8: "int8_t", torch.int16: "int16_t", torch.int32: "int32_t", torch.int64: "int64_t",
    torch.uint8: "uint8_t",
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
        case torch.bfloat16 | torch.float16:
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
