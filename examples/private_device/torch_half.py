"""torch's half of a private device: the library of npu.cpp, compiled once per content, and the device's name."""

import hashlib
import os
import subprocess
import types
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths, library_paths

SOURCE = Path(__file__).with_name("npu.cpp")


def load_torch_half() -> None:
    """Compiles and loads the library, and registers the device type "npu" and its module with torch."""
    torch.ops.load_library(str(_library()))
    torch.utils.rename_privateuse1_backend("npu")
    module: Any = types.ModuleType("torch.npu")
    module.is_available, module.device_count, module.current_device = lambda: True, lambda: 1, lambda: 0
    module._is_in_bad_fork, module.manual_seed_all = lambda: False, lambda _seed: None
    torch._register_device_module("npu", module)
    torch.utils.generate_methods_for_privateuse1_backend()


def _library() -> Path:
    digest = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fxwrap-examples"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    library = folder / f"npu_{digest}.so"
    if not library.exists():
        flags = [*[f"-I{path}" for path in include_paths()], *[f"-L{path}" for path in library_paths()]]
        part = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-shared", "-fPIC", str(SOURCE), "-o", str(part), *flags]
        subprocess.run([*command, "-ltorch_cpu", "-lc10"], check=True)
        part.replace(library)
    return library
