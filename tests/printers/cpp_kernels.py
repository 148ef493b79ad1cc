"""Kernels for tests of the C++ printer, and their comparison with the evaluator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from fxwrap.loop_ir import INTEGERS, ZERO, Axis, Buffer, Index, Kernel, KernelBuilder, evaluate_kernel, linearize_index
from fxwrap.printers.cpp import print_cpp_kernel
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.kernels import load_kernel, prepare_kernels
from fxwrap.symbolic import evaluate

F32, BF16 = torch.float32, torch.bfloat16


def random_tensor(buffer: Buffer, size: int, seed: int) -> torch.Tensor:
    """Random elements of a buffer's dtype; integers small enough to repeat."""
    generator = torch.Generator().manual_seed(seed)
    if buffer.dtype is torch.bool:
        return torch.rand(size, generator=generator) < 0.5
    if buffer.dtype in INTEGERS:
        return torch.randint(0, 9, (size,), generator=generator).to(buffer.dtype)
    return torch.randn(size, generator=generator).to(buffer.dtype)


def check(
    kernel: Kernel,
    numbers: Mapping[str, int] | None = None,
    arguments: Mapping[str, torch.Tensor] | None = None,
    rtol: float = 1e-5,
    preamble: str = "",
) -> str:
    """Runs a kernel in C++ and by the evaluator in float64 where it can; returns its source.

    `preamble` precedes the source. An element of a sum may be near zero: its error is beside the median element too.
    """
    values = dict(numbers or {})
    printed = print_cpp_kernel(kernel)

    def size(buffer: Buffer) -> int:
        extent = buffer.extent
        return extent if isinstance(extent, int) else int(evaluate(extent, values))

    buffers = {item.name: random_tensor(item, size(item), place) for place, item in enumerate(kernel.inputs)}
    buffers |= {item.name: random_tensor(item, size(item), 99 + place) for place, item in enumerate(kernel.outputs)}
    buffers |= arguments or {}
    wanted = {name: tensor.clone() for name, tensor in buffers.items()}
    evaluate_kernel(kernel, wanted, values)
    launch = load_kernel("cpp", preamble + printed.source, printed.signature, printed.options)
    launch((1, 1, 1), *buffers.values(), *[values[symbol.name] for symbol in kernel.symbols])
    for item in kernel.outputs:
        tolerance = 1e-2 if item.dtype in (BF16, torch.float16) else rtol if item.dtype.is_floating_point else 0
        typical = wanted[item.name].double().abs().nanmedian().nan_to_num(0, 0).item() if tolerance else 0
        torch.testing.assert_close(
            buffers[item.name],
            wanted[item.name],
            rtol=tolerance,
            atol=tolerance * max(typical, 1),
            equal_nan=True,
            msg=lambda text: f"{text}\n{printed.source}",
        )
    return printed.source


def reduction(
    kind: str, dtype: torch.dtype, sizes: tuple[int, ...], reduced: tuple[int, ...], loaded: torch.dtype | None = None
) -> Kernel:
    """A reduction over some dimensions of a contiguous tensor, storing all its results."""
    body = KernelBuilder()
    axes = [Axis(f"i{place}", size) for place, size in enumerate(sizes)]
    parallel = [axis for place, axis in enumerate(axes) if place not in reduced]
    value = body.load("x", linearize_index(axes, sizes), loaded or dtype).to(dtype)
    at = linearize_index(parallel, [axis.size for axis in parallel]) if parallel else ZERO
    count = 1
    for axis in parallel:
        count *= int(axis.size)
    outputs = []
    total = 1
    for size in sizes:
        total *= size
    for place, result in enumerate(body.reduce(kind, value)):
        body.store(f"out{place}", at, result)
        outputs.append(Buffer(f"out{place}", result.dtype, count))
    return body.finish(parallel, [axes[place] for place in reduced], [Buffer("x", loaded or dtype, total)], outputs)


def pointwise(formula: Callable[[KernelBuilder, Axis, Axis], None], rows: int, columns: int, *inputs: Buffer) -> Kernel:
    """A kernel over a matrix whose formula stores to `out`."""
    body, row, column = KernelBuilder(), Axis("row", rows), Axis("column", columns)
    formula(body, row, column)
    return body.finish([row, column], [], inputs, [Buffer("out", F32, rows * columns)])


def matrix(row: Axis, column: Axis) -> Index:
    """The offset in a contiguous matrix."""
    return linearize_index((row, column), (row.size, column.size))


def compiled_together(kernel_of: Callable[..., Kernel]) -> Any:
    """Returns a fixture that compiles the kernels of a test's cases together, which takes a fraction of the time.

    `kernel_of` has the parameters of the test. Kernels of cases that are skipped are not compiled.
    """

    @pytest.fixture(scope="module")
    def compile_them(request: pytest.FixtureRequest) -> None:
        tests = [item for item in request.session.items if request.node in item.listchain()]
        cases = [
            item.callspec.params
            for item in tests
            if isinstance(item, pytest.Function)
            and request.fixturename in item.fixturenames
            and not item.get_closest_marker("skip")
        ]
        printed = [print_cpp_kernel(kernel_of(**case)) for case in cases]
        prepare_kernels(tuple([KernelText(item.language, item.source, item.signature) for item in printed]))

    return compile_them
