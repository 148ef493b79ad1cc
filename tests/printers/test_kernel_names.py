"""Names of kernels in profilers and debuggers: they describe the computation."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.converters.emitted_program import kernel_texts
from fxwrap.devices.kernel_names import find_function_name, make_function_name
from fxwrap.printers import PrintedKernel
from fxwrap.runtime.native import compiled_kernels
from fxwrap.wrapper_ir import KernelDefinition
from tests.printers.test_triton_printer_compile import compiled


def lowered(function: Callable[..., Any], *sizes: tuple[int, ...], **options: Any) -> fxwrap.Program:
    inputs = [torch.zeros(size) for size in sizes]
    return fxwrap.lower(make_fx(function)(*inputs), inputs, options=fxwrap.Options(**options))


def triton_kernels(function: Callable[..., Any], *sizes: tuple[int, ...]) -> tuple[KernelDefinition, ...]:
    return lowered(function, *sizes, cpu_kernels="triton").kernels


def test_gpu_kernels_have_descriptive_names() -> None:
    (kernel,) = triton_kernels(lambda x: (x * 0.5).softmax(-1), (8, 1024))
    name = find_function_name(kernel.source)
    assert re.fullmatch(r"fxwrap_mul_softmax_[0-9a-f]{8}", name)
    binary = compiled(PrintedKernel(kernel.language, kernel.source, kernel.signature, kernel.options))
    assert binary.metadata.name == binary.name == name, "the name that Triton launches and reports to profiler hooks"
    assert f".text.{name}\0".encode() in binary.asm["cubin"], "the name that the driver and profilers see"
    assert binary.metadata_group[f"{name}.cubin"].endswith(f"{name}.cubin"), "the files in Triton's cache folder"


def test_name_collisions_are_numbered_and_equal_kernels_shared() -> None:
    names = [
        [find_function_name(kernel.source) for kernel in triton_kernels(lambda x: x.sin().sum(0).cos(), size)]
        for size in [(64, 32), (64, 32), (96, 40)]
    ]
    assert names[0] == names[1] and not {*names[0]} & {*names[2]}
    layers = triton_kernels(lambda x: torch.mm(torch.mm(x, x.t()).relu(), x.t()).relu(), (8, 8))
    assert [kernel.name for kernel in layers] == ["relu_0"]


def test_cpu_kernels_have_descriptive_symbols() -> None:
    program = lowered(lambda x, y: torch.nn.functional.gelu(x + y), (256, 1024), (1024,))
    fxwrap.to_python(program)(torch.ones(256, 1024), torch.ones(1024))
    (kernel,) = kernel_texts(program)
    library = compiled_kernels((kernel.symbol,))[kernel.symbol].read_bytes()
    assert re.fullmatch(r"fxwrap_add_gelu_[0-9a-f]{24}", kernel.symbol)
    assert re.search(rf"\0{kernel.symbol}\.\w+".encode(), library), "what its threads run"


@pytest.mark.parametrize("readable", ["add", "x" * 1000, "not an identifier!", "kernel", "1"])
def test_names_are_identifiers_of_bounded_length(readable: str) -> None:
    for name in (make_function_name(readable), make_function_name(readable, "content")):
        assert name.isidentifier() and name.isascii() and len(name) <= 120
        assert find_function_name(f"def helper(a):\n    ...\n\n\ndef {name}(x):\n    ...\n") == name
        assert find_function_name(f'extern "C" void {name}(float* x) {{}}\n') == name
    assert make_function_name(readable, "one") != make_function_name(readable, "other")


def test_user_kernels_keep_their_names() -> None:
    assert make_function_name("") == find_function_name("@triton.jit\ndef kernel(x):\n    pass\n") == "kernel"
    assert find_function_name('extern "C" int helper();\nextern "C" void kernel(float* x) {}\n') == "kernel"
