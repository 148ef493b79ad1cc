"""A template for a vendor's package, which registers a device with fxwrap when it is imported.

Copy it and replace the four marked parts. As it stands, the device is that of `examples/private_device`: its kernels
are the text of the loop IR, and fxwrap's reference evaluator runs them. It passes the conformance suite:

    python -m fxwrap conformance --device npu --import examples.vendor_template
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from examples.private_device.torch_half import load_torch_half
from fxwrap.devices import DeviceRuntime, DeviceSpec, KernelLanguage, KernelRuntime, register
from fxwrap.loop_ir import evaluate_kernel, parse_kernel
from fxwrap.printers import KernelRequest, PrintedKernel
from fxwrap.symbolic import symbol_kind
from fxwrap.wrapper_ir import DTYPES

SPEC = DeviceSpec(  # 1. What the device can do: docs/devices.md describes each field.
    "npu", kernel_language="npu_ir", supports_multiple_devices=False, supports_streams=False, asserts_raise=True,
    cpu_rounding=True, supports_all_atomics=True,
)  # fmt: skip
_ENTRIES = {dtype: "i1" if name == "bool" else name for name, dtype in DTYPES.items()}
_NUMBERS = {"int": "i64", "float": "f64", "bool": "i1"}


def print_npu(request: KernelRequest) -> Sequence[Callable[[], PrintedKernel]]:
    """Returns the ways to print a kernel, the best guess first."""
    kernel = request.kernel
    entries = [f"*{_ENTRIES[buffer.dtype]}" for buffer in (*kernel.inputs, *kernel.outputs)]
    entries += [_NUMBERS[symbol_kind(symbol.name)] for symbol in kernel.symbols]
    text = str(kernel)  # 2. The kernel as text: walk `kernel.operations`, or raise FxwrapError to decline it.
    return (partial(PrintedKernel, SPEC.kernel_language, text, tuple(entries)),)


def load_npu(text: str, signature: tuple[str, ...], options: tuple[tuple[str, Any], ...]) -> Callable[..., None]:
    """Returns the launcher of a kernel's text, called with a grid, inputs, outputs and numbers."""
    kernel = parse_kernel(text)  # 3. Compile the text here.
    buffers, symbols = (*kernel.inputs, *kernel.outputs), [symbol.name for symbol in kernel.symbols]

    def launch(_grid: Sequence[int], *arguments: Any) -> None:
        memory = dict(zip([buffer.name for buffer in buffers], map(_memory, arguments)))
        copies = {name: elements.cpu() for name, elements in memory.items()}
        evaluate_kernel(kernel, copies, dict(zip(symbols, arguments[len(buffers) :])))
        for buffer in kernel.outputs:
            memory[buffer.name].copy_(copies[buffer.name])

    return launch


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory from a tensor's first element on, which is what a kernel knows of it."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    return tensor.as_strided((count,), (1,))


load_torch_half()  # 4. Import torch's half of the device: tensors, operators or a fallback, the device's module.
register(
    SPEC,
    printer=print_npu,
    language=KernelLanguage(SPEC.kernel_language, file_extension="txt"),
    runtime=DeviceRuntime(kernels=KernelRuntime(load=load_npu)),
)
