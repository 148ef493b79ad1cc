"""How the blocks of control-flow lines fit what goes in and what comes out of them."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from fxwrap.symbolic import expression_kind
from fxwrap.wrapper_ir import Block, ScalarType, TensorType, Type, Value, defined, leaves, print_type, types_agree


def types_of(values: Any) -> list[Type | None]:
    """Returns the types of a tree of values, numbers and none, flat."""
    return [_type_of(leaf) for leaf in leaves(values)]


def _type_of(leaf: Any) -> Type | None:
    if isinstance(leaf, Value):
        return leaf.type
    if leaf is None:
        return None
    if isinstance(leaf, bool):
        return ScalarType("bool")
    if isinstance(leaf, int | sympy.Basic):
        return ScalarType(expression_kind(leaf))
    return ScalarType(type(leaf).__name__)


def device_of(block: Block) -> torch.device:
    """Returns the device that a block works on: that of its first tensor, the CPU without any."""
    values = (*block.arguments, *[value for line in block.lines for value in defined(line)])
    found = [value.type.device for value in values if isinstance(value.type, TensorType)]
    return found[0] if found else torch.device("cpu")


def slice_types(values: tuple[Value, ...]) -> list[Type | None]:
    """Returns the types of one slice of each tensor along its first dimension. Raises ValueKindError for no tensor."""
    found: list[Type | None] = []
    for value in values:
        whole = value.tensor_type
        found.append(
            TensorType(
                whole.dtype, whole.sizes[1:], whole.strides[1:], whole.device, 0, whole.memory_space, whole.layout
            )
        )
    return found


def mismatch(
    where: str, got: list[Type | None], wanted: list[Type | None], *, compare_strides: bool = True
) -> str | None:
    """Returns how a list of types differs from what is wanted at a place, or None."""
    if len(got) != len(wanted):
        return f"{where}: {len(got)} instead of {len(wanted)}"
    for position, (have, want) in enumerate(zip(got, wanted)):
        if not types_agree(have, want, compare_strides=compare_strides):
            return f"{where}: number {position} is {print_type(have)} instead of {print_type(want)}"
    return None


def stacked_mismatch(where: str, stacked: tuple[Any, ...], single: list[Type | None]) -> str | None:
    """Returns how results, each without its first dimension, differ from what one round gives, or None."""
    missing = [leaf for leaf in leaves(stacked) if not isinstance(leaf, Value)]
    if missing:
        return f"{where}: every stacked result is a tensor"
    return mismatch(where, slice_types(tuple(leaves(stacked))), single, compare_strides=False)
