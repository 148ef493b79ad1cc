"""Decompositions of operators on lists of tensors (`aten._foreach_add`), which optimizers call, into pointwise ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch

from fxwrap.torch_compat import OpOverload, aten_schema

_aten = torch.ops.aten
_PREFIX = "_foreach_"

Decomposition: TypeAlias = Callable[..., object]

_SAME_NAME = (
    "abs", "acos", "add", "addcdiv", "addcmul", "asin", "atan", "ceil", "clamp_max", "clamp_min", "clone", "cos",
    "cosh", "div", "erf", "erfc", "exp", "expm1", "floor", "frac", "lerp", "lgamma", "log", "log10", "log1p", "log2",
    "max", "maximum", "minimum", "mm", "mul", "neg", "pow", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin",
    "sinh", "sqrt", "sub", "tan", "tanh", "trunc",
)  # fmt: skip
"""Operators that apply torch's function of the same name to each tensor."""

_OTHERS: Mapping[str, Decomposition] = {
    "maximum.Scalar": torch.clamp_min,
    "maximum.ScalarList": torch.clamp_min,
    "minimum.Scalar": torch.clamp_max,
    "minimum.ScalarList": torch.clamp_max,
    "copy.default": _aten.copy.default,
    "norm.Scalar": lambda x, order=2, dtype=None: torch.linalg.vector_norm(x, order, dtype=dtype),
    "zero.default": torch.zeros_like,
}
_NOT_DECOMPOSED = frozenset({"addcdiv.Tensor", "addcmul.Tensor"})  # their factors are the elements of one tensor
_VALUE_BY_KEYWORD = frozenset({"addcdiv", "addcmul"})
"""Functions that take their last argument, the factor, as the keyword `value`."""


def foreach_decompositions() -> dict[OpOverload, Decomposition]:
    """Returns a decomposition for each functional foreach overload of the installed torch."""
    table: dict[OpOverload, Decomposition] = {}
    for name in dict.fromkeys([*_SAME_NAME, *[text.partition(".")[0] for text in _OTHERS]]):
        packet = getattr(_aten, _PREFIX + name, None)
        for overload in packet.overloads() if packet is not None else ():
            function = _OTHERS.get(f"{name}.{overload}", getattr(torch, name, None) if name in _SAME_NAME else None)
            if function is None or "out" in overload or f"{name}.{overload}" in _NOT_DECOMPOSED:
                continue
            schema = aten_schema(_PREFIX + name, overload)
            is_list = [str(argument.type).startswith("List[") for argument in schema.arguments] if schema else []
            factor = len(is_list) - 1 if name in _VALUE_BY_KEYWORD else len(is_list)
            table[getattr(packet, overload)] = partial(_apply_to_lists, function, tuple(is_list), factor)
    return table


def _apply_to_lists(
    function: Decomposition, is_list: tuple[bool, ...], factor: int, *arguments: Any, **keywords: object
) -> list[object]:
    """Calls a function on the elements of the list arguments; an argument from `factor` on is its keyword `value`."""
    count = next(len(argument) for argument, listed in zip(arguments, is_list) if listed)
    results = []
    for position in range(count):
        row = [argument[position] if listed else argument for argument, listed in zip(arguments, is_list)]
        named = {"value": row[factor]} if len(row) > factor else {}
        results.append(function(*row[:factor], **named, **keywords))
    return results
