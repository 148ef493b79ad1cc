"""Float8 in programs: fused casts, scaled matmuls; and packed int4 weights beside their formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import fxwrap
from fxwrap import Options
from fxwrap.devices import CPU
from fxwrap.lines import ExternCall, Launch, Mutate
from fxwrap.testing import assert_emitters_agree

BF16, F32 = torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def random(*sizes: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes) + seed)).to(dtype)


def compiled(function: Callable[..., Any], inputs: list[Tensor], **options: Any) -> fxwrap.Compiled:
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    return fxwrap.compile_graph(graph, inputs, options=Options(**options))


def calls_and_launches(program: fxwrap.Compiled) -> tuple[list[str], int]:
    lines = [*program.program.lines()]
    called = [line.target for line in lines if isinstance(line, ExternCall)]
    return called, sum(isinstance(line, Launch) for line in lines)


def quantised_rows(x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """Dynamic quantisation: a scale for each row, and the row in float8."""
    step = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (x.float() / step).to(dtype), step


def normalised_and_quantised(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    return quantised_rows(wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6) * weight)


def equal(actual: Tensor, expected: Tensor) -> bool:
    if expected.dtype in (E4M3, E5M2):
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    return torch.equal(actual, expected)


@pytest.mark.parametrize("cpu_kernels", ["cpp", "triton"])
def test_dynamic_quantisation_is_one_kernel_of_its_producer(cpu_kernels: str) -> None:
    cases: list[tuple[Callable[..., tuple[Tensor, Tensor]], list[Tensor]]] = [
        (lambda x: quantised_rows(x), [random(5, 96)]),
        (normalised_and_quantised, [random(5, 96, dtype=F32), random(96, dtype=F32)]),
    ]
    for function, inputs in cases:
        program = compiled(function, inputs, cpu_kernels=cpu_kernels)
        assert calls_and_launches(program) == ([], 1)
        codes, step = program(*inputs)
        expected, expected_step = function(*inputs)
        if len(inputs) == 1:
            assert equal(codes, expected) and equal(step, expected_step)
        else:  # sums have another order
            torch.testing.assert_close(step, expected_step)
            torch.testing.assert_close(codes.float() * step, expected.float() * expected_step, rtol=0.07, atol=1e-2)


def moved(x: Tensor, scale: Tensor) -> list[Tensor]:
    """Float8 that views, copies and concatenations move, with other float8 and overflow."""
    codes = (x * scale).to(E4M3)
    both = torch.cat([codes.t(), codes.t().clone()], 1)
    return [both[1:], both.float().sum(0), codes.to(E5M2), x.to(E5M2).to(BF16) + 1, codes.to(torch.float64)]


def test_every_emitter_agrees_on_float8() -> None:
    assert_emitters_agree(moved, [random(6, 10, dtype=F32), torch.tensor([300.0])])


def test_fx_graphs_launch_triton_kernels_of_float8_by_their_hash() -> None:
    """torch's operator for Triton kernels passes float8 tensors as such, and kernels access bytes."""
    x, scale = random(6, 10, dtype=F32), torch.tensor([2.0])
    for form in ("in_place", "functional"):
        program = compiled(moved, [x, scale], emitter="fx", fx_form=form, cpu_kernels="triton")
        targets = {str(node.target) for node in program.graph_module.graph.nodes}
        assert any("cpp_kernel" in target for target in targets)
        assert not any("triton_kernel_wrapper" in target for target in targets)
        other = compiled(moved, [x, scale], cpu_kernels="triton")
        assert all(map(equal, program(x, scale), other(x, scale)))


def written(x: Tensor) -> tuple[Tensor, Tensor]:
    target = torch.empty_like(x, dtype=E4M3)
    target.copy_(x * 2)
    return target, (x + 1).to(E5M2)


def test_a_device_whose_kernels_have_no_float8_calls_operators() -> None:
    x = random(6, 10, dtype=F32)
    assert calls_and_launches(compiled(written, [x]))[0] == ["aten.empty_like.default"]
    program = compiled(written, [x], devices=[dataclasses.replace(CPU, float8_kernels=False)])
    assert calls_and_launches(program) == (["aten.empty_like.default", "aten._to_copy.default"], 1)
    assert any(isinstance(line, Mutate) for line in program.program.lines())
    assert "kernels of cpu have no torch.float8_e5m2" in {item.reason for item in program.coverage}
    assert all(map(equal, program(x), written(x)))


def test_arithmetic_of_float8_stays_a_call_that_raises_as_eager() -> None:
    program = compiled(lambda x: x + x, [random(4).to(E4M3)])
    assert calls_and_launches(program) == (["aten.add.Tensor"], 0)
    with pytest.raises(RuntimeError, match="not implemented for 'Float8_e4m3fn'"):
        program(random(4).to(E4M3))


def scaled(out_dtype: torch.dtype, bias: bool) -> Callable[..., Tensor]:
    def function(x: Tensor, weight: Tensor, x_scale: Tensor, w_scale: Tensor, addend: Tensor) -> Tensor:
        added = addend if bias else None
        product = torch._scaled_mm(x, weight.t(), x_scale, w_scale, bias=added, out_dtype=out_dtype)
        return torch.relu(product)

    return function


@pytest.mark.parametrize("cpu_kernels", ["cpp", "triton"])
@pytest.mark.parametrize("rows", [1, 17])
def test_scaled_matmuls_are_contractions_with_scales_as_epilogue(rows: int, cpu_kernels: str) -> None:
    x, weight, addend = random(rows, 64).to(E4M3), random(48, 64).to(E4M3), random(48)
    of_rows = [random(rows, 1, dtype=F32).abs(), random(1, 48, dtype=F32).abs()]
    for scales, bias in ((of_rows, False), ([torch.tensor(0.5), torch.tensor(2.5)], True)):
        inputs = [x, weight, *scales, addend]
        program = compiled(scaled(BF16, bias), inputs, cpu_kernels=cpu_kernels, matmul_kernels="generated")
        assert calls_and_launches(program) == ([], 1)
        exact = torch.relu((x.double() @ weight.double().t()) * scales[0] * scales[1] + (addend if bias else 0))
        torch.testing.assert_close(program(*inputs)[0], exact.to(BF16), rtol=0.016, atol=1e-3)


def dynamic(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    codes, step = quantised_rows(x)
    return torch._scaled_mm(codes, weight.t(), step, scale, out_dtype=BF16)


def test_activations_are_quantised_by_the_kernel_of_their_scales() -> None:
    inputs = [random(17, 64), random(48, 64).to(E4M3), random(1, 48, dtype=F32).abs()]
    program = compiled(dynamic, inputs, cpu_kernels="triton", matmul_kernels="generated")
    quantisation, product = program.program.kernels
    assert calls_and_launches(program) == ([], 2)
    assert quantisation.signature == ("*bf16", "*f32", "*u8") and "*u8" in product.signature
    x, weight, scale = inputs
    codes, step = quantised_rows(x)
    exact = codes.double() @ weight.double().t() * step.double() * scale.double()
    assert (program(*inputs)[0].double() - exact).norm() < 0.01 * exact.norm()


def test_scaled_matmuls_stay_calls_by_default_and_for_block_scales() -> None:
    x, weight = random(16, 256).to(E4M3), random(48, 256).to(E4M3)
    one = torch.ones(())
    program = compiled(scaled(BF16, False), [x, weight, one, one, one])
    assert calls_and_launches(program)[0] == ["aten._scaled_mm.default"]


# --- int4 weights in the layout of NVIDIA's tensor cores --------------------------------------------------------------


def pack_int4(weight: Tensor, tiles: int) -> Tensor:
    """What `_convert_weight_to_int4pack` returns on a GPU for weights from 0 to 15 of [columns, width]."""
    columns, width = weight.shape
    packed = torch.zeros(columns // 8, width // (16 * tiles), 32, tiles // 2, dtype=torch.int64)
    for block in range(packed.shape[0]):
        for outer in range(packed.shape[1]):
            for lane in range(32):
                for pair in range(tiles // 2):
                    start = (outer * tiles + 2 * pair) * 16 + lane % 4 * 2
                    v = weight[block * 8 + lane // 4, [start + at for at in (0, 1, 8, 9, 16, 17, 24, 25)]].tolist()
                    order = [v[0], v[2], v[4], v[6], v[1], v[3], v[5], v[7]]  # from the lowest bits
                    packed[block, outer, lane, pair] = sum(item << 4 * place for place, item in enumerate(order))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def int4_packed(group: int) -> Callable[..., Tensor]:
    return lambda x, weight, scales: functional.silu(torch._weight_int4pack_mm(x, weight, group, scales))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("group", "tiles", "rows", "cpu_kernels"),
    [(32, 8, 1, "triton"), (64, 2, 17, "triton"), (128, 4, 3, "cpp"), (256, 8, 2, "cpp")],
)
def test_packed_int4_weights_are_the_prologue_of_a_contraction(
    group: int, tiles: int, rows: int, cpu_kernels: str
) -> None:
    columns, width = 16, 256
    generator = torch.Generator().manual_seed(group)
    weight = torch.randint(0, 16, (columns, width), generator=generator)
    scales = random(width // group, columns, 2, seed=group)
    inputs = [random(rows, width), pack_int4(weight, tiles), scales]
    library = compiled(int4_packed(group), inputs, cpu_kernels=cpu_kernels)
    assert calls_and_launches(library)[0] == ["aten._weight_int4pack_mm.default"]
    program = compiled(int4_packed(group), inputs, cpu_kernels=cpu_kernels, matmul_kernels="generated")
    assert calls_and_launches(program) == ([], 1)
    scale, zero = scales.double().repeat_interleave(group, 0).unbind(-1)
    exact = inputs[0].double() @ ((weight.t() - 8) * scale + zero)
    error = (program(*inputs)[0].double() - functional.silu(exact)).norm() / exact.norm()
    assert error < 0.01
