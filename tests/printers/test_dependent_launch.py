"""Kernels that start before their predecessor has ended: what they read before they wait, and their results."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from fxwrap.loop_ir import Kernel, parse_kernel
from fxwrap.printers import PrintedKernel
from fxwrap.printers.triton import (
    Configuration,
    Signal,
    add_dependent_launch,
    combine_triton_kernels,
    configurations,
    fills_wait,
    print_triton,
)
from tests.printers.test_cpp_printer_contractions import matmul
from tests.printers.test_triton_combo_kernel import flat, positions, scaled
from tests.printers.test_triton_contractions import dot
from tests.printers.test_triton_group_sums import int4, large, steps
from tests.printers.test_triton_printer_compile import SPILLED, compiled
from tests.printers.test_triton_printer_random import cases
from tests.printers.triton_kernels import check, launch_interpreted, softmax_kernel
from tests.support.long_form import sample_size

ACCESS = re.compile(r"tl\.load\((\w+)")
EFFECTS = ("tl.store", "tl.atomic", "tl.debug_barrier", "tl.device_assert", "return")
GATHER = """kernel(index: i64[1], table: f32[50*64], x: f32[64]) -> (out: f32[64]) for [j: 64] {
  %0 = i64 load index[0]
  %1 = f32 load table[64*%0<50> + j]
  %2 = f32 load x[j]
  %3 = f32 add %1 %2
  store out[j] %3
}
"""

ROW = """kernel(a: bf16[64], b: bf16[16*64]) -> (out: f32[16]) for [j: 16] reduce [k: 64] {
  %0 = bf16 load a[k]
  %1 = f32 cast %0
  %2 = bf16 load b[64*j + k]
  %3 = f32 cast %2
  %4 = f32 mul %1 %3
  %5 = f32 reduce sum %4
  store out[j] %5
}
"""


def row_times_matrix(columns: int = 16, products: int = 64) -> Kernel:
    """The product of a vector and a transposed matrix."""
    return parse_kernel(
        ROW.replace("64", str(products))
        .replace("16*", f"{columns}*")
        .replace("[16]", f"[{columns}]")
        .replace("j: 16", f"j: {columns}")
    )


def waiting(printed: PrintedKernel, unwritten: Collection[int], signal: Signal = Signal.AFTER_WAIT) -> PrintedKernel:
    """The kernel with both instructions; before the wait it accesses none but unwritten tensors."""
    source, read = add_dependent_launch(printed.source, printed.signature, printed.options, unwritten, signal)
    assert set(read) <= set(unwritten)
    header, *body = source[source.rindex("@triton.jit") :].splitlines()[1:]
    assert [line for line in body if "wait_for_launches" in line] == ["    wait_for_launches()"]
    assert [line for line in body if "launch_dependents" in line] == ["    launch_dependents()"]
    at = body.index("    wait_for_launches()")
    signalled = body.index("    launch_dependents()")
    if signal is Signal.AT_START:
        assert signalled < at and not [line for line in body[:signalled] if "load" in line]
    else:
        assert signalled == (at + 1 if signal is Signal.AFTER_WAIT else len(body) - 1)
    before = body[:at]
    assert not [line for line in before for effect in EFFECTS if effect in line]
    parameters = re.findall(r"\w+", header.partition("(")[2])
    assert {name for line in before for name in ACCESS.findall(line)} == {parameters[item] for item in read}
    return replace(printed, source=source)


def make_waiting(*unwritten: int, signal: Signal = Signal.AFTER_WAIT) -> Callable[[PrintedKernel], PrintedKernel]:
    return lambda printed: waiting(printed, unwritten, signal)


def early_lines(source: str) -> list[str]:
    function = source[source.rindex("@triton.jit") :]
    return [line.strip() for line in function.partition("    wait_for_launches()")[0].splitlines()[2:]]


# --- values -----------------------------------------------------------------------------------------------------------


def test_a_row_of_weights_is_loaded_before_the_wait() -> None:
    kernel = row_times_matrix()
    configuration = next(item for item in configurations(kernel) if not item.looped)
    text = check(kernel, configuration, transform=make_waiting(1), tolerance=0.1)
    assert early_lines(text)[-1].startswith("b_early = tl.load(b_ptr + ")
    assert "b_early.to(tl.float32)" in text and text.count("tl.load(b_ptr") == 1


@pytest.mark.parametrize(("products", "fills"), [(8192, True), (4096, True), (2048, False)])
def test_a_row_that_fills_the_wait(products: int, fills: bool) -> None:
    """A thread loads 128, 64 or 32 bytes of weights before the wait."""
    configuration = replace(configurations(row_times_matrix(4, products))[0], looped=False, r_block=products, y_block=1)
    printed = print_triton(row_times_matrix(4, products), replace(configuration, num_warps=4, num_stages=1))
    assert fills_wait(printed.source, printed.signature, printed.options, (1,)) is fills
    assert not fills_wait(printed.source, printed.signature, printed.options, ())


def test_nothing_is_read_early_if_all_may_be_written() -> None:
    kernel = row_times_matrix()
    text = check(kernel, configurations(kernel)[0], transform=make_waiting(), tolerance=0.1)
    assert not [line for line in early_lines(text) if "load" in line]


def test_an_index_is_loaded_early_with_what_it_selects() -> None:
    kernel, index = parse_kernel(GATHER), {"index": torch.tensor([3])}
    text = check(kernel, inputs=index, transform=make_waiting(0, 1))
    assert [line.split(" ")[0] for line in early_lines(text) if "load" in line] == ["index_early", "table_early"]
    text = check(kernel, inputs=index, transform=make_waiting(1, 2))
    assert [line.split(" ")[0] for line in early_lines(text) if "load" in line] == ["x_early"]


@pytest.mark.parametrize("signal", Signal)
def test_loops_and_dots_are_after_the_wait(signal: Signal) -> None:
    kernel = matmul(5, 40, 256, "f16")
    transform = make_waiting(1, signal=signal)
    text = check(kernel, dot(kernel, rows_first=False), transform=transform, tolerance=0.1)
    assert not [line for line in early_lines(text) if "load" in line]
    quantised = int4(3)
    check(quantised, steps(quantised, 8, 2), transform=make_waiting(1, 2, 3, signal=signal), tolerance=0.5)


def test_no_thread_loads_many_bytes_early() -> None:
    kernel = row_times_matrix(4, 8192)
    looped = next(item for item in configurations(kernel) if item.looped)
    whole = replace(looped, looped=False, r_block=8192, y_block=1, num_warps=1, num_stages=1)
    text = print_triton(kernel, whole)
    assert not [line for line in early_lines(waiting(text, (0, 1)).source) if "tl.load" in line]
    wide = waiting(print_triton(kernel, replace(whole, num_warps=8)), (0, 1)).source
    assert [line.split(" ")[0] for line in early_lines(wide) if "tl.load" in line] == ["a_early", "b_early"]


def test_an_address_of_many_operations() -> None:
    """The work is linear in their number, though each uses the one before twice."""
    steps = "".join([f"    v{number + 1} = v{number} + v{number}\n" for number in range(40)])
    source = f"""import triton
import triton.language as tl


@triton.jit
def fxwrap_sum(in0_ptr, in1_ptr, out0_ptr, X_BLOCK: tl.constexpr):
    p0 = tl.arange(0, X_BLOCK)
    v0 = tl.load(in0_ptr + p0)
{steps}    tl.store(out0_ptr + p0, tl.load(in1_ptr + v40))
"""
    signature = ("*i64", "*f32", "*f32")
    printed = waiting(PrintedKernel("triton", source, signature, (("X_BLOCK", 64),)), (0, 1))
    assert early_lines(printed.source)[-1] == "in1_early = tl.load(in1_ptr + v40_early)"


def test_a_combo_kernel_selects_its_weights_before_it_waits() -> None:
    printed = [flat(scaled(size)) for size in (100, 200)]
    combo = combine_triton_kernels(printed, positions([False, False, False], 2), "combo")
    source, read = add_dependent_launch(combo.source, combo.signature, combo.options, (0, 1, 3), Signal.AT_END)
    assert read == (0, 1)  # the shift of the first kernel may be written
    before = early_lines(source)
    assert before[-1].startswith("x_early = tl.load(x_ptr + ")
    assert before.index("if program < 2:") < len(before) - 1


@settings(max_examples=sample_size(25), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases())
def test_random_kernels_compute_the_same(case: tuple[Kernel, Configuration]) -> None:
    kernel, configuration = case
    generator = torch.Generator().manual_seed(11)
    inputs = {item.name: torch.randn(int(item.extent), generator=generator).to(item.dtype) for item in kernel.inputs}

    def results(printed: PrintedKernel) -> dict[str, torch.Tensor]:
        outputs = {item.name: torch.full((int(item.extent),), 77).to(item.dtype) for item in kernel.outputs}
        launch_interpreted(kernel, printed, {**inputs, **outputs})
        return outputs

    printed = print_triton(kernel, configuration)
    expected = results(printed)
    for unwritten in (range(0, len(inputs), 2), range(len(inputs))):
        torch.testing.assert_close(results(waiting(printed, unwritten)), expected, rtol=0, atol=0, equal_nan=True)


# --- instructions -----------------------------------------------------------------------------------------------------

GPU_KERNELS: dict[str, tuple[Kernel, tuple[int, ...]]] = {
    "one row": (row_times_matrix(4096, 4096), (1,)),
    "rows": (matmul(8, 4096, 4096, "bf16"), (1,)),
    "int4": (large(1), (1, 2, 3)),
    "softmax": (softmax_kernel(64, 4096), (0,)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize("name", GPU_KERNELS)
def test_the_wait_is_after_reads_of_weights_and_before_all_other_accesses(name: str, signal: Signal) -> None:
    kernel, unwritten = GPU_KERNELS[name]
    printed = waiting(print_triton(kernel), unwritten, signal)
    text: str = compiled(printed).asm["ptx"]
    assert not SPILLED.search(text)
    assert text.count("griddepcontrol.launch_dependents") == text.count("griddepcontrol.wait") == 1
    before, _, after = text.partition("griddepcontrol.wait")
    assert ("ld.global" in before) == (name != "rows"), "a step that is no loop reads weights early"
    assert not re.search(r"st\.global|red\.|atom\.|\bret;|\bexit;", before) and "st.global" in after
    signalled, _, rest = text.partition("griddepcontrol.launch_dependents")
    assert ("griddepcontrol.wait" in rest) == (signal is Signal.AT_START)
    assert ("st.global" in signalled) == (signal is Signal.AT_END)
    old: str = compiled(printed, 80).asm["ptx"]
    assert "griddepcontrol" not in old
