"""Casts from and to float8 in C++ and in Triton, bit for bit beside torch: every code, and floats at every boundary."""

from __future__ import annotations

import re

import pytest
import torch

from fxwrap.loop_ir import FLOAT8, Axis, Buffer, Kernel, KernelBuilder, as_index, parse_kernel, print_kernel
from fxwrap.printers.cpp import print_cpp_kernel
from fxwrap.printers.triton import print_triton
from fxwrap.runtime.kernels import load_kernel
from tests.printers.test_triton_printer_compile import compiled
from tests.printers.triton_kernels import check
from tests.support.long_form import LONG, sampled

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

WIDE = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.bool)
DTYPES = sorted(FLOAT8, key=str)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def cast_kernel(source: torch.dtype, targets: list[torch.dtype], count: int) -> Kernel:
    """Casts each element to every target."""
    body, axis = KernelBuilder(), Axis("p0", count)
    loaded = body.load("x", as_index(axis), source)
    for number, target in enumerate(targets):
        body.store(f"out{number}", as_index(axis), body.compute("cast", loaded, dtype=target))
    outputs = [Buffer(f"out{number}", target, count) for number, target in enumerate(targets)]
    return body.finish([axis], [], [Buffer("x", source, count)], outputs)


def run(kernel: Kernel, x: torch.Tensor, language: str) -> list[torch.Tensor]:
    """The outputs of a kernel of one axis."""
    printed = print_cpp_kernel(kernel) if language == "cpp" else print_triton(kernel)
    outs = [torch.full((x.numel(),), 0xAA, dtype=torch.uint8).to(item.dtype) for item in kernel.outputs]
    grid = tuple([int(size) for size in printed.grid])
    load_kernel(printed.language, printed.source, printed.signature, printed.options)(grid, x, *outs)
    return outs


def codes(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def floats(dtype: torch.dtype) -> torch.Tensor:
    """Every number of a dtype, every midpoint of neighbours, the floats beside both, and random bits."""
    finite = codes(dtype).float()
    finite = finite[finite.isfinite()].sort().values
    beyond = finite[-1] * torch.tensor([1.03125, 1.0625, 1.125, 2, 1e9])
    edges = torch.cat([finite, (finite[1:] + finite[:-1]) / 2, beyond])
    edges = torch.cat([edges, -edges])
    infinity = torch.tensor(torch.inf)
    beside = [torch.nextafter(edges, side.expand_as(edges)) for side in (infinity, -infinity)]
    bits = torch.randint(-(2**31), 2**31, (4000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, 0.0, -0.0, 1e-45, -1e-45, 1e-38])
    return torch.cat([edges, *beside, special, bits.view(torch.float32)])


def assert_equal_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares bits; NaNs of other dtypes than float8 are equal."""
    if expected.dtype in FLOAT8:
        assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
        return
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    if expected.is_floating_point():
        real, bits = ~expected.isnan(), BITS[expected.itemsize]
        assert torch.equal(actual.view(bits)[real], expected.view(bits)[real]), "signs of zeros"


@pytest.mark.parametrize("language", ["cpp", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_is_read_as_torch_reads_it(dtype: torch.dtype, language: str) -> None:
    targets = [*WIDE, *DTYPES]
    x = codes(dtype)
    kernel = cast_kernel(dtype, targets, x.numel())
    assert parse_kernel(print_kernel(kernel)) == kernel
    for target, out in zip(targets, run(kernel, x, language), strict=True):
        compared = x.float().isfinite() if target is torch.int32 else slice(None)  # the integer of NaN is undefined
        expected = x.float().to(target) if target in FLOAT8 and target is not dtype else x.to(target)
        assert_equal_bits(out[compared], expected[compared])


@pytest.mark.parametrize("language", ["cpp", "triton"])
@pytest.mark.parametrize("source", [item for item in WIDE if item is not torch.bool], ids=str)
def test_floats_are_rounded_as_torch_rounds_them(source: torch.dtype, language: str) -> None:
    x = torch.cat([floats(dtype) for dtype in DTYPES])
    if language == "triton":  # interpreted; each source has others
        x = x[sampled(range(x.numel()), WIDE.index(source), part=4)]
    x = x.nan_to_num(0, 0, 0).clamp(-1e6, 1e6).to(source) if source is torch.int32 else x.to(source)
    outs = run(cast_kernel(source, DTYPES, x.numel()), x, language)
    for dtype, out in zip(DTYPES, outs, strict=True):
        assert_equal_bits(out, x.to(dtype))


@pytest.mark.parametrize(
    ("source", "target", "instruction"),
    [
        (torch.float32, torch.float8_e4m3fn, "cvt.rn.satfinite.e4m3x2.f32"),
        (torch.float32, torch.float8_e5m2, "cvt.rn.satfinite.e5m2x2.f32"),
        (torch.float8_e4m3fn, torch.bfloat16, "cvt.rn.f16x2.e4m3x2"),
    ],
    ids=str,
)
def test_gpus_with_float8_convert_by_instructions_and_others_by_integers(
    source: torch.dtype, target: torch.dtype, instruction: str
) -> None:
    printed = print_triton(cast_kernel(source, [target], 4096))
    assert instruction in compiled(printed, 90).asm["ptx"]
    assert "e4m3" not in compiled(printed, 80).asm["ptx"]


SCALED = """kernel(a: f8e4m3fn[128*256], w: {dtype}[128*256], s: f32[128]) -> (out: f32[128*128]) \
for [i: 128, j: 128] reduce [k: 256] {{
  %0 = f8e4m3fn load a[256*i + k]
  %1 = f32 cast %0
  %2 = {dtype} load w[256*j + k]
  %3 = f32 cast %2
  %4 = f32 mul %1 %3
  %5 = f32 reduce sum %4
  %6 = f32 load s[j]
  %7 = f32 mul %5 %6
  store out[128*i + j] %7
}}
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["f8e4m3fn", "f8e5m2", "f8e4m3fnuz"])
def test_tensor_cores_multiply_float8_where_they_can(dtype: str) -> None:
    kernel = parse_kernel(SCALED.format(dtype=dtype))
    assert "tl.dot" in check(kernel, tolerance=1e-2)
    printed = print_triton(kernel)
    other = {"f8e4m3fn": "f32.e4m3.e4m3", "f8e5m2": "e5m2", "f8e4m3fnuz": "f32.f16.f16"}[dtype]
    assert re.search(rf"wgmma\.mma_async\S*{other}", compiled(printed, 90).asm["ptx"])
    if LONG or dtype == "f8e5m2":  # older GPUs multiply all of them in half precision
        assert "f32.f16.f16" in compiled(printed, 80).asm["ptx"]
