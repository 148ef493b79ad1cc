"""Buffers of all_reduces over symmetric memory as allocations of the program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from fxwrap.devices import SYMMETRIC_MEMORY, DeviceSpec
from fxwrap.lines import Alloc, ExternCall, Free, Mutate
from fxwrap.names import NameAllocator
from fxwrap.wrapper_ir import (
    Block,
    LineBase,
    Program,
    TensorType,
    Value,
    blocks,
    communication_effect,
    contiguous_strides,
    symmetric_space,
    value_names,
)

ONE_SHOT = "fxwrap_runtime.one_shot_all_reduce.default"
IN_BUFFER = "symm_mem.one_shot_all_reduce_copy.default"


def allocate_symmetric_buffers(program: Program, specs: Mapping[str, DeviceSpec]) -> Program:
    """Returns the program whose small all_reduces run in `memory.alloc` lines in symmetric memory.

    Such a line has a memory space of its group, which other ranks read. Later lines reuse it as they do other memory,
    and the native operator is called without Python. Only for devices whose `DeviceSpec.memory_spaces` have symmetric
    memory. Linear in the number of lines.
    """
    if not any(isinstance(line, ExternCall) and line.target == ONE_SHOT for line in program.lines()):
        return program
    names = NameAllocator(value_names(program))

    def in_block(block: Block) -> Block:
        return Block(block.arguments, tuple([new for line in block.lines for new in in_line(line)]))

    def in_line(line: LineBase) -> Iterator[LineBase]:
        inner = {name: in_block(nested) for name, nested in blocks(line)}
        match line:
            case ExternCall(target=target, arguments=(Value() as x, str() as group)) if target == ONE_SHOT:
                type_ = x.tensor_type
                spec = specs.get(type_.device.type)
                if spec is not None and SYMMETRIC_MEMORY in spec.memory_spaces:
                    yield from _in_buffer(line, x, group, names.create_name(f"{x.name}_buffer"))
                    return
            case _:
                pass
        yield line.replace(**inner) if inner else line

    functions = tuple([(name, in_block(block)) for name, block in program.functions])
    return program.replace(body=in_block(program.body), functions=functions)


def _in_buffer(line: ExternCall, x: Value, group: str, name: str) -> Iterator[LineBase]:
    old = x.tensor_type
    type_ = TensorType(old.dtype, old.sizes, contiguous_strides(old.sizes), old.device)
    buffer = Value(name, replace(type_, memory_space=symmetric_space(group)))
    yield Alloc(buffer, origin=line.origin)
    yield Mutate(
        line.results, IN_BUFFER, (buffer, x, "sum", group), (buffer,), effect_set=(communication_effect(""),),
        origin=line.origin,
    )  # fmt: skip
    yield Free(buffer)
