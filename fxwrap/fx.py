"""Tools for FX graphs that fxwrap emitted, and for what torch's tools made of them."""

from __future__ import annotations

from torch.export import ExportedProgram
from torch.fx import GraphModule

from fxwrap.compile import Compiled
from fxwrap.compile.steps import plan_program
from fxwrap.converters.exported import signature_of_program, to_exported_program
from fxwrap.converters.from_fx import from_fx
from fxwrap.converters.from_fx.regions import update_region
from fxwrap.converters.fx import placeholder_fakes, to_fx
from fxwrap.converters.fx.codegen import direct_code
from fxwrap.converters.fx.region_tools import RegionCall, copy_region, inline_regions, regions
from fxwrap.errors import ArgumentError
from fxwrap.options import Options
from fxwrap.passes.profile_ranges import remove_profile_ranges
from fxwrap.torch_compat import graph_codegen

__all__ = [
    "RegionCall",
    "copy_region",
    "enable_direct_launches",
    "export",
    "functional",
    "in_place",
    "inline_regions",
    "regions",
    "update_region",
]


def export(compiled: Compiled) -> ExportedProgram:
    """Returns a compiled graph as an exported program with the signature of the graph that was compiled.

    That of an exported program or module is the original one: names and trees of inputs and outputs, ranges of sizes,
    parameters and buffers by name, mutations. A GraphModule has flat inputs with its placeholders' names. Kernels are
    in the constant `fxwrap_kernels`, as text by content hash; `torch.export.save` saves it. A process that has imported
    fxwrap can load and run the file; it imports no part of the compiler. Parameters and buffers are shared with the
    compiled graph. Profiler ranges are left out.

    Raises ExportError for a program that torch.export cannot represent, and UnsupportedError for a line without a
    functional form.
    """
    remedy = "Pass what fxwrap.compile_graph returns; torch.export.export takes an emitted graph module"
    ArgumentError.check("fxwrap.fx.export", "compiled", compiled, (Compiled,), remedy)
    program, signature = remove_profile_ranges(compiled.program), compiled.signature
    if signature is None:
        signature = signature_of_program(program, compiled.fake_inputs)
    emitted = to_fx(program, fake_inputs=compiled.fake_inputs, form="exported")
    return to_exported_program(program, signature, emitted.graph_module)


def functional(graph_module: GraphModule) -> GraphModule:
    """Returns an emitted graph in functional form, in which kernels and operators return new tensors.

    Inputs and buffers that the graph writes are written at the end, by `aten.copy_`. The argument is not changed.
    Raises FxImportError for a graph that `from_fx` cannot import, and UnsupportedError for a line without a functional
    form.
    """
    return to_fx(from_fx(graph_module), fake_inputs=placeholder_fakes(graph_module), form="functional").graph_module


def in_place(graph_module: GraphModule, *, options: Options | None = None) -> GraphModule:
    """Returns a graph in the form in which kernels write memory that the graph allocates, as a compile emits it.

    A result uses the memory of an operand whose last use is its launch, and allocations share memory as `options` say.
    The argument is not changed. Raises FxImportError for a graph that `from_fx` cannot import.
    """
    program = plan_program(from_fx(graph_module), (options or Options(emitter="fx")).resolve_devices())
    return to_fx(program, fake_inputs=placeholder_fakes(graph_module)).graph_module


def enable_direct_launches(graph_module: GraphModule) -> GraphModule:
    """Makes a GraphModule launch kernels directly again, and every GraphModule inside it; returns it.

    Graphs that `to_fx` emitted do so by themselves, also after rewrites, copies and `recompile()`. A tool that makes
    new graphs of them (`split_module`, `make_fx`, `torch.export`) leaves out the CodeGen that says how; this gives it
    back, in the graph's own calling convention. What is no kernel and no operator stays as torch.fx writes it. Modules
    are changed in place: their code, not their graphs.
    """
    modules = [module for module in graph_module.modules() if isinstance(module, GraphModule)]
    for module in modules:
        module.graph.set_codegen(direct_code(graph_codegen(module.graph)))
    for module in reversed(modules):  # the inner ones first: the code of an outer one does not depend on them
        module.recompile()
    return graph_module
