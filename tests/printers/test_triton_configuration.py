"""The blocks of default configurations: filled steps of loops, few elements of a thread where each is an access."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fxwrap.loop_ir import Axis, Index, Kernel, KernelBuilder, as_index, linearize_index, parse_kernel
from fxwrap.printers.triton import TileConfiguration, configurations
from tests.printers.triton_kernels import BF16, F32, build, check


def rows_kernel(rows: int, size: int, tensors: int) -> Kernel:
    """The sum of the products of the elements of a row of several tensors."""
    p, r = Axis("p0", rows), Axis("r0", size)
    position = linearize_index([p, r], [rows, size])

    def write(body: KernelBuilder) -> None:
        product = body.load("x0", position, BF16).to(F32)
        for number in range(1, tensors):
            product = product * body.load(f"x{number}", position, BF16).to(F32)
        body.store("out", as_index(p), body.reduce("sum", product)[0])

    inputs = {f"x{number}": (BF16, rows * size) for number in range(tensors)}
    return build([p], [r], inputs, {"out": (F32, rows)}, write)


@pytest.mark.parametrize("tensors", [1, 3])
@pytest.mark.parametrize("rows", [96, 384, 4096])
@pytest.mark.parametrize("size", [16392, 17248, 24600, 40000, 70000])
def test_steps_of_loops_over_rows_are_filled(size: int, rows: int, tensors: int) -> None:
    """A last step of few elements takes as long as the others."""
    looped = [item for item in configurations(rows_kernel(rows, size, tensors)) if item.r_block < size]
    assert looped
    for item in looped:
        assert -(-size // item.r_block) * item.r_block <= 1.25 * size


@pytest.mark.parametrize(
    ("rows", "size", "tensors", "step"),
    [
        (512, 50176, 3, 2048),
        (300, 131072, 4, 2048),
        (512, 50176, 2, 8192),
        (64, 131072, 3, 8192),
        (4096, 40000, 3, 2048),
    ],
)
def test_steps_along_rows_of_several_tensors_are_small(rows: int, size: int, tensors: int, step: int) -> None:
    """Threads then have registers for more programs; where these are few, long steps load more at once."""
    first = configurations(rows_kernel(rows, size, tensors))[0]
    assert (first.looped, first.r_block) == (True, step)


def products(count: int, other: Callable[[Index, Axis], Index]) -> Kernel:
    """The products of each element of rows of `count` and others, at a position that follows from its own."""
    rows, inner = Axis("a", 1 << 20), Axis("b", count)
    position = linearize_index([rows, inner], [1 << 20, count])

    def write(body: KernelBuilder) -> None:
        product = body.load("x", position, BF16).to(F32)
        for name in "xyz":
            product = product * body.load(name, other(position, inner), BF16).to(F32)
        body.store("out", position, product.to(BF16))

    elements = count << 20
    inputs = dict.fromkeys("xyz", (BF16, 3 * elements))
    return build([rows, inner], [], inputs, {"out": (BF16, elements)}, write)


def elements_of_a_thread(kernel: Kernel) -> int:
    first = configurations(kernel)[0]
    assert isinstance(first, TileConfiguration)
    return first.x_block * first.y_block // (32 * first.num_warps)


def test_a_thread_has_few_elements_that_are_accessed_one_by_one() -> None:
    p = Axis("p0", 1 << 22)

    def copy(body: KernelBuilder) -> None:
        body.store("out", as_index(p), body.load("x", as_index(p), BF16))

    whole = build([p], [], {"x": (BF16, 1 << 22)}, {"out": (BF16, 1 << 22)}, copy)
    assert elements_of_a_thread(whole) == 8, "a vector"
    assert elements_of_a_thread(products(5, lambda position, _: position * 3 + 1)) == 4
    rotated = products(5, lambda position, inner: position - inner + (as_index(inner) + 2) % 5)
    assert elements_of_a_thread(rotated) == 8, "rotated elements are beside each other"


@pytest.mark.parametrize(
    ("count", "stride", "offsets", "dtype", "elements"),
    [
        (1, 3, (0, 1, 2), BF16, 1),  # the elements of a cross product
        (10, 20, (0, 10), F32, 2),  # halves of a short row
        (12, 24, (0, 12), F32, 4),
        (16, 32, (0, 16), F32, 4),  # whole sectors
        (1, 4, (0, 1, 2, 3), BF16, 2),  # one vector of four
    ],
)
def test_a_thread_has_one_vector_of_stores_to_one_sector(
    count: int, stride: int, offsets: tuple[int, ...], dtype: torch.dtype, elements: int
) -> None:
    """They follow each other, so that the cache combines them."""
    rows, inner = Axis("a", 1 << 20), Axis("b", count)
    axes = [rows, inner] if count > 1 else [rows]
    position = as_index(rows) * stride + (as_index(inner) if count > 1 else 0)

    def write(body: KernelBuilder) -> None:
        loads = [body.load("x", position + offset, dtype) for offset in offsets]
        for offset, value in zip(offsets, reversed(loads), strict=True):
            body.store("out", position + offset, value)

    whole = (dtype, stride << 20)
    assert elements_of_a_thread(build(axes, [], {"x": whole}, {"out": whole}, write)) == elements


@pytest.mark.parametrize(("rows", "columns", "tile"), [(128, 256, (16, 128, 4)), (64, 1 << 16, (64, 64, 4))])
def test_programs_of_column_sums_are_many_or_have_few_warps(rows: int, columns: int, tile: tuple[int, ...]) -> None:
    """Few columns are those of many programs; of many, fewer warps combine fewer sums."""
    column, row = Axis("p0", columns), Axis("r0", rows)
    position = linearize_index([row, column], [rows, columns])

    def write(body: KernelBuilder) -> None:
        x, y = [body.load(name, position, F32) for name in "xy"]
        for name, value in (("sum", x), ("product", x * y)):
            body.store(name, as_index(column), body.reduce("sum", value)[0])

    inputs, outputs = dict.fromkeys("xy", (F32, rows * columns)), dict.fromkeys(("sum", "product"), (F32, columns))
    first = configurations(build([column], [row], inputs, outputs, write))[0]
    assert isinstance(first, TileConfiguration)
    assert (first.x_block, first.r_block, first.num_warps) == tile


@pytest.mark.parametrize("across", [False, True], ids=["rows", "columns"])
def test_windows_that_are_reduced_stay_in_registers(across: bool) -> None:
    """The 25 elements of a window of a pool, for each element of a column or row that is summed."""
    p, r = Axis("p0", 4096), Axis("r0", 64)
    axes = [r, p] if across else [p, r]
    position = linearize_index(axes, [axis.size for axis in axes])

    def write(body: KernelBuilder) -> None:
        largest = body.load("x", position, F32)
        for shift in range(1, 25):
            largest = largest.maximum(body.load("x", position + 4 * shift, F32))
        body.store("out", as_index(p), body.reduce("sum", largest)[0])

    kernel = build([p], [r], {"x": (F32, 1 << 19)}, {"out": (F32, 4096)}, write)
    for item in configurations(kernel)[:1]:
        assert isinstance(item, TileConfiguration)
        assert item.x_block * item.y_block * item.r_block <= 2 * 32 * item.num_warps


def test_rows_of_few_elements_and_columns_are_flattened() -> None:
    p, q, r = Axis("p0", 1 << 16), Axis("p1", 2), Axis("r0", 4)

    def write(body: KernelBuilder) -> None:
        element = body.load("x", linearize_index([p, r, q], [1 << 16, 4, 2]), F32)
        body.store("out", linearize_index([p, q], [1 << 16, 2]), body.reduce("sum", element)[0])

    kernel = build([p, q], [r], {"x": (F32, 1 << 19)}, {"out": (F32, 1 << 17)}, write)
    first = configurations(kernel)[0]
    assert isinstance(first, TileConfiguration) and first.x_block * first.y_block >= 32


def test_the_last_axis_of_a_flat_block_is_contiguous() -> None:
    """Additions to channels, of which there are no whole blocks, at computed rows: no stride orders the axes."""
    kernel = parse_kernel("""kernel(row: i64[6], x: f32[4608]) -> (out: f32[384]) for [b: 32, c: 24, i: 3, j: 2] {
  %0 = i64 load row[2*i + j]
  %1 = f32 load x[144*b + c + 48*(i + j)//(2)]
  store add out[24*%0<16> + c] %1
}
""")
    candidates = configurations(kernel)
    for item in candidates:
        assert isinstance(item, TileConfiguration) and [axis.name for axis in item.x] == ["b", "i", "j", "c"]
    row = torch.tensor([3, 1, 15, 3, 0, 7])
    check(kernel, candidates[0], {"row": row}, in_place={"out": torch.zeros(384)}, tolerance=1e-5)


def test_kernels_without_contiguous_accesses_have_one_flat_block() -> None:
    """Each second column of rows of odd length, as those of `x[:, ::2] = y[:, ::2]`."""
    kernel = parse_kernel("""kernel(y: f32[1040]) -> (x: f32[1040]) for [p0: 16, p1: 33] {
  %0 = f32 load y[65*p0 + 2*p1]
  store x[65*p0 + 2*p1] %0
}
""")
    first = configurations(kernel)[0]
    assert isinstance(first, TileConfiguration) and first.x == kernel.axes
    check(kernel, first)


def windows(count: int, layout: tuple[int, int]) -> Kernel:
    """The largest of some elements of a row, in a layout with these steps along the rows and the elements."""
    p, q = Axis("p0", 4096), Axis("p1", 512)

    def write(body: KernelBuilder) -> None:
        largest = body.load("x", as_index(p) * layout[0] + as_index(q) * layout[1], BF16).to(F32)
        for shift in range(1, count):
            position = as_index(p) * layout[0] + as_index(q) * layout[1] + 3 * shift
            largest = largest.maximum(body.load("x", position, BF16).to(F32))
        body.store("out", as_index(p) * 512 + q, largest.to(BF16))

    return build([p, q], [], {"x": (BF16, 1 << 22)}, {"out": (BF16, 1 << 21)}, write)


@pytest.mark.parametrize(("count", "elements", "warps"), [(9, 4, 2), (25, 2, 4)])
def test_a_warp_has_more_elements_of_small_windows(count: int, elements: int, warps: int) -> None:
    kernel = windows(count, (512, 1))
    assert elements_of_a_thread(kernel) == elements and configurations(kernel)[0].num_warps == warps


@pytest.mark.parametrize(("count", "elements"), [(1, 16), (9, 8), (25, 2)])
def test_tiles_of_windows_in_another_layout_stay_in_registers(count: int, elements: int) -> None:
    assert elements_of_a_thread(windows(count, (1, 4096))) == elements


ACROSS = {"in another layout": (1 << 18, 1), "along rows": (1, 16)}


@pytest.mark.parametrize("name", ACROSS)
def test_one_warp_has_short_rows_whose_elements_are_contiguous_across_rows(name: str) -> None:
    """Several warps would share out each row, and combine their sums in shared memory."""
    p, r = Axis("p0", 1 << 18), Axis("r0", 16)
    step, row = ACROSS[name]

    def write(body: KernelBuilder) -> None:
        x = body.load("x", as_index(r) * step + as_index(p) * row, BF16).to(F32)
        body.store("out", as_index(p) * 16 + r, (x - body.reduce("sum", x)[0]).to(BF16))

    kernel = build([p], [r], {"x": (BF16, 1 << 22)}, {"out": (BF16, 1 << 22)}, write)
    assert (configurations(kernel)[0].num_warps == 1) == (step > 1)


def test_one_warp_has_short_rows_with_masked_elements_of_a_row_each() -> None:
    """Lanes go along the elements of rows, as those of a norm behind padding do."""
    p, r = Axis("p0", 1 << 20), Axis("r0", 4)

    def write(body: KernelBuilder) -> None:
        x = body.where(
            body.index(r) < 3,
            lambda: body.load("x", as_index(p) * 3 + r, BF16).to(F32) / body.load("y", as_index(p), BF16).to(F32),
            0.0,
        )
        body.store("out", as_index(p) * 4 + r, (x - body.reduce("sum", x)[0]).to(BF16))

    kernel = build([p], [r], {"x": (BF16, 3 << 20), "y": (BF16, 1 << 20)}, {"out": (BF16, 1 << 22)}, write)
    assert configurations(kernel)[0].num_warps == 1


def corners_kernel(rows: int, columns: int, images: int = 2, crossed: bool = False, corners: int = 4) -> Kernel:
    """The sum of the elements around a position of an image of 9 x 11, as of an interpolation; `crossed` along it."""
    p0, p1, p2 = axes = [Axis("p0", images), Axis("p1", rows), Axis("p2", columns)]

    def write(body: KernelBuilder) -> None:
        y, x = body.index(as_index(p1)), body.index(as_index(p2) + (p1 if crossed else 0))
        sums = []
        for number in range(corners):
            row = body.indirect_index((y + number // 2).minimum(8), 9)
            column = body.indirect_index((x * 2 + number % 2).minimum(10), 11)
            sums.append(body.load("x", (as_index(p0) * 9 + row) * 11 + column, F32))
        body.store("out", linearize_index(axes, [images, rows, columns]), sum(sums[1:], sums[0]))

    return build(axes, [], {"x": (F32, images * 99)}, {"out": (F32, images * rows * columns)}, write)


@pytest.mark.parametrize(
    ("columns", "corners", "tile"),
    [(128, 4, (128, 4, 1)), (224, 4, (32, 64, 4)), (57, 4, (64, 32, 4)), (90, 4, (32, 64, 4)), (97, 16, (16, 64, 4))],
)
def test_elements_at_indices_of_rows_and_columns_are_in_tiles(
    columns: int, corners: int, tile: tuple[int, int, int]
) -> None:
    kernel = corners_kernel(35, columns, corners=corners)
    first = configurations(kernel)[0]
    assert first.y == kernel.axes[2:] and (first.y_block, first.x_block, first.num_warps) == tile
    text = check(kernel, first)
    assert text.count(" * 11 + p0 * 99)") == corners, "what varies along rows alone is added up before columns"


@pytest.mark.parametrize(
    "kernel", [corners_kernel(35, 90, crossed=True), corners_kernel(35, 90, corners=2), corners_kernel(350, 9)],
    ids=["of both", "few loads", "short rows"],
)  # fmt: skip
def test_other_elements_at_indices_are_in_flat_blocks(kernel: Kernel) -> None:
    assert configurations(kernel)[0].x == kernel.axes


@pytest.mark.parametrize("crossed", [False, True])
def test_steps_are_longer_where_loads_are_contiguous_along_columns(crossed: bool) -> None:
    """Such loads are brought to their threads one after the other."""
    columns, rows = Axis("p0", 1 << 18), Axis("r0", 392)
    position = linearize_index([rows, columns], [392, 1 << 18])
    other = linearize_index([columns, rows], [1 << 18, 392]) if crossed else position

    def write(body: KernelBuilder) -> None:
        product = body.load("x", position, BF16).to(F32) * body.load("y", other, BF16).to(F32)
        body.store("out", position, product.to(BF16))
        body.store("sums", as_index(columns), body.reduce("sum", product)[0])

    count = 392 << 18
    outputs = {"out": (BF16, count), "sums": (F32, 1 << 18)}
    first = configurations(build([columns], [rows], dict.fromkeys("xy", (BF16, count)), outputs, write))[0]
    assert isinstance(first, TileConfiguration) and first.looped
    assert (first.x_block * first.r_block, first.num_warps) == ((2048, 8) if crossed else (1024, 4))
