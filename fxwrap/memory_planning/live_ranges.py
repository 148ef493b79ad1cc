"""Live ranges of the memory of a block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from fxwrap import wrapper_ir as ir
from fxwrap.lines import Alloc, Free, Reuse
from fxwrap.symbolic import Size, maximum, product


class MemoryOwner(Enum):
    """The owner of memory. A plan assigns only memory of the program.

    `PROGRAM`: lines of the block allocate and free it, and it is used on the current stream only.
    `OPERATOR`: an operator allocates or consumes it, or another stream uses it.
    `CALLER`: it is live before or after the block: inputs, constants, arguments and results.
    """

    PROGRAM = "program"
    OPERATOR = "operator"
    CALLER = "caller"


@dataclass(frozen=True, slots=True)
class LiveRange:
    """A buffer and its live range.

    Fields:
        names: its roots in order: the first, and those that `memory.reuse` and other lines turn it into.
        first: position of the line that defines it; 0 for memory that is live before.
        end: position after the last line that uses it or a view of it.
        size: bytes from the first element to past the last one, of the largest root; of a released input, its elements.
        device, memory_space: its location.
        owner: its owner.
    """

    names: tuple[str, ...]
    first: int
    end: int
    size: Size
    device: torch.device
    memory_space: str
    owner: MemoryOwner

    @property
    def name(self) -> str:
        """The name of the first root."""
        return self.names[0]


def live_ranges(block: ir.Block, inputs: Mapping[str, ir.Value], released: Iterable[str] = ()) -> tuple[LiveRange, ...]:
    """Returns the live ranges of a block's memory, in the order of definition.

    All views of a buffer and its in-place updates share one live range. Memory in flight is live until its wait.
    Memory of nested blocks is not included.

    Args:
        block: the block.
        inputs: the values defined before it by name: its arguments, or a program's inputs and constants.
        released: the inputs that the block consumes, which are live until then; the others are live throughout.
    """
    lines, count = block.lines, len(block.lines)
    root_of = ir.alias_roots(lines, inputs.values())
    last = ir.last_uses(lines, inputs.values())
    consumed_at = {value.name: position for position, line in enumerate(lines) for value in ir.consumed(line)}
    returned = {root_of[value.name] for value in ir.reads(lines[-1])}
    following, excluded = _reuse_chains(lines, root_of)
    releasable = set(released)
    roots = {name: (value, 0, False) for name, value in inputs.items() if isinstance(value.type, ir.TensorType)}
    for position, line in enumerate(lines):
        for value in ir.defined(line):
            if root_of[value.name] == value.name and ir.holds_memory(value) and isinstance(value.type, ir.TensorType):
                roots[value.name] = (value, position, isinstance(line, Alloc))
    reused = set(following.values())
    ranges = []
    for name, (value, first, allocated) in roots.items():
        if name in reused:
            continue
        names = [name]
        while names[-1] in following:
            names.append(following[names[-1]])
        is_released = name in releasable and names[-1] in consumed_at
        outlives = names[-1] in returned or (name in inputs and not is_released)
        end = count if outlives else max(last[names[-1]], consumed_at.get(names[-1], 0)) + 1
        if outlives or name in inputs:
            owner = MemoryOwner.CALLER
        else:
            is_planned = allocated and excluded.isdisjoint(names) and value.tensor_type.symmetric_group is None
            owner = MemoryOwner.PROGRAM if is_planned else MemoryOwner.OPERATOR
        type_ = value.tensor_type
        own = type_.element_bytes if name in releasable else byte_size(type_)
        size = maximum(own, *[byte_size(roots[item][0].tensor_type) for item in names[1:]])
        ranges.append(LiveRange(tuple(names), first, end, size, type_.device, type_.memory_space, owner))
    return tuple(ranges)


def _reuse_chains(lines: Iterable[ir.LineBase], root_of: Mapping[str, str]) -> tuple[dict[str, str], set[str]]:
    """Returns the root that each consumed root turns into, and the roots that a plan must not assign."""
    following: dict[str, str] = {}
    excluded: set[str] = set()
    for line in lines:
        roots = ir.consumed(line)
        results = [value.name for value in ir.defined(line) if line.alias_of(value) is None] if roots else []
        if results:
            following[roots[0].name] = results[0]
        if roots and not isinstance(line, Free | Reuse):
            excluded.update([*[value.name for value in roots], *results])
        if line.stream != 0:
            excluded.update([root_of[value.name] for value in (*ir.used(line), *ir.defined(line))])
    return following, excluded


def program_live_ranges(program: ir.Program) -> tuple[LiveRange, ...]:
    """Returns the live ranges of a program's body, including inputs and constants."""
    inputs = {item.name: item.value for item in program.inputs if isinstance(item.value, ir.Value)}
    inputs |= {constant.value.name: constant.value for constant in program.constants}
    return live_ranges(program.body, inputs, [value.name for value in ir.released_inputs(program.inputs)])


def byte_size(type_: ir.TensorType) -> Size:
    """Returns the bytes of an allocation of a type, never negative for any value of symbols."""
    if type_.strides == ir.contiguous_strides(type_.sizes):
        return product((*type_.sizes, type_.dtype.itemsize))
    size = type_.storage_bytes
    return size if isinstance(size, int) else maximum(size, 0)
