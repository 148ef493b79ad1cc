"""GPU tests: launches through the driver equal eager on any stream, thread and device, and leak nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.devices.kernel_names import find_function_name
from fxwrap.options import EMITTERS
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.kernels import load_kernel
from fxwrap.runtime.triton.binaries import compiled_variants
from fxwrap.wrapper_ir import KernelDefinition, print_kernel
from tests.runtime.launch.kernels import fill

pytestmark = pytest.mark.gpu

SPACE = KernelText(
    "triton",
    """import triton
import triton.language as tl


@triton.jit
def kernel(out_ptr, width, height, BLOCK: tl.constexpr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = (z * height + y) * width + x * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + place, 10000 * z + 100 * y + x, mask=x * BLOCK + tl.arange(0, BLOCK) < width)
""",
    ("*i64", "i64", "i64"),
    (("BLOCK", 16), ("num_warps", 1)),
)
"""Writes where in the grid each program is."""


def launcher(kernel: KernelText) -> Any:
    """The kernel, launched by the bridge."""
    loaded = load_kernel(kernel.language, kernel.source, kernel.signature, kernel.options)
    assert type(loaded).__name__ == "Launcher"
    return loaded


def filled(x: torch.Tensor, count: int, factor: float, flag: bool) -> torch.Tensor:
    """The result of the kernel of `fill`, on zeros."""
    out = torch.zeros_like(x)
    out[:count] = x[:count] * torch.tensor(factor, dtype=torch.float32) if flag else x[:count]
    return out


def through_cpp(kernel: KernelText) -> Callable[..., Any]:
    """The kernel of `fill`, launched by emitted C++ with its variants compiled so far."""
    definition = KernelDefinition("fill", kernel.language, kernel.source, kernel.signature, kernel.options)
    text = """program @filled(%x: borrowed f32[s0]@cuda:0, %out: mutable f32[s0]@cuda:0, s1: int, f0: float, b0: bool) {
  s0 = symbol.size(%x) dim=0
  kernel.launch @fill(%x, s1, f0, b0) outs=(%out) grid=(ceildiv(s0, 64), 1, 1)
  control.return()
}
"""
    emitted = fxwrap.to_cpp(fxwrap.parse(text + print_kernel(definition)))
    _ = emitted.flat
    return emitted


@pytest.mark.parametrize("grid", [(3, 1, 1), (3, 4, 1), (3, 4, 5)], ids=str)
def test_grids(grid: tuple[int, int, int]) -> None:
    launch = launcher(SPACE)
    x, y, z = [torch.arange(size, device="cuda") for size in grid]
    wanted = (10000 * z[:, None, None] + 100 * y[:, None] + x).repeat_interleave(16, dim=-1)[..., :40]
    for _ in range(2):  # by Triton, then by the bridge
        out = torch.full((grid[2], grid[1], 40), -1, device="cuda")
        launch(grid, out, 40, grid[1])
        assert torch.equal(out, wanted)
    launch((0, 1, 1), out, 40, grid[1])
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("count", [1, 16, 17, 160, 200])
def test_every_argument_specialization(count: int, offset: int) -> None:
    """A variant of one argument class never runs for another: Triton omits masks where 16 divides a size."""
    launch, memory = launcher(fill(20)), torch.randn(204, device="cuda")
    x = memory[offset : offset + 200]
    for factor, flag in ((0.1, True), (2, True), (3.0, False)):
        held = -1
        while launch.variant_count != held:  # the last round adds no variant
            held = launch.variant_count
            out = torch.zeros(200, device="cuda")
            launch((4, 1, 1), x, out, count, factor, flag)
            torch.testing.assert_close(out, filled(x, count, factor, flag), rtol=1e-6, atol=0)


def test_emitted_code_launches_kernels_compiled_before_and_after() -> None:
    kernel = fill(21)
    launch, x = launcher(kernel), torch.randn(200, device="cuda")
    launch((4, 1, 1), x, torch.zeros_like(x), 160, 0.5, True)
    assert len(compiled_variants(kernel)) == 1
    run = through_cpp(kernel)
    held = []
    for _ in range(2):
        for count in (160, 17, 1):
            for operand in (x, torch.randn(201, device="cuda")[1:]):
                out = torch.zeros(200, device="cuda")
                run(operand, out, count, 0.5, True)
                torch.testing.assert_close(out, filled(operand, count, 0.5, True), rtol=1e-6, atol=0)
        held.append(launch.variant_count)
    assert held == [7, 7]  # three classes of numbers with two of addresses, and one of these by Python and linked in


@pytest.mark.parametrize("through", [launcher, through_cpp])
def test_streams_threads_and_capture(through: Callable[[KernelText], Any]) -> None:
    kernel = fill(22)
    launch = launcher(kernel)
    x, out = torch.randn(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    grid = (len(x) // 64, 1, 1)
    launch(grid, x, out, len(x), 0.5, True)
    launch_kernel = through(kernel)
    run = launch_kernel if through is through_cpp else lambda x, out, *numbers: launch_kernel(grid, x, out, *numbers)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)  # on the same stream, after the wait: a launch on another one would read the old values
        run(x, out, len(x), 0.5, True)
    stream.synchronize()
    assert out.eq(1.5).all()

    def elsewhere() -> None:
        run(x, out, len(x), 2.0, True)
        torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert out.eq(6.0).all()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(x, out, len(x), 10.0, True)
    assert out.eq(6.0).all()
    x.fill_(7.0)
    graph.replay()
    torch.cuda.synchronize()
    assert out.eq(70.0).all()


def test_the_first_launch_of_emitted_code_may_be_captured() -> None:
    """Its modules are loaded then, which must not end the capture."""
    kernel = fill(23)
    x, out = torch.ones(200, device="cuda"), torch.zeros(200, device="cuda")
    launcher(kernel)((4, 1, 1), x, out, 160, 3.0, True)
    run = through_cpp(kernel)
    out.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(x, out, 160, 0.5, True)
    graph.replay()
    torch.cuda.synchronize()
    assert out[:160].eq(0.5).all() and out[160:].eq(0).all()


def test_a_device_other_than_the_current_one() -> None:
    """On a machine with one this is that one; the fake driver has two, in test_launcher.py."""
    launch = launcher(fill(24))
    for device in [*reversed(range(torch.cuda.device_count()))] * 2:
        x = torch.ones(200, device=f"cuda:{device}")
        out = torch.zeros_like(x)
        launch((4, 1, 1), x, out, 160, 0.5, True)
        assert out[:160].eq(0.5).all() and torch.cuda.current_device() == 0


@pytest.mark.parametrize("emitter", EMITTERS)
def test_whole_graphs(emitter: str) -> None:
    """In autograd's threads too: sizes that are dynamic, kernels with numbers, a backward."""

    def function(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(torch.softmax(x * scale, -1)).sum(0)

    options = {"emitter": emitter, "fallback": "error"}
    compiled = torch.compile(function, backend="fxwrap", options=options, dynamic=True)
    for rows, columns in ((33, 64), (16, 48), (7, 1000)):
        x, scale = torch.randn(rows, columns, device="cuda"), torch.randn(columns, device="cuda")
        wanted_inputs = [item.clone().requires_grad_() for item in (x, scale)]
        inputs = [item.clone().requires_grad_() for item in (x, scale)]
        wanted, result = function(*wanted_inputs), compiled(*inputs)
        wanted.square().sum().backward()
        result.square().sum().backward()
        torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-6)
        for one, other in zip(inputs, wanted_inputs):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_ten_thousand_calls_leak_nothing(emitter: str) -> None:
    x, y = torch.randn(64, 32, device="cuda"), torch.randn(64, 32, device="cuda")
    graph = make_fx(lambda x, y: (torch.softmax(x * y, -1), (x + 1).sum()))(x, y)
    run = fxwrap.compile_graph(graph, (x, y), options=fxwrap.Options(emitter=emitter, check_inputs=False)).flat
    for _ in range(10):
        run(x, y)
    torch.cuda.synchronize()
    before, host = torch.cuda.memory_allocated(), _host_bytes()
    for _ in range(10_000):
        run(x, y)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert _host_bytes() - host < 4 << 20


def _host_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("emitter", [emitter for emitter in EMITTERS if emitter != "interpreter"])
def test_profilers_show_descriptive_kernel_names(emitter: str) -> None:
    x = torch.randn(300, 1024, device="cuda")
    graph = make_fx(lambda x: ((x * 0.5).softmax(-1), x.sin().sum(0)))(x)
    compiled = fxwrap.compile_graph(graph, [x], options=fxwrap.Options(emitter=emitter))
    compiled(x)
    with torch.profiler.profile() as profile:
        compiled(x)
        torch.cuda.synchronize()
    names = [find_function_name(kernel.source) for kernel in compiled.program.kernels]
    assert names and all(name.startswith("fxwrap_") for name in names)
    assert {*names} <= {event.name for event in profile.events()}


def test_driver_errors_are_raised_with_their_message() -> None:
    """A grid beyond any GPU's limit; in a subprocess, since driver errors may persist."""
    script = (
        "import torch\n"
        "from tests.runtime.launch.test_gpu import fill, launcher\n"
        "launch, x = launcher(fill(25)), torch.ones(200, device='cuda')\n"
        "launch((4, 1, 1), x, x, 160, 0.5, True)\n"
        "launch((1, 70000, 1), x, x, 160, 0.5, True)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the launch of kernel 'kernel' over the grid (1, 70000, 1) failed: invalid argument" in done.stderr
