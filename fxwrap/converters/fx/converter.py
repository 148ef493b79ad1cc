"""Programs as FX graphs of ordinary operators; `docs/fx_form.md` has the form of each line."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from fxwrap import lines, torch_compat
from fxwrap.converters.base import Handler
from fxwrap.converters.fx import control, kernels
from fxwrap.converters.fx.emitter import GraphEmitter
from fxwrap.converters.fx.nodes import CallTarget
from fxwrap.converters.view_chains import ViewStep, view_chain
from fxwrap.converters.view_operators import VIEW_OVERLOADS
from fxwrap.converters.views import detached_results
from fxwrap.inference import FakeValues
from fxwrap.symbolic import difference, floor_divide, make_symbol
from fxwrap.torch_compat import OpOverload
from fxwrap.wrapper_ir import LineBase, ListType, Program, Size, TensorType, Value, element_type, program_arguments

_ATEN = torch.ops.aten
_FXWRAP = torch.ops.fxwrap


class FxConverter(GraphEmitter):
    """Emits the nodes of each line. Frees are not nodes."""

    def __init__(
        self,
        program: Program,
        fakes: FakeValues,
        handlers: Mapping[type[lines.ExtensionLine], Handler] | None = None,
        *,
        aten_only: bool = False,
    ) -> None:
        super().__init__(program, fakes, handlers, aten_only=aten_only)
        self._ranges: list[Node] = []

    launch = kernels.launch
    cond = control.cond
    while_ = control.while_loop
    scan = control.scan
    map = control.map_over
    call_function = control.call_function

    # --- memory -----------------------------------------------------------------------------------------------------

    def alloc(self, line: lines.Alloc) -> None:
        type_ = line.result.tensor_type
        keywords = {"dtype": type_.dtype, "device": type_.device}
        layout, val = self.writer.layout(type_), self.fakes.root(line.result)
        if (group := type_.symmetric_group) is not None:
            arguments = (*layout, *keywords.values(), group)
            self.writer.define(line.result, _FXWRAP.allocate_symmetric.default, arguments, {}, val=val)
            return
        self.writer.define(line.result, _ATEN.empty_strided.default, layout, keywords, val=val)

    def needs_release_node(self, line: lines.Free) -> bool:
        """Whether several streams use the memory, so that its release has a place of its own."""
        return self.needs_record_stream(line) or line.root.name in self.multi_stream_roots

    def free(self, line: lines.Free) -> None:
        if self.needs_release_node(line):
            arguments = [self.writer.argument(line.root), line.root.tensor_type.device, line.stream]
            self.fxwrap_operator(line, _FXWRAP.record_stream.default, arguments)

    def reuse(self, line: lines.Reuse) -> None:
        type_ = line.result.tensor_type
        arguments = [self.writer.argument(line.root), *self.writer.layout(type_), type_.dtype]
        val = self.fakes.view(line.result, line.root, 0)
        self._define(line, line.result, _FXWRAP.reuse.default, arguments, val)

    def view(self, line: lines.View) -> None:
        """Adds the shortest chain of view operators; each node has a line of its own."""
        base, type_ = line.base, line.result.tensor_type
        *steps, last = view_chain(base.tensor_type, type_, self.symbol_infos)
        for number, step in enumerate(steps):
            result = Value(f"{line.result.name}.{number}", step.result_type(type_))
            view = lines.View(result, base, origin=line.origin)
            node = self._view(view, step, f"{line.result.name}_{step.operator.kind}")
            node.meta["fxwrap_chain_step"] = True
            base = result
        self._view(line if not steps else dataclasses.replace(line, base=base), last, line.result.name)

    def _view(self, line: lines.View, step: ViewStep, name_hint: str) -> Node:
        operator_, base, type_ = step.operator, self.writer.argument(line.base), line.result.tensor_type
        offset = difference(type_.storage_offset, line.base.tensor_type.storage_offset)
        if operator_.kind == "as_strided":
            arguments = [base, *self.writer.layout(type_), *self.offset_arguments(base, offset)]
        else:
            arguments = [base, *[self.writer.argument(item) for item in operator_.arguments]]
        val = self.fakes.view(line.result, line.base, offset)
        node = self.writer.call(VIEW_OVERLOADS[operator_.kind], arguments, name=name_hint, val=val)
        node.meta["fxwrap_line"] = line
        if operator_.kind == "as_strided":
            node.meta["fxwrap_as_strided"] = f"no chain of view operators: {step.reason}"
        self.writer.nodes[line.result.name] = node
        return node

    def offset_arguments(self, base: Node, offset: Size) -> list[object]:
        """Returns the storage offset of a view as an argument, none if it equals that of its base."""
        if offset == 0:
            return []
        base_offset = self.writer.call(_ATEN.sym_storage_offset.default, [base], val=base.meta["val"].storage_offset())
        return [self.writer.apply(operator.add, base_offset, self.writer.number(offset))]

    def pool(self, line: lines.Pool) -> None:
        type_ = line.result.tensor_type
        arguments = [self.writer.argument(type_.sizes[0]), type_.device]
        self._define(line, line.result, _FXWRAP.pool.default, arguments, self.fakes.root(line.result))

    def _define(
        self, line: LineBase, result: Value, target: CallTarget, arguments: Sequence[object], val: object
    ) -> None:
        """Adds a call of an operator of the library `fxwrap::` that defines a value."""
        self.writer.nodes[result.name] = self.fxwrap_operator(line, target, arguments, name=result.name, val=val)

    def pool_slice(self, line: lines.PoolSlice) -> None:
        type_ = line.result.tensor_type
        arguments = [
            self.writer.argument(line.pool), self.writer.argument(line.offset), *self.writer.layout(type_), type_.dtype
        ]  # fmt: skip
        val = self.fakes.view(line.result, line.pool, floor_divide(line.offset, type_.dtype.itemsize))
        self._define(line, line.result, _FXWRAP.pool_slice.default, arguments, val)

    def workspace(self, line: lines.Workspace) -> None:
        type_ = line.result.tensor_type
        arguments = [self.writer.argument(type_.sizes[0]), line.zeroed, type_.device]
        self._define(line, line.result, _FXWRAP.workspace.default, arguments, self.fakes.root(line.result))

    # --- kernels and operators --------------------------------------------------------------------------------------

    def call(self, line: lines.ExternCall | lines.Mutate) -> None:
        arguments = [self.writer.argument(item) for item in line.arguments]
        keywords = {name: self.writer.argument(item) for name, item in line.keywords}
        if isinstance(line, lines.ExternCall) and line.outs:
            keywords |= zip(
                torch_compat.out_argument_names(line.target), map(self.writer.argument, line.outs), strict=True
            )
        self.results(line, torch_compat.operator_overload(line.target), arguments, keywords)

    mutate = call

    def scatter(self, line: lines.Scatter) -> None:
        target, index = self.writer.argument(line.target), self.writer.argument(line.index)
        source = self.writer.argument(line.source)
        with_tensor, with_number = lines.SCATTER_OPERATORS[line.reduce]
        form = with_tensor if isinstance(line.source, Value) else with_number
        if not form:
            dtype, index_type = line.target.tensor_type.dtype, line.index.tensor_type
            val = self.fakes.fake(TensorType.contiguous(dtype, index_type.sizes, index_type.device))
            source = self.writer.call(_ATEN.full_like.default, [index, source], {"dtype": dtype}, val=val)
        arguments: list[object] = [target, line.dim, index, source]
        keywords: dict[str, object] = {}
        if with_tensor.endswith(".two"):
            arguments, keywords = [*arguments, line.reduce], {"include_self": line.include_self}
        elif line.reduce:
            keywords = {"reduce": line.reduce}
        self._write(line.target, torch_compat.operator_overload(form or with_tensor), arguments, keywords)

    def index_put(self, line: lines.IndexPut) -> None:
        arguments = [self.writer.argument(item) for item in (line.target, line.indices, line.values)]
        self._write(line.target, _ATEN.index_put_.default, [*arguments, line.accumulate])

    def _write(
        self,
        value: Value,
        target: OpOverload,
        arguments: Sequence[object],
        keywords: Mapping[str, object] | None = None,
    ) -> None:
        """Adds the call of an in-place operator that writes a value and returns it."""
        self.writer.call(target, arguments, keywords, val=self.writer.argument(value).meta["val"])

    # --- symbols ----------------------------------------------------------------------------------------------------

    def size(self, line: lines.SizeOf) -> None:
        tensor = self.writer.argument(line.tensor)
        if line.rank:
            self.fxwrap_operator(line, _FXWRAP.check_rank.default, [tensor, line.tensor.name, line.rank])
        arguments = [tensor] if line.of == "storage_offset" else [tensor, line.dim]
        val = self.fakes.symbol(line.symbol)
        self.writer.symbol(line.symbol, self.writer.call(_SIZES[line.of], arguments, name=line.symbol.name, val=val))

    def let(self, line: lines.Let) -> None:
        node = self.writer.named_number(line.symbol, line.expr)
        node.meta["val"] = self.fakes.define(make_symbol(line.symbol.name), node.meta["val"])

    def item(self, line: lines.ReadItem) -> None:
        val = self.fakes.symbol(line.symbol)
        tensor = self.writer.argument(line.tensor)
        node = self.writer.call(_ATEN._local_scalar_dense.default, [tensor], name=line.symbol.name, val=val)
        self.writer.symbol(line.symbol, node)

    def bind(self, line: lines.Bind) -> None:
        node, type_ = self.writer.argument(line.source), line.source.type
        for step in line.path:
            match step.name:
                case "size" | "stride" | "storage_offset":
                    val = _READ_SIZE[step.name](node.meta["val"], *step.arguments)
                    node = self.writer.call(_SIZES[step.name], [node, *step.arguments], val=val)
                case "element":
                    type_ = element_type(type_) if isinstance(type_, ListType) else type_
                    val = self.fakes.fake(type_)
                    node = self.writer.call(operator.getitem, [node, *step.arguments], val=val)
                case "divide":
                    node = self.writer.apply(operator.floordiv, node, int(step.arguments[0]))
                case _:
                    node = self.writer.apply(torch.sym_int, node)
        self.writer.symbol(line.symbol, node)
        node.meta["val"] = self.fakes.symbol(line.symbol)

    def assertion(self, line: lines.Assert) -> None:
        condition = self.writer.number(line.condition)
        if line.error == "RuntimeError" and line.shown is None:
            self.writer.call(_ATEN._assert_scalar.default, [condition, line.text])
            return
        shown = None if line.shown is None else self.writer.number(line.shown)
        self.fxwrap_operator(line, _FXWRAP.require.default, [condition, line.text, line.error, shown])

    # --- control ----------------------------------------------------------------------------------------------------

    def return_(self, line: lines.Return) -> None:
        """Detaches views of memory of the program, then returns."""
        for name in detached_results(self.program.body.lines, program_arguments(self.program)):
            node = self.writer.nodes[name]
            self.writer.nodes[name] = self.writer.call(_ATEN.detach.default, [node], val=node.meta["val"])
        self._add_output(line)

    def yield_(self, line: lines.Yield) -> None:
        self._add_output(line)

    def _add_output(self, line: lines.Yield | lines.Return) -> None:
        outputs = tuple([self.writer.argument(item) for item in line.values])
        vals = tuple([item.meta["val"] if isinstance(item, Node) else item for item in outputs])
        output, val = (outputs[0], vals[0]) if self.single_output else (outputs, vals)
        self.writer.node("output", "output", [output], {}, None, val)

    # --- effects ----------------------------------------------------------------------------------------------------

    def save_state(self, line: lines.SaveRngState) -> None:
        val = self.fakes.root(line.result)
        self._define(line, line.result, _FXWRAP.random_state.default, [torch.device(line.device)], val)

    def restore_state(self, line: lines.RestoreRngState) -> None:
        arguments = [self.writer.argument(line.state), torch.device(line.device)]
        self.fxwrap_operator(line, _FXWRAP.set_random_state.default, arguments)

    def exchange_state(self, line: lines.ExchangeRngState) -> None:
        arguments = [self.writer.argument(line.generator), torch.device(line.device)]
        self.fxwrap_operator(line, _FXWRAP.exchange_random_state.default, arguments)

    def enter_device(self, line: lines.EnterDevice) -> None:
        self.fxwrap_operator(line, _FXWRAP.enter_device.default, [torch.device(line.device), *_stream(line)])

    def exit_device(self, line: lines.ExitDevice) -> None:
        self.fxwrap_operator(line, _FXWRAP.exit_device.default, [torch.device(line.device), *_stream(line)])

    def check_layout(self, line: lines.CheckLayout) -> None:
        if line.operator:  # a further reader of the result, for which no pattern of a rewrite has a place
            return
        type_ = line.expected
        tensor = self.writer.argument(line.tensor)
        layout = self.writer.layout(type_)
        arguments = [tensor, line.name or line.tensor.name, type_.dtype, *layout, type_.device, line.alignment]
        self.fxwrap_operator(line, _FXWRAP.check_layout.default, arguments)

    def comment(self, line: lines.Comment) -> None:
        self.writer.comments.append(line.text)

    def enter_range(self, line: lines.EnterRange) -> None:
        self._ranges.append(self.writer.call(torch.ops.profiler._record_function_enter_new.default, [line.name]))

    def exit_range(self, line: lines.ExitRange) -> None:
        self.writer.call(torch.ops.profiler._record_function_exit._RecordFunction, [self._ranges.pop()])

    def record_event(self, line: lines.RecordEvent) -> None:
        arguments = [torch.device(line.device), line.stream, *([line.event] if line.event else [])]
        val = self.fakes.root(Value(line.result.name, _EVENT_TYPE))
        self._define(line, line.result, _FXWRAP.record_event.default, arguments, val)

    def wait_event(self, line: lines.WaitEvent) -> None:
        arguments = [self.writer.argument(line.event), torch.device(line.device), line.stream]
        self.fxwrap_operator(line, _FXWRAP.wait_event.default, arguments)

    def start_collective(self, line: lines.StartCollective) -> None:
        names = torch_compat.out_argument_names(line.operator) if line.outs else ()
        arguments = [self.writer.argument(item) for item in line.arguments]
        outs = dict(zip(names, map(self.writer.argument, line.outs)))
        self.results(line, torch_compat.operator_overload(line.operator), arguments, outs)

    def wait_collective(self, line: lines.WaitCollective) -> None:
        target = torch_compat.operator_overload("_c10d_functional.wait_tensor.default")
        val = self.fakes.view(line.result, line.pending, 0)
        self.writer.define(line.result, target, [self.writer.argument(line.pending)], val=val)


_SIZES = {
    "size": _ATEN.sym_size.int,
    "stride": _ATEN.sym_stride.int,
    "storage_offset": _ATEN.sym_storage_offset.default,
}

_EVENT_TYPE = TensorType.contiguous(torch.int64, (0,), torch.device("cpu"))
"""The type of an event's node: an empty tensor carries the event."""


def _stream(line: lines.EnterDevice | lines.ExitDevice) -> list[int]:
    return [line.stream] if line.stream else []


_READ_SIZE: dict[str, Callable[..., Any]] = {
    "size": lambda tensor, dim: tensor.shape[dim],
    "stride": lambda tensor, dim: tensor.stride()[dim],
    "storage_offset": lambda tensor: tensor.storage_offset(),
}
