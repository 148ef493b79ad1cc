"""Tools for FX graphs that fxwrap emitted, and for what torch's tools made of them."""

from __future__ import annotations

from torch.fx import GraphModule

from fxwrap.converters.fx.codegen import direct_code
from fxwrap.torch_compat import graph_codegen

__all__ = ["enable_direct_launches"]


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
