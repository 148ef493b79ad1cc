"""Triton kernels in Triton's interpreter against the loop IR's evaluator: every operation, combination and tile."""

from __future__ import annotations

import functools
import itertools
import math
import re
from contextlib import nullcontext

import pytest
import torch

from fxwrap.loop_ir import (
    INTEGERS,
    KERNEL_DTYPES,
    OPERATIONS,
    REDUCTIONS,
    SCANS,
    Axis,
    Buffer,
    Index,
    Kernel,
    KernelBuilder,
    KernelError,
    OperationSpec,
    Scalar,
    as_index,
    hoist_expressions,
    linearize_index,
)
from fxwrap.printers.triton import Configuration, TileConfiguration, configurations, print_triton
from fxwrap.runtime.kernels import load_kernel
from fxwrap.symbolic import canonicalize, evaluate, expression_kind, make_symbol, parse_expr
from tests.printers.triton_kernels import (
    BF16,
    F32,
    F64,
    I64,
    build,
    check,
    launch_interpreted,
    random,
    softmax_kernel,
    squares_kernel,
)
from tests.support.long_form import sampled

# NumPy, which the interpreter computes with, warns of the tested cases: overflow, NaN, division by zero.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FLOATS = (
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -3.0, 7.0, -7.0, 1e-3, 1e3, -1e3, 88.0, -104.0, 1e-30, 0.92,
    0.93, -0.927, 10.0, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip


def values(dtype: torch.dtype) -> torch.Tensor:
    """Interesting values of a dtype."""
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        return torch.tensor(FLOATS, dtype=F64).to(dtype)
    limits = torch.iinfo(dtype)
    signed = [] if dtype is torch.uint8 else [-1, -2, -3, -7, -100]
    return torch.tensor([0, 1, 2, 3, 5, 7, 31, 100, limits.max, limits.min, *signed], dtype=dtype)


def pairs(spec: OperationSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every combination of interesting values, but for integer divisions that have no meaning."""
    types = [torch.bool, dtype, dtype] if spec.name == "where" else [dtype] * spec.operands
    chosen = [values(item) for item in types]
    places = torch.meshgrid(*[torch.arange(len(item)) for item in chosen], indexing="ij")
    grid = [item[place.flatten()] for item, place in zip(chosen, places, strict=True)]
    if dtype in INTEGERS and spec.name in ("floor_divide", "trunc_divide", "integer_remainder", "integer_fmod"):
        good = (grid[1] != 0) & (grid[1].to(I64) != -1)
        grid = [item[good] for item in grid]
    return {name: item.contiguous() for name, item in zip("abc", grid, strict=False)}


OPERATION_CASES = [
    (spec, dtype)
    for spec, dtype in itertools.product(OPERATIONS.values(), sorted(KERNEL_DTYPES, key=str))
    if spec.domain.accepts(dtype) and spec.name not in ("cast", "bitcast")
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("spec", "dtype"), OPERATION_CASES, ids=lambda item: getattr(item, "name", str(item)[6:]))
def test_operations_match_torch(spec: OperationSpec, dtype: torch.dtype) -> None:
    arguments = pairs(spec, dtype)
    count = arguments["a"].numel()
    axis = Axis("p0", count)

    def write(body: KernelBuilder) -> None:
        loads = [body.load(name, as_index(axis), item.dtype) for name, item in arguments.items()]
        value = body.compute(spec.name, *loads)
        body.store("out", as_index(axis), value)
        doubled = value + value if result in INTEGERS else value  # shows a text whose type is wider than the result's
        body.store("doubled", as_index(axis), doubled.to(widest))

    result = torch.bool if spec.result == "bool" else dtype
    widest = F64 if result.is_floating_point else I64
    inputs = {name: (item.dtype, count) for name, item in arguments.items()}
    kernel = build([axis], [], inputs, {"out": (result, count), "doubled": (widest, count)}, write)
    check(kernel, inputs=arguments, tolerance=4e-6 if dtype is F32 else None)


def test_an_overwritten_element_is_loaded_before_it_is_stored() -> None:
    axis = Axis("p0", 9)

    def write(body: KernelBuilder) -> None:
        narrow = body.load("out", as_index(axis), I64).to(torch.uint8)
        loaded = [body.load(name, as_index(axis), I64) for name in others]
        body.store("out", as_index(axis), functools.reduce(Scalar.maximum, loaded))
        body.store("narrow", as_index(axis), narrow)

    others = {f"x{number}": (I64, 9) for number in range(20)}  # more than are loaded before all else
    kernel = build([axis], [], others, {"out": (I64, 9), "narrow": (torch.uint8, 9)}, write)
    check(kernel, in_place={"out": torch.arange(9) + 20})


@pytest.mark.parametrize("dtype", sorted(INTEGERS, key=str), ids=str)
def test_integers_with_literals_wrap(dtype: torch.dtype) -> None:
    """A result that Triton gave a wider type, because of a literal's, would not wrap when it is added to itself."""
    operand = values(dtype)
    axis = Axis("p0", operand.numel())
    specs = [item for item in OPERATIONS.values() if item.operands == 2 and item.domain.accepts(dtype)]
    names = [item.name for item in specs if item.result == "same"]

    def write(body: KernelBuilder) -> None:
        loaded = body.load("a", as_index(axis), dtype)
        for name in names:
            value = loaded.apply(name, 100)
            body.store(name, as_index(axis), (value + value).to(I64))

    outputs = {name: (I64, operand.numel()) for name in names}
    check(build([axis], [], {"a": (dtype, operand.numel())}, outputs, write), inputs={"a": operand})


def converted(body: KernelBuilder, name: str, index: Index, source: torch.dtype, target: torch.dtype) -> Scalar:
    """An element of `a` as another dtype."""
    return body.compute(name, body.load("a", index, source), dtype=target)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(sorted(KERNEL_DTYPES, key=str), 2)), ids=str)
def test_casts_match_torch(source: torch.dtype, target: torch.dtype) -> None:
    operand = values(source)
    if source.is_floating_point and not target.is_floating_point and target is not torch.bool:
        top = 100.0 if target in (torch.int8, torch.uint8) else 1000.0
        number = operand.double()  # float8 has no arithmetic
        fits = number.isfinite() & (number.abs() <= top) & ((number >= 0) | (target is not torch.uint8))
        operand = operand[fits]
    count = operand.numel()
    axis = Axis("p0", count)
    kernel = build(
        [axis], [], {"a": (source, count)}, {"out": (target, count)},
        lambda body: body.store("out", as_index(axis), converted(body, "cast", as_index(axis), source, target)),
    )  # fmt: skip
    check(kernel, inputs={"a": operand})


@pytest.mark.parametrize(("source", "target"), [(F32, torch.int32), (torch.int64, F64), (BF16, torch.int16)])
def test_bits_are_reinterpreted(source: torch.dtype, target: torch.dtype) -> None:
    axis = Axis("p0", 9)
    kernel = build(
        [axis], [], {"a": (source, 9)}, {"out": (target, 9)},
        lambda body: body.store("out", as_index(axis), converted(body, "bitcast", as_index(axis), source, target)),
    )  # fmt: skip
    check(kernel)


@pytest.mark.parametrize("dtype", [F32, F64, torch.int64, torch.uint8, torch.bool])
def test_scalars_keep_their_precision(dtype: torch.dtype) -> None:
    axis = Axis("p0", 5)
    constant = {F32: 0.1, F64: 0.1, torch.int64: 2**40 + 1, torch.uint8: 200, torch.bool: True}[dtype]

    def write(body: KernelBuilder) -> None:
        value, number = body.load("a", as_index(axis), dtype), body.constant(constant, dtype)
        body.store("same", as_index(axis), number)
        body.store("chosen", as_index(axis), body.load("b", as_index(axis), torch.bool).where(number, value))
        if dtype is not torch.bool:
            body.store("product", as_index(axis), value * number)
            body.store("quotient", as_index(axis), body.compute("maximum", number, value))

    names = ["same", "chosen", *([] if dtype is torch.bool else ["product", "quotient"])]
    check(build([axis], [], {"a": (dtype, 5), "b": (torch.bool, 5)}, dict.fromkeys(names, (dtype, 5)), write))


# --- reductions and scans -------------------------------------------------------------------------------------------


def tilings(kernel: Kernel) -> list[Configuration]:
    """Configurations of a kernel over p0 by r0: rows and columns, whole and looped, blocks that fit and that do not."""
    p = kernel.axes
    size = int(kernel.reduced_count)
    whole = 1 << max(size - 1, 0).bit_length()
    return [
        TileConfiguration(r_block=whole, y=p, y_block=1),
        TileConfiguration(r_block=whole, y=p, y_block=4),
        TileConfiguration(r_block=whole, x=p, x_block=2),
        TileConfiguration(r_block=8, y=p, y_block=1, looped=True),
        TileConfiguration(r_block=8, y=p, y_block=4, looped=True),
        TileConfiguration(r_block=4, x=p, x_block=4, looped=True, num_stages=3),
        *configurations(kernel)[:1],
    ]


def reduction_kernel(kind: str, dtype: torch.dtype, rows: int, size: int) -> Kernel:
    """A kernel with one reduction over the rows of x."""
    p, r = Axis("p0", rows), Axis("r0", size)
    body = KernelBuilder()
    results = body.reduce(kind, body.load("x", linearize_index([p, r], [rows, size]), dtype))
    for number, value in enumerate(results):
        body.store(f"out{number}", as_index(p), value)
    outputs = [Buffer(f"out{number}", value.dtype, rows) for number, value in enumerate(results)]
    return body.finish([p], [r], [Buffer("x", dtype, rows * size)], outputs)


REDUCTION_CASES = [
    (kind, dtype)
    for kind, spec in REDUCTIONS.items()
    for dtype in (F32, F64, torch.int64, torch.int8, torch.uint8, torch.bool)
    if spec.domain.accepts(dtype)
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "dtype", "rows", "size"),
    [(*case, 5, 19) for case in REDUCTION_CASES]
    + [(*case, *shape) for case in REDUCTION_CASES if case[1] in (F32, torch.int64) for shape in ((4, 16), (1, 1))],
    ids=str,
)
def test_reductions(kind: str, dtype: torch.dtype, rows: int, size: int) -> None:
    kernel = reduction_kernel(kind, dtype, rows, size)
    for configuration in sampled(tilings(kernel), REDUCTION_CASES.index((kind, dtype))):
        check(kernel, configuration)


SPECIAL_ROWS = (
    (1.0, float("nan"), 2.0, float("nan"), float("inf")),
    (float("-inf"),) * 5,
    (float("inf"), 1.0, float("-inf"), float("inf"), 0.0),
    (3.0, 3.0, -1.0, 3.0, -1.0),
)


@pytest.mark.parametrize("kind", ["max", "min", "argmax", "argmin", "softmax", "sum"])
def test_reductions_of_special_numbers(kind: str) -> None:
    operand = torch.tensor(SPECIAL_ROWS).repeat(1, 3).flatten()
    kernel = reduction_kernel(kind, F32, 4, 15)
    for configuration in tilings(kernel):
        check(kernel, configuration, inputs={"x": operand})


@pytest.mark.parametrize(("kind", "dtype"), [("argmax", F32), ("argmin", F32), ("argmax", torch.int8)], ids=str)
def test_a_loop_for_the_position_of_an_extreme_compares_no_positions(kind: str, dtype: torch.dtype) -> None:
    """The elements of a lane come in order; only the combination of lanes tells which of equals is the first."""
    source = print_triton(
        reduction_kernel(kind, dtype, 4, 150), TileConfiguration(r_block=16, looped=True)
    ).source.split("for start in")[1]
    in_loop, after = source.split("tl.reduce")
    assert ("first_largest" if kind == "argmax" else "first_smallest") in after
    assert "first_" not in in_loop and "<" not in in_loop.split("better =")[1].split("\n", 1)[1]
    check(reduction_kernel(kind, dtype, 4, 150), TileConfiguration(r_block=16, looped=True))


@pytest.mark.parametrize("kind", ["sum", "prod", "any", "all"])
def test_reductions_of_nothing(kind: str) -> None:
    kernel = reduction_kernel(kind, torch.bool if kind in ("any", "all") else F32, 3, 0)
    check(kernel)
    check(kernel, TileConfiguration(y=kernel.axes, r_block=4, looped=True))


SCAN_CASES = [
    (kind, dtype)
    for kind, spec in SCANS.items()
    for dtype in (F32, F64, torch.int64, torch.int8)
    if spec.domain.accepts(dtype)
]


@pytest.mark.parametrize(("kind", "dtype"), SCAN_CASES, ids=str)
@pytest.mark.parametrize("special", [False, True])
def test_scans(kind: str, dtype: torch.dtype, special: bool) -> None:
    p, r = Axis("p0", 4), Axis("r0", 15)
    position = linearize_index([p, r], [4, 15])
    body = KernelBuilder()
    results = body.scan(kind, body.load("x", position, dtype))
    for number, value in enumerate(results):
        body.store(f"out{number}", position, value)
    outputs = [Buffer(f"out{number}", value.dtype, 60) for number, value in enumerate(results)]
    kernel = body.finish([p], [r], [Buffer("x", dtype, 60)], outputs)
    numbers = random(F32, 60, torch.Generator().manual_seed(3)) * 3
    operand = torch.tensor(SPECIAL_ROWS).repeat(1, 3).flatten() if special else numbers
    if special and not dtype.is_floating_point:
        operand = operand.nan_to_num(nan=5.0, posinf=9.0, neginf=-9.0)
    for configuration in sampled(tilings(kernel), SCAN_CASES.index((kind, dtype)) + special):
        check(kernel, configuration, inputs={"x": operand.to(dtype)})


def test_the_error_of_a_sum_does_not_grow_with_the_blocks_of_its_scan() -> None:
    p, r = Axis("p0", 2), Axis("r0", 4096)
    position = linearize_index([p, r], [2, 4096])
    body = KernelBuilder()
    body.store("out", position, body.scan("cumsum", body.load("x", position, F32))[0])
    kernel = body.finish([p], [r], [Buffer("x", F32, 8192)], [Buffer("out", F32, 8192)])
    operand, result = torch.full((8192,), 0.1), torch.zeros(8192)
    wanted = operand.double().view(2, 4096).cumsum(1).flatten()
    printed = print_triton(kernel, TileConfiguration(r_block=16, y=(p,), y_block=2, looped=True))
    launch_interpreted(kernel, printed, {"x": operand, "out": result})
    assert (result - wanted).norm() <= 5e-7 * wanted.norm()


def test_a_scan_shared_by_two_stages_and_an_assertion() -> None:
    p, r = Axis("p0", 4), Axis("r0", 15)
    position = linearize_index([p, r], [4, 15])

    def write(body: KernelBuilder) -> None:
        (running,) = body.scan("cumsum", body.load("x", position, I64))
        body.device_assert(running < 30, "out of range")
        body.store("out", position, running - body.reduce("max", running)[0])

    kernel = build([p], [r], {"x": (I64, 60)}, {"out": (I64, 60)}, write)
    for configuration in tilings(kernel):
        check(kernel, configuration, inputs={"x": torch.arange(60) % 3})  # sums up to 15
        printed = print_triton(kernel, configuration=configuration)
        launch = load_kernel("triton", printed.source, printed.signature, printed.options)
        with pytest.raises(IndexError, match="out of range"):
            launch(printed.grid, torch.arange(60) % 6, torch.zeros(60, dtype=I64))


def test_reductions_and_scans_of_an_invariant_value_count_every_element() -> None:
    p, r = Axis("p0", 3), Axis("r0", 15)

    def write(body: KernelBuilder) -> None:
        x = body.load("x", as_index(p), F32)
        body.store("out", as_index(p), body.reduce("sum", x)[0])
        body.store("ones", as_index(p), body.reduce("sum", body.constant(1.0, F32))[0])
        (running,) = body.scan("cumsum", x)
        body.store("running", as_index(p) * 15 + r, running)
        body.store("largest", as_index(p), body.reduce("max", running * 2.0)[0])

    outputs = {"out": (F32, 3), "ones": (F32, 3), "running": (F32, 45), "largest": (F32, 3)}
    kernel = build([p], [r], {"x": (F32, 3)}, outputs, write)
    for configuration in tilings(kernel):
        check(kernel, configuration)


def layer_norm_kernel(rows: int, size: int, dtype: torch.dtype = BF16) -> Kernel:
    """A residual sum, which is stored, and its layer norm."""
    p, r = Axis("p0", rows), Axis("r0", size)
    position = linearize_index([p, r], [rows, size])

    def write(body: KernelBuilder) -> None:
        total = body.load("x", position, dtype).to(F32) + body.load("residual", position, dtype).to(F32)
        body.store("sum", position, total.to(dtype))
        mean, squares = body.reduce("welford", total)
        scale = (squares / float(size) + 1e-5).rsqrt()
        normal = (total - mean) * scale * body.load("weight", as_index(r), F32) + body.load("bias", as_index(r), F32)
        body.store("out", position, normal.to(dtype))
        body.store("mean", as_index(p), mean)
        body.store("scale", as_index(p), scale)

    inputs = {"x": (dtype, rows * size), "residual": (dtype, rows * size), "weight": (F32, size), "bias": (F32, size)}
    outputs = {"sum": (dtype, rows * size), "out": (dtype, rows * size), "mean": (F32, rows), "scale": (F32, rows)}
    return build([p], [r], inputs, outputs, write)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [16, 33])
def test_stages(size: int) -> None:
    for kernel in (softmax_kernel(5, size), layer_norm_kernel(5, size)):
        for configuration in (*tilings(kernel), *configurations(kernel)):
            check(kernel, configuration)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_warp_has_whole_rows_that_are_not_aligned(dtype: torch.dtype) -> None:
    """Threads load single elements of them, so that warps would share out a row, and its sums."""
    for size in (131, 197, 501, 1001):
        first = configurations(layer_norm_kernel(65536, size, dtype))[0]
        assert first.num_warps == 1 and first.y_block * first.r_block <= 1024, size
    for rows, size, warps in ((65536, 64, 4), (65536, 256, 4), (4096, 256, 1), (2048, 384, 1), (4096, 1000, 4)):
        assert configurations(layer_norm_kernel(rows, size, dtype))[0].num_warps == warps, (rows, size)
    for size, warps, tile in ((257, 1, 2048), (256, 4, 2048)):
        first = configurations(distance_kernel(3000, 77, size, dtype))[0]
        assert (first.num_warps, first.y_block * first.r_block) == (warps, tile), "rows of two tensors"


def distance_kernel(rows: int, others: int, size: int, dtype: torch.dtype) -> Kernel:
    """The sum of absolute differences of each row and each of other rows."""
    p0, p1, r = Axis("p0", rows), Axis("p1", others), Axis("r0", size)

    def write(body: KernelBuilder) -> None:
        x = body.load("x", linearize_index([p0, r], [rows, size]), dtype).to(F32)
        y = body.load("y", linearize_index([p1, r], [others, size]), dtype).to(F32)
        body.store("out", linearize_index([p0, p1], [rows, others]), body.reduce("sum", abs(x - y))[0])

    inputs = {"x": (dtype, rows * size), "y": (dtype, others * size)}
    return build([p0, p1], [r], inputs, {"out": (F32, rows * others)}, write)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_programs_move_at_least_4_kib(dtype: torch.dtype) -> None:
    """A device starts programs at a limited rate."""
    axis = Axis("p0", 10_000_000)

    def fill(body: KernelBuilder) -> None:
        body.store("out", as_index(axis), body.constant(0.0, dtype))

    def copy(body: KernelBuilder) -> None:
        body.store("out", as_index(axis), body.load("x", as_index(axis), dtype))

    outputs = {"out": (dtype, 10_000_000)}
    filled = configurations(build([axis], [], {}, outputs, fill))[0]
    copied = configurations(build([axis], [], {"x": (dtype, 10_000_000)}, outputs, copy))[0]
    assert filled.x_block * dtype.itemsize == 4096 and copied.x_block * dtype.itemsize * 2 == 4096


@pytest.mark.parametrize("is_costly", [True, False])
@pytest.mark.parametrize("names", ["x", "xy"])
def test_masked_loads_of_uneven_columns_have_a_warp_s_columns(names: str, is_costly: bool) -> None:
    p0, part, r = Axis("p1", 3001), Axis("p0", 12), Axis("r0", 371)
    row = as_index(part) * 371 + r

    def write(body: KernelBuilder, masked: bool, dtype: torch.dtype) -> None:
        with body.masked(body.index(row) < 4451) if masked else nullcontext():
            x, *others = [body.load(name, row * 3001 + p0, dtype).to(F32) for name in names]
        value = math.prod(others, start=x.exp().erf() if is_costly else x)
        body.store("out", as_index(part) * 3001 + p0, body.reduce("sum", value)[0])

    for dtype, masked, width in (
        (BF16, True, 32),
        (BF16, False, 64),
        (F32, True, 32),
        (F32, False, 32 if is_costly and len(names) > 1 else 64),
    ):
        inputs = dict.fromkeys(names, (dtype, 12 * 371 * 3001))
        function = functools.partial(write, masked=masked, dtype=dtype)
        first = configurations(build([part, p0], [r], inputs, {"out": (F32, 12 * 3001)}, function))[0]
        assert first.x_block == width, (dtype, masked)


def test_long_uneven_rows_of_several_tensors_have_many_warps() -> None:
    chosen = {size: configurations(layer_norm_kernel(3000, size))[0] for size in (12288, 12289, 18003)}
    assert [(item.r_block, item.num_warps) for item in chosen.values()][1:] == [(2048, 16)] * 2
    assert chosen[12288].r_block == 4096


def column_kernel(kind: str, rows: int, columns: int) -> Kernel:
    """Combines the elements of each column."""
    p, r = Axis("p0", columns), Axis("r0", rows)

    def write(body: KernelBuilder) -> None:
        x = body.load("x", as_index(r) * columns + p, F32)
        if kind in SCANS:
            body.store("out", as_index(r) * columns + p, body.scan(kind, x)[0])
        else:
            body.store("out", as_index(p), body.reduce(kind, x)[-1])

    result = I64 if kind == "argmax" else F32
    count = rows * columns if kind in SCANS else columns
    return build([p], [r], {"x": (F32, rows * columns)}, {"out": (result, count)}, write)


@pytest.mark.parametrize("kind", ["sum", "argmax", "welford", "cumsum"])
def test_columns_of_rows_that_are_not_aligned(kind: str) -> None:
    """Threads load few elements at once, and these without copies to shared memory; scans have whole columns."""
    for configuration in configurations(column_kernel(kind, 200, 77)):
        check(column_kernel(kind, 200, 77), configuration)
    for rows, columns in ((16384, 1025), (2159, 10007), (300000, 65), (20000, 839)):
        first = configurations(column_kernel(kind, rows, columns))[0]
        assert first.num_stages == 1
        if kind == "cumsum":
            is_narrow = -(-columns // 32) < 2 * 132
            assert first.x_block == (4 if is_narrow else 32 * first.num_warps), (
                "a thread has a column, if these are many"
            )
        else:
            assert first.x_block * first.r_block == 8 * 32 * first.num_warps
            assert first.num_warps == 16 or -(-columns // first.x_block) * first.num_warps >= 4 * 132
    assert kind == "cumsum" or configurations(column_kernel(kind, 16384, 1024))[0].num_stages == 3


def test_elements_that_start_again_are_a_row() -> None:
    p, r = Axis("p0", 257), Axis("r0", 3855)

    def write(body: KernelBuilder) -> None:
        x = body.load("x", (as_index(p) * 3855 + r) % 66049, F32)
        body.store("out", as_index(p), body.reduce("sum", x)[0])

    kernel = build([p], [r], {"x": (F32, 66049)}, {"out": (F32, 257)}, write)
    assert configurations(kernel)[0].x == (), "programs have rows"
    check(kernel)


def test_reduced_axes_are_flattened() -> None:
    n, c, h = Axis("r0", 3), Axis("p0", 4), Axis("r1", 7)

    def write(body: KernelBuilder) -> None:
        x = body.load("x", linearize_index([n, c, h], [3, 4, 7]), F32)
        mean, squares = body.reduce("welford", x)
        body.store("mean", as_index(c), mean)
        body.store("squares", as_index(c), squares)
        body.store("at", as_index(c), body.reduce("argmax", x)[1])
        body.store("out", linearize_index([n, c, h], [3, 4, 7]), x - mean)

    outputs = {"mean": (F32, 4), "squares": (F32, 4), "at": (I64, 4), "out": (F32, 84)}
    kernel = build([c], [n, h], {"x": (F32, 84)}, outputs, write)
    for configuration in tilings(kernel):
        check(kernel, configuration)


# --- tiles, masks, memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (64, 64), (70, 33), (3, 129), (0, 5), (5, 0)])
def test_transposed_sums(rows: int, columns: int) -> None:
    i, j = Axis("p0", rows), Axis("p1", columns)

    def write(body: KernelBuilder) -> None:
        left = body.load("a", linearize_index([i, j], [rows, columns]), BF16).to(F32)
        right = body.load("b", linearize_index([j, i], [columns, rows]), BF16).to(F32)
        body.store("out", linearize_index([i, j], [rows, columns]), (left + right).to(BF16))

    count = rows * columns
    kernel = build([i, j], [], {"a": (BF16, count), "b": (BF16, count)}, {"out": (BF16, count)}, write)
    for configuration in configurations(kernel):
        check(kernel, configuration)


@pytest.mark.parametrize("sizes", [(3, 4, 5), (2, 8, 16), (1, 1, 7)])
def test_broadcast_over_every_axis(sizes: tuple[int, int, int]) -> None:
    axes = [Axis(f"p{number}", size) for number, size in enumerate(sizes)]

    def write(body: KernelBuilder) -> None:
        total = body.load("x", linearize_index(axes, sizes), F32)
        for name, axis in zip("abc", axes, strict=True):
            total = total + body.load(name, as_index(axis), F32)
        body.store("out", linearize_index(axes, sizes), total)

    count = sizes[0] * sizes[1] * sizes[2]
    inputs = {"x": (F32, count), **{name: (F32, size) for name, size in zip("abc", sizes, strict=True)}}
    kernel = build(axes, [], inputs, {"out": (F32, count)}, write)
    for configuration in (
        *configurations(kernel),
        TileConfiguration(x=tuple(axes), x_block=16),
        TileConfiguration(x=(axes[2],), y=(axes[0], axes[1]), x_block=4, y_block=2),
        TileConfiguration(x=(axes[2],), y=(axes[0],), x_block=8, y_block=2),
        TileConfiguration(x=(axes[2],), x_block=8),
        TileConfiguration(),
    ):
        check(kernel, configuration)


def test_padding_is_masked() -> None:
    axis = Axis("p0", 12)

    def write(body: KernelBuilder) -> None:
        place = body.index(as_index(axis) - 3)
        inside = body.compute("ge", place, body.constant(0, I64)) & (place < 6)
        body.store("out", as_index(axis), body.where(inside, lambda: body.load("x", as_index(axis) - 3, F32, 0.5), 7.0))
        body.store("half", (as_index(axis) - 3) // 2 + 2, body.load("x", (as_index(axis) - 3) % 6, F32), mask=inside)

    check(build([axis], [], {"x": (F32, 6)}, {"out": (F32, 12), "half": (F32, 12)}, write))


@pytest.mark.parametrize("columns", [5, 16])
def test_indirect_rows(columns: int) -> None:
    i, j = Axis("p0", 6), Axis("p1", columns)

    def write(body: KernelBuilder) -> None:
        chosen = body.indirect_index(body.load("index", as_index(i), I64), 4)
        value = body.load("table", chosen * columns + j, BF16).to(F32)
        body.store("out", linearize_index([i, j], [6, columns]), value)

    inputs = {"index": (I64, 6), "table": (BF16, 4 * columns)}
    kernel = build([i, j], [], inputs, {"out": (F32, 6 * columns)}, write)
    for configuration in (*configurations(kernel), TileConfiguration(x=(j,), y=(i,), x_block=4, y_block=2)):
        check(kernel, configuration, inputs={"index": torch.tensor([0, 3, 1, 1, 2, 0])})


def test_outputs_may_be_read() -> None:
    p, r = Axis("p0", 4), Axis("r0", 20)
    position = linearize_index([p, r], [4, 20])

    def write(body: KernelBuilder) -> None:
        x = body.load("x", position, F32)
        body.store("x", position, x * 2.0)
        largest = body.reduce("max", x)[0]
        running = body.load("running", as_index(p), F32)
        body.store("running", as_index(p), running * 0.9 + largest)
        body.store("out", position, x - largest + running)

    kernel = build([p], [r], {}, {"x": (F32, 80), "running": (F32, 4), "out": (F32, 80)}, write)
    start = {"x": random(F32, 80, torch.Generator().manual_seed(1)), "running": torch.arange(4.0)}
    for configuration in tilings(kernel):
        text = check(kernel, configuration, in_place=start)
        assert "debug_barrier" in text


@pytest.mark.parametrize("swapped", [False, True])
def test_threads_meet_before_they_store_elements_that_others_have_loaded(swapped: bool) -> None:
    """A value that is computed from the element that it overwrites is stored after that is loaded anyway."""
    p = Axis("p0", 40)

    def write(body: KernelBuilder) -> None:
        halves = [body.load("x", as_index(p) + start, F32) for start in (0, 40)]
        for number, value in enumerate(reversed(halves) if swapped else halves):
            body.store("x", as_index(p) + 40 * number, value * 2.0)

    kernel = build([p], [], {}, {"x": (F32, 80)}, write)
    text = check(kernel, in_place={"x": random(F32, 80, torch.Generator().manual_seed(1))})
    assert ("debug_barrier" in text) is swapped


# --- numbers and indices --------------------------------------------------------------------------------------------


def test_symbolic_sizes_and_numbers() -> None:
    s0, s1, z0 = make_symbol("s0"), make_symbol("s1"), make_symbol("f0")
    p, r = Axis("p0", s0), Axis("r0", s1)
    position = linearize_index([p, r], [s0, s1])

    def write(body: KernelBuilder) -> None:
        x = body.load("x", position, F32) * body.number(z0, F64).to(F32)
        mean, squares = body.reduce("welford", x)
        body.store("out", position, x - mean)
        body.store("squares", as_index(p), squares)
        body.store("size", as_index(p), body.number(s1 * 2, I64))
        body.store("exact", as_index(p), body.number(z0, F64))

    outputs = {"out": (F32, s0 * s1), "squares": (F32, s0), "size": (I64, s0), "exact": (F64, s0)}
    kernel = build([p], [r], {"x": (F32, s0 * s1)}, outputs, write)
    for sizes in ((5, 19), (1, 1), (2, 8), (0, 3)):
        numbers = {"s0": sizes[0], "s1": sizes[1], "f0": 0.1}
        for configuration in (*configurations(kernel), TileConfiguration(y=(p,), y_block=2, r_block=8, looped=True)):
            check(kernel, configuration, numbers=numbers)


@pytest.mark.parametrize("sizes", [(3, 4), (1, 1), (2, 0)])
def test_powers_of_symbols(sizes: tuple[int, int]) -> None:
    kernel = squares_kernel()
    for configuration in (
        configurations(kernel)[0],
        TileConfiguration(y=kernel.axes, y_block=4, r_block=8, looped=True),
    ):
        assert "**" not in check(kernel, configuration, numbers=dict(zip(("s0", "s1"), sizes, strict=True)))


def test_a_negative_power_is_rejected() -> None:
    axis = Axis("p0", make_symbol("s0"))

    def write(body: KernelBuilder) -> None:
        body.store("out", as_index(axis), body.number(make_symbol("s0") ** -1, F64))

    kernel = build([axis], [], {}, {"out": (F64, make_symbol("s0"))}, write)
    with pytest.raises(KernelError, match=re.escape("Triton has no form of s0**-1 in an index; pass")):
        print_triton(kernel)
    check(hoist_expressions(kernel)[0], numbers={"s0": 4, "f0": 0.25})


def test_symbolic_quotients_and_extrema_are_computed_at_launch() -> None:
    """Among them are those that Triton would round towards zero, or has no function for."""
    s0 = make_symbol("s0")
    texts = ("floordiv(s0 - 9, 2)", "mod(s0 - 9, 4)", "max(s0, s1)", "min(s0**2, s1)", "2*s0**-1", "sqrt(s0)")
    formulas = [parse_expr(text) for text in texts]
    kinds = [F64 if expression_kind(formula) == "float" else I64 for formula in formulas]
    p, q = Axis("p0", parse_expr("max(s0, s1) + floordiv(s0, 2)")), Axis("p1", s0**2)

    def write(body: KernelBuilder) -> None:
        for name, formula, kind in zip(texts, formulas, kinds, strict=True):
            body.store(name, linearize_index([p, q], [p.size, q.size]), body.number(formula, kind))

    count = canonicalize(p.size * q.size)
    outputs = {name: (kind, count) for name, kind in zip(texts, kinds, strict=True)}
    kernel, named = hoist_expressions(build([p, q], [], {}, outputs, write))
    known = {"s0": 4, "s1": 5}
    passed = {symbol.name: evaluate(formula, known) for symbol, formula in named.items()}
    assert set(passed.values()) >= {-3, 3, 5, 2, 0.5}
    check(kernel, numbers=known | passed)


def test_indices_are_64_bit_where_32_overflow() -> None:
    large = 2**31 + 8
    axis = Axis("p0", large)

    def write(body: KernelBuilder) -> None:
        body.store("out", as_index(axis), body.load("x", as_index(axis), torch.int8))

    text = print_triton(build([axis], [], {"x": (torch.int8, large)}, {"out": (torch.int8, large)}, write)).source
    assert "tl.program_id(0).to(tl.int64)" in text
    s0 = make_symbol("s0")
    axis = Axis("p0", s0)
    kernel = build([axis], [], {"x": (torch.int8, s0)}, {"out": (torch.int8, s0)}, write)
    assert "tl.int64" in print_triton(kernel).source
    assert "tl.int64" in print_triton(kernel, limits={"s0": large}).source
    assert "tl.int64" not in print_triton(kernel, limits={"s0": 4096}).source
    check(kernel, numbers={"s0": 11})


def test_values_of_indices_are_64_bits() -> None:
    axis = Axis("p0", 9)
    kernel = build(
        [axis], [], {}, {"out": (I64, 9)},
        lambda body: body.store("out", as_index(axis), body.index(as_index(axis) * 2**33 - 5)),
    )  # fmt: skip
    check(kernel)


def test_one_element_and_none() -> None:
    kernel = build(
        [], [], {"x": (F32, 1)}, {"out": (F32, 1)}, lambda body: body.store("out", 0, body.load("x", 0, F32) + 1.0)
    )
    check(kernel)
    axis = Axis("p0", 0)
    empty = build(
        [axis], [], {}, {"out": (F32, 0)}, lambda body: body.store("out", as_index(axis), body.constant(1.0, F32))
    )
    check(empty)
    assert print_triton(empty).grid == (0, 1, 1)


def test_failing_assertions_raise() -> None:
    axis = Axis("p0", 5)

    def write(body: KernelBuilder) -> None:
        index = body.load("index", as_index(axis), I64)
        body.device_assert(index < 3, "index out of range")
        body.store("out", as_index(axis), index)

    kernel = build([axis], [], {"index": (I64, 5)}, {"out": (I64, 5)}, write)
    check(kernel, inputs={"index": torch.tensor([0, 1, 2, 1, 0])})
    printed = print_triton(kernel)
    assert ("debug", True) in printed.options, "Triton leaves assertions out otherwise"
    launch = load_kernel("triton", printed.source, printed.signature, printed.options)
    with pytest.raises(IndexError, match="index out of range"):
        launch((1,), torch.tensor([0, 1, 3, 1, 0]), torch.zeros(5, dtype=I64))
