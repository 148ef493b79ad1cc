"""torch.fx: lazily written modules, code generation and private attributes of modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.traceback import NodeSource, NodeSourceAction

ChangeBody: TypeAlias = Callable[[list[str]], list[str]]


class LazyGraphModule(torch.fx.GraphModule):
    """A GraphModule that generates its code on `write()`, or at its first call, instead of in its constructor.

    Whoever returns one to a caller writes it before, so that torch's tools get an ordinary GraphModule.

    Why: GraphModule generates code at once, which costs as much as its nodes, also for graphs that are only read or
    that run in another form. Dynamo cannot trace torch's own lazy class. GraphModule's wrapper of calls removes the
    traceback of errors in generated code, and takes as long as several launches of kernels.
    """

    def __init__(self, *arguments: Any) -> None:
        self.__dict__["_needs_codegen"] = True
        super().__init__(*arguments)

    def recompile(self) -> Any:
        """Generates the code again if it was generated before."""
        if self.__dict__.get("_needs_codegen"):
            return None
        code = super().recompile()
        if "__call__" in vars(type(self)):  # each GraphModule has a class of its own
            del type(self).__call__
        return code

    def write(self) -> None:
        """Generates the code, that of its submodules included, if that has not been done."""
        for module in self.modules():
            if isinstance(module, LazyGraphModule) and module.__dict__.pop("_needs_codegen", False):
                module.recompile()

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Runs the first call; the generated code replaces this method."""
        self.write()
        return self(*arguments, **keywords)


def lazy_graph_modules() -> AbstractContextManager[None]:
    """Returns a context in which `make_fx` and partitioners return modules that generate code at their first call.

    Why: Dynamo enters it around a backend, and it has no public name.
    """
    return _use_lazy_graph_module(True)


def direct_state(module: torch.nn.Module) -> tuple[torch.Tensor | None, ...]:
    """Returns the parameters and buffers of a module without those of submodules.

    Why: `Module.parameters()` traverses all submodules, which takes too long for a check in each call.
    """
    parameters, buffers = module._parameters, module._buffers
    return (*parameters.values(), *buffers.values()) if parameters or buffers else ()


def module_tables(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """Returns the tables of a module's own parameters, buffers and attributes, in which tensors can be replaced.

    Why: assigning to attributes runs the setters of parametrised modules.
    """
    return module._parameters, module._buffers, vars(module)


def rename_node(node: torch.fx.Node, name: str) -> None:
    """Renames a node to this name, or one with a number appended if it is in use.

    Why: the setter of a name does not make it unique.
    """
    node._rename(name)


def mark_impure(module: torch.nn.Module | type[torch.nn.Module]) -> None:
    """Makes torch.fx's dead-code elimination keep the calls of a submodule, or of all submodules of a class.

    Why: the attribute has no public name.
    """
    module._is_impure = True  # type: ignore[union-attr]


def graph_codegen(graph: torch.fx.Graph) -> torch.fx.graph.CodeGen:
    """Returns the CodeGen of a graph, which has a public setter only."""
    return graph._codegen


def graph_python_code(graph: torch.fx.Graph, codegen: torch.fx.graph.CodeGen) -> torch.fx.graph.PythonCode:
    """Returns the Python code of a graph under another CodeGen; the graph keeps its own."""
    original = graph_codegen(graph)
    graph.set_codegen(codegen)
    try:
        return graph.python_code(root_module="self")
    finally:
        graph.set_codegen(original)


class GraphCodeGen(torch.fx.graph.CodeGen):
    """A CodeGen whose subclasses add to the code that torch generates.

    Why: the hook for the code of a whole graph, with its nodes and namespace, has no public name. Each node's part of
    the body begins with a line "# COUNTER: <position>".
    """

    def _gen_python_code(
        self, nodes: Any, root_module: str, namespace: Any, **options: Any
    ) -> torch.fx.graph.PythonCode:
        def write(change: ChangeBody) -> torch.fx.graph.PythonCode:
            original = self._body_transformer
            self._body_transformer = change
            try:
                return super(GraphCodeGen, self)._gen_python_code(nodes, root_module, namespace, **options)
            finally:
                self._body_transformer = original

        if options.get("record_func"):
            return super()._gen_python_code(nodes, root_module, namespace, **options)
        users = self._body_transformer or (lambda body: body)
        new_name = partial(namespace.create_name, obj=None)
        return self.generate_code(list(nodes), new_name, users, write, not options.get("colored"))

    def generate_code(
        self,
        nodes: Sequence[torch.fx.Node],
        new_name: Callable[[str], str],
        users: ChangeBody,
        write: Callable[[ChangeBody], torch.fx.graph.PythonCode],
        runs: bool,
    ) -> torch.fx.graph.PythonCode:
        """Returns the code of a graph: what `write` generates with a function that changes the pieces of the body.

        `new_name` returns a unique name, `users` is the user's change of the body (`graph.on_generate_code`). `runs` is
        False for code with colours, which is only shown.
        """
        raise NotImplementedError


def node_source(name: str, target: str, graph_id: int, pass_name: str, before: Sequence[NodeSource]) -> NodeSource:
    """Returns the provenance of a node for `meta["from_node"]`: a node of another graph, by name, target and graph.

    Why: the constructor reads the node itself, which does not exist in this process after a program is loaded.
    """
    source = NodeSource(None, pass_name, NodeSourceAction.CREATE)
    source.node_info = NodeSource.NodeInfo(name, target, graph_id)
    source.from_node = list(before)
    return source
