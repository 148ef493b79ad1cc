"""Samples of calls of pointwise operators, generated from their schemas.

Tensors hold every combination of special values; numbers come from the tables here. An argument that no table knows,
and that has no default, is an error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from fxwrap.loop_ir import INTEGERS
from fxwrap.torch_compat import operator_overload

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

# --- arguments that are no tensors: by overload and name, or by name alone -------------------------------------------

BY_OVERLOAD: dict[str, dict[str, list[Any]]] = {
    "aten.pow.Tensor_Scalar": {
        "exponent": [0, 1, 2, 3, 4, 7, -1, -2, 0.5, -0.5, 0.75, 1.5, 0.1007, 2.0, 3.0, math.inf]
    },
    "aten.pow.Scalar": {"self": [1, 2, 3, 0.1007, -2]},
    "aten.elu_backward.default": {"alpha": [1.5], "scale": [0.7], "input_scale": [1.3], "is_result": [False, True]},
    "aten.rrelu_with_noise_backward.default": {"upper": [0.4]},
    "aten.hardtanh.default": {"min_val": [-0.7, -1], "max_val": [0.7, 2]},
    "aten.clamp.default": {"min": [None, -2, 0.1007], "max": [3, 0.7, math.nan]},
    "aten.threshold.default": {"threshold": [1, 0.1007], "value": [7, -0.3]},
    "aten.copysign.Scalar": {"other": [-0.0, 2.0, -1]},
    "aten.xlogy.Scalar_Other": {"other": [2, 0.1007, 0, math.nan]},
    "aten.celu.default": {"alpha": [1.0, 0.6]},
    "aten.nan_to_num.default": {"nan": [None, 2.5], "posinf": [None, 3.5], "neginf": [None, -4.5]},
    "aten.fill.Scalar": {"value": [3, 0.1007, -math.inf, True]},
    "aten.masked_fill.Scalar": {"value": [3, 0.1007, -math.inf]},
    "aten.lerp.Scalar": {"weight": [0.0, 0.3, 0.5, 1.0, 1.7]},
    "aten.huber_loss.default": {"delta": [1.0, 0.6]},
    "aten.bitwise_left_shift.Tensor_Scalar": {"other": [0, 1, 3, 70]},
    "aten.bitwise_right_shift.Tensor_Scalar": {"other": [0, 1, 3, 70]},
    "aten._to_copy.default": {"dtype": [None, *DTYPES]},
    "prims.convert_element_type.default": {"dtype": list(DTYPES)},
}
BY_NAME: dict[str, list[Any]] = {
    "other": [3, -1, 0.1007, True],
    "self": [3, -1, 0.1007],
    "alpha": [1, 2, -0.1007],
    "value": [1, 3, 0.1007],
    "min": [1, 0.1007],
    "max": [1, 0.1007],
    "rounding_mode": [None, "floor", "trunc"],
    "approximate": ["none", "tanh"],
    "decimals": [0, 1, -1],
    "eps": [None, 0.1],
    "lambd": [0.5, 0.1007],
    "negative_slope": [0.01, 0.3],
    "self_is_result": [False],
    "threshold": [1, 0.1007],
    "beta": [1.0, 1.5],
    "delta": [0.6],
    "min_val": [-0.7],
    "max_val": [0.7],
    "lower": [0.1],
    "upper": [0.3],
    "training": [True, False],
    "reduction": [0, 1, 2],
    "scale": [1.25],
    "dim": [0],
    "n": [0, 1],
    "p": [1, 3],
}
TENSOR_LIMIT = {1: 64, 2: 24, 3: 9, 4: 5, 5: 4}
"""How many values each of so many tensors takes: the samples are all combinations."""


# --- tensors ---------------------------------------------------------------------------------------------------------


def special_values(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Returns so many values of a dtype, the most significant first."""
    generator = torch.Generator().manual_seed(0)
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        first = [0, 1, 5, limits.min, limits.max, 2, 127, -1, -2, -7, 100, limits.max // 2, 3]
        values = [value for value in first if limits.min <= value <= limits.max]
        more = torch.randint(limits.min, limits.max, (count,), generator=generator).tolist()
        return torch.tensor((values + more)[:count], dtype=dtype)
    limit = torch.finfo(dtype)
    first = [0.0, 0.6, -1.7, math.nan, math.inf, -math.inf, -0.0, 1.0, -1.0, limit.max, limit.min, 2.0, -2.0, 3.0,
             limit.tiny, 0.5, 0.1007, -0.1007, 0.999, 6.3, 20.5, -20.5, 88.0, -88.0, 1e-3, 1000.0]  # fmt: skip
    more = (torch.randn(count, generator=generator) * 3).tolist()
    return torch.tensor((first + more)[:count]).to(dtype)


def moderate_values(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Returns special values without those that a product of two of them makes infinite."""
    values = special_values(dtype, count)
    return values[~(values.abs() > 50)] if dtype.is_floating_point else values


MODERATE = {
    "aten.add.Tensor": "eager multiplies by alpha and adds without overflow between",
    "aten.sub.Tensor": "the same",
    "aten.rsub.Tensor": "the same",
    "aten.gelu.default": "eager overflows before it halves",
    "aten.soft_margin_loss_backward.default": "eager divides infinity by infinity for large products",
}
"""Operators that are compared without very large numbers and infinities, and why."""


def tensor_arguments(names: list[str], dtype: torch.dtype, values: Any) -> list[torch.Tensor]:
    """Returns a tensor for each name, of equal sizes, which together hold every combination of values."""
    count = TENSOR_LIMIT[len(names)]
    kinds = [torch.bool if name in ("mask", "condition") else dtype for name in names]
    chosen = [values(kind, count) for kind in kinds]
    grids = torch.meshgrid(*[torch.arange(len(item)) for item in chosen], indexing="ij")
    return [item[grid.flatten()] for item, grid in zip(chosen, grids, strict=True)]


def numbers_of(name: str, argument: Any) -> list[Any]:
    own = BY_OVERLOAD.get(name, {}).get(argument.name)
    if own is not None:
        return own
    if argument.name in BY_NAME and (argument.name != "dim" or not argument.has_default_value()):
        return BY_NAME[argument.name]
    assert argument.has_default_value(), f"{name}: no table says what {argument.name} can be"
    return [argument.default_value]


def samples(name: str, dtype: torch.dtype, values: Any = None) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Yields arguments and keywords of calls on tensors of a dtype."""
    values = values or (moderate_values if name in MODERATE else special_values)
    arguments = operator_overload(name)._schema.arguments
    optional = [item.name for item in arguments if str(item.type) == "Optional[Tensor]"]
    for left_out in itertools.product((False, True), repeat=len(optional)):
        skipped = {item for item, out in zip(optional, left_out, strict=True) if out}
        names = [item.name for item in arguments if "Tensor" in str(item.type) and item.name not in skipped]
        tensors: dict[str, Any] = dict(zip(names, tensor_arguments(names, dtype, values), strict=True))
        adapt(name, tensors)
        others = [item for item in arguments if "Tensor" not in str(item.type)]
        for chosen in itertools.product(*[numbers_of(name, item) for item in others]):
            by_name = tensors | dict.fromkeys(skipped) | {
                item.name: value for item, value in zip(others, chosen, strict=True)
            }  # fmt: skip
            positional = [by_name[item.name] for item in arguments if not item.kwarg_only]
            yield positional, {item.name: by_name[item.name] for item in arguments if item.kwarg_only}


def adapt(name: str, tensors: dict[str, Any]) -> None:
    """Gives tensors the sizes that an operator asks for."""
    if name in ("aten.fill.Tensor", "aten.masked_fill.Tensor"):
        tensors["value"] = tensors["value"][1].clone()
    elif tensors.get("self") is not None and tensors["self"].numel() < 48:
        return
    elif name == "aten.glu.default":
        tensors["self"] = tensors["self"][:48].reshape(8, 6)
    elif name == "aten.glu_backward.default":
        tensors["self"] = tensors["self"][:480].reshape(16, 30)
        tensors["grad_output"] = tensors["grad_output"][:240].reshape(8, 30)
    elif any(part in name for part in ("div", "remainder", "fmod")):
        for key, tensor in tensors.items():
            if tensor.dtype in INTEGERS:  # eager's process dies of the smallest number over -1
                tensors[key] = tensor.clamp(torch.iinfo(tensor.dtype).min + 1).where(tensor != 0, 1)
    elif name == "aten.log_sigmoid_backward.default":
        tensors["buffer"] = (-tensors["self"].abs()).exp() if tensors["self"].is_floating_point() else tensors["self"]
