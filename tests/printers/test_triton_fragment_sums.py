"""Sums of groups in the registers of tensor cores, in Triton's interpreter and compiled for an H100 or H200."""

from __future__ import annotations

import re

import pytest
import triton
from torch.torch_version import TorchVersion

from fxwrap.loop_ir import Kernel, find_contraction, parse_kernel
from fxwrap.printers.triton import FragmentConfiguration, configurations, print_triton
from fxwrap.printers.triton.tiling import BatchedDotConfiguration
from tests.loop_ir.test_group_sums import int8
from tests.printers.test_triton_group_sums import COMPUTED_ROW, ROW, large, replaced
from tests.printers.test_triton_printer_compile import SPILLED, compiled
from tests.printers.test_triton_shared_elements import INT4
from tests.printers.triton_kernels import check


def int4(rows: int, groups: int, size: int) -> Kernel:
    """Rows of groups of so many bytes of two weights, times 32 columns; one row has no axis if `rows` is 0."""
    count = groups * size
    sizes = {
        "g: 4": f"g: {groups}", "h: 32": f"h: {size}", "32*128": f"32*{count}", "32*4]": f"32*{groups}]",
        "4*j + g": f"{groups}*j + g", "128*j + 32*g": f"{count}*j + {size}*g", "*256]": f"*{2 * count}]",
        "256*i + 64*g": f"{2 * count}*i + {2 * size}*g",
    }  # fmt: skip
    text = replaced(INT4.format(rows=max(rows, 1)), sizes)
    return parse_kernel(text if rows else replaced(text, {**ROW, f"{2 * count}*i + ": ""}))


def fragments(
    kernel: Kernel, rows: int, columns: int, warps: int, parts: int, loads_ahead: bool = False
) -> FragmentConfiguration:
    """Groups of some columns in a step: as many as share a fragment with `rows`, times warps and parts."""
    form = find_contraction(kernel)
    assert form is not None
    return FragmentConfiguration(
        x=form.rows, y=form.columns, p=kernel.reduced[:1], x_block=rows, y_block=columns,
        p_block=8 // rows * warps * parts, r_block=int(kernel.reduced[1].size), num_warps=warps,
        loads_ahead=loads_ahead,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "groups", "size", "block", "columns", "warps", "parts", "ahead"),
    [
        (0, 8, 32, 1, 32, 1, 1, False),  # two groups in a chunk, eight in a fragment
        (0, 48, 16, 1, 16, 2, 1, True),  # four groups in a chunk, and three steps
        (0, 8, 128, 4, 16, 1, 1, True),  # a group in two chunks, and two groups in a fragment
        (1, 8, 32, 2, 16, 2, 1, False),
        (3, 8, 32, 4, 32, 1, 2, False),  # two groups and three of four rows
        (7, 4, 64, 8, 16, 1, 2, True),  # one group of seven rows, which have more bytes than the weights
        (0, 12, 32, 1, 32, 1, 1, True),  # two steps of eight groups, of which the last has four
        (0, 5, 32, 2, 16, 2, 1, False),  # one step of eight groups, which has five
        (0, 5, 128, 4, 16, 2, 1, True),
        (3, 7, 32, 4, 32, 1, 2, False),
        (7, 3, 64, 8, 16, 1, 2, True),
    ],
)
def test_sums_of_fragments_are_those_of_products(
    rows: int, groups: int, size: int, block: int, columns: int, warps: int, parts: int, ahead: bool
) -> None:
    """The next step is loaded before the products of a step, or the step itself; of few rows, the last loads none."""
    kernel = int4(rows, groups, size)
    source = check(kernel, fragments(kernel, block, columns, warps, parts, ahead), tolerance=1e-3)
    assert source.count("tl.load(w_ptr") == 1 + ahead
    assert source.count("tl.load(x_ptr") == 1 + (ahead and block < 8)
    before, loop, step = source.partition("    for st")
    mask = "more" if groups % (8 // block * warps * parts) == 0 else "group_mask_column"
    masked = [f"mask={mask}" in line for line in step.splitlines() if "tl.load(w_ptr" in line]
    assert not ahead or masked == [block < 8 or mask != "more"]
    assert source.count("tl.dot(") == 4 and bool(loop) == (groups > 8 // block * warps * parts)
    assert ("tl.load(w_ptr" in before) == (ahead or not loop) and ("bytes_of_words(w_now)" in step) == ahead


@pytest.mark.parametrize("step", ["mul %3 %4", "sub %4 %3"])
def test_weights_that_are_no_digits(step: str) -> None:
    kernel = int8(step, rows=8)
    check(kernel, fragments(kernel, 8, 16, 2, 1), tolerance=2e-3)


def test_a_computed_row_is_zero_in_the_columns_of_other_groups() -> None:
    """Its columns lie along two axes, with a coefficient that the epilogue uses too."""
    sizes = {
        "g: 4": "g: 8", "[256]": "[512]", "[2048]": "[4096]", "[64]": "[128]", "512*i + 128*j": "1024*i + 256*j",
        "16*i + 4*j": "32*i + 8*j",
    }  # fmt: skip
    kernel = parse_kernel(replaced(COMPUTED_ROW, sizes))
    source = check(kernel, fragments(kernel, 1, 16, 1, 1), tolerance=3e-2)  # the row is rounded, as eager stores it
    assert source.count("tl.where(own_row, ") == 2 and source.count("tl.load(c_ptr") == 2


def test_one_row_has_fragments_first() -> None:
    """All groups of a few are loaded at once; a step of larger groups has fewer of them."""
    one = replaced(str(large(1)), {"i: 1, ": "", "4096*i + ": ""})
    kernels = [parse_kernel(one.replace("g: 64", f"g: {groups}")) for groups in (64, 224, 60)]
    kernels += [int4(0, 16, size) for size in (16, 64, 128)]
    firsts = [configurations(kernel)[0] for kernel in kernels]
    tiles = [
        (item.num_warps, item.p_block, item.loads_ahead) if isinstance(item, FragmentConfiguration) else None
        for item in firsts
    ]
    assert tiles == [(4, 64, False), (8, 64, True), (4, 64, False), (2, 16, False), (4, 16, False), (4, 16, False)]
    assert [item.max_registers for item in firsts] == [128, 128, 168, 128, 128, 128]
    for rows in (2, 8, 16):
        known = configurations(large(rows))
        have_fragments = [isinstance(item, FragmentConfiguration) for item in known]
        assert any(have_fragments) == (rows <= 8) and have_fragments[0] == (rows == 8)


SHUFFLED = pytest.mark.xfail(
    TorchVersion(triton.__version__) >= "3.8",
    reason="Triton 3.8 chooses another layout for ones, and for weights that steps load ahead: it shuffles the row",
    raises=AssertionError,
    strict=True,
)


@SHUFFLED
@pytest.mark.parametrize("rows", [0, 8])
def test_a_gpu_moves_no_operand_between_lanes(rows: int) -> None:
    """Shared memory and shuffles are for the sums of warps after the last product; products and sums share the row."""
    kernel = large(rows) if rows else parse_kernel(replaced(str(large(1)), {"i: 1, ": "", "4096*i + ": ""}))
    known = next(
        item for item in configurations(kernel) if isinstance(item, FragmentConfiguration) and item.num_warps == 2
    )
    ptx = compiled(print_triton(kernel, known)).asm["ptx"]
    products = [item.start() for item in re.finditer("mma.sync", ptx)]
    moves = [item.start() for item in re.finditer(r"bar\.sync|ld\.shared|st\.shared|shfl|ldmatrix", ptx)]
    assert len(products) == (32 if rows else 40) and moves and min(moves) > max(products)
    assert not re.search(r"\bsub\.\S*f32", ptx), "a negative factor of a sum is no subtraction by itself"
    assert not SPILLED.search(ptx) and len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) >= 8
    pairs = set(re.findall(r"mma\.sync[^{]*\{[^}]*\}, \{[^}]*\}, \{ *(%r\d+), *(%r\d+) *\}", ptx))
    assert pairs and len({item for pair in pairs for item in pair}) == 2 * len(pairs), "pairs of a row need no copies"


@pytest.mark.parametrize(("groups", "step"), [(64, 16), (172, 16), (28, 4), (20, 4), (14, 2), (7, 8)])
def test_steps_of_groups_are_filled(groups: int, step: int) -> None:
    """A last step of few groups takes as long as the others: 20 groups in steps of 16 took a third longer."""
    kernel = parse_kernel(str(large(3)).replace("g: 64", f"g: {groups}"))
    first = next(item for item in configurations(kernel) if isinstance(item, BatchedDotConfiguration))
    assert first.p_block == step


@pytest.mark.parametrize(("groups", "step", "few"), [(64, 8, 16), (24, 8, 8), (20, 4, 8), (28, 4, 16), (14, 8, 16)])
def test_steps_of_fragments_of_eight_rows_are_filled(groups: int, step: int, few: int) -> None:
    """Programs of few columns have more warps, and those of long rows of few columns load the next step meanwhile."""
    kernel = parse_kernel(replaced(str(large(8)), {"g: 64": f"g: {groups}", "j: 4096": "j: 16384"}))
    first = next(item for item in configurations(kernel) if isinstance(item, FragmentConfiguration))
    assert (first.p_block, first.num_warps) == (step, 2)
    narrow = str(kernel).replace("j: 16384", "j: 4096")
    first = next(item for item in configurations(parse_kernel(narrow)) if isinstance(item, FragmentConfiguration))
    assert (first.p_block, first.num_warps, first.loads_ahead) == (few, 4, False)
    long = configurations(parse_kernel(narrow.replace(f"g: {groups}", "g: 256")))[0]
    assert isinstance(long, FragmentConfiguration) and (long.num_warps, long.loads_ahead) == (8, True)
