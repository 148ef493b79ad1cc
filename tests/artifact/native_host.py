"""The test driver of the C runtime: a program without Python and torch that opens saved programs and runs them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from fxwrap.runtime import cache_folder
from fxwrap.runtime.native import build_runtime, find_compiler, native_entry_key, run_compiler
from fxwrap.torch_compat import DTYPE_NAMES

SOURCE = Path(__file__).with_name("native_driver.cpp")


@dataclass(frozen=True)
class DriverRun:
    """A run of the driver: its exit code, its lines of output, and its errors."""

    code: int
    lines: tuple[str, ...]
    errors: str


@cache
def driver() -> Path:
    """Returns the compiled driver, which is linked with libfxwrap_runtime only."""
    runtime = build_runtime()
    flags = ["-std=c++17", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror", f"-I{runtime / 'include'}"]
    return built_program(SOURCE, flags, [f"-L{runtime}", "-lfxwrap_runtime", f"-Wl,-rpath,{runtime}"])


def built_program(source: Path, flags: Sequence[str], links: Sequence[str]) -> Path:
    """Returns the compiled program of a C++ file, from the cache folder if it is there."""
    compiler = find_compiler()

    def build(folder: Path) -> None:
        run_compiler([*compiler.command, *flags, str(source), *links, *compiler.runtime, "-o", source.stem], folder)
        (folder / f"{source.stem}.so").write_bytes(b"")  # an entry of the cache has a library

    key = native_entry_key(compiler, *flags, *links, source.read_text())
    return cache_folder.find_or_build_entry(f"test-{source.stem}-{key}", build) / source.stem


def drive(*arguments: object, **environment: str) -> DriverRun:
    """Runs commands of the driver."""
    done = subprocess.run(
        [driver(), *map(str, arguments)], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    return DriverRun(done.returncode, tuple(done.stdout.splitlines()), done.stderr)


def tensor_commands(folder: Path, tensors: Sequence[torch.Tensor], command: str = "tensor") -> list[str]:
    """Writes tensors to files and returns the commands that pass them."""
    words = []
    for tensor in tensors:
        words += [command, *described(folder, tensor)]
    return words


def described(folder: Path, tensor: torch.Tensor) -> list[str]:
    """Writes a tensor to a file; returns its dtype, sizes and file for the driver."""
    file = folder / f"{len(list(folder.iterdir()))}.raw"
    file.write_bytes(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return [DTYPE_NAMES[tensor.dtype], ",".join(map(str, tensor.shape)), str(file)]


def read_result(file: Path, like: torch.Tensor) -> torch.Tensor:
    """Returns a result that the driver wrote, with the dtype and the sizes of another tensor."""
    content = bytearray(file.read_bytes())
    return torch.frombuffer(content, dtype=like.dtype).reshape(like.shape) if content else torch.empty_like(like)
