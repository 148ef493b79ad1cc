"""Streaming reductions in C++ and in Triton's interpreter, against the evaluator."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask

import fxwrap
from fxwrap.devices import CUDA
from fxwrap.loop_ir import (
    HALF_PRECISION,
    Axis,
    Kernel,
    KernelBuilder,
    KernelError,
    Scalar,
    ScheduleError,
    as_index,
    evaluate_kernel,
    parse_kernel,
)
from fxwrap.printers import PrintedKernel
from fxwrap.printers.cpp import print_cpp_kernel
from fxwrap.printers.triton import StreamingConfiguration, configurations, print_triton
from fxwrap.printers.triton.helpers import helper_sources
from fxwrap.printers.triton.streaming_configuration import streaming_configurations
from fxwrap.runtime.kernels import load_kernel
from tests.loop_ir.test_streaming import SUMS
from tests.printers.cpp_kernels import check
from tests.printers.test_triton_printer_compile import SPILLED, compiled
from tests.support.attention_kernel import attention_kernel, gradient_kernel, update_kernel


@pytest.mark.parametrize(
    ("dtype", "rows", "lanes"),
    [(torch.float32, 70, 64), (torch.float64, 70, 64), (torch.bfloat16, 70, 64), (torch.float64, 37, 48)],
)
def test_cpp(dtype: torch.dtype, rows: int, lanes: int) -> None:
    """Rows and keys that fill no tile, several tiles of both, and rows of a tile that are no multiple of registers."""
    source = check(attention_kernel(rows=rows, keys=133, dtype=dtype))
    assert source.count(f"contract<{lanes}, ") == 2


@pytest.mark.parametrize(
    ("dtype", "rows", "width", "columns"),
    [(torch.float32, 4, 64, 80), (torch.float32, 7, 5, 3), (torch.float64, 2, 16, 16), (torch.bfloat16, 8, 64, 64)],
)
def test_few_rows_in_cpp(dtype: torch.dtype, rows: int, width: int, columns: int) -> None:
    """Lanes are keys, which are read where they are if they need no cast and fill vectors; masked tiles are skipped."""
    source = check(attention_kernel(rows=rows, keys=133, width=width, columns=columns, dtype=dtype))
    is_direct = width % 16 == 0 and dtype is not torch.bfloat16
    assert source.count(f"contract_rows<{rows}, {str(is_direct).lower()}, ") == 1
    assert source.count("if (visible.combined(combine::max) == 0) continue;") == 1


def _no_score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_of_listed_blocks_in_cpp(dtype: torch.dtype) -> None:
    """The blocks that a mask lists are read where they are; half precision is loaded as vectors, not gathered."""
    mask = create_block_mask(lambda b, h, q, k: (k <= q + 500) & (k != 3), None, None, 1, 600, device="cpu")
    inputs = [torch.randn(1, 2, length, 64).to(dtype) for length in (1, 600, 600)]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        results = torch.ops.higher_order.flex_attention(q, k, v, _no_score, mask.as_tuple(), 0.125, {}, (), ())
        return [results[0]]

    compiled = fxwrap.compile_graph(make_fx(attention)(*inputs), inputs)
    visible = (torch.arange(600) <= 500) & (torch.arange(600) != 3)
    expected = torch.nn.functional.scaled_dot_product_attention(*[item.double() for item in inputs], visible[None])
    (result,) = compiled(*inputs)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-5 if dtype is torch.float32 else 1e-2)
    (launched,) = compiled.program.kernels
    is_direct = str(dtype is torch.float32).lower()
    assert launched.source.count(f"_rows<1, {is_direct}, ") == 2
    assert "gather(" not in launched.source


def test_few_rows_with_softcap_in_cpp() -> None:
    check(attention_kernel(rows=3, keys=70, width=16, columns=16, cap=20.0), rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_in_cpp(dtype: torch.dtype) -> None:
    source = check(gradient_kernel(queries=133, keys=70, dtype=dtype), rtol=1e-4)  # sums of 266 large exponentials
    assert source.count("contract<64, ") == 4


def test_updates_in_cpp() -> None:
    """Numbers of one element for all rows are summed before they are added to it."""
    source = check(update_kernel(rows=70, keys=133), rtol=1e-4)
    assert source.count("add_atomically(") == 4
    assert source.count("for (int lane = 0; lane < 64 && p1_0 + lane < 70; ++lane)") == 5


def _window(body: KernelBuilder, row: Axis, key: Axis) -> Scalar:
    """Masks keys after the position of a row, and those 40 or more before it."""
    position = body.load("position", as_index(row), torch.int64)
    return (body.index(key) <= position) & (body.index(key) > position - 40)


@pytest.mark.parametrize(
    ("language", "rows"), [("cpp", 4), ("cpp", 37), ("triton", 20)], ids=["few rows", "lanes", "triton"]
)
def test_tiles_that_a_mask_excludes_are_not_read(language: str, rows: int) -> None:
    """Keys and values that no row of the kernel needs are NaN; some rows, or all, have no key."""
    kernel = attention_kernel(heads=1, rows=rows, keys=300, width=16, columns=16, mask=_window)
    printed = print_cpp_kernel(kernel)
    if language == "triton":
        printed = print_triton(kernel, StreamingConfiguration(row_block=32, key_block=16))
    launch = load_kernel(language, printed.source, printed.signature, printed.options)
    for first in (-rows - 1, -3, 130, 290, 1 << 40):
        buffers = {item.name: torch.randn(int(item.extent)) for item in (*kernel.inputs, *kernel.outputs)}
        buffers["position"] = first + torch.arange(rows)
        expected = {name: item.clone() for name, item in buffers.items()}
        evaluate_kernel(kernel, expected)
        unread = torch.ones(300, dtype=torch.bool)
        unread[max(first - 39 - 16, 0) : max(first + rows + 64, 0)] = False
        for name in ("key", "value"):
            buffers[name].view(300, 16)[unread] = torch.nan
        launch(tuple(map(int, printed.grid)), *buffers.values())
        for name in ("out", "logsumexp"):
            torch.testing.assert_close(buffers[name], expected[name], rtol=1e-5, atol=1e-4, equal_nan=True)


def test_tiles_that_no_stack_holds_are_declined() -> None:
    with pytest.raises(KernelError, match="too many for a stack"):
        print_cpp_kernel(attention_kernel(rows=64, keys=64, width=512, columns=1024))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton(dtype: torch.dtype) -> None:
    """Partly masked blocks, and the others, are a loop each."""
    assert _check_triton(attention_kernel(rows=35, keys=40, dtype=dtype)).count("tl.dot(") == 2 * 2


@pytest.mark.parametrize("branches", [True, False])
def test_products_that_end_with_their_step(branches: bool) -> None:
    """Triton waits for them because another operation of the loop reads their sum."""
    configuration = StreamingConfiguration(row_block=16, key_block=16, branches=branches, waits=True)
    source = _check_triton(attention_kernel(rows=35, keys=70, dtype=torch.float16), configuration)
    assert source.count("= tl.where(step >= 0, sum_") == (1 if branches else 2)


def test_scores_of_half_precision() -> None:
    """Final factors of scores are part of the exponentials' unit; a distance under a cap is a difference of floats."""
    for cap, factor in ((0.0, 1.0), (20.0, 20.0)):
        source = _check_triton(attention_kernel(rows=35, keys=40, dtype=torch.float16, cap=cap))
        assert f"unit = tl.full((), {1.4426950408889634 * factor}, tl.float32)" in source
        assert ("bitcast=True) - tl.cast(" in source) == (cap > 0)
        assert "* tl.div_rn(1.0, " in source
        body = source.partition("for step in")[2]
        assert body.count("tl.fma(") == 2 * 2


def test_distances_of_computed_positions_are_differences_of_floats() -> None:
    """Those of queries that are the last positions, unless the positions may be negative or exceed 2**22."""
    sources = [_check_triton(attention_kernel(rows=35, keys=70, dtype=torch.float16, offset=35, cap=20.0))]
    configuration = StreamingConfiguration(row_block=16, key_block=16)
    for offset in (-1, 1 << 22):
        kernel = attention_kernel(rows=35, keys=70, dtype=torch.float16, offset=offset, cap=20.0)
        sources.append(print_triton(kernel, configuration).source)
    assert ["bitcast=True) - tl.cast(" in source for source in sources] == [True, False, False]


@pytest.mark.parametrize("hoists", [True, False])
@pytest.mark.parametrize("branches", [True, False])
@pytest.mark.parametrize("offset", [0, -40, 3000])
def test_linear_biases_of_half_precision(hoists: bool, branches: bool, offset: int) -> None:
    """A bias that is linear in the key is that of a block's first key, and a multiple of the distance from it."""
    configuration = StreamingConfiguration(row_block=16, key_block=16, branches=branches, hoists_distances=hoists)
    kernel = attention_kernel(rows=35, keys=70, dtype=torch.float16, offset=offset)
    body = _check_triton(kernel, configuration).partition("for step in")[2]
    loops = 1 if branches else 2
    assert body.count("first_bias = ") == body.count("unit + first_bias)") == loops
    assert body.count("bitcast=True) - tl.cast(tl.cast(first_key, ") == (0 if hoists else loops)


def test_linear_biases_of_gradients() -> None:
    """Exponents of such scores are a multiple of products, and values of rows and of streamed positions."""
    source = _check_triton(gradient_kernel(queries=35, keys=20, dtype=torch.float16, slope=0.25))
    assert "exp = tl.exp2(tl.fma(tl.broadcast_to(products_" in source


def test_other_biases_are_added_to_each_score() -> None:
    """Those that are no products of an integer, of scores in which a number may mask rows, of few rows, of float32."""
    quadratic = attention_kernel(rows=35, keys=40, dtype=torch.float16, power=2)
    lowest = attention_kernel(rows=35, keys=40, dtype=torch.float16, masked=-1e38)
    for kernel in (quadratic, lowest, attention_kernel(rows=35, keys=40)):
        assert "first_bias" not in _check_triton(kernel)
    few = attention_kernel(rows=4, keys=70, dtype=torch.float16)
    assert "first_bias" not in _check_triton(few, streaming_configurations(few, int)[0])


def test_soft_caps_of_half_precision_have_no_branches() -> None:
    """Divisions and hyperbolic tangents of scores have none; those of scores that are rounded less are exact."""
    for dtype, is_exact in ((torch.float16, False), (torch.float32, True)):
        source = _check_triton(attention_kernel(rows=35, keys=70, dtype=dtype, cap=20.0))
        loop = source.partition("for step in")[2].partition("for step in")[0]
        assert ("libdevice.tanh(" in loop, "div_rn(" in loop) == (is_exact, is_exact)
        assert ("score_tanh(" in loop) != is_exact


def test_tanh_of_scores() -> None:
    """Its relative error is a few units in the last place, of small scores too."""
    magnitudes = torch.logspace(-6, 2, 1021, dtype=torch.float64).float()
    x = torch.cat([magnitudes, -magnitudes, torch.tensor([0.0, 0.5, -0.5, torch.inf, -torch.inf, torch.nan])])
    source = "\n\n\n".join([_IMPORTS, *helper_sources(["score_tanh"]), _TANH])
    launch = load_kernel("triton", source, ("*fp32", "*fp32"), ())
    result = torch.empty_like(x)
    launch((1, 1, 1), x, result)
    torch.testing.assert_close(result.double(), x.double().tanh(), rtol=4e-7, atol=0.0, equal_nan=True)


_IMPORTS = """import triton
import triton.language as tl
from triton.language.extra import libdevice"""

_TANH = """@triton.jit
def fxwrap_tanh_of_scores(in0_ptr, out0_ptr):
    x = tl.arange(0, 2048)
    tl.store(out0_ptr + x, score_tanh(tl.load(in0_ptr + x)))
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_in_triton(dtype: torch.dtype) -> None:
    """Queries and gradients of outputs are factors of two products each, and loaded once. Exponents are masked."""
    source = _check_triton(gradient_kernel(queries=40, keys=35, dtype=dtype))
    assert source.count("tl.dot(") == 4
    assert source.count("tl.load(grad_out_ptr") == source.count("tl.load(query_ptr") == 1
    assert ("tl.exp2(tl.where(" in source) == (dtype is torch.float16)


def test_updates_in_triton() -> None:
    source = _check_triton(update_kernel(rows=20, keys=35))
    assert source.count("tl.atomic_add(") == 4
    assert source.count("keep_dims=True), mask=") + source.count("keep_dims=True), sem=") == 2


@pytest.mark.parametrize("band", [2, 3, 8])
def test_programs_of_a_band_of_heads(band: int) -> None:
    """The last band may have fewer heads than the others."""
    kernel = attention_kernel(heads=3, rows=40, keys=35)
    source = _check_triton(kernel, StreamingConfiguration(row_block=16, key_block=32, band=band))
    assert f"first_head = program // ({band} * rows) * {band}" in source


def test_rows_that_visit_as_much_need_no_bands() -> None:
    kernel = attention_kernel(heads=8, rows=256, keys=256, width=64, columns=64, dtype=torch.bfloat16)
    assert {item.band for item in streaming_configurations(kernel, int)} == {1}


def test_warps_of_few_rows_would_multiply_less_each() -> None:
    """64 rows are those of four warps of a matmul: with eight, and as many on a multiprocessor, each has half of it."""
    kernel = gradient_kernel(queries=512, keys=512, width=128, columns=128, dtype=torch.bfloat16)
    assert all(item.num_warps == 4 for item in streaming_configurations(kernel, int) if item.row_block <= 64)


def _check_triton(kernel: Kernel, configuration: StreamingConfiguration | None = None) -> str:
    """Compares a kernel in Triton's interpreter with the evaluator; returns its text."""
    printed: PrintedKernel = print_triton(kernel, configuration or StreamingConfiguration(row_block=16, key_block=32))
    generator = torch.Generator().manual_seed(0)
    buffers = [*kernel.inputs, *kernel.outputs]
    results = {item.name: torch.randn(int(item.extent), generator=generator).to(item.dtype) for item in buffers}
    expected = {name: item.clone() for name, item in results.items()}
    evaluate_kernel(kernel, expected)
    launch = load_kernel("triton", printed.source, printed.signature, printed.options)
    launch(tuple(map(int, printed.grid)), *results.values())
    dtypes = {item.dtype for item in buffers}
    for item in kernel.outputs:
        result, exact = results[item.name].double(), expected[item.name].double()
        if dtypes.isdisjoint(HALF_PRECISION):
            torch.testing.assert_close(result, exact, rtol=1e-5, atol=1e-5)
        assert (result - exact).norm() <= 4e-3 * exact.norm()  # weights of half precision are rounded to it
    return printed.source


@pytest.mark.parametrize(
    "kernel",
    [
        attention_kernel(rows=256, keys=256, width=64, columns=64, dtype=torch.bfloat16),
        gradient_kernel(queries=256, keys=256, width=64, columns=64, dtype=torch.bfloat16),
    ],
    ids=["forward", "gradients"],
)
def test_an_h100_multiplies_blocks_in_tensor_cores_and_loads_ahead(kernel: Kernel) -> None:
    ptx = compiled(print_triton(kernel, StreamingConfiguration(row_block=64, key_block=64, num_stages=2))).asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async" in ptx
    assert not SPILLED.search(ptx)


def test_an_h100_divides_once_per_row_and_converts_no_distance() -> None:
    kernel = attention_kernel(rows=256, keys=256, width=64, columns=64, dtype=torch.bfloat16)
    ptx = compiled(print_triton(kernel, StreamingConfiguration(row_block=64, key_block=64, max_registers=128))).asm[
        "ptx"
    ]
    assert ptx.count("div.rn.f32") == 2  # rows of a thread
    assert ptx.count("cvt.rn.f32.s32") <= 2  # in their logarithms
    assert ".maxnreg 128" in ptx


def test_wide_heads_have_large_blocks_that_fit_registers() -> None:
    """Each step rescales all sums of a row, so that few keys a step take longer than their products."""
    sizes: dict[str, Any] = {"width": 256, "columns": 256, "dtype": torch.bfloat16}
    kernel = attention_kernel(heads=64, rows=512, keys=512, **sizes, cap=50.0)
    configuration = streaming_configurations(kernel, int)[0]
    assert (configuration.row_block, configuration.key_block) == (128, 64)
    ptx = compiled(print_triton(kernel, configuration)).asm["ptx"]
    assert "wgmma.mma_async" in ptx and not SPILLED.search(ptx)
    few = attention_kernel(rows=512, keys=512, **sizes)
    assert streaming_configurations(few, int)[0].row_block == 64  # more programs for the multiprocessors of a GPU
    gradients = gradient_kernel(queries=512, keys=512, **sizes)
    assert all(item.branches for item in streaming_configurations(gradients, int)[:-1])  # the code of one loop


def test_an_h100_adds_to_memory_without_returning_the_old_value() -> None:
    """PTX has these as `red`, or as `atom` whose result nothing uses."""
    kernel = update_kernel(rows=128, keys=128, width=64)
    ptx = compiled(print_triton(kernel, StreamingConfiguration(row_block=32, key_block=32))).asm["ptx"]
    assert re.search(r"(red|atom)\.global\.\S*add\S*\.f32", ptx)
    assert not SPILLED.search(ptx)


def test_offsets_beyond_32_bits() -> None:
    for heads, is_large in ((2, False), (1 << 15, True)):
        kernel = attention_kernel(heads, rows=1024, keys=1024, width=64, columns=64)
        source = print_triton(kernel, StreamingConfiguration(row_block=16, key_block=32)).source
        assert (".to(tl.int64)\n" in source) is is_large


def test_configurations_fit_small_kernels() -> None:
    candidates = streaming_configurations(attention_kernel(rows=20, keys=35), int)
    assert all(item.row_block <= 32 and item.key_block <= 64 for item in candidates)


def test_wide_heads_fit_in_shared_memory() -> None:
    """The default blocks of rows, and of keys for each stage, fit in an H100's 227 KiB for a program."""
    for width in (128, 256, 512):
        sizes: dict[str, Any] = {"width": width, "columns": width, "dtype": torch.bfloat16}
        kernels = [attention_kernel(rows=512, keys=512, **sizes), attention_kernel(rows=8, keys=512, **sizes),
                   gradient_kernel(queries=512, keys=512, **sizes)]  # fmt: skip
        for kernel, matrices in zip(kernels, (1, 1, 2), strict=True):
            first = streaming_configurations(kernel, int)[0]
            rows = matrices * first.row_block + 2 * first.num_stages * first.key_block
            assert rows * width * 2 <= 227 << 10, (width, first)


@pytest.mark.parametrize(("keys", "stages"), [(40, 1), (64, 1), (65, 2), (128, 2), (512, 3)])
def test_few_rows_have_no_more_stages_than_blocks_of_keys(keys: int, stages: int) -> None:
    few, many = [attention_kernel(rows=rows, keys=keys, width=64, dtype=torch.float16) for rows in (4, 512)]
    first = streaming_configurations(few, int)[0]
    assert (first.key_block, first.num_stages) == (64, stages)
    assert streaming_configurations(many, int)[0].num_stages == 2


def test_configurations_follow_from_the_form_of_a_kernel() -> None:
    """Few rows of half precision have blocks of their own, and only half precision limits registers."""
    half = [attention_kernel(rows=rows, keys=512, width=64, dtype=torch.float16) for rows in (4, 512)]
    decoding, prefill = [streaming_configurations(kernel, int) for kernel in half]
    assert decoding[0].row_block == 16 and not (decoding[0].branches or decoding[0].splits)  # a loop waits at its end
    assert prefill[0].max_registers and prefill[0].branches and not prefill[-1].branches
    sizes: dict[str, Any] = {"rows": 512, "keys": 512, "dtype": torch.float16}
    wide = attention_kernel(width=128, **sizes, power=2)  # its bias is not linear
    default, *_, one_loop = streaming_configurations(wide, int)
    assert (default.branches, default.waits, one_loop.branches, one_loop.waits) == (False, False, True, True)
    narrow = streaming_configurations(attention_kernel(width=64, **sizes, cap=20.0), int)
    assert not any(item.waits for item in narrow)  # scores and sums of narrow heads leave registers
    assert prefill[0].waits and prefill[0].hoists_distances  # but not with the distances of keys
    gradients = gradient_kernel(queries=512, keys=512, width=64, columns=64, dtype=torch.float16)
    assert streaming_configurations(gradients, int)[0].hoists_distances
    assert not any(item.max_registers for item in streaming_configurations(attention_kernel(rows=512, keys=512), int))


@pytest.mark.parametrize("kind", ["attention", "gradients"])
def test_configurations_fit_shared_memory(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A GPU with 99 KiB gets the first configuration that fits, or a smaller one where none does, and one line."""
    sizes: dict[str, Any] = {"keys": 512, "width": 256, "columns": 256, "dtype": torch.float16}
    make: Any = attention_kernel if kind == "attention" else gradient_kernel
    kernel = make(**sizes, **{"rows" if kind == "attention" else "queries": 512})
    small = replace(CUDA, shared_memory_bytes=99 << 10)
    with caplog.at_level("INFO", "fxwrap.kernels"):
        chosen, _ = [streaming_configurations(kernel, int, spec=small)[0] for _ in range(2)]
    (line,) = [record.message for record in caplog.records]
    assert "bytes of shared memory, and cuda has 101376" in line and line.endswith(f"{chosen} replaces it")
    printed = print_triton(kernel, chosen)
    assert compiled(printed, 86).metadata.shared <= 99 << 10
    with pytest.raises(ScheduleError, match="no configuration fits 4096 bytes of shared memory"):
        streaming_configurations(kernel, int, spec=replace(CUDA, shared_memory_bytes=4096))


def test_steps_without_a_schedule_are_declined() -> None:
    kernel = parse_kernel(SUMS)
    for declined in (print_cpp_kernel, configurations):
        with pytest.raises(KernelError, match="it reduces some of its reduced axes, and is no streaming reduction"):
            declined(kernel)
