"""Programs as FX graphs of ordinary operators; `docs/fx_form.md` says what each line becomes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule

from fxwrap.converters import fx_control, fx_kernels
from fxwrap.converters.base import Converter, Handler
from fxwrap.converters.fx_code import DirectCode
from fxwrap.converters.fx_module import EmittedGraph as EmittedGraph
from fxwrap.converters.fx_module import ProgramModule
from fxwrap.converters.fx_nodes import GraphWriter, given_back
from fxwrap.converters.fx_types import VIEWS
from fxwrap.converters.fx_values import ExampleValues, FakeValues
from fxwrap.converters.views import view_form
from fxwrap.lines import (
    SCATTER_OPERATORS,
    Alloc,
    Assert,
    Bind,
    Call,
    CallFunction,
    CheckLayout,
    Comment,
    Cond,
    EnterDevice,
    EnterRange,
    ExchangeState,
    ExitDevice,
    ExitRange,
    ExtensionLine,
    Free,
    IndexPut,
    Item,
    Launch,
    Let,
    Map,
    Mutate,
    Pool,
    PoolSlice,
    RecordEvent,
    RestoreState,
    Return,
    Reuse,
    SaveState,
    Scan,
    Scatter,
    SizeOf,
    StartCollective,
    View,
    WaitCollective,
    WaitEvent,
    While,
    Workspace,
    Yield,
)  # fmt: skip
from fxwrap.symbolic import SymbolInfo, floor_divide, make_symbol
from fxwrap.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    operator_overload,
    out_argument_names,
    without_fake_mode,
)
from fxwrap.wrapper_ir import Block, LineBase, ListType, Program, TensorType, Value, element_type, symbol_infos

_ATEN = torch.ops.aten
_OURS = torch.ops.fxwrap


class FxConverter(Converter):
    """Writes the nodes of one block; nested blocks become submodules. Frees are no nodes."""

    name: ClassVar[str] = "fx"

    def __init__(
        self,
        program: Program,
        fakes: FakeValues,
        handlers: Mapping[type[ExtensionLine], Handler] | None = None,
        *,
        plain: bool = False,
    ) -> None:
        super().__init__(handlers)
        self.program = program
        self.fakes = fakes
        self.plain = plain
        self.writer = GraphWriter(fakes)
        self.modules = fx_control.Modules()
        self.lone_output = False
        self.kernels = {kernel.name: kernel for kernel in program.kernels}
        self._ranges: list[torch.fx.Node] = []

    def lines(self, block: Block) -> None:
        """Converts a block's lines."""
        for line in block.lines:
            self.writer.begin(line)
            self.convert(line)

    def nested(self) -> FxConverter:
        """Returns a converter for a block inside this one, which shares its submodules."""
        inner = FxConverter(self.program, self.fakes, self.handlers, plain=self.plain)
        inner.modules = fx_control.Modules(self.modules.of_block)
        return inner

    def module(self, block: Block, symbols: Sequence[str], lone: bool) -> GraphModule:
        """Returns a block as a module of its own, which takes its arguments, then these symbols.

        With `lone` it gives its only result by itself, not in a tuple.
        """
        for value in block.arguments:
            self.writer.placeholder(value, self.fakes.root(value))
        for name in symbols:
            info = SymbolInfo(name)
            self.writer.placeholder(info, self.fakes.symbol(info))
        self.lone_output = lone
        self.lines(block)
        self.writer.graph.set_codegen(DirectCode())
        return GraphModule(self.modules.attributes, self.writer.graph)

    # --- nodes ------------------------------------------------------------------------------------------------------

    def ours(self, line: LineBase, target: Any, arguments: Sequence[Any], **wishes: Any) -> torch.fx.Node:
        """Adds a call of an operator of the library `fxwrap::`."""
        if self.plain:
            raise self.unsupported(line, f"it needs the operator {target}, and a plain graph has only ATen's")
        return self.writer.call(target, arguments, **wishes)

    def _make(self, value: Value, target: Any, arguments: Sequence[Any], keywords: Any = None) -> None:
        """Adds a call whose result is a new root."""
        val = self.fakes.root(value)
        self.writer.nodes[value.name] = self.writer.call(target, arguments, keywords, name=value.name, val=val)

    # --- memory -----------------------------------------------------------------------------------------------------

    def alloc(self, line: Alloc) -> None:
        type_ = line.result.tensor_type
        keywords = {"dtype": type_.dtype, "device": type_.device}
        self._make(line.result, _ATEN.empty_strided.default, self.writer.layout(type_), keywords)

    def free(self, line: Free) -> None:
        if self.waits_for(line):
            arguments = [self.writer.argument(line.root), line.root.tensor_type.device, line.stream]
            self.ours(line, _OURS.record_stream.default, arguments)

    def reuse(self, line: Reuse) -> None:
        type_ = line.result.tensor_type
        arguments = [self.writer.argument(line.root), *self.writer.layout(type_), type_.dtype]
        val = self.fakes.window(line.result, line.root, 0)
        node = self.ours(line, _OURS.reuse.default, arguments, name=line.result.name, val=val)
        self.writer.nodes[line.result.name] = node

    def view(self, line: View) -> None:
        base_type, type_ = line.base.tensor_type, line.result.tensor_type
        base = self.writer.argument(line.base)
        form = view_form(base_type, type_)
        offset = type_.storage_offset - base_type.storage_offset
        if form.kind == "as_strided":
            target, arguments = _ATEN.as_strided.default, [base, *self.writer.layout(type_), *self._place(base, offset)]
        else:
            target, arguments = VIEWS[form.kind], [base, *[self.writer.argument(item) for item in form.arguments]]
        val = self.fakes.window(line.result, line.base, offset)
        self.writer.nodes[line.result.name] = self.writer.call(target, arguments, name=line.result.name, val=val)

    def _place(self, base: torch.fx.Node, offset: Any) -> list[Any]:
        """Returns the storage offset of a window; none where it starts where its base does."""
        if offset == 0:
            return []
        own = self.writer.call(_ATEN.sym_storage_offset.default, [base], val=base.meta["val"].storage_offset())
        return [self.writer.apply(operator.add, own, self.writer.argument(offset))]

    def pool(self, line: Pool) -> None:
        type_ = line.result.tensor_type
        arguments = [self.writer.argument(type_.sizes[0]), type_.device]
        self._memory(line, line.result, _OURS.pool.default, arguments)

    def _memory(self, line: LineBase, result: Value, target: Any, arguments: Sequence[Any]) -> None:
        node = self.ours(line, target, arguments, name=result.name, val=self.fakes.root(result))
        self.writer.nodes[result.name] = node

    def pool_slice(self, line: PoolSlice) -> None:
        type_ = line.result.tensor_type
        arguments = [
            self.writer.argument(line.pool), self.writer.argument(line.offset), *self.writer.layout(type_), type_.dtype
        ]  # fmt: skip
        val = self.fakes.window(line.result, line.pool, floor_divide(line.offset, type_.dtype.itemsize))
        node = self.ours(line, _OURS.pool_slice.default, arguments, name=line.result.name, val=val)
        self.writer.nodes[line.result.name] = node

    def workspace(self, line: Workspace) -> None:
        type_ = line.result.tensor_type
        arguments = [self.writer.argument(type_.sizes[0]), line.zeroed, type_.device]
        self._memory(line, line.result, _OURS.workspace.default, arguments)

    # --- kernels and operators --------------------------------------------------------------------------------------

    def launch(self, line: Launch) -> None:
        fx_kernels.launch(self, line)

    def call(self, line: Call) -> None:
        if not line.outs:
            self._operator(line)
            return
        outs = zip(out_argument_names(line.target), line.outs, strict=True)
        self._operator(line, {name: self.writer.argument(out) for name, out in outs})

    def mutate(self, line: Mutate) -> None:
        self._operator(line)

    def _operator(self, line: Call | Mutate, outs: Mapping[str, Any] | None = None) -> None:
        arguments = [self.writer.argument(item) for item in line.arguments]
        keywords = {name: self.writer.argument(item) for name, item in line.keywords}
        self.results(line, operator_overload(line.target), arguments, {**keywords, **(outs or {})})

    def results(
        self, line: LineBase, target: Any, arguments: Sequence[Any], keywords: Mapping[str, Any] | None = None
    ) -> None:
        """Adds a call whose results are the line's: one, or several to be taken out of a tuple or a list."""
        results: tuple[Any, ...] = line.results  # type: ignore[attr-defined]
        if not results:
            val = given_back(target, arguments, keywords or {})
            self.writer.call(target, arguments, keywords, val=val)
        elif len(results) == 1 and isinstance(results[0], Value):
            value = results[0]
            val = self._result_val(line, value)
            self.writer.nodes[value.name] = self.writer.call(target, arguments, keywords, name=value.name, val=val)
        else:
            items = results[0] if len(results) == 1 and results[0] is not None else results
            self.take_results(line, items, target, arguments, keywords)

    def take_results(
        self,
        line: LineBase,
        items: tuple[Any, ...],
        target: Any,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any] | None = None,
    ) -> None:
        """Adds a call that gives a tuple or a list, and takes what the line defines out of it."""
        vals = self._vals(line, items)
        node = self.writer.call(target, arguments, keywords, val=vals)
        self._take(items, node, vals)

    def _vals(self, line: LineBase, items: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([self._vals(line, i) if isinstance(i, tuple) else self._result_val(line, i) for i in items])

    def _result_val(self, line: LineBase, value: Value | None) -> Any:
        if value is None:
            return None
        base = line.alias_of(value)
        if base is None or not isinstance(value.type, TensorType):
            return self.fakes.root(value)
        offset = value.type.storage_offset
        if base.tensor_type.dtype.itemsize == value.type.dtype.itemsize:
            offset = offset - base.tensor_type.storage_offset
        return self.fakes.window(value, base, offset)

    def _take(self, items: tuple[Any, ...], node: torch.fx.Node, vals: tuple[Any, ...]) -> None:
        for index, (item, val) in enumerate(zip(items, vals, strict=True)):
            if item is None:
                continue
            name = item.name if isinstance(item, Value) else None
            taken = self.writer.call(operator.getitem, [node, index], name=name, val=val)
            if isinstance(item, Value):
                self.writer.nodes[item.name] = taken
            else:
                self._take(item, taken, val)

    def scatter(self, line: Scatter) -> None:
        target, index = self.writer.argument(line.target), self.writer.argument(line.index)
        source = self.writer.argument(line.source)
        with_tensor, with_number = SCATTER_OPERATORS[line.reduce]
        form = with_tensor if isinstance(line.source, Value) else with_number
        if not form:
            dtype, index_type = line.target.tensor_type.dtype, line.index.tensor_type
            val = self.fakes.root(Value("", TensorType.contiguous(dtype, index_type.sizes, index_type.device)))
            source = self.writer.call(_ATEN.full_like.default, [index, source], {"dtype": dtype}, val=val)
        arguments: list[Any] = [target, line.dim, index, source]
        keywords: dict[str, Any] = {}
        if with_tensor.endswith(".two"):
            arguments, keywords = [*arguments, line.reduce], {"include_self": line.include_self}
        elif line.reduce:
            keywords = {"reduce": line.reduce}
        self.writer.call(operator_overload(form or with_tensor), arguments, keywords, val=target.meta["val"])

    def index_put(self, line: IndexPut) -> None:
        arguments = [self.writer.argument(item) for item in (line.target, line.indices, line.values)]
        self.writer.call(_ATEN.index_put_.default, [*arguments, line.accumulate], val=arguments[0].meta["val"])

    # --- symbols ----------------------------------------------------------------------------------------------------

    def size(self, line: SizeOf) -> None:
        tensor = self.writer.argument(line.tensor)
        if line.rank:
            self.ours(line, _OURS.check_rank.default, [tensor, line.tensor.name, line.rank])
        arguments = [tensor] if line.of == "storage_offset" else [tensor, line.dim]
        val = self.fakes.symbol(line.symbol)
        self.writer.symbol(line.symbol, self.writer.call(_SIZES[line.of], arguments, name=line.symbol.name, val=val))

    def let(self, line: Let) -> None:
        self.fakes.define(make_symbol(line.symbol.name), self.writer.named_number(line.symbol, line.expr).meta["val"])

    def item(self, line: Item) -> None:
        val = self.fakes.symbol(line.symbol)
        tensor = self.writer.argument(line.tensor)
        node = self.writer.call(_ATEN._local_scalar_dense.default, [tensor], name=line.symbol.name, val=val)
        self.writer.symbol(line.symbol, node)

    def bind(self, line: Bind) -> None:
        node, type_ = self.writer.argument(line.source), line.source.type
        for step in line.path:
            match step.name:
                case "size" | "stride" | "storage_offset":
                    val = _READ[step.name](node.meta["val"], *step.arguments)
                    node = self.writer.call(_SIZES[step.name], [node, *step.arguments], val=val)
                case "element":
                    type_ = element_type(type_) if isinstance(type_, ListType) else type_
                    val = self.fakes.root(Value("", type_))
                    node = self.writer.call(operator.getitem, [node, *step.arguments], val=val)
                case "divide":
                    node = self.writer.apply(operator.floordiv, node, step.arguments[0])
                case _:
                    node = self.writer.apply(torch.sym_int, node)
        self.writer.symbol(line.symbol, node)
        node.meta["val"] = self.fakes.symbol(line.symbol)

    def assertion(self, line: Assert) -> None:
        condition = self.writer.number(line.condition)
        if line.error == "RuntimeError" and line.shown is None:
            self.writer.call(_ATEN._assert_scalar.default, [condition, line.text])
            return
        shown = None if line.shown is None else self.writer.number(line.shown)
        self.ours(line, _OURS.require.default, [condition, line.text, line.error, shown])

    # --- control ----------------------------------------------------------------------------------------------------

    def cond(self, line: Cond) -> None:
        fx_control.cond(self, line)

    def while_(self, line: While) -> None:
        fx_control.while_loop(self, line)

    def scan(self, line: Scan) -> None:
        fx_control.scan(self, line)

    def map(self, line: Map) -> None:
        fx_control.map_over(self, line)

    def call_function(self, line: CallFunction) -> None:
        fx_control.call_function(self, line)

    def yield_(self, line: Yield) -> None:
        self._output(line.values)

    def return_(self, line: Return) -> None:
        self._output(line.values)

    def _output(self, values: tuple[Any, ...]) -> None:
        given = tuple([self.writer.argument(item) for item in values])
        vals = tuple([item.meta["val"] if isinstance(item, torch.fx.Node) else item for item in given])
        if self.lone_output:
            self.writer.node("output", "output", [given[0]], {}, None, vals[0])
        else:
            self.writer.node("output", "output", [given], {}, None, vals)

    # --- the world --------------------------------------------------------------------------------------------------

    def save_state(self, line: SaveState) -> None:
        self._memory(line, line.result, _OURS.random_state.default, [torch.device(line.device)])

    def restore_state(self, line: RestoreState) -> None:
        arguments = [self.writer.argument(line.state), torch.device(line.device)]
        self.ours(line, _OURS.set_random_state.default, arguments)

    def exchange_state(self, line: ExchangeState) -> None:
        arguments = [self.writer.argument(line.generator), torch.device(line.device)]
        self.ours(line, _OURS.exchange_random_state.default, arguments)

    def enter_device(self, line: EnterDevice) -> None:
        self.ours(line, _OURS.enter_device.default, [torch.device(line.device), *_stream(line)])

    def exit_device(self, line: ExitDevice) -> None:
        self.ours(line, _OURS.exit_device.default, [torch.device(line.device), *_stream(line)])

    def check_layout(self, line: CheckLayout) -> None:
        type_ = line.expected
        tensor = self.writer.argument(line.tensor)
        layout = self.writer.layout(type_)
        arguments = [tensor, line.name or line.tensor.name, type_.dtype, *layout, type_.device, line.alignment]
        self.ours(line, _OURS.check_layout.default, arguments)

    def comment(self, line: Comment) -> None:
        self.writer.comments.append(line.text)

    def enter_range(self, line: EnterRange) -> None:
        self._ranges.append(self.writer.call(torch.ops.profiler._record_function_enter_new.default, [line.name, None]))

    def exit_range(self, line: ExitRange) -> None:
        self.writer.call(torch.ops.profiler._record_function_exit._RecordFunction, [self._ranges.pop()])

    def record_event(self, line: RecordEvent) -> None:
        arguments = [torch.device(line.device), line.stream, *([line.event] if line.event else [])]
        val = self.fakes.root(Value(line.result.name, _TOKEN))
        node = self.ours(line, _OURS.record_event.default, arguments, name=line.result.name, val=val)
        self.writer.nodes[line.result.name] = node

    def wait_event(self, line: WaitEvent) -> None:
        arguments = [self.writer.argument(line.event), torch.device(line.device), line.stream]
        self.ours(line, _OURS.wait_event.default, arguments)

    def start_collective(self, line: StartCollective) -> None:
        self.results(line, operator_overload(line.operator), [self.writer.argument(item) for item in line.arguments])

    def wait_collective(self, line: WaitCollective) -> None:
        target = operator_overload("_c10d_functional.wait_tensor.default")
        val = self.fakes.window(line.result, line.pending, 0)
        pending = self.writer.argument(line.pending)
        self.writer.nodes[line.result.name] = self.writer.call(target, [pending], name=line.result.name, val=val)


_SIZES = {
    "size": _ATEN.sym_size.int,
    "stride": _ATEN.sym_stride.int,
    "storage_offset": _ATEN.sym_storage_offset.default,
}

_TOKEN = TensorType.contiguous(torch.int64, (0,), torch.device("cpu"))
"""What stands for an event in a graph."""


def _stream(line: EnterDevice | ExitDevice) -> list[int]:
    return [line.stream] if line.stream else []


_READ: dict[str, Callable[..., Any]] = {
    "size": lambda tensor, dim: tensor.shape[dim],
    "stride": lambda tensor, dim: tensor.stride()[dim],
    "storage_offset": lambda tensor: tensor.storage_offset(),
}


def to_fx(
    program: Program,
    *,
    plain: bool = False,
    handlers: Mapping[type[ExtensionLine], Handler] | None = None,
    fake_mode: FakeTensorMode | None = None,
    fake_inputs: Mapping[str, FakeTensor] | None = None,
    tracing: bool = True,
) -> EmittedGraph:
    """Returns the program as an FX graph of ordinary operators.

    Args:
        program: a verified program.
        plain: whether only ATen's and torch's higher-order operators may be called.
        handlers: how lines of vendors' own are written, by default what registered devices say; without one, such a
            line is written as what it expands to.
        fake_mode: the mode that the fake tensors in `meta["val"]` belong to; else that of `fake_inputs`, or a new one.
        fake_inputs: by the program's names, fake tensors of that mode that become the inputs' `meta["val"]`.
        tracing: whether torch's tracing may be imported for `meta["val"]`, which takes seconds. Without, there are
            tensors of the device "meta" and examples of numbers; the graph is the same.

    Raises Unsupported for a line that has no FX form yet, or none of ATen's with `plain`.
    """
    given = fake_inputs or {}
    known_mode = fake_mode or next((fake.fake_mode for fake in given.values()), None)
    with without_fake_mode():
        fakes = FakeValues(known_mode) if tracing else ExampleValues()
        converter = FxConverter(program, fakes, handlers, plain=plain)
        _inputs(converter, given)
        _constants(converter)
        converter.lines(program.body)
        graph = converter.writer.graph
        graph.set_codegen(DirectCode())
        made = ProgramModule(converter.modules.attributes, graph, "ProgramModule")
    made.meta["fxwrap"] = {
        "name": program.name,
        "header": program.header,
        "kernels": {kernel.hash: kernel for kernel in program.kernels},
        "symbols": symbol_infos(program),
    }
    return EmittedGraph(program, made)


def _inputs(converter: FxConverter, given: Mapping[str, FakeTensor]) -> None:
    writer, fakes = converter.writer, converter.fakes
    for item in converter.program.inputs:
        if isinstance(item.value, SymbolInfo):
            node = writer.placeholder(item.value, fakes.symbol(item.value))
        elif item.name in given and given[item.name].fake_mode is fakes.mode:
            node = writer.placeholder(item.value, fakes.given(item.value, given[item.name]))
        else:
            node = writer.placeholder(item.value, fakes.root(item.value))
        node.meta["fxwrap_ownership"] = item.ownership.value


def _constants(converter: FxConverter) -> None:
    for constant in converter.program.constants:
        name = converter.modules.add(constant.value.name, converter.program.store.tensors[constant.value.name])
        val = converter.fakes.root(constant.value)
        node = converter.writer.node("get_attr", name, (), {}, name, val)
        node.meta["fxwrap_mutable"] = constant.mutable
        node.meta["fxwrap_type"] = constant.value.type
        converter.writer.nodes[constant.value.name] = node
