"""Calls that a graph makes twice are made once, and copies of what nobody writes are none; nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.fx_passes.cse import common_subexpressions
from fxwrap.lines import ExternCall

aten = torch.ops.aten


def read_twice(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sin() + (x @ w).cos()


def chains(x: Tensor, w: Tensor) -> Tensor:
    return torch.linalg.vector_norm((x @ w).relu() @ w) + torch.linalg.vector_norm((x @ w).relu() @ w, 1)


def returned_twice(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x @ w, x @ w


def view_returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return (x @ w).sum(), (x @ w)[1:]


def written_between(x: Tensor, w: Tensor) -> Tensor:
    before = x @ w
    x.add_(1.0)
    return before - x @ w


def result_written(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    one, other = x @ w, x @ w
    one[1:].add_(1.0)
    return one.sin(), other.sin()


def other_numbers(x: Tensor, w: Tensor) -> Tensor:
    return aten.addmm(w, x, w, alpha=2) + aten.addmm(w, x, w, alpha=2.0) + aten.addmm(w, x, w, beta=2)


def views_of_equal_tensors(x: Tensor, w: Tensor) -> Tensor:
    left, _ = (x @ w).split(2, 1)
    _, right = (x @ w).split(2, 1)
    return torch.linalg.inv(left[:2]) @ right[:2]


def copies(x: Tensor, w: Tensor) -> Tensor:
    return x.clone() @ (w.clone() @ w).clone()


def written_copy(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    copy = x.clone()
    copy.add_(1.0)
    return copy @ w, x @ w


CASES: dict[Callable[..., Any], int] = {
    read_twice: 1, chains: 2, returned_twice: 2, view_returned: 2, written_between: 2, result_written: 2,
    other_numbers: 3, views_of_equal_tensors: 2, copies: 2, written_copy: 2,
}  # fmt: skip
"""Functions, and how many products of matrices their programs have."""


def count_matmuls(program: fxwrap.Program) -> int:
    names = ("aten.mm.default", "aten.addmm.default")
    return sum(isinstance(line, ExternCall) and line.target in names for line in program.body.lines)


def functional(function: Callable[..., Any], *inputs: Tensor) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", CASES, ids=[case.__name__ for case in CASES])
def test_common_subexpressions(function: Callable[..., Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
    graph = functional(function, *inputs)
    program = fxwrap.lower(graph, options=Options())
    assert count_matmuls(program) == CASES[function]
    assert all(line.target != "aten.clone.default" for line in program.body.lines if isinstance(line, ExternCall))
    arguments = [item.clone() for item in inputs]
    compiled = fxwrap.compile_graph(graph, options=Options(emitter="interpreter"))
    results = compiled(*arguments)
    expected = function(*inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    torch.testing.assert_close(tuple(results), expected)
    torch.testing.assert_close(arguments, inputs)
    storages = [item.untyped_storage().data_ptr() for item in (*results, *arguments)]
    assert len(set(storages)) == len(storages)


def test_random_operators_are_not_merged() -> None:
    graph = functional(lambda x: torch.rand_like(x) - torch.rand_like(x), torch.ones(8))
    (result,) = fxwrap.compile_graph(graph, options=Options(emitter="interpreter"))(torch.ones(8))
    assert result.abs().min() > 0


def test_without_fusion_calls_are_not_merged() -> None:
    x = torch.randn(4, 4)
    assert count_matmuls(fxwrap.lower(functional(read_twice, x, x), options=Options(fuse=False))) == 2


def test_symbolic_sizes() -> None:
    programs: list[fxwrap.Program] = []

    def keep(program: fxwrap.Program) -> fxwrap.Program:
        programs.append(program)
        return program

    options = {"passes": (keep,), "emitter": "interpreter"}
    compiled = torch.compile(lambda x, w: chains(x.clone(), w), backend="fxwrap", dynamic=True, options=options)
    for rows in (3, 7):
        x, w = torch.randn(rows, 5), torch.randn(5, 5)
        torch.testing.assert_close(compiled(x, w), chains(x, w))
    assert [count_matmuls(program) for program in programs] == [2]


def test_symbolic_numbers_among_arguments() -> None:
    """AOTAutograd leaves a SymInt itself as the argument of a call that it adds."""
    graph = make_fx(lambda x: (x.narrow(0, 0, x.shape[0] - 1) * 2, x), tracing_mode="symbolic")(torch.randn(4, 5))
    (narrowed,) = [node for node in graph.graph.nodes if node.target is aten.slice.Tensor]
    end = narrowed.args[3]
    narrowed.args = (*narrowed.args[:3], end.meta["val"])
    values = {node: node.meta["val"] for node in graph.graph.nodes if node.op != "output"}
    with graph.graph.inserting_after(narrowed):
        again = graph.graph.node_copy(narrowed)
    values[again] = narrowed.meta["val"]
    assert common_subexpressions(list(graph.graph.nodes), values) == {again: narrowed}


def test_results_that_are_written_behind_a_view_without_a_declaration() -> None:
    """`_unsafe_view` declares no alias; make_fx over real tensors records unrelated storages."""

    def written_view(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        linear, written = torch.nn.functional.linear(x, w), torch.nn.functional.linear(x, w)
        return written.add_(1.0) * 2, linear

    inputs = [torch.randn(2, 3, 5), torch.randn(4, 5)]
    graph = make_fx(written_view)(*inputs)
    assert any(node.target is aten._unsafe_view.default for node in graph.graph.nodes)
    results = fxwrap.compile_graph(graph, inputs, options=Options(emitter="interpreter"))(*inputs)
    torch.testing.assert_close(results, written_view(*inputs))
