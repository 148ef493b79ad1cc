"""Triton binaries of saved programs and of workers, by kernel; launchers load them instead of compiling."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fxwrap.runtime.triton.variants import TritonVariant, variant_of

_LAUNCH_FILE_SUFFIXES = (".json", ".ptx", ".cubin", ".hsaco")
"""The files that a launch needs; the others are intermediate stages."""

_MAX_KERNELS = 4096
"""Kernels whose binaries stay in memory; Triton compiles those that were evicted again."""


@dataclass(frozen=True)
class TritonBinary:
    """A compiled kernel: Triton's cache key and files by name.

    `variant` is the form for fxwrap's own launches; None where only Triton can launch it.
    """

    key: str
    files: Mapping[str, bytes]
    variant: TritonVariant | None


class WorkerKernel:
    """A kernel that a worker compiled, with the attributes of Triton's compiled kernels that `triton_binary` reads.

    Raises OSError, KeyError or ValueError if its files are not in Triton's cache.
    """

    def __init__(self, described: Mapping[str, Any]) -> None:
        self.hash: str = described["hash"]
        self.metadata_group: Mapping[str, str] = described["files"]
        contents = {Path(name).suffix: Path(path) for name, path in self.metadata_group.items()}
        metadata = json.loads(contents[".json"].read_bytes())
        self.metadata = SimpleNamespace(**{**metadata, "target": SimpleNamespace(**metadata["target"])})
        self.asm = {"ptx": contents[".ptx"].read_text(), "cubin": contents[".cubin"].read_bytes()}
        self.src = SimpleNamespace(
            fn=SimpleNamespace(arg_names=described["names"]), signature=described["signature"],
            constants={tuple(path): item for path, item in described["constants"]},
            attrs={tuple(path): item for path, item in described["attributes"]},
        )  # fmt: skip


def triton_binary(compiled: Any, constants: Collection[str]) -> TritonBinary:
    """Returns a kernel that Triton compiled in the form of saved programs. `constants` are its constant parameters."""
    files = {name: Path(path) for name, path in compiled.metadata_group.items() if name.endswith(_LAUNCH_FILE_SUFFIXES)}
    contents = {name: path.read_bytes() for name, path in sorted(files.items())}
    return TritonBinary(compiled.hash, contents, variant_of(compiled, constants))


_LOCK = threading.Lock()
_PREBUILT: OrderedDict[str, dict[str, TritonBinary]] = OrderedDict()


def register_prebuilt_triton(symbol: str, binary: TritonBinary) -> None:
    """Registers a binary of the kernel with this symbol."""
    with _LOCK:
        _PREBUILT.setdefault(symbol, {}).setdefault(binary.key, binary)
        if len(_PREBUILT) > _MAX_KERNELS:
            _PREBUILT.popitem(last=False)


def find_prebuilt_triton(symbol: str) -> list[TritonBinary]:
    """Returns the registered binaries of a kernel."""
    with _LOCK:
        return list(_PREBUILT.get(symbol, {}).values())


def has_prebuilt_variant(symbol: str, capability: int) -> bool:
    """Whether a registered variant was compiled for this compute capability (90 for 9.0) and needs no Triton."""
    variants = [item.variant for item in find_prebuilt_triton(symbol)]
    return any(variant is not None and variant.capability == capability for variant in variants)
