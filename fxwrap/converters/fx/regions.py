"""Regions as submodules of an emitted graph: the calls of kernels in the language "fx"."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch.fx import GraphModule, Node

from fxwrap.converters.fx.emitter import GraphEmitter
from fxwrap.converters.fx.replay import attribute_of
from fxwrap.lines import Launch
from fxwrap.regions import Region, output_name, parse_region
from fxwrap.symbolic import SymbolInfo
from fxwrap.torch_compat import LazyGraphModule, mark_impure, operator_overload
from fxwrap.wrapper_ir import Value

RegionForm: TypeAlias = Literal["in_place", "functional"]
"""The form of a region's submodule: whether it writes its outputs, or returns new tensors."""

REGION, FORM = "fxwrap_region", "fxwrap_region_form"
"""The keys of the `Region` and of the form in the metadata of a submodule."""


class RegionModule(LazyGraphModule):
    """The operators of a region.

    In place, it takes the tensors that it reads, its outputs and its symbols, and writes the outputs. Functional, it
    takes the tensors that it reads, those outputs whose old content it reads, and its symbols, and returns new tensors.
    """

    def forward(self, *arguments: Any) -> Any:
        """Generates the code of the graph at the first call."""
        self.write()
        return self.forward(*arguments)


def call_region(emitter: GraphEmitter, line: Launch) -> None:
    """Emits the call of a region that writes its outputs."""
    _call(emitter, line, "in_place", line.outs, None)


def call_functional_region(emitter: GraphEmitter, line: Launch) -> list[Node]:
    """Emits the call of a region that returns new tensors; returns the node of each."""
    region, writer = parse_region(emitter.kernels[line.kernel].source), emitter.writer
    vals = [emitter.fakes.fake(result.type) for result in region.results]
    overwritten = [line.outs[position] for position in region.overwritten]
    call = _call(emitter, line, "functional", overwritten, tuple(vals))
    nodes = []
    for index, (out, result, val) in enumerate(zip(line.outs, region.results, vals, strict=True)):
        node = writer.call(operator.getitem, [call, index], name=out.name, val=val)
        layout, val = writer.layout(out.tensor_type), emitter.fakes.root(out)
        if out.tensor_type.strides != result.tensor_type.strides:
            keywords = {"dtype": out.tensor_type.dtype, "device": out.tensor_type.device}
            memory = writer.call(torch.ops.aten.empty_strided.default, layout, keywords, val=val)
            node = writer.call(torch.ops.aten.copy.default, [memory, node], name=out.name, val=val)
        nodes.append(node)
    return nodes


def _call(emitter: GraphEmitter, line: Launch, form: RegionForm, outs: Sequence[Value], val: object) -> Node:
    """Emits the call of a region's submodule, which all equal regions of a graph share."""
    modules, kernel = emitter.modules, emitter.kernels[line.kernel]
    name = modules.name_of(kernel.hash)
    if name is None:
        module = modules.by_key.get(kernel.hash) or region_module(emitter, parse_region(kernel.source), form)
        name = modules.add_module(kernel.hash, kernel.name, module)
    tensors = [item for item in line.arguments if isinstance(item, Value)]
    symbols = [item for item in line.arguments if not isinstance(item, Value)]
    arguments = [emitter.writer.argument(item) for item in (*tensors, *outs, *symbols)]
    node = emitter.writer.call(name, arguments, name=kernel.name, val=val)
    node.meta["fxwrap_kernel"] = kernel.hash
    return node


def region_module(emitter: GraphEmitter, region: Region, form: RegionForm) -> GraphModule:
    """Returns a region as a module."""
    fakes = emitter.fakes.with_own_names()
    inner = GraphEmitter(emitter.program, fakes)
    writer = inner.writer
    outputs = dict(region.overwritten)
    if form == "in_place":
        results = enumerate(region.results)
        outputs = {index: outputs.get(index, Value(output_name(index), result.type)) for index, result in results}
    for value in (*region.reads, *outputs.values()):
        writer.placeholder(value, fakes.root(value))
    for name in region.symbols:
        info = SymbolInfo(name)
        writer.placeholder(info, fakes.symbol(info))
    for call in region.calls:
        arguments = [writer.argument(item) for item in call.arguments]
        keywords = {name: writer.argument(item) for name, item in call.keywords}
        inner.results(call, operator_overload(call.target), arguments, keywords)
    returned = [writer.nodes[result.name] for result in region.results]
    if form == "in_place":
        for index, result in enumerate(returned):
            target = writer.nodes[outputs[index].name]
            writer.call(torch.ops.aten.copy_.default, [target, result], val=target.meta["val"])
        returned = []
    writer.node("output", "output", [tuple(returned)], {}, None, tuple([node.meta["val"] for node in returned]))
    module = RegionModule({}, writer.graph)
    module.meta[REGION], module.meta[FORM] = region, form
    if form == "in_place":
        mark_impure(module)
    return module


def region_of(module: object) -> Region | None:
    """Returns the region of a submodule; None for other objects."""
    region = module.meta.get(REGION) if isinstance(module, GraphModule) else None
    return region if isinstance(region, Region) else None


def called_region(module: GraphModule, node: Node) -> GraphModule | None:
    """Returns the submodule of the region that a node calls; None for other nodes."""
    submodule: GraphModule | None = attribute_of(module, node.target) if node.op == "call_module" else None
    return None if region_of(submodule) is None else submodule
