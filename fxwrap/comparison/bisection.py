"""`bisect`: the first wrong line of a function's compiled graphs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from fxwrap.comparison.driver import as_options, compare, preserve_rng_state, reset_compiler_caches
from fxwrap.comparison.observe import Arguments, RunConfig, normalize_arguments
from fxwrap.comparison.subjects import is_graph
from fxwrap.compile import Compiled, compile_graph, make_backend
from fxwrap.converters.emitted_program import BoxedCallable, EmittedProgram
from fxwrap.debugging import Divergence, GraphCase, OpaqueState, copy_inputs, find_divergence, module_state
from fxwrap.errors import CompareError
from fxwrap.options import Options
from fxwrap.torch_compat import tree_flatten
from fxwrap.wrapper_ir import Program

__all__ = ["Bisection", "bisect"]


@dataclass(frozen=True)
class Bisection:
    """The result of `bisect`.

    Fields:
        title: the name of the function.
        graphs: the number of graphs that ran.
        divergence: the first graph that computes wrong values, with its first wrong line; None without one.
        disagreements: differences of the function's results from eager's, if each graph computes the right values.
    """

    title: str
    graphs: int
    divergence: Divergence | None = None
    disagreements: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether all values agree with eager's, up to rounding."""
        return self.divergence is None and not self.disagreements

    def __str__(self) -> str:
        if self.divergence is not None:
            return f"{self.title}: {self.divergence}"
        graphs = f"{self.graphs} graph{'' if self.graphs == 1 else 's'}"
        if not self.disagreements:
            return f"{self.title}: all values of {graphs} agree with eager"
        head = f"{self.title}: all values of {graphs} agree with the traced graphs, but results differ from eager's:"
        hint = "the difference arises before fxwrap lowers the graphs: in a decomposition, the partition, or in Dynamo"
        return "\n".join([head, *[f"  {item}" for item in self.disagreements], f"  {hint}"])

    def to_json(self) -> str:
        """Returns the fields as JSON."""
        divergence = None if self.divergence is None else json.loads(self.divergence.to_json())
        return json.dumps({**vars(self), "divergence": divergence, "agrees": self.agrees}, indent=1)


def bisect(
    fn: object,
    inputs: object,
    *,
    options: Options | Mapping[str, object] | None = None,
    training: bool = False,
    dynamic: bool | None = False,
    seed: int = 0,
    memory_bytes: int | None = None,
) -> Bisection:
    """Runs a function compiled, and names the first line whose value is wrong, and the part of the compiler at fault.

    Each compiled graph is run on the inputs of its call, and compared line by line with the FX graph, run operator by
    operator in its own dtypes and in float64. A value is wrong if its error against float64 is larger than rounding
    allows. Inputs, parameters and buffers are restored.

    Args:
        fn: a function, nn.Module, GraphModule of ATen operators or ExportedProgram.
        inputs: the positional arguments in a tuple or list, the keyword arguments in a mapping, or one tensor.
        options: as for `compile_graph`.
        training: whether to run and check the backward too.
        dynamic: as for `torch.compile`.
        seed: the seed of all random numbers.
        memory_bytes: the memory for reference values; by default a fourth of the free memory. Those beyond are in a
            temporary file.

    Raises CompareError for objects that cannot be bisected, and if the folder for temporary files is full.
    """
    if isinstance(fn, Program):
        raise CompareError("a program has no graph to compare with; bisect the function or graph that was compiled")
    if training and is_graph(fn):
        raise CompareError("a graph has no gradients; bisect the function or module itself")
    if not callable(fn) and not is_graph(fn):
        raise CompareError(f"an object of type {type(fn).__name__} cannot be bisected; pass a function or module")
    chosen = as_options(options).replace(debug="bisect", on_graph=None)
    arguments = normalize_arguments(inputs)
    search = _Search(memory_bytes)
    state, objects = module_state(fn), OpaqueState((arguments.positional, arguments.keywords))
    with preserve_rng_state(), reset_compiler_caches(fn):
        try:
            torch.manual_seed(seed)
            copies = Arguments(*copy_inputs((arguments.positional, dict(arguments.keywords or {}))))
            _run(fn, copies, chosen, RunConfig(seed, training), search, dynamic)
        finally:
            state.restore_all()
            objects.restore()
    title = getattr(fn, "__name__", type(fn).__name__)
    if search.divergence is not None or is_graph(fn):
        return Bisection(title, search.graphs, search.divergence)
    report = compare(
        fn, inputs, options=chosen.replace(debug=None), training=training, emitters=(chosen.emitter,), repeats=0,
        seed=seed, dynamic=dynamic,
    )  # fmt: skip
    return Bisection(title, search.graphs, None, report.reasons)


def _run(
    fn: Any, arguments: Arguments, options: Options, config: RunConfig, search: _Search, dynamic: bool | None
) -> None:
    if not is_graph(fn):
        compiled = torch.compile(fn, backend=make_backend(options, search.compile), dynamic=dynamic)
        config.run(compiled, arguments)
        return
    flat = tree_flatten((arguments.positional, dict(arguments.keywords or {})))[0]
    with torch.no_grad():
        search.compile(fn, flat if isinstance(fn, GraphModule) else None, options=options).boxed(flat)


@dataclass
class _Search:
    """Compiles graphs whose calls are checked until one of them diverges."""

    memory_bytes: int | None
    graphs: int = 0
    divergence: Divergence | None = field(default=None)

    def compile(self, graph: Any, example_inputs: Sequence[object] | None, **arguments: Any) -> Compiled:
        """Compiles a graph as `compile_graph` does."""
        compiled = compile_graph(graph, example_inputs, **arguments)
        case = compiled.case
        if case is None:
            return compiled
        return compiled.with_emitted(EmittedProgram(compiled.source, lambda: self._checked(case)))

    def _checked(self, case: GraphCase) -> BoxedCallable:
        entry = case.emitted.boxed

        def run(inputs: list[object]) -> object:
            self.graphs += 1
            if self.divergence is None:
                self.divergence = find_divergence(case, inputs, self.memory_bytes)
            return entry(inputs)

        return run
