"""Matmuls as kernels: which ones are, what fuses with them, and their results beside eager mode's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.devices import CPU
from fxwrap.lines import ExternCall, Launch
from tests.support.agreement import assert_as_exact
from tests.support.long_form import long_only

BF16, F32 = torch.bfloat16, torch.float32


def programs_of(function: Callable[..., Any], inputs: list[torch.Tensor], **options: Any) -> fxwrap.Compiled:
    """The compiled function, with matmuls as kernels unless the options say otherwise."""
    graph = make_fx(function)(*inputs)
    return fxwrap.compile_graph(graph, inputs, options=Options(**{"matmul_kernels": "generated", **options}))


def called(compiled: fxwrap.Compiled) -> list[str]:
    return [line.target for line in compiled.program.lines() if isinstance(line, ExternCall)]


def launches(compiled: fxwrap.Compiled) -> list[str]:
    return [line.kernel for line in compiled.program.lines() if isinstance(line, Launch)]


def random(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


def every_matmul(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, batch: torch.Tensor) -> list[torch.Tensor]:
    """Matmuls of 3 x 40 by 40 x 24, and of batches, in the forms that models write."""
    linear = torch.nn.functional.linear
    return [
        torch.mm(x, w.t()), torch.addmm(b, x, w.t(), beta=0.5, alpha=2.0), torch.addmm(b / 0, x, w.t(), beta=0),
        torch.mv(w, x[0]), torch.addmv(b, w, x[1]), linear(x, w, b), linear(x[0], w),
        torch.bmm(batch, batch.transpose(1, 2)), torch.baddbmm(b[:4], batch, batch.transpose(1, 2)),
        batch @ w.t(), x[:, 1::2] @ w[:, 1::2].t(), linear(x * 2 + 1, w), x[:0] @ w.t(),
        torch.nn.functional.gelu(linear(x, w, b)) + b, linear(x.t().contiguous().t(), w),
        x.unsqueeze(0).expand(5, 3, 40) @ w.t(),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, long_only(BF16), long_only(torch.float16)], ids=str)
def test_results_are_as_exact_as_those_of_eager_mode(dtype: torch.dtype) -> None:
    inputs = [random(dtype, 3, 40), random(dtype, 24, 40), random(dtype, 24), random(dtype, 2, 4, 40)]
    compiled = programs_of(every_matmul, inputs)
    assert called(compiled) == ["aten.mm.default"] * 2, "one whose columns are not contiguous, and an empty one"
    exact = every_matmul(*[item.double() for item in inputs])
    for want, eager, result in zip(exact, every_matmul(*inputs), compiled(*inputs), strict=True):
        assert result.stride() == eager.stride()
        # Processors' libraries add the terms in different orders, all of them in float32.
        assert_as_exact(result, eager, want, slack=torch.finfo(dtype).eps / 8 + torch.finfo(F32).eps / 4)


def test_matmuls_whose_tiles_no_shared_memory_holds_are_called(caplog: pytest.LogCaptureFixture) -> None:
    device = replace(CPU, massively_parallel=True, shared_memory_bytes=4096)
    inputs = [random(F32, 256, 128), random(F32, 128, 256)]
    with caplog.at_level("INFO", "fxwrap.kernels"):
        compiled = programs_of(lambda x, w: (x @ w).relu(), inputs, devices=(device,), cpu_kernels="triton")
    assert called(compiled) == ["aten.mm.default"]
    (line,) = [record.message for record in caplog.records if "shared memory" in record.message]
    assert line.endswith("cpu has 4096: no configuration of the kernel fits")


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x @ gate.t()) * (x @ up.t()) + residual


def test_two_products_of_one_tensor_fuse_with_their_epilogue() -> None:
    inputs = [random(F32, 2, 40), random(F32, 24, 40), random(F32, 24, 40), random(F32, 2, 24)]
    compiled = programs_of(swiglu, inputs)
    assert len(launches(compiled)) == 1
    assert called(compiled) == []
    torch.testing.assert_close(compiled(*inputs)[0], swiglu(*inputs))


def int8_linear(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, w.to(x.dtype)) * scale


def int4_linear(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    halves = torch.stack([(w & 15).to(torch.int8) - 8, (w >> 4).to(torch.int8) - 8], -1)
    return torch.nn.functional.linear(x, halves.reshape(w.shape[0], -1).to(x.dtype)) * scale


@pytest.mark.parametrize("cpu_kernels", ["cpp", "triton"])
@pytest.mark.parametrize("rows", [1, 3])
def test_dequantised_weights_are_read_in_the_kernel(rows: int, cpu_kernels: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, scale = random(BF16, rows, 64), random(BF16, 96)
    int8 = torch.randint(-127, 128, (96, 64), dtype=torch.int8, generator=generator)
    int4 = torch.randint(0, 256, (96, 32), dtype=torch.uint8, generator=generator)
    for function, weights in ((int8_linear, int8), (int4_linear, int4)):
        compiled = programs_of(function, [x, weights, scale], cpu_kernels=cpu_kernels)
        assert (called(compiled), len(launches(compiled))) == ([], 1)
        want = function(x.double(), weights, scale.double())
        assert_as_exact(compiled(x, weights, scale)[0], function(x, weights, scale), want)


def test_float32_matmuls_of_widened_operands_are_not_of_half_precision() -> None:
    """Rows of bfloat16, times codes with a scale for each column."""
    int8 = torch.randint(-127, 128, (40, 32), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    x, scale = random(BF16, 5, 32), random(F32, 40)

    def function(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x.to(scale.dtype) @ (w.to(scale.dtype) * scale[:, None]).t()

    compiled = programs_of(function, [x, int8, scale], cpu_kernels="triton", emitter="python")
    assert called(compiled) == []
    want = function(x, int8, scale.double())
    assert (compiled(x, int8, scale)[0].double() - want).norm() <= 4 * torch.finfo(F32).eps * want.norm()


@pytest.mark.parametrize("emitter", ["python", "cpp", "fx", "interpreter"])
@pytest.mark.parametrize(("rows", "dtype"), [(1, F32), (9, BF16)], ids=str)
def test_every_emitter_launches_them(emitter: str, rows: int, dtype: torch.dtype) -> None:
    inputs = [random(dtype, rows, 40), random(dtype, 24, 40)]
    compiled = programs_of(lambda x, w: torch.relu(x @ w.t()), inputs, emitter=emitter)
    assert called(compiled) == []
    want = torch.relu(inputs[0].double() @ inputs[1].double().t())
    assert (compiled(*inputs)[0].double() - want).norm() <= torch.finfo(dtype).eps * want.norm()


def test_the_default_generates_products_of_one_row_where_the_device_prefers_that() -> None:
    row, rows, w = random(F32, 1, 40), random(F32, 2, 40), random(F32, 24, 40)

    def function(row: torch.Tensor, rows: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(row @ w.t()), torch.relu(rows @ w.t())

    compiled = programs_of(function, [row, rows, w], matmul_kernels="auto")
    assert called(compiled) == ["aten.mm.default"]
    assert launches(compiled) == ["mm_relu_0", "relu_0"]
    assert called(programs_of(function, [row, rows, w], matmul_kernels="library")) == ["aten.mm.default"] * 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [255, 256])
def test_the_default_generates_products_of_few_rows_of_large_matrices(size: int) -> None:
    x, w = random(F32, 8, 256), random(F32, size, 256)
    compiled = programs_of(lambda x, w: torch.relu(x @ w.t()), [x, w], matmul_kernels="auto")
    assert called(compiled) == (["aten.mm.default"] if size < 256 else [])
    many = [random(F32, 9, 256), w]
    assert called(programs_of(lambda x, w: x @ w.t(), many, matmul_kernels="auto")) == ["aten.mm.default"]
    batch = [random(F32, 2, 8, 256), random(F32, 2, 256, 256)]
    assert called(programs_of(lambda x, w: x @ w.mT, batch, matmul_kernels="auto")) == ["aten.bmm.default"]


def test_a_symbolic_number_of_rows() -> None:
    w = random(F32, 24, 40)
    graph = make_fx(lambda x, w: x @ w.t(), tracing_mode="symbolic")(random(F32, 5, 40), w)
    compiled = fxwrap.compile_graph(graph, options=Options(matmul_kernels="generated"))
    assert called(compiled) == []
    for rows in (2, 9, 30):
        x = random(F32, rows, 40)
        torch.testing.assert_close(compiled(x, w)[0], x @ w.t())


def test_a_matmul_that_no_schedule_fits_is_called_and_the_rest_fuses() -> None:
    inputs = [random(F32, 2, 40), random(F32, 40, 24)]
    compiled = programs_of(lambda x, w: torch.relu(x @ w), inputs)
    assert called(compiled) == ["aten.mm.default"]
    assert launches(compiled) == ["relu_0"]
    assert [item.reason for item in compiled.coverage if item.kind == "call"] == [
        "a library call: no schedule of a kernel fits it"
    ]


def test_one_row_and_small_matrices_with_contiguous_rows() -> None:
    inputs = [random(F32, 3, 1, 40), random(F32, 3, 40, 24)]
    compiled = programs_of(lambda x, w: torch.relu(x @ w), inputs, matmul_kernels="auto")
    assert called(compiled) == []
    torch.testing.assert_close(compiled(*inputs)[0], torch.relu(inputs[0] @ inputs[1]))


def test_matmuls_of_operands_that_overlap_or_are_misaligned() -> None:
    base = random(F32, 200)

    def function(base: torch.Tensor) -> torch.Tensor:
        return base.as_strided((2, 33), (7, 1), 3) @ base.as_strided((5, 33), (11, 1), 1).t()

    compiled = programs_of(function, [base])
    assert called(compiled) == []
    torch.testing.assert_close(compiled(base)[0], function(base))
