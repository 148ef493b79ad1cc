"""What can be compared, each in a form that any emitter can be put into: captured once, run in every way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from fxwrap.backend import make_backend
from fxwrap.compare.copies import State, state_of
from fxwrap.compare.observe import Arguments
from fxwrap.compiler import Compiled, Stage, compile_graph, emit
from fxwrap.converters.emitted import Boxed, Emitted
from fxwrap.errors import CompareError
from fxwrap.options import Options
from fxwrap.torch_compat import HigherOrderOperator, OpOverload, tree_flatten
from fxwrap.wrapper_ir import Ownership, Program, verify


@dataclass
class CapturedGraph:
    """A graph that was compiled up to its program, and the forms that emitters have given it so far."""

    name: str
    compiled: Compiled
    lower_seconds: float
    forms: dict[str, Emitted] = field(default_factory=dict)
    build_seconds: dict[str, float] = field(default_factory=dict)

    def boxed(self, emitter: str) -> Boxed:
        """Returns the form of an emitter, made and built when it is first asked for."""
        form = self.forms.get(emitter)
        if form is None:
            start = time.perf_counter()
            form = emit(self.compiled.program, emitter)
            form.boxed  # noqa: B018  builds it
            self.build_seconds[emitter] = time.perf_counter() - start
            self.forms[emitter] = form
        return form.boxed


class CompiledFunction:
    """A function or module, captured by torch.compile: once, as long as its guards hold.

    The attributes are those of every subject: `title` names it; `eager` is what the emitters must agree with,
    `reference` the same in a form that float64 goes through, or None; `state` are the tensors it keeps from call to
    call; `given_away` the positions of inputs that a call may overwrite with anything; `nested` says whether `call`
    gives outputs as nested as `eager` does, and not flat; `graphs` are those captured so far.
    """

    nested = True
    given_away: frozenset[int] = frozenset()

    def __init__(self, function: Callable[..., Any], options: Options, dynamic: bool | None) -> None:
        self.title = getattr(function, "__name__", type(function).__name__)
        self.eager = function
        self.reference: Callable[..., Any] | None = function
        self.state = state_of(function)
        self.graphs: list[CapturedGraph] = []
        self._emitter = "interpreter"
        self._options = options.replace(emitter="interpreter", on_graph=None)
        self._compiled = torch.compile(function, backend=make_backend(self._options, self._compile), dynamic=dynamic)

    def call(self, emitter: str) -> Callable[..., Any]:
        """Returns the function that runs the subject by an emitter."""

        def run(*arguments: Any, **keywords: Any) -> Any:
            self._emitter = emitter
            return self._compiled(*arguments, **keywords)

        return run

    def _compile(self, graph: GraphModule, example_inputs: Sequence[Any], **chosen: Any) -> Compiled:
        """Compiles a graph as `compile_graph` does, to a callable that runs the emitter which is in use when called."""
        start = time.perf_counter()
        compiled = compile_graph(graph, example_inputs, **chosen)
        captured = CapturedGraph(chosen["name"], compiled, time.perf_counter() - start)
        self.graphs.append(captured)
        switched = Emitted(compiled.source, lambda: lambda inputs: captured.boxed(self._emitter)(inputs))
        return Compiled(compiled.stages, compiled.options, switched)


class CompiledGraph:
    """A graph of ATen operators, an exported program or a program of ours: flat inputs, flat outputs, no gradients."""

    nested = False

    def __init__(self, graph: GraphModule | ExportedProgram | Program, arguments: Arguments, options: Options) -> None:
        start = time.perf_counter()
        compiled = _compiled(graph, arguments, options)
        captured = CapturedGraph(compiled.program.name, compiled, time.perf_counter() - start)
        self.title = compiled.program.name
        self.graphs = [captured]
        module = graph.module() if isinstance(graph, ExportedProgram) else graph
        self.reference: Callable[..., Any] | None = None if isinstance(module, Program) else module
        self.eager = self.reference or self.call("interpreter")
        self.given_away = frozenset(
            position for position, item in enumerate(compiled.program.inputs) if item.ownership is Ownership.OWNED
        )
        named = state_of(module).tensors
        known = {id(tensor) for tensor in named.values()}
        constants = compiled.program.store.tensors
        self.state = State({**named, **{name: item for name, item in constants.items() if id(item) not in known}})

    def call(self, emitter: str) -> Callable[..., Any]:
        """Returns the function that runs the graph by an emitter."""
        captured = self.graphs[0]

        def run(*arguments: Any, **keywords: Any) -> Any:
            with torch.no_grad():
                return captured.boxed(emitter)(tree_flatten((arguments, keywords))[0])

        return run


def _compiled(graph: GraphModule | ExportedProgram | Program, arguments: Arguments, options: Options) -> Compiled:
    if isinstance(graph, Program):
        return Compiled([Stage("given", verify(graph))], options, emit(graph, "interpreter"))
    examples = list(arguments.named().values()) if isinstance(graph, GraphModule) else None
    return compile_graph(graph, examples, options=options.replace(emitter="interpreter"))


Subject: TypeAlias = CompiledFunction | CompiledGraph
"""Something to compare."""


def subject_of(function: Any, arguments: Arguments, options: Options, dynamic: bool | None) -> Subject:
    """Returns the subject for anything that can be compared. Raises CompareError for anything else."""
    if is_graph(function):
        return CompiledGraph(function, arguments, options)
    if callable(function):
        return CompiledFunction(function, options, dynamic)
    raise CompareError(
        f"an object of type {type(function).__name__} cannot be compared; pass a function, nn.Module, GraphModule, "
        "an exported program or a program"
    )


def is_graph(function: Any) -> bool:
    """Whether this is a program, an exported program, or a graph that calls operators and can be lowered."""
    if not isinstance(function, GraphModule):
        return isinstance(function, ExportedProgram | Program)
    nodes = list(function.graph.nodes)
    return all(node.op not in ("call_module", "call_method") for node in nodes) and all(
        isinstance(node.target, OpOverload | HigherOrderOperator)
        or not getattr(node.target, "__module__", "").startswith("torch")
        for node in nodes
        if node.op == "call_function"
    )
