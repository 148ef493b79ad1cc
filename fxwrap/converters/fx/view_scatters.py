"""Writes of views in functional form: the inverses of view operators, which return a copy with the view overwritten."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from fxwrap.converters.fx.converter import FxConverter
from fxwrap.converters.view_chains import ViewStep, view_chain
from fxwrap.lines import View
from fxwrap.wrapper_ir import Value

_ATEN = torch.ops.aten

_SCATTERS = {
    "slice": _ATEN.slice_scatter.default,
    "select": _ATEN.select_scatter.default,
    "diagonal": _ATEN.diagonal_scatter.default,
    "as_strided": _ATEN.as_strided_scatter.default,
}
"""The operators that overwrite a view of a copy, by the kind of the view."""


def scatter_into(converter: FxConverter, root: Value, value: Value, node: Node) -> Node:
    """Returns a copy of a memory with a view of it overwritten."""
    line = converter.writer.line
    steps = view_chain(root.tensor_type, value.tensor_type, converter.symbol_infos)
    if any(step.operator.kind in ("expand", "unfold") for step in steps):
        return _scatter_by_strides(converter, root, value, node)
    bases, base = [], root
    for number, step in enumerate(steps):
        bases.append(base)
        if number + 1 < len(steps):
            inner = Value(f"{value.name}.base{number}", step.result_type(root.tensor_type))
            FxConverter.view(converter, View(inner, base, origin=None if line is None else line.origin))
            base = inner
    for step, base in zip(reversed(steps), reversed(bases), strict=True):
        node = _inverse(converter, step, base, node)
    return node


def _scatter_by_strides(converter: FxConverter, root: Value, value: Value, node: Node) -> Node:
    """Returns a copy of a memory with a view of it overwritten that is no chain of invertible view operators."""
    type_, old = value.tensor_type, converter.writer.nodes[root.name]
    if any(stride == 0 and size != 1 for size, stride in zip(type_.sizes, type_.strides, strict=True)):
        assert converter.writer.line is not None
        reason = f"several elements of %{value.name} are one element of %{root.name}"
        raise converter.unsupported(converter.writer.line, f"{reason}; write the tensor that it expands")
    val = converter.fakes.root(Value(root.name, replace(root.tensor_type, storage_offset=0)))
    arguments = [old, node, *converter.writer.layout(type_), *converter.offset_arguments(old, type_.storage_offset)]
    return converter.writer.call(_ATEN.as_strided_scatter.default, arguments, name=root.name, val=val)


def _inverse(converter: FxConverter, step: ViewStep, base: Value, node: Node) -> Node:
    """Returns the base of a view with the view overwritten."""
    old, kind, arguments = converter.writer.nodes[base.name], step.operator.kind, step.operator.arguments
    val = converter.fakes.root(Value(base.name, replace(base.tensor_type, storage_offset=0)))
    if kind == "as_strided":
        numbers = [*map(converter.writer.argument, arguments[:2]), *converter.offset_arguments(old, arguments[2])]
    else:
        numbers = [converter.writer.argument(item) for item in arguments]
    match kind:
        case "view" | "unsqueeze":
            return converter.writer.call(
                _ATEN.view.default, [node, converter.writer.argument(base.tensor_type.sizes)], val=val
            )
        case "permute":
            order = [arguments[0].index(dim) for dim in range(len(arguments[0]))]
            return converter.writer.call(_ATEN.permute.default, [node, order], val=val)
        case "slice" | "select" | "diagonal" | "as_strided":
            return converter.writer.call(_SCATTERS[kind], [old, node, *numbers], name=base.name, val=val)
        case _:
            raise AssertionError(f"{kind} has no inverse")
