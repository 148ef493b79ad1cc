"""Programs that go through many columns of quantised weights, and digits that are multiplied by their bits."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from fxwrap.loop_ir import Kernel, parse_kernel
from fxwrap.printers.triton import FragmentConfiguration, configurations, print_triton
from tests.printers.test_triton_fragment_sums import SHUFFLED, fragments, int4
from tests.printers.test_triton_group_sums import replaced
from tests.printers.test_triton_printer_compile import SPILLED, compiled
from tests.printers.triton_kernels import check

_WEIGHT = """  %{0} = u8 load {w}[{bytes}*j + {size}*g + h] if %5 else 0
  %{1} = u8 bitwise_right_shift %{0} %6
  %{2} = u8 load {w}[{bytes}*j + {size}*g + h] if %4 else 0
  %{3} = u8 bitwise_and %{2} %7
  %{4} = u8 where %4 %{3} %{1}
  %{5} = f32 cast %{4}
  %{6} = bf16 load {s}[{groups}*j + g]
  %{7} = f32 cast %{6}
  %{8} = f32 load {z}[{groups}*j + g]
  %{9} = f32 sub %{5} %{8}
  %{10} = f32 mul %{9} %{7}
  %{11} = f32 mul %1 %{10}
  %{12} = f32 reduce sum %{11}
"""


def gated(rows: int, columns: int, groups: int, size: int = 32) -> Kernel:
    """Two matmuls of int4 weights with the rows, of which the first is gated by the other: `silu(a) * b`.

    One row has no axis if `rows` is 0. Groups have `size` bytes of two weights.
    """
    count = groups * size
    row, result = (f"{2 * count}*i + ", f"{columns}*i + ") if rows else ("", "")
    weights = "".join([
        _WEIGHT.format(
            *range(first, first + 13), w=f"w{n}", s=f"s{n}", z=f"z{n}", bytes=count, size=size, groups=groups
        ) for n, first in ((0, 8), (1, 21))
    ])  # fmt: skip
    sizes = {"w{}: u8": count, "s{}: bf16": groups, "z{}: f32": groups}
    buffers = "".join([f", {name.format(n)}[{columns * item}]" for n in (0, 1) for name, item in sizes.items()])
    return parse_kernel(
        f"kernel(x: bf16[{max(rows, 1) * 2 * count}]{buffers}) -> (out: f32[{max(rows, 1) * columns}]) "
        f"for [{f'i: {rows}, ' if rows else ''}j: {columns}] reduce [g: {groups}, h: {size}, p: 2] {{\n"
        f"  %0 = bf16 load x[{row}{2 * size}*g + 2*h + p]\n  %1 = f32 cast %0\n  %2 = i64 index p\n  %3 = i64 1\n"
        "  %4 = bool lt %2 %3\n  %5 = bool ge %2 %3\n  %6 = u8 4\n  %7 = u8 15\n"
        f"{weights}"
        "  %34 = f32 neg %20\n  %35 = f32 exp %34\n  %36 = f32 1.0\n  %37 = f32 add %36 %35\n  %38 = f32 div %20 %37\n"
        f"  %39 = f32 mul %38 %33\n  store out[{result}j] %39\n}}\n"
    )


def looping(kernel: Kernel, rows: int, columns: int, warps: int, parts: int, programs: int) -> FragmentConfiguration:
    """So many programs, of which a block has some columns and all groups."""
    return replace(fragments(kernel, rows, columns, warps, parts), programs=programs)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    ("rows", "groups", "block", "columns", "warps", "parts", "programs"),
    [
        (0, 8, 1, 8, 1, 1, 3),  # four blocks of columns, of which the first program has two
        (0, 5, 1, 16, 1, 1, 1),  # five of eight groups
        (0, 16, 1, 8, 2, 1, 4),
        (3, 4, 4, 8, 2, 1, 3),
        (7, 3, 8, 8, 2, 2, 2),
    ],
)
def test_programs_go_through_columns(
    rows: int, groups: int, block: int, columns: int, warps: int, parts: int, programs: int, raw: bool
) -> None:
    """Rows are loaded and converted before the loop, the weights of the next block in it."""
    kernel = gated(rows, 32, groups)
    source = check(
        kernel, replace(looping(kernel, block, columns, warps, parts, programs), raw_digits=raw), tolerance=1e-3
    )
    before, loop, after = source.partition("    for block")
    assert loop and before.count("tl.load(x_ptr") == 1 and "tl.load(x_ptr" not in after
    weights = [line for line in after.splitlines() if "tl.load(w0_ptr" in line]
    assert len(weights) == before.count("tl.load(w0_ptr") and all("mask=more" in line for line in weights)
    assert ("raw_digits(" in after) == raw and ("biased_bytes(" in after) == (not raw)


@pytest.mark.parametrize(
    ("rows", "groups", "size", "block", "columns", "warps", "parts", "ahead"),
    [
        (0, 8, 32, 1, 32, 1, 1, False),
        (0, 48, 16, 1, 16, 2, 1, True),
        (0, 12, 32, 1, 32, 1, 1, True),  # two steps of eight groups, of which the last has four
        (1, 24, 32, 2, 16, 2, 1, True),
        (0, 16, 128, 4, 16, 1, 1, False),
        (0, 32, 32, 1, 16, 2, 2, False),  # eight groups after another eight in each warp
        (1, 19, 32, 2, 16, 2, 2, True),
    ],
)
def test_digits_are_multiplied_by_their_bits(
    rows: int, groups: int, size: int, block: int, columns: int, warps: int, parts: int, ahead: bool
) -> None:
    """A step loads the elements of the next one after the last use of its own."""
    kernel = int4(rows, groups, size)
    raw = replace(fragments(kernel, block, columns, warps, parts, ahead), raw_digits=True)
    source = check(kernel, raw, tolerance=1e-3)
    assert "raw_digits(" in source and "scaled_row(" in source and "biased_bytes(" not in source
    _, loop, step = source.partition("    for st")
    assert bool(loop) == (groups > raw.p_block)
    if ahead:
        assert step.index("tl.dot(") < step.index("tl.load(w_ptr")


@pytest.mark.parametrize("magnitude", [2.0**-50, 1.0, 2.0**60])
def test_digits_and_rows_of_any_magnitude_have_exact_sums(magnitude: float) -> None:
    """Products of integers have exact sums in float32, wherever the exponent of the rows is."""
    kernel, generator = int4(0, 8, 32), torch.Generator().manual_seed(3)
    inputs = {
        "x": (torch.randint(-9, 10, (512,), generator=generator) * magnitude).to(torch.bfloat16),
        "w": torch.randint(256, (32 * 256,), generator=generator).to(torch.uint8),
        "s": torch.ones(256, dtype=torch.bfloat16), "z": torch.randint(16, (256,), generator=generator).float(),
    }  # fmt: skip
    check(kernel, replace(fragments(kernel, 1, 16, 1, 1), raw_digits=True), inputs, tolerance=1e-30)


def test_one_row_of_many_columns_may_have_looping_programs() -> None:
    """Two programs a processor, which have all groups. Timing may choose them; other ones are first."""
    kernels = [gated(0, 14336, 64), int4_of(32000, 64), int4_of(4096, 64), int4_of(32000, 224), gated(0, 28672, 32)]
    known = [[item for item in configurations(kernel) if isinstance(item, FragmentConfiguration)] for kernel in kernels]
    loops = [[item for item in items if item.programs] for items in known]
    assert all(not items[0].programs for items in known) and all(item.raw_digits for items in loops for item in items)
    shapes = [[(item.programs, item.y_block, item.num_warps) for item in items] for items in loops]
    assert shapes == [[(264, 16, 8), (264, 8, 8)], [(264, 16, 8)], [], [], [(528, 16, 4), (528, 8, 4)]]
    assert [items[0].raw_digits for items in known] == [False, True, True, True, False]
    assert print_triton(kernels[0], loops[0][0]).grid == (264, 1, 1)


def int4_of(columns: int, groups: int) -> Kernel:
    """One row of groups of 32 bytes times so many columns."""
    head, body = str(int4(0, groups, 32)).split("\n", 1)
    sizes = {f"[{count * groups}]": f"[{columns * count // 32 * groups}]" for count in (32 * 32, 32)}
    return parse_kernel(f"{replaced(head, {**sizes, 'f32[32]': f'f32[{columns}]', 'j: 32': f'j: {columns}'})}\n{body}")


@pytest.mark.parametrize(("columns", "groups", "block"), [(16384, 64, 32), (16384, 20, 16), (4096, 64, 16)])
def test_digits_of_eight_rows_are_multiplied_by_their_bits(columns: int, groups: int, block: int) -> None:
    """Programs of many columns have 32 of these, unless their last step would be half empty."""
    text = str(int4(8, groups, 32)).replace("j: 32", f"j: {columns}").replace("out[32*i", f"out[{columns}*i")
    for count in (32 * 32 * groups, 32 * groups, 8 * 32):
        text = text.replace(f"[{count}]", f"[{columns * count // 32}]", 2)
    first = configurations(parse_kernel(text))[0]
    assert isinstance(first, FragmentConfiguration) and first.raw_digits and first.y_block == block
    check(int4(8, 16, 32), replace(fragments(int4(8, 16, 32), 8, 32, 2, 4), raw_digits=True), tolerance=1e-3)


@SHUFFLED
@pytest.mark.parametrize("is_gated", [True, False])
def test_a_looping_program_moves_no_operand_between_lanes(is_gated: bool) -> None:
    """Shared memory and shuffles are for the sums of warps, after the products of a block; nothing is spilled."""
    kernel = gated(0, 14336, 64) if is_gated else int4_of(32000, 64)
    known = next(
        item for item in configurations(kernel)
        if isinstance(item, FragmentConfiguration) and item.programs and item.y_block == (8 if is_gated else 16)
    )  # fmt: skip
    ptx = compiled(print_triton(kernel, known)).asm["ptx"]
    products = [item.start() for item in re.finditer("mma.sync", ptx)]
    moves = [item.start() for item in re.finditer(r"bar\.sync|ld\.shared|st\.shared|shfl|ldmatrix", ptx)]
    assert len(products) == 40 and moves and min(moves) > max(products)
    assert not SPILLED.search(ptx) and len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) >= 16
