"""Emission of a program as an FX graph, in place or functional."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from torch.fx import GraphModule

from fxwrap import lines, torch_compat
from fxwrap.converters.base import Handler
from fxwrap.converters.fx.codegen import DirectCode
from fxwrap.converters.fx.converter import FxConverter
from fxwrap.converters.fx.functional import ExportedConverter, FunctionalConverter
from fxwrap.converters.fx.module import EmittedGraph, ProgramModule
from fxwrap.garbage_collection import gc_paused
from fxwrap.inference import ExampleValues, FakeValues
from fxwrap.runtime import kernel_table
from fxwrap.symbolic import SymbolInfo
from fxwrap.wrapper_ir import Program, check_program, symbol_infos

FxForm: TypeAlias = Literal["in_place", "functional", "exported"]
"""The forms of an emitted graph."""

_CONVERTERS: Mapping[FxForm, type[FxConverter]] = {
    "in_place": FxConverter,
    "functional": FunctionalConverter,
    "exported": ExportedConverter,
}


def placeholder_fakes(graph_module: GraphModule) -> dict[str, torch_compat.FakeTensor]:
    """Returns the fake tensors of a graph's placeholders, by name."""
    values = {node.name: node.meta.get("val") for node in graph_module.graph.find_nodes(op="placeholder")}
    return {name: value for name, value in values.items() if isinstance(value, torch_compat.FakeTensor)}


@gc_paused()
def to_fx(
    program: Program,
    *,
    aten_only: bool = False,
    handlers: Mapping[type[lines.ExtensionLine], Handler] | None = None,
    fake_inputs: Mapping[str, torch_compat.FakeTensor] | None = None,
    fake_metadata: bool = True,
    form: FxForm = "in_place",
) -> EmittedGraph:
    """Returns the program as an FX graph of ordinary operators.

    Args:
        program: a verified program.
        aten_only: whether only ATen's and torch's higher-order operators may be called.
        handlers: converters of vendors' lines, by default those of registered devices; a line without one is emitted
            as the lines that it expands to.
        fake_inputs: fake tensors for the inputs' `meta["val"]`, by the program's names; the others have their mode.
        fake_metadata: whether `meta["val"]` holds fake tensors, for which torch imports its tracing. Otherwise it
            holds meta tensors and example numbers; the graph is the same.
        form: "in_place", in which kernels and operators write memory that the graph allocates, or "functional", in
            which they return new tensors and inputs are written at the end; "exported" is functional, and launches
            all kernels by their content hash, Triton's too.

    Raises UnsupportedError for a line without an FX form, without a functional one if `form` is that, or without one of
    ATen's operators if `aten_only`; and ArgumentError for another object than a program.
    """
    check_program("fxwrap.to_fx", program)
    fake_inputs = fake_inputs or {}
    mode = next((fake.fake_mode for fake in fake_inputs.values()), None)
    fakes = FakeValues(mode, symbol_infos(program)) if fake_metadata else ExampleValues()
    with torch_compat.without_fake_mode(), torch_compat.without_guards(fakes.mode):
        converter = _CONVERTERS[form](program, fakes, handlers, aten_only=aten_only)
        _inputs(converter, fake_inputs)
        _constants(converter)
        converter.convert_block(program.body)
        graph = converter.writer.graph
        graph.set_codegen(DirectCode())
        module = ProgramModule(converter.modules.attributes, graph, "ProgramModule")
    module.meta["fxwrap"] = {
        "name": program.name,
        "form": form,
        "header": program.header,
        "kernels": {kernel.hash: kernel for kernel in program.kernels},
        "symbols": symbol_infos(program),
        "registered_kernels": [kernel_table.find_registered_kernel(kernel.hash) for kernel in program.kernels],  # owned
    }
    return EmittedGraph(program, module)


def _inputs(converter: FxConverter, fake_inputs: Mapping[str, torch_compat.FakeTensor]) -> None:
    writer, fakes = converter.writer, converter.fakes
    for item in converter.program.inputs:
        if isinstance(item.value, SymbolInfo):
            node = writer.placeholder(item.value, fakes.symbol(item.value))
        elif item.name in fake_inputs and fake_inputs[item.name].fake_mode is fakes.mode:
            node = writer.placeholder(item.value, fakes.add_input(item.value, fake_inputs[item.name]))
        else:
            node = writer.placeholder(item.value, fakes.root(item.value))
        node.meta["fxwrap_ownership"] = item.ownership.value


def _constants(converter: FxConverter) -> None:
    contents = converter.program.constant_operands()
    for constant in converter.program.constants:
        name = converter.modules.add(constant.value.name, contents[constant.value.name])
        val = converter.fakes.root(constant.value)
        node = converter.writer.node("get_attr", name, (), {}, name, val)
        node.meta["fxwrap_mutable"] = constant.mutable
        node.meta["fxwrap_type"] = constant.value.type
        converter.writer.nodes[constant.value.name] = node
