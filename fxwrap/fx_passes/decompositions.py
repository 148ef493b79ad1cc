"""The operators that are decomposed before lowering.

The table is explicit: `_DECOMPOSED`, batch norm, and the operators on lists of tensors. torch's
`core_aten_decompositions()` is not used: it decomposes operators that have good kernels, and its decomposition of
`_scaled_dot_product_flash_attention_for_cpu` gave wrong gradients for attention biases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import ops

from fxwrap.options import Options
from fxwrap.torch_compat import OpOverload, aten_schema, get_decompositions, operator_overload

_DECOMPOSED: tuple[OpOverload, ...] = (
    ops.aten.native_dropout_backward.default,  # a multiplication, which fuses; the kernel exists on CUDA only
)


def default_decompositions() -> dict[OpOverload, Decomposition]:
    """Returns fxwrap's table, overload -> function; a new dict, which the caller may change."""
    return dict(_default_table())


@cache
def _default_table() -> Mapping[OpOverload, Decomposition]:
    table = get_decompositions(_DECOMPOSED)
    own: dict[OpOverload, Decomposition] = {ops.aten.native_batch_norm.default: _native_batch_norm}
    return {overload: table[overload] for overload in _DECOMPOSED} | own | foreach_decompositions() | _waits()


def decomposition_table(options: Options) -> dict[OpOverload, Decomposition]:
    """Returns the table of the options, without the operators to preserve."""
    table = default_decompositions() if options.decompositions is None else options.decompositions
    return {overload: function for overload, function in table.items() if str(overload) not in options.preserve_ops}


def _native_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> object:
    """Calls an operator whose schema says that it writes the running statistics: `native_batch_norm` hides that."""
    if running_mean is None:
        return _aten._native_batch_norm_legit.no_stats(x, weight, bias, training, momentum, eps)
    operands = x, weight, bias, running_mean, running_var
    if training:
        return _aten._native_batch_norm_legit(*operands, training, momentum, eps)
    return _aten._native_batch_norm_legit_no_training(*operands, momentum, eps)


def _waits() -> dict[OpOverload, Decomposition]:
    """Returns the decomposition of `wait_tensors`, new in torch 2.15: a wait for each result, which can be moved."""
    wait = operator_overload("_c10d_functional.wait_tensor.default")
    try:
        waits = operator_overload("_c10d_functional.wait_tensors.default")
    except LookupError:
        return {}
    return {waits: lambda tensors: [wait(item) for item in tensors]}


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
