"""The rules of verify_kernel, and the text of kernels."""

from __future__ import annotations

import pytest
import torch

from fxwrap.loop_ir import (
    Axis,
    Buffer,
    Compute,
    Constant,
    DeviceAssert,
    Kernel,
    KernelError,
    Load,
    Operation,
    Reduce,
    ReductionResult,
    Scan,
    Store,
    as_index,
    print_kernel,
    verify_kernel,
)

F32, BOOL, I64 = torch.float32, torch.bool, torch.int64
P, R, OTHER = Axis("p0", 4), Axis("r0", 5), Axis("q", 3)
LOAD = Load("x", as_index(P) * 5 + R, F32)


def kernel(*operations: Operation, reduced: tuple[Axis, ...] = (R,)) -> Kernel:
    return Kernel((P,), reduced, (Buffer("x", F32, 20),), (Buffer("out", F32, 4),), operations)


STORE = Store("out", as_index(P), 1)

BROKEN: dict[str, tuple[Kernel, str]] = {
    "an operand comes later": (kernel(Compute("neg", (1,), F32), LOAD), "does not precede"),
    "a store has no value": (kernel(LOAD, Reduce("sum", (0,), F32), STORE, Compute("neg", (2,), F32)), "no value"),
    "no such buffer": (kernel(Load("y", as_index(P), F32)), "no such buffer"),
    "a load of another dtype": (kernel(Load("x", as_index(P), I64)), "no such buffer"),
    "a foreign axis": (kernel(Load("x", as_index(OTHER), F32)), "does not have"),
    "no such operation": (kernel(LOAD, Compute("invented", (0,), F32)), "no operation invented"),
    "too few operands": (kernel(LOAD, Compute("add", (0,), F32)), "takes 2 operands, not 1"),
    "operands that differ": (
        kernel(LOAD, Constant(1, I64), Compute("add", (0, 1), F32)), "different dtypes: torch.float32, torch.int64"
    ),
    "a dtype outside the domain": (kernel(LOAD, Compute("logical_not", (0,), F32)), "does not take torch.float32"),
    "another result": (kernel(LOAD, Compute("lt", (0, 0), F32)), "its result is torch.bool"),
    "a choice by a number": (kernel(LOAD, Compute("where", (0, 0, 0), F32)), "its condition is torch.float32"),
    "nothing to reduce over": (kernel(Constant(1.0, F32), Reduce("sum", (0,), F32), reduced=()), "0 reduced axes"),
    "no such reduction": (kernel(LOAD, Reduce("median", (0,), F32)), "no such combination as median"),
    "a scan over two axes": (
        kernel(LOAD, Scan("cumsum", (0,), F32), reduced=(R, OTHER)), "the kernel has 2 reduced axes"
    ),
    "a sum of another dtype": (kernel(LOAD, Reduce("sum", (0,), I64)), "its result is torch.float32"),
    "a position is a float": (
        kernel(LOAD, Reduce("argmax", (0,), F32), ReductionResult(1, 1, F32)), "its result is torch.int64"
    ),
    "no such part": (kernel(LOAD, Reduce("welford", (0,), F32), ReductionResult(1, 2, F32)), "no such result"),
    "a store into an input": (kernel(LOAD, Store("x", as_index(P), 0)), "no output"),
    "a store of another dtype": (kernel(Constant(1, I64), Store("out", as_index(P), 0)), "no output"),
    "no such mode": (kernel(LOAD, Store("out", as_index(P), 0, mode="swap")), "no mode swap"),
    "a requirement of a number": (kernel(LOAD, DeviceAssert(0, "must hold")), "its condition is torch.float32"),
    "no such error": (kernel(LOAD, DeviceAssert(0, "must hold", error="type")), "no error type"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_invalid_kernels_are_rejected(case: str) -> None:
    broken, reason = BROKEN[case]
    with pytest.raises(KernelError, match=reason) as caught:
        verify_kernel(broken)
    assert str(caught.value).startswith("operation %")


def test_duplicate_buffer_names_are_rejected() -> None:
    buffer = Buffer("x", F32, 4)
    with pytest.raises(KernelError, match="the same name"):
        verify_kernel(Kernel((P,), (), (buffer,), (buffer,), ()))


def test_stages_and_variance() -> None:
    verified = verify_kernel(
        kernel(
            LOAD,
            Reduce("sum", (0,), F32),
            Compute("div", (0, 1), F32),
            Reduce("max", (2,), F32),
            Store("out", as_index(P), 3),
        )
    )
    assert verified.stages == (0, 0, 1, 1, 2)
    assert verified.varying == (True, False, True, False, False)
    assert verified.reductions == (1, 3) and verified.count == 4 and verified.reduced_count == 5


def test_text() -> None:
    masked = Load("x", as_index(P), F32, 0, 2.0, "aten.pad")
    kernel = Kernel((P,), (), (Buffer("x", F32, 4),), (Buffer("out", F32, 4),), (Constant(True, BOOL), masked, STORE))
    assert print_kernel(kernel) == (
        "kernel(x: f32[4]) -> (out: f32[4]) for [p0: 4] {\n"
        "  %0 = bool True\n"
        "  %1 = f32 load x[p0] if %0 else 2.0  # aten.pad\n"
        "  store out[p0] %1\n"
        "}\n"
    )
