"""Operators on lists of tensors (`aten._foreach_add`), which optimizers call: as operators on each, which fuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from fxwrap.torch_compat import OpOverload

_aten = torch.ops.aten
_PREFIX = "_foreach_"

_SAME_NAME = (
    "abs", "acos", "add", "addcdiv", "addcmul", "asin", "atan", "ceil", "clamp_max", "clamp_min", "clone", "cos",
    "cosh", "div", "erf", "erfc", "exp", "expm1", "floor", "frac", "lerp", "lgamma", "log", "log10", "log1p", "log2",
    "max", "maximum", "minimum", "mm", "mul", "neg", "pow", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin",
    "sinh", "sqrt", "sub", "tan", "tanh", "trunc",
)  # fmt: skip
"""Operators that do to each tensor what torch's function of that name does."""

_OTHERS: Mapping[str, Callable[..., Any]] = {
    "maximum.Scalar": torch.clamp_min,
    "maximum.ScalarList": torch.clamp_min,
    "minimum.Scalar": torch.clamp_max,
    "minimum.ScalarList": torch.clamp_max,
    "copy.default": _aten.copy.default,
    "norm.Scalar": lambda given, order=2, dtype=None: torch.linalg.vector_norm(given, order, dtype=dtype),
    "zero.default": torch.zeros_like,
}
_KEPT = frozenset({"addcdiv.Tensor", "addcmul.Tensor"})  # their factors are a tensor's numbers
_KEYWORDS = frozenset({"addcdiv", "addcmul"})
"""Functions that take their last argument, the factor, by name."""


def foreach_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Returns what takes each such operator apart that this version of torch has and that writes nothing."""
    found: dict[OpOverload, Callable[..., Any]] = {}
    for name in dict.fromkeys([*_SAME_NAME, *[text.partition(".")[0] for text in _OTHERS]]):
        packet = getattr(_aten, _PREFIX + name, None)
        for overload in packet.overloads() if packet is not None else ():
            function = _OTHERS.get(f"{name}.{overload}", getattr(torch, name, None) if name in _SAME_NAME else None)
            if function is None or "out" in overload or f"{name}.{overload}" in _KEPT:
                continue
            operator = getattr(packet, overload)
            lists = [str(item.type).startswith("List[") for item in operator._schema.arguments]
            factor = len(lists) - 1 if name in _KEYWORDS else len(lists)
            found[operator] = partial(_each, function, tuple(lists), factor)
    return found


def _each(
    function: Callable[..., Any], lists: tuple[bool, ...], factor: int, *given: Any, **keywords: Any
) -> list[Any]:
    """Calls a function for each place of lists; an argument from `factor` on is its keyword `value`."""
    count = next(len(item) for item, is_list in zip(given, lists) if is_list)
    results = []
    for place in range(count):
        here = [item[place] if is_list else item for item, is_list in zip(given, lists)]
        named = {"value": here[factor]} if len(here) > factor else {}
        results.append(function(*here[:factor], **named, **keywords))
    return results
