"""A fake CUDA driver, and tensors on its devices, to test launches without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fxwrap.runtime import cache_folder
from fxwrap.runtime.native import find_compiler, native_entry_key, override_driver_library, run_compiler

_CODES = {
    torch.uint8: 0, torch.float32: 6, torch.float64: 7, torch.int64: 4, torch.bool: 11, torch.bfloat16: 15,
    torch.float16: 5,
}  # fmt: skip

_LIBRARY = "libfake_driver.so"
_SOURCES = ("fake_driver.cpp", "fake_cublas.cpp", "fake_cudnn.cpp")


@cache
def build() -> Path:
    """Returns the driver as a library, from the cache folder: processes and runs share it."""
    root, compiler = Path(torch.__file__).parent, find_compiler()
    sources = [Path(__file__).with_name(name) for name in _SOURCES]
    command = [
        *(*compiler.command, "-std=c++20", "-O0", "-fPIC", "-shared", *map(str, sources)),
        *("-isystem", str(root / "include"), f"-L{root / 'lib'}", "-lc10", f"-Wl,-rpath,{root / 'lib'}"),
        *(*compiler.runtime, "-o", _LIBRARY),
    ]
    texts = [path.read_text() for path in sorted([*sources, *Path(__file__).parent.glob("*.h")])]
    key = native_entry_key(compiler, *command, *texts)
    entry = f"test-cuda-driver-{key}"
    return cache_folder.find_or_build_entry(entry, lambda folder: run_compiler(command, folder)) / _LIBRARY


class FakeDriver:
    """The driver, in use by the bridge. Devices are 0 and 1, of 9.0; streams are 7 and 8, contexts 100 and 101."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.fake_log.restype = ctypes.c_char_p
        self._library.fake_tensor.restype = ctypes.c_void_p
        self._library.fake_context.restype = ctypes.c_int64
        self._library.fake_descriptors.restype = ctypes.c_int64
        self._memory: list[torch.Tensor] = []
        self.expect("")
        override_driver_library(library)

    def log(self) -> list[str]:
        """Returns the calls of the driver since the last call of this method."""
        lines: list[str] = self._library.fake_log().decode().splitlines()
        self._library.fake_clear()
        return lines

    def set(self, name: str, value: int) -> None:
        """Sets a property ("shared", "stream"), or the answer of a driver function."""
        self._library.fake_set(name.encode(), ctypes.c_int64(value))

    @contextmanager
    def chips(self, *capabilities: int) -> Iterator[None]:
        """Lets the devices be of other chips than 9.0 until the end of the scope."""
        for device, capability in enumerate(capabilities):
            self.set(f"chip {device}", capability)
        yield
        for device in range(len(capabilities)):
            self.set(f"chip {device}", 90)

    def expect(self, kinds: str) -> None:
        """Declares parameter kinds: p a pointer, i and l 32 and 64 bits, b a bool, f a float, d a double."""
        self._library.fake_expect(" ".join(kinds).encode())

    def memory(self) -> torch.Tensor:
        """Returns the newest tensor's memory on the host: the elements that it skips, and its own."""
        return self._memory[-1]

    def enter(self, device: int) -> None:
        """Makes a device's context current, as torch does."""
        self._library.fake_enter(ctypes.c_int64(device))

    def context(self) -> int:
        """Returns this thread's current context."""
        return int(self._library.fake_context())

    def descriptors(self) -> int:
        """Returns the number of live convolution descriptors."""
        return int(self._library.fake_descriptors())

    def tensor(
        self, count: int, dtype: torch.dtype = torch.float32, *, device: int = 0, skipped: int = 0
    ) -> torch.Tensor:
        """Returns a tensor on a device that begins so many elements after an address that 64 divides."""
        memory = torch.zeros(count + skipped, dtype=dtype)
        assert memory.data_ptr() % 64 == 0
        self._memory.append(memory)
        start = ctypes.c_void_p(memory.data_ptr() + skipped * memory.itemsize)
        handle = self._library.fake_tensor(start, ctypes.c_int64(count), _CODES[dtype], device)
        capsule: Any = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        tensor: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(handle, None, None))
        return tensor
