"""Elements that consecutive products share (packed weights, scales of groups): loaded once, repeated in registers."""

from __future__ import annotations

import re

import pytest

from fxwrap.loop_ir import Kernel, parse_kernel
from fxwrap.printers.triton import Configuration, DotConfiguration, TileConfiguration, configurations
from tests.printers.test_triton_printer_compile import instructions
from tests.printers.triton_kernels import check

INT4 = """kernel(x: bf16[{rows}*256], w: u8[32*128], s: bf16[32*4], z: f32[32*4]) -> (out: f32[{rows}*32]) \
for [i: {rows}, j: 32] reduce [g: 4, h: 32, p: 2] {{
  %0 = bf16 load x[256*i + 64*g + 2*h + p]
  %1 = f32 cast %0
  %2 = i64 index p
  %3 = i64 1
  %4 = bool lt %2 %3
  %5 = bool ge %2 %3
  %6 = u8 load w[128*j + 32*g + h] if %5 else 0
  %7 = u8 4
  %8 = u8 bitwise_right_shift %6 %7
  %9 = u8 load w[128*j + 32*g + h] if %4 else 0
  %10 = u8 15
  %11 = u8 bitwise_and %9 %10
  %12 = u8 where %4 %11 %8
  %13 = f32 cast %12
  %14 = bf16 load s[4*j + g]
  %15 = f32 cast %14
  %16 = f32 load z[4*j + g]
  %17 = f32 sub %13 %16
  %18 = f32 mul %17 %15
  %19 = f32 mul %1 %18
  %20 = f32 reduce sum %19
  store out[32*i + j] %20
}}
"""
WORDS = """kernel(x: f32[{rows}*256], w: i32[32*32]) -> (out: f32[{rows}*32]) \
for [i: {rows}, j: 32] reduce [k: 8, p: 2, l: 4, q: 4] {{
  %0 = f32 load x[256*i + 32*k + 16*p + 4*l + q]
  %1 = i32 load w[32*j + 4*k + l]
  %2 = i64 index 16*p + 4*q
  %3 = i32 cast %2
  %4 = i32 bitwise_right_shift %1 %3
  %5 = i32 15
  %6 = i32 bitwise_and %4 %5
  %7 = f32 cast %6
  %8 = f32 mul %0 %7
  %9 = f32 reduce sum %8
  store out[32*i + j] %9
}}
"""


def tile(kernel: Kernel, block: int) -> Configuration:
    """Blocks of one row times columns, or of a dot; the weights on either side."""
    i, j = kernel.axes
    if kernel.axes[0].size == 1:
        return TileConfiguration(y=kernel.axes, y_block=4, r_block=block, looped=True, num_stages=2)
    return DotConfiguration(x=(i,), y=(j,), x_block=16, y_block=16, r_block=block, num_stages=2)


@pytest.mark.parametrize("text", [INT4, WORDS], ids=["bytes", "words"])
@pytest.mark.parametrize(("rows", "block"), [(1, 128), (1, 256), (17, 64)])
def test_shared_elements_are_loaded_once(text: str, rows: int, block: int) -> None:
    kernel = parse_kernel(text.format(rows=rows))
    source = check(kernel, tile(kernel, block), tolerance=0.5)
    run = 2 if text is INT4 else 8
    assert f"R_BLOCK // {run}" in source and "tl.join" in source
    assert text is WORDS or "R_BLOCK // 64" in source


@pytest.mark.parametrize("rows", [1, 17])
def test_the_last_block_may_have_fewer_runs(rows: int) -> None:
    kernel = parse_kernel(WORDS.format(rows=rows).replace("k: 8", "k: 7"))
    assert "run_mask = run < 28" in check(kernel, tile(kernel, 64), tolerance=0.5)


def test_weights_may_be_the_right_operand_of_the_dot() -> None:
    kernel = parse_kernel(INT4.format(rows=64))
    i, j = kernel.axes
    dot = DotConfiguration(x=(j,), y=(i,), x_block=16, y_block=32, r_block=64)
    source = check(kernel, dot, tolerance=0.5)
    assert "tl.broadcast_to(w[:, None, :], (R_BLOCK // 2, 2, X_BLOCK))" in source


def test_every_configuration_is_correct() -> None:
    for rows in (1, 3):
        kernel = parse_kernel(INT4.format(rows=rows))
        for item in configurations(kernel):
            check(kernel, item, tolerance=0.5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("old", "new", "block"), [("q: 4", "q: 3", 64), ("q: 4", "q: 4", 4)], ids=["no_power_of_two", "blocks_within_a_run"]
)
def test_other_elements_are_loaded_for_each_product(old: str, new: str, block: int) -> None:
    kernel = parse_kernel(WORDS.format(rows=1).replace(old, new))
    source = check(kernel, tile(kernel, block), tolerance=1e-3)
    assert "tl.reshape" not in source


def test_a_mask_of_other_axes_is_applied_to_each_product() -> None:
    kernel = parse_kernel(INT4.format(rows=1).replace("%2 = i64 index p", "%2 = i64 index h"))
    source = check(kernel, tile(kernel, 128), tolerance=0.5)
    assert re.search(r"tl.load\(w_ptr.*mask=ge", source)


@pytest.mark.parametrize("rows", [1, 16])
def test_a_gpu_loads_packed_weights_in_vectors(rows: int) -> None:
    larger = {
        "32*128": "512*2048", "32*4": "512*64", "j: 32": "j: 512", "g: 4": "g: 64", "*256]": "*4096]", "4*j + g":
        "64*j + g", "256*i": "4096*i", "128*j": "2048*j", "32*i + j": "512*i + j", f"[{rows}*32]": f"[{rows}*512]",
    }  # fmt: skip
    text = INT4.format(rows=rows)
    for old, new in larger.items():
        text = text.replace(old, new)
    ptx = instructions(parse_kernel(text))
    assert not re.search(r"ld\.global\S*\.b8", ptx), "bytes are loaded one by one"


@pytest.mark.parametrize("rows", [1, 17])
def test_words_are_read_in_the_order_of_memory(rows: int) -> None:
    """Outer steps of a sum have the larger strides, in whichever order the kernel has its axes."""
    kernel = parse_kernel(WORDS.format(rows=rows).replace("4*k + l", "k + 8*l"))
    source = check(kernel, tile(kernel, 64), tolerance=1e-3)
    digits = [line.strip().partition(" = ")[0] for line in source.splitlines() if re.match(r" +[klpq]\w* = r\w*", line)]
    assert [name[0] for name in digits[:4]] == ["q", "p", "k", "l"]
