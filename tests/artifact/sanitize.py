"""Runs the C runtime under sanitizers of threads and addresses: `make sanitize`.

The runtime and the test driver are compiled with a sanitizer; libtorch is not. Errors in the runtime are reported, and
memory that is never released; reports from within libraries that are not compiled with it are suppressed by their name.

    python -m tests.artifact.sanitize [--threads 16] [--calls 100000] [--openings 32] [--sanitizers thread,address]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

import fxwrap
from fxwrap.runtime import cache_folder
from fxwrap.runtime.native import build_runtime, find_compiler, native_entry_key, run_compiler
from fxwrap.runtime.native.runtime_library import project_sources, runtime_sources, write_runtime_target
from tests.artifact.native_host import SOURCE, described, driver, tensor_commands
from tests.artifact.programs import batch
from tests.artifact.test_native_host import compile_affine

SUPPRESSIONS = {
    "thread": [f"{kind}:{library}" for kind in ("race", "called_from_lib")
               for library in ("libtorch_cpu.so", "libgomp.so", "libc10.so")],
    "address": [f"leak:{library}" for library in ("libtorch_cpu.so", "libc10.so", "libgomp.so")],
}  # fmt: skip
"""Reports that are ignored: those whose stack is in a library that is not compiled with the sanitizer."""


@dataclass(frozen=True)
class Amounts:
    """Numbers of threads, of calls in all, and of threads that open a file."""

    threads: int
    calls: int
    openings: int


@cache
def is_available(sanitizer: str) -> bool:
    """Returns whether the compiler has the sanitizer's library, and its programs run on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "probe.cpp").write_text("int main() {}\n")
        command = [*find_compiler().command, f"-fsanitize={sanitizer}", "probe.cpp", "-o", "probe"]
        compiled = subprocess.run(command, cwd=folder, capture_output=True, check=False)
        return compiled.returncode == 0 and subprocess.run([Path(folder) / "probe"], check=False).returncode == 0


@cache
def build(sanitizer: str) -> Path:
    """Returns the driver with its runtime, compiled with a sanitizer, from the cache or now."""
    compiler, runtime = find_compiler(), build_runtime()
    headers = [f"-I{runtime / 'include'}", f"-I{runtime_sources()[0].parents[1]}"]
    flags = ["-std=c++20", "-O0", "-g1", "-pthread", f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer", *headers]

    def build_all(folder: Path) -> None:
        (folder / "runtime.cpp").write_text("".join([f'#include "{source}"\n' for source in runtime_sources()]))
        shared = ["-fPIC", "-fvisibility=hidden", "-shared", "runtime.cpp", "-ldl", "-o", "libfxwrap_runtime.so"]
        run_compiler([*compiler.command, *flags, *shared], folder)
        linked = ["-L.", "-lfxwrap_runtime", "-Wl,-rpath,$ORIGIN", "-o", "driver"]
        run_compiler([*compiler.command, *flags, str(SOURCE), *linked], folder)
        write_runtime_target(folder)
        (folder / "libfxwrap_bridge.so").write_bytes((runtime / "libfxwrap_bridge.so").read_bytes())

    texts = [path.read_text(encoding="utf-8") for path in (*project_sources().values(), SOURCE)]
    key = native_entry_key(compiler, str(runtime), *flags, *texts)
    return cache_folder.find_or_build_entry(f"test-{sanitizer}-{key}", build_all) / "driver"


def run(sanitizer: str, words: Sequence[object], folder: Path) -> tuple[str, str]:
    """Runs commands of the driver, compiled with a sanitizer or, for "", without; returns its first line of output, and
    a failure or ""."""
    file = folder / "suppressions"
    file.write_text("\n".join(SUPPRESSIONS.get(sanitizer, ())))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TSAN_OPTIONS": f"suppressions={file} ignore_noninstrumented_modules=1 exitcode=66",
        "ASAN_OPTIONS": "detect_leaks=1:exitcode=66",
        "LSAN_OPTIONS": f"suppressions={file}:print_suppressions=0:exitcode=66",
    }
    command = [build(sanitizer) if sanitizer else driver(), *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    is_right = done.returncode == 3 or (done.returncode == 0 and " wrong 0" in done.stdout)
    is_silent = is_right and "Sanitizer" not in done.stderr
    failure = "" if is_silent else f"exit code {done.returncode}\n{done.stderr[-4000:]}"
    return (done.stdout.splitlines() or [""])[0], failure


def runs(sanitizer: str, amounts: Amounts, folder: Path) -> Iterator[tuple[str, str]]:
    """Yields the results of runs with calls, replacements and openings in threads, and with errors."""
    path = folder / "affine.fxw"
    compile_affine(None).save(path, target="native")
    tensors = tensor_commands(folder, [batch()])
    old = {name: tensor.detach() for name, tensor in fxwrap.load(path).program.store.tensors.items()}
    swaps = [word for name, tensor in old.items() for word in ("old_constant", name, *described(folder, tensor))]
    for name, tensor in old.items():
        swaps += ["constant", name, *described(folder, torch.randn_like(tensor))]
    damaged = folder / "damaged.fxw"
    damaged.write_bytes(path.read_bytes()[:4000])
    calls = ["call_in_threads", amounts.threads, amounts.calls // amounts.threads]
    yield run(sanitizer, ["open", path, *tensors, *swaps, *calls], folder)
    yield run(sanitizer, [*tensors, "open_in_threads", amounts.openings, path], folder)
    yield run(sanitizer, ["open", damaged], folder)
    bad_input = tensor_commands(folder, [torch.randn(3, 3)])
    yield run(sanitizer, ["open", path, *bad_input, "run", folder / "out"], folder)


def main(arguments: list[str]) -> int:
    """Returns 0 if every sanitizer was silent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--openings", type=int, default=32)
    parser.add_argument("--sanitizers", default="thread,address")
    chosen = parser.parse_args(arguments)
    silent = True
    for sanitizer in chosen.sanitizers.split(","):
        with tempfile.TemporaryDirectory() as folder:
            for line, failure in runs(sanitizer, Amounts(chosen.threads, chosen.calls, chosen.openings), Path(folder)):
                print(sanitizer, f"failed: {failure}" if failure else "ok", line, flush=True)
                silent = silent and not failure
    return 0 if silent else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
