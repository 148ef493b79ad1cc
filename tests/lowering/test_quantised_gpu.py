"""Float8, quantised weights and experts as kernels on a GPU, beside eager mode and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from benchmarks.quantised import EXPERTS, GROUP, expert_case, int4_linear, linear_case
from fxwrap import Options
from fxwrap.lines import ExternCall
from fxwrap.loop_ir import FLOAT8
from tests.lowering.test_float8 import quantised_rows
from tests.printers.test_float8 import codes, floats
from tests.support.agreement import assert_as_exact

pytestmark = pytest.mark.gpu

BF16, F32 = torch.bfloat16, torch.float32


def compiled(function: Callable[..., Any], inputs: list[Tensor], **options: Any) -> fxwrap.Compiled:
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    return fxwrap.compile_graph(graph, inputs, options=Options(**options))


def called(program: fxwrap.Compiled) -> list[str]:
    return [line.target for line in program.program.lines() if isinstance(line, ExternCall)]


@pytest.mark.parametrize("dtype", sorted(FLOAT8, key=str), ids=str)
def test_casts_are_those_of_eager_mode(dtype: torch.dtype) -> None:
    x = torch.cat([floats(item) for item in sorted(FLOAT8, key=str)]).cuda()
    inputs = [x, x.to(BF16), x.to(torch.float16)]
    program = compiled(lambda *items: [item.to(dtype) for item in items], inputs)
    assert called(program) == []
    for result, item in zip(program(*inputs), inputs, strict=True):
        expected, real = item.to(dtype), ~item.isnan()  # the GPU's instructions have one NaN, eager mode both signs
        assert torch.equal(result.view(torch.uint8)[real], expected.view(torch.uint8)[real])
        assert result.float()[~real].isnan().all()
    every = codes(dtype).cuda()
    results = compiled(lambda item: [item.to(F32), item.to(BF16)], [every])(every)
    for result, expected in zip(results, (every.to(F32), every.to(BF16)), strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", ["in_place", "functional"])
@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
def test_dynamic_quantisation_by_every_emitter(emitter: str, form: str) -> None:
    x = torch.randn(64, 512, device="cuda", dtype=BF16)
    program = compiled(lambda x: quantised_rows(x), [x], emitter=emitter, fx_form=form)
    assert called(program) == []
    for _ in range(2):  # the second launch is native
        result, step = program(x)
        torch.testing.assert_close(step, quantised_rows(x)[1], rtol=2e-7, atol=0)
        exact = (x.float() / step).to(torch.float8_e4m3fn)
        assert torch.equal(result.view(torch.uint8), exact.view(torch.uint8))


@pytest.mark.parametrize("rows", [1, 16, 200])
def test_scaled_matmuls_are_as_exact_as_the_library(rows: int) -> None:
    matrix, scale = torch.randn(256, 512, device="cuda").to(torch.float8_e4m3fn), torch.rand(1, 256, device="cuda")
    left, step = quantised_rows(torch.randn(rows, 512, device="cuda", dtype=BF16))

    def product(left: Tensor, matrix: Tensor, step: Tensor, scale: Tensor) -> Tensor:
        return torch._scaled_mm(left, matrix.t(), step, scale, out_dtype=BF16)

    inputs = [left, matrix, step, scale]
    program = compiled(product, inputs, matmul_kernels="generated")
    exact = (left.double() @ matrix.double().t()) * step.double() * scale.double()
    assert called(program) == []
    assert_as_exact(program(*inputs)[0], product(*inputs), exact)


@pytest.mark.parametrize("name", ["int8", "int8-packed", "int4", "int4-packed", "float8"])
def test_weights_are_dequantised_as_exactly_as_by_eager_mode(name: str) -> None:
    for rows in (1, 3, 16, 200):
        with torch.device("cuda"):
            case = linear_case(name, rows, 2048, 512, BF16)
        wide = [item.double() if item.is_floating_point() and item.itemsize > 1 else item for item in case.inputs]
        exact = case.reference(*wide)
        program = compiled(case.function, [*case.inputs], matmul_kernels="generated")
        assert called(program) == []
        assert_as_exact(program(*case.inputs)[0], case.function(*case.inputs), exact, slack=1e-4)


@pytest.mark.parametrize("rows", [1, 3, 8, 16])
@pytest.mark.parametrize("groups", [5, 43, 172])
def test_rows_of_int4_have_any_number_of_groups(rows: int, groups: int) -> None:
    """The last step of a kernel has fewer groups than its tile, a short row in one step, a long one after others."""
    x = torch.randn(rows, groups * GROUP, device="cuda", dtype=BF16)
    weight = torch.randint(256, (1040, groups * GROUP // 2), device="cuda", dtype=torch.uint8)
    scale, zero = [torch.rand(1040, groups, device="cuda", dtype=BF16) + item for item in (0.5, 7)]
    inputs = [x, weight, scale, zero]
    program = compiled(int4_linear, inputs)
    exact = int4_linear(x.double(), weight, scale.double(), zero.double())
    assert called(program) == []
    for _ in range(2):
        assert_as_exact(program(*inputs)[0], int4_linear(*inputs), exact)


@pytest.mark.parametrize("groups", [16, 43, 64])
@pytest.mark.parametrize("magnitude", [2.0**-40, 1.0, 2.0**40])
def test_one_row_of_int4_and_many_columns(groups: int, magnitude: float) -> None:
    """Kernels of one sum multiply the bits of digits; others, gated as in a model, those of biased bytes."""
    columns = 40960 if groups == 16 else 20480
    x = (torch.randn(1, groups * GROUP, device="cuda") * magnitude).to(BF16)
    weights = []
    for _ in range(2):
        weights.append(torch.randint(256, (columns, groups * GROUP // 2), device="cuda", dtype=torch.uint8))
        weights += [torch.rand(columns, groups, device="cuda", dtype=BF16) + item for item in (0.5, 7)]

    def gated(x: Tensor, *items: Tensor) -> Tensor:
        gate, other = [int4_linear(x, *items[at : at + 3]) for at in (0, 3)]
        return torch.nn.functional.silu(gate) * (other * (1 / magnitude))

    for function, inputs in ((gated, [x, *weights]), (int4_linear, [x, *weights[:3]])):
        program = compiled(function, inputs)
        exact = function(*[item.double() if item.is_floating_point() else item for item in inputs])
        assert called(program) == [] and len(program.program.kernels) == 1
        assert_as_exact(program(*inputs)[0], function(*inputs), exact)
        assert torch.equal(program(*inputs)[0], program(*inputs)[0])


@pytest.mark.parametrize("form", ["", "-routed", "-scored", "-batched"])
def test_experts(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPERTS, "small", (16, 4, 512, 384))  # type: ignore[arg-type]
    monkeypatch.setitem(EXPERTS, "wide", (8, 2, 256, 8192))  # type: ignore[arg-type]  # tiles of one token's experts
    for model, rows in (("small", 1), ("small", 7), ("small", 300), ("wide", 1)):
        with torch.device("cuda"):
            case = expert_case(f"{model}{form}", rows, 1, BF16)
        exact = case.reference(*[item.double() if item.is_floating_point() else item for item in case.inputs])
        program = compiled(case.function, [*case.inputs], matmul_kernels="generated")
        assert "aten._grouped_mm.default" not in called(program)
        assert_as_exact(program(*case.inputs)[0], case.function(*case.inputs), exact)
