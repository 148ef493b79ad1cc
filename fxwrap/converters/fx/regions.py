"""Regions as submodules of an emitted graph: the calls of kernels in the language "fx"."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from fxwrap.converters.fx.emitter import GraphEmitter
from fxwrap.converters.fx.replay import module_attribute
from fxwrap.errors import GraphModuleError, RegionError
from fxwrap.lines import Launch
from fxwrap.regions import Region, output_name, parse_region
from fxwrap.symbolic import SymbolInfo
from fxwrap.torch_compat import LazyGraphModule, OpOverload, mark_impure, operator_overload
from fxwrap.wrapper_ir import KernelDefinition, Value

RegionForm: TypeAlias = Literal["in_place", "functional"]
"""The form of a region's submodule: whether it writes its outputs, or returns new tensors."""

RegionField: TypeAlias = Literal["inputs", "operators", "results"]
"""The parts of a region's graph that errors name."""

REGION, FORM = "fxwrap_region", "fxwrap_region_form"
"""The keys of the `Region` and of the form in the metadata of a submodule."""

NAME, ACCEPTED = "fxwrap_region_name", "fxwrap_region_graph"
"""The keys of a submodule's name, and of the text of the graph that its `Region` describes."""


class RegionModule(LazyGraphModule):
    """The operators of a region, which returns new tensors.

    It takes the tensors that it reads, those outputs whose old content it reads, and its symbols. If its graph is
    edited, `recompile()` makes calls raise RegionError until `fxwrap.fx.update_region` accepts the edit.
    """

    def recompile(self) -> Any:
        """Generates the code again if it was generated before, and checks the graph."""
        code = super().recompile()
        if code is not None:
            self._refuse_calls()
        return code

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionModule:
        copied: RegionModule = super().__deepcopy__(memo)  # type: ignore[assignment]
        copied._refuse_calls()  # the constructor generates the code before there is metadata
        return copied

    def _refuse_calls(self) -> None:
        """Makes calls raise if the graph is not the accepted one, so that a call checks nothing."""
        error = edit_error(self)
        if error is None:
            return

        def forward(_module: RegionModule, *_arguments: Any) -> NoReturn:
            raise error

        # Not traced: Dynamo of torch 2.11 cannot raise an error that exists.
        type(self).forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call, method-assign]


class InPlaceRegionModule(RegionModule):
    """The operators of a region, which writes its outputs.

    It takes the tensors that it reads, its outputs, and its symbols.
    """


mark_impure(InPlaceRegionModule)

# --- edits ----------------------------------------------------------------------------------------------------------


def accept_graph(module: GraphModule) -> None:
    """Records the graph of a region's submodule as the one that its metadata describes."""
    module.meta[ACCEPTED] = _graph_text(module.graph)


def edit_error(module: GraphModule) -> RegionError | None:
    """Returns the error of a submodule whose graph is not the accepted one; None for other modules."""
    accepted = module.__dict__.get("meta", {}).get(ACCEPTED)  # the constructor generates code before it sets `meta`
    if accepted is None:
        return None
    edited = _graph_text(module.graph)
    if edited == accepted:
        return None
    pairs = zip_longest(edited, accepted, fillvalue=("operators", "nothing"))
    (field, one), (other_field, other) = next((one, other) for one, other in pairs if one != other)
    reason = f"its graph was edited: it has {one}, where its metadata has {other}"
    return RegionError(module.meta[NAME], other_field if one == "nothing" else field, reason, f"{EDIT_ONE}. {ACCEPT}")


def prepare_regions(graph_module: GraphModule) -> None:
    """Generates the code of all regions in a graph. Raises RegionError if the graph of one is not the accepted one."""
    for module in graph_module.modules():
        if isinstance(module, RegionModule):
            error = edit_error(module)
            if error is not None:
                raise error
            module.write()


EDIT_ONE = "To change one call of a shared region, edit the result of fxwrap.fx.copy_region(node)"
ACCEPT = "If the edit is intended, call fxwrap.fx.update_region(node) with a node that calls it; else undo it"


def _graph_text(graph: Graph) -> tuple[tuple[RegionField, str], ...]:
    """Returns a graph as text that does not depend on names: the field and the text of each node."""
    names: dict[Node, str] = {}
    lines: list[tuple[RegionField, str]] = []
    for node in graph.nodes:
        source: Any = node.args[0] if node.args else None
        if node.op == "placeholder":
            names[node] = f"in{len(lines)}"
            lines.append(("inputs", f"the input {names[node]}"))
        elif node.op == "output":
            lines.append(("results", f"the results {_text(source, names)}"))
        elif node.target is operator.getitem and source in names:
            names[node] = f"{names[source]}[{node.args[1]}]"
        else:
            names[node] = f"v{len(lines)}"
            operands = [_text(item, names) for item in node.args]
            operands += [f"{name}={_text(item, names)}" for name, item in node.kwargs.items()]
            lines.append(("operators", f"{_target_text(node.target)}({', '.join(operands)})"))
    return tuple(lines)


def _target_text(target: Any) -> str:
    return str(target if isinstance(target, str | OpOverload) else getattr(target, "__name__", target))


def _text(item: Any, names: Mapping[Node, str]) -> str:
    if isinstance(item, Node):
        return names.get(item, item.name)
    if isinstance(item, list | tuple):
        return f"[{', '.join([_text(part, names) for part in item])}]"
    return repr(item)


# --- calls ----------------------------------------------------------------------------------------------------------


def call_region(emitter: GraphEmitter, line: Launch) -> None:
    """Emits the call of a region that writes its outputs."""
    _call(emitter, line, "in_place", line.outs, None)


def call_functional_region(emitter: GraphEmitter, line: Launch) -> list[Node]:
    """Emits the call of a region that returns new tensors; returns the node of each."""
    region, writer = _region(emitter.kernels[line.kernel]), emitter.writer
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
        module = modules.by_key.get(kernel.hash) or region_module(emitter, _region(kernel), form)
        name = modules.add_module(kernel.hash, kernel.name, module)
        module.meta.setdefault(NAME, name)
    tensors = [item for item in line.arguments if isinstance(item, Value)]
    symbols = [item for item in line.arguments if not isinstance(item, Value)]
    arguments = [emitter.writer.argument(item) for item in (*tensors, *outs, *symbols)]
    node = emitter.writer.call(name, arguments, name=kernel.name, val=val)
    node.meta["fxwrap_kernel"] = kernel.hash
    return node


def _region(kernel: KernelDefinition) -> Region:
    """Returns the region of a kernel: the one that was printed, or that of its text."""
    return kernel.scheduled if isinstance(kernel.scheduled, Region) else parse_region(kernel.source)


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
    module = (InPlaceRegionModule if form == "in_place" else RegionModule)({}, writer.graph)
    module.meta[REGION], module.meta[FORM] = region, form
    accept_graph(module)
    return module


def region_of(module: object) -> Region | None:
    """Returns the region of a submodule; None for other objects."""
    region = module.meta.get(REGION) if isinstance(module, GraphModule) else None
    return region if isinstance(region, Region) else None


def called_region(module: GraphModule, node: Node) -> GraphModule | None:
    """Returns the submodule of the region that a node calls; None for other nodes."""
    submodule: GraphModule | None = module_attribute(module, node.target) if node.op == "call_module" else None
    return None if region_of(submodule) is None else submodule


def get_called_region(node: Node) -> GraphModule:
    """Returns the submodule of the region that a node calls. Raises GraphModuleError for other nodes."""
    owner = node.graph.owning_module
    module = None if owner is None else called_region(owner, node)
    if module is None:
        raise GraphModuleError(f"node '{node.name}' calls no region. Pass a node of fxwrap.fx.regions(graph_module)")
    return module
