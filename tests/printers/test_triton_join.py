"""Joined kernels do what the kernels do that they are made of, and kernels that cannot be joined are known."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxwrap.kernel_names import function_in
from fxwrap.loop_ir import Axis, Body, Kernel, as_index, linear_index, with_named_numbers
from fxwrap.printers import PrintedKernel
from fxwrap.printers.triton import Configuration, join_triton, joinable, print_triton
from fxwrap.runtime.kernels import load_kernel
from fxwrap.symbolic import make_symbol
from tests.printers.test_triton_printer_compile import compiled
from tests.printers.triton_kernels import BF16, F32, I64, build, launch_interpreted, softmax_kernel

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def scaled(size: int, factor: float = 2.0, dtype: torch.dtype = F32) -> Kernel:
    """out = x * factor + shift, over vectors; `shift` is one number."""
    p = Axis("p0", size)

    def write(body: Body) -> None:
        x = body.load("x", linear_index([p], [size]), dtype).to(F32)
        shift = body.load("shift", as_index(0), F32)
        body.store("out", linear_index([p], [size]), (x * factor + shift).to(dtype))

    return build([p], [], {"x": (dtype, size), "shift": (F32, 1)}, {"out": (dtype, size)}, write)


def transposed(rows: int, columns: int) -> Kernel:
    """out[c, r] = x[r, c] + 1."""
    p, q = Axis("p0", columns), Axis("p1", rows)

    def write(body: Body) -> None:
        x = body.load("x", linear_index([q, p], [rows, columns]), F32)
        body.store("out", linear_index([p, q], [columns, rows]), x + 1.0)

    return build([p, q], [], {"x": (F32, rows * columns)}, {"out": (F32, rows * columns)}, write)


def flat(kernel: Kernel, block: int = 64) -> PrintedKernel:
    return print_triton(kernel, Configuration(x=kernel.axes, x_block=block), name="scaled")


def tiled(kernel: Kernel) -> PrintedKernel:
    inner, outer = kernel.axes
    return print_triton(kernel, Configuration((outer,), (inner,), 16, 8), name="transposed")


def rows_of(kernel: Kernel, looped: bool) -> PrintedKernel:
    return print_triton(kernel, Configuration(y=kernel.axes, y_block=1, r_block=32, looped=looped), name="softmax")


def joined_like(kernels: list[Kernel], printed: list[PrintedKernel]) -> PrintedKernel:
    """Joins kernels that share no tensor, after it has compared what all write with what each alone writes."""
    generator = torch.Generator().manual_seed(0)
    assert len({joinable(item) for item in printed}) == 1
    given, wanted, columns = [], [], []
    for kernel, text in zip(kernels, printed, strict=True):
        inputs = [torch.randn(int(item.extent), generator=generator).to(item.dtype) for item in kernel.inputs]
        outs = [torch.full((int(item.extent),), 7.0).to(item.dtype) for item in kernel.outputs]
        columns.append([*inputs, *outs])
        alone = [item.clone() for item in outs]
        names = [item.name for item in (*kernel.inputs, *kernel.outputs)]
        launch_interpreted(kernel, text, dict(zip(names, [*inputs, *alone], strict=True)))
        given.append(outs)
        wanted.append(alone)
    together = join_triton(printed, [False] * len(columns[0]), "together")
    launch = load_kernel(together.language, together.source, together.signature, together.options)
    launch(together.grid, *[item for column in zip(*columns, strict=True) for item in column])
    for outs, alone in zip(given, wanted, strict=True):
        torch.testing.assert_close(outs, alone, rtol=0, atol=0)
    return together


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 70).map(lambda number: 3 * number), min_size=2, max_size=6))
def test_vectors_of_any_lengths(sizes: list[int]) -> None:
    kernels = [scaled(size) for size in sizes]
    printed = [flat(kernel) for kernel in kernels]
    if len({joinable(item) for item in printed}) > 1:  # some fill their blocks, and need no mask
        keep = [item for item in range(len(sizes)) if sizes[item] % 64]
        kernels, printed = [kernels[item] for item in keep], [printed[item] for item in keep]
    if len(kernels) > 1:
        together = joined_like(kernels, printed)
        assert together.grid[0] == sum([-(-int(kernel.count) // 64) for kernel in kernels])


def test_tiles_of_matrices() -> None:
    kernels = [transposed(*shape) for shape in ((20, 9), (35, 50), (17, 10))]
    together = joined_like(kernels, [tiled(kernel) for kernel in kernels])
    assert "size" in together.source


@pytest.mark.parametrize("looped", [False, True])
def test_rows_with_reductions(looped: bool) -> None:
    kernels = [softmax_kernel(rows, size) for rows, size in ((3, 20), (5, 20), (2, 20), (4, 20), (1, 20))]
    joined_like(kernels, [rows_of(kernel, looped) for kernel in kernels])


def test_rows_of_several_lengths_are_walked_by_one_loop() -> None:
    kernels = [softmax_kernel(3, size) for size in (45, 70, 33)]
    together = joined_like(kernels, [rows_of(kernel, looped=True) for kernel in kernels])
    assert re.search(r"tl\.range\(0, size\w*, R_BLOCK", together.source)


def test_the_text() -> None:
    kernels = [scaled(70), scaled(130)]
    together = join_triton([flat(kernel) for kernel in kernels], [False, True, False], "scaled_twice")
    assert together.signature == ("*f32", "*f32", "*f32", "*f32", "*f32")
    assert (together.grid, together.options) == ((5, 1, 1), flat(kernels[0]).options)
    name = function_in(together.source)
    assert name.startswith("fxwrap_scaled_twice_")
    assert together.source == f'''import triton
import triton.language as tl


@triton.jit
def {name}(x_ptr_0, x_ptr_1, shift_ptr, out_ptr_0, out_ptr_1, X_BLOCK: tl.constexpr):
    # each program belongs to one of the launches that are joined here
    program = tl.program_id(0)
    if program < 2:
        x_ptr, out_ptr, size, place = x_ptr_0, out_ptr_0, tl.full((), 70, tl.int32), program
    else:
        x_ptr, out_ptr, size, place = x_ptr_1, out_ptr_1, tl.full((), 130, tl.int32), program - 2
    p0 = place * X_BLOCK + tl.arange(0, X_BLOCK)
    p0_mask = p0 < size
    x = tl.load(x_ptr + p0, mask=p0_mask)
    shift = tl.load(shift_ptr)
    mul = x * 2.0
    add = mul + shift
    tl.store(out_ptr + p0, add, mask=p0_mask)
'''


def test_what_all_launches_pass_is_one_parameter() -> None:
    kernels = [scaled(size) for size in (20, 40, 33)]
    together = join_triton([flat(kernel) for kernel in kernels], [True, True, False])
    x, shift = torch.randn(40), torch.randn(1)
    outs = [torch.zeros(int(kernel.count)) for kernel in kernels]
    launch = load_kernel(together.language, together.source, together.signature, together.options)
    launch(together.grid, x, shift, *outs)
    for out in outs:
        torch.testing.assert_close(out, x[: len(out)] * 2 + shift)


def test_remarks_that_differ_are_left_out() -> None:
    def told(place: str) -> PrintedKernel:
        p = Axis("p0", 40)
        body = Body()
        with body.origins(f"aten.add in model.py:{place}"):
            x = body.load("x", linear_index([p], [40]), F32)
        with body.origins("aten.neg"):
            body.store("out", linear_index([p], [40]), -x)
        return flat(body.finish([p], [], [*scaled(40).inputs[:1]], [*scaled(40).outputs]))

    together = join_triton([told("1"), told("2")], [False, False])
    assert "# aten.neg\n" in together.source
    assert "model.py" not in together.source


def test_kernels_that_differ_in_more_than_sizes_are_not_alike() -> None:
    kernels = [flat(scaled(40)), flat(scaled(40, factor=3.0)), flat(scaled(40, dtype=BF16)), flat(scaled(40), 32)]
    kernels.append(replace(flat(scaled(40)), options=(("X_BLOCK", 64), ("num_warps", 8))))
    kernels.append(flat(scaled(64)))  # which has no mask
    assert None not in {joinable(kernel) for kernel in kernels}
    assert len({joinable(kernel) for kernel in kernels}) == len(kernels)


def test_whole_numbers_beside_narrow_integers_have_to_be_equal() -> None:
    """A number in the text leaves an int8 what it is; one that is passed would make it an int32."""

    def shifted(size: int, dtype: torch.dtype) -> PrintedKernel:
        p = Axis("p0", size)

        def write(body: Body) -> None:
            body.store("out", linear_index([p], [size]), body.load("x", linear_index([p], [size]), dtype) * 3)

        return flat(build([p], [], {"x": (dtype, size)}, {"out": (dtype, size)}, write))

    assert joinable(shifted(20, I64)) == joinable(shifted(30, I64))
    assert joinable(shifted(20, torch.int8)) != joinable(shifted(30, torch.int8))
    assert joinable(shifted(20, torch.int8)) == joinable(shifted(20, torch.int8))


def test_some_kernels_are_never_joined() -> None:
    p = Axis("p0", 20)
    body = Body()
    x = body.load("x", linear_index([p], [20]), F32)
    body.require(x > 0.0, "only positive numbers")
    body.store("out", linear_index([p], [20]), x)
    assert joinable(flat(body.finish([p], [], [*scaled(20).inputs[:1]], [*scaled(20).outputs]))) is None
    assert joinable(replace(flat(scaled(20)), grid=(make_symbol("s0"), 1, 1))) is None
    assert joinable(replace(flat(scaled(20)), grid=(2, 2, 1))) is None


def test_numbers_of_launches_stay_the_last_parameters() -> None:
    s0 = make_symbol("s0")
    p = Axis("p0", 40)

    def write(body: Body) -> None:
        x = body.load("x", linear_index([p], [40]), F32)
        body.store("out", linear_index([p], [40]), x + body.number(s0, I64).to(F32))

    kernel, _ = with_named_numbers(build([p], [], {"x": (F32, 40)}, {"out": (F32, 40)}, write))
    together = join_triton([flat(kernel)] * 2, [False, False, True])
    assert together.signature == ("*f32", "*f32", "*f32", "*f32", "i64")
    x, y, first, second = torch.randn(40), torch.randn(40), torch.zeros(40), torch.zeros(40)
    launch = load_kernel(together.language, together.source, together.signature, together.options)
    launch(together.grid, x, y, first, second, 5)
    torch.testing.assert_close([first, second], [x + 5, y + 5])


def test_a_gpu_reads_whole_vectors_still() -> None:
    kernels = [scaled(3000), scaled(5000)]
    alone = compiled(flat(kernels[0], 1024)).asm["ptx"]
    together = compiled(join_triton([flat(kernel, 1024) for kernel in kernels], [False, True, False])).asm["ptx"]
    assert "ld.global.v4" in alone
    assert together.count("ld.global.v4") == alone.count("ld.global.v4")
    assert together.count("st.global.v4") == alone.count("st.global.v4")
