"""The state of emitting one FX graph, and the calls with several results that many lines are written as."""

from __future__ import annotations

import keyword
import operator
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from torch.fx import GraphModule, Node

from fxwrap.converters.access_order import Accesses, access_order
from fxwrap.converters.base import Converter, Handler
from fxwrap.converters.fx.codegen import DirectCode
from fxwrap.converters.fx.nodes import CallTarget, GraphWriter, fake_returned_operands
from fxwrap.inference import FakeValues
from fxwrap.lines import ExtensionLine
from fxwrap.symbolic import SymbolInfo
from fxwrap.wrapper_ir import (
    Block,
    LineBase,
    Program,
    Size,
    TensorType,
    Value,
    multi_stream_roots,
    program_arguments,
    symbol_infos,
)


class SubmoduleTable:
    """The attributes of an emitted module by name: constants, and the submodules of nested blocks and of regions.

    `by_key` has the submodules of the whole program by their block's id or their kernel's hash: all calls of a function
    or of a region share one module.
    """

    def __init__(self, by_key: dict[int | str, GraphModule] | None = None) -> None:
        self.attributes: dict[str, Any] = {}
        self.by_key = {} if by_key is None else by_key
        self._names: dict[int | str, str] = {}

    def add(self, name_hint: str, attribute: object) -> str:
        """Adds an attribute and returns its name, derived from the hint."""
        base = "".join([letter if letter.isalnum() else "_" for letter in name_hint])
        base = base if base[:1].isalpha() or base[:1] == "_" else f"_{base}"
        name, count = base, 0
        while name in self.attributes or keyword.iskeyword(name) or hasattr(GraphModule, name):
            name, count = f"{base}_{count}", count + 1
        self.attributes[name] = attribute
        return name

    def name_of(self, key: int | str) -> str | None:
        """Returns the name of a submodule, None if it is not emitted yet."""
        return self._names.get(key)

    def add_module(self, key: int | str, label: str, module: GraphModule) -> str:
        """Adds the submodule of a block or region and returns its name."""
        self.by_key[key] = module
        name = self._names[key] = self.add(label, module)
        return name


class GraphEmitter(Converter):
    """Emits the nodes of one block; nested blocks become submodules."""

    name: ClassVar[str] = "fx"
    launches_by_hash: ClassVar[bool] = False
    """Whether Triton kernels are launched by fxwrap's operator, too."""

    def __init__(
        self,
        program: Program,
        fakes: FakeValues,
        handlers: Mapping[type[ExtensionLine], Handler] | None = None,
        *,
        aten_only: bool = False,
    ) -> None:
        super().__init__(handlers)
        self.program = program
        self.fakes = fakes
        self.aten_only = aten_only
        self.writer = GraphWriter(fakes)
        self.modules = SubmoduleTable()
        self.single_output = False
        self.multi_stream_roots: frozenset[str] = frozenset()
        self.kernels = {kernel.name: kernel for kernel in program.kernels}

    @cached_property
    def symbol_infos(self) -> dict[str, SymbolInfo]:
        """The declarations of the program's symbols."""
        return symbol_infos(self.program)

    def convert_block(self, block: Block) -> None:
        """Converts a block's lines."""
        self.multi_stream_roots = multi_stream_roots(block.lines, [*program_arguments(self.program), *block.arguments])
        arguments = program_arguments(self.program) if block is self.program.body else block.arguments
        accesses = self.access_order(block, arguments)
        for line in block.lines:
            self.writer.line, self.writer.accesses = line, accesses.get(id(line))
            self.convert(line)

    def access_order(self, block: Block, arguments: Sequence[Value]) -> Mapping[int, Accesses]:
        """Returns the accesses of memory that nodes record, by the id of their line."""
        return access_order(block.lines, arguments)

    def module(
        self, block: Block, symbols: Sequence[str], single: bool, converter: type[GraphEmitter] | None = None
    ) -> GraphModule:
        """Returns a nested block as a module that takes its arguments, then these symbols.

        With `single` it returns its only result, not a tuple. `converter` emits it, by default one of this class.
        """
        inner = (converter or type(self))(self.program, self.fakes, self.handlers, aten_only=self.aten_only)
        inner.modules = SubmoduleTable(self.modules.by_key)
        inner.symbol_infos = self.symbol_infos
        for value in block.arguments:
            inner.writer.placeholder(value, self.fakes.root(value))
        for name in symbols:
            info = SymbolInfo(name)
            inner.writer.placeholder(info, self.fakes.symbol(info))
        inner.single_output = single
        inner.convert_block(block)
        inner.writer.graph.set_codegen(DirectCode())
        return GraphModule(inner.modules.attributes, inner.writer.graph)

    def fxwrap_operator(
        self,
        line: LineBase,
        target: CallTarget,
        arguments: Sequence[object],
        keywords: Mapping[str, object] | None = None,
        *,
        name: str | None = None,
        val: object = None,
    ) -> Node:
        """Adds a call of an operator of the library `fxwrap::`."""
        if self.aten_only:
            raise self.unsupported(line, f"it needs the operator {target}, and a plain graph has only ATen's")
        return self.writer.call(target, arguments, keywords, name=name, val=val)

    # --- results ----------------------------------------------------------------------------------------------------

    def results(
        self,
        line: LineBase,
        target: CallTarget,
        arguments: Sequence[object],
        keywords: Mapping[str, object] | None = None,
    ) -> None:
        """Adds a call with the line's results: none, one, or the items of a tuple or list."""
        results: tuple[Any, ...] = line.results  # type: ignore[attr-defined]
        if not results:
            val = fake_returned_operands(target, arguments, keywords or {})
            self.writer.call(target, arguments, keywords, val=val)
        elif len(results) == 1 and isinstance(results[0], Value):
            value = results[0]
            self.writer.define(value, target, arguments, keywords, val=self._result_val(line, value))
        else:
            items = results[0] if len(results) == 1 and results[0] is not None else results
            self.unpack_results(line, items, target, arguments, keywords)

    def unpack_results(
        self,
        line: LineBase,
        items: tuple[Any, ...],
        target: CallTarget,
        arguments: Sequence[object],
        keywords: Mapping[str, object] | None = None,
    ) -> None:
        """Adds a call that returns a tuple or list, and a `getitem` node for each result of the line."""
        vals = self._vals(line, items)
        node = self.writer.call(target, arguments, keywords, val=vals)
        self._unpack(items, node, vals)

    def _vals(self, line: LineBase, items: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([self._vals(line, i) if isinstance(i, tuple) else self._result_val(line, i) for i in items])

    def _result_val(self, line: LineBase, value: Value | None) -> object:
        if value is None:
            return None
        base = line.alias_of(value)
        if base is None or not isinstance(value.type, TensorType):
            return self.fakes.root(value)
        offset: Size = value.type.storage_offset
        if base.tensor_type.dtype.itemsize == value.type.dtype.itemsize:
            offset = offset - base.tensor_type.storage_offset
        return self.fakes.view(value, base, offset)

    def _unpack(self, items: tuple[Any, ...], node: Node, vals: tuple[Any, ...]) -> None:
        for index, (item, val) in enumerate(zip(items, vals, strict=True)):
            if isinstance(item, Value):
                self.writer.define(item, operator.getitem, [node, index], val=val)
            elif item is not None:
                self._unpack(item, self.writer.call(operator.getitem, [node, index], val=val), val)
