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
    Program,
    TensorType,
    Value,
    consumed,
    contiguous_strides,
    defined,
    holds_memory,
    last_uses,
    reads,
    released_inputs,
    roots,
    used,
)


class Keeper(Enum):
    """Whose memory it is, which says whether a plan may place it.

    `PROGRAM`: a line of the block allocates it, a line of the block frees it, and all between is on the current stream.
    `OPERATOR`: an operator allocates it, or a line takes it for what it makes of it, or a collective or another stream
    works on it.
    `CALLER`: it was there before, or is there afterwards: inputs, constants, arguments, and what is given back.
    """

    PROGRAM = "program"
    OPERATOR = "operator"
    CALLER = "caller"


@dataclass(frozen=True, slots=True)
class LiveRange:
    """A piece of memory and when it is live.

    Fields:
        names: its roots, in order: one, and those that `memory.reuse` and other lines made of it.
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
    following, left_alone = _successors(lines, root_of)
    free_to_take = set(released)
    made = {name: (value, 0, False) for name, value in given.items() if isinstance(value.type, TensorType)}
    for position, line in enumerate(lines):
        for value in defined(line):
            if root_of[value.name] == value.name and holds_memory(value) and isinstance(value.type, TensorType):
                made[value.name] = (value, position, isinstance(line, Alloc))
    later = set(following.values())
    found = []
    for name, (value, first, allocated) in made.items():
        if name in later:
            continue  # part of the chain of what it is made of
        names = [name]
        while names[-1] in following:
            names.append(following[names[-1]])
        stays = names[-1] in back or (name in given and (name not in free_to_take or names[-1] not in taken))
        end = count if stays else max(last[names[-1]], taken.get(names[-1], 0)) + 1
        if stays or name in given:
            keeper = Keeper.CALLER
        else:
            keeper = Keeper.PROGRAM if allocated and left_alone.isdisjoint(names) else Keeper.OPERATOR
        size = maximum(*[byte_size(made[item][0].tensor_type) for item in names])
        type_ = value.tensor_type
        found.append(LiveRange(tuple(names), first, end, size, type_.device, type_.memory_space, keeper))
    return tuple(found)


def _successors(lines: Iterable[LineBase], root_of: Mapping[str, str]) -> tuple[dict[str, str], set[str]]:
    """Returns the root that is made of each root that a line takes for that, and the roots that no plan may place."""
    following: dict[str, str] = {}
    left_alone: set[str] = set()
    for line in lines:
        taken = consumed(line)
        results = [value.name for value in defined(line) if line.alias_of(value) is None] if taken else []
        if results:
            following[taken[0].name] = results[0]
        if taken and not isinstance(line, Free | Reuse):
            left_alone.update([*[value.name for value in taken], *results])
        if line.starts_flight or line.ends_flight or getattr(line, "stream", 0) != 0:
            left_alone.update([root_of[value.name] for value in (*used(line), *defined(line))])
    return following, left_alone


def program_ranges(program: Program) -> tuple[LiveRange, ...]:
    """Returns the live ranges of a program's body, its inputs and constants included."""
    given = {item.name: item.value for item in program.inputs if isinstance(item.value, Value)}
    given |= {constant.value.name: constant.value for constant in program.constants}
    return live_ranges(program.body, given, [value.name for value in released_inputs(program.inputs)])


def byte_size(type_: TensorType) -> Size:
    """Returns the bytes that an allocation of this type takes; never negative, whatever its symbols are."""
    if type_.strides == contiguous_strides(type_.sizes):
        return product((*type_.sizes, type_.dtype.itemsize))
    found = type_.storage_bytes
    return found if isinstance(found, int) else maximum(found, 0)
