"""When each piece of memory of a block is live, read off its lines alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from fxwrap.lines import Alloc, Free, Reuse
from fxwrap.symbolic import Size, maximum, product
from fxwrap.wrapper_ir import (
    Block,
    LineBase,
    Ownership,
    Program,
    TensorType,
    Value,
    consumed,
    contiguous_strides,
    defined,
    holds_memory,
    last_uses,
    reads,
    roots,
)


class Keeper(Enum):
    """Whose memory it is, which says whether a plan may place it.

    `PROGRAM`: a line of the block allocates it and a line of the block frees it. `OPERATOR`: an operator allocates it.
    `CALLER`: it was there before, or is there afterwards: inputs, constants, arguments, and what is given back.
    """

    PROGRAM = "program"
    OPERATOR = "operator"
    CALLER = "caller"


@dataclass(frozen=True, slots=True)
class LiveRange:
    """A piece of memory and when it is live.

    Fields:
        names: its roots, in order: one, and those that `memory.reuse` made of it.
        first: position of the line that makes it; 0 for what was there before.
        end: position after the last line that touches it by any window on it.
        size: bytes from the first element to past the last one, of the largest of its roots.
        device, memory_space: where it is.
        keeper: whose it is.
    """

    names: tuple[str, ...]
    first: int
    end: int
    size: Size
    device: torch.device
    memory_space: str
    keeper: Keeper

    @property
    def name(self) -> str:
        """The name of its first root."""
        return self.names[0]


def live_ranges(block: Block, given: Mapping[str, Value], released: Iterable[str] = ()) -> tuple[LiveRange, ...]:
    """Returns the live ranges of a block's memory, in the order in which it is made.

    A mutated buffer is the same memory, and so are all windows on it: they count once and die together. What is in
    flight is live until its wait. Memory inside nested blocks is theirs.

    Args:
        block: the block.
        given: what it sees from the start by name: its arguments, or a program's inputs and constants.
        released: those of them that it takes, which are live until then; the others are live throughout.
    """
    lines, count = block.lines, len(block.lines)
    root_of = roots(lines, given.values())
    last = last_uses(lines, given.values())
    taken = {value.name: position for position, line in enumerate(lines) for value in consumed(line)}
    back = {root_of[value.name] for value in reads(lines[-1])}
    following = {line.root.name: line.result.name for line in lines if isinstance(line, Reuse)}
    free_to_take = set(released)
    found = [
        LiveRange((name,), 0, taken[name] + 1 if name in free_to_take and name in taken else count,
                  byte_size(value.tensor_type), value.tensor_type.device, value.tensor_type.memory_space, Keeper.CALLER)
        for name, value in given.items() if isinstance(value.type, TensorType)
    ]  # fmt: skip
    values: dict[str, tuple[Value, int, LineBase]] = {}
    for position, line in enumerate(lines):
        for value in defined(line):
            if root_of[value.name] == value.name and holds_memory(value) and isinstance(value.type, TensorType):
                values[value.name] = (value, position, line)
    for name, (_, position, line) in values.items():
        if isinstance(line, Reuse):
            continue  # part of the chain of what it takes
        names = [name]
        while names[-1] in following:
            names.append(following[names[-1]])
        given_back = names[-1] in back
        end = count if given_back else max(last[names[-1]], taken.get(names[-1], 0)) + 1
        own = isinstance(line, Alloc) and not given_back
        keeper = Keeper.CALLER if given_back else Keeper.PROGRAM if own else Keeper.OPERATOR
        types = [values[item][0].tensor_type for item in names]
        size = maximum(*[byte_size(type_) for type_ in types])
        found.append(LiveRange(tuple(names), position, end, size, types[0].device, types[0].memory_space, keeper))
    return tuple(found)


def program_ranges(program: Program) -> tuple[LiveRange, ...]:
    """Returns the live ranges of a program's body, its inputs and constants included."""
    given = {item.name: item.value for item in program.inputs if isinstance(item.value, Value)}
    given |= {constant.value.name: constant.value for constant in program.constants}
    released = [item.name for item in program.inputs if item.ownership in (Ownership.SHARED, Ownership.OWNED)]
    return live_ranges(program.body, given, released)


def byte_size(type_: TensorType) -> Size:
    """Returns the bytes that an allocation of this type takes; never negative, whatever its symbols are."""
    if type_.strides == contiguous_strides(type_.sizes):
        return product((*type_.sizes, type_.dtype.itemsize))
    found = type_.storage_bytes
    return found if isinstance(found, int) else maximum(found, 0)


def is_free_of(line: LineBase, names: Iterable[str]) -> bool:
    """Returns whether a line frees one of these roots."""
    return isinstance(line, Free) and line.root.name in names
