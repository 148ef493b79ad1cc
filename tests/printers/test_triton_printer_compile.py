"""Triton kernels compiled for an H100 or H200 on a machine without one: no spills, whole vectors loaded and stored."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fxwrap.loop_ir import (
    KERNEL_DTYPES,
    OPERATIONS,
    REDUCTIONS,
    SCANS,
    Axis,
    Kernel,
    KernelBuilder,
    as_index,
    linearize_index,
)
from fxwrap.printers.printed_kernel import PrintedKernel
from fxwrap.printers.triton import Configuration, TileConfiguration, configurations, print_triton
from fxwrap.runtime.triton.compile import load_jit_function
from fxwrap.symbolic import make_symbol
from tests.printers.test_triton_printer import layer_norm_kernel
from tests.printers.triton_kernels import BF16, F32, F64, I64, build, check, softmax_kernel, squares_kernel

ROWS, COLUMNS = 8192, 4096
SPILLED = re.compile(r"st\.local|ld\.local")


def compiled(printed: PrintedKernel, capability: int = 90, **more: Any) -> Any:
    """A kernel compiled for a compute capability, 90 for 9.0, its pointers and numbers divisible by 16.

    `more` are options of the compiler.
    """
    function = load_jit_function(printed.source)
    names = {"f16": "fp16", "f32": "fp32", "f64": "fp64"}
    types = [names.get(entry.removeprefix("*"), entry.removeprefix("*")) for entry in printed.signature]
    kinds = [
        ("*" if entry.startswith("*") else "") + name for entry, name in zip(printed.signature, types, strict=True)
    ]
    constants = {name: value for name, value in printed.options if name.isupper()}
    options = {name: value for name, value in printed.options if not name.isupper()}
    signature = dict(zip(function.arg_names, [*kinds, *["constexpr"] * len(constants)], strict=True))
    divisible = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(kinds) if kind[:2] != "fp"}
    source = ASTSource(function, signature, constants, divisible)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"enable_fp_fusion": False, **options, **more})


def instructions(kernel: Kernel, configuration: Configuration | None = None) -> str:
    """The PTX of a kernel, which spills nothing."""
    binary = compiled(print_triton(kernel, configuration))
    text: str = binary.asm["ptx"]
    assert not SPILLED.search(text), "the kernel keeps values in local memory"
    return text


def pointwise(inputs: dict[str, torch.dtype], formula: Any, dtype: torch.dtype = BF16) -> Kernel:
    """A kernel over a whole matrix of 8192 x 4096 elements."""
    axis = Axis("p0", ROWS * COLUMNS)

    def write(body: KernelBuilder) -> None:
        loads = [body.load(name, as_index(axis), item).to(F32) for name, item in inputs.items()]
        body.store("out", as_index(axis), formula(*loads).to(dtype))

    count = ROWS * COLUMNS
    return build([axis], [], {name: (item, count) for name, item in inputs.items()}, {"out": (dtype, count)}, write)


def bias_gelu() -> Kernel:
    """gelu(x + bias)."""
    i, j = Axis("p0", ROWS), Axis("p1", COLUMNS)
    position = linearize_index([i, j], [ROWS, COLUMNS])

    def write(body: KernelBuilder) -> None:
        x = body.load("x", position, BF16).to(F32) + body.load("bias", as_index(j), BF16).to(F32)
        body.store("out", position, (x * 0.5 * ((x * 0.7071067811865476).erf() + 1.0)).to(BF16))

    inputs = {"x": (BF16, ROWS * COLUMNS), "bias": (BF16, COLUMNS)}
    return build([i, j], [], inputs, {"out": (BF16, ROWS * COLUMNS)}, write)


def transposed_sum() -> Kernel:
    """a + b.t()."""
    i, j = Axis("p0", ROWS), Axis("p1", COLUMNS)

    def write(body: KernelBuilder) -> None:
        left = body.load("a", linearize_index([i, j], [ROWS, COLUMNS]), BF16).to(F32)
        right = body.load("b", linearize_index([j, i], [COLUMNS, ROWS]), BF16).to(F32)
        body.store("out", linearize_index([i, j], [ROWS, COLUMNS]), (left + right).to(BF16))

    inputs = {"a": (BF16, ROWS * COLUMNS), "b": (BF16, ROWS * COLUMNS)}
    return build([i, j], [], inputs, {"out": (BF16, ROWS * COLUMNS)}, write)


def softmax_sum() -> Kernel:
    """The maximum of each row plus the root of its sum of exponentials, which may flush to zero."""
    row, column = Axis("p0", ROWS), Axis("r0", 1024)

    def write(body: KernelBuilder) -> None:
        largest, total = body.reduce("softmax", body.load("x", as_index(row) * 1024 + column, BF16).to(F32))
        body.store("out", as_index(row), largest + total.sqrt())

    return build([row], [column], {"x": (BF16, ROWS * 1024)}, {"out": (F32, ROWS)}, write)


def column_statistics() -> Kernel:
    """Mean and sum of squared differences of each column, over a part of the rows."""
    part, column, row = Axis("p0", 8), Axis("p1", COLUMNS), Axis("r0", ROWS // 8)
    position = (as_index(part) * (ROWS // 8) + row) * COLUMNS + column

    def write(body: KernelBuilder) -> None:
        mean, squares = body.reduce("welford", body.load("x", position, BF16).to(F32))
        body.store("mean", linearize_index([part, column], [8, COLUMNS]), mean)
        body.store("squares", linearize_index([part, column], [8, COLUMNS]), squares)

    outputs = {"mean": (F32, 8 * COLUMNS), "squares": (F32, 8 * COLUMNS)}
    return build([part, column], [row], {"x": (BF16, ROWS * COLUMNS)}, outputs, write)


def cumulative_sum() -> Kernel:
    """A running sum along rows."""
    p, r = Axis("p0", ROWS), Axis("r0", COLUMNS)
    position = linearize_index([p, r], [ROWS, COLUMNS])

    def write(body: KernelBuilder) -> None:
        body.store("out", position, body.scan("cumsum", body.load("x", position, BF16).to(F32))[0].to(BF16))

    return build([p], [r], {"x": (BF16, ROWS * COLUMNS)}, {"out": (BF16, ROWS * COLUMNS)}, write)


TYPICAL = {
    "copy": lambda: pointwise({"x": BF16}, lambda x: x),
    "swiglu": lambda: pointwise({"x": BF16, "y": BF16}, lambda x, y: x * x.sigmoid() * y),
    "adam": lambda: pointwise(dict.fromkeys("pgmv", F32), lambda p, g, m, v: p - (m + g) / (v.sqrt() + 1e-8), F32),
    "bias_gelu": bias_gelu,
    "transposed_sum": transposed_sum,
    "softmax": lambda: softmax_kernel(ROWS, COLUMNS),
    "layer_norm": lambda: layer_norm_kernel(ROWS, COLUMNS),
    "cumsum": cumulative_sum,
    "long_softmax": lambda: softmax_kernel(256, 131072),
    "long_layer_norm": lambda: layer_norm_kernel(256, 131072),
}


@pytest.mark.parametrize("name", TYPICAL)
def test_typical_kernels_use_vector_accesses_without_spills(name: str) -> None:
    text = instructions(TYPICAL[name]())
    loads = re.findall(r"ld\.global\S*|cp\.async\S*.*", text)
    assert any(".v4." in load or ".v8." in load or "cp.async.cg" in load for load in loads), loads
    assert re.search(r"st\.global\S*\.v[48]\.", text)


def test_column_reductions_use_vector_accesses_without_spills() -> None:
    text = instructions(column_statistics())
    assert re.search(r"ld\.global\S*\.v4\.|cp\.async\.cg", text)


@pytest.mark.parametrize(
    ("kernel", "instruction"),
    [(pointwise({"x": BF16}, lambda x: x.rsqrt()), "rsqrt"),
     (pointwise({"x": BF16}, lambda x: x * 0.5 * (x.erf() + 1.0)), "ex2"), (softmax_sum(), "ex2")],
    ids=["rsqrt", "gelu", "softmax"],
)  # fmt: skip
def test_functions_of_one_instruction_need_no_libdevice(kernel: Kernel, instruction: str) -> None:
    binary = compiled(print_triton(kernel), extern_libs=(("libdevice", os.devnull),))
    assert f"{instruction}.approx.ftz.f32" in binary.asm["ptx"]


def test_symbolic_sizes_keep_vector_accesses() -> None:
    s0, s1 = make_symbol("s0"), make_symbol("s1")
    i, j = Axis("p0", s0), Axis("p1", s1)

    def write(body: KernelBuilder) -> None:
        x = body.load("x", linearize_index([i, j], [s0, s1]), BF16).to(F32) + body.load("bias", as_index(j), BF16).to(
            F32
        )
        body.store("out", linearize_index([i, j], [s0, s1]), x.to(BF16))

    inputs = {"x": (BF16, s0 * s1), "bias": (BF16, s1)}
    text = instructions(build([i, j], [], inputs, {"out": (BF16, s0 * s1)}, write))
    assert re.search(r"ld\.global\S*\.v[48]\.", text)


def test_powers_of_symbols_compile() -> None:
    kernel = squares_kernel()
    assert instructions(kernel)
    assert instructions(kernel, TileConfiguration(y=kernel.axes, y_block=4, r_block=64, looped=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", sorted(KERNEL_DTYPES, key=str), ids=str)
def test_every_operation_compiles(dtype: torch.dtype) -> None:
    axis = Axis("p0", 4096)
    specs = [
        spec for spec in OPERATIONS.values() if spec.domain.accepts(dtype) and spec.name not in ("cast", "bitcast")
    ]
    types = dict.fromkeys("xyz", dtype) | {"flag": torch.bool}

    def write(body: KernelBuilder) -> None:
        x, y, _, flag = [body.load(name, as_index(axis), item) for name, item in types.items()]
        for spec in specs:
            used = [flag, x, y] if spec.name == "where" else [x, y][: spec.operands]
            body.store(f"out_{spec.name}", as_index(axis), body.compute(spec.name, *used))
        for target in sorted(KERNEL_DTYPES - {dtype}, key=str):
            body.store(f"out_{target}", as_index(axis), body.compute("cast", x, dtype=target))

    outputs = {f"out_{spec.name}": (torch.bool if spec.result == "bool" else dtype, 4096) for spec in specs}
    outputs |= {f"out_{target}": (target, 4096) for target in KERNEL_DTYPES - {dtype}}
    kernel = build([axis], [], {name: (item, 4096) for name, item in types.items()}, outputs, write)
    assert compiled(print_triton(kernel)).asm["cubin"]


def every_combination(dtype: torch.dtype) -> Kernel:
    """A kernel with every reduction and scan of a dtype, over rows that are short: what compiles is the same."""
    p, r = Axis("p0", 64), Axis("r0", 250)
    position = linearize_index([p, r], [64, 250])
    outputs = {}

    def write(body: KernelBuilder) -> None:
        x = body.load("x", position, dtype)
        for kind in [kind for kind, spec in REDUCTIONS.items() if spec.domain.accepts(dtype)]:
            for number, value in enumerate(body.reduce(kind, x)):
                outputs[f"{kind}{number}"] = (value.dtype, 64)
                body.store(f"{kind}{number}", as_index(p), value)
        for kind in [kind for kind, spec in SCANS.items() if spec.domain.accepts(dtype)]:
            for number, value in enumerate(body.scan(kind, x)):
                outputs[f"{kind}{number}"] = (value.dtype, 16000)
                body.store(f"{kind}{number}", position, value)

    return build([p], [r], {"x": (dtype, 16000)}, outputs, write)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [F32, torch.int64, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("looped", [False, True])
def test_every_combination_compiles(dtype: torch.dtype, looped: bool) -> None:
    kernel = every_combination(dtype)
    block = 64 if looped else 256
    for rows in (1, 2):
        cut = TileConfiguration(y=kernel.axes, y_block=rows, r_block=block, looped=looped)
        assert compiled(print_triton(kernel, cut)).asm["cubin"]


def test_reductions_of_columns_compile() -> None:
    kernel = every_combination(F32)
    for looped in (False, True):
        cut = TileConfiguration(x=kernel.axes, x_block=4, r_block=64 if looped else 256, looped=looped)
        assert compiled(print_triton(kernel, cut)).asm["cubin"]


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [("add", F32), ("add", BF16), ("add", torch.float16), ("add", F64), ("add", I64), ("max", I64)]
    + [("max", F32), ("min", F32), ("max", F64), ("min", F64)],
)
def test_atomic_stores_compile(mode: str, dtype: torch.dtype) -> None:
    axis = Axis("p0", 4096)

    def write(body: KernelBuilder) -> None:
        place = body.indirect_index(body.load("index", as_index(axis), I64), 100)
        body.store("out", place, body.load("x", as_index(axis), dtype), mode=mode)

    kernel = build([axis], [], {"x": (dtype, 4096), "index": (I64, 4096)}, {"out": (dtype, 100)}, write)
    assert re.search(r"\b(atom|red)\.", instructions(kernel))


def test_every_configuration_of_a_softmax_compiles() -> None:
    for kernel in (softmax_kernel(ROWS, COLUMNS), softmax_kernel(64, 100_000)):
        for configuration in configurations(kernel):
            assert compiled(print_triton(kernel, configuration))


@pytest.mark.parametrize(("windows", "is_vector"), [(0, True), (3, False)])
def test_axes_of_odd_sizes_are_contiguous_together(windows: int, is_vector: bool) -> None:
    """A row of a bias, and neighbours in the next rows, are loaded one by one; many of these would be far apart."""
    i, j = Axis("i", 1024), Axis("j", 1025)

    def write(body: KernelBuilder) -> None:
        at = as_index(i) * 1025 + j
        value = body.load("x", at, F32) + body.load("bias", as_index(j), F32)
        for number in range(windows):
            with body.masked(body.index(as_index(i)) < 1023 - number):
                value = value + body.load("x", at + 1025 * (number + 1), F32)
        body.store("out", at, value)

    inputs = {"x": (F32, 1024 * 1025), "bias": (F32, 1025)}
    kernel = build([i, j], [], inputs, {"out": (F32, 1024 * 1025)}, write)
    text = instructions(kernel, TileConfiguration(x=(i, j), x_block=512))
    assert len(re.findall(r"(?:ld|st)\.global\S*\.v4\.b32", text)) == (2 if is_vector else 0)


def test_rotations_need_no_division() -> None:
    """A remainder of less than twice the divisor is a comparison and a difference."""
    row, column = Axis("p0", 40), Axis("p1", 3)

    def write(body: KernelBuilder) -> None:
        loads = [body.load("x", as_index(row) * 3 + (as_index(column) + number) % 3, F32) for number in (1, 2)]
        body.store("out", as_index(row) * 3 + column, loads[0] - loads[1])

    kernel = build([row, column], [], {"x": (F32, 120)}, {"out": (F32, 120)}, write)
    for tile in (TileConfiguration(x=(row, column), x_block=64), TileConfiguration(x=(row,), x_block=32)):
        assert check(kernel, tile).count("%") == 1, "only the position of the tile is divided"
