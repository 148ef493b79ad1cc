"""Matmuls that store the input of their GELU on a fake device: the library's call, and its layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fxwrap
from fxwrap.converters.cpp import to_cpp
from fxwrap.runtime.native import NativeProgram, compile_cpp, load_program
from tests.runtime.launch.fake_driver import FakeDriver
from tests.runtime.launch.test_matmuls import Memory, expect_operator_fallback

ROWS, TERMS, COLUMNS = 8, 8, 16

_LAYOUTS = {"by rows": "{0}, {1} | {1}, 1", "by columns": "{0}, {1} | 1, {0}", "unaligned": "{0}, {1} | 9, 1"}
_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}


@cache
def _program(bias: str, left: str, right: str, dtype: str) -> NativeProgram:
    """A program of the operator on views of flat tensors; its bias is "%bias" or "none"."""
    gpu = "@cuda:0"
    result = f"{dtype}[{ROWS}, {COLUMNS}]{gpu}"
    sizes = {"a": 128, "b": 128, "bias": COLUMNS}
    operands = ", ".join([f"%{item}: borrowed {dtype}[{size}]{gpu}" for item, size in sizes.items()])
    text = "\n".join([
        f"program @fused({operands}) {{",
        f"  %left = memory.view(%a) : {dtype}[{_LAYOUTS[left].format(ROWS, TERMS)}]{gpu}",
        f"  %right = memory.view(%b) : {dtype}[{_LAYOUTS[right].format(TERMS, COLUMNS)}]{gpu}",
        f"  %x, %y = extern.call @fxwrap.gelu_matmul.default(%left, %right, {bias}) : {result}, {result}",
        "  control.return(%x, %y)", "}\n",
    ])  # fmt: skip
    return load_program(compile_cpp(to_cpp(fxwrap.parse(text)).source, name="fused"))


@cache
def _matrix_program(dtype: str) -> NativeProgram:
    """A program that returns memory as a matrix of the results' size."""
    text = "\n".join([
        f"program @matrix(%memory: borrowed {dtype}[{ROWS * COLUMNS}]@cuda:0) {{",
        f"  %result = memory.view(%memory) : {dtype}[{ROWS}, {COLUMNS}]@cuda:0", "  control.return(%result)", "}\n",
    ])  # fmt: skip
    return load_program(compile_cpp(to_cpp(fxwrap.parse(text)).source, name="matrix"))


@pytest.fixture
def allocated(driver: FakeDriver) -> Iterator[list[Tensor]]:
    """The memory, on the host, of the tensors that operators allocate on the fake device."""
    memory: list[Tensor] = []

    def empty(sizes: Sequence[int], *, dtype: torch.dtype, **_others: object) -> Tensor:
        tensor = driver.tensor(torch.Size(sizes).numel(), dtype)
        memory.append(driver.memory().view(*sizes))
        (result,) = _matrix_program(_NAMES[dtype])(tensor)
        return result

    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", empty, "CUDA")
    yield memory
    library._destroy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layouts", [("by rows", "by rows"), ("by columns", "by columns")], ids="-".join)
@pytest.mark.parametrize("biased", [True, False])
def test_both_results_of_one_call(
    biased: bool, layouts: tuple[str, str], dtype: torch.dtype, driver: FakeDriver, allocated: list[Tensor]
) -> None:
    memory = Memory(driver, dtype)
    bias = driver.tensor(COLUMNS, dtype)
    added = driver.memory().copy_(torch.linspace(-1, 1, COLUMNS))
    left, right = memory.matrix(0, ROWS, TERMS, layouts[0]), memory.matrix(1, TERMS, COLUMNS, layouts[1])
    product = left @ right + added.float() if biased else left @ right
    expected = (F.gelu(product, approximate="tanh"), product)
    run = _program("%bias" if biased else "none", *layouts, _NAMES[dtype])
    for _ in range(2):
        run(memory.tensors[0], memory.tensors[1], bias)
        torch.testing.assert_close(tuple(allocated[-2:]), tuple([item.to(dtype) for item in expected]))
    log = driver.log()
    assert [line.split()[0] for line in log].count("multiply") == 2
    assert all(line.endswith("with parts in float32") for line in log if line.startswith("plan"))


@pytest.mark.parametrize("failing", ["algorithms", "cublasLtMatmul"])
def test_calls_that_the_library_rejects_are_operators(
    failing: str, driver: FakeDriver, allocated: list[Tensor]
) -> None:
    memory, bias = Memory(driver, skipped=1), driver.tensor(COLUMNS, torch.bfloat16)
    driver.set(failing, 15)
    try:
        for _ in range(2):
            with expect_operator_fallback():
                _program("none", "by rows", "by rows", "bf16")(*memory.tensors[:2], bias)
    finally:
        driver.set(failing, 0)


def test_matmuls_of_unaligned_rows_are_operators(driver: FakeDriver, allocated: list[Tensor]) -> None:
    memory, bias = Memory(driver), driver.tensor(COLUMNS, torch.bfloat16)
    with expect_operator_fallback():
        _program("none", "unaligned", "by rows", "bf16")(*memory.tensors[:2], bias)
    assert not driver.log()
