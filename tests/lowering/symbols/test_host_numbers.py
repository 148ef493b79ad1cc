"""Tensors of rank 0 on the CPU, which operators on a GPU take as numbers. Without a GPU: programs for a fake one.

The numbers that such a program gives are tested where it stands, with all its tensors on the CPU: Triton's interpreter
runs the kernels that were printed for the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options, Program
from fxwrap.lines import ExternCall, Launch, ReadItem
from fxwrap.printers.printed_kernel import PrintedKernel
from fxwrap.wrapper_ir import verify
from tests.lowering.control.cases import random, to_device
from tests.printers.test_triton_printer_compile import compiled

STRICT = Options(fallback="error")
X = random(16, 8)
DOUBLE = torch.tensor(0.1, dtype=torch.float64)
SINGLE = torch.tensor(-1.7)
WHOLE = torch.tensor(3)
TRUE = torch.tensor(True)


def lowered(function: Callable[..., Any], *inputs: Tensor, options: Options = STRICT) -> Program:
    """The program for inputs of these shapes, those that have dimensions on a GPU."""
    with FakeTensorMode():
        fakes = [torch.empty(item.shape, dtype=item.dtype, device="cuda" if item.dim() else "cpu") for item in inputs]
        return verify(fxwrap.lower(make_fx(function)(*fakes), options=options))


def run_here(program: Program, *inputs: Tensor) -> tuple[Any, ...]:
    """Runs a program for a GPU with all tensors on the CPU."""
    text = str(program)
    assert "@cuda:0" in text
    return fxwrap.run(
        fxwrap.parse(text.replace("@cuda:0", "@cpu").replace('device("cuda', 'device("cpu')), list(inputs)
    )


def lines_of(program: Program, kind: type) -> list[Any]:
    return [line for line in program.body.lines if isinstance(line, kind)]


def gelu(x: Tensor, half: Tensor, power: Tensor) -> Tensor:
    half, cubic = half.to(torch.float32), half * 0.4 + 0.004
    return half * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + cubic * x**3))) + power


def test_lifted_floats_are_scalar_arguments_of_one_kernel() -> None:
    program = lowered(gelu, X, DOUBLE, SINGLE)
    assert [line.tensor.name for line in lines_of(program, ReadItem)] == ["half_1", "power_1"]
    assert len(lines_of(program, Launch)) == 1 and not lines_of(program, ExternCall)
    (kernel,) = program.kernels
    assert kernel.signature == ("*f32", "*f32", "f64", "f64")
    assert 'f0: "fp64", f1: "fp64"' in kernel.source
    torch.testing.assert_close(run_here(program, X, DOUBLE, SINGLE)[0], gelu(X, DOUBLE, SINGLE))


def test_the_kernel_compiles_for_a_gpu() -> None:
    (kernel,) = lowered(gelu, X, DOUBLE, SINGLE).kernels
    binary = compiled(PrintedKernel(kernel.language, kernel.source, kernel.signature, kernel.options, ()))
    assert ".param .f64" in binary.asm["ptx"]


MIXED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a float of more bits does not promote": (lambda x, a: x * a, (X, DOUBLE)),
    "a float promotes integers": (lambda x, a: x * a, (torch.arange(12), DOUBLE)),
    "an integer promotes a bool": (lambda x, a: x * a, (X > 0, WHOLE)),
    "an integer does not promote": (lambda x, a: x + a, (torch.arange(12, dtype=torch.int8), WHOLE)),
    "a bool": (lambda x, a: (x * a, torch.where(a, x, -x), x.to(torch.int64) + a), (X, TRUE)),
    "both sides of a choice": (lambda x, a, b: torch.where(x > 0, a, b), (X, DOUBLE, SINGLE)),
    "computed on the CPU": (lambda x, a, b: x * (a.sin() / b + 1).to(torch.float32), (X, DOUBLE, SINGLE)),
    "also returned": (lambda x, a: (x * (a + 1), a + 1, a), (X, DOUBLE)),
    "an element of a tensor on the CPU": (lambda x, a: x * a.expand(2, 3)[1, 2], (X, DOUBLE)),
    "a position": (lambda x, a: torch.ops.aten.index.Tensor(x, [a]) + 1, (X, WHOLE)),
    "sums": (lambda x, a: (x * a).sum(1), (X, DOUBLE)),
    "moved to the GPU": (lambda x, a: x + a.to(x.device), (X, DOUBLE)),
}


BOUNDS = (lambda x, a, b: x.clamp(a, b), (X, SINGLE, DOUBLE))
"""CUDA's operator takes no bounds on the CPU."""


@pytest.mark.parametrize("name", [*MIXED, "bounds"])
def test_every_scalar_dtype_matches_eager(name: str) -> None:
    function, inputs = MIXED.get(name, BOUNDS)
    program = lowered(function, *inputs)
    assert lines_of(program, ReadItem) and not lines_of(program, ExternCall)
    results, wanted = run_here(program, *inputs), function(*inputs)
    for got, want in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        torch.testing.assert_close(got, want)


def test_half_precision_is_multiplied_by_the_unrounded_scalar() -> None:
    """As CUDA's operator does; rounded to half precision before, it would be another number."""
    x, number = random(64, dtype=torch.float16), torch.tensor(0.1)
    program = lowered(lambda x, a: (x * a, torch.hypot(x, a.half())), x, number)
    results = run_here(program, x, number)
    torch.testing.assert_close(results[0], (x.float() * number).half(), rtol=0, atol=0)
    assert not torch.equal(results[0], (x.float() * number.half()).half())


def test_a_scalar_is_reread_after_a_write() -> None:
    def function(x: Tensor, a: Tensor) -> Any:
        before, plus = x * a, a + 1
        a.mul_(2)
        return before, x * a, x * plus

    program = lowered(function, X, DOUBLE)
    assert len(lines_of(program, ReadItem)) == 3
    here = DOUBLE.clone()
    for got, want in zip(run_here(program, X, here), (X * DOUBLE, X * 2 * DOUBLE, X * (DOUBLE + 1)), strict=True):
        torch.testing.assert_close(got, want)
    assert here == 2 * DOUBLE


def test_extern_calls_receive_the_tensor() -> None:
    program = lowered(lambda x, a: x * a, X, SINGLE, options=Options(preserve_ops=frozenset({"aten.mul.Tensor"})))
    assert not lines_of(program, ReadItem) and len(lines_of(program, ExternCall)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", MIXED)
def test_gpu_results_match_eager(name: str) -> None:
    function, inputs = MIXED[name]
    arguments = [to_device(item, "cuda") if item.dim() else item for item in inputs]
    results, wanted = (
        fxwrap.compile_graph(make_fx(function)(*arguments), options=STRICT)(*arguments),
        function(*arguments),
    )
    for got, want in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.gpu
def test_a_models_float_is_a_scalar_argument_on_a_gpu() -> None:
    compiled_here = torch.compile(lambda x, a: (x * a + 1).tanh(), backend="fxwrap", dynamic=True, fullgraph=True)
    for number in (2.5, 3.5):
        torch.testing.assert_close(compiled_here(X.cuda(), number), (X.cuda() * number + 1).tanh())
