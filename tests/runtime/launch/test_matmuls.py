"""Matmuls in emitted C++: one plan query, and every layout that the library supports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fxwrap
from fxwrap.converters.cpp import to_cpp
from fxwrap.runtime.native import NativeProgram, compile_cpp, load_program
from tests.runtime.launch.fake_driver import FakeDriver

ROWS, TERMS, COLUMNS = 5, 8, 6

_LAYOUTS = {"by rows": "{0}, {1} | {1}, 1", "by columns": "{0}, {1} | 1, {0}", "padded": "{0}, {1} | {2}, 1"}
"""How a matrix lies in memory, by its sizes and twice its number of columns."""

_CALLS: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "mm": ("@aten.mm.out(%left, %right)", lambda left, right, bias: left @ right),
    "addmm": ("@aten.addmm.out(%bias, %left, %right)", lambda left, right, bias: bias + left @ right),
    "relu": (
        "@aten._addmm_activation.out(%bias, %left, %right)",
        lambda left, right, bias: (bias + left @ right).relu(),
    ),
    "gelu": (
        "@aten._addmm_activation.out(%bias, %left, %right, use_gelu=true)",
        lambda left, right, bias: F.gelu(bias + left @ right, approximate="tanh"),
    ),
}


def program(call: str, left: str = "by rows", right: str = "by rows", *, dtype: str = "bf16", bias: int = COLUMNS,
            result: str = "by rows", name: str = "product") -> NativeProgram:  # fmt: skip
    """A program of a matmul on views of flat tensors; a new name starts without cached plans."""
    sizes = {"left": (ROWS, TERMS, left), "right": (TERMS, COLUMNS, right), "out": (ROWS, COLUMNS, result)}
    views = []
    for matrix, (rows, columns, layout) in sizes.items():
        seen = _LAYOUTS[layout].format(rows, columns, 2 * columns)
        views.append(f"  %{matrix} = memory.view(%{matrix}_memory) : {dtype}[{seen}]@cuda:0")
    parameters = [f"%{item}_memory: {'mutable' if item == 'out' else 'borrowed'} {dtype}[128]@cuda:0" for item in sizes]
    text = "\n".join([
        f"program @{name}({', '.join([*parameters, f'%bias: borrowed {dtype}[{bias}]@cuda:0'])}) {{",
        *views, f"  extern.call {call} outs=(%out)", "  control.return()", "}\n",
    ])  # fmt: skip
    return load_program(compile_cpp(to_cpp(fxwrap.parse(text)).source, name="product"))


def expect_operator_fallback() -> Any:
    """Expects the error of torch's operator for tensors on a missing device."""
    return pytest.raises(RuntimeError, match=r"CUDA|NVIDIA|cuda devices")


class Memory:
    """Tensors on the fake device, and views of their memory on the host."""

    def __init__(self, driver: FakeDriver, dtype: torch.dtype = torch.bfloat16, *, skipped: int = 0, device: int = 0):
        generator = torch.Generator().manual_seed(0)
        self.tensors: list[Tensor] = []
        self.seen: list[Tensor] = []
        for count in (128, 128, 128, COLUMNS):
            self.tensors.append(driver.tensor(count, dtype, skipped=skipped, device=device))
            memory = driver.memory()[skipped:]
            memory.copy_(torch.randn(count, generator=generator))
            self.seen.append(memory)

    def matrix(self, place: int, rows: int, columns: int, layout: str = "by rows") -> Tensor:
        """A matrix in one of the tensors, on the host."""
        steps = {"by rows": (columns, 1), "by columns": (1, rows), "padded": (2 * columns, 1)}[layout]
        return self.seen[place].as_strided((rows, columns), steps).float()


@pytest.mark.parametrize("layouts", [("by rows", "by rows"), ("by rows", "by columns"), ("by columns", "by rows"),
                                     ("by columns", "by columns"), ("padded", "padded")], ids="-".join)  # fmt: skip
@pytest.mark.parametrize("name", _CALLS)
def test_matches_eager(name: str, layouts: tuple[str, str], driver: FakeDriver) -> None:
    memory, (call, eager) = Memory(driver), _CALLS[name]
    left, right = memory.matrix(0, ROWS, TERMS, layouts[0]), memory.matrix(1, TERMS, COLUMNS, layouts[1])
    expected = eager(left, right, memory.seen[3].float()).bfloat16()
    program(call, *layouts)(*memory.tensors)
    torch.testing.assert_close(memory.matrix(2, ROWS, COLUMNS).bfloat16(), expected)


def test_half_precision_into_strided_rows(driver: FakeDriver) -> None:
    memory = Memory(driver, torch.float16)
    left, right = memory.matrix(0, ROWS, TERMS), memory.matrix(1, TERMS, COLUMNS)
    program("@aten.mm.out(%left, %right)", dtype="f16", result="padded")(*memory.tensors)
    torch.testing.assert_close(memory.matrix(2, ROWS, COLUMNS, "padded").half(), (left @ right).half())


def test_one_plan_per_alignment(driver: FakeDriver) -> None:
    run = program("@aten.addmm.out(%bias, %left, %right)", name="asks_once")
    driver.enter(0)
    memory, moved = Memory(driver), Memory(driver, skipped=3)
    for operands in (memory, memory, moved, memory):
        operands.seen[2].zero_()
        run(*operands.tensors)
    asked = ["plan with 32 MiB for 64 64 64 64", "multiply on 100 stream 7 context 100"]
    log = [line.replace("128", "64").replace("256", "64") for line in driver.log()]
    assert log[0] == "library for context 100 mode 2"
    assert log[1:] == [*asked, asked[1], "plan with 32 MiB for 2 2 2 2", asked[1], asked[1]]


def test_the_device_becomes_current(driver: FakeDriver) -> None:
    run = program("@aten.mm.out(%left, %right)")
    driver.enter(0)
    run(*Memory(driver, device=1).tensors)
    log = driver.log()
    assert log[-2:] == ["push 101", "multiply on 101 stream 8 context 101"] and driver.context() == 0


@pytest.mark.parametrize("failing", ["cublasLtCreate", "algorithms", "cublasLtMatmul"])
def test_problems_the_library_rejects_call_the_operator(failing: str, driver: FakeDriver) -> None:
    run = program("@aten.mm.out(%left, %right)", name=f"without_{failing}")
    driver.set(failing, 15)
    try:
        for _ in range(2):
            with expect_operator_fallback():
                run(*Memory(driver).tensors)
    finally:
        driver.set(failing, 0)


@pytest.fixture
def restore_backend_settings() -> Any:
    """Puts torch's choices back."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True


_OTHERS: dict[str, Callable[[], Any]] = {
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "exact sums": lambda: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
}


@pytest.mark.parametrize("name", _OTHERS)
def test_torch_backend_settings_call_the_operator(
    name: str, driver: FakeDriver, restore_backend_settings: None
) -> None:
    run = program("@aten.mm.out(%left, %right)")
    _OTHERS[name]()
    with expect_operator_fallback():
        run(*Memory(driver).tensors)
    assert not driver.log()


@pytest.mark.parametrize(("factor", "bias"), [(2, COLUMNS), (1, 1)])
def test_unsupported_matmuls_call_the_operator(factor: int, bias: int, driver: FakeDriver) -> None:
    """One with a factor, and one with a bias of one number."""
    run = program(f"@aten.addmm.out(%bias, %left, %right, beta={factor})", bias=bias)
    memory = Memory(driver).tensors
    memory[3] = driver.tensor(bias, torch.bfloat16)
    with expect_operator_fallback():
        run(*memory)
