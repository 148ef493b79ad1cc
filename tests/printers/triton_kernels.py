"""How the Triton printer's tests build kernels of the loop IR, and run them: interpreted, beside the evaluator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from fxwrap.loop_ir import Axis, Buffer, Kernel, KernelBuilder, evaluate_kernel, linearize_index
from fxwrap.printers import PrintedKernel
from fxwrap.printers.triton import Configuration, print_triton
from fxwrap.runtime.kernels import load_kernel
from fxwrap.symbolic import evaluate, make_symbol

BF16, F32, F64, I64 = torch.bfloat16, torch.float32, torch.float64, torch.int64


def build(
    axes: Sequence[Axis],
    reduced: Sequence[Axis],
    inputs: Mapping[str, tuple[torch.dtype, int]],
    outputs: Mapping[str, tuple[torch.dtype, int]],
    write: Callable[[KernelBuilder], None],
) -> Kernel:
    """Returns a kernel whose body `write` adds."""
    body = KernelBuilder()
    write(body)
    buffers = [[Buffer(name, *item) for name, item in group.items()] for group in (inputs, outputs)]
    return body.finish(axes, reduced, *buffers)


def random(dtype: torch.dtype, count: int, generator: torch.Generator) -> torch.Tensor:
    """Returns random numbers: normal ones, small integers, or coins."""
    if dtype is torch.bool:
        return torch.rand(count, generator=generator) < 0.5
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator, dtype=F64).to(dtype)
    low = 0 if dtype is torch.uint8 else -7
    return torch.randint(low, 8, (count,), generator=generator).to(dtype)


def check(
    kernel: Kernel,
    configuration: Configuration | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    numbers: Mapping[str, int | float | bool] | None = None,
    tolerance: float | None = None,
    in_place: Mapping[str, torch.Tensor] | None = None,
    transform: Callable[[PrintedKernel], PrintedKernel] = lambda printed: printed,
) -> str:
    """Runs a kernel's text in Triton's interpreter and compares every output with the evaluator's; returns the text."""
    generator = torch.Generator().manual_seed(7)
    known = dict(numbers or {})
    arguments = dict(inputs or {})
    for buffer in kernel.inputs:
        if buffer.name not in arguments:
            arguments[buffer.name] = random(buffer.dtype, int(evaluate(buffer.extent, known)), generator)
    expected: dict[str, torch.Tensor] = {}
    actual: dict[str, torch.Tensor] = {}
    for buffer in kernel.outputs:
        start = (in_place or {}).get(buffer.name)
        if start is None:
            start = torch.full((int(evaluate(buffer.extent, known)),), 77).to(buffer.dtype)
        expected[buffer.name], actual[buffer.name] = start.clone(), start.clone()
    evaluate_kernel(kernel, {**arguments, **expected}, known)
    printed = transform(print_triton(kernel, configuration))
    launch_interpreted(kernel, printed, {**arguments, **actual}, known)
    for name, want in expected.items():
        got = actual[name]
        atol = tolerance or {BF16: 2e-2, torch.float16: 2e-3, F32: 2e-5, F64: 1e-11}.get(want.dtype, 0)
        torch.testing.assert_close(
            got, want, rtol=atol, atol=atol, equal_nan=True, msg=_device_assert(name, printed.source)
        )
    return printed.source


def launch_interpreted(
    kernel: Kernel,
    printed: PrintedKernel,
    tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, int | float | bool] | None = None,
) -> None:
    """Runs a kernel's text in Triton's interpreter on tensors by the names of its buffers."""
    known = dict(numbers or {})
    launch = load_kernel(printed.language, printed.source, printed.signature, printed.options)
    grid = tuple([int(evaluate(size, known)) for size in printed.grid])
    arguments = [tensors[item.name] for item in (*kernel.inputs, *kernel.outputs)]
    launch(grid, *arguments, *[known[str(symbol)] for symbol in kernel.symbols])


def _device_assert(name: str, source: str) -> Callable[[str], str]:
    return lambda message: f"output {name}: {message}\n{source}"


def squares_kernel() -> Kernel:
    """Sums over s1 x s1 elements for each of s0 x s0 places, less the mean over s0 + 1 squared: powers of symbols."""
    s0, s1 = make_symbol("s0"), make_symbol("s1")
    p, q, r, t = Axis("p0", s0), Axis("p1", s0), Axis("r0", s1), Axis("r1", s1)
    cube = Axis("p2", (s0 + 1) ** 2)

    def write(body: KernelBuilder) -> None:
        x = body.load("x", linearize_index([p, q, cube, r, t], [s0, s0, cube.size, s1, s1]), F32)
        (total,) = body.reduce("sum", x)
        body.store("out", linearize_index([p, q, cube], [s0, s0, cube.size]), total)

    parallel = s0**2 * cube.size
    return build([p, q, cube], [r, t], {"x": (F32, parallel * s1**2)}, {"out": (F32, parallel)}, write)


def softmax_kernel(rows: int, size: int, dtype: torch.dtype = BF16) -> Kernel:
    """A softmax over rows, in one kernel of two stages."""
    p, r = Axis("p0", rows), Axis("r0", size)
    position = linearize_index([p, r], [rows, size])
    body = KernelBuilder()
    with body.origin_scope("softmax of model.py:12"):
        x = body.load("x", position, dtype).to(F32)
        largest, total = body.reduce("softmax", x)
        body.store("out", position, ((x - largest).exp() / total).to(dtype))
    buffers = [Buffer("x", dtype, rows * size)], [Buffer("out", dtype, rows * size)]
    return body.finish([p], [r], *buffers)
