"""The collectives of a program as texts that are equal on all ranks that call the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fxwrap.errors import ExpressionError
from fxwrap.lines import CallFunction, ExternCall, Let, Mutate, SizeOf, StartCollective
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
_FUSED = ("symm_mem.", "fxwrap_runtime.matmuls_reduce_scatter.", "fxwrap_runtime.one_shot_all_reduce.")
"""The beginnings of the names of operators over symmetric memory; their group is the last string."""
_OWN_PEERS = ("isend", "irecv", "batch_p2p_ops")
"""Communication between two ranks, which call different operators."""


class CollectiveCall(NamedTuple):
    """An operator that communicates, its arguments and its group."""

    operator: str
    arguments: tuple[Operand, ...]
    group: str


@dataclass(frozen=True)
class GroupCommunication:
    """The collectives of a program in one process group.

    Fields:
        label: the name of the group in the program.
        input: the position of the program's input that is the group; None for a group that the name identifies.
        calls: the collectives in order, each with the number of blocks around it.
    """

    label: str
    input: int | None
    calls: tuple[tuple[int, CollectiveCall], ...]

    def texts(self, values: Mapping[str, Number]) -> tuple[str, ...]:
        """Returns one text for each collective: operator, dtypes, sizes and other arguments.

        Symbols in sizes have these values; those without a value, and those in other arguments, are "?".
        """
        return tuple(["  " * depth + _text(call, values) for depth, call in self.calls])


def communication(program: Program) -> tuple[GroupCommunication, ...]:
    """Returns the collectives of each process group of a program; those of groups computed in it are left out.

    The texts have no names of values and no sizes of all_to_alls, and point-to-point operators are left out, since they
    differ between ranks.
    """
    positions = {item.name: position for position, item in enumerate(program.inputs)}
    calls: dict[tuple[str, int | None], list[tuple[int, CollectiveCall]]] = {}
    for depth, call in _calls(program.body, program, 0):
        group = next((leaf for leaf in leaves(call.arguments) if _is_group(leaf, call.group)), call.group)
        if isinstance(group, Value) and group.name not in positions:
            continue
        if any(name in call.operator for name in _OWN_PEERS):
            continue
        key = (call.group, positions[group.name] if isinstance(group, Value) else None)
        calls.setdefault(key, []).append((depth, call))
    return tuple([GroupCommunication(label, position, tuple(items)) for (label, position), items in calls.items()])


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


def _calls(block: Block, program: Program, depth: int) -> Iterator[tuple[int, CollectiveCall]]:
    functions = dict(program.functions)
    for line in block.lines:
        if isinstance(line, StartCollective):
            yield depth, CollectiveCall(line.operator, line.arguments, line.group)
        elif isinstance(line, ExternCall | Mutate) and line.target.startswith(_FUSED):
            groups = [leaf for leaf in leaves(line.arguments) if isinstance(leaf, str)]
            yield depth, CollectiveCall(line.target, line.arguments, groups[-1])
        for inner in executed_blocks(line, functions):
            # Captured functions run as their lines do: ranks may have captured other ones.
            is_captured = isinstance(line, CallFunction) and line.max_captures > 0
            yield from _calls(inner, program, depth if is_captured else depth + 1)


def _text(call: CollectiveCall, values: Mapping[str, Number]) -> str:
    hides_sizes = any(name in call.operator for name in _OWN_SIZES)
    arguments = [_literal(leaf) for leaf in leaves(call.arguments) if not _is_named(leaf, call.group, hides_sizes)]
    types = [value.tensor_type for value in values_in(call.arguments) if isinstance(value.type, TensorType)]
    shown = [str(type_.dtype) if hides_sizes else f"{type_.dtype}{_sizes(type_.sizes, values)}" for type_ in types]
    return f"{call.operator.split('.')[1]}({', '.join([*shown, *arguments])})"


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
