"""What fxwrap knows of a device type. CPU and CUDA are its first two instances."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device type as the compiler sees it.

    `device_type` is torch's name ("cpu", "cuda"); `kernel_language` the language of generated kernels; `alignment` in
    bytes, of allocations and pool offsets; `memory_spaces` the names a tensor type may carry; `prefer_extern` overloads
    ("aten.mm.default") that are called although they could be generated; `runtime` the name under which `runtime/`
    keeps the device's allocator, guard, stream and launcher.
    """

    device_type: str
    kernel_language: str
    alignment: int
    memory_spaces: tuple[str, ...] = ("",)
    prefer_extern: frozenset[str] = frozenset()
    runtime: str = ""

    def __post_init__(self) -> None:
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise ValueError(f"the alignment of {self.device_type} is a power of two, not {self.alignment}")


CPU = DeviceSpec("cpu", kernel_language="cpp", alignment=64, runtime="cpu")
CUDA = DeviceSpec("cuda", kernel_language="triton", alignment=512, runtime="cuda")

DEVICE_SPECS: tuple[DeviceSpec, ...] = (CPU, CUDA)
"""The devices fxwrap itself knows; the default of `Options.devices`."""
