"""The forms in which a program may be rewritten: the program itself, or an FX graph of it."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from fxwrap import wrapper_ir as ir
from fxwrap.converters.from_fx import from_fx
from fxwrap.converters.fx import FxForm, to_fx
from fxwrap.converters.fx.metadata import other_metadata
from fxwrap.rewrite.graphs import kernel_of
from fxwrap.torch_compat import FakeTensor, OpOverload, is_opaque, torch_schema


def program_of(subject: ir.Program | GraphModule) -> ir.Program:
    """Returns a program, or the one of a graph of ATen operators or of an emitted graph. Raises FxImportError."""
    return subject if isinstance(subject, ir.Program) else from_fx(subject)


def graph_in_form_of(graph_module: GraphModule, program: ir.Program) -> GraphModule:
    """Returns a program as a graph in the form of another graph: in place, or functional, as graphs of ATen are."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    fakes = {node.name: node.meta.get("val") for node in placeholders}
    fake_inputs = {name: fake for name, fake in fakes.items() if isinstance(fake, FakeTensor)}
    rewritten = to_fx(program, fake_inputs=fake_inputs, form=_form_of(graph_module)).graph_module
    _copy_metadata(graph_module, rewritten)
    return rewritten


def _copy_metadata(old: GraphModule, new: GraphModule) -> None:
    """Copies other tools' metadata at nodes that no line has: inputs, constants and the output, and of the module.

    Opaque inputs, such as device meshes, have their objects there, which a program does not have.
    """
    nodes = {(node.op, node.target): node for node in old.graph.nodes if node.op in _WITHOUT_LINES}
    for node in new.graph.nodes:
        source = nodes.get((node.op, node.target))
        if source is not None:
            node.meta |= other_metadata(source)
            if is_opaque(source.meta.get("val")):
                node.meta["val"] = source.meta["val"]
    new.meta = {**old.meta, **new.meta}


_WITHOUT_LINES = ("placeholder", "get_attr", "output")


def _form_of(graph_module: GraphModule) -> FxForm:
    declared: FxForm | None = graph_module.meta.get("fxwrap", {}).get("form")
    if declared is not None:
        return declared
    return "in_place" if any(_writes(node) for node in graph_module.graph.nodes) else "functional"


def _writes(node: Node) -> bool:
    """Whether a node writes memory, other than an input at the end of a functional graph."""
    if node.op != "call_function":
        return False
    if not isinstance(node.target, OpOverload):
        kernel = kernel_of(node)
        return kernel is not None and not kernel.is_functional
    target = node.args[0] if node.args else None
    is_final = isinstance(target, Node) and target.op in ("placeholder", "get_attr") and not node.users
    return torch_schema(node.target).is_mutable and not is_final
