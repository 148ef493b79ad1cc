"""Failures: as files that fail alike, and as the smallest graph that fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from fxwrap.comparison.bisection import Bisection, bisect
from fxwrap.compile import Compiled, CompileRecord, compile_graph
from fxwrap.debugging import (
    Check,
    Divergence,
    Failure,
    Minifier,
    example_values,
    require_failure,
    with_symbolic_inputs,
    write_repro,
)
from fxwrap.errors import DivergenceError, ReproError
from fxwrap.options import Options

__all__ = ["Minified", "minify", "reproduce", "save_repro"]


def save_repro(
    subject: object, path: str | Path, inputs: Sequence[object] | None = None, *, options: Options | None = None
) -> None:
    """Writes a Python file that builds a graph, its inputs and options, and fails as the subject does.

    Tensors with more than 32 elements become random ones of the same range.

    Args:
        subject: an error of a compile, a DivergenceError, the result of `bisect` or `minify`, a Compiled graph with the
            option `debug`, or a GraphModule of operators.
        path: the file.
        inputs: values of the placeholders; by default those of the failing call, or random ones.
        options: by default those of the compile.

    Raises ReproError if no graph is known, or code cannot build it, and OSError.
    """
    write_repro(_failure(subject, inputs, options), path)


@dataclass(frozen=True)
class Minified:
    """The result of `minify`: the smallest graph that fails, its inputs, and the number of graphs that were tried."""

    failure: Failure
    tries: int

    @property
    def graph_module(self) -> GraphModule:
        """The graph."""
        return self.failure.graph_module

    @property
    def inputs(self) -> tuple[object, ...]:
        """The inputs of the graph."""
        return tuple(self.failure.inputs or ())

    @property
    def calls(self) -> int:
        """The number of operator calls of the graph."""
        return sum([node.op == "call_function" for node in self.graph_module.graph.nodes])

    def save(self, path: str | Path) -> None:
        """Writes the file of `save_repro`."""
        write_repro(self.failure, path)

    def __str__(self) -> str:
        return f"{self.calls} calls fail, after {self.tries} tries: {self.failure.reason}\n{self.graph_module.graph}"


def minify(
    subject: object,
    inputs: Sequence[object] | None = None,
    *,
    options: Options | None = None,
    fails: Callable[[GraphModule, Sequence[object]], bool] | None = None,
) -> Minified:
    """Returns the smallest part of a graph, and the smallest sizes, that still fail.

    Takes the subjects of `save_repro`. A part takes the values that entered it in a run of the graph. By default it
    fails if its compile raises an error of the same class, or if `bisect` finds a divergence in the same part of the
    compiler; `fails`, a function of a graph and its inputs, replaces this check.

    Raises ReproError if no graph is known, or no part of it fails.
    """
    failure = _failure(subject, inputs, options)
    if failure.inputs is None:
        torch.manual_seed(0)
        failure = Failure(
            failure.graph_module, example_values(failure.graph_module), failure.options, failure.check, failure.reason
        )
    divergence = _divergence(subject)
    first = divergence.line.nodes if divergence is not None and divergence.line is not None else ()
    minifier = Minifier(_check(failure, divergence) if fails is None else lambda item: fails(
        item.graph_module, item.inputs or ()
    ))  # fmt: skip
    return Minified(minifier.shrink(failure, first), minifier.tries)


def _check(failure: Failure, divergence: Divergence | None) -> Callable[[Failure], bool]:
    """Returns whether a smaller graph fails as the original does."""
    if failure.check == "compile":
        name = failure.reason.partition(":")[0]
        return lambda item: _compile_error(item) == name
    part = divergence.part if divergence is not None else None

    def diverges(item: Failure) -> bool:
        other = bisect(item.graph_module, tuple(item.inputs or ()), options=item.options).divergence
        return other is not None and part in (None, other.part)

    return diverges


def _compile_error(failure: Failure) -> str:
    try:
        compile_graph(failure.graph_module, failure.inputs, options=failure.options)
    except Exception as error:  # noqa: BLE001  its class decides
        return type(error).__name__
    return ""


def _divergence(subject: object) -> Divergence | None:
    if isinstance(subject, Bisection):
        return subject.divergence
    divergence = subject.divergence if isinstance(subject, DivergenceError) else None
    return divergence if isinstance(divergence, Divergence) else None


def _failure(subject: object, inputs: Sequence[object] | None, options: Options | None) -> Failure:
    failure = _known_failure(subject, inputs, options)
    return Failure(
        failure.graph_module, failure.inputs if inputs is None else inputs, options or failure.options, failure.check,
        failure.reason,
    )  # fmt: skip


def _known_failure(subject: Any, inputs: Sequence[object] | None, options: Options | None) -> Failure:
    match subject:
        case Failure():
            return subject
        case Minified():
            return subject.failure
        case Bisection() | DivergenceError() if isinstance(divergence := _divergence(subject), Divergence):
            if divergence.failure is None:
                raise ReproError("the graph of this divergence is not known")
            return divergence.failure
        case BaseException():
            return require_failure(subject)
        case CompileRecord():
            return _known_failure(subject.compiled, inputs, options)
        case Compiled() if subject.case is not None:
            module = subject.case.graphs[0][1].graph_module
            return Failure(module, inputs, subject.options, "accuracy", f"the graph '{subject.case.name}'")
        case GraphModule():
            return Failure(subject, inputs, options or Options(), _first_check(subject, inputs, options), "the graph")
        case _:
            raise ReproError(
                f"no graph is known for an object of type {type(subject).__name__}; pass an error of a compile, the "
                "result of fxwrap.bisect, a graph, or a graph that was compiled with options={'debug': 'bisect'}"
            )


def _first_check(graph: GraphModule, inputs: Sequence[object] | None, options: Options | None) -> Check:
    return "compile" if _compile_error(Failure(graph, inputs, options or Options(), "compile", "")) else "accuracy"


def reproduce(
    check: Check,
    graph: GraphModule,
    build_inputs: Callable[..., Sequence[object]],
    symbols: Mapping[str, int],
    options: Options,
) -> None:
    """Compiles a graph, and with the check "accuracy" compares a call; files of `save_repro` call it.

    Raises the error of the compile, or DivergenceError.
    """
    inputs = build_inputs(**symbols)
    if symbols:
        with_symbolic_inputs(graph, build_inputs, symbols)
    if check == "compile":
        compile_graph(graph, None if symbols else inputs, options=options.replace(compile_cache=False))
    else:
        divergence = bisect(graph, tuple(inputs), options=options).divergence
        if divergence is not None:
            raise DivergenceError(str(divergence), divergence.part, "", divergence)
    print("it does not fail here")
