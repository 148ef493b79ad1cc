"""Combo kernels compute the results of the kernels they combine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxwrap.devices import CPU
from fxwrap.devices.kernel_names import find_function_name
from fxwrap.loop_ir import Axis, Kernel, KernelBuilder, as_index, hoist_expressions, linearize_index
from fxwrap.printers import PrintedKernel
from fxwrap.printers.triton import TileConfiguration, combine_triton_kernels, fits_together, group_key, print_triton
from fxwrap.runtime.kernels import load_kernel
from fxwrap.symbolic import make_symbol
from tests.printers.test_cpp_printer_contractions import matmul
from tests.printers.test_triton_contractions import dot
from tests.printers.test_triton_printer_compile import compiled
from tests.printers.triton_kernels import BF16, F32, I64, build, launch_interpreted, softmax_kernel
from tests.support.long_form import sample_size

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def scaled(size: int, factor: float = 2.0, dtype: torch.dtype = F32) -> Kernel:
    """out = x * factor + shift, over vectors; `shift` is one number."""
    p = Axis("p0", size)

    def write(body: KernelBuilder) -> None:
        x = body.load("x", linearize_index([p], [size]), dtype).to(F32)
        shift = body.load("shift", as_index(0), F32)
        body.store("out", linearize_index([p], [size]), (x * factor + shift).to(dtype))

    return build([p], [], {"x": (dtype, size), "shift": (F32, 1)}, {"out": (dtype, size)}, write)


def transposed(rows: int, columns: int) -> Kernel:
    """out[c, r] = x[r, c] + 1."""
    p, q = Axis("p0", columns), Axis("p1", rows)

    def write(body: KernelBuilder) -> None:
        x = body.load("x", linearize_index([q, p], [rows, columns]), F32)
        body.store("out", linearize_index([p, q], [columns, rows]), x + 1.0)

    return build([p, q], [], {"x": (F32, rows * columns)}, {"out": (F32, rows * columns)}, write)


def flat(kernel: Kernel, block: int = 64) -> PrintedKernel:
    return print_triton(kernel, TileConfiguration(x=kernel.axes, x_block=block), name="scaled")


def tiled(kernel: Kernel) -> PrintedKernel:
    inner, outer = kernel.axes
    return print_triton(kernel, TileConfiguration(x=(outer,), y=(inner,), x_block=16, y_block=8), name="transposed")


def rows_of(kernel: Kernel, looped: bool) -> PrintedKernel:
    return print_triton(kernel, TileConfiguration(y=kernel.axes, y_block=1, r_block=32, looped=looped), name="softmax")


def positions(shared: Sequence[bool], count: int) -> list[list[int]]:
    """The positions of the parameters of launches, of which some have the same argument."""
    rows: list[list[int]] = [[] for _ in range(count)]
    first = 0
    for same in shared:
        for number, row in enumerate(rows):
            row.append(first if same else first + number)
        first += 1 if same else count
    return rows


def check_combined(kernels: list[Kernel], printed: list[PrintedKernel]) -> PrintedKernel:
    """Combines kernels that share no tensor, and compares its results with those of the separate kernels."""
    generator = torch.Generator().manual_seed(0)
    assert len({group_key(item) for item in printed}) == 1
    actual, expected, columns = [], [], []
    for kernel, text in zip(kernels, printed, strict=True):
        inputs = [torch.randn(int(item.extent), generator=generator).to(item.dtype) for item in kernel.inputs]
        outs = [torch.full((int(item.extent),), 7.0).to(item.dtype) for item in kernel.outputs]
        columns.append([*inputs, *outs])
        alone = [item.clone() for item in outs]
        names = [item.name for item in (*kernel.inputs, *kernel.outputs)]
        launch_interpreted(kernel, text, dict(zip(names, [*inputs, *alone], strict=True)))
        actual.append(outs)
        expected.append(alone)
    combo = combine_triton_kernels(printed, positions([False] * len(columns[0]), len(printed)), "combo")
    launch = load_kernel(combo.language, combo.source, combo.signature, combo.options)
    launch(combo.grid, *[item for column in zip(*columns, strict=True) for item in column])
    for outs, alone in zip(actual, expected, strict=True):
        torch.testing.assert_close(outs, alone, rtol=0, atol=0)
    return combo


@settings(max_examples=sample_size(15), deadline=None)
@given(st.lists(st.integers(1, 70).map(lambda number: 3 * number), min_size=2, max_size=6))
def test_vectors_of_any_lengths(sizes: list[int]) -> None:
    kernels = [scaled(size) for size in sizes]
    printed = [flat(kernel) for kernel in kernels]
    if len({group_key(item) for item in printed}) > 1:  # kernels of whole blocks have no mask
        masked = [index for index, size in enumerate(sizes) if size % 64]
        kernels, printed = [kernels[index] for index in masked], [printed[index] for index in masked]
    if len(kernels) > 1:
        combo = check_combined(kernels, printed)
        assert combo.grid[0] == sum([-(-int(kernel.count) // 64) for kernel in kernels])


def test_tiles_of_matrices() -> None:
    kernels = [transposed(*shape) for shape in ((20, 9), (35, 50), (17, 10))]
    combo = check_combined(kernels, [tiled(kernel) for kernel in kernels])
    assert "size" in combo.source


@pytest.mark.parametrize("looped", [False, True])
def test_rows_with_reductions(looped: bool) -> None:
    kernels = [softmax_kernel(rows, size) for rows, size in ((3, 20), (5, 20), (2, 20), (4, 20), (1, 20))]
    check_combined(kernels, [rows_of(kernel, looped) for kernel in kernels])


def test_rows_of_several_lengths_share_one_loop() -> None:
    kernels = [softmax_kernel(3, size) for size in (45, 70, 33)]
    combo = check_combined(kernels, [rows_of(kernel, looped=True) for kernel in kernels])
    assert re.search(r"tl\.range\(0, size\w*, R_BLOCK", combo.source)


def test_the_text() -> None:
    kernels = [scaled(70), scaled(130)]
    combo = combine_triton_kernels(
        [flat(kernel) for kernel in kernels], positions([False, True, False], 2), "scaled_twice"
    )
    assert combo.signature == ("*f32", "*f32", "*f32", "*f32", "*f32")
    assert (combo.grid, combo.options) == ((5, 1, 1), flat(kernels[0]).options)
    name = find_function_name(combo.source)
    assert name.startswith("fxwrap_scaled_twice_")
    assert (
        combo.source
        == f"""import triton
import triton.language as tl


@triton.jit
def {name}(x_ptr_0, x_ptr_1, shift_ptr, out_ptr_0, out_ptr_1, X_BLOCK: tl.constexpr):
    # each program runs a part of one of the combined kernels
    program = tl.program_id(0)
    if program < 2:
        x_ptr, out_ptr, size, local_program = x_ptr_0, out_ptr_0, tl.full((), 70, tl.int32), program
    else:
        x_ptr, out_ptr, size, local_program = x_ptr_1, out_ptr_1, tl.full((), 130, tl.int32), program - 2
    p0 = local_program * X_BLOCK + tl.arange(0, X_BLOCK)
    p0_mask = p0 < size
    x = tl.load(x_ptr + p0, mask=p0_mask)
    shift = tl.load(shift_ptr)
    mul = x * 2.0
    add = mul + shift
    tl.store(out_ptr + p0, add, mask=p0_mask)
"""
    )


def test_arguments_common_to_all_launches_are_one_parameter() -> None:
    kernels = [scaled(size) for size in (20, 40, 33)]
    combo = combine_triton_kernels([flat(kernel) for kernel in kernels], positions([True, True, False], 3))
    x, shift = torch.randn(40), torch.randn(1)
    outs = [torch.zeros(int(kernel.count)) for kernel in kernels]
    launch = load_kernel(combo.language, combo.source, combo.signature, combo.options)
    launch(combo.grid, x, shift, *outs)
    for out in outs:
        torch.testing.assert_close(out, x[: len(out)] * 2 + shift)


def test_differing_comments_are_dropped() -> None:
    def with_origin(location: str) -> PrintedKernel:
        p = Axis("p0", 40)
        body = KernelBuilder()
        with body.origin_scope(f"aten.add in model.py:{location}"):
            x = body.load("x", linearize_index([p], [40]), F32)
        with body.origin_scope("aten.neg"):
            body.store("out", linearize_index([p], [40]), -x)
        return flat(body.finish([p], [], [*scaled(40).inputs[:1]], [*scaled(40).outputs]))

    combo = combine_triton_kernels([with_origin("1"), with_origin("2")], positions([False, False], 2))
    assert "# aten.neg\n" in combo.source
    assert "model.py" not in combo.source


def test_kernels_that_differ_in_more_than_sizes_are_not_compatible() -> None:
    kernels = [flat(scaled(40)), flat(scaled(40, factor=3.0)), flat(scaled(40, dtype=BF16)), flat(scaled(40), 32)]
    kernels.append(replace(flat(scaled(40)), options=(("X_BLOCK", 64), ("num_warps", 8))))
    kernels.append(flat(scaled(64)))  # has no mask
    assert None not in {group_key(kernel) for kernel in kernels}
    assert len({group_key(kernel) for kernel in kernels}) == len(kernels)


@pytest.mark.parametrize("dtype", [I64, torch.int8, torch.uint8, torch.bool])
def test_sizes_do_not_change_the_types_of_values(dtype: torch.dtype) -> None:
    """Sizes are int32 variables in a combo kernel; integers of the computation stay literals."""

    def shifted(size: int, summand: int = 3) -> Kernel:
        p = Axis("p0", size)

        def write(body: KernelBuilder) -> None:
            x = body.load("x", linearize_index([p], [size]), dtype)
            body.store("out", linearize_index([p], [size]), ~x if dtype is torch.bool else x * summand)

        return build([p], [], {"x": (dtype, size)}, {"out": (dtype, size)}, write)

    kernels = [shifted(20), shifted(30)]
    check_combined(kernels, [flat(kernel) for kernel in kernels])
    assert dtype is torch.bool or group_key(flat(shifted(20))) != group_key(flat(shifted(20, summand=4)))


def test_edited_sources_are_not_combined() -> None:
    """The loop IR of a kernel whose source was edited or parsed is out of date or missing."""
    kernel = flat(scaled(20))
    assert group_key(replace(kernel, source=kernel.source.replace("2.0", "3.0"))) is None
    assert group_key(replace(kernel, scheduled=None)) is None


def test_some_kernels_are_never_combined() -> None:
    p = Axis("p0", 20)
    body = KernelBuilder()
    x = body.load("x", linearize_index([p], [20]), F32)
    body.device_assert(x > 0.0, "only positive numbers")
    body.store("out", linearize_index([p], [20]), x)
    assert group_key(flat(body.finish([p], [], [*scaled(20).inputs[:1]], [*scaled(20).outputs]))) is None
    assert group_key(replace(flat(scaled(20)), grid=(make_symbol("s0"), 1, 1))) is None
    assert group_key(replace(flat(scaled(20)), grid=(2, 2, 1))) is None


def test_launch_numbers_stay_the_last_parameters() -> None:
    s0 = make_symbol("s0")
    p = Axis("p0", 40)

    def write(body: KernelBuilder) -> None:
        x = body.load("x", linearize_index([p], [40]), F32)
        body.store("out", linearize_index([p], [40]), x + body.number(s0, I64).to(F32))

    kernel, _ = hoist_expressions(build([p], [], {"x": (F32, 40)}, {"out": (F32, 40)}, write))
    combo = combine_triton_kernels([flat(kernel)] * 2, positions([False, False, True], 2))
    assert combo.signature == ("*f32", "*f32", "*f32", "*f32", "i64")
    x, y, first, second = torch.randn(40), torch.randn(40), torch.zeros(40), torch.zeros(40)
    launch = load_kernel(combo.language, combo.source, combo.signature, combo.options)
    launch(combo.grid, x, y, first, second, 5)
    torch.testing.assert_close([first, second], [x + 5, y + 5])


def test_combined_kernels_keep_vector_loads() -> None:
    kernels = [scaled(3000), scaled(5000)]
    alone = compiled(flat(kernels[0], 1024)).asm["ptx"]
    printed = [flat(kernel, 1024) for kernel in kernels]
    combo = compiled(combine_triton_kernels(printed, positions([False, True, False], 2))).asm["ptx"]
    assert "ld.global.v4" in alone
    assert combo.count("ld.global.v4") == alone.count("ld.global.v4")
    assert combo.count("st.global.v4") == alone.count("st.global.v4")


# --- kernels of other bodies ------------------------------------------------------------------------------------------


def checked() -> Kernel:
    """out = -x of positive numbers, others raise."""
    p = Axis("p0", 20)
    body = KernelBuilder()
    x = body.load("x", linearize_index([p], [20]), F32)
    body.device_assert(x > -10.0, "no large negative number")
    body.store("out", linearize_index([p], [20]), -x)
    return body.finish([p], [], [*scaled(20).inputs[:1]], [*scaled(20).outputs])


def shifted_by_size(size: int = 40) -> Kernel:
    """out = x + a number of the launch."""
    p = Axis("p0", size)

    def write(body: KernelBuilder) -> None:
        x = body.load("x", linearize_index([p], [size]), F32)
        body.store("out", linearize_index([p], [size]), x + body.number(make_symbol("s0"), I64).to(F32))

    kernel, _ = hoist_expressions(build([p], [], {"x": (F32, size)}, {"out": (F32, size)}, write))
    return kernel


def test_kernels_of_other_bodies_in_one_launch() -> None:
    """Of tiles, rows and an assertion; two of them are equal, two read one tensor."""
    generator = torch.Generator().manual_seed(0)
    kernels = [transposed(20, 9), softmax_kernel(3, 20, F32), checked(), checked(), shifted_by_size()]
    printed = [tiled(kernels[0]), rows_of(kernels[1], looped=False), *[flat(kernel) for kernel in kernels[2:]]]
    x, y, z, u = [torch.randn(size, generator=generator) for size in (180, 60, 20, 40)]
    outs = [torch.full((int(kernel.outputs[0].extent),), 7.0) for kernel in kernels]
    rows = [[0, 4], [1, 5], [2, 6], [3, 7], [3, 8, 9]]
    combo = combine_triton_kernels(printed, rows, "combo")
    assert combo.signature == (*["*f32"] * 9, "i64")
    assert combo.grid[0] == sum([int(item.grid[0]) for item in printed])
    assert combo.source.count("tl.device_assert") == 1, "equal bodies are one function"
    assert dict(combo.options) == {"num_warps": 4, "debug": True, "sanitize_overflow": False}
    launch = load_kernel(combo.language, combo.source, combo.signature, combo.options)
    launch(combo.grid, x, y, z, u, *outs, 5)
    expected = [x.view(20, 9).t().flatten() + 1, y.view(3, 20).softmax(-1).flatten(), -z, -u[:20], u + 5]
    torch.testing.assert_close(outs, expected)
    with pytest.raises(Exception, match="no large negative number"):
        launch(combo.grid, x, y, z - 20, u, *outs, 5)


def test_the_text_of_other_bodies() -> None:
    combo = combine_triton_kernels([flat(scaled(128)), flat(checked(), 32)], [[0, 1, 2], [0, 3]], "both")
    name = find_function_name(combo.source)
    assert combo.source.endswith(f"""
@triton.jit
def {name}(x_ptr, shift_ptr, out_ptr, out_ptr_1):
    # each program runs a part of one of the combined kernels
    program = tl.program_id(0)
    if program < 2:
        part_0(x_ptr, shift_ptr, out_ptr, program, 64)
    else:
        part_1(x_ptr, out_ptr_1, program - 2, 32)
""")
    ptx = compiled(combo).asm["ptx"]
    assert ptx.count(".entry") == 1 and ".func" not in ptx.replace(".func __assertfail", ""), (
        "the functions are inlined"
    )


def test_kernels_that_fit_together() -> None:
    """Those of few programs that need the same options, and no registers or shared memory of tensor cores."""
    spec = replace(CPU, multiprocessors=2)  # 64 warps
    small = [flat(scaled(64)), tiled(transposed(20, 9)), flat(checked())]
    assert fits_together(small, spec)
    assert fits_together([flat(scaled(64 * 15)), flat(checked())], spec)
    assert not fits_together([flat(scaled(64 * 16)), flat(checked())], spec)
    assert not fits_together([*small, replace(flat(scaled(64)), scheduled=None)], spec)
    assert not fits_together([*small, replace(flat(scaled(64)), grid=(make_symbol("s0"), 1, 1))], spec)
    two_warps = print_triton(scaled(64), TileConfiguration(x=scaled(64).axes, x_block=64, num_warps=2))
    assert not fits_together([*small, two_warps], spec)
    product = matmul(5, 40, 256, "f16")
    assert not fits_together([*small, print_triton(product, dot(product, rows_first=False))], spec)
