"""Lines without a functional operator: calls of submodules that copy operands, write the copies and return them.

To torch's tools such a call is a pure function, and tracing sees the operators in it. `from_fx` inlines the submodule
and coalesces its copies, so that the line writes its operands again.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from fxwrap import wrapper_ir as ir
from fxwrap.converters.fx.control import operands_of, symbols_of
from fxwrap.converters.fx.converter import FxConverter
from fxwrap.converters.fx.emitter import GraphEmitter
from fxwrap.lines import Alloc, Mutate, View, Yield
from fxwrap.wrapper_ir import Block, LineBase, Value

COPY = "fxwrap_operand_copy"
"""The key of nodes that copy an operand of the submodule."""


@dataclass(frozen=True)
class WrittenMemory:
    """A memory that a line writes: its root, whether it has content, and the line's operands in it."""

    root: Value
    has_content: bool
    values: tuple[Value, ...]


def call_on_copies(emitter: GraphEmitter, line: LineBase, memories: Sequence[WrittenMemory]) -> None:
    """Emits a call of a submodule that runs a line on copies, and returns its results and the new content of each root.

    Results that alias operands are views of the roots, which the caller defines.
    """
    results = tuple([value for value in ir.defined(line) if line.alias_of(value) is None])
    inside = {value.name: Value(f"{value.name}_inside", value.type) for value in (*ir.used(line), *ir.defined(line))}
    in_memory = {value.name for memory in memories for value in memory.values}
    read = tuple({value.name: value for value in ir.reads(line) if value.name not in in_memory}.values())
    for value in read:
        if isinstance(value.type, ir.TensorType):
            inside[value.name] = Value(inside[value.name].name, _root_type(value))
    copied = [memory.root for memory in memories if memory.has_content]
    arguments = {root.name: Value(f"{root.name}_operand", _root_type(root)) for root in copied}
    lines: list[LineBase] = []
    for memory in memories:
        root = inside[memory.root.name] = Value(f"{memory.root.name}_copy", _root_type(memory.root))
        lines.append(Alloc(root))
        if memory.has_content:
            lines.append(Mutate((), "aten.copy_.default", (root, arguments[memory.root.name]), (root,)))
        lines += [View(inside[value.name], root) for value in memory.values if value.name != memory.root.name]
    lines.append(ir.map_line(line, lambda item: inside[item.name] if type(item) is Value else item))
    yielded = (*[inside[value.name] for value in results], *[inside[memory.root.name] for memory in memories])
    block_arguments = (*[inside[value.name] for value in read], *arguments.values())
    block = Block(block_arguments, (*[item.replace(origin=line.origin) for item in lines], Yield(yielded)))
    symbols = symbols_of(emitter, block)
    module = emitter.module(block, symbols, single=False, converter=FxConverter)
    _mark_copies(module, len(arguments))
    name = emitter.modules.add_module(id(block), "call_on_copies", module)
    items = (*results, *[memory.root for memory in memories])
    vals = tuple([emitter.fakes.root(value) for value in items])
    call = emitter.writer.call(name, operands_of(emitter, (*read, *copied), symbols), val=vals)
    for index, (value, val) in enumerate(zip(items, vals, strict=True)):
        emitter.writer.define(value, operator.getitem, [call, index], val=val)


def _root_type(value: Value) -> ir.TensorType:
    return replace(value.tensor_type, storage_offset=0)


def _mark_copies(module: GraphModule, count: int) -> None:
    copies = [node for node in module.graph.nodes if str(node.target) == "aten.copy_.default"]
    for node in copies[:count]:
        node.meta[COPY] = True
