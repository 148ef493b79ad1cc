"""Regions as submodules of an emitted graph: the calls of kernels in the language "fx"."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxwrap.converters.fx.emitter import GraphEmitter
from fxwrap.lines import Launch
from fxwrap.regions import Region, output_name, parse_region
from fxwrap.symbolic import SymbolInfo
from fxwrap.torch_compat import LazyGraphModule, mark_impure
from fxwrap.wrapper_ir import Value

REGION = "fxwrap_region"
"""The key of a region in the metadata of its submodule."""


class RegionModule(LazyGraphModule):
    """The operators of a region, which writes the results into the memory of its outputs.

    It takes the tensors that it reads, its outputs and its symbols. `meta["fxwrap_region"]` is the `Region`.
    """

    def forward(self, *arguments: Any) -> Any:
        """Generates the code of the graph at the first call."""
        self.write()
        return self.forward(*arguments)


def call_region(emitter: GraphEmitter, line: Launch) -> None:
    """Emits the call of a region's submodule, which all equal regions of a graph share."""
    modules, kernel = emitter.modules, emitter.kernels[line.kernel]
    name = modules.name_of(kernel.hash)
    if name is None:
        module = modules.by_key.get(kernel.hash) or region_module(emitter, parse_region(kernel.source))
        name = modules.add_module(kernel.hash, kernel.name, module)
    tensors = [item for item in line.arguments if isinstance(item, Value)]
    symbols = [item for item in line.arguments if not isinstance(item, Value)]
    arguments = [emitter.writer.argument(item) for item in (*tensors, *line.outs, *symbols)]
    node = emitter.writer.call(name, arguments, name=kernel.name)
    node.meta["fxwrap_kernel"] = kernel.hash


def region_module(emitter: GraphEmitter, region: Region) -> GraphModule:
    """Returns a region as a module."""
    inner = type(emitter)(emitter.program, emitter.fakes.with_own_names(), emitter.handlers, aten_only=True)
    writer, fakes = inner.writer, inner.fakes
    outputs = [
        region.overwritten.get(index, Value(output_name(index), result.type))
        for index, result in enumerate(region.results)
    ]
    for value in (*region.reads, *outputs):
        writer.placeholder(value, fakes.root(value))
    for name in region.symbols:
        info = SymbolInfo(name)
        writer.placeholder(info, fakes.symbol(info))
    for call in region.calls:
        writer.line = call
        inner.convert(call)
    writer.line = None
    for output, result in zip(outputs, region.results, strict=True):
        target = writer.nodes[output.name]
        writer.call(torch.ops.aten.copy_.default, [target, writer.nodes[result.name]], val=target.meta["val"])
    writer.node("output", "output", [()], {}, None, ())
    module = RegionModule({}, writer.graph)
    module.meta[REGION] = region
    mark_impure(module)
    return module


def region_of(module: object) -> Region | None:
    """Returns the region of a submodule; None for other objects."""
    region = module.meta.get(REGION) if isinstance(module, GraphModule) else None
    return region if isinstance(region, Region) else None


def called_region(module: GraphModule, node: Node) -> GraphModule | None:
    """Returns the submodule of the region that a node calls; None for other nodes."""
    submodule = getattr(module, str(node.target), None) if node.op == "call_module" else None
    return None if region_of(submodule) is None else submodule
