"""A private device type: registered with torch in C++, and with fxwrap by one call.

Its kernels are those of the tests' imaginary device (`tests/devices/`, docs/devices.md). A model of the test suite runs
on it with every emitter and is compared with eager PyTorch on the CPU. It needs the tests' packages (`make test`).

    python -m examples.private_device.run [MODEL [EMITTER...]]
"""

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import fxwrap
from examples.private_device.torch_half import load_torch_half
from fxwrap.devices import DeviceRuntime, DeviceSpec, KernelRuntime, register
from tests.devices import abacus, abacus_runtime
from tests.devices.copy_engine import LINES, stage_inputs
from tests.support.models import MODELS


def load(source: str, signature: tuple[str, ...], options: tuple[tuple[str, Any], ...]) -> Callable[..., None]:
    """Returns the launcher of a kernel, which accesses the device's memory in place."""
    launch = abacus_runtime.load(source, signature, options)
    return lambda grid, *arguments: launch(grid, *map(_in_place, arguments))


def _in_place(item: object) -> object:
    if not isinstance(item, torch.Tensor):
        return item
    count = item.untyped_storage().nbytes() // item.itemsize - item.storage_offset()
    if count == 0:
        return torch.empty(0, dtype=item.dtype)
    return torch.frombuffer((ctypes.c_char * (count * item.itemsize)).from_address(item.data_ptr()), dtype=item.dtype)


def main(name: str = "bert", *emitters: str) -> None:
    """Runs a model with some emitters, or with each."""
    load_torch_half()
    register(
        DeviceSpec(
            "npu", "abacus", supports_multiple_devices=False, supports_streams=False, asserts_raise=True,
            cpu_rounding=True, supports_all_atomics=True,
        ),
        printer=abacus.print_abacus, language=abacus.LANGUAGE, lines=LINES,
        runtime=DeviceRuntime(kernels=KernelRuntime(load)),
    )  # fmt: skip
    case = MODELS[name]
    model, inputs = case.build(seed=0, layers=1), case.inputs(seed=1)
    with torch.no_grad():
        expected = tree_leaves(model(**inputs))
        model, moved = model.to("npu"), {name: item.to("npu") for name, item in inputs.items()}
        for emitter in emitters or ("python", "cpp", "fx", "interpreter"):
            abacus_runtime.WORK.clear()
            options = {"emitter": emitter, "passes": [fxwrap.Pass(stage_inputs, key="1")]}
            results = tree_leaves(torch.compile(model, backend="fxwrap", options=options)(**moved))
            errors = [float((one.cpu() - other).abs().max()) for one, other in zip(results, expected, strict=True)]
            print(f"{emitter:12} largest error {max(errors):.1e}, {dict(abacus_runtime.WORK)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
