"""Programs as functional FX graphs: kernels and operators return new tensors, and inputs are written at the end.

Each memory of the program (a root, or a slice of a pool) has a *holder*: the value whose node has its current content.
A write makes a new node, which becomes the holder if it covers the memory, and is scattered into it otherwise. Values
of older versions are regenerated from the holder at their next use, as torch's functionalisation does it. Memory that
nothing has written has no holder and no node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from fxwrap import lines, torch_compat
from fxwrap import wrapper_ir as ir
from fxwrap.converters.access_order import Accesses
from fxwrap.converters.fx import control, kernels
from fxwrap.converters.fx.converter import FxConverter
from fxwrap.converters.fx.copied_operands import WrittenMemory, call_on_copies
from fxwrap.converters.fx.metadata import FINAL_WRITE
from fxwrap.converters.fx.nodes import CallTarget
from fxwrap.converters.fx.view_scatters import scatter_into
from fxwrap.devices import FX, language_traits
from fxwrap.inference import CallInference, InferredResult, has_uncertain_layout
from fxwrap.wrapper_ir import Block, LineBase, TensorType, Value
from fxwrap.wrapper_ir.operators import operator_name

_ATEN = torch.ops.aten
_FXWRAP = torch.ops.fxwrap


@dataclass(eq=False)
class _Memory:
    """The content of one memory: how often it was written, and the value that holds it, None before any write."""

    root: Value
    holder: Value | None = None
    version: int = 0


class FunctionalConverter(FxConverter):
    """Emits the nodes of each line in functional form. Allocations and frees are not nodes."""

    def __init__(self, *arguments: object, **keywords: object) -> None:
        super().__init__(*arguments, **keywords)  # type: ignore[arg-type]
        self._memory: dict[str, _Memory] = {}  # by the name of each value in it
        self._versions: dict[str, int] = {}  # of the nodes of values
        self._definitions: dict[str, LineBase] = {}  # of values that alias another
        self._external: dict[str, Node] = {}  # inputs and constants
        self._written: list[Value] = []  # arguments that the block writes: it returns their new contents
        self._symbols: frozenset[str] | None = None  # those that lines use which have nodes

    @cached_property
    def inference(self) -> CallInference:
        """Infers the results of the operators that replace out variants."""
        return CallInference.for_program(self.program)

    def convert_block(self, block: Block) -> None:
        """Converts a block's lines."""
        arguments = ir.program_arguments(self.program) if block is self.program.body else block.arguments
        for value in arguments:
            if isinstance(value.type, TensorType):
                self._add_memory(value, holder=value)
                self._external[value.name] = self.writer.nodes[value.name]
        self._written = [] if block is self.program.body else _written_arguments(block)
        super().convert_block(block)

    def access_order(self, block: Block, arguments: Sequence[Value]) -> Mapping[int, Accesses]:
        """Returns none: operands determine the order."""
        return {}

    def _dispatch(self, line: LineBase) -> None:
        if not isinstance(line, lines.View | lines.PoolSlice | lines.ExtensionLine):
            for value in ir.reads(line):
                self.refresh(value)
        if isinstance(line, lines.Scatter | lines.IndexPut):
            self.refresh(line.target)
        super()._dispatch(line)
        for value in ir.defined(line):
            base = line.alias_of(value)
            if not isinstance(value.type, TensorType) or value.name in self._memory:
                continue
            if base is None:
                self._add_memory(value, holder=value)
            else:
                self._add_alias(value, base, line)

    # --- contents ---------------------------------------------------------------------------------------------------

    def _add_memory(self, root: Value, holder: Value | None) -> None:
        self._memory[root.name] = _Memory(root, holder)
        self._versions[root.name] = 0 if holder is not None else _STALE

    def _add_alias(self, value: Value, base: Value, line: LineBase) -> None:
        memory = self._memory[value.name] = self._memory[base.name]
        self._definitions[value.name] = line
        self._versions[value.name] = memory.version if value.name in self.writer.nodes else _STALE

    def refresh(self, value: Value) -> None:
        """Makes the node of a value one with the current content of its memory."""
        memory = self._memory.get(value.name)
        if memory is None or self._versions[value.name] == memory.version:
            return
        if memory.holder is None:
            self._allocate(memory)
        if self._versions[value.name] != memory.version:
            self._regenerate(value, memory)
            self._versions[value.name] = memory.version

    def _allocate(self, memory: _Memory) -> None:
        """Adds a node for memory that is read, or written in part, before it has content."""
        super().alloc(lines.Alloc(memory.root))
        memory.holder = memory.root
        self._versions[memory.root.name] = memory.version

    def _regenerate(self, value: Value, memory: _Memory) -> None:
        holder, definition = memory.holder, self._definitions.get(value.name)
        assert holder is not None
        if holder.type == value.type:
            self.writer.nodes[value.name] = self.writer.nodes[holder.name]
            self.fakes.view(value, holder, 0)
        elif holder.tensor_type.dtype == value.tensor_type.dtype:
            super().view(lines.View(value, holder, origin=self._origin()))
        elif isinstance(definition, lines.ExternCall) and all(definition.aliases):
            for base in ir.reads(definition):
                self.refresh(base)
            super().call(definition)
            for other in ir.defined(definition):
                self._versions[other.name] = memory.version
        else:
            raise self.unsupported(
                definition or lines.View(value, holder), "its base is written in another dtype; use the in-place form"
            )

    def _origin(self) -> ir.Origin | None:
        return None if self.writer.line is None else self.writer.line.origin

    def prepare_write(self, value: Value) -> bool:
        """Prepares for a new content of a value; returns whether the old content matters: it has any."""
        memory = self._memory[value.name]
        has_content = memory.holder is not None
        if not _covers(value.tensor_type, memory.root.tensor_type):
            self.refresh(memory.root)
        if has_content:
            self.refresh(value)
        return has_content

    def store(self, value: Value, node: Node) -> None:
        """Records a node as the new content of a value, and of its memory."""
        memory = self._memory[value.name]
        root = memory.root
        memory.version += 1
        self.writer.nodes[value.name] = node
        self._versions[value.name] = memory.version
        if _covers(value.tensor_type, root.tensor_type):
            memory.holder = value
            return
        self._versions[value.name] = _STALE  # it is a view of the memory
        node = scatter_into(self, root, value, node)
        self.writer.nodes[root.name] = node
        self._versions[root.name] = memory.version
        memory.holder = root

    # --- memory -----------------------------------------------------------------------------------------------------

    def alloc(self, line: lines.Alloc | lines.Reuse | lines.PoolSlice) -> None:
        self._add_memory(line.result, None)

    reuse = pool_slice = alloc

    def pool(self, line: lines.Pool) -> None:
        """Adds no node: each slice is a memory of its own."""

    def view(self, line: lines.View) -> None:
        self._add_alias(line.result, line.base, line)
        memory = self._memory[line.base.name]
        if memory.holder == line.base and line.base.type == line.result.type:  # another tensor of the same layout
            super().view(line)
            self._versions[line.result.name] = memory.version
        elif memory.holder is not None:
            self.refresh(line.result)

    def free(self, line: lines.Free) -> None:
        """Adds a node only where other streams use the memory; it names the tensor with the last content."""
        memory = self._memory.get(line.root.name)
        if memory is not None and memory.holder is not None and self.needs_release_node(line):
            arguments = [self.writer.nodes[memory.holder.name], line.root.tensor_type.device, line.stream]
            self.fxwrap_operator(line, _FXWRAP.record_stream.default, arguments)

    # --- kernels and operators --------------------------------------------------------------------------------------

    def launch(self, line: lines.Launch) -> None:
        if self._reads_other_operands(line):
            self._call_on_copies(line)
            return
        has_content = [self.prepare_write(value) for value in line.outs]
        results = kernels.launch_functional(self, line, has_content)
        for value, node in zip(line.outs, results, strict=True):
            self.store(value, node)

    def _reads_other_operands(self, line: lines.Launch) -> bool:
        """Whether a kernel reads memory that it writes by another operand.

        A region reads its operands before it writes.
        """
        language = self.kernels[line.kernel].language
        if language == FX.name:
            return False
        written = {self._memory[value.name].root.name: value for value in line.outs}
        is_triton = language_traits(language).is_triton
        for value in ir.reads(line):
            memory = self._memory.get(value.name)
            out = None if memory is None else written.get(memory.root.name)
            if out is not None and (is_triton or value != out):
                return True
        return False

    def _call_on_copies(self, line: LineBase) -> None:
        """Emits a call of a submodule that runs a line on copies of the memory that it writes."""
        memories: dict[str, WrittenMemory] = {}
        values = tuple(dict.fromkeys([value for value in ir.used(line) if value.name in self._memory]))
        for value in ir.writes(line):
            memory = self._memory[value.name]
            operands = tuple([item for item in values if self._memory[item.name] is memory])
            if any(item.tensor_type.dtype != memory.root.tensor_type.dtype for item in operands):
                raise self.unsupported(line, f"%{value.name} is written in another dtype; use the in-place form")
            memories[memory.root.name] = WrittenMemory(memory.root, memory.holder is not None, operands)
            if memory.holder is not None:
                self.refresh(memory.root)
        call_on_copies(self, line, tuple(memories.values()))
        for name, item in memories.items():
            self.store(item.root, self.writer.nodes[name])

    def call(self, line: lines.ExternCall | lines.Mutate) -> None:
        if isinstance(line, lines.Mutate):
            self.mutate(line)
        elif line.outs:
            self._out_call(line)
        else:
            super().call(line)

    def _out_call(self, line: lines.ExternCall) -> None:
        """Adds the call of the overload that returns new tensors, in place of the out variant."""
        target = torch_compat.functional_of_out_variant(line.target)
        if target is None:
            self._call_on_copies(line)
            return
        for value in line.outs:
            self.prepare_write(value)
        arguments, keywords = self._operands(line)
        results = self._results_of(target, line)
        plain = line.replace(results=results, outs=(), target=operator_name(target))
        self.writer.line = plain  # its metadata has the types of the results
        contents = {value.name: self.writer.nodes.get(value.name) for value in line.outs}
        self.results(plain, target, arguments, keywords)
        nodes = [self.writer.nodes[result.name] for result in results]
        self.writer.nodes.update({name: node for name, node in contents.items() if node is not None})
        for value, result, node in zip(line.outs, results, nodes, strict=True):
            is_certain = not has_uncertain_layout(target, plain, value.tensor_type)
            if is_certain and value.tensor_type.strides == result.tensor_type.strides:
                self.store(value, node)
            else:
                self.writer.line = line
                self._copy_into(value, node)

    def _results_of(self, target: torch_compat.OpOverload, line: lines.ExternCall) -> tuple[Value, ...]:
        """Returns the new results of a call, with the strides that the operator gives them."""
        inferred = self.inference.results(target, line.arguments, line.keywords)
        types = [item.type for item in ir.leaves(inferred) if isinstance(item, InferredResult)]
        return tuple([Value(value.name, type_) for value, type_ in zip(line.outs, types, strict=True)])

    def _copy_into(self, value: Value, node: Node) -> None:
        """Writes a new result into a value of another layout."""
        self._versions[value.name] = _STALE
        self.refresh(value)
        self._write(value, _ATEN.copy.default, [self.writer.nodes[value.name], node])

    def _operands(self, line: lines.ExternCall | lines.Mutate) -> tuple[list[object], dict[str, object]]:
        arguments = [self.writer.argument(item) for item in line.arguments]
        return arguments, {name: self.writer.argument(item) for name, item in line.keywords}

    def start_collective(self, line: lines.StartCollective) -> None:
        target = torch_compat.functional_of_in_place(line.operator) if line.writes else None
        if line.outs or (line.writes and target is None):
            raise self.unsupported(line, "the collective writes its operands; use the in-place form")
        written = line.writes
        if target is not None:
            line = line.replace(operator=operator_name(target), writes=(), aliases=())
        super().start_collective(line)
        for value, result in zip(written, ir.defined(line)):
            self.store(value, self.writer.nodes[result.name])

    def wait_collective(self, line: lines.WaitCollective) -> None:
        super().wait_collective(line)
        if self._memory[line.pending.name].root.name != line.pending.name:  # it ran in place
            self.store(line.pending, self.writer.nodes[line.result.name])

    def mutate(self, line: lines.ExternCall | lines.Mutate) -> None:
        assert isinstance(line, lines.Mutate)
        for value in line.writes:
            self.prepare_write(value)
        if self._overwrites_part(line):
            self.store(line.writes[0], self.writer.argument(line.arguments[1]))
            return
        target = torch_compat.functional_of_in_place(line.target)
        if target is None or len(line.writes) != 1 or any(line.aliases):
            self._mutate_several(line)
            return
        (written,) = line.writes
        arguments, keywords = self._operands(line)
        self._write(written, target, arguments, {**keywords, **_missing_arguments(line, target)})
        for result in ir.defined(line):
            self.writer.nodes[result.name] = self.writer.nodes[written.name]
            self.fakes.view(result, written, 0)

    def _overwrites_part(self, line: lines.Mutate) -> bool:
        """Whether a line copies a tensor into a part of a memory of the same type: it is scattered into it."""
        match line:
            case lines.Mutate(target="aten.copy_.default", arguments=(Value() as into, Value() as source)):
                old, new = into.tensor_type, source.tensor_type
                same = (old.dtype, old.sizes, old.device) == (new.dtype, new.sizes, new.device)
                return same and not line.keywords and not _covers(old, self._memory[into.name].root.tensor_type)
            case _:
                return False

    def _mutate_several(self, line: lines.Mutate) -> None:
        """Adds a call that returns the operator's results, then the new contents of the operands it writes."""
        overload = torch_compat.operator_overload(line.target)
        schema = ir.operator_schema(overload)
        arguments, keywords = self._operands(line)
        target: CallTarget | None = torch_compat.functional_of_mutating(line.target)
        results: tuple[Any, ...] = line.results
        if target is None and torch_compat.is_auto_functionalizable(overload):
            target, results = torch_compat.auto_functionalized, line.results or (None,)
            keywords = {**dict(zip(schema.argument_names, arguments, strict=False)), **keywords}
            keywords = {**dict.fromkeys(schema.mutated_arguments), **keywords}
            arguments = [overload]
        if target is None or any(line.aliases):
            if torch.Tag.inplace_view in overload.tags:
                reason = "it changes the shape of its operand, which the functional form cannot say"
                raise self.unsupported(line, f"{reason}; call the operator that returns a view")
            self._call_on_copies(line)
            return
        written = tuple([schema.operand(name, line.arguments, line.keywords) for name in schema.mutated_arguments])
        items = (*results, *written)
        vals = self._vals(line, items)
        node = self.writer.call(target, arguments, keywords, val=vals)
        self._unpack(items, node, vals)
        for value in ir.values_in(written):
            self.store(value, self.writer.nodes[value.name])

    def _write(
        self,
        value: Value,
        target: torch_compat.OpOverload,
        arguments: Sequence[object],
        keywords: Mapping[str, object] | None = None,
    ) -> None:
        """Adds the functional overload of a call that overwrites a value."""
        target = torch_compat.functional_of_in_place(str(target)) or target
        self.prepare_write(value)
        is_restrided = target is not _ATEN.copy.default  # other operators return memory without gaps
        val = self.fakes.root(Value(value.name, _without_gaps(value.tensor_type)) if is_restrided else value)
        self.store(value, self.writer.call(target, arguments, keywords, name=value.name, val=val))

    # --- symbols ----------------------------------------------------------------------------------------------------

    def let(self, line: lines.Let) -> None:
        """Defines a symbol, unless only the memory plan uses it."""
        if self._symbols is None:
            self._symbols = _needed_symbols(self.program)
        if line.symbol.name in self._symbols:
            super().let(line)

    # --- functions --------------------------------------------------------------------------------------------------

    def call_function(self, line: lines.CallFunction) -> None:
        """Adds the call of a function, which returns the new contents of the operands that it writes."""
        block = dict(self.program.functions)[line.function]
        written = {value.name for value in _written_arguments(block)}
        operands = [item for value, item in zip(block.arguments, line.operands, strict=True) if value.name in written]
        targets = [item for item in operands if isinstance(item, Value)]
        if not targets:
            control.call_function(self, line)
            return
        for value in targets:
            self.prepare_write(value)
        results = (*line.results, *[Value(value.name, value.type) for value in targets])
        control.call_function(self, line.replace(results=results, writes=()))
        for value in targets:
            self.store(value, self.writer.nodes[value.name])

    def yield_(self, line: lines.Yield) -> None:
        for value in self._written:
            self.refresh(value)
        super().yield_(line.replace(values=(*line.values, *self._written)))

    # --- the end ----------------------------------------------------------------------------------------------------

    def return_(self, line: lines.Return) -> None:
        """Copies new contents of inputs and constants into them, then returns."""
        mutable = [item.value for item in self.program.inputs if item.ownership is ir.Ownership.MUTABLE]
        mutable += [item.value for item in self.program.constants if item.mutable]
        for value in mutable:
            memory = self._memory.get(value.name) if isinstance(value, Value) else None
            if memory is None or memory.version == 0:
                continue
            root = memory.root
            self.refresh(root)
            target = self._external[root.name]
            node = self.writer.nodes[root.name]
            write = self.writer.call(_ATEN.copy_.default, [target, node], val=target.meta["val"])
            write.meta[FINAL_WRITE] = True
            self.writer.nodes[root.name] = target
            memory.holder = root
            memory.version += 1
            self._versions[root.name] = memory.version
        for value in ir.reads(line):
            self.refresh(value)
        super().return_(line)


class ExportedConverter(FunctionalConverter):
    """Emits functional graphs for `torch.export`, which cannot load torch's operator for Triton kernels."""

    launches_by_hash = True


_STALE = -1
"""The version of a node with an older content of its memory."""


def _written_arguments(block: Block) -> list[Value]:
    """Returns the arguments of a block that it writes."""
    root_of = ir.alias_roots(block.lines, block.arguments)
    written = {root_of[value.name] for line in block.lines for value in ir.writes(line) if value.name in root_of}
    return [value for value in block.arguments if value.name in written]


def _covers(type_: TensorType, memory: TensorType) -> bool:
    """Whether a value has every element of its memory, in any order."""
    if type_.sizes == memory.sizes and type_.strides == memory.strides:
        return type_.storage_offset == memory.storage_offset
    return (
        type_.storage_offset == memory.storage_offset
        and type_.storage_bytes == memory.storage_bytes
        and type_.element_count == memory.element_count
    )


def _without_gaps(type_: TensorType) -> TensorType:
    """Returns the type of a copy of a tensor: its dimensions keep their order in memory."""
    if type_.storage_bytes == type_.element_count * type_.dtype.itemsize or not type_.is_static:
        return type_
    strides, step = [0] * len(type_.sizes), 1
    for dim in sorted(range(len(strides)), key=lambda dim: (int(type_.strides[dim]), -dim)):
        strides[dim], step = step, step * int(type_.sizes[dim])
    return replace(type_, strides=tuple(strides), storage_offset=0)


def _missing_arguments(line: lines.Mutate, target: torch_compat.OpOverload) -> dict[str, object]:
    """Returns the defaults of an in-place operator for arguments that its functional overload requires."""
    defaults = torch_compat.operator_arguments(line.target) or {}
    required = torch_compat.operator_arguments(operator_name(target)) or {}
    names = {*[name for name, _ in line.keywords], *list(defaults)[: len(line.arguments)]}
    return {
        name: defaults[name] for name, default in required.items()
        if default is torch_compat.REQUIRED and name not in names
    }  # fmt: skip


def _needed_symbols(program: ir.Program) -> frozenset[str]:
    """Returns the names of the symbols that lines other than those of a memory plan use."""
    lets: dict[str, lines.Let] = {}
    pending: list[str] = []
    for line in program.lines():
        match line:
            case lines.Let():
                lets[line.symbol.name] = line
            case lines.Pool():
                pass
            case lines.PoolSlice():
                pending += [symbol.name for symbol in ir.type_symbols(line.result.type)]
            case _:
                pending += [symbol.name for symbol in ir.symbols_used(line, *ir.Role)]
    needed: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in needed:
            needed.add(name)
            let = lets.get(name)
            pending += [] if let is None else [symbol.name for symbol in ir.symbols_used(let, *ir.Role)]
    return frozenset(needed)
