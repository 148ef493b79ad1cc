"""Operators that write their operands, and ordered effects, through every emitter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.comparison import COMPARED_EMITTERS
from fxwrap.comparison.driver import capture
from fxwrap.compile import emit
from fxwrap.options import Options
from tests.lowering.control.cases import DEVICES, Case, Cases, TorchRejection, random
from tests.lowering.control.operators import LOG, add_and_triple, add_into, add_into_optional, fill_all, note

CASES = Cases()
X = random(4, 8)


@CASES.add((X,))
def a_base(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    add_into(x, out)
    return out * 2 + x


@CASES.add((X,))
def an_input(x: Tensor) -> Any:
    other = x.sin()
    add_into(other, x)
    return other + x


@CASES.add((X,))
def a_base_that_is_read_before_and_after(x: Tensor) -> Any:
    out = x.cos()
    before = out * 2
    result = add_and_triple(x, out)
    return before, out + result


@CASES.add((X,))
def views_of_one_base(x: Tensor) -> Tensor:
    out = x.new_zeros(8, 8)
    add_into(x, out[:4])
    add_into(x, out[4:])
    add_into(x.t()[:, :2].contiguous(), out[:, 3:5])
    return out + 1


@CASES.add((X,))
def a_view_of_an_input(x: Tensor) -> Tensor:
    add_into(x[2:].sin(), x[:2])
    return x * 2


@CASES.add((X,))
def a_list_of_views_and_bases(x: Tensor) -> Any:
    out, other = x.new_zeros(3, 8), x.exp()
    fill_all([out[0], out[2], other], 4.0)
    return out + 1, other


@CASES.add((X,))
def optional_arguments(x: Tensor) -> Any:
    first, second = torch.zeros_like(x), torch.ones_like(x)
    add_into_optional(x, None, second)
    add_into_optional(x, first, second)
    return first + second


# torch before 2.13 drops trailing defaults before it looks for the arguments that an operator writes.
@CASES.add((X,), rejection=TorchRejection("2.13", "tuple index out of range"))
def optional_arguments_at_the_end(x: Tensor) -> Tensor:
    first = torch.zeros_like(x)
    add_into_optional(x, first, None)
    add_into_optional(x, None)
    return first + x


@CASES.add((X,))
def mutated_keyword_argument(x: Tensor) -> Any:
    total, rows = torch.ones_like(x), x.new_ones(6, 8)
    torch.ops.fxwrap_control.add_by_name(x, total=total)
    torch.ops.fxwrap_control.add_by_name(total, total=rows[1:5])
    return total, rows * 2


@CASES.add((X,))
def equal_allocations(x: Tensor) -> Any:
    """Both are one node of the graph: an operator that writes both has memory for each."""
    first, second = torch.empty_like(x), torch.empty_like(x)
    torch.ops.fxwrap_control.scale_all_by_name(x, outs=[first, second])
    zeros, more_zeros = torch.zeros_like(x), torch.zeros_like(x)
    add_into_optional(first, zeros, more_zeros)
    return first - second, zeros + more_zeros


@CASES.add((X,))
def a_list_and_an_optional_keyword_argument(x: Tensor) -> Any:
    first, last, only = x.sin(), torch.empty_like(x), torch.empty_like(x)
    torch.ops.fxwrap_control.scale_all_by_name(x, outs=[first, x], last=last)
    torch.ops.fxwrap_control.scale_all_by_name(last, outs=[only])
    return first + last, only


@CASES.add((X,), dynamic=True)
def with_symbols(x: Tensor) -> Any:
    out = x.new_zeros(x.shape[0] + 2, x.shape[1])
    add_into(x, out[1:-1])
    return out.sin()


@CASES.add((X.abs(),), (-X.abs(),))
def inside_of_a_cond(x: Tensor) -> Tensor:
    def then(a: Tensor) -> Tensor:
        out = a.cos()
        add_into(a, out)
        return out * 2

    return torch.cond(x.sum() > 0, then, lambda a: a + 1, (x,))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES.parameters)
def test_mutating_operators(case: Case, device: str) -> None:
    case.check(device)


@pytest.mark.parametrize("function", [equal_allocations, a_list_and_an_optional_keyword_argument])
def test_calls_that_write_lists_by_name_in_graphs_with_writes(function: Callable[[Tensor], Any]) -> None:
    graph = make_fx(function, tracing_mode="fake")(X)
    for emitter in COMPARED_EMITTERS:
        expected, actual = X.clone(), X.clone()
        results = function(expected)
        compiled = fxwrap.compile_graph(graph, [X], options=Options(emitter=emitter))  # type: ignore[arg-type]
        torch.testing.assert_close((*compiled(actual), actual), (*results, expected))


def test_an_emitted_graph_compiles_again() -> None:
    """Its launches are calls that write lists of operands."""
    emitted = fxwrap.compile_graph(
        make_fx(lambda x: (x.exp().sum(0), x.cos() + 1))(X), [X], options=Options(emitter="fx")
    )
    for emitter in COMPARED_EMITTERS:
        again = fxwrap.compile_graph(emitted.graph_module, [X], options=Options(emitter=emitter))  # type: ignore[arg-type]
        torch.testing.assert_close(again(X), emitted(X))


def _noted(x: Tensor) -> Tensor:
    y = note("first", x)
    note("second", x + 1)  # nothing needs what it gives
    return note("third", y * 2) + 1


@pytest.mark.parametrize("device", DEVICES)
def test_effects_stay_ordered(device: str) -> None:
    x = torch.ones(4, device=device)
    (graph,) = capture(_noted, (x,))
    for emitter in COMPARED_EMITTERS:
        LOG.clear()
        result = emit(graph.compiled.program, emitter)(*[x, None][: len(graph.compiled.program.inputs)][::-1])
        assert LOG == ["first 4", "second 8", "third 8"], emitter
        torch.testing.assert_close(result[-1], x * 2 + 1)
