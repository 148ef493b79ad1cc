"""The subjects of comparisons: captured once, and run with every emitter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from fxwrap.comparison.observe import Arguments, Function
from fxwrap.compile import Compiled, CompileResult, Stage, compile_graph, emit, make_backend
from fxwrap.converters.emitted_program import BoxedCallable, EmittedProgram
from fxwrap.debugging import TensorState, module_state
from fxwrap.errors import CompareError
from fxwrap.options import Options
from fxwrap.runtime.native import build_bridge
from fxwrap.torch_compat import HigherOrderOperator, OpOverload, tree_flatten
from fxwrap.wrapper_ir import Ownership, Program, verify


@dataclass
class CapturedGraph:
    """A graph that was compiled to a program, and its emitted programs so far."""

    name: str
    compiled: Compiled
    lower_seconds: float
    emitted_programs: dict[str, EmittedProgram] = field(default_factory=dict)
    build_seconds: dict[str, float] = field(default_factory=dict)

    def boxed(self, emitter: str) -> BoxedCallable:
        """Returns the boxed entry of an emitter, built on first use."""
        emitted = self.emitted_programs.get(emitter)
        if emitted is None:
            if emitter == "cpp":
                build_bridge()  # once for a torch, so that it is no part of a program's seconds
            start = time.perf_counter()
            emitted = emit(self.compiled.program, emitter)
            emitted.boxed  # noqa: B018  builds it
            self.build_seconds[emitter] = time.perf_counter() - start
            self.emitted_programs[emitter] = emitted
        return emitted.boxed


class CompiledFunction:
    """A function or module, captured by torch.compile: once, as long as its guards hold.

    Attributes, as of every subject:
        title: its name.
        eager: the function that the emitters must agree with.
        reference: the function that runs in float64, or None.
        state: the tensors that live from call to call.
        donated_inputs: positions of inputs that a call may overwrite.
        nested_outputs: whether `call` returns nested outputs as `eager` does, instead of flat ones.
        graphs: the graphs captured so far.
    """

    nested_outputs = True
    donated_inputs: frozenset[int] = frozenset()

    def __init__(self, function: Function, options: Options, dynamic: bool | None) -> None:
        self.title = getattr(function, "__name__", type(function).__name__)
        self.eager = function
        self.reference: Function | None = function
        self.state = module_state(function)
        self.graphs: list[CapturedGraph] = []
        self._emitter = "interpreter"
        self._options = options.replace(emitter="interpreter", on_graph=None)
        self._compiled = torch.compile(function, backend=make_backend(self._options, self._compile), dynamic=dynamic)

    def call(self, emitter: str) -> Function:
        """Returns a function that runs the subject with an emitter."""

        def run(*arguments: object, **keywords: object) -> object:
            self._emitter = emitter
            return self._compiled(*arguments, **keywords)

        return run

    def _compile(self, graph: GraphModule, example_inputs: Sequence[object], **arguments: Any) -> Compiled:
        """Compiles a graph as `compile_graph` does; calls run the emitter that is current at the time of the call."""
        start = time.perf_counter()
        compiled = compile_graph(graph, example_inputs, **arguments)
        captured = CapturedGraph(arguments["name"], compiled, time.perf_counter() - start)
        self.graphs.append(captured)
        switched = EmittedProgram(compiled.source, lambda: lambda inputs: captured.boxed(self._emitter)(inputs))
        return compiled.with_emitted(switched)


class CompiledGraph:
    """A graph of ATen operators, an exported program or a `Program`: flat inputs and outputs, without gradients."""

    nested_outputs = False

    def __init__(self, graph: GraphModule | ExportedProgram | Program, arguments: Arguments, options: Options) -> None:
        start = time.perf_counter()
        compiled = _compiled(graph, arguments, options)
        captured = CapturedGraph(compiled.program.name, compiled, time.perf_counter() - start)
        self.title = compiled.program.name
        self.graphs = [captured]
        module = graph.module() if isinstance(graph, ExportedProgram) else graph
        self.reference: Function | None = None if isinstance(module, Program) else module
        self.eager = self.reference or self.call("interpreter")
        self.donated_inputs = frozenset(
            position for position, item in enumerate(compiled.program.inputs) if item.ownership is Ownership.OWNED
        )
        named = module_state(module).tensors
        module_tensors = {id(tensor) for tensor in named.values()}
        constants = compiled.program.store.tensors
        self.state = TensorState(
            {**named, **{name: item for name, item in constants.items() if id(item) not in module_tensors}}
        )

    def call(self, emitter: str) -> Function:
        """Returns a function that runs the graph with an emitter."""
        captured = self.graphs[0]

        def run(*arguments: object, **keywords: object) -> object:
            with torch.no_grad():
                return captured.boxed(emitter)(tree_flatten((arguments, keywords))[0])

        return run


def _compiled(graph: GraphModule | ExportedProgram | Program, arguments: Arguments, options: Options) -> Compiled:
    if isinstance(graph, Program):
        return Compiled(CompileResult((Stage("input", verify(graph)),), options, emit(graph, "interpreter")))
    examples = list(arguments.named().values()) if isinstance(graph, GraphModule) else None
    return compile_graph(graph, examples, options=options.replace(emitter="interpreter"))


Subject: TypeAlias = CompiledFunction | CompiledGraph
"""A subject of a comparison."""


def make_subject(function: object, arguments: Arguments, options: Options, dynamic: bool | None) -> Subject:
    """Returns the subject of a function or graph. Raises CompareError for other objects."""
    if is_graph(function):
        return CompiledGraph(function, arguments, options)
    if callable(function):
        return CompiledFunction(function, options, dynamic)
    raise CompareError(
        f"an object of type {type(function).__name__} cannot be compared; pass a function, nn.Module, GraphModule, "
        "an exported program or a program"
    )


def is_graph(function: object) -> TypeGuard[GraphModule | ExportedProgram | Program]:
    """Whether an object is a program, an exported program, or a graph of operators that can be lowered."""
    if not isinstance(function, GraphModule):
        return isinstance(function, ExportedProgram | Program)
    nodes = list(function.graph.nodes)
    return all(node.op not in ("call_module", "call_method") for node in nodes) and all(
        isinstance(node.target, OpOverload | HigherOrderOperator)
        or not getattr(node.target, "__module__", "").startswith("torch")
        for node in nodes
        if node.op == "call_function"
    )
