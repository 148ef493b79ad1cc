"""Contractions in Triton whose operands tensor descriptors describe: interpreted beside the evaluator, and compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fxwrap.devices import CUDA
from fxwrap.devices.kernel_names import described_parameters
from fxwrap.loop_ir import Kernel, find_contraction, find_grouped_contraction, parse_kernel
from fxwrap.printers.triton import DotConfiguration, GroupBlockConfiguration, configurations, print_triton
from tests.printers.test_triton_printer_compile import compiled
from tests.printers.triton_kernels import check


def matmul(
    left: str = "40*i + k", right: str = "40*j + k", *, sizes: tuple[int, int, int] = (37, 24, 40), dtype: str = "f16"
) -> Kernel:
    """A matmul of operands at these indices, with a bias."""
    rows, columns, reduced = sizes
    lines = f"""kernel(a: {dtype}[4096], w: {dtype}[4096], b: f32[{columns}]) -> (out: f32[{rows * columns}]) \
for [i: {rows}, j: {columns}] reduce [k: {reduced}] {{
  %0 = {dtype} load a[{left}]
  %1 = f32 cast %0
  %2 = {dtype} load w[{right}]
  %3 = f32 cast %2
  %4 = f32 mul %1 %3
  %5 = f32 reduce sum %4
  %6 = f32 load b[j]
  %7 = f32 add %5 %6
  store out[{columns}*i + j] %7
}}
"""
    return parse_kernel(lines)


def tile(kernel: Kernel, rows_first: bool = True) -> DotConfiguration:
    """Tiles of 16 rows and 16 columns with descriptors."""
    contraction = find_contraction(kernel)
    assert contraction is not None
    pair = contraction.rows, contraction.columns
    y, x = pair if rows_first else pair[::-1]
    return DotConfiguration(x=x, y=y, x_block=16, y_block=16, r_block=32, num_stages=2, descriptors=True)


@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize(
    ("left", "right", "described"),
    [
        ("40*i + k", "40*j + k", 2),
        ("40*i + k", "24*k + j", 2),
        ("40*k + i", "40*j + k", 2),
        ("40*i + k + 8", "40*j + k + 1024", 2),
        ("40*i + k + 7", "40*j + k", 1),
        ("36*i + k", "40*j + k", 1),  # rows are 72 bytes from each other
        ("40*i + 2*k", "40*j + k", 1),
        ("40*i + k", "41*j + k", 1),
    ],
)
def test_matrices_are_described(left: str, right: str, described: int, rows_first: bool) -> None:
    kernel = matmul(left, right)
    source = check(kernel, tile(kernel, rows_first), tolerance=1e-3)
    assert source.count("tl.make_tensor_descriptor(") == source.count(".load([") == described


@pytest.mark.parametrize("skipped", [1, 3, 7])
def test_tensors_may_begin_at_any_address(skipped: int) -> None:
    """A launch copies a tensor at an address that is no multiple of 16 bytes."""
    kernel = matmul()
    tensors = {name: torch.randn(4096 + 8).half()[skipped : skipped + 4096] for name in "aw"}
    assert all(item.data_ptr() % 16 for item in tensors.values())
    source = check(kernel, tile(kernel), tensors, tolerance=1e-3)
    assert described_parameters(source) == {0, 1}


def test_elements_beyond_a_matrix_are_zeros() -> None:
    """The last blocks end beyond all rows, columns and products, where other elements of the tensors are infinite."""
    kernel = matmul(sizes=(17, 9, 33))
    a, w = torch.full((64, 40), torch.inf), torch.full((64, 40), torch.nan)
    a[:17, :33], w[:9, :33] = torch.randn(17, 33), torch.randn(9, 33)
    tensors = {
        "a": torch.nn.functional.pad(a.flatten(), (0, 1536)),
        "w": torch.nn.functional.pad(w.flatten(), (0, 1536)),
    }
    check(kernel, tile(kernel), {name: item.half() for name, item in tensors.items()}, tolerance=1e-3)


@pytest.mark.parametrize("dtype", ["bf16", "f32", "i8"])
def test_dtypes(dtype: str) -> None:
    kernel = matmul("48*i + k", "48*j + k", dtype=dtype)
    source = check(kernel, tile(kernel), tolerance=2e-2)
    assert source.count("tl.make_tensor_descriptor(") == 2


def test_offsets_of_large_tensors() -> None:
    """Addresses have 64 bits, positions within a matrix 32."""
    kernel = matmul()
    large = replace(kernel, inputs=tuple([replace(item, extent=2**33) for item in kernel.inputs]))
    text = print_triton(large, tile(large)).source
    assert "descriptor.load([" in text and ".to(tl.int32)," in text


def test_masked_and_computed_operands_are_loaded_by_pointers() -> None:
    kernel = parse_kernel("""kernel(a: f16[1480], w: f16[960], rows: i64[37]) -> (out: f32[888]) \
for [i: 37, j: 24] reduce [k: 40] {
  %0 = i64 load rows[i]
  %1 = f16 load a[40*%0<37> + k]
  %2 = f32 cast %1
  %3 = f16 load w[40*j + k]
  %4 = f32 cast %3
  %5 = f32 exp %4
  %6 = f32 mul %2 %5
  %7 = f32 reduce sum %6
  store out[24*i + j] %7
}
""")
    source = check(kernel, tile(kernel), {"rows": torch.randperm(37)}, tolerance=1e-2)
    assert "tl.make_tensor_descriptor(" in source and "tl.load(a_ptr" in source


GROUPED = """kernel(a: f16[1480], w: f16[3840], group: i64[37] ascending) -> (out: f32[888]) \
for [i: 37, j: 24] reduce [k: 40] {
  %0 = i64 load group[i]
  %1 = f16 load a[40*i + k]
  %2 = f32 cast %1
  %3 = f16 load w[960*%0<4> + WEIGHTS]
  %4 = f32 cast %3
  %5 = f32 mul %2 %4
  %6 = f32 reduce sum %5
  store out[24*i + j] %6
}
"""


def group_blocks(kernel: Kernel, rows_first: bool) -> GroupBlockConfiguration:
    """Blocks of 16 rows of one of four groups and 16 columns, with descriptors."""
    contraction = find_grouped_contraction(kernel)
    assert contraction is not None and contraction.group is not None
    pair = contraction.rows, contraction.columns
    y, x = pair if rows_first else pair[::-1]
    return GroupBlockConfiguration(
        x=x, y=y, x_block=16, y_block=16, r_block=32, num_stages=2, rows=contraction.rows, groups=4, descriptors=True
    )


@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize("weights", ["40*j + k", "24*k + j"])
def test_blocks_of_groups(weights: str, rows_first: bool) -> None:
    """The matrix of a group is one of its own; rows of other groups are loaded, and do not matter."""
    kernel = parse_kernel(GROUPED.replace("WEIGHTS", weights))
    blocks = group_blocks(kernel, rows_first)
    for sizes in ([5, 20, 0, 12], [0, 1, 16, 20], [0, 0, 0, 37]):
        groups = torch.arange(4).repeat_interleave(torch.tensor(sizes))
        source = check(kernel, blocks, {"group": groups}, tolerance=1e-3)
        assert source.count("tl.make_tensor_descriptor(") == 2


@pytest.mark.parametrize("weights", ["40*j + k", "24*k + j"])
def test_last_rows_of_a_group_are_described(weights: str) -> None:
    kernel = parse_kernel(GROUPED.replace("WEIGHTS", weights))
    blocks = replace(group_blocks(kernel, False), tails=(8,))
    for sizes in ([24, 0, 4, 9], [0, 1, 17, 19], [0, 0, 0, 37]):
        groups = torch.arange(4).repeat_interleave(torch.tensor(sizes))
        source = check(kernel, blocks, {"group": groups}, tolerance=1e-3)
        assert source.count("tl.make_tensor_descriptor(") == 4


@pytest.mark.parametrize("rows_first", [True, False])
def test_rows_of_a_group_that_begin_anywhere_in_a_line_are_not_described(rows_first: bool) -> None:
    """Rows are beside each other in memory, and a group begins at any of them."""
    text = GROUPED.replace("WEIGHTS", "40*j + k").replace("37", "40").replace("a[40*i + k]", "a[40*k + i]")
    kernel = parse_kernel(text.replace("f16[1480]", "f16[1600]").replace("f32[888]", "f32[960]"))
    groups = torch.arange(4).repeat_interleave(torch.tensor([5, 20, 0, 15]))
    source = check(kernel, group_blocks(kernel, rows_first), {"group": groups}, tolerance=1e-3)
    assert described_parameters(source) == {1}


def test_descriptors_are_made_in_scratch_memory() -> None:
    """A Hopper GPU's instruction loads blocks, and a launch passes 128 bytes for each descriptor of a program."""
    kernel = matmul("1024*i + k", "1024*j + k", sizes=(4096, 4096, 1024))
    wide = replace(tile(kernel), x_block=128, y_block=128, r_block=64, num_warps=8, num_stages=3)
    binary = compiled(print_triton(kernel, wide))
    assert "cp.async.bulk.tensor" in binary.asm["ptx"] and binary.metadata.global_scratch_size == 256
    assert "cp.async.bulk.tensor" not in compiled(print_triton(kernel, replace(wide, descriptors=False))).asm["ptx"]


@pytest.mark.parametrize(("rows", "described"), [(512, False), (600, True)])
def test_blocks_of_many_rows_are_described_first(rows: int, described: bool) -> None:
    """Four groups have more than 128 rows on average; other devices have no instruction for descriptors."""
    kernel = parse_kernel(GROUPED.replace("WEIGHTS", "40*j + k").replace("37", str(rows)))
    first, *others = [item.descriptors for item in configurations(kernel) if isinstance(item, GroupBlockConfiguration)]
    assert first == described and False in others
    older = configurations(kernel, spec=replace(CUDA, supports_tensor_descriptors=False))
    assert not any(item.descriptors for item in older if isinstance(item, GroupBlockConfiguration))


@pytest.mark.parametrize(("columns", "block"), [(64, 64), (4096, 128), (16384, 256)])
def test_blocks_of_few_waves_have_fewer_columns(columns: int, block: int) -> None:
    """Last blocks of a group have 64 or 32 rows, and are the right operand of a dot; 132 programs run at once."""
    text = GROUPED.replace("WEIGHTS", "40*j + k").replace("37", "600").replace("960", str(40 * columns))
    text = text.replace("3840", str(160 * columns)).replace("888", str(600 * columns)).replace("24", str(columns))
    kernel = parse_kernel(text)
    first = next(item for item in configurations(kernel) if isinstance(item, GroupBlockConfiguration))
    assert first.x == first.rows and first.x_block == 128 and first.tails == (64, 32)
    assert first.y_block == block
    older = configurations(kernel, spec=replace(CUDA, supports_tensor_descriptors=False))
    assert not any(item.tails for item in older if isinstance(item, GroupBlockConfiguration))
