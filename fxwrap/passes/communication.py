"""The collectives of a program as texts that are equal on all ranks that call the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fxwrap.errors import ExpressionError
from fxwrap.lines import Let, SizeOf, StartCollective
from fxwrap.symbolic import Number, SymbolInfo, evaluate
from fxwrap.wrapper_ir import (
    Block,
    Operand,
    Program,
    Size,
    TensorType,
    Value,
    executed_blocks,
    leaves,
    print_literal,
    values_in,
)

_OWN_SIZES = ("all_to_all",)
"""Collectives whose sizes differ between ranks."""
_OWN_PEERS = ("isend", "irecv", "batch_p2p_ops")
"""Communication between two ranks, which call different operators."""


@dataclass(frozen=True)
class GroupCommunication:
    """The collectives of a program in one process group.

    Fields:
        label: the name of the group in the program.
        input: the position of the program's input that is the group; None for a group that the name identifies.
        starts: the collectives in order, each with the number of blocks around it.
    """

    label: str
    input: int | None
    starts: tuple[tuple[int, StartCollective], ...]

    def texts(self, values: Mapping[str, Number]) -> tuple[str, ...]:
        """Returns one text for each collective: operator, dtypes, sizes and other arguments.

        Symbols in sizes have these values; those without a value, and those in other arguments, are "?".
        """
        return tuple(["  " * depth + _text(line, values) for depth, line in self.starts])


def communication(program: Program) -> tuple[GroupCommunication, ...]:
    """Returns the collectives of each process group of a program; those of groups computed in it are left out.

    The texts have no names of values and no sizes of all_to_alls, and point-to-point operators are left out, since they
    differ between ranks.
    """
    positions = {item.name: position for position, item in enumerate(program.inputs)}
    starts: dict[tuple[str, int | None], list[tuple[int, StartCollective]]] = {}
    for depth, line in _starts(program.body, program, 0):
        group = next((leaf for leaf in leaves(line.arguments) if _is_group(leaf, line.group)), line.group)
        if isinstance(group, Value) and group.name not in positions:
            continue
        if any(name in line.operator for name in _OWN_PEERS):
            continue
        key = (line.group, positions[group.name] if isinstance(group, Value) else None)
        starts.setdefault(key, []).append((depth, line))
    return tuple([GroupCommunication(label, position, tuple(items)) for (label, position), items in starts.items()])


def size_values(program: Program, inputs: Sequence[Any]) -> dict[str, Number]:
    """Returns the values of symbols that follow from the inputs of a call, by name."""
    values = {item.name: value for item, value in zip(program.inputs, inputs, strict=False)
              if isinstance(item.value, SymbolInfo) and isinstance(value, int | float)}  # fmt: skip
    tensors = {item.name: value for item, value in zip(program.inputs, inputs, strict=False)
               if isinstance(value, Tensor)}  # fmt: skip
    for line in program.body.lines:
        if isinstance(line, SizeOf) and line.of == "size" and line.tensor.name in tensors:
            sizes = tensors[line.tensor.name].shape
            if line.dim < len(sizes):
                values[line.symbol.name] = int(sizes[line.dim])
        elif isinstance(line, Let):
            with suppress(ExpressionError, ArithmeticError, ValueError):
                values[line.symbol.name] = evaluate(line.expr, values)
    return values


def _is_group(leaf: object, group: str) -> bool:
    return isinstance(leaf, Value) and leaf.name == group and not isinstance(leaf.type, TensorType)


def _starts(block: Block, program: Program, depth: int) -> Iterator[tuple[int, StartCollective]]:
    functions = dict(program.functions)
    for line in block.lines:
        if isinstance(line, StartCollective):
            yield depth, line
        for inner in executed_blocks(line, functions):
            yield from _starts(inner, program, depth + 1)


def _text(line: StartCollective, values: Mapping[str, Number]) -> str:
    hides_sizes = any(name in line.operator for name in _OWN_SIZES)
    arguments = [_literal(leaf) for leaf in leaves(line.arguments) if not _is_named(leaf, line.group, hides_sizes)]
    types = [value.tensor_type for value in values_in(line.arguments) if isinstance(value.type, TensorType)]
    shown = [str(type_.dtype) if hides_sizes else f"{type_.dtype}{_sizes(type_.sizes, values)}" for type_ in types]
    return f"{line.operator.split('.')[1]}({', '.join([*shown, *arguments])})"


def _is_named(leaf: Operand, group: str, hides_sizes: bool) -> bool:
    if isinstance(leaf, Value) or leaf == group:
        return True
    return hides_sizes and not isinstance(leaf, str)


def _literal(leaf: Operand) -> str:
    return "?" if hasattr(leaf, "free_symbols") else print_literal(leaf)


def _sizes(sizes: tuple[Size, ...], values: Mapping[str, Number]) -> str:
    return f"[{', '.join([_size(size, values) for size in sizes])}]"


def _size(size: Size, values: Mapping[str, Number]) -> str:
    try:
        return str(evaluate(size, values))
    except (ExpressionError, ArithmeticError, ValueError):  # a symbol that is read from data
        return "?"
