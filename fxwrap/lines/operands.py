"""Checks of operands, aliases and writes, and of the types of arguments and results of nested blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy
import torch

from fxwrap import wrapper_ir as ir
from fxwrap.symbolic import expression_kind
from fxwrap.wrapper_ir import Operand, Result, Value, leaves


def types_of(operands: ir.Operand) -> list[ir.Type | None]:
    """Returns the types of the leaves of an operand; None for a leaf that is None."""
    return [_type_of(leaf) for leaf in ir.leaves(operands)]


def _type_of(leaf: ir.Operand) -> ir.Type | None:
    if isinstance(leaf, ir.Value):
        return leaf.type
    if leaf is None:
        return None
    if isinstance(leaf, int | sympy.Basic) and not isinstance(leaf, bool):
        return ir.ScalarType(expression_kind(leaf))
    return ir.ScalarType(type(leaf).__name__)


def block_device(block: ir.Block) -> torch.device:
    """Returns the device of the first tensor of a block, or the CPU if it has none."""
    values = (*block.arguments, *[value for line in block.lines for value in ir.defined(line)])
    devices = [value.type.device for value in values if isinstance(value.type, ir.TensorType)]
    return devices[0] if devices else torch.device("cpu")


def communicating_groups(block: ir.Block, functions: Mapping[str, ir.Block]) -> tuple[str, ...]:
    """Returns the names of the process groups whose collectives a block starts, also in blocks inside it."""
    groups: dict[str, None] = {}
    for line in block.lines:
        if line.is_async_start:
            groups |= dict.fromkeys([str(name) for effect in line.effects() for name in effect.arguments])
        for inner in ir.executed_blocks(line, functions):
            groups |= dict.fromkeys(communicating_groups(inner, functions))
    return tuple(groups)


def slice_types(values: Sequence[ir.Value]) -> list[ir.TensorType]:
    """Returns the types of one slice of each tensor along dimension 0. Raises ValueKindError for other values."""
    types = [value.tensor_type for value in values]
    return [replace(type_, sizes=type_.sizes[1:], strides=type_.strides[1:], storage_offset=0) for type_ in types]


def type_mismatch(
    where: str, actual: Sequence[ir.Type | None], expected: Sequence[ir.Type | None], *, compare_strides: bool = True
) -> str | None:
    """Returns the first difference between two lists of types as an error that starts with `where`, or None."""
    if len(actual) != len(expected):
        return f"{where}: {len(actual)} instead of {len(expected)}"
    for position, (type_, expected_type) in enumerate(zip(actual, expected)):
        if not ir.types_agree(type_, expected_type, compare_strides=compare_strides):
            return f"{where}: number {position} is {ir.print_type(type_)} instead of {ir.print_type(expected_type)}"
    return None


def stacked_type_mismatch(where: str, stacked: tuple[ir.Result, ...], rows: list[ir.Type | None]) -> str | None:
    """Returns the first difference between stacked results and the types of one iteration's results, or None."""
    tensors = ir.values_in(stacked)
    if len(tensors) < len(list(ir.leaves(stacked))):
        return f"{where}: every stacked result must be a tensor"
    return type_mismatch(where, slice_types(tensors), rows, compare_strides=False)


def aliased_operand(results: tuple[Result, ...], aliases: tuple[Value | None, ...], result: Value) -> Value | None:
    """Returns the operand that a result aliases, or None for a new root. `aliases` has one item per result, or none."""
    if not aliases:
        return None
    return next(alias for leaf, alias in zip(leaves(results), aliases) if leaf is result or leaf == result)


def keyword_error(keywords: Sequence[tuple[str, Operand]]) -> str | None:
    """Returns why the keywords of a call are not those of an operator, or None."""
    names = [name for name, _ in keywords]
    wrong = [name for name in names if not name.isidentifier() or names.count(name) > 1]
    return f"'{wrong[0]}' is no name of an argument, or is there twice" if wrong else None


def device_error(device: str) -> str | None:
    """Returns why a text is no device, or None."""
    try:
        torch.device(device)
    except RuntimeError:
        return f"{device!r} is no device, or its backend is not imported"
    return None


def alias_error(
    results: tuple[Result, ...], operands: Sequence[Operand], aliases: tuple[Value | None, ...]
) -> str | None:
    """Returns the first error in the aliases of a call, or None."""
    if aliases and len(aliases) != len(list(leaves(results))):
        return "`aliases` has one item, an operand or none, for each result"
    for alias in aliases:
        if alias is not None and alias not in operands:
            return f"%{alias.name} is listed in `aliases` but is not an operand"
    return None


def writes_error(operands: Sequence[Operand], written: tuple[Value, ...]) -> str | None:
    """Returns an error for the first written value that is not an operand of the call, or None."""
    for value in written:
        if value not in operands:
            return f"%{value.name} is listed in `writes` but is not an operand"
    return None
