"""Kernels as text: what is printed is parsed to an equal kernel, and other text is refused at its line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch.fx.experimental.proxy_tensor import make_fx

from fxwrap.errors import ParseError
from fxwrap.loop_ir import Axis, Kernel, KernelError, parse_kernel
from fxwrap.loop_ir.index_text import parse_index, print_index
from fxwrap.lowering.program import lower_with_coverage
from fxwrap.printers import print_kernel as print_source
from tests.support.long_form import sample_size
from tests.support.strategies.graphs import RandomGraph, graphs

TEXT = """\
kernel(in0: f32[4*s0 + 1], in1: i64[floordiv(s0, 2)]) -> (out0: f32[4], out1: bf16[4*s0]) for [p0: 4] reduce [r0: s0] {
  %0 = f32 load in0[p0*s0 + r0]  # aten.add.Tensor
  %1 = i64 load in1[(r0)//(2)]  # aten.gather.default
  %2 = f32 -inf
  %3 = f32 number 2.5*f0
  %4 = i64 index -r0 + 3*(p0)%(2) - 1
  %5 = i64 7
  %6 = bool lt %4 %5
  %7 = f32 load in0[%1<4*s0 + 1> + 2*floordiv(s0, 2)] if %6 else 0.0
  %8 = f32 add %0 %7
  %9 = f32 mul %8 %3
  %10 = f32 maximum %9 %2
  require runtime %6 "it's  # here" if %6  # aten._assert_async.msg
  %12 = f32 reduce softmax %10
  %13 = f32 part 1 %12
  %14 = f32 scan cumsum %10
  %15 = bf16 cast %14
  store add out0[p0] %13 if %6  # aten.sum.default
  store out1[p0*s0 + r0] %15
}
"""


def test_every_kind_of_operation_is_parsed() -> None:
    kernel = parse_kernel(TEXT)
    assert str(kernel) == TEXT
    assert parse_kernel(str(kernel)) == kernel
    assert kernel.operations[0].origin == "aten.add.Tensor" and len(kernel.symbols) == 2


def recorded(graph: Any, inputs: Any) -> list[Kernel]:
    kernels = []

    def record(request: Any) -> Any:
        kernels.append(request.kernel)
        return print_source(request)

    lower_with_coverage(graph, inputs, print_kernel=record)
    return kernels


@settings(max_examples=sample_size(25))
@given(graphs())
def test_kernels_of_random_graphs_are_equal_after_a_round_trip(graph: RandomGraph) -> None:
    for kernel in recorded(make_fx(graph.module, tracing_mode="fake")(*graph.inputs), graph.inputs):
        parsed = parse_kernel(str(kernel))
        assert parsed == kernel and parsed.uncompared_fields == kernel.uncompared_fields


def test_kernels_of_symbolic_graphs_are_equal_after_a_round_trip() -> None:
    def function(x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rolled = torch.roll(x, 1, 0).reshape(-1)
        return rolled.view(x.shape[1], x.shape[0]).softmax(0), x[index].sum(1) / x.shape[0], x.cumsum(1), x.argmax(0)

    inputs = [torch.randn(6, 4), torch.tensor([1, 3])]
    kernels = recorded(make_fx(function, tracing_mode="symbolic")(*inputs), inputs)
    assert any("[%" in str(kernel) or "[4*%" in str(kernel) for kernel in kernels)
    for kernel in kernels:
        parsed = parse_kernel(str(kernel))
        assert parsed == kernel and parsed.uncompared_fields == kernel.uncompared_fields


@pytest.mark.parametrize(
    "text", ["0", "3", "-p0", "2*p0*p0 - 5", "(p0 + 1)//(s0)", "%4<7>*s0", "-4*(%2<max(2, s0)>)%(3)"]
)
def test_an_index_is_parsed_without_simplification(text: str) -> None:
    assert print_index(parse_index(text, {"p0": Axis("p0", 4)})) == text


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("kernel(", "kernel ", r"line 1, column 1: a kernel is 'kernel\(inputs\) -> "),
        ("in1: i64", "in1: i65", r"line 1, .*unknown dtype 'i65'; known: f32"),
        ("[p0: 4]", "[p0]", "line 1, .*an axis is 'name: size'"),
        ("%1 = i64", "%3 = i64", "line 3, .*this is operation %1"),
        ("lt %4 %5", "less %4 %5", "line 8, .*unknown operation 'less'"),
        ("f32 -inf", "f32 one", "line 4, .*'one' is no literal"),
        ("p0*s0 + r0]  #", "p0*s0 + ]  #", r"line 2, column 29: expected an axis, a size, '%' or '\('"),
        ("4*s0 + 1>", "4*s0 + 1", "line 9, .*there is no '>'"),
        ("  store add", " store add", "line 18, .*an operation is indented by two blanks"),
    ],
)  # fmt: skip
def test_text_that_is_no_kernel_is_refused(old: str, new: str, reason: str) -> None:
    assert old in TEXT
    with pytest.raises(ParseError, match=reason):
        parse_kernel(TEXT.replace(old, new, 1))


def test_an_invalid_kernel_is_refused() -> None:
    with pytest.raises(KernelError, match="it uses an operation that does not precede it"):
        parse_kernel(TEXT.replace("add %0 %7", "add %0 %17"))
